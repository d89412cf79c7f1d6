//! The Chrome trace format, which ui.perfetto.dev and chrome://tracing open.

use std::fmt::Write;

use super::{Lane, Span};

/// The spans as a Chrome trace: a process for each rank, with one thread for compute (and its waits) and one for
/// communication; times in microseconds.
///
/// Format: "Trace Event Format", complete events (`"ph":"X"`) and name metadata (`"ph":"M"`).
pub fn chrome_json(spans: &[Span]) -> String {
    let mut json = String::from("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[");
    let mut ranks: Vec<usize> = spans.iter().map(|span| span.rank).collect();
    ranks.sort_unstable();
    ranks.dedup();
    let mut separator = "";
    let mut event = |body: std::fmt::Arguments<'_>| {
        // Writing to a string does not fail.
        let _ = write!(json, "{separator}\n{{{body}}}");
        separator = ",";
    };
    for rank in ranks {
        event(format_args!(
            "\"ph\":\"M\",\"pid\":{rank},\"name\":\"process_name\",\"args\":{{\"name\":\"rank {rank}\"}}"
        ));
        for (thread, name) in [(0, "compute"), (1, "communication")] {
            event(format_args!(
                "\"ph\":\"M\",\"pid\":{rank},\"tid\":{thread},\"name\":\"thread_name\",\"args\":{{\"name\":\"{name}\"}}"
            ));
        }
    }
    for span in spans {
        let (thread, category) = match span.lane {
            Lane::Compute => (0, "compute"),
            Lane::Wait => (0, "wait"),
            Lane::Communication => (1, "communication"),
        };
        let start = span.start.as_secs_f64() * 1e6;
        let duration = span.end.saturating_sub(span.start).as_secs_f64() * 1e6;
        event(format_args!(
            "\"ph\":\"X\",\"pid\":{},\"tid\":{thread},\"ts\":{start:.3},\"dur\":{duration:.3},\"cat\":\"{category}\",\
             \"name\":\"{}\",\"args\":{{\"bytes\":{}}}",
            span.rank,
            escaped(span.name),
            span.bytes
        ));
    }
    json.push_str("\n]}\n");
    json
}

/// `text` within a JSON string.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '"' | '\\' => escaped.extend(['\\', character]),
            control if control < ' ' => {
                let _ = write!(escaped, "\\u{:04x}", control as u32);
            }
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_trace_is_json_with_every_span() {
        let micros = Duration::from_micros;
        let spans = [
            Span {
                rank: 1,
                lane: Lane::Communication,
                name: "a \"b\"\\\n",
                start: micros(5),
                end: micros(9),
                bytes: 64,
            },
            Span { rank: 0, lane: Lane::Wait, name: "x·Wᵀ", start: micros(1), end: micros(2), bytes: 0 },
        ];
        let trace: serde_json::Value = serde_json::from_str(&chrome_json(&spans)).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let complete: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
        assert_eq!(complete.len(), 2);
        assert_eq!(complete[0]["name"], "a \"b\"\\\n");
        assert_eq!((&complete[0]["pid"], &complete[0]["tid"]), (&1.into(), &1.into()));
        assert_eq!((complete[0]["ts"].as_f64(), complete[0]["dur"].as_f64()), (Some(5.0), Some(4.0)));
        assert_eq!((&complete[1]["tid"], &complete[1]["cat"]), (&0.into(), &"wait".into()));
        assert_eq!(events.iter().filter(|event| event["ph"] == "M").count(), 6);
        assert!(serde_json::from_str::<serde_json::Value>(&chrome_json(&[])).is_ok());
    }
}
