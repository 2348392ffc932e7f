//! A channel between processes, with friendly and with hostile ends.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use proptest::prelude::*;
use rustix::io::{FdFlags, fcntl_getfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vmm_broker::{
    Channel, ChannelError, Completion, Endpoint, EndpointKind, FromKeeper, Function, Gpu, GpuPeer, IommuMode,
    KeeperSetup, Limits, Link, MAX_FDS, MAX_PAYLOAD, Setup, SetupFds, Staged, ToKeeper, ToSupervisor, ToWorker,
    UnsealedMemory,
};

fn setup(endpoints: usize) -> Setup {
    let endpoint = |n| Endpoint {
        name: format!("gpu{n}"),
        kind: EndpointKind::Gpu,
        memory_len: 1 << 20,
        engines: 2,
        link: 0,
        function: None,
        gpu: None,
    };
    Setup {
        tenant: "vm0".into(),
        session: 3,
        submit_queues: 2,
        endpoints: (0..endpoints).map(endpoint).collect(),
        links: vec![Link { bandwidth: 16_000_000_000, latency_ns: 1000 }],
        staged: vec![Staged { accessor: 0, owner: 1 }],
        place: 5,
        limits: Limits { max_domains: Some(7), ..Limits::default() },
        drained: true,
        unsealed_memory: UnsealedMemory::Refuse,
        iommu: IommuMode::Lazy,
    }
}

fn null() -> OwnedFd {
    std::fs::File::open("/dev/null").unwrap().into()
}

/// Sends bytes and descriptors past the typed interface.
fn send_raw(channel: &Channel, payload: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(200))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
    sendmsg(channel, &[IoSlice::new(payload)], &mut control, SendFlags::empty()).unwrap();
}

#[test]
fn a_setup_arrives_with_its_descriptors_in_order_and_close_on_exec() {
    let (supervisor, worker) = Channel::pair().unwrap();
    let (mut kept, slice) = std::os::unix::net::UnixStream::pair().unwrap();
    let (listener, page, ledger, journal) = (null(), null(), null(), null());
    let sent = ToWorker::Setup(Box::new(setup(1)));
    let fds = [&listener, &page, &ledger, &journal].map(AsFd::as_fd);
    supervisor.send(&sent, &[&fds[..], &[slice.as_fd()]].concat()).unwrap();

    let (received, fds) = worker.receive::<ToWorker>().unwrap().unwrap();
    assert_eq!(received, sent);
    assert!(fds.iter().all(|fd| fcntl_getfd(fd).unwrap().contains(FdFlags::CLOEXEC)));
    let ToWorker::Setup(setup) = received else { panic!("not a set-up") };
    let fds = SetupFds::sort(&setup, fds).unwrap();
    let [slice] = <[OwnedFd; 1]>::try_from(fds.slices).unwrap();
    std::fs::File::from(slice).write_all(b"x").unwrap();
    let mut byte = [0];
    kept.read_exact(&mut byte).unwrap();
    assert_eq!(&byte, b"x");
}

#[test]
fn functions_have_a_container_and_two_descriptors_each_behind_the_memory_files() {
    let of = |address: &str, part| Some(Function { address: address.into(), part, unmapped: 0 });
    let mut setup = setup(5);
    // Two parts of one function, and another function, with simulated slices between.
    (setup.endpoints[0].function, setup.endpoints[2].function) = (of("0000:01:00.0", 1), of("0000:02:00.0", 2));
    setup.endpoints[3].function = of("0000:01:00.0", 2);
    assert_eq!(setup.functions(), ["0000:01:00.0", "0000:02:00.0"]);
    let fds: Vec<_> = (0..4 + 2 + 1 + 4).map(|_| null()).collect();
    let raw: Vec<_> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let sorted = SetupFds::sort(&setup, fds).unwrap();
    assert_eq!(sorted.slices.iter().map(AsRawFd::as_raw_fd).collect::<Vec<_>>(), raw[4..6]);
    let functions = sorted.functions.unwrap();
    assert_eq!(functions.container.as_raw_fd(), raw[6]);
    let pairs: Vec<_> = functions.functions.iter().flat_map(|(device, watch)| [device, watch]).collect();
    assert_eq!(pairs.iter().map(|fd| fd.as_raw_fd()).collect::<Vec<_>>(), raw[7..]);
    assert!(SetupFds::sort(&setup, (0..10).map(|_| null()).collect()).is_err());
    assert!(SetupFds::sort(&self::setup(2), (0..6).map(|_| null()).collect()).unwrap().functions.is_none());
}

#[test]
fn gpus_come_by_name_and_have_no_descriptor() {
    let of = |which: &str| Some(Gpu { which: which.into(), completion: Completion::Spin });
    let mut sent = setup(4);
    (sent.endpoints[0].gpu, sent.endpoints[2].gpu, sent.endpoints[3].gpu) =
        (of("0000:06:00.0"), of("GPU-1"), of("GPU-1"));
    assert_eq!(sent.gpus(), ["0000:06:00.0", "GPU-1"]);
    let (supervisor, worker) = Channel::pair().unwrap();
    let fds: Vec<_> = (0..4 + 1).map(|_| null()).collect();
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    supervisor.send(&ToWorker::Setup(Box::new(sent.clone())), &fds).unwrap();
    let (received, fds) = worker.receive::<ToWorker>().unwrap().unwrap();
    assert_eq!(received, ToWorker::Setup(Box::new(sent.clone())));
    assert_eq!(SetupFds::sort(&sent, fds).unwrap().slices.len(), 1);
}

#[test]
fn as_many_peers_as_may_be_fit_into_a_message() {
    let link = Some("PCIe through several switches (PXB)".into());
    let peer = GpuPeer { accessor: 31, owner: 30, access: false, atomics: false, rank: i32::MIN, link };
    let (supervisor, worker) = Channel::pair().unwrap();
    let message = ToSupervisor::Peers { peers: vec![peer; GpuPeer::MOST] };
    worker.send(&message, &[]).unwrap();
    assert_eq!(supervisor.receive::<ToSupervisor>().unwrap().unwrap().0, message);
}

#[test]
fn messages_keep_their_borders_and_their_order() {
    let (supervisor, worker) = Channel::pair().unwrap();
    worker.send(&ToSupervisor::Ready {}, &[]).unwrap();
    worker.send(&ToSupervisor::Failed { reason: "no\nmemory".into() }, &[]).unwrap();
    drop(worker);
    let next = || supervisor.receive::<ToSupervisor>().unwrap().map(|(message, _)| message);
    assert_eq!(next(), Some(ToSupervisor::Ready {}));
    assert_eq!(next(), Some(ToSupervisor::Failed { reason: "no\nmemory".into() }));
    assert_eq!(next(), None);
}

#[test]
fn a_keeper_is_handed_one_descriptor_with_each_message_that_has_one() {
    let (supervisor, keeper) = Channel::pair().unwrap();
    let fd = null();
    let messages = [
        (ToKeeper::Setup(KeeperSetup { tenant: "vm0".into() }), 1),
        (ToKeeper::Worker { session: 7, fresh: true }, 1),
        (ToKeeper::Shutdown {}, 0),
    ];
    for (sent, fds) in messages {
        assert!(matches!(supervisor.send(&sent, &[fd.as_fd(), fd.as_fd()]), Err(ChannelError::Fds { .. })));
        supervisor.send(&sent, &[fd.as_fd()][..fds]).unwrap();
        let (received, with) = keeper.receive::<ToKeeper>().unwrap().unwrap();
        assert_eq!((received, with.len()), (sent, fds));
    }
    for sent in
        [FromKeeper::Connected {}, FromKeeper::Replayed { session: 7 }, FromKeeper::GaveUp { reason: "x".into() }]
    {
        keeper.send(&sent, &[]).unwrap();
        assert_eq!(supervisor.receive::<FromKeeper>().unwrap().unwrap().0, sent);
    }
}

#[test]
fn the_other_end_closing_is_an_end_when_receiving_and_an_error_when_sending() {
    let (supervisor, worker) = Channel::pair().unwrap();
    drop(worker);
    assert!(supervisor.receive::<ToSupervisor>().unwrap().is_none());
    assert!(matches!(supervisor.send(&ToWorker::Shutdown {}, &[]), Err(ChannelError::Socket { .. })));
}

#[test]
fn an_end_that_closes_before_it_has_received_everything_is_an_end() {
    let (supervisor, worker) = Channel::pair().unwrap();
    supervisor.send(&ToWorker::Shutdown {}, &[]).unwrap();
    drop(worker);
    assert!(supervisor.receive::<ToSupervisor>().unwrap().is_none());
}

#[test]
fn an_end_that_must_not_block_says_so() {
    let (supervisor, _worker) = Channel::pair().unwrap();
    supervisor.set_nonblocking().unwrap();
    assert!(supervisor.receive::<ToSupervisor>().unwrap_err().would_block());
    let full = loop {
        if let Err(error) = supervisor.send(&ToWorker::Shutdown {}, &[]) {
            break error;
        }
    };
    assert!(full.would_block());
}

#[test]
fn a_message_is_not_sent_with_other_descriptors_than_its_own() {
    let (supervisor, worker) = Channel::pair().unwrap();
    let fd = null();
    let sent = supervisor.send(&ToWorker::Shutdown {}, &[fd.as_fd()]);
    assert!(matches!(sent, Err(ChannelError::Fds { wanted: 0, actual: 1 })));
    let too_many = ToWorker::Setup(Box::new(setup(MAX_FDS)));
    let fds = vec![fd.as_fd(); MAX_FDS + 4];
    assert!(matches!(supervisor.send(&too_many, &fds), Err(ChannelError::TooManyFds)));
    drop(supervisor);
    assert!(worker.receive::<ToWorker>().unwrap().is_none(), "nothing was sent");
}

#[test]
fn a_message_too_long_to_receive_is_not_sent() {
    let (_supervisor, worker) = Channel::pair().unwrap();
    let long = ToSupervisor::Failed { reason: "x".repeat(MAX_PAYLOAD) };
    assert!(matches!(worker.send(&long, &[]), Err(ChannelError::TooLong)));
}

#[test]
fn hostile_packets_are_errors_that_leave_no_descriptor_behind() {
    let (supervisor, worker) = Channel::pair().unwrap();
    let (mut left_behind, fd) = std::io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&left_behind, true).unwrap();
    let failure = |payload: &[u8], fds: usize| {
        send_raw(&worker, payload, &vec![fd.as_fd(); fds]);
        supervisor.receive::<ToSupervisor>().unwrap_err()
    };
    assert!(matches!(failure(&vec![b' '; MAX_PAYLOAD + 1], 0), ChannelError::TooLong));
    assert!(matches!(failure(br#"{"ready":{}}"#, MAX_FDS + 9), ChannelError::UnwantedFds));
    assert!(matches!(failure(br#"{"ready":{}}"#, 1), ChannelError::UnwantedFds));
    for garbage in
        [&b"\0"[..], b"{", b"[]", b"{\"ready\":{}", br#"{"ready":{}} x"#, br#"{"ready":{"x":1}}"#, b"\xff\xfe"]
    {
        assert!(matches!(failure(garbage, 2), ChannelError::UnwantedFds), "{garbage:?}");
        assert!(matches!(failure(garbage, 0), ChannelError::Malformed { .. }), "{garbage:?}");
    }
    assert!(matches!(failure(&"[".repeat(MAX_PAYLOAD).into_bytes(), 0), ChannelError::Malformed { .. }));
    drop(fd);
    assert_eq!(left_behind.read(&mut [0]).unwrap(), 0, "no copy of the descriptor is open");

    worker.send(&ToSupervisor::Ready {}, &[]).unwrap();
    assert!(supervisor.receive::<ToSupervisor>().unwrap().is_some(), "the channel goes on");
}

#[test]
fn more_descriptors_than_a_setup_can_have_are_refused() {
    let (supervisor, worker) = Channel::pair().unwrap();
    let fd = null();
    send_raw(&supervisor, br#"{"shutdown":{}}"#, &vec![fd.as_fd(); MAX_FDS + 9]);
    assert!(matches!(worker.receive::<ToWorker>(), Err(ChannelError::TooManyFds)));
}

#[test]
fn a_setup_with_another_number_of_slices_than_descriptors_is_refused() {
    let (supervisor, worker) = Channel::pair().unwrap();
    let payload = serde_json::to_vec(&ToWorker::Setup(Box::new(setup(2)))).unwrap();
    let fd = null();
    for count in [0, 4, 5, 7] {
        send_raw(&supervisor, &payload, &vec![fd.as_fd(); count]);
        let error = worker.receive::<ToWorker>().unwrap_err();
        assert!(matches!(error, ChannelError::Fds { wanted: 6, actual } if actual == count), "{error}");
        assert!(SetupFds::sort(&setup(2), (0..count).map(|_| null()).collect()).is_err());
    }
}

#[test]
fn only_a_packet_socket_is_a_channel() {
    let (stream, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    assert!(matches!(Channel::from_fd(stream.into()), Err(ChannelError::NotAChannel)));
    assert!(matches!(Channel::from_fd(null()), Err(ChannelError::NotAChannel)));
    let (one, _other) = Channel::pair().unwrap();
    assert!(Channel::from_fd(one.into_fd()).is_ok());
}

proptest! {
    #[test]
    fn random_bytes_never_panic_and_never_desynchronise(payload in proptest::collection::vec(any::<u8>(), 1..300), fds in 0..5_usize) {
        let (supervisor, worker) = Channel::pair().unwrap();
        let fd = null();
        send_raw(&supervisor, &payload, &vec![fd.as_fd(); fds]);
        prop_assert!(worker.receive::<ToWorker>().is_err());
        supervisor.send(&ToWorker::Shutdown {}, &[]).unwrap();
        let next = worker.receive::<ToWorker>().unwrap().unwrap().0;
        prop_assert_eq!(next, ToWorker::Shutdown {});
    }

    #[test]
    fn cut_messages_are_refused(len in 1..400_usize) {
        let payload = serde_json::to_vec(&ToWorker::Setup(Box::new(setup(0)))).unwrap();
        let cut = &payload[..len.min(payload.len() - 1)];
        let (supervisor, worker) = Channel::pair().unwrap();
        send_raw(&supervisor, cut, &[]);
        let is_malformed = matches!(worker.receive::<ToWorker>(), Err(ChannelError::Malformed { .. }));
        prop_assert!(is_malformed);
    }
}
