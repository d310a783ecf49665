//! Constraints over the mini model's vocabulary: whatever is drawn, what is complete is valid.

use crate::fake::{GRAMMARS, TOKENIZER, small_tokens, tokens};
use crate::props::Random;
use dsv4_model::text::Tokenizer;
use dsv4_server::grammar::calls::{Answer, Tool};
use dsv4_server::grammar::format::{Format, json_of};
use dsv4_server::grammar::{Constraint, GrammarError, Grammars, Limits, Live, Progress, Source};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::Duration;

async fn compile(grammar: String, after: Option<u32>) -> Result<Constraint, GrammarError> {
    GRAMMARS.compile(Arc::new(Source { grammar, after })).await
}

async fn of(format: Format) -> Constraint {
    let text = format!("start: {}\n", format.expression().unwrap());
    compile(text.clone(), None).await.unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn eos() -> u32 {
    TOKENIZER.token_id("<｜end▁of▁sentence｜>").unwrap()
}

fn dsml() -> u32 {
    TOKENIZER.token_id("｜DSML｜").unwrap()
}

/// Follows a text; whether it may end there, or the part that was allowed.
fn follow(live: &mut Live, tokens: &[u32]) -> Result<bool, usize> {
    for (place, &token) in tokens.iter().enumerate() {
        match live.accept(token) {
            Ok(Progress::GoesOn) => {}
            Ok(Progress::Complete) if place + 1 == tokens.len() => return Ok(true),
            Ok(Progress::Complete) | Err(GrammarError::NotAllowed(_)) => return Err(place),
            Err(error) => panic!("{error}"),
        }
    }
    Ok(live.mask().unwrap().allows(eos()))
}

/// The same text in large and in small tokens has the same fate.
fn takes(constraint: &Constraint, text: &str) -> bool {
    let [large, small] = [tokens(text), small_tokens(text)]
        .map(|tokens| follow(&mut constraint.begin(), &tokens).unwrap_or(false));
    assert_eq!(large, small, "{text:?} in large and in small tokens");
    large
}

#[tokio::test]
async fn a_format_takes_what_it_says_and_nothing_else() {
    let schema = json!({"type": "object", "required": ["a"], "additionalProperties": false,
        "properties": {"a": {"type": "integer", "minimum": 3}, "b": {"enum": ["x", null]}}});
    for (format, good, bad) in [
        (Format::Object, &[r#"{}"#, r#"{"a": [1, {"b": "é€🤭"}]}"#][..], &["[]", "{", "x", ""][..]),
        (
            Format::Schema(schema),
            &[r#"{"a":3}"#, "{\n  \"a\": 12,\n  \"b\": \"x\"\n}", r#"{"a": 4, "b": null}"#],
            &[
                r#"{"a":2}"#,
                r#"{"b": null}"#,
                r#"{"a": 3, "c": 1}"#,
                r#"{"a": 3} x"#,
                r#"{"a":"3"}"#,
            ],
        ),
        (Format::Regex("^[a-c]{2,3}$".to_owned()), &["ab", "ccc"], &["a", "abcd", "ad", "^ab"]),
        (Format::Regex(r"a/b\\$".to_owned()), &[r"a/b\"], &[r"a/b"]),
        (Format::Regex(r"\d+(\.\d+)?€\$".to_owned()), &["12.5€$"], &["12.€$", "1€"]),
        (
            Format::Choice(vec!["yes".to_owned(), "\"no\"\n\u{7f}".to_owned()]),
            &["yes", "\"no\"\n\u{7f}"],
            &["ye", "no", "yes\n"],
        ),
    ] {
        let constraint = of(format.clone()).await;
        for text in good {
            assert!(takes(&constraint, text), "{format:?} must take {text:?}");
        }
        for text in bad {
            assert!(!takes(&constraint, text), "{format:?} must not take {text:?}");
        }
    }
}

#[tokio::test]
async fn white_space_comes_to_an_end() {
    let constraint = of(Format::Object).await;
    for space in
        [" ".to_owned(), "\n".to_owned(), format!("\n{}", " ".repeat(32)), "\n\t\t".to_owned()]
    {
        assert!(takes(&constraint, &format!("{{{space}}}")), "{space:?}");
    }
    for space in ["  ", "\n\n", "\r\n", " \n", &format!("\n{}", " ".repeat(33))] {
        assert!(!takes(&constraint, &format!("{{{space}}}")), "{space:?}");
    }
    assert!(!takes(&constraint, " {}"), "none before the first token");
}

#[tokio::test]
async fn marker_tokens_are_no_text() {
    let constraint = of(Format::Object).await;
    let mut live = constraint.begin();
    assert_eq!(follow(&mut live, &tokens("{\"a\": \"")), Ok(false));
    let mask = live.mask().unwrap();
    for name in ["</think>", "｜DSML｜", "<｜User｜>", "<｜end▁of▁sentence｜>"] {
        assert!(!mask.allows(TOKENIZER.token_id(name).unwrap()), "{name} inside a string");
    }
    // Their spelling in ordinary tokens is text like any other.
    let spelled = TOKENIZER.encode_plain("</think>\"}").unwrap();
    assert_eq!(follow(&mut live, &spelled), Ok(true));
}

#[tokio::test]
async fn thinking_is_free_but_cannot_end_the_answer() {
    let after = TOKENIZER.token_id("</think>").unwrap();
    let text = format!("start: {}\n", Format::Object.expression().unwrap());
    let constraint = compile(text, Some(after)).await.unwrap();
    let mut live = constraint.begin();
    assert!(!live.mask().unwrap().allows(eos()));
    assert_eq!(live.accept(eos()), Err(GrammarError::NotAllowed(eos())));
    assert_eq!(follow(&mut live, &tokens("I think } [ so")), Ok(false));
    assert_eq!(live.accept(after), Ok(Progress::GoesOn));
    assert_eq!(live.accept(after), Err(GrammarError::NotAllowed(after)));
    assert_eq!(follow(&mut live, &tokens("{}")), Ok(true));
}

#[tokio::test]
async fn a_constraint_goes_on_after_a_part_of_an_output() {
    let after = TOKENIZER.token_id("</think>").unwrap();
    let text = format!("start: {}\n", Format::Object.expression().unwrap());
    let constraint = compile(text, Some(after)).await.unwrap();
    let all = tokens("Well.</think>{\"a\": [1, 2]}");
    for part in 0..all.len() {
        let mut live = constraint.resume(&all[..part]).unwrap();
        assert_eq!(follow(&mut live, &all[part..]), Ok(true), "after {part} tokens");
    }
    let wrong = tokens("Well.</think>[");
    assert!(matches!(constraint.resume(&wrong), Err(GrammarError::NotAllowed(_))));
    assert!(constraint.resume(&all).is_err(), "nothing can follow");
}

#[tokio::test]
async fn what_cannot_be_compiled_says_why() {
    for (format, said) in [
        (Format::Schema(json!({"not": {}})), "\"not\""),
        (Format::Schema(json!([])), "must be an object"),
        (Format::Regex(String::new()), "0 bytes"),
        (Format::Regex("a".repeat(16 * 1024 + 1)), "bytes"),
        (Format::Choice(Vec::new()), "0 texts"),
        (Format::Choice(vec![String::new()]), "empty"),
    ] {
        let error = format.expression().unwrap_err().to_string();
        assert!(error.contains(said), "{format:?}: {error}");
    }
    for (schema, said) in [
        (json!({"type": "strin"}), "strin"),
        (json!({"type": "string", "format": "no-such-format"}), "no-such-format"),
        (json!({"$ref": "#/$defs/none"}), "none"),
        (json!({"type": "string", "pattern": "(a"}), ""),
        (json!({"type": "string", "pattern": "(?=a)b"}), ""),
        (json!({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
        (json!({"type": "integer", "minimum": 3, "maximum": 2}), ""),
        (json!({"properties": {"a": {"type": 7}}}), ""),
    ] {
        let text = format!("start: {}\n", json_of(&schema).unwrap());
        let error = compile(text, None).await.expect_err(said).to_string();
        assert!(error.contains(said) && !error.is_empty(), "{schema}: {error}");
        assert!(error.len() < 1000 && !error.contains(".rs"), "{schema}: {error}");
    }
    for regex in ["(a", "[", "a{9", "(?<=a)b", "(?P<x>a)(?P=x)", "*"] {
        let format = Format::Regex(regex.to_owned());
        let text = format!("start: {}\n", format.expression().unwrap());
        assert!(compile(text, None).await.is_err(), "{regex}");
    }
    let long = " ".repeat(dsv4_server::grammar::MAX_GRAMMAR_BYTES + 1);
    assert!(compile(long, None).await.unwrap_err().to_string().contains("bytes"));
}

/// What could take long or much memory is done in time, or refused.
#[tokio::test]
async fn hostile_grammars_cost_little() {
    let nested = |depth: usize| "(".repeat(depth) + "a" + &")*".repeat(depth);
    let ways: Vec<Value> =
        (0..60).map(|n| json!({"properties": {format!("p{n}"): {"type": "integer"}}})).collect();
    let alternatives = json!({"anyOf": ways});
    let mut cases = vec![
        json_of(&json!({"type": "array", "minItems": 2000, "maxItems": 2000})).unwrap(),
        json_of(&json!({"type": "string", "maxLength": 20_000, "minLength": 19_999})).unwrap(),
        json_of(&json!({"allOf": [alternatives, alternatives, alternatives, alternatives]}))
            .unwrap(),
        json_of(&json!({"$ref": "#"})).unwrap(),
        json_of(&json!({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})).unwrap(),
        json_of(&json!({"type": "string", "pattern": "(.*a){60}b{900}"})).unwrap(),
    ];
    for regex in [nested(200), "(a|aa)+".repeat(1000), "((a{0,100}){0,100}){0,100}".to_owned()] {
        cases.push(Format::Regex(regex).expression().unwrap());
    }
    for text in cases {
        let short: String = text.chars().take(80).collect();
        let start = std::time::Instant::now();
        let result = compile(format!("start: {text}\n"), None).await;
        if let Ok(constraint) = &result {
            let mut live = constraint.begin();
            let mut random = Random(7);
            for _ in 0..20 {
                if !matches!(step(&mut live, &mut random, &mut Vec::new()), Ok(Progress::GoesOn)) {
                    break;
                }
            }
        }
        let took = start.elapsed();
        assert!(took < Duration::from_secs(20), "{short}: {took:?}");
        assert!(!matches!(result, Err(GrammarError::Slow { .. })), "{short}: {result:?}");
    }
}

/// Draws any allowed token; prefers what closes something once in a while, so that texts end.
fn step(
    live: &mut Live,
    random: &mut Random,
    text: &mut Vec<u8>,
) -> Result<Progress, GrammarError> {
    let mask = live.mask()?.clone();
    let all: Vec<u32> = (0..mask.vocab() as u32).filter(|&token| mask.allows(token)).collect();
    if mask.allows(eos()) && random.below(3) == 0 {
        return Ok(Progress::Complete);
    }
    let closes = |token: &&u32| {
        let bytes = TOKENIZER.token_bytes(**token).unwrap_or_default();
        matches!(bytes, [b'"' | b'}' | b']' | b',', ..]) && bytes.len() <= 2
    };
    let closing: Vec<u32> = all.iter().filter(closes).copied().collect();
    let from = if random.below(3) > 0 && !closing.is_empty() { &closing } else { &all };
    let token = from[random.below(from.len())];
    if token == eos() {
        return Ok(Progress::Complete);
    }
    text.extend_from_slice(TOKENIZER.token_bytes(token).unwrap_or_default());
    live.accept(token)
}

/// A random schema of what is supported, not deeper than `depth`.
pub(crate) fn schema(random: &mut Random, depth: usize) -> Value {
    let low = random.below(7) as i64 - 3;
    let simple = [
        json!({"type": "string"}),
        json!({"type": "string", "minLength": 1, "maxLength": 1 + random.below(9)}),
        json!({"type": "string", "pattern": "^[a-z]{2,4}-\\d+$"}),
        json!({"type": "string", "format": "date"}),
        json!({"type": "integer", "minimum": low, "maximum": low + 40}),
        json!({"type": "integer", "exclusiveMinimum": low, "maximum": 4000, "multipleOf": 3}),
        json!({"type": "number", "minimum": low}),
        json!({"type": ["boolean", "null"]}),
        json!({"enum": ["a", "b c", 3, null, {"x": [1]}]}),
        json!({"const": "a\"\\\u{e9}"}),
    ];
    if depth == 0 {
        return simple[random.below(simple.len())].clone();
    }
    let mut inner = || schema(random, depth - 1);
    let parts = [inner(), inner(), inner()];
    let [one, two, three] = parts;
    match random.below(7) {
        0 => json!({"type": "array", "items": one, "maxItems": 1 + random.below(4)}),
        1 => json!({"type": "array", "prefixItems": [one, two], "items": false, "minItems": 2}),
        2 => json!({"anyOf": [one, two]}),
        3 => json!({"type": "object", "properties": {"a": one, "b c": two, "d": three},
            "required": ["b c"], "additionalProperties": false}),
        4 => json!({"type": "object", "properties": {"a": one}, "additionalProperties": two,
            "required": ["a"]}),
        5 => json!({"$defs": {"n": one}, "type": "object", "properties": {"n": two, "m": three},
            "required": ["n", "m"], "additionalProperties": false}),
        _ => simple[random.below(simple.len())].clone(),
    }
}

#[tokio::test]
async fn random_texts_of_random_schemas_are_valid() {
    let seed = std::env::var("DSV4_TEST_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(5);
    let mut random = Random(seed);
    let (mut complete, mut runs) = (0, 0);
    for _ in 0..150 {
        let depth = random.below(3);
        let schema = schema(&mut random, depth);
        let constraint = of(Format::Schema(schema.clone())).await;
        let valid = jsonschema::validator_for(&schema).unwrap();
        for _ in 0..4 {
            runs += 1;
            let (mut live, mut text) = (constraint.begin(), Vec::new());
            let ended = (0..300).any(|_| {
                let progress = step(&mut live, &mut random, &mut text);
                progress.unwrap_or_else(|error| panic!("{schema}: {error}")) == Progress::Complete
            });
            if !ended {
                continue;
            }
            complete += 1;
            let text = String::from_utf8(text).unwrap();
            let value: Value = serde_json::from_str(&text)
                .unwrap_or_else(|error| panic!("seed {seed}: {error} in {text:?} of {schema}"));
            assert!(valid.is_valid(&value), "seed {seed}: {text:?} is not valid for {schema}");
        }
    }
    assert!(complete * 3 > runs * 2, "only {complete} of {runs} texts came to an end");
}

/// Arguments of the first call, as the markup says.
fn arguments(text: &str) -> Map<String, Value> {
    let mut found = Map::new();
    for part in text.split("<｜DSML｜parameter name=\"").skip(1) {
        let (key, rest) = part.split_once("\" string=\"").unwrap();
        let (is_text, rest) = rest.split_once("\">").unwrap();
        let (value, _) = rest.split_once("</｜DSML｜parameter>").unwrap();
        let value = match is_text {
            "true" => Value::from(value),
            _ => serde_json::from_str(value).unwrap(),
        };
        found.insert(key.to_owned(), value);
    }
    found
}

fn answer(tools: &[(&str, Option<Value>)]) -> Answer {
    let tools = tools
        .iter()
        .map(|(name, schema)| Tool { name: (*name).to_owned(), schema: schema.clone() });
    Answer { tools: tools.collect(), begun: false, single: false, otherwise: None, dsml: dsml() }
}

async fn calls(answer: &Answer) -> Constraint {
    let text = answer.grammar().unwrap();
    compile(text.clone(), None).await.unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn call(name: &str, parameters: &[(&str, bool, &str)]) -> String {
    let mut text = format!("<｜DSML｜invoke name=\"{name}\">\n");
    for (key, is_text, value) in parameters {
        text += &format!(
            "<｜DSML｜parameter name=\"{key}\" string=\"{is_text}\">{value}</｜DSML｜parameter>\n"
        );
    }
    text + "</｜DSML｜invoke>\n"
}

fn block(calls: &[String]) -> String {
    format!("<｜DSML｜tool_calls>\n{}</｜DSML｜tool_calls>", calls.concat())
}

#[tokio::test]
async fn strict_calls_have_the_arguments_of_their_schema() {
    let weather = json!({"type": "object", "$defs": {"unit": {"enum": ["C", "F"]}}, "properties": {
        "city": {"type": "string"}, "days": {"type": "integer", "minimum": 1},
        "unit": {"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}]},
        "sort": {"enum": ["up", "down"]}, "when": {"type": "string", "format": "date"},
    }, "required": ["city", "days"]});
    let constraint = calls(&answer(&[("get_weather", Some(weather)), ("free", None)])).await;
    let good = |more: &[(&str, bool, &str)]| {
        let mut all = vec![("city", true, "Sant < Pau\n\"é\""), ("days", false, "3")];
        all.extend(more);
        block(&[call("get_weather", &all)])
    };
    for text in [
        good(&[]),
        format!("I look it up.\n\n{}", good(&[])),
        format!("\n\n{}", good(&[("unit", false, "\"C\""), ("sort", true, "down")])),
        good(&[("unit", false, "null"), ("when", false, "\"2024-02-29\"")]),
        block(&[call("free", &[("x", true, "y"), ("z", false, "[1]")]), call("free", &[])]),
        "No call at all < or </ so.".to_owned(),
        String::new(),
    ] {
        assert!(takes(&constraint, &text), "{text}");
    }
    for text in [
        block(&[]),
        block(&[call("other", &[])]),
        block(&[call("get_weather", &[("city", true, "a")])]),
        block(&[call("get_weather", &[("days", false, "3"), ("city", true, "a")])]),
        block(&[call("get_weather", &[("city", true, "a"), ("days", true, "3")])]),
        block(&[call("get_weather", &[("city", true, "a"), ("days", false, "0")])]),
        good(&[("unit", false, "\"K\"")]),
        good(&[("unit", true, "C")]),
        good(&[("sort", true, "sideways")]),
        good(&[("when", true, "today")]),
        good(&[("more", true, "a")]),
        format!("{} and so on", good(&[])),
        format!("no bracket ｜DSML｜{}", good(&[])),
    ] {
        assert!(!takes(&constraint, &text), "{text}");
    }
}

#[tokio::test]
async fn calls_are_begun_single_or_instead_of_a_format() {
    let schema = json!({"type": "object", "properties": {}});
    let tools = [("ping", Some(schema))];
    let two = [call("ping", &[]), call("ping", &[])];
    let begun = calls(&Answer { begun: true, ..answer(&tools) }).await;
    let rest = |text: String| text.strip_prefix("<｜DSML｜tool_calls>\n").unwrap().to_owned();
    assert!(takes(&begun, &rest(block(&two))));
    assert!(!takes(&begun, &block(&two)) && !takes(&begun, "text"));
    let single = calls(&Answer { single: true, ..answer(&tools) }).await;
    assert!(takes(&single, &block(&two[..1])) && !takes(&single, &block(&two)));
    let otherwise = Some(Format::Object.expression().unwrap());
    let either = calls(&Answer { otherwise, ..answer(&tools) }).await;
    assert!(takes(&either, "{\"a\": 1}") && takes(&either, &format!("\n\n{}", block(&two))));
    assert!(!takes(&either, "text") && !takes(&either, &format!("text{}", block(&two))));
}

#[tokio::test]
async fn random_calls_of_random_strict_tools_are_valid() {
    let mut random = Random(11);
    let mut complete = 0;
    for _ in 0..60 {
        let mut part = || schema(&mut random, 1);
        let parameters = json!({"type": "object", "properties": {"a": part(), "b": part()},
            "required": ["a"], "additionalProperties": false});
        let tools = [("f", Some(parameters.clone()))];
        let constraint = calls(&Answer { begun: true, single: true, ..answer(&tools) }).await;
        let valid = jsonschema::validator_for(&parameters).unwrap();
        for _ in 0..3 {
            let (mut live, mut text) = (constraint.begin(), Vec::new());
            let ended = (0..300).any(|_| {
                let mask = live.mask().unwrap().clone();
                // The marker ends what would go on for long.
                if mask.allows(dsml()) {
                    text.extend_from_slice("｜DSML｜".as_bytes());
                    return live.accept(dsml()).unwrap() == Progress::Complete;
                }
                step(&mut live, &mut random, &mut text).unwrap() == Progress::Complete
            });
            let text = String::from_utf8(text).unwrap();
            if ended {
                complete += 1;
                let arguments = Value::Object(arguments(&text));
                assert!(valid.is_valid(&arguments), "{text} is not valid for {parameters}");
            }
        }
    }
    assert!(complete > 60, "only {complete} of 180 calls came to an end");
}

#[test]
fn strict_tools_that_cannot_be_kept_to_are_refused_by_name() {
    for (schema, said) in [
        (json!({"type": "object", "properties": {"a b": {}}}), "name"),
        (json!({"type": "object", "properties": {"a\"": {}}}), "name"),
        (json!({"type": "array"}), "type must be object"),
        (json!({"anyOf": [{"type": "object"}]}), "\"anyOf\""),
        (json!({"properties": {"a": {"not": {}}}}), "properties.a has the keyword \"not\""),
        (json!({"properties": {"a": {"$ref": "#"}}}), "$ref is \"#\""),
        (json!({"properties": {}, "required": ["a"]}), "required has \"a\""),
        (json!({"properties": {}, "required": [7]}), "list of strings"),
        (json!({"minProperties": 1}), "\"minProperties\""),
    ] {
        let error = answer(&[("f", Some(schema.clone()))]).grammar().unwrap_err().to_string();
        assert!(error.contains(said) && error.contains("\"f\""), "{schema}: {error}");
    }
}

#[tokio::test]
async fn compilation_is_bounded_in_number_and_time() {
    let limits = Limits { compile: Duration::from_millis(1), waiting: 1, kept: 2, threads: 1 };
    let grammars =
        Grammars::new(Arc::clone(&TOKENIZER), TOKENIZER.vocab_size(), eos(), limits).unwrap();
    let source = |n: usize| {
        let grammar = format!("start: /a{{{n}}}/\n");
        Arc::new(Source { grammar, after: None })
    };
    // The first one waits for the tree of the vocabulary.
    assert_eq!(grammars.compile(source(1)).await.unwrap_err(), GrammarError::Slow { seconds: 0 });
    let (done, results) = std::sync::mpsc::channel();
    for n in 2..40 {
        let done = done.clone();
        grammars.compile_then(source(n), move |result| done.send(result.map(drop)).unwrap());
    }
    drop(done);
    let results: Vec<_> = results.iter().collect();
    assert_eq!(results.len(), 38, "everybody is told");
    assert!(results.contains(&Err(GrammarError::Busy { waiting: 1 })));
}

/// The mini model's tokenizer with as many tokens as the large models have: words of random letters.
fn large_tokenizer(vocab: usize) -> Tokenizer {
    let path =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../models/dsv4-mini/checkpoint/tokenizer.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let words = json["model"]["vocab"].as_object_mut().unwrap();
    let mut random = Random(3);
    let mut next = TOKENIZER.vocab_size();
    while next < vocab {
        let space = if random.below(2) == 0 { "\u{120}" } else { "" };
        let letters = (0..3 + random.below(8)).map(|_| char::from(b'a' + random.below(26) as u8));
        let word = space.to_owned() + &letters.collect::<String>();
        if !words.contains_key(&word) {
            words.insert(word, json!(next));
            next += 1;
        }
    }
    Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap()
}

/// Memory of this process, MiB.
fn resident_mib() -> f64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: f64 = pages.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096.0 / f64::from(1 << 20)
}

/// States what the vocabulary of the large models costs; that of debug builds, so an upper bound.
#[tokio::test]
async fn a_vocabulary_of_129280_tokens_is_ready_in_seconds() {
    const VOCAB: usize = 129_280;
    let tokenizer = Arc::new(large_tokenizer(VOCAB));
    let before = resident_mib();
    let grammars = Grammars::new(tokenizer, VOCAB, eos(), Limits::default()).unwrap();
    let tree = grammars.warm().unwrap();
    let memory = resident_mib() - before;
    let text = format!("start: {}\n", Format::Object.expression().unwrap());
    let source = Arc::new(Source { grammar: text, after: None });
    let start = std::time::Instant::now();
    let constraint = grammars.compile(source).await.unwrap();
    let compiled = start.elapsed();
    let mut live = constraint.begin();
    let text = tokens("{\"a\": [1, {\"some text\": \"and more of it\"}, true]}");
    let start = std::time::Instant::now();
    for &token in &text {
        assert!(live.accept(token).is_ok());
        if token != text[text.len() - 1] {
            live.mask().unwrap();
        }
    }
    let mask = start.elapsed() / u32::try_from(text.len()).unwrap();
    note(&format!("tree {tree:?}, {memory:.0} MiB; grammar {compiled:?}; {mask:?} a token"));
    assert!(tree < Duration::from_secs(60) && memory < 400.0, "{tree:?}, {memory} MiB");
}

#[expect(clippy::print_stderr, reason = "test output")]
fn note(line: &str) {
    eprintln!("{line}");
}
