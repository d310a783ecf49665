//! What a subscriber to KV events says, as the publisher reads it.
#![no_main]

use dsv4_server::net::kv_events::fuzz_target;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz_target(bytes));
