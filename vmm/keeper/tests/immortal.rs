//! Whatever a VMM says, and wherever workers end, the VMM sees what one worker that never ends would have answered, and the last worker knows
//! what that one would know.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use common::{
    ANSWER, Bed, Came, End, GET_CONFIG, GET_FEATURES, GET_PROTOCOL_FEATURES, GET_QUEUE_NUM, GET_VRING_BASE, NEED_REPLY,
    PROTOCOL, REPLY_ACK, REQUEST, RESET_DEVICE, RESET_OWNER, SET_BACKEND_REQ_FD, SET_CONFIG, SET_FEATURES,
    SET_MEM_TABLE, SET_OWNER, SET_PROTOCOL_FEATURES, SET_VRING_ADDR, SET_VRING_BASE, SET_VRING_CALL, SET_VRING_ENABLE,
    SET_VRING_ERR, SET_VRING_KICK, SET_VRING_NUM, frame, pair, send,
};
use proptest::prelude::*;
use vmm_keeper::{Event, MAX_FAILURES};

const RINGS: usize = 3;
const NO_FD: u64 = 0x100;

/// A descriptor, as a worker can tell it from others.
type File = u64;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Ring {
    num: u32,
    base: u32,
    addr: Option<Vec<u8>>,
    err: Option<File>,
    call: Option<File>,
    kick: Option<File>,
    enabled: bool,
    stopped: bool,
}

/// What a worker knows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Known {
    asked: bool,
    protocol: u64,
    owned: bool,
    features: Option<u64>,
    memory: Option<(Vec<u8>, Vec<File>)>,
    backend: Option<File>,
    rings: [Ring; RINGS],
}

/// A request as a worker sees it.
#[derive(Clone, Debug)]
struct Request {
    code: u32,
    flags: u32,
    payload: Vec<u8>,
    files: Vec<File>,
}

/// A worker would end itself over such a request.
#[derive(Debug)]
struct Fatal;

impl Request {
    fn number(&self) -> u64 {
        u64::from_ne_bytes(self.payload[..8].try_into().unwrap())
    }

    fn word(&self, at: usize) -> u32 {
        u32::from_ne_bytes(self.payload[at..at + 4].try_into().unwrap())
    }
}

impl From<Came> for Request {
    fn from(came: Came) -> Self {
        let files = came.fds.iter().map(inode).collect();
        Self { code: came.code, flags: came.flags, payload: came.payload, files }
    }
}

fn inode(fd: impl AsFd) -> File {
    rustix::fs::fstat(fd).unwrap().st_ino
}

impl Known {
    /// What there is to be known: the addresses of a ring that does not run may be too old to be told to the next worker.
    fn relevant(&self) -> Self {
        let mut known = self.clone();
        for ring in &mut known.rings {
            ring.stopped = false;
            ring.addr = ring.addr.take().filter(|_| ring.kick.is_some());
        }
        known
    }

    fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.relevant().hash(&mut hasher);
        hasher.finish()
    }

    /// Whether no VMM says that: a ring needs addresses to be started.
    fn is_absurd(&self, request: &Request) -> bool {
        let starts = request.code == SET_VRING_KICK && !request.files.is_empty();
        starts && self.rings[(request.number() & 0xff) as usize].addr.is_none()
    }

    fn reset(&mut self) {
        self.features = None;
        self.rings = Default::default();
    }

    /// Does what a request says; its answer, if it has one. Most answers depend on all that is known.
    fn step(&mut self, request: &Request) -> Result<Option<Vec<u8>>, Fatal> {
        let mut refused = false;
        let answer = match request.code {
            GET_FEATURES => {
                self.asked = true;
                Some(PROTOCOL.to_ne_bytes().to_vec())
            }
            GET_PROTOCOL_FEATURES => Some(REPLY_ACK.to_ne_bytes().to_vec()),
            GET_QUEUE_NUM | GET_CONFIG => Some(self.digest().to_ne_bytes().to_vec()),
            GET_VRING_BASE => {
                let progress = u32::from_ne_bytes(self.digest().to_ne_bytes()[..4].try_into().unwrap()) & 0xff;
                let ring = &mut self.rings[request.word(0) as usize];
                ring.base = ring.base.wrapping_add(progress);
                (ring.kick, ring.call, ring.stopped) = (None, None, true);
                Some(pair(request.word(0), ring.base))
            }
            _ => {
                refused = !self.set(request)?;
                None
            }
        };
        let acks = self.asked && self.protocol & REPLY_ACK != 0;
        let ack = || (acks && request.flags & NEED_REPLY != 0).then(|| u64::from(refused).to_ne_bytes().to_vec());
        Ok(answer.or_else(ack))
    }

    /// False if it is refused.
    fn set(&mut self, request: &Request) -> Result<bool, Fatal> {
        match request.code {
            SET_OWNER if self.owned => return Err(Fatal),
            SET_OWNER => self.owned = true,
            RESET_OWNER => {
                self.owned = false;
                self.reset();
            }
            RESET_DEVICE => self.reset(),
            SET_PROTOCOL_FEATURES => self.protocol = request.number(),
            SET_FEATURES => {
                self.features = Some(request.number());
                if request.number() & PROTOCOL == 0 {
                    self.rings.iter_mut().for_each(|ring| ring.enabled = true);
                }
            }
            SET_MEM_TABLE => {
                self.memory = Some((request.payload.clone(), request.files.clone()));
                // A ring that was stopped is in the memory of before, which nobody may rely on.
                self.rings.iter_mut().filter(|ring| ring.stopped).for_each(|ring| ring.addr = None);
            }
            SET_BACKEND_REQ_FD => self.backend = Some(request.files[0]),
            SET_CONFIG => {}
            SET_VRING_KICK | SET_VRING_CALL | SET_VRING_ERR => {
                let ring = &mut self.rings[(request.number() & 0xff) as usize];
                ring.stopped &= request.code != SET_VRING_KICK || request.files.is_empty();
                let slot = match request.code {
                    SET_VRING_KICK => &mut ring.kick,
                    SET_VRING_CALL => &mut ring.call,
                    _ => &mut ring.err,
                };
                *slot = request.files.first().copied();
            }
            _ => {
                let ring = &mut self.rings[request.word(0) as usize];
                match request.code {
                    SET_VRING_NUM if request.word(4) == 0 => return Ok(false),
                    SET_VRING_NUM => ring.num = request.word(4),
                    SET_VRING_BASE => ring.base = request.word(4),
                    SET_VRING_ADDR if self.memory.is_none() => return Err(Fatal),
                    SET_VRING_ADDR => (ring.addr, ring.stopped) = (Some(request.payload.clone()), false),
                    SET_VRING_ENABLE if self.features.is_none_or(|features| features & PROTOCOL == 0) => {
                        return Err(Fatal);
                    }
                    SET_VRING_ENABLE => ring.enabled = request.word(4) != 0,
                    code => panic!("no worker is sent {code}"),
                }
            }
        }
        Ok(true)
    }
}

/// One request of a VMM, and where its bytes are cut in two.
#[derive(Clone, Debug)]
struct Said {
    kind: u8,
    ring: u32,
    value: u16,
    file: usize,
    need_reply: bool,
    cut: u8,
}

fn said() -> impl Strategy<Value = Said> {
    let ring = 0..u32::try_from(RINGS).unwrap();
    (0..32_u8, ring, any::<u16>(), 0..4_usize, any::<bool>(), any::<u8>())
        .prop_map(|(kind, ring, value, file, need_reply, cut)| Said { kind, ring, value, file, need_reply, cut })
}

impl Said {
    fn request(&self, files: &[OwnedFd], acks: bool) -> Request {
        let number = u64::from(self.value);
        let pair = pair(self.ring, self.value.into());
        let with = |count: usize| (0..count).map(|n| inode(&files[(self.file + n) % files.len()])).collect::<Vec<_>>();
        let fd = |code, ring: u32| {
            let none = self.value.is_multiple_of(4);
            let number = u64::from(ring) | if none { NO_FD } else { 0 };
            (code, number.to_ne_bytes().to_vec(), with(usize::from(!none)))
        };
        let (code, payload, files) = match self.kind {
            0 => (GET_FEATURES, vec![], vec![]),
            1 => (SET_PROTOCOL_FEATURES, (number | REPLY_ACK).to_ne_bytes().to_vec(), vec![]),
            2 => (SET_PROTOCOL_FEATURES, (number & !REPLY_ACK).to_ne_bytes().to_vec(), vec![]),
            3 | 4 => (SET_OWNER, vec![], vec![]),
            5 => (RESET_OWNER, vec![], vec![]),
            6 => (RESET_DEVICE, vec![], vec![]),
            7 | 8 => (SET_FEATURES, (number | PROTOCOL).to_ne_bytes().to_vec(), vec![]),
            9 => (SET_FEATURES, number.to_ne_bytes().to_vec(), vec![]),
            10 | 11 => {
                let regions = usize::from(self.value % 3) + 1;
                let head = u64::try_from(regions).unwrap().to_ne_bytes().to_vec();
                let payload = [head, vec![self.cut; regions * 32]].concat();
                (SET_MEM_TABLE, payload, with(regions))
            }
            12 => (SET_BACKEND_REQ_FD, vec![], with(1)),
            13 | 14 => (SET_VRING_NUM, pair, vec![]),
            15 if acks => (SET_VRING_NUM, common::pair(self.ring, 0), vec![]),
            16 | 17 => (SET_VRING_BASE, pair, vec![]),
            18 | 19 => {
                let rest = number.to_ne_bytes().repeat(5)[..36].to_vec();
                (SET_VRING_ADDR, [self.ring.to_ne_bytes().to_vec(), rest].concat(), vec![])
            }
            20 | 21 => fd(SET_VRING_KICK, self.ring),
            22 => fd(SET_VRING_CALL, self.ring),
            23 => fd(SET_VRING_ERR, self.ring),
            24 | 25 => (SET_VRING_ENABLE, common::pair(self.ring, u32::from(self.value % 2)), vec![]),
            26 => (GET_VRING_BASE, common::pair(self.ring, 0), vec![]),
            27 => (GET_PROTOCOL_FEATURES, vec![], vec![]),
            28 => (SET_CONFIG, vec![1; usize::from(self.value % 200)], vec![]),
            29 => (GET_CONFIG, vec![2; usize::from(self.value % 4097)], vec![]),
            _ => (GET_QUEUE_NUM, vec![], vec![]),
        };
        // Only a refusal that is told leaves the worker as it was.
        let refused = code == SET_VRING_NUM && payload[4..] == [0; 4];
        let flags = REQUEST | if self.need_reply || refused { NEED_REPLY } else { 0 };
        Request { code, flags, payload, files }
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// The VMM sends so many pieces of frames.
    Say(usize),
    Turns(usize),
    /// The worker answers so many frames.
    Work(usize),
    /// The VMM reads.
    Hear,
    Die(Death),
}

#[derive(Clone, Debug)]
enum Death {
    AtOnce,
    /// It does one more thing and does not answer.
    Silently,
    /// It answers with as much as it gets out.
    Partly(u8),
    /// Nobody notices before the next one is there.
    Unnoticed,
}

fn step() -> impl Strategy<Value = Step> {
    let death = prop_oneof![
        Just(Death::AtOnce),
        Just(Death::Silently),
        any::<u8>().prop_map(Death::Partly),
        Just(Death::Unnoticed),
    ];
    prop_oneof![
        4 => (1..8_usize).prop_map(Step::Say),
        4 => (1..4_usize).prop_map(Step::Turns),
        4 => (1..6_usize).prop_map(Step::Work),
        1 => Just(Step::Hear),
        2 => death.prop_map(Step::Die),
    ]
}

struct World {
    bed: Bed,
    vmm: End,
    worker: End,
    known: Known,
    session: u32,
    /// Workers that ended since one had taken over.
    deaths: u32,
    to_say: VecDeque<(Vec<u8>, Vec<usize>)>,
    heard: Vec<(u32, Vec<u8>)>,
}

impl World {
    fn say(&mut self, files: &[OwnedFd]) -> bool {
        let Some((bytes, with)) = self.to_say.front() else { return false };
        let fds: Vec<BorrowedFd<'_>> = with.iter().map(|file| files[*file].as_fd()).collect();
        if send(&self.vmm.socket, bytes, &fds) == Ok(bytes.len()) {
            self.to_say.pop_front();
        }
        true
    }

    /// One frame. False if there is none.
    fn work(&mut self) -> bool {
        match self.worker.receive().map(Request::from) {
            None => false,
            Some(request) => {
                let answer = self.known.step(&request).expect("nothing is sent that a worker cannot take");
                if let Some(payload) = answer {
                    self.worker.send(request.code, ANSWER, &payload, &[]);
                }
                true
            }
        }
    }

    fn die(&mut self, how: &Death) {
        self.note_events();
        if self.deaths + 1 >= MAX_FAILURES {
            return;
        }
        self.deaths += 1;
        if let Death::Silently | Death::Partly(_) = how
            && let Some(request) = self.worker.receive().map(Request::from)
            && let Ok(Some(payload)) = self.known.step(&request)
            && let Death::Partly(cut) = how
        {
            let bytes = frame(request.code, ANSWER, &payload);
            self.worker.send_bytes(&bytes[..usize::from(*cut) % bytes.len()]);
        }
        self.session += 1;
        let noticed = !matches!(how, Death::Unnoticed);
        if noticed {
            // Whatever it left in its socket is lost.
            self.worker = End::new(std::os::unix::net::UnixStream::pair().unwrap().0);
            self.bed.turn();
        }
        self.worker = self.bed.add_worker(self.session, false);
        self.known = Known::default();
    }

    fn hear(&mut self) {
        self.heard.extend(self.vmm.receive_all().into_iter().map(|came| {
            assert_eq!(came.flags, ANSWER);
            (came.code, came.payload)
        }));
    }

    fn note_events(&mut self) {
        for event in self.bed.events() {
            match event {
                Event::Replayed { session } => {
                    assert!(session <= self.session);
                    self.deaths = self.session - session;
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

fn play(says: &[Said], steps: &[Step]) -> Result<(), TestCaseError> {
    let files: Vec<OwnedFd> = (0..4).map(|_| tempfile::tempfile().unwrap().into()).collect();
    let place = |file: &File| files.iter().position(|fd| inode(fd) == *file).unwrap();
    let mut immortal = Known::default();
    let mut expected = Vec::new();
    let mut to_say = VecDeque::new();
    for said in says {
        let request = said.request(&files, immortal.asked && immortal.protocol & REPLY_ACK != 0);
        let mut next = immortal.clone();
        let Ok(answer) = next.step(&request) else { continue };
        if immortal.is_absurd(&request) {
            continue;
        }
        immortal = next;
        expected.extend(answer.map(|payload| (request.code, payload)));
        let bytes = frame(request.code, request.flags, &request.payload);
        let cut = usize::from(said.cut) % bytes.len();
        let with: Vec<usize> = request.files.iter().map(place).collect();
        if cut == 0 {
            to_say.push_back((bytes, with));
        } else {
            to_say.push_back((bytes[..cut].to_vec(), with));
            to_say.push_back((bytes[cut..].to_vec(), Vec::new()));
        }
    }
    let (bed, vmm, worker) = Bed::connected();
    let known = Known::default();
    let mut world = World { bed, vmm, worker, known, session: 1, deaths: 0, to_say, heard: Vec::new() };
    for step in steps {
        match step {
            Step::Say(count) => (0..*count).for_each(|_| _ = world.say(&files)),
            Step::Turns(count) => (0..*count).for_each(|_| world.bed.turn()),
            Step::Work(count) => (0..*count).for_each(|_| _ = world.work()),
            Step::Hear => world.hear(),
            Step::Die(how) => world.die(how),
        }
    }
    for _ in 0..10_000 {
        let busy = world.say(&files);
        world.bed.settle();
        world.hear();
        if !world.work() && !busy {
            break;
        }
    }
    world.note_events();
    prop_assert_eq!(&world.heard, &expected);
    prop_assert_eq!(world.known.relevant(), immortal.relevant());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn workers_that_end_are_as_good_as_one_that_never_does(
        says in prop::collection::vec(said(), 0..60),
        steps in prop::collection::vec(step(), 0..80),
    ) {
        play(&says, &steps)?;
    }
}
