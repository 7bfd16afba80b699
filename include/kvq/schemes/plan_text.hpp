// A plan of channel widths (quant/width_allocation.hpp) of one layer as text, as files and messages carry it,
// and its fingerprint.
//
//   "8x128:" and for each channel of each head the number of its width in the list, a digit
//
// Contract: channels of one width keep their order, so that the digits say all.
#pragma once

#include <cstring>

#include "../core/error.hpp"
#include "../core/text.hpp"
#include "../quant/quantize_group.hpp"
#include "../quant/width_allocation.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

/// Returns the number of letters, which are written unless `to` is null.
inline std::size_t write_plan_text(const width_plan& plan, char* to) {
    short_text head = short_text::of(plan.kv_heads) + "x" + short_text::of(plan.head_dim) + ":";
    const std::size_t first = std::strlen(head.c_str());
    const auto heads = static_cast<std::size_t>(plan.kv_heads), dim = static_cast<std::size_t>(plan.head_dim);
    if (!to) return first + heads * dim;
    std::memcpy(to, head.c_str(), first);
    for (std::size_t h = 0; h < heads; ++h) {
        const channel_allocation& a = plan.blocks[h];
        std::size_t place = 0;
        for (std::size_t w = 0; w < a.quads.size(); ++w)
            for (int i = 0; i < 4 * a.quads[w] && place < dim; ++i)
                to[first + h * dim + a.order[place++]] = static_cast<char>('0' + w);
    }
    return first + heads * dim;
}

/// widths: in the list. Raises kvq::error for text that is no plan of so many.
inline width_plan plan_of_text(const char* text, std::size_t letters, int widths) {
    std::size_t at = 0;
    const auto number = [&](char behind) {
        int n = 0;
        while (at < letters && text[at] >= '0' && text[at] <= '9' && n < 1 << 20)
            n = 10 * n + (text[at++] - '0');
        expect(n > 0 && at < letters && text[at] == behind, "a plan of channel widths is damaged at letter ",
               at);
        ++at;
        return n;
    };
    width_plan plan;
    plan.of_every_layer = true;
    plan.kv_heads = number('x');
    plan.head_dim = number(':');
    const auto heads = static_cast<std::size_t>(plan.kv_heads), dim = static_cast<std::size_t>(plan.head_dim);
    expect(dim <= most_quantized && letters - at == heads * dim, "a plan for ", heads, " heads of ", dim,
           " channels has ", letters - at, " widths");
    for (std::size_t h = 0; h < heads; ++h) {
        channel_allocation a;
        a.order.resize(dim);
        a.quads.resize(static_cast<std::size_t>(widths));
        std::size_t place = 0;
        for (std::size_t w = 0; w < a.quads.size(); ++w) {
            const std::size_t before = place;
            for (std::size_t c = 0; c < dim; ++c)
                if (text[at + h * dim + c] == static_cast<char>('0' + w))
                    a.order[place++] = static_cast<std::uint16_t>(c);
            a.quads[w] = static_cast<std::uint16_t>(ceil_div(static_cast<int>(place - before), 4));
        }
        expect(place == dim, "a plan of channel widths is damaged in head ", h);
        plan.blocks.push_back(std::move(a));
    }
    return plan;
}

/// Of all orders and widths; 0 without a plan.
inline std::uint64_t plan_fingerprint(const width_plan* plan) noexcept {
    if (!plan) return 0;
    fingerprint_hash hash;
    hash.add(static_cast<std::uint64_t>(plan->kv_heads));
    for (const channel_allocation& a : plan->blocks) {
        for (const std::uint16_t c : a.order) hash.add(c);
        for (const std::uint16_t q : a.quads) hash.add(q);
    }
    return hash.value;
}

}}}  // namespace kvq::detail
