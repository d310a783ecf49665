//! What the machine could do at most, and what a model asks of it.

use dsv4_model::weights::{Checkpoint, WeightDtype, WeightSource as _};
use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

/// Bytes that all threads together read from memory in a second, best of several passes.
pub(crate) fn bandwidth(threads: usize) -> f64 {
    const BYTES: usize = 256 << 20;
    let memory = vec![1_u64; BYTES / 8];
    let pass = || {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for part in memory.chunks(memory.len().div_ceil(threads)) {
                scope.spawn(move || black_box(part.iter().fold(0_u64, |a, b| a.wrapping_add(*b))));
            }
        });
        BYTES as f64 / start.elapsed().as_secs_f64()
    };
    (0..8).map(|_| pass()).fold(0.0, f64::max)
}

/// What one token needs of a model's tensors.
pub(crate) struct PerToken {
    /// Bytes of the checkpoint that a decode step of one sequence must read.
    pub(crate) bytes: f64,
    /// Multiplications and additions of its matrices, vocabulary left out.
    pub(crate) flops: f64,
}

/// Sums up a checkpoint: of `experts` routed experts `chosen` count, of the embedding nothing.
pub(crate) fn per_token(checkpoint: &Path) -> PerToken {
    let checkpoint = Checkpoint::open(checkpoint).expect("read the checkpoint");
    let config = checkpoint.config();
    let share = config.num_experts_per_tok as f64 / config.n_routed_experts as f64;
    let (mut bytes, mut flops) = (0.0, 0.0);
    for name in checkpoint.names() {
        let info = checkpoint.info(&name).expect("a listed tensor");
        if name == "embed.weight" || name.ends_with("tid2eid") || name.starts_with("mtp.") {
            continue;
        }
        let part = if name.contains(".experts.") { share } else { 1.0 };
        bytes += part * info.bytes().expect("a size") as f64;
        let is_matrix = info.shape.len() == 2 && !name.ends_with(".scale");
        if is_matrix && !name.ends_with(".ape") && name != "head.weight" {
            let elements: u64 = info.shape.iter().product();
            // Two FP4 numbers share an element.
            let each = if info.dtype == WeightDtype::I8 { 2.0 } else { 1.0 };
            flops += 2.0 * part * each * elements as f64;
        }
    }
    PerToken { bytes, flops }
}
