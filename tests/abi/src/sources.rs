//! Lists what a crate's source makes public and a C program could need: constants, structures with a layout, and variants of enums.
//!
//! Reads the source as text, in the shape rustfmt gives it. Not here: associated constants (`ALL` and the like are not part of an ABI).

use std::path::Path;
use std::{fs, io};

/// The paths of every public constant, structure and enum variant of the crate `name`, whose sources lie flat in `folder`.
pub fn public_names(name: &str, folder: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        let text = fs::read_to_string(entry?.path())?;
        scan(name, &text, &mut names);
    }
    Ok(names)
}

fn scan(krate: &str, text: &str, names: &mut Vec<String>) {
    let mut within: Option<&str> = None;
    for line in text.lines() {
        let word = |rest: &str| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or("").to_owned();
        if let Some(rest) = line.strip_prefix("pub const ").filter(|rest| !rest.starts_with("fn ")) {
            names.push(format!("{krate}::{}", word(rest)));
        } else if let Some(rest) = line.strip_prefix("pub struct ") {
            names.push(format!("{krate}::{}", word(rest)));
        } else if let Some(rest) = line.strip_prefix("pub enum ") {
            within = rest.split_whitespace().next();
        } else if line == "}" {
            within = None;
        } else if let (Some(outer), Some((variant, _))) = (within, line.split_once(" = ")) {
            names.push(format!("{krate}::{outer}::{}", variant.trim()));
        }
    }
}
