//! Uses one kernel on its own: copies pages to a GPU, digests them there and reads the digests.
//!
//! `cargo xtask kernels build` first; the folder of the compiled kernels may be given as argument.

#![expect(clippy::print_stdout, reason = "an example shows its result")]

use dsa_kernels::cuda::{CudaDevice, CudaKernels, DigestPages, PagePool};
use dsa_kernels::{Device, DeviceError, MemSlice, Place, StreamId};
use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;

const PAGE: u32 = 8448;
const PAGES: u32 = 4;

fn main() -> Result<(), Box<dyn Error>> {
    let device = match CudaDevice::open(0) {
        Ok(device) => Arc::new(device),
        Err(DeviceError::NoDriver { what }) => {
            println!("no GPU to show this on: {what}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let folder = std::env::args().nth(1).map_or_else(|| "target/kernels".into(), PathBuf::from);
    let kernels = CudaKernels::load(Arc::clone(&device), &folder)?;

    let pages = device.alloc(Place::Device, u64::from(PAGES * PAGE))?;
    let bytes: Vec<u8> = (0..PAGES * PAGE).map(|i| (i * 131 + (i >> 8) * 17) as u8).collect();
    pages.write(0, &bytes)?;
    let out = MemSlice {
        mem: device.alloc(Place::Device, u64::from(16 * PAGES))?,
        offset: 0,
        len: u64::from(16 * PAGES),
    };
    let stream = StreamId(0);
    kernels.digest_pages(
        stream,
        &DigestPages {
            pool: PagePool { mem: &pages, base: 0, stride: u64::from(PAGE) },
            page_bytes: PAGE,
            index: None,
            count: PAGES,
            out: &out,
            refused: None,
        },
    )?;
    device.wait(stream)?;
    let mut digests = vec![0; 16 * PAGES as usize];
    out.mem.read(0, &mut digests)?;
    for (n, digest) in digests.chunks(16).enumerate() {
        println!("page {n}: {}", digest.iter().map(|b| format!("{b:02x}")).collect::<String>());
    }
    Ok(())
}
