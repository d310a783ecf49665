//! A grammar that follows an output.

use super::GrammarError;
use super::compile::{Grammar, shortened};
use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use dsv4_model::sample::TokenMask;
use llguidance::Matcher;
use std::sync::{Arc, PoisonError};

/// What a token meant for the grammar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// More may follow.
    GoesOn,
    /// Nothing can follow: the output is complete.
    Complete,
}

/// Where an output stands.
struct Automaton {
    /// Token that the grammar begins after, until it has come.
    after: Option<u32>,
    matcher: Matcher,
    grammar: Arc<Grammar>,
    /// Tokens that may come next.
    mask: Arc<TokenMask>,
}

impl Automaton {
    /// The tokens that may come next, from the text so far.
    fn look_ahead(&mut self) -> Result<(), GrammarError> {
        let mask = self.matcher.compute_mask();
        let mask = mask.map_err(|error| GrammarError::Stuck(shortened(&error.to_string())))?;
        let words = mask.as_slice().to_vec();
        self.mask = Arc::new(TokenMask::from_words(words, self.mask.vocab()));
        Ok(())
    }
}

type Found = (Box<Automaton>, Result<(), GrammarError>);

enum State {
    Ready(Box<Automaton>),
    /// Another thread looks for the tokens that may come next.
    Looking(Receiver<Found>),
    Failed(GrammarError),
}

/// The grammar of one output.
pub struct Live(State);

impl std::fmt::Debug for Live {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = match &self.0 {
            State::Ready(_) => "ready",
            State::Looking(_) => "looking",
            State::Failed(_) => "failed",
        };
        f.debug_tuple("Live").field(&state).finish()
    }
}

impl Live {
    pub(super) fn new(grammar: &Arc<Grammar>, after: Option<u32>) -> Self {
        // Nothing of the compiled grammar is shared, so that no output has a part in the limits of
        // another's.
        let matcher = grammar.matcher.lock().unwrap_or_else(PoisonError::into_inner).deep_clone();
        let mask = if after.is_some() { &grammar.free } else { &grammar.first };
        let (mask, grammar) = (Arc::clone(mask), Arc::clone(grammar));
        Self(State::Ready(Box::new(Automaton { after, matcher, grammar, mask })))
    }

    /// Waits for the thread that looks ahead, if one does.
    fn ready(&mut self) -> Result<&mut Automaton, GrammarError> {
        if let State::Looking(found) = &self.0 {
            self.0 = match found.recv() {
                Ok((automaton, Ok(()))) => State::Ready(automaton),
                Ok((_, Err(error))) => State::Failed(error),
                Err(_) => State::Failed(GrammarError::Stuck("its thread has ended".to_owned())),
            };
        }
        match &mut self.0 {
            State::Ready(automaton) => Ok(automaton),
            State::Failed(error) => Err(error.clone()),
            State::Looking(_) => Err(GrammarError::Stuck("it was not waited for".to_owned())),
        }
    }

    /// Tokens that may come next; never none.
    ///
    /// # Errors
    /// [`GrammarError::Stuck`] if the grammar has become too complex, or no token fits.
    pub fn mask(&mut self) -> Result<&Arc<TokenMask>, GrammarError> {
        let automaton = self.ready()?;
        if automaton.mask.is_empty() {
            return Err(GrammarError::Stuck("no token of the vocabulary may follow".to_owned()));
        }
        Ok(&automaton.mask)
    }

    /// Takes the next token of the output, which is not one that ends it, and begins to look for
    /// those that may follow.
    ///
    /// # Errors
    /// [`GrammarError::NotAllowed`] for a token that the grammar does not allow; the state is as it
    /// was. [`GrammarError::Stuck`].
    pub fn accept(&mut self, token: u32) -> Result<Progress, GrammarError> {
        let automaton = self.ready()?;
        if !automaton.mask.allows(token) {
            return Err(GrammarError::NotAllowed(token));
        }
        if let Some(after) = automaton.after {
            if token == after {
                automaton.after = None;
                automaton.mask = Arc::clone(&automaton.grammar.first);
            }
            return Ok(Progress::GoesOn);
        }
        if let Err(error) = automaton.matcher.consume_token(token) {
            let error = GrammarError::Stuck(shortened(&error.to_string()));
            self.0 = State::Failed(error.clone());
            return Err(error);
        }
        if automaton.matcher.is_stopped() {
            return Ok(Progress::Complete);
        }
        let pool = Arc::clone(&automaton.grammar.pool);
        let failed = State::Failed(GrammarError::Stuck("it was being handed over".to_owned()));
        if let State::Ready(automaton) = std::mem::replace(&mut self.0, failed) {
            self.0 = State::Looking(pool.look_ahead(automaton));
        }
        Ok(Progress::GoesOn)
    }
}

struct Look {
    automaton: Box<Automaton>,
    found: Sender<Found>,
}

/// Threads that look ahead, while the model computes.
pub(super) struct MaskPool(Sender<Look>);

/// A step waits for all of its grammars, and a look ahead takes a small part of it.
const THREADS_MAX: usize = 4;

impl MaskPool {
    pub(super) fn new() -> std::io::Result<Self> {
        let (looks, queue) = unbounded::<Look>();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        for number in 0..cores.clamp(1, THREADS_MAX) {
            let queue = queue.clone();
            std::thread::Builder::new().name(format!("mask-{number}")).spawn(move || {
                for Look { mut automaton, found } in queue {
                    let result = automaton.look_ahead();
                    // The output may have ended meanwhile.
                    let _ = found.send((automaton, result));
                }
            })?;
        }
        Ok(Self(looks))
    }

    /// Each output looks ahead once at a time, so there are no more looks than outputs.
    fn look_ahead(&self, automaton: Box<Automaton>) -> Receiver<Found> {
        let (found, receiver) = bounded(1);
        // If the threads have ended, so has the other end of the receiver, and that is heard.
        drop(self.0.send(Look { automaton, found }));
        receiver
    }
}
