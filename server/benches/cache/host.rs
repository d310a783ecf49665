//! Blocks between host memory and device pages, digested on the way, beside a plain copy of as many
//! bytes between the same memory in the same order.

use crate::flash::Blocks;
use crate::report::Report;
use crate::{Options, Outcome, median};
use dsv4_server::glue::mover::Buffer;
use hicache::store::format::Header;
use kv_pool::IndexKeyType;
use std::time::Instant;

/// Blocks of each type: more than the caches hold, on both sides.
const BLOCKS: u32 = 600;
const QUICK_BLOCKS: u32 = 8;

/// Median rates, GB/s.
struct Rates {
    load: f64,
    copy_in: f64,
    save: f64,
    copy_out: f64,
}

pub(crate) fn measure(options: &Options, report: &mut Report) -> Outcome<()> {
    let count = if options.is_quick { QUICK_BLOCKS } else { BLOCKS };
    let mut all = Vec::new();
    for index in [IndexKeyType::Fp8, IndexKeyType::Bf16] {
        let rates = rates(index, count, options.rounds)?;
        let Rates { load, copy_in, save, copy_out } = rates;
        println!(
            "{index}: load {load:.2} GB/s beside {copy_in:.2}, save {save:.2} beside {copy_out:.2}"
        );
        report.say(&format!("host_restore.{index}.gb_s"), load, "GB/s");
        report.say(&format!("host_save.{index}.gb_s"), save, "GB/s");
        all.push(rates);
    }
    let least = |share: fn(&Rates) -> f64| all.iter().map(share).fold(f64::INFINITY, f64::min);
    report.say("host_restore.share_of_memcpy", least(|r| r.load / r.copy_in), "ratio");
    report.say("host_save.share_of_memcpy", least(|r| r.save / r.copy_out), "ratio");
    report.say("memcpy.gb_s", all[0].copy_in, "GB/s");
    Ok(())
}

fn rates(index: IndexKeyType, count: u32, rounds: usize) -> Outcome<Rates> {
    let blocks = Blocks::new(index, count)?;
    let (bytes, page) = (blocks.row_bytes(), blocks.page_bytes());
    println!(
        "{index}: {count} blocks of {page} bytes, {bytes} without padding, one thread, {rounds} rounds"
    );
    let mut buffers: Vec<Buffer> = (0..count).map(|_| Buffer::new(blocks.object_bytes())).collect();
    let payload = Header::header_bytes(blocks.sections());
    let payload = payload..payload + bytes;
    // A plain copy has a block in one piece on either side.
    let place = |number: usize| u64::from(blocks.blocks[number].0.index) * page;
    let mut times: [Vec<f64>; 4] = Default::default();
    for round in 0..=rounds {
        // What is saved is what is loaded; the plain copies leave other bytes behind, so that each
        // comes before the one that it is compared with.
        let copy_out = timed(&mut buffers, |number, buffer| {
            Ok(blocks.mem().read(place(number), &mut buffer.as_mut_slice()[payload.clone()])?)
        })?;
        let save =
            timed(&mut buffers, |number, buffer| blocks.save(number, buffer.as_mut_slice()))?;
        let copy_in = timed(&mut buffers, |number, buffer| {
            Ok(blocks.mem().write(place(number), &buffer.as_slice()[payload.clone()])?)
        })?;
        let load = timed(&mut buffers, |number, buffer| blocks.load(number, buffer.as_slice()))?;
        if round > 0 {
            for (times, time) in times.iter_mut().zip([load, copy_in, save, copy_out]) {
                times.push(time);
            }
        }
    }
    let total = bytes as f64 * f64::from(count);
    let [load, copy_in, save, copy_out] = times.map(|times| total / median(&times) / 1e9);
    Ok(Rates { load, copy_in, save, copy_out })
}

/// Seconds for all blocks.
fn timed(
    buffers: &mut [Buffer],
    mut work: impl FnMut(usize, &mut Buffer) -> Outcome<()>,
) -> Outcome<f64> {
    let begin = Instant::now();
    for (number, buffer) in buffers.iter_mut().enumerate() {
        work(number, buffer)?;
    }
    Ok(begin.elapsed().as_secs_f64())
}
