//! `cargo xtask demo`: the whole of Peergate in one run.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use xtask::demo::bundle::Bundle;
use xtask::demo::{self, Acts, Row, Setting};
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
    /// The daemon's configuration for the first act in place of configs/demo.toml: the tenant "demo" must have a GPU and an
    /// FPGA of 64 MiB or more, between which copies go direct, and a limit of some hundred mappings
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Build nothing: play with what `cargo xtask bundle` has put into this folder; with guests only the first act can be
    #[arg(long, value_name = "DIR", conflicts_with = "kernel")]
    bundle: Option<PathBuf>,
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
    let setting = setting(args.config.as_deref(), args.file)?;
    let bundle = args.bundle.as_deref().map(Bundle::open).transpose()?;
    let rows = match (args.no_vm, bundle) {
        (true, None) => demo::without_vm(acts, &setting, &mut report)?,
        (true, Some(bundle)) => demo::play(&bundle.programs, acts, &setting, &mut report)?,
        (false, None) => {
            let bundle = Bundle::build(&Kit::ensure()?.with_kernel(args.kernel)?)?;
            demo::in_guest(&bundle, acts, &setting, &mut report)?
        }
        (false, Some(bundle)) => {
            ensure!(acts == Acts::First, "The second act's guests need a checkout and the whole kit; add --act 1");
            demo::in_guest(&bundle, acts, &setting, &mut report)?
        }
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

fn setting(config: Option<&Path>, file: Option<PathBuf>) -> Result<Setting> {
    let mut setting = Setting { file, ..Setting::default() };
    if let Some(config) = config {
        setting.config = fs::read_to_string(config).with_context(|| format!("Cannot read {}", config.display()))?;
    }
    Ok(setting)
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
