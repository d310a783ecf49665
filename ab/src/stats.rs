//! How much a count of bad answers says.
//!
//! Everything here is exact or errs to the careful side: a tool that blames a part must not do so by
//! chance.

/// Two-sided 95 % quantile of the normal distribution.
const Z95: f64 = 1.959_963_984_540_054;

/// A rate with its 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Events.
    pub hits: u64,
    /// Trials.
    pub trials: u64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

impl Rate {
    /// Wilson's score interval (E. B. Wilson, J. Am. Stat. Assoc. 22, 1927). Of no trials the interval is
    /// everything.
    ///
    /// # Panics
    /// If there are more hits than trials.
    #[must_use]
    pub fn new(hits: u64, trials: u64) -> Self {
        assert!(hits <= trials, "{hits} hits of {trials} trials");
        if trials == 0 {
            return Self { hits, trials, low: 0.0, high: 1.0 };
        }
        let (n, p) = (trials as f64, hits as f64 / trials as f64);
        let z2 = Z95 * Z95;
        let centre = (p + z2 / (2.0 * n)) / (1.0 + z2 / n);
        let half = Z95 / (1.0 + z2 / n) * (p * (1.0 - p) / n + z2 / (4.0 * n * n)).sqrt();
        // Rounding must not leave the point outside of its interval.
        let low = if hits == 0 { 0.0 } else { (centre - half).max(0.0) };
        let high = if hits == trials { 1.0 } else { (centre + half).min(1.0) };
        Self { hits, trials, low, high }
    }

    /// The rate itself; 0 of no trials.
    #[must_use]
    pub fn value(&self) -> f64 {
        if self.trials == 0 { 0.0 } else { self.hits as f64 / self.trials as f64 }
    }

    /// Whether `rate` is inside of the interval.
    #[must_use]
    pub fn holds(&self, rate: f64) -> bool {
        (self.low..=self.high).contains(&rate)
    }
}

/// Probability of at most `k` heads of `n` throws of a fair coin.
fn fair_tail(k: u64, n: u64) -> f64 {
    // Terms as logarithms: the coefficients are beyond any float from n of about a thousand on.
    let mut log_term = -(n as f64) * std::f64::consts::LN_2;
    let mut sum = 0.0;
    for i in 0..=k {
        sum += log_term.exp();
        log_term += ((n - i) as f64 / (i + 1) as f64).ln();
    }
    sum.min(1.0)
}

/// Two runs of the same requests: how likely is a difference as large as theirs, if there is none?
/// `only_a` requests went wrong in the first alone, `only_b` in the second alone; those that are alike
/// in both say nothing (McNemar's exact test, two-sided).
#[must_use]
pub fn paired_p(only_a: u64, only_b: u64) -> f64 {
    let n = only_a + only_b;
    (2.0 * fair_tail(only_a.min(only_b), n)).min(1.0)
}

/// Trials after which an event of this rate has been seen at least once with 95 % probability; that is
/// all it takes where it never happens by itself.
#[must_use]
pub fn trials_to_see(rate: f64) -> Option<u64> {
    if !(rate > 0.0 && rate <= 1.0) {
        return None;
    }
    if rate == 1.0 {
        return Some(1);
    }
    Some((0.05_f64.ln() / (1.0 - rate).ln()).ceil() as u64)
}

/// Trials of both cells after which the paired test tells an event of this rate from one that does not
/// happen in the other cell, with 95 % probability: until six events are seen ([`paired_p`] of 6 and 0
/// is below 0.05, of 5 and 0 it is not).
#[must_use]
pub fn trials_to_tell(rate: f64) -> Option<u64> {
    const NEEDED: u64 = 6;
    if !(rate > 0.0 && rate <= 1.0) {
        return None;
    }
    let fewer = |n: u64| binomial_below(NEEDED, n, rate);
    let mut high = NEEDED;
    while fewer(high) > 0.05 {
        high = high.checked_mul(2)?;
    }
    let mut low = NEEDED.max(high / 2);
    while low < high {
        let middle = low + (high - low) / 2;
        if fewer(middle) > 0.05 {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    Some(high)
}

/// Probability of fewer than `k` events in `n` trials.
fn binomial_below(k: u64, n: u64, rate: f64) -> f64 {
    if rate >= 1.0 {
        return if n < k { 1.0 } else { 0.0 };
    }
    let odds = (rate / (1.0 - rate)).ln();
    let mut log_term = n as f64 * (1.0 - rate).ln();
    let mut sum = 0.0;
    for i in 0..k.min(n + 1) {
        sum += log_term.exp();
        log_term += odds + ((n - i) as f64 / (i + 1) as f64).ln();
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64, by: f64) -> bool {
        (a - b).abs() <= by
    }

    #[test]
    fn intervals_are_those_of_the_textbook() {
        // statsmodels.stats.proportion.proportion_confint(..., method="wilson")
        for (hits, trials, low, high) in [
            (1, 33, 0.005_365, 0.153_19),
            (14, 80, 0.107_21, 0.272_58),
            (0, 60, 0.0, 0.060_17),
            (60, 60, 0.939_83, 1.0),
        ] {
            let rate = Rate::new(hits, trials);
            assert!(near(rate.low, low, 5e-5), "{rate:?}");
            assert!(near(rate.high, high, 5e-5), "{rate:?}");
            assert!(rate.holds(rate.value()));
        }
        assert_eq!((Rate::new(0, 0).low, Rate::new(0, 0).high), (0.0, 1.0));
    }

    #[test]
    fn pairs_that_differ_decide() {
        assert!(near(paired_p(0, 0), 1.0, 1e-12));
        assert!(near(paired_p(5, 0), 0.0625, 1e-12));
        assert!(near(paired_p(6, 0), 0.031_25, 1e-12));
        assert!(near(paired_p(6, 0), paired_p(0, 6), 1e-12));
        assert!(near(paired_p(10, 2), 0.038_574, 1e-6));
        assert!(near(paired_p(7, 7), 1.0, 1e-12));
        let many = paired_p(3000, 2000);
        assert!(many > 0.0 && many < 1e-40, "{many}");
    }

    #[test]
    fn as_many_trials_are_wanted_as_the_rate_asks_for() {
        assert_eq!(trials_to_see(0.01), Some(299));
        assert_eq!(trials_to_see(0.03), Some(99));
        assert_eq!(trials_to_see(0.18), Some(16));
        assert_eq!(trials_to_see(1.0), Some(1));
        for rate in [0.01, 0.03, 0.18, 0.5] {
            let n = trials_to_tell(rate).unwrap();
            assert!(binomial_below(6, n, rate) <= 0.05 && binomial_below(6, n - 1, rate) > 0.05);
            assert!(n > trials_to_see(rate).unwrap());
        }
        assert_eq!(trials_to_tell(1.0), Some(6));
        for bad in [0.0, -1.0, 1.5, f64::NAN] {
            assert_eq!((trials_to_see(bad), trials_to_tell(bad)), (None, None));
        }
    }
}
