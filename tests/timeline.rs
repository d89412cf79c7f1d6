//! Recordings and what is made of them.

#![allow(missing_docs)]

use async_tensor_parallel::timeline::{Lane, chrome_json, svg};
use async_tensor_parallel::{
    Group, LinearMode, Link, LocalWorld, Overlap, Placement, Result, TensorParallelColumnLinear,
};

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
