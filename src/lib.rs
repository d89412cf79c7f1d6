//! Asynchronous tensor-parallel linear layers.
