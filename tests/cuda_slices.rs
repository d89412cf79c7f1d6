//! Programs with cudarc buffers of their own: tensors over them, and back, with what is in flight on the program's streams.
//! Needs CUDA devices, real or simulated; without one it says so and passes.
#![cfg(feature = "cuda")]

mod common;

use std::sync::Arc;

use async_tensor_parallel::{
    CudaDevice, Device, Error, Group, LinearMode, Placement, Result, Tensor, TensorParallelColumnLinear,
};
use common::cuda::{Kind, World, devices};
use common::{OVERLAPS, real};
use cudarc::driver::{CudaContext, CudaStream};

const ROWS: usize = 6;
const IN: usize = 8;

fn values(rank: usize) -> Vec<f32> {
    (0..ROWS * IN).map(|index| real(rank, 1, index) as f32).collect()
}

/// A stream of the program's own on the rank's device.
fn own_stream(group: &Group) -> Arc<CudaStream> {
    let any: &dyn std::any::Any = &**group.device();
    any.downcast_ref::<CudaDevice>().unwrap().context().new_stream().unwrap()
}

/// Ten steps, each with an input, made on a stream of the program's, that is dropped at once, and an output that goes to a part
/// of a slice of the program's.
fn through_slices(group: &Group, tracked: bool, overlap: async_tensor_parallel::Overlap) -> Result<Vec<f32>> {
    let stream = own_stream(group);
    if !tracked {
        // SAFETY: this test orders its own use.
        unsafe { stream.context().disable_event_tracking() };
    }
    let layer = TensorParallelColumnLinear::<f32>::builder(IN, 12)
        .mode(LinearMode::ReduceScatter)
        .overlap(overlap)
        .seed(5)
        .build(group)?;
    let mut seen = Vec::new();
    for step in 0..10 {
        let mut slice = stream.clone_htod(&vec![f32::NAN; ROWS * IN]).unwrap();
        stream.memcpy_htod(&values(group.rank() + step), &mut slice).unwrap();
        let x = if step % 2 == 0 {
            Tensor::from_cuda(group.device(), slice, &[ROWS, IN], Placement::Rows)?
        } else {
            let x = Tensor::from_cuda_view(group.device(), &slice.slice(..), &[ROWS, IN], Placement::Rows)?;
            // What the program writes next must not reach the tensor.
            stream.memset_zeros(&mut slice).unwrap();
            x
        };
        let (y, saved) = layer.forward(&x)?;
        drop(x);
        let mut out = stream.alloc_zeros::<f32>(y.shape().elements() + 7).unwrap();
        y.copy_to_cuda(&mut out.slice_mut(7..))?;
        let lent = y.with_cuda(|slice| {
            let mut copy = slice.stream().alloc_zeros::<f32>(slice.len()).unwrap();
            slice.stream().memcpy_dtod(slice, &mut copy).unwrap();
            slice.stream().clone_dtoh(&copy).unwrap()
        })?;
        let dx = layer.backward(saved, &y)?;
        drop(y);
        let out = stream.clone_dtoh(&out).unwrap();
        assert_eq!(out[..7], [0.0; 7]);
        assert_eq!(out[7..], lent);
        seen.extend(lent);
        seen.extend(dx.to_vec()?);
    }
    Ok(seen)
}

fn through_copies(group: &Group, overlap: async_tensor_parallel::Overlap) -> Result<Vec<f32>> {
    let layer = TensorParallelColumnLinear::<f32>::builder(IN, 12)
        .mode(LinearMode::ReduceScatter)
        .overlap(overlap)
        .seed(5)
        .build(group)?;
    let mut seen = Vec::new();
    for step in 0..10 {
        let x = group.tensor(&values(group.rank() + step), &[ROWS, IN], Placement::Rows)?;
        let (y, saved) = layer.forward(&x)?;
        seen.extend(y.to_vec()?);
        seen.extend(layer.backward(saved, &y)?.to_vec()?);
    }
    Ok(seen)
}

#[test]
fn slices_give_what_copies_give() {
    let world_size = devices().min(3);
    if world_size == 0 {
        return;
    }
    for (kind, overlap) in Kind::ALL.into_iter().flat_map(|kind| OVERLAPS.map(|overlap| (kind, overlap))) {
        let want = World::new(kind, world_size).run(|group| through_copies(group, overlap)).unwrap();
        for tracked in [true, false] {
            let got = World::new(kind, world_size).run(|group| through_slices(group, tracked, overlap)).unwrap();
            assert_eq!(got, want, "{kind:?} {overlap:?}, tracked: {tracked}");
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    if devices() == 0 {
        return;
    }
    let device: Arc<dyn Device> = CudaDevice::new(0).unwrap();
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let slice = || stream.clone_htod(&[1f32, 2.0, 3.0]).unwrap();
    assert!(matches!(Tensor::from_cuda(&device, slice(), &[2, 2], Placement::Replicated), Err(Error::Shape { .. })));
    let view = slice();
    let copy = Tensor::from_cuda_view(&device, &view.slice(1..), &[3], Placement::Replicated);
    assert!(matches!(copy, Err(Error::Shape { .. })));
    let tensor = Tensor::from_cuda(&device, slice(), &[3], Placement::Replicated).unwrap();
    assert!(matches!(tensor.copy_to_cuda(&mut stream.alloc_zeros::<f32>(2).unwrap()), Err(Error::Shape { .. })));
    let cpu: Arc<dyn Device> = Arc::new(async_tensor_parallel::Cpu::new(1));
    assert!(matches!(Tensor::from_cuda(&cpu, slice(), &[3], Placement::Replicated), Err(Error::Device { .. })));
    if devices() > 1 {
        let other = CudaContext::new(1).unwrap().new_stream().unwrap().clone_htod(&[1f32; 3]).unwrap();
        assert!(matches!(Tensor::from_cuda(&device, other, &[3], Placement::Replicated), Err(Error::Device { .. })));
    }
    // Nothing is as legal as anywhere else.
    let none = Tensor::from_cuda(&device, stream.null::<f32>().unwrap(), &[0, 4], Placement::Replicated).unwrap();
    assert!(none.to_vec().unwrap().is_empty());
    assert_eq!(tensor.to_vec().unwrap(), [1.0, 2.0, 3.0]);
}
