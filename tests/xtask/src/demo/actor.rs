//! One who takes part in the second act: `pgctl act`, in a process of the host or in a guest, ordered about from here.
//!
//! Orders and answers are lines: over pipes to a process, over a serial port to a guest.
//!
//! Not here: which orders, and what should come of them.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Pid;
use serde_json::Value;

use super::daemon::Daemon;
use super::programs::Programs;
use crate::guest::Guest;

/// How long an order may take; the longest are bounded by deadlines of the device, well below.
const PATIENCE: Duration = Duration::from_secs(120);

/// Somebody who carries out orders.
pub struct Actor {
    /// The tenant whose device it has.
    pub tenant: String,
    /// What it said when it was ready.
    pub ready: Value,
    orders: Box<dyn Write + Send>,
    answers: Receiver<String>,
    body: Body,
}

enum Body {
    Process(Process),
    Guest(Box<Guest>),
}

/// Killed when it is dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only for a process that has already been waited for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Actor {
    /// Starts one in a process, on the tenant's socket, and waits until it is ready.
    ///
    /// # Errors
    /// When it does not start.
    pub fn in_process(programs: &Programs, daemon: &Daemon, tenant: &str) -> Result<Self> {
        let mut command = programs.command("pgctl-no-vm");
        command.arg("--device").arg(daemon.tenant_socket(tenant)).arg("act");
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("Cannot start an actor")?;
        let (orders, answers) = child.stdin.take().zip(child.stdout.take()).context("An actor has no pipes")?;
        Self::new(tenant, Box::new(orders), answers, Body::Process(Process(child)))
    }

    /// Takes over the one in a guest whose serial port this is, and waits until it is ready.
    ///
    /// # Errors
    /// When it does not speak, or the port cannot be used.
    pub fn in_guest(tenant: &str, port: UnixStream, guest: Guest) -> Result<Self> {
        let answers = port.try_clone().context("Cannot use a guest's serial port")?;
        Self::new(tenant, Box::new(port), answers, Body::Guest(Box::new(guest)))
    }

    fn new(
        tenant: &str,
        orders: Box<dyn Write + Send>,
        answers: impl Read + Send + 'static,
        body: Body,
    ) -> Result<Self> {
        let (sender, lines) = channel();
        thread::spawn(move || {
            let lines = BufReader::new(answers).lines().map_while(Result::ok);
            lines.map_while(|line| sender.send(line).ok()).for_each(drop);
        });
        let mut actor = Self { tenant: tenant.to_owned(), ready: Value::Null, orders, answers: lines, body };
        actor.ready = actor.answer("ready")?;
        Ok(actor)
    }

    /// The process that it is, or QEMU's.
    #[must_use]
    pub fn process(&self) -> Pid {
        match &self.body {
            Body::Process(process) => Pid::from_child(&process.0),
            Body::Guest(guest) => guest.process(),
        }
    }

    /// Gives one order and waits until it has been carried out. Answers what came of it.
    ///
    /// # Errors
    /// When it cannot be carried out; the message says why.
    pub fn order(&mut self, order: &str) -> Result<Value> {
        let sent = writeln!(self.orders, "{order}").and_then(|()| self.orders.flush());
        sent.with_context(|| format!("Tenant {}'s actor takes no orders", self.tenant))?;
        self.answer(order)
    }

    fn answer(&mut self, order: &str) -> Result<Value> {
        let line = self.line().with_context(|| format!("Tenant {}'s actor did not answer {order:?}", self.tenant))?;
        let answer: Value = serde_json::from_str(&line)
            .with_context(|| format!("Tenant {}'s actor answered {order:?} with {line:?}", self.tenant))?;
        ensure!(
            answer["order"] == order,
            "Tenant {}'s actor answered something else than {order:?}: {line}",
            self.tenant
        );
        ensure!(answer["ok"] == true, "Tenant {}'s actor could not {order:?}: {}", self.tenant, text(&answer["error"]));
        Ok(answer)
    }

    fn line(&mut self) -> Result<String> {
        let why = match self.answers.recv_timeout(PATIENCE) {
            Ok(line) => return Ok(line.trim_end().to_owned()),
            Err(RecvTimeoutError::Disconnected) => "It has gone".to_owned(),
            Err(RecvTimeoutError::Timeout) => format!("{} s were not enough", PATIENCE.as_secs()),
        };
        match &mut self.body {
            Body::Process(_) => bail!("{why}"),
            Body::Guest(guest) => bail!("{why}; its guest's last lines:\n{}", guest.last_lines()),
        }
    }

    /// Ends it, and the guest that it is in; answers the complaints of the guest's kernel.
    ///
    /// # Errors
    /// When it does not end well.
    pub fn end(mut self) -> Result<Vec<String>> {
        self.order("end")?;
        let mut complaints = Vec::new();
        if matches!(self.body, Body::Guest(_)) {
            loop {
                match self.line().with_context(|| format!("Tenant {}'s guest did not end", self.tenant))? {
                    line if line == DONE => break,
                    line => complaints.push(line),
                }
            }
        }
        match self.body {
            Body::Process(ref mut process) => {
                let status = process.0.wait().context("Cannot wait for an actor")?;
                ensure!(status.success(), "Tenant {}'s actor ended with {status}", self.tenant);
            }
            Body::Guest(guest) => {
                guest.finish()?;
                return Ok(complaints);
            }
        }
        Ok(complaints)
    }
}

/// What a guest's script says last.
pub const DONE: &str = "done";

/// A string as it is, anything else as JSON.
#[must_use]
pub fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
