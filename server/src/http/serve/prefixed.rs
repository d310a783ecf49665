//! A stream of which the first bytes have been read already, to see what comes.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf};

/// How HTTP/2 begins on a plain connection. No method of HTTP/1.1 begins like it, once there are
/// three bytes.
const PREFACE: &[u8; 3] = b"PRI";

/// What a client speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Version {
    /// HTTP/1.1 or 1.0.
    One,
    /// HTTP/2.
    Two,
}

/// A stream that gives out what was read of it, and then the rest.
#[derive(Debug)]
pub(super) struct Prefixed<S> {
    /// At most three bytes, of which `given` were given out.
    read: [u8; PREFACE.len()],
    len: usize,
    given: usize,
    inner: S,
}

impl<S: AsyncRead + Unpin> Prefixed<S> {
    /// Reads as far as is needed to tell the versions apart: one byte, unless it is that of HTTP/2.
    ///
    /// # Errors
    /// The stream's.
    pub(super) async fn sniff(mut inner: S) -> io::Result<(Version, Self)> {
        let mut read = [0; PREFACE.len()];
        let mut len = 0;
        while len < PREFACE.len() {
            let count = inner.read(&mut read[len..]).await?;
            len += count;
            // What ends here is HTTP/1.1's to judge.
            if count == 0 || !PREFACE.starts_with(&read[..len]) {
                return Ok((Version::One, Self { read, len, given: 0, inner }));
            }
        }
        Ok((Version::Two, Self { read, len, given: 0, inner }))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Prefixed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.given < this.len {
            let count = buf.remaining().min(this.len - this.given);
            buf.put_slice(&this.read[this.given..this.given + count]);
            this.given += count;
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut this.inner).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Prefixed<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt as _;

    #[tokio::test]
    async fn versions_are_told_apart_and_nothing_is_lost() {
        for (text, version) in [
            (&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], Version::Two),
            (b"GET / HTTP/1.1\r\n\r\n", Version::One),
            (b"PUT / HTTP/1.1\r\n\r\n", Version::One),
            (b"PROPFIND / HTTP/1.1\r\n\r\n", Version::One),
            (b"PR", Version::One),
            (b"", Version::One),
            (b"\x16\x03\x01", Version::One),
        ] {
            // Whole, and a byte at a time.
            for piece in [text.len().max(1), 1] {
                let (mut client, server) = tokio::io::duplex(piece);
                let sent = text.to_vec();
                let writer = tokio::spawn(async move { client.write_all(&sent).await });
                let (found, mut stream) = Prefixed::sniff(server).await.unwrap();
                assert_eq!(found, version, "{text:?}");
                let mut all = Vec::new();
                stream.read_to_end(&mut all).await.unwrap();
                assert_eq!(all, text);
                writer.await.unwrap().unwrap();
            }
        }
    }
}
