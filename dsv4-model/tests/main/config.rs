//! Parsing of `config.json`: the published files, dsv4-mini, and everything that is refused.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking too")]

use dsv4_model::config::{ConfigError, ModelConfig};
use kv_pool::LayerKind;
use serde_json::{Value, json};

pub(crate) const FLASH: &str = include_str!("../fixtures/flash.config.json");
pub(crate) const PRO: &str = include_str!("../fixtures/pro.config.json");
pub(crate) const MINI: &str = include_str!("../../../models/dsv4-mini/checkpoint/config.json");

pub(crate) fn parse(text: &str) -> ModelConfig {
    ModelConfig::from_json(text.as_bytes()).unwrap()
}

/// FLASH with the value at `pointer` replaced.
fn changed(pointer: &str, value: Value) -> Result<ModelConfig, ConfigError> {
    let mut config: Value = serde_json::from_str(FLASH).unwrap();
    match config.pointer_mut(pointer) {
        Some(field) => *field = value,
        None => {
            config.as_object_mut().unwrap().insert(pointer[1..].to_owned(), value);
        }
    }
    ModelConfig::from_json(config.to_string().as_bytes())
}

fn without(field: &str) -> Result<ModelConfig, ConfigError> {
    let mut config: Value = serde_json::from_str(FLASH).unwrap();
    config.as_object_mut().unwrap().remove(field).unwrap();
    ModelConfig::from_json(config.to_string().as_bytes())
}

fn count(config: &ModelConfig, kind: LayerKind) -> usize {
    config.layers.iter().filter(|&&k| k == kind).count()
}

#[test]
fn flash() {
    let c = parse(FLASH);
    assert_eq!((c.hidden_size, c.num_hidden_layers, c.num_attention_heads), (4096, 43, 64));
    assert_eq!((c.q_lora_rank, c.o_groups, c.o_lora_rank), (1024, 8, 1024));
    assert_eq!((c.index_n_heads, c.index_head_dim, c.index_topk), (64, 128, 512));
    assert_eq!(
        (c.n_routed_experts, c.num_experts_per_tok, c.moe_intermediate_size),
        (256, 6, 2048)
    );
    assert_eq!((c.routed_scaling_factor, c.swiglu_limit, c.hc_eps), (1.5, 10.0, 1e-6));
    assert_eq!((c.vocab_size, c.max_position_embeddings), (129_280, 1 << 20));
    assert_eq!((c.rope_theta, c.compress_rope_theta), (10_000.0, 160_000.0));
    assert_eq!((c.bos_token_id, c.eos_token_id, c.num_hash_layers), (0, 1, 3));
    assert_eq!(c.expert_dtype, None);
    assert_eq!(c.draft_ratios, [0]);
    let kinds = [LayerKind::Window, LayerKind::C4, LayerKind::C128];
    assert_eq!(kinds.map(|k| count(&c, k)), [2, 21, 20]);
    assert_eq!(c.layers[..5], [kinds[0], kinds[0], kinds[1], kinds[2], kinds[1]]);
    assert_eq!(c.layers[42], LayerKind::C4);
}

#[test]
fn pro() {
    let c = parse(PRO);
    assert_eq!((c.hidden_size, c.num_hidden_layers, c.num_attention_heads), (7168, 61, 128));
    assert_eq!((c.q_lora_rank, c.o_groups, c.index_topk), (1536, 16, 1024));
    assert_eq!((c.n_routed_experts, c.moe_intermediate_size), (384, 3072));
    assert_eq!(c.routed_scaling_factor, 2.5);
    let kinds = [LayerKind::Window, LayerKind::C4, LayerKind::C128];
    assert_eq!(kinds.map(|k| count(&c, k)), [0, 30, 31]);
    assert_eq!(c.layers[..4], [kinds[2], kinds[2], kinds[1], kinds[2]]);
}

#[test]
fn mini() {
    let c = parse(MINI);
    let [window, c4, c128] = [LayerKind::Window, LayerKind::C4, LayerKind::C128];
    assert_eq!(c.layers, [window, window, c4, c128, c4, c128]);
    assert_eq!((c.draft_ratios.len(), c.num_nextn_predict_layers), (0, 0));
    assert_eq!((c.o_groups, c.num_hash_layers, c.index_topk), (2, 2, 64));
    let shape = c.shape();
    assert_eq!(shape.layers, c.layers);
    assert_eq!((shape.head_dim, shape.rope_dim), (512, 64));
    assert_eq!((shape.index_head_dim, shape.window_tokens), (128, 128));
}

/// Every value of the published files survives: the parsed fields are compared with the file's.
#[test]
fn every_field_is_kept() {
    for text in [FLASH, PRO, MINI] {
        let file: Value = serde_json::from_str(text).unwrap();
        let parsed = format!("{:?}", parse(text));
        for (field, value) in file.as_object().unwrap() {
            let shown = match value {
                _ if ["compress_ratios", "rope_scaling", "quantization_config"]
                    .contains(&field.as_str()) =>
                {
                    continue;
                }
                Value::Number(n) if n.is_f64() => {
                    format!("{field}: {:?}", n.as_f64().unwrap() as f32)
                }
                Value::String(s) if field == "expert_dtype" || field == "transformers_version" => {
                    format!("{field}: Some({s:?})")
                }
                Value::Number(n) if field.ends_with("rope_theta") => format!("{field}: {n}.0"),
                other => format!("{field}: {other}"),
            };
            assert!(parsed.contains(&shown), "{shown} not in {parsed}");
        }
    }
}

#[test]
fn yarn_bounds_follow_from_the_config() {
    assert_eq!(parse(FLASH).yarn_bounds(), (15.0, 25.0));
    assert_eq!(parse(PRO).yarn_bounds(), (15.0, 25.0));
    // 64 ln(16384 / (2 pi beta)) / (2 ln 160000) = 11.75 and 21.005 for beta 32 and 1.
    assert_eq!(parse(MINI).yarn_bounds(), (11.0, 22.0));
}

/// Published frequencies of the real models, nine digits each.
#[test]
fn rope_frequencies() {
    let c = parse(FLASH);
    let (compressed, plain) = (c.compressed_rope_freqs(), c.rope_freqs());
    let table = [
        (0, "1", "1"),
        (1, "0.687656045", "0.749894202"),
        (2, "0.472870797", "0.562341332"),
        (8, "5.00000007e-2", "0.100000001"),
        (15, "3.63553851e-3", "1.33352149e-2"),
        (16, "2.26562493e-3", "9.99999978e-3"),
        (20, "2.96977785e-4", "3.16227786e-3"),
        (24, "1.95312514e-5", "1.00000005e-3"),
        (25, "5.37231244e-6", "7.49894185e-4"),
        (31, "5.6805294e-7", "1.33352150e-4"),
    ];
    for (k, want_compressed, want_plain) in table {
        assert_eq!(plain[k], want_plain.parse::<f32>().unwrap(), "plain {k}");
        assert_eq!(compressed[k], want_compressed.parse::<f32>().unwrap(), "compressed {k}");
    }
    // Above the ramp the frequency is unchanged, below it is divided by the factor.
    let mini = parse(MINI).compressed_rope_freqs();
    let base = |k: f32| 1.0 / 160_000f64.powf(f64::from(k) / 32.0) as f32;
    assert_eq!((mini[0], mini[11]), (1.0, base(11.0)));
    assert_eq!((mini[22], mini[31]), (base(22.0) / 4.0, base(31.0) / 4.0));
    assert!(mini[12] < base(12.0) && mini[21] > base(21.0) / 4.0);
}

#[test]
fn unsupported_values_name_field_value_and_alternative() {
    let cases = [
        ("/model_type", json!("deepseek_v41"), "model_type is \"deepseek_v41\""),
        ("/model_type", json!("deepseek_v3"), "supported: \"deepseek_v4\""),
        ("/model_type", json!(4), "model_type is 4"),
        ("/quantization_config/quant_method", json!("awq"), "quantization_config.quant_method"),
        ("/quantization_config/fmt", json!("e5m2"), "fmt is \"e5m2\", supported: \"e4m3\""),
        ("/quantization_config/scale_fmt", json!("float"), "supported: \"ue8m0\""),
        ("/quantization_config/weight_block_size", json!([64, 128]), "is [64, 128], supported"),
        ("/quantization_config/weight_block_size", json!([]), "is [], supported: [128, 128]"),
        ("/quantization_config/activation_scheme", json!("static"), "supported: \"dynamic\""),
        ("/scoring_func", json!("sigmoid"), "scoring_func is \"sigmoid\""),
        ("/topk_method", json!("greedy"), "supported: \"noaux_tc\""),
        ("/hidden_act", json!("gelu"), "hidden_act is \"gelu\""),
        ("/torch_dtype", json!("float16"), "torch_dtype is \"float16\""),
        ("/norm_topk_prob", json!(false), "norm_topk_prob is false, supported: true"),
        ("/tie_word_embeddings", json!(true), "tie_word_embeddings is true"),
        ("/attention_bias", json!(true), "attention_bias is true"),
        ("/num_key_value_heads", json!(8), "num_key_value_heads is 8, supported: 1"),
        ("/head_dim", json!(128), "head_dim is 128, supported: 512"),
        ("/qk_rope_head_dim", json!(32), "qk_rope_head_dim is 32, supported: 64"),
        ("/index_head_dim", json!(64), "index_head_dim is 64, supported: 128"),
        ("/sliding_window", json!(512), "sliding_window is 512, supported: 128"),
        ("/hc_mult", json!(2), "hc_mult is 2, supported: 4"),
        ("/n_shared_experts", json!(2), "n_shared_experts is 2, supported: 1"),
        ("/num_experts_per_tok", json!(257), "num_experts_per_tok is 257, supported: 1 to 64"),
        ("/hidden_size", json!(4100), "hidden_size is 4100, supported: multiples of 128"),
        ("/q_lora_rank", json!(1000), "q_lora_rank is 1000, supported: multiples of 128"),
        ("/num_attention_heads", json!(60), "num_attention_heads is 60, supported: multiples of 8"),
        ("/vocab_size", json!(1u64 << 40), "vocab_size is 1099511627776"),
        ("/num_hidden_layers", json!(0), "num_hidden_layers is 0"),
        ("/num_hidden_layers", json!(50), "compress_ratios is a list of 44"),
        ("/num_hash_layers", json!(44), "num_hash_layers is 44, supported: 0 to 43"),
        ("/num_nextn_predict_layers", json!(0), "num_nextn_predict_layers is 0, supported: 1"),
        ("/compress_ratios/3", json!(8), "compress_ratios is 8 in a layer, supported: 0, 4, 128"),
        ("/compress_ratios/43", json!(4), "compress_ratios is 4 in the draft stage"),
        ("/eos_token_id", json!(129_280), "eos_token_id is 129280, supported: 0 to 129279"),
        ("/rope_scaling/type", json!("linear"), "rope_scaling.type is \"linear\""),
        ("/rope_scaling/factor", json!(0.5), "rope_scaling.factor is 0.5"),
        ("/rope_scaling/beta_fast", json!(0.5), "rope_scaling.beta_fast is 0.5"),
        ("/rope_scaling/original_max_position_embeddings", json!(0), "supported: 1 to 16777216"),
        ("/compress_rope_theta", json!(1), "compress_rope_theta is 1"),
        ("/swiglu_limit", json!(-1.0), "swiglu_limit is -1"),
        ("/rms_norm_eps", json!(0.0), "rms_norm_eps is 0"),
    ];
    for (pointer, value, wanted) in cases {
        let error = changed(pointer, value.clone()).unwrap_err();
        assert!(matches!(error, ConfigError::Unsupported { .. }), "{pointer} {value}: {error:?}");
        let text = error.to_string();
        assert!(text.contains(wanted) && text.contains("supported: "), "{pointer}: {text}");
    }
}

#[test]
fn dspark_is_refused_by_name() {
    let fields = changed("/dspark_block_size", json!(5)).unwrap_err();
    assert!(matches!(&fields, ConfigError::DSpark { sign } if sign.contains("dspark_block_size")));
    let mut config: Value = serde_json::from_str(FLASH).unwrap();
    config["compress_ratios"].as_array_mut().unwrap().extend([json!(0), json!(0)]);
    let stages = ModelConfig::from_json(config.to_string().as_bytes()).unwrap_err();
    assert!(matches!(&stages, ConfigError::DSpark { sign } if sign.contains("3 entries")));
    assert!(stages.to_string().contains("DSpark"));
}

#[test]
fn malformed_input() {
    for bytes in [&b""[..], b"{", b"[]", b"\xff\xfe", b"null", b"{\"model_type\": null}"] {
        ModelConfig::from_json(bytes).unwrap_err();
    }
    for field in ["hidden_size", "compress_ratios", "quantization_config", "rope_scaling"] {
        let text = without(field).unwrap_err().to_string();
        assert!(text.contains(field), "{text}");
    }
    assert!(without("model_type").unwrap_err().to_string().contains("model_type is absent"));
    for value in [json!("4096"), json!(-1), json!(4096.5), json!(null)] {
        let error = changed("/hidden_size", value).unwrap_err();
        assert!(matches!(error, ConfigError::Json(_)), "{error:?}");
    }
    // A value of any length is clipped in the message.
    let long = changed("/model_type", json!({ "x": "y".repeat(10_000) })).unwrap_err();
    assert!(long.to_string().len() < 300);
}

#[test]
fn fields_that_may_be_absent_or_renamed() {
    for field in ["transformers_version", "use_cache", "initializer_range", "attention_dropout"] {
        without(field).unwrap();
    }
    assert_eq!(changed("/expert_dtype", json!("fp4")).unwrap().expert_dtype.unwrap(), "fp4");
    let mut config: Value = serde_json::from_str(FLASH).unwrap();
    let fields = config.as_object_mut().unwrap();
    let dtype = fields.remove("torch_dtype").unwrap();
    fields.insert("dtype".to_owned(), dtype);
    let scaling = fields["rope_scaling"].as_object_mut().unwrap();
    let kind = scaling.remove("type").unwrap();
    scaling.insert("rope_type".to_owned(), kind);
    let renamed = ModelConfig::from_json(config.to_string().as_bytes()).unwrap();
    assert_eq!(renamed, parse(FLASH));
}

#[test]
fn directories_without_a_config() {
    let nowhere = std::path::Path::new("/nowhere/dsv4");
    let error = ModelConfig::from_dir(nowhere).unwrap_err();
    assert!(matches!(&error, ConfigError::NotFound { dir } if dir == nowhere));
    let text = error.to_string();
    assert!(text.contains("/nowhere/dsv4") && text.contains("get one with"), "{text}");
}

/// The canonical text changes with every field that changes a value, and with no other.
#[test]
fn canonical_text_covers_what_computes() {
    let base = parse(FLASH).canonical();
    let computing = [
        ("/vocab_size", json!(129_279)),
        ("/hidden_size", json!(4224)),
        ("/q_lora_rank", json!(1152)),
        ("/o_groups", json!(16)),
        ("/o_lora_rank", json!(1152)),
        ("/num_attention_heads", json!(128)),
        ("/compress_ratios/3", json!(4)),
        ("/index_n_heads", json!(32)),
        ("/index_topk", json!(511)),
        ("/n_routed_experts", json!(255)),
        ("/num_experts_per_tok", json!(5)),
        ("/moe_intermediate_size", json!(2176)),
        ("/routed_scaling_factor", json!(1.25)),
        ("/num_hash_layers", json!(2)),
        ("/swiglu_limit", json!(9.0)),
        ("/hc_sinkhorn_iters", json!(19)),
        ("/hc_eps", json!(1e-5)),
        ("/rms_norm_eps", json!(1e-5)),
        ("/rope_theta", json!(10_001)),
        ("/compress_rope_theta", json!(160_001)),
        ("/rope_scaling/factor", json!(8)),
        ("/rope_scaling/original_max_position_embeddings", json!(32_768)),
        ("/rope_scaling/beta_fast", json!(31)),
        ("/rope_scaling/beta_slow", json!(2)),
    ];
    let mut texts = vec![base.clone()];
    for (pointer, value) in computing {
        texts.push(changed(pointer, value).unwrap().canonical());
    }
    let all = texts.len();
    texts.sort();
    texts.dedup();
    assert_eq!(texts.len(), all);
    for (pointer, value) in [
        ("/use_cache", json!(false)),
        ("/expert_dtype", json!("fp4")),
        ("/transformers_version", json!("5.0.0")),
        ("/max_position_embeddings", json!(65_536)),
    ] {
        assert_eq!(changed(pointer, value).unwrap().canonical(), base, "{pointer}");
    }
}
