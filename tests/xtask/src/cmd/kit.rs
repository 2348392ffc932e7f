//! `cargo xtask kit`: prepare the machine, or show what is prepared.

use anyhow::{Result, bail};
use clap::Args;
use xtask::kit::Kit;

/// Prepare what guests need: host packages, QEMU, a guest kernel and its compiler, in the user's cache.
#[derive(Debug, Args)]
pub(crate) struct KitArgs {
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
        Kit::ensure()?
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
