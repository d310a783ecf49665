//! Sources of `pd-transfer` and `dsa-kernels` that order memory accesses by hand, built with loom's
//! atomics, and models that use them. Run by `cargo xtask test loom`.
//!
//! Each property has a model without one step of the real order, and loom must refute that.

#[cfg(test)]
#[path = "../../dsa-kernels/src/cpu/fast/gate.rs"]
mod gate;
#[cfg(test)]
#[path = "../../pd-transfer/src/guard_word.rs"]
mod guard_word;

#[cfg(test)]
mod gates;
#[cfg(test)]
mod guards;

/// Whether loom finds an execution in which `model` panics.
#[cfg(test)]
fn is_refuted(model: impl Fn() + Sync + Send + std::panic::UnwindSafe + 'static) -> bool {
    std::panic::catch_unwind(|| loom::model(model)).is_err()
}
