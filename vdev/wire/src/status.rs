//! The one status space: answers of control requests and completion records.

/// Outcome of a request or of a work descriptor. 0 to 8 are virtio-iommu's (virtio 1.3, 5.13.6.2), the rest are this device's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Status {
    /// Done.
    Ok = 0,
    /// The device could not move the bytes, or dropped the request at a reset.
    IoErr = 1,
    /// The device does not know the opcode, flag or version.
    Unsupp = 2,
    /// An internal error of the device.
    DevErr = 3,
    /// A field has a value that is never valid, or the state forbids the request.
    Inval = 4,
    /// An address or length lies outside what the device offers.
    Range = 5,
    /// The named object does not exist, or is not the caller's.
    NoEnt = 6,
    /// A translation failed; a FAULT event says where.
    Fault = 7,
    /// The device has no memory left for the object.
    NoMem = 8,
    /// A limit of the tenant is reached.
    Quota = 0x40,
    /// The handle names an object that has been freed.
    Stale = 0x41,
    /// The right to the object was withdrawn.
    Revoked = 0x42,
    /// Cancelled by request, or behind an error in its stream.
    Cancelled = 0x43,
    /// Not finished by its deadline.
    Timeout = 0x44,
    /// Waits on itself through device-only timelines.
    Deadlock = 0x45,
    /// The memory holds an uncorrectable error.
    Poisoned = 0x46,
    /// In flight when the device lost its state; whether it took effect is unknown.
    Lost = 0x47,
    /// No aperture is left to reach the memory through.
    NoAperture = 0x48,
    /// Out of credits: try again after a completion.
    Busy = 0x49,
    /// Already so; nothing changed.
    Already = 0x4a,
    /// A right is missing: peer right or policy.
    Denied = 0x4b,
}

impl Status {
    /// Every status, in wire order.
    pub const ALL: [Self; 21] = [
        Self::Ok,
        Self::IoErr,
        Self::Unsupp,
        Self::DevErr,
        Self::Inval,
        Self::Range,
        Self::NoEnt,
        Self::Fault,
        Self::NoMem,
        Self::Quota,
        Self::Stale,
        Self::Revoked,
        Self::Cancelled,
        Self::Timeout,
        Self::Deadlock,
        Self::Poisoned,
        Self::Lost,
        Self::NoAperture,
        Self::Busy,
        Self::Already,
        Self::Denied,
    ];

    /// The wire number.
    pub const fn to_raw(self) -> u32 {
        self as u32
    }

    /// The status a wire number stands for.
    pub fn from_raw(raw: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.to_raw() == raw)
    }

    /// The name SPEC.md uses.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::IoErr => "IOERR",
            Self::Unsupp => "UNSUPP",
            Self::DevErr => "DEVERR",
            Self::Inval => "INVAL",
            Self::Range => "RANGE",
            Self::NoEnt => "NOENT",
            Self::Fault => "FAULT",
            Self::NoMem => "NOMEM",
            Self::Quota => "QUOTA",
            Self::Stale => "STALE",
            Self::Revoked => "REVOKED",
            Self::Cancelled => "CANCELLED",
            Self::Timeout => "TIMEOUT",
            Self::Deadlock => "DEADLOCK",
            Self::Poisoned => "POISONED",
            Self::Lost => "LOST",
            Self::NoAperture => "NO_APERTURE",
            Self::Busy => "BUSY",
            Self::Already => "ALREADY",
            Self::Denied => "DENIED",
        }
    }
}
