//! A UCX context with one worker, its mapped memory and endpoints, as one owner that keeps UCX's
//! rules: used by one thread, memory mapped until no request can touch it, keys and endpoints
//! released in order. Everything above is safe code.
#![expect(unsafe_code, reason = "calls UCX and copies what it hands out")]

use super::UcxError;
use super::sys::{self, Api, Begun, CStruct as _, Context, Ep, Mem, Rkey, Status, Worker};
use crate::transport::RegionOwner;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

thread_local! {
    /// Requests of this thread's worker that have completed, from the callback.
    static COMPLETED: RefCell<Vec<(*mut c_void, Status, usize)>> = const { RefCell::new(Vec::new()) };
    /// Endpoints of this thread's worker that are broken, from the callback.
    static BROKEN: RefCell<Vec<(u64, Status)>> = const { RefCell::new(Vec::new()) };
    /// Whether this thread has a worker; two would mix up their completions.
    static IS_TAKEN: Cell<bool> = const { Cell::new(false) };
}

extern "C" fn on_completed(request: *mut c_void, status: Status, user_data: *mut c_void) {
    COMPLETED.with_borrow_mut(|all| all.push((request, status, user_data.addr())));
}

extern "C" fn on_broken(argument: *mut c_void, _: *mut Ep, status: Status) {
    BROKEN.with_borrow_mut(|all| all.push((argument.addr() as u64, status)));
}

/// A region of a peer, as it says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RemoteRegion {
    pub(super) base: u64,
    pub(super) bytes: u64,
    pub(super) rkey: Vec<u8>,
}

/// What happened while the worker made progress.
#[derive(Debug)]
pub(super) enum Event {
    /// A get ended: its token, and the error if there was one.
    Got { token: usize, error: Option<String> },
    /// An endpoint broke; its requests end by themselves. It still has to be closed.
    Broken { endpoint: u64, error: String },
    /// An endpoint is closed, and none of its requests is under way.
    Closed { endpoint: u64 },
}

/// Why a get was not begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NotBegun {
    /// It is not possible as asked; the endpoint is none the worse.
    Refused(String),
    /// The endpoint is broken or gone.
    Broken(String),
}

#[derive(Debug)]
struct Mapped {
    memory: Arc<dyn RegionOwner>,
    handle: *mut Mem,
}

#[derive(Debug)]
struct Endpoint {
    /// Null once closing has begun.
    ep: *mut Ep,
    regions: Vec<(RemoteRegion, *mut Rkey)>,
    /// Gets and the close request that have not completed.
    open: usize,
}

/// What a request in UCX belongs to; its index is the request's user data.
#[derive(Clone, Copy, Debug)]
enum Flight {
    Free,
    Get { endpoint: u64, token: usize },
    Close { endpoint: u64 },
}

/// See the module text. The raw pointers keep it on the thread that made it.
#[derive(Debug)]
pub(super) struct Ucp {
    api: &'static Api,
    context: *mut Context,
    worker: *mut Worker,
    event_fd: i32,
    mapped: Vec<Mapped>,
    endpoints: BTreeMap<u64, Endpoint>,
    flights: Vec<Flight>,
    free_flights: Vec<usize>,
    /// Endpoints whose last request has completed after closing began.
    closed: Vec<u64>,
}

/// The address of a worker, copied.
///
/// # Safety
/// The worker is not destroyed and belongs to this thread.
pub(super) unsafe fn worker_address(api: &Api, worker: *mut Worker) -> Result<Vec<u8>, UcxError> {
    let (mut address, mut bytes) = (ptr::null_mut(), 0);
    // SAFETY: the caller vouches for the worker.
    let status = unsafe { (api.ucp_worker_get_address)(worker, &mut address, &mut bytes) };
    api.check("ucp_worker_get_address", status)?;
    // SAFETY: UCX has just returned `bytes` bytes at `address`, which nobody else knows.
    let copy = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), bytes) }.to_vec();
    // SAFETY: returned by the call above, released once.
    unsafe { (api.ucp_worker_release_address)(worker, address) };
    Ok(copy)
}

/// The key that peers need for mapped memory, copied.
///
/// # Safety
/// The memory is mapped in the context.
pub(super) unsafe fn pack_key(
    api: &Api,
    context: *mut Context,
    memory: *mut Mem,
) -> Result<Vec<u8>, UcxError> {
    let (mut key, mut bytes) = (ptr::null_mut(), 0);
    // SAFETY: the caller vouches for the memory.
    let status = unsafe { (api.ucp_rkey_pack)(context, memory, &mut key, &mut bytes) };
    api.check("ucp_rkey_pack", status)?;
    // SAFETY: UCX has just returned `bytes` bytes at `key`, which nobody else knows.
    let copy = unsafe { std::slice::from_raw_parts(key.cast::<u8>(), bytes) }.to_vec();
    // SAFETY: returned by the call above, released once.
    unsafe { (api.ucp_rkey_buffer_release)(key) };
    Ok(copy)
}

fn create_context(api: &Api) -> Result<*mut Context, UcxError> {
    let params = sys::Params {
        field_mask: sys::PARAM_FEATURES,
        features: sys::FEATURE_RMA | sys::FEATURE_WAKEUP,
        ..sys::Params::NONE
    };
    let (mut context, (major, minor)) = (ptr::null_mut(), sys::API);
    // SAFETY: `params` has the full size of the C struct and its mask names the fields that are
    // set; without a configuration UCX reads its own from the environment.
    let status =
        unsafe { (api.ucp_init_version)(major, minor, &params, ptr::null(), &mut context) };
    api.check("ucp_init_version", status)?;
    Ok(context)
}

fn create_worker(api: &Api, context: *mut Context) -> Result<(*mut Worker, i32), UcxError> {
    let params = sys::WorkerParams {
        field_mask: sys::WORKER_THREAD_MODE,
        thread_mode: sys::THREAD_MODE_SINGLE,
        ..sys::WorkerParams::NONE
    };
    let mut worker = ptr::null_mut();
    // SAFETY: `context` was just made by this thread; `params` as in `create_context`.
    let status = unsafe { (api.ucp_worker_create)(context, &params, &mut worker) };
    api.check("ucp_worker_create", status)?;
    let mut event_fd = -1;
    // SAFETY: `worker` was just made; the descriptor is written and stays the worker's.
    let status = unsafe { (api.ucp_worker_get_efd)(worker, &mut event_fd) };
    if let Err(error) = api.check("ucp_worker_get_efd", status) {
        // SAFETY: nothing else knows of the worker.
        unsafe { (api.ucp_worker_destroy)(worker) };
        return Err(error);
    }
    Ok((worker, event_fd))
}

impl Ucp {
    /// A worker for this thread, which has none yet.
    pub(super) fn new(api: &'static Api) -> Result<Self, UcxError> {
        if IS_TAKEN.replace(true) {
            return Err(UcxError::Call {
                function: "ucp_worker_create",
                text: String::from("this thread has a worker already"),
            });
        }
        let made = create_context(api).and_then(|context| {
            let worker = create_worker(api, context).inspect_err(|_| {
                // SAFETY: the context was just made and has no worker.
                unsafe { (api.ucp_cleanup)(context) };
            });
            worker.map(|(worker, event_fd)| (context, worker, event_fd))
        });
        let (context, worker, event_fd) = made.inspect_err(|_| IS_TAKEN.set(false))?;
        Ok(Self {
            api,
            context,
            worker,
            event_fd,
            mapped: Vec::new(),
            endpoints: BTreeMap::new(),
            flights: Vec::new(),
            free_flights: Vec::new(),
            closed: Vec::new(),
        })
    }

    /// The address that peers make endpoints from.
    pub(super) fn address(&self) -> Result<Vec<u8>, UcxError> {
        // SAFETY: the worker lives as long as `self`.
        unsafe { worker_address(self.api, self.worker) }
    }

    /// Maps memory for local and remote reads and local writes; returns the key that peers
    /// need. Mapped memory is numbered from 0.
    pub(super) fn map(&mut self, memory: Arc<dyn RegionOwner>) -> Result<Vec<u8>, UcxError> {
        let params = sys::MemMapParams {
            field_mask: sys::MAP_ADDRESS | sys::MAP_LENGTH | sys::MAP_PROT | sys::MAP_MEMORY_TYPE,
            address: memory.base().cast(),
            bytes: usize::try_from(memory.len()).unwrap_or(usize::MAX),
            prot: sys::PROT_LOCAL_READ | sys::PROT_LOCAL_WRITE | sys::PROT_REMOTE_READ,
            memory_type: sys::MEMORY_TYPE_HOST,
            ..sys::MemMapParams::NONE
        };
        let mut handle = ptr::null_mut();
        // SAFETY: the range is mapped, readable and writable while `memory` lives (contract of
        // `RegionOwner`), and `memory` is kept until it was unmapped.
        let status = unsafe { (self.api.ucp_mem_map)(self.context, &params, &mut handle) };
        self.api.check("ucp_mem_map", status)?;
        self.mapped.push(Mapped { memory, handle });
        // SAFETY: `handle` was just mapped.
        unsafe { pack_key(self.api, self.context, handle) }
    }

    /// Makes an endpoint named `name`, which no other has. `address` and the keys are what the
    /// peer's UCX of the same version has packed: UCX reads them without a length.
    pub(super) fn connect(
        &mut self,
        name: u64,
        address: &[u8],
        regions: Vec<RemoteRegion>,
    ) -> Result<(), UcxError> {
        let params = sys::EpParams {
            field_mask: sys::EP_REMOTE_ADDRESS | sys::EP_ERR_MODE | sys::EP_ERR_HANDLER,
            address: address.as_ptr().cast(),
            err_mode: sys::ERR_MODE_PEER,
            err_handler: sys::ErrorHandler {
                callback: Some(on_broken),
                argument: ptr::without_provenance_mut(name as usize),
            },
            ..sys::EpParams::NONE
        };
        let mut ep = ptr::null_mut();
        // SAFETY: `params` has the full C size; the address lives during the call and was packed by
        // a UCX of this version (checked by the caller's greeting, with a hash over the bytes).
        let status = unsafe { (self.api.ucp_ep_create)(self.worker, &params, &mut ep) };
        self.api.check("ucp_ep_create", status)?;
        let mut endpoint = Endpoint { ep, regions: Vec::new(), open: 0 };
        let mut unpacked = Ok(());
        for region in regions {
            let mut rkey = ptr::null_mut();
            // SAFETY: `ep` was just made, and the key was packed by a UCX of this version as above.
            let status = unsafe {
                (self.api.ucp_ep_rkey_unpack)(ep, region.rkey.as_ptr().cast(), &mut rkey)
            };
            unpacked = self.api.check("ucp_ep_rkey_unpack", status);
            if unpacked.is_err() {
                break;
            }
            endpoint.regions.push((region, rkey));
        }
        self.endpoints.insert(name, endpoint);
        if unpacked.is_err() {
            self.close(name);
        }
        unpacked
    }

    fn take_flight(&mut self, flight: Flight) -> usize {
        match self.free_flights.pop() {
            Some(index) => {
                self.flights[index] = flight;
                index
            }
            None => {
                self.flights.push(flight);
                self.flights.len() - 1
            }
        }
    }

    fn free_flight(&mut self, index: usize) -> Flight {
        let flight = std::mem::replace(&mut self.flights[index], Flight::Free);
        self.free_flights.push(index);
        flight
    }

    /// Bytes of a peer's region.
    pub(super) fn remote_bytes(&self, endpoint: u64, region: usize) -> Option<u64> {
        self.endpoints.get(&endpoint)?.regions.get(region).map(|(remote, _)| remote.bytes)
    }

    /// Begins to copy `bytes` from a peer's region to a mapped one. True if it is done already,
    /// otherwise [`Event::Got`] follows with the token.
    pub(super) fn get(
        &mut self,
        endpoint: u64,
        (region, source): (usize, u64),
        (mapped, target): (usize, u64),
        bytes: u64,
        token: usize,
    ) -> Result<bool, NotBegun> {
        let refused = |text: &str| NotBegun::Refused(String::from(text));
        let Some(end) = self.endpoints.get(&endpoint).filter(|end| !end.ep.is_null()) else {
            return Err(NotBegun::Broken(String::from("the endpoint is closed")));
        };
        let Some((remote, rkey)) = end.regions.get(region) else {
            return Err(refused("no such region"));
        };
        let inside =
            |offset: u64, len: u64| offset.checked_add(bytes).is_some_and(|end| end <= len);
        let Some(local) = self.mapped.get(mapped) else { return Err(refused("not mapped")) };
        if !inside(source, remote.bytes) || !inside(target, local.memory.len()) {
            return Err(NotBegun::Refused(format!(
                "{bytes} bytes at {source} are outside a region of {} bytes",
                remote.bytes
            )));
        }
        let (ep, rkey, memh) = (end.ep, *rkey, local.handle);
        // The casts keep their values: both ranges were checked against lengths in memory.
        let (address, count) = (local.memory.base().wrapping_add(target as usize), bytes as usize);
        let remote = remote.base + source;
        let index = self.take_flight(Flight::Get { endpoint, token });
        let param = sys::RequestParam {
            op_attr_mask: sys::OP_CALLBACK | sys::OP_USER_DATA | sys::OP_MEMH,
            user_data: ptr::without_provenance_mut(index),
            memh,
            callback: Some(on_completed),
            ..sys::RequestParam::NONE
        };
        // SAFETY: the target range lies inside mapped memory (checked above) that is kept until
        // every request has completed (`drop`), and that nobody holds a reference into while a get
        // may write it (contract of `RegionOwner`). `ep` and `rkey` are released only after
        // their last request. A remote range that the peer lied about is an error from UCX.
        let begun =
            unsafe { (self.api.ucp_get_nbx)(ep, address.cast(), count, remote, rkey, &param) };
        match Begun::from_pointer(begun) {
            Begun::Done => {
                self.free_flight(index);
                Ok(true)
            }
            Begun::Failed(status) => {
                self.free_flight(index);
                Err(self.not_begun(status))
            }
            Begun::Request(_) => {
                if let Some(end) = self.endpoints.get_mut(&endpoint) {
                    end.open += 1;
                }
                Ok(false)
            }
        }
    }

    /// `UCS_ERR_NO_MEMORY`, `_INVALID_PARAM` and `_UNSUPPORTED` are about the call alone.
    fn not_begun(&self, status: Status) -> NotBegun {
        let text = format!("ucp_get_nbx: {}", self.api.describe(status));
        match status {
            Status(-4 | -5 | -22) => NotBegun::Refused(text),
            _ => NotBegun::Broken(text),
        }
    }

    /// Begins to close an endpoint by force: its gets end with an error, then [`Event::Closed`]
    /// follows. False if there is no such endpoint.
    pub(super) fn close(&mut self, name: u64) -> bool {
        let Some(end) = self.endpoints.get_mut(&name) else { return false };
        let ep = std::mem::replace(&mut end.ep, ptr::null_mut());
        if ep.is_null() {
            return true;
        }
        end.open += 1;
        let index = self.take_flight(Flight::Close { endpoint: name });
        let param = sys::RequestParam {
            op_attr_mask: sys::OP_CALLBACK | sys::OP_USER_DATA | sys::OP_FLAGS,
            flags: sys::CLOSE_FORCE,
            user_data: ptr::without_provenance_mut(index),
            callback: Some(on_completed),
            ..sys::RequestParam::NONE
        };
        // SAFETY: `ep` is not null, so it was not closed before; nothing uses it from now on.
        let begun = unsafe { (self.api.ucp_ep_close_nbx)(ep, &param) };
        if !matches!(Begun::from_pointer(begun), Begun::Request(_)) {
            // Done at once, or an error, after which there is nothing left to wait for but the gets.
            self.settle(index);
        }
        true
    }

    /// A request has completed; returns the token if it was a get.
    fn settle(&mut self, index: usize) -> Option<usize> {
        let (endpoint, token) = match self.free_flight(index) {
            Flight::Get { endpoint, token } => (endpoint, Some(token)),
            Flight::Close { endpoint } => (endpoint, None),
            Flight::Free => return None,
        };
        if let Some(end) = self.endpoints.get_mut(&endpoint) {
            end.open -= 1;
            if end.open == 0 && end.ep.is_null() {
                self.closed.push(endpoint);
            }
        }
        token
    }

    /// Lets UCX work; appends what happened. True if anything did.
    pub(super) fn progress(&mut self, events: &mut Vec<Event>) -> bool {
        let before = events.len();
        // SAFETY: called on the worker's only thread. The callbacks that it runs touch only
        // thread-local lists, which are not borrowed here.
        let moved = unsafe { (self.api.ucp_worker_progress)(self.worker) };
        for (request, status, index) in COMPLETED.take() {
            // SAFETY: a request that has completed and was not freed before; nothing else knows it.
            unsafe { (self.api.ucp_request_free)(request) };
            let error = (status.0 < 0).then(|| self.api.describe(status));
            if let Some(token) = self.settle(index) {
                events.push(Event::Got { token, error });
            }
        }
        for (endpoint, status) in BROKEN.take() {
            if self.endpoints.get(&endpoint).is_some_and(|end| !end.ep.is_null()) {
                events.push(Event::Broken { endpoint, error: self.api.describe(status) });
            }
        }
        for endpoint in std::mem::take(&mut self.closed) {
            self.release_keys(endpoint);
            events.push(Event::Closed { endpoint });
        }
        moved > 0 || events.len() > before
    }

    fn release_keys(&mut self, name: u64) {
        let Some(end) = self.endpoints.remove(&name) else { return };
        for (_, rkey) in end.regions {
            // SAFETY: the endpoint is closed and its last request has completed, so no request
            // uses the key; it is released once.
            unsafe { (self.api.ucp_rkey_destroy)(rkey) };
        }
    }

    /// Sleeps until UCX has something to do, `wake` is readable or the time is over.
    pub(super) fn wait(&self, wake: BorrowedFd<'_>, most: Duration) {
        // SAFETY: called on the worker's only thread.
        let status = unsafe { (self.api.ucp_worker_arm)(self.worker) };
        // `UCS_ERR_BUSY`: there are events to progress first.
        if status == Status(-15) {
            return;
        }
        // SAFETY: the descriptor is the worker's and stays open while it lives.
        let events = unsafe { BorrowedFd::borrow_raw(self.event_fd) };
        let mut fds =
            [PollFd::from_borrowed_fd(wake, PollFlags::IN), PollFd::new(&events, PollFlags::IN)];
        // What can't be armed wakes nobody, and is looked at again soon.
        let most = if status == Status(0) { most } else { most.min(Duration::from_millis(1)) };
        let most = Timespec {
            tv_sec: i64::try_from(most.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: most.subsec_nanos().into(),
        };
        // An interrupted wait is as good as a short one.
        let _ = poll(&mut fds, Some(&most));
    }
}

impl Drop for Ucp {
    fn drop(&mut self) {
        let names: Vec<u64> = self.endpoints.keys().copied().collect();
        for name in names {
            self.close(name);
        }
        // Memory is unmapped only when no request can write it any more.
        let mut events = Vec::new();
        while !self.endpoints.is_empty() {
            self.progress(&mut events);
            events.clear();
        }
        for mapped in self.mapped.drain(..) {
            // SAFETY: mapped in `map`, unmapped once; no request is under way. The status only
            // says that the handle is wrong, which it is not.
            let _ = unsafe { (self.api.ucp_mem_unmap)(self.context, mapped.handle) };
        }
        // SAFETY: made in `new`, destroyed once, without endpoints or requests of ours.
        unsafe { (self.api.ucp_worker_destroy)(self.worker) };
        // SAFETY: made in `new`, its only worker is destroyed.
        unsafe { (self.api.ucp_cleanup)(self.context) };
        COMPLETED.take();
        BROKEN.take();
        IS_TAKEN.set(false);
    }
}
