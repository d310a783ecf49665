//! Counts what test runners report.

use std::time::Duration;

/// Tests that ran, over several binaries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    /// Passed.
    pub(super) passed: u64,
    /// Failed.
    pub(super) failed: u64,
    /// Left out by a filter.
    pub(super) filtered: u64,
}

impl Tally {
    /// Takes the numbers out of a closing line of libtest or nextest; other lines do nothing.
    pub(super) fn see(&mut self, line: &str) {
        let line = line.trim_start();
        let is_nextest = line.starts_with("Summary [")
            && (line.contains(" tests run") || line.contains(" test run"));
        let counts = match line.strip_prefix("test result: ") {
            Some(counts) => counts,
            None if is_nextest => line,
            None => return,
        };
        self.passed += number_before(counts, "passed");
        self.failed += number_before(counts, "failed");
        self.filtered += number_before(counts, "filtered") + number_before(counts, "skipped");
    }

    /// Adds the numbers of another tally.
    pub(super) fn add(&mut self, other: &Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.filtered += other.filtered;
    }

    /// The sum in the form of a closing line of libtest.
    pub(super) fn libtest_line(&self, time: Duration) -> String {
        let word = if self.failed == 0 { "ok" } else { "FAILED" };
        format!(
            "test result: {word}. {} passed; {} failed; 0 ignored; 0 measured; {} filtered out; \
             finished in {:.2}s",
            self.passed,
            self.failed,
            self.filtered,
            time.as_secs_f64()
        )
    }
}

/// The number that stands before `word`, 0 if there is none.
fn number_before(text: &str, word: &str) -> u64 {
    let parts: Vec<&str> = text.split(|c: char| !c.is_alphanumeric()).collect();
    let parts: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    let at = parts.windows(2).find(|pair| pair[1] == word);
    at.and_then(|pair| pair[0].parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_of_both_runners_are_added_up() {
        let mut tally = Tally::default();
        tally.see("test a::b ... ok");
        tally.see("test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 3 filtered out; finished in 0.00s");
        assert_eq!(tally, Tally { passed: 12, failed: 0, filtered: 3 });
        tally.see(
            "     Summary [   0.123s] 512 tests run: 511 passed (2 slow), 1 failed, 4 skipped",
        );
        assert_eq!(tally, Tally { passed: 523, failed: 1, filtered: 7 });
        tally.see("     Summary [   0.123s] 1 test run: 1 passed, 0 skipped");
        assert_eq!(tally.passed, 524);
    }

    #[test]
    fn the_sum_reads_like_a_closing_line() {
        let tally = Tally { passed: 7, failed: 0, filtered: 2 };
        let line = tally.libtest_line(Duration::from_millis(1500));
        let mut again = Tally::default();
        again.see(&line);
        assert_eq!(again, tally);
        assert!(line.starts_with("test result: ok. 7 passed; 0 failed;"), "{line}");
    }
}
