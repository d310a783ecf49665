//! The feed-forward sublayer: router and experts.

use super::{FfnWeights, Router};
use crate::forward::Step;
use crate::workspace::Buffers;
use dsa_kernels::KernelError;
use dsa_kernels::ops::{ActQuant, Choice, Linear, Moe, Rounding, Route};

/// Router and experts, from the normed input `b.x` to `b.out`.
pub(crate) fn run(
    step: &Step<'_>,
    b: &mut Buffers,
    weights: &FfnWeights,
    ids: &[u32],
) -> Result<(), KernelError> {
    let (t, d) = (step.tokens, step.dims);
    step.kernels.linear(Linear {
        x: b.x.view(t, d.hidden)?,
        weight: &weights.gate,
        groups: 1,
        quant: ActQuant::None,
        rounding: Rounding::None,
        y: b.router.view_mut(t, d.experts)?,
    })?;
    let choice = match &weights.router {
        Router::Bias(bias) => Choice::Biased(bias),
        Router::Hash(table) => Choice::Hash { table, ids },
    };
    step.kernels.route(Route {
        logits: b.router.view(t, d.experts)?,
        choice,
        k: d.expert_k,
        scale: step.route_scale,
        experts: b.experts.view_mut(t, d.expert_k)?,
        weights: b.expert_w.view_mut(t, d.expert_k)?,
    })?;
    step.kernels.moe(Moe {
        x: b.x.view(t, d.hidden)?,
        experts: b.experts.view(t, d.expert_k)?,
        weights: b.expert_w.view(t, d.expert_k)?,
        routed: &weights.routed,
        shared: &weights.shared,
        limit: step.swiglu_limit,
        quant: step.numeric.quant,
        rounding: step.numeric.rounding,
        y: b.out.view_mut(t, d.hidden)?,
    })
}
