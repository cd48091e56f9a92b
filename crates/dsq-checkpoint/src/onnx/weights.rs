//! How quantized weights lie in an ONNX file, and the way back that the proof takes. Not the choice of codes, and no graph.
//!
//! - `MatMulNBits` (com.microsoft, `docs/ContribOperators.md` of onnxruntime): `B` UINT8 `[n, blocks, block * bits / 8]`, codes from 0,
//!   of four bits the even one in the low nibble; `scales` FLOAT `[n, blocks]`; `zero_points` UINT8 `[n, ceil(blocks * bits / 8)]`,
//!   packed as the codes along a row, absent where all are the middle code. The last block of a row may reach beyond `k`. A
//!   value is `(code - zero) * scale`.
//! - `DequantizeLinear` (opset 21): INT8 or INT4 in the shape of the weight, of INT4 the even one of the flat order in the low nibble.
//!
//! Both have the codes of dsq moved by the middle code or not at all. Codes of two and three bits are stored in four.

use super::graph::Declared;
use super::proto::DataType;
use dsq_quant::{Granularity, Mapping, QuantArgs, QuantizedMatrix};

/// The smallest block of `MatMulNBits`.
const MIN_BLOCK: usize = 16;
/// The largest that onnxruntime has a kernel for (larger ones it multiplies as floats).
const MAX_BLOCK: usize = 256;

/// The layout of an `[n, k]` matrix for `MatMulNBits`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Blocks {
    pub(super) n: usize,
    pub(super) k: usize,
    /// 4 or 8.
    pub(super) bits: usize,
    /// Inputs that share a scale.
    pub(super) block: usize,
    /// Whether zero points are stored.
    zeros: bool,
}

impl Blocks {
    /// The layout, with the largest block that no scale of the matrix changes in. Scales for longer runs are repeated.
    ///
    /// # Errors
    /// What is wrong: float codes, or groups that no power of two from 16 divides.
    pub(super) fn of(args: &QuantArgs, n: usize, k: usize) -> Result<Self, String> {
        if args.qtype.float().is_some() {
            return Err(format!("MatMulNBits has integer codes; expected those, got {}", args.qtype.name()));
        }
        let run = match args.granularity {
            Granularity::PerGroup(g) if g != k => g,
            // No scale changes inside a row: the last block may be a part.
            Granularity::PerTensor | Granularity::PerChannel | Granularity::PerGroup(_) => {
                k.next_multiple_of(MIN_BLOCK)
            }
            other => return Err(format!("expected a scale for each group, output or tensor, got {other:?}")),
        };
        let block = (1 << run.trailing_zeros()).min(MAX_BLOCK);
        if block < MIN_BLOCK {
            return Err(format!(
                "MatMulNBits has blocks of {MIN_BLOCK}, 32, 64...; expected a group size that one of them divides, got {run}"
            ));
        }
        let bits = if args.qtype.bits() > 4 { 8 } else { 4 };
        Ok(Self { n, k, bits, block, zeros: args.mapping == Mapping::Asymmetric })
    }

    fn per_row(&self) -> usize {
        self.k.div_ceil(self.block)
    }

    /// The code that stands for 0 where there are no zero points.
    fn middle(&self) -> i32 {
        1 << (self.bits - 1)
    }

    /// The tensors of a module.
    pub(super) fn declared(&self, module: &str) -> Vec<Declared> {
        let (n, blocks) = (self.n, self.per_row());
        let mut out = vec![
            Declared::new(format!("{module}.qweight"), &[n, blocks, self.block * self.bits / 8], DataType::Uint8),
            Declared::new(format!("{module}.scales"), &[n, blocks], DataType::Float),
        ];
        if self.zeros {
            let dims = [n, (blocks * self.bits).div_ceil(8)];
            out.push(Declared::new(format!("{module}.qzeros"), &dims, DataType::Uint8));
        }
        out
    }

    /// The bytes of [`Blocks::declared`].
    pub(super) fn store(&self, m: &QuantizedMatrix) -> Vec<Vec<u8>> {
        let (blocks, middle) = (self.per_row(), self.middle());
        let (mut codes, mut scales, mut zeros) = (Vec::new(), Vec::new(), Vec::new());
        for row in 0..self.n {
            let params = |b: usize| m.qparams(m.scale_index(row, b * self.block / m.group_len().max(1)));
            let mut line: Vec<u8> =
                m.codes[row * self.k..(row + 1) * self.k].iter().map(|&q| (i32::from(q) + middle) as u8).collect();
            // What lies beyond the row is multiplied with nothing; it is the middle code all the same.
            line.resize(blocks * self.block, middle as u8);
            codes.extend(packed(&line, self.bits));
            scales.extend((0..blocks).flat_map(|b| params(b).scale.to_le_bytes()));
            if self.zeros {
                let line: Vec<u8> = (0..blocks).map(|b| (params(b).zero + middle) as u8).collect();
                zeros.extend(packed(&line, self.bits));
            }
        }
        let mut out = vec![codes, scales];
        out.extend(self.zeros.then_some(zeros));
        out
    }

    /// Whether stored bytes are the codes, scales and zero points of the matrix: each is read as the operator's definition says.
    pub(super) fn holds(&self, parts: &[Vec<u8>], m: &QuantizedMatrix) -> bool {
        let (blocks, middle) = (self.per_row(), self.middle());
        let (codes, scales, zeros) = match (parts, self.zeros) {
            ([codes, scales, zeros], true) => (codes, scales, Some(zeros)),
            ([codes, scales], false) => (codes, scales, None),
            _ => return false,
        };
        // Of the field `i` of a row of bytes.
        let field = |bytes: &[u8], i: usize| match self.bits {
            4 => i32::from(bytes[i / 2] >> (4 * (i % 2)) & 15),
            _ => i32::from(bytes[i]),
        };
        let (code_row, zero_row) = (blocks * self.block * self.bits / 8, (blocks * self.bits).div_ceil(8));
        if codes.len() != self.n * code_row || scales.len() != self.n * blocks * 4 || (m.n, m.k) != (self.n, self.k) {
            return false;
        }
        (0..self.n).all(|row| {
            (0..self.k).all(|column| {
                let block = column / self.block;
                let at = (row * blocks + block) * 4;
                let scale = u32::from_le_bytes([scales[at], scales[at + 1], scales[at + 2], scales[at + 3]]);
                let zero = zeros.map_or(middle, |z| field(&z[row * zero_row..], block));
                let code = field(&codes[row * code_row..], column);
                let meant = m.qparams(m.scale_index(row, column / m.group_len().max(1)));
                let same = (code - middle, zero - middle) == (i32::from(m.codes[row * self.k + column]), meant.zero);
                same && scale == meant.scale.to_bits()
            })
        })
    }
}

/// Codes from 0, a byte each, in fields of `bits`; the first in the low ones, a lone last one with zeros above it.
fn packed(codes: &[u8], bits: usize) -> Vec<u8> {
    match bits {
        4 => codes.chunks(2).map(|pair| pair[0] | pair.get(1).map_or(0, |high| high << 4)).collect(),
        _ => codes.to_vec(),
    }
}

/// The tensors of a weight of `shape` for `DequantizeLinear`: codes, scales, zero points where the matrix has them.
///
/// # Errors
/// What is wrong: float codes, or scales of groups.
pub(super) fn axis_declared(module: &str, shape: &[usize], m: &QuantizedMatrix) -> Result<Vec<Declared>, String> {
    if m.args.qtype.float().is_some() {
        return Err(format!("expected integer codes for the layers of an image model, got {}", m.args.qtype.name()));
    }
    let dims: &[usize] = match m.args.granularity {
        Granularity::PerTensor => &[],
        Granularity::PerChannel => &[m.n],
        other => return Err(format!("expected per channel or per tensor for a convolution, got {other:?}")),
    };
    let ty = code_type(&m.args);
    let mut out = vec![
        Declared::new(format!("{module}.weight_quantized"), shape, ty),
        Declared::new(format!("{module}.weight_scale"), dims, DataType::Float),
    ];
    if m.args.mapping == Mapping::Asymmetric {
        out.push(Declared::new(format!("{module}.weight_zero_point"), dims, ty));
    }
    Ok(out)
}

/// INT4 for codes of up to four bits, else INT8.
pub(super) fn code_type(args: &QuantArgs) -> DataType {
    if args.qtype.bits() > 4 { DataType::Int8 } else { DataType::Int4 }
}

/// Signed codes as their type stores them.
pub(super) fn code_bytes(codes: &[i8], ty: DataType) -> Vec<u8> {
    let bytes: Vec<u8> = codes.iter().map(|&q| q as u8).collect();
    match ty {
        DataType::Int4 => packed(&bytes.iter().map(|b| b & 15).collect::<Vec<_>>(), 4),
        _ => bytes,
    }
}

/// The bytes of [`axis_declared`].
pub(super) fn axis_store(m: &QuantizedMatrix) -> Vec<Vec<u8>> {
    let ty = code_type(&m.args);
    let mut out = vec![code_bytes(&m.codes, ty), m.scales.iter().flat_map(|s| s.to_le_bytes()).collect()];
    if m.args.mapping == Mapping::Asymmetric {
        out.push(code_bytes(&m.zeros, ty));
    }
    out
}

/// Whether stored bytes are the codes, scales and zero points of the matrix.
pub(super) fn axis_holds(parts: &[Vec<u8>], m: &QuantizedMatrix) -> bool {
    let four = m.args.qtype.bits() <= 4;
    let signed = |bytes: &[u8], i: usize| match four {
        // The nibble in the upper half, moved down with its sign.
        true => ((bytes[i / 2] >> (4 * (i % 2))) << 4) as i8 >> 4,
        false => bytes[i] as i8,
    };
    let same = |bytes: &[u8], codes: &[i8]| {
        let len = if four { codes.len().div_ceil(2) } else { codes.len() };
        bytes.len() == len && codes.iter().enumerate().all(|(i, &q)| signed(bytes, i) == q)
    };
    let scales = |bytes: &[u8]| {
        bytes.len() == 4 * m.scales.len()
            && m.scales.iter().zip(bytes.as_chunks::<4>().0).all(|(s, b)| s.to_bits() == u32::from_le_bytes(*b))
    };
    match parts {
        [codes, s] => m.zeros.is_empty() && same(codes, &m.codes) && scales(s),
        [codes, s, zeros] => same(codes, &m.codes) && scales(s) && same(zeros, &m.zeros) && !m.zeros.is_empty(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsq_quant::{FloatType, QuantType};

    fn matrix(n: usize, k: usize, args: QuantArgs) -> QuantizedMatrix {
        let w: Vec<f32> = (0..n * k).map(|i| (i as f32 * 0.37 + 0.2).sin() + (i % 7) as f32 * 0.1).collect();
        QuantizedMatrix::quantize(&w, n, k, args).unwrap()
    }

    fn args(qtype: QuantType, granularity: Granularity, mapping: Mapping) -> QuantArgs {
        QuantArgs { qtype, mapping, ..QuantArgs::int4(granularity, FloatType::F32) }
    }

    #[test]
    fn stored_codes_are_those_of_the_matrix_and_any_changed_bit_is_seen() {
        let (n, k) = (3, 96);
        for qtype in QuantType::INTS {
            for granularity in [Granularity::PerTensor, Granularity::PerChannel, Granularity::PerGroup(48)] {
                for mapping in [Mapping::Symmetric, Mapping::Asymmetric] {
                    let m = matrix(n, k, args(qtype, granularity, mapping));
                    let layout = Blocks::of(&m.args, n, k).unwrap();
                    assert_eq!(layout.block, if granularity == Granularity::PerGroup(48) { 16 } else { 32 });
                    let parts = layout.store(&m);
                    let sizes: Vec<u64> = layout.declared("m").iter().map(Declared::bytes).collect();
                    assert_eq!(parts.iter().map(|p| p.len() as u64).collect::<Vec<_>>(), sizes);
                    assert!(layout.holds(&parts, &m));
                    for (p, part) in parts.iter().enumerate() {
                        for at in 0..part.len() {
                            let mut changed = parts.clone();
                            changed[p][at] ^= 1 << (at % 4);
                            assert!(!layout.holds(&changed, &m), "{qtype:?} {granularity:?} {mapping:?} {p} {at}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn the_layout_is_the_one_of_a_worked_example() {
        // Two rows of 18, per channel: one block of 32 each, of which the last 14 codes are beyond the row.
        let codes: Vec<i8> = (0..36).map(|i| (i % 16 - 8) as i8).collect();
        let args = args(QuantType::Int4, Granularity::PerChannel, Mapping::Asymmetric);
        let m = QuantizedMatrix {
            args,
            n: 2,
            k: 18,
            codes,
            scales: vec![0.5, 2.0],
            zeros: vec![-8, 7],
            global_scale: None,
        };
        let layout = Blocks::of(&args, 2, 18).unwrap();
        let parts = layout.store(&m);
        let first = [0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe, 0x10, 0x88, 0x88, 0x88, 0x88, 0x88, 0x88, 0x88];
        assert_eq!(parts[0][..16], first);
        // The second row begins with code 2.
        assert_eq!(parts[0][16..18], [0x32, 0x54]);
        let floats: Vec<u8> = [0.5f32, 2.0].iter().flat_map(|s| s.to_le_bytes()).collect();
        assert_eq!(parts[1], floats);
        assert_eq!(parts[2], [0x00, 0x0f]);
    }

    #[test]
    fn blocks_are_powers_of_two_and_others_are_refused_with_both_values() {
        let block = |granularity, k| Blocks::of(&args(QuantType::Int4, granularity, Mapping::Symmetric), 4, k);
        for (granularity, k, want) in [
            (Granularity::PerGroup(128), 512, 128),
            (Granularity::PerGroup(512), 1024, 256),
            (Granularity::PerGroup(96), 192, 32),
            (Granularity::PerChannel, 576, 64),
            (Granularity::PerChannel, 1000, 16),
            (Granularity::PerTensor, 4096, 256),
            (Granularity::PerGroup(40), 40, 16),
        ] {
            assert_eq!(block(granularity, k).unwrap().block, want, "{granularity:?} of {k}");
        }
        let problem = block(Granularity::PerGroup(24), 96).unwrap_err();
        assert!(problem.contains("blocks of 16") && problem.ends_with("got 24"), "{problem}");
        let problem = Blocks::of(&QuantArgs::nvfp4(), 4, 64).unwrap_err();
        assert!(problem.contains("FP4 E2M1"), "{problem}");
    }

    #[test]
    fn codes_of_dequantize_linear_are_read_back_and_changed_bits_seen() {
        for qtype in QuantType::INTS {
            for granularity in [Granularity::PerTensor, Granularity::PerChannel] {
                for mapping in [Mapping::Symmetric, Mapping::Asymmetric] {
                    // An odd number of codes.
                    let m = matrix(3, 9, args(qtype, granularity, mapping));
                    let parts = axis_store(&m);
                    let declared = axis_declared("m", &[3, 1, 3, 3], &m).unwrap();
                    for (d, p) in declared.iter().zip(&parts) {
                        assert_eq!(d.bytes(), p.len() as u64);
                    }
                    assert!(declared.len() == parts.len() && axis_holds(&parts, &m));
                    for (p, part) in parts.iter().enumerate() {
                        for at in 0..part.len() {
                            let mut changed = parts.clone();
                            changed[p][at] ^= 1 << (at % 4);
                            assert!(!axis_holds(&changed, &m), "{qtype:?} {p} {at}");
                        }
                    }
                }
            }
        }
        assert_eq!(code_bytes(&[-8, 7, -1], DataType::Int4), [0x78, 0x0f]);
        assert_eq!(code_bytes(&[-8, 7], DataType::Int8), [0xf8, 0x07]);
    }
}
