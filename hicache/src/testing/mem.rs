//! A store in memory, with faults on demand.

use crate::object::ObjectKey;
use crate::store::{BlobStore, Listed, StoreError, check_whole, unix_ms};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// What goes wrong with the next operation of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A read fails.
    Read,
    /// A write fails; the old object or none stays.
    Write,
    /// A write finds the store full.
    NoSpace,
    /// A write succeeds, but only this many bytes are kept and the rest are zeros: what a disk
    /// does that confirms too early.
    TornWrite {
        /// Bytes that are kept.
        kept_bytes: usize,
    },
    /// A read gives zeros from this byte on.
    TornRead {
        /// Bytes that are right.
        kept_bytes: usize,
    },
    /// A read gives one wrong bit.
    FlippedBit {
        /// Which, counted from the object's beginning, modulo the object's length.
        bit: u64,
    },
}

impl Fault {
    const fn is_of_reads(self) -> bool {
        matches!(self, Self::Read | Self::TornRead { .. } | Self::FlippedBit { .. })
    }
}

#[derive(Debug)]
struct Stored {
    bytes: Vec<u8>,
    used: u64,
}

#[derive(Debug, Default)]
struct State {
    objects: BTreeMap<ObjectKey, Stored>,
    faults: VecDeque<Fault>,
}

impl State {
    /// Takes the first waiting fault of reads or of writes.
    fn fault(&mut self, of_reads: bool) -> Option<Fault> {
        let position = self.faults.iter().position(|fault| fault.is_of_reads() == of_reads)?;
        self.faults.remove(position)
    }
}

/// Objects in memory; bounded by bytes.
#[derive(Debug)]
pub struct MemStore {
    bytes_max: u64,
    state: Mutex<State>,
}

impl Default for MemStore {
    fn default() -> Self {
        Self::new(u64::MAX)
    }
}

impl MemStore {
    /// An empty store that is full with so many bytes of objects.
    #[must_use]
    pub fn new(bytes_max: u64) -> Self {
        Self { bytes_max, state: Mutex::default() }
    }

    /// Lets the next operation go wrong; several faults of one kind wait for their turn.
    pub fn inject(&self, fault: Fault) {
        self.state().faults.push_back(fault);
    }

    /// Faults that have not happened yet.
    #[must_use]
    pub fn faults_waiting(&self) -> usize {
        self.state().faults.len()
    }

    /// Flips a bit of a stored object for good; false if there is no such bit.
    pub fn damage(&self, key: &ObjectKey, bit: u64) -> bool {
        let mut state = self.state();
        let Some(stored) = state.objects.get_mut(key) else { return false };
        let byte = usize::try_from(bit / 8).ok().and_then(|byte| stored.bytes.get_mut(byte));
        byte.map(|byte| *byte ^= 1 << (bit % 8)).is_some()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No call leaves the state between two states.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failed(during: &'static str, key: &ObjectKey) -> StoreError {
    StoreError::Failed { during, key: *key, reason: "as the test wants".into() }
}

impl BlobStore for MemStore {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn read(&self, key: &ObjectKey, into: &mut [u8]) -> Result<(), StoreError> {
        let mut state = self.state();
        let fault = state.fault(true);
        if fault == Some(Fault::Read) {
            return Err(failed("read", key));
        }
        let stored = state.objects.get(key).ok_or(StoreError::Missing { key: *key })?;
        let (found, wanted) = (stored.bytes.len() as u64, into.len() as u64);
        if found != wanted {
            return Err(StoreError::Length { key: *key, found, wanted });
        }
        into.copy_from_slice(&stored.bytes);
        match fault {
            Some(Fault::TornRead { kept_bytes }) => zero_from(into, kept_bytes),
            Some(Fault::FlippedBit { bit }) => {
                let bit = bit % (wanted * 8).max(1);
                if let Some(byte) = into.get_mut((bit / 8) as usize) {
                    *byte ^= 1 << (bit % 8);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn write(&self, key: &ObjectKey, bytes: &[u8]) -> Result<(), StoreError> {
        check_whole(key, bytes)?;
        let mut state = self.state();
        let fault = state.fault(false);
        if fault == Some(Fault::Write) {
            return Err(failed("write", key));
        }
        let others = state.objects.iter().filter(|(other, _)| *other != key);
        let held: u64 = others.map(|(_, stored)| stored.bytes.len() as u64).sum();
        let is_full = held.saturating_add(bytes.len() as u64) > self.bytes_max;
        if fault == Some(Fault::NoSpace) || is_full {
            return Err(StoreError::NoSpace { key: *key, bytes: bytes.len() as u64 });
        }
        let mut bytes = bytes.to_vec();
        if let Some(Fault::TornWrite { kept_bytes }) = fault {
            zero_from(&mut bytes, kept_bytes);
        }
        state.objects.insert(*key, Stored { bytes, used: unix_ms(SystemTime::now()) });
        Ok(())
    }

    fn remove(&self, key: &ObjectKey) -> Result<(), StoreError> {
        self.state().objects.remove(key);
        Ok(())
    }

    fn list(&self, found: &mut dyn FnMut(Listed)) -> Result<(), StoreError> {
        let listed = |(key, stored): (&ObjectKey, &Stored)| Listed {
            key: *key,
            bytes: stored.bytes.len() as u64,
            used: stored.used,
        };
        // Not under the lock: `found` may call the store.
        let all: Vec<Listed> = self.state().objects.iter().map(listed).collect();
        all.into_iter().for_each(found);
        Ok(())
    }

    fn size(&self, key: &ObjectKey) -> Result<Option<u64>, StoreError> {
        Ok(self.state().objects.get(key).map(|stored| stored.bytes.len() as u64))
    }

    fn touch(&self, key: &ObjectKey) -> Result<(), StoreError> {
        let mut state = self.state();
        let stored = state.objects.get_mut(key).ok_or(StoreError::Missing { key: *key })?;
        stored.used = unix_ms(SystemTime::now());
        Ok(())
    }
}

fn zero_from(bytes: &mut [u8], kept_bytes: usize) {
    if let Some(rest) = bytes.get_mut(kept_bytes..) {
        rest.fill(0);
    }
}
