//! Worlds of CUDA devices, whichever communicator.

use std::time::Duration;

use async_tensor_parallel::{CudaDevice, Group, NcclWorld, PeerWorld, Result};

/// The communicators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Nccl,
    Peer,
}

impl Kind {
    pub const ALL: [Kind; 2] = [Kind::Nccl, Kind::Peer];
}

/// A world of either.
#[derive(Debug, Clone)]
pub enum World {
    Nccl(NcclWorld),
    Peer(PeerWorld),
}

/// The number of CUDA devices; 0, with a word, where there are none. `CUDA_REQUIRED=1` makes that a failure.
pub fn devices() -> usize {
    let found = CudaDevice::count();
    let count = *found.as_ref().unwrap_or(&0);
    if count == 0 {
        assert!(std::env::var_os("CUDA_REQUIRED").is_none(), "no CUDA device: {found:?}");
        eprintln!("skipped: no CUDA device: {found:?}");
    }
    count
}

impl World {
    pub fn new(kind: Kind, world_size: usize) -> Self {
        match kind {
            Kind::Nccl => World::Nccl(NcclWorld::new(world_size).unwrap()),
            Kind::Peer => World::Peer(PeerWorld::new(world_size).unwrap()),
        }
    }

    pub fn with_deadline(self, deadline: Duration) -> Self {
        match self {
            World::Nccl(world) => World::Nccl(world.with_deadline(deadline)),
            World::Peer(world) => World::Peer(world.with_deadline(deadline)),
        }
    }

    pub fn run<R: Send>(&self, f: impl Fn(&Group) -> Result<R> + Sync) -> Result<Vec<R>> {
        match self {
            World::Nccl(world) => world.run(f),
            World::Peer(world) => world.run(f),
        }
    }

    pub fn run_all<R: Send>(&self, f: impl Fn(&Group) -> Result<R> + Sync) -> Vec<Result<R>> {
        match self {
            World::Nccl(world) => world.run_all(f).unwrap(),
            World::Peer(world) => world.run_all(f),
        }
    }
}
