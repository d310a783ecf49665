//! Prompts as token ids: the beginnings of recorded conversations.

use serde_json::Value;
use std::sync::OnceLock;

/// Conversations of the golden data, longest first.
fn conversations() -> &'static [Vec<u32>] {
    static ALL: OnceLock<Vec<Vec<u32>>> = OnceLock::new();
    ALL.get_or_init(|| {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../dsv4-model/golden/dialogues.json");
        let bytes = std::fs::read(path).expect("golden data is there");
        let all: Value = serde_json::from_slice(&bytes).expect("golden data is JSON");
        let ids = |one: &Value| serde_json::from_value(one["ids"].clone()).expect("token ids");
        let mut all: Vec<Vec<u32>> = all.as_array().expect("a list").iter().map(ids).collect();
        all.sort_by_key(|ids| std::cmp::Reverse(ids.len()));
        all
    })
}

/// A prompt of `length` tokens; each length has its own text.
pub(crate) fn prompt(length: usize) -> Vec<u32> {
    let fitting = conversations().iter().filter(|ids| ids.len() >= length).count();
    assert!(fitting > 0, "no conversation has {length} tokens");
    conversations()[length % fitting.min(40)][..length].to_vec()
}
