//! ZMTP 3.0 as a publisher needs it: greeting, handshake without security, frames.
//!
//! See <https://rfc.zeromq.org/spec/23>. Nothing that a peer sends is longer than [`BODY_MAX`], and
//! no message has more than [`FRAMES_MAX`] frames; a peer that sends more is hung up on.

use std::io;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// Longest body of a frame that is read. Subscriptions, requests and handshakes are far shorter.
pub(super) const BODY_MAX: usize = 4096;
/// Most frames of a message that is read.
pub(super) const FRAMES_MAX: usize = 4;
const GREETING: usize = 64;
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Kind of a socket, as far as it can be at one of our connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Publishes.
    Pub,
    /// Answers requests.
    Router,
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Self::Pub => "PUB",
            Self::Router => "ROUTER",
        }
    }

    /// Kinds that may be at the other end.
    const fn peers(self) -> &'static [&'static str] {
        match self {
            Self::Pub => &["SUB", "XSUB"],
            Self::Router => &["REQ", "DEALER", "ROUTER"],
        }
    }
}

/// What a peer has sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Incoming {
    /// A command: its name and what follows.
    Command(Vec<u8>, Vec<u8>),
    /// A message of one or more frames.
    Message(Vec<Vec<u8>>),
}

fn broken(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// The bytes of a message.
pub(super) fn message(frames: &[&[u8]]) -> Vec<u8> {
    let mut out = Vec::with_capacity(frames.iter().map(|frame| frame.len() + 9).sum());
    for (n, frame) in frames.iter().enumerate() {
        put_frame(&mut out, if n + 1 < frames.len() { MORE } else { 0 }, frame);
    }
    out
}

fn put_frame(out: &mut Vec<u8>, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(short) => out.extend_from_slice(&[flags, short]),
        Err(_) => {
            out.push(flags | LONG);
            out.extend_from_slice(&(body.len() as u64).to_be_bytes());
        }
    }
    out.extend_from_slice(body);
}

/// The bytes of a command; its name is short.
fn command(name: &str, rest: &[u8]) -> Vec<u8> {
    let mut body = vec![name.len() as u8];
    body.extend_from_slice(name.as_bytes());
    body.extend_from_slice(rest);
    let mut out = Vec::with_capacity(body.len() + 9);
    put_frame(&mut out, COMMAND, &body);
    out
}

/// The answer to a `PING`, which has a time to live before its context; none if it is too short.
pub(super) fn pong(ping: &[u8]) -> Option<Vec<u8>> {
    Some(command("PONG", ping.get(2..)?))
}

fn greeting() -> [u8; GREETING] {
    let mut bytes = [0; GREETING];
    (bytes[0], bytes[9], bytes[10]) = (0xff, 0x7f, 3);
    bytes[12..16].copy_from_slice(b"NULL");
    bytes
}

/// The kind that a `READY` command says.
fn kind_in(mut metadata: &[u8]) -> Option<&[u8]> {
    while let Some((&name_len, rest)) = metadata.split_first() {
        let (name, rest) = rest.split_at_checked(name_len.into())?;
        let (len, rest) = rest.split_first_chunk::<4>()?;
        let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*len) as usize)?;
        if name.eq_ignore_ascii_case(b"socket-type") {
            return Some(value);
        }
        metadata = rest;
    }
    None
}

/// Takes frames out of what was received.
#[derive(Debug, Default)]
struct Parser {
    bytes: Vec<u8>,
    /// Frames of a message that is not complete.
    frames: Vec<Vec<u8>>,
}

impl Parser {
    /// The next command or message, as soon as it is complete.
    fn next(&mut self) -> io::Result<Option<Incoming>> {
        while let Some((flags, body)) = self.frame()? {
            if flags & !(MORE | LONG | COMMAND) != 0 {
                return Err(broken("a frame with unknown flags"));
            }
            if flags & COMMAND != 0 {
                let (&name_len, rest) = body.split_first().ok_or_else(|| broken("no command"))?;
                let parts = rest.split_at_checked(name_len.into());
                let (name, rest) = parts.ok_or_else(|| broken("a command without its name"))?;
                return Ok(Some(Incoming::Command(name.to_vec(), rest.to_vec())));
            }
            self.frames.push(body);
            if flags & MORE == 0 {
                return Ok(Some(Incoming::Message(std::mem::take(&mut self.frames))));
            }
            if self.frames.len() >= FRAMES_MAX {
                return Err(broken("a message of too many frames"));
            }
        }
        Ok(None)
    }

    fn frame(&mut self) -> io::Result<Option<(u8, Vec<u8>)>> {
        let Some((&flags, rest)) = self.bytes.split_first() else { return Ok(None) };
        let (header, len) = if flags & LONG == 0 {
            let Some(&len) = rest.first() else { return Ok(None) };
            (2, u64::from(len))
        } else {
            let Some(len) = rest.first_chunk::<8>() else { return Ok(None) };
            (9, u64::from_be_bytes(*len))
        };
        let len = usize::try_from(len).ok().filter(|len| *len <= BODY_MAX);
        let len = len.ok_or_else(|| broken("a frame that is too long"))?;
        if self.bytes.len() < header + len {
            return Ok(None);
        }
        let body = self.bytes[header..header + len].to_vec();
        self.bytes.drain(..header + len);
        Ok(Some((flags, body)))
    }
}

/// The reading side of a connection. Dropping a call to [`Reader::next`] loses nothing.
#[derive(Debug)]
pub(super) struct Reader<R> {
    stream: R,
    parser: Parser,
}

impl<R: AsyncRead + Unpin> Reader<R> {
    /// The next command or message; none at the end of the connection.
    pub(super) async fn next(&mut self) -> io::Result<Option<Incoming>> {
        loop {
            if let Some(incoming) = self.parser.next()? {
                return Ok(Some(incoming));
            }
            let mut some = [0; 1024];
            match self.stream.read(&mut some).await? {
                0 => return Ok(None),
                read => self.parser.bytes.extend_from_slice(&some[..read]),
            }
        }
    }
}

/// Greets a peer and tells it what we are; the same from whichever side the connection was made.
pub(super) async fn handshake<R, W>(mut read: R, write: &mut W, kind: Kind) -> io::Result<Reader<R>>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    write.write_all(&greeting()).await?;
    let mut theirs = [0; GREETING];
    read.read_exact(&mut theirs).await?;
    if theirs[0] != 0xff || theirs[9] & 1 == 0 || theirs[10] < 3 {
        return Err(broken("no ZMTP of version 3 or later"));
    }
    if theirs[12..32] != greeting()[12..32] {
        return Err(broken("another security mechanism"));
    }
    let mut ready = vec![11];
    ready.extend_from_slice(b"Socket-Type");
    ready.extend_from_slice(&(kind.name().len() as u32).to_be_bytes());
    ready.extend_from_slice(kind.name().as_bytes());
    write.write_all(&command("READY", &ready)).await?;
    let mut reader = Reader { stream: read, parser: Parser::default() };
    match reader.next().await? {
        Some(Incoming::Command(name, metadata)) if name == b"READY" => {
            let peer = kind_in(&metadata).unwrap_or_default();
            if kind.peers().iter().any(|name| name.as_bytes() == peer) {
                Ok(reader)
            } else {
                Err(broken("a socket of another kind"))
            }
        }
        Some(_) => Err(broken("something else than READY")),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(bytes: &[u8]) -> io::Result<Vec<Incoming>> {
        let mut parser = Parser { bytes: bytes.to_vec(), frames: Vec::new() };
        let mut found = Vec::new();
        while let Some(incoming) = parser.next()? {
            found.push(incoming);
        }
        Ok(found)
    }

    #[test]
    fn messages_are_read_as_they_were_written_however_they_are_cut() {
        let long = vec![7; 300];
        let mut bytes = message(&[b"", b"\0\0\0\0\0\0\0\x05", &long]);
        assert_eq!(bytes[..2], [MORE, 0]);
        assert_eq!(bytes[12..21], [LONG, 0, 0, 0, 0, 0, 0, 1, 44]);
        bytes.extend(command("PING", b"\0\x0actx"));
        let expected = [
            Incoming::Message(vec![vec![], 5_u64.to_be_bytes().to_vec(), long]),
            Incoming::Command(b"PING".to_vec(), b"\0\x0actx".to_vec()),
        ];
        assert_eq!(parse(&bytes).unwrap(), expected);
        let mut parser = Parser::default();
        let mut found = Vec::new();
        for byte in bytes {
            parser.bytes.push(byte);
            found.extend(parser.next().unwrap());
        }
        assert_eq!(found, expected);
        assert_eq!(pong(b"\0\x0actx").unwrap(), command("PONG", b"ctx"));
        assert_eq!(pong(b"\0"), None);
    }

    #[test]
    fn what_is_too_long_is_refused_before_it_is_there() {
        for bytes in [
            &[LONG, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff][..],
            &[LONG, 0, 0, 0, 0, 0, 0, 0x10, 0x01],
            &[0x80, 0],
            &[COMMAND, 0],
            &[COMMAND, 2, 9, b'X'],
            &[MORE, 0, MORE, 0, MORE, 0, MORE, 0],
        ] {
            assert!(parse(bytes).is_err(), "{bytes:?}");
        }
    }

    /// Any bytes are an answer or an error; nothing panics and little is kept.
    #[test]
    fn any_bytes_are_read_or_refused() {
        let mut state = 1_u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state >> 33
        };
        for _ in 0..20_000 {
            let len = next() as usize % 40;
            let mut bytes: Vec<u8> = (0..len).map(|_| next() as u8).collect();
            if let Some(first) = bytes.first_mut() {
                *first &= 7;
            }
            let _ = parse(&bytes);
            let _ = kind_in(&bytes);
        }
    }

    #[test]
    fn the_kind_is_found_among_other_properties() {
        let mut metadata = vec![8];
        metadata.extend_from_slice(b"Identity\0\0\0\x02ab\x0bsocket-type\0\0\0\x03SUB");
        assert_eq!(kind_in(&metadata), Some(&b"SUB"[..]));
        assert_eq!(kind_in(&metadata[..20]), None);
        assert_eq!(kind_in(b"\x0bSocket-Type\xff\xff\xff\xffSUB"), None);
    }

    #[tokio::test]
    async fn peers_of_another_kind_version_or_mechanism_are_refused() {
        let ready = |kind: &str| {
            let mut rest = b"\x0bSocket-Type\0\0\0".to_vec();
            rest.push(kind.len() as u8);
            rest.extend_from_slice(kind.as_bytes());
            command("READY", &rest)
        };
        let with = |at: usize, byte: u8| {
            let mut changed = greeting();
            changed[at] = byte;
            changed
        };
        for (theirs, kind, good) in [
            (greeting(), "SUB", true),
            (with(11, 1), "XSUB", true),
            (greeting(), "PUSH", false),
            (with(10, 1), "SUB", false),
            (with(0, 1), "SUB", false),
            (with(12, b'P'), "SUB", false),
        ] {
            let bytes = [&theirs[..], &ready(kind)].concat();
            let mut sent = Vec::new();
            let result = handshake(&bytes[..], &mut sent, Kind::Pub).await;
            assert_eq!(result.is_ok(), good, "{kind}: {result:?}");
            assert!(sent.starts_with(&greeting()));
        }
    }
}
