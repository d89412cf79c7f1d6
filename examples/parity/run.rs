//! Runs one case through this crate's layers and compares what comes out.

use async_tensor_parallel::{
    DType, Float, Group, LinearMode, Overlap, Placement, Plan, ProductCost, ShardedCrossEntropy, Tensor,
    TensorParallelColumnLinear, TensorParallelEmbedding, TensorParallelRowLinear, WireCost,
};
use half::{bf16, f16};

use crate::case::{Case, Dtype, Layer, Malformed, Values, compare};
use crate::world::{Engine, World};

/// What became of a case.
#[derive(Debug)]
pub enum Outcome {
    /// It was run under every overlap.
    Compared { worst: f64, which: String, passes: bool },
    /// Its layer is not known.
    Unknown,
}

/// What a rank computed, by the name that the case gives it.
type Computed = Vec<(&'static str, Vec<usize>, Vec<f64>)>;

/// Runs `case` on `engine` under each of `overlaps`.
pub fn run(case: &Case, overlaps: &[Overlap], engine: Engine) -> Result<Outcome, String> {
    let mut outcome = Outcome::Compared { worst: 0.0, which: "nothing".into(), passes: true };
    for overlap in overlaps {
        let ranks = match case.dtype {
            Dtype::F32 => run_as::<f32>(case, *overlap, engine)?,
            Dtype::F16 => run_as::<f16>(case, *overlap, engine)?,
            Dtype::BF16 => run_as::<bf16>(case, *overlap, engine)?,
        };
        let Some(ranks) = ranks else { return Ok(Outcome::Unknown) };
        for (rank, computed) in &ranks {
            let rank = *rank;
            for (name, shape, got) in computed {
                let want = case.tensor(rank, name).map_err(|error| error.to_string())?;
                let (error, passes) = compare(got, &want.values, case.dtype);
                let passes = passes && *shape == want.shape;
                let Outcome::Compared { worst, which, passes: all } = &mut outcome else { continue };
                if error > *worst || (!passes && *all) {
                    *worst = error;
                    *which = format!("rank{rank}.{name} {shape:?} (wanted {:?}), {overlap:?}", want.shape);
                }
                *all &= passes;
            }
        }
    }
    Ok(outcome)
}

/// The number of ranks, where a launcher has decided it, and whether this process speaks for all.
pub fn job(engine: Engine) -> Result<(Option<usize>, bool), String> {
    if engine != Engine::Mpi {
        return Ok((None, true));
    }
    let world = World::new(engine, 1).map_err(|error| error.to_string())?;
    Ok((world.launched_ranks(), world.is_first()))
}

fn run_as<T: Float>(case: &Case, overlap: Overlap, engine: Engine) -> Result<Option<Vec<(usize, Computed)>>, String> {
    if case.layer == Layer::Other {
        return Ok(None);
    }
    let world = World::new(engine, case.world_size).map_err(|error| error.to_string())?;
    let world = match world {
        World::Local(world) => World::Local(world.with_threads(1)),
        #[cfg(any(feature = "cuda", feature = "mpi"))]
        world => world,
    };
    let run = |group: &Group| {
        group.set_deadline(std::time::Duration::from_secs(60));
        if overlap == Overlap::Auto {
            group.set_plan(plan(group.world_size(), T::DTYPE))?;
        }
        let computed = match case.layer {
            Layer::Embedding => embedding::<T>(group, case, overlap)?,
            Layer::CrossEntropy => cross_entropy::<T>(group, case)?,
            _ => linear::<T>(group, case, overlap)?,
        };
        Ok((group.rank(), computed))
    };
    world.run(run).map(Some).map_err(|error| error.to_string())
}

/// A made-up plan, so that no case has to be measured: a link on which hiding pays.
fn plan(world_size: usize, dtype: DType) -> Plan {
    let product = ProductCost { per_product: 1e-10, ..ProductCost::default() };
    let wire = WireCost { per_byte: 1e-9, ..WireCost::default() };
    Plan {
        world_size,
        dtype,
        forward: product,
        input_grad: product,
        weight_grad: product,
        gather: wire,
        reduce: wire,
        free: 1.0,
    }
}

fn format_error(error: &Malformed) -> async_tensor_parallel::Error {
    async_tensor_parallel::Error::Format { what: "case".into(), message: error.to_string() }
}

fn elements<T: Float>(values: &Values) -> Vec<T> {
    values.values.iter().map(|value| T::from_f64(*value)).collect()
}

fn seen<T: Float>(
    name: &'static str,
    tensor: &Tensor<T>,
) -> async_tensor_parallel::Result<(&'static str, Vec<usize>, Vec<f64>)> {
    Ok((name, tensor.shape().to_vec(), tensor.to_vec()?.into_iter().map(T::to_f64).collect()))
}

/// Token ids and classes.
fn ids(name: &str, values: &Values) -> async_tensor_parallel::Result<Vec<i64>> {
    let whole = |value: &f64| {
        let id = *value as i64;
        if id as f64 == *value {
            Ok(id)
        } else {
            Err(format_error(&Malformed(format!("{name} holds {value}, wanted whole numbers"))))
        }
    };
    values.values.iter().map(whole).collect()
}

fn embedding<T: Float>(group: &Group, case: &Case, overlap: Overlap) -> async_tensor_parallel::Result<Computed> {
    let rank = group.rank();
    let get = |name: &str| case.tensor(rank, name).map_err(|error| format_error(&error));
    let (input, weight, grad_output) = (get("input")?, get("weight")?, get("grad_output")?);
    let [rows, dim] = weight.shape[..] else {
        return Err(format_error(&Malformed(format!("weight has shape {:?}, wanted two dimensions", weight.shape))));
    };
    let mode = if case.mode == "all_reduce" { LinearMode::AllReduce } else { LinearMode::ReduceScatter };
    let outer = if mode == LinearMode::AllReduce { Placement::Replicated } else { Placement::Rows };
    let layer = TensorParallelEmbedding::<T>::builder(rows * group.world_size(), dim)
        .mode(mode)
        .overlap(overlap)
        .from_shard(group, &elements::<T>(weight))?;
    let ids = group.tensor(&ids("input", input)?, &input.shape, Placement::Replicated)?;
    let (output, saved) = layer.forward(&ids)?;
    layer.backward(saved, &group.tensor(&elements::<T>(grad_output), &grad_output.shape, outer)?)?;
    Ok(vec![seen("output", &output)?, seen("grad_weight", &layer.weight_grad()?)?])
}

fn cross_entropy<T: Float>(group: &Group, case: &Case) -> async_tensor_parallel::Result<Computed> {
    let rank = group.rank();
    let get = |name: &str| case.tensor(rank, name).map_err(|error| format_error(&error));
    let (input, target, grad_output) = (get("input")?, get("target")?, get("grad_output")?);
    let classes = input.shape.last().copied().unwrap_or_default() * group.world_size();
    let loss = ShardedCrossEntropy::new(classes).z_loss(case.z_loss_coef);
    let logits = group.tensor(&elements::<T>(input), &input.shape, Placement::Features)?;
    let targets = group.tensor(&ids("target", target)?, &target.shape, Placement::Replicated)?;
    let (output, saved) = loss.forward(group, &logits, &targets)?;
    let grad = group.tensor(&elements::<T::Accumulator>(grad_output), &grad_output.shape, Placement::Replicated)?;
    let grad_input = loss.backward(group, saved, &grad)?;
    Ok(vec![seen("output", &output)?, seen("grad_input", &grad_input)?])
}

fn linear<T: Float>(group: &Group, case: &Case, overlap: Overlap) -> async_tensor_parallel::Result<Computed> {
    let rank = group.rank();
    let get = |name: &str| case.tensor(rank, name).map_err(|error| format_error(&error));
    let (input, weight, grad_output) = (get("input")?, get("weight")?, get("grad_output")?);
    let [rows, columns] = weight.shape[..] else {
        return Err(format_error(&Malformed(format!("weight has shape {:?}, wanted two dimensions", weight.shape))));
    };
    // Only the first rank's file holds a row layer's bias; here every rank has it, and it counts once.
    let bias_rank = if case.layer == Layer::RowLinear { 0 } else { rank };
    let bias = case.get(bias_rank, "bias");
    let mode = if case.mode == "all_reduce" { LinearMode::AllReduce } else { LinearMode::ReduceScatter };
    let outer = if mode == LinearMode::AllReduce { Placement::Replicated } else { Placement::Rows };
    macro_rules! drive {
        ($layer:ident, $in_features:expr, $out_features:expr, $placement_in:expr, $placement_out:expr) => {{
            let layer = $layer::<T>::builder($in_features, $out_features)
                .mode(mode)
                .overlap(overlap)
                .recompute_all_gather(case.recompute_all_gather)
                .bias(bias.is_some())
                .from_shard(group, &elements::<T>(weight), bias.map(elements::<T>).as_deref())?;
            let (output, saved) =
                layer.forward(&group.tensor(&elements::<T>(input), &input.shape, $placement_in)?)?;
            let dy = group.tensor(&elements::<T>(grad_output), &grad_output.shape, $placement_out)?;
            let grad_input = layer.backward(saved, &dy)?;
            let mut computed = vec![
                seen("output", &output)?,
                seen("grad_input", &grad_input)?,
                seen("grad_weight", &layer.weight_grad()?)?,
            ];
            if let (Some(grad), Some(_)) = (layer.bias_grad()?, case.get(rank, "grad_bias")) {
                computed.push(seen("grad_bias", &grad)?);
            }
            Ok(computed)
        }};
    }
    let n = group.world_size();
    match case.layer {
        Layer::ColumnLinear => {
            drive!(TensorParallelColumnLinear, columns, rows * n, outer, Placement::Features)
        }
        _ => drive!(TensorParallelRowLinear, columns * n, rows, Placement::Features, outer),
    }
}
