// Repacking on the CPU: spans that cuts have left give their tokens to shorter pages (page/repack_plan.hpp
// says which).
//
// Values are dequantized, keys rotated to one shift (that of the most tokens), and both quantized once more,
// in the format of the most tokens; 16-bit pages are copied, and keys that are rotated are rounded once more.
// Contract: where memory runs out, a run stays as it is, until the next cut.
#pragma once

#include "../core/float_environment.hpp"
#include "../page/repack_plan.hpp"
#include "chunk.hpp"
#include "convert.hpp"
#include "window.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

class repacker final : page_sizes {
public:
    repacker(kvq::cache& of, page_table& table, int layer) : cache_(of), table_(table), layer_(layer) {}

    /// Spans that are committed, or those that are not. Running out of memory is no error: what is done by
    /// then stays done.
    void run(bool committed) {
        if (cache_.options().repack > 0.0f) (void)has_memory([&] { repack(committed); });
    }

private:
    std::size_t bytes(std::size_t piece, int format, int tokens) const override {
        return page_pool::allocation(cache_.page_bytes(static_cast<tensor>(piece), layer_, format, tokens));
    }

    void repack(bool committed) {
        const repack_plan plan(table_, committed, cache_.geometry(layer_), cache_.options().repack, *this,
                               cache_.pool().memory());
        // From the last one on, so that the spans of the others keep their indices.
        for (std::size_t i = plan.groups().size(); i-- > 0;) {
            const repack_group& g = plan.groups()[i];
            if (!plan.changes(g)) continue;
#if !KVQ_EXCEPTIONS
            const page_pool& pool = cache_.pool();
            if (plan.new_bytes(g) > pool.budget() - pool.bytes_in_use()) continue;
#endif
            page_span fresh = plan.span_of(g);
            for (int role = 0; role < static_cast<int>(cache_.tensors(layer_).size()); ++role)
                fresh.pages[role] =
                    page_of(g, role, plan.format_of(g, static_cast<std::size_t>(role)), plan.rows_of(g),
                            fresh.shift, role == 0 ? plan.plan_of(g) : kvq::format{});
            table_.join_spans(g.first, g.last, std::move(fresh));
        }
    }

    page_ref page_of(const repack_group& g, int role, int format, int rows, std::int64_t shift,
                     const kvq::format& plan) {
        const auto tensor_of = static_cast<tensor>(role);
        const format_table& table = cache_.table(tensor_of);
        const int dim = cache_.shape(layer_).dim(tensor_of);
        page_ref p = new_page(cache_, layer_, role, format, rows);
        std::memset(p->data(), 0, p->upper_bytes());
        p->plan = plan;
        std::uint32_t counted = 0, found = 0;  // not finite: in the pages, among the values
        for (int i = g.first; i < g.last; ++i)
            if (i == g.first || table_[i].pages[role].get() != table_[i - 1].pages[role].get())
                counted += table_[i].pages[role]->not_finite;
        const auto width = static_cast<std::size_t>(dim);
        const auto longest = static_cast<std::size_t>(cache_.geometry().longest_page());
        resource_vector<float> values(static_cast<std::size_t>(g.tokens) * width, cache_.pool().memory()),
            whole(longest * width, cache_.pool().memory()),
            scales(static_cast<std::size_t>(g.tokens), cache_.pool().memory()),
            all_scales(longest, cache_.pool().memory());
        const rotation* const rotate = role == 0 ? cache_.rotations().at(layer_) : nullptr;
        const kvq::format& target = table.of(*p);
        const format_functions& write = target.functions();
        const block_shape block{tensor_of, rows, dim};
        const default_arithmetic arithmetic;
        for (int h = 0; h < cache_.shape(layer_).kv_heads; ++h) {
            block_id id{layer_, h};
            std::byte* const to_block = target.block_at(block, p->data(), p->lower, h, id);
            bool scales_known = true;
            int at = 0;
            for (int i = g.first; i < g.last; ++i) {
                const page_span& s = table_[i];
                const page& from = *s.pages[role];
                const kvq::format& source = table.of(from);
                const block_shape from_block{tensor_of, from.tokens, dim};
                block_id from_id{layer_, h};
                const std::byte* const data =
                    source.block_at(from_block, from.data(), from.lower, h, from_id);
                source.functions().dequantize(source.scheme(), from_block, from_id, data, float_type::fp32,
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
            if (format == 0)
                found +=
                    write.write_tokens(block, to_block, float_type::fp32, values.data(), dim, g.tokens, 0);
            else
                found += write.requantize_values(target.scheme(), block, id, values.data(),
                                                 scales_known ? scales.data() : nullptr, to_block);
        }
        // As in convert_page: those of 16-bit pages are found again, codes hold none.
        p->not_finite = larger(counted, found);
        return p;
    }

    kvq::cache& cache_;
    page_table& table_;
    int layer_;
};

}}}  // namespace kvq::detail
