//! Reading a tensor of a [`Checkpoint`] a part at a time: run by run, so that what is made of a run finds it in the cache, or a row
//! alone. Not the reading of whole tensors (see `checkpoint.rs`), not the file (see `safetensors.rs`).

use crate::checkpoint::hex;
use crate::tensor::{extend_floats, floats_from_bytes};
use crate::{Checkpoint, CheckpointError};
use sha2::{Digest, Sha256};

impl Checkpoint {
    /// [`Checkpoint::read_f32`] run by run, of `most` values each (the last may have fewer), and [`Checkpoint::sha256`]; of a folder in
    /// one reading, with no more memory than a run.
    ///
    /// # Errors
    /// As these.
    pub fn read_f32_runs(
        &self,
        name: &str,
        most: usize,
        mut take: impl FnMut(&[f32]),
    ) -> Result<String, CheckpointError> {
        if let Some(f) = self.folder()
            && let Some((file, entry)) = f.find(name)
            && let Some(dtype) = entry.dtype.float()
        {
            let (mut hash, mut values) = (Sha256::new(), Vec::with_capacity(most));
            file.read_runs(entry, most.saturating_mul(entry.dtype.size()), |run| {
                hash.update(run);
                values.clear();
                extend_floats(&mut values, run, dtype);
                take(&values);
            })?;
            return Ok(hex(hash));
        }
        self.read_f32(name)?.chunks(most.max(1)).for_each(take);
        self.sha256(name)
    }

    /// The bytes of a tensor of a folder, run by run of `most` (the last may have fewer); `false`, and nothing, for another source.
    ///
    /// # Errors
    /// As [`Checkpoint::read_stored`].
    pub fn read_runs(&self, name: &str, most: usize, take: impl FnMut(&[u8])) -> Result<bool, CheckpointError> {
        let Some(f) = self.folder() else { return Ok(false) };
        let (file, entry) = f.find(name).ok_or_else(|| self.missing(name))?;
        file.read_runs(entry, most, take).map(|()| true)
    }

    /// Asks the system to read a tensor of a folder before it is wanted. A wish: nothing depends on it.
    pub fn read_ahead(&self, name: &str) {
        if let Some(f) = self.folder()
            && let Some((file, entry)) = f.find(name)
        {
            file.read_ahead(entry);
        }
    }

    /// One row of a float tensor of a folder, as [`Checkpoint::read_f32`] gives it, without reading the others; `None` for another
    /// source.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] for a tensor or row that is not there; I/O errors.
    pub fn read_row(&self, name: &str, row: usize) -> Result<Option<Vec<f32>>, CheckpointError> {
        let Some(f) = self.folder() else { return Ok(None) };
        let (file, entry) = f.find(name).ok_or_else(|| self.missing(name))?;
        let Some(dtype) = entry.dtype.float() else { return Ok(None) };
        Ok(Some(floats_from_bytes(&file.read_row(entry, row)?, dtype)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{NamedTensor, TensorData, write_safetensors};
    use dsq_quant::FloatType;

    /// Runs of any length, and rows, are the whole, and the hash is that of the stored bytes.
    #[test]
    fn runs_and_rows_are_the_whole() {
        let dir = tempfile::tempdir().unwrap();
        let name = "lm_head.weight";
        let config = serde_json::json!({
            "model_type": "llama", "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "vocab_size": 7,
            "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 8, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "tie_word_embeddings": false, "hidden_act": "silu",
        });
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        for dtype in FloatType::ALL {
            let float = |name: &str, shape: &[usize]| {
                let data = (0..shape.iter().product::<usize>()).map(|i| dtype.round((i as f32 * 0.7).sin())).collect();
                NamedTensor { name: name.into(), data: TensorData::Float { shape: shape.to_vec(), data, dtype } }
            };
            let mut tensors = vec![
                float(name, &[7, 4]),
                float("model.embed_tokens.weight", &[7, 4]),
                float("model.norm.weight", &[4]),
            ];
            for part in ["self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"] {
                tensors.push(float(&format!("model.layers.0.{part}_proj.weight"), &[4, 4]));
            }
            for norm in ["input_layernorm", "post_attention_layernorm"] {
                tensors.push(float(&format!("model.layers.0.{norm}.weight"), &[4]));
            }
            write_safetensors(&dir.path().join("model.safetensors"), &tensors).unwrap();
            let model = Checkpoint::open(dir.path()).unwrap();
            let (whole, bytes) = (model.read_f32(name).unwrap(), model.read_stored(name).unwrap().1);
            for most in [1, 3, 4, 27, 28, 29, 1000] {
                let (mut got, mut stored, mut longest) = (Vec::new(), Vec::new(), 0);
                let hash = model.read_f32_runs(name, most, |run| {
                    longest = longest.max(run.len());
                    got.extend_from_slice(run);
                });
                assert_eq!((hash.unwrap(), got), (model.sha256(name).unwrap(), whole.clone()), "{dtype} {most}");
                assert_eq!(longest, most.min(28));
                assert!(model.read_runs(name, most, |run| stored.extend_from_slice(run)).unwrap());
                assert_eq!(stored, bytes);
            }
            for row in 0..7 {
                assert_eq!(model.read_row(name, row).unwrap().unwrap(), whole[4 * row..4 * row + 4]);
            }
            let e = model.read_row(name, 7).unwrap_err().to_string();
            assert!(e.contains("expected a row below 7, got 7") && e.contains(name), "{e}");
            assert!(model.read_runs("absent", 8, |_| ()).is_err() && model.read_row("absent", 0).is_err());
        }
    }
}
