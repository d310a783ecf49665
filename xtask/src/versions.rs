//! Versions and changelogs of the crates.

use crate::metadata::{self, Package};
use crate::sh;
use anyhow::{Context as _, Result, bail};

/// Checks that each crate has a README, a changelog that fits its version, and that internal
/// dependencies ask for the version that is there.
pub(crate) fn check() -> Result<()> {
    let packages = metadata::packages()?;
    let mut findings = Vec::new();
    for package in packages.iter().filter(|package| package.name != "xtask") {
        findings.extend(files(package)?);
        findings.extend(requirements(package, &packages));
    }
    for finding in &findings {
        println!("{finding}");
    }
    if !findings.is_empty() {
        bail!("versions: {} findings", findings.len());
    }
    println!("versions: {} crates, nothing to say", packages.len());
    Ok(())
}

fn files(package: &Package) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    if !package.folder.join("README.md").is_file() {
        findings.push(format!("{}: no README.md", package.name));
    }
    let Ok(text) = std::fs::read_to_string(package.folder.join("CHANGELOG.md")) else {
        findings.push(format!("{}: no CHANGELOG.md", package.name));
        return Ok(findings);
    };
    let is_changed = changed_since_release(package)?;
    findings.extend(changelog(package, &text, is_changed));
    Ok(findings)
}

/// Findings about a changelog: newest release, and whether unreleased changes are written down.
fn changelog(package: &Package, text: &str, is_changed: bool) -> Vec<String> {
    let mut findings = Vec::new();
    let Some(unreleased) = section(text, |title| title.starts_with("Unreleased")) else {
        return vec![format!("{}: CHANGELOG.md has no `## Unreleased`", package.name)];
    };
    if is_changed && !unreleased.lines().any(|line| line.trim_start().starts_with("- ")) {
        findings.push(format!("{}: src changed, `## Unreleased` is empty", package.name));
    }
    let released = titles(text).find(|title| !title.starts_with("Unreleased"));
    let released = released.map(|title| title.split_whitespace().next().unwrap_or_default());
    if let Some(version) = released
        && version.trim_matches(['[', ']']) != package.version
        && !is_changed
    {
        let have = &package.version;
        findings.push(format!("{}: version {have}, changelog ends at {version}", package.name));
    }
    findings
}

fn titles(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| line.strip_prefix("## "))
}

fn section(text: &str, wanted: impl Fn(&str) -> bool) -> Option<String> {
    let mut lines = text.lines().skip_while(|line| !line.strip_prefix("## ").is_some_and(&wanted));
    lines.next()?;
    Some(lines.take_while(|line| !line.starts_with("## ")).collect::<Vec<_>>().join("\n"))
}

/// True if `src/` differs from the tag of the crate's version, or there is no such tag.
fn changed_since_release(package: &Package) -> Result<bool> {
    let tag = format!("{}-v{}", package.name, package.version);
    let mut known = sh::command("git");
    known.args(["rev-parse", "--verify", "--quiet", &format!("refs/tags/{tag}")]);
    if !sh::succeeds(&mut known) {
        return Ok(true);
    }
    let mut diff = sh::command("git");
    diff.args(["diff", "--name-only", &tag, "--"]).arg(package.folder.join("src"));
    Ok(!sh::output(&mut diff).context("compare with the release")?.trim().is_empty())
}

/// Internal dependencies whose requirement does not accept the crate that is there.
fn requirements(package: &Package, all: &[Package]) -> Vec<String> {
    let mut findings = Vec::new();
    let others = package.dependencies.iter().filter(|dependency| dependency.internal);
    for dependency in others.filter(|dependency| dependency.name != package.name) {
        let there = all.iter().find(|other| other.name == dependency.name);
        let version = there.map_or("none", |other| other.version.as_str());
        if dependency.req.trim_start_matches(['^', '=']) != version {
            findings.push(format!(
                "{} asks for {} {}, the tree has {version}",
                package.name, dependency.name, dependency.req
            ));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(version: &str) -> Package {
        Package {
            name: "a".into(),
            version: version.into(),
            folder: "x".into(),
            dependencies: Vec::new(),
            targets: Vec::new(),
            features: Vec::new(),
        }
    }

    #[test]
    fn changes_must_be_written_down() {
        let text = "# Changelog\n\n## Unreleased\n\n## 0.1.0 - 2026-01-01\n\n- first\n";
        assert_eq!(changelog(&package("0.1.0"), text, true).len(), 1);
        assert_eq!(changelog(&package("0.1.0"), text, false).len(), 0);
        let written = text.replace("## Unreleased\n", "## Unreleased\n\n### Added\n\n- x\n");
        assert_eq!(changelog(&package("0.1.0"), &written, true).len(), 0);
    }

    #[test]
    fn version_and_changelog_must_agree() {
        let text = "## Unreleased\n\n## [0.1.0]\n";
        assert_eq!(changelog(&package("0.2.0"), text, false).len(), 1);
        assert_eq!(changelog(&package("0.2.0"), "# Changelog\n", false).len(), 1);
    }

    #[test]
    fn a_requirement_must_name_the_version_that_is_there() {
        let mut user = package("0.1.0");
        let dependency = |req: &str| metadata::Dependency {
            name: "b".into(),
            req: req.into(),
            internal: true,
            dev: false,
        };
        let mut other = package("0.3.0");
        other.name = "b".into();
        user.dependencies = vec![dependency("^0.3.0")];
        assert!(requirements(&user, &[other.clone()]).is_empty());
        user.dependencies = vec![dependency("^0.2.0")];
        assert_eq!(requirements(&user, &[other]).len(), 1);
    }
}
