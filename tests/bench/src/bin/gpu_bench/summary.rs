//! What a run says of Peergate's targets: ratios between rows of the same run.
//!
//! Not here: judging them.

use crate::report::{Run, size};

/// Prints the ratios that there are rows for.
pub(crate) fn print(run: &Run) {
    let lens = |part: &str, case: &str| {
        let of = run.rows.iter().filter(|row| row.part == part && row.case == case && row.who == "direct");
        of.map(|row| row.len).collect::<Vec<_>>()
    };
    for case in ["out", "in"] {
        for len in lens("latency", case) {
            let of = |who| run.median("latency", case, len, who);
            if let (Some(direct), Some(bare)) = (of("direct"), of("bare")) {
                println!(
                    "latency  {case:<5} {:>8}: {direct:.2} us, {:+.2} us beside the bare call",
                    size(len),
                    direct - bare
                );
            }
        }
    }
    for case in ["out", "in", "both"] {
        for len in lens("transfer", case) {
            let of = |who| run.median("transfer", case, len, who);
            let Some(direct) = of("direct") else { continue };
            let ratio = |who| of(who).map_or(f64::NAN, |rival| direct / rival);
            println!(
                "transfer {case:<5} {:>8}: {direct:>7.2} GB/s, {:>5.1} % of the bare call; {:>6.2} x pageable, {:>6.2} x pinned, {:>5.2} x fair",
                size(len),
                100.0 * ratio("bare"),
                ratio("pageable"),
                ratio("pinned"),
                ratio("fair")
            );
        }
    }
    for case in ["one way", "both ways"] {
        for len in lens("peer latency", case) {
            let of = |who| run.median("peer latency", case, len, who).unwrap_or(f64::NAN);
            println!(
                "peer latency {case:<9} {:>8}: {:>9.2} us, {:+.2} us beside the bare call ({:+.2} us asleep); driver {:.2} us, fair {:.2} us",
                size(len),
                of("direct"),
                of("direct") - of("bare"),
                of("direct, sleep") - of("bare"),
                of("driver"),
                of("fair")
            );
        }
    }
    for case in ["one way", "both ways"] {
        for len in lens("peers", case) {
            let of = |who| run.median("peers", case, len, who).unwrap_or(f64::NAN);
            println!(
                "peers {case:<9} {:>8}: {:>7.2} GB/s, {:>5.1} % of the bare call ({:.1} % asleep); {:>6.2} x driver, {:>5.2} x fair",
                size(len),
                of("direct"),
                100.0 * of("direct") / of("bare"),
                100.0 * of("direct, sleep") / of("bare"),
                of("direct") / of("driver"),
                of("direct") / of("fair")
            );
        }
    }
    for case in ["to 2", "to 4", "to 8"] {
        for len in lens("scatter", case) {
            let of = |who| run.median("scatter", case, len, who);
            let Some(direct) = of("direct") else { continue };
            let ratio = |who| of(who).map_or(f64::NAN, |rival| direct / rival);
            println!(
                "scatter  {case:<5} {:>8}: {direct:>7.2} GB/s; {:>6.2} x pageable, {:>6.2} x pinned, {:>5.2} x fair",
                size(len),
                ratio("pageable"),
                ratio("pinned"),
                ratio("fair")
            );
        }
    }
    for case in ["radius 5", "radius 10", "radius 20"] {
        for len in lens("pipeline", case) {
            let of = |who| run.median("pipeline", case, len, who).unwrap_or(f64::NAN);
            let less = |who| 100.0 * (1.0 - of("direct") / of(who));
            println!(
                "pipeline {case}: {:.1} ms, {:.0} % of it in the kernel; {:.1} % less than pageable ({:.0} % in its kernel), {:.1} % less than pinned, {:.1} % less than fair",
                of("direct"),
                100.0 * of("compute") / of("direct"),
                less("pageable"),
                100.0 * of("compute") / of("pageable"),
                less("pinned"),
                less("fair")
            );
        }
    }
    for len in lens("energy", "out") {
        let of = |who| run.median("energy", "out", len, who).unwrap_or(f64::NAN);
        let less = |who| 100.0 * (1.0 - of("direct") / of(who));
        println!(
            "energy   out   {:>8}: {:.2} J/GB; {:.0} % less than pageable, {:.0} % less than pinned, {:.0} % less than fair",
            size(len),
            of("direct"),
            less("pageable"),
            less("pinned"),
            less("fair")
        );
    }
}
