//! Faults that the test build of our server injects: where each strikes, and what its runs have shown.

use crate::matrix::{Cell, Matrix, MatrixError};
use crate::metrics::{BadSelector, Selector};
use crate::record::Line;
use crate::report::shown;
use crate::stats::Rate;
use crate::tally::Tally;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;

/// A fault, in a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// Its name, as the flag `--fault` has it.
    pub name: String,
    /// Cells in which it strikes.
    pub strikes: Vec<String>,
    /// Cells in which it is injected too, and has nothing to strike.
    #[serde(default)]
    pub spares: Vec<String>,
    /// The cell from which a search for its factors begins.
    #[serde(default)]
    pub bad: Option<String>,
    /// Counters of our server that say that it was caught, as `name{label="value"}`; of a fault without
    /// any only the cost of the protection is measured.
    #[serde(default)]
    pub counters: Vec<String>,
    /// Words of a line of the log that says what was caught.
    #[serde(default)]
    pub log: Vec<String>,
    /// More flags of our server, with and without it.
    #[serde(default)]
    pub flags: Vec<String>,
    /// Share of the clients that leave before the first piece of their answer.
    #[serde(default)]
    pub hang_ups: f64,
    /// Conversations of a search, instead of the plan's: a rare fault needs many.
    #[serde(default)]
    pub sessions: Option<u32>,
    /// It shows in log probabilities further than this from those without it, where words are the same.
    #[serde(default)]
    pub logprob_distance: Option<f64>,
}

/// A fault that cannot be looked for.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum FaultError {
    /// A plan has no such fault.
    #[error("the plan has no fault {0:?}; it has {list}", list = listed(.1))]
    Unknown(String, Vec<String>),
    /// No cell to look for it in.
    #[error("fault {0:?} strikes in no cell")]
    Nowhere(String),
    /// It does not say from where to search.
    #[error("fault {0:?} has no cell `bad` to begin a search from")]
    NoBad(String),
    /// A cell that there is not.
    #[error("fault {0:?}: {1}")]
    Cell(String, MatrixError),
    /// A counter that cannot be read.
    #[error("fault {0:?}: {1}")]
    Counter(String, BadSelector),
}

fn listed(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

impl Fault {
    /// Checks cells and counters.
    ///
    /// # Errors
    /// [`FaultError`].
    pub fn check(&self, factors: &Matrix) -> Result<(), FaultError> {
        if self.strikes.is_empty() {
            return Err(FaultError::Nowhere(self.name.clone()));
        }
        for cell in self.strikes.iter().chain(&self.spares).chain(&self.bad) {
            factors.cell(cell).map_err(|error| FaultError::Cell(self.name.clone(), error))?;
        }
        self.selectors().map(drop)
    }

    /// What counts that it was caught.
    ///
    /// # Errors
    /// [`FaultError::Counter`].
    pub fn selectors(&self) -> Result<Vec<Selector>, FaultError> {
        let read = |text: &String| {
            text.parse().map_err(|error| FaultError::Counter(self.name.clone(), error))
        };
        self.counters.iter().map(read).collect()
    }

    /// The cell to begin a search from.
    ///
    /// # Errors
    /// [`FaultError`].
    pub fn bad(&self, factors: &Matrix) -> Result<Cell, FaultError> {
        let bad = self.bad.as_ref().ok_or_else(|| FaultError::NoBad(self.name.clone()))?;
        factors.cell(bad).map_err(|error| FaultError::Cell(self.name.clone(), error))
    }

    /// Flags that inject it.
    #[must_use]
    pub fn injected(&self, is_protected: bool) -> Vec<String> {
        let protection = if is_protected { "on" } else { "off" };
        let words = ["--fault", &self.name, "--fault-protection", protection];
        words.into_iter().map(str::to_owned).collect()
    }

    /// Whether there is something to catch.
    #[must_use]
    pub const fn is_fault(&self) -> bool {
        !self.counters.is_empty()
    }
}

/// What a run is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// Nothing is injected: what the others are compared with.
    Reference,
    /// Injected where it strikes, with the protection off.
    Unprotected,
    /// The same where it has nothing to strike.
    Elsewhere,
    /// Injected where it strikes, with the protection on.
    Protected,
}

/// One run; its lines are in a file beside.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Fault that it is for.
    pub fault: String,
    /// What for.
    pub part: Part,
    /// Its cell.
    pub cell: String,
    /// File with its lines, and beginning of the names of its logs.
    pub file: String,
    /// How long it took.
    pub seconds: f64,
    /// Times that the fault struck.
    pub struck: f64,
    /// Times that something was caught.
    pub caught: f64,
    /// A line of the log that says so.
    pub evidence: Option<String>,
}

/// What the runs of one fault have shown.
#[derive(Clone, Debug, PartialEq)]
pub struct FaultReport {
    /// Its name.
    pub name: String,
    /// Corrupted answers with the protection off, where it strikes.
    pub unprotected: Rate,
    /// The same where it has nothing to strike.
    pub elsewhere: Rate,
    /// With the protection on.
    pub protected: Rate,
    /// Answers without it, none of which can be corrupted but by signs.
    pub reference: Rate,
    /// Times that it struck with the protection on.
    pub struck: f64,
    /// Times that something was caught then.
    pub caught: f64,
    /// Throughput that is lost: of the engine that catches it, or of a protection that has nothing to do.
    pub cost: Option<f64>,
    /// A line of the log.
    pub evidence: Option<String>,
    /// What is not as it should be.
    pub complaints: Vec<String>,
}

/// Rounds to what is worth saying.
fn share(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

impl FaultReport {
    /// From the runs of a fault, with their lines.
    #[must_use]
    pub fn new(fault: &Fault, runs: &[(Run, Vec<Line>)]) -> Self {
        let reference = |cell: &str| {
            runs.iter().find(|(run, _)| run.part == Part::Reference && run.cell == cell)
        };
        let rate = |part: Part| {
            let (mut corrupted, mut judged) = (0, 0);
            for (run, lines) in runs.iter().filter(|(run, _)| run.part == part) {
                let own = reference(&run.cell).filter(|_| part != Part::Reference);
                let own = own.map(|(_, lines)| lines.as_slice());
                let tally = Tally::compared(lines, own, fault.logprob_distance);
                (corrupted, judged) = (corrupted + tally.corrupted, judged + tally.judged());
            }
            Rate::new(corrupted, judged)
        };
        let sum = |number: fn(&Run) -> f64| {
            let protected = runs.iter().filter(|(run, _)| run.part == Part::Protected);
            protected.fold(0.0, |sum, (run, _)| sum + number(run))
        };
        // Answers that came, in the time that they took; also those that nobody waited for.
        let speed = |(run, lines): &(Run, Vec<Line>)| lines.len() as f64 / run.seconds.max(1e-3);
        let dear = if fault.is_fault() { Part::Protected } else { Part::Unprotected };
        let lost = runs.iter().filter(|(run, _)| run.part == dear).filter_map(|run| {
            let (with, without) = (speed(run), speed(reference(&run.0.cell)?));
            // Without a fault the reference is the one that is protected.
            Some(if fault.is_fault() { 1.0 - with / without } else { 1.0 - without / with })
        });
        let lost: Vec<f64> = lost.collect();
        let cost = (!lost.is_empty()).then(|| lost.iter().sum::<f64>() / lost.len() as f64);
        let evidence = runs.iter().find_map(|(run, _)| run.evidence.clone());
        let mut report = Self {
            name: fault.name.clone(),
            unprotected: rate(Part::Unprotected),
            elsewhere: rate(Part::Elsewhere),
            protected: rate(Part::Protected),
            reference: rate(Part::Reference),
            struck: sum(|run| run.struck),
            caught: sum(|run| run.caught),
            cost: cost.map(share),
            evidence,
            complaints: Vec::new(),
        };
        report.complaints = report.complain(fault);
        report
    }

    fn complain(&self, fault: &Fault) -> Vec<String> {
        let mut complaints = Vec::new();
        let mut mind = |is_wrong: bool, text: &str| {
            if is_wrong {
                complaints.push(format!("{}: {text}", self.name));
            }
        };
        mind(self.reference.hits > 0, "answers are corrupted without it");
        mind(self.elsewhere.hits > 0, "it shows where it has nothing to strike");
        if !fault.is_fault() {
            mind(self.unprotected.hits > 0, "answers change without the protection");
            return complaints;
        }
        mind(self.unprotected.hits == 0, "without the protection no answer showed it");
        mind(self.protected.trials == 0, "no answer was judged with the protection");
        mind(self.protected.hits > 0, "answers are corrupted in spite of the protection");
        mind(self.caught <= 0.0, "it was never caught");
        let has_line = self.evidence.is_some() || fault.log.is_empty();
        mind(!has_line, "no line of the log says what was caught");
        complaints
    }
}

/// What the runs of all faults have shown.
#[derive(Clone, Debug, PartialEq)]
pub struct Injected {
    /// Fault by fault, in the order of the plan.
    pub faults: Vec<FaultReport>,
    judged: u64,
    corrupted: u64,
}

impl Injected {
    /// From all runs; a reference counts once, however many faults were compared with it.
    #[must_use]
    pub fn new(faults: &[Fault], runs: &[(Run, Vec<Line>)]) -> Self {
        let of = |fault: &Fault| -> Vec<(Run, Vec<Line>)> {
            runs.iter().filter(|(run, _)| run.fault == fault.name).cloned().collect()
        };
        let reports = faults.iter().map(|fault| (fault, of(fault)));
        let reports = reports.filter(|(_, runs)| !runs.is_empty());
        let faults: Vec<FaultReport> =
            reports.map(|(fault, runs)| FaultReport::new(fault, &runs)).collect();
        let mut seen = std::collections::BTreeSet::new();
        let references = runs.iter().filter(|(run, _)| run.part == Part::Reference);
        let references = references.filter(|(run, _)| seen.insert(run.file.clone()));
        let own = references.map(|(_, lines)| Tally::new(lines, None));
        let own = own.fold((0, 0), |sum, t| (sum.0 + t.judged(), sum.1 + t.corrupted));
        let judged = own.0 + faults.iter().map(|fault| fault.protected.trials).sum::<u64>();
        let corrupted = own.1 + faults.iter().map(|fault| fault.protected.hits).sum::<u64>();
        Self { faults, judged, corrupted }
    }

    /// What is not as it should be.
    #[must_use]
    pub fn complaints(&self) -> Vec<String> {
        self.faults.iter().flat_map(|fault| fault.complaints.clone()).collect()
    }

    /// A table, and what the logs said.
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut text = String::from(
            "| fault | corrupted, protection off | elsewhere | corrupted, protection on | struck | \
             caught | throughput lost |\n|---|---|---|---|---|---|---|\n",
        );
        let rate = |rate: &Rate| {
            if rate.trials == 0 {
                return "-".to_owned();
            }
            format!("{} of {}: {}", rate.hits, rate.trials, shown(rate))
        };
        for fault in &self.faults {
            let cost = fault.cost.map_or("-".to_owned(), |cost| format!("{:.1} %", 100.0 * cost));
            // Writing to a string does not fail.
            let _ = writeln!(
                text,
                "| {} | {} | {} | {} | {} | {} | {cost} |",
                fault.name,
                rate(&fault.unprotected),
                rate(&fault.elsewhere),
                rate(&fault.protected),
                fault.struck,
                fault.caught,
            );
        }
        text.push('\n');
        for fault in &self.faults {
            if let Some(line) = &fault.evidence {
                let _ = writeln!(text, "{}: `{line}`", fault.name);
            }
        }
        text
    }

    /// Figures, a line each.
    #[must_use]
    pub fn figures(&self) -> String {
        let mut text = format!(
            "figure ab.judged.protected {} answers\nfigure ab.corrupted.protected {} answers\n",
            self.judged, self.corrupted
        );
        for fault in &self.faults {
            let (name, value) = (&fault.name, share(fault.unprotected.value()));
            let is_fault = fault.protected.trials > 0;
            if is_fault {
                let _ = writeln!(text, "figure ab.rate.{name}.unprotected {value} fraction");
                let _ = writeln!(text, "figure ab.caught.{name} {} count", fault.caught);
            }
            if fault.elsewhere.trials > 0 {
                let value = share(fault.elsewhere.value());
                let _ = writeln!(text, "figure ab.rate.{name}.elsewhere {value} fraction");
            }
            if let Some(cost) = fault.cost {
                let name = if is_fault { name } else { "protection" };
                let _ = writeln!(text, "figure ab.cost.{name} {cost} fraction");
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::{Factor, Level};

    fn factors() -> Matrix {
        let level = |name: &str| Level { name: name.to_owned(), ..Level::default() };
        let levels = vec![level("unified"), level("pd")];
        Matrix(vec![Factor { name: "mode".to_owned(), levels }])
    }

    fn fault() -> Fault {
        Fault {
            name: "carry_missing".to_owned(),
            strikes: vec!["mode=pd".to_owned()],
            spares: vec!["mode=unified".to_owned()],
            bad: None,
            counters: vec!["c{event=\"mismatch\"}".to_owned()],
            log: vec!["peer".to_owned()],
            flags: Vec::new(),
            hang_ups: 0.0,
            sessions: None,
            logprob_distance: None,
        }
    }

    /// Answers of which the first ones say something else.
    fn lines(count: u32, others: u32) -> Vec<Line> {
        let one = |session| Line::of(session, if session < others { "b" } else { "a" }, "a");
        (0..count).map(one).collect()
    }

    fn run(part: Part, cell: &str, seconds: f64, caught: f64) -> Run {
        let protected = part == Part::Protected;
        Run {
            fault: "carry_missing".to_owned(),
            part,
            cell: cell.to_owned(),
            file: format!("{cell}-{part:?}"),
            seconds,
            struck: 9.0,
            caught,
            evidence: protected.then(|| "a page, peer=x".to_owned()),
        }
    }

    fn runs(unprotected: u32, elsewhere: u32, protected: u32) -> Vec<(Run, Vec<Line>)> {
        vec![
            (run(Part::Reference, "mode=pd", 10.0, 0.0), lines(20, 0)),
            (run(Part::Reference, "mode=unified", 10.0, 0.0), lines(20, 0)),
            (run(Part::Unprotected, "mode=pd", 10.0, 0.0), lines(20, unprotected)),
            (run(Part::Elsewhere, "mode=unified", 10.0, 0.0), lines(20, elsewhere)),
            (run(Part::Protected, "mode=pd", 12.5, 7.0), lines(20, protected)),
        ]
    }

    #[test]
    fn figures_follow_from_the_lines_of_the_runs() {
        let injected = Injected::new(&[fault()], &runs(5, 0, 0));
        assert_eq!(injected.complaints(), Vec::<String>::new());
        assert_eq!(
            injected.figures(),
            "figure ab.judged.protected 60 answers\n\
             figure ab.corrupted.protected 0 answers\n\
             figure ab.rate.carry_missing.unprotected 0.25 fraction\n\
             figure ab.caught.carry_missing 7 count\n\
             figure ab.rate.carry_missing.elsewhere 0 fraction\n\
             figure ab.cost.carry_missing 0.2 fraction\n"
        );
        let table = injected.markdown();
        assert!(table.contains("| carry_missing | 5 of 20: 25.00 % ["), "{table}");
        assert!(table.contains("a page, peer=x"), "{table}");
    }

    #[test]
    fn what_is_not_as_it_should_be_is_said() {
        let said =
            |runs: &[(Run, Vec<Line>)]| Injected::new(&[fault()], runs).complaints().join(";");
        assert!(said(&runs(0, 0, 0)).contains("no answer showed it"));
        assert!(said(&runs(5, 1, 0)).contains("nothing to strike"));
        assert!(said(&runs(5, 0, 1)).contains("in spite of the protection"));
        let mut silent = runs(5, 0, 0);
        (silent[4].0.caught, silent[4].0.evidence) = (0.0, None);
        let text = said(&silent);
        assert!(text.contains("never caught") && text.contains("no line of the log"), "{text}");
        let mut empty = runs(5, 0, 0);
        empty[4].1.clear();
        assert!(said(&empty).contains("no answer was judged"));
    }

    #[test]
    fn the_cost_of_a_protection_that_has_nothing_to_do_is_that_of_the_reference() {
        let none = Fault { counters: Vec::new(), log: Vec::new(), ..fault() };
        let mut all = runs(0, 0, 0);
        all.retain(|(run, _)| run.part != Part::Protected && run.part != Part::Elsewhere);
        all[0].0.seconds = 12.5;
        let injected = Injected::new(&[none], &all);
        assert_eq!(injected.complaints(), Vec::<String>::new());
        assert!(injected.figures().contains("figure ab.cost.protection 0.2 fraction"));
        assert!(!injected.figures().contains("ab.rate"));
    }

    #[test]
    fn what_is_wrong_with_a_fault_is_named() {
        assert_eq!(fault().check(&factors()), Ok(()));
        let nowhere = Fault { strikes: Vec::new(), ..fault() };
        let strange = Fault { spares: vec!["mode=x".to_owned()], ..fault() };
        let uncounted = Fault { counters: vec!["a{".to_owned()], ..fault() };
        for (fault, part) in [(nowhere, "no cell"), (strange, "\"x\""), (uncounted, "a{")] {
            let error = fault.check(&factors()).unwrap_err().to_string();
            assert!(error.contains(part), "{part:?} is not in {error:?}");
        }
        assert!(matches!(fault().bad(&factors()), Err(FaultError::NoBad(_))));
        assert_eq!(
            fault().injected(false),
            ["--fault", "carry_missing", "--fault-protection", "off"]
        );
    }
}
