// Definitions of key_plan.hpp.
#pragma once

#include <algorithm>

#include "../core/float_environment.hpp"
#include "../core/float_formats.hpp"
#include "../core/resource_vector.hpp"
#include "../quant/calibration.hpp"
#include "../quant/width_allocation.hpp"
#include "../schemes/full.hpp"
#include "key_plan.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

/// x^ of a page of keys, [head][token][channel].
KVQ_FUNC token_view<const float> keys_of(const cache& of, int layer, const page& p,
                                         resource_vector<float>& values) {
    const cache_shape& shape = of.shape(layer);
    const block_shape block{tensor::key, p.tokens, shape.head_dim};
    const format& f = of.table(tensor::key).of(p);
    values.resize(block.values() * static_cast<std::size_t>(shape.kv_heads));
    const default_arithmetic arithmetic;
    for (int h = 0; h < shape.kv_heads; ++h) {
        float* const to = values.data() + block.values() * static_cast<std::size_t>(h);
        block_id id{layer, h};
        const std::byte* const of_head = f.block_at(block, p.data(), p.lower, h, id);
        f.functions().dequantize(f.scheme(), block, id, of_head, float_type::fp32, to, block.dim, to);
    }
    return {values.data(), p.tokens,  shape.kv_heads,
            block.dim,     block.dim, static_cast<std::ptrdiff_t>(block.values())};
}

KVQ_FUNC std::size_t plan_bytes(const cache& of, int layer) {
    const cache_shape& shape = of.shape(layer);
    const auto row = static_cast<std::size_t>(shape.kv_heads) * static_cast<std::size_t>(shape.head_dim);
    const auto tokens = static_cast<std::size_t>(calibration::group + of.geometry().longest_page());
    // The sums, saved, and read again.
    return row * (tokens * sizeof(float) + 3 * 5 * sizeof(double));
}

KVQ_FUNC format plan_of_keys(cache& of, const page_table& table, int layer, int index) {
    const format& base = of.table(tensor::key)[index];
    const int tokens = of.plan_tokens(layer);
    if (tokens == 0 || !base.wants_plan() || table.tokens < tokens) return {};
    return of.key_plan(layer, index, [&]() -> format {
        const cache_shape& shape = of.shape(layer);
        const auto dim = static_cast<std::size_t>(shape.head_dim),
                   row = dim * static_cast<std::size_t>(shape.kv_heads);
        resource_vector<float> rows(static_cast<std::size_t>(calibration::group) * row, of.pool().memory()),
            values(of.pool().memory());
        calibration sums({1, shape.kv_heads, shape.head_dim, 0});
        const auto add = [&](int count) {
            sums.add_keys(0, token_view<const float>(rows.data(), count, shape.kv_heads, shape.head_dim));
        };
        int n = 0;
        for (const page_span& s : table.spans) {
            const auto keys = keys_of(of, layer, *s.pages[0], values);
            const int taken = smaller(s.tokens, tokens - n);
            for (int t = 0; t < taken; ++t) {
                float* const to = rows.data() + static_cast<std::size_t>(n % calibration::group) * row;
                for (int h = 0; h < shape.kv_heads; ++h)
                    std::copy_n(keys.at(s.skip + t, h), dim, to + static_cast<std::size_t>(h) * dim);
                if (++n % calibration::group == 0) add(calibration::group);
            }
            if (n == tokens) break;
        }
        add(n % calibration::group);
        const auto saved = sums.save();
        return base.functions().plans->from_statistics(base, saved.data(), saved.size());
    });
}

KVQ_FUNC format plan_for(cache& of, const page_table& table, int layer, int index) {
    if (index == table.targets[0] && table.plan) return table.plan;
    if (!of.table(tensor::key)[index].wants_plan()) return {};
    for (int i = table.committed; i-- > 0;)
        if (const page& p = *table[i].pages[0]; p.format == index && p.plan) return p.plan;
    return plan_of_keys(of, table, layer, index);
}

/// The keys of a head of a 16-bit page.
template <class Window>
struct window_keys {
    block_shape block;
    const std::byte* data;

    /// As a plan of these keys has it.
    double importance(int channel) const {
        const value_layout<Window> layout(block);
        double variances = 0.0, squares = 0.0, tokens = 0.0;
        calibration::for_each_group(block.tokens, [&](int first, int n) {
            const auto key = [&](int t) {
                const std::size_t at = full<Window>::element(layout, block, first + t, channel);
                return static_cast<float>(load_as<Window>(data + sizeof(Window) * at));
            };
            add_channel(n, key, variances, squares);
            tokens += n;
        });
        return key_importance(squares / tokens, variances / tokens);
    }
};

KVQ_FUNC void choose_plan(const cache& of, int layer, const page& from, const format& plan, page& to) {
    const int heads = of.shape(layer).kv_heads;
    const block_shape block{tensor::key, from.tokens, of.shape(layer).head_dim};
    int groups = 0;
    calibration::for_each_group(from.tokens, [&](int, int) { ++groups; });
    double error = 0.0;
    const default_arithmetic arithmetic;
    if (from.format == 0 && groups > 0)
        visit_float_type(of.table(tensor::key).window_type(), [&]<class Window>(Window) {
            const std::size_t bytes = full<Window>{}.block_bytes(block);
            for (int h = 0; h < heads; ++h) {
                const window_keys<Window> keys{block, from.data() + bytes * static_cast<std::size_t>(h)};
                const channel_importance importance{
                    [](const void* k, int c) {
                        return static_cast<const window_keys<Window>*>(k)->importance(c);
                    },
                    &keys};
                error += plan.functions().plans->relative_error(plan.scheme(), block, {layer, h}, importance);
            }
        });
    if (!(error > heads)) to.plan = plan;
}

}}}  // namespace kvq::detail
