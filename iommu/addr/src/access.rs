//! What a mapping allows and what a transfer wants.

/// Read and write rights. A transfer reads its source and writes its destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Access {
    /// Bytes may be read.
    pub read: bool,
    /// Bytes may be written.
    pub write: bool,
}

impl Access {
    /// No right at all.
    pub const NONE: Self = Self { read: false, write: false };
    /// Read only.
    pub const READ: Self = Self { read: true, write: false };
    /// Write only.
    pub const WRITE: Self = Self { read: false, write: true };
    /// Read and write.
    pub const RW: Self = Self { read: true, write: true };

    /// Whether these rights cover all of `want`.
    pub fn allows(self, want: Self) -> bool {
        (self.read || !want.read) && (self.write || !want.write)
    }

    /// Rights that either side has.
    pub fn union(self, other: Self) -> Self {
        Self { read: self.read || other.read, write: self.write || other.write }
    }

    /// Rights left after `taken` is withdrawn.
    pub fn without(self, taken: Self) -> Self {
        Self { read: self.read && !taken.read, write: self.write && !taken.write }
    }

    /// Whether no right is left.
    pub fn is_none(self) -> bool {
        !self.read && !self.write
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_only_does_not_allow_reading() {
        assert!(!Access::WRITE.allows(Access::READ));
        assert!(!Access::READ.allows(Access::RW));
        assert!(Access::RW.allows(Access::WRITE));
        assert!(Access::NONE.allows(Access::NONE));
    }

    #[test]
    fn withdrawing_the_last_right_leaves_none() {
        assert!(Access::READ.without(Access::RW).is_none());
        assert_eq!(Access::RW.without(Access::READ), Access::WRITE);
        assert_eq!(Access::READ.union(Access::WRITE), Access::RW);
    }
}
