//! `server verify URL`: asks a live worker whether its pages are what they should be, and says so as
//! a table.

use crate::config::VerifyArgs;
use crate::glue::pools::POOLS;
use crate::net::{chain, choose_cryptography};
use reqwest::header::CONTENT_TYPE;
use reqwest::{Client, Url};
use serde_json::{Value, json};
use std::io::{self, Write};
use std::time::Duration;

/// How an audit ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VerifyEnd {
    /// All that was looked at is right.
    Right,
    /// So is this, but no window was computed again where that was asked for and there were some.
    Partly,
    /// Something is wrong.
    Wrong,
}

/// An audit that could not be done.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// Not an address.
    #[error("{0:?} is no address of a worker: http://HOST:PORT expected")]
    Address(String),
    /// Nobody answers there.
    #[error("ask {url}: {why}")]
    Ask {
        /// Where.
        url: Url,
        /// What the network said, with its causes.
        why: String,
    },
    /// The server refused.
    #[error("{url} answers {status}: {message}")]
    Refused {
        /// Where.
        url: Url,
        /// HTTP status.
        status: u16,
        /// What it said.
        message: String,
    },
    /// Not an audit's answer.
    #[error("{url} answers what is no audit: {what} is missing; is it a worker of this version?")]
    NotAnAudit {
        /// Where.
        url: Url,
        /// The first thing that is missing.
        what: &'static str,
    },
    /// No threads or no memory for a client.
    #[error("make an HTTP client: {0}")]
    Client(String),
    /// The output has no reader, or no room.
    #[error("write the output: {0}")]
    Output(#[from] io::Error),
}

/// How long a worker may take to accept a connection.
const CONNECT_MAX: Duration = Duration::from_secs(10);

/// Audits a worker and writes what it found.
///
/// # Errors
/// [`VerifyError`] if it could not be audited.
pub fn run(args: &VerifyArgs, out: &mut dyn Write) -> Result<VerifyEnd, VerifyError> {
    let wrong = || VerifyError::Address(args.url.clone());
    let base: Url = args.url.parse().map_err(|_| wrong())?;
    if !matches!(base.scheme(), "http" | "https") {
        return Err(wrong());
    }
    let url = endpoint(base).ok_or_else(wrong)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| VerifyError::Client(error.to_string()))?;
    let answer = runtime.block_on(ask(args, &url))?;
    let workers = answer["workers"].as_array().ok_or_else(|| missing(&url, "workers"))?;
    let is_wrong = answer["mismatches"].as_u64();
    let is_wrong = is_wrong.ok_or_else(|| missing(&url, "the number of mismatches"))? > 0;
    if args.json {
        writeln!(out, "{answer}")?;
    } else {
        table(workers, out)?;
    }
    let starved = |worker: &Value| {
        let number = |name: &str| worker["windows"][name].as_u64().unwrap_or_default();
        args.windows > 0 && number("there") > 0 && number("checked") == 0
    };
    Ok(match is_wrong {
        true => VerifyEnd::Wrong,
        false if workers.iter().any(starved) => VerifyEnd::Partly,
        false => VerifyEnd::Right,
    })
}

/// Where a worker is asked: below its address, which may have a path where a proxy stands before it.
fn endpoint(mut base: Url) -> Option<Url> {
    if base.query().is_some() || base.fragment().is_some() {
        return None;
    }
    let path = format!("{}/verify", base.path().trim_end_matches('/'));
    base.set_path(&path);
    Some(base)
}

fn missing(url: &Url, what: &'static str) -> VerifyError {
    VerifyError::NotAnAudit { url: url.clone(), what }
}

async fn ask(args: &VerifyArgs, url: &Url) -> Result<Value, VerifyError> {
    choose_cryptography();
    let client = Client::builder()
        .connect_timeout(CONNECT_MAX)
        .timeout(Duration::from_secs(args.timeout.into()))
        .build();
    let client = client.map_err(|error| VerifyError::Client(error.to_string()))?;
    let wish = json!({"sample": args.sample, "windows": args.windows, "seed": args.seed});
    let mut request =
        client.post(url.clone()).header(CONTENT_TYPE, "application/json").body(wish.to_string());
    if let Some(key) = &args.api_key {
        request = request.bearer_auth(key);
    }
    let failed = |error: reqwest::Error| VerifyError::Ask { url: url.clone(), why: chain(&error) };
    let response = request.send().await.map_err(failed)?;
    let status = response.status();
    let body = response.bytes().await.map_err(failed)?;
    let answer: Option<Value> = serde_json::from_slice(&body).ok();
    if status.is_success() {
        return answer.ok_or_else(|| missing(url, "JSON"));
    }
    let said = answer.as_ref().and_then(|answer| answer["error"]["message"].as_str());
    let mut message = said.unwrap_or("nothing that could be read").to_owned();
    if status.as_u16() == 404 {
        message += " (a router is not audited: give the address of a worker)";
    }
    Err(VerifyError::Refused { url: url.clone(), status: status.as_u16(), message })
}

/// What was looked at and what is wrong, worker by worker.
fn table(workers: &[Value], out: &mut dyn Write) -> io::Result<()> {
    for worker in workers {
        let text = |name: &str| worker[name].as_str().unwrap_or("?").to_owned();
        let seconds = worker["seconds"].as_f64().unwrap_or_default();
        writeln!(out, "{} worker, {seconds:.1} s", text("role"))?;
        writeln!(out, "  {:<22} {:>9} {:>9} {:>10}", "", "there", "checked", "MiB")?;
        for kind in POOLS {
            let what = format!("{kind} pages");
            row(&what, &worker["pages"][kind.name()], out)?;
        }
        row("objects in host memory", &worker["host"], out)?;
        row("windows recomputed", &worker["windows"], out)?;
        let number = |value: &Value| value.as_u64().unwrap_or_default();
        let windows = &worker["windows"];
        writeln!(
            out,
            "  {} tokens computed again, {} pages compared; {} pages are being written, {} went \
             before their turn",
            number(&windows["tokens"]),
            number(&windows["pages"]),
            number(&worker["open_pages"]),
            number(&worker["gone"]),
        )?;
        for skipped in worker["skipped"].as_array().into_iter().flatten() {
            writeln!(out, "  not looked at: {}", skipped.as_str().unwrap_or_default())?;
        }
        let found = worker["mismatches"].as_array().map(Vec::as_slice).unwrap_or_default();
        for finding in found {
            writeln!(out, "  WRONG {}", sentence(finding))?;
        }
        if let Some(more @ 1..) = worker["more_mismatches"].as_u64() {
            writeln!(out, "  WRONG and {more} more")?;
        }
        if !found.is_empty() && worker["role"] == "prefill" {
            let advice = "decode workers may keep what was computed from these pages, with tags that \
                          fit: POST /flush_cache at each of them, and audit them";
            writeln!(out, "  {advice}")?;
        }
        if found.is_empty() {
            let looked = number(&worker["host"]["checked"])
                + number(&windows["checked"])
                + POOLS
                    .map(|kind| number(&worker["pages"][kind.name()]["checked"]))
                    .iter()
                    .sum::<u64>();
            let said = if looked == 0 {
                "there was nothing to look at"
            } else {
                "all that was looked at is right"
            };
            writeln!(out, "  {said}")?;
        }
    }
    Ok(())
}

fn row(what: &str, looked: &Value, out: &mut dyn Write) -> io::Result<()> {
    let number = |name: &str| looked[name].as_u64().unwrap_or_default();
    let mib = number("bytes") as f64 / f64::from(1 << 20);
    writeln!(out, "  {what:<22} {:>9} {:>9} {mib:>10.1}", number("there"), number("checked"))
}

/// One finding in a line.
fn sentence(finding: &Value) -> String {
    let text = |name: &str| finding[name].as_str().unwrap_or("?");
    let mut line = format!("{} ", text("kind"));
    for (name, said) in [("layer", "layer"), ("page_no", "page"), ("row", "from row")] {
        if let Some(number) = finding[name].as_u64() {
            line += &format!("{said} {number} ");
        }
    }
    if let Some(page) = finding["page"].as_str() {
        line += &format!("({page}) ");
    }
    let held_by = finding["held_by"].as_array().into_iter().flatten();
    let held_by: Vec<&str> = held_by.filter_map(Value::as_str).collect();
    let (expected, found) = (text("expected"), text("found"));
    line += &match text("found_by") {
        "digest" => format!("changed since it was sealed: {found}, sealed as {expected}"),
        "recompute" => format!("is not what is computed again: {found}, computed {expected}"),
        _ => format!("is not what was saved: {found}"),
    };
    format!("{line}; held by {}", held_by.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_one_line_that_names_the_place() {
        let finding = json!({
            "found_by": "digest", "kind": "c4_index", "layer": 3, "page": "block:7@2", "page_no": 1,
            "row": null, "expected": "aa", "found": "bb", "held_by": ["request r1", "a copy"],
        });
        assert_eq!(
            sentence(&finding),
            "c4_index layer 3 page 1 (block:7@2) changed since it was sealed: bb, sealed as aa; \
             held by request r1, a copy"
        );
        let finding = json!({
            "found_by": "recompute", "kind": "window", "layer": 0, "page": "window:1@1",
            "page_no": 6, "row": 12, "expected": "aa", "found": "bb", "held_by": [],
        });
        assert!(
            sentence(&finding).starts_with("window layer 0 page 6 from row 12 (window:1@1) is")
        );
    }

    #[test]
    fn workers_are_asked_below_their_address() {
        let asked = |url: &str| endpoint(url.parse().expect(url)).map(String::from);
        assert_eq!(asked("http://h:1"), Some("http://h:1/verify".to_owned()));
        assert_eq!(asked("http://h:1/w/2/"), Some("http://h:1/w/2/verify".to_owned()));
        assert_eq!(asked("http://h:1/?x=1"), None);
        assert_eq!(asked("http://h:1/#x"), None);
    }

    #[test]
    fn after_a_finding_of_a_prefill_worker_its_decode_workers_are_to_be_flushed() {
        let finding = json!({"found_by": "digest", "kind": "c4_kv"});
        let said = |role: &str| {
            let worker = json!({"role": role, "pages": {}, "mismatches": [finding]});
            let mut out = Vec::new();
            table(&[worker], &mut out).expect("memory has room");
            String::from_utf8(out).expect("text").contains("POST /flush_cache")
        };
        assert!(said("prefill") && !said("decode") && !said("unified"));
    }

    #[test]
    fn a_worker_without_pages_is_not_called_right() {
        let mut out = Vec::new();
        table(&[json!({"role": "decode", "pages": {}})], &mut out).expect("memory has room");
        let text = String::from_utf8(out).expect("text");
        assert!(text.contains("there was nothing to look at") && !text.contains("right"), "{text}");
    }

    #[test]
    fn a_table_says_what_was_looked_at() {
        let worker = json!({
            "role": "decode", "seconds": 1.25,
            "pages": {"block": {"there": 12, "checked": 3, "bytes": 3 << 20}},
            "windows": {"there": 1, "checked": 1, "bytes": 0, "tokens": 512, "pages": 9},
            "skipped": ["prefix of request r: too few pages"], "mismatches": [],
        });
        let mut out = Vec::new();
        table(&[worker], &mut out).expect("memory has room");
        let text = String::from_utf8(out).expect("text");
        for line in [
            "decode worker, 1.2 s",
            "  block pages                   12         3        3.0",
            "  512 tokens computed again, 9 pages compared; 0 pages are being written, 0 went before \
             their turn",
            "  not looked at: prefix of request r: too few pages",
            "  all that was looked at is right",
        ] {
            assert!(text.lines().any(|found| found == line), "{line:?} in\n{text}");
        }
    }
}
