//! How a tenant's GPUs reach each other, as its worker says it.
//!
//! Whoever has taken a worker over can say what he likes: only pairs that there are count, each once, and words that fit on a line.
//!
//! Not here: how it is shown. Nothing is decided by it.

use std::collections::BTreeMap;

use vmm_broker::GpuPeer;

/// Most bytes of the words for what is between two GPUs.
const MOST_WORDS: usize = 48;

/// What a tenant's worker has said so far.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    /// The GPUs, in the order in which the worker was told of them.
    gpus: Vec<String>,
    /// By accessor and owner.
    known: BTreeMap<(u16, u16), GpuPeer>,
}

impl Peers {
    /// Of a worker that is told of these GPUs and has said nothing.
    pub(crate) fn of<'a>(gpus: impl Iterator<Item = &'a str>) -> Self {
        Self { gpus: gpus.map(str::to_owned).collect(), known: BTreeMap::new() }
    }

    /// Takes what the worker says.
    pub(crate) fn hear(&mut self, peers: Vec<GpuPeer>) {
        for mut peer in peers {
            let is_there = |gpu: u16| usize::from(gpu) < self.gpus.len();
            if peer.accessor == peer.owner || !is_there(peer.accessor) || !is_there(peer.owner) {
                continue;
            }
            peer.link = peer.link.filter(|words| is_plain(words));
            self.known.insert((peer.accessor, peer.owner), peer);
        }
    }

    /// How one GPU reaches another, if the worker has said so.
    pub(crate) fn get(&self, accessor: &str, owner: &str) -> Option<&GpuPeer> {
        let number = |which: &str| u16::try_from(self.gpus.iter().position(|gpu| gpu == which)?).ok();
        self.known.get(&(number(accessor)?, number(owner)?))
    }
}

fn is_plain(words: &str) -> bool {
    (1..=MOST_WORDS).contains(&words.len()) && words.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(accessor: u16, owner: u16, link: &str) -> GpuPeer {
        GpuPeer { accessor, owner, access: true, atomics: true, rank: 0, link: Some(link.into()) }
    }

    #[test]
    fn only_pairs_that_there_are_count() {
        let mut peers = Peers::of(["a", "b"].into_iter());
        peers.hear(vec![peer(0, 0, "x"), peer(0, 2, "x"), peer(2, 1, "x"), peer(u16::MAX, 0, "x")]);
        assert!(peers.known.is_empty());
        peers.hear(vec![peer(1, 0, "x"); GpuPeer::MOST]);
        peers.hear(vec![peer(1, 0, "y")]);
        assert_eq!((peers.known.len(), peers.get("b", "a")), (1, Some(&peer(1, 0, "y"))));
        assert_eq!([peers.get("a", "b"), peers.get("a", "a"), peers.get("c", "a")], [None; 3]);
    }

    #[test]
    fn words_are_those_that_fit_on_a_line() {
        let mut peers = Peers::of(["a", "b"].into_iter());
        let mut heard = |words: &str| {
            peers.hear(vec![peer(0, 1, words)]);
            peers.get("a", "b").and_then(|peer| peer.link.clone())
        };
        assert_eq!(heard("PCIe (PIX)").as_deref(), Some("PCIe (PIX)"));
        assert!(heard(&"x".repeat(MOST_WORDS)).is_some());
        for words in ["", "a\nb", "\u{1b}[2J", "a\tb", "\u{e4}", "\u{202e}x", &"x".repeat(MOST_WORDS + 1)] {
            assert_eq!(heard(words), None, "{words:?}");
        }
    }
}
