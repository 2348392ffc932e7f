//! What the self-test says of a device that loses its state under work in flight: all is well, or the row that is about what is not.

#[path = "../../lib/tests/fake/mod.rs"]
mod fake;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use fake::{Fake, Sabotage};
use peergate_guest::uapi::{Alloc, Completion, Endpoint, Event, Info, Peer, Stream, Work};
use peergate_guest::{Channel, Driver, Error, HostMemory, Status};
use pgctl::selftest::{Options, Row, until_loss};

/// A device that can lose its state: what was opened before answers as `after` and `work` say from then on.
#[derive(Clone)]
struct Losing {
    inner: Fake,
    losses: Arc<AtomicU32>,
    request: Status,
    work: Status,
}

struct Old {
    inner: Box<dyn Channel>,
    device: Losing,
    opened: u32,
    lost: Mutex<VecDeque<Completion>>,
}

impl Driver for Losing {
    fn open(&self) -> Result<Box<dyn Channel>, Error> {
        let opened = self.losses.load(Ordering::SeqCst);
        Ok(Box::new(Old { inner: self.inner.open()?, device: self.clone(), opened, lost: Mutex::default() }))
    }
}

impl Old {
    fn is_lost(&self) -> bool {
        self.device.losses.load(Ordering::SeqCst) != self.opened
    }

    fn check(&self, call: &'static str) -> Result<(), Error> {
        let status = self.device.request;
        if self.is_lost() && status != Status::Ok { Err(Error::Refused { call, status }) } else { Ok(()) }
    }
}

impl Channel for Old {
    fn info(&self) -> Result<Info, Error> {
        self.inner.info()
    }
    fn endpoint(&self, index: u32) -> Result<Endpoint, Error> {
        self.check("ENDPOINT")?;
        self.inner.endpoint(index)
    }
    fn map(&self, len: u64, flags: u32) -> Result<Box<dyn HostMemory>, Error> {
        self.check("MAP")?;
        self.inner.map(len, flags)
    }
    fn unmap(&self, iova: u64, len: u64) -> Result<(), Error> {
        self.inner.unmap(iova, len)
    }
    fn alloc(&self, request: Alloc) -> Result<Alloc, Error> {
        self.check("ALLOC")?;
        self.inner.alloc(request)
    }
    fn free(&self, handle: u64) -> Result<(), Error> {
        self.inner.free(handle)
    }
    fn peer(&self, request: Peer) -> Result<Peer, Error> {
        self.inner.peer(request)
    }
    fn submit(&self, queue: u32, work: &[Work]) -> Result<usize, Error> {
        if !self.is_lost() {
            return self.inner.submit(queue, work);
        }
        let status = self.device.work.to_raw();
        let lost = work.iter().map(|work| Completion { cookie: work.cookie, status, ..Completion::default() });
        self.lost.lock().expect("sound").extend(lost);
        Ok(work.len())
    }
    fn completions(&self, into: &mut [Completion], at_least: usize, deadline: Instant) -> Result<usize, Error> {
        let mut lost = self.lost.lock().expect("sound");
        if lost.is_empty() {
            return self.inner.completions(into, at_least, deadline);
        }
        let count = lost.len().min(into.len());
        for (slot, completion) in into.iter_mut().zip(lost.drain(..count)) {
            *slot = completion;
        }
        Ok(count)
    }
    fn stream(&self, request: Stream) -> Result<Stream, Error> {
        self.inner.stream(request)
    }
    fn event(&self, deadline: Instant) -> Result<Option<Event>, Error> {
        self.inner.event(deadline)
    }
}

/// The rows on a device that answers requests and work of before the loss as given.
fn rows(request: Status, work: Status) -> Vec<Row> {
    let device = Losing { inner: Fake::new(Sabotage::None), losses: Arc::default(), request, work };
    let losses = Arc::clone(&device.losses);
    let mut rows = Vec::new();
    let options = Options { size: 64 << 10, ..Options::default() };
    let mut lose = || {
        losses.fetch_add(1, Ordering::SeqCst);
    };
    until_loss(&device, &options, &mut lose, &mut |row| rows.push(row.clone())).expect("the device loses its state");
    rows
}

fn failed(rows: &[Row]) -> Vec<&str> {
    rows.iter().filter(|row| !row.ok).map(|row| row.name.as_str()).collect()
}

#[test]
fn lost_work_and_stale_requests_are_as_they_must_be() {
    let rows = rows(Status::Stale, Status::Lost);
    assert_eq!(failed(&rows), Vec::<&str>::new(), "{rows:?}");
    assert_eq!(rows.len(), 7);
}

#[test]
fn work_that_ends_otherwise_fails_the_rows_about_work() {
    let rows = rows(Status::Stale, Status::DevErr);
    assert_eq!(failed(&rows), ["loss/work-in-flight", "loss/work-of-the-old-open"]);
}

#[test]
fn requests_that_end_otherwise_fail_the_rows_about_requests() {
    let rows = rows(Status::Inval, Status::Lost);
    let expected = [
        "loss/request-in-flight",
        "loss/endpoints-of-the-old-open",
        "loss/alloc-of-the-old-open",
        "loss/map-of-the-old-open",
    ];
    assert_eq!(failed(&rows), expected);
}
