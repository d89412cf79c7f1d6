//! Reads parity cases: safetensors files that hold what every rank of one layer saw and returned.
//!
//! Tensors are named `rank{r}.{name}`; the metadata says which layer, mode, world size and dtype they belong to. Whatever
//! a file holds, reading it ends in a case or in an error that names what is wrong with it.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use half::{bf16, f16};
use safetensors::SafeTensors;

/// Largest file that is read: a case is small, and a wrong path may not be.
const LARGEST_FILE: u64 = 1 << 30;
/// Most ranks that are believed.
const MOST_RANKS: usize = 64;

/// What is wrong with a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Malformed(pub String);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Malformed {}

fn malformed<T>(what: impl Into<String>) -> Result<T, Malformed> {
    Err(Malformed(what.into()))
}

/// The layers that cases are about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layer {
    ColumnLinear,
    RowLinear,
    Embedding,
    CrossEntropy,
    /// Another, of which nothing is read.
    Other,
}

/// The dtype of a case's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    F32,
    F16,
    BF16,
}

impl Dtype {
    /// What a value may be off, relative to the largest of its tensor.
    pub fn tolerance(self) -> f64 {
        match self {
            Dtype::F32 => 1e-4,
            Dtype::F16 => 8e-3,
            Dtype::BF16 => 6e-2,
        }
    }
}

/// Values with their shape; token ids are whole numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Values {
    pub shape: Vec<usize>,
    pub values: Vec<f64>,
}

/// One case.
#[derive(Debug, Clone)]
pub struct Case {
    pub layer: Layer,
    /// `all_reduce`, `reduce_scatter`, or empty.
    pub mode: String,
    pub world_size: usize,
    pub dtype: Dtype,
    pub recompute_all_gather: bool,
    pub z_loss_coef: f64,
    tensors: HashMap<(usize, String), Values>,
}

impl Case {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, Malformed> {
        let failed = |error: std::io::Error| Malformed(format!("{}: {error}", path.display()));
        let size = std::fs::metadata(path).map_err(failed)?.len();
        if size > LARGEST_FILE {
            return malformed(format!("{}: {size} bytes, more than a case can have", path.display()));
        }
        let bytes = std::fs::read(path).map_err(failed)?;
        Self::parse(&bytes).map_err(|error| Malformed(format!("{}: {error}", path.display())))
    }

    /// Reads a file's bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let refused = |error: safetensors::SafeTensorError| Malformed(format!("not a safetensors file: {error}"));
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(refused)?;
        let Some(metadata) = header.metadata() else { return malformed("it has no metadata") };
        let field =
            |key: &str| metadata.get(key).map(String::as_str).ok_or(Malformed(format!("metadata: {key} is missing")));
        let layer = match field("layer")? {
            "column_linear" => Layer::ColumnLinear,
            "row_linear" => Layer::RowLinear,
            "embedding" => Layer::Embedding,
            "cross_entropy" => Layer::CrossEntropy,
            _ => {
                return Ok(Self {
                    layer: Layer::Other,
                    mode: String::new(),
                    world_size: 1,
                    dtype: Dtype::F32,
                    recompute_all_gather: true,
                    z_loss_coef: 0.0,
                    tensors: HashMap::new(),
                });
            }
        };
        let mode = field("mode")?;
        if !(matches!(mode, "all_reduce" | "reduce_scatter") || (mode.is_empty() && layer == Layer::CrossEntropy)) {
            return malformed(format!("metadata: mode is {mode:?}"));
        }
        let dtype = match field("dtype")? {
            "float32" => Dtype::F32,
            "float16" => Dtype::F16,
            "bfloat16" => Dtype::BF16,
            other => return malformed(format!("metadata: dtype is {other:?}")),
        };
        let world_size = match field("world_size")?.parse::<usize>() {
            Ok(ranks) if (1..=MOST_RANKS).contains(&ranks) => ranks,
            _ => {
                return malformed(format!(
                    "metadata: world_size is {:?}, wanted 1 to {MOST_RANKS}",
                    field("world_size")?
                ));
            }
        };
        let z_loss_coef = match metadata.get("z_loss_coef").map_or(Ok(0.0), |text| text.parse::<f64>()) {
            Ok(coefficient) if coefficient.is_finite() => coefficient,
            _ => return malformed(format!("metadata: z_loss_coef is {:?}", metadata.get("z_loss_coef"))),
        };
        let recompute_all_gather = match metadata.get("recompute_all_gather").map(String::as_str) {
            None | Some("true" | "") => true,
            Some("false") => false,
            Some(other) => return malformed(format!("metadata: recompute_all_gather is {other:?}")),
        };

        let file = SafeTensors::deserialize(bytes).map_err(refused)?;
        let mut tensors = HashMap::new();
        for (name, view) in file.iter() {
            let key = name.strip_prefix("rank").and_then(|rest| rest.split_once('.'));
            let key = key.and_then(|(rank, name)| Some((rank.parse::<usize>().ok()?, name.to_string())));
            let Some(key) = key.filter(|(rank, _)| *rank < world_size) else {
                return malformed(format!("tensor {name:?}: wanted rank0.… to rank{}.…", world_size - 1));
            };
            let wanted = match (key.1.as_str(), dtype) {
                ("input", _) if layer == Layer::Embedding => safetensors::Dtype::I64,
                ("target", _) => safetensors::Dtype::I64,
                (_, Dtype::F32) => safetensors::Dtype::F32,
                (_, Dtype::F16) => safetensors::Dtype::F16,
                (_, Dtype::BF16) => safetensors::Dtype::BF16,
            };
            // A loss may be kept more precisely than the logits it came from.
            let loss = layer == Layer::CrossEntropy && view.dtype() == safetensors::Dtype::F32;
            if view.dtype() != wanted && !loss {
                return malformed(format!("tensor {name:?} has dtype {:?}, wanted {wanted:?}", view.dtype()));
            }
            tensors.insert(key, Values { shape: view.shape().to_vec(), values: values(view.dtype(), view.data()) });
        }
        Ok(Self { layer, mode: mode.to_string(), world_size, dtype, recompute_all_gather, z_loss_coef, tensors })
    }

    /// A rank's tensor, if the case has it.
    pub fn get(&self, rank: usize, name: &str) -> Option<&Values> {
        self.tensors.get(&(rank, name.to_string()))
    }

    /// A rank's tensor.
    pub fn tensor(&self, rank: usize, name: &str) -> Result<&Values, Malformed> {
        self.get(rank, name).ok_or_else(|| Malformed(format!("tensor rank{rank}.{name} is missing")))
    }
}

/// Little-endian elements as f64; the file's own check has made sure that there are whole ones.
fn values(dtype: safetensors::Dtype, bytes: &[u8]) -> Vec<f64> {
    fn each<const N: usize>(bytes: &[u8], convert: impl Fn([u8; N]) -> f64) -> Vec<f64> {
        bytes.as_chunks::<N>().0.iter().map(|chunk| convert(*chunk)).collect()
    }
    match dtype {
        safetensors::Dtype::F32 => each(bytes, |b| f32::from_le_bytes(b).into()),
        safetensors::Dtype::F16 => each(bytes, |b| f16::from_le_bytes(b).into()),
        safetensors::Dtype::BF16 => each(bytes, |b| bf16::from_le_bytes(b).into()),
        _ => each(bytes, |b| i64::from_le_bytes(b) as f64),
    }
}

/// The largest error of `got` relative to the largest value wanted, and whether every value passes:
/// |got − want| ≤ 1e-5 + t · max|want|. What is not finite must be the same on both sides.
pub fn compare(got: &[f64], want: &[f64], dtype: Dtype) -> (f64, bool) {
    if got.len() != want.len() {
        return (f64::INFINITY, false);
    }
    let largest = want.iter().filter(|value| value.is_finite()).fold(0f64, |largest, value| largest.max(value.abs()));
    let allowed = 1e-5 + dtype.tolerance() * largest;
    let mut worst = 0f64;
    for (got, want) in got.iter().zip(want) {
        let error = match (got.is_finite(), want.is_finite()) {
            (true, true) => (got - want).abs(),
            _ if got == want || (got.is_nan() && want.is_nan()) => 0.0,
            _ => f64::INFINITY,
        };
        worst = worst.max(error);
    }
    (if largest > 0.0 { worst / largest } else { worst }, worst <= allowed)
}
