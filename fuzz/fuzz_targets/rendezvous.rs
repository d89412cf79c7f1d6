//! Whatever a stranger sends to the rendezvous, it is read without a panic and without much memory.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| async_tensor_parallel::launch::rendezvous::decode_anything(bytes));
