//! The line protocol of contestants, seen from inside of one: a process that is told on standard
//! input which pages to move, and says on standard output how long it took.
//!
//! `round PAGE PAGES WORD...` is answered with `seconds S`, and `check PAGE PAGES WORD...`, which
//! moves pages into cleared memory and compares what landed, with `right`. The words are the setting
//! of that round. Contestants in Python keep to the same (`bench/peers/contest.py`).

use crate::pages::{Outcome, are_there, clear, place};
use dsa_kernels::Mem;
use std::io::{BufRead as _, Write as _};
use std::time::Instant;

/// Moves pages.
pub(crate) trait Contestant {
    /// Where the pages land.
    fn memory(&self) -> &Mem;

    /// Seconds for the pages of a round.
    fn run(&mut self, page: u32, pages: u32, word: &str) -> Outcome<f64>;
}

/// Answers until the end of standard input.
pub(crate) fn contest(contestant: &mut dyn Contestant) -> Outcome<()> {
    let mut out = std::io::stdout();
    writeln!(out, "ready")?;
    out.flush()?;
    for line in std::io::stdin().lock().lines() {
        match answer(contestant, &line?) {
            Ok(answer) => writeln!(out, "{answer}")?,
            Err(error) => writeln!(out, "error {}", error.to_string().replace('\n', " "))?,
        }
        out.flush()?;
    }
    Ok(())
}

fn answer(contestant: &mut dyn Contestant, line: &str) -> Outcome<String> {
    let words: Vec<&str> = line.split(' ').collect();
    let [verb, page, pages, setting] = words[..] else {
        return Err(format!("want VERB PAGE PAGES SETTING, not {line:?}").into());
    };
    let (page, pages) = (page.parse()?, pages.parse()?);
    if verb == "round" {
        return Ok(format!("seconds {}", contestant.run(page, pages, setting)?));
    }
    clear(contestant.memory())?;
    contestant.run(page, pages, setting)?;
    match are_there(contestant.memory(), page, pages)? {
        true => Ok("right".to_owned()),
        false => Err("a page did not land".into()),
    }
}

/// One thread copies the pages inside the process, from one buffer to the same places of another.
pub(crate) struct PlainCopy {
    source: Vec<u8>,
    target: Mem,
}

impl PlainCopy {
    pub(crate) fn new(buffer: u64) -> Outcome<Self> {
        let (filled, target) = (crate::pages::memory(buffer)?, crate::pages::memory(buffer)?);
        crate::pages::fill(&filled)?;
        clear(&target)?; // so that no page is touched for the first time in a round
        let mut source = vec![0; usize::try_from(filled.len())?];
        filled.read(0, &mut source)?;
        Ok(Self { source, target })
    }
}

impl Contestant for PlainCopy {
    fn memory(&self) -> &Mem {
        &self.target
    }

    fn run(&mut self, page: u32, pages: u32, _: &str) -> Outcome<f64> {
        let begin = Instant::now();
        for n in 0..pages {
            let at = place(&self.target, n, page).offset;
            self.target.write(at, &self.source[at as usize..][..page as usize])?;
        }
        Ok(begin.elapsed().as_secs_f64())
    }
}
