//! Breadth-first search over the states of a decode node, a prefill node and the network between
//! them, with every order of events and a bounded number of faults.
//!
//! A step of a node is a function of its state and the event, so it runs once for all states of
//! the world that share that node state. States are told apart by 128-bit hashes.

use super::Setup;
use super::names::{describe, name};
use super::node::{Ask, DAMAGED, Effects, Flight, Half, Local, Node, Property, Seat, Violation};
use super::view::View;
use super::wide::Wide;
use pd_transfer::id::PeerId;
use pd_transfer::testing::mutation::Mutation;
use pd_transfer::wire::{self, AttemptId, Message};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What may go wrong; each has a budget of its own and all have one together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Fault {
    Lose,
    Duplicate,
    Cut,
    CrashDecode,
    CrashPrefill,
    Abort,
    Overwrite,
    Silent,
    Damage,
    GetError,
    Early,
    Reorder,
    Overdue,
    Short,
    Unknown,
    Spoil,
    Late,
}

const FAULTS: usize = 17;

impl Fault {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Lose => "loss",
            Self::Duplicate => "duplicate",
            Self::Cut => "cut",
            Self::CrashDecode => "crash of decode",
            Self::CrashPrefill => "crash of prefill",
            Self::Abort => "client abort",
            Self::Overwrite => "page reused under the reader",
            Self::Silent => "page overwritten, generation kept",
            Self::Damage => "read damaged",
            Self::GetError => "get error",
            Self::Early => "early timer",
            Self::Reorder => "reordering",
            Self::Overdue => "overdue alarm",
            Self::Short => "page forgotten",
            Self::Unknown => "unknown page",
            Self::Spoil => "record changed",
            Self::Late => "message of an earlier life",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Letter {
    link: u8,
    to: Seat,
    message: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Event {
    Deliver(Letter),
    At(Seat, Local),
    Told(Seat),
    Connect,
    Idle,
    Overtake(Letter),
    Drop(Letter),
    Duplicate(Letter),
    Late(Letter),
    Spoil(Letter),
    Fault(Fault, Local),
    Cut,
    Crash(Seat),
}

/// One state of the world.
#[derive(Clone, Debug, Hash)]
pub(crate) struct State {
    nodes: [u32; 2],
    link: u8,
    is_open: bool,
    /// Which end knows that the link is lost.
    told: [bool; 2],
    letters: Vec<Letter>,
    left: [u8; FAULTS],
    total: u8,
}

#[derive(Debug)]
struct Stepped {
    node: u32,
    sent: Vec<(u8, u32)>,
    cut: Option<u8>,
    violation: Option<Violation>,
}

/// What a search came to.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    pub(crate) states: usize,
    pub(crate) transitions: usize,
    pub(crate) depth: usize,
    pub(crate) node_states: usize,
    /// States at rest in which every request was served, and in which one or more failed.
    pub(crate) served: usize,
    pub(crate) failed: usize,
    /// The shortest way to break a promise.
    pub(crate) counterexample: Option<(Violation, Vec<String>)>,
}

pub(crate) struct Search {
    setup: Setup,
    /// Without those that no state of the frontier has.
    nodes: Vec<Option<Box<(Node, View)>>>,
    known_nodes: HashMap<u128, u32>,
    messages: Vec<(Vec<u8>, String)>,
    known_messages: HashMap<Vec<u8>, u32>,
    steps: HashMap<(u32, Local), u32>,
    stepped: Vec<Stepped>,
    states: Vec<Passed>,
}

/// What is left of a state after the search passed it.
#[derive(Clone, Debug)]
struct Passed {
    parent: u32,
    event: Event,
    depth: u16,
    /// What a fair schedule without faults does next, and where that leads.
    next: u32,
    next_event: Event,
    is_over: bool,
    is_ended: bool,
    is_served: bool,
}

const NONE: u32 = u32::MAX;

const fn slot(seat: Seat) -> usize {
    seat as usize
}

const fn other(seat: Seat) -> Seat {
    match seat {
        Seat::Decode => Seat::Prefill,
        Seat::Prefill => Seat::Decode,
    }
}

impl Search {
    pub(crate) fn new(setup: Setup) -> Self {
        Self {
            setup,
            nodes: Vec::new(),
            known_nodes: HashMap::new(),
            messages: Vec::new(),
            known_messages: HashMap::new(),
            steps: HashMap::new(),
            stepped: Vec::new(),
            states: Vec::new(),
        }
    }

    /// Both nodes are new; with `is_greeted` their first link is up.
    pub(crate) fn first(&mut self) -> State {
        let asks = vec![Ask::Pending { tries: 0 }; self.setup.requests];
        let decode = self.intern(Node::new(&self.setup, Seat::Decode, 0, asks));
        let prefill = self.intern(Node::new(&self.setup, Seat::Prefill, 0, Vec::new()));
        let mut left = [0; FAULTS];
        for (fault, count) in self.setup.faults {
            left[*fault as usize] = *count;
        }
        let mut state = State {
            nodes: [decode, prefill],
            link: 0,
            is_open: false,
            told: [true; 2],
            letters: Vec::new(),
            left,
            total: self.setup.total,
        };
        if self.setup.is_greeted {
            let mut way = vec![Event::Connect];
            while let Some(event) = way.pop() {
                state = self.apply(&state, event).expect("a greeting breaks no promise");
                way.extend(state.letters.first().map(|letter| Event::Deliver(*letter)));
            }
        }
        state
    }

    /// Every order of events, up to `states_max` states, which must be enough.
    pub(crate) fn run(mut self, states_max: usize) -> Report {
        let first = self.first();
        let mut known = HashMap::from([(Wide::of(&first), 0_u32)]);
        self.pass(&first, NONE, Event::Idle);
        let (mut transitions, mut events, mut level) = (0, Vec::new(), vec![(0_u32, first)]);
        while !level.is_empty() {
            let mut coming = Vec::new();
            for (at, state) in level {
                let free = self.events(&state, &mut events);
                for (place, event) in events.drain(..).enumerate() {
                    transitions += 1;
                    let after = match self.apply(&state, event) {
                        Ok(after) => after,
                        Err(violation) => {
                            let mut trace = self.trace(at);
                            trace.push(self.describe(event));
                            return self.report(transitions, Some((violation, trace)));
                        }
                    };
                    let index = match known.entry(Wide::of(&after)) {
                        Entry::Occupied(entry) => *entry.get(),
                        Entry::Vacant(entry) => {
                            let index = self.pass(&after, at, event);
                            entry.insert(index);
                            coming.push((index, after));
                            index
                        }
                    };
                    if place == 0 && free > 0 {
                        let passed = &mut self.states[at as usize];
                        (passed.next, passed.next_event) = (index, event);
                    }
                }
                assert!(
                    self.states.len() <= states_max,
                    "more than {states_max} states at depth {}, last {:?}",
                    self.states[at as usize].depth,
                    self.trace(at)
                );
            }
            self.drop_nodes(&coming);
            level = coming;
        }
        let unfair = self.starved();
        self.report(transitions, unfair)
    }

    fn pass(&mut self, state: &State, parent: u32, event: Event) -> u32 {
        let depth = self.states.get(parent as usize).map_or(0, |parent| parent.depth + 1);
        let asks = &self.node(state, Seat::Decode).asks;
        let passed = Passed {
            parent,
            event,
            depth,
            next: NONE,
            next_event: Event::Idle,
            is_over: self.is_over(state),
            is_ended: self.view(state, Seat::Decode).is_ended,
            is_served: asks.iter().all(|ask| *ask == Ask::Served),
        };
        self.states.push(passed);
        self.states.len() as u32 - 1
    }

    /// Keeps the nodes of the frontier only; another is made again when it is needed.
    fn drop_nodes(&mut self, frontier: &[(u32, State)]) {
        let mut is_used = vec![false; self.nodes.len()];
        for node in frontier.iter().flat_map(|(_, state)| state.nodes) {
            is_used[node as usize] = true;
        }
        for (node, is_used) in self.nodes.iter_mut().zip(is_used) {
            if !is_used {
                *node = None;
            }
        }
    }

    fn report(&self, transitions: usize, found: Option<(Violation, Vec<String>)>) -> Report {
        let at_rest = || self.states.iter().filter(|state| state.is_over);
        let served = at_rest().filter(|state| state.is_served).count();
        Report {
            states: self.states.len(),
            transitions,
            depth: self.states.iter().map(|state| state.depth).max().unwrap_or(0).into(),
            node_states: self.nodes.len(),
            served,
            failed: at_rest().count() - served,
            counterexample: found,
        }
    }

    /// The first state from which a fair schedule without faults does not come to rest.
    fn starved(&self) -> Option<(Violation, Vec<String>)> {
        // 0 unknown, 1 on the way, 2 comes to rest, 3 does not.
        let mut fate = vec![0_u8; self.states.len()];
        let mut worst: Option<usize> = None;
        for start in 0..self.states.len() {
            let (mut way, mut at) = (Vec::new(), start);
            let end = loop {
                match fate[at] {
                    0 => {}
                    1 => break 3,
                    end => break end,
                }
                fate[at] = 1;
                way.push(at);
                match self.states[at].next {
                    NONE => break if self.states[at].is_over { 2 } else { 3 },
                    next => at = next as usize,
                }
            };
            for passed in way {
                fate[passed] = end;
            }
            if end == 3 && worst.is_none() {
                worst = Some(start);
            }
        }
        let start = worst?;
        let (mut trace, mut at) = (self.trace(start as u32), start);
        let mut passed = std::collections::BTreeSet::new();
        while self.states[at].next != NONE && passed.insert(at) {
            trace.push(format!("fair: {}", self.describe(self.states[at].next_event)));
            at = self.states[at].next as usize;
        }
        let (property, text) = if self.states[at].is_ended {
            (Property::L2, "faults have stopped and pages do not come back")
        } else {
            (Property::L1, "faults have stopped and a request does not end")
        };
        Some((Violation { property, text: text.to_string() }, trace))
    }

    fn trace(&self, at: u32) -> Vec<String> {
        let (mut trace, mut at) = (Vec::new(), &self.states[at as usize]);
        while at.parent != NONE {
            trace.push(self.describe(at.event));
            at = &self.states[at.parent as usize];
        }
        trace.reverse();
        trace
    }

    fn seated(&self, state: &State, seat: Seat) -> &(Node, View) {
        let node = self.nodes[state.nodes[slot(seat)] as usize].as_deref();
        node.expect("nodes of states that are looked at are kept")
    }

    fn view(&self, state: &State, seat: Seat) -> &View {
        &self.seated(state, seat).1
    }

    pub(crate) fn node(&self, state: &State, seat: Seat) -> &Node {
        &self.seated(state, seat).0
    }

    /// All requests ended, nothing is held, nothing is on its way.
    pub(crate) fn is_over(&self, state: &State) -> bool {
        let decode = self.view(state, Seat::Decode);
        decode.is_at_rest
            && self.view(state, Seat::Prefill).is_at_rest
            && !state.letters.iter().any(|letter| letter.link == state.link)
            && (state.is_open || decode.is_refused)
    }

    /// Reads stop with the link, unless the transport has no fence.
    fn is_read(&self, state: &State, flight: &Flight) -> bool {
        let is_fenced = !Mutation::Fence.is_removed() || state.told[slot(Seat::Decode)];
        flight.peer == PeerId(u64::from(state.link)) && (state.is_open || !is_fenced)
    }

    /// Every event that can happen now; first those without a fault, whose number is returned, in
    /// the order of a fair schedule.
    pub(crate) fn events(&self, state: &State, events: &mut Vec<Event>) -> usize {
        let (decode, prefill) = (self.view(state, Seat::Decode), self.view(state, Seat::Prefill));
        let letters = self.arrivals(state);
        let first = |to: Seat| letters.iter().find(|letter| letter.to == to);
        if self.setup.is_fifo {
            let heads = [first(Seat::Decode), first(Seat::Prefill)];
            events.extend(heads.into_iter().flatten().map(|letter| Event::Deliver(*letter)));
        } else {
            events.extend(letters.iter().map(|letter| Event::Deliver(*letter)));
        }
        for (op, flight) in &decode.flights {
            if self.is_read(state, flight) {
                events.push(Event::At(Seat::Decode, self.read(state, *op, flight)));
            }
        }
        let at = |seat| move |local| Event::At(seat, local);
        events.extend(
            decode.verifies.iter().map(|op| Local::Verify { op: *op }).map(at(Seat::Decode)),
        );
        let compute = |(attempt, _): &(AttemptId, bool)| Local::Compute { attempt: *attempt };
        events.extend(prefill.computes.iter().map(compute).map(at(Seat::Prefill)));
        let write = |(attempt, n): &(AttemptId, usize)| Local::Write { attempt: *attempt, n: *n };
        events.extend(prefill.writes.iter().map(write).map(at(Seat::Prefill)));
        if !state.is_open {
            for seat in [Seat::Decode, Seat::Prefill] {
                if !state.told[slot(seat)] {
                    events.push(Event::Told(seat));
                }
            }
            if state.told == [true; 2] && !decode.is_refused {
                events.push(Event::Connect);
            }
        }
        let start = |request: &u8| Local::Start { request: *request };
        events.extend(decode.starts.iter().map(start).map(at(Seat::Decode)));
        if self.is_over(state) {
            return events.len();
        }
        let is_idle = events.is_empty();
        if is_idle && decode.has_timer {
            events.push(Event::Idle);
        }
        let free = events.len();
        if state.total > 0 {
            self.faults(state, &letters, is_idle, events);
        }
        free
    }

    fn arrivals(&self, state: &State) -> Vec<Letter> {
        let mut letters: Vec<Letter> = state.letters.clone();
        letters.retain(|letter| state.is_open && letter.link == state.link);
        letters.dedup();
        letters
    }

    fn read(&self, state: &State, op: u64, flight: &Flight) -> Local {
        let page = &self.node(state, Seat::Prefill).pages[flight.source];
        let value: Half = page.halves[usize::from(flight.half)];
        Local::Read { op, value, is_fresh: page.generation == flight.expect }
    }

    fn faults(&self, state: &State, letters: &[Letter], is_idle: bool, events: &mut Vec<Event>) {
        let (decode, prefill) = (self.view(state, Seat::Decode), self.view(state, Seat::Prefill));
        let may = |fault: Fault| state.left[fault as usize] > 0;
        for letter in letters {
            if may(Fault::Reorder) && !events.contains(&Event::Deliver(*letter)) {
                events.push(Event::Overtake(*letter));
            }
            if may(Fault::Lose) {
                events.push(Event::Drop(*letter));
            }
            if may(Fault::Duplicate) {
                events.push(Event::Duplicate(*letter));
            }
            if may(Fault::Spoil) && self.messages[letter.message as usize].1.starts_with("Final") {
                events.push(Event::Spoil(*letter));
            }
        }
        if may(Fault::Late) && state.is_open {
            let old = state.letters.iter().filter(|letter| letter.link != state.link);
            events.extend(old.map(|letter| Event::Late(*letter)));
        }
        if may(Fault::Cut) && state.is_open {
            events.push(Event::Cut);
        }
        for (fault, seat) in
            [(Fault::CrashDecode, Seat::Decode), (Fault::CrashPrefill, Seat::Prefill)]
        {
            if may(fault) {
                events.push(Event::Crash(seat));
            }
        }
        let mut add = |fault: Fault, local: Local| {
            if may(fault) {
                events.push(Event::Fault(fault, local));
            }
        };
        for request in &decode.running {
            add(Fault::Abort, Local::Abort { request: *request });
        }
        for (op, flight) in decode.flights.iter().filter(|(_, flight)| self.is_read(state, flight))
        {
            if flight.half == 0 {
                let (op, value) = (*op, DAMAGED);
                add(Fault::Damage, Local::Read { op, value, is_fresh: true });
                add(Fault::GetError, Local::GetError { op });
            }
        }
        if !is_idle && decode.has_timer {
            add(Fault::Early, Local::Tick);
        }
        if prefill.has_timer {
            add(Fault::Overdue, Local::Tick);
        }
        for page in &prefill.offered {
            add(Fault::Overwrite, Local::Overwrite { page: *page, is_silent: false });
            add(Fault::Silent, Local::Overwrite { page: *page, is_silent: true });
        }
        for (attempt, _) in prefill.computes.iter().filter(|(_, is_last)| *is_last) {
            add(Fault::Short, Local::Short { attempt: *attempt });
            add(Fault::Unknown, Local::Unknown { attempt: *attempt });
        }
    }

    /// The state after `event`.
    pub(crate) fn apply(&mut self, state: &State, event: Event) -> Result<State, Violation> {
        let mut after = state.clone();
        match event {
            Event::Deliver(letter)
            | Event::Overtake(letter)
            | Event::Drop(letter)
            | Event::Duplicate(letter)
            | Event::Late(letter)
            | Event::Spoil(letter) => self.post(&mut after, event, letter)?,
            Event::At(seat, local) => self.local(&mut after, seat, local)?,
            Event::Idle => self.local(&mut after, Seat::Decode, Local::Tick)?,
            Event::Fault(fault, local) => {
                after.spend(fault);
                let seat = match fault {
                    Fault::Overdue
                    | Fault::Overwrite
                    | Fault::Silent
                    | Fault::Short
                    | Fault::Unknown => Seat::Prefill,
                    _ => Seat::Decode,
                };
                self.local(&mut after, seat, local)?;
            }
            Event::Told(seat) => {
                after.told[slot(seat)] = true;
                self.local(&mut after, seat, Local::Lost { link: state.link })?;
            }
            Event::Connect => {
                let link = state.link + 1;
                (after.link, after.is_open, after.told) = (link, true, [false; 2]);
                for seat in [Seat::Prefill, Seat::Decode] {
                    self.local(&mut after, seat, Local::Up { link })?;
                }
            }
            Event::Cut => {
                after.spend(Fault::Cut);
                close(&mut after);
            }
            Event::Crash(seat) => self.crash(&mut after, seat),
        }
        // What can't be spent any more makes no difference.
        after.left = after.left.map(|left| left.min(after.total));
        let is_late = after.left[Fault::Late as usize] > 0;
        let link = after.link;
        after.letters.retain(|letter| letter.link == link || is_late);
        if self.setup.is_fifo {
            after.letters.sort_by_key(|letter| (letter.link, letter.to));
        } else {
            after.letters.sort_unstable();
        }
        self.check(&after)?;
        Ok(after)
    }

    /// What the network does with a message.
    fn post(&mut self, after: &mut State, event: Event, letter: Letter) -> Result<(), Violation> {
        let (fault, is_taken) = match event {
            Event::Overtake(_) => (Some(Fault::Reorder), true),
            Event::Drop(_) => (Some(Fault::Lose), true),
            Event::Duplicate(_) => (Some(Fault::Duplicate), false),
            Event::Late(_) => (Some(Fault::Late), true),
            Event::Spoil(_) => (Some(Fault::Spoil), true),
            _ => (None, true),
        };
        if let Some(fault) = fault {
            after.spend(fault);
        }
        if is_taken && let Some(place) = after.letters.iter().position(|known| *known == letter) {
            after.letters.remove(place);
        }
        match event {
            Event::Drop(_) => {}
            Event::Spoil(_) => {
                let message = self.spoil(letter.message);
                after.letters.push(Letter { message, ..letter });
            }
            _ => self.receive(after, Letter { link: after.link, ..letter })?,
        }
        Ok(())
    }

    fn crash(&mut self, after: &mut State, seat: Seat) {
        let fault = if seat == Seat::Decode { Fault::CrashDecode } else { Fault::CrashPrefill };
        after.spend(fault);
        let node = self.node(after, seat).restarted(&self.setup);
        after.nodes[slot(seat)] = self.intern(node);
        // What the dead process said may still come out of the network somewhere.
        let (link, peer) = (after.link, other(seat));
        let said: Vec<Letter> = after
            .letters
            .iter()
            .filter(|letter| letter.link == link && letter.to == peer)
            .map(|letter| Letter { link: 0, ..*letter })
            .collect();
        if after.is_open {
            close(after);
        }
        after.letters.extend(said);
        after.told[slot(seat)] = true;
    }

    fn receive(&mut self, after: &mut State, letter: Letter) -> Result<(), Violation> {
        let local = Local::Bytes { link: letter.link, message: letter.message };
        self.local(after, letter.to, local)
    }

    /// The sender's memory changed between the hash of the record and its envelope.
    fn spoil(&mut self, message: u32) -> u32 {
        let envelope = wire::decode(&self.messages[message as usize].0).expect("it was encoded");
        let mut message = envelope.message;
        if let Message::Final { record, .. } = &mut message {
            record.payload[1] ^= 1;
        }
        let bytes = wire::encode(envelope.incarnation, envelope.seq, &message);
        self.message(bytes.expect("it is as long as before"))
    }

    /// No peer reads a page that is not pinned for its attempt.
    fn check(&self, state: &State) -> Result<(), Violation> {
        let decode = self.view(state, Seat::Decode);
        let prefill = self.node(state, Seat::Prefill);
        for (_, flight) in decode.flights.iter().filter(|(_, flight)| self.is_read(state, flight)) {
            let page = &prefill.pages[flight.source];
            let is_same = page.generation == flight.expect || page.is_overwritten;
            if page.owner != Some(flight.attempt) || !is_same {
                let text = String::from("a peer reads a page that is not pinned for its attempt");
                return Err(Violation { property: Property::S1, text });
            }
        }
        Ok(())
    }

    fn local(&mut self, after: &mut State, seat: Seat, local: Local) -> Result<(), Violation> {
        let node = after.nodes[slot(seat)];
        let step = match self.steps.get(&(node, local)) {
            Some(step) if self.is_kept(*step) => *step,
            Some(_) | None => {
                let step = self.step(node, local);
                self.steps.insert((node, local), step);
                step
            }
        };
        let stepped = &self.stepped[step as usize];
        if let Some(violation) = &stepped.violation {
            return Err(violation.clone());
        }
        after.nodes[slot(seat)] = stepped.node;
        let to = other(seat);
        for (link, message) in &stepped.sent {
            if after.is_open && *link == after.link {
                after.letters.push(Letter { link: *link, to, message: *message });
            }
        }
        if stepped.cut == Some(after.link) && after.is_open {
            close(after);
        }
        Ok(())
    }

    fn is_kept(&self, step: u32) -> bool {
        let stepped = &self.stepped[step as usize];
        stepped.violation.is_some() || self.nodes[stepped.node as usize].is_some()
    }

    /// Runs the production code.
    fn step(&mut self, node: u32, local: Local) -> u32 {
        let kept = self.nodes[node as usize].as_deref().expect("it is of a state in the frontier");
        let mut after = kept.0.clone();
        let bytes = match local {
            Local::Bytes { message, .. } => self.messages[message as usize].0.as_slice(),
            _ => &[],
        };
        let setup = &self.setup;
        let stepped = catch_unwind(AssertUnwindSafe(|| after.step(setup, local, bytes)));
        let effects = stepped.unwrap_or_else(|_| Effects {
            violation: Some(Violation {
                property: Property::S5,
                text: String::from("the machine panics"),
            }),
            ..Effects::default()
        });
        let sent =
            effects.sent.into_iter().map(|(peer, bytes)| (peer.0 as u8, self.message(bytes)));
        let sent = sent.collect();
        let node = if effects.violation.is_some() { node } else { self.intern(after) };
        self.stepped.push(Stepped {
            node,
            sent,
            cut: effects.cut.map(|peer| peer.0 as u8),
            violation: effects.violation,
        });
        self.stepped.len() as u32 - 1
    }

    fn message(&mut self, bytes: Vec<u8>) -> u32 {
        if let Some(known) = self.known_messages.get(&bytes) {
            return *known;
        }
        let number = self.messages.len() as u32;
        self.messages.push((bytes.clone(), name(&bytes)));
        self.known_messages.insert(bytes, number);
        number
    }

    fn intern(&mut self, node: Node) -> u32 {
        let next = self.nodes.len() as u32;
        let number = *self.known_nodes.entry(Wide::of(&node)).or_insert(next);
        if number == next {
            self.nodes.push(None);
        }
        let kept = &mut self.nodes[number as usize];
        if kept.is_none() {
            let view = View::of(&self.setup, &node);
            *kept = Some(Box::new((node, view)));
        }
        number
    }

    /// One line for a trace.
    pub(crate) fn describe(&self, event: Event) -> String {
        let letter = |letter: &Letter| self.messages[letter.message as usize].1.clone();
        match event {
            Event::Deliver(sent) => format!("deliver {}", letter(&sent)),
            Event::At(_, local) => describe(local),
            Event::Told(seat) => format!("{seat:?} learns that the link is lost").to_lowercase(),
            Event::Connect => String::from("connect"),
            Event::Idle => String::from("timer"),
            Event::Overtake(sent) => format!("deliver {} out of turn", letter(&sent)),
            Event::Drop(sent) => format!("lose {}", letter(&sent)),
            Event::Duplicate(sent) => format!("deliver a copy of {}", letter(&sent)),
            Event::Late(sent) => format!("deliver {} of an earlier life", letter(&sent)),
            Event::Spoil(sent) => format!("change the record in {}", letter(&sent)),
            Event::Fault(Fault::Early, _) => String::from("early timer"),
            Event::Fault(Fault::Overdue, _) => String::from("overdue alarm"),
            Event::Fault(Fault::Damage, Local::Read { op, .. }) => format!("read {op} damaged"),
            Event::Fault(_, local) => describe(local),
            Event::Cut => String::from("cut the link"),
            Event::Crash(seat) => format!("{seat:?} crashes and restarts").to_lowercase(),
        }
    }
}

impl State {
    fn spend(&mut self, fault: Fault) {
        self.left[fault as usize] -= 1;
        self.total -= 1;
    }
}

fn close(state: &mut State) {
    let link = state.link;
    state.letters.retain(|letter| letter.link != link);
    (state.is_open, state.told) = (false, [false; 2]);
}
