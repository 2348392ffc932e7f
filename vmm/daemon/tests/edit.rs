//! Edits of the configuration file: what they mean, and what they leave alone.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;

use proptest::prelude::*;
use vmm_control::{Edit, NewSlice, Scalar};
use vmm_daemon::config::Config;
use vmm_daemon::config::edit::{EditError, edit};

const FILE: &str = r#"# Our host.
[daemon]
log = "warn"   # quiet

[[device]]
name = "gpu0"
kind = "gpu"
memory = "64MiB"
[[device]]
name = "gpu1"
kind = "gpu"
memory = "64MiB"

# ---- tenants of team A ----

# The database.
[[tenant]]
name = "db"    # not the cache
reach = [{ from = "gpu0", to = "big", path = "staged" }, { from = "big", to = "gpu0", path = "staged" }]
# what it computes with
[[tenant.slice]]
device = "gpu0"
memory = "8MiB"

[[tenant.slice]]
device = "gpu1" # the quiet one
memory = "16MiB"
name = "big"

[tenant.limits]
# since last spring
max_domains = 2

# measured
max_buffers = 10 # enough

# ---- tenants of team B ----

[[tenant]]
name = "web"
slice = [
    { device = "gpu0", memory = "4MiB" }, # first
    # for pictures
    { device = "gpu1", memory = "4MiB", name = "b" }, # second
]
# The end.
"#;

fn edited(text: &str, what: &Edit) -> String {
    edit(text, what).unwrap()
}

fn slice(device: &str, memory: &str, name: Option<&str>) -> NewSlice {
    NewSlice { device: device.into(), memory: memory.into(), name: name.map(str::to_owned) }
}

/// `FILE` after the edit is `FILE` with one text replaced.
fn replaces(what: &Edit, old: &str, new: &str) {
    assert_eq!(FILE.matches(old).count(), 1, "{old:?}");
    let (actual, expected) = (edited(FILE, what), FILE.replacen(old, new, 1));
    assert!(actual == expected, "{what:?}:\n{actual}");
    Config::parse(Path::new("t.toml"), &actual).unwrap();
}

#[test]
fn a_tenant_comes_after_everything_that_is_there() {
    let add = Edit::TenantAdd {
        tenant: "new".into(),
        keys: [("socket_mode".into(), Scalar::Number(0o600)), ("unsealed_memory".into(), Scalar::typed("refuse"))]
            .into(),
        limits: [("max_domains".into(), Scalar::typed("4")), ("max_timeout".into(), Scalar::typed("20s"))].into(),
        slices: vec![slice("gpu0", "4MiB", None), slice("gpu1", "4096", Some("own"))],
    };
    let more = r#"# The end.

[[tenant]]
name = "new"
socket_mode = 0o600
unsealed_memory = "refuse"

[[tenant.slice]]
device = "gpu0"
memory = "4MiB"

[[tenant.slice]]
device = "gpu1"
memory = 4096
name = "own"

[tenant.limits]
max_domains = 4
max_timeout = "20s"
"#;
    assert_eq!(edited(FILE, &add), FILE.replace("# The end.\n", more));
}

#[test]
fn a_tenant_that_goes_takes_its_own_comments_along_and_no_others() {
    let from = FILE.find("# The database.").unwrap();
    let to = FILE.find("\n# ---- tenants of team B").unwrap();
    replaces(&Edit::TenantRemove { tenant: "db".into() }, &FILE[from..to], "");
    let from = FILE.find("[[tenant]]\nname = \"web\"").unwrap();
    let to = FILE.find("# The end.").unwrap();
    replaces(&Edit::TenantRemove { tenant: "web".into() }, &FILE[from..to], "");
}

#[test]
fn limits_are_set_and_unset_in_place() {
    let limits = |set: &[(&str, &str)], unset: &[&str]| Edit::TenantLimits {
        tenant: "db".into(),
        set: set.iter().map(|(key, text)| ((*key).to_owned(), Scalar::typed(text))).collect(),
        unset: unset.iter().map(|key| (*key).to_owned()).collect(),
    };
    replaces(&limits(&[("max_domains", "7")], &[]), "max_domains = 2", "max_domains = 7");
    replaces(&limits(&[("max_buffers", "11")], &[]), "= 10 # enough", "= 11 # enough");
    replaces(&limits(&[("max_streams", "3")], &[]), "# enough\n", "# enough\nmax_streams = 3\n");
    replaces(&limits(&[], &["max_domains"]), "# since last spring\nmax_domains = 2\n", "");
    replaces(&limits(&[], &["max_buffers"]), "\n# measured\nmax_buffers = 10 # enough\n", "");
    let web = Edit::TenantLimits {
        tenant: "web".into(),
        set: [("max_batch".into(), Scalar::Number(8))].into(),
        unset: Vec::new(),
    };
    replaces(&web, "# The end.\n", "\n[tenant.limits]\nmax_batch = 8\n# The end.\n");
}

#[test]
fn slices_come_and_go_in_either_way_of_writing() {
    let add = |tenant: &str| Edit::SliceAdd { tenant: tenant.into(), slice: slice("gpu0", "1MiB", Some("more")) };
    let remove = |tenant: &str, slice: &str| Edit::SliceRemove { tenant: tenant.into(), slice: slice.into() };
    let block = "\n[[tenant.slice]]\ndevice = \"gpu0\"\nmemory = \"1MiB\"\nname = \"more\"\n";
    replaces(&add("db"), "name = \"big\"\n", &format!("name = \"big\"\n{block}"));
    let inline = "# second\n    { device = \"gpu0\", memory = \"1MiB\", name = \"more\" },\n";
    replaces(&add("web"), "# second\n", inline);
    let short = "tenant = [{ name = \"t\", slice = [{ device = \"g\", memory = 4096 }] }]\n";
    assert_eq!(
        edited(short, &Edit::SliceAdd { tenant: "t".into(), slice: slice("h", "4096", None) }),
        "tenant = [{ name = \"t\", slice = [{ device = \"g\", memory = 4096 }, { device = \"h\", memory = 4096 }] }]\n"
    );
    let bare = "[[tenant]]\nname = \"t\"\nslice = [\n  { device = \"g\" } # one\n]\n";
    let both = edited(bare, &Edit::SliceAdd { tenant: "t".into(), slice: slice("h", "1", None) });
    assert!(both.contains("{ device = \"g\" }, # one\n  { device = \"h\", memory = 1 }\n]"), "{both}");

    replaces(&remove("web", "gpu0"), "    { device = \"gpu0\", memory = \"4MiB\" }, # first\n", "");
    let second = "    # for pictures\n    { device = \"gpu1\", memory = \"4MiB\", name = \"b\" }, # second\n";
    replaces(&remove("web", "b"), second, "");
    let without = edited(FILE, &remove("db", "big"));
    assert!(without.contains("reach = []\n# what it computes with\n"), "{without}");
    assert!(without.contains("memory = \"8MiB\"\n\n[tenant.limits]\n"), "{without}");
}

#[test]
fn a_slice_that_moves_keeps_its_name_and_its_comments() {
    let to = |tenant: &str, slice: &str, device: &str| Edit::SliceMove {
        tenant: tenant.into(),
        slice: slice.into(),
        device: device.into(),
    };
    replaces(&to("db", "big", "gpu0"), "device = \"gpu1\" # the quiet one", "device = \"gpu0\" # the quiet one");
    let named = "device = \"gpu1\"\nmemory = \"8MiB\"\nname = \"gpu0\"\n";
    replaces(&to("db", "gpu0", "gpu1"), "device = \"gpu0\"\nmemory = \"8MiB\"\n", named);
    let inline = "{ device = \"gpu1\", memory = \"4MiB\", name = \"gpu0\" }";
    replaces(&to("web", "gpu0", "gpu1"), "{ device = \"gpu0\", memory = \"4MiB\" }", inline);
    assert_eq!(edited(FILE, &to("db", "big", "gpu1")), FILE, "it is there already");
}

#[test]
fn a_drain_is_a_key_that_comes_and_goes() {
    let drained = |drained| Edit::Drained { tenant: "web".into(), drained };
    let on = edited(FILE, &drained(true));
    assert_eq!(on, FILE.replace("]\n# The end.", "]\ndrained = true\n# The end."));
    assert_eq!(edited(&on, &drained(true)), on);
    assert_eq!(edited(&on, &drained(false)), FILE);
    assert_eq!(edited(FILE, &drained(false)), FILE);
}

#[test]
fn what_is_not_there_is_refused_with_what_is() {
    let refused = |what: &Edit| edit(FILE, what).unwrap_err().to_string();
    let limits = |tenant: &str, key: &str| Edit::TenantLimits {
        tenant: tenant.into(),
        set: BTreeMap::new(),
        unset: vec![key.into()],
    };
    assert_eq!(refused(&Edit::TenantRemove { tenant: "x".into() }), "There is no tenant \"x\"; there are: db, web");
    let no_slice = Edit::SliceRemove { tenant: "db".into(), slice: "gpu1".into() };
    assert_eq!(refused(&no_slice), "Tenant \"db\" has no slice \"gpu1\"; it has: gpu0, big");
    for tenant in ["db", "web"] {
        let expected = format!("Tenant {tenant:?} has no limit \"max_streams\" of its own; it is at its default");
        assert_eq!(refused(&limits(tenant, "max_streams")), expected);
    }
    let odd = "tenant = 1\n";
    assert_eq!(edit(odd, &limits("x", "y")), Err(EditError::Shape { key: "tenant" }));
    assert!(matches!(edit("= 1", &limits("x", "y")), Err(EditError::NotToml { .. })));
}

#[test]
fn the_lines_of_a_file_from_elsewhere_keep_their_ends() {
    let windows = FILE.replace('\n', "\r\n");
    let what = Edit::Drained { tenant: "db".into(), drained: true };
    assert_eq!(edited(&windows, &what), edited(FILE, &what).replace('\n', "\r\n"));
}

#[test]
fn the_shipped_file_can_be_edited() {
    let text = vmm_daemon::config::DEFAULT;
    let add = Edit::TenantAdd {
        tenant: "two".into(),
        keys: BTreeMap::new(),
        limits: BTreeMap::new(),
        slices: vec![slice("gpu0", "64MiB", None)],
    };
    let both = edited(text, &add);
    assert_eq!(Config::parse(Path::new("t.toml"), &both).unwrap().tenants.len(), 2);
    assert!(both.starts_with(text), "it only grew");
    assert_eq!(edited(&both, &Edit::TenantRemove { tenant: "two".into() }).trim_end(), text.trim_end());
}

/// A file as a test thinks of it.
#[derive(Clone, Debug, Default)]
struct Model {
    tenants: Vec<Tenant>,
}

#[derive(Clone, Debug, Default)]
struct Tenant {
    name: String,
    slices: Vec<Slice>,
    reach: Vec<(String, String)>,
    limits: BTreeMap<String, u32>,
    drained: bool,
    /// `slice = [{ … }]` in place of `[[tenant.slice]]`, and the same of limits.
    inline: bool,
}

#[derive(Clone, Debug, PartialEq)]
struct Slice {
    device: String,
    name: Option<String>,
}

impl Slice {
    fn name(&self) -> &str {
        self.name.as_ref().unwrap_or(&self.device)
    }
}

impl Model {
    /// The file. Comments say whose they are: `K` nobody's, `T` a tenant's, `S` a slice's.
    fn text(&self, commented: bool) -> String {
        let mut text = String::new();
        let mut number = 0;
        let mut note = |whose: &str| {
            number += 1;
            if commented { format!("# {whose} {number}") } else { String::new() }
        };
        for device in ["g0", "g1", "g2"] {
            let (above, beside) = (note("K"), note("K"));
            let _ = writeln!(
                text,
                "{above}\n[[device]] {beside}\nname = \"{device}\"\nkind = \"gpu\"\nmemory = \"1GiB\"\n"
            );
        }
        for tenant in &self.tenants {
            let whose = format!("T:{}", tenant.name);
            let _ = writeln!(text, "{}\n\n{}\n[[tenant]]", note("K"), note(&whose));
            let _ = writeln!(text, "name = \"{}\" {}\n{}", tenant.name, note(&whose), note(&whose));
            if tenant.drained {
                text += "drained = true\n";
            }
            let rules = tenant
                .reach
                .iter()
                .map(|(from, to)| format!("{{ from = \"{from}\", to = \"{to}\", path = \"staged\" }}"));
            let rules: Vec<_> = rules.collect();
            if !rules.is_empty() {
                let _ = writeln!(text, "reach = [{}]", rules.join(", "));
            }
            let limits: Vec<_> = tenant.limits.iter().map(|(key, value)| format!("{key} = {value}")).collect();
            if tenant.inline {
                let _ = writeln!(text, "limits = {{ {} }}\nslice = [", limits.join(", "));
            }
            for slice in &tenant.slices {
                let whose = format!("S:{}/{}", tenant.name, slice.name());
                let name = slice.name.as_ref().map(|name| format!("name = \"{name}\"")).unwrap_or_default();
                let (above, beside) = (note(&whose), note(&whose));
                if tenant.inline {
                    let comma = if name.is_empty() { "" } else { ", " };
                    let _ = writeln!(
                        text,
                        "  {above}\n  {{ device = \"{}\", memory = \"4KiB\"{comma}{name} }}, {beside}",
                        slice.device
                    );
                } else {
                    let _ = writeln!(
                        text,
                        "{}\n\n{above}\n  [[tenant.slice]] {beside}",
                        note(&format!("T:{}", tenant.name))
                    );
                    let _ = writeln!(text, "  device = \"{}\"\n  memory = \"4KiB\"\n  {name}", slice.device);
                }
            }
            if tenant.inline {
                text += "]\n";
            } else if !limits.is_empty() {
                let _ = writeln!(text, "[tenant.limits] {}\n{}", note(&whose), limits.join("\n"));
            }
        }
        text + &note("K") + "\n"
    }

    /// `None` if the edit is refused.
    fn edited(&self, edit: &Edit) -> Option<Self> {
        let mut after = self.clone();
        if let Edit::TenantAdd { tenant, limits, slices, .. } = edit {
            let number = |value: &Scalar| match value {
                Scalar::Number(number) => *number,
                Scalar::Text(text) => panic!("{text}"),
            };
            after.tenants.push(Tenant {
                name: tenant.clone(),
                slices: slices.iter().map(Slice::from).collect(),
                limits: limits.iter().map(|(key, value)| (key.clone(), number(value))).collect(),
                ..Tenant::default()
            });
            return Some(after);
        }
        let index = after.tenants.iter().position(|tenant| tenant.name == edit.tenant())?;
        let tenant = &mut after.tenants[index];
        let find = |tenant: &Tenant, name: &str| tenant.slices.iter().position(|slice| slice.name() == name);
        match edit {
            Edit::TenantAdd { .. } => {}
            Edit::TenantRemove { .. } => drop(after.tenants.remove(index)),
            Edit::TenantLimits { set, unset, .. } => {
                for key in unset {
                    tenant.limits.remove(key)?;
                }
                for (key, value) in set {
                    let Scalar::Number(number) = value else { panic!("{value:?}") };
                    tenant.limits.insert(key.clone(), *number);
                }
            }
            Edit::SliceAdd { slice, .. } => tenant.slices.push(slice.into()),
            Edit::SliceRemove { slice, .. } => {
                let gone = find(tenant, slice)?;
                tenant.slices.remove(gone);
                tenant.reach.retain(|(from, to)| from != slice && to != slice);
            }
            Edit::SliceMove { slice, device, .. } => {
                let moved = find(tenant, slice)?;
                tenant.slices[moved] = Slice { device: device.clone(), name: Some(slice.clone()) };
            }
            Edit::Drained { drained, .. } => tenant.drained = *drained,
        }
        Some(after)
    }
}

impl From<&NewSlice> for Slice {
    fn from(slice: &NewSlice) -> Self {
        Self { device: slice.device.clone(), name: slice.name.clone() }
    }
}

fn device() -> impl Strategy<Value = String> {
    (0..3).prop_map(|number| format!("g{number}"))
}

fn name() -> impl Strategy<Value = String> {
    prop_oneof![(0..4).prop_map(|number| format!("s{number}")), device()]
}

fn new_slice() -> impl Strategy<Value = NewSlice> {
    (device(), proptest::option::of(name())).prop_map(|(device, name)| NewSlice { device, memory: "4KiB".into(), name })
}

fn limits() -> impl Strategy<Value = BTreeMap<String, u32>> {
    proptest::collection::btree_map(limit_key(), 1..1000_u32, 0..4)
}

fn limit_key() -> impl Strategy<Value = String> {
    prop_oneof![Just("max_domains".to_owned()), Just("max_buffers".to_owned()), Just("max_streams".to_owned())]
}

/// Without names twice, so that the file is right.
fn unique(slices: &[NewSlice]) -> Vec<Slice> {
    let mut seen = BTreeSet::new();
    slices.iter().map(Slice::from).filter(|slice| seen.insert(slice.name().to_owned())).collect()
}

fn tenant(number: usize) -> impl Strategy<Value = Tenant> {
    let slices = proptest::collection::vec(new_slice(), 1..5);
    (slices, limits(), any::<(bool, bool, bool)>()).prop_map(move |(slices, limits, (drained, inline, staged))| {
        let slices = unique(&slices);
        let names: Vec<_> = slices.iter().map(|slice| slice.name().to_owned()).collect();
        let reach = names.iter().zip(names.iter().skip(1)).filter(|_| staged);
        let reach = reach.map(|(from, to)| (from.clone(), to.clone())).collect();
        Tenant { name: format!("t{number}"), slices, reach, limits, drained, inline }
    })
}

fn model() -> impl Strategy<Value = Model> {
    (tenant(0), tenant(1), tenant(2), 0..4_usize).prop_map(|(zero, one, two, count)| {
        let mut tenants = vec![zero, one, two];
        tenants.truncate(count);
        Model { tenants }
    })
}

fn any_edit() -> impl Strategy<Value = Edit> {
    let tenant = || (0..4).prop_map(|number| format!("t{number}"));
    let scalars = || limits().prop_map(|limits| limits.into_iter().map(|(key, n)| (key, Scalar::Number(n))).collect());
    prop_oneof![
        (tenant(), scalars(), proptest::collection::vec(new_slice(), 1..4))
            .prop_map(|(tenant, limits, slices)| { Edit::TenantAdd { tenant, keys: BTreeMap::new(), limits, slices } }),
        tenant().prop_map(|tenant| Edit::TenantRemove { tenant }),
        (tenant(), scalars(), proptest::collection::btree_set(limit_key(), 0..2)).prop_map(|(tenant, set, unset)| {
            Edit::TenantLimits { tenant, set, unset: unset.into_iter().collect() }
        }),
        (tenant(), new_slice()).prop_map(|(tenant, slice)| Edit::SliceAdd { tenant, slice }),
        (tenant(), name()).prop_map(|(tenant, slice)| Edit::SliceRemove { tenant, slice }),
        (tenant(), name(), device()).prop_map(|(tenant, slice, device)| Edit::SliceMove { tenant, slice, device }),
        (tenant(), any::<bool>()).prop_map(|(tenant, drained)| Edit::Drained { tenant, drained }),
    ]
}

/// The comments of a text that an edit must leave, in order.
fn comments<'a>(text: &'a str, edit: &Edit) -> Vec<&'a str> {
    let gone = |comment: &str| match edit {
        Edit::TenantRemove { tenant } => {
            comment.starts_with(&format!("# T:{tenant} ")) || comment.starts_with(&format!("# S:{tenant}/"))
        }
        Edit::SliceRemove { tenant, slice } => comment.starts_with(&format!("# S:{tenant}/{slice} ")),
        _ => false,
    };
    let comments = text.lines().filter_map(|line| line.find('#').map(|at| &line[at..]));
    comments.filter(|comment| !gone(comment)).collect()
}

proptest! {
    #[test]
    fn an_edit_of_the_text_is_the_edit_of_what_it_means(model in model(), edits in proptest::collection::vec(any_edit(), 1..8)) {
        let parse = |text: &str| Config::parse(Path::new("t.toml"), text).map_err(|error| error.to_string());
        let (mut model, mut text) = (model.clone(), model.text(true));
        prop_assert!(parse(&text).is_ok(), "{:?}\n{text}", parse(&text));
        for what in &edits {
            let wanted = model.edited(what);
            let actual = edit(&text, what);
            prop_assert_eq!(wanted.is_some(), actual.is_ok(), "{:?} {:?}\n{}", what, actual, text);
            let (Some(wanted), Ok(actual)) = (wanted, actual) else { continue };
            match (parse(&wanted.text(false)), parse(&actual)) {
                (Ok(meant), Ok(means)) => prop_assert_eq!(meant, means, "{:?}\n{}\n{}", what, text, actual),
                // Two of one name, no slice left: refused however it is written.
                (Err(_), Err(_)) => continue,
                (meant, means) => prop_assert!(false, "{meant:?} {means:?} {what:?}\n{text}\n{actual}"),
            }
            prop_assert_eq!(comments(&text, what), comments(&actual, what), "{:?}\n{}\n{}", what, text, actual);
            (model, text) = (wanted, actual);
        }
    }
}
