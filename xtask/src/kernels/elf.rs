//! Reads a constant out of a cubin, which is an ELF file.

use anyhow::{Context as _, Result};

fn number(bytes: &[u8], at: u64, count: usize) -> Result<u64> {
    let at = usize::try_from(at).context("an offset beyond this machine")?;
    let end = at.checked_add(count).context("an offset beyond the cubin")?;
    let field = bytes.get(at..end).context("the cubin is cut off")?;
    Ok(field.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
}

/// A section header.
struct Section {
    kind: u64,
    offset: u64,
    len: u64,
    link: u64,
}

fn section(bytes: &[u8], index: u64) -> Result<Section> {
    let table = number(bytes, 0x28, 8)?;
    let entry = number(bytes, 0x3a, 2)?;
    let at = table + index * entry;
    Ok(Section {
        kind: number(bytes, at + 4, 4)?,
        offset: number(bytes, at + 0x18, 8)?,
        len: number(bytes, at + 0x20, 8)?,
        link: number(bytes, at + 0x28, 4)?,
    })
}

/// The 32-bit constant called `name`, if the file has it.
pub(super) fn word(bytes: &[u8], name: &str) -> Result<Option<u32>> {
    const SYMBOLS: u64 = 2;
    for index in 0..number(bytes, 0x3c, 2)? {
        let symbols = section(bytes, index)?;
        if symbols.kind != SYMBOLS {
            continue;
        }
        let strings = section(bytes, symbols.link)?;
        for at in (symbols.offset..symbols.offset + symbols.len).step_by(24) {
            let from = strings.offset + number(bytes, at, 4)?;
            let from = usize::try_from(from).context("an offset beyond this machine")?;
            let text = bytes.get(from..).context("the cubin is cut off")?;
            if !text.starts_with(name.as_bytes()) || text.get(name.len()) != Some(&0) {
                continue;
            }
            let owner = section(bytes, number(bytes, at + 6, 2)?)?;
            let value = number(bytes, owner.offset + number(bytes, at + 8, 8)?, 4)?;
            return Ok(u32::try_from(value).ok());
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ELF file with one symbol `a_shared` whose value is at offset 8 of its section.
    fn file(value: u32) -> Vec<u8> {
        let mut bytes = vec![0; 0x200];
        let mut put = |at: usize, count: usize, value: u64| {
            bytes[at..at + count].copy_from_slice(&value.to_le_bytes()[..count]);
        };
        put(0x28, 8, 0x100); // section table
        put(0x3a, 2, 64);
        put(0x3c, 2, 3);
        put(0x100 + 0x18, 8, 0x80); // 0: data
        put(0x140 + 0x18, 8, 0xa0); // 1: strings
        put(0x180 + 4, 4, 2); // 2: symbols
        put(0x180 + 0x18, 8, 0xc0);
        put(0x180 + 0x20, 8, 24);
        put(0x180 + 0x28, 4, 1);
        put(0x88, 4, u64::from(value));
        put(0xc0, 4, 1); // name
        put(0xc0 + 8, 8, 8); // value
        bytes[0xa1..0xa9].copy_from_slice(b"a_shared");
        bytes
    }

    #[test]
    fn a_constant_is_found_by_its_whole_name() {
        let bytes = file(81_920);
        assert_eq!(word(&bytes, "a_shared").unwrap(), Some(81_920));
        assert_eq!(word(&bytes, "a_share").unwrap(), None);
        assert_eq!(word(&bytes, "b_shared").unwrap(), None);
    }

    #[test]
    fn a_file_that_is_cut_off_is_an_error() {
        assert!(word(&file(1)[..0x190], "a_shared").is_err());
        assert!(word(&[], "a_shared").is_err());
    }
}
