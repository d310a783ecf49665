//! The long run under faults: requests while either side is killed, stopped, frozen and cut off; a
//! prefill worker frozen in mid-transfer; clients that hang up. A bar that is missed is a failure.
//!
//! Arguments: `--requests N`, `--aborts N`, `--transport shm|tcp|ucx`, `--at-once N`,
//! `--freeze SECONDS`. `DSV4_TEST_SEED` decides on the faults.
#![expect(clippy::print_stdout, reason = "figures are the output of a bench")]

#[path = "../tests/main/e2e/client.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod client;
#[path = "../tests/main/e2e/cluster.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod cluster;
#[path = "../tests/main/e2e/fault_run.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod fault_run;
#[path = "../tests/main/e2e/prompts.rs"]
mod prompts;

use cluster::note;
use fault_run::{Figure, Plan, run};
use std::process::ExitCode;
use std::time::Duration;

fn read(mut words: impl Iterator<Item = String>) -> Result<Plan, String> {
    let seed = std::env::var("DSV4_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    let mut plan = Plan {
        requests: 2_000,
        prompts: 48,
        aborts: 10_000,
        seed: seed.unwrap_or(1),
        transport: "shm".to_owned(),
        at_once: 8,
        freeze: Duration::from_secs(30),
    };
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
        let number = |text: String| match text.parse::<u32>() {
            Ok(n) if n > 0 => Ok(n),
            _ => Err(format!("{text:?} is not a positive number")),
        };
        match word.as_str() {
            "--bench" => {} // from cargo
            "--requests" => plan.requests = number(value()?)? as usize,
            "--aborts" => plan.aborts = number(value()?)? as usize,
            "--at-once" => plan.at_once = number(value()?)? as usize,
            "--freeze" => plan.freeze = Duration::from_secs(number(value()?)?.into()),
            "--transport" => plan.transport = value()?,
            _ => return Err(format!("unknown argument {word:?}")),
        }
    }
    Ok(plan)
}

fn print(plan: &Plan, figures: &[Figure]) {
    println!("\nseed {}, transport {}\n", plan.seed, plan.transport);
    println!("| figure | value | unit | bar | met |");
    println!("|---|---|---|---|---|");
    for figure in figures {
        let Figure { name, value, unit, bar } = figure;
        let met = if figure.is_met() { "yes" } else { "NO" };
        println!("| {name} | {value:.1} | {unit} | {bar} | {met} |");
    }
    println!();
    for Figure { name, value, unit, .. } in figures {
        println!("figure faults.{name} {value:.1} {unit}");
    }
}

fn main() -> ExitCode {
    let plan = match read(std::env::args().skip(1)) {
        Ok(plan) => plan,
        Err(error) => {
            note(&format!("error: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("start the clients' threads");
    let figures = runtime.block_on(run(&plan));
    print(&plan, &figures);
    if figures.iter().all(Figure::is_met) {
        return ExitCode::SUCCESS;
    }
    println!("a bar was missed");
    ExitCode::FAILURE
}
