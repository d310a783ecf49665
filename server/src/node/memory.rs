//! How many pages the memory of a worker is divided into.

use crate::config::{ConfigError, ServeArgs};
use crate::glue::pools::{POOLS, PageCounts};
use crate::worker::{BOUNDARY_WINDOWS, SPARE_PAGES as SPARE};
use dsv4_model::config::ModelConfig;
use kv_pool::{BLOCK_TOKENS, Geometry, PoolKind, WINDOW_PAGE_ROWS, WINDOW_TOKENS};

const MIB: u64 = 1 << 20;
/// Largest share of memory that is taken without being asked for.
const DEFAULT_MAX: u64 = 1024 * MIB;

/// Memory of the machine in bytes, as Linux reports it.
fn machine_bytes() -> Option<u64> {
    reported("MemTotal:")
}

/// A line of Linux's report about memory, in bytes.
fn reported(name: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

/// Page memory is taken as a whole at the start. More than is there would not be an error of the
/// allocation: the system would end some process to make room.
pub(super) fn ensure_room(geometry: &Geometry, counts: &PageCounts) -> Result<(), ConfigError> {
    let of = |kind| geometry.pool_bytes(kind, counts.of(kind));
    room(POOLS.into_iter().map(of).sum(), reported("MemAvailable:"))
}

/// The same for the host tier of a worker's cache.
pub(super) fn host_room(bytes: u64) -> Result<(), ConfigError> {
    match reported("MemAvailable:") {
        Some(free) if bytes > free => {
            Err(ConfigError::NoHostRoom { needed: bytes.div_ceil(MIB), free: free / MIB })
        }
        _ => Ok(()),
    }
}

/// Whether `bytes` fit into what is free, if that is known.
fn room(bytes: u64, free: Option<u64>) -> Result<(), ConfigError> {
    match free {
        Some(free) if bytes > free => {
            Err(ConfigError::NoRoom { needed: bytes.div_ceil(MIB), free: free / MIB })
        }
        _ => Ok(()),
    }
}

/// Bytes for the pages of one worker: as asked, or a quarter of the machine's and at most 1 GiB.
fn budget(asked_mib: Option<u64>) -> Result<u64, ConfigError> {
    let machine = machine_bytes();
    let Some(mib) = asked_mib else {
        return Ok(machine.map_or(DEFAULT_MAX, |bytes| (bytes / 4).min(DEFAULT_MAX)));
    };
    match machine.map(|bytes| bytes / MIB) {
        Some(machine) if mib > machine => Err(ConfigError::TooMuchMemory { mib, machine }),
        _ => Ok(mib.saturating_mul(MIB)),
    }
}

/// Context length and pages of a worker; needs the model's configuration, not its weights.
pub(super) fn sizes(
    args: &ServeArgs,
    model: &ModelConfig,
    geometry: &Geometry,
) -> Result<(u32, PageCounts), ConfigError> {
    let made_for = u32::try_from(model.max_position_embeddings).unwrap_or(u32::MAX);
    let context_length = args.context_length.unwrap_or(made_for);
    if context_length > made_for || context_length == 0 {
        return Err(ConfigError::Context { wanted: context_length, limit: made_for });
    }
    let shape = Shape {
        step_tokens: args.chunked_prefill_size,
        running: args.max_running_requests,
        context_length,
        keeps_prefixes: !args.disable_radix_cache,
    };
    let counts = divide(geometry, budget(args.kv_memory_mib)?, shape)?;
    Ok((context_length, counts))
}

/// What decides how memory is divided.
#[derive(Clone, Copy, Debug)]
struct Shape {
    /// Tokens of a step.
    step_tokens: u32,
    /// Sequences that may run.
    running: u32,
    /// Tokens of a sequence.
    context_length: u32,
    /// Whether prefixes are kept for later prompts.
    keeps_prefixes: bool,
}

/// Divides `bytes`: window and carry pages for every running sequence (windows at most half of
/// the memory), the same for the ends of kept prefixes (at most an eighth, and half of what could
/// be spared), blocks with the rest. There is room for one sequence of full length at least.
fn divide(geometry: &Geometry, bytes: u64, shape: Shape) -> Result<PageCounts, ConfigError> {
    let per = |kind| geometry.bytes_per_index(kind).max(1);
    let per_sequence = (shape.step_tokens + WINDOW_TOKENS - 1).div_ceil(WINDOW_PAGE_ROWS) + 1;
    let carry = shape.running + SPARE;
    let wanted = u64::from(shape.running) * u64::from(per_sequence) + u64::from(SPARE);
    let floor = u64::from(per_sequence + SPARE);
    let window_in = |bytes: u64| wanted.min((bytes / 2 / per(PoolKind::Window)).max(floor));
    let fixed_in = |bytes: u64| {
        window_in(bytes) * per(PoolKind::Window) + u64::from(carry) * per(PoolKind::Carry)
    };
    // A model without compressed layers needs no bytes for blocks, only their numbers.
    let blocks_in = |bytes: u64, fixed: u64| match geometry.bytes_per_index(PoolKind::Block) {
        0 => 1 << 20,
        each => bytes.saturating_sub(fixed) / each,
    };
    let least = u64::from(shape.context_length.div_ceil(BLOCK_TOKENS) + SPARE);
    let is_enough = |bytes: u64| blocks_in(bytes, fixed_in(bytes)) >= least;
    if !is_enough(bytes) {
        let mib = bytes / MIB;
        // More memory is more windows too, until there are enough of those.
        let needed = (mib + 1..).find(|mib| is_enough(mib * MIB)).unwrap_or(u64::MAX);
        return Err(ConfigError::Memory { mib, context: shape.context_length, needed });
    }
    let (window, fixed) = (window_in(bytes), fixed_in(bytes));
    let needed = fixed + least * per(PoolKind::Block);
    let boundary = u64::from(BOUNDARY_WINDOWS) * per(PoolKind::Window) + per(PoolKind::Carry);
    let spared = bytes.saturating_sub(needed) / 2;
    let boundaries = if shape.keeps_prefixes { (bytes / 8).min(spared) / boundary } else { 0 };
    let boundaries = u32::try_from(boundaries).unwrap_or(u32::MAX).min(1 << 20);
    let blocks = blocks_in(bytes, fixed + u64::from(boundaries) * boundary);
    Ok(PageCounts {
        block: u32::try_from(blocks).unwrap_or(u32::MAX).min(1 << 24),
        window: u32::try_from(window)
            .unwrap_or(u32::MAX)
            .saturating_add(BOUNDARY_WINDOWS * boundaries),
        carry: carry + boundaries,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_pages_than_the_machine_has_room_for_are_refused_with_both_numbers() {
        assert!(room(5 * MIB, Some(5 * MIB)).is_ok());
        assert!(room(u64::MAX, None).is_ok(), "nothing is known");
        let refused = room(5 * MIB + 1, Some(5 * MIB)).expect_err("one byte too many");
        assert!(matches!(refused, ConfigError::NoRoom { needed: 6, free: 5 }), "{refused}");
        assert!(reported("MemAvailable:").is_some_and(|free| free > MIB));
        assert_eq!(reported("MemNothing:"), None);
    }
}
