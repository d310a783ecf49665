//! Integration tests of pd-transfer: one module per scenario, in `tests/it/`.

mod it {
    mod conformance;
    mod handoff;
    mod processes;
    mod side;
    mod sim;
    mod states;
    mod wire;
}
