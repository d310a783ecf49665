//! What a record says about the machine that it was made on.

use std::time::{SystemTime, UNIX_EPOCH};

/// Name of the processor, or `unknown`.
pub(super) fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("model name"));
    line.map(|rest| rest.trim_start_matches([' ', '\t', ':']).trim().to_owned())
        .filter(|name| !name.is_empty())
        .unwrap_or_else(|| "unknown".to_owned())
}

/// Instruction sets of the processor that our kernels look for.
pub(super) fn instructions() -> Vec<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    let wanted = ["avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni"];
    let have: Vec<&str> = line.split_whitespace().collect();
    wanted.iter().filter(|name| have.contains(name)).map(|&name| name.to_owned()).collect()
}

/// Cores that this process may use.
pub(super) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Memory in MiB, 0 if unknown.
pub(super) fn memory_mib() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap_or_default();
    let kib: u64 = line.split_whitespace().next().and_then(|kib| kib.parse().ok()).unwrap_or(0);
    kib / 1024
}

/// A folder name: processor, instruction sets that tell generations apart, cores.
pub(super) fn folder(processor: &str, has_avx512: bool, cores: usize) -> String {
    let mut name = String::new();
    for c in processor.to_lowercase().chars() {
        if c.is_ascii_alphanumeric() {
            name.push(c);
        } else if !name.ends_with('-') && !name.is_empty() {
            name.push('-');
        }
    }
    let name = name.trim_end_matches('-');
    let suffix = if has_avx512 { "-avx512" } else { "" };
    format!("{name}{suffix}-{cores}c")
}

/// Today in UTC as `YYYY-MM-DD`.
pub(super) fn date() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    date_of(i64::try_from(seconds / 86_400).unwrap_or(0))
}

/// Date of a day counted from 1970-01-01 (the civil-from-days algorithm of the proleptic Gregorian
/// calendar, with years that begin in March).
fn date_of(days: i64) -> String {
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_become_dates() {
        let cases =
            [(0, "1970-01-01"), (59, "1970-03-01"), (11_016, "2000-02-29"), (20_786, "2026-11-29")];
        for (days, date) in cases {
            assert_eq!(date_of(days), date);
        }
    }

    #[test]
    fn folder_names_are_plain() {
        assert_eq!(folder("AMD EPYC 7B13 (TM)", false, 2), "amd-epyc-7b13-tm-2c");
        assert_eq!(folder("unknown", true, 8), "unknown-avx512-8c");
    }
}
