//! What a rank needs to load its shard of a large tensor: the shard, and little more.
#![cfg(feature = "checkpoint")]
#![allow(missing_docs)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs::{self, File};
use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use async_tensor_parallel::{Checkpoint, LocalWorld, TensorParallelColumnLinear, TensorParallelRowLinear};

/// Bytes that are allocated, and the most that have been.
struct Counting;
static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Relaxed) + layout.size();
        MOST.fetch_max(now, Relaxed);
        // SAFETY: the caller's promises are those of the system's allocator.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SIZE: usize = 8192;
const MIB: usize = 1 << 20;

/// A weight of 256 MiB in f32, loaded by four ranks in turn, whole rows of it or parts of all rows.
#[test]
fn a_rank_needs_its_shard_and_little_more() {
    let path = std::env::temp_dir().join(format!("atp-{}-memory.safetensors", std::process::id()));
    let bytes = SIZE * SIZE * 4;
    let header =
        format!("{{\"w.weight\":{{\"dtype\":\"F32\",\"shape\":[{SIZE},{SIZE}],\"data_offsets\":[0,{bytes}]}}}}");
    let mut file = File::create(&path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    // A hole: zeros that take no room on disk.
    file.set_len((8 + header.len() + bytes) as u64).unwrap();
    drop(file);
    let shard = bytes / 4;
    let mut most = [0; 2];
    for (column, most) in [true, false].into_iter().zip(&mut most) {
        let used = LocalWorld::new(4).unwrap().run(|group| {
            let mut used = 0;
            for rank in 0..4 {
                group.barrier()?;
                if rank == group.rank() {
                    let checkpoint = Checkpoint::open(&path)?;
                    let before = NOW.load(Relaxed);
                    MOST.store(before, Relaxed);
                    let weight = if column {
                        let layer = TensorParallelColumnLinear::<f32>::builder(SIZE, SIZE);
                        layer.from_checkpoint(group, &checkpoint, &["w"])?.weight().value()
                    } else {
                        let layer = TensorParallelRowLinear::<f32>::builder(SIZE, SIZE);
                        layer.from_checkpoint(group, &checkpoint, &["w"])?.weight().value()
                    };
                    used = MOST.load(Relaxed) - before;
                    assert_eq!(weight.shape().elements() * 4, shard);
                }
            }
            group.barrier()?;
            Ok(used)
        });
        *most = used.unwrap().into_iter().max().unwrap();
    }
    fs::remove_file(&path).ok();
    eprintln!("shard of {} MiB; at most {} and {} MiB", shard / MIB, most[0] / MIB, most[1] / MIB);
    for most in most {
        assert!(most >= shard && most <= shard + 64 * MIB, "{most} bytes for a shard of {shard}");
    }
}
