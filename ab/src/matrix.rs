//! Factors, their levels, and the cells of a matrix; which cell to run next to find the factor that a
//! fault needs.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One setting of a factor. What it leaves out stays as other factors have it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Level {
    /// Its name in reports.
    pub name: String,
    /// What a search calls it that has found it to be needed; `factor level` if it does not say.
    #[serde(default)]
    pub says: Option<String>,
    /// Flags for our own servers.
    #[serde(default)]
    pub flags: Vec<String>,
    /// Which of our processes there are.
    #[serde(default)]
    pub topology: Option<Topology>,
    /// Conversations at once.
    #[serde(default)]
    pub at_once: Option<u32>,
    /// Base address of a server that somebody else has started, instead of ours.
    #[serde(default)]
    pub url: Option<String>,
}

/// Which of our processes a configuration has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Topology {
    /// One worker that does all.
    #[default]
    Unified,
    /// A prefill and a decode worker in one process.
    Both,
    /// A prefill and a decode worker in two processes.
    Pair,
}

/// What is varied. The first level is the one that is believed to be healthy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Factor {
    /// Its name in reports.
    pub name: String,
    /// Its settings, at least two.
    pub levels: Vec<Level>,
}

/// A choice of one level for each factor, by position.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Cell(pub Vec<usize>);

/// What a cell is run with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Setup {
    /// Flags for our own servers, in the order of the factors.
    pub flags: Vec<String>,
    /// Which of our processes there are.
    pub topology: Topology,
    /// Conversations at once.
    pub at_once: u32,
    /// A server that somebody else has started.
    pub url: Option<String>,
}

/// A matrix that makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MatrixError {
    /// A factor that cannot vary.
    #[error("factor {0:?} has {1} levels, and needs two or more")]
    Levels(String, usize),
    /// Two things of one name.
    #[error("the name {0:?} is there twice")]
    Twice(String),
    /// Two levels of one name.
    #[error("factor {0:?} has two levels named {1:?}")]
    TwoLevels(String, String),
    /// A name that a cell cannot be written with.
    #[error("the name {0:?} is empty or has a comma, an equals sign, a bar or a line break")]
    Name(String),
    /// More combinations than anybody waits for.
    #[error("{0} factors have more than {CELLS_MAX} combinations: name `cells`, or fewer levels")]
    Cells(usize),
    /// A number of conversations that cannot be.
    #[error("factor {0:?}: at_once of level {1:?} is {2}, and must be from 1 to 10000")]
    AtOnce(String, String, u32),
    /// Not the address of a server.
    #[error(
        "factor {0:?}: url {1:?} is not http://HOST:PORT or https://HOST, without the /v1 of a client"
    )]
    Url(String, String),
    /// A cell that is written otherwise than `factor=level,...`.
    #[error("{0:?} is no cell: {1}")]
    Cell(String, String),
}

/// Most combinations.
const CELLS_MAX: usize = 4096;

fn check_name(name: &str) -> Result<(), MatrixError> {
    let is_bad = |c: char| matches!(c, ',' | '=' | '|') || c.is_control();
    if name.trim().is_empty() || name.contains(is_bad) {
        return Err(MatrixError::Name(name.to_owned()));
    }
    Ok(())
}

impl Level {
    fn check(&self, factor: &Factor) -> Result<(), MatrixError> {
        let of = || factor.name.clone();
        if let Some(at_once) = self.at_once.filter(|n| !(1..=10_000).contains(n)) {
            return Err(MatrixError::AtOnce(of(), self.name.clone(), at_once));
        }
        let Some(url) = &self.url else { return Ok(()) };
        let host = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
        let is_host = |host: &str| !host.is_empty() && !host.contains(char::is_whitespace);
        let path = url.trim_end_matches('/');
        if !host.is_some_and(is_host) || path.ends_with("/v1") || path.ends_with("/completions") {
            return Err(MatrixError::Url(of(), url.clone()));
        }
        Ok(())
    }
}

/// All that is varied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Matrix(pub Vec<Factor>);

impl Matrix {
    /// Checks names and levels.
    ///
    /// # Errors
    /// [`MatrixError`].
    pub fn check(&self) -> Result<(), MatrixError> {
        let mut names = BTreeMap::new();
        for factor in &self.0 {
            if factor.levels.len() < 2 {
                return Err(MatrixError::Levels(factor.name.clone(), factor.levels.len()));
            }
            let mut levels = BTreeMap::new();
            check_name(&factor.name)?;
            for level in &factor.levels {
                check_name(&level.name)?;
                if levels.insert(&level.name, ()).is_some() {
                    return Err(MatrixError::TwoLevels(factor.name.clone(), level.name.clone()));
                }
                level.check(factor)?;
            }
            if names.insert(&factor.name, ()).is_some() {
                return Err(MatrixError::Twice(factor.name.clone()));
            }
        }
        Ok(())
    }

    /// Refuses more combinations than can be run.
    ///
    /// # Errors
    /// [`MatrixError::Cells`].
    pub fn check_count(&self) -> Result<(), MatrixError> {
        let product = |all: usize, factor: &Factor| all.saturating_mul(factor.levels.len());
        let all = self.0.iter().fold(1, product);
        if all > CELLS_MAX { Err(MatrixError::Cells(self.0.len())) } else { Ok(()) }
    }

    /// The cell of all first levels.
    #[must_use]
    pub fn healthy(&self) -> Cell {
        Cell(vec![0; self.0.len()])
    }

    /// Every combination, the last factor first.
    #[must_use]
    pub fn cells(&self) -> Vec<Cell> {
        let mut cells = vec![Cell(Vec::new())];
        for factor in &self.0 {
            let with = |cell: &Cell| {
                let cell = cell.clone();
                (0..factor.levels.len()).map(move |level| {
                    let mut levels = cell.0.clone();
                    levels.push(level);
                    Cell(levels)
                })
            };
            cells = cells.iter().flat_map(with).collect();
        }
        cells
    }

    /// Reads `factor=level,factor=level`; factors that are not named have their first level.
    ///
    /// # Errors
    /// [`MatrixError::Cell`].
    pub fn cell(&self, text: &str) -> Result<Cell, MatrixError> {
        let wrong = |why: String| MatrixError::Cell(text.to_owned(), why);
        let mut cell = self.healthy();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (name, level) = part
                .split_once('=')
                .ok_or_else(|| wrong(format!("{part:?} is not factor=level")))?;
            let place = self.0.iter().position(|factor| factor.name == name);
            let place = place.ok_or_else(|| wrong(format!("there is no factor {name:?}")))?;
            let levels = &self.0[place].levels;
            let found = levels.iter().position(|known| known.name == level);
            cell.0[place] = found.ok_or_else(|| wrong(format!("{name} has no level {level:?}")))?;
        }
        Ok(cell)
    }

    /// Name of a cell: its levels.
    #[must_use]
    pub fn name(&self, cell: &Cell) -> String {
        let names = self.0.iter().zip(&cell.0).map(|(factor, level)| {
            let level = factor.levels.get(*level).map_or("?", |level| level.name.as_str());
            format!("{}={level}", factor.name)
        });
        names.collect::<Vec<_>>().join(",")
    }

    /// Levels of a cell in words: what they say of themselves, one after the other.
    #[must_use]
    pub fn words(&self, cell: &Cell, factors: &[usize]) -> String {
        let mut text = String::new();
        for &factor in factors {
            let level = cell.0.get(factor).zip(self.0.get(factor));
            let Some((level, factor)) = level.and_then(|(l, f)| Some((f.levels.get(*l)?, f)))
            else {
                continue;
            };
            let own = format!("{} {}", factor.name, level.name);
            let words = level.says.as_ref().unwrap_or(&own);
            match words.strip_prefix("of ") {
                Some(words) if text.is_empty() => text += words,
                Some(_) => text += &format!(" {words}"),
                None if text.is_empty() => text += words,
                None => text += &format!(", {words}"),
            }
        }
        text
    }

    /// What a cell is run with; of a thing that several factors say, the last one holds.
    #[must_use]
    pub fn setup(&self, cell: &Cell, at_once: u32) -> Setup {
        let mut setup = Setup { at_once, ..Setup::default() };
        for (factor, level) in self.0.iter().zip(&cell.0) {
            let Some(level) = factor.levels.get(*level) else { continue };
            setup.flags.extend(level.flags.iter().cloned());
            setup.topology = level.topology.unwrap_or(setup.topology);
            setup.at_once = level.at_once.unwrap_or(setup.at_once);
            setup.url = level.url.clone().or(setup.url);
        }
        setup
    }
}

/// What a cell has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finding {
    /// The fault shows.
    Bad,
    /// It does not.
    Clean,
    /// As many requests as there may be did not tell.
    Unclear,
}

impl Finding {
    /// Name in what is said.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bad => "bad",
            Self::Clean => "clean",
            Self::Unclear => "unclear",
        }
    }
}

/// What a search has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Conclusion {
    /// The fault needs these factors at the levels of the bad cell, all of them, and nothing else.
    Needs(Vec<usize>),
    /// Any of these factors alone, at the level of the bad cell, is enough.
    AnyOf(Vec<usize>),
    /// The bad cell was not bad, or the healthy one was.
    NothingToFind(&'static str),
    /// Cells that were unclear left it open; these are needed at least.
    Open(Vec<usize>),
}

/// The search for the factors that a fault needs: each is set back by itself in the bad cell. Those whose
/// going back makes it clean are needed; that they are enough is tried too.
#[derive(Clone, Debug)]
pub struct Bisection {
    healthy: Cell,
    bad: Cell,
    /// Factors in which the two differ.
    differ: Vec<usize>,
    known: BTreeMap<Cell, Finding>,
}

impl Bisection {
    /// A search between a cell that is thought to be healthy and one that is bad.
    #[must_use]
    pub fn new(healthy: Cell, bad: Cell) -> Self {
        let differ = (0..bad.0.len()).filter(|n| healthy.0.get(*n) != bad.0.get(*n)).collect();
        Self { healthy, bad, differ, known: BTreeMap::new() }
    }

    /// What a cell has shown.
    pub fn handle_finding(&mut self, cell: Cell, finding: Finding) {
        self.known.insert(cell, finding);
    }

    fn of(&self, cell: &Cell) -> Option<Finding> {
        self.known.get(cell).copied()
    }

    /// The bad cell with one factor set back.
    fn without(&self, factor: usize) -> Cell {
        let mut cell = self.bad.clone();
        cell.0[factor] = self.healthy.0[factor];
        cell
    }

    /// The healthy cell with these factors as in the bad one.
    fn with(&self, factors: &[usize]) -> Cell {
        let mut cell = self.healthy.clone();
        factors.iter().for_each(|&factor| cell.0[factor] = self.bad.0[factor]);
        cell
    }

    /// The cell that tells most now; none when the search is over.
    #[must_use]
    pub fn poll_cell(&self) -> Option<Cell> {
        self.next().err()
    }

    /// What was found; none while there are cells to run.
    #[must_use]
    pub fn poll_conclusion(&self) -> Option<Conclusion> {
        self.next().ok()
    }

    /// The conclusion, or the cell that is needed for it.
    fn next(&self) -> Result<Conclusion, Cell> {
        let found = |cell: &Cell| self.of(cell).ok_or_else(|| cell.clone());
        if found(&self.bad)? != Finding::Bad {
            return Ok(Conclusion::NothingToFind("the cell in question shows no fault"));
        }
        if found(&self.healthy)? == Finding::Bad {
            return Ok(Conclusion::NothingToFind("the fault shows in the healthy cell too"));
        }
        let (mut needed, mut open) = (Vec::new(), Vec::new());
        for &factor in &self.differ {
            match found(&self.without(factor))? {
                Finding::Clean => needed.push(factor),
                Finding::Bad => {}
                Finding::Unclear => open.push(factor),
            }
        }
        if !open.is_empty() {
            return Ok(Conclusion::Open(needed));
        }
        if needed.is_empty() {
            return self.single(&found);
        }
        match found(&self.with(&needed))? {
            Finding::Bad => Ok(Conclusion::Needs(needed)),
            // One of several others is needed beside them.
            Finding::Clean | Finding::Unclear => Ok(Conclusion::Open(needed)),
        }
    }

    /// None is needed: then more than one is enough by itself.
    fn single(&self, found: &dyn Fn(&Cell) -> Result<Finding, Cell>) -> Result<Conclusion, Cell> {
        let mut enough = Vec::new();
        for &factor in &self.differ {
            if found(&self.with(&[factor]))? == Finding::Bad {
                enough.push(factor);
            }
        }
        Ok(if enough.is_empty() { Conclusion::Open(enough) } else { Conclusion::AnyOf(enough) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix() -> Matrix {
        let level = |name: &str| Level { name: name.to_owned(), ..Level::default() };
        let factor = |name: &str, levels: &[&str]| Factor {
            name: name.to_owned(),
            levels: levels.iter().map(|name| level(name)).collect(),
        };
        Matrix(vec![
            factor("index", &["fp4", "fp8", "bf16"]),
            factor("mode", &["unified", "pd"]),
            factor("cache", &["off", "on"]),
            factor("load", &["1", "60"]),
        ])
    }

    /// Runs the search with a fault that shows where `is_bad` says.
    fn search(bad: &str, is_bad: impl Fn(&Cell) -> Finding) -> (Conclusion, usize) {
        let matrix = matrix();
        let mut bisection = Bisection::new(matrix.healthy(), matrix.cell(bad).unwrap());
        let mut runs = 0;
        while let Some(cell) = bisection.poll_cell() {
            let finding = is_bad(&cell);
            bisection.handle_finding(cell, finding);
            runs += 1;
            assert!(runs < 20, "it ends");
        }
        (bisection.poll_conclusion().expect("it is over"), runs)
    }

    fn bad_if(is_bad: bool) -> Finding {
        if is_bad { Finding::Bad } else { Finding::Clean }
    }

    const ALL: &str = "index=bf16,mode=pd,cache=on,load=60";

    #[test]
    fn the_factors_that_a_fault_needs_are_named() {
        let half_key = |cell: &Cell| bad_if(cell.0[0] == 2 && cell.0[1] == 1);
        assert_eq!(search(ALL, half_key), (Conclusion::Needs(vec![0, 1]), 7));
        let early = |cell: &Cell| bad_if(cell.0[0] == 2 && cell.0[1] == 1 && cell.0[3] == 1);
        assert_eq!(search(ALL, early).0, Conclusion::Needs(vec![0, 1, 3]));
        let cache = |cell: &Cell| bad_if(cell.0[2] == 1);
        assert_eq!(search(ALL, cache).0, Conclusion::Needs(vec![2]));
        assert_eq!(search("cache=on", cache).0, Conclusion::Needs(vec![2]));
    }

    #[test]
    fn faults_with_several_causes_are_told_as_such() {
        let either = |cell: &Cell| bad_if(cell.0[1] == 1 || cell.0[2] == 1);
        assert_eq!(search(ALL, either).0, Conclusion::AnyOf(vec![1, 2]));
        // Together with one of two others.
        let mixed = |cell: &Cell| bad_if(cell.0[0] == 2 && (cell.0[1] == 1 || cell.0[2] == 1));
        assert_eq!(search(ALL, mixed).0, Conclusion::Open(vec![0]));
    }

    #[test]
    fn a_search_without_a_fault_finds_none() {
        let never = |_: &Cell| Finding::Clean;
        assert!(matches!(search(ALL, never).0, Conclusion::NothingToFind(_)));
        let always = |_: &Cell| Finding::Bad;
        assert!(matches!(search(ALL, always).0, Conclusion::NothingToFind(_)));
        let unclear = |cell: &Cell| match cell.0.as_slice() {
            [2, 1, 1, 1] => Finding::Bad,
            [0, 0, 0, 0] => Finding::Clean,
            [0, ..] => Finding::Clean,
            _ => Finding::Unclear,
        };
        assert_eq!(search(ALL, unclear).0, Conclusion::Open(vec![0]));
    }

    #[test]
    fn cells_have_names_and_are_read_by_them() {
        let matrix = matrix();
        assert_eq!(matrix.check(), Ok(()));
        assert_eq!(matrix.cells().len(), 24);
        for cell in matrix.cells() {
            assert_eq!(matrix.cell(&matrix.name(&cell)), Ok(cell));
        }
        assert_eq!(matrix.cell(""), Ok(matrix.healthy()));
        for bad in ["mode", "mode=x", "x=pd"] {
            assert!(matches!(matrix.cell(bad), Err(MatrixError::Cell(..))), "{bad}");
        }
        let mut twice = matrix.clone();
        twice.0[1].levels[1].name = "unified".to_owned();
        assert_eq!(
            twice.check(),
            Err(MatrixError::TwoLevels("mode".to_owned(), "unified".to_owned()))
        );
        twice.0[1].levels.truncate(1);
        assert_eq!(twice.check(), Err(MatrixError::Levels("mode".to_owned(), 1)));
    }

    #[test]
    fn levels_say_what_they_are() {
        let mut matrix = matrix();
        matrix.0[0].levels[1].says = Some("PD hand-off".to_owned());
        matrix.0[1].levels[1].says = Some("of the index key, BF16".to_owned());
        let cell = Cell(vec![1, 1, 1, 1]);
        assert_eq!(matrix.words(&cell, &[0, 1]), "PD hand-off of the index key, BF16");
        assert_eq!(matrix.words(&cell, &[1]), "the index key, BF16");
        assert_eq!(matrix.words(&cell, &[0, 1, 3]), "PD hand-off of the index key, BF16, load 60");
        assert_eq!(matrix.words(&cell, &[2]), "cache on");
    }

    #[test]
    fn levels_add_up_to_a_setup() {
        let mut matrix = matrix();
        matrix.0[0].levels[2].flags = vec!["--index-k-dtype".to_owned(), "bf16".to_owned()];
        matrix.0[1].levels[1].topology = Some(Topology::Pair);
        matrix.0[2].levels[1].flags = vec!["--enable-hierarchical-cache".to_owned()];
        matrix.0[3].levels[1].at_once = Some(60);
        let setup = matrix.setup(&matrix.cell(ALL).unwrap(), 4);
        assert_eq!(setup.flags.join(" "), "--index-k-dtype bf16 --enable-hierarchical-cache");
        assert_eq!((setup.topology, setup.at_once, setup.url), (Topology::Pair, 60, None));
        assert_eq!(matrix.setup(&matrix.healthy(), 4).at_once, 4);
    }
}
