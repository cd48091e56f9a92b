//! Tests of learned grids: prepare == convert over many seeds, gradients by finite differences of the clipped identity,
//! where they start, and what is refused.

use super::tests::{config, grown, images, run, twin, values};
use super::*;
use burn::tensor::{Device, Tensor, TensorData};
use dsq_quant::{
    FloatType, Granularity, Mapping, ObserverKind, QParams, QuantArgs, QuantConfig, QuantError, QuantScheme,
};

fn settings(scheme: QuantScheme, ignore: &[&str]) -> QatSettings {
    let ignore: Vec<String> = ignore.iter().map(|s| s.to_string()).collect();
    QatSettings {
        config: QuantConfig::new(scheme, &ignore).unwrap(),
        placement: BnPlacement::Skipped,
        observer: ObserverKind::MovingAverage,
        rate: 0.1,
        learned: true,
    }
}

fn scheme(name: &str, granularity: Granularity, dtype: FloatType) -> QuantScheme {
    QuantScheme::preset(name, granularity, dtype).unwrap()
}

/// A network with learned grids that have left the place where they started.
fn learned(seed: u64, scheme: QuantScheme, ignore: &[&str]) -> ResNet {
    let mut net = grown(seed);
    if seed.is_multiple_of(5) {
        net.layers[1].norm.as_mut().unwrap().gamma[0] = 0.0;
    }
    net.prepare(settings(scheme, ignore)).unwrap();
    net.start_grids(&values(images(4, 12, seed + 7, &Device::flex()))).unwrap();
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed + 31);
    for param in net.params_mut() {
        match param.grid {
            None => {}
            Some(GridPart::Scale) => param.data.iter_mut().for_each(|s| *s *= 0.6 + 0.6 * rng.random::<f32>()),
            Some(GridPart::Zero { .. }) => param.data.iter_mut().for_each(|z| *z += 2.0 * rng.random::<f32>() - 1.0),
        }
    }
    net
}

#[test]
fn the_forward_pass_equals_the_converted_layers_bit_for_bit() {
    let float_ends: &[&str] = &["re:conv1$", "fc"];
    let device = Device::flex();
    for (seeds, name, granularity, dtype, ignore) in [
        (100, "W4A4", Granularity::PerChannel, FloatType::F32, float_ends),
        (40, "W2A4", Granularity::PerChannel, FloatType::Bf16, float_ends),
        (20, "W2A4", Granularity::PerTensor, FloatType::F16, float_ends),
        (40, "W4A4", Granularity::PerChannel, FloatType::F32, &[]),
        (20, "W8A8", Granularity::PerChannel, FloatType::F32, &[]),
        (10, "W4A8", Granularity::PerChannel, FloatType::Bf16, &[]),
    ] {
        for seed in 0..seeds {
            let net = learned(seed, scheme(name, granularity, dtype), ignore);
            let converted = net.convert().unwrap();
            let x = images(2, 12, seed + 5000, &device);
            let want = run(&net, x.clone(), Pass::QatEval);
            // Per tensor, `twin` would look for a scale of each channel.
            if granularity == Granularity::PerChannel {
                assert_eq!(twin(&net, &converted, x.clone()), want, "{name} seed {seed}");
            }
            assert!(want.iter().all(|v| v.is_finite()));
            for layer in converted.iter().filter(|l| l.matrix.is_some()) {
                layer.matrix.as_ref().unwrap().validate().unwrap();
            }
            // A training step with frozen statistics sees the same values.
            let frozen = Pass::QatTrain { bn_frozen: true, ranges_frozen: false };
            assert_eq!(run(&net, x, frozen), want);
        }
    }
}

#[test]
fn grids_start_where_the_error_is_least_and_the_state_round_trips() {
    let device = Device::flex();
    let scheme = scheme("W4A4", Granularity::PerChannel, FloatType::F32);
    let mut net = grown(4);
    net.prepare(settings(scheme, &[])).unwrap();
    let pictures = values(images(4, 12, 3, &device));
    net.start_grids(&pictures).unwrap();
    for layer in net.convert().unwrap() {
        let (matrix, (args, p)) = (layer.matrix.unwrap(), layer.activation.unwrap());
        let own = dsq_quant::QuantizedMatrix::quantize(&layer.weight, matrix.n, matrix.k, matrix.args).unwrap();
        let error = |m: &dsq_quant::QuantizedMatrix| -> f64 {
            m.dequantize().iter().zip(&layer.weight).map(|(a, b)| f64::from(a - b).powi(2)).sum()
        };
        // The scale is a product of two rounded factors, so a hair off the candidate that was tried.
        assert!(error(&matrix) <= error(&own) * 1.0001, "{}", layer.module);
        // Only the pictures have a sign.
        assert_eq!(p.zero == args.qtype.qmin(), layer.module != "conv1", "{}", layer.module);
    }
    let state = net.state();
    let mut again = ResNet::new(&config(), 99);
    again.prepare(settings(scheme, &[])).unwrap();
    again.load_state(&state).unwrap();
    assert_eq!(again.state(), state);
    let x = images(2, 12, 3, &device);
    assert_eq!(run(&again, x.clone(), Pass::QatEval), run(&net, x, Pass::QatEval));
    let without: Vec<_> = state.iter().filter(|(n, _)| n != "fc.input.grid.scale").cloned().collect();
    assert_eq!(again.load_state(&without).unwrap_err(), "fc.input.grid.scale");
    // Grids that were never started are not a number, and nothing ships.
    let mut never = grown(4);
    never.prepare(settings(scheme, &[])).unwrap();
    assert!(matches!(never.convert().unwrap_err(), QuantError::BadQParam { .. }));
}

#[test]
fn what_cannot_be_learned_is_refused_by_name() {
    let good = scheme("W4A4", Granularity::PerChannel, FloatType::F32);
    let mut net = ResNet::new(&config(), 1);
    let mut refused = |s: QatSettings, word: &str| {
        let e = net.prepare(s).unwrap_err().to_string();
        assert!(e.contains(word), "{e}");
    };
    let observed = QatSettings { placement: BnPlacement::ConvObserved, ..settings(good, &[]) };
    refused(observed, "learned_scales");
    let weights = QuantArgs { mapping: Mapping::Asymmetric, ..good.weights };
    refused(settings(QuantScheme { weights, ..good }, &[]), "asymmetric");
    let weights = QuantArgs { granularity: Granularity::PerGroup(9), ..good.weights };
    let grouped = settings(QuantScheme { weights, ..good }, &["re:conv1$", "re:.*downsample", "fc"]);
    refused(grouped.clone(), "granularity");
    refused(QatSettings { learned: false, ..grouped }, "granularity");
    let float = scheme("FP8_DYNAMIC", Granularity::PerChannel, FloatType::F32);
    refused(QatSettings { learned: false, ..settings(float, &[]) }, "FP8 E4M3");
}

/// One layer: `y = conv(codes(x), codes(w f)) * (t |f| * s) + beta - mean f`, codes and scales on learned grids. The
/// straight-through estimator makes every gradient that of this expression with the roundings frozen where they are.
#[test]
fn gradients_are_those_of_the_clipped_identity() {
    let device = Device::flex().autodiff();
    // Of f32 scales, so that the rounding of a scale to its dtype changes nothing. The first layer's input has a sign and a
    // zero point.
    let net = learned(3, scheme("W4A4", Granularity::PerChannel, FloatType::F32), &[]);
    for i in [0, net.blocks[0].conv1] {
        let prepared = net.prepared.as_ref().unwrap();
        let (site, plan) = (prepared.layers[i].input.unwrap(), &prepared.layers[i]);
        let (xargs, wargs) = (prepared.sites[site].args, plan.scheme.unwrap().weights);
        let grids = prepared.grids.as_ref().unwrap();
        let p = grids.site(site, &xargs);
        let layer = &net.layers[i];
        let ([n, c, _, _], side) = (layer.shape, 5);
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(9);
        // Wide enough that some inputs clip at both ends.
        let (lo, hi) = ((xargs.qtype.qmin() - p.zero) as f32 - 4.0, (xargs.qtype.qmax() - p.zero) as f32 + 4.0);
        let xv: Vec<f32> = (0..side * side * c).map(|_| (lo + (hi - lo) * rng.random::<f32>()) * p.scale).collect();
        let gv: Vec<f32> = (0..side * side * n).map(|_| rng.random::<f32>() - 0.5).collect();
        let x = Tensor::<4>::from_data(TensorData::new(xv.clone(), [1, side, side, c]), &device).require_grad();
        let leaves = net.leaves(&device);
        let y = net.conv_for_test(&leaves, i, x.clone()).unwrap();
        let g = Tensor::<4>::from_data(TensorData::new(gv.clone(), [1, side, side, n]), &device);
        let grads = (y * g).sum().backward();
        let dx: Vec<f32> = x.grad(&grads).unwrap().into_data().try_into_vec().unwrap();
        let all = leaves.gradients(&grads);
        let mut copy = net.clone();
        let params: Vec<(String, Vec<f32>)> = copy.params_mut().into_iter().map(|q| (q.name, q.data.clone())).collect();
        let grad = |name: String| params.iter().position(|(n, _)| *n == name).map(|at| (&params[at].1, &all[at]));

        let wide = |v: &[f32]| v.iter().map(|&v| f64::from(v)).collect::<Vec<f64>>();
        let m = &layer.module;
        let input = &prepared.sites[site].name;
        let (t, dt) = grad(format!("{m}.weight.grid.scale")).unwrap();
        let (s, ds) = grad(format!("{input}.grid.scale")).unwrap();
        let zero = grad(format!("{input}.grid.zero"));
        assert_eq!(zero.is_some(), i == 0);
        let norm = layer.norm.as_ref().unwrap();
        let factor =
            |gamma: &[f64]| -> Vec<f64> { (0..n).map(|j| gamma[j] / f64::from((norm.var[j] + 1e-5).sqrt())).collect() };
        let k = layer.k();
        let (folded, _) = layer.folded(1e-5);
        let wp: Vec<QParams> = grids.weight(i, layer, &wargs, 1e-5).unwrap();
        // Where each rounding stands: what it added inside the range, or the code that the end of it is.
        let frozen = |v: f32, args: &QuantArgs, p: QParams| {
            let (c, q) = (f64::from(v / p.scale + p.zero as f32), f64::from(args.quantize(v, p)));
            let inside = args.fake_quantize(v, p).1;
            (if inside { q - c } else { q }, inside)
        };
        let xo: Vec<_> = xv.iter().map(|&v| frozen(v, &xargs, p)).collect();
        let wo: Vec<_> = folded.iter().enumerate().map(|(j, &v)| frozen(v, &wargs, wp[j / k])).collect();
        for side in [&xo, &wo] {
            assert!(side.iter().any(|o| o.1) && side.iter().any(|o| !o.1), "both sides of the clip");
        }
        let rounded = p.zero as f64 - zero.map_or(p.zero as f64, |(z, _)| f64::from(z[0]));
        let loss = |x: &[f64], w: &[f64], gamma: &[f64], beta: &[f64], t: &[f64], s: f64, z: f64| -> f64 {
            let f = factor(gamma);
            let z = z + rounded;
            let mut total = 0.0;
            for (oy, ox, o) in (0..side).flat_map(|y| (0..side).flat_map(move |x| (0..n).map(move |o| (y, x, o)))) {
                let scale = t[o] * f[o].abs();
                let mut sum = 0.0;
                for (ky, kx, ch) in (0..3).flat_map(|y| (0..3).flat_map(move |x| (0..c).map(move |c| (y, x, c)))) {
                    let (iy, ix) = (oy + ky, ox + kx);
                    if iy < 1 || ix < 1 || iy > side || ix > side {
                        continue;
                    }
                    let xi = ((iy - 1) * side + ix - 1) * c + ch;
                    let wi = ((o * c + ch) * 3 + ky) * 3 + kx;
                    let xq = if xo[xi].1 { x[xi] / s + xo[xi].0 } else { xo[xi].0 - z };
                    let wq = if wo[wi].1 { w[wi] * f[o] / scale + wo[wi].0 } else { wo[wi].0 };
                    sum += xq * wq;
                }
                let y = sum * scale * s + beta[o] - f64::from(norm.mean[o]) * f[o];
                total += y * f64::from(gv[(oy * side + ox) * n + o]);
            }
            total
        };
        let (x, w, gamma, beta, t) = (wide(&xv), wide(&layer.weight), wide(&norm.gamma), wide(&layer.shift), wide(t));
        let s = f64::from(s[0]);
        let z = zero.map_or(p.zero as f64, |(z, _)| f64::from(z[0]));
        let check = |got: &[f32], by: f64, v: &[f64], f: &dyn Fn(&[f64]) -> f64, what: &str| {
            let size = got.iter().fold(1e-3f32, |a, g| a.max(g.abs()));
            for (i, g) in got.iter().enumerate() {
                let h = 1e-6;
                let mut u = v.to_vec();
                u[i] += h;
                let up = f(&u);
                u[i] -= 2.0 * h;
                let want = by * (up - f(&u)) / (2.0 * h);
                assert!((f64::from(*g) - want).abs() < 5e-5 * f64::from(size), "{m} {what} {i}: {g} {want}");
            }
        };
        // LSQ's factor: 1 / sqrt(values of the scale * largest code), the values of a picture for an activation.
        let lsq = |values: usize| 1.0 / (values as f64 * 7.0).sqrt();
        let (_, dw) = grad(format!("{m}.weight")).unwrap();
        let (_, dgamma) = grad(format!("{m}.bn.weight")).unwrap();
        let (_, dbeta) = grad(format!("{m}.bn.bias")).unwrap();
        check(&dx, 1.0, &x, &|v| loss(v, &w, &gamma, &beta, &t, s, z), "x");
        check(dw, 1.0, &w, &|v| loss(&x, v, &gamma, &beta, &t, s, z), "weight");
        check(dgamma, 1.0, &gamma, &|v| loss(&x, &w, v, &beta, &t, s, z), "gamma");
        check(dbeta, 1.0, &beta, &|v| loss(&x, &w, &gamma, v, &t, s, z), "beta");
        check(dt, lsq(k), &t, &|v| loss(&x, &w, &gamma, &beta, v, s, z), "weight scale");
        check(ds, lsq(xv.len()), &[s], &|v| loss(&x, &w, &gamma, &beta, &t, v[0], z), "input scale");
        if let Some((_, dz)) = zero {
            check(dz, lsq(xv.len()), &[z], &|v| loss(&x, &w, &gamma, &beta, &t, s, v[0]), "zero point");
        }
    }
}

/// With live statistics the scale behind the convolution is divided by the factor again: gradients of scales still flow.
#[test]
fn live_statistics_train_every_grid() {
    let device = Device::flex().autodiff();
    let net = learned(11, scheme("W2A4", Granularity::PerChannel, FloatType::F32), &[]);
    let leaves = net.leaves(&device);
    let live = Pass::QatTrain { bn_frozen: false, ranges_frozen: false };
    let mut updates = Updates::default();
    let y = net.forward(&leaves, images(3, 12, 4, &device), live, &mut updates).unwrap();
    let weights: Vec<f32> = (0..9).map(|i| (i as f32 * 0.9).sin()).collect();
    let loss = (y * Tensor::from_data(TensorData::new(weights, [3, 3]), &device)).sum();
    let grads = leaves.gradients(&loss.backward());
    let mut copy = net.clone();
    let params = copy.params_mut();
    assert_eq!(params.len(), grads.len());
    for (param, grad) in params.iter().zip(&grads) {
        assert_eq!(param.data.len(), grad.len(), "{}", param.name);
        assert!(grad.iter().all(|g| g.is_finite()), "{}", param.name);
        if param.grid == Some(GridPart::Scale) {
            assert!(grad.iter().any(|g| *g != 0.0), "{}", param.name);
        }
    }
}
