//! What calls report, and policies. All sizes are bytes of memory unless said otherwise.
use std::ptr;

use kvq_sys as sys;

use crate::{
    error::{check, init, int, limit, Result, Text},
    options::{Threads, Workspace},
};

/// A struct of C with the same members.
macro_rules! report {
    ($(#[$attribute:meta])* $name:ident from $c:ident { $($(#[$doc:meta])* $member:ident,)* }) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct $name { $($(#[$doc])* pub $member: usize,)* }
        impl $name {
            pub(crate) fn from_c(c: &kvq_sys::$c) -> Self {
                $name { $($member: c.$member as usize,)* }
            }
        }
    };
}

report!(
    /// The options in force, and what all sequences of a cache hold together.
    CacheInfo from kvq_cache_info {
        layers,
        /// 0 where layers differ, as the next two.
        kv_heads,
        head_dim, value_dim, page_tokens, sinks, recent, rollback,
        /// usize::MAX: none.
        byte_budget,
        /// Of all pages, each counted once, headers included.
        bytes_in_use,
        pages_in_use,
        /// For pages: byte_budget if it was allocated at once, else bytes_in_use.
        bytes_held,
    }
);
report!(
    /// Bytes of a sequence. A shared page counts in every sequence that holds it.
    Usage from kvq_usage {
        /// Quantized pages.
        quantized,
        /// 16- and 32-bit pages.
        window,
        /// Part of `window` that holds no token yet.
        slack,
        /// 16-bit copies of quantized pages.
        rollback,
        /// Page headers and tables.
        bookkeeping,
        /// Scratch for quantizing.
        workspace,
        /// The sum of all of the above but `slack`, and `reserved` and `state`.
        bytes,
        /// Number of NaN and infinities that were quantized.
        not_finite,
        /// Of the longest layer.
        tokens,
        /// For the next step: [`crate::Cache::reserve`].
        reserved,
        /// Tokens that cuts quantized once more, summed over layers.
        repacked,
        /// Recurrent state and its snapshots.
        state,
    }
);
report!(
    /// Bytes that sequences of a length will take, equal to what will be allocated. The first five are those of [`Usage`].
    Footprint from kvq_footprint {
        quantized, window, rollback, bookkeeping, workspace,
        /// Workspace of one attention call.
        attention,
        /// The sum of the above, and `unused` and `state`.
        total,
        /// Upper bound of what a call adds temporarily.
        transient,
        /// Of a byte budget that was allocated at once: bytes without a page.
        unused,
        /// Recurrent state, with the snapshots of [`crate::CacheOptions::snapshot_every`].
        state,
    }
);
/// A snapshot of the recurrent state of a sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Snapshot {
    /// That the state had taken.
    pub tokens: usize,
    /// Of its pages, headers included.
    pub bytes: usize,
    /// sqrt(sum (x - x^)^2 / sum x^2) over the quantized parts.
    pub error: f64,
}
impl Snapshot {
    pub(crate) fn from_c(c: &sys::kvq_snapshot) -> Self {
        Snapshot {
            tokens: c.tokens as usize,
            bytes: c.bytes,
            error: c.error,
        }
    }
}
report!(
    RequantizeReport from kvq_requantize_report {
        /// That were converted, or would be.
        pages,
        /// Of the request, not yet converted.
        pages_left,
        /// In the pool of the cache, as the next two.
        bytes_before,
        bytes_after, bytes_peak, bytes_freed,
        /// Scratch during the call.
        workspace,
    }
);
/// Tokens that queries [first_query, last_query] of a call read in a kv head.
pub use kvq_sys::kvq_chosen_tokens as ChosenTokens;

/// What [`crate::Mods::selected_tokens`] did, over all calls that were given it.
pub struct SelectionReport {
    pub(crate) c: sys::kvq_selection_report,
    chosen: Vec<ChosenTokens>,
}
// The pointer of `c` is that of `chosen`.
unsafe impl Send for SelectionReport {}
unsafe impl Sync for SelectionReport {}
impl SelectionReport {
    /// most_runs: of the runs of pages that are read, so many are kept.
    pub fn new(most_runs: usize) -> Result<Self> {
        let tokens = sys::kvq_token_range { begin: 0, end: 0 };
        let none = ChosenTokens {
            layer: 0,
            kv_head: 0,
            first_query: 0,
            last_query: 0,
            tokens,
        };
        let mut chosen = vec![none; most_runs];
        let c = init!(kvq_selection_report {
            chosen: chosen.as_mut_ptr(),
            chosen_capacity: int(most_runs, "most_runs")?,
        });
        Ok(SelectionReport { c, chosen })
    }
    /// Pages that masks show, once for every kv head and block of query rows.
    pub fn pages(&self) -> usize {
        self.c.pages as usize
    }
    /// Those that were read.
    pub fn read(&self) -> usize {
        self.c.read as usize
    }
    /// The first runs of read pages, as many as are kept.
    pub fn chosen(&self) -> &[ChosenTokens] {
        &self.chosen[..self.chosen_count().min(self.chosen.len())]
    }
    /// Runs, kept or not.
    pub fn chosen_count(&self) -> usize {
        self.c.chosen_count as usize
    }
}

/// What [`crate::Mods::skipped_mass`] did, over all calls that were given it.
pub struct SkippingReport {
    pub(crate) c: sys::kvq_skipping_report,
}
impl Default for SkippingReport {
    fn default() -> Self {
        SkippingReport {
            c: init!(kvq_skipping_report {}),
        }
    }
}
impl SkippingReport {
    /// Pages of values that were seen, once for every kv head and block of query rows.
    pub fn pages(&self) -> usize {
        self.c.pages as usize
    }
    /// Those that were not read.
    pub fn skipped(&self) -> usize {
        self.c.skipped as usize
    }
    /// Query tokens x query heads.
    pub fn rows(&self) -> usize {
        self.c.rows as usize
    }
    /// Sum over rows of the share of weights that was left out.
    pub fn left_out(&self) -> f64 {
        self.c.left_out
    }
    /// Of one row.
    pub fn most_left_out(&self) -> f32 {
        self.c.most_left_out
    }
}

/// Sizes in the pool of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepDownReport {
    /// That changed.
    pub pages: usize,
    pub bytes_before: usize,
    pub bytes_after: usize,
    pub bytes_peak: usize,
    /// false: the budget is still exceeded.
    pub fits: bool,
}
impl StepDownReport {
    pub(crate) fn from_c(c: &sys::kvq_step_down_report) -> Self {
        StepDownReport {
            pages: c.pages,
            bytes_before: c.bytes_before,
            bytes_after: c.bytes_after,
            bytes_peak: c.bytes_peak,
            fits: c.fits != 0,
        }
    }
}

/// A call of the C interface that steps sequences down: with the sequences, their number, the policy, an executor or
/// null, and the report.
pub(crate) fn lowered(
    sequences: &[*mut sys::kvq_sequence],
    policy: &StepDownPolicy,
    threads: Option<&mut Threads>,
    call: impl FnOnce(
        *const *mut sys::kvq_sequence,
        i32,
        *const sys::kvq_step_down_policy,
        *mut sys::kvq_executor,
        *mut sys::kvq_step_down_report,
    ) -> sys::kvq_status,
) -> Result<StepDownReport> {
    let (n, policy) = (int(sequences.len(), "sequences")?, policy.to_c()?);
    let executor = threads.map_or(ptr::null_mut(), |t| t.raw());
    let mut report = init!(kvq_step_down_report {});
    check(call(sequences.as_ptr(), n, &policy.c, executor, &mut report))?;
    Ok(StepDownReport::from_c(&report))
}

/// Which pages change to which formats.
#[derive(Default)]
pub struct Requantize<'a> {
    /// Listed formats by name; None: unchanged.
    pub keys: Option<&'a str>,
    pub values: Option<&'a str>,
    /// [first, last); None: all.
    pub layers: Option<(usize, usize)>,
    /// Only pages that lie wholly in tokens [first, last); None: all.
    pub tokens: Option<(usize, usize)>,
    /// Skips pages that would not shrink.
    pub only_smaller: bool,
    /// Pages quantized from now on take these formats, too.
    pub new_pages: bool,
    /// In this call; None: all.
    pub most_pages: Option<usize>,
    /// After which no page is begun. The first page is always done.
    pub most_time: Option<std::time::Duration>,
    pub threads: Option<&'a mut Threads>,
    pub workspace: Option<&'a mut Workspace>,
}

/// A struct of C and the texts it points to.
pub(crate) struct RequantizeC {
    pub(crate) c: sys::kvq_requantize_request,
    _texts: [Text; 2],
}
impl Requantize<'_> {
    pub(crate) fn to_c(&self, dry_run: bool) -> Result<RequantizeC> {
        let texts = [Text::optional(self.keys)?, Text::optional(self.values)?];
        let range = |r: Option<(usize, usize)>, what: &str| match r {
            Some((first, last)) if first >= last => Err(crate::Error::argument(format!(
                "{} [{}, {}) are none",
                what, first, last
            ))),
            Some((first, last)) => Ok((int(first, what)?, int(last, what)?)),
            None => Ok((0, 0)),
        };
        let (layers, tokens) = (range(self.layers, "layers")?, range(self.tokens, "tokens")?);
        let c = init!(kvq_requantize_request {
            keys: texts[0].as_ptr(),
            values: texts[1].as_ptr(),
            first_layer: layers.0,
            last_layer: layers.1,
            first_token: tokens.0,
            last_token: tokens.1,
            only_smaller: self.only_smaller as i32,
            new_pages: self.new_pages as i32,
            dry_run: dry_run as i32,
            most_pages: limit(self.most_pages, "most_pages")?,
            most_nanoseconds: self
                .most_time
                .map_or(0, |t| (t.as_nanos().min(i64::MAX as u128) as i64).max(1)),
            executor: self.threads.as_ref().map_or(ptr::null_mut(), |t| t.raw()),
            workspace: self.workspace.as_ref().map_or(ptr::null_mut(), |w| w.raw()),
        });
        Ok(RequantizeC { c, _texts: texts })
    }
}

/// From `age` tokens behind the newest one on, pages have these formats, by name; None: the first one of the cache.
#[derive(Clone, Debug, Default)]
pub struct Tier {
    pub age: usize,
    pub keys: Option<String>,
    pub values: Option<String>,
}

/// How formats narrow with age.
#[derive(Clone, Debug, Default)]
pub struct StepDownPolicy {
    /// Ages ascending, formats from wide to narrow.
    pub tiers: Vec<Tier>,
    /// Layers that no tier touches.
    pub first_layers_kept: usize,
    pub last_layers_kept: usize,
    /// Bytes of the pool, beyond which the oldest pages go down further.
    pub byte_budget: Option<usize>,
}

pub(crate) struct PolicyC {
    pub(crate) c: sys::kvq_step_down_policy,
    _tiers: Vec<sys::kvq_tier>,
    _texts: Vec<Text>,
}
impl StepDownPolicy {
    pub(crate) fn to_c(&self) -> Result<PolicyC> {
        let mut texts = Vec::new();
        let mut tiers = Vec::new();
        for t in &self.tiers {
            let (keys, values) = (Text::optional(t.keys.as_ref())?, Text::optional(t.values.as_ref())?);
            tiers.push(sys::kvq_tier {
                age: int(t.age, "age")?,
                reserved: 0,
                keys: keys.as_ptr(),
                values: values.as_ptr(),
            });
            texts.extend([keys, values]);
        }
        let c = init!(kvq_step_down_policy {
            tiers: tiers.as_ptr(),
            tier_count: int(tiers.len(), "tiers")?,
            first_layers_kept: int(self.first_layers_kept, "first_layers_kept")?,
            last_layers_kept: int(self.last_layers_kept, "last_layers_kept")?,
            byte_budget: limit(self.byte_budget, "byte_budget")?,
        });
        Ok(PolicyC {
            c,
            _tiers: tiers,
            _texts: texts,
        })
    }
}

/// What an estimate is about. `FootprintQuery::default()`: one sequence, without the workspace of attention.
#[derive(Clone, Debug, Default)]
pub struct FootprintQuery {
    /// 0: 1
    pub sequences: usize,
    /// 0: without the workspace of attention.
    pub q_heads: usize,
    /// 0: 1
    pub q_tokens: usize,
    /// 0: 1
    pub threads: usize,
    /// Most tokens of one prefill; 0: append only.
    pub chunk: usize,
    /// Tokens of every layer with cross attention.
    pub cross_tokens: usize,
    pub policy: Option<StepDownPolicy>,
}

/// What an engine asks of a cache.
#[derive(Clone, Debug, Default)]
pub struct BudgetQuery {
    /// Most tokens of a sequence.
    pub tokens: usize,
    /// Of so many tokens each; 0: 1
    pub sequences: usize,
    /// Most new tokens of a sequence in one step; 0: 1
    pub chunk: usize,
    /// Most pages of a sequence and layer that show only a part of their tokens at a time: a trim by more than `rollback` tokens leaves at
    /// most one; erase, shift and splice leave at most three each.
    pub cuts: usize,
    /// Most tokens of every layer with cross attention.
    pub cross_tokens: usize,
}
impl BudgetQuery {
    pub(crate) fn to_c(&self) -> Result<sys::kvq_budget_query> {
        Ok(init!(kvq_budget_query {
            tokens: int(self.tokens, "tokens")?,
            sequences: int(self.sequences, "sequences")?,
            chunk: int(self.chunk, "chunk")?,
            cuts: int(self.cuts, "cuts")?,
            cross_tokens: int(self.cross_tokens, "cross_tokens")?,
        }))
    }
}

pub(crate) struct QueryC {
    c: sys::kvq_footprint_query,
    policy: Option<PolicyC>,
}
impl QueryC {
    pub(crate) fn c(&mut self) -> &sys::kvq_footprint_query {
        self.c.policy = self.policy.as_ref().map_or(ptr::null(), |p| &p.c);
        &self.c
    }
}
impl FootprintQuery {
    pub(crate) fn to_c(&self) -> Result<QueryC> {
        Ok(QueryC {
            policy: self.policy.as_ref().map(StepDownPolicy::to_c).transpose()?,
            c: init!(kvq_footprint_query {
                sequences: int(self.sequences, "sequences")?,
                q_heads: int(self.q_heads, "q_heads")?,
                q_tokens: int(self.q_tokens, "q_tokens")?,
                threads: int(self.threads, "threads")?,
                chunk: int(self.chunk, "chunk")?,
                cross_tokens: int(self.cross_tokens, "cross_tokens")?,
            }),
        })
    }
}
