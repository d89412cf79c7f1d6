//! Ranks of other processes than the one that made the unique id. Each has a proxy there, which takes part in its place: what it sends
//! travels to the proxy, what the proxy receives travels back. A connection that ends is a rank that has aborted; without the
//! process that made the id, the others get `ncclRemoteError`.
//!
//! The race detector does not look across processes: there is no memory that they share.
use super::*;
use std::io::{Read, Result as Io, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::mpsc::channel;

/// The connection of a rank to its proxy.
pub(super) struct Remote {
    line: Mutex<UnixStream>,
    /// The same, to end it with while somebody waits for an answer.
    end: UnixStream,
}

fn address(pid: u64) -> Io<SocketAddr> {
    SocketAddr::from_abstract_name(format!("cuda-sim-nccl-{pid}"))
}

/// The process that made a unique id.
fn maker(key: u64) -> u64 {
    key >> 32
}

fn put(to: &mut Vec<u8>, numbers: &[u64]) {
    numbers.iter().for_each(|number| to.extend(number.to_le_bytes()))
}
fn put_bytes(to: &mut Vec<u8>, bytes: &[u8]) {
    put(to, &[bytes.len() as u64]);
    to.extend(bytes)
}
fn get(from: &mut impl Read) -> Io<u64> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}
fn get_bytes(from: &mut impl Read) -> Io<Vec<u8>> {
    let mut bytes = vec![0; get(from)? as usize];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// A kind and its root, as numbers.
fn number(kind: Kind) -> [u64; 2] {
    match kind {
        Kind::AllGather => [0, 0],
        Kind::ReduceScatter => [1, 0],
        Kind::AllReduce => [2, 0],
        Kind::Broadcast(root) => [3, root as u64],
        Kind::Reduce(root) => [4, root as u64],
    }
}
fn kind([which, root]: [u64; 2]) -> Kind {
    match which {
        0 => Kind::AllGather,
        1 => Kind::ReduceScatter,
        2 => Kind::AllReduce,
        3 => Kind::Broadcast(root as i32),
        _ => Kind::Reduce(root as i32),
    }
}
/// NCCL's enumerations, back from their numbers.
fn types() -> impl Iterator<Item = ncclDataType_t> {
    use ncclDataType_t::*;
    [
        ncclInt8,
        ncclUint8,
        ncclInt32,
        ncclUint32,
        ncclInt64,
        ncclUint64,
        ncclFloat16,
        ncclFloat32,
        ncclFloat64,
        ncclBfloat16,
    ]
    .into_iter()
}
fn reductions() -> impl Iterator<Item = ncclRedOp_t> {
    use ncclRedOp_t::*;
    [ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg].into_iter()
}

impl Remote {
    /// Whether an id was made by another process.
    pub(super) fn is(key: u64) -> bool {
        maker(key) != std::process::id() as u64
    }

    /// Takes a rank's place in the group of an id.
    pub(super) fn join(key: u64, n: usize, rank: usize) -> Io<Self> {
        let mut line = UnixStream::connect_addr(&address(maker(key))?)?;
        let mut hello = Vec::new();
        put(&mut hello, &[key, n as u64, rank as u64]);
        line.write_all(&hello)?;
        Ok(Self { end: line.try_clone()?, line: Mutex::new(line) })
    }

    /// Waits until all ranks have joined.
    pub(super) fn joined(&self) -> Io<()> {
        get(&mut *lock(&self.line)).map(drop)
    }

    pub(super) fn end(&self) {
        let _ = self.end.shutdown(std::net::Shutdown::Both);
    }

    /// A group of operations of this rank: has it done by the proxy.
    pub(super) fn group(&self, rank: usize, n: usize, ops: &[Op]) -> Io<()> {
        let mut text = Vec::new();
        put(&mut text, &[0, ops.len() as u64]);
        for op in ops {
            match *op {
                Op::Coll(seq, desc) => {
                    let [which, root] = number(desc.kind);
                    put(&mut text, &[0, seq, which, root, desc.count as u64, desc.ty as u64, desc.op as u64]);
                    put_bytes(&mut text, &bytes(desc.send, desc.bytes(rank, n).0));
                }
                Op::Send { to, at, len } => {
                    put(&mut text, &[1, to as u64]);
                    put_bytes(&mut text, &bytes(at, len));
                }
                Op::Recv { from, len, .. } => put(&mut text, &[2, from as u64, len as u64]),
            }
        }
        let mut line = lock(&self.line);
        line.write_all(&text)?;
        for op in ops {
            let received = get_bytes(&mut *line)?;
            match *op {
                Op::Coll(_, desc) => store(desc.recv, &received),
                Op::Recv { at, .. } => store(at, &received),
                Op::Send { .. } => {}
            }
        }
        Ok(())
    }

    /// The id, size and own rank of the group that a split leads to.
    pub(super) fn split(&self, seq: u64, color: c_int, key: c_int) -> Io<(u64, usize, usize)> {
        let mut text = Vec::new();
        put(&mut text, &[1, seq, color as u64, key as u64]);
        let mut line = lock(&self.line);
        line.write_all(&text)?;
        Ok((get(&mut *line)?, get(&mut *line)? as usize, get(&mut *line)? as usize))
    }
}

/// Lets ranks of other processes join groups of ids that this one makes.
pub(super) fn listen() {
    static LISTENING: OnceLock<()> = OnceLock::new();
    LISTENING.get_or_init(|| {
        let listener = address(std::process::id() as u64).and_then(|at| UnixListener::bind_addr(&at));
        match listener {
            Ok(listener) => drop(std::thread::spawn(move || {
                for line in listener.incoming().flatten() {
                    std::thread::spawn(move || drop(serve(line)));
                }
            })),
            Err(error) => complain(format!("other processes cannot join: {error}")),
        }
    });
}

/// What a rank in another process asks of its proxy.
enum Ask {
    Group(Vec<Part>),
    Split(u64, c_int, c_int),
}
/// An operation with the memory that stands for the rank's.
struct Part {
    op: Op,
    _sent: Vec<u8>,
    received: Vec<u8>,
}

fn read_ask(line: &mut UnixStream, rank: usize, n: usize) -> Io<Ask> {
    if get(line)? == 1 {
        return Ok(Ask::Split(get(line)?, get(line)? as c_int, get(line)? as c_int));
    }
    let mut parts = Vec::new();
    for _ in 0..get(line)? {
        let mut part = Part { op: Op::Recv { from: 0, at: 0, len: 0 }, _sent: Vec::new(), received: Vec::new() };
        match get(line)? {
            0 => {
                let (seq, which) = (get(line)?, [get(line)?, get(line)?]);
                let (count, ty, op) = (get(line)? as usize, get(line)?, get(line)?);
                let bad = || std::io::Error::from(std::io::ErrorKind::InvalidData);
                let mut desc = Desc {
                    kind: kind(which),
                    count,
                    ty: types().find(|known| *known as u64 == ty).ok_or_else(bad)?,
                    op: reductions().find(|known| *known as u64 == op).ok_or_else(bad)?,
                    send: 0,
                    recv: 0,
                };
                part._sent = get_bytes(line)?;
                part.received = vec![0; desc.bytes(rank, n).1];
                (desc.send, desc.recv) = (part._sent.as_ptr() as usize, part.received.as_mut_ptr() as usize);
                part.op = Op::Coll(seq, desc);
            }
            1 => {
                let to = get(line)? as usize;
                part._sent = get_bytes(line)?;
                part.op = Op::Send { to, at: part._sent.as_ptr() as usize, len: part._sent.len() };
            }
            _ => {
                let from = get(line)? as usize;
                part.received = vec![0; get(line)? as usize];
                part.op = Op::Recv { from, at: part.received.as_mut_ptr() as usize, len: part.received.len() };
            }
        }
        parts.push(part);
    }
    Ok(Ask::Group(parts))
}

/// Stands for a rank until its connection ends.
fn serve(mut line: UnixStream) -> Io<()> {
    let (key, n, rank) = (get(&mut line)?, get(&mut line)? as usize, get(&mut line)? as usize);
    let clique = lock(ids()).entry(key).or_insert_with(|| Clique::new(n)).clone();
    let comm = Arc::new(Comm::of(clique, rank, 0, true, None));
    lock(&comm.clique.m).joined[rank] = true;
    comm.clique.cv.notify_all();
    let (ask, asked) = channel();
    let mut answers = line.try_clone()?;
    let proxy = Arc::clone(&comm);
    std::thread::spawn(move || answer(&proxy, &mut answers, asked.into_iter()));
    // The end of the connection is found while an answer is still to come.
    while let Ok(next) = read_ask(&mut line, rank, n) {
        if ask.send(next).is_err() {
            break;
        }
    }
    comm.abort();
    Ok(())
}

fn answer(comm: &Arc<Comm>, line: &mut UnixStream, asked: impl Iterator<Item = Ask>) -> Io<()> {
    if joined(comm) as u32 != ncclSuccess as u32 {
        return Ok(());
    }
    line.write_all(&[0; 8])?;
    for ask in asked {
        let mut text = Vec::new();
        match ask {
            Ask::Group(mut parts) => {
                let (ops, memory): (Vec<Op>, Vec<_>) =
                    parts.drain(..).map(|part| (part.op, (part._sent, part.received))).unzip();
                comm.connect(&ops);
                comm.group(&mut Worker::elsewhere(), &ops);
                memory.iter().for_each(|(_, received)| put_bytes(&mut text, received));
            }
            Ask::Split(seq, color, key) => {
                let n = comm.clique.n;
                lock(&comm.clique.m).splits.entry(seq).or_insert_with(|| vec![None; n])[comm.rank] = Some((color, key));
                comm.clique.cv.notify_all();
                match split(comm, seq, color).filter(|_| color >= 0) {
                    Some((made, rank)) => put(&mut text, &[of(&made), made.n as u64, rank as u64]),
                    None => put(&mut text, &[0, 0, 0]),
                }
            }
        }
        if comm.aborted.load(Ordering::SeqCst) {
            break;
        }
        line.write_all(&text)?;
    }
    Ok(())
}

/// An id by which other processes find a group that came of a split.
fn of(clique: &Arc<Clique>) -> u64 {
    let mut ids = lock(ids());
    if let Some((id, _)) = ids.iter().find(|(_, known)| Arc::ptr_eq(known, clique)) {
        return *id;
    }
    let id = new_id();
    ids.insert(id, Arc::clone(clique));
    id
}
