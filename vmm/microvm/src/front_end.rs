//! A VMM's side of a device: the guest's memory, one queue, and doorbell and interrupt as that queue's kick and call.
//!
//! Only the control queue runs, with one request in it. Not here: what the guest does.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use vdev_wire::{CONTROL_QUEUE, ControlHeader, ControlReply, Hello, HelloReply, Opcode, Status, VERSION};
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};
use zerocopy::{FromBytes, IntoBytes};

use crate::error::ensure;
use crate::memory::host_address;
use crate::{Host, MicroVmError};

const VERSION_1: u64 = 1 << 32;

/// Entries of the queue.
const SIZE: u16 = 8;
const DESCRIPTORS: u16 = 0x2000;
const AVAILABLE: u16 = 0x2100;
const USED: u16 = 0x2200;
/// Where the guest says how many chains it has made available.
pub(crate) const AVAILABLE_INDEX: u16 = AVAILABLE + 2;
/// Where the device says how many it has used.
pub(crate) const USED_INDEX: u16 = USED + 2;

const REQUEST: u16 = 0x3000;
const REPLY: u16 = 0x3100;
const REQUEST_LEN: usize = size_of::<ControlHeader>() + size_of::<Hello>();
const REPLY_LEN: usize = size_of::<ControlReply>() + size_of::<HelloReply>();

/// A descriptor: another one follows; the device writes it.
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// Lays HELLO out as the first chain of the queue, not yet available: that is the guest's to say.
pub(crate) fn lay_out_hello(host: &Host) -> Result<(), MicroVmError> {
    let header = ControlHeader {
        opcode: (Opcode::Hello as u16).into(),
        flags: 0.into(),
        domain: 0.into(),
        session: 0.into(),
        reserved: 0.into(),
    };
    let hello = Hello { version: VERSION.into(), reserved0: 0.into(), reserved: 0.into(), features: 0.into() };
    let ram = host.ram();
    ram.write_slice(&[header.as_bytes(), hello.as_bytes()].concat(), GuestAddress(REQUEST.into()))?;
    let descriptor = |at: u16, len: usize, flags: u16, next: u16| {
        let len = u32::try_from(len).unwrap_or(0);
        [&u64::from(at).to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat()
    };
    let chain = [descriptor(REQUEST, REQUEST_LEN, NEXT, 1), descriptor(REPLY, REPLY_LEN, WRITE, 0)].concat();
    Ok(ram.write_slice(&chain, GuestAddress(DESCRIPTORS.into()))?)
}

/// What the device answered to HELLO: the session.
pub(crate) fn read_hello(host: &Host) -> Result<u32, MicroVmError> {
    let mut used = [0; 8];
    host.ram().read_slice(&mut used, GuestAddress((USED + 4).into()))?;
    let expected = u64::try_from(REPLY_LEN).unwrap_or(0) << 32;
    ensure(u64::from_le_bytes(used) == expected, || format!("The device used another chain than HELLO's: {used:x?}"))?;
    let mut bytes = [0; REPLY_LEN];
    host.ram().read_slice(&mut bytes, GuestAddress(REPLY.into()))?;
    let parsed = ControlReply::read_from_prefix(&bytes).ok();
    let parsed = parsed.and_then(|(reply, rest)| Some((reply, HelloReply::read_from_bytes(rest).ok()?)));
    let Some((reply, hello)) = parsed else {
        return Err(MicroVmError::Disproved("The answer to HELLO has another shape".to_owned()));
    };
    let status = Status::from_raw(reply.status.get());
    ensure(status == Some(Status::Ok), || format!("HELLO was refused: {}", status.map_or("unknown", Status::name)))?;
    ensure(hello.version.get() == VERSION, || format!("The device speaks version {}", hello.version.get()))?;
    Ok(hello.session.get())
}

/// A device that has the guest's memory and serves its control queue, until this is dropped.
pub(crate) struct FrontEnd {
    _connection: Frontend,
}

impl FrontEnd {
    /// Connects and starts the queue. A device that has not done its part after `most` is hung up on.
    pub(crate) fn connect(socket: &Path, host: &Host, most: Duration) -> Result<Self, MicroVmError> {
        let failed = || MicroVmError::host("connect to the tenant's socket");
        let stream = UnixStream::connect(socket).map_err(failed())?;
        let watched = stream.try_clone().map_err(failed())?;
        let (ready, wait) = channel::<()>();
        // The `vhost` crate waits for an answer without end, whatever the socket's timeout is.
        let watch = std::thread::spawn(move || {
            if wait.recv_timeout(most) == Err(RecvTimeoutError::Timeout) {
                // If there is no connection any more, nobody waits.
                let _ = watched.shutdown(Shutdown::Both);
            }
        });
        let mut connection = Frontend::from_stream(stream, u64::from(CONTROL_QUEUE) + 1);
        let started = negotiate(&mut connection).and_then(|()| start(&mut connection, host));
        drop(ready);
        // It only waits.
        let _ = watch.join();
        started.map(|()| Self { _connection: connection })
    }
}

fn step(step: &'static str) -> impl FnOnce(vhost::Error) -> MicroVmError {
    move |source| MicroVmError::Device { step, source }
}

fn negotiate(connection: &mut Frontend) -> Result<(), MicroVmError> {
    let protocol = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
    let offered = connection.get_features().map_err(step("GET_FEATURES"))?;
    ensure(offered & VERSION_1 != 0 && offered & protocol != 0, || {
        format!("The device offers features {offered:#x}, without VERSION_1 or protocol features")
    })?;
    let answers = VhostUserProtocolFeatures::REPLY_ACK;
    let offered = connection.get_protocol_features().map_err(step("GET_PROTOCOL_FEATURES"))?;
    connection.set_protocol_features(offered & answers).map_err(step("SET_PROTOCOL_FEATURES"))?;
    connection.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    connection.set_owner().map_err(step("SET_OWNER"))?;
    connection.set_features(VERSION_1 | protocol).map_err(step("SET_FEATURES"))
}

fn start(connection: &mut Frontend, host: &Host) -> Result<(), MicroVmError> {
    let queue = usize::from(CONTROL_QUEUE);
    let regions: Result<Vec<_>, _> = host.ram().iter().map(VhostUserMemoryRegionInfo::from_guest_region).collect();
    let regions = regions.map_err(step("SET_MEM_TABLE"))?;
    let at = |address: u16| host_address(host.ram(), address.into());
    let rings = VringConfigData {
        queue_max_size: SIZE,
        queue_size: SIZE,
        flags: 0,
        desc_table_addr: at(DESCRIPTORS)?,
        used_ring_addr: at(USED)?,
        avail_ring_addr: at(AVAILABLE)?,
        log_addr: None,
    };
    connection.set_mem_table(&regions).map_err(step("SET_MEM_TABLE"))?;
    connection.set_vring_num(queue, SIZE).map_err(step("SET_VRING_NUM"))?;
    connection.set_vring_base(queue, 0).map_err(step("SET_VRING_BASE"))?;
    connection.set_vring_addr(queue, &rings).map_err(step("SET_VRING_ADDR"))?;
    connection.set_vring_kick(queue, host.doorbell()).map_err(step("SET_VRING_KICK"))?;
    connection.set_vring_call(queue, host.interrupt()).map_err(step("SET_VRING_CALL"))?;
    connection.set_vring_enable(queue, true).map_err(step("SET_VRING_ENABLE"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::{MicroVm, Program};

    #[test]
    fn device_that_says_nothing_is_hung_up_on() {
        let vm = match MicroVm::new(&Program::ring(AVAILABLE_INDEX, 1)) {
            Err(error) if error.is_missing() => return eprintln!("skipped: {error}"),
            vm => vm.unwrap(),
        };
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("device.sock");
        let _listener = UnixListener::bind(&socket).unwrap();
        let refused = FrontEnd::connect(&socket, vm.host(), Duration::from_millis(1)).err();
        assert_eq!(refused.unwrap().to_string(), "The device does not take part: GET_FEATURES failed");
    }
}
