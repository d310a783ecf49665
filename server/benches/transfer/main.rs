//! Speed of the hand-off between two processes of this machine, pinned to different cores, from the
//! request to the last page verified, over each transport; beside NIXL, Mooncake, a plain loop of
//! UCX's gets and a plain copy of the same pages, all in one run.
//!
//! Arguments: names of contestants (`memcpy`, `shm`, `tcp`, `ucx`, `ucp_get`, `nixl`, `mooncake`,
//! `after_last_chunk`; all by default), `--no-peers` to leave NIXL and Mooncake out, `--quick` for a
//! look at whether everything works, `--bytes N` for pages of that many bytes only, `--rounds N`,
//! `--pace-ms N`.
//!
//! Every contestant moves the pages once into cleared memory, which is compared, and every setting of
//! it runs one round; the two fastest settings of each figure then alternate with those of all others,
//! round by round, and the better median is the figure. A contestant that is not there is a failure.
#![expect(clippy::print_stdout, reason = "figures are the output of a bench")]

mod after_last_chunk;
mod contest;
mod field;
mod own;
mod pages;
mod plain_gets;
mod process;
mod report;

use field::{Entry, Field};
use pages::{BUFFER, CASES, Outcome, QUICK_BUFFER, QUICK_CASES, READER_CORE, pin};
use pd_transfer::ucx;
use report::Report;
use std::collections::BTreeMap;

/// Contestants in the order in which they take turns.
const NAMES: [&str; 7] = ["memcpy", "shm", "tcp", "ucx", "ucp_get", "nixl", "mooncake"];
const PEERS: [&str; 2] = ["nixl", "mooncake"];
const AFTER_LAST_CHUNK: &str = "after_last_chunk";
/// Settings of a figure that take part in the measured rounds, and how near to the best a setting
/// has to come for that.
const FINALISTS: usize = 2;
const NEAR: f64 = 0.8;
/// Most bytes of the round that finds them.
const FIRST_ROUND: u32 = 1 << 30;

fn main() -> Outcome<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["source", transport, address, buffer] => own::serve(transport, address, buffer.parse()?),
        ["reader", transport, mode, buffer] => {
            contest::contest(&mut own::Reader::new(transport, mode, buffer.parse()?)?)
        }
        ["plain-source", loss, buffer] => plain_gets::serve(loss, buffer.parse()?),
        ["plain-reader", loss, buffer] => {
            contest::contest(&mut plain_gets::Reader::new(loss, buffer.parse()?)?)
        }
        ["memcpy", buffer] => {
            pin(READER_CORE)?;
            contest::contest(&mut contest::PlainCopy::new(buffer.parse()?)?)
        }
        ["prefill", ref rest @ ..] => after_last_chunk::serve(rest),
        _ => bench(&Options::read(&words)?),
    }
}

/// What the command line asks for.
struct Options {
    names: Vec<&'static str>,
    has_after_last_chunk: bool,
    is_quick: bool,
    page_bytes: Option<u64>,
    rounds: usize,
    pace_ms: u64,
}

impl Options {
    fn read(words: &[&str]) -> Outcome<Self> {
        let mut options = Self {
            names: Vec::new(),
            has_after_last_chunk: false,
            is_quick: words.contains(&"--quick"),
            page_bytes: None,
            rounds: 5,
            pace_ms: 60,
        };
        if options.is_quick {
            (options.rounds, options.pace_ms) = (1, 0);
        }
        let mut words = words.iter().copied().peekable();
        let mut has_peers = true;
        while let Some(word) = words.next() {
            let mut number = || {
                let text = words.next().ok_or_else(|| format!("{word} wants a number"))?;
                Ok::<u64, Box<dyn std::error::Error>>(text.parse()?)
            };
            match word {
                "--bench" | "--quick" => {} // cargo's own, and seen above
                "--no-peers" => has_peers = false,
                "--bytes" => options.page_bytes = Some(number()?),
                "--rounds" => options.rounds = usize::try_from(number()?)?.max(1),
                "--pace-ms" => options.pace_ms = number()?,
                AFTER_LAST_CHUNK => options.has_after_last_chunk = true,
                other => {
                    let name = NAMES.into_iter().find(|name| *name == other);
                    options.names.push(name.ok_or_else(|| format!("unknown word {other:?}"))?);
                }
            }
        }
        if options.names.is_empty() && !options.has_after_last_chunk {
            (options.names, options.has_after_last_chunk) = (NAMES.to_vec(), true);
        }
        if !has_peers {
            options.names.retain(|name| !PEERS.contains(name));
            println!("NIXL and Mooncake are left out, as asked");
        }
        Ok(options)
    }
}

fn bench(options: &Options) -> Outcome<()> {
    let (cases, buffer, tokens) = match options.is_quick {
        true => (&QUICK_CASES[..], QUICK_BUFFER, after_last_chunk::QUICK_TOKENS),
        false => (&CASES[..], BUFFER, after_last_chunk::TOKENS),
    };
    let mut cases = cases.to_vec();
    if let Some(bytes) = options.page_bytes {
        cases.retain(|(page, _)| u64::from(*page) == bytes);
        if cases.is_empty() {
            return Err(format!("no size of {bytes} bytes is measured").into());
        }
    }
    if options.names.iter().any(|name| ["ucx", "ucp_get"].contains(name)) {
        println!("UCX {}", ucx::version()?);
    }
    let mut report = Report::default();
    if options.has_after_last_chunk {
        after_last_chunk::measure(tokens, options.rounds, options.pace_ms, &mut report)?;
    }
    if !options.names.is_empty() {
        let mut field = Field::start(&options.names, buffer)?;
        for &(page, pages) in &cases {
            println!("\n{pages} pages of {page} bytes");
            for (figure, value) in case(&mut field, page, pages, options.rounds)? {
                let (name, words) = figure.split_once('.').unwrap_or((&figure, ""));
                let name = format!("{name}.{page}.{words}");
                report.say(name.trim_end_matches('.'), value, "GB/s");
            }
            report.compare(page);
        }
        field.stop()?;
    }
    let sizes: Vec<u32> = cases.iter().map(|(page, _)| *page).collect();
    report.table(&sizes);
    Ok(())
}

/// The figures of one size, in the order of the contestants.
fn case(field: &mut Field, page: u32, pages: u32, rounds: usize) -> Outcome<Vec<(String, f64)>> {
    let finalists = finalists(field, page, pages)?;
    let mut rates: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for _ in 0..rounds {
        for &number in &finalists {
            let Entry { process, words, .. } = &field.entries[number];
            let rate = field.processes[*process].round(page, pages, words)?;
            rates.entry(number).or_default().push(rate);
        }
    }
    let mut figures = Vec::new();
    for name in figure_names(&field.entries) {
        let of = rates.iter().filter(|(number, _)| field.entries[**number].figures.contains(&name));
        let medians = of.map(|(number, rates)| (median(rates), number));
        let Some((best, number)) = medians.max_by(|a, b| a.0.total_cmp(&b.0)) else { continue };
        println!("{name}: {best:.2} GB/s with {}", field.entries[*number].setting);
        figures.push((name, best));
    }
    Ok(figures)
}

/// Compares bytes, gives every setting one round, and takes the fastest of each figure.
fn finalists(field: &mut Field, page: u32, pages: u32) -> Outcome<Vec<usize>> {
    let mut rates = Vec::new();
    let slots = field.buffer / u64::from(page);
    for Entry { process, words, setting, figures, is_checked } in &field.entries {
        let process = &mut field.processes[*process];
        if *is_checked {
            // Each place once; the rest of a round brings the same again.
            process.check(page, pages.min(u32::try_from(slots)?), words)?;
        }
        let rate = process.round(page, pages.min(FIRST_ROUND / page), words)?;
        println!("first round: {} {rate:.2} GB/s, {setting}", figures.join(" "));
        rates.push(rate);
    }
    let mut finalists = Vec::new();
    for name in figure_names(&field.entries) {
        let of = |number: &usize| field.entries[*number].figures.contains(&name);
        let mut numbers: Vec<usize> = (0..rates.len()).filter(of).collect();
        numbers.sort_by(|a, b| rates[*b].total_cmp(&rates[*a]));
        let least = numbers.first().map_or(0.0, |best| rates[*best] * NEAR);
        numbers.retain(|number| rates[*number] >= least);
        finalists.extend(numbers.into_iter().take(FINALISTS));
    }
    finalists.sort_unstable();
    finalists.dedup();
    Ok(finalists)
}

fn figure_names(entries: &[Entry]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for name in entries.iter().flat_map(|entry| &entry.figures) {
        if !names.contains(name) {
            names.push(name.clone());
        }
    }
    names
}

fn median(rates: &[f64]) -> f64 {
    let mut rates = rates.to_vec();
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}
