//! The workers of a process, each with its pools, its cache and its transports, put together and started.

use super::cache;
use super::memory;
use super::peers::Peers;
use super::{NodeOptions, Parts, WorkerHandle};
use crate::config::{Backend, Mode, ServeArgs};
#[cfg(feature = "faults")]
use crate::faults::transport::inject;
use crate::glue::handoff::PageVerifier;
use crate::glue::mover::Reports;
use crate::glue::pools::{POOLS, Pools};
use crate::glue::regions::PoolRegion;
use crate::grammar::Grammars;
use crate::net::kv_events::Outlet;
use crate::worker::events::publishes;
use crate::worker::{Inbox, Link, Role, Shared, Worker, WorkerConfig, WorkerMsg, spawn};
use anyhow::Context;
use dsa_kernels::CpuDevice;
use dsv4_model::Workspace;
use pd_transfer::driver::{Driver, DriverConfig, DriverHandle, Verifier};
use pd_transfer::endpoint::Upcall;
use pd_transfer::inprocess::InProcessNet;
use pd_transfer::shm::{Shm, has_foreign_file};
use pd_transfer::tcp::Tcp;
use pd_transfer::transport::{RegionOwner, TransportFactory};
use pd_transfer::ucx::{self, Ucx};
use pd_transfer::wire::{Incarnation, Limits, Role as LinkRole};
use std::sync::Arc;
use std::thread::JoinHandle;

/// Peers that may all have as many prompts under way at a prefill worker as one may have.
const PEERS_AT_FULL: usize = 4;

/// Workers being added to a process.
pub(super) struct Assembly<'a> {
    pub(super) args: &'a ServeArgs,
    pub(super) parts: Parts,
    pub(super) grammars: Grammars,
    pub(super) options: &'a NodeOptions,
    pub(super) workers: Vec<WorkerHandle>,
    pub(super) threads: Vec<JoinHandle<()>>,
    pub(super) bootstrap: Option<String>,
    /// For the worker that publishes KV events.
    pub(super) outlet: Option<Outlet>,
    /// Of a decode worker.
    pub(super) peers: Option<Peers>,
}

/// Where a prefill worker of this user meets decode workers of the same host.
pub(super) fn socket_address(port: u16) -> String {
    let uid = rustix::process::getuid().as_raw();
    format!("unix:{}", std::env::temp_dir().join(format!("dsv4-pd-{uid}-{port}.sock")).display())
}

/// Whether a file that is no socket lies where a prefill worker of this host would listen.
pub(super) fn is_blocked(address: &str) -> bool {
    let port = address.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
    let socket = port.map(socket_address).filter(|socket| has_foreign_file(socket));
    if let Some(socket) = &socket {
        tracing::warn!(socket, address, "a file that is no socket lies there: TCP is used");
    }
    socket.is_some()
}

/// The transport to peers at HOST:PORT.
pub(super) fn by_socket(
    backend: Backend,
    totals: &Arc<ucx::Totals>,
) -> (&'static str, TransportFactory) {
    match backend {
        Backend::Ucx => ("ucx", Ucx::factory(Arc::clone(totals))),
        Backend::Auto | Backend::Shm | Backend::Tcp => ("tcp", Tcp::factory()),
    }
}

fn random_incarnation() -> anyhow::Result<Incarnation> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).context("read random bytes for this process's incarnation")?;
    Ok(Incarnation(bytes))
}

/// Hears the news of a driver before its worker does.
pub(super) type Hear = Arc<dyn Fn(&Upcall) + Send + Sync>;

/// A worker that is put together and not yet running.
pub(super) struct Draft {
    pub(super) role: Role,
    pub(super) worker: Worker,
    pub(super) inbox: Inbox,
    pub(super) shared: Arc<Shared>,
    pub(super) verifier: Arc<PageVerifier>,
    pub(super) drivers: Vec<(&'static str, DriverHandle)>,
    pub(super) ucx: Arc<ucx::Totals>,
    pub(super) incarnation: Incarnation,
}

impl<'a> Assembly<'a> {
    pub(super) fn new(
        args: &'a ServeArgs,
        parts: Parts,
        grammars: Grammars,
        options: &'a NodeOptions,
    ) -> Self {
        Self {
            args,
            parts,
            grammars,
            options,
            workers: Vec::new(),
            threads: Vec::new(),
            bootstrap: None,
            outlet: None,
            peers: None,
        }
    }

    pub(super) fn draft(&self, role: Role) -> anyhow::Result<Draft> {
        let parts = &self.parts;
        memory::ensure_room(&parts.geometry, &parts.counts)?;
        let device = CpuDevice::new();
        let pools = Pools::new(Arc::clone(&parts.geometry), &device, parts.counts)
            .context("allocate the page pools")?;
        if let Some(see) = &self.options.see_pools {
            see(role, &pools);
        }
        let verifier = Arc::new(PageVerifier::default());
        let shared = Arc::new(Shared::default());
        // Clients are bounded by the queue limit, upcalls by the driver's own bounds.
        let (inbox, receiver) = crossbeam_channel::unbounded();
        let config = WorkerConfig { role, ..parts.config };
        let model = Arc::clone(&parts.model);
        let reports = inbox.clone();
        // A worker that has ended needs no reports.
        let reports: Reports = Arc::new(move |report| drop(reports.send(WorkerMsg::Moved(report))));
        // Where both workers share a process, the one that computes has all that the other could keep.
        let has_cache = self.args.disaggregation_mode != Mode::Both || role != Role::Decode;
        let of = (parts.fingerprint, parts.layout.as_str());
        let cache = if has_cache {
            let wrap = self.options.wrap_store.as_ref();
            cache::parts(self.args, role, &pools, &parts.counts, of, (&reports, wrap))?
        } else {
            None
        };
        let (tokens, seqs) = (config.step_tokens as usize, config.max_running as usize);
        let workspace = Workspace::new(model.config(), model.kernels(), tokens, seqs)
            .context("allocate the buffers of a step")?;
        let shared_too = Arc::clone(&shared);
        let mut worker = Worker::new(config, model, pools, workspace, receiver, shared_too);
        if let Some(cache) = cache {
            worker.cache_in(cache);
        }
        worker.constrain(self.grammars.clone(), inbox.clone());
        let incarnation = random_incarnation()?;
        let (drivers, ucx) = (Vec::new(), Arc::default());
        Ok(Draft { role, worker, inbox, shared, verifier, drivers, ucx, incarnation })
    }

    /// Adds one transport to a worker.
    pub(super) fn drive(
        &self,
        draft: &mut Draft,
        name: &'static str,
        factory: TransportFactory,
        (listen, hear): (Option<String>, Option<Hear>),
    ) -> anyhow::Result<()> {
        let parts = &self.parts;
        let role = match draft.role {
            Role::Prefill => LinkRole::Prefill,
            Role::Unified | Role::Decode => LinkRole::Decode,
        };
        let fingerprint = pd_transfer::wire::Fingerprint(parts.fingerprint.0);
        let mut config =
            DriverConfig::new(role, draft.incarnation, fingerprint, parts.layout.clone());
        config.limits = Limits { max_prompt_tokens: parts.config.context_length, ..config.limits };
        let pools = draft.worker.pools();
        config.regions = POOLS
            .iter()
            .map(|kind| Arc::new(PoolRegion(pools.mem(*kind).clone())) as Arc<dyn RegionOwner>)
            .collect();
        let asked = listen.clone();
        config.listen = listen;
        // Every sequence of either side may be under way at once, with slack for those that end.
        let sequences = (parts.config.max_running + parts.config.max_queued) as usize;
        config.receiver.attempts_max = config.receiver.attempts_max.max(sequences + 64);
        // A peer that never ends its attempts must leave room for others.
        config.sender.attempts_per_peer_max = sequences;
        config.sender.attempts_max = config.sender.attempts_max.max(PEERS_AT_FULL * sequences + 64);
        let wrap = self.options.wrap_transport.as_ref().filter(|_| draft.role == Role::Decode);
        let factory = match wrap {
            Some(wrap) => wrap(factory),
            None => factory,
        };
        let verifier: Arc<dyn Verifier> = match &self.options.wrap_verifier {
            Some(wrap) => wrap(Arc::clone(&draft.verifier)),
            None => draft.verifier.clone(),
        };
        #[cfg(feature = "faults")]
        let (factory, verifier) = match draft.role {
            Role::Decode => inject((&parts.geometry, parts.counts), factory, verifier),
            Role::Prefill | Role::Unified => (factory, verifier),
        };
        let (inbox, driver) = (draft.inbox.clone(), draft.drivers.len());
        let upcalls = Arc::new(move |upcall| {
            hear.iter().for_each(|hear| hear(&upcall));
            // A worker that has ended needs no news.
            drop(inbox.send(WorkerMsg::Upcall { driver, upcall }));
        });
        let handle =
            Driver::spawn(config, factory, verifier, upcalls).with_context(|| match &asked {
                Some(address) => format!("start the {name} hand-off on {address}"),
                None => format!("start the {name} hand-off"),
            })?;
        draft.drivers.push((name, handle));
        Ok(())
    }

    pub(super) fn launch(&mut self, mut draft: Draft) -> anyhow::Result<()> {
        let name = draft.role.name();
        if publishes(draft.role, self.args.disaggregation_mode != Mode::Both)
            && let Some(outlet) = self.outlet.take()
        {
            draft.worker.publish_events(outlet);
        }
        if !draft.drivers.is_empty() {
            draft.worker.attach(Link {
                drivers: draft.drivers.iter().map(|(_, driver)| driver.clone()).collect(),
                transports: draft.drivers.iter().map(|(name, _)| *name).collect(),
                verifier: draft.verifier,
                fingerprint: self.parts.fingerprint,
            });
        }
        self.threads.push(spawn(name, draft.worker).context("start a worker thread")?);
        self.workers.push(WorkerHandle {
            role: draft.role,
            inbox: draft.inbox,
            shared: draft.shared,
            drivers: draft.drivers,
            ucx: draft.ucx,
        });
        Ok(())
    }

    pub(super) fn add_unified(&mut self) -> anyhow::Result<()> {
        let draft = self.draft(Role::Unified)?;
        self.launch(draft)
    }

    /// A prefill and a decode worker that meet inside the process.
    pub(super) fn add_pair(&mut self) -> anyhow::Result<()> {
        let net = InProcessNet::new();
        let address = "prefill".to_owned();
        let mut prefill = self.draft(Role::Prefill)?;
        self.drive(&mut prefill, "in-process", net.factory(), (Some(address.clone()), None))?;
        self.launch(prefill)?;
        let mut decode = self.draft(Role::Decode)?;
        self.drive(&mut decode, "in-process", net.factory(), (None, None))?;
        decode.shared.expect_peer(&address, &address);
        decode.drivers[0].1.connect(&address).context("connect the two workers")?;
        self.launch(decode)
    }

    pub(super) fn add_prefill(&mut self, args: &ServeArgs) -> anyhow::Result<()> {
        let mut draft = self.draft(Role::Prefill)?;
        let backend = args.disaggregation_transfer_backend;
        let mut port = args.disaggregation_bootstrap_port;
        if backend != Backend::Shm {
            let listen = format!("{}:{port}", args.host);
            let (name, factory) = by_socket(backend, &draft.ucx);
            self.drive(&mut draft, name, factory, (Some(listen), None))?;
            port = draft.drivers[0]
                .1
                .listen_address()
                .and_then(|address| address.rsplit_once(':')?.1.parse().ok())
                .context("read the bootstrap port that was given")?;
        } else if port == 0 {
            // The port only names the socket; the system knows one that is free.
            let probe =
                std::net::TcpListener::bind(("127.0.0.1", 0)).context("find a free port")?;
            port = probe.local_addr().context("find a free port")?.port();
        }
        let socket = socket_address(port);
        if backend == Backend::Auto && has_foreign_file(&socket) {
            tracing::warn!(
                socket,
                "a file that is no socket lies there: TCP only, no shared memory"
            );
        } else if matches!(backend, Backend::Auto | Backend::Shm) {
            let opened = self.drive(&mut draft, "shm", Shm::factory(1), (Some(socket), None));
            match opened {
                Err(error) if backend == Backend::Auto => {
                    tracing::warn!("TCP only, no shared memory: {error:#}");
                }
                done => done?,
            }
        }
        self.bootstrap = Some(format!("{}:{port}", args.host));
        self.launch(draft)
    }
}
