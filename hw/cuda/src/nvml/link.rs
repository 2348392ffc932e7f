//! [`Link`]: what is between two GPUs.
//!
//! Not here: whether one reaches the other ([`Gpu::peer`](crate::Gpu::peer)).

use std::ffi::{c_int, c_uint};
use std::fmt;

use super::{Meter, NvmlError};

/// `NVML_P2P_CAPS_INDEX_NVLINK`, `NVML_P2P_STATUS_OK`
const BY_NVLINK: c_int = 2;
const OK: c_int = 0;
/// `NVML_NVLINK_MAX_LINKS`
const MOST_LINKS: c_uint = 18;

/// `nvmlPciInfo_t`
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct PciInfo {
    legacy: [u8; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    ids: [c_uint; 2],
    text: [u8; 32],
}

const _: () = assert!(size_of::<PciInfo>() == 68);

impl PciInfo {
    fn place(&self) -> [c_uint; 3] {
        [self.domain, self.bus, self.device]
    }
}

/// What is between two GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// NVLink, straight or through switches of its own.
    NvLink {
        /// So many links of the GPU's are up that lead there.
        links: u32,
    },
    /// PCIe.
    Pcie(PciePath),
}

/// Where the ways of two PCIe devices meet (`nvmlGpuTopologyLevel_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PciePath {
    /// On one board.
    Board,
    /// At one switch.
    Switch,
    /// At one of several switches, below a host bridge.
    Switches,
    /// At a host bridge.
    HostBridge,
    /// In a NUMA node.
    Node,
    /// Between NUMA nodes.
    System,
}

impl PciePath {
    fn of(level: c_int) -> Option<Self> {
        [Self::Board, Self::Switch, Self::Switches, Self::HostBridge, Self::Node, Self::System]
            .into_iter()
            .zip((0..).step_by(10))
            .find_map(|(path, of)| (of == level).then_some(path))
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NvLink { links: 1 } => "NVLink (1 link)",
            Self::NvLink { links } => return write!(f, "NVLink ({links} links)"),
            Self::Pcie(PciePath::Board) => "PCIe on one board",
            Self::Pcie(PciePath::Switch) => "PCIe through one switch (PIX)",
            Self::Pcie(PciePath::Switches) => "PCIe through several switches (PXB)",
            Self::Pcie(PciePath::HostBridge) => "PCIe through a host bridge (PHB)",
            Self::Pcie(PciePath::Node) => "PCIe within a NUMA node (NODE)",
            Self::Pcie(PciePath::System) => "PCIe between NUMA nodes (SYS)",
        })
    }
}

impl Meter {
    /// What is between this GPU and another one.
    ///
    /// # Errors
    /// Where the library does not say.
    pub fn link(&self, other: &Self) -> Result<Link, NvmlError> {
        let (table, mut status) = (&self.nvml.table, OK);
        // SAFETY: the handles are the library's own; it writes one number.
        let answer = unsafe { (table.peer_status)(self.device(), other.device(), BY_NVLINK, &raw mut status) };
        if answer == 0 && status == OK {
            let links = self.nvlinks(other)?;
            if links > 0 {
                return Ok(Link::NvLink { links });
            }
        }
        let mut level = -1;
        // SAFETY: as above.
        let answer = unsafe { (table.ancestor)(self.device(), other.device(), &raw mut level) };
        let what = "where its way to another one leads";
        table.measured("nvmlDeviceGetTopologyCommonAncestor", what, answer)?;
        PciePath::of(level).map(Link::Pcie).ok_or(NvmlError::Unmeasured { what })
    }

    /// How many links that are up lead to another GPU: those that end there, or, if all end at switches, all.
    fn nvlinks(&self, other: &Self) -> Result<u32, NvmlError> {
        let (table, mut there) = (&self.nvml.table, PciInfo::default());
        // SAFETY: the handle is the library's own; it writes one description.
        table.check("nvmlDeviceGetPciInfo", unsafe { (table.pci)(other.device(), &raw mut there) })?;
        let (mut up, mut straight) = (0, 0);
        for link in 0..MOST_LINKS {
            let (mut state, mut end) = (0, PciInfo::default());
            // SAFETY: as above, with one number.
            let answer = unsafe { (table.nvlink_state)(self.device(), link, &raw mut state) };
            // A GPU with fewer links answers the others with an error.
            if answer != 0 || state == 0 {
                continue;
            }
            up += 1;
            // SAFETY: as above.
            let answer = unsafe { (table.nvlink_remote)(self.device(), link, &raw mut end) };
            straight += u32::from(answer == 0 && end.place() == there.place());
        }
        Ok(if straight > 0 { straight } else { up })
    }
}
