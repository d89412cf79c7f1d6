/work/main/fuzz/target/debug/deps/async_tensor_parallel-aeeed29a354df4dc.d: /work/main/src/lib.rs /work/main/src/comm.rs /work/main/src/comm/host.rs /work/main/src/comm/local.rs /work/main/src/cross_entropy.rs /work/main/src/device.rs /work/main/src/device/cpu.rs /work/main/src/device/cpu/kernels.rs /work/main/src/device/cpu/matmul.rs /work/main/src/device/cpu/gemmkit.rs /work/main/src/device/cpu/memory.rs /work/main/src/device/cpu/tokens.rs /work/main/src/dtype.rs /work/main/src/embedding.rs /work/main/src/error.rs /work/main/src/gradients.rs /work/main/src/group.rs /work/main/src/launch.rs /work/main/src/launch/job.rs /work/main/src/launch/rendezvous.rs /work/main/src/layout.rs /work/main/src/linear.rs /work/main/src/linear/column.rs /work/main/src/linear/gather.rs /work/main/src/linear/init.rs /work/main/src/linear/reduce.rs /work/main/src/linear/row.rs /work/main/src/memory.rs /work/main/src/mesh.rs /work/main/src/meter.rs /work/main/src/mode.rs /work/main/src/pairs.rs /work/main/src/parameter.rs /work/main/src/plan.rs /work/main/src/plan/fit.rs /work/main/src/plan/measure.rs /work/main/src/plan/schedule.rs /work/main/src/tensor.rs /work/main/src/timeline.rs /work/main/src/timeline/chrome.rs /work/main/src/timeline/metrics.rs /work/main/src/timeline/svg.rs

/work/main/fuzz/target/debug/deps/libasync_tensor_parallel-aeeed29a354df4dc.rmeta: /work/main/src/lib.rs /work/main/src/comm.rs /work/main/src/comm/host.rs /work/main/src/comm/local.rs /work/main/src/cross_entropy.rs /work/main/src/device.rs /work/main/src/device/cpu.rs /work/main/src/device/cpu/kernels.rs /work/main/src/device/cpu/matmul.rs /work/main/src/device/cpu/gemmkit.rs /work/main/src/device/cpu/memory.rs /work/main/src/device/cpu/tokens.rs /work/main/src/dtype.rs /work/main/src/embedding.rs /work/main/src/error.rs /work/main/src/gradients.rs /work/main/src/group.rs /work/main/src/launch.rs /work/main/src/launch/job.rs /work/main/src/launch/rendezvous.rs /work/main/src/layout.rs /work/main/src/linear.rs /work/main/src/linear/column.rs /work/main/src/linear/gather.rs /work/main/src/linear/init.rs /work/main/src/linear/reduce.rs /work/main/src/linear/row.rs /work/main/src/memory.rs /work/main/src/mesh.rs /work/main/src/meter.rs /work/main/src/mode.rs /work/main/src/pairs.rs /work/main/src/parameter.rs /work/main/src/plan.rs /work/main/src/plan/fit.rs /work/main/src/plan/measure.rs /work/main/src/plan/schedule.rs /work/main/src/tensor.rs /work/main/src/timeline.rs /work/main/src/timeline/chrome.rs /work/main/src/timeline/metrics.rs /work/main/src/timeline/svg.rs

/work/main/src/lib.rs:
/work/main/src/comm.rs:
/work/main/src/comm/host.rs:
/work/main/src/comm/local.rs:
/work/main/src/cross_entropy.rs:
/work/main/src/device.rs:
/work/main/src/device/cpu.rs:
/work/main/src/device/cpu/kernels.rs:
/work/main/src/device/cpu/matmul.rs:
/work/main/src/device/cpu/gemmkit.rs:
/work/main/src/device/cpu/memory.rs:
/work/main/src/device/cpu/tokens.rs:
/work/main/src/dtype.rs:
/work/main/src/embedding.rs:
/work/main/src/error.rs:
/work/main/src/gradients.rs:
/work/main/src/group.rs:
/work/main/src/launch.rs:
/work/main/src/launch/job.rs:
/work/main/src/launch/rendezvous.rs:
/work/main/src/layout.rs:
/work/main/src/linear.rs:
/work/main/src/linear/column.rs:
/work/main/src/linear/gather.rs:
/work/main/src/linear/init.rs:
/work/main/src/linear/reduce.rs:
/work/main/src/linear/row.rs:
/work/main/src/memory.rs:
/work/main/src/mesh.rs:
/work/main/src/meter.rs:
/work/main/src/mode.rs:
/work/main/src/pairs.rs:
/work/main/src/parameter.rs:
/work/main/src/plan.rs:
/work/main/src/plan/fit.rs:
/work/main/src/plan/measure.rs:
/work/main/src/plan/schedule.rs:
/work/main/src/tensor.rs:
/work/main/src/timeline.rs:
/work/main/src/timeline/chrome.rs:
/work/main/src/timeline/metrics.rs:
/work/main/src/timeline/svg.rs:
