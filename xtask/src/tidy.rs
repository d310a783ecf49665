//! Rules about the text of the tree, checked in a few seconds and without compiling anything.

mod clauses;
mod markdown;
mod rust;
mod words;

use crate::lex::Function;
use crate::sh;
use anyhow::{Context as _, Result, bail};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Most bytes of a file that is not in [`LARGE_FILES`].
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Places of files that may be larger: the mini checkpoint and golden vectors.
const LARGE_FILES: [&str; 2] = ["models/dsv4-mini/checkpoint/", "dsv4-model/golden/"];
/// Functions that are longer than they should be; the list may only shrink.
const EXCEPTIONS: &str = "xtask/tidy-exceptions.toml";

/// A broken rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Finding {
    /// File, relative to the root.
    pub(crate) path: String,
    /// Line from 1, 0 for the whole file.
    pub(crate) line: usize,
    /// What is wrong and what to do.
    pub(crate) text: String,
}

impl Finding {
    fn new(path: &str, line: usize, text: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, text: text.into() }
    }
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.text)
    }
}

/// Checks the tree and prints what is wrong.
pub(crate) fn run() -> Result<()> {
    let files = files(&sh::root())?;
    report(&check(&sh::root(), &files)?, files.len())
}

/// Checks only the files that git has staged.
pub(crate) fn run_staged() -> Result<()> {
    let mut git = sh::command("git");
    git.args(["diff", "--cached", "--name-only", "--diff-filter=d", "-z"]);
    let files = split_nul(&sh::output(&mut git)?);
    let staged = |finding: &Finding| files.contains(&finding.path);
    let all = check(&sh::root(), &files)?;
    report(&all.into_iter().filter(staged).collect::<Vec<_>>(), files.len())
}

fn report(findings: &[Finding], files: usize) -> Result<()> {
    for finding in findings {
        println!("{finding}");
    }
    if !findings.is_empty() {
        bail!("tidy: {} findings in {files} files", findings.len());
    }
    println!("tidy: {files} files, nothing to say");
    Ok(())
}

/// All findings about `files`, paths relative to `root`, in order.
fn check(root: &Path, files: &[String]) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let mut long = Vec::new();
    for path in files {
        let full = root.join(path);
        let Ok(facts) = std::fs::symlink_metadata(&full) else { continue };
        let large_is_fine = LARGE_FILES.iter().any(|start| path.starts_with(start));
        if facts.len() > FILE_BYTES_MAX && !large_is_fine {
            findings.push(Finding::new(path, 0, "over 1 MiB; keep it out of the repository"));
        }
        if !facts.is_file() || large_is_fine && facts.len() > FILE_BYTES_MAX {
            continue;
        }
        let bytes = std::fs::read(&full).with_context(|| format!("read {path}"))?;
        let Ok(text) = String::from_utf8(bytes) else { continue };
        check_text(root, path, &text, &mut findings, &mut long);
    }
    findings.extend(compare_long(files, &long, &exceptions(root)?));
    // Citations stand in all files, whichever are looked at.
    findings.extend(clauses::check(root, &self::files(root)?)?);
    findings.sort();
    Ok(findings)
}

fn check_text(
    root: &Path,
    path: &str,
    text: &str,
    findings: &mut Vec<Finding>,
    long: &mut Vec<(String, Function)>,
) {
    findings.extend(words::check(path, text));
    match Path::new(path).extension().and_then(|extension| extension.to_str()) {
        Some("rs") => {
            findings.extend(rust::check(path, text));
            long.extend(rust::long_functions(text).into_iter().map(|f| (path.to_owned(), f)));
        }
        Some("md") => findings.extend(markdown::check(root, path, text)),
        _ => {}
    }
}

/// The committed exceptions: file and function, and the lines it has.
fn exceptions(root: &Path) -> Result<BTreeMap<(String, String), usize>> {
    let text = std::fs::read_to_string(root.join(EXCEPTIONS))
        .with_context(|| format!("read {EXCEPTIONS}"))?;
    let table: toml::Table = text.parse().with_context(|| format!("parse {EXCEPTIONS}"))?;
    let mut exceptions = BTreeMap::new();
    for (path, functions) in table {
        let functions = functions.as_table().with_context(|| format!("{EXCEPTIONS}: {path}"))?;
        for (name, lines) in functions {
            let lines = lines.as_integer().and_then(|lines| usize::try_from(lines).ok());
            let lines = lines.with_context(|| format!("{EXCEPTIONS}: {path}: {name}"))?;
            exceptions.insert((path.clone(), name.clone()), lines);
        }
    }
    Ok(exceptions)
}

/// Long functions against the exceptions: longer than allowed, or an exception that must shrink.
fn compare_long(
    files: &[String],
    long: &[(String, Function)],
    exceptions: &BTreeMap<(String, String), usize>,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut longest: BTreeMap<(String, String), usize> = BTreeMap::new();
    for (path, function) in long {
        let key = (path.clone(), function.name.clone());
        let lines = longest.entry(key.clone()).or_default();
        *lines = function.lines.max(*lines);
        let limit = exceptions.get(&key).copied().unwrap_or(rust::FUNCTION_LINES_MAX);
        if function.lines > limit {
            let text = format!("`{}` has {} lines, {limit} may", function.name, function.lines);
            findings.push(Finding::new(path, function.line, text));
        }
    }
    for (key, limit) in exceptions.iter().filter(|(key, _)| files.contains(&key.0)) {
        let lines = longest.get(key).copied().unwrap_or(0);
        if lines < *limit {
            let text = format!("{} {} is at {limit}, lower it to {lines} or drop it", key.0, key.1);
            findings.push(Finding::new(EXCEPTIONS, 0, text));
        }
    }
    findings
}

/// Files of the tree: what git tracks or would track; without git, everything not built.
fn files(root: &Path) -> Result<Vec<String>> {
    let mut git = sh::command("git");
    git.args(["ls-files", "--cached", "--others", "--exclude-standard", "-z"]);
    let mut files = match sh::output(&mut git) {
        Ok(text) => split_nul(&text),
        Err(_) => {
            let mut files = Vec::new();
            walk(root, root, &mut files)?;
            files
        }
    };
    files.sort();
    files.dedup();
    files.retain(|path| root.join(path).symlink_metadata().is_ok());
    Ok(files)
}

fn split_nul(text: &str) -> Vec<String> {
    text.split('\0').filter(|path| !path.is_empty()).map(str::to_owned).collect()
}

fn walk(root: &Path, folder: &Path, files: &mut Vec<String>) -> Result<()> {
    for entry in std::fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        let path: PathBuf = entry.context("list a folder")?.path();
        let relative = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
        if ["target", ".git", ".venv", ".gpu", "bench/out"].contains(&relative.as_str()) {
            continue;
        }
        if path.is_dir() && !path.is_symlink() {
            walk(root, &path, files)?;
        } else {
            files.push(relative);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_is_tidy() {
        let files = files(&sh::root()).unwrap();
        assert!(files.iter().any(|path| path == "xtask/src/tidy.rs"), "{files:?}");
        let findings = check(&sh::root(), &files).unwrap();
        let text: Vec<_> = findings.iter().map(ToString::to_string).collect();
        assert!(findings.is_empty(), "{}", text.join("\n"));
    }

    fn long(lines: usize) -> Vec<(String, Function)> {
        vec![("a.rs".into(), Function { name: "f".into(), line: 3, lines })]
    }

    #[test]
    fn an_exception_may_only_shrink() {
        let files = ["a.rs".to_owned()];
        let key = ("a.rs".to_owned(), "f".to_owned());
        let check = |lines, limit| {
            compare_long(&files, &long(lines), &BTreeMap::from([(key.clone(), limit)])).len()
        };
        assert_eq!(compare_long(&files, &long(80), &BTreeMap::new()).len(), 1);
        assert_eq!(check(80, 80), 0);
        assert_eq!(check(81, 80), 1, "it grew");
        assert_eq!(check(75, 80), 1, "it shrank, so must the exception");
        let none = compare_long(&files, &[], &BTreeMap::from([(key.clone(), 80)]));
        assert_eq!(none.len(), 1, "the function is gone or short, so must be the exception");
        assert!(none[0].text.contains("lower it to 0"));
    }

    #[test]
    fn the_walk_without_git_sees_the_sources_and_no_build_output() {
        let mut files = Vec::new();
        walk(&sh::root(), &sh::root(), &mut files).unwrap();
        assert!(files.iter().any(|path| path == "xtask/src/main.rs"));
        assert!(files.iter().all(|path| !path.starts_with("target/")));
    }
}
