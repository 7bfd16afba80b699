//! Sequences without an end.
use kvq_sys as sys;

use crate::{
    error::{check, count, handle, init, int, Result},
    options::{AttendOptions, Call},
    sequence::{token_store, Sequence},
    tensor::{Tensor, TensorMut, Value},
};

#[derive(Clone, Copy, Debug, Default)]
pub struct RingOptions {
    /// A query attends to itself, the window - 1 tokens before it, and the sinks of the cache.
    pub window: usize,
    /// A trim by so many tokens is always possible; None: 16.
    pub slack: Option<usize>,
    /// Sinks move along, directly before the window; needs [`crate::CacheOptions::rotary`].
    pub sinks_in_cache: bool,
    /// Tokens of the text before the first one that the sequence holds behind its sinks; 0: it begins there.
    pub first_token: u64,
}

handle!(
    /// A sequence without an end. Positions count from the first token ever appended. Pages that no query attends to any more are freed.
    /// Mods must not have a window.
    Ring,
    kvq_ring,
    kvq_ring_free
);
impl Ring {
    token_store!(
        kvq_ring_prefill,
        kvq_ring_append,
        kvq_ring_attend,
        kvq_ring_append_draft,
        kvq_ring_keep
    );

    /// A ring over a fork of the sequence, which has the same number of tokens in every layer, possibly none.
    pub fn new(sequence: &Sequence, options: &RingOptions) -> Result<Self> {
        let first = i64::try_from(options.first_token).unwrap_or(i64::MAX);
        let c = init!(kvq_ring_options {
            window: int(options.window, "window")?,
            slack: count(options.slack, "slack")?,
            sinks_in_cache: options.sinks_in_cache as i32,
            first_token: first,
        });
        Self::make(|out| unsafe { sys::kvq_ring_create(sequence.raw(), &c, out) })
    }
    /// A ring with the same tokens that shares every page.
    pub fn fork(&self) -> Result<Ring> {
        Self::make(|out| unsafe { sys::kvq_ring_fork(self.raw(), out) })
    }
    /// Removes every token from position `tokens` on.
    pub fn trim(&mut self, tokens: u64) -> Result<()> {
        check(unsafe { sys::kvq_ring_trim(self.raw(), i64::try_from(tokens).unwrap_or(i64::MAX)) })
    }
    /// Tokens appended so far to a layer (None: to the longest one), and the position from which on every token is held.
    pub fn tokens(&self, layer: Option<usize>) -> Result<(u64, u64)> {
        let layer = layer.map_or(Ok(sys::KVQ_ALL_LAYERS), |l| int(l, "layer"))?;
        let (mut tokens, mut first) = (0, 0);
        check(unsafe { sys::kvq_ring_tokens(self.raw(), layer, &mut tokens, &mut first) })?;
        Ok((tokens as u64, first as u64))
    }
    /// The held tokens as a sequence, a fork: to save, to measure or to dequantize.
    pub fn held(&self) -> Result<Sequence> {
        Sequence::make(|out| unsafe { sys::kvq_ring_held(self.raw(), out) })
    }
}
