//! The web page: files that are compiled in and served as they are, at workers and routers, without a
//! key, since nothing of anybody is in them.

use super::error::ApiError;
use axum::Router;
use axum::extract::Path;
use axum::extract::rejection::PathRejection;
use axum::http::{HeaderValue, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

/// Where all files but the page itself are.
const ASSETS: &str = "/assets/";

/// What the page may do: use its own server, and nothing else. Neither scripts nor styles stand in the
/// page itself, and no text ever becomes markup.
const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
     object-src 'none'; require-trusted-types-for 'script'",
);

const CSS: &str = "text/css; charset=utf-8";
const HTML: &str = "text/html; charset=utf-8";
const JS: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// The page itself.
const INDEX: &str = include_str!("../page/index.html");

/// A file by its name, with its type.
fn file(name: &str) -> Option<(&'static str, &'static str)> {
    Some(match name {
        "answer.js" => (JS, include_str!("../page/answer.js")),
        "api.js" => (JS, include_str!("../page/api.js")),
        "chat.js" => (JS, include_str!("../page/chat.js")),
        "dom.js" => (JS, include_str!("../page/dom.js")),
        "icon.svg" => (SVG, include_str!("../page/icon.svg")),
        "latency.js" => (JS, include_str!("../page/latency.js")),
        "live.js" => (JS, include_str!("../page/live.js")),
        "numbers.js" => (JS, include_str!("../page/numbers.js")),
        "page.css" => (CSS, include_str!("../page/page.css")),
        "page.js" => (JS, include_str!("../page/page.js")),
        "requests.js" => (JS, include_str!("../page/requests.js")),
        "topology.js" => (JS, include_str!("../page/topology.js")),
        "verification.js" => (JS, include_str!("../page/verification.js")),
        "way.js" => (JS, include_str!("../page/way.js")),
        _ => return None,
    })
}

/// The page's endpoints: `/` and its files below `/assets/`.
pub fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    Router::new().route("/", get(index)).route("/assets/{name}", get(asset))
}

/// Whether a path belongs to the page.
pub(super) fn is_page(path: &str) -> bool {
    path == "/" || is_asset(path)
}

/// Whether a path is that of one of the page's files, there or not.
pub(super) fn is_asset(path: &str) -> bool {
    path.starts_with(ASSETS)
}

async fn index() -> Response {
    as_is(HTML, INDEX)
}

async fn asset(name: Result<Path<String>, PathRejection>, uri: Uri) -> Result<Response, ApiError> {
    let found = name.ok().and_then(|Path(name)| file(&name));
    let (kind, text) = found.ok_or_else(|| ApiError::no_path(uri.path()))?;
    Ok(as_is(kind, text))
}

fn as_is(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static(kind)),
        // Another server may answer at the same address next time.
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    ];
    (headers, text).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names in `text` that stand between `before` and a quotation mark.
    fn named<'a>(text: &'a str, before: &str) -> Vec<&'a str> {
        text.split(before).skip(1).filter_map(|rest| rest.split('"').next()).collect()
    }

    #[test]
    fn every_file_that_is_named_is_there_and_every_file_is_named() {
        let mut known = vec!["page.js"];
        let mut wanted = named(INDEX, "=\"assets/");
        let mut n = 0;
        while n < known.len() {
            let (_, text) = file(known[n]).unwrap();
            for name in named(text, "from \"./").into_iter().chain(named(text, "import \"./")) {
                wanted.push(name);
                if !known.contains(&name) {
                    known.push(name);
                }
            }
            n += 1;
        }
        for name in &wanted {
            assert!(file(name).is_some(), "{name} is named, and nobody serves it");
        }
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/page");
        for entry in std::fs::read_dir(folder).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let is_used = name == "index.html" || wanted.contains(&name.as_str());
            assert!(is_used, "{name} is in the folder, and the page has no use for it");
        }
    }

    /// What the policy forbids would only be seen in a browser.
    #[test]
    fn nothing_in_the_page_is_against_its_policy() {
        assert!(
            !INDEX.contains("<style") && !INDEX.contains(" style=") && !INDEX.contains("data:")
        );
        assert_eq!(
            INDEX.matches("<script").count(),
            INDEX.matches("<script type=\"module\" src=").count()
        );
    }
}
