//! Integration tests of the operations.

#[cfg(test)]
mod main {
    mod conformance;
    #[cfg(feature = "cuda")]
    mod gpu;
    mod instructions;
    mod invariance;
    mod naive;
    mod refusals;
}
