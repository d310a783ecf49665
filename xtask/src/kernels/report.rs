//! What `ptxas -v` says about the kernels of a file.

use super::manifest::Kernel;
use anyhow::{Context as _, Result};

/// Kernels in the order of the report.
pub(super) fn kernels(text: &str) -> Result<Vec<Kernel>> {
    let mut kernels: Vec<Kernel> = Vec::new();
    for line in text.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            let name = rest.split('\'').next().unwrap_or_default().to_owned();
            kernels.push(Kernel { name, ..Kernel::default() });
        } else if let Some(kernel) = kernels.last_mut() {
            if line.contains("bytes spill stores") {
                kernel.spill_bytes += before(line, " bytes spill stores")?;
                kernel.spill_bytes += before(line, " bytes spill loads")?;
            }
            if line.contains("Used ") {
                kernel.registers = before(line, " registers")?;
                if line.contains(" bytes smem") {
                    kernel.static_bytes = before(line, " bytes smem")?;
                }
            }
        }
    }
    Ok(kernels)
}

/// The number in front of `unit`.
fn before(line: &str, unit: &str) -> Result<u64> {
    let head = line.split(unit).next().unwrap_or_default();
    let number = head.rsplit([' ', ',']).next().unwrap_or_default();
    number.parse().with_context(|| format!("no number before `{unit}` in: {line}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_spills_and_shared_memory_are_read() {
        let text = "ptxas info    : 3072 bytes gmem\n\
            ptxas info    : Compiling entry function 'one' for 'sm_120a'\n\
            ptxas info    : Function properties for one\n    \
            16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads\n\
            ptxas info    : Used 80 registers, used 1 barriers, 16 bytes cumulative stack size, 128 bytes smem\n\
            ptxas info    : Compiling entry function 'two' for 'sm_120a'\n    \
            0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Used 32 registers, used 0 barriers\n";
        let kernels = kernels(text).unwrap();
        let numbers: Vec<_> = kernels
            .iter()
            .map(|k| (k.name.as_str(), k.registers, k.spill_bytes, k.static_bytes))
            .collect();
        assert_eq!(numbers, [("one", 80, 32, 128), ("two", 32, 0, 0)]);
    }

    #[test]
    fn a_report_that_changed_its_form_is_an_error() {
        let text = "Compiling entry function 'a' for\nUsed many registers\n";
        assert!(kernels(text).is_err());
    }
}
