//! Two models of one shape exchange parts: how a difference between them is traced to the layer that made it. Parts move, nothing is
//! copied or packed anew, so an exchange costs nothing and a second one puts all back. Not what the parts hold (see `dsq-checkpoint`), and
//! nothing that only a config says: rotary embedding, epsilon and the like stay where they are.

use super::{Layer, LlamaRuntime};
use crate::RuntimeError;
use dsq_kernels::Linear;
use std::mem::swap;

/// A part of a language model that can be exchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ModelPart {
    /// The embedding; of a model with tied embeddings also its head.
    Embedding,
    /// A layer with all that is in it.
    Layer(usize),
    /// Of a layer the linear module with this place in `LlamaConfig::layer_linears`, with its bias.
    Linear(usize, usize),
    /// What else is in a layer: norms, the router, how inputs, keys and values are rounded.
    Rest(usize),
    /// The last norm and the head, where it has weights of its own.
    Output,
}

/// A linear module and its bias, where it can have one.
pub(crate) type WithBias<'a> = (&'a mut Linear, Option<&'a mut Option<Vec<f32>>>);

impl Layer {
    fn linears_mut(&mut self) -> Vec<WithBias<'_>> {
        let mut out = self.attention.linears_mut();
        out.extend(self.feed_forward.linears_mut());
        out
    }
}

impl LlamaRuntime {
    /// Exchanges `part` with `other`. Another call with the same part undoes it.
    ///
    /// # Errors
    /// [`RuntimeError::Input`] for a part that one of them does not have, or that has another shape there. Nothing is changed then.
    pub fn exchange(&mut self, other: &mut Self, part: ModelPart) -> Result<(), RuntimeError> {
        self.check_exchange(other, part)?;
        match part {
            ModelPart::Embedding => swap(&mut self.embedding, &mut other.embedding),
            ModelPart::Layer(i) => swap(&mut self.layers[i], &mut other.layers[i]),
            ModelPart::Linear(i, at) => swap_linears(&mut self.layers[i], &mut other.layers[i], |j| j == at),
            ModelPart::Rest(i) => {
                let (a, b) = (&mut self.layers[i], &mut other.layers[i]);
                swap(a, b);
                swap_linears(a, b, |_| true);
            }
            ModelPart::Output => {
                swap(&mut self.final_norm, &mut other.final_norm);
                swap(&mut self.head, &mut other.head);
                swap(&mut self.head_input, &mut other.head_input);
            }
        }
        Ok(())
    }

    /// Checks the shapes of all that an exchange of `part` would move.
    fn check_exchange(&self, other: &Self, part: ModelPart) -> Result<(), RuntimeError> {
        let shape = |model: &Self| -> Option<Vec<usize>> {
            let c = &model.config;
            let heads = [c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim];
            let of = |l: &Layer| {
                let linears = l.attention.linears().into_iter().chain(l.feed_forward.linears());
                linears.flat_map(|(l, _)| [l.n(), l.k()]).collect::<Vec<_>>()
            };
            Some(match part {
                ModelPart::Embedding => vec![model.embedding.n(), model.embedding.k()],
                ModelPart::Output => {
                    let head = model.head().0;
                    vec![head.n(), head.k(), model.final_norm.len()]
                }
                ModelPart::Layer(i) | ModelPart::Rest(i) => [&heads[..], &of(model.layers.get(i)?)].concat(),
                ModelPart::Linear(i, at) => {
                    let all = of(model.layers.get(i)?);
                    [&heads[..], all.get(2 * at..2 * at + 2)?].concat()
                }
            })
        };
        let (a, b) = (shape(self), shape(other));
        if a.is_some() && a == b {
            return Ok(());
        }
        let problem = format!("{part:?}: expected the same shapes in both, got {a:?} and {b:?}");
        Err(RuntimeError::Input { what: "exchange", problem })
    }
}

/// Exchanges those linear modules of two layers whose place `wanted` names.
fn swap_linears(a: &mut Layer, b: &mut Layer, wanted: impl Fn(usize) -> bool) {
    for (at, ((a, a_bias), (b, b_bias))) in a.linears_mut().into_iter().zip(b.linears_mut()).enumerate() {
        if wanted(at) {
            swap(a, b);
            if let (Some(a), Some(b)) = (a_bias, b_bias) {
                swap(a, b);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{KvPolicy, KvType, Logits};
    use dsq_checkpoint::Checkpoint;
    use std::path::Path;

    fn load(name: &str) -> LlamaRuntime {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name);
        LlamaRuntime::load(&Checkpoint::open(&path).unwrap(), 1).unwrap()
    }

    fn logits(model: &LlamaRuntime) -> Vec<u32> {
        let mut cache = model.new_cache_of(4, KvType::F32, KvPolicy::Full).unwrap();
        model.forward(&[1, 7, 3, 9], &mut cache, Logits::All).unwrap().iter().map(|x| x.to_bits()).collect()
    }

    #[test]
    fn all_parts_together_are_the_other_model_and_a_second_exchange_undoes_it() {
        for name in ["llama_tiny", "llama_tiny_untied", "qwen3_bias_tiny", "mixtral_tiny", "deepseek_v3_tiny"] {
            let (mut a, mut b) = (load(name), load(name));
            b.layers.iter_mut().for_each(|l| l.input_norm.iter_mut().for_each(|x| *x *= 1.5));
            b.final_norm[0] += 1.0;
            let (before, other) = (logits(&a), logits(&b));
            assert_ne!(before, other);
            let layers = a.layers.len();
            let parts = [ModelPart::Embedding, ModelPart::Output].into_iter().chain((0..layers).map(ModelPart::Layer));
            for part in parts {
                a.exchange(&mut b, part).unwrap();
            }
            assert_eq!((logits(&a), logits(&b)), (other.clone(), before.clone()), "{name}");
            // A layer is its linear modules and the rest.
            for i in 0..layers {
                for at in 0..a.config.layer_linears(i).len() {
                    a.exchange(&mut b, ModelPart::Linear(i, at)).unwrap();
                }
                a.exchange(&mut b, ModelPart::Rest(i)).unwrap();
            }
            a.exchange(&mut b, ModelPart::Output).unwrap();
            a.exchange(&mut b, ModelPart::Embedding).unwrap();
            assert_eq!((logits(&a), logits(&b)), (before, other), "{name}");
        }
    }

    #[test]
    fn other_shapes_are_refused() {
        let (mut a, mut b) = (load("llama_tiny"), load("mixtral_tiny"));
        let before = logits(&a);
        for part in [ModelPart::Layer(0), ModelPart::Layer(99), ModelPart::Linear(0, 99)] {
            let err = a.exchange(&mut b, part).unwrap_err().to_string();
            assert!(err.contains("expected the same shapes in both"), "{err}");
        }
        assert_eq!(logits(&a), before);
    }
}
