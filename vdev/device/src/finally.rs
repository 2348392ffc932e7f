//! Something that happens once, when the last of several parties is done.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex};

use crate::sync::lock;

type Action = Box<dyn FnOnce() + Send>;

thread_local! {
    /// Actions that came up while another one runs on this thread; `None` while none runs.
    static NEXT: RefCell<Option<VecDeque<Action>>> = const { RefCell::new(None) };
}

/// Runs its action when its last holder lets go, on that holder's thread; when another action lets it go, then after that one, so that a long
/// chain of them takes no stack. Must not be let go under a lock of the device.
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
            run(action);
        }
    }
}

fn run(action: Action) {
    let mut action = Some(action);
    NEXT.with_borrow_mut(|next| match next {
        Some(next) => next.extend(action.take()),
        None => *next = Some(VecDeque::new()),
    });
    if action.is_none() {
        return;
    }
    let _clear = Clear;
    while let Some(now) = action {
        now();
        action = NEXT.with_borrow_mut(|next| next.as_mut()?.pop_front());
    }
}

/// Nothing runs on this thread any more, also after a panic; what did not run is let go.
struct Clear;

impl Drop for Clear {
    fn drop(&mut self) {
        drop(NEXT.take());
    }
}

impl fmt::Debug for Finally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Finally")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn long_chain_takes_no_stack_and_keeps_its_order() {
        let (send, receive) = mpsc::channel();
        let first = Finally::idle();
        let mut last = Arc::clone(&first);
        for number in 0..200_000 {
            let (send, next) = (send.clone(), Finally::idle());
            let held = Arc::clone(&next);
            last.set(move || {
                send.send(number).expect("the test listens");
                drop(held);
            });
            last = next;
        }
        drop((last, send));
        drop(first);
        assert!(receive.into_iter().eq(0..200_000));
    }

    #[test]
    fn panic_of_an_action_leaves_the_thread_usable() {
        let panics = Finally::new(|| panic!("as the test wants"));
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(panics))).expect_err("it panics");
        let (send, receive) = mpsc::channel();
        drop(Finally::new(move || send.send(()).expect("the test listens")));
        receive.try_recv().expect("it ran");
    }
}
