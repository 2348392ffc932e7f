//! The headers and the crates agree, and the comparison would notice if they did not.

use std::fs;
use std::path::{Path, PathBuf};

use abi::{HEADERS, differences, probe, root, unlisted_in_rust};

fn include() -> PathBuf {
    root().join("guest-driver/uapi/include")
}

#[test]
fn headers_and_crates_agree() {
    let found = differences(&include()).unwrap_or_else(|error| panic!("{error}"));
    assert!(found.is_empty(), "the headers and the Rust side differ:\n{}", found.join("\n"));
}

#[test]
fn every_constant_and_structure_of_the_crates_is_compared() {
    let found = unlisted_in_rust().expect("the sources can be read");
    assert!(found.is_empty(), "the comparison is not complete:\n{}", found.join("\n"));
}

#[test]
fn each_header_compiles_by_itself() {
    for header in HEADERS {
        probe::compile_alone(&include().join("linux").join(header)).unwrap_or_else(|error| panic!("{header}: {error}"));
    }
}

/// Changes a copy of the headers and answers what the comparison finds.
fn found_after(header: &str, change: impl Fn(&str) -> String) -> Vec<String> {
    let copy = tempfile::tempdir().expect("a temporary directory");
    let folder = copy.path().join("linux");
    fs::create_dir(&folder).expect("a directory");
    for name in HEADERS {
        let text = fs::read_to_string(include().join("linux").join(name)).expect("the header can be read");
        let changed = if name == header { change(&text) } else { text.clone() };
        assert!(name != header || changed != text, "the change must change something");
        fs::write(folder.join(name), changed).expect("the copy can be written");
    }
    differences(Path::new(copy.path())).unwrap_or_else(|error| panic!("{error}"))
}

fn assert_names(found: &[String], what: &str) {
    assert!(found.iter().any(|line| line.contains(what)), "nothing about {what} in {found:#?}");
}

#[test]
fn swapped_fields_of_one_size_are_found() {
    let found = found_after("virtio_peergate.h", |text| {
        text.replace("__le64 memory_len;\n\t__le64 memory_free;", "__le64 memory_free;\n\t__le64 memory_len;")
    });
    assert_names(&found, "virtio_peergate_endpoint.memory_len lies at 16");
    assert_names(&found, "virtio_peergate_endpoint.memory_free lies at 8");
}

#[test]
fn a_wider_field_is_found() {
    let found = found_after("peergate.h", |text| text.replace("__u16 reason;\n};", "__u64 reason;\n};"));
    assert_names(&found, "struct peergate_peer has");
    assert_names(&found, "PEERGATE_PEER takes");
}

#[test]
fn a_changed_constant_is_found() {
    let found =
        found_after("virtio_peergate.h", |text| text.replace("PEERGATE_S_BUSY\t\t0x49", "PEERGATE_S_BUSY\t\t0x59"));
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_names(&found, "VIRTIO_PEERGATE_S_BUSY is 0x59 in C");
}

#[test]
fn a_changed_magic_is_found() {
    let found = found_after("virtio_peergate.h", |text| text.replace("\"PEERGATE\"", "\"PEERGATf\""));
    assert_names(&found, "VIRTIO_PEERGATE_MAGIC");
}

#[test]
fn an_ioctl_with_another_structure_is_found() {
    let found = found_after("peergate.h", |text| {
        text.replace(
            "_IOWR(PEERGATE_TYPE, 0x42, struct peergate_stream)",
            "_IOWR(PEERGATE_TYPE, 0x42, struct peergate_map)",
        )
        .replace(
            "_IOWR(PEERGATE_TYPE, 0x20, struct peergate_alloc)",
            "_IOWR(PEERGATE_TYPE, 0x20, struct peergate_peer)",
        )
    });
    assert_names(&found, "PEERGATE_ALLOC takes 24 bytes in C, 40 in Rust");
}

#[test]
fn an_ioctl_with_another_direction_or_number_is_found() {
    let found =
        found_after("peergate.h", |text| text.replace("_IOW(PEERGATE_TYPE, 0x11,", "_IOWR(PEERGATE_TYPE, 0x11,"));
    assert_names(&found, "PEERGATE_UNMAP is");
    let found =
        found_after("peergate.h", |text| text.replace("_IOW(PEERGATE_TYPE, 0x41,", "_IOW(PEERGATE_TYPE, 0x43,"));
    assert_names(&found, "PEERGATE_WAIT is");
}

#[test]
fn constants_structures_and_fields_on_one_side_only_are_found() {
    let found = found_after("peergate.h", |text| {
        text.replace("#define PEERGATE_KIND_FPGA\t2\n", "#define PEERGATE_KIND_NPU\t3\n").replace(
            "struct peergate_free {",
            "struct peergate_extra {\n\t__u32 size;\n};\nstruct peergate_free {\n\t__u32 spare;",
        )
    });
    assert_names(&found, "PEERGATE_KIND_FPGA is on the Rust side but in no header");
    assert_names(&found, "PEERGATE_KIND_NPU is in a header but not on the Rust side");
    assert_names(&found, "struct peergate_extra is in a header but not on the Rust side");
    assert_names(&found, "peergate_free.spare is only on one side");
}

#[test]
fn a_wire_field_in_native_order_is_found() {
    let found = found_after("virtio_peergate.h", |text| text.replace("__le64 handle;\n};", "__u64 handle;\n};"));
    assert_names(&found, "virtio_peergate_free.handle is a __u64");
}

#[test]
fn headers_that_disagree_with_each_other_are_found() {
    let found = found_after("peergate.h", |text| text.replace("PEERGATE_PATH_STAGED\t2", "PEERGATE_PATH_STAGED\t4"));
    assert_names(&found, "PEERGATE_PATH_STAGED and VIRTIO_PEERGATE_PATH_STAGED differ");
}
