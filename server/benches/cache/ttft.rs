//! Time to the first token of a conversation of 8,000 tokens: computed, and from disk after the
//! process was started again.

use crate::client::{Metrics, eventually};
use crate::cluster::Server;
use crate::disk::forget;
use crate::prompts::prompt;
use crate::report::Report;
use crate::stream::{ask, runtime};
use crate::{Folder, Options, Outcome, median};

const TOKENS: usize = 8000;
const QUICK_TOKENS: usize = 1000;
/// Fresh stores.
const STORES: usize = 3;
/// Tokens of the request before, so that no first request of a process is measured. It shares
/// nothing with the other one.
const BEFORE: usize = 40;

pub(crate) fn measure(options: &Options, report: &mut Report) -> Outcome<()> {
    let (tokens, stores) = match options.is_quick {
        true => (QUICK_TOKENS, 1),
        false => (TOKENS, STORES),
    };
    println!(
        "a prompt of {tokens} tokens, {stores} fresh stores, page cache emptied at each restart"
    );
    let ids: Vec<u32> = conversation(0, tokens);
    let (mut cold, mut disk, mut climbs) = (Vec::new(), Vec::new(), Vec::new());
    for number in 0..stores {
        let folder = Folder::new(&options.dir, &format!("ttft-{number}"))?;
        let (before, after, climb) = runtime()?.block_on(restarted(&folder, &ids))?;
        println!("cold {before:.1} ms, from disk {after:.1} ms, of which copies {climb:.1} ms");
        cold.push(before);
        disk.push(after);
        climbs.push(climb);
    }
    report.say("ttft_cold.ms", median(&cold), "ms");
    report.say("ttft_disk.ms", median(&disk), "ms");
    report.say("ttft_disk.climb_ms", median(&climbs), "ms");
    report.say_ratio("ttft_disk.share_of_cold", "ttft_disk.ms", "ttft_cold.ms");
    report.say_ratio("ttft_disk.climb_share", "ttft_disk.climb_ms", "ttft_disk.ms");
    Ok(())
}

/// A text of recorded conversations that shares no block with that of another number.
pub(crate) fn conversation(number: u32, tokens: usize) -> Vec<u32> {
    let longest = (0..40).flat_map(|n| prompt(1800 - n as usize));
    let mut ids: Vec<u32> = longest.cycle().take(tokens).collect();
    for id in ids.iter_mut().step_by(200) {
        *id = 300 + number;
    }
    ids
}

/// Milliseconds to the first token, before and after the process was started again, and what all
/// reads and copies of the second time took together, on two threads for the disk and one for the
/// host tier.
async fn restarted(folder: &Folder, ids: &[u32]) -> Outcome<(f64, f64, f64)> {
    let flags = format!("--hicache-storage-dir {}", folder.0.display());
    let mut server = Server::worker("null", &flags);
    let (cold, cached) = first_token(&server.url, ids).await?;
    if cached != 0 {
        return Err(format!("{cached} tokens of a fresh store").into());
    }
    eventually("what is saved is written", async || {
        let metrics = Metrics::of(&server.url).await;
        let stored = |tier: &str| metrics.sum("dsv4:cache_stored_total", &[tier]);
        (stored("host") > 0.0 && stored("disk") >= stored("host")).then_some(())
    })
    .await;
    server.process.terminate();
    if !server.process.wait_exit().success() {
        return Err("the server did not end well".into());
    }
    forget(&folder.0)?;
    server.restart();
    let (disk, cached) = first_token(&server.url, ids).await?;
    let expected = (ids.len() as u64 - 1) / 256 * 256;
    if cached != expected {
        return Err(format!("{cached} tokens came from disk, {expected} were there").into());
    }
    let metrics = Metrics::of(&server.url).await;
    let climbed = metrics.sum("dsv4:cache_tokens_total", &["disk"]);
    if climbed < expected as f64 {
        return Err(format!("{climbed} tokens came from disk").into());
    }
    let climb = metrics.sum("dsv4:cache_climb_seconds_total", &[]) * 1e3;
    Ok((cold, disk, climb))
}

async fn first_token(url: &str, ids: &[u32]) -> Outcome<(f64, u64)> {
    ask(url, &prompt(BEFORE), 1).await?;
    let answer = ask(url, ids, 1).await?;
    Ok((answer.first_token.as_secs_f64() * 1e3, answer.cached_tokens))
}
