/work/main/fuzz/target/debug/deps/rendezvous-2ff271e269ecf890.d: fuzz_targets/rendezvous.rs

/work/main/fuzz/target/debug/deps/librendezvous-2ff271e269ecf890.rmeta: fuzz_targets/rendezvous.rs

fuzz_targets/rendezvous.rs:
