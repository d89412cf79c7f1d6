//! What can go wrong, as values: every variant names what was got and what was wanted.

use crate::{DType, Placement, Shape};

/// The crate's result type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
///
/// Errors of communication name the rank that saw them, the operation and its sequence number within the group, so
/// that the logs of several ranks can be laid beside each other.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A size that must be split evenly over the ranks is not divisible by their number.
    #[error("{what} is {value}, which is not divisible by {by}")]
    NotDivisible {
        /// The size's name.
        what: &'static str,
        /// Its value.
        value: usize,
        /// The number that should divide it.
        by: usize,
    },

    /// A tensor or slice has the wrong shape or length.
    #[error("{what} has shape {got}, wanted {wanted}")]
    Shape {
        /// Which tensor.
        what: &'static str,
        /// Its shape.
        got: Shape,
        /// What was wanted, in words or as a shape.
        wanted: String,
    },

    /// A tensor has the wrong placement over the ranks.
    #[error("{what} is placed as {got:?}, wanted {wanted:?}{hint}")]
    Placement {
        /// Which tensor.
        what: &'static str,
        /// Its placement.
        got: Placement,
        /// The placement that the layer's mode asks for.
        wanted: Placement,
        /// What usually leads here; empty or starting with `; `.
        hint: &'static str,
    },

    /// A tensor or buffer has the wrong dtype.
    #[error("{what} has dtype {got:?}, wanted {wanted:?}")]
    DType {
        /// Which tensor.
        what: &'static str,
        /// Its dtype.
        got: DType,
        /// The dtype wanted.
        wanted: DType,
    },

    /// A tensor lives on another device than the operation runs on.
    #[error("{what} lives on {got}, wanted {wanted}")]
    Device {
        /// Which tensor.
        what: &'static str,
        /// Where it lives.
        got: String,
        /// Where the operation runs.
        wanted: String,
    },

    /// An argument has a value that makes no sense.
    #[error("{what}: got {got}, wanted {wanted}")]
    Argument {
        /// The argument's name.
        what: &'static str,
        /// Its value.
        got: String,
        /// What would be right.
        wanted: String,
    },

    /// Ranks of one group called different collectives, or the same one with different sizes or dtypes.
    #[error("rank {rank}, operation #{sequence}: this rank called {ours}, but rank {peer} called {theirs}")]
    Mismatch {
        /// The rank that saw it.
        rank: usize,
        /// The rank that it disagrees with.
        peer: usize,
        /// The operation's number within the group, from 0.
        sequence: u64,
        /// What this rank called.
        ours: String,
        /// What the peer called.
        theirs: String,
    },

    /// A rank exited, panicked, returned or was lost while others needed it.
    #[error("rank {rank} is lost ({reason}); seen by rank {seen_by} in {operation} #{sequence}")]
    PeerLost {
        /// The rank that is lost.
        rank: usize,
        /// The rank that noticed.
        seen_by: usize,
        /// The operation that needed it.
        operation: String,
        /// The operation's number within the group, from 0.
        sequence: u64,
        /// What is known of the cause.
        reason: String,
    },

    /// A wait passed its deadline.
    #[error("rank {rank} waited {seconds:.3} s in {operation} #{sequence}; not arrived: {missing}")]
    Timeout {
        /// The rank that waited.
        rank: usize,
        /// The operation.
        operation: String,
        /// The operation's number within the group, from 0.
        sequence: u64,
        /// How long it waited, in seconds.
        seconds: f64,
        /// The ranks whose part is missing, and what they were last seen doing.
        missing: String,
    },

    /// The group was shut down by an earlier error of this or another rank.
    #[error("rank {rank}: the group is closed since an earlier error: {cause}")]
    Closed {
        /// This rank.
        rank: usize,
        /// The error that closed it.
        cause: String,
    },

    /// A rank's own function panicked.
    #[error("rank {rank} panicked: {message}")]
    Panicked {
        /// The rank.
        rank: usize,
        /// The panic's message.
        message: String,
    },

    /// What was saved by a forward pass does not belong to this backward pass.
    #[error("saved activations belong to {got}, wanted {wanted}")]
    Saved {
        /// The layer that made them.
        got: String,
        /// The layer they were given to.
        wanted: String,
    },

    /// Device memory could not be allocated.
    #[error("{device}: cannot allocate {bytes} bytes: {reason}")]
    OutOfMemory {
        /// The device.
        device: String,
        /// How many bytes were asked for.
        bytes: usize,
        /// What the allocator said.
        reason: String,
    },

    /// A shared library that a feature needs is not on this machine.
    #[error("{library} cannot be loaded; names tried: {tried}")]
    Library {
        /// The library.
        library: &'static str,
        /// The names that were tried, in order.
        tried: String,
    },

    /// A foreign library (CUDA, cuBLASLt, NVRTC, NCCL, MPI) returned an error.
    #[error("{library}: {call} failed: {message}")]
    Foreign {
        /// The library.
        library: &'static str,
        /// The function that failed.
        call: String,
        /// Its own words.
        message: String,
    },

    /// Reading or writing a file or a socket failed.
    #[error("{what}: {message}")]
    Io {
        /// The file or address and what was being done.
        what: String,
        /// The operating system's words.
        message: String,
    },

    /// A file's content is not what its format allows.
    #[error("{what}: {message}")]
    Format {
        /// The file or tensor.
        what: String,
        /// What is wrong with it.
        message: String,
    },

    /// A configuration file says something that it cannot mean.
    #[error("{key}: got {got}, wanted {wanted}")]
    Config {
        /// The key, or what of the file it is.
        key: String,
        /// What stands there.
        got: String,
        /// What would be right.
        wanted: String,
    },

    /// A checkpoint cannot be read or written.
    #[error("checkpoint {path}: {reason}")]
    Checkpoint {
        /// The file or folder.
        path: String,
        /// What is wrong with it.
        reason: String,
    },

    /// This engine or build cannot do it.
    #[error("{what} is not supported: {reason}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// Why not.
        reason: String,
    },
}

impl Error {
    /// An [`Error::Io`] from `error`, met while doing `what`.
    pub(crate) fn io(what: impl Into<String>, error: &std::io::Error) -> Self {
        Error::Io { what: what.into(), message: error.to_string() }
    }
}
