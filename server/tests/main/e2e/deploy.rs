//! The files for a deployment: their flags are flags of this server, their metrics are metrics of it.

use super::client::get;
use super::cluster::{ROOT, Server};
use super::folder::Folder;
use crate::fake;
use crate::router::Front;
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
    let flags = layers::parse(args, []).unwrap_or_else(|error| panic!("{name}: {error}"));
    if flags.cli.command.is_none() {
        flags.cli.serve.validate().unwrap_or_else(|error| panic!("{name}: {error}"));
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

/// Paths and ports of the probes in a manifest.
fn probes(manifest: &str) -> Vec<(String, String)> {
    let gets = manifest.lines().filter_map(|line| line.trim().strip_prefix("httpGet: {path: "));
    let parts = gets.map(|get| get.trim_end_matches('}').split_once(", port: ").expect("a port"));
    parts.map(|(path, port)| (path.to_owned(), port.to_owned())).collect()
}

#[tokio::test]
async fn probes_ask_what_there_is() {
    let worker = fake::Server::start().await;
    let front = Front::over(&[format!("http://{}", worker.address)], |_| {}).await;
    for (role, client, count) in [
        ("prefill", &worker.client, 3),
        ("decode", &worker.client, 3),
        ("router", &front.client, 2),
    ] {
        let manifest = text(&format!("kubernetes/{role}.yaml"));
        let probes = probes(&manifest);
        assert_eq!(probes.len(), count, "{role}: {probes:?}");
        for (path, port) in probes {
            assert_eq!(client.get(&path).await.status, 200, "{role}: {path}");
            assert!(
                manifest.contains(&format!("- {{name: {port}, containerPort: 30000}}")),
                "{role}"
            );
        }
    }
    // Workers register where the router listens.
    let router = text("kubernetes/router.yaml");
    assert!(router.contains("--registry-port=30100") && router.contains("name: dsv4-registry"));
    for role in ["prefill", "decode"] {
        let found = text(&format!("kubernetes/{role}.yaml"));
        assert!(found.contains("--discovery=http://dsv4-registry:30100"), "{role}");
    }
    worker.finish().await;
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
        // A series of answers begins with the first one.
        get(&format!("{url}/v1/models")).await.expect("an answer");
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
