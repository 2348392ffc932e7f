//! What the kit promises, asked of a real one. Skipped with a printed reason where no kit is built (`cargo xtask kit` builds it).

use std::fs;
use std::path::Path;

use xtask::kit::Kit;

const GOOD: &str = r#"
#include <linux/module.h>
static int __init probe_init(void) { return 0; }
static void __exit probe_exit(void) { }
module_init(probe_init);
module_exit(probe_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Says nothing");
"#;

fn kit() -> Option<Kit> {
    let kit = Kit::open().expect("a kit that is there opens");
    if kit.is_none() {
        println!("skipped: there is no kit; run `cargo xtask kit`");
    }
    kit
}

fn module(dir: &Path, source: &str) {
    fs::create_dir_all(dir).expect("the test can write its files");
    fs::write(dir.join("Kbuild"), "obj-m := probe.o\n").expect("the test can write its files");
    fs::write(dir.join("probe.c"), source).expect("the test can write its files");
}

#[test]
fn a_clean_module_is_built_and_passes_sparse_and_leaves_the_sources_alone() {
    let Some(kit) = kit() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (source, out) = (dir.path().join("kernel"), dir.path().join("out"));
    module(&source, GOOD);
    let built = kit.build_module(&source, &[], &out).unwrap();
    assert_eq!(built, [out.join("probe.ko")]);
    kit.sparse(&source, &[]).unwrap();
    assert_eq!(fs::read_dir(&source).unwrap().count(), 2);
}

#[test]
fn a_compiler_warning_fails_the_build() {
    let Some(kit) = kit() else { return };
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("kernel");
    module(&source, &format!("{GOOD}static int unused_one;\n"));
    let error = kit.build_module(&source, &[], &dir.path().join("out")).unwrap_err().to_string();
    assert!(error.contains("unused_one"), "{error}");
}

#[test]
fn a_mixed_up_byte_order_fails_sparse_but_not_the_compiler() {
    let Some(kit) = kit() else { return };
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("kernel");
    module(&source, &GOOD.replace("return 0;", "u32 wrong = cpu_to_le32(7); return wrong == 0;"));
    kit.build_module(&source, &[], &dir.path().join("out")).unwrap();
    let error = kit.sparse(&source, &[]).unwrap_err().to_string();
    assert!(error.contains("__le32"), "{error}");
}

#[test]
fn kernel_modules_come_with_what_they_need_in_the_order_to_load() {
    let Some(kit) = kit() else { return };
    let modules = kit.kernel_modules(&["vfio_pci", "virtio_pci"]).unwrap();
    let names: Vec<_> = modules.iter().map(|module| module.name.as_str()).collect();
    let place = |name: &str| names.iter().position(|n| *n == name).unwrap();
    assert!(place("vfio") < place("vfio-pci-core") && place("vfio-pci-core") < place("vfio-pci"), "{names:?}");
    assert!(!names.contains(&"virtio_pci"), "it is built in");
    assert!(modules.iter().all(|module| fs::read(&module.path).unwrap().starts_with(b"\x7fELF")));
    assert!(kit.kernel_modules(&["no_such_module"]).is_err());
}
