//! A split virtqueue from the driver's side, written after the specification: tables laid out apart, every field little-endian.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use vdev_device::Ring;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::crash::Process;

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

/// The device's side, as a transport would give it.
pub struct TestRing {
    queue: Mutex<Queue>,
    mem: GuestMemoryMmap,
    process: Arc<Process>,
    pub signals: AtomicUsize,
    /// How often the ring was touched.
    pub touches: AtomicUsize,
}

impl Ring for TestRing {
    fn with(&self, f: &mut dyn FnMut(&mut Queue, &GuestMemoryMmap)) -> bool {
        self.process.step();
        if self.process.is_dead() {
            return false;
        }
        self.touches.fetch_add(1, Ordering::SeqCst);
        f(&mut self.queue.lock().unwrap(), &self.mem);
        true
    }

    fn signal(&self) {
        self.process.step();
        self.signals.fetch_add(1, Ordering::SeqCst);
    }
}

/// The driver's side.
pub struct DriverRing {
    pub mem: GuestMemoryMmap,
    pub size: u16,
    desc: u64,
    avail: u64,
    used: u64,
    free: Vec<u16>,
    /// Descriptors that a head has taken.
    taken: Vec<Vec<u16>>,
    next_avail: u16,
    next_used: u16,
    /// Only chains that were pushed come back.
    pub strict: bool,
    pub ring: Arc<TestRing>,
}

impl DriverRing {
    /// A ring of `size` at `base`, which must have 16 KiB.
    pub fn new(mem: &GuestMemoryMmap, base: u64, size: u16) -> Self {
        let (desc, avail, used) = (base, base + 0x2000, base + 0x3000);
        mem.write_slice(&[0; 0x4000], GuestAddress(base)).unwrap();
        Self {
            mem: mem.clone(),
            size,
            desc,
            avail,
            used,
            free: (0..size).rev().collect(),
            taken: vec![Vec::new(); usize::from(size)],
            next_avail: 0,
            next_used: 0,
            strict: false,
            ring: Self::device_side(mem, base, size, &Arc::default()),
        }
    }

    /// A transport begins to serve the ring, with the indices of one that was never used.
    pub fn serve(&mut self, process: &Arc<Process>) {
        self.ring = Self::device_side(&self.mem, self.desc, self.size, process);
    }

    /// The device is told of a used ring somewhere else.
    pub fn break_used_ring(&self, at: u64) {
        self.ring.queue.lock().unwrap().try_set_used_ring_address(GuestAddress(at)).unwrap();
    }

    fn device_side(mem: &GuestMemoryMmap, base: u64, size: u16, process: &Arc<Process>) -> Arc<TestRing> {
        let (desc, avail, used) = (base, base + 0x2000, base + 0x3000);
        let mut queue = Queue::new(size).unwrap();
        queue.try_set_size(size).unwrap();
        queue.try_set_desc_table_address(GuestAddress(desc)).unwrap();
        queue.try_set_avail_ring_address(GuestAddress(avail)).unwrap();
        queue.try_set_used_ring_address(GuestAddress(used)).unwrap();
        queue.set_event_idx(true);
        queue.set_ready(true);
        Arc::new(TestRing {
            queue: Mutex::new(queue),
            mem: mem.clone(),
            process: Arc::clone(process),
            signals: AtomicUsize::new(0),
            touches: AtomicUsize::new(0),
        })
    }

    /// Writes one descriptor of the table.
    pub fn set(&self, index: u16, at: u64, len: u32, flags: u16, next: u16) {
        Self::write(&self.mem, self.desc + 16 * u64::from(index), at, len, flags, next);
    }

    /// Writes one descriptor anywhere.
    pub fn write(mem: &GuestMemoryMmap, place: u64, at: u64, len: u32, flags: u16, next: u16) {
        mem.write_obj(at.to_le(), GuestAddress(place)).unwrap();
        mem.write_obj(len.to_le(), GuestAddress(place + 8)).unwrap();
        mem.write_obj(flags.to_le(), GuestAddress(place + 12)).unwrap();
        mem.write_obj(next.to_le(), GuestAddress(place + 14)).unwrap();
    }

    /// Makes a head available, whatever it is.
    pub fn offer(&mut self, head: u16) {
        let slot = u64::from(self.next_avail % self.size);
        self.mem.write_obj(head.to_le(), GuestAddress(self.avail + 4 + 2 * slot)).unwrap();
        self.next_avail = self.next_avail.wrapping_add(1);
        self.mem.store(self.next_avail.to_le(), GuestAddress(self.avail + 2), Ordering::Release).unwrap();
    }

    /// Sets the available index to whatever.
    pub fn set_avail_index(&mut self, index: u16) {
        self.next_avail = index;
        self.mem.store(index.to_le(), GuestAddress(self.avail + 2), Ordering::Release).unwrap();
    }

    pub fn avail_index(&self) -> u16 {
        self.next_avail
    }

    /// Offers a well-formed chain.
    pub fn push(&mut self, readable: &[(u64, u32)], writable: &[(u64, u32)]) -> u16 {
        let count = readable.len() + writable.len();
        let indices: Vec<u16> = (0..count).map(|_| self.free.pop().expect("the ring has room")).collect();
        let parts = readable.iter().map(|part| (part, 0)).chain(writable.iter().map(|part| (part, WRITE)));
        for (i, ((at, len), flags)) in parts.enumerate() {
            let next = indices.get(i + 1).copied();
            self.set(indices[i], *at, *len, flags | next.map_or(0, |_| NEXT), next.unwrap_or(0));
        }
        let head = indices[0];
        self.taken[usize::from(head)] = indices;
        self.offer(head);
        head
    }

    /// Takes what the device has used, and asks for an interrupt at the next use.
    pub fn take_used(&mut self) -> Vec<(u16, u32)> {
        let index: u16 = self.mem.load(GuestAddress(self.used + 2), Ordering::Acquire).unwrap();
        let ahead = u16::from_le(index).wrapping_sub(self.next_used);
        assert!(usize::from(ahead) <= self.outstanding(), "{ahead} chains are used, of {}", self.outstanding());
        let mut used = Vec::new();
        while self.next_used != u16::from_le(index) {
            let at = self.used + 4 + 8 * u64::from(self.next_used % self.size);
            let head: u32 = self.mem.read_obj(GuestAddress(at)).unwrap();
            let len: u32 = self.mem.read_obj(GuestAddress(at + 4)).unwrap();
            self.next_used = self.next_used.wrapping_add(1);
            let head = u16::try_from(u32::from_le(head)).expect("a head of this ring");
            let freed = std::mem::take(&mut self.taken[usize::from(head)]);
            assert!(!self.strict || !freed.is_empty(), "the device used {head}, which it does not have");
            self.free.extend(freed);
            used.push((head, u32::from_le(len)));
        }
        let used_event = self.avail + 4 + 2 * u64::from(self.size);
        self.mem.store(self.next_used.to_le(), GuestAddress(used_event), Ordering::SeqCst).unwrap();
        used
    }

    /// Descriptors that are free.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Chains that the device has.
    pub fn outstanding(&self) -> usize {
        usize::from(self.next_avail.wrapping_sub(self.next_used))
    }

    /// Whether the device asked to be notified of the next chain.
    pub fn wants_notice(&self) -> bool {
        let avail_event = self.used + 4 + 8 * u64::from(self.size);
        let event: u16 = self.mem.load(GuestAddress(avail_event), Ordering::SeqCst).unwrap();
        u16::from_le(event) == self.next_avail
    }

    pub fn signals(&self) -> usize {
        self.ring.signals.load(Ordering::SeqCst)
    }
}
