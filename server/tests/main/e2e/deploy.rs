//! The files for a deployment: their flags are flags of this server, their metrics are metrics of it.

use super::client::get;
use super::cluster::{ROOT, Server};
use super::folder::Folder;
use dsv4_server::config::layers;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::Path;

fn text(name: &str) -> String {
    std::fs::read_to_string(Path::new(ROOT).join("docs/deploy").join(name)).expect(name)
}

/// Flags are accepted without the files that they name.
fn accept(name: &str, flags: Vec<String>) {
    assert!(flags.len() > 2, "{name}: {flags:?}");
    let config = flags.iter().position(|flag| flag == "--config");
    let mut args: Vec<OsString> =
        std::iter::once("server".to_owned()).chain(flags).map(OsString::from).collect();
    if let Some(at) = config {
        args.drain(at + 1..at + 3);
        args.push("--worker=http://127.0.0.1:1".into());
    }
    if let Err(error) = layers::parse(args, []) {
        panic!("{name}: {error}");
    }
}

#[test]
fn flags_in_units_and_manifests_are_flags() {
    for role in ["prefill", "decode", "router"] {
        let name = format!("systemd/dsv4-{role}.service");
        let unit = text(&name);
        let line = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).expect("a line");
        accept(&name, line.split_whitespace().skip(1).map(str::to_owned).collect());
        let name = format!("kubernetes/{role}.yaml");
        let manifest = text(&name);
        let args = manifest.lines().map(str::trim).skip_while(|line| *line != "args:").skip(1);
        let args = args.map_while(|line| line.strip_prefix("- ")).filter(|arg| !arg.contains(": "));
        accept(&name, args.map(str::to_owned).collect());
    }
}

/// Names of metrics in a query or a rule.
fn names(text: &str) -> BTreeSet<&str> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let words = text.split(|c| !is_name(c));
    let ours = |word: &&str| {
        ["dsv4:", "dsv4_router:", "sglang:"].iter().any(|prefix| word.starts_with(prefix))
            || *word == "http_requests_total"
    };
    words.filter(ours).map(|word| word.trim_end_matches("_bucket")).collect()
}

#[tokio::test]
async fn metrics_in_dashboard_and_alerts_are_metrics() {
    let folder = Folder::new();
    let flags = format!("--hicache-storage-dir {}", folder.0.display());
    let server = Server::worker("both", &flags);
    let router = Server::router(&[&server], "");
    let mut there = String::new();
    for url in [&server.url, &router.url] {
        there += &get(&format!("{url}/metrics")).await.expect("metrics").text();
    }
    let there: BTreeSet<&str> =
        there.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    for file in ["grafana.json", "alerts.yaml"] {
        let text = text(file);
        let used = names(&text);
        assert!(used.len() >= 6, "{file}: {used:?}");
        let missing: Vec<_> = used.difference(&there).collect();
        assert!(missing.is_empty(), "{file}: {missing:?}");
    }
    let dashboard: serde_json::Value = serde_json::from_str(&text("grafana.json")).expect("JSON");
    assert!(dashboard["panels"].as_array().expect("panels").len() >= 10);
}
