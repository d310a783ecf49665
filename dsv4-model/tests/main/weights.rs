//! Checkpoints: dsv4-mini's own, and the published sizes of Flash and Pro in sparse files.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking too")]

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use dsv4_model::weights::{
    Checkpoint, ExpectedTensor, ExpertFormat, NameList, TensorInfo, WeightDtype, WeightError,
    WeightSource, check_inventory, draft_tensors, expected_tensors,
};
use serde_json::{Map, Value, json};

use crate::config::{FLASH, MINI, PRO, parse};

fn mini_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/dsv4-mini/checkpoint")
}

/// A fresh directory that is removed when the test ends.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        if dir.exists() {
            fs::remove_dir_all(&dir).unwrap();
        }
        fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    fn write(&self, file: &str, bytes: &[u8]) {
        fs::write(self.0.join(file), bytes).unwrap();
    }

    fn open_error(&self) -> WeightError {
        Checkpoint::open(&self.0).unwrap_err()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

/// Names, types and shapes without bytes.
#[derive(Debug, Default)]
struct Listing(BTreeMap<String, TensorInfo>);

impl Listing {
    fn of(tensors: &[ExpectedTensor], experts: ExpertFormat) -> Self {
        Self(tensors.iter().map(|t| (t.name.clone(), t.form(experts).clone())).collect())
    }
}

impl WeightSource for Listing {
    fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.0.get(name).cloned()
    }

    fn read<'a>(&'a self, name: &str) -> Result<Cow<'a, [u8]>, WeightError> {
        panic!("{name} was read, a listing has no bytes")
    }
}

fn header(tensors: &[(&str, &TensorInfo)]) -> (Vec<u8>, u64) {
    let (mut fields, mut at) = (Map::new(), 0);
    for (name, info) in tensors {
        let end = at + info.bytes().unwrap();
        let entry = json!({
            "dtype": info.dtype.to_string(), "shape": info.shape, "data_offsets": [at, end]
        });
        fields.insert((*name).to_owned(), entry);
        at = end;
    }
    let text = Value::Object(fields).to_string().into_bytes();
    ([&(text.len() as u64).to_le_bytes()[..], &text].concat(), at)
}

/// The shard of an official checkpoint that a tensor is in, of `layers + 3`.
fn shard_of(name: &str, layers: usize) -> usize {
    match name.split('.').collect::<Vec<_>>()[..] {
        ["embed", ..] => 1,
        ["layers", n, ..] => n.parse::<usize>().unwrap() + 2,
        ["mtp", ..] => layers + 3,
        _ => layers + 2,
    }
}

/// Writes the official files of a config with holes for tensors.
fn write_sparse(scratch: &Scratch, config_text: &str) -> usize {
    let config = parse(config_text);
    scratch.write("config.json", config_text.as_bytes());
    let layers = config.num_hidden_layers;
    let (mut shards, mut map) = (BTreeMap::<usize, Vec<_>>::new(), Map::new());
    let tensors = [expected_tensors(&config), draft_tensors(&config)].concat();
    let file = |n: usize| format!("model-{n:05}-of-{:05}.safetensors", layers + 3);
    for tensor in &tensors {
        let n = shard_of(&tensor.name, layers);
        map.insert(tensor.name.clone(), file(n).into());
        shards.entry(n).or_default().push((tensor.name.as_str(), tensor.form(ExpertFormat::Fp4)));
    }
    for (n, tensors) in &shards {
        let (head, bytes) = header(tensors);
        let mut out = File::create(scratch.0.join(file(*n))).unwrap();
        out.write_all(&head).unwrap();
        out.set_len(head.len() as u64 + bytes).unwrap();
    }
    let index = json!({ "metadata": {}, "weight_map": map });
    scratch.write("model.safetensors.index.json", index.to_string().as_bytes());
    shards.len()
}

fn published(config_text: &str, name: &str, shards: usize, bytes: u64, draft_bytes: u64) {
    let scratch = Scratch::new(name);
    assert_eq!(write_sparse(&scratch, config_text), shards);
    let checkpoint = Checkpoint::open(&scratch.0).unwrap();
    assert_eq!(checkpoint.tensor_bytes(), bytes);
    let config = parse(config_text);
    assert_eq!(checkpoint.config(), &config);
    let found = check_inventory(&config, &checkpoint).unwrap();
    assert_eq!(found.experts, ExpertFormat::Fp4);
    assert_eq!(found.unread_bytes, draft_bytes);
    assert_eq!(found.bytes, bytes - draft_bytes);
    assert_eq!(found.unread, draft_tensors(&config).len());
    assert_eq!(found.tensors + found.unread, checkpoint.names().len());
    let norm = checkpoint.read("norm.weight").unwrap();
    assert_eq!((norm.len(), norm.iter().max()), (2 * config.hidden_size, Some(&0)));
    assert_eq!(checkpoint.digest(), Checkpoint::open(&scratch.0).unwrap().digest());
}

#[test]
fn flash_has_its_published_size() {
    published(FLASH, "flash", 46, 159_609_485_896, 3_593_787_756);
    assert_eq!(draft_tensors(&parse(FLASH)).len(), 1575);
}

#[test]
fn pro_has_its_published_size() {
    published(PRO, "pro", 64, 864_704_792_696, 13_956_587_692);
}

#[test]
fn published_shapes() {
    let list = |config| Listing::of(&expected_tensors(&parse(config)), ExpertFormat::Fp4);
    let (flash, pro) = (list(FLASH), list(PRO));
    let cases: [(&str, WeightDtype, &[u64], &[u64]); 16] = [
        ("embed.weight", WeightDtype::Bf16, &[129_280, 4096], &[129_280, 7168]),
        ("hc_head_fn", WeightDtype::F32, &[4, 16_384], &[4, 28_672]),
        ("layers.2.hc_attn_fn", WeightDtype::F32, &[24, 16_384], &[24, 28_672]),
        ("layers.2.attn.wq_b.weight", WeightDtype::F8E4M3, &[32_768, 1024], &[65_536, 1536]),
        ("layers.2.attn.wq_b.scale", WeightDtype::F8E8M0, &[256, 8], &[512, 12]),
        ("layers.2.attn.wo_a.weight", WeightDtype::F8E4M3, &[8192, 4096], &[16_384, 4096]),
        ("layers.2.attn.wo_b.scale", WeightDtype::F8E8M0, &[32, 64], &[56, 128]),
        ("layers.2.attn.attn_sink", WeightDtype::F32, &[64], &[128]),
        ("layers.2.attn.compressor.wkv.weight", WeightDtype::Bf16, &[1024, 4096], &[1024, 7168]),
        ("layers.3.attn.compressor.ape", WeightDtype::F32, &[128, 512], &[128, 512]),
        ("layers.2.attn.indexer.wq_b.scale", WeightDtype::F8E8M0, &[64, 8], &[64, 12]),
        ("layers.2.attn.indexer.compressor.ape", WeightDtype::F32, &[4, 256], &[4, 256]),
        ("layers.2.ffn.gate.tid2eid", WeightDtype::I64, &[129_280, 6], &[129_280, 6]),
        ("layers.3.ffn.gate.bias", WeightDtype::F32, &[256], &[384]),
        ("layers.9.ffn.experts.255.w2.weight", WeightDtype::I8, &[4096, 1024], &[7168, 1536]),
        ("layers.9.ffn.experts.7.w1.scale", WeightDtype::F8E8M0, &[2048, 128], &[3072, 224]),
    ];
    for (name, dtype, in_flash, in_pro) in cases {
        assert_eq!(
            flash.info(name),
            Some(TensorInfo { dtype, shape: in_flash.to_vec() }),
            "{name}"
        );
        assert_eq!(pro.info(name), Some(TensorInfo { dtype, shape: in_pro.to_vec() }), "{name}");
    }
    // Window layers have no compressor, hash layers no bias, C128 layers no indexer.
    for name in ["layers.0.attn.compressor.ape", "layers.2.ffn.gate.bias"] {
        assert_eq!(flash.info(name), None, "{name}");
    }
    assert_eq!(flash.info("layers.3.attn.indexer.wq_b.weight"), None);
    assert!(pro.info("layers.0.attn.compressor.ape").is_some());
}

#[test]
fn mini_checkpoint() {
    let checkpoint = Checkpoint::open(&mini_dir()).unwrap();
    let config = parse(MINI);
    let found = check_inventory(&config, &checkpoint).unwrap();
    assert_eq!(found.bytes, 22_386_760);
    assert_eq!((found.experts, found.unread), (ExpertFormat::Fp4, 0));
    let names = checkpoint.names();
    assert!(names.is_sorted() && names.len() == found.tensors);
    for name in &names {
        let bytes = checkpoint.read(name).unwrap();
        assert_eq!(bytes.len() as u64, checkpoint.info(name).unwrap().bytes().unwrap(), "{name}");
    }
    assert!(matches!(
        checkpoint.read("layers.6.attn_norm.weight"),
        Err(WeightError::Unknown { name }) if name == "layers.6.attn_norm.weight"
    ));
    // Bytes are those of the named tensor: the hash layers' table holds expert ids below 16.
    let table = checkpoint.read("layers.0.ffn.gate.tid2eid").unwrap();
    let ids: Vec<i64> =
        table.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(ids.len(), 4096 * 4);
    assert!(ids.iter().all(|id| (0..16).contains(id)));
}

/// Copies dsv4-mini and lets `change` edit the copy.
fn altered(name: &str, change: impl FnOnce(&Scratch)) -> Scratch {
    let scratch = Scratch::new(name);
    for entry in fs::read_dir(mini_dir()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), scratch.0.join(entry.file_name())).unwrap();
    }
    change(&scratch);
    scratch
}

const SHARD_1: &str = "model-00001-of-00002.safetensors";
const SHARD_2: &str = "model-00002-of-00002.safetensors";
const INDEX: &str = "model.safetensors.index.json";

fn edit_index(scratch: &Scratch, edit: impl FnOnce(&mut Map<String, Value>)) {
    let text = fs::read(scratch.0.join(INDEX)).unwrap();
    let mut index: Value = serde_json::from_slice(&text).unwrap();
    edit(index["weight_map"].as_object_mut().unwrap());
    scratch.write(INDEX, index.to_string().as_bytes());
}

#[test]
fn digest_changes_with_bytes_headers_sizes_and_config() {
    let base = Checkpoint::open(&mini_dir()).unwrap().digest();
    let same = altered("digest-same", |_| {});
    assert_eq!(Checkpoint::open(&same.0).unwrap().digest(), base);
    let digest_after = |name, change: fn(&Scratch)| {
        let changed = altered(name, change);
        Checkpoint::open(&changed.0).unwrap().digest()
    };
    let flip = |s: &Scratch, from_end: bool| {
        let mut bytes = fs::read(s.0.join(SHARD_2)).unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let at = if from_end { bytes.len() - 1 } else { 8 + header };
        bytes[at] ^= 1;
        s.write(SHARD_2, &bytes);
    };
    let first = altered("digest-first", |s| flip(s, false));
    let last = altered("digest-last", |s| flip(s, true));
    let config = digest_after("digest-config", |s| {
        s.write(
            "config.json",
            MINI.replace("\"swiglu_limit\": 10.0", "\"swiglu_limit\": 9.0").as_bytes(),
        );
    });
    let comment = digest_after("digest-comment", |s| {
        s.write(
            "config.json",
            MINI.replace("\"use_cache\": true", "\"use_cache\": false").as_bytes(),
        );
    });
    let renamed = digest_after("digest-renamed", |s| {
        fs::rename(s.0.join(SHARD_2), s.0.join("z.safetensors")).unwrap();
        edit_index(s, |map| {
            for file in map.values_mut().filter(|f| *f == SHARD_2) {
                *file = "z.safetensors".into();
            }
        });
    });
    assert_eq!(comment, base, "fields that compute nothing do not count");
    let mut all = vec![base, config, renamed];
    all.extend([&first, &last].map(|s| Checkpoint::open(&s.0).unwrap().digest()));
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 5);
}

#[test]
fn missing_files_are_named() {
    let error = Checkpoint::open(Path::new("/nowhere/dsv4")).unwrap_err();
    assert!(matches!(error, WeightError::Config(_)), "{error:?}");
    assert!(error.to_string().contains("get one with"), "{error}");

    let empty = Scratch::new("no-weights");
    empty.write("config.json", MINI.as_bytes());
    assert!(matches!(empty.open_error(), WeightError::NoWeights { .. }));

    let lost = altered("no-shard", |s| fs::remove_file(s.0.join(SHARD_2)).unwrap());
    match lost.open_error() {
        WeightError::MissingShard { path, tensors } => {
            assert!(path.ends_with(SHARD_2) && tensors > 100, "{tensors}");
        }
        other => panic!("{other:?}"),
    }
    let folder = altered("folder-shard", |s| {
        fs::remove_file(s.0.join(SHARD_2)).unwrap();
        fs::create_dir(s.0.join(SHARD_2)).unwrap();
    });
    assert!(matches!(folder.open_error(), WeightError::Io { .. }));
}

#[test]
fn bad_indexes_are_refused() {
    for (n, text) in
        ["", "[]", "{}", "{\"weight_map\": {}}", "{\"weight_map\": {\"a\": 1}}"].iter().enumerate()
    {
        let bad = altered(&format!("index-{n}"), |s| s.write(INDEX, text.as_bytes()));
        assert!(matches!(bad.open_error(), WeightError::Index { .. }), "{text}");
    }
    let escapes = ["../../etc/passwd", "/etc/passwd", "..", "a/b.safetensors", "", "x.bin"];
    for (n, file) in escapes.iter().enumerate() {
        let bad = altered(&format!("escape-{n}"), |s| {
            edit_index(s, |map| {
                map.insert("norm.weight".to_owned(), (*file).into());
            });
        });
        let error = bad.open_error();
        assert!(matches!(error, WeightError::Index { .. }), "{file}: {error:?}");
        assert!(error.to_string().contains(file), "{error}");
    }
    let misplaced = |name: &str, edit: fn(&mut Map<String, Value>)| {
        let bad = altered(name, |s| edit_index(s, edit));
        match bad.open_error() {
            WeightError::Misplaced { name, what } => format!("{name} {what}"),
            other => panic!("{other:?}"),
        }
    };
    let other = misplaced("index-other", |map| {
        map.insert("norm.weight".to_owned(), SHARD_1.into());
    });
    assert_eq!(other, format!("norm.weight in {SHARD_2}, the index says {SHARD_1}"));
    let nowhere = misplaced("index-nowhere", |map| {
        map.insert("extra.weight".to_owned(), SHARD_1.into());
    });
    assert_eq!(nowhere, format!("extra.weight not in {SHARD_1}, where the index puts it"));
    let unlisted = misplaced("index-unlisted", |map| {
        map.remove("norm.weight").unwrap();
    });
    assert_eq!(unlisted, format!("norm.weight in {SHARD_2}, but not in the index"));
}

/// A directory with one shard of these bytes and no index.
fn single(name: &str, bytes: &[u8]) -> Scratch {
    let scratch = Scratch::new(name);
    scratch.write("config.json", MINI.as_bytes());
    scratch.write("model.safetensors", bytes);
    scratch
}

fn file_of(header: &str, data: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; data]].concat()
}

#[test]
fn truncated_shards_are_refused() {
    let tensor = TensorInfo { dtype: WeightDtype::F32, shape: vec![4, 4] };
    let (head, bytes) = header(&[("a", &tensor)]);
    let whole = [&head[..], &vec![7; bytes as usize]].concat();
    let fine = single("whole", &whole);
    assert_eq!(Checkpoint::open(&fine.0).unwrap().read("a").unwrap()[..], [7; 64]);
    for cut in [0, 1, 7, 8, head.len() - 1, head.len(), whole.len() - 1] {
        let bad = single("cut", &whole[..cut]);
        assert!(matches!(bad.open_error(), WeightError::Header { .. }), "cut at {cut}");
    }
    let longer = single("longer", &[&whole[..], &[0]].concat());
    let text = longer.open_error().to_string();
    assert!(text.contains("64 bytes of tensors, the file has 65"), "{text}");
}

#[test]
fn lying_headers_are_refused() {
    let entry = |name: &str, shape: &str, from: u64, to: u64| {
        format!("\"{name}\":{{\"dtype\":\"F32\",\"shape\":{shape},\"data_offsets\":[{from},{to}]}}")
    };
    let big = u64::MAX;
    let cases = [
        ("not json", "x".to_owned()),
        ("not an object", "[1]".to_owned()),
        ("overlap", format!("{{{},{}}}", entry("a", "[4]", 0, 16), entry("b", "[4]", 8, 24))),
        ("gap", format!("{{{},{}}}", entry("a", "[4]", 0, 16), entry("b", "[1]", 20, 24))),
        ("late start", format!("{{{}}}", entry("a", "[4]", 8, 24))),
        ("backwards", format!("{{{}}}", entry("a", "[4]", 24, 8))),
        ("wrong size", format!("{{{}}}", entry("a", "[5]", 0, 24))),
        ("overflow", format!("{{{}}}", entry("a", &format!("[{big},{big}]"), 0, 24))),
        ("huge", format!("{{{}}}", entry("a", "[2305843009213693952]", 0, 1 << 63))),
        ("end of range", {
            let third = format!("[{}]", (1u64 << 60) - 1);
            let step = ((1u64 << 60) - 1) * 4;
            let parts: Vec<_> =
                (0..4).map(|n| entry(&format!("t{n}"), &third, n * step, (n + 1) * step)).collect();
            format!("{{{}}}", parts.join(","))
        }),
        (
            "negative",
            "{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,24]}}".to_owned(),
        ),
        ("no type", "{\"a\":{\"shape\":[6],\"data_offsets\":[0,24]}}".to_owned()),
        ("empty", "{}".to_owned()),
    ];
    for (what, header) in cases {
        let bad = single("lying", &file_of(&header, 24));
        let error = bad.open_error();
        assert!(matches!(error, WeightError::Header { .. }), "{what}: {error:?}");
    }
    for length in [25, 100_000_001, u64::MAX] {
        let bytes = [&length.to_le_bytes()[..], &[b' '; 24]].concat();
        let error = single("length", &bytes).open_error();
        assert!(error.to_string().contains(&length.to_string()), "{error}");
    }
    let other = "{\"a\":{\"dtype\":\"F16\",\"shape\":[12],\"data_offsets\":[0,24]}}";
    let error = single("dtype", &file_of(other, 24)).open_error();
    assert!(matches!(&error, WeightError::Dtype { found, .. } if found == "F16"), "{error:?}");
}

#[test]
fn a_tensor_in_two_shards_is_refused() {
    let twice = altered("twice", |s| {
        fs::copy(s.0.join(SHARD_2), s.0.join("model-00003.safetensors")).unwrap();
        edit_index(s, |map| {
            map.insert("other".to_owned(), "model-00003.safetensors".into());
        });
    });
    let error = twice.open_error();
    let WeightError::Misplaced { what, .. } = &error else { panic!("{error:?}") };
    assert_eq!(what, &format!("in both {SHARD_2} and model-00003.safetensors"));
}

#[test]
fn inventory_names_every_difference() {
    let config = parse(MINI);
    let mut listing = Listing::of(&expected_tensors(&config), ExpertFormat::Fp4);
    check_inventory(&config, &listing).unwrap();
    for name in ["norm.weight", "layers.3.attn.wkv.scale"] {
        listing.0.remove(name).unwrap();
    }
    let extra = TensorInfo { dtype: WeightDtype::F32, shape: vec![1] };
    listing.0.insert("layers.0.attn.compressor.ape".to_owned(), extra.clone());
    listing.0.insert("mtp.0.unheard_of".to_owned(), extra.clone());
    listing.0.get_mut("layers.5.ffn.gate.bias").unwrap().shape = vec![17];
    listing.0.get_mut("head.weight").unwrap().dtype = WeightDtype::F32;
    let error = check_inventory(&config, &listing).unwrap_err();
    let text = error.to_string();
    let WeightError::Inventory { missing, surplus, misshaped } = error else { panic!("{text}") };
    assert_eq!(missing.first, ["layers.3.attn.wkv.scale", "norm.weight"]);
    assert_eq!(surplus.first, ["layers.0.attn.compressor.ape", "mtp.0.unheard_of"]);
    let names: Vec<&str> = misshaped.first.iter().map(|m| m.name.as_str()).collect();
    assert_eq!(names, ["layers.5.ffn.gate.bias", "head.weight"]);
    let part = "layers.5.ffn.gate.bias is F32 [17], needs F32 [16]";
    assert!(text.contains(part) && text.contains("2 missing: layers.3"), "{text}");
}

#[test]
fn long_lists_are_cut_but_counted() {
    let config = parse(FLASH);
    let all = expected_tensors(&config).len();
    let error = check_inventory(&config, &Listing::default()).unwrap_err();
    let text = error.to_string();
    let WeightError::Inventory { missing, .. } = error else { panic!("{text}") };
    assert_eq!((missing.total, missing.first.len()), (all, NameList::<String>::LIMIT));
    assert!(text.contains(&format!("and {} more", all - 64)) && text.len() < 8000, "{text}");
}

#[test]
fn experts_in_fp8_are_recognised_and_not_mixed() {
    let config = parse(FLASH);
    let expected = expected_tensors(&config);
    let mut base = Listing::of(&expected, ExpertFormat::Fp8);
    assert_eq!(check_inventory(&config, &base).unwrap().experts, ExpertFormat::Fp8);
    let name = "layers.9.ffn.experts.7.w1.weight";
    assert_eq!(
        base.info(name),
        Some(TensorInfo { dtype: WeightDtype::F8E4M3, shape: vec![2048, 4096] })
    );
    let scale = base.info("layers.9.ffn.experts.7.w1.scale").unwrap();
    assert_eq!(scale, TensorInfo { dtype: WeightDtype::F8E8M0, shape: vec![16, 32] });
    let fp4 = expected.iter().find(|t| t.name == name).unwrap().form(ExpertFormat::Fp4);
    base.0.insert(name.to_owned(), fp4.clone());
    let error = check_inventory(&config, &base).unwrap_err();
    let WeightError::Inventory { misshaped, .. } = error else { panic!("{error}") };
    assert_eq!((misshaped.total, misshaped.first[0].name.as_str()), (1, name));
}

#[test]
fn draft_tensors_are_recognised_and_others_refused_by_name() {
    let config = parse(FLASH);
    let all = [expected_tensors(&config), draft_tensors(&config)].concat();
    let with = |name: &str| {
        let mut listing = Listing::of(&all, ExpertFormat::Fp4);
        let info = TensorInfo { dtype: WeightDtype::Bf16, shape: vec![4] };
        listing.0.insert(name.to_owned(), info);
        check_inventory(&config, &listing)
    };
    for copy in ["mtp.0.emb.tok_emb.weight", "mtp.0.head.weight"] {
        assert_eq!(with(copy).unwrap().unread, 1576);
    }
    for name in
        ["mtp.1.norm.weight", "mtp.0.main_proj.weight", "mtp.2.markov_head.markov_w1.weight"]
    {
        assert!(matches!(with(name), Err(WeightError::DSpark { name: n }) if n == name), "{name}");
    }
    for name in ["layers.1.engram.table.weight", "vision.patch.weight"] {
        assert!(matches!(with(name), Err(WeightError::V41 { name: n }) if n == name), "{name}");
    }
    for name in ["model.layers.0.attn.wkv.weight", "lm_head.weight"] {
        assert!(matches!(with(name), Err(WeightError::Renamed { name: n }) if n == name), "{name}");
    }
    // A checkpoint without the draft stage is complete too.
    let backbone = Listing::of(&expected_tensors(&config), ExpertFormat::Fp4);
    assert_eq!(check_inventory(&config, &backbone).unwrap().unread, 0);
}

#[test]
fn names_are_unique_and_sizes_follow_the_config() {
    for config in [FLASH, PRO, MINI].map(parse) {
        let all = [expected_tensors(&config), draft_tensors(&config)].concat();
        let listing = Listing::of(&all, ExpertFormat::Fp4);
        assert_eq!(listing.0.len(), all.len());
        for tensor in &all {
            let forms = if tensor.name.contains(".experts.") { 2 } else { 1 };
            assert_eq!(tensor.accepts.len(), forms, "{}", tensor.name);
        }
    }
    let huge = TensorInfo { dtype: WeightDtype::F32, shape: vec![u64::MAX, 2] };
    assert_eq!(huge.bytes(), None);
}
