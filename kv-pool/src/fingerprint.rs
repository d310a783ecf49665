//! The layout fingerprint: one value that is equal only where every byte means the same.

use crate::geometry::{Geometry, SCHEMA_VERSION};
use crate::id::Fingerprint;
use alloc::string::String;
use core::fmt::{self, Write};

/// Domain of the hash; a new domain is a new, incompatible identity.
const CONTEXT: &str = "kv-pool 2026-01 layout fingerprint v1";

/// Everything that decides what page bytes mean. The tensor-parallel size and rank are not in it:
/// every rank holds the same KV rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FingerprintInput {
    /// Byte layout.
    pub geometry: Geometry,
    /// Digest of the weights (headers, sizes and samples).
    pub model_digest: [u8; 32],
    /// Digest of the tokenizer.
    pub tokenizer_digest: [u8; 32],
    /// `model_type` of the model's configuration.
    pub model_type: String,
}

impl FingerprintInput {
    /// First 16 bytes of BLAKE3 in key-derivation mode over the fields, each as a name and a value
    /// with their lengths (64-bit little-endian) before them.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        // Taken apart by name: a new field does not compile until it is hashed.
        let Self { geometry, model_digest, tokenizer_digest, model_type } = self;
        let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
        let mut field = |name: &str, value: &[u8]| {
            for part in [name.as_bytes(), value] {
                hasher.update(&(part.len() as u64).to_le_bytes());
                hasher.update(part);
            }
        };
        field("schema", &SCHEMA_VERSION.to_le_bytes());
        field("geometry", geometry.describe().as_bytes());
        field("model type", model_type.as_bytes());
        field("model digest", model_digest);
        field("tokenizer digest", tokenizer_digest);
        let mut value = [0; 16];
        value.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        Fingerprint(value)
    }

    /// Text for a person who has to find out why two workers refuse each other: the geometry's
    /// lines, the model type and both digests.
    #[must_use]
    pub fn describe(&self) -> String {
        let mut text = self.geometry.describe();
        self.write_identity(&mut text).expect("writing to a string cannot fail");
        text
    }

    fn write_identity(&self, text: &mut String) -> fmt::Result {
        writeln!(text, "model type {:?}", self.model_type)?;
        for (name, digest) in [("model", &self.model_digest), ("tokenizer", &self.tokenizer_digest)]
        {
            write!(text, "{name} digest ")?;
            for byte in digest {
                write!(text, "{byte:02x}")?;
            }
            writeln!(text)?;
        }
        writeln!(text, "fingerprint {}", self.fingerprint())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{IndexKeyType, LayerKind, ModelShape, Numerics};
    use alloc::collections::BTreeMap;
    use alloc::string::ToString;
    use alloc::vec;

    fn shape() -> ModelShape {
        ModelShape {
            layers: vec![LayerKind::Window, LayerKind::C4, LayerKind::C128],
            head_dim: 512,
            rope_dim: 64,
            index_head_dim: 128,
            window_tokens: 128,
        }
    }

    fn input(shape: ModelShape, numerics: Numerics, index: IndexKeyType) -> FingerprintInput {
        FingerprintInput {
            geometry: Geometry::new(shape, numerics, index).unwrap(),
            model_digest: [1; 32],
            tokenizer_digest: [2; 32],
            model_type: "deepseek_v4".to_string(),
        }
    }

    #[test]
    fn every_field_changes_the_fingerprint() {
        let mut seen = BTreeMap::new();
        let mut note = |what: &str, input: &FingerprintInput| {
            if let Some(other) = seen.insert(input.fingerprint(), what.to_string()) {
                panic!("{what} has the fingerprint of {other}");
            }
        };
        for numerics in Numerics::ALL {
            for index in IndexKeyType::ALL {
                note("numerics and index type", &input(shape(), numerics, index));
            }
        }
        let build = |change: &dyn Fn(&mut ModelShape)| {
            let mut changed = shape();
            change(&mut changed);
            input(changed, Numerics::Reference, IndexKeyType::Fp4)
        };
        note("head size", &build(&|s| s.head_dim = 256));
        note("rotary size", &build(&|s| s.rope_dim = 32));
        note("index head size", &build(&|s| s.index_head_dim = 64));
        note("one layer more", &build(&|s| s.layers.push(LayerKind::Window)));
        for layer in 0..3 {
            for kind in [LayerKind::Window, LayerKind::C4, LayerKind::C128] {
                if shape().layers[layer] != kind {
                    note("layer kind", &build(&|s| s.layers[layer] = kind));
                }
            }
        }
        let base = input(shape(), Numerics::Reference, IndexKeyType::Fp4);
        for byte in 0..32 {
            let mut changed = base.clone();
            changed.model_digest[byte] ^= 1;
            note("model digest", &changed);
            let mut changed = base.clone();
            changed.tokenizer_digest[byte] ^= 1;
            note("tokenizer digest", &changed);
        }
        let mut changed = base.clone();
        changed.model_type.push('x');
        note("model type", &changed);
        let mut changed = base;
        changed.model_digest = [2; 32];
        changed.tokenizer_digest = [1; 32];
        note("swapped digests", &changed);
    }

    #[test]
    fn equal_inputs_have_equal_fingerprints_and_the_text_names_all() {
        let one = input(shape(), Numerics::Official, IndexKeyType::Bf16);
        assert_eq!(one.fingerprint(), one.clone().fingerprint());
        let text = one.describe();
        for part in ["index keys bf16", "deepseek_v4", "page 16384 B", &"01".repeat(32)] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        assert!(text.len() < 16 * 1024);
    }
}
