//! What a test sets from outside of a process.

use std::sync::OnceLock;

/// Variable with the name of a failpoint at which the process aborts.
pub const FAILPOINT_VARIABLE: &str = "DSV4_FAILPOINT";

/// Names of all failpoints, in the order in which a life passes them.
pub const FAILPOINTS: [&str; 14] = [
    "open-folder",
    "open-locked",
    "layout-written",
    "layout-renamed",
    "open-cleaning",
    "open-cleaned",
    "write-created",
    "write-half",
    "write-written",
    "write-synced",
    "write-renamed",
    "write-folder-synced",
    "remove-begun",
    "remove-done",
];

/// The failpoint that was asked for when it was first looked for.
pub(super) fn failpoint_wanted() -> Option<&'static str> {
    static WANTED: OnceLock<Option<String>> = OnceLock::new();
    WANTED.get_or_init(|| std::env::var(FAILPOINT_VARIABLE).ok()).as_deref()
}
