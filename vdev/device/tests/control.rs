//! Control requests: what they answer, what they refuse and with which status, in which order they are checked.
#![allow(clippy::unwrap_used, clippy::arithmetic_side_effects, clippy::cast_possible_truncation, reason = "tests")]

mod common;

use common::*;
use hw_engine::{EndpointKind, EndpointSpec};
use iommu_addr::EndpointId;
use vdev_device::{Counter, Gauge};
use vdev_wire::{
    ALLOC_REGISTERS, ALLOC_WINDOWABLE, ControlHeader, EndpointInfo, Flush, HelloReply, MAP_READ, MAP_WRITE, Opcode,
    PEER_READ, PEER_WRITE, PathReason, PeerReply, ProbeReply, Status, StreamReset, TransferPath,
};
use zerocopy::{FromBytes, IntoBytes};

fn header(opcode: u16, domain: u32, session: u32) -> ControlHeader {
    ControlHeader {
        opcode: opcode.into(),
        flags: 0.into(),
        domain: domain.into(),
        session: session.into(),
        reserved: 0.into(),
    }
}

/// The status of a request made of raw bytes.
fn raw(bed: &mut Bed, bytes: &[u8], room: u32) -> Status {
    let call = bed.start_raw(bytes, room);
    bed.answer(call).expect("answered at once").status
}

fn refused(bed: &mut Bed, opcode: Opcode, body: &[u8]) -> Status {
    let before = bed.seen.gauge_of(Gauge::Mappings);
    let status = bed.call(opcode, 1, body).status;
    assert_eq!(bed.seen.gauge_of(Gauge::Mappings), before, "a refused request changes nothing");
    status
}

#[test]
fn config_space_answers_exactly_the_bytes_asked_for() {
    let bed = Bed::new();
    let all = bed.device.read_config(0, 64);
    assert_eq!(&all[..8], b"PEERGATE");
    assert_eq!(all.len(), 64);
    assert_eq!(bed.device.read_config(62, 8), [0; 8]);
    assert_eq!(bed.device.read_config(4, 4), b"GATE");
    assert_eq!(bed.device.read_config(u32::MAX, u32::MAX), vec![0; 4096]);
    assert_eq!(bed.device.read_config(0, 0), []);
    assert_eq!(bed.device.num_queues(), 4);
}

#[test]
fn hello_gives_version_and_session() {
    let mut bed = Bed::new();
    let reply: HelloReply = bed.hello().read();
    assert_eq!((reply.version.get(), reply.session.get(), reply.features.get()), (1, SESSION, 0));
}

#[test]
fn hello_refuses_what_it_does_not_speak() {
    let mut bed = Bed::new();
    let hello = |version: u16, reserved0: u16, reserved: u32, features: u64| vdev_wire::Hello {
        version: version.into(),
        reserved0: reserved0.into(),
        reserved: reserved.into(),
        features: features.into(),
    };
    for (body, want) in [
        (hello(0, 0, 0, 0), Status::Unsupp),
        (hello(2, 0, 0, 0), Status::Unsupp),
        (hello(1, 0, 0, 1), Status::Unsupp),
        (hello(1, 1, 0, 0), Status::Inval),
        (hello(1, 0, 1, 0), Status::Inval),
    ] {
        assert_eq!(bed.call(Opcode::Hello, 0, body.as_bytes()).status, want, "{body:?}");
    }
    assert_eq!(bed.call(Opcode::Hello, 1, hello(1, 0, 0, 0).as_bytes()).status, Status::Inval, "a domain");
    assert_eq!(bed.call(Opcode::Probe, 0, &[]).status, Status::Inval, "none of these was a HELLO");
}

#[test]
fn hello_ignores_the_session_and_nothing_else_does() {
    let mut bed = Bed::new();
    assert_eq!(raw(&mut bed, header(2, 0, SESSION + 1).as_bytes(), 512), Status::Stale, "also before HELLO");
    let hello = [header(1, 0, 99).as_bytes(), &[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]].concat();
    assert_eq!(raw(&mut bed, &hello, 64), Status::Ok);
    assert_eq!(raw(&mut bed, header(2, 0, SESSION + 1).as_bytes(), 512), Status::Stale);
    assert_eq!(raw(&mut bed, header(2, 0, SESSION).as_bytes(), 512), Status::Ok);
}

#[test]
fn before_hello_everything_else_is_invalid() {
    let mut bed = Bed::new();
    assert_eq!(bed.call(Opcode::Probe, 0, &[]).status, Status::Inval);
    assert_eq!(bed.call(Opcode::Attach, 1, attach(GPU).as_bytes()).status, Status::Inval);
    assert_eq!(bed.call(Opcode::Flush, 1, &[0; 8]).status, Status::Inval);
    assert_eq!(raw(&mut bed, header(0x7777, 0, SESSION).as_bytes(), 64), Status::Unsupp);
}

#[test]
fn probe_tells_limits_and_as_many_endpoints_as_fit() {
    let mut bed = Bed::ready();
    bed.alloc(1, FPGA, 1 << 40, 4 * PAGE);
    let answer = bed.ok(Opcode::Probe, 0, &[]);
    let reply: ProbeReply = answer.read();
    assert_eq!((reply.endpoint_count.get(), reply.max_batch.get()), (3, 128));
    assert_eq!(reply.page_size_mask.get(), !0xfff);
    assert_eq!((reply.default_timeout_ms.get(), reply.max_timeout_ms.get()), (10_000, 60_000));
    assert_eq!(answer.body.len(), 88 + 3 * 72);
    let info = EndpointInfo::read_from_bytes(&answer.body[88 + 72..88 + 144]).unwrap();
    assert_eq!(info.endpoint.get(), FPGA.to_raw());
    assert_eq!((info.kind.get(), info.engines.get()), (2, 2));
    assert_eq!((info.memory_len.get(), info.memory_free.get()), (VRAM, VRAM - 4 * PAGE));
    assert_eq!((info.registers_len.get(), info.granularity.get()), (PAGE, PAGE));
    assert_eq!(&info.name[..8], b"fpga-1\0\0");
    let probe = header(Opcode::Probe as u16, 0, SESSION);
    let call = bed.start_raw(probe.as_bytes(), 16 + 88 + 72 + 71);
    assert_eq!(bed.answer(call).unwrap().body.len(), 88 + 72);
    assert_eq!(raw(&mut bed, probe.as_bytes(), 16 + 87), Status::Inval, "no room for the limits");
}

#[test]
fn endpoint_without_memory_is_told_of_attached_and_acts() {
    let mut spec = spec();
    spec.endpoints.truncate(2);
    let id = EndpointId::local(9);
    let (name, memory_len) = ("dma0".into(), 0);
    spec.endpoints.push(EndpointSpec { name, memory_len, ..endpoint(id, EndpointKind::Engine, 0) });
    let mut bed = Bed::with(spec).prepared();
    let answer = bed.ok(Opcode::Probe, 0, &[]);
    let info = EndpointInfo::read_from_bytes(&answer.body[88 + 144..]).unwrap();
    assert_eq!((info.endpoint.get(), info.kind.get()), (9, vdev_wire::EndpointKind::Engine as u16));
    assert_eq!((info.memory_len.get(), info.memory_free.get()), (0, 0));
    bed.attach(1, id);
    let refused = bed.call(Opcode::Alloc, 1, alloc(id, RW, 1 << 40, PAGE).as_bytes());
    assert_eq!((refused.status, refused.detail), (Status::NoMem, PAGE));
    bed.alloc(1, GPU, 1 << 40, PAGE);
    bed.enable(1, id, GPU, PEER_READ);
    let record = bed.run_one(1, copy(1 << 40, IOVA + DATA, 64).by(id));
    assert_eq!(status(&record), Status::Ok);
    assert_eq!((record.path, record.bytes.get()), (TransferPath::Direct as u8, 64));
}

#[test]
fn checks_come_in_order() {
    let mut bed = Bed::ready();
    let bad = |opcode: u16, flags: u16, domain: u32, session: u32, reserved: u32| ControlHeader {
        opcode: opcode.into(),
        flags: flags.into(),
        domain: domain.into(),
        session: session.into(),
        reserved: reserved.into(),
    };
    let flush = Opcode::Flush as u16;
    let with = |header: ControlHeader, body: &[u8]| [header.as_bytes(), body].concat();
    let cases = [
        (with(bad(0x7777, 1, 9, 9, 0), &[]), Status::Inval, "flags before the opcode"),
        (with(bad(0x7777, 0, 9, 9, 1), &[]), Status::Inval, "reserved before the opcode"),
        (with(bad(0x7777, 0, 9, 9, 0), &[]), Status::Unsupp, "opcode before the session"),
        (with(bad(flush, 0, 9, 9, 0), &[0; 7]), Status::Inval, "body length before the session"),
        (with(bad(flush, 0, 9, 9, 0), &[1; 8]), Status::Inval, "reserved body before the session"),
        (with(bad(flush, 0, 9, 9, 0), &[0; 8]), Status::Stale, "session before the domain"),
        (with(bad(flush, 0, 9, SESSION, 0), &[0; 8]), Status::NoEnt, "the domain"),
        (with(bad(flush, 0, 1, SESSION, 0), &[0; 8]), Status::Ok, "nothing wrong"),
        (with(bad(Opcode::Probe as u16, 0, 1, SESSION, 0), &[]), Status::Inval, "PROBE has no domain"),
        (with(bad(Opcode::Probe as u16, 0, 0, SESSION, 0), &[0; 8]), Status::Inval, "PROBE has no body"),
    ];
    for (bytes, want, what) in cases {
        assert_eq!(raw(&mut bed, &bytes, 512), want, "{what}");
    }
    assert_eq!(raw(&mut bed, &[0; 15], 512), Status::Inval, "shorter than the header");
}

#[test]
fn every_opcode_refuses_a_body_one_byte_off_and_an_answer_without_room() {
    let mut bed = Bed::ready();
    for opcode in Opcode::ALL {
        let domain = u32::from(!matches!(opcode, Opcode::Hello | Opcode::Probe));
        let head = header(opcode as u16, domain, SESSION);
        for len in 0..64 {
            let valid = match opcode {
                Opcode::Probe => len == 0,
                Opcode::Attach | Opcode::Detach | Opcode::Flush | Opcode::Free | Opcode::StreamReset => len == 8,
                Opcode::Alloc => len == 24,
                // One segment and its count are not in these bytes.
                Opcode::Map => false,
                _ => len == 16,
            };
            if !valid {
                let bytes = [head.as_bytes(), &vec![0; len]].concat();
                assert_eq!(raw(&mut bed, &bytes, 512), Status::Inval, "{opcode:?} with a body of {len}");
            }
        }
    }
    let query = [header(Opcode::PeerQuery as u16, 1, SESSION).as_bytes(), peer(GPU, FPGA, 0).as_bytes()].concat();
    assert_eq!(raw(&mut bed, &query, 16 + 7), Status::Inval);
    assert_eq!(raw(&mut bed, &query, 16 + 8), Status::Ok);
}

#[test]
fn attach_creates_and_the_last_detach_destroys() {
    let mut bed = Bed::new();
    bed.hello();
    let status = |bed: &mut Bed, opcode, endpoint| bed.call(opcode, 5, attach(endpoint).as_bytes()).status;
    assert_eq!(status(&mut bed, Opcode::Detach, GPU), Status::NoEnt, "no domain");
    assert_eq!(status(&mut bed, Opcode::Attach, EndpointId::local(9)), Status::NoEnt, "no such endpoint");
    assert_eq!(status(&mut bed, Opcode::Attach, EndpointId { host: 1, id: 0 }), Status::NoEnt, "another host");
    assert_eq!(status(&mut bed, Opcode::Attach, EndpointId::from_raw(u32::MAX)), Status::Inval, "every endpoint");
    assert_eq!(bed.call(Opcode::Flush, 5, &[0; 8]).status, Status::NoEnt, "refusals create nothing");
    assert_eq!(status(&mut bed, Opcode::Attach, GPU), Status::Ok);
    assert_eq!(status(&mut bed, Opcode::Attach, GPU), Status::Already);
    assert_eq!(status(&mut bed, Opcode::Detach, FPGA), Status::NoEnt, "not attached");
    assert_eq!(status(&mut bed, Opcode::Attach, FPGA), Status::Ok);
    assert_eq!(status(&mut bed, Opcode::Detach, GPU), Status::Ok);
    assert_eq!(bed.call(Opcode::Flush, 5, &[0; 8]).status, Status::Ok, "the FPGA is left");
    assert_eq!(status(&mut bed, Opcode::Detach, FPGA), Status::Ok);
    assert_eq!(bed.call(Opcode::Flush, 5, &[0; 8]).status, Status::NoEnt);
    assert_eq!(bed.engine.state.lock().unwrap().forgotten.len(), 1);
    bed.assert_empty();
}

#[test]
fn domains_have_a_limit_that_detach_gives_back() {
    let mut limited = spec();
    limited.limits.max_domains = 2;
    let mut bed = Bed::with(limited);
    bed.hello();
    bed.attach(1, GPU);
    bed.attach(2, GPU);
    let answer = bed.call(Opcode::Attach, 3, attach(GPU).as_bytes());
    assert_eq!((answer.status, answer.detail), (Status::Quota, 2));
    bed.attach(2, FPGA);
    assert_eq!(bed.detach_all(1).status, Status::Ok);
    bed.attach(3, GPU);
}

#[test]
fn map_refuses_each_thing_with_its_status() {
    let mut limited = spec();
    limited.limits.max_segments = 4;
    limited.limits.max_mappings = 2;
    limited.limits.iova = iommu_addr::Range::new(iommu_addr::Iova(0x1000), iommu_addr::Iova(0xffff_ffff)).unwrap();
    let mut bed = Bed::with(limited);
    bed.hello();
    bed.attach(1, GPU);
    let mut map =
        |iova, flags, segments: &[(u64, u64)]| refused(&mut bed, Opcode::Map, &map_bytes(iova, flags, segments));
    let one = &[(DATA, PAGE)];
    assert_eq!(map(0x1_0000, 0, one), Status::Inval, "neither read nor write");
    assert_eq!(map(0x1_0000, 4, one), Status::Inval, "a flag of ALLOC");
    assert_eq!(map(0x1_0001, RW, one), Status::Range, "address off the page");
    assert_eq!(map(0x1_0000, RW, &[(DATA + 1, PAGE)]), Status::Range, "guest address off the page");
    assert_eq!(map(0x1_0000, RW, &[(DATA, PAGE - 1)]), Status::Range, "length off the page");
    assert_eq!(map(0x1_0000, RW, &[(DATA, 0)]), Status::Inval, "no length");
    assert_eq!(map(0x1_0000, RW, &[(DATA, PAGE), (DATA, 0)]), Status::Inval, "no length behind another");
    assert_eq!(map(0, RW, one), Status::Range, "below the range");
    assert_eq!(map(0xffff_f000, RW, &[(DATA, 2 * PAGE)]), Status::Range, "beyond the range");
    assert_eq!(map(u64::MAX - 0xfff, RW, &[(DATA, 2 * PAGE)]), Status::Range, "past the end of the space");
    assert_eq!(map(0x1_0000, RW, &[(RAM_LEN - PAGE, 2 * PAGE)]), Status::Range, "not guest memory");
    assert_eq!(map(0x1_0000, RW, &[(u64::MAX - 0xfff, 2 * PAGE)]), Status::Range, "guest address past the end");
    assert_eq!(map(0x1_0000, RW, &[(DATA, PAGE); 5]), Status::Quota, "more segments than the limit");
    assert_eq!(map(0x1_0000, RW, &[(DATA, PAGE); 500]), Status::Quota, "many more");
    let mut bed_map =
        |iova, segments: &[(u64, u64)]| bed.call(Opcode::Map, 1, &map_bytes(iova, MAP_READ, segments)).status;
    assert_eq!(bed_map(0x1_0000, &[(DATA, PAGE); 4]), Status::Ok);
    assert_eq!(bed_map(0x1_3000, one), Status::Inval, "overlaps");
    assert_eq!(bed_map(0x1_4000, one), Status::Ok);
    assert_eq!(bed_map(0x2_0000, one), Status::Quota, "more mappings than the limit");
    assert_eq!(bed.unmap(1, 0x1_4000, 0x1_4fff).status, Status::Ok);
    assert_eq!(bed.call(Opcode::Map, 1, &map_bytes(0x2_0000, RW, one)).status, Status::Ok);
}

#[test]
fn map_counts_its_segments_exactly() {
    let mut bed = Bed::ready();
    let bytes = map_bytes(0x1_0000, RW, &[(DATA, PAGE); 3]);
    assert_eq!(refused(&mut bed, Opcode::Map, &bytes[..bytes.len() - 16]), Status::Inval, "one too few");
    assert_eq!(refused(&mut bed, Opcode::Map, &[&bytes[..], &[0; 16]].concat()), Status::Inval, "one too many");
    assert_eq!(refused(&mut bed, Opcode::Map, &[&bytes[..], &[0; 1]].concat()), Status::Inval, "a byte too many");
    assert_eq!(refused(&mut bed, Opcode::Map, &map_bytes(0x1_0000, RW, &[])), Status::Inval, "none");
    let mut wild = map_bytes(0x1_0000, RW, &[(DATA, PAGE)]);
    wild[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(refused(&mut bed, Opcode::Map, &wild), Status::Inval, "four billion");
}

#[test]
fn map_of_scattered_memory_is_one_mapping() {
    let mut bed = Bed::ready();
    let segments = [(DATA + 0x20_0000, PAGE), (DATA + 0x30_0000, 2 * PAGE), (DATA + 0x28_0000, PAGE)];
    bed.ok(Opcode::Map, 1, &map_bytes(1 << 36, RW, &segments));
    assert_eq!(bed.seen.gauge_of(Gauge::Mappings), 2);
    let bytes: Vec<u8> = (0..4 * PAGE).map(|i| (i / 7) as u8).collect();
    bed.set_ram(DATA, &bytes);
    let record = bed.run_one(1, copy(IOVA + DATA, 1 << 36, 4 * PAGE));
    assert_eq!(status(&record), Status::Ok);
    let back: Vec<u8> = segments.iter().flat_map(|(gpa, len)| bed.ram(*gpa, *len as usize)).collect();
    assert!(back == bytes);
    assert_eq!(bed.unmap(1, 1 << 36, (1 << 36) + PAGE - 1).status, Status::Range, "a part of it");
    assert_eq!(bed.unmap(1, 1 << 36, (1 << 36) + 4 * PAGE - 1).status, Status::Ok);
}

#[test]
fn unmap_is_that_of_virtio_iommu() {
    let mut bed = Bed::ready();
    let handle = bed.alloc(1, GPU, 1 << 40, PAGE);
    assert_eq!(bed.unmap(1, 0x5000, 0x4fff).status, Status::Inval, "last before first");
    assert_eq!(bed.unmap(1, 0x5000, 0x5fff).status, Status::Ok, "nothing there");
    assert_eq!(bed.unmap(1, IOVA + DATA, IOVA + DATA + PAGE - 1).status, Status::Range, "splits");
    assert_eq!(bed.unmap(1, 1 << 40, (1 << 40) + PAGE - 1).status, Status::Inval, "a buffer");
    assert_eq!(bed.unmap(1, 0, u64::MAX).status, Status::Inval, "a buffer among others");
    assert_eq!(bed.seen.gauge_of(Gauge::Mappings), 2, "nothing went");
    assert_eq!(bed.free(1, handle).status, Status::Ok);
    assert_eq!(bed.unmap(1, 0, u64::MAX).status, Status::Ok);
    assert_eq!(bed.seen.gauge_of(Gauge::Mappings), 0);
}

#[test]
fn alloc_refuses_each_thing_with_its_status() {
    let mut limited = spec();
    limited.limits.max_buffers = 3;
    limited.endpoints[0].granularity = 2 * PAGE;
    let mut bed = Bed::with(limited).prepared();
    let mut alloc =
        |endpoint, flags, iova, len| refused(&mut bed, Opcode::Alloc, alloc(endpoint, flags, iova, len).as_bytes());
    let at = 1 << 40;
    assert_eq!(alloc(GPU, 0, at, 2 * PAGE), Status::Inval, "neither read nor write");
    assert_eq!(alloc(GPU, RW | 1 << 7, at, 2 * PAGE), Status::Inval, "an unknown flag");
    assert_eq!(alloc(GPU, RW | ALLOC_WINDOWABLE, at, 2 * PAGE), Status::Unsupp);
    assert_eq!(alloc(GPU, RW, at, 0), Status::Inval, "nothing");
    assert_eq!(alloc(GPU, RW, at, PAGE), Status::Range, "off the granule");
    assert_eq!(alloc(GPU, RW, at + PAGE, 2 * PAGE), Status::Range, "address off the granule");
    assert_eq!(alloc(GPU, RW, u64::MAX - 0x1fff, 4 * PAGE), Status::Range, "past the end of the space");
    assert_eq!(alloc(GPU, RW, 1 << 62, 2 * PAGE), Status::Range, "outside the range");
    assert_eq!(alloc(GPU, RW, IOVA + DATA, 2 * PAGE), Status::Inval, "overlaps");
    assert_eq!(alloc(NIC, RW, at, PAGE), Status::NoEnt, "not attached");
    assert_eq!(alloc(EndpointId::local(77), RW, at, PAGE), Status::NoEnt, "does not exist");
    assert_eq!(alloc(GPU, RW, at, VRAM + 2 * PAGE), Status::NoMem);
    assert_eq!(alloc(GPU, RW | ALLOC_REGISTERS, at, PAGE), Status::Inval, "has no registers");
    assert_eq!(alloc(FPGA, RW | ALLOC_REGISTERS, at, 2 * PAGE), Status::Inval, "not their length");
    assert_eq!(alloc(FPGA, RW | ALLOC_REGISTERS, at + 1, PAGE), Status::Range, "address off the page");
    for index in 0..3 {
        bed.alloc(1, GPU, at + index * 2 * PAGE, 2 * PAGE);
    }
    let answer = bed.call(Opcode::Alloc, 1, common::alloc(GPU, RW, 1 << 41, 2 * PAGE).as_bytes());
    assert_eq!((answer.status, answer.detail), (Status::Quota, 3));
}

#[test]
fn refused_allocations_leave_all_memory_free() {
    let mut bed = Bed::ready();
    for _ in 0..3 {
        assert_eq!(refused(&mut bed, Opcode::Alloc, alloc(GPU, RW, IOVA + DATA, PAGE).as_bytes()), Status::Inval);
    }
    let handle = bed.alloc(1, GPU, 1 << 40, VRAM);
    assert_eq!(bed.free(1, handle).status, Status::Ok);
    bed.alloc(1, GPU, 1 << 40, VRAM);
}

#[test]
fn freed_handles_are_stale_and_foreign_ones_do_not_exist() {
    let mut bed = Bed::ready();
    bed.attach(2, GPU);
    bed.post_events(8);
    let (mine, theirs) = (bed.alloc(1, GPU, 1 << 40, PAGE), bed.alloc(2, GPU, 1 << 40, PAGE));
    assert_ne!(mine, theirs);
    let foreign = bed.free(1, theirs);
    let invented = bed.free(1, 0xdead_beef);
    assert_eq!((foreign.status, invented.status), (Status::NoEnt, Status::NoEnt));
    assert_eq!(bed.free(1, mine).status, Status::Ok);
    assert_eq!(bed.free(1, mine).status, Status::Stale);
    assert_eq!(bed.free(2, mine).status, Status::NoEnt, "another domain's, freed");
    let events: Vec<_> = bed.take_events().iter().map(|e| (e.domain.get(), e.reason, e.value.get())).collect();
    assert_eq!(events, [(1, 1, theirs), (1, 1, 0xdead_beef), (1, 5, mine), (2, 1, mine)]);
    assert_eq!(bed.seen.count_of(Counter::Faults), 4);
    let next = bed.alloc(1, GPU, 1 << 40, PAGE);
    assert_ne!(next, mine, "handles are never used again");
    assert_eq!(bed.free(2, theirs).status, Status::Ok);
}

#[test]
fn fresh_memory_reads_zero() {
    let mut bed = Bed::ready();
    let first = bed.alloc(1, GPU, 1 << 40, 8 * PAGE);
    assert_eq!(status(&bed.run_one(1, fill(1 << 40, 8 * PAGE, !0))), Status::Ok);
    assert_eq!(bed.vram(GPU, 0, 16), [0xff; 16]);
    assert_eq!(bed.free(1, first).status, Status::Ok);
    assert!(bed.vram(GPU, 0, VRAM as usize).iter().all(|byte| *byte == 0));
    bed.alloc(1, GPU, 1 << 40, VRAM);
    bed.run_one(1, fill(1 << 40, VRAM, !0));
    assert_eq!(bed.detach_all(1).status, Status::Ok);
    assert!(bed.vram(GPU, 0, VRAM as usize).iter().all(|byte| *byte == 0), "also after DETACH");
}

#[test]
fn memory_that_cannot_be_zeroed_is_never_given_again() {
    let mut bed = Bed::ready();
    let handle = bed.alloc(1, GPU, 1 << 40, VRAM / 2);
    bed.engine.set(Mode::Fail(0));
    assert_eq!(bed.free(1, handle).status, Status::Ok, "the buffer is gone all the same");
    bed.engine.set(Mode::Inline);
    let answer = bed.call(Opcode::Alloc, 1, alloc(GPU, RW, 1 << 40, VRAM).as_bytes());
    assert_eq!(answer.status, Status::NoMem);
    bed.alloc(1, GPU, 1 << 40, VRAM / 2);
}

#[test]
fn detach_of_one_endpoint_takes_its_buffers_and_rights() {
    let mut bed = Bed::ready();
    bed.alloc(1, GPU, 1 << 40, PAGE);
    bed.alloc(1, FPGA, 1 << 41, PAGE);
    bed.enable(1, FPGA, GPU, PEER_READ);
    assert_eq!(bed.call(Opcode::Detach, 1, attach(GPU).as_bytes()).status, Status::Ok);
    assert_eq!(bed.seen.gauge_of(Gauge::Buffers), 1);
    assert_eq!(status(&bed.run_one(1, fill(1 << 40, 8, 0).stream(1))), Status::Fault);
    assert_eq!(status(&bed.run_one(1, fill(1 << 41, 8, 0).stream(2))), Status::Ok);
    bed.attach(1, GPU);
    let reply: PeerReply = bed.ok(Opcode::PeerQuery, 1, peer(FPGA, GPU, 0).as_bytes()).read();
    assert_eq!(reply.rights.get(), 0, "rights do not come back");
}

#[test]
fn peer_rights_are_directional_and_tell_the_path() {
    let mut staged = spec();
    staged.reach.deny(GPU, FPGA, PathReason::PeerUnreachable);
    let mut bed = Bed::with(staged).prepared();
    let mut ask = |opcode, body: vdev_wire::Peer| {
        let answer = bed.call(opcode, 1, body.as_bytes());
        let reply = (answer.status == Status::Ok).then(|| answer.read::<PeerReply>());
        (answer.status, reply.map(|reply| (reply.rights.get(), reply.path.get(), reply.reason.get())))
    };
    let staged = (TransferPath::Staged as u16, PathReason::PeerUnreachable as u16);
    let direct = (TransferPath::Direct as u16, PathReason::PeerReachable as u16);
    let ok = |rights, (path, reason)| (Status::Ok, Some((rights, path, reason)));
    assert_eq!(ask(Opcode::PeerQuery, peer(GPU, FPGA, 0)), ok(0, staged));
    assert_eq!(ask(Opcode::PeerEnable, peer(GPU, FPGA, PEER_READ)), ok(PEER_READ, staged));
    assert_eq!(ask(Opcode::PeerEnable, peer(GPU, FPGA, PEER_READ)), (Status::Already, None));
    assert_eq!(ask(Opcode::PeerEnable, peer(GPU, FPGA, RW)), ok(RW, staged), "one is new");
    assert_eq!(ask(Opcode::PeerQuery, peer(FPGA, GPU, 0)), ok(0, direct), "not the other way");
    assert_eq!(ask(Opcode::PeerDisable, peer(GPU, FPGA, PEER_WRITE)), ok(PEER_READ, staged));
    assert_eq!(ask(Opcode::PeerDisable, peer(GPU, FPGA, PEER_WRITE)), ok(PEER_READ, staged), "nothing to do");
    assert_eq!(ask(Opcode::PeerEnable, peer(GPU, FPGA, 0)), (Status::Inval, None), "no right");
    assert_eq!(ask(Opcode::PeerEnable, peer(GPU, FPGA, 4)), (Status::Inval, None), "an unknown right");
    assert_eq!(ask(Opcode::PeerQuery, peer(GPU, FPGA, 1)), (Status::Inval, None), "a right in a query");
    assert_eq!(ask(Opcode::PeerEnable, peer(GPU, GPU, 1)), (Status::Inval, None), "with itself");
    assert_eq!(ask(Opcode::PeerEnable, peer(GPU, NIC, 1)), (Status::NoEnt, None), "owner not attached");
    assert_eq!(ask(Opcode::PeerEnable, peer(NIC, GPU, 1)), (Status::NoEnt, None), "accessor not attached");
    assert_eq!(ask(Opcode::PeerDisable, peer(NIC, GPU, 1)), (Status::NoEnt, None));
}

#[test]
fn pair_without_proof_gets_no_right_and_is_not_staged() {
    let mut unproven = spec();
    unproven.reach.refuse(GPU, FPGA, PathReason::Unproven);
    let mut bed = Bed::with(unproven).prepared();
    let enable = |bed: &mut Bed, accessor, owner| {
        let answer = bed.call(Opcode::PeerEnable, 1, peer(accessor, owner, PEER_WRITE).as_bytes());
        (answer.status, answer.detail, answer.body.len())
    };
    assert_eq!(enable(&mut bed, GPU, FPGA), (Status::Denied, 0, 0));
    let query: PeerReply = bed.ok(Opcode::PeerQuery, 1, peer(GPU, FPGA, 0).as_bytes()).read();
    let none = (0, TransferPath::None as u16, PathReason::Unproven as u16);
    assert_eq!((query.rights.get(), query.path.get(), query.reason.get()), none);
    let disable: PeerReply = bed.ok(Opcode::PeerDisable, 1, peer(GPU, FPGA, PEER_WRITE).as_bytes()).read();
    assert_eq!(disable, query, "there is nothing to take away");
    assert_eq!(enable(&mut bed, NIC, FPGA).0, Status::NoEnt, "not attached");
    assert_eq!(enable(&mut bed, FPGA, GPU).0, Status::Ok, "not the other way");
    bed.alloc(1, GPU, 1 << 40, PAGE);
    bed.alloc(1, FPGA, 1 << 41, PAGE);
    let sent = bed.engine.state.lock().unwrap().seen.len();
    assert_eq!(status(&bed.run_one(1, copy(1 << 40, 1 << 41, 64).by(GPU))), Status::Denied);
    assert_eq!(bed.engine.state.lock().unwrap().seen.len(), sent, "the engine has seen nothing of it");
}

#[test]
fn unproven_pair_says_so_only_of_endpoints_that_are_attached() {
    let mut unproven = spec();
    unproven.reach.refuse(GPU, NIC, PathReason::Unproven);
    let mut bed = Bed::with(unproven).prepared();
    assert_eq!(bed.call(Opcode::PeerEnable, 1, peer(GPU, NIC, PEER_READ).as_bytes()).status, Status::NoEnt);
    bed.attach(1, NIC);
    assert_eq!(bed.call(Opcode::PeerEnable, 1, peer(GPU, NIC, PEER_READ).as_bytes()).status, Status::Denied);
}

#[test]
fn stream_requests_check_their_fields() {
    let mut bed = Bed::ready();
    let reset = StreamReset { stream: 3.into(), reserved: 1.into() };
    assert_eq!(bed.call(Opcode::StreamReset, 1, reset.as_bytes()).status, Status::Inval);
    let cancel =
        |flags: u32, cookie: u64| vdev_wire::Cancel { stream: 0.into(), flags: flags.into(), cookie: cookie.into() };
    assert_eq!(bed.call(Opcode::Cancel, 1, cancel(2, 0).as_bytes()).status, Status::Inval);
    assert_eq!(bed.call(Opcode::Cancel, 1, cancel(1, 5).as_bytes()).status, Status::Inval);
    assert_eq!(bed.cancel(1, 0, None), (0, 0), "a stream that does not exist has nothing to cancel");
    bed.reset_stream(1, 77);
    assert_eq!(bed.call(Opcode::Flush, 1, Flush { reserved: 1.into() }.as_bytes()).status, Status::Inval);
    let _ = MAP_WRITE;
}

#[test]
fn every_request_is_counted() {
    let mut bed = Bed::ready();
    let (all, errors) = (bed.seen.count_of(Counter::ControlRequests), bed.seen.count_of(Counter::ControlErrors));
    bed.call(Opcode::Flush, 1, &[0; 8]);
    bed.call(Opcode::Flush, 9, &[0; 8]);
    assert_eq!(bed.seen.count_of(Counter::ControlRequests), all + 2);
    assert_eq!(bed.seen.count_of(Counter::ControlErrors), errors + 1);
}
