//! What workers ask of the network and tell it: for the cache, clients and publishers with threads
//! of their own behind calls that block or drop; and who else is there (`discovery`).

mod bounded;
mod config;
pub mod discovery;
pub mod kv_events;
pub mod object_store;
pub mod otlp;

pub use config::{BadObjectUrl, ObjectUrl};

/// Chooses the cryptography of HTTPS clients: the one implementation that is linked. That another part
/// of the program has done so before is as good.
pub(crate) fn choose_cryptography() {
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// An error with its causes, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
