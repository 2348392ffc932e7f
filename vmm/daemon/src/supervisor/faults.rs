//! What the operator is told of refused accesses, read from tenants' pages.
//!
//! Pages are written by workers: whatever number stands there becomes a name or is shown as it is, a time that is yet to come is taken for now,
//! and however many records a tenant has, the others keep their share of an answer. Not here: which tenants there are, text.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use iommu_addr::EndpointId;
use vdev_device::{MappingKind, Relation};
use vdev_wire::{ACCESS_READ, ACCESS_WRITE, FaultReason, OWNER_HIDDEN, Status};
use vmm_broker::{FAULT_SLOTS, FaultEntry, FaultLog, FaultMapping, TenantPage};
use vmm_control::{FaultInfo, FaultTotals, FaultsReply, MappingInfo, Party};

use crate::config::TenantConfig;

/// Records in one answer.
const MOST: usize = FAULT_SLOTS;

/// One tenant, as far as its faults are concerned.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) config: &'a TenantConfig,
    pub(super) session: u32,
    pub(super) page: &'a TenantPage,
}

/// The newest records of these tenants or, with `since`, the oldest after those numbers; `most` at most.
pub(super) fn faults(sources: &[Source<'_>], most: Option<u32>, since: Option<&BTreeMap<String, u64>>) -> FaultsReply {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
    let most = most.map_or(MOST, |most| usize::try_from(most).unwrap_or(MOST)).min(MOST);
    let after = |source: &Source<'_>| since.map(|since| since.get(&source.config.name).copied().unwrap_or(0));
    let there_are = |source: &Source<'_>| {
        let total = source.page.faults(0).total;
        let wanted = total.saturating_sub(after(source).unwrap_or(0));
        usize::try_from(wanted).map_or(FAULT_SLOTS, |wanted| wanted.min(FAULT_SLOTS))
    };
    let available: Vec<_> = sources.iter().map(there_are).collect();
    let (mut tenants, mut faults) = (Vec::new(), Vec::new());
    for (source, share) in sources.iter().zip(shares(&available, most)) {
        let log = match after(source) {
            Some(number) => source.page.faults_after(number, share),
            None => source.page.faults(share),
        };
        tenants.push(totals(source, &log));
        // A tenant's own records stay in the order of their numbers, whatever times they claim.
        let mut latest = 0;
        faults.extend(log.records.iter().map(|entry| {
            let fault = fault(source.config, entry, now);
            latest = fault.time_ns.max(latest);
            (latest, fault)
        }));
    }
    faults.sort_by_key(|(time, _)| *time);
    FaultsReply { tenants, faults: faults.into_iter().map(|(_, fault)| fault).collect() }
}

/// How many of `most` each gets: as many as it has, or as many as everybody else who does not get all.
fn shares(available: &[usize], most: usize) -> Vec<usize> {
    let mut order: Vec<_> = (0..available.len()).collect();
    order.sort_by_key(|place| available[*place]);
    let mut shares = vec![0; available.len()];
    let (mut left, mut waiting) = (most, available.len());
    for place in order {
        // What cannot be divided goes to whoever has the most.
        shares[place] = available[place].min(left / waiting);
        left -= shares[place];
        waiting -= 1;
    }
    shares
}

fn totals(source: &Source<'_>, log: &FaultLog) -> FaultTotals {
    let by_reason = source.page.suppressed();
    let suppressed = by_reason.iter().fold(0, |sum: u64, count| sum.saturating_add(*count));
    let counted = (0..).zip(by_reason).filter(|(_, count)| *count > 0);
    FaultTotals {
        tenant: source.config.name.clone(),
        session: source.session,
        total: log.total.saturating_add(suppressed),
        recorded: log.total,
        overwritten: log.overwritten,
        suppressed,
        suppressed_by_reason: counted.map(|(reason, count)| (reason_name(reason), count)).collect(),
        missed: log.missed,
        torn: log.torn,
        next: log.next,
    }
}

fn fault(tenant: &TenantConfig, entry: &FaultEntry, now: u64) -> FaultInfo {
    let status = Status::from_raw(entry.status).map(Status::name);
    FaultInfo {
        tenant: tenant.name.clone(),
        number: entry.number,
        time_ns: entry.time_ns.min(now),
        session: entry.session,
        domain: entry.domain,
        accessor: party(tenant, entry.accessor),
        owner: party(tenant, entry.owner),
        address: entry.address,
        access: access(entry.access),
        reason: reason_name(entry.reason),
        status: status.map_or_else(|| format!("status {}", entry.status), str::to_owned),
        stream: entry.stream,
        cookie: entry.cookie,
        value: entry.value,
        mapping: mapping(&entry.mapping),
    }
}

fn access(bits: u8) -> String {
    match (bits & ACCESS_READ != 0, bits & ACCESS_WRITE != 0) {
        (true, true) => "read-write",
        (true, false) => "read",
        (false, true) => "write",
        (false, false) => "none",
    }
    .to_owned()
}

fn reason_name(raw: u8) -> String {
    FaultReason::from_raw(raw).map_or_else(|| format!("reason {raw}"), |reason| reason.name().to_owned())
}

fn mapping(of: &FaultMapping) -> Option<MappingInfo> {
    let relation = match Relation::from_raw(of.relation) {
        None if of.relation == 0 => return None,
        None => format!("relation {}", of.relation),
        Some(Relation::Holds) => "holds".to_owned(),
        Some(Relation::Held) => "held".to_owned(),
        Some(Relation::Nearest) => "nearest".to_owned(),
    };
    let kind = match MappingKind::from_raw(of.kind) {
        None => format!("kind {}", of.kind),
        Some(MappingKind::Guest) => "map".to_owned(),
        Some(MappingKind::Buffer) => "buffer".to_owned(),
        Some(MappingKind::Registers) => "registers".to_owned(),
    };
    let FaultMapping { first, last, request, is_draining: draining, .. } = *of;
    Some(MappingInfo { relation, kind, first, last, access: access(of.access), request, draining })
}

fn party(tenant: &TenantConfig, raw: u32) -> Option<Party> {
    if raw == OWNER_HIDDEN {
        return None;
    }
    let EndpointId { host, id } = EndpointId::from_raw(raw);
    let slice = tenant.slices.get(usize::from(id)).filter(|_| host == 0);
    Some(Party { endpoint: raw, name: slice.map(|slice| slice.name.clone()) })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::Config;

    fn tenant() -> TenantConfig {
        let config = Config::parse(Path::new("demo.toml"), include_str!("../../../../configs/demo.toml")).unwrap();
        config.tenants.into_iter().next().unwrap()
    }

    /// Tenants of these names, and their pages.
    fn tenants(names: &[&str]) -> Vec<(TenantConfig, TenantPage)> {
        let named = |name: &&str| TenantConfig { name: (*name).to_owned(), ..tenant() };
        names.iter().map(|name| (named(name), TenantPage::create(name).unwrap())).collect()
    }

    fn sources(tenants: &[(TenantConfig, TenantPage)]) -> Vec<Source<'_>> {
        tenants.iter().map(|(config, page)| Source { config, session: 1, page }).collect()
    }

    fn at(time_ns: u64) -> FaultEntry {
        FaultEntry { time_ns, reason: FaultReason::Mapping as u8, ..FaultEntry::default() }
    }

    /// Tenant and number of every record.
    fn seen(reply: &FaultsReply) -> Vec<(&str, u64)> {
        reply.faults.iter().map(|fault| (fault.tenant.as_str(), fault.number)).collect()
    }

    #[test]
    fn a_fault_is_told_in_names() {
        let entry = FaultEntry {
            accessor: 0,
            owner: 1,
            access: ACCESS_WRITE,
            reason: FaultReason::Peer as u8,
            status: Status::Denied.to_raw(),
            mapping: FaultMapping {
                relation: Relation::Holds as u8,
                kind: MappingKind::Buffer as u8,
                access: ACCESS_READ | ACCESS_WRITE,
                is_draining: true,
                first: 0x1000,
                last: 0x1fff,
                request: 3,
            },
            ..FaultEntry::default()
        };
        let told = fault(&tenant(), &entry, 0);
        assert_eq!(told.accessor, Some(Party { endpoint: 0, name: Some("gpu0".into()) }));
        assert_eq!(told.owner, Some(Party { endpoint: 1, name: Some("fpga0".into()) }));
        assert_eq!((told.access.as_str(), told.reason.as_str(), told.status.as_str()), ("write", "PEER", "DENIED"));
        let mapping = MappingInfo {
            relation: "holds".into(),
            kind: "buffer".into(),
            first: 0x1000,
            last: 0x1fff,
            access: "read-write".into(),
            request: 3,
            draining: true,
        };
        assert_eq!(told.mapping, Some(mapping));
    }

    #[test]
    fn numbers_that_mean_nothing_are_shown_as_they_are() {
        let entry = FaultEntry {
            time_ns: u64::MAX,
            accessor: OWNER_HIDDEN,
            owner: 0x0001_0000,
            access: 0xfc,
            reason: 0xee,
            status: 0xdead_beef,
            mapping: FaultMapping { relation: 9, kind: 0, first: 7, last: 3, ..FaultMapping::default() },
            ..FaultEntry::default()
        };
        let told = fault(&tenant(), &entry, 1000);
        assert_eq!(told.time_ns, 1000, "no time is yet to come");
        assert_eq!(told.accessor, None);
        assert_eq!(
            told.owner,
            Some(Party { endpoint: 0x0001_0000, name: None }),
            "another host's endpoint 0 is not ours"
        );
        assert_eq!((told.access.as_str(), told.reason.as_str()), ("none", "reason 238"));
        assert_eq!(told.status, "status 3735928559");
        let mapping = told.mapping.unwrap();
        assert_eq!((mapping.relation.as_str(), mapping.kind.as_str()), ("relation 9", "kind 0"));
        assert_eq!((mapping.first, mapping.last), (7, 3));
    }

    #[test]
    fn shares_are_even_and_what_one_does_not_need_goes_to_the_others() {
        for (available, most, expected) in [
            (&[10, 1000, 3][..], 30, &[10, 17, 3][..]),
            (&[5, 5], 20, &[5, 5]),
            (&[9, 9], 9, &[4, 5]),
            (&[9, 0, 9, 9], 3, &[1, 0, 1, 1]),
            (&[1000, 1000], 1, &[0, 1]),
            (&[7], 0, &[0]),
            (&[], 5, &[]),
        ] {
            assert_eq!(shares(available, most), expected, "{available:?}");
        }
    }

    #[test]
    fn no_tenant_pushes_anothers_records_out_of_an_answer_whatever_times_it_writes() {
        let tenants = tenants(&["liar", "meek"]);
        (0..200).for_each(|_| tenants[0].1.record(at(u64::MAX)));
        (1..=5).for_each(|time| tenants[1].1.record(at(time)));
        let reply = faults(&sources(&tenants), Some(10), None);
        let of =
            |name| seen(&reply).into_iter().filter(|(tenant, _)| *tenant == name).map(|(_, n)| n).collect::<Vec<_>>();
        assert_eq!(of("meek"), [1, 2, 3, 4, 5]);
        assert_eq!(of("liar"), [196, 197, 198, 199, 200]);
        assert_eq!(seen(&reply)[0], ("meek", 1), "a false time does not come first either");
        let since = BTreeMap::new();
        let reply = faults(&sources(&tenants), Some(10), Some(&since));
        assert_eq!(reply.tenants.iter().map(|totals| totals.next).collect::<Vec<_>>(), [5, 5]);
    }

    #[test]
    fn records_are_merged_by_time_and_a_tenants_own_stay_in_order() {
        let tenants = tenants(&["a", "b"]);
        [10, 5, 30].into_iter().for_each(|time| tenants[0].1.record(at(time)));
        [7, 20].into_iter().for_each(|time| tenants[1].1.record(at(time)));
        let reply = faults(&sources(&tenants), None, None);
        assert_eq!(seen(&reply), [("b", 1), ("a", 1), ("a", 2), ("b", 2), ("a", 3)]);
    }

    #[test]
    fn a_reader_that_comes_back_sees_each_record_once() {
        let tenants = tenants(&["a", "b"]);
        (1..=9).for_each(|time| tenants[0].1.record(at(time)));
        let reply = faults(&sources(&tenants), Some(0), None);
        assert!(reply.faults.is_empty());
        let mut since: BTreeMap<_, _> = reply.tenants.into_iter().map(|totals| (totals.tenant, totals.next)).collect();
        assert_eq!(since["a"], 9);
        (10..=14).for_each(|time| tenants[0].1.record(at(time)));
        tenants[1].1.record(at(12));
        let mut all = Vec::new();
        for _ in 0..4 {
            let reply = faults(&sources(&tenants), Some(4), Some(&since));
            all.extend(reply.faults.iter().map(|fault| (fault.tenant.clone(), fault.number)));
            since = reply.tenants.into_iter().map(|totals| (totals.tenant, totals.next)).collect();
        }
        let told: Vec<_> = all.iter().map(|(tenant, number)| (tenant.as_str(), *number)).collect();
        assert_eq!(told, [("a", 10), ("a", 11), ("a", 12), ("b", 1), ("a", 13), ("a", 14)]);
        since.insert("a".into(), 5000);
        assert_eq!(faults(&sources(&tenants), None, Some(&since)).tenants[0].next, 14, "it began anew");
    }

    #[test]
    fn suppressed_faults_are_in_the_total_and_told_by_reason() {
        let tenants = tenants(&["a"]);
        // More than a burst and what comes back while this loop runs, however slow it is.
        (0..100_000).for_each(|_| tenants[0].1.record(at(1)));
        let totals = faults(&sources(&tenants), None, None).tenants.swap_remove(0);
        assert!(totals.suppressed > 0 && totals.recorded >= vmm_broker::FAULT_BURST);
        assert_eq!(totals.total, 100_000);
        assert_eq!(totals.total, totals.recorded + totals.suppressed);
        assert_eq!(totals.suppressed_by_reason, [("MAPPING".to_owned(), totals.suppressed)].into());
    }
}
