//! The one door to locks and atomics, so that the same code runs under the model checker (`--cfg loom`).
//!
//! Locks are taken through [`lock`] and friends, which look past poisoning: nothing of a caller runs under a lock of this crate, so a lock is
//! poisoned only by a defect here, and a second panic in every thread would not make the state better.
//!
//! Not here: `Arc` and `OnceLock`, which are the standard ones also under the model checker: their own correctness is not in question.

#[cfg(loom)]
pub(crate) use loom::sync::{
    Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
    atomic::{AtomicU32, AtomicU64, Ordering},
};
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

use std::sync::PoisonError;

#[cfg(not(loom))]
static SERIAL: AtomicU64 = AtomicU64::new(1);
#[cfg(loom)]
loom::lazy_static! {
    static ref SERIAL: AtomicU64 = AtomicU64::new(1);
}

/// A number that this process has not had before.
pub(crate) fn serial() -> u64 {
    SERIAL.fetch_add(1, Ordering::Relaxed)
}

/// Takes a mutex, blocking.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes a lock shared, blocking.
pub(crate) fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

/// Takes a lock alone, blocking.
pub(crate) fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}
