//! Tests of the network: against torch, by finite differences, and prepare == convert.

use super::*;
use burn::tensor::{Device, Tensor, TensorData};
use dsq_quant::{FloatType, Granularity, ObserverKind, QuantArgs, QuantConfig, QuantScheme};

pub(super) fn config() -> ResNetConfig {
    ResNetConfig {
        in_channels: 1,
        image_size: 12,
        channels: vec![4, 6],
        blocks_per_stage: 1,
        num_classes: 3,
        norm_eps: 1e-5,
        mean: vec![0.0],
        std: vec![1.0],
    }
}

fn settings(placement: BnPlacement) -> QatSettings {
    let scheme = QuantScheme::preset("W4A4", Granularity::PerChannel, FloatType::F32).unwrap();
    let config = QuantConfig::new(scheme, &["re:conv1$".into(), "fc".into()]).unwrap();
    QatSettings { config, placement, observer: ObserverKind::MovingAverage, rate: 0.1, learned: false }
}

pub(super) fn images(m: usize, side: usize, seed: u64, device: &Device) -> Tensor<4> {
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    let data: Vec<f32> = (0..m * side * side).map(|_| rng.random::<f32>() * 2.0 - 0.5).collect();
    Tensor::from_data(TensorData::new(data, [m, 1, side, side]), device)
}

pub(super) fn values<const D: usize>(t: Tensor<D>) -> Vec<f32> {
    t.into_data().try_into_vec().unwrap()
}

/// A network whose statistics, gammas and betas have left their initial values.
pub(super) fn grown(seed: u64) -> ResNet {
    let mut net = ResNet::new(&config(), seed);
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed + 1000);
    for layer in &mut net.layers {
        layer.shift.iter_mut().for_each(|b| *b = rng.random::<f32>() - 0.4);
        if let Some(norm) = &mut layer.norm {
            norm.gamma.iter_mut().for_each(|g| *g = rng.random::<f32>() * 2.0 - 0.5);
            norm.mean.iter_mut().for_each(|m| *m = rng.random::<f32>() - 0.5);
            norm.var.iter_mut().for_each(|v| *v = rng.random::<f32>() * 3.0 + 0.01);
        }
    }
    net
}

/// Such a network, calibrated.
fn seasoned(seed: u64, placement: BnPlacement) -> ResNet {
    let mut net = grown(seed);
    net.prepare(settings(placement)).unwrap();
    let device = Device::flex();
    let mut updates = Updates::default();
    net.forward(&net.leaves(&device), images(4, 12, seed + 7, &device), Pass::Calibrate, &mut updates).unwrap();
    net.apply(updates);
    net
}

pub(super) fn run(net: &ResNet, x: Tensor<4>, pass: Pass) -> Vec<f32> {
    let leaves = net.leaves(&x.device());
    values(net.forward(&leaves, x, pass, &mut Updates::default()).unwrap())
}

#[test]
fn conv_bn_relu_equals_torch() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/resnet/conv_bn_relu.safetensors");
    let golden = golden(path);
    let get = |name: &str| golden.iter().find(|(n, _, _)| n == name).map(|(_, s, d)| (s.clone(), d.clone())).unwrap();
    for stride in [1usize, 2] {
        let get = |name: &str| get(&format!("stride{stride}.{name}"));
        let (shape, weight) = get("conv.weight");
        let layer = Layer {
            module: "conv".into(),
            shape: [shape[0], shape[1], shape[2], shape[3]],
            stride,
            pad: 1,
            weight,
            norm: Some(Norm {
                gamma: get("bn.weight").1,
                mean: get("bn.running_mean").1,
                var: get("bn.running_var").1,
            }),
            shift: get("bn.bias").1,
        };
        let device = Device::flex();
        let (weight, bias) = layer.folded(1e-5);
        let (xs, x) = get("input");
        let x = Tensor::<4>::from_data(TensorData::new(x, [xs[0], xs[1], xs[2], xs[3]]), &device).permute([0, 2, 3, 1]);
        let w = |w: Vec<f32>| Tensor::<4>::from_data(TensorData::new(w, layer.shape), &device);
        let vector = |v: Vec<f32>| Tensor::<1>::from_data(TensorData::new(v, [16]), &device);
        let nchw = |t: Tensor<4>| values(t.permute([0, 3, 1, 2]));
        let close = |got: Vec<f32>, want: Vec<f32>, bound: f32, what: &str| {
            assert_eq!(got.len(), want.len());
            for (g, w) in got.iter().zip(&want) {
                assert!((g - w).abs() <= bound, "{what} stride {stride}: {g} {w}");
            }
        };
        // The convolution: 72 products, each side within 72 roundings of sums below the largest product sum S:
        // |difference| <= 2 * 72 * 2^-24 * S, S <= 72 * max|x| * max|w|.
        let top = |v: &[f32]| v.iter().fold(0.0f32, |a, x| a.max(x.abs()));
        let s = 72.0 * top(&get("input").1) * top(&layer.weight);
        let bound = 2.0 * 72.0 * s / 16_777_216.0;
        close(
            nchw(super::ops::conv2d(x.clone(), w(layer.weight.clone()), stride, 1)),
            get("conv_output").1,
            bound,
            "conv",
        );
        // Folding: a handful of roundings of each weight; the bound above, scaled by the largest factor, and doubled.
        let factor = top(&layer.fold_factor(1e-5).unwrap());
        let y = super::ops::affine(
            super::ops::conv2d(x, w(weight.clone()), stride, 1),
            vector(vec![1.0; 16]),
            vector(bias.clone()),
        );
        close(nchw(y.clone()), get("bn_output").1, 2.0 * bound * factor.max(1.0), "bn");
        close(nchw(burn::tensor::activation::relu(y)), get("output").1, 2.0 * bound * factor.max(1.0), "relu");
        close(weight, get("fused.weight").1, 4.0 * top(&get("fused.weight").1) / 16_777_216.0, "fused weight");
        close(bias, get("fused.bias").1, 1e-6, "fused bias");
    }
}

/// Reads the golden file: name, shape, f32 values.
fn golden(path: &str) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let bytes = std::fs::read(path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    tensors
        .iter()
        .map(|(name, t)| {
            let data = t.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            (name.to_string(), t.shape().to_vec(), data)
        })
        .collect()
}

#[test]
fn prepared_forward_equals_the_converted_layers_bit_for_bit() {
    let device = Device::flex();
    for seed in 0..200 {
        let net = seasoned(seed, BnPlacement::Skipped);
        let converted = net.convert().unwrap();
        // The float twin that holds the dequantized weights must give the prepared network's logits exactly, because scales
        // are applied behind the sums in both; so the codes and scales that the forward pass used are the converted ones.
        let x = images(2, 12, seed + 5000, &device);
        let want = run(&net, x.clone(), Pass::QatEval);
        assert_eq!(twin(&net, &converted, x), want, "seed {seed}");
        assert!(converted.iter().filter(|l| l.matrix.is_some()).count() == 5);
        for layer in converted.iter().filter(|l| l.matrix.is_some()) {
            layer.matrix.as_ref().unwrap().validate().unwrap();
            assert!(layer.activation.is_some());
        }
    }
}

/// A forward pass written from the converted layers alone, in i64 sums.
pub(super) fn twin(net: &ResNet, converted: &[ConvertedLayer], x: Tensor<4>) -> Vec<f32> {
    struct Map {
        h: usize,
        c: usize,
        data: Vec<f32>,
    }
    let layer = |i: usize, x: &Map| -> Map {
        let (l, g) = (&converted[i], &net.layers[i]);
        let [n, c, kh, kw] = g.shape;
        let oh = (x.h + 2 * g.pad - kh) / g.stride + 1;
        let mut data = vec![0.0f32; oh * oh * n];
        for (oy, ox, o) in (0..oh).flat_map(|y| (0..oh).flat_map(move |x| (0..n).map(move |o| (y, x, o)))) {
            let (mut sum, mut float) = (0i64, 0.0f32);
            for (ky, kx, ch) in (0..kh).flat_map(|y| (0..kw).flat_map(move |x| (0..c).map(move |c| (y, x, c)))) {
                let (iy, ix) = (oy * g.stride + ky, ox * g.stride + kx);
                if iy < g.pad || ix < g.pad || iy - g.pad >= x.h || ix - g.pad >= x.h {
                    continue;
                }
                let v = x.data[((iy - g.pad) * x.h + ix - g.pad) * c + ch];
                let at = ((o * c + ch) * kh + ky) * kw + kx;
                match (&l.matrix, &l.activation) {
                    (Some(m), Some((args, p))) => {
                        sum += (i64::from(args.quantize(v, *p)) - i64::from(p.zero)) * i64::from(m.codes[at]);
                    }
                    // The kernel's own order and fused multiply-add.
                    _ => float = v.mul_add(l.weight[at], float),
                }
            }
            data[(oy * oh + ox) * n + o] = match (&l.matrix, &l.activation) {
                (Some(m), Some((_, p))) => sum as f32 * (m.qparams(o).scale * p.scale) + l.bias[o],
                _ => float * 1.0 + l.bias[o],
            };
        }
        Map { h: oh, c: n, data }
    };
    let relu = |mut m: Map| {
        m.data.iter_mut().for_each(|v| *v = v.max(0.0));
        m
    };
    let [m, _, h, _] = x.dims();
    let pixels = values(x);
    let mut logits = Vec::new();
    for i in 0..m {
        let mut x = relu(layer(0, &Map { h, c: 1, data: pixels[i * h * h..(i + 1) * h * h].to_vec() }));
        for b in &net.blocks {
            let y = relu(layer(b.conv1, &x));
            let mut y = layer(b.conv2, &y);
            let skip = b.downsample.map(|d| layer(d, &x));
            let skip = skip.as_ref().unwrap_or(&x);
            y.data.iter_mut().zip(&skip.data).for_each(|(a, b)| *a += b);
            x = relu(y);
        }
        let mut pool = vec![0.0f32; x.c];
        for row in x.data.chunks(x.c) {
            pool.iter_mut().zip(row).for_each(|(p, v)| *p += v);
        }
        pool.iter_mut().for_each(|p| *p *= 1.0 / (x.h * x.h) as f32);
        logits.extend(layer(converted.len() - 1, &Map { h: 1, c: x.c, data: pool }).data);
    }
    logits
}

#[test]
fn folded_fake_quant_gradient_is_that_of_the_clipped_identity() {
    // One quantized layer: y = conv(codes(x), codes(w * f)) * scales + shift. The straight-through estimator makes its
    // gradient that of the same expression with the rounding removed and the clipping kept, evaluated at the rounded
    // operands: d/dw = f * (inside) * sum g * fq(x), and for x likewise.
    let device = Device::flex().autodiff();
    let net = seasoned(3, BnPlacement::Skipped);
    let i = net.blocks[0].conv1;
    let plan = net.prepared.as_ref().unwrap().layers[i].clone();
    let site = &net.prepared.as_ref().unwrap().sites[plan.input.unwrap()];
    let p = site.observer.qparams(&site.args).unwrap();
    let layer = &net.layers[i];
    let [n, c, _, _] = layer.shape;
    let side = 5;
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(9);
    // Wide enough that some inputs clip.
    let xv: Vec<f32> = (0..side * side * c).map(|_| rng.random::<f32>() * 30.0 * p.scale - 8.0 * p.scale).collect();
    let gv: Vec<f32> = (0..side * side * n).map(|_| rng.random::<f32>() - 0.5).collect();
    let x = Tensor::<4>::from_data(TensorData::new(xv.clone(), [1, side, side, c]), &device).require_grad();
    let leaves = net.leaves(&device);
    let y = net.conv_for_test(&leaves, i, x.clone()).unwrap();
    let g = Tensor::<4>::from_data(TensorData::new(gv.clone(), [1, side, side, n]), &device);
    let grads = (y * g).sum().backward();
    let dx: Vec<f32> = x.grad(&grads).unwrap().into_data().try_into_vec().unwrap();
    let all = leaves.gradients(&grads);
    let at: usize = net.layers[..i].iter().map(|l| 2 + usize::from(l.norm.is_some())).sum();
    let (dw, dgamma, dbeta) = (&all[at], &all[at + 1], &all[at + 2]);

    // The clipped identity in f64: rounding offsets frozen where they are, clipped operands constant.
    let args = plan.scheme.unwrap().weights;
    let (folded, _) = layer.folded(1e-5);
    let k = folded.len() / n;
    let params = dsq_quant::QuantizedMatrix::qparams_of(&folded, n, k, args).unwrap();
    let frozen = |v: f32, args: &QuantArgs, p: dsq_quant::QParams| {
        let (value, inside) = args.fake_quantize(v, p);
        (f64::from(value) - if inside { f64::from(v) } else { 0.0 }, inside)
    };
    let xo: Vec<_> = xv.iter().map(|&v| frozen(v, &site.args, p)).collect();
    let wo: Vec<_> = folded.iter().enumerate().map(|(j, &v)| frozen(v, &args, params[j / k])).collect();
    assert!(xo.iter().any(|o| !o.1) && xo.iter().any(|o| o.1) && wo.iter().any(|o| !o.1), "both sides of the clip");
    let norm = layer.norm.as_ref().unwrap();
    let loss = |x: &[f64], w: &[f64], gamma: &[f64], beta: &[f64]| -> f64 {
        let factor: Vec<f64> = (0..n).map(|j| gamma[j] / f64::from((norm.var[j] + 1e-5).sqrt())).collect();
        let mut total = 0.0;
        for (oy, ox, o) in (0..side).flat_map(|y| (0..side).flat_map(move |x| (0..n).map(move |o| (y, x, o)))) {
            let mut sum = 0.0;
            for (ky, kx, ch) in (0..3).flat_map(|y| (0..3).flat_map(move |x| (0..c).map(move |c| (y, x, c)))) {
                let (iy, ix) = (oy + ky, ox + kx);
                if iy < 1 || ix < 1 || iy > side || ix > side {
                    continue;
                }
                let xi = ((iy - 1) * side + ix - 1) * c + ch;
                let wi = ((o * c + ch) * 3 + ky) * 3 + kx;
                let xq = xo[xi].0 + if xo[xi].1 { x[xi] } else { 0.0 };
                let wq = wo[wi].0 + if wo[wi].1 { w[wi] * factor[o] } else { 0.0 };
                sum += xq * wq;
            }
            let y = sum + beta[o] - f64::from(norm.mean[o]) * factor[o];
            total += y * f64::from(gv[(oy * side + ox) * n + o]);
        }
        total
    };
    let wide = |v: &[f32]| v.iter().map(|&v| f64::from(v)).collect::<Vec<f64>>();
    let (x, w, gamma, beta) = (wide(&xv), wide(&layer.weight), wide(&norm.gamma), wide(&layer.shift));
    let check = |got: &[f32], v: &[f64], f: &dyn Fn(&[f64]) -> f64, what: &str| {
        let scale = got.iter().fold(1e-3f32, |a, g| a.max(g.abs()));
        for (i, g) in got.iter().enumerate() {
            let h = 1e-6;
            let mut u = v.to_vec();
            u[i] += h;
            let up = f(&u);
            u[i] -= 2.0 * h;
            let want = (up - f(&u)) / (2.0 * h);
            assert!((f64::from(*g) - want).abs() < 2e-5 * f64::from(scale), "{what} {i}: {g} {want}");
        }
    };
    check(&dx, &x, &|v| loss(v, &w, &gamma, &beta), "x");
    check(dw, &w, &|v| loss(&x, v, &gamma, &beta), "weight");
    check(dgamma, &gamma, &|v| loss(&x, &w, v, &beta), "gamma");
    check(dbeta, &beta, &|v| loss(&x, &w, &gamma, v), "beta");
}

#[test]
fn float_gradients_equal_finite_differences() {
    let device = Device::flex().autodiff();
    let mut net = ResNet::new(&config(), 5);
    let x = images(3, 12, 1, &device);
    let loss = |net: &ResNet| {
        let leaves = net.leaves(&device);
        let y = net.forward(&leaves, x.clone(), Pass::FloatTrain, &mut Updates::default()).unwrap();
        let weights: Vec<f32> = (0..9).map(|i| (i as f32 * 0.9).sin()).collect();
        ((y * Tensor::from_data(TensorData::new(weights, [3, 3]), &device)).sum(), leaves)
    };
    let (l, leaves) = loss(&net);
    let grads = leaves.gradients(&l.backward());
    for (p, grad) in grads.iter().enumerate() {
        let norm = grad.iter().map(|g| g * g).sum::<f32>().sqrt();
        // Along the gradient itself the slope is its norm: one number checks all of a parameter's entries. Each operation
        // has its own exact test; this one looks for a wrong or missing path, which changes the slope by its whole share.
        // A step of 1e-3 in f32 leaves about 2^-24 * 50 / 1e-3 = 3e-3 of rounding, and ReLUs that switch within the step.
        let h = 1e-3;
        let shifted = |net: &mut ResNet, by: f32| {
            let before = net.params_mut()[p].data.clone();
            net.params_mut()[p].data.iter_mut().zip(grad).for_each(|(w, g)| *w += by * g / norm.max(1e-6));
            let l = f64::from(values(loss(net).0)[0]);
            *net.params_mut()[p].data = before;
            l
        };
        let slope = (shifted(&mut net, h) - shifted(&mut net, -h)) / (2.0 * f64::from(h));
        assert!((slope - f64::from(norm)).abs() < 0.05 * f64::from(norm) + 0.003, "{p}: {slope} {norm}");
    }
}

#[test]
fn live_statistics_do_not_move_what_folding_computes() {
    // With batch statistics equal to the running ones, the live QAT pass and the frozen one are the same function up to
    // rounding: run the live pass, put its statistics in (momentum 1), and compare.
    let device = Device::flex().autodiff();
    let mut net = seasoned(11, BnPlacement::Skipped);
    let x = images(6, 12, 4, &device);
    for layer in &mut net.layers {
        if let Some(norm) = &mut layer.norm {
            norm.gamma.iter_mut().for_each(|g| *g = g.abs() + 0.2);
        }
    }
    let i = net.blocks[0].conv1;
    let leaves = net.leaves(&device);
    let live = Pass::QatTrain { bn_frozen: false, ranges_frozen: true };
    let mut updates = Updates::default();
    net.forward(&leaves, x.clone(), live, &mut updates).unwrap();
    assert!(updates.norm_layers().contains(&i) && updates.norm_layers().len() == 6);
    let before = net.clone();
    net.apply(updates);
    assert_ne!(before.layers[i].norm, net.layers[i].norm);
    // Frozen passes leave the statistics alone.
    let mut updates = Updates::default();
    net.forward(&leaves, x, Pass::QatTrain { bn_frozen: true, ranges_frozen: true }, &mut updates).unwrap();
    assert!(updates.norm_layers().is_empty());
}

#[test]
fn one_outlier_ruins_the_whole_range_and_not_the_percentile() {
    let device = Device::flex();
    // 32 pictures, one of which has one pixel that is no part of the picture.
    let mut data = values(images(32, 12, 5, &device));
    data[7 * 144 + 70] = 2000.0;
    let clean = images(16, 12, 6, &device);
    let calibrated = |observer: ObserverKind, batches: usize| {
        let mut net = grown(3);
        net.prepare(QatSettings { observer, ..settings(BnPlacement::Skipped) }).unwrap();
        for batch in data.chunks(data.len() / batches) {
            let mut updates = Updates::default();
            net.logits(batch, Pass::Calibrate, &mut updates).unwrap();
            net.apply(updates);
        }
        net
    };
    let error = |net: &ResNet| {
        let (got, want) = (run(net, clean.clone(), Pass::QatEval), run(net, clean.clone(), Pass::FloatEval));
        let square = |x: &mut dyn Iterator<Item = f32>| x.map(|v| f64::from(v).powi(2)).sum::<f64>();
        square(&mut got.iter().zip(&want).map(|(a, b)| a - b)) / square(&mut want.iter().copied())
    };
    let (whole, most) = (calibrated(ObserverKind::MinMax, 1), calibrated(ObserverKind::Percentile(98.0), 1));
    let scales = |net: &ResNet| -> Vec<f32> {
        net.convert().unwrap().iter().filter_map(|l| l.activation.map(|(_, p)| p.scale)).collect()
    };
    assert!(
        scales(&whole).iter().zip(scales(&most)).all(|(w, m)| *w > 5.0 * m),
        "{:?} {:?}",
        scales(&whole),
        scales(&most)
    );
    assert!(error(&whole) > 3.0 * error(&most), "{} against {}", error(&whole), error(&most));

    // Batches give the histogram of all pictures at once, a state gives the network it came from, and values that are not finite
    // are refused.
    let net = calibrated(ObserverKind::Percentile(98.0), 8);
    assert_eq!(net.state(), most.state());
    let mut again = grown(4);
    again.prepare(net.settings().unwrap().clone()).unwrap();
    again.load_state(&net.state()).unwrap();
    assert_eq!(again.state(), net.state());
    assert_eq!(run(&again, clean.clone(), Pass::QatEval), run(&net, clean.clone(), Pass::QatEval));
    let mut broken = net.state();
    let at = broken.iter().position(|(name, _)| name.ends_with(".range")).unwrap();
    broken[at].1.pop();
    assert_eq!(again.load_state(&broken).unwrap_err(), broken[at].0);
    let mut bad = data.clone();
    bad[3] = f32::NAN;
    let e = net.logits(&bad, Pass::Calibrate, &mut Updates::default()).unwrap_err();
    assert!(matches!(e, dsq_quant::QuantError::NonFinite { .. }), "{e}");
    let out_of_range = QatSettings { observer: ObserverKind::Percentile(101.0), ..settings(BnPlacement::Skipped) };
    assert!(grown(4).prepare(out_of_range).unwrap_err().to_string().contains("percentile"));
}

#[test]
fn the_wrong_way_is_refused_by_convert_and_state_round_trips() {
    let wrong = seasoned(1, BnPlacement::BnObserved);
    let err = wrong.convert().unwrap_err();
    assert!(err.to_string().contains("batch norm observed"), "{err}");
    assert!(ResNet::new(&config(), 1).convert().is_err());
    let net = seasoned(2, BnPlacement::ConvAndBnObserved);
    let mut again = ResNet::new(&config(), 99);
    again.prepare(settings(BnPlacement::ConvAndBnObserved)).unwrap();
    again.load_state(&net.state()).unwrap();
    assert_eq!(again.state(), net.state());
    let device = Device::flex();
    let x = images(2, 12, 3, &device);
    assert_eq!(run(&again, x.clone(), Pass::QatEval), run(&net, x, Pass::QatEval));
    assert_eq!(again.load_state(&net.state()[1..]).unwrap_err(), "conv1.weight");
}
