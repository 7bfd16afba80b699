//! Sequences by their token ids.
use kvq_sys as sys;

use crate::{
    cache::Cache,
    error::{ask, check, count, handle, init, int, limit, Result, Text},
    options::Threads,
    reports::{lowered, StepDownPolicy, StepDownReport},
    sequence::Sequence,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatchKind {
    Exact,
    /// A longer entry, trimmed.
    Supersequence,
    Prefix,
    /// The longest common prefix, trimmed.
    LongestCommonPrefix,
    Miss,
    MissShortPrefix,
    MissShortLongestCommonPrefix,
}
const KINDS: [MatchKind; 7] = [
    MatchKind::Exact,
    MatchKind::Supersequence,
    MatchKind::Prefix,
    MatchKind::LongestCommonPrefix,
    MatchKind::Miss,
    MatchKind::MissShortPrefix,
    MatchKind::MissShortLongestCommonPrefix,
];

/// What a prefix cache has of a list of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Match {
    pub kind: MatchKind,
    /// Leading tokens that need not be computed.
    pub tokens: usize,
}
fn match_of(kind: i32, tokens: i32) -> Match {
    Match {
        kind: KINDS.get(kind as usize).copied().unwrap_or(MatchKind::Miss),
        tokens: tokens as usize,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Stored,
    Duplicate,
    TooLarge,
}

#[derive(Clone, Debug, Default)]
pub struct PrefixCacheOptions {
    /// Bytes of the pages of all entries; None: no limit.
    pub byte_limit: Option<usize>,
    /// None: 1000.
    pub max_entries: Option<usize>,
    /// A shorter common prefix is a miss; None: 128.
    pub min_prefix_tokens: Option<usize>,
    /// Shorter entries keep their formats; None: 256.
    pub min_quantize_tokens: Option<usize>,
    /// Listed formats to which entries are requantized where that is smaller; both None: none.
    pub keys: Option<String>,
    pub values: Option<String>,
}

#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PrefixCacheStatistics {
    /// By the kind of match, in the order of [`MatchKind`].
    pub fetches: [usize; 7],
    pub tokens_saved: usize,
    pub stored: usize,
    pub duplicates: usize,
    pub rejections: usize,
    pub replaced: usize,
    pub evictions: usize,
    /// Now.
    pub entries: usize,
    /// Of the pages of all entries, now.
    pub bytes: usize,
}

handle!(
    /// Sequences by their token ids, least recently used ones evicted. All methods may run together.
    PrefixCache,
    kvq_prefix_cache,
    kvq_prefix_cache_free
);
impl PrefixCache {
    pub fn new(cache: &Cache, options: &PrefixCacheOptions) -> Result<Self> {
        let (keys, values) = (
            Text::optional(options.keys.as_ref())?,
            Text::optional(options.values.as_ref())?,
        );
        let c = init!(kvq_prefix_cache_options {
            byte_limit: limit(options.byte_limit, "byte_limit")?,
            max_entries: int(limit(options.max_entries, "max_entries")?, "max_entries")?,
            min_prefix_tokens: count(options.min_prefix_tokens, "min_prefix_tokens")?,
            min_quantize_tokens: count(options.min_quantize_tokens, "min_quantize_tokens")?,
            keys: keys.as_ptr(),
            values: values.as_ptr(),
        });
        Self::make(|out| unsafe { sys::kvq_prefix_cache_create(cache.raw(), &c, out) })
    }
    /// What fetch would find.
    pub fn lookup(&self, tokens: &[i32]) -> Result<Match> {
        let n = int(tokens.len(), "tokens")?;
        let (mut kind, mut found) = (0, 0);
        check(unsafe { sys::kvq_prefix_cache_lookup(self.raw(), tokens.as_ptr(), n, &mut kind, &mut found) })?;
        Ok(match_of(kind, found))
    }
    /// A sequence that holds as many of the first tokens as the store has; empty on a miss.
    pub fn fetch(&self, tokens: &[i32]) -> Result<(Sequence, Match)> {
        let n = int(tokens.len(), "tokens")?;
        let (mut kind, mut found) = (0, 0);
        let sequence = Sequence::make(|out| unsafe {
            sys::kvq_prefix_cache_fetch(self.raw(), tokens.as_ptr(), n, &mut kind, &mut found, out)
        })?;
        Ok((sequence, match_of(kind, found)))
    }
    /// Stores the first tokens of a sequence, which does not change.
    pub fn store(&self, tokens: &[i32], sequence: &Sequence) -> Result<Outcome> {
        let n = int(tokens.len(), "tokens")?;
        let outcome =
            ask(|out| unsafe { sys::kvq_prefix_cache_store(self.raw(), tokens.as_ptr(), n, sequence.raw(), out) })?;
        Ok(match outcome {
            sys::KVQ_STORED => Outcome::Stored,
            sys::KVQ_STORE_DUPLICATE => Outcome::Duplicate,
            _ => Outcome::TooLarge,
        })
    }
    /// Removes the entry with exactly these tokens. false: there is none.
    pub fn erase(&self, tokens: &[i32]) -> Result<bool> {
        let n = int(tokens.len(), "tokens")?;
        let erased: i32 = ask(|out| unsafe { sys::kvq_prefix_cache_erase(self.raw(), tokens.as_ptr(), n, out) })?;
        Ok(erased != 0)
    }
    /// Removes all entries.
    pub fn clear(&self) -> Result<()> {
        check(unsafe { sys::kvq_prefix_cache_clear(self.raw()) })
    }
    /// Evicts the least recently used entries until the store holds `bytes` less. By how many its bytes fell.
    pub fn release(&self, bytes: usize) -> Result<usize> {
        ask(|out| unsafe { sys::kvq_prefix_cache_release(self.raw(), bytes, out) })
    }
    /// [`Cache::step_down`] for all entries and the given live sequences together.
    pub fn step_down(
        &self,
        live: &mut [&mut Sequence],
        policy: &StepDownPolicy,
        threads: Option<&mut Threads>,
    ) -> Result<StepDownReport> {
        let all: Vec<_> = live.iter().map(|s| s.raw()).collect();
        lowered(&all, policy, threads, |all, n, policy, executor, report| unsafe {
            sys::kvq_prefix_cache_step_down(self.raw(), all, n, policy, executor, report)
        })
    }
    /// What happened so far, and what the store holds now.
    pub fn statistics(&self) -> Result<PrefixCacheStatistics> {
        let mut c = init!(kvq_prefix_cache_statistics {});
        check(unsafe { sys::kvq_prefix_cache_get_statistics(self.raw(), &mut c) })?;
        Ok(PrefixCacheStatistics {
            fetches: c.fetches,
            tokens_saved: c.tokens_saved,
            stored: c.stored,
            duplicates: c.duplicates,
            rejections: c.rejections,
            replaced: c.replaced,
            evictions: c.evictions,
            entries: c.entries,
            bytes: c.bytes,
        })
    }
}
