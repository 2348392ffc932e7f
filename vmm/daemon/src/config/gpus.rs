//! Devices that are GPUs of the host: how they are named, and that each is one device.
//!
//! Not here: whether there is such a GPU.

use std::collections::HashMap;

use vmm_broker::Gpu;

use super::functions::normal;
use super::reader::At;
use super::typed::{Typed, TypedGpu};
use super::{Checked, DeviceConfig, Meaning};

/// Granule of memory that a GPU's driver gives away.
pub(super) const GRANULE: u64 = hw_cuda::Slice::GRANULE;

impl Meaning<'_> {
    pub(super) fn gpu(self, typed: &TypedGpu) -> Checked<Gpu> {
        let At { value, line } = &typed.which;
        let Some(which) = uuid(value).or_else(|| normal(value)) else {
            let problem = format!(
                "gpu is {value:?}; write a PCI address or a UUID as nvidia-smi -L does, such as \"0000:01:00.0\" or \"GPU-8f6d1c3a-02b4-4d5e-9f10-a1b2c3d4e5f6\""
            );
            return self.refuse(*line, problem);
        };
        Ok(Gpu { which, completion: typed.completion.unwrap_or_default() })
    }

    /// Two devices would count the memory of one GPU twice.
    pub(super) fn gpus(self, typed: &Typed, devices: &[DeviceConfig]) -> Checked<()> {
        let mut seen = HashMap::new();
        for (device, typed) in devices.iter().zip(&typed.devices) {
            let Some(gpu) = &device.gpu else { continue };
            if let Some(other) = seen.insert(&gpu.which, &device.name) {
                let problem = format!("Device {:?} is device {other:?} once more; remove one of them", device.name);
                return self.refuse(typed.line, problem);
            }
        }
        Ok(())
    }
}

/// `GPU-` and 32 hexadecimal digits in groups, in small letters.
fn uuid(text: &str) -> Option<String> {
    let groups: Vec<_> = text.strip_prefix("GPU-")?.split('-').collect();
    let is_hex = |group: &&str| group.bytes().all(|byte| byte.is_ascii_hexdigit());
    let lens: Vec<_> = groups.iter().filter(|group| is_hex(group)).map(|group| group.len()).collect();
    (groups.len() == lens.len() && lens == [8, 4, 4, 4, 12]).then(|| format!("GPU-{}", groups.join("-").to_lowercase()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_in_one_way() {
        for (typed, expected) in [
            ("GPU-8F6D1C3a-02b4-4d5e-9f10-a1b2c3d4e5f6", Some("GPU-8f6d1c3a-02b4-4d5e-9f10-a1b2c3d4e5f6")),
            ("8f6d1c3a-02b4-4d5e-9f10-a1b2c3d4e5f6", None),
            ("GPU-8f6d1c3a-02b4-4d5e-9f10-a1b2c3d4e5f", None),
            ("GPU-8f6d1c3a-02b4-4d5e-9f10-a1b2c3d4e5fg", None),
            ("GPU-8f6d1c3a-02b4-4d5e-9f10-a1b2c3d4e5f6-", None),
            ("GPU-8f6d1c3a02b44d5e9f10a1b2c3d4e5f6", None),
            ("MIG-8f6d1c3a-02b4-4d5e-9f10-a1b2c3d4e5f6", None),
            ("GPU-", None),
            ("", None),
        ] {
            assert_eq!(uuid(typed).as_deref(), expected, "{typed}");
        }
    }
}
