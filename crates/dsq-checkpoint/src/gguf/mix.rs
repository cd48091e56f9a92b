//! The kinds of GGUF file that dsq writes, and which type each tensor of such a file gets: what llama.cpp's quantizer takes
//! without an importance matrix (`llama-quant.cpp`, `llama_tensor_get_type`). Not the quantization itself.

use super::arch::Arch;
use super::dequant::GgmlType;
use super::layout::{Layout, file_tensors};
use crate::LlamaConfig;
use dsq_quant::GgufGrid;

/// A kind of GGUF file, named as llama.cpp names it (`general.file_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GgufType {
    /// Everything in f32.
    F32,
    /// Matrices in bf16.
    Bf16,
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
    pub const ALL: [GgufType; 7] =
        [GgufType::F32, GgufType::Bf16, GgufType::F16, GgufType::Q8_0, GgufType::Q4_0, GgufType::Q4_1, GgufType::Q4KM];

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
            GgufType::F32 => 0,
            GgufType::Bf16 => 32,
            GgufType::F16 => 1,
            GgufType::Q4_0 => 2,
            GgufType::Q4_1 => 3,
            GgufType::Q8_0 => 7,
            GgufType::Q4KM => 15,
        }
    }

    /// Whether most matrices are in blocks, and not plain floats.
    pub fn has_blocks(self) -> bool {
        self.matrices().grid().is_some()
    }

    /// The type of most matrices.
    pub(crate) fn matrices(self) -> GgmlType {
        match self {
            GgufType::F32 => GgmlType::F32,
            GgufType::Bf16 => GgmlType::Bf16,
            GgufType::F16 => GgmlType::F16,
            GgufType::Q8_0 => GgmlType::Q8_0,
            GgufType::Q4_0 => GgmlType::Q4_0,
            GgufType::Q4_1 => GgmlType::Q4_1,
            GgufType::Q4KM => GgmlType::Q4K,
        }
    }

    /// The type of the tensor that is called `name` in the file and has rows of `columns` values (0: it is no matrix, and stays
    /// F32). A K-quant whose blocks of 256 do not divide a row becomes `Q5_0` (`Q4_K`), `Q5_1` (`Q5_K`) or `Q8_0` (`Q6_K`), and F16 where
    /// blocks of 32 do not either. `None`: no block of this kind divides the row, and llama.cpp knows no other type for it.
    pub(crate) fn of_tensor(self, name: &str, columns: usize, config: &LlamaConfig) -> Option<GgmlType> {
        if columns == 0 || name.ends_with(".ffn_gate_inp.weight") {
            return Some(GgmlType::F32);
        }
        let layer = || name.strip_prefix("blk.").and_then(|r| r.split('.').next()).and_then(|i| i.parse().ok());
        let more_bits = |i: usize| {
            let n = config.num_hidden_layers;
            i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2
        };
        let output = name == "output.weight" || (name == "token_embd.weight" && config.tie_word_embeddings);
        let more_bits = layer().is_some_and(more_bits);
        let part = name.strip_suffix(".weight").and_then(|n| n.rsplit('.').next()).unwrap_or_default();
        // Mixtral 8x7B and 8x22B: llama.cpp spends more on attention, a small share of their weights.
        let eight = config.experts.is_some_and(|e| e.count == 8);
        // Models of 70 billion weights, whose values serve eight query heads each.
        let grouped = config.num_attention_heads != config.num_key_value_heads;
        let seventy = config.num_hidden_layers == 80
            && match Arch::of(config) {
                Arch::Llama => grouped,
                other => other == Arch::Qwen2,
            };
        let wanted = match (self.matrices(), part) {
            (plain @ (GgmlType::F32 | GgmlType::Bf16 | GgmlType::F16 | GgmlType::Q8_0), _) => plain,
            _ if output => GgmlType::Q6K,
            (_, "attn_v" | "attn_k") if eight => GgmlType::Q8_0,
            (GgmlType::Q4K, "attn_output") if eight => GgmlType::Q5K,
            (GgmlType::Q4K, "attn_v" | "attn_kv_b" | "ffn_down" | "ffn_down_exps" | "ffn_down_shexp") if more_bits => {
                GgmlType::Q6K
            }
            (GgmlType::Q4K, "attn_v") if seventy => GgmlType::Q5K,
            (other, _) => other,
        };
        let divides = |ty: GgmlType| columns.is_multiple_of(ty.block_len());
        match wanted {
            _ if divides(wanted) => Some(wanted),
            GgmlType::Q4K | GgmlType::Q5K | GgmlType::Q6K => {
                let smaller = match wanted {
                    GgmlType::Q4K => GgmlType::Q5_0,
                    GgmlType::Q5K => GgmlType::Q5_1,
                    _ => GgmlType::Q8_0,
                };
                Some(if divides(smaller) { smaller } else { GgmlType::F16 })
            }
            _ => None,
        }
    }
}

impl GgufType {
    /// The blocks that each linear layer of a model gets in such a file, by its module name; none where they are plain floats, or
    /// blocks of two tensors.
    pub fn grids(self, config: &LlamaConfig) -> Vec<(String, GgufGrid)> {
        let mut out = Vec::new();
        for t in file_tensors(config, Layout { split_kv_b: true, rope_factors: false }) {
            let grid = self.of_tensor(&t.file, t.columns(), config).and_then(GgmlType::grid);
            if let Some(grid) = grid.filter(|_| t.file != "token_embd.weight" && !t.is_half()) {
                out.extend(t.parts.iter().filter_map(|name| Some((name.strip_suffix(".weight")?.to_owned(), grid))));
            }
        }
        out
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
    use crate::{Experts, Routing, Scores};

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
    fn experts_and_large_models_have_types_of_their_own() {
        let routing = Routing { per_token: 2, scores: Scores::Softmax, groups: None, normalized: true, scale: 1.0 };
        let experts = |count| Experts { count, width: 512, shared: 0, first_layer: 0, every: 1, routing };
        let mut c = config(32, false);
        c.model_type = "mixtral".into();
        c.experts = Some(experts(8));
        for (name, columns, [four, four_k]) in [
            ("blk.9.attn_v.weight", 256, [GgmlType::Q8_0; 2]),
            ("blk.0.attn_k.weight", 256, [GgmlType::Q8_0; 2]),
            ("blk.0.attn_output.weight", 256, [GgmlType::Q4_0, GgmlType::Q5K]),
            ("blk.0.attn_output.weight", 288, [GgmlType::Q4_0, GgmlType::Q5_1]),
            ("blk.0.attn_q.weight", 256, [GgmlType::Q4_0, GgmlType::Q4K]),
            ("blk.0.ffn_gate_inp.weight", 256, [GgmlType::F32; 2]),
            ("blk.0.ffn_down_exps.weight", 512, [GgmlType::Q4_0, GgmlType::Q6K]),
            ("blk.4.ffn_down_exps.weight", 512, [GgmlType::Q4_0, GgmlType::Q4K]),
        ] {
            assert_eq!(GgufType::Q4_0.of_tensor(name, columns, &c), Some(four), "{name}");
            assert_eq!(GgufType::Q4KM.of_tensor(name, columns, &c), Some(four_k), "{name}");
        }
        c.experts = Some(experts(6));
        assert_eq!(GgufType::Q4KM.of_tensor("blk.4.attn_k.weight", 256, &c), Some(GgmlType::Q4K));
        // Of 80 layers: 70 billion weights, in llama with grouped heads only.
        let mut c = config(80, false);
        let values = |c: &LlamaConfig| GgufType::Q4KM.of_tensor("blk.10.attn_v.weight", 256, c);
        assert_eq!(values(&c), Some(GgmlType::Q5K));
        c.num_key_value_heads = 4;
        assert_eq!(values(&c), Some(GgmlType::Q4K));
        c.model_type = "qwen2".into();
        assert_eq!(values(&c), Some(GgmlType::Q5K));
        c.model_type = "qwen3".into();
        assert_eq!(values(&c), Some(GgmlType::Q4K));
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
