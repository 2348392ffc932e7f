//! Edits of the configuration file that keep what people wrote: comments, order, spacing.
//!
//! The text is taken apart, changed in the one place that the edit is about, and put together again. Lists and tables may be written either
//! way (`[[tenant.slice]]` or `slice = [{ … }]`) and stay as they are. The comment lines right above something that is removed go with it;
//! every other comment stays.
//!
//! Not here: whether the result makes sense (it is parsed and checked like any file), writing it (`store`).

use std::collections::BTreeMap;

use toml_edit::{DocumentMut, TomlError, Value};
use vmm_control::{Edit, NewSlice, Scalar};

use super::written::{Displaced, Keys, List, Place, end};

/// An edit that cannot be made.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum EditError {
    /// The file is none that could have been read.
    #[error("The configuration is not TOML: {problem}")]
    NotToml {
        /// Why.
        problem: String,
    },
    /// No tenant has that name.
    #[error("There is no tenant {name:?}; there are: {there}")]
    NoTenant {
        /// Which was asked for.
        name: String,
        /// The ones that there are.
        there: String,
    },
    /// No slice of the tenant has that name.
    #[error("Tenant {tenant:?} has no slice {name:?}; it has: {there}")]
    NoSlice {
        /// Whose.
        tenant: String,
        /// Which was asked for.
        name: String,
        /// The ones that there are.
        there: String,
    },
    /// A limit that is at its default already.
    #[error("Tenant {tenant:?} has no limit {key:?} of its own; it is at its default")]
    NoLimit {
        /// Whose.
        tenant: String,
        /// Which.
        key: String,
    },
    /// Something stands where an edit needs a table or list.
    #[error("{key} is not written as tables; edit the file by hand and run peergate reload")]
    Shape {
        /// Which.
        key: &'static str,
    },
}

type Edited<T> = Result<T, EditError>;

/// The file's text after an edit.
///
/// # Errors
/// See [`EditError`]. A text that comes back may still be no configuration.
pub fn edit(text: &str, edit: &Edit) -> Edited<String> {
    let windows = text.contains("\r\n");
    let text = if windows { text.replace("\r\n", "\n") } else { text.to_owned() };
    let mut document: DocumentMut =
        text.parse().map_err(|error: TomlError| EditError::NotToml { problem: error.message().to_owned() })?;
    let displaced = match edit {
        Edit::TenantAdd { tenant, keys, limits, slices } => add_tenant(&mut document, tenant, keys, limits, slices)?,
        Edit::TenantRemove { tenant } => {
            let index = tenant_index(&mut document, tenant)?;
            tenants(&mut document)?.remove(index)
        }
        Edit::TenantLimits { tenant, set, unset } => limit(&mut document, tenant, set, unset)?,
        Edit::SliceAdd { tenant, slice } => {
            slices(find_tenant(&mut document, tenant)?)?.push(slice_keys(slice));
            Displaced::default()
        }
        Edit::SliceRemove { tenant, slice } => remove_slice(&mut document, tenant, slice)?,
        Edit::SliceMove { tenant, slice, device } => move_slice(&mut document, tenant, slice, device)?,
        Edit::Drained { tenant, drained } => drain(&mut document, tenant, *drained)?,
    };
    displaced.settle(&mut document);
    let edited = document.to_string();
    Ok(if windows { edited.replace('\n', "\r\n") } else { edited })
}

fn tenants(document: &mut DocumentMut) -> Edited<List<'_>> {
    Place::Block(document.as_table_mut()).list("tenant").ok_or(EditError::Shape { key: "tenant" })
}

fn slices(tenant: Place<'_>) -> Edited<List<'_>> {
    tenant.list("slice").ok_or(EditError::Shape { key: "slice" })
}

fn tenant_index(document: &mut DocumentMut, name: &str) -> Edited<usize> {
    let names = tenants(document)?.each(|tenant| tenant.text("name").map(str::to_owned));
    find(&names, name).map_err(|there| EditError::NoTenant { name: name.to_owned(), there })
}

/// The place of a name, or all the names.
fn find(names: &[Option<Option<String>>], name: &str) -> Result<usize, String> {
    let known = || names.iter().flatten().flatten();
    let index = names.iter().position(|other| other.as_ref().and_then(Option::as_deref) == Some(name));
    index.ok_or_else(|| {
        let there: Vec<_> = known().map(String::as_str).collect();
        if there.is_empty() { "none".to_owned() } else { there.join(", ") }
    })
}

fn find_tenant<'a>(document: &'a mut DocumentMut, name: &str) -> Edited<Place<'a>> {
    let index = tenant_index(document, name)?;
    tenants(document)?.into(index).ok_or(EditError::Shape { key: "tenant" })
}

/// A slice without a name has its device's.
fn slice_index(document: &mut DocumentMut, tenant: &str, name: &str) -> Edited<usize> {
    let own = |slice: &Place<'_>| slice.text("name").or_else(|| slice.text("device")).map(str::to_owned);
    let names = slices(find_tenant(document, tenant)?)?.each(own);
    find(&names, name).map_err(|there| EditError::NoSlice { tenant: tenant.to_owned(), name: name.to_owned(), there })
}

/// A value as people write it: permissions in octal.
fn value(key: &str, scalar: &Scalar) -> Value {
    match scalar {
        Scalar::Text(text) => text.as_str().into(),
        Scalar::Number(number) if key.ends_with("_mode") => {
            format!("0o{number:o}").parse().unwrap_or_else(|_| i64::from(*number).into())
        }
        Scalar::Number(number) => i64::from(*number).into(),
    }
}

fn keys_of(scalars: &BTreeMap<String, Scalar>) -> impl Iterator<Item = (String, Value)> {
    scalars.iter().map(|(key, scalar)| (key.clone(), value(key, scalar)))
}

fn slice_keys(slice: &NewSlice) -> Keys {
    let memory = value("memory", &Scalar::typed(&slice.memory));
    let mut keys = vec![("device".to_owned(), slice.device.as_str().into()), ("memory".to_owned(), memory)];
    keys.extend(slice.name.as_ref().map(|name| ("name".to_owned(), name.as_str().into())));
    keys
}

/// At the end of the file, behind comments that stand there.
fn add_tenant(
    document: &mut DocumentMut,
    name: &str,
    keys: &BTreeMap<String, Scalar>,
    limits: &BTreeMap<String, Scalar>,
    new: &[NewSlice],
) -> Edited<Displaced> {
    let last = end(document);
    let trailing = document.trailing().as_str().unwrap_or_default().to_owned();
    let mut list = tenants(document)?;
    list.push(std::iter::once(("name".to_owned(), name.into())).chain(keys_of(keys)).collect());
    let at_end = list.put_last(last, &trailing);
    let index = list.len() - 1;
    let mut slices = slices(list.into(index).ok_or(EditError::Shape { key: "tenant" })?)?;
    new.iter().for_each(|slice| slices.push(slice_keys(slice)));
    if !limits.is_empty() {
        let tenant = tenants(document)?.into(index).ok_or(EditError::Shape { key: "tenant" })?;
        let mut table = tenant.table("limits").ok_or(EditError::Shape { key: "limits" })?;
        keys_of(limits).for_each(|(key, value)| table.set(&key, value));
    }
    if at_end {
        document.set_trailing("");
    }
    Ok(Displaced::default())
}

fn limit(
    document: &mut DocumentMut,
    tenant: &str,
    set: &BTreeMap<String, Scalar>,
    unset: &[String],
) -> Edited<Displaced> {
    let place = find_tenant(document, tenant)?;
    let missing = |key: &String| EditError::NoLimit { tenant: tenant.to_owned(), key: key.clone() };
    if let (true, false, Some(key)) = (set.is_empty(), place.has("limits"), unset.first()) {
        return Err(missing(key));
    }
    let mut displaced = Displaced { after: place.position(), text: String::new() };
    let mut table = place.table("limits").ok_or(EditError::Shape { key: "limits" })?;
    displaced.after = displaced.after.max(table.position());
    for key in unset {
        displaced.text += &table.unset(key, false).ok_or_else(|| missing(key))?;
    }
    keys_of(set).for_each(|(key, value)| table.set(&key, value));
    Ok(displaced)
}

fn remove_slice(document: &mut DocumentMut, tenant: &str, name: &str) -> Edited<Displaced> {
    let index = slice_index(document, tenant, name)?;
    let displaced = slices(find_tenant(document, tenant)?)?.remove(index);
    let place = find_tenant(document, tenant)?;
    if !place.has("reach") {
        return Ok(displaced);
    }
    let mut rules = place.list("reach").ok_or(EditError::Shape { key: "reach" })?;
    let about = rules.each(|rule| rule.text("from") == Some(name) || rule.text("to") == Some(name));
    let gone = (0..).zip(about).filter(|(_, about)| *about == Some(true)).map(|(index, _): (usize, _)| index);
    let mut left = displaced;
    for index in gone.collect::<Vec<_>>().into_iter().rev() {
        let more = rules.remove(index);
        left.after = left.after.max(more.after);
        left.text = more.text + &left.text;
    }
    Ok(left)
}

/// The guest knows a slice by its name, so that stays.
fn move_slice(document: &mut DocumentMut, tenant: &str, name: &str, device: &str) -> Edited<Displaced> {
    let index = slice_index(document, tenant, name)?;
    let slice = slices(find_tenant(document, tenant)?)?.into(index);
    let mut slice = slice.ok_or(EditError::Shape { key: "slice" })?;
    if slice.text("device") != Some(device) {
        slice.set("device", device.into());
        if !slice.has("name") {
            slice.set("name", name.into());
        }
    }
    Ok(Displaced::default())
}

fn drain(document: &mut DocumentMut, tenant: &str, drained: bool) -> Edited<Displaced> {
    let mut place = find_tenant(document, tenant)?;
    let after = place.position();
    if drained {
        place.set("drained", true.into());
        return Ok(Displaced::default());
    }
    // The key comes and goes by itself; comments around it are somebody's.
    Ok(Displaced { after, text: place.unset("drained", true).unwrap_or_default() })
}
