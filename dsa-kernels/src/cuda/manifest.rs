//! The manifest beside compiled kernels: text, one entry a line, written by
//! `cargo xtask kernels build`.

use super::library::LibraryError;

/// Resources of one kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelInfo {
    /// Entry point.
    pub name: String,
    /// File that holds it, in the folder of the manifest.
    pub file: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Shared memory fixed at compile time, in bytes.
    pub static_bytes: u32,
    /// Shared memory that each launch asks for, in bytes.
    pub dynamic_bytes: u32,
    /// Bytes of spilled registers.
    pub spill_bytes: u32,
}

/// What a folder of compiled kernels holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// Card generation, as in `sm_90a`.
    pub arch: String,
    /// Hash of the header with the argument structs.
    pub abi: u64,
    /// Files with the hash of their bytes.
    pub files: Vec<(String, u64)>,
    /// All kernels.
    pub kernels: Vec<KernelInfo>,
}

impl Manifest {
    /// Reads a manifest.
    ///
    /// # Errors
    /// [`LibraryError::Manifest`] with the number of the line that is wrong.
    pub fn parse(text: &str) -> Result<Self, LibraryError> {
        let mut manifest =
            Self { arch: String::new(), abi: 0, files: Vec::new(), kernels: Vec::new() };
        for (n, line) in text.lines().enumerate() {
            let words: Vec<&str> = line.split(' ').collect();
            manifest.line(n, &words).ok_or(LibraryError::Manifest { line: n + 1 })?;
        }
        let has_all = !manifest.arch.is_empty() && manifest.abi != 0;
        has_all.then_some(manifest).ok_or(LibraryError::Manifest { line: 0 })
    }

    fn line(&mut self, n: usize, words: &[&str]) -> Option<()> {
        let hash = |word: &str| u64::from_str_radix(word, 16).ok();
        match (n, words) {
            (0, ["dsa-kernels", "1"]) => {}
            (1.., ["arch", arch]) => self.arch = (*arch).to_owned(),
            (1.., ["abi", abi]) => self.abi = hash(abi)?,
            (1.., ["file", name, _, bytes]) => {
                // A name, not a path: nothing outside of the folder is loaded.
                if name.contains(['/', '\\']) || name.starts_with('.') {
                    return None;
                }
                self.files.push(((*name).to_owned(), hash(bytes)?));
            }
            (1.., ["kernel", name, registers, fixed, dynamic, spills]) => {
                self.kernels.push(KernelInfo {
                    name: (*name).to_owned(),
                    file: self.files.last()?.0.clone(),
                    registers: registers.parse().ok()?,
                    static_bytes: fixed.parse().ok()?,
                    dynamic_bytes: dynamic.parse().ok()?,
                    spill_bytes: spills.parse().ok()?,
                });
            }
            _ => return None,
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "dsa-kernels 1\narch sm_90a\nabi 00000000000000ff\n\
        file pages.cubin 0000000000000001 0000000000000002\nkernel page_move 32 0 64 0\n";

    #[test]
    fn a_manifest_is_read() {
        let manifest = Manifest::parse(TEXT).unwrap();
        assert_eq!((manifest.arch.as_str(), manifest.abi), ("sm_90a", 255));
        assert_eq!(manifest.files, [("pages.cubin".to_owned(), 2)]);
        let kernel = &manifest.kernels[0];
        assert_eq!((kernel.name.as_str(), kernel.dynamic_bytes), ("page_move", 64));
        assert_eq!(kernel.file, "pages.cubin");
    }

    #[test]
    fn damaged_manifests_name_the_line() {
        let line = |text: &str| match Manifest::parse(text) {
            Err(LibraryError::Manifest { line }) => line,
            other => panic!("{other:?}"),
        };
        assert_eq!(line(""), 0);
        assert_eq!(line("dsa-kernels 2\n"), 1);
        assert_eq!(line(&TEXT.replace("64 0", "64")), 5);
        assert_eq!(line(&TEXT.replace("pages.cubin", "../pages.cubin")), 4);
        assert_eq!(line(&TEXT.replace("00ff", "00fg")), 3);
        assert_eq!(
            line(&TEXT.replace("file pages.cubin 0000000000000001 0000000000000002\n", "")),
            4
        );
    }
}
