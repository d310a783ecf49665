//! The writing half of a link: the only thread that hands our memory to the peer.

use super::{
    Conn, DATA, Frame, HEADER_BYTES, HELD, Links, MESSAGE, READ, REFUSED, STALE, Stream, header,
    lock, lost,
};
use crate::copy::Copied;
use crate::gather::Gather;
use crate::id::OpId;
use crate::transport::Regions;
use crate::wire::{ReadRequest, extents_bytes};
use std::os::fd::AsFd as _;
use std::sync::PoisonError;

/// Bytes of pages that go into one write; then comes the word of their guards.
const WRITE_BYTES: u64 = 1 << 20;

/// What goes well into one write. None once the link has ended. Waits for frames unless something
/// `has_to_go` without them.
fn next_frames(conn: &Conn, has_to_go: bool) -> Option<Vec<Frame>> {
    let mut outbox = lock(&conn.outbox);
    loop {
        if outbox.is_closed {
            return None;
        }
        if has_to_go || !outbox.frames.is_empty() {
            break;
        }
        outbox = conn.outbox_filled.wait(outbox).unwrap_or_else(PoisonError::into_inner);
    }
    let (mut frames, mut bytes) = (Vec::new(), 0);
    while bytes < WRITE_BYTES {
        let Some(frame) = outbox.frames.pop_front() else { break };
        bytes += match &frame {
            Frame::Message(payload) | Frame::Read(_, payload) => payload.len() as u64,
            Frame::Serve(_, request) => extents_bytes(&request.extents),
        };
        frames.push(frame);
    }
    Some(frames)
}

/// Sends frames until the link ends.
pub(super) fn write_frames(links: &Links, conn: &Conn, stream: &Stream) {
    let mut out = Gather::default();
    // What is to be said of the pages sent last goes in front of what is sent next.
    while let Some(frames) = next_frames(conn, !out.is_empty()) {
        let (mut queued, mut served) = (0, 0);
        for frame in frames {
            match frame {
                Frame::Message(message) => {
                    queued += put(&mut out, MESSAGE, OpId(0), &message);
                }
                Frame::Read(op, request) => {
                    queued += put(&mut out, READ, op, &request);
                }
                Frame::Serve(op, request) => {
                    serve(&links.regions, op, &request, &mut out);
                    served += 1;
                }
            }
        }
        if let Err(error) = out.write_to(stream.as_fd()) {
            return conn.abort(lost(&error));
        }
        out.settle(|out, op, copied| {
            let kind = if copied == Copied::Done { HELD } else { STALE };
            put(out, kind, OpId(op), &[]);
        });
        let mut outbox = lock(&conn.outbox);
        outbox.bytes -= queued as u64;
        outbox.serving -= served;
    }
}

/// Appends a frame; its bytes.
fn put(out: &mut Gather, kind: u8, op: OpId, payload: &[u8]) -> usize {
    out.put(&header(kind, payload.len(), op));
    out.put(payload);
    HEADER_BYTES + payload.len()
}

/// Appends the answer to a read, or its beginning: the peer takes nothing for a page before the
/// frame behind it says that the guard word held.
fn serve(regions: &Regions, op: OpId, request: &ReadRequest, out: &mut Gather) {
    let source = regions.find(request.region);
    let guards = regions.find(request.guard.region);
    let (Some(source), Some(guards)) = (source, guards) else {
        put(out, REFUSED, op, b"no such region");
        return;
    };
    let bytes = extents_bytes(&request.extents);
    let head = header(DATA, usize::try_from(bytes).unwrap_or(usize::MAX), op);
    match out.put_page(op.0, &head, source, guards, request) {
        Ok(Copied::Done) => {}
        Ok(Copied::Stale) => {
            put(out, STALE, op, &[]);
        }
        Err(error) => {
            put(out, REFUSED, op, error.to_string().as_bytes());
        }
    }
}
