//! What was measured, what follows from it, and which bars it holds.

use std::collections::BTreeMap;

/// Figures by name.
#[derive(Debug, Default)]
pub(crate) struct Report(BTreeMap<String, f64>);

/// A bar, and the figure that has to hold it.
struct Bar {
    figure: String,
    says: String,
    bound: f64,
    /// The figure has to stay below, not reach it.
    is_below: bool,
}

impl Report {
    /// Prints a figure and keeps it.
    pub(crate) fn say(&mut self, name: &str, value: f64, unit: &str) {
        match unit {
            "ratio" => println!("figure transfer.{name} {value:.3} {unit}"),
            _ => println!("figure transfer.{name} {value:.2} {unit}"),
        }
        self.0.insert(name.to_owned(), value);
    }

    fn get(&self, name: &str) -> Option<f64> {
        self.0.get(name).copied()
    }

    fn say_ratio(&mut self, name: &str, over: &str, under: &str) {
        if let (Some(over), Some(under)) = (self.get(over), self.get(under)) {
            self.say(name, over / under, "ratio");
        }
    }

    /// Prints what follows from the rates of one size. Ours are those with the digest, except
    /// beside the plain loop, which checks nothing.
    pub(crate) fn compare(&mut self, page: u32) {
        for name in ["shm", "tcp", "ucx"] {
            let (digest, plain) = (format!("{name}.{page}.digest"), format!("{name}.{page}.plain"));
            if let (Some(digest), Some(plain)) = (self.get(&digest), self.get(&plain)) {
                self.say(&format!("{name}.{page}.digest_cost"), 1.0 - digest / plain, "ratio");
            }
            self.say_ratio(&format!("{name}.{page}.vs_memcpy"), &digest, &format!("memcpy.{page}"));
        }
        for (ours, name, theirs) in [
            ("shm", "vs_nixl", "nixl"),
            ("tcp", "vs_nixl", "nixl_tcp"),
            ("tcp", "vs_mooncake", "mooncake"),
            ("ucx", "vs_ucp_get.digest", "ucp_get"),
        ] {
            let (digest, theirs) = (format!("{ours}.{page}.digest"), format!("{theirs}.{page}"));
            self.say_ratio(&format!("{ours}.{page}.{name}"), &digest, &theirs);
        }
        let (plain, theirs) = (format!("ucx.{page}.plain"), format!("ucp_get.{page}"));
        self.say_ratio(&format!("ucx.{page}.vs_ucp_get"), &plain, &theirs);
    }

    fn bars(pages: &[u32]) -> Vec<Bar> {
        let mut bars = Vec::new();
        let mut bar = |figure: String, says: &str, bound, is_below| {
            bars.push(Bar { figure, says: says.to_owned(), bound, is_below });
        };
        for page in pages {
            bar(format!("shm.{page}.vs_memcpy"), "shm with digest over memcpy", 0.6, false);
            bar(format!("shm.{page}.digest_cost"), "cost of the digest over shm", 0.1, true);
            if [8448, 16_384].contains(page) {
                bar(format!("shm.{page}.vs_nixl"), "shm with digest over NIXL", 3.0, false);
            }
            bar(format!("tcp.{page}.vs_nixl"), "tcp with digest over NIXL's TCP", 1.0, false);
            bar(format!("tcp.{page}.vs_mooncake"), "tcp with digest over Mooncake", 1.0, false);
            bar(format!("ucx.{page}.vs_ucp_get"), "ucx over a plain loop of ucp_get", 1.0, false);
        }
        let says = "last chunk computed to all pages verified, ms";
        bar("after_last_chunk_ms".to_owned(), says, 5.0, true);
        bars
    }

    /// Prints each bar with the figure, and whether it holds. What was not measured is said to be so.
    pub(crate) fn table(&self, pages: &[u32]) {
        println!("\n{:48} {:>9} {:>9}", "bar", "wanted", "measured");
        for Bar { figure, says, bound, is_below } in Self::bars(pages) {
            let size = figure.split('.').nth(1).unwrap_or_default();
            let says = format!("{says} {size}");
            let wanted = format!("{} {bound}", if is_below { "<" } else { ">=" });
            match self.get(&figure) {
                None => println!("{says:48} {wanted:>9} {:>9} not measured", "-"),
                Some(value) => {
                    let is_held = if is_below { value < bound } else { value >= bound };
                    let said = if is_held { "held" } else { "NOT HELD" };
                    println!("{says:48} {wanted:>9} {value:>9.3} {said}");
                }
            }
        }
    }
}
