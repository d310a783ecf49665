//! Compiling grammars, off the threads that serve: bounded in number, time and size.

use super::live::MaskPool;
use super::{Constraint, GrammarError, MAX_GRAMMAR_BYTES, Source};
use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use dsv4_model::sample::TokenMask;
use dsv4_model::text::Tokenizer;
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory, panic_utils};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Bounds of compilation.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Longest wait for a compiled grammar.
    pub compile: Duration,
    /// Most grammars that wait to be compiled.
    pub waiting: usize,
    /// Compiled grammars that are kept for later requests.
    pub kept: usize,
    /// Threads that compile.
    pub threads: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { compile: Duration::from_secs(10), waiting: 64, kept: 64, threads: 2 }
    }
}

/// Symbols that a compiled grammar may have; a few megabytes.
const MAX_SYMBOLS: usize = 300_000;
/// States of the lexer of one output, at one to two kilobytes each.
const MAX_LEXER_STATES: usize = 20_000;
/// The parsers go down by recursion; their inputs' depth is bounded as well.
const STACK_BYTES: usize = 32 << 20;
/// Longest message of the compiler that is passed on, characters.
const MAX_MESSAGE: usize = 400;

/// A compiled grammar, at its beginning.
pub struct Grammar {
    pub(super) matcher: Mutex<Matcher>,
    /// Tokens that an output may begin with.
    pub(super) first: Arc<TokenMask>,
    /// Tokens of an output that has not come to the grammar yet: all but the end.
    pub(super) free: Arc<TokenMask>,
    pub(super) pool: Arc<MaskPool>,
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Grammar")
    }
}

/// What is done with a compiled grammar, on a thread that compiles.
type Done = Box<dyn FnOnce(Result<Constraint, GrammarError>) + Send>;

struct Job {
    source: Arc<Source>,
    done: Done,
}

/// Compiles grammars for one vocabulary, and keeps those that were used last.
#[derive(Clone)]
pub struct Grammars {
    jobs: Sender<Job>,
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammars").field("limits", &self.inner.limits).finish_non_exhaustive()
    }
}

struct Inner {
    tokenizer: Arc<Tokenizer>,
    vocab: usize,
    eos: u32,
    limits: Limits,
    /// The vocabulary as a tree of bytes; made when it is first needed.
    factory: OnceLock<Result<ParserFactory, String>>,
    pool: Arc<MaskPool>,
    free: Arc<TokenMask>,
    kept: Mutex<Kept>,
}

/// The grammars that were used last.
#[derive(Default)]
struct Kept {
    of: HashMap<String, (u64, Arc<Grammar>)>,
    /// When each was used, oldest first.
    order: BTreeMap<u64, String>,
    now: u64,
}

impl Kept {
    fn get(&mut self, text: &str) -> Option<Arc<Grammar>> {
        let (used, grammar) = self.of.get_mut(text)?;
        let key = self.order.remove(used)?;
        self.now += 1;
        *used = self.now;
        self.order.insert(self.now, key);
        Some(Arc::clone(grammar))
    }

    fn put(&mut self, text: &str, grammar: &Arc<Grammar>, most: usize) {
        if self.get(text).is_some() {
            return;
        }
        self.now += 1;
        self.of.insert(text.to_owned(), (self.now, Arc::clone(grammar)));
        self.order.insert(self.now, text.to_owned());
        while self.of.len() > most
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.of.remove(&oldest);
        }
    }
}

impl Grammars {
    /// For the vocabulary of `tokenizer`, in a model with `vocab` rows whose outputs end with `eos`.
    ///
    /// # Errors
    /// If threads cannot be started.
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        vocab: usize,
        eos: u32,
        limits: Limits,
    ) -> std::io::Result<Self> {
        let (jobs, queue) = bounded(limits.waiting.max(1));
        let mut free = TokenMask::all(vocab);
        free.forbid(eos);
        let inner = Arc::new(Inner {
            tokenizer,
            vocab,
            eos,
            limits,
            factory: OnceLock::new(),
            pool: Arc::new(MaskPool::new()?),
            free: Arc::new(free),
            kept: Mutex::default(),
        });
        for number in 0..limits.threads.max(1) {
            let (inner, queue) = (Arc::clone(&inner), queue.clone());
            std::thread::Builder::new()
                .name(format!("grammar-{number}"))
                .stack_size(STACK_BYTES)
                .spawn(move || inner.work(&queue))?;
        }
        Ok(Self { jobs, inner })
    }

    /// Makes the tree of the vocabulary ready before the first request needs it; how long that took.
    ///
    /// # Errors
    /// [`GrammarError::Invalid`] for a vocabulary that no tree can be made of.
    pub fn warm(&self) -> Result<Duration, GrammarError> {
        let start = Instant::now();
        self.inner.factory()?;
        Ok(start.elapsed())
    }

    /// Bounds of compilation.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.inner.limits
    }

    /// Compiles a grammar on another thread and calls `done` there; at once, on this one, if it is
    /// known already or cannot be taken.
    pub fn compile_then(
        &self,
        source: Arc<Source>,
        done: impl FnOnce(Result<Constraint, GrammarError>) + Send + 'static,
    ) {
        if source.grammar.len() > MAX_GRAMMAR_BYTES {
            let bytes = source.grammar.len();
            let text = format!("the grammar has {bytes} bytes, and may have {MAX_GRAMMAR_BYTES}");
            return done(Err(GrammarError::Invalid(text)));
        }
        if let Some(grammar) = self.inner.kept().get(&source.grammar) {
            return done(Ok(Constraint { source, grammar }));
        }
        let job = Job { source, done: Box::new(done) };
        let job = match self.jobs.try_send(job) {
            Ok(()) => return,
            Err(TrySendError::Full(job) | TrySendError::Disconnected(job)) => job,
        };
        (job.done)(Err(GrammarError::Busy { waiting: self.inner.limits.waiting }));
    }

    /// Compiles a grammar on another thread and waits for it, for at most [`Limits::compile`].
    ///
    /// # Errors
    /// [`GrammarError`].
    pub async fn compile(&self, source: Arc<Source>) -> Result<Constraint, GrammarError> {
        let (done, compiled) = tokio::sync::oneshot::channel();
        self.compile_then(source, move |result| {
            // Who asked may have gone.
            let _ = done.send(result);
        });
        let limit = self.inner.limits.compile;
        match tokio::time::timeout(limit, compiled).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(GrammarError::Stuck("its compiler has ended".to_owned())),
            Err(_) => Err(GrammarError::Slow { seconds: limit.as_secs() }),
        }
    }
}

impl Inner {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        // What it holds is right at any time: at worst a grammar is compiled again.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Compiles what comes until nobody can ask any more.
    fn work(&self, queue: &Receiver<Job>) {
        for Job { source, done } in queue {
            let known = self.kept().get(&source.grammar);
            let grammar = match known {
                Some(grammar) => Ok(grammar),
                None => self.compile(&source.grammar).map(Arc::new),
            };
            if let Ok(grammar) = &grammar {
                self.kept().put(&source.grammar, grammar, self.limits.kept);
            }
            done(grammar.map(|grammar| Constraint { source, grammar }));
        }
    }

    fn factory(&self) -> Result<&ParserFactory, GrammarError> {
        let made = self.factory.get_or_init(|| {
            let made = panic_utils::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let env = vocabulary(&self.tokenizer, self.vocab, self.eos);
                let mut factory = ParserFactory::new(
                    &env,
                    InferenceCapabilities::default(),
                    &llguidance::earley::SlicedBiasComputer::general_slices(),
                )?;
                factory.quiet();
                *factory.limits_mut() = ParserLimits {
                    max_grammar_size: MAX_SYMBOLS,
                    max_lexer_states: MAX_LEXER_STATES,
                    verbose_errors: false,
                    ..ParserLimits::default()
                };
                Ok(factory)
            }));
            made.map_err(|error| shortened(&error.to_string()))
        });
        made.as_ref().map_err(|error| GrammarError::Invalid(error.clone()))
    }

    fn compile(&self, text: &str) -> Result<Grammar, GrammarError> {
        let factory = self.factory()?;
        let compiled = panic_utils::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let grammar = TopLevelGrammar::from_lark(text.to_owned());
            let mut matcher = Matcher::new(factory.create_parser(grammar));
            let mask = matcher.compute_mask()?;
            Ok((matcher, mask))
        }));
        let (matcher, mask) =
            compiled.map_err(|error| GrammarError::Invalid(shortened(&error.to_string())))?;
        let first = Arc::new(TokenMask::from_words(mask.as_slice().to_vec(), self.vocab));
        let (free, pool) = (Arc::clone(&self.free), Arc::clone(&self.pool));
        Ok(Grammar { matcher: Mutex::new(matcher), first, free, pool })
    }
}

/// The first line of what the compiler says, as far as it helps.
pub(super) fn shortened(message: &str) -> String {
    if message.starts_with("panic") {
        return "it is beyond what can be compiled".to_owned();
    }
    message.lines().next().unwrap_or_default().chars().take(MAX_MESSAGE).collect()
}

/// The vocabulary as the compiler knows it: bytes of ordinary tokens; tokens of the added
/// vocabulary, which no text may become, can be named by their number alone.
fn vocabulary(tokenizer: &Tokenizer, vocab: usize, eos: u32) -> TokEnv {
    let added = tokenizer.inner().get_added_vocabulary().get_added_tokens_decoder();
    let word = |id: u32| -> Vec<u8> {
        if added.contains_key(&id) || id == eos {
            return [&[TokTrie::SPECIAL_TOKEN_MARKER], format!("<token-{id}>").as_bytes()].concat();
        }
        let bytes = tokenizer.token_bytes(id).unwrap_or_default();
        // No text has the byte of the marker, and a row without a token has no text at all.
        if bytes.contains(&TokTrie::SPECIAL_TOKEN_MARKER) { Vec::new() } else { bytes.to_vec() }
    };
    let words: Vec<Vec<u8>> = (0..vocab as u32).map(word).collect();
    let trie = TokTrie::from(&TokRxInfo::new(vocab as u32, eos), &words);
    // Not canonical: the model chooses how it spells what the grammar forces.
    Arc::new(ApproximateTokEnv::new(trie))
}
