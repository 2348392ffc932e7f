//! Where the kit's packages come from: the Debian archive that this machine's own apt uses.
//!
//! Both formats of apt sources (deb822 `.sources`, one-line `.list`) are parsed as text by pure functions; one function reads the
//! files. `PEERGATE_DEBIAN_MIRROR` replaces the answer on a machine whose apt knows no Debian archive. No mirror host is named
//! here, and nothing here talks to the network: apt checks the signatures when the packages are fetched.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The variable that names a Debian archive (`http://host/debian`) when apt's own configuration has none.
pub const MIRROR_VARIABLE: &str = "PEERGATE_DEBIAN_MIRROR";

const KEYRINGS: [&str; 2] =
    ["/usr/share/keyrings/debian-archive-keyring.gpg", "/usr/share/keyrings/debian-archive-keyring.pgp"];
/// Settings of the machine's apt that decide whether a fetch works at all, so the kit's apt must share them.
const SHARED_SETTINGS: [&str; 5] =
    ["Acquire::http::", "Acquire::https::", "Acquire::Check-", "Acquire::Retries", "Acquire::ForceIPv"];

/// One `deb` source, as written.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Source {
    uri: String,
    suite: String,
    components: Vec<String>,
    signed_by: Option<String>,
}

/// A Debian archive and what apt needs in order to trust and reach it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Archive {
    /// The archive's URI, without a suite.
    pub uri: String,
    /// The keyring that signs it.
    pub keyring: PathBuf,
    /// `apt.conf` lines of this machine that reaching it may need (proxies, clock checks).
    pub settings: Vec<String>,
}

impl Archive {
    /// Finds the archive in `PEERGATE_DEBIAN_MIRROR`, else in apt's configuration. Runs `apt-config`; does not touch the network.
    ///
    /// # Errors
    /// When neither names a Debian archive, or the Debian keyring is not installed.
    pub fn of_this_machine() -> Result<Self> {
        let named = std::env::var(MIRROR_VARIABLE).ok();
        let source = match &named {
            Some(uri) => Source { uri: uri.clone(), suite: String::new(), components: Vec::new(), signed_by: None },
            None => pick(read_sources(Path::new("/etc/apt"))?, &host_codename()).with_context(|| {
                format!("No Debian archive in /etc/apt; set {MIRROR_VARIABLE} to one (http://host/debian)")
            })?,
        };
        let keyring = keyring_for(&source)?;
        Ok(Self { uri: resolve_mirror_list(&source.uri)?, keyring, settings: shared_settings()? })
    }

    /// The `sources.list` line for `suite`.
    #[must_use]
    pub fn line(&self, suite: &str) -> String {
        format!("deb [signed-by={}] {} {suite} main", self.keyring.display(), self.uri)
    }
}

/// A keyring file that `source` names, else the Debian one. (A key pasted into a source cannot be handed on by path.)
fn keyring_for(source: &Source) -> Result<PathBuf> {
    source
        .signed_by
        .iter()
        .map(String::as_str)
        .filter(|path| path.starts_with('/'))
        .chain(KEYRINGS)
        .map(PathBuf::from)
        .find(|path| path.is_file())
        .context("No keyring of the Debian archive here; install the package debian-archive-keyring")
}

fn host_codename() -> String {
    let text = fs::read_to_string("/etc/os-release").unwrap_or_default();
    text.lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
        .map(|name| name.trim_matches('"').to_owned())
        .unwrap_or_default()
}

fn read_sources(apt: &Path) -> Result<Vec<Source>> {
    let mut files = vec![apt.join("sources.list")];
    if let Ok(entries) = fs::read_dir(apt.join("sources.list.d")) {
        let mut more: Vec<_> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
        more.sort();
        files.extend(more);
    }
    let mut sources = Vec::new();
    for file in files.iter().filter(|file| file.is_file()) {
        let parse = match file.extension().and_then(OsStr::to_str) {
            Some("list") => parse_one_line,
            Some("sources") => parse_deb822,
            _ => continue,
        };
        let text = fs::read_to_string(file).with_context(|| format!("Cannot read {}", file.display()))?;
        sources.extend(parse(&text));
    }
    Ok(sources)
}

/// The main Debian archive among `sources`: the suite of this release, component `main`. A third party may use the same two words,
/// so a source signed with the Debian keyring wins, then one whose path says `debian`.
fn pick(sources: Vec<Source>, codename: &str) -> Option<Source> {
    const NAMES: [&str; 5] = ["stable", "oldstable", "testing", "unstable", "sid"];
    let known = |suite: &str| suite == codename || NAMES.contains(&suite);
    let score = |source: &Source| {
        let signed = source.signed_by.as_deref().is_some_and(|key| key.contains("debian-archive"));
        let path = source.uri.trim_end_matches('/').ends_with("/debian");
        (signed, path)
    };
    let mut best: Option<Source> = None;
    for source in sources {
        let is_main = source.components.iter().any(|name| name == "main");
        if !is_main || !known(&source.suite) {
            continue;
        }
        if best.as_ref().is_none_or(|best| score(&source) > score(best)) {
            best = Some(source);
        }
    }
    best
}

fn parse_deb822(text: &str) -> Vec<Source> {
    let body: Vec<&str> = text.lines().filter(|l| !l.starts_with('#')).collect();
    body.split(|line| line.trim().is_empty()).flat_map(parse_stanza).collect()
}

fn parse_stanza(lines: &[&str]) -> Vec<Source> {
    let mut fields: Vec<(String, String)> = Vec::new();
    for line in lines {
        if line.starts_with([' ', '\t']) {
            if let Some((_, value)) = fields.last_mut() {
                value.push(' ');
                value.push_str(line.trim());
            }
        } else if let Some((name, value)) = line.split_once(':') {
            fields.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }
    let field = |name: &str| fields.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str());
    let words = |name: &str| field(name).unwrap_or_default().split_whitespace();
    if !words("types").any(|kind| kind == "deb") || field("enabled") == Some("no") {
        return Vec::new();
    }
    let components: Vec<String> = words("components").map(str::to_owned).collect();
    words("uris")
        .flat_map(|uri| words("suites").map(move |suite| (uri, suite)))
        .map(|(uri, suite)| Source {
            uri: uri.to_owned(),
            suite: suite.to_owned(),
            components: components.clone(),
            signed_by: field("signed-by").map(str::to_owned),
        })
        .collect()
}

fn parse_one_line(text: &str) -> Vec<Source> {
    text.lines().filter_map(parse_line).collect()
}

fn parse_line(line: &str) -> Option<Source> {
    let line = line.split('#').next()?.trim();
    let mut rest = line.strip_prefix("deb")?;
    if !rest.starts_with([' ', '\t']) {
        return None;
    }
    rest = rest.trim_start();
    let mut signed_by = None;
    if let Some(options) = rest.strip_prefix('[') {
        let (options, after) = options.split_once(']')?;
        signed_by = options.split_whitespace().find_map(|option| option.strip_prefix("signed-by=")).map(str::to_owned);
        rest = after;
    }
    let mut words = rest.split_whitespace().map(str::to_owned);
    Some(Source { uri: words.next()?, suite: words.next()?, components: words.collect(), signed_by })
}

/// Cloud images name a file of mirrors; its first entry is as good as any.
fn resolve_mirror_list(uri: &str) -> Result<String> {
    let Some(file) = uri.strip_prefix("mirror+file:") else {
        return Ok(uri.to_owned());
    };
    let file = format!("/{}", file.trim_start_matches('/'));
    let text = fs::read_to_string(&file).with_context(|| format!("Cannot read the mirror list {file}"))?;
    text.lines()
        .filter_map(|line| line.split_whitespace().next())
        .find(|word| !word.starts_with('#'))
        .map(str::to_owned)
        .with_context(|| format!("The mirror list {file} is empty"))
}

fn shared_settings() -> Result<Vec<String>> {
    let output = Command::new("apt-config")
        .arg("dump")
        .output()
        .context("Cannot run apt-config; the kit needs a machine with apt (Debian 12 or 13)")?;
    if !output.status.success() {
        bail!("apt-config dump failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter(|line| SHARED_SETTINGS.iter().any(|name| line.starts_with(name)))
        .map(str::to_owned)
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEB822: &str = "\
# a comment
Types: deb
URIs: http://mirror.example/debian
# a comment inside
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main
";

    #[test]
    fn deb822_stanzas_become_one_source_per_uri_and_suite() {
        let sources = parse_deb822(DEB822);
        let seen: Vec<_> = sources.iter().map(|s| s.suite.as_str()).collect();
        assert_eq!(seen, ["bookworm", "bookworm-updates", "bookworm-security"]);
        assert_eq!(sources[0].components, ["main", "contrib"]);
    }

    #[test]
    fn a_pasted_key_is_not_taken_for_a_path() {
        let text = "Types: deb\nURIs: http://m.example/debian\nSuites: trixie\nComponents: main\nSigned-By:\n -----BEGIN PGP\n .\n abc\n";
        let sources = parse_deb822(text);
        assert_eq!(sources.len(), 1);
        assert!(!sources[0].signed_by.as_deref().unwrap().starts_with('/'));
    }

    #[test]
    fn one_line_sources_are_read_with_and_without_options() {
        let text = "# deb http://no.example/debian bookworm main\n\
                    deb [arch=amd64 signed-by=/k.gpg] http://a.example/debian bookworm main contrib # tail\n\
                    deb-src http://a.example/debian bookworm main\n\
                    deb http://b.example/debian bookworm main\n";
        let sources = parse_one_line(text);
        assert_eq!(sources.len(), 2);
        assert_eq!(sources[0].signed_by.as_deref(), Some("/k.gpg"));
        assert_eq!(sources[0].uri, "http://a.example/debian");
        assert_eq!(sources[1].components, ["main"]);
    }

    #[test]
    fn the_debian_archive_wins_over_a_third_party_with_the_same_suite() {
        let mut sources = parse_one_line("deb [signed-by=/x.gpg] http://third.example bookworm main");
        sources.extend(parse_deb822(DEB822));
        let picked = pick(sources, "bookworm").unwrap();
        assert_eq!(picked.uri, "http://mirror.example/debian");
        assert_eq!(picked.suite, "bookworm");
    }

    #[test]
    fn a_machine_without_a_debian_archive_gives_none() {
        let sources = parse_one_line("deb http://other.example/ubuntu noble main");
        assert_eq!(pick(sources, "bookworm"), None);
    }

    #[test]
    fn a_mirror_list_stands_for_its_first_entry() {
        let dir = tempfile::tempdir().unwrap();
        let list = dir.path().join("debian.list");
        fs::write(&list, "# mirrors\nhttps://one.example/debian\tpriority:1\nhttps://two.example/debian\n").unwrap();
        let uri = format!("mirror+file://{}", list.display());
        assert_eq!(resolve_mirror_list(&uri).unwrap(), "https://one.example/debian");
    }
}
