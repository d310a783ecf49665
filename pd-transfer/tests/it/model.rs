//! Model checking of the production machines: every order of events with a bounded number of
//! faults, and each guard taken away in turn.

pub(crate) mod node;
pub(crate) mod search;

use node::Property;
use pd_transfer::testing::mutation::{Mutation, without};
use search::{Fault, Report, Search};

/// What a search looks at.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) requests: usize,
    /// Pages of a request.
    pub(crate) pages: usize,
    /// Attempts per request before its client is told that it failed.
    pub(crate) tries: u8,
    /// Pages of a node.
    pub(crate) pool: usize,
    pub(crate) faults: &'static [(Fault, u8)],
    /// Most faults together.
    pub(crate) total: u8,
    /// The first link is up at the start.
    pub(crate) is_greeted: bool,
    /// Messages of one direction arrive in order, unless a fault reorders them.
    pub(crate) is_fifo: bool,
    /// A get reads in two halves.
    pub(crate) is_torn: bool,
    /// The prefill node has another page layout.
    pub(crate) is_other_layout: bool,
    /// Attempt ids are slots: used again and again.
    pub(crate) is_slots: bool,
}

impl Setup {
    pub(crate) const PLAIN: Self = Self {
        requests: 1,
        pages: 2,
        tries: 1,
        pool: 4,
        faults: &[],
        total: 0,
        is_greeted: true,
        is_fifo: false,
        is_torn: false,
        is_other_layout: false,
        is_slots: false,
    };
}

#[test]
fn probe() {
    use Fault::*;
    let every: &[(Fault, u8)] = &[(Reorder, 1),(Lose, 1), (Duplicate, 1), (Cut, 1), (CrashDecode, 1), (CrashPrefill, 1), (Abort, 1), (Overwrite, 1), (Silent, 1), (Damage, 1), (GetError, 1), (Early, 1)];
    let text = std::env::var("PROBE").unwrap();
    let p: Vec<u8> = text.split(',').map(|n| n.parse().unwrap()).collect();
        let at = std::time::Instant::now();
        let setup = Setup { requests: p[0].into(), tries: p[1], total: p[2], pages: p[3].into(), is_fifo: p[4] > 0, is_greeted: p[5] > 0, faults: every, ..Setup::PLAIN };
        let report = Search::new(setup).run(3_000_000);
        println!("{text} {:?} {:?}", at.elapsed(), report);
}
