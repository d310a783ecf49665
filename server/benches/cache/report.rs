//! What was measured, and which bars it holds.

/// Figures in the order in which they were measured.
#[derive(Debug, Default)]
pub(crate) struct Report(Vec<(String, f64, &'static str)>);

/// Figure, what it says, bound, and whether the figure has to stay below it, not reach it.
type Bar = (&'static str, &'static str, f64, bool);

const BARS: [Bar; 12] = [
    ("lookup_ns", "lookup in the tree, ns a block", 1000.0, true),
    ("tiers_lookup_ns", "lookup in the tiers, ns a block", 1000.0, true),
    ("pause_us_p999", "calls of tree and tiers, 99.9 %, us", 1000.0, true),
    ("ttft_disk.share_of_cold", "first token from disk over cold", 0.15, true),
    ("turns.device.ttft_vs_none", "median first token, device over none", 1.0, true),
    ("turns.host.ttft_vs_none", "median first token, host over none", 1.0, true),
    ("turns.disk.ttft_vs_none", "median first token, disk over none", 1.0, true),
    ("turns.host.p95_vs_none", "95 % first token, host over none", 1.0, true),
    ("turns.disk.p95_vs_none", "95 % first token, disk over none", 1.0, true),
    ("turns.device.tok_s_vs_none", "tokens/s, device over none", 1.0, false),
    ("turns.host.tok_s_vs_none", "tokens/s, host over none", 1.0, false),
    ("turns.disk.tok_s_vs_none", "tokens/s, disk over none", 1.0, false),
];

impl Report {
    /// Keeps a figure. It is printed at the end.
    pub(crate) fn say(&mut self, name: &str, value: f64, unit: &'static str) {
        self.0.push((name.to_owned(), value, unit));
    }

    /// Keeps the ratio of two figures.
    pub(crate) fn say_ratio(&mut self, name: &str, over: &str, under: &str) {
        if let (Some(over), Some(under)) = (self.find(over), self.find(under)) {
            self.say(name, over / under, "ratio");
        }
    }

    fn find(&self, name: &str) -> Option<f64> {
        self.0.iter().find(|(other, ..)| other == name).map(|(_, value, _)| *value)
    }

    /// Prints each bar with the figure, and whether it holds. What was not measured is said to be so.
    pub(crate) fn table(&self) {
        println!("\n{:40} {:>9} {:>9}", "bar", "wanted", "measured");
        for (figure, says, bound, is_below) in BARS {
            let wanted = format!("{} {bound}", if is_below { "<=" } else { ">=" });
            match self.find(figure) {
                None => println!("{says:40} {wanted:>9} {:>9} not measured", "-"),
                Some(value) => {
                    let is_held = if is_below { value <= bound } else { value >= bound };
                    let said = if is_held { "held" } else { "NOT HELD" };
                    println!("{says:40} {wanted:>9} {value:>9.3} {said}");
                }
            }
        }
        println!();
    }

    /// Prints the lines that a record takes.
    pub(crate) fn figures(&self) {
        for (name, value, unit) in &self.0 {
            match *unit {
                "ratio" => println!("figure cache.{name} {value:.3} {unit}"),
                "GB/s" => println!("figure cache.{name} {value:.2} {unit}"),
                _ => println!("figure cache.{name} {value:.1} {unit}"),
            }
        }
    }
}
