//! The engines that ours is measured beside on a CPU, and the models for it: llama.cpp, built from
//! the source distribution of `llama-cpp-python`, and transformers on PyTorch; in the target folder.

use crate::{python, sh};
use anyhow::{Context as _, Result};
use std::path::{Path, PathBuf};

/// Tells the bench where all of it is.
pub(crate) const VARIABLE: &str = "DSV4_BENCH_CPU_PEERS";
/// The distribution that brings llama.cpp with the architecture `deepseek4`.
const SOURCE: &str = "llama-cpp-python==0.3.36";
const UNPACKED: &str = "llama_cpp_python-0.3.36";
/// What is installed to convert models and to run transformers, and to build llama.cpp.
const PACKAGES: [&str; 7] = [
    "torch==2.15.0",
    "transformers==5.24.0",
    "safetensors==0.8.0",
    "numpy==2.4.6",
    "sentencepiece==0.2.3",
    "cmake",
    "ninja",
];
/// Only what the bench runs is built, for this machine's processor.
const BUILD: [&str; 9] = [
    "-G",
    "Ninja",
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DBUILD_SHARED_LIBS=OFF",
];
const MINI: &str = "models/dsv4-mini/checkpoint";

/// The folder with `env` (Python), `llama-bench`, `mini.gguf`, `tiny451` and `tiny451.gguf`. What is
/// missing is fetched, built and made: about 6 GB and, on two cores, ten minutes.
pub(crate) fn ensure() -> Result<PathBuf> {
    let env = python::environment("cpu-peers", &PACKAGES).context("fetch PyTorch and CMake")?;
    let root = env.join("models");
    std::fs::create_dir_all(&root).context("make the folder of the peers' models")?;
    let llama = llama(&env, &root)?;
    let python = env.join("bin/python");
    let script = |name: &str| sh::root().join("bench/peers").join(name);
    let mini = mini_without_tokenizer(&root)?;
    let tiny = root.join("tiny451");
    if !tiny.join("config.json").exists() {
        sh::run(sh::command(&python).arg(script("tiny451.py")).arg(&mini).arg(&tiny))?;
    }
    for (name, folder) in [("mini.gguf", &mini), ("tiny451.gguf", &tiny)] {
        let target = root.join(name);
        if !target.exists() {
            let mut convert = sh::command(&python);
            sh::run(convert.arg(script("convert_gguf.py")).arg(&llama).arg(folder).arg(target))?;
        }
    }
    Ok(env)
}

/// The mini checkpoint's folder as the converter takes it.
fn mini_without_tokenizer(root: &Path) -> Result<PathBuf> {
    let folder = root.join("mini");
    std::fs::create_dir_all(&folder).context("make a folder")?;
    for entry in std::fs::read_dir(sh::root().join(MINI)).context("list the mini model")? {
        let entry = entry.context("list the mini model")?;
        let name = entry.file_name();
        if !name.to_string_lossy().starts_with("tokenizer") {
            std::fs::copy(entry.path(), folder.join(name)).context("copy the mini model")?;
        }
    }
    Ok(folder)
}

/// Builds `llama-bench` into the environment; gives the folder of the source.
fn llama(env: &Path, root: &Path) -> Result<PathBuf> {
    let source = root.join(UNPACKED).join("vendor/llama.cpp");
    let target = env.join("bin/llama-bench");
    if target.exists() && source.exists() {
        return Ok(source);
    }
    let python = python::ensure()?;
    let mut pip = sh::command(python);
    pip.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]);
    pip.args(["--no-binary", "llama-cpp-python", SOURCE, "-d"]).arg(root);
    sh::run(&mut pip).context("fetch the source of llama.cpp")?;
    let mut unpack = sh::command("tar");
    sh::run(unpack.arg("xf").arg(root.join(format!("{UNPACKED}.tar.gz"))).arg("-C").arg(root))?;
    let (cmake, build) = (env.join("bin/cmake"), root.join("build"));
    let ninja = format!("-DCMAKE_MAKE_PROGRAM={}", env.join("bin/ninja").display());
    let mut configure = sh::command(&cmake);
    sh::run(configure.arg("-S").arg(&source).arg("-B").arg(&build).args(BUILD).arg(ninja))?;
    sh::run(sh::command(&cmake).arg("--build").arg(&build).args(["--target", "llama-bench"]))
        .context("build llama.cpp")?;
    std::fs::copy(build.join("bin/llama-bench"), target).context("keep llama-bench")?;
    Ok(source)
}
