//! `POST /generate`, SGLang's own endpoint: a text or token ids in, text and token ids out.
//!
//! One prompt per request. A stream repeats the text so far in every event, as SGLang's does.

use super::choices::Merged;
use super::completions::{self, CompletionOutput, CompletionRequest, Delta};
use super::error::ApiError;
use super::fields::{Fields, kind_of};
use super::metrics::RequestTimer;
use super::parse::{Failure, finite};
use super::{AppState, RequestId, choices, generate, sse, unknown};
use axum::Json;
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::Request;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::Instant;

/// Tokens to generate when the request does not say, as in SGLang.
const DEFAULT_MAX_TOKENS: u32 = 128;

/// Fields of `sampling_params` and what Completions call them.
const RENAMED: [(&str, &str); 4] = [
    ("max_new_tokens", "max_tokens"),
    ("min_new_tokens", "min_tokens"),
    ("sampling_seed", "seed"),
    ("no_stop_trim", "include_stop_str_in_output"),
];

/// Fields of `sampling_params` that mean the same in both.
const SAME: [&str; 15] = [
    "ebnf",
    "frequency_penalty",
    "ignore_eos",
    "json_schema",
    "logit_bias",
    "min_p",
    "n",
    "presence_penalty",
    "regex",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "structural_tag",
    "temperature",
    "top_k",
];

/// Fields of the request that Completions read as well.
pub(super) const SHARED: [&str; 5] = ["model", "stream", "priority", "cache_salt", "cache_control"];

/// Fields that would change the answer and are not understood.
pub(super) const NOT_READ: [&str; 6] = [
    "input_embeds",
    "image_data",
    "audio_data",
    "lora_path",
    "custom_logit_processor",
    "return_hidden_states",
];

fn translate(mut fields: Fields) -> Result<(Fields, bool), ApiError> {
    for name in NOT_READ {
        if fields.get(name).is_some_and(|value| *value != false) {
            return Err(ApiError::invalid(name, format!("{name} is not supported")));
        }
    }
    let mut out = Map::new();
    let mut params = match fields.take("sampling_params") {
        None => Map::new(),
        Some(Value::Object(params)) => params,
        Some(other) => {
            let message = format!("sampling_params is {}, and must be an object", kind_of(&other));
            return Err(ApiError::invalid("sampling_params", message));
        }
    };
    for (theirs, ours) in RENAMED {
        if let Some(value) = params.shift_remove(theirs) {
            out.insert(ours.to_owned(), value);
        }
    }
    for name in SAME.into_iter().chain(["top_p"]) {
        if let Some(value) = params.shift_remove(name) {
            out.insert(name.to_owned(), value);
        }
    }
    // These are about text that was never made here.
    params.retain(|name, _| {
        !matches!(name.as_str(), "skip_special_tokens" | "spaces_between_special_tokens")
    });
    if let Some(name) = params.keys().next() {
        let short: String = name.chars().take(64).collect();
        let message = format!("sampling_params has {short:?}, which is not known here");
        return Err(ApiError::invalid("sampling_params", message));
    }
    out.entry("max_tokens").or_insert(DEFAULT_MAX_TOKENS.into());
    for name in SHARED {
        if let Some(value) = fields.take(name) {
            out.insert(name.to_owned(), value);
        }
    }
    let wants_logprobs = fields.flag("return_logprob")?.unwrap_or(false);
    let alternatives = fields.count("top_logprobs_num", 0, dsv4_model::sample::MAX_LOGPROBS)?;
    if wants_logprobs {
        out.insert("logprobs".to_owned(), alternatives.unwrap_or(0).into());
    }
    if fields.integer("logprob_start_len")?.is_some_and(|start| start >= 0) {
        let message = "logprob_start_len can only be -1: prompts have no log probabilities";
        return Err(ApiError::invalid("logprob_start_len", message));
    }
    out.insert("prompt".to_owned(), prompt(&mut fields)?);
    Ok((Fields(out), wants_logprobs))
}

/// `text` or `input_ids`, as Completions take either.
fn prompt(fields: &mut Fields) -> Result<Value, ApiError> {
    let wrong = |name: &str, message: String| Err(ApiError::invalid(name, message));
    match (fields.take("text"), fields.take("input_ids")) {
        (Some(_), Some(_)) => {
            wrong("input_ids", "text and input_ids are both there, and one can be".to_owned())
        }
        (Some(text @ Value::String(_)), None) => Ok(text),
        (None, Some(Value::Array(ids))) if ids.first().is_some_and(Value::is_array) => {
            wrong("input_ids", "one prompt per request is served".to_owned())
        }
        (None, Some(ids @ Value::Array(_))) => Ok(ids),
        (None, None) => wrong("text", "text is missing, and so is input_ids".to_owned()),
        (Some(other), None) => {
            wrong("text", format!("text is {}, and must be a string", kind_of(&other)))
        }
        (None, Some(other)) => {
            wrong("input_ids", format!("input_ids is {}, and must be a list", kind_of(&other)))
        }
    }
}

/// Answers a prompt.
pub(super) async fn generate(
    State(state): State<Arc<AppState>>,
    Extension(request_id): Extension<RequestId>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let start = Instant::now();
    let body = generate::read_body(&state, request).await?;
    let fields = Fields::parse(&body)?;
    unknown::check(&state, &request_id, unknown::GENERATE, &fields)?;
    let id = match fields.string("rid")? {
        Some(rid) => rid.chars().take(128).collect(),
        None => super::random_id()?,
    };
    let (fields, wants_logprobs) = translate(fields)?;
    let prepared = generate::prepare(&state, {
        let id = id.clone();
        move |state| CompletionRequest::read(state, id, fields).map_err(renamed)
    })
    .await?;
    let head = Head { id, start, wants_logprobs };
    let stream = prepared.stream;
    let (outputs, timer) = completions::begin(&state, prepared, &request_id, start).await?;
    if stream {
        let keep_alive = state.config.keep_alive;
        let so_far = outputs.iter().map(|_| Delta::default()).collect();
        let outputs = Merged::new(outputs);
        let frames = NativeStream { state, head, outputs, timer, so_far, phase: Phase::Output };
        return Ok(sse::response(frames, keep_alive, sse::COMMENT));
    }
    whole(&state, &head, outputs, timer).await
}

/// An error about a field, under the name that it has here.
fn renamed(mut error: ApiError) -> ApiError {
    if let Some(param) = &error.param
        && let Some((theirs, ours)) = RENAMED.iter().find(|(_, ours)| ours == param)
    {
        error.message = error.message.replacen(ours, theirs, 1);
        error.param = Some((*theirs).to_owned());
    }
    error
}

async fn whole(
    state: &AppState,
    head: &Head,
    outputs: Vec<CompletionOutput>,
    mut timer: RequestTimer,
) -> Result<Response, ApiError> {
    let mut outputs = Merged::new(outputs);
    let wholes = completions::wholes(&mut outputs).await;
    let wholes = wholes.map_err(|lost| generate::fail(state, &mut timer, &lost))?;
    let of_outputs = outputs.parts.iter().zip(&wholes);
    let mut answers: Vec<Value> =
        of_outputs.map(|(output, all)| head.answer(output, all)).collect();
    timer.finish(choices::total(outputs.parts.iter().map(|output| output.usage)));
    let answer = match answers.len() {
        1 => answers.remove(0),
        _ => Value::Array(answers),
    };
    Ok(Json(answer).into_response())
}

/// What every answer of a request has.
struct Head {
    id: String,
    start: Instant,
    wants_logprobs: bool,
}

impl Head {
    fn answer(&self, output: &CompletionOutput, all: &Delta) -> Value {
        let usage = output.usage;
        let completion_tokens = u32::try_from(output.ids.len()).unwrap_or(u32::MAX);
        let finish_reason = match all.finish {
            None => Value::Null,
            Some("length") => json!({"type": "length", "length": completion_tokens}),
            Some(kind) => json!({"type": kind}),
        };
        let mut meta = json!({
            "id": self.id,
            "finish_reason": finish_reason,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "e2e_latency": self.start.elapsed().as_secs_f64(),
        });
        if self.wants_logprobs {
            let entry = |token: u32, logprob: f32| json!([finite(logprob), token, null]);
            let of_tokens = all.tokens.iter().map(|(_, s)| entry(s.token, s.logprob));
            meta["output_token_logprobs"] = of_tokens.collect();
            let of_tops = all.tokens.iter().map(|(_, sampled)| {
                sampled
                    .top
                    .iter()
                    .map(|(token, logprob)| entry(*token, *logprob))
                    .collect::<Value>()
            });
            meta["output_top_logprobs"] = of_tops.collect();
        }
        json!({"text": all.text, "output_ids": output.ids, "meta_info": meta})
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Output,
    Done,
    Over,
}

/// The events of a streamed answer.
struct NativeStream {
    state: Arc<AppState>,
    head: Head,
    outputs: Merged<CompletionOutput>,
    timer: RequestTimer,
    so_far: Vec<Delta>,
    phase: Phase,
}

impl NativeStream {
    fn event(&mut self, index: usize, delta: Result<Delta, Failure>) -> Bytes {
        match delta {
            Ok(delta) => {
                self.so_far[index].add(delta);
                let mut answer = self.head.answer(&self.outputs.parts[index], &self.so_far[index]);
                if self.so_far.len() > 1 {
                    answer["index"] = index.into();
                }
                sse::data(&answer)
            }
            Err(failure) => {
                self.outputs.abandon();
                self.phase = Phase::Over;
                sse::data(&generate::fail(&self.state, &mut self.timer, &failure).to_json())
            }
        }
    }
}

impl sse::Frames for NativeStream {
    async fn frame(&mut self) -> Option<Bytes> {
        if self.phase == Phase::Output {
            if let Some((index, delta)) = self.outputs.next().await {
                if delta.is_ok() {
                    self.timer.first_token();
                }
                return Some(self.event(index, delta));
            }
            self.timer.finish(choices::total(self.outputs.parts.iter().map(|o| o.usage)));
            self.phase = Phase::Done;
        }
        if self.phase == Phase::Done {
            self.phase = Phase::Over;
            return Some(sse::DONE);
        }
        None
    }
}
