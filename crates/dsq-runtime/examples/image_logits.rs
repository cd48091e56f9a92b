//! Logits of an image model for given inputs: `image_logits MODEL IMAGES.safetensors OUT.safetensors`. IMAGES has `images` F32 `[m, c, h,
//! w]`, normalized; OUT gets `logits` F32 `[m, classes]`. For tests/conformance, which compares them with onnxruntime; no evaluation.

use dsq_checkpoint::{Checkpoint, ModelConfig, NamedTensor, SafetensorsFile, TensorData, write_safetensors};
use dsq_quant::FloatType;
use dsq_runtime::{CnnRuntime, ImageRuntime};
use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, images, out] = args.as_slice() else { return Err("expected MODEL IMAGES OUT".into()) };
    let ckpt = Checkpoint::open(Path::new(model))?;
    let x = SafetensorsFile::open(Path::new(images))?.read_f32("images")?;
    let (logits, classes) = match ckpt.config() {
        ModelConfig::ResNet(c) => {
            let m = x.len() / (c.in_channels * c.image_size * c.image_size);
            (CnnRuntime::load(&ckpt)?.forward(&x, m)?, c.num_classes)
        }
        ModelConfig::Image(c) => {
            // The runtime has the channels last.
            let (pixels, depth) = (c.preparation.size[0] * c.preparation.size[1], c.channels);
            let m = x.len() / (depth * pixels);
            let at = |i: usize| x[i / (depth * pixels) * depth * pixels + i % depth * pixels + i / depth % pixels];
            let last: Vec<f32> = (0..x.len()).map(at).collect();
            (ImageRuntime::load(&ckpt)?.forward(&last, m)?, c.num_classes)
        }
        ModelConfig::Llama(_) => return Err("expected an image model, got a language model".into()),
    };
    let shape = vec![logits.len() / classes.max(1), classes];
    let data = TensorData::Float { shape, data: logits, dtype: FloatType::F32 };
    write_safetensors(Path::new(out), &[NamedTensor { name: "logits".into(), data }])?;
    Ok(())
}
