//! Rules for the clauses of the hand-off protocol: each is a rule, says what it prevents, and is
//! cited by the code that keeps it and by a test that fails without it.

use super::{Finding, rust};
use crate::lex::{is_word, line_of, mask};
use anyhow::{Context as _, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Where the clauses stand.
const SPEC: &str = "pd-transfer/spec/protocol.md";
/// The crate that must cite each of them; others may.
const CRATE: &str = "pd-transfer/";
/// Start of an id; a letter and a number follow. In pieces, since this file cites nothing.
const PREFIX: &str = concat!("PD", "-");

/// Findings about the clauses and everything in `files` that cites them.
pub(super) fn check(root: &Path, files: &[String]) -> Result<Vec<Finding>> {
    // A tree without the crate has nothing to hold to.
    if !files.iter().any(|path| path.starts_with(CRATE)) {
        return Ok(Vec::new());
    }
    let spec = std::fs::read_to_string(root.join(SPEC)).with_context(|| format!("read {SPEC}"))?;
    let mut sources = Vec::new();
    for path in files.iter().filter(|path| path.ends_with(".rs")) {
        let Ok(text) = std::fs::read_to_string(root.join(path)) else { continue };
        if text.contains(PREFIX) {
            sources.push((path.clone(), text));
        }
    }
    Ok(compare(&spec, &sources))
}

/// The same over texts.
fn compare(spec: &str, sources: &[(String, String)]) -> Vec<Finding> {
    let (clauses, mut findings) = clauses(spec);
    let (mut in_code, mut in_tests) = (BTreeSet::new(), BTreeSet::new());
    for (path, text) in sources {
        let tests_from = first_test_line(path, text);
        let comments = mask(text).comments;
        for (at, id) in ids(&comments) {
            let line = line_of(&comments, at);
            if !clauses.contains_key(id) {
                findings.push(Finding::new(path, line, format!("{id} is no clause of {SPEC}")));
            } else if path.starts_with(CRATE) {
                let cited = if line < tests_from { &mut in_code } else { &mut in_tests };
                cited.insert(id.to_owned());
            }
        }
    }
    for (id, line) in clauses {
        for (cited, by) in [(&in_code, "code"), (&in_tests, "test")] {
            if !cited.contains(id) {
                let text = format!("{id} is cited by no {by} of {CRATE}: name it in a comment");
                findings.push(Finding::new(SPEC, line, text));
            }
        }
    }
    findings
}

/// Ids with their lines, and what is wrong with the clauses themselves.
fn clauses(spec: &str) -> (BTreeMap<&str, usize>, Vec<Finding>) {
    let (mut clauses, mut findings) = (BTreeMap::new(), Vec::new());
    let lines: Vec<&str> = spec.lines().collect();
    for (number, line) in (1..).zip(&lines) {
        let Some((id, rule)) = line.strip_prefix("- **").and_then(|rest| rest.split_once("** "))
        else {
            continue;
        };
        if ids(id).map(|(_, found)| found).ne([id]) {
            continue;
        }
        let mut wrong = |text: String| findings.push(Finding::new(SPEC, number, text));
        if clauses.insert(id, number).is_some() {
            wrong(format!("{id} stands here twice"));
        }
        if !rule.contains("MUST") {
            wrong(format!("{id} says nothing that anybody MUST do"));
        }
        let reason = lines.get(number).and_then(|next| next.strip_prefix("  Prevents: "));
        if reason.is_none_or(|reason| reason.trim().is_empty()) {
            wrong(format!("{id} does not say what it prevents, on the next line"));
        }
    }
    if clauses.is_empty() {
        findings.push(Finding::new(SPEC, 0, "no clauses were found"));
    }
    (clauses, findings)
}

/// Ids in `text` with their places: the prefix, one capital letter, a number.
fn ids(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.match_indices(PREFIX).filter_map(|(at, _)| {
        let rest = &text[at + PREFIX.len()..];
        let letter = rest.chars().next().filter(char::is_ascii_uppercase)?;
        let digits = rest[1..].bytes().take_while(u8::is_ascii_digit).count();
        let before = text[..at].chars().next_back().is_some_and(is_word);
        let after = rest[1 + digits..].chars().next().is_some_and(is_word);
        let end = at + PREFIX.len() + letter.len_utf8() + digits;
        (digits > 0 && !before && !after).then(|| (at, &text[at..end]))
    })
}

/// The line from which on a file holds tests; `usize::MAX` if it holds none.
fn first_test_line(path: &str, text: &str) -> usize {
    if rust::is_test(path) || path.contains("/src/testing") {
        return 0;
    }
    let test = concat!("#[cfg(te", "st)]");
    text.lines().position(|line| line == test).map_or(usize::MAX, |at| at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(clauses: &[(&str, &str)]) -> String {
        clauses.iter().map(|(id, text)| format!("- **{PREFIX}{id}** {text}\n")).collect()
    }

    const GOOD: &str = "A node MUST x.\n  Prevents: y.";

    fn findings(spec: &str, sources: &[(&str, &str)]) -> Vec<String> {
        let own = |(path, text): &(&str, &str)| {
            (format!("pd-transfer/{path}"), text.replace('@', PREFIX))
        };
        let sources: Vec<_> = sources.iter().map(own).collect();
        compare(spec, &sources).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_clause_cited_on_both_sides_is_fine() {
        let spec = spec(&[("A1", GOOD)]);
        let test = "// @A1\n#[test]\nfn f() {}\n";
        for tests in ["tests/it/a.rs", "src/a_tests.rs", "src/a/tests.rs", "src/testing/a.rs"] {
            assert!(findings(&spec, &[("src/a.rs", "// @A1\n"), (tests, test)]).is_empty());
        }
        let both = "fn f() {} // @A1\n#[cfg(test)]\nmod tests {\n    // @A1\n}\n";
        assert!(findings(&spec, &[("src/a.rs", both)]).is_empty());
    }

    #[test]
    fn a_missing_citation_is_found() {
        let spec = spec(&[("A1", GOOD)]);
        let found = findings(&spec, &[("src/a.rs", "// @A1\n")]);
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("no test"), "{found:?}");
        let found = findings(&spec, &[("tests/it/a.rs", "// @A1\n")]);
        assert!(found.len() == 1 && found[0].contains("no code"), "{found:?}");
        // In a string it is no citation, and a longer number is another clause.
        let found = findings(&spec, &[("src/a.rs", "f(\"@A1\") // @A11\n")]);
        assert_eq!(found.len(), 3, "{found:?}");
    }

    #[test]
    fn an_unknown_clause_is_found_in_any_crate() {
        let text = format!("\n// as {PREFIX}Q9 says\n");
        let found = compare(&spec(&[("A1", GOOD)]), &[("server/src/a.rs".to_owned(), text)]);
        let there: Vec<_> = found.iter().filter(|finding| finding.path != SPEC).collect();
        assert_eq!((there.len(), there[0].line), (1, 2), "{found:?}");
    }

    #[test]
    fn a_document_without_clauses_is_found() {
        assert_eq!(findings(&spec(&[]), &[]).len(), 1);
    }

    #[test]
    fn clauses_have_a_rule_and_a_reason_and_one_place() {
        let cited = [("src/a.rs", "// @A1\n"), ("tests/it/a.rs", "// @A1\n")];
        for bad in [
            spec(&[("A1", GOOD), ("A1", GOOD)]),
            spec(&[("A1", "A node does x.\n  Prevents: y.")]),
            spec(&[("A1", "A node MUST x.")]),
            spec(&[("A1", "A node MUST x.\n  Prevents: ")]),
        ] {
            assert_eq!(findings(&bad, &cited).len(), 1, "{bad}");
        }
    }
}
