//! The reading half of a link: the only thread that writes what the peer sent.

use super::{
    CHUNK_BYTES, Conn, DATA, Frame, GET_BYTES_MAX, HEADER_BYTES, HELD, Links, MESSAGE, READ,
    REFUSED, SERVING_MAX, STALE, Stream, lock, lost,
};
use crate::copy::OutOfRange;
use crate::gather::read_into;
use crate::get::{Digest, Get, GetOutcome};
use crate::id::OpId;
use crate::page_hash::Careful;
use crate::transport::{Ended, LostReason, REPORT_GETS, RegionOwner, TransportEvent};
use crate::wire::{
    Extent, MAX_EXTENTS, MAX_MESSAGE_BYTES, ReadRequest, decode_read, extents_bytes,
};
use std::collections::VecDeque;
use std::io::{self, Read};
use std::os::fd::AsFd as _;

/// Pages of which so much is missing are read straight into their place.
const DIRECT_BYTES: usize = 32 << 10;
/// What may come behind such a page in the same call: the next header.
const BEHIND_BYTES: usize = 4 << 10;

/// Reads `len` bytes without trusting `len` for an allocation.
fn read_bytes(reader: &mut impl Read, len: usize) -> Result<Vec<u8>, LostReason> {
    let mut bytes = Vec::with_capacity(len.min(CHUNK_BYTES));
    let got = reader.by_ref().take(len as u64).read_to_end(&mut bytes).map_err(|e| lost(&e))?;
    if got == len { Ok(bytes) } else { Err(LostReason::Closed) }
}

/// What the reading thread of a link has at hand.
struct Incoming<'a> {
    links: &'a Links,
    conn: &'a Conn,
    inbox: Inbox<'a>,
    hash: Careful,
    /// Gets whose bytes are in their targets, in the order in which they came. Whether they are the
    /// page that was offered, a later frame says.
    landed: VecDeque<(OpId, Option<Digest>)>,
    /// Answers that are not reported yet.
    ended: Vec<Ended>,
}

/// Reads frames until the link ends; why it does.
pub(super) fn read_frames(links: &Links, conn: &Conn, stream: &Stream) -> Result<(), LostReason> {
    let mut incoming = Incoming {
        links,
        conn,
        inbox: Inbox::new(stream),
        hash: links.hash(),
        landed: VecDeque::new(),
        ended: Vec::new(),
    };
    let why = loop {
        if let Err(why) = incoming.frame() {
            break why;
        }
    };
    // PD-T1
    let lost = incoming.landed.drain(..).map(|(op, _)| Ended::without(op, GetOutcome::Lost));
    incoming.ended.extend(lost);
    incoming.report();
    Err(why)
}

impl Incoming<'_> {
    fn frame(&mut self) -> Result<(), LostReason> {
        let malformed = |text: String| Err(LostReason::Malformed(text));
        // What has come is told before more is waited for.
        if self.ended.len() >= REPORT_GETS || self.inbox.ready().len() < HEADER_BYTES {
            self.report();
            self.inbox.is_awaited = !lock(&self.conn.pending).gets.is_empty();
        }
        let mut head = [0; HEADER_BYTES];
        self.inbox.read_exact(&mut head).map_err(|error| lost(&error))?;
        let [kind, a, b, c, l0, l1, l2, l3, op @ ..] = head;
        let len = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        let op = OpId(u64::from_le_bytes(op));
        // PD-T9
        if [a, b, c] != [0; 3] {
            return malformed(String::from("reserved bytes are not zero"));
        }
        let is_serving = self.links.is_serving;
        match kind {
            MESSAGE if len <= MAX_MESSAGE_BYTES => {
                let bytes = read_bytes(&mut self.inbox, len)?;
                self.report();
                (self.links.sink)(TransportEvent::Message { peer: self.conn.peer, bytes });
            }
            READ if is_serving && len <= 256 => {
                let bytes = read_bytes(&mut self.inbox, len)?;
                let request = decode_read(&bytes)
                    .map_err(|error| LostReason::Malformed(error.to_string()))?;
                queue_read(self.conn, op, request)?;
            }
            DATA if is_serving => self.receive(op, len)?,
            HELD if is_serving && len == 0 => {
                let Some((_, digest)) = self.take_landed(op) else {
                    return malformed(format!("word of {op}, whose bytes did not come"));
                };
                self.ended.push(Ended::done(op, digest));
            }
            STALE if is_serving && len == 0 => {
                if self.take_landed(op).is_none() {
                    take_pending(self.conn, op)?;
                }
                self.ended.push(Ended::without(op, GetOutcome::Stale));
            }
            REFUSED if is_serving && len <= 4096 => {
                let bytes = read_bytes(&mut self.inbox, len)?;
                take_pending(self.conn, op)?;
                let error = String::from_utf8_lossy(&bytes).into_owned();
                self.ended.push(Ended::without(op, GetOutcome::Error(error)));
            }
            _ => return malformed(format!("kind {kind} with {len} bytes")),
        }
        Ok(())
    }

    fn report(&mut self) {
        if !self.ended.is_empty() {
            let (peer, gets) = (self.conn.peer, std::mem::take(&mut self.ended));
            (self.links.sink)(TransportEvent::Ended { peer, gets });
        }
    }

    fn take_landed(&mut self, op: OpId) -> Option<(OpId, Option<Digest>)> {
        let place = self.landed.iter().position(|(landed, _)| *landed == op)?;
        self.landed.remove(place)
    }

    /// Puts the payload of a `DATA` frame into the target of its get.
    fn receive(&mut self, op: OpId, len: usize) -> Result<(), LostReason> {
        let get = take_pending(self.conn, op)?;
        let copied = self.copy(&get, len);
        if copied.is_err() {
            // PD-T1
            // Nobody else knows of it any more.
            self.ended.push(Ended::without(op, GetOutcome::Lost));
        }
        // PD-T2
        self.landed.push_back((op, copied?));
        Ok(())
    }

    fn copy(&mut self, get: &Get, len: usize) -> Result<Option<Digest>, LostReason> {
        let (op, wanted) = (get.op, extents_bytes(&get.target));
        let Some(memory) =
            self.links.regions.find(get.target_region).filter(|_| wanted == len as u64)
        else {
            let text = format!("{len} bytes for {op}, which wants {wanted}");
            return Err(LostReason::Malformed(text));
        };
        self.hash.clear();
        for extent in &get.target {
            self.fill(&*memory, extent)?;
        }
        Ok(self.hash.finish())
    }

    /// Fills one extent from what the socket gave, and what it gives next.
    fn fill(&mut self, memory: &dyn RegionOwner, extent: &Extent) -> Result<(), LostReason> {
        let failed = |error: OutOfRange| LostReason::Io(error.to_string());
        let (mut offset, end) = (extent.offset, extent.offset + u64::from(extent.len));
        while offset < end {
            let left = (end - offset) as usize;
            let bytes = self.inbox.ready();
            let part = if !bytes.is_empty() {
                let part = bytes.len().min(left);
                self.hash.write(memory, offset, &bytes[..part]).map_err(failed)?;
                self.inbox.consume(part);
                part
            } else if left >= DIRECT_BYTES {
                let want = left.min(CHUNK_BYTES);
                let part =
                    self.inbox.read_into(memory, offset, want).map_err(|error| lost(&error))?;
                let extent = Extent { offset, len: part as u32 };
                self.hash.read(memory, &[extent]).map_err(failed)?;
                part
            } else {
                self.inbox.fill(CHUNK_BYTES).map_err(|error| lost(&error))?;
                continue;
            };
            offset += part as u64;
        }
        Ok(())
    }
}

/// What came from the socket and was not used yet.
struct Inbox<'a> {
    stream: &'a Stream,
    buffer: Box<[u8]>,
    used: usize,
    filled: usize,
    /// Whether answers are expected, so that waiting a little is better than to be woken.
    is_awaited: bool,
}

impl<'a> Inbox<'a> {
    fn new(stream: &'a Stream) -> Self {
        let buffer = vec![0; CHUNK_BYTES].into();
        Self { stream, buffer, used: 0, filled: 0, is_awaited: false }
    }

    fn ready(&self) -> &[u8] {
        &self.buffer[self.used..self.filled]
    }

    fn consume(&mut self, bytes: usize) {
        self.used += bytes;
    }

    /// Waits for bytes, at most `most`; there are none yet.
    fn fill(&mut self, most: usize) -> io::Result<()> {
        let (stream, is_awaited) = (self.stream, self.is_awaited);
        self.used = 0;
        self.filled = 0;
        let behind = &mut self.buffer[..most];
        self.filled = receive(stream, None, behind, is_awaited)?;
        Ok(())
    }

    /// Waits for bytes and puts up to `bytes` of them straight into a region; how many.
    fn read_into(
        &mut self,
        memory: &dyn RegionOwner,
        offset: u64,
        bytes: usize,
    ) -> io::Result<usize> {
        let (stream, is_awaited) = (self.stream, self.is_awaited);
        let target = Some((memory, offset, bytes));
        let got = receive(stream, target, &mut self.buffer[..BEHIND_BYTES], is_awaited)?;
        self.used = 0;
        self.filled = got.saturating_sub(bytes);
        Ok(got.min(bytes))
    }
}

/// Waits for bytes; the end of the stream is an error.
fn receive(
    stream: &Stream,
    target: Option<(&dyn RegionOwner, u64, usize)>,
    behind: &mut [u8],
    is_awaited: bool,
) -> io::Result<usize> {
    let got = read_into(stream.as_fd(), target, behind, is_awaited)?;
    if got == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(got) }
}

impl Read for Inbox<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.used == self.filled {
            self.fill(CHUNK_BYTES)?;
        }
        let part = out.len().min(self.filled - self.used);
        out[..part].copy_from_slice(&self.ready()[..part]);
        self.consume(part);
        Ok(part)
    }
}

fn queue_read(conn: &Conn, op: OpId, request: ReadRequest) -> Result<(), LostReason> {
    let bytes = extents_bytes(&request.extents);
    let count = request.extents.len();
    if bytes > GET_BYTES_MAX || count == 0 || count > MAX_EXTENTS {
        return Err(LostReason::Malformed(format!("read of {bytes} bytes in {count} extents")));
    }
    let mut outbox = lock(&conn.outbox);
    if outbox.serving >= SERVING_MAX {
        return Err(LostReason::Malformed(format!("more than {SERVING_MAX} reads at once")));
    }
    outbox.serving += 1;
    outbox.frames.push_back(Frame::Serve(op, request));
    drop(outbox);
    conn.outbox_filled.notify_one();
    Ok(())
}

fn take_pending(conn: &Conn, op: OpId) -> Result<Get, LostReason> {
    lock(&conn.pending)
        .gets
        .remove(&op)
        .ok_or_else(|| LostReason::Malformed(format!("answer to {op}, which was not asked")))
}
