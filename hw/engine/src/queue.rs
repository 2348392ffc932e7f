//! A queue of transfers, and the thread that carries them out one after another.
//!
//! Not here: how a transfer is carried out.

use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::{EngineError, Finished, JobId, Submit, Transfer};

/// Transfers that a queue holds, ended ones among them until they are fetched.
pub const DEPTH: usize = 64;

/// How long there is nothing to do before a carrier is told so.
pub const REST: Duration = Duration::from_secs(1);

/// Runs first thing in each thread of an engine, for instance to install a system call filter.
pub type ThreadHook = Arc<dyn Fn() + Send + Sync>;

/// Called when there is something to [`Queue::poll`].
pub type Wake = Box<dyn Fn() + Send + Sync>;

/// Carries transfers out.
pub trait Carrier: Send + 'static {
    /// Answers the bytes moved, and what then went wrong. `go_on` is asked now and then.
    fn run(&mut self, transfer: &Transfer, go_on: &dyn Fn() -> bool) -> (u64, Result<(), EngineError>);

    /// There has been nothing to do for a second.
    fn rest(&mut self) {}
}

/// Transfers in their order, and the thread that carries them out. Whatever way that thread ends, each transfer has an end.
pub struct Queue<C> {
    shared: Arc<Shared<C>>,
    thread: Option<JoinHandle<()>>,
}

struct Shared<C> {
    state: Mutex<State<C>>,
    /// Something waits, something has ended, or it is over.
    changed: Condvar,
    wake: Mutex<Option<Wake>>,
}

/// What the thread is to do.
enum Item<C> {
    Transfer(Transfer),
    Call(Box<dyn FnOnce(&mut C) + Send>),
}

/// What comes next.
enum Next<C> {
    Item(Item<C>),
    Rest,
    Over,
}

struct State<C> {
    waiting: VecDeque<Item<C>>,
    running: Option<JobId>,
    /// The running one is to end.
    abort: bool,
    ended: Vec<Finished>,
    over: bool,
}

impl<C: Carrier> Queue<C> {
    /// Starts the thread.
    ///
    /// # Errors
    /// When there is none.
    pub fn start(name: &str, mut carrier: C, hook: Option<ThreadHook>) -> io::Result<Self> {
        let state = State { waiting: VecDeque::new(), running: None, abort: false, ended: Vec::new(), over: false };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new(), wake: Mutex::new(None) });
        let work = Arc::clone(&shared);
        let body = move || {
            if let Some(hook) = hook {
                hook();
            }
            let _alarm = Alarm(&*work);
            work.work_off(&mut carrier);
        };
        let thread = thread::Builder::new().name(name.into()).spawn(body)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Has the thread do something between transfers, and waits for the answer.
    ///
    /// # Errors
    /// What it answers, or [`EngineError::Aborted`] if it ends without an answer.
    pub fn call<T: Send + 'static>(
        &self,
        what: impl FnOnce(&mut C) -> Result<T, EngineError> + Send + 'static,
    ) -> Result<T, EngineError> {
        let (sender, answer) = channel();
        // Whoever asked may have gone.
        self.shared.put(Item::Call(Box::new(move |carrier| drop(sender.send(what(carrier))))));
        answer.recv().unwrap_or(Err(EngineError::Aborted))
    }

    /// Puts a transfer behind the others.
    ///
    /// # Errors
    /// [`EngineError::Busy`] if there are [`DEPTH`] of them, [`EngineError::LOST`] if there is no thread any more.
    pub fn submit(&self, transfer: &Transfer) -> Result<Submit, EngineError> {
        let mut state = self.shared.lock();
        if state.over {
            return Err(EngineError::LOST);
        }
        if state.waiting.len() + usize::from(state.running.is_some()) + state.ended.len() >= DEPTH {
            return Err(EngineError::Busy);
        }
        state.waiting.push_back(Item::Transfer(transfer.clone()));
        drop(state);
        self.shared.changed.notify_all();
        Ok(Submit::Submitted)
    }

    /// As [`DmaEngine::poll`](crate::DmaEngine::poll).
    pub fn poll(&self, out: &mut Vec<Finished>) {
        out.append(&mut self.shared.lock().ended);
    }

    /// As [`DmaEngine::abort`](crate::DmaEngine::abort).
    pub fn abort(&self, job: JobId) {
        let mut state = self.shared.lock();
        if state.running == Some(job) {
            state.abort = true;
            return;
        }
        let is_it = |item: &Item<C>| matches!(item, Item::Transfer(transfer) if transfer.job == job);
        let Some(at) = state.waiting.iter().position(is_it) else { return };
        state.waiting.remove(at);
        state.give_up(job, EngineError::Aborted);
        drop(state);
        self.shared.tell();
    }

    /// Gives up all there is, and does not wait for the one that runs.
    pub fn give_up(&self) {
        let mut state = self.shared.lock();
        state.give_up_all(EngineError::Aborted);
        state.abort = state.running.is_some();
    }

    /// As [`DmaEngine::quiesce`](crate::DmaEngine::quiesce).
    pub fn quiesce(&self, out: &mut Vec<Finished>) {
        self.give_up();
        let mut state = self.shared.lock();
        while state.running.is_some() {
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        out.append(&mut state.ended);
    }

    /// As [`DmaEngine::on_progress`](crate::DmaEngine::on_progress).
    pub fn on_progress(&self, wake: Wake) {
        *self.shared.wake.lock().unwrap_or_else(PoisonError::into_inner) = Some(wake);
    }
}

impl<C> Shared<C> {
    fn lock(&self) -> MutexGuard<'_, State<C>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work_off(&self, carrier: &mut C)
    where
        C: Carrier,
    {
        let mut rested = true;
        loop {
            let next = self.next(rested);
            rested = matches!(next, Next::Rest);
            let transfer = match next {
                Next::Over => return,
                Next::Rest => {
                    carrier.rest();
                    continue;
                }
                Next::Item(Item::Transfer(transfer)) => transfer,
                Next::Item(Item::Call(what)) => {
                    what(carrier);
                    continue;
                }
            };
            let (bytes, result) = carrier.run(&transfer, &|| !self.lock().abort);
            let mut state = self.lock();
            state.running = None;
            state.ended.push(Finished { job: transfer.job, bytes, result, raised: false, value: 0 });
            drop(state);
            self.changed.notify_all();
            self.tell();
        }
    }

    fn put(&self, item: Item<C>) {
        let mut state = self.lock();
        if !state.over {
            state.waiting.push_back(item);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Waits for what comes next, which is no second rest in a row.
    fn next(&self, rested: bool) -> Next<C> {
        let mut state = self.lock();
        loop {
            if state.over {
                return Next::Over;
            }
            if let Some(item) = state.waiting.pop_front() {
                if let Item::Transfer(transfer) = &item {
                    (state.running, state.abort) = (Some(transfer.job), false);
                }
                return Next::Item(item);
            }
            if rested {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let waited = self.changed.wait_timeout(state, REST).unwrap_or_else(PoisonError::into_inner);
            state = waited.0;
            if waited.1.timed_out() && state.waiting.is_empty() && !state.over {
                return Next::Rest;
            }
        }
    }

    fn tell(&self) {
        if let Some(wake) = &*self.wake.lock().unwrap_or_else(PoisonError::into_inner) {
            wake();
        }
    }
}

impl<C> State<C> {
    fn give_up(&mut self, job: JobId, error: EngineError) {
        self.ended.push(Finished::failed(job, error));
    }

    /// Gives up what waits. A call is dropped with its answer's channel, which says so.
    fn give_up_all(&mut self, error: EngineError) {
        while let Some(item) = self.waiting.pop_front() {
            if let Item::Transfer(transfer) = item {
                self.give_up(transfer.job, error);
            }
        }
    }
}

/// Ends every transfer if the thread goes by a panic: nobody waits for an engine that nobody works at.
struct Alarm<'a, C>(&'a Shared<C>);

impl<C> Drop for Alarm<'_, C> {
    fn drop(&mut self) {
        if !thread::panicking() {
            return;
        }
        let (mut state, error) = (self.0.lock(), EngineError::LOST);
        state.over = true;
        state.give_up_all(error);
        if let Some(job) = state.running.take() {
            state.give_up(job, error);
        }
        drop(state);
        self.0.changed.notify_all();
        self.0.tell();
    }
}

impl<C> Drop for Queue<C> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        (state.over, state.abort) = (true, true);
        drop(state);
        self.shared.changed.notify_all();
        // The last owner may be what the queue wakes: then this is the thread itself, and it ends after this call.
        if let Some(thread) = self.thread.take().filter(|thread| thread.thread().id() != thread::current().id())
            && thread.join().is_err()
        {
            tracing::error!("An engine's thread had panicked; transfers may have been lost");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::Receiver;

    use iommu_addr::{DomainId, EndpointId};

    use super::*;
    use crate::Work;

    struct Waits(Receiver<()>);

    impl Carrier for Waits {
        fn run(&mut self, _: &Transfer, _: &dyn Fn() -> bool) -> (u64, Result<(), EngineError>) {
            self.0.recv().unwrap();
            (0, Ok(()))
        }
    }

    #[test]
    fn the_last_owner_may_be_what_it_wakes() {
        let (go, waits) = channel();
        let queue = Queue::start("queue", Waits(waits), None).unwrap();
        let (last, (told, hears)) = (Arc::new(Mutex::new(None)), channel());
        let owner = Arc::clone(&last);
        queue.on_progress(Box::new(move || {
            drop(owner.lock().unwrap().take());
            told.send(()).unwrap();
        }));
        let (domain, initiator) = (DomainId(1), EndpointId::local(0));
        let transfer = Transfer { job: JobId(1), domain, initiator, work: Work::Flush };
        assert_eq!(queue.submit(&transfer), Ok(Submit::Submitted));
        *last.lock().unwrap() = Some(queue);
        go.send(()).unwrap();
        assert_eq!(hears.recv(), Ok(()), "the thread went on");
    }
}
