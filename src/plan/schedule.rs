//! The schedules, played through on paper.

use std::fmt;

use super::{LayerKind, Plan, ProductCost, WireCost};
use crate::mode::{LinearMode, Overlap};

/// The direction of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pass {
    /// The output.
    Forward,
    /// The gradients.
    Backward,
}

/// A call of a layer: what a prediction is for. Sizes are of the whole, over all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Site {
    /// Which layer.
    pub layer: LayerKind,
    /// Its mode.
    pub mode: LinearMode,
    /// The direction.
    pub pass: Pass,
    /// Rows of the whole input.
    pub rows: usize,
    /// Features of the whole input.
    pub in_features: usize,
    /// Features of the whole output.
    pub out_features: usize,
    /// Whether a column layer's backward pass gathers the input again (`recompute_all_gather`).
    pub gathers_again: bool,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Site { layer, mode, pass, rows, in_features, out_features, .. } = self;
        write!(f, "{layer:?} {mode:?} {pass:?}, {rows} rows, {in_features} -> {out_features}")
    }
}

/// What a call takes, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// The whole call.
    pub seconds: f64,
    /// Its matmuls, one after the other and in one piece.
    pub compute: f64,
    /// Its collectives, one after the other and in one piece.
    pub communication: f64,
}

/// A rank's port: what is posted goes one after the other.
struct Port {
    wire: WireCost,
    free: f64,
}

impl Port {
    /// Sends (and receives) so many bytes, ready at `ready`; returns when they have arrived.
    fn pass(&mut self, ready: f64, bytes: f64) -> f64 {
        self.free = self.free.max(ready) + self.wire.seconds(bytes, 1);
        self.free + self.wire.latency
    }
}

/// One call on one rank: all ranks do the same at the same time.
struct Call<'a> {
    plan: &'a Plan,
    n: usize,
    chunks: usize,
    rows: usize,
    /// Features of this rank's weight.
    inner: usize,
    out: usize,
    /// Bytes of all that is gathered or reduced.
    bytes: f64,
}

impl Call<'_> {
    fn product(&self, cost: &ProductCost, rows: usize) -> f64 {
        cost.seconds(rows, self.inner, self.out)
    }

    /// The rows of a piece.
    fn piece(&self, chunks: usize) -> usize {
        self.rows.div_ceil(self.n * chunks)
    }

    fn gathering(&self) -> f64 {
        self.plan.gather.latency + self.plan.gather.seconds(self.received(), self.n - 1)
    }

    fn scattering(&self) -> f64 {
        self.plan.reduce.latency + self.plan.reduce.seconds(self.received(), self.n - 1)
    }

    fn received(&self) -> f64 {
        self.bytes * (self.n - 1) as f64 / self.n as f64
    }

    fn reducing(&self, mode: LinearMode) -> f64 {
        match mode {
            LinearMode::ReduceScatter => self.scattering(),
            LinearMode::AllReduce => self.scattering() + self.gathering(),
        }
    }

    /// Own rows' products under a gather, then those before and after.
    fn own_first(&self, gather: f64, products: &[&ProductCost]) -> f64 {
        let of = |rows| products.iter().map(|cost| self.product(cost, rows)).sum::<f64>();
        let own = self.rows.div_ceil(self.n);
        let others = self.rows - own;
        // A rank in the middle multiplies twice.
        let rest = if self.n > 2 { of(others / 2) + of(others - others / 2) } else { of(others) };
        gather.max(of(own)) + rest
    }

    /// Rows multiplied as they arrive through `port`; returns the end of compute, which begins at `begin`.
    fn by_arrival(&self, port: &mut Port, begin: f64, products: &[&ProductCost]) -> f64 {
        let of = |rows| products.iter().map(|cost| self.product(cost, rows)).sum::<f64>();
        let mut compute = begin + of(self.rows.div_ceil(self.n));
        let pieces = (self.n - 1) * self.chunks;
        let bytes = self.received() / pieces as f64;
        for _ in 0..pieces {
            compute = compute.max(port.pass(0.0, bytes)) + of(self.piece(self.chunks));
        }
        compute
    }

    /// Rows computed block by block from `begin` on, each leaving through `port` at once, this rank's own last. Returns the
    /// end of compute and of the reduction.
    fn block_by_block(&self, port: &mut Port, begin: f64, cost: &ProductCost, mode: LinearMode) -> (f64, f64) {
        let (mut compute, mut arrived) = (begin, begin);
        let bytes = self.bytes / (self.n * self.chunks) as f64;
        for _ in 0..(self.n - 1) * self.chunks {
            compute += self.product(cost, self.piece(self.chunks));
            arrived = port.pass(compute, bytes);
        }
        for _ in 0..self.chunks {
            compute += self.product(cost, self.piece(self.chunks));
            if mode == LinearMode::AllReduce {
                let ready = compute.max(arrived);
                (0..self.n - 1).for_each(|_| {
                    port.wire = self.plan.gather;
                    arrived = port.pass(ready, bytes);
                });
            }
        }
        (compute, arrived.max(compute))
    }
}

impl Plan {
    /// What a call takes under an overlap. [`Overlap::Auto`] is the one that it would choose; `chunks: 0` the best number.
    pub fn predict(&self, site: &Site, overlap: Overlap) -> Prediction {
        let n = self.world_size;
        let overlap = match overlap {
            Overlap::Auto => self.choose(site),
            Overlap::Pipelined { chunks: 0 } => Overlap::Pipelined { chunks: self.chunks(site) },
            overlap => overlap,
        };
        let chunks = if let Overlap::Pipelined { chunks } = overlap { chunks } else { 1 };
        let (inner, out, width) = match site.layer {
            LayerKind::Column => (site.in_features, site.out_features.div_ceil(n), site.in_features),
            LayerKind::Row => (site.in_features.div_ceil(n), site.out_features, site.out_features),
        };
        let bytes = (site.rows * width * self.dtype.size()) as f64;
        let call = Call { plan: self, n, chunks, rows: site.rows, inner, out, bytes };
        let (forward, dx, dw) = (&self.forward, &self.input_grad, &self.weight_grad);
        let whole = |costs: &[&ProductCost]| costs.iter().map(|cost| call.product(cost, site.rows)).sum::<f64>();
        let compute = if site.pass == Pass::Forward { whole(&[forward]) } else { whole(&[dx, dw]) };
        if n == 1 {
            return Prediction { seconds: compute, compute, communication: 0.0 };
        }

        let scatter = site.mode == LinearMode::ReduceScatter;
        let gathers = match (site.layer, site.pass) {
            (LayerKind::Column, Pass::Forward) | (LayerKind::Row, Pass::Backward) => scatter,
            (LayerKind::Column, Pass::Backward) => scatter && site.gathers_again,
            (LayerKind::Row, Pass::Forward) => false,
        };
        let reduces =
            matches!((site.layer, site.pass), (LayerKind::Column, Pass::Backward) | (LayerKind::Row, Pass::Forward));
        let gather = if gathers { call.gathering() } else { 0.0 };
        let reduce = if reduces { call.reducing(site.mode) } else { 0.0 };
        let communication = gather + reduce;
        let mut port = Port { wire: if gathers { self.gather } else { self.reduce }, free: 0.0 };
        let ideal = match (site.layer, site.pass, overlap) {
            _ if communication == 0.0 => compute,
            (.., Overlap::Blocking) => compute + communication,
            (LayerKind::Column, Pass::Forward, Overlap::Async) => call.own_first(gather, &[forward]),
            (LayerKind::Column, Pass::Forward, _) => call.by_arrival(&mut port, 0.0, &[forward]),
            (LayerKind::Row, Pass::Backward, Overlap::Async) => call.own_first(gather, &[dx, dw]),
            (LayerKind::Row, Pass::Backward, _) => call.by_arrival(&mut port, 0.0, &[dx, dw]),
            (LayerKind::Row, Pass::Forward, Overlap::Async) if scatter => {
                let own = site.rows.div_ceil(n);
                let others = site.rows - own;
                let first = if n > 2 { 2.0 * call.product(forward, others / 2) } else { call.product(forward, others) };
                first + call.product(forward, own).max(reduce)
            }
            (LayerKind::Row, Pass::Forward, Overlap::Async) => {
                let half = call.product(forward, site.rows.div_ceil(2));
                half + half.max(reduce / 2.0) + reduce / 2.0
            }
            (LayerKind::Row, Pass::Forward, _) => call.block_by_block(&mut port, 0.0, forward, site.mode).1,
            (LayerKind::Column, Pass::Backward, Overlap::Async) => gather.max(whole(&[dx])) + reduce.max(whole(&[dw])),
            (LayerKind::Column, Pass::Backward, _) => {
                port.free = gather;
                port.wire = self.reduce;
                let (computed, reduced) = call.block_by_block(&mut port, 0.0, dx, site.mode);
                let products = if gathers {
                    let own = call.product(dw, site.rows.div_ceil(n));
                    // One product for each rank's block, once the gather has brought it.
                    (computed + own * n as f64).max(gather + own)
                } else {
                    computed + whole(&[dw])
                };
                products.max(reduced)
            }
        };
        let hidden = (compute + communication - ideal).max(0.0);
        Prediction { seconds: ideal + (1.0 - self.free) * hidden, compute, communication }
    }
}
