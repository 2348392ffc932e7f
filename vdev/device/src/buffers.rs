//! Which buffers there are, and what endpoint memory they take.
//!
//! A handle names a place in one table and how often that place was used. A place that served a domain serves no other until that domain is
//! gone, so the table alone can tell a handle that the domain once had (STALE) from one that it never had (foreign or invented, which answer
//! the same). Places are bounded by the buffer limit times the domains; memory and the count come back only when the buffer was scrubbed.
//!
//! Not here: mapping, draining, scrubbing.

use std::collections::HashMap;

use hw_engine::EndpointSpec;
use iommu_addr::{BufferId, EndpointId, Iova, Range};

use crate::RequestError;
use crate::extents::Extents;

/// One buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Buffer {
    pub(crate) id: BufferId,
    pub(crate) endpoint: EndpointId,
    /// Offset of its memory; `None` for the register page.
    pub(crate) offset: Option<u64>,
    pub(crate) len: u64,
    /// Where it is mapped.
    pub(crate) range: Range<Iova>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Free,
    Live(Buffer),
    /// Freed; drains or is scrubbed.
    Going,
}

#[derive(Debug)]
struct Place {
    /// Serial of the domain that it serves.
    owner: u64,
    /// First generation of that service.
    first: u32,
    /// Generation of what is there, or comes next.
    generation: u32,
    state: State,
}

/// The buffers of all domains.
#[derive(Debug)]
pub(crate) struct Buffers {
    places: Vec<Place>,
    /// Free places, by the domain that they serve.
    free: HashMap<u64, Vec<u32>>,
    /// Free places that serve nobody.
    unowned: Vec<u32>,
    count: u32,
    limit: u32,
    memory: HashMap<EndpointId, Extents>,
    bytes: u64,
}

impl Buffers {
    pub(crate) fn new(endpoints: &[EndpointSpec], limit: u32) -> Self {
        let memory = endpoints.iter().map(|spec| (spec.id, Extents::new(spec.memory_len))).collect();
        let (places, unowned) = (Vec::new(), Vec::new());
        Self { places, free: HashMap::new(), unowned, count: 0, limit, memory, bytes: 0 }
    }

    pub(crate) fn set_limit(&mut self, limit: u32) {
        self.limit = limit;
    }

    /// Buffers, those that are going included.
    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    /// Bytes of endpoint memory in use, or being scrubbed.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of an endpoint's memory that are not allocated.
    pub(crate) fn free_len(&self, endpoint: EndpointId) -> u64 {
        self.memory.get(&endpoint).map_or(0, Extents::free_len)
    }

    /// Takes memory (or none, for `registers`) and a handle for the domain with this serial.
    pub(crate) fn alloc(
        &mut self,
        domain: u64,
        endpoint: EndpointId,
        range: Range<Iova>,
        registers: bool,
    ) -> Result<Buffer, RequestError> {
        let len = range.len().ok_or(RequestError::OutOfRange { value: range.start().0 })?;
        if self.count >= self.limit {
            return Err(RequestError::Limit { what: "buffers", limit: u64::from(self.limit) });
        }
        let offset = if registers {
            None
        } else {
            let memory = self.memory.get_mut(&endpoint).and_then(|extents| extents.alloc(len));
            Some(memory.ok_or(RequestError::Memory { len })?)
        };
        let index = self.place(domain);
        let Some(place) = self.places.get_mut(index as usize) else {
            return Err(RequestError::Dropped);
        };
        let id = BufferId { index, generation: place.generation };
        let buffer = Buffer { id, endpoint, offset, len, range };
        place.state = State::Live(buffer);
        self.count = self.count.saturating_add(1);
        if offset.is_some() {
            self.bytes = self.bytes.saturating_add(len);
        }
        Ok(buffer)
    }

    /// A free place that serves the domain.
    fn place(&mut self, domain: u64) -> u32 {
        if let Some(index) = self.free.get_mut(&domain).and_then(Vec::pop) {
            return index;
        }
        if let Some(index) = self.unowned.pop() {
            if let Some(place) = self.places.get_mut(index as usize) {
                (place.owner, place.first) = (domain, place.generation);
            }
            return index;
        }
        let index = u32::try_from(self.places.len()).unwrap_or(u32::MAX);
        self.places.push(Place { owner: domain, first: 0, generation: 0, state: State::Free });
        index
    }

    /// Begins to free the buffer that `handle` names for the domain: from now on the handle is stale.
    pub(crate) fn take(&mut self, domain: u64, handle: u64) -> Result<Buffer, RequestError> {
        let id = BufferId::from_raw(handle);
        let missing = RequestError::Missing { what: "buffer", value: handle };
        let place = self.places.get_mut(id.index as usize).filter(|place| place.owner == domain).ok_or(missing)?;
        match place.state {
            State::Live(buffer) if id.generation == place.generation => {
                place.state = State::Going;
                Ok(buffer)
            }
            State::Going if id.generation == place.generation => Err(RequestError::FreedHandle { handle }),
            _ if (place.first..place.generation).contains(&id.generation) => Err(RequestError::FreedHandle { handle }),
            _ => Err(missing),
        }
    }

    /// In whose memory the buffer that `handle` names lies, whatever its domain.
    pub(crate) fn owner(&self, handle: u64) -> Option<EndpointId> {
        let id = BufferId::from_raw(handle);
        match self.places.get(id.index as usize)?.state {
            State::Live(buffer) if buffer.id == id => Some(buffer.endpoint),
            _ => None,
        }
    }

    /// Begins to free every buffer of the domain, or those in the memory of one endpoint.
    pub(crate) fn take_all(&mut self, domain: u64, endpoint: Option<EndpointId>) -> Vec<Buffer> {
        let mut taken = Vec::new();
        for place in self.places.iter_mut().filter(|place| place.owner == domain) {
            if let State::Live(buffer) = place.state
                && endpoint.is_none_or(|endpoint| endpoint == buffer.endpoint)
            {
                place.state = State::Going;
                taken.push(buffer);
            }
        }
        taken
    }

    /// The buffer's end: it drained, and its memory reads zero again (`is_clean`), or must never be used again.
    pub(crate) fn release(&mut self, buffer: &Buffer, is_clean: bool) {
        self.count = self.count.saturating_sub(1);
        if let Some(offset) = buffer.offset
            && is_clean
        {
            self.bytes = self.bytes.saturating_sub(buffer.len);
            if let Some(extents) = self.memory.get_mut(&buffer.endpoint) {
                extents.release(offset, buffer.len);
            }
        }
        let Some(place) = self.places.get_mut(buffer.id.index as usize) else { return };
        place.state = State::Free;
        // A place whose generations are used up serves nobody any more.
        if let Some(next) = place.generation.checked_add(1) {
            place.generation = next;
            self.free.entry(place.owner).or_default().push(buffer.id.index);
        }
    }

    /// The domain is gone, and every buffer of it released: its places may serve others.
    pub(crate) fn forget(&mut self, domain: u64) {
        if let Some(places) = self.free.remove(&domain) {
            for index in &places {
                if let Some(place) = self.places.get_mut(*index as usize) {
                    place.owner = 0;
                }
            }
            self.unowned.extend(places);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hw_engine::EndpointKind;

    fn buffers(limit: u32) -> Buffers {
        let spec = EndpointSpec {
            id: EndpointId::local(0),
            kind: EndpointKind::Gpu,
            name: "g".into(),
            memory_len: 0x4000,
            registers_len: 0,
            granularity: 0x1000,
            engines: 1,
        };
        Buffers::new(&[spec], limit)
    }

    fn pages(count: u64) -> Range<Iova> {
        Range::with_len(Iova(0x10000), count * 0x1000).expect("not empty")
    }

    fn alloc(buffers: &mut Buffers, domain: u64, count: u64) -> Result<Buffer, RequestError> {
        buffers.alloc(domain, EndpointId::local(0), pages(count), false)
    }

    #[test]
    fn freed_handles_are_stale_for_their_domain_and_unknown_to_others() {
        let mut buffers = buffers(8);
        let first = alloc(&mut buffers, 1, 1).expect("fits");
        let handle = first.id.to_raw();
        let missing = Err(RequestError::Missing { what: "buffer", value: handle });
        let stale = Err(RequestError::FreedHandle { handle });
        assert_eq!(buffers.take(2, handle), missing, "another domain's");
        assert_eq!(buffers.take(1, handle), Ok(first));
        assert_eq!(buffers.take(1, handle), stale, "going");
        buffers.release(&first, true);
        assert_eq!(buffers.take(1, handle), stale, "gone");
        assert_eq!(buffers.take(2, handle), missing, "another domain's, gone");
        let second = alloc(&mut buffers, 1, 1).expect("fits");
        assert_eq!(second.id.index, first.id.index, "places are used again");
        assert_eq!(buffers.take(1, handle), stale, "after reuse");
        assert_eq!(
            buffers.take(1, second.id.to_raw() + (1 << 32)),
            Err(RequestError::Missing { what: "buffer", value: second.id.to_raw() + (1 << 32) })
        );
    }

    #[test]
    fn place_that_served_a_domain_serves_the_next_only_after_its_end() {
        let mut buffers = buffers(8);
        let first = alloc(&mut buffers, 1, 1).expect("fits");
        buffers.take(1, first.id.to_raw()).expect("live");
        buffers.release(&first, true);
        let other = alloc(&mut buffers, 2, 1).expect("fits");
        assert_ne!(other.id.index, first.id.index);
        buffers.forget(1);
        let third = alloc(&mut buffers, 3, 1).expect("fits");
        assert_eq!(third.id.index, first.id.index);
        let handle = first.id.to_raw();
        assert_eq!(buffers.take(3, handle), Err(RequestError::Missing { what: "buffer", value: handle }));
    }

    #[test]
    fn count_and_memory_come_back_at_release_and_dirty_memory_never() {
        let mut buffers = buffers(2);
        let a = alloc(&mut buffers, 1, 1).expect("fits");
        let b = alloc(&mut buffers, 1, 2).expect("fits");
        assert_eq!(alloc(&mut buffers, 1, 1), Err(RequestError::Limit { what: "buffers", limit: 2 }));
        buffers.take(1, a.id.to_raw()).expect("live");
        assert_eq!(buffers.count(), 2, "until it drained");
        buffers.release(&a, false);
        assert_eq!(alloc(&mut buffers, 1, 2), Err(RequestError::Memory { len: 0x2000 }), "one page is dirty for ever");
        buffers.take_all(1, None);
        buffers.release(&b, true);
        assert_eq!((buffers.count(), buffers.bytes()), (0, 0x1000));
        assert_eq!(buffers.free_len(EndpointId::local(0)), 0x3000);
    }
}
