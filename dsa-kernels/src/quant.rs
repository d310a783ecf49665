//! Bit-exact number formats, one element at a time: E4M3, E8M0, E2M1, BF16, and the rules by which
//! DeepSeek-V4 chooses their scales.
//!
//! All functions are pure and branch-free on finite input, so that a loop over them vectorises and
//! gives the same bits.

/// Largest finite E4M3 magnitude.
pub const E4M3_MAX: f32 = 448.0;
/// Largest E2M1 magnitude.
pub const E2M1_MAX: f32 = 6.0;
/// FP32 value of an E4M3 code; 0x7f and 0xff are NaN.
#[inline(always)]
#[must_use]
pub fn e4m3_decode(code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7f);
    // As FP32 bits the code is its value times 2^-120, subnormal codes included.
    let value = f32::from_bits(magnitude << 20) * f32::from_bits(247 << 23);
    let value = if magnitude == 0x7f { f32::NAN } else { value };
    f32::from_bits(value.to_bits() | (u32::from(code & 0x80) << 24))
}

/// E4M3 code nearest to `x`, ties to the even code, saturating at 448; NaN gives 0x7f with `x`'s
/// sign.
#[inline(always)]
#[must_use]
pub fn e4m3_encode(x: f32) -> u8 {
    let bits = x.to_bits();
    let sign = (bits >> 24) & 0x80;
    let nan = x.is_nan();
    let magnitude = (bits & 0x7fff_ffff).min(E4M3_MAX.to_bits());
    // Normal codes start at 2^-6; 120 aligns FP32's exponent bias with E4M3's.
    let normal = (magnitude + 0x7_ffff + ((magnitude >> 20) & 1)).wrapping_sub(120 << 23) >> 20;
    // Adding 2^14, whose unit in the last place is 2^-9, rounds to a multiple of 2^-9.
    let small = (f32::from_bits(magnitude) + 16384.0).to_bits().wrapping_sub(16384f32.to_bits());
    let code = if magnitude < 0x3c80_0000 { small } else { normal };
    (sign | if nan { 0x7f } else { code }) as u8
}

/// Value of an E8M0 scale byte: `2^(byte - 127)`; 255 is NaN.
#[inline(always)]
#[must_use]
pub fn e8m0_decode(byte: u8) -> f32 {
    let bits = match byte {
        0 => 0x0040_0000,
        255 => 0x7fc0_0000,
        b => u32::from(b) << 23,
    };
    f32::from_bits(bits)
}

/// E8M0 byte of `2^exponent`, clamped to the format's range -127 to 127.
#[inline(always)]
#[must_use]
pub fn e8m0_encode(exponent: i32) -> u8 {
    (exponent.clamp(-127, 127) + 127) as u8
}

/// FP32 value of the low four bits of `code`, an E2M1 number.
#[inline(always)]
#[must_use]
pub fn e2m1_decode(code: u8) -> f32 {
    // As FP32 bits the magnitude is its value times 2^-126.
    let value = f32::from_bits(u32::from(code & 7) << 22) * f32::from_bits(253 << 23);
    f32::from_bits(value.to_bits() | (u32::from(code & 8) << 28))
}

/// E2M1 code nearest to `x`, ties to the even code, saturating at 6. There is no NaN code: NaN
/// saturates.
#[inline(always)]
#[must_use]
pub fn e2m1_encode(x: f32) -> u8 {
    let bits = x.to_bits();
    let sign = (bits >> 28) & 8;
    let magnitude = (bits & 0x7fff_ffff).min(E2M1_MAX.to_bits());
    let normal = (magnitude + 0x1f_ffff + ((magnitude >> 22) & 1)).wrapping_sub(126 << 23) >> 22;
    // 2^22 has a unit in the last place of 0.5, the step of the codes below 1.
    let small =
        (f32::from_bits(magnitude) + 4_194_304.0).to_bits().wrapping_sub(4_194_304f32.to_bits());
    let code = if magnitude < 0x3f80_0000 { small } else { normal };
    (sign | code) as u8
}

/// `x` rounded to nearest-even BF16, as FP32; a NaN becomes quiet and keeps its upper bits.
#[inline(always)]
#[must_use]
pub fn bf16_round(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000;
    f32::from_bits(if x.is_nan() { (bits & 0xffff_0000) | 0x0040_0000 } else { rounded })
}

/// BF16 bits of `x`, rounded to nearest even.
#[inline(always)]
#[must_use]
pub fn bf16_encode(x: f32) -> u16 {
    (bf16_round(x).to_bits() >> 16) as u16
}

/// FP32 value of BF16 bits.
#[inline(always)]
#[must_use]
pub fn bf16_decode(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Smallest `e` with `value <= 2^e`, read from the bits of a positive FP32 number, at most 127.
#[inline(always)]
fn exponent_above(value: f32) -> i32 {
    let bits = value.to_bits();
    ((bits >> 23) as i32 - 127 + i32::from(bits & 0x7f_ffff != 0)).min(127)
}

/// Rule Q8: exponent of the power-of-two scale of an FP8 group with largest magnitude `amax`,
/// `ceil(log2(max(amax, 1e-4) / 448))`.
#[inline(always)]
#[must_use]
pub fn q8_exponent(amax: f32) -> i32 {
    exponent_above(amax.max(1e-4) / E4M3_MAX)
}

/// Rule Q4: exponent of the scale of an FP4 group of 32, `ceil(log2(max(amax, 6 * 2^-126) / 6))`.
#[inline(always)]
#[must_use]
pub fn q4_exponent(amax: f32) -> i32 {
    exponent_above(amax.max(6.0 * f32::MIN_POSITIVE) / E2M1_MAX)
}

/// FP32 scale of an FP8 index row: `max(amax, 1e-4) / 448`, not a power of two.
#[inline(always)]
#[must_use]
pub fn index_scale(amax: f32) -> f32 {
    amax.max(1e-4) / E4M3_MAX
}

/// Largest magnitude of a group; NaN elements do not count.
#[inline(always)]
#[must_use]
pub fn amax(group: &[f32]) -> f32 {
    // Eight lanes let the loop vectorise; the maximum does not depend on the order.
    let mut lanes = [0f32; 8];
    let chunks = group.chunks_exact(8);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            let a = x.abs();
            *lane = if a > *lane { a } else { *lane };
        }
    }
    rest.iter().map(|x| x.abs()).chain(lanes).fold(0.0, |m, a| if a > m { a } else { m })
}

/// Rounds one group in place by rule Q8 and returns the scale byte; values become
/// `e4m3(x / 2^e) * 2^e`.
#[inline(always)]
pub fn q8_round(group: &mut [f32]) -> u8 {
    let exponent = q8_exponent(amax(group));
    let (scale, inverse) =
        (e8m0_decode(e8m0_encode(exponent)), e8m0_decode(e8m0_encode(-exponent)));
    for x in group {
        *x = e4m3_round(*x * inverse) * scale;
    }
    e8m0_encode(exponent)
}

/// `e4m3_decode(e4m3_encode(x))` without the table, for loops that vectorise.
#[inline(always)]
#[must_use]
pub fn e4m3_round(x: f32) -> f32 {
    let bits = x.to_bits();
    let sign = bits & 0x8000_0000;
    let magnitude = (bits & 0x7fff_ffff).min(E4M3_MAX.to_bits());
    let normal = (magnitude + 0x7_ffff + ((magnitude >> 20) & 1)) & !0xf_ffff;
    let small = ((f32::from_bits(magnitude) + 16384.0) - 16384.0).to_bits();
    let rounded = if magnitude < 0x3c80_0000 { small } else { normal };
    f32::from_bits(sign | if x.is_nan() { 0x7fc0_0000 } else { rounded })
}

/// `e2m1_decode(e2m1_encode(x))` without the table.
#[inline(always)]
#[must_use]
pub fn e2m1_round(x: f32) -> f32 {
    let bits = x.to_bits();
    let sign = bits & 0x8000_0000;
    let magnitude = (bits & 0x7fff_ffff).min(E2M1_MAX.to_bits());
    let normal = (magnitude + 0x1f_ffff + ((magnitude >> 22) & 1)) & !0x3f_ffff;
    let small = ((f32::from_bits(magnitude) + 4_194_304.0) - 4_194_304.0).to_bits();
    let rounded = if magnitude < 0x3f80_0000 { small } else { normal };
    f32::from_bits(sign | rounded)
}

/// Rounds one group in place by rule Q4 and returns the scale byte.
#[inline(always)]
pub fn q4_round(group: &mut [f32]) -> u8 {
    let exponent = q4_exponent(amax(group));
    let (scale, inverse) =
        (e8m0_decode(e8m0_encode(exponent)), e8m0_decode(e8m0_encode(-exponent)));
    for x in group {
        *x = e2m1_round(*x * inverse) * scale;
    }
    e8m0_encode(exponent)
}

#[cfg(test)]
#[path = "quant/tests.rs"]
mod tests;
