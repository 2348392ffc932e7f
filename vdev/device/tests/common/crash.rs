//! Processes that die at a chosen step, and the device of the next one over the same memory.
//!
//! A step is everything that the device does to what outlives it or that others see: each look at the journal, which comes right before each
//! store to it, each visit to a ring, each interrupt. Death is an unwinding; from then on the process touches nothing any more.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use hw_host::HostEngine;
use vdev_device::{Device, DeviceSpec, JOURNAL_WORDS};

use super::{Bed, ScriptEngine};

struct Death;

/// A process, as far as it can die.
pub struct Process {
    left: AtomicU64,
    dead: AtomicBool,
}

impl Default for Process {
    fn default() -> Self {
        Self { left: AtomicU64::new(u64::MAX), dead: AtomicBool::new(false) }
    }
}

impl Process {
    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::SeqCst)
    }

    /// Dies in place of the step after so many more.
    pub fn die_in(&self, steps: u64) {
        self.left.store(steps, Ordering::SeqCst);
    }

    /// Dies between two steps.
    pub fn die(&self) {
        self.dead.store(true, Ordering::SeqCst);
    }

    pub fn step(&self) {
        if self.is_dead() {
            return;
        }
        match self.left.load(Ordering::SeqCst) {
            0 => {
                self.die();
                // Without the hook, which would tell of a panic.
                resume_unwind(Box::new(Death));
            }
            u64::MAX => {}
            left => self.left.store(left - 1, Ordering::SeqCst),
        }
    }
}

/// Runs what may die. False if it did.
pub fn survives(work: impl FnOnce()) -> bool {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(()) => true,
        Err(panic) if panic.is::<Death>() => false,
        Err(panic) => resume_unwind(panic),
    }
}

/// The journal as one process sees it.
struct View {
    words: Arc<Vec<AtomicU64>>,
    process: Arc<Process>,
}

impl AsRef<[AtomicU64]> for View {
    fn as_ref(&self) -> &[AtomicU64] {
        self.process.step();
        &self.words
    }
}

pub fn journal_words() -> Arc<Vec<AtomicU64>> {
    Arc::new((0..JOURNAL_WORDS).map(|_| AtomicU64::new(0)).collect())
}

impl Bed {
    /// As [`Bed::with`], of a driver that puts up with no chain that it did not push.
    pub fn strict(spec: DeviceSpec) -> Self {
        let mut bed = Self::with(spec);
        bed.rings.iter_mut().for_each(|ring| ring.strict = true);
        bed
    }

    /// The next process begins, in the next session, and may die while it does. The device before touches nothing any more.
    pub fn succeed(&mut self, die_in: Option<u64>) -> bool {
        self.process.die();
        self.process = Arc::default();
        self.session += 1;
        let spec = DeviceSpec { session: self.session, ..self.spec.clone() };
        self.engine = ScriptEngine::new(Arc::new(HostEngine::new(self.memory.clone())), 1 << 20);
        self.device = Device::new(spec, self.engine.clone(), self.memory.clone(), self.seen.clone()).unwrap();
        self.rings.iter_mut().for_each(|ring| ring.strict = true);
        self.begin(die_in)
    }

    /// The device takes up the journal and the queues; its process may die while it does.
    pub fn begin(&mut self, die_in: Option<u64>) -> bool {
        self.process.die_in(die_in.unwrap_or(u64::MAX));
        for ring in &mut self.rings {
            ring.serve(&self.process);
        }
        let begun = survives(|| {
            let (words, process) = (self.journal.clone(), self.process.clone());
            self.device.keep_journal(Arc::new(View { words, process }));
            for (index, ring) in (0..).zip(&self.rings) {
                self.device.start_queue(index, ring.ring.clone());
            }
        });
        self.process.die_in(u64::MAX);
        begun
    }
}
