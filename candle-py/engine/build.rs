//! Compiles the CUDA kernels, `src/cuda/*.cu`, to PTX. Does nothing without the feature `cuda`.
//!
//! The PTX of `src/cuda/norm.cu` is `norm.ptx` in `OUT_DIR`. `nvcc` is `NVCC`, else `CUDA_HOME/bin/nvcc`, else that of `PATH`. `CUDA_COMPUTE_CAP` (80, 90, ...) is the oldest device
//! that the kernels are for; the driver translates them for newer ones.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{env, fs};

const SOURCES: &str = "src/cuda";

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return ExitCode::SUCCESS;
    }
    match compile_all() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn compile_all() -> Result<(), String> {
    for name in ["NVCC", "CUDA_HOME", "CUDA_COMPUTE_CAP", "PATH"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    println!("cargo::rerun-if-changed={SOURCES}");
    let out_dir = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set: build with cargo")?);
    let (nvcc, capability) = (find_nvcc(), capability()?);
    for source in sources()? {
        let target = out_dir.join(source.with_extension("ptx").file_name().unwrap_or_default());
        compile(&nvcc, &capability, &source, &target)?;
    }
    Ok(())
}

/// The kernels in the order of their names; none where the folder is not there.
fn sources() -> Result<Vec<PathBuf>, String> {
    let Ok(entries) = fs::read_dir(SOURCES) else { return Ok(Vec::new()) };
    let unreadable = |error| format!("folder cannot be read ({error}): `{SOURCES}`");
    let paths: Result<Vec<_>, _> = entries.map(|entry| entry.map(|entry| entry.path())).collect();
    let mut paths = paths.map_err(unreadable)?;
    for path in &paths {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "cu"));
    paths.sort();
    Ok(paths)
}

fn compile(nvcc: &Path, capability: &str, source: &Path, target: &Path) -> Result<(), String> {
    let output = Command::new(nvcc)
        .args(["--ptx", "-std=c++17", "-O3", &format!("-arch=compute_{capability}"), "-I", SOURCES, "-o"])
        .args([target, source])
        .output()
        .map_err(|error| {
            format!(
                "nvcc cannot be run ({error}): `{}`\n\
                 hint: the feature `cuda` compiles kernels; set CUDA_HOME to a CUDA toolkit, or use `make wheel-cuda` and \
                 `make check-cuda`, which bring one",
                nvcc.display()
            )
        })?;
    if output.status.success() {
        return Ok(());
    }
    let said = [output.stdout, output.stderr].concat();
    Err(format!("kernel does not compile: `{}`\n{}", source.display(), String::from_utf8_lossy(&said)))
}

fn find_nvcc() -> PathBuf {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("NVCC").or_else(|| set("CUDA_HOME").map(|home| home.join("bin/nvcc"))).unwrap_or_else(|| "nvcc".into())
}

fn capability() -> Result<String, String> {
    let said = env::var("CUDA_COMPUTE_CAP").unwrap_or_default();
    let hint =
        "hint: give the compute capability of the oldest device in two or three digits, such as 80 (A100) or 90 (H200)";
    let is_number = (2..=3).contains(&said.len()) && said.bytes().all(|byte| byte.is_ascii_digit());
    if is_number { Ok(said) } else { Err(format!("CUDA_COMPUTE_CAP is not set or no number: `{said}`\n{hint}")) }
}
