//! Sampling fields that the endpoints share.

use super::error::ApiError;
use super::fields::{Fields, kind_of, shown};
use super::format::Wanted;
use crate::engine::EngineInfo;
use dsv4_model::sample::SamplingParams;
use dsv4_model::text::Tokenizer;
use serde_json::Value;

/// Entries that `logit_bias` and `stop_token_ids` may have.
const MAX_ENTRIES: usize = 1024;
/// Stop sequences of one request.
const MAX_STOPS: usize = 16;
/// Bytes of one stop sequence.
const MAX_STOP_BYTES: usize = 4096;

/// Reads the sampling fields as the client sent them; absent ones get OpenAI's defaults
/// (temperature 1, top-p 1) and a random seed. Logprob fields differ between the endpoints and
/// are left off.
pub(super) fn read(fields: &Fields, vocab_size: u32) -> Result<SamplingParams, ApiError> {
    let default = SamplingParams::default();
    let top_k = match fields.integer("top_k")? {
        None | Some(-1) => 0,
        Some(value) if value >= 0 => u32::try_from(value).unwrap_or(u32::MAX),
        Some(value) => {
            let message = format!(
                "top_k is {value}, and must be an integer from 1 up, or 0 or -1 for all tokens"
            );
            return Err(ApiError::invalid("top_k", message));
        }
    };
    Ok(SamplingParams {
        temperature: fields.number("temperature", 0.0, 2.0)?.unwrap_or(1.0),
        top_p: fields.share("top_p")?.unwrap_or(1.0),
        top_k,
        min_p: fields.number("min_p", 0.0, 1.0)?.unwrap_or(0.0),
        repetition_penalty: fields.number("repetition_penalty", 0.01, 100.0)?.unwrap_or(1.0),
        presence_penalty: fields.number("presence_penalty", -2.0, 2.0)?.unwrap_or(0.0),
        frequency_penalty: fields.number("frequency_penalty", -2.0, 2.0)?.unwrap_or(0.0),
        seed: seed(fields)?,
        logit_bias: logit_bias(fields, vocab_size)?,
        ..default
    })
}

/// The seed: any 64-bit integer; a random one if none is given.
fn seed(fields: &Fields) -> Result<u64, ApiError> {
    let Some(value) = fields.get("seed") else { return random() };
    // A negative seed is as good as any other: only its bits matter.
    value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned)).ok_or_else(|| {
        ApiError::invalid("seed", format!("seed is {}, and must be a 64-bit integer", shown(value)))
    })
}

/// A random number from the operating system.
pub(super) fn random() -> Result<u64, ApiError> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes)
        .map_err(|error| ApiError::internal(format!("no random numbers: {error}")))?;
    Ok(u64::from_le_bytes(bytes))
}

/// `{"TOKEN ID": bias}` with biases from -100 to 100, in order of token ids.
fn logit_bias(fields: &Fields, vocab_size: u32) -> Result<Vec<(u32, f32)>, ApiError> {
    let name = "logit_bias";
    let Some(value) = fields.get(name) else { return Ok(Vec::new()) };
    let Some(map) = value.as_object() else {
        return Err(ApiError::invalid(
            name,
            format!("{name} is {}, and must be an object", kind_of(value)),
        ));
    };
    if map.len() > MAX_ENTRIES {
        let message = format!("{name} has {} entries, and may have {MAX_ENTRIES}", map.len());
        return Err(ApiError::invalid(name, message));
    }
    let mut biases = Vec::with_capacity(map.len());
    for (key, value) in map {
        let token =
            key.parse::<u32>().ok().filter(|&token| token < vocab_size).ok_or_else(|| {
                ApiError::invalid(
                    name,
                    format!(
                        "{name} has the key {key:?}, and keys must be token ids: integers from 0 \
                         to {}",
                        vocab_size - 1
                    ),
                )
            })?;
        let bias = value.as_f64().filter(|bias| bias.abs() <= 100.0).ok_or_else(|| {
            ApiError::invalid(
                name,
                format!(
                    "{name}[{key:?}] is {}, and must be a number from -100 to 100",
                    shown(value)
                ),
            )
        })?;
        biases.push((token, bias as f32));
    }
    // Two spellings of one id ("7" and "07") would otherwise add up.
    biases.sort_by_key(|&(token, _)| token);
    biases.dedup_by_key(|&mut (token, _)| token);
    Ok(biases)
}

/// `min_tokens`, as in vLLM: no token that ends the output comes before so many others.
pub(super) fn min_tokens(fields: &Fields) -> Result<u32, ApiError> {
    Ok(fields.at_least("min_tokens", 0)?.unwrap_or(0))
}

/// Refuses a least number of tokens that is above the largest.
pub(super) fn no_more_than(min_tokens: u32, max_tokens: u32) -> Result<u32, ApiError> {
    if min_tokens > max_tokens {
        let message =
            format!("min_tokens is {min_tokens}, and at most {max_tokens} can be generated");
        return Err(ApiError::invalid("min_tokens", message));
    }
    Ok(min_tokens)
}

/// Refuses to go on after the end of what is constrained.
pub(super) fn ends(wanted: Option<&Wanted>, ignores_eos: bool) -> Result<(), ApiError> {
    match wanted {
        Some(wanted) if ignores_eos => {
            let message = format!(
                "ignore_eos does not go with {}, which says where the answer ends",
                wanted.param
            );
            Err(ApiError::invalid("ignore_eos", message))
        }
        _ => Ok(()),
    }
}

/// Where an output ends, other than by its length.
#[derive(Debug, Default)]
pub(super) struct Stops {
    /// Tokens that end it.
    pub(super) tokens: Vec<u32>,
    /// Texts that end it.
    pub(super) texts: Vec<String>,
}

/// Reads the stop texts, which an API calls `name`, `stop_token_ids` and `ignore_eos`. A stop text
/// that spells a token of the added vocabulary is matched as that token, because such tokens are
/// not part of the output text.
pub(super) fn stops(
    fields: &mut Fields,
    name: &str,
    tokenizer: &Tokenizer,
    info: &EngineInfo,
) -> Result<Stops, ApiError> {
    let mut stops = Stops::default();
    if !fields.flag("ignore_eos")?.unwrap_or(false) {
        stops.tokens.push(info.eos_token);
    }
    stops.tokens.extend(token_ids(fields, "stop_token_ids", info.vocab_size)?);
    for text in stop_texts(name, fields.take(name))? {
        let vocabulary = tokenizer.inner().get_added_vocabulary().get_vocab();
        match vocabulary.get(&text) {
            Some(&token) => stops.tokens.push(token),
            None => stops.texts.push(text),
        }
    }
    stops.tokens.sort_unstable();
    stops.tokens.dedup();
    Ok(stops)
}

fn token_ids(fields: &Fields, name: &str, vocab_size: u32) -> Result<Vec<u32>, ApiError> {
    let Some(value) = fields.get(name) else { return Ok(Vec::new()) };
    let list = value.as_array().filter(|list| list.len() <= MAX_ENTRIES).ok_or_else(|| {
        ApiError::invalid(name, format!("{name} must be a list of at most {MAX_ENTRIES} token ids"))
    })?;
    list.iter().map(|value| token_id(name, value, vocab_size)).collect()
}

/// A token id below the vocabulary size.
pub(super) fn token_id(name: &str, value: &Value, vocab_size: u32) -> Result<u32, ApiError> {
    value
        .as_u64()
        .and_then(|token| u32::try_from(token).ok())
        .filter(|&token| token < vocab_size)
        .ok_or_else(|| {
            ApiError::invalid(
                name,
                format!(
                    "{name} has {}, and token ids are integers from 0 to {}",
                    shown(value),
                    vocab_size - 1
                ),
            )
        })
}

fn stop_texts(name: &str, value: Option<Value>) -> Result<Vec<String>, ApiError> {
    let wrong = |message: String| ApiError::invalid(name, message);
    let list = match value {
        None => return Ok(Vec::new()),
        Some(Value::String(text)) => vec![Value::String(text)],
        Some(Value::Array(list)) => list,
        Some(other) => {
            let kind = kind_of(&other);
            return Err(wrong(format!("{name} is {kind}, and must be a string or a list")));
        }
    };
    if list.len() > MAX_STOPS {
        let count = list.len();
        return Err(wrong(format!("{name} has {count} entries, and may have {MAX_STOPS}")));
    }
    list.into_iter()
        .enumerate()
        .map(|(index, value)| match value {
            Value::String(text) if (1..=MAX_STOP_BYTES).contains(&text.len()) => Ok(text),
            Value::String(text) => Err(wrong(format!(
                "{name}[{index}] has {} bytes, and must have 1 to {MAX_STOP_BYTES}",
                text.len()
            ))),
            other => {
                let kind = kind_of(&other);
                Err(wrong(format!("{name}[{index}] is {kind}, and must be a string")))
            }
        })
        .collect()
}
