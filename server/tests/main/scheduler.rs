//! The scheduler under random requests, until all have ended: nobody starves, no page is promised
//! twice, and the same calls give the same answers.

use dsv4_server::scheduler::{Limits, PageNeed, Reserve, Scheduler, SeqId, Waiting};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const BLOCK: u32 = 4;

/// One request of a run.
#[derive(Clone, Copy, Debug)]
struct Request {
    /// Step in which it comes.
    at: u32,
    prompt: u32,
    output: u32,
    priority: i32,
    key: u64,
    /// Steps for which its pages are on their way after each admission.
    parked: u32,
    /// Output tokens after which its client leaves.
    leaves: Option<u32>,
}

/// Where an admitted one stands.
#[derive(Clone, Copy, Debug)]
enum At {
    /// Until this step.
    Parked(u32),
    Prefill(u32),
    Decode,
}

/// What the scheduler was told and what it said, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Said {
    Admitted(SeqId),
    Shares(Vec<(SeqId, u32)>),
    Retracted(SeqId),
    Ended(SeqId),
}

struct Run {
    limits: Limits,
    requests: Vec<Request>,
    scheduler: Scheduler,
    running: BTreeMap<SeqId, At>,
    /// Tokens that each has, prompt and output.
    tokens: Vec<u32>,
    said: Vec<Said>,
}

fn pages(tokens: u32) -> PageNeed {
    PageNeed { blocks: tokens.div_ceil(BLOCK), window: 1, carry: 1 }
}

impl Run {
    fn new(limits: Limits, requests: &[Request]) -> Self {
        Self {
            limits,
            requests: requests.to_vec(),
            scheduler: Scheduler::new(limits),
            running: BTreeMap::new(),
            tokens: requests.iter().map(|request| request.prompt).collect(),
            said: Vec::new(),
        }
    }

    fn most(&self, id: SeqId) -> PageNeed {
        let request = self.requests[id as usize];
        pages(request.prompt + request.output)
    }

    /// Pages for what it has and two more tokens.
    fn start(&self, id: SeqId) -> PageNeed {
        let most = self.most(id);
        most.with_blocks(most.blocks.min(pages(self.tokens[id as usize] + 2).blocks))
    }

    fn begin(&mut self, step: u32) {
        for (n, request) in self.requests.clone().iter().enumerate() {
            let id = n as SeqId;
            if request.at == step {
                let (start, most) = (self.start(id), self.most(id));
                let Request { priority, key, prompt: cost, .. } = *request;
                let waiting = Waiting { start, most, cost, priority, key, deadline_us: None };
                self.scheduler.enqueue(id, waiting);
            }
        }
        while let Some(id) = self.scheduler.admit() {
            self.said.push(Said::Admitted(id));
            let until = step + self.requests[id as usize].parked;
            assert!(self.running.insert(id, At::Parked(until)).is_none(), "{id} is running");
        }
        let ripe: Vec<SeqId> = self
            .running
            .iter()
            .filter(|(_, at)| matches!(at, At::Parked(until) if *until <= step))
            .map(|(id, _)| *id)
            .collect();
        for id in ripe {
            let tokens = self.tokens[id as usize];
            self.running.insert(id, At::Prefill(tokens));
            self.scheduler.start_prefill(id, tokens);
        }
    }

    fn step(&mut self) {
        let plan = self.scheduler.plan();
        let computed: u32 = plan.shares.iter().map(|share| share.tokens).sum();
        assert!(computed <= self.limits.step_tokens);
        self.said.push(Said::Shares(plan.shares.iter().map(|s| (s.id, s.tokens)).collect()));
        let mut gone = BTreeSet::new();
        for share in &plan.shares {
            let wanted = pages(self.tokens[share.id as usize] + 1).blocks;
            if gone.contains(&share.id) || !matches!(self.running[&share.id], At::Decode) {
                continue;
            }
            while let Reserve::Retract(id) = self.scheduler.reserve(share.id, wanted) {
                assert!(!matches!(self.running.remove(&id), None | Some(At::Parked(_))), "{id}");
                self.scheduler.retract(id, self.start(id));
                self.said.push(Said::Retracted(id));
                gone.insert(id);
                if id == share.id {
                    break;
                }
            }
        }
        for share in plan.shares.iter().filter(|share| !gone.contains(&share.id)) {
            let id = share.id;
            let left = match self.running[&id] {
                At::Prefill(left) => left - share.tokens,
                At::Decode => 0,
                At::Parked(_) => panic!("{id} has a share and no pages"),
            };
            if left > 0 {
                self.running.insert(id, At::Prefill(left));
                continue;
            }
            self.tokens[id as usize] += 1;
            let request = self.requests[id as usize];
            let output = self.tokens[id as usize] - request.prompt;
            if output == request.output || Some(output) == request.leaves {
                self.said.push(Said::Ended(id));
                self.running.remove(&id);
                self.scheduler.remove(id);
            } else if matches!(self.running.insert(id, At::Decode), Some(At::Prefill(_))) {
                self.scheduler.start_decode(id);
            }
        }
        self.check();
    }

    /// What runs has its pages, and they are there.
    fn check(&self) {
        let used: u32 = self.running.keys().map(|id| pages(self.tokens[*id as usize]).blocks).sum();
        assert!(used <= self.limits.pages.blocks, "{used} blocks");
        assert!(self.running.len() <= self.limits.running);
        assert_eq!(self.scheduler.admitted(), self.running.len());
    }

    /// Goes on until all have ended.
    fn finish(mut self) -> Vec<Said> {
        let tokens: u32 = self.requests.iter().map(|r| r.prompt + r.output + r.parked + 4).sum();
        // Each step the first of those that run and are not parked gets its share. How often the
        // others begin again is bounded by how often one ends.
        let most = 64 + tokens * (2 + self.requests.len() as u32);
        let mut ended = 0;
        for step in 0..most {
            self.begin(step);
            self.step();
            ended = self.said.iter().filter(|said| matches!(said, Said::Ended(_))).count();
            if ended == self.requests.len() {
                break;
            }
        }
        assert_eq!(ended, self.requests.len(), "some have not ended after {most} steps");
        assert_eq!((self.scheduler.waiting(), self.scheduler.admitted()), (0, 0));
        self.said
    }
}

fn request() -> impl Strategy<Value = Request> {
    let leaves = prop::option::weighted(0.2, 1_u32..20);
    (0_u32..60, 1_u32..24, 1_u32..40, -1_i32..2, 0_u64..3, 0_u32..6, leaves).prop_map(
        |(at, prompt, output, priority, key, parked, leaves)| Request {
            at,
            prompt,
            output,
            priority,
            key,
            parked,
            leaves,
        },
    )
}

proptest! {
    #[test]
    fn all_requests_end_whatever_the_room_and_the_same_calls_give_the_same_plans(
        requests in prop::collection::vec(request(), 1..25),
        // The largest request fits alone.
        blocks in 16_u32..40,
        running in 1_usize..10,
        step_tokens in 1_u32..32,
    ) {
        let pages = PageNeed { blocks, window: 100, carry: 100 };
        let limits = Limits { step_tokens, running, pages };
        let said = Run::new(limits, &requests).finish();
        prop_assert_eq!(said, Run::new(limits, &requests).finish());
    }
}

/// The same run by hand: the property above would hold of a scheduler that never retracts.
#[test]
fn outputs_that_grow_beyond_the_pages_are_retracted_and_end() {
    let request =
        |at| Request { at, prompt: 8, output: 40, priority: 0, key: 0, parked: 0, leaves: None };
    let pages = PageNeed { blocks: 20, window: 100, carry: 100 };
    let limits = Limits { step_tokens: 16, running: 4, pages };
    let said = Run::new(limits, &[request(0), request(0), request(1), request(2)]).finish();
    let retracted: Vec<SeqId> = said
        .iter()
        .filter_map(|said| match said {
            Said::Retracted(id) => Some(*id),
            _ => None,
        })
        .collect();
    assert!(!retracted.is_empty() && !retracted.contains(&0), "{retracted:?}");
    let ended: Vec<&Said> = said.iter().filter(|said| matches!(said, Said::Ended(_))).collect();
    assert_eq!(ended, [0, 1, 2, 3].map(Said::Ended).iter().collect::<Vec<_>>());
}
