//! Integration tests: configuration, checkpoint, forward pass, sampling and tokenizer.
#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

#[path = "main/altered.rs"]
mod altered;
#[path = "main/config.rs"]
mod config;
#[path = "main/golden.rs"]
mod golden;
#[path = "main/gpu.rs"]
mod gpu;
#[path = "main/harness.rs"]
mod harness;
#[path = "main/invariance.rs"]
mod invariance;
#[path = "main/load.rs"]
mod load;
#[path = "main/official.rs"]
mod official;
#[path = "main/refusal.rs"]
mod refusal;
#[path = "main/sample.rs"]
mod sample;
#[path = "main/text.rs"]
mod text;
#[path = "main/weights.rs"]
mod weights;
