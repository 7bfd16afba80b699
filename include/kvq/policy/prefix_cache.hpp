// A store of sequences by their token ids, so that a request reuses the pages of earlier requests instead of computing them again.
//
//   kvq::prefix_cache store(cache, {.byte_limit = std::size_t{8} << 30, .format = kvq::layer_format{.key = 1, .value = 1}});
//   auto [match, tokens, sequence] = store.fetch(prompt);   // a sequence that holds the first `tokens` of the prompt
//   ...                                                     // append the rest, decode
//   store.store(all_tokens, sequence);
//
// Results of a request:           exact            an entry with the same tokens
//                                 supersequence    a longer entry that begins with these tokens, trimmed
//                                 prefix           an entry that is a prefix of these tokens
//                                 lcp              the entry with the longest common prefix, trimmed
//                                 miss...          no entry, or less than min_prefix_tokens from one of the last two
// in this order; lcp comes before prefix if it reuses more tokens.
//
// Entries are forks: they share pages with the sequences that were stored and with those that were fetched, and
// a write to one sequence never changes another. A sequence that was fetched, continued and stored again costs only its new
// pages. The same holds for tokens that were computed again with the same result: pages that equal those of the nearest entry
// are shared with it. Bytes are those of pages (headers included); a page counts once for any number of entries, as in
// page_pool. Token ids and tables (about 4 bytes per token, and 60 per page) are not included.
//
// Cost, n tokens, p pages of a sequence: lookup O(n + log) (radix_tree.hpp); fetch the same plus a fork, O(p), and one
// page per layer and tensor where a trim cuts a quantized page; store O(n + p) plus the quantizing of pages and one comparison
// with those of the nearest entry; an eviction O(p).
// Thread safety: all members may be called from any thread. Forking, trimming, quantizing and freeing happen outside the
// lock. Only step_down blocks other calls, because it changes entries in place.
#pragma once

#include <array>
#include <cstddef>
#include <cstring>
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

namespace kvq { inline namespace KVQ_TAGGED {

struct prefix_cache_options {
    std::size_t byte_limit = (std::numeric_limits<std::size_t>::max)();  ///< for the pages that entries hold
    int max_entries = 1000;
    int min_prefix_tokens = 128;              ///< a shorter prefix or common prefix is a miss
    int min_quantize_tokens = 256;            ///< shorter entries keep their format
    std::optional<layer_format> format = {};  ///< entries are requantized to it, where that is smaller
    /// Called for every entry that the limits or release() evict, the least recently used one first, when the store has dropped it and its
    /// lock is free: the place to save it elsewhere. What it throws, store(), release() and step_down() throw, with the store as it is
    /// then, once it was called for all entries; of several errors the first.
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
    std::size_t replaced = 0;   ///< entries dropped because a new one begins with them
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

    /// The cache must outlive the store. Raises kvq::error when an option is out of range.
    explicit prefix_cache(cache& of, const prefix_cache_options& options = {})
        : cache_(&of), options_(options) {
        detail::expect(options.max_entries >= 1, "max_entries must be at least 1, got ", options.max_entries);
        detail::expect(options.min_prefix_tokens >= 0, "min_prefix_tokens must not be negative, got ",
                       options.min_prefix_tokens);
        detail::expect(options.min_quantize_tokens >= 0, "min_quantize_tokens must not be negative, got ",
                       options.min_quantize_tokens);
        if (options.format) {
            // The request is checked on an empty sequence.
            const sequence nothing = of.new_sequence();
            (void)of.plan_requantize(nothing, request());
        }
    }
    prefix_cache(const prefix_cache&) = delete;
    prefix_cache& operator=(const prefix_cache&) = delete;

    /// The result that fetch would have. Changes no counter and no order of use. Allocates nothing.
    [[nodiscard]] lookup_result lookup(token_ids tokens) const {
        const std::lock_guard lock(mutex_);
        return find(tokens).result;
    }

    /// A sequence that holds as many of the first `tokens` as the store has; the caller owns it. After an exact hit nothing is left
    /// to compute; to get the logits of the last token, trim by one. Tokens that remain after a trim keep their codes, but for those of a page of which it leaves less than a quarter.
    fetch_result fetch(token_ids tokens) {
        std::shared_ptr<const sequence> held;
        lookup_result result;
        {
            const std::lock_guard lock(mutex_);
            const found f = find(tokens);
            result = f.result;
            if (f.node) {
                touch(f.node->value);
                held = f.node->value->sequence;
            }
        }
        kvq::sequence sequence = held ? fork(*held) : cache_->new_sequence();
        if (sequence.tokens() > result.tokens) sequence.trim(result.tokens);
        const std::lock_guard lock(mutex_);
        ++statistics_.fetches[static_cast<std::size_t>(result.match)];
        statistics_.tokens_saved += static_cast<std::size_t>(result.tokens);
        return {result.match, result.tokens, std::move(sequence)};
    }

    /// Stores the first tokens.size() tokens of a sequence. The sequence does not change.
    /// Raises kvq::error when it holds fewer tokens in any layer, when some of them are a draft (append_draft) or when it belongs to another
    /// cache, kvq::out_of_memory when quantizing needs a page for which the pool has no room (release() frees pages). The store is then
    /// unchanged.
    store_outcome store(token_ids tokens, const kvq::sequence& sequence) {
        detail::expect(&detail::sequence_access::cache(sequence) == cache_,
                       "a sequence belongs to another cache");
        detail::expect(!tokens.empty(), "an entry needs at least 1 token");
        for (int layer = 0; layer < cache_->shape().layers; ++layer)
            detail::expect(tokens.size() <= static_cast<std::size_t>(sequence.tokens(layer)), "an entry of ",
                           tokens.size(), " tokens cannot be made: layer ", layer, " holds ",
                           sequence.tokens(layer));
        std::shared_ptr<const kvq::sequence> nearest;
        int common = 0;
        {
            const std::lock_guard lock(mutex_);
            if (is_duplicate(tokens)) return store_outcome::duplicate;
            const auto m = tree_.find(tokens);
            common = static_cast<int>(m.tokens);
            if (common > 0) nearest = (m.extension ? m.extension : m.prefix)->value->sequence;
        }
        const auto kept = std::make_shared<kvq::sequence>(sequence.fork());
        kept->trim(static_cast<int>(tokens.size()));
        (void)detail::sequence_access::tables(*kept);  // raises the error of a draft, which share() must not
        if (options_.format && static_cast<int>(tokens.size()) >= options_.min_quantize_tokens)
            quantize(*kept);
        if (nearest) {
            const std::shared_lock reading(changing_);
            share(*kept, *nearest, common);
        }
        auto pages = detail::page_counts::of(*kept);
        const std::size_t bytes = detail::page_counts::bytes_of(pages);

        std::list<entry> fresh(1), dropped;  // freed outside the lock
        if (options_.evicted) fresh.front().tokens.assign(tokens.begin(), tokens.end());
        {
            const std::lock_guard lock(mutex_);
            if (is_duplicate(tokens)) return store_outcome::duplicate;
            if (bytes > options_.byte_limit) {
                ++statistics_.rejections;
                return store_outcome::too_large;
            }
            held_.reserve(pages.size());
            auto* const node = tree_.insert(tokens).first;
            // No step after this line can fail.
            fresh.front().sequence = kept;
            fresh.front().node = node;
            node->value = fresh.begin();
            entries_.splice(entries_.begin(), fresh);
            held_.add(*kept, pages);
            ++statistics_.stored;
            while (auto* const shorter = node->shorter()) {
                ++statistics_.replaced;
                drop(shorter->value, dropped);
            }
            while (held_.bytes() > options_.byte_limit ||
                   tree_.size() > static_cast<std::size_t>(options_.max_entries))
                evict(dropped);
        }
        report(dropped);
        return store_outcome::stored;
    }

    /// Removes one entry; false if there is none with exactly these tokens.
    bool erase(token_ids tokens) {
        std::list<entry> dropped;
        const std::lock_guard lock(mutex_);
        const auto m = tree_.find(tokens);
        if (!m.exact) return false;
        drop(m.exact->value, dropped);
        return true;
    }
    void clear() {
        std::list<entry> dropped;
        const std::lock_guard lock(mutex_);
        while (!entries_.empty()) drop(entries_.begin(), dropped);
    }
    /// Evicts the least recently used entries until the store holds `bytes` less, or is empty. Returns by how much its bytes
    /// fell. Pages that live sequences share are freed only when these sequences go.
    std::size_t release(std::size_t bytes) {
        std::list<entry> dropped;
        std::size_t freed = 0;
        {
            const std::lock_guard lock(mutex_);
            const std::size_t before = held_.bytes();
            while (!entries_.empty() && before - held_.bytes() < bytes) evict(dropped);
            freed = before - held_.bytes();
        }
        report(dropped);
        return freed;
    }

    /// kvq::step_down for all entries and the live sequences together: pages that they share stay shared, and under a
    /// budget only pages without other holders change. Other members wait during the call; the caller must own the live sequences, as
    /// for any other call that changes them. Raises the errors of kvq::step_down; the steps until then stay done. O(all their pages).
    step_down_report step_down(std::span<sequence* const> live, const step_down_policy& policy,
                               executor_view executor = serial_executor{}) {
        step_down_report report;
        std::list<entry> dropped;
        const std::exception_ptr failed = detail::caught([&] {
            const std::lock_guard lock(mutex_);
            const std::lock_guard alone(changing_);
            std::vector<sequence*> all(live.begin(), live.end());
            for (const entry& e : entries_) all.push_back(e.sequence.get());
            recounting pages{*this, dropped};
            report = kvq::step_down(*cache_, std::span<sequence* const>(all), policy, executor);
            pages.needed = !report.steps.empty();
        });
        this->report(dropped, failed);
        dropped.clear();
        report.bytes_after = cache_->pool().bytes_in_use();
        report.fits = report.bytes_after <= policy.byte_budget;
        return report;
    }

    [[nodiscard]] std::size_t entries() const {
        const std::lock_guard lock(mutex_);
        return tree_.size();
    }
    /// Bytes of the pages that entries hold, each counted once.
    [[nodiscard]] std::size_t bytes() const {
        const std::lock_guard lock(mutex_);
        return held_.bytes();
    }
    [[nodiscard]] prefix_cache_statistics statistics() const {
        const std::lock_guard lock(mutex_);
        return statistics_;
    }
    void reset_statistics() {
        const std::lock_guard lock(mutex_);
        statistics_ = {};
    }
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

    found find(token_ids tokens) const noexcept {
        const auto m = tree_.find(tokens);
        const int common = static_cast<int>(m.tokens);
        if (m.exact) return {{prefix_match::exact, common}, m.exact};
        if (common == 0) return {};
        if (m.tokens == tokens.size()) return {{prefix_match::supersequence, common}, m.extension};
        const bool whole = m.prefix && m.prefix->tokens().size() == m.tokens;
        if (common < options_.min_prefix_tokens)
            return {{whole ? prefix_match::miss_short_prefix : prefix_match::miss_short_lcp, 0}, nullptr};
        if (whole) return {{prefix_match::prefix, common}, m.prefix};
        return {{prefix_match::lcp, common}, m.extension};
    }

    bool is_duplicate(token_ids tokens) {
        const auto m = tree_.find(tokens);
        if (!m.exact) return false;
        touch(m.exact->value);
        ++statistics_.duplicates;
        return true;
    }
    void touch(position e) noexcept { entries_.splice(entries_.begin(), entries_, e); }

    requantize_request request() const noexcept {
        return {.key = options_.format->key, .value = options_.format->value, .only_smaller = true};
    }
    void quantize(sequence& s) {
        cache_->requantize(s, request());
        s.drop_copies();  // they make short trims exact during decode, which an entry does not need
    }

    /// Shares equal pages of `from`: those of the first `common` tokens, in the same format, with the same
    /// bytes.
    void share(sequence& s, const sequence& from, int common) const noexcept {
        const auto take = [](page_ref& mine, const page_ref& theirs) {
            if (mine.get() != theirs.get() && mine->format == theirs->format &&
                mine->bytes == theirs->bytes && std::memcmp(mine->data(), theirs->data(), mine->bytes) == 0)
                mine = theirs;
        };
        auto& tables = detail::sequence_access::tables(s);
        for (std::size_t layer = 0; layer < tables.size(); ++layer) {
            detail::page_table& mine = tables[layer];
            const detail::page_table& theirs = detail::sequence_access::tables(from)[layer];
            for (int i = 0; i < detail::smaller(mine.size(), theirs.size()); ++i) {
                if (mine[i].end() > common || mine[i].first_token != theirs[i].first_token ||
                    mine[i].tokens != theirs[i].tokens || !mine[i].full())
                    break;
                for (int role = 0; role < 2; ++role) take(mine[i].pages[role], theirs[i].pages[role]);
            }
        }
    }

    sequence fork(const sequence& s) const {
        const std::shared_lock reading(changing_);
        return s.fork();
    }

    /// An entry whose count cannot get memory is evicted.
    void recount(std::list<entry>& dropped) noexcept {
        held_.clear();
        for (position e = entries_.begin(); e != entries_.end();) {
            const position at = e++;
            if (count(*at->sequence)) continue;
            ++statistics_.evictions;
            at->evicted = true;
            tree_.erase(at->node);
            dropped.splice(dropped.end(), entries_, at);
        }
        while (held_.bytes() > options_.byte_limit) evict(dropped);
    }
    bool count(const sequence& s) noexcept {
        return detail::has_memory([&] {
            auto pages = detail::page_counts::of(s);
            held_.reserve(pages.size());
            held_.add(s, pages);
        });
    }

    void drop(position e, std::list<entry>& dropped) noexcept {
        held_.remove(*e->sequence);
        tree_.erase(e->node);
        dropped.splice(dropped.end(), entries_, e);
    }
    void evict(std::list<entry>& dropped) noexcept {
        ++statistics_.evictions;
        entries_.back().evicted = true;
        drop(std::prev(entries_.end()), dropped);
    }
    /// Outside of the lock. An entry that the hook fails for does not keep the others from it. Then raises the first error.
    void report(const std::list<entry>& dropped, std::exception_ptr first = nullptr) const {
        for (const entry& e : dropped) {
            if (!e.evicted || !options_.evicted) continue;
            std::exception_ptr failed = detail::caught([&] { options_.evicted(e.tokens, *e.sequence); });
            if (!first) first = std::move(failed);
        }
        if (first) std::rethrow_exception(first);
    }

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
