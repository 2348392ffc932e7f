//! The fake device's insides: translation, rights, copies, the FPGA's registers and its cipher.

use peergate_guest::uapi::{self, Completion, Event, Work};
use peergate_guest::{FaultReason, Status};

use super::{ENGINE, FPGA, FakeChannel, GPU, Mapping, PAGE, Sabotage, State, ended};

/// A refused address.
struct Refused {
    status: Status,
    reason: FaultReason,
    address: u64,
    access: u32,
}

/// A translated side.
struct Side {
    mapping: Mapping,
    offset: u64,
}

impl FakeChannel {
    pub(super) fn execute(&self, state: &mut State, work: &Work) -> Completion {
        let sabotage = self.shared.sabotage;
        let domain = state.domains.get_mut(&self.domain).unwrap();
        if domain.errors.contains(&work.stream) {
            return ended(work, Status::Cancelled);
        }
        let reads = work.opcode == uapi::WORK_COPY;
        let far = |address: u64| address.checked_add(work.length).is_none();
        let is_atomic = work.opcode == uapi::WORK_ATOMIC;
        let is_apart = is_atomic && (!matches!(work.length, 4 | 8) || !work.destination.is_multiple_of(work.length));
        let is_invalid = is_apart && sabotage != Sabotage::AtomicsAnywhere
            || work.length == 0 && sabotage != Sabotage::ZeroLengthFine;
        let status = if is_invalid {
            Status::Inval
        } else if !is_atomic && far(work.source) || far(work.destination) {
            Status::Range
        } else {
            Status::Ok
        };
        if status != Status::Ok {
            domain.errors.insert(work.stream);
            return ended(work, status);
        }
        let done = if is_atomic {
            self.change(state, work)
        } else {
            self.transfer(state, work, reads).map(|direct| (direct, 0))
        };
        match done {
            Ok((direct, fault_address)) => {
                let direct = direct && sabotage != Sabotage::StagedPath;
                let path = if direct { uapi::PATH_DIRECT } else { uapi::PATH_LOCAL };
                let path = u8::try_from(path).unwrap();
                let reason = if direct { 2 } else { 1 };
                Completion { bytes: work.length, path, reason, fault_address, ..ended(work, Status::Ok) }
            }
            Err((accessor, mut refused)) => {
                if sabotage != Sabotage::ErrorsForgotten {
                    state.domains.get_mut(&self.domain).unwrap().errors.insert(work.stream);
                }
                if sabotage == Sabotage::AddressOfPage {
                    refused.address &= !(PAGE - 1);
                }
                self.blame(state, accessor, work.stream, work.cookie, &refused);
                let (fault_address, fault_reason) = (refused.address, refused.reason as u8);
                Completion { fault_address, fault_reason, ..ended(work, refused.status) }
            }
        }
    }

    fn blame(&self, state: &mut State, accessor: u32, stream: u32, cookie: u64, refused: &Refused) {
        let access =
            if self.shared.sabotage == Sabotage::EventOfOtherAccess { refused.access ^ 3 } else { refused.access };
        let event = Event {
            kind: uapi::EVENT_FAULT,
            reason: refused.reason as u8,
            access: u8::try_from(access).unwrap(),
            accessor,
            owner: u32::MAX,
            stream,
            cookie,
            address: refused.address,
            ..Event::default()
        };
        self.event(state, event);
    }

    /// Moves the bytes; answers whether the accessor reached another endpoint.
    fn transfer(&self, state: &mut State, work: &Work, reads: bool) -> Result<bool, (u32, Refused)> {
        let owner = |state: &State, address| {
            let found = state.domains[&self.domain].mappings.range(..=address).next_back();
            found.and_then(|(_, mapping)| mapping.owner)
        };
        let chosen = || owner(state, work.source).filter(|_| reads).or_else(|| owner(state, work.destination));
        let accessor = if work.initiator == uapi::INITIATOR_ANY { chosen().unwrap_or(GPU) } else { work.initiator };
        let blamed = |refused| (accessor, refused);
        if ![GPU, FPGA, ENGINE].contains(&accessor) && self.shared.sabotage != Sabotage::AnyEndpoint {
            return Err(blamed(Refused { status: Status::Fault, reason: FaultReason::Domain, address: 0, access: 0 }));
        }
        let source = if reads {
            Some(self.translate(state, accessor, work.source, work.length, uapi::READ).map_err(blamed)?)
        } else {
            None
        };
        if self.shared.sabotage == Sabotage::WriteBeforeFault
            && let Ok(first) = self.translate(state, accessor, work.destination, 1, uapi::WRITE)
        {
            first.mapping.bytes.lock().unwrap()[usize::try_from(first.offset).unwrap()] = 0xff;
        }
        let target = self.translate(state, accessor, work.destination, work.length, uapi::WRITE).map_err(blamed)?;
        let owners = (source.as_ref().and_then(|side| side.mapping.owner), target.mapping.owner);
        let len = usize::try_from(work.length).unwrap();
        let mut bytes = match &source {
            Some(side) if side.mapping.registers => {
                let register = state.domains[&self.domain].registers.get(&side.offset).copied();
                register
                    .unwrap_or(if side.offset == 0 { u64::from_le_bytes(*b"PGFPGA1\0") } else { 0 })
                    .to_le_bytes()
                    .into()
            }
            Some(side) => {
                let start = usize::try_from(side.offset).unwrap();
                side.mapping.bytes.lock().unwrap()[start..start + len].to_vec()
            }
            None => work.operand.to_le_bytes().into_iter().cycle().take(len).collect::<Vec<u8>>(),
        };
        bytes.resize(len, 0);
        if self.shared.sabotage == Sabotage::CorruptCopies && len > 4096 && owners == (Some(GPU), Some(FPGA)) {
            bytes[4095] ^= 1;
        }
        if target.mapping.registers {
            let word = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            self.store(state, target.offset, word);
        } else {
            let start = usize::try_from(target.offset).unwrap();
            target.mapping.bytes.lock().unwrap()[start..start + len].copy_from_slice(&bytes);
        }
        let detours = self.shared.sabotage == Sabotage::FirstPieceDetours && target.offset == 0;
        let (from, to) = owners;
        Ok(!detours && [from, to].into_iter().flatten().any(|owner| owner != accessor))
    }

    /// Changes a word; answers whether the accessor reached another endpoint, and what was there.
    fn change(&self, state: &mut State, work: &Work) -> Result<(bool, u64), (u32, Refused)> {
        let domain = &state.domains[&self.domain];
        let owner = domain.mappings.range(..=work.destination).next_back().and_then(|(_, mapping)| mapping.owner);
        let any = work.initiator == uapi::INITIATOR_ANY;
        let accessor = if any { owner.unwrap_or(GPU) } else { work.initiator };
        let may = |access| self.translate(state, accessor, work.destination, work.length, access);
        let side = may(uapi::READ).and_then(|_| may(uapi::WRITE));
        let side = side.map_err(|refused| (accessor, Refused { access: uapi::READ | uapi::WRITE, ..refused }))?;
        let (start, len) = (usize::try_from(side.offset).unwrap(), usize::try_from(work.length).unwrap());
        let mut bytes = side.mapping.bytes.lock().unwrap();
        let mut word = [0; 8];
        word[..len].copy_from_slice(&bytes[start..start + len]);
        let was = u64::from_le_bytes(word);
        let low = |number: u64| number & (u64::MAX >> (64 - 8 * len));
        let now = match work.flags {
            uapi::WORK_ATOMIC_ADD => was.wrapping_add(work.operand),
            uapi::WORK_ATOMIC_COMPARE_SWAP if low(work.source) != was => was,
            _ => work.operand,
        };
        if self.shared.sabotage != Sabotage::AtomicsForget {
            bytes[start..start + len].copy_from_slice(&now.to_le_bytes()[..len]);
        }
        let told = if self.shared.sabotage == Sabotage::AtomicsTellTheNew { low(now) } else { was };
        Ok((owner.is_some_and(|owner| owner != accessor), told))
    }

    fn translate(&self, state: &State, accessor: u32, address: u64, len: u64, access: u32) -> Result<Side, Refused> {
        let sabotage = self.shared.sabotage;
        let domain = &state.domains[&self.domain];
        let fault = |reason, address| Refused { status: Status::Fault, reason, address, access };
        let found = domain.mappings.range(..=address).next_back();
        let (start, mapping) = found.ok_or_else(|| fault(FaultReason::Mapping, address))?;
        let end = start + mapping.len;
        if address >= end {
            return Err(fault(FaultReason::Mapping, address));
        }
        if mapping.flags & access == 0 {
            return Err(fault(FaultReason::Permission, address));
        }
        if address + len > end {
            return Err(fault(FaultReason::Mapping, end));
        }
        let offset = address - start;
        if mapping.registers && (len != 8 || !offset.is_multiple_of(8)) && sabotage != Sabotage::RegistersAnySize {
            return Err(fault(FaultReason::Access, address));
        }
        let right = mapping.owner.is_none_or(|owner| {
            owner == accessor || domain.peers.get(&(accessor, owner)).is_some_and(|rights| rights & access != 0)
        });
        if !right && sabotage != Sabotage::PeerUnchecked {
            return Err(Refused { status: Status::Denied, reason: FaultReason::Peer, address, access });
        }
        Ok(Side { mapping: mapping.clone(), offset })
    }

    fn store(&self, state: &mut State, offset: u64, word: u64) {
        let registers = &mut state.domains.get_mut(&self.domain).unwrap().registers;
        registers.insert(offset, word);
        if offset != 0x50 {
            return;
        }
        let read = |offset| registers.get(&offset).copied().unwrap_or(0);
        let (source, destination, len) = (read(0x10), read(0x18), read(0x20));
        let key = [0x30, 0x38, 0x40, 0x48].map(|offset| read(offset).to_le_bytes()).concat();
        let cipher = chacha20(&key, read(0x28));
        let result = self.kernel(state, source, destination, len, cipher);
        let (status, result) = match result {
            Ok(()) => (2, len),
            Err(refused) => {
                self.blame(state, FPGA, 0, 0, &refused);
                (3, refused.status.to_raw().into())
            }
        };
        let registers = &mut state.domains.get_mut(&self.domain).unwrap().registers;
        registers.extend([(0x58, status), (0x60, result)]);
        self.event(state, Event { kind: uapi::EVENT_INTERRUPT, accessor: FPGA, owner: FPGA, ..Event::default() });
    }

    fn kernel(&self, state: &State, source: u64, destination: u64, len: u64, cipher: Cipher) -> Result<(), Refused> {
        let unchecked = self.shared.sabotage == Sabotage::KernelUnchecked;
        let sides = self
            .translate(state, FPGA, source, len, uapi::READ)
            .and_then(|from| Ok((from, self.translate(state, FPGA, destination, len, uapi::WRITE)?)));
        let (from, to) = match sides {
            Err(_) if unchecked => return Ok(()),
            sides => sides?,
        };
        let len = usize::try_from(len).unwrap();
        let at = |offset| usize::try_from(offset).unwrap();
        let mut bytes = from.mapping.bytes.lock().unwrap()[at(from.offset)..at(from.offset) + len].to_vec();
        cipher(&mut bytes);
        to.mapping.bytes.lock().unwrap()[at(to.offset)..at(to.offset) + len].copy_from_slice(&bytes);
        Ok(())
    }
}

type Cipher = Box<dyn FnOnce(&mut [u8])>;

/// ChaCha20 written down once more, so that the test does not compare a crate with itself.
fn chacha20(key: &[u8], nonce: u64) -> Cipher {
    let word = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
    let mut state = [0_u32; 16];
    state[..4].copy_from_slice(&[0x6170_7865, 0x3320_646e, 0x7962_2d32, 0x6b20_6574]);
    for (slot, bytes) in state[4..12].iter_mut().zip(key.chunks(4)) {
        *slot = word(bytes);
    }
    for (slot, bytes) in state[14..].iter_mut().zip(nonce.to_le_bytes().chunks(4)) {
        *slot = word(bytes);
    }
    Box::new(move |bytes| {
        for block in bytes.chunks_mut(64) {
            let mut words = state;
            for _ in 0..10 {
                for [a, b, c, d] in QUARTERS {
                    quarter(&mut words, a, b, c, d);
                }
            }
            let stream = words.iter().zip(state).flat_map(|(word, start)| word.wrapping_add(start).to_le_bytes());
            block.iter_mut().zip(stream).for_each(|(byte, key)| *byte ^= key);
            state[12] = state[12].wrapping_add(1);
        }
    })
}

const QUARTERS: [[usize; 4]; 8] = [
    [0, 4, 8, 12],
    [1, 5, 9, 13],
    [2, 6, 10, 14],
    [3, 7, 11, 15],
    [0, 5, 10, 15],
    [1, 6, 11, 12],
    [2, 7, 8, 13],
    [3, 4, 9, 14],
];

fn quarter(words: &mut [u32; 16], a: usize, b: usize, c: usize, d: usize) {
    for (x, y, z, turn) in [(a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)] {
        words[x] = words[x].wrapping_add(words[y]);
        words[z] = (words[z] ^ words[x]).rotate_left(turn);
    }
}
