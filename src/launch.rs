//! Starting: which ranks there are, found out from what the launcher set.
//!
//! [`World::from_env`] looks for the variables of a launcher and gives a world of processes if there are any, a world of
//! threads otherwise. The same program then runs on a laptop, under `mpirun`, and under `srun`.

mod job;
pub mod rendezvous;

use crate::group::Group;
use crate::{Error, LocalWorld, Result};

pub use job::{Job, Launcher};

/// The ranks of this program: threads of this process, or processes of a job.
#[derive(Debug)]
#[non_exhaustive]
pub enum World {
    /// Ranks are threads.
    Local(LocalWorld),
    /// This process is one rank of an MPI job.
    #[cfg(feature = "mpi")]
    Mpi(crate::MpiWorld, Job),
}

impl World {
    /// The world that the environment describes: see [`Job::from_env`]. Where it describes none, ranks are threads: as many as
    /// the variable `ATP_RANKS` says, or as the machine has cores.
    ///
    /// # Errors
    /// Those of [`Job::from_env`]; [`Error::Argument`] for an `ATP_RANKS` that is no number of ranks; [`Error::Unsupported`]
    /// where a launcher started several processes and this build has no way for them to talk (feature `mpi`); those of MPI.
    pub fn from_env() -> Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let ranks = match std::env::var("ATP_RANKS") {
            Err(_) => cores,
            Ok(text) => text.parse().map_err(|_| Error::Argument {
                what: "ATP_RANKS",
                got: format!("{text:?}"),
                wanted: "a number of ranks".into(),
            })?,
        };
        Self::from_env_or(LocalWorld::new(ranks)?)
    }

    /// The same with `local` where the environment describes no job.
    ///
    /// # Errors
    /// As [`World::from_env`].
    pub fn from_env_or(local: LocalWorld) -> Result<Self> {
        match Job::from_env()? {
            None => Ok(World::Local(local)),
            Some(job) => Self::of_job(job),
        }
    }

    #[cfg(feature = "mpi")]
    fn of_job(job: Job) -> Result<Self> {
        let world = crate::MpiWorld::init()?;
        if (world.rank(), world.world_size()) != (job.rank, job.world_size) {
            return Err(Error::Argument {
                what: "launcher",
                got: format!(
                    "{}, rank {} of {}, but MPI says rank {} of {}",
                    job.launcher,
                    job.rank,
                    job.world_size,
                    world.rank(),
                    world.world_size()
                ),
                wanted: "processes started by a launcher that this MPI library knows (mpirun, or srun --mpi)".into(),
            });
        }
        Ok(World::Mpi(world, job))
    }

    #[cfg(not(feature = "mpi"))]
    fn of_job(job: Job) -> Result<Self> {
        // A job of one process needs nobody to talk to.
        if job.world_size == 1 {
            return LocalWorld::new(1).map(World::Local);
        }
        Err(Error::Unsupported {
            what: format!("a job of {} processes ({})", job.world_size, job.launcher),
            reason: "this build has no communicator between processes: build it with the feature `mpi`".into(),
        })
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        match self {
            World::Local(world) => world.world_size(),
            #[cfg(feature = "mpi")]
            World::Mpi(world, _) => world.world_size(),
        }
    }

    /// Whether this process should speak for all: true for threads, and for rank 0 of a job.
    pub fn is_first(&self) -> bool {
        match self {
            World::Local(_) => true,
            #[cfg(feature = "mpi")]
            World::Mpi(world, _) => world.rank() == 0,
        }
    }

    /// Runs `f` on every rank of this process: all of them where they are threads, one in a job. Returns what they returned.
    ///
    /// # Errors
    /// As [`LocalWorld::run`].
    pub fn run<R: Send>(&self, f: impl Fn(&Group) -> Result<R> + Sync) -> Result<Vec<R>> {
        match self {
            World::Local(world) => world.run(f),
            #[cfg(feature = "mpi")]
            World::Mpi(world, _) => Ok(vec![world.run(f)?]),
        }
    }
}

/// Runs `f` on every rank of [`World::from_env`].
///
/// ```
/// use async_tensor_parallel::{Placement, launch};
///
/// launch::run(|group| {
///     let ones = group.tensor(&[1f32], &[1], Placement::Partial)?;
///     assert_eq!(group.all_reduce(&ones)?.wait()?.to_vec()?, [group.world_size() as f32]);
///     Ok(())
/// })?;
/// # Ok::<(), async_tensor_parallel::Error>(())
/// ```
///
/// # Errors
/// As [`World::from_env`] and [`World::run`].
pub fn run<R: Send>(f: impl Fn(&Group) -> Result<R> + Sync) -> Result<Vec<R>> {
    World::from_env()?.run(f)
}
