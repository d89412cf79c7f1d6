//! Asynchronous tensor-parallel linear layers: one matrix over several devices, with the communication hidden under the
//! multiplication, forward and backward.

mod comm;
mod device;
mod dtype;
mod error;
mod group;
mod layout;
mod linear;
mod memory;
mod parameter;
mod tensor;
pub mod timeline;

pub use comm::local::{Link, LocalWorld};
#[cfg(feature = "cuda")]
pub use comm::nccl::world::NcclWorld;
#[cfg(feature = "cuda")]
pub use comm::nccl::{CtaPolicy, NcclCommunicator, NcclConfig, NcclId, Reduction};
#[cfg(feature = "cuda")]
pub use comm::peer::PeerWorld;
pub use comm::{Blocks, Communicator, DEFAULT_DEADLINE, Operation, ReduceOp};
#[cfg(feature = "cuda")]
pub use device::cuda::CudaDevice;
pub use device::{Cpu, Device, Matmul, Matrix};
pub use dtype::{DType, Element, Float};
pub use error::{Error, Result};
pub use group::{Group, Pending};
pub use layout::{ContiguousChunks, ShardLayout};
pub use linear::column::TensorParallelColumnLinear;
pub use linear::row::TensorParallelRowLinear;
pub use linear::{LinearBuilder, LinearConfig, LinearLayer, LinearMode, Overlap, Saved};
pub use memory::{Buffer, BufferMut, Memory};
pub use parameter::Parameter;
pub use tensor::{Placement, Shape, Tensor};
