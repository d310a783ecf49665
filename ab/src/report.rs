//! What a run has shown, as Markdown and as one page of HTML without anything from elsewhere.

use crate::judge::Verdict;
use crate::record::{Judged, Line, judged};
use crate::stats::{Rate, trials_to_see, trials_to_tell};
use crate::tally::{Pairs, Tally, quantile};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// What a cell was asked and said.
#[derive(Clone, Debug)]
pub struct CellLines {
    /// Its name.
    pub name: String,
    /// Its lines.
    pub lines: Vec<Line>,
    /// The place of the cell whose answers it must have, if there is one.
    pub reference: Option<usize>,
}

/// One cell of a report.
#[derive(Clone, Debug)]
pub struct CellReport {
    /// Its name.
    pub name: String,
    /// Its sums.
    pub tally: Tally,
    /// Against the first cell, request by request; none for the first.
    pub pairs: Option<Pairs>,
    /// Answers that were not right, by length of the prompt: least tokens, and the rate.
    pub by_length: Vec<(u64, Rate)>,
    /// The same by place in the conversation.
    pub by_turn: Vec<(u32, Rate)>,
    /// Microseconds to the first piece by length of the prompt, median and 95 of 100.
    pub first_by_length: Vec<(u64, (u64, u64))>,
}

/// A whole report.
#[derive(Clone, Debug)]
pub struct Report {
    /// Cells in the order of the plan, the healthy one first.
    pub cells: Vec<CellReport>,
    /// How to do it again.
    pub command: String,
}

/// Lengths of prompts that are told apart: powers of two.
fn length_class(tokens: u64) -> u64 {
    let floor = u64::BITS - 1 - tokens.max(1).leading_zeros();
    1 << floor
}

fn rates<K: Ord + Copy>(judged: &Judged<'_>, class: impl Fn(&Line) -> Option<K>) -> Vec<(K, Rate)> {
    let mut counts = BTreeMap::<K, (u64, u64)>::new();
    for (line, verdict) in judged.iter().filter(|(_, verdict)| verdict.is_judged()) {
        let Some(class) = class(line).filter(|_| !line.left) else { continue };
        let (bad, all) = counts.entry(class).or_default();
        *bad += u64::from(*verdict != Verdict::Right);
        *all += 1;
    }
    counts.into_iter().map(|(class, (bad, all))| (class, Rate::new(bad, all))).collect()
}

fn first_by_length(lines: &[Line]) -> Vec<(u64, (u64, u64))> {
    let mut times = BTreeMap::<u64, Vec<u64>>::new();
    for line in lines.iter().filter(|line| line.verdict.is_judged()) {
        if let (Some(tokens), Some(us)) = (line.prompt_tokens(), line.first_us) {
            times.entry(length_class(tokens)).or_default().push(us);
        }
    }
    let classes = times.into_iter().filter_map(|(class, mut times)| {
        times.sort_unstable();
        Some((class, (quantile(&times, 0.5)?, quantile(&times, 0.95)?)))
    });
    classes.collect()
}

impl Report {
    /// From the lines of each cell, the healthy one first. Another answer than that of a cell's reference
    /// is corruption, and so are log probabilities further from its than a distance, if one is given.
    #[must_use]
    pub fn new(cells: &[CellLines], logprob_distance: Option<f64>, command: &str) -> Self {
        let of = |cell: &CellLines| -> Option<&[Line]> { Some(&cells.get(cell.reference?)?.lines) };
        let first = cells.first().map(|cell| judged(&cell.lines, None, None));
        let cells = cells.iter().enumerate().map(|(number, cell)| {
            let all = judged(&cell.lines, of(cell), logprob_distance);
            CellReport {
                name: cell.name.clone(),
                tally: Tally::of(&all),
                pairs: first.as_ref().filter(|_| number > 0).map(|first| Pairs::of(&all, first)),
                by_length: rates(&all, |line| line.prompt_tokens().map(length_class)),
                by_turn: rates(&all, |line| Some(line.turn)),
                first_by_length: first_by_length(&cell.lines),
            }
        });
        Self { cells: cells.collect(), command: command.to_owned() }
    }

    /// Judged answers of all cells, and corrupted ones of these.
    #[must_use]
    pub fn total(&self) -> (u64, u64) {
        let add = |(judged, corrupted), cell: &CellReport| {
            (judged + cell.tally.judged(), corrupted + cell.tally.corrupted)
        };
        self.cells.iter().fold((0, 0), add)
    }

    /// A table for a terminal or a document.
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut text = String::from(
            "| cell | judged | right | wrong | corrupted | rate, 95 % | signs | refused | lost | left \
             | first ms, p50 / p95 | p against the first |\n\
             |---|---|---|---|---|---|---|---|---|---|---|---|\n",
        );
        for cell in &self.cells {
            let t = &cell.tally;
            let signs = t.signs.iter().map(|(sign, count)| format!("{} {count}", sign.name()));
            let signs = signs.collect::<Vec<_>>().join(", ");
            let ms = |share| {
                quantile(&t.first_us, share)
                    .map_or("-".to_owned(), |us| format!("{:.0}", us as f64 / 1e3))
            };
            let p = cell.pairs.map_or("-".to_owned(), |pairs| {
                let p = pairs.p();
                let p = if p < 1e-4 { format!("{p:.0e}") } else { format!("{p:.4}") };
                format!("{p} ({} : {})", pairs.only_first, pairs.only_second)
            });
            let rate = shown(&t.corruption());
            // Writing to a string does not fail.
            let _ = writeln!(
                text,
                "| {} | {} | {} | {} | {} | {rate} | {signs} | {} | {} | {} | {} / {} | {p} |",
                cell.name,
                t.judged(),
                t.right,
                t.wrong,
                t.corrupted,
                t.refused,
                t.lost,
                t.left,
                ms(0.5),
                ms(0.95),
            );
        }
        let (judged, corrupted) = self.total();
        let all = Rate::new(corrupted, judged);
        let _ =
            writeln!(text, "\n{corrupted} of {judged} judged answers corrupted: {}.", shown(&all));
        let _ = writeln!(text, "{}", power_note());
        let _ = writeln!(text, "Again: `{}`", self.command);
        text
    }

    /// One page with the table and plots.
    #[must_use]
    pub fn html(&self) -> String {
        let mut body = String::new();
        let rows = self.cells.iter().map(|cell| (cell.name.clone(), cell.tally.corruption()));
        body += &plot("Corrupted answers, with 95 % intervals", &rows.collect::<Vec<_>>());
        let rows = self.cells.iter().map(|cell| (cell.name.clone(), cell.tally.failure()));
        body += &plot("Answers that were not right", &rows.collect::<Vec<_>>());
        let times = |cell: &CellReport, sorted: &[u64]| {
            let of = |share| quantile(sorted, share);
            Some((cell.name.clone(), (of(0.5)?, of(0.95)?)))
        };
        let rows = self.cells.iter().filter_map(|cell| times(cell, &cell.tally.first_us));
        body += &plot_times("Time to the first piece", &rows.collect::<Vec<_>>());
        let rows = self.cells.iter().filter_map(|cell| times(cell, &cell.tally.took_us));
        body += &plot_times("Time to the end", &rows.collect::<Vec<_>>());
        for cell in &self.cells {
            let lengths = cell.by_length.iter();
            let class = |from: &u64| format!("{from} tokens and more");
            let lengths: Vec<_> = lengths.map(|(from, rate)| (class(from), *rate)).collect();
            let times = cell.first_by_length.iter();
            let times: Vec<_> = times.map(|(from, times)| (class(from), *times)).collect();
            let turns = cell.by_turn.iter();
            let turns: Vec<_> =
                turns.map(|(turn, rate)| (format!("request {}", turn + 1), *rate)).collect();
            let name = escaped(&cell.name);
            let _ = write!(body, "<details><summary>{name}</summary>");
            body += &plot("Not right, by length of the prompt", &lengths);
            body += &plot("Not right, by place in the conversation", &turns);
            body += &plot_times("Time to the first piece, by length of the prompt", &times);
            body += "</details>";
        }
        let table = table_of(&self.markdown());
        let command = escaped(&self.command);
        format!(
            "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width\">\
             <title>Corruption lab</title><style>{STYLE}</style>\
             <main><h1>Corruption lab</h1>{table}<p>{}</p>{body}\
             <p>Again: <code>{command}</code></p></main></html>\n",
            escaped(&power_note()),
        )
    }
}

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;margin:0;background:Canvas;color:CanvasText}\
    :root{color-scheme:light dark}main{max-width:1100px;margin:auto;padding:1rem}\
    table{border-collapse:collapse;display:block;overflow-x:auto}td,th{padding:.2rem .6rem;\
    border-bottom:1px solid #8885;text-align:left;font-variant-numeric:tabular-nums}\
    svg{width:100%;height:auto;max-width:900px}text{fill:CanvasText;font-size:12px}\
    .whisker{stroke:CanvasText}.bar{fill:#c33}.axis{stroke:#8888}";

/// A rate with its interval, in percent.
#[must_use]
pub fn shown(rate: &Rate) -> String {
    if rate.trials == 0 {
        return "-".to_owned();
    }
    let percent = |share: f64| format!("{:.2}", share * 100.0);
    format!("{} % [{}, {}]", percent(rate.value()), percent(rate.low), percent(rate.high))
}

/// How many answers tell a rate from none.
#[must_use]
pub fn power_note() -> String {
    let needs = [0.01, 0.03, 0.18].map(|rate| {
        let see = trials_to_see(rate).unwrap_or(0);
        let tell = trials_to_tell(rate).unwrap_or(0);
        format!("{:.0} %: {see} and {tell}", rate * 100.0)
    });
    format!(
        "Answers after which a rate has shown at least once, and after which two cells with the same \
         requests are told apart (95 %): {}.",
        needs.join(", ")
    )
}

pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The rows of a Markdown table as HTML.
fn table_of(markdown: &str) -> String {
    let rows = markdown.lines().filter(|line| line.starts_with('|') && !line.starts_with("|---"));
    let mut html = String::from("<table>");
    for (number, row) in rows.enumerate() {
        let tag = if number == 0 { "th" } else { "td" };
        html += "<tr>";
        for cell in row.trim_matches('|').split('|') {
            let _ = write!(html, "<{tag}>{}</{tag}>", escaped(cell.trim()));
        }
        html += "</tr>";
    }
    html + "</table>"
}

/// A bar with a whisker, as shares of the longest.
struct Bar {
    name: String,
    value: f64,
    low: f64,
    high: f64,
    said: String,
}

/// Rates with their intervals.
fn plot(title: &str, rows: &[(String, Rate)]) -> String {
    let most = rows.iter().map(|(_, rate)| rate.high).fold(0.02, f64::max);
    let bars = rows.iter().map(|(name, rate)| Bar {
        name: name.clone(),
        value: rate.value() / most,
        low: rate.low / most,
        high: rate.high / most,
        said: shown(rate),
    });
    bars_of(title, &bars.collect::<Vec<_>>(), &format!("{:.1} %", most * 100.0))
}

/// Medians in microseconds, and whiskers to what 95 of 100 do not exceed.
fn plot_times(title: &str, rows: &[(String, (u64, u64))]) -> String {
    let most = rows.iter().map(|(_, (_, high))| *high).fold(1, u64::max) as f64;
    let ms = |us: u64| us as f64 / 1e3;
    let bars = rows.iter().map(|(name, (median, high))| Bar {
        name: name.clone(),
        value: *median as f64 / most,
        low: *median as f64 / most,
        high: *high as f64 / most,
        said: format!("median {:.0} ms, 95 of 100 within {:.0} ms", ms(*median), ms(*high)),
    });
    bars_of(title, &bars.collect::<Vec<_>>(), &format!("{:.0} ms", most / 1e3))
}

fn bars_of(title: &str, bars: &[Bar], most: &str) -> String {
    const LEFT: f64 = 330.0;
    const WIDTH: f64 = 500.0;
    const ROW: f64 = 22.0;
    let title = escaped(title);
    if bars.is_empty() {
        return String::new();
    }
    let x = |share: f64| LEFT + share * WIDTH;
    let height = ROW * (bars.len() as f64 + 1.5);
    let mut svg = format!(
        "<h2>{title}</h2><svg viewBox=\"0 0 900 {height:.0}\" role=\"img\" aria-label=\"{title}\">"
    );
    // Writing to a string does not fail.
    for (number, bar) in bars.iter().enumerate() {
        let y = ROW * (number as f64 + 0.5);
        let _ = write!(
            svg,
            "<g><title>{0}: {1}</title>\
             <text x=\"{2:.0}\" y=\"{y:.1}\" text-anchor=\"end\" dominant-baseline=\"middle\">{0}</text>\
             <rect class=\"bar\" x=\"{LEFT}\" y=\"{3:.1}\" width=\"{4:.1}\" height=\"10\"/>\
             <line class=\"whisker\" x1=\"{5:.1}\" x2=\"{6:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/></g>",
            escaped(&bar.name),
            escaped(&bar.said),
            LEFT - 8.0,
            y - 5.0,
            x(bar.value) - LEFT,
            x(bar.low),
            x(bar.high),
        );
    }
    let (y, end) = (ROW * (bars.len() as f64 + 0.2), LEFT + WIDTH);
    let below = y + 16.0;
    let _ = write!(
        svg,
        "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{end:.0}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
         <text x=\"{LEFT}\" y=\"{below:.1}\">0</text>\
         <text x=\"{end:.0}\" y=\"{below:.1}\" text-anchor=\"end\">{most}</text></svg>",
    );
    svg
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::Ending;

    fn lines(bad: u32, all: u32) -> Vec<Line> {
        let line = |session: u32| {
            let mut line = Line::of(session, if session < bad { "b" } else { "a" }, "a");
            if let Ending::Answered(answer) = &mut line.ending {
                answer.usage = Some((300, 1));
            }
            Line { turn: session % 2, first_us: Some(5000), took_us: 9000, ..line }
        };
        (0..all).map(line).collect()
    }

    #[test]
    fn a_report_has_the_figures_of_its_lines() {
        let cell =
            |name: &str, lines, reference| CellLines { name: name.to_owned(), lines, reference };
        let mut cells =
            [cell("healthy", lines(0, 80), None), cell("mode=<pd>", lines(14, 80), Some(0))];
        let report = Report::new(&cells, None, "ab run plan.toml");
        assert_eq!(report.total(), (160, 14));
        let text = report.markdown();
        assert!(text.contains("| mode=<pd> | 80 | 66 | 0 | 14 | 17.50 % [10.72, 27.26]"), "{text}");
        assert!(text.contains("differs 14") && text.contains("(14 : 0)"), "{text}");
        assert!(text.contains("14 of 160 judged answers corrupted"), "{text}");
        assert!(text.contains("1 %: 299 and ") && text.contains("Again: `ab run plan.toml`"));
        let cell = &report.cells[1];
        assert_eq!(cell.by_length, [(256, Rate::new(14, 80))]);
        assert_eq!(cell.by_turn, [(0, Rate::new(7, 40)), (1, Rate::new(7, 40))]);
        assert_eq!(cell.first_by_length, [(256, (5000, 5000))]);
        let page = report.html();
        assert!(page.contains("mode=&lt;pd&gt;: median 5 ms, 95 of 100 within 5 ms"), "{page}");
        assert!(page.contains("mode=&lt;pd&gt;") && !page.contains("mode=<pd>"), "{page}");
        assert!(!page.contains("http://") && !page.contains("<script"), "nothing from elsewhere");
        // Where answers may differ, the same lines are wrong answers of the model.
        cells[1].reference = None;
        let calm = Report::new(&cells, None, "");
        assert_eq!(calm.total(), (160, 0));
        assert_eq!(calm.cells[1].tally.wrong, 14);
    }

    #[test]
    fn lengths_are_told_apart_by_powers_of_two() {
        assert_eq!([1, 255, 256, 511, 512].map(length_class), [1, 128, 256, 256, 512]);
    }
}
