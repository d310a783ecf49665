//! Stop texts in a growing text.

/// Finds the first complete stop text, and holds back what may become one.
///
/// Which stop text ends the output does not depend on how the text is cut: it is the one that is
/// complete first, and the longest of those that are complete at the same place.
#[derive(Debug)]
pub(super) struct StopMatcher {
    stops: Vec<String>,
    /// Whether the stop text itself is given out.
    includes: bool,
    /// Text not given out: a proper beginning of some stop text.
    held: String,
}

/// What can be given out.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Released {
    /// Text before any stop text, or with it.
    pub(super) text: String,
    /// Whether a stop text followed; nothing comes after it.
    pub(super) stopped: bool,
}

impl StopMatcher {
    /// Matcher for some stop texts, none of them empty. With `includes` the one that is found is
    /// given out as well.
    pub(super) fn new(stops: Vec<String>, includes: bool) -> Self {
        Self { stops, includes, held: String::new() }
    }

    /// Adds text.
    pub(super) fn push(&mut self, text: &str) -> Released {
        self.held.push_str(text);
        let first = self
            .stops
            .iter()
            .filter_map(|stop| self.held.find(stop).map(|start| (start + stop.len(), start)))
            .min();
        if let Some((end, start)) = first {
            let mut text = std::mem::take(&mut self.held);
            text.truncate(if self.includes { end } else { start });
            return Released { text, stopped: true };
        }
        let keep = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        Released { text: std::mem::replace(&mut self.held, rest), stopped: false }
    }

    /// What was held back and became no stop text.
    pub(super) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Bytes of the longest end of `text` that is a beginning of `stop`, and shorter than it.
fn overlap(text: &str, stop: &str) -> usize {
    stop.char_indices()
        .map(|(end, _)| end)
        .rev()
        .find(|&end| text.ends_with(&stop[..end]))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed(parts: &[&str], stops: &[&str]) -> (String, bool) {
        let mut matcher =
            StopMatcher::new(stops.iter().map(|&stop| stop.to_owned()).collect(), false);
        let mut out = String::new();
        for part in parts {
            let released = matcher.push(part);
            out += &released.text;
            if released.stopped {
                return (out, true);
            }
        }
        (out + &matcher.finish(), false)
    }

    #[test]
    fn cuts_do_not_matter() {
        for (text, stops, expected, stopped) in [
            ("one two three", &["two"][..], "one ", true),
            ("aaab", &["aab"], "a", true),
            ("abcabd", &["abd"], "abc", true),
            ("abcd", &["abcd", "bc"], "a", true),
            ("abcd", &["cd", "bcd"], "a", true),
            ("naïve é€", &["é€"], "naïve ", true),
            ("è and é", &["é!"], "è and é", false),
            ("almost sto", &["stop"], "almost sto", false),
            ("nothing", &[], "nothing", false),
        ] {
            let cuts: Vec<usize> =
                text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
            for &first in &cuts {
                for &second in cuts.iter().filter(|&&second| second >= first) {
                    let parts = [&text[..first], &text[first..second], &text[second..]];
                    let found = feed(&parts, stops);
                    assert_eq!(found, (expected.to_owned(), stopped), "{parts:?} {stops:?}");
                }
            }
        }
    }

    #[test]
    fn the_stop_text_is_given_out_where_that_is_wanted() {
        for (cut, expected) in [(0, "a</b>"), (3, "a</b>"), (5, "a</b>")] {
            let mut matcher = StopMatcher::new(vec!["</b>".to_owned()], true);
            let (one, two) = "a</b>c".split_at(cut);
            let released = matcher.push(one);
            let mut text = released.text;
            if !released.stopped {
                text += &matcher.push(two).text;
            }
            assert_eq!(text, expected, "cut at {cut}");
        }
    }

    #[test]
    fn only_what_may_become_a_stop_text_is_held() {
        let mut matcher = StopMatcher::new(vec!["<end>".to_owned()], false);
        assert_eq!(matcher.push("hi <e").text, "hi ");
        assert_eq!(matcher.push("x").text, "<ex");
        assert_eq!(matcher.push("<end").text, "");
        assert!(matcher.push(">").stopped);
    }
}
