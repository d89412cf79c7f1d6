//! A small MLP trained by gradient descent: column layer, ReLU, row layer, squared error; on any mesh.

use async_tensor_parallel::{
    Combine, GradientBuckets, Group, LinearMode, LocalWorld, Mesh, Overlap, Placement, Result,
    TensorParallelColumnLinear, TensorParallelRowLinear,
};

const IN: usize = 6;
const HIDDEN: usize = 16;
const OUT: usize = 4;
const BATCH: usize = 16;

/// The losses of `steps` steps over a mesh of `dp` × `tp` ranks, which are all of `world`.
pub fn losses(
    world: &Group,
    dp: usize,
    tp: usize,
    mode: LinearMode,
    overlap: Overlap,
    steps: usize,
) -> Result<Vec<f64>> {
    let mesh = Mesh::new(world, dp, 1, tp)?;
    let group = mesh.tp();
    super::planned(group, overlap, 3)?;
    let scatter = mode == LinearMode::ReduceScatter;
    let column = TensorParallelColumnLinear::<f32>::builder(IN, HIDDEN).mode(mode).overlap(overlap).bias(true).seed(1);
    let row = TensorParallelRowLinear::<f32>::builder(HIDDEN, OUT).mode(mode).overlap(overlap).bias(true).seed(2);
    let (column, row) = (column.build(group)?, row.build(group)?);
    let parameters =
        [row.weight(), row.bias().expect("it has one"), column.weight(), column.bias().expect("it has one")];
    let mut buckets = GradientBuckets::new(mesh.dp(), &parameters, 300)?;

    // This copy's rows of the batch, and of these this rank's where rows are scattered.
    let mine = BATCH / dp;
    let first = mesh.dp_rank() * mine + if scatter { mesh.tp_rank() * mine / tp } else { 0 };
    let (rows, placement) = if scatter { (mine / tp, Placement::Rows) } else { (mine, Placement::Replicated) };
    let values = |seed: usize, width: usize| -> Vec<f32> {
        (first * width..(first + rows) * width).map(|i| super::real(seed, 0, i) as f32).collect()
    };
    let x = group.tensor(&values(7, IN), &[rows, IN], placement)?;
    let target = values(8, OUT);

    let mut losses = Vec::new();
    for _ in 0..steps {
        let (h, saved_column) = column.forward(&x)?;
        let h_values = h.to_vec()?;
        let active: Vec<f32> = h_values.iter().map(|h| h.max(0.0)).collect();
        let (y, saved_row) = row.forward(&group.tensor(&active, h.shape(), Placement::Features)?)?;
        let difference: Vec<f32> = y.to_vec()?.iter().zip(&target).map(|(y, t)| y - t).collect();
        let own: f64 = difference.iter().map(|d| f64::from(d * d)).sum::<f64>() / (BATCH * OUT) as f64;
        // Replicated rows are counted once.
        let own = if scatter { own } else { own / tp as f64 };
        losses.push(world.all_reduce(&world.tensor(&[own], &[1], Placement::Partial)?)?.wait()?.to_vec()?[0]);

        let scale = 2.0 / (BATCH * OUT) as f32;
        let dy: Vec<f32> = difference.iter().map(|d| scale * d).collect();
        let dh = row.backward(saved_row, &group.tensor(&dy, y.shape(), placement)?)?;
        buckets.ready(0, parameters[0])?;
        buckets.ready(1, parameters[1])?;
        let dh: Vec<f32> = dh.to_vec()?.iter().zip(&h_values).map(|(d, h)| if *h > 0.0 { *d } else { 0.0 }).collect();
        column.backward(saved_column, &group.tensor(&dh, h.shape(), Placement::Features)?)?;
        buckets.ready(2, parameters[2])?;
        buckets.ready(3, parameters[3])?;
        buckets.finish(&parameters, Combine::Sum)?;
        for parameter in parameters {
            parameter.add_grad(-0.3)?;
            parameter.zero_grad();
        }
    }
    Ok(losses)
}

/// The same on one rank.
pub fn losses_of_one_rank(steps: usize) -> Result<Vec<f64>> {
    let world = LocalWorld::new(1)?;
    Ok(world.run(|world| losses(world, 1, 1, LinearMode::AllReduce, Overlap::Blocking, steps))?.swap_remove(0))
}
