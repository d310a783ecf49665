//! Inner tensors of a step, taken out or put in, for comparing with other implementations.

use crate::error::ForwardError;
use dsa_kernels::{KernelError, Kernels, TensorRef};
use std::collections::BTreeMap;

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
///
/// Streams can be forced too. A comparison that runs freely shows the first layer that differs and
/// then what follows from it; with another implementation's streams forced before every layer, each
/// layer is compared on equal inputs, its cache rows included. To find a corruption, force the
/// streams of a good run and see which layers still differ.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// What was kept.
    pub entries: Vec<TraceEntry>,
    /// Streams `[T, 4*D]` put in place of the computed ones before a layer, by its number; the
    /// number of layers stands for the head. They hold for every step until they are changed, so
    /// their length must be that of the step, or it is refused with [`ForwardError::Forced`].
    /// [`Probe::Streams`] keeps what the layer before computed.
    pub forced: BTreeMap<usize, Vec<f32>>,
}

impl Trace {
    /// The tensors of one point, in step order.
    pub fn of(&self, layer: usize, probe: Probe) -> impl Iterator<Item = &TraceEntry> {
        self.entries.iter().filter(move |e| e.layer == layer && e.probe == probe)
    }

    /// Refuses forced streams that do not fit a step of `want` stream values.
    pub(crate) fn check(&self, layers: usize, want: usize) -> Result<(), ForwardError> {
        match self.forced.iter().find(|(layer, v)| **layer > layers || v.len() != want) {
            Some((&layer, values)) => {
                Err(ForwardError::Forced { layer, layers, found: values.len(), want })
            }
            None => Ok(()),
        }
    }

    pub(crate) fn keep(
        &mut self,
        layer: usize,
        probe: Probe,
        kernels: &dyn Kernels,
        tensor: TensorRef<'_>,
    ) -> Result<(), KernelError> {
        let values = kernels.fetch(tensor)?;
        let (rows, cols) = (tensor.rows(), tensor.cols());
        self.entries.push(TraceEntry { layer, probe, rows, cols, values });
        Ok(())
    }
}
