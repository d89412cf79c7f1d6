//! What the layer adds to its matmuls: world size 1, forward and backward, against three bare matmuls through the same
//! crate, one thread, 512 × 2048 × 2048 f32.
//!
//! `cargo bench --bench overhead`. The two take turns in one process; medians, and the median of the ratios of neighbours.

use std::time::Instant;

use async_tensor_parallel::{LinearMode, LocalWorld, Overlap, Placement, Result, TensorParallelColumnLinear};
use gemmkit::{MatMut, MatRef, Parallelism, Workspace, gemm_with};

const ROWS: usize = 512;
const FEATURES: usize = 2048;
const ROUNDS: usize = 21;

fn main() -> Result<()> {
    // `cargo test --benches` passes --test: one round shows that it runs.
    let rounds = if std::env::args().any(|argument| argument == "--test") { 1 } else { ROUNDS };
    for overlap in [Overlap::Blocking, Overlap::Async] {
        LocalWorld::new(1)?.with_threads(1).run(|group| {
            let layer = TensorParallelColumnLinear::<f32>::builder(FEATURES, FEATURES)
                .mode(LinearMode::ReduceScatter)
                .overlap(overlap)
                .build(group)?;
            let values: Vec<f32> = (0..ROWS * FEATURES).map(|i| (i % 17) as f32 - 8.0).collect();
            let weight = layer.weight().value().to_vec()?;
            let x = group.tensor(&values, &[ROWS, FEATURES], Placement::Rows)?;
            let dy = group.tensor(&values, &[ROWS, FEATURES], Placement::Features)?;
            let mut bare = Bare::default();
            let (mut of_layer, mut of_matmuls, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
            for round in 0..=rounds {
                let begun = Instant::now();
                let (y, saved) = layer.forward(&x)?;
                let dx = layer.backward(saved, &dy)?;
                let layer_time = begun.elapsed().as_secs_f64();
                drop((y, dx));
                let begun = Instant::now();
                bare.step(&values, &weight);
                let bare_time = begun.elapsed().as_secs_f64();
                if round > 0 || rounds == 1 {
                    of_layer.push(layer_time);
                    of_matmuls.push(bare_time);
                    ratios.push(layer_time / bare_time);
                }
            }
            println!(
                "{overlap:?}: forward + backward {:.1} ms, three bare matmuls {:.1} ms, ratio {:.3} (goal: at most 1.05)",
                median(&mut of_layer) * 1e3,
                median(&mut of_matmuls) * 1e3,
                median(&mut ratios)
            );
            Ok(())
        })?;
    }
    Ok(())
}

/// The three products of a dense layer, in memory of their own.
#[derive(Default)]
struct Bare {
    workspace: Workspace,
    y: Vec<f32>,
    dx: Vec<f32>,
    dw: Vec<f32>,
}

impl Bare {
    fn step(&mut self, x: &[f32], weight: &[f32]) {
        self.y.resize(ROWS * FEATURES, 0.0);
        self.dx.resize(ROWS * FEATURES, 0.0);
        self.dw.resize(FEATURES * FEATURES, 0.0);
        let rows = |values| MatRef::from_row_major(values, ROWS, FEATURES);
        let w = || MatRef::from_row_major(weight, FEATURES, FEATURES);
        let w_t = MatRef::from_col_major(weight, FEATURES, FEATURES);
        let x_t = MatRef::from_col_major(x, FEATURES, ROWS);
        let serial = Parallelism::Serial;
        let (y, dx, dw) = (
            MatMut::from_row_major(&mut self.y, ROWS, FEATURES),
            MatMut::from_row_major(&mut self.dx, ROWS, FEATURES),
            MatMut::from_row_major(&mut self.dw, FEATURES, FEATURES),
        );
        gemm_with(&mut self.workspace, 1.0, rows(x), w_t, 0.0, y, serial);
        gemm_with(&mut self.workspace, 1.0, rows(x), w(), 0.0, dx, serial);
        gemm_with(&mut self.workspace, 1.0, x_t, rows(x), 1.0, dw, serial);
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
