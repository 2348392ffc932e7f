//! The virtual machine: memory slots, doorbell, interrupt, and the one processor before it runs.
//!
//! Not here: what the guest does, running it.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvm_bindings::{kvm_regs, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Cap, IoEventAddress, Kvm, NoDatamatch, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::MicroVmError;
use crate::memory::{Window, host_address, shared};
use crate::program::{CODE, DOORBELL, LINE, Program, RAM_LEN, VECTOR, WINDOW, WINDOW_LEN};
use crate::run::Running;

const RAM_SLOT: u32 = 0;
const WINDOW_SLOT: u32 = 1;
/// Three pages that Intel's processors before Westmere need for real mode, where no memory of the guest's is.
const TSS: usize = 0xfffb_d000;

/// Everything of a VM but its processor: what the host's side does while the guest runs.
#[derive(Debug)]
pub struct Host {
    // Closed before the memory goes, so that the guest's memory is mapped for as long as there is a guest.
    vm: VmFd,
    ram: GuestMemoryMmap,
    window: Window,
    doorbell: EventFd,
    interrupt: EventFd,
}

impl Host {
    /// The guest's memory.
    pub fn ram(&self) -> &GuestMemoryMmap {
        &self.ram
    }

    /// The word at `at` in the guest's memory.
    pub fn word(&self, at: u16) -> Result<u16, MicroVmError> {
        Ok(u16::from_le(self.ram.load(GuestAddress(at.into()), Ordering::Acquire)?))
    }

    /// Writes it.
    pub fn set_word(&self, at: u16, value: u16) -> Result<(), MicroVmError> {
        Ok(self.ram.store(value.to_le(), GuestAddress(at.into()), Ordering::Release)?)
    }

    /// The window's file, also when the guest has it no more.
    pub fn window(&self) -> &Window {
        &self.window
    }

    /// Readable once the guest has rung.
    pub fn doorbell(&self) -> &EventFd {
        &self.doorbell
    }

    /// Waits until the guest has rung. False if it has not within `most`.
    pub fn wait_for_doorbell(&self, most: Duration) -> Result<bool, MicroVmError> {
        let failed = || MicroVmError::host("wait for the doorbell");
        let epoll = Epoll::new().map_err(failed())?;
        let wanted = EpollEvent::new(EventSet::IN, 0);
        epoll.ctl(ControlOperation::Add, self.doorbell.as_raw_fd(), wanted).map_err(failed())?;
        let deadline = Instant::now() + most;
        loop {
            let left = deadline.saturating_duration_since(Instant::now()).as_millis();
            match epoll.wait(i32::try_from(left).unwrap_or(i32::MAX), &mut [EpollEvent::default()]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                ready => return ready.map(|ready| ready > 0).map_err(failed()),
            }
        }
    }

    /// Interrupts the guest when it is written, if its program waits for that.
    pub fn interrupt(&self) -> &EventFd {
        &self.interrupt
    }

    /// Takes the window away from the guest. When this returns no store lands any more, not even of a guest that runs.
    pub fn revoke(&self) -> Result<(), MicroVmError> {
        self.set_slot(WINDOW_SLOT, WINDOW, 0, &self.window.memory, "take a memory slot away")
    }

    /// Has the guest see `memory` at `at`, or no longer if `len` is 0.
    fn set_slot(
        &self,
        slot: u32,
        at: u64,
        len: usize,
        memory: &GuestMemoryMmap,
        what: &'static str,
    ) -> Result<(), MicroVmError> {
        let region = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: at,
            memory_size: len as u64,
            userspace_addr: host_address(memory, at)?,
        };
        // SAFETY: the memory is a mapping of `self`'s that lies there for `len` bytes, and outlives the VM: the VM's descriptor is closed
        // before (order of fields), and whoever runs the processor keeps `self` meanwhile. Nothing borrows from that memory.
        unsafe { self.vm.set_user_memory_region(region) }.map_err(MicroVmError::kvm(what))
    }
}

/// A VM that has its program and does not run yet.
#[derive(Debug)]
pub struct MicroVm {
    // Closed before the memory goes.
    vcpu: VcpuFd,
    host: Arc<Host>,
}

impl MicroVm {
    /// Makes one. With a program that waits for an interrupt, it has interrupt controllers in the kernel.
    pub fn new(program: &Program) -> Result<Self, MicroVmError> {
        let kvm = open()?;
        let vm = kvm.create_vm().map_err(MicroVmError::kvm("make a VM"))?;
        vm.set_tss_address(TSS).map_err(MicroVmError::kvm("set the address of the TSS"))?;
        let (ram, _) = shared("microvm-ram", 0, RAM_LEN)?;
        let event =
            || EventFd::new(EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(MicroVmError::host("make an event counter"));
        let host = Host { vm, ram, window: Window::new()?, doorbell: event()?, interrupt: event()? };
        if let Some(handler) = program.handler {
            host.wire_interrupt(&kvm, handler)?;
        }
        need(&kvm, Cap::Ioeventfd, "ioeventfd, by which a doorbell wakes a device")?;
        host.vm
            .register_ioevent(&host.doorbell, &IoEventAddress::Pio(DOORBELL.into()), NoDatamatch)
            .map_err(MicroVmError::kvm("make a port a doorbell"))?;
        host.ram.write_slice(program.code, GuestAddress(CODE.into()))?;
        let add = "add a memory slot";
        host.set_slot(RAM_SLOT, 0, RAM_LEN, &host.ram, add)?;
        host.set_slot(WINDOW_SLOT, WINDOW, WINDOW_LEN, &host.window.memory, add)?;
        let vcpu = host.vm.create_vcpu(0).map_err(MicroVmError::kvm("make a processor"))?;
        prepare(&vcpu, program).map_err(MicroVmError::kvm("set the processor's registers"))?;
        Ok(Self { vcpu, host: Arc::new(host) })
    }

    /// The host's side.
    pub fn host(&self) -> &Arc<Host> {
        &self.host
    }

    /// Lets the guest run, on a thread of its own.
    pub fn start(self) -> Result<Running, MicroVmError> {
        Running::start(self.vcpu, self.host)
    }
}

impl Host {
    fn wire_interrupt(&self, kvm: &Kvm, handler: u16) -> Result<(), MicroVmError> {
        need(kvm, Cap::Irqchip, "interrupt controllers in the kernel")?;
        need(kvm, Cap::Irqfd, "irqfd, by which a device interrupts a VM")?;
        self.vm.create_irq_chip().map_err(MicroVmError::kvm("make interrupt controllers"))?;
        self.vm
            .register_irqfd(&self.interrupt, LINE.into())
            .map_err(MicroVmError::kvm("make an event counter an interrupt"))?;
        self.set_word(VECTOR, handler)
    }
}

fn open() -> Result<Kvm, MicroVmError> {
    Kvm::new().map_err(|error| match error.errno() {
        libc::ENOENT | libc::ENODEV | libc::ENXIO => MicroVmError::NoKvm,
        libc::EACCES | libc::EPERM => MicroVmError::NoPermission,
        _ => MicroVmError::Kvm { what: "be opened", source: error },
    })
}

fn need(kvm: &Kvm, what: Cap, name: &'static str) -> Result<(), MicroVmError> {
    if kvm.check_extension(what) { Ok(()) } else { Err(MicroVmError::Lacking { what: name }) }
}

/// Real mode as after a reset, but for where the segments begin.
fn prepare(vcpu: &VcpuFd, program: &Program) -> Result<(), kvm_ioctls::Error> {
    let mut special = vcpu.get_sregs()?;
    let at = |segment: kvm_segment, base: u64| {
        let selector = u16::try_from(base >> 4).unwrap_or(0);
        kvm_segment { base, selector, ..segment }
    };
    special.cs = at(special.cs, 0);
    special.ds = at(special.ds, 0);
    special.ss = at(special.ss, 0);
    special.es = at(special.es, WINDOW);
    vcpu.set_sregs(&special)?;
    vcpu.set_regs(&kvm_regs {
        rax: program.ax.into(),
        rbx: program.bx.into(),
        rdx: program.dx.into(),
        rsi: program.si.into(),
        rdi: program.di.into(),
        rsp: CODE.into(),
        rip: CODE.into(),
        // Interrupts are off; bit 1 is always set.
        rflags: 2,
        ..kvm_regs::default()
    })
}
