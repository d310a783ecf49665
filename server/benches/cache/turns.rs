//! Sessions of several turns on a worker whose pages hold a tenth of them: without a cache, with
//! the device's alone, with host memory, and with a disk as well.

use crate::client::Metrics;
use crate::cluster::Server;
use crate::report::Report;
use crate::stream::{Answer, ask, runtime};
use crate::ttft::conversation;
use crate::{Folder, Options, Outcome, Random, quantile};
use futures_util::stream::{StreamExt as _, iter};
use std::time::Instant;

const SESSIONS: u32 = 60;
const QUICK_SESSIONS: u32 = 6;
const TURNS: usize = 6;
const QUICK_TURNS: usize = 2;
/// Tokens of a first turn, what each further turn adds, and what is answered.
const FIRST: usize = 320;
const MORE: usize = 128;
const OUTPUT: u32 = 8;
/// Requests at a time.
const AT_ONCE: usize = 4;
/// Page memory: about a tenth of what all sessions fill in the end (60 times 3 blocks and a boundary
/// of the mini model), beside what the running ones need.
const DEVICE: &str =
    "--context-length 1024 --max-running-requests 4 --chunked-prefill-size 256 --kv-memory-mib 7";
/// Host memory in GiB: half of what all sessions fill.
const HOST: &str = "--hicache-size 0.03";

/// What a worker did with all turns.
struct Row {
    name: &'static str,
    hit_rate: f64,
    p50: f64,
    p95: f64,
    tok_s: f64,
}

pub(crate) fn measure(options: &Options, report: &mut Report) -> Outcome<()> {
    let (sessions, turns) = match options.is_quick {
        true => (QUICK_SESSIONS, QUICK_TURNS),
        false => (SESSIONS, TURNS),
    };
    println!(
        "{sessions} sessions of {turns} turns: {FIRST} tokens, {MORE} more each turn, {OUTPUT} \
         answered; {AT_ONCE} at a time, the sessions of each turn in another order"
    );
    let folder = Folder::new(&options.dir, "turns")?;
    let disk = format!("{HOST} --hicache-storage-dir {}", folder.0.display());
    let tiers = [
        ("none", "--disable-radix-cache"),
        ("device", "--enable-hierarchical-cache=false"),
        ("host", HOST),
        ("disk", &disk),
    ];
    let mut rows = Vec::new();
    for (name, flags) in tiers {
        let server = Server::worker("null", &format!("{DEVICE} {flags}"));
        rows.push(runtime()?.block_on(hold(name, &server, sessions, turns))?);
    }
    println!("\n| tiers | hit rate | TTFT p50, ms | TTFT p95, ms | tokens/s |");
    println!("|---|---|---|---|---|");
    for Row { name, hit_rate, p50, p95, tok_s } in &rows {
        println!("| {name} | {hit_rate:.3} | {p50:.1} | {p95:.1} | {tok_s:.0} |");
        let figure = |what: &str| format!("turns.{name}.{what}");
        report.say(&figure("hit_rate"), *hit_rate, "ratio");
        report.say(&figure("ttft_p50_ms"), *p50, "ms");
        report.say(&figure("ttft_p95_ms"), *p95, "ms");
        report.say(&figure("tok_s"), *tok_s, "tokens/s");
        if *name != "none" {
            for (what, of) in [
                ("ttft_vs_none", "ttft_p50_ms"),
                ("p95_vs_none", "ttft_p95_ms"),
                ("tok_s_vs_none", "tok_s"),
            ] {
                report.say_ratio(&figure(what), &figure(of), &format!("turns.none.{of}"));
            }
        }
    }
    Ok(())
}

/// Holds all sessions; a turn begins when all have had the one before.
async fn hold(name: &'static str, server: &Server, sessions: u32, turns: usize) -> Outcome<Row> {
    // The first request of a process is slower, and not what is measured.
    ask(&server.url, &conversation(sessions, 100), 1).await?;
    let mut random = Random(5);
    let mut answers: Vec<Answer> = Vec::new();
    let begin = Instant::now();
    for turn in 0..turns {
        let mut order: Vec<u32> = (0..sessions).collect();
        random.shuffle(&mut order);
        let one = async |session: u32| {
            let ids = conversation(session, FIRST + turn * MORE);
            ask(&server.url, &ids, OUTPUT).await
        };
        let mut held = iter(order).map(one).buffer_unordered(AT_ONCE);
        while let Some(answer) = held.next().await {
            answers.push(answer?);
        }
    }
    let seconds = begin.elapsed().as_secs_f64();
    let metrics = Metrics::of(&server.url).await;
    let total = |of: fn(&Answer) -> u64| answers.iter().map(of).sum::<u64>() as f64;
    let prompt = total(|a| a.prompt_tokens);
    let times: Vec<f64> = answers.iter().map(|a| a.first_token.as_secs_f64() * 1e3).collect();
    let row = Row {
        name,
        hit_rate: total(|a| a.cached_tokens) / prompt,
        p50: quantile(&times, 0.5),
        p95: quantile(&times, 0.95),
        tok_s: (prompt + total(|a| a.output_tokens)) / seconds,
    };
    let pages = |pool: &str| metrics.sum("dsv4:pages", &[pool, "total"]);
    println!(
        "{name}: {} requests in {seconds:.1} s, pages for {} blocks, {} windows, {} carries",
        answers.len(),
        pages("block"),
        pages("window"),
        pages("carry")
    );
    Ok(row)
}
