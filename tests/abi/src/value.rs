//! Values of constants, comparable across the languages.

use std::fmt;

/// A number or a string.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// Any integer.
    Number(u64),
    /// Bytes of a string, without its end.
    Text(Vec<u8>),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number:#x}"),
            Self::Text(bytes) => write!(f, "\"{}\"", bytes.escape_ascii()),
        }
    }
}

/// How a constant of the Rust side becomes a [`Value`].
pub(crate) trait ToValue {
    /// The value.
    fn to_value(&self) -> Value;
}

macro_rules! numbers {
    ($($int:ty),*) => {$(impl ToValue for $int {
        fn to_value(&self) -> Value {
            Value::Number((*self).into())
        }
    })*};
}
numbers!(u8, u16, u32, u64);

impl ToValue for usize {
    fn to_value(&self) -> Value {
        Value::Number(*self as u64)
    }
}

impl<const N: usize> ToValue for [u8; N] {
    fn to_value(&self) -> Value {
        Value::Text(self.to_vec())
    }
}

macro_rules! enums {
    ($($name:ident as $repr:ty),*) => {$(impl ToValue for vdev_wire::$name {
        fn to_value(&self) -> Value {
            Value::Number((*self as $repr).into())
        }
    })*};
}
enums!(
    Status as u32,
    Opcode as u16,
    EndpointKind as u16,
    WorkOpcode as u16,
    TransferPath as u8,
    PathReason as u8,
    EventKind as u16,
    FaultReason as u8
);
