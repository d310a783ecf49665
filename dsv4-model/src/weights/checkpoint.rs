//! Sharded safetensors checkpoints, read through memory maps.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde::Deserialize;

use super::mmap::Mapping;
use super::{TensorInfo, WeightDtype, WeightError, WeightSource};
use crate::config::ModelConfig;

/// Largest index file that is read, in bytes; Pro's has 15 MB.
const MAX_INDEX_BYTES: u64 = 256 << 20;

/// Largest header of a shard, in bytes: the limit of the safetensors format.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Bytes of the header's length field at the start of a shard.
const LENGTH_BYTES: usize = 8;

/// Samples a shard contributes to the digest, and bytes of each.
const SAMPLES: usize = 64;
const SAMPLE_BYTES: usize = 4096;

/// An opened checkpoint directory: `config.json` and `model.safetensors.index.json` with its
/// shards, or a single `model.safetensors`.
#[derive(Debug)]
pub struct Checkpoint {
    config: ModelConfig,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Place>,
}

#[derive(Debug)]
struct Shard {
    file: String,
    map: Mapping,
    /// Where tensor bytes start.
    data: usize,
}

#[derive(Debug)]
struct Place {
    info: TensorInfo,
    shard: usize,
    start: usize,
    end: usize,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Reads config, index and every shard's header, and maps the shards. No tensor is read.
    ///
    /// # Errors
    /// A [`WeightError`] that names the file and what is wrong with it: files that are not there,
    /// truncated or longer than their header says, tensors that overlap or leave gaps, an index
    /// that disagrees with its shards, element types that no supported checkpoint has.
    pub fn open(dir: &Path) -> Result<Self, WeightError> {
        let config = ModelConfig::from_dir(dir)?;
        let index_path = dir.join("model.safetensors.index.json");
        let index = read_index(&index_path)?;
        let mut files: BTreeMap<&str, usize> = BTreeMap::new();
        match &index {
            Some(index) => {
                for file in index.weight_map.values() {
                    *files.entry(file).or_default() += 1;
                }
            }
            None if dir.join("model.safetensors").exists() => {
                files.insert("model.safetensors", 0);
            }
            None => return Err(WeightError::NoWeights { dir: dir.to_owned() }),
        }
        let mut opened = Self { config, shards: Vec::new(), tensors: BTreeMap::new() };
        for (&file, &tensors) in &files {
            check_file_name(&index_path, file)?;
            let path = dir.join(file);
            let (shard, metadata) = open_shard(file, path, tensors)?;
            opened.add(shard, &metadata)?;
        }
        if let Some(index) = &index {
            opened.check_index(index)?;
        }
        Ok(opened)
    }

    /// The checked `config.json` beside the weights.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Bytes of all tensors, those left unread included.
    #[must_use]
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.values().map(|place| (place.end - place.start) as u64).sum()
    }

    /// BLAKE3 of what identifies the weights without reading all of them: the config's computing
    /// fields ([`ModelConfig::canonical`]) and, per shard in name order, its name, size, header
    /// and 64 evenly spaced samples of 4 KiB, the first and last bytes of the tensors included.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        let mut hash = blake3::Hasher::new_derive_key("dsv4-model checkpoint digest, version 1");
        let mut part = |bytes: &[u8]| {
            hash.update(&(bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        part(self.config.canonical().as_bytes());
        for shard in &self.shards {
            let bytes = shard.map.bytes();
            part(shard.file.as_bytes());
            part(&(bytes.len() as u64).to_le_bytes());
            let (header, data) = bytes.split_at(shard.data);
            part(header);
            for sample in samples(data) {
                part(sample);
            }
        }
        *hash.finalize().as_bytes()
    }

    fn add(&mut self, shard: Shard, metadata: &Metadata) -> Result<(), WeightError> {
        let number = self.shards.len();
        // Sorted, so that the tensor an error names does not depend on a hash order.
        let tensors: BTreeMap<_, _> = metadata.tensors().into_iter().collect();
        for (name, info) in tensors {
            let dtype = match info.dtype {
                Dtype::BF16 => WeightDtype::Bf16,
                Dtype::F32 => WeightDtype::F32,
                Dtype::F8_E4M3 => WeightDtype::F8E4M3,
                Dtype::F8_E8M0 => WeightDtype::F8E8M0,
                Dtype::I8 => WeightDtype::I8,
                Dtype::I64 => WeightDtype::I64,
                other => return Err(WeightError::Dtype { name, found: format!("{other:?}") }),
            };
            let (start, end) = info.data_offsets;
            let place = Place {
                info: TensorInfo { dtype, shape: info.shape.iter().map(|&n| n as u64).collect() },
                shard: number,
                start: shard.data + start,
                end: shard.data + end,
            };
            match self.tensors.entry(name) {
                Entry::Vacant(free) => {
                    free.insert(place);
                }
                Entry::Occupied(taken) => {
                    let other = &self.shards[taken.get().shard].file;
                    let what = format!("in both {other} and {}", shard.file);
                    return Err(WeightError::Misplaced { name: taken.key().clone(), what });
                }
            }
        }
        self.shards.push(shard);
        Ok(())
    }

    fn check_index(&self, index: &Index) -> Result<(), WeightError> {
        for (name, file) in &index.weight_map {
            let what = match self.tensors.get(name).map(|place| &self.shards[place.shard].file) {
                Some(there) if there == file => continue,
                Some(there) => format!("in {there}, the index says {file}"),
                None => format!("not in {file}, where the index puts it"),
            };
            return Err(WeightError::Misplaced { name: name.clone(), what });
        }
        for (name, place) in &self.tensors {
            if !index.weight_map.contains_key(name) {
                let what = format!("in {}, but not in the index", self.shards[place.shard].file);
                return Err(WeightError::Misplaced { name: name.clone(), what });
            }
        }
        Ok(())
    }
}

impl WeightSource for Checkpoint {
    fn names(&self) -> Vec<String> {
        self.tensors.keys().cloned().collect()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.tensors.get(name).map(|place| place.info.clone())
    }

    fn read<'a>(&'a self, name: &str) -> Result<Cow<'a, [u8]>, WeightError> {
        let Some(at) = self.tensors.get(name) else {
            return Err(WeightError::Unknown { name: name.to_owned() });
        };
        let map = &self.shards[at.shard].map;
        map.will_need(at.start, at.end - at.start);
        // The range was checked against the file when the shard was opened.
        Ok(Cow::Borrowed(&map.bytes()[at.start..at.end]))
    }
}

fn read_index(path: &Path) -> Result<Option<Index>, WeightError> {
    let failed = |source| WeightError::Io { path: path.to_owned(), source };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(failed(e)),
    };
    let mut bytes = Vec::new();
    file.take(MAX_INDEX_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    let wrong = |what: String| WeightError::Index { path: path.to_owned(), what };
    if bytes.len() as u64 > MAX_INDEX_BYTES {
        return Err(wrong(format!("larger than {MAX_INDEX_BYTES} bytes")));
    }
    let index: Index = serde_json::from_slice(&bytes).map_err(|e| wrong(e.to_string()))?;
    if index.weight_map.is_empty() {
        return Err(wrong("weight_map is empty".to_owned()));
    }
    Ok(Some(index))
}

/// The index must not lead out of the checkpoint's directory.
fn check_file_name(index: &Path, file: &str) -> Result<(), WeightError> {
    let plain = Path::new(file).file_name().is_some_and(|name| name == file);
    if plain && file.ends_with(".safetensors") {
        return Ok(());
    }
    let what = format!("{file:?} is not the name of a .safetensors file in the same directory");
    Err(WeightError::Index { path: index.to_owned(), what })
}

fn open_shard(file: &str, path: PathBuf, tensors: usize) -> Result<(Shard, Metadata), WeightError> {
    let map = match Mapping::open(&path) {
        Ok(map) => map,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Err(WeightError::MissingShard { path, tensors });
        }
        Err(source) => return Err(WeightError::Io { path, source }),
    };
    match read_header(&map) {
        Ok((data, metadata)) => Ok((Shard { file: file.to_owned(), map, data }, metadata)),
        Err(what) => Err(WeightError::Header { path, what }),
    }
}

/// Where a shard's data starts, and its header.
fn read_header(map: &Mapping) -> Result<(usize, Metadata), String> {
    let bytes = map.bytes();
    let size = bytes.len();
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(format!("{size} bytes, too short for a safetensors header"));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        return Err(format!("header claims {length} bytes, the limit is {MAX_HEADER_BYTES}"));
    }
    let Some((header, data)) = usize::try_from(length).ok().and_then(|n| rest.split_at_checked(n))
    else {
        return Err(format!("header claims {length} bytes of a file of {size}"));
    };
    map.will_need(LENGTH_BYTES, header.len());
    // Overlaps, gaps and sizes that contradict type and shape are errors of this parse.
    let metadata: Metadata = serde_json::from_slice(header).map_err(|e| format!("header: {e}"))?;
    let claimed = metadata.data_len();
    if claimed != data.len() {
        let found = data.len();
        return Err(format!("header describes {claimed} bytes of tensors, the file has {found}"));
    }
    Ok((LENGTH_BYTES + header.len(), metadata))
}

/// The samples of a shard's data: all of it in pieces if it is small.
fn samples(data: &[u8]) -> impl Iterator<Item = &[u8]> {
    let whole = data.len() <= SAMPLES * SAMPLE_BYTES;
    let count = if whole { data.len().div_ceil(SAMPLE_BYTES) } else { SAMPLES };
    let last = data.len().saturating_sub(SAMPLE_BYTES);
    (0..count).map(move |n| {
        // In 128 bits: the product exceeds 64 for no file that exists, but costs nothing here.
        let spread = (last as u128 * n as u128 / (SAMPLES - 1) as u128) as usize;
        let from = if whole { n * SAMPLE_BYTES } else { spread };
        &data[from..data.len().min(from + SAMPLE_BYTES)]
    })
}
