// New tokens of one layer on their way into a sequence: reserve memory, write 16-bit pages, commit pages.
//
//   chunk c(cache, track, layer, n, chunk_pages::..., stock);
//   c.stage();          takes all memory, from the stock if a step was reserved; the layer holds n tokens more, not written yet
//   c.write(k, v, ...); writes the 16-bit values of the tokens; or, on any threads, c.write_head() for every head of K and V
//                       prefill attends here: no token of the chunk is quantized yet
//   c.quantize(i, ...)  for every i below c.jobs(), in any order, on any thread: quantizes pages that lie behind the recent window
//   c.commit();         puts the quantized pages into their places; cannot fail
//
// Contract: without a commit(), the destructor restores the previous state of the layer and of the stock. One layer, one writer.
#pragma once

#include <cstring>
#include <memory_resource>
#include <vector>

#include "../page/page_table.hpp"
#include "cache.hpp"
#include "convert.hpp"
#include "page_stock.hpp"
#include "window.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

/// When the pages of a chunk are quantized.
enum class chunk_pages : bool {
    at_once,       ///< append: long inputs are quantized while they are read, and need one more 16-bit page
    after_attend,  ///< prefill: the whole chunk is 16 bit until commit()
};

inline page_ref new_page(cache& of, int role, int format, int tokens, page_stock* stock = nullptr) {
    const std::size_t bytes = of.page_bytes(static_cast<tensor>(role), format, tokens);
    if (stock)
        if (page_ref p = stock->take(bytes, format, tokens)) return p;
    return of.pool().allocate(bytes, format, tokens);
}
inline page_ref new_window_page(cache& of, int role, int tokens, page_stock* stock = nullptr) {
    page_ref p = new_page(of, role, 0, tokens, stock);
    std::memset(p->data(), 0, p->bytes);
    return p;
}

/// A copy of the first tokens of a 16-bit page, with memory for so many.
inline page_ref shorter_page(cache& of, const page& from, int role, int tokens, page_stock* stock = nullptr) {
    const auto tensor_of = static_cast<tensor>(role);
    page_ref p = new_window_page(of, role, tokens, stock);
    copy_tokens(of.table(tensor::key).window_type(), from, *p, tensor_of, of.shape().dim(tensor_of),
                of.shape().kv_heads, tokens);
    return p;
}

class chunk {
public:
    /// stock: of the sequence; or null.
    chunk(cache& of, page_table& track, int layer, int tokens, chunk_pages when, page_stock* stock) noexcept
        : cache_(&of),
          track_(&track),
          stock_(stock),
          layer_(layer),
          before_(track.tokens),
          after_(track.tokens + tokens),
          when_(when),
          spans_before_(track.size()),
          shorter_(of.pool().memory()),
          quantized_(of.pool().memory()) {
        if (!stock_) return;
        shorter_.swap(stock_->shorter);
        quantized_.swap(stock_->quantized);
    }
    chunk(const chunk&) = delete;
    chunk& operator=(const chunk&) = delete;
    chunk(chunk&& other) noexcept
        : cache_(other.cache_),
          track_(std::exchange(other.track_, nullptr)),
          stock_(other.stock_),
          layer_(other.layer_),
          before_(other.before_),
          after_(other.after_),
          when_(other.when_),
          spans_before_(other.spans_before_),
          first_written_(other.first_written_),
          last_before_(std::move(other.last_before_)),
          temporary_{std::move(other.temporary_[0]), std::move(other.temporary_[1])},
          shorter_(std::move(other.shorter_)),
          quantized_(std::move(other.quantized_)),
          jobs_(other.jobs_) {}
    ~chunk() {
        if (track_ == nullptr) return;
        return_staged();
        track_->spans.erase(track_->spans.begin() + spans_before_, track_->spans.end());
        if (last_before_.pages[0]) track_->spans.back() = std::move(last_before_);
        track_->tokens = before_;
        end_lists();
    }

    /// Raises kvq::out_of_memory or std::bad_alloc, before anything is written.
    void stage() {
        page_table& track = *track_;
        const page_geometry g = cache_->geometry();
        const std::size_t table =
            table_capacity(static_cast<std::size_t>(track.size_after(after_ - before_, g)));
        if (stock_)
            stock_->grow(track.spans, static_cast<std::size_t>(layer_), table);
        else
            track.spans.reserve(table);
        first_written_ = track.has_open_span() ? spans_before_ - 1 : spans_before_;
        if (track.has_open_span() && after_ > before_) stage_open_span();
        while (track.tokens < after_) stage_span();
        const int due = track.due(after_, g);
        const std::size_t places = 2 * static_cast<std::size_t>(due - track.committed);
        shorter_.reserve(places);
        quantized_.reserve(places);
        for (int i = track.committed; i < due; ++i) stage_commit(i);
    }

    /// k: [n][kv_heads][head_dim], v: [n][kv_heads][value_dim]. scratch: as for quantize().
    void write(const input_view& k, const input_view& v, float* scratch) {
        write(tensor::key, k, scratch);
        write(tensor::value, v, scratch);
        move_keys(scratch);
    }
    /// For chunk_pages::after_attend; then move_keys().
    void write_head(tensor tensor_of, const input_view& source, int head) {
        const auto role = static_cast<std::size_t>(tensor_of);
        for (int i = first_written_; i < track_->size(); ++i) {
            const page_span& s = (*track_)[i];
            const int from = larger(s.first_token, before_);
            write_tokens(cache_->window(), *s.pages[role], tensor_of, source.dim, source, head,
                         from - before_, s.end() - from, from - s.first_token);
        }
    }

    /// New keys that go to a page whose keys moved take the rotation of that page. scratch: as for quantize().
    void move_keys(float* scratch) {
        if (first_written_ >= spans_before_ || after_ == before_) return;
        const page_span& s = (*track_)[first_written_];
        const rotation* const rotate = cache_->rotations().at(layer_);
        if (s.shift == 0 || !rotate) return;
        rotate_tokens(cache_->table(tensor::key).window_type(), *s.pages[0], *rotate, -s.shift,
                      cache_->shape().dim(tensor::key), cache_->shape().kv_heads, before_ - s.first_token,
                      s.end() - before_, scratch);
    }

private:
    void write(tensor tensor_of, const input_view& source, float* scratch) {
        const auto role = static_cast<std::size_t>(tensor_of);
        const int dim = cache_->shape().dim(tensor_of);
        for (int i = first_written_; i < track_->size(); ++i) {
            const page_span& s = (*track_)[i];
            const int from = larger(s.first_token, before_);
            page& to = s.pages[role] ? *s.pages[role] : *temporary_[role];
            if (!s.pages[role]) to.not_finite = 0;  // of the page before
            write_tokens(cache_->window(), to, tensor_of, dim, source, from - before_, s.end() - from,
                         from - s.first_token);
            if (!s.pages[role])
                convert_page(cache_->table(tensor_of), cache_->shape(), layer_, to, *quantized(i, role),
                             scratch);
        }
    }

public:
    /// Number of jobs of quantize(): one for every head of a page.
    int jobs() const noexcept { return jobs_; }
    /// scratch: page_tokens * max(head_dim, value_dim) floats.
    void quantize(int job, float* scratch) {
        const int heads = cache_->shape().kv_heads, head = job % heads;
        int index = job / heads;
        for (std::size_t at = 0; at < quantized_.size(); ++at) {
            const int i = track_->committed + static_cast<int>(at / 2);
            const page_ref& from = shorter_[at] ? shorter_[at] : (*track_)[i].pages[at % 2];
            if (!quantized_[at] || quantized_[at]->format == 0 || !from || index-- > 0) continue;
            page& to = *quantized_[at];
            const std::uint32_t found = convert_block(cache_->table(static_cast<tensor>(at % 2)),
                                                      cache_->shape(), layer_, *from, to, head, scratch);
            add_not_finite(to, found);
            return;
        }
    }

    void commit() noexcept {
        page_table& track = *track_;
        const page_geometry g = cache_->geometry();
        const int rollback = cache_->options().rollback;
        for (std::size_t at = 0; at < quantized_.size(); ++at) {
            if (!quantized_[at]) continue;
            const int i = track.committed + static_cast<int>(at / 2);
            page_ref& page = track[i].pages[at % 2];
            if (shorter_[at]) put(page, shorter_[at]);
            if (quantized_[at]->format == 0) {  // the page of a closed span, which stays 16 bit
                put(page, quantized_[at]);
                continue;
            }
            page_ref left = track.commit_page(i, at % 2, std::move(quantized_[at]), after_, g, rollback);
            if (stock_) stock_->give_back(std::move(left));
        }
        track.committed += static_cast<int>(quantized_.size() / 2);
        track.drop_copies(g, rollback);
        track_ = nullptr;
        end_lists();
        if (!stock_) return;
        for (page_ref& p : temporary_) stock_->give_back(std::move(p));
        stock_->end_step();
    }

    /// Bytes that stage() takes from the pool, and how many of them commit() gives back.
    struct needs {
        std::size_t taken = 0, returned = 0;
    };
    static needs needs_of(const cache& of, const page_table& track, int tokens, chunk_pages when) {
        needs n;
        for_each_need(
            of, track, tokens, when, [&](std::size_t bytes) { n.taken += page_pool::allocation(bytes); },
            [&](std::size_t bytes) { n.returned += page_pool::allocation(bytes); });
        return n;
    }
    /// Adds the pages that a reserved step of n tokens takes for this layer to a stock. Returns the number of spans that are committed.
    static std::size_t count_reserved(const cache& of, const page_table& track, int n, page_stock& stock) {
        return for_each_need(
            of, track, n, chunk_pages::after_attend, [&](std::size_t bytes) { stock.takes(bytes); },
            [&](std::size_t bytes) { stock.gives_back(bytes); });
    }
    /// Calls take(bytes of data) for every page that stage() takes, and give_back(bytes) for those of them that commit() gives back.
    /// Returns the number of spans that are committed.
    template <class Take, class GiveBack>
    static std::size_t for_each_need(const cache& of, const page_table& track, int tokens, chunk_pages when,
                                     Take&& take, GiveBack&& give_back) {
        const page_geometry g = of.geometry();
        const int after = track.tokens + tokens;
        const auto bytes_of = [&](int role, int format, int n) {
            return of.page_bytes(static_cast<tensor>(role), format, n);
        };
        std::size_t commits = 0;
        bool temporary[2] = {};
        // held: the pages of a span that was closed; null for spans of another kind.
        const auto add_span = [&](int first, int room, bool sinks, bool is_new, const page_span* held) {
            const page_span whole{first, room, room, {}, {}, 0, sinks};
            const bool due = page_table::is_due(whole, after, g);
            const bool kept = page_table::keeps_copies(whole, after, g, of.options().rollback);
            commits += due;
            for (int role = 0; role < 2; ++role) {
                const int target = due && !sinks ? track.targets[role] : 0;
                if (target != 0) take(bytes_of(role, target, room));
                if (due && held && held->pages[role]->tokens != room) {
                    const std::size_t shorter = bytes_of(role, 0, room);
                    take(shorter);
                    if (target != 0 && !kept) give_back(shorter);
                }
                if (!is_new) continue;
                const bool passes = target != 0 && !kept;
                if (passes && when == chunk_pages::at_once && std::exchange(temporary[role], true)) continue;
                const std::size_t bytes =
                    bytes_of(role, 0, g.window_tokens(smaller(room, after - first), room));
                take(bytes);
                if (passes) give_back(bytes);
            }
        };
        int at = track.tokens;
        for (int i = track.committed; i < track.size(); ++i) {
            const page_span& s = track[i];
            const bool last = i == track.size() - 1;
            if (last && track.has_open_span()) {
                const int shown = s.tokens + smaller(tokens, s.room - s.tokens);
                for (int role = 0; role < 2; ++role)
                    if (needs_copy(s, role, shown, g))
                        take(bytes_of(role, 0, g.window_tokens(shown, s.room)));
                at = s.first_token + shown;
            }
            add_span(s.first_token, s.room, s.sinks, false, s.room < g.capacity(s.sinks) ? &s : nullptr);
        }
        for (bool sinks = track.begins_with_sinks(g); at < after; sinks = false) {
            add_span(at, g.capacity(sinks), sinks, true, nullptr);
            at += smaller(g.capacity(sinks), after - at);
        }
        return commits;
    }

private:
    /// A span without pages is that of an estimate (estimate/budget.hpp), with the memory that a page of its tokens gets.
    static bool needs_copy(const page_span& s, int role, int tokens, const page_geometry& g) noexcept {
        const page_ref& p = s.pages[static_cast<std::size_t>(role)];
        if (!p) return g.window_tokens(s.tokens, s.room) < tokens;
        return p.shared() || p->tokens < tokens;
    }
    /// Moves a page to its place. The page that was there goes back to the stock.
    void put(page_ref& place, page_ref& p) noexcept {
        std::swap(place, p);
        if (stock_) stock_->give_back(std::move(p));
        p = page_ref{};
    }
    /// The stock gets back what stage() took from it: a step that was reserved still takes no memory after one that failed.
    void return_staged() noexcept {
        if (!stock_) return;
        for (int i = spans_before_; i < track_->size(); ++i)
            for (page_ref& p : track_->spans[static_cast<std::size_t>(i)].pages)
                stock_->give_back(std::move(p));
        if (last_before_.pages[0])
            for (int role = 0; role < 2; ++role) {
                page_ref& p = track_->spans[static_cast<std::size_t>(spans_before_ - 1)].pages[role];
                if (p.get() != last_before_.pages[role].get()) stock_->give_back(std::move(p));
            }
        for (page_ref& p : temporary_) stock_->give_back(std::move(p));
        for (auto* const list : {&shorter_, &quantized_})
            for (page_ref& p : *list) stock_->give_back(std::move(p));
    }
    /// The stock gets its lists back.
    void end_lists() noexcept {
        shorter_.clear();
        quantized_.clear();
        if (!stock_ || !stock_->reserved()) return;
        stock_->shorter.swap(shorter_);
        stock_->quantized.swap(quantized_);
    }
    page_ref window_page(int role, int tokens) { return new_window_page(*cache_, role, tokens, stock_); }
    page_ref& quantized(int i, std::size_t role) {
        return quantized_[2 * static_cast<std::size_t>(i - track_->committed) + role];
    }

    /// Gives the last span more tokens: in its own pages, in larger pages, or in copies of shared pages.
    void stage_open_span() {
        page_span& s = track_->spans.back();
        const int tokens = s.tokens + smaller(after_ - before_, s.room - s.tokens);
        page_ref larger_pages[2];
        for (int role = 0; role < 2; ++role) {
            page& now = *s.pages[role];
            const auto tensor_of = static_cast<tensor>(role);
            const float_type window = cache_->table(tensor::key).window_type();
            const int dim = cache_->shape().dim(tensor_of), heads = cache_->shape().kv_heads;
            if (!needs_copy(s, role, tokens, cache_->geometry())) {
                now.not_finite = held_not_finite(window, now, tensor_of, dim, heads, s.tokens);
                continue;
            }
            larger_pages[role] = window_page(role, cache_->geometry().window_tokens(tokens, s.room));
            copy_tokens(window, now, *larger_pages[role], tensor_of, dim, heads, s.tokens);
        }
        last_before_ = s;
        for (int role = 0; role < 2; ++role)
            if (larger_pages[role]) s.pages[role] = std::move(larger_pages[role]);
        s.tokens = tokens;
        track_->tokens = s.end();
    }

    /// Adds a span for the next tokens.
    void stage_span() {
        page_table& track = *track_;
        const page_geometry g = cache_->geometry();
        page_span s = track.next_span(after_, g);
        const bool passes =
            when_ == chunk_pages::at_once && page_table::passes(s, after_, g, cache_->options().rollback);
        for (int role = 0; role < 2; ++role) {
            if (!passes || track.targets[role] == 0)
                s.pages[role] = window_page(role, g.window_tokens(s.tokens, s.room));
            else if (!temporary_[role])
                temporary_[role] = window_page(role, s.room);
        }
        track.tokens = s.end();
        track.spans.push_back(std::move(s));
    }

    void stage_commit(int i) {
        const page_span& s = (*track_)[i];
        for (int role = 0; role < 2; ++role) {
            const int target = s.sinks ? 0 : track_->targets[role];
            quantized_.emplace_back();
            shorter_.emplace_back();
            page_ref shorter;
            if (s.pages[role] && s.pages[role]->tokens != s.room)
                shorter = shorter_page(*cache_, *s.pages[role], role, s.room, stock_);
            if (target == 0) {
                quantized_.back() = std::move(shorter);
                continue;
            }
            shorter_.back() = std::move(shorter);
            quantized_.back() = new_page(*cache_, role, target, s.room, stock_);
            jobs_ += s.pages[role] ? cache_->shape().kv_heads : 0;
        }
    }

    cache* cache_;
    page_table* track_;
    page_stock* stock_;
    int layer_, before_, after_;
    chunk_pages when_;
    int spans_before_, first_written_ = 0;
    page_span last_before_;  // the open span before stage(), if it takes tokens
    page_ref temporary_[2];  // a 16-bit page for tokens that are quantized while they are read
    resource_vector<page_ref>
        shorter_;  // [span to commit][K, V]; 16-bit pages to quantize, where the span's own is longer
    resource_vector<page_ref> quantized_;  // [span to commit][K, V]; null where the page stays 16 bit
    int jobs_ = 0;
};

}}}  // namespace kvq::detail
