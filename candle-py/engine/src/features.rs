//! The processor features that decide how fast a machine can be, whether or not today's kernels use them.

/// Name and presence of each feature of interest.
#[cfg(target_arch = "x86_64")]
pub fn cpu_features() -> Vec<(&'static str, bool)> {
    macro_rules! detect {
        ($($name:tt),*) => { vec![$(($name, std::arch::is_x86_feature_detected!($name))),*] };
    }
    let tiles = crate::cpu::TileFeatures::detected();
    let mut features = detect!(
        "avx2",
        "fma",
        "f16c",
        "avxvnni",
        "avx512f",
        "avx512bw",
        "avx512dq",
        "avx512vl",
        "avx512vnni",
        "avx512bf16",
        "avx512fp16"
    );
    features.extend([("amx-tile", tiles.tile), ("amx-bf16", tiles.bf16)]);
    features
}

/// Name and presence of each feature of interest.
#[cfg(target_arch = "aarch64")]
pub fn cpu_features() -> Vec<(&'static str, bool)> {
    macro_rules! detect {
        ($($name:tt),*) => { vec![$(($name, std::arch::is_aarch64_feature_detected!($name))),*] };
    }
    detect!("neon", "fp16", "bf16", "dotprod", "i8mm", "sve")
}

/// Name and presence of each feature of interest.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub fn cpu_features() -> Vec<(&'static str, bool)> {
    Vec::new()
}
