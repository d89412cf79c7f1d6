//! Asynchronous tensor-parallel linear layers: one matrix over several devices, with the communication hidden under the
//! multiplication, forward and backward.
//!
//! - [`TensorParallelColumnLinear`] and [`TensorParallelRowLinear`] are the layers, [`LinearMode`] says what they keep whole,
//!   [`Overlap`] how they hide their communication.
//! - [`LocalWorld`] runs ranks as threads of this process, each with its [`Group`]: a [`Device`] and a [`Communicator`], the two
//!   seams behind which the engines stand.
//! - [`Tensor`] knows its [`Placement`] over the ranks; [`Pending`] is one that a collective is bringing.
//! - [`timeline`] shows what ran beside what.
//!
//! ```
//! use async_tensor_parallel::{LinearMode, LocalWorld, Overlap, Placement, TensorParallelColumnLinear};
//!
//! LocalWorld::new(4)?.run(|group| {
//!     let layer = TensorParallelColumnLinear::<f32>::builder(64, 256) // in_features, out_features of the whole
//!         .mode(LinearMode::ReduceScatter)
//!         .overlap(Overlap::Pipelined { chunks: 0 })
//!         .build(group)?;
//!     let x = group.tensor(&[0.5; 8 * 64], &[8, 64], Placement::Rows)?; // this rank's rows
//!     let (y, saved) = layer.forward(&x)?; // all 32 rows, this rank's 64 features
//!     let dy = group.tensor(&[1.0; 32 * 64], y.shape(), Placement::Features)?;
//!     let dx = layer.backward(saved, &dy)?; // this rank's rows; the weight's gradient is added up in the layer
//!     assert_eq!(dx.shape()[..], [8, 64]);
//!     Ok(())
//! })?;
//! # Ok::<(), async_tensor_parallel::Error>(())
//! ```

#[cfg(feature = "checkpoint")]
mod checkpoint;
mod comm;
#[cfg(feature = "config")]
mod config;
mod cross_entropy;
mod device;
mod dtype;
mod embedding;
mod error;
mod fused_loss;
mod gradients;
mod group;
pub mod launch;
mod layout;
mod linear;
mod memory;
mod mesh;
mod meter;
mod mode;
#[cfg(feature = "nvtx")]
mod nvtx;
mod pairs;
mod parameter;
mod plan;
mod tensor;
pub mod timeline;

#[cfg(feature = "checkpoint")]
pub use checkpoint::{Checkpoint, Checkpointed, Part, save as save_checkpoint};
pub use comm::local::{Link, LocalWorld};
#[cfg(feature = "mpi")]
pub use comm::mpi::MpiWorld;
#[cfg(feature = "cuda")]
pub use comm::nccl::world::NcclWorld;
#[cfg(feature = "cuda")]
pub use comm::nccl::{CtaPolicy, NcclCommunicator, NcclConfig, NcclId, Reduction};
#[cfg(feature = "cuda")]
pub use comm::peer::PeerWorld;
pub use comm::{Blocks, Communicator, DEFAULT_DEADLINE, Operation, ReduceOp};
#[cfg(feature = "config")]
pub use config::{ParallelismConfig, PipelineSchedule};
pub use cross_entropy::{SavedLogits, ShardedCrossEntropy};
#[cfg(feature = "cuda")]
pub use device::CudaDevice;
pub use device::{Cpu, CrossEntropyLoss, Device, Matmul, Matrix, SoftmaxPart};
pub use dtype::{DType, Element, Float};
pub use embedding::{EmbeddingBuilder, EmbeddingConfig, SavedIds, TensorParallelEmbedding};
pub use error::{Error, Result};
pub use gradients::{Combine, GradientBuckets, sum_replicated_gradients};
pub use group::{Group, Pending};
pub use layout::{ContiguousChunks, ShardLayout};
pub use linear::column::TensorParallelColumnLinear;
pub use linear::row::TensorParallelRowLinear;
pub use linear::{LinearBuilder, LinearConfig, LinearLayer, Saved};
pub use memory::{Buffer, BufferMut, Memory};
pub use mesh::Mesh;
pub use meter::OverlapReport;
pub use mode::{LinearMode, Overlap};
pub use pairs::{CopyToRegion, GatherRows, ReduceFromRegion, ScatterSum};
pub use parameter::Parameter;
pub use plan::{LayerKind, Pass, Plan, Prediction, ProductCost, Site, WireCost};
pub use tensor::{Placement, Shape, Tensor};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
