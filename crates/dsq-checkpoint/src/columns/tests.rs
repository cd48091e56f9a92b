//! Packing and unpacking by themselves; folders are tested in `tests/columns.rs`, the peers' own words there too.

use super::*;
use dsq_quant::Granularity;
use proptest::prelude::*;

fn words_of(t: TensorData) -> Vec<i32> {
    let TensorData::I32 { data, .. } = t else { panic!("words") };
    data
}

fn part(format: FolderFormat, m: &QuantizedMatrix, suffix: &str) -> TensorData {
    let e = expected(format, &m.args, m.n, m.k).into_iter().find(|e| e.suffix == suffix).unwrap();
    stored(format, m, None, e)
}

#[test]
fn c016_worked_words() {
    // Output c of 8 has codes 0..15 in order, unsigned; the words of column c are those of one run.
    let args = QuantArgs::int4(Granularity::PerChannel, FloatType::F16);
    let codes: Vec<i8> = (0..64).map(|i| (i % 8) as i8 - 8).collect();
    let m = QuantizedMatrix { args, n: 8, k: 8, codes, scales: vec![1.0; 8], zeros: vec![], global_scale: None };
    assert_eq!(words_of(part(FolderFormat::GptqV1, &m, "qweight")), [0x7654_3210; 8]);
    assert_eq!(words_of(part(FolderFormat::GptqV1, &m, "qzeros")), [0x7777_7777]);
    assert_eq!(words_of(part(FolderFormat::GptqV2, &m, "qzeros")), [0x8888_8888u32 as i32]);
    assert_eq!(words_of(part(FolderFormat::Awq, &m, "qzeros")), [0x8888_8888u32 as i32]);
    // Outputs 0 to 7 of input i are all i: AWQ's order shows in the transposed matrix.
    let codes: Vec<i8> = (0..64).map(|i| (i / 8) as i8 - 8).collect();
    let m = QuantizedMatrix { codes, ..m };
    assert_eq!(words_of(part(FolderFormat::Awq, &m, "qweight")), [0x7531_6420; 8]);
    // A true zero of 0 is stored as 15 by version 1, field by field.
    let args = QuantArgs { mapping: Mapping::Asymmetric, ..m.args };
    let m = QuantizedMatrix { args, zeros: vec![-8; 8], ..m };
    assert_eq!(words_of(part(FolderFormat::GptqV1, &m, "qzeros")), [-1]);
    assert_eq!(zeros_of(FolderFormat::GptqV1, QuantType::Int4, 8, &[-1]), [-8; 8]);
}

proptest! {
    #[test]
    fn words_hold_what_was_put_in(seed: u64, bits in 0usize..4, format in 0usize..3, n in 1usize..4, groups in 1usize..4) {
        let format = [FolderFormat::GptqV1, FolderFormat::GptqV2, FolderFormat::Awq][format];
        let qtype = if format == FolderFormat::Awq { QuantType::Int4 } else { QuantType::INTS[bits] };
        let (n, k) = (32 * n, 32 * groups);
        let mut state = seed | 1;
        let mut random = |len: usize| -> Vec<i8> {
            (0..len).map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                ((state >> 33) as i32).rem_euclid(1 << qtype.bits()) + qtype.qmin()
            }).map(|q| q as i8).collect()
        };
        let args = QuantArgs { qtype, mapping: Mapping::Asymmetric, ..QuantArgs::int4(Granularity::PerGroup(32), FloatType::F16) };
        let (codes, zeros) = (random(n * k), random(n * groups));
        let scales = (0..n * groups).map(|i| 1.0 + i as f32 / 4.0).collect();
        let m = QuantizedMatrix { args, n, k, codes, scales, zeros, global_scale: None };
        let back = zeros_of(format, qtype, n, &words_of(part(format, &m, "qzeros")));
        prop_assert_eq!(transposed(&back, groups, n), m.zeros.clone());
        let words = words_of(part(format, &m, "qweight"));
        let codes: Vec<i8> = match format {
            FolderFormat::Awq => transposed(&awq_codes(&words), k, n),
            _ => {
                let per_row = packed_words(k, qtype.bits());
                transposed(&words, per_row, n).chunks(per_row).flat_map(|r| unpack_i32(r, qtype.bits(), k)).collect()
            }
        };
        prop_assert_eq!(codes, m.codes);
    }
}
