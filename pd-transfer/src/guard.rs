//! Guards by name, so that the model checker can take one away and see what it is for.

/// The condition of a guard. A build with the feature `testing` can remove the guard: then it
/// always holds. See [`Mutation`](crate::testing::mutation::Mutation).
#[cfg(feature = "testing")]
macro_rules! guard {
    ($guard:ident, $holds:expr) => {
        $holds || crate::testing::mutation::Mutation::$guard.is_removed()
    };
}

/// The condition of a guard. Its name is for builds with the feature `testing`.
#[cfg(not(feature = "testing"))]
macro_rules! guard {
    ($guard:ident, $holds:expr) => {
        crate::guard::just($holds)
    };
}

/// Nothing; it keeps a guard readable as "not the condition" where its name is not used.
#[cfg(not(feature = "testing"))]
#[inline(always)]
pub(crate) const fn just(holds: bool) -> bool {
    holds
}
