//! What was measured, for people and for programs.

use super::Kind;
use std::fmt::{self, Write as _};

/// Bytes in a time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bandwidth {
    /// Gets posted; one per page.
    pub pages: u64,
    /// Bytes that arrived.
    pub bytes: u64,
    /// From the first request to the last page.
    pub seconds: f64,
}

impl Bandwidth {
    /// Gigabytes (10^9 bytes) per second.
    #[must_use]
    pub fn gb_per_s(&self) -> f64 {
        self.bytes as f64 / self.seconds.max(1e-9) / 1e9
    }
}

/// Times of single pages in microseconds: from the request for one page until it is verified. In
/// it are the request's way, the offer's way, the get, and the check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundTrip {
    /// How many.
    pub samples: u64,
    /// Half are not slower.
    pub p50_us: u64,
    /// 99 of 100 are not slower.
    pub p99_us: u64,
}

impl RoundTrip {
    /// Of times in microseconds, in any order; zero if there is none.
    pub(super) fn new(mut times_us: Vec<u64>) -> Self {
        times_us.sort_unstable();
        let at = |per_cent: usize| {
            let place = (times_us.len() * per_cent).div_ceil(100).saturating_sub(1);
            times_us.get(place).copied().unwrap_or(0)
        };
        Self { samples: times_us.len() as u64, p50_us: at(50), p99_us: at(99) }
    }
}

/// What was measured with pages of one size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SizeReport {
    /// Bytes of a page.
    pub page_bytes: u32,
    /// Pages of one transfer.
    pub transfer_pages: u32,
    /// With each page's digest checked after it landed, as a hand-off does.
    pub verified: Bandwidth,
    /// The copy alone.
    pub copied: Bandwidth,
    /// One page at a time, checked.
    pub round_trip: RoundTrip,
}

/// What was measured. `Display` is a table.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Over what.
    pub kind: Kind,
    /// To where.
    pub address: String,
    /// Most gets under way.
    pub in_flight: usize,
    /// One per size, in the order asked for.
    pub sizes: Vec<SizeReport>,
}

impl Report {
    /// One JSON object; its fields are named as those of this crate.
    #[must_use]
    pub fn to_json(&self) -> String {
        let mut out = String::new();
        // Writing to a string never fails.
        let _ = write!(
            out,
            "{{\"transport\":\"{}\",\"address\":\"{}\",\"in_flight\":{},\"sizes\":[",
            self.kind,
            escape(&self.address),
            self.in_flight
        );
        for (n, size) in self.sizes.iter().enumerate() {
            let RoundTrip { samples, p50_us, p99_us } = size.round_trip;
            let _ = write!(
                out,
                "{}{{\"page_bytes\":{},\"transfer_pages\":{},\"verified\":{},\"copied\":{},\
                 \"round_trip\":{{\"samples\":{samples},\"p50_us\":{p50_us},\"p99_us\":{p99_us}}}}}",
                if n == 0 { "" } else { "," },
                size.page_bytes,
                size.transfer_pages,
                bandwidth(&size.verified),
                bandwidth(&size.copied),
            );
        }
        out.push_str("]}");
        out
    }
}

fn bandwidth(of: &Bandwidth) -> String {
    let Bandwidth { pages, bytes, seconds } = of;
    format!(
        "{{\"pages\":{pages},\"bytes\":{bytes},\"seconds\":{seconds:.6},\"gb_per_s\":{:.6}}}",
        of.gb_per_s()
    )
}

fn escape(text: &str) -> String {
    let mut out = String::new();
    for letter in text.chars() {
        match letter {
            '"' | '\\' => out.extend(['\\', letter]),
            control if control.is_control() => {
                let _ = write!(out, "\\u{:04x}", u32::from(control));
            }
            other => out.push(other),
        }
    }
    out
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, address, in_flight, sizes } = self;
        writeln!(f, "{kind} to {address}, at most {in_flight} gets under way")?;
        writeln!(f)?;
        writeln!(
            f,
            "{:>10}  {:>13}  {:>13}  {:>10}  {:>12}  {:>10}  {:>10}",
            "page bytes", "verified GB/s", "copied GB/s", "gets", "MB", "p50 us", "p99 us"
        )?;
        for size in sizes {
            writeln!(
                f,
                "{:>10}  {:>13.3}  {:>13.3}  {:>10}  {:>12.1}  {:>10}  {:>10}",
                size.page_bytes,
                size.verified.gb_per_s(),
                size.copied.gb_per_s(),
                size.verified.pages + size.copied.pages,
                (size.verified.bytes + size.copied.bytes) as f64 / 1e6,
                size.round_trip.p50_us,
                size.round_trip.p99_us,
            )?;
        }
        writeln!(f)?;
        write!(f, "every checked page had the bytes that were sent")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_sorted_times() {
        let times = (1..=200).rev().collect();
        let found = RoundTrip::new(times);
        assert_eq!(found, RoundTrip { samples: 200, p50_us: 100, p99_us: 198 });
        assert_eq!(RoundTrip::new(vec![7]), RoundTrip { samples: 1, p50_us: 7, p99_us: 7 });
        assert_eq!(RoundTrip::new(Vec::new()).p99_us, 0);
    }

    #[test]
    fn text_in_json_is_escaped() {
        assert_eq!(escape("a\"b\\c\n"), "a\\\"b\\\\c\\u000a");
    }
}
