//! A plot of bandwidth over the length of a transfer, both scales logarithmic, one panel a direction.
//!
//! Not here: measuring.

use std::fmt::Write;

use crate::report::{Row, Run, size};

const WIDTH: f64 = 330.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 52.0;
const TOP: f64 = 64.0;
const GAP: f64 = 40.0;

/// What is drawn.
struct Figure {
    /// Of the rows.
    part: &'static str,
    /// Cases, with what they are called.
    panels: &'static [(&'static str, &'static str)],
    /// Who is drawn, in which colour.
    lines: [(&'static str, &'static str); 5],
    /// Bandwidths at the lower and the upper edge, in GB/s.
    range: (f64, f64),
    what: &'static str,
}

const APERTURES: Figure = Figure {
    part: "transfer",
    panels: &[("out", "GPU to aperture"), ("in", "aperture to GPU"), ("both", "both ways at once")],
    lines: [
        ("direct", "#0b6e4f"),
        ("bare", "#8d99ae"),
        ("fair", "#e09f3e"),
        ("pinned", "#9e2a2b"),
        ("pageable", "#540b0e"),
    ],
    range: (0.1, 200.0),
    what: "apertures are memory of the host that another owner has mapped",
};

const PEERS: Figure = Figure {
    part: "peers",
    panels: &[("one way", "from GPU to GPU"), ("both ways", "both ways at once")],
    lines: [
        ("direct", "#0b6e4f"),
        ("direct, sleep", "#74c69d"),
        ("bare", "#8d99ae"),
        ("driver", "#9e2a2b"),
        ("fair", "#e09f3e"),
    ],
    range: (0.1, 2000.0),
    what: "driver: its own staging without peer access",
};

/// The picture, whole.
pub(crate) fn svg(run: &Run) -> String {
    let figure = if run.rows.iter().any(|row| row.part == PEERS.part) { &PEERS } else { &APERTURES };
    let panels = (1_u8..).zip(figure.panels).last().map_or(0, |(count, _)| count);
    let (all_width, all_height) = (LEFT + f64::from(panels) * (WIDTH + GAP), TOP + HEIGHT + 84.0);
    let mut svg = String::new();
    // Writing to a string does not fail.
    let _ = writeln!(
        svg,
        r#"<svg xmlns="http://www.w3.org/2000/svg" width="{all_width:.0}" height="{all_height:.0}" viewBox="0 0 {all_width:.0} {all_height:.0}" font-family="sans-serif" font-size="12">"#
    );
    let _ = writeln!(svg, r#"<rect width="100%" height="100%" fill="white"/>"#);
    let machine = |key: &str| run.machine.get(key).and_then(|value| value.as_str()).unwrap_or("?");
    let title = format!("{} (driver {}), {}", machine("gpu"), machine("driver"), machine("processor"));
    let _ = writeln!(
        svg,
        r#"<text x="{LEFT}" y="22" font-size="15" font-weight="bold">Bandwidth through Peergate and its rivals</text>"#
    );
    let _ = writeln!(svg, r##"<text x="{LEFT}" y="40" fill="#555">{title}; {}</text>"##, figure.what);
    for (number, panel) in (0_u8..).zip(figure.panels) {
        draw(&mut svg, run, figure, *panel, LEFT + f64::from(number) * (WIDTH + GAP));
    }
    for (number, (who, colour)) in (0_u8..).zip(figure.lines) {
        let (x, y) = (LEFT + f64::from(number) * 130.0, all_height - 18.0);
        let _ = writeln!(svg, r#"<rect x="{x:.1}" y="{:.1}" width="22" height="4" fill="{colour}"/>"#, y - 6.0);
        let _ = writeln!(svg, r#"<text x="{:.1}" y="{y:.1}">{who}</text>"#, x + 28.0);
    }
    svg.push_str("</svg>\n");
    svg
}

fn draw(svg: &mut String, run: &Run, figure: &Figure, (case, name): (&str, &str), left: f64) {
    let is_first = figure.panels[0].0 == case;
    let rows = |who: &str| -> Vec<&Row> {
        run.rows.iter().filter(|row| row.part == figure.part && row.case == case && row.who == who).collect()
    };
    let lens: Vec<f64> = rows("direct").iter().map(|row| log2(row.len)).collect();
    let (Some(first), Some(last)) = (lens.first(), lens.last()) else { return };
    let x = |len: u64| left + (log2(len) - first) / (last - first).max(1.0) * WIDTH;
    let y = |rate: f64| {
        let (low, high) = (figure.range.0.log10(), figure.range.1.log10());
        TOP + HEIGHT - (rate.max(figure.range.0).log10() - low) / (high - low) * HEIGHT
    };
    let _ = writeln!(
        svg,
        r##"<rect x="{left:.1}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>"##
    );
    let _ = writeln!(svg, r#"<text x="{left:.1}" y="{:.1}" font-weight="bold">{name}</text>"#, TOP - 8.0);
    for rate in [0.1, 1.0, 10.0, 100.0, 1000.0].into_iter().filter(|rate| *rate < figure.range.1) {
        let at = y(rate);
        let _ = writeln!(
            svg,
            r##"<line x1="{left:.1}" x2="{:.1}" y1="{at:.1}" y2="{at:.1}" stroke="#ddd"/>"##,
            left + WIDTH
        );
        if is_first {
            let _ = writeln!(svg, r#"<text x="{:.1}" y="{:.1}" text-anchor="end">{rate}</text>"#, left - 6.0, at + 4.0);
        }
    }
    if is_first {
        let _ = writeln!(
            svg,
            r#"<text x="14" y="{0:.1}" transform="rotate(-90 14 {0:.1})" text-anchor="middle">GB/s</text>"#,
            TOP + HEIGHT / 2.0
        );
    }
    for row in rows("direct").iter().step_by(2) {
        let _ = writeln!(
            svg,
            r#"<text x="{:.1}" y="{:.1}" text-anchor="middle">{}</text>"#,
            x(row.len),
            TOP + HEIGHT + 18.0,
            size(row.len)
        );
    }
    for (who, colour) in figure.lines.iter().rev() {
        let points: Vec<_> = rows(who).iter().map(|row| format!("{:.1},{:.1}", x(row.len), y(row.median))).collect();
        let width = if *who == "direct" { 3 } else { 2 };
        let _ = writeln!(
            svg,
            r#"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="{width}"/>"#,
            points.join(" ")
        );
    }
}

#[allow(clippy::cast_precision_loss, reason = "a length is far below 2^52")]
fn log2(len: u64) -> f64 {
    (len as f64).log2()
}
