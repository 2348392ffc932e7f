//! `pgctl run`: a file through the FPGA's cipher.
//!
//! Not here: the job itself ([`crate::job`]).

use std::io::BufReader;
use std::path::Path;

use anyhow::Result;
use peergate_guest::{Driver, Session};
use serde_json::{Value, json};

use super::files::{Output, open_input};
use crate::args::RunArgs;
use crate::console::{Console, moved_json, moved_text, with};
use crate::job::Job;
use crate::pattern::{Compare, Tee};

/// Encrypts a file, and compares with the CPU if asked to.
pub(crate) fn run(driver: &dyn Driver, args: &RunArgs, console: &mut Console<'_>) -> Result<bool> {
    let (mut input, len) = open_input(&args.file)?;
    let session = Session::open(driver)?;
    let (fpga, gpu) = (session.endpoint(&args.on)?, session.endpoint(&args.via)?);
    let cipher = args.cipher();
    let job = Job { session: &session, gpu: &gpu, fpga: &fpga, cipher, meters: console.meters() };
    let mut output = Output::new(&args.out, Some(&args.file))?;
    let mut wrong = None;
    let steps = if args.verify {
        let mut compare = Compare::new(cipher.over(BufReader::new(open_input(&args.file)?.0)));
        let steps = job.run(&mut input, len, &mut Tee(&mut output, &mut compare))?;
        wrong = compare.first_difference();
        steps
    } else {
        job.run(&mut input, len, &mut output)?
    };
    output.finish()?;
    for step in &steps {
        console.say(
            &format!("{:<12} {}", step.name, moved_text(&step.moved)),
            &with(json!({"step": step.name}), moved_json(&step.moved)),
        )?;
    }
    let verdict = verdict(&args.out, len, args.verify, wrong);
    console.say(&verdict.0, &verdict.1)?;
    Ok(wrong.is_none())
}

fn verdict(out: &Path, len: u64, verified: bool, wrong: Option<u64>) -> (String, Value) {
    let place = out.display();
    let text = match (verified, wrong) {
        (_, Some(offset)) => format!("{place} is WRONG: byte {offset} differs from what the CPU computes"),
        (true, None) => format!("{place}: {len} bytes, equal to what the CPU computes"),
        (false, None) => format!("{place}: {len} bytes"),
    };
    let equal = verified.then_some(wrong.is_none());
    (text, json!({"out": out, "bytes": len, "verified": equal, "first_difference": wrong}))
}
