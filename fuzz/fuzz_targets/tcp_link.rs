//! See `pd_transfer::testing::fuzz::tcp_link`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pd_transfer::testing::fuzz::tcp_link(bytes));
