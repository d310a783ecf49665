//! What a refused hand-off is said to be about: of two layouts that differ, where they differ.

/// Most characters of a value that is shown.
const VALUE_MAX: usize = 100;
/// Most differences that are shown.
const SHOWN_MAX: usize = 8;

/// One side of a refusal: role and fingerprint, then its layout, line by line.
struct Side<'a> {
    role: &'a str,
    fingerprint: &'a str,
    lines: Vec<&'a str>,
}

/// The beginning of a side: `Prefill 0123...: layout schema 3`.
fn begin(line: &str) -> Option<Side<'_>> {
    let (name, first) = line.split_once(": ")?;
    let (role, fingerprint) = name.split_once(' ')?;
    let is_fingerprint =
        fingerprint.len() == 32 && fingerprint.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_fingerprint.then(|| Side { role, fingerprint, lines: vec![first] })
}

fn sides(text: &str) -> Option<(&str, [Side<'_>; 2])> {
    let mut lines = text.lines();
    let title = lines.next()?;
    let mut found: Vec<Side<'_>> = Vec::new();
    for line in lines {
        match (begin(line), found.last_mut()) {
            (Some(side), _) => found.push(side),
            // Each layout ends with its fingerprint, which is said already.
            (None, Some(_)) if line.is_empty() || line.starts_with("fingerprint ") => {}
            (None, Some(side)) => side.lines.push(line),
            (None, None) => return None,
        }
    }
    Some((title, <[Side<'_>; 2]>::try_from(found).ok()?))
}

fn shown(value: &str) -> String {
    match value.char_indices().nth(VALUE_MAX) {
        Some((end, _)) => format!("{}...", &value[..end]),
        None => value.to_owned(),
    }
}

/// The parts of two lines that differ, after what names the line.
fn differences(one: &str, other: &str, out: &mut Vec<String>) {
    let (name, rest) = match (one.split_once(": "), other.split_once(": ")) {
        (Some((name, one)), Some((same, other))) if name == same => (name, (one, other)),
        _ => ("", (one, other)),
    };
    let (ours, theirs): (Vec<&str>, Vec<&str>) =
        (rest.0.split(", ").collect(), rest.1.split(", ").collect());
    let colon = if name.is_empty() { "" } else { ": " };
    if ours.len() != theirs.len() {
        out.push(format!("{name}{colon}{} | {}", shown(rest.0), shown(rest.1)));
        return;
    }
    let pairs = ours.into_iter().zip(theirs).filter(|(one, other)| one != other);
    out.extend(pairs.map(|(one, other)| format!("{name}{colon}{} | {}", shown(one), shown(other))));
}

/// A refusal in one line: of two layouts only what differs, with both values. Anything else as it is.
pub(super) fn condensed(text: &str) -> String {
    let Some((title, [one, other])) = sides(text) else { return text.to_owned() };
    let mut found = Vec::new();
    let longest = one.lines.len().max(other.lines.len());
    for at in 0..longest {
        let line = |side: &Side<'_>| side.lines.get(at).copied().unwrap_or("nothing").to_owned();
        let (ours, theirs) = (line(&one), line(&other));
        if ours != theirs {
            differences(&ours, &theirs, &mut found);
        }
    }
    let more = found.len().saturating_sub(SHOWN_MAX);
    found.truncate(SHOWN_MAX);
    let mut list = found.join("; ");
    if more > 0 {
        list = format!("{list}; and {more} more");
    }
    let name = |side: &Side<'_>| format!("{} {}", side.role.to_lowercase(), side.fingerprint);
    format!("{title}: {} | {}: {list}", name(&one), name(&other))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(keys: &str, row: &str) -> String {
        format!(
            "layout schema 3\nnumerics official, index keys {keys}\nlayers 2: window c4\n\
             cache 2 c4_index: pool block, ratio 4, row {row}, layers 1\nmodel type \"m\"\n"
        )
    }

    fn text(one: &str, other: &str) -> String {
        let (a, b) = ("a".repeat(32), "b".repeat(32));
        format!(
            "page layouts differ\nPrefill {a}: {one}fingerprint {a}\n\nDecode {b}: {other}fingerprint {b}\n"
        )
    }

    #[test]
    fn only_what_differs_is_said_with_both_values() {
        let found = condensed(&text(&layout("fp8", "128 B (e4m3)"), &layout("bf16", "256 B (le)")));
        let (a, b) = ("a".repeat(32), "b".repeat(32));
        let expected = format!(
            "page layouts differ: prefill {a} | decode {b}: index keys fp8 | index keys bf16; \
             cache 2 c4_index: row 128 B (e4m3) | row 256 B (le)"
        );
        assert_eq!(found, expected);
    }

    #[test]
    fn long_and_many_differences_are_cut() {
        let many = |word: &str| (0..20).map(|n| format!("line {n}: {word}\n")).collect::<String>();
        let found = condensed(&text(&many(&"x".repeat(500)), &many("y")));
        assert!(found.ends_with("; and 12 more") && found.len() < 2000, "{found}");
        // One that has lines which the other has not.
        let found = condensed(&text("layout schema 3\nmore\n", "layout schema 3\n"));
        assert!(found.ends_with(": more | nothing"), "{found}");
    }

    #[test]
    fn other_texts_stay_as_they_are() {
        for other in ["", "protocol versions differ", "page layouts differ\nours: a\ntheirs: b"] {
            assert_eq!(condensed(other), other);
        }
    }
}
