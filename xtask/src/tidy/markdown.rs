//! Rules for Markdown: links to files of the repository must lead somewhere.

use super::Finding;
use std::path::Path;

/// Findings about one document.
pub(super) fn check(root: &Path, path: &str, text: &str) -> Vec<Finding> {
    let folder = Path::new(path).parent().unwrap_or(Path::new(""));
    let mut findings = Vec::new();
    for (line, target) in links(text) {
        let file = target.split('#').next().unwrap_or_default();
        if file.is_empty() || file.contains("://") || file.starts_with("mailto:") {
            continue;
        }
        if !root.join(folder).join(file).exists() {
            findings.push(Finding::new(path, line, format!("link to {file}, which is not there")));
        }
    }
    findings
}

/// Targets of `[text](target)` outside code, with their line numbers from 1.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut links = Vec::new();
    let mut in_code = false;
    for (number, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        if in_code {
            continue;
        }
        let prose: String = line.split('`').step_by(2).collect::<Vec<_>>().join("``");
        let mut rest = prose.as_str();
        while let Some(at) = rest.find("](") {
            rest = &rest[at + 2..];
            if let Some(end) = rest.find(')') {
                let target = rest[..end].split_whitespace().next().unwrap_or_default();
                links.push((number + 1, target.to_owned()));
            }
        }
    }
    links
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sh;

    #[test]
    fn links_in_code_are_none() {
        let text = "[a](b.md) and [c](d.md#e \"title\")\n```\n[x](y)\n```\n`[x](y)` [f](g)";
        let targets: Vec<_> = links(text).into_iter().map(|(_, target)| target).collect();
        assert_eq!(targets, ["b.md", "d.md#e", "g"]);
    }

    #[test]
    fn a_link_to_nowhere_is_found() {
        let text = "[a](Cargo.toml) [b](https://example.org/x) [c](#here)\n[d](no-such-file.md)";
        let found = check(&sh::root(), "README.md", text);
        assert_eq!((found.len(), found[0].line), (1, 2), "{found:?}");
    }
}
