// Definitions of retain.hpp.
#pragma once

#include <algorithm>

#include "../core/error.hpp"
#include "../core/float_environment.hpp"
#include "chunk.hpp"
#include "convert.hpp"
#include "key_plan.hpp"
#include "retain.hpp"
#include "sequence_access.hpp"
#include "window.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

/// The new spans of a layer.
class retained_table {
public:
    /// kept: [kv_heads][count] positions.
    retained_table(kvq::cache& of, const page_table& before, int layer, std::span<const int> kept, int count,
                   float* scratch)
        : cache_(of),
          before_(before),
          layer_(layer),
          kept_(kept),
          count_(count),
          scratch_(scratch),
          table_(of.pool().memory(), before.targets[0], before.targets[1]) {}

    page_table build() {
        const page_geometry g = cache_.geometry(layer_);
        table_.repacked = before_.repacked;
        // Of the first tokens, also if they were held until now, and are dropped.
        table_.plan = plan_for(cache_, before_, layer_, before_.targets[0]);
        table_.rearranged = before_.rearranged;
        int row = before_.end_of_sinks();
        for (int i = 0; i < before_.size() && before_[i].first_token < row; ++i) add(before_[i]);
        table_.committed = smaller(before_.committed, table_.size());
        table_.tokens = before_.tokens - (count_ - row);
        while (row < count_) {
            if (const page_span* const whole = whole_span_at(row)) {
                page_span s = *whole;
                s.first_token = table_.tokens;
                row += s.tokens;
                add(std::move(s));
                table_.committed = table_.size();
                continue;
            }
            int end = row + 1;
            while (end < smaller(count_, row + g.page_tokens) && !whole_span_at(end)) ++end;
            add_rows(row, end, end < last_whole_);
            row = end;
        }
        table_.copies_from = table_.committed;
        table_.dropped = table_.tokens;
        table_.freed = page_table::freed_spans(table_.front(), g);
        return std::move(table_);
    }

    /// The row from which on no page is kept whole. Before build().
    void find_last_whole() {
        for (int row = before_.end_of_sinks(); row < count_;) {
            const page_span* const whole = whole_span_at(row);
            row += whole ? whole->tokens : 1;
            if (whole) last_whole_ = row;
        }
    }

private:
    int token(int head, int row) const noexcept {
        return kept_[static_cast<std::size_t>(head) * static_cast<std::size_t>(count_) +
                     static_cast<std::size_t>(row)];
    }
    int heads() const noexcept { return cache_.shape(layer_).kv_heads; }
    /// Index of the span that holds a token.
    int span_of(int token) const noexcept {
        const auto behind = std::upper_bound(before_.spans.begin(), before_.spans.end(), token,
                                             [](int t, const page_span& s) { return t < s.first_token; });
        return static_cast<int>(behind - before_.spans.begin()) - 1;
    }
    /// A committed span of which every head keeps all tokens, from this row on; or null.
    const page_span* whole_span_at(int row) const noexcept {
        const int first = token(0, row), i = span_of(first);
        const page_span& s = before_[i];
        if (i >= before_.committed || s.first_token != first || row + s.tokens > count_) return nullptr;
        for (int h = 0; h < heads(); ++h)  // positions ascend
            if (token(h, row) != first || token(h, row + s.tokens - 1) != s.end() - 1) return nullptr;
        return &s;
    }
    void add(page_span s) {
        s.copies = {};
        table_.spans.reserve(table_capacity(table_.spans.size() + 1));
        table_.tokens = s.end();
        table_.spans.push_back(std::move(s));
    }

    /// A span of its own for rows [row, end). followed: by a page that is kept whole.
    void add_rows(int row, int end, bool followed) {
        const page_geometry g = cache_.geometry(layer_);
        const int n = end - row;
        page_span s{table_.tokens, n, followed ? n : g.page_tokens, {}, {}, 0, false};
        s.shift = before_[span_of(token(0, row))].shift;
        const bool commits = followed || page_table::is_due(s, before_.tokens, g);
        bool again = false;
        for (const tensor role : cache_.tensors(layer_)) {
            const auto piece = static_cast<std::size_t>(role);
            s.pages[piece] = page_of(role, row, end, commits ? table_.targets[piece] : 0, s, again);
        }
        if (again) table_.repacked += static_cast<std::size_t>(n);
        add(std::move(s));
        if (commits) table_.committed = table_.size();
    }

    /// Are the values of the rows there in 16 bit, with keys that are rotated alike?
    bool in_window(tensor role, int row, int end, std::int64_t shift) const noexcept {
        for (int h = 0; h < heads(); ++h)
            for (int i = span_of(token(h, row));
                 i < before_.size() && before_[i].first_token <= token(h, end - 1); ++i)
                if (before_[i].pages[static_cast<std::size_t>(role)]->format != 0 ||
                    (role == tensor::key && before_[i].shift != shift))
                    return false;
        return true;
    }

    page_ref page_of(tensor role, int row, int end, int format, const page_span& to, bool& again) {
        const int n = end - row, dim = cache_.shape(layer_).dim(role), piece = static_cast<int>(role);
        const format_table& table = cache_.table(role);
        const bool exact = in_window(role, row, end, to.shift);
        // Values that are there in 16 bit are quantized from a 16-bit page, as new tokens are.
        const int first = exact ? 0 : format;
        page_ref p =
            first == 0 ? new_window_page(cache_, layer_, piece,
                                         format != 0 ? n : cache_.geometry(layer_).window_tokens(n, to.room))
                       : new_page(cache_, layer_, piece, first, n);
        const kvq::format plan = role == tensor::key && format != 0 ? table_.plan : kvq::format{};
        if (first != 0) p->plan = plan;
        const block_shape block{role, p->tokens, dim};
        const kvq::format& written = table.of(*p);
        resource_vector<float> values(static_cast<std::size_t>(n * dim), cache_.pool().memory()),
            scales(static_cast<std::size_t>(n), cache_.pool().memory());
        const format_functions& write = written.functions();
        const default_arithmetic arithmetic;
        std::uint32_t found = 0;
        for (int h = 0; h < heads(); ++h) {
            const bool scales_known = gather(role, h, row, end, to.shift, values.data(), scales.data());
            block_id id{layer_, h};
            std::byte* const data = written.block_at(block, p->data(), p->lower, h, id);
            found += first == 0 ? write.write_tokens(block, data, float_type::fp32, values.data(), dim, n, 0)
                                : write.requantize_values(written.scheme(), block, id, values.data(),
                                                          scales_known ? scales.data() : nullptr, data);
        }
        p->not_finite = found;
        again = again || !exact;
        if (format == first) return p;
        page_ref quantized = new_page(cache_, layer_, piece, format, n);
        if (plan) choose_plan(cache_, layer_, *p, plan, *quantized);
        convert_page(table, cache_.shape(layer_), layer_, *p, *quantized, scratch_);
        return quantized;
    }

    /// Rows of a head as floats. Returns whether their token scales are known.
    bool gather(tensor role, int head, int row, int end, std::int64_t shift, float* to, float* scales) {
        const format_table& table = cache_.table(role);
        const int dim = cache_.shape(layer_).dim(role);
        const auto width = static_cast<std::size_t>(dim),
                   longest = static_cast<std::size_t>(cache_.geometry().longest_page());
        whole_.resize(longest * width);
        whole_scales_.resize(longest);
        const rotation* const rotate = role == tensor::key ? cache_.rotations().at(layer_) : nullptr;
        bool known = true;
        for (int i = span_of(token(head, row)), first = row; row < end; ++i) {
            const page_span& s = before_[i];
            if (token(head, row) >= s.end()) continue;
            const page& from = *s.pages[static_cast<std::size_t>(role)];
            const kvq::format& source = table.of(from);
            const block_shape block{role, from.tokens, dim};
            block_id id{layer_, head};
            const std::byte* const data = source.block_at(block, from.data(), from.lower, head, id);
            source.functions().dequantize(source.scheme(), block, id, data, float_type::fp32, whole_.data(),
                                          dim, whole_.data());
            const bool moves = rotate && s.shift != shift;
            known = known && !moves && source.functions().read_token_scales != nullptr;
            if (known)
                source.functions().read_token_scales(source.scheme(), block, data, whole_scales_.data());
            for (; row < end && token(head, row) < s.end(); ++row) {
                const auto at = static_cast<std::size_t>(s.skip + token(head, row) - s.first_token);
                float* const values = to + static_cast<std::size_t>(row - first) * width;
                std::copy_n(whole_.data() + at * width, width, values);
                if (moves) (*rotate)(values, 1, dim, s.shift - shift);
                if (known) scales[row - first] = whole_scales_[at];
            }
        }
        return known;
    }

    kvq::cache& cache_;
    const page_table& before_;
    int layer_;
    std::span<const int> kept_;
    int count_, last_whole_ = 0;
    float* scratch_;
    page_table table_;
    resource_vector<float> whole_{cache_.pool().memory()}, whole_scales_{cache_.pool().memory()};
};

}  // namespace detail

KVQ_FUNC void sequence::hold() {
    detail::sequence_access::expect_no_draft(*this);
    for (int i = 0; i < cache_->layer_count(); ++i)
        tables_[static_cast<std::size_t>(i)].held = cache_->retains(i);
}

KVQ_FUNC void sequence::release() {
    detail::sequence_access::expect_no_draft(*this);
    for (int i = 0; i < cache_->layer_count(); ++i) release(i);
}

KVQ_FUNC void sequence::release(int layer) {
    detail::page_table& table = tables_[static_cast<std::size_t>(layer)];
    if (!std::exchange(table.held, false)) return;
    const std::exception_ptr failed = detail::caught([&] { commit_waiting(layer); });
    table.held = failed != nullptr;
    if (failed) std::rethrow_exception(failed);
}

KVQ_FUNC void sequence::retain(int layer, std::span<const int> kept, int count) {
    check_layer(layer);
    if (!cache_->retains(layer))
        detail::fail(describe(layer),
                     ": tokens are dropped from layers of full attention that hold their own");
    detail::sequence_access::expect_no_draft(*this);
    commit_shared(layer);
    detail::page_table& table = tables_[static_cast<std::size_t>(layer)];
    const int heads = shape(layer).kv_heads, sinks = table.end_of_sinks(), front = table.front();
    const int held = front == 0 ? table.tokens : sinks + table.tokens - front;
    detail::expect(count >= 0 && count <= held, "layer ", layer, " holds ", held,
                   " tokens of a kv head, and cannot retain ", count);
    detail::expect(kept.size() == static_cast<std::size_t>(heads) * static_cast<std::size_t>(count), "layer ",
                   layer, " has ", heads, " kv heads, which retain ", count, " tokens each, but ",
                   kept.size(), " are listed");
    detail::expect(count >= detail::smaller(held, sinks + 1), "layer ", layer, " retains at least its ",
                   sinks, " sinks and 1 token, not ", count, " tokens");
    for (int h = 0; h < heads; ++h)
        for (int i = 0; i < count; ++i) {
            const std::size_t at =
                static_cast<std::size_t>(h) * static_cast<std::size_t>(count) + static_cast<std::size_t>(i);
            const int t = kept[at];
            const int least = i == sinks ? detail::larger(sinks, front) : i > 0 ? kept[at - 1] + 1 : 0;
            if (t < table.tokens && (i < sinks ? t == i : t >= least)) continue;
            const auto refuse = [&](const auto&... why) {
                detail::fail("kv head ", h, " of layer ", layer, " retains token ", t, " at place ", i,
                             ": positions ascend, below ", table.tokens, ", and all ", sinks,
                             " sinks come first", why...);
            };
            if (front > sinks) refuse("; tokens ", sinks, " to ", front - 1, " are gone");
            refuse();
        }
    if (count < held) {
        detail::retained_table fresh(*cache_, table, layer, kept, count, scratch_.data());
        fresh.find_last_whole();
        table = fresh.build();
    }
    release(layer);
}

}}  // namespace kvq
