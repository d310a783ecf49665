//! What an audit of live workers is asked, and what it found.

use std::pin::Pin;
use std::time::Duration;

/// Findings of one worker that are told one by one; more are counted.
pub const FINDINGS_MAX: usize = 256;

/// What is to be looked at.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wish {
    /// Share of the sealed pages, and of the objects in host memory, that are digested again.
    pub sample: f64,
    /// Prefixes of which the last part is computed again.
    pub windows: u32,
    /// Which pages a sample takes.
    pub seed: u64,
}

impl Wish {
    /// Whether the sample takes the `index`th page or object of a `kind`: as a function of the seed,
    /// so that the same question looks at the same pages.
    #[must_use]
    pub fn takes(&self, kind: u64, index: u64) -> bool {
        let mut z = self.seed ^ kind.rotate_left(56) ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        // 53 bits are exact.
        ((z >> 11) as f64) < self.sample * (1_u64 << 53) as f64
    }
}

/// How something wrong was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum How {
    /// A sealed page has another digest than when it was sealed.
    Digest,
    /// Rows that were computed again from the same tokens are others.
    Recompute,
    /// An object in host memory does not match its tags.
    Host,
    /// A sealed page had another digest when it was to be saved to host memory; no audit was needed.
    Save,
}

impl How {
    /// All, in the order in which they are counted.
    pub const ALL: [Self; 4] = [Self::Digest, Self::Recompute, Self::Host, Self::Save];

    /// Name in answers, logs and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Digest => "digest",
            Self::Recompute => "recompute",
            Self::Host => "host",
            Self::Save => "save",
        }
    }
}

/// Something that is not what it should be. Its page or object was given up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// How it was found.
    pub how: How,
    /// Name of the cache; `object` for a host object that cannot be read as one.
    pub kind: String,
    /// Layer, where it is known.
    pub layer: Option<u16>,
    /// Page of the device: pool, index and generation.
    pub page: Option<String>,
    /// Block or window page number in its sequence.
    pub page_no: Option<u32>,
    /// The first row that differs, when the right ones were there to compare with.
    pub row: Option<u32>,
    /// What was to be expected, and what was there: digests, or what an object says.
    pub expected: String,
    /// See [`Self::expected`].
    pub found: String,
    /// Whose it is: requests and prefixes.
    pub held_by: Vec<String>,
}

/// How much there was and how much of it was looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Looked {
    /// There.
    pub there: u64,
    /// Looked at.
    pub checked: u64,
    /// Bytes of that.
    pub bytes: u64,
}

/// What was found in one worker.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorkerAudit {
    /// Its part.
    pub role: &'static str,
    /// Sealed pages of each pool, in the order of [`crate::glue::pools::POOLS`].
    pub pages: [Looked; 3],
    /// Pages that are still written, which nobody can digest.
    pub open: u64,
    /// Pages and objects of the sample that were given back before their turn.
    pub gone: u64,
    /// Objects in host memory.
    pub host: Looked,
    /// Prefixes of which the last part was computed again; their bytes are those compared.
    pub windows: Looked,
    /// Tokens that were computed for that.
    pub window_tokens: u64,
    /// Pages that were compared.
    pub window_pages: u64,
    /// What could not be looked at, and why.
    pub skipped: Vec<String>,
    /// What is wrong.
    pub findings: Vec<Finding>,
    /// Further findings.
    pub more_findings: u64,
    /// Time from the question to the answer.
    pub lasted: Duration,
}

impl WorkerAudit {
    /// Takes note of something that is wrong.
    pub fn find(&mut self, finding: Finding) {
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(finding);
        } else {
            self.more_findings += 1;
        }
    }

    /// How much is wrong.
    #[must_use]
    pub fn wrong(&self) -> u64 {
        self.findings.len() as u64 + self.more_findings
    }
}

/// The audits of all workers of a process; one that has ended has none.
pub type Auditing = Pin<Box<dyn Future<Output = Vec<WorkerAudit>> + Send>>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_takes_its_share_and_the_same_pages_again() {
        let taken = |sample, seed| {
            let wish = Wish { sample, windows: 0, seed };
            (0..10_000).filter(|index| wish.takes(1, *index)).collect::<Vec<u64>>()
        };
        assert_eq!(taken(1.0, 3).len(), 10_000);
        assert!(taken(0.0, 3).is_empty());
        let tenth = taken(0.1, 3);
        assert!((900..1100).contains(&tenth.len()), "{}", tenth.len());
        assert_eq!(tenth, taken(0.1, 3));
        assert_ne!(tenth, taken(0.1, 4));
    }

    #[test]
    fn findings_are_told_up_to_a_bound_and_counted_beyond() {
        let mut audit = WorkerAudit::default();
        let finding = Finding {
            how: How::Digest,
            kind: "c4_kv".to_owned(),
            layer: Some(3),
            page: None,
            page_no: None,
            row: None,
            expected: String::new(),
            found: String::new(),
            held_by: Vec::new(),
        };
        (0..FINDINGS_MAX + 5).for_each(|_| audit.find(finding.clone()));
        assert_eq!((audit.findings.len(), audit.more_findings), (FINDINGS_MAX, 5));
        assert_eq!(audit.wrong(), FINDINGS_MAX as u64 + 5);
    }
}
