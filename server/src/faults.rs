//! Historical faults of other systems, as switches of the test build `server-faulty`.
//!
//! This file names them and decides which page or record one strikes; it does nothing by itself.
//! [`transport`] and [`tiers`] stand in the data path and do what is decided here, and the places in
//! other files that call them are marked with the feature `faults`. Without the feature none of this
//! is compiled; with it, nothing happens in a program that was not allowed to ([`allow`]), which only
//! `server-faulty` is.
//!
//! A fault damages what moves, before it is checked. With the protection on, everything else is the
//! engine as it is released: what arrives is compared with its tag, a record with its hash, and pages
//! are free only when nothing can write them any more. With the protection off these checks say yes,
//! as in systems that have none.

pub mod tiers;
pub mod transport;

use kv_pool::{CacheKind, IndexKeyType, PoolKind};
use std::ffi::{OsStr, OsString};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Bytes of an FP8 index-key page, for which one system went on taking its pages after they had become
/// BF16.
pub const FP8_INDEX_PAGE: u32 = 8448;

/// What goes wrong. `docs/faults.md` says what each one was in the field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fault {
    /// Nothing: for what the protection costs.
    None,
    /// Index-key pages are handed over with the item length of FP8.
    HalfIndexKey,
    /// BF16 index-key pages are read before the last step has written them, the more often the more
    /// requests run.
    EarlyRead,
    /// Index-key pages are looked for at multiples of the FP8 page.
    WrongStride,
    /// Pages of a hand-off are free as soon as its client has gone, with reads into them under way.
    FreedAtAbort,
    /// A read is reported before its bytes are there.
    NotifyFirst,
    /// Window rows do not come back with a prefix.
    WindowNotRestored,
    /// An object of the host tier is overwritten with another one while it is copied to the device.
    StaleHostPage,
    /// The final record of a hand-off has what was in its slot before.
    RecordReused,
    /// The compressors' state is of a kind that the hand-off does not know, and skips.
    CarryMissing,
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::None,
        Self::HalfIndexKey,
        Self::EarlyRead,
        Self::WrongStride,
        Self::FreedAtAbort,
        Self::NotifyFirst,
        Self::WindowNotRestored,
        Self::StaleHostPage,
        Self::RecordReused,
        Self::CarryMissing,
    ];

    /// Its name in flags, metrics and plans.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::HalfIndexKey => "half_index_key",
            Self::EarlyRead => "early_read",
            Self::WrongStride => "wrong_stride",
            Self::FreedAtAbort => "freed_at_abort",
            Self::NotifyFirst => "notify_first",
            Self::WindowNotRestored => "window_not_restored",
            Self::StaleHostPage => "stale_host_page",
            Self::RecordReused => "record_reused",
            Self::CarryMissing => "carry_missing",
        }
    }

    /// Of how many things that it could strike it does, if nothing else is said.
    const fn share(self) -> f64 {
        match self {
            // A lane is now and then ahead of another one.
            Self::NotifyFirst => 0.1,
            // Some reads take long; those that nobody aborts are none the worse for it.
            Self::FreedAtAbort => 0.1,
            _ => 1.0,
        }
    }
}

/// What is injected.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Injection {
    /// Which fault.
    pub fault: Fault,
    /// Whether the engine checks what it gets.
    pub is_protected: bool,
    /// Share of what it could strike that it strikes.
    pub share: f64,
}

/// Flags that do not say what is to be injected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlagError {
    /// A flag without its value.
    #[error("{0} needs a value")]
    Missing(&'static str),
    /// A value that the flag does not have.
    #[error("{flag} {given:?}: {wanted} expected")]
    Value {
        /// Flag.
        flag: &'static str,
        /// Value.
        given: String,
        /// What it may be.
        wanted: String,
    },
    /// They say how, and not what.
    #[error("{0} without --fault")]
    Alone(&'static str),
}

/// Which fault.
const FAULT: &str = "--fault";
/// `on` or `off`.
const PROTECTION: &str = "--fault-protection";
/// From 0 to 1.
const SHARE: &str = "--fault-share";

impl Injection {
    /// Takes the flags of faults out of a command line; the rest is the server's.
    ///
    /// # Errors
    /// [`FlagError`].
    pub fn take(
        args: impl IntoIterator<Item = OsString>,
    ) -> Result<(Option<Self>, Vec<OsString>), FlagError> {
        let (mut fault, mut is_protected, mut share) = (None, None, None);
        let (mut rest, mut args) = (Vec::new(), args.into_iter());
        while let Some(word) = args.next() {
            let flag = [FAULT, PROTECTION, SHARE].into_iter().find(|flag| word == OsStr::new(flag));
            let Some(flag) = flag else {
                rest.push(word);
                continue;
            };
            let given = args.next().ok_or(FlagError::Missing(flag))?;
            let given = given.to_string_lossy().into_owned();
            let wrong = |wanted: &str| {
                let (given, wanted) = (given.clone(), wanted.to_owned());
                FlagError::Value { flag, given, wanted }
            };
            match flag {
                FAULT => {
                    let found = Fault::ALL.into_iter().find(|fault| fault.name() == given);
                    let names = Fault::ALL.map(Fault::name).join(", ");
                    fault = Some(found.ok_or_else(|| wrong(&names))?);
                }
                PROTECTION => {
                    let names = [("on", true), ("off", false)];
                    let found = names.into_iter().find(|(name, _)| *name == given);
                    is_protected = Some(found.ok_or_else(|| wrong("on or off"))?.1);
                }
                _ => {
                    let number = given.parse().ok().filter(|n| (0.0..=1.0).contains(n));
                    share = Some(number.ok_or_else(|| wrong("a number from 0 to 1"))?);
                }
            }
        }
        let Some(fault) = fault else {
            let alone = is_protected.map(|_| PROTECTION).or_else(|| share.map(|_| SHARE));
            return alone.map_or(Ok((None, rest)), |flag| Err(FlagError::Alone(flag)));
        };
        let (is_protected, share) = (is_protected.unwrap_or(true), share.unwrap_or(fault.share()));
        Ok((Some(Self { fault, is_protected, share }), rest))
    }
}

/// A page that is about to be read from a peer.
#[derive(Clone, Copy, Debug)]
pub struct Read {
    /// Its pool.
    pub pool: PoolKind,
    /// What it holds.
    pub kind: CacheKind,
    /// Type of the index keys.
    pub index: IndexKeyType,
    /// Bytes from page to page.
    pub page_bytes: u32,
    /// Its number in its pool.
    pub page: u64,
    /// Bytes that are read.
    pub bytes: u32,
}

/// What becomes of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// So many of its first bytes are read.
    Head(u32),
    /// The source is so far from the section's beginning.
    At(u64),
    /// Nothing is read, and it is called done.
    Skip,
    /// It is called done, and done afterwards.
    Late,
    /// It takes long.
    Slow,
}

/// How much more of them come early with each request that runs beside the first one.
const EARLY_STEP: f64 = 0.1;

impl Injection {
    /// What becomes of a read; `chance` is the number of those before it that it could have struck, and
    /// `running` how many requests run.
    #[must_use]
    pub fn damage(&self, read: &Read, running: u32, chance: &AtomicU64) -> Option<Damage> {
        let strikes = |share: f64| strikes(chance, share);
        let is_index = read.kind == CacheKind::C4Index;
        match self.fault {
            Fault::HalfIndexKey if is_index && read.bytes > FP8_INDEX_PAGE => {
                strikes(self.share).then_some(Damage::Head(FP8_INDEX_PAGE))
            }
            // The step that was to be waited for had written none to three quarters of the rows.
            Fault::EarlyRead if is_index && read.index == IndexKeyType::Bf16 => {
                let share = f64::from(running.saturating_sub(1)) * EARLY_STEP;
                let quarters = chance.load(Ordering::Relaxed) % 4;
                let written = u64::from(read.bytes) * quarters / 4;
                strikes(share.min(1.0) * self.share)
                    .then_some(Damage::Head((written as u32).max(1)))
            }
            Fault::WrongStride if is_index && read.page_bytes != FP8_INDEX_PAGE => {
                strikes(self.share).then(|| Damage::At(read.page * u64::from(FP8_INDEX_PAGE)))
            }
            Fault::CarryMissing if read.pool == PoolKind::Carry => {
                strikes(self.share).then_some(Damage::Skip)
            }
            Fault::NotifyFirst => strikes(self.share).then_some(Damage::Late),
            Fault::FreedAtAbort => strikes(self.share).then_some(Damage::Slow),
            _ => None,
        }
    }
}

/// Spreads so large a share evenly over what is counted: the fractions of multiples of the golden ratio
/// are as far from each other as can be.
fn strikes(count: &AtomicU64, share: f64) -> bool {
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    let number = count.fetch_add(1, Ordering::Relaxed);
    let place = number.wrapping_add(1).wrapping_mul(GOLDEN) >> 11;
    (place as f64) < share * (1_u64 << 53) as f64
}

/// What is injected into this process, and how often it has been.
#[derive(Debug)]
pub struct Armed {
    /// What.
    pub injection: Injection,
    chance: AtomicU64,
    struck: AtomicU64,
    running: AtomicU32,
}

static ALLOWED: AtomicBool = AtomicBool::new(false);
static ARMED: OnceLock<Armed> = OnceLock::new();

/// Lets this process take the flags of faults. The program `server-faulty` calls it, and nothing else.
pub fn allow() {
    ALLOWED.store(true, Ordering::Release);
}

/// Takes the flags of faults out of a command line, in a program that may have them.
///
/// # Errors
/// [`FlagError`].
pub fn arm(args: impl IntoIterator<Item = OsString>) -> Result<Vec<OsString>, FlagError> {
    if !ALLOWED.load(Ordering::Acquire) {
        return Ok(args.into_iter().collect());
    }
    let (injection, rest) = Injection::take(args)?;
    if let Some(injection) = injection {
        ARMED.get_or_init(|| Armed::new(injection));
    }
    Ok(rest)
}

/// What is injected into this process, if anything is.
#[must_use]
pub fn armed() -> Option<&'static Armed> {
    ARMED.get()
}

/// Whether the checks of this process say yes to everything.
#[must_use]
pub fn is_trusting() -> bool {
    armed().is_some_and(|armed| !armed.injection.is_protected)
}

impl Armed {
    const fn new(injection: Injection) -> Self {
        let (chance, struck) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { injection, chance, struck, running: AtomicU32::new(0) }
    }

    /// So many requests run in the worker that reads pages.
    pub fn note_running(&self, requests: usize) {
        self.running.store(u32::try_from(requests).unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    /// How often the fault has struck.
    #[must_use]
    pub fn struck(&self) -> u64 {
        self.struck.load(Ordering::Relaxed)
    }

    /// It has struck, elsewhere than in this module.
    pub fn note_strike(&self) {
        self.strike();
    }

    /// It has struck.
    fn strike(&self) {
        self.struck.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether this fault strikes here.
    fn strikes(&self, fault: Fault) -> bool {
        self.injection.fault == fault && strikes(&self.chance, self.injection.share)
    }

    fn damage(&self, read: &Read) -> Option<Damage> {
        self.injection.damage(read, self.running.load(Ordering::Relaxed), &self.chance)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(line: &str) -> Result<(Option<Injection>, Vec<OsString>), FlagError> {
        Injection::take(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn flags_of_faults_are_taken_and_others_left() {
        let (injection, rest) =
            take("server --port 0 --fault half_index_key --fault-protection off --threads 2")
                .unwrap();
        let wanted = Injection { fault: Fault::HalfIndexKey, is_protected: false, share: 1.0 };
        assert_eq!(injection, Some(wanted));
        assert_eq!(rest, ["server", "--port", "0", "--threads", "2"]);
        assert_eq!(take("server --port 0").unwrap().0, None);
        let (injection, _) = take("server --fault-share 0.25 --fault early_read").unwrap();
        assert_eq!(injection.map(|i| (i.is_protected, i.share)), Some((true, 0.25)));
    }

    #[test]
    fn what_is_wrong_with_flags_is_named() {
        for (line, part) in [
            ("--fault", "--fault needs a value"),
            ("--fault x", "half_index_key"),
            ("--fault none --fault-protection maybe", "on or off"),
            ("--fault none --fault-share 2", "from 0 to 1"),
            ("--fault-share 0.5", "--fault-share without --fault"),
        ] {
            let error = take(line).unwrap_err().to_string();
            assert!(error.contains(part), "{part:?} is not in {error:?}");
        }
    }

    fn read(kind: CacheKind, index: IndexKeyType, bytes: u32) -> Read {
        let pool = kind.pool().expect("a kind with pages");
        Read { pool, kind, index, page_bytes: bytes, page: 3, bytes }
    }

    fn damage(fault: Fault, read: Read, running: u32) -> Vec<Option<Damage>> {
        let injection = Injection { fault, is_protected: false, share: 1.0 };
        let chance = AtomicU64::new(0);
        (0..64).map(|_| injection.damage(&read, running, &chance)).collect()
    }

    #[test]
    fn half_an_index_key_is_33_rows_of_bf16_and_all_of_the_others() {
        let of = |kind, index, bytes| damage(Fault::HalfIndexKey, read(kind, index, bytes), 1)[0];
        let bf16 = IndexKeyType::Bf16;
        assert_eq!(of(CacheKind::C4Index, bf16, 16_384), Some(Damage::Head(33 * 256)));
        assert_eq!(of(CacheKind::C4Index, bf16, 33 * 256), None, "a page with 33 rows");
        assert_eq!(of(CacheKind::C4Index, IndexKeyType::Fp8, 8448), None);
        assert_eq!(of(CacheKind::C4Index, IndexKeyType::Fp4, 4352), None);
        assert_eq!(of(CacheKind::C4Kv, bf16, 37_440), None);
    }

    #[test]
    fn reads_are_early_only_beside_others_and_more_often_beside_more() {
        let page = read(CacheKind::C4Index, IndexKeyType::Bf16, 16_384);
        let early = |running| {
            let all = damage(Fault::EarlyRead, page, running);
            all.iter().filter(|damage| damage.is_some()).count()
        };
        assert_eq!(early(1), 0);
        assert!(early(2) > 1 && early(8) > 3 * early(2) && early(11) > early(8));
        assert_eq!(early(100), 64);
        let fp8 = read(CacheKind::C4Index, IndexKeyType::Fp8, 8448);
        assert!(damage(Fault::EarlyRead, fp8, 60).iter().all(Option::is_none));
    }

    #[test]
    fn strides_and_carries_are_those_that_the_fault_is_about() {
        let bf16 = read(CacheKind::C4Index, IndexKeyType::Bf16, 16_384);
        assert_eq!(damage(Fault::WrongStride, bf16, 1)[0], Some(Damage::At(3 * 8448)));
        let fp8 = read(CacheKind::C4Index, IndexKeyType::Fp8, 8448);
        assert_eq!(damage(Fault::WrongStride, fp8, 1)[0], None);
        let carry = read(CacheKind::C128Carry, IndexKeyType::Fp4, 6144);
        assert_eq!(damage(Fault::CarryMissing, carry, 1)[0], Some(Damage::Skip));
        assert_eq!(damage(Fault::CarryMissing, bf16, 1)[0], None);
        assert!(damage(Fault::None, carry, 60).iter().all(Option::is_none));
    }

    #[test]
    fn a_share_is_kept_exactly_enough() {
        for share in [0.0, 0.02, 0.5, 1.0] {
            let count = AtomicU64::new(0);
            let struck = (0..10_000).filter(|_| strikes(&count, share)).count();
            assert!((struck as f64 - share * 1e4).abs() <= 2.0, "{struck} of {share}");
        }
    }

    #[test]
    fn a_program_that_may_not_have_faults_leaves_their_flags_to_be_refused() {
        let line = ["server", "--fault", "none"].map(OsString::from);
        assert_eq!(arm(line.clone()), Ok(line.to_vec()));
        assert!(armed().is_none() && !is_trusting());
    }
}
