//! See `pd_transfer::testing::fuzz::ucx_greeting`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pd_transfer::testing::fuzz::ucx_greeting(bytes));
