//! Something that happens once, when the last of several parties is done.

use std::fmt;
use std::sync::{Arc, Mutex};

use crate::sync::lock;

type Action = Box<dyn FnOnce() + Send>;

/// Runs its action when its last holder lets go, on that holder's thread. Must not be let go under a lock of the device.
pub(crate) struct Finally(Mutex<Option<Action>>);

impl Finally {
    pub(crate) fn new(action: impl FnOnce() + Send + 'static) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Some(Box::new(action)))))
    }

    /// Without an action until [`Finally::set`].
    pub(crate) fn idle() -> Arc<Self> {
        Arc::new(Self(Mutex::new(None)))
    }

    /// Gives it its action.
    pub(crate) fn set(&self, action: impl FnOnce() + Send + 'static) {
        *lock(&self.0) = Some(Box::new(action));
    }
}

impl Drop for Finally {
    fn drop(&mut self) {
        let action = lock(&self.0).take();
        if let Some(action) = action {
            action();
        }
    }
}

impl fmt::Debug for Finally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Finally")
    }
}
