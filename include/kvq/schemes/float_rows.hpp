// 8-bit floats in rows of tokens, with a fp32 scale per (token, head): 132 bytes per 128 channels.
//
//   block   [tokens][channels] codes | [tokens] scales | padding to 16 bytes
//   scale = max|x| / 448        of the finite values, at least 2^-126; 0 if there is none but 0
//   code  = e4m3(x / scale)     to nearest, ties to even
//   x^    = scale * code
//
// A selection reads all keys of an index, so that quantizing has kernels, too (cpu/float_rows.hpp). Rows in
// other layouts: schemes/token_rows.hpp.
// Of 128 channels the block has the bytes of the index caches of DeepSeek V3.2 in vLLM and SGLang, whose
// scale is not rounded to a power of two. (They give tokens below 1e-4 the scale of 1e-4.)
// Contract: the same bytes everywhere. |x - x^| is at most 2^-4 |x|, or 2^-10 of the scale if that is more
// (plus float evaluation) up to 2^126, larger magnitudes saturate. NaN is quantized as zero,
// infinities saturate; neither sets a scale.
#pragma once

#include <cstring>

#include "../core/float_formats.hpp"
#include "../core/rounding.hpp"
#include "../core/text.hpp"
#include "codec_spec.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// Code: e4m3.
template <class Code>
struct float_rows {
    using row_code = Code;
    using attends_as = float_rows;

    short_text name() const { return Code::name; }

    KVQ_HD static constexpr std::size_t scale_offset(const block_shape& s) noexcept { return s.values(); }
    KVQ_HD constexpr std::size_t block_bytes(const block_shape& s) const noexcept {
        return detail::round_up(s.values() + static_cast<std::size_t>(s.tokens) * sizeof(float),
                                std::size_t{16});
    }

    /// Of a token whose largest finite magnitude is `largest`.
    KVQ_HD static constexpr float scale_of(float largest) noexcept {
        if (!(largest > 0.0f)) return 0.0f;
        return detail::larger(detail::rounded_quotient(detail::smaller(largest, 0x1p126f), Code::max_finite),
                              0x1p-126f);
    }
    KVQ_HD static constexpr Code code_of(float x, float scale) noexcept {
        return x == x && scale > 0.0f ? Code(detail::rounded_quotient(x, scale)) : Code();
    }
    KVQ_HD static constexpr float value_of(Code c, float scale) noexcept {
        return detail::rounded_product(scale, static_cast<float>(c));
    }

    std::uint32_t quantize(const block_shape& s, block_id, const float* values, std::byte* block) const {
        std::byte* const scales = block + scale_offset(s);
        std::memset(scales, 0, block_bytes(s) - scale_offset(s));
        std::uint32_t not_finite = 0;
        for (int t = 0; t < s.tokens; ++t, values += s.dim, block += s.dim) {
            float largest = 0.0f;
            for (int c = 0; c < s.dim; ++c)
                if (detail::is_finite(values[c]))
                    largest = detail::larger(largest, values[c] < 0.0f ? -values[c] : values[c]);
                else
                    ++not_finite;
            const float scale = scale_of(largest);
            for (int c = 0; c < s.dim; ++c) detail::store_as(block + c, code_of(values[c], scale));
            detail::store_as(scales + static_cast<std::size_t>(t) * sizeof(float), scale);
        }
        return not_finite;
    }

    void dequantize(const block_shape& s, block_id, const std::byte* block, float* values) const {
        for (int t = 0; t < s.tokens; ++t) dequantize_token(s, block, t, values + std::ptrdiff_t{t} * s.dim);
    }
    static void dequantize_token(const block_shape& s, const std::byte* block, int token, float* values) {
        const auto at = static_cast<std::size_t>(token);
        const auto scale = detail::load_as<float>(block + scale_offset(s) + at * sizeof(float));
        block += at * static_cast<std::size_t>(s.dim);
        for (int c = 0; c < s.dim; ++c) values[c] = value_of(detail::load_as<Code>(block + c), scale);
    }
    /// One number, as dequantize() gives it: what kernels of a GPU read.
    KVQ_HD float device_value(const block_shape& s, const std::byte* block, int token,
                              int channel) const noexcept {
        const auto scale =
            detail::load_as<float>(block + scale_offset(s) + static_cast<std::size_t>(token) * sizeof(float));
        return value_of(detail::load_as<Code>(block + std::ptrdiff_t{token} * s.dim + channel), scale);
    }
};

namespace detail {
template <class Code>
struct codec_maker<float_rows<Code>> {
    static constexpr codec_spec of_type() noexcept {
        codec_spec c;
        c.content = block_content::rows;
        c.reading = block_reading::rows;
        c.set_width(8);
        c.levels = level_kind::e4m3;
        c.per_token = true;
        c.parameters = parameter_storage::fp32;
        c.parameter_bytes = sizeof(float);
        return c;
    }
    static constexpr codec_spec of(const float_rows<Code>&) noexcept { return of_type(); }
};
}  // namespace detail

static_assert(key_scheme<float_rows<e4m3>> && value_scheme<float_rows<e4m3>>);
static_assert(float_rows<e4m3>{}.block_bytes({tensor::key, 64, 128}) == 64 * 132);

}}  // namespace kvq
