//! From hidden states to embeddings: pooling modes, Dense, Normalize, dimensions, and the files that ask for them.

#![allow(clippy::unwrap_used)]

mod common;

use candle_core::{Device, Tensor};
use candle_engine::{EmbedOptions, Engine, Error, inspect};
use common::{Batch, Folder, cases, distance, golden, load, load_error};
use serde_json::{Value, json};

/// Sums in another order.
const TOLERANCE: f32 = 1e-6;

const OLD: &str = "sentence_transformers.models";

fn options(pooling: &str) -> EmbedOptions {
    EmbedOptions { pooling: Some(pooling.parse().unwrap()), normalize: Some(false), ..Default::default() }
}

fn embed(engine: &Engine, options: &EmbedOptions) -> Vec<f32> {
    engine.embed(&Batch::new(&cases("bert", "ids")).ragged(), options).unwrap().data
}

/// The golden BERT with sentence-transformers' files.
fn sentence_folder(modules: &[(&str, &str)], pooling: &Value) -> Folder {
    let folder = Folder::from_golden("bert");
    let entry = |(path, kind): &(&str, &str)| json!({"path": path, "type": kind});
    folder.file("modules.json", &modules.iter().map(entry).collect::<Vec<_>>().into());
    folder.file("1_Pooling/config.json", pooling);
    folder.write();
    folder
}

fn dense(folder: &Folder, path: &str, config: &Value, weight: &[f32], bias: &[f32]) {
    folder.file(&format!("{path}/config.json"), config);
    let mut tensors = Folder::empty(json!({}));
    let (rows, columns) = (bias.len(), weight.len() / bias.len());
    let tensor = |values: &[f32], shape: &[usize]| Tensor::from_vec(values.to_vec(), shape, &Device::Cpu).unwrap();
    tensors.tensors.insert("linear.weight".into(), tensor(weight, &[rows, columns]));
    tensors.tensors.insert("linear.bias".into(), tensor(bias, &[rows]));
    tensors.write_tensors("model.safetensors", |_| true);
    let target = folder.dir.path().join(path).join("model.safetensors");
    std::fs::copy(tensors.dir.path().join("model.safetensors"), target).unwrap();
}

#[test]
fn pooling_modes_follow_their_formulas() {
    let engine = load(&golden("bert"));
    let sequences = cases("bert", "ids");
    let hidden = engine.hidden_states(&Batch::new(&sequences).ragged()).unwrap().data;
    for skip in [0, 2, 5] {
        let mut start = 0;
        let mut wanted: Vec<Vec<f32>> = vec![Vec::new(); 6];
        for sequence in &sequences {
            let rows: Vec<&[f32]> = hidden[start * 64..(start + sequence.len()) * 64].chunks(64).collect();
            start += sequence.len();
            let kept: Vec<(usize, &[f32])> = rows.iter().copied().enumerate().skip(skip).collect();
            for feature in 0..64 {
                let column = || kept.iter().map(|(at, row)| (*at as f64 + 1.0, f64::from(row[feature])));
                let (count, sum) = (kept.len() as f64, column().map(|(_, value)| value).sum::<f64>());
                let weights: f64 = column().map(|(weight, _)| weight).sum();
                let weighted: f64 = column().map(|(weight, value)| weight * value).sum();
                let first = kept.first().map_or(rows[0][feature], |(_, row)| row[feature]);
                wanted[0].push(first);
                wanted[1].push(column().map(|(_, value)| value as f32).fold(f32::NEG_INFINITY, f32::max));
                wanted[2].push((sum / count.max(1e-9)) as f32);
                wanted[3].push((sum / count.max(1e-9).sqrt()) as f32);
                wanted[4].push((weighted / weights.max(1e-9)) as f32);
                wanted[5].push(kept.last().map_or(0.0, |(_, row)| row[feature]));
            }
        }
        for (mode, wanted) in ["cls", "max", "mean", "mean_sqrt_len", "weighted_mean", "last"].iter().zip(&wanted) {
            let got = embed(&engine, &EmbedOptions { skip_tokens: skip, ..options(mode) });
            let same = got.iter().zip(wanted).all(|(got, wanted)| got == wanted || (got - wanted).abs() <= TOLERANCE);
            assert!(same, "{mode} after {skip}");
        }
    }
}

#[test]
fn a_row_whose_tokens_are_all_skipped_is_bad_once_normalised() {
    let engine = load(&golden("bert"));
    let options = EmbedOptions { skip_tokens: 2, normalize: Some(true), ..options("mean") };
    let output = engine.embed(&Batch::new(&cases("bert", "ids")).ragged(), &options).unwrap();
    assert_eq!(output.bad_rows, [0, 1]);
    let options = EmbedOptions { skip_tokens: usize::MAX, ..options };
    let output = engine.embed(&Batch::new(&cases("bert", "ids")).ragged(), &options).unwrap();
    assert_eq!(output.bad_rows, [0, 1, 2, 3, 4, 5]);
}

#[test]
fn joined_modes_stand_side_by_side_in_the_order_given() {
    let engine = load(&golden("bert"));
    let (mean, cls) = (embed(&engine, &options("mean")), embed(&engine, &options("cls")));
    let joined = embed(&engine, &options("mean+cls"));
    for row in 0..6 {
        assert_eq!(joined[row * 128..][..64], mean[row * 64..][..64]);
        assert_eq!(joined[row * 128 + 64..][..64], cls[row * 64..][..64]);
    }
}

#[test]
fn old_and_new_pooling_files_say_the_same() {
    let old_modules = [("", &*format!("{OLD}.Transformer")), ("1_Pooling", &format!("{OLD}.Pooling"))];
    for (file, mode) in [
        (
            json!({"word_embedding_dimension": 64, "pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}),
            "cls",
        ),
        (json!({"word_embedding_dimension": 64, "pooling_mode_mean_tokens": true}), "mean"),
        (json!({"word_embedding_dimension": 64}), "mean"),
        (json!({"pooling_mode_lasttoken": true}), "last"),
        (
            json!({"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": true, "pooling_mode_max_tokens": true}),
            "cls+max+mean",
        ),
        (json!({"embedding_dimension": 64, "pooling_mode": "mean_sqrt_len_tokens"}), "mean_sqrt_len"),
        (json!({"embedding_dimension": 64, "pooling_mode": ["weightedmean", "cls"]}), "weighted_mean+cls"),
    ] {
        let folder = sentence_folder(&old_modules, &file);
        let engine = load(folder.dir.path());
        assert_eq!(engine.info().pooling.as_ref().unwrap().to_string(), mode);
        assert!(engine.info().include_prompt && !engine.info().normalize);
        assert_eq!(embed(&engine, &EmbedOptions::default()), embed(&engine, &options(mode)));
    }
    let folder = sentence_folder(&old_modules, &json!({"pooling_mode": "mean", "include_prompt": false}));
    assert!(!load(folder.dir.path()).info().include_prompt);
}

#[test]
fn a_pooling_folder_counts_without_a_module_list() {
    let folder = Folder::from_golden("bert");
    folder.file("1_Pooling/config.json", &json!({"word_embedding_dimension": 64, "pooling_mode_cls_token": true}));
    assert_eq!(load(folder.write()).info().pooling.as_ref().unwrap().to_string(), "cls");
}

#[test]
fn no_word_on_pooling_is_an_error_that_asks_for_one() {
    let engine = load(&golden("bert"));
    assert_eq!(engine.info().pooling, None);
    let error = engine.embed(&Batch::new(&[vec![1]]).ragged(), &EmbedOptions::default()).unwrap_err();
    assert!(matches!(error, Error::Input { .. }));
    assert!(error.hint().unwrap().contains("task.pooling"));
}

#[test]
fn dense_modules_and_norms_apply_in_order() {
    let module = |kind: &str| format!("{OLD}.{kind}");
    let names = ["Transformer", "Pooling", "Normalize", "Dense", "Dense", "Normalize"].map(module);
    let paths = ["", "1_Pooling", "2_Normalize", "3_Dense", "4_Dense", "5_Normalize"];
    let modules: Vec<(&str, &str)> = paths.into_iter().zip(names.iter().map(String::as_str)).collect();
    let folder = sentence_folder(&modules, &json!({"word_embedding_dimension": 64, "pooling_mode_mean_tokens": true}));
    let first: Vec<f32> = (0..3 * 64).map(|index| ((index * 7 % 23) as f32 - 11.0) / 10.0).collect();
    let second = [0.5, -1.0, 2.0, 1.5, 0.25, -0.75];
    let config = |input: usize, output: usize, activation: &str| {
        let class = format!("torch.nn.modules.{activation}");
        json!({"in_features": input, "out_features": output, "bias": true, "activation_function": class})
    };
    dense(&folder, "3_Dense", &config(64, 3, "activation.Tanh"), &first, &[0.1, -0.2, 0.3]);
    dense(&folder, "4_Dense", &config(3, 2, "linear.Identity"), &second, &[0.5, -0.5]);
    let engine = load(folder.dir.path());
    assert!(engine.info().normalize);
    assert_eq!(engine.info().embedding_dim, Some(2));

    let unit = |row: &[f32]| -> Vec<f32> {
        let norm = row.iter().map(|value| value * value).sum::<f32>().sqrt();
        row.iter().map(|value| value / norm).collect()
    };
    let dot = |row: &[f32], weight: &[f32]| row.iter().zip(weight).map(|(x, w)| x * w).sum::<f32>();
    let pooled = embed(&load(&golden("bert")), &options("mean"));
    let mut raw = Vec::new();
    for row in pooled.chunks(64) {
        let inner: Vec<f32> = first
            .chunks(64)
            .zip([0.1, -0.2, 0.3])
            .map(|(weight, bias)| (dot(&unit(row), weight) + bias).tanh())
            .collect();
        raw.extend(second.chunks(3).zip([0.5, -0.5]).map(|(weight, bias)| dot(&inner, weight) + bias));
    }
    let unnormalised = EmbedOptions { normalize: Some(false), ..Default::default() };
    assert!(distance(&embed(&engine, &unnormalised), &raw) <= 1e-5);
    let normalised: Vec<f32> = raw.chunks(2).flat_map(unit).collect();
    assert!(distance(&embed(&engine, &EmbedOptions::default()), &normalised) <= 1e-5);

    let joined = "mean+cls".parse().unwrap();
    let error = inspect(folder.dir.path(), Some(&joined)).unwrap_err();
    assert_eq!(error.to_string(), "pooling gives 128 numbers where the model's Dense takes 64: `mean+cls`");
    let info = inspect(&golden("bert"), Some(&joined)).unwrap();
    assert_eq!((info.pooling, info.embedding_dim), (Some(joined), Some(128)));
    let error = engine.embed(&Batch::new(&[vec![1]]).ragged(), &options("mean+cls")).unwrap_err();
    assert_eq!(error.to_string(), "pooling gives 128 numbers where the model's Dense takes 64: `mean+cls`");
}

#[test]
fn dimensions_are_cut_before_the_norm() {
    let engine = load(&golden("bert"));
    let cut = embed(&engine, &EmbedOptions { dimensions: Some(5), normalize: Some(true), ..options("mean") });
    let whole = embed(&engine, &options("mean"));
    for (cut, whole) in cut.chunks(5).zip(whole.chunks(64)) {
        let norm = whole[..5].iter().map(|value| value * value).sum::<f32>().sqrt();
        assert!(distance(cut, &whole[..5].iter().map(|value| value / norm).collect::<Vec<_>>()) <= TOLERANCE);
    }
    for (dimensions, message) in
        [(0, "dimensions must be at least 1: `0`"), (65, "dimensions are more than the 64 of the model: `65`")]
    {
        let options = EmbedOptions { dimensions: Some(dimensions), ..options("mean") };
        let error = engine.embed(&Batch::new(&[vec![1]]).ragged(), &options).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
}

#[test]
fn modules_and_settings_that_are_not_known_are_refused_by_name() {
    let transformer = format!("{OLD}.Transformer");
    let pooling = format!("{OLD}.Pooling");
    let plain = json!({"word_embedding_dimension": 64, "pooling_mode_mean_tokens": true});
    let refused = [
        (
            vec![("", &*transformer), ("1_Pooling", &pooling), ("2_X", "my_package.Whiten")],
            plain.clone(),
            "module 2 is not supported: `my_package.Whiten`",
        ),
        (
            vec![("", &*transformer), ("1_Pooling", &pooling), ("2_X", "sentence_transformers.models.CNN")],
            plain.clone(),
            "`sentence_transformers.models.CNN`",
        ),
        (vec![("1_Pooling", &*pooling)], plain.clone(), "module 0 is out of place"),
        (vec![("..", &*transformer)], plain.clone(), "leads out of the model's folder: `..`"),
        (
            vec![("", &*transformer), ("1_Pooling", &pooling)],
            json!({"pooling_mode": "median"}),
            "pooling_mode is not supported: `median`",
        ),
        (
            vec![("", &*transformer), ("1_Pooling", &pooling)],
            json!({"pooling_mode_attention": true}),
            "pooling_mode_attention is not supported: `true`",
        ),
        (
            vec![("", &*transformer), ("1_Pooling", &pooling)],
            json!({"word_embedding_dimension": 32}),
            "token width is not the hidden size 64: `32`",
        ),
    ];
    for (modules, pooling, message) in refused {
        let folder = sentence_folder(&modules, &pooling);
        let (error, _) = load_error(folder.dir.path());
        assert!(error.contains(message), "{error}");
        assert_eq!(inspect(folder.dir.path(), None).unwrap_err().to_string(), error);
    }
}

#[test]
fn a_dense_module_that_does_not_fit_is_refused() {
    let modules = ["Transformer", "Pooling", "Dense"].map(|kind| format!("{OLD}.{kind}"));
    let modules = [("", &*modules[0]), ("1_Pooling", &modules[1]), ("2_Dense", &modules[2])];
    let plain = json!({"word_embedding_dimension": 64, "pooling_mode_mean_tokens": true});
    let identity = "torch.nn.modules.linear.Identity";
    let good = json!({"in_features": 64, "out_features": 2, "bias": true, "activation_function": identity});
    for (key, value, message) in [
        ("in_features", json!(32), "in_features is not the width 64 of what comes before: `32`"),
        ("activation_function", json!("mine.Swirl"), "activation_function is not supported: `mine.Swirl`"),
        ("use_residual", json!(true), "use_residual is not supported: `true`"),
        ("module_input_name", json!("token_embeddings"), "module_input_name is not supported: `token_embeddings`"),
        ("out_features", json!(3), "shape of linear.weight is not [3, 64]: `[2, 64]`"),
        ("bias", json!(false), "unexpected tensor: `linear.bias`"),
    ] {
        let folder = sentence_folder(&modules, &plain);
        let mut config = good.clone();
        config[key] = value;
        dense(&folder, "2_Dense", &config, &[0.0; 128], &[0.0; 2]);
        let (error, _) = load_error(folder.dir.path());
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn the_transformer_may_live_in_a_folder_of_its_own() {
    let folder = Folder::from_golden("bert");
    folder.file("0_BERT/config.json", &folder.config);
    folder.write_tensors("0_BERT/model.safetensors", |_| true);
    folder.file(
        "modules.json",
        &json!([{"idx": 0, "name": "0", "path": "0_BERT", "type": format!("{OLD}.Transformer")}]),
    );
    let engine = load(folder.dir.path());
    assert_eq!(engine.info().transformer_path, "0_BERT");
    assert_eq!(embed(&engine, &options("mean")), embed(&load(&golden("bert")), &options("mean")));
}
