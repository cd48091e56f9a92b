//! The forms in which a cache holds a value, and how sixteen of them become f32 in registers. Not where they lie (see
//! `paged.rs`), not how they are made.

use super::paged::KvFormat;
use crate::simd::Simd;
use dsq_quant::{KvGrid, QuantType};

/// A form in which the cache holds a value.
pub(super) trait Form {
    /// Bytes of a value.
    const BYTES: usize;
    /// Sixteen values at `p`; `scale` has those of the codes.
    ///
    /// Safety: `16 * BYTES` readable bytes; the path's features.
    unsafe fn load<S: Simd>(p: *const u8, scale: S::V) -> S::V;
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct Int8;

impl Form for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8, _scale: S::V) -> S::V {
        // SAFETY: the caller's bytes.
        unsafe { S::load(p.cast()) }
    }
}

impl Form for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8, _scale: S::V) -> S::V {
        // SAFETY: the caller's bytes.
        unsafe { S::f16(p) }
    }
}

impl Form for Int8 {
    const BYTES: usize = 1;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8, scale: S::V) -> S::V {
        // SAFETY: the caller's bytes.
        unsafe { S::mul(S::int8(p), scale) }
    }
}

/// FP8 by way of f16 comes out as a 256th, with which the scale makes up: the same number is rounded once, so the same bits come out.
pub(super) struct E4m3By256;

impl Form for E4m3By256 {
    const BYTES: usize = 1;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8, scale: S::V) -> S::V {
        // SAFETY: the caller's bytes; the cache holds no NaN codes.
        unsafe { S::mul(S::e4m3_by_256(p), scale) }
    }
}

/// The forms, as a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    F32,
    F16,
    Int8,
    E4m3,
}

impl Kind {
    pub(super) fn of(format: &KvFormat) -> Self {
        match format {
            KvFormat::F32 => Self::F32,
            KvFormat::F16 => Self::F16,
            KvFormat::Codes(KvGrid { args, .. }) | KvFormat::Dynamic(args) if args.qtype == QuantType::Fp8E4M3 => {
                Self::E4m3
            }
            KvFormat::Codes(_) | KvFormat::Dynamic(_) => Self::Int8,
        }
    }

    /// What [`Form::load`] wants in the place of a scale of 1; of floats it uses none.
    pub(super) fn unit(self) -> f32 {
        // (256 times a scale is exact and finite: 448 times it is finite.)
        if self == Self::E4m3 { 256.0 } else { 1.0 }
    }

    /// What [`Form::load`] wants as scales of keys and values, where all have the same.
    pub(super) fn scales(self, format: &KvFormat) -> Option<[f32; 2]> {
        match format {
            KvFormat::F32 | KvFormat::F16 => Some([1.0; 2]),
            KvFormat::Codes(grid) => Some([self.unit() * grid.k.scale, self.unit() * grid.v.scale]),
            KvFormat::Dynamic(_) => None,
        }
    }
}

/// [`dispatch!`](crate::simd::dispatch) of a kernel that is generic over the form as well.
macro_rules! on_form {
    ($isa:expr, $kind:expr, $kernel:ident ($($arg:ident : $t:ty),* $(,)?)) => {
        match $kind {
            $crate::attention::form::Kind::F32 => {
                $crate::simd::dispatch!($isa, $kernel::<$crate::attention::form::F32>($($arg: $t),*))
            }
            $crate::attention::form::Kind::F16 => {
                $crate::simd::dispatch!($isa, $kernel::<$crate::attention::form::F16>($($arg: $t),*))
            }
            $crate::attention::form::Kind::Int8 => {
                $crate::simd::dispatch!($isa, $kernel::<$crate::attention::form::Int8>($($arg: $t),*))
            }
            $crate::attention::form::Kind::E4m3 => {
                $crate::simd::dispatch!($isa, $kernel::<$crate::attention::form::E4m3By256>($($arg: $t),*))
            }
        }
    };
}
pub(super) use on_form;
