//! One sequence: its tokens, its pages and where it stands.

use super::PeerKey;
use super::faults::PeerName;
use crate::engine::{
    CacheKeep, Event, FailureKind, FinishReason, GenerateRequest, ThinkingBudget, Turn, Usage,
};
use crate::glue::handoff::TagBinding;
use crate::glue::payload::PrefillRequest;
use crate::grammar::{GrammarError, Live, Progress, Source};
use crate::journey::{Journey, Outcome, Stage};
use crate::scheduler::{PageNeed, SeqId};
use dsv4_model::sample::{Sampled, SamplingParams, TokenMask};
use hicache::tiers::FetchId;
use kv_pool::{ChainHash, Owner, PageRef, PageTable, PlanEntry};
use pd_transfer::manifest::Manifest;
use pd_transfer::wire::AttemptId;
use std::sync::Arc;
use tokio::sync::mpsc::UnboundedSender;

/// Who wants the sequence.
#[derive(Debug)]
pub(super) enum Origin {
    /// A client of this process.
    Client {
        /// Where its events go.
        events: UnboundedSender<Event>,
    },
    /// A decode worker that wants the prompt computed.
    Peer {
        /// Its attempt.
        attempt: AttemptId,
        /// All that has to be handed over.
        plan: Vec<PlanEntry>,
        /// Blocks offered so far.
        blocks_offered: u32,
        /// What was offered so far.
        offered: Manifest,
    },
    /// An audit that compares what it computes with what is there.
    Audit,
}

/// Where a sequence stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Not admitted.
    Waiting,
    /// It is being looked for what others have computed of its prompt.
    Probing,
    /// Its prefix comes from the cache below the device.
    Loading {
        /// Fetch.
        fetch: FetchId,
    },
    /// Its pages are being pulled.
    Pulling {
        /// Attempt.
        attempt: AttemptId,
    },
    /// The attempt has failed or was called off; pages are freed once our own reads have ended.
    Unwinding {
        /// Compute the prompt here afterwards.
        recompute: bool,
    },
    /// Its prompt is being computed here.
    Prefilling,
    /// It generates.
    Decoding,
}

impl State {
    /// What that is for whoever looks on; none if it is what it was before.
    const fn stage(self) -> Option<Stage> {
        match self {
            Self::Waiting => Some(Stage::Queue),
            Self::Probing | Self::Loading { .. } => Some(Stage::Cache),
            Self::Pulling { .. } => Some(Stage::HandOff),
            Self::Unwinding { .. } => None,
            Self::Prefilling => Some(Stage::Prefill),
            Self::Decoding => Some(Stage::Decode),
        }
    }
}

/// One sequence of a worker.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) id: SeqId,
    pub(super) name: String,
    pub(super) origin: Origin,
    /// Changed by [`Self::enter`].
    pub(super) state: State,
    /// What is told of it.
    pub(super) journey: Arc<Journey>,
    /// Prompt, then output.
    pub(super) tokens: Vec<u32>,
    pub(super) prompt_len: usize,
    /// Tokens whose rows are in the pages.
    pub(super) computed: u32,
    pub(super) table: Option<PageTable>,
    pub(super) owner: Owner,
    pub(super) sampling: SamplingParams,
    /// Pages that it may come to own.
    pub(super) most: PageNeed,
    /// Once it was retracted: prompt tokens that a cache had when it first began, of all and by
    /// tier. What it finds of its own later is none of them.
    pub(super) first_cached: Option<(u32, [u32; 3])>,
    /// Whom cached prefixes are shared with, see [`GenerateRequest::cache_salt`].
    pub(super) salt: String,
    /// How long its prefix is to stay in host memory.
    pub(super) keep: CacheKeep,
    /// Its place among others that wait.
    pub(super) turn: Turn,
    pub(super) max_tokens: u32,
    pub(super) stop_tokens: Vec<u32>,
    /// Tokens before which no stop token is drawn.
    pub(super) min_tokens: u32,
    /// Bound of the thinking, until that has ended.
    pub(super) thinking: Option<ThinkingBudget>,
    /// What the output must be, for a prefill worker to hear.
    pub(super) source: Option<Arc<Source>>,
    /// The grammar of that, as far as the output has come.
    pub(super) live: Option<Live>,
    /// Prompt tokens that a cache had, here or at the peer that computed the prompt.
    pub(super) cached: u32,
    /// Tokens after which the prompt's computation stops next.
    pub(super) leg_end: u32,
    /// Hashes of the full blocks, as far as they were needed.
    pub(super) chain: Vec<ChainHash>,
    /// The last place in the output from which the prefix tree can go on.
    pub(super) output_boundary: Option<ChainHash>,
    /// Blocks that were offered to the tiers below the device.
    pub(super) blocks_saved: u32,
    /// Times that its prefix was looked for there.
    pub(super) fetches: u32,
    /// It has waited for what was looked for in a store that others write too.
    pub(super) was_probed: bool,
    /// Tokens that came from there, in the order of [`hicache::tiers::Tier::ALL`].
    pub(super) from_tiers: [u32; 3],
    pub(super) blocks_sealed: u32,
    pub(super) windows_sealed: u32,
    pub(super) context: Option<Arc<TagBinding>>,
    pub(super) peer: Option<PeerKey>,
    /// The prefill worker that was asked last.
    pub(super) asked: Option<PeerName>,
    /// Addresses of all that were asked: a worker that comes back is the same one.
    pub(super) tried: Vec<String>,
    /// Whether another one may be asked: the last one could not, and nothing was wrong with pages.
    pub(super) may_ask_again: bool,
    pub(super) quarantined: Vec<PageRef>,
}

impl Sequence {
    pub(super) fn of_client(
        id: SeqId,
        request: GenerateRequest,
        live: Option<Live>,
        events: UnboundedSender<Event>,
        journey: Arc<Journey>,
    ) -> Self {
        let GenerateRequest { max_tokens, stop_tokens, min_tokens, constraint, .. } = request;
        let GenerateRequest { prompt, sampling, thinking, cache_salt, cache_keep, turn, .. } =
            request;
        let request = PrefillRequest {
            id: request.id,
            request_id: String::new(),
            trace: None,
            prompt,
            output: 0,
            sampling,
            cache_salt,
            cache_keep,
            turn,
            not_first: Vec::new(),
            thinking,
            source: constraint.map(|constraint| constraint.source),
        };
        let waiting = Self::waiting(id, request, Origin::Client { events }, journey);
        Self { max_tokens, stop_tokens, min_tokens, live, ..waiting }
    }

    /// One whose prompt a peer wants computed, with its first token.
    pub(super) fn of_peer(
        id: SeqId,
        request: PrefillRequest,
        live: Option<Live>,
        origin: Origin,
        (peer, context): (PeerKey, Arc<TagBinding>),
        journey: Arc<Journey>,
    ) -> Self {
        let waiting = Self::waiting(id, request, origin, journey);
        Self { context: Some(context), peer: Some(peer), live, ..waiting }
    }

    /// One whose pages are compared with others of the same tokens, after all that have clients.
    pub(super) fn of_audit(id: SeqId, tokens: Vec<u32>, salt: String, role: &'static str) -> Self {
        let name = "audit".to_owned();
        let length = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        let journey = Arc::new(Journey::begin(name.clone(), role, None, length));
        let request = PrefillRequest {
            id: name,
            request_id: String::new(),
            trace: None,
            prompt: tokens,
            output: 0,
            sampling: SamplingParams::greedy(),
            cache_salt: salt,
            cache_keep: CacheKeep::AsUsed,
            turn: Turn { priority: i32::MAX, key: 0 },
            not_first: Vec::new(),
            thinking: None,
            source: None,
        };
        let waiting = Self::waiting(id, request, Origin::Audit, journey);
        // What the tiers below have of it is not what is to be looked at.
        Self { fetches: u32::MAX, was_probed: true, ..waiting }
    }

    fn waiting(id: SeqId, request: PrefillRequest, origin: Origin, journey: Arc<Journey>) -> Self {
        let prompt_len = request.prompt.len() - request.output as usize;
        let output = &request.prompt[prompt_len..];
        Self {
            id,
            name: request.id,
            origin,
            state: State::Waiting,
            journey,
            prompt_len,
            thinking: request.thinking.filter(|budget| !output.contains(&budget.end)),
            tokens: request.prompt,
            computed: 0,
            table: None,
            owner: Owner::Sequence(id),
            sampling: request.sampling,
            most: PageNeed::default(),
            first_cached: None,
            salt: request.cache_salt,
            keep: request.cache_keep,
            turn: request.turn,
            max_tokens: 1,
            // Of a peer's output one token more is drawn here.
            min_tokens: if request.not_first.is_empty() { 0 } else { request.output + 1 },
            stop_tokens: request.not_first,
            source: request.source,
            live: None,
            cached: 0,
            leg_end: 0,
            chain: Vec::new(),
            output_boundary: None,
            blocks_saved: 0,
            fetches: 0,
            was_probed: false,
            from_tiers: [0; 3],
            blocks_sealed: 0,
            windows_sealed: 0,
            context: None,
            peer: None,
            asked: None,
            tried: Vec::new(),
            may_ask_again: false,
            quarantined: Vec::new(),
        }
    }

    /// What another worker is asked for: the prompt, what there is of the output, and the next token.
    pub(super) fn as_request(&self) -> PrefillRequest {
        PrefillRequest {
            id: self.name.clone(),
            request_id: self.journey.request_id().to_owned(),
            trace: self.journey.span().map(|span| span.context),
            prompt: self.tokens.clone(),
            output: (self.tokens.len() - self.prompt_len) as u32,
            sampling: self.sampling.clone(),
            cache_salt: self.salt.clone(),
            cache_keep: self.keep,
            turn: self.turn,
            thinking: self.thinking,
            not_first: if self.is_short() { self.stop_tokens.clone() } else { Vec::new() },
            source: self.source.clone(),
        }
    }

    /// Its pages are gone, and it waits to go on.
    pub(super) fn retracted(&mut self) {
        self.first_cached.get_or_insert((self.cached, self.from_tiers));
        self.enter(State::Waiting);
        (self.computed, self.leg_end) = (0, 0);
        (self.blocks_sealed, self.windows_sealed) = (0, 0);
        self.fetches = 0;
        // Whoever was asked before may be asked again.
        self.tried.clear();
    }

    /// Where it stands from now on.
    pub(super) fn enter(&mut self, state: State) {
        self.state = state;
        if let Some(stage) = state.stage() {
            self.journey.enter(stage);
        }
    }

    /// Tells those who look on how far it has come.
    pub(super) fn tell_reach(&self) {
        let output = (self.tokens.len() - self.prompt_len) as u32;
        self.journey.reach(self.computed, self.cached(), output);
    }

    /// Whether it was running before.
    pub(super) const fn was_running(&self) -> bool {
        self.first_cached.is_some()
    }

    /// Prompt tokens that a cache had.
    pub(super) fn cached(&self) -> u32 {
        self.first_cached.map_or(self.cached, |(cached, _)| cached)
    }

    /// Which of the cached tokens came from each tier below the device. What was fetched counts as
    /// far as it was used.
    pub(super) fn cached_below(&self) -> [u32; 3] {
        let mut left = self.cached();
        let from_tiers = self.first_cached.map_or(self.from_tiers, |(_, from_tiers)| from_tiers);
        from_tiers.map(|tokens| {
            let counted = tokens.min(left);
            left -= counted;
            counted
        })
    }

    /// Says that the output is lost.
    pub(super) fn fail(&self, kind: FailureKind, message: &str) {
        self.journey.conclude(Outcome::Failed, Some(message));
        if let Origin::Client { events } = &self.origin {
            // A client that has gone needs no answer.
            let _ = events.send(Event::Failed { kind, message: message.to_owned() });
        }
    }

    /// Tokens that the output must have before a stop token may come; whether it has not.
    fn is_short(&self) -> bool {
        self.tokens.len() - self.prompt_len < self.min_tokens as usize
    }

    /// Tokens that may come next; none said means all.
    pub(super) fn allowed(&mut self, vocab: usize) -> Result<Option<Arc<TokenMask>>, GrammarError> {
        if let Some(budget) = self.thinking
            && self.tokens.len() - self.prompt_len >= budget.tokens as usize
        {
            let mut end = TokenMask::none(vocab);
            end.allow(budget.end);
            return Ok(Some(Arc::new(end)));
        }
        let is_short = self.is_short();
        let mask = self.live.as_mut().map(Live::mask).transpose()?.cloned();
        if !is_short {
            return Ok(mask);
        }
        let mut longer = mask.as_deref().cloned().unwrap_or_else(|| TokenMask::all(vocab));
        self.stop_tokens.iter().for_each(|token| longer.forbid(*token));
        // A text that is complete ends, however short it is.
        Ok(if longer.is_empty() { mask } else { Some(Arc::new(longer)) })
    }

    /// Whether an output may begin with a token that a peer drew.
    pub(super) fn check_first(&mut self, token: u32, vocab: usize) -> Result<(), GrammarError> {
        match self.allowed(vocab)? {
            Some(mask) if !mask.allows(token) => Err(GrammarError::NotAllowed(token)),
            _ => Ok(()),
        }
    }

    /// Takes the next token, wherever it came from; says whether the output goes on.
    pub(super) fn commit(&mut self, sampled: Sampled) -> Commit {
        let Origin::Client { events } = &self.origin else { return Commit::Ended };
        let token = sampled.token;
        let output = (self.tokens.len() - self.prompt_len) as u32;
        if self.stop_tokens.contains(&token) {
            return self.finish(FinishReason::Stop, output);
        }
        let progress = match self.live.as_mut().map(|live| live.accept(token)) {
            Some(Err(error)) => return Commit::Failed(error.to_string()),
            Some(Ok(progress)) => progress,
            None => Progress::GoesOn,
        };
        if events.send(Event::Token(sampled)).is_err() {
            return Commit::Gone;
        }
        self.tokens.push(token);
        self.thinking = self.thinking.filter(|budget| budget.end != token);
        if progress == Progress::Complete {
            return self.finish(FinishReason::Stop, output + 1);
        }
        if output + 1 >= self.max_tokens {
            return self.finish(FinishReason::Length, output + 1);
        }
        Commit::GoesOn
    }

    fn finish(&self, reason: FinishReason, completion_tokens: u32) -> Commit {
        let (prompt_tokens, cached_tokens) = (self.prompt_len as u32, self.cached());
        self.journey.reach(self.computed, cached_tokens, completion_tokens);
        self.journey.conclude(Outcome::Finished, None);
        let cached_below = self.cached_below();
        let usage = Usage { prompt_tokens, completion_tokens, cached_tokens, cached_below };
        if let Origin::Client { events } = &self.origin {
            let _ = events.send(Event::Finished { reason, usage });
        }
        Commit::Ended
    }
}

/// What becomes of a sequence after a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Commit {
    /// More tokens are wanted.
    GoesOn,
    /// The output is complete.
    Ended,
    /// The client has gone.
    Gone,
    /// The output can not be what it must be; says why.
    Failed(String),
}
