//! What both sides say before the first frame: the UCX version, then worker address and regions.
//!
//! First a header of 24 bytes: magic, then major, minor and release of UCX and the length of the
//! rest, `u32` little-endian each. Sides whose major and minor differ stop here. Then the rest: a
//! 16-byte hash of what follows, the worker address with its length before it, the count of
//! regions, and per region base, bytes and key with its length before it.

use super::raw::RemoteRegion;
use super::sys::Version;
use crate::hash::hash128;
use crate::link::Side;
use crate::socket::other_greeting;
use crate::transport::LostReason;
use crate::wire::MAX_REGIONS;
use std::io::{Read, Write};

/// The name and the version of the greeting.
const MAGIC: &[u8; 8] = b"PDUCX\0\0\x01";
const HEADER_BYTES: usize = 24;
/// One more than a transport has.
const REGIONS_MAX: usize = MAX_REGIONS + 1;
/// Most bytes after the header.
const REST_BYTES_MAX: u32 = 1 << 20;
/// Zero bytes behind an address or key: UCX reads them without a length.
const MARGIN_BYTES: usize = 4096;

/// What a peer needs to read our regions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Card {
    pub(super) address: Vec<u8>,
    pub(super) regions: Vec<RemoteRegion>,
}

fn malformed(text: impl Into<String>) -> LostReason {
    LostReason::Malformed(text.into())
}

fn io(error: &std::io::Error) -> LostReason {
    match error.kind() {
        std::io::ErrorKind::UnexpectedEof => LostReason::Closed,
        _ => LostReason::Io(error.to_string()),
    }
}

fn put(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(&u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes());
    out.extend_from_slice(bytes);
}

/// A reader of our own format that never trusts a length.
struct Cursor<'a>(&'a [u8]);

impl Cursor<'_> {
    fn take(&mut self, bytes: usize) -> Result<&[u8], LostReason> {
        let (head, rest) =
            self.0.split_at_checked(bytes).ok_or_else(|| malformed("greeting is cut off"))?;
        self.0 = rest;
        Ok(head)
    }

    fn number32(&mut self) -> Result<u32, LostReason> {
        Ok(u32::from_le_bytes(self.take(4)?.try_into().expect("four bytes were taken")))
    }

    fn number64(&mut self) -> Result<u64, LostReason> {
        Ok(u64::from_le_bytes(self.take(8)?.try_into().expect("eight bytes were taken")))
    }

    /// Bytes that UCX will read, with zeros behind them.
    fn packed(&mut self) -> Result<Vec<u8>, LostReason> {
        let len = self.number32()? as usize;
        let mut bytes = self.take(len)?.to_vec();
        if bytes.is_empty() {
            return Err(malformed("an empty address or key"));
        }
        bytes.resize(len + MARGIN_BYTES, 0);
        Ok(bytes)
    }
}

impl Card {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; 16];
        put(&mut out, &self.address);
        out.extend_from_slice(&(self.regions.len() as u32).to_le_bytes());
        for region in &self.regions {
            out.extend_from_slice(&region.base.to_le_bytes());
            out.extend_from_slice(&region.bytes.to_le_bytes());
            put(&mut out, &region.rkey);
        }
        let hash = hash128(&out[16..]);
        out[..16].copy_from_slice(&hash);
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, LostReason> {
        let mut cursor = Cursor(bytes);
        let hash = cursor.take(16)?.to_vec();
        if hash128(cursor.0)[..] != hash[..] {
            return Err(malformed("greeting has another hash"));
        }
        let address = cursor.packed()?;
        let count = cursor.number32()? as usize;
        if count > REGIONS_MAX {
            return Err(malformed(format!("{count} regions, at most {REGIONS_MAX}")));
        }
        let mut regions = Vec::new();
        for _ in 0..count {
            let (base, bytes) = (cursor.number64()?, cursor.number64()?);
            if base.checked_add(bytes).is_none() {
                return Err(malformed(format!("region of {bytes} bytes at {base}")));
            }
            regions.push(RemoteRegion { base, bytes, rkey: cursor.packed()? });
        }
        if !cursor.0.is_empty() {
            return Err(malformed(format!("{} bytes after the greeting", cursor.0.len())));
        }
        Ok(Self { address, regions })
    }
}

fn header(version: Version, rest: usize) -> [u8; HEADER_BYTES] {
    let mut out = [0; HEADER_BYTES];
    out[..8].copy_from_slice(MAGIC);
    let rest = u32::try_from(rest).unwrap_or(u32::MAX);
    let numbers = [version.major, version.minor, version.release, rest];
    for (at, number) in out[8..].chunks_exact_mut(4).zip(numbers) {
        at.copy_from_slice(&number.to_le_bytes());
    }
    out
}

/// Says who we are and hears who the peer is. The connecting side sends its rest first, so that
/// neither waits for the other to read.
pub(super) fn exchange(
    stream: &mut (impl Read + Write),
    side: Side,
    version: Version,
    ours: &Card,
) -> Result<Card, LostReason> {
    let ours = ours.encode();
    stream.write_all(&header(version, ours.len())).map_err(|error| io(&error))?;
    // Alone, since a peer of another transport may have said no more before it hung up.
    let mut magic = [0; MAGIC.len()];
    stream.read_exact(&mut magic).map_err(|error| io(&error))?;
    if magic != *MAGIC {
        return Err(other_greeting("ucx", &magic));
    }
    let mut head = [0; HEADER_BYTES - MAGIC.len()];
    stream.read_exact(&mut head).map_err(|error| io(&error))?;
    let mut cursor = Cursor(&head);
    let theirs = Version {
        major: cursor.number32()?,
        minor: cursor.number32()?,
        release: cursor.number32()?,
    };
    if (theirs.major, theirs.minor) != (version.major, version.minor) {
        return Err(LostReason::Incompatible {
            ours: format!("UCX {version}"),
            theirs: format!("UCX {theirs}"),
        });
    }
    let len = cursor.number32()?;
    if len > REST_BYTES_MAX {
        return Err(malformed(format!("greeting of {len} bytes, at most {REST_BYTES_MAX}")));
    }
    if side == Side::Connector {
        stream.write_all(&ours).map_err(|error| io(&error))?;
    }
    let mut rest = Vec::new();
    let got = stream.take(len.into()).read_to_end(&mut rest).map_err(|error| io(&error))?;
    if got != len as usize {
        return Err(LostReason::Closed);
    }
    if side == Side::Acceptor {
        stream.write_all(&ours).map_err(|error| io(&error))?;
    }
    Card::decode(&rest)
}

/// For fuzzing: what becomes of a peer's first bytes. An odd first byte stands for a header and a
/// hash that fit the rest.
#[cfg(feature = "testing")]
pub(crate) fn hear(bytes: &[u8]) {
    const VERSION: Version = Version { major: 1, minor: 22, release: 0 };
    let Some((kind, rest)) = bytes.split_first() else { return };
    let said = if kind % 2 == 1 {
        [&header(VERSION, rest.len() + 16)[..], &hash128(rest), rest].concat()
    } else {
        rest.to_vec()
    };
    /// Reads a list, and writes to nobody.
    struct Heard(std::io::Cursor<Vec<u8>>);
    impl Read for Heard {
        fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
            self.0.read(out)
        }
    }
    impl Write for Heard {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let ours = Card { address: vec![1], regions: Vec::new() };
    let mut stream = Heard(std::io::Cursor::new(said));
    if let Ok(card) = exchange(&mut stream, Side::Acceptor, VERSION, &ours) {
        assert!(card.regions.len() <= REGIONS_MAX && card.address.len() > MARGIN_BYTES);
        let margin = |key: &[u8]| key[key.len() - MARGIN_BYTES..].iter().all(|byte| *byte == 0);
        assert!(card.regions.iter().all(|region| margin(&region.rkey)), "UCX reads past a key");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A socket that reads from one list and writes to another.
    struct Script(std::io::Cursor<Vec<u8>>, Vec<u8>);

    impl Read for Script {
        fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
            self.0.read(out)
        }
    }

    impl Write for Script {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.1.write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    const VERSION: Version = Version { major: 1, minor: 22, release: 0 };

    fn card() -> Card {
        let region = |base| RemoteRegion { base, bytes: 4096, rkey: vec![7; 9] };
        Card { address: vec![1, 2, 3], regions: vec![region(4096), region(1 << 40)] }
    }

    fn hear(bytes: Vec<u8>) -> Result<Card, LostReason> {
        let mut script = Script(std::io::Cursor::new(bytes), Vec::new());
        exchange(&mut script, Side::Connector, VERSION, &card())
    }

    fn said(version: Version, card: &Card) -> Vec<u8> {
        let rest = card.encode();
        [&header(version, rest.len())[..], &rest].concat()
    }

    #[test]
    fn what_is_said_is_heard_with_zeros_behind() {
        let heard = hear(said(VERSION, &card())).unwrap();
        assert_eq!(heard.address[..3], [1, 2, 3]);
        assert_eq!(heard.address.len(), 3 + MARGIN_BYTES);
        assert!(heard.address[3..].iter().all(|byte| *byte == 0));
        assert_eq!(heard.regions[1].base, 1 << 40);
        assert_eq!(heard.regions[1].rkey[..9], [7; 9]);
    }

    #[test]
    fn another_minor_version_is_refused_and_both_are_named() {
        let theirs = Version { major: 1, minor: 13, release: 1 };
        let why = hear(said(theirs, &card())).unwrap_err().to_string();
        assert!(why.contains("UCX 1.13.1") && why.contains("UCX 1.22.0"), "{why}");
        let release = Version { release: 5, ..VERSION };
        assert!(hear(said(release, &card())).is_ok(), "releases understand each other");
    }

    #[test]
    fn a_peer_of_another_transport_is_named_however_little_it_said() {
        for (greeting, says) in [
            (&b"PDTCP\0\0\x01"[..], "by tcp, this side by ucx"),
            (b"PDSHM\0\0\x01", "by shm, this side by ucx"),
            (b"GET / HT", "does not speak this protocol"),
        ] {
            let why = hear(greeting.to_vec()).unwrap_err();
            assert!(matches!(why, LostReason::Malformed(_)), "{why:?}");
            assert!(why.to_string().contains(says), "{why}");
        }
    }

    #[test]
    fn no_cut_or_changed_byte_is_taken() {
        let good = said(VERSION, &card());
        for len in 0..good.len() {
            assert!(hear(good[..len].to_vec()).is_err(), "{len} bytes");
        }
        for at in (0..good.len()).filter(|at| !(16..20).contains(at)) {
            let mut bad = good.clone();
            bad[at] ^= 0x55;
            assert!(hear(bad).is_err(), "byte {at}");
        }
    }

    #[test]
    fn lengths_that_lie_are_refused() {
        let mut huge = header(VERSION, usize::MAX).to_vec();
        huge.extend_from_slice(&card().encode());
        assert!(matches!(hear(huge), Err(LostReason::Malformed(_))));
        let mut wrapping = card();
        wrapping.regions[0].base = u64::MAX;
        assert!(matches!(hear(said(VERSION, &wrapping)), Err(LostReason::Malformed(_))));
        let empty = Card { address: Vec::new(), regions: Vec::new() };
        assert!(matches!(hear(said(VERSION, &empty)), Err(LostReason::Malformed(_))));
        let many =
            Card { address: vec![1], regions: vec![card().regions[0].clone(); REGIONS_MAX + 1] };
        assert!(matches!(hear(said(VERSION, &many)), Err(LostReason::Malformed(_))));
    }
}
