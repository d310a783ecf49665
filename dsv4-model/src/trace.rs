//! Inner tensors of a step, for comparing with other implementations.

use dsa_kernels::{KernelError, TensorRef};

/// A point of a layer whose tensor can be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Probe {
    /// Collapsed streams before the attention norm, `[T, D]`.
    AttnIn,
    /// Attention output after `wo_b`, `[T, D]`.
    AttnOut,
    /// Collapsed streams before the feed-forward norm, `[T, D]`.
    FfnIn,
    /// Experts' output, `[T, D]`.
    FfnOut,
    /// Streams after the layer, `[T, 4*D]`.
    Streams,
    /// Compressed rows that became complete, normed and rotated, `[R, 512]`.
    CompressedKv,
    /// Index scores, `[T, rows]`; rows that a token does not see are -inf.
    IndexScores,
    /// Rows chosen by the index, `[T, index_topk]`, ascending, -1 behind the last.
    Selected,
}

/// One kept tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceEntry {
    /// Layer, counted from 0.
    pub layer: usize,
    /// Point.
    pub probe: Probe,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Values, row-major.
    pub values: Vec<f32>,
}

/// Tensors kept during steps, in the order of computation. With a trace the index scores every
/// step, also where its choice is known to be all rows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// What was kept.
    pub entries: Vec<TraceEntry>,
}

impl Trace {
    /// The tensors of one point, in step order.
    pub fn of(&self, layer: usize, probe: Probe) -> impl Iterator<Item = &TraceEntry> {
        self.entries.iter().filter(move |e| e.layer == layer && e.probe == probe)
    }

    pub(crate) fn keep(
        &mut self,
        layer: usize,
        probe: Probe,
        tensor: TensorRef<'_>,
    ) -> Result<(), KernelError> {
        let values = tensor.f32()?.to_vec();
        let (rows, cols) = (tensor.rows(), tensor.cols());
        self.entries.push(TraceEntry { layer, probe, rows, cols, values });
        Ok(())
    }

    #[expect(clippy::cast_precision_loss, reason = "row numbers stay below 2^24")]
    pub(crate) fn keep_rows(
        &mut self,
        layer: usize,
        tensor: TensorRef<'_>,
    ) -> Result<(), KernelError> {
        let values = tensor.i32()?.iter().map(|&v| v as f32).collect();
        let (rows, cols) = (tensor.rows(), tensor.cols());
        self.entries.push(TraceEntry { layer, probe: Probe::Selected, rows, cols, values });
        Ok(())
    }
}
