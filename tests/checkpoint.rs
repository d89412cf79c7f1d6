//! Checkpoints: any number of ranks to any other, Hugging Face's names, hostile files, and being killed while saving.
#![cfg(feature = "checkpoint")]

mod common;

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use async_tensor_parallel::{
    Checkpoint, Checkpointed, Error, Float, Group, LocalWorld, Placement, Result, Tensor, TensorParallelColumnLinear,
    TensorParallelEmbedding, TensorParallelRowLinear, save_checkpoint,
};
use half::{bf16, f16};
use proptest::prelude::*;
use safetensors::tensor::{Dtype, TensorView, serialize};

/// A folder of its own, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("atp-{}-{name}", std::process::id()));
        fs::remove_dir_all(&path).ok();
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

/// One of each: fused column with bias, row with bias, embedding whose vocabulary does not divide, a norm.
struct Model<T: Float> {
    qkv: TensorParallelColumnLinear<T>,
    down: TensorParallelRowLinear<T>,
    embedding: TensorParallelEmbedding<T>,
    norm: Mutex<Tensor<T>>,
}

impl<T: Float> Model<T> {
    fn new(group: &Group, seed: u64) -> Result<Self> {
        let norm: Vec<T> = (0..5).map(|i| T::from_f64((seed as f64) + f64::from(i))).collect();
        Ok(Self {
            qkv: TensorParallelColumnLinear::builder(5, 24)
                .bias(true)
                .contiguous_chunks(&[12, 6, 6])
                .seed(seed)
                .build(group)?,
            down: TensorParallelRowLinear::builder(12, 5).bias(true).seed(seed + 1).build(group)?,
            embedding: TensorParallelEmbedding::builder(7, 5).seed(seed + 2).build(group)?,
            norm: Mutex::new(group.tensor(&norm, &[5], Placement::Replicated)?),
        })
    }

    fn named(&self) -> [(&'static str, &dyn Checkpointed); 4] {
        [("qkv", &self.qkv), ("down", &self.down), ("embedding", &self.embedding), ("norm.weight", &self.norm)]
    }

    fn load(&self, checkpoint: &Checkpoint) -> Result<()> {
        self.named().into_iter().try_for_each(|(name, layer)| checkpoint.load(layer, &[name]))
    }

    fn values(&self) -> Result<Vec<f64>> {
        let mut all = Vec::new();
        let biases = [self.qkv.bias(), self.down.bias()];
        let parameters = [self.qkv.weight(), self.down.weight(), self.embedding.weight()];
        for tensor in parameters.into_iter().chain(biases.into_iter().flatten()).map(|parameter| parameter.value()) {
            all.extend(tensor.to_vec()?.into_iter().map(T::to_f64));
        }
        all.extend(self.norm.lock().unwrap().to_vec()?.into_iter().map(T::to_f64));
        Ok(all)
    }
}

/// Saved by each world size, loaded by each: the very bits.
fn round_trip<T: Float>(name: &str) {
    let folder = Folder::new(name);
    for from in [1, 2, 3, 6] {
        LocalWorld::new(from)
            .unwrap()
            .run(|group| save_checkpoint(&folder.0, group, &Model::<T>::new(group, 3)?.named()))
            .unwrap();
        for to in [1, 2, 3, 6] {
            LocalWorld::new(to)
                .unwrap()
                .run(|group| {
                    let model = Model::<T>::new(group, 50)?;
                    model.load(&Checkpoint::open(&folder.0)?)?;
                    assert_eq!(model.values()?, Model::<T>::new(group, 3)?.values()?, "{from} to {to}");
                    Ok(())
                })
                .unwrap();
        }
    }
}

#[test]
fn any_world_size_to_any_other() {
    round_trip::<f32>("f32");
    round_trip::<f64>("f64");
    round_trip::<bf16>("bf16");
    round_trip::<f16>("f16");
}

#[test]
fn types_are_converted_with_one_rounding() {
    let folder = Folder::new("types");
    LocalWorld::new(2)
        .unwrap()
        .run(|group| {
            save_checkpoint(&folder.0, group, &Model::<f32>::new(group, 3)?.named())?;
            let (exact, model) = (Model::<f32>::new(group, 3)?.values()?, Model::<bf16>::new(group, 9)?);
            model.load(&Checkpoint::open(&folder.0)?)?;
            // Exact in f32, whose conversion rounds to nearest, once.
            let want: Vec<f64> = exact.iter().map(|value| bf16::from_f32(*value as f32).to_f64()).collect();
            assert_eq!(model.values()?, want);
            let wider = Model::<f64>::new(group, 9)?;
            wider.load(&Checkpoint::open(&folder.0)?)?;
            assert_eq!(wider.values()?, exact);
            Ok(())
        })
        .unwrap();
}

fn bytes(values: &[f32]) -> Vec<u8> {
    bytemuck::cast_slice(values).to_vec()
}

/// A file as the reference implementation writes it, of tensors that count up.
fn file(path: &std::path::Path, tensors: &[(&str, &[usize])]) {
    let data: Vec<Vec<u8>> = tensors
        .iter()
        .enumerate()
        .map(|(which, (_, shape))| {
            let count: usize = shape.iter().product();
            bytes(&(0..count).map(|i| (100 * which + i) as f32).collect::<Vec<_>>())
        })
        .collect();
    let views = tensors
        .iter()
        .zip(&data)
        .map(|((name, shape), data)| (*name, TensorView::new(Dtype::F32, shape.to_vec(), data).unwrap()));
    fs::write(path, serialize(views, None).unwrap()).unwrap();
}

/// Hugging Face's Llama names, in two files with an index, into fused layers.
#[test]
fn hugging_faces_names_load_as_they_are() {
    let folder = Folder::new("llama");
    let layer = "model.layers.0";
    let name = |what: &str| format!("{layer}.{what}.weight");
    let (q, k, v) = (name("self_attn.q_proj"), name("self_attn.k_proj"), name("self_attn.v_proj"));
    let down = name("mlp.down_proj");
    file(&folder.0.join("model-00001-of-00002.safetensors"), &[(&q, &[4, 3]), (&k, &[2, 3])]);
    file(&folder.0.join("model-00002-of-00002.safetensors"), &[(&v, &[2, 3]), (&down, &[3, 4])]);
    let [first, second] = [1, 2].map(|i| format!("model-0000{i}-of-00002.safetensors"));
    let index = serde_json::json!({"metadata": {}, "weight_map": {&q: first, &k: first, &v: second, &down: second}});
    fs::write(folder.0.join("model.safetensors.index.json"), index.to_string()).unwrap();
    let whole = |count: usize, from: usize| (from..from + count).map(|i| i as f32).collect::<Vec<_>>();
    // Tensors that come second in their file count from 100.
    let stacked = [whole(12, 0), whole(6, 100), whole(6, 0)].concat();
    for n in [1, 2] {
        LocalWorld::new(n)
            .unwrap()
            .run(|group| {
                let checkpoint = Checkpoint::open(&folder.0)?;
                let fused = || TensorParallelColumnLinear::<f32>::builder(3, 8).contiguous_chunks(&[4, 2, 2]);
                let qkv = fused().build(group)?;
                let names = ["q", "k", "v"].map(|which| format!("{layer}.self_attn.{which}_proj"));
                checkpoint.load(&qkv, &names.each_ref().map(String::as_str))?;
                let want = fused().from_full(group, &stacked, None)?;
                assert_eq!(qkv.weight().value().to_vec()?, want.weight().value().to_vec()?);
                let down = TensorParallelRowLinear::<f32>::builder(4, 3).build(group)?;
                checkpoint.load(&down, &[&format!("{layer}.mlp.down_proj")])?;
                let want = TensorParallelRowLinear::<f32>::builder(4, 3).from_full(group, &whole(12, 100), None)?;
                assert_eq!(down.weight().value().to_vec()?, want.weight().value().to_vec()?);
                Ok(())
            })
            .unwrap();
    }
}

/// What does not fit, or lies, is an error, and the old weight stays.
#[test]
fn wrong_weights_are_refused() {
    let folder = Folder::new("wrong");
    let path = folder.0.join("a.safetensors");
    file(&path, &[("a.weight", &[4, 3]), ("a.bias", &[4]), ("cube.weight", &[4, 3, 1]), ("b.weight", &[2, 3])]);
    let good = fs::read(&path).unwrap();
    LocalWorld::new(2)
        .unwrap()
        .run(|group| {
            let layer = TensorParallelColumnLinear::<f32>::builder(3, 4).seed(1).build(group)?;
            let before = layer.weight().value().to_vec()?;
            let checkpoint = Checkpoint::open(&path)?;
            for (names, words) in [
                (&["c"][..], "no tensor c.weight"),
                (&["b"], "2 rows"),
                (&["a", "b"], "6 rows"),
                (&["cube"], "[4, 3, 1]"),
                (&[], "0 rows"),
            ] {
                let text = checkpoint.load(&layer, names).unwrap_err().to_string();
                assert!(text.contains(words), "{names:?}: {text}");
            }
            // The weight could be loaded, the bias is missing: neither is.
            let biased = TensorParallelColumnLinear::<f32>::builder(3, 2).bias(true).seed(1).build(group)?;
            let old = biased.weight().value().to_vec()?;
            checkpoint.load(&biased, &["b"]).unwrap_err();
            assert_eq!(biased.weight().value().to_vec()?, old);
            assert_eq!(layer.weight().value().to_vec()?, before);
            checkpoint.load(&layer, &["a"])?;
            Ok(())
        })
        .unwrap();
    // Every way to cut it off.
    for length in 0..good.len() {
        fs::write(&path, &good[..length]).unwrap();
        assert!(matches!(Checkpoint::open(&path), Err(Error::Checkpoint { .. })), "cut off at {length}");
    }
    let longer = [&good[..], &[0]].concat();
    fs::write(&path, longer).unwrap();
    Checkpoint::open(&path).unwrap_err();
    // An index that leads elsewhere.
    for place in ["../a.safetensors", "/etc/passwd", "", ".", "b.safetensors", "a/b"] {
        fs::write(&path, &good).unwrap();
        let index = serde_json::json!({"weight_map": {"a.weight": place}});
        fs::write(folder.0.join("model.safetensors.index.json"), index.to_string()).unwrap();
        Checkpoint::open(&folder.0).unwrap_err();
    }
    for text in ["", "[]", "{}", "{\"weight_map\": []}", "{\"weight_map\": {\"a.weight\": 3}}"] {
        fs::write(folder.0.join("model.safetensors.index.json"), text).unwrap();
        Checkpoint::open(&folder.0).unwrap_err();
    }
    let index = serde_json::json!({"weight_map": {"not there": "a.safetensors"}});
    fs::write(folder.0.join("model.safetensors.index.json"), index.to_string()).unwrap();
    assert!(Checkpoint::open(&folder.0).unwrap_err().to_string().contains("not there"));
    Checkpoint::open(folder.0.join("nowhere")).unwrap_err();
}

proptest! {
    /// Whatever is in a file: an error, or tensors within it.
    #[test]
    fn hostile_files_are_answered(flips in prop::collection::vec((0usize..200, any::<u8>()), 1..6)) {
        let folder = Folder::new(&format!("hostile-{:?}", std::thread::current().id()));
        let path = folder.0.join("a.safetensors");
        file(&path, &[("a.weight", &[4, 3]), ("b.weight", &[2, 3])]);
        let mut data = fs::read(&path).unwrap();
        for (at, value) in flips {
            let at = at % data.len();
            data[at] = value;
        }
        fs::write(&path, data).unwrap();
        LocalWorld::new(1).unwrap().run(|group| {
            let layer = TensorParallelColumnLinear::<f32>::builder(3, 4).build(group)?;
            if let Ok(checkpoint) = Checkpoint::open(&path) {
                let _ = checkpoint.load(&layer, &["a"]);
            }
            Ok(())
        }).unwrap();
    }
}

#[test]
fn a_rank_that_cannot_save_is_an_error_on_all_and_the_old_one_stays() {
    let folder = Folder::new("cannot");
    let place = folder.0.join("here");
    LocalWorld::new(2)
        .unwrap()
        .run(|group| {
            save_checkpoint(&place, group, &Model::<f32>::new(group, 3)?.named())?;
            group.barrier()?;
            // The same name twice; then a folder that is a file.
            let model = Model::<f32>::new(group, 4)?;
            let twice: [(&str, &dyn Checkpointed); 2] = [("a", &model.qkv), ("a", &model.qkv)];
            assert!(matches!(save_checkpoint(&place, group, &twice), Err(Error::Argument { .. })));
            if group.rank() == 0 {
                fs::write(folder.0.join("file"), "").unwrap();
            }
            group.barrier()?;
            let error = save_checkpoint(folder.0.join("file"), group, &model.named()).unwrap_err().to_string();
            assert!(error.contains("file"), "{error}");
            model.load(&Checkpoint::open(&place)?)?;
            assert_eq!(model.values()?, Model::<f32>::new(group, 3)?.values()?);
            Ok(())
        })
        .unwrap();
}

/// Saves one seed after the other, for ever.
#[test]
#[ignore = "a process of the other tests"]
fn child() {
    let Ok(folder) = std::env::var("ATP_FOLDER") else { return };
    let first: u64 = std::env::var("ATP_SEED").unwrap().parse().unwrap();
    for seed in first.. {
        LocalWorld::new(2)
            .unwrap()
            .run(|group| save_checkpoint(&folder, group, &Model::<f32>::new(group, 10 * seed)?.named()))
            .unwrap();
    }
}

/// Killed 50 times while saving: what is there is always one of the checkpoints, whole.
#[test]
fn who_is_killed_while_saving_leaves_a_whole_checkpoint() {
    let folder = Folder::new("killed");
    let model = |seed| {
        let values = LocalWorld::new(1).unwrap().run(|group| Model::<f32>::new(group, seed)?.values());
        values.unwrap().swap_remove(0)
    };
    LocalWorld::new(1)
        .unwrap()
        .run(|group| save_checkpoint(&folder.0, group, &Model::<f32>::new(group, 0)?.named()))
        .unwrap();
    let mut seen = std::collections::BTreeSet::new();
    for round in 0..50u64 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "child"])
            .env("ATP_FOLDER", &folder.0)
            .env("ATP_SEED", (1000 * round + 1).to_string())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        // Once it has saved, at any moment.
        let index = || fs::read(folder.0.join("model.safetensors.index.json")).unwrap();
        let (before, begun) = (index(), Instant::now());
        while index() == before && begun.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(round * 1_733 % 20_000));
        child.kill().unwrap();
        child.wait().unwrap();
        let loaded = LocalWorld::new(1).unwrap().run(|group| {
            let loaded = Model::<f32>::new(group, 99)?;
            loaded.load(&Checkpoint::open(&folder.0)?)?;
            loaded.values()
        });
        let loaded = loaded.unwrap_or_else(|error| panic!("round {round}: {error}")).swap_remove(0);
        // The norm's first value is the seed.
        let seed = loaded[loaded.len() - 5] as u64;
        assert_eq!(loaded, model(seed), "round {round}");
        seen.insert(seed);
    }
    assert_eq!(seen.len(), 50, "each had saved: {seen:?}");
    // What the killed have left does not pile up.
    LocalWorld::new(1)
        .unwrap()
        .run(|group| save_checkpoint(&folder.0, group, &Model::<f32>::new(group, 0)?.named()))
        .unwrap();
    assert_eq!(files(&folder.0).len(), 2, "{:?}", files(&folder.0));
}

fn files(folder: &std::path::Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Files that only look like ours stay; a failed save leaves none of its own.
#[test]
fn other_files_stay_and_failed_saves_leave_nothing() {
    let folder = Folder::new("others");
    let others = [
        "model-2-lora.safetensors",
        "model-00001-of-00002.safetensors",
        "model-00001-of-00002.fp16.safetensors",
        "model-7-00001-of-00001.safetensors.txt",
        "model-x-00001-of-00001.safetensors",
    ];
    others.iter().for_each(|name| fs::write(folder.0.join(name), "mine").unwrap());
    fs::create_dir(folder.0.join("model-1-00001-of-00001.safetensors")).unwrap();
    LocalWorld::new(2)
        .unwrap()
        .run(|group| {
            for seed in [0, 10] {
                save_checkpoint(&folder.0, group, &Model::<f32>::new(group, seed)?.named())?;
            }
            let before = group.rank() == 0;
            // On every rank the old save's files are gone when the new one is done.
            let names = files(&folder.0);
            assert_eq!(names.iter().filter(|name| name.ends_with("-of-00001.safetensors")).count(), 3, "{names:?}");
            group.barrier()?;
            assert!(others.iter().all(|name| names.contains(&(*name).to_string())), "{names:?}");
            // A folder where the index's successor should go: the last step fails, on all ranks.
            if before {
                fs::create_dir(folder.0.join("model.safetensors.index.json.partial")).unwrap();
            }
            group.barrier()?;
            assert!(save_checkpoint(&folder.0, group, &Model::<f32>::new(group, 20)?.named()).is_err());
            group.barrier()?;
            if before {
                fs::remove_dir(folder.0.join("model.safetensors.index.json.partial")).unwrap();
            }
            group.barrier()?;
            assert_eq!(files(&folder.0), names);
            let model = Model::<f32>::new(group, 30)?;
            model.load(&Checkpoint::open(&folder.0)?)?;
            assert_eq!(model.values()?, Model::<f32>::new(group, 10)?.values()?);
            Ok(())
        })
        .unwrap();
}

/// Ranks that save other things, or not all of them, are told before anything is written.
#[test]
fn ranks_that_do_not_belong_together_are_refused() {
    let folder = Folder::new("apart");
    LocalWorld::new(4)
        .unwrap()
        .run(|world| {
            let tp = world.split(Some(world.rank() / 2), 0)?.expect("a pair");
            let column = TensorParallelColumnLinear::<f32>::builder(4, 4).build(&tp)?;
            // All four hold it twice.
            let error = save_checkpoint(&folder.0, world, &[("a", &column)]).unwrap_err().to_string();
            assert!(error.contains("a.weight hold 32 of its 16"), "{error}");
            // One of each pair holds half.
            let across = world.split(Some(world.rank() % 2), 0)?.expect("a pair");
            let halves = TensorParallelColumnLinear::<f32>::builder(4, 8).build(world)?;
            let error = save_checkpoint(&folder.0, &across, &[("a", &halves)]).unwrap_err().to_string();
            assert!(error.contains("hold 16 of its 32"), "{error}");
            // Each its own.
            let name = ["a", "b", "a", "a"][world.rank()];
            let whole = TensorParallelColumnLinear::<f32>::builder(4, 4).build(world)?;
            assert!(matches!(save_checkpoint(&folder.0, world, &[(name, &whole)]), Err(Error::Checkpoint { .. })));
            let rows = Mutex::new(world.tensor(&[1f32], &[1], Placement::Rows)?);
            assert!(matches!(save_checkpoint(&folder.0, world, &[("a", &rows)]), Err(Error::Placement { .. })));
            save_checkpoint(&folder.0, world, &[("a", &whole)])
        })
        .unwrap();
    assert_eq!(files(&folder.0).len(), 2);
}

#[cfg(unix)]
#[test]
fn what_is_no_file_is_refused() {
    let folder = Folder::new("special");
    for path in ["/dev/zero", "/dev/null", "/"] {
        assert!(Checkpoint::open(path).is_err(), "{path}");
    }
    std::os::unix::fs::symlink("/dev/zero", folder.0.join("model.safetensors.index.json")).unwrap();
    assert!(Checkpoint::open(&folder.0).unwrap_err().to_string().contains("not a file"));
}

/// Layers made from a checkpoint are those loaded from it.
#[test]
fn layers_are_made_from_a_checkpoint() {
    let folder = Folder::new("made");
    for n in [1, 2, 3] {
        LocalWorld::new(n)
            .unwrap()
            .run(|group| {
                let saved = Model::<f32>::new(group, 3)?;
                save_checkpoint(folder.0.join(n.to_string()), group, &saved.named())?;
                let checkpoint = Checkpoint::open(folder.0.join(n.to_string()))?;
                let column = TensorParallelColumnLinear::<f32>::builder(5, 24).bias(true);
                let row = TensorParallelRowLinear::<f32>::builder(12, 5).bias(true);
                let made = Model {
                    qkv: column.contiguous_chunks(&[12, 6, 6]).from_checkpoint(group, &checkpoint, &["qkv"])?,
                    down: row.from_checkpoint(group, &checkpoint, &["down"])?,
                    embedding: TensorParallelEmbedding::builder(7, 5).from_checkpoint(
                        group,
                        &checkpoint,
                        "embedding",
                    )?,
                    norm: Mutex::new(saved.norm.lock().unwrap().clone()),
                };
                assert_eq!(made.values()?, saved.values()?, "{n}");
                let column = TensorParallelColumnLinear::<f32>::builder(5, 24);
                assert!(column.from_checkpoint(group, &checkpoint, &["down"]).is_err());
                Ok(())
            })
            .unwrap();
    }
}
