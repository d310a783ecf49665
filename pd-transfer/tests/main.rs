//! Integration tests of pd-transfer: one module per scenario, in `tests/it/`.

#[cfg(test)]
mod it {
    mod clauses;
    mod conformance;
    mod fan_out;
    mod fences;
    mod fuzz;
    mod group;
    mod handoff;
    mod hostile;
    #[cfg(feature = "tools")]
    mod link_tool;
    mod model;
    mod processes;
    mod races;
    mod ranks;
    mod side;
    mod sim;
    mod spec;
    mod states;
    mod ucx;
    mod wire;
}
