//! Words that do not belong in the repository: traces of the place where it was written.

use super::Finding;

/// Words, in lower case and in pieces so that this file does not contain them.
const BANNED: [(&str, &str); 9] = [
    (concat!("/wo", "rk/"), "an absolute path of one machine"),
    (concat!("/ro", "ot/"), "an absolute path of one machine"),
    (concat!(".libr", "ary"), "a path outside the repository"),
    (concat!("helper ", "session"), "about how the text was made"),
    (concat!("sub", "agent"), "about how the text was made"),
    (concat!("steer", "ing"), "about how the text was made"),
    (concat!("index", "-url"), "a private package index"),
    (concat!("artif", "actory"), "a private package index"),
    (concat!("replace", "-with"), "a private package index"),
];

/// The only source that crates may come from.
const CRATES: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Findings about the words of one file.
pub(super) fn check(path: &str, text: &str) -> Vec<Finding> {
    if path == "Cargo.lock" {
        return lock_file(path, text);
    }
    let mut findings = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let lower = line.to_lowercase();
        for (word, reason) in BANNED {
            if lower.contains(word) {
                findings.push(Finding::new(path, number + 1, format!("`{word}`: {reason}")));
            }
        }
        if path.ends_with(".md") && line.chars().any(|c| c >= '\u{1F000}') {
            findings.push(Finding::new(path, number + 1, "no emoji in documents"));
        }
        if line.starts_with("<<<<<<< ") || line.starts_with(">>>>>>> ") {
            findings.push(Finding::new(path, number + 1, "a merge conflict"));
        }
    }
    findings
}

fn lock_file(path: &str, text: &str) -> Vec<Finding> {
    let sources = text.lines().enumerate().filter_map(|(number, line)| {
        let source = line.strip_prefix("source = \"")?.strip_suffix('"')?;
        (source != CRATES).then(|| (number + 1, source))
    });
    let finding = |(line, source)| Finding::new(path, line, format!("crate from {source}"));
    sources.map(finding).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_found_in_any_case() {
        for (word, _) in BANNED {
            let text = format!("one\ntwo {} three\n", word.to_uppercase());
            let found = check("a.md", &text);
            assert_eq!((found.len(), found[0].line), (1, 2), "{word}");
        }
    }

    #[test]
    fn emoji_only_matter_in_documents() {
        assert_eq!(check("a.md", "x \u{1F600}").len(), 1);
        assert!(check("a.rs", "x \u{1F600}").is_empty());
    }

    #[test]
    fn a_crate_from_elsewhere_is_found() {
        let ok = format!("source = \"{CRATES}\"\n");
        assert!(check("Cargo.lock", &ok).is_empty());
        assert_eq!(check("Cargo.lock", &format!("{ok}source = \"git+https://a/b\"\n"))[0].line, 2);
    }
}
