//! The cache tiers of a worker, as the flags want them.

use super::memory::host_room;
use crate::config::{ConfigError, ServeArgs, WritePolicyArg};
use crate::glue::mover::{HostMemory, Mover, Reports};
use crate::glue::objects::ObjectMemory;
use crate::glue::pools::{PageCounts, Pools};
use crate::net::object_store::{RemoteConfig, RemoteError, RemoteStore, TIMEOUT};
use crate::worker::Role;
use crate::worker::cache::{CacheParts, SAVES_MAX};
use anyhow::Context;
use hicache::store::{BlobStore, FileStore, FileStoreConfig, Listed};
use hicache::tiers::{Limits, Store, StoreLimits, Tiers, WritePolicy};
use hicache::{ObjectKey, Part};
use kv_pool::{BLOCK_TOKENS, Fingerprint, Geometry};
use std::sync::Arc;
use std::time::Duration;

const GIB: f64 = (1_u64 << 30) as f64;
/// Threads, and so motions at a time, of a store in a folder.
const STORE_THREADS: usize = 2;
/// From which size of objects on a store is read and written around the page cache: what is read
/// comes into the host tier anyway, and large reads are faster so. Small ones are not.
const DIRECT_MIN: u64 = 512 << 10;
/// Threads of a store behind a network.
const REMOTE_THREADS: usize = 4;
/// Objects that are looked for there at a time without being known.
const PROBES_MAX: usize = 256;
/// How long the start may wait for the names of what is there.
const LIST_LIMIT: Duration = Duration::from_secs(10);
/// Context of what is wrong with that store.
const OBJECT_STORE: &str = "open the cache's object store (--hicache-object-store)";
/// Most objects that the index of a store may name: some 300 bytes of memory each.
const OBJECTS_MAX: usize = 4 << 20;
/// Objects that wait to be read ahead of need, or to be written.
const WAITING_MAX: usize = 4096;
/// How long a store is left alone after it failed.
const PAUSE_US: u64 = 10_000_000;
/// Objects that a start begins to remove when a store has more than it may; the others go as new
/// ones come.
const TRIMMED_MAX: usize = 16_384;
/// Failures in a row after which that happens.
const FAILURES_MAX: u32 = 3;

/// Slots of the host tier, per part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HostPlan {
    /// For blocks and for boundaries.
    pub(super) slots: [u32; 2],
    /// Bytes of an object of each part.
    pub(super) object_bytes: [u64; 2],
}

impl HostPlan {
    /// Bytes of all slots.
    pub(super) fn bytes(&self) -> u64 {
        self.slots.iter().zip(self.object_bytes).map(|(n, bytes)| u64::from(*n) * bytes).sum()
    }
}

/// How much host memory the flags give to a worker, half of it for blocks and half for boundaries;
/// none without a host tier.
pub(super) fn host_plan(
    args: &ServeArgs,
    geometry: &Geometry,
    counts: &PageCounts,
) -> Result<Option<HostPlan>, ConfigError> {
    if args.disable_radix_cache || !args.enable_hierarchical_cache {
        return match (&args.hicache_storage_dir, &args.hicache_object_store) {
            (Some(_), _) => Err(ConfigError::StorageWithoutHost("--hicache-storage-dir")),
            (None, Some(_)) => Err(ConfigError::StorageWithoutHost("--hicache-object-store")),
            (None, None) => Ok(None),
        };
    }
    let device: u64 = crate::glue::pools::POOLS
        .iter()
        .map(|kind| geometry.pool_bytes(*kind, counts.of(*kind)))
        .sum();
    let bytes = match args.hicache_size {
        Some(gib) => gib * GIB,
        None => args.hicache_ratio * device as f64,
    };
    let object_bytes = Part::ALL.map(|part| ObjectMemory::object_bytes(geometry, part));
    let slots = object_bytes.map(|each| (bytes / 2.0 / each as f64) as u32);
    if slots.contains(&0) {
        let needed = object_bytes.iter().max().map_or(0, |bytes| bytes * 2);
        return Err(ConfigError::HostTooSmall { bytes: bytes as u64, needed });
    }
    Ok(Some(HostPlan { slots, object_bytes }))
}

/// Opens the store of a worker in a folder, and says what else lies there.
fn open_store(
    args: &ServeArgs,
    role: Role,
    fingerprint: Fingerprint,
    layout: &str,
    plan: &HostPlan,
) -> anyhow::Result<Option<Arc<FileStore>>> {
    let Some(dir) = &args.hicache_storage_dir else { return Ok(None) };
    // Workers that compute keep boundaries too; a decode worker only blocks.
    let dir = dir.join(if role == Role::Decode { "decode" } else { "prefill" });
    let direct = plan.object_bytes.iter().all(|bytes| *bytes >= DIRECT_MIN);
    let config = FileStoreConfig { dir, fingerprint, layout: layout.to_owned(), direct };
    let store =
        FileStore::open(config).context("open the cache's store (--hicache-storage-dir)")?;
    if let Some(exposed) = store.exposed() {
        tracing::warn!(
            folder = %exposed.display(),
            "others may write in this folder of the cache: they could choose what is read from it"
        );
    }
    for other in store.others() {
        tracing::warn!(
            store = %other.dir.display(),
            differs = other.differs,
            "a store of another layout is left alone; `server cache prune` removes it"
        );
    }
    Ok(Some(Arc::new(store)))
}

/// A client for the store that other servers share. Whether there is anybody to answer does not
/// matter here: the tier is left alone while nobody does.
fn remote_store(
    args: &ServeArgs,
    fingerprint: Fingerprint,
    layout: &str,
) -> anyhow::Result<Option<Arc<RemoteStore>>> {
    let Some(url) = args.hicache_object_store.clone() else { return Ok(None) };
    let config = RemoteConfig { url, fingerprint, layout: layout.to_owned(), timeout: TIMEOUT };
    let store = RemoteStore::new(config).context(OBJECT_STORE)?;
    match store.claim() {
        Err(error @ RemoteError::Unreachable { .. }) => {
            tracing::warn!(
                %error,
                "the cache's object store cannot be used now; it is tried again and again"
            );
        }
        result => result.context(OBJECT_STORE)?,
    }
    Ok(Some(Arc::new(store)))
}

/// Puts another store around that of a cache's folder.
pub type WrapStore = Box<dyn Fn(Arc<dyn BlobStore>) -> Arc<dyn BlobStore>>;

/// Builds the tiers of a worker, if it is to have any.
pub(super) fn parts(
    args: &ServeArgs,
    role: Role,
    pools: &Pools,
    counts: &PageCounts,
    (fingerprint, layout): (Fingerprint, &str),
    (reports, wrap): (&Reports, Option<&WrapStore>),
) -> anyhow::Result<Option<CacheParts>> {
    let geometry = pools.geometry();
    let Some(plan) = host_plan(args, geometry, counts)? else { return Ok(None) };
    host_room(plan.bytes())?;
    let disk = open_store(args, role, fingerprint, layout, &plan)?;
    let remote = remote_store(args, fingerprint, layout)?;
    let limits = Limits {
        host_blocks: plan.slots[0],
        host_boundaries: plan.slots[1],
        object_bytes: plan.object_bytes,
        disk: disk.as_ref().map(|_| StoreLimits {
            bytes_max: Some((args.hicache_storage_size * GIB) as u64),
            objects_max: OBJECTS_MAX,
            motions_max: STORE_THREADS,
            owned: true,
        }),
        remote: remote.as_ref().map(|_| StoreLimits {
            bytes_max: None,
            objects_max: OBJECTS_MAX,
            motions_max: REMOTE_THREADS,
            owned: false,
        }),
        policy: match args.hicache_write_policy {
            WritePolicyArg::WriteThrough => WritePolicy::Through,
            WritePolicyArg::WriteThroughSelective => WritePolicy::ThroughSelective,
            WritePolicyArg::WriteBack => WritePolicy::Back,
        },
        saves_max: SAVES_MAX,
        fetches_max: args.max_running_requests as usize,
        fetch_objects_max: counts.block as usize + 1,
        prefetch_max: WAITING_MAX,
        writes_max: WAITING_MAX.max(plan.slots[0] as usize),
        probes_max: PROBES_MAX,
        pins_max: plan.slots.map(|slots| (f64::from(slots) * args.hicache_pin_share) as u32),
        pause_us: PAUSE_US,
        failures_max: FAILURES_MAX,
    };
    let mut tiers = Tiers::new(limits);
    if let Some(store) = &disk {
        adopt(&mut tiers, store, &plan)?;
    }
    if let Some(store) = &remote {
        adopt_remote(&mut tiers, store, &plan);
    }
    let memory = ObjectMemory::new(pools, fingerprint);
    let stores = [
        disk.map(|store| (wrap.map_or(store.clone() as _, |wrap| wrap(store)), STORE_THREADS)),
        remote.map(|store| (store as Arc<dyn BlobStore>, REMOTE_THREADS)),
    ];
    let mover = Mover::start(memory, stores, reports).context("start the threads of the cache")?;
    let host = HostMemory::new(plan.slots, plan.object_bytes);
    Ok(Some(CacheParts { tiers, host, mover }))
}

/// Tells the tiers what a store has from before; those used longest ago first, since they may go
/// first.
fn adopt(tiers: &mut Tiers, store: &FileStore, plan: &HostPlan) -> anyhow::Result<()> {
    let mut found: Vec<(u64, ObjectKey)> = Vec::new();
    let mut strange = store.skipped();
    store
        .list(&mut |Listed { key, bytes, used }| {
            if bytes == plan.object_bytes[key.part.position()] {
                found.push((used, key));
            } else {
                strange += 1;
            }
        })
        .context("list the cache's store (--hicache-storage-dir)")?;
    found.sort_unstable();
    let known = found.iter().filter(|(_, key)| tiers.adopt(Store::Disk, *key)).count();
    tiers.trim(Store::Disk, TRIMMED_MAX);
    let blocks = found.iter().filter(|(_, key)| key.part == Part::Block).count();
    tracing::info!(
        store = %store.dir().display(),
        objects = known,
        tokens = blocks as u64 * u64::from(BLOCK_TOKENS),
        strange,
        "the cache's store is open"
    );
    Ok(())
}

/// Tells the tiers what others have put into their common store. What is not listed in time, or
/// comes later, is found when a prompt looks for it.
fn adopt_remote(tiers: &mut Tiers, store: &RemoteStore, plan: &HostPlan) {
    let (mut objects, mut strange) = (0_u64, 0_u64);
    let listed = store.list_within(LIST_LIMIT, &mut |Listed { key, bytes, .. }| {
        let fits = bytes == plan.object_bytes[key.part.position()];
        let known = fits && tiers.adopt(Store::Remote, key);
        (objects, strange) = (objects + u64::from(known), strange + u64::from(!fits));
    });
    if let Err(error) = listed {
        tracing::warn!(
            %error, objects,
            "not all of the cache's object store is known; it goes on with what is"
        );
        return;
    }
    tracing::info!(store = %store.url(), objects, strange, "the cache's object store is in use");
}
