//! See `pd_transfer::testing::fuzz::wire_body`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pd_transfer::testing::fuzz::wire_body(bytes));
