//! The engine inside another program: prefill and decode worker in one process, no HTTP.
//!
//! `cargo run --release -p server --example embed`

use clap::Parser;
use dsv4_server::config::Cli;
use dsv4_server::engine::{Engine, Event, GenerateRequest};
use dsv4_server::node::Node;

#[expect(clippy::print_stdout, reason = "an example shows its result")]
fn main() -> anyhow::Result<()> {
    let node = Node::start(&Cli::parse().serve)?;
    let (engine, tokenizer) = (node.engine(), node.tokenizer());
    let prompt = "<｜begin▁of▁sentence｜><｜User｜>The code of the red vault in Oslo is 55231.\n\n\
                  What is the code of the red vault in Oslo?<｜Assistant｜></think>";
    let mut generation = engine.submit(GenerateRequest {
        id: "example".to_owned(),
        prompt: tokenizer.encode_with_special(prompt)?,
        max_tokens: 48,
        stop_tokens: vec![engine.info().eos_token],
        min_tokens: 0,
        thinking: None,
        constraint: None,
        sampling: dsv4_model::sample::SamplingParams::greedy(),
        cache_salt: String::new(),
        cache_keep: dsv4_server::engine::CacheKeep::AsUsed,
        turn: dsv4_server::engine::Turn::default(),
        provenance: dsv4_server::engine::Provenance::default(),
    })?;
    let mut output = Vec::new();
    while let Some(event) = generation.events.blocking_recv() {
        match event {
            Event::Token(sampled) => output.push(sampled.token),
            Event::Finished { reason, usage } => {
                println!("{}\n({reason:?}, {usage:?})", tokenizer.decode(&output)?);
                break;
            }
            Event::Failed { kind, message } => anyhow::bail!("{kind:?}: {message}"),
        }
    }
    let checked = engine.stats().metrics.into_iter().filter(|m| m.name.contains("items_checked"));
    println!("pages checked: {}", checked.map(|m| m.value).sum::<f64>());
    drop(generation);
    node.shutdown();
    Ok(())
}
