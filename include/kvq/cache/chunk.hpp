// New tokens of one layer on their way into a sequence: reserve memory, write 16-bit pages, commit pages.
//
//   chunk c(cache, table, layer, n, chunk_pages::..., stock);
//   c.stage();          takes all memory, from the stock if a step was reserved; the layer holds n tokens
//                       more, not written yet
//   c.write(k, v, ...); writes the 16-bit values of the tokens; or, on any threads, c.write_head() for every
//     head of K and V
//                       prefill attends here: no token of the chunk is quantized yet
//   c.quantize(i, ...)  for every i below c.jobs(), in any order, on any thread: quantizes pages that lie
//                       behind the recent window
//   c.commit();         puts the quantized pages into their places, and frees what has left the layer's
//                       window; cannot fail
//
// Contract: without a commit(), the destructor restores the previous state of the layer and of the stock. One
// layer, one writer.
#pragma once

#include "../page/page_table.hpp"
#include "cache.hpp"
#include "key_plan.hpp"
#include "page_stock.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

/// When the pages of a chunk are quantized.
enum class chunk_pages : unsigned char {
    at_once,       ///< append: long inputs are quantized while they are read, and need one more 16-bit page
    after_attend,  ///< prefill: the whole chunk is 16 bit until commit()
    shared,        ///< prefill of a layer that others share: until that of a chunk of no tokens
};

/// How an append of n tokens quantizes its pages: a chunk that gives the keys a plan is read first.
chunk_pages pages_of_append(const cache& of, int layer, const page_table& table, int n) noexcept;

page_ref new_page(cache& of, int layer, int role, int format, int tokens, page_stock* stock = nullptr);
page_ref new_window_page(cache& of, int layer, int role, int tokens, page_stock* stock = nullptr);

/// A copy of the first tokens of a 16-bit page, with memory for so many.
page_ref shorter_page(cache& of, int layer, const page& from, int role, int tokens,
                      page_stock* stock = nullptr);

class chunk {
public:
    /// stock: of the sequence; or null.
    chunk(cache& of, page_table& table, int layer, int tokens, chunk_pages when, page_stock* stock) noexcept;
    chunk(const chunk&) = delete;
    chunk& operator=(const chunk&) = delete;
    chunk(chunk&& other) noexcept;
    ~chunk();

    /// Raises kvq::out_of_memory or std::bad_alloc, before anything is written.
    void stage();

    /// k: [n][kv_heads][head_dim], v: [n][kv_heads][value_dim]. scratch: as for quantize().
    void write(const input_view& k, const input_view& v, float* scratch);
    /// For chunk_pages::after_attend; then move_keys().
    void write_head(tensor tensor_of, const input_view& source, int head);

    /// New keys that go to a page whose keys moved take the rotation of that page. scratch: as for
    /// quantize().
    void move_keys(float* scratch);

private:
    void write(tensor tensor_of, const input_view& source, float* scratch);

public:
    /// Before quantize(): plans of the keys of the pages (cache/key_plan.hpp).
    void plan_keys();

    /// Number of jobs of quantize(): one for every head of a page.
    int jobs() const noexcept { return jobs_; }
    /// scratch: page_tokens * max(head_dim, value_dim) floats.
    void quantize(int job, float* scratch);

    void commit() noexcept;

    /// Bytes that stage() takes from the pool, and how many of them commit() gives back. A chunk that waits
    /// is committed before: what that takes counts as well, so that it is an upper bound then.
    struct needs {
        std::size_t taken = 0, returned = 0;  // a shared chunk returns it later
    };
    static needs needs_of(const cache& of, int layer, const page_table& table, int tokens, chunk_pages when);
    /// Adds the pages that a reserved step of n tokens takes for this layer to a stock. Returns the number of
    /// spans that are committed.
    static std::size_t count_reserved(const cache& of, int layer, const page_table& table, int n,
                                      page_stock& stock);
    /// Calls take(bytes) for every page that stage() takes, and give_back(bytes) for those of them
    /// that commit() gives back. Returns the number of spans that are committed.
    template <class Take, class GiveBack>
    static std::size_t for_each_need(const cache& of, int layer, const page_table& table, int tokens,
                                     chunk_pages when, Take&& take, GiveBack&& give_back) {
        const page_geometry g = of.geometry(layer);
        const int after = table.tokens + tokens;
        const int tensors = static_cast<int>(of.tensors(layer).size());
        const auto bytes_of = [&](int role, int format, int n) {
            const auto tensor_of = static_cast<tensor>(role);
            return plane_bytes{of.page_bytes(tensor_of, layer, format, n),
                               of.lower_bytes(tensor_of, layer, format, n)};
        };
        std::size_t commits = 0;
        bool temporary[2] = {};
        // held: the pages of a span that was closed; null for spans of another kind.
        const auto add_span = [&](int first, int room, bool sinks, bool is_new, const page_span* held) {
            const page_span whole{first, room, room, {}, {}, 0, sinks};
            const bool due = !table.held && page_table::is_due(whole, after, g);
            const bool kept = page_table::keeps_copies(whole, after, g, of.options().rollback);
            const bool leaves = page_table::leaves(whole, after, g, of.options().rollback);
            commits += due;
            for (int role = 0; role < tensors; ++role) {
                if (leaves) {
                    if (!is_new || when == chunk_pages::at_once) continue;
                    const plane_bytes bytes = bytes_of(role, 0, g.window_tokens(room, room));
                    take(bytes);
                    give_back(bytes);
                    continue;
                }
                const int target = due && !sinks ? table.targets[role] : 0;
                if (target != 0) take(bytes_of(role, target, room));
                if (due && held && held->pages[role]->tokens != room) {
                    const plane_bytes shorter = bytes_of(role, 0, room);
                    take(shorter);
                    if (target != 0 && !kept) give_back(shorter);
                }
                if (!is_new) continue;
                const bool passes = target != 0 && !kept;
                if (passes && when == chunk_pages::at_once && std::exchange(temporary[role], true)) continue;
                const plane_bytes bytes =
                    bytes_of(role, 0, g.window_tokens(smaller(room, after - first), room));
                take(bytes);
                if (passes) give_back(bytes);
            }
        };
        int at = table.tokens;
        for (int i = table.committed; i < table.size(); ++i) {
            const page_span& s = table[i];
            const bool last = i == table.size() - 1;
            if (last && table.has_open_span()) {
                const int shown = s.tokens + smaller(tokens, s.room - s.tokens);
                for (int role = 0; role < tensors; ++role)
                    if (needs_copy(s, role, shown, g))
                        take(bytes_of(role, 0, g.window_tokens(shown, s.room)));
                at = s.first_token + shown;
            }
            add_span(s.first_token, s.room, s.sinks, false, s.room < g.capacity(s.sinks) ? &s : nullptr);
        }
        for (bool sinks = table.begins_with_sinks(g); at < after; sinks = false) {
            add_span(at, g.capacity(sinks), sinks, true, nullptr);
            at += smaller(g.capacity(sinks), after - at);
        }
        return commits;
    }

private:
    /// A span without pages is that of an estimate (estimate/budget.hpp), with the memory that a page of its
    /// tokens gets.
    static bool needs_copy(const page_span& s, int role, int tokens, const page_geometry& g) noexcept;
    /// Moves a page to its place. The page that was there goes back to the stock.
    void put(page_ref& place, page_ref& p) noexcept;
    /// The stock gets back what stage() took from it: a step that was reserved still takes no memory after
    /// one that failed.
    void return_staged() noexcept;
    /// The stock gets its lists back.
    void end_lists() noexcept;
    page_ref window_page(int role, int tokens) {
        return new_window_page(*cache_, layer_, role, tokens, stock_);
    }
    const cache_shape& shape() const noexcept { return cache_->shape(layer_); }
    page_ref& quantized(int i, std::size_t role);

    /// Makes room for more tokens in the last span: in its own pages, in larger pages, or in copies of shared
    /// pages.
    void stage_open_span();
    /// Pages for a new span.
    void stage_span(page_span& s);
    void stage_commit(int i);
    page_geometry geometry() const noexcept { return cache_->geometry(layer_); }
    std::span<const tensor> tensors() const noexcept { return cache_->tensors(layer_); }
    /// Is the span freed by commit()?
    bool leaves(const page_span& s) const noexcept {
        return page_table::leaves(s, after_, geometry(), cache_->options().rollback);
    }

    cache* cache_;
    page_table* table_;
    page_stock* stock_;
    int layer_, before_, after_;
    chunk_pages when_;
    format plan_;  // of the table from now on, if it has none yet
    int spans_before_, first_written_ = 0;
    page_span last_before_;  // the open span before stage(), if it takes tokens
    page_ref temporary_[2];  // a 16-bit page for tokens that are quantized while they are read
    resource_vector<page_ref>
        shorter_;  // [span to commit][K, V]; 16-bit pages to quantize, where the span's own is longer
    resource_vector<page_ref> quantized_;  // [span to commit][K, V]; null where the page stays 16 bit
    int jobs_ = 0;
};

}}}  // namespace kvq::detail

#if !defined(KVQ_COMPILED)
#include "chunk-inl.hpp"
#endif
