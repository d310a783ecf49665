//! Blocks read from a store by the server's movers, which verify them, beside a plain read of one
//! file of the same size with the same number of threads. Neither is in the page cache.

use crate::flash::Blocks;
use crate::report::Report;
use crate::{Folder, Options, Outcome, median};
use dsv4_server::glue::mover::{Buffer, Job, Mover, Report as Moved, Reports};
use hicache::store::{BlobStore, FileStore, FileStoreConfig};
use hicache::tiers::{MotionId, Outcome as Ended, Store};
use kv_pool::IndexKeyType;
use rustix::fs::{Advice, OFlags, fadvise};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const BLOCKS: u32 = 600;
const QUICK_BLOCKS: u32 = 8;
/// Threads of a store, and motions at a time, as the server has them.
const THREADS: usize = 2;

pub(crate) fn measure(options: &Options, report: &mut Report) -> Outcome<()> {
    let count = if options.is_quick { QUICK_BLOCKS } else { BLOCKS };
    let blocks = Blocks::new(IndexKeyType::Fp8, count)?;
    let folder = Folder::new(&options.dir, "disk")?;
    let (objects, plain) = (folder.0.join("objects"), folder.0.join("plain"));
    let bytes = blocks.object_bytes();
    write(&blocks, &objects, &plain)?;
    println!(
        "{count} objects of {bytes} bytes, {THREADS} threads, {} rounds; page cache emptied before \
         each by fsync and POSIX_FADV_DONTNEED of every file; what lies below is not known to be cold",
        options.rounds
    );
    let total = bytes as f64 * f64::from(count);
    let mut times: [Vec<f64>; 4] = Default::default();
    for _ in 0..options.rounds {
        for (n, times) in times.iter_mut().enumerate() {
            let is_direct = n % 2 == 0;
            forget(&folder.0)?;
            times.push(match n {
                0 | 1 => read_plain(&plain, is_direct, count as usize, bytes)?,
                _ => restore(&blocks, &objects, is_direct)?,
            });
        }
    }
    let [plain_direct, plain_buffered, direct, buffered] =
        times.map(|times| total / median(&times) / 1e9);
    println!("read: direct {plain_direct:.2} GB/s, buffered {plain_buffered:.2} GB/s");
    println!("restore: direct {direct:.2} GB/s, buffered {buffered:.2} GB/s");
    report.say("disk_restore.direct.gb_s", direct, "GB/s");
    report.say("disk_restore.buffered.gb_s", buffered, "GB/s");
    // The way that the server takes for objects of this size.
    report.say("disk_restore.gb_s", direct, "GB/s");
    report.say("disk_read.gb_s", plain_direct.max(plain_buffered), "GB/s");
    report.say_ratio("disk_restore.share_of_read", "disk_restore.gb_s", "disk_read.gb_s");
    report.say("disk_restore.direct_vs_buffered", direct / buffered, "ratio");
    Ok(())
}

fn open(blocks: &Blocks, dir: &Path, direct: bool) -> Outcome<FileStore> {
    let (dir, layout) = (dir.to_path_buf(), blocks.layout.clone());
    let fingerprint = blocks.fingerprint;
    Ok(FileStore::open(FileStoreConfig { dir, fingerprint, layout, direct })?)
}

/// Writes all objects to a store, and the same bytes to one file.
fn write(blocks: &Blocks, objects: &Path, plain: &Path) -> Outcome<()> {
    let store = open(blocks, objects, true)?;
    let file = File::create(plain)?;
    let mut buffer = Buffer::new(blocks.object_bytes());
    for (number, (_, key)) in blocks.blocks.iter().enumerate() {
        blocks.save(number, buffer.as_mut_slice())?;
        store.write(key, buffer.as_slice())?;
        file.write_all_at(buffer.as_slice(), (number * blocks.object_bytes()) as u64)?;
    }
    if !store.is_direct() {
        println!("this file system refuses direct IO: both ways are buffered");
    }
    Ok(())
}

/// Takes every file below a folder out of the page cache.
pub(crate) fn forget(dir: &Path) -> Outcome<()> {
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            forget(&path)?;
        } else {
            let file = File::open(&path)?;
            file.sync_all()?;
            fadvise(&file, 0, None, Advice::DontNeed)?;
        }
    }
    Ok(())
}

/// Seconds for the whole file, whose pieces the threads take in order.
fn read_plain(path: &Path, is_direct: bool, count: usize, bytes: usize) -> Outcome<f64> {
    let mut options = OpenOptions::new();
    if is_direct {
        options.custom_flags(OFlags::DIRECT.bits().cast_signed());
    }
    let opened = options.read(true).open(path);
    let file = if is_direct { opened.or_else(|_| File::open(path))? } else { opened? };
    let next = AtomicUsize::new(0);
    let mut buffers: Vec<Buffer> = (0..THREADS).map(|_| Buffer::new(bytes)).collect();
    let begin = Instant::now();
    let work = |buffer: &mut Buffer| -> std::io::Result<()> {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                return Ok(());
            }
            file.read_exact_at(buffer.as_mut_slice(), (number * bytes) as u64)?;
        }
    };
    let work = &work;
    std::thread::scope(|scope| {
        let run = |buffer| scope.spawn(move || work(buffer));
        let threads: Vec<_> = buffers.iter_mut().map(run).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("it does not panic"))
    })?;
    Ok(begin.elapsed().as_secs_f64())
}

/// Seconds for all objects through the server's movers.
fn restore(blocks: &Blocks, dir: &Path, is_direct: bool) -> Outcome<f64> {
    let store: Arc<dyn BlobStore> = Arc::new(open(blocks, dir, is_direct)?);
    let (send, reports) = channel();
    let report: Reports = Arc::new(move |moved| send.send(moved).expect("the bench listens"));
    let mover = Mover::start(blocks.memory.clone(), [Some((store, THREADS)), None], &report)?;
    let buffers = (0..THREADS).map(|_| Buffer::new(blocks.object_bytes())).collect();
    let begin = Instant::now();
    read_all(blocks, &mover, &reports, buffers)?;
    let took = begin.elapsed().as_secs_f64();
    mover.stop(Duration::from_secs(5));
    Ok(took)
}

fn read_all(
    blocks: &Blocks,
    mover: &Mover,
    reports: &Receiver<Moved>,
    buffers: Vec<Buffer>,
) -> Outcome<()> {
    let mut free = buffers;
    let mut under_way = 0;
    for (number, &(_, key)) in blocks.blocks.iter().enumerate() {
        if free.is_empty() {
            free.push(finished(reports)?);
            under_way -= 1;
        }
        let buffer = free.pop().expect("one was free or came back");
        mover.begin(MotionId(number as u64), Some(Store::Disk), Job::Read { key, buffer });
        under_way += 1;
    }
    for _ in 0..under_way {
        finished(reports)?;
    }
    Ok(())
}

fn finished(reports: &Receiver<Moved>) -> Outcome<Buffer> {
    let Moved { outcome, filled, .. } = reports.recv()?;
    match filled {
        Some(buffer) if outcome == Ended::Done => Ok(buffer),
        _ => Err(format!("an object was not read: {outcome:?}").into()),
    }
}
