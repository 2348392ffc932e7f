//! A device without a transport: its queues are turned by hand, on the caller's thread, and no time passes but by poll.
//!
//! The engine is the simulator with a clock that stands still, over mapped memory, so that an FPGA's registers and kernels are there too.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use hw_engine::{EndpointKind, Memory, RamMap, Unlimited};
use hw_host::HostMemory;
use hw_sim::{Clock, ManualClock, SimConfig, SimEndpoint, SimEngine};
use rustix::fs::SealFlags;
use vdev_device::{Device, DeviceSpec, Limits, Observer, Reach, Ring};
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemoryMmap};

use crate::ram::{GuestRam, memory_file};
use crate::rig::{Recorder, endpoint};
use crate::virtqueue::{Negotiated, Virtqueue};

/// Turns of a queue after which it must have nothing left to do.
const TURNS: usize = 10_000;

/// A ring of [`LocalGuest`].
#[derive(Debug)]
pub struct LocalRing {
    queue: Mutex<Queue>,
    memory: GuestMemoryMmap,
}

impl Ring for LocalRing {
    fn with(&self, f: &mut dyn FnMut(&mut Queue, &GuestMemoryMmap)) -> bool {
        f(&mut self.queue.lock().unwrap_or_else(PoisonError::into_inner), &self.memory);
        true
    }

    fn signal(&self) {}
}

/// A guest and its device.
pub struct LocalGuest {
    /// The guest's memory.
    pub ram: Arc<GuestRam>,
    /// Its queues, by number.
    pub queues: Vec<Virtqueue>,
    /// The device.
    pub device: Arc<Device>,
    /// What the device told its operator.
    pub recorder: Arc<Recorder>,
    rules: Negotiated,
}

impl LocalGuest {
    /// A GPU and an FPGA with a MiB each, one submission queue, tight limits; `size` entries a queue, all started.
    pub fn new(size: u16, rules: Negotiated) -> Result<Self> {
        let ram = GuestRam::new(2 << 20)?;
        let recorder = Arc::new(Recorder::default());
        let device = sim_device(&ram, Arc::clone(&recorder) as Arc<dyn Observer>)?;
        let queues = (0..device.num_queues()).map(|_| Virtqueue::new(&ram, size, rules)).collect::<Result<Vec<_>>>()?;
        let mut guest = Self { ram, queues, device, recorder, rules };
        for index in 0..guest.device.num_queues() {
            guest.start(index, 0)?;
        }
        Ok(guest)
    }

    /// Hands the device a ring whose next chain is at `base`.
    pub fn start(&mut self, index: u16, base: u16) -> Result<()> {
        let driver = &self.queues[usize::from(index)];
        let [table, avail, used] = driver.addresses();
        let mut queue = Queue::new(driver.size())?;
        queue.try_set_desc_table_address(GuestAddress(table))?;
        queue.try_set_avail_ring_address(GuestAddress(avail))?;
        queue.try_set_used_ring_address(GuestAddress(used))?;
        queue.set_event_idx(self.rules.event_idx);
        queue.set_next_avail(base);
        queue.set_next_used(driver.raw_used_index()?);
        queue.set_ready(true);
        let ring = LocalRing { queue: Mutex::new(queue), memory: self.ram.memory().clone() };
        self.device.start_queue(index, Arc::new(ring));
        Ok(())
    }

    /// Turns every queue and the timekeeper until nothing is left to do.
    ///
    /// # Panics
    /// If that does not come to an end.
    pub fn settle(&self) {
        let mut turns = 0;
        loop {
            let mut more = false;
            for index in 0..self.device.num_queues() {
                more |= self.device.drain(index);
            }
            more |= self.device.poll().is_some_and(|rest| rest.is_zero());
            if !more {
                return;
            }
            turns += 1;
            assert!(turns < TURNS, "The device does not come to rest");
        }
    }
}

fn sim_device(ram: &GuestRam, observer: Arc<dyn Observer>) -> Result<Arc<Device>> {
    const MEMORY: u64 = 1 << 20;
    let mut endpoints = vec![endpoint(0, EndpointKind::Gpu, MEMORY), endpoint(1, EndpointKind::Fpga, MEMORY)];
    endpoints[1].registers_len = 4096;
    let memory = Arc::new(HostMemory::new());
    for endpoint in &endpoints {
        memory.add_aperture(endpoint.id, &memory_file(MEMORY, SealFlags::SHRINK)?, MEMORY)?;
    }
    memory.replace(&ram.ram_regions()?)?;
    let config = SimConfig::new(endpoints.iter().cloned().map(SimEndpoint::instant).collect());
    let engine = SimEngine::new(
        &config,
        Arc::clone(&memory) as Arc<dyn Memory>,
        Arc::new(Unlimited),
        Clock::Manual(ManualClock::new()),
    )?;
    let limits = Limits {
        max_domains: 4,
        max_mappings: 32,
        max_segments: 16,
        max_buffers: 16,
        stream_credits: 8,
        max_in_flight: 24,
        max_streams: 4,
        max_batch: 8,
        ..Limits::default()
    };
    let spec = DeviceSpec {
        linger: std::time::Duration::ZERO,
        endpoints,
        limits,
        reach: Reach::all(),
        session: 1,
        submit_queues: 1,
    };
    Ok(Device::new(spec, Arc::new(engine), memory, observer)?)
}
