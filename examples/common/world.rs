//! Where the ranks of an example run: threads on the CPU, processes of an MPI job, or CUDA devices with either communicator.

#![allow(dead_code, unreachable_pub)]

#[cfg(any(not(feature = "cuda"), not(feature = "mpi")))]
use async_tensor_parallel::Error;
#[cfg(feature = "mpi")]
use async_tensor_parallel::MpiWorld;
use async_tensor_parallel::timeline::Recorder;
#[cfg(feature = "cuda")]
use async_tensor_parallel::{CudaDevice, NcclWorld, PeerWorld};
use async_tensor_parallel::{Group, LocalWorld, Result, launch};

/// What the flags mean, for an example's help.
pub const HELP: &str = "\
  --backend B            cpu, or cuda (of a build with the feature `cuda`) [cpu]
  --communicator C       local or mpi with cpu; nccl or peer with cuda [mpi under an MPI launcher, or else local; nccl]
";

/// What the ranks compute on and communicate by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Engine {
    #[default]
    Local,
    Mpi,
    Nccl,
    Peer,
}

/// The flags as given.
#[derive(Debug, Clone, Default)]
pub struct Flags {
    pub backend: Option<String>,
    pub communicator: Option<String>,
}

impl Flags {
    /// Takes the flag's value where it is one of these; whether it is.
    pub fn take(&mut self, name: &str, parser: &mut lexopt::Parser) -> std::result::Result<bool, lexopt::Error> {
        let flag = match name {
            "backend" => &mut self.backend,
            "communicator" => &mut self.communicator,
            _ => return Ok(false),
        };
        *flag = Some(lexopt::ValueExt::string(parser.value()?)?);
        Ok(true)
    }

    /// The engine that they name together.
    pub fn engine(&self) -> std::result::Result<Engine, String> {
        match (self.backend.as_deref(), self.communicator.as_deref()) {
            (None | Some("cpu"), None) if launched() => Ok(Engine::Mpi),
            (None | Some("cpu"), Some("mpi")) => Ok(Engine::Mpi),
            (None | Some("cpu"), None | Some("local")) => Ok(Engine::Local),
            (None | Some("cuda"), Some("nccl")) | (Some("cuda"), None) => Ok(Engine::Nccl),
            (None | Some("cuda"), Some("peer")) => Ok(Engine::Peer),
            (backend, communicator) => Err(format!(
                "--backend is {}, --communicator is {}; wanted cpu with local or mpi, or cuda with nccl or peer",
                backend.unwrap_or("not given"),
                communicator.unwrap_or("not given")
            )),
        }
    }
}

impl Engine {
    /// As many ranks as asked for, or else one a GPU where there are several, or else `otherwise`.
    pub fn ranks(self, asked: Option<usize>, otherwise: usize) -> usize {
        asked.unwrap_or_else(|| match (self.most_ranks(), self) {
            (Some(most), Engine::Nccl) => most,
            (Some(most), Engine::Peer) if most > 1 => most,
            _ => otherwise,
        })
    }

    /// The number of GPUs, which NCCL wants one of for each rank; `None` where that sets no limit.
    pub fn most_ranks(self) -> Option<usize> {
        match self {
            #[cfg(feature = "cuda")]
            Engine::Nccl | Engine::Peer => CudaDevice::count().ok().map(|count| count.max(1)),
            _ => None,
        }
    }
}

/// Whether a launcher started this process as one of several, and this build can talk to the others.
pub fn launched() -> bool {
    cfg!(feature = "mpi") && launch::Job::from_env().is_ok_and(|job| job.is_some())
}

/// MPI runs once in a process: the world that all of the example's parts use.
#[cfg(feature = "mpi")]
static MPI: std::sync::Mutex<Option<std::sync::Arc<MpiWorld>>> = std::sync::Mutex::new(None);

#[cfg(feature = "mpi")]
fn mpi() -> Result<std::sync::Arc<MpiWorld>> {
    let mut world = MPI.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(world) = &*world {
        return Ok(std::sync::Arc::clone(world));
    }
    let started = std::sync::Arc::new(MpiWorld::init()?);
    *world = Some(std::sync::Arc::clone(&started));
    Ok(started)
}

/// Ends what has to be ended before the process exits.
pub fn finish() {
    #[cfg(feature = "mpi")]
    MPI.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
}

/// The ranks, on any engine: threads of this process, or of a job of which this process is one.
#[derive(Debug, Clone)]
pub enum World {
    Local(LocalWorld),
    #[cfg(feature = "mpi")]
    Mpi(std::sync::Arc<MpiWorld>),
    #[cfg(feature = "cuda")]
    Nccl(NcclWorld),
    #[cfg(feature = "cuda")]
    Peer(PeerWorld),
}

impl World {
    pub fn new(engine: Engine, ranks: usize) -> Result<Self> {
        match engine {
            Engine::Local => Ok(World::Local(LocalWorld::new(ranks)?)),
            #[cfg(feature = "mpi")]
            Engine::Mpi => mpi().map(World::Mpi),
            #[cfg(not(feature = "mpi"))]
            Engine::Mpi => Err(Error::Unsupported {
                what: "--communicator mpi".into(),
                reason: "this was built without the feature `mpi`".into(),
            }),
            #[cfg(feature = "cuda")]
            Engine::Nccl => Ok(World::Nccl(NcclWorld::new(ranks)?)),
            #[cfg(feature = "cuda")]
            Engine::Peer => Ok(World::Peer(PeerWorld::new(ranks)?)),
            #[cfg(not(feature = "cuda"))]
            Engine::Nccl | Engine::Peer => Err(Error::Unsupported {
                what: "--backend cuda".into(),
                reason: "this was built without the feature `cuda`".into(),
            }),
        }
    }

    pub fn run<R: Send>(&self, f: impl Fn(&Group) -> Result<R> + Sync) -> Result<Vec<R>> {
        match self {
            World::Local(world) => world.run(f),
            #[cfg(feature = "mpi")]
            World::Mpi(world) => Ok(vec![world.run(f)?]),
            #[cfg(feature = "cuda")]
            World::Nccl(world) => world.run(f),
            #[cfg(feature = "cuda")]
            World::Peer(world) => world.run(f),
        }
    }

    pub fn recorder(&self) -> &Recorder {
        match self {
            World::Local(world) => world.recorder(),
            #[cfg(feature = "mpi")]
            World::Mpi(world) => world.recorder(),
            #[cfg(feature = "cuda")]
            World::Nccl(world) => world.recorder(),
            #[cfg(feature = "cuda")]
            World::Peer(world) => world.recorder(),
        }
    }

    /// Whether this process speaks for all.
    pub fn is_first(&self) -> bool {
        match self {
            #[cfg(feature = "mpi")]
            World::Mpi(world) => world.rank() == 0,
            _ => true,
        }
    }

    /// The number of ranks, where a launcher has decided it.
    pub fn launched_ranks(&self) -> Option<usize> {
        match self {
            #[cfg(feature = "mpi")]
            World::Mpi(world) => Some(world.world_size()),
            _ => None,
        }
    }

    /// What the ranks communicate over, in words.
    pub fn describe(&self) -> String {
        match self {
            World::Local(world) => match world.link() {
                Some(link) => format!(
                    "modelled link of {:.3} Gbit/s and {:.0} us",
                    link.bandwidth * 8.0 / 1e9,
                    link.latency.as_secs_f64() * 1e6
                ),
                None => "no link: messages are copies".into(),
            },
            #[cfg(feature = "mpi")]
            World::Mpi(_) => "processes over MPI".into(),
            #[cfg(feature = "cuda")]
            World::Nccl(_) => "CUDA devices, NCCL".into(),
            #[cfg(feature = "cuda")]
            World::Peer(_) => "CUDA devices, copies between peers".into(),
        }
    }
}
