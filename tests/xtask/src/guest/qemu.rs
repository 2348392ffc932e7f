//! One QEMU process and the guest in it: the command line, the console as lines, the time limit, the end.
//!
//! The guest's memory is a shared memory file, as vhost-user needs it; devices are whatever the caller adds. The serial console is
//! QEMU's standard output. QEMU is killed by its own handle when the limit passes or [`Guest`] is dropped, and ends by itself if
//! the thread that started it dies first. No monitor is opened; a caller that wants QMP adds it.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::ops::ControlFlow;
use std::path::Path;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::Pid;
use tempfile::NamedTempFile;

use super::accel::{self, Accel};
use super::initramfs::Initramfs;
use crate::kit::Kit;

/// How much of the console an error shows.
const TAIL: usize = 30;

/// The machine a guest gets.
#[derive(Debug, Clone)]
pub struct GuestSpec {
    /// Its root file system.
    pub initramfs: Initramfs,
    /// Further arguments of QEMU (devices, character devices).
    pub qemu_args: Vec<OsString>,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Virtual processors.
    pub smp: u32,
    /// Words added to the kernel's command line.
    pub append: String,
    /// From start to power-off; QEMU is killed when it passes.
    pub timeout: Duration,
    /// What runs it; found out when `None`.
    pub accel: Option<Accel>,
}

impl GuestSpec {
    /// A machine of 512 MiB and two processors that has 60 s.
    #[must_use]
    pub fn new(initramfs: Initramfs) -> Self {
        Self {
            initramfs,
            qemu_args: Vec::new(),
            memory_mib: 512,
            smp: 2,
            append: String::new(),
            timeout: Duration::from_secs(60),
            accel: None,
        }
    }

    /// Adds arguments of QEMU.
    #[must_use]
    pub fn args<I: IntoIterator<Item: Into<OsString>>>(mut self, args: I) -> Self {
        self.qemu_args.extend(args.into_iter().map(Into::into));
        self
    }

    /// What QEMU is told to make this machine of a kernel and a written initramfs; its console is the serial port `console`.
    #[must_use]
    pub fn words(&self, accel: Accel, kernel: &Path, initramfs: &Path, console: &str) -> Vec<OsString> {
        let memory = self.memory_mib;
        let text = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        let mut words = text(&["-M", "q35", "-smp", &self.smp.to_string(), "-m", &memory.to_string()]);
        words.extend(text(&accel.qemu_args()));
        words.extend(text(&["-object", &format!("memory-backend-memfd,id=ram,size={memory}M,share=on")]));
        words.extend(text(&["-numa", "node,memdev=ram", "-nodefaults", "-no-user-config", "-display", "none"]));
        words.extend(text(&["-no-reboot", "-serial", console, "-run-with", "exit-with-parent=on"]));
        words.extend(["-kernel".into(), kernel.into(), "-initrd".into(), initramfs.into()]);
        words.extend(text(&["-append", &format!("console=ttyS0 quiet panic=-1 {}", self.append)]));
        words.extend(self.qemu_args.iter().cloned());
        words
    }

    fn accel(&self, kit: &Kit) -> Result<Accel> {
        self.accel.map_or_else(|| Ok(accel::choose(kit)?.accel), Ok)
    }

    fn write_initramfs(&self) -> Result<NamedTempFile> {
        let file = NamedTempFile::with_prefix("peergate-initramfs-").context("Cannot create a temporary file")?;
        self.initramfs.write_to(file.path())?;
        Ok(file)
    }
}

/// A line, and who said it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Said {
    /// The guest, on its serial console from the kernel on; the firmware is silent.
    Guest(String),
    /// QEMU itself, on its standard error.
    Qemu(String),
}

/// How a guest ended.
#[derive(Debug, Clone, Copy)]
pub struct Outcome {
    /// QEMU's exit status; `None` when the caller stopped it.
    pub status: Option<ExitStatus>,
    /// From start to end.
    pub wall: Duration,
}

/// A running guest. Dropping it kills QEMU, and so does the end of the thread that called [`Guest::start`].
#[derive(Debug)]
pub struct Guest {
    child: Child,
    lines: Receiver<Said>,
    tail: VecDeque<String>,
    started: Instant,
    timeout: Duration,
    // Removed with the guest; QEMU reads it while it starts.
    _initramfs: NamedTempFile,
}

/// Boots a guest and runs it until it powers off or `on_line` breaks; `on_line` gets the lines of the guest's console. Blocks.
///
/// # Errors
/// When QEMU cannot be started or fails, or the time limit passes; the message has the last lines.
pub fn boot(kit: &Kit, spec: &GuestSpec, mut on_line: impl FnMut(&str) -> ControlFlow<()>) -> Result<Outcome> {
    let mut guest = Guest::start(kit, spec)?;
    while let Some(said) = guest.said()? {
        if let Said::Guest(line) = said
            && on_line(&line).is_break()
        {
            return Ok(guest.stop());
        }
    }
    guest.finish()
}

/// Boots a guest whose console is this process's terminal, without a time limit. Blocks until it powers off.
///
/// # Errors
/// When QEMU cannot be started or fails; it says why on stderr.
pub fn attend(kit: &Kit, spec: &GuestSpec) -> Result<()> {
    let initramfs = spec.write_initramfs()?;
    // What a person types, an interrupt too, is for the guest.
    let terminal = ["-chardev", "stdio,id=terminal,signal=off"];
    let words = spec.words(spec.accel(kit)?, &kit.kernel_image(), initramfs.path(), "chardev:terminal");
    let status = kit.qemu().args(terminal).args(words).status().context("Cannot start QEMU")?;
    if !status.success() {
        bail!("QEMU failed ({status})");
    }
    Ok(())
}

impl Guest {
    /// Starts QEMU; gives the guest as soon as the process runs.
    ///
    /// # Errors
    /// When the initramfs cannot be written or QEMU cannot be started.
    pub fn start(kit: &Kit, spec: &GuestSpec) -> Result<Self> {
        let initramfs = spec.write_initramfs()?;
        let mut command = kit.qemu();
        command.args(spec.words(spec.accel(kit)?, &kit.kernel_image(), initramfs.path(), "stdio"));
        let started = Instant::now();
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("Cannot start QEMU")?;
        let (sender, lines) = channel();
        if let (Some(console), Some(complaints)) = (child.stdout.take(), child.stderr.take()) {
            read_lines(console, Said::Guest, sender.clone());
            read_lines(complaints, Said::Qemu, sender);
        }
        Ok(Self { child, lines, tail: VecDeque::new(), started, timeout: spec.timeout, _initramfs: initramfs })
    }

    /// Waits for the next line; `None` when QEMU has closed both streams.
    ///
    /// # Errors
    /// When the time limit passes.
    pub fn said(&mut self) -> Result<Option<Said>> {
        let left = self.timeout.saturating_sub(self.started.elapsed());
        match self.lines.recv_timeout(left) {
            Ok(said) => {
                self.keep(&said);
                Ok(Some(said))
            }
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(RecvTimeoutError::Timeout) => bail!(
                "The guest did not power off in {:.0} s; its last lines:\n{}",
                self.timeout.as_secs_f64(),
                self.tail()
            ),
        }
    }

    /// QEMU's process.
    #[must_use]
    pub fn process(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Takes the remaining lines, waits for QEMU's end and checks it.
    ///
    /// # Errors
    /// When QEMU fails or the time limit passes.
    pub fn finish(mut self) -> Result<Outcome> {
        while self.said()?.is_some() {}
        let status = self.child.wait().context("Cannot wait for QEMU")?;
        if !status.success() {
            bail!("QEMU failed ({status}); the last lines:\n{}", self.tail());
        }
        Ok(Outcome { status: Some(status), wall: self.started.elapsed() })
    }

    /// Kills QEMU now.
    #[must_use]
    pub fn stop(self) -> Outcome {
        Outcome { status: None, wall: self.started.elapsed() }
    }

    /// The last lines that it has said by now.
    pub fn last_lines(&mut self) -> String {
        while let Ok(said) = self.lines.try_recv() {
            self.keep(&said);
        }
        self.tail()
    }

    fn keep(&mut self, said: &Said) {
        let (Said::Guest(line) | Said::Qemu(line)) = said;
        self.tail.push_back(line.clone());
        if self.tail.len() > TAIL {
            self.tail.pop_front();
        }
    }

    fn tail(&self) -> String {
        self.tail.iter().map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n")
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Both fail only for a process that has already been waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends each line of `stream` until it ends or nobody listens.
fn read_lines(stream: impl Read + Send + 'static, who: fn(String) -> Said, sender: Sender<Said>) {
    thread::spawn(move || {
        let mut reader = BufReader::new(stream);
        let mut bytes = Vec::new();
        while reader.read_until(b'\n', &mut bytes).is_ok_and(|count| count > 0) {
            let line = String::from_utf8_lossy(&bytes).trim_end().to_owned();
            bytes.clear();
            if sender.send(who(line)).is_err() {
                break;
            }
        }
    });
}
