//! The example `parity` as its users run it: right and wrong cases, and files that are broken or hostile.

#![allow(missing_docs)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use safetensors::Dtype;
use safetensors::tensor::TensorView;

/// The tool, built in the tests' own profile. `cargo test` builds the examples, but a run of this test alone does not.
fn tool() -> &'static Path {
    static TOOL: OnceLock<PathBuf> = OnceLock::new();
    TOOL.get_or_init(|| {
        let test = std::env::current_exe().unwrap();
        let profile = test.parent().and_then(Path::parent).unwrap();
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--example", "parity", "--manifest-path"]);
        cargo.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
        if profile.ends_with("release") {
            cargo.arg("--release");
        }
        assert!(cargo.status().unwrap().success());
        profile.join("examples").join("parity")
    })
}

fn run(arguments: &[&Path]) -> Output {
    let tool = tool();
    let begun = Instant::now();
    let output = Command::new(tool).args(arguments).output().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(20), "{arguments:?} took {:?}", begun.elapsed());
    output
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("atp-parity-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.0.join(format!("{name}.safetensors"));
        std::fs::write(&path, content).unwrap();
        path
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

type Tensors = Vec<(&'static str, Vec<usize>, Vec<f32>)>;

/// W = [[1, 2], [3, 4]] over two ranks, X = [[1, 0], [0, 1]] by rows, dY = ones.
fn column_case() -> (HashMap<String, String>, Tensors) {
    let metadata = [
        ("layer", "column_linear"),
        ("mode", "reduce_scatter"),
        ("world_size", "2"),
        ("async_communication", "true"),
        ("recompute_all_gather", "true"),
        ("dtype", "float32"),
    ];
    let tensors = vec![
        ("rank0.input", vec![1, 2], vec![1.0, 0.0]),
        ("rank1.input", vec![1, 2], vec![0.0, 1.0]),
        ("rank0.weight", vec![1, 2], vec![1.0, 2.0]),
        ("rank1.weight", vec![1, 2], vec![3.0, 4.0]),
        ("rank0.grad_output", vec![2, 1], vec![1.0, 1.0]),
        ("rank1.grad_output", vec![2, 1], vec![1.0, 1.0]),
        ("rank0.output", vec![2, 1], vec![1.0, 2.0]),
        ("rank1.output", vec![2, 1], vec![3.0, 4.0]),
        ("rank0.grad_input", vec![1, 2], vec![4.0, 6.0]),
        ("rank1.grad_input", vec![1, 2], vec![4.0, 6.0]),
        ("rank0.grad_weight", vec![1, 2], vec![1.0, 1.0]),
        ("rank1.grad_weight", vec![1, 2], vec![1.0, 1.0]),
    ];
    (metadata.map(|(key, value)| (key.to_string(), value.to_string())).into(), tensors)
}

fn serialize(metadata: &HashMap<String, String>, tensors: &Tensors) -> Vec<u8> {
    let bytes: Vec<Vec<u8>> =
        tensors.iter().map(|(.., values)| values.iter().flat_map(|value| value.to_le_bytes()).collect()).collect();
    let views = tensors
        .iter()
        .zip(&bytes)
        .map(|((name, shape, _), bytes)| (*name, TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap()));
    safetensors::serialize(views, Some(metadata.clone())).unwrap()
}

#[test]
fn a_right_case_passes_and_a_wrong_value_fails_by_name() {
    let directory = Directory::new("values");
    let (metadata, mut tensors) = column_case();
    let right = directory.file("right", &serialize(&metadata, &tensors));
    let output = run(&[&right]);
    assert!(output.status.success(), "{}", text(&output));
    assert!(text(&output).trim_end().ends_with("1 passed, 0 failed"), "{}", text(&output));
    for index in 6..tensors.len() {
        let before = tensors[index].2[0];
        for wrong in [before + 0.01, f32::NAN, f32::INFINITY] {
            tensors[index].2[0] = wrong;
            let output = run(&[&directory.file("wrong", &serialize(&metadata, &tensors))]);
            assert_eq!(output.status.code(), Some(1), "{} = {wrong}: {}", tensors[index].0, text(&output));
            let (_, name) = tensors[index].0.split_once('.').unwrap();
            assert!(text(&output).contains(name) && text(&output).contains("0 passed, 1 failed"), "{}", text(&output));
        }
        tensors[index].2[0] = before;
    }
    // A directory with both.
    let output = run(&[&directory.0]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).contains("1 passed, 1 failed"), "{}", text(&output));
}

#[test]
fn a_layer_that_is_not_known_is_skipped_by_name() {
    let directory = Directory::new("unknown");
    let (mut metadata, tensors) = column_case();
    let right = directory.file("right", &serialize(&metadata, &tensors));
    metadata.insert("layer".into(), "mixture_of_experts".into());
    let unknown = directory.file("unknown", &serialize(&metadata, &tensors));
    let output = run(&[&right, &unknown]);
    assert!(
        text(&output).contains("unknown: skipped") && text(&output).contains("1 passed, 0 failed"),
        "{}",
        text(&output)
    );
}

#[test]
fn broken_and_hostile_files_are_errors() {
    let directory = Directory::new("broken");
    let (metadata, tensors) = column_case();
    let whole = serialize(&metadata, &tensors);
    let header_length = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let with = |key: &str, value: Option<&str>| {
        let mut metadata = metadata.clone();
        match value {
            Some(value) => metadata.insert(key.into(), value.into()),
            None => metadata.remove(key),
        };
        serialize(&metadata, &tensors)
    };
    let header = |json: &str| [&(json.len() as u64).to_le_bytes(), json.as_bytes(), &[0; 64]].concat();
    let mut without = tensors.clone();
    without.remove(8);
    let mut misshapen = tensors.clone();
    misshapen[2] = ("rank0.weight", vec![2, 1], vec![1.0, 2.0]);
    let mut ragged = tensors.clone();
    ragged[0] = ("rank0.input", vec![2, 2], vec![1.0; 4]);
    let mut bytes = whole.clone();
    bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("empty", Vec::new()),
        ("seven bytes", vec![0; 7]),
        ("no header", vec![0; 8]),
        ("huge header", bytes),
        ("header of 2^40 bytes", [&(1u64 << 40).to_le_bytes()[..], b"{}"].concat()),
        ("cut within the header", whole[..8 + header_length / 2].to_vec()),
        ("cut within the data", whole[..whole.len() - 3].to_vec()),
        ("data too long", [&whole[..], &[0; 5]].concat()),
        ("not json", header("{\"a\": ")),
        ("not an object", header("[1, 2, 3]")),
        (
            "overlapping",
            header(
                r#"{"__metadata__":{"layer":"column_linear"},"rank0.input":{"dtype":"F32","shape":[8],"data_offsets":[0,32]},"rank1.input":{"dtype":"F32","shape":[8],"data_offsets":[16,48]}}"#,
            ),
        ),
        ("offsets backwards", header(r#"{"rank0.input":{"dtype":"F32","shape":[8],"data_offsets":[32,0]}}"#)),
        ("offsets beyond the end", header(r#"{"rank0.input":{"dtype":"F32","shape":[99],"data_offsets":[0,396]}}"#)),
        (
            "shape that overflows",
            header(r#"{"rank0.input":{"dtype":"F32","shape":[18446744073709551615,2],"data_offsets":[0,64]}}"#),
        ),
        ("no metadata", header(r#"{"rank0.input":{"dtype":"F32","shape":[16],"data_offsets":[0,64]}}"#)),
        ("no layer", with("layer", None)),
        ("no mode", with("mode", None)),
        ("no world size", with("world_size", None)),
        ("no dtype", with("dtype", None)),
        ("mode unknown", with("mode", Some("all_gather"))),
        ("world size 0", with("world_size", Some("0"))),
        ("world size -1", with("world_size", Some("-1"))),
        ("world size 3", with("world_size", Some("3"))),
        ("world size 10^9", with("world_size", Some("1000000000"))),
        ("world size 10^30", with("world_size", Some("1000000000000000000000000000000"))),
        ("dtype unknown", with("dtype", Some("float8"))),
        ("dtype that the tensors have not", with("dtype", Some("bfloat16"))),
        ("recompute unknown", with("recompute_all_gather", Some("maybe"))),
        ("a tensor missing", serialize(&metadata, &without)),
        ("a weight that does not fit", serialize(&metadata, &misshapen)),
        ("ranks that differ", serialize(&metadata, &ragged)),
    ];
    for (name, content) in cases {
        let output = run(&[&directory.file("case", &content)]);
        let said = text(&output);
        assert_eq!(output.status.code(), Some(1), "{name}: {said}");
        assert!(said.contains("case") && said.contains("0 passed, 1 failed"), "{name}: {said}");
        assert!(!said.contains("panicked"), "{name}: {said}");
    }
}

#[test]
fn paths_and_flags_that_are_wrong_are_errors() {
    let directory = Directory::new("paths");
    let missing = directory.0.join("missing.safetensors");
    let said = |output: &Output| {
        assert!(!text(output).contains("panicked"), "{}", text(output));
        text(output)
    };
    let output = run(&[&missing]);
    assert!(!output.status.success() && said(&output).contains("missing.safetensors"));
    // Nothing to run is not a success.
    let output = run(&[&directory.0]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let output = run(&[]);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    let right = directory.file("right", &serialize(&column_case().0, &column_case().1));
    let output = run(&[&right, Path::new("--overlap"), Path::new("sideways")]);
    assert_eq!(output.status.code(), Some(2));
    assert!(said(&output).contains("sideways"));
    let output = run(&[&right, Path::new("--overlap"), Path::new("pipelined:2")]);
    assert!(output.status.success(), "{}", said(&output));
}
