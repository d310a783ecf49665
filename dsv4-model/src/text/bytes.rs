//! The bytes of every token of a byte-level vocabulary.
//!
//! Byte-level BPE spells each byte as one printable character: bytes that print as themselves in
//! Latin-1, and U+0100 onwards for the others in order (the GPT-2 mapping). A token with any other
//! character, such as a marker, stands for its own UTF-8 bytes.

use std::collections::HashMap;

use super::TextError;

#[derive(Debug)]
pub(super) struct TokenBytes {
    bytes: Vec<u8>,
    /// Where each id's bytes are; none for ids without a token.
    spans: Vec<Option<(u32, u32)>>,
}

impl TokenBytes {
    pub(super) fn new(vocab: &HashMap<String, u32>, max_id: u32) -> Result<Self, TextError> {
        let mut tokens: Vec<(u32, &str)> = vocab.iter().map(|(s, &id)| (id, s.as_str())).collect();
        tokens.sort_unstable();
        let largest = tokens.last().map_or(0, |&(id, _)| id);
        if largest > max_id {
            return Err(TextError::Id { id: largest, limit: max_id });
        }
        let mut table = Self { bytes: Vec::new(), spans: vec![None; largest as usize + 1] };
        let byte_of = byte_characters();
        for (id, spelling) in tokens {
            let from = table.bytes.len();
            let decoded: Option<Vec<u8>> =
                spelling.chars().map(|c| byte_of.get(&c).copied()).collect();
            match decoded {
                Some(decoded) => table.bytes.extend(decoded),
                None => table.bytes.extend(spelling.as_bytes()),
            }
            // The file's size limit keeps the sum of spellings far below 32 bits.
            table.spans[id as usize] = Some((from as u32, table.bytes.len() as u32));
        }
        Ok(table)
    }

    pub(super) fn get(&self, id: u32) -> Option<&[u8]> {
        let (from, to) = (*self.spans.get(id as usize)?)?;
        self.bytes.get(from as usize..to as usize)
    }

    pub(super) fn len(&self) -> usize {
        self.spans.len()
    }
}

fn byte_characters() -> HashMap<char, u8> {
    let mut shifted = 0x100;
    (0..=u8::MAX)
        .map(|byte| {
            if matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) {
                return (char::from(byte), byte);
            }
            let c = char::from_u32(shifted).expect("at most U+0143");
            shifted += 1;
            (c, byte)
        })
        .collect()
}
