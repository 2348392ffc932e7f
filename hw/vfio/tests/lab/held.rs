//! What a mapping allows while it is held, and what ends it, with single commands of the NVMe controller: rights, revocation, and what heals it.
//!
//! Prints a line `fact NAME VALUE` each; what each must be, the lab knows.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use hw_engine::conformance::APERTURES;
use hw_engine::{DmaEngine, EngineError, JobId, Memory, Place, Route, Segments, Transfer, Work};
use hw_host::HostMemory;
use hw_vfio::{Command, Driver, Function, Host, Kind, MapSink, Mapped, VfioEngine, VfioError, drivers};
use iommu_addr::{Access, ApertureOffset, BusAddr, DomainId, Gpa, Location, Segment};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::common::World;
use crate::{Domain, address, memory, nvme};

const KIND: Kind = Kind::Nvme { namespace: 1 };
const PAGE: usize = 4096;
const LEN: u64 = PAGE as u64;
/// A page of guest memory, and a page behind the BAR.
const RAM: Location = Location::Ram(Gpa(0x2000));
const BAR: Location = Location::Aperture { endpoint: APERTURES[1].0, offset: ApertureOffset(0x5000) };
/// The configuration space: which region of a function it is, its command register, and that register's bit that has memory answer.
const CONFIG: u32 = 7;
const COMMAND: u64 = 4;
const DECODES: u16 = 1 << 1;
/// How long the hardware and the kernel may take for anything here; reached only if it does not come.
const PATIENCE: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };

type Bytes = [u8; PAGE];

/// A controller, and memory behind another function's BAR.
struct Bench {
    host: Arc<Host>,
    driver: Box<dyn Driver>,
    interrupt: EventFd,
    bar: Function,
    memory: Arc<HostMemory>,
    log: KernelLog,
}

pub(crate) fn run() {
    let mut bench = Bench::new();
    bench.by_address();
    bench.peer_to_peer();
    bench.rights();
    bench.decoding();
    bench.reset();
    bench.engine();
}

fn fact(name: &str, value: &str) {
    println!("fact {name} {value}");
}

/// After so long, the kernel tells of a few stopped accesses again: of three in 5 s, and of no more (`drivers/iommu/intel/dmar.c`, `dmar_fault`).
const SILENCE: Duration = Duration::from_secs(6);

/// A pattern that no page has by chance.
fn bytes(seed: u8) -> Bytes {
    std::array::from_fn(|n| seed ^ u8::try_from((n * 7 + n / 256) & 0xff).unwrap())
}

impl Bench {
    fn new() -> Self {
        let host = Domain::Iommufd.host();
        let function = Function::open(&host, &address("nvme0")).unwrap();
        let log = KernelLog::new(function.address());
        let bar = Function::open(&host, &address("mem0")).unwrap();
        let memory = memory(Domain::Iommufd, &bar, 1);
        let interrupt = EventFd::new(EFD_NONBLOCK).unwrap();
        let driver = drivers::open(KIND, function, &interrupt).unwrap();
        Self { host, driver, interrupt, bar, memory, log }
    }

    fn place(&self, at: Location) -> Place {
        self.memory.place(at, LEN).unwrap()
    }

    fn map(&self, at: Location, access: Access) -> Mapped {
        self.host.map(&self.place(at), access, u64::MAX).unwrap()
    }

    fn carry_out(&mut self, command: Command) {
        let mut ended = Vec::new();
        self.driver.start(0, command);
        while ended.is_empty() {
            // SAFETY: the counter is open as long as it lives.
            let counter = unsafe { BorrowedFd::borrow_raw(self.interrupt.as_raw_fd()) };
            let ready = poll(&mut [PollFd::new(&counter, PollFlags::IN)], Some(&PATIENCE)).unwrap();
            assert!(ready == 1, "a command ends, whatever the IOMMU does");
            self.interrupt.read().unwrap();
            self.driver.poll(&mut ended);
        }
        assert_eq!(ended, [(0, Ok(()))]);
    }

    /// The controller writes what it stores there.
    fn write_to(&mut self, bus: BusAddr) {
        self.carry_out(Command::Out { own: 0, bus, len: LEN });
    }

    /// The controller stores what it reads there.
    fn read_from(&mut self, bus: BusAddr) {
        self.carry_out(Command::In { own: 0, bus, len: LEN });
    }

    fn get(&self, at: Location) -> Bytes {
        let mut bytes = [0; PAGE];
        self.memory.read(at, &mut bytes).unwrap();
        bytes
    }

    fn put(&self, at: Location, bytes: &Bytes) {
        self.memory.write(at, bytes).unwrap();
    }

    /// Has the controller store bytes.
    fn store(&mut self, bytes: &Bytes) {
        self.put(RAM, bytes);
        let mapped = self.map(RAM, Access::READ);
        self.read_from(mapped.first);
    }

    /// What the controller stores.
    fn stored(&mut self) -> Bytes {
        let mapped = self.map(RAM, Access::WRITE);
        self.write_to(mapped.first);
        self.get(RAM)
    }

    /// Whether what the controller writes there arrives at `at`, as the owner of that memory sees it.
    fn arrives(&mut self, bus: BusAddr, at: Location) -> &'static str {
        let (before, sent) = (bytes(0x11), bytes(0xee));
        self.store(&sent);
        self.put(at, &before);
        self.write_to(bus);
        match self.get(at) {
            seen if seen == sent => "arrives",
            seen if seen == before => "stopped",
            _ => "torn",
        }
    }

    /// Memory behind a BAR by its address, as type1 takes it.
    fn by_address(&self) {
        let place = Place { buffer: None, ..self.place(BAR) };
        fact("bar-by-its-address", self.refusal(&place));
    }

    fn refusal(&self, place: &Place) -> &'static str {
        let refused = match self.host.map(place, Access::RW, u64::MAX) {
            Err(VfioError::Map { source, .. }) => source.raw_os_error(),
            _ => None,
        };
        match refused {
            Some(libc::EFAULT) => "EFAULT",
            Some(libc::ENODEV) => "ENODEV",
            _ => "unclear",
        }
    }

    fn peer_to_peer(&mut self) {
        let mapped = self.map(BAR, Access::WRITE);
        let arrives = self.arrives(mapped.first, BAR);
        fact("nvme-to-bar", arrives);
        drop(mapped);
        let sent = bytes(0x5a);
        self.put(BAR, &sent);
        let mapped = self.map(BAR, Access::READ);
        self.read_from(mapped.first);
        fact("bar-to-nvme", if self.stored() == sent { "arrives" } else { "wrong" });
    }

    fn rights(&mut self) {
        for (name, at) in [("ram", RAM), ("bar", BAR)] {
            let mapped = self.map(at, Access::READ);
            self.log.forget();
            let outcome = self.arrives(mapped.first, at);
            fact(&format!("{name}-to-be-read/write"), outcome);
            fact(&format!("{name}-to-be-read/kernel"), self.log.says("DMA Write", mapped.first));
            drop(mapped);
            let mapped = self.map(at, Access::WRITE);
            let before = bytes(0x33);
            self.store(&before);
            self.put(at, &bytes(0xcc));
            self.log.forget();
            self.read_from(mapped.first);
            let says = self.log.says("DMA Read", mapped.first);
            drop(mapped);
            fact(
                &format!("{name}-to-be-written/read"),
                if self.stored() == bytes(0xcc) { "arrives" } else { "stopped" },
            );
            fact(&format!("{name}-to-be-written/kernel"), says);
        }
    }

    /// A mapping that is held while the memory behind it does not answer, and then answers again.
    fn decoding(&mut self) {
        let held = self.map(BAR, Access::WRITE);
        fact("decoding/held", self.arrives(held.first, BAR));
        let before = bytes(0x11);
        self.put(BAR, &before);
        self.log.forget();
        decode(&self.bar, false);
        self.write_to(held.first);
        fact("decoding-off/kernel", self.log.says("DMA Write", held.first));
        fact("decoding-off/mapped", self.refusal(&self.place(BAR)));
        decode(&self.bar, true);
        fact("decoding-off/held", if self.get(BAR) == before { "stopped" } else { "arrives" });
        self.over("decoding-on-again", held);
    }

    /// The same of a function that is reset.
    fn reset(&mut self) {
        let held = self.map(BAR, Access::WRITE);
        fact("reset/held-before", self.arrives(held.first, BAR));
        self.bar.reset();
        self.over("reset", held);
    }

    /// What is left of a mapping that was held, and what heals it.
    fn over(&mut self, name: &str, held: Mapped) {
        let fact = |what: &str, value: &str| fact(&format!("{name}/{what}"), value);
        self.log.forget();
        fact("held", self.arrives(held.first, BAR));
        fact("kernel", self.log.says("DMA Write", held.first));
        let beside = self.map(BAR, Access::WRITE);
        fact("mapped-beside", self.arrives(beside.first, BAR));
        fact("still-held", self.arrives(held.first, BAR));
        drop((held, beside));
        let anew = self.map(BAR, Access::WRITE);
        fact("mapped-anew", self.arrives(anew.first, BAR));
    }

    /// The engine, which maps for each command: it says that memory is gone, and goes on when it is back.
    fn engine(self) {
        let Self { host, driver, bar, memory, .. } = self;
        drop(driver);
        let function = Function::open(&host, &address("nvme0")).unwrap();
        let engine =
            Arc::new(VfioEngine::open(KIND, function, host, Some(nvme()), memory.clone(), None, None).unwrap());
        let world = World { engine: engine.clone(), memory, hold: None };
        let own = Location::Aperture { endpoint: nvme().endpoint, offset: ApertureOffset(0) };
        let outcome = |seed: u8| {
            world.write(own, &bytes(seed)).unwrap();
            match transfer(&engine, BAR, own) {
                (LEN, Ok(())) => "done",
                (0, Err(EngineError::Device { code: 0xffff_0003 })) => "the IOMMU cannot be programmed",
                _ => "unclear",
            }
        };
        let sees = |seed: u8| {
            let mut seen = [0; PAGE];
            world.read(BAR, &mut seen).unwrap();
            if seen == bytes(seed) { "as sent" } else { "wrong" }
        };
        fact("engine/before", &format!("{}, {}", outcome(1), sees(1)));
        decode(&bar, false);
        fact("engine/decoding-off", outcome(2));
        decode(&bar, true);
        fact("engine/decoding-on-again", &format!("{}, {}", outcome(3), sees(3)));
        bar.reset();
        fact("engine/after-a-reset", &format!("{}, {}", outcome(4), sees(4)));
    }
}

/// Has the engine copy a page; answers how many bytes moved, and what went wrong.
fn transfer(engine: &VfioEngine, dst: Location, src: Location) -> (u64, Result<(), EngineError>) {
    let page = |at| Segments::from_iter([Segment { at, len: LEN }]);
    let work = Work::Copy { src: page(src), dst: page(dst), route: Route::Direct };
    let transfer = Transfer { job: JobId(1), domain: DomainId(1), initiator: nvme().endpoint, work };
    engine.submit(&transfer).unwrap();
    let mut ended = Vec::new();
    while ended.is_empty() {
        engine.poll(&mut ended);
        thread::yield_now();
    }
    (ended[0].bytes, ended[0].result)
}

/// Has the memory behind a function's BARs answer, or not.
fn decode(bar: &Function, on: bool) {
    let (file, offset) = bar.bar_file(CONFIG).unwrap();
    let mut command = [0; 2];
    file.read_exact_at(&mut command, offset + COMMAND).unwrap();
    let command = u16::from_le_bytes(command);
    let command = if on { command | DECODES } else { command & !DECODES };
    file.write_all_at(&command.to_le_bytes(), offset + COMMAND).unwrap();
}

/// What the kernel says of DMA that the IOMMU stopped.
struct KernelLog {
    file: File,
    /// Of the function that is stopped, without its segment, which not every kernel says.
    function: String,
}

impl KernelLog {
    fn new(address: &str) -> Self {
        let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open("/dev/kmsg").unwrap();
        let (_, function) = address.split_once(':').unwrap();
        Self { file, function: function.to_owned() }
    }

    /// Looks at nothing that was said up to now, and lets the kernel's patience come back.
    fn forget(&mut self) {
        thread::sleep(SILENCE);
        self.file.seek(SeekFrom::End(0)).unwrap();
    }

    /// Waits until the kernel says that a function was stopped there.
    fn says(&mut self, what: &str, at: BusAddr) -> &'static str {
        let (what, place) = (format!("DMAR: [{what} "), format!("{}] fault addr {:#x} ", self.function, at.0));
        let mut record = [0; 8192];
        loop {
            match self.file.read(&mut record) {
                Ok(len) => {
                    let text = String::from_utf8_lossy(&record[..len]);
                    if text.contains(&what) && text.contains(&place) {
                        return "fault";
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let ready = poll(&mut [PollFd::new(&self.file, PollFlags::IN)], Some(&PATIENCE)).unwrap();
                    if ready == 0 {
                        return "nothing";
                    }
                }
                // Older records were overwritten meanwhile.
                Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
                Err(error) => panic!("/dev/kmsg: {error}"),
            }
        }
    }
}
