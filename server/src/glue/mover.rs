//! Movers: threads that copy objects between device pages, host memory and stores.
//!
//! A motion owns what it writes. The buffer of a slot that is filled is moved into the job and comes
//! back with the report; a buffer that is read is shared for as long as jobs read it, and is never
//! written then. So the compiler sees to it that no two motions meet in a slot.

use super::objects::{ObjectError, ObjectMemory, ObjectPages, Sealed};
use crossbeam_channel::{Receiver, Sender, bounded, select_biased};
use hicache::ObjectKey;
use hicache::store::{BlobStore, StoreError};
use hicache::tiers::{MotionId, Outcome, Slot, Store};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Memory of one object, aligned for direct IO.
pub struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).finish_non_exhaustive()
    }
}

/// What direct IO wants of an address.
const ALIGN: usize = 4096;

impl Buffer {
    /// Memory that is there from now on: no page of it is missing later.
    #[must_use]
    pub fn new(len: usize) -> Self {
        let mut bytes = vec![0; len + ALIGN];
        // The system gives a page when it is written first.
        bytes.iter_mut().step_by(ALIGN).for_each(|byte| *byte = 1);
        let start = bytes.as_ptr().align_offset(ALIGN).min(ALIGN);
        Self { bytes, start, len }
    }

    /// The object.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }

    /// The object, to be written.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

/// What is in a slot.
#[derive(Debug)]
enum Place {
    /// Nothing of use.
    Idle(Buffer),
    /// An object.
    Held(Arc<Buffer>),
    /// A motion has it.
    Away,
}

/// The host tier's memory: one buffer a slot, all of it allocated at the start.
#[derive(Debug)]
pub struct HostMemory {
    places: [Vec<Place>; 2],
}

impl HostMemory {
    /// Buffers for so many objects of each part, of these lengths, in the order of [`hicache::Part::ALL`].
    #[must_use]
    pub fn new(counts: [u32; 2], bytes: [u64; 2]) -> Self {
        let places = |n: usize| {
            let buffer = |_| Place::Idle(Buffer::new(bytes[n] as usize));
            (0..counts[n]).map(buffer).collect()
        };
        Self { places: [places(0), places(1)] }
    }

    fn place(&mut self, slot: Slot) -> &mut Place {
        &mut self.places[slot.part.position()][slot.index as usize]
    }

    /// Takes the buffer of a slot that is to be filled.
    ///
    /// # Panics
    /// If a motion has it: the tiers promise that none does.
    pub fn take(&mut self, slot: Slot) -> Buffer {
        match std::mem::replace(self.place(slot), Place::Away) {
            Place::Idle(buffer) => buffer,
            Place::Held(buffer) => Arc::into_inner(buffer).expect("nobody reads a slot that goes"),
            Place::Away => panic!("{slot:?} is in motion"),
        }
    }

    /// Shares the buffer of a slot that is to be read.
    ///
    /// # Panics
    /// If it holds no object: the tiers promise that it does.
    pub fn share(&mut self, slot: Slot) -> Arc<Buffer> {
        match self.place(slot) {
            Place::Held(buffer) => Arc::clone(buffer),
            Place::Idle(_) | Place::Away => panic!("{slot:?} holds no object"),
        }
    }

    /// The object in a slot, for a look that ends before anything moves; none if it holds no object.
    #[must_use]
    pub fn peek(&self, slot: Slot) -> Option<&[u8]> {
        match &self.places[slot.part.position()][slot.index as usize] {
            Place::Held(buffer) => Some(buffer.as_slice()),
            Place::Idle(_) | Place::Away => None,
        }
    }

    /// Puts a buffer back; with `good` it holds an object.
    pub fn put(&mut self, slot: Slot, buffer: Buffer, good: bool) {
        *self.place(slot) = if good { Place::Held(Arc::new(buffer)) } else { Place::Idle(buffer) };
    }
}

/// One motion.
#[derive(Debug)]
pub enum Job {
    /// Device pages to host memory.
    Save {
        /// Which object.
        key: ObjectKey,
        /// Blocks of the prefix that it ends.
        blocks: u32,
        /// Where from.
        pages: ObjectPages,
        /// What these were when they were sealed.
        sealed: Sealed,
        /// Where to.
        buffer: Buffer,
    },
    /// Host memory to device pages, checked.
    Load {
        /// Which object.
        key: ObjectKey,
        /// Blocks of the prefix that it ends.
        blocks: u32,
        /// Where to.
        pages: ObjectPages,
        /// Where from.
        buffer: Arc<Buffer>,
    },
    /// A store to host memory, checked.
    Read {
        /// Which object.
        key: ObjectKey,
        /// Where to.
        buffer: Buffer,
    },
    /// Host memory to a store.
    Write {
        /// Which object.
        key: ObjectKey,
        /// Where from.
        buffer: Arc<Buffer>,
    },
    /// Out of a store.
    Remove {
        /// Which object.
        key: ObjectKey,
    },
    /// Whether a store has it.
    Probe {
        /// Which object.
        key: ObjectKey,
    },
}

/// A motion has ended.
#[derive(Debug)]
pub struct Report {
    /// Which.
    pub motion: MotionId,
    /// How.
    pub outcome: Outcome,
    /// The buffer that was filled.
    pub filled: Option<Buffer>,
    /// The buffer that was read; letting it go says that nobody reads it any more.
    pub read: Option<Arc<Buffer>>,
    /// Digests of the device pages that were filled.
    pub sealed: Sealed,
    /// The device page that was to be saved and has changed since it was sealed.
    pub changed: Option<ObjectError>,
    /// How long it took, microseconds.
    pub took_us: u64,
}

/// Where reports go.
pub type Reports = Arc<dyn Fn(Report) + Send + Sync>;

type Queue = Sender<(MotionId, Job)>;

/// Threads of one worker's cache.
#[derive(Debug)]
pub struct Mover {
    loads: Queue,
    saves: Queue,
    stores: [Option<Queue>; 2],
    threads: Vec<JoinHandle<()>>,
}

/// Most jobs of a queue: as many motions as the tiers may have under way.
const QUEUE_MAX: usize = 1 << 16;

impl Mover {
    /// Starts the threads: one for copies, and as many for each store as stand beside it.
    ///
    /// # Errors
    /// The system's, if there can be no more threads.
    pub fn start(
        memory: ObjectMemory,
        stores: [Option<(Arc<dyn BlobStore>, usize)>; 2],
        reports: &Reports,
    ) -> std::io::Result<Self> {
        let mut threads = Vec::new();
        let (loads, load_queue) = bounded(QUEUE_MAX);
        let (saves, save_queue) = bounded(QUEUE_MAX);
        let (to, mem) = (Arc::clone(reports), memory.clone());
        let copier = move || copies(&load_queue, &save_queue, &mem, &to);
        threads.push(std::thread::Builder::new().name("cache-copy".to_owned()).spawn(copier)?);
        let mut queues = [None, None];
        for (queue, store) in queues.iter_mut().zip(stores) {
            let Some((store, store_threads)) = store else { continue };
            let (sender, jobs) = bounded(QUEUE_MAX);
            *queue = Some(sender);
            for _ in 0..store_threads {
                let (to, mem) = (Arc::clone(reports), memory.clone());
                let (store, jobs) = (Arc::clone(&store), jobs.clone());
                let name = format!("cache-{}", store.name());
                let run = move || serve(&*store, &jobs, &mem, &to);
                threads.push(std::thread::Builder::new().name(name).spawn(run)?);
            }
        }
        Ok(Self { loads, saves, stores: queues, threads })
    }

    /// Begins a motion that `store` says nothing about, or one of a store.
    pub fn begin(&self, motion: MotionId, store: Option<Store>, job: Job) {
        let queue = match (&job, store) {
            (Job::Load { .. }, _) => &self.loads,
            (Job::Save { .. }, _) => &self.saves,
            (_, Some(store)) => self.stores[store as usize].as_ref().expect("there is this store"),
            (_, None) => panic!("a motion of a store names it"),
        };
        queue.send((motion, job)).expect("movers end after the worker");
    }

    /// Ends the threads when their jobs are done, and leaves those alone that are not within
    /// `patience`: a disk or a server may never answer. What they move is theirs.
    pub fn stop(self, patience: Duration) {
        let Self { loads, saves, stores, threads } = self;
        drop((loads, saves, stores));
        let clock = crate::clock::Clock::start();
        for thread in threads {
            while !thread.is_finished() && clock.elapsed() < patience {
                std::thread::sleep(Duration::from_millis(1));
            }
            if !thread.is_finished() {
                let name = thread.thread().name().unwrap_or_default();
                tracing::warn!(name, "a thread of the cache still waits for its store");
            } else if thread.join().is_err() {
                tracing::error!("a thread of the cache panicked");
            }
        }
    }
}

/// Copies until nobody asks any more; somebody waits for what is loaded, nobody for what is saved.
fn copies(
    loads: &Receiver<(MotionId, Job)>,
    saves: &Receiver<(MotionId, Job)>,
    memory: &ObjectMemory,
    reports: &Reports,
) {
    loop {
        let job = select_biased! {
            recv(loads) -> job => job,
            recv(saves) -> job => job,
        };
        // Both queues end together.
        let Ok((motion, job)) = job.or_else(|_| loads.recv()).or_else(|_| saves.recv()) else {
            return;
        };
        reports(run(motion, job, None, memory));
    }
}

fn serve(
    store: &dyn BlobStore,
    jobs: &Receiver<(MotionId, Job)>,
    memory: &ObjectMemory,
    reports: &Reports,
) {
    while let Ok((motion, job)) = jobs.recv() {
        reports(run(motion, job, Some(store), memory));
    }
}

fn run(motion: MotionId, job: Job, store: Option<&dyn BlobStore>, memory: &ObjectMemory) -> Report {
    let clock = crate::clock::Clock::start();
    let (mut made, mut changed) = (Sealed::new(), None);
    let (outcome, filled, read) = match job {
        Job::Save { key, blocks, pages, sealed, mut buffer } => {
            let outcome = match memory.save(&pages, key, blocks, &sealed, buffer.as_mut_slice()) {
                Ok(()) => Outcome::Done,
                // The worker, whose page it is, tells of it.
                Err(error @ ObjectError::Changed { .. }) => {
                    changed = Some(error);
                    Outcome::Failed
                }
                Err(error) => {
                    tracing::error!(%key, %error, "an object could not be saved to host memory");
                    Outcome::Failed
                }
            };
            (outcome, Some(buffer), None)
        }
        Job::Load { key, blocks, pages, buffer } => {
            let result = memory.load(buffer.as_slice(), key, blocks, &pages);
            let outcome = result.map_or_else(
                |error| {
                    tracing::warn!(
                        %key, %error, tier = "host",
                        "an object of the cache is not what was saved; it is given up and the \
                         tokens are computed again; if it happens again, test this machine's memory"
                    );
                    Outcome::Mismatch
                },
                |sealed| {
                    made = sealed;
                    Outcome::Done
                },
            );
            (outcome, None, Some(buffer))
        }
        Job::Read { key, mut buffer } => {
            let outcome = store
                .map_or(Outcome::Failed, |store| read(store, key, buffer.as_mut_slice(), memory));
            (outcome, Some(buffer), None)
        }
        Job::Write { key, buffer } => {
            let outcome = store.map_or(Outcome::Failed, |store| {
                outcome_of(store, "write", store.write(&key, buffer.as_slice()))
            });
            (outcome, None, Some(buffer))
        }
        Job::Remove { key } => {
            let outcome = store
                .map_or(Outcome::Failed, |store| outcome_of(store, "remove", store.remove(&key)));
            (outcome, None, None)
        }
        Job::Probe { key } => {
            let outcome = store.map_or(Outcome::Failed, |store| look_for(store, key, memory));
            (outcome, None, None)
        }
    };
    let took_us = clock.elapsed().as_micros().try_into().unwrap_or(u64::MAX);
    Report { motion, outcome, filled, read, sealed: made, changed, took_us }
}

fn read(store: &dyn BlobStore, key: ObjectKey, into: &mut [u8], memory: &ObjectMemory) -> Outcome {
    let outcome = match store.read(&key, into) {
        // Another length is other bytes.
        Err(error @ (StoreError::Length { .. } | StoreError::NotPlain { .. })) => {
            tracing::warn!(%key, %error, tier = store.name(), "an object of the cache is damaged");
            return Outcome::Mismatch;
        }
        result => outcome_of(store, "read", result),
    };
    if outcome != Outcome::Done {
        return outcome;
    }
    if let Err(error) = memory.verify(into, key) {
        tracing::warn!(
            %key, %error, tier = store.name(),
            "an object of the cache is not what was saved; it is given up and the tokens are \
             computed again; if it happens again, test this store"
        );
        return Outcome::Mismatch;
    }
    // So that the order of use survives a restart; that it does not is no reason to miss.
    if let Err(error) = store.touch(&key) {
        tracing::debug!(%key, %error, tier = store.name(), "a use could not be noted");
    }
    Outcome::Done
}

fn look_for(store: &dyn BlobStore, key: ObjectKey, memory: &ObjectMemory) -> Outcome {
    let wanted = memory.bytes_of(key.part);
    match store.size(&key) {
        Ok(None) => Outcome::Missing,
        Ok(Some(found)) if found != wanted => {
            let error = StoreError::Length { key, found, wanted };
            tracing::warn!(%key, %error, tier = store.name(), "an object of the cache is damaged");
            Outcome::Mismatch
        }
        found => outcome_of(store, "look for", found.map(drop)),
    }
}

fn outcome_of(store: &dyn BlobStore, what: &str, result: Result<(), StoreError>) -> Outcome {
    let error = match result {
        Ok(()) => return Outcome::Done,
        Err(StoreError::Missing { .. }) => return Outcome::Missing,
        Err(error) => error,
    };
    tracing::warn!(tier = store.name(), %error, "the cache could not {what} an object");
    match error {
        StoreError::NoSpace { .. } => Outcome::NoSpace,
        _ => Outcome::Failed,
    }
}
