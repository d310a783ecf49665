//! The workspace as `cargo metadata` describes it.

use crate::sh;
use anyhow::{Context as _, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// One crate of the workspace.
#[derive(Clone, Debug)]
pub(crate) struct Package {
    /// Its name.
    pub(crate) name: String,
    /// Its version.
    pub(crate) version: String,
    /// Its folder.
    pub(crate) folder: PathBuf,
    /// What it depends on directly.
    pub(crate) dependencies: Vec<Dependency>,
    /// What it builds.
    pub(crate) targets: Vec<Target>,
    /// Names of its features.
    pub(crate) features: Vec<String>,
}

/// A direct dependency.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Dependency {
    /// Name of the crate.
    pub(crate) name: String,
    /// Accepted versions, `*` if none were given.
    pub(crate) req: String,
    /// True for a crate of this workspace.
    pub(crate) internal: bool,
    /// True for a development dependency.
    pub(crate) dev: bool,
}

/// A library, binary, test, bench or example.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// Its name.
    pub(crate) name: String,
    /// `lib`, `bin`, `test`, `bench`, `example` or `custom-build`.
    pub(crate) kind: String,
    /// Features without which it is not built.
    pub(crate) required_features: Vec<String>,
    /// Its root file.
    pub(crate) root: PathBuf,
}

impl Package {
    /// True if the crate has a library.
    pub(crate) fn has_library(&self) -> bool {
        self.targets.iter().any(|target| target.kind == "lib")
    }

    /// Its targets of one kind.
    pub(crate) fn targets_of<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = &'a Target> {
        self.targets.iter().filter(move |target| target.kind == kind)
    }
}

/// All crates of the workspace, by name.
pub(crate) fn packages() -> Result<Vec<Package>> {
    let text = sh::output(sh::cargo().args(["metadata", "--no-deps", "--format-version", "1"]))?;
    let value: Value = serde_json::from_str(&text).context("parse the output of cargo metadata")?;
    let mut packages: Vec<Package> = items(&value["packages"]).map(package).collect();
    packages.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(packages)
}

fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn texts(value: &Value) -> Vec<String> {
    items(value).map(text).collect()
}

fn package(value: &Value) -> Package {
    let manifest = PathBuf::from(text(&value["manifest_path"]));
    Package {
        name: text(&value["name"]),
        version: text(&value["version"]),
        folder: manifest.parent().unwrap_or(Path::new("")).to_path_buf(),
        dependencies: items(&value["dependencies"]).map(dependency).collect(),
        targets: items(&value["targets"]).map(target).collect(),
        features: value["features"]
            .as_object()
            .map(|features| features.keys().cloned().collect())
            .unwrap_or_default(),
    }
}

fn dependency(value: &Value) -> Dependency {
    Dependency {
        name: text(&value["name"]),
        req: text(&value["req"]),
        internal: value["path"].is_string(),
        dev: value["kind"].as_str() == Some("dev"),
    }
}

fn target(value: &Value) -> Target {
    Target {
        name: text(&value["name"]),
        kind: text(&value["kind"][0]),
        required_features: texts(&value["required-features"]),
        root: PathBuf::from(text(&value["src_path"])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_crate_is_a_member_without_internal_dependencies() {
        let packages = packages().unwrap();
        let own = packages.iter().find(|package| package.name == "xtask").unwrap();
        assert!(own.dependencies.iter().all(|dependency| !dependency.internal));
        assert!(own.targets_of("bin").any(|target| target.name == "xtask"));
        assert!(!own.has_library());
    }
}
