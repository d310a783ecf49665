//! Two endpoints, a decode and a prefill node, under any order of calls and events that a byte
//! string can name. Only the order that a transport promises is kept: a link's gets are answered
//! before its loss.

use crate::endpoint::{Action, Endpoint, EndpointConfig, Upcall};
use crate::get::{Get, GetOutcome};
use crate::id::{OpId, PeerId, Time};
use crate::link::{LinkConfig, Side};
use crate::receiver::{FailReason, ReceiverConfig, Start, Target};
use crate::sender::{Proof, SenderConfig};
use crate::testing::pages::key;
use crate::wire::{
    AttemptId, Extent, FinalRecord, Fingerprint, Guard, Hello, Identity, Incarnation, Item, Key,
    Limits, PROTO_VERSION, RegionDesc, RegionId, Role, Tag,
};
use std::collections::{BTreeMap, VecDeque};
use std::vec::Vec;

/// The nodes by what they do.
const DECODE: usize = 0;
const PREFILL: usize = 1;
const REGION: RegionDesc = RegionDesc { region: RegionId(0), bytes: 1 << 20 };
const PAGE_BYTES: u32 = 64;
/// Attempts of one list of calls.
const ATTEMPTS_MAX: usize = 8;
/// Most actions that one call may cause.
const ACTIONS_MAX: usize = 4096;
/// Messages on their way that are kept; the oldest of more is lost.
const ON_THE_WAY_MAX: usize = 256;

/// What was said about an attempt, on both sides.
#[derive(Debug, Default)]
struct Ledger {
    pages: u32,
    completed: usize,
    failed: usize,
    quiet: usize,
    /// `start` calls that could not open it; each is followed by its own `Failed` and `Quiet`.
    not_started: usize,
    asked_fresh: Vec<Key>,
    requested: usize,
    released: usize,
    is_linked: bool,
    offered: Vec<Item>,
}

/// The bytes that decide.
struct Script<'a>(&'a [u8]);

impl Script<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// A number below `bound`; 0 when the script is over.
    fn below(&mut self, bound: usize) -> usize {
        usize::from(self.byte().unwrap_or(0)) % bound.max(1)
    }
}

struct World {
    nodes: [Endpoint; 2],
    /// The link, if there is one.
    link: Option<PeerId>,
    next_link: u64,
    /// On the way to each node.
    wires: [VecDeque<Vec<u8>>; 2],
    gets: BTreeMap<OpId, (AttemptId, Get)>,
    checks: Vec<OpId>,
    attempts: Vec<AttemptId>,
    ledgers: BTreeMap<AttemptId, Ledger>,
    /// A link that an endpoint wants cut.
    is_cut: bool,
    now: Time,
}

fn endpoint(role: Role, number: u8) -> Endpoint {
    let limits = Limits { max_prompt_tokens: 64, max_items: 16, max_message_bytes: 1 << 20 };
    let hello = Hello {
        proto: PROTO_VERSION,
        incarnation: Incarnation([number; 16]),
        fingerprint: Fingerprint([3; 16]),
        layout: "a layout".into(),
        role,
        limits,
        regions: vec![REGION],
        transport: "none".into(),
    };
    let receiver = ReceiverConfig { attempts_max: 4, in_flight_max: 3, ..Default::default() };
    let sender = SenderConfig { attempts_max: 4, ..Default::default() };
    let link = LinkConfig::default();
    Endpoint::new(EndpointConfig { hello, link, sender, receiver, peers_max: 2 })
}

impl World {
    fn new() -> Self {
        Self {
            nodes: [endpoint(Role::Decode, 1), endpoint(Role::Prefill, 2)],
            link: None,
            next_link: 0,
            wires: Default::default(),
            gets: BTreeMap::new(),
            checks: Vec::new(),
            attempts: Vec::new(),
            ledgers: BTreeMap::new(),
            is_cut: false,
            now: Time(0),
        }
    }

    fn connect(&mut self) {
        if self.link.is_some() {
            return;
        }
        let peer = PeerId(self.next_link);
        self.next_link += 1;
        self.link = Some(peer);
        for (node, side) in [(DECODE, Side::Connector), (PREFILL, Side::Acceptor)] {
            self.nodes[node].handle_peer_up(self.now, peer, "there".into(), side);
        }
    }

    /// The link is gone: its gets are answered, then both sides hear of it.
    fn lose(&mut self) {
        let Some(peer) = self.link.take() else { return };
        self.wires = Default::default();
        for op in std::mem::take(&mut self.gets).into_keys() {
            self.nodes[DECODE].handle_got(self.now, op, GetOutcome::Lost);
            self.act();
        }
        for ledger in self.ledgers.values_mut() {
            ledger.is_linked = false;
        }
        for node in [DECODE, PREFILL] {
            self.nodes[node].handle_peer_lost(self.now, peer, "lost");
            self.act();
        }
        self.is_cut = false;
    }

    fn start(&mut self, script: &mut Script<'_>) {
        let pages = 1 + script.below(4) as u32;
        let again = self.attempts.len() >= ATTEMPTS_MAX || script.below(8) == 7;
        let attempt = match self.attempts.last() {
            Some(last) if again => *last,
            _ => {
                let attempt = AttemptId([1 + self.attempts.len() as u8; 16]);
                self.attempts.push(attempt);
                attempt
            }
        };
        let number = u64::from(attempt.0[0]);
        let target = |n: u32| Target {
            key: key(n),
            group: n / 2,
            region: REGION.region,
            extents: vec![extent(number * 1024 + u64::from(n * PAGE_BYTES))],
        };
        let ledger = self.ledgers.entry(attempt).or_default();
        if ledger.pages == 0 {
            ledger.pages = pages;
        }
        let start = Start {
            attempt,
            peer: self.link.unwrap_or(PeerId(999)),
            request: vec![pages as u8],
            have: 0,
            plan_hash: [pages as u8; 16],
            plan: (0..pages).map(target).collect(),
        };
        self.nodes[DECODE].start(self.now, start);
    }

    fn any_attempt(&self, script: &mut Script<'_>) -> AttemptId {
        let at = script.below(self.attempts.len());
        self.attempts.get(at).copied().unwrap_or(AttemptId([9; 16]))
    }

    /// Offers pages: those of the plan, or others.
    fn ready(&mut self, script: &mut Script<'_>) {
        let attempt = self.any_attempt(script);
        let (first, count, twist) =
            (script.below(4) as u32, script.below(5) as u32, script.below(16));
        let item = |n: u32| Item {
            key: key(if twist == 1 { n + 10 } else { n }),
            identity: Identity([n as u8; 16]),
            tag: Tag([n as u8; 16]),
            region: RegionId(u32::from(twist == 2)),
            extents: vec![extent(if twist == 3 { u64::MAX - 8 } else { u64::from(n) * 64 })],
            guard: Guard { region: RegionId(0), offset: if twist == 4 { 3 } else { 8 }, expect: 1 },
        };
        let items: Vec<Item> = (first..first + count).map(item).collect();
        if let Some(ledger) = self.ledgers.get_mut(&attempt) {
            ledger.offered.extend(items.iter().cloned());
        }
        self.nodes[PREFILL].ready(self.now, attempt, items);
    }

    fn finish(&mut self, script: &mut Script<'_>) {
        let attempt = self.any_attempt(script);
        let Some(ledger) = self.ledgers.get(&attempt) else { return };
        let mut hash = [ledger.pages as u8; 16];
        if script.below(8) == 7 {
            hash[0] ^= 1;
        }
        let record = FinalRecord::new(hash, &ledger.offered, vec![1]);
        self.nodes[PREFILL].finish(self.now, attempt, record);
    }

    fn retarget(&mut self, script: &mut Script<'_>) {
        let attempt = self.any_attempt(script);
        let Some(ledger) = self.ledgers.get_mut(&attempt) else { return };
        let mut keys = std::mem::take(&mut ledger.asked_fresh);
        if script.below(8) == 7 {
            keys.push(key(0));
        }
        let number = u64::from(attempt.0[0]);
        let target = |key: &Key| {
            let n = crate::testing::pages::number(key);
            let offset = (100 + number) * 1024 + u64::from(n * PAGE_BYTES);
            let extents = vec![extent(offset)];
            Target { key: *key, group: n / 2, region: REGION.region, extents }
        };
        let targets = keys.iter().map(target).collect();
        self.nodes[DECODE].retarget(self.now, attempt, targets);
    }

    fn got(&mut self, script: &mut Script<'_>) {
        let at = script.below(self.gets.len());
        let outcome = match script.below(8) {
            0 => GetOutcome::Stale,
            1 => GetOutcome::Error("no".into()),
            _ => GetOutcome::Done,
        };
        if let Some(op) = self.gets.keys().nth(at).copied() {
            self.gets.remove(&op);
            self.nodes[DECODE].handle_got(self.now, op, outcome);
        }
    }

    fn verified(&mut self, script: &mut Script<'_>) {
        let at = script.below(self.checks.len());
        let ok = script.below(8) != 7;
        if at < self.checks.len() {
            let op = self.checks.swap_remove(at);
            self.nodes[DECODE].handle_verified(self.now, op, ok);
        }
    }

    /// Delivers, doubles, overtakes, loses or damages a message.
    fn message(&mut self, script: &mut Script<'_>) {
        let (node, how) = (script.below(2), script.below(16));
        let at = if how < 10 { 0 } else { script.below(self.wires[node].len()) };
        let Some(mut bytes) = self.wires[node].get(at).cloned() else { return };
        if how != 11 {
            self.wires[node].remove(at);
        }
        match how {
            12 => return,
            13 => {
                let place = script.below(bytes.len());
                bytes[place] ^= 1 << script.below(8);
            }
            14 => bytes.truncate(script.below(bytes.len())),
            _ => {}
        }
        if let Some(peer) = self.link {
            self.nodes[node].handle_bytes(self.now, peer, &bytes);
        }
    }

    fn wait(&mut self, script: &mut Script<'_>) {
        let micros = [1, 1_000, 600_000, 2_000_000, 6_000_000, 130_000_000];
        self.now = self.now.after(micros[script.below(micros.len())]);
        for node in [DECODE, PREFILL] {
            self.nodes[node].handle_timeout(self.now);
            self.act();
        }
    }

    /// What nobody should say.
    fn nonsense(&mut self, script: &mut Script<'_>) {
        let node = script.below(2);
        match script.below(4) {
            0 => self.nodes[node].handle_got(self.now, OpId(u64::MAX), GetOutcome::Done),
            1 => self.nodes[node].handle_verified(self.now, OpId(u64::MAX), true),
            2 => self.nodes[node].handle_bytes(self.now, PeerId(77), &[1, 2, 3]),
            _ => self.nodes[node].handle_peer_lost(self.now, PeerId(77), "never was"),
        }
    }

    fn call(&mut self, script: &mut Script<'_>) -> Option<()> {
        match script.byte()? % 24 {
            0 => self.connect(),
            1 | 2 => self.start(script),
            3..=9 => self.message(script),
            10..=12 => self.ready(script),
            13 => self.finish(script),
            14..=16 => self.got(script),
            17 | 18 => self.verified(script),
            19 => {
                let attempt = self.any_attempt(script);
                self.nodes[DECODE].cancel(self.now, attempt);
            }
            20 => {
                let attempt = self.any_attempt(script);
                self.nodes[PREFILL].reject(self.now, attempt, 1000, "no");
            }
            21 => self.retarget(script),
            22 => self.wait(script),
            _ if script.below(4) == 3 => self.lose(),
            _ => self.nonsense(script),
        }
        self.act();
        if self.is_cut {
            self.lose();
        }
        Some(())
    }

    /// Takes all actions and holds what they say against the rules.
    fn act(&mut self) {
        for node in [DECODE, PREFILL] {
            let mut count = 0;
            while let Some(action) = self.nodes[node].poll_action() {
                count += 1;
                assert!(count <= ACTIONS_MAX, "one call, {count} actions");
                match action {
                    Action::Transmit { peer, bytes } if Some(peer) == self.link => {
                        let wire = &mut self.wires[1 - node];
                        wire.push_back(bytes);
                        if wire.len() > ON_THE_WAY_MAX {
                            wire.pop_front();
                        }
                    }
                    Action::Transmit { .. } => {}
                    Action::Get { peer, attempt, get } => {
                        assert_eq!(Some(peer), self.link, "a get from nobody");
                        self.got_under_way(attempt, get);
                    }
                    Action::Verify(verify) => self.checks.push(verify.op),
                    Action::Cut { .. } => self.is_cut = true,
                    Action::Upcall(upcall) => self.upcall(node, upcall),
                }
            }
        }
    }

    fn got_under_way(&mut self, attempt: AttemptId, get: Get) {
        let ledger = &self.ledgers[&attempt];
        // PD-R13
        assert_eq!(ledger.completed + ledger.quiet, ledger.not_started, "a get after the end");
        for (_, other) in self.gets.values() {
            assert_ne!(other.target, get.target, "two gets write one page");
        }
        assert!(self.gets.insert(get.op, (attempt, get)).is_none(), "an operation's id twice");
    }

    fn upcall(&mut self, node: usize, upcall: Upcall) {
        let gets = |attempt| self.gets.values().filter(|(of, _)| *of == attempt).count();
        match upcall {
            Upcall::Completed { attempt, .. } => {
                assert_eq!(gets(attempt), 0, "complete with gets under way");
                let ledger = self.ledgers.get_mut(&attempt).expect("it was started");
                ledger.completed += 1;
                assert!(ledger.completed == 1 && ledger.failed == ledger.not_started, "{ledger:?}");
            }
            Upcall::Failed { attempt, why } => {
                let ledger = self.ledgers.get_mut(&attempt).expect("it was started");
                ledger.failed += 1;
                ledger.not_started += usize::from(matches!(why, FailReason::NotStarted(_)));
                let ended = ledger.failed - ledger.not_started + ledger.completed;
                assert!(ended <= 1 || matches!(why, FailReason::NotStarted(_)), "{ledger:?}");
            }
            Upcall::Quiet { attempt } => {
                let under_way = gets(attempt);
                let ledger = self.ledgers.get_mut(&attempt).expect("it was started");
                ledger.quiet += 1;
                assert!(ledger.quiet <= ledger.failed, "{ledger:?}");
                // One that only failed to start a second time may be under way.
                let is_last = ledger.quiet > ledger.not_started;
                assert!(!is_last || under_way == 0, "quiet with {under_way} gets under way");
            }
            Upcall::Fresh { attempt, groups } => {
                let ledger = self.ledgers.get_mut(&attempt).expect("it was started");
                ledger.asked_fresh.extend(groups.into_iter().flat_map(|(_, keys)| keys));
            }
            Upcall::Requested { attempt, .. } => {
                let ledger = self.ledgers.get_mut(&attempt).expect("it was started");
                ledger.requested += 1;
                ledger.is_linked = true;
                ledger.offered.clear();
                assert_eq!(ledger.requested, 1, "an attempt is asked for once");
            }
            Upcall::Release { attempt, proof } => {
                let ledger = self.ledgers.get_mut(&attempt).expect("it was started");
                ledger.released += 1;
                assert_eq!((node, ledger.requested, ledger.released), (PREFILL, 1, 1));
                let has_ended =
                    ledger.completed + (ledger.quiet - ledger.not_started.min(ledger.quiet)) > 0;
                match proof {
                    Proof::PeerAcknowledged => assert!(has_ended, "pages back too early"),
                    Proof::LinkFenced => assert!(!ledger.is_linked, "the link is there"),
                }
            }
            Upcall::Cancelled { .. }
            | Upcall::Overdue { .. }
            | Upcall::Wrong { .. }
            | Upcall::NotOffered { .. }
            | Upcall::NotRetargeted { .. }
            | Upcall::PeerUp { .. }
            | Upcall::PeerDown { .. }
            | Upcall::Refused { .. }
            | Upcall::NotReached { .. }
            | Upcall::Event(_) => {}
        }
    }

    /// The last link is lost, what was under way ends: every attempt has ended once on each side.
    /// How many were completed and how many failed after they had been opened.
    fn end(mut self) -> (usize, usize) {
        self.lose();
        for op in std::mem::take(&mut self.checks) {
            self.nodes[DECODE].handle_verified(self.now, op, true);
        }
        self.act();
        for (attempt, ledger) in &self.ledgers {
            let ended = ledger.completed + ledger.failed - ledger.not_started;
            let was_opened = ended == 1;
            assert!(ended <= 1 && (was_opened || ledger.not_started > 0), "{attempt}: {ledger:?}");
            assert_eq!(ledger.quiet, ledger.failed, "{attempt}: {ledger:?}");
            assert_eq!(ledger.requested, ledger.released, "{attempt}: {ledger:?}");
        }
        let sender = self.nodes[PREFILL].sender().expect("a prefill node sends");
        assert_eq!(sender.open_attempts(), 0);
        let sum = |of: fn(&Ledger) -> usize| self.ledgers.values().map(of).sum();
        (sum(|ledger| ledger.completed), sum(|ledger| ledger.failed - ledger.not_started))
    }
}

fn extent(offset: u64) -> Extent {
    Extent { offset, len: PAGE_BYTES }
}

/// Runs a list of calls and events; see the module text.
pub fn calls(bytes: &[u8]) {
    run(bytes);
}

fn run(bytes: &[u8]) -> (usize, usize) {
    let mut world = World::new();
    let mut script = Script(bytes);
    while world.call(&mut script).is_some() {}
    world.end()
}

/// A link, an attempt of two pages, and all that follows, in order; then parts of it.
pub(super) fn seeds() -> Vec<Vec<u8>> {
    let (to_decode, to_prefill) = ([3, 0, 0], [3, 1, 0]);
    let mut whole: Vec<u8> = vec![0];
    whole.extend(to_prefill);
    whole.extend(to_decode);
    whole.extend([1, 1, 0]);
    whole.extend(to_prefill);
    whole.extend(to_decode);
    whole.extend([10, 0, 0, 2, 0]);
    whole.extend(to_decode);
    whole.extend([14, 0, 7, 14, 0, 7, 17, 0, 0, 17, 0, 0]);
    whole.extend([13, 0, 0]);
    whole.extend(to_decode);
    whole.extend(to_prefill);
    whole.extend(to_decode);
    let (offered, ended) = (&whole[..24], &whole[36..]);
    let landed = [14, 0, 7, 14, 0, 7, 17, 0, 0, 17, 0, 0];
    // The first page is wrong, and is read again with the other one of its group.
    let again = [14, 0, 7, 17, 0, 7, 14, 0, 7, 17, 0, 0, 21, 0, 0];
    let bad_page = [offered, &again, &landed, ended].concat();
    let cancelled = [offered, &[19, 0, 14, 0, 7, 14, 0, 7]].concat();
    let lost = [offered, &[23, 3]].concat();
    let silent = [offered, &[22, 5, 22, 5]].concat();
    vec![whole, bad_page, cancelled, lost, silent]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seeds_complete_and_fail() {
        let ends: Vec<_> = seeds().iter().map(|seed| run(seed)).collect();
        assert_eq!(ends, [(1, 0), (1, 0), (0, 1), (0, 1), (0, 1)]);
    }
}
