//! Counters as servers tell them (text format of Prometheus), and which of them are meant.

use std::str::FromStr;

/// Samples of one name that have all of some labels, written as `name{label="value",...}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector {
    name: String,
    labels: Vec<(String, String)>,
}

/// A text that selects nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not name{{label=\"value\",...}}")]
pub struct BadSelector(String);

impl FromStr for Selector {
    type Err = BadSelector;

    fn from_str(text: &str) -> Result<Self, BadSelector> {
        let (name, labels) = split(text).ok_or_else(|| BadSelector(text.to_owned()))?;
        if name.is_empty() || name.contains(char::is_whitespace) {
            return Err(BadSelector(text.to_owned()));
        }
        Ok(Self { name: name.to_owned(), labels })
    }
}

/// Name and labels of what stands before a value.
fn split(text: &str) -> Option<(&str, Vec<(String, String)>)> {
    let Some((name, rest)) = text.split_once('{') else { return Some((text, Vec::new())) };
    let mut rest = rest.strip_suffix('}')?;
    let mut labels = Vec::new();
    while !rest.is_empty() {
        let (label, after) = rest.split_once("=\"")?;
        let (value, after) = quoted(after)?;
        labels.push((label.trim().to_owned(), value));
        rest = after.strip_prefix(',').unwrap_or(after).trim_start();
    }
    Some((name, labels))
}

/// A value up to its closing quote, and what comes behind that.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match characters.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}

impl Selector {
    /// The sum of the selected samples of a page of metrics.
    #[must_use]
    pub fn sum(&self, page: &str) -> f64 {
        let samples = page.lines().filter(|line| !line.starts_with('#'));
        let values = samples.filter_map(|line| {
            let (what, value) = line.trim().rsplit_once(' ')?;
            let (name, labels) = split(what)?;
            let is_meant =
                name == self.name && self.labels.iter().all(|label| labels.contains(label));
            if is_meant { value.parse::<f64>().ok() } else { None }
        });
        // Not `sum`, which is -0 of nothing.
        values.fold(0.0, |sum, value| sum + value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = r#"# HELP dsv4:handoff_faults_total What went wrong.
# TYPE dsv4:handoff_faults_total counter
dsv4:handoff_faults_total{role="decode",event="mismatch",peer="a, \"b\":1",kind="c4_index"} 3
dsv4:handoff_faults_total{role="decode",event="mismatch",peer="c",kind="c4_kv"} 4
dsv4:handoff_faults_total{role="decode",event="retry",peer="c",kind="block"} 5
dsv4:steps_total{role="decode"} 1e3
up 1
"#;

    #[test]
    fn samples_with_all_labels_are_added() {
        let sum = |text: &str| text.parse::<Selector>().unwrap().sum(PAGE);
        assert_eq!(sum("dsv4:handoff_faults_total{event=\"mismatch\"}"), 7.0);
        assert_eq!(sum("dsv4:handoff_faults_total{kind=\"c4_kv\",event=\"mismatch\"}"), 4.0);
        assert_eq!(sum("dsv4:handoff_faults_total{peer=\"a, \\\"b\\\":1\"}"), 3.0);
        assert_eq!((sum("dsv4:steps_total"), sum("up"), sum("dsv4:steps")), (1000.0, 1.0, 0.0));
    }

    #[test]
    fn what_selects_nothing_is_named() {
        for bad in ["", "a b", "a{b}", "a{b=\"c}", "a{b=\"c\""] {
            let error = bad.parse::<Selector>().unwrap_err().to_string();
            assert!(error.contains(&format!("{bad:?}")), "{error}");
        }
    }
}
