//! Integration tests of pd-transfer: one module per scenario, in `tests/it/`.

#[cfg(test)]
mod it {
    mod conformance;
    mod handoff;
    mod hostile;
    mod processes;
    mod side;
    mod sim;
    mod states;
    mod ucx;
    mod wire;
}
