//! The modes and overlaps side by side, forward and backward, over the layer shapes of Llama-3 8B and 70B; the matmul
//! alone and the collective alone beside them.
//!
//! `cargo bench --bench layers` takes minutes: 2 ranks, rows and features divided by 8, a modelled link on which the
//! communication takes about as long as the matmul would. `ATP_BENCH_FULL=1` uses the true shapes (8192 rows), for machines
//! that can. A time is the slowest rank's; throughput counts the floating-point operations of one rank.

use std::hint::black_box;
use std::time::{Duration, Instant};

use async_tensor_parallel::{
    Group, LinearMode, Link, LocalWorld, Matmul, Matrix, Overlap, Placement, Result, TensorParallelColumnLinear,
    TensorParallelRowLinear,
};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

const RANKS: usize = 2;

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

fn full() -> bool {
    std::env::var_os("ATP_BENCH_FULL").is_some_and(|value| value != "0")
}

/// Rows of the whole input, and what features are divided by.
fn scale() -> (usize, usize) {
    if full() { (8192, 1) } else { (512, 8) }
}

/// Runs `work` on every rank `iterations` times, all starting together, and returns the slowest rank's total.
fn on_ranks(
    world: &LocalWorld,
    iterations: u64,
    work: impl Fn(&Group) -> Result<Box<dyn FnMut() -> Result<()> + '_>> + Sync,
) -> Duration {
    let times = world.run(|group| {
        let mut step = work(group)?;
        step()?;
        group.barrier()?;
        let begun = Instant::now();
        for _ in 0..iterations {
            step()?;
        }
        group.barrier()?;
        Ok(begun.elapsed())
    });
    times.expect("the ranks of a bench do not fail").into_iter().max().unwrap_or_default()
}

/// Either layer, with this rank's input and output gradient.
macro_rules! step {
    ($group:expr, $shape:expr, $mode:expr, $overlap:expr, $rows:expr, $backward:expr) => {{
        let Shape { column, in_features, out_features, .. } = $shape;
        let scatter = $mode == LinearMode::ReduceScatter;
        let (outer, placement) =
            if scatter { ($rows / RANKS, Placement::Rows) } else { ($rows, Placement::Replicated) };
        macro_rules! drive {
            ($layer:ident, $x:expr, $x_placement:expr, $dy:expr, $dy_placement:expr) => {{
                let layer =
                    $layer::<f32>::builder(*in_features, *out_features).mode($mode).overlap($overlap).build($group)?;
                let x = $group.tensor(&vec![0.5f32; $x[0] * $x[1]], &$x, $x_placement)?;
                let dy = $group.tensor(&vec![0.5f32; $dy[0] * $dy[1]], &$dy, $dy_placement)?;
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
                [$rows, out_features / RANKS],
                Placement::Features
            )
        } else {
            drive!(
                TensorParallelRowLinear,
                [$rows, in_features / RANKS],
                Placement::Features,
                [outer, *out_features],
                placement
            )
        }
    }};
}

/// The forward product of one rank, and nothing else.
fn matmul_alone(group: &Group, shape: &Shape, rows: usize) -> Result<Box<dyn FnMut() -> Result<()>>> {
    let (inner, out) = if shape.column {
        (shape.in_features, shape.out_features / RANKS)
    } else {
        (shape.in_features / RANKS, shape.out_features)
    };
    let x = group.tensor(&vec![0.5f32; rows * inner], &[rows, inner], Placement::Replicated)?;
    let w = group.tensor(&vec![0.5f32; out * inner], &[out, inner], Placement::Replicated)?;
    let device = group.device().clone();
    let mut y = device.allocate(rows * out * 4)?;
    Ok(Box::new(move || {
        device.matmul(Matmul {
            name: "alone",
            dtype: async_tensor_parallel::DType::F32,
            a: Matrix::new(x.buffer(), rows, inner),
            b: Matrix::new(w.buffer(), out, inner).t(),
            out: &mut y,
            out_offset: 0,
            out_dtype: async_tensor_parallel::DType::F32,
            accumulate: false,
            bias: None,
        })
    }))
}

/// The forward collective of ReduceScatter mode, and nothing else.
fn collective_alone<'a>(group: &'a Group, shape: &Shape, rows: usize) -> Result<Box<dyn FnMut() -> Result<()> + 'a>> {
    Ok(if shape.column {
        let dims = [rows / RANKS, shape.in_features];
        let x = group.tensor(&vec![0.5f32; dims[0] * dims[1]], &dims, Placement::Rows)?;
        Box::new(move || group.all_gather(&x)?.wait().map(drop))
    } else {
        let dims = [rows, shape.out_features];
        let y = group.tensor(&vec![0.5f32; dims[0] * dims[1]], &dims, Placement::Partial)?;
        Box::new(move || group.reduce_scatter(&y)?.wait().map(drop))
    })
}

fn layers(criterion: &mut Criterion) {
    let (rows, divisor) = scale();
    for shape in &SHAPES {
        let shape = Shape {
            name: shape.name,
            column: shape.column,
            in_features: shape.in_features / divisor,
            out_features: shape.out_features / divisor,
        };
        let free = LocalWorld::new(RANKS).expect("two ranks");
        let matmul = on_ranks(&free, 3, |group| matmul_alone(group, &shape, rows).map(|step| step as _)) / 3;
        let width = if shape.column { shape.in_features } else { shape.out_features };
        let bytes = (rows * width * 4 * (RANKS - 1) / RANKS) as f64;
        let link = Link { bandwidth: bytes / matmul.as_secs_f64(), latency: Duration::from_micros(10) };
        let world = free.with_link(link).expect("a positive bandwidth");

        let mut group = criterion.benchmark_group(shape.name);
        let flops = 2 * rows as u64 * shape.in_features as u64 * shape.out_features as u64 / RANKS as u64;
        group.sample_size(10).warm_up_time(Duration::from_millis(100)).measurement_time(Duration::from_millis(800));
        group.throughput(Throughput::Elements(flops));
        group.bench_function("matmul alone", |bencher| {
            bencher
                .iter_custom(|n| on_ranks(&world, n, |group| matmul_alone(group, &shape, rows).map(|step| step as _)));
        });
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_function("collective alone", |bencher| {
            bencher.iter_custom(|n| on_ranks(&world, n, |group| collective_alone(group, &shape, rows)));
        });
        for (direction, products) in [("forward", 1), ("backward", 2)] {
            group.throughput(Throughput::Elements(products * flops));
            for mode in [LinearMode::AllReduce, LinearMode::ReduceScatter] {
                let overlaps = [Overlap::Blocking, Overlap::Async, Overlap::Pipelined { chunks: 0 }, Overlap::Auto];
                for overlap in overlaps {
                    let id = BenchmarkId::new(direction, format!("{mode:?} {overlap}"));
                    group.bench_function(id, |bencher| {
                        bencher.iter_custom(|n| {
                            on_ranks(&world, n, |group| Ok(step!(group, &shape, mode, overlap, rows, products == 2)))
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
