//! The xtask program on a small workspace of its own.

#[path = "main/toy.rs"]
mod toy;
