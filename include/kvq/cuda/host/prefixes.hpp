// A prefix cache in device memory, in front of one in host memory and of files: what a tier evicts goes to
// the next one and comes back when it is asked for.
//
//   cuda::host_pages pages(gpu, std::size_t{64} << 30);
//   kvq::prefix_cache below(pages.cache(), {.byte_limit = std::size_t{64} << 30});        or prefix_tiers
//   cuda::prefixes store(gpu, pages, below, {.device_bytes = std::size_t{8} << 30});
//   cuda::found_prefix found;
//   s = store.fetch(prompt, found, stream);      found.id holds the first found.tokens of the prompt: free it
//   s = store.store(all_tokens, id, stream);     the sequence stays the caller's
//
// Entries are forks: quantized pages are shared with the sequences that were stored and fetched, those in
// 16 bit are copied. device_bytes counts each page once. Results are those of kvq::prefix_cache: of the
// entries that can be trimmed to a part of the request the one that gives most.
// Contract: not for several threads at once. The cache, the pages and the store below outlive it. A status
// that is not success has changed nothing but which tier has an entry. Host memory that runs out raises
// kvq::out_of_memory. Cost: O(n) for n tokens, and O(pages of all entries) for each entry that is stored.
#pragma once

#include <list>

#include "../../policy/prefix_cache.hpp"
#include "host_pages.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

struct prefix_options {
    std::size_t device_bytes = ~std::size_t{0};  ///< of the pages that entries hold
    int min_prefix_tokens = 128;                 ///< a shorter prefix is a miss, unless it is the request
};

enum class prefix_place : unsigned char { none, device, host };

struct found_prefix {
    prefix_match match = prefix_match::miss;
    int tokens = 0;
    sequence_id id{};  ///< holds exactly these tokens; none on a miss
    prefix_place place = prefix_place::none;
};

/// Below: kvq::prefix_cache or kvq::prefix_tiers, over `pages`.
template <class Below>
class prefixes {
public:
    prefixes(cache& gpu, host_pages& pages, Below& below, const prefix_options& options = {})
        : gpu_(gpu), pages_(pages), below_(below), options_(options) {}
    prefixes(const prefixes&) = delete;
    prefixes& operator=(const prefixes&) = delete;
    ~prefixes() {
        for (const entry& e : entries_) (void)gpu_.free(e.id);
    }

    status fetch(token_ids tokens, found_prefix& found, cudaStream_t stream) {
        found = {};
        std::size_t most = 0;
        position best = entries_.end();
        tree_.visit_closest(tokens, [&](const typename tree::node* n, std::size_t common) {
            if (common <= most) return false;
            if (const std::size_t reached = reach(*n, common); reached > most)
                most = reached, best = n->value;
            return common > most;
        });
        const auto least = static_cast<std::size_t>(common::larger(1, options_.min_prefix_tokens));
        if (most < common::smaller(least, tokens.size())) most = 0;
        if (most < tokens.size() && below_has_more(tokens, most)) {
            auto held = below_.fetch(tokens);
            if (static_cast<std::size_t>(held.tokens) > most) {
                if (status s = bring(held.sequence, found.id, stream); !s) return s;
                found = {held.match, held.tokens, found.id, prefix_place::host};
                const status s = store(tokens.first(static_cast<std::size_t>(held.tokens)), found.id, stream);
                // Without room for an entry the tier below keeps it.
                if (s || s.code == cudaErrorMemoryAllocation) return {};
                (void)gpu_.free(found.id);
                found = {};
                return s;
            }
        }
        if (most == 0) return {};
        sequence_id copy;
        if (status s = gpu_.fork(best->id, copy, stream); !s) return s;
        if (status s = gpu_.trim(copy, static_cast<int>(most)); !s) {
            (void)gpu_.free(copy);
            return s;
        }
        const token_ids held = best->node->tokens();
        found = {match_of(held, tokens, most), static_cast<int>(most), copy, prefix_place::device};
        entries_.splice(entries_.begin(), entries_, best);
        return {};
    }

    status store(token_ids tokens, sequence_id id, cudaStream_t stream) {
        const auto count = static_cast<int>(tokens.size());
        if (count < 1 || gpu_.tokens(id) < count)
            return detail::bad_value("%d tokens of a sequence that holds %d", count, gpu_.tokens(id));
        if (const auto* const n = tree_.find(tokens).exact) {
            entries_.splice(entries_.begin(), entries_, n->value);
            return {};
        }
        sequence_id copy;
        if (status s = gpu_.fork(id, copy, stream); !s) return s;
        if (status s = gpu_.trim(copy, count); !s || gpu_.tokens(copy) != count) {
            const int held = gpu_.tokens(copy);
            (void)gpu_.free(copy);
            return !s ? s : detail::bad_value("%d tokens, but the state is that of %d", count, held);
        }
        entries_.push_front({copy, nullptr});
        entries_.front().node = tree_.insert(tokens).first;
        entries_.front().node->value = entries_.begin();
        // What the new entry can be trimmed to.
        if (auto* const shorter = entries_.front().node->shorter();
            shorter != nullptr && gpu_.trim_limit(copy) == 0 && gpu_.reach(copy, 1) == 1)
            drop(shorter->value);
        return evict(options_.device_bytes, stream);
    }

    /// Moves the least recently used entries down until those on the device hold `bytes` at most.
    status evict(std::size_t bytes, cudaStream_t stream) {
        while (!entries_.empty() && this->bytes() > bytes) {
            const position last = std::prev(entries_.end());
            kvq::sequence held = pages_.cache().new_sequence();
            if (status s = offload(gpu_, last->id, held, stream); !s) return s;
            (void)below_.store(last->node->tokens(), held);
            drop(last);
        }
        return {};
    }

    std::size_t entries() const noexcept { return entries_.size(); }
    /// Of the pages that entries hold, each counted once.
    std::size_t bytes() const {
        std::vector<sequence_id> ids;
        for (const entry& e : entries_) ids.push_back(e.id);
        return detail::cache_access::bytes_of(gpu_, ids);
    }

private:
    struct entry;
    using position = typename std::list<entry>::iterator;
    using tree = radix_tree<position>;
    struct entry {
        sequence_id id;
        typename tree::node* node;
    };

    /// Tokens of an entry after a trim to those that it has in common with a request.
    std::size_t reach(const typename tree::node& n, std::size_t common) const {
        const sequence_id id = n.value->id;
        if (common == n.tokens().size()) return common;
        const auto wanted = static_cast<int>(common);
        const int reached = gpu_.reach(id, wanted);
        return reached >= gpu_.trim_limit(id) || reached < wanted ? static_cast<std::size_t>(reached) : 0;
    }
    bool below_has_more(token_ids tokens, std::size_t most) const {
        if constexpr (requires { below_.lookup(tokens); })
            return static_cast<std::size_t>(below_.lookup(tokens).tokens) > most;
        else
            return most == 0;  // looking takes reading a file
    }
    /// On the device, if need be in the place of entries.
    status bring(const kvq::sequence& from, sequence_id& id, cudaStream_t stream) {
        for (;;) {
            status s = onload(from, gpu_, id, stream);
            if (s || s.code != cudaErrorMemoryAllocation || entries_.empty()) return s;
            if (status t = evict(bytes() / 2, stream); !t) return t;
        }
    }
    void drop(position at) {
        (void)gpu_.free(at->id);
        tree_.erase(at->node);
        entries_.erase(at);
    }

    cache& gpu_;
    host_pages& pages_;
    Below& below_;
    prefix_options options_;
    std::list<entry> entries_;  // the most recently used one first
    tree tree_;
};

}}}  // namespace kvq::cuda
