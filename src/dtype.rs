//! Element types: what a tensor may hold, and which of them are numbers a layer computes with.

use half::{bf16, f16};

/// The type of a tensor's elements, as a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// IEEE 754 single precision.
    F32,
    /// IEEE 754 double precision.
    F64,
    /// bfloat16: 8 exponent bits, 7 mantissa bits.
    BF16,
    /// IEEE 754 half precision.
    F16,
    /// 64-bit signed integers: token ids.
    I64,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F64 | DType::I64 => 8,
            DType::BF16 | DType::F16 => 2,
        }
    }

    /// The dtype in which sums of this one are formed: f64 for f64, f32 for every other float.
    pub const fn accumulator(self) -> DType {
        match self {
            DType::F64 => DType::F64,
            DType::I64 => DType::I64,
            _ => DType::F32,
        }
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A type that tensors can hold. Sealed: [`f32`], [`f64`], [`bf16`], [`struct@f16`], [`i64`].
pub trait Element: sealed::Sealed + bytemuck::Pod + Send + Sync + PartialEq + std::fmt::Debug {
    /// The type as a value.
    const DTYPE: DType;
}

/// A floating-point [`Element`], which layers compute with.
pub trait Float: Element {
    /// The type in which gradients and sums accumulate: `f64` for `f64`, `f32` for the others ("main grad").
    type Accumulator: Float;

    /// The nearest value of this type.
    fn from_f64(value: f64) -> Self;

    /// The same value in double precision.
    fn to_f64(self) -> f64;
}

macro_rules! elements {
    ($($type:ty => $dtype:ident),*) => {$(
        impl sealed::Sealed for $type {}
        impl Element for $type { const DTYPE: DType = DType::$dtype; }
    )*};
}
elements!(f32 => F32, f64 => F64, bf16 => BF16, f16 => F16, i64 => I64);

impl Float for f32 {
    type Accumulator = f32;
    fn from_f64(value: f64) -> Self {
        value as f32
    }
    fn to_f64(self) -> f64 {
        self.into()
    }
}

impl Float for f64 {
    type Accumulator = f64;
    fn from_f64(value: f64) -> Self {
        value
    }
    fn to_f64(self) -> f64 {
        self
    }
}

/// The value in f32, or else the one of its two neighbours that is odd: rounding that to a type with fewer bits gives what rounding
/// the value would (Boldo and Melquiond 2008).
fn to_odd_f32(value: f64) -> f32 {
    let near = value as f32;
    if f64::from(near) == value || value.is_nan() {
        return near;
    }
    // The neighbour towards zero, and its last bit set.
    let beyond = u32::from(f64::from(near).abs() > value.abs());
    f32::from_bits((near.to_bits() - beyond) | 1)
}

macro_rules! halves {
    ($($type:ty),*) => {$(
        impl Float for $type {
            type Accumulator = f32;
            fn from_f64(value: f64) -> Self {
                // Not the type's own `from_f64`: it rounds twice, or drops bits before it rounds.
                <$type>::from_f32(to_odd_f32(value))
            }
            fn to_f64(self) -> f64 {
                <$type>::to_f64(self)
            }
        }
    )*};
}
halves!(bf16, f16);

#[cfg(test)]
mod tests {
    use super::*;

    /// Both neighbours of the value in the type, by trying all bit patterns around what f32 says.
    fn nearest<T: Float>(value: f64, of_bits: impl Fn(u16) -> T, bits: u16) -> Vec<f64> {
        let around = (bits.saturating_sub(2)..=bits.saturating_add(2)).map(|bits| of_bits(bits).to_f64());
        let finite: Vec<f64> = around.filter(|candidate| candidate.is_finite()).collect();
        let least = finite.iter().map(|candidate| (candidate - value).abs()).fold(f64::INFINITY, f64::min);
        finite.into_iter().filter(|candidate| (candidate - value).abs() == least).collect()
    }

    #[test]
    fn half_types_are_rounded_once() {
        assert_eq!(<bf16 as Float>::from_f64(1.0 + 2f64.powi(-8) + 2f64.powi(-23)).to_f64(), 1.0078125);
        assert_eq!(<f16 as Float>::from_f64(1.0 + 2f64.powi(-11) + 2f64.powi(-40)).to_f64(), 1.0 + 2f64.powi(-10));
        // Ties go to even, and what is too large is infinite.
        assert_eq!(<bf16 as Float>::from_f64(1.0 + 2f64.powi(-8)).to_f64(), 1.0);
        assert_eq!(<f16 as Float>::from_f64(-(1.0 + 3.0 * 2f64.powi(-11))).to_f64(), -(1.0 + 2f64.powi(-9)));
        assert_eq!(<f16 as Float>::from_f64(1e300), f16::INFINITY);
        assert_eq!(<bf16 as Float>::from_f64(-1e300), bf16::NEG_INFINITY);
        assert!(<bf16 as Float>::from_f64(f64::NAN).is_nan());
        assert_eq!(<f16 as Float>::from_f64(1e-300).to_bits(), 0);
        assert_eq!(<f16 as Float>::from_f64(-1e-300).to_bits(), 0x8000);
    }

    proptest::proptest! {
        #[test]
        fn half_types_get_a_nearest_value(value in -60000f64..60000.0, scale in -24i32..1) {
            let value = value * 2f64.powi(scale);
            let got = <f16 as Float>::from_f64(value);
            proptest::prop_assert!(nearest(value, f16::from_bits, got.to_bits()).contains(&got.to_f64()));
            let got = <bf16 as Float>::from_f64(value);
            proptest::prop_assert!(nearest(value, bf16::from_bits, got.to_bits()).contains(&got.to_f64()));
        }
    }
}
