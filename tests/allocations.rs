//! The steady state allocates nothing: no heap allocation on any thread, and no new device memory, in a step of forward and
//! backward after warm-up.

#![allow(missing_docs)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use async_tensor_parallel::{
    Float, Group, LinearMode, Link, LocalWorld, Overlap, Placement, Result, ShardedCrossEntropy,
    TensorParallelColumnLinear, TensorParallelEmbedding, TensorParallelRowLinear,
};
use half::bf16;

struct Counting;

static COUNTING: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

fn count() {
    if COUNTING.load(Ordering::Relaxed) {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as the caller promises.
        unsafe { System.realloc(pointer, layout, size) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const ROWS: usize = 24;
const FEATURES: usize = 48;
const WARM_UP: usize = 30;
const STEPS: usize = 20;

/// Warms up, counts over some steps of all ranks, and returns this rank's device memory before and after.
fn measure(group: &Group, mut step: impl FnMut() -> Result<()>) -> Result<(usize, usize)> {
    for _ in 0..WARM_UP {
        step()?;
        group.barrier()?;
    }
    let before = group.device().memory_bytes();
    if group.rank() == 0 {
        ALLOCATIONS.store(0, Ordering::SeqCst);
        COUNTING.store(true, Ordering::SeqCst);
    }
    group.barrier()?;
    for _ in 0..STEPS {
        step()?;
    }
    group.barrier()?;
    if group.rank() == 0 {
        COUNTING.store(false, Ordering::SeqCst);
    }
    group.barrier()?;
    Ok((before, group.device().memory_bytes()))
}

fn column<T: Float>(group: &Group, mode: LinearMode, overlap: Overlap, recompute: bool) -> Result<(usize, usize)> {
    let n = group.world_size();
    let layer = TensorParallelColumnLinear::<T>::builder(FEATURES, FEATURES)
        .mode(mode)
        .overlap(overlap)
        .bias(true)
        .recompute_all_gather(recompute)
        .build(group)?;
    let (rows, placement) = match mode {
        LinearMode::AllReduce => (ROWS, Placement::Replicated),
        LinearMode::ReduceScatter => (ROWS / n, Placement::Rows),
    };
    let x = group.tensor(&vec![T::from_f64(0.5); rows * FEATURES], &[rows, FEATURES], placement)?;
    let dy = group.tensor(&vec![T::from_f64(0.5); ROWS * FEATURES / n], &[ROWS, FEATURES / n], Placement::Features)?;
    let mut steps = 0;
    measure(group, || {
        let (y, saved) = layer.forward(&x)?;
        drop((y, layer.backward(saved, &dy)?));
        steps += 1;
        if steps % 3 == 0 {
            layer.zero_grad();
        }
        Ok(())
    })
}

fn row<T: Float>(group: &Group, mode: LinearMode, overlap: Overlap, _: bool) -> Result<(usize, usize)> {
    let n = group.world_size();
    let layer = TensorParallelRowLinear::<T>::builder(FEATURES, FEATURES)
        .mode(mode)
        .overlap(overlap)
        .bias(true)
        .build(group)?;
    let (rows, placement) = match mode {
        LinearMode::AllReduce => (ROWS, Placement::Replicated),
        LinearMode::ReduceScatter => (ROWS / n, Placement::Rows),
    };
    let x = group.tensor(&vec![T::from_f64(0.5); ROWS * FEATURES / n], &[ROWS, FEATURES / n], Placement::Features)?;
    let dy = group.tensor(&vec![T::from_f64(0.5); rows * FEATURES], &[rows, FEATURES], placement)?;
    let mut steps = 0;
    measure(group, || {
        let (y, saved) = layer.forward(&x)?;
        drop((y, layer.backward(saved, &dy)?));
        steps += 1;
        if steps % 3 == 0 {
            layer.zero_grad();
        }
        Ok(())
    })
}

/// Embedding, head and loss; with `pieces`, head and loss some rows at a time.
fn tokens<T: Float>(group: &Group, mode: LinearMode, overlap: Overlap, pieces: bool) -> Result<(usize, usize)> {
    let ids: Vec<i64> = (0..ROWS).map(|i| (i * 7 % FEATURES) as i64).collect();
    let ids = group.tensor(&ids, &[ROWS], Placement::Replicated)?;
    let embedding = TensorParallelEmbedding::<T>::builder(FEATURES, 8).mode(mode).overlap(overlap).build(group)?;
    let head = TensorParallelColumnLinear::<T>::builder(8, FEATURES).mode(mode).overlap(overlap).build(group)?;
    let loss = ShardedCrossEntropy::new(FEATURES).label_smoothing(0.1);
    let grad = group.tensor(&[T::Accumulator::from_f64(0.1); ROWS], &[ROWS], Placement::Replicated)?;
    measure(group, || {
        let (x, saved_ids) = embedding.forward(&ids)?;
        let dx = if pieces {
            loss.of_linear(&head, &x, &ids, &grad, 3)?.1
        } else {
            let (logits, saved_x) = head.forward(&x)?;
            let saved = loss.forward(group, &logits, &ids)?.1;
            head.backward(saved_x, &loss.backward(group, saved, &grad)?)?
        };
        embedding.backward(saved_ids, &dx)
    })
}

type Step = fn(&Group, LinearMode, Overlap, bool) -> Result<(usize, usize)>;

/// One test: the counter is the process's.
#[test]
fn a_step_allocates_nothing() {
    let layers: [(&str, Step, &[bool]); 5] = [
        ("tokens f32", tokens::<f32>, &[false, true]),
        ("column f32", column::<f32>, &[false, true]),
        ("column bf16", column::<bf16>, &[true]),
        ("row f32", row::<f32>, &[true]),
        ("row bf16", row::<bf16>, &[true]),
    ];
    let overlaps =
        [Overlap::Blocking, Overlap::Async, Overlap::Pipelined { chunks: 1 }, Overlap::Pipelined { chunks: 3 }];
    for world_size in [1, 2, 4] {
        for link in [None, Some(Link::gbit(10.0, 1.0))] {
            let world = LocalWorld::new(world_size).unwrap().with_threads(1);
            let world = if let Some(link) = link { world.with_link(link).unwrap() } else { world };
            for (name, layer, recomputes) in layers {
                for mode in [LinearMode::AllReduce, LinearMode::ReduceScatter] {
                    for overlap in overlaps {
                        for &recompute in recomputes {
                            let context = format!(
                                "{name}, {mode:?}, {overlap}, {world_size} ranks, {link:?}, recompute {recompute}"
                            );
                            let memory = world.run(|group| layer(group, mode, overlap, recompute)).unwrap();
                            let allocations = ALLOCATIONS.load(Ordering::SeqCst);
                            assert_eq!(allocations, 0, "{context}: heap allocations in {STEPS} steps");
                            for (before, after) in memory {
                                assert_eq!(before, after, "{context}: device memory");
                            }
                        }
                    }
                }
            }
        }
    }
}
