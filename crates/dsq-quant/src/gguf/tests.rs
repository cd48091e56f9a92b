//! Tests of the block grids: golden bytes and values of ggml and the Python package, exhaustive small domains, properties.

use super::*;
use crate::test_values::normal;
use proptest::prelude::*;

fn bytes_of(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01B3))
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

fn decoded(grid: GgufGrid, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![f32::NAN; bytes.len() / grid.block_bytes() * grid.block_len()];
    grid.dequantize(bytes, &mut out).unwrap();
    out
}

#[test]
fn bytes_and_values_are_those_of_ggml_and_of_the_python_package() {
    let text = include_str!("../../../../tests/golden/gguf_grids.txt");
    let (mut row, mut name, mut compared, mut refused) = (Vec::new(), "", 0, 0);
    for line in text.lines().filter(|l| !l.starts_with('#')) {
        let parts: Vec<&str> = line.split(' ').collect();
        if parts[0] == "row" {
            name = parts[1];
            row = bytes_of(parts[2]).chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
            continue;
        }
        let grid = GgufGrid::ALL.into_iter().find(|g| g.name() == parts[0]).unwrap();
        let ours = grid.quantize(&row);
        let (mut out, mut inside) = (vec![0.0; row.len()], vec![9; row.len()]);
        let faked = grid.fake_quantize(&row, &mut out, &mut inside);
        if parts[1] == "refused" {
            refused += 1;
            assert!(matches!(ours, Err(QuantError::ScaleOverflow { .. })), "{name} {}: {ours:?}", parts[0]);
            assert_eq!(faked.unwrap_err(), ours.unwrap_err());
            continue;
        }
        compared += 1;
        let ours = ours.unwrap();
        assert_eq!(ours, bytes_of(parts[1]), "{name} {}", parts[0]);
        let values = decoded(grid, &ours);
        let raw: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(format!("{:016x}", fnv1a(&raw)), parts[2], "{name} {}", parts[0]);
        faked.unwrap();
        assert_eq!(bits(&out), bits(&values), "{name} {}: fake quantization", parts[0]);
        assert!(inside.iter().all(|&m| m < 2));
    }
    assert!(compared > 300 && refused > 5, "{compared} {refused}");
}

#[test]
fn every_pair_of_q4_codes_and_every_q8_code_keeps_its_byte() {
    // A block that holds its extremes: encoding what a block decodes to gives the block again.
    for byte in 0..=u8::MAX {
        let mut q4_0 = vec![0, 0x3c]; // d = 1
        q4_0.extend([byte; 16]);
        q4_0[2] = 0x80; // code 0: the value -8, of largest magnitude
        assert_eq!(GgufGrid::Q4_0.quantize(&decoded(GgufGrid::Q4_0, &q4_0)).unwrap(), q4_0);
        let mut q4_1 = vec![0, 0x3c, 0, 0xc0]; // d = 1, m = -2
        q4_1.extend([byte; 16]);
        q4_1[4] = 0xf0; // codes 0 and 15
        assert_eq!(GgufGrid::Q4_1.quantize(&decoded(GgufGrid::Q4_1, &q4_1)).unwrap(), q4_1);
        if byte != 0x80 {
            let mut q8_0 = vec![0, 0x3c];
            q8_0.extend([byte; 32]);
            q8_0[2] = 127;
            assert_eq!(GgufGrid::Q8_0.quantize(&decoded(GgufGrid::Q8_0, &q8_0)).unwrap(), q8_0);
        }
    }
}

#[test]
fn every_6_bit_scale_and_minimum_survives_at_every_place() {
    for j in 0..8 {
        for scale in 0..64u8 {
            for min in 0..64u8 {
                let mut s = [0u8; 12];
                q4_k::put_scale_min(&mut s, j, scale, min);
                assert_eq!(decode::scale_min(&s, j), (scale, min));
                assert!((0..8).filter(|&i| i != j).all(|i| decode::scale_min(&s, i) == (0, 0)), "{j} {scale} {min}");
            }
        }
    }
}

#[test]
fn the_worked_examples_of_the_documentation() {
    let w = [0.7f32, -0.35, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3];
    let row = |len: usize| -> Vec<f32> { w.iter().copied().chain(std::iter::repeat(0.0)).take(len).collect() };
    let first = |grid: GgufGrid| {
        let bytes = grid.quantize(&row(grid.block_len())).unwrap();
        (bytes.clone(), decoded(grid, &bytes)[..8].to_vec())
    };
    let near = |a: &[f32], b: [f32; 8]| assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() < 6e-5), "{a:?}");
    let (bytes, values) = first(GgufGrid::Q4_0);
    assert_eq!(f16_at(&bytes, 0), -0.087_524_414);
    assert_eq!(bytes[2..10].iter().map(|b| b & 15).collect::<Vec<_>>(), [0, 12, 7, 7, 6, 6, 5, 5]);
    near(&values, [0.7002, -0.3501, 0.0875, 0.0875, 0.1750, 0.1750, 0.2626, 0.2626]);
    let (bytes, values) = first(GgufGrid::Q4_1);
    assert_eq!([f16_at(&bytes, 0), f16_at(&bytes, 2)], [0.070_007_324, -0.350_097_66]);
    assert_eq!(bytes[4..12].iter().map(|b| b & 15).collect::<Vec<_>>(), [15, 0, 6, 6, 7, 8, 9, 9]);
    near(&values, [0.7000, -0.3501, 0.0699, 0.0699, 0.1400, 0.2100, 0.2800, 0.2800]);
    let (bytes, values) = first(GgufGrid::Q8_0);
    assert_eq!(f16_at(&bytes, 0), 0.005_512_237_5);
    assert_eq!(bytes[2..10].iter().map(|&b| b as i8).collect::<Vec<_>>(), [127, -64, 9, 18, 27, 36, 45, 54]);
    near(&values, [0.7001, -0.3528, 0.0496, 0.0992, 0.1488, 0.1984, 0.2481, 0.2977]);
    let (bytes, values) = first(GgufGrid::Q4K);
    assert_eq!([f16_at(&bytes, 0), f16_at(&bytes, 2)], [0.001_109_123_2, 0.005_542_755]);
    assert_eq!(decode::scale_min(&bytes[4..16], 0), (63, 63));
    assert_eq!(bytes[16..24].iter().map(|b| b & 15).collect::<Vec<_>>(), [15, 0, 6, 6, 7, 8, 9, 9]);
    near(&values, [0.6989, -0.3492, 0.0701, 0.0701, 0.1399, 0.2098, 0.2797, 0.2797]);
}

#[test]
fn the_mask_closes_exactly_where_a_code_is_clipped() {
    // Q4_0: -8 is the value of largest magnitude, d = 1; codes beyond +7.5 clip, ends of the clipped range open.
    let mut x = vec![0.0f32; 32];
    x[..6].copy_from_slice(&[-8.0, 7.0, 7.4999, 7.5, 7.9, 8.0]);
    let (mut out, mut inside) = (vec![0.0; 32], vec![9; 32]);
    GgufGrid::Q4_0.fake_quantize(&x, &mut out, &mut inside).unwrap();
    assert_eq!(out[..6], [-8.0, 7.0, 7.0, 7.0, 7.0, 7.0]);
    assert_eq!(inside[..6], [1, 1, 1, 0, 0, 0]);
    assert!(inside[6..].iter().all(|&m| m == 1));
    for grid in [GgufGrid::Q4_1, GgufGrid::Q8_0] {
        let w = normal(32 * 500, 7);
        let (mut out, mut inside) = (vec![0.0; w.len()], vec![9; w.len()]);
        grid.fake_quantize(&w, &mut out, &mut inside).unwrap();
        assert!(inside.iter().all(|&m| m == 1), "{grid:?}");
    }
    // K-quants: a closed mask means a value outside what the sub-block can hold.
    for (grid, len) in [(GgufGrid::Q4K, 32), (GgufGrid::Q6K, 16)] {
        let w = normal(256 * 200, 8);
        let (mut out, mut inside) = (vec![0.0; w.len()], vec![9; w.len()]);
        grid.fake_quantize(&w, &mut out, &mut inside).unwrap();
        let closed = inside.iter().filter(|&&m| m == 0).count();
        assert!(closed > 0 && closed < w.len() / 20, "{closed}");
        for (sub, (w, (out, inside))) in w.chunks(len).zip(out.chunks(len).zip(inside.chunks(len))).enumerate() {
            let (lo, hi) = out.iter().fold((f32::MAX, f32::MIN), |(l, h), &v| (l.min(v), h.max(v)));
            for ((&x, &v), _) in w.iter().zip(out).zip(inside).filter(|(_, m)| **m == 0) {
                assert!((v == lo && x < lo) || (v == hi && x > hi), "{grid:?} {sub}: {x} -> {v} in {lo}..{hi}");
            }
        }
    }
}

#[test]
fn c001_a_block_does_not_depend_on_its_neighbours_and_small_ones_decode_to_zero() {
    for grid in GgufGrid::ALL {
        let len = grid.block_len();
        let row = normal(len, 1);
        let mut w = row.clone();
        w.extend((0..len).map(|i| if i % 2 == 0 { 1e-30 } else { -1e-30 }));
        w.extend(vec![0.0; len]);
        w.extend((0..len).map(|i| if i == 5 { 1e-38 } else { 0.0 }));
        w.extend((0..len).map(|i| if i == 5 { -1e-45 } else { 0.0 }));
        let bytes = grid.quantize(&w).unwrap();
        assert_eq!(bytes[..grid.block_bytes()], grid.quantize(&row).unwrap());
        assert!(decoded(grid, &bytes)[len..].iter().all(|&v| v == 0.0), "{grid:?}");
    }
}

#[test]
fn c005_f022_what_cannot_be_stored_is_refused_and_poisons_its_block_alone() {
    for grid in GgufGrid::ALL {
        let len = grid.block_len();
        for (bad, at) in
            [(f32::NAN, 0), (f32::INFINITY, 5), (f32::NEG_INFINITY, len - 1), (1e9, 3), (-1e9, 3), (3e38, 9)]
        {
            let mut w = normal(3 * len, 2);
            w[len + at] = bad;
            let err = grid.quantize(&w).unwrap_err();
            match err {
                QuantError::NonFinite { index, count: 1, .. } => assert!(!bad.is_finite() && index == len + at),
                QuantError::ScaleOverflow { group: 1, dtype: FloatType::F16, .. } => assert!(bad.is_finite()),
                other => panic!("{grid:?} {bad}: {other}"),
            }
            let (mut out, mut inside) = (vec![0.0; w.len()], vec![9; w.len()]);
            let faked = grid.fake_quantize(&w, &mut out, &mut inside).unwrap_err();
            assert_eq!(format!("{faked:?}"), format!("{:?}", grid.quantize(&w).unwrap_err()));
            let nan: Vec<bool> = out.iter().map(|v| v.is_nan()).collect();
            assert_eq!(nan, (0..3 * len).map(|i| i / len == 1).collect::<Vec<_>>());
            assert!(inside[len..2 * len].iter().all(|&m| m == 1));
        }
    }
}

#[test]
fn wrong_lengths_are_refused() {
    for grid in GgufGrid::ALL {
        let (len, size) = (grid.block_len(), grid.block_bytes());
        let w = vec![0.5; len];
        assert!(grid.quantize(&w).is_ok() && grid.quantize(&[]).is_ok());
        assert!(matches!(grid.quantize(&w[1..]), Err(QuantError::Length { .. })));
        let mut out = vec![0.0; len];
        assert!(grid.dequantize(&vec![0; size], &mut out).is_ok());
        assert!(grid.dequantize(&vec![0; size - 1], &mut out).is_err());
        assert!(grid.dequantize(&vec![0; 2 * size], &mut out).is_err());
        assert!(grid.dequantize(&vec![0; size], &mut out[1..]).is_err());
        let mut inside = vec![9; len];
        assert!(grid.fake_quantize(&w, &mut out, &mut inside).is_ok());
        assert!(grid.fake_quantize(&w, &mut out[1..], &mut inside).is_err());
        assert!(grid.fake_quantize(&w, &mut out, &mut inside[1..]).is_err());
        assert!((grid.bits_per_weight() * len as f64 / 8.0 - size as f64).abs() < 1e-9);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// A step is `d`; where nothing clips the error is at most half of one, and the f16 rounding of the scale adds
    /// `2^-11` of the value (`|code| <= 8`, 15 or 127 steps), that of a minimum `2^-11` of it; below 2^-14 it
    /// is `2^-25` for each of up to 128 codes instead.
    #[test]
    fn the_error_is_at_most_half_a_step_and_the_rounding_of_the_scales(seed in 0u64..1_000_000, magnitude in -3i32..4, shift in -3.0f32..3.0) {
        let w: Vec<f32> = normal(32, seed).iter().map(|v| (v + shift) * 10f32.powi(magnitude)).collect();
        for grid in [GgufGrid::Q4_0, GgufGrid::Q4_1, GgufGrid::Q8_0] {
            let bytes = grid.quantize(&w).unwrap();
            let d = f16_at(&bytes, 0).abs();
            let (mut out, mut inside) = (vec![0.0; 32], vec![9; 32]);
            grid.fake_quantize(&w, &mut out, &mut inside).unwrap();
            prop_assert_eq!(bits(&out), bits(&decoded(grid, &bytes)));
            let absmax = w.iter().fold(0.0f32, |a, v| a.max(v.abs()));
            let range = w.iter().fold(f32::MIN, |a, &v| a.max(v)) - w.iter().fold(f32::MAX, |a, &v| a.min(v));
            let stored = (absmax + range) / 2048.0 + 128.0 / (1u32 << 25) as f32;
            for i in 0..32 {
                let most = if inside[i] == 1 { 0.5001 * d } else { 1.0001 * d };
                prop_assert!((out[i] - w[i]).abs() <= most + stored, "{:?}: {} -> {} step {}", grid, w[i], out[i], d);
            }
        }
    }

    /// The last step of both K-quants takes the nearest code of what was stored: a value is off by half a step, or by how far
    /// it lies beyond the ends of its sub-block.
    #[test]
    fn k_quants_take_the_nearest_code(seed in 0u64..1_000_000) {
        let w = normal(256, seed);
        for (grid, len) in [(GgufGrid::Q4K, 32), (GgufGrid::Q6K, 16)] {
            let bytes = grid.quantize(&w).unwrap();
            for (j, (v, x)) in decoded(grid, &bytes).chunks(len).zip(w.chunks(len)).enumerate() {
                let step = match grid {
                    GgufGrid::Q4K => f16_at(&bytes, 0) * f32::from(decode::scale_min(&bytes[4..16], j).0),
                    _ => (f16_at(&bytes, 208) * f32::from(bytes[192 + j] as i8)).abs(),
                };
                let (lo, hi) = v.iter().fold((f32::MAX, f32::MIN), |(l, h), &v| (l.min(v), h.max(v)));
                for (v, x) in v.iter().zip(x) {
                    let beyond = (x - hi).max(lo - x).max(0.0);
                    prop_assert!((v - x).abs() <= 0.5001 * step + beyond + 1e-5, "{:?}: {} -> {}", grid, x, v);
                }
            }
        }
    }
}
