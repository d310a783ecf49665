//! See `pd_transfer::testing::fuzz::read_request`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pd_transfer::testing::fuzz::read_request(bytes));
