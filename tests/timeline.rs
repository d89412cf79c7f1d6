//! What is said about overlap: reports at each call site, and the one warning.

#![allow(missing_docs)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use async_tensor_parallel::timeline::{Lane, chrome_json, svg};
use async_tensor_parallel::{
    Group, LinearMode, Link, LocalWorld, Overlap, Pass, Placement, Result, TensorParallelColumnLinear,
};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Counts spans and keeps the text of warnings.
#[derive(Default)]
struct Listener {
    spans: AtomicUsize,
    warnings: Mutex<Vec<String>>,
}

struct Shared(Arc<Listener>);

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0 += &format!("{}={value:?} ", field.name());
    }
}

impl Subscriber for Shared {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("async_tensor_parallel")
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(self.0.spans.fetch_add(1, Ordering::Relaxed) as u64 + 1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        if *event.metadata().level() == Level::WARN {
            let mut text = Text(String::new());
            event.record(&mut text);
            self.0.warnings.lock().unwrap().push(text.0);
        }
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

fn steps(group: &Group, overlap: Overlap, steps: usize) -> Result<TensorParallelColumnLinear<f32>> {
    let layer =
        TensorParallelColumnLinear::builder(64, 4).mode(LinearMode::ReduceScatter).overlap(overlap).build(group)?;
    let x = group.tensor(&[1.0; 2 * 64], &[2, 64], Placement::Rows)?;
    for _ in 0..steps {
        layer.forward(&x)?;
    }
    Ok(layer)
}

#[test]
fn an_overlap_that_hides_nothing_is_told_once_and_the_report_says_how_much() {
    let listener = Arc::new(Listener::default());
    // 512 bytes take 10 ms; the product takes microseconds.
    let world =
        LocalWorld::new(2).unwrap().with_link(Link { bandwidth: 51_200.0, latency: Default::default() }).unwrap();
    world
        .run(|group| {
            let _guard = (group.rank() == 0).then(|| tracing::subscriber::set_default(Shared(Arc::clone(&listener))));
            let layer = steps(group, Overlap::Async, 40)?;
            let report = layer.overlap_report(Pass::Forward);
            assert_eq!(report.calls, 40);
            // 10 ms each, by the model.
            assert_eq!(report.communication.as_millis(), 400);
            assert!(report.exposed.as_millis() > 0);
            assert_eq!(layer.overlap_report(Pass::Backward).calls, 0);
            assert_eq!(layer.overlap_report(Pass::Backward).hidden_percent(), None);
            // Blocking hides nothing either, but did not promise to.
            let blocking = steps(group, Overlap::Blocking, 20)?.overlap_report(Pass::Forward);
            assert!(blocking.hidden_percent().is_some_and(|hidden| hidden < 50.0), "{blocking:?}");
            Ok(())
        })
        .unwrap();
    let warnings = listener.warnings.lock().unwrap();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    for word in ["column linear", "async", "Forward", "rows=4"] {
        assert!(warnings[0].contains(word), "{warnings:?}");
    }
    assert!(listener.spans.load(Ordering::Relaxed) >= 40, "matmuls and waits are tracing spans");
}

#[test]
fn a_recording_holds_all_lanes_and_both_formats_are_whole() {
    let world = LocalWorld::new(3).unwrap().with_link(Link::gbit(0.01, 1.0)).unwrap();
    let mut spans = world
        .run(|group| {
            group.barrier()?;
            if group.rank() == 0 {
                group.recorder().start();
            }
            group.barrier()?;
            let layer = TensorParallelColumnLinear::builder(6, 6).mode(LinearMode::ReduceScatter).build(group)?;
            let (_, saved) = layer.forward(&group.tensor(&[1.0f32; 12], &[2, 6], Placement::Rows)?)?;
            layer.backward(saved, &group.tensor(&[1.0f32; 12], &[6, 2], Placement::Features)?)?;
            group.barrier()?;
            Ok(if group.rank() == 0 { group.recorder().stop() } else { Vec::new() })
        })
        .unwrap();
    let spans = spans.swap_remove(0);
    for rank in 0..3 {
        for lane in [Lane::Compute, Lane::Communication, Lane::Wait] {
            assert!(spans.iter().any(|span| span.rank == rank && span.lane == lane), "rank {rank}, {lane:?}");
        }
    }
    assert!(spans.windows(2).all(|pair| pair[0].start <= pair[1].start));
    assert!(spans.iter().all(|span| span.start <= span.end));
    let json: serde_json::Value = serde_json::from_str(&chrome_json(&spans)).unwrap();
    let events = json.as_array().or_else(|| json["traceEvents"].as_array()).unwrap();
    let complete = events.iter().filter(|event| event["ph"] == "X").count();
    assert_eq!(complete, spans.len());
    let picture = svg("a step", &spans);
    assert!(picture.starts_with("<svg") && picture.trim_end().ends_with("</svg>"));
    assert!(picture.matches("rank ").count() >= 3);
}

#[test]
fn nothing_is_recorded_while_the_recorder_is_off() {
    let recorded = LocalWorld::new(2)
        .unwrap()
        .run(|group| {
            steps(group, Overlap::Async, 2)?;
            Ok(group.recorder().stop().len())
        })
        .unwrap();
    assert_eq!(recorded, [0, 0]);
}
