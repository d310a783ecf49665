//! Text to token ids and back.

mod bytes;
mod stream;

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use tokenizers::{AddedVocabulary, DecoderWrapper};

use bytes::TokenBytes;
pub use stream::DecodeStream;

/// Largest `tokenizer.json` that is read, in bytes; the official one has 7 MB.
const MAX_TOKENIZER_BYTES: u64 = 64 << 20;

/// Largest token id; it bounds the table of token bytes.
const MAX_ID: u32 = 1 << 22;

/// A tokenizer that cannot be loaded, or text or ids it cannot convert.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The checkpoint has no tokenizer.
    #[error(
        "no tokenizer.json in {}: it comes with the checkpoint, as in `hf download \
         deepseek-ai/DeepSeek-V4-Flash --local-dir DIR`",
        dir.display()
    )]
    NotFound {
        /// Directory looked into.
        dir: PathBuf,
    },
    /// The file cannot be read.
    #[error("read {}: {source}", path.display())]
    Read {
        /// File.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is larger than any tokenizer.
    #[error("tokenizer of more than {limit} bytes")]
    TooLarge {
        /// Limit in bytes.
        limit: u64,
    },
    /// The file is no tokenizer.
    #[error("tokenizer.json: {0}")]
    Malformed(tokenizers::Error),
    /// A tokenizer that is not a byte-level one.
    #[error("tokenizer has the decoder {found}, supported: ByteLevel")]
    Decoder {
        /// What it has.
        found: String,
    },
    /// An id too large for any vocabulary.
    #[error("tokenizer has a token with id {id}, the limit is {limit}")]
    Id {
        /// The id.
        id: u32,
        /// Largest that is accepted.
        limit: u32,
    },
    /// More tokens than the model has rows for.
    #[error("tokenizer has {tokenizer} tokens, the model's vocabulary has {model}")]
    Vocabulary {
        /// Largest id plus one.
        tokenizer: usize,
        /// The model's size.
        model: usize,
    },
    /// Text that cannot be encoded.
    #[error("encode text of {bytes} bytes: {source}")]
    Encode {
        /// Its length.
        bytes: usize,
        /// Why.
        source: tokenizers::Error,
    },
    /// An id that stands for nothing.
    #[error("token {id} is not in the tokenizer's vocabulary of {vocab}")]
    UnknownToken {
        /// The id.
        id: u32,
        /// Largest id plus one.
        vocab: usize,
    },
}

/// A byte-level BPE tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    full: tokenizers::Tokenizer,
    /// The same without added vocabulary: no text becomes a marker token.
    plain: tokenizers::Tokenizer,
    bytes: TokenBytes,
    digest: [u8; 32],
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a checkpoint directory.
    ///
    /// # Errors
    /// [`TextError`] for a file that is absent, unreadable or not a byte-level tokenizer.
    pub fn from_dir(dir: &Path) -> Result<Self, TextError> {
        let path = dir.join("tokenizer.json");
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Err(TextError::NotFound { dir: dir.to_owned() });
            }
            Err(source) => return Err(TextError::Read { path, source }),
        };
        let mut json = Vec::new();
        if let Err(source) = file.take(MAX_TOKENIZER_BYTES + 1).read_to_end(&mut json) {
            return Err(TextError::Read { path, source });
        }
        Self::from_bytes(&json)
    }

    /// Parses the bytes of a `tokenizer.json`.
    ///
    /// # Errors
    /// [`TextError`] if they are not a byte-level tokenizer.
    pub fn from_bytes(json: &[u8]) -> Result<Self, TextError> {
        if json.len() as u64 > MAX_TOKENIZER_BYTES {
            return Err(TextError::TooLarge { limit: MAX_TOKENIZER_BYTES });
        }
        let mut full = tokenizers::Tokenizer::from_bytes(json).map_err(TextError::Malformed)?;
        match full.get_decoder() {
            Some(DecoderWrapper::ByteLevel(_)) => {}
            other => {
                let found = format!("{other:?}").chars().take(80).collect();
                return Err(TextError::Decoder { found });
            }
        }
        // A limit or padding in the file would cut or lengthen prompts silently.
        full.with_padding(None);
        full.with_truncation(None).map_err(TextError::Malformed)?;
        let mut plain = full.clone();
        plain.with_added_vocabulary(AddedVocabulary::new());
        let bytes = TokenBytes::new(&full.get_vocab(true), MAX_ID)?;
        Ok(Self { full, plain, bytes, digest: *blake3::hash(json).as_bytes() })
    }

    /// Encodes text from users: no part of it becomes a marker or special token, whatever it
    /// spells, so it cannot pretend to be another role.
    ///
    /// # Errors
    /// [`TextError::Encode`].
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TextError> {
        encode(&self.plain, text)
    }

    /// Encodes rendered prompts: markers and special tokens that are spelled out become their ids.
    /// Nothing is added at the start or end.
    ///
    /// # Errors
    /// [`TextError::Encode`].
    pub fn encode_with_special(&self, text: &str) -> Result<Vec<u32>, TextError> {
        encode(&self.full, text)
    }

    /// The text of `ids`, special tokens spelled out, bytes that are not UTF-8 replaced by U+FFFD.
    ///
    /// # Errors
    /// [`TextError::UnknownToken`].
    pub fn decode(&self, ids: &[u32]) -> Result<String, TextError> {
        let mut stream = self.decode_stream();
        let mut text = String::new();
        for &id in ids {
            stream.push_into(id, &mut text)?;
        }
        text += &stream.finish();
        Ok(text)
    }

    /// Starts decoding ids one by one.
    #[must_use]
    pub fn decode_stream(&self) -> DecodeStream<'_> {
        DecodeStream::new(self)
    }

    /// The bytes a token stands for, which may end inside a character.
    ///
    /// # Errors
    /// [`TextError::UnknownToken`].
    pub fn token_bytes(&self, id: u32) -> Result<&[u8], TextError> {
        let unknown = TextError::UnknownToken { id, vocab: self.vocab_size() };
        self.bytes.get(id).ok_or(unknown)
    }

    /// The id of a token by its spelling, such as a marker.
    #[must_use]
    pub fn token_id(&self, spelling: &str) -> Option<u32> {
        self.full.token_to_id(spelling)
    }

    /// Largest id plus one, added tokens included.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.bytes.len()
    }

    /// Checks that a model with `vocab` rows has one for every token. Models may have more.
    ///
    /// # Errors
    /// [`TextError::Vocabulary`].
    pub fn check_fits(&self, vocab: usize) -> Result<(), TextError> {
        let tokenizer = self.vocab_size();
        if tokenizer > vocab {
            return Err(TextError::Vocabulary { tokenizer, model: vocab });
        }
        Ok(())
    }

    /// BLAKE3 of the `tokenizer.json`.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        self.digest
    }

    /// The tokenizer as the `tokenizers` crate knows it.
    #[must_use]
    pub fn inner(&self) -> &tokenizers::Tokenizer {
        &self.full
    }
}

fn encode(tokenizer: &tokenizers::Tokenizer, text: &str) -> Result<Vec<u32>, TextError> {
    let encoded = tokenizer
        .encode_fast(text, false)
        .map_err(|source| TextError::Encode { bytes: text.len(), source })?;
    Ok(encoded.get_ids().to_vec())
}
