//! What serving costs beside the model: the plan of a step, the choice of a
//! worker, and streams through HTTP.
//!
//! `--plain` and `--ours` are for its own child processes.
#![expect(clippy::print_stdout, reason = "figures are the output of a bench")]

mod choice;
mod plan;
mod scripted;
mod streams;

fn figure(name: &str, value: f64, unit: &str) {
    println!("figure serving.{name} {value:.2} {unit}");
}

/// The value that so many in a hundred are not above.
fn percentile(values: &mut [f64], percent: usize) -> f64 {
    values.sort_by(f64::total_cmp);
    values[(values.len() - 1) * percent / 100]
}

fn main() -> anyhow::Result<()> {
    let mode = std::env::args().find_map(|arg| streams::Mode::of(&arg));
    if let Some(mode) = mode {
        return scripted::serve(mode);
    }
    plan::run();
    choice::run();
    streams::run()
}
