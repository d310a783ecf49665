//! HTTP for the object store whose answers have an end: the client gathers some of them whole, and a
//! server that never stops talking would fill this machine's memory.

use http_body_util::{BodyExt as _, Limited};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpResponseBody, HttpService, ReqwestConnector,
};
use std::pin::Pin;

/// Most bytes of an answer: far more than an object or a page of a list has.
const BODY_MAX: usize = 64 << 20;
/// Most bytes of an answer that says what went wrong.
const ERROR_BODY_MAX: usize = 64 << 10;

/// Makes clients whose answers end.
#[derive(Debug, Default)]
pub(super) struct BoundedConnector;

impl HttpConnector for BoundedConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Bounded(ReqwestConnector::default().connect(options)?)))
    }
}

#[derive(Debug)]
struct Bounded(HttpClient);

impl HttpService for Bounded {
    fn call<'a, 'b>(
        &'a self,
        request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(async move {
            let (head, body) = self.0.execute(request).await?.into_parts();
            let max = if head.status.is_success() { BODY_MAX } else { ERROR_BODY_MAX };
            let error = |error| HttpError::new_boxed(HttpErrorKind::Decode, error);
            let body = HttpResponseBody::new(Limited::new(body, max).map_err(error));
            Ok(HttpResponse::from_parts(head, body))
        })
    }
}
