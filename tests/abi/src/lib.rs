//! The C headers and the Rust crates say the same, byte for byte.
//!
//! Three sources are compared. [`table`] says what the Rust side is, under the C names. [`header`] lists what the headers define, so that
//! nothing is left out on either side. [`probe`] asks the C compiler what the headers mean. [`differences`] puts them together and answers
//! with sentences; no sentence, no difference.
//!
//! Not here: anything about behaviour.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

pub mod header;
pub mod probe;
pub mod sources;
pub mod table;
mod value;

pub use value::Value;

/// The headers, in `include/linux` of `guest-driver/uapi`.
pub const HEADERS: [&str; 2] = ["virtio_peergate.h", "peergate.h"];

/// Macros of the headers that have no value to compare.
const C_EXEMPT: [&str; 0] = [];

/// Constants of the crates that the headers do not have: sizes, which C asks `sizeof` for.
const RUST_EXEMPT: [&str; 4] = [
    "vdev_wire::CONFIG_SIZE",
    "vdev_wire::SUBMIT_HEADER_SIZE",
    "vdev_wire::DESCRIPTOR_SIZE",
    "vdev_wire::COMPLETION_SIZE",
];

/// Constants of the two headers that must be equal though their names differ. Equal names must be equal anyway.
const SAME: [(&str, &str); 7] = [
    ("PEERGATE_READ", "VIRTIO_PEERGATE_MAP_READ"),
    ("PEERGATE_WRITE", "VIRTIO_PEERGATE_MAP_WRITE"),
    ("PEERGATE_READ", "VIRTIO_PEERGATE_PEER_READ"),
    ("PEERGATE_WRITE", "VIRTIO_PEERGATE_PEER_WRITE"),
    ("PEERGATE_READ", "VIRTIO_PEERGATE_ACCESS_READ"),
    ("PEERGATE_WRITE", "VIRTIO_PEERGATE_ACCESS_WRITE"),
    ("PEERGATE_CANCEL_ALL", "VIRTIO_PEERGATE_CANCEL_STREAM"),
];

/// The repository's root.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every difference between the headers in `include`/linux and the Rust side, as sentences.
///
/// # Errors
/// [`probe::ProbeError`] if there is no compiler or the headers do not compile.
pub fn differences(include: &Path) -> Result<Vec<String>, probe::ProbeError> {
    let mut found = Vec::new();
    let mut headers = header::Header::default();
    for name in HEADERS {
        let path = include.join("linux").join(name);
        let text =
            fs::read_to_string(&path).map_err(|source| probe::ProbeError::Io { action: "read", path, source })?;
        let header = header::parse(&text);
        headers.structures.extend(header.structures);
        headers.macros.extend(header.macros);
    }
    headers.macros.retain(|name| !name.starts_with('_') && !C_EXEMPT.contains(&name.as_str()));
    compare_names(&headers, &mut found);

    let scratch = tempfile::tempdir().map_err(|source| probe::ProbeError::Io {
        action: "make a directory in",
        path: std::env::temp_dir(),
        source,
    })?;
    let answers = probe::ask(include, scratch.path(), &questions(&headers))?;
    compare_structures(&answers, &mut found);
    compare_constants(&answers, &mut found);
    compare_headers(&answers, &headers, &mut found);
    Ok(found)
}

/// Every constant of the two crates' sources that [`table`] does not hold, and the other way round.
pub fn unlisted_in_rust() -> std::io::Result<Vec<String>> {
    let listed: BTreeSet<String> = table::constants()
        .iter()
        .map(|constant| constant.rust)
        .chain(table::ioctls().iter().map(|ioctl| ioctl.rust))
        .chain(table::structures().iter().map(|structure| structure.rust))
        .chain(RUST_EXEMPT)
        .map(str::to_owned)
        .collect();
    let mut written = BTreeSet::new();
    for (name, folder) in [("vdev_wire", "vdev/wire/src"), ("peergate_uapi", "guest-driver/uapi/src")] {
        written.extend(sources::public_names(name, &root().join(folder))?);
    }
    let missing = written.difference(&listed).map(|name| format!("{name} is in no comparison"));
    let gone = listed.difference(&written).map(|name| format!("{name} is compared but not in the sources"));
    Ok(missing.chain(gone).collect())
}

fn compare_names(headers: &header::Header, found: &mut Vec<String>) {
    let constants = table::constants();
    let ioctls = table::ioctls();
    let listed: BTreeSet<&str> = constants.iter().map(|c| c.c).chain(ioctls.iter().map(|i| i.c)).collect();
    let defined: BTreeSet<&str> = headers.macros.iter().map(String::as_str).collect();
    found.extend(defined.difference(&listed).map(|name| format!("{name} is in a header but not on the Rust side")));
    found.extend(listed.difference(&defined).map(|name| format!("{name} is on the Rust side but in no header")));

    let structures = table::structures();
    let listed: BTreeSet<&str> = structures.iter().map(|structure| structure.c).collect();
    let defined: BTreeSet<&str> = headers.structures.keys().map(String::as_str).collect();
    found.extend(
        defined.difference(&listed).map(|name| format!("struct {name} is in a header but not on the Rust side")),
    );
    found.extend(listed.difference(&defined).map(|name| format!("struct {name} is on the Rust side but in no header")));
    for structure in &structures {
        let Some(fields) = headers.structures.get(structure.c) else { continue };
        let defined: BTreeSet<&str> = fields.iter().map(|(_, name)| name.as_str()).collect();
        let listed: BTreeSet<&str> = structure.fields.iter().map(|field| field.name).collect();
        for name in defined.symmetric_difference(&listed) {
            found.push(format!("{}.{name} is only on one side", structure.c));
        }
        if structure.c.starts_with("virtio_") {
            for (kind, name) in fields.iter().filter(|(kind, _)| kind != "__u8" && !kind.starts_with("__le")) {
                found.push(format!("{}.{name} is a {kind}; the wire is little-endian", structure.c));
            }
        }
    }
}

/// Everything that both sides name.
fn questions(headers: &header::Header) -> probe::Questions {
    let mut questions = probe::Questions::default();
    for structure in table::structures() {
        let Some(fields) = headers.structures.get(structure.c) else { continue };
        let names = structure.fields.iter().map(|field| field.name);
        let shared = names.filter(|name| fields.iter().any(|(_, field)| field == name)).map(str::to_owned).collect();
        questions.structures.insert(structure.c.to_owned(), shared);
    }
    let defined = |name: &str| headers.macros.iter().any(|defined| defined == name);
    for constant in table::constants().into_iter().filter(|constant| defined(constant.c)) {
        match constant.value {
            Value::Number(_) => questions.numbers.push(constant.c.to_owned()),
            Value::Text(_) => questions.texts.push(constant.c.to_owned()),
        }
    }
    questions.ioctls = table::ioctls().iter().map(|ioctl| ioctl.c.to_owned()).filter(|name| defined(name)).collect();
    questions
}

fn compare_structures(answers: &probe::Answers, found: &mut Vec<String>) {
    for structure in table::structures() {
        let c = structure.c;
        if let Some(size) = answers.sizes.get(c).filter(|size| **size != structure.size) {
            found.push(format!("struct {c} has {size} bytes in C, {} in Rust ({})", structure.size, structure.rust));
        }
        for field in &structure.fields {
            let Some((offset, size)) = answers.fields.get(&(c.to_owned(), field.name.to_owned())) else { continue };
            if (*offset, *size) != (field.offset, field.size) {
                found.push(format!(
                    "{c}.{} lies at {offset} with {size} bytes in C, at {} with {} bytes in Rust",
                    field.name, field.offset, field.size
                ));
            }
        }
    }
}

fn compare_constants(answers: &probe::Answers, found: &mut Vec<String>) {
    for constant in table::constants() {
        if let Some(value) = answers.values.get(constant.c).filter(|value| **value != constant.value) {
            found.push(format!("{} is {value} in C, {} is {} in Rust", constant.c, constant.rust, constant.value));
        }
    }
    for ioctl in table::ioctls() {
        let number = Value::Number(ioctl.number.into());
        if let Some(value) = answers.values.get(ioctl.c).filter(|value| **value != number) {
            found.push(format!("{} is {value} in C, {} is {number} in Rust", ioctl.c, ioctl.rust));
        }
        if let Some(size) = answers.ioctl_sizes.get(ioctl.c).filter(|size| **size != ioctl.size) {
            found.push(format!("{} takes {size} bytes in C, {} in Rust", ioctl.c, ioctl.size));
        }
    }
}

/// The two headers must agree where the kernel driver hands a number or a completion through unchanged.
fn compare_headers(answers: &probe::Answers, headers: &header::Header, found: &mut Vec<String>) {
    let same_suffix = headers.macros.iter().filter_map(|name| {
        let wire = format!("VIRTIO_{name}");
        (name.starts_with("PEERGATE_") && headers.macros.contains(&wire)).then_some((name.clone(), wire))
    });
    let pairs = same_suffix.chain(SAME.map(|(user, wire)| (user.to_owned(), wire.to_owned())));
    for (user, wire) in pairs {
        let (a, b) = (answers.values.get(&user), answers.values.get(&wire));
        if a != b {
            found.push(format!("{user} and {wire} differ: {a:?}, {b:?}"));
        }
    }
    for ((structure, field), place) in &answers.fields {
        let wire = (format!("virtio_{structure}"), field.clone());
        let handed_through = ["peergate_completion", "peergate_work"].contains(&structure.as_str());
        let shared = handed_through && field != "reserved0";
        if shared && let Some(other) = answers.fields.get(&wire).filter(|other| *other != place) {
            found.push(format!("{structure}.{field} lies at {place:?}, {}.{field} at {other:?}", wire.0));
        }
    }
}
