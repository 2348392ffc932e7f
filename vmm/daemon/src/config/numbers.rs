//! Numbers of links, which must stay what they are while workers draw on their credit.
//!
//! Not here: the credit itself.

use super::{Config, DeviceConfig};

impl Config {
    /// Numbers the links as `running` does: a link that is the same keeps its number, another one gets a number that no link of `running`
    /// has, since workers still draw on those.
    pub fn keep_numbers(&mut self, running: &Self) {
        let same = |one: &DeviceConfig, other: &DeviceConfig| one.name == other.name && one.link == other.link;
        let mut taken: Vec<_> = running.devices.iter().map(|device| device.number).collect();
        for device in &mut self.devices {
            let kept = running.devices.iter().find(|old| same(old, device)).map(|old| old.number);
            let number = kept.or_else(|| (0..=u16::MAX).find(|number| !taken.contains(number)));
            device.number = number.unwrap_or(u16::MAX);
            taken.push(device.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn devices(list: &[(&str, u64)]) -> Config {
        let device = |(name, bandwidth): &(&str, u64)| {
            format!(
                "[[device]]\nname = {name:?}\nkind = \"gpu\"\nmemory = 4096\nlink = {{ bandwidth = {bandwidth} }}\n"
            )
        };
        let text: String = list.iter().map(device).collect();
        Config::parse(Path::new("t.toml"), &text).unwrap()
    }

    fn numbers(config: &Config) -> Vec<u16> {
        config.devices.iter().map(|device| device.number).collect()
    }

    #[test]
    fn a_link_keeps_its_number_and_no_other_gets_it() {
        let mut first = devices(&[("a", 1), ("b", 1), ("c", 1)]);
        assert_eq!(numbers(&first), [0, 1, 2]);
        let mut second = devices(&[("new", 1), ("c", 1), ("b", 2)]);
        second.keep_numbers(&first);
        assert_eq!(numbers(&second), [3, 2, 4], "b has another link than before");
        first.keep_numbers(&second);
        assert_eq!(numbers(&first), [0, 1, 2], "free again");
    }
}
