//! From a conversation to a request for the engine: what Chat Completions, Messages and Responses
//! share.

use super::error::ApiError;
use super::fields::Fields;
use super::format::{self, Asked, Strict, Wanted};
use super::sampling::{self, Stops};
use super::{AppState, cache_control, shape};
use crate::engine::{CacheKeep, GenerateRequest, Provenance, ThinkingBudget, Turn};
use deepseek_recipe::request::{
    ConversationRequest, ConversionError, ConversionOptions, ModelVersion,
};
use deepseek_recipe_encoding::v4::dsv4::DeepseekV4Encoding;
use deepseek_recipe_encoding::{PromptEncoding, PromptTokenizer, TokenizerEncoder};
use dsv4_model::sample::SamplingParams;
use dsv4_model::text::Tokenizer;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::ops::Range;

/// Spellings that the encoder treats as tokens inside assistant messages, although they belong to
/// later models. A tokenizer without them reads them as text.
const GROUNDING: [&str; 8] = [
    "<｜ref｜>",
    "<｜/ref｜>",
    "<｜box｜>",
    "<｜/box｜>",
    "<｜point｜>",
    "<｜/point｜>",
    "<｜polygon｜>",
    "<｜/polygon｜>",
];

/// What every conversation is converted with.
pub(super) struct ChatEncoder {
    pub(super) options: ConversionOptions,
    encoding: DeepseekV4Encoding,
}

impl std::fmt::Debug for ChatEncoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatEncoder").field("options", &self.options).finish_non_exhaustive()
    }
}

impl ChatEncoder {
    pub(super) fn new(tokenizer: &Tokenizer, names: &[String], default_thinking: bool) -> Self {
        let names = names.iter().map(|name| (name.clone(), ModelVersion::DeepseekV4Pro));
        let encoder = KnownSpecials {
            inner: PromptTokenizer::new(tokenizer.inner()),
            unknown: GROUNDING
                .into_iter()
                .filter(|&token| {
                    !tokenizer.inner().get_added_vocabulary().get_vocab().contains_key(token)
                })
                .collect(),
        };
        Self {
            options: ConversionOptions::new()
                .with_model_versions_by_name(names)
                .with_default_thinking_mode(default_thinking)
                // The context is the only bound; the crate's own would refuse what fits.
                .with_thinking_max_tokens_upper_bound(u32::MAX)
                .with_non_thinking_max_tokens_upper_bound(u32::MAX),
            encoding: DeepseekV4Encoding::new().with_tokenizer(encoder),
        }
    }
}

/// A prompt tokenizer that reads special tokens which the vocabulary lacks as text.
struct KnownSpecials {
    inner: PromptTokenizer,
    unknown: Vec<&'static str>,
}

impl TokenizerEncoder for KnownSpecials {
    fn encode_ids(&self, text: &str, special_ranges: &[Range<usize>]) -> Result<Vec<u32>, String> {
        let known: Vec<_> = special_ranges
            .iter()
            .filter(|range| !self.unknown.contains(&&text[(*range).clone()]))
            .cloned()
            .collect();
        self.inner.encode_ids(text, &known)
    }
}

/// What a request says besides its conversation.
pub(super) struct Wishes {
    /// Model name as the client wrote it.
    pub(super) model: String,
    pub(super) sampling: SamplingParams,
    stops: Stops,
    /// Most tokens to generate, if the client says.
    pub(super) max_tokens: Option<u32>,
    /// Tool calls that the client accepts.
    pub(super) max_calls: u32,
    /// Least tokens to generate.
    min_tokens: u32,
    /// Most tokens of thinking, if the client says.
    thinking_tokens: Option<u32>,
    /// Answers that are wanted.
    pub(super) choices: u32,
    /// Whether a stop text that ends the answer is a part of it.
    includes_stop: bool,
    /// What the answer's text must be.
    pub(super) formats: Vec<Asked>,
    /// Tools whose arguments must fit their schemas.
    pub(super) strict: Strict,
    ignores_eos: bool,
    cache_salt: String,
    pub(super) cache_keep: CacheKeep,
    turn: Turn,
}

impl Wishes {
    /// Reads the fields that all APIs have; stop texts are called `stops`. The model's name is put
    /// in if it is missing; what deepseek-recipe does not know, or reads more narrowly, is taken
    /// out.
    pub(super) fn read(
        state: &AppState,
        fields: &mut Fields,
        stops: &str,
    ) -> Result<Self, ApiError> {
        let info = state.engine.info();
        let model = state.model_of(fields)?;
        fields.0.insert("model".to_owned(), Value::String(model.clone()));
        let wishes = Self {
            model,
            sampling: sampling::read(fields, info.vocab_size)?,
            stops: sampling::stops(fields, stops, &state.tokenizer, info)?,
            max_tokens: None,
            max_calls: u32::MAX,
            min_tokens: sampling::min_tokens(fields)?,
            thinking_tokens: thinking_tokens(fields)?,
            choices: 1,
            includes_stop: fields.flag("include_stop_str_in_output")?.unwrap_or(false),
            formats: format::extras(fields)?,
            strict: Strict::new(),
            ignores_eos: fields.flag("ignore_eos")?.unwrap_or(false),
            cache_salt: fields.cache_salt()?,
            cache_keep: cache_control::read(fields)?,
            turn: fields.turn()?,
        };
        let own = ["seed", "cache_salt", "cache_control", "priority", "user", THINKING_TOKENS];
        for name in own {
            fields.take(name);
        }
        Ok(wishes)
    }
}

/// What vLLM calls the bound of the thinking.
const THINKING_TOKENS: &str = "thinking_token_budget";

/// The bound of the thinking: vLLM's field, or Anthropic's, which any chat may have.
fn thinking_tokens(fields: &Fields) -> Result<Option<u32>, ApiError> {
    let own = fields.at_least(THINKING_TOKENS, 0)?;
    let Some(Value::Object(thinking)) = fields.get("thinking") else { return Ok(own) };
    let theirs = thinking.get("budget_tokens").and_then(Value::as_u64);
    // What is no number is told where the shapes are checked.
    let theirs = theirs.map(|tokens| u32::try_from(tokens).unwrap_or(u32::MAX));
    Ok(own.into_iter().chain(theirs).min())
}

/// A conversation that can be submitted.
pub(super) struct Prepared {
    pub(super) generate: GenerateRequest,
    /// deepseek-recipe's view, with everything that parsing the output needs.
    pub(super) recipe: ConversationRequest,
    /// Model name as the client wrote it.
    pub(super) model: String,
    /// Tool calls that the client accepts.
    pub(super) max_calls: u32,
    /// Whether a stop text that ends the answer is a part of it.
    pub(super) includes_stop: bool,
    /// What the answer must be.
    pub(super) wanted: Option<Wanted>,
    /// Answers that are wanted.
    pub(super) choices: u32,
}

impl Prepared {
    /// Encodes a conversation, whose text is in the field `param`. Takes time in proportion to its
    /// length, so it belongs on a blocking thread.
    pub(super) fn new(
        state: &AppState,
        id: String,
        mut recipe: ConversationRequest,
        wishes: Wishes,
        param: &str,
    ) -> Result<Self, ApiError> {
        let asked = format::only(wishes.formats)?;
        let (strict, calls) = (&wishes.strict, wishes.max_calls);
        let wanted = format::of_answer(state, asked.as_ref(), strict, &recipe, calls)?;
        sampling::ends(wanted.as_ref(), wishes.ignores_eos)?;
        let Wishes { model, mut sampling, stops, max_tokens, max_calls, .. } = wishes;
        recipe.parsing_options.stop_sequences = stops.texts;
        // Markup that the client cannot use is swallowed, not shown as text.
        recipe.parsing_options.parse_tool_calls |= max_calls == 0;
        if state.config.recipe_sampling {
            let options = &recipe.inference_options;
            sampling.temperature = options.temperature.unwrap_or(sampling.temperature);
            sampling.top_p = options.top_p.unwrap_or(sampling.top_p);
        }
        let thinking = match wishes.thinking_tokens.filter(|_| format::thinks(&recipe)) {
            Some(tokens) => Some(ThinkingBudget { tokens, end: state.token("</think>")? }),
            None => None,
        };
        let prompt = encode(state, &recipe, param)?;
        let context = state.engine.info().context_length;
        let room = state.room(prompt.len(), param)?;
        recipe.inference_options.max_tokens = max_tokens.map(|wanted| wanted.min(room));
        let max_tokens = recipe
            .resolve_max_tokens(context - room, context)
            .map_err(|error| conversion_error(&error, &[param], None))?;
        let generate = GenerateRequest {
            id,
            prompt,
            max_tokens,
            stop_tokens: stops.tokens,
            min_tokens: sampling::no_more_than(wishes.min_tokens, max_tokens)?,
            thinking,
            constraint: None,
            sampling,
            cache_salt: wishes.cache_salt,
            cache_keep: wishes.cache_keep,
            turn: wishes.turn,
            provenance: Provenance::default(),
        };
        let (includes_stop, choices) = (wishes.includes_stop, wishes.choices);
        Ok(Self { generate, recipe, model, max_calls, includes_stop, wanted, choices })
    }
}

/// The tokens of a conversation, whose text is in the field `param`.
pub(super) fn encode(
    state: &AppState,
    recipe: &ConversationRequest,
    param: &str,
) -> Result<Vec<u32>, ApiError> {
    let encoding = &state.chat.encoding;
    let text = encoding.render_conversation(&recipe.conversation);
    state.fits_at_all(text.prompt.len(), param)?;
    encoding.encode(&recipe.conversation).map_err(|error| ApiError::internal(error.to_string()))
}

/// Reads fields that have the right shape as a type of deepseek-recipe; `least` has the fields that
/// it cannot do without, and is used to find the one at fault.
pub(super) fn deserialize<T: DeserializeOwned>(
    fields: &Map<String, Value>,
    least: &[(&str, Value)],
) -> Result<T, ApiError> {
    T::deserialize(fields).map_err(|error| {
        tracing::debug!(%error, "a request that has the right shape cannot be read");
        let is_readable = |name: &String, value: &Value| {
            let least = least.iter().map(|(name, value)| ((*name).to_owned(), value.clone()));
            let mut alone: Map<String, Value> = least.collect();
            alone.insert(name.clone(), value.clone());
            T::deserialize(&alone).is_ok()
        };
        match fields.iter().find(|(name, value)| !is_readable(name, value)) {
            Some((name, value)) => shape::unreadable(name, Some(value)),
            None => ApiError::bad_request("the request cannot be read: a field does not fit"),
        }
    })
}

/// Reads a part of a request, a message or an item, that has the right shape; `at` is its place.
pub(super) fn deserialize_part<T: DeserializeOwned>(at: &str, part: &Value) -> Result<T, ApiError> {
    T::deserialize(part).map_err(|error| {
        tracing::debug!(%error, at, "a part that has the right shape cannot be read");
        shape::unreadable(at, Some(part))
    })
}

/// An error of the conversion, which names the first of `fields` that its message mentions,
/// otherwise `fallback`.
pub(super) fn conversion_error(
    error: &ConversionError,
    fields: &[&str],
    fallback: Option<&str>,
) -> ApiError {
    let message = match error {
        ConversionError::BadRequest { detail } => detail.clone(),
        ConversionError::Internal { detail } => return ApiError::internal(detail.clone()),
    };
    let named = fields.iter().find(|field| message.to_lowercase().contains(**field));
    match named.copied().or(fallback) {
        Some(field) => ApiError::invalid(field, message),
        None => ApiError::bad_request(message),
    }
}
