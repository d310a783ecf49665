//! The payloads of a hand-off, as the server reads them.
#![no_main]

use dsv4_server::glue::payload::fuzz_target;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz_target(bytes));
