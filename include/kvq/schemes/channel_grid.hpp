// Affine codes per channel over the tokens of a group: one width for all channels or several, optionally with a scale per token.
//
//   x^[t][c] = r_t * (scale_c * code + bias_c)       r_t = 1 without token scales; a code of 0 bits: bias_c, the channel's mean
//
//   block = [codes, the widest channels first; padded to 16 bytes][parameters of channels][token scales; padded to 16 bytes]
//
// Contract: codes are rounded to nearest, ties to even, from the stored parameters and y = x / r_t. With `enclosing`, y lies inside
// its grid: |x - x^| <= r_t * scale_c / 2 (plus float evaluation, about 3e-7 |x|). With min_max, parameters are rounded to nearest, so
// y may lie outside by that rounding (quant/encoders.hpp). scale_c is at most the channel's range of y over
// 2^B - 1, enlarged by the rounding of stored parameters. 8-bit parameters (`byte_params`): one step of biases (the range of the group's
// minima / 255) over 2^B - 1, then a factor of 33/32, and at least 1/250 of the group's largest scale. fp16: one rounding each.
// Other encoders: quant/encoders.hpp. NaN and infinities never set parameters or token scales; NaN is quantized as the value
// nearest zero; infinities and magnitudes above 2^100 saturate. At most 1024 tokens and channels per block.
// Source: per-channel grids over tokens: KIVI (arXiv 2402.02750); a scale per token: KVarN; both together with 8-bit stored
// parameters, as measured in docs/lab/presets.md. Several widths: quant/width_allocation.hpp.
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
#include "channel_codes.hpp"
#include "concepts.hpp"

namespace kvq::inline KVQ_TAGGED {

namespace detail {

/// The columns of a block with several widths as one matrix: attention reads the position of their parameters here.
template <grid Options, class Parameters>
struct grid_columns {
    static constexpr code_layout<8> codes(const block_shape& s) noexcept {
        return {grid_geometry<Options>::token_axis(s), {s.dim, s.dim}};
    }
    static constexpr fold_use fold(tensor) noexcept { return {false, false, true, true}; }
    std::size_t parameters = 0;      ///< offset in the block
    int groups = 0, slot_count = 0;  ///< of the parameters
    template <class Backend>
    void load(const std::byte* block, int row_group, float* scale, float* bias,
              const float* factor = nullptr) const {
        const std::byte* const at = block + parameters;
        Parameters::template load_scales<Backend>(at, groups, slot_count, row_group, 0, slot_count, scale,
                                                  factor);
        Parameters::template load_biases<Backend>(at, groups, slot_count, row_group, 0, slot_count, bias);
    }
};

}  // namespace detail

/// Options: widths and groups, as in channel_grid<grid{.bits = {4}, .group = 64}> or
/// channel_grid<grid{.bits = {4, 2, 0}, .average_eighths = 16, .group = 64}>; Encoder: quant/encoders.hpp; Params: byte_params or
/// params<P>; TokenScales: no_token_scales, or token_scales<byte_params or params<P>> with one width. Several widths are for keys.
template <grid Options, class Encoder = min_max, class Params = byte_params,
          class TokenScales = no_token_scales>
struct channel_grid : detail::channel_codes<Options> {
private:
    using codes_type = detail::channel_codes<Options>;

public:
    using attends_as = channel_grid;
    using encoder_type = Encoder;
    using params_type = Params;
    using parameters = channel_parameters<Params>;
    using token_scale_type = TokenScales;
    using codes_type::channel_slots;
    using codes_type::parameter_offset;
    using codes_type::several_widths;
    using codes_type::token_axis;
    static constexpr grid options = Options;
    static_assert(detail::grid_encoder<Encoder>,
                  "kvq::channel_grid<grid{...}, encoder, parameters, token scales>: the second argument must "
                  "be an encoder, such as min_max");
    static_assert(token_scale_policy<TokenScales>,
                  "kvq::channel_grid<grid{...}, encoder, parameters, token scales>: token scales are "
                  "no_token_scales, token_scales<byte_params> or token_scales<params<P>>");
    static_assert(!several_widths || !TokenScales::present,
                  "kvq::channel_grid: keys of several widths have no token scales");

    static constexpr bool supports(tensor role) noexcept { return role == tensor::key || !several_widths; }

    channel_grid() = default;
    explicit channel_grid(Encoder e) requires(!codes_type::several_widths) : encoder(std::move(e)) {}
    /// plan: for every layer and head of the caches that use it; null: the same widths everywhere. Raises kvq::error when the orders
    /// of a plan are not permutations, or when its widths do not fit the words of a row.
    explicit channel_grid(std::shared_ptr<const width_plan> plan,
                          Encoder e = {}) requires(codes_type::several_widths)
        : codes_type(std::move(plan)), encoder(std::move(e)) {}
    /// Takes what it needs from the statistics: a plan for several widths, and feedback, if the encoder takes it and the statistics
    /// hold products of queries.
    explicit channel_grid(const calibration& statistics)
        : codes_type(statistics), encoder(detail::make_encoder<Encoder>(statistics, this->width_plan_of())) {}

    /// Name of the format; encoders do not change it.
    short_text name() const { return codes_type::name() + "-" + parameters::name() + TokenScales::name(); }

    /// Raises kvq::error for blocks of more than 1024 tokens or channels.
    static constexpr std::size_t block_bytes(const block_shape& s) {
        if (s.tokens > detail::most_quantized || s.dim > detail::most_quantized)
            detail::expect(false, "channel_grid quantizes blocks of up to ", detail::most_quantized,
                           " tokens and channels, got ", s.tokens, " x ", s.dim);
        return detail::round_up(token_scale_offset(s) + TokenScales::bytes(token_axis(s).padded_size()),
                                std::size_t{16});
    }

    std::uint32_t quantize(const block_shape& s, block_id id, float* values, std::byte* block) const {
        return quantize_by(encoder, s, id, values, nullptr, block);
    }
    /// Quantizes values that were quantized before. scales_of_tokens: their last token scales (a float per token, overwritten), or null.
    std::uint32_t requantize(const block_shape& s, block_id id, float* values, float* scales_of_tokens,
                             std::byte* block) const {
        return quantize_by(detail::grid_keeper<Encoder>{encoder}, s, id, values, scales_of_tokens, block);
    }
    /// Chooses the stored token scales of requantize(), from known or fitted ones.
    static void settle_token_scales(const block_shape& s, const float* values,
                                    float* scales_of_tokens) requires(!codes_type::several_widths) {
        const grouped_axis tokens = token_axis(s);
        for (int g = 0; g < tokens.groups(); ++g)
            detail::settle_token_scales(values + g * tokens.group * s.dim, tokens.group_size(g), s.dim,
                                        codes_type::top, scales_of_tokens + g * tokens.group);
    }
    /// The token scale of every token, for requantize() of the next scheme.
    static void read_token_scales(const block_shape& s, const std::byte* block,
                                  float* out) requires(TokenScales::present) {
        const grouped_axis tokens = token_axis(s);
        for (int t = 0; t < s.tokens; ++t)
            out[t] = TokenScales::token_scale(block + token_scale_offset(s), tokens.slot(t));
    }

    void dequantize(const block_shape& s, block_id id, const std::byte* block, float* values) const {
        const grouped_axis tokens = token_axis(s);
        float scales[detail::most_quantized], biases[detail::most_quantized];
        [[maybe_unused]] float token_scale[TokenScales::present ? detail::most_slots : 1];
        if constexpr (TokenScales::present)
            TokenScales::template load<detail::plain_loads>(block + token_scale_offset(s),
                                                            tokens.padded_size(), token_scale);
        for (int g = 0; g < tokens.groups(); ++g) {
            load<detail::plain_loads>(s, block, g, scales, biases);
            const int begin = g * tokens.group;
            this->each_code(s, id, block, begin, begin + tokens.group_size(g),
                            [&]<int Bits>(int t, int place, int code) {
                                float x = biases[place];
                                if constexpr (Bits > 0) x = detail::affine_value(code, scales[place], x);
                                if constexpr (TokenScales::present) x *= token_scale[tokens.slot(t)];
                                values[t * s.dim + place] = x;
                            });
        }
        if constexpr (several_widths)
            for (int t = 0; t < s.tokens; ++t) this->restore_output(s, id, values + t * s.dim);
    }

    /// One value, equal to that of dequantize(), for code that reads single values.
    KVQ_HD static float value(const block_shape& s, const std::byte* block, int token, int channel) noexcept
        requires(!codes_type::several_widths) {
        const float y = value_of(s, codes_type::code(s, block, token, channel), block, token, channel);
        if constexpr (TokenScales::present)
            return detail::rounded_product(
                y, TokenScales::token_scale(block + token_scale_offset(s), token_axis(s).slot(token)));
        else
            return y;
    }
    /// The same for several widths, by place.
    template <class Quads>
    KVQ_HD static float value(const block_shape& s, const Quads& quads, const std::byte* block, int token,
                              int place) noexcept requires(codes_type::several_widths) {
        return value_of(s, codes_type::template code<0>(s, quads, block, token, place), block, token, place);
    }

    // Folding with one width (schemes/concepts.hpp): channels are the rows of V and the columns of K; tokens are the other axis.

    KVQ_HD static constexpr fold_use fold(tensor role) noexcept requires(!codes_type::several_widths) {
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
    // Parameters of segments, for several widths.
    static constexpr detail::grid_columns<Options, parameters> columns(const block_shape& s) noexcept
        requires(codes_type::several_widths) {
        return {parameter_offset(s), token_axis(s).groups(), channel_slots(s)};
    }

    /// Scales and biases of one group of tokens, for every channel slot (several widths: place).
    template <class Backend>
    void load(const block_shape& s, const std::byte* block, int group, float* scales, float* biases) const {
        const std::byte* const at = block + parameter_offset(s);
        const int groups = token_axis(s).groups(), n = channel_slots(s);
        parameters::template load_scales<Backend>(at, groups, n, group, 0, n, scales);
        parameters::template load_biases<Backend>(at, groups, n, group, 0, n, biases);
    }

    /// Raises kvq::error if the statistics belong to another shape; a cache calls it when it is made.
    void check(const cache_shape& shape, tensor) const {
        codes_type::check_shape(shape);
        if constexpr (requires { encoder.check(shape); }) encoder.check(shape);
    }

    KVQ_HD static constexpr std::size_t token_scale_offset(const block_shape& s) noexcept {
        return parameter_offset(s) + parameters::bytes(token_axis(s).groups(), channel_slots(s));
    }

    [[no_unique_address]] Encoder encoder{};

private:
    template <class E>
    std::uint32_t quantize_by(const E& fitted, const block_shape& s, block_id id, float* values,
                              [[maybe_unused]] float* known_scales, std::byte* block) const {
        std::memset(block, 0, block_bytes(s));
        const std::uint32_t not_finite = detail::bound_magnitudes(values, s.values());
        const grouped_axis tokens = token_axis(s);
        if constexpr (several_widths)
            for (int t = 0; t < s.tokens; ++t) this->transform_query(s, id, values + t * s.dim);
        if constexpr (TokenScales::present) {
            float fitted_scales[detail::most_quantized];
            float* const token_scale = known_scales ? known_scales : fitted_scales;
            if (!known_scales) detail::fit_token_scales(values, s.tokens, s.dim, token_scale);
            if constexpr (E::rounding == parameter_rounding::settled)
                settle_token_scales(s, values, token_scale);
            for (int g = 0; g < tokens.groups(); ++g)
                TokenScales::store(block + token_scale_offset(s), tokens.group_begin(g),
                                   token_scale + g * tokens.group, tokens.group_size(g));
            for (int t = 0; t < s.tokens; ++t)
                for (int c = 0; c < s.dim; ++c) values[t * s.dim + c] /= token_scale[t];
        }
        std::uint8_t tops[detail::most_quantized];
        this->set_tops(s, id, tops);
        // Only keys are multiplied with queries: statistics of queries do not apply to values.
        const block_id statistics_of = s.role == tensor::key ? id : block_id{-1, -1};
        for (int g = 0; g < tokens.groups(); ++g)
            detail::quantize_channels<parameters>(
                fitted, statistics_of, values + g * tokens.group * s.dim, tokens.group_size(g), s.dim, s.dim,
                [&](int c) { return static_cast<int>(tops[c]); }, block + parameter_offset(s),
                tokens.groups(), channel_slots(s), g);
        this->pack(s, id, values, block);
        return not_finite;
    }

    /// y of one code, before the token's scale.
    KVQ_HD static float value_of(const block_shape& s, int code, const std::byte* block, int token,
                                 int place) noexcept {
        const grouped_axis tokens = token_axis(s);
        const int group = token / tokens.group;
        const std::byte* const at = block + parameter_offset(s);
        return detail::affine_value(code,
                                    parameters::scale(at, tokens.groups(), channel_slots(s), group, place),
                                    parameters::bias(at, tokens.groups(), channel_slots(s), group, place));
    }
};

static_assert(foldable<channel_grid<grid{.bits = {4}}>>);
static_assert(segmented<channel_grid<grid{.bits = {4, 2, 0}, .average_eighths = 16}>> &&
              transforming<channel_grid<grid{.bits = {4, 2, 0}, .average_eighths = 16}>>);
static_assert(!value_scheme<channel_grid<grid{.bits = {4, 2, 0}, .average_eighths = 16}>>);

}  // namespace kvq::inline KVQ_TAGGED
