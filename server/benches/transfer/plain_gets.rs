//! A plain loop of UCX's gets as a contestant: the same library, pages, cores and two processes as
//! the UCX transport, but neither protocol, guard words nor digests.

use crate::contest::Contestant;
use crate::own::Source;
use crate::pages::{Outcome, READER_CORE, SOURCE_CORE, clear, fill, memory, pin, place};
use dsa_kernels::Mem;
use dsv4_server::glue::regions::PoolRegion;
use pd_transfer::ucx::plain::{PeerLoss, PlainGets};
use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

fn loss(word: &str) -> Outcome<PeerLoss> {
    match word {
        "reported" => Ok(PeerLoss::Reported),
        "unnoticed" => Ok(PeerLoss::Unnoticed),
        other => Err(format!("a lost peer is reported or unnoticed, not {other:?}").into()),
    }
}

/// The side that is read: lets UCX work until its input ends.
pub(crate) fn serve(word: &str, buffer: u64) -> Outcome<()> {
    pin(SOURCE_CORE)?;
    let memory = memory(buffer)?;
    fill(&memory)?;
    let side = PlainGets::new(Arc::new(PoolRegion(memory)), loss(word)?)?;
    let card = side.card()?.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}"); // a string takes everything
        text
    });
    let mut out = std::io::stdout();
    writeln!(out, "{card}")?;
    out.flush()?;
    let is_over = Arc::new(AtomicBool::new(false));
    let ends = Arc::clone(&is_over);
    let waits = std::thread::spawn(move || {
        // An input that can't be read has ended too.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        ends.store(true, Ordering::Relaxed);
    });
    while !is_over.load(Ordering::Relaxed) {
        side.progress();
    }
    waits.join().map_err(|_| "the thread that waits for the end panicked".into())
}

/// The side that reads.
pub(crate) struct Reader {
    side: PlainGets,
    memory: Mem,
    _source: Source,
}

impl Reader {
    pub(crate) fn new(word: &str, buffer: u64) -> Outcome<Self> {
        let source = Source::start(&["plain-source", word, &buffer.to_string()])?;
        pin(READER_CORE)?;
        let memory = memory(buffer)?;
        clear(&memory)?;
        let mut side = PlainGets::new(Arc::new(PoolRegion(memory.clone())), loss(word)?)?;
        let byte = |at| u8::from_str_radix(source.said.get(at..at + 2).unwrap_or("?"), 16);
        let card: Vec<u8> =
            (0..source.said.len()).step_by(2).map(byte).collect::<Result<_, _>>()?;
        side.connect(&card)?;
        Ok(Self { side, memory, _source: source })
    }
}

impl Contestant for Reader {
    fn memory(&self) -> &Mem {
        &self.memory
    }

    /// The word is how many gets are under way at once.
    fn run(&mut self, page: u32, pages: u32, word: &str) -> Outcome<f64> {
        let ranges: Vec<_> = (0..pages).map(|n| place(&self.memory, n, page)).collect();
        let outstanding = word.parse()?;
        let begin = Instant::now();
        self.side.get_all(&ranges, outstanding)?;
        Ok(begin.elapsed().as_secs_f64())
    }
}
