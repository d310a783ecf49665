//! Constrained decoding: which tokens may come next, so that an answer is what its request asked
//! for.
//!
//! A constraint is a grammar in the Lark dialect of `llguidance`, written by [`format`](mod@format)
//! and [`calls`] from a JSON schema, a regular expression or the schemas of strict tools, and
//! perhaps a token that it begins after (the end of the thinking). It is compiled on a thread of its
//! own, before the request is queued; requests of a step find the sets of their next tokens
//! computed, since that is done beside the step.
//!
//! The text of the grammar is all that a hand-off needs of it: a worker that has it computes the
//! same sets from the same tokens.

pub mod calls;
mod compile;
pub mod format;
mod live;
pub mod schema;

pub use compile::{Grammar, Grammars, Limits};
pub use live::{Live, Progress};

/// Longest text of a grammar, bytes.
pub const MAX_GRAMMAR_BYTES: usize = 512 << 10;

/// What an output must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Grammar in the Lark dialect of `llguidance`.
    pub grammar: String,
    /// Token that it begins after; the output is free until then, except that it cannot end.
    pub after: Option<u32>,
}

/// A grammar that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// It makes no sense, or asks for what cannot be guaranteed.
    #[error("{0}")]
    Invalid(String),
    /// It took too long to compile.
    #[error("it took more than {seconds} s to compile: it is too complex")]
    Slow {
        /// The limit, seconds.
        seconds: u64,
    },
    /// Too many others are being compiled.
    #[error("{waiting} grammars wait to be compiled already")]
    Busy {
        /// How many may.
        waiting: usize,
    },
    /// It became too complex while the output grew, or allows no token of the vocabulary.
    #[error("the grammar cannot be followed: {0}")]
    Stuck(String),
    /// A token that it does not allow.
    #[error("token {0} is not one that the grammar allows")]
    NotAllowed(u32),
}

/// A constraint that is ready for use.
#[derive(Clone, Debug)]
pub struct Constraint {
    /// As it was written.
    pub source: std::sync::Arc<Source>,
    /// As it was compiled.
    pub grammar: std::sync::Arc<Grammar>,
}

impl Constraint {
    /// The constraint at the beginning of an output.
    #[must_use]
    pub fn begin(&self) -> Live {
        Live::new(&self.grammar, self.source.after)
    }

    /// The constraint after a part of an output.
    ///
    /// # Errors
    /// [`GrammarError::NotAllowed`] for an output that it does not allow, or after which nothing can
    /// follow; [`GrammarError::Stuck`].
    pub fn resume(&self, output: &[u32]) -> Result<Live, GrammarError> {
        let mut live = self.begin();
        for &token in output {
            if live.accept(token)? == Progress::Complete {
                return Err(GrammarError::NotAllowed(token));
            }
        }
        live.mask()?;
        Ok(live)
    }
}
