//! The file that says what is run: workload, factors, and how a fault is told.

use crate::fault::{Fault, FaultError};
use crate::matrix::{Cell, Factor, Matrix, MatrixError};
use crate::workload::{Kind, Workload};
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::fmt;

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
    /// Factors that change no answer, on servers that compute the same whatever else runs: another
    /// answer than that of the cell with the first levels of these is corruption.
    #[serde(default)]
    pub same_answers: SameAnswers,
    /// So are the same words with log probabilities that are further from that cell's, in the mean.
    #[serde(default)]
    pub logprob_distance: Option<f64>,
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

/// Factors that change no answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum SameAnswers {
    /// All of them, or none.
    All(bool),
    /// Those of these names.
    Of(Vec<String>),
}

impl Default for SameAnswers {
    fn default() -> Self {
        Self::All(false)
    }
}

impl SameAnswers {
    /// Whether a factor changes no answer.
    #[must_use]
    pub fn has(&self, factor: &str) -> bool {
        match self {
            Self::All(all) => *all,
            Self::Of(names) => names.iter().any(|name| name == factor),
        }
    }
}

impl<'de> Deserialize<'de> for SameAnswers {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = SameAnswers;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("true, false, or a list of factors")
            }
            fn visit_bool<E>(self, all: bool) -> Result<SameAnswers, E> {
                Ok(SameAnswers::All(all))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<SameAnswers, A::Error> {
                let mut names = Vec::new();
                while let Some(name) = list.next_element()? {
                    names.push(name);
                }
                Ok(SameAnswers::Of(names))
            }
        }
        input.deserialize_any(Either)
    }
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
        if self.cells.is_empty() {
            self.factors.check_count()?;
        }
        let at_once = (1..=AT_ONCE_MAX).contains(&self.at_once);
        range("at_once", self.at_once, "from 1 to 10000", at_once)?;
        range("answer_s", self.answer_s, "1 or more", self.answer_s > 0)?;
        check_workload(&self.workload)?;
        if let SameAnswers::Of(names) = &self.same_answers {
            let is_known = |name: &&String| self.factors.0.iter().any(|f| f.name == **name);
            if let Some(name) = names.iter().find(|name| !is_known(name)) {
                range("same_answers", format!("{name:?}"), "names of factors", false)?;
            }
        }
        if let Some(distance) = self.logprob_distance {
            let fits = distance >= 0.0 && distance.is_finite();
            range("logprob_distance", distance, "0 or more", fits)?;
            let wanted = "left out, or the workload to have logprobs = true";
            range("logprob_distance", distance, wanted, self.workload.logprobs)?;
        }
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

    /// The cells to run, the healthy one first, and each after the one that it is compared with.
    ///
    /// # Errors
    /// [`MatrixError::Cell`].
    pub fn cells(&self) -> Result<Vec<Cell>, MatrixError> {
        let named = self.cells.iter().map(|text| self.factors.cell(text));
        let wished = match self.cells.as_slice() {
            [] => self.factors.cells(),
            _ => named.collect::<Result<_, _>>()?,
        };
        let mut cells = vec![self.factors.healthy()];
        for cell in wished {
            for cell in self.reference(&cell).into_iter().chain([cell]) {
                if !cells.contains(&cell) {
                    cells.push(cell);
                }
            }
        }
        Ok(cells)
    }

    /// The cell whose answers another one must have, if there is one besides itself.
    #[must_use]
    pub fn reference(&self, cell: &Cell) -> Option<Cell> {
        let levels = self.factors.0.iter().zip(&cell.0);
        let levels =
            levels.map(|(f, &level)| if self.same_answers.has(&f.name) { 0 } else { level });
        Some(Cell(levels.collect())).filter(|reference| reference != cell)
    }

    /// Whether two cells must have the same answers.
    #[must_use]
    pub fn are_alike(&self, a: &Cell, b: &Cell) -> bool {
        let root = |cell: &Cell| self.reference(cell).unwrap_or_else(|| cell.clone());
        self.same_answers != SameAnswers::All(false) && root(a) == root(b)
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

fn range(
    field: &'static str,
    value: impl fmt::Display,
    wanted: &'static str,
    fits: bool,
) -> Result<(), PlanError> {
    if fits { Ok(()) } else { Err(PlanError::Range { field, value: value.to_string(), wanted }) }
}

fn check_workload(work: &Workload) -> Result<(), PlanError> {
    let shares = [("workload.aborts", work.aborts), ("workload.hang_ups", work.hang_ups)];
    for (field, share) in shares {
        range(field, share, "from 0 to 1", (0.0..=1.0).contains(&share))?;
    }
    if let Some(burst) = work.burst {
        let most = 86_400_000;
        range("workload.burst.size", burst.size, "1 or more", burst.size > 0)?;
        range("workload.burst.every_ms", burst.every_ms, "at most a day", burst.every_ms <= most)?;
    }
    let requests = work.requests.as_deref().unwrap_or("nothing");
    if work.kind == Kind::Replay {
        range("workload.requests", requests, "the file of a replay", work.requests.is_some())?;
        let made = "left out: a replay asks what was recorded";
        range("workload.turns", work.turns, made, work.turns == 0)?;
        return range("workload.tokens_last", work.tokens_last, made, work.tokens_last == 0);
    }
    range(
        "workload.requests",
        requests,
        "left out: only a replay has it",
        work.requests.is_none(),
    )?;
    range("workload.sessions", work.sessions, "1 or more", work.sessions > 0)?;
    range("workload.turns", work.turns, "1 or more", work.turns > 0)?;
    // All answers of a cell are kept.
    let asked = u64::from(work.sessions) * u64::from(work.turns);
    range("workload.sessions times turns", asked, "at most 1000000", asked <= ASKED_MAX)?;
    let (first, last) = (work.tokens_first, work.tokens_last);
    range("workload.tokens_last", last, "tokens_first or more", first <= last)?;
    range("workload.tokens_last", last, "from 1 to 4000000", (1..=TOKENS_MAX).contains(&last))?;
    range("workload.model", "empty", "the name of a model", !work.model.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn a_cell_is_compared_with_the_one_without_what_changes_no_answer() {
        let named = "same_answers = [\"mode\"]";
        let plan = Plan::read(&PLAN.replace("same_answers = true", named)).unwrap();
        let cell = |text: &str| plan.factors.cell(text).unwrap();
        let both = cell("index=bf16,mode=pd");
        assert_eq!(plan.reference(&both), Some(cell("index=bf16")));
        assert_eq!(plan.reference(&cell("index=bf16")), None);
        let names: Vec<String> =
            plan.cells().unwrap().iter().map(|cell| plan.factors.name(cell)).collect();
        let wanted = ["fp4,mode=unified", "fp4,mode=pd", "bf16,mode=unified", "bf16,mode=pd"];
        assert_eq!(names, wanted.map(|name| format!("index={name}")));
        assert!(plan.are_alike(&both, &cell("index=bf16")));
        assert!(!plan.are_alike(&both, &plan.factors.healthy()));
        let all = Plan { same_answers: SameAnswers::All(true), ..plan.clone() };
        assert!(all.are_alike(&both, &all.factors.healthy()));
        let none = Plan { same_answers: SameAnswers::All(false), ..plan.clone() };
        assert!(none.reference(&both).is_none() && !none.are_alike(&both, &both));
        // As it is written down and read again.
        assert_eq!(Plan::read(&toml::to_string(&plan).unwrap()).unwrap(), plan);
    }

    #[test]
    fn more_combinations_than_can_be_run_are_refused_before_they_are_made() {
        let levels = "levels = [{ name = \"x\" }, { name = \"y\" }]";
        let factors: String =
            (0..60).map(|n| format!("[[factor]]\nname = \"f{n}\"\n{levels}\n")).collect();
        let (head, _) = PLAN.split_once("[[factor]]").unwrap();
        let plan = |cells: &str| {
            let text = head.replace("[\"mode=pd\", \"index=bf16,mode=pd\", \"mode=pd\"]", cells);
            Plan::read(&format!("{text}{factors}"))
        };
        let error = plan("[]").unwrap_err().to_string();
        assert!(error.starts_with("60 factors have more than 4096 combinations"), "{error}");
        assert_eq!(plan("[\"f3=y\"]").unwrap().cells().unwrap().len(), 2);
    }

    #[test]
    fn what_is_wrong_with_a_plan_is_named() {
        for (from, to, part) in [
            ("sessions = 60", "sessions = 0", "workload.sessions is 0"),
            ("sessions = 60", "sessions = 4000000000", "sessions times turns is 12000000000"),
            ("same_answers", "at_once = 4000000000\nsame_answers", "at_once is 4000000000"),
            ("tokens_last = 640", "tokens_last = 3", "workload.tokens_last is 3"),
            ("tokens_last = 640", "tokens_last = 4000001", "from 1 to 4000000"),
            ("{ name = \"unified\" }", "{ name = \"a,b\" }", "\"a,b\" is empty or has a comma"),
            ("\"unified\" }", "\"pd\" }", "factor \"mode\" has two levels named \"pd\""),
            ("\"unified\" }", "\"u\", at_once = 0 }", "at_once of level \"u\" is 0"),
            ("\"unified\" }", "\"u\", url = \"host:1\" }", "url \"host:1\" is not http://"),
            ("\"unified\" }", "\"u\", url = \"http://h/v1\" }", "without the /v1 of a client"),
            ("turns = 3", "", "workload.turns is 0"),
            ("model = \"dsv4-mini\"", "", "workload.model is empty"),
            ("same_answers = true", "same_answers = 3", "true, false, or a list of factors"),
            ("same_answers = true", "same_answers = [\"x\"]", "same_answers is \"x\""),
            ("same_answers", "logprob_distance = 0.1\nsame_answers", "logprobs = true"),
            ("turns = 3", "turns = 3\nrequests = \"x\"", "only a replay has it"),
            ("turns = 3", "turns = 3\nburst = { size = 0, every_ms = 1 }", "burst.size is 0"),
            ("kind = \"agents\"", "kind = \"replay\"", "workload.requests is nothing"),
            ("\"agents\"", "\"replay\"\nrequests = \"x\"", "workload.turns is 3"),
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
