// 16- or 32-bit values, not quantized: the baseline, and the format of sinks and the recent window.
//
// Contract: x^ = x rounded once to T; infinities and NaN are kept, and counted where they are written, with
// values that T has no room for. Bytes per value: sizeof(T).
#pragma once

#include <cstring>

#include "../core/float_formats.hpp"
#include "../core/text.hpp"
#include "../pack/value_layout.hpp"
#include "concepts.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

template <float_format T>
struct full {
    using value_type = T;
    using attends_as = full;

    short_text name() const { return float_name<T>; }

    KVQ_HD constexpr std::size_t block_bytes(const block_shape& s) const noexcept {
        return detail::round_up(value_layout<T>(s).bytes(), std::size_t{16});
    }

    std::uint32_t quantize(const block_shape& s, block_id, const float* values, std::byte* block) const {
        std::memset(block, 0, block_bytes(s));
        const value_layout<T> layout(s);
        std::uint32_t not_finite = 0;
        for (int t = 0; t < s.tokens; ++t)
            for (int c = 0; c < s.dim; ++c) {
                const T x(values[t * s.dim + c]);
                not_finite += !detail::is_finite(static_cast<float>(x));
                detail::store_as(block + sizeof(T) * element(layout, s, t, c), x);
            }
        return not_finite;
    }

    void dequantize(const block_shape& s, block_id, const std::byte* block, float* values) const {
        const value_layout<T> layout(s);
        for (int t = 0; t < s.tokens; ++t)
            for (int c = 0; c < s.dim; ++c)
                values[t * s.dim + c] =
                    static_cast<float>(detail::load_as<T>(block + sizeof(T) * element(layout, s, t, c)));
    }

    KVQ_HD static constexpr std::size_t element(const value_layout<T>& layout, const block_shape& s,
                                                int token, int channel) noexcept {
        return s.role == tensor::key ? layout.element(token, channel) : layout.element(channel, token);
    }
};

static_assert(key_scheme<full<float16>> && value_scheme<full<float>>);

}}  // namespace kvq
