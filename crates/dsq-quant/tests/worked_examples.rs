//! The worked examples of docs/numerics.md that no test beside their formula holds: integer weights, FP8 in every form,
//! activations for each token and on stored grids, learned scales of float codes. Not a test of anything else.

use dsq_quant::{FloatType, Granularity, InputGrid, Mapping, QParams, QuantArgs, QuantType, QuantizedMatrix};

const W: [f32; 8] = [0.7, -0.35, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3];

fn near(got: &[f32], want: &[f32], by: f32) {
    let close = |(a, b): (&f32, &f32)| (a - b).abs() <= by;
    assert!(got.len() == want.len() && got.iter().zip(want).all(close), "{got:?} {want:?}");
}

fn row(args: QuantArgs) -> QuantizedMatrix {
    QuantizedMatrix::quantize(&W, 1, 8, args).unwrap()
}

fn integers(qtype: QuantType, mapping: Mapping) -> QuantizedMatrix {
    row(QuantArgs { qtype, mapping, ..QuantArgs::int4(Granularity::PerChannel, FloatType::Bf16) })
}

#[test]
fn integer_weights() {
    let sym = |qtype| integers(qtype, Mapping::Symmetric);
    let q = sym(QuantType::Int8);
    assert_eq!((q.scales[0], &q.codes[..]), (0.005_493_164, &[127, -64, 9, 18, 27, 36, 46, 55][..]));
    near(&q.dequantize(), &[0.6976, -0.3516, 0.0494, 0.0989, 0.1483, 0.1978, 0.2527, 0.3021], 5e-5);
    let q = sym(QuantType::Int4);
    assert_eq!((q.scales[0], &q.codes[..]), (0.093_261_72, &[7, -4, 1, 1, 2, 2, 3, 3][..]));
    near(&q.dequantize(), &[0.6528, -0.3730, 0.0933, 0.0933, 0.1865, 0.1865, 0.2798, 0.2798], 5e-5);
    let q = sym(QuantType::Int3);
    assert_eq!((q.scales[0], &q.codes[..]), (0.200_195_31, &[3, -2, 0, 0, 1, 1, 1, 1][..]));
    let q = sym(QuantType::Int2);
    assert_eq!((q.scales[0], &q.codes[..]), (0.466_796_88, &[1, -1, 0, 0, 0, 0, 1, 1][..]));

    let asym = |qtype| integers(qtype, Mapping::Asymmetric);
    let q = asym(QuantType::Int8);
    assert_eq!((q.scales[0], q.zeros[0]), (0.004_119_873, -43));
    assert_eq!(q.codes, [127, -128, -31, -19, -7, 6, 18, 30]);
    let q = asym(QuantType::Int4);
    assert_eq!((q.scales[0], q.zeros[0]), (0.069_824_22, -3));
    assert_eq!(q.codes, [7, -8, -2, -2, -1, 0, 1, 1]);
    near(&q.dequantize(), &[0.6982, -0.3491, 0.0698, 0.0698, 0.1396, 0.2095, 0.2793, 0.2793], 5e-5);
    let q = asym(QuantType::Int3);
    assert_eq!((q.scales[0], q.zeros[0], &q.codes[..]), (0.150_390_63, -2, &[3, -4, -2, -1, -1, -1, 0, 0][..]));
    let q = asym(QuantType::Int2);
    assert_eq!((q.scales[0], q.zeros[0], &q.codes[..]), (0.349_609_38, -1, &[1, -2, -1, -1, -1, 0, 0, 0][..]));
}

/// What the codes of a matrix stand for.
fn numbers(q: &QuantizedMatrix) -> Vec<f32> {
    q.codes.iter().map(|&c| q.args.code_value(c, 0)).collect()
}

#[test]
fn fp8_weights_for_a_tensor_a_block_and_in_e5m2() {
    let two_rows =
        |granularity| QuantizedMatrix::quantize(&W, 2, 4, QuantArgs::fp8(granularity, FloatType::F32)).unwrap();
    let q = two_rows(Granularity::PerTensor);
    near(&q.scales, &[0.0015625], 1e-9);
    assert_eq!(numbers(&q), [448.0, -224.0, 32.0, 64.0, 96.0, 128.0, 160.0, 192.0]);
    let q = two_rows(Granularity::PerBlock(2, 2));
    near(&q.scales, &[0.0015625, 0.000_669_643], 1e-9);
    assert_eq!(numbers(&q), [448.0, -224.0, 72.0, 144.0, 96.0, 128.0, 384.0, 448.0]);
    near(&q.dequantize(), &[0.7, -0.35, 0.048214, 0.096429, 0.15, 0.2, 0.257143, 0.3], 1e-6);

    let e5m2 = QuantArgs { qtype: QuantType::Fp8E5M2, ..QuantArgs::fp8(Granularity::PerChannel, FloatType::Bf16) };
    let q = row(e5m2);
    assert_eq!(q.scales, [1.221_895_2e-5]);
    assert_eq!(q.codes.iter().map(|&c| c as u8).collect::<Vec<_>>(), [0x7b, 0xf7, 0x6c, 0x70, 0x72, 0x74, 0x75, 0x76]);
    assert_eq!(numbers(&q), [57344.0, -28672.0, 4096.0, 8192.0, 12288.0, 16384.0, 20480.0, 24576.0]);
    near(&q.dequantize(), &[0.7007, -0.3503, 0.0500, 0.1001, 0.1501, 0.2002, 0.2502, 0.3003], 5e-5);
}

fn int8_tokens(mapping: Mapping) -> QuantArgs {
    QuantArgs { qtype: QuantType::Int8, mapping, ..QuantArgs::int4(Granularity::PerToken, FloatType::F32) }
}

/// Scale, zero point, codes (their numbers) and values of an input on a grid.
fn input(args: QuantArgs, p: QParams, x: [f32; 3]) -> (f32, i32, [f32; 3], [f32; 3]) {
    let code = |x| args.quantize(x, p);
    let number = |x: f32| if args.qtype.float().is_some() { args.code_value(code(x), 0) } else { f32::from(code(x)) };
    (p.scale, p.zero, x.map(number), x.map(|x| args.dequantize(code(x), p)))
}

#[test]
fn activations_of_each_token() {
    let x = [0.51f32, -1.0, 0.3];
    let of = |args: QuantArgs| input(args, args.qparams(-1.0, 0.51).unwrap(), x);
    let (scale, _, codes, values) = of(int8_tokens(Mapping::Symmetric));
    near(&[scale], &[0.007_843_14], 1e-8);
    assert_eq!(codes, [65.0, -127.0, 38.0]);
    near(&values, &[0.509804, -0.996078, 0.298039], 1e-6);
    let (scale, zero, codes, values) = of(int8_tokens(Mapping::Asymmetric));
    near(&[scale], &[0.005_921_57], 1e-8);
    assert_eq!((zero, codes), (41, [127.0, -128.0, 92.0]));
    near(&values, &[0.509255, -1.000745, 0.302], 1e-6);
    let (scale, _, numbers, values) = of(QuantArgs::fp8(Granularity::PerToken, FloatType::F32));
    near(&[scale], &[0.002_232_14], 1e-8);
    assert_eq!(numbers, [224.0, -448.0, 128.0]);
    near(&values, &[0.5, -1.0, 0.285714], 1e-6);
}

#[test]
fn activations_on_a_stored_grid() {
    let x = [1.0f32, -0.13, 6.0];
    let of = |args: QuantArgs| input(args, InputGrid::of_range(args, -2.0, 5.1).unwrap().params.unwrap(), x);
    let int = |qtype, mapping| QuantArgs { qtype, mapping, ..QuantArgs::int4(Granularity::PerTensor, FloatType::F32) };
    let (scale, _, codes, values) = of(int(QuantType::Int8, Mapping::Symmetric));
    near(&[scale], &[0.04], 1e-8);
    assert_eq!(codes, [25.0, -3.0, 127.0]);
    near(&values, &[1.0, -0.12, 5.08], 1e-6);
    let (scale, zero, codes, values) = of(int(QuantType::Int8, Mapping::Asymmetric));
    near(&[scale], &[0.027_843_14], 1e-8);
    assert_eq!((zero, codes), (-56, [-20.0, -61.0, 127.0]));
    near(&values, &[1.002353, -0.139216, 5.095294], 1e-6);
    let (scale, zero, codes, values) = of(int(QuantType::Int4, Mapping::Asymmetric));
    near(&[scale], &[0.473_333_3], 1e-7);
    assert_eq!((zero, codes), (-4, [-2.0, -4.0, 7.0]));
    near(&values, &[0.946667, 0.0, 5.206667], 1e-6);
    let (scale, _, numbers, values) = of(QuantArgs::fp8(Granularity::PerTensor, FloatType::F32));
    near(&[scale], &[0.011_383_93], 1e-8);
    assert_eq!(numbers, [88.0, -11.0, 448.0]);
    near(&values, &[1.001786, -0.125223, 5.1], 1e-6);

    // NVFP4: 16 values of a token, the largest of them 3, under the global scale of a text whose largest magnitude is 7.5.
    let args = QuantArgs::nvfp4_tokens();
    let grid = InputGrid::of_range(args, -7.5, 1.0).unwrap();
    near(&[grid.params.unwrap().scale], &[358.4], 1e-3);
    let p = grid.run_qparams(-3.0, 1.0).unwrap();
    near(&[p.scale, args.dequantize(args.quantize(1.0, p), p)], &[0.491071, 0.982143], 1e-6);
}

#[test]
fn learned_scales_of_float_codes() {
    let w = [0.4f32, -0.9];
    let of = |args: QuantArgs, scale: f32, global: Option<f32>| {
        let stored = args.stored_learned_qparams(scale, 0.0, global);
        let p = args.in_effect(stored, global);
        let gradients = w.map(|x| args.learned_gradients(x, p));
        (stored.scale, w.map(|x| args.fake_quantize(x, p).0), gradients.map(|g| g[0]), gradients.map(|g| g[1]))
    };
    let (stored, values, by_w, by_scale) = of(QuantArgs::mxfp4(), 0.13, None);
    assert_eq!((stored, values, by_w), (0.125, [0.375, -0.75], [1.0, 0.0]));
    near(&by_scale, &[-0.2, -6.0], 1e-6);
    let (stored, values, by_w, by_scale) = of(QuantArgs::nvfp4(), 0.117, Some(1000.0));
    assert_eq!((stored, by_w), (120.0, [1.0, 0.0]));
    near(&values, &[0.36, -0.72], 1e-6);
    near(&by_scale, &[-0.333333, -6.0], 1e-6);
}
