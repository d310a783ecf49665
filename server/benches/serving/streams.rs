//! Streams of chat completions: processor time of our server for each token, beside that of plain
//! axum for the same bytes.

use super::{figure, percentile};
use anyhow::{Context as _, ensure};
use axum::body::Bytes;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Streams at once.
pub(super) const STREAMS: usize = 256;
/// Tokens of each.
pub(super) const TOKENS: usize = 300;
/// Time from one token of all streams to the next.
pub(super) const STEP: Duration = Duration::from_millis(20);
const ROUNDS: usize = 3;
/// Names a file with what the plain server sends.
const TRANSCRIPT: &str = "DSV4_BENCH_TRANSCRIPT";

/// Which server a child process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Ours, with one stream: to learn what it sends.
    One,
    /// Ours.
    Ours,
    /// Plain axum.
    Plain,
}

impl Mode {
    pub(super) fn of(arg: &str) -> Option<Self> {
        [Self::One, Self::Ours, Self::Plain].into_iter().find(|mode| mode.arg() == arg)
    }

    const fn arg(self) -> &'static str {
        match self {
            Self::One => "--one",
            Self::Ours => "--ours",
            Self::Plain => "--plain",
        }
    }

    /// What the plain server sends, event by event.
    pub(super) fn transcript(self) -> anyhow::Result<Option<Vec<Bytes>>> {
        if self != Self::Plain {
            return Ok(None);
        }
        let path = std::env::var_os(TRANSCRIPT).context("no transcript is named")?;
        let text = std::fs::read_to_string(path).context("read the transcript")?;
        Ok(Some(text.split_inclusive("\n\n").map(|event| Bytes::from(event.to_owned())).collect()))
    }
}

/// A server in a process of its own.
struct Server {
    child: Child,
    port: u16,
}

impl Server {
    fn start(mode: Mode, transcript: &std::path::Path) -> anyhow::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(mode.arg()).env(TRANSCRIPT, transcript);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("start a server")?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("stdout")?).read_line(&mut line)?;
        let port = line.trim().parse().context("the server's port")?;
        Ok(Self { child, port })
    }

    /// Seconds that its threads were on a processor.
    fn seconds(&self) -> anyhow::Result<f64> {
        let mut nanoseconds = 0;
        for task in std::fs::read_dir(format!("/proc/{}/task", self.child.id()))? {
            let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
            let first = text.split_whitespace().next().context("a number")?;
            nanoseconds += first.parse::<u64>()?;
        }
        Ok(nanoseconds as f64 / 1e9)
    }

    /// Asks for a stream.
    fn ask(&self) -> anyhow::Result<TcpStream> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        let body = r#"{"model":"dsv4-mini","stream":true,"max_tokens":1000,"messages":[{"role":"user","content":"hello"}]}"#;
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(body.as_bytes())?;
        Ok(stream)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The body of an answer in chunks.
fn unchunked(answer: &str) -> anyhow::Result<String> {
    let (head, mut rest) = answer.split_once("\r\n\r\n").context("an answer with a body")?;
    ensure!(head.starts_with("HTTP/1.1 200"), "{head}");
    let mut body = String::new();
    loop {
        let (size, tail) = rest.split_once("\r\n").context("a chunk")?;
        let size = usize::from_str_radix(size, 16)?;
        if size == 0 {
            return Ok(body);
        }
        body.push_str(tail.get(..size).context("a whole chunk")?);
        rest = tail.get(size + 2..).context("a next chunk")?;
    }
}

/// Events that a stream brought.
fn read_all(mut stream: TcpStream) -> anyhow::Result<usize> {
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer.matches("data: ").count())
}

/// Seconds on a processor that all streams cost a server, and the events that it sent.
fn load(mode: Mode, transcript: &std::path::Path) -> anyhow::Result<(f64, usize)> {
    let server = Server::start(mode, transcript)?;
    let before = server.seconds()?;
    let streams: Vec<TcpStream> =
        (0..STREAMS).map(|_| server.ask()).collect::<anyhow::Result<_>>()?;
    let readers: Vec<_> =
        streams.into_iter().map(|stream| std::thread::spawn(|| read_all(stream))).collect();
    let mut events = 0;
    for reader in readers {
        events += reader.join().map_err(|_| anyhow::anyhow!("a reader panicked"))??;
    }
    Ok((server.seconds()? - before, events))
}

pub(super) fn run() -> anyhow::Result<()> {
    let folder = std::env::temp_dir().join(format!("dsv4-serving-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let result = compare(&folder.join("transcript"));
    std::fs::remove_dir_all(&folder)?;
    result
}

fn compare(transcript: &std::path::Path) -> anyhow::Result<()> {
    let mut answer = String::new();
    Server::start(Mode::One, transcript)?.ask()?.read_to_string(&mut answer)?;
    let body = unchunked(&answer)?;
    let pieces = body.matches("data: ").count();
    ensure!(pieces >= TOKENS, "{pieces} events for {TOKENS} tokens");
    std::fs::write(transcript, &body)?;
    let (mut ours, mut plain) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        for (mode, seconds) in [(Mode::Ours, &mut ours), (Mode::Plain, &mut plain)] {
            let (took, events) = load(mode, transcript)?;
            ensure!(events == STREAMS * pieces, "{events} events, {pieces} of each stream");
            seconds.push(took);
        }
    }
    let (ours, plain) = (percentile(&mut ours, 50), percentile(&mut plain, 50));
    let tokens = (STREAMS * TOKENS) as f64;
    figure("http.tokens_per_core_s", tokens / ours, "tokens/s");
    figure("http.plain_axum_tokens_per_core_s", tokens / plain, "tokens/s");
    figure("http.share_of_axum", plain / ours, "ratio");
    Ok(())
}
