//! `ab bisect`: runs the cells that tell which factors a fault needs.

use super::{Lab, some_answer, write_lines};
use ab::matrix::{Bisection, Cell, Conclusion, Finding};
use ab::record::Line;
use ab::report::shown;
use ab::stats::Rate;
use ab::tally::{Pairs, Tally};
use anyhow::{Context as _, Result, bail};
use std::path::{Path, PathBuf};

/// Where a search keeps the lines of its cells, the healthy one first.
fn search_file(dir: &Path, number: usize) -> PathBuf {
    dir.join(format!("bisect-{number:02}.jsonl"))
}

/// Whether a folder is of `ab bisect`.
pub(super) fn is_of_search(dir: &Path) -> bool {
    search_file(dir, 0).exists()
}

impl Lab {
    /// A search between the healthy cell and a bad one, perhaps with a fault of the plan.
    pub(super) fn search(mut self, bad: Option<&str>, fault: Option<&str>) -> Result<()> {
        let fault = fault.map(|name| self.plan.fault(name).cloned()).transpose()?;
        let factors = &self.plan.factors;
        let bad = match (bad, &fault) {
            (Some(bad), _) => factors.cell(bad)?,
            (None, Some(fault)) => fault.bad(factors)?,
            (None, None) => bail!("no bad cell is named"),
        };
        if let Some(fault) = fault {
            if let Some(sessions) = fault.sessions.filter(|_| !self.is_told_sessions) {
                self.plan.workload.sessions = sessions;
            }
            self.plan.flags.extend(fault.flags.iter().cloned().chain(fault.injected(false)));
        }
        self.bisect(bad)
    }

    /// Runs cells until it is clear which factors the fault needs.
    fn bisect(&self, bad: Cell) -> Result<()> {
        let factors = &self.plan.factors;
        let healthy = factors.healthy();
        if healthy == bad {
            bail!("the bad cell is the healthy one: every factor has its first level");
        }
        let sessions = 0..self.plan.workload.sessions;
        let name = factors.name(&healthy);
        println!("{name} (healthy)");
        let reference = self.start(&healthy, "cell-00")?.ask(self, &name, sessions)?;
        write_lines(&search_file(&self.out, 0), &reference)?;
        some_answer(&name, &reference)?;
        let words = |factors: &[usize]| self.plan.factors.words(&bad, factors);
        let mut search = Bisection::new(healthy.clone(), bad.clone());
        let own = Tally::new(&reference, None);
        println!("  not right: {}", shown(&own.failure()));
        let is_clean = own.corrupted == 0;
        search.handle_finding(healthy, if is_clean { Finding::Clean } else { Finding::Bad });
        let (mut rate, mut number) = (None, 0);
        while let Some(cell) = search.poll_cell() {
            number += 1;
            let (finding, seen) = self.find((&cell, number), &reference, rate)?;
            if number == 1 && finding == Finding::Unclear {
                bail!(
                    "the bad cell has shown neither that it is worse than the healthy one nor that it \
                     is not: more sessions may tell"
                );
            }
            rate = rate.or(Some(seen));
            search.handle_finding(cell, finding);
        }
        let conclusion = search.poll_conclusion().context("the search ended without a word")?;
        println!("\n{}", said(&conclusion, &words));
        Ok(())
    }

    /// Runs a cell until it is clear whether the fault shows there, at most through the whole workload.
    /// `rate` is how often it showed in the bad cell.
    fn find(
        &self,
        (cell, number): (&Cell, usize),
        reference: &[Line],
        rate: Option<f64>,
    ) -> Result<(Finding, f64)> {
        let name = self.plan.factors.name(cell);
        println!("{name}");
        let is_alike = self.plan.are_alike(cell, &self.plan.factors.healthy());
        let alike = Alike { answers: is_alike, distance: self.plan.logprob_distance };
        let mut started = self.start(cell, &format!("cell-{number:02}"))?;
        let (all, step) = (self.plan.workload.sessions, started.at_once.max(16));
        let mut lines: Vec<Line> = Vec::new();
        let mut from = 0;
        while from < all {
            let to = all.min(from.saturating_add(step));
            lines.extend(started.ask(self, &name, from..to)?);
            from = to;
            let (finding, seen) = judge_cell(&lines, reference, &alike, rate);
            if finding != Finding::Unclear || from == all {
                write_lines(&search_file(&self.out, number), &lines)?;
                some_answer(&name, &lines)?;
                let held = alike.answers.then_some(reference);
                let tally = Tally::compared(&lines, held, alike.distance);
                println!(
                    "  {} after {} answers; not right: {}",
                    finding.name(),
                    tally.judged(),
                    shown(&tally.failure())
                );
                return Ok((finding, seen));
            }
        }
        Ok((Finding::Unclear, 0.0))
    }
}

fn said(conclusion: &Conclusion, words: &dyn Fn(&[usize]) -> String) -> String {
    match conclusion {
        Conclusion::Needs(factors) => format!("the fault needs: {}", words(factors)),
        Conclusion::AnyOf(factors) => {
            format!("any of these alone brings the fault: {}", words(factors))
        }
        Conclusion::NothingToFind(why) => (*why).to_owned(),
        Conclusion::Open(factors) if factors.is_empty() => {
            "undecided: more sessions may tell".to_owned()
        }
        Conclusion::Open(factors) => {
            format!("undecided, but these are needed: {}", words(factors))
        }
    }
}

/// What a cell must have in common with the healthy one.
struct Alike {
    /// The same answers.
    answers: bool,
    /// Log probabilities that are no further from its in the mean.
    distance: Option<f64>,
}

/// Whether a fault shows in the lines of a cell.
fn judge_cell(
    lines: &[Line],
    reference: &[Line],
    alike: &Alike,
    rate: Option<f64>,
) -> (Finding, f64) {
    let tally = Tally::compared(lines, alike.answers.then_some(reference), alike.distance);
    let pairs = Pairs::new(lines, reference);
    let failure = tally.failure();
    let is_worse = pairs.only_first > pairs.only_second && pairs.p() < 0.05;
    if is_worse || (alike.answers && tally.corrupted > 0) {
        return (Finding::Bad, failure.value());
    }
    // Half of what the bad cell showed would have been seen: in signs, or in what is wrong here alone.
    let expected = rate.unwrap_or(0.02) / 2.0;
    let seen = Rate::new(pairs.only_first.max(tally.corrupted), tally.judged());
    if tally.corrupted == 0 && seen.high < expected.max(0.01) {
        return (Finding::Clean, failure.value());
    }
    (Finding::Unclear, failure.value())
}
