//! Integration tests of the operations.

mod main {
    mod conformance;
    mod invariance;
    mod naive;
    mod refusals;
}
