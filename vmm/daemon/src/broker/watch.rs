//! Who asks what the host's IOMMU has stopped, and the thread that reads the kernel's log for the answer.
//!
//! Each function that a worker has comes with one end of a socket. A packet over it is a question; the answer, eight bytes, is how often the function
//! was stopped since then, counted after everything was read that the log had when the question was seen. Whatever the log may have left out counts as a
//! stop of every function: what the kernel has overwritten before it was read, what it has not said because it had said much, what the IOMMU had no room
//! for. Without a log nobody is answered.
//!
//! Not here: what a line looks like (`hw_vfio`), what is done about it.

use std::collections::VecDeque;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use vmm_broker::Channel;
use vmm_sandbox::{Class, Sandbox};

use crate::role;

/// Room for a record of the log: what kernels before 6.2 had most (`CONSOLE_EXT_LOG_MAX`); later ones have 2048 bytes. The kernel gives no part of one.
const RECORD: usize = 8192;

/// The kernel says no more than so much of faults in 5 s (Linux, `include/linux/ratelimit_types.h`: DEFAULT_RATELIMIT_BURST, DEFAULT_RATELIMIT_INTERVAL),
/// as [`hw_vfio::said`] counts it; a second more is for what is read late.
const SAID_MOST: u32 = 10;
const SAID_WITHIN: Duration = Duration::from_secs(6);

/// The watching thread, from outside.
pub(super) struct Watch {
    news: Sender<News>,
    /// A byte here says that there is news.
    bell: PipeWriter,
}

enum News {
    /// The kernel's log, which does not block.
    Log(OwnedFd),
    Function(Watched),
}

struct Watched {
    address: String,
    socket: OwnedFd,
    count: u64,
}

impl Watch {
    /// Starts the thread. It watches nothing until it has a log.
    pub(super) fn start(sandbox: &Sandbox) -> anyhow::Result<Self> {
        let (news, receiver) = channel();
        let (ear, bell) = io::pipe().context("Cannot make a pipe")?;
        let sandbox = sandbox.clone();
        let run = move || {
            role::confine(&sandbox, Class::Watcher);
            Watcher { news: receiver, ear, log: None, watched: Vec::new(), quiet: Quiet::default() }.run();
        };
        thread::Builder::new().name("watch".into()).spawn(run).context("Cannot start a thread")?;
        Ok(Self { news, bell })
    }

    pub(super) fn log(&mut self, log: OwnedFd) -> anyhow::Result<()> {
        self.tell(News::Log(log))
    }

    /// Watches one more function, until the end that is returned is closed.
    pub(super) fn function(&mut self, address: &str) -> anyhow::Result<OwnedFd> {
        let (ours, theirs) = Channel::pair()?;
        self.tell(News::Function(Watched { address: address.to_owned(), socket: ours.into_fd(), count: 0 }))?;
        Ok(theirs.into_fd())
    }

    fn tell(&mut self, news: News) -> anyhow::Result<()> {
        self.news.send(news).ok().context("The watcher has ended")?;
        self.bell.write_all(&[0]).context("The watcher does not listen")
    }
}

struct Watcher {
    news: Receiver<News>,
    ear: PipeReader,
    log: Option<OwnedFd>,
    watched: Vec<Watched>,
    quiet: Quiet,
}

/// Whether the kernel may keep quiet about faults because it has said so much of them.
#[derive(Default)]
struct Quiet {
    /// What was said lately, and when.
    said: VecDeque<(Instant, u32)>,
    /// At the last look.
    was: bool,
}

impl Quiet {
    fn hear(&mut self, said: u32, now: Instant) {
        if said > 0 {
            self.said.push_back((now, said));
        }
        while self.said.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) > SAID_WITHIN) {
            self.said.pop_front();
        }
    }

    /// Whether anything may have been left out since the last look.
    fn look(&mut self, now: Instant) -> bool {
        self.hear(0, now);
        let is = self.said.iter().map(|(_, said)| said).sum::<u32>() >= SAID_MOST;
        std::mem::replace(&mut self.was, is) || is
    }
}

impl Watcher {
    /// Until the broker's other thread has gone.
    fn run(&mut self) {
        loop {
            let mut fds = vec![PollFd::new(&self.ear, PollFlags::IN)];
            fds.extend(self.watched.iter().map(|watched| PollFd::new(&watched.socket, PollFlags::IN)));
            if let Some(log) = &self.log {
                fds.push(PollFd::new(log, PollFlags::IN));
            }
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return tracing::error!(%error, "Cannot wait for the kernel's log"),
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            drop(fds);
            let asked = self.watched.len();
            if ready.first() == Some(&true) && !self.hear() {
                return;
            }
            let asking = ready.iter().skip(1).take(asked).copied().collect::<Vec<_>>();
            self.answer(&asking);
        }
    }

    /// Takes one thing that is new. False if there will be nothing more.
    fn hear(&mut self) -> bool {
        if self.ear.read_exact(&mut [0]).is_err() {
            return false;
        }
        match self.news.recv() {
            Ok(News::Log(log)) => self.log = Some(log),
            Ok(News::Function(watched)) => self.watched.push(watched),
            Err(_) => return false,
        }
        true
    }

    /// Takes the questions of those that ask, then reads the log, then answers. Whoever has closed the socket is watched no more.
    fn answer(&mut self, asking: &[bool]) {
        let mut gone = Vec::new();
        let mut question = [0; 8];
        for (at, watched) in self.watched.iter().enumerate().filter(|(at, _)| asking.get(*at) == Some(&true)) {
            match recv(&watched.socket, &mut question, RecvFlags::DONTWAIT) {
                Ok((_, 1..)) | Err(Errno::AGAIN | Errno::INTR) => {}
                Ok((_, 0)) | Err(_) => gone.push(at),
            }
        }
        self.read_log();
        for (at, watched) in self.watched.iter().enumerate().filter(|(at, _)| asking.get(*at) == Some(&true)) {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            // Whoever asks more than it listens has answers enough.
            if !matches!(send(&watched.socket, &watched.count.to_le_bytes(), flags), Ok(_) | Err(Errno::AGAIN)) {
                gone.push(at);
            }
        }
        let mut at = 0;
        self.watched.retain(|_| {
            at += 1;
            !gone.contains(&(at - 1))
        });
    }

    /// Reads what the log has, and counts. Without a log nobody is watched.
    fn read_log(&mut self) {
        let Some(log) = &self.log else { return self.watched.clear() };
        let mut record = [0; RECORD];
        loop {
            let error = match rustix::io::read(log.as_fd(), &mut record) {
                Ok(len @ 1..) => {
                    let said = count(&mut self.watched, record.get(..len).unwrap_or_default());
                    self.quiet.hear(said, Instant::now());
                    continue;
                }
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) if self.quiet.look(Instant::now()) => return count_all(&mut self.watched),
                Err(Errno::AGAIN) => return,
                // Records were overwritten before they were read.
                Err(Errno::PIPE) => {
                    count_all(&mut self.watched);
                    continue;
                }
                // A log has no end.
                Ok(_) => Errno::IO,
                Err(error) => error,
            };
            tracing::error!(%error, "The kernel's log cannot be read; real devices move nothing from now on");
            self.watched.clear();
            self.log = None;
            return;
        }
    }
}

/// Nobody knows about any of them.
fn count_all(watched: &mut [Watched]) {
    watched.iter_mut().for_each(|watched| watched.count += 1);
}

/// Counts a record, `PRIORITY,NUMBER,TIME,FLAGS;TEXT`, for the functions that it is about; answers [`hw_vfio::said`] of it. What others than the kernel
/// have written has a facility, which makes the priority more than 7.
fn count(watched: &mut [Watched], record: &[u8]) -> u32 {
    let text = String::from_utf8_lossy(record);
    let Some((head, line)) = text.split_once(';') else { return 0 };
    let is_kernels =
        head.split(',').next().and_then(|priority| priority.parse().ok()).is_some_and(|priority: u32| priority < 8);
    if !is_kernels {
        return 0;
    }
    let line = line.lines().next().unwrap_or_default();
    if hw_vfio::has_lost(line) {
        count_all(watched);
    }
    if let Some(function) = hw_vfio::stopped(line) {
        for watched in watched.iter_mut().filter(|watched| hw_vfio::is_same(function, &watched.address)) {
            watched.count += 1;
            tracing::warn!(function = watched.address, "The IOMMU stopped it: {line}");
        }
    }
    hw_vfio::said(line)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use super::*;

    const FAULT: &[u8] =
        b"3,812,5,-;DMAR: [DMA Write NO_PASID] Request device [01:00.0] fault addr 0x8000000\n SUBSYSTEM=x\n";

    fn watcher(log: OwnedFd) -> (Watcher, Vec<OwnedFd>) {
        let ear = io::pipe().unwrap().0;
        let mut asking = Vec::new();
        let watched = ["0000:01:00.0", "0000:02:00.0"].map(|address| {
            let (ours, theirs) = Channel::pair().unwrap();
            asking.push(theirs.into_fd());
            Watched { address: address.into(), socket: ours.into_fd(), count: 0 }
        });
        let quiet = Quiet::default();
        (Watcher { news: channel().1, ear, log: Some(log), watched: watched.into(), quiet }, asking)
    }

    fn ask(watcher: &mut Watcher, socket: &OwnedFd, at: usize) -> u64 {
        send(socket, &[0], SendFlags::empty()).unwrap();
        watcher.answer(&[at == 0, at == 1]);
        let mut answer = [0; 8];
        assert_eq!(recv(socket, &mut answer, RecvFlags::DONTWAIT).unwrap().1, 8);
        u64::from_le_bytes(answer)
    }

    #[test]
    fn what_the_log_says_before_a_question_is_in_its_answer() {
        // Packets, as the kernel's log has records.
        let (kernel, log) = UnixDatagram::pair().unwrap();
        log.set_nonblocking(true).unwrap();
        let (mut watcher, asking) = watcher(log.into());
        assert_eq!(ask(&mut watcher, &asking[0], 0), 0);
        kernel.send(FAULT).unwrap();
        kernel.send(b"6,813,5,-;usb 1-1: new device").unwrap();
        assert_eq!(ask(&mut watcher, &asking[0], 0), 1);
        assert_eq!(ask(&mut watcher, &asking[1], 1), 0, "the other function");
        kernel.send(&[b"1", FAULT].concat()).unwrap();
        assert_eq!(ask(&mut watcher, &asking[0], 0), 1, "a program wrote that");
        drop(asking);
        watcher.answer(&[true, true]);
        assert!(watcher.watched.is_empty());
    }

    #[test]
    fn without_a_log_nobody_is_answered_any_more() {
        // A log has no end, and this one has.
        let (mut watcher, asking) = watcher(io::pipe().unwrap().0.into());
        send(&asking[0], &[0], SendFlags::empty()).unwrap();
        watcher.answer(&[true, false]);
        assert_eq!(recv(&asking[0], &mut [0; 8], RecvFlags::empty()).unwrap().1, 0, "closed");
        // Nor who comes later.
        let (ours, theirs) = Channel::pair().unwrap();
        watcher.watched.push(Watched { address: "0000:01:00.0".into(), socket: ours.into_fd(), count: 0 });
        send(&theirs, &[0], SendFlags::empty()).unwrap();
        watcher.answer(&[true]);
        assert_eq!(recv(&theirs, &mut [0; 8], RecvFlags::DONTWAIT).unwrap().1, 0, "closed");
    }

    #[test]
    fn what_the_log_may_have_left_out_counts_for_every_function() {
        let (kernel, log) = UnixDatagram::pair().unwrap();
        log.set_nonblocking(true).unwrap();
        let (mut watcher, asking) = watcher(log.into());
        // Each fault comes with a line of its own before it, and the kernel counts a third that it does not print.
        for faults in 1..=3 {
            kernel.send(b"3,811,5,-;DMAR: DRHD: handling fault status reg 2\n").unwrap();
            kernel.send(FAULT).unwrap();
            assert_eq!((ask(&mut watcher, &asking[0], 0), ask(&mut watcher, &asking[1], 1)), (faults, 0));
        }
        // Of the fourth it prints no more than this.
        kernel.send(b"3,811,5,-;DMAR: DRHD: handling fault status reg 2\n").unwrap();
        let (one, other) = (ask(&mut watcher, &asking[0], 0), ask(&mut watcher, &asking[1], 1));
        assert!(one > 3 && other > 0);
        assert!(ask(&mut watcher, &asking[1], 1) > other, "as long as it may keep quiet");
    }

    #[test]
    fn what_the_iommu_had_no_room_for_counts_for_every_function() {
        let (kernel, log) = UnixDatagram::pair().unwrap();
        log.set_nonblocking(true).unwrap();
        let (mut watcher, asking) = watcher(log.into());
        kernel.send(b"3,811,5,-;DMAR: DRHD: handling fault status reg 3\n").unwrap();
        assert_eq!((ask(&mut watcher, &asking[0], 0), ask(&mut watcher, &asking[1], 1)), (1, 1));
        kernel.send(&[b"1", &b"3,811,5,-;DMAR: DRHD: handling fault status reg 3\n"[..]].concat()).unwrap();
        assert_eq!(ask(&mut watcher, &asking[0], 0), 1, "a program wrote that");
    }

    #[test]
    fn what_was_said_long_ago_keeps_nothing_quiet() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut quiet = Quiet::default();
        quiet.hear(SAID_MOST - 1, at(0));
        assert!(!quiet.look(at(0)));
        quiet.hear(1, at(5));
        assert!(quiet.look(at(5)) && quiet.look(at(6)));
        assert!(quiet.look(at(9)), "since the last look");
        assert!(!quiet.look(at(9)));
    }
}
