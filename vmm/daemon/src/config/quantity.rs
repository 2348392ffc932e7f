//! Quantities as people write them: `"64MiB"`, `"16GB/s"`, `"2us"`.
//!
//! A number without a unit is in the base unit (bytes, bytes a second); a time needs its unit, except 0. Not here: where they stand.

/// What a quantity measures, with its units and their size in the base unit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    /// What it is, for messages.
    pub(crate) what: &'static str,
    /// How to write one.
    pub(crate) example: &'static str,
    units: &'static [(&'static str, u64)],
    /// Whether a bare number has a meaning.
    bare: bool,
}

const K: u64 = 1 << 10;

/// Bytes.
pub(crate) const SIZE: Kind = Kind {
    what: "a size",
    example: "\"64MiB\"",
    units: &[("B", 1), ("KiB", K), ("MiB", K * K), ("GiB", K * K * K), ("TiB", K * K * K * K)],
    bare: true,
};

/// Bytes, with the letters that VMMs take.
pub(crate) const VM_SIZE: Kind = Kind {
    what: "a size",
    example: "2G",
    units: &[
        ("KiB", K),
        ("MiB", K * K),
        ("GiB", K * K * K),
        ("TiB", K * K * K * K),
        ("K", K),
        ("M", K * K),
        ("G", K * K * K),
        ("T", K * K * K * K),
    ],
    bare: true,
};

/// Bytes a second.
pub(crate) const RATE: Kind = Kind {
    what: "a bandwidth",
    example: "\"16GB/s\"",
    units: &[
        ("B/s", 1),
        ("kB/s", 1_000),
        ("MB/s", 1_000_000),
        ("GB/s", 1_000_000_000),
        ("KiB/s", K),
        ("MiB/s", K * K),
        ("GiB/s", K * K * K),
    ],
    bare: true,
};

/// Nanoseconds.
pub(crate) const TIME: Kind = Kind {
    what: "a time",
    example: "\"2us\"",
    units: &[("ns", 1), ("us", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000)],
    bare: false,
};

impl Kind {
    /// The quantity in the base unit; `None` if the text is none, or too large.
    pub(crate) fn parse(&self, text: &str) -> Option<u64> {
        let text = text.trim();
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let number: u64 = number.parse().ok()?;
        let unit = unit.trim_start();
        if unit.is_empty() {
            return (self.bare || number == 0).then_some(number);
        }
        let (_, factor) = self.units.iter().find(|(name, _)| *name == unit)?;
        number.checked_mul(*factor)
    }

    /// The units, for messages.
    pub(crate) fn units(&self) -> String {
        let names: Vec<_> = self.units.iter().map(|(name, _)| *name).collect();
        match names.split_last() {
            Some((last, rest)) => format!("{} or {last}", rest.join(", ")),
            None => String::new(),
        }
    }

    /// In the largest unit that fits without a remainder.
    fn exact(&self, value: u64) -> String {
        let fits = |factor: u64| value != 0 && value.is_multiple_of(factor);
        match self.units.iter().filter(|(_, factor)| fits(*factor)).max_by_key(|(_, factor)| *factor) {
            Some((unit, factor)) => format!("{} {unit}", value / factor),
            None => format!("{value} {}", self.units.first().map_or("", |(unit, _)| unit)),
        }
    }
}

/// Bytes, exactly: `64 MiB`.
pub(crate) fn size(bytes: u64) -> String {
    SIZE.exact(bytes)
}

/// Bytes a second, exactly; 0 is no limit.
pub(crate) fn rate(bytes: u64) -> String {
    if bytes == 0 { "unlimited".to_owned() } else { RATE.exact(bytes) }
}

/// Nanoseconds, exactly: `2 us`.
pub(crate) fn time(nanoseconds: u64) -> String {
    if nanoseconds == 0 { "0".to_owned() } else { TIME.exact(nanoseconds) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_have_the_value_of_their_unit() {
        assert_eq!(SIZE.parse("64MiB"), Some(64 << 20));
        assert_eq!(SIZE.parse(" 2 GiB "), Some(2 << 30));
        assert_eq!(SIZE.parse("4096"), Some(4096));
        assert_eq!(VM_SIZE.parse("2G"), Some(2 << 30));
        assert_eq!(RATE.parse("16GB/s"), Some(16_000_000_000));
        assert_eq!(RATE.parse("0"), Some(0));
        assert_eq!(TIME.parse("2us"), Some(2_000));
        assert_eq!(TIME.parse("0"), Some(0));
    }

    #[test]
    fn what_is_no_quantity_is_refused() {
        for text in
            ["", "MiB", "64MB", "64mib", "-1", "1.5GiB", "0x10", "64 MiB x", "18446744073709551616", "99999999999TiB"]
        {
            assert_eq!(SIZE.parse(text), None, "{text}");
        }
        assert_eq!(TIME.parse("5"), None, "a time needs a unit");
        assert_eq!(RATE.parse("16GB"), None);
    }

    #[test]
    fn quantities_are_written_exactly() {
        assert_eq!((size(64 << 20), size(4097), size(0)), ("64 MiB".into(), "4097 B".into(), "0 B".into()));
        assert_eq!(
            (rate(16_000_000_000), rate(1 << 20), rate(0)),
            ("16 GB/s".into(), "1 MiB/s".into(), "unlimited".into())
        );
        assert_eq!((time(1_500), time(2_000_000), time(0)), ("1500 ns".into(), "2 ms".into(), "0".into()));
    }
}
