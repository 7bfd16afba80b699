// Repacking: what cuts leave of pages goes to shorter pages, so that the bytes of a layer stay in proportion to its tokens.
//
//   run         neighbouring spans that show tokens of one page, in their order
//   allowance   tokens of a run * bytes of a whole page / page_tokens / cache_options::repack, for K and V together
//
// A run with more bytes than its allowance is repacked: its tokens go to a page with memory for just these, together with those of the
// next such runs, as far as they fit in one page. If the new page has more bytes than its allowance even so (a few tokens under one
// header), and also with those of the next run, the tokens of that run join it. So but for the last run
//   bytes of a layer's pages <= footprint of its tokens / repack + one page            (tests/properties/shifts_bytes.cpp)
// Values are dequantized, keys rotated to one shift (that of the most tokens), and both quantized once more, in the format of the most
// tokens; 16-bit pages are copied, and keys that are rotated are rounded once more.
//
// Contract: the result depends on the spans of the layer alone, not on other sequences, so that forks and restored sequences have the
// same future. A span with 16-bit copies is not repacked: a trim within cache_options::rollback must restore it. Repacking again
// changes nothing. Where memory runs out, a run stays as it is, until the next cut.
#pragma once

#include "chunk.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

class repacker {
public:
    repacker(kvq::cache& of, page_table& track, int layer)
        : cache_(of), track_(track), layer_(layer), groups_(of.pool().memory()) {}

    /// Spans that are committed, or those that are not. Running out of memory is no error: what is done by then stays done.
    void run(bool committed) {
        if (cache_.options().repack == 0.0f) return;
        committed_ = committed;
#if KVQ_EXCEPTIONS
        try {
            repack();
        } catch (const std::bad_alloc&) {
        }
#else
        repack();
#endif
    }

private:
    /// Neighbouring spans: a run, or the runs that become one page.
    struct group {
        int first, last;  // spans
        int runs;
        int tokens;
        std::size_t bytes;  // of their pages; 16-bit pages that wait count as they would be saved
        std::size_t held;   // of their pages as they are
        double allowance;
        bool fresh;  // its tokens get a new page
    };

    /// The spans in front that show the sinks of the sequence itself.
    int own_sinks() const noexcept {
        int n = 0;
        while (n < track_.size() && track_[n].sinks && track_[n].pages[0].get() == track_[0].pages[0].get())
            ++n;
        return n;
    }
    static std::size_t bytes_of(const page_span& s) noexcept {
        return page_pool::allocation(s.pages[0]->bytes) + page_pool::allocation(s.pages[1]->bytes);
    }
    /// Of pages for so many tokens.
    std::size_t bytes_of(int key_format, int value_format, int tokens) const {
        return page_pool::allocation(cache_.page_bytes(tensor::key, key_format, tokens)) +
               page_pool::allocation(cache_.page_bytes(tensor::value, value_format, tokens));
    }
    /// Of the new pages of a group.
    std::size_t new_bytes(const group& g) const {
        return bytes_of(format_of(g, 0), format_of(g, 1), rows_of(g));
    }
    bool last_of_layer(const group& g) const noexcept { return g.last == track_.size(); }
    int room_of(const group& g) const {
        return committed_ || !last_of_layer(g) ? g.tokens : cache_.geometry().page_tokens;
    }
    int rows_of(const group& g) const {
        if (committed_) return g.tokens;
        return cache_.geometry().window_tokens(g.tokens, cache_.geometry().page_tokens);
    }
    /// The span of a group that shows the most tokens.
    int largest_of(const group& g) const noexcept {
        int most = g.first;
        for (int i = g.first; i < g.last; ++i)
            if (track_[i].tokens > track_[most].tokens) most = i;
        return most;
    }
    /// Sinks of another sequence take the format of the layer.
    int format_of(const group& g, int role) const noexcept {
        const page_span& s = track_[largest_of(g)];
        return committed_ && s.sinks ? track_.targets[role] : s.pages[role]->format;
    }
    static bool is_held(const page_span& s) noexcept { return s.copies[0] || s.copies[1]; }

    group run_from(int first, int last) const {
        const page_span& s = track_[first];
        int end = first + 1, tokens = s.tokens;
        for (; end < last; ++end) {
            const page_span &before = track_[end - 1], &next = track_[end];
            if (next.pages[0].get() != s.pages[0].get() || next.pages[1].get() != s.pages[1].get() ||
                next.skip < before.skip + before.tokens)
                break;
            tokens += next.tokens;
        }
        const int whole = cache_.geometry().page_tokens;
        const double allowance =
            static_cast<double>(bytes_of(s.pages[0]->format, s.pages[1]->format, whole)) * tokens / whole /
            static_cast<double>(cache_.options().repack);
        group g{first, end, 1, tokens, bytes_of(s), bytes_of(s), allowance, false};
        if (!committed_) g.bytes = new_bytes(g);
        return g;
    }
    bool fits(const group& a, const group& b) const noexcept {
        return a.tokens + b.tokens <= cache_.geometry().page_tokens;
    }
    static void join(group& to, const group& next) noexcept {
        to.last = next.last;
        to.runs += next.runs;
        to.tokens += next.tokens;
        to.bytes += next.bytes;
        to.held += next.held;
        to.allowance += next.allowance;
        to.fresh = true;
    }
    bool may_change(const group& g) const noexcept {
        for (int i = g.first; i < g.last; ++i)
            if (is_held(track_[i])) return false;
        return g.tokens <= cache_.geometry().page_tokens;
    }

    void repack() {
        const int first = committed_ ? own_sinks() : larger(track_.committed, own_sinks());
        const int last = committed_ ? track_.committed : track_.size();
        if (first >= last) return;
        find_groups(first, last);
        join_small_ones();
        // From the last one on, so that the spans of the others keep their indices.
        for (std::size_t i = groups_.size(); i-- > 0;) {
            const group& g = groups_[i];
            const std::size_t bytes = new_bytes(g);
            const bool shrinks = static_cast<double>(g.held) > g.allowance && may_change(g) && bytes < g.held;
            if (g.runs == 1 && !shrinks) continue;
#if !KVQ_EXCEPTIONS
            const page_pool& pool = cache_.pool();
            if (bytes > pool.budget() - pool.bytes_in_use()) continue;
#endif
            replace(g);
        }
    }

    void find_groups(int first, int last) {
        groups_.clear();
        for (int i = first; i < last;) {
            group g = run_from(i, last);
            i = g.last;
            g.fresh = static_cast<double>(g.bytes) > g.allowance && may_change(g);
            if (g.fresh && !groups_.empty() && groups_.back().fresh && fits(groups_.back(), g))
                join(groups_.back(), g);
            else
                groups_.push_back(g);
        }
    }
    void join_small_ones() {
        std::size_t n = 0;  // groups that are done
        for (const group& g : groups_) {
            if (n > 0) {
                group& before = groups_[n - 1];
                const auto excess = [this](const group& of) {
                    return static_cast<double>(of.fresh ? new_bytes(of) : of.bytes) - of.allowance;
                };
                if (before.fresh && fits(before, g) && may_change(g) && excess(before) > 0.0 &&
                    excess(before) + excess(g) > 0.0) {
                    join(before, g);
                    continue;
                }
            }
            groups_[n++] = g;
        }
        groups_.erase(groups_.begin() + static_cast<std::ptrdiff_t>(n), groups_.end());
    }

    /// One span with new pages takes the place of those of a group.
    void replace(const group& g) {
        const page_span& most = track_[largest_of(g)];
        page_span fresh{track_[g.first].first_token, g.tokens, room_of(g), {}, {}, 0, false, most.shift};
        bool quantized = false;
        for (int role = 0; role < 2; ++role) {
            fresh.pages[role] = page_of(g, role, most.shift);
            quantized = quantized || fresh.pages[role]->format != 0;
        }
        track_[g.first] = std::move(fresh);
        track_.spans.erase(track_.spans.begin() + g.first + 1, track_.spans.begin() + g.last);
        if (!committed_) return;
        track_.committed -= g.last - g.first - 1;
        track_.copies_from = smaller(track_.copies_from, g.first);
        if (quantized) track_.repacked += static_cast<std::size_t>(g.tokens);
    }

    page_ref page_of(const group& g, int role, std::int64_t shift) {
        const auto tensor_of = static_cast<tensor>(role);
        const format_table& table = cache_.table(tensor_of);
        const int format = format_of(g, role), rows = rows_of(g), dim = cache_.shape().dim(tensor_of);
        page_ref p = new_page(cache_, role, format, rows);
        std::memset(p->data(), 0, p->bytes);
        std::uint32_t counted = 0, found = 0;  // not finite: in the pages, among the values
        for (int i = g.first; i < g.last; ++i)
            if (i == g.first || track_[i].pages[role].get() != track_[i - 1].pages[role].get())
                counted += track_[i].pages[role]->not_finite;
        const auto width = static_cast<std::size_t>(dim);
        const auto longest = static_cast<std::size_t>(cache_.geometry().longest_page());
        resource_vector<float> values(static_cast<std::size_t>(g.tokens) * width, cache_.pool().memory()),
            whole(longest * width, cache_.pool().memory()),
            scales(static_cast<std::size_t>(g.tokens), cache_.pool().memory()),
            all_scales(longest, cache_.pool().memory());
        const rotation* const rotate = role == 0 ? cache_.rotations().at(layer_) : nullptr;
        const format_functions& write = table[format].functions();
        const block_shape block{tensor_of, rows, dim};
        const std::size_t bytes = table[format].block_bytes(block);
        const default_arithmetic arithmetic;
        for (int h = 0; h < cache_.shape().kv_heads; ++h) {
            const block_id id{layer_, h};
            bool scales_known = true;
            int at = 0;
            for (int i = g.first; i < g.last; ++i) {
                const page_span& s = track_[i];
                const page& from = *s.pages[role];
                const kvq::format& source = table[from.format];
                const block_shape from_block{tensor_of, from.tokens, dim};
                const std::byte* const data =
                    from.data() + source.block_bytes(from_block) * static_cast<std::size_t>(h);
                source.functions().dequantize(source.scheme(), from_block, id, data, float_type::fp32,
                                              whole.data(), dim, whole.data());
                float* const to = values.data() + static_cast<std::size_t>(at) * width;
                std::copy_n(whole.data() + static_cast<std::size_t>(s.skip) * width,
                            static_cast<std::size_t>(s.tokens) * width, to);
                const bool moves = rotate && s.shift != shift;
                if (moves) (*rotate)(to, s.tokens, dim, s.shift - shift);
                scales_known = scales_known && !moves && source.functions().read_token_scales != nullptr;
                if (scales_known) {
                    source.functions().read_token_scales(source.scheme(), from_block, data,
                                                         all_scales.data());
                    std::copy_n(all_scales.data() + s.skip, s.tokens, scales.data() + at);
                }
                at += s.tokens;
            }
            std::byte* const to = p->data() + bytes * static_cast<std::size_t>(h);
            if (format == 0)
                found += write.write_tokens(block, to, float_type::fp32, values.data(), dim, g.tokens, 0);
            else
                found += write.requantize_values(table[format].scheme(), block, id, values.data(),
                                                 scales_known ? scales.data() : nullptr, to);
        }
        // As in convert_page: those of 16-bit pages are found again, codes hold none.
        p->not_finite = larger(counted, found);
        return p;
    }

    kvq::cache& cache_;
    page_table& track_;
    int layer_;
    bool committed_ = false;
    resource_vector<group> groups_;
};

}}}  // namespace kvq::detail
