//! The file that says what is run: workload, factors, and how a fault is told.

use crate::fault::{Fault, FaultError};
use crate::matrix::{Cell, Factor, Matrix, MatrixError};
use crate::workload::Workload;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What is run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Everything random follows from it.
    #[serde(default = "one")]
    pub seed: u64,
    /// Conversations at once, unless a level says otherwise.
    #[serde(default = "eight")]
    pub at_once: u32,
    /// Seconds that an answer may take; then it is lost.
    #[serde(default = "two_minutes")]
    pub answer_s: u32,
    /// Flags for our own servers in every cell.
    #[serde(default)]
    pub flags: Vec<String>,
    /// Any other answer than the first cell's is corruption: for servers that compute the same whatever
    /// else runs.
    #[serde(default)]
    pub same_answers: bool,
    /// What is asked.
    pub workload: Workload,
    /// What is varied.
    #[serde(rename = "factor")]
    pub factors: Matrix,
    /// Cells to run, as `factor=level,...`; all combinations if there are none.
    #[serde(default)]
    pub cells: Vec<String>,
    /// Faults to inject into the test build of our server.
    #[serde(default, rename = "fault")]
    pub faults: Vec<Fault>,
}

const fn one() -> u64 {
    1
}

const fn eight() -> u32 {
    8
}

const fn two_minutes() -> u32 {
    120
}

/// A plan that cannot be run.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// Not a plan.
    #[error("the plan cannot be read: {0}")]
    Malformed(String),
    /// Factors or cells that make no sense.
    #[error(transparent)]
    Matrix(#[from] MatrixError),
    /// A fault that cannot be looked for.
    #[error(transparent)]
    Fault(#[from] FaultError),
    /// A number out of range.
    #[error("{field} is {value}, and must be {wanted}")]
    Range {
        /// Which.
        field: &'static str,
        /// Given.
        value: String,
        /// Wanted.
        wanted: &'static str,
    },
}

/// Most conversations at a time.
const AT_ONCE_MAX: u32 = 10_000;
/// Most requests of a cell.
const ASKED_MAX: u64 = 1_000_000;
/// Longest prompts, tokens.
const TOKENS_MAX: u32 = 4_000_000;

impl Plan {
    /// Reads a plan in TOML and checks it.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn read(text: &str) -> Result<Self, PlanError> {
        let plan: Self =
            toml::from_str(text).map_err(|error| PlanError::Malformed(error.to_string()))?;
        plan.check()?;
        Ok(plan)
    }

    /// Checks what a plan says; [`Plan::read`] has done it, unless something was changed since.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn check(&self) -> Result<(), PlanError> {
        self.factors.check()?;
        let range = |field, value: String, wanted, fits: bool| {
            if fits { Ok(()) } else { Err(PlanError::Range { field, value, wanted }) }
        };
        let work = &self.workload;
        let positive = "1 or more";
        let at_once = (1..=AT_ONCE_MAX).contains(&self.at_once);
        range("at_once", self.at_once.to_string(), "from 1 to 10000", at_once)?;
        range("answer_s", self.answer_s.to_string(), positive, self.answer_s > 0)?;
        range("workload.sessions", work.sessions.to_string(), positive, work.sessions > 0)?;
        range("workload.turns", work.turns.to_string(), positive, work.turns > 0)?;
        // All answers of a cell are kept.
        let asked = u64::from(work.sessions) * u64::from(work.turns);
        let wanted = "at most 1000000";
        range("workload.sessions times turns", asked.to_string(), wanted, asked <= ASKED_MAX)?;
        let grows = work.tokens_first <= work.tokens_last;
        let last = work.tokens_last.to_string();
        range("workload.tokens_last", last.clone(), "tokens_first or more", grows)?;
        let fits = work.tokens_last <= TOKENS_MAX;
        range("workload.tokens_last", last, "at most 4000000", fits)?;
        let share = (0.0..=1.0).contains(&work.aborts);
        range("workload.aborts", work.aborts.to_string(), "from 0 to 1", share)?;
        let share = (0.0..=1.0).contains(&work.hang_ups);
        range("workload.hang_ups", work.hang_ups.to_string(), "from 0 to 1", share)?;
        self.cells()?;
        for (number, fault) in self.faults.iter().enumerate() {
            fault.check(&self.factors)?;
            if self.faults[..number].iter().any(|known| known.name == fault.name) {
                return Err(MatrixError::Twice(fault.name.clone()).into());
            }
        }
        Ok(())
    }

    /// The fault of a name.
    ///
    /// # Errors
    /// [`FaultError::Unknown`], with those that there are.
    pub fn fault(&self, name: &str) -> Result<&Fault, FaultError> {
        let known = || self.faults.iter().map(|fault| fault.name.clone()).collect();
        let found = self.faults.iter().find(|fault| fault.name == name);
        found.ok_or_else(|| FaultError::Unknown(name.to_owned(), known()))
    }

    /// The cells to run, the healthy one first.
    ///
    /// # Errors
    /// [`MatrixError::Cell`].
    pub fn cells(&self) -> Result<Vec<Cell>, MatrixError> {
        if self.cells.is_empty() {
            return Ok(self.factors.cells());
        }
        let named = self.cells.iter().map(|text| self.factors.cell(text));
        let mut cells = vec![self.factors.healthy()];
        for cell in named {
            let cell = cell?;
            if !cells.contains(&cell) {
                cells.push(cell);
            }
        }
        Ok(cells)
    }

    /// The levels of a cell by factor, for a report.
    #[must_use]
    pub fn levels(&self, cell: &Cell) -> BTreeMap<String, String> {
        let level =
            |factor: &Factor, level: usize| factor.levels.get(level).map(|l| l.name.clone());
        let levels = self.factors.0.iter().zip(&cell.0);
        levels.filter_map(|(f, &l)| Some((f.name.clone(), level(f, l)?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::Kind;

    const PLAN: &str = r#"
        same_answers = true
        cells = ["mode=pd", "index=bf16,mode=pd", "mode=pd"]
        [workload]
        kind = "agents"
        sessions = 60
        turns = 3
        tokens_first = 320
        tokens_last = 640
        model = "dsv4-mini"
        [[factor]]
        name = "index"
        levels = [{ name = "fp4" }, { name = "bf16", flags = ["--index-k-dtype", "bf16"] }]
        [[factor]]
        name = "mode"
        levels = [{ name = "unified" }, { name = "pd", topology = "pair" }]
    "#;

    #[test]
    fn a_plan_is_read_with_its_defaults() {
        let plan = Plan::read(PLAN).unwrap();
        assert_eq!((plan.seed, plan.at_once, plan.answer_s), (1, 8, 120));
        assert_eq!(plan.workload.kind, Kind::Agents);
        let names: Vec<String> =
            plan.cells().unwrap().iter().map(|cell| plan.factors.name(cell)).collect();
        assert_eq!(names, ["index=fp4,mode=unified", "index=fp4,mode=pd", "index=bf16,mode=pd"]);
        let all = Plan { cells: Vec::new(), ..plan };
        assert_eq!(all.cells().unwrap().len(), 4);
    }

    #[test]
    fn what_is_wrong_with_a_plan_is_named() {
        for (from, to, part) in [
            ("sessions = 60", "sessions = 0", "workload.sessions is 0"),
            ("sessions = 60", "sessions = 4000000000", "sessions times turns is 12000000000"),
            ("same_answers", "at_once = 4000000000\nsame_answers", "at_once is 4000000000"),
            ("tokens_last = 640", "tokens_last = 3", "workload.tokens_last is 3"),
            ("tokens_last = 640", "tokens_last = 4000001", "at most 4000000"),
            ("\"mode=pd\", ", "\"mode=x\", ", "no level \"x\""),
            ("kind = \"agents\"", "kind = \"x\"", "unknown variant"),
            ("model = \"dsv4-mini\"", "model = \"m\"\nhang_ups = 2.0", "hang_ups is 2"),
            ("same_answers", "same_answer", "unknown field"),
            ("model = \"dsv4-mini\"", "model = \"m\"\naborts = 2.0", "aborts is 2"),
        ] {
            let error = Plan::read(&PLAN.replace(from, to)).unwrap_err().to_string();
            assert!(error.contains(part), "{part:?} is not in {error:?}");
        }
    }
}
