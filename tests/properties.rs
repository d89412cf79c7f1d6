//! Any world size, mode, overlap, number of chunks, shape and split of the rows: integer operands, results equal to the dense
//! ones bit for bit, outputs and all gradients.

#![allow(missing_docs)]

mod common;

use async_tensor_parallel::{
    Float, Group, LinearMode, LocalWorld, Overlap, Placement, Result, ShardLayout, Tensor, TensorParallelColumnLinear,
    TensorParallelRowLinear,
};
use common::{Data, LAYERS, Layer, Spec, dense, integer, planned, run};
use proptest::prelude::*;

fn overlaps() -> impl Strategy<Value = Overlap> {
    prop_oneof![
        Just(Overlap::Blocking),
        Just(Overlap::Async),
        (0usize..12).prop_map(|chunks| Overlap::Pipelined { chunks }),
        Just(Overlap::Auto),
    ]
}

fn modes() -> impl Strategy<Value = LinearMode> {
    prop_oneof![Just(LinearMode::AllReduce), Just(LinearMode::ReduceScatter)]
}

prop_compose! {
    fn specs()(
        world_size in 1usize..=7,
        layer in prop::sample::select(&LAYERS[..]),
        mode in modes(),
        overlap in overlaps(),
        leading in 0usize..4,
        middle in prop::collection::vec(1usize..3, 0..3),
        (a, b) in (1usize..4, 1usize..5),
        parts in prop::collection::vec(0usize..3, 0..3),
        bias in any::<bool>(),
        recompute in any::<bool>(),
    ) -> Spec {
        // The sharded dimension is whatever its fused parts add up to.
        let chunks: Vec<usize> = parts.iter().map(|part| part * world_size).collect();
        let total: usize = chunks.iter().sum();
        let (chunks, sharded) = if total == 0 { (Vec::new(), a * world_size) } else { (chunks, total) };
        let (in_features, out_features) = match layer {
            Layer::Column => (b, sharded),
            Layer::Row => (sharded, b),
        };
        Spec {
            layer, mode, overlap, world_size, middle, in_features, out_features, bias, recompute, chunks,
            leading: leading * world_size,
        }
    }
}

fn exact<T: Float>(spec: &Spec, steps: usize, seed: usize) {
    let data: Vec<Data> = (0..steps)
        .map(|step| Data::new(spec, |which, index| integer(seed + if which % 3 == 0 { step } else { 0 }, which, index)))
        .collect();
    let world = LocalWorld::new(spec.world_size).unwrap().with_threads(1);
    let got = run::<T>(&world, spec, &data).unwrap();
    for (rank, got) in got.into_iter().enumerate() {
        for (step, (got, want)) in got.into_iter().zip(dense(spec, &data, rank)).enumerate() {
            assert_eq!(
                (&got.y, &got.dx, &got.dw, &got.db),
                (&want.y, &want.dx, &want.dw, &want.db),
                "rank {rank}, step {step} of {spec:?}"
            );
        }
    }
}

/// The rows of `ranges` of a row-major matrix.
fn part(matrix: &[f64], width: usize, rows: std::ops::Range<usize>) -> Vec<f64> {
    matrix[rows.start * width..rows.end * width].to_vec()
}

fn cast(values: &[f64]) -> Vec<f32> {
    values.iter().map(|value| *value as f32).collect()
}

/// `a · bᵀ`, where `a` is rows × k and `b` is n × k.
fn times(a: &[f64], b: &[f64], k: usize) -> Vec<f64> {
    a.chunks(k)
        .flat_map(|a| b.chunks(k).map(|b| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>()).collect::<Vec<_>>())
        .collect()
}

fn transposed(matrix: &[f64], columns: usize) -> Vec<f64> {
    (0..columns).flat_map(|c| matrix.iter().skip(c).step_by(columns).copied()).collect()
}

fn f64s(tensor: &Tensor<f32>) -> Result<Vec<f64>> {
    Ok(tensor.to_vec()?.into_iter().map(f64::from).collect())
}

/// Column then row layer over `total` rows that the world size need not divide.
fn uneven(group: &Group, mode: LinearMode, overlap: Overlap, total: usize) -> Result<()> {
    const IN: usize = 3;
    let (n, rank) = (group.world_size(), group.rank());
    let hidden = 2 * n;
    let values = |which: usize, len: usize| -> Vec<f64> { (0..len).map(|i| integer(3, which, i)).collect() };
    let (x, w, dh, v, dy) = (
        values(0, total * IN),
        values(1, hidden * IN),
        values(2, total * hidden),
        values(3, IN * hidden),
        values(4, total * IN),
    );
    let own = ShardLayout::uneven(total, n)?.own(rank);
    let scatter = mode == LinearMode::ReduceScatter;
    let (outer, rows) = if scatter { (Placement::Rows, own.clone()) } else { (Placement::Replicated, 0..total) };
    let mine = |matrix: &[f64]| transposed(&part(&transposed(matrix, hidden), total, 2 * rank..2 * rank + 2), total);

    let column = TensorParallelColumnLinear::builder(IN, hidden).mode(mode).overlap(overlap).from_full(
        group,
        &cast(&w),
        None,
    )?;
    let (h, saved) =
        column.forward_uneven(&group.tensor(&cast(&part(&x, IN, rows.clone())), &[rows.len(), IN], outer)?, total)?;
    assert_eq!(f64s(&h)?, mine(&times(&x, &w, IN)), "column output");
    let dx = column.backward(saved, &group.tensor(&cast(&mine(&dh)), &[total, 2], Placement::Features)?)?;
    assert_eq!(f64s(&dx)?, part(&times(&dh, &transposed(&w, IN), hidden), IN, rows.clone()), "column input gradient");
    let dw = times(&transposed(&dh, hidden), &transposed(&x, IN), total.max(1));
    let dw = if total == 0 { vec![0.0; hidden * IN] } else { dw };
    assert_eq!(f64s(&column.weight_grad()?)?, part(&dw, IN, 2 * rank..2 * rank + 2), "column weight gradient");

    let row = TensorParallelRowLinear::builder(hidden, IN).mode(mode).overlap(overlap).bias(true).from_full(
        group,
        &cast(&v),
        Some(&[1.0, 2.0, 3.0]),
    )?;
    let (y, saved) = row.forward_uneven(&group.tensor(&cast(&mine(&dh)), &[total, 2], Placement::Features)?)?;
    let mut want = times(&dh, &v, hidden);
    want.iter_mut().enumerate().for_each(|(i, y)| *y += (i % IN + 1) as f64);
    assert_eq!(f64s(&y)?, part(&want, IN, rows.clone()), "row output");
    let dy_rows = group.tensor(&cast(&part(&dy, IN, rows.clone())), &[rows.len(), IN], outer)?;
    let dh_row = row.backward(saved, &dy_rows)?;
    assert_eq!(f64s(&dh_row)?, mine(&times(&dy, &transposed(&v, hidden), IN)), "row input gradient");
    let db = (0..IN).map(|c| dy.iter().skip(c).step_by(IN).sum::<f64>()).collect::<Vec<_>>();
    assert_eq!(f64s(&row.bias_grad()?.unwrap())?, db, "row bias gradient");
    Ok(())
}

/// Three column layers of different widths that share one input.
fn shared(group: &Group, mode: LinearMode, overlap: Overlap, recompute: bool, rows: usize) -> Result<()> {
    const IN: usize = 5;
    let (n, rank) = (group.world_size(), group.rank());
    let total = rows * n;
    let values = |which: usize, len: usize| -> Vec<f64> { (0..len).map(|i| integer(5, which, i)).collect() };
    let x = values(0, total * IN);
    let scatter = mode == LinearMode::ReduceScatter;
    let (outer, own) =
        if scatter { (Placement::Rows, rank * rows..(rank + 1) * rows) } else { (Placement::Replicated, 0..total) };
    let x_own = group.tensor(&cast(&part(&x, IN, own.clone())), &[own.len(), IN], outer)?;
    let widths = [n, 2 * n, n];
    let weights: [Vec<f64>; 3] = std::array::from_fn(|i| values(i + 1, widths[i] * IN));
    let grads: [Vec<f64>; 3] = std::array::from_fn(|i| values(i + 4, total * widths[i]));
    let layers: Vec<_> = (0..3)
        .map(|i| {
            TensorParallelColumnLinear::builder(IN, widths[i])
                .mode(mode)
                .overlap(overlap)
                .recompute_all_gather(recompute)
                .from_full(group, &cast(&weights[i]), None)
        })
        .collect::<Result<_>>()?;
    let layers = [&layers[0], &layers[1], &layers[2]];
    let (outputs, saved) = TensorParallelColumnLinear::forward_many(layers, &x_own)?;
    let features = |matrix: &[f64], width: usize| {
        let each = width / n;
        transposed(&part(&transposed(matrix, width), total, rank * each..(rank + 1) * each), total)
    };
    let mut dx = vec![0.0; total * IN];
    let mut dys = Vec::new();
    for i in 0..3 {
        assert_eq!(f64s(&outputs[i])?, features(&times(&x, &weights[i], IN), widths[i]), "output {i}");
        let part = times(&grads[i], &transposed(&weights[i], IN), widths[i]);
        dx.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        dys.push(group.tensor(&cast(&features(&grads[i], widths[i])), &[total, widths[i] / n], Placement::Features)?);
    }
    let got = TensorParallelColumnLinear::backward_many(layers, saved, [&dys[0], &dys[1], &dys[2]])?;
    assert_eq!(f64s(&got)?, part(&dx, IN, own), "input gradient");
    for i in 0..3 {
        let dw = times(&transposed(&grads[i], widths[i]), &transposed(&x, IN), total);
        let each = widths[i] / n;
        assert_eq!(
            f64s(&layers[i].weight_grad()?)?,
            part(&dw, IN, rank * each..(rank + 1) * each),
            "weight gradient {i}"
        );
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn everything_equals_the_dense_result(spec in specs(), steps in 1usize..4, seed in 0usize..1000, wide in any::<bool>()) {
        if wide { exact::<f64>(&spec, steps, seed) } else { exact::<f32>(&spec, steps, seed) }
    }

    #[test]
    fn rows_need_not_be_divisible(n in 1usize..=7, mode in modes(), overlap in overlaps(), total in 0usize..20) {
        LocalWorld::new(n).unwrap().with_threads(1).run(|group| {
            planned(group, overlap, total)?;
            uneven(group, mode, overlap, total)
        }).unwrap();
    }

    #[test]
    fn layers_share_a_gather(n in 1usize..=6, mode in modes(), overlap in overlaps(), recompute in any::<bool>(), rows in 1usize..4) {
        LocalWorld::new(n).unwrap().with_threads(1).run(|group| {
            planned(group, overlap, rows)?;
            shared(group, mode, overlap, recompute, rows)
        }).unwrap();
    }
}
