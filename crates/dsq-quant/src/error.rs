//! The errors of quantization arithmetic. They name positions, not tensors or files: the caller adds those.

use crate::FloatType;

/// Why a tensor or a setting cannot be quantized.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum QuantError {
    /// A value is NaN or infinite.
    #[error("expected finite values, got {count} non-finite, the first is {value} at index {index}")]
    NonFinite {
        /// Flat index (row major) of the first one.
        index: usize,
        /// Its value.
        value: f32,
        /// How many there are.
        count: usize,
    },
    /// The scale does not fit its stored dtype.
    #[error(
        "group {group}: scale of the range [{lo:e}, {hi:e}] overflows {dtype}; expected at most {max:e}, got {scale:e}",
        max = dtype.max()
    )]
    ScaleOverflow {
        /// Flat group index (row major over `[n, groups]`).
        group: usize,
        /// Smallest value of the group.
        lo: f32,
        /// Largest value of the group.
        hi: f32,
        /// The scale before it was stored.
        scale: f32,
        /// The stored dtype.
        dtype: FloatType,
    },
    /// The group size does not divide the reduction dimension.
    #[error("expected a group size that divides in_features = {k}, got {group_size}")]
    GroupNotDividing {
        /// Reduction dimension (in_features).
        k: usize,
        /// Group size asked for.
        group_size: usize,
    },
    /// A buffer has another length than its shape says.
    #[error("{what}: expected {expected} elements, got {got}")]
    Length {
        /// Which buffer.
        what: &'static str,
        /// Elements by the shape.
        expected: usize,
        /// Elements present.
        got: usize,
    },
    /// A stored quantization parameter cannot be used.
    #[error("group {group}: {what}; expected a finite positive scale and a zero point in range, got {value}")]
    BadQParam {
        /// Flat group index.
        group: usize,
        /// Which parameter.
        what: &'static str,
        /// Its value.
        value: f32,
    },
    /// A stored code stands for no number.
    #[error("code {code:#04x} at index {index}; expected a finite number, got NaN or infinity")]
    BadCode {
        /// Flat index (row major) of the first one.
        index: usize,
        /// The byte.
        code: u8,
    },
    /// A setting is unknown or out of range.
    #[error("{field}: expected {expected}, got {got}")]
    Setting {
        /// Name of the setting.
        field: &'static str,
        /// What is allowed.
        expected: String,
        /// What was given.
        got: String,
    },
}

impl QuantError {
    /// An overflow of a scale at its place: the arithmetic of one group does not know which group it is.
    pub fn in_group(mut self, at: usize) -> Self {
        if let QuantError::ScaleOverflow { group, .. } = &mut self {
            *group = at;
        }
        self
    }
}
