//! The words and the arithmetic of dsq: number formats, schemes, quantization parameters, quantize and
//! dequantize, packing, observers.
//!
//! One formula in one place: fake quantization in training, post-training quantization, export and the
//! runtime's dequantization all call [`QuantArgs`] and [`QuantizedMatrix`], or are tested bit-equal to them.
//! The reference arithmetic is that of compressed-tensors on the f32 path: minimum, maximum and scale are
//! computed in f32, the scale is rounded once to its stored dtype, and the codes are chosen against the
//! stored scale.
//!
//! This crate is not fast (see `dsq-kernels`), reads no file (see `dsq-checkpoint`) and knows no model.

mod args;
mod config;
mod error;
mod float;
pub mod gguf;
mod kv_cache;
mod learned;
mod matrix;
mod minifloat;
mod observer;
mod order;
mod pack;
mod percentile;
#[cfg(test)]
mod test_values;
mod weight_observer;
mod weighted;

pub use args::{Granularity, Mapping, QParams, QuantArgs, QuantType};
pub use config::{FixedGrid, InputGrid, Pattern, QuantConfig, QuantScheme};
pub use error::QuantError;
pub use float::FloatType;
pub use gguf::GgufGrid;
pub use kv_cache::KvGrid;
pub use matrix::{DEGENERATE_ABSMAX, QuantizedMatrix};
pub use minifloat::{MiniFloat, e8m0_decode, e8m0_encode};
pub use observer::{MinMax, MovingAverage, Observer, ObserverKind};
pub use order::ColumnOrder;
pub use pack::{nibble_word, pack_i32, pack_rows, packed_words, unpack_i32, unpack_words};
pub use percentile::Percentile;
pub use weight_observer::WeightObserver;
