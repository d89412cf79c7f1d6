//! The modes and overlaps side by side, forward and backward, over the layer shapes of Llama-3 8B and 70B; the matmul
//! alone and the collective alone beside them.
//!
//! `cargo bench --bench layers` takes minutes: 2 ranks, rows and features divided by 8, a modelled link on which the
//! communication takes about as long as the matmul would. `ATP_BENCH_FULL=1` uses the true shapes (8192 rows), for machines
//! that can, and `ATP_BENCH_FULL=0` does not. A time is the slowest rank's; throughput counts the floating-point operations of one rank.
//!
//! With the feature `cuda`, on a machine with GPUs: one rank a GPU over NCCL, or two ranks that share the only one; bf16, true
//! shapes, no modelled link.

use std::hint::black_box;
use std::time::{Duration, Instant};

use async_tensor_parallel::{
    Float, Group, LinearMode, Link, LocalWorld, Matmul, Matrix, Overlap, Placement, Result, TensorParallelColumnLinear,
    TensorParallelRowLinear,
};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

#[allow(missing_docs)]
#[path = "../examples/common/world.rs"]
mod world;

use world::{Engine, World};

/// A layer of a real model: features of the whole.
struct Shape {
    name: &'static str,
    column: bool,
    in_features: usize,
    out_features: usize,
}

/// Llama-3 8B (hidden 4096, ffn 14336, 1024 for keys and values) and 70B (8192, 28672).
const SHAPES: [Shape; 8] = [
    Shape { name: "8B qkv", column: true, in_features: 4096, out_features: 6144 },
    Shape { name: "8B o", column: false, in_features: 4096, out_features: 4096 },
    Shape { name: "8B gate_up", column: true, in_features: 4096, out_features: 28672 },
    Shape { name: "8B down", column: false, in_features: 14336, out_features: 4096 },
    Shape { name: "70B qkv", column: true, in_features: 8192, out_features: 10240 },
    Shape { name: "70B o", column: false, in_features: 8192, out_features: 8192 },
    Shape { name: "70B gate_up", column: true, in_features: 8192, out_features: 57344 },
    Shape { name: "70B down", column: false, in_features: 28672, out_features: 8192 },
];

/// Whether the shapes are the true ones.
fn full(engine: Engine) -> bool {
    match std::env::var("ATP_BENCH_FULL") {
        Ok(value) => value != "0",
        Err(_) => engine != Engine::Local,
    }
}

/// Where the ranks run, and how many there are.
fn engine() -> (Engine, usize) {
    #[cfg(feature = "cuda")]
    match async_tensor_parallel::CudaDevice::count() {
        Ok(1) => return (Engine::Peer, 2),
        Ok(count) if count > 1 => return (Engine::Nccl, count),
        _ => {}
    }
    (Engine::Local, 2)
}

/// Runs `work` on every rank `iterations` times, all starting together, and returns the slowest rank's total.
fn on_ranks(
    world: &World,
    iterations: u64,
    work: impl Fn(&Group) -> Result<Box<dyn FnMut() -> Result<()> + '_>> + Sync,
) -> Duration {
    let times = world.run(|group| {
        let mut step = work(group)?;
        step()?;
        group.device().synchronize()?;
        group.barrier()?;
        let begun = Instant::now();
        for _ in 0..iterations {
            step()?;
        }
        group.device().synchronize()?;
        group.barrier()?;
        Ok(begun.elapsed())
    });
    times.expect("the ranks of a bench do not fail").into_iter().max().unwrap_or_default()
}

/// Either layer, with this rank's input and output gradient.
macro_rules! step {
    ($dtype:ty, $group:expr, $shape:expr, $mode:expr, $overlap:expr, $rows:expr, $backward:expr) => {{
        let Shape { column, in_features, out_features, .. } = $shape;
        let ranks = $group.world_size();
        let scatter = $mode == LinearMode::ReduceScatter;
        let (outer, placement) =
            if scatter { ($rows / ranks, Placement::Rows) } else { ($rows, Placement::Replicated) };
        macro_rules! drive {
            ($layer:ident, $x:expr, $x_placement:expr, $dy:expr, $dy_placement:expr) => {{
                let layer = $layer::<$dtype>::builder(*in_features, *out_features)
                    .mode($mode)
                    .overlap($overlap)
                    .build($group)?;
                let x = $group.tensor(&vec![<$dtype>::from_f64(0.5); $x[0] * $x[1]], &$x, $x_placement)?;
                let dy = $group.tensor(&vec![<$dtype>::from_f64(0.5); $dy[0] * $dy[1]], &$dy, $dy_placement)?;
                let saved = layer.forward(&x)?.1;
                Box::new(move || {
                    if $backward {
                        layer.backward(&saved, &dy).map(|dx| drop(black_box(dx)))
                    } else {
                        layer.forward(&x).map(|y| drop(black_box(y)))
                    }
                }) as Box<dyn FnMut() -> Result<()>>
            }};
        }
        if *column {
            drive!(
                TensorParallelColumnLinear,
                [outer, *in_features],
                placement,
                [$rows, out_features / ranks],
                Placement::Features
            )
        } else {
            drive!(
                TensorParallelRowLinear,
                [$rows, in_features / ranks],
                Placement::Features,
                [outer, *out_features],
                placement
            )
        }
    }};
}

/// The forward product of one rank, and nothing else.
fn matmul_alone<T: Float>(group: &Group, shape: &Shape, rows: usize) -> Result<Box<dyn FnMut() -> Result<()>>> {
    let ranks = group.world_size();
    let (inner, out) = if shape.column {
        (shape.in_features, shape.out_features / ranks)
    } else {
        (shape.in_features / ranks, shape.out_features)
    };
    let x = group.tensor(&vec![T::from_f64(0.5); rows * inner], &[rows, inner], Placement::Replicated)?;
    let w = group.tensor(&vec![T::from_f64(0.5); out * inner], &[out, inner], Placement::Replicated)?;
    let device = group.device().clone();
    let mut y = device.allocate(rows * out * T::DTYPE.size())?;
    Ok(Box::new(move || {
        device.matmul(Matmul {
            name: "alone",
            dtype: T::DTYPE,
            a: Matrix::new(x.buffer(), rows, inner),
            b: Matrix::new(w.buffer(), out, inner).t(),
            out: &mut y,
            out_offset: 0,
            out_dtype: T::DTYPE,
            accumulate: false,
            bias: None,
        })
    }))
}

/// The forward collective of ReduceScatter mode, and nothing else.
fn collective_alone<'a, T: Float>(
    group: &'a Group,
    shape: &Shape,
    rows: usize,
) -> Result<Box<dyn FnMut() -> Result<()> + 'a>> {
    let ranks = group.world_size();
    Ok(if shape.column {
        let dims = [rows / ranks, shape.in_features];
        let x = group.tensor(&vec![T::from_f64(0.5); dims[0] * dims[1]], &dims, Placement::Rows)?;
        Box::new(move || group.all_gather(&x)?.wait().map(drop))
    } else {
        let dims = [rows, shape.out_features];
        let y = group.tensor(&vec![T::from_f64(0.5); dims[0] * dims[1]], &dims, Placement::Partial)?;
        Box::new(move || group.reduce_scatter(&y)?.wait().map(drop))
    })
}

fn layers(criterion: &mut Criterion) {
    match engine() {
        (Engine::Local, ranks) => bench::<f32>(criterion, Engine::Local, ranks),
        (engine, ranks) => bench::<half::bf16>(criterion, engine, ranks),
    }
}

fn bench<T: Float>(criterion: &mut Criterion, engine: Engine, ranks: usize) {
    // Rows of the whole input, and what features are divided by.
    let (rows, divisor) = if full(engine) { (8192, 1) } else { (512, 8) };
    for shape in &SHAPES {
        let shape = Shape {
            name: shape.name,
            column: shape.column,
            in_features: shape.in_features / divisor,
            out_features: shape.out_features / divisor,
        };
        let width = if shape.column { shape.in_features } else { shape.out_features };
        let bytes = (rows * width * T::DTYPE.size() * (ranks - 1) / ranks) as f64;
        let world = if engine == Engine::Local {
            let free = LocalWorld::new(ranks).expect("two ranks");
            let matmul = on_ranks(&World::Local(free.clone()), 3, |group| matmul_alone::<T>(group, &shape, rows)) / 3;
            let link = Link { bandwidth: bytes / matmul.as_secs_f64(), latency: Duration::from_micros(10) };
            World::Local(free.with_link(link).expect("a positive bandwidth"))
        } else {
            World::new(engine, ranks).expect("as many ranks as GPUs")
        };

        let mut group = criterion.benchmark_group(shape.name);
        let flops = 2 * rows as u64 * shape.in_features as u64 * shape.out_features as u64 / ranks as u64;
        group.sample_size(10).warm_up_time(Duration::from_millis(100)).measurement_time(Duration::from_millis(800));
        group.throughput(Throughput::Elements(flops));
        group.bench_function("matmul alone", |bencher| {
            bencher.iter_custom(|n| on_ranks(&world, n, |group| matmul_alone::<T>(group, &shape, rows)));
        });
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_function("collective alone", |bencher| {
            bencher.iter_custom(|n| on_ranks(&world, n, |group| collective_alone::<T>(group, &shape, rows)));
        });
        for (direction, products) in [("forward", 1), ("backward", 2)] {
            group.throughput(Throughput::Elements(products * flops));
            for mode in [LinearMode::AllReduce, LinearMode::ReduceScatter] {
                let overlaps = [Overlap::Blocking, Overlap::Async, Overlap::Pipelined { chunks: 0 }, Overlap::Auto];
                for overlap in overlaps {
                    let id = BenchmarkId::new(direction, format!("{mode:?} {overlap}"));
                    group.bench_function(id, |bencher| {
                        bencher.iter_custom(|n| {
                            on_ranks(&world, n, |group| Ok(step!(T, group, &shape, mode, overlap, rows, products == 2)))
                        });
                    });
                }
            }
        }
        group.finish();
    }
}

criterion_group!(benches, layers);
criterion_main!(benches);
