//! One transfer after another, each as commands of a driver.
//!
//! What goes between the engine's own memory and anything else in whole blocks goes straight; so does, through the engine's buffer, everything that an
//! engine without memory of its own moves. Parts of blocks, and what stays within the engine's own memory, go through memory of this process. What has
//! neither end in the engine's own memory, an engine that has some leaves to the processor.
//!
//! Not here: the queue of transfers, threads.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hw_engine::queue::Carrier;
use hw_engine::{EngineError, MAX_STAGED, MemoryError, Pair, Pairs, Transfer, Work, total_len};
use iommu_addr::{Access, ApertureOffset, EndpointId, Location, Segment};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmm_sys_util::eventfd::EventFd;

use crate::bounce::{self, Bounce};
use crate::flight::{Commands, Flight, Short};
use crate::host::{MapSink, chain};
use crate::reach::{End, Reach};
use crate::watch::FaultWatch;
use crate::{Command, Driver, Shape, VfioError};

/// Longest transfer in bytes: what is read or written for others is one.
pub(crate) const MAX_TRANSFER: u64 = MAX_STAGED;

/// Bytes that are erased at a time.
const ERASED: u64 = 1 << 30;

/// Codes of [`EngineError::Device`] that are none of the device's, beside those that every engine has.
pub(crate) mod code {
    /// The device did not end a command in time, and was reset.
    pub(crate) const STUCK: u32 = 0xffff_0001;
    /// The IOMMU could not be programmed.
    pub(crate) const IOMMU: u32 = 0xffff_0003;
    /// The IOMMU stopped it, which it did not say itself.
    pub(crate) const STOPPED: u32 = 0xffff_0005;
    /// Nobody knows whether the IOMMU stopped it.
    pub(crate) const UNWATCHED: u32 = 0xffff_0006;
}

pub(crate) struct Mover {
    // Both before the driver: when its function goes, the domain may go with it.
    bounce: Bounce,
    host: Arc<dyn MapSink>,
    driver: Box<dyn Driver>,
    reach: Arc<Reach>,
    /// For a driver that does not report faults.
    watch: Option<Watch>,
    interrupt: EventFd,
    /// How long the device may be without an end.
    patience: Duration,
    lost: bool,
}

impl Drop for Mover {
    fn drop(&mut self) {
        self.driver.stop();
    }
}

/// What is known of the IOMMU's faults.
struct Watch {
    of: Box<dyn FaultWatch>,
    /// At the last look.
    count: u64,
}

impl Mover {
    pub(crate) fn new(
        driver: Box<dyn Driver>,
        reach: Arc<Reach>,
        host: Arc<dyn MapSink>,
        watch: Option<Box<dyn FaultWatch>>,
        interrupt: EventFd,
        patience: Duration,
    ) -> Result<Self, VfioError> {
        let bounce = Bounce::new(&*host, reach.shape.mask)?;
        let watch = watch.filter(|_| !reach.shape.reports_faults).map(|of| Watch { of, count: 0 });
        let mut mover = Self { driver, reach, host, watch, bounce, interrupt, patience, lost: false };
        // What was before is none of ours. Without an answer nothing will be a success.
        let _ = mover.stopped();
        Ok(mover)
    }

    /// Reads the memory of an endpoint that is the engine's own.
    pub(crate) fn read(&mut self, endpoint: EndpointId, offset: u64, len: u64) -> Result<Vec<u8>, EngineError> {
        let own = self.own_place(endpoint, offset, len)?;
        self.read_own(own, len, &|| true).map_err(|short| short.error)
    }

    /// Writes it.
    pub(crate) fn write(&mut self, endpoint: EndpointId, offset: u64, bytes: &[u8]) -> Result<(), EngineError> {
        let own = self.own_place(endpoint, offset, bytes.len() as u64)?;
        self.write_own(own, bytes, &|| true).map_err(|short| short.error)
    }

    /// Makes all of it zero.
    pub(crate) fn erase(&mut self) -> Result<(), EngineError> {
        let Some(own) = self.reach.own else { return Ok(()) };
        let mut done = 0;
        while done < own.len {
            let len = ERASED.min(own.len - done);
            self.zero(own.start + done, len, &|| true).map_err(|short| short.error)?;
            done += len;
        }
        self.carry_out(vec![(Command::Flush, None)], &|| true).map_err(|short| short.error)
    }

    fn own_place(&self, endpoint: EndpointId, offset: u64, len: u64) -> Result<u64, EngineError> {
        let own = self.reach.own.filter(|own| own.endpoint == endpoint && len <= MAX_TRANSFER);
        let at = Location::Aperture { endpoint, offset: ApertureOffset(offset) };
        own.and_then(|own| own.place(offset, len)).ok_or(EngineError::Memory(MemoryError { at, len }))
    }

    /// Commands for a whole transfer that goes straight between the engine's own memory and others; `None` if some of it does not.
    fn straight_throughout(&self, dst: &[Segment], src: &[Segment]) -> Result<Option<Commands>, EngineError> {
        let mut all = Commands::new();
        for Pair { dst, src, len } in Pairs::new(dst, src) {
            // What is not there is found piece by piece, so that what comes before it is moved.
            let (Ok(dst), Ok(src)) = (self.reach.end(dst, len), self.reach.end(src, len)) else { return Ok(None) };
            let Some(commands) = self.straight_pair(dst, src, len)? else { return Ok(None) };
            all.extend(commands);
        }
        Ok(Some(all))
    }

    /// Commands for one piece that goes straight between the engine's own memory and others; `None` if it does not.
    fn straight_pair(&self, dst: End, src: End, len: u64) -> Result<Option<Commands>, EngineError> {
        match (dst, src) {
            (End::Own(own), End::Other(at)) => self.straight(own, at, len, true),
            (End::Other(at), End::Own(own)) => self.straight(own, at, len, false),
            (End::Own(_), End::Own(_)) | (End::Other(_), End::Other(_)) => Ok(None),
        }
    }

    fn copy(&mut self, pair: Pair, go_on: &dyn Fn() -> bool) -> Result<(), Short> {
        let Pair { dst, src, len } = pair;
        let (dst, src) = (self.reach.end(dst, len)?, self.reach.end(src, len)?);
        if let Some(commands) = self.straight_pair(dst, src, len)? {
            return self.carry_out(commands, go_on);
        }
        match (dst, src) {
            (End::Own(own), End::Other(at)) => {
                let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
                self.reach.memory.read(at, &mut bytes)?;
                self.write_own(own, &bytes, go_on)
            }
            (End::Other(at), End::Own(own)) => {
                let bytes = self.read_own(own, len, go_on)?;
                Ok(self.reach.memory.write(at, &bytes)?)
            }
            (End::Own(to), End::Own(from)) => {
                let bytes = self.read_own(from, len, go_on)?;
                self.write_own(to, &bytes, go_on)
            }
            (End::Other(to), End::Other(from)) if self.reach.shape.is_buffer => {
                self.through_buffer(to, from, len, go_on)
            }
            (End::Other(to), End::Other(from)) => Ok(self.reach.memory.copy(to, from, len)?),
        }
    }

    fn fill(&mut self, segment: Segment, pattern: u64, go_on: &dyn Fn() -> bool) -> Result<(), Short> {
        match self.reach.end(segment.at, segment.len)? {
            End::Other(at) => Ok(self.reach.memory.fill(at, segment.len, pattern)?),
            End::Own(own) if pattern == 0 => self.zero(own, segment.len, go_on),
            End::Own(own) => {
                let len = usize::try_from(segment.len).unwrap_or(0);
                let bytes: Vec<u8> = pattern.to_le_bytes().into_iter().cycle().take(len).collect();
                self.write_own(own, &bytes, go_on)
            }
        }
    }

    /// Makes own memory zero; by the device itself where it can.
    fn zero(&mut self, own: u64, len: u64, go_on: &dyn Fn() -> bool) -> Result<(), Short> {
        let Shape { granule, zeroes, .. } = self.reach.shape;
        let most = zeroes / granule * granule;
        if most > 0 && own.is_multiple_of(granule) && len.is_multiple_of(granule) {
            let step = usize::try_from(most).unwrap_or(usize::MAX);
            let command = |at| (Command::Zero { own: own + at, len: most.min(len - at) }, None);
            return self.carry_out((0..len).step_by(step).map(command).collect(), go_on);
        }
        let mut done = 0;
        while done < len {
            let bytes = vec![0; usize::try_from(MAX_TRANSFER.min(len - done)).unwrap_or(0)];
            self.write_own(own + done, &bytes, go_on).map_err(|short| Short { bytes: done + short.bytes, ..short })?;
            done += bytes.len() as u64;
        }
        Ok(())
    }

    fn flush(&mut self, initiator: EndpointId) -> Result<(), Short> {
        if self.reach.own.is_some_and(|own| own.endpoint == initiator) {
            return self.carry_out(vec![(Command::Flush, None)], &|| true);
        }
        Ok(())
    }

    /// Commands between the engine's own memory and `at`; `None` if whole blocks and the bus's alignment do not allow it.
    fn straight(&self, own: u64, at: Location, len: u64, is_in: bool) -> Result<Option<Commands>, EngineError> {
        let Some(places) = self.reach.straight(own, at, len)? else { return Ok(None) };
        let access = if is_in { Access::READ } else { Access::WRITE };
        let mut own = own;
        let mut commands = Vec::with_capacity(places.len());
        for place in places {
            let mapped = self.host.map(&place, access, self.reach.shape.mask).map_err(|error| unmappable(&error))?;
            let (bus, len) = (mapped.first, mapped.len);
            commands.push((
                if is_in { Command::In { own, bus, len } } else { Command::Out { own, bus, len } },
                Some(mapped),
            ));
            own += len;
        }
        Ok(Some(commands))
    }

    /// From anywhere to anywhere through the engine's buffer, as if through one that holds all of it.
    fn through_buffer(
        &mut self,
        to: Location,
        from: Location,
        len: u64,
        go_on: &dyn Fn() -> bool,
    ) -> Result<(), Short> {
        let step = self.reach.shape.own_len.min(self.reach.shape.most);
        let mut steps: Vec<u64> = (0..len).step_by(usize::try_from(step).unwrap_or(usize::MAX)).collect();
        // Against overlap: towards higher addresses the last bytes go first, and then all of them, as what is moved is counted from the first.
        let (backwards, on) = (is_behind(to, from), || true);
        if backwards {
            steps.reverse();
        }
        for at in steps {
            let len = step.min(len - at);
            let go_on: &dyn Fn() -> bool = if backwards { &on } else { go_on };
            for (place, is_in) in [(from, true), (to, false)] {
                let done = self.buffer_step(place, at, len, is_in, go_on);
                done.map_err(|error| Short { bytes: if backwards { 0 } else { at }, error })?;
            }
        }
        Ok(())
    }

    /// One way between the buffer and `len` bytes behind `place`.
    fn buffer_step(
        &mut self,
        place: Location,
        at: u64,
        len: u64,
        is_in: bool,
        go_on: &dyn Fn() -> bool,
    ) -> Result<(), EngineError> {
        let missing = EngineError::Memory(MemoryError { at: place, len });
        let place = place.checked_add(at).ok_or(missing)?;
        let commands = self.straight(0, place, len, is_in)?.ok_or(missing)?;
        self.carry_out(commands, go_on).map_err(|short| short.error)
    }

    /// Bytes of the engine's own memory, in whole blocks around them.
    fn read_own(&mut self, own: u64, len: u64, go_on: &dyn Fn() -> bool) -> Result<Vec<u8>, Short> {
        let (first, whole) = self.around(own, len);
        self.bounced(first, whole, false, go_on).map_err(|short| short.error)?;
        Ok(self.bounce.read(own - first, len))
    }

    /// The same the other way; what else is in the first and the last block stays.
    fn write_own(&mut self, own: u64, bytes: &[u8], go_on: &dyn Fn() -> bool) -> Result<(), Short> {
        let (first, whole) = self.around(own, bytes.len() as u64);
        if (first, whole) != (own, bytes.len() as u64) {
            self.bounced(first, whole, false, go_on).map_err(|short| short.error)?;
        }
        self.bounce.write(own - first, bytes);
        let (lead, len) = (own - first, bytes.len() as u64);
        let done = self.bounced(first, whole, true, go_on);
        done.map_err(|short| Short { bytes: short.bytes.saturating_sub(lead).min(len), ..short })
    }

    fn around(&self, own: u64, len: u64) -> (u64, u64) {
        let granule = self.reach.shape.granule;
        let first = own / granule * granule;
        (first, (own - first + len).next_multiple_of(granule))
    }

    fn bounced(&mut self, own: u64, len: u64, is_in: bool, go_on: &dyn Fn() -> bool) -> Result<(), Short> {
        debug_assert!(len <= bounce::LEN, "a transfer is no longer than this");
        let most = self.reach.shape.most;
        let step = usize::try_from(most).unwrap_or(usize::MAX);
        let command = |at: u64| {
            let (own, bus, len) = (own + at, self.bounce.bus(at), most.min(len - at));
            if is_in { Command::In { own, bus, len } } else { Command::Out { own, bus, len } }
        };
        let commands = (0..len).step_by(step).map(|at| (command(at), None)).collect();
        self.carry_out(commands, go_on)
    }

    /// Runs commands to their ends, as many at a time as the device takes. What they need stays mapped until they have ended.
    fn carry_out(&mut self, commands: Commands, go_on: &dyn Fn() -> bool) -> Result<(), Short> {
        if self.lost {
            return Err(EngineError::LOST.into());
        }
        // What does not go over the bus, the IOMMU cannot stop; and freed memory is zeroed also while nobody knows what it stops.
        let is_on_bus = commands.iter().any(|(command, _)| matches!(command, Command::In { .. } | Command::Out { .. }));
        let mut flight = Flight::new(commands, self.reach.shape.depth);
        let (mut ended, mut last) = (Vec::new(), Instant::now());
        loop {
            if !go_on() {
                flight.give_up();
            }
            while let Some((slot, command)) = flight.next() {
                self.driver.start(slot, command);
            }
            if flight.is_over() {
                // Asked also after an error, so that a fault is counted once.
                let stopped = if is_on_bus { self.stopped() } else { Ok(()) };
                return flight.result().and(stopped.map_err(Short::from));
            }
            self.driver.poll(&mut ended);
            if ended.is_empty() {
                self.wait(last).map_err(|error| flight.gone(error))?;
                continue;
            }
            last = Instant::now();
            ended.drain(..).for_each(|(slot, outcome)| flight.end(slot, outcome));
        }
    }

    /// Fails if the IOMMU has stopped the device since the last look, which no device's command says.
    fn stopped(&mut self) -> Result<(), EngineError> {
        let Some(watch) = &mut self.watch else { return Ok(()) };
        match watch.of.count() {
            Ok(count) if count == watch.count => Ok(()),
            Ok(count) => {
                watch.count = count;
                Err(EngineError::Device { code: code::STOPPED })
            }
            Err(_) => Err(EngineError::Device { code: code::UNWATCHED }),
        }
    }

    /// Waits for the interrupt. A device that has ended nothing for too long is reset; then nothing of it runs any more.
    fn wait(&mut self, since: Instant) -> Result<(), EngineError> {
        let left = self.patience.saturating_sub(since.elapsed());
        if left.is_zero() {
            return Err(self.revive());
        }
        let left = Timespec::try_from(left.min(LOOK)).unwrap_or(Timespec { tv_sec: 0, tv_nsec: 0 });
        // SAFETY: the counter is open as long as it lives.
        let counter = unsafe { BorrowedFd::borrow_raw(self.interrupt.as_raw_fd()) };
        // Interrupted or not: whoever waits looks again.
        let _ = poll(&mut [PollFd::new(&counter, PollFlags::IN)], Some(&left));
        // Counts since the last look; it does not block.
        let _ = self.interrupt.read();
        Ok(())
    }

    fn revive(&mut self) -> EngineError {
        tracing::error!("A device has ended no command for {:?}; it is reset", self.patience);
        match self.driver.reset() {
            Ok(()) => EngineError::Device { code: code::STUCK },
            Err(error) => {
                tracing::error!("A device did not come back from its reset: {}", chain(&error));
                self.lost = true;
                EngineError::LOST
            }
        }
    }
}

impl Carrier for Mover {
    /// `go_on` is asked between pieces.
    fn run(&mut self, transfer: &Transfer, go_on: &dyn Fn() -> bool) -> (u64, Result<(), EngineError>) {
        let mut bytes = 0;
        let result = match &transfer.work {
            Work::Copy { src, dst, .. } => match self.straight_throughout(dst, src) {
                Ok(Some(commands)) => self.carry_out(commands, go_on).map(|()| bytes = total_len(dst)),
                Ok(None) => Pairs::new(dst, src).try_for_each(|pair| {
                    self.copy(pair, go_on)?;
                    bytes += pair.len;
                    Ok(())
                }),
                Err(error) => Err(error.into()),
            },
            Work::Fill { dst, pattern } => dst.iter().try_for_each(|segment| {
                let turned = pattern.rotate_right(u32::try_from(bytes % 8 * 8).unwrap_or(0));
                self.fill(*segment, turned, go_on)?;
                bytes += segment.len;
                Ok(())
            }),
            Work::Flush => self.flush(transfer.initiator),
            Work::Kernel { .. } => Err(EngineError::NO_KERNELS.into()),
            Work::Atomic { .. } => Err(EngineError::NO_ATOMICS.into()),
        };
        match result {
            Ok(()) => (bytes, Ok(())),
            Err(Short { bytes: more, error }) => (bytes + more, Err(error)),
        }
    }

    fn rest(&mut self) {
        self.host.rest();
    }
}

/// How long an abort may take to be seen, and an interrupt that never came.
const LOOK: Duration = Duration::from_millis(100);

fn unmappable(error: &VfioError) -> EngineError {
    tracing::error!("{}", chain(error));
    EngineError::Device { code: code::IOMMU }
}

/// Whether `to` is in the same space as `from`, at a higher address.
fn is_behind(to: Location, from: Location) -> bool {
    match (to, from) {
        (Location::Ram(to), Location::Ram(from)) => to > from,
        (Location::Aperture { endpoint: a, offset: to }, Location::Aperture { endpoint: b, offset: from }) => {
            a == b && to > from
        }
        _ => false,
    }
}
