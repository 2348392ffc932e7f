//! Memory that a session owns: of an endpoint, of the host, and an endpoint's registers. Each gives itself back when dropped.
//!
//! Not here: moving bytes between them ([`crate::Stream`], [`crate::copy_all`]); only registers move their few bytes themselves.

use iommu_addr::Access;
use peergate_uapi::{ALLOC_REGISTERS, Alloc};

use crate::outcome::access_bits;
use crate::{EndpointInfo, Error, HostMemory, Session, Stream};

/// The address `offset` bytes into `len` bytes at `iova`, if `want` bytes from there lie within.
fn place(iova: u64, len: u64, offset: u64, want: u64) -> Result<u64, Error> {
    let outside = || Error::Bounds { offset, len: want, size: len };
    offset.checked_add(want).filter(|end| *end <= len).ok_or_else(outside)?;
    iova.checked_add(offset).ok_or_else(outside)
}

/// Endpoint memory. Dropping it blocks until no transfer uses it, then frees it.
pub struct Buffer {
    session: Session,
    endpoint: u32,
    handle: u64,
    iova: u64,
    len: u64,
    freed: bool,
}

#[allow(clippy::len_without_is_empty, reason = "a buffer is never empty")]
impl Buffer {
    pub(crate) fn new(session: Session, endpoint: u32, len: u64, flags: u32) -> Result<Self, Error> {
        let request = Alloc { endpoint, flags, length: len, ..Alloc::default() };
        let Alloc { handle, iova, length, .. } = session.channel().alloc(request)?;
        Ok(Self { session, endpoint, handle, iova, len: length, freed: false })
    }

    /// Whose memory it is.
    pub fn endpoint(&self) -> u32 {
        self.endpoint
    }

    /// Its handle, as FREE and fault events name it.
    pub fn handle(&self) -> u64 {
        self.handle
    }

    /// Address of the first byte, the same from every endpoint of the session.
    pub fn iova(&self) -> u64 {
        self.iova
    }

    /// Length in bytes: what was asked for, rounded up to the endpoint's granule.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The address of byte `offset`, from which `len` bytes lie in the buffer.
    ///
    /// # Errors
    /// [`Error::Bounds`] if they do not.
    pub fn at(&self, offset: u64, len: u64) -> Result<u64, Error> {
        place(self.iova, self.len, offset, len)
    }

    /// Frees it now. Blocks until no transfer uses it.
    ///
    /// # Errors
    /// [`Error::Refused`] if the handle was freed behind this buffer's back.
    pub fn free(mut self) -> Result<(), Error> {
        self.freed = true;
        self.session.channel().free(self.handle)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if !self.freed {
            // The device frees everything at the end of the session anyway, and nobody is there to hear of it.
            let _ = self.session.channel().free(self.handle);
        }
    }
}

/// Host memory that endpoints see. Dropping it blocks until no transfer uses it, then unmaps it.
pub struct HostBuffer {
    session: Session,
    memory: Box<dyn HostMemory>,
    unmapped: bool,
}

#[allow(clippy::len_without_is_empty, reason = "a mapping is never empty")]
impl HostBuffer {
    pub(crate) fn new(session: Session, len: u64, flags: u32) -> Result<Self, Error> {
        let page = session.limits().page_size.max(1);
        let whole = len.checked_next_multiple_of(page).unwrap_or(len);
        let memory = session.channel().map(whole, flags)?;
        Ok(Self { session, memory, unmapped: false })
    }

    /// Address of the first byte, the same from every endpoint of the session.
    pub fn iova(&self) -> u64 {
        self.memory.iova()
    }

    /// Length in bytes, whole pages.
    pub fn len(&self) -> u64 {
        self.memory.len()
    }

    /// The address of byte `offset`, from which `len` bytes lie in the memory.
    ///
    /// # Errors
    /// [`Error::Bounds`] if they do not.
    pub fn at(&self, offset: u64, len: u64) -> Result<u64, Error> {
        place(self.iova(), self.len(), offset, len)
    }

    /// Copies bytes out, from `offset` on.
    ///
    /// # Errors
    /// [`Error::Bounds`] if they do not all lie in the memory.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        self.memory.read_at(offset, into)
    }

    /// Copies bytes in, from `offset` on.
    ///
    /// # Errors
    /// [`Error::Bounds`] if they do not all lie in the memory.
    pub fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), Error> {
        self.memory.write_at(offset, from)
    }

    /// Takes it away from the endpoints now and leaves the memory itself to the caller. Blocks until no transfer uses it.
    ///
    /// # Errors
    /// [`Error::Refused`] if it was unmapped behind this buffer's back.
    pub fn unmap(&mut self) -> Result<(), Error> {
        if std::mem::replace(&mut self.unmapped, true) {
            return Ok(());
        }
        self.session.channel().unmap(self.iova(), self.len())
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        // As for a buffer: the end of the session unmaps everything.
        let _ = self.unmap();
    }
}

/// An endpoint's register page: loads and stores of 8 bytes, each one transfer on a stream of its own, in order.
pub struct Registers {
    page: Buffer,
    loaded: HostBuffer,
    stream: Stream,
}

impl Registers {
    pub(crate) fn new(session: &Session, endpoint: &EndpointInfo) -> Result<Self, Error> {
        if endpoint.registers_len == 0 {
            return Err(Error::NoRegisters { name: endpoint.name.clone() });
        }
        let flags = access_bits(Access::RW) | ALLOC_REGISTERS;
        let page = Buffer::new(session.clone(), endpoint.number, endpoint.registers_len, flags)?;
        let loaded = session.map(8, Access::WRITE)?;
        Ok(Self { page, loaded, stream: session.stream() })
    }

    /// Address of the page.
    pub fn iova(&self) -> u64 {
        self.page.iova()
    }

    /// Loads the register at `offset`. Blocks until it is there.
    ///
    /// # Errors
    /// [`Error::Transfer`] if the device refuses (an offset that is not a multiple of 8: FAULT), [`Error::Bounds`] beyond the page.
    pub fn load(&self, offset: u64) -> Result<u64, Error> {
        let from = self.page.at(offset, 8)?;
        self.stream.copy(self.loaded.iova(), from, 8)?.wait()?;
        let mut bytes = [0; 8];
        self.loaded.read_at(0, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Stores into the register at `offset`. Blocks until the endpoint has it.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn store(&self, offset: u64, value: u64) -> Result<(), Error> {
        let to = self.page.at(offset, 8)?;
        self.stream.fill(to, value, 8)?.wait()?;
        Ok(())
    }
}
