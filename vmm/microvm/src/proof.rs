//! What has to be true of a host, before tenants come: each proof makes a VM, lets its guest act, and looks at what came of it.
//!
//! Not here: what the rows of a self-test look like.

use std::path::Path;
use std::time::Instant;

use crate::error::ensure;
use crate::front_end::{AVAILABLE_INDEX, FrontEnd, USED_INDEX, lay_out_hello, read_hello};
use crate::program::{INTERRUPTS, SEEN, WINDOW};
use crate::{Exit, Host, MicroVm, MicroVmError, PATIENCE, Program, Running};

/// A name and what to run.
pub type Proof = (&'static str, fn() -> Result<(), MicroVmError>);

/// The proofs that need nothing but KVM.
pub const OF_KVM: [Proof; 4] = [
    ("a guest's store into a window lands", store_lands),
    ("revoking a window stops its stores", revoking_stops_stores),
    ("a doorbell wakes without an exit", doorbell_arrives),
    ("a completion interrupts the guest", completion_arrives),
];

/// A guest stores into the window, and who else has the window's file sees it, and nothing else.
pub fn store_lands() -> Result<(), MicroVmError> {
    const AT: u16 = 0x10;
    const VALUE: u16 = 0xbeef;
    let vm = MicroVm::new(&Program::store(AT, VALUE))?;
    let host = vm.host().clone();
    expect(vm.start()?, Exit::Done)?;
    let mut expected = vec![0; crate::WINDOW_LEN];
    expected[usize::from(AT)..][..2].copy_from_slice(&VALUE.to_le_bytes());
    ensure(host.window().bytes()? == expected, || {
        format!(
            "The window's file is not as the guest wrote it: {:#x} where {VALUE:#x} was stored",
            host.window().word(AT).unwrap_or(0)
        )
    })
}

/// The window is taken from a guest that stores into it all the time: from then on nothing lands, and the guest's next store is known.
pub fn revoking_stops_stores() -> Result<(), MicroVmError> {
    const AT: u16 = 0x20;
    let running = MicroVm::new(&Program::store_on(AT, 1))?.start()?;
    let host = running.host().clone();
    wait_for_stores(&running, AT)?;
    host.revoke()?;
    let last = host.window().word(AT)?;
    let exit = running.wait(PATIENCE)?;
    let after = host.window().word(AT)?;
    ensure(after == last, || format!("After the window was revoked, a store landed: {last:#x} became {after:#x}"))?;
    let next = Exit::Store { address: WINDOW + u64::from(AT), value: last.wrapping_add(1) };
    ensure(exit == next, || format!("The last store that landed was {last:#x}, but then the guest left with {exit:x?}"))
}

/// Waits until a guest's stores are seen to land, one after another.
pub fn wait_for_stores(running: &Running, at: u16) -> Result<(), MicroVmError> {
    let deadline = Instant::now() + PATIENCE;
    let first = running.host().window().word(at)?;
    while running.host().window().word(at)? == first && !running.is_over() {
        ensure(Instant::now() < deadline, || "The guest's stores do not land".to_owned())?;
        std::thread::yield_now();
    }
    Ok(())
}

/// A guest publishes an index and rings. The doorbell is counted once, by the kernel: this side of the VM sees no exit for it.
pub fn doorbell_arrives() -> Result<(), MicroVmError> {
    let vm = MicroVm::new(&Program::ring(AVAILABLE_INDEX, 1))?;
    let host = vm.host().clone();
    expect(vm.start()?, Exit::Done)?;
    let rung = host.doorbell().read().unwrap_or(0);
    ensure(rung == 1, || format!("The guest rang once, but the doorbell counts {rung}"))?;
    expect_word("The available index", host.word(AVAILABLE_INDEX)?, 1)
}

/// A guest rings and sleeps. This side, in a device's place, answers in the used ring and interrupts it.
pub fn completion_arrives() -> Result<(), MicroVmError> {
    const USED: u16 = 7;
    let running = MicroVm::new(&Program::ring_and_wait(AVAILABLE_INDEX, 1, USED_INDEX))?.start()?;
    let host = running.host().clone();
    ensure(host.wait_for_doorbell(PATIENCE)?, || "The doorbell does not arrive".to_owned())?;
    expect_word("The available index", host.word(AVAILABLE_INDEX)?, 1)?;
    host.set_word(USED_INDEX, USED)?;
    host.interrupt().write(1).map_err(MicroVmError::host("raise the interrupt"))?;
    expect(running, Exit::Done)?;
    expect_seen(&host, USED)
}

/// A guest talks to the device at `socket`: it makes HELLO available and rings, the device is woken by that, answers, and interrupts the guest,
/// which sees the answer. Returns the session that the device began.
pub fn device_answers(socket: &Path) -> Result<u32, MicroVmError> {
    let vm = MicroVm::new(&Program::ring_and_wait(AVAILABLE_INDEX, 1, USED_INDEX))?;
    let host = vm.host().clone();
    lay_out_hello(&host)?;
    let _connected = FrontEnd::connect(socket, &host, PATIENCE)?;
    expect(vm.start()?, Exit::Done)?;
    expect_seen(&host, 1)?;
    read_hello(&host)
}

/// The guest was interrupted once, and saw what had been used by then.
fn expect_seen(host: &Host, used: u16) -> Result<(), MicroVmError> {
    expect_word("The number of interrupts", host.word(INTERRUPTS)?, 1)?;
    expect_word("The used index that the guest saw", host.word(SEEN)?, used)
}

fn expect_word(what: &str, is: u16, expected: u16) -> Result<(), MicroVmError> {
    ensure(is == expected, || format!("{what} is {is}, not {expected}"))
}

fn expect(running: Running, expected: Exit) -> Result<(), MicroVmError> {
    let exit = running.wait(PATIENCE)?;
    ensure(exit == expected, || format!("The guest left with {exit:x?}, not {expected:x?}"))
}
