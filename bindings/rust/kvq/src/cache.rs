//! Caches.
use std::{io::Read, ptr};

use kvq_sys as sys;

use crate::{
    error::{ask, check, count, handle, init, int, limit, Error, Result, Text},
    formats::Statistics,
    io::with_reader,
    layers::Layer,
    options::{lse_of, AttendOptions, Call, Mods, Threads},
    reports::{
        lowered, BudgetQuery, CacheInfo, Footprint, FootprintQuery, Requantize, RequantizeReport, StepDownPolicy,
        StepDownReport,
    },
    sequence::{path_text, positions, Sequence},
    tensor::{Tensor, TensorMut, Value},
};

/// How a layer rotates keys before they are appended, so that they can move later.
#[derive(Clone, Debug)]
pub struct Rotary {
    /// Rotated channels, even; 0: none.
    pub dims: usize,
    pub first_channel: usize,
    /// Pairs (2 j, 2 j + 1); else (j, j + dims / 2).
    pub interleaved: bool,
    /// Frequencies base^(-2 j / dims).
    pub base: f64,
    /// Instead of base: radians per position of each pair, [dims / 2].
    pub frequencies: Vec<f64>,
}
impl Rotary {
    /// All pairs (j, j + dims / 2), with frequencies base^(-2 j / dims).
    pub fn new(dims: usize, base: f64) -> Self {
        Rotary {
            dims,
            first_channel: 0,
            interleaved: false,
            base,
            frequencies: Vec::new(),
        }
    }
    /// rope_scaling "llama3": Llama 3.1 has base 500000, factor 8, low 1, high 4, context 8192.
    pub fn llama3(dims: usize, base: f64, factor: f64, low: f64, high: f64, original_context: f64) -> Result<Self> {
        let n = int(dims, "dims")?;
        let mut made = Rotary {
            frequencies: vec![0.0; (dims / 2).max(1)],
            ..Rotary::new(dims, base)
        };
        let out = made.frequencies.as_mut_ptr();
        check(unsafe { sys::kvq_rotary_llama3(n, base, factor, low, high, original_context, out) })?;
        Ok(made)
    }
    /// rope_scaling "yarn": beta_fast is usually 32, beta_slow 1.
    pub fn yarn(
        dims: usize,
        base: f64,
        factor: f64,
        original_context: f64,
        beta_fast: f64,
        beta_slow: f64,
    ) -> Result<Self> {
        let n = int(dims, "dims")?;
        let mut made = Rotary {
            frequencies: vec![0.0; (dims / 2).max(1)],
            ..Rotary::new(dims, base)
        };
        let out = made.frequencies.as_mut_ptr();
        check(unsafe { sys::kvq_rotary_yarn(n, base, factor, original_context, beta_fast, beta_slow, out) })?;
        Ok(made)
    }
}

/// Of which tokens a plan of channel widths is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(i32)]
pub enum KeyStatistics {
    /// Each sequence's first ones; forks and prefix hits inherit the plan.
    #[default]
    Own = sys::KVQ_OWN_STATISTICS,
    /// The first ones of the first sequence that has enough: one plan for the cache.
    Shared = sys::KVQ_SHARED_STATISTICS,
    /// No plans: even widths.
    Off = sys::KVQ_NONE,
}

/// A cache to be made: `CacheOptions { values: Some("int8".into()), ..CacheOptions::new(32, 8, 128, "std4") }`.
#[derive(Clone, Debug, Default)]
pub struct CacheOptions {
    /// Layers of full attention with kv_heads x head_dim each; 0 with a layer_list.
    pub layers: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Channels of values; None: head_dim.
    pub value_dim: Option<usize>,
    /// Of a model whose layers differ; empty: the numbers above.
    pub layer_list: Vec<Layer>,
    /// Names, separated by commas. Pages are quantized to the first one; requantize takes all.
    pub keys: String,
    /// None: as keys.
    pub values: Option<String>,
    /// The format of sinks and recent tokens: fp32, fp16 or bf16; None: fp16.
    pub window: Option<String>,
    /// Tokens of a page; None: 128. Multiples of 32 waste no bytes.
    pub page_tokens: Option<usize>,
    /// First tokens, always in the window format; None: 4.
    pub sinks: Option<usize>,
    /// At least so many newest tokens are in the window format; None: 32.
    pub recent: Option<usize>,
    /// A trim by up to so many tokens is exact; None: 16.
    pub rollback: Option<usize>,
    /// Bytes of all pages; None: no limit.
    pub byte_budget: Option<usize>,
    /// Empty, or keys and values of each layer; None: the first ones of the cache.
    pub layer_formats: Vec<(Option<String>, Option<String>)>,
    /// Whose keys say which channels get how many bits, for formats that take a plan (mix4 to mix6, low3, low2).
    pub key_statistics: KeyStatistics,
    /// First tokens that make a plan, 16 bit until then; None: 512.
    pub statistics_tokens: Option<usize>,
    /// Empty: keys cannot move. One entry is for all layers.
    pub rotary: Vec<Rotary>,
    /// byte_budget is allocated when the cache is made.
    pub preallocate: bool,
    /// Cuts repack pages that show less than this part of their tokens, 0.5 at most; 0: never; None: 0.25.
    pub repack: Option<f32>,
    /// [`Sequence::advance`] takes a snapshot of recurrent state every so many tokens; None: none along the way.
    pub snapshot_every: Option<usize>,
    /// And one at the end of a prompt; None: true.
    pub snapshot_prompt_end: Option<bool>,
    /// Of all snapshots of a sequence; the earliest ones go first. None: no limit.
    pub snapshot_bytes: Option<usize>,
}
impl CacheOptions {
    pub fn new(layers: usize, kv_heads: usize, head_dim: usize, keys: &str) -> Self {
        CacheOptions {
            layers,
            kv_heads,
            head_dim,
            keys: keys.into(),
            ..CacheOptions::default()
        }
    }
    /// Of a model whose layers differ.
    pub fn of_layers(layer_list: Vec<Layer>, keys: &str) -> Self {
        CacheOptions {
            layer_list,
            keys: keys.into(),
            ..CacheOptions::default()
        }
    }
}

handle!(
    /// Keys and values of any number of sequences, in pages of quantized blocks. The memory of a cache stays until its last sequence is
    /// dropped.
    Cache,
    kvq_cache,
    kvq_cache_free
);

impl Cache {
    /// Takes no memory for pages yet, unless `preallocate`.
    pub fn new(options: &CacheOptions) -> Result<Self> {
        Self::made(options, None)
    }
    /// The same, with statistics for all keys whose format takes them.
    pub fn with_statistics(options: &CacheOptions, statistics: &Statistics) -> Result<Self> {
        Self::made(options, Some(statistics))
    }
    fn made(o: &CacheOptions, statistics: Option<&Statistics>) -> Result<Self> {
        Self::with_c(o, statistics, |c| {
            Self::make(|out| unsafe { sys::kvq_cache_create(c, out) })
        })
    }
    /// The least byte_budget with which every step succeeds, for a cache with these options, before it is made; their own byte_budget does
    /// not matter. With cuts it is an upper bound.
    pub fn budget(options: &CacheOptions, query: &BudgetQuery) -> Result<usize> {
        let query = query.to_c()?;
        Self::with_c(options, None, |c| {
            ask(|out| unsafe { sys::kvq_get_budget(c, &query, out) })
        })
    }
    /// Calls f with the options in C.
    fn with_c<T>(
        o: &CacheOptions,
        statistics: Option<&Statistics>,
        f: impl FnOnce(&sys::kvq_cache_options) -> Result<T>,
    ) -> Result<T> {
        let (keys, values, window) = (
            Text::new(&o.keys)?,
            Text::optional(o.values.as_ref())?,
            Text::optional(o.window.as_ref())?,
        );
        if !o.layer_list.is_empty() && o.layers != 0 {
            return Err(Error::argument(format!(
                "layers is {}, not 0, beside a layer_list",
                o.layers
            )));
        }
        let layers = o.layers + o.layer_list.len();
        if !o.layer_formats.is_empty() && o.layer_formats.len() != layers {
            let message = format!(
                "layer_formats has {} entries for {} layers",
                o.layer_formats.len(),
                layers
            );
            return Err(Error::argument(message));
        }
        let mut texts = Vec::new();
        let mut layer_formats = Vec::new();
        for (k, v) in &o.layer_formats {
            let (k, v) = (Text::optional(k.as_ref())?, Text::optional(v.as_ref())?);
            layer_formats.push(sys::kvq_layer_formats {
                keys: k.as_ptr(),
                values: v.as_ptr(),
            });
            texts.extend([k, v]);
        }
        let mut layer_list = Vec::new();
        let mut state_parts = Vec::new();
        for l in &o.layer_list {
            for part in &l.parts {
                let name = Text::new(&part.name)?;
                state_parts.push(part.to_c(int(layer_list.len(), "layers")?, &name)?);
                texts.push(name);
            }
            layer_list.push(l.to_c()?);
        }
        let mut rotary = Vec::new();
        for r in &o.rotary {
            rotary.push(sys::kvq_rotary {
                dims: int(r.dims, "dims")?,
                first_channel: int(r.first_channel, "first_channel")?,
                layout: if r.interleaved {
                    sys::KVQ_INTERLEAVED
                } else {
                    sys::KVQ_HALF_SPLIT
                },
                frequency_count: int(r.frequencies.len(), "frequencies")?,
                base: r.base,
                frequencies: if r.frequencies.is_empty() {
                    ptr::null()
                } else {
                    r.frequencies.as_ptr()
                },
                rotate: None,
                user: ptr::null_mut(),
            });
        }
        let c = init!(kvq_cache_options {
            layers: int(layers, "layers")?,
            kv_heads: int(o.kv_heads, "kv_heads")?,
            head_dim: int(o.head_dim, "head_dim")?,
            value_dim: int(o.value_dim.unwrap_or(0), "value_dim")?,
            keys: keys.as_ptr(),
            values: values.as_ptr(),
            window: window.as_ptr(),
            page_tokens: int(o.page_tokens.unwrap_or(0), "page_tokens")?,
            sinks: count(o.sinks, "sinks")?,
            recent: count(o.recent, "recent")?,
            rollback: count(o.rollback, "rollback")?,
            byte_budget: limit(o.byte_budget, "byte_budget")?,
            layer_formats: if layer_formats.is_empty() {
                ptr::null()
            } else {
                layer_formats.as_ptr()
            },
            rotary: if rotary.is_empty() {
                ptr::null()
            } else {
                rotary.as_ptr()
            },
            rotary_count: int(rotary.len(), "rotary")?,
            key_statistics: o.key_statistics as i32,
            statistics: statistics.map_or(ptr::null(), |s| s.raw() as *const _),
            statistics_tokens: int(limit(o.statistics_tokens, "statistics_tokens")?, "statistics_tokens")?,
            preallocate: o.preallocate as i32,
            repack: o.repack.map_or(0.0, |part| if part == 0.0 { -1.0 } else { part }),
            layer_list: if layer_list.is_empty() {
                ptr::null()
            } else {
                layer_list.as_ptr()
            },
            state_parts: state_parts.as_ptr(),
            state_part_count: int(state_parts.len(), "state_parts")?,
            snapshot_every: int(limit(o.snapshot_every, "snapshot_every")?, "snapshot_every")?,
            snapshot_prompt_end: if o.snapshot_prompt_end == Some(false) {
                sys::KVQ_NONE
            } else {
                0
            },
            snapshot_bytes: limit(o.snapshot_bytes, "snapshot_bytes")?,
        });
        f(&c)
    }

    /// The options in force, and bytes and pages in use.
    pub fn info(&self) -> Result<CacheInfo> {
        let mut c = init!(kvq_cache_info {});
        check(unsafe { sys::kvq_cache_get_info(self.raw(), &mut c) })?;
        Ok(CacheInfo::from_c(&c))
    }
    /// An empty sequence.
    pub fn new_sequence(&self) -> Result<Sequence> {
        Sequence::make(|out| unsafe { sys::kvq_sequence_create(self.raw(), out) })
    }
    /// Bytes of workspace for attention of q_tokens x q_heads queries over a sequence of `tokens`.
    pub fn workspace_bytes(&self, tokens: usize, q_heads: usize, q_tokens: usize, threads: usize) -> Result<usize> {
        let (n, h, m, t) = (
            int(tokens, "tokens")?,
            int(q_heads, "q_heads")?,
            int(q_tokens, "q_tokens")?,
            int(threads, "threads")?,
        );
        ask(|out| unsafe { sys::kvq_cache_workspace_bytes(self.raw(), n, h, m, t, out) })
    }

    /// Takes the memory of a step over all layers ahead of it, for all sequences or for none, and `options.workspace`, which must be given.
    /// Afterwards prefill of these sequences, with the same workspace, mods and threads, takes no memory in kvq, in every layer once.
    /// Until then the sequences must not be changed nor forked. What is left goes back with the last layer, or with
    /// [`Sequence::release_reserved`].
    pub fn reserve(&self, steps: &mut [StepRequest], q_heads: usize, mut options: AttendOptions) -> Result<()> {
        let mut call = Call::new(&mut options, None)?;
        let mods = steps
            .iter()
            .map(|r| r.mods.map(Mods::to_c).transpose())
            .collect::<Result<Vec<_>>>()?;
        let mut all = Vec::new();
        for (r, m) in steps.iter_mut().zip(&mods) {
            all.push(sys::kvq_step_request {
                sequence: r.sequence.raw(),
                tokens: int(r.tokens, "tokens")?,
                q_tokens: int(r.q_tokens, "q_tokens")?,
                mods: m.as_ref().map_or(ptr::null(), |m| m),
            });
        }
        let (n, q_heads) = (int(all.len(), "steps")?, int(q_heads, "q_heads")?);
        check(unsafe { sys::kvq_cache_reserve(self.raw(), all.as_ptr(), n, q_heads, call.options()) })
    }

    /// Attention of many sequences in one call: all threads share one list of tasks. Every sequence gets the bits that it gets alone.
    pub fn attend(&self, layer: usize, requests: &mut [AttendRequest], mut options: AttendOptions) -> Result<()> {
        let mut call = Call::new(&mut options, None)?;
        let mods = requests
            .iter()
            .map(|r| r.mods.map(Mods::to_c).transpose())
            .collect::<Result<Vec<_>>>()?;
        let mut all = Vec::new();
        for (r, m) in requests.iter_mut().zip(&mods) {
            all.push(sys::kvq_attend_request {
                sequence: r.sequence.raw(),
                q: r.q,
                out: r.out,
                lse: lse_of(&mut r.lse, Some(&r.q))?,
                mods: m.as_ref().map_or(ptr::null(), |m| m),
            });
        }
        let (layer, n) = (int(layer, "layer")?, int(all.len(), "requests")?);
        check(unsafe { sys::kvq_cache_attend(self.raw(), layer, all.as_ptr(), n, call.options()) })
    }
    /// [`Sequence::select`] for many sequences in one call: the positions of each.
    pub fn select(
        &self,
        layer: usize,
        requests: &[SelectRequest],
        best: usize,
        mut options: AttendOptions,
    ) -> Result<Vec<Vec<i32>>> {
        let mut call = Call::new(&mut options, None)?;
        let (layer, n, count) = (
            int(layer, "layer")?,
            int(requests.len(), "requests")?,
            int(best, "best")?,
        );
        let mut out = requests
            .iter()
            .map(|r| positions(&r.q, r.weights, best))
            .collect::<Result<Vec<_>>>()?;
        let all: Vec<_> = requests
            .iter()
            .zip(&mut out)
            .map(|(r, to)| sys::kvq_select_request {
                sequence: r.sequence.raw(),
                q: r.q,
                weights: r.weights.as_ptr(),
                out: to.as_mut_ptr(),
            })
            .collect();
        check(unsafe { sys::kvq_cache_select(self.raw(), layer, all.as_ptr(), n, count, call.options()) })?;
        Ok(out)
    }
    /// Prefill of many sequences in one call: chunks of any length beside sequences that decode one token. On an error all are unchanged.
    pub fn prefill(&self, layer: usize, requests: &mut [PrefillRequest], mut options: AttendOptions) -> Result<()> {
        let mut call = Call::new(&mut options, None)?;
        let mods = requests
            .iter()
            .map(|r| r.mods.map(Mods::to_c).transpose())
            .collect::<Result<Vec<_>>>()?;
        let mut all = Vec::new();
        for (r, m) in requests.iter_mut().zip(&mods) {
            all.push(sys::kvq_prefill_request {
                sequence: r.sequence.raw(),
                k: r.k,
                v: r.v,
                q: r.q,
                out: r.out,
                lse: lse_of(&mut r.lse, Some(&r.q))?,
                mods: m.as_ref().map_or(ptr::null(), |m| m),
            });
        }
        let (layer, n) = (int(layer, "layer")?, int(all.len(), "requests")?);
        check(unsafe { sys::kvq_cache_prefill(self.raw(), layer, all.as_ptr(), n, call.options()) })
    }

    /// Changes the format of pages; pages that the sequences share stay shared. Status::Memory: pages that were converted until then
    /// stay so.
    pub fn requantize(&self, sequences: &mut [&mut Sequence], request: &Requantize) -> Result<RequantizeReport> {
        let all: Vec<_> = sequences.iter().map(|s| s.raw()).collect();
        self.requantize_raw(&all, request, false)
    }
    /// What requantize would do.
    pub fn plan_requantize(&self, sequences: &[&Sequence], request: &Requantize) -> Result<RequantizeReport> {
        let all: Vec<_> = sequences.iter().map(|s| s.raw()).collect();
        self.requantize_raw(&all, request, true)
    }
    fn requantize_raw(
        &self,
        all: &[*mut sys::kvq_sequence],
        r: &Requantize,
        dry_run: bool,
    ) -> Result<RequantizeReport> {
        let request = r.to_c(dry_run)?;
        let mut report = init!(kvq_requantize_report {});
        let n = int(all.len(), "sequences")?;
        check(unsafe { sys::kvq_cache_requantize(self.raw(), all.as_ptr(), n, &request.c, &mut report) })?;
        Ok(RequantizeReport::from_c(&report))
    }
    /// Applies a policy, between decode steps.
    pub fn step_down(
        &self,
        sequences: &mut [&mut Sequence],
        policy: &StepDownPolicy,
        threads: Option<&mut Threads>,
    ) -> Result<StepDownReport> {
        let all: Vec<_> = sequences.iter().map(|s| s.raw()).collect();
        lowered(&all, policy, threads, |all, n, policy, executor, report| unsafe {
            sys::kvq_cache_step_down(self.raw(), all, n, policy, executor, report)
        })
    }

    /// A dry run: the report of [`Cache::step_down`] with these threads, to the byte.
    pub fn plan_step_down(
        &self,
        sequences: &[&Sequence],
        policy: &StepDownPolicy,
        threads: Option<&mut Threads>,
    ) -> Result<StepDownReport> {
        let all: Vec<_> = sequences.iter().map(|s| s.raw()).collect();
        lowered(&all, policy, threads, |all, n, policy, executor, report| unsafe {
            sys::kvq_cache_plan_step_down(self.raw(), all, n, policy, executor, report)
        })
    }

    /// Bytes of sequences of `tokens` tokens, equal to what will be allocated.
    pub fn footprint(&self, tokens: usize, query: &FootprintQuery) -> Result<Footprint> {
        let mut query = query.to_c()?;
        let mut c = init!(kvq_footprint {});
        check(unsafe { sys::kvq_cache_get_footprint(self.raw(), int(tokens, "tokens")?, query.c(), &mut c) })?;
        Ok(Footprint::from_c(&c))
    }
    /// The longest context that fits `budget` bytes at every length up to it; None: not even an empty one.
    pub fn longest_context(&self, budget: usize, query: &FootprintQuery) -> Result<Option<usize>> {
        let mut query = query.to_c()?;
        let tokens: i32 = ask(|out| unsafe { sys::kvq_cache_longest_context(self.raw(), budget, query.c(), out) })?;
        Ok(usize::try_from(tokens).ok())
    }

    /// A sequence from what [`Sequence::save`] wrote. model: the text that was saved; None: any. convert: pages may change to the formats
    /// and the layout of this cache
    pub fn restore(&self, from: &mut dyn Read, model: Option<&str>, convert: bool) -> Result<Sequence> {
        let model = Text::optional(model)?;
        let options = init!(kvq_save_options {
            model: model.as_ptr(),
            convert: convert as i32
        });
        with_reader(from, |read, user| {
            Sequence::make(|out| unsafe { sys::kvq_sequence_restore(self.raw(), &options, read, user, out) })
        })
    }
    /// The same from a file.
    pub fn restore_file(&self, path: &std::path::Path, model: Option<&str>, convert: bool) -> Result<Sequence> {
        let (model, path) = (Text::optional(model)?, path_text(path)?);
        let options = init!(kvq_save_options {
            model: model.as_ptr(),
            convert: convert as i32
        });
        Sequence::make(|out| unsafe { sys::kvq_sequence_restore_file(self.raw(), &options, path.as_ptr(), out) })
    }
}

/// One sequence of [`Cache::reserve`].
pub struct StepRequest<'a> {
    sequence: &'a mut Sequence,
    tokens: usize,
    q_tokens: usize,
    mods: Option<&'a Mods>,
}
impl<'a> StepRequest<'a> {
    /// tokens: new ones in every layer; q_tokens: queries in every layer, 0: no attention
    pub fn new(sequence: &'a mut Sequence, tokens: usize, q_tokens: usize) -> Self {
        StepRequest {
            sequence,
            tokens,
            q_tokens,
            mods: None,
        }
    }
    /// Instead of those of the call.
    pub fn mods(self, mods: &'a Mods) -> Self {
        StepRequest {
            mods: Some(mods),
            ..self
        }
    }
}

/// One sequence of [`Cache::attend`].
pub struct AttendRequest<'a> {
    sequence: &'a Sequence,
    q: sys::kvq_tensor,
    out: sys::kvq_tensor,
    lse: Option<&'a mut [f32]>,
    mods: Option<&'a Mods>,
}
impl<'a> AttendRequest<'a> {
    /// Tensors as of [`Sequence::attend`].
    pub fn new<Q: Value, O: Value>(sequence: &'a Sequence, q: Tensor<'a, Q>, out: TensorMut<'a, O>) -> Self {
        AttendRequest {
            sequence,
            q: q.c,
            out: out.c,
            lse: None,
            mods: None,
        }
    }
    pub fn lse(self, lse: &'a mut [f32]) -> Self {
        AttendRequest { lse: Some(lse), ..self }
    }
    /// Instead of those of the call.
    pub fn mods(self, mods: &'a Mods) -> Self {
        AttendRequest {
            mods: Some(mods),
            ..self
        }
    }
}

/// One sequence of [`Cache::select`].
pub struct SelectRequest<'a> {
    sequence: &'a Sequence,
    q: sys::kvq_tensor,
    weights: &'a [f32],
}
impl<'a> SelectRequest<'a> {
    /// As the arguments of [`Sequence::select`].
    pub fn new<Q: Value>(sequence: &'a Sequence, q: Tensor<'a, Q>, weights: &'a [f32]) -> Self {
        SelectRequest {
            sequence,
            q: q.c,
            weights,
        }
    }
}

/// One sequence of [`Cache::prefill`].
pub struct PrefillRequest<'a> {
    sequence: &'a mut Sequence,
    k: sys::kvq_tensor,
    v: sys::kvq_tensor,
    q: sys::kvq_tensor,
    out: sys::kvq_tensor,
    lse: Option<&'a mut [f32]>,
    mods: Option<&'a Mods>,
}
impl<'a> PrefillRequest<'a> {
    /// Tensors as of [`Sequence::prefill`].
    pub fn new<T: Value, Q: Value, O: Value>(
        sequence: &'a mut Sequence,
        k: Tensor<'a, T>,
        v: Tensor<'a, T>,
        q: Tensor<'a, Q>,
        out: TensorMut<'a, O>,
    ) -> Self {
        PrefillRequest {
            sequence,
            k: k.c,
            v: v.c,
            q: q.c,
            out: out.c,
            lse: None,
            mods: None,
        }
    }
    pub fn lse(self, lse: &'a mut [f32]) -> Self {
        PrefillRequest { lse: Some(lse), ..self }
    }
    /// Instead of those of the call.
    pub fn mods(self, mods: &'a Mods) -> Self {
        PrefillRequest {
            mods: Some(mods),
            ..self
        }
    }
}
