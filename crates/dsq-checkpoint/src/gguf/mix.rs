//! The kinds of GGUF file that dsq writes, and which type each tensor of such a file gets: what llama.cpp's quantizer takes
//! without an importance matrix (`llama-quant.cpp`, `llama_tensor_get_type`). Not the quantization itself.

use super::dequant::GgmlType;
use super::llama::expected_tensors;
use crate::LlamaConfig;
use dsq_quant::GgufGrid;

/// A kind of GGUF file, named as llama.cpp names it (`general.file_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GgufType {
    /// Matrices in f16.
    F16,
    /// Matrices in `Q8_0`.
    Q8_0,
    /// Matrices in `Q4_0`; the output matrix (a tied embedding) in `Q6_K`.
    Q4_0,
    /// Matrices in `Q4_1`; the output matrix as in [`GgufType::Q4_0`].
    Q4_1,
    /// Matrices in `Q4_K`; the output matrix, and values and down projections of about half of the layers, in `Q6_K`.
    Q4KM,
}

impl GgufType {
    /// Every kind.
    pub const ALL: [GgufType; 5] = [GgufType::F16, GgufType::Q8_0, GgufType::Q4_0, GgufType::Q4_1, GgufType::Q4KM];

    /// llama.cpp's name: `Q4_0`, `Q4_K_M`.
    pub fn name(self) -> &'static str {
        match self {
            GgufType::Q4KM => "Q4_K_M",
            other => other.matrices().name(),
        }
    }

    /// The number in `general.file_type`.
    pub(crate) fn file_type(self) -> u32 {
        match self {
            GgufType::F16 => 1,
            GgufType::Q4_0 => 2,
            GgufType::Q4_1 => 3,
            GgufType::Q8_0 => 7,
            GgufType::Q4KM => 15,
        }
    }

    /// The type of most matrices.
    pub(crate) fn matrices(self) -> GgmlType {
        match self {
            GgufType::F16 => GgmlType::F16,
            GgufType::Q8_0 => GgmlType::Q8_0,
            GgufType::Q4_0 => GgmlType::Q4_0,
            GgufType::Q4_1 => GgmlType::Q4_1,
            GgufType::Q4KM => GgmlType::Q4K,
        }
    }

    /// The type of the tensor that is called `name` in the file and has rows of `columns` values (0: it is no matrix, and stays
    /// F32). A K-quant whose blocks of 256 do not divide a row becomes `Q5_0` (`Q4_K`) or `Q8_0` (`Q6_K`), and F16 where
    /// blocks of 32 do not either. `None`: no block of this kind divides the row, and llama.cpp knows no other type for it.
    ///
    /// One thing is not done: of models of 80 layers llama.cpp stores the values as `Q5_K`, which dsq does not write.
    pub(crate) fn of_tensor(self, name: &str, columns: usize, config: &LlamaConfig) -> Option<GgmlType> {
        if columns == 0 {
            return Some(GgmlType::F32);
        }
        let layer = || name.strip_prefix("blk.").and_then(|r| r.split('.').next()).and_then(|i| i.parse().ok());
        let more_bits = |i: usize| {
            let n = config.num_hidden_layers;
            i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2
        };
        let output = name == "output.weight" || (name == "token_embd.weight" && config.tie_word_embeddings);
        let sensitive = name.ends_with(".attn_v.weight") || name.ends_with(".ffn_down.weight");
        let wanted = match self.matrices() {
            plain @ (GgmlType::F16 | GgmlType::Q8_0) => plain,
            _ if output => GgmlType::Q6K,
            GgmlType::Q4K if sensitive && layer().is_some_and(more_bits) => GgmlType::Q6K,
            other => other,
        };
        let divides = |ty: GgmlType| columns.is_multiple_of(ty.block_len());
        match wanted {
            _ if divides(wanted) => Some(wanted),
            GgmlType::Q4K | GgmlType::Q6K => {
                let smaller = if wanted == GgmlType::Q4K { GgmlType::Q5_0 } else { GgmlType::Q8_0 };
                Some(if divides(smaller) { smaller } else { GgmlType::F16 })
            }
            _ => None,
        }
    }
}

impl GgufType {
    /// The blocks that each linear layer of a model gets in such a file, by its module name; none where they are plain floats.
    pub fn grids(self, config: &LlamaConfig) -> Vec<(String, GgufGrid)> {
        let grid = |file: &str, shape: &[usize]| self.of_tensor(file, *shape.get(1)?, config)?.grid();
        let all = expected_tensors(config).into_iter().filter(|(file, _)| file != "token_embd.weight");
        all.filter_map(|(file, t)| {
            let module = t.name.strip_suffix(".weight")?.to_owned();
            Some((module, grid(&file, &t.shape)?))
        })
        .collect()
    }
}

impl serde::Serialize for GgufType {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl std::str::FromStr for GgufType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|t| t.name().eq_ignore_ascii_case(text));
        found.ok_or_else(|| format!("expected one of {}, got {text}", Self::ALL.map(Self::name).join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(layers: usize, tied: bool) -> LlamaConfig {
        LlamaConfig {
            model_type: "llama".into(),
            hidden_size: 256,
            intermediate_size: 512,
            num_hidden_layers: layers,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 64,
            vocab_size: 100,
            max_position_embeddings: 64,
            rms_norm_eps: 1e-5,
            rope_theta: 1e4,
            rope_scaling: None,
            windows: Vec::new(),
            experts: None,
            latent: None,
            biases: Default::default(),
            tie_word_embeddings: tied,
            bos_token_id: None,
            eos_token_ids: vec![],
            pad_token_id: None,
        }
    }

    #[test]
    fn q4_k_m_gives_more_bits_to_the_layers_of_llama_cpp() {
        // Of 32 layers: the first 4, the last 4, and every third between.
        let c = config(32, false);
        let six: Vec<usize> = (0..32)
            .filter(|i| GgufType::Q4KM.of_tensor(&format!("blk.{i}.ffn_down.weight"), 512, &c) == Some(GgmlType::Q6K))
            .collect();
        assert_eq!(six, [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]);
        for (name, columns, want) in [
            ("output.weight", 256, GgmlType::Q6K),
            ("token_embd.weight", 256, GgmlType::Q4K),
            ("blk.4.attn_q.weight", 256, GgmlType::Q4K),
            ("blk.6.attn_v.weight", 256, GgmlType::Q6K),
            ("blk.6.attn_v.weight", 288, GgmlType::Q8_0),
            ("blk.4.attn_v.weight", 288, GgmlType::Q5_0),
            ("blk.4.attn_v.weight", 48, GgmlType::F16),
            ("blk.4.attn_norm.weight", 0, GgmlType::F32),
        ] {
            assert_eq!(GgufType::Q4KM.of_tensor(name, columns, &c), Some(want), "{name} {columns}");
        }
        assert_eq!(GgufType::Q4KM.of_tensor("token_embd.weight", 256, &config(32, true)), Some(GgmlType::Q6K));
    }

    #[test]
    fn plain_kinds_keep_the_output_matrix_finer_and_refuse_rows_that_no_block_divides() {
        let c = config(2, true);
        assert_eq!(GgufType::Q4_0.of_tensor("token_embd.weight", 256, &c), Some(GgmlType::Q6K));
        assert_eq!(GgufType::Q4_0.of_tensor("token_embd.weight", 96, &c), Some(GgmlType::Q8_0));
        assert_eq!(GgufType::Q8_0.of_tensor("token_embd.weight", 256, &c), Some(GgmlType::Q8_0));
        assert_eq!(GgufType::Q4_1.of_tensor("token_embd.weight", 96, &config(2, false)), Some(GgmlType::Q4_1));
        assert_eq!(GgufType::Q4_0.of_tensor("blk.0.attn_q.weight", 48, &c), None);
        assert_eq!(GgufType::F16.of_tensor("blk.0.attn_q.weight", 48, &c), Some(GgmlType::F16));
        assert_eq!("q4_k_m".parse(), Ok(GgufType::Q4KM));
        assert!("Q5_K_M".parse::<GgufType>().unwrap_err().contains("Q4_K_M, got Q5_K_M"));
    }
}
