//! Devices that are parts of PCI functions: how they are named, that each is one tenant's and has one engine, that nobody else has its registers.
//!
//! Not here: whether there is such a function.

use std::collections::HashMap;

use vmm_broker::{EndpointKind, Function};

use super::reader::At;
use super::typed::{Typed, TypedFunction};
use super::{Checked, DeviceConfig, Meaning, PAGE, TenantConfig, quantity};

impl Meaning<'_> {
    pub(super) fn function(self, typed: &TypedFunction, memory: u64) -> Checked<Function> {
        let At { value, line } = &typed.address;
        let Some(address) = normal(value) else {
            let problem =
                format!("address is {value:?}; write a PCI address as lspci -D does, such as \"0000:01:00.0\"");
            return self.refuse(*line, problem);
        };
        let unmapped = match &typed.unmapped {
            Some(At { value, line }) if !value.is_multiple_of(PAGE) || *value > memory => {
                let problem = format!(
                    "unmapped is {}; write a multiple of 4KiB, and no more than the device's memory",
                    quantity::size(*value)
                );
                return self.refuse(*line, problem);
            }
            unmapped => unmapped.as_ref().map_or(0, |unmapped| unmapped.value),
        };
        Ok(Function { address, part: typed.part, unmapped })
    }

    /// The first BAR of a function that has an engine is its registers: whoever writes them has the function do what no engine would.
    pub(super) fn registers(self, typed: &Typed, devices: &[DeviceConfig]) -> Checked<()> {
        let of_kind = |kind: fn(&EndpointKind) -> bool| {
            let devices = devices.iter().enumerate().filter(move |(_, device)| kind(&device.kind));
            devices.filter_map(|(index, device)| Some((index, device, device.function.as_ref()?)))
        };
        let engines = || of_kind(|kind| matches!(kind, EndpointKind::Nvme | EndpointKind::Edu));
        for (index, device, function) in of_kind(|kind| *kind == EndpointKind::Memory) {
            let Some((_, other, _)) = engines().find(|(.., engine)| engine.address == function.address) else {
                continue;
            };
            if function.part == 0 {
                let (address, name, other) = (&function.address, &device.name, &other.name);
                let problem = format!(
                    "Device {name:?} is the registers of function {address}, whose engine {other:?} has; give another BAR"
                );
                return self.refuse(typed.devices.get(index).map_or(1, |device| device.line), problem);
            }
        }
        Ok(())
    }

    /// A function is one tenant's and has one engine, a part of it is one device, and such a device is not cut up.
    pub(super) fn functions(self, typed: &Typed, devices: &[DeviceConfig], tenants: &[TenantConfig]) -> Checked<()> {
        let mut parts = HashMap::new();
        let mut engines = HashMap::new();
        let mut owners: HashMap<&str, &str> = HashMap::new();
        for (index, device) in devices.iter().enumerate() {
            let Some(function) = &device.function else { continue };
            let line = typed.devices.get(index).map_or(1, |device| device.line);
            if let Some(other) = parts.insert((&function.address, device.kind.name(), function.part), &device.name) {
                let problem = format!("Device {:?} is device {other:?} once more; remove one of them", device.name);
                return self.refuse(line, problem);
            }
            if matches!(device.kind, EndpointKind::Nvme | EndpointKind::Edu)
                && let Some(other) = engines.insert(&function.address, &device.name)
            {
                let (address, name) = (&function.address, &device.name);
                let problem = format!(
                    "Function {address} has one engine, but {other:?} and {name:?} would each have it; leave one"
                );
                return self.refuse(line, problem);
            }
            let users: Vec<&TenantConfig> = tenants
                .iter()
                .flat_map(|tenant| tenant.slices.iter().filter(|slice| slice.device == index).map(move |_| tenant))
                .collect();
            if users.len() > 1 {
                let problem = format!(
                    "Device {:?} is a PCI function, which is given away as a whole, but has {} slices; leave one",
                    device.name,
                    users.len()
                );
                return self.refuse(line, problem);
            }
            let Some(user) = users.first() else { continue };
            let owner = owners.entry(&function.address).or_insert(&user.name);
            if *owner != user.name {
                let (address, other) = (&function.address, &user.name);
                let problem = format!(
                    "Function {address} is one tenant's as a whole, but {owner:?} and {other:?} have parts of it; give all to one"
                );
                return self.refuse(line, problem);
            }
        }
        Ok(())
    }
}

/// `0000:0a:1f.7` of any way to write that.
pub(super) fn normal(address: &str) -> Option<String> {
    let (rest, function) = address.split_once('.')?;
    let mut parts = rest.rsplit(':');
    let mut number = |most: u32, required: bool| match parts.next() {
        Some(text) if text.len() <= 4 && text.bytes().all(|byte| byte.is_ascii_hexdigit()) => {
            u32::from_str_radix(text, 16).ok().filter(|number| *number <= most)
        }
        None if !required => Some(0),
        _ => None,
    };
    let (device, bus, segment) = (number(0x1f, true)?, number(0xff, true)?, number(0xffff, false)?);
    let function = function.parse::<u8>().ok().filter(|number| *number <= 7 && function.len() == 1)?;
    parts.next().is_none().then(|| format!("{segment:04x}:{bus:02x}:{device:02x}.{function}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_written_in_one_way() {
        for (typed, expected) in [
            ("0000:01:00.0", Some("0000:01:00.0")),
            ("01:00.0", Some("0000:01:00.0")),
            ("1:A:1f.7", Some("0001:0a:1f.7")),
            ("0000:01:20.0", None),
            ("0000:01:00.8", None),
            ("0000:01:00", None),
            ("00.0", None),
            ("0:0:0:0.0", None),
            ("0000:01:00.+1", None),
            ("../../x:01:00.0", None),
            ("", None),
        ] {
            assert_eq!(normal(typed).as_deref(), expected, "{typed}");
        }
    }
}
