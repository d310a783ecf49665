//! Residual streams, norms, rotations.

use super::arena::Call;
use super::matrix;
use crate::cpu::CpuReference;
use crate::cuda::abi::{
    ExactEmbedArgs, ExactHyperArgs, ExactHyperPostArgs, ExactNormArgs, ExactQueryArgs,
    ExactRopeArgs, ExactScaleArgs,
};
use crate::cuda::ops::rounding_code;
use crate::error::KernelError;
use crate::ops::{
    Embed, HyperHead, HyperPost, HyperPre, HyperWeights, IndexQuery, IndexRounding, Kernels as _,
    RmsNorm, Rope, RopeTable,
};
use crate::tensor::TensorMut;

type Done = Result<(), KernelError>;

pub(super) fn embed(mut call: Call<'_>, mut a: Embed<'_>) -> Done {
    let table = matrix(call.op(), a.table)?;
    let (ids, out) = (call.u32s(a.ids)?, call.target(&a.streams)?);
    let arguments = ExactEmbedArgs {
        ids: call.address(&ids)?,
        out: call.address(&out)?,
        table,
        tokens: a.ids.len() as u32,
        reserved: 0,
    };
    call.launch("exact_embed", [a.ids.len(), 1, 1], 256, &arguments)?;
    call.output(&mut a.streams, &out)
}

/// Weights of a site and its numbers; without outputs.
fn hyper(call: &mut Call<'_>, weights: &HyperWeights) -> Result<ExactHyperArgs, KernelError> {
    let (base, scale) = (call.f32s(&weights.base)?, call.f32s(&weights.scale)?);
    Ok(ExactHyperArgs {
        base: call.address(&base)?,
        scale: call.address(&scale)?,
        maps: matrix(call.op(), &weights.maps)?,
        ..ExactHyperArgs::default()
    })
}

pub(super) fn hyper_pre(mut call: Call<'_>, mut a: HyperPre<'_>) -> Done {
    let (t, d) = (a.y.rows(), a.y.cols());
    let streams = call.input(&a.streams)?;
    let (post, comb, y) = (call.target(&a.post)?, call.target(&a.comb)?, call.target(&a.y)?);
    let arguments = ExactHyperArgs {
        streams: call.address(&streams)?,
        post: call.address(&post)?,
        comb: call.address(&comb)?,
        y: call.address(&y)?,
        hc_eps: a.hc_eps,
        norm_eps: a.norm_eps,
        iters: a.iters,
        rounding: rounding_code(a.rounding),
        tokens: t as u32,
        hidden: d as u32,
        ..hyper(&mut call, a.weights)?
    };
    call.launch("exact_hyper_pre", [t, 1, 1], 128, &arguments)?;
    call.output(&mut a.post, &post)?;
    call.output(&mut a.comb, &comb)?;
    call.output(&mut a.y, &y)
}

pub(super) fn hyper_head(mut call: Call<'_>, mut a: HyperHead<'_>) -> Done {
    let (t, d) = (a.y.rows(), a.y.cols());
    let (streams, y) = (call.input(&a.streams)?, call.target(&a.y)?);
    let arguments = ExactHyperArgs {
        streams: call.address(&streams)?,
        y: call.address(&y)?,
        hc_eps: a.hc_eps,
        norm_eps: a.norm_eps,
        rounding: rounding_code(a.rounding),
        tokens: t as u32,
        hidden: d as u32,
        ..hyper(&mut call, a.weights)?
    };
    call.launch("exact_hyper_head", [t, 1, 1], 128, &arguments)?;
    call.output(&mut a.y, &y)
}

pub(super) fn hyper_post(mut call: Call<'_>, mut a: HyperPost<'_>) -> Done {
    let (t, d) = (a.out.rows(), a.out.cols());
    let streams = call.changed(&mut a.streams)?;
    let (out, post, comb) = (call.input(&a.out)?, call.input(&a.post)?, call.input(&a.comb)?);
    let arguments = ExactHyperPostArgs {
        streams: call.address(&streams)?,
        out: call.address(&out)?,
        post: call.address(&post)?,
        comb: call.address(&comb)?,
        tokens: t as u32,
        hidden: d as u32,
        rounding: rounding_code(a.rounding),
        reserved: 0,
    };
    call.launch("exact_hyper_post", [t, 1, 1], 256, &arguments)?;
    call.output(&mut a.streams, &streams)
}

pub(super) fn rms_norm(mut call: Call<'_>, mut a: RmsNorm<'_>) -> Done {
    let count = a.x.rows() * a.x.cols();
    let (x, y) = (call.input(&a.x)?, call.target(&a.y)?);
    let weight = a.weight.map(|weight| call.f32s(weight)).transpose()?;
    let groups = count / a.dim;
    let arguments = ExactNormArgs {
        x: call.address(&x)?,
        weight: weight.map_or(Ok(0), |weight| call.address(&weight))?,
        y: call.address(&y)?,
        groups: groups as u32,
        dim: a.dim as u32,
        eps: a.eps,
        rounding: rounding_code(a.rounding),
    };
    call.launch("exact_norm", [groups.div_ceil(16), 1, 1], 128, &arguments)?;
    call.output(&mut a.y, &y)
}

pub(super) fn rope(mut call: Call<'_>, mut a: Rope<'_>) -> Done {
    let heads = a.x.rows() * (a.x.cols() / a.dim);
    let (x, table) = (call.changed(&mut a.x)?, call.input(&a.table)?);
    let arguments = ExactRopeArgs {
        x: call.address(&x)?,
        table: call.address(&table)?,
        heads: heads as u32,
        heads_per_row: (a.x.cols() / a.dim) as u32,
        dim: a.dim as u32,
        inverse: a.inverse.into(),
        rounding: rounding_code(a.rounding),
        reserved: 0,
    };
    call.launch("exact_rope", [heads.div_ceil(8), 1, 1], 256, &arguments)?;
    call.output(&mut a.x, &x)
}

pub(super) fn index_query(mut call: Call<'_>, mut a: IndexQuery<'_>) -> Done {
    let heads = a.q.rows() * (a.q.cols() / 128);
    let (q, table) = (call.changed(&mut a.q)?, call.input(&a.table)?);
    let arguments = ExactQueryArgs {
        q: call.address(&q)?,
        table: call.address(&table)?,
        heads: heads as u32,
        heads_per_row: (a.q.cols() / 128) as u32,
        kind: match a.kind {
            IndexRounding::Fp4 => 0,
            IndexRounding::Fp8 => 1,
            IndexRounding::Bf16 => 2,
            IndexRounding::None => 3,
        },
        reserved: 0,
    };
    call.launch("exact_query", [heads.div_ceil(16), 1, 1], 128, &arguments)?;
    call.output(&mut a.q, &q)
}

pub(super) fn scale(mut call: Call<'_>, mut x: TensorMut<'_>, factor: f32) -> Done {
    let count = x.rows() * x.cols();
    let values = call.changed(&mut x)?;
    let arguments = ExactScaleArgs { x: call.address(&values)?, count: count as u32, factor };
    call.launch("exact_scale", [count.div_ceil(256), 1, 1], 256, &arguments)?;
    call.output(&mut x, &values)
}

/// Tables are those of the reference's library, so they are made where it runs.
pub(super) fn rope_table(mut call: Call<'_>, mut a: RopeTable<'_>) -> Done {
    let (rows, cols) = (a.table.rows(), a.table.cols());
    let Some(there) = a.table.device() else { return CpuReference.rope_table(a) };
    let mut values = vec![0.0; rows * cols];
    let table = TensorMut::from_f32(&mut values, rows, cols)?;
    CpuReference.rope_table(RopeTable { positions: a.positions, freqs: a.freqs, table })?;
    let made = call.f32s(&values)?;
    call.copy(&there, &made)?;
    call.output(&mut a.table, &there)
}
