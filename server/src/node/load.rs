//! Loading a model, and saying how far that is.

use super::NodeOptions;
use crate::config::ServeArgs;
use anyhow::Context as _;
use dsa_kernels::Kernels;
use dsv4_model::config::ModelConfig;
use dsv4_model::weights::{Checkpoint, TensorInfo, WeightError, WeightSource};
use dsv4_model::{LoadOptions, Model};
use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Hears what is being done at the start.
pub type Tell = Box<dyn Fn(String) + Send + Sync>;

/// Weights of which it is counted how many were read.
struct Counted<'a> {
    inner: &'a Checkpoint,
    tell: &'a Tell,
    model: String,
    read: AtomicUsize,
    total: usize,
}

impl std::fmt::Debug for Counted<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Counted").field("read", &self.read).finish_non_exhaustive()
    }
}

impl WeightSource for Counted<'_> {
    fn names(&self) -> Vec<String> {
        self.inner.names()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.inner.info(name)
    }

    fn read<'a>(&'a self, name: &str) -> Result<Cow<'a, [u8]>, WeightError> {
        let read = self.read.fetch_add(1, Ordering::Relaxed) + 1;
        (self.tell)(format!("loading {}: tensor {read} of {}", self.model, self.total));
        self.inner.read(name)
    }
}

/// Loads the model in `path`.
pub(super) fn model(
    args: &ServeArgs,
    path: &Path,
    kernels: Arc<dyn Kernels>,
    options: &NodeOptions,
) -> anyhow::Result<Model> {
    let load = LoadOptions { numerics: args.numerics, index_key: args.index_k_dtype, kernels };
    let model = match &options.tell {
        None => Model::load(path, load),
        Some(tell) => told(path, load, tell),
    };
    model.with_context(|| format!("load the model in {}", path.display()))
}

/// As [`Model::load`], step by step.
fn told(path: &Path, load: LoadOptions, tell: &Tell) -> Result<Model, dsv4_model::LoadError> {
    let model = super::model_name(path);
    tell(format!("opening {model}"));
    let config = ModelConfig::from_dir(path)?;
    let checkpoint = Checkpoint::open(path)?;
    // These are left unread.
    let names = checkpoint.names().into_iter().filter(|name| !name.starts_with("mtp."));
    let (read, total) = (AtomicUsize::new(0), names.count());
    let counted = Counted { inner: &checkpoint, tell, model, read, total };
    Model::from_source(config, &counted, checkpoint.digest(), load)
}
