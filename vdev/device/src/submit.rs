//! Submission queues: chains of work from the ring into streams.
//!
//! A turn has three parts: take chains and copy all their bytes once, under the ring's lock; run the work, under none; write the records and
//! give the chains back, under the ring's lock again. Work that ends at once leaves no trace on the heap: its record waits in the turn. Only
//! work that must wait gets a [`Slot`], and its chain with it a life beyond the turn.
//!
//! Not here: streams' order beyond who may begin (`run` moves them on), parsing.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use vdev_wire::{COMPLETION_PENDING, Completion, DESCRIPTOR_SIZE, SUBMIT_HEADER_SIZE};
use virtio_queue::QueueT;
use vm_memory::GuestMemoryMmap;
use zerocopy::FromZeros;

use crate::RequestError;
use crate::complete::{Chain, Slot, write_record, write_refusals};
use crate::control::missing_domain;
use crate::device::Device;
use crate::domain::Domain;
use crate::observer::Counter;
use crate::op::{Credit, GuestWork, Op, Outcome, StreamKey, Task};
use crate::port::Port;
use crate::queue::{Area, Popped, Records, Visit};
use crate::run::{Fresh, Went};
use crate::streams::{Claim, Next};
use crate::sync::lock;
use crate::turn::{BYTES, Turn};
use crate::work::{BadBatch, Batch, Tag, Work, parse_batch, parse_work};

/// Chains of one turn.
const CHAINS: u64 = 32;
/// Work descriptors of one turn beyond which no further chain is taken.
const WORKS: usize = 256;
/// Steps on streams that wait, before new chains are taken.
const STEPS: usize = 64;

/// What a submission queue's thread keeps from turn to turn.
pub(crate) struct Submission {
    pub(crate) turn: Turn,
    bytes: Vec<u8>,
    chains: Vec<Taken>,
    works: Vec<(Tag, Result<Work, RequestError>)>,
    /// Records of `works`; those not written in this turn stay pending.
    records: Vec<Completion>,
    /// Since when there has been nothing to take; `None` while chains come.
    idle_since: Option<Instant>,
    /// The last turn that had chains moved as much as it may itself. Then the next takes no more than it can move; engines that only begin transfers have a turn take
    /// what there is.
    moves: bool,
}

/// One chain that was taken in this turn.
struct Taken {
    head: u16,
    records: Area,
    batch: Batch,
    /// Its part of `works` and `records`.
    range: Range<usize>,
    /// Set once some work outlives the turn.
    shared: Option<Arc<Chain>>,
}

/// One chain being run: `works` and `records` are the turn's.
struct Run<'a> {
    port: &'a Arc<Port>,
    taken: &'a mut Taken,
    works: &'a [(Tag, Result<Work, RequestError>)],
    records: &'a mut [Completion],
}

impl Run<'_> {
    /// Where the record of work goes that outlives the turn.
    fn slot(&mut self, index: usize, cookie: u64) -> Slot {
        let Taken { head, records, range, shared, .. } = &mut *self.taken;
        let count = u32::try_from(range.len()).unwrap_or(u32::MAX);
        let chain = shared.get_or_insert_with(|| Chain::new(self.port, *head, records.clone(), count));
        Slot::new(chain, u16::try_from(index.saturating_sub(range.start)).unwrap_or(u16::MAX), cookie)
    }
}

impl Submission {
    pub(crate) fn new() -> Self {
        let (bytes, chains, works, records) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { turn: Turn::new(), bytes, chains, works, records, idle_since: None, moves: true }
    }
}

impl Device {
    /// One turn of a submission queue. True if there may be more to do at once.
    pub(crate) fn submit_turn(&self, port: &Arc<Port>, state: &mut Submission) -> bool {
        if self.glance() {
            state.idle_since = None;
        }
        state.turn.glances = self.glances();
        state.turn.begin();
        self.run_ready(&mut state.turn, STEPS);
        state.turn.renew();
        let may_have_more = self.take_chains(port, state);
        let Submission { turn, chains, works, records, moves, .. } = state;
        let (mut flushed, mut moved) = (0, 0_u64);
        for next in 0..chains.len() {
            let Some(taken) = chains.get_mut(next) else { break };
            let range = taken.range.clone();
            self.run_chain(turn, &mut Run { port, taken, works, records });
            let bytes = records.get(range).unwrap_or_default().iter().map(|record| record.bytes.get());
            moved = moved.saturating_add(bytes.sum());
            if moved >= BYTES {
                let done = next.saturating_add(1);
                write_back(port, chains.get_mut(flushed..done).unwrap_or_default(), records);
                (flushed, moved) = (done, 0);
            }
        }
        write_back(port, chains.get_mut(flushed..).unwrap_or_default(), records);
        *moves = if chains.is_empty() { *moves } else { turn.is_spent() };
        chains.clear();
        self.settle(turn);
        let more = may_have_more || !self.ready.is_empty();
        if !more {
            self.rest();
        }
        more
    }

    /// Takes chains from the ring into the turn. True if there may be more; else the driver was asked to notify.
    fn take_chains(&self, port: &Arc<Port>, state: &mut Submission) -> bool {
        state.works.clear();
        state.records.clear();
        state.chains.clear();
        if self.pause.is_on() {
            return false;
        }
        let mut more = false;
        let (mut taken, mut bytes) = (0_u64, 0_u64);
        port.access(|queue, mem| {
            let mut used = false;
            let _ = queue.disable_notification(mem);
            let mut visit = Visit::new(queue, mem);
            let mut refused = 0_usize;
            let most = if state.moves { BYTES } else { u64::MAX };
            while taken < CHAINS && state.works.len().saturating_add(refused) < WORKS && bytes < most {
                let Some(popped) = port.pop(queue, &mut visit) else { break };
                taken = taken.saturating_add(1);
                let before = state.works.len();
                let Err(bad) = self.parse_chain(mem, &popped, state) else {
                    let works = state.works.get(before..).unwrap_or_default();
                    let asked = works.iter().map(|(_, work)| work.map_or(0, |work| work.operation.len()));
                    bytes = asked.fold(bytes, u64::saturating_add);
                    continue;
                };
                refused = refused.saturating_add(usize::from(bad.records));
                state.turn.tally.add(Counter::MalformedChains, 1);
                self.log_malformed(port, state.turn.now, &bad.error);
                let len = write_refusals(mem, &popped.writable, bad.records, &state.bytes, &bad.error);
                port.give_back(queue, mem, popped.head, len);
                used = true;
            }
            // While chains come, and for a little longer, nobody needs to be woken for them.
            let idle = state.turn.now.saturating_duration_since(state.idle_since.unwrap_or(state.turn.now));
            let lingers = taken > 0 || idle < self.spec.linger;
            more = if lingers { port.taking() } else { port.rest(queue, mem) };
            used
        });
        state.idle_since = if taken > 0 { None } else { state.idle_since.or(Some(state.turn.now)) };
        state.turn.tally.add(Counter::Chains, taken);
        state.records.resize(state.works.len(), pending());
        more
    }

    /// Reads a chain once, into `bytes`; only its header if it is longer than `longest`.
    pub(crate) fn read_chain<'b>(
        &self,
        mem: &GuestMemoryMmap,
        popped: &Popped,
        bytes: &'b mut Vec<u8>,
        longest: usize,
    ) -> Result<(Batch, &'b [[u8; DESCRIPTOR_SIZE]]), BadBatch> {
        let len = popped.readable.len();
        let front = if len <= longest { len } else { SUBMIT_HEADER_SIZE };
        let unread = || (!popped.readable.read_front(mem, bytes, front)).then_some("it is not in guest memory");
        if let Some(what) = popped.defect.or_else(unread) {
            return Err(BadBatch { records: 0, error: RequestError::Malformed { what } });
        }
        parse_batch(bytes, len, popped.writable.len(), self.spec.limits.max_batch)
    }

    /// Reads a chain once, and parses it into the turn.
    fn parse_chain(&self, mem: &GuestMemoryMmap, popped: &Popped, state: &mut Submission) -> Result<(), BadBatch> {
        let (batch, descriptors) = self.read_chain(mem, popped, &mut state.bytes, self.max_submission)?;
        let start = state.works.len();
        state.works.extend(descriptors.iter().map(|bytes| {
            let (tag, work) = parse_work(bytes);
            let late = tag.timeout_ms > self.limits.max_timeout_ms.get();
            let out_of_range = RequestError::OutOfRange { value: u64::from(tag.timeout_ms) };
            (tag, if late { work.and(Err(out_of_range)) } else { work })
        }));
        let range = start..state.works.len();
        state.chains.push(Taken { head: popped.head, records: popped.writable.clone(), batch, range, shared: None });
        Ok(())
    }

    fn run_chain(&self, turn: &mut Turn, run: &mut Run<'_>) {
        let all = run.taken.range.clone();
        let Batch { domain: id, session } = run.taken.batch;
        if session != self.spec.session {
            return self.refuse_all(turn, all, run, RequestError::Lost);
        }
        if !self.greeted.load(Ordering::Acquire) {
            return self.refuse_all(turn, all, run, RequestError::BeforeHello);
        }
        if turn.cached(id).is_none() {
            turn.cache(self.domain(id));
        }
        let Some(domain) = turn.cached(id).map(Arc::clone) else {
            return self.refuse_all(turn, all, run, missing_domain(id));
        };
        let mut next = all.start;
        while let Some((tag, _)) = run.works.get(next).filter(|_| next < all.end) {
            let rest = run.works.get(next..all.end).unwrap_or_default();
            let same = rest.iter().take_while(|(other, _)| other.stream == tag.stream).count();
            let end = next.saturating_add(same);
            self.run_stream(turn, &domain, StreamKey::guest(tag.stream), next..end, run);
            next = end;
        }
    }

    /// Work of one stream, in order: at once if the stream is idle and the engine executes at once, else into its queue.
    fn run_stream(
        &self,
        turn: &mut Turn,
        domain: &Arc<Domain>,
        key: StreamKey,
        mut left: Range<usize>,
        run: &mut Run<'_>,
    ) {
        while !left.is_empty() {
            let Some(credit) = self.credits.take() else {
                return self.refuse_all(turn, left, run, RequestError::Busy);
            };
            let claim = {
                let mut streams = lock(&domain.streams);
                // Looked at under the lock: what is queued after the domain began to go would never be cancelled.
                if domain.is_closing() {
                    Claim::Failed
                } else {
                    let cookie = run.works.get(left.start).map_or(0, |(tag, _)| tag.cookie);
                    streams.claim(key, cookie, self.limits.max_streams.count())
                }
            };
            match claim {
                Claim::Yours if turn.is_spent() => self.defer(turn, domain, key, &mut left, run, credit),
                Claim::Yours => self.run_claimed(turn, domain, key, &mut left, run, credit),
                Claim::Busy => {
                    drop(credit);
                    self.queue_all(turn, domain, key, &mut left, run);
                }
                Claim::Failed => return self.refuse_all(turn, left, run, RequestError::Cancelled),
                Claim::TooMany => {
                    let limit = u64::from(self.limits.max_streams.get());
                    return self.refuse_all(turn, left, run, RequestError::Limit { what: "streams", limit });
                }
            }
        }
    }

    /// Runs work of a stream whose turn is ours, until it does not end at once. Advances `left`.
    fn run_claimed(
        &self,
        turn: &mut Turn,
        domain: &Arc<Domain>,
        key: StreamKey,
        left: &mut Range<usize>,
        run: &mut Run<'_>,
        credit: Credit,
    ) {
        let first = left.start;
        while let Some((index, (tag, work))) = left.next().and_then(|index| Some((index, run.works.get(index)?))) {
            let went = match work {
                Ok(work) => self.begin(turn, domain, key, tag.cookie, Fresh::Guest(work)),
                Err(error) => Went::Ended(Outcome::refused(*error)),
            };
            let Went::Ended(outcome) = went else {
                let op = self.op(turn, index, run, credit);
                if index > first {
                    lock(&domain.streams).retake(key, tag.cookie);
                }
                return self.settle_went(turn, domain, key, op, went);
            };
            if let Some(record) = run.records.get_mut(index) {
                *record = self.account(turn, tag.cookie, &outcome);
            }
            if outcome.error.is_some() {
                let cancelled = lock(&domain.streams).fail(key);
                self.cancel(turn, cancelled, RequestError::Cancelled);
                break;
            }
            if turn.is_spent() && left.start < left.end {
                // Behind what others have queued meanwhile; the stream's turn is still ours, so nothing overtakes.
                drop(credit);
                self.queue_all(turn, domain, key, left, run);
                break;
            }
        }
        let next = lock(&domain.streams).ended(key);
        if next == Next::More {
            self.ready.push(domain, key);
        }
    }

    /// Leaves work of a stream whose turn is ours to a later turn, in which other streams have theirs, too.
    fn defer(
        &self,
        turn: &mut Turn,
        domain: &Arc<Domain>,
        key: StreamKey,
        left: &mut Range<usize>,
        run: &mut Run<'_>,
        credit: Credit,
    ) {
        if let Some(index) = left.next() {
            let op = self.op(turn, index, run, credit);
            self.put_back(turn, domain, key, op);
            self.queue_all(turn, domain, key, left, run);
        }
        self.ready.push(domain, key);
    }

    /// Queues work behind what its stream has, as far as credits go, and refuses the rest. Does nothing if nobody owns the stream's turn any
    /// more: it may be claimed then.
    fn queue_all(
        &self,
        turn: &mut Turn,
        domain: &Arc<Domain>,
        key: StreamKey,
        left: &mut Range<usize>,
        run: &mut Run<'_>,
    ) {
        let mut error = RequestError::Busy;
        let mut streams = lock(&domain.streams);
        if domain.is_closing() || streams.is_failed(key) {
            error = RequestError::Cancelled;
        } else if !streams.is_busy(key) {
            return;
        } else {
            while left.start < left.end && streams.count(key) < self.limits.stream_credits.count() {
                let Some(credit) = self.credits.take() else { break };
                let op = self.op(turn, left.start, run, credit);
                turn.wake |= self.flights.watch(op.deadline);
                streams.push(key, op);
                left.start = left.start.saturating_add(1);
            }
        }
        drop(streams);
        turn.changed = true;
        self.refuse_all(turn, left.clone(), run, error);
        left.start = left.end;
    }

    fn op(&self, turn: &Turn, index: usize, run: &mut Run<'_>, credit: Credit) -> Op {
        let (tag, work) = run.works.get(index).copied().unwrap_or((Tag::default(), Err(RequestError::Dropped)));
        let slot = run.slot(index, tag.cookie);
        let guest = GuestWork { work, cookie: tag.cookie, slot, _credit: credit };
        Op { task: Task::Guest(guest), deadline: self.deadline(turn.now, tag.timeout_ms), issued: None, aborted: None }
    }

    fn deadline(&self, now: Instant, timeout_ms: u32) -> Instant {
        let asked = Duration::from_millis(u64::from(timeout_ms)).min(self.limits.max_timeout());
        let timeout = if timeout_ms == 0 { self.limits.default_timeout() } else { asked };
        now.checked_add(timeout).unwrap_or(now)
    }

    fn refuse_all(&self, turn: &mut Turn, left: Range<usize>, run: &mut Run<'_>, error: RequestError) {
        for index in left {
            if let Some(((tag, _), record)) = run.works.get(index).zip(run.records.get_mut(index)) {
                *record = self.account(turn, tag.cookie, &Outcome::refused(error));
            }
        }
    }
}

/// Writes the records that the turn has, and gives back the chains that need nothing more.
fn write_back(port: &Port, chains: &mut [Taken], records: &[Completion]) {
    if chains.is_empty() {
        return;
    }
    port.access(|queue, mem| {
        let mut used = false;
        for taken in chains.iter() {
            let mut written = 0_u32;
            let writer = Records::new(mem, &taken.records);
            let mine = records.get(taken.range.clone()).unwrap_or_default();
            for (index, record) in (0..).zip(mine).filter(|(_, record)| record.status.get() != COMPLETION_PENDING) {
                write_record(&writer, index, record);
                written = written.saturating_add(1);
            }
            if let Some(chain) = &taken.shared {
                used |= written > 0 && chain.written(queue, mem, written);
            } else {
                port.give_back(queue, mem, taken.head, taken.records.len());
                used = true;
            }
        }
        used
    });
}

fn pending() -> Completion {
    Completion { status: COMPLETION_PENDING.into(), ..Completion::new_zeroed() }
}
