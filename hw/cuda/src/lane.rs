//! [`Lane`]: a stream of a GPU, and what is under way in it.
//!
//! Behind a run of copies the stream writes a number into a word of this process's memory. So looking whether they have ended costs no call of the driver,
//! and no thread waits inside it. For a microsecond or two around the writing the stream copies nothing. So a run is what was begun before the doorbell
//! rings, and, while a run before it is under way, also what comes after that, until it is long.
//!
//! Not here: which lane a transfer takes.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use hw_engine::{Atomic, EngineError, Finished, JobId};
use smallvec::SmallVec;

use crate::atomic::Kernel;
use crate::driver::CudaError;
use crate::engine::DEPTH;
use crate::gpu::{Gpu, Piece, Stream};
use crate::pinned::Pinned;
use crate::reach::Places;
use crate::registry::Registration;

/// Copies from which one call for all of them is quicker than one for each (H200, driver 580: 8 of 4 KiB take 15 us together and 18 us one by one, 64 take 70
/// and 122).
const BATCH: usize = 4;
/// From when on a run is long: whoever waits for the first copy of one waits no longer than that.
const LONG: Duration = Duration::from_micros(80);
/// Bytes a second for programs, which have next to none.
const PROGRAMS: u64 = 1_000_000_000;
/// What a copy takes whatever its length (as above: 4 KiB there and back take 7 us).
const LATENCY: Duration = Duration::from_micros(6);

/// A transfer under way.
#[derive(Debug)]
pub(crate) struct Ride {
    pub(crate) job: JobId,
    /// Bytes that have been moved once it ends.
    pub(crate) bytes: u64,
    pub(crate) result: Result<(), EngineError>,
    /// The driver has taken something of it, or may have.
    has_begun: bool,
    /// Where a program leaves what it finds, and that.
    number: Option<usize>,
    value: u64,
    /// What it uses of this process's memory, which stays registered as long.
    pub(crate) _holds: SmallVec<[Arc<Registration>; 2]>,
}

impl Ride {
    /// One of so many bytes.
    pub(crate) fn new(job: JobId, bytes: u64, holds: SmallVec<[Arc<Registration>; 2]>) -> Self {
        Self { job, bytes, result: Ok(()), has_begun: false, number: None, value: 0, _holds: holds }
    }

    /// It has ended for nothing.
    pub(crate) fn lost(self, error: EngineError) -> Self {
        Self { bytes: 0, result: Err(error), ..self }
    }

    /// Takes what a program has left.
    fn read(&mut self, numbers: &Pinned) {
        if let (Some(number), Ok(())) = (self.number, self.result) {
            // Relaxed: it was there before the lane's word was, as all that the stream did.
            self.value = numbers.number(number).load(Ordering::Relaxed);
        }
    }

    /// What is told of its end. What it holds is given back.
    pub(crate) fn end(self) -> Finished {
        Finished { job: self.job, bytes: self.bytes, result: self.result, raised: false, value: self.value }
    }
}

/// A ride with its copies, none of which has begun.
pub(crate) type Gathered = (Ride, SmallVec<[Piece; 2]>);

/// What a stream does for a ride.
#[derive(Debug)]
pub(crate) enum Load {
    Copies(SmallVec<[Piece; 2]>),
    Set { byte: u8, places: Places },
    Atomic { kernel: Kernel, at: u64, atomic: Atomic },
}

#[derive(Debug)]
struct Entry {
    ticket: u32,
    rides: Vec<Ride>,
    due: Instant,
}

#[derive(Debug)]
pub(crate) struct State {
    /// The last number that the stream was told to write.
    issued: u32,
    pending: VecDeque<Entry>,
    /// When all of it may have ended, at the speed that such copies have.
    free_at: Instant,
    /// What has begun, and of whose end the stream was not told to say anything yet.
    run: Vec<Ride>,
    /// Programs that have begun.
    programs: usize,
}

#[derive(Debug)]
pub(crate) struct Lane {
    stream: Stream,
    words: Arc<Pinned>,
    /// Which of the words is its own.
    index: usize,
    /// Where programs leave what they find, if it is for programs: as many numbers of eight bytes as transfers may be under way.
    numbers: Option<Pinned>,
    /// Bytes a second, about.
    speed: u64,
    /// It is for copies from this process's memory into the GPU's.
    is_into: bool,
    state: Mutex<State>,
    /// The number behind the last run that was collected.
    collected: AtomicU32,
    /// Runs that are pending or being made, for a look without the lock.
    busy: AtomicUsize,
}

impl Lane {
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        words: &Arc<Pinned>,
        index: usize,
        speed: u64,
        is_into: bool,
    ) -> Result<Self, CudaError> {
        let state =
            State { issued: 0, pending: VecDeque::new(), free_at: Instant::now(), run: Vec::new(), programs: 0 };
        let (stream, words, state) = (Stream::new(gpu)?, Arc::clone(words), Mutex::new(state));
        Ok(Self {
            stream,
            words,
            index,
            numbers: None,
            speed,
            is_into,
            state,
            collected: AtomicU32::new(0),
            busy: AtomicUsize::new(0),
        })
    }

    /// A lane for programs.
    pub(crate) fn for_programs(gpu: &Arc<Gpu>, words: &Arc<Pinned>, index: usize) -> Result<Self, CudaError> {
        let numbers = Pinned::new(gpu, DEPTH * size_of::<u64>())?;
        Ok(Self { numbers: Some(numbers), ..Self::new(gpu, words, index, PROGRAMS, false)? })
    }

    /// How many runs of copies are pending.
    pub(crate) fn busy(&self) -> usize {
        self.busy.load(Ordering::Acquire)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `None` while somebody has it.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(state)) => Some(state.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn word(&self) -> &AtomicU32 {
        self.words.word(self.index)
    }

    /// Begins a ride at once; it ends after the doorbell has rung. An error is one of the whole context; the ride is pending then, too.
    ///
    /// # Safety
    /// What the load names is memory of GPUs that this lane's one reaches and that live as long as the lane, or is in the ride's holds.
    pub(crate) unsafe fn begin(&self, mut ride: Ride, load: &Load) -> Result<(), CudaError> {
        let state = &mut *self.lock();
        if matches!(load, Load::Atomic { .. }) {
            // The one that had it before has been collected: no more than so many are under way.
            ride.number = Some(state.programs % DEPTH);
            state.programs = state.programs.wrapping_add(1);
        }
        // SAFETY: as the caller promises; the ride keeps it until the stream has passed it.
        unsafe { self.load(&mut ride, load) };
        if state.run.is_empty() {
            self.busy.fetch_add(1, Ordering::AcqRel);
        }
        state.run.push(ride);
        if self.is_long(bytes(&state.run)) { self.seal_run(state) } else { Ok(()) }
    }

    /// Has the stream say when what was begun has ended, at once or when it has passed what is before that. An error is one of the whole context.
    pub(crate) fn doorbell(&self) -> Result<(), CudaError> {
        if self.busy() == 0 {
            return Ok(());
        }
        let state = &mut *self.lock();
        if state.pending.is_empty() { self.seal_run(state) } else { Ok(()) }
    }

    /// Has the stream say when all that was begun has ended, and answers the number that it writes then. An error is one of the whole context.
    pub(crate) fn mark(&self) -> Result<u32, CudaError> {
        let state = &mut *self.lock();
        self.seal_run(state)?;
        Ok(state.issued)
    }

    /// Whether all has been collected that was begun before a mark.
    pub(crate) fn has_passed(&self, mark: u32) -> bool {
        has_come(self.collected.load(Ordering::Acquire), mark)
    }

    /// Whether copies of so many bytes are a long run.
    pub(crate) fn is_long(&self, bytes: u64) -> bool {
        self.time(bytes) >= LONG
    }

    /// What copies take at the speed of this way.
    fn time(&self, bytes: u64) -> Duration {
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.speed);
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    fn seal_run(&self, state: &mut State) -> Result<(), CudaError> {
        if state.run.is_empty() {
            return Ok(());
        }
        let run = std::mem::take(&mut state.run);
        self.seal(state, run)
    }

    /// Begins rides together, with the lane's lock; they are a run. An error is one of the whole context.
    ///
    /// # Safety
    /// As for [`Lane::begin`], for each.
    pub(crate) unsafe fn begin_all(
        &self,
        mut state: MutexGuard<'_, State>,
        gathered: Vec<Gathered>,
    ) -> Result<(), CudaError> {
        let all: Vec<Piece> = gathered.iter().flat_map(|(_, pieces)| pieces.iter().copied()).collect();
        let tried = all.len() >= BATCH && !(self.is_into && all.iter().any(Piece::is_short));
        // SAFETY: as the caller promises; the rides keep it until the stream has passed it.
        let begun = tried && unsafe { self.stream.copy_all(&all) }.is_some_and(|answer| answer.is_ok());
        let mut rides = Vec::with_capacity(gathered.len());
        for (mut ride, pieces) in gathered {
            if !begun {
                // Once more, if a call for all was refused: so only those fail that have to.
                // SAFETY: as above.
                unsafe { self.load(&mut ride, &Load::Copies(pieces)) };
            }
            ride.has_begun |= tried;
            rides.push(ride);
        }
        self.busy.fetch_add(1, Ordering::AcqRel);
        self.seal(&mut state, rides)
    }

    /// Puts a load into the stream, and notes in the ride if it is refused.
    ///
    /// # Safety
    /// As for [`Lane::begin`].
    unsafe fn load(&self, ride: &mut Ride, load: &Load) {
        let mut begun = 0;
        let mut note = |len: u64, answer: Result<(), CudaError>| match answer {
            Ok(()) => {
                begun += len;
                true
            }
            Err(error) => {
                tracing::debug!("A copy was refused: {error}");
                ride.result = Err(device_error(&error));
                false
            }
        };
        let _all = match load {
            Load::Copies(pieces) if self.is_into => pieces.iter().flat_map(|piece| piece.parts()).all(|(part, len)| {
                // SAFETY: as the caller promises.
                note(len, unsafe { self.stream.copy_in(part) })
            }),
            Load::Copies(pieces) => pieces.iter().all(|piece| {
                // SAFETY: as the caller promises.
                note(piece.len, unsafe { self.stream.copy(*piece) })
            }),
            Load::Set { byte, places } => places.iter().all(|(at, len)| {
                // SAFETY: as the caller promises.
                note(*len, unsafe { self.stream.set(*at, *byte, *len) })
            }),
            Load::Atomic { kernel, at, atomic } => match (&self.numbers, ride.number) {
                (Some(numbers), Some(number)) => {
                    let into = numbers.address() + (number * size_of::<u64>()) as u64;
                    // SAFETY: as the caller promises; the lane holds the numbers until the stream has gone.
                    note(atomic.len, unsafe { kernel.launch(&self.stream, *at, into, *atomic) })
                }
                // Only the lane for programs is given any.
                _ => {
                    ride.result = Err(EngineError::NO_ATOMICS);
                    false
                }
            },
        };
        ride.bytes = begun;
        ride.has_begun |= begun > 0;
    }

    /// Has the stream say when it has passed what was put into it.
    fn seal(&self, state: &mut State, rides: Vec<Ride>) -> Result<(), CudaError> {
        state.free_at = state.free_at.max(Instant::now()) + self.time(bytes(&rides));
        state.issued = state.issued.wrapping_add(1);
        state.pending.push_back(Entry { ticket: state.issued, rides, due: state.free_at + LATENCY });
        // SAFETY: the words are registered, and the lane holds them until the stream has gone.
        unsafe { self.stream.write(self.word(), state.issued) }
    }

    /// Appends the rides that have ended, and says when the next one may. `None` if none is under way. An error is one of the whole context; one that is broken
    /// already gets nothing more to do.
    pub(crate) fn collect(&self, out: &mut Vec<Ride>, is_broken: bool) -> Result<Option<Instant>, CudaError> {
        if self.busy() == 0 {
            return Ok(None);
        }
        let state = &mut *self.lock();
        // Acquire: what the copies wrote is there once the number is.
        let passed = self.word().load(Ordering::Acquire);
        while let Some(mut entry) = state.pending.pop_front_if(|entry| has_come(passed, entry.ticket)) {
            if let Some(numbers) = &self.numbers {
                entry.rides.iter_mut().for_each(|ride| ride.read(numbers));
            }
            out.extend(entry.rides);
            self.collected.store(entry.ticket, Ordering::Release);
            self.busy.fetch_sub(1, Ordering::AcqRel);
        }
        if state.pending.is_empty() && !is_broken {
            self.seal_run(state)?;
        }
        Ok(state.pending.front().map(|entry| entry.due))
    }

    /// The context is broken: appends what has not begun. The GPU may carry out everything else all the same (H200, driver 580: while every call fails, copies go
    /// on, and the words behind them come), so that ends when its word comes, or never.
    pub(crate) fn break_off(&self, out: &mut Vec<Ride>) {
        let State { pending, run, .. } = &mut *self.lock();
        for rides in pending.iter_mut().map(|entry| &mut entry.rides).chain([run]) {
            out.extend(rides.extract_if(.., |ride| !ride.has_begun));
        }
    }

    /// An error is one of the whole context.
    pub(crate) fn check(&self) -> Result<(), CudaError> {
        self.stream.query().map(drop)
    }
}

/// Whether a stream that has come to one number has come to another. Those that are under way are less than half of all.
fn has_come(to: u32, ticket: u32) -> bool {
    to.wrapping_sub(ticket) < u32::MAX / 2
}

fn bytes(rides: &[Ride]) -> u64 {
    rides.iter().map(|ride| ride.bytes).sum()
}

/// What the device is told of a call that failed.
pub(crate) fn device_error(error: &CudaError) -> EngineError {
    let code = match error {
        CudaError::Call { code, .. } => *code,
        _ => u32::MAX,
    };
    EngineError::Device { code }
}
