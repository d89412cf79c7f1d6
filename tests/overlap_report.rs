//! What is said about overlap: reports at each call site, and the one warning. A binary of its own, since the listener is the
//! process's.

#![allow(missing_docs)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

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
    tracing::subscriber::set_global_default(Shared(Arc::clone(&listener))).unwrap();
    world
        .run(|group| {
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
    assert_eq!(warnings.len(), 2, "one for each rank's layer: {warnings:?}");
    for (warning, word) in
        warnings.iter().flat_map(|w| ["column linear", "async", "Forward", "rows=4"].map(|word| (w, word)))
    {
        assert!(warning.contains(word), "{warning}");
    }
    assert!(listener.spans.load(Ordering::Relaxed) >= 40, "matmuls and waits are tracing spans");
}
