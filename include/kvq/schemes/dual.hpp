// Affine codes per channel over the tokens of a group, with stored parameters of 8 or 16 bits, and optionally one factor per
// token.
//
//   x^[t][c] = r_t * (scale_c * code + bias_c)           r_t = 1 without factors
//
//   block = [codes, padded to 16 bytes][parameters of channels][token scales, padded to 16 bytes]     docs/format.md
//
// Contract: codes are rounded to nearest, ties to even, from the stored parameters and y = x / r_t. With min_max, y lies inside
// its grid: |x - x^| <= r_t * scale_c / 2 (plus float evaluation, about 3e-7 |x|). scale_c is at most the channel's range of y
// over 2^B - 1, enlarged by what storing costs: coded: one step of biases (the range of the group's minima / 255) over 2^B - 1,
// then a factor of 33/32, and at least 1/250 of the group's largest scale; fp16: one rounding each. Other encoders: quant/encoders.hpp.
// NaN and infinities never set parameters or factors; NaN codes as the value nearest zero, infinities saturate, and so do
// magnitudes above 2^100. At most 1024 tokens and channels per block.
// Source: per-channel grids over tokens: KIVI (arXiv 2402.02750); a scale per token: KVarN; both together with 8-bit stored
// parameters, as measured in docs/schemes.md.
#pragma once

#include <cstring>

#include "../core/error.hpp"
#include "../pack/bit_pack.hpp"
#include "../quant/affine.hpp"
#include "../quant/channel_params.hpp"
#include "../quant/error_feedback.hpp"
#include "../quant/granularity.hpp"
#include "../quant/quantize_channels.hpp"
#include "../quant/token_scales.hpp"
#include "concepts.hpp"

namespace kvq::inline KVQ_TAGGED {

/// Bits per code; Group tokens share a channel's parameters (0: the whole page); Params: coded or params<P>; TokenScales: no_token_scales
/// or token_scales<coded or params<P>>; Encoder: quant/encoders.hpp.
template <int Bits, int Group = 0, class Encoder = min_max, class Params = coded,
          class TokenScales = no_token_scales>
struct channel_grid {
    using attends_as = channel_grid;
    using granularity_type = per_channel<Group>;
    using encoder_type = Encoder;
    using parameters = channel_parameters<Params>;
    using token_scale_type = TokenScales;
    static_assert(detail::grid_encoder<Encoder>,
                  "kvq::channel_grid<bits, group, encoder, parameters, factors>: the third argument must be "
                  "an encoder, "
                  "such as min_max");
    static_assert(
        token_scale_policy<TokenScales>,
        "kvq::channel_grid<bits, group, encoder, parameters, factors>: factors are no_token_scales, "
        "token_scales<coded> or token_scales<params<P>>");
    static constexpr int code_bits = bits<Bits>::value;
    static constexpr int zero_code = 0;
    static constexpr int top = (1 << Bits) - 1;

    channel_grid() = default;
    explicit channel_grid(Encoder e) : encoder(std::move(e)) {}
    /// With an encoder that uses statistics (error_feedback); others ignore them.
    explicit channel_grid(const calibration& statistics)
        : encoder(detail::make_encoder<Encoder>(statistics)) {}

    /// The format; encoders do not change it.
    short_text name() const {
        return "channel" + short_text::of(Bits) + (Group ? "-g" + short_text::of(Group) : "") + "-" +
               parameters::name() + TokenScales::name();
    }

    KVQ_HD static constexpr code_layout<code_bits> codes(const block_shape& s) noexcept {
        return {detail::row_axis(per_channel<Group>(), s), detail::col_axis(per_channel<Group>(), s)};
    }

    /// Raises kvq::error for blocks of more than 1024 tokens or channels.
    static constexpr std::size_t block_bytes(const block_shape& s) {
        if (s.tokens > detail::most_quantized || s.dim > detail::most_quantized)
            detail::expect(false, "channel_grid codes blocks of up to ", detail::most_quantized,
                           " tokens and channels, got ", s.tokens, " x ", s.dim);
        return detail::round_up(token_scale_offset(s) + TokenScales::bytes(token_axis(s).padded_size()),
                                std::size_t{16});
    }

    std::uint32_t quantize(const block_shape& s, block_id id, float* values, std::byte* block) const {
        return quantize_by(encoder, s, id, values, nullptr, block);
    }
    /// Of values that were quantized before. token_scales: those that they had then (a float per token, overwritten), or null.
    std::uint32_t requantize(const block_shape& s, block_id id, float* values, float* token_scales,
                             std::byte* block) const {
        return quantize_by(detail::grid_keeper<Encoder>{encoder}, s, id, values, token_scales, block);
    }
    /// What requantize() makes of known or fitted factors.
    static void settle_token_scales(const block_shape& s, const float* values, float* token_scales) {
        const grouped_axis tokens = token_axis(s);
        for (int g = 0; g < tokens.groups(); ++g)
            detail::settle_token_scales(values + g * tokens.group * s.dim, tokens.group_size(g), s.dim, top,
                                        token_scales + g * tokens.group);
    }
    /// Of every token, for the next scheme's requantize().
    static void read_token_scales(const block_shape& s, const std::byte* block,
                                  float* out) requires(TokenScales::present) {
        const grouped_axis tokens = token_axis(s);
        for (int t = 0; t < s.tokens; ++t)
            out[t] = TokenScales::factor(block + token_scale_offset(s), tokens.slot(t));
    }

private:
    template <class E>
    std::uint32_t quantize_by(const E& fitted, const block_shape& s, block_id id, float* values,
                              [[maybe_unused]] float* known_scales, std::byte* block) const {
        std::memset(block, 0, block_bytes(s));
        const std::uint32_t not_finite = detail::bound_magnitudes(values, s.values());
        if constexpr (TokenScales::present) {
            float fitted_scales[detail::most_quantized];
            float* const token_scale = known_scales ? known_scales : fitted_scales;
            if (!known_scales) detail::fit_token_scales(values, s.tokens, s.dim, token_scale);
            if constexpr (E::rounding == parameter_rounding::settled)
                settle_token_scales(s, values, token_scale);
            const grouped_axis tokens = token_axis(s);
            for (int g = 0; g < tokens.groups(); ++g)
                TokenScales::store(block + token_scale_offset(s), tokens.group_begin(g),
                                   token_scale + g * tokens.group, tokens.group_size(g));
            for (int t = 0; t < s.tokens; ++t)
                for (int c = 0; c < s.dim; ++c) values[t * s.dim + c] /= token_scale[t];
        }
        const grouped_axis tokens = token_axis(s);
        // Queries meet keys: their statistics say nothing about values.
        const block_id statistics_of = s.role == tensor::key ? id : block_id{-1, -1};
        for (int g = 0; g < tokens.groups(); ++g)
            detail::quantize_channels<parameters>(
                fitted, statistics_of, values + g * tokens.group * s.dim, tokens.group_size(g), s.dim, s.dim,
                [](int) { return top; }, block + parameter_offset(s), tokens.groups(), channel_slots(s), g);
        const auto layout = codes(s);
        for (int t = 0; t < s.tokens; ++t)
            for (int c = 0; c < s.dim; ++c) {
                const auto code = static_cast<unsigned>(values[t * s.dim + c]);
                if (s.role == tensor::key)
                    pack_code(layout, block, t, c, code);
                else
                    pack_code(layout, block, c, t, code);
            }
        return not_finite;
    }

public:
    void dequantize(const block_shape& s, block_id, const std::byte* block, float* values) const {
        const auto layout = codes(s);
        const grouped_axis tokens = token_axis(s);
        float scales[detail::most_quantized], biases[detail::most_quantized], token_scale[detail::most_slots];
        if constexpr (TokenScales::present)
            TokenScales::template load<detail::plain_loads>(block + token_scale_offset(s),
                                                            tokens.padded_size(), token_scale);
        for (int g = 0; g < tokens.groups(); ++g) {
            load<detail::plain_loads>(s, block, g, scales, biases);
            for (int t = g * tokens.group; t < g * tokens.group + tokens.group_size(g); ++t)
                for (int c = 0; c < s.dim; ++c) {
                    const bool key = s.role == tensor::key;
                    const auto code = static_cast<int>(unpack_code(layout, block, key ? t : c, key ? c : t));
                    const float y = detail::affine_value(code, scales[c], biases[c]);
                    if constexpr (TokenScales::present)
                        values[t * s.dim + c] = y * token_scale[tokens.slot(t)];
                    else
                        values[t * s.dim + c] = y;
                }
        }
    }

    /// One number as dequantize() gives it, for code that reads single ones.
    KVQ_HD static float value(const block_shape& s, const std::byte* block, int token, int channel) noexcept {
        const bool key = s.role == tensor::key;
        const grouped_axis tokens = token_axis(s);
        const int group = token / tokens.group;
        const std::byte* const at = block + parameter_offset(s);
        const auto code =
            static_cast<int>(unpack_code(codes(s), block, key ? token : channel, key ? channel : token));
        const float y = detail::affine_value(
            code, parameters::scale(at, tokens.groups(), channel_slots(s), group, channel),
            parameters::bias(at, tokens.groups(), channel_slots(s), group, channel));
        if constexpr (TokenScales::present)
            return detail::rounded_product(
                y, TokenScales::factor(block + token_scale_offset(s), tokens.slot(token)));
        else
            return y;
    }

    // Folding (schemes/concepts.hpp): channels are rows of V and columns of K, tokens the other way round.

    KVQ_HD static constexpr fold_use fold(tensor role) noexcept {
        return role == tensor::key ? fold_use{TokenScales::present, false, true, true}
                                   : fold_use{true, true, TokenScales::present, false};
    }
    template <class Backend>
    void row_parameters(const block_shape& s, block_id, const std::byte* block, int col_group, float* scale,
                        float* bias) const {
        if (s.role == tensor::value)
            load<Backend>(s, block, col_group, scale, bias);
        else if constexpr (TokenScales::present)
            TokenScales::template load<Backend>(block + token_scale_offset(s), token_axis(s).padded_size(),
                                                scale);
    }
    template <class Backend>
    void col_parameters(const block_shape& s, block_id, const std::byte* block, int row_group, float* scale,
                        float* bias) const {
        if (s.role == tensor::key)
            load<Backend>(s, block, row_group, scale, bias);
        else if constexpr (TokenScales::present)
            TokenScales::template load<Backend>(block + token_scale_offset(s), token_axis(s).padded_size(),
                                                scale);
    }

    /// Scales and biases of one group of tokens, for every channel slot.
    template <class Backend>
    void load(const block_shape& s, const std::byte* block, int group, float* scales, float* biases) const {
        const std::byte* const at = block + parameter_offset(s);
        const int groups = token_axis(s).groups(), n = channel_slots(s);
        parameters::template load_scales<Backend>(at, groups, n, group, 0, n, scales);
        parameters::template load_biases<Backend>(at, groups, n, group, 0, n, biases);
    }

    /// Encoders decide nothing about dequantizing: pages of all of them are the same to a reader (io/scheme_identity.hpp).
    static constexpr std::uint64_t fingerprint() noexcept { return 0; }

    /// Raises kvq::error if statistics are those of another shape; a cache calls it when it is made.
    void check(const cache_shape& shape, tensor) const {
        if constexpr (requires { encoder.check(shape); }) encoder.check(shape);
    }

    // Sections of the block.

    KVQ_HD static constexpr std::size_t parameter_offset(const block_shape& s) noexcept {
        return detail::round_up(codes(s).bytes(), std::size_t{16});
    }
    KVQ_HD static constexpr std::size_t token_scale_offset(const block_shape& s) noexcept {
        return parameter_offset(s) + parameters::bytes(token_axis(s).groups(), channel_slots(s));
    }
    KVQ_HD static constexpr grouped_axis token_axis(const block_shape& s) noexcept {
        return s.role == tensor::key ? detail::row_axis(per_channel<Group>(), s)
                                     : detail::col_axis(per_channel<Group>(), s);
    }
    KVQ_HD static constexpr int channel_slots(const block_shape& s) noexcept {
        return detail::round_up(s.dim, 4);
    }

    [[no_unique_address]] Encoder encoder{};
};

static_assert(foldable<channel_grid<4>>);

}  // namespace kvq::inline KVQ_TAGGED
