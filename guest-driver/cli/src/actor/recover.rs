//! After the device lost its state: what was held is of no use any more, and a new open works.
//!
//! The new open comes first and holds as much as the old one did, so that the same numbers are in use again when the old ones are tried.
//!
//! Not here: making the device lose its state.

use anyhow::{Context, Result};
use peergate_guest::{Access, download, upload};
use serde_json::{Value, json};

use super::held::Held;
use super::{Actor, Open, PAGE};
use crate::console::with;
use crate::pattern::{Compare, Pattern};
use crate::selftest::witness::status_of;

/// Bytes of the copy that proves that all is well.
const PROOF: u64 = 1 << 20;

pub(super) fn recover(actor: &mut Actor<'_>) -> Result<Value> {
    let old = actor.held.take().context("Nothing is held")?;
    let open = Open::new(actor.stage.driver).context("The device cannot be opened anew")?;
    let fresh = Held::new(&open, old.gpu.len())?;
    let zero = fresh.is_zero(&open)?;
    let gone = &actor.open.session;
    let work = gone.stream().fill_work(old.gpu.iova(), 0, 8);
    let facts = json!({
        "before": gone.limits().session,
        "new_memory": if zero { "zero" } else { "not zero" },
        "old_handle": status_of(gone.channel().free(old.gpu.handle()))?,
        "old_file": status_of(gone.alloc(actor.open.gpu.number, PAGE, Access::RW))?,
        "old_work": gone.submit(work)?.outcome(gone.patience())?.status.name(),
        "verified": verified(&open, &fresh)?,
    });
    // Copies of the old open are over.
    actor.copies = None;
    actor.open = open;
    Ok(with(facts, actor.open.facts()))
}

/// Moves a pattern from host memory over GPU and FPGA and back.
fn verified(open: &Open, held: &Held) -> Result<bool> {
    let stream = open.session.stream().by(open.gpu.number);
    let len = PROOF.min(held.gpu.len());
    upload(&stream, held.gpu.iova(), &mut Pattern::new(len), len, &mut |_| {})?;
    stream.copy(held.fpga.iova(), held.gpu.iova(), len)?.wait()?;
    let mut compare = Compare::new(Pattern::new(len));
    download(&open.session.stream(), held.fpga.iova(), &mut compare, len, &mut |_| {})?;
    Ok(compare.first_difference().is_none())
}
