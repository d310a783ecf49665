//! Integration tests of pd-transfer: one module per scenario, in `tests/it/`.

#[cfg(test)]
mod it {
    mod clauses;
    mod conformance;
    mod fences;
    mod fuzz;
    mod handoff;
    mod hostile;
    mod model;
    mod processes;
    mod races;
    mod side;
    mod sim;
    mod spec;
    mod states;
    mod ucx;
    mod wire;
}
