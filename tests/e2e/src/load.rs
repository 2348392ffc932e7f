//! A guest that never rests, and that keeps account of every descriptor it submits.
//!
//! It copies within its own memory, many chains at a time. Each descriptor must end exactly once: a chain that comes back twice, a record that is still
//! PENDING when its chain comes back, a cookie that is another's, or a copy that ended OK without its bytes having moved is an error and ends the load. When
//! the device begins a new session the guest takes back what it had submitted, says HELLO and goes on.
//!
//! A device that goes while the VM is there, as when an operator removes it, ends the load with [`Gone`]; until then the same holds.
//!
//! On demand it truncates its own memory, as a hostile VMM may, waits to be thrown out, and comes back as a new VM.
//!
//! Not here: who kills what, and when.

use std::fmt;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use harness::frontend::{EVENT_IDX, INDIRECT_DESC, VERSION_1};
use harness::ram::{Pages, memory_file};
use harness::virtqueue::Buffer;
use harness::{GuestRam, RawGuest};
use rustix::fs::SealFlags;
use vdev_wire::{
    ACCESS_READ, ACCESS_WRITE, Attach, COMPLETION_SIZE, Completion, DESCRIPTOR_SIZE, FIRST_SUBMIT_QUEUE, Map,
    MapSegment, Opcode, SUBMIT_HEADER_SIZE, Status, SubmitHeader, VERSION,
};
use zerocopy::{FromBytes, IntoBytes};

const RAM: u64 = 12 << 20;
const DOMAIN: u32 = 1;
const IOVA: u64 = 0x10_0000;
/// Chains at a time, each with a stream of its own.
const CHAINS: usize = 16;
/// Descriptors of one chain.
const BATCH: usize = 4;
/// Longest copy; the lengths are mixed.
const LONGEST: u64 = 64 << 10;
/// Room for the records behind a chain's descriptors.
const RECORDS: u64 = 2048;
const PATIENCE: Duration = Duration::from_secs(60);

/// How far it has come; readable while it runs.
#[derive(Debug, Default)]
pub struct Progress {
    /// Descriptors submitted.
    pub submitted: AtomicU64,
    /// Descriptors that ended OK, their bytes where they should be.
    pub ok: AtomicU64,
    /// Descriptors that ended LOST.
    pub lost: AtomicU64,
    /// Descriptors that were on their way in a VM that truncated its memory.
    pub forsaken: AtomicU64,
    /// Sessions begun.
    pub sessions: AtomicU64,
    /// VMs begun.
    pub vms: AtomicU64,
}

/// The device has gone: it has hung up, and answers nothing any more.
#[derive(Debug)]
pub struct Gone;

impl fmt::Display for Gone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("The device has gone")
    }
}

impl std::error::Error for Gone {}

impl Progress {
    /// Descriptors that have had an outcome.
    pub fn outcomes(&self) -> u64 {
        [&self.ok, &self.lost, &self.forsaken].iter().map(|counter| counter.load(Ordering::Relaxed)).sum()
    }
}

/// A load in a thread of its own. Dropping it stops it.
#[derive(Debug)]
pub struct Load {
    /// How far it has come.
    pub progress: Arc<Progress>,
    orders: Arc<Orders>,
    thread: Option<JoinHandle<Result<()>>>,
}

#[derive(Debug, Default)]
struct Orders {
    stop: AtomicBool,
    truncate: AtomicBool,
}

impl Load {
    /// Begins to load the tenant behind `socket`.
    pub fn start(socket: &Path) -> Result<Self> {
        let (progress, orders) = (Arc::new(Progress::default()), Arc::new(Orders::default()));
        let (socket, shared, told) = (socket.to_owned(), Arc::clone(&progress), Arc::clone(&orders));
        let run = move || Runner { socket, progress: shared, orders: told }.run();
        let thread = std::thread::Builder::new().name("load".into()).spawn(run)?;
        Ok(Self { progress, orders, thread: Some(thread) })
    }

    /// Has the VM truncate its memory under the device, soon.
    pub fn truncate(&self) {
        self.orders.truncate.store(true, Ordering::Relaxed);
    }

    /// Whether it has ended, which it does by itself only for an error.
    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until a number is reached.
    pub fn wait_for(&self, number: impl Fn(&Progress) -> u64, least: u64) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while number(&self.progress) < least {
            ensure!(!self.has_ended(), "The load has failed; stop() says why");
            ensure!(Instant::now() < deadline, "The load stands still: {:?}", self.progress);
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Waits until `by` more descriptors have ended well.
    pub fn goes_on(&self, by: u64) -> Result<()> {
        let ok = |progress: &Progress| progress.ok.load(Ordering::Relaxed);
        self.wait_for(ok, ok(&self.progress) + by)
    }

    /// Waits until the VM has noticed that its device has gone, and says whether everything was as it should be until then.
    pub fn gone(mut self) -> Result<()> {
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(Err(error))) if error.is::<Gone>() => Ok(()),
            Some(Ok(Err(error))) => Err(error),
            Some(Err(_)) => bail!("The load panicked"),
            Some(Ok(Ok(()))) | None => bail!("The load has ended without the device's end"),
        }
    }

    /// Lets what is on its way end, and says whether everything was as it should be.
    pub fn stop(mut self) -> Result<()> {
        self.orders.stop.store(true, Ordering::Relaxed);
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(_)) => bail!("The load panicked"),
            None => Ok(()),
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.orders.stop.store(true, Ordering::Relaxed);
    }
}

struct Runner {
    socket: PathBuf,
    progress: Arc<Progress>,
    orders: Arc<Orders>,
}

/// Why a VM ended.
enum End {
    Stopped,
    Truncated,
}

impl Runner {
    fn run(&self) -> Result<()> {
        loop {
            // Not sealed, as a VMM that means to truncate it would have it.
            let file = memory_file((1 << 20) + RAM, SealFlags::GROW)?;
            let ram = GuestRam::from_file(&file, RAM)?;
            let guest = RawGuest::connect_on(&self.socket, ram, 64, VERSION_1 | EVENT_IDX | INDIRECT_DESC)?;
            self.progress.vms.fetch_add(1, Ordering::Relaxed);
            match (Vm { guest, load: self, next: 1 }).run(&file)? {
                End::Stopped => return Ok(()),
                End::Truncated => {}
            }
        }
    }
}

struct Vm<'a> {
    guest: RawGuest,
    load: &'a Runner,
    next: u64,
}

/// Where one chain has its descriptors, its records and its bytes.
struct Slot {
    page: Pages,
    data: Pages,
    /// Head of the chain while the device has it, and the first of its cookies.
    on_its_way: Option<(u16, u64)>,
}

impl Vm<'_> {
    fn run(mut self, file: &File) -> Result<End> {
        let slot = |_| -> Result<Slot> {
            let data = self.guest.ram.alloc(BATCH as u64 * 2 * LONGEST)?;
            Ok(Slot { page: self.guest.ram.alloc(4096)?, data, on_its_way: None })
        };
        let mut slots = (0..CHAINS).map(slot).collect::<Result<Vec<_>>>()?;
        while !self.ordered() {
            if !self.begin(&slots)? {
                continue;
            }
            self.load.progress.sessions.fetch_add(1, Ordering::Relaxed);
            self.session(&mut slots)?;
        }
        if self.load.orders.stop.load(Ordering::Relaxed) {
            while slots.iter().any(|slot| slot.on_its_way.is_some()) {
                self.take_one(&mut slots)?;
            }
            return Ok(End::Stopped);
        }
        let left = slots.iter().filter(|slot| slot.on_its_way.is_some()).count() * BATCH;
        self.load.progress.forsaken.fetch_add(left as u64, Ordering::Relaxed);
        self.load.orders.truncate.store(false, Ordering::Relaxed);
        // From here on this process must not look at the memory either.
        rustix::fs::ftruncate(file.as_fd(), 0)?;
        self.guest.queues[usize::from(FIRST_SUBMIT_QUEUE)].raw_kick()?;
        ensure!(self.guest.front.wait_hangup(Instant::now() + PATIENCE)?, "A VM without memory is not thrown out");
        Ok(End::Truncated)
    }

    fn ordered(&self) -> bool {
        self.load.orders.stop.load(Ordering::Relaxed) || self.load.orders.truncate.load(Ordering::Relaxed)
    }

    /// HELLO, a domain, and the slots' bytes mapped. False if the session was over before that.
    fn begin(&mut self, slots: &[Slot]) -> Result<bool> {
        if self.guest.hello().is_err() {
            // Lost with the worker that should have answered; who has gone for good fails the next one with a deadline.
            self.unless_gone(Instant::now())?;
            self.guest.hello()?;
        }
        let attach = Attach { endpoint: 0.into(), flags: 0.into() };
        let attached = self.guest.control(Opcode::Attach, DOMAIN, &attach, 0)?.status;
        let mut body = Vec::from(
            Map {
                iova: IOVA.into(),
                flags: u32::from(ACCESS_READ | ACCESS_WRITE).into(),
                segment_count: u32::try_from(slots.len())?.into(),
            }
            .as_bytes(),
        );
        for slot in slots {
            let segment = MapSegment { gpa: slot.data.gpa().into(), len: (BATCH as u64 * 2 * LONGEST).into() };
            body.extend(segment.as_bytes());
        }
        let mapped = self.guest.control(Opcode::Map, DOMAIN, body.as_slice(), 0)?.status;
        for status in [attached, mapped] {
            ensure!(matches!(status, Status::Ok | Status::Lost | Status::Stale | Status::Inval), "{}", status.name());
        }
        Ok(attached == Status::Ok && mapped == Status::Ok)
    }

    /// Works until an order comes or the session is over, and then takes everything back unless the memory is about to go.
    fn session(&mut self, slots: &mut [Slot]) -> Result<()> {
        let mut over = false;
        while !over && !self.ordered() {
            for (number, slot) in slots.iter_mut().enumerate() {
                if slot.on_its_way.is_none() {
                    self.submit(number, slot)?;
                }
            }
            self.guest.submit_queue().publish()?;
            over = self.take_one(slots)?;
        }
        while over && slots.iter().any(|slot| slot.on_its_way.is_some()) {
            self.take_one(slots)?;
        }
        Ok(())
    }

    fn submit(&mut self, number: usize, slot: &mut Slot) -> Result<()> {
        let first = self.next;
        self.next += BATCH as u64;
        let header = SubmitHeader {
            version: VERSION.into(),
            count: u16::try_from(BATCH)?.into(),
            domain: DOMAIN.into(),
            flags: 0.into(),
            session: self.guest.session.into(),
        };
        let mut readable = Vec::from(header.as_bytes());
        for index in 0..BATCH as u64 {
            let cookie = first + index;
            let source = place(index);
            slot.data.write(source, &cookie.to_le_bytes())?;
            let at = IOVA + number as u64 * BATCH as u64 * 2 * LONGEST + source;
            let mut work = harness::raw::copy_work(cookie, at, at + LONGEST, length(cookie));
            work.stream = u32::try_from(number)?.into();
            readable.extend(work.as_bytes());
        }
        debug_assert_eq!(readable.len(), SUBMIT_HEADER_SIZE + BATCH * DESCRIPTOR_SIZE);
        slot.page.write(0, &readable)?;
        slot.page.write(RECORDS, &[0xff; BATCH * COMPLETION_SIZE])?;
        let gpa = slot.page.gpa();
        let buffers = [
            Buffer::readable(gpa, readable.len().try_into()?),
            Buffer::writable(gpa + RECORDS, (BATCH * COMPLETION_SIZE).try_into()?),
        ];
        let head = self.guest.submit_queue().add(&buffers)?.context("The queue has room for every slot")?;
        slot.on_its_way = Some((head, first));
        self.load.progress.submitted.fetch_add(BATCH as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Takes one chain back. True if it says that the session is over.
    fn take_one(&mut self, slots: &mut [Slot]) -> Result<bool> {
        let RawGuest { queues, front, .. } = &mut self.guest;
        let queue = &mut queues[usize::from(FIRST_SUBMIT_QUEUE)];
        let Some(used) = queue.wait_beside(&[front.socket()], Instant::now() + PATIENCE)? else {
            self.unless_gone(Instant::now())?;
            bail!("A chain does not come back");
        };
        ensure!(used.len as usize == BATCH * COMPLETION_SIZE, "A chain comes back with {} bytes", used.len);
        let known = |slot: &&mut Slot| slot.on_its_way.is_some_and(|(head, _)| head == used.head);
        let slot = slots.iter_mut().find(known).context("A chain comes back that was not on its way")?;
        let Some((_, first)) = slot.on_its_way.take() else { bail!("Found by it") };
        let mut over = false;
        for index in 0..BATCH as u64 {
            let mut bytes = [0; COMPLETION_SIZE];
            slot.page.read(RECORDS + index * COMPLETION_SIZE as u64, &mut bytes)?;
            let record = Completion::read_from_bytes(&bytes).ok().context("A record has a size")?;
            ensure!(record.cookie == first + index, "Record {} is in the place of {}", record.cookie, first + index);
            let status = Status::from_raw(record.status.get());
            let status = status.with_context(|| format!("Descriptor {} has no outcome", first + index))?;
            match status {
                Status::Ok => {
                    let mut moved = [0; 8];
                    slot.data.read(place(index) + LONGEST, &mut moved)?;
                    ensure!(moved == (first + index).to_le_bytes(), "OK, but the bytes have not moved");
                    self.load.progress.ok.fetch_add(1, Ordering::Relaxed);
                }
                Status::Lost => {
                    self.load.progress.lost.fetch_add(1, Ordering::Relaxed);
                    over = true;
                }
                Status::Cancelled | Status::IoErr => {
                    self.unless_gone(Instant::now() + PATIENCE)?;
                    bail!("A copy ended with {}, and the device is still there", status.name());
                }
                other => bail!("A copy ended with {}", other.name()),
            }
        }
        Ok(over)
    }

    /// [`Gone`] if the device has hung up by then.
    fn unless_gone(&self, deadline: Instant) -> Result<()> {
        if self.guest.front.wait_hangup(deadline)? { Err(Gone.into()) } else { Ok(()) }
    }
}

/// Where the bytes of a chain's descriptor are, with their destination [`LONGEST`] behind.
fn place(index: u64) -> u64 {
    index * 2 * LONGEST
}

/// From 64 bytes up to [`LONGEST`].
fn length(cookie: u64) -> u64 {
    64 << (cookie % 11)
}
