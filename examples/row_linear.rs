//! The shortest use of the row layer: two ranks, each with half of the features of X and half of the columns of W.
//!
//! `cargo run --release --example row_linear`, or under `mpirun` with the feature `mpi`.

use async_tensor_parallel::launch::World;
use async_tensor_parallel::{LinearMode, LocalWorld, Overlap, Placement, Result, TensorParallelRowLinear};

fn main() -> Result<()> {
    let (rows, in_features, out_features) = (12, 12, 3);
    // X[r][i] = i, W[o][i] = o and b[o] = 10: Y[r][o] = o · (0 + 1 + … + 11) + 10.
    let whole_w: Vec<f32> = (0..out_features * in_features).map(|k| (k / in_features) as f32).collect();

    World::from_env_or(LocalWorld::new(2)?)?.run(|group| {
        let ranks = group.world_size();
        let layer = TensorParallelRowLinear::<f32>::builder(in_features, out_features)
            .mode(LinearMode::ReduceScatter)
            .overlap(Overlap::Async)
            .bias(true)
            .from_full(group, &whole_w, Some(&[10.0; 3]))?;

        // All rows, this rank's features of X.
        let features = in_features / ranks;
        let x: Vec<f32> = (0..rows * features).map(|k| (group.rank() * features + k % features) as f32).collect();
        let x = group.tensor(&x, &[rows, features], Placement::Features)?;

        // This rank's rows: the others' travelled while its own were multiplied. The bias counts once.
        let (y, saved) = layer.forward(&x)?;
        assert_eq!(y.to_vec()?, [10.0, 76.0, 142.0].repeat(rows / ranks));

        // With dY = 1, dX = column sums of W = 0 + 1 + 2, and db = the number of rows of the whole.
        let dy =
            group.tensor(&vec![1.0; rows / ranks * out_features], &[rows / ranks, out_features], Placement::Rows)?;
        let dx = layer.backward(saved, &dy)?;
        assert!(dx.to_vec()?.iter().all(|value| *value == 3.0));
        assert_eq!(layer.bias_grad()?.map(|grad| grad.to_vec()).transpose()?, Some(vec![rows as f32; out_features]));
        println!("rank {}: Y {}, dX {}: as expected", group.rank(), y.shape(), dx.shape());
        Ok(())
    })?;
    Ok(())
}
