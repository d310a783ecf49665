//! Who reads where: ranks spread over the ranks of one prefill group.

use super::types::Rank;
use alloc::vec;
use alloc::vec::Vec;

/// What speaks against a source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Load {
    /// How often it failed in this request. Counts before all bytes.
    pub strikes: u32,
    /// Bytes that are being read from it.
    pub open_bytes: u64,
}

/// Chooses for every decode rank the prefill rank that it reads from.
///
/// `links[d]` are the prefill ranks that decode rank `d` can reach, `loads[p]` is what speaks against
/// prefill rank `p`, and every decode rank reads `bytes`. Ranks beyond `loads` are ignored. Among
/// sources that are equally good the one that comes first from `rotation` on is taken.
///
/// The choice is as even as the links allow: no other one has fewer ranks at sources with strikes,
/// and among those with as few, none has a smaller sum of squares of the open bytes. `None` if a
/// rank reaches no source.
// PD-M7
#[must_use]
pub fn assign(
    links: &[Vec<Rank>],
    loads: &[Load],
    bytes: u64,
    rotation: usize,
) -> Option<Vec<Rank>> {
    let count = loads.len();
    let first = rotation.checked_rem(count)?;
    let mut chosen: Vec<Option<usize>> = vec![None; links.len()];
    let mut readers = vec![0_u64; count];
    for rank in 0..links.len() {
        let via = reachable(rank, links, &chosen, count);
        let cost = |source: &usize| {
            let load = loads[*source];
            let open = bytes.max(1).saturating_mul(readers[*source]);
            let turn = (*source + count - first) % count;
            (load.strikes, load.open_bytes.saturating_add(open), turn)
        };
        let mut source = (0..count).filter(|source| via[*source].is_some()).min_by_key(cost)?;
        readers[source] += 1;
        // Whoever stands between moves on by one, so that only the last source gets a reader more.
        while let Some(mover) = via[source] {
            match chosen[mover].replace(source) {
                Some(left) => source = left,
                None => break,
            }
        }
    }
    let ranks = chosen.into_iter().map(|source| Some(Rank(u16::try_from(source?).ok()?)));
    ranks.collect()
}

/// For each source the rank that would move to it, if `rank` can get a place there by moves of
/// ranks that have one.
fn reachable(
    rank: usize,
    links: &[Vec<Rank>],
    chosen: &[Option<usize>],
    count: usize,
) -> Vec<Option<usize>> {
    let mut via = vec![None; count];
    let mut movers = vec![rank];
    while let Some(mover) = movers.pop() {
        for source in links[mover].iter().map(|source| usize::from(source.0)) {
            if source < count && via[source].is_none() {
                via[source] = Some(mover);
                movers.extend((0..rank).filter(|other| chosen[*other] == Some(source)));
            }
        }
    }
    via
}
