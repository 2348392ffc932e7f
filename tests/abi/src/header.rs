//! Just enough of a C header's text to list what it defines: names of structures, fields and macros. Values come from a compiler.
//!
//! Not here: C. A header that writes structures any other way than one field a line is reported as having none.

use std::collections::BTreeMap;

/// What one header defines.
#[derive(Debug, Default)]
pub struct Header {
    /// Fields by structure, each as (type, name).
    pub structures: BTreeMap<String, Vec<(String, String)>>,
    /// Macros that have a value.
    pub macros: Vec<String>,
}

/// Lists what `text` defines.
pub fn parse(text: &str) -> Header {
    let text = without_comments(text);
    let mut header = Header::default();
    let mut inside: Option<String> = None;
    for line in text.lines().map(str::trim) {
        if let Some(rest) = line.strip_prefix("#define ") {
            let mut words = rest.split_whitespace();
            if let (Some(name), Some(_)) = (words.next(), words.next()) {
                header.macros.push(name.to_owned());
            }
        } else if let Some(name) = line.strip_prefix("struct ").and_then(|rest| rest.strip_suffix(" {")) {
            header.structures.entry(name.to_owned()).or_default();
            inside = Some(name.to_owned());
        } else if line.starts_with('}') {
            inside = None;
        } else if let (Some(name), Some(field)) = (&inside, line.strip_suffix(';'))
            && let Some((kind, field)) = field.rsplit_once(char::is_whitespace)
        {
            let field = field.split('[').next().unwrap_or(field);
            header.structures.entry(name.clone()).or_default().push((kind.trim().to_owned(), field.to_owned()));
        }
    }
    header
}

fn without_comments(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("/*") {
        out.push_str(before);
        rest = after.split_once("*/").map_or("", |(_, after)| after);
    }
    out.push_str(rest);
    out
}
