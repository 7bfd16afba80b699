//! What an attention call takes beside its tensors: masks, score modifiers, threads, scratch.
use std::ptr;

use kvq_sys as sys;

use crate::{
    error::{ask, check, handle, init, int, Error, Result},
    reports::{SelectionReport, SkippingReport},
};

handle!(
    /// Threads of kvq. Results have the same bits on any number.
    Threads,
    kvq_executor,
    kvq_executor_free
);
impl Threads {
    /// threads: at least 1
    pub fn new(threads: usize) -> Result<Self> {
        let n = int(threads, "threads")?;
        Self::make(|out| unsafe { sys::kvq_executor_create_threads(n, out) })
    }
}

handle!(
    /// Scratch of attention that calls share. It only grows.
    Workspace,
    kvq_workspace,
    kvq_workspace_free
);
impl Workspace {
    /// bytes: [`crate::Cache::workspace_bytes`], or 0
    pub fn new(bytes: usize) -> Result<Self> {
        Self::make(|out| unsafe { sys::kvq_workspace_create(ptr::null(), bytes, out) })
    }
    /// Makes it at least this large.
    pub fn reserve(&mut self, bytes: usize) -> Result<()> {
        check(unsafe { sys::kvq_workspace_reserve(self.raw(), bytes) })
    }
    /// Its size.
    pub fn bytes(&self) -> Result<usize> {
        ask(|out| unsafe { sys::kvq_workspace_bytes(self.raw(), out) })
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direction {
    /// A query attends to itself and the tokens before it.
    #[default]
    Causal,
    /// To all tokens of the sequence.
    Bidirectional,
    /// To all tokens; queries are no tokens of the sequence, and any number of them is allowed.
    Cross,
}

/// What queries attend to, and changes of scores. Masks are joined with AND. Empty lists and None: not there.
#[derive(Clone, Debug, Default)]
pub struct Mods {
    pub direction: Direction,
    /// Only itself and the window - 1 tokens before it.
    pub window: Option<usize>,
    /// With a window: also so many first tokens.
    pub window_sinks: usize,
    /// Prefix-LM: all queries see the first `prefix` tokens.
    pub prefix: usize,
    /// Ascending from 0, as cu_seqlens: a query sees its document.
    pub document_starts: Vec<i32>,
    /// Of a tree of drafted tokens: parents[i] < i, or -1 for the accepted text; at most 64.
    pub tree_parents: Vec<i32>,
    /// Tokens of the layer before the draft.
    pub tree_first: usize,
    /// Of scores; None: 1 / sqrt(head_dim).
    pub scale: Option<f32>,
    /// c tanh(score / c)
    pub softcap: Option<f32>,
    /// One per query head: score - slope * distance.
    pub alibi_slopes: Vec<f32>,
    /// One per query head: one more score in the softmax sum.
    pub sink_logits: Vec<f32>,
    /// Queries see tokens of these ranges, which ascend within a query.
    pub token_ranges: Vec<TokenRange>,
    /// Empty: all queries see all ranges; else query i sees [range_starts[i], range_starts[i + 1]).
    pub range_starts: Vec<i32>,
    /// With range_starts: position of query 0 in the sequence; 0 for Direction::Cross.
    pub range_first_query: usize,
    /// Only the best pages of each kv head are read, about so many tokens; None: all.
    pub selected_tokens: Option<usize>,
    /// With list_queries: queries attend to the tokens of their lists alone, as far as masks show them; to nothing if both lists are
    /// empty. Positions [list_queries][list_kv_heads][n] in any order; -1: none; a token that is listed twice counts twice.
    pub listed_tokens: Vec<i32>,
    /// A second list for each of the same queries, such as the last tokens.
    pub listed_window: Vec<i32>,
    /// Query tokens of the call.
    pub list_queries: usize,
    /// 0 or 1: a query has one list for all heads; else the kv heads of the layer.
    pub list_kv_heads: usize,
    /// Values of pages with at most this share of the weights are not read; 0: all are read.
    pub skipped_mass: f32,
    /// Of pages with two planes (format nested8) the upper one alone is read.
    pub upper_only: bool,
}

/// Tokens [begin, end) of a sequence.
pub use kvq_sys::kvq_token_range as TokenRange;

impl Mods {
    /// A struct that points into self.
    pub(crate) fn to_c(&self) -> Result<sys::kvq_mods> {
        let not_zero = |x: Option<f32>, what: &str| {
            if x == Some(0.0) {
                return Err(Error::argument(format!("{} is 0; None is the default", what)));
            }
            Ok(x.unwrap_or(0.0))
        };
        if self.window == Some(0) {
            return Err(Error::argument("window is 0, which must be at least 1, or None".into()));
        }
        if self.selected_tokens == Some(0) {
            return Err(Error::argument(
                "selected_tokens is 0, which must be at least 1, or None".into(),
            ));
        }
        let lists = self.list_queries.saturating_mul(self.list_kv_heads.max(1));
        let count = |list: &Vec<i32>, what: &str| {
            if list.is_empty() {
                return Ok(0);
            }
            if lists == 0 || list.len() % lists != 0 {
                return Err(Error::argument(format!(
                    "{} has {} positions, not as many for each of {} lists",
                    what,
                    list.len(),
                    lists
                )));
            }
            int(list.len() / lists, what)
        };
        let pointer = |list: &Vec<i32>| {
            if list.is_empty() {
                ptr::null()
            } else {
                list.as_ptr()
            }
        };
        Ok(init!(kvq_mods {
            listed_tokens: pointer(&self.listed_tokens),
            listed_window: pointer(&self.listed_window),
            listed_count: count(&self.listed_tokens, "listed_tokens")?,
            listed_window_count: count(&self.listed_window, "listed_window")?,
            list_queries: int(self.list_queries, "list_queries")?,
            list_kv_heads: int(self.list_kv_heads, "list_kv_heads")?,
            direction: match self.direction {
                Direction::Causal => sys::KVQ_CAUSAL,
                Direction::Bidirectional => sys::KVQ_BIDIRECTIONAL,
                Direction::Cross => sys::KVQ_CROSS,
            },
            window: int(self.window.unwrap_or(0), "window")?,
            window_sinks: int(self.window_sinks, "window_sinks")?,
            prefix: int(self.prefix, "prefix")?,
            document_starts: self.document_starts.as_ptr(),
            documents: int(self.document_starts.len(), "documents")?,
            tree_parents: self.tree_parents.as_ptr(),
            tree_tokens: int(self.tree_parents.len(), "tree_parents")?,
            tree_first: int(self.tree_first, "tree_first")?,
            scale: not_zero(self.scale, "scale")?,
            softcap: not_zero(self.softcap, "softcap")?,
            alibi_slopes: self.alibi_slopes.as_ptr(),
            alibi_heads: int(self.alibi_slopes.len(), "alibi_slopes")?,
            sink_logits: self.sink_logits.as_ptr(),
            sink_heads: int(self.sink_logits.len(), "sink_logits")?,
            token_ranges: self.token_ranges.as_ptr(),
            range_count: int(self.token_ranges.len(), "token_ranges")?,
            range_starts: self.range_starts.as_ptr(),
            range_start_count: int(self.range_starts.len(), "range_starts")?,
            range_first_query: int(self.range_first_query, "range_first_query")?,
            selected_tokens: int(self.selected_tokens.unwrap_or(0), "selected_tokens")?,
            skipped_mass: self.skipped_mass,
            upper_only: i32::from(self.upper_only),
        }))
    }
}

/// How to attend. `AttendOptions::default()`: causal, on the calling thread.
#[derive(Default)]
pub struct AttendOptions<'a> {
    pub mods: Option<&'a Mods>,
    pub threads: Option<&'a mut Threads>,
    pub workspace: Option<&'a mut Workspace>,
    /// Gets the natural logarithm of each softmax sum, [q.tokens][q_heads]. None in batches.
    pub lse: Option<&'a mut [f32]>,
    /// What selected_tokens of `mods` did is added to it, when the call succeeds.
    pub selection: Option<&'a mut SelectionReport>,
    /// What skipped_mass of `mods` did is added to it, when the call succeeds.
    pub skipping: Option<&'a mut SkippingReport>,
}

/// Structs of one call.
pub(crate) struct Call {
    mods: Option<sys::kvq_mods>,
    options: sys::kvq_attend_options,
}
impl Call {
    pub(crate) fn new(options: &mut AttendOptions, q: Option<&sys::kvq_tensor>) -> Result<Self> {
        let lse = lse_of(&mut options.lse, q)?;
        let mut mods = options.mods.map(Mods::to_c).transpose()?;
        if options.selection.is_some() || options.skipping.is_some() {
            let c = mods.get_or_insert_with(|| init!(kvq_mods {}));
            c.selection = options.selection.as_mut().map_or(ptr::null_mut(), |r| &mut r.c);
            c.skipping = options.skipping.as_mut().map_or(ptr::null_mut(), |r| &mut r.c);
        }
        Ok(Call {
            mods,
            options: init!(kvq_attend_options {
                executor: options.threads.as_ref().map_or(ptr::null_mut(), |t| t.raw()),
                workspace: options.workspace.as_ref().map_or(ptr::null_mut(), |w| w.raw()),
                lse: lse,
            }),
        })
    }
    pub(crate) fn options(&mut self) -> &sys::kvq_attend_options {
        self.options.mods = self.mods.as_ref().map_or(ptr::null(), |m| m);
        &self.options
    }
}

/// The pointer of logarithms of softmax sums for queries; q None: there are none.
pub(crate) fn lse_of(lse: &mut Option<&mut [f32]>, q: Option<&sys::kvq_tensor>) -> Result<*mut f32> {
    match (lse, q) {
        (None, _) => Ok(ptr::null_mut()),
        (Some(_), None) => Err(Error::argument("a batch has one lse per request".into())),
        (Some(lse), Some(q)) => {
            if lse.len() as u64 != q.tokens as u64 * q.heads as u64 {
                return Err(Error::argument(format!(
                    "lse has {} values for {} tokens x {} heads of queries",
                    lse.len(),
                    q.tokens,
                    q.heads
                )));
            }
            Ok(lse.as_mut_ptr())
        }
    }
}
