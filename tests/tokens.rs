//! Embedding and cross entropy against dense float64 references, over world sizes, modes, overlaps and dtypes; and the faults
//! that users of other implementations reported of them.

#![allow(missing_docs)]

mod common;

use async_tensor_parallel::{
    Error, Float, Group, LinearMode, LocalWorld, Overlap, Placement, Result, ShardedCrossEntropy, Tensor,
    TensorParallelColumnLinear, TensorParallelEmbedding,
};
use common::{MODES, OVERLAPS, real};
use half::{bf16, f16};
use proptest::prelude::*;

fn wide<T: Float>(tensor: &Tensor<T>) -> Result<Vec<f64>> {
    Ok(tensor.to_vec()?.into_iter().map(T::to_f64).collect())
}

fn cast<T: Float>(values: &[f64]) -> Vec<T> {
    values.iter().map(|value| T::from_f64(*value)).collect()
}

#[track_caller]
fn close(got: &[f64], want: &[f64], tolerance: f64, context: &str) {
    assert_eq!(got.len(), want.len(), "{context}");
    let largest = want.iter().filter(|v| v.is_finite()).fold(1e-2f64, |largest, value| largest.max(value.abs()));
    for (index, (got, want)) in got.iter().zip(want).enumerate() {
        let same = got == want || (got.is_nan() && want.is_nan());
        assert!(same || (got - want).abs() <= tolerance * largest, "{context}: [{index}] is {got}, wanted {want}");
    }
}

/// Forward and two backward passes of an embedding of `vocabulary` small integers × 3.
fn embedding<T: Float>(
    group: &Group,
    mode: LinearMode,
    overlap: Overlap,
    vocabulary: usize,
    padding: bool,
) -> Result<()> {
    const DIM: usize = 3;
    let (n, rank) = (group.world_size(), group.rank());
    let (batch, sequence) = (2 * n, 3);
    let tokens = batch * sequence;
    let table: Vec<f64> = (0..vocabulary * DIM).map(|i| (i % 23) as f64 - 11.0).collect();
    let ids: Vec<i64> = (0..tokens).map(|i| ((i * i + 3 * i) % vocabulary) as i64).collect();
    let dy: Vec<f64> = (0..tokens * DIM).map(|i| (i % 7) as f64 - 3.0).collect();
    let builder = TensorParallelEmbedding::<T>::builder(vocabulary, DIM).mode(mode).overlap(overlap);
    let builder = if padding { builder.padding_idx(vocabulary / 2) } else { builder };
    let layer = builder.from_full(group, &cast(&table))?;
    let scatter = mode == LinearMode::ReduceScatter;
    let own = if scatter { rank * tokens / n..(rank + 1) * tokens / n } else { 0..tokens };
    let (y, saved) = layer.forward(&group.tensor(&ids, &[batch, sequence], Placement::Replicated)?)?;
    let want: Vec<f64> =
        ids[own.clone()].iter().flat_map(|id| table[*id as usize * DIM..(*id as usize + 1) * DIM].to_vec()).collect();
    assert_eq!(wide(&y)?, want);
    assert_eq!(y.shape()[..], [own.len() / sequence, sequence, DIM]);
    let grad = group.tensor(&cast::<T>(&dy[own.start * DIM..own.end * DIM]), y.shape(), y.placement())?;
    layer.backward(&saved, &grad)?;
    layer.backward(&saved, &grad)?;
    let each = vocabulary.div_ceil(n);
    let mut dw = vec![0.0; each * n * DIM];
    for (token, id) in ids.iter().enumerate().filter(|(_, id)| !padding || **id != (vocabulary / 2) as i64) {
        (0..DIM).for_each(|c| dw[*id as usize * DIM + c] += 2.0 * dy[token * DIM + c]);
    }
    assert_eq!(wide(&layer.weight_grad()?)?, dw[rank * each * DIM..(rank + 1) * each * DIM]);
    Ok(())
}

#[test]
fn embeddings_equal_the_dense_table_bit_for_bit() {
    for n in 1..=6 {
        for (mode, overlap) in MODES.into_iter().flat_map(|mode| OVERLAPS.map(|overlap| (mode, overlap))) {
            for vocabulary in [n, 7, 4 * n + 1] {
                for padding in [false, true] {
                    let world = LocalWorld::new(n).unwrap().with_threads(1);
                    world
                        .run(|group| {
                            embedding::<f32>(group, mode, overlap, vocabulary, padding)?;
                            embedding::<f64>(group, mode, overlap, vocabulary, padding)?;
                            embedding::<bf16>(group, mode, overlap, vocabulary, padding)?;
                            embedding::<f16>(group, mode, overlap, vocabulary, padding)
                        })
                        .unwrap();
                }
            }
        }
    }
}

#[test]
fn every_world_size_draws_the_same_table() {
    let tables: Vec<Vec<f32>> = (1..=4)
        .map(|n| {
            let shards = LocalWorld::new(n).unwrap().run(|group| {
                TensorParallelEmbedding::<f32>::builder(10, 4)
                    .seed(3)
                    .padding_idx(1)
                    .build(group)?
                    .weight()
                    .value()
                    .to_vec()
            });
            let mut table = shards.unwrap().concat();
            assert!(table[40..].iter().all(|value| *value == 0.0), "padding rows are zero");
            table.truncate(40);
            table
        })
        .collect();
    assert!(tables.iter().all(|table| *table == tables[0]));
    assert!(tables[0][4..8].iter().all(|value| *value == 0.0) && tables[0][0] != 0.0);
}

#[test]
fn ids_and_targets_that_are_none_are_named_with_their_position() {
    LocalWorld::new(2)
        .unwrap()
        .run(|group| {
            let layer = TensorParallelEmbedding::<f32>::builder(5, 2).mode(LinearMode::AllReduce).build(group)?;
            for (id, text) in
                [(5, "5 at position 2"), (-1, "-1 at position 2"), (i64::MIN, "position 2"), (i64::MAX, "position 2")]
            {
                let ids = group.tensor(&[0, 4, id], &[3], Placement::Replicated)?;
                let error = layer.forward(&ids).unwrap_err().to_string();
                assert!(error.contains(text) && error.contains("0 to 4"), "{error}");
                let logits = group.tensor(&[0f32; 9], &[3, 3], Placement::Features)?;
                let error = ShardedCrossEntropy::new(5).forward(group, &logits, &ids).unwrap_err().to_string();
                assert!(error.contains(text) && error.contains("0 to 4"), "{error}");
            }
            // Nothing is lost: the layer goes on. No ids are legal.
            layer.forward(&group.tensor(&[0, 4], &[2], Placement::Replicated)?)?;
            let (y, saved) = layer.forward(&group.tensor(&[], &[0, 3], Placement::Replicated)?)?;
            layer.backward(saved, &y)?;
            let scatter = TensorParallelEmbedding::<f32>::builder(5, 2).build(group)?;
            let odd = group.tensor(&[0, 1, 2], &[3], Placement::Replicated)?;
            assert!(matches!(scatter.forward(&odd), Err(Error::NotDivisible { value: 3, by: 2, .. })));
            let rows = group.tensor(&[0, 1], &[2], Placement::Rows)?;
            assert!(matches!(scatter.forward(&rows), Err(Error::Placement { .. })));
            Ok(())
        })
        .unwrap();
}

/// Loss and gradient of the whole logits `[t, classes]` in double precision.
fn dense(
    logits: &[f64],
    classes: usize,
    targets: &[i64],
    grad: &[f64],
    (smoothing, z, ignored): (f64, f64, Option<i64>),
) -> (Vec<f64>, Vec<f64>) {
    let (mut losses, mut gradient) = (Vec::new(), Vec::new());
    for ((row, target), grad) in logits.chunks(classes).zip(targets).zip(grad) {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let log_z = max + row.iter().map(|l| (l - max).exp()).sum::<f64>().ln();
        if Some(*target) == ignored {
            losses.push(0.0);
            gradient.extend(vec![0.0; classes]);
            continue;
        }
        let mean = row.iter().sum::<f64>() / classes as f64;
        losses.push(log_z - (1.0 - smoothing) * row[*target as usize] - smoothing * mean + z * log_z * log_z);
        gradient.extend(row.iter().enumerate().map(|(class, l)| {
            let p = (l - log_z).exp() * (1.0 + 2.0 * z * log_z);
            grad * (p - if class as i64 == *target { 1.0 - smoothing } else { 0.0 } - smoothing / classes as f64)
        }));
    }
    (losses, gradient)
}

/// This rank's part of the logits, padded with `padding`.
fn part(logits: &[f64], classes: usize, group: &Group, padding: f64) -> (Vec<f64>, usize) {
    let each = classes.div_ceil(group.world_size());
    let first = group.rank() * each;
    let value = |row: &[f64], column: usize| row.get(first + column).copied().unwrap_or(padding);
    (logits.chunks(classes).flat_map(|row| (0..each).map(|c| value(row, c)).collect::<Vec<_>>()).collect(), each)
}

fn cross_entropy<T: Float>(
    group: &Group,
    classes: usize,
    rows: usize,
    scale: f64,
    options: (f64, f64, Option<i64>),
    tolerance: (f64, f64),
) -> Result<()> {
    let round = |value: f64| T::from_f64(value).to_f64();
    let logits: Vec<f64> = (0..rows * classes).map(|i| round(scale * real(classes, 0, i))).collect();
    let mut targets: Vec<i64> = (0..rows).map(|i| ((i * 5 + 1) % classes) as i64).collect();
    if let (Some(ignored), Some(target)) = (options.2, targets.get_mut(1)) {
        *target = ignored;
    }
    let grad: Vec<f64> = (0..rows).map(|i| 0.5 + i as f64).collect();
    let (losses, gradient) = dense(&logits, classes, &targets, &grad, options);
    let mut loss = ShardedCrossEntropy::new(classes).label_smoothing(options.0).z_loss(options.1);
    if let Some(ignored) = options.2 {
        loss = loss.ignore_index(ignored);
    }
    // Padding holds what would spoil everything if it counted.
    let (own, each) = part(&logits, classes, group, f64::NAN);
    let own = group.tensor(&cast::<T>(&own), &[rows, each], Placement::Features)?;
    let targets = group.tensor(&targets, &[rows], Placement::Replicated)?;
    let (value, saved) = loss.forward(group, &own, &targets)?;
    let context = format!("{:?}, {classes} classes, {} ranks, {options:?}", T::DTYPE, group.world_size());
    close(&wide(&value)?, &losses, tolerance.0, &context);
    let grad = group.tensor(&cast::<T::Accumulator>(&grad), &[rows], Placement::Replicated)?;
    let got = loss.backward(group, saved, &grad)?;
    close(&wide(&got)?, &part(&gradient, classes, group, 0.0).0, tolerance.1, &context);
    Ok(())
}

#[test]
fn cross_entropy_equals_the_dense_one() {
    let options = [(0.0, 0.0, None), (0.1, 0.0, Some(-100)), (0.0, 1e-2, Some(0)), (0.3, 1e-3, None)];
    for n in 1..=6 {
        for classes in [1, 5, 2 * n, 37] {
            LocalWorld::new(n)
                .unwrap()
                .run(|group| {
                    for options in options {
                        cross_entropy::<f64>(group, classes, 4, 5.0, options, (1e-13, 1e-13))?;
                        cross_entropy::<f32>(group, classes, 4, 5.0, options, (1e-6, 1e-6))?;
                        cross_entropy::<bf16>(group, classes, 4, 5.0, options, (1e-6, 4e-3))?;
                        cross_entropy::<f16>(group, classes, 4, 5.0, options, (1e-6, 1e-3))?;
                        cross_entropy::<f32>(group, classes, 0, 5.0, options, (0.0, 0.0))?;
                    }
                    Ok(())
                })
                .unwrap();
        }
    }
}

/// Megatron-LM#7452: gathered logits fed to the sharded loss cost ln(n) too much.
#[test]
fn gathered_logits_are_refused_and_sharded_ones_cost_the_right_amount() {
    LocalWorld::new(2)
        .unwrap()
        .run(|group| {
            let target = group.tensor(&[0i64], &[1], Placement::Replicated)?;
            let loss = ShardedCrossEntropy::new(4);
            let gathered = group.tensor(&[0f32; 4], &[1, 4], Placement::Features)?;
            let error = loss.forward(group, &gathered, &target).unwrap_err().to_string();
            assert!(error.contains("[1, 4]") && error.contains("2]") && error.contains("4 classes"), "{error}");
            let own = group.tensor(&[0f32; 2], &[1, 2], Placement::Features)?;
            close(&wide(&loss.forward(group, &own, &target)?.0)?, &[1.386294], 1e-6, "ln 4");
            Ok(())
        })
        .unwrap();
}

/// Megatron-LM#1754: a vocabulary that the world size does not divide shifts the loss, and padding gets gradients.
#[test]
fn padding_of_the_vocabulary_counts_for_nothing() {
    LocalWorld::new(2)
        .unwrap()
        .run(|group| {
            let loss = ShardedCrossEntropy::new(5);
            let logits = group.tensor(&[0f32; 3], &[1, 3], Placement::Features)?;
            let target = group.tensor(&[4i64], &[1], Placement::Replicated)?;
            let (value, saved) = loss.forward(group, &logits, &target)?;
            close(&wide(&value)?, &[1.609438], 1e-6, "ln 5");
            let grad = loss.backward(group, saved, &group.tensor(&[1f32], &[1], Placement::Replicated)?)?;
            let want = [[0.2, 0.2, 0.2], [0.2, -0.8, 0.0]][group.rank()];
            close(&wide(&grad)?, &want, 1e-6, "gradient");
            Ok(())
        })
        .unwrap();
}

/// Megatron-LM#445: 1 % off for large logits.
#[test]
fn logits_of_80_either_way_are_right() {
    for n in [1, 2, 4] {
        let world = LocalWorld::new(n).unwrap();
        world.run(|group| cross_entropy::<f32>(group, 8, 16, 80.0, (0.0, 0.0, None), (1e-6, 1e-6))).unwrap();
        world.run(|group| cross_entropy::<f32>(group, 8, 4, 1e4, (0.0, 0.0, None), (1e-6, 1e-6))).unwrap();
    }
}

/// nanotron#62: embedding and output head that should be tied are not.
#[test]
fn a_tied_head_shares_values_and_gradient() {
    for (mode, overlap) in MODES.into_iter().flat_map(|mode| OVERLAPS.map(|overlap| (mode, overlap))) {
        LocalWorld::new(2)
            .unwrap()
            .run(|group| {
                let embedding = TensorParallelEmbedding::<f32>::builder(4, 2)
                    .mode(mode)
                    .overlap(overlap)
                    .from_full(group, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])?;
                let head = TensorParallelColumnLinear::tied(&embedding, overlap)?;
                let ids = group.tensor(&[0i64, 3], &[2], Placement::Replicated)?;
                let (h, saved) = embedding.forward(&ids)?;
                let (_, saved_head) = head.forward(&h)?;
                let dy = group.tensor(&[1.0; 4], &[2, 2], Placement::Features)?;
                let dh = head.backward(saved_head, &dy)?;
                embedding.backward(saved, &dh)?;
                // Head: every row gets the sum of both h, [1, 2] + [7, 8]. Embedding: rows 0 and 3 get dh, the sum of all
                // rows of the table, [16, 20].
                let want = [[24.0, 30.0, 8.0, 10.0], [8.0, 10.0, 24.0, 30.0]][group.rank()];
                assert_eq!(head.weight_grad()?.to_vec()?, want, "{mode:?} {overlap}");
                assert_eq!(embedding.weight_grad()?.to_vec()?, want);
                embedding.weight().add_grad(-0.5)?;
                assert_eq!(head.weight().value().to_vec()?, embedding.weight().value().to_vec()?);
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn nan_and_infinity_are_as_in_a_dense_loss() {
    LocalWorld::new(2)
        .unwrap()
        .run(|group| {
            let loss = ShardedCrossEntropy::new(4);
            let target = group.tensor(&[0i64, 0, 3], &[3], Placement::Replicated)?;
            // A NaN in any rank's part spoils its token alone; minus infinity is a class that cannot be.
            let rows =
                [[f32::NAN, 0.0, 0.0, f32::NEG_INFINITY, 0.0, 0.0], [0.0, 0.0, f32::NEG_INFINITY, 0.0, 0.0, 0.0]];
            let logits = group.tensor(&rows[group.rank()], &[3, 2], Placement::Features)?;
            let value = loss.forward(group, &logits, &target)?.0.to_vec()?;
            assert!(value[0].is_nan(), "{value:?}");
            assert!((value[1] - 2f32.ln()).abs() < 1e-6, "{value:?}");
            assert!((value[2] - 4f32.ln()).abs() < 1e-6, "{value:?}");
            Ok(())
        })
        .unwrap();
}

#[test]
fn options_that_make_no_sense_are_refused() {
    LocalWorld::new(1)
        .unwrap()
        .run(|group| {
            let logits = group.tensor(&[0f32; 4], &[1, 4], Placement::Features)?;
            let target = group.tensor(&[0i64], &[1], Placement::Replicated)?;
            let refused = |loss: ShardedCrossEntropy, word: &str| {
                let error = loss.forward(group, &logits, &target).unwrap_err().to_string();
                assert!(error.contains(word), "{error}");
            };
            let loss = ShardedCrossEntropy::new(4);
            refused(loss.label_smoothing(1.0), "label_smoothing");
            refused(loss.label_smoothing(f64::NAN), "label_smoothing");
            refused(loss.z_loss(-1.0), "z_loss");
            refused(ShardedCrossEntropy::new(0), "classes");
            refused(ShardedCrossEntropy::new(5), "[1, 4]");
            let two = group.tensor(&[0i64, 1], &[2], Placement::Replicated)?;
            assert!(matches!(loss.forward(group, &logits, &two), Err(Error::Shape { .. })));
            let replicated = logits.clone().with_placement(Placement::Replicated);
            assert!(matches!(loss.forward(group, &replicated, &target), Err(Error::Placement { .. })));
            let (_, saved) = loss.forward(group, &logits, &target)?;
            let grad = group.tensor(&[1f32], &[1], Placement::Replicated)?;
            assert!(matches!(loss.z_loss(0.5).backward(group, &saved, &grad), Err(Error::Saved { .. })));
            let wrong = group.tensor(&[1f32; 2], &[2], Placement::Replicated)?;
            assert!(matches!(loss.backward(group, &saved, &wrong), Err(Error::Shape { .. })));
            Ok(())
        })
        .unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_vocabulary_and_world(n in 1usize..=7, classes in 1usize..40, rows in 0usize..6, scale in 0.0f64..90.0) {
        LocalWorld::new(n).unwrap().run(|group| cross_entropy::<f32>(group, classes, rows, scale, (0.1, 1e-3, None), (3e-5, 2e-5))).unwrap();
    }
}

/// A head with its loss, some rows at a time, against both whole.
fn fused<T: Float>(group: &Group, mode: LinearMode, overlap: Overlap, at_a_time: usize, tolerance: f64) -> Result<()> {
    let (n, own, width) = (group.world_size(), 7, 6);
    let classes = 4 * n;
    let scatter = mode == LinearMode::ReduceScatter;
    let tokens = if scatter { own * n } else { own };
    let head = || {
        let builder = TensorParallelColumnLinear::<T>::builder(width, classes).mode(mode).overlap(overlap);
        builder.bias(true).seed(7).build(group)
    };
    let seed = if scatter { group.rank() } else { 0 };
    let x: Vec<f64> = (0..own * width).map(|i| real(seed, 1, i)).collect();
    let placement = if scatter { Placement::Rows } else { Placement::Replicated };
    let x = group.tensor(&cast::<T>(&x), &[own, 1, width], placement)?;
    let targets: Vec<i64> = (0..tokens).map(|i| if i % 5 == 3 { -1 } else { (i * 3 % classes) as i64 }).collect();
    let targets = group.tensor(&targets, &[tokens, 1], Placement::Replicated)?;
    let grad: Vec<f64> = (0..tokens).map(|i| 0.1 + 0.01 * i as f64).collect();
    let grad = group.tensor(&cast::<T::Accumulator>(&grad), &[tokens, 1], Placement::Replicated)?;
    let loss = ShardedCrossEntropy::new(classes).ignore_index(-1).label_smoothing(0.1).z_loss(1e-3);
    let whole = head()?;
    let (logits, saved_x) = whole.forward(&x)?;
    let (want, saved) = loss.forward(group, &logits, &targets)?;
    let want_dx = whole.backward(saved_x, &loss.backward(group, saved, &grad)?)?;
    let pieces = head()?;
    let (got, dx) = loss.of_linear(&pieces, &x, &targets, &grad, at_a_time)?;
    let context = format!("{:?} {mode:?} {overlap}, {n} ranks, {at_a_time} rows at a time", T::DTYPE);
    assert_eq!((got.shape(), dx.shape(), dx.placement()), (targets.shape(), x.shape(), x.placement()), "{context}");
    close(&wide(&got)?, &wide(&want)?, tolerance, &context);
    close(&wide(&dx)?, &wide(&want_dx)?, tolerance, &context);
    close(&wide(&pieces.weight_grad()?)?, &wide(&whole.weight_grad()?)?, tolerance, &context);
    let biases = [pieces.bias_grad()?, whole.bias_grad()?].map(|grad| grad.map(|grad| wide(&grad)).transpose());
    let [got, want] = biases;
    close(&got?.unwrap(), &want?.unwrap(), tolerance, &context);
    Ok(())
}

#[test]
fn a_head_some_rows_at_a_time_equals_the_whole_one() {
    for n in 1..=4 {
        for (mode, overlap) in MODES.into_iter().flat_map(|mode| OVERLAPS.map(|overlap| (mode, overlap))) {
            LocalWorld::new(n)
                .unwrap()
                .run(|group| {
                    for at_a_time in [1, 3, 7, 100] {
                        fused::<f64>(group, mode, overlap, at_a_time, 1e-13)?;
                        fused::<f32>(group, mode, overlap, at_a_time, 2e-6)?;
                        fused::<bf16>(group, mode, overlap, at_a_time, 2e-2)?;
                    }
                    Ok(())
                })
                .unwrap();
        }
    }
}

/// What the fused form is for: 2048 tokens and 4096 classes on 2 ranks have 16 MiB of f32 logits a rank, and as much gradient.
#[test]
fn a_head_some_rows_at_a_time_needs_little_memory() {
    let used = |at_a_time: Option<usize>| {
        let used = LocalWorld::new(2).unwrap().run(|group| {
            let head = TensorParallelColumnLinear::<f32>::builder(8, 4096).mode(LinearMode::AllReduce).build(group)?;
            let x = group.tensor(&vec![0.1f32; 2048 * 8], &[2048, 8], Placement::Replicated)?;
            let targets = group.tensor(&vec![5i64; 2048], &[2048], Placement::Replicated)?;
            let grad = group.tensor(&vec![1f32; 2048], &[2048], Placement::Replicated)?;
            let loss = ShardedCrossEntropy::new(4096);
            let before = group.device().memory_bytes();
            match at_a_time {
                Some(rows) => drop(loss.of_linear(&head, &x, &targets, &grad, rows)?),
                None => {
                    let (logits, saved_x) = head.forward(&x)?;
                    let saved = loss.forward(group, &logits, &targets)?.1;
                    head.backward(saved_x, &loss.backward(group, saved, &grad)?)?;
                }
            }
            Ok(group.device().memory_bytes() - before)
        });
        used.unwrap()[0]
    };
    let (whole, pieces) = (used(None), used(Some(128)));
    eprintln!("whole: {whole} bytes, 128 rows at a time: {pieces}");
    assert!(whole >= 32 << 20 && pieces <= 4 << 20, "whole: {whole} bytes, 128 rows at a time: {pieces}");
}

#[test]
fn a_head_some_rows_at_a_time_refuses_what_does_not_fit() {
    LocalWorld::new(2)
        .unwrap()
        .run(|group| {
            let head = TensorParallelColumnLinear::<f32>::builder(2, 4).build(group)?;
            let x = group.tensor(&[0f32; 6], &[3, 2], Placement::Rows)?;
            let ids = |count: usize, last: i64| {
                let ids: Vec<i64> = (0..count).map(|i| if i + 1 == count { last } else { 1 }).collect();
                group.tensor(&ids, &[count], Placement::Replicated)
            };
            let ones = |count: usize| group.tensor(&vec![1f32; count], &[count], Placement::Replicated);
            let loss = ShardedCrossEntropy::new(4);
            assert!(matches!(loss.of_linear(&head, &x, &ids(6, 1)?, &ones(6)?, 0), Err(Error::Argument { .. })));
            assert!(matches!(loss.of_linear(&head, &x, &ids(3, 1)?, &ones(6)?, 2), Err(Error::Shape { .. })));
            assert!(matches!(loss.of_linear(&head, &x, &ids(6, 1)?, &ones(5)?, 2), Err(Error::Shape { .. })));
            let error = loss.of_linear(&head, &x, &ids(6, 4)?, &ones(6)?, 2).unwrap_err().to_string();
            assert!(error.contains("4 at position 5"), "{error}");
            let whole = x.clone().with_placement(Placement::Replicated);
            assert!(matches!(loss.of_linear(&head, &whole, &ids(6, 1)?, &ones(6)?, 2), Err(Error::Placement { .. })));
            let none = group.tensor(&[], &[0, 2], Placement::Rows)?;
            assert_eq!(loss.of_linear(&head, &none, &ids(0, 0)?, &ones(0)?, 2)?.0.shape().elements(), 0);
            Ok(())
        })
        .unwrap();
}

/// The same on CUDA devices, by kernels.
#[cfg(feature = "cuda")]
mod on_cuda {
    use super::*;
    use common::cuda::{Kind, World, devices};

    #[test]
    fn embeddings_equal_the_dense_table_bit_for_bit() {
        for (n, kind) in (1..=devices().min(4)).flat_map(|n| Kind::ALL.map(|kind| (n, kind))) {
            World::new(kind, n)
                .run(|group| {
                    for (mode, overlap) in MODES.into_iter().flat_map(|mode| OVERLAPS.map(|overlap| (mode, overlap))) {
                        embedding::<f32>(group, mode, overlap, 4 * n + 1, true)?;
                        embedding::<f64>(group, mode, overlap, 7, false)?;
                        embedding::<bf16>(group, mode, overlap, n, false)?;
                        embedding::<f16>(group, mode, overlap, 7, true)?;
                    }
                    Ok(())
                })
                .unwrap();
        }
    }

    #[test]
    fn cross_entropy_equals_the_dense_one() {
        let options = [(0.0, 0.0, None), (0.1, 0.0, Some(-100)), (0.3, 1e-2, Some(0))];
        for (n, kind) in (1..=devices().min(4)).flat_map(|n| Kind::ALL.map(|kind| (n, kind))) {
            World::new(kind, n)
                .run(|group| {
                    for (classes, options) in [1, 5, 37].into_iter().flat_map(|c| options.map(|options| (c, options))) {
                        cross_entropy::<f64>(group, classes, 4, 5.0, options, (1e-13, 1e-13))?;
                        cross_entropy::<f32>(group, classes, 4, 5.0, options, (1e-6, 1e-6))?;
                        cross_entropy::<bf16>(group, classes, 4, 5.0, options, (1e-6, 4e-3))?;
                        cross_entropy::<f16>(group, classes, 4, 80.0, options, (1e-6, 1e-3))?;
                        cross_entropy::<f32>(group, classes, 0, 5.0, options, (0.0, 0.0))?;
                    }
                    Ok(())
                })
                .unwrap();
        }
    }

    #[test]
    fn a_head_some_rows_at_a_time_equals_the_whole_one() {
        for (n, kind) in (1..=devices().min(3)).flat_map(|n| Kind::ALL.map(|kind| (n, kind))) {
            World::new(kind, n)
                .run(|group| {
                    for (mode, overlap) in MODES.into_iter().flat_map(|mode| OVERLAPS.map(|overlap| (mode, overlap))) {
                        fused::<f32>(group, mode, overlap, 3, 2e-6)?;
                        fused::<bf16>(group, mode, overlap, 3, 2e-2)?;
                    }
                    Ok(())
                })
                .unwrap();
        }
    }

    #[test]
    fn an_id_that_is_none_is_named_with_its_position() {
        if devices() == 0 {
            return;
        }
        World::new(Kind::Nccl, devices().min(2))
            .run(|group| {
                let layer = TensorParallelEmbedding::<f32>::builder(5, 2).mode(LinearMode::AllReduce).build(group)?;
                let ids = group.tensor(&[0, 4, 5], &[3], Placement::Replicated)?;
                let error = layer.forward(&ids).unwrap_err().to_string();
                assert!(error.contains("5 at position 2"), "{error}");
                layer.forward(&group.tensor(&[0, 4], &[2], Placement::Replicated)?).map(drop)
            })
            .unwrap();
    }
}
