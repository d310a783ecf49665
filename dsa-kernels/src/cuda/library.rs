//! [`CudaKernels`]: compiled kernels, loaded for one device.

use super::abi::{self, Arguments};
use super::device::CudaDevice;
use super::driver::{Function, Launch, Module};
use super::manifest::{KernelInfo, Manifest};
use crate::device::StreamId;
use crate::error::{DeviceError, KernelError};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why kernels could not be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LibraryError {
    /// No kernels are compiled for a card.
    #[error("no kernels for compute capability {major}.{minor}; there are for 9.0, 10.0 and 12.0")]
    Card {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// A file that can't be read.
    #[error("read {}: {source}", path.display())]
    Read {
        /// File.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A manifest that is damaged or of another version.
    #[error("manifest of the kernels is wrong in line {line}")]
    Manifest {
        /// Line from 1, 0 if something is missing.
        line: usize,
    },
    /// A manifest for another card.
    #[error("kernels are for {found}, {want} expected")]
    Arch {
        /// Expected.
        want: &'static str,
        /// Found.
        found: String,
    },
    /// Kernels compiled with another header of argument structs.
    #[error("kernels were compiled with argument structs {found:016x}, {want:016x} expected")]
    Abi {
        /// Hash of our header.
        want: u64,
        /// Hash of theirs.
        found: u64,
    },
    /// A cubin whose bytes are not those that were written.
    #[error("{file} is not the file that the manifest describes")]
    Damaged {
        /// Name.
        file: String,
    },
    /// The driver refused it.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// The operations of the index and sparse-attention path on one GPU.
///
/// Each is enqueued on a stream after its arguments were checked. Memory that an argument names
/// must stay as it is until the work has finished; the memory itself is kept: the device frees
/// nothing before it is idle.
#[derive(Debug)]
pub struct CudaKernels {
    device: Arc<CudaDevice>,
    functions: BTreeMap<String, Function>,
    infos: Vec<KernelInfo>,
    /// Owners of the functions.
    _modules: Vec<Module>,
}

fn arch_of(compute: (u32, u32)) -> Result<&'static str, LibraryError> {
    match compute {
        (9, 0) => Ok("sm_90a"),
        (10, 0) => Ok("sm_100a"),
        (12, 0) => Ok("sm_120a"),
        (major, minor) => Err(LibraryError::Card { major, minor }),
    }
}

fn read(path: PathBuf) -> Result<Vec<u8>, LibraryError> {
    std::fs::read(&path).map_err(|source| LibraryError::Read { path, source })
}

fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

impl CudaKernels {
    /// Loads the kernels for `device` from `folder`, which has a folder for each card generation
    /// (`target/kernels` after `cargo xtask kernels build`).
    ///
    /// # Errors
    /// [`LibraryError`]; nothing stays loaded.
    pub fn load(device: Arc<CudaDevice>, folder: &Path) -> Result<Self, LibraryError> {
        let arch = arch_of(device.compute())?;
        let folder = folder.join(arch);
        let text = read(folder.join("manifest.txt"))?;
        let manifest = Manifest::parse(&String::from_utf8_lossy(&text))?;
        if manifest.arch != arch {
            return Err(LibraryError::Arch { want: arch, found: manifest.arch });
        }
        let (want, found) = (abi::hash(), manifest.abi);
        if want != found {
            return Err(LibraryError::Abi { want, found });
        }
        let (mut modules, mut functions) = (Vec::new(), BTreeMap::new());
        for (file, bytes) in &manifest.files {
            let cubin = read(folder.join(file))?;
            if hash(&cubin) != *bytes {
                return Err(LibraryError::Damaged { file: file.clone() });
            }
            let module = device.gpu().module(&cubin)?;
            for kernel in manifest.kernels.iter().filter(|kernel| kernel.file == *file) {
                let function = module.function(&kernel.name, kernel.dynamic_bytes)?;
                functions.insert(kernel.name.clone(), function);
            }
            modules.push(module);
        }
        Ok(Self { device, functions, infos: manifest.kernels, _modules: modules })
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    /// Resources of the loaded kernels.
    #[must_use]
    pub fn infos(&self) -> &[KernelInfo] {
        &self.infos
    }

    /// Enqueues a kernel; an empty grid is nothing to do.
    pub(super) fn launch<T: Arguments>(
        &self,
        s: StreamId,
        name: &'static str,
        launch: &Launch,
        arguments: &T,
    ) -> Result<(), KernelError> {
        let function = self.functions.get(name).ok_or(KernelError::NoKernel { name })?;
        let stream = self.device.stream(s)?;
        if launch.grid.contains(&0) {
            return Ok(());
        }
        Ok(stream.launch(function, launch, arguments)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_generation_has_its_folder() {
        assert_eq!(arch_of((9, 0)).unwrap(), "sm_90a");
        assert_eq!(arch_of((12, 0)).unwrap(), "sm_120a");
        let error = arch_of((8, 9)).unwrap_err().to_string();
        assert!(error.contains("8.9"), "{error}");
    }

    #[test]
    fn the_hash_is_that_of_the_header() {
        assert_eq!(hash(include_bytes!("../../kernels/abi.h")), abi::hash());
    }
}
