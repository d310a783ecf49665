//! From sampled tokens to pieces of text that no reader has to glue together.

use dsv4_model::sample::Sampled;
use dsv4_model::text::Tokenizer;
use std::sync::Arc;

/// Text of one or more tokens: whole characters, never part of one.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Piece {
    /// The text, not empty.
    pub(super) text: String,
    /// Whether this is one token of the added vocabulary (`</think>`, `｜DSML｜`, ...), as against
    /// ordinary tokens that may spell the same.
    pub(super) special: bool,
    /// Tokens of the output up to and including this piece.
    pub(super) tokens_so_far: u32,
    /// The tokens of this piece, if their log probabilities are wanted.
    pub(super) sampled: Vec<Sampled>,
}

/// Cuts a token stream into [`Piece`]s. Tokens flagged as special in the tokenizer (begin and end
/// of sequence, padding) have no text.
#[derive(Debug)]
pub(super) struct PieceStream {
    tokenizer: Arc<Tokenizer>,
    characters: Characters,
    keep_sampled: bool,
    tokens: u32,
    /// Tokens since the last piece.
    held: Vec<Sampled>,
}

impl PieceStream {
    pub(super) fn new(tokenizer: &Arc<Tokenizer>, keep_sampled: bool) -> Self {
        Self {
            tokenizer: Arc::clone(tokenizer),
            characters: Characters::default(),
            keep_sampled,
            tokens: 0,
            held: Vec::new(),
        }
    }

    /// Tokens so far.
    pub(super) fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Adds a token; what became readable goes to `pieces`.
    pub(super) fn push(&mut self, sampled: Sampled, pieces: &mut Vec<Piece>) {
        let id = sampled.token;
        let added = self.tokenizer.inner().get_added_vocabulary().get_added_tokens_decoder();
        let Some(token) = added.get(&id) else {
            // A model may have more rows than its tokenizer has tokens; those have no text.
            let text = self.characters.push(self.tokenizer.token_bytes(id).unwrap_or_default());
            self.count(sampled);
            self.emit(text, false, pieces);
            return;
        };
        let text = if token.special { String::new() } else { token.content.clone() };
        self.finish(pieces);
        self.count(sampled);
        self.emit(text, true, pieces);
    }

    /// Ends the stream: an unfinished character becomes U+FFFD.
    pub(super) fn finish(&mut self, pieces: &mut Vec<Piece>) {
        let rest = self.characters.finish();
        self.emit(rest, false, pieces);
    }

    fn count(&mut self, sampled: Sampled) {
        self.tokens = self.tokens.saturating_add(1);
        if self.keep_sampled {
            self.held.push(sampled);
        }
    }

    fn emit(&mut self, text: String, special: bool, pieces: &mut Vec<Piece>) {
        if text.is_empty() {
            return;
        }
        let sampled = std::mem::take(&mut self.held);
        pieces.push(Piece { text, special, tokens_so_far: self.tokens, sampled });
    }
}

/// Puts bytes together to characters.
#[derive(Debug, Default)]
struct Characters {
    /// Up to three bytes that begin a character.
    pending: Vec<u8>,
}

impl Characters {
    /// The characters that `bytes` complete; what can no longer become one is U+FFFD.
    fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let bytes = std::mem::take(&mut self.pending);
        let mut text = String::with_capacity(bytes.len());
        let mut chunks = bytes.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            text.push_str(chunk.valid());
            let broken = chunk.invalid();
            let last = chunks.peek().is_none();
            if last && std::str::from_utf8(broken).is_err_and(|error| error.error_len().is_none()) {
                self.pending.extend_from_slice(broken);
            } else if !broken.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        text
    }

    /// U+FFFD if a character was begun and not completed.
    fn finish(&mut self) -> String {
        if self.pending.is_empty() {
            return String::new();
        }
        self.pending.clear();
        char::REPLACEMENT_CHARACTER.to_string()
    }
}

/// A token as OpenAI reports it: its text, or `bytes:\xNN...` if it is not whole characters.
pub(super) fn token_text(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => {
            use std::fmt::Write as _;
            let mut text = String::from("bytes:");
            for byte in bytes {
                // Writing to a string cannot fail.
                let _ = write!(text, "\\x{byte:02x}");
            }
            text
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_are_whole_for_every_cut() {
        let text = "aé€🤭z\u{FFFD}é".as_bytes();
        let mut damaged = text.to_vec();
        damaged.extend([0xff, b'b', 0xe2, 0x82, b'c', 0xf0, 0x9f]);
        let expected = String::from_utf8_lossy(&damaged);
        for first in 0..=damaged.len() {
            for second in first..=damaged.len() {
                let mut characters = Characters::default();
                let mut out = characters.push(&damaged[..first]);
                out += &characters.push(&damaged[first..second]);
                out += &characters.push(&damaged[second..]);
                assert!(characters.pending.len() <= 3);
                out += &characters.finish();
                assert_eq!(out, expected, "cut at {first} and {second}");
            }
        }
    }

    #[test]
    fn broken_characters_are_reported_as_bytes() {
        assert_eq!(token_text(b" hi"), " hi");
        assert_eq!(token_text(&[0xe4, 0xbd]), "bytes:\\xe4\\xbd");
    }
}
