//! Text from ids that arrive one by one.

use super::{TextError, Tokenizer};

/// Longest UTF-8 sequence.
const MAX_CHAR_BYTES: usize = 4;

/// Decodes ids as they come. A character whose bytes are spread over tokens is held back until it
/// is complete, so every piece is whole characters, and all pieces together are what
/// [`Tokenizer::decode`] makes of all ids.
///
/// # Example
/// ```no_run
/// use std::path::Path;
/// use dsv4_model::text::Tokenizer;
///
/// let tokenizer = Tokenizer::from_dir(Path::new("models/dsv4-mini/checkpoint"))?;
/// let mut stream = tokenizer.decode_stream();
/// let mut text = String::new();
/// for id in tokenizer.encode_plain("naïve")? {
///     text += &stream.push(id)?;
/// }
/// text += &stream.finish();
/// assert_eq!(text, "naïve");
/// # Ok::<(), dsv4_model::text::TextError>(())
/// ```
#[derive(Clone, Debug)]
pub struct DecodeStream<'a> {
    tokenizer: &'a Tokenizer,
    utf8: Utf8Stream,
}

impl<'a> DecodeStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, utf8: Utf8Stream::default() }
    }

    /// The characters that `id` completes, none if it ends inside one.
    ///
    /// # Errors
    /// [`TextError::UnknownToken`]; the stream is as before then.
    pub fn push(&mut self, id: u32) -> Result<String, TextError> {
        let mut text = String::new();
        self.push_into(id, &mut text)?;
        Ok(text)
    }

    /// As [`DecodeStream::push`], appended to `text`.
    ///
    /// # Errors
    /// [`TextError::UnknownToken`]; stream and text are as before then.
    pub fn push_into(&mut self, id: u32, text: &mut String) -> Result<(), TextError> {
        let bytes = self.tokenizer.token_bytes(id)?;
        self.utf8.push(bytes, text);
        Ok(())
    }

    /// Whether bytes of an incomplete character are held back.
    #[must_use]
    pub fn is_holding(&self) -> bool {
        self.utf8.held > 0
    }

    /// Ends the stream: an incomplete character becomes one U+FFFD, else there is nothing left.
    /// The stream can be used again.
    pub fn finish(&mut self) -> String {
        let mut text = String::new();
        self.utf8.finish(&mut text);
        text
    }
}

/// Incremental, lossy UTF-8: replaces what `String::from_utf8_lossy` of the whole replaces.
#[derive(Clone, Debug, Default)]
struct Utf8Stream {
    /// Start of an incomplete sequence.
    tail: [u8; MAX_CHAR_BYTES],
    held: usize,
}

impl Utf8Stream {
    fn push(&mut self, bytes: &[u8], text: &mut String) {
        let mut input;
        let mut rest = bytes;
        if self.held > 0 {
            input = self.tail[..self.held].to_vec();
            input.extend_from_slice(bytes);
            rest = &input;
            self.held = 0;
        }
        while !rest.is_empty() {
            let error = match std::str::from_utf8(rest) {
                Ok(valid) => return text.push_str(valid),
                Err(error) => error,
            };
            let (valid, after) = rest.split_at(error.valid_up_to());
            text.push_str(std::str::from_utf8(valid).expect("checked up to here"));
            let Some(invalid) = error.error_len() else {
                // At most three bytes: a longer prefix would be a whole or an invalid sequence.
                self.tail[..after.len()].copy_from_slice(after);
                self.held = after.len();
                return;
            };
            text.push(char::REPLACEMENT_CHARACTER);
            rest = &after[invalid..];
        }
    }

    fn finish(&mut self, text: &mut String) {
        if self.held > 0 {
            text.push(char::REPLACEMENT_CHARACTER);
            self.held = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every way to cut the bytes in three gives what the standard library makes of the whole.
    #[test]
    fn any_split_equals_lossy_decoding_of_the_whole() {
        let cases: [&[u8]; 9] = [
            "naïve 中文 🦀é".as_bytes(),
            b"\xf0\x9f\xa6",
            b"\xf0\x9f\xa6a\x80\x80b",
            b"\xff\xfe\xc0\xafok",
            b"\xe4\xb8\xe4\xb8\xad",
            b"\xed\xa0\x80\xf4\x90\x80\x80",
            b"\xc3",
            b"\xc3\xc3\xa9",
            b"",
        ];
        for bytes in cases {
            let want = String::from_utf8_lossy(bytes);
            for a in 0..=bytes.len() {
                for b in a..=bytes.len() {
                    let (mut stream, mut text) = (Utf8Stream::default(), String::new());
                    for part in [&bytes[..a], &bytes[a..b], &bytes[b..]] {
                        stream.push(part, &mut text);
                    }
                    stream.finish(&mut text);
                    assert_eq!(text, want, "{bytes:x?} cut at {a} and {b}");
                }
            }
        }
    }
}
