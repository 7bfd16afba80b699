//! Sequences of a cache.
use std::{io::Write, mem::size_of, os::raw::c_void, path::Path, ptr, slice};

use kvq_sys as sys;

use crate::{
    cache::Cache,
    error::{ask, check, handle, init, int, Error, Result, Text},
    formats::Role,
    io::{with_callback, with_writer},
    options::{AttendOptions, Call, Threads},
    reports::{Snapshot, Usage},
    tensor::{Tensor, TensorMut, Value},
};

pub(crate) fn path_text(path: &Path) -> Result<Text> {
    Text::new(
        path.to_str()
            .ok_or_else(|| Error::argument(format!("the path {:?} is no UTF-8", path)))?,
    )
}

/// Methods that sequences and rings have in common.
macro_rules! token_store {
    ($prefill:ident, $append:ident, $attend:ident, $append_draft:ident, $keep:ident) => {
        /// Appends n tokens to a layer and attends for the last m of them: one call for each layer of a chunk of the prompt, or of a
        /// decode step. Attention reads the chunk in 16 bit; pages behind the recent window are quantized afterwards.
        ///
        /// k: [n][kv_heads][head_dim], v: [n][kv_heads][value_dim], q: [m][q_heads][head_dim], out: [m][q_heads][value_dim]; q_heads is
        /// a multiple of kv_heads. out gets softmax(q K^T) V.
        pub fn prefill<T: Value, Q: Value, O: Value>(
            &mut self,
            layer: usize,
            k: &Tensor<T>,
            v: &Tensor<T>,
            q: &Tensor<Q>,
            out: &mut TensorMut<O>,
            mut options: AttendOptions,
        ) -> Result<()> {
            let mut call = Call::new(&mut options, Some(&q.c))?;
            let layer = int(layer, "layer")?;
            check(unsafe { sys::$prefill(self.raw(), layer, &k.c, &v.c, &q.c, &out.c, call.options()) })
        }
        /// Appends n tokens to a layer, without queries.
        pub fn append<T: Value>(&mut self, layer: usize, k: &Tensor<T>, v: &Tensor<T>) -> Result<()> {
            check(unsafe { sys::$append(self.raw(), int(layer, "layer")?, &k.c, &v.c) })
        }
        /// out = softmax(q K^T) V for the last m tokens of a layer.
        pub fn attend<Q: Value, O: Value>(
            &self,
            layer: usize,
            q: &Tensor<Q>,
            out: &mut TensorMut<O>,
            mut options: AttendOptions,
        ) -> Result<()> {
            let mut call = Call::new(&mut options, Some(&q.c))?;
            check(unsafe { sys::$attend(self.raw(), int(layer, "layer")?, &q.c, &out.c, call.options()) })
        }
        /// Appends drafted tokens; at most 64 wait at a time, until keep. Attend to them under [`crate::Mods::tree_parents`].
        pub fn append_draft<T: Value>(&mut self, layer: usize, k: &Tensor<T>, v: &Tensor<T>) -> Result<()> {
            check(unsafe { sys::$append_draft(self.raw(), int(layer, "layer")?, &k.c, &v.c) })
        }
        /// Accepts drafted tokens path[0] < path[1] < ..., numbers within the draft, and removes the others, in every layer with a draft.
        pub fn keep(&mut self, path: &[i32]) -> Result<()> {
            check(unsafe { sys::$keep(self.raw(), path.as_ptr(), int(path.len(), "path")?) })
        }
    };
}
pub(crate) use token_store;

handle!(
    /// Tokens of one text. Different sequences are independent.
    Sequence,
    kvq_sequence,
    kvq_sequence_free
);

/// Room for the `best` positions of every query. Err: weights that are not those of the queries, or no memory.
pub(crate) fn positions(q: &sys::kvq_tensor, weights: &[f32], best: usize) -> Result<Vec<i32>> {
    let (n, heads) = (q.tokens as usize, q.heads as usize);
    if weights.len() != n * heads {
        return Err(Error::argument(format!(
            "{} weights for {} queries of {} heads",
            weights.len(),
            n,
            heads
        )));
    }
    let mut out = Vec::new();
    let enough = n
        .checked_mul(best)
        .map_or(false, |all| out.try_reserve_exact(all).is_ok());
    if !enough {
        return Err(Error::memory(format!(
            "there is no memory for {} positions of {} queries",
            best, n
        )));
    }
    out.resize(n * best, -1);
    Ok(out)
}

impl Sequence {
    token_store!(
        kvq_sequence_prefill,
        kvq_sequence_append,
        kvq_sequence_attend,
        kvq_sequence_append_draft,
        kvq_sequence_keep
    );

    /// The `best` tokens of a layer made by `Layer::index` for each of the last n tokens: of those up to itself the ones with the
    /// largest sum over heads of weight * max(q . k, 0); of equal ones the earlier first. q: [n][heads][channels], weights:
    /// [n][heads]. Returns positions [n][best], the best first; -1 where there are no more: [`crate::Mods::listed_tokens`].
    pub fn select<Q: Value>(
        &self,
        layer: usize,
        q: &Tensor<Q>,
        weights: &[f32],
        best: usize,
        mut options: AttendOptions,
    ) -> Result<Vec<i32>> {
        let mut call = Call::new(&mut options, None)?;
        let (layer, count) = (int(layer, "layer")?, int(best, "best")?);
        let mut out = positions(&q.c, weights, best)?;
        check(unsafe {
            sys::kvq_sequence_select(
                self.raw(),
                layer,
                &q.c,
                weights.as_ptr(),
                count,
                out.as_mut_ptr(),
                call.options(),
            )
        })?;
        Ok(out)
    }
    /// A sequence with the same tokens that shares every page.
    pub fn fork(&self) -> Result<Sequence> {
        Self::make(|out| unsafe { sys::kvq_sequence_fork(self.raw(), out) })
    }
    /// Tokens of a layer; None: of the longest one.
    pub fn tokens(&self, layer: Option<usize>) -> Result<usize> {
        let layer = layer.map_or(Ok(sys::KVQ_ALL_LAYERS), |l| int(l, "layer"))?;
        let n: i32 = ask(|out| unsafe { sys::kvq_sequence_tokens(self.raw(), layer, out) })?;
        Ok(n as usize)
    }
    /// Removes every token from position `tokens` on, in all layers. Within `rollback` tokens it is exact. Where layers have state, all
    /// layers go to token [`Sequence::reach`]. Returns how many tokens before `tokens` must run again. Refused where a layer with a window
    /// has freed tokens that the next one would see: from [`Sequence::trim_limit`] on, and to 0, it is always possible.
    pub fn trim(&mut self, tokens: usize) -> Result<usize> {
        check(unsafe { sys::kvq_sequence_trim(self.raw(), int(tokens, "tokens")?) })?;
        Ok(tokens - self.tokens(None)?)
    }
    /// The least number of tokens from which on every trim is possible: 0, unless a layer with a window has freed tokens.
    pub fn trim_limit(&self) -> Result<usize> {
        let n: i32 = ask(|out| unsafe { sys::kvq_sequence_trim_limit(self.raw(), out) })?;
        Ok(n as usize)
    }
    /// The token to which trim(tokens) goes: `tokens`, or where layers have state that of the newest snapshot at or before it, or 0.
    pub fn reach(&self, tokens: usize) -> Result<usize> {
        let tokens = int(tokens, "tokens")?;
        let n: i32 = ask(|out| unsafe { sys::kvq_sequence_reach(self.raw(), tokens, out) })?;
        Ok(n as usize)
    }
    /// Gives back the 16-bit copies of quantized pages ([`crate::Usage::rollback`]). A trim into pages that are quantized now then keeps
    /// their codes, as one by more than `rollback` tokens does. With [`Sequence::fork`]: a sequence to save or send without copies.
    pub fn drop_copies(&mut self) -> Result<()> {
        check(unsafe { sys::kvq_sequence_drop_copies(self.raw()) })
    }
    /// Removes tokens [first, last); those behind them move to the front, keys included. Needs [`crate::CacheOptions::rotary`] if keys move.
    pub fn erase(&mut self, first: usize, last: usize) -> Result<()> {
        check(unsafe { sys::kvq_sequence_erase(self.raw(), int(first, "first")?, int(last, "last")?) })
    }
    /// Moves the rotary positions of the keys of tokens [first, last) by `by`.
    pub fn shift(&mut self, first: usize, last: usize, by: i64) -> Result<()> {
        check(unsafe { sys::kvq_sequence_shift(self.raw(), int(first, "first")?, int(last, "last")?, by) })
    }
    /// Appends tokens [first, last) of another sequence of the cache, whose pages are shared.
    pub fn splice(&mut self, other: &Sequence, first: usize, last: usize) -> Result<()> {
        let (first, last) = (int(first, "first")?, int(last, "last")?);
        check(unsafe { sys::kvq_sequence_splice(self.raw(), other.raw(), first, last) })
    }

    /// How much attention the tokens of a layer get: [kv_heads][tokens], of each kv head the sum of the weights of a token over the
    /// queries and query heads. q and options as for attend, without lists, selected pages, skipped values and lse.
    pub fn attention_mass<Q: Value>(
        &self,
        layer: usize,
        q: &Tensor<Q>,
        mut options: AttendOptions,
    ) -> Result<Vec<f32>> {
        let mut call = Call::new(&mut options, Some(&q.c))?;
        let number = int(layer, "layer")?;
        let mut mass = vec![0f32; self.kv_heads(number)? * self.tokens(Some(layer))?];
        check(unsafe {
            sys::kvq_sequence_attention_mass(self.raw(), number, &q.c, mass.as_mut_ptr(), call.options())
        })?;
        Ok(mass)
    }
    fn kv_heads(&self, layer: i32) -> Result<usize> {
        let mut of = sys::kvq_layer {
            kind: 0,
            kv_heads: 0,
            head_dim: 0,
            value_dim: 0,
            window: 0,
            sinks: 0,
            owner: 0,
        };
        check(unsafe { sys::kvq_sequence_get_layer(self.raw(), layer, &mut of) })?;
        Ok(of.kv_heads as usize)
    }
    /// Tokens [first, last) behind its sinks that a layer does not hold any more; equal: there are none.
    pub fn gap(&self, layer: usize) -> Result<(usize, usize)> {
        let layer = int(layer, "layer")?;
        let (mut first, mut last) = (0, 0);
        check(unsafe { sys::kvq_sequence_gap(self.raw(), layer, &mut first, &mut last) })?;
        Ok((first as usize, last as usize))
    }
    /// Drops all tokens of a layer but those that its kv heads list. kept: [kv_heads][count] positions that ascend and begin with all
    /// sinks. The sequence has as many tokens as before; trims go back to this point. For layers of full and latent attention.
    pub fn retain(&mut self, layer: usize, kept: &[i32], count: usize) -> Result<()> {
        let (layer, number) = (int(layer, "layer")?, int(count, "count")?);
        let heads = self.kv_heads(layer)?;
        if heads.checked_mul(count) != Some(kept.len()) {
            return Err(Error::argument(format!(
                "{} positions for {} kv heads that keep {} each",
                kept.len(),
                heads,
                count
            )));
        }
        check(unsafe { sys::kvq_sequence_retain(self.raw(), layer, kept.as_ptr(), number) })
    }
    /// All tokens of such layers stay 16 bit until retain of the layer, or release: those of a prompt, so that only what is kept of it
    /// is quantized.
    pub fn hold(&mut self) -> Result<()> {
        check(unsafe { sys::kvq_sequence_hold(self.raw()) })
    }
    /// Quantizes what hold has kept in 16 bit.
    pub fn release(&mut self) -> Result<()> {
        check(unsafe { sys::kvq_sequence_release(self.raw()) })
    }

    /// Gives back what [`Cache::reserve`] took and no step has used.
    pub fn release_reserved(&mut self) -> Result<()> {
        check(unsafe { sys::kvq_sequence_release_reserved(self.raw()) })
    }

    /// Upper bound of the bytes that appending n tokens to every layer takes.
    pub fn append_bytes(&self, n: usize) -> Result<usize> {
        let n = int(n, "n")?;
        ask(|out| unsafe { sys::kvq_sequence_append_bytes(self.raw(), n, out) })
    }
    /// Upper bound of the bytes that prefill of n tokens in every layer takes.
    pub fn prefill_bytes(&self, n: usize) -> Result<usize> {
        let n = int(n, "n")?;
        ask(|out| unsafe { sys::kvq_sequence_prefill_bytes(self.raw(), n, out) })
    }
    /// Upper bound of the bytes that n drafted tokens in every layer, and the keep of any path, take.
    pub fn draft_bytes(&self, n: usize) -> Result<usize> {
        let n = int(n, "n")?;
        ask(|out| unsafe { sys::kvq_sequence_draft_bytes(self.raw(), n, out) })
    }
    /// Writes the values of tokens [first, first + n) of a layer's K or V to out, [n][kv_heads][dim], rounded once.
    pub fn dequantize<T: Value>(&self, layer: usize, role: Role, first: usize, out: &mut TensorMut<T>) -> Result<()> {
        let (layer, first) = (int(layer, "layer")?, int(first, "first")?);
        check(unsafe { sys::kvq_sequence_dequantize(self.raw(), layer, role.to_c(), first, &out.c) })
    }
    /// Bytes of this sequence.
    pub fn usage(&self) -> Result<Usage> {
        let mut c = init!(kvq_usage {});
        check(unsafe { sys::kvq_sequence_get_usage(self.raw(), &mut c) })?;
        Ok(Usage::from_c(&c))
    }

    /// A part of the live state of a layer made by [`crate::Layer::state`], [heads][rows][columns], to read and to write; zeros at first.
    /// From this call until advance a step is under way: a trim then goes back to a snapshot, also to the present token. T: the type
    /// of the part; with another one the same bytes.
    pub fn state<T: Value>(&mut self, layer: usize, part: usize) -> Result<&mut [T]> {
        let (layer, part) = (int(layer, "layer")?, int(part, "part")?);
        let (mut data, mut bytes) = (ptr::null_mut(), 0);
        check(unsafe { sys::kvq_sequence_state(self.raw(), layer, part, &mut data, &mut bytes) })?;
        if bytes % size_of::<T>() != 0 {
            let message = format!(
                "part {} of layer {} has {} bytes, no values of {}",
                part,
                layer,
                bytes,
                size_of::<T>()
            );
            return Err(Error::argument(message));
        }
        // Aligned to 64 bytes, and of this sequence alone until a call that changes it.
        Ok(unsafe { slice::from_raw_parts_mut(data as *mut T, bytes / size_of::<T>()) })
    }
    /// The state of all layers has taken n more tokens. Takes a snapshot if one is due: [`crate::CacheOptions::snapshot_every`], or the end
    /// of a prompt. Returns whether it did; false also where one was due and had no memory.
    pub fn advance(&mut self, n: usize, prompt_ends: bool, threads: Option<&mut Threads>) -> Result<bool> {
        let n = int(n, "n")?;
        let executor = threads.map_or(ptr::null_mut(), |t| t.raw());
        let taken: i32 =
            ask(|out| unsafe { sys::kvq_sequence_advance(self.raw(), n, prompt_ends as i32, executor, out) })?;
        Ok(taken != 0)
    }
    /// Takes a snapshot of the state after all tokens of the sequence, which it must have taken.
    pub fn snapshot(&mut self, threads: Option<&mut Threads>) -> Result<()> {
        let tokens = int(self.tokens(None)?, "tokens")?;
        let executor = threads.map_or(ptr::null_mut(), |t| t.raw());
        check(unsafe { sys::kvq_sequence_snapshot(self.raw(), tokens, executor) })
    }
    /// Gives all snapshots back: a trim then goes to token 0.
    pub fn drop_snapshots(&mut self) -> Result<()> {
        check(unsafe { sys::kvq_sequence_drop_snapshots(self.raw()) })
    }
    /// Ascending by tokens.
    pub fn snapshots(&self) -> Result<Vec<Snapshot>> {
        let n: i32 = ask(|out| unsafe { sys::kvq_sequence_get_snapshots(self.raw(), ptr::null_mut(), 0, out) })?;
        let none = sys::kvq_snapshot {
            tokens: 0,
            reserved: 0,
            bytes: 0,
            error: 0.0,
        };
        let mut all = vec![none; n as usize];
        ask::<i32>(|out| unsafe { sys::kvq_sequence_get_snapshots(self.raw(), all.as_mut_ptr(), n, out) })?;
        Ok(all.iter().map(Snapshot::from_c).collect())
    }

    /// Writes a safetensors file, for [`Cache::restore`]. model: any text by which the model is recognized
    pub fn save(&self, to: &mut dyn Write, model: &str) -> Result<()> {
        let model = Text::new(model)?;
        let options = init!(kvq_save_options { model: model.as_ptr() });
        with_writer(to, |write, user| {
            check(unsafe { sys::kvq_sequence_save(self.raw(), &options, write, user) })
        })
    }
    /// The same to a file, which is renamed when it is complete.
    pub fn save_file(&self, path: &Path, model: &str) -> Result<()> {
        let (model, path) = (Text::new(model)?, path_text(path)?);
        let options = init!(kvq_save_options { model: model.as_ptr() });
        check(unsafe { sys::kvq_sequence_save_file(self.raw(), &options, path.as_ptr()) })
    }
    /// The pages of a layer as messages to a process that decodes on, for [`Receiver::accept`].
    pub fn send_pages(&self, layer: usize) -> Result<Vec<Vec<u8>>> {
        let layer = int(layer, "layer")?;
        let mut messages = Vec::new();
        with_callback(
            &mut |message| {
                messages.push(message.to_vec());
                Ok(())
            },
            |write, user| check(unsafe { sys::kvq_sequence_send_pages(self.raw(), layer, write, user) }),
        )?;
        Ok(messages)
    }
}

handle!(
    /// Collects the messages of one sequence, in any order.
    Receiver,
    kvq_receiver,
    kvq_receiver_free
);
impl Receiver {
    pub fn new(cache: &Cache) -> Result<Self> {
        Self::make(|out| unsafe { sys::kvq_receiver_create(cache.raw(), out) })
    }
    /// Before the first message: pages may change to the formats of the cache, which must also list those of the messages, and to its
    /// sinks, recent window and page tokens, if those of the sender are said here (None: as of the cache).
    pub fn convert_pages(
        &mut self,
        sinks: Option<usize>,
        recent: Option<usize>,
        page_tokens: Option<usize>,
    ) -> Result<()> {
        let said = |n: Option<usize>, name| n.map_or(Ok(-1), |n| int(n, name));
        let (sinks, recent, page_tokens) = (
            said(sinks, "sinks")?,
            said(recent, "recent")?,
            said(page_tokens, "page_tokens")?,
        );
        check(unsafe { sys::kvq_receiver_convert(self.raw(), sinks, recent, page_tokens) })
    }
    /// Takes one whole message of [`Sequence::send_pages`].
    pub fn accept(&mut self, message: &[u8]) -> Result<()> {
        check(unsafe { sys::kvq_receiver_accept(self.raw(), message.as_ptr() as *const c_void, message.len()) })
    }
    /// The sequence, once every layer has `tokens` tokens (None: as many as the messages say). The receiver is then empty.
    pub fn finish(&mut self, tokens: Option<usize>) -> Result<Sequence> {
        let tokens = tokens.map_or(Ok(-1), |t| int(t, "tokens"))?;
        Sequence::make(|out| unsafe { sys::kvq_receiver_finish(self.raw(), tokens, out) })
    }
}
