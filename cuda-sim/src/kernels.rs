//! The kernels of `kernels/*.cu`, compiled for the host by `shim/kernels.cpp`; and what each of them touches.

use crate::races::{reads, writes, Access};
use std::ffi::{c_char, c_void, CStr};

/// As `Entry` of `shim/kernels.cpp`.
#[repr(C)]
pub struct Kernel {
    name: *const c_char,
    sizes: *const u32,
    parameters: u32,
    launch: extern "C" fn(*mut *mut c_void, u32, u32),
}

// A kernel's entry is written by nobody.
unsafe impl Sync for Kernel {}

extern "C" {
    fn cuda_sim_kernels(count: *mut usize) -> *const Kernel;
}

fn all() -> &'static [Kernel] {
    let mut count = 0;
    unsafe {
        let first = cuda_sim_kernels(&mut count);
        std::slice::from_raw_parts(first, count)
    }
}

/// The kernel of that name.
pub fn find(name: &str) -> Option<&'static Kernel> {
    all().iter().find(|kernel| kernel.name() == name)
}

impl Kernel {
    fn name(&self) -> &'static str {
        unsafe { CStr::from_ptr(self.name) }.to_str().expect("kernels are named in ASCII")
    }

    fn sizes(&self) -> &'static [u32] {
        unsafe { std::slice::from_raw_parts(self.sizes, self.parameters as usize) }
    }

    /// Runs the kernel over a grid of blocks; its arguments come as bytes.
    pub fn run(&self, arguments: &[Vec<u8>], grid: u32, block: u32) {
        // In words, so that each is aligned for what it holds.
        let mut words: Vec<Vec<u64>> = arguments
            .iter()
            .map(|bytes| {
                let padded = bytes.chunks(8).map(|chunk| {
                    let mut word = [0; 8];
                    word[..chunk.len()].copy_from_slice(chunk);
                    u64::from_ne_bytes(word)
                });
                padded.collect()
            })
            .collect();
        let mut pointers: Vec<*mut c_void> = words.iter_mut().map(|words| words.as_mut_ptr().cast()).collect();
        (self.launch)(pointers.as_mut_ptr(), grid, block)
    }

    /// What a launch reads and writes.
    pub fn touches(&self, arguments: &[Vec<u8>]) -> Vec<Access> {
        let name = self.name();
        let a = Arguments(arguments);
        let base = BASES.iter().find(|base| name.strip_prefix(**base).is_some_and(|rest| rest.starts_with('_')));
        let base = *base.unwrap_or_else(|| panic!("cuda-sim: kernel {name}: what does it touch? see kernels.rs"));
        let mut dtypes = name[base.len() + 1..].split('_').map(|dtype| match dtype {
            "f64" | "i64" => 8,
            "f32" => 4,
            _ => 2,
        });
        let from: usize = dtypes.next().expect("a kernel's name ends in its dtype");
        let (to, wide) = (dtypes.next().unwrap_or(from), from.max(4));
        match base {
            "combine" => {
                let bytes = a.len(2) * from;
                let mut touched: Vec<Access> = (0..a.len(1)).map(|rank| reads(a.word(0, rank), bytes)).collect();
                touched.push(writes(a.at(4), bytes));
                touched
            }
            "add_bias" => vec![reads(a.at(0), a.len(1) * from), writes(a.at(2), a.len(3) * from)],
            "add_column_sums" => {
                vec![reads(a.at(0), a.len(1) * a.len(2) * from), writes(a.at(3), a.len(2) * wide)]
            }
            "scaled_add" => vec![reads(a.at(1), a.len(3) * from), writes(a.at(2), a.len(3) * to)],
            "cast" => vec![reads(a.at(0), a.len(2) * from), writes(a.at(1), a.len(2) * to)],
            "find_outside" => vec![reads(a.at(0), a.len(1) * 8), writes(a.at(5), 8)],
            "gather_rows" => vec![
                reads(a.at(0), a.len(1) * a.len(2) * from),
                reads(a.at(3), a.len(4) * 8),
                writes(a.at(6), a.len(4) * a.len(2) * from),
            ],
            "scatter_add_rows" => vec![
                reads(a.at(0), a.len(1) * a.len(3) * from),
                reads(a.at(2), a.len(3) * 8),
                writes(a.at(6), a.len(7) * a.len(1) * wide),
            ],
            "row_max" => {
                vec![reads(a.at(0), a.len(1) * a.len(2) * from), writes(a.at(4), a.len(1) * wide)]
            }
            "softmax_sums" => {
                let mut touched = a.part(from);
                touched.push(writes(a.at(1), 3 * a.word(0, 1) * wide));
                touched
            }
            "cross_entropy_loss" => vec![
                reads(a.at(1), a.len(4) * 8),
                reads(a.at(2), a.len(4) * wide),
                reads(a.at(3), 3 * a.len(4) * wide),
                writes(a.at(5), a.len(4) * wide),
            ],
            _ => {
                let (mut touched, rows) = (a.part(from), a.word(0, 1));
                touched.push(reads(a.at(2), 3 * rows * wide));
                touched.push(reads(a.at(3), rows * wide));
                touched.push(writes(a.at(4), rows * a.word(0, 2) * from));
                touched
            }
        }
    }
}

const BASES: [&str; 12] = [
    "combine",
    "add_bias",
    "add_column_sums",
    "scaled_add",
    "cast",
    "find_outside",
    "gather_rows",
    "scatter_add_rows",
    "row_max",
    "softmax_sums",
    "cross_entropy_loss",
    "cross_entropy_grad",
];

/// A launch's arguments.
struct Arguments<'a>(&'a [Vec<u8>]);
impl Arguments<'_> {
    /// The `index`-th word of one.
    fn word(&self, argument: usize, index: usize) -> usize {
        let bytes = &self.0[argument][8 * index..8 * index + 8];
        u64::from_le_bytes(bytes.try_into().expect("eight bytes")) as usize
    }
    /// One that is an address.
    fn at(&self, argument: usize) -> usize {
        self.word(argument, 0)
    }
    /// One that is a count.
    fn len(&self, argument: usize) -> usize {
        self.word(argument, 0)
    }
    /// The `Part` that comes first: logits, targets, maxima.
    fn part(&self, size: usize) -> Vec<Access> {
        let [logits, rows, width] = [0, 1, 2].map(|index| self.word(0, index));
        vec![
            reads(logits, rows * width * size),
            reads(self.word(0, 5), rows * 8),
            reads(self.word(0, 6), rows * size.max(4)),
        ]
    }
}

/// PTX-like text that declares the kernels, if a source is theirs.
pub fn declare(source: &str) -> String {
    let known =
        all().iter().filter(|kernel| BASES.iter().any(|base| kernel.name().starts_with(base) && source.contains(base)));
    known
        .map(|kernel| {
            let parameters: Vec<String> =
                kernel.sizes().iter().map(|size| format!(".param .align 8 .b8 p[{size}]")).collect();
            format!(".visible .entry {}(\n{}\n)\n{{ }}\n", kernel.name(), parameters.join(",\n"))
        })
        .collect()
}
