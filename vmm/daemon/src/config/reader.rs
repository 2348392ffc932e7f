//! Reading a TOML table key by key, so that every refusal can say where, what, and what to write instead.
//!
//! A [`Section`] first refuses every key that is none of its own, and names the nearest one; then it is asked for each.
//!
//! Not here: which keys there are.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

use super::quantity::Kind;

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("Cannot read the configuration {}; name another with --config, or make one with --print-default-config", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Something in it is wrong.
    #[error("{}:{line}: {problem}", path.display())]
    Invalid {
        /// In which file.
        path: PathBuf,
        /// In which line, from 1.
        line: usize,
        /// What is wrong, and what to write instead.
        problem: String,
    },
}

/// A value and the line it stands in.
#[derive(Clone, Debug)]
pub(crate) struct At<T> {
    pub(crate) value: T,
    pub(crate) line: usize,
}

/// A file's text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source<'a> {
    pub(crate) path: &'a Path,
    pub(crate) text: &'a str,
}

impl Source<'_> {
    /// Line of a byte, from 1.
    pub(crate) fn line(self, offset: usize) -> usize {
        let before = self.text.as_bytes().get(..offset).unwrap_or(self.text.as_bytes());
        before.iter().filter(|byte| **byte == b'\n').count() + 1
    }

    pub(crate) fn invalid(self, line: usize, problem: impl Into<String>) -> ConfigError {
        ConfigError::Invalid { path: self.path.to_owned(), line, problem: problem.into() }
    }
}

/// One table of the file.
pub(crate) struct Section<'a> {
    source: Source<'a>,
    /// As messages call it.
    name: &'static str,
    line: usize,
    table: &'a DeTable<'a>,
    known: &'static [&'static str],
}

impl<'a> Section<'a> {
    pub(crate) fn new(source: Source<'a>, name: &'static str, line: usize, table: &'a DeTable<'a>) -> Self {
        Self { source, name, line, table, known: &[] }
    }

    pub(crate) fn line(&self) -> usize {
        self.line
    }

    /// A refusal of the whole section.
    pub(crate) fn refuse(&self, problem: &str) -> ConfigError {
        self.source.invalid(self.line, problem)
    }

    fn get(&self, key: &'static str) -> Option<(&'a DeValue<'a>, usize)> {
        debug_assert!(self.known.contains(&key), "{key} is a key of {}", self.name);
        let value = self.table.get(key)?;
        Some((value.get_ref(), self.source.line(value.span().start)))
    }

    fn wrong_type(&self, key: &str, line: usize, found: &DeValue<'_>, wanted: &str) -> ConfigError {
        self.source.invalid(line, format!("{key} is {}; write {wanted}", kind_of(found)))
    }

    /// Refuses keys that are none of `known`.
    pub(crate) fn only(&mut self, known: &'static [&'static str]) -> Result<(), ConfigError> {
        self.known = known;
        let Some((key, _)) = self.table.iter().find(|(key, _)| !known.contains(&key.get_ref().as_ref())) else {
            return Ok(());
        };
        let name = key.get_ref();
        let hint = nearest(name, known.iter().copied())
            .map_or_else(|| format!("there are: {}", known.join(", ")), |near| format!("did you mean {near}?"));
        let line = self.source.line(key.span().start);
        Err(self.source.invalid(line, format!("Unknown key {name:?} in {}; {hint}", self.name)))
    }

    /// Refuses keys that only other kinds of the same thing have.
    pub(crate) fn only_of(&mut self, kind: &str, known: &'static [&'static str]) -> Result<(), ConfigError> {
        self.known = known;
        let Some((key, _)) = self.table.iter().find(|(key, _)| !known.contains(&key.get_ref().as_ref())) else {
            return Ok(());
        };
        let (line, name) = (self.source.line(key.span().start), key.get_ref());
        let problem = format!("{} of kind {kind:?} has no key {name:?}; there are: {}", self.name, known.join(", "));
        Err(self.source.invalid(line, problem))
    }

    /// The value, or a refusal that says how to write it.
    pub(crate) fn require<T>(&self, key: &str, value: Option<T>, example: &str) -> Result<T, ConfigError> {
        value.ok_or_else(|| self.source.invalid(self.line, format!("{} needs {key}; add {key} = {example}", self.name)))
    }

    pub(crate) fn string(&self, key: &'static str) -> Result<Option<At<String>>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some((DeValue::String(text), line)) => Ok(Some(At { value: text.clone().into_owned(), line })),
            Some((other, line)) => Err(self.wrong_type(key, line, other, "a string in quotes")),
        }
    }

    pub(crate) fn flag(&self, key: &'static str) -> Result<Option<bool>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some((DeValue::Boolean(value), _)) => Ok(Some(*value)),
            Some((other, line)) => Err(self.wrong_type(key, line, other, "true or false")),
        }
    }

    /// A whole number within `range`.
    pub(crate) fn integer(&self, key: &'static str, range: RangeInclusive<u32>) -> Result<Option<u32>, ConfigError> {
        let (first, last) = (range.start(), range.end());
        let wanted = format!("a whole number from {first} to {last}");
        match self.get(key) {
            None => Ok(None),
            Some((DeValue::Integer(value), line)) => {
                let number = u32::from_str_radix(value.as_str(), value.radix()).ok().filter(|n| range.contains(n));
                let problem = || self.source.invalid(line, format!("{key} is {value}; write {wanted}"));
                number.map(Some).ok_or_else(problem)
            }
            Some((other, line)) => Err(self.wrong_type(key, line, other, &wanted)),
        }
    }

    /// Permissions of a file.
    pub(crate) fn mode(&self, key: &'static str) -> Result<Option<u32>, ConfigError> {
        const WANTED: &str = "the permissions in octal, for example 0o660";
        match self.get(key) {
            None => Ok(None),
            Some((DeValue::Integer(value), line)) => {
                let number = u32::from_str_radix(value.as_str(), value.radix()).ok();
                let mode = number.filter(|mode| value.radix() == 8 && *mode <= 0o777);
                let problem = || self.source.invalid(line, format!("{key} is {value}; write {WANTED}"));
                mode.map(Some).ok_or_else(problem)
            }
            Some((other, line)) => Err(self.wrong_type(key, line, other, WANTED)),
        }
    }

    /// A quantity, in its base unit.
    pub(crate) fn quantity(&self, key: &'static str, kind: Kind) -> Result<Option<At<u64>>, ConfigError> {
        let wanted = format!("{}, for example {} (units: {})", kind.what, kind.example, kind.units());
        let (text, line) = match self.get(key) {
            None => return Ok(None),
            Some((DeValue::String(text), line)) => (text.to_string(), line),
            Some((DeValue::Integer(value), line)) if value.radix() == 10 => (value.as_str().to_owned(), line),
            Some((other, line)) => return Err(self.wrong_type(key, line, other, &wanted)),
        };
        let problem = || self.source.invalid(line, format!("{key} is {text:?}; write {wanted}"));
        kind.parse(&text).map(|value| Some(At { value, line })).ok_or_else(problem)
    }

    /// A time in whole milliseconds.
    pub(crate) fn millis(&self, key: &'static str) -> Result<Option<u32>, ConfigError> {
        const NANOS: u64 = 1_000_000;
        let Some(At { value, line }) = self.quantity(key, super::quantity::TIME)? else { return Ok(None) };
        let millis = u32::try_from(value / NANOS).ok().filter(|millis| *millis > 0 && value.is_multiple_of(NANOS));
        let problem = || {
            self.source
                .invalid(line, format!("{key} is not in whole milliseconds up to 49 days; write \"500ms\" or \"10s\""))
        };
        millis.map(Some).ok_or_else(problem)
    }

    /// One of several words.
    pub(crate) fn choice<T: Copy>(&self, key: &'static str, words: &[(&str, T)]) -> Result<Option<T>, ConfigError> {
        let Some(At { value, line }) = self.string(key)? else { return Ok(None) };
        if let Some((_, meaning)) = words.iter().find(|(word, _)| *word == value) {
            return Ok(Some(*meaning));
        }
        let hint = nearest(&value, words.iter().map(|(word, _)| *word))
            .map_or(String::new(), |near| format!("; did you mean {near:?}?"));
        let all: Vec<_> = words.iter().map(|(word, _)| format!("{word:?}")).collect();
        Err(self.source.invalid(line, format!("{key} is {value:?}; write {}{hint}", all.join(" or "))))
    }

    /// A table of its own.
    pub(crate) fn table(&self, key: &'static str, name: &'static str) -> Result<Option<Section<'a>>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some((DeValue::Table(table), line)) => Ok(Some(Section::new(self.source, name, line, table))),
            Some((other, line)) => Err(self.wrong_type(key, line, other, &format!("a table {name}"))),
        }
    }

    /// Several tables.
    pub(crate) fn tables(&self, key: &'static str, name: &'static str) -> Result<Vec<Section<'a>>, ConfigError> {
        let (list, line) = match self.get(key) {
            None => return Ok(Vec::new()),
            Some((DeValue::Array(list), line)) => (list, line),
            Some((other, line)) => return Err(self.wrong_type(key, line, other, &format!("a list of {name}"))),
        };
        let mut sections = Vec::new();
        for item in list.iter() {
            let at = self.source.line(item.span().start);
            match item.get_ref() {
                DeValue::Table(table) => sections.push(Section::new(self.source, name, at, table)),
                other => return Err(self.wrong_type(key, line, other, &format!("a list of {name}"))),
            }
        }
        Ok(sections)
    }
}

fn kind_of(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "a number",
        DeValue::Float(_) => "a fraction",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

/// The name that a misspelt one was probably meant to be.
pub(crate) fn nearest<'a>(typed: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let scored = names.map(|name| (strsim::jaro_winkler(typed, name), name));
    scored.filter(|(score, _)| *score > 0.8).max_by(|one, other| one.0.total_cmp(&other.0)).map(|(_, name)| name)
}
