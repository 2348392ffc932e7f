//! Commands that look: devices, limits, endpoints, rights, events.
//!
//! Not here: anything that moves more than one byte.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use peergate_guest::{
    Access, Driver, EndpointInfo, EndpointKind, EventKind, FaultReason, KernelDriver, Notice, Session,
    uapi::{self, Info},
};
use serde_json::{Value, json};

use crate::args::{EventsArgs, PeerAction, PeerArgs};
use crate::console::{Console, amount, remark, with};

/// How long a wait for events lasts before it is begun anew.
const LOOK: Duration = Duration::from_secs(3600);
/// How long an event that must come may take.
const SOON: Duration = Duration::from_secs(10);

/// Every device of this machine. A device that cannot be opened is listed with the reason.
pub(crate) fn list(console: &mut Console<'_>) -> Result<bool> {
    let devices = KernelDriver::devices().context("Could not look for devices in /dev")?;
    if devices.is_empty() {
        eprintln!(
            "No Peergate device is there; is the driver loaded (modprobe peergate), and has this VM such a device?"
        );
        return Ok(false);
    }
    let mut well = true;
    for path in devices {
        let found = Session::open(&KernelDriver::new(&path)).and_then(|session| session.endpoints());
        match found {
            Ok(endpoints) => say_device(console, &path, &endpoints)?,
            Err(error) => {
                well = false;
                let reason = crate::chain(&error.into());
                let text = format!("{}: {reason}", path.display());
                console.say(&text, &json!({"device": path, "error": reason}))?;
            }
        }
    }
    Ok(well)
}

fn say_device(console: &mut Console<'_>, path: &Path, endpoints: &[EndpointInfo]) -> Result<()> {
    let names: Vec<String> =
        endpoints.iter().map(|endpoint| format!("{} ({})", endpoint.name, kind(endpoint))).collect();
    let text = format!("{}: {}", path.display(), names.join(", "));
    let values: Vec<Value> = endpoints.iter().map(endpoint_json).collect();
    Ok(console.say(&text, &json!({"device": path, "endpoints": values}))?)
}

fn kind(endpoint: &EndpointInfo) -> &'static str {
    endpoint.kind.map_or("unknown kind", EndpointKind::name)
}

fn endpoint_json(endpoint: &EndpointInfo) -> Value {
    json!({
        "endpoint": endpoint.number,
        "name": endpoint.name,
        "kind": endpoint.kind.map(EndpointKind::name),
        "engines": endpoint.engines,
        "memory": endpoint.memory_len,
        "memory_free": endpoint.memory_free,
        "registers": endpoint.registers_len,
        "granularity": endpoint.granularity,
    })
}

/// Limits and endpoints of one device.
pub(crate) fn info(driver: &dyn Driver, device: &Path, console: &mut Console<'_>) -> Result<bool> {
    let session = Session::open(driver)?;
    let (limits, endpoints) = (session.limits(), session.endpoints()?);
    console.say(&info_text(device, limits, &endpoints), &info_json(device, limits, &endpoints))?;
    Ok(true)
}

fn info_text(device: &Path, limits: &Info, endpoints: &[EndpointInfo]) -> String {
    let interrupt = match limits.interrupt {
        uapi::INTERRUPT_INTX => "INTx (one line for all queues)",
        uapi::INTERRUPT_MSIX => "MSI-X",
        _ => "unknown",
    };
    let mut text = format!(
        "{}: wire version {}, session {}, interrupts {interrupt}\n\
         addresses   {:#x} to {:#x}, pages of {} bytes\n\
         streams     {} a process, {} pieces of work each, {} in all, {} a chain, {} submission queues\n\
         deadlines   {} ms unless asked for, {} ms at most\n\
         processes   {} at a time, {} mappings in all\n",
        device.display(),
        limits.version,
        limits.session,
        limits.iova_start,
        limits.iova_last,
        limits.page_size,
        limits.max_streams,
        limits.stream_credits,
        limits.max_in_flight,
        limits.max_batch,
        limits.submit_queues,
        limits.default_timeout_ms,
        limits.max_timeout_ms,
        limits.max_domains,
        limits.max_mappings,
    );
    text += &format!(
        "\n{:>8}  {:<20} {:<7} {:>10} {:>10} {:>9}",
        "ENDPOINT", "NAME", "KIND", "MEMORY", "FREE", "REGISTERS"
    );
    for endpoint in endpoints {
        text += &format!(
            "\n{:>8}  {:<20} {:<7} {:>10} {:>10} {:>9}",
            endpoint.number,
            endpoint.name,
            kind(endpoint),
            amount(endpoint.memory_len),
            amount(endpoint.memory_free),
            amount(endpoint.registers_len),
        );
    }
    text
}

fn info_json(device: &Path, limits: &Info, endpoints: &[EndpointInfo]) -> Value {
    json!({
        "device": device,
        "version": limits.version,
        "session": limits.session,
        "domain": limits.domain,
        "interrupt": match limits.interrupt {
            uapi::INTERRUPT_INTX => Some("intx"),
            uapi::INTERRUPT_MSIX => Some("msix"),
            _ => None,
        },
        "iova_start": limits.iova_start,
        "iova_last": limits.iova_last,
        "page_size": limits.page_size,
        "max_batch": limits.max_batch,
        "stream_credits": limits.stream_credits,
        "max_in_flight": limits.max_in_flight,
        "max_streams": limits.max_streams,
        "default_timeout_ms": limits.default_timeout_ms,
        "max_timeout_ms": limits.max_timeout_ms,
        "submit_queues": limits.submit_queues,
        "max_domains": limits.max_domains,
        "max_mappings": limits.max_mappings,
        "endpoints": endpoints.iter().map(endpoint_json).collect::<Vec<_>>(),
    })
}

/// Rights as a person writes them.
pub(crate) fn access_text(access: Access) -> &'static str {
    match (access.read, access.write) {
        (true, true) => "read and write",
        (true, false) => "read",
        (false, true) => "write",
        (false, false) => "none",
    }
}

/// A peer right, asked for or changed.
pub(crate) fn peer(driver: &dyn Driver, args: &PeerArgs, console: &mut Console<'_>) -> Result<bool> {
    let session = Session::open(driver)?;
    let (from, to) = (session.endpoint(&args.from)?, session.endpoint(&args.to)?);
    let access = args.rights.access();
    let right = match args.action {
        PeerAction::Query => session.peer_query(from.number, to.number),
        PeerAction::Enable => session.peer_enable(from.number, to.number, access),
        PeerAction::Disable => session.peer_disable(from.number, to.number, access),
    }?;
    let text = format!(
        "{} to {}: {}; a copy goes {} ({})",
        from.name,
        to.name,
        access_text(right.access),
        right.path.name(),
        right.reason.name()
    );
    let value = json!({
        "from": from.name,
        "to": to.name,
        "read": right.access.read,
        "write": right.access.write,
        "path": right.path.name(),
        "reason": right.reason.name(),
    });
    console.say(&text, &value)?;
    if args.action != PeerAction::Query {
        remark("Rights belong to the process that asks: this one ends with this command.");
    }
    Ok(true)
}

/// Events of this open of the device.
pub(crate) fn events(driver: &dyn Driver, args: &EventsArgs, console: &mut Console<'_>) -> Result<bool> {
    let session = Session::open(driver)?;
    let mut left = args.count.unwrap_or(u64::MAX);
    let mut patience = Duration::ZERO;
    if args.provoke {
        provoke(&session)?;
        patience = SOON;
    }
    while left > 0 {
        if args.follow {
            patience = LOOK;
        }
        match session.event(Instant::now() + patience)? {
            Some(event) => {
                console.say(&event_text(&event), &event_json(&event))?;
                left -= 1;
                patience = Duration::ZERO;
            }
            None if args.follow => {}
            None => break,
        }
    }
    Ok(true)
}

/// Reads an address that nobody mapped.
fn provoke(session: &Session) -> Result<()> {
    let memory = session.map(1, Access::RW)?;
    let acting = session.endpoints()?.first().map_or(uapi::INITIATOR_ANY, |endpoint| endpoint.number);
    let unmapped = memory.iova().saturating_add(memory.len());
    let ticket = session.stream().by(acting).copy(memory.iova(), unmapped, 8)?;
    ticket.outcome(session.patience())?;
    Ok(())
}

fn kind_name(event: &Notice) -> &'static str {
    match event.kind {
        Some(EventKind::Fault) => "fault",
        Some(EventKind::Overflow) => "overflow",
        Some(EventKind::Interrupt) => "interrupt",
        _ => "unknown",
    }
}

fn event_text(event: &Notice) -> String {
    let endpoint = |number: Option<u32>| number.map_or_else(|| "unknown".to_owned(), |number| number.to_string());
    let head = format!("{:>6}  {}", event.seq, kind_name(event));
    match event.kind {
        Some(EventKind::Fault) => format!(
            "{head}: {} of {:#x} by endpoint {} refused ({}), stream {}, value {:#x}",
            access_text(event.access),
            event.address,
            endpoint(event.accessor),
            event.reason.map_or("unknown", FaultReason::name),
            event.stream,
            event.value
        ),
        Some(EventKind::Interrupt) => {
            format!("{head}: vector {} of endpoint {}", event.value, endpoint(event.accessor))
        }
        _ => format!("{head}: {} events were dropped so far", event.dropped_total),
    }
}

fn event_json(event: &Notice) -> Value {
    let value = json!({
        "seq": event.seq,
        "kind": kind_name(event),
        "session": event.session,
        "dropped_total": event.dropped_total,
        "accessor": event.accessor,
        "owner": event.owner,
        "value": event.value,
    });
    let fault = json!({
        "reason": event.reason.map(FaultReason::name),
        "access": access_text(event.access),
        "address": event.address,
        "stream": event.stream,
        "cookie": event.cookie,
    });
    if event.kind == Some(EventKind::Fault) { with(value, fault) } else { value }
}
