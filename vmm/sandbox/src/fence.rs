//! What an operator may turn off, for a kernel or container that has it not.
//!
//! Not here: what is turned off.

use std::fmt;
use std::str::FromStr;

/// Whether a fence is there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Fence {
    /// It is, or nothing is started.
    #[default]
    Enforce,
    /// It is not.
    Off,
}

impl Fence {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Enforce, Self::Off];

    /// Name in a configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Enforce => "enforce",
            Self::Off => "off",
        }
    }
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Neither has that name.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is neither; write \"enforce\" or \"off\"")]
pub struct UnknownFence {
    /// What was written.
    pub name: String,
}

impl FromStr for Fence {
    type Err = UnknownFence;

    fn from_str(name: &str) -> Result<Self, UnknownFence> {
        Self::ALL.into_iter().find(|fence| fence.name() == name).ok_or_else(|| UnknownFence { name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fences_are_known_by_name() {
        assert!(Fence::ALL.into_iter().all(|fence| fence.to_string().parse() == Ok(fence)));
        assert_eq!("on".parse::<Fence>(), Err(UnknownFence { name: "on".into() }));
    }
}
