//! The numbers of a timeline: how much communication there was, and how much of it was hidden.

use std::time::Duration;

use super::{Lane, Span};

/// The hidden part of a communication, from times measured alone and together (any unit, the same for all three):
///
/// hidden = (compute + communication − overlapped) / min(compute, communication)
///
/// 1 where the shorter of the two vanished under the longer, 0 where they ran one after the other; held within 0 and 1,
/// since measured times scatter. 0 where there is nothing to hide.
pub fn hidden_fraction(compute: f64, communication: f64, overlapped: f64) -> f64 {
    let shorter = compute.min(communication);
    if shorter > 0.0 { ((compute + communication - overlapped) / shorter).clamp(0.0, 1.0) } else { 0.0 }
}

/// What one rank's lanes add up to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// From the start of the first span to the end of the last.
    pub elapsed: Duration,
    /// Time in which it computed.
    pub compute: Duration,
    /// Time in which bytes were on their way to it.
    pub communication: Duration,
    /// The part of that in which it did not compute.
    pub exposed: Duration,
    /// Time in which its compute queue waited.
    pub wait: Duration,
    /// Bytes received.
    pub bytes: u64,
}

impl Totals {
    /// The totals of `rank`'s spans. Spans of one lane that overlap each other count once.
    pub fn of_rank(spans: &[Span], rank: usize) -> Self {
        let of = |lane: Lane| {
            let own = spans.iter().filter(move |span| span.rank == rank && span.lane == lane);
            Union::new(own.map(|span| (span.start, span.end)))
        };
        let (compute, communication, wait) = (of(Lane::Compute), of(Lane::Communication), of(Lane::Wait));
        let own = || spans.iter().filter(|span| span.rank == rank);
        let start = own().map(|span| span.start).min().unwrap_or_default();
        let end = own().map(|span| span.end).max().unwrap_or_default();
        Self {
            elapsed: end.saturating_sub(start),
            compute: compute.length(),
            communication: communication.length(),
            exposed: communication.without(&compute).length(),
            wait: wait.length(),
            bytes: own().map(|span| span.bytes).sum(),
        }
    }

    /// The part of the communication that ran under compute.
    pub fn hidden(&self) -> Duration {
        self.communication - self.exposed
    }

    /// The same in percent; `None` where there was no communication.
    pub fn hidden_percent(&self) -> Option<f64> {
        let whole = self.communication.as_secs_f64();
        (whole > 0.0).then(|| 100.0 * self.hidden().as_secs_f64() / whole)
    }
}

/// Disjoint intervals in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Union(Vec<(Duration, Duration)>);

impl Union {
    pub(crate) fn new(intervals: impl Iterator<Item = (Duration, Duration)>) -> Self {
        let mut sorted: Vec<_> = intervals.filter(|(start, end)| start < end).collect();
        sorted.sort();
        let mut union: Vec<(Duration, Duration)> = Vec::with_capacity(sorted.len());
        for (start, end) in sorted {
            match union.last_mut() {
                Some(last) if start <= last.1 => last.1 = last.1.max(end),
                _ => union.push((start, end)),
            }
        }
        Self(union)
    }

    pub(crate) fn intervals(&self) -> &[(Duration, Duration)] {
        &self.0
    }

    pub(crate) fn length(&self) -> Duration {
        self.0.iter().map(|(start, end)| *end - *start).sum()
    }

    /// What of this is not covered by `other`.
    pub(crate) fn without(&self, other: &Union) -> Union {
        let mut rest = Vec::new();
        for &(mut start, end) in &self.0 {
            for &(from, to) in &other.0 {
                if to <= start || end <= from {
                    continue;
                }
                if start < from {
                    rest.push((start, from));
                }
                start = start.max(to).min(end);
            }
            if start < end {
                rest.push((start, end));
            }
        }
        Union(rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn micros(value: u64) -> Duration {
        Duration::from_micros(value)
    }

    proptest! {
        /// Unions and differences against a grid of unit cells.
        #[test]
        fn intervals_agree_with_a_grid(
            a in prop::collection::vec((0u64..60, 0u64..20), 0..12),
            b in prop::collection::vec((0u64..60, 0u64..20), 0..12),
        ) {
            let grid = |pairs: &[(u64, u64)]| {
                let mut cells = [false; 100];
                pairs.iter().for_each(|(start, len)| cells[*start as usize..(start + len) as usize].fill(true));
                cells
            };
            let union = |pairs: &[(u64, u64)]| {
                Union::new(pairs.iter().map(|(start, len)| (micros(*start), micros(start + len))))
            };
            let count = |cells: [bool; 100]| micros(cells.iter().filter(|cell| **cell).count() as u64);
            let (cells_a, cells_b) = (grid(&a), grid(&b));
            prop_assert_eq!(union(&a).length(), count(cells_a));
            let mut rest = cells_a;
            rest.iter_mut().zip(cells_b).for_each(|(cell, other)| *cell &= !other);
            prop_assert_eq!(union(&a).without(&union(&b)).length(), count(rest));
        }
    }

    #[test]
    fn totals_of_a_small_timeline() {
        let span = |rank, lane, start, end, bytes| Span {
            rank,
            lane,
            name: "x",
            start: micros(start),
            end: micros(end),
            bytes,
        };
        let spans = [
            span(0, Lane::Compute, 10, 30, 0),
            span(0, Lane::Communication, 10, 50, 7),
            span(0, Lane::Wait, 30, 50, 0),
            span(0, Lane::Compute, 50, 60, 0),
            span(1, Lane::Compute, 0, 1000, 0),
        ];
        let totals = Totals::of_rank(&spans, 0);
        assert_eq!((totals.elapsed, totals.compute, totals.communication), (micros(50), micros(30), micros(40)));
        assert_eq!((totals.exposed, totals.hidden(), totals.wait), (micros(20), micros(20), micros(20)));
        assert_eq!((totals.bytes, totals.hidden_percent()), (7, Some(50.0)));
        assert_eq!(Totals::of_rank(&spans, 1).hidden_percent(), None);
    }

    #[test]
    fn the_hidden_fraction_is_between_nothing_and_all() {
        assert_eq!(hidden_fraction(10.0, 5.0, 15.0), 0.0);
        assert_eq!(hidden_fraction(10.0, 5.0, 10.0), 1.0);
        assert_eq!(hidden_fraction(10.0, 5.0, 12.5), 0.5);
        assert_eq!(hidden_fraction(10.0, 5.0, 9.0), 1.0);
        assert_eq!(hidden_fraction(10.0, 0.0, 10.0), 0.0);
    }
}
