//! Model output through deepseek-recipe's parser: tokens in, an API's chunks or events out.
//!
//! The parser decodes token ids itself, but holds text back for as long as a tokenizer's tokens
//! are out of step with characters, drops an unfinished last character, and repeats the log
//! probabilities of a token whose text it splits. So it is fed with numbers of [`Piece`]s in
//! place of token ids, and each piece's number rides through it in the log probability field; the
//! real values are put in before an API's own generator sees them, once per token.

use super::choices::Part;
use super::open::Answering;
use super::pieces::{Piece, PieceStream, token_text};
use crate::engine::{Event, FailureKind, FinishReason, Usage};
use deepseek_recipe::stream::{
    ChunkGenerator, InferenceChunk, InferenceFinishReason, InferenceTokenLogprob, OutputChunk,
    ParsingOptions, PromptUsage, StreamProcessor, StreamTokenizer, TokenLogprob, TopLogprob,
};
use dsv4_model::sample::Sampled;
use dsv4_model::text::Tokenizer;
use futures_util::stream::{BoxStream, Stream, StreamExt};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

/// A number that stands for "no text; give out what is held back".
const FLUSH: u32 = u32::MAX;

/// An output that was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) kind: FailureKind,
    pub(super) message: String,
}

impl Failure {
    pub(super) fn internal(message: impl Into<String>) -> Self {
        Self { kind: FailureKind::Internal, message: message.into() }
    }

    /// The channel closed without a last event.
    pub(super) fn worker_ended() -> Self {
        Self::internal("the worker ended before the answer was complete")
    }
}

/// What the two ends of the parser know about one output.
#[derive(Debug, Default)]
struct Log {
    /// Number of the first piece in `pieces`.
    first: u32,
    pieces: VecDeque<Piece>,
    /// First piece whose log probabilities were not reported yet.
    unreported: u32,
    /// Tokens up to the last one with reasoning text.
    reasoning_tokens: u32,
    /// Tokens received.
    tokens: u32,
    usage: Option<Usage>,
    /// Whether the API's generator was told of the end.
    finished: bool,
    failure: Option<Failure>,
}

#[derive(Clone, Debug, Default)]
struct SharedLog(Arc<Mutex<Log>>);

impl SharedLog {
    fn lock(&self) -> MutexGuard<'_, Log> {
        // Every update is a single assignment or push, so a poisoned log is still a right one.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Log {
    fn piece(&self, number: u32) -> Option<&Piece> {
        self.pieces.get(number.checked_sub(self.first)? as usize)
    }

    /// Appends a piece and gives its number.
    fn push(&mut self, piece: Piece) -> u32 {
        let number = self.first.saturating_add(u32::try_from(self.pieces.len()).unwrap_or(FLUSH));
        self.pieces.push_back(piece);
        number
    }

    fn completion_tokens(&self) -> u32 {
        self.usage.map_or(self.tokens, |usage| usage.completion_tokens)
    }

    /// What an output failed of whose chunks have ended.
    fn lost(&self) -> Option<Failure> {
        let unfinished = || Failure::internal("the parser ended without a finish reason");
        self.failure.clone().or_else(|| (!self.finished).then(unfinished))
    }

    /// Forgets the pieces before `number`: the parser reads and reports them in order.
    fn forget_before(&mut self, number: u32) {
        while self.first < number && self.pieces.pop_front().is_some() {
            self.first += 1;
        }
    }
}

impl StreamTokenizer for SharedLog {
    fn decode_ids(&self, ids: &[u32], _skip_special_tokens: bool) -> Result<String, String> {
        let log = self.lock();
        let texts = ids.iter().filter_map(|&number| log.piece(number));
        Ok(texts.map(|piece| piece.text.as_str()).collect())
    }

    fn is_special_token(&self, number: u32) -> bool {
        number == FLUSH || self.lock().piece(number).is_some_and(|piece| piece.special)
    }
}

/// The number of a piece as the parser carries it. Exact below 2^24, which is more pieces than
/// any context has tokens.
fn carry(number: u32) -> InferenceTokenLogprob {
    let logprob = if number == FLUSH { -1.0 } else { number as f32 };
    InferenceTokenLogprob { logprob, top_logprobs: Vec::new() }
}

fn carried(logprob: f32) -> Option<u32> {
    // Negative is `FLUSH`; everything else came from `carry`.
    (logprob >= 0.0).then_some(logprob as u32)
}

/// Events of the engine as the parser reads them.
struct TokenSource {
    generation: Answering,
    first: Option<Event>,
    pieces: PieceStream,
    log: SharedLog,
    prompt: Option<(String, PromptUsage)>,
    finish: Option<InferenceFinishReason>,
    ended: bool,
}

impl TokenSource {
    /// Passes pieces on, or `None` if there are none.
    fn chunk(&self, pieces: Vec<Piece>) -> Option<InferenceChunk> {
        let mut log = self.log.lock();
        log.tokens = self.pieces.tokens();
        let mut numbers = Vec::with_capacity(pieces.len());
        for piece in pieces {
            // The parser would wait for the rest of a character that has none.
            let broken = piece.text.ends_with(char::REPLACEMENT_CHARACTER);
            numbers.push(log.push(piece));
            if broken {
                numbers.push(FLUSH);
            }
        }
        let logprobs = Some(numbers.iter().map(|&number| carry(number)).collect());
        (!numbers.is_empty()).then_some(InferenceChunk::Tokens { token_ids: numbers, logprobs })
    }

    /// Handles one event; `None` means that nothing comes of it.
    fn take(&mut self, event: Option<Event>) -> Option<InferenceChunk> {
        let mut pieces = Vec::new();
        match event {
            Some(Event::Token(sampled)) => self.pieces.push(sampled, &mut pieces),
            Some(Event::Finished { reason, usage }) => {
                self.log.lock().usage = Some(usage);
                self.pieces.finish(&mut pieces);
                self.finish = Some(match reason {
                    FinishReason::Stop => InferenceFinishReason::Stop,
                    FinishReason::Length => InferenceFinishReason::Length,
                });
            }
            Some(Event::Failed { kind, message }) => self.fail(Failure { kind, message }),
            None => self.fail(Failure::worker_ended()),
        }
        self.chunk(pieces)
    }

    fn fail(&mut self, failure: Failure) {
        self.log.lock().failure = Some(failure);
        self.ended = true;
    }
}

impl Stream for TokenSource {
    type Item = InferenceChunk;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<InferenceChunk>> {
        let this = &mut *self;
        if let Some((fingerprint, prompt_usage)) = this.prompt.take() {
            let system_fingerprint = Some(fingerprint);
            return Poll::Ready(Some(InferenceChunk::Ready { system_fingerprint, prompt_usage }));
        }
        loop {
            if this.ended {
                return Poll::Ready(None);
            }
            if let Some(finish_reason) = this.finish.take() {
                this.ended = true;
                return Poll::Ready(Some(InferenceChunk::Finish { finish_reason }));
            }
            let event = match this.first.take() {
                Some(event) => Some(event),
                None => match this.generation.poll_event(cx) {
                    Poll::Ready(event) => event,
                    Poll::Pending => return Poll::Pending,
                },
            };
            if let Some(chunk) = this.take(event) {
                return Poll::Ready(Some(chunk));
            }
        }
    }
}

/// An API's chunk generator, kept to the calls that the request allows and told the real counts and
/// log probabilities. Of an output that was lost it hears no end.
struct Generator<G> {
    inner: G,
    log: SharedLog,
    tokenizer: Arc<Tokenizer>,
    /// Whether log probabilities are reported.
    logprobs: bool,
    /// Whether a stop text that ended the answer is a part of it.
    includes_stop: bool,
    /// Calls that may be given out; the parser swallows the markup of all of them.
    calls_left: u32,
    /// Whether the call being parsed is given out.
    in_call: bool,
    any_call: bool,
}

impl<G: ChunkGenerator<Chunk: Send>> ChunkGenerator for Generator<G> {
    type Chunk = G::Chunk;

    async fn generate(&mut self, mut chunk: OutputChunk) -> Vec<G::Chunk> {
        let mut before = Vec::new();
        if let OutputChunk::Finish { stop_sequence: Some(text), .. } = &chunk
            && self.includes_stop
        {
            let content = OutputChunk::Content { content: text.clone(), logprobs: None };
            before = self.inner.generate(content).await;
        }
        match &mut chunk {
            OutputChunk::Content { logprobs, .. } => *logprobs = self.report(logprobs.take()),
            OutputChunk::Reasoning { logprobs, .. } => {
                self.count_reasoning(logprobs.as_deref());
                *logprobs = self.report(logprobs.take());
            }
            OutputChunk::ToolCallBegin => {
                self.in_call = self.calls_left > 0;
                self.calls_left = self.calls_left.saturating_sub(1);
            }
            OutputChunk::ToolCallNamed { .. } => self.any_call |= self.in_call,
            OutputChunk::Finish { finish_reason, completion_usage, .. } => {
                use deepseek_recipe::stream::FinishReason;
                let mut log = self.log.lock();
                if log.failure.is_some() {
                    // The parser takes the end of a lost output for a normal one.
                    return Vec::new();
                }
                log.finished = true;
                completion_usage.completion_tokens = log.completion_tokens() as usize;
                completion_usage.reasoning_tokens = Some(log.reasoning_tokens as usize);
                if *finish_reason == FinishReason::ToolCalls && !self.any_call {
                    *finish_reason = FinishReason::Stop;
                }
            }
            _ => {}
        }
        let of_call = matches!(
            chunk,
            OutputChunk::ToolCallNamed { .. } | OutputChunk::ToolCallArgumentsDelta { .. }
        );
        if of_call && !self.in_call {
            return Vec::new();
        }
        before.extend(self.inner.generate(chunk).await);
        before
    }
}

impl<G> Generator<G> {
    fn count_reasoning(&self, carriers: Option<&[TokenLogprob]>) {
        let last = carriers.into_iter().flatten().rev();
        if let Some(number) = last.filter_map(|entry| carried(entry.logprob)).next() {
            let mut log = self.log.lock();
            log.reasoning_tokens =
                log.piece(number).map_or(log.reasoning_tokens, |piece| piece.tokens_so_far);
        }
    }

    /// Log probabilities of the pieces named by `carriers` that were not reported before.
    fn report(&self, carriers: Option<Arc<[TokenLogprob]>>) -> Option<Arc<[TokenLogprob]>> {
        let carriers = carriers?;
        let mut log = self.log.lock();
        let mut entries = Vec::new();
        for number in carriers.iter().filter_map(|entry| carried(entry.logprob)) {
            if number < log.unreported {
                continue;
            }
            if let Some(piece) = log.piece(number) {
                entries.extend(piece.sampled.iter().map(|sampled| self.entry(sampled)));
            }
            log.unreported = number + 1;
            log.forget_before(number);
        }
        self.logprobs.then(|| entries.into())
    }

    fn entry(&self, sampled: &Sampled) -> TokenLogprob {
        let describe = |id| {
            let bytes = self.tokenizer.token_bytes(id).unwrap_or_default();
            (token_text(bytes), bytes.to_vec())
        };
        let (token, bytes) = describe(sampled.token);
        let top_logprobs = sampled.top.iter().map(|&(id, logprob)| {
            let (token, bytes) = describe(id);
            TopLogprob { token, logprob: finite(logprob), bytes }
        });
        TokenLogprob {
            token,
            logprob: finite(sampled.logprob),
            bytes,
            top_logprobs: top_logprobs.collect(),
        }
    }
}

/// What an output is parsed with.
pub(super) struct ParseSetup<G> {
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) generator: G,
    pub(super) options: ParsingOptions,
    /// Tool calls that the client accepts.
    pub(super) max_calls: u32,
    /// Whether log probabilities are reported.
    pub(super) logprobs: bool,
    /// Whether a stop text that ended the answer is a part of it.
    pub(super) includes_stop: bool,
    pub(super) fingerprint: String,
    pub(super) prompt_tokens: u32,
}

/// An answer on its way, in chunks of an API. Dropping it cancels the request.
pub(super) struct Output<C> {
    chunks: Option<BoxStream<'static, Result<C, String>>>,
    log: SharedLog,
    prompt_tokens: u32,
}

impl<C: Send + 'static> Output<C> {
    /// Parses `generation`, whose first event may have been read already.
    pub(super) fn new<G: ChunkGenerator<Chunk = C>>(
        setup: ParseSetup<G>,
        generation: Answering,
        first: Option<Event>,
    ) -> Self {
        let log = SharedLog::default();
        let usage =
            PromptUsage { prompt_tokens: setup.prompt_tokens as usize, prompt_cache_hit_tokens: 0 };
        let source = TokenSource {
            generation,
            first,
            pieces: PieceStream::new(&setup.tokenizer, setup.logprobs),
            log: log.clone(),
            prompt: Some((setup.fingerprint, usage)),
            finish: None,
            ended: false,
        };
        let generator = Generator {
            inner: setup.generator,
            log: log.clone(),
            tokenizer: setup.tokenizer,
            logprobs: setup.logprobs,
            includes_stop: setup.includes_stop,
            calls_left: setup.max_calls,
            in_call: false,
            any_call: false,
        };
        let processor = StreamProcessor::new(generator, setup.options).with_tokenizer(log.clone());
        let chunks = processor
            .into_protocol_stream(source)
            .map(|chunk| chunk.map_err(|error| error.to_string()));
        Self { chunks: Some(chunks.boxed()), log, prompt_tokens: setup.prompt_tokens }
    }

    /// The next chunk; `None` after the last one of a complete answer, and after a failure.
    /// Cancel-safe.
    pub(super) async fn next(&mut self) -> Option<Result<C, Failure>> {
        poll_fn(|cx| self.poll_item(cx)).await
    }

    /// Whether the engine gave a token.
    pub(super) fn has_tokens(&self) -> bool {
        self.log.lock().tokens > 0
    }

    /// Token counts, and how many of the generated tokens were reasoning. An output that a stop
    /// text ended has no counts from the engine: its tokens were counted here.
    pub(super) fn usage(&self) -> (Usage, u32) {
        let log = self.log.lock();
        let usage = log.usage.unwrap_or(Usage {
            prompt_tokens: self.prompt_tokens,
            completion_tokens: log.completion_tokens(),
            ..Usage::default()
        });
        (usage, log.reasoning_tokens)
    }
}

impl<C: Send + 'static> Part for Output<C> {
    type Item = Result<C, Failure>;

    fn poll_item(&mut self, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(chunks) = &mut self.chunks else { return Poll::Ready(None) };
        let failure = match chunks.poll_next_unpin(cx) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Some(Ok(chunk))) => return Poll::Ready(Some(Ok(chunk))),
            Poll::Ready(Some(Err(message))) => Some(Failure::internal(message)),
            Poll::Ready(None) => self.log.lock().lost(),
        };
        self.chunks = None;
        Poll::Ready(failure.map(Err))
    }
}

/// A log probability that JSON can hold; OpenAI writes -9999 for impossible tokens.
pub(super) fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { -9999.0 }
}
