//! What the tests of drivers share: a prefill and a decode side with their news.

use pd_transfer::copy::read;
use pd_transfer::driver::{Driver, DriverConfig, DriverHandle, UpcallSink, Verifier};
use pd_transfer::endpoint::Upcall;
use pd_transfer::id::PeerId;
use pd_transfer::receiver::{FailReason, Start, Target};
use pd_transfer::sender::SenderConfig;
use pd_transfer::shm::SharedRegion;
use pd_transfer::testing::conformance::PATIENCE;
use pd_transfer::testing::pages::{
    PageServer, PageVerifier, Request, Trusting, number, page_bytes, targets,
};
use pd_transfer::transport::{RegionOwner, TransportFactory};
use pd_transfer::wire::{AttemptId, FinalRecord, Fingerprint, Incarnation, Key, RegionId, Role};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

static INCARNATIONS: AtomicU8 = AtomicU8::new(1);

pub(super) fn attempt(n: u8) -> AttemptId {
    AttemptId([n; 16])
}

pub(super) fn layout() -> ([u8; 16], &'static str) {
    ([7; 16], "test pages")
}

/// One driver and its news. News that a test did not wait for yet is kept.
pub(super) struct Side {
    pub(super) handle: DriverHandle,
    news: Receiver<Upcall>,
    kept: Vec<Upcall>,
    memory: Arc<dyn RegionOwner>,
    peer: Option<PeerId>,
    plans: BTreeMap<AttemptId, Vec<Target>>,
}

/// A prefill side that serves pages.
pub(super) struct Prefill {
    pub(super) side: Mutex<Side>,
    pub(super) server: PageServer,
    address: String,
}

impl Prefill {
    pub(super) fn new(factory: TransportFactory, address: &str, sender: SenderConfig) -> Self {
        let memory: Arc<dyn RegionOwner> = SharedRegion::new(64 << 20).unwrap();
        let server = PageServer::new(Arc::clone(&memory), 7);
        let (send, news) = channel();
        let upcalls = server.sink(forward(send));
        let mut config = config(Role::Prefill, layout(), Arc::clone(&memory));
        config.listen = Some(address.into());
        config.sender = sender;
        let handle = Driver::spawn(config, factory, Arc::new(Trusting), upcalls).unwrap();
        server.attach(handle.clone());
        let address = handle.listen_address().unwrap().into();
        let side =
            Side { handle, news, kept: Vec::new(), memory, peer: None, plans: BTreeMap::new() };
        Self { side: Mutex::new(side), server, address }
    }

    pub(super) fn address(&self) -> &str {
        &self.address
    }

    pub(super) fn released(&self, attempt: AttemptId) {
        self.side.lock().unwrap().wait(|upcall| {
            matches!(upcall, Upcall::Release { attempt: a, .. } if *a == attempt).then_some(())
        });
    }
}

impl Drop for Prefill {
    fn drop(&mut self) {
        // The server holds a handle too, so the driver does not end by itself.
        self.side.lock().unwrap_or_else(std::sync::PoisonError::into_inner).handle.shutdown();
    }
}

fn forward(send: std::sync::mpsc::Sender<Upcall>) -> UpcallSink {
    Arc::new(move |upcall| {
        // A test that is over does not listen any more.
        let _ = send.send(upcall);
    })
}

fn config(role: Role, layout: ([u8; 16], &str), memory: Arc<dyn RegionOwner>) -> DriverConfig {
    let n = INCARNATIONS.fetch_add(1, Ordering::Relaxed);
    let (fingerprint, text) = layout;
    let mut config =
        DriverConfig::new(role, Incarnation([n; 16]), Fingerprint(fingerprint), text.into());
    config.regions.push(memory);
    config
}

impl Side {
    pub(super) fn decode(
        factory: TransportFactory,
        verifier: Option<Arc<dyn Verifier>>,
        layout: ([u8; 16], &str),
    ) -> Self {
        let memory: Arc<dyn RegionOwner> = SharedRegion::new(16 << 20).unwrap();
        let verifier = verifier.unwrap_or_else(|| Arc::new(PageVerifier));
        let (send, news) = channel();
        let config = config(Role::Decode, layout, Arc::clone(&memory));
        let handle = Driver::spawn(config, factory, verifier, forward(send)).unwrap();
        Self { handle, news, kept: Vec::new(), memory, peer: None, plans: BTreeMap::new() }
    }

    /// The first news that `want` takes, kept or new.
    pub(super) fn wait<T>(&mut self, want: impl Fn(&Upcall) -> Option<T>) -> T {
        if let Some(at) = self.kept.iter().position(|upcall| want(upcall).is_some()) {
            let upcall = self.kept.remove(at);
            return want(&upcall).unwrap();
        }
        loop {
            let Ok(upcall) = self.news.recv_timeout(PATIENCE) else {
                panic!("no such news; kept: {:?}", self.kept);
            };
            if let Some(value) = want(&upcall) {
                return value;
            }
            self.kept.push(upcall);
        }
    }

    pub(super) fn connect(&mut self, address: &str) -> Incarnation {
        self.handle.connect(address).unwrap();
        self.up()
    }

    pub(super) fn up(&mut self) -> Incarnation {
        let (peer, incarnation) = self.wait(|upcall| match upcall {
            Upcall::PeerUp { peer, incarnation, .. } => Some((*peer, *incarnation)),
            _ => None,
        });
        self.peer = Some(peer);
        incarnation
    }

    /// Waits until the link is gone; true if it ended in good order.
    pub(super) fn down(&mut self) -> bool {
        let gone = self.peer.take().unwrap();
        self.wait(|upcall| match upcall {
            Upcall::PeerDown { peer, had_bye, .. } if *peer == gone => Some(*had_bye),
            _ => None,
        })
    }

    pub(super) fn start(&mut self, attempt: AttemptId, request: Request) {
        self.start_at(attempt, request, 0);
    }

    pub(super) fn start_at(&mut self, attempt: AttemptId, request: Request, offset: u64) {
        let plan = targets(request, RegionId(0), offset);
        self.begin(attempt, request, request, 0, plan);
    }

    /// Has the first `have` pages; `plan` is where the others go.
    pub(super) fn start_from(
        &mut self,
        attempt: AttemptId,
        request: Request,
        have: u32,
        plan: Vec<Target>,
    ) {
        self.begin(attempt, request, request, have, plan);
    }

    pub(super) fn memory(&self) -> &dyn RegionOwner {
        &*self.memory
    }

    /// Asks for one thing and plans for another.
    pub(super) fn start_raw(&mut self, attempt: AttemptId, asked: Request, planned: Request) {
        self.begin(attempt, asked, planned, 0, targets(planned, RegionId(0), 0));
    }

    fn begin(
        &mut self,
        attempt: AttemptId,
        asked: Request,
        planned: Request,
        have: u32,
        plan: Vec<Target>,
    ) {
        self.plans.insert(attempt, plan.clone());
        let start = Start {
            attempt,
            peer: self.peer.unwrap(),
            request: asked.encode(),
            have,
            plan_hash: planned.plan_hash(attempt),
            plan,
        };
        self.handle.start(start).unwrap();
    }

    pub(super) fn record(&mut self, attempt: AttemptId) -> FinalRecord {
        self.wait(|upcall| match upcall {
            Upcall::Completed { attempt: a, record } if *a == attempt => Some(record.clone()),
            Upcall::Failed { attempt: a, why } if *a == attempt => panic!("failed: {why}"),
            _ => None,
        })
    }

    /// The attempt completes, and its pages hold the bytes of the source.
    pub(super) fn completed(&mut self, attempt: AttemptId, request: Request) {
        let record = self.record(attempt);
        assert_eq!(record.payload, attempt.0);
        assert_eq!(record.items, request.pages);
        assert_eq!(self.wrong_pages(attempt, request, 0), Vec::<u32>::new());
    }

    /// Pages of an attempt with other bytes than the source's, from page `first` on.
    pub(super) fn wrong_pages(&self, attempt: AttemptId, request: Request, first: u32) -> Vec<u32> {
        let mut wrong = Vec::new();
        for target in &self.plans[&attempt] {
            let n = number(&target.key);
            let mut bytes = Vec::new();
            read(&*self.memory, &target.extents[0], &mut bytes).unwrap();
            if n >= first && bytes != page_bytes(attempt, n, request.page_bytes as usize) {
                wrong.push(n);
            }
        }
        wrong
    }

    pub(super) fn fresh(&mut self, attempt: AttemptId) -> Vec<(u32, Vec<Key>)> {
        self.wait(|upcall| match upcall {
            Upcall::Fresh { attempt: a, groups } if *a == attempt => Some(groups.clone()),
            _ => None,
        })
    }

    /// The attempt fails, then gets quiet.
    pub(super) fn failed(&mut self, attempt: AttemptId) -> FailReason {
        let why = self.wait(|upcall| match upcall {
            Upcall::Failed { attempt: a, why } if *a == attempt => Some(why.clone()),
            Upcall::Completed { attempt: a, .. } if *a == attempt => panic!("completed"),
            _ => None,
        });
        self.wait(|upcall| {
            matches!(upcall, Upcall::Quiet { attempt: a } if *a == attempt).then_some(())
        });
        why
    }
}
