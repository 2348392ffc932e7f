//! The suite passes a right engine and catches wrong ones.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::{FlatMemory, Parts, run};
use crate::{
    DmaEngine, EngineCaps, EngineError, Finished, JobId, Memory, Submit, Transfer, Work, copy_segments, fill_segments,
};

/// What is wrong with an engine.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    /// The last byte of a copy stays behind.
    Short,
    /// One byte too many is written.
    Long,
    /// An error claims that nothing was moved.
    Count,
    /// A fill begins anew in each segment.
    Phase,
    /// An end is reported twice.
    Twice,
    /// Ends come in the wrong order, flushes first.
    Flush,
    /// An abort loses the transfer.
    Abort,
    /// Ends stay behind when all is quiet.
    Quiet,
}

/// Moves bytes at once and reports the end later, four transfers at a time.
struct Plain {
    memory: Arc<FlatMemory>,
    flaw: Flaw,
    ends: Mutex<VecDeque<Finished>>,
}

impl Plain {
    fn work(&self, work: &Work) -> Result<u64, crate::CopyError> {
        let memory = &*self.memory;
        match work {
            Work::Copy { src, dst, route } => {
                let mut src = src.clone();
                if let (Flaw::Short, Some(last)) = (self.flaw, src.last_mut()) {
                    last.len -= 1;
                }
                let moved = copy_segments(memory, dst, &src, *route);
                if let (Flaw::Long, Ok(_), Some(last)) = (self.flaw, &moved, dst.last()) {
                    let _ = last.at.checked_add(last.len).map(|behind| memory.write(behind, &[0x5a]));
                }
                moved
            }
            Work::Fill { dst, pattern } if self.flaw == Flaw::Phase => {
                dst.iter().try_fold(0, |sum, part| Ok(sum + fill_segments(memory, &[*part], *pattern)?))
            }
            Work::Fill { dst, pattern } => fill_segments(memory, dst, *pattern),
            Work::Atomic { .. } | Work::Kernel { .. } | Work::Flush => Ok(0),
        }
    }
}

impl DmaEngine for Plain {
    fn caps(&self) -> EngineCaps {
        EngineCaps { max_transfer: 1 << 20, queue_depth: 4, reports_faults: true, max_mappings: u32::MAX }
    }

    fn submit(&self, transfer: &Transfer) -> Result<Submit, EngineError> {
        let mut ends = self.ends.lock().expect("no test thread panics here");
        if ends.len() >= 4 {
            return Err(EngineError::Busy);
        }
        let mut end = Finished::moved(transfer.job, self.work(&transfer.work));
        if self.flaw == Flaw::Count && end.result.is_err() {
            end.bytes = 0;
        }
        if self.flaw == Flaw::Twice {
            ends.push_back(end.clone());
        }
        match (self.flaw, &transfer.work) {
            (Flaw::Flush, Work::Flush) => ends.push_front(end),
            _ => ends.push_back(end),
        }
        Ok(Submit::Submitted)
    }

    fn poll(&self, out: &mut Vec<Finished>) -> Option<Duration> {
        let mut ends = self.ends.lock().expect("no test thread panics here");
        out.extend(ends.pop_front());
        (!ends.is_empty()).then_some(Duration::ZERO)
    }

    fn abort(&self, job: JobId) {
        if self.flaw == Flaw::Abort {
            self.ends.lock().expect("no test thread panics here").retain(|end| end.job != job);
        }
    }

    fn quiesce(&self, out: &mut Vec<Finished>) {
        if self.flaw != Flaw::Quiet {
            out.extend(self.ends.lock().expect("no test thread panics here").drain(..));
        }
    }
}

fn conforms(flaw: Flaw) -> bool {
    let rig = || {
        let memory = Arc::new(FlatMemory::new());
        let engine = Plain { memory: Arc::clone(&memory), flaw, ends: Mutex::default() };
        Parts { engine: Arc::new(engine), memory: memory as Arc<dyn Memory>, advance: Some(Box::new(|_| ())) }
    };
    std::panic::catch_unwind(|| run(&rig)).is_ok()
}

#[test]
fn the_suite_passes_a_plain_engine() {
    assert!(conforms(Flaw::None));
}

#[test]
fn the_suite_catches_each_flaw() {
    let flaws = [Flaw::Short, Flaw::Long, Flaw::Count, Flaw::Phase, Flaw::Twice, Flaw::Flush, Flaw::Abort, Flaw::Quiet];
    for (index, flaw) in flaws.into_iter().enumerate() {
        assert!(!conforms(flaw), "flaw {index} went unnoticed");
    }
}
