//! `pgctl act`: a guest's part in a play of several guests, one order at a time, for tests and demos.
//!
//! Whoever stages the play writes one order a line and reads one JSON object a line ([`ORDERS`] is the whole vocabulary). What is ordered is
//! done on the open device through the library, as any program would; an order that fails answers why, and the next one is taken.
//!
//! `held` keeps data and reads it back, `forge` names what belongs to others, `load` measures and floods, `copies` goes on until the device
//! loses its state, `recover` begins anew after that.
//!
//! Not here: what should come of it. The one who gives the orders judges the answers.

mod copies;
mod forge;
mod held;
mod load;
mod recover;

use std::io::{self, BufRead, Write};

use anyhow::{Context, Result, bail};
use clap::{Parser, ValueEnum};
use peergate_guest::{Access, Driver, EndpointInfo, EndpointKind, Session};
use serde_json::{Value, json};

use crate::args::ActArgs;
use crate::chain;
use crate::console::with;
use copies::Copies;
use held::Held;
use load::Flood;

/// The orders, for the help text.
pub const ORDERS: &str = "\
Orders, one a line on standard input; each is answered with one JSON object a line, whose \"ok\" says whether it was carried out.
The first line says that the device is open. Numbers may be decimal or 0x and hexadecimal.
  hold BYTES SEED     open the device anew and keep BYTES of the GPU's and of the FPGA's memory, filled with the pattern of
                      SEED; answers addresses, handles and the hash of each
  hash                read what is held back and hash it (64 bits, no cryptography)
  shadow ADDRESS      in an open of its own, map own memory where ADDRESS lies, write there, and read it back
  forge KIND NUMBER   name something of somebody else's: an endpoint, a handle, an address, a domain; answers what came of it
  latency COUNT       time single copies of 4 KiB from GPU to FPGA; answers p50, p99 and max in ns
  flood start|stop    from many threads: control requests, copies that fault, large copies; stop answers how each ended
  copies start        keep small and large copies in flight, the large ones checked, until one does not end OK
  copies more COUNT   wait until COUNT more have ended OK
  copies lost         wait until one did not end OK and all the others have ended; answers how
  copies stop         stop; answers how they ended
  recover             use what was held before the device lost its state, then open it anew and prove that it works
  end                 end the program";

/// Most bytes that an actor holds of one endpoint.
const MOST_HELD: u64 = 64 << 20;
/// Most copies that one order times or waits for.
const MOST_COPIES: u64 = 1 << 20;
const PAGE: u64 = 4096;

/// Makes the driver act in another domain than its own, which no program can, from now on; `None` takes that back.
pub type ActAs<'a> = &'a dyn Fn(Option<u32>) -> io::Result<()>;

/// What an actor acts with.
#[derive(Clone, Copy)]
pub struct Stage<'a> {
    /// The device.
    pub driver: &'a dyn Driver,
    /// A driver that lies about its domains, where there is one.
    pub act_as: Option<ActAs<'a>>,
}

#[derive(Debug, Parser)]
#[command(no_binary_name = true, disable_help_flag = true, disable_help_subcommand = true)]
enum Order {
    Hold {
        #[arg(value_parser = number)]
        bytes: u64,
        #[arg(value_parser = number)]
        seed: u64,
    },
    Hash,
    Shadow {
        #[arg(value_parser = number)]
        address: u64,
    },
    Forge {
        kind: Foreign,
        #[arg(value_parser = number)]
        number: u64,
    },
    Latency {
        #[arg(value_parser = number)]
        count: u64,
    },
    #[command(subcommand)]
    Flood(FloodOrder),
    #[command(subcommand)]
    Copies(CopiesOrder),
    Recover,
    End,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Foreign {
    Endpoint,
    Handle,
    Address,
    Domain,
}

#[derive(Clone, Copy, Debug, Parser)]
enum FloodOrder {
    Start,
    Stop,
}

#[derive(Clone, Copy, Debug, Parser)]
enum CopiesOrder {
    Start,
    More {
        #[arg(value_parser = number)]
        count: u64,
    },
    Lost,
    Stop,
}

/// `pgctl act`.
pub(crate) fn command(driver: &dyn Driver, args: &ActArgs) -> Result<bool> {
    let write = |domain: Option<u32>| match &args.domain_file {
        Some(file) => std::fs::write(file, domain.unwrap_or(0).to_string()),
        None => Ok(()),
    };
    let act_as = args.domain_file.is_some().then_some(&write as ActAs<'_>);
    serve(Stage { driver, act_as }, &mut io::stdin().lock(), &mut io::stdout())?;
    Ok(true)
}

/// Takes orders until `end` or the end of `orders`.
///
/// # Errors
/// If the device cannot be opened, or orders and answers cannot be read and written.
pub fn serve(stage: Stage<'_>, orders: &mut dyn BufRead, answers: &mut dyn Write) -> Result<()> {
    let mut actor = Actor::new(stage)?;
    answer(answers, &with(json!({"order": "ready", "ok": true}), actor.open.facts()))?;
    for line in orders.lines() {
        let line = line.context("Could not read an order")?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let head = json!({"order": words.join(" ")});
        let done = Order::try_parse_from(&words).map_err(|error| first_line(&error));
        let done = match done {
            Ok(Order::End) => return answer(answers, &with(head, json!({"ok": true}))),
            Ok(order) => actor.carry_out(&order).map_err(|error| chain(&error)),
            Err(error) => Err(error),
        };
        let tail = match done {
            Ok(value) => with(json!({"ok": true}), value),
            Err(error) => json!({"ok": false, "error": error}),
        };
        answer(answers, &with(head, tail))?;
    }
    Ok(())
}

fn answer(answers: &mut dyn Write, value: &Value) -> Result<()> {
    writeln!(answers, "{value}").and_then(|()| answers.flush()).context("Could not write an answer")
}

fn first_line(error: &clap::Error) -> String {
    error.to_string().lines().next().unwrap_or("no such order").to_owned()
}

fn number(text: &str) -> std::result::Result<u64, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|error| format!("\"{text}\" is not a number: {error}"))
}

/// An open of the device with what every order uses: a GPU and an FPGA that reach each other.
struct Open {
    session: Session,
    gpu: EndpointInfo,
    fpga: EndpointInfo,
    endpoints: Vec<EndpointInfo>,
}

impl Open {
    fn new(driver: &dyn Driver) -> Result<Self> {
        let session = Session::open(driver)?;
        let endpoints = session.endpoints()?;
        let first = |kind: EndpointKind| endpoints.iter().find(|endpoint| endpoint.kind == Some(kind)).cloned();
        let (Some(gpu), Some(fpga)) = (first(EndpointKind::Gpu), first(EndpointKind::Fpga)) else {
            bail!("An actor needs a GPU and an FPGA; the device has {} endpoints", endpoints.len());
        };
        session.peer_enable(gpu.number, fpga.number, Access::WRITE)?;
        session.peer_enable(fpga.number, gpu.number, Access::WRITE)?;
        Ok(Self { session, gpu, fpga, endpoints })
    }

    /// The numbers that others could try to forge, and those that tell one session from the next.
    fn facts(&self) -> Value {
        let limits = self.session.limits();
        json!({
            "process": std::process::id(),
            "session": limits.session,
            "domain": limits.domain,
            "endpoints": self.endpoints.iter().map(|endpoint| endpoint.number).collect::<Vec<_>>(),
        })
    }
}

struct Actor<'a> {
    stage: Stage<'a>,
    flood: Option<Flood>,
    copies: Option<Copies>,
    held: Option<Held>,
    open: Open,
}

impl<'a> Actor<'a> {
    fn new(stage: Stage<'a>) -> Result<Self> {
        let open = Open::new(stage.driver)?;
        Ok(Self { stage, open, flood: None, copies: None, held: None })
    }

    fn carry_out(&mut self, order: &Order) -> Result<Value> {
        match *order {
            Order::Hold { bytes, seed } => {
                (self.copies, self.held) = (None, None);
                self.open = Open::new(self.stage.driver)?;
                let held = self.held.insert(Held::new(&self.open, bytes.clamp(1, MOST_HELD))?);
                Ok(with(self.open.facts(), held.fill(&self.open, seed)?))
            }
            Order::Hash => self.held.as_ref().context("Nothing is held")?.hash(&self.open),
            Order::Shadow { address } => held::shadow(self.stage.driver, address),
            Order::Forge { kind, number } => forge::forge(self.stage, &self.open, kind, number),
            Order::Latency { count } => load::latency(&self.open, count.clamp(1, MOST_COPIES)),
            Order::Flood(FloodOrder::Start) => {
                self.flood = Some(Flood::start(self.stage.driver)?);
                Ok(json!({}))
            }
            Order::Flood(FloodOrder::Stop) => Ok(self.flood.take().context("There is no flood")?.stop()),
            Order::Copies(CopiesOrder::Start) => {
                self.copies = Some(Copies::start(&self.open)?);
                Ok(json!({}))
            }
            Order::Copies(CopiesOrder::More { count }) => self.copies()?.more(count.min(MOST_COPIES)),
            Order::Copies(CopiesOrder::Lost) => self.copies()?.lost(),
            Order::Copies(CopiesOrder::Stop) => Ok(self.copies.take().context("There are no copies")?.stop()),
            Order::Recover => recover::recover(self),
            Order::End => Ok(json!({})),
        }
    }

    fn copies(&self) -> Result<&Copies> {
        self.copies.as_ref().context("There are no copies")
    }
}
