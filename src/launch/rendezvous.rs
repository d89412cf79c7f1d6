//! Where processes meet before they can talk: rank 0 listens, the others come to it, and everybody leaves with the world's
//! layout and a small blob of rank 0's (such as the id of an NCCL communicator).
//!
//! It is no transport for tensors. It assumes a network that may have strangers on it: a job token that both sides must know,
//! messages of bounded size, a time limit on every read, and a listener on the given address alone. It does not encrypt.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::{Error, Result};

/// The longest host name, token and blob, in bytes.
const LONGEST_NAME: usize = 255;
const LONGEST_TOKEN: usize = 255;
const LONGEST_BLOB: usize = 64 << 10;
/// The most ranks.
const MOST_RANKS: usize = 1 << 16;
const MAGIC: [u8; 6] = *b"ATPRV1";
/// How long a connection may take over its few bytes.
const PATIENCE: Duration = Duration::from_secs(5);
/// The most connections that are heard at once beyond the ranks still to come.
const STRANGERS: usize = 64;

/// How to meet.
#[derive(Debug, Clone)]
pub struct Rendezvous {
    /// Host name or address of rank 0.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// This process's rank.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// What all ranks of the job know and nobody else: at most 255 bytes, may be empty.
    pub token: String,
    /// How long to wait for everybody.
    pub deadline: Duration,
}

/// One process of the world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Its machine's name, as it gave it.
    pub host: String,
    /// Its number among the processes of its machine.
    pub local_rank: usize,
}

/// What everybody leaves with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Meeting {
    /// The members by rank.
    pub members: Vec<Member>,
    /// Rank 0's blob.
    pub blob: Vec<u8>,
}

/// What a rank says when it comes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Hello {
    token: Vec<u8>,
    rank: usize,
    world_size: usize,
    member: Member,
}

impl Rendezvous {
    /// Meets the other ranks. Rank 0 gives the blob; the others' is ignored.
    ///
    /// # Errors
    /// [`Error::Argument`] for what makes no sense, and where ranks disagree (two with one number, another world size);
    /// [`Error::Io`] where rank 0's port is in use or its address is not this machine's; [`Error::Timeout`] that names the ranks
    /// that did not come, or the address that nobody answered at; [`Error::PeerLost`] where a connection was dropped.
    pub fn meet(&self, member: Member, blob: &[u8]) -> Result<Meeting> {
        self.check(&member, blob)?;
        let addresses = self.addresses()?;
        if self.rank == 0 { self.host(&addresses, member, blob) } else { self.visit(&addresses, member) }
    }

    fn check(&self, member: &Member, blob: &[u8]) -> Result<()> {
        let most = |what: &'static str, got: usize, most: usize| {
            if got <= most {
                return Ok(());
            }
            Err(Error::Argument { what, got: got.to_string(), wanted: format!("at most {most}") })
        };
        most("length of the token", self.token.len(), LONGEST_TOKEN)?;
        most("length of the host name", member.host.len(), LONGEST_NAME)?;
        most("length of the blob", blob.len(), LONGEST_BLOB)?;
        most("world_size", self.world_size, MOST_RANKS)?;
        if self.rank >= self.world_size {
            let wanted = format!("a rank below {}", self.world_size);
            return Err(Error::Argument { what: "rank", got: self.rank.to_string(), wanted });
        }
        Ok(())
    }

    fn addresses(&self) -> Result<Vec<SocketAddr>> {
        let name = || format!("{}:{}", self.host, self.port);
        // A bare IPv6 address has no room for a port.
        let host = self.host.trim_start_matches('[').trim_end_matches(']');
        let found =
            (host, self.port).to_socket_addrs().map_err(|error| Error::io(format!("looking up {}", name()), &error))?;
        let addresses: Vec<_> = found.collect();
        if addresses.is_empty() {
            return Err(Error::Io { what: format!("looking up {}", name()), message: "no address".into() });
        }
        Ok(addresses)
    }

    fn timed_out(&self, begun: Instant, missing: String) -> Error {
        Error::Timeout {
            rank: self.rank,
            operation: format!("rendezvous at {}:{}", self.host, self.port),
            sequence: 0,
            seconds: begun.elapsed().as_secs_f64(),
            missing,
        }
    }

    /// Rank 0: hears everybody, then answers everybody.
    fn host(&self, addresses: &[SocketAddr], member: Member, blob: &[u8]) -> Result<Meeting> {
        let begun = Instant::now();
        let listener = TcpListener::bind(addresses)
            .map_err(|error| Error::io(format!("rank 0 listening on {}:{}", self.host, self.port), &error))?;
        listener.set_nonblocking(true).map_err(|error| Error::io("rank 0's listener", &error))?;
        let (sender, heard) = mpsc::channel::<Option<(Hello, TcpStream)>>();
        let mut present: BTreeMap<usize, (Member, Option<TcpStream>)> = BTreeMap::from([(0, (member, None))]);
        let mut listening = 0;
        while present.len() < self.world_size {
            while let Ok(result) = heard.try_recv() {
                listening -= 1;
                if let Some((hello, stream)) = result {
                    self.admit(&mut present, hello, stream)?;
                }
            }
            if begun.elapsed() >= self.deadline {
                let missing = (0..self.world_size).filter(|rank| !present.contains_key(rank));
                let mut names: Vec<_> = missing.map(|rank| format!("rank {rank}")).collect();
                let more = names.len().saturating_sub(16);
                names.truncate(16);
                let more = if more > 0 { format!(" and {more} more") } else { String::new() };
                return Err(self.timed_out(begun, names.join(", ") + &more));
            }
            match listener.accept() {
                // Each is heard in a thread of its own, so that a slow one delays nobody.
                Ok((stream, _)) if listening < STRANGERS + self.world_size => {
                    listening += 1;
                    let sender = sender.clone();
                    let hear = move || {
                        let _ = sender.send(hear(stream));
                    };
                    if std::thread::Builder::new().name("rendezvous".into()).spawn(hear).is_err() {
                        listening -= 1;
                    }
                }
                Ok(_) => {}
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        }
        let members: Vec<Member> = present.values().map(|(member, _)| member.clone()).collect();
        let meeting = Meeting { members, blob: blob.to_vec() };
        let answer = encode_meeting(&meeting);
        for (rank, (_, stream)) in present {
            if let Some(mut stream) = stream {
                let sent =
                    stream.write_all(&[0]).and_then(|()| stream.write_all(&answer)).and_then(|()| stream.flush());
                sent.map_err(|error| self.dropped(rank, &error))?;
            }
        }
        Ok(meeting)
    }

    /// Takes a rank in, or refuses it.
    fn admit(
        &self,
        present: &mut BTreeMap<usize, (Member, Option<TcpStream>)>,
        hello: Hello,
        mut stream: TcpStream,
    ) -> Result<()> {
        // A stranger is sent away; it changes nothing.
        if !same(&hello.token, self.token.as_bytes()) {
            refuse(&mut stream, "the job token differs: this port belongs to another job");
            return Ok(());
        }
        // One that knows the token is of this job: what it has wrong, the job has wrong.
        let wrong = if hello.world_size != self.world_size || hello.rank >= self.world_size {
            let got = format!("rank {} says {}", hello.rank, hello.world_size);
            Some(("world_size", got, format!("{}, as rank 0 has it", self.world_size)))
        } else if present.contains_key(&hello.rank) {
            let got = format!("{} twice, the second time from {}", hello.rank, hello.member.host);
            Some(("rank", got, "each rank once".to_string()))
        } else {
            None
        };
        if let Some((what, got, wanted)) = wrong {
            refuse(&mut stream, &format!("{what}: got {got}, wanted {wanted}"));
            let error = Error::Argument { what, got, wanted };
            for (_, waiting) in present.values_mut() {
                waiting.iter_mut().for_each(|stream| refuse(stream, &error.to_string()));
            }
            return Err(error);
        }
        present.insert(hello.rank, (hello.member, Some(stream)));
        Ok(())
    }

    fn dropped(&self, rank: usize, error: &std::io::Error) -> Error {
        Error::PeerLost {
            rank,
            seen_by: self.rank,
            operation: format!("rendezvous at {}:{}", self.host, self.port),
            sequence: 0,
            reason: error.to_string(),
        }
    }

    /// Every other rank: comes, says who it is, and waits for the answer.
    fn visit(&self, addresses: &[SocketAddr], member: Member) -> Result<Meeting> {
        let begun = Instant::now();
        let hello =
            Hello { token: self.token.clone().into_bytes(), rank: self.rank, world_size: self.world_size, member };
        let hello = encode_hello(&hello);
        let mut last = String::from("nobody answered");
        loop {
            let left = self.deadline.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return Err(self.timed_out(begun, format!("rank 0 ({last})")));
            }
            let connected = addresses.iter().find_map(|address| {
                TcpStream::connect_timeout(address, left.min(PATIENCE)).map_err(|error| last = error.to_string()).ok()
            });
            let Some(mut stream) = connected else {
                // Rank 0 may not have started yet.
                std::thread::sleep(Duration::from_millis(50).min(left));
                continue;
            };
            let limits = stream.set_read_timeout(Some(left.max(Duration::from_millis(1))));
            limits.and_then(|()| stream.write_all(&hello)).map_err(|error| self.dropped(0, &error))?;
            return self.hear_answer(&mut stream, begun);
        }
    }

    fn hear_answer(&self, stream: &mut TcpStream, begun: Instant) -> Result<Meeting> {
        let read = |stream: &mut TcpStream, buffer: &mut [u8]| {
            stream.read_exact(buffer).map_err(|error| match error.kind() {
                std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {
                    self.timed_out(begun, "other ranks, says rank 0".into())
                }
                _ => self.dropped(0, &error),
            })
        };
        let mut status = [0];
        read(stream, &mut status)?;
        let mut length = [0; 4];
        read(stream, &mut length)?;
        let length = u32::from_le_bytes(length) as usize;
        let longest = LONGEST_BLOB + MOST_RANKS * (LONGEST_NAME + 8);
        let wrong = |message: String| Error::Format { what: "rank 0's answer".into(), message };
        if length > longest {
            return Err(wrong(format!("{length} bytes, at most {longest} are possible")));
        }
        let mut body = vec![0; length];
        read(stream, &mut body)?;
        if status[0] != 0 {
            let reason = String::from_utf8_lossy(&body[..body.len().min(1000)]).into_owned();
            return Err(Error::Argument {
                what: "rendezvous",
                got: format!("a refusal by rank 0: {reason}"),
                wanted: "to be let in".into(),
            });
        }
        let meeting = decode_meeting(&body).ok_or_else(|| wrong("it is malformed".into()))?;
        if meeting.members.len() != self.world_size {
            return Err(wrong(format!("{} members, wanted {}", meeting.members.len(), self.world_size)));
        }
        Ok(meeting)
    }
}

/// Hears a connection out; `None` if it says nothing that makes sense, in time.
fn hear(mut stream: TcpStream) -> Option<(Hello, TcpStream)> {
    stream.set_nonblocking(false).ok()?;
    stream.set_write_timeout(Some(PATIENCE)).ok()?;
    let until = Instant::now() + PATIENCE;
    let mut bytes = Vec::new();
    let mut buffer = [0; 1024];
    loop {
        if let Some(hello) = decode_hello(&bytes) {
            return Some((hello, stream));
        }
        let left = until.saturating_duration_since(Instant::now());
        // Not a byte a second for ever, and no more than a greeting can be.
        if left.is_zero() || bytes.len() > 2048 || !MAGIC.iter().zip(&bytes).all(|(a, b)| a == b) {
            return None;
        }
        stream.set_read_timeout(Some(left)).ok()?;
        match stream.read(&mut buffer) {
            Ok(0) | Err(_) => return None,
            Ok(count) => bytes.extend_from_slice(&buffer[..count]),
        }
    }
}

fn refuse(stream: &mut TcpStream, reason: &str) {
    let mut message = vec![1];
    message.extend((reason.len() as u32).to_le_bytes());
    message.extend(reason.as_bytes());
    // If it is gone, it does not matter.
    let _ = stream.write_all(&message);
}

/// Whether two tokens are the same; the time it takes does not tell where they differ.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}

fn put(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u16).to_le_bytes());
    out.extend(bytes);
}

fn encode_hello(hello: &Hello) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    put(&mut out, &hello.token);
    for number in [hello.rank, hello.world_size, hello.member.local_rank] {
        out.extend((number as u32).to_le_bytes());
    }
    put(&mut out, hello.member.host.as_bytes());
    out
}

/// Reads from the front of a slice.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(front)
    }

    fn number(&mut self) -> Option<usize> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?) as usize)
    }

    fn bytes(&mut self, most: usize) -> Option<&'a [u8]> {
        let length = u16::from_le_bytes(self.take(2)?.try_into().ok()?) as usize;
        if length > most { None } else { self.take(length) }
    }

    fn member(&mut self) -> Option<Member> {
        let local_rank = self.number()?;
        let host = String::from_utf8(self.bytes(LONGEST_NAME)?.to_vec()).ok()?;
        Some(Member { host, local_rank })
    }
}

/// A whole greeting; `None` as long as it is not whole, or where it is none.
fn decode_hello(bytes: &[u8]) -> Option<Hello> {
    let mut reader = Reader(bytes);
    if reader.take(MAGIC.len())? != MAGIC {
        return None;
    }
    let token = reader.bytes(LONGEST_TOKEN)?.to_vec();
    let (rank, world_size) = (reader.number()?, reader.number()?);
    let member = reader.member()?;
    reader.0.is_empty().then_some(Hello { token, rank, world_size, member })
}

/// With its length in front.
fn encode_meeting(meeting: &Meeting) -> Vec<u8> {
    let mut body = Vec::new();
    body.extend((meeting.members.len() as u32).to_le_bytes());
    for member in &meeting.members {
        body.extend((member.local_rank as u32).to_le_bytes());
        put(&mut body, member.host.as_bytes());
    }
    body.extend((meeting.blob.len() as u32).to_le_bytes());
    body.extend(&meeting.blob);
    let mut out = (body.len() as u32).to_le_bytes().to_vec();
    out.extend(body);
    out
}

fn decode_meeting(body: &[u8]) -> Option<Meeting> {
    let mut reader = Reader(body);
    let count = reader.number().filter(|count| *count <= MOST_RANKS)?;
    let members = (0..count).map(|_| reader.member()).collect::<Option<Vec<_>>>()?;
    let length = reader.number().filter(|length| *length <= LONGEST_BLOB)?;
    let blob = reader.take(length)?.to_vec();
    reader.0.is_empty().then_some(Meeting { members, blob })
}

/// Feeds bytes from the network to both decoders, for fuzzing.
#[doc(hidden)]
pub fn decode_anything(bytes: &[u8]) {
    let _ = decode_hello(bytes);
    let _ = decode_meeting(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rendezvous(port: u16, rank: usize, world_size: usize, token: &str, seconds: f64) -> Rendezvous {
        let deadline = Duration::from_secs_f64(seconds);
        Rendezvous { host: "127.0.0.1".into(), port, rank, world_size, token: token.into(), deadline }
    }

    fn member(rank: usize) -> Member {
        Member { host: format!("host-{rank}"), local_rank: rank }
    }

    /// A port that nobody uses just now.
    fn port() -> u16 {
        TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
    }

    fn meet_all(port: u16, n: usize, order: impl Fn(usize) -> u64) -> Vec<Result<Meeting>> {
        let threads: Vec<_> = (0..n)
            .map(|rank| {
                let wait = order(rank);
                std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(wait));
                    rendezvous(port, rank, n, "t", 10.0).meet(member(rank), format!("blob of {rank}").as_bytes())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    }

    #[test]
    fn everybody_leaves_with_the_same_in_any_order() {
        for n in [1, 2, 5] {
            for late in 0..n {
                let met = meet_all(port(), n, |rank| if rank == late { 150 } else { 0 });
                for meeting in met {
                    let meeting = meeting.unwrap();
                    assert_eq!(meeting.blob, b"blob of 0");
                    assert_eq!(meeting.members, (0..n).map(member).collect::<Vec<_>>());
                }
            }
        }
    }

    #[test]
    fn ranks_that_do_not_come_are_named() {
        let error = rendezvous(port(), 0, 4, "", 0.2).meet(member(0), b"").unwrap_err().to_string();
        assert!(error.contains("rank 1, rank 2, rank 3"), "{error}");
        let port = port();
        let begun = Instant::now();
        let error = rendezvous(port, 2, 4, "", 0.3).meet(member(2), b"").unwrap_err().to_string();
        assert!(error.contains("rank 0") && error.contains(&port.to_string()), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(2));
    }

    #[test]
    fn strangers_change_nothing() {
        let port = port();
        let host = std::thread::spawn(move || rendezvous(port, 0, 2, "secret", 20.0).meet(member(0), b"x"));
        let connect = || loop {
            if let Ok(stream) = TcpStream::connect(("127.0.0.1", port)) {
                break stream;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        // One that says nothing, one that says something else, one that stops halfway, one that is gone at once.
        let _silent = connect();
        connect().write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let mut half = connect();
        half.write_all(&MAGIC[..3]).unwrap();
        drop(connect());
        let mut endless = connect();
        let _ = endless.write_all(&[b'A'; 100_000]);
        // Another job's rank, with another token.
        let error = rendezvous(port, 1, 2, "other", 5.0).meet(member(1), b"").unwrap_err().to_string();
        assert!(error.contains("token"), "{error}");
        let meeting = rendezvous(port, 1, 2, "secret", 5.0).meet(member(1), b"").unwrap();
        assert_eq!(meeting, host.join().unwrap().unwrap());
    }

    #[test]
    fn two_with_one_rank_and_other_world_sizes_fail_for_all() {
        for (first, second, word) in [((1, 3), (1, 3), "twice"), ((1, 3), (2, 4), "4")] {
            let port = port();
            let host = std::thread::spawn(move || rendezvous(port, 0, 3, "", 10.0).meet(member(0), b""));
            let early = std::thread::spawn(move || rendezvous(port, first.0, first.1, "", 10.0).meet(member(1), b""));
            std::thread::sleep(Duration::from_millis(300));
            let late = rendezvous(port, second.0, second.1, "", 10.0).meet(member(2), b"");
            for error in [host.join().unwrap().unwrap_err(), early.join().unwrap().unwrap_err(), late.unwrap_err()] {
                assert!(error.to_string().contains(word), "{error}");
            }
        }
    }

    #[test]
    fn a_port_in_use_and_addresses_that_are_not_here_are_named() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let error = rendezvous(port, 0, 2, "", 1.0).meet(member(0), b"").unwrap_err().to_string();
        assert!(error.contains(&port.to_string()) && error.contains("rank 0"), "{error}");
        let mut elsewhere = rendezvous(port, 0, 2, "", 1.0);
        elsewhere.host = "192.0.2.1".into();
        assert!(elsewhere.meet(member(0), b"").unwrap_err().to_string().contains("192.0.2.1"));
        elsewhere.host = "no such host".into();
        assert!(elsewhere.meet(member(0), b"").unwrap_err().to_string().contains("no such host"));
    }

    #[test]
    fn a_host_that_hangs_up_is_told() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || drop(listener.accept()));
        let error = rendezvous(port, 1, 2, "", 5.0).meet(member(1), b"").unwrap_err();
        assert!(matches!(error, Error::PeerLost { rank: 0, .. }), "{error}");
        // One that answers with a huge length.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.write_all(&[0, 255, 255, 255, 255]);
            std::thread::sleep(Duration::from_secs(1));
        });
        let error = rendezvous(port, 1, 2, "", 5.0).meet(member(1), b"").unwrap_err();
        assert!(matches!(error, Error::Format { .. }), "{error}");
    }

    #[test]
    fn ipv6_works_where_the_machine_has_it() {
        if TcpListener::bind("[::1]:0").is_err() {
            return;
        }
        let port = port();
        let at = |rank| Rendezvous { host: "::1".into(), ..rendezvous(port, rank, 2, "", 5.0) };
        let host = std::thread::spawn({
            let at = at(0);
            move || at.meet(member(0), b"six")
        });
        assert_eq!(at(1).meet(member(1), b"").unwrap().blob, b"six");
        host.join().unwrap().unwrap();
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let long = "x".repeat(300);
        assert!(rendezvous(1, 0, 2, &long, 1.0).meet(member(0), b"").is_err());
        assert!(rendezvous(1, 2, 2, "", 1.0).meet(member(0), b"").is_err());
        assert!(rendezvous(1, 0, 1 << 20, "", 1.0).meet(member(0), b"").is_err());
        assert!(rendezvous(1, 0, 2, "", 1.0).meet(member(0), &vec![0; LONGEST_BLOB + 1]).is_err());
    }

    proptest! {
        #[test]
        fn greetings_survive_the_journey(
            token in prop::collection::vec(any::<u8>(), 0..255),
            rank in 0usize..100,
            world_size in 0usize..70000,
            host in "[a-z.0-9-]{0,200}",
            local_rank in 0usize..16,
        ) {
            let hello = Hello { token, rank, world_size, member: Member { host, local_rank } };
            let bytes = encode_hello(&hello);
            prop_assert_eq!(decode_hello(&bytes), Some(hello));
            for end in 0..bytes.len() {
                prop_assert_eq!(decode_hello(&bytes[..end]), None);
            }
        }

        #[test]
        fn meetings_survive_the_journey(
            hosts in prop::collection::vec("[a-z]{0,20}", 0..20),
            blob in prop::collection::vec(any::<u8>(), 0..300),
        ) {
            let members = hosts.into_iter().enumerate().map(|(local_rank, host)| Member { host, local_rank }).collect();
            let meeting = Meeting { members, blob };
            let bytes = encode_meeting(&meeting);
            prop_assert_eq!(decode_meeting(&bytes[4..]), Some(meeting));
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            decode_anything(&bytes);
            decode_anything(&[&MAGIC[..], &bytes].concat());
        }
    }
}
