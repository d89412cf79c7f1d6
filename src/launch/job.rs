//! What launchers say in the environment.

use std::fmt;

use crate::{Error, Result};

/// Who started the processes of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Launcher {
    /// `torchrun`, or anything that sets its variables: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`.
    Torchrun,
    /// Open MPI's `mpirun`: `OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE`, `OMPI_COMM_WORLD_LOCAL_RANK`.
    OpenMpi,
    /// MPICH's `mpirun` (Hydra): `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID`.
    Mpich,
    /// SLURM's `srun`: `SLURM_PROCID`, `SLURM_NTASKS`, `SLURM_LOCALID`, within a job step (`SLURM_STEP_ID`).
    Slurm,
}

impl Launcher {
    /// In the order in which they are looked for. SLURM comes last: an `mpirun` within its allocation passes its variables on,
    /// with values that are not the ranks'.
    const ALL: [Launcher; 4] = [Launcher::Torchrun, Launcher::OpenMpi, Launcher::Mpich, Launcher::Slurm];

    /// Its variables for rank, world size and local rank.
    fn variables(self) -> [&'static str; 3] {
        match self {
            Launcher::Torchrun => ["RANK", "WORLD_SIZE", "LOCAL_RANK"],
            Launcher::OpenMpi => ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],
            Launcher::Mpich => ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"],
            Launcher::Slurm => ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"],
        }
    }
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Launcher::Torchrun => "torchrun's variables",
            Launcher::OpenMpi => "Open MPI",
            Launcher::Mpich => "MPICH",
            Launcher::Slurm => "SLURM",
        })
    }
}

/// This process's place in a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// Who started it.
    pub launcher: Launcher,
    /// Its rank, from 0.
    pub rank: usize,
    /// The number of processes.
    pub world_size: usize,
    /// Its number among the processes of its machine, from 0; the rank, where the launcher does not say.
    pub local_rank: usize,
    /// Where rank 0 can be met: `MASTER_ADDR` and `MASTER_PORT`, or the first host of a SLURM job; `None` where nobody says.
    pub master: Option<(String, u16)>,
}

impl Job {
    /// The port at which rank 0 is met where `MASTER_PORT` is not set: torchrun's.
    pub const DEFAULT_PORT: u16 = 29500;

    /// What the environment says: the first of torchrun, Open MPI, MPICH and SLURM whose rank and world size are set.
    /// `None` where none is.
    ///
    /// # Errors
    /// [`Error::Argument`] that names the variables: where one of a pair is set alone, is not a number, or does not fit the
    /// others; where torchrun's and an MPI launcher's disagree.
    pub fn from_env() -> Result<Option<Self>> {
        Self::read(|name| std::env::var(name).ok())
    }

    /// The same from any source of variables.
    ///
    /// # Errors
    /// As [`Job::from_env`].
    pub fn read(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let mut jobs = Vec::new();
        for launcher in Launcher::ALL {
            if launcher == Launcher::Slurm && (lookup("SLURM_STEP_ID").is_none() || !jobs.is_empty()) {
                continue;
            }
            jobs.extend(Self::of(launcher, &lookup)?);
        }
        let Some(first) = jobs.first() else { return Ok(None) };
        if let Some(other) = jobs.iter().find(|job| (job.rank, job.world_size) != (first.rank, first.world_size)) {
            let say = |job: &Job| {
                let [rank, size, _] = job.launcher.variables();
                format!("{rank}={} {size}={}", job.rank, job.world_size)
            };
            return Err(Error::Argument {
                what: "launcher variables",
                got: format!("{} and {}", say(first), say(other)),
                wanted: "the same rank and world size from both, or one of them unset".into(),
            });
        }
        Ok(jobs.into_iter().next())
    }

    fn of(launcher: Launcher, lookup: &impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let [rank_name, size_name, local_name] = launcher.variables();
        let number = |name: &'static str| -> Result<Option<usize>> {
            let Some(text) = lookup(name) else { return Ok(None) };
            match text.trim().parse() {
                Ok(number) => Ok(Some(number)),
                Err(_) => {
                    Err(Error::Argument { what: name, got: format!("{text:?}"), wanted: "a number from 0".into() })
                }
            }
        };
        let (rank, world_size) = match (number(rank_name)?, number(size_name)?) {
            (None, None) => return Ok(None),
            (Some(rank), Some(world_size)) => (rank, world_size),
            (Some(rank), None) => {
                let wanted = format!("{rank_name}={rank} is set: the number of processes");
                return Err(Error::Argument { what: size_name, got: "nothing".into(), wanted });
            }
            (None, Some(size)) => {
                let wanted = format!("{size_name}={size} is set: this process's rank");
                return Err(Error::Argument { what: rank_name, got: "nothing".into(), wanted });
            }
        };
        if rank >= world_size {
            let wanted = format!("a rank below {size_name}={world_size}");
            return Err(Error::Argument { what: rank_name, got: rank.to_string(), wanted });
        }
        let local_rank = number(local_name)?.unwrap_or(rank);
        if local_rank > rank {
            let wanted = format!("at most {rank_name}={rank}");
            return Err(Error::Argument { what: local_name, got: local_rank.to_string(), wanted });
        }
        Ok(Some(Self { launcher, rank, world_size, local_rank, master: master(launcher, lookup)? }))
    }
}

/// Where rank 0 can be met.
fn master(launcher: Launcher, lookup: &impl Fn(&str) -> Option<String>) -> Result<Option<(String, u16)>> {
    let port = match lookup("MASTER_PORT") {
        None => None,
        Some(text) => match text.trim().parse::<u16>() {
            Ok(port) if port > 0 => Some(port),
            _ => {
                let (got, wanted) = (format!("{text:?}"), "a port from 1 to 65535".into());
                return Err(Error::Argument { what: "MASTER_PORT", got, wanted });
            }
        },
    };
    let address =
        lookup("MASTER_ADDR").filter(|address| !address.trim().is_empty()).map(|text| text.trim().to_string());
    let slurm =
        || lookup("SLURM_STEP_NODELIST").or_else(|| lookup("SLURM_NODELIST")).and_then(|list| first_host(&list));
    Ok(match (address, port) {
        (Some(address), port) => Some((address, port.unwrap_or(Job::DEFAULT_PORT))),
        (None, Some(port)) if launcher == Launcher::Torchrun => {
            let wanted = format!("MASTER_PORT={port} is set: the address of rank 0");
            return Err(Error::Argument { what: "MASTER_ADDR", got: "nothing".into(), wanted });
        }
        (None, port) if launcher == Launcher::Slurm => slurm().map(|host| (host, port.unwrap_or(Job::DEFAULT_PORT))),
        _ => None,
    })
}

/// The first host of a SLURM node list such as `n1`, `n[03-07,9],m2` or `rack[1-2]node[1-4]`.
fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.trim();
    loop {
        let end = rest.find(['[', ',']).unwrap_or(rest.len());
        host += &rest[..end];
        match rest[end..].chars().next() {
            Some('[') => {
                let close = rest.find(']')?;
                // The first number of the first range, with its leading zeros.
                let numbers = rest.get(end + 1..close)?;
                let first: String = numbers.chars().take_while(char::is_ascii_digit).collect();
                if first.is_empty() {
                    return None;
                }
                host += &first;
                rest = &rest[close + 1..];
            }
            _ => break,
        }
    }
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    (!host.is_empty() && host.chars().all(fits)).then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<Job>> {
        Job::read(|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string()))
    }

    #[test]
    fn every_launcher_is_known() {
        assert_eq!(read(&[("PATH", "/bin")]).unwrap(), None);
        let job = read(&[
            ("RANK", "3"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "1"),
            ("MASTER_ADDR", "host-1"),
            ("MASTER_PORT", "1234"),
        ]);
        let job = job.unwrap().unwrap();
        assert_eq!((job.launcher, job.rank, job.world_size, job.local_rank), (Launcher::Torchrun, 3, 8, 1));
        assert_eq!(job.master, Some(("host-1".into(), 1234)));
        let ompi = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_LOCAL_RANK", "0")];
        assert_eq!(read(&ompi).unwrap().unwrap().launcher, Launcher::OpenMpi);
        let mpich = [("PMI_RANK", "0"), ("PMI_SIZE", "1")];
        assert_eq!(
            read(&mpich).unwrap().unwrap(),
            Job { launcher: Launcher::Mpich, rank: 0, world_size: 1, local_rank: 0, master: None }
        );
        let slurm = [
            ("SLURM_PROCID", "5"),
            ("SLURM_NTASKS", "6"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_NODELIST", "gpu[007-009,12],x1"),
        ];
        let job = read(&slurm).unwrap().unwrap();
        assert_eq!((job.launcher, job.rank, job.local_rank), (Launcher::Slurm, 5, 1));
        assert_eq!(job.master, Some(("gpu007".into(), Job::DEFAULT_PORT)));
        // A batch script is no job step: what it starts itself is one process.
        assert_eq!(read(&[slurm[0], slurm[1]]).unwrap(), None);
        // mpirun within an allocation: its own word counts.
        assert_eq!(read(&[ompi[0], ompi[1], slurm[0], slurm[1], slurm[3]]).unwrap().unwrap().rank, 1);
    }

    #[test]
    fn what_is_half_set_or_contradictory_is_named() {
        for (variables, words) in [
            (&[("RANK", "1")][..], &["WORLD_SIZE", "RANK=1"][..]),
            (&[("WORLD_SIZE", "2")], &["RANK", "WORLD_SIZE=2"]),
            (&[("RANK", "2"), ("WORLD_SIZE", "2")], &["RANK", "2", "WORLD_SIZE=2"]),
            (&[("RANK", "0"), ("WORLD_SIZE", "0")], &["RANK", "WORLD_SIZE=0"]),
            (&[("RANK", "-1"), ("WORLD_SIZE", "2")], &["RANK", "-1"]),
            (&[("RANK", "1"), ("WORLD_SIZE", "two")], &["WORLD_SIZE", "two"]),
            (&[("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "2")], &["LOCAL_RANK", "2", "RANK=1"]),
            (&[("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "0")], &["MASTER_PORT"]),
            (&[("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "99999")], &["MASTER_PORT", "99999"]),
            (&[("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "5")], &["MASTER_ADDR", "MASTER_PORT=5"]),
            (
                &[("RANK", "1"), ("WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "2")],
                &["RANK=1", "OMPI_COMM_WORLD_RANK=0"],
            ),
            (&[("PMI_SIZE", "4")], &["PMI_RANK"]),
        ] {
            let error = read(variables).unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{variables:?}: {error}");
        }
    }

    #[test]
    fn node_lists_are_read() {
        for (list, host) in [
            ("n1", Some("n1")),
            ("n1,n2", Some("n1")),
            ("n[3,5-7]", Some("n3")),
            ("rack[01-02]node[10-11].site,z", Some("rack01node10.site")),
            ("", None),
            ("n[", None),
            ("n[]", None),
            ("n[a-b]", None),
            ("; rm -rf /", None),
        ] {
            assert_eq!(first_host(list).as_deref(), host, "{list}");
        }
    }

    proptest! {
        #[test]
        fn nothing_makes_it_panic(values in prop::collection::vec(prop::option::of(".{0,12}"), 12)) {
            let names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_RANK",
                "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_NODELIST"];
            let lookup = |name: &str| names.iter().position(|known| *known == name).and_then(|i| values[i].clone());
            if let Ok(Some(job)) = Job::read(lookup) {
                prop_assert!(job.rank < job.world_size && job.local_rank <= job.rank);
            }
        }

        #[test]
        fn no_node_list_makes_it_panic(list in ".{0,40}") {
            first_host(&list);
        }
    }
}
