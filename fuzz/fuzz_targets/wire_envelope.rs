//! See `pd_transfer::testing::fuzz::wire_envelope`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pd_transfer::testing::fuzz::wire_envelope(bytes));
