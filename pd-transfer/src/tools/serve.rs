//! The side that has pages: waits for `measure` and offers what it asks for.

use super::pages::{FIRST, PAGE_BYTES_MAX, PAGES_MAX, Request, fill};
use super::{Kind, ToolError, driver_config};
use crate::driver::{Driver, DriverError, DriverGone, DriverHandle, Verifier};
use crate::endpoint::Upcall;
use crate::get::Digest;
use crate::page_hash::{PageHash, Plain};
use crate::receiver::Verify;
use crate::shm::SharedRegion;
use crate::transport::{RegionOwner, TransportFactory};
use crate::wire::{AttemptId, FinalRecord, Item, Role, code};
use crossbeam_channel::{Receiver, bounded};
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};

/// Smallest and largest memory to serve from.
const BYTES: (u64, u64) = (1 << 20, 1 << 40);
/// Requests that may wait; one more is rejected.
const WAITING_MAX: usize = 64;
/// Page sizes whose digests are kept.
const SIZES_MAX: usize = 64;

/// What to serve.
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// Over what.
    pub kind: Kind,
    /// Where to wait for peers.
    pub listen: String,
    /// Memory to serve from, 1 MiB to 1 TiB.
    pub bytes: u64,
}

/// Pages being served, until this is dropped.
#[derive(Debug)]
pub struct Server {
    handle: DriverHandle,
    worker: Option<JoinHandle<()>>,
}

impl Server {
    /// Where it listens, as peers have to name it.
    #[must_use]
    pub fn address(&self) -> &str {
        self.handle.listen_address().unwrap_or_default()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The driver's end is the end of the requests, and with them of the worker.
        self.handle.shutdown();
        if let Some(worker) = self.worker.take() {
            // Its panic was reported by its thread.
            let _ = worker.join();
        }
    }
}

/// A prefill side reads nothing, so nothing of it is checked here.
struct NoReads;

impl Verifier for NoReads {
    fn hash(&self) -> Box<dyn PageHash> {
        Box::new(Plain)
    }

    fn verify(&self, _: &Verify, _: Option<Digest>) -> bool {
        false
    }
}

/// Fills memory with known bytes and serves it.
///
/// # Errors
/// The memory is not there, or the address or transport can't be used.
pub fn serve(config: &ServeConfig, factory: TransportFactory) -> Result<Server, ToolError> {
    config.kind.check_address(&config.listen)?;
    let (least, most) = BYTES;
    if !(least..=most).contains(&config.bytes) {
        let text = format!("{} bytes to serve from, {least} to {most} make sense", config.bytes);
        return Err(ToolError::Config(text));
    }
    let memory: Arc<dyn RegionOwner> =
        SharedRegion::new((config.bytes + FIRST) as usize).map_err(DriverError::Transport)?;
    fill(&*memory).map_err(|error| ToolError::Config(error.to_string()))?;
    let mut driver = driver_config(Role::Prefill, &memory)?;
    driver.listen = Some(config.listen.clone());
    let (send, requests) = bounded(WAITING_MAX);
    let own = Arc::new(OnceLock::<DriverHandle>::new());
    let answers = Arc::clone(&own);
    let upcalls = move |upcall| {
        if let Upcall::Requested { attempt, request, .. } = upcall
            && send.try_send((attempt, request)).is_err()
        {
            let text = format!("{WAITING_MAX} requests wait, no more fit");
            // It is the driver's own thread that calls.
            let _ = answers.wait().reject(attempt, code::BUSY, &text);
        }
    };
    let handle = Driver::spawn(driver, factory, Arc::new(NoReads), Arc::new(upcalls))?;
    own.get_or_init(|| handle.clone());
    let driver = handle.clone();
    let work = move || {
        // An error means that the driver has ended.
        let _ = answer(&memory, &driver, &requests);
    };
    let mut server = Server { handle, worker: None };
    let worker = thread::Builder::new().name(String::from("pd-link")).spawn(work);
    server.worker =
        Some(worker.map_err(|source| ToolError::Io { during: "start thread", source })?);
    Ok(server)
}

fn answer(
    memory: &Arc<dyn RegionOwner>,
    handle: &DriverHandle,
    requests: &Receiver<(AttemptId, Vec<u8>)>,
) -> Result<(), DriverGone> {
    let mut ready: BTreeMap<(u32, u32), Vec<Item>> = BTreeMap::new();
    for (attempt, request) in requests {
        let Some(request) = Request::decode(&request) else {
            handle.reject(attempt, code::UPPER, "not a request of pd-link")?;
            continue;
        };
        let Request { page_bytes, pages } = request;
        let is_shaped =
            (1..=PAGE_BYTES_MAX).contains(&page_bytes) && (1..=PAGES_MAX).contains(&pages);
        if !is_shaped || FIRST + request.bytes() > memory.len() {
            let text = format!(
                "{pages} pages of {page_bytes} bytes do not fit into {} bytes, or are more than \
                 {PAGES_MAX} or larger than {PAGE_BYTES_MAX}",
                memory.len() - FIRST
            );
            handle.reject(attempt, code::UPPER, &text)?;
            continue;
        }
        if ready.len() >= SIZES_MAX && !ready.contains_key(&(page_bytes, pages)) {
            ready.clear();
        }
        let items = match ready.get(&(page_bytes, pages)) {
            Some(items) => items.clone(),
            None => match request.items(&**memory) {
                Ok(items) => ready.entry((page_bytes, pages)).or_insert(items).clone(),
                Err(error) => {
                    handle.reject(attempt, code::INTERNAL, &error.to_string())?;
                    continue;
                }
            },
        };
        let record = FinalRecord::new(request.plan_hash(), &items, Vec::new());
        handle.ready(attempt, items)?;
        handle.finish(attempt, record)?;
    }
    Ok(())
}
