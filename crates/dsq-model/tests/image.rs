//! The float forward pass of image models on Burn against transformers and torchvision: logits of pictures of an odd size, and the
//! gradient of the first convolution (tests/golden/image).

use burn::tensor::{Device, Tensor, TensorData};
use dsq_checkpoint::{Checkpoint, SafetensorsFile};
use dsq_model::ImageModel;
use std::path::{Path, PathBuf};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/image")
}

/// The pictures of `make.py` as `[2, c, h, w]`.
fn images(model: &ImageModel, device: &Device) -> Tensor<4> {
    let p = &model.config().preparation;
    let [h, w] = p.size;
    let pixels: Vec<u8> = (0..2 * h * w * 3).map(|i| (i * 7919 % 251) as u8).collect();
    let x = Tensor::<4>::from_data(TensorData::new(p.normalize(&pixels), [2, h, w, 3]), device);
    x.permute([0, 3, 1, 2])
}

fn values<const D: usize>(t: Tensor<D>) -> Vec<f32> {
    t.into_data().convert::<f32>().try_to_vec().unwrap()
}

fn check(model: &Path, golden: &Path) {
    let at = model.display();
    let golden = SafetensorsFile::open(golden).unwrap();
    let ckpt = Checkpoint::open(model).unwrap();
    let device = Device::flex().autodiff();
    let net = ImageModel::from_checkpoint(&ckpt, &device).unwrap();
    let logits = net.forward(images(&net, &device));
    // Other sums than torch's, of the same values: ten times what its own f32 pass is off by. Wrong padding or a wrong epsilon differ
    // by a thousand times that.
    let bound = 10.0 * golden.read_f32("float32_error").unwrap()[0];
    let want = golden.read_f32("logits").unwrap();
    for (got, want) in values(logits.clone()).iter().zip(&want) {
        assert!((got - want).abs() < bound, "{at}: {got} against {want}, bound {bound}");
    }
    let stem = &net.config().layers()[0].module;
    let gradients = (logits.clone() * logits).sum().backward();
    let got = values(net.weight(stem).unwrap().grad(&gradients).unwrap());
    let want = golden.read_f32("stem_gradient").unwrap();
    let largest = want.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(&want) {
        // Some fifty layers forth and back at 2^-24 of each, the same hundredfold.
        assert!((got - want).abs() < 1e-4 * largest, "{at}: gradient {got} against {want}, largest {largest}");
    }
}

#[test]
fn logits_and_gradients_are_those_of_transformers() {
    for name in ["resnet_basic", "resnet_bottleneck", "resnet_bottleneck_first", "mobilenet_same", "mobilenet_half"] {
        let folder = golden().join(name);
        check(&folder, &folder.join("golden.safetensors"));
    }
}

#[test]
fn logits_and_gradients_are_those_of_torchvision() {
    for name in ["torchvision_resnet_basic", "torchvision_resnet_bottleneck"] {
        check(&golden().join(format!("{name}.pth")), &golden().join(format!("{name}.safetensors")));
    }
}
