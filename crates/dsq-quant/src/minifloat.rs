//! The small floats that weights are coded in: E4M3 and E5M2 (FP8), E2M1 (FP4), and the E8M0 of MX scales. Conversion only:
//! which scale goes with a code is [`crate::QuantArgs`]'s, how codes lie in a file `dsq-checkpoint`'s.
//!
//! One policy for all: a value beyond the largest finite one becomes that one (infinity too), then the nearest code is
//! taken, ties to the even one. So nothing becomes infinite, and 256 does not become 448. Sources: OCP 8-bit Floating
//! Point Specification (OFP8) 1.0, OCP Microscaling Formats (MX) 1.0, and PyTorch's `float8_e4m3fn`, which compressed-tensors
//! rounds with after the same clamp. E4M3 here is E4M3**FN**: no infinities, NaN at 0x7f and 0xff. AMD's E4M3FNUZ gives other
//! values to the same bytes and is not read as this.

/// A float of at most eight bits: sign, exponent, mantissa.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MiniFloat {
    /// 1-4-3, bias 7, largest 448, NaN 0x7f and 0xff, no infinities.
    E4M3,
    /// 1-5-2, bias 15, largest 57344, infinities 0x7c and 0xfc, NaN above them.
    E5M2,
    /// 1-2-1, bias 1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; no infinities, no NaN.
    E2M1,
}

/// `with_format!(format, NAME => expression)`: the expression with the constant `NAME` in the place of a format that is known at
/// run time only. A loop in it is compiled for each format on its own, and then vectorizes.
#[macro_export]
macro_rules! with_format {
    ($format:expr, $name:ident => $body:expr) => {
        match $format {
            $crate::MiniFloat::E4M3 => {
                const $name: $crate::MiniFloat = $crate::MiniFloat::E4M3;
                $body
            }
            $crate::MiniFloat::E5M2 => {
                const $name: $crate::MiniFloat = $crate::MiniFloat::E5M2;
                $body
            }
            $crate::MiniFloat::E2M1 => {
                const $name: $crate::MiniFloat = $crate::MiniFloat::E2M1;
                $body
            }
        }
    };
}

impl MiniFloat {
    /// Every format.
    pub const ALL: [MiniFloat; 3] = [MiniFloat::E4M3, MiniFloat::E5M2, MiniFloat::E2M1];

    /// Bits of the mantissa, and the exponent's bias.
    const fn layout(self) -> (u32, i32) {
        match self {
            MiniFloat::E4M3 => (3, 7),
            MiniFloat::E5M2 => (2, 15),
            MiniFloat::E2M1 => (1, 1),
        }
    }

    /// Bits of a code.
    pub const fn bits(self) -> usize {
        match self {
            MiniFloat::E4M3 | MiniFloat::E5M2 => 8,
            MiniFloat::E2M1 => 4,
        }
    }

    /// Largest finite value.
    pub const fn max(self) -> f32 {
        match self {
            MiniFloat::E4M3 => 448.0,
            MiniFloat::E5M2 => 57344.0,
            MiniFloat::E2M1 => 6.0,
        }
    }

    /// The code of `x`: clamped to the largest value, then nearest, ties to even. The sign of a zero is kept in eight bits;
    /// in E2M1 an exact -0 has code 0, and a negative value that rounds to zero has code 8, both as in compressed-tensors.
    /// NaN gives the NaN 0x7f (0xff when negative), in E2M1, which has none, 0: callers refuse NaN first.
    #[inline]
    pub fn encode(self, x: f32) -> u8 {
        let (mantissa, bias) = self.layout();
        let sign = u8::from(x.is_sign_negative()) << (self.bits() - 1);
        if x.is_nan() || (self == MiniFloat::E2M1 && x == 0.0) {
            return if self == MiniFloat::E2M1 { 0 } else { sign | 0x7f };
        }
        let (steps, exponent) = self.steps(x);
        // Subnormal codes count steps; each further exponent adds 2^mantissa codes, and a carry goes into the exponent.
        let below = ((exponent + bias - 1) as u32) << mantissa;
        sign | (below + steps as u32) as u8
    }

    /// The magnitude of `x` after the clamp in steps of the grid there, rounded, and the exponent of the binade: a step is
    /// `2^(exponent - mantissa)`. NaN gives what the largest value does.
    #[inline(always)]
    fn steps(self, x: f32) -> (f32, i32) {
        let (mantissa, bias) = self.layout();
        let magnitude = x.abs().min(self.max());
        // The exponent of the magnitude; below the smallest normal number all steps are alike.
        let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(1 - bias);
        // A division by a power of two that neither overflows nor loses bits that a tie could hang on: exact.
        ((magnitude / pow2(exponent - mantissa as i32)).round_ties_even(), exponent)
    }

    /// The value of the code of `x`, `decode(encode(x))` bit for bit, without a code and without a branch, so that a loop of
    /// it vectorizes (where the format is a constant, see [`crate::with_format`]).
    #[inline(always)]
    pub fn round(self, x: f32) -> f32 {
        let (steps, exponent) = self.steps(x);
        let value = (steps * pow2(exponent - self.layout().0 as i32)).copysign(x);
        match self {
            MiniFloat::E2M1 if x == 0.0 || x.is_nan() => 0.0,
            _ if x.is_nan() => f32::NAN,
            _ => value,
        }
    }

    /// The distance of two neighbouring numbers of the grid around `x`, after the clamp.
    pub fn step(self, x: f32) -> f32 {
        pow2(self.steps(x).1 - self.layout().0 as i32)
    }

    /// The value of a code (of E2M1: its low four bits).
    #[inline]
    pub fn decode(self, code: u8) -> f32 {
        match self {
            MiniFloat::E4M3 => E4M3[usize::from(code)],
            MiniFloat::E5M2 => E5M2[usize::from(code)],
            MiniFloat::E2M1 => E2M1[usize::from(code & 15)],
        }
    }

    /// Whether a code (of E2M1: any) is a finite number.
    #[inline]
    pub fn is_finite(self, code: u8) -> bool {
        match self {
            MiniFloat::E4M3 => code & 0x7f != 0x7f,
            MiniFloat::E5M2 => code & 0x7c != 0x7c,
            MiniFloat::E2M1 => code < 16,
        }
    }

    const fn value(self, code: u8) -> f32 {
        let (mantissa, bias) = self.layout();
        let sign = if code >> (self.bits() - 1) & 1 == 1 { -1.0 } else { 1.0 };
        let magnitude = code & ((1 << (self.bits() - 1)) - 1);
        let (exponent, fraction) = ((magnitude >> mantissa) as i32, (magnitude & ((1 << mantissa) - 1)) as f32);
        if matches!(self, MiniFloat::E4M3) && magnitude == 0x7f {
            return f32::NAN;
        }
        if matches!(self, MiniFloat::E5M2) && magnitude >= 0x7c {
            return if magnitude == 0x7c { sign * f32::INFINITY } else { f32::NAN };
        }
        let one = (1u32 << mantissa) as f32;
        let (steps, exponent) = if exponent == 0 { (fraction, 1 - bias) } else { (one + fraction, exponent - bias) };
        sign * (steps * pow2(exponent - mantissa as i32))
    }
}

/// `2^n` for n in -126..=127.
const fn pow2(n: i32) -> f32 {
    f32::from_bits(((n + 127) as u32) << 23)
}

const fn table<const N: usize>(format: MiniFloat) -> [f32; N] {
    let mut out = [0.0; N];
    let mut code = 0;
    while code < N {
        out[code] = format.value(code as u8);
        code += 1;
    }
    out
}

static E4M3: [f32; 256] = table(MiniFloat::E4M3);
static E5M2: [f32; 256] = table(MiniFloat::E5M2);
static E2M1: [f32; 16] = table(MiniFloat::E2M1);

/// The value of an E8M0 byte: `2^(code - 127)`, from 2^-127 (which f32 holds as a subnormal number) to 2^127; 255 is NaN.
pub fn e8m0_decode(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => pow2(i32::from(code) - 127),
    }
}

/// The E8M0 byte of a power of two in 2^-127..=2^127; 255 (NaN) for anything else.
pub fn e8m0_encode(x: f32) -> u8 {
    let bits = x.to_bits();
    if bits == 1 << 22 {
        return 0;
    }
    let exponent = (bits >> 23) as u8; // 0 for subnormal numbers; a sign bit falls off, and shows in `pow2` below.
    if exponent != 0 && exponent != 255 && pow2(i32::from(exponent) - 127) == x { exponent } else { 255 }
}

/// The power of two for the MX scale of a group whose largest magnitude is `absmax` (not yet divided by the type's largest
/// exponent): down from below 1.75 times a power of two, up from there; infinity when that is above 2^127. Source:
/// compressed-tensors' `round_to_power_2`, which adds a quarter of the mantissa's range and cuts the mantissa off.
pub(crate) fn mx_power(absmax: f32) -> f32 {
    f32::from_bits((absmax.to_bits() + (1 << 21)) & 0x7f80_0000)
}

/// The nearest power of two to a positive number, up from 1.5 times one; at least 2^-127, infinity from 1.5 * 2^127 on. For a
/// scale that is trained: unlike [`mx_power`] it leaves room on both sides of each power, so that a small step of training
/// down from one does not halve it.
pub(crate) fn nearest_power(x: f32) -> f32 {
    if !x.is_finite() || e8m0_encode(x) != 255 {
        return x;
    }
    f32::from_bits((x.to_bits() + (1 << 22)) & 0x7f80_0000).max(e8m0_decode(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    /// All finite non-negative values of a format with their codes, rising.
    fn grid(f: MiniFloat) -> Vec<(u8, f64)> {
        (0..1u16 << (f.bits() - 1))
            .map(|c| c as u8)
            .filter(|&c| f.is_finite(c))
            .map(|c| (c, f64::from(f.decode(c))))
            .collect()
    }

    /// The nearest code by comparing distances in f64, ties to the even code, saturating.
    fn oracle(f: MiniFloat, grid: &[(u8, f64)], x: f64) -> u8 {
        let a = x.abs().min(f64::from(f.max()));
        let at = grid.partition_point(|(_, v)| *v < a).min(grid.len() - 1);
        let (hi, lo) = (grid[at], grid[at.saturating_sub(1)]);
        let (up, down) = ((hi.1 - a).abs(), (a - lo.1).abs());
        let code = match up.partial_cmp(&down) {
            Some(std::cmp::Ordering::Less) => hi.0,
            Some(std::cmp::Ordering::Greater) => lo.0,
            _ if hi.0 % 2 == 0 => hi.0,
            _ => lo.0,
        };
        code | u8::from(x.is_sign_negative()) << (f.bits() - 1)
    }

    fn same(f: MiniFloat, a: u8, b: u8) -> bool {
        // Exactly -0 is +0 in E2M1.
        a == b || (f == MiniFloat::E2M1 && a & 7 == 0 && b & 7 == 0)
    }

    #[test]
    fn the_formats_are_those_of_the_specification() {
        assert_eq!(
            (0..16).map(|c| MiniFloat::E2M1.decode(c)).collect::<Vec<_>>(),
            [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
        );
        let e = MiniFloat::E4M3;
        assert_eq!(
            [0x01, 0x08, 0x38, 0x78, 0x79, 0x7e].map(|c| e.decode(c)),
            [2f32.powi(-9), 2f32.powi(-6), 1.0, 256.0, 288.0, 448.0]
        );
        assert!(e.decode(0x7f).is_nan() && e.decode(0xff).is_nan() && e.decode(0x80).is_sign_negative());
        let e = MiniFloat::E5M2;
        assert_eq!([0x01, 0x04, 0x3c, 0x7b].map(|c| e.decode(c)), [2f32.powi(-16), 2f32.powi(-14), 1.0, 57344.0]);
        assert_eq!([e.decode(0x7c), e.decode(0xfc)], [f32::INFINITY, f32::NEG_INFINITY]);
        assert!([0x7d, 0x7e, 0x7f, 0xff].iter().all(|&c| e.decode(c).is_nan()));
        for f in MiniFloat::ALL {
            let g = grid(f);
            assert!(g.windows(2).all(|w| w[0].1 < w[1].1), "{f:?} rises");
            assert_eq!(g.last().unwrap().1, f64::from(f.max()));
        }
        // E5M2 is the upper byte of a binary16.
        for c in 0..=255u8 {
            let (a, b) = (MiniFloat::E5M2.decode(c), f16::from_bits(u16::from(c) << 8).to_f32());
            assert!(a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()), "{c:#x}");
        }
    }

    #[test]
    fn every_code_survives_the_round_trip() {
        for f in MiniFloat::ALL {
            for c in 0..=((1u16 << f.bits()) - 1) as u8 {
                if f.is_finite(c) {
                    assert!(same(f, f.encode(f.decode(c)), c), "{f:?} {c:#x}");
                }
            }
        }
    }

    fn assert_rounds(f: MiniFloat, x: f32) {
        let (a, b) = (f.round(x), f.decode(f.encode(x)));
        assert!(a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()), "{f:?} {x}: {a} against {b}");
    }

    #[test]
    fn a_step_is_the_distance_of_neighbours() {
        let e = MiniFloat::E2M1;
        assert_eq!(
            [0.0, 0.4, 0.9, 1.9, 2.0, 3.9, 4.0, 9.0].map(|x| e.step(x)),
            [0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0, 2.0]
        );
        assert_eq!(
            [0.001, 1.5, -300.0, f32::INFINITY].map(|x| MiniFloat::E4M3.step(x)),
            [2f32.powi(-9), 0.125, 32.0, 32.0]
        );
    }

    #[test]
    fn powers_of_two_near_a_trained_scale() {
        let xs = [1.0, 1.49, 1.5, 0.75, 0.7499, 2f32.powi(-127), 1e-45, 1.4 * 2f32.powi(127)];
        let want = [1.0, 1.0, 2.0, 1.0, 0.5, 2f32.powi(-127), 2f32.powi(-127), 2f32.powi(127)];
        assert_eq!(xs.map(nearest_power), want);
        assert!(nearest_power(f32::NAN).is_nan() && nearest_power(f32::MAX) == f32::INFINITY);
    }

    #[test]
    fn every_f16_and_every_tie_rounds_as_an_f64_oracle() {
        for f in MiniFloat::ALL {
            let g = grid(f);
            for bits in 0..=u16::MAX {
                let x = f16::from_bits(bits).to_f32();
                assert_rounds(f, x);
                if !x.is_nan() {
                    assert!(same(f, f.encode(x), oracle(f, &g, f64::from(x))), "{f:?} {x}");
                }
            }
            // The midpoint of each two neighbours, and the f32 values beside it.
            for w in g.windows(2) {
                let mid = ((w[0].1 + w[1].1) / 2.0) as f32;
                for x in [mid, f32::from_bits(mid.to_bits() - 1), f32::from_bits(mid.to_bits() + 1)] {
                    for x in [x, -x] {
                        assert_rounds(f, x);
                        assert!(same(f, f.encode(x), oracle(f, &g, f64::from(x))), "{f:?} {x}");
                    }
                }
            }
            // Numbers of every f32 exponent.
            for e in 0..255u32 {
                for m in [0, 1, 0x20_0000, 0x40_0000, 0x60_0000, 0x7f_ffff] {
                    let x = f32::from_bits(e << 23 | m);
                    [x, -x].into_iter().for_each(|x| assert_rounds(f, x));
                    assert!(same(f, f.encode(x), oracle(f, &g, f64::from(x))), "{f:?} {x:e}");
                }
            }
        }
    }

    #[test]
    fn c007_e4m3_saturates_and_rounds_to_even() {
        let e = MiniFloat::E4M3;
        let small = 2f32.powi(-9);
        let xs = [448.0, 449.0, 464.0, 464.01, 465.0, 480.0, 1e4, -1000.0, f32::INFINITY, small, small / 2.0];
        let want = [448.0, 448.0, 448.0, 448.0, 448.0, 448.0, 448.0, -448.0, 448.0, small, 0.0];
        assert_eq!(xs.map(|x| e.decode(e.encode(x))), want);
        assert_eq!(e.decode(e.encode(1.0001 * small / 2.0)), small);
        assert!(e.decode(e.encode(f32::NAN)).is_nan());
        assert_eq!([-0.0, 256.0, 288.0].map(|x| e.encode(x)), [0x80, 0x78, 0x79]);
    }

    #[test]
    fn c009_e5m2_rounds_to_even_and_saturates() {
        let e = MiniFloat::E5M2;
        let xs = [1.125, 1.625, 2f32.powi(-16), 1e-5, 61439.0, 61440.0, 65504.0];
        let want = [1.0, 1.5, 2f32.powi(-16), 2f32.powi(-16), 57344.0, 57344.0, 57344.0];
        assert_eq!(xs.map(|x| e.decode(e.encode(x))), want);
        assert_eq!(e.encode(-0.0), 0x80);
    }

    #[test]
    fn e8m0_holds_every_power_of_two_and_nothing_else() {
        for c in 0..255u8 {
            assert_eq!(e8m0_encode(e8m0_decode(c)), c);
            assert_eq!(f64::from(e8m0_decode(c)), 2f64.powi(i32::from(c) - 127));
        }
        assert!(e8m0_decode(255).is_nan());
        for x in
            [0.0, -1.0, 3.0, f32::INFINITY, f32::NAN, 1.0 + f32::EPSILON, 2f32.powi(-128), f32::MIN_POSITIVE * 0.75]
        {
            assert_eq!(e8m0_encode(x), 255, "{x:e}");
        }
        // 1.75 times a power of two goes up, what is below it down.
        assert_eq!([7.0, 6.999_999_5, 4.0, 8.0].map(mx_power), [8.0, 4.0, 4.0, 8.0]);
        assert_eq!(mx_power(f32::MAX), f32::INFINITY);
    }
}
