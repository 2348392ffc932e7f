//! What the host's IOMMU stopped: VFIO tells nobody, the kernel's log tells everybody.
//!
//! A function that does not say itself when a transfer was stopped ends it as a success. So whoever drives one asks a [`FaultWatch`] before it calls a
//! transfer a success. [`stopped`] finds the function in a line of the log.
//!
//! Not here: reading the log.

/// Knows what the IOMMU has stopped of one function.
pub trait FaultWatch: Send {
    /// How often it has stopped the function since the watch began. Blocks until everything that the kernel had said before the call is counted.
    ///
    /// # Errors
    /// When nobody watches any more.
    fn count(&mut self) -> Result<u64, Unwatched>;
}

/// Nobody reads the kernel's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("Nobody watches the kernel's log for what the IOMMU stops; this session's functions move nothing any more")]
pub struct Unwatched;

/// The function, as `01:00.0` or `0000:01:00.0`, of which a line of the kernel's log says that the IOMMU stopped an access.
///
/// Known are VT-d (Linux 7.3, `drivers/iommu/intel/dmar.c`, `dmar_fault_do_one`: no segment is named) and AMD-Vi (`drivers/iommu/amd/iommu.c`,
/// `amd_iommu_report_page_fault`: before the line or in it).
pub fn stopped(line: &str) -> Option<&str> {
    if let Some(rest) = line.strip_prefix("DMAR: [") {
        let (_, rest) = rest.split_once("Request device [")?;
        return rest.split_once(']').map(|(function, _)| function).filter(|function| is_function(function));
    }
    let (before, rest) = line.split_once("AMD-Vi: Event logged [")?;
    let named = rest.split_once("device=").map(|(_, rest)| rest.split([' ', ']']).next().unwrap_or_default());
    let before = before.trim_end_matches([' ', ':']).rsplit(' ').next().unwrap_or_default();
    Some(named.unwrap_or(before)).filter(|function| is_function(function))
}

/// Whether a line says that the IOMMU has stopped more than it had room to remember.
///
/// VT-d (`dmar_fault`): the status register's first bit, PFO.
pub fn has_lost(line: &str) -> bool {
    let status = line.strip_prefix(DMAR_STATUS).and_then(|status| u32::from_str_radix(status.trim(), 16).ok());
    status.is_some_and(|status| status & 1 != 0)
}

/// How much a line is of what the kernel says of faults within some time; when that is enough, it says no more for a while.
///
/// VT-d (`dmar_fault`) counts for each interrupt the line before the faults, every fault, and the end of the faults. AMD-Vi counts lines.
pub fn said(line: &str) -> u32 {
    if line.starts_with(DMAR_STATUS) {
        return 2;
    }
    u32::from(line.starts_with("DMAR: ") || line.contains("AMD-Vi: "))
}

const DMAR_STATUS: &str = "DMAR: DRHD: handling fault status reg ";

/// Whether a function that [`stopped`] has found is the one with this address (`0000:01:00.0`). Without a segment it is that of any.
pub fn is_same(found: &str, address: &str) -> bool {
    let short = |address: &str| address.get(5..).map(str::to_owned);
    found == address || (found.len() == 7 && short(address).is_some_and(|short| short == found))
}

/// `01:00.0`, with or without `0000:` before.
fn is_function(text: &str) -> bool {
    let digits = |text: &str, len: usize| text.len() == len && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let Some((rest, function)) = text.rsplit_once('.') else { return false };
    let mut parts = rest.rsplit(':');
    let (device, bus, segment) = (parts.next(), parts.next(), parts.next());
    let is_there = |part: Option<&str>, len| part.is_some_and(|part| digits(part, len));
    digits(function, 1)
        && is_there(device, 2)
        && is_there(bus, 2)
        && segment.is_none_or(|segment| digits(segment, 4))
        && parts.next().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_function_is_found_in_what_the_drivers_print() {
        for (line, expected) in [
            (
                "DMAR: [DMA Write NO_PASID] Request device [01:00.0] fault addr 0x8000000 [fault reason 0x05] PTE Write access is not set",
                Some("01:00.0"),
            ),
            ("DMAR: [DMA Read PASID 0x1] Request device [a1:1f.7] fault addr 0x0", Some("a1:1f.7")),
            ("DMAR: DRHD: handling fault status reg 2", None),
            (
                "vfio-pci 0000:01:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0001 address=0x8000000 flags=0x0020]",
                Some("0000:01:00.0"),
            ),
            ("AMD-Vi: Event logged [IO_PAGE_FAULT device=0000:c1:00.1 domain=0x1 address=0x0]", Some("0000:c1:00.1")),
            ("AMD-Vi: Event logged [", None),
            ("DMAR: [DMA Write] Request device [", None),
            ("DMAR: [DMA Write] Request device [zz:00.0]", None),
            ("DMAR: [DMA Write] Request device [1:2:01:00.0]", None),
            ("vfio-pci 0000:01:00.0: resetting", None),
            ("usb 1-1: Product: DMAR: [DMA Write] Request device [01:00.0] fault addr 0x0", None),
        ] {
            assert_eq!(stopped(line), expected, "{line}");
        }
    }

    #[test]
    fn what_the_log_leaves_out_is_known() {
        for (line, lost, times) in [
            ("DMAR: DRHD: handling fault status reg 2", false, 2),
            ("DMAR: DRHD: handling fault status reg 703", true, 2),
            ("DMAR: DRHD: handling fault status reg", false, 1),
            ("DMAR: [DMA Read PASID 0x1] Request device [a1:1f.7] fault addr 0x0", false, 1),
            ("vfio-pci 0000:01:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0001]", false, 1),
            ("usb 1-1: Product: DMAR: ", false, 0),
        ] {
            assert_eq!((has_lost(line), said(line)), (lost, times), "{line}");
        }
    }

    #[test]
    fn a_function_without_a_segment_is_that_of_any() {
        assert!(is_same("01:00.0", "0000:01:00.0") && is_same("01:00.0", "0001:01:00.0"));
        assert!(is_same("0001:01:00.0", "0001:01:00.0") && !is_same("0001:01:00.0", "0000:01:00.0"));
        assert!(!is_same("01:00.0", "0000:01:00.1") && !is_same("01:00.0", "x"));
    }
}
