//! `ab faults`: injects the faults of a plan, with the protection off and on.

use super::{Lab, PLAN_FILE, Started, lines_of, read_plan, say, some_answer, summary, write_lines};
use ab::drive;
use ab::fault::{Fault, Injected, Part, Run};
use ab::metrics::Selector;
use ab::plan::Plan;
use ab::record::{self, Line};
use anyhow::{Context as _, Result, bail};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

/// The runs, one line each; their lines are in files beside.
pub(super) const RUNS_FILE: &str = "runs.jsonl";
/// What the test build counts of the fault itself.
const STRUCK: &str = "dsv4:injected_faults_total";

/// Whether a folder is of `ab faults`.
pub(super) fn is_of_faults(dir: &Path) -> bool {
    dir.join(RUNS_FILE).exists()
}

/// Reads what a folder has and writes its report.
pub(super) fn report_again(dir: &Path) -> Result<()> {
    let plan = read_plan(&dir.join(PLAN_FILE))?;
    let path = dir.join(RUNS_FILE);
    let text =
        std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let mut runs = Vec::new();
    for line in text.lines() {
        let run: Run =
            serde_json::from_str(line).with_context(|| format!("read {}", path.display()))?;
        let path = dir.join(format!("{}.jsonl", run.file));
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        let lines = record::read(&text).with_context(|| path.display().to_string())?;
        runs.push((run, lines));
    }
    let injected = Injected::new(&plan.faults, &runs);
    std::fs::write(dir.join("faults.md"), injected.markdown()).context("write faults.md")?;
    let complaints = injected.complaints();
    say(&format!("{}{}\n\n{}", injected.markdown(), complaints.join("\n"), injected.figures()));
    if !complaints.is_empty() {
        bail!("{} things are not as they should be", complaints.len());
    }
    Ok(())
}

/// Runs without a fault, by what they were run with.
type References = BTreeMap<(String, Vec<String>, String), Run>;

impl Lab {
    /// Runs all faults of the plan, or those that are named.
    pub(super) fn faults(mut self, only: &[String]) -> Result<()> {
        let faults = match only {
            [] => self.plan.faults.clone(),
            names => {
                let mut found = Vec::new();
                for name in names {
                    let fault = self.plan.fault(name)?.clone();
                    if !found.contains(&fault) {
                        found.push(fault);
                    }
                }
                found
            }
        };
        if faults.is_empty() {
            bail!("the plan has no [[fault]]");
        }
        let (mut references, mut runs) = (References::new(), String::new());
        for fault in &faults {
            for run in self.inject(fault, &mut references)? {
                runs += &serde_json::to_string(&run).context("write a run")?;
                runs.push('\n');
            }
            // What there is so far can be looked at if a later one fails.
            let path = self.out.join(RUNS_FILE);
            std::fs::write(&path, &runs).with_context(|| format!("write {}", path.display()))?;
        }
        report_again(&self.out)
    }

    /// All runs of one fault.
    fn inject(&mut self, fault: &Fault, references: &mut References) -> Result<Vec<Run>> {
        let mut runs = Vec::new();
        for cell in fault.strikes.iter().chain(&fault.spares) {
            let with = (cell.clone(), fault.flags.clone(), fault.hang_ups.to_string());
            let known = references.get(&with).cloned();
            let run = match known {
                Some(run) => Run { fault: fault.name.clone(), ..run },
                None => {
                    let file = format!("reference-{:02}", references.len());
                    self.run_fault((fault, Part::Reference), cell, (file, None))?
                }
            };
            references.insert(with, run.clone());
            runs.push(run);
        }
        let mut parts = Vec::new();
        parts.extend(fault.strikes.iter().map(|cell| (Part::Unprotected, cell)));
        parts.extend(fault.spares.iter().map(|cell| (Part::Elsewhere, cell)));
        if fault.is_fault() {
            parts.extend(fault.strikes.iter().map(|cell| (Part::Protected, cell)));
        }
        for (number, (part, cell)) in parts.into_iter().enumerate() {
            let file = format!("{}-{number:02}", fault.name);
            let is_held = |run: &&Run| run.part == Part::Reference && run.cell == *cell;
            let reference = runs.iter().find(is_held).map(|run| run.file.clone());
            runs.push(self.run_fault((fault, part), cell, (file, reference))?);
        }
        Ok(runs)
    }

    fn run_fault(
        &mut self,
        (fault, part): (&Fault, Part),
        cell: &str,
        (file, reference): (String, Option<String>),
    ) -> Result<Run> {
        let reference = reference.map(|file| self.out.join(format!("{file}.jsonl")));
        let reference = reference.map(|path| lines_of(&path, cell)).transpose()?;
        let against = (reference, fault.logprob_distance);
        let before = Plan { faults: Vec::new(), ..self.plan.clone() };
        self.plan.flags.extend(fault.flags.iter().cloned());
        if part != Part::Reference {
            self.plan.flags.extend(fault.injected(part == Part::Protected));
        }
        self.plan.workload.hang_ups = fault.hang_ups;
        say(&format!("{}, {part:?}: {cell}", fault.name));
        let asked = self.ask_all(cell, &file);
        (self.plan.flags, self.plan.workload) = (before.flags, before.workload);
        let (lines, seconds, metrics) = asked?;
        let sum =
            |selector: &Selector| metrics.iter().fold(0.0, |sum, page| sum + selector.sum(page));
        let caught = fault.selectors()?.iter().fold(0.0, |all, selector| all + sum(selector));
        let struck = sum(&STRUCK.parse().context("name of a counter")?);
        say(&format!("  {}; struck {struck}, caught {caught}", summary(&lines, &against, seconds)));
        let evidence = match part {
            Part::Protected => evidence(&self.out, &file, &fault.log)?,
            Part::Reference | Part::Unprotected | Part::Elsewhere => None,
        };
        let (fault, cell) = (fault.name.clone(), cell.to_owned());
        let seconds = seconds.as_secs_f64();
        Ok(Run { fault, part, cell, file, seconds, struck, caught, evidence })
    }

    /// Asks everything in a cell; what the servers say of themselves afterwards.
    fn ask_all(
        &self,
        cell: &str,
        file: &str,
    ) -> Result<(Vec<Line>, std::time::Duration, Vec<String>)> {
        let mut started = self.start(&self.plan.factors.cell(cell)?, file)?;
        let begun = Instant::now();
        let lines = started.ask(self, cell, 0..self.plan.workload.sessions)?;
        let seconds = begun.elapsed();
        some_answer(cell, &lines)?;
        write_lines(&self.out.join(format!("{file}.jsonl")), &lines)?;
        Ok((lines, seconds, self.metrics_of(&started)?))
    }

    fn metrics_of(&self, started: &Started) -> Result<Vec<String>> {
        let urls = started.servers.iter().flat_map(|servers| &servers.metrics);
        let key = self.api_key.as_deref();
        let page = |url: &String| -> Result<String> {
            let url = format!("{url}/metrics");
            match self.runtime.block_on(drive::get(&url, key))? {
                (200, text) => Ok(text),
                (status, text) => bail!("{url} answers {status}: {text}"),
            }
        };
        urls.map(page).collect::<Result<_>>().context("read the metrics")
    }
}

/// The first line of a run's logs that has all of some words.
fn evidence(dir: &Path, file: &str, words: &[String]) -> Result<Option<String>> {
    if words.is_empty() {
        return Ok(None);
    }
    let start = format!("{file}-");
    for entry in std::fs::read_dir(dir).with_context(|| format!("list {}", dir.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !name.starts_with(&start) || !name.ends_with(".log") {
            continue;
        }
        let text = std::fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        let text = String::from_utf8_lossy(&text).into_owned();
        let found = text.lines().find(|line| words.iter().all(|word| line.contains(word)));
        if let Some(line) = found {
            return Ok(Some(line.trim().to_owned()));
        }
    }
    Ok(None)
}
