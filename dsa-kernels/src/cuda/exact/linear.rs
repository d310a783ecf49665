//! Matrix products, the router and the experts.

use super::arena::Call;
use super::matrix;
use crate::cuda::abi::{
    ExactLinearArgs, ExactMoeArgs, ExactQuantArgs, ExactRouteArgs, Matrix as AbiMatrix,
};
use crate::cuda::ops::{holds, rounding_code};
use crate::device::MemSlice;
use crate::error::KernelError;
use crate::ops::{ActQuant, Choice, Linear, Moe, Route};

type Done = Result<(), KernelError>;

/// Outputs of a block.
const OUTPUTS: usize = 32;
/// Most experts that the router's block has room for.
const EXPERTS_MAX: usize = 1024;
/// Most experts of a token.
const CHOSEN_MAX: usize = 64;

/// Rows of `cols` values, rounded in parts of `part` as a linear's input is.
fn quantised(
    call: &mut Call<'_>,
    x: MemSlice,
    (rows, cols, part): (usize, usize, usize),
    quant: ActQuant,
) -> Result<MemSlice, KernelError> {
    if quant == ActQuant::None || rows * cols == 0 {
        return Ok(x);
    }
    let y = call.values(rows * cols)?;
    let arguments = ExactQuantArgs {
        x: call.address(&x)?,
        y: call.address(&y)?,
        rows: rows as u32,
        cols: cols as u32,
        part: part as u32,
        reserved: 0,
    };
    let groups = rows * (cols / part) * part.div_ceil(128);
    call.launch("exact_quantise", [groups.div_ceil(4), 1, 1], 128, &arguments)?;
    Ok(y)
}

pub(super) fn linear(mut call: Call<'_>, mut a: Linear<'_>) -> Done {
    let weight = matrix(call.op(), a.weight)?;
    let (t, n) = (a.y.rows(), a.y.cols());
    let x = call.input(&a.x)?;
    let x = quantised(&mut call, x, (t, a.x.cols(), a.weight.cols()), a.quant)?;
    let y = call.target(&a.y)?;
    let arguments = ExactLinearArgs {
        x: call.address(&x)?,
        y: call.address(&y)?,
        weight,
        tokens: t as u32,
        groups: a.groups as u32,
        rounding: rounding_code(a.rounding),
        reserved: 0,
    };
    let grid = [(n / a.groups).div_ceil(OUTPUTS), t.div_ceil(8), a.groups];
    call.launch("exact_linear", grid, 256, &arguments)?;
    call.output(&mut a.y, &y)
}

pub(super) fn route(mut call: Call<'_>, mut a: Route<'_>) -> Done {
    let (t, count, k) = (a.logits.rows(), a.logits.cols(), a.k);
    holds(call.op(), count <= EXPERTS_MAX, "more than 1024 experts")?;
    let logits = call.input(&a.logits)?;
    let (experts, weights) = (call.target(&a.experts)?, call.target(&a.weights)?);
    let mut arguments = ExactRouteArgs {
        logits: call.address(&logits)?,
        experts: call.address(&experts)?,
        weights: call.address(&weights)?,
        tokens: t as u32,
        count: count as u32,
        k: k as u32,
        scale: a.scale,
        ..ExactRouteArgs::default()
    };
    match a.choice {
        Choice::Biased(bias) => {
            let bias = call.f32s(bias)?;
            arguments.bias = call.address(&bias)?;
        }
        Choice::Hash { table, ids } => {
            // The lines of these tokens alone.
            let lines = ids.iter().flat_map(|id| &table[*id as usize * k..][..k]);
            let lines: Vec<u32> = lines.copied().collect();
            let table = call.u32s(&lines)?;
            let ids = call.u32s(&(0..t as u32).collect::<Vec<_>>())?;
            (arguments.table, arguments.ids) = (call.address(&table)?, call.address(&ids)?);
        }
    }
    call.launch("exact_route", [t, 1, 1], 32, &arguments)?;
    call.output(&mut a.experts, &experts)?;
    call.output(&mut a.weights, &weights)
}

/// The bytes of a matrix's argument, for a list of them in memory.
fn bytes_of(m: &AbiMatrix) -> impl Iterator<Item = u8> {
    let wide = [m.data, m.scales].map(u64::to_le_bytes);
    let narrow = [m.rows, m.cols, m.format, m.rounded].map(u32::to_le_bytes);
    wide.into_iter().flatten().chain(narrow.into_iter().flatten())
}

pub(super) fn moe(mut call: Call<'_>, mut a: Moe<'_>) -> Done {
    let (t, d, k, op) = (a.x.rows(), a.x.cols(), a.experts.cols(), call.op());
    let width = a.shared.w1.rows();
    holds(op, k <= CHOSEN_MAX, "more than 64 experts of a token")?;
    let is_even = a.routed.iter().all(|expert| expert.w1.rows() == width);
    holds(op, is_even, "experts of different widths")?;
    let mut list = Vec::new();
    for expert in a.routed.iter().chain([a.shared]) {
        for weight in [&expert.w1, &expert.w2, &expert.w3] {
            list.extend(bytes_of(&matrix(op, weight)?));
        }
    }
    let (matrices, x) = (call.bytes(&list)?, call.input(&a.x)?);
    let x = quantised(&mut call, x, (t, d, d), a.quant)?;
    let (experts, weights) = (call.input(&a.experts)?, call.input(&a.weights)?);
    // Each token with each of its experts, and with the shared one.
    let pairs = t * (k + 1);
    let (inner, out) = (call.values(pairs * width)?, call.values(pairs * d)?);
    let y = call.target(&a.y)?;
    let mut arguments = ExactMoeArgs {
        x: call.address(&x)?,
        experts: call.address(&experts)?,
        weights: call.address(&weights)?,
        matrices: call.address(&matrices)?,
        inner: call.address(&inner)?,
        out: call.address(&out)?,
        y: call.address(&y)?,
        tokens: t as u32,
        k: k as u32,
        hidden: d as u32,
        width: width as u32,
        count: a.routed.len() as u32,
        limit: a.limit,
        rounding: rounding_code(a.rounding),
        reserved: 0,
    };
    call.launch("exact_moe_up", [pairs, width.div_ceil(OUTPUTS), 1], 128, &arguments)?;
    let inner = quantised(&mut call, inner, (pairs, width, width), a.quant)?;
    arguments.inner = call.address(&inner)?;
    call.launch("exact_moe_down", [pairs, d.div_ceil(OUTPUTS), 1], 128, &arguments)?;
    call.launch("exact_moe_sum", [t, 1, 1], 128, &arguments)?;
    call.output(&mut a.y, &y)
}
