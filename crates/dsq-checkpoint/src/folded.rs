//! The float weight and bias of a convolution with its batch norm folded in, as both calibration and the runtime start from
//! them. Not a quantization.

use crate::{Checkpoint, CheckpointError, ConvLayer, LinearWeight, ModelConfig};

impl Checkpoint {
    /// The variances of a batch norm, `[n]`.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] for one below 0 or not finite; I/O errors.
    pub(crate) fn variances(&self, name: &str) -> Result<Vec<f32>, CheckpointError> {
        let var = self.read_f32(name)?;
        match var.iter().position(|v| !(*v >= 0.0 && v.is_finite())) {
            None => Ok(var),
            Some(i) => {
                let problem = format!("expected variances, finite and not below 0, got {} at index {i}", var[i]);
                Err(self.invalid(name, problem))
            }
        }
    }

    /// Weight `[n, c, kh, kw]` and bias `[n]` of a layer of an image model: `w * gamma / sqrt(var + eps)` and
    /// `beta - mean * gamma / sqrt(var + eps)`, computed in f64 and rounded once; as stored where there is no batch norm.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] for tensors that are absent, a variance below 0, or another architecture; I/O errors.
    pub fn folded(&self, layer: &ConvLayer) -> Result<(Vec<f32>, Vec<f32>), CheckpointError> {
        let ModelConfig::Image(config) = self.config() else {
            return Err(self.invalid("model_type", "expected an image model, got another architecture"));
        };
        let weight = self.linear(&layer.module)?;
        let Some(norm) = layer.norm.as_ref().filter(|_| config.batch_norm) else {
            let bias = self.bias(&layer.module)?.ok_or_else(|| self.missing(&format!("{}.bias", layer.module)))?;
            return Ok((weight.into_f32(), bias));
        };
        let LinearWeight::Float { data: mut weight, .. } = weight else {
            return Err(self.invalid(&layer.module, "expected a float weight in front of batch norm, got codes"));
        };
        let read = |part: &str| self.read_f32(&format!("{norm}.{part}"));
        let (gamma, beta, mean) = (read("weight")?, read("bias")?, read("running_mean")?);
        let var = self.variances(&format!("{norm}.running_var"))?;
        let k = weight.len() / gamma.len().max(1);
        let mut bias = Vec::with_capacity(gamma.len());
        for (i, row) in weight.chunks_exact_mut(k.max(1)).enumerate() {
            let factor = f64::from(gamma[i]) / (f64::from(var[i]) + f64::from(config.norm_eps)).sqrt();
            row.iter_mut().for_each(|w| *w = (f64::from(*w) * factor) as f32);
            bias.push((f64::from(beta[i]) - f64::from(mean[i]) * factor) as f32);
        }
        Ok((weight, bias))
    }
}
