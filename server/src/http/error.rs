//! Errors of the HTTP API, in OpenAI's shape.

use crate::engine::{FailureKind, SubmitError};
use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

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
            format!("the request body is larger than {limit} bytes"),
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

    /// 500: a fault of ours.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::server(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
    }

    /// 502: a worker behind the router did not answer.
    pub fn bad_gateway(message: impl Into<String>) -> Self {
        Self::server(StatusCode::BAD_GATEWAY, "bad_gateway", message)
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

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.to_json())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}
