//! Data that is kept, to see later whether it is still there; and one's own memory at an address of somebody else's.
//!
//! Not here: whose address that is.

use anyhow::{Result, bail};
use peergate_guest::{Access, Buffer, Driver, HostBuffer, Session, download, upload};
use serde_json::{Value, json};

use super::{Open, PAGE};
use crate::pattern::{Compare, Digest, Pattern};

/// How many pages an open maps until one lies at the address asked for. The driver chooses the addresses, and starts anew with each open.
const TRIES: usize = 256;
/// What the shadow of an address holds; unlike the seeds that people choose.
const SHADOW: u64 = 0x5ead_0000_0000_0001;

/// Memory of a GPU and of an FPGA with a pattern in it.
pub(super) struct Held {
    pub(super) gpu: Buffer,
    pub(super) fpga: Buffer,
    bytes: u64,
}

impl Held {
    /// Allocates `bytes` of each and leaves them as they are.
    pub(super) fn new(open: &Open, bytes: u64) -> Result<Self> {
        let alloc = |endpoint: u32| open.session.alloc(endpoint, bytes, Access::RW);
        Ok(Self { gpu: alloc(open.gpu.number)?, fpga: alloc(open.fpga.number)?, bytes })
    }

    /// Fills both with a pattern, and tells where they are.
    pub(super) fn fill(&self, open: &Open, seed: u64) -> Result<Value> {
        let stream = open.session.stream();
        for (buffer, seed) in [(&self.gpu, seed), (&self.fpga, !seed)] {
            upload(&stream, buffer.iova(), &mut Pattern::new(seed), self.bytes, &mut |_| {})?;
        }
        let expected = |seed| {
            let mut digest = Digest::default();
            std::io::copy(&mut std::io::Read::take(Pattern::new(seed), self.bytes), &mut digest)?;
            anyhow::Ok(text(&digest))
        };
        Ok(json!({
            "gpu": place(&self.gpu, &expected(seed)?),
            "fpga": place(&self.fpga, &expected(!seed)?),
        }))
    }

    /// What both hold.
    pub(super) fn hash(&self, open: &Open) -> Result<Value> {
        Ok(json!({"gpu": self.hash_of(open, &self.gpu)?, "fpga": self.hash_of(open, &self.fpga)?}))
    }

    fn hash_of(&self, open: &Open, buffer: &Buffer) -> Result<String> {
        let mut digest = Digest::default();
        download(&open.session.stream(), buffer.iova(), &mut digest, self.bytes, &mut |_| {})?;
        Ok(text(&digest))
    }

    /// Whether nobody has written to either.
    pub(super) fn is_zero(&self, open: &Open) -> Result<bool> {
        let mut zero = true;
        for buffer in [&self.gpu, &self.fpga] {
            let mut compare = Compare::new(std::io::repeat(0));
            download(&open.session.stream(), buffer.iova(), &mut compare, self.bytes, &mut |_| {})?;
            zero &= compare.first_difference().is_none();
        }
        Ok(zero)
    }
}

fn place(buffer: &Buffer, hash: &str) -> Value {
    json!({"address": buffer.iova(), "handle": buffer.handle(), "hash": hash})
}

fn text(digest: &Digest) -> String {
    format!("{:016x}", digest.value())
}

/// Maps pages in an open of its own until one covers `address`; answers whose bytes are read there.
pub(super) fn shadow(driver: &dyn Driver, address: u64) -> Result<Value> {
    let session = Session::open(driver)?;
    let mut pages: Vec<HostBuffer> = Vec::new();
    let page = loop {
        if pages.len() == TRIES {
            bail!("None of {TRIES} pages lies at {address:#x}");
        }
        let page = session.map(PAGE, Access::RW)?;
        if (page.iova()..page.iova().saturating_add(page.len())).contains(&address) {
            break page;
        }
        pages.push(page);
    };
    let own = Pattern::bytes(SHADOW, usize::try_from(page.len())?);
    page.write_at(0, &own)?;
    let back = session.map(PAGE, Access::WRITE)?;
    // As an endpoint reads it, not as this program does.
    session.stream().copy(back.iova(), page.iova(), PAGE)?.wait()?;
    let mut read = vec![0; own.len()];
    back.read_at(0, &mut read)?;
    Ok(json!({"tries": pages.len() + 1, "read": if read == own { "own bytes" } else { "other bytes" }}))
}
