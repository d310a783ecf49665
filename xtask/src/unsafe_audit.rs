//! Where unsafe code is, compared with `unsafe.toml`.

use crate::lex::{mask, words};
use crate::metadata::{self, Package};
use crate::sh;
use anyhow::{Context as _, Result, bail};
use std::collections::BTreeMap;
use std::path::Path;

/// The list of files that may hold unsafe code.
const LIST: &str = "unsafe.toml";

/// Head of the list when it is written anew.
const HEAD: &str = "\
# Files that may hold unsafe code, with the number of unsafe blocks, impls, traits and functions.
# Checked by `cargo xtask unsafe-audit`; a new file or a higher number is a reviewed change.

[files]
";

/// Checks the list; with `bless`, writes it from the tree.
pub(crate) fn run(bless: bool) -> Result<()> {
    let packages = metadata::packages()?;
    if bless {
        let mut text = HEAD.to_owned();
        for (path, count) in found(&packages)? {
            text.push_str(&format!("\"{path}\" = {count}\n"));
        }
        return std::fs::write(sh::root().join(LIST), text)
            .with_context(|| format!("write {LIST}"));
    }
    let findings = findings(&packages)?;
    for finding in &findings {
        println!("{finding}");
    }
    if !findings.is_empty() {
        bail!("unsafe-audit: {} findings", findings.len());
    }
    for (path, count) in listed()? {
        println!("{count:4} {path}");
    }
    Ok(())
}

/// Differences between tree and list, and crates without unsafe code that do not forbid it.
pub(crate) fn findings(packages: &[Package]) -> Result<Vec<String>> {
    let (found, listed) = (found(packages)?, listed()?);
    let mut findings = compare(&found, &listed);
    for package in packages {
        let folder = relative(&package.folder);
        if found.keys().any(|path| path.starts_with(&format!("{folder}/src/"))) {
            continue;
        }
        let roots = package.targets_of("lib").chain(package.targets_of("bin"));
        for target in roots {
            let text = std::fs::read_to_string(&target.root)
                .with_context(|| format!("read {}", target.root.display()))?;
            if !mask(&text).code.contains("#![forbid(unsafe_code)]") {
                let path = relative(&target.root);
                findings.push(format!("{path}: has no unsafe code and should forbid it"));
            }
        }
    }
    Ok(findings)
}

fn compare(found: &BTreeMap<String, usize>, listed: &BTreeMap<String, usize>) -> Vec<String> {
    let mut findings = Vec::new();
    for (path, count) in found {
        let may = listed.get(path).copied().unwrap_or(0);
        if *count > may {
            findings.push(format!("{path}: {count} unsafe places, {LIST} allows {may}"));
        }
    }
    for (path, may) in listed {
        let count = found.get(path).copied().unwrap_or(0);
        if count < *may {
            findings.push(format!("{path}: {count} unsafe places, lower the {may} in {LIST}"));
        }
    }
    findings
}

fn listed() -> Result<BTreeMap<String, usize>> {
    let text =
        std::fs::read_to_string(sh::root().join(LIST)).with_context(|| format!("read {LIST}"))?;
    let table: toml::Table = text.parse().with_context(|| format!("parse {LIST}"))?;
    let files = table.get("files").and_then(|files| files.as_table());
    let mut listed = BTreeMap::new();
    for (path, count) in files.with_context(|| format!("{LIST} has no [files]"))? {
        let count = count.as_integer().and_then(|count| usize::try_from(count).ok());
        listed.insert(path.clone(), count.with_context(|| format!("{LIST}: {path}"))?);
    }
    Ok(listed)
}

/// Unsafe places per file of all crates: sources, tests, benches and examples.
fn found(packages: &[Package]) -> Result<BTreeMap<String, usize>> {
    let mut found = BTreeMap::new();
    for package in packages {
        visit(&package.folder, &mut |path, text| {
            let count = words(&mask(text).code, "unsafe").count();
            if count > 0 {
                found.insert(relative(path), count);
            }
        })?;
    }
    Ok(found)
}

fn visit(folder: &Path, see: &mut dyn FnMut(&Path, &str)) -> Result<()> {
    for entry in std::fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() && !path.ends_with("target") {
            visit(&path, see)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path)
                .with_context(|| format!("read {}", path.display()))?;
            see(&path, &text);
        }
    }
    Ok(())
}

fn relative(path: &Path) -> String {
    path.strip_prefix(sh::root()).unwrap_or(path).to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_less_and_elsewhere_are_findings() {
        let map = |pairs: &[(&str, usize)]| {
            pairs.iter().map(|&(path, count)| (path.to_owned(), count)).collect::<BTreeMap<_, _>>()
        };
        let listed = map(&[("a.rs", 2), ("b.rs", 1)]);
        assert!(compare(&map(&[("a.rs", 2), ("b.rs", 1)]), &listed).is_empty());
        assert_eq!(compare(&map(&[("a.rs", 3), ("b.rs", 1)]), &listed).len(), 1);
        assert_eq!(compare(&map(&[("a.rs", 1), ("b.rs", 1)]), &listed).len(), 1);
        assert_eq!(compare(&map(&[("a.rs", 2)]), &listed).len(), 1);
        assert_eq!(compare(&map(&[("a.rs", 2), ("b.rs", 1), ("c.rs", 1)]), &listed).len(), 1);
    }

    #[test]
    fn the_tree_matches_the_list() {
        let packages = metadata::packages().unwrap();
        assert_eq!(findings(&packages).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn only_the_keyword_in_code_counts() {
        let text = "#![expect(unsafe_code)] // unsafe\nlet a = \"unsafe\"; unsafe { f() }";
        assert_eq!(words(&mask(text).code, "unsafe").count(), 1);
    }
}
