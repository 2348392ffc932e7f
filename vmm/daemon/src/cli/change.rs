//! Commands that change what runs: what they ask the daemon for, and how its answer is told.
//!
//! Not here: what a change does, the configuration file (the daemon alone touches it).

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::{Duration, Instant};

use anyhow::bail;
use clap::{Args, Subcommand};
use vmm_control::{
    ChangeInfo, ChangesReply, Client, Consent, DrainReply, DrainState, Edit, Effect, NewSlice, Reply, Request, Scalar,
};

use super::render;
use crate::config::quantity::TIME;

/// How often a drain is asked how far it has come.
const GLANCE: Duration = Duration::from_millis(50);

const LIMITS: &str = "\
Limits are those of [tenant.limits] in the configuration; `peergated --print-default-config` has each with its meaning and default:
  max_domains max_mappings max_segments max_total_segments max_pinned_pages max_buffers stream_credits max_in_flight
  max_streams max_batch max_events control_rate default_timeout max_timeout weight
Counts are numbers, times are written 500ms or 10s. `default` takes a limit out of the file.";

const SLICES: &str = "\
A change of a tenant's slices begins a new session for it: its guest keeps the device, but mappings, buffers and work are lost and its
driver is told so. While a VMM is connected this needs --force, unless the tenant is drained (peergate drain).";

#[derive(Debug, Subcommand)]
pub(super) enum TenantCommand {
    /// Add a tenant; its VMM can connect as soon as this returns
    #[command(
        after_help = "Example: peergate tenant add db --slice gpu0=64MiB --slice fpga0=16MiB,name=filter --limit max_mappings=512"
    )]
    Add {
        /// Its name: 1 to 31 of a-z, A-Z, 0-9, '-', '_' and '.'
        tenant: String,
        /// A slice of a device, such as gpu0=64MiB, or gpu0=64MiB,name=big for another name than the device's; 0 of a device without memory; repeat it for more
        #[arg(long = "slice", value_name = "DEVICE=SIZE[,name=NAME]", required = true, value_parser = parse_slice)]
        slices: Vec<NewSlice>,
        /// A limit that is not to have its default, such as max_mappings=512; repeat it for more
        #[arg(long = "limit", value_name = "KEY=VALUE", value_parser = parse_pair)]
        limits: Vec<(String, String)>,
        /// Where its VMM connects [default: the tenant's name with .sock, in the runtime directory]
        #[arg(long = "vmm-socket", value_name = "PATH")]
        vmm_socket: Option<String>,
        /// Permissions of that socket, such as 660 [default: the daemon's socket_mode]
        #[arg(long, value_name = "OCTAL", value_parser = parse_octal)]
        socket_mode: Option<u32>,
        /// Submission queues [default: 2]
        #[arg(long, value_name = "N")]
        submit_queues: Option<u32>,
        /// Virtio id that its VMM gives the device [default: 37]
        #[arg(long, value_name = "ID")]
        device_id: Option<u32>,
        /// What to do about guest memory that the VMM could truncate: warn or refuse [default: warn]
        #[arg(long, value_name = "WHAT")]
        unsealed_memory: Option<String>,
        /// How long its PCI functions reach what their commands needed: strict or lazy [default: strict]
        #[arg(long, value_name = "MODE")]
        iommu: Option<String>,
        #[command(flatten)]
        consent: DryRun,
    },
    /// Remove a tenant: its socket goes, its memory is scrubbed and its slices are free for others
    ///
    /// With a VMM connected, which then loses its device, this needs --force, unless the tenant is drained (peergate drain).
    Remove {
        /// Its name
        tenant: String,
        #[command(flatten)]
        consent: Force,
    },
    /// Set limits of a tenant, at once; its guest goes on
    #[command(after_help = LIMITS)]
    Limits {
        /// Its name
        tenant: String,
        /// Limits, such as max_mappings=512, or max_mappings=default
        #[arg(value_name = "KEY=VALUE", required = true, value_parser = parse_pair)]
        limits: Vec<(String, String)>,
        #[command(flatten)]
        consent: DryRun,
    },
}

#[derive(Debug, Subcommand)]
pub(super) enum SliceCommand {
    /// Give a tenant a slice of a device, as its last endpoint
    #[command(after_help = SLICES)]
    Add {
        /// Whose
        tenant: String,
        /// The device's name, see `peergate endpoints`
        #[arg(long, value_name = "NAME")]
        device: String,
        /// How much, such as 64MiB
        #[arg(long, value_name = "SIZE")]
        memory: String,
        /// The slice's name, as the guest sees it [default: the device's]
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
        #[command(flatten)]
        consent: Force,
    },
    /// Take a slice from a tenant; its later endpoints move up
    #[command(after_help = SLICES)]
    Remove {
        /// Whose
        tenant: String,
        /// The slice's name, see `peergate endpoints`
        slice: String,
        #[command(flatten)]
        consent: Force,
    },
    /// Put a slice on another device, with the same name and size and without its contents
    #[command(after_help = SLICES)]
    Move {
        /// Whose
        tenant: String,
        /// The slice's name, see `peergate endpoints`
        slice: String,
        /// The device it is to be on
        #[arg(long, value_name = "DEVICE")]
        to: String,
        #[command(flatten)]
        consent: Force,
    },
}

#[derive(Clone, Copy, Debug, Args)]
pub(super) struct DryRun {
    /// Only check it and say what would change
    #[arg(long)]
    dry_run: bool,
}

#[derive(Clone, Copy, Debug, Args)]
pub(super) struct Force {
    #[command(flatten)]
    dry_run: DryRun,
    /// Also if a connected guest loses something by it
    #[arg(long)]
    force: bool,
}

#[derive(Clone, Copy, Debug, Args)]
pub(super) struct ReloadArgs {
    #[command(flatten)]
    force: Force,
    /// Apply what can be applied, also if other parts wait for a restart of peergated
    #[arg(long)]
    partial: bool,
}

#[derive(Clone, Debug, Args)]
pub(super) struct DrainArgs {
    /// Whose
    tenant: String,
    /// How long to wait until nothing runs any more; 0 does not wait
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_time)]
    timeout: Duration,
}

#[derive(Clone, Debug, Args)]
pub(super) struct ResumeArgs {
    /// Whose
    tenant: String,
}

/// What a command has to say, and whether it has done what it was to do.
#[derive(Debug, Default)]
pub(super) struct Told {
    pub(super) text: String,
    /// Why not, if it has not.
    pub(super) undone: Option<String>,
}

fn parse_pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("write KEY=VALUE, for example max_mappings=512")?;
    Ok((key.trim().to_owned(), value.trim().to_owned()))
}

fn parse_slice(text: &str) -> Result<NewSlice, String> {
    let usage = || "write DEVICE=SIZE or DEVICE=SIZE,name=NAME, for example gpu0=64MiB".to_owned();
    let (device, rest) = text.split_once('=').ok_or_else(usage)?;
    let (memory, name) = match rest.split_once(',') {
        None => (rest, None),
        Some((memory, name)) => (memory, Some(name.strip_prefix("name=").ok_or_else(usage)?.to_owned())),
    };
    Ok(NewSlice { device: device.to_owned(), memory: memory.to_owned(), name })
}

fn parse_octal(text: &str) -> Result<u32, String> {
    let digits = text.strip_prefix("0o").unwrap_or(text);
    u32::from_str_radix(digits, 8).ok().filter(|mode| *mode <= 0o777).ok_or_else(|| "write a number such as 660".into())
}

fn parse_time(text: &str) -> Result<Duration, String> {
    let nanos = TIME.parse(text);
    nanos.map(Duration::from_nanos).ok_or_else(|| format!("write a time, for example 30s (units: {})", TIME.units()))
}

impl From<DryRun> for Consent {
    fn from(DryRun { dry_run }: DryRun) -> Self {
        Self { dry_run, ..Self::default() }
    }
}

impl From<Force> for Consent {
    fn from(Force { dry_run, force }: Force) -> Self {
        Self { force, ..dry_run.into() }
    }
}

impl TenantCommand {
    pub(super) fn request(&self) -> Request {
        let scalars = |pairs: &[(String, String)]| {
            pairs.iter().map(|(key, value)| (key.clone(), Scalar::typed(value))).collect::<BTreeMap<_, _>>()
        };
        let (edit, consent) = match self {
            Self::Add {
                tenant,
                slices,
                limits,
                vmm_socket,
                socket_mode,
                submit_queues,
                device_id,
                unsealed_memory,
                iommu,
                consent,
            } => {
                let text = |text: &Option<String>| text.clone().map(Scalar::Text);
                let keys = [
                    ("socket", text(vmm_socket)),
                    ("socket_mode", socket_mode.map(Scalar::Number)),
                    ("submit_queues", submit_queues.map(Scalar::Number)),
                    ("device_id", device_id.map(Scalar::Number)),
                    ("unsealed_memory", text(unsealed_memory)),
                    ("iommu", text(iommu)),
                ];
                let keys = keys.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect();
                let (tenant, slices) = (tenant.clone(), slices.clone());
                (Edit::TenantAdd { tenant, keys, limits: scalars(limits), slices }, (*consent).into())
            }
            Self::Remove { tenant, consent } => (Edit::TenantRemove { tenant: tenant.clone() }, (*consent).into()),
            Self::Limits { tenant, limits, consent } => {
                let (unset, set): (Vec<_>, Vec<_>) = limits.iter().cloned().partition(|(_, value)| value == "default");
                let unset = unset.into_iter().map(|(key, _)| key).collect();
                (Edit::TenantLimits { tenant: tenant.clone(), set: scalars(&set), unset }, (*consent).into())
            }
        };
        Request::Change { edit, consent }
    }
}

impl SliceCommand {
    pub(super) fn request(&self) -> Request {
        let (edit, consent) = match self {
            Self::Add { tenant, device, memory, name, consent } => {
                let slice = NewSlice { device: device.clone(), memory: memory.clone(), name: name.clone() };
                (Edit::SliceAdd { tenant: tenant.clone(), slice }, consent)
            }
            Self::Remove { tenant, slice, consent } => {
                (Edit::SliceRemove { tenant: tenant.clone(), slice: slice.clone() }, consent)
            }
            Self::Move { tenant, slice, to, consent } => {
                (Edit::SliceMove { tenant: tenant.clone(), slice: slice.clone(), device: to.clone() }, consent)
            }
        };
        Request::Change { edit, consent: (*consent).into() }
    }
}

/// Makes a change and tells of it.
pub(super) fn change(client: &mut Client, request: &Request, json: bool) -> anyhow::Result<Told> {
    let Request::Change { consent, .. } = request else { bail!("That is no change") };
    let reply = changes(client.ask(request)?)?;
    let text = render(json, &reply, |reply| differences(reply) + outcome(reply))?;
    Ok(Told { text, undone: undone(&reply, consent) })
}

/// Prints what a reload would change by `print`, then makes the change.
pub(super) fn reload(
    client: &mut Client,
    args: ReloadArgs,
    json: bool,
    print: impl FnOnce(&str) -> anyhow::Result<()>,
) -> anyhow::Result<Told> {
    let consent = Consent { partial: args.partial, ..args.force.into() };
    let first = Consent { dry_run: true, ..consent.clone() };
    let mut reply = changes(client.ask(&Request::Reload { consent: first })?)?;
    let undone = undone(&reply, &consent);
    if !json {
        print(&differences(&reply))?;
    }
    if undone.is_none() && !consent.dry_run {
        // What has been shown, and nothing else.
        let consent = Consent { file: Some(reply.file.clone()), ..consent };
        reply = changes(client.ask(&Request::Reload { consent })?)?;
    }
    Ok(Told { text: render(json, &reply, |reply| outcome(reply).to_owned())?, undone })
}

/// Has a tenant's work end, and waits for it.
pub(super) fn drain(client: &mut Client, args: &DrainArgs, json: bool) -> anyhow::Result<Told> {
    let began = Instant::now();
    let reply = loop {
        let reply = drained(client.ask(&Request::Drain { tenant: args.tenant.clone() })?)?;
        let waited = began.elapsed();
        if reply.drain == DrainState::Drained || waited >= args.timeout {
            break reply;
        }
        std::thread::sleep(GLANCE.min(args.timeout - waited));
    };
    let undone = (reply.drain != DrainState::Drained && !args.timeout.is_zero()).then(|| {
        format!(
            "Work of tenant {:?} still runs ({} descriptors, see peergate status); it goes on draining. Its deadlines end it; run the \
             command again to wait, or peergate resume to take work again",
            reply.tenant, reply.in_flight
        )
    });
    let text = render(json, &reply, |reply| match reply.drain {
        DrainState::Drained => {
            format!(
                "Tenant {} is drained; its guest's work waits until peergate resume {}\n",
                reply.tenant, reply.tenant
            )
        }
        _ => format!("Tenant {} takes no more work; {} descriptors still run\n", reply.tenant, reply.in_flight),
    })?;
    Ok(Told { text, undone })
}

pub(super) fn resume(client: &mut Client, args: &ResumeArgs, json: bool) -> anyhow::Result<Told> {
    let reply = drained(client.ask(&Request::Resume { tenant: args.tenant.clone() })?)?;
    let text = render(json, &reply, |reply| format!("Tenant {} takes work\n", reply.tenant))?;
    Ok(Told { text, undone: None })
}

fn changes(reply: Reply) -> anyhow::Result<ChangesReply> {
    match reply {
        Reply::Changes(reply) => Ok(reply),
        _ => bail!("peergated answers something else than was asked"),
    }
}

fn drained(reply: Reply) -> anyhow::Result<DrainReply> {
    match reply {
        Reply::Drain(reply) => Ok(reply),
        _ => bail!("peergated answers something else than was asked"),
    }
}

/// Why a change is not made; `None` if it is.
fn undone(reply: &ChangesReply, consent: &Consent) -> Option<String> {
    let mut reasons = Vec::new();
    if !consent.force && !reply.losses.is_empty() {
        reasons.push(format!("{}. Drain it first, or pass --force", reply.losses.join(". ")));
    }
    if !consent.partial && !reply.refused.is_empty() {
        reasons.push("Parts of it wait for a restart of peergated; pass --partial to apply the rest".to_owned());
    }
    (!reasons.is_empty()).then(|| format!("Nothing was changed. {}", reasons.join(". ")))
}

fn outcome(reply: &ChangesReply) -> &'static str {
    match (reply.applied, reply.changes.is_empty() && reply.refused.is_empty()) {
        (true, true) => "Nothing to change.\n",
        (true, false) => "Done.\n",
        (false, _) => "",
    }
}

/// A line a change, marked as by diff: `+` is new, `-` goes, `~` changes, `!` is refused.
fn differences(reply: &ChangesReply) -> String {
    let mut text = String::new();
    for change in &reply.changes {
        let mark = match change.what.as_str() {
            "added" => '+',
            "removed" => '-',
            _ => '~',
        };
        line(&mut text, mark, change);
    }
    for change in &reply.refused {
        line(&mut text, '!', change);
    }
    text
}

fn line(text: &mut String, mark: char, change: &ChangeInfo) {
    let effect = match change.effect {
        Effect::Now => "at once",
        Effect::NextSession => "from the next session on",
        Effect::NewSession if change.subject == "device" => "with a new session of each tenant that has a slice of it",
        Effect::NewSession => "with a new session",
        Effect::Disconnect => "the VMM is disconnected",
        Effect::Restart => "refused: restart peergated for this",
    };
    let name = if change.name.is_empty() { String::new() } else { format!(" {}", change.name) };
    let _ = writeln!(text, "{mark} {}{name} {} ({effect})", change.subject, change.what);
    for key in &change.keys {
        let side = |side: &Option<String>| side.clone().unwrap_or_else(|| "-".to_owned());
        let _ = match (&key.from, &key.to) {
            (None, Some(to)) if change.what == "added" => writeln!(text, "    {}: {to}", key.key),
            (Some(from), None) if change.what == "removed" => writeln!(text, "    {}: {from}", key.key),
            (from, to) => writeln!(text, "    {}: {} -> {}", key.key, side(from), side(to)),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_names_every_limit() {
        let named: Vec<_> = LIMITS.split_whitespace().collect();
        for key in crate::config::typed::LIMITS {
            assert!(named.contains(key), "{key}");
        }
    }

    #[test]
    fn slices_and_permissions_are_understood_as_typed() {
        let slice = |text| parse_slice(text).map(|slice| (slice.device, slice.memory, slice.name));
        assert_eq!(slice("g=1MiB"), Ok(("g".into(), "1MiB".into(), None)));
        assert_eq!(slice("g=1MiB,name=x"), Ok(("g".into(), "1MiB".into(), Some("x".into()))));
        for wrong in ["g", "g=1MiB,x", "g=1MiB,nam=x"] {
            assert!(slice(wrong).is_err(), "{wrong}");
        }
        assert_eq!((parse_octal("660"), parse_octal("0o600")), (Ok(0o660), Ok(0o600)));
        assert!(parse_octal("888").is_err() && parse_octal("1777").is_err());
    }

    #[test]
    fn a_change_that_is_not_made_says_all_that_it_takes() {
        let reply = ChangesReply {
            applied: false,
            file: String::new(),
            changes: Vec::new(),
            refused: vec![ChangeInfo {
                subject: "daemon".into(),
                name: String::new(),
                what: "settings".into(),
                keys: Vec::new(),
                effect: Effect::Restart,
            }],
            losses: vec!["A loses".into(), "B loses".into()],
        };
        let undone = |force, partial| undone(&reply, &Consent { force, partial, ..Consent::default() });
        let losses = "Nothing was changed. A loses. B loses. Drain it first, or pass --force";
        let parts = "Parts of it wait for a restart of peergated; pass --partial to apply the rest";
        assert_eq!(undone(false, false), Some(format!("{losses}. {parts}")));
        assert_eq!(undone(true, false), Some(format!("Nothing was changed. {parts}")));
        assert_eq!(undone(false, true).as_deref(), Some(losses));
        assert_eq!(undone(true, true), None);
    }
}
