//! Who holds which bytes of which device, and what supervisor and broker say to each other about it.
//!
//! A *lease* is one tenant's slices for one session, each a fresh memory file. The table is the broker's own: it does not take the supervisor's word
//! that a lease fits, and a lease that does not is refused and changes nothing. What a lease that ends leaves behind is handed back, to be scrubbed.
//!
//! Not here: processes, channels, scrubbing.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::channel::Message;
use crate::{MemoryFile, SharedError};

/// From the supervisor to the broker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ToBroker {
    /// The host's devices, in place of those known so far. Leases stay. Comes with one descriptor a group, and before them one of the kernel's log if
    /// there are any.
    Devices {
        /// All of them.
        devices: Vec<BrokerDevice>,
        /// The IOMMU groups that the functions among them are in, in the order of their descriptors.
        groups: Vec<u32>,
    },
    /// Give a tenant its slices for a session; its lease before ends, and with it whatever the descriptors of its functions were good for. Comes with a
    /// container that nothing is in, if there are functions. Answered by [`FromBroker::Leased`] or [`FromBroker::Refused`].
    Lease(Lease),
    /// A worker holds these since before this broker was started: count them, make nothing.
    Adopt(Lease),
    /// The tenant's lease ends.
    Release {
        /// Whose.
        tenant: String,
    },
    /// End.
    Shutdown {},
}

/// From the broker to the supervisor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum FromBroker {
    /// To [`ToBroker::Lease`], with the descriptors that a set-up has of slices and functions.
    Leased {
        /// Whose.
        tenant: String,
        /// For which session.
        session: u32,
        /// How many descriptors come with it.
        fds: usize,
    },
    /// To [`ToBroker::Lease`].
    Refused {
        /// Whose.
        tenant: String,
        /// For which session.
        session: u32,
        /// Why, for the operator.
        reason: String,
    },
}

/// A device as far as the broker knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BrokerDevice {
    /// Its name.
    pub name: String,
    /// Memory in bytes.
    pub memory: u64,
    /// What its memory is.
    pub backing: Backing,
}

/// What a device's memory is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Backing {
    /// A file for each slice, which the broker makes.
    File,
    /// Of a PCI function.
    Function(BrokerFunction),
    /// Made by each worker itself, of a GPU: the broker counts it only.
    Worker,
}

/// A PCI function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BrokerFunction {
    /// Its PCI address.
    pub address: String,
    /// Its IOMMU group.
    pub group: u32,
}

/// One tenant's slices for one session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lease {
    /// Whose.
    pub tenant: String,
    /// For which session.
    pub session: u32,
    /// In the order of the tenant's endpoints.
    pub slices: Vec<LeaseSlice>,
    /// A container comes with it.
    pub container: bool,
}

/// A slice of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeaseSlice {
    /// Its name within the tenant.
    pub name: String,
    /// Name of its device.
    pub device: String,
    /// Memory in bytes.
    pub memory: u64,
}

impl Message for ToBroker {
    const HAS_FDS: bool = true;

    fn fds(&self) -> usize {
        match self {
            Self::Devices { groups, .. } if groups.is_empty() => 0,
            Self::Devices { groups, .. } => groups.len().saturating_add(1),
            Self::Lease(lease) => usize::from(lease.container),
            Self::Adopt(_) | Self::Release { .. } | Self::Shutdown {} => 0,
        }
    }
}

impl Message for FromBroker {
    const HAS_FDS: bool = true;

    fn fds(&self) -> usize {
        match self {
            Self::Leased { fds, .. } => *fds,
            Self::Refused { .. } => 0,
        }
    }
}

/// A lease that is not given.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// There is no such device.
    #[error("There is no device {device:?}")]
    UnknownDevice {
        /// As asked for.
        device: String,
    },
    /// A session that has been, or has been overtaken.
    #[error("Session {session} is not newer than the tenant's session {last}")]
    OldSession {
        /// As asked for.
        session: u32,
        /// The newest that was given.
        last: u32,
    },
    /// The device's memory is given away.
    #[error("Device {device:?} has {memory} bytes, of which others hold {held}; {wanted} are too many")]
    Memory {
        /// Which.
        device: String,
        /// All of it.
        memory: u64,
        /// What the other tenants hold.
        held: u64,
        /// What this lease needs of it.
        wanted: u64,
    },
    /// Somebody else has the function, or another one that could reach into it.
    #[error(
        "Device {device:?} is in IOMMU group {group}, which tenant {holder:?} has; a group is one tenant's as a whole"
    )]
    Group {
        /// Which.
        device: String,
        /// Its group.
        group: u32,
        /// Who has it.
        holder: String,
    },
    /// The host gave no memory.
    #[error("Cannot make the memory of slice {slice:?}")]
    Create {
        /// Which.
        slice: String,
        /// Why.
        source: SharedError,
    },
}

/// Every lease of the host.
#[derive(Debug, Default)]
pub struct Leases {
    devices: BTreeMap<String, BrokerDevice>,
    held: BTreeMap<String, Held>,
}

#[derive(Debug)]
struct Held {
    lease: Lease,
    files: Vec<MemoryFile>,
    functions: Vec<BrokerFunction>,
}

/// A lease that was given.
#[derive(Debug)]
pub struct Granted<'a> {
    /// A file for each slice of a simulated device.
    pub files: &'a [MemoryFile],
    /// The functions of the others, each once, in the slices' order.
    pub functions: &'a [BrokerFunction],
    /// The files of the lease that ended with it, which nobody uses any more and which are to be scrubbed.
    pub old: Vec<MemoryFile>,
}

impl Leases {
    /// Takes the devices of the host, in place of those known so far.
    pub fn set_devices(&mut self, devices: Vec<BrokerDevice>) {
        self.devices = devices.into_iter().map(|device| (device.name.clone(), device)).collect();
    }

    /// Gives a lease.
    ///
    /// # Errors
    /// See [`LeaseError`]; the tenant's lease before then goes on.
    pub fn lease(&mut self, lease: Lease) -> Result<Granted<'_>, LeaseError> {
        self.check(&lease)?;
        let is_file =
            |slice: &&LeaseSlice| self.devices.get(&slice.device).is_some_and(|device| device.backing == Backing::File);
        let make = |slice: &LeaseSlice| {
            MemoryFile::create(&format!("peergate-{}-{}", lease.tenant, slice.name), slice.memory)
                .map_err(|source| LeaseError::Create { slice: slice.name.clone(), source })
        };
        let files = lease.slices.iter().filter(is_file).map(make).collect::<Result<Vec<_>, _>>()?;
        let old = self.release(&lease.tenant);
        let functions = self.functions(&lease);
        let held = self.held.entry(lease.tenant.clone()).or_insert(Held { lease, files, functions });
        Ok(Granted { files: &held.files, functions: &held.functions, old })
    }

    fn function(&self, device: &str) -> Option<&BrokerFunction> {
        match &self.devices.get(device)?.backing {
            Backing::Function(function) => Some(function),
            Backing::File | Backing::Worker => None,
        }
    }

    /// The functions that a lease is about, each once.
    fn functions(&self, lease: &Lease) -> Vec<BrokerFunction> {
        let mut functions: Vec<BrokerFunction> = Vec::new();
        for function in lease.slices.iter().filter_map(|slice| self.function(&slice.device)) {
            if functions.iter().all(|known| known.address != function.address) {
                functions.push(function.clone());
            }
        }
        functions
    }

    /// Counts a lease that an earlier broker gave. What does not fit is counted too: its worker has it.
    pub fn adopt(&mut self, lease: Lease) {
        let functions = self.functions(&lease);
        self.held.insert(lease.tenant.clone(), Held { lease, files: Vec::new(), functions });
    }

    /// Ends a tenant's lease, and hands back its files.
    pub fn release(&mut self, tenant: &str) -> Vec<MemoryFile> {
        self.held.remove(tenant).map(|held| held.files).unwrap_or_default()
    }

    fn check(&self, lease: &Lease) -> Result<(), LeaseError> {
        if let Some(held) = self.held.get(&lease.tenant)
            && lease.session <= held.lease.session
        {
            return Err(LeaseError::OldSession { session: lease.session, last: held.lease.session });
        }
        for slice in &lease.slices {
            let device = &slice.device;
            let unknown = || LeaseError::UnknownDevice { device: device.clone() };
            let memory = self.devices.get(device).ok_or_else(unknown)?.memory;
            let others = self.held.iter().filter(|(tenant, _)| **tenant != lease.tenant);
            if let Some(BrokerFunction { group, .. }) = self.function(device) {
                let has = |held: &Held| held.functions.iter().any(|function| function.group == *group);
                if let Some((holder, _)) = others.clone().find(|(_, held)| has(held)) {
                    let (device, holder) = (device.clone(), holder.clone());
                    return Err(LeaseError::Group { device, group: *group, holder });
                }
            }
            let held = others.fold(0_u64, |sum, (_, held)| sum.saturating_add(held.lease.on(device)));
            let wanted = lease.on(device);
            if held.saturating_add(wanted) > memory {
                return Err(LeaseError::Memory { device: device.clone(), memory, held, wanted });
            }
        }
        Ok(())
    }
}

impl Lease {
    /// Bytes of one device.
    fn on(&self, device: &str) -> u64 {
        let mine = self.slices.iter().filter(|slice| slice.device == device);
        mine.fold(0, |sum, slice| sum.saturating_add(slice.memory))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::fs::fstat;
    use rustix::io::{pread, pwrite};

    use super::*;

    const PAGE: u64 = 4096;

    fn leases() -> Leases {
        let mut leases = Leases::default();
        let device = |name: &str, pages: u64, function: Option<(&str, u32)>| BrokerDevice {
            name: name.into(),
            memory: pages * PAGE,
            backing: function.map_or(Backing::File, |(address, group)| {
                Backing::Function(BrokerFunction { address: address.into(), group })
            }),
        };
        let functions = [("ssd0", Some(("0000:01:00.0", 7))), ("cmb0", Some(("0000:01:00.0", 7)))];
        let functions = functions.into_iter().chain([("mem0", Some(("0000:01:00.1", 7)))]);
        let others = [
            device("gpu0", 4, None),
            device("fpga0", 2, None),
            BrokerDevice { backing: Backing::Worker, ..device("h200", 4, None) },
        ];
        leases.set_devices(others.into_iter().chain(functions.map(|(name, of)| device(name, 8, of))).collect());
        leases
    }

    fn lease(tenant: &str, session: u32, slices: &[(&str, u64)]) -> Lease {
        let slice = |&(device, pages): &(&str, u64)| LeaseSlice {
            name: device.to_owned(),
            device: device.to_owned(),
            memory: pages * PAGE,
        };
        Lease { tenant: tenant.into(), session, slices: slices.iter().map(slice).collect(), container: false }
    }

    #[test]
    fn the_next_session_gets_other_memory_and_the_old_one_is_handed_back() {
        let mut leases = leases();
        let Granted { files, old, .. } = leases.lease(lease("a", 1, &[("gpu0", 2), ("fpga0", 1)])).unwrap();
        assert_eq!((files.len(), old.len()), (2, 0));
        assert_eq!(pwrite(&files[0], b"secret", 0).unwrap(), 6);
        let inode = fstat(&files[0]).unwrap().st_ino;
        let Granted { files, old, .. } = leases.lease(lease("a", 2, &[("gpu0", 2), ("fpga0", 1)])).unwrap();
        let mut read = [0xff; 6];
        pread(&files[0], &mut read, 0).unwrap();
        assert_eq!(read, [0; 6]);
        assert_ne!(fstat(files[0].as_fd()).unwrap().st_ino, inode);
        assert_eq!(fstat(old[0].as_fd()).unwrap().st_ino, inode);
    }

    #[test]
    fn nobody_gets_what_others_hold_and_a_refusal_changes_nothing() {
        let mut leases = leases();
        leases.lease(lease("a", 1, &[("gpu0", 3)])).unwrap();
        let error = leases.lease(lease("b", 1, &[("fpga0", 1), ("gpu0", 2)])).unwrap_err();
        assert!(matches!(error, LeaseError::Memory { held, .. } if held == 3 * PAGE), "{error}");
        // Nor what is too much only taken together.
        let error = leases.lease(lease("b", 1, &[("fpga0", 1), ("fpga0", 2)])).unwrap_err();
        assert!(matches!(error, LeaseError::Memory { held: 0, .. }), "{error}");
        leases.lease(lease("b", 1, &[("fpga0", 2), ("gpu0", 1)])).unwrap();
        // One's own lease before makes room for the next.
        leases.lease(lease("a", 2, &[("gpu0", 3)])).unwrap();
        assert_eq!(leases.release("a").len(), 1);
        leases.lease(lease("b", 2, &[("gpu0", 4)])).unwrap();
    }

    #[test]
    fn sizes_that_overflow_are_too_many() {
        let mut huge = lease("a", 1, &[("gpu0", 1), ("gpu0", 1)]);
        huge.slices[1].memory = u64::MAX;
        assert!(matches!(leases().lease(huge), Err(LeaseError::Memory { wanted: u64::MAX, .. })));
    }

    #[test]
    fn an_old_session_and_an_unknown_device_are_refused() {
        let mut leases = leases();
        leases.lease(lease("a", 7, &[("gpu0", 1)])).unwrap();
        assert!(matches!(leases.lease(lease("a", 7, &[("gpu0", 1)])), Err(LeaseError::OldSession { last: 7, .. })));
        assert!(matches!(leases.lease(lease("b", 1, &[("gpu1", 1)])), Err(LeaseError::UnknownDevice { .. })));
    }

    #[test]
    fn an_adopted_lease_counts_and_has_no_file() {
        let mut leases = leases();
        leases.adopt(lease("a", 3, &[("gpu0", 4)]));
        assert!(matches!(leases.lease(lease("b", 1, &[("gpu0", 1)])), Err(LeaseError::Memory { .. })));
        let Granted { files, old, .. } = leases.lease(lease("a", 4, &[("gpu0", 1)])).unwrap();
        assert_eq!((files.len(), old.len()), (1, 0));
        leases.lease(lease("b", 1, &[("gpu0", 3)])).unwrap();
    }

    #[test]
    fn memory_that_workers_make_counts_and_has_no_file() {
        let mut leases = leases();
        let Granted { files, functions, .. } = leases.lease(lease("a", 1, &[("h200", 3), ("gpu0", 1)])).unwrap();
        assert_eq!((files.len(), functions.len()), (1, 0));
        let error = leases.lease(lease("b", 1, &[("h200", 2)])).unwrap_err();
        assert!(matches!(error, LeaseError::Memory { held, .. } if held == 3 * PAGE), "{error}");
        assert!(leases.lease(lease("b", 1, &[("h200", 1)])).unwrap().files.is_empty());
    }

    #[test]
    fn a_group_is_one_tenants_as_a_whole_and_its_functions_come_once_each() {
        let mut leases = leases();
        let granted = leases.lease(lease("a", 1, &[("ssd0", 4), ("gpu0", 1), ("cmb0", 4)])).unwrap();
        assert_eq!(granted.files.len(), 1);
        let functions: Vec<_> = granted.functions.iter().map(|function| function.address.as_str()).collect();
        assert_eq!(functions, ["0000:01:00.0"]);
        // Not even another function of it, of which nobody has a byte.
        let error = leases.lease(lease("b", 1, &[("mem0", 1)])).unwrap_err();
        assert!(matches!(&error, LeaseError::Group { group: 7, holder, .. } if holder == "a"), "{error}");
        leases.lease(lease("a", 2, &[("mem0", 1)])).unwrap();
        leases.release("a");
        assert_eq!(leases.lease(lease("b", 1, &[("mem0", 1)])).unwrap().functions.len(), 1);
        // One that an earlier broker gave counts, too.
        leases.release("b");
        leases.adopt(lease("b", 5, &[("mem0", 1)]));
        assert!(matches!(leases.lease(lease("a", 3, &[("ssd0", 1)])), Err(LeaseError::Group { .. })));
    }
}
