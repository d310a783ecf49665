//! The same models through llama.cpp and through transformers on PyTorch.

use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where `cargo xtask bench engine --peers` put everything.
const VARIABLE: &str = "DSV4_BENCH_CPU_PEERS";

/// The folder of the other engines.
pub(crate) struct Peers {
    folder: PathBuf,
}

/// Tokens a second by case: `decode.b1`, `prefill.512`, `prefill.2048`.
pub(crate) type Rates = BTreeMap<String, f64>;

impl Peers {
    pub(crate) fn found() -> Option<Self> {
        let folder = PathBuf::from(std::env::var_os(VARIABLE)?);
        Some(Self { folder })
    }

    /// The random model of 450 M parameters.
    pub(crate) fn tiny451(&self) -> PathBuf {
        self.folder.join("models/tiny451")
    }

    /// One round of llama.cpp. A peer that fails ends the bench.
    pub(crate) fn llama(&self, model: &str, threads: usize) -> Rates {
        let gguf = self.folder.join(format!("models/{model}.gguf"));
        let run = |test: &[&str]| {
            let mut command = Command::new(self.folder.join("bin/llama-bench"));
            command.arg("-m").arg(&gguf).args(["-t", &threads.to_string(), "-r", "1"]);
            command.args(["-o", "json"]).args(test);
            let rows: Value = serde_json::from_str(&output(command)).expect("a list of tests");
            rows.as_array().expect("a list of tests").clone()
        };
        let mut rates = Rates::new();
        let prefills = run(&["-p", "512,2048", "-n", "0"]);
        let decodes = run(&["-p", "0", "-n", "32", "-d", "512"]);
        for row in prefills.iter().chain(&decodes) {
            let case = match row["n_prompt"].as_u64() {
                Some(0) | None => "decode.b1".to_owned(),
                Some(tokens) => format!("prefill.{tokens}"),
            };
            rates.insert(case, row["avg_ts"].as_f64().expect("tokens a second"));
        }
        assert_eq!(rates.len(), 3, "three cases");
        rates
    }

    /// transformers, eager BF16: medians of its own rounds.
    pub(crate) fn transformers(&self, checkpoint: &Path, threads: usize) -> Rates {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/peers");
        let mut command = Command::new(self.folder.join("bin/python"));
        command.arg(root.join("transformers_speed.py")).arg(checkpoint).arg(threads.to_string());
        let said = output(command);
        let last = said.lines().last().expect("a line of figures");
        serde_json::from_str(last).expect("figures by case")
    }
}

/// What a program prints; it must end well.
fn output(mut command: Command) -> String {
    let out = command.output().expect("start a peer");
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{command:?}: {}: {stderr}", out.status);
    String::from_utf8(out.stdout).expect("text")
}
