//! Devices that lie, on purpose: memory of one endpoint as another one's engine sees it when the way between them is broken.
//!
//! A [`View`] stands in for the memory in everything that its endpoint does. Owners and everybody else see the memory itself.
//!
//! Not here: who finds out (`hw_engine::proof`).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hw_engine::{Atomic, Memory, MemoryError, Place};
use iommu_addr::{EndpointId, Location};

/// A way between two endpoints that is broken, and says nothing of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// What `accessor` writes to `owner`'s memory goes to a copy that it alone reads back.
    PrivateMirror {
        /// Who acts.
        accessor: EndpointId,
        /// Whose memory it is.
        owner: EndpointId,
    },
    /// What `accessor` writes to `owner`'s memory is reported as written, and is not.
    DroppedWrite {
        /// Who acts.
        accessor: EndpointId,
        /// Whose memory it is.
        owner: EndpointId,
    },
}

impl Flaw {
    fn accessor(self) -> EndpointId {
        match self {
            Self::PrivateMirror { accessor, .. } | Self::DroppedWrite { accessor, .. } => accessor,
        }
    }

    fn owner(self) -> EndpointId {
        match self {
            Self::PrivateMirror { owner, .. } | Self::DroppedWrite { owner, .. } => owner,
        }
    }
}

/// Memory as an endpoint with flaws sees it.
pub(crate) struct View {
    pub(crate) accessor: EndpointId,
    memory: Arc<dyn Memory>,
    flaws: Vec<Flaw>,
    /// Bytes that nobody else has.
    mirror: Mutex<HashMap<Location, u8>>,
}

impl View {
    /// A view for each endpoint that has a flaw.
    pub(crate) fn of(flaws: &[Flaw], memory: &Arc<dyn Memory>) -> Vec<Self> {
        let mut views: Vec<Self> = Vec::new();
        for flaw in flaws {
            match views.iter_mut().find(|view| view.accessor == flaw.accessor()) {
                Some(view) => view.flaws.push(*flaw),
                None => views.push(Self {
                    accessor: flaw.accessor(),
                    memory: Arc::clone(memory),
                    flaws: vec![*flaw],
                    mirror: Mutex::default(),
                }),
            }
        }
        views
    }

    fn flaw(&self, at: Location) -> Option<Flaw> {
        self.flaws.iter().copied().find(|flaw| Some(flaw.owner()) == at.owner())
    }

    fn mirror(&self) -> MutexGuard<'_, HashMap<Location, u8>> {
        self.mirror.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Each byte of a run with its place.
fn places(at: Location, len: usize) -> impl Iterator<Item = Location> {
    (0..len as u64).map_while(move |skip| at.checked_add(skip))
}

impl Memory for View {
    fn copy(&self, dst: Location, src: Location, len: u64) -> Result<(), MemoryError> {
        if self.flaw(src).or(self.flaw(dst)).is_none() {
            return self.memory.copy(dst, src, len);
        }
        let mut bytes = vec![0; usize::try_from(len).ok().ok_or(MemoryError { at: src, len })?];
        self.read(src, &mut bytes)?;
        self.write(dst, &bytes)
    }

    fn fill(&self, dst: Location, len: u64, pattern: u64) -> Result<(), MemoryError> {
        if self.flaw(dst).is_none() {
            return self.memory.fill(dst, len, pattern);
        }
        let len = usize::try_from(len).ok().ok_or(MemoryError { at: dst, len })?;
        let bytes: Vec<u8> = pattern.to_le_bytes().into_iter().cycle().take(len).collect();
        self.write(dst, &bytes)
    }

    fn read(&self, src: Location, into: &mut [u8]) -> Result<(), MemoryError> {
        self.memory.read(src, into)?;
        if self.flaw(src).is_some() {
            let mirror = self.mirror();
            for (at, byte) in places(src, into.len()).zip(into) {
                *byte = mirror.get(&at).copied().unwrap_or(*byte);
            }
        }
        Ok(())
    }

    fn atomic(&self, at: Location, atomic: Atomic) -> Result<u64, MemoryError> {
        self.memory.atomic(at, atomic)
    }

    fn place(&self, at: Location, most: u64) -> Option<Place> {
        self.memory.place(at, most)
    }

    fn write(&self, dst: Location, from: &[u8]) -> Result<(), MemoryError> {
        match self.flaw(dst) {
            None => self.memory.write(dst, from),
            Some(Flaw::DroppedWrite { .. }) => Ok(()),
            Some(Flaw::PrivateMirror { .. }) => {
                self.mirror().extend(places(dst, from.len()).zip(from.iter().copied()));
                Ok(())
            }
        }
    }
}
