//! Ioctls: one structure, one number, one name; errnos become statuses here.
//!
//! Not here: `read`, `poll` and `mmap` of the file.

use std::ffi::c_void;
use std::fs::File;
use std::ptr;

use peergate_uapi::{Alloc, Endpoint, Free, Info, Map, Peer, RingSetup, Stream, Submit, Unmap, Wait};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode};
use vdev_wire::Status;

use crate::Error;

/// A structure that one ioctl takes.
///
/// # Safety
/// `NUMBER` is the number of the ioctl that takes exactly this structure, reads and writes nothing beyond it but what its pointers name.
pub(super) unsafe trait Request {
    /// Number of the ioctl.
    const NUMBER: Opcode;
    /// Its name in SPEC.md and `peergate.h`.
    const NAME: &'static str;
    /// Writes the structure's own size into it.
    fn set_size(&mut self);
}

macro_rules! requests {
    ($($request:ident: $number:ident, $name:literal;)*) => {$(
        const _: () = assert!((peergate_uapi::$number >> 16 & 0x3fff) as usize == size_of::<$request>());

        // SAFETY: the number carries the size of the structure, as asserted above, and `peergate.h` gives both.
        unsafe impl Request for $request {
            const NUMBER: Opcode = peergate_uapi::$number;
            const NAME: &'static str = $name;
            #[allow(clippy::cast_possible_truncation, reason = "an ioctl's structure is smaller than 16 KiB")]
            fn set_size(&mut self) {
                self.size = size_of::<Self>() as u32;
            }
        }
    )*};
}

requests! {
    Info: IOCTL_INFO, "INFO";
    Endpoint: IOCTL_ENDPOINT, "ENDPOINT";
    RingSetup: IOCTL_RING, "RING";
    Map: IOCTL_MAP, "MAP";
    Unmap: IOCTL_UNMAP, "UNMAP";
    Alloc: IOCTL_ALLOC, "ALLOC";
    Free: IOCTL_FREE, "FREE";
    Peer: IOCTL_PEER, "PEER";
    Submit: IOCTL_SUBMIT, "SUBMIT";
    Wait: IOCTL_WAIT, "WAIT";
    Stream: IOCTL_STREAM, "STREAM";
}

struct Call<'a, T>(&'a mut T);

// SAFETY: the pointer is that of an exclusively borrowed structure, which `Request` promises to be what the number takes.
unsafe impl<T: Request> Ioctl for Call<'_, T> {
    type Output = ();
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        T::NUMBER
    }

    fn as_ptr(&mut self) -> *mut c_void {
        ptr::from_mut(self.0).cast()
    }

    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut c_void) -> rustix::io::Result<()> {
        Ok(())
    }
}

/// Makes the call; starts again where a signal interrupted it.
pub(super) fn call<T: Request>(file: &File, request: &mut T) -> Result<(), Error> {
    request.set_size();
    loop {
        // SAFETY: the structure is the one this number takes; the pointers that MAP and SUBMIT carry name memory that their callers own
        // for the call (SUBMIT) or until it is unmapped (MAP).
        match unsafe { rustix::ioctl::ioctl(file, Call(request)) } {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(refusal(T::NAME, errno)),
        }
    }
}

/// What `peergate.h` says an errno means.
fn refusal(call: &'static str, errno: Errno) -> Error {
    let status = match errno {
        Errno::INVAL => Status::Inval,
        Errno::OPNOTSUPP => Status::Unsupp,
        Errno::NOENT => Status::NoEnt,
        Errno::STALE => Status::Stale,
        Errno::ACCESS => Status::Denied,
        Errno::DQUOT => Status::Quota,
        Errno::BUSY => Status::Busy,
        Errno::ALREADY => Status::Already,
        Errno::RANGE => Status::Range,
        Errno::NOMEM => Status::NoMem,
        Errno::TIMEDOUT => Status::Timeout,
        Errno::IO => Status::IoErr,
        Errno::NODEV => return Error::Gone,
        errno => return Error::System { call, source: errno.into() },
    };
    Error::Refused { call, status }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_documented_errno_is_a_status_of_its_own() {
        let documented = [
            Errno::INVAL,
            Errno::OPNOTSUPP,
            Errno::NOENT,
            Errno::STALE,
            Errno::ACCESS,
            Errno::DQUOT,
            Errno::BUSY,
            Errno::ALREADY,
            Errno::RANGE,
            Errno::NOMEM,
            Errno::TIMEDOUT,
            Errno::IO,
        ];
        let mut seen: Vec<Status> = documented.iter().filter_map(|errno| refusal("X", *errno).status()).collect();
        seen.sort_by_key(|status| status.to_raw());
        seen.dedup();
        assert_eq!(seen.len(), documented.len());
        assert!(matches!(refusal("X", Errno::NODEV), Error::Gone));
        assert!(matches!(refusal("X", Errno::NOTTY), Error::System { call: "X", .. }));
    }

    #[test]
    fn an_ioctl_on_a_file_of_another_kind_is_an_error_of_the_system() {
        let file = File::open("/dev/null").expect("every system has it");
        let error = call(&file, &mut peergate_uapi::Info::default()).expect_err("not a Peergate device");
        assert!(matches!(error, Error::System { call: "INFO", .. }), "{error}");
    }
}
