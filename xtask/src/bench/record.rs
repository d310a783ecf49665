//! Records of benches: JSON files in `bench/record/<machine>/`.

use super::machine;
use crate::sh;
use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use std::fmt;
use std::path::{Path, PathBuf};

/// One measured number.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Figure {
    /// What was measured, such as `kv_pool.digest_gbps`.
    pub(super) name: String,
    /// The number.
    pub(super) value: f64,
    /// Its unit, such as `GB/s`.
    pub(super) unit: String,
}

impl Figure {
    /// The figure of a line `figure NAME VALUE UNIT`.
    pub(super) fn parse(line: &str) -> Option<Self> {
        let mut parts = line.trim().strip_prefix("figure ")?.split_whitespace();
        let name = parts.next()?.to_owned();
        let value = parts.next()?.parse().ok().filter(|value: &f64| value.is_finite())?;
        let unit = parts.collect::<Vec<_>>().join(" ");
        Some(Self { name, value, unit })
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "figure {} {} {}", self.name, self.value, self.unit)
    }
}

/// Figures with where and when they were measured.
#[derive(Debug)]
pub(super) struct Record {
    date: String,
    commit: String,
    rustc: String,
    processor: String,
    instructions: Vec<String>,
    cores: usize,
    /// The figures, in the order in which they were printed.
    pub(super) figures: Vec<Figure>,
}

impl Record {
    /// A record of `figures` that were just measured here.
    pub(super) fn now(figures: Vec<Figure>) -> Result<Self> {
        Ok(Self {
            date: machine::date(),
            commit: super::commit()?,
            rustc: sh::output(sh::command("rustc").arg("--version"))?.trim().to_owned(),
            processor: machine::processor(),
            instructions: machine::instructions(),
            cores: machine::cores(),
            figures,
        })
    }

    /// Writes the file and gives its path relative to the root; an older one of the same commit
    /// and day is replaced, except that figures which were not measured again stay.
    pub(super) fn write(&self) -> Result<PathBuf> {
        let has_avx512 = self.instructions.iter().any(|name| name == "avx512f");
        let folder = machine::folder(&self.processor, has_avx512, self.cores);
        let path = Path::new("bench/record").join(folder);
        let path = path.join(format!("{}-{}.json", self.date, self.commit));
        let full = sh::root().join(&path);
        let mut figures = if full.exists() { read(&full)? } else { Vec::new() };
        figures.retain(|old| self.figures.iter().all(|new| new.name != old.name));
        figures.extend(self.figures.iter().cloned());
        std::fs::create_dir_all(full.parent().context("a record lies in a folder")?)
            .context("create the folder of records")?;
        let text = serde_json::to_string_pretty(&self.to_json(&figures)).context("write JSON")?;
        std::fs::write(&full, text + "\n").with_context(|| format!("write {}", path.display()))?;
        Ok(path)
    }

    fn to_json(&self, figures: &[Figure]) -> Value {
        let figures: Vec<Value> = figures
            .iter()
            .map(|figure| json!({"name": figure.name, "value": figure.value, "unit": figure.unit}))
            .collect();
        json!({
            "date": self.date,
            "commit": self.commit,
            "rustc": self.rustc,
            "machine": {
                "processor": self.processor,
                "instructions": self.instructions,
                "cores": self.cores,
                "memory_mib": machine::memory_mib(),
            },
            "figures": figures,
        })
    }
}

/// Figures of a record file.
fn read(path: &Path) -> Result<Vec<Figure>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    let value: Value =
        serde_json::from_str(&text).with_context(|| format!("parse {}", path.display()))?;
    let figures = value["figures"].as_array();
    let figures = figures.with_context(|| format!("{} has no figures", path.display()))?;
    let figure = |value: &Value| {
        Some(Figure {
            name: value["name"].as_str()?.to_owned(),
            value: value["value"].as_f64()?,
            unit: value["unit"].as_str()?.to_owned(),
        })
    };
    let all: Option<Vec<Figure>> = figures.iter().map(figure).collect();
    all.with_context(|| format!("{}: a figure without name, value or unit", path.display()))
}

/// Prints the ratio of every figure that both records have; paths are files, or names below
/// `bench/record`.
pub(crate) fn compare(a: &Path, b: &Path) -> Result<()> {
    let (old, new) = (read(&find(a)?)?, read(&find(b)?)?);
    println!("{:<44} {:>12} {:>12} {:>8}  unit", "figure", "A", "B", "B / A");
    for line in table(&old, &new) {
        println!("{line}");
    }
    Ok(())
}

fn find(path: &Path) -> Result<PathBuf> {
    let record = sh::root().join("bench/record").join(path);
    let named = record.with_extension("json");
    let candidates = [path.to_path_buf(), sh::root().join(path), record, named];
    match candidates.into_iter().find(|path| path.is_file()) {
        Some(path) => Ok(path),
        None => bail!("there is no record {}", path.display()),
    }
}

fn table(old: &[Figure], new: &[Figure]) -> Vec<String> {
    let mut lines = Vec::new();
    for figure in new {
        let before = old.iter().find(|before| before.name == figure.name);
        lines.push(match before {
            Some(before) if before.unit == figure.unit => format!(
                "{:<44} {:>12.4} {:>12.4} {:>8.3}  {}",
                figure.name,
                before.value,
                figure.value,
                figure.value / before.value,
                figure.unit
            ),
            Some(before) => {
                format!("{:<44} units differ: {} and {}", figure.name, before.unit, figure.unit)
            }
            None => format!("{:<44} only in B: {} {}", figure.name, figure.value, figure.unit),
        });
    }
    for figure in old.iter().filter(|old| new.iter().all(|new| new.name != old.name)) {
        lines.push(format!("{:<44} only in A: {} {}", figure.name, figure.value, figure.unit));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(name: &str, value: f64, unit: &str) -> Figure {
        Figure { name: name.into(), value, unit: unit.into() }
    }

    #[test]
    fn figure_lines_are_parsed_and_others_are_not() {
        let parsed = Figure::parse("figure kv_pool.digest 12.5 GB/s").unwrap();
        assert_eq!(parsed, figure("kv_pool.digest", 12.5, "GB/s"));
        assert_eq!(Figure::parse(&parsed.to_string()), Some(parsed));
        for line in
            ["", "figure", "figure x", "figure x y GB/s", "figure x NaN s", "a figure x 1 s"]
        {
            assert_eq!(Figure::parse(line), None, "{line}");
        }
    }

    #[test]
    fn a_comparison_shows_ratios_and_what_only_one_side_has() {
        let old = [figure("a", 2.0, "s"), figure("b", 1.0, "s"), figure("c", 1.0, "s")];
        let new = [figure("a", 3.0, "s"), figure("c", 1.0, "GB/s"), figure("d", 1.0, "s")];
        let lines = table(&old, &new);
        assert_eq!(lines.len(), 4);
        assert!(lines[0].contains("1.500"), "{}", lines[0]);
        assert!(lines[1].contains("units differ"));
        assert!(lines[2].contains("only in B"));
        assert!(lines[3].contains("only in A"));
    }

    #[test]
    fn a_record_is_read_back() {
        let record = Record {
            date: "2026-01-02".into(),
            commit: "abc".into(),
            rustc: "rustc".into(),
            processor: "p".into(),
            instructions: vec!["avx2".into()],
            cores: 2,
            figures: vec![figure("a", 1.5, "s")],
        };
        let folder = std::env::temp_dir().join(format!("xtask-record-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("r.json");
        std::fs::write(&path, record.to_json(&record.figures).to_string()).unwrap();
        assert_eq!(read(&path).unwrap(), record.figures);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
