//! What a run has shown, as Markdown and as one page of HTML without anything from elsewhere.

use crate::record::Line;
use crate::stats::{Rate, trials_to_see, trials_to_tell};
use crate::tally::{Pairs, Tally, quantile};
use std::fmt::Write as _;

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

fn rates<K: Ord + Copy>(lines: &[Line], class: impl Fn(&Line) -> Option<K>) -> Vec<(K, Rate)> {
    let mut counts = std::collections::BTreeMap::<K, (u64, u64)>::new();
    for line in lines.iter().filter(|line| line.verdict.is_judged() && !line.left) {
        let Some(class) = class(line) else { continue };
        let (bad, all) = counts.entry(class).or_default();
        *bad += u64::from(line.verdict != crate::judge::Verdict::Right);
        *all += 1;
    }
    counts.into_iter().map(|(class, (bad, all))| (class, Rate::new(bad, all))).collect()
}

impl Report {
    /// From the lines of each cell, the healthy one first. With `same_answers` other answers than the
    /// healthy cell's are corruption.
    #[must_use]
    pub fn new(cells: &[(String, Vec<Line>)], same_answers: bool, command: &str) -> Self {
        let reference = cells.first().map(|(_, lines)| lines.as_slice());
        let cells = cells.iter().enumerate().map(|(number, (name, lines))| CellReport {
            name: name.clone(),
            tally: Tally::new(lines, reference.filter(|_| same_answers && number > 0)),
            pairs: reference.filter(|_| number > 0).map(|first| Pairs::new(lines, first)),
            by_length: rates(lines, |line| line.prompt_tokens().map(length_class)),
            by_turn: rates(lines, |line| Some(line.turn)),
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
        for cell in &self.cells {
            let lengths = cell.by_length.iter();
            let lengths: Vec<_> =
                lengths.map(|(from, rate)| (format!("{from} tokens and more"), *rate)).collect();
            let turns = cell.by_turn.iter();
            let turns: Vec<_> =
                turns.map(|(turn, rate)| (format!("request {}", turn + 1), *rate)).collect();
            let name = escaped(&cell.name);
            let _ = write!(body, "<details><summary>{name}</summary>");
            body += &plot("Not right, by length of the prompt", &lengths);
            body += &plot("Not right, by place in the conversation", &turns);
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

/// Bars with whiskers.
fn plot(title: &str, rows: &[(String, Rate)]) -> String {
    const LEFT: f64 = 330.0;
    const WIDTH: f64 = 500.0;
    const ROW: f64 = 22.0;
    let title = escaped(title);
    if rows.is_empty() {
        return String::new();
    }
    let most = rows.iter().map(|(_, rate)| rate.high).fold(0.02, f64::max);
    let x = |share: f64| LEFT + share / most * WIDTH;
    let height = ROW * (rows.len() as f64 + 1.5);
    let mut svg = format!(
        "<h2>{title}</h2><svg viewBox=\"0 0 900 {height:.0}\" role=\"img\" aria-label=\"{title}\">"
    );
    for (number, (name, rate)) in rows.iter().enumerate() {
        let y = ROW * (number as f64 + 0.5);
        let _ = write!(
            svg,
            "<text x=\"{:.0}\" y=\"{y:.1}\" text-anchor=\"end\" dominant-baseline=\"middle\">{}</text>\
             <rect class=\"bar\" x=\"{LEFT}\" y=\"{:.1}\" width=\"{:.1}\" height=\"10\"/>\
             <line class=\"whisker\" x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
             <title>{}: {}</title>",
            LEFT - 8.0,
            escaped(name),
            y - 5.0,
            x(rate.value()) - LEFT,
            x(rate.low),
            x(rate.high),
            escaped(name),
            shown(rate),
        );
    }
    let y = ROW * (rows.len() as f64 + 0.2);
    let _ = write!(
        svg,
        "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{:.0}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
         <text x=\"{LEFT}\" y=\"{:.1}\">0</text>\
         <text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{:.1} %</text></svg>",
        LEFT + WIDTH,
        y + 16.0,
        LEFT + WIDTH,
        y + 16.0,
        most * 100.0,
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
        let cells = [("healthy".to_owned(), lines(0, 80)), ("mode=<pd>".to_owned(), lines(14, 80))];
        let report = Report::new(&cells, true, "ab run plan.toml");
        assert_eq!(report.total(), (160, 14));
        let text = report.markdown();
        assert!(text.contains("| mode=<pd> | 80 | 66 | 0 | 14 | 17.50 % [10.72, 27.26]"), "{text}");
        assert!(text.contains("differs 14") && text.contains("(14 : 0)"), "{text}");
        assert!(text.contains("14 of 160 judged answers corrupted"), "{text}");
        assert!(text.contains("1 %: 299 and ") && text.contains("Again: `ab run plan.toml`"));
        let cell = &report.cells[1];
        assert_eq!(cell.by_length, [(256, Rate::new(14, 80))]);
        assert_eq!(cell.by_turn, [(0, Rate::new(7, 40)), (1, Rate::new(7, 40))]);
        let page = report.html();
        assert!(page.contains("mode=&lt;pd&gt;") && !page.contains("mode=<pd>"), "{page}");
        assert!(!page.contains("http://") && !page.contains("<script"), "nothing from elsewhere");
        // Where answers may differ, the same lines are wrong answers of the model.
        let calm = Report::new(&cells, false, "");
        assert_eq!(calm.total(), (160, 0));
        assert_eq!(calm.cells[1].tally.wrong, 14);
    }

    #[test]
    fn lengths_are_told_apart_by_powers_of_two() {
        assert_eq!([1, 255, 256, 511, 512].map(length_class), [1, 128, 256, 256, 512]);
    }
}
