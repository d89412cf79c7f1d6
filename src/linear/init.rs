//! Initial weights: random numbers that depend on the seed and the element's place in the full matrix alone, so that
//! every rank can draw just its own shard and still every world size starts from the same matrix.

use crate::dtype::Float;

/// The `index`-th number of the stream `seed`, uniform in ±1/√fan_in.
///
/// The generator is SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014), entered
/// at position `index`.
pub(crate) fn uniform<T: Float>(seed: u64, index: usize, fan_in: usize) -> T {
    let mixed = mix(mix(seed).wrapping_add((index as u64).wrapping_mul(GAMMA)));
    // 53 bits to [0, 1), then to [-1, 1).
    let unit = (mixed >> 11) as f64 / (1u64 << 53) as f64;
    T::from_f64((2.0 * unit - 1.0) / (fan_in as f64).sqrt())
}

const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

fn mix(seed: u64) -> u64 {
    let z = seed.wrapping_add(GAMMA);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_uniform_and_differ_between_seeds() {
        let numbers: Vec<f64> = (0..10_000).map(|index| uniform(7, index, 4)).collect();
        let mean = numbers.iter().sum::<f64>() / 1e4;
        let square = numbers.iter().map(|x| x * x).sum::<f64>() / 1e4;
        assert!(numbers.iter().all(|x| (-0.5..0.5).contains(x)));
        // Uniform in ±1/2: mean 0, variance 1/12.
        assert!(mean.abs() < 0.01 && (square - 1.0 / 12.0).abs() < 0.002, "{mean} {square}");
        assert!((0..100).all(|index| uniform::<f64>(1, index, 4) != uniform::<f64>(2, index, 4)));
    }
}
