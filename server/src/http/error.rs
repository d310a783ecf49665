//! Errors of the HTTP APIs: in OpenAI's shape, and for the clients of Anthropic's API in theirs.

use super::{RequestId, sse};
use crate::engine::{FailureKind, SubmitError};
use axum::Json;
use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde_json::{Value, json};

/// Where Anthropic's clients look for the request's id.
const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
/// Status of a request that was ended from outside: nginx's for clients that have left.
const ABORTED: u16 = 499;
/// Anthropic's status for 503: come back later.
const OVERLOADED: u16 = 529;

/// An error as a client sees it: `{"error": {"message", "type", "param", "code"}}`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{status}: {message}")]
pub struct ApiError {
    /// HTTP status, when nothing has been sent yet.
    pub status: StatusCode,
    /// What is wrong, for a person.
    pub message: String,
    /// Class: `invalid_request_error` (the client's fault) or `server_error`.
    pub kind: &'static str,
    /// The request field at fault.
    pub param: Option<String>,
    /// What is wrong, for a program.
    pub code: Option<&'static str>,
    /// Seconds after which a retry makes sense (the `Retry-After` header).
    pub retry_after: Option<u32>,
}

impl ApiError {
    fn client(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            message: shortened(message.into()),
            kind: "invalid_request_error",
            param: None,
            code: Some(code),
            retry_after: None,
        }
    }

    fn server(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { kind: "server_error", ..Self::client(status, code, message) }
    }

    /// 400: a field has a value that cannot be served.
    pub fn invalid(param: &str, message: impl Into<String>) -> Self {
        Self {
            param: Some(param.to_owned()),
            ..Self::client(StatusCode::BAD_REQUEST, "invalid_value", message)
        }
    }

    /// 400: the request as a whole is wrong.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::client(StatusCode::BAD_REQUEST, "invalid_request", message)
    }

    /// 400: the body is not JSON.
    pub fn not_json(message: impl Into<String>) -> Self {
        Self::client(StatusCode::BAD_REQUEST, "invalid_json", message)
    }

    /// 400: the prompt leaves no room for an answer.
    pub fn too_long(param: Option<&str>, prompt: usize, limit: usize) -> Self {
        Self {
            param: param.map(str::to_owned),
            ..Self::client(
                StatusCode::BAD_REQUEST,
                "context_length_exceeded",
                format!(
                    "this model's maximum context length is {limit} tokens, and the prompt has \
                     {prompt}; at least one token must remain for the answer"
                ),
            )
        }
    }

    /// 401: no key, or a wrong one.
    pub fn unauthorized() -> Self {
        let message = "an API key is needed, as `Authorization: Bearer KEY` or `x-api-key: KEY`; \
                       none was sent, or one that this server does not know";
        Self::client(StatusCode::UNAUTHORIZED, "invalid_api_key", message)
    }

    /// 404: no such model.
    pub fn no_model(name: &str, known: &[String]) -> Self {
        Self {
            param: Some("model".to_owned()),
            ..Self::client(
                StatusCode::NOT_FOUND,
                "model_not_found",
                format!("the model {name:?} does not exist; this server has {}", known.join(", ")),
            )
        }
    }

    /// 404: nothing is known of the pages of this request.
    pub fn not_traced(id: &str) -> Self {
        let message = format!(
            "nothing is known of the pages of request {id:?}: a worker keeps that of its last \
             --trace-pages requests, by the name in the header x-request-id"
        );
        Self::client(StatusCode::NOT_FOUND, "not_traced", message)
    }

    /// 404: no such path.
    pub fn no_path(path: &str) -> Self {
        Self::client(StatusCode::NOT_FOUND, "not_found", format!("there is nothing at {path}"))
    }

    /// 405: the path exists, for other methods.
    pub fn wrong_method(method: &str, path: &str) -> Self {
        Self::client(
            StatusCode::METHOD_NOT_ALLOWED,
            "method_not_allowed",
            format!("{path} does not take {method}"),
        )
    }

    /// 408: the body did not arrive in time.
    pub fn slow_body(milliseconds: u128) -> Self {
        Self::client(
            StatusCode::REQUEST_TIMEOUT,
            "request_timeout",
            format!("the request body did not arrive within {milliseconds} ms"),
        )
    }

    /// 413: the body is larger than the server takes.
    pub fn too_large(limit: usize) -> Self {
        Self::client(
            StatusCode::PAYLOAD_TOO_LARGE,
            "request_too_large",
            format!("the request body is larger than {limit} bytes: see --max-body-mib"),
        )
    }

    /// 415: the body is declared to be something else than JSON.
    pub fn wrong_type(found: &str) -> Self {
        Self::client(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "unsupported_media_type",
            format!("the content type is {found:?}, and only application/json is read"),
        )
    }

    /// 499: the request was ended from outside. No client repeats that by itself, and no router asks
    /// another worker.
    pub fn aborted(message: impl Into<String>) -> Self {
        let status = StatusCode::from_u16(ABORTED).unwrap_or(StatusCode::BAD_REQUEST);
        Self::client(status, "request_aborted", message)
    }

    /// 500: a fault of ours.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::server(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
    }

    /// 502: a worker behind the router did not answer.
    pub fn bad_gateway(message: impl Into<String>) -> Self {
        Self::server(StatusCode::BAD_GATEWAY, "bad_gateway", message)
    }

    /// 508: the request has been here before.
    pub fn going_round() -> Self {
        let message = "this request has passed this router before: the router is among its own \
                       workers, or among those of another router that it passes requests to";
        Self::server(StatusCode::LOOP_DETECTED, "loop_detected", message)
    }

    /// 503: come back later.
    pub fn unavailable(code: &'static str, message: impl Into<String>, retry_after: u32) -> Self {
        Self {
            retry_after: Some(retry_after),
            ..Self::server(StatusCode::SERVICE_UNAVAILABLE, code, message)
        }
    }

    /// A refusal of the engine.
    pub fn from_submit(error: &SubmitError, retry_after: u32) -> Self {
        let message = error.to_string();
        match error {
            SubmitError::QueueFull { .. } | SubmitError::QueueFullOfTokens { .. } => {
                Self::unavailable("queue_full", message, retry_after)
            }
            SubmitError::Draining => Self::unavailable("shutting_down", message, retry_after),
            SubmitError::TooLong { prompt, limit } => Self::too_long(None, *prompt, *limit),
            SubmitError::NeverFits { .. } => {
                Self::client(StatusCode::BAD_REQUEST, "request_too_large", message)
            }
            SubmitError::WrongRole(_) => {
                Self::client(StatusCode::BAD_REQUEST, "wrong_role", message)
            }
            SubmitError::Stopped => {
                Self::server(StatusCode::INTERNAL_SERVER_ERROR, "worker_stopped", message)
            }
        }
    }

    /// A loss of an accepted request.
    pub fn from_failure(kind: FailureKind, message: &str, retry_after: u32) -> Self {
        match kind {
            FailureKind::Integrity => {
                Self::server(StatusCode::INTERNAL_SERVER_ERROR, "kv_integrity", message)
            }
            FailureKind::Unavailable => Self::unavailable("unavailable", message, retry_after),
            FailureKind::Internal => Self::internal(message),
            FailureKind::Aborted => Self::aborted(message),
        }
    }

    /// The body.
    pub fn to_json(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }})
    }

    /// Status and body in Anthropic's API, which has no field for the parameter: the message names
    /// it. Its 529 is our 503, which it does not know.
    fn to_anthropic(&self, request_id: &str) -> (StatusCode, Value) {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::REQUEST_TIMEOUT => "timeout_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "api_error",
        };
        let status = match self.status {
            StatusCode::SERVICE_UNAVAILABLE => {
                StatusCode::from_u16(OVERLOADED).unwrap_or(StatusCode::SERVICE_UNAVAILABLE)
            }
            status => status,
        };
        let body = json!({
            "type": "error",
            "error": {"type": kind, "message": self.message},
            "request_id": request_id,
        });
        (status, body)
    }
}

/// A message may quote the request, which may be large.
fn shortened(mut message: String) -> String {
    const MOST: usize = 1000;
    if message.len() > MOST {
        message.truncate(message.floor_char_boundary(MOST));
        message.push_str("...");
    }
    message
}

/// Whether a status asks to come back later, in any API's words.
pub(crate) fn is_busy(status: StatusCode) -> bool {
    status == StatusCode::SERVICE_UNAVAILABLE || status.as_u16() == OVERLOADED
}

/// How the errors of an API are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorStyle {
    /// Chat Completions, Completions, and whatever is nobody's API.
    OpenAi,
    /// Responses: as above, with events of its own in a stream.
    Responses,
    /// Messages.
    Anthropic,
}

impl ErrorStyle {
    /// The style of what is at a path.
    pub(crate) fn of(path: &str) -> Self {
        let is_below = |root| {
            path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        if is_below("/v1/messages") {
            Self::Anthropic
        } else if is_below("/v1/responses") {
            Self::Responses
        } else {
            Self::OpenAi
        }
    }

    /// The event that ends a stream whose answer was lost; `sequence` is its number among the
    /// events, where those have numbers and it is known.
    pub(crate) fn event(self, error: &ApiError, request_id: &str, sequence: Option<u64>) -> Bytes {
        match self {
            Self::OpenAi => sse::data(&error.to_json()),
            Self::Responses => {
                // OpenAI documents the fields; its clients raise an error for the object.
                let mut event = error.to_json();
                let fields = json!({
                    "type": "error",
                    "code": error.code,
                    "message": error.message,
                    "param": error.param,
                    "sequence_number": sequence,
                });
                if let (Value::Object(event), Value::Object(fields)) = (&mut event, fields) {
                    event.extend(fields);
                }
                sse::event("error", &event)
            }
            Self::Anthropic => sse::event("error", &error.to_anthropic(request_id).1),
        }
    }

    /// An answer as the clients of this API know it: for Anthropic's the errors are written anew,
    /// and the request's id is where they look for it.
    pub(crate) fn restate(self, request_id: &RequestId, mut response: Response) -> Response {
        if self != Self::Anthropic {
            return response;
        }
        response.headers_mut().insert(ANTHROPIC_REQUEST_ID, request_id.header());
        let Some(error) = response.extensions_mut().remove::<ApiError>() else { return response };
        let (status, json) = error.to_anthropic(request_id.as_str());
        *response.status_mut() = status;
        response.headers_mut().remove(header::CONTENT_LENGTH);
        *response.body_mut() = Body::from(json.to_string());
        response
    }
}

impl IntoResponse for ApiError {
    /// The error itself goes along, so that it can be said in another API's words.
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.to_json())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response.extensions_mut().insert(self);
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_has_its_style() {
        for (path, style) in [
            ("/v1/messages", ErrorStyle::Anthropic),
            ("/v1/messages/count_tokens", ErrorStyle::Anthropic),
            ("/v1/messages/batches/x", ErrorStyle::Anthropic),
            ("/v1/messagesx", ErrorStyle::OpenAi),
            ("/v1/responses", ErrorStyle::Responses),
            ("/v1/responses/resp_1", ErrorStyle::Responses),
            ("/v1/chat/completions", ErrorStyle::OpenAi),
            ("/", ErrorStyle::OpenAi),
        ] {
            assert_eq!(ErrorStyle::of(path), style, "{path}");
        }
    }

    #[test]
    fn anthropic_gets_its_types_and_statuses() {
        let retry = |code| ApiError::unavailable(code, "m", 7);
        for (error, status, kind) in [
            (ApiError::invalid("p", "m"), 400, "invalid_request_error"),
            (ApiError::not_json("m"), 400, "invalid_request_error"),
            (ApiError::no_model("m", &[]), 404, "not_found_error"),
            (ApiError::wrong_method("PUT", "/"), 405, "invalid_request_error"),
            (ApiError::slow_body(5), 408, "timeout_error"),
            (ApiError::too_large(5), 413, "request_too_large"),
            (ApiError::wrong_type("x"), 415, "invalid_request_error"),
            (ApiError::aborted("m"), 499, "invalid_request_error"),
            (ApiError::internal("m"), 500, "api_error"),
            (ApiError::bad_gateway("m"), 502, "api_error"),
            (retry("queue_full"), 529, "overloaded_error"),
            (retry("shutting_down"), 529, "overloaded_error"),
        ] {
            let (found, body) = error.to_anthropic("req-1");
            assert_eq!(found.as_u16(), status, "{error}");
            assert_eq!(body["type"], "error");
            assert_eq!(body["error"]["type"], kind, "{error}");
            assert_eq!(body["error"]["message"], error.message);
            assert_eq!(body["request_id"], "req-1");
        }
    }
}
