//! Which tokens may be chosen.

/// A set of tokens of a vocabulary, one bit each: bit `id % 32` of word `id / 32`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenMask {
    words: Vec<u32>,
    vocab: usize,
}

impl TokenMask {
    /// Tokens per word.
    pub const WORD_BITS: usize = 32;

    /// No token of `vocab`.
    #[must_use]
    pub fn none(vocab: usize) -> Self {
        Self { words: vec![0; vocab.div_ceil(Self::WORD_BITS)], vocab }
    }

    /// All tokens of `vocab`.
    #[must_use]
    pub fn all(vocab: usize) -> Self {
        let words = vec![u32::MAX; vocab.div_ceil(Self::WORD_BITS)];
        Self::from_words(words, vocab)
    }

    /// A set whose bits are there already. Bits beyond the vocabulary are left out; words that are
    /// missing hold no token.
    #[must_use]
    pub fn from_words(mut words: Vec<u32>, vocab: usize) -> Self {
        words.resize(vocab.div_ceil(Self::WORD_BITS), 0);
        let beyond = words.len() * Self::WORD_BITS - vocab;
        if let Some(last) = words.last_mut() {
            *last &= u32::MAX >> beyond;
        }
        Self { words, vocab }
    }

    /// Tokens of the vocabulary.
    #[must_use]
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// The bits, lowest token first.
    #[must_use]
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Adds a token; one beyond the vocabulary is in no set.
    pub fn allow(&mut self, token: u32) {
        if (token as usize) < self.vocab {
            self.words[token as usize / Self::WORD_BITS] |= 1 << (token % 32);
        }
    }

    /// Takes a token out.
    pub fn forbid(&mut self, token: u32) {
        if let Some(word) = self.words.get_mut(token as usize / Self::WORD_BITS) {
            *word &= !(1 << (token % 32));
        }
    }

    /// Whether a token is in the set.
    #[must_use]
    pub fn allows(&self, token: u32) -> bool {
        let word = self.words.get(token as usize / Self::WORD_BITS);
        word.is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// Whether no token is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }
}
