//! Ranks in three dimensions: data, pipeline and tensor parallel.

use crate::group::{Group, Pending};
use crate::tensor::{Placement, Tensor};
use crate::{Error, Float, Result};

/// A world of `dp · pp · tp` ranks as a grid, tp innermost: rank = (dp index · pp + pp index) · tp + tp index. So the ranks of one
/// tensor-parallel group, which talk most, are neighbours and share a machine.
///
/// ```
/// use async_tensor_parallel::{LocalWorld, Mesh};
///
/// LocalWorld::new(4)?.run(|world| {
///     let mesh = Mesh::new(world, 2, 1, 2)?;
///     assert_eq!(mesh.tp().world_size(), 2);
///     assert_eq!((mesh.dp_rank(), mesh.tp_rank()), (world.rank() / 2, world.rank() % 2));
///     Ok(())
/// })?;
/// # Ok::<(), async_tensor_parallel::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Mesh {
    world: Group,
    dp: Group,
    pp: Group,
    tp: Group,
}

impl Mesh {
    /// Divides `world`. All its ranks call this together, with the same sizes.
    ///
    /// # Errors
    /// [`Error::Argument`] where the sizes do not multiply to the world's; [`Error::Mismatch`], on every rank, where the ranks
    /// gave different ones; errors of communication.
    pub fn new(world: &Group, dp: usize, pp: usize, tp: usize) -> Result<Self> {
        agree(world, [dp, pp, tp])?;
        let size = world.world_size();
        if dp.checked_mul(pp).and_then(|ranks| ranks.checked_mul(tp)) != Some(size) || size == 0 {
            return Err(Error::Argument {
                what: "mesh",
                got: format!("dp {dp} × pp {pp} × tp {tp}"),
                wanted: format!("sizes that multiply to the {size} ranks of the world"),
            });
        }
        let rank = world.rank();
        let (tp_rank, pp_rank, dp_rank) = (rank % tp, rank / tp % pp, rank / (tp * pp));
        let axis = |color: usize, key: usize| {
            world
                .split(Some(color), key)?
                .ok_or_else(|| Error::Closed { rank, cause: "a split left this rank out".into() })
        };
        let tp_group = axis(dp_rank * pp + pp_rank, tp_rank)?;
        let pp_group = axis(dp_rank * tp + tp_rank, pp_rank)?;
        let dp_group = axis(pp_rank * tp + tp_rank, dp_rank)?;
        Ok(Self { world: world.clone(), dp: dp_group, pp: pp_group, tp: tp_group })
    }

    /// All ranks.
    pub fn world(&self) -> &Group {
        &self.world
    }

    /// The ranks that hold the same part of the model and see other data.
    pub fn dp(&self) -> &Group {
        &self.dp
    }

    /// The ranks that hold the stages of one copy of the model, in order.
    pub fn pp(&self) -> &Group {
        &self.pp
    }

    /// The ranks that share the matrices of one stage.
    pub fn tp(&self) -> &Group {
        &self.tp
    }

    /// This rank's place among the copies.
    pub fn dp_rank(&self) -> usize {
        self.dp.rank()
    }

    /// This rank's stage.
    pub fn pp_rank(&self) -> usize {
        self.pp.rank()
    }

    /// This rank's place in its tensor-parallel group.
    pub fn tp_rank(&self) -> usize {
        self.tp.rank()
    }

    /// Sends an activation to the next stage.
    ///
    /// # Errors
    /// [`Error::Argument`] on the last stage.
    pub fn send_next<T: Float>(&self, activation: &Tensor<T>) -> Result<Pending<T>> {
        self.pp.send(self.stage(self.pp_rank() + 1, "next")?, activation)
    }

    /// Receives an activation of the given shape from the stage before.
    ///
    /// # Errors
    /// [`Error::Argument`] on the first stage.
    pub fn receive_previous<T: Float>(&self, dims: &[usize], placement: Placement) -> Result<Pending<T>> {
        self.pp.receive(self.stage(self.pp_rank().wrapping_sub(1), "previous")?, dims, placement)
    }

    /// Sends the gradient of an activation back to the stage that it came from.
    ///
    /// # Errors
    /// [`Error::Argument`] on the first stage.
    pub fn send_previous<T: Float>(&self, gradient: &Tensor<T>) -> Result<Pending<T>> {
        self.pp.send(self.stage(self.pp_rank().wrapping_sub(1), "previous")?, gradient)
    }

    /// Receives the gradient of the activation that was sent to the next stage.
    ///
    /// # Errors
    /// [`Error::Argument`] on the last stage.
    pub fn receive_next<T: Float>(&self, dims: &[usize], placement: Placement) -> Result<Pending<T>> {
        self.pp.receive(self.stage(self.pp_rank() + 1, "next")?, dims, placement)
    }

    fn stage(&self, stage: usize, which: &'static str) -> Result<usize> {
        if stage < self.pp.world_size() {
            return Ok(stage);
        }
        Err(Error::Argument {
            what: "pipeline stage",
            got: format!("the {which} one of stage {}", self.pp_rank()),
            wanted: format!("one of {}", self.pp.world_size()),
        })
    }
}

/// Fails on every rank where the ranks do not give the same numbers.
fn agree(world: &Group, sizes: [usize; 3]) -> Result<()> {
    let own = sizes.map(|size| size as i64);
    let all = world.all_gather(&world.tensor(&own, &[1, 3], Placement::Rows)?)?.wait()?.to_vec()?;
    let say = |sizes: &[i64]| format!("mesh of dp {} × pp {} × tp {}", sizes[0], sizes[1], sizes[2]);
    // Every rank finds the same pair: the first that differs from rank 0.
    let Some(odd) = all.chunks(3).position(|sizes| sizes != &all[..3]) else { return Ok(()) };
    let (rank, peer) = if world.rank() == odd { (odd, 0) } else { (0, odd) };
    let (ours, theirs) = (say(&all[3 * rank..3 * rank + 3]), say(&all[3 * peer..3 * peer + 3]));
    Err(Error::Mismatch { rank, peer, sequence: 0, ours, theirs })
}
