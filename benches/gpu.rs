//! One GPU by itself: what the layer adds to its products, and kernels against the speed of memory.
//!
//! `cargo bench --features cuda --bench gpu`. One rank, bf16, Llama-3 shapes; a layer and its bare products (the same cuBLASLt
//! calls, nothing between them) take turns, and the median ratio counts. A kernel's bytes are those that it must read and write;
//! they are compared with a copy from device memory to device memory. `ATP_BENCH_FULL=0` divides all sizes by 16.

use std::time::Instant;

use async_tensor_parallel::{
    Buffer, BufferMut, CrossEntropyLoss, CudaDevice, DType, Device, Group, LinearMode, Matmul, Matrix, PeerWorld,
    Placement, Result, SoftmaxPart, TensorParallelColumnLinear,
};
use half::bf16;

/// Features of the whole column layer.
const SHAPES: [(&str, usize, usize); 6] = [
    ("8B qkv", 4096, 6144),
    ("8B gate_up", 4096, 28672),
    ("8B down", 14336, 4096),
    ("70B qkv", 8192, 10240),
    ("70B gate_up", 8192, 57344),
    ("70B down", 28672, 8192),
];

fn main() -> Result<()> {
    let testing = std::env::args().any(|argument| argument == "--test");
    let small = testing || std::env::var("ATP_BENCH_FULL").is_ok_and(|value| value == "0");
    let (divisor, rounds) = if testing {
        (64, 1)
    } else if small {
        (16, 3)
    } else {
        (1, 9)
    };
    match CudaDevice::count() {
        Ok(count) if count > 0 => {}
        none => {
            println!("no CUDA device: {none:?}");
            return Ok(());
        }
    }
    PeerWorld::new(1)?.run(|group| {
        println!("{}", group.device().describe());
        println!("{:<12} {:>14} {:>14} {:>14} {:>7}", "layer", "rows", "layer, ms", "products, ms", "ratio");
        for (name, in_features, out_features) in SHAPES {
            layer(group, name, 8192 / divisor, in_features / divisor, out_features / divisor, rounds)?;
        }
        println!("goal: ratio at most 1.02\n");
        kernels(group, divisor, rounds)
    })?;
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Seconds of a call, on the device: of several, queued back to back.
fn seconds(device: &dyn Device, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    const TIMES: u32 = 5;
    device.synchronize()?;
    let begun = Instant::now();
    for _ in 0..TIMES {
        work()?;
    }
    device.synchronize()?;
    Ok((begun.elapsed() / TIMES).as_secs_f64())
}

/// One of the products.
fn product<'a>(a: Matrix<'a>, b: Matrix<'a>, out: &'a mut BufferMut, out_dtype: DType) -> Matmul<'a> {
    let accumulate = out_dtype == DType::F32;
    Matmul { name: "alone", dtype: DType::BF16, a, b, out, out_offset: 0, out_dtype, accumulate, bias: None }
}

/// Forward and backward of a layer, and its three products alone.
fn layer(group: &Group, name: &str, rows: usize, inner: usize, out: usize, rounds: usize) -> Result<()> {
    let device = group.device();
    let layer = TensorParallelColumnLinear::<bf16>::builder(inner, out).mode(LinearMode::ReduceScatter).build(group)?;
    let draw =
        |count: usize| -> Vec<bf16> { (0..count).map(|i| bf16::from_f64((i % 17) as f64 / 17.0 - 0.5)).collect() };
    let x = group.tensor(&draw(rows * inner), &[rows, inner], Placement::Rows)?;
    let dy = group.tensor(&draw(rows * out), &[rows, out], Placement::Features)?;
    let w = layer.weight().value();
    let (mut y, mut dx) = (device.allocate(rows * out * 2)?, device.allocate(rows * inner * 2)?);
    let mut dw = device.allocate(out * inner * 4)?;
    device.zero(&mut dw)?;
    let (mut layers, mut products, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=rounds {
        let of_layer = seconds(&**device, || {
            let (y, saved) = layer.forward(&x)?;
            drop(y);
            layer.backward(saved, &dy).map(drop)
        })?;
        let of_products = seconds(&**device, || {
            let (x, dy, w) = (
                Matrix::new(x.buffer(), rows, inner),
                Matrix::new(dy.buffer(), rows, out),
                Matrix::new(w.buffer(), out, inner),
            );
            device.matmul(product(x, w.t(), &mut y, DType::BF16))?;
            device.matmul(product(dy, w, &mut dx, DType::BF16))?;
            device.matmul(product(dy.t(), x, &mut dw, DType::F32))
        })?;
        // The first chooses algorithms.
        if round > 0 {
            layers.push(1e3 * of_layer);
            products.push(1e3 * of_products);
            ratios.push(of_layer / of_products);
        }
    }
    println!("{name:<12} {rows:>14} {:>14.3} {:>14.3} {:>7.3}", median(layers), median(products), median(ratios));
    Ok(())
}

/// Kernels, and how much of a copy's bandwidth they reach.
fn kernels(group: &Group, divisor: usize, rounds: usize) -> Result<()> {
    let device = &**group.device();
    let (rows, width, vocabulary) = (8192 / divisor, 4096 / divisor, 32064 / divisor);
    let elements = rows * width;
    let tensor = |count: usize| -> Result<Buffer> {
        let values: Vec<bf16> = (0..count).map(|i| bf16::from_f64((i % 13) as f64 / 13.0)).collect();
        Ok(group.tensor(&values, &[count], Placement::Replicated)?.buffer().clone())
    };
    let (x, bias) = (tensor(elements)?, tensor(width)?);
    let ids: Vec<i64> = (0..rows).map(|i| (i * 7919 % vocabulary) as i64).collect();
    let ids = group.tensor(&ids, &[rows], Placement::Replicated)?;
    let (table, logits) = (tensor(vocabulary * width)?, tensor(rows * vocabulary)?);
    let f32s = |count: usize| device.allocate(count * 4);
    let (mut y, mut sums, mut wide) = (device.allocate(elements * 2)?, f32s(width)?, f32s(elements)?);
    let (mut table_grad, mut max, mut parts) = (f32s(vocabulary * width)?, f32s(rows)?, f32s(3 * rows)?);
    for buffer in [&mut y, &mut sums, &mut wide, &mut table_grad, &mut max, &mut parts] {
        device.zero(buffer)?;
    }
    let table = Matrix::new(&table, vocabulary, width);
    let gradient = Matrix::new(&x, rows, width);
    let part = SoftmaxPart {
        dtype: DType::BF16,
        logits: Matrix::new(&logits, rows, vocabulary),
        valid: vocabulary,
        first: 0,
        targets: ids.buffer(),
    };
    let loss = CrossEntropyLoss { classes: vocabulary, label_smoothing: 0.0, z_loss: 0.0, ignore_index: None };
    let rate = |bytes: usize, work: &mut dyn FnMut() -> Result<()>| -> Result<f64> {
        let times = (0..=rounds).map(|_| seconds(device, &mut *work)).collect::<Result<Vec<_>>>()?;
        Ok(bytes as f64 / median(times[1..].to_vec()) / 1e9)
    };
    let copied = rate(4 * elements, &mut || device.copy(&x, &mut y))?;
    println!("{:<16} {:>10} {:>10}", "kernel", "GB/s", "of a copy");
    let show = |name: &str, rate: f64| println!("{name:<16} {rate:>10.0} {:>8.0} %", 100.0 * rate / copied);
    show("copy", copied);
    let bf = DType::BF16;
    show("add bias", rate(4 * elements, &mut || device.add_bias(bf, &bias, &mut y))?);
    show("column sums", rate(2 * elements, &mut || device.add_column_sums(bf, &x, &mut sums))?);
    show("cast to f32", rate(6 * elements, &mut || device.cast((&x, bf), (&mut wide, DType::F32)))?);
    show("scaled add", rate(10 * elements, &mut || device.scaled_add(-0.1, (&x, bf), (&mut wide, DType::F32)))?);
    show("gather rows", rate(4 * elements, &mut || device.gather_rows(bf, table, ids.buffer(), 0, &mut y))?);
    let mut scatter = || device.scatter_add_rows(bf, gradient, ids.buffer(), 0, None, &mut table_grad);
    show("scatter rows", rate(10 * elements, &mut scatter)?);
    let entries = rows * vocabulary;
    show("row max", rate(2 * entries, &mut || device.row_max(bf, part.logits, vocabulary, &mut max))?);
    let max = max.freeze();
    show("softmax sums", rate(2 * entries, &mut || device.softmax_sums(&part, &max, &mut parts))?);
    let (parts, ones) = (parts.freeze(), {
        let ones = group.tensor(&vec![1f32; rows], &[rows], Placement::Replicated)?;
        ones.buffer().clone()
    });
    let mut out = device.allocate(2 * entries)?;
    let mut grad = || device.cross_entropy_grad(&part, &loss, &max, &parts, &ones, &mut out);
    show("softmax grad", rate(4 * entries, &mut grad)?);
    device.synchronize()
}
