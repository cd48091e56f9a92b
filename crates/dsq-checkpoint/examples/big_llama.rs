//! Writes the folder of a Llama of any size with random weights, in shards, to measure what commands need for it. Not a model: it
//! predicts nothing.
//!
//!     cargo run --release -p dsq-checkpoint --example big_llama OUT [LAYERS HIDDEN FFN VOCABULARY SHARD_GB [bf16|f16 [KV_HEADS]]]
//!
//! The usual numbers are those of a model of 7 billion parameters (32 4096 11008 32000 5): 13.5 GB. Weights are bf16 (or f16) numbers
//! of a normal distribution with standard deviation 0.02, from a fixed seed; norms are 1.

use half::{bf16, f16};
use serde_json::{Map, json};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

fn main() -> std::io::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let Some(out) = args.first() else {
        eprintln!("expected the folder to write, got nothing");
        std::process::exit(2);
    };
    let number = |i: usize, usual: usize| args.get(i).and_then(|a| a.parse().ok()).unwrap_or(usual);
    let [layers, d, ffn, vocabulary] = [number(1, 32), number(2, 4096), number(3, 11008), number(4, 32000)];
    let shard_bytes = (args.get(5).and_then(|a| a.parse().ok()).unwrap_or(5.0f64) * 1e9) as usize;
    let half = args.get(6).is_some_and(|a| a == "f16");
    let dir = Path::new(out);
    std::fs::create_dir_all(dir)?;
    // With grouped queries heads are 64 wide, as in models of one billion.
    let head_dim = if d.is_multiple_of(128) && args.len() < 8 { 128 } else { 64 };
    let kv_heads = number(7, d / head_dim);
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": d, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": d / head_dim, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "vocab_size": vocabulary, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": 2,
        "torch_dtype": if half { "float16" } else { "bfloat16" },
    });
    std::fs::write(dir.join("config.json"), format!("{config:#}\n"))?;
    let mut tensors = vec![("model.embed_tokens.weight".to_owned(), vec![vocabulary, d])];
    for i in 0..layers {
        let mut add = |name: &str, shape: Vec<usize>| tensors.push((format!("model.layers.{i}.{name}.weight"), shape));
        add("input_layernorm", vec![d]);
        for (name, rows) in [("q", d), ("k", kv_heads * head_dim), ("v", kv_heads * head_dim), ("o", d)] {
            add(&format!("self_attn.{name}_proj"), vec![rows, d]);
        }
        add("post_attention_layernorm", vec![d]);
        add("mlp.gate_proj", vec![ffn, d]);
        add("mlp.up_proj", vec![ffn, d]);
        add("mlp.down_proj", vec![d, ffn]);
    }
    tensors.push(("model.norm.weight".into(), vec![d]));
    tensors.push(("lm_head.weight".into(), vec![vocabulary, d]));
    let bytes = |shape: &[usize]| 2 * shape.iter().product::<usize>();
    let mut shards: Vec<Vec<(String, Vec<usize>)>> = vec![Vec::new()];
    let mut held = 0;
    for (name, shape) in tensors {
        if held > 0 && held + bytes(&shape) > shard_bytes {
            shards.push(Vec::new());
            held = 0;
        }
        held += bytes(&shape);
        shards.last_mut().expect("one at least").push((name, shape));
    }
    let mut state = 1u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let stored = |x: f32| if half { f16::from_f32(x).to_le_bytes() } else { bf16::from_f32(x).to_le_bytes() };
    // A sum of twelve uniform numbers has standard deviation 1.
    let mut uniform = || (next() >> 40) as f32 / (1u64 << 24) as f32;
    let normal: Vec<[u8; 2]> =
        (0..1 << 16).map(|_| stored(0.02 * ((0..12).map(|_| uniform()).sum::<f32>() - 6.0))).collect();
    let (count, mut map, mut total) = (shards.len(), Map::new(), 0);
    for (i, shard) in shards.iter().enumerate() {
        let file = format!("model-{:05}-of-{count:05}.safetensors", i + 1);
        let (mut header, mut at) = (Map::new(), 0);
        for (name, shape) in shard {
            let end = at + bytes(shape);
            let dtype = if half { "F16" } else { "BF16" };
            header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": [at, end]}));
            map.insert(name.clone(), json!(file));
            at = end;
        }
        total += at;
        let mut text = serde_json::Value::Object(header).to_string().into_bytes();
        text.resize(text.len().next_multiple_of(8), b' ');
        let mut writer = BufWriter::with_capacity(1 << 20, File::create(dir.join(&file))?);
        writer.write_all(&(text.len() as u64).to_le_bytes())?;
        writer.write_all(&text)?;
        for (_, shape) in shard {
            let mut left = bytes(shape);
            if shape.len() == 1 {
                writer.write_all(&stored(1.0).repeat(shape[0]))?;
                continue;
            }
            let mut run = Vec::with_capacity(1 << 20);
            while left > 0 {
                run.clear();
                while run.len() < left.min(1 << 20) {
                    let random = next();
                    (0..4).for_each(|i| run.extend(normal[(random >> (16 * i)) as usize & 0xffff]));
                }
                let take = run.len().min(left);
                writer.write_all(&run[..take])?;
                left -= take;
            }
        }
        writer.into_inner().map_err(|e| e.into_error())?.sync_all()?;
    }
    let index = json!({"metadata": {"total_size": total}, "weight_map": map});
    std::fs::write(dir.join("model.safetensors.index.json"), format!("{index:#}\n"))?;
    println!("{out}: {total} bytes in {count} files");
    Ok(())
}
