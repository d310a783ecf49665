//! See `pd_transfer::testing::fuzz::shm_link`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pd_transfer::testing::fuzz::shm_link(bytes));
