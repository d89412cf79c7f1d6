//! Checkpoints in the safetensors format (feature `checkpoint`): saved whole by any number of ranks, loaded by any other.
//!
//! A checkpoint is a folder with an index and data files, as Hugging Face writes them, or one `.safetensors` file. Tensors are whole
//! in it: [`save`] lets every rank write its own slices into them, and [`Checkpoint::load`] lets every rank read its own alone.
//! Files are read, not mapped: a file that is cut off while it is read is an error then, not a signal.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use crate::dtype::Element;
use crate::layout::{ContiguousChunks, ShardLayout};
use crate::linear::{LinearLayer, Sharded};
use crate::memory::Buffer;
use crate::{
    DType, Device, EmbeddingBuilder, EmbeddingConfig, Error, Float, Group, LinearBuilder, LinearConfig, Parameter,
    Placement, Result, Shape, Tensor, TensorParallelColumnLinear, TensorParallelEmbedding, TensorParallelRowLinear,
};

#[cfg(target_endian = "big")]
compile_error!("safetensors is little-endian, and this module copies bytes as they are");

/// The index's name within its folder.
const INDEX: &str = "model.safetensors.index.json";
/// The data file's name where there is no index.
const SINGLE: &str = "model.safetensors";
/// The longest header that is believed, as in the safetensors crate.
const LONGEST_HEADER: u64 = 100_000_000;
/// Bytes that are read, converted or written at a time.
const BLOCK: usize = 4 << 20;
/// A data file is closed when it has this many bytes, as Hugging Face's are.
const FILE_BYTES: u64 = 5_000_000_000;

/// Which elements of one whole tensor this rank holds.
pub(crate) struct Slices {
    /// What is appended to the layer's name: `.weight`, `.bias`, or nothing.
    suffix: &'static str,
    dtype: DType,
    /// The whole's dimensions, at least one.
    whole: Vec<usize>,
    /// Of the first dimension, in the order in which this rank holds them.
    rows: Vec<Range<usize>>,
    /// Of the others, taken as one.
    columns: Vec<Range<usize>>,
}

/// This rank's part of one whole tensor.
pub struct Part<'a> {
    slices: Slices,
    device: Arc<dyn Device>,
    value: Buffer,
    /// Puts a new value in the place of the old one.
    set: Box<dyn Fn(Buffer) -> Result<()> + 'a>,
}

impl<'a> Part<'a> {
    fn of<T: Float>(slices: Slices, parameter: &'a Parameter<T>) -> Self {
        let value = parameter.value();
        let (shape, device) = (*value.shape(), Arc::clone(value.device()));
        let set = {
            let device = Arc::clone(&device);
            Box::new(move |buffer| {
                parameter.set(Tensor::from_buffer(&device, buffer, shape, Parameter::<T>::PLACEMENT))
            })
        };
        Part { slices, device, value: value.buffer().clone(), set }
    }
}

impl Slices {
    /// Whether this rank holds all of it, as all others do then.
    fn is_whole(&self) -> bool {
        self.rows.iter().map(Range::len).sum::<usize>() == self.whole[0] && self.own_width() == self.width()
    }

    /// Elements of a row of the whole.
    fn width(&self) -> usize {
        self.whole[1..].iter().product()
    }

    /// Elements of a row of this rank's.
    fn own_width(&self) -> usize {
        self.columns.iter().map(Range::len).sum()
    }

    /// Runs of elements of the whole that lie together there and here: where each begins in the whole, and its length.
    fn runs(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let width = self.width();
        let whole_rows = self.columns.len() == 1 && self.columns[0] == (0..width);
        let together = whole_rows.then(|| self.rows.iter().map(move |rows| (rows.start * width, rows.len() * width)));
        let apart = (!whole_rows).then(|| {
            let rows = self.rows.iter().cloned().flatten();
            rows.flat_map(move |row| self.columns.iter().map(move |c| (row * width + c.start, c.len())))
        });
        together.into_iter().flatten().chain(apart.into_iter().flatten())
    }
}

/// What can be saved and loaded: layers, embeddings, and parameters that every rank holds whole.
pub trait Checkpointed {
    /// This rank's parts.
    #[doc(hidden)]
    fn parts(&self) -> Result<Vec<Part<'_>>>;
}

fn file_error(path: &Path, what: &str, error: impl std::fmt::Display) -> Error {
    Error::Checkpoint { path: path.display().to_string(), reason: format!("{what}: {error}") }
}

fn wrong(path: &Path, reason: String) -> Error {
    Error::Checkpoint { path: path.display().to_string(), reason }
}

fn dtype_of(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F32 => Some(DType::F32),
        Dtype::F64 => Some(DType::F64),
        Dtype::F16 => Some(DType::F16),
        Dtype::BF16 => Some(DType::BF16),
        _ => None,
    }
}

fn name_of(dtype: DType) -> Option<Dtype> {
    [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::BF16].into_iter().find(|named| dtype_of(*named) == Some(dtype))
}

/// Opens a file, which must be one.
fn open(path: &Path) -> Result<(File, u64)> {
    // Asked first: opening a pipe would wait for its other end.
    let is_file = fs::metadata(path).map_err(|error| file_error(path, "cannot be looked at", error))?.is_file();
    if !is_file {
        return Err(wrong(path, "is not a file".into()));
    }
    let file = File::open(path).map_err(|error| file_error(path, "cannot be opened", error))?;
    let length = file.metadata().map_err(|error| file_error(path, "cannot be looked at", error))?.len();
    Ok((file, length))
}

#[derive(Debug, Clone)]
struct Entry {
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Where its bytes begin in the file.
    at: u64,
}

/// A checkpoint that is open for reading.
///
/// ```
/// use async_tensor_parallel::{Checkpoint, LocalWorld, TensorParallelColumnLinear, save_checkpoint};
///
/// let folder = std::env::temp_dir().join(format!("checkpoint-{}", std::process::id()));
/// let layer = || TensorParallelColumnLinear::<f32>::builder(4, 6);
/// LocalWorld::new(3)?.run(|group| save_checkpoint(&folder, group, &[("up", &layer().seed(1).build(group)?)]))?;
/// LocalWorld::new(2)?.run(|group| {
///     let loaded = layer().seed(2).build(group)?;
///     Checkpoint::open(&folder)?.load(&loaded, &["up"])?;
///     assert_eq!(loaded.weight().value().to_vec()?, layer().seed(1).build(group)?.weight().value().to_vec()?);
///     Ok(())
/// })?;
/// # std::fs::remove_dir_all(&folder).ok();
/// # Ok::<(), async_tensor_parallel::Error>(())
/// ```
pub struct Checkpoint {
    path: PathBuf,
    files: Vec<PathBuf>,
    tensors: BTreeMap<String, Entry>,
    /// The file that was read last: a process may not have as many open as a large model has.
    open: Mutex<Option<(usize, File)>>,
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Checkpoint({}, {} tensors)", self.path.display(), self.tensors.len())
    }
}

impl Checkpoint {
    /// Opens a `.safetensors` file, or a folder with `model.safetensors.index.json` or `model.safetensors`. Headers are read and
    /// checked against the files' lengths; data is not.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] for what is not there, cut off, or says what cannot be.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let mut checkpoint =
            Self { path: path.into(), files: Vec::new(), tensors: BTreeMap::new(), open: Mutex::default() };
        if !path.is_dir() {
            checkpoint.add(path, None)?;
            return Ok(checkpoint);
        }
        let index = path.join(INDEX);
        if !index.exists() {
            checkpoint.add(&path.join(SINGLE), None)?;
            return Ok(checkpoint);
        }
        let (file, length) = open(&index)?;
        if length > LONGEST_HEADER {
            return Err(wrong(&index, format!("{length} bytes are too many for an index")));
        }
        let mut text = Vec::new();
        let read = file.take(LONGEST_HEADER).read_to_end(&mut text);
        read.map_err(|error| file_error(&index, "cannot be read", error))?;
        let json: serde_json::Value =
            serde_json::from_slice(&text).map_err(|error| file_error(&index, "is not JSON", error))?;
        let map = json.get("weight_map").and_then(serde_json::Value::as_object);
        let map = map.ok_or_else(|| wrong(&index, "has no weight_map".into()))?;
        let mut of_files: BTreeMap<&str, HashSet<&str>> = BTreeMap::new();
        for (name, file) in map {
            let file = file.as_str().filter(|file| is_plain(file));
            let file =
                file.ok_or_else(|| wrong(&index, format!("{name} lies in no file of this folder: {:?}", map[name])))?;
            of_files.entry(file).or_default().insert(name);
        }
        for (file, names) in of_files {
            checkpoint.add(&path.join(file), Some(&names))?;
        }
        Ok(checkpoint)
    }

    /// Adds the tensors of a file, those alone that the index says it has.
    fn add(&mut self, path: &Path, names: Option<&HashSet<&str>>) -> Result<()> {
        let (mut file, length) = open(path)?;
        let mut head = [0; 8];
        file.read_exact(&mut head).map_err(|error| file_error(path, "has no header", error))?;
        let header = u64::from_le_bytes(head);
        if header > LONGEST_HEADER || length.checked_sub(8).is_none_or(|rest| header > rest) {
            return Err(wrong(path, format!("its header of {header} bytes does not fit into {length}")));
        }
        let mut text = vec![0; header as usize];
        file.read_exact(&mut text).map_err(|error| file_error(path, "its header cannot be read", error))?;
        let metadata: Metadata =
            serde_json::from_slice(&text).map_err(|error| file_error(path, "its header is wrong", error))?;
        let wanted = metadata.data_len() as u64;
        if wanted != length - 8 - header {
            let got = length - 8 - header;
            return Err(wrong(path, format!("it holds {got} bytes of data, and its header speaks of {wanted}")));
        }
        let place = self.files.len();
        let tensors = metadata.tensors();
        if let Some(missing) = names.into_iter().flatten().find(|name| !tensors.contains_key(**name)) {
            return Err(wrong(path, format!("the index says that it holds {missing}, and it does not")));
        }
        for (name, TensorInfo { dtype, shape, data_offsets }) in tensors {
            if names.is_none_or(|names| names.contains(&*name)) {
                let at = 8 + header + data_offsets.0 as u64;
                let entry = Entry { file: place, dtype: *dtype, shape: shape.clone(), at };
                self.tensors.insert(name, entry);
            }
        }
        self.files.push(path.into());
        Ok(())
    }

    /// The tensors' names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The shape of a whole tensor, if there is one of that name.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|entry| &entry.shape[..])
    }

    /// Loads this rank's slices of a layer from the tensors `names`, with `.weight` and `.bias` appended (a [`Parameter`] by itself:
    /// nothing). Several names are stacked along the output features: those of a fused layer, such as `q_proj`, `k_proj` and
    /// `v_proj`, in the order of its chunks. Values are converted to the layer's dtype, rounded once.
    ///
    /// A parameter gets its new value when all of it has been read; what fails leaves the old one.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] for a tensor that is missing, has another shape, is not of a floating-point type that is known, or
    /// cannot be read; what the device reports.
    pub fn load(&self, layer: &dyn Checkpointed, names: &[&str]) -> Result<()> {
        let mut done = Vec::new();
        for part in layer.parts()? {
            let value = self.read(&part.slices, &*part.device, part.value.len(), names)?;
            done.push((part, value));
        }
        done.into_iter().try_for_each(|(part, value)| (part.set)(value))
    }

    /// Reads slices into a buffer of `len` bytes.
    fn read(&self, slices: &Slices, device: &dyn Device, len: usize, names: &[&str]) -> Result<Buffer> {
        // The first row of each of the tensors, stacked.
        let mut stacked: Vec<(usize, &Entry, String)> = Vec::new();
        let mut rows = 0;
        for name in names {
            let name = format!("{name}{}", slices.suffix);
            let entry =
                self.tensors.get(&name).ok_or_else(|| wrong(&self.path, format!("there is no tensor {name}")))?;
            if entry.shape.len() != slices.whole.len()
                || entry.shape[1..] != slices.whole[1..]
                || entry.shape.is_empty()
            {
                let (got, wanted) = (&entry.shape, &slices.whole);
                return Err(wrong(&self.path, format!("{name} is {got:?}, and the layer's whole is {wanted:?}")));
            }
            stacked.push((rows, entry, name));
            rows += entry.shape[0];
        }
        if rows != slices.whole[0] {
            let wanted = &slices.whole;
            return Err(wrong(&self.path, format!("{names:?} have {rows} rows, and the layer's whole is {wanted:?}")));
        }
        let width = slices.width();
        let mut target = device.allocate(len)?;
        let (mut block, mut bytes) = (Vec::with_capacity(BLOCK), Vec::new());
        let mut written = 0;
        let mut flush = |block: &mut Vec<u8>| -> Result<()> {
            let range = written..written + block.len();
            written = range.end;
            target.within(range, |target| device.upload(block, target))?;
            block.clear();
            Ok(())
        };
        let size = slices.dtype.size();
        for (mut start, length) in slices.runs() {
            let end = start + length;
            while start < end {
                let (first, entry, name) = stacked[stacked.partition_point(|(first, ..)| first * width <= start) - 1..]
                    .first()
                    .ok_or_else(|| wrong(&self.path, format!("{names:?} do not reach element {start}")))?;
                let stop = end.min((first + entry.shape[0]) * width).min(start + (BLOCK - block.len()) / size);
                let from = dtype_of(entry.dtype).ok_or_else(|| {
                    wrong(&self.path, format!("{name} is of type {:?}, wanted F32, F64, F16 or BF16", entry.dtype))
                })?;
                bytes.resize((stop - start) * from.size(), 0);
                self.read_at(entry, (start - first * width) * from.size(), &mut bytes)?;
                convert(from, &bytes, slices.dtype, &mut block)?;
                start = stop;
                if block.len() + size > BLOCK {
                    flush(&mut block)?;
                }
            }
        }
        flush(&mut block)?;
        // Rows that only fill up the last rank's are zero.
        let rest = written..len;
        target.within(rest, |rest| if rest.is_empty() { Ok(()) } else { device.zero(rest) })?;
        Ok(target.freeze())
    }

    fn read_at(&self, entry: &Entry, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let path = &self.files[entry.file];
        let mut last = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let file = match &mut *last {
            Some((which, file)) if *which == entry.file => file,
            other => &mut other.insert((entry.file, open(path)?.0)).1,
        };
        let read = file.seek(SeekFrom::Start(entry.at + offset as u64)).and_then(|_| file.read_exact(bytes));
        read.map_err(|error| file_error(path, "cannot be read", error))
    }
}

/// Whether it names a file, and nothing above or below.
fn is_plain(file: &str) -> bool {
    let mut parts = Path::new(file).components();
    matches!((parts.next(), parts.next()), (Some(std::path::Component::Normal(_)), None))
}

/// Appends values of one type as values of another.
fn convert(from: DType, bytes: &[u8], to: DType, out: &mut Vec<u8>) -> Result<()> {
    fn between<A: Float, B: Float>(bytes: &[u8], out: &mut Vec<u8>) {
        for value in bytes.chunks_exact(size_of::<A>()) {
            let value: A = bytemuck::pod_read_unaligned(value);
            out.extend_from_slice(bytemuck::bytes_of(&B::from_f64(value.to_f64())));
        }
    }
    macro_rules! to {
        ($from:ty) => {
            match to {
                DType::F32 => between::<$from, f32>(bytes, out),
                DType::F64 => between::<$from, f64>(bytes, out),
                DType::F16 => between::<$from, half::f16>(bytes, out),
                DType::BF16 => between::<$from, half::bf16>(bytes, out),
                other => return Err(Error::Unsupported { what: format!("{other:?}"), reason: "no weights are".into() }),
            }
        };
    }
    match from {
        _ if from == to => out.extend_from_slice(bytes),
        DType::F32 => to!(f32),
        DType::F64 => to!(f64),
        DType::F16 => to!(half::f16),
        DType::BF16 => to!(half::bf16),
        other => return Err(Error::Unsupported { what: format!("{other:?}"), reason: "no weights are".into() }),
    }
    Ok(())
}

/// Saves layers whole: every rank of `group` calls it with the same names, and writes its own slices into files that all reach
/// (one machine, or a shared file system). With data-parallel copies, one tensor-parallel group saves.
///
/// The folder's index is replaced when all data is on disk: who is killed at any moment leaves the old checkpoint or the new one.
/// Data files of neither are removed.
///
/// # Errors
/// On all ranks where one fails: [`Error::Checkpoint`] with what the file system says; [`Error::Argument`] for names that are used
/// twice; those of a collective.
pub fn save(folder: impl AsRef<Path>, group: &Group, layers: &[(&str, &dyn Checkpointed)]) -> Result<()> {
    let folder = folder.as_ref();
    let planned = Plan::of(layers);
    let prepared = match (&planned, group.rank()) {
        (Ok(_), 0) => prepare(folder),
        (Ok(_), _) => Ok(0),
        (Err(error), _) => Err(error.clone()),
    };
    agree(group, folder, prepared.as_ref().map(|_| ()).map_err(Clone::clone))?;
    let (plan, number) = (planned?, prepared?);
    let told = group.tensor(&[number, plan.fingerprint()], &[2], Placement::Replicated)?;
    let told = group.broadcast(0, &told)?.wait()?.to_vec()?;
    let number = told[0];
    let same = if told[1] == plan.fingerprint() {
        Ok(())
    } else {
        Err(wrong(folder, "this rank saves other tensors than rank 0, or other types or shapes".into()))
    };
    agree(group, folder, same)?;
    plan.check_covered(folder, group)?;
    let paths: Vec<PathBuf> = (0..plan.files.len()).map(|file| folder.join(plan.name(number, file))).collect();
    let created = if group.rank() == 0 { plan.create(&paths) } else { Ok(()) };
    let written = agree(group, folder, created)
        .and_then(|()| agree(group, folder, plan.write(&paths, group.rank() == 0)))
        .and_then(|()| agree(group, folder, if group.rank() == 0 { plan.finish(folder, number) } else { Ok(()) }));
    if group.rank() == 0 {
        // What is not in the index now: the old files, or, where something failed, the new ones.
        let kept = if written.is_ok() { Some(number) } else { None };
        clean(folder, kept);
    }
    // When a rank returns, the folder is as it stays: no old file goes later.
    written.and(group.barrier())
}

/// An error on every rank where there is one on any.
fn agree(group: &Group, folder: &Path, outcome: Result<()>) -> Result<()> {
    let failed = group.tensor(&[f32::from(u8::from(outcome.is_err()))], &[1], Placement::Partial)?;
    let failed = group.all_reduce_max(&failed)?.wait()?.to_vec()?[0] > 0.0;
    outcome?;
    if failed { Err(wrong(folder, "another rank could not save its part".into())) } else { Ok(()) }
}

/// The number in the name of one of our data files: `model-<number>-<file>-of-<files>.safetensors`.
fn number_of(name: &str) -> Option<i64> {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let parts: Vec<&str> = name.strip_prefix("model-")?.strip_suffix(".safetensors")?.split('-').collect();
    match parts[..] {
        [number, file, "of", files] if [number, file, files].into_iter().all(digits) && file.len() >= 5 => {
            number.parse().ok()
        }
        _ => None,
    }
}

fn numbered(folder: &Path) -> Result<Vec<(i64, PathBuf)>> {
    let failed = |error| file_error(folder, "cannot be listed", error);
    let mut known = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if let Some(number) = entry.file_name().to_str().and_then(number_of) {
            known.push((number, entry.path()));
        }
    }
    Ok(known)
}

/// The number of the data files that the folder's index names, if it is one of ours.
fn current(folder: &Path) -> Option<i64> {
    let text = fs::read(folder.join(INDEX)).ok()?;
    let json: serde_json::Value = serde_json::from_slice(&text).ok()?;
    json.get("weight_map")?.as_object()?.values().find_map(|file| number_of(file.as_str()?))
}

/// Removes our data files of other numbers than `kept`, or else the index's. What cannot be removed is only in the way.
fn clean(folder: &Path, kept: Option<i64>) {
    let kept = kept.or_else(|| current(folder));
    for (_, path) in numbered(folder).unwrap_or_default().into_iter().filter(|(number, _)| Some(*number) != kept) {
        if let Err(error) = fs::remove_file(&path) {
            tracing::warn!(target: "async_tensor_parallel", path = %path.display(), %error, "an old data file stays");
        }
    }
}

/// Makes the folder, removes what saves that were killed have left, and finds a number that no data file has.
fn prepare(folder: &Path) -> Result<i64> {
    fs::create_dir_all(folder).map_err(|error| file_error(folder, "cannot be made", error))?;
    clean(folder, None);
    let largest = numbered(folder)?.into_iter().map(|(number, _)| number).max().unwrap_or(0);
    largest.checked_add(1).ok_or_else(|| wrong(folder, "has data files with the largest number there is".into()))
}

/// What goes where.
struct Plan<'a> {
    parts: Vec<(String, Part<'a>)>,
    /// Each data file's parts, its header, and where each part's bytes begin.
    files: Vec<(Range<usize>, Vec<u8>, Vec<u64>)>,
}

impl<'a> Plan<'a> {
    fn of(layers: &[(&str, &'a dyn Checkpointed)]) -> Result<Self> {
        let mut parts: Vec<(String, Part<'a>)> = Vec::new();
        for (name, layer) in layers {
            parts.extend(layer.parts()?.into_iter().map(|part| (format!("{name}{}", part.slices.suffix), part)));
        }
        parts.sort_by(|a, b| a.0.cmp(&b.0));
        if let Some(twice) = parts.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            let got = format!("{} twice", twice[0].0);
            return Err(Error::Argument { what: "names", got, wanted: "each tensor's name once".into() });
        }
        let mut files = Vec::new();
        let mut first = 0;
        while first < parts.len() {
            let (mut tensors, mut end, mut at) = (Vec::new(), first, 0);
            while end < parts.len() && (end == first || at < FILE_BYTES) {
                let (name, part) = &parts[end];
                let dtype = name_of(part.slices.dtype).ok_or_else(|| Error::Unsupported {
                    what: format!("saving {:?}", part.slices.dtype),
                    reason: "no weights are".into(),
                })?;
                let bytes = (part.slices.whole.iter().product::<usize>() * part.slices.dtype.size()) as u64;
                let data_offsets = (at as usize, (at + bytes) as usize);
                tensors.push((name.clone(), TensorInfo { dtype, shape: part.slices.whole.clone(), data_offsets }));
                at += bytes;
                end += 1;
            }
            let starts: Vec<usize> = tensors.iter().map(|(_, info)| info.data_offsets.0).collect();
            let bad = |error: &dyn std::fmt::Display| Error::Argument {
                what: "tensors",
                got: error.to_string(),
                wanted: "what safetensors can hold".into(),
            };
            let metadata = Some([("format".to_string(), "pt".to_string())].into());
            let metadata = Metadata::new(metadata, tensors).map_err(|error| bad(&error))?;
            let mut text = serde_json::to_vec(&metadata).map_err(|error| bad(&error))?;
            text.resize(text.len().next_multiple_of(8), b' ');
            let mut header = (text.len() as u64).to_le_bytes().to_vec();
            header.append(&mut text);
            let data = header.len() as u64;
            files.push((first..end, header, starts.into_iter().map(|start| data + start as u64).collect()));
            first = end;
        }
        Ok(Self { parts, files })
    }

    /// A number that ranks with the same tensors have in common (FNV-1a).
    fn fingerprint(&self) -> i64 {
        let bytes = self.files.iter().flat_map(|(_, header, _)| header.iter());
        bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
            as i64
    }

    /// Whether the ranks' slices together are the whole tensors.
    fn check_covered(&self, folder: &Path, group: &Group) -> Result<()> {
        if self.parts.is_empty() {
            return Ok(());
        }
        let own = self.parts.iter().map(|(_, part)| match &part.slices {
            slices if slices.is_whole() && group.rank() > 0 => 0.0,
            slices => (slices.rows.iter().map(Range::len).sum::<usize>() * slices.own_width()) as f64,
        });
        let own = group.tensor(&own.collect::<Vec<f64>>(), &[self.parts.len()], Placement::Partial)?;
        let all = group.all_reduce(&own)?.wait()?.to_vec()?;
        for ((name, part), all) in self.parts.iter().zip(all) {
            let whole = part.slices.whole.iter().product::<usize>() as f64;
            if all != whole {
                let reason = format!(
                    "the {} ranks that save {name} hold {all} of its {whole} elements: it is of another group",
                    group.world_size()
                );
                return Err(wrong(folder, reason));
            }
        }
        Ok(())
    }

    fn name(&self, number: i64, file: usize) -> String {
        format!("model-{number}-{:05}-of-{:05}.safetensors", file + 1, self.files.len())
    }

    /// Makes the data files, with their headers and full lengths.
    fn create(&self, paths: &[PathBuf]) -> Result<()> {
        for ((parts, header, starts), path) in self.files.iter().zip(paths) {
            let last = &self.parts[parts.end - 1].1;
            let bytes = last.slices.whole.iter().product::<usize>() * last.slices.dtype.size();
            let length = starts[starts.len() - 1] + bytes as u64;
            let made = File::create(path).and_then(|mut file| {
                file.write_all(header)?;
                file.set_len(length)
            });
            made.map_err(|error| file_error(path, "cannot be made", error))?;
        }
        Ok(())
    }

    /// Writes this rank's slices.
    fn write(&self, paths: &[PathBuf], first: bool) -> Result<()> {
        let mut block = Vec::new();
        for ((parts, _, starts), path) in self.files.iter().zip(paths) {
            let failed = |error| file_error(path, "cannot be written", error);
            let mut file = File::options().write(true).open(path).map_err(failed)?;
            for ((_, part), at) in
                self.parts[parts.clone()].iter().zip(starts).filter(|((_, part), _)| first || !part.slices.is_whole())
            {
                let size = part.slices.dtype.size();
                // What has been downloaded: a range of this rank's elements.
                let (mut loaded, mut own) = (0..0, 0);
                let total = part.value.len() / size;
                for (mut start, mut length) in part.slices.runs() {
                    while length > 0 {
                        if own == loaded.end {
                            loaded = own..total.min(own + BLOCK / size);
                            block.resize(loaded.len() * size, 0);
                            part.device.download(&part.value.slice(own * size..loaded.end * size)?, &mut block)?;
                        }
                        let count = length.min(loaded.end - own);
                        let bytes = &block[(own - loaded.start) * size..(own - loaded.start + count) * size];
                        let place = SeekFrom::Start(at + (start * size) as u64);
                        file.seek(place).and_then(|_| file.write_all(bytes)).map_err(failed)?;
                        (start, own, length) = (start + count, own + count, length - count);
                    }
                }
            }
            file.sync_all().map_err(failed)?;
        }
        Ok(())
    }

    /// Makes this the folder's checkpoint.
    fn finish(&self, folder: &Path, number: i64) -> Result<()> {
        let mut map = serde_json::Map::new();
        for (file, (parts, ..)) in self.files.iter().enumerate() {
            for (name, _) in &self.parts[parts.clone()] {
                map.insert(name.clone(), self.name(number, file).into());
            }
        }
        let bytes: usize = self
            .parts
            .iter()
            .map(|(_, part)| part.slices.whole.iter().product::<usize>() * part.slices.dtype.size())
            .sum();
        let index = serde_json::json!({ "metadata": { "total_size": bytes }, "weight_map": map });
        let (partial, place) = (folder.join(format!("{INDEX}.partial")), folder.join(INDEX));
        let written = File::create(&partial).and_then(|mut file| {
            file.write_all(index.to_string().as_bytes())?;
            file.sync_all()?;
            fs::rename(&partial, &place)?;
            // The new name itself must be on disk; where folders cannot be opened, that is the system's affair.
            File::open(folder).map_or(Ok(()), |folder| folder.sync_all())
        });
        written.map_err(|error| file_error(&place, "cannot be written", error))?;
        Ok(())
    }
}

/// A weight that every rank holds whole, such as a norm's; the first rank's is saved.
impl<T: Float> Checkpointed for Mutex<Tensor<T>> {
    fn parts(&self) -> Result<Vec<Part<'_>>> {
        let value = self.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let (shape, placement, device) = (*value.shape(), value.placement(), Arc::clone(value.device()));
        if placement != Placement::Replicated {
            let hint = "; a layer knows its own part of the whole";
            return Err(Error::Placement { what: "tensor", got: placement, wanted: Placement::Replicated, hint });
        }
        let set = {
            let device = Arc::clone(&device);
            Box::new(move |buffer| {
                *self.lock().unwrap_or_else(PoisonError::into_inner) =
                    Tensor::from_buffer(&device, buffer, shape, placement);
                Ok(())
            })
        };
        let slices = Slices {
            suffix: "",
            dtype: T::DTYPE,
            whole: shape.to_vec(),
            rows: all(shape[0]),
            columns: all(shape[1..].iter().product()),
        };
        Ok(vec![Part { slices, device, value: value.buffer().clone(), set }])
    }
}

/// A dimension that is not sharded.
fn all(size: usize) -> Vec<Range<usize>> {
    std::iter::once(0..size).collect()
}

/// The slices of a linear layer's weight and bias.
fn of_linear(config: &LinearConfig, sharded: Sharded, dtype: DType, group: &Group) -> Result<(Slices, Option<Slices>)> {
    let LinearConfig { in_features, out_features, ref contiguous_chunks, .. } = *config;
    let (what, total) = match sharded {
        Sharded::Out => ("out_features", out_features),
        Sharded::In => ("in_features", in_features),
    };
    let chunks = ContiguousChunks::new(what, total, contiguous_chunks, group.world_size())?;
    let own: Vec<_> = chunks.of_rank(group.rank()).collect();
    let (rows, columns) = match sharded {
        Sharded::Out => (own, all(in_features)),
        Sharded::In => (all(out_features), own),
    };
    let bias = config.bias.then(|| Slices {
        suffix: ".bias",
        dtype,
        whole: vec![out_features],
        rows: rows.clone(),
        columns: all(1),
    });
    Ok((Slices { suffix: ".weight", dtype, whole: vec![out_features, in_features], rows, columns }, bias))
}

/// The slices of an embedding's table.
fn of_embedding(config: &EmbeddingConfig, dtype: DType, group: &Group) -> Result<Slices> {
    let EmbeddingConfig { num_embeddings, embedding_dim, .. } = *config;
    let own = ShardLayout::uneven(num_embeddings, group.world_size())?.own(group.rank());
    let whole = vec![num_embeddings, embedding_dim];
    Ok(Slices { suffix: ".weight", dtype, whole, rows: vec![own], columns: all(embedding_dim) })
}

fn linear_parts<'a, T: Float>(
    (weight, bias): (Slices, Option<Slices>),
    parameters: (&'a Parameter<T>, Option<&'a Parameter<T>>),
) -> Vec<Part<'a>> {
    let mut parts = vec![Part::of(weight, parameters.0)];
    parts.extend(bias.zip(parameters.1).map(|(slices, bias)| Part::of(slices, bias)));
    parts
}

impl<T: Float> Checkpointed for TensorParallelColumnLinear<T> {
    fn parts(&self) -> Result<Vec<Part<'_>>> {
        let slices = of_linear(self.config(), Sharded::Out, T::DTYPE, self.group())?;
        Ok(linear_parts(slices, (self.weight(), self.bias())))
    }
}

impl<T: Float> Checkpointed for TensorParallelRowLinear<T> {
    fn parts(&self) -> Result<Vec<Part<'_>>> {
        let slices = of_linear(self.config(), Sharded::In, T::DTYPE, self.group())?;
        Ok(linear_parts(slices, (self.weight(), self.bias())))
    }
}

impl<T: Float> Checkpointed for TensorParallelEmbedding<T> {
    fn parts(&self) -> Result<Vec<Part<'_>>> {
        Ok(vec![Part::of(of_embedding(self.config(), T::DTYPE, self.group())?, self.weight())])
    }
}

impl<L: LinearLayer> LinearBuilder<L> {
    /// A layer with the weights of a checkpoint, as [`Checkpoint::load`] loads them: no other weights are made first, so that a rank
    /// needs the memory of its shard and a few MiB (feature `checkpoint`).
    ///
    /// # Errors
    /// As [`build`](Self::build) and [`Checkpoint::load`].
    pub fn from_checkpoint(self, group: &Group, checkpoint: &Checkpoint, names: &[&str]) -> Result<L> {
        let (weight_shape, bias_shape) = self.shard_shapes(group)?;
        let (weight, bias) = of_linear(self.options(), L::SHARDED, L::Element::DTYPE, group)?;
        let read = |slices: &Slices, shape: &[usize]| -> Result<Tensor<L::Element>> {
            let shape = Shape::new(shape)?;
            let len = shape.elements() * slices.dtype.size();
            let buffer = checkpoint.read(slices, &**group.device(), len, names)?;
            Ok(Tensor::from_buffer(group.device(), buffer, shape, Parameter::<L::Element>::PLACEMENT))
        };
        let weight = read(&weight, &weight_shape)?;
        let bias = bias.map(|slices| read(&slices, &bias_shape)).transpose()?;
        self.with_tensors(group, weight, bias)
    }
}

impl<T: Float> EmbeddingBuilder<T> {
    /// An embedding with the table of a checkpoint, as [`Checkpoint::load`] loads it, and no other first (feature `checkpoint`).
    ///
    /// # Errors
    /// As [`build`](Self::build) and [`Checkpoint::load`].
    pub fn from_checkpoint(
        self,
        group: &Group,
        checkpoint: &Checkpoint,
        name: &str,
    ) -> Result<TensorParallelEmbedding<T>> {
        let slices = of_embedding(self.options(), T::DTYPE, group)?;
        self.with_table(group, |len| checkpoint.read(&slices, &**group.device(), len, &[name]))
    }
}
