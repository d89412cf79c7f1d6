//! What every [`Device`] must compute, operation by operation, against double precision: the CPU, and a CUDA device, real or
//! simulated, with the feature `cuda`. Every dtype, lengths around a vector's and a block's, buffers that begin anywhere.

#![allow(missing_docs)]

mod common;

use std::sync::Arc;

use async_tensor_parallel::{
    Buffer, BufferMut, Cpu, CrossEntropyLoss, DType, Device, Element, Error, Float, Matmul, Matrix, SoftmaxPart,
};
use common::{integer, real};
use half::{bf16, f16};

/// The devices of this machine.
fn devices() -> Vec<Arc<dyn Device>> {
    let cpu: Arc<dyn Device> = Arc::new(Cpu::new(1));
    #[cfg(feature = "cuda")]
    if common::cuda::devices() > 0 {
        return vec![cpu, async_tensor_parallel::CudaDevice::new(0).unwrap()];
    }
    vec![cpu]
}

/// Runs a check for a dtype on every device.
macro_rules! for_every_dtype {
    ($check:ident) => {
        for device in devices() {
            $check::<f32>(&*device);
            $check::<f64>(&*device);
            $check::<bf16>(&*device);
            $check::<f16>(&*device);
        }
    };
}

/// A buffer of these values that begins `shift` elements into its allocation.
fn place<T: Element>(device: &dyn Device, values: &[T], shift: usize) -> BufferMut {
    let mut buffer = device.allocate((values.len() + shift) * size_of::<T>()).unwrap();
    drop(buffer.split_to(shift * size_of::<T>()).unwrap());
    device.upload(bytemuck::cast_slice(values), &mut buffer).unwrap();
    buffer
}

fn read<T: Element>(device: &dyn Device, buffer: BufferMut) -> Vec<T> {
    let mut values = vec![T::zeroed(); buffer.len() / size_of::<T>()];
    device.download(&buffer.freeze(), bytemuck::cast_slice_mut(&mut values)).unwrap();
    values
}

fn draw<T: Float>(which: usize, len: usize) -> Vec<T> {
    (0..len).map(|index| T::from_f64(real(7, which, index))).collect()
}

fn wide<T: Float>(values: &[T]) -> Vec<f64> {
    values.iter().map(|value| value.to_f64()).collect()
}

/// What `T` rounds by, relative to 1.
fn epsilon<T: Float>() -> f64 {
    match T::DTYPE {
        DType::F64 => 2f64.powi(-52),
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        _ => 2f64.powi(-23),
    }
}

#[track_caller]
fn close<T: Float>(got: &[T], want: &[f64], tolerance: f64, context: &str) {
    assert_eq!(got.len(), want.len(), "{context}");
    for (index, (got, want)) in wide(got).into_iter().zip(want).enumerate() {
        let same = got == *want || (got.is_nan() && want.is_nan());
        let near = (got - want).abs() <= tolerance * want.abs().max(1.0);
        assert!(same || near, "{context}, {:?}: [{index}] is {got}, wanted {want}", T::DTYPE);
    }
}

/// Lengths and shifts: none, one, a vector and its neighbours, more than a block.
const LENGTHS: [usize; 10] = [0, 1, 2, 3, 7, 8, 9, 255, 257, 1030];
const SHIFTS: [usize; 3] = [0, 1, 4];

fn casts<S: Float>(device: &dyn Device) {
    fn to<S: Float, T: Float>(device: &dyn Device) {
        for (len, shift) in LENGTHS.into_iter().flat_map(|len| SHIFTS.map(|shift| (len, shift))) {
            let context = format!("{device:?} {:?} to {:?}, {len} from {shift}", S::DTYPE, T::DTYPE);
            let mut source: Vec<S> = draw(1, len);
            // What has no neighbour of its own sign or size.
            for (value, special) in
                source.iter_mut().zip([1e-41, -0.0, f64::INFINITY, 6e-6, f64::NAN, 1.0 + 1.0 / 256.0])
            {
                *value = S::from_f64(special);
            }
            let from = place(device, &source, shift).freeze();
            let mut target = place(device, &vec![T::from_f64(9.0); len], SHIFTS[(shift + len) % 3]);
            device.cast((&from, S::DTYPE), (&mut target, T::DTYPE)).unwrap();
            // As the host rounds, whose f64 to 16 bits would otherwise differ by a second rounding.
            let narrow = |value: f64| {
                if T::DTYPE == DType::F64 || S::DTYPE == DType::F64 && T::DTYPE == DType::F32 {
                    T::from_f64(value)
                } else {
                    T::from_f64(f64::from(value as f32))
                }
            };
            let want: Vec<f64> = wide(&source).into_iter().map(|value| narrow(value).to_f64()).collect();
            close(&read::<T>(device, target), &want, 0.0, &context);

            let start: Vec<T> = draw(2, len);
            let source: Vec<S> = draw(1, len);
            let from = place(device, &source, shift).freeze();
            let mut target = place(device, &start, SHIFTS[(shift + len) % 3]);
            device.scaled_add(-0.75, (&from, S::DTYPE), (&mut target, T::DTYPE)).unwrap();
            let want: Vec<f64> = wide(&start).iter().zip(wide(&source)).map(|(t, s)| t - 0.75 * s).collect();
            close(&read::<T>(device, target), &want, epsilon::<T>().max(2f64.powi(-52)), &format!("{context}, added"));
        }
    }
    to::<S, f32>(device);
    to::<S, f64>(device);
    to::<S, bf16>(device);
    to::<S, f16>(device);
}

#[test]
fn casts_and_scaled_adds() {
    for_every_dtype!(casts);
}

fn biases<T: Float>(device: &dyn Device) {
    for (height, width, shift) in [(1, 1, 0), (3, 8, 0), (3, 8, 1), (5, 7, 0), (300, 33, 0), (2, 1030, 1), (0, 4, 0)] {
        let context = format!("{device:?} {height}x{width} from {shift}");
        let (rows, bias): (Vec<T>, Vec<T>) = (draw(1, height * width), draw(2, width));
        let mut out = place(device, &rows, shift);
        device.add_bias(T::DTYPE, &place(device, &bias, shift).freeze(), &mut out).unwrap();
        let want: Vec<f64> =
            wide(&rows).iter().enumerate().map(|(index, row)| row + bias[index % width].to_f64()).collect();
        close(&read::<T>(device, out), &want, epsilon::<T>(), &context);

        let start: Vec<T::Accumulator> = draw(3, width);
        let mut out = place(device, &start, shift);
        device.add_column_sums(T::DTYPE, &place(device, &rows, shift).freeze(), &mut out).unwrap();
        let sum = |column: usize| (0..height).map(|row| rows[row * width + column].to_f64()).sum::<f64>();
        let want: Vec<f64> = (0..width).map(|column| start[column].to_f64() + sum(column)).collect();
        close(&read::<T::Accumulator>(device, out), &want, 64.0 * epsilon::<T::Accumulator>(), &context);
    }
}

#[test]
fn biases_and_their_gradients() {
    for_every_dtype!(biases);
}

/// Every combination of transposes, with a bias, accumulating, into an accumulator: exact on integers.
fn products<T: Float>(device: &dyn Device) {
    for (m, k, n) in [(1, 1, 1), (3, 5, 7), (16, 8, 24), (33, 17, 9), (4, 0, 3), (0, 2, 3)] {
        for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
            let values = |which, len: usize| (0..len).map(|i| integer(1, which, i) % 8.0).collect::<Vec<_>>();
            let (a, b, bias) = (values(1, m * k), values(2, k * n), values(3, n));
            let typed = |values: &[f64]| values.iter().map(|v| T::from_f64(*v)).collect::<Vec<T>>();
            let at = |transposed: bool, rows: usize, columns: usize, r: usize, c: usize| {
                if transposed { c * rows + r } else { r * columns + c }
            };
            let product =
                |r: usize, c: usize| (0..k).map(|i| a[at(ta, m, k, r, i)] * b[at(tb, k, n, i, c)]).sum::<f64>();
            let matrix = |buffer, rows, columns, transposed: bool| {
                if transposed { Matrix::new(buffer, columns, rows).t() } else { Matrix::new(buffer, rows, columns) }
            };
            let (a_at, b_at) = (place(device, &typed(&a), 1).freeze(), place(device, &typed(&b), 0).freeze());
            let bias_at = place(device, &typed(&bias), 1).freeze();
            let multiply = |out: &mut BufferMut, out_offset, out_dtype, accumulate, bias| {
                let (a, b) = (matrix(&a_at, m, k, ta), matrix(&b_at, k, n, tb));
                let name = "test";
                device.matmul(Matmul { name, dtype: T::DTYPE, a, b, out, out_offset, out_dtype, accumulate, bias })
            };
            let context = format!("{device:?} {m}x{k}x{n} {ta} {tb}");
            // With a bias, into the middle of something larger.
            let mut out = place(device, &vec![T::from_f64(-1.0); m * n + 2], 0);
            multiply(&mut out, size_of::<T>(), T::DTYPE, false, Some(&bias_at)).unwrap();
            let mut want = vec![-1.0];
            want.extend((0..m * n).map(|i| product(i / n, i % n) + bias[i % n]));
            want.push(-1.0);
            close(&read::<T>(device, out), &want, 0.0, &context);
            // Accumulating in the accumulator's dtype.
            let mut out = place(device, &vec![<T::Accumulator as Float>::from_f64(3.0); m * n], 0);
            multiply(&mut out, 0, T::DTYPE.accumulator(), true, None).unwrap();
            let want: Vec<f64> = (0..m * n).map(|i| 3.0 + product(i / n, i % n)).collect();
            close(&read::<T::Accumulator>(device, out), &want, 0.0, &context);
            // What does not fit is refused.
            let mut out = place(device, &vec![T::from_f64(0.0); (m * n).max(1) - 1], 0);
            if m * n > 0 {
                let refused = multiply(&mut out, 0, T::DTYPE, false, None);
                assert!(matches!(refused, Err(Error::Argument { what: "matmul", .. })), "{refused:?}");
            }
        }
    }
}

#[test]
fn matrix_products() {
    for_every_dtype!(products);
}

#[test]
fn copies_zeroes_and_wrong_lengths() {
    for device in devices() {
        let device = &*device;
        let source = place(device, &[1u8, 2, 3, 4, 5].map(i64::from), 1).freeze();
        let mut target = place(device, &[9i64; 5], 0);
        device.copy(&source, &mut target).unwrap();
        let mut front = target.split_to(16).unwrap();
        device.zero(&mut front).unwrap();
        assert_eq!(read::<i64>(device, front), [0, 0]);
        assert!(matches!(device.copy(&source, &mut target), Err(Error::Argument { what: "copy", .. })));
        assert!(matches!(device.upload(&[0; 3], &mut target), Err(Error::Argument { what: "upload", .. })));
        assert_eq!(read::<i64>(device, target), [3, 4, 5]);
        assert!(device.memory_bytes() > 0);
        device.synchronize().unwrap();
        drop(source);
        assert!(device.trim() > 0);
        assert_eq!(device.memory_bytes(), 0);
    }
}

#[test]
fn ids_outside_a_range_are_found() {
    for device in devices() {
        let device = &*device;
        let find = |ids: &[i64], low, high, except| {
            device.find_outside(&place(device, ids, 0).freeze(), low..high, except).unwrap()
        };
        assert_eq!(find(&[], 0, 3, None), None);
        assert_eq!(find(&[0, 2, 1], 0, 3, None), None);
        assert_eq!(find(&[0, 3, -1], 0, 3, None), Some((1, 3)));
        assert_eq!(find(&[0, -100, 3], 0, 3, Some(-100)), Some((2, 3)));
        assert_eq!(find(&[i64::MIN, i64::MAX], 0, i64::MAX, Some(i64::MIN)), Some((1, i64::MAX)));
        let mut many = vec![1i64; 5000];
        many[4097] = 7;
        many[4500] = 8;
        assert_eq!(find(&many, 0, 3, None), Some((4097, 7)));
    }
}

fn rows_by_number<T: Float>(device: &dyn Device) {
    for (rows, width, count, shift) in
        [(5, 3, 8, 0), (4, 8, 6, 0), (4, 8, 6, 1), (3, 300, 5, 0), (7, 1, 600, 0), (2, 4, 0, 0)]
    {
        let context = format!("{device:?} {rows}x{width}, {count} ids from {shift}");
        let first = 10i64;
        let mut ids: Vec<i64> = (0..count).map(|i| first + ((i * i + i / 3) % (rows + 2)) as i64 - 1).collect();
        if let [one, two, ..] = &mut ids[..] {
            (*one, *two) = (i64::MIN, i64::MAX);
        }
        let held = |id: i64| usize::try_from(id.checked_sub(first)?).ok().filter(|row| *row < rows);
        let ids_at = place(device, &ids, 0).freeze();
        let table: Vec<T> = draw(1, rows * width);
        let table_at = place(device, &table, shift).freeze();
        let mut out = place(device, &vec![T::from_f64(9.0); count * width], shift);
        device.gather_rows(T::DTYPE, Matrix::new(&table_at, rows, width), &ids_at, first, &mut out).unwrap();
        let want: Vec<f64> = ids
            .iter()
            .flat_map(|id| held(*id).map_or(vec![0.0; width], |row| wide(&table[row * width..(row + 1) * width])))
            .collect();
        close(&read::<T>(device, out), &want, 0.0, &context);

        let (grads, start): (Vec<T>, Vec<T::Accumulator>) = (draw(2, count * width), draw(3, rows * width));
        let grads_at = place(device, &grads, shift).freeze();
        let skip = first + 1;
        let scatter = || {
            let mut out = place(device, &start, 0);
            let grads = Matrix::new(&grads_at, count, width);
            device.scatter_add_rows(T::DTYPE, grads, &ids_at, first, Some(skip), &mut out).unwrap();
            read::<T::Accumulator>(device, out)
        };
        let mut want = wide(&start);
        for (index, row) in
            ids.iter().enumerate().filter_map(|(i, id)| held(*id).filter(|_| *id != skip).map(|r| (i, r)))
        {
            (0..width).for_each(|c| want[row * width + c] += grads[index * width + c].to_f64());
        }
        let got = scatter();
        close(&got, &want, 300.0 * epsilon::<T::Accumulator>(), &context);
        assert_eq!(wide(&got), wide(&scatter()), "the same bits every time");
    }
}

#[test]
fn rows_are_gathered_and_added_by_number() {
    for_every_dtype!(rows_by_number);
}

fn softmaxes<T: Float>(device: &dyn Device) {
    let options = CrossEntropyLoss { classes: 500, label_smoothing: 0.1, z_loss: 1e-3, ignore_index: Some(-100) };
    for (rows, width, valid) in [(1, 1, 1), (4, 7, 7), (3, 8, 5), (5, 300, 290), (2, 4, 0)] {
        let context = format!("{device:?} {rows}x{width}, {valid} valid");
        let first = 20i64;
        // Padding holds what would spoil everything if it counted.
        let logits: Vec<T> = (0..rows * width)
            .map(|i| T::from_f64(if i % width < valid { 3.0 * real(3, 1, i) } else { f64::NAN }))
            .collect();
        let targets: Vec<i64> = (0..rows).map(|row| [first + (valid / 2) as i64, 3, -100, first][row % 4]).collect();
        let (logits_at, targets_at) = (place(device, &logits, 1).freeze(), place(device, &targets, 0).freeze());
        let matrix = Matrix::new(&logits_at, rows, width);
        let accumulator = |values: &[f64]| values.iter().map(|v| T::Accumulator::from_f64(*v)).collect::<Vec<_>>();
        let tolerance = 64.0 * epsilon::<T::Accumulator>();

        let mut max = place(device, &accumulator(&vec![0.0; rows]), 0);
        device.row_max(T::DTYPE, matrix, valid, &mut max).unwrap();
        let row = |r: usize| wide(&logits[r * width..r * width + valid]);
        let maxima: Vec<f64> = (0..rows).map(|r| row(r).into_iter().fold(f64::NEG_INFINITY, f64::max)).collect();
        close(&read::<T::Accumulator>(device, max), &maxima, 0.0, &context);

        // As if another rank had the largest.
        let shifted: Vec<f64> = maxima.iter().map(|max| if max.is_finite() { max + 0.5 } else { 0.5 }).collect();
        let shifted = wide(&accumulator(&shifted));
        let max_at = place(device, &accumulator(&shifted), 0).freeze();
        let part = SoftmaxPart { dtype: T::DTYPE, logits: matrix, valid, first, targets: &targets_at };
        let mut sums = place(device, &accumulator(&vec![9.0; 3 * rows]), 0);
        device.softmax_sums(&part, &max_at, &mut sums).unwrap();
        let want: Vec<f64> = (0..rows)
            .flat_map(|r| {
                let differences: Vec<f64> = row(r).into_iter().map(|l| l - shifted[r]).collect();
                let own = usize::try_from(targets[r] - first).ok().and_then(|c| differences.get(c).copied());
                [differences.iter().map(|d| d.exp()).sum(), own.unwrap_or(0.0), differences.iter().sum::<f64>()]
            })
            .collect();
        close(&read::<T::Accumulator>(device, sums), &want, tolerance, &context);

        // The sums of the whole vocabulary, as reduced over ranks.
        let sums: Vec<f64> = wide(&accumulator(&(0..3 * rows).map(|i| [4.0, -1.5, -900.0][i % 3]).collect::<Vec<_>>()));
        let sums_at = place(device, &accumulator(&sums), 0).freeze();
        let mut out = place(device, &accumulator(&vec![9.0; rows]), 0);
        device.cross_entropy_loss(T::DTYPE, &options, &targets_at, &max_at, &sums_at, &mut out).unwrap();
        let log_z = |r: usize| shifted[r] + sums[3 * r].ln();
        let want: Vec<f64> = (0..rows)
            .map(|r| match targets[r] {
                -100 => 0.0,
                _ => {
                    let [sum, target, all] = [0, 1, 2].map(|i| sums[3 * r + i]);
                    sum.ln() - 0.9 * target - 0.1 / 500.0 * all + 1e-3 * log_z(r).powi(2)
                }
            })
            .collect();
        close(&read::<T::Accumulator>(device, out), &want, tolerance, &context);

        let grads: Vec<f64> = wide(&accumulator(&(0..rows).map(|r| 0.5 + r as f64).collect::<Vec<_>>()));
        let grads_at = place(device, &accumulator(&grads), 0).freeze();
        let mut out = place(device, &vec![T::from_f64(9.0); rows * width], 1);
        device.cross_entropy_grad(&part, &options, &max_at, &sums_at, &grads_at, &mut out).unwrap();
        let want: Vec<f64> = (0..rows * width)
            .map(|i| {
                let (r, c) = (i / width, i % width);
                if c >= valid || targets[r] == -100 {
                    return 0.0;
                }
                let p = (logits[i].to_f64() - shifted[r]).exp() / sums[3 * r] * (1.0 + 2e-3 * log_z(r));
                let hit = if targets[r] - first == c as i64 { 0.9 } else { 0.0 };
                grads[r] * (p - hit - 0.1 / 500.0)
            })
            .collect();
        close(&read::<T>(device, out), &want, tolerance + epsilon::<T>(), &context);
    }
}

#[test]
fn the_pieces_of_a_sharded_softmax() {
    for_every_dtype!(softmaxes);
}

#[test]
fn a_nan_among_logits_stays() {
    for device in devices() {
        let logits = place(&*device, &[1f32, f32::NAN, 2.0, 3.0, 4.0, 5.0], 0).freeze();
        let mut max = place(&*device, &[0f32; 2], 0);
        device.row_max(DType::F32, Matrix::new(&logits, 2, 3), 3, &mut max).unwrap();
        let got = read::<f32>(&*device, max);
        assert!(got[0].is_nan() && got[1] == 5.0, "{got:?}");
    }
}

/// Sizes that do not fit together are errors on every device, never a read beyond an end.
#[test]
fn sizes_that_do_not_fit_are_refused() {
    for device in devices() {
        let device = &*device;
        let floats = |len: usize| place(device, &vec![1f32; len], 0);
        let ids = |len: usize| place(device, &vec![0i64; len], 0).freeze();
        let six = floats(6).freeze();
        let matrix = Matrix::new(&six, 2, 3);
        let wrong = Matrix::new(&six, 3, 3);
        let part = |logits, targets| SoftmaxPart { dtype: DType::F32, logits, valid: 3, first: 0, targets };
        let options = CrossEntropyLoss { classes: 3, label_smoothing: 0.0, z_loss: 0.0, ignore_index: None };
        let (two, three): (Buffer, Buffer) = (floats(2).freeze(), floats(3).freeze());
        let (good, short) = (ids(2), ids(1));
        let outcomes = [
            device.add_bias(DType::F32, &three, &mut floats(4)),
            device.add_column_sums(DType::F32, &six, &mut floats(4)),
            device.cast((&six, DType::F32), (&mut floats(5), DType::F32)),
            device.scaled_add(1.0, (&six, DType::F32), (&mut floats(5), DType::F32)),
            device.gather_rows(DType::F32, wrong, &good, 0, &mut floats(6)),
            device.gather_rows(DType::F32, matrix.t(), &good, 0, &mut floats(4)),
            device.gather_rows(DType::F32, matrix, &good, 0, &mut floats(5)),
            device.scatter_add_rows(DType::F32, matrix, &short, 0, None, &mut floats(6)),
            device.scatter_add_rows(DType::F32, matrix, &good, 0, None, &mut floats(7)),
            device.row_max(DType::F32, matrix, 3, &mut floats(3)),
            device.row_max(DType::F32, wrong, 3, &mut floats(3)),
            device.softmax_sums(&part(matrix, &short), &two, &mut floats(6)),
            device.softmax_sums(&part(matrix, &good), &three, &mut floats(6)),
            device.softmax_sums(&part(matrix, &good), &two, &mut floats(5)),
            device.cross_entropy_loss(DType::F32, &options, &good, &two, &six, &mut floats(1)),
            device.cross_entropy_loss(DType::F32, &options, &good, &three, &six, &mut floats(2)),
            device.cross_entropy_grad(&part(matrix, &good), &options, &two, &three, &two, &mut floats(6)),
            device.cross_entropy_grad(&part(matrix, &good), &options, &two, &six, &three, &mut floats(6)),
            device.cross_entropy_grad(&part(matrix, &good), &options, &two, &six, &two, &mut floats(5)),
        ];
        for (index, outcome) in outcomes.into_iter().enumerate() {
            assert!(matches!(outcome, Err(Error::Argument { .. })), "{device:?}, call {index}: {outcome:?}");
        }
    }
}
