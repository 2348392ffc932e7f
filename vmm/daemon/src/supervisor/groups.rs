//! The IOMMU groups of the functions that the configuration names, and the kernel's log.
//!
//! Only the supervisor has paths, so it opens them; the broker, which may be replaced, gets descriptors of the same files and decides who gets what is
//! behind them. As long as a group is open here, nobody else on the host gets its functions.
//!
//! Not here: functions, domains.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use anyhow::Context;
use rustix::fs::OFlags;
use vmm_broker::BrokerFunction;

use crate::config::Config;

/// Whoever writes it wants to be read; it is the same on every Linux.
const LOG: &str = "/dev/kmsg";

/// What is open.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    /// Group of each address.
    numbers: BTreeMap<String, u32>,
    open: BTreeMap<u32, OwnedFd>,
    /// Read by the broker; here so that the next broker goes on where the last one ended.
    log: Option<File>,
}

impl Groups {
    /// Opens what `config` needs. What `self` has open is shared.
    pub(crate) fn for_config(&self, config: &Config) -> anyhow::Result<Self> {
        let mut groups = Self::default();
        for device in &config.devices {
            let Some(function) = &device.function else { continue };
            let address = &function.address;
            let open = || format!("Device {:?} cannot be used", device.name);
            let number = hw_vfio::group_of(address).with_context(open)?;
            groups.numbers.insert(address.clone(), number);
            if let Entry::Vacant(place) = groups.open.entry(number) {
                place.insert(match self.open.get(&number) {
                    Some(file) => file.try_clone().context("There are no descriptors left")?,
                    None => hw_vfio::open_group(number, address).with_context(open)?,
                });
            }
        }
        if !groups.open.is_empty() {
            let log = self.log.as_ref().map_or_else(open_log, File::try_clone);
            groups.log = Some(log.with_context(|| {
                format!("Cannot read the kernel's log {LOG}, which alone says what the IOMMU has stopped; real devices need it")
            })?);
        }
        Ok(groups)
    }

    /// What the broker is told of a function.
    pub(crate) fn function(&self, address: &str) -> Option<BrokerFunction> {
        Some(BrokerFunction { address: address.to_owned(), group: *self.numbers.get(address)? })
    }

    /// The groups' numbers, and what goes with them: the log, and each group.
    pub(crate) fn all(&self) -> (Vec<u32>, Vec<BorrowedFd<'_>>) {
        let log = self.log.iter().map(AsFd::as_fd);
        (self.open.keys().copied().collect(), log.chain(self.open.values().map(AsFd::as_fd)).collect())
    }
}

/// From its end on.
fn open_log() -> std::io::Result<File> {
    let nonblocking = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
    let mut log = OpenOptions::new().read(true).custom_flags(nonblocking).open(LOG)?;
    log.seek(SeekFrom::End(0))?;
    Ok(log)
}
