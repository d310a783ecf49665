//! Experts: tokens are gathered per expert, multiplied as matrices, and summed per token in
//! ascending order of expert number.

#![expect(unsafe_code, reason = "vector instructions, and outputs filled by several threads")]

use super::gemm::{FastWeight, Input, Product, own, quantise_rows};
use super::team::{Parts, Scratch, Team};
use super::wide::Pairs;
use crate::cpu::body;
use crate::error::KernelError;
use crate::ops::{ExpertWeights, Moe, Rounding};

/// Rows of one task: enough to use a widened panel well, few enough to balance two threads.
const ROWS: usize = 96;

/// A run of (token, slot) pairs that go through one expert; `None` is the shared one.
struct Task {
    expert: Option<usize>,
    from: usize,
    to: usize,
}

/// Pairs grouped by expert, the tasks over them, and where each token's pairs are.
struct Plan {
    /// Token and weight of each row, grouped by expert, tokens ascending; the shared expert last.
    rows: Vec<(usize, f32)>,
    tasks: Vec<Task>,
    /// For each token its rows in ascending order of expert, the shared one last.
    places: Vec<u32>,
}

fn plan(a: &Moe<'_>) -> Result<Plan, KernelError> {
    let (t, k, n) = (a.x.rows(), a.experts.cols(), a.routed.len());
    let (chosen, weights) = (a.experts.i32()?, a.weights.f32()?);
    let mut starts = vec![0usize; n + 1];
    chosen.iter().for_each(|e| starts[*e as usize + 1] += 1);
    (0..n).for_each(|e| starts[e + 1] += starts[e]);
    let mut rows = vec![(0, 1.0); t * (k + 1)];
    let mut next = starts.clone();
    let mut filled = vec![0usize; t];
    let mut places = vec![0u32; t * (k + 1)];
    for (i, e) in chosen.iter().enumerate() {
        let at = next[*e as usize];
        next[*e as usize] += 1;
        rows[at] = (i / k, weights[i]);
    }
    // Rows are in ascending order of expert, and equal experts of a token in order of slot.
    for (at, (token, _)) in rows[..t * k].iter().enumerate() {
        places[token * (k + 1) + filled[*token]] = at as u32;
        filled[*token] += 1;
    }
    for token in 0..t {
        rows[t * k + token] = (token, 1.0);
        places[token * (k + 1) + k] = (t * k + token) as u32;
    }
    let mut tasks = Vec::new();
    let mut cut = |expert, from: usize, to: usize| {
        let pieces = (to - from).div_ceil(ROWS).max(1);
        let size = (to - from).div_ceil(pieces).max(1);
        tasks.extend((from..to).step_by(size).map(|f| Task {
            expert,
            from: f,
            to: to.min(f + size),
        }));
    };
    cut(None, t * k, t * (k + 1));
    (0..n).for_each(|e| cut(Some(e), starts[e], starts[e + 1]));
    Ok(Plan { rows, tasks, places })
}

/// # Safety
/// The machine has AVX2, FMA and F16C.
pub(crate) unsafe fn moe(team: &Team, mut a: Moe<'_>) -> Result<(), KernelError> {
    a.check()?;
    let (t, d, k) = (a.x.rows(), a.x.cols(), a.experts.cols());
    let mut takes_pairs = true;
    for e in a.routed.iter().chain([a.shared]) {
        own("moe", &e.w2)?;
        takes_pairs &= own("moe", &e.w1)?.takes_pairs() && own("moe", &e.w3)?.takes_pairs();
    }
    let plan = plan(&a)?;
    let mut x = Scratch::new(t * d);
    x.copy_from_slice(a.x.f32()?);
    let shared = own("moe", &a.shared.w1)?;
    {
        let x = Parts::new(&mut x);
        team.run_rows(t, 1, d / 2, |r| {
            // SAFETY: CPU features are the caller's promise; each task has its own rows.
            unsafe { quantise_rows(x.range(r.start * d..r.end * d), d, d, a.quant) };
            Ok(())
        })?;
    }
    let pairs = if takes_pairs { shared.pairs(&x, 1) } else { None };
    let x = match &pairs {
        Some(pairs) => Input::Pairs(pairs, 0, 0),
        None => Input::Floats(&x, d),
    };
    let mut results = Scratch::new(plan.rows.len() * d);
    {
        let results = Parts::new(&mut results);
        let ns = 3 * shared.cost_ns(t * (k + 1));
        let ns = ns.max(plan.tasks.len() * 3 * shared.cost_ns(1));
        team.run(plan.tasks.len(), ns, |i| {
            let task = &plan.tasks[i];
            // SAFETY: CPU features; each task has its own rows of the results.
            unsafe {
                let out = results.range(task.from * d..task.to * d);
                expert(&a, task.expert.map_or(a.shared, |e| &a.routed[e]), x, (&plan, task), out)
            }
        })?;
    }
    let rounding = a.rounding;
    let y = Parts::new(a.y.f32()?);
    team.run_rows(t, 1, d * (k + 1) / 8, |tokens| {
        for token in tokens {
            let places = &plan.places[token * (k + 1)..(token + 1) * (k + 1)];
            // SAFETY: CPU features; each task has its own tokens.
            unsafe { sum(&results, places, rounding, y.range(token * d..(token + 1) * d)) };
        }
        Ok(())
    })
}

/// The rows of one task, gathered.
enum Gathered {
    Floats(Scratch),
    Pairs(Pairs),
}

impl Gathered {
    fn new(rows: &[(usize, f32)], x: Input<'_>) -> Self {
        match x {
            Input::Pairs(all, ..) => {
                let mut own = Pairs::new(rows.len(), all.stride());
                for (i, (token, _)) in rows.iter().enumerate() {
                    own.row_mut(i).copy_from_slice(all.row(*token));
                }
                Self::Pairs(own)
            }
            Input::Floats(all, d) => {
                let mut own = Scratch::new(rows.len() * d);
                for ((token, _), row) in rows.iter().zip(own.chunks_exact_mut(d)) {
                    row.copy_from_slice(&all[token * d..(token + 1) * d]);
                }
                Self::Floats(own)
            }
        }
    }

    fn input(&self, width: usize) -> Input<'_> {
        match self {
            Self::Floats(x) => Input::Floats(x, width),
            Self::Pairs(x) => Input::Pairs(x, 0, 0),
        }
    }
}

/// One expert on the rows of one task.
///
/// # Safety
/// CPU features.
unsafe fn expert(
    a: &Moe<'_>,
    e: &ExpertWeights,
    x: Input<'_>,
    (plan, task): (&Plan, &Task),
    out: &mut [f32],
) -> Result<(), KernelError> {
    let rows = &plan.rows[task.from..task.to];
    let (m, d) = (rows.len(), a.x.cols());
    let (w1, w2, w3) = (own("moe", &e.w1)?, own("moe", &e.w2)?, own("moe", &e.w3)?);
    let inner = e.w1.rows();
    let gathered = Gathered::new(rows, x);
    let (mut gate, mut up) = (Scratch::new(m * inner), Scratch::new(m * inner));
    // SAFETY: CPU features; all targets are this task's own.
    unsafe {
        product(w1, gathered.input(d), m, a.rounding, &mut gate);
        product(w3, gathered.input(d), m, a.rounding, &mut up);
        activate(a, rows, &up, &mut gate, inner);
        let pairs = w2.pairs(&gate, 1);
        let hidden = match &pairs {
            Some(pairs) => Input::Pairs(pairs, 0, 0),
            None => Input::Floats(&gate, inner),
        };
        product(w2, hidden, m, a.rounding, out);
    }
    Ok(())
}

/// # Safety
/// CPU features.
unsafe fn product(w: &FastWeight, x: Input<'_>, m: usize, rounding: Rounding, y: &mut [f32]) {
    use crate::ops::PackedWeight;
    let product = Product { weight: w, x, m, rounding };
    // SAFETY: CPU features; `y` is borrowed exclusively.
    unsafe { product.run(0..w.rows(), Parts::new(y), 0, w.rows()) };
}

#[target_feature(enable = "avx2,fma,f16c")]
fn activate(a: &Moe<'_>, rows: &[(usize, f32)], up: &[f32], gate: &mut [f32], inner: usize) {
    for (((_, w), up), gate) in
        rows.iter().zip(up.chunks_exact(inner)).zip(gate.chunks_exact_mut(inner))
    {
        body::gated(gate, up, *w, a.limit, a.rounding);
        body::quantise_row(gate, inner, a.quant);
    }
}

/// `round((0 + r_0 + r_1 + ...) + shared)` over the rows `places` of the results.
#[target_feature(enable = "avx2,fma,f16c")]
fn sum(results: &[f32], places: &[u32], rounding: Rounding, y: &mut [f32]) {
    let d = y.len();
    y.fill(0.0);
    for place in places {
        let row = &results[*place as usize * d..][..d];
        y.iter_mut().zip(row).for_each(|(y, r)| *y += r);
    }
    y.iter_mut().for_each(|y| *y = rounding.apply(*y));
}
