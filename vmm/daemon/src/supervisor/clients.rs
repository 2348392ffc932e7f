//! The operators that are connected: a bounded number, the one that has been silent longest making room for the newest.
//!
//! Not here: what they are answered.

use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;

use event_manager::{EventOps, EventSet, Events};
use rustix::fd::AsFd;
use vmm_control::{Connection, Interest, Reply, Request};

/// Most operators at a time.
const MAX_CLIENTS: usize = 16;

/// Connections, each with a number that tells its events apart; who was heard last comes last.
#[derive(Debug, Default)]
pub(crate) struct Clients {
    connections: Vec<(u32, Connection)>,
    next: u32,
}

impl Clients {
    /// Takes a client that has just connected; events carry `base` plus its number.
    pub(crate) fn add(&mut self, stream: UnixStream, base: u32, ops: &mut EventOps<'_>) -> anyhow::Result<()> {
        if self.connections.len() >= MAX_CLIENTS {
            let silent = self.connections.remove(0);
            forget(&silent.1, ops);
            tracing::debug!("Too many operators are connected; the one that was silent longest goes");
        }
        let connection = Connection::new(stream)?;
        // Numbers come again after 2^16 clients, long after the earlier one's events.
        let number = self.next & 0xffff;
        self.next = self.next.wrapping_add(1);
        ops.add(Events::with_data_raw(raw(&connection), base + number, EventSet::IN))?;
        self.connections.push((number, connection));
        Ok(())
    }

    /// Lets a client go on.
    pub(crate) fn advance(
        &mut self,
        number: u32,
        base: u32,
        ops: &mut EventOps<'_>,
        answer: impl FnOnce(Request) -> Reply,
    ) {
        let Some(index) = self.connections.iter().position(|(known, _)| *known == number) else { return };
        let (_, mut connection) = self.connections.remove(index);
        let waits_for = match connection.advance(answer) {
            Interest::Read => EventSet::IN,
            Interest::Write => EventSet::OUT,
            Interest::Close => EventSet::empty(),
        };
        let again = Events::with_data_raw(raw(&connection), base + number, waits_for);
        if waits_for.is_empty() || ops.modify(again).is_err() {
            forget(&connection, ops);
        } else {
            self.connections.push((number, connection));
        }
    }
}

fn raw(connection: &Connection) -> RawFd {
    connection.as_fd().as_raw_fd()
}

/// The loop must forget a descriptor before it is closed.
fn forget(connection: &Connection, ops: &mut EventOps<'_>) {
    if let Err(error) = ops.remove(Events::empty_raw(raw(connection))) {
        tracing::error!(%error, "Cannot forget an operator's connection");
    }
}
