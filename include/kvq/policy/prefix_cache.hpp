// A store of sequences by their token ids, so that a request reuses the pages of earlier requests instead of
// computing them again.
//
//   kvq::prefix_cache store(cache, {.byte_limit = std::size_t{8} << 30,
//                                   .format = kvq::layer_format{.key = 1, .value = 1}});
//   auto [match, tokens, sequence] = store.fetch(prompt);   // a sequence that holds the first `tokens` of
//                                                           // the prompt
//   ...                                                     // append the rest, decode
//   store.store(all_tokens, sequence);
//
// Results of a request:           exact            an entry with the same tokens
//                                 supersequence    a longer entry that begins with these tokens, trimmed
//                                 prefix           an entry that is a prefix of these tokens
//                                 lcp              the entry with the longest common prefix, trimmed
//                                 miss...          no entry, or less than min_prefix_tokens from one of the
//                                                  last two
// in this order, but the entry that reuses most tokens is the result. An entry gives the tokens to which it
// can be trimmed (sequence::can_trim, sequence::reach): none where a layer with a window has freed what the
// next token would see, with state those of a snapshot. So an entry with fewer tokens in common may give
// more.
//
// Entries are forks: a write to one sequence never changes another. Pages that equal those of the nearest
// entry are shared with it, also where tokens were computed again. Bytes are those of pages (headers
// included), each counted once; token ids and tables (about 4 bytes per token, and 60 per page) are not
// included.
//
// Cost, n tokens, p pages of a sequence: lookup O(n + log) (radix_tree.hpp), with windows or states also
// O(layers) for each entry; fetch the same plus a fork, O(p), and one page per layer and tensor where a trim
// cuts a quantized page; store O(n + p) plus the quantizing of pages and one comparison with those of the
// nearest entry; an eviction O(p).
// Thread safety: all members may be called from any thread. Only step_down, which changes entries in place,
// keeps the lock while it works.
#pragma once

#include <array>
#include <cstddef>
#include <exception>
#include <functional>
#include <limits>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>

#include "../cache/cache.hpp"
#include "../cache/sequence_access.hpp"
#include "../cache/step_down.hpp"
#include "page_counts.hpp"
#include "radix_tree.hpp"

namespace kvq { inline namespace KVQ_COMMON {

struct prefix_cache_options {
    std::size_t byte_limit = (std::numeric_limits<std::size_t>::max)();  ///< for the pages that entries hold
    int max_entries = 1000;
    int min_prefix_tokens = 128;              ///< a shorter prefix or common prefix is a miss
    int min_quantize_tokens = 256;            ///< shorter entries keep their format
    std::optional<layer_format> format = {};  ///< entries are requantized to it, where that is smaller
    /// Called for every entry that the limits or release() evict, the least recently used one first, when the
    /// store has dropped it and its lock is free: the place to save it elsewhere. What it throws, store(),
    /// release() and step_down() throw, with the store as it is then, once it was called for all entries; of
    /// several errors the first.
    std::function<void(token_ids, const sequence&)> evicted = {};
};

/// The relation between a request and the entry that was found.
enum class prefix_match : unsigned char {
    exact,
    supersequence,
    prefix,
    lcp,
    miss,
    miss_short_prefix,
    miss_short_lcp
};
inline constexpr int prefix_match_kinds = 7;

/// Of an entry and a request that have `common` tokens in common.
constexpr prefix_match match_of(token_ids entry, token_ids request, std::size_t common) noexcept {
    if (common == request.size())
        return common == entry.size() ? prefix_match::exact : prefix_match::supersequence;
    return common == entry.size() ? prefix_match::prefix : prefix_match::lcp;
}

constexpr const char* name(prefix_match m) noexcept {
    constexpr const char* names[prefix_match_kinds] = {"exact", "supersequence",     "prefix",        "lcp",
                                                       "miss",  "miss_short_prefix", "miss_short_lcp"};
    return names[static_cast<int>(m)];
}
constexpr bool is_hit(prefix_match m) noexcept { return m < prefix_match::miss; }

/// Result of store().
enum class store_outcome : unsigned char {
    stored,
    duplicate,  ///< an entry with these tokens exists; it is now the most recently used one
    too_large   ///< alone more than the byte limit
};

struct prefix_cache_statistics {
    std::array<std::size_t, prefix_match_kinds> fetches{};  ///< by prefix_match
    std::size_t tokens_saved = 0;                           ///< tokens returned by hits
    std::size_t stored = 0;
    std::size_t duplicates = 0;
    std::size_t rejections = 0;
    std::size_t replaced =
        0;  ///< entries dropped because a new one begins with them, in a cache without windows and states
    std::size_t evictions = 0;  ///< entries dropped because of the limits, or by release()

    std::size_t operator[](prefix_match m) const noexcept { return fetches[static_cast<std::size_t>(m)]; }
    std::size_t hits() const noexcept { return sum(0, static_cast<int>(prefix_match::miss)); }
    std::size_t misses() const noexcept {
        return sum(static_cast<int>(prefix_match::miss), prefix_match_kinds);
    }

private:
    std::size_t sum(int from, int to) const noexcept {
        std::size_t n = 0;
        for (int i = from; i < to; ++i) n += fetches[static_cast<std::size_t>(i)];
        return n;
    }
};

class prefix_cache {
public:
    struct lookup_result {
        prefix_match match = prefix_match::miss;
        int tokens = 0;  ///< leading tokens of the request that need not be computed
    };
    struct fetch_result {
        prefix_match match;
        int tokens;
        kvq::sequence sequence;  ///< holds exactly `tokens` tokens; empty on a miss
    };

    using options_type = prefix_cache_options;

    /// The cache must outlive the store. Raises kvq::error when an option is out of range.
    explicit prefix_cache(cache& of, const prefix_cache_options& options = {});
    prefix_cache(const prefix_cache&) = delete;
    prefix_cache& operator=(const prefix_cache&) = delete;
    ~prefix_cache();

    /// The result that fetch would have. Changes no counter and no order of use. Allocates nothing.
    [[nodiscard]] lookup_result lookup(token_ids tokens) const;

    /// A sequence that holds as many of the first `tokens` as the store has; the caller owns it. After an
    /// exact hit nothing is left to compute; to get the logits of the last token, trim by one. Tokens that
    /// remain after a trim keep their codes, but for those of a page of which it leaves less than a quarter.
    fetch_result fetch(token_ids tokens);

    /// Stores the first tokens.size() tokens of a sequence. The sequence does not change.
    /// Raises kvq::error when it holds fewer tokens in any layer, when some of them are a draft
    /// (append_draft) or when it belongs to another cache, kvq::out_of_memory when quantizing needs a page
    /// for which the pool has no room (release() frees pages). The store is then unchanged.
    store_outcome store(token_ids tokens, const kvq::sequence& sequence);

    /// Makes the entry with exactly these tokens the most recently used one; false if there is none.
    bool refresh(token_ids tokens);
    /// Removes one entry; false if there is none with exactly these tokens.
    bool erase(token_ids tokens);
    void clear();
    /// Evicts the least recently used entries until the store holds `bytes` less, or is empty. Returns by how
    /// much its bytes fell. Pages that live sequences share are freed only when these sequences go.
    std::size_t release(std::size_t bytes);

    /// kvq::step_down for all entries and the live sequences together: pages that they share stay shared, and
    /// under a budget only pages without other holders change. Other members wait during the call; the caller
    /// must own the live sequences, as for any other call that changes them. Raises the errors of
    /// kvq::step_down; the steps until then stay done. O(all their pages).
    step_down_report step_down(std::span<sequence* const> live, const step_down_policy& policy,
                               executor_view executor = serial_executor{});

    [[nodiscard]] std::size_t entries() const;
    /// Bytes of the pages that entries hold, each counted once.
    [[nodiscard]] std::size_t bytes() const;
    [[nodiscard]] prefix_cache_statistics statistics() const;
    const prefix_cache_options& options() const noexcept { return options_; }

private:
    struct entry;
    using position = typename std::list<entry>::iterator;
    using tree = radix_tree<position>;
    struct entry {
        std::shared_ptr<kvq::sequence> sequence;
        typename tree::node* node = nullptr;
        std::vector<token_id> tokens = {};  // for options().evicted
        bool evicted = false;
    };
    /// Counts entries with changed pages again, also when stepping down fails half way.
    struct recounting {
        prefix_cache& store;
        std::list<entry>& dropped;
        bool needed = true;
        ~recounting() {
            if (needed) store.recount(dropped);
        }
    };
    struct found {
        lookup_result result;
        const typename tree::node* node = nullptr;
    };

    found find(token_ids tokens) const noexcept;

    bool is_duplicate(token_ids tokens);
    void touch(position e) noexcept;

    requantize_request request() const noexcept;
    void quantize(sequence& s);

    /// Shares equal pages of `from`: those of the first `common` tokens, in the same format, with the same
    /// bytes.
    void share(sequence& s, const sequence& from, int common) const noexcept;

    sequence fork(const sequence& s) const;

    /// An entry whose count cannot get memory is evicted.
    void recount(std::list<entry>& dropped) noexcept;
    bool count(const sequence& s) noexcept;

    void drop(position e, std::list<entry>& dropped) noexcept;
    void evict(std::list<entry>& dropped) noexcept;
    /// Outside of the lock. An entry that the hook fails for does not keep the others from it. Then raises
    /// the first error.
    void report(const std::list<entry>& dropped, std::exception_ptr first = nullptr) const;

    cache* cache_;
    prefix_cache_options options_;
    mutable std::mutex mutex_;
    mutable std::shared_mutex
        changing_;  // shared: reads an entry outside of mutex_; exclusive: changes entries, in mutex_
    std::list<entry> entries_;  // most recently used first
    tree tree_;
    detail::page_counts held_;
    prefix_cache_statistics statistics_;
};

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "prefix_cache-inl.hpp"
#endif
