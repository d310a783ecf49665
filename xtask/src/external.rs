//! A crate outside of the workspace that uses each library by path and runs.
//!
//! It shows that the libraries can be used alone: by their public items, without the settings of
//! this workspace. It shares the target folder and the lock file, so that it costs seconds.

use crate::metadata::{self, Package};
use crate::sh;
use anyhow::{Context as _, Result};
use std::path::{Path, PathBuf};

/// The program; it prints one line per library and exits with an error if a result is wrong.
const PROGRAM: &str = include_str!("external/main.rs.txt");

/// Makes the crate in a temporary folder, runs it and removes it.
pub(crate) fn run() -> Result<()> {
    let folder = Scratch::new()?;
    let packages = metadata::packages()?;
    let libraries = packages.iter().filter(|p| p.has_library() && p.name != "server");
    let manifest = manifest(&libraries.collect::<Vec<_>>())?;
    std::fs::create_dir_all(folder.0.join("src")).context("create the scratch crate")?;
    std::fs::write(folder.0.join("Cargo.toml"), manifest).context("write the scratch crate")?;
    std::fs::write(folder.0.join("src/main.rs"), PROGRAM).context("write the scratch crate")?;
    let root = sh::root();
    std::fs::copy(root.join("Cargo.lock"), folder.0.join("Cargo.lock"))
        .context("copy the lock file")?;
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    sh::run(
        sh::cargo()
            .args(["run", "--quiet", "--"])
            .arg(root.join("models/dsv4-mini/checkpoint"))
            .current_dir(&folder.0)
            .env("CARGO_TARGET_DIR", root.join(target)),
    )
}

/// Dependencies by path, and the profile of the workspace so that its build can be used again.
fn manifest(libraries: &[&Package]) -> Result<String> {
    let mut package = toml::Table::new();
    package.insert("name".into(), "external-user".into());
    package.insert("version".into(), "0.0.0".into());
    package.insert("edition".into(), "2024".into());
    let mut dependencies = toml::Table::new();
    for library in libraries {
        let mut dependency = toml::Table::new();
        dependency.insert("path".into(), library.folder.to_string_lossy().into_owned().into());
        dependencies.insert(library.name.clone(), dependency.into());
    }
    let text = std::fs::read_to_string(sh::root().join("Cargo.toml")).context("read Cargo.toml")?;
    let root: toml::Table = text.parse().context("parse Cargo.toml")?;
    let mut manifest = toml::Table::new();
    manifest.insert("package".into(), package.into());
    manifest.insert("dependencies".into(), dependencies.into());
    manifest.insert("workspace".into(), toml::Table::new().into());
    if let Some(profile) = root.get("profile") {
        manifest.insert("profile".into(), profile.clone());
    }
    toml::to_string(&manifest).context("write a manifest")
}

/// A folder that goes away with this value.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("external-user-{}", std::process::id()));
        std::fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let path: &Path = &self.0;
        if let Err(error) = std::fs::remove_dir_all(path) {
            eprintln!("{} stays behind: {error}", path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manifest_stands_alone_and_names_each_library() {
        let packages = metadata::packages().unwrap();
        let libraries: Vec<&Package> = packages.iter().filter(|p| p.has_library()).collect();
        let table: toml::Table = manifest(&libraries).unwrap().parse().unwrap();
        assert!(table["workspace"].as_table().unwrap().is_empty());
        assert_eq!(table["dependencies"].as_table().unwrap().len(), libraries.len());
        assert!(table["profile"]["dev"].is_table());
    }
}
