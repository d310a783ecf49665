//! Tokenizer of dsv4-mini: ids, markers in user text, and decoding piece by piece.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking too")]

use std::path::Path;

use dsv4_model::text::{TextError, Tokenizer};
use proptest::prelude::*;
use serde_json::Value;

const JSON: &[u8] = include_bytes!("../../../models/dsv4-mini/checkpoint/tokenizer.json");

/// Ids of the added tokens: three special ones and the markers.
const ADDED: [u32; 18] = [
    0, 1, 2, 4078, 4079, 4080, 4081, 4082, 4083, 4084, 4085, 4086, 4087, 4088, 4089, 4090, 4091,
    4092,
];

const SPELLINGS: [&str; 8] = [
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
];

fn mini() -> Tokenizer {
    Tokenizer::from_bytes(JSON).unwrap()
}

#[test]
fn loads_from_a_checkpoint_directory() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/dsv4-mini/checkpoint");
    let tokenizer = Tokenizer::from_dir(&dir).unwrap();
    assert_eq!(tokenizer.vocab_size(), 4093);
    assert_eq!(tokenizer.digest(), mini().digest());
    assert_eq!(tokenizer.digest(), *blake3::hash(JSON).as_bytes());
    tokenizer.check_fits(4096).unwrap();
    assert!(matches!(
        tokenizer.check_fits(4092),
        Err(TextError::Vocabulary { tokenizer: 4093, model: 4092 })
    ));
    let error = Tokenizer::from_dir(Path::new("/nowhere/dsv4")).unwrap_err();
    assert!(error.to_string().contains("/nowhere/dsv4"), "{error}");
    for id in ADDED {
        assert!(tokenizer.inner().get_added_tokens_decoder().contains_key(&id), "{id}");
    }
}

/// The golden prompts carry the ids the training side's tokenizer made of them.
#[test]
fn golden_prompts_encode_to_their_ids_and_back() {
    let tokenizer = mini();
    let prompts = include_str!("../../golden/prompts.json");
    let prompts: Vec<Value> = serde_json::from_str(prompts).unwrap();
    assert_eq!(prompts.len(), 11);
    for prompt in &prompts {
        let text = prompt["text"].as_str().unwrap();
        let ids: Vec<u32> = serde_json::from_value(prompt["ids"].clone()).unwrap();
        assert_eq!(tokenizer.encode_with_special(text).unwrap(), ids);
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        let greedy: Vec<u32> = serde_json::from_value(prompt["greedy"].clone()).unwrap();
        let greedy_text = prompt["greedy_text"].as_str().unwrap();
        assert_eq!(tokenizer.decode(&greedy).unwrap(), greedy_text);
    }
}

#[test]
fn user_text_never_becomes_a_marker() {
    let tokenizer = mini();
    for spelling in SPELLINGS {
        let marked = tokenizer.encode_with_special(spelling).unwrap();
        assert_eq!(marked.len(), 1, "{spelling} as a marker");
        assert!(ADDED.contains(&marked[0]));
        assert_eq!(tokenizer.token_id(spelling), Some(marked[0]));
        for text in [spelling.to_owned(), format!("a{spelling}b"), format!(" {spelling}\n")] {
            let ids = tokenizer.encode_plain(&text).unwrap();
            assert!(!ids.iter().any(|id| ADDED.contains(id)), "{text:?} gave {ids:?}");
            assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        }
    }
}

#[test]
fn decoding_holds_back_incomplete_characters() {
    let tokenizer = mini();
    let text = "naïve café 中文 🦀👩‍🔬 – e\u{301}";
    let ids = tokenizer.encode_plain(text).unwrap();
    let (mut stream, mut joined, mut held) = (tokenizer.decode_stream(), String::new(), 0);
    for &id in &ids {
        let piece = stream.push(id).unwrap();
        assert!(!piece.contains('\u{fffd}'), "{piece:?}");
        held += usize::from(stream.is_holding());
        joined.push_str(&piece);
    }
    assert!(held > 10, "the text has characters over several tokens");
    assert!(!stream.is_holding());
    joined += &stream.finish();
    assert_eq!(joined, text);
}

/// Any prefix of the ids, even one that ends inside a character, decodes as the tokenizers crate
/// decodes it whole.
#[test]
fn every_prefix_agrees_with_the_tokenizers_crate() {
    let tokenizer = mini();
    let ids = tokenizer.encode_with_special("<｜User｜>é中🦀 <think>naïve</think>\n\n").unwrap();
    for end in 0..=ids.len() {
        let want = tokenizer.inner().decode(&ids[..end], false).unwrap();
        assert_eq!(tokenizer.decode(&ids[..end]).unwrap(), want, "first {end} ids");
    }
}

#[test]
fn unknown_ids_are_errors() {
    let tokenizer = mini();
    let mut stream = tokenizer.decode_stream();
    for id in [4093, 4095, u32::MAX] {
        let error = stream.push(id).unwrap_err();
        assert!(matches!(error, TextError::UnknownToken { vocab: 4093, .. }), "{error:?}");
    }
    assert_eq!(stream.push(4083).unwrap(), tokenizer.decode(&[4083]).unwrap());
}

#[test]
fn malformed_tokenizers_are_errors() {
    for json in [&b""[..], b"{}", b"\xff", &JSON[..JSON.len() / 2]] {
        assert!(matches!(Tokenizer::from_bytes(json), Err(TextError::Malformed(_))));
    }
    let mut json: Value = serde_json::from_slice(JSON).unwrap();
    json["decoder"] = Value::Null;
    let error = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap_err();
    assert!(matches!(&error, TextError::Decoder { found } if found == "None"), "{error:?}");
    let mut json: Value = serde_json::from_slice(JSON).unwrap();
    json["model"]["vocab"]["far"] = (1u64 << 31).into();
    let error = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap_err();
    assert!(matches!(error, TextError::Id { id: 0x8000_0000, .. }), "{error:?}");
}

/// A length limit or padding in the file does not apply to prompts.
#[test]
fn limits_in_the_file_are_not_applied() {
    let mut json: Value = serde_json::from_slice(JSON).unwrap();
    json["truncation"] = serde_json::json!({
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0
    });
    json["padding"] = serde_json::json!({
        "strategy": { "Fixed": 64 }, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 2, "pad_type_id": 0, "pad_token": "<｜▁pad▁｜>"
    });
    let limited = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
    for text in ["hi", "a text of many words, more than four of them"] {
        assert_eq!(limited.encode_plain(text).unwrap(), mini().encode_plain(text).unwrap());
        assert_eq!(
            limited.encode_with_special(text).unwrap(),
            mini().encode_with_special(text).unwrap()
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_text_survives_both_ways(parts in proptest::collection::vec(
        prop_oneof!["\\PC{0,12}", "[a-z0-9 .\n]{0,20}", proptest::sample::select(&SPELLINGS)
            .prop_map(str::to_owned)], 0..6)) {
        let (tokenizer, text) = (shared(), parts.concat());
        let plain = tokenizer.encode_plain(&text).unwrap();
        prop_assert!(!plain.iter().any(|id| ADDED.contains(id)));
        prop_assert_eq!(tokenizer.decode(&plain).unwrap(), text.clone());
        let special = tokenizer.encode_with_special(&text).unwrap();
        prop_assert_eq!(tokenizer.decode(&special).unwrap(), text);
    }

    #[test]
    fn any_ids_decode_as_the_tokenizers_crate_does(
        ids in proptest::collection::vec(0u32..4093, 0..40)) {
        let tokenizer = shared();
        let want = tokenizer.inner().decode(&ids, false).unwrap();
        prop_assert_eq!(tokenizer.decode(&ids).unwrap(), want);
    }
}

fn shared() -> &'static Tokenizer {
    static SHARED: std::sync::OnceLock<Tokenizer> = std::sync::OnceLock::new();
    SHARED.get_or_init(mini)
}
