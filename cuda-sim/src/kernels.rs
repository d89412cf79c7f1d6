//! Bodies of the kernels of `kernels/*.cu`, in Rust: what they compute, not how.
//!
//! They prove how kernels are launched (names, arguments, order on streams), not the CUDA sources: those are compiled by NVRTC
//! for real cards in CI.

use half::{bf16, f16};

/// A kernel's arguments, as bytes.
type Body = Box<dyn Fn(&[Vec<u8>]) + Send + Sync>;

trait Number: Copy {
    fn get(self) -> f64;
    fn put(value: f64) -> Self;
    /// Rounds to the accumulator's type.
    fn accumulate(value: f64) -> f64 {
        f64::from(value as f32)
    }
}
impl Number for f32 {
    fn get(self) -> f64 {
        self.into()
    }
    fn put(value: f64) -> Self {
        value as f32
    }
}
impl Number for f64 {
    fn get(self) -> f64 {
        self
    }
    fn put(value: f64) -> Self {
        value
    }
    fn accumulate(value: f64) -> f64 {
        value
    }
}
impl Number for bf16 {
    fn get(self) -> f64 {
        self.to_f64()
    }
    fn put(value: f64) -> Self {
        bf16::from_f32(value as f32)
    }
}
impl Number for f16 {
    fn get(self) -> f64 {
        self.to_f64()
    }
    fn put(value: f64) -> Self {
        f16::from_f32(value as f32)
    }
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"))
}

unsafe fn at<'a, T>(argument: &[u8], count: usize) -> &'a [T] {
    if count == 0 {
        &[]
    } else {
        std::slice::from_raw_parts(word(argument) as *const T, count)
    }
}

unsafe fn at_mut<'a, T>(argument: &[u8], count: usize) -> &'a mut [T] {
    if count == 0 {
        &mut []
    } else {
        std::slice::from_raw_parts_mut(word(argument) as *mut T, count)
    }
}

fn combine<T: Number>(a: &[Vec<u8>]) {
    let (ranks, count) = (word(&a[1]) as usize, word(&a[2]) as usize);
    let largest = i32::from_le_bytes(a[3][..4].try_into().expect("four bytes")) != 0;
    unsafe {
        let parts: Vec<&[T]> = at::<u64>(&a[0], ranks).iter().map(|part| at(&part.to_le_bytes(), count)).collect();
        for (i, out) in at_mut::<T>(&a[4], count).iter_mut().enumerate() {
            let mut value = parts[0][i].get();
            for part in &parts[1..] {
                let next = part[i].get();
                if !largest {
                    value = T::accumulate(value + next);
                } else if next > value || next.is_nan() {
                    value = next;
                }
            }
            *out = T::put(value);
        }
    }
}

fn add_bias<T: Number>(a: &[Vec<u8>]) {
    let (width, count) = (word(&a[1]) as usize, word(&a[3]) as usize);
    unsafe {
        let bias = at::<T>(&a[0], width);
        for (i, row) in at_mut::<T>(&a[2], count).iter_mut().enumerate() {
            *row = T::put(row.get() + bias[i % width].get());
        }
    }
}

fn add_column_sums<T: Number, W: Number>(a: &[Vec<u8>]) {
    let (height, width) = (word(&a[1]) as usize, word(&a[2]) as usize);
    unsafe {
        let rows = at::<T>(&a[0], height * width);
        for (c, out) in at_mut::<W>(&a[3], width).iter_mut().enumerate() {
            let sum = (0..height).fold(0.0, |sum, r| T::accumulate(sum + rows[r * width + c].get()));
            *out = W::put(out.get() + sum);
        }
    }
}

fn scaled_add<S: Number, T: Number>(a: &[Vec<u8>]) {
    let (factor, count) = (f64::from_bits(word(&a[0])), word(&a[3]) as usize);
    unsafe {
        for (target, source) in at_mut::<T>(&a[2], count).iter_mut().zip(at::<S>(&a[1], count)) {
            *target = T::put(target.get() + factor * source.get());
        }
    }
}

fn cast<S: Number, T: Number>(a: &[Vec<u8>]) {
    let count = word(&a[2]) as usize;
    unsafe {
        for (target, source) in at_mut::<T>(&a[1], count).iter_mut().zip(at::<S>(&a[0], count)) {
            *target = T::put(source.get());
        }
    }
}

/// The kernels by name, with the PTX types of their parameters.
fn all() -> Vec<(String, &'static [&'static str], Body)> {
    let mut kernels: Vec<(String, &'static [&'static str], Body)> = Vec::new();
    macro_rules! from {
        ($from:literal, $s:ty, $wide:ty) => {
            kernels.push((format!("combine_{}", $from), &["u64", "u64", "u64", "u32", "u64"], Box::new(combine::<$s>)));
            kernels.push((format!("add_bias_{}", $from), &["u64"; 4], Box::new(add_bias::<$s>)));
            kernels.push((
                format!("add_column_sums_{}", $from),
                &["u64"; 4],
                Box::new(add_column_sums::<$s, $wide>),
            ));
            from!(@to $from, $s, "f32", f32);
            from!(@to $from, $s, "f64", f64);
            from!(@to $from, $s, "bf16", bf16);
            from!(@to $from, $s, "f16", f16);
        };
        (@to $from:literal, $s:ty, $to:literal, $t:ty) => {
            kernels.push((format!("scaled_add_{}_{}", $from, $to), &["f64", "u64", "u64", "u64"], Box::new(scaled_add::<$s, $t>)));
            kernels.push((format!("cast_{}_{}", $from, $to), &["u64"; 3], Box::new(cast::<$s, $t>)));
        };
    }
    from!("f32", f32, f32);
    from!("f64", f64, f64);
    from!("bf16", bf16, f32);
    from!("f16", f16, f32);
    kernels
}

/// The body of a kernel.
pub fn find(name: &str) -> Option<Body> {
    all().into_iter().find(|(known, ..)| known == name).map(|(.., body)| body)
}

/// PTX-like text that declares those kernels whose base names a source defines.
pub fn declare(source: &str) -> String {
    let bases = ["combine", "add_bias", "add_column_sums", "scaled_add", "cast"];
    let known = all()
        .into_iter()
        .filter(|(name, ..)| bases.iter().any(|base| name.starts_with(base) && source.contains(&format!("{base}_##"))));
    known
        .map(|(name, parameters, _)| {
            let parameters: Vec<String> = parameters.iter().map(|kind| format!(".param .{kind} p")).collect();
            format!(".visible .entry {name}(\n{}\n)\n{{ }}\n", parameters.join(",\n"))
        })
        .collect()
}
