//! An audit of a worker that goes on serving: sealed pages and objects in host memory are digested
//! again, a part in each turn of its loop, and ends of prefixes are computed again, as sequences that
//! come after all others, and compared.

use super::Worker;
use super::sequence::{Origin, Sequence, State};
use crate::audit::{Finding, How, Wish, WorkerAudit};
use crate::glue::objects::{ObjectError, ObjectMemory};
use crate::glue::pools::POOLS;
use crate::scheduler::SeqId;
use hicache::ObjectKey;
use kv_pool::{
    BLOCK_TOKENS, ChainHash, Owner, PageDigest, PageRef, PageState, PoolKind, WINDOW_PAGE_ROWS,
};
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;
use tokio::sync::oneshot;

/// Bytes that are digested in one turn of a worker's loop: about a millisecond.
const TURN_BYTES: u64 = 8 << 20;
/// Tokens that are computed again of one prefix, at most.
const WINDOW_TOKENS_MAX: u32 = 2048;
/// How long an audit waits for its turn to compute.
const PATIENCE: Duration = Duration::from_secs(120);
/// Ended requests whose tokens are kept, so that their prefixes can be computed again.
const RECENT: usize = 16;
/// Owners of a page that are named.
const NAMED: usize = 8;

/// Counted since the start.
#[derive(Clone, Copy, Debug, Default)]
pub struct AuditNumbers {
    /// Audits.
    pub audits: u64,
    /// Pages and objects that were digested again or compared.
    pub checked: u64,
    /// What was wrong, in the order of [`How::ALL`].
    pub wrong: [u64; How::ALL.len()],
}

/// The tokens of a request that has ended.
#[derive(Debug)]
struct Recent {
    name: String,
    tokens: Vec<u32>,
    salt: String,
}

/// A prefix whose end is to be computed again.
#[derive(Debug)]
struct Subject {
    name: String,
    /// Whole blocks.
    tokens: Vec<u32>,
    salt: String,
    /// The sequence that has it, if that runs.
    running: Option<SeqId>,
}

/// An audit under way.
#[derive(Debug)]
struct Audit {
    done: oneshot::Sender<WorkerAudit>,
    report: WorkerAudit,
    memory: ObjectMemory,
    pages: Vec<PageRef>,
    objects: Vec<ObjectKey>,
    subjects: VecDeque<Subject>,
    window: Option<(SeqId, Subject)>,
    began: Duration,
}

/// What a worker keeps for audits.
#[derive(Debug, Default)]
pub(super) struct Auditor {
    audit: Option<Box<Audit>>,
    recent: VecDeque<Recent>,
    /// Pages that were set aside, until nobody holds them.
    pub(super) condemned: Vec<PageRef>,
}

impl Auditor {
    /// A sequence has ended: its tokens are kept for a while.
    pub(super) fn remember(&mut self, seq: &mut Sequence) {
        if matches!(seq.origin, Origin::Audit) || seq.computed < BLOCK_TOKENS {
            return;
        }
        let name = seq.journey.request_id().to_owned();
        let mut tokens = std::mem::take(&mut seq.tokens);
        tokens.truncate((seq.computed / BLOCK_TOKENS * BLOCK_TOKENS) as usize);
        if self.recent.len() == RECENT {
            self.recent.pop_back();
        }
        self.recent.push_front(Recent { name, tokens, salt: seq.salt.clone() });
    }
}

impl Audit {
    fn wrong(&mut self, finding: Finding) {
        self.report.find(finding);
    }

    /// Leaves what was not looked at yet, and says how much that is.
    fn leave_rest(&mut self) {
        let seconds = PATIENCE.as_secs();
        let rest = [("pages", self.pages.len()), ("objects in host memory", self.objects.len())];
        for (what, count) in rest.into_iter().filter(|(_, count)| *count > 0) {
            self.report.skipped.push(format!("{count} {what}: not within {seconds} s"));
        }
        self.pages.clear();
        self.objects.clear();
    }
}

impl Worker {
    /// Begins an audit; its answer comes when it has ended. One that comes while another is waited for
    /// is not answered.
    pub(super) fn begin_audit(&mut self, wish: Wish, done: oneshot::Sender<WorkerAudit>) {
        if let Some(mut before) = self.auditor.audit.take() {
            if !before.done.is_closed() {
                self.auditor.audit = Some(before);
                return;
            }
            // Who asked for it has gone.
            self.stop_windows(&mut before);
        }
        self.numbers.audits.audits += 1;
        let role = self.config.role.name();
        let mut report = WorkerAudit { role, ..WorkerAudit::default() };
        let mut pages = Vec::new();
        for (number, kind) in POOLS.into_iter().enumerate() {
            let pool = self.pools.pages(kind);
            for (page, _) in pool.owned() {
                match pool.check(page) {
                    Ok(PageState::Sealed | PageState::Draining)
                        if self.pools.sealed_digests(page).is_some() =>
                    {
                        report.pages[number].there += 1;
                        if wish.takes(number as u64, page.index.into()) {
                            pages.push(page);
                        }
                    }
                    Ok(PageState::Quarantined) => {}
                    _ => report.open += 1,
                }
            }
        }
        let tiers = self.cache.as_ref().map(super::Cache::tiers);
        let all: Vec<ObjectKey> = tiers.into_iter().flat_map(|t| t.host_objects()).collect();
        report.host.there = all.len() as u64;
        let objects = all.into_iter().enumerate();
        let objects = objects.filter(|(n, _)| wish.takes(POOLS.len() as u64, *n as u64));
        let objects = objects.map(|(_, key)| key).collect();
        let subjects = self.subjects(wish.windows as usize);
        report.windows.there = subjects.len() as u64;
        self.auditor.audit = Some(Box::new(Audit {
            done,
            report,
            memory: ObjectMemory::new(&self.pools, self.config.fingerprint),
            pages,
            objects,
            subjects,
            window: None,
            began: self.clock.elapsed(),
        }));
    }

    /// Prefixes whose tokens are known and whose pages are here: of requests that run, then of those
    /// that ended last; each once.
    fn subjects(&self, most: usize) -> VecDeque<Subject> {
        let mut seen: BTreeSet<ChainHash> = BTreeSet::new();
        let mut subjects = VecDeque::new();
        let mut add = |subject: Subject, chain: &[ChainHash]| {
            if subjects.len() < most && chain.last().is_some_and(|end| seen.insert(*end)) {
                subjects.push_back(subject);
            }
        };
        for (id, seq) in self.sequences.iter().rev() {
            let blocks = seq.computed / BLOCK_TOKENS;
            let runs = matches!(seq.state, State::Prefilling | State::Decoding);
            if !runs || blocks == 0 || matches!(seq.origin, Origin::Audit) {
                continue;
            }
            let tokens = seq.tokens[..(blocks * BLOCK_TOKENS) as usize].to_vec();
            let (chain, _) = self.prefixes.blocks_of(&tokens, &seq.salt);
            let name = format!("request {}", seq.journey.request_id());
            let (salt, running) = (seq.salt.clone(), Some(*id));
            add(Subject { name, tokens, salt, running }, &chain);
        }
        for Recent { name, tokens, salt } in &self.auditor.recent {
            let (chain, pages) = self.prefixes.blocks_of(tokens, salt);
            let tokens = tokens[..pages.len() * BLOCK_TOKENS as usize].to_vec();
            let name = format!("prefix of request {name}");
            let subject = Subject { name, tokens, salt: salt.clone(), running: None };
            add(subject, &chain[..pages.len()]);
        }
        subjects
    }

    /// How long a worker without other work may wait.
    pub(super) fn audit_pause(&self) -> Option<Duration> {
        let audit = self.auditor.audit.as_ref()?;
        let waits = audit.pages.is_empty() && audit.objects.is_empty() && audit.window.is_some();
        // Who asked may go meanwhile, or the patience end.
        Some(if waits { Duration::from_millis(100) } else { Duration::ZERO })
    }

    /// Does a part of an audit.
    pub(super) fn go_on_auditing(&mut self) {
        if !self.auditor.condemned.is_empty() {
            self.free_condemned();
        }
        let Some(mut audit) = self.auditor.audit.take() else { return };
        let is_late = self.clock.elapsed() > audit.began + PATIENCE;
        if audit.done.is_closed() || is_late {
            audit.leave_rest();
            self.stop_windows(&mut audit);
        }
        let mut left = TURN_BYTES;
        while left > 0
            && let Some(page) = audit.pages.pop()
        {
            left = left.saturating_sub(self.audit_page(&mut audit, page));
        }
        while left > 0
            && let Some(key) = audit.objects.pop()
        {
            left = left.saturating_sub(self.audit_host(&mut audit, key));
        }
        let is_done = audit.pages.is_empty() && audit.objects.is_empty() && {
            self.audit_windows(&mut audit);
            audit.window.is_none() && audit.subjects.is_empty()
        };
        if !is_done {
            self.auditor.audit = Some(audit);
            return;
        }
        let Audit { mut report, done, began, .. } = *audit;
        report.lasted = self.clock.elapsed() - began;
        // Who asked may have gone.
        let _ = done.send(report);
    }

    /// Digests a page again; how many bytes that were.
    fn audit_page(&mut self, audit: &mut Audit, page: PageRef) -> u64 {
        let Some(sealed) = self.pools.sealed_digests(page).map(<[PageDigest]>::to_vec) else {
            audit.report.gone += 1;
            return 0;
        };
        let now = match self.pools.digests(page) {
            Ok(now) => now,
            Err(error) => panic!("digest {page} again: {error}"),
        };
        let bytes = self.pools.geometry().bytes_per_index(page.pool);
        let looked = &mut audit.report.pages[page.pool as usize];
        looked.checked += 1;
        looked.bytes += bytes;
        self.numbers.audits.checked += 1;
        if sealed == now {
            return bytes;
        }
        let (held_by, page_no) = self.holders(page);
        let sections = self.pools.geometry().sections(page.pool).to_vec();
        for (section, (expected, found)) in sections.iter().zip(sealed.iter().zip(&now)) {
            if expected != found {
                let finding = Finding {
                    how: How::Digest,
                    kind: section.kind.name().to_owned(),
                    layer: Some(section.layer),
                    page: Some(page.to_string()),
                    page_no,
                    row: None,
                    expected: expected.to_string(),
                    found: found.to_string(),
                    held_by: held_by.clone(),
                };
                self.found_wrong(audit, finding);
            }
        }
        self.condemn(page);
        bytes
    }

    /// A page has changed since it was sealed, which was seen when it was to be saved.
    pub(super) fn save_was_wrong(&mut self, error: &ObjectError) {
        let ObjectError::Changed { kind, layer, page, found, sealed } = *error else { return };
        let (held_by, page_no) = self.holders(page);
        self.tell_wrong(&Finding {
            how: How::Save,
            kind: kind.name().to_owned(),
            layer: Some(layer),
            page: Some(page.to_string()),
            page_no,
            row: None,
            expected: sealed.to_string(),
            found: found.to_string(),
            held_by,
        });
        self.condemn(page);
    }

    /// Counts and tells of something wrong in an audit.
    fn found_wrong(&mut self, audit: &mut Audit, finding: Finding) {
        self.tell_wrong(&finding);
        audit.wrong(finding);
    }

    /// Counts and tells of something wrong.
    fn tell_wrong(&mut self, finding: &Finding) {
        self.numbers.audits.wrong[finding.how as usize] += 1;
        tracing::error!(
            found_by = finding.how.name(),
            kind = finding.kind,
            layer = finding.layer,
            page = finding.page,
            page_no = finding.page_no,
            row = finding.row,
            held_by = finding.held_by.join(", "),
            "bytes in memory are not what was computed; they are given up with all that may rest on \
             them; test this machine's memory"
        );
    }

    /// Verifies an object in host memory; how many bytes that were.
    fn audit_host(&mut self, audit: &mut Audit, key: ObjectKey) -> u64 {
        let Some(result) = self.audit_object(key, &audit.memory) else {
            audit.report.gone += 1;
            return 0;
        };
        self.numbers.audits.checked += 1;
        audit.report.host.checked += 1;
        let error = match result {
            Ok(bytes) => {
                audit.report.host.bytes += bytes;
                return bytes;
            }
            Err(error) => error,
        };
        let (kind, layer, page_no) = match &error {
            ObjectError::Tag { kind, layer, page_no } => {
                (kind.name(), Some(*layer), Some(*page_no))
            }
            _ => ("object", None, None),
        };
        let finding = Finding {
            how: How::Host,
            kind: kind.to_owned(),
            layer,
            page: None,
            page_no,
            row: None,
            expected: "what its tags say".to_owned(),
            found: error.to_string(),
            held_by: vec![format!("object {key} in host memory")],
        };
        self.found_wrong(audit, finding);
        audit.memory.bytes_of(key.part)
    }

    /// Names of those who hold a page, and its number with them.
    fn holders(&self, page: PageRef) -> (Vec<String>, Option<u32>) {
        let owners = self.pools.pages(page.pool).owners(page).unwrap_or_default();
        let mut number = None;
        let name = |owner: &Owner| match *owner {
            Owner::Sequence(id) => {
                let seq = self.sequences.get(&id);
                number = number.or_else(|| number_in(seq?, page));
                let name = seq.map_or("", |seq| seq.journey.request_id());
                format!("request {name}")
            }
            Owner::Tree(node) => {
                let Some((hash, blocks)) = self.prefixes.prefix_of(node) else {
                    return "a prefix".to_owned();
                };
                if page.pool == PoolKind::Block {
                    number = u32::try_from(blocks).ok().map(|blocks| blocks - 1);
                }
                format!("prefix {:.16} of {blocks} blocks", hash.to_string())
            }
            Owner::LocalCopy(_) => "a copy".to_owned(),
            Owner::RemoteReader(_) => "a peer that reads it".to_owned(),
        };
        let mut names: Vec<String> = owners.iter().map(name).take(NAMED).collect();
        if let Some(more @ 1..) = owners.len().checked_sub(NAMED) {
            names.push(format!("{more} more"));
        }
        (names, number)
    }

    /// Computes no more windows, and says which.
    fn stop_windows(&mut self, audit: &mut Audit) {
        let waiting = audit.window.take().map(|(id, subject)| {
            self.drop_sequence(id);
            subject
        });
        for subject in waiting.into_iter().chain(audit.subjects.drain(..)) {
            let seconds = PATIENCE.as_secs();
            let why = format!("{}: not computed again within {seconds} s", subject.name);
            audit.report.skipped.push(why);
        }
    }

    /// Begins the next window if none is being computed.
    fn audit_windows(&mut self, audit: &mut Audit) {
        if let Some((id, _)) = &audit.window {
            if self.sequences.contains_key(id) {
                return;
            }
            // It would have been compared at its end.
            if let Some((_, subject)) = audit.window.take() {
                audit.report.skipped.push(format!("{}: it could not be computed", subject.name));
            }
        }
        while let Some(mut subject) = audit.subjects.pop_front() {
            let id = self.next_id;
            self.next_id += 1;
            match self.begin_window(id, &mut subject) {
                Ok(()) => {
                    audit.window = Some((id, subject));
                    return;
                }
                Err(why) => audit.report.skipped.push(format!("{}: {why}", subject.name)),
            }
        }
    }

    /// Queues the end of a prefix to be computed again, from the last place before it that is kept;
    /// less of it if that is far away.
    fn begin_window(&mut self, id: SeqId, subject: &mut Subject) -> Result<(), &'static str> {
        let role = self.config.role.name();
        let of = |subject: &Subject| {
            Sequence::of_audit(id, subject.tokens.clone(), subject.salt.clone(), role)
        };
        let mut seq = of(subject);
        let from = self.prefixes.reach(None, &mut seq, super::Role::Unified);
        let most = (from + WINDOW_TOKENS_MAX) as usize;
        if subject.tokens.len() > most {
            subject.tokens.truncate(most);
            seq = of(subject);
        }
        let need = super::need(&self.config, seq.tokens.len(), 1);
        if !self.scheduler.could_fit(need) {
            return Err("there are not enough pages to compute it beside it");
        }
        self.sequences.insert(id, seq);
        self.enqueue(id, need);
        Ok(())
    }

    /// A step has gone on with a window; compares its pages at its end.
    pub(super) fn end_window(&mut self, id: SeqId) {
        let is_over = |seq: &Sequence| seq.computed as usize == seq.tokens.len();
        if !self.sequences.get(&id).is_some_and(is_over) {
            return;
        }
        let Some(mut audit) = self.auditor.audit.take() else { return self.drop_sequence(id) };
        // Without one its audit was called off, and another one has begun.
        if let Some((_, subject)) = audit.window.take_if(|(window, _)| *window == id) {
            self.compare_window(&mut audit, id, &subject);
        }
        self.auditor.audit = Some(audit);
        self.drop_sequence(id);
    }

    fn compare_window(&mut self, audit: &mut Audit, id: SeqId, subject: &Subject) {
        let Some(seq) = self.sequences.get(&id) else { return };
        audit.report.windows.checked += 1;
        audit.report.window_tokens += u64::from(seq.computed - seq.cached);
        for (fresh, resident, page_no) in self.pairs(seq, subject) {
            audit.report.window_pages += 1;
            audit.report.windows.bytes += self.pools.geometry().bytes_per_index(fresh.pool);
            self.numbers.audits.checked += 1;
            let different = self.differences(fresh, resident);
            if different.is_empty() {
                continue;
            }
            let (mut held_by, _) = self.holders(resident);
            held_by.push(format!("compared as {}", subject.name));
            let digests = |page| self.pools.digests(page).unwrap_or_default();
            let (expected, found) = (digests(fresh), digests(resident));
            for (section, row) in different {
                let of = self.pools.geometry().sections(resident.pool)[section];
                let finding = Finding {
                    how: How::Recompute,
                    kind: of.kind.name().to_owned(),
                    layer: Some(of.layer),
                    page: Some(resident.to_string()),
                    page_no: Some(page_no),
                    row,
                    expected: expected[section].to_string(),
                    found: found[section].to_string(),
                    held_by: held_by.clone(),
                };
                self.found_wrong(audit, finding);
            }
            self.condemn(resident);
        }
    }

    /// Pages that a window has computed, those that are kept for the same tokens, and their numbers.
    fn pairs(&self, seq: &Sequence, subject: &Subject) -> Vec<(PageRef, PageRef, u32)> {
        let Some(table) = &seq.table else { return Vec::new() };
        let (chain, kept) = self.prefixes.blocks_of(&subject.tokens, &subject.salt);
        let running = subject.running.and_then(|id| self.sequences.get(&id));
        let running = running.and_then(|seq| Some((seq.table.as_ref()?, seq)));
        let mut pairs = Vec::new();
        for block in seq.cached / BLOCK_TOKENS..seq.computed / BLOCK_TOKENS {
            let n = block as usize;
            let of_running = running
                .filter(|(_, seq)| block < seq.blocks_sealed)
                .and_then(|(table, _)| table.blocks().get(n).copied());
            if let Some(resident) = of_running.or_else(|| kept.get(n).copied()) {
                pairs.push((table.blocks()[n], resident, block));
            }
        }
        let first = table.window_first_no();
        let end = seq.computed / WINDOW_PAGE_ROWS;
        let window = |number: u32| table.window().get((number - first) as usize).copied();
        if let Some((other, running)) = running {
            for number in first.max(other.window_first_no())..end.min(running.windows_sealed) {
                let resident = other.window()[(number - other.window_first_no()) as usize];
                pairs.extend(window(number).map(|fresh| (fresh, resident, number)));
            }
        }
        if let Some(boundary) = chain.last().and_then(|end| self.prefixes.boundary_at(end)) {
            let from = end - boundary.window.len() as u32;
            for (number, resident) in (from..end).zip(boundary.window) {
                let fresh = (number >= first).then(|| window(number)).flatten();
                pairs.extend(fresh.map(|fresh| (fresh, resident, number)));
            }
            pairs.push((table.carry(), boundary.carry, 0));
        }
        let is_kept =
            |page: PageRef| self.pools.pages(page.pool).check(page) == Ok(PageState::Sealed);
        pairs.retain(|(fresh, resident, _)| fresh != resident && is_kept(*resident));
        pairs.sort_unstable();
        pairs.dedup();
        pairs
    }

    /// Sections in which two pages differ, with the first row that does.
    fn differences(&self, fresh: PageRef, resident: PageRef) -> Vec<(usize, Option<u32>)> {
        let geometry = self.pools.geometry();
        let mut different = Vec::new();
        for (number, section) in geometry.sections(fresh.pool).iter().enumerate() {
            let rows = geometry.rows_per_page(section.kind);
            let read = |page: PageRef, row: u32| {
                let base = self.pools.offset(section.kind, section.layer, page).unwrap_or_default();
                let mut bytes = Vec::new();
                for extent in geometry.extents(section.kind, row).iter() {
                    let at = bytes.len();
                    bytes.resize(at + extent.len as usize, 0);
                    let offset = base + u64::from(extent.offset);
                    if let Err(error) = self.pools.mem(page.pool).read(offset, &mut bytes[at..]) {
                        panic!("read {page} to compare it: {error}");
                    }
                }
                bytes
            };
            if read(fresh, rows) != read(resident, rows) {
                let row = (1..=rows).find(|row| read(fresh, *row) != read(resident, *row));
                different.push((number, row.map(|row| row - 1)));
            }
        }
        different
    }
}

/// The number of a page in its sequence.
fn number_in(seq: &Sequence, page: PageRef) -> Option<u32> {
    let table = seq.table.as_ref()?;
    let position = |pages: &[PageRef]| pages.iter().position(|p| *p == page).map(|n| n as u32);
    match page.pool {
        PoolKind::Block => position(table.blocks()),
        PoolKind::Window => Some(table.window_first_no() + position(table.window())?),
        PoolKind::Carry => Some(0),
    }
}
