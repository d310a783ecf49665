//! Elementary functions and reductions with one fixed sequence of FP32 operations.
//!
//! The standard library's transcendental functions differ between platforms. These use additions,
//! products and explicit fused multiply-adds only, so they give the same bits everywhere, alone or
//! in a vectorised loop. The sign and payload of a NaN are not fixed.

/// `e^x`, within 1 ulp; exactly 1 at 0, exactly 0 at -inf, inf on overflow.
///
/// `x = n ln 2 + r`, a degree-7 polynomial in `r`, and two exact scalings by powers of two.
#[inline(always)]
#[must_use]
#[expect(
    clippy::excessive_precision,
    reason = "the decimal forms of the FP32 coefficients are given in full"
)]
pub fn exp(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer
    // Beyond these the result is 0 or inf. Written so that NaN passes through.
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, MAGIC);
    let n = shifted - MAGIC;
    let r = n.mul_add(-0.693_145_751_953_125, x);
    let r = n.mul_add(-1.428_606_765_330_187e-6, r);
    let mut p = 1.985_276_176_128_536e-4f32;
    p = p.mul_add(r, 1.393_043_552_525_341_5e-3);
    p = p.mul_add(r, 8.333_360_776_305_198_7e-3);
    p = p.mul_add(r, 4.166_648_536_920_547_5e-2);
    p = p.mul_add(r, 1.666_666_716_337_204e-1);
    p = p.mul_add(r, 0.5);
    let y = (r * r).mul_add(p, r) + 1.0;
    let n = shifted.to_bits().wrapping_sub(MAGIC.to_bits()) as i32;
    let half = n >> 1;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
    y * power(half) * power(n.wrapping_sub(half))
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
#[must_use]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x / (1 + e^-x)`.
#[inline(always)]
#[must_use]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `ln(1 + e^x)`, and `x` itself above 20.
#[must_use]
pub fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { libm::log1pf(exp(x)) }
}

/// The fixed tree over eight partial sums.
#[inline(always)]
#[must_use]
pub fn sum_lanes(l: [f32; 8]) -> f32 {
    ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]))
}

/// `sum a_i * b_i`: lane `l` of eight takes elements `l, l + 8, ...` with fused multiply-adds, then
/// [`sum_lanes`].
#[inline(always)]
#[must_use]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0f32; 8];
    let (a_chunks, b_chunks) = (a.chunks_exact(8), b.chunks_exact(8));
    let (a_rest, b_rest) = (a_chunks.remainder(), b_chunks.remainder());
    for (x, y) in a_chunks.zip(b_chunks) {
        for l in 0..8 {
            lanes[l] = x[l].mul_add(y[l], lanes[l]);
        }
    }
    for (l, (x, y)) in a_rest.iter().zip(b_rest).enumerate() {
        lanes[l] = x.mul_add(*y, lanes[l]);
    }
    sum_lanes(lanes)
}

/// Sum of squares in the order of [`dot`].
#[inline(always)]
#[must_use]
pub fn sum_squares(x: &[f32]) -> f32 {
    dot(x, x)
}

/// Plain sum: lane `l` of eight takes elements `l, l + 8, ...`, then [`sum_lanes`].
#[inline(always)]
#[must_use]
pub fn sum(x: &[f32]) -> f32 {
    let mut lanes = [0f32; 8];
    let chunks = x.chunks_exact(8);
    let rest = chunks.remainder();
    for chunk in chunks {
        for l in 0..8 {
            lanes[l] += chunk[l];
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane += x;
    }
    sum_lanes(lanes)
}

/// Key whose descending order is: larger value first, +0 and -0 equal, NaN below everything.
#[inline(always)]
#[must_use]
pub fn order_key(x: f32) -> u32 {
    let bits = (x + 0.0).to_bits();
    let key = if bits >> 31 == 0 { bits | 0x8000_0000 } else { !bits };
    if x.is_nan() { 0 } else { key }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ulps(got: f32, want: f64) -> f64 {
        let w = want as f32;
        let ulp = f64::from(f32::from_bits(w.to_bits() + 1)) - f64::from(w);
        (f64::from(got) - want).abs() / ulp
    }

    #[test]
    fn exp_is_within_one_ulp_over_its_normal_range() {
        let mut worst = 0f64;
        let mut x = -87.3f32;
        while x < 88.7 {
            worst = worst.max(ulps(exp(x), f64::from(x).exp()));
            x += 0.000_37;
        }
        assert!(worst < 1.0, "{worst} ulp");
    }

    #[test]
    fn exp_at_its_edges() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-104.0), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(89.0), f32::INFINITY);
        assert!(exp(88.72).is_finite());
        assert!(exp(f32::NAN).is_nan());
        // Subnormal results are rounded once.
        for x in [-88.0f32, -95.5, -100.0, -103.0] {
            let unit = 2f64.powi(-149);
            assert!((f64::from(exp(x)) - f64::from(x).exp()).abs() <= unit, "{x}");
        }
    }

    #[test]
    fn logistic_family_agrees_with_f64() {
        for i in -400..400 {
            let x = i as f32 * 0.1;
            let d = f64::from(x);
            assert!(ulps(sigmoid(x), 1.0 / (1.0 + (-d).exp())) < 3.0, "sigmoid {x}");
            let want = d / (1.0 + (-d).exp());
            assert!((f64::from(silu(x)) - want).abs() <= want.abs() * 3e-7, "silu {x}");
            let want = d.exp().ln_1p();
            assert!((f64::from(softplus(x)) - want).abs() <= want * 3e-7, "softplus {x}");
        }
    }

    #[test]
    fn square_roots_of_softplus_equal_the_router_table() {
        let want =
            [0.3562696f64, 0.5596979, 0.8325546, 0.9869534, 1.1459763, 1.4583991, 1.7460204, 5.0];
        for (x, want) in [-2.0, -1.0, 0.0, 0.5, 1.0, 2.0, 3.0, 25.0].into_iter().zip(want) {
            assert!((f64::from(softplus(x).sqrt()) - want).abs() < 3e-7, "{x}");
        }
    }

    #[test]
    fn reductions_follow_the_stated_order() {
        let a: Vec<f32> = (0..21).map(|i| (i as f32 * 1.7).fract() + 1e-3).collect();
        let b: Vec<f32> = (0..21).map(|i| (i as f32 * 0.3).fract() - 0.4).collect();
        let (mut products, mut plain) = ([0f32; 8], [0f32; 8]);
        for i in 0..21 {
            products[i % 8] = a[i].mul_add(b[i], products[i % 8]);
            plain[i % 8] += a[i];
        }
        let tree = |l: [f32; 8]| {
            let even = (l[0] + l[4]) + (l[2] + l[6]);
            let odd = (l[1] + l[5]) + (l[3] + l[7]);
            even + odd
        };
        assert_eq!(dot(&a, &b).to_bits(), tree(products).to_bits());
        assert_eq!(sum(&a).to_bits(), tree(plain).to_bits());
    }

    #[test]
    fn order_key_sorts_as_the_selection_rule_says() {
        let values = [f32::NAN, f32::NEG_INFINITY, -1.0, -1e-40, 0.0, 1e-40, 2.0, f32::INFINITY];
        for pair in values.windows(2) {
            assert!(order_key(pair[0]) < order_key(pair[1]), "{pair:?}");
        }
        assert_eq!(order_key(0.0), order_key(-0.0));
    }
}
