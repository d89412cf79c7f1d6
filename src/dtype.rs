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

macro_rules! halves {
    ($($type:ty),*) => {$(
        impl Float for $type {
            type Accumulator = f32;
            fn from_f64(value: f64) -> Self {
                <$type>::from_f64(value)
            }
            fn to_f64(self) -> f64 {
                <$type>::to_f64(self)
            }
        }
    )*};
}
halves!(bf16, f16);
