//! Every code, every tie between neighbours and the edges, against tables built by arithmetic in
//! f64 and a search for the nearest entry.

use super::*;

/// Magnitudes of a format with `mantissa` bits and `bias`, codes ascending.
fn magnitudes(codes: u32, mantissa: u32, bias: i32) -> Vec<f64> {
    let steps = 1 << mantissa;
    (0..codes)
        .map(|code| {
            let (e, m) = ((code / steps) as i32, f64::from(code % steps) / f64::from(steps));
            if e == 0 { m * 2f64.powi(1 - bias) } else { (1.0 + m) * 2f64.powi(e - bias) }
        })
        .collect()
}

/// Nearest code by search; at equal distance the even one; saturating.
fn nearest(table: &[f64], x: f32) -> u8 {
    let x = f64::from(x.abs()).min(table[table.len() - 1]);
    let mut best = 0;
    for (code, value) in table.iter().enumerate() {
        let (new, old) = ((value - x).abs(), (table[best] - x).abs());
        if new < old || (new == old && code % 2 == 0) {
            best = code;
        }
    }
    best as u8
}

fn neighbours(x: f32) -> [f32; 3] {
    let bits = x.to_bits();
    [f32::from_bits(bits - 1), x, f32::from_bits(bits + 1)]
}

fn sweep(table: &[f64], sign_bit: u8, encode: fn(f32) -> u8, round: fn(f32) -> f32) {
    let check = |x: f32| {
        let want = nearest(table, x);
        assert_eq!(encode(x), want, "{x:e}");
        assert_eq!(encode(-x), want | sign_bit, "-{x:e}");
        assert_eq!(f64::from(round(x)), table[want as usize], "{x:e}");
        assert_eq!(f64::from(round(-x)), -table[want as usize], "-{x:e}");
    };
    for pair in table.windows(2) {
        for x in [pair[0], (pair[0] + pair[1]) / 2.0, pair[1]] {
            if x == 0.0 {
                continue;
            }
            neighbours(x as f32).into_iter().for_each(check);
        }
    }
    let mut x = 1e-12f32;
    while x < 1e6 {
        check(x);
        x *= 1.003;
    }
    for x in [0.0, f32::MIN_POSITIVE, 1e-45, f32::MAX, f32::INFINITY] {
        check(x);
    }
}

#[test]
fn e4m3_decodes_every_code() {
    let table = magnitudes(127, 3, 7);
    for code in 0..127u8 {
        assert_eq!(f64::from(e4m3_decode(code)), table[code as usize], "{code:#x}");
        let negative = e4m3_decode(code | 0x80);
        assert_eq!(f64::from(negative), -table[code as usize], "{code:#x}");
        assert!(negative.is_sign_negative());
        assert_eq!(e4m3_encode(e4m3_decode(code)), code);
        assert_eq!(e4m3_encode(negative), code | 0x80);
    }
    assert!(e4m3_decode(0x7f).is_nan() && e4m3_decode(0xff).is_nan());
    assert_eq!((table[126], table[1]), (448.0, 2f64.powi(-9)));
}

#[test]
fn e4m3_encodes_every_tie_to_even_and_saturates() {
    sweep(&magnitudes(127, 3, 7), 0x80, e4m3_encode, e4m3_round);
    assert_eq!((e4m3_encode(f32::NAN), e4m3_encode(-f32::NAN)), (0x7f, 0xff));
    assert_eq!((e4m3_encode(1e30), e4m3_encode(f32::NEG_INFINITY)), (0x7e, 0xfe));
    assert_eq!((e4m3_encode(0.0), e4m3_encode(-0.0)), (0, 0x80));
    assert!(e4m3_round(f32::NAN).is_nan());
    assert_eq!(e4m3_round(-0.0).to_bits(), (-0f32).to_bits());
}

#[test]
fn e2m1_decodes_every_code_and_encodes_every_tie_to_even() {
    let want = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    assert_eq!(magnitudes(8, 1, 1), want);
    for code in 0..8u8 {
        assert_eq!(f64::from(e2m1_decode(code)), want[code as usize]);
        assert_eq!(f64::from(e2m1_decode(code | 8)), -want[code as usize]);
        assert_eq!(e2m1_decode(code | 0x50), e2m1_decode(code), "upper bits are ignored");
    }
    sweep(&want, 8, e2m1_encode, e2m1_round);
    for (x, value) in
        [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)]
    {
        assert_eq!(e2m1_decode(e2m1_encode(x)), value, "{x}");
    }
    assert_eq!((e2m1_encode(f32::NAN), e2m1_encode(-0.0)), (7, 8));
}

#[test]
fn e8m0_is_a_power_of_two_for_every_byte() {
    for byte in 0..255u8 {
        let want = 2f64.powi(i32::from(byte) - 127);
        assert_eq!(f64::from(e8m0_decode(byte)), want, "{byte}");
        assert_eq!(e8m0_encode(i32::from(byte) - 127), byte);
    }
    assert!(e8m0_decode(255).is_nan());
    assert_eq!((e8m0_encode(-500), e8m0_encode(500)), (0, 254));
}

#[test]
fn bf16_agrees_with_the_half_crate_on_a_sweep_of_all_upper_halves() {
    for high in 0..=u16::MAX {
        for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
            let x = f32::from_bits((u32::from(high) << 16) | low);
            let want = half::bf16::from_f32(x);
            if x.is_nan() {
                assert!(bf16_round(x).is_nan() && bf16_decode(bf16_encode(x)).is_nan());
            } else {
                assert_eq!(bf16_encode(x), want.to_bits(), "{x:e}");
                assert_eq!(bf16_round(x).to_bits(), want.to_f32().to_bits(), "{x:e}");
            }
        }
        let exact = bf16_decode(high);
        assert_eq!(exact.to_bits(), u32::from(high) << 16);
    }
}

/// Smallest `e` with `amax <= top * 2^e`, by trial in f64, on the FP32 quotient as the rule says.
fn exponent_by_trial(amax: f32, top: f32) -> i32 {
    let quotient = f64::from(amax / top);
    (-130..=127).find(|e| quotient <= 2f64.powi(*e)).unwrap_or(127)
}

#[test]
fn scale_exponents_are_the_smallest_that_hold_the_group() {
    let mut x = 1e-3f32;
    while x < 1e30 {
        for a in neighbours(x) {
            assert_eq!(q8_exponent(a), exponent_by_trial(a, 448.0), "{a:e}");
            assert_eq!(q4_exponent(a), exponent_by_trial(a, 6.0), "{a:e}");
        }
        x *= 1.017;
    }
    for e in -20..20 {
        for (top, exponent) in [(448.0f32, q8_exponent as fn(f32) -> i32), (6.0, q4_exponent)] {
            let edge = top * 2f32.powi(e);
            let [_, at, above] = neighbours(edge);
            if top == 6.0 || edge > 1e-4 {
                assert_eq!((exponent(at), exponent(above)), (e, e + 1), "{edge:e}");
            }
        }
    }
    assert_eq!(q8_exponent(0.0), exponent_by_trial(1e-4, 448.0));
    assert_eq!(q4_exponent(0.0), -126);
    assert_eq!((q8_exponent(f32::INFINITY), q4_exponent(f32::INFINITY)), (127, 127));
    assert_eq!(index_scale(0.0), 1e-4 / 448.0);
}

#[test]
fn amax_ignores_nan_and_sees_every_element() {
    for at in 0..19 {
        let mut group = vec![1.0f32; 19];
        group[(at + 3) % 19] = f32::NAN;
        group[at] = -7.0;
        assert_eq!(amax(&group), 7.0);
    }
    assert_eq!(amax(&[]), 0.0);
}

#[test]
fn rounding_a_group_equals_encode_and_decode() {
    let group: Vec<f32> = (0..128).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.013).collect();
    let mut eight = group.clone();
    let scale = e8m0_decode(q8_round(&mut eight));
    for (x, y) in group.iter().zip(&eight) {
        assert_eq!(*y, e4m3_decode(e4m3_encode(x / scale)) * scale);
    }
    let mut four = group[..32].to_vec();
    let scale = e8m0_decode(q4_round(&mut four));
    for (x, y) in group.iter().zip(&four) {
        assert_eq!(*y, e2m1_decode(e2m1_encode(x / scale)) * scale);
    }
}
