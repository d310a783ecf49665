//! Socket calls that take pages where they lie and put them where they belong.
//!
//! The kernel copies between a socket and memory that its owner may write meanwhile. The standard
//! library's calls want slices, which such memory must never be; so these go by address.
#![expect(unsafe_code, reason = "system calls with addresses of memory that is not Rust's alone")]

use crate::copy::{Copied, OutOfRange, address, check, check_guard, check_range, guard_holds};
use crate::guard_word;
use crate::transport::RegionOwner;
use crate::wire::{Guard, ReadRequest};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use std::cell::Cell;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Most pieces that one call takes.
const PIECES_MAX: usize = 1024;

/// Own bytes that are kept for the next write.
const OWN_BYTES_KEPT: usize = 64 << 10;

/// How long a thread asks again before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

/// A run of bytes of one write.
enum Piece {
    /// So many of the own bytes.
    Own(usize),
    /// A range inside a region, by address.
    Memory(libc::iovec),
}

/// A page on its way out.
struct Page {
    name: u64,
    guard: Guard,
    guards: Arc<dyn RegionOwner>,
    /// Mapped until the bytes are with the kernel.
    _source: Arc<dyn RegionOwner>,
}

/// What goes out in one go: own bytes, and pages in between.
#[derive(Default)]
pub(crate) struct Gather {
    own: Vec<u8>,
    pieces: Vec<Piece>,
    pages: Vec<Page>,
}

impl fmt::Debug for Gather {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gather").field("own", &self.own.len()).finish_non_exhaustive()
    }
}

impl Gather {
    /// Appends bytes.
    pub(crate) fn put(&mut self, bytes: &[u8]) {
        self.own.extend_from_slice(bytes);
        match self.pieces.last_mut() {
            Some(Piece::Own(len)) => *len += bytes.len(),
            _ => self.pieces.push(Piece::Own(bytes.len())),
        }
    }

    /// Appends `head` and the bytes of a read behind it, if its guard word has its value now. The
    /// same has to be asked after the write, which [`Self::settle`] does; `name` comes back there.
    ///
    /// # Errors
    /// An extent or the guard lies outside its region. Nothing was appended then.
    pub(crate) fn put_page(
        &mut self,
        name: u64,
        head: &[u8],
        source: Arc<dyn RegionOwner>,
        guards: Arc<dyn RegionOwner>,
        read: &ReadRequest,
    ) -> Result<Copied, OutOfRange> {
        let &ReadRequest { ref extents, guard, .. } = read;
        check_guard(&*guards, &guard)?;
        extents.iter().try_for_each(|extent| check(&*source, extent))?;
        if !guard_holds(&*guards, &guard) {
            return Ok(Copied::Stale);
        }
        self.put(head);
        for extent in extents {
            let (base, len) = (address(&*source, extent.offset), extent.len as usize);
            self.pieces.push(Piece::Memory(libc::iovec { iov_base: base.cast(), iov_len: len }));
        }
        self.pages.push(Page { name, guard, guards, _source: source });
        Ok(Copied::Done)
    }

    /// Whether there is nothing to write.
    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Writes everything to a stream socket that blocks, and forgets it, but for what
    /// [`Self::settle`] has to say.
    ///
    /// # Errors
    /// Those of `sendmsg`.
    pub(crate) fn write_to(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        let mut own = self.own.as_mut_ptr();
        let mut list: Vec<libc::iovec> = Vec::with_capacity(self.pieces.len());
        for piece in self.pieces.drain(..) {
            list.push(match piece {
                Piece::Own(len) => {
                    let iov_base = own.cast();
                    own = own.wrapping_add(len);
                    libc::iovec { iov_base, iov_len: len }
                }
                Piece::Memory(range) => range,
            });
        }
        let mut rest = &mut list[..];
        while let Some(first) = rest.first() {
            if first.iov_len == 0 {
                rest = &mut rest[1..];
                continue;
            }
            let count = rest.len().min(PIECES_MAX);
            // SAFETY: all zeros is a message without anything.
            let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
            message.msg_iov = rest.as_mut_ptr();
            message.msg_iovlen = count as _;
            // SAFETY: the list has `count` entries. Each is a part of `own`, which nobody changes
            // meanwhile, or a range that `put_page` found inside its region, which `pages` keeps
            // mapped; the kernel only reads, and what it reads of a page that is being written is
            // disowned by `settle`.
            let send = |flags| unsafe {
                libc::sendmsg(socket.as_raw_fd(), &raw const message, flags | libc::MSG_NOSIGNAL)
            };
            let mut sent = insist(socket, Some(PollFlags::OUT), send)?;
            while sent > 0 {
                let first = &mut rest[0];
                let part = sent.min(first.iov_len);
                first.iov_base = first.iov_base.wrapping_byte_add(part);
                first.iov_len -= part;
                sent -= part;
                if first.iov_len == 0 {
                    rest = &mut rest[1..];
                }
            }
        }
        self.own.clear();
        // A single large message does not keep its memory for the life of the link.
        self.own.shrink_to(OWN_BYTES_KEPT);
        Ok(())
    }

    /// Says of each page of the last write whether its guard word still had its value when the
    /// bytes were with the kernel, in order.
    // PD-T3
    pub(crate) fn settle(&mut self, mut say: impl FnMut(&mut Self, u64, Copied)) {
        guard_word::copied();
        for page in std::mem::take(&mut self.pages) {
            let holds = guard_holds(&*page.guards, &page.guard);
            say(self, page.name, if holds { Copied::Done } else { Copied::Stale });
        }
    }
}

/// Makes a call with flags until it is not interrupted. With something that the socket has to be
/// `ready` for, it looks for that again and again for a little before it sleeps: to be woken takes
/// longer than most waits.
fn insist(
    socket: BorrowedFd<'_>,
    ready: Option<PollFlags>,
    call: impl Fn(libc::c_int) -> isize,
) -> io::Result<usize> {
    let flags = if ready.is_some() { libc::MSG_DONTWAIT } else { 0 };
    loop {
        if let Ok(bytes) = usize::try_from(call(flags)) {
            return Ok(bytes);
        }
        match (io::Error::last_os_error(), ready) {
            (error, _) if error.kind() == io::ErrorKind::Interrupted => {}
            (error, Some(ready)) if error.kind() == io::ErrorKind::WouldBlock => {
                wait_for(socket, ready)?;
            }
            (error, _) => return Err(error),
        }
    }
}

/// Waits until a socket is ready, at first without sleeping. A socket is ready to be written when a
/// good part of its buffer is free, so that what is sent comes in large pieces.
fn wait_for(socket: BorrowedFd<'_>, ready: PollFlags) -> io::Result<()> {
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    let begin = Instant::now();
    loop {
        let is_over = begin.elapsed() > SPIN;
        let mut sockets = [PollFd::from_borrowed_fd(socket, ready)];
        match rustix::event::poll(&mut sockets, (!is_over).then_some(&at_once)) {
            Ok(0) => thread::yield_now(),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Reads what a stream socket has: up to `bytes` bytes to `offset` of a region, and what follows into
/// `behind`. Returns how many bytes came in all; 0 at the end of the stream.
///
/// # Errors
/// Those of `recvmsg`. A range outside of the region is [`io::ErrorKind::InvalidInput`].
pub(crate) fn read_into(
    socket: BorrowedFd<'_>,
    target: Option<(&dyn RegionOwner, u64, usize)>,
    behind: &mut [u8],
    is_eager: bool,
) -> io::Result<usize> {
    let page = match target {
        Some((region, offset, bytes)) => {
            check_range(region, offset, bytes as u64)
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
            libc::iovec { iov_base: address(region, offset).cast(), iov_len: bytes }
        }
        None => libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 },
    };
    let behind = libc::iovec { iov_base: behind.as_mut_ptr().cast(), iov_len: behind.len() };
    let mut list = [page, behind];
    // SAFETY: all zeros is a message without anything.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = list.as_mut_ptr();
    message.msg_iovlen = list.len() as _;
    let message = Cell::new(message);
    // SAFETY: the list has so many entries. The first is empty or was checked above, and its region
    // stays mapped while it is borrowed; nobody holds a Rust reference into a range that a get may
    // write (contract of `RegionOwner`), and only the get of this page writes it. The second is a
    // slice that is borrowed for this call.
    insist(socket, is_eager.then_some(PollFlags::IN), |flags| unsafe {
        libc::recvmsg(socket.as_raw_fd(), message.as_ptr(), flags)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copy::{read, set_guard, write};
    use crate::transport::HeapRegion;
    use crate::wire::{Extent, RegionId};
    use std::io::{Read as _, Write as _};
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;

    fn region(bytes: usize) -> Arc<dyn RegionOwner> {
        let region = HeapRegion::new(bytes);
        let all: Vec<u8> = (0..bytes).map(|n| (n * 31 % 251) as u8).collect();
        write(&*region, 0, &all).unwrap();
        set_guard(&*region, 0, 7).unwrap();
        set_guard(&*region, 8, 7).unwrap();
        region
    }

    fn guard(offset: u64) -> Guard {
        Guard { region: RegionId(0), offset, expect: 7 }
    }

    /// Appends one extent of a region, guarded by one of its first words.
    fn put(
        out: &mut Gather,
        region: &Arc<dyn RegionOwner>,
        extent: (u64, u32),
        guard: Guard,
    ) -> Result<Copied, OutOfRange> {
        let extents = vec![Extent { offset: extent.0, len: extent.1 }];
        let (source, guards) = (Arc::clone(region), Arc::clone(region));
        let read = ReadRequest { region: RegionId(0), extents, guard };
        out.put_page(extent.0, b"<", source, guards, &read)
    }

    // PD-T3
    #[test]
    fn a_word_that_changes_while_the_page_is_written_is_seen() {
        let region = region(4096);
        let (from, to) = UnixStream::pair().unwrap();
        let mut out = Gather::default();
        assert_eq!(put(&mut out, &region, (100, 4), guard(0)), Ok(Copied::Done));
        assert_eq!(put(&mut out, &region, (200, 4), guard(8)), Ok(Copied::Done));
        set_guard(&*region, 8, 8).unwrap();
        assert_eq!(put(&mut out, &region, (300, 4), guard(8)), Ok(Copied::Stale));
        out.write_to(from.as_fd()).unwrap();
        let mut said = Vec::new();
        out.settle(|out, name, copied| {
            said.push((name, copied));
            out.put(b"!");
        });
        assert_eq!(said, [(100, Copied::Done), (200, Copied::Stale)]);
        out.write_to(from.as_fd()).unwrap();
        out.settle(|_, name, _| panic!("{name} again"));
        assert!(out.is_empty());
        drop(from);
        let (mut got, mut bytes) = (Vec::new(), Vec::new());
        (&to).read_to_end(&mut got).unwrap();
        for offset in [100, 200] {
            bytes.push(b'<');
            read(&*region, &Extent { offset, len: 4 }, &mut bytes).unwrap();
        }
        assert_eq!(got, [&bytes[..], b"!!"].concat());
    }

    // PD-T4
    #[test]
    fn a_page_outside_of_its_region_is_left_out() {
        let region = region(64);
        let mut out = Gather::default();
        assert!(put(&mut out, &region, (60, 8), guard(0)).is_err());
        assert!(put(&mut out, &region, (u64::MAX, 8), guard(0)).is_err());
        assert!(put(&mut out, &region, (0, 8), guard(64)).is_err());
        assert!(put(&mut out, &region, (0, 8), guard(4)).is_err());
        assert!(out.is_empty());
        let (socket, _peer) = UnixStream::pair().unwrap();
        let past = read_into(socket.as_fd(), Some((&*region, 60, 8)), &mut [0; 8], false);
        assert_eq!(past.unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn more_pieces_and_bytes_than_one_call_takes_arrive_in_order() {
        let region = region(1 << 20);
        let (from, to) = UnixStream::pair().unwrap();
        let mut out = Gather::default();
        let mut wanted = Vec::new();
        for n in 0..2 * PIECES_MAX as u64 {
            let (offset, len) = (16 + n * 400, 399 - (n % 7) as u32);
            assert_eq!(put(&mut out, &region, (offset, len), guard(0)), Ok(Copied::Done));
            wanted.push(b'<');
            read(&*region, &Extent { offset, len }, &mut wanted).unwrap();
        }
        let reader = thread::spawn(move || {
            // Slow at first, so that the writer has to sleep.
            thread::sleep(Duration::from_millis(20));
            let mut got = Vec::new();
            (&to).read_to_end(&mut got).map(|_| got)
        });
        out.write_to(from.as_fd()).unwrap();
        drop(from);
        assert!(reader.join().unwrap().unwrap() == wanted);
    }

    #[test]
    fn what_comes_goes_to_the_page_first_and_then_behind() {
        let region = region(64);
        let (mut from, to) = UnixStream::pair().unwrap();
        let sent: Vec<u8> = (100..120).collect();
        from.write_all(&sent).unwrap();
        let mut behind = [0; 8];
        let got = read_into(to.as_fd(), Some((&*region, 16, 8)), &mut behind, true).unwrap();
        assert_eq!(got, 16);
        assert_eq!(behind, sent[8..16]);
        let mut page = Vec::new();
        read(&*region, &Extent { offset: 16, len: 8 }, &mut page).unwrap();
        assert_eq!(page, sent[..8]);
        assert_eq!(read_into(to.as_fd(), None, &mut behind, false).unwrap(), 4);
        drop(from);
        for is_eager in [true, false] {
            assert_eq!(read_into(to.as_fd(), None, &mut behind, is_eager).unwrap(), 0);
        }
    }

    #[test]
    fn a_reader_that_is_gone_is_an_error_and_no_signal() {
        let (from, to) = UnixStream::pair().unwrap();
        drop(to);
        let mut out = Gather::default();
        out.put(b"x");
        assert_eq!(out.write_to(from.as_fd()).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
