//! Integration tests, one binary.

#[path = "main/e2e.rs"]
mod e2e;
