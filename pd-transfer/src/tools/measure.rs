//! The side that pulls: transfers of pages of one size after the other, timed and checked.

use super::pages::{Check, FIRST, Mode, PAGE_BYTES_MAX, PAGES_MAX, Request};
use super::report::{Bandwidth, Report, RoundTrip, SizeReport};
use super::{Kind, ToolError, driver_config, random};
use crate::driver::{Driver, DriverError, DriverHandle};
use crate::endpoint::Upcall;
use crate::id::PeerId;
use crate::receiver::{FailReason, Start};
use crate::shm::SharedRegion;
use crate::transport::{RegionOwner, TransportFactory};
use crate::wire::{AttemptId, Role};
use crossbeam_channel::{Receiver, unbounded};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of one transfer, as far as whole pages and their limit allow.
const TRANSFER_BYTES: u64 = 32 << 20;
/// Transfers that are open at once, so that the link does not wait for the next request.
const OPEN: u64 = 2;
/// Most single pages that are timed.
const SAMPLES_MAX: usize = 20_000;
/// Most sizes of one call.
const SIZES_MAX: usize = 32;
/// Without news for this long something is broken.
const PATIENCE: Duration = Duration::from_secs(60);

/// What to measure.
#[derive(Clone, Debug)]
pub struct MeasureConfig {
    /// Over what; as at the other side.
    pub kind: Kind,
    /// Where the other side listens.
    pub connect: String,
    /// Bytes of a page, 1 to 16 MiB each.
    pub sizes: Vec<u32>,
    /// How long each figure is measured.
    pub duration: Duration,
    /// Most gets under way.
    pub in_flight: usize,
    /// How long to wait for an answer.
    pub patience: Duration,
}

enum News {
    Upcall(Upcall),
    /// Some page was wrong, and every page that was asked for has been checked.
    Checked,
}

struct Puller {
    handle: DriverHandle,
    news: Receiver<News>,
    check: Arc<Check>,
    peer: PeerId,
    ids: [u8; 16],
    count: u64,
}

/// A transfer that is open: its slot in the target memory, and since when.
type Open = BTreeMap<AttemptId, (u64, Instant)>;

/// Measures a link to a [`serve`](super::serve()).
///
/// # Errors
/// Nobody answers, the peer is something else, the link breaks, or bytes arrived wrong.
pub fn measure(
    config: &MeasureConfig,
    factory: &dyn Fn() -> TransportFactory,
) -> Result<Report, ToolError> {
    check_config(config)?;
    let largest = config.sizes.iter().copied().map(transfer).map(Request::bytes).max();
    let bytes = OPEN * largest.unwrap_or(0);
    let memory: Arc<dyn RegionOwner> =
        SharedRegion::new(bytes as usize).map_err(DriverError::Transport)?;
    // A driver makes its digests once, so each way has a link of its own.
    let checked = with_link(config, factory(), &memory, Mode::Checked, |puller, request| {
        let verified = puller.bandwidth(request, config.duration)?;
        Ok((request.pages, verified, puller.round_trip(request, config.duration)?))
    })?;
    let copied = with_link(config, factory(), &memory, Mode::Copied, |puller, request| {
        puller.bandwidth(request, config.duration)
    })?;
    let sizes = config.sizes.iter().zip(checked).zip(copied);
    let sizes = sizes.map(|((page_bytes, (transfer_pages, verified, round_trip)), copied)| {
        SizeReport { page_bytes: *page_bytes, transfer_pages, verified, copied, round_trip }
    });
    let (kind, address, in_flight) = (config.kind, config.connect.clone(), config.in_flight);
    Ok(Report { kind, address, in_flight, sizes: sizes.collect() })
}

/// Opens a link and does `work` for each size.
fn with_link<T>(
    config: &MeasureConfig,
    factory: TransportFactory,
    memory: &Arc<dyn RegionOwner>,
    mode: Mode,
    work: impl Fn(&mut Puller, Request) -> Result<T, ToolError>,
) -> Result<Vec<T>, ToolError> {
    let (send, news) = unbounded();
    let report = {
        let send = send.clone();
        // Whoever does not listen has an error already.
        Box::new(move || {
            let _ = send.send(News::Checked);
        })
    };
    let check = Check::new(mode, report);
    let upcalls = Arc::new(move |upcall| {
        let _ = send.send(News::Upcall(upcall));
    });
    let mut driver = driver_config(Role::Decode, memory)?;
    driver.receiver.in_flight_max = config.in_flight;
    let handle = Driver::spawn(driver, factory, Arc::clone(&check) as _, upcalls)?;
    let result = connect(config, &handle, &news).and_then(|(peer, served)| {
        let mut puller =
            Puller { handle: handle.clone(), news, check, peer, ids: random()?, count: 0 };
        config.sizes.iter().map(|size| work(&mut puller, fit(config, *size, served)?)).collect()
    });
    handle.shutdown();
    result
}

fn check_config(config: &MeasureConfig) -> Result<(), ToolError> {
    config.kind.check_address(&config.connect)?;
    let wrong = |text: String| Err(ToolError::Config(text));
    if config.sizes.is_empty() || config.sizes.len() > SIZES_MAX {
        return wrong(format!("{} page sizes, 1 to {SIZES_MAX} can be given", config.sizes.len()));
    }
    if let Some(size) = config.sizes.iter().find(|size| !(1..=PAGE_BYTES_MAX).contains(size)) {
        return wrong(format!("pages of {size} bytes, 1 to {PAGE_BYTES_MAX} can be moved"));
    }
    if config.in_flight == 0 {
        return wrong(String::from("no get may be under way, at least one must"));
    }
    Ok(())
}

/// A transfer of pages of one size: as many as make sense.
fn transfer(page_bytes: u32) -> Request {
    let pages = (TRANSFER_BYTES / u64::from(page_bytes.max(1))).clamp(1, u64::from(PAGES_MAX));
    Request { page_bytes, pages: pages as u32 }
}

/// The same, and no more than the peer has.
fn fit(config: &MeasureConfig, page_bytes: u32, served: u64) -> Result<Request, ToolError> {
    let mut request = transfer(page_bytes);
    let most = served.saturating_sub(FIRST) / u64::from(page_bytes);
    request.pages = request.pages.min(u32::try_from(most).unwrap_or(u32::MAX));
    if request.pages == 0 {
        let address = &config.connect;
        let text = format!("{address} serves {served} bytes, no page of {page_bytes} fits");
        return Err(ToolError::Config(text));
    }
    Ok(request)
}

/// Waits for the link; also returns how many bytes the peer announced.
fn connect(
    config: &MeasureConfig,
    handle: &DriverHandle,
    news: &Receiver<News>,
) -> Result<(PeerId, u64), ToolError> {
    let until = Instant::now() + config.patience;
    let address = config.connect.clone();
    handle.connect(&address)?;
    let mut said = String::new();
    loop {
        match news.recv_deadline(until) {
            Ok(News::Upcall(Upcall::PeerUp { peer, .. })) => {
                let peers = handle.peers();
                let hello = peers.into_iter().find(|known| known.peer == peer);
                let regions = hello.and_then(|known| known.hello).map(|hello| hello.regions);
                let served = regions.and_then(|regions| Some(regions.first()?.bytes));
                return Ok((peer, served.unwrap_or(0)));
            }
            Ok(News::Upcall(Upcall::Refused { reason, text, .. })) => {
                return Err(ToolError::Refused { address, reason, text });
            }
            Ok(News::Upcall(Upcall::Event(text) | Upcall::NotReached { text, .. })) => said = text,
            Ok(_) => {}
            Err(_) => {
                let (kind, seconds) = (config.kind, config.patience.as_secs_f64());
                return Err(ToolError::NoAnswer { address, kind, seconds, said });
            }
        }
    }
}

impl Puller {
    fn bandwidth(&mut self, request: Request, time: Duration) -> Result<Bandwidth, ToolError> {
        // Digests are computed and memory is touched before the clock runs.
        self.pull(request, Duration::ZERO, OPEN)?;
        Ok(self.pull(request, time, OPEN)?.0)
    }

    fn round_trip(&mut self, request: Request, time: Duration) -> Result<RoundTrip, ToolError> {
        let single = Request { pages: 1, ..request };
        self.pull(single, Duration::ZERO, 1)?;
        Ok(RoundTrip::new(self.pull(single, time, 1)?.1))
    }

    /// Transfers for `duration`, at least one, `open_max` at once; the time of each as well.
    fn pull(
        &mut self,
        request: Request,
        duration: Duration,
        open_max: u64,
    ) -> Result<(Bandwidth, Vec<u64>), ToolError> {
        let begin = Instant::now();
        let (mut open, mut times_us, mut pages) = (Open::new(), Vec::new(), 0);
        self.check.restart();
        // Before the first of them can be done.
        self.check.expect(open_max * u64::from(request.pages));
        for slot in 0..open_max {
            self.start(request, slot, &mut open)?;
        }
        while !open.is_empty() {
            let done = self.next_done(request, &mut open)?;
            let Some((slot, since)) = done else { continue };
            pages += u64::from(request.pages);
            if times_us.len() < SAMPLES_MAX {
                times_us.push(u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX));
            }
            if begin.elapsed() < duration {
                self.check.expect(u64::from(request.pages));
                self.start(request, slot, &mut open)?;
            }
        }
        let (bytes, seconds) =
            (pages * u64::from(request.page_bytes), begin.elapsed().as_secs_f64());
        Ok((Bandwidth { pages, bytes, seconds }, times_us))
    }

    fn start(&mut self, request: Request, slot: u64, open: &mut Open) -> Result<(), ToolError> {
        let mut attempt = AttemptId(self.ids);
        let id = u64::from_le_bytes(self.ids[..8].try_into().unwrap_or_default());
        attempt.0[..8].copy_from_slice(&id.wrapping_add(self.count).to_le_bytes());
        self.count += 1;
        open.insert(attempt, (slot, Instant::now()));
        self.handle.start(Start {
            attempt,
            peer: self.peer,
            request: request.encode(),
            have: 0,
            plan_hash: request.plan_hash(),
            plan: request.targets(slot * request.bytes()),
        })?;
        Ok(())
    }

    /// The next transfer that is complete, if the next piece of news is one.
    fn next_done(
        &self,
        request: Request,
        open: &mut Open,
    ) -> Result<Option<(u64, Instant)>, ToolError> {
        let Request { page_bytes, pages } = request;
        let Ok(news) = self.news.recv_timeout(PATIENCE) else {
            return Err(self
                .wrong(page_bytes)
                .unwrap_or(ToolError::Stalled { seconds: PATIENCE.as_secs() }));
        };
        match news {
            News::Upcall(Upcall::Completed { attempt, .. }) => Ok(open.remove(&attempt)),
            // The transfer that asks for fresh pages gets none: every page that is under way is
            // looked at once, then it is over.
            News::Checked => {
                Err(self.wrong(page_bytes).unwrap_or(ToolError::Stalled { seconds: 0 }))
            }
            News::Upcall(Upcall::Failed { why, .. }) => {
                let failed = match why {
                    FailReason::PeerLost => ToolError::Lost(String::from("the peer is gone")),
                    why => ToolError::Transfer { pages, page_bytes, why },
                };
                Err(self.wrong(page_bytes).unwrap_or(failed))
            }
            News::Upcall(Upcall::PeerDown { why, .. }) => Err(ToolError::Lost(why)),
            News::Upcall(_) => Ok(None),
        }
    }

    fn wrong(&self, page_bytes: u32) -> Option<ToolError> {
        let (wrong, checked, first) = self.check.result()?;
        Some(ToolError::Mismatch { page_bytes, wrong, checked, first })
    }
}
