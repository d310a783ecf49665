//! Integration tests of the operations.

#[cfg(test)]
mod main {
    mod conformance;
    mod invariance;
    mod naive;
    mod refusals;
}
