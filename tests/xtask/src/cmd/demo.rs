//! `cargo xtask demo`: the whole of Peergate in one run.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use xtask::demo::{self, Acts, Row};
use xtask::kit::{Kernel, Kit};

/// Boot a Linux guest, move a real file between a GPU and an FPGA, and show every refusal; then have one of two guests attack the other
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Play in processes of this host, without guests; needs no kit
    #[arg(long)]
    no_vm: bool,
    /// Play only this act
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=2))]
    act: Option<u8>,
    /// Print rows as JSON, one a line: name, expected, got, ok; moved bytes also bytes, seconds, `gb_per_s`, path, reason
    #[arg(long)]
    json: bool,
    /// The file to move, of at least 8 MiB; the guest's kernel image by default
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// The guest's kernel: newest, 6.12, 6.1 or debug
    #[arg(long, value_name = "KERNEL", default_value = "newest", conflicts_with = "no_vm")]
    kernel: Kernel,
}

pub(crate) fn run(args: DemoArgs) -> Result<()> {
    let json = args.json;
    let mut report = |row: &Row| {
        if json {
            println!("{}", serde_json::to_string(row).unwrap_or_default());
        }
    };
    let acts = match args.act {
        Some(1) => Acts::First,
        Some(_) => Acts::Second,
        None => Acts::Both,
    };
    let rows = if args.no_vm {
        demo::without_vm(acts, args.file.as_deref(), &mut report)?
    } else {
        demo::in_guest(&Kit::ensure()?.with_kernel(args.kernel)?, acts, args.file, &mut report)?
    };
    if !json {
        let is_operator = |row: &Row| row.name.starts_with("operator/");
        let all = || rows.all().iter();
        table("What moved", all().filter(|row| row.bytes.is_some()));
        table("What was refused", all().filter(|row| row.fault.is_some()));
        table("What the operator's log says of it", all().filter(|row| is_operator(row)));
        let is_tenants = |row: &Row| row.name.starts_with("tenants/");
        let is_other = |row: &&Row| row.bytes.is_none() && row.fault.is_none() && !is_operator(row) && !is_tenants(row);
        table("What else was tried", all().filter(is_other));
        table("What one tenant could do to another, and what losing a worker did", all().filter(|row| is_tenants(row)));
    }
    let (all, failed) = (rows.all().len(), rows.failed());
    if failed > 0 {
        bail!("{failed} of {all} rows are not as expected");
    }
    if !json {
        println!("\nAll {all} rows are as expected.");
    }
    Ok(())
}

fn table<'a>(title: &str, rows: impl Iterator<Item = &'a Row>) {
    let mut rows = rows.peekable();
    if rows.peek().is_none() {
        return;
    }
    println!("\n{title}");
    for row in rows {
        println!("  {}", row.text().replace('\n', "\n  "));
    }
}
