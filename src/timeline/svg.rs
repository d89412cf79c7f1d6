//! Timelines as a self-contained picture: two lanes a rank, hidden and exposed communication told apart.

use std::fmt::Write;
use std::time::Duration;

use super::metrics::{Totals, Union};
use super::{Lane, Span};

const WIDTH: f64 = 1100.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 190.0;
const LANE: f64 = 15.0;
const RANK: f64 = 2.0 * LANE + 9.0;
const TITLE: f64 = 30.0;
const AXIS: f64 = 30.0;
const LEGEND: f64 = 34.0;

const PAPER: &str = "#ffffff";
const INK: &str = "#24292f";
const FAINT: &str = "#6e7781";
const GRID: &str = "#eaeef2";
const HIDDEN: &str = "#f2b84b";
const EXPOSED: &str = "#d1495b";

/// Fill colours of compute spans, by the order in which their names first appear.
const COMPUTE: [&str; 5] = ["#3a6ea5", "#57a0a0", "#7a6bb0", "#5c8a4a", "#8d7966"];

/// One timeline as an SVG picture.
pub fn svg(title: &str, spans: &[Span]) -> String {
    stacked(&[(title, spans)])
}

/// Several timelines under each other on one time scale, each beginning at its own first span.
///
/// Every rank has a compute lane (waits are hatched) above a communication lane, where what ran under compute and what
/// did not are told apart; its numbers stand at the right.
pub fn stacked(timelines: &[(&str, &[Span])]) -> String {
    let elapsed = |spans: &[Span]| end(spans).saturating_sub(start(spans));
    let longest = timelines.iter().map(|(_, spans)| elapsed(spans)).max().unwrap_or_default();
    let scale = (WIDTH - LEFT - RIGHT) / longest.as_secs_f64().max(1e-9);
    let ranks = |spans: &[Span]| spans.iter().map(|span| span.rank + 1).max().unwrap_or(0);
    let height: f64 =
        timelines.iter().map(|(_, spans)| TITLE + ranks(spans) as f64 * RANK + AXIS).sum::<f64>() + LEGEND;

    let mut names: Vec<&str> = Vec::new();
    for span in timelines.iter().flat_map(|(_, spans)| spans.iter()).filter(|span| span.lane == Lane::Compute) {
        if !names.contains(&span.name) {
            names.push(span.name);
        }
    }
    let mut picture = Picture { text: String::new(), scale, names };
    picture.open(height);
    let mut top = 0.0;
    for (title, spans) in timelines {
        picture.timeline(title, spans, ranks(spans), top, longest);
        top += TITLE + ranks(spans) as f64 * RANK + AXIS;
    }
    picture.legend(top + 6.0);
    picture.text.push_str("</svg>\n");
    picture.text
}

fn start(spans: &[Span]) -> Duration {
    spans.iter().map(|span| span.start).min().unwrap_or_default()
}

fn end(spans: &[Span]) -> Duration {
    spans.iter().map(|span| span.end).max().unwrap_or_default()
}

/// Whether two spans overlap, or all but touch.
fn touches(a: &Span, b: &Span) -> bool {
    let slack = Duration::from_micros(200);
    b.start <= a.end + slack && a.start <= b.end + slack
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

struct Picture<'a> {
    text: String,
    scale: f64,
    names: Vec<&'a str>,
}

impl Picture<'_> {
    /// Appends; writing to a string does not fail.
    fn put(&mut self, arguments: std::fmt::Arguments<'_>) {
        let _ = self.text.write_fmt(arguments);
        self.text.push('\n');
    }

    fn open(&mut self, height: f64) {
        self.put(format_args!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
             font-family=\"-apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif\" font-size=\"11\" fill=\"{INK}\">"
        ));
        self.put(format_args!(
            "<defs><pattern id=\"wait\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
             <rect width=\"6\" height=\"6\" fill=\"#f3f4f6\"/><rect width=\"1.6\" height=\"6\" fill=\"#b8bfc7\"/></pattern></defs>\
             <rect width=\"100%\" height=\"100%\" rx=\"6\" fill=\"{PAPER}\"/>"
        ));
    }

    fn timeline(&mut self, title: &str, spans: &[Span], ranks: usize, top: f64, longest: Duration) {
        let origin = start(spans);
        let bottom = top + TITLE + ranks as f64 * RANK;
        self.put(format_args!(
            "<text x=\"{LEFT}\" y=\"{}\" font-size=\"13\" font-weight=\"600\">{} <tspan font-weight=\"400\" fill=\"{FAINT}\">{:.1} ms</tspan></text>",
            top + 20.0,
            escaped(title),
            ms(end(spans).saturating_sub(origin)),
        ));
        self.axis(top + TITLE, bottom, longest);
        for rank in 0..ranks {
            self.rank(spans, rank, origin, top + TITLE + rank as f64 * RANK);
        }
    }

    /// Grid lines and numbers at a round step.
    fn axis(&mut self, top: f64, bottom: f64, longest: Duration) {
        let longest = ms(longest).max(1e-6);
        let power = 10f64.powf((longest / 8.0).log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|step| longest / step <= 9.0);
        let step = step.unwrap_or(longest);
        let mut at = 0.0;
        while at <= longest * 1.0001 {
            let x = LEFT + at / 1e3 * self.scale;
            self.put(format_args!(
                "<path d=\"M{x:.1} {top:.1}V{bottom:.1}\" stroke=\"{GRID}\"/>\
                 <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-size=\"10\" fill=\"{FAINT}\">{}{}</text>",
                bottom + 12.0,
                (at * 1e6).round() / 1e6,
                if at == 0.0 { " ms" } else { "" },
            ));
            at += step;
        }
    }

    fn rank(&mut self, spans: &[Span], rank: usize, origin: Duration, top: f64) {
        let label = top + LANE + 4.0;
        self.put(format_args!("<text x=\"{}\" y=\"{label:.1}\" text-anchor=\"end\">rank {rank}</text>", LEFT - 8.0));
        let own = || spans.iter().filter(|span| span.rank == rank);
        for span in own().filter(|span| span.lane == Lane::Wait) {
            self.block(span, origin, top, "url(#wait)", None);
        }
        for span in own().filter(|span| span.lane == Lane::Compute) {
            let index = self.names.iter().position(|name| *name == span.name).unwrap_or(0);
            self.block(span, origin, top, COMPUTE[index % COMPUTE.len()], Some("#ffffff"));
        }
        // The messages of one collective overlap and touch each other: drawn as one.
        let mut collectives: Vec<Span> = Vec::new();
        for span in own().filter(|span| span.lane == Lane::Communication) {
            match collectives.iter_mut().find(|known| known.name == span.name && touches(known, span)) {
                Some(known) => {
                    known.start = known.start.min(span.start);
                    known.end = known.end.max(span.end);
                    known.bytes += span.bytes;
                }
                None => collectives.push(*span),
            }
        }
        for span in &collectives {
            self.block(span, origin, top + LANE + 2.0, HIDDEN, Some(INK));
        }
        let union = |lane| Union::new(own().filter(move |span| span.lane == lane).map(|span| (span.start, span.end)));
        for (start, end) in union(Lane::Communication).without(&union(Lane::Compute)).intervals() {
            self.put(format_args!(
                "<rect x=\"{:.2}\" y=\"{:.1}\" width=\"{:.2}\" height=\"4\" fill=\"{EXPOSED}\"/>",
                self.x(*start, origin),
                top + 2.0 * LANE - 2.0,
                (*end - *start).as_secs_f64() * self.scale,
            ));
        }
        let totals = Totals::of_rank(spans, rank);
        let x = WIDTH - RIGHT + 14.0;
        match totals.hidden_percent() {
            Some(hidden) => self.put(format_args!(
                "<text x=\"{x}\" y=\"{:.1}\" font-size=\"10.5\"><tspan font-weight=\"600\">{hidden:.0} %</tspan> of {:.1} ms hidden</text>\
                 <text x=\"{x}\" y=\"{:.1}\" font-size=\"10.5\" fill=\"{EXPOSED}\">{:.1} ms exposed</text>",
                top + LANE - 3.0,
                ms(totals.communication),
                top + 2.0 * LANE - 1.0,
                ms(totals.exposed),
            )),
            None => self.put(format_args!(
                "<text x=\"{x}\" y=\"{:.1}\" font-size=\"10.5\" fill=\"{FAINT}\">no communication</text>",
                top + LANE - 3.0
            )),
        }
    }

    fn x(&self, at: Duration, origin: Duration) -> f64 {
        LEFT + at.saturating_sub(origin).as_secs_f64() * self.scale
    }

    fn block(&mut self, span: &Span, origin: Duration, y: f64, fill: &str, label: Option<&str>) {
        let (x, width) = (self.x(span.start, origin), span.end.saturating_sub(span.start).as_secs_f64() * self.scale);
        let width = width.max(0.4);
        self.put(format_args!(
            "<rect x=\"{x:.2}\" y=\"{y:.1}\" width=\"{width:.2}\" height=\"{LANE}\" fill=\"{fill}\" stroke=\"{PAPER}\" stroke-width=\"0.6\">\
             <title>{} (rank {}): {:.3} ms, from {:.3} ms{}</title></rect>",
            escaped(span.name),
            span.rank,
            ms(span.end.saturating_sub(span.start)),
            ms(span.start.saturating_sub(origin)),
            if span.bytes > 0 { format!(", {} bytes", span.bytes) } else { String::new() },
        ));
        if let Some(ink) = label.filter(|_| width > 6.5 * span.name.chars().count() as f64 + 4.0) {
            self.put(format_args!(
                "<text x=\"{:.2}\" y=\"{:.1}\" text-anchor=\"middle\" font-size=\"9.5\" fill=\"{ink}\" pointer-events=\"none\">{}</text>",
                x + width / 2.0,
                y + LANE - 4.0,
                escaped(span.name),
            ));
        }
    }

    fn legend(&mut self, top: f64) {
        let mut x = LEFT;
        let mut entries: Vec<(String, String)> = self
            .names
            .iter()
            .enumerate()
            .map(|(index, name)| (COMPUTE[index % COMPUTE.len()].to_string(), (*name).to_string()))
            .collect();
        entries.extend(
            [
                (HIDDEN, "communication"),
                (EXPOSED, "exposed: nothing is computed meanwhile"),
                ("url(#wait)", "compute waits"),
            ]
            .map(|(fill, name)| (fill.to_string(), name.to_string())),
        );
        for (fill, name) in entries {
            let thin = fill == EXPOSED;
            self.put(format_args!(
                "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"12\" height=\"{}\" fill=\"{fill}\"/><text x=\"{:.1}\" y=\"{:.1}\" font-size=\"10.5\">{}</text>",
                if thin { top + 5.0 } else { top + 1.0 },
                if thin { 4 } else { 12 },
                x + 17.0,
                top + 11.0,
                escaped(&name),
            ));
            x += 34.0 + 6.2 * name.chars().count() as f64;
        }
    }
}

/// `text` within XML.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            control if control.is_control() => escaped.push(' '),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_span_is_drawn_and_nothing_breaks_the_markup() {
        let ms = Duration::from_millis;
        let span = |rank, lane, name, start, end| Span { rank, lane, name, start: ms(start), end: ms(end), bytes: 0 };
        let spans = [
            span(0, Lane::Compute, "a<b>&\"c\"", 5, 20),
            span(0, Lane::Communication, "all_gather", 5, 25),
            span(0, Lane::Wait, "all_gather", 20, 25),
            span(1, Lane::Compute, "x", 5, 30),
        ];
        let picture = stacked(&[("first & second", &spans), ("nothing", &[])]);
        assert_eq!(picture.matches("<title>").count(), 4);
        assert!(picture.contains("a&lt;b&gt;&amp;&quot;c&quot;") && picture.contains("first &amp; second"));
        assert!(picture.contains("75 %") && picture.contains("5.0 ms exposed") && picture.contains("no communication"));
        assert!(!picture.contains("NaN") && !picture.contains("inf"));
        assert_eq!(picture.matches("<svg").count(), picture.matches("</svg>").count());
    }
}
