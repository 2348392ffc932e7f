//! Tables and lists of a TOML document, whichever way they are written, and the comments around what is taken out of them.
//!
//! In a document, the text between two things belongs to the later one. Of what stands before a thing that is removed, the comment lines
//! right above it are its own; the rest is about something else and must find a new place.
//!
//! Not here: what the tables mean.

use toml_edit::visit_mut::{VisitMut, visit_table_mut};
use toml_edit::{Array, ArrayOfTables, Decor, DocumentMut, InlineTable, Item, RawString, Table, TableLike, Value};

/// Keys and values of a new table, in order.
pub(super) type Keys = Vec<(String, Value)>;

/// A table: `[limits]` with lines of its own, or `{ … }`.
pub(super) enum Place<'a> {
    Block(&'a mut Table),
    Inline(&'a mut InlineTable),
}

/// A list of tables: `[[slice]]`s, or `[{ … }, { … }]`.
pub(super) enum List<'a> {
    Blocks(&'a mut ArrayOfTables),
    Inline(&'a mut Array),
}

impl<'a> Place<'a> {
    fn like(&self) -> &dyn TableLike {
        match self {
            Self::Block(table) => *table,
            Self::Inline(table) => *table,
        }
    }

    fn of(item: &'a mut Item) -> Option<Self> {
        match item {
            Item::Table(table) => Some(Self::Block(table)),
            Item::Value(Value::InlineTable(table)) => Some(Self::Inline(table)),
            _ => None,
        }
    }

    pub(super) fn text(&self, key: &str) -> Option<&str> {
        self.like().get(key)?.as_str()
    }

    /// Gives a key a value; a comment beside the old one stays.
    pub(super) fn set(&mut self, key: &str, mut value: Value) {
        let old = match self {
            Self::Block(table) => table.get_mut(key).and_then(Item::as_value_mut),
            Self::Inline(table) => table.get_mut(key),
        };
        if let Some(old) = old {
            *value.decor_mut() = old.decor().clone();
            *old = value;
            return;
        }
        match self {
            Self::Block(table) => {
                let indent = table.iter().next().and_then(|(first, _)| Some(indent(table.key(first)?.leaf_decor())));
                table.insert(key, value.into());
                if let (Some(indent), Some(mut key)) = (indent, table.key_mut(key)) {
                    key.leaf_decor_mut().set_prefix(indent);
                }
            }
            Self::Inline(table) => {
                // The blank before the closing brace belongs to the last value.
                if let Some((_, last)) = table.iter_mut().last() {
                    let end = last.decor().suffix().and_then(RawString::as_str).unwrap_or_default().to_owned();
                    last.decor_mut().set_suffix("");
                    value.decor_mut().set_prefix(" ");
                    value.decor_mut().set_suffix(end);
                }
                table.insert(key, value);
            }
        }
    }

    /// Takes a key out, and its own comments with it unless they are to stay. `None` if it is not there; else comments that found no place
    /// in this table.
    pub(super) fn unset(&mut self, key: &str, comments_stay: bool) -> Option<String> {
        let table = match self {
            Self::Block(table) => table,
            Self::Inline(table) => return table.remove(key).map(|_| String::new()),
        };
        let next = table.iter().skip_while(|(other, _)| *other != key).skip(1).find(|(_, item)| item.is_value());
        let next = next.map(|(key, _)| key.to_owned());
        let (removed, _) = table.remove_entry(key)?;
        let before = prefix(removed.leaf_decor());
        let kept = if comments_stay { before } else { others(before) }.to_owned();
        match next.and_then(|next| table.key_mut(&next)) {
            Some(mut next) => {
                prepend(next.leaf_decor_mut(), &kept);
                Some(String::new())
            }
            None => Some(kept),
        }
    }

    /// The list at a key, made if there is none; `None` if something else is there.
    pub(super) fn list(self, key: &str) -> Option<List<'a>> {
        match self {
            Self::Block(table) => List::of(table.entry(key).or_insert_with(|| ArrayOfTables::new().into())),
            Self::Inline(table) => {
                table.entry(key).or_insert_with(|| Array::new().into()).as_array_mut().map(List::Inline)
            }
        }
    }

    /// The table at a key, made if there is none; `None` if something else is there.
    pub(super) fn table(self, key: &str) -> Option<Self> {
        match self {
            Self::Block(table) => Self::of(table.entry(key).or_insert_with(|| Table::new().into())),
            Self::Inline(table) => {
                let value = table.entry(key).or_insert_with(|| InlineTable::new().into());
                value.as_inline_table_mut().map(Self::Inline)
            }
        }
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.like().contains_key(key)
    }

    /// Where its header stands in the document; the first place if it has none of its own.
    pub(super) fn position(&self) -> isize {
        match self {
            Self::Block(table) => table.position().unwrap_or(0),
            Self::Inline(_) => 0,
        }
    }
}

impl<'a> List<'a> {
    fn of(item: &'a mut Item) -> Option<Self> {
        match item {
            Item::ArrayOfTables(tables) => Some(Self::Blocks(tables)),
            Item::Value(Value::Array(array)) => Some(Self::Inline(array)),
            _ => None,
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Blocks(tables) => tables.len(),
            Self::Inline(array) => array.len(),
        }
    }

    fn get(&mut self, index: usize) -> Option<Place<'_>> {
        match self {
            Self::Blocks(tables) => tables.get_mut(index).map(Place::Block),
            Self::Inline(array) => array.get_mut(index)?.as_inline_table_mut().map(Place::Inline),
        }
    }

    pub(super) fn into(self, index: usize) -> Option<Place<'a>> {
        match self {
            Self::Blocks(tables) => tables.get_mut(index).map(Place::Block),
            Self::Inline(array) => array.get_mut(index)?.as_inline_table_mut().map(Place::Inline),
        }
    }

    /// What `of` says about each table.
    pub(super) fn each<T>(&mut self, of: impl Fn(&Place<'_>) -> T) -> Vec<Option<T>> {
        (0..self.len()).map(|index| self.get(index).map(|place| of(&place))).collect()
    }

    /// Appends a table, written as the others are.
    pub(super) fn push(&mut self, keys: Keys) {
        match self {
            Self::Blocks(tables) => {
                let mut table: Table = keys.into_iter().map(|(key, value)| (key, Item::from(value))).collect();
                if let Some(last) = tables.iter().last() {
                    table.decor_mut().set_prefix(format!("\n{}", indent(last.decor())));
                    let inner = last.iter().next().and_then(|(first, _)| Some(indent(last.key(first)?.leaf_decor())));
                    for (mut key, _) in table.iter_mut() {
                        key.leaf_decor_mut().set_prefix(inner.clone().unwrap_or_default());
                    }
                }
                tables.push(table);
            }
            Self::Inline(array) => push_inline(array, keys.into_iter().collect()),
        }
    }

    /// Makes the list's last table the document's last one, `last` being the last header so far, with a text before it. False if it stays
    /// within an array.
    pub(super) fn put_last(&mut self, last: isize, before: &str) -> bool {
        let Self::Blocks(tables) = self else { return false };
        let Some(table) = tables.iter_mut().last() else { return false };
        table.set_position(Some(last.saturating_add(1)));
        let line_end = if before.is_empty() || before.ends_with('\n') { "" } else { "\n" };
        let own = indent(table.decor());
        table.decor_mut().set_prefix(format!("{before}{line_end}\n{own}"));
        true
    }

    /// Takes a table out. Comments that stood before it and found no place in the list come back, with the place in the document after which
    /// they belong.
    pub(super) fn remove(&mut self, index: usize) -> Displaced {
        match self {
            Self::Blocks(tables) => {
                let mut table = tables.remove(index);
                Displaced { after: last_position(&mut table), text: others(prefix(table.decor())).to_owned() }
            }
            Self::Inline(array) => {
                remove_inline(array, index);
                Displaced::default()
            }
        }
    }
}

/// Comments that need a new place.
#[derive(Debug, Default)]
pub(super) struct Displaced {
    pub(super) after: isize,
    pub(super) text: String,
}

impl Displaced {
    /// Puts them before the next header, or at the document's end.
    pub(super) fn settle(self, document: &mut DocumentMut) {
        if self.text.trim().is_empty() {
            return;
        }
        let mut next = Positions { after: self.after, least: None, most: 0 };
        next.visit_document_mut(document);
        if let Some(position) = next.least {
            AtPosition { position, text: &self.text }.visit_document_mut(document);
        } else {
            let trailing = format!("{}{}", self.text, document.trailing().as_str().unwrap_or_default());
            document.set_trailing(trailing);
        }
    }
}

/// On a line of its own if the last element is.
fn push_inline(array: &mut Array, table: InlineTable) {
    let mut value = Value::InlineTable(table);
    let index = array.len().saturating_sub(1);
    let last = array.get(index).map(|last| prefix(last.decor()));
    let Some(line) = last.and_then(|last| last.get(last.rfind('\n')?..)).map(str::to_owned) else {
        return array.push(value);
    };
    let mut beside = String::new();
    if array.trailing_comma() {
        let trailing = array.trailing().as_str().unwrap_or_default().to_owned();
        let (same, rest) = first_line(&trailing);
        beside.push_str(same.trim_end());
        array.set_trailing(format!("\n{rest}"));
    } else if let Some(last) = array.get_mut(index) {
        let suffix = last.decor().suffix().and_then(RawString::as_str).unwrap_or_default().to_owned();
        beside.push_str(first_line(&suffix).0.trim_end());
        last.decor_mut().set_suffix("");
        value.decor_mut().set_suffix(suffix.get(suffix.find('\n').unwrap_or(suffix.len())..).unwrap_or_default());
    }
    value.decor_mut().set_prefix(format!("{beside}{line}"));
    array.push_formatted(value);
}

/// In an array, the rest of a line after an element's comma is about that element.
fn remove_inline(array: &mut Array, index: usize) {
    let removed = array.remove(index);
    let (before, above) = first_line(prefix(removed.decor()));
    let kept = format!("{before}{}", others(above));
    match array.get_mut(index) {
        Some(next) => {
            let (_, rest) = first_line(prefix(next.decor()));
            let prefix = format!("{kept}{rest}");
            next.decor_mut().set_prefix(prefix);
        }
        None => {
            let (same, rest) = first_line(array.trailing().as_str().unwrap_or_default());
            let trailing =
                if rest.is_empty() && !kept.contains('\n') { same.to_owned() } else { format!("{kept}{rest}") };
            array.set_trailing(trailing);
        }
    }
}

fn first_line(text: &str) -> (&str, &str) {
    text.split_at(text.find('\n').map_or(text.len(), |at| at + 1))
}

fn prefix(decor: &Decor) -> &str {
    decor.prefix().and_then(RawString::as_str).unwrap_or_default()
}

/// Blanks between the line's begin and the thing itself.
fn indent(decor: &Decor) -> String {
    let prefix = prefix(decor);
    prefix.rsplit('\n').next().unwrap_or_default().to_owned()
}

fn prepend(decor: &mut Decor, text: &str) {
    if !text.trim().is_empty() {
        let both = format!("{text}{}", prefix(decor));
        decor.set_prefix(both);
    }
}

/// The part of a prefix that is not the thing's own: all but the comment lines right above it.
fn others(prefix: &str) -> &str {
    let mut end = prefix.rfind('\n').map_or(0, |at| at + 1);
    for line in prefix.get(..end).unwrap_or_default().split_inclusive('\n').rev() {
        if !line.trim_start().starts_with('#') {
            break;
        }
        end -= line.len();
    }
    prefix.get(..end).unwrap_or_default()
}

/// The last header within a table, itself included.
fn last_position(table: &mut Table) -> isize {
    let mut positions = Positions { after: isize::MAX, least: None, most: 0 };
    positions.visit_table_mut(table);
    positions.most
}

/// The last header of a document.
pub(super) fn end(document: &mut DocumentMut) -> isize {
    last_position(document.as_table_mut())
}

/// Looks at every header's place.
struct Positions {
    after: isize,
    /// The first place beyond `after`.
    least: Option<isize>,
    most: isize,
}

impl VisitMut for Positions {
    fn visit_table_mut(&mut self, table: &mut Table) {
        if let Some(position) = table.position().filter(|_| !table.is_dotted()) {
            self.most = self.most.max(position);
            if position > self.after {
                self.least = Some(self.least.map_or(position, |least| least.min(position)));
            }
        }
        visit_table_mut(self, table);
    }
}

/// Puts a text before the header at a place.
struct AtPosition<'a> {
    position: isize,
    text: &'a str,
}

impl VisitMut for AtPosition<'_> {
    fn visit_table_mut(&mut self, table: &mut Table) {
        if table.position() == Some(self.position) && !table.is_dotted() {
            prepend(table.decor_mut(), self.text);
        }
        visit_table_mut(self, table);
    }
}
