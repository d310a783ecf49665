//! A plain loop of UCX's gets: one context, one worker, one endpoint, one post per item, no guard
//! words and no checks. What the transport is measured against; nothing else uses it.
#![expect(unsafe_code, reason = "calls UCX, with nothing between")]

use super::UcxError;
use super::hello::Card;
use super::raw::{RemoteRegion, pack_key, worker_address};
use super::sys::{self, Api, Begun, CStruct as _, Context, Ep, Mem, Rkey, Status, Worker};
use crate::transport::RegionOwner;
use crate::wire::Extent;
use std::cell::Cell;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest wait for an endpoint to close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// What UCX does when the peer is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerLoss {
    /// Its gets end with an error, as the transport needs it; fewer ways to move bytes can do that.
    Reported,
    /// Its gets never end.
    Unnoticed,
}

/// Counts of requests, written by the callback; UCX holds its address.
#[derive(Debug)]
struct Flights {
    api: &'static Api,
    open: Cell<usize>,
    error: Cell<Option<Status>>,
}

extern "C" fn on_done(request: *mut c_void, status: Status, user_data: *mut c_void) {
    // SAFETY: every request is given the address of the `Flights` of its `PlainGets`, which is boxed
    // and lives until the worker is destroyed; only shared references to it exist.
    let flights = unsafe { &*user_data.cast::<Flights>() };
    // SAFETY: UCX allows the release of a request in its callback, and nobody else has it.
    unsafe { (flights.api.ucp_request_free)(request) };
    flights.open.set(flights.open.get() - 1);
    if status != Status(0) {
        flights.error.set(Some(status));
    }
}

extern "C" fn on_broken(_: *mut c_void, _: *mut Ep, _: Status) {}

#[derive(Debug)]
struct Remote {
    ep: *mut Ep,
    rkey: *mut Rkey,
    region: RemoteRegion,
}

/// One side of the loop, with one region of memory. The raw pointers keep it on one thread.
#[derive(Debug)]
pub struct PlainGets {
    flights: Box<Flights>,
    context: *mut Context,
    worker: *mut Worker,
    memory: Arc<dyn RegionOwner>,
    handle: *mut Mem,
    remote: Option<Remote>,
    loss: PeerLoss,
}

impl PlainGets {
    /// Opens UCX and maps `memory`.
    ///
    /// # Errors
    /// There is no library, or UCX refuses.
    pub fn new(memory: Arc<dyn RegionOwner>, loss: PeerLoss) -> Result<Self, UcxError> {
        let api = Api::open()?;
        let flights = Box::new(Flights { api, open: Cell::new(0), error: Cell::new(None) });
        let (context, worker, handle) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        // What is not made yet is null, and `drop` leaves it out.
        let mut made = Self { flights, context, worker, memory, handle, remote: None, loss };
        let params = sys::Params {
            field_mask: sys::PARAM_FEATURES,
            features: sys::FEATURE_RMA,
            ..sys::Params::NONE
        };
        let ((major, minor), context) = (sys::API, &mut made.context);
        // SAFETY: `params` has the full size of the C struct and its mask names what is set.
        let status = unsafe { (api.ucp_init_version)(major, minor, &params, ptr::null(), context) };
        api.check("ucp_init_version", status)?;
        let params = sys::WorkerParams {
            field_mask: sys::WORKER_THREAD_MODE,
            thread_mode: sys::THREAD_MODE_SINGLE,
            ..sys::WorkerParams::NONE
        };
        // SAFETY: the context was just made by this thread; `params` as above.
        let status = unsafe { (api.ucp_worker_create)(made.context, &params, &mut made.worker) };
        api.check("ucp_worker_create", status)?;
        made.map()?;
        Ok(made)
    }

    fn map(&mut self) -> Result<(), UcxError> {
        let api = self.flights.api;
        let params = sys::MemMapParams {
            field_mask: sys::MAP_ADDRESS | sys::MAP_LENGTH | sys::MAP_PROT | sys::MAP_MEMORY_TYPE,
            address: self.memory.base().cast(),
            bytes: usize::try_from(self.memory.len()).unwrap_or(usize::MAX),
            prot: sys::PROT_LOCAL_READ | sys::PROT_LOCAL_WRITE | sys::PROT_REMOTE_READ,
            memory_type: sys::MEMORY_TYPE_HOST,
            ..sys::MemMapParams::NONE
        };
        // SAFETY: the range is mapped, readable and writable while `memory` lives (contract of
        // `RegionOwner`), and `memory` is kept until it was unmapped.
        let status = unsafe { (api.ucp_mem_map)(self.context, &params, &mut self.handle) };
        api.check("ucp_mem_map", status)
    }

    /// What the other side connects with.
    ///
    /// # Errors
    /// UCX refuses.
    pub fn card(&self) -> Result<Vec<u8>, UcxError> {
        let api = self.flights.api;
        // SAFETY: the worker lives as long as `self`.
        let address = unsafe { worker_address(api, self.worker) }?;
        // SAFETY: mapped in `new`.
        let rkey = unsafe { pack_key(api, self.context, self.handle) }?;
        let (base, bytes) = (self.memory.base().addr() as u64, self.memory.len());
        let regions = vec![RemoteRegion { base, bytes, rkey }];
        Ok(Card { address, regions }.encode())
    }

    /// Makes the endpoint to the side that has said `card`; once.
    ///
    /// # Errors
    /// The bytes are no card, or UCX refuses.
    pub fn connect(&mut self, card: &[u8]) -> Result<(), UcxError> {
        let bad = |text: String| UcxError::Call { function: "read card", text };
        let mut card = Card::decode(card).map_err(|why| bad(why.to_string()))?;
        let region = card.regions.pop().ok_or_else(|| bad(String::from("no region")))?;
        let mut field_mask = sys::EP_REMOTE_ADDRESS;
        if self.loss == PeerLoss::Reported {
            field_mask |= sys::EP_ERR_MODE | sys::EP_ERR_HANDLER;
        }
        let params = sys::EpParams {
            field_mask,
            address: card.address.as_ptr().cast(),
            err_mode: sys::ERR_MODE_PEER,
            err_handler: sys::ErrorHandler { callback: Some(on_broken), argument: ptr::null_mut() },
            ..sys::EpParams::NONE
        };
        let (api, mut ep, mut rkey) = (self.flights.api, ptr::null_mut(), ptr::null_mut());
        // SAFETY: `params` has the full C size; the address lives during the call and was packed by
        // the UCX of a process of this program (the hash of the card was checked).
        let status = unsafe { (api.ucp_ep_create)(self.worker, &params, &mut ep) };
        api.check("ucp_ep_create", status)?;
        // SAFETY: `ep` was just made, and the key was packed with the address above.
        let status =
            unsafe { (api.ucp_ep_rkey_unpack)(ep, region.rkey.as_ptr().cast(), &mut rkey) };
        self.remote = Some(Remote { ep, rkey, region });
        api.check("ucp_ep_rkey_unpack", status)
    }

    /// Lets UCX work for the other side.
    pub fn progress(&self) {
        // SAFETY: called on the worker's only thread; the callbacks touch only `flights`.
        unsafe { (self.flights.api.ucp_worker_progress)(self.worker) };
    }

    /// Copies ranges of the other side's region to the same places of ours, `outstanding` at a time.
    ///
    /// # Errors
    /// There is no endpoint, a range is outside of a region, or UCX says no.
    pub fn get_all(&self, ranges: &[Extent], outstanding: usize) -> Result<(), UcxError> {
        let failed = |text: String| UcxError::Call { function: "ucp_get_nbx", text };
        let (api, flights) = (self.flights.api, &*self.flights);
        let remote = self.remote.as_ref().ok_or_else(|| failed(String::from("not connected")))?;
        let least = self.memory.len().min(remote.region.bytes);
        let inside = |range: &Extent| {
            range.offset.checked_add(range.len.into()).is_some_and(|end| end <= least)
        };
        if let Some(range) = ranges.iter().find(|range| !inside(range)) {
            return Err(failed(format!("{range:?} is outside of {least} bytes")));
        }
        let param = sys::RequestParam {
            op_attr_mask: sys::OP_CALLBACK | sys::OP_USER_DATA | sys::OP_MEMH,
            callback: Some(on_done),
            user_data: ptr::from_ref(flights).cast_mut().cast(),
            memh: self.handle,
            ..sys::RequestParam::NONE
        };
        for range in ranges {
            while flights.open.get() >= outstanding.max(1) {
                self.progress();
            }
            let target = self.memory.base().wrapping_add(range.offset as usize).cast();
            let (source, bytes) = (remote.region.base + range.offset, range.len as usize);
            // SAFETY: the target lies inside mapped memory (checked above), which is kept until no
            // request is open, and nobody holds a reference into it (contract of `RegionOwner`).
            let begun =
                unsafe { (api.ucp_get_nbx)(remote.ep, target, bytes, source, remote.rkey, &param) };
            match Begun::from_pointer(begun) {
                Begun::Done => {}
                Begun::Failed(status) => flights.error.set(Some(status)),
                Begun::Request(_) => flights.open.set(flights.open.get() + 1),
            }
        }
        while flights.open.get() > 0 {
            self.progress();
        }
        flights.error.take().map_or(Ok(()), |status| Err(failed(api.describe(status))))
    }

    /// Closes the endpoint; gives up where the other side does not answer.
    fn close(&mut self) {
        let Some(Remote { ep, rkey, .. }) = self.remote.take() else { return };
        let api = self.flights.api;
        if !rkey.is_null() {
            // SAFETY: no request is open after `get_all`, so none uses the key; released once.
            unsafe { (api.ucp_rkey_destroy)(rkey) };
        }
        let is_forced = self.loss == PeerLoss::Reported;
        let param = sys::RequestParam {
            op_attr_mask: sys::OP_CALLBACK | sys::OP_USER_DATA | sys::OP_FLAGS,
            flags: if is_forced { sys::CLOSE_FORCE } else { 0 },
            callback: Some(on_done),
            user_data: ptr::from_ref(&*self.flights).cast_mut().cast(),
            ..sys::RequestParam::NONE
        };
        // SAFETY: the endpoint was not closed before; nothing uses it from now on.
        let begun = unsafe { (api.ucp_ep_close_nbx)(ep, &param) };
        if let Begun::Request(_) = Begun::from_pointer(begun) {
            self.flights.open.set(self.flights.open.get() + 1);
        }
        let begin = Instant::now();
        while self.flights.open.get() > 0 && begin.elapsed() < CLOSE_TIMEOUT {
            self.progress();
        }
    }
}

impl Drop for PlainGets {
    fn drop(&mut self) {
        self.close();
        let api = self.flights.api;
        if !self.handle.is_null() {
            // SAFETY: mapped in `new`, unmapped once; no get is open.
            let _ = unsafe { (api.ucp_mem_unmap)(self.context, self.handle) };
        }
        if !self.worker.is_null() {
            // SAFETY: made in `new`, destroyed once.
            unsafe { (api.ucp_worker_destroy)(self.worker) };
        }
        if !self.context.is_null() {
            // SAFETY: made in `new`, its only worker is destroyed.
            unsafe { (api.ucp_cleanup)(self.context) };
        }
    }
}
