//! Rules for Rust files.

use super::Finding;
use crate::lex::{self, Function, is_word, line_of, mask, words};

/// Most lines of a source file.
const FILE_LINES_MAX: usize = 800;
/// Most lines of a file of tests or benches.
const TEST_FILE_LINES_MAX: usize = 1200;
/// Most lines of a function.
pub(super) const FUNCTION_LINES_MAX: usize = 70;

/// Code that must not be committed, with the reason. Written in pieces, or this file would break
/// its own rules.
const BANNED_CODE: [(&str, &str); 7] = [
    (concat!("to", "do!"), "finish it or leave it out"),
    (concat!("unimplement", "ed!"), "finish it or leave it out"),
    (concat!("db", "g!"), "left over from debugging"),
    (concat!("#[all", "ow("), "use `#[expect(lint, reason = \"..\")]`"),
    (concat!("#![all", "ow("), "use `#![expect(lint, reason = \"..\")]`"),
    (concat!("#[ign", "ore"), "a test that does not run is not a test"),
    (concat!("#[should_", "panic"), "return an error and compare it"),
];

/// Nouns that say nothing about what a type does.
const BANNED_NOUNS: [&str; 6] = ["Manager", "Helper", "Util", "Utils", "Handler", "Context"];

/// Ways to read the environment.
const ENVIRONMENT: [&str; 4] = ["env::var", "env::var_os", "env::vars", "env::vars_os"];

/// Findings about one file, except long functions.
pub(super) fn check(path: &str, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    let masked = mask(text);
    if !text.trim_start().starts_with("//!") && !text.starts_with("#!") {
        findings.push(Finding::new(path, 1, "begin with a `//!` line that says what this is"));
    }
    let (lines, limit) = (text.lines().count(), lines_max(path));
    if lines > limit {
        findings.push(Finding::new(path, 0, format!("{lines} lines, {limit} may: split it")));
    }
    for (code, reason) in BANNED_CODE {
        for (at, _) in masked.code.match_indices(code) {
            if masked.code[..at].chars().next_back().is_some_and(is_word) {
                continue;
            }
            let text = format!("`{code}`: {reason}");
            findings.push(Finding::new(path, line_of(&masked.code, at), text));
        }
    }
    findings.extend(comments(path, &masked.comments));
    findings.extend(nouns(path, &masked.code));
    if !may_read_environment(path) {
        for at in ENVIRONMENT.iter().flat_map(|read| words(&masked.code, read)) {
            let text = "the environment is read only in config.rs";
            findings.push(Finding::new(path, line_of(&masked.code, at), text));
        }
    }
    findings
}

/// Functions over [`FUNCTION_LINES_MAX`].
pub(super) fn long_functions(text: &str) -> Vec<Function> {
    let mut functions = lex::functions(&mask(text).code);
    functions.retain(|function| function.lines > FUNCTION_LINES_MAX);
    functions
}

/// True for files that hold tests and nothing else.
pub(super) fn is_test(path: &str) -> bool {
    path.contains("/tests/")
        || path.contains("/benches/")
        || path.ends_with("/tests.rs")
        || path.ends_with("_tests.rs")
        || path.starts_with("tests/")
}

fn lines_max(path: &str) -> usize {
    if is_test(path) { TEST_FILE_LINES_MAX } else { FILE_LINES_MAX }
}

fn may_read_environment(path: &str) -> bool {
    is_test(path)
        || path.starts_with("xtask/")
        || path.ends_with("/config.rs")
        || path.contains("/config/")
        || path.contains("/examples/")
}

/// Marks of unfinished work.
fn comments(path: &str, comments: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for mark in [concat!("FIX", "ME"), concat!("X", "XX")] {
        for at in words(comments, mark) {
            let text = format!("`{mark}`: fix it, or say what holds now and name an issue");
            findings.push(Finding::new(path, line_of(comments, at), text));
        }
    }
    for at in words(comments, concat!("TO", "DO")) {
        if !comments[at + 4..].starts_with("(#") {
            let text = "name the issue in brackets, or do it";
            findings.push(Finding::new(path, line_of(comments, at), text));
        }
    }
    findings
}

/// Type definitions whose main noun is banned.
fn nouns(path: &str, code: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for keyword in ["struct", "enum", "trait"] {
        for at in words(code, keyword) {
            let rest = code[at + keyword.len()..].trim_start();
            let name: String = rest.chars().take_while(|&c| is_word(c)).collect();
            if BANNED_NOUNS.iter().any(|noun| name.ends_with(noun)) {
                let text = format!("`{name}` does not say what it does; find its own noun");
                findings.push(Finding::new(path, line_of(code, at), text));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(path: &str, text: &str) -> Vec<String> {
        check(path, text).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn clean_code_has_no_findings() {
        let text =
            "//! What.\n/// Says \"Manager\".\npub struct Pool;\nfn f() { g(\"env::var\") }\n";
        assert_eq!(texts("a/src/b.rs", text), Vec::<String>::new());
    }

    #[test]
    fn each_rule_finds_its_case() {
        let banned: Vec<String> =
            BANNED_CODE.iter().map(|(code, _)| format!("//! A.\nfn f() {{}}\n{code}x\n")).collect();
        let cases = [
            ("fn f() {}\n".to_owned(), 1),
            (concat!("//! A.\n// FIX", "ME later\n").to_owned(), 2),
            (concat!("//! A.\n\n// TO", "DO later\n").to_owned(), 3),
            ("//! A.\npub struct PageManager;\n".to_owned(), 2),
            ("//! A.\nfn f() { std::env::var_os(\"A\"); }\n".to_owned(), 2),
        ];
        let cases = cases.into_iter().chain(banned.into_iter().map(|text| (text, 3)));
        for (text, line) in cases {
            let found = check("a/src/b.rs", &text);
            assert_eq!(found.len(), 1, "{text}: {found:?}");
            assert_eq!(found[0].line, line, "{text}");
        }
    }

    #[test]
    fn an_issue_makes_a_note_acceptable() {
        let text = concat!("//! A.\n// TO", "DO(#12) later\n");
        assert!(check("a/src/b.rs", text).is_empty());
    }

    #[test]
    fn tests_may_be_longer_and_read_the_environment() {
        let text = format!("//! A.\n{}", "fn f() { env::var(x); }\n".repeat(1000));
        assert!(check("a/tests/main/b.rs", &text).is_empty());
        assert_eq!(check("a/src/b.rs", &text).len(), 1001);
    }

    #[test]
    fn long_functions_are_found() {
        let text = format!("fn f() {{\n{}}}\nfn g() {{\n{}}}\n", "\n".repeat(69), "\n".repeat(68));
        let found = long_functions(&text);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].name.as_str(), found[0].lines), ("f", 71));
    }
}
