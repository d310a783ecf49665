//! Faults of other systems in the test build: answers change where nothing is checked, and are right, with
//! the fault counted and named, where it is. The program that is released does not know them.

use super::cluster::Process;
#[cfg(feature = "faults")]
use {
    super::client::{Metrics, complete},
    super::cluster::Server,
    super::prompts::prompt,
    serde_json::Value,
};

#[test]
fn the_program_that_is_released_refuses_faults() {
    for flag in ["--fault", "--fault-protection", "--fault-share"] {
        let mut server = Process::spawn(&[flag.to_owned(), "none".to_owned()]);
        let status = server.wait_exit();
        assert_eq!(status.code(), Some(2), "{flag}");
        assert!(server.log_text().contains(flag), "{}", server.log_text());
    }
}

/// Prompts from which the index keys select.
#[cfg(feature = "faults")]
const LENGTHS: [usize; 6] = [1020, 1279, 1400, 1530, 1790, 2040];

#[cfg(feature = "faults")]
async fn answers(server: &Server) -> Vec<Value> {
    let mut answers = Vec::new();
    for length in LENGTHS {
        answers.push(complete(&server.url, &prompt(length), 12).await);
    }
    answers
}

#[cfg(feature = "faults")]
#[tokio::test]
async fn half_an_index_key_changes_answers_or_is_caught() {
    const INDEX: &str = "--index-k-dtype bf16 --disable-radix-cache";
    let expected = {
        let healthy = Server::faulty("both", INDEX);
        answers(&healthy).await
    };
    let flags = format!("{INDEX} --fault half_index_key");
    let decode = "role=\"decode\"";
    {
        let trusting = Server::faulty("both", &format!("{flags} --fault-protection off"));
        assert_ne!(answers(&trusting).await, expected, "damage that nothing looks for shows");
        let metrics = Metrics::of(&trusting.url).await;
        let fault = "fault=\"half_index_key\"";
        assert!(metrics.sum("dsv4:injected_faults_total", &[decode, fault]) > 0.0);
        assert_eq!(metrics.sum("dsv4:prompts_recomputed_total", &[decode]), 0.0);
    }
    let protected = Server::faulty("both", &flags);
    assert_eq!(answers(&protected).await, expected, "damage that is caught does not show");
    let metrics = Metrics::of(&protected.url).await;
    let caught = |event: &str| {
        let event = format!("event=\"{event}\"");
        metrics.sum("dsv4:handoff_faults_total", &[&event, "kind=\"c4_index\""])
    };
    assert!(caught("mismatch") >= 2.0 * LENGTHS.len() as f64, "each prompt, and its repetition");
    let recomputed = metrics.sum("dsv4:prompts_recomputed_total", &[decode]);
    assert_eq!(recomputed, LENGTHS.len() as f64);
    let log = protected.process.logged("kind=\"c4_index\"");
    let line = log.lines().find(|line| line.contains("kind=\"c4_index\""));
    let line = line.unwrap_or_else(|| panic!("no line names the page:\n{log}"));
    assert!(line.contains("layer=") && line.contains("peer="), "{line}");
}
