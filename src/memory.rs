//! Buffers: who may read and who may write a piece of device memory.
//!
//! A [`BufferMut`] is the only handle to its bytes: whoever holds it may write. [`BufferMut::freeze`] turns it into a
//! [`Buffer`], which many may hold and nobody may write. Pieces can be split off, so that several writers (the compute
//! queue, a communication) each own a disjoint part of one allocation. That is how everything in flight owns what it
//! reads and writes, on every engine, and why no schedule of queues can write under a reader.
//!
//! Memory comes from a [`Pool`], which keeps every allocation it made and hands it out again once all handles are
//! gone: the steady state allocates nothing.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use crate::{Error, Result};

/// One allocation of a device. Engines find their own kind again through [`Memory::as_any`].
pub trait Memory: Any + Send + Sync + fmt::Debug {
    /// Its size in bytes.
    fn len(&self) -> usize;

    /// Whether it holds no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The concrete type, for the engine that made it.
    fn as_any(&self) -> &dyn Any;
}

/// A [`Memory`] with what uniqueness is judged by.
#[derive(Debug)]
struct Allocation {
    memory: Box<dyn Memory>,
    /// Whether a pool holds one of the handles.
    pooled: AtomicBool,
}

/// Bytes that may be read by many and written by nobody. Cloning is cheap and does not allocate.
#[derive(Clone)]
pub struct Buffer {
    allocation: Arc<Allocation>,
    offset: usize,
    len: usize,
}

/// Bytes that this handle alone may read and write.
pub struct BufferMut {
    allocation: Arc<Allocation>,
    offset: usize,
    len: usize,
}

impl Buffer {
    /// All of an allocation that is of no pool.
    #[cfg(feature = "cuda")]
    pub(crate) fn of(memory: Box<dyn Memory>) -> Self {
        let len = memory.len();
        Self { allocation: Arc::new(Allocation { memory, pooled: AtomicBool::new(false) }), offset: 0, len }
    }

    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it starts within its allocation, in bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The allocation it is part of.
    pub fn memory(&self) -> &dyn Memory {
        &*self.allocation.memory
    }

    /// The bytes `range` of this buffer.
    ///
    /// # Errors
    /// [`Error::Argument`] where the range reaches beyond the end.
    pub fn slice(&self, range: Range<usize>) -> Result<Buffer> {
        check(&range, self.len)?;
        Ok(Buffer { allocation: Arc::clone(&self.allocation), offset: self.offset + range.start, len: range.len() })
    }

    /// This buffer and the one that follows it in the same allocation, as one.
    ///
    /// # Errors
    /// [`Error::Argument`] where `next` does not start where this one ends.
    pub fn join(&self, next: &Buffer) -> Result<Buffer> {
        if !self.precedes(next) {
            return Err(Error::Argument {
                what: "next buffer",
                got: format!("{next:?}"),
                wanted: format!("the one that follows {self:?}"),
            });
        }
        Ok(Buffer { len: self.len + next.len, ..self.clone() })
    }

    /// Whether `next` starts where this one ends.
    pub fn precedes(&self, next: &Buffer) -> bool {
        Arc::ptr_eq(&self.allocation, &next.allocation) && self.offset + self.len == next.offset
    }

    /// The right to write, if no other handle to the same allocation is left (the pool's own does not count).
    ///
    /// # Errors
    /// The buffer itself, where somebody else still holds one.
    pub fn try_into_mut(self) -> std::result::Result<BufferMut, Buffer> {
        // The count is read before the flag: a pool that still holds its handle when the flag is read held it when the
        // count was, so that it is one of those counted; and a pool hands out another only when its own is the last.
        let count = Arc::strong_count(&self.allocation);
        if count == 1 + usize::from(self.allocation.pooled.load(Ordering::SeqCst)) {
            fence(Ordering::Acquire);
            Ok(BufferMut { allocation: self.allocation, offset: self.offset, len: self.len })
        } else {
            Err(self)
        }
    }
}

impl BufferMut {
    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it starts within its allocation, in bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The allocation it is part of.
    pub fn memory(&self) -> &dyn Memory {
        &*self.allocation.memory
    }

    /// Takes the first `at` bytes off; this handle keeps the rest.
    ///
    /// # Errors
    /// [`Error::Argument`] where there are fewer than `at`.
    pub fn split_to(&mut self, at: usize) -> Result<BufferMut> {
        check(&(0..at), self.len)?;
        let front = BufferMut { allocation: Arc::clone(&self.allocation), offset: self.offset, len: at };
        self.offset += at;
        self.len -= at;
        Ok(front)
    }

    /// Lets `write` write the bytes `range` alone.
    pub(crate) fn within<R>(
        &mut self,
        range: Range<usize>,
        write: impl FnOnce(&mut BufferMut) -> Result<R>,
    ) -> Result<R> {
        check(&range, self.len)?;
        // This handle is borrowed meanwhile: nobody else writes.
        let allocation = Arc::clone(&self.allocation);
        write(&mut BufferMut { allocation, offset: self.offset + range.start, len: range.len() })
    }

    /// Gives up the right to write.
    pub fn freeze(self) -> Buffer {
        Buffer { allocation: self.allocation, offset: self.offset, len: self.len }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "bytes {}..{} of {:?}", self.offset, self.offset + self.len, self.memory())
    }
}

impl fmt::Debug for BufferMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "bytes {}..{} (unique) of {:?}", self.offset, self.offset + self.len, self.memory())
    }
}

fn check(range: &Range<usize>, len: usize) -> Result<()> {
    if range.start <= range.end && range.end <= len {
        return Ok(());
    }
    Err(Error::Argument { what: "range of bytes", got: format!("{range:?}"), wanted: format!("within 0..{len}") })
}

/// Keeps every allocation of a device and reuses those that nobody holds any more.
///
/// Reuse is safe in stream order: a buffer is handed out again only when every handle is gone, and whatever is in
/// flight holds handles to all it uses until later compute is ordered after it.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    classes: Mutex<BTreeMap<usize, Class>>,
}

#[derive(Debug, Default)]
struct Class {
    allocations: Vec<Arc<Allocation>>,
    next: usize,
}

impl Pool {
    /// A buffer of `bytes` bytes with undefined contents: a free one of the same size class, or else what `allocate`
    /// makes for the class's size.
    pub(crate) fn take(
        &self,
        bytes: usize,
        allocate: impl FnOnce(usize) -> Result<Box<dyn Memory>>,
    ) -> Result<BufferMut> {
        let size = size_class(bytes);
        let mut classes = self.classes.lock().unwrap_or_else(PoisonError::into_inner);
        let class = classes.entry(size).or_default();
        let count = class.allocations.len();
        for step in 0..count {
            let index = (class.next + step) % count;
            if Arc::strong_count(&class.allocations[index]) == 1 {
                // Pairs with the release in the last handle's drop: its uses happen before ours.
                fence(Ordering::Acquire);
                class.next = (index + 1) % count;
                return Ok(BufferMut { allocation: Arc::clone(&class.allocations[index]), offset: 0, len: bytes });
            }
        }
        let allocation = Arc::new(Allocation { memory: allocate(size)?, pooled: AtomicBool::new(true) });
        class.allocations.push(Arc::clone(&allocation));
        Ok(BufferMut { allocation, offset: 0, len: bytes })
    }

    /// Frees every allocation that nobody holds; returns how many bytes.
    pub(crate) fn trim(&self) -> usize {
        let mut freed = 0;
        for (size, class) in self.classes.lock().unwrap_or_else(PoisonError::into_inner).iter_mut() {
            let before = class.allocations.len();
            class.allocations.retain(|allocation| Arc::strong_count(allocation) > 1);
            class.next = 0;
            freed += (before - class.allocations.len()) * size;
        }
        freed
    }

    /// Bytes of all allocations, in use or not.
    pub(crate) fn bytes(&self) -> usize {
        let classes = self.classes.lock().unwrap_or_else(PoisonError::into_inner);
        classes.iter().map(|(size, class)| size * class.allocations.len()).sum()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for class in self.classes.get_mut().unwrap_or_else(PoisonError::into_inner).values() {
            class.allocations.iter().for_each(|allocation| allocation.pooled.store(false, Ordering::SeqCst));
        }
    }
}

/// `bytes` rounded up to a multiple of a sixteenth of the next power of two (at least 256), so that sizes that differ little
/// share buffers and at most an eighth is wasted.
fn size_class(bytes: usize) -> usize {
    let step = (bytes.max(1).next_power_of_two() / 16).max(256);
    bytes.max(1).div_ceil(step) * step
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Block(usize);
    impl Memory for Block {
        fn len(&self) -> usize {
            self.0
        }
        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    fn take(pool: &Pool, bytes: usize) -> BufferMut {
        pool.take(bytes, |size| Ok(Box::new(Block(size)))).unwrap()
    }

    #[test]
    fn a_buffer_returns_only_when_the_last_handle_is_gone() {
        let pool = Pool::default();
        let mut rest = take(&pool, 1000);
        let front = rest.split_to(300).unwrap().freeze();
        drop(rest);
        let other = take(&pool, 1000);
        assert!(!Arc::ptr_eq(&front.allocation, &other.allocation), "handed out while a piece was still held");
        let first = Arc::as_ptr(&front.allocation);
        drop(front);
        let again = take(&pool, 900);
        assert_eq!(Arc::as_ptr(&again.allocation), first);
        assert_eq!(pool.bytes(), 2 * 1024);
        drop((again, other));
        assert_eq!(pool.trim(), 2 * 1024);
        assert_eq!(pool.bytes(), 0);
    }

    #[test]
    fn writing_needs_the_only_handle() {
        let pool = Pool::default();
        let shared = take(&pool, 8).freeze();
        let copy = shared.clone();
        let shared = shared.try_into_mut().unwrap_err();
        drop(copy);
        let shared = shared.try_into_mut().unwrap().freeze();
        let copy = shared.clone();
        drop(pool);
        let shared = shared.try_into_mut().unwrap_err();
        drop(copy);
        assert_eq!(shared.try_into_mut().unwrap().len(), 8);
    }

    #[test]
    fn pieces_join_in_order_alone() {
        let pool = Pool::default();
        let mut rest = take(&pool, 12);
        let (a, b) = (rest.split_to(4).unwrap().freeze(), rest.split_to(4).unwrap().freeze());
        assert_eq!(a.join(&b).unwrap().len(), 8);
        assert!(b.join(&a).is_err());
        assert!(a.slice(2..5).is_err());
        assert!(rest.split_to(5).is_err());
    }

    #[test]
    fn size_classes_waste_little() {
        for bytes in [0, 1, 255, 256, 257, 4096, 5000, 1 << 20, (1 << 20) + 1, 123_456_789] {
            let size = size_class(bytes);
            assert!(size >= bytes && size <= bytes.max(1) + bytes / 8 + 256, "{bytes} -> {size}");
        }
    }
}
