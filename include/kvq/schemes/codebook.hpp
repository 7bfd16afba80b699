// codebook_scheme<Codebook, Granularity, Params>: codes of a codebook (quant/codebook.hpp) under one scale per group.
//
//   block = [codes][scales]          as that of scheme<> without biases; docs/format.md
//
// Contract: finite members of a group set its scale; the scale is rounded to nearest and kept finite; infinities saturate and
// NaN codes as the value nearest zero; both are counted. Not foldable: attention dequantizes page by page.
#pragma once

#include <vector>

#include "../quant/codebook.hpp"
#include "scheme.hpp"

namespace kvq::inline KVQ_TAGGED {
namespace detail {

/// A codebook as the levels of scheme<>, which then packs, stores and dequantizes.
template <codebook C>
struct codebook_levels {
    static constexpr bool has_bias = false;
    static constexpr int min_bits = C::bits;
    static constexpr const char* name = C::name;
    template <int>
    static constexpr int zero_code = 0;
    template <int>
    static float value(int code, float scale, float) noexcept {
        return C::value(code, scale);
    }
};

}  // namespace detail

template <codebook Codebook, granularity Granularity, class Params = params<float16>>
struct codebook_scheme
    : private scheme<bits<Codebook::bits>, detail::codebook_levels<Codebook>, Granularity, Params> {
private:
    using base = scheme<bits<Codebook::bits>, detail::codebook_levels<Codebook>, Granularity, Params>;

public:
    using base::block_bytes;
    using base::dequantize;
    using base::name;
    using typename base::parameter;

    std::uint32_t quantize(const block_shape& s, block_id, const float* values, std::byte* block) const {
        std::memset(block, 0, block_bytes(s));
        const auto layout = base::codes(s);
        std::uint32_t not_finite = 0;
        std::vector<float> finite;
        finite.reserve(static_cast<std::size_t>(detail::larger(s.tokens, s.dim)));
        base::each_group(s, [&](const typename base::value_group& g) {
            finite.clear();
            for (int i = 0; i < g.size; ++i)
                if (const float x = values[g.index(s, i)]; detail::is_finite(x)) finite.push_back(x);
            const auto count = static_cast<int>(finite.size());
            not_finite += static_cast<std::uint32_t>(g.size - count);
            const fitted scale = Codebook::fit(finite.data(), count);
            base::store_parameters(s, block, g.number, g.slot, {stored(scale.stored), parameter(0.0f)});
            for (int i = 0; i < g.size; ++i)
                pack_code(layout, block, g.row(i), g.col(i),
                          static_cast<unsigned>(Codebook::code(values[g.index(s, i)], scale.working)));
        });
        return not_finite;
    }

private:
    static parameter stored(float scale) noexcept {
        constexpr float limit = detail::max_finite<parameter>;
        return parameter(scale > limit ? limit : scale < -limit ? -limit : scale);
    }
};

}  // namespace kvq::inline KVQ_TAGGED
