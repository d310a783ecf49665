//! The manifest of the compiled kernels of one card: what the loader in dsa-kernels reads.

use std::fmt;

/// Resources of one kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Kernel {
    /// Entry point.
    pub(super) name: String,
    /// Registers of a thread.
    pub(super) registers: u64,
    /// Shared memory fixed at compile time.
    pub(super) static_bytes: u64,
    /// Shared memory that a launch must ask for: the constant `NAME_shared` of the source.
    pub(super) dynamic_bytes: u64,
    /// Stores and loads of spilled registers.
    pub(super) spill_bytes: u64,
}

/// One cubin.
#[derive(Clone, Debug)]
pub(super) struct File {
    /// Name in the folder of the manifest.
    pub(super) name: String,
    /// Hash of source, headers, flags and compiler version.
    pub(super) source: u64,
    /// Hash of the cubin.
    pub(super) bytes: u64,
    /// Its kernels.
    pub(super) kernels: Vec<Kernel>,
}

/// All cubins of a card.
#[derive(Clone, Debug)]
pub(super) struct Manifest {
    /// Card generation.
    pub(super) arch: String,
    /// Hash of the header with the argument structs.
    pub(super) abi: u64,
    /// In the order of names.
    pub(super) files: Vec<File>,
}

impl Manifest {
    /// All kernels.
    pub(super) fn kernels(&self) -> impl Iterator<Item = &Kernel> {
        self.files.iter().flat_map(|file| &file.kernels)
    }

    /// Kernels that spill or ask for more shared memory than the card has.
    pub(super) fn findings(&self, shared_bytes_max: u64) -> Vec<String> {
        let mut findings = Vec::new();
        for kernel in self.kernels() {
            let shared = kernel.static_bytes + kernel.dynamic_bytes;
            if kernel.spill_bytes > 0 {
                let bytes = kernel.spill_bytes;
                findings.push(format!("{} spills {bytes} bytes on {}", kernel.name, self.arch));
            }
            if shared > shared_bytes_max {
                findings.push(format!(
                    "{} has {shared} bytes of shared memory on {}, {shared_bytes_max} may",
                    kernel.name, self.arch
                ));
            }
        }
        findings
    }
}

impl fmt::Display for Manifest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "dsa-kernels 1")?;
        writeln!(f, "arch {}", self.arch)?;
        writeln!(f, "abi {:016x}", self.abi)?;
        for file in &self.files {
            writeln!(f, "file {} {:016x} {:016x}", file.name, file.source, file.bytes)?;
            for k in &file.kernels {
                writeln!(
                    f,
                    "kernel {} {} {} {} {}",
                    k.name, k.registers, k.static_bytes, k.dynamic_bytes, k.spill_bytes
                )?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spills_and_too_much_shared_memory_are_found() {
        let kernel = |name: &str, spill_bytes, dynamic_bytes| Kernel {
            name: name.into(),
            registers: 32,
            static_bytes: 1024,
            dynamic_bytes,
            spill_bytes,
        };
        let kernels = vec![kernel("good", 0, 100_352), kernel("bad", 4, 100_353)];
        let file = File { name: "a.cubin".into(), source: 1, bytes: 2, kernels };
        let manifest = Manifest { arch: "sm_120a".into(), abi: 3, files: vec![file] };
        let findings = manifest.findings(101_376);
        assert_eq!(findings.len(), 2, "{findings:?}");
        assert!(findings.iter().all(|finding| finding.starts_with("bad ")));
        assert!(manifest.to_string().contains("\nkernel bad 32 1024 100353 4\n"));
    }
}
