// Prefixes and sequences that wait, by their token ids, over three tiers: device memory, pinned host memory,
// files. What has no room in a tier goes to the next one, the least recently used first, and comes back when
// it is asked for.
//
//   cuda::prefixes<kvq::prefix_tiers> store(gpu, {.bytes = {.device = 4ull << 30, .host = 64ull << 30},
//                                                 .folder = "/var/tmp"});
//   cuda::found_prefix found;
//   s = store.fetch(prompt, found, stream);      found.id holds the first found.tokens of the prompt: free it
//   s = store.store(all_tokens, id, stream);     the sequence stays the caller's
//   s = store.park(all_tokens, id, stream);      it is the store's, until fetch(all_tokens) gives it back
//
// Entries on the device are forks: quantized pages are shared with the sequences that were stored and
// fetched, those in 16 bit are copied. A parked sequence is an entry without a copy. Below them is a
// kvq::prefix_cache over host_pages, or kvq::prefix_tiers with files as well (policy/prefix_tiers.hpp, which
// needs nlohmann-json). Pages come back byte for byte. Results are those of kvq::prefix_cache: of the entries
// that can be trimmed to a part of the request the one that gives most, and of tiers that give as much the
// first.
// Bytes of a tier count each page once. The host's are allocated at once, if they are given, and hold all
// that is on its way, too. What no tier has room for, and files that are gone, cut or damaged, are misses: a
// prefix is computed again.
// Contract: not for several threads at once. The cache outlives the store; it was calibrated before. A status
// that is not success has changed nothing but which tier has an entry. Cost: O(n) for n tokens, and O(pages
// of all entries on the device) for each entry that is stored.
#pragma once

#include <list>
#include <map>

#include "../../policy/prefix_cache.hpp"
#include "host_pages.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

/// The budget of a store: bytes of pages in each tier.
struct tier_bytes {
    std::size_t device = ~std::size_t{0};
    std::size_t host = page_pool::no_budget;
    std::size_t files = ~std::size_t{0};
};

struct prefix_options {
    tier_bytes bytes = {};
    int min_prefix_tokens = 128;    ///< a shorter prefix is a miss, unless it is the request
    int min_quantize_tokens = 256;  ///< shorter entries keep their format
    std::string format = {};  ///< entries are requantized to it, where that is smaller; empty: they stay
    std::string folder = {};  ///< of files, as prefix_tier_options::folder; empty: there are none
    std::string model = {};   ///< as in save_options
};

enum class prefix_place : unsigned char { none, device, host, file };

struct found_prefix {
    prefix_match match = prefix_match::miss;
    int tokens = 0;
    sequence_id id{};  ///< holds exactly these tokens; none on a miss
    prefix_place place = prefix_place::none;
};

struct prefix_report {
    std::size_t entries = 0, bytes = 0;  ///< on the device, now
    std::size_t host_bytes = 0;          ///< of pages, now
    std::size_t fetches[4] = {};         ///< by prefix_place
    std::size_t tokens_saved = 0;
    std::size_t stored = 0;             ///< on the device, those that came back included
    std::size_t lowered = 0, lost = 0;  ///< entries that left the device: for a tier below, or for none
};

/// Below: kvq::prefix_cache or kvq::prefix_tiers.
template <class Below = kvq::prefix_cache>
class prefixes {
public:
    /// Raises kvq::error where Below does, and for a folder that Below has no use for.
    explicit prefixes(cache& gpu, const prefix_options& options = {})
        : gpu_(gpu),
          options_(options),
          pages_(gpu, options.bytes.host),
          below_(pages_.cache(), options_below(options)) {}
    prefixes(const prefixes&) = delete;
    prefixes& operator=(const prefixes&) = delete;
    ~prefixes() {
        for (const entry& e : entries_) (void)gpu_.free(e.id);
    }

    /// What fetch would find, if files can be read. Changes no order of use.
    found_prefix lookup(token_ids tokens) const {
        const nearest here = nearest_of(tokens);
        const auto there = below_.lookup(tokens);
        if (there.tokens <= here.tokens) return {here.match, here.tokens, {}, place_of(here)};
        return {there.match, there.tokens, {}, place_of(there)};
    }

    /// A sequence with as many of the first tokens as the store has: the caller frees it. None on a miss.
    status fetch(token_ids tokens, found_prefix& found, cudaStream_t stream) {
        found = {};
        nearest here = nearest_of(tokens);
        while (found.id == sequence_id{}) {
            if (below_.lookup(tokens).tokens > here.tokens) {
                if (status s = fetch_below(tokens, here.tokens, found, stream); !s) return s;
                if (found.id != sequence_id{}) break;
                here = nearest_of(tokens);  // entries may have gone down
            }
            if (here.tokens == 0) break;
            entries_.splice(entries_.begin(), entries_, here.at);
            fresh_sequence copy{gpu_, {}};
            if (status s = gpu_.fork(here.at->id, copy.id, stream); !s) {
                // Without memory for a copy others go down, at last the entry itself, which then comes back.
                if (s.code != cudaErrorMemoryAllocation) return s;
                if (status t = lower_to(bytes() / 2, stream); !t) return t;
                here = nearest_of(tokens);
                continue;
            }
            if (status s = gpu_.trim(copy.id, here.tokens); !s) return s;
            found = {here.match, here.tokens, copy.take(), prefix_place::device};
        }
        if (found.place == prefix_place::none) found.match = here.match;
        ++report_.fetches[static_cast<int>(found.place)];
        report_.tokens_saved += static_cast<std::size_t>(found.tokens);
        return {};
    }

    /// Keeps the first tokens.size() tokens of a sequence. Without device memory for a copy others go down;
    /// at last the tiers below get one.
    status store(token_ids tokens, sequence_id id, cudaStream_t stream) {
        if (status s = check(tokens, id, false); !s || is_here(tokens)) return s;
        for (;;) {
            const status s = copy_entry(tokens, id, stream);
            if (s.code != cudaErrorMemoryAllocation || is_here(tokens)) return s;
            if (entries_.empty()) return lower(tokens, id, stream);
            if (status t = lower_to(bytes() / 2, stream); !t) return t;
        }
    }

    /// store() of a whole sequence that is not needed for now, without a copy: then the store has it, and id
    /// is none.
    status park(token_ids tokens, sequence_id& id, cudaStream_t stream) {
        if (status s = check(tokens, id, true); !s) return s;
        if (is_here(tokens)) {
            (void)gpu_.free(std::exchange(id, {}));
            return {};
        }
        if (status s = quantize(id, stream); !s) return s;
        insert(tokens, id);
        return lower_to(options_.bytes.device, stream);
    }

    /// Moves the least recently used entries down until those on the device hold `bytes` less, or none are
    /// left: where a begin found no memory. Pages that others share stay.
    status release(std::size_t bytes, cudaStream_t stream) {
        const std::size_t held = this->bytes();
        return lower_to(bytes < held ? held - bytes : 0, stream);
    }

    /// cache::step_down() of all entries on the device and these sequences together: pages that they share
    /// stay shared.
    status step_down(std::span<const sequence_id> live, std::span<const tier> tiers, cudaStream_t stream,
                     std::size_t byte_budget = cache::no_budget) {
        std::vector<sequence_id> all(live.begin(), live.end());
        for (const entry& e : entries_) all.push_back(e.id);
        return gpu_.step_down(all, tiers, stream, byte_budget);
    }

    prefix_report report() const {
        prefix_report r = report_;
        r.entries = entries_.size();
        r.bytes = bytes();
        r.host_bytes = pages_.cache().bytes_in_use();
        return r;
    }
    const prefix_options& options() const noexcept { return options_; }
    std::size_t entries() const noexcept { return entries_.size(); }
    /// Of the pages that entries on the device hold, each counted once.
    std::size_t bytes() const { return pages_of_entries().bytes; }
    /// The tiers below: what another program needs of the host is released there.
    Below& below() noexcept { return below_; }
    const Below& below() const noexcept { return below_; }

private:
    struct entry;
    using position = typename std::list<entry>::iterator;
    using tree = radix_tree<position>;
    struct entry {
        sequence_id id;
        typename tree::node* node = nullptr;
    };
    /// One that a call makes. It is freed again unless the call takes it.
    struct fresh_sequence {
        cache& of;
        sequence_id id;

        ~fresh_sequence() {
            if (id != sequence_id{}) (void)of.free(id);
        }
        sequence_id take() noexcept { return std::exchange(id, {}); }
    };
    struct nearest {
        prefix_match match = prefix_match::miss;
        int tokens = 0;
        position at = {};
    };
    /// How many entries hold each page.
    struct held_pages {
        std::map<const page*, int> holders;
        std::size_t bytes = 0;
    };

    static typename Below::options_type options_below(const prefix_options& o) {
        const prefix_cache_options memory{.byte_limit = o.bytes.host,
                                          .min_prefix_tokens = o.min_prefix_tokens};
        if constexpr (std::is_same_v<Below, kvq::prefix_cache>) {
            common::expect(o.folder.empty(), "files in ", o.folder, " take kvq::prefix_tiers");
            return memory;
        } else {
            return {.memory = memory, .folder = o.folder, .file_bytes = o.bytes.files, .model = o.model};
        }
    }
    static prefix_place place_of(const nearest& here) noexcept {
        return here.tokens > 0 ? prefix_place::device : prefix_place::none;
    }
    template <class Result>
    static prefix_place place_of(const Result& there) noexcept {
        if constexpr (requires { there.tier; })
            if (there.tier == decltype(there.tier)::file) return prefix_place::file;
        return prefix_place::host;
    }

    /// Of the entries on the device the one that gives most.
    nearest nearest_of(token_ids tokens) const {
        nearest best;
        tree_.visit_closest(tokens, [&](const typename tree::node* n, std::size_t common) {
            const auto same = static_cast<int>(common);
            if (same <= best.tokens) return false;
            if (const int reached = reach(*n, same); reached > best.tokens)
                best = {match_of(n->tokens(), tokens, common), reached, n->value};
            return same > best.tokens;
        });
        const bool whole = best.match == prefix_match::prefix;
        if ((whole || best.match == prefix_match::lcp) && best.tokens < options_.min_prefix_tokens)
            return {whole ? prefix_match::miss_short_prefix : prefix_match::miss_short_lcp};
        return best;
    }
    /// Tokens of an entry after a trim to those that it has in common with a request.
    int reach(const typename tree::node& n, int wanted) const {
        const sequence_id id = n.value->id;
        if (static_cast<std::size_t>(wanted) == n.tokens().size()) return wanted;
        const int reached = gpu_.reach(id, wanted);
        return reached >= gpu_.trim_limit(id) || reached < wanted ? reached : 0;
    }
    /// From a tier below, if that has more than so many tokens after all, and an entry on the device again.
    status fetch_below(token_ids tokens, int more_than, found_prefix& found, cudaStream_t stream) {
        fresh_sequence made{gpu_, {}};
        found_prefix from;
        status s;
        const bool enough = common::has_memory([&] {
            const auto held = below_.fetch(tokens);
            from = {held.match, held.tokens, {}, place_of(held)};
            if (held.tokens > more_than) s = bring(held.sequence, made.id, stream);
        });  // behind it its pages on the host are free for entries that go down
        if (!s || !enough || made.id == sequence_id{}) return s;
        // Without memory for an entry the tier below keeps it.
        const token_ids held = tokens.first(static_cast<std::size_t>(from.tokens));
        if (!is_here(held)) s = copy_entry(held, made.id, stream);
        if (!s && s.code != cudaErrorMemoryAllocation) return s;
        from.id = made.take();
        found = from;
        return {};
    }
    /// On the device, if need be in the place of entries.
    status bring(const kvq::sequence& from, sequence_id& id, cudaStream_t stream) {
        for (;;) {
            const status s = onload(from, gpu_, id, stream);
            if (s || s.code != cudaErrorMemoryAllocation || entries_.empty()) return s;
            if (status t = lower_to(bytes() / 2, stream); !t) return t;
        }
    }

    status check(token_ids tokens, sequence_id id, bool whole) const {
        const auto count = static_cast<int>(tokens.size());
        const int held = gpu_.tokens(id);
        if (count < 1 || held < count || (whole && held != count))
            return detail::bad_value("%d tokens of a sequence that holds %d", count, held);
        return detail::cache_access::check_settled(gpu_, id);
    }
    /// Is there an entry with these tokens? Then it is used.
    bool is_here(token_ids tokens) noexcept {
        const auto* const n = tree_.find(tokens).exact;
        if (n != nullptr) entries_.splice(entries_.begin(), entries_, n->value);
        return n != nullptr;
    }
    status quantize(sequence_id id, cudaStream_t stream) {
        if (options_.format.empty() || gpu_.tokens(id) < options_.min_quantize_tokens) return {};
        return gpu_.requantize(std::span(&id, 1), {.format = options_.format, .only_smaller = true}, stream);
    }
    status copy_entry(token_ids tokens, sequence_id id, cudaStream_t stream) {
        fresh_sequence copy{gpu_, {}};
        if (status s = gpu_.fork(id, copy.id, stream); !s) return s;
        const auto count = static_cast<int>(tokens.size());
        if (status s = gpu_.trim(copy.id, count); !s) return s;
        if (const int held = gpu_.tokens(copy.id); held != count)
            return detail::bad_value("%d tokens, but the state is that of %d", count, held);
        if (status s = quantize(copy.id, stream); !s) return s;
        insert(tokens, copy.id);
        return lower_to(options_.bytes.device, stream);
    }
    /// An entry, which takes the sequence.
    void insert(token_ids tokens, sequence_id& id) {
        std::list<entry> fresh(1);
        auto* const node = tree_.insert(tokens).first;
        // No step after this line can fail.
        const sequence_id taken = std::exchange(id, {});
        fresh.front() = {taken, node};
        node->value = fresh.begin();
        entries_.splice(entries_.begin(), fresh);
        ++report_.stored;
        // What the new entry can be trimmed to.
        if (auto* const shorter = node->shorter();
            shorter != nullptr && gpu_.trim_limit(taken) == 0 && gpu_.reach(taken, 1) == 1)
            drop(shorter->value);
    }

    held_pages pages_of_entries() const {
        held_pages all;
        for (const entry& e : entries_)
            detail::cache_access::for_each_page(gpu_, e.id, [&](const page& p) {
                if (++all.holders[&p] == 1) all.bytes += p.bytes;
            });
        return all;
    }
    /// The least recently used entries go down until those on the device hold so many bytes.
    status lower_to(std::size_t bytes, cudaStream_t stream) {
        held_pages held = pages_of_entries();
        while (!entries_.empty() && held.bytes > bytes) {
            const position last = std::prev(entries_.end());
            // Going down quantizes what waits for a plan: other pages.
            detail::cache_access::for_each_page(gpu_, last->id, [&](const page& p) {
                if (--held.holders[&p] == 0) held.bytes -= p.bytes;
            });
            if (status s = lower(last->node->tokens(), last->id, stream); !s) return s;
            drop(last);
        }
        return {};
    }
    /// A copy in the tiers below, unless none has room.
    status lower(token_ids tokens, sequence_id id, cudaStream_t stream) {
        if (below_.refresh(tokens)) return ++report_.lowered, status{};
        const std::size_t wanted = gpu_.usage(id).bytes;
        for (;;) {
            status s;
            store_outcome outcome{};
            const bool enough = common::has_memory([&] {
                kvq::sequence held = pages_.cache().new_sequence();
                s = offload(gpu_, id, held, stream);
                if (s) outcome = below_.store(tokens, held);
            });
            if (!s) return s;
            if (enough) {
                ++(outcome == store_outcome::too_large ? report_.lost : report_.lowered);
                return {};
            }
            // In the place of what the host has not used for longer. What is more than its budget has none.
            std::size_t released = 0;
            if (wanted < options_.bytes.host)
                (void)common::has_memory([&] { released = below_.release(wanted); });
            if (released > 0) continue;
            ++report_.lost;
            return {};
        }
    }
    void drop(position at) noexcept {
        (void)gpu_.free(at->id);
        tree_.erase(at->node);
        entries_.erase(at);
    }

    cache& gpu_;
    prefix_options options_;
    mutable host_pages pages_;
    Below below_;
    std::list<entry> entries_;  // the most recently used one first
    tree tree_;
    prefix_report report_;
};

}}}  // namespace kvq::cuda
