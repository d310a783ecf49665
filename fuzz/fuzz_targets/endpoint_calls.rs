//! See `pd_transfer::testing::fuzz::endpoint_calls`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pd_transfer::testing::fuzz::endpoint_calls(bytes));
