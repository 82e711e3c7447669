//! Model folders that do not hold what they should: told whole, by name, before anything is allocated.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs;

use candle_core::DType;
use candle_engine::inspect;
use common::{Folder, cases, golden, load, load_error};
use serde_json::{Value, json};

/// Loading and inspecting refuse alike; gives what they say.
fn refusal(folder: &Folder) -> String {
    let (message, _) = load_error(folder.dir.path());
    assert_eq!(inspect(folder.dir.path(), None).unwrap_err().to_string(), message);
    message
}

#[test]
fn weights_cut_short_anywhere_are_refused() {
    let folder = Folder::from_golden("bert");
    let whole = fs::read(folder.write().join("model.safetensors")).unwrap();
    let header = 8 + usize::try_from(u64::from_le_bytes(whole[..8].try_into().unwrap())).unwrap();
    let points = [0, 1, 7, 8, 9, header / 2, header - 1, header, header + 1, whole.len() / 2, whole.len() - 1];
    for point in points {
        fs::write(folder.dir.path().join("model.safetensors"), &whole[..point]).unwrap();
        let message = refusal(&folder);
        assert!(message.contains("model.safetensors") && message.contains("weights file"), "at {point}: {message}");
    }
    let longer = [&whole[..], &[0]].concat();
    fs::write(folder.dir.path().join("model.safetensors"), longer).unwrap();
    assert!(refusal(&folder).starts_with("weights file is shorter or longer than its header says"));
}

#[test]
fn offsets_that_overlap_or_leave_the_file_are_refused() {
    let one = |offsets: [u64; 2]| json!({"dtype": "F32", "shape": [2], "data_offsets": offsets});
    let tensors = |a: [u64; 2], b: [u64; 2]| json!({"a": one(a), "b": one(b)});
    let huge = json!({"a": {"dtype": "F32", "shape": [u64::MAX, 4], "data_offsets": [0, 16]}});
    for header in [tensors([0, 8], [4, 12]), tensors([0, 8], [8, 1 << 60]), tensors([8, 0], [8, 16]), huge] {
        let folder = Folder::from_golden("bert");
        folder.write();
        let header = header.to_string();
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 16]].concat();
        fs::write(folder.dir.path().join("model.safetensors"), bytes).unwrap();
        assert!(refusal(&folder).contains("weights file"), "{header}");
    }
}

#[test]
fn every_tensor_that_does_not_fit_is_told_at_once() {
    let mut folder = Folder::from_golden("bert");
    folder.tensors.remove("encoder.layer.0.output.dense.bias");
    folder.tensors.remove("embeddings.LayerNorm.weight");
    folder.zeros("encoder.layer.1.output.dense.weight", &[64, 161]);
    folder.zeros("encoder.layer.9.output.dense.weight", &[64, 160]);
    folder.zeros("adapter.weight", &[1]);
    let integers = folder.tensors["pooler.dense.bias"].to_dtype(DType::I64).unwrap();
    folder.tensors.insert("encoder.layer.2.output.dense.bias".into(), integers);
    folder.write();
    let message = refusal(&folder);
    let mut problems: Vec<&str> = message.lines().skip(1).collect();
    problems.sort_unstable();
    assert!(message.starts_with("the model has 6 problems: `"));
    assert_eq!(
        problems,
        [
            "- dtype of encoder.layer.2.output.dense.bias is not supported: `I64`",
            "- missing tensor of shape [64]: `embeddings.LayerNorm.weight`",
            "- missing tensor of shape [64]: `encoder.layer.0.output.dense.bias`",
            "- shape of encoder.layer.1.output.dense.weight is not [64, 160]: `[64, 161]`",
            "- unexpected tensor: `adapter.weight`",
            "- unexpected tensor: `encoder.layer.9.output.dense.weight`",
        ]
    );
}

#[test]
fn a_configuration_of_another_size_does_not_fit() {
    let mut folder = Folder::from_golden("bert");
    folder.config["vocab_size"] = json!(385);
    folder.config["num_hidden_layers"] = json!(2);
    folder.write();
    let message = refusal(&folder);
    assert!(message.contains("shape of embeddings.word_embeddings.weight is not [385, 64]: `[384, 64]`"), "{message}");
    assert!(message.contains("unexpected tensor: `encoder.layer.2.output.dense.bias`"), "{message}");
}

#[test]
fn an_index_that_does_not_fit_its_shards_is_refused() {
    let folder = Folder::from_golden("bert");
    folder.file("config.json", &folder.config);
    folder.write_tensors("a.safetensors", |_| true);
    let index = |map: Value| folder.file("model.safetensors.index.json", &json!({"weight_map": map}));

    index(json!({"x": "a.safetensors", "y": "b.safetensors", "z": "c.safetensors"}));
    let message = refusal(&folder);
    assert!(message.contains("weights file is missing: `") && message.contains("b.safetensors"), "{message}");
    assert!(message.contains("c.safetensors"), "{message}");

    index(json!({"x": "a.safetensors"}));
    assert_eq!(refusal(&folder), "tensor that the index places in a.safetensors is not there: `x`");

    for outside in ["../a.safetensors", "/etc/passwd", ".."] {
        index(json!({"x": outside}));
        assert!(refusal(&folder).starts_with("index names something that is no file beside it"), "{outside}");
    }

    index(json!({}));
    assert!(refusal(&folder).starts_with("index has no weight_map"));

    index(json!({"x": "a.safetensors", "y": "b.safetensors"}));
    folder.write_tensors("b.safetensors", |name| name == "pooler.dense.bias");
    assert!(refusal(&folder).contains("tensor is there twice: `pooler.dense.bias`"));
}

#[test]
fn a_folder_without_safetensors_is_told_what_to_do() {
    let folder = Folder::from_golden("bert");
    folder.file("config.json", &folder.config);
    assert!(refusal(&folder).starts_with("no model.safetensors or model.safetensors.index.json"));
    fs::write(folder.dir.path().join("pytorch_model.bin"), b"x").unwrap();
    assert!(load_error(folder.dir.path()).1.contains("jobs convert"));
}

#[test]
fn settings_that_are_not_followed_are_refused_by_name_and_value() {
    let refused = [
        ("bert", "model_type", json!("mpnet"), "config.json: model_type is not supported: `mpnet`"),
        (
            "bert",
            "hidden_act",
            json!("quick_gelu"),
            "config.json: hidden_act is not a supported activation: `quick_gelu`",
        ),
        (
            "bert",
            "position_embedding_type",
            json!("relative_key"),
            "config.json: position_embedding_type is not supported: `relative_key`",
        ),
        ("bert", "is_decoder", json!(true), "config.json: is_decoder is not supported: `true`"),
        ("bert", "pruned_heads", json!({"1": [0]}), "config.json: pruned_heads is not supported: `{\"1\":[0]}`"),
        (
            "bert",
            "architectures",
            json!(["BertForTokenClassification"]),
            "config.json: architectures is not supported: `[\"BertForTokenClassification\"]`",
        ),
        (
            "bert",
            "num_attention_heads",
            json!(5),
            "config.json: hidden_size is not a multiple of the 5 attention heads: `64`",
        ),
        (
            "bert",
            "num_hidden_layers",
            json!(1_000_000_000),
            "config.json: num_hidden_layers must be a whole number from 0 to 1024: `1000000000`",
        ),
        ("bert", "hidden_size", json!("64"), "config.json: hidden_size must be a whole number from 1 to 1048576: `64`"),
        ("bert", "layer_norm_eps", json!(-1.0), "config.json: layer_norm_eps must be a positive number: `-1.0`"),
        ("roberta", "pad_token_id", json!(null), "config.json: pad_token_id is needed to number the positions: `null`"),
        (
            "roberta",
            "pad_token_id",
            json!(129),
            "config.json: max_position_embeddings leaves no position after the padding id: `130`",
        ),
        (
            "modernbert",
            "layer_types",
            json!(["full_attention", "chunked_attention", "full_attention", "full_attention"]),
            "config.json: layer_types may hold full_attention and sliding_attention only: \
             `[\"full_attention\",\"chunked_attention\",\"full_attention\",\"full_attention\"]`",
        ),
        (
            "modernbert",
            "rope_parameters",
            json!({"full_attention": {"rope_type": "yarn", "rope_theta": 1e4}}),
            "config.json: rope_type is not supported: `yarn`",
        ),
        (
            "modernbert",
            "rope_parameters",
            json!({"rope_theta": 1e4}),
            "config.json: rope_parameters has a key that is no layer type (rope_theta): `{\"rope_theta\":10000.0}`",
        ),
        ("modernbert", "classifier_pooling", json!("max"), "config.json: classifier_pooling is not supported: `max`"),
        (
            "bert-classifier",
            "id2label",
            json!({"0": "a", "2": "b"}),
            "config.json: id2label must map each id from 0 on to a name: `{\"0\":\"a\",\"2\":\"b\"}`",
        ),
    ];
    for (name, key, value, message) in refused {
        let mut folder = Folder::from_golden(name);
        folder.config[key] = value;
        folder.write();
        assert_eq!(refusal(&folder), message);
    }
}

#[test]
fn several_settings_are_told_at_once() {
    let mut folder = Folder::from_golden("bert");
    folder.config["hidden_act"] = json!("mish");
    folder.config["is_decoder"] = json!(true);
    folder.write();
    let message = refusal(&folder);
    assert!(
        message.starts_with("the model has 2 problems") && message.contains("mish") && message.contains("is_decoder")
    );
}

#[test]
fn a_configuration_that_cannot_be_read_is_named() {
    let folder = Folder::from_golden("bert");
    assert!(refusal(&folder).starts_with("file is missing: `"));
    for (text, message) in [("{", "file is not valid JSON"), ("[]", "file does not hold a JSON object")] {
        fs::write(folder.dir.path().join("config.json"), text).unwrap();
        assert!(refusal(&folder).starts_with(message));
    }
    assert!(load_error(&golden("bert").join("nowhere")).0.starts_with("file is missing"));
}

#[test]
fn weights_that_are_not_finite_make_bad_rows_and_nothing_else() {
    let mut folder = Folder::from_golden("bert");
    let table = folder.tensors["embeddings.word_embeddings.weight"].to_vec2::<f32>().unwrap();
    let mut numbers: Vec<f32> = table.concat();
    numbers[64] = f32::NAN;
    numbers[3 * 64 + 3] = f32::INFINITY;
    let tensor = candle_core::Tensor::from_vec(numbers, (384, 64), &candle_core::Device::Cpu).unwrap();
    folder.tensors.insert("embeddings.word_embeddings.weight".into(), tensor);
    let engine = load(folder.write());
    let mut sequences = cases("bert", "ids");
    sequences[1] = vec![5, 1];
    sequences[4] = vec![3, 20, 21];
    for mode in ["mean", "max", "cls", "last", "mean_sqrt_len", "weighted_mean"] {
        for normalize in [true, false] {
            let options = candle_engine::EmbedOptions {
                pooling: Some(mode.parse().unwrap()),
                normalize: Some(normalize),
                ..Default::default()
            };
            let output = engine.embed(&common::Batch::new(&sequences).ragged(), &options).unwrap();
            assert_eq!(output.bad_rows, [1, 4], "{mode}");
        }
    }
}
