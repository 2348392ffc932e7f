//! Commands of one piece: which are out, which have ended, and how many bytes from the first on have moved.
//!
//! Not here: starting them.

use hw_engine::EngineError;

use crate::Command;
use crate::host::Mapped;

/// Commands, in the order of their bytes, and what each needs mapped.
pub(crate) type Commands = Vec<(Command, Option<Mapped>)>;

/// What went wrong, after so many bytes from the first on.
pub(crate) struct Short {
    pub(crate) bytes: u64,
    pub(crate) error: EngineError,
}

impl<E: Into<EngineError>> From<E> for Short {
    fn from(error: E) -> Self {
        Self { bytes: 0, error: error.into() }
    }
}

/// Where a command is.
enum Place {
    Waits,
    /// In that slot of the device's.
    Out(usize),
    Done,
    Failed,
}

pub(crate) struct Flight {
    commands: Vec<(Command, Option<Mapped>, Place)>,
    /// The first one that waits.
    next: usize,
    free: Vec<usize>,
    out: usize,
    error: Option<EngineError>,
}

impl Flight {
    /// With `depth` slots.
    pub(crate) fn new(commands: Commands, depth: usize) -> Self {
        let commands = commands.into_iter().map(|(command, mapped)| (command, mapped, Place::Waits)).collect();
        Self { commands, next: 0, free: (0..depth).rev().collect(), out: 0, error: None }
    }

    /// The next command to start, and in which slot; none after a failure.
    pub(crate) fn next(&mut self) -> Option<(usize, Command)> {
        if self.error.is_some() {
            return None;
        }
        let (command, _, place) = self.commands.get_mut(self.next)?;
        let slot = self.free.pop()?;
        *place = Place::Out(slot);
        self.next += 1;
        self.out += 1;
        Some((slot, *command))
    }

    /// A command has ended; what it needed is unmapped.
    pub(crate) fn end(&mut self, slot: usize, outcome: Result<(), u32>) {
        let is_it = |place: &Place| matches!(place, Place::Out(of) if *of == slot);
        let Some((_, mapped, place)) = self.commands.iter_mut().find(|(_, _, place)| is_it(place)) else { return };
        *mapped = None;
        *place = if outcome.is_ok() { Place::Done } else { Place::Failed };
        self.out -= 1;
        self.free.push(slot);
        if let Err(code) = outcome {
            self.fail(EngineError::Device { code });
        }
    }

    /// It is to end early, if there is anything left to start.
    pub(crate) fn give_up(&mut self) {
        if self.next < self.commands.len() {
            self.fail(EngineError::Aborted);
        }
    }

    /// No more are started.
    fn fail(&mut self, error: EngineError) {
        self.error.get_or_insert(error);
    }

    /// Nothing is out, and nothing will be.
    pub(crate) fn is_over(&self) -> bool {
        self.out == 0 && (self.error.is_some() || self.next == self.commands.len())
    }

    /// What came of it.
    pub(crate) fn result(&self) -> Result<(), Short> {
        self.error.map_or(Ok(()), |error| Err(self.gone(error)))
    }

    /// What had moved before an error: what ended well before the first command that did not.
    pub(crate) fn gone(&self, error: EngineError) -> Short {
        let len = |command: &Command| match command {
            Command::In { len, .. } | Command::Out { len, .. } | Command::Zero { len, .. } => *len,
            Command::Flush => 0,
        };
        let done = self.commands.iter().take_while(|(_, _, place)| matches!(place, Place::Done));
        Short { bytes: done.map(|(command, _, _)| len(command)).sum(), error }
    }
}
