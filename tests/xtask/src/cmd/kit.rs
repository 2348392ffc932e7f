//! `cargo xtask kit`: prepare the machine, or show what is prepared.

use anyhow::{Result, bail};
use clap::Args;
use xtask::kit::{Kernel, Kit, NotToBeHad};

/// Prepare what guests need: host packages, QEMU, guest kernels and their compilers, in the user's cache.
#[derive(Debug, Args)]
pub(crate) struct KitArgs {
    /// Also build the debug kernel (KASAN, lockdep, kmemleak, iommufd), if it is not there yet: a quarter of an hour on two processors
    #[arg(long, conflicts_with = "print")]
    debug_kernel: bool,
    /// Show the kit's paths and versions; build nothing
    #[arg(long)]
    print: bool,
    /// Show them as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &KitArgs) -> Result<()> {
    let kit = if args.print {
        match Kit::open()? {
            Some(kit) => kit,
            None => bail!("There is no kit yet; run `cargo xtask kit`"),
        }
    } else {
        prepare(args.debug_kernel)?
    };
    if args.json {
        let facts = serde_json::json!({
            "kit": kit,
            "kernel_image": kit.kernel_image(),
            "modules": kit.modules_dir(),
            "busybox": kit.busybox(),
        });
        println!("{facts:#}");
    } else {
        let command: Vec<_> = kit.qemu.command.iter().map(|word| word.display().to_string()).collect();
        let origin = if kit.qemu.from_path { "this machine's" } else { "the kit's" };
        println!("tree     {}", kit.root.display());
        println!("kernel   {} {}", kit.kernel_release(), kit.kernel_image().display());
        println!("modules  {}", kit.modules_dir().display());
        println!("busybox  {}", kit.busybox().display());
        println!("qemu     {} ({origin}) {}", kit.qemu.version, command.join(" "));
    }
    Ok(())
}

/// Everything at once, so that a later command needs no network. A kernel that cannot be had takes nothing from the others.
fn prepare(debug_kernel: bool) -> Result<Kit> {
    let kit = Kit::ensure()?;
    for kernel in Kernel::ALL.into_iter().filter(|kernel| debug_kernel || *kernel != Kernel::Debug) {
        match kit.with_kernel(kernel) {
            Err(error) if error.is::<NotToBeHad>() => eprintln!("kit: SKIP Linux {}: {error}", kernel.name()),
            result => drop(result?),
        }
    }
    Ok(kit)
}
