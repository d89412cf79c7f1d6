//! The shortest use of the column layer: two ranks, each with half of the rows of X and half of the rows of W.
//!
//! `cargo run --release --example column_linear`, or under `mpirun` with the feature `mpi`.

use async_tensor_parallel::launch::World;
use async_tensor_parallel::{LinearMode, LocalWorld, Overlap, Placement, Result, TensorParallelColumnLinear};

fn main() -> Result<()> {
    let (rows, in_features, out_features) = (12, 3, 12);
    // X[r][i] = r + i and W[o][i] = o, so that Y[r][o] = o · Σ_i (r + i) = o · (3r + 3).
    let whole_x: Vec<f32> = (0..rows * in_features).map(|k| (k / in_features + k % in_features) as f32).collect();
    let whole_w: Vec<f32> = (0..out_features * in_features).map(|k| (k / in_features) as f32).collect();

    World::from_env_or(LocalWorld::new(2)?)?.run(|group| {
        let ranks = group.world_size();
        let layer = TensorParallelColumnLinear::<f32>::builder(in_features, out_features)
            .mode(LinearMode::ReduceScatter)
            .overlap(Overlap::Async)
            .from_full(group, &whole_w, None)?;

        // This rank's rows of X.
        let each = rows / ranks * in_features;
        let x = &whole_x[group.rank() * each..(group.rank() + 1) * each];
        let x = group.tensor(x, &[rows / ranks, in_features], Placement::Rows)?;

        // All rows, this rank's features: the gather of X ran while this rank's own rows were multiplied.
        let (y, saved) = layer.forward(&x)?;
        let features = out_features / ranks;
        for (k, y) in y.to_vec()?.into_iter().enumerate() {
            let (r, o) = (k / features, group.rank() * features + k % features);
            assert_eq!(y, (o * (3 * r + 3)) as f32, "Y[{r}][{o}]");
        }

        // With dY = 1, dX = column sums of W = 0 + 1 + … + 11 everywhere, and dW[o] = column sums of X, Σ_r (r + i).
        let dy = group.tensor(&vec![1.0; rows * features], &[rows, features], Placement::Features)?;
        let dx = layer.backward(saved, &dy)?;
        assert!(dx.to_vec()?.iter().all(|value| *value == 66.0));
        assert_eq!(layer.weight_grad()?.to_vec()?, [66.0, 78.0, 90.0].repeat(features));
        println!("rank {}: Y {}, dX {}: as expected", group.rank(), y.shape(), dx.shape());
        Ok(())
    })?;
    Ok(())
}
