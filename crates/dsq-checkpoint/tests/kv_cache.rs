//! The scales of a KV cache on disk: written, read back in every float dtype, and refused where they contradict the scheme. What the
//! command line says of damaged folders is in the integration tests (`tests/it/kv_cache.rs`).

mod fixtures;

use dsq_checkpoint::{
    Checkpoint, CheckpointError, ExportTensor, ModelConfig, NamedTensor, TensorData, export_folder, write_safetensors,
};
use dsq_quant::{FloatType, Granularity, KvGrid, QParams, QuantArgs, QuantConfig, QuantType};
use fixtures::{llama, quantized_layers, scheme};
use std::path::Path;

const TYPES: [QuantType; 2] = [QuantType::Int8, QuantType::Fp8E4M3];

fn grid(qtype: QuantType, k: f32, v: f32) -> KvGrid {
    let p = |scale| QParams { scale, zero: 0 };
    KvGrid { args: QuantArgs::kv_cache(qtype).unwrap(), k: p(k), v: p(v) }
}

fn quant(kv_cache: Option<QuantType>) -> QuantConfig {
    let weights = QuantArgs::int4(Granularity::PerGroup(32), FloatType::Bf16);
    QuantConfig { kv_cache: kv_cache.map(|t| QuantArgs::kv_cache(t).unwrap()), ..scheme(weights) }
}

fn export(out: &Path, q: &QuantConfig, grids: &[(usize, KvGrid)]) -> Result<(), CheckpointError> {
    let config = llama(true);
    let mut layers = quantized_layers(&config, FloatType::Bf16, q);
    layers.extend(grids.iter().map(|&(layer, grid)| ExportTensor::KvCache { layer, grid }));
    export_folder(out, &ModelConfig::Llama(config), layers, Some(q), vec![], true).map(|_| ())
}

#[test]
fn scales_are_read_back_equal_and_in_every_float_dtype() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m");
    for qtype in TYPES {
        // Subnormal, as large as can be, and ordinary ones.
        let grids = [(0, grid(qtype, 1e-42, f32::MAX / 448.0)), (1, grid(qtype, 0.3, 0.007))];
        export(&out, &quant(Some(qtype)), &grids).unwrap();
        let ckpt = Checkpoint::open(&out).unwrap();
        for (i, want) in grids {
            assert_eq!(ckpt.kv_grid(i).unwrap(), Some(want));
        }
        assert!(ckpt.faults().is_empty(), "{:?}", ckpt.faults());
        for dtype in FloatType::ALL {
            let stored = |name: String| {
                let info = ckpt.info(&name).unwrap();
                let data = if name.ends_with(".k_scale") || name.ends_with(".v_scale") {
                    TensorData::Float { shape: vec![1], data: vec![0.3], dtype }
                } else {
                    let (dtype, bytes) = ckpt.read_stored(&name).unwrap();
                    TensorData::Raw { shape: info.shape, bytes, dtype }
                };
                NamedTensor { name, data }
            };
            let tensors: Vec<NamedTensor> = ckpt.names().into_iter().map(stored).collect();
            let other = dir.path().join("other");
            std::fs::create_dir_all(&other).unwrap();
            std::fs::copy(out.join("config.json"), other.join("config.json")).unwrap();
            write_safetensors(&other.join("model.safetensors"), &tensors).unwrap();
            let scale = dtype.round(0.3);
            let other = Checkpoint::open(&other).unwrap();
            assert_eq!(other.kv_grid(1).unwrap(), Some(grid(qtype, scale, scale)), "{dtype}");
        }
    }
}

#[test]
fn grids_that_contradict_the_scheme_are_refused_by_layer() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m");
    let int8 = |k, v| grid(QuantType::Int8, k, v);
    let fp8 = grid(QuantType::Fp8E4M3, 0.1, 0.1);
    let good = int8(0.1, 0.2);
    for (kv_cache, grids, code, words) in [
        (Some(TYPES[0]), vec![(0, good)], 2, &["kv_cache_scheme", "layers 0 to 1", "[0]"][..]),
        (Some(TYPES[0]), vec![], 2, &["kv_cache_scheme", "layers 0 to 1", "[]"]),
        (Some(TYPES[0]), vec![(0, good), (1, good), (1, good)], 2, &["layers 0 to 1", "[0, 1, 1]"]),
        (Some(TYPES[0]), vec![(0, good), (2, good)], 2, &["layers 0 to 1", "[0, 2]"]),
        (Some(TYPES[0]), vec![(0, good), (1, fp8)], 2, &["model.layers.1.self_attn", "Int8", "Fp8E4M3"]),
        (None, vec![(0, good), (1, good)], 2, &["model.layers.0.self_attn", "None", "Int8"]),
        (Some(TYPES[0]), vec![(0, int8(0.0, 1.0)), (1, good)], 6, &["model.layers.0.self_attn.k_scale", "got 0"]),
        (Some(TYPES[0]), vec![(0, good), (1, int8(1.0, f32::NAN))], 6, &["model.layers.1.self_attn.v_scale", "NaN"]),
    ] {
        let e = export(&out, &quant(kv_cache), &grids).unwrap_err();
        assert_eq!(e.exit_code(), code, "{e}");
        for word in words {
            assert!(e.to_string().contains(word), "{e} lacks {word}");
        }
        assert!(!out.exists() && fixtures::list(dir.path()).is_empty());
    }
    let odd = QuantArgs { granularity: Granularity::PerChannel, ..good.args };
    let q = QuantConfig { kv_cache: Some(odd), ..quant(None) };
    let e = export(&out, &q, &[(0, KvGrid { args: odd, ..good }), (1, good)]).unwrap_err();
    assert!(e.to_string().contains("one scale for the tensor"), "{e}");
}
