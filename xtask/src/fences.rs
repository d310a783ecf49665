//! The edges between crates, and what the IO-free cores may not use.

use crate::lex::{mask, words};
use crate::metadata::{self, Package};
use crate::{sh, unsafe_audit};
use anyhow::{Context as _, Result, bail};
use std::collections::BTreeMap;
use std::path::Path;

/// Crates whose core has neither sockets, files, threads nor clocks.
pub(crate) const CORES: [&str; 3] = ["hicache", "kv-pool", "pd-transfer"];

/// Says what each external crate is for.
const NOTE: &str = "docs/decisions/0007-dependencies.md";

/// External crates that only these members may depend on (development dependencies apart).
const EXTERNAL: [(&str, &[&str]); 10] = [
    ("anyhow", &["ab", "server", "xtask"]),
    ("axum", &["server"]),
    ("clap", &["ab", "pd-transfer", "server", "xtask"]),
    ("hyper", &["server"]),
    ("object_store", &["server"]),
    ("reqwest", &["ab", "server"]),
    ("rmp", &["server"]),
    ("rustls", &["ab", "server"]),
    ("serde_json", &["ab", "dsv4-model", "server", "xtask"]),
    ("tokio", &["ab", "server"]),
];

/// Checks every fence and prints what is wrong.
pub(crate) fn run() -> Result<()> {
    let packages = metadata::packages()?;
    let mut findings = edges(&packages, &allowed_edges()?);
    findings.extend(external_edges(&packages));
    findings.extend(wildcards(&packages));
    findings.extend(unexplained(&shared_dependencies()?, &dependency_note()?));
    for core in CORES {
        let package = packages.iter().find(|package| package.name == core);
        let package = package.with_context(|| format!("there is no crate {core}"))?;
        findings.extend(core_without_std(package)?);
    }
    findings.extend(unsafe_audit::findings(&packages)?);
    for finding in &findings {
        println!("{finding}");
    }
    if !findings.is_empty() {
        bail!("fences: {} findings", findings.len());
    }
    cargo_deny()?;
    println!("fences: {} crates, nothing to say", packages.len());
    Ok(())
}

/// `[bans].deny` of deny.toml: crate, and the crates that may depend on it.
fn allowed_edges() -> Result<BTreeMap<String, Vec<String>>> {
    let text = std::fs::read_to_string(sh::root().join("deny.toml")).context("read deny.toml")?;
    let table: toml::Table = text.parse().context("parse deny.toml")?;
    let bans = table.get("bans").and_then(|bans| bans.get("deny"));
    let bans = bans.and_then(|deny| deny.as_array()).context("deny.toml has no [bans].deny")?;
    let mut edges = BTreeMap::new();
    for ban in bans {
        let name = ban.get("name").and_then(|name| name.as_str());
        let name = name.context("deny.toml: an entry of [bans].deny without a name")?;
        let wrappers = ban.get("wrappers").and_then(|wrappers| wrappers.as_array());
        let wrappers = wrappers.into_iter().flatten().filter_map(|wrapper| wrapper.as_str());
        edges.insert(name.to_owned(), wrappers.map(str::to_owned).collect());
    }
    Ok(edges)
}

/// Edges between members that deny.toml does not allow, and members it does not know.
fn edges(packages: &[Package], allowed: &BTreeMap<String, Vec<String>>) -> Vec<String> {
    let mut findings = Vec::new();
    for package in packages {
        for dependency in package.dependencies.iter().filter(|dependency| dependency.internal) {
            // A crate may name itself as a development dependency, to turn on a feature.
            let is_self = dependency.name == package.name && dependency.dev;
            let may = allowed.get(&dependency.name).is_some_and(|may| may.contains(&package.name));
            if !may && !is_self {
                findings.push(format!(
                    "{} depends on {}, which [bans].deny of deny.toml does not allow",
                    package.name, dependency.name
                ));
            }
        }
        let is_leaf_of_tree = ["ab", "server", "xtask"].contains(&package.name.as_str());
        if !is_leaf_of_tree && !allowed.contains_key(&package.name) {
            findings.push(format!("{} is missing in [bans].deny of deny.toml", package.name));
        }
    }
    findings
}

fn external_edges(packages: &[Package]) -> Vec<String> {
    let mut findings = Vec::new();
    for package in packages {
        for dependency in package.dependencies.iter().filter(|dependency| !dependency.dev) {
            let rule = EXTERNAL.iter().find(|(name, _)| *name == dependency.name);
            if let Some((name, may)) = rule
                && !may.contains(&package.name.as_str())
            {
                findings.push(format!("{} uses {name}; only {may:?} may", package.name));
            }
        }
    }
    findings
}

fn wildcards(packages: &[Package]) -> Vec<String> {
    let mut findings = Vec::new();
    for package in packages {
        for dependency in &package.dependencies {
            let is_self = dependency.name == package.name;
            if dependency.req == "*" && !is_self {
                findings.push(format!("{}: {} has no version", package.name, dependency.name));
            }
        }
    }
    findings
}

/// External crates of `[workspace.dependencies]`.
fn shared_dependencies() -> Result<Vec<String>> {
    let text = std::fs::read_to_string(sh::root().join("Cargo.toml")).context("read Cargo.toml")?;
    let table: toml::Table = text.parse().context("parse Cargo.toml")?;
    let shared = table.get("workspace").and_then(|workspace| workspace.get("dependencies"));
    let shared = shared.and_then(|shared| shared.as_table());
    let shared = shared.context("Cargo.toml has no [workspace.dependencies]")?;
    let is_external = |value: &toml::Value| value.get("path").is_none();
    Ok(shared
        .iter()
        .filter(|(_, value)| is_external(value))
        .map(|(name, _)| name.clone())
        .collect())
}

fn dependency_note() -> Result<String> {
    std::fs::read_to_string(sh::root().join(NOTE)).with_context(|| format!("read {NOTE}"))
}

/// Crates that the note on dependencies does not name in the first column of its table.
fn unexplained(names: &[String], note: &str) -> Vec<String> {
    let rows = note.lines().filter_map(|line| line.strip_prefix("| ")?.split(" |").next());
    let explained: Vec<&str> = rows.flat_map(|cell| cell.split(", ")).collect();
    let missing = names.iter().filter(|name| !explained.contains(&name.as_str()));
    missing.map(|name| format!("{name}: {NOTE} does not say what it is for")).collect()
}

/// The crate root says `no_std`, and `std` is named only behind the feature of that name.
fn core_without_std(package: &Package) -> Result<Vec<String>> {
    let root = package.targets_of("lib").next().context("a core without a library")?;
    let text = std::fs::read_to_string(&root.root)
        .with_context(|| format!("read {}", root.root.display()))?;
    let mut findings = Vec::new();
    if !says_no_std(&text) {
        findings.push(format!("{}: the crate root does not say `#![no_std]`", package.name));
    }
    if package.features.iter().any(|feature| feature == "std") {
        return Ok(findings);
    }
    // Without that feature there is no place where std would be right outside of tests.
    for file in source_files(&package.folder.join("src"))? {
        let text = std::fs::read_to_string(&file)?;
        let code = mask(text.split("#[cfg(test)]").next().unwrap_or_default()).code;
        if words(&code, "std").any(|at| code[at + 3..].starts_with("::")) {
            findings.push(format!("{}: {} uses std", package.name, file.display()));
        }
    }
    Ok(findings)
}

/// `#![no_std]`, perhaps only without the feature `std` or outside of tests.
fn says_no_std(text: &str) -> bool {
    mask(text).code.lines().map(str::trim).any(|line| {
        line == "#![no_std]"
            || line.starts_with("#![cfg_attr(") && words(line, "no_std").count() == 1
    })
}

fn source_files(folder: &Path) -> Result<Vec<std::path::PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() && name != "tests" {
            files.extend(source_files(&path)?);
        } else if name.ends_with(".rs") && name != "tests.rs" {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// The same and more through cargo-deny, where it is installed.
fn cargo_deny() -> Result<()> {
    if !sh::succeeds(sh::command("cargo-deny").arg("--version")) {
        println!("fences: cargo-deny is not installed; licences and sources were not checked");
        return Ok(());
    }
    sh::run(sh::command("cargo-deny").args([
        "--offline",
        "check",
        "--hide-inclusion-graph",
        "bans",
        "licenses",
        "sources",
    ]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::Dependency;

    fn package(name: &str, dependencies: &[(&str, &str, bool, bool)]) -> Package {
        let dependency = |&(name, req, internal, dev): &(&str, &str, bool, bool)| Dependency {
            name: name.into(),
            req: req.into(),
            internal,
            dev,
        };
        Package {
            name: name.into(),
            version: "0.1.0".into(),
            folder: "x".into(),
            dependencies: dependencies.iter().map(dependency).collect(),
            targets: Vec::new(),
            features: Vec::new(),
        }
    }

    #[test]
    fn the_fences_of_the_tree_hold() {
        let packages = metadata::packages().unwrap();
        assert_eq!(edges(&packages, &allowed_edges().unwrap()), Vec::<String>::new());
        assert_eq!(external_edges(&packages), Vec::<String>::new());
        assert_eq!(wildcards(&packages), Vec::<String>::new());
        let shared = shared_dependencies().unwrap();
        assert_eq!(unexplained(&shared, &dependency_note().unwrap()), Vec::<String>::new());
    }

    #[test]
    fn a_dependency_without_a_reason_is_found() {
        let names = ["a".to_owned(), "b".to_owned(), "c".to_owned()];
        assert_eq!(unexplained(&names, "| a, b | for x | y |\nc is mentioned\n").len(), 1);
    }

    #[test]
    fn a_new_edge_is_found() {
        let allowed = allowed_edges().unwrap();
        let bad = [package("kv-pool", &[("pd-transfer", "^0.1", true, false)])];
        assert_eq!(edges(&bad, &allowed).len(), 1);
        let own = [package("pd-transfer", &[("pd-transfer", "*", true, true)])];
        assert_eq!(edges(&own, &allowed), Vec::<String>::new());
        let tool = [package("xtask", &[("kv-pool", "^0.1", true, true)])];
        assert_eq!(edges(&tool, &allowed).len(), 1, "development dependencies are edges too");
        assert_eq!(edges(&[package("new-crate", &[])], &allowed).len(), 1);
    }

    #[test]
    fn external_crates_stay_in_their_places() {
        let bad = [package(
            "kv-pool",
            &[("tokio", "^1", false, false), ("serde_json", "^1", false, true)],
        )];
        assert_eq!(external_edges(&bad).len(), 1);
        assert_eq!(wildcards(&[package("a", &[("b", "*", true, false)])]).len(), 1);
    }

    #[test]
    fn no_std_may_depend_on_a_feature() {
        assert!(says_no_std("//! A.\n#![no_std]\n"));
        assert!(says_no_std("#![cfg_attr(not(feature = \"std\"), no_std)]\n"));
        assert!(!says_no_std("// #![no_std]\n"));
    }
}
