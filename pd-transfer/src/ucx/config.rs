//! The one thing that we read from the environment; UCX reads its own `UCX_*` variables itself.

use std::ffi::OsString;

/// Path of `libucp.so`, if the loader should not look for it.
pub(super) const VARIABLE: &str = "DSV4_UCX_LIB";
/// What the loader is asked for.
pub(super) const DEFAULT_LIBRARY: &str = "libucp.so.0";

/// The library that the user names.
pub(super) fn library() -> Option<OsString> {
    std::env::var_os(VARIABLE).filter(|path| !path.is_empty())
}
