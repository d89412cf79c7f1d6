//! Where the ranks of an example run: threads on the CPU, or CUDA devices with either communicator.

#![allow(dead_code, unreachable_pub)]

#[cfg(not(feature = "cuda"))]
use async_tensor_parallel::Error;
use async_tensor_parallel::timeline::Recorder;
use async_tensor_parallel::{Group, LocalWorld, Result};
#[cfg(feature = "cuda")]
use async_tensor_parallel::{NcclWorld, PeerWorld};

/// What the flags mean, for an example's help.
pub const HELP: &str = "\
  --backend B            cpu, or cuda (of a build with the feature `cuda`) [cpu]
  --communicator C       local with cpu; nccl or peer with cuda [local; nccl]
";

/// What the ranks compute on and communicate by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Engine {
    #[default]
    Local,
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
            (None | Some("cpu"), None | Some("local")) => Ok(Engine::Local),
            (None | Some("cuda"), Some("nccl")) | (Some("cuda"), None) => Ok(Engine::Nccl),
            (None | Some("cuda"), Some("peer")) => Ok(Engine::Peer),
            (backend, communicator) => Err(format!(
                "--backend is {}, --communicator is {}; wanted cpu with local, or cuda with nccl or peer",
                backend.unwrap_or("not given"),
                communicator.unwrap_or("not given")
            )),
        }
    }
}

/// Ranks as threads of this process, on any engine.
#[derive(Debug, Clone)]
pub enum World {
    Local(LocalWorld),
    #[cfg(feature = "cuda")]
    Nccl(NcclWorld),
    #[cfg(feature = "cuda")]
    Peer(PeerWorld),
}

impl World {
    pub fn new(engine: Engine, ranks: usize) -> Result<Self> {
        match engine {
            Engine::Local => Ok(World::Local(LocalWorld::new(ranks)?)),
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
            #[cfg(feature = "cuda")]
            World::Nccl(world) => world.run(f),
            #[cfg(feature = "cuda")]
            World::Peer(world) => world.run(f),
        }
    }

    pub fn recorder(&self) -> &Recorder {
        match self {
            World::Local(world) => world.recorder(),
            #[cfg(feature = "cuda")]
            World::Nccl(world) => world.recorder(),
            #[cfg(feature = "cuda")]
            World::Peer(world) => world.recorder(),
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
            #[cfg(feature = "cuda")]
            World::Nccl(_) => "CUDA devices, NCCL".into(),
            #[cfg(feature = "cuda")]
            World::Peer(_) => "CUDA devices, copies between peers".into(),
        }
    }
}
