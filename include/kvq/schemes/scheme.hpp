// scheme<codes, levels, granularity, params, encoder, token scales>: all affine methods are aliases of it.
//
//   x^ = r * (scale * code + bias)         r = 1 without token scales; symmetric levels have no bias
//
//   codes         bits<B>, or mixed_bits<...>: several widths, with a plan of channels
//                 (schemes/mixed_bits.hpp)
//   levels        asymmetric or symmetric (quant/affine.hpp, quant/symmetric.hpp), or a type of your own
//                 (quant/levels.hpp); where its values are not of the form above, attention dequantizes
//                 blocks
//   granularity   per_token<G> or per_channel<G>: which values share a scale and bias (quant/granularity.hpp)
//   params        how they are stored: params<P>, packed_params<P> or byte_params (quant/block_params.hpp)
//   encoder       how the grid of a group is found (quant/encoders.hpp); it changes neither the format of the
//                 block nor dequantizing
//   token scales  no_token_scales, or token_scales<params<P> or byte_params>: r, a scale per token
//                 (quant/token_scales.hpp)
//
// Block: schemes/block_layout.hpp. Contract: quant/affine.hpp and quant/encoders.hpp, of x / r where there
// are token scales. NaN and infinities never set parameters; NaN is quantized as the value nearest zero,
// infinities saturate. Blocks whose encoder is not `enclosing` over params<P> have at most 1024 tokens
// (per_channel) and channels, and magnitudes above 2^100 saturate.
// Example: scheme<bits<3>, asymmetric, per_channel<32>, params<float16>>. Source: the aliases (affine.hpp,
// int8.hpp, kivi.hpp, presets.hpp) name theirs.
#pragma once

#include <cstring>

#include "../core/text.hpp"
#include "../quant/encoder_traits.hpp"
#include "../quant/error_feedback.hpp"
#include "../quant/levels.hpp"
#include "../quant/token_scales.hpp"
#include "block_layout.hpp"
#include "scheme_codes.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

namespace detail {

template <class Codes, class Levels, class Granularity>
concept scheme_arguments = granularity<Granularity> && requires {
    { Codes::several_widths } -> std::convertible_to<bool>;
    { Levels::has_bias } -> std::convertible_to<bool>;
    { Levels::min_bits } -> std::convertible_to<int>;
};
/// Bits of a code; 0: several widths.
template <class Codes>
inline constexpr int one_width = 0;
template <int Bits>
inline constexpr int one_width<bits<Bits>> = Bits;
/// May attention multiply the codes? (Several widths are asymmetric.)
template <class Codes, class Levels>
inline constexpr bool codes_fold = Codes::several_widths;
template <int Bits, class Levels>
inline constexpr bool codes_fold<bits<Bits>, Levels> = affine_levels<Levels, Bits>;

/// The columns of a block with several widths as one matrix: where attention finds their parameters.
template <class Layout, class Parameters>
struct mixed_columns {
    KVQ_HD static constexpr code_layout<8> codes(const block_shape& s) noexcept {
        return {Layout{}.cut(s), {s.dim, s.dim}};
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

template <class Codes, class Levels, class Granularity, class Params = params<float16>,
          class Encoder = enclosing, class TokenScales = no_token_scales>
struct scheme : detail::scheme_codes<Codes, Granularity> {
private:
    static constexpr bool in_order = detail::scheme_arguments<Codes, Levels, Granularity>;
    static_assert(
        in_order,
        "kvq::scheme<bits<B>, levels, granularity, params<P>>: in this order, levels such as asymmetric, "
        "the granularity per_token<G> or per_channel<G>");
    static_assert(token_scale_policy<TokenScales>,
                  "kvq::scheme<bits<B>, levels, granularity, params<P>, encoder, token scales>: token scales "
                  "are no_token_scales, token_scales<byte_params> or token_scales<params<P>>");
    using base = detail::scheme_codes<Codes, Granularity>;

public:
    // A wrong argument gives one error: another one takes its place behind it.
    using levels = std::conditional_t<in_order, Levels, asymmetric>;
    static constexpr bool folds = detail::codes_fold<Codes, levels>;
    using attends_as = std::conditional_t<folds, scheme, void>;
    using granularity_type = std::conditional_t<in_order, Granularity, per_channel<>>;
    using encoder_type = Encoder;
    using token_scale_type =
        std::conditional_t<token_scale_policy<TokenScales>, TokenScales, no_token_scales>;
    using parameters = block_parameters<Params>;
    using parameter = typename parameters::stored;
    static constexpr bool several_widths = Codes::several_widths, by_token = granularity_type::on_tokens;
    /// Is the grid of a group its range, with parameters that any granularity and all levels take?
    static constexpr bool fits_range = plain_params<Params> && std::same_as<Encoder, enclosing>;
    static_assert(
        detail::grid_encoder<Encoder>,
        "kvq::scheme<bits<B>, levels, granularity, params<P>, encoder>: the fifth argument must be an "
        "encoder, such as least_squares");
    static_assert(fits_range || std::same_as<levels, asymmetric>,
                  "kvq::scheme: levels other than asymmetric take params<P> and the encoder enclosing");
    static_assert(!by_token || plain_params<Params>,
                  "kvq::scheme: per_token takes bits<B> and params<P>, since packed and 8-bit parameters, "
                  "token scales and several widths are per channel");
    static_assert(!several_widths || !token_scale_type::present,
                  "kvq::scheme: keys of several widths have no token scales");
    static_assert(!plain_params<Params> || (!token_scale_type::present && !several_widths),
                  "kvq::scheme: token scales and several widths take packed_params<P> or byte_params");
    static_assert(detail::one_width<Codes> < 1 || levels::min_bits <= detail::one_width<Codes>,
                  "kvq::scheme: symmetric levels need at least 2 bits");
    static_assert(detail::levels_named<levels>,
                  "kvq::scheme: levels of your own need a name (static constexpr const char*) of letters, "
                  "digits, - and _, which is not affine or int");
    static constexpr int zero_code = [] {
        if constexpr (several_widths)
            return 0;
        else
            return levels::template zero_code<detail::one_width<Codes>>;
    }();

    static constexpr bool supports(tensor role) noexcept { return role == tensor::key || !several_widths; }

    /// What kernels know of the blocks (schemes/codec_spec.hpp); group: as codec_spec::group.
    KVQ_HD KVQ_INLINE static constexpr codec_spec codec_of_group(int group) noexcept {
        codec_spec c;
        if constexpr (several_widths) {
            for (const int width : Codes::width_list::values)
                c.widths[c.width_count++] = static_cast<unsigned char>(width);
            c.average_eighths = static_cast<unsigned char>(Codes::eighths);
            c.narrow_width = static_cast<unsigned char>(Codes::narrow_width);
        } else {
            c.set_width(Codes::value);
        }
        c.content = block_content::codes;
        if (folds) c.reading = several_widths ? block_reading::segments : block_reading::codes;
        c.levels = std::same_as<levels, asymmetric>  ? level_kind::asymmetric
                   : std::same_as<levels, symmetric> ? level_kind::symmetric
                                                     : level_kind::own;
        c.has_bias = levels::has_bias;
        c.zero_code = zero_code;
        c.per_token = by_token;
        c.group = group;
        c.parameters = detail::storage_of<Params>;
        c.parameter_bytes = sizeof(parameter);
        c.parameter_padding = plain_params<Params> ? 16 : 1;
        c.token_scales = detail::storage_of<token_scale_type>;
        c.token_scale_bytes = static_cast<int>(token_scale_type::bytes(1));
        c.encoder = fits_range                                ? encoder_kind::range
                    : !detail::encoder_traits<Encoder>::known ? encoder_kind::own
                    : Encoder::corrects_mean                  ? encoder_kind::mean_corrected
                                                              : encoder_kind::fitted;
        return c;
    }
    /// The same offsets for every object of the type, unless the group size is a value.
    struct layout_type : block_layout {
        KVQ_HD KVQ_INLINE constexpr explicit layout_type(
            const granularity_type& g = granularity_type{}) noexcept
            : block_layout{codec_of_group(g.group)} {}
        /// Codes of one width; they start at the block's first byte.
        KVQ_HD KVQ_INLINE constexpr auto codes(const block_shape& s) const noexcept
            requires(!Codes::several_widths) {
            return code_layout<Codes::value>{this->rows(s), this->cols(s)};
        }
    };

    [[no_unique_address]] Encoder encoder{};

    scheme() = default;
    /// For a granularity whose group size is a value.
    explicit scheme(Granularity g, Encoder e = {}) requires(!several_widths)
        : base(g), encoder(std::move(e)) {}
    explicit scheme(Encoder e) requires(!several_widths && !fits_range) : encoder(std::move(e)) {}
    /// plan: for every layer and head of the caches that use it; null: the same widths everywhere. Raises
    /// kvq::error when the orders of a plan are not permutations, or when its widths do not fit the words of
    /// a row.
    explicit scheme(std::shared_ptr<const width_plan> plan, Encoder e = {}) requires several_widths
        : base(std::move(plan)),
          encoder(std::move(e)) {}
    /// Takes what it needs from the statistics: a plan for several widths, and feedback, if the encoder takes
    /// it and the statistics hold products of queries.
    explicit scheme(const calibration& statistics) requires(
        !plain_params<Params> || std::constructible_from<Encoder, const calibration&, const width_plan*>)
        : base(statistics), encoder(detail::make_encoder<Encoder>(statistics, base::width_plan_of())) {}

    /// Name of the format; encoders do not change it. It is part of saved files.
    short_text name() const {
        if constexpr (several_widths) {
            return base::width_name() + group_name() + "-" + parameters::name();
        } else {
            const short_text width = short_text::of(base::code_bits);
            if constexpr (plain_params<Params>)
                return short_text(levels::name) + width + "-" + this->granularity.name() + "-" +
                       parameters::name();
            else
                return short_text("channel") + width + group_name() + "-" + parameters::name() +
                       token_scale_type::name();
        }
    }
    /// Of the plan of widths, 0 without one; or of levels that are not the library's. Where the name says all
    /// there is none (io/scheme_identity.hpp).
    std::uint64_t fingerprint() const noexcept
        requires(!plain_params<Params> || !detail::library_levels<levels>) {
        if constexpr (several_widths)
            return base::fingerprint();
        else if constexpr (!detail::library_levels<levels>)
            return detail::levels_fingerprint<levels, base::code_bits>();
        else
            return 0;
    }

    KVQ_HD constexpr layout_type layout() const noexcept {
        if constexpr (several_widths)
            return layout_type{};
        else
            return layout_type{this->granularity};
    }
    /// Raises kvq::error for blocks of more than 1024 channels, or per channel 1024 tokens, unless the grid
    /// of a group is its range.
    KVQ_HD constexpr std::size_t block_bytes(const block_shape& s) const {
#if !defined(__CUDA_ARCH__)
        if (!fits_range &&
            ((!by_token && s.tokens > detail::most_quantized) || s.dim > detail::most_quantized))
            detail::expect(false, "encoders quantize blocks of up to ", detail::most_quantized,
                           " tokens and channels, got ", s.tokens, " x ", s.dim);
#endif
        return layout().bytes(s);
    }

    /// values: [tokens][dim]; overwritten unless fits_range. Returns how many were not finite.
    std::uint32_t quantize(const block_shape& s, block_id id,
                           std::conditional_t<fits_range, const float, float>* values,
                           std::byte* block) const {
        if constexpr (fits_range)
            return quantize_ranges(s, values, block);
        else
            return quantize_by(encoder, s, id, values, nullptr, block);
    }
    /// Quantizes values that were quantized before. scales_of_tokens: their last token scales (a float per
    /// token, overwritten), or null.
    std::uint32_t requantize(const block_shape& s, block_id id, float* values, float* scales_of_tokens,
                             std::byte* block) const requires(!fits_range && !by_token) {
        return quantize_by(detail::grid_keeper<Encoder>{encoder}, s, id, values, scales_of_tokens, block);
    }
    /// Chooses the stored token scales of requantize(), from known or fitted ones.
    void settle_token_scales(const block_shape& s, const float* values, float* scales_of_tokens) const
        requires(!several_widths) {
        const grouped_axis tokens = layout().cut(s);
        for (int g = 0; g < tokens.groups(); ++g)
            detail::settle_token_scales(values + g * tokens.group * s.dim, tokens.group_size(g), s.dim,
                                        base::top, scales_of_tokens + g * tokens.group);
    }
    /// The token scale of every token, for requantize() of the next scheme.
    void read_token_scales(const block_shape& s, const std::byte* block, float* out) const
        requires(token_scale_type::present) {
        const grouped_axis tokens = layout().cut(s);
        for (int t = 0; t < s.tokens; ++t)
            out[t] = token_scale_type::token_scale(block + layout().token_scale_offset(s), tokens.slot(t));
    }

    void dequantize(const block_shape& s, block_id id, const std::byte* block, float* values) const {
        if constexpr (plain_params<Params>)
            dequantize_groups(s, block, values);
        else
            dequantize_channels(s, id, block, values);
    }

    /// One value, equal to that of dequantize(), for code that reads single values. Of transformed<scheme,
    /// ...> the value before the transform is undone, for which all channels of a token are needed.
    KVQ_HD static float value(const block_shape& s, const std::byte* block, int token, int channel) noexcept
        requires(!several_widths && detail::fixed_group<granularity_type>) {
        constexpr layout_type at{};
        const auto codes = at.codes(s);
        const bool key = s.role == tensor::key;
        const int code =
            static_cast<int>(unpack_code(codes, block, key ? token : channel, key ? channel : token));
        const float y = value_of(s, code, block, token, channel);
        if constexpr (token_scale_type::present)
            return detail::rounded_product(
                y, token_scale_type::token_scale(block + at.token_scale_offset(s), at.cut(s).slot(token)));
        else
            return y;
    }
    /// The same for several widths, by place.
    template <class Quads>
    KVQ_HD static float value(const block_shape& s, const Quads& quads, const std::byte* block, int token,
                              int place) noexcept requires several_widths {
        return value_of(s, base::template code<0>(s, quads, block, token, place), block, token, place);
    }

    /// Raises kvq::error if a plan or statistics belong to another shape; a cache calls it when it is made.
    void check(const cache_shape& shape, tensor) const {
        base::check_shape(shape);
        if constexpr (requires { encoder.check(shape); }) encoder.check(shape);
    }

    // Folding with one width (schemes/concepts.hpp): token scales belong to the other axis than parameters.

    KVQ_HD static constexpr fold_use fold(tensor role) noexcept requires(!several_widths && folds) {
        return detail::on_rows<granularity_type>(role)
                   ? fold_use{true, levels::has_bias, token_scale_type::present, false}
                   : fold_use{token_scale_type::present, false, true, levels::has_bias};
    }
    template <class Backend>
    void row_parameters(const block_shape& s, block_id, const std::byte* block, int col_group, float* scale,
                        float* bias) const {
        load_axis<Backend>(s, block, col_group, true, scale, bias);
    }
    template <class Backend>
    void col_parameters(const block_shape& s, block_id, const std::byte* block, int row_group, float* scale,
                        float* bias) const {
        load_axis<Backend>(s, block, row_group, false, scale, bias);
    }
    // Parameters of segments, for several widths.
    static constexpr detail::mixed_columns<layout_type, parameters> columns(
        const block_shape& s) noexcept requires several_widths {
        constexpr layout_type at{};
        return {at.scale_offset(s), at.groups(s), at.slot_count(s)};
    }

    /// Scales and biases of one group, for every slot of the lines (several widths: place).
    template <class Backend>
    void load(const block_shape& s, const std::byte* block, int group, float* scales, float* biases) const {
        const std::byte* const at = block + layout().scale_offset(s);
        const int groups = layout().groups(s), n = layout().slot_count(s);
        parameters::template load_scales<Backend>(at, groups, n, group, 0, n, scales);
        if constexpr (levels::has_bias)
            parameters::template load_biases<Backend>(at, groups, n, group, 0, n, biases);
    }

    // Groups of a block with params<P>, for schemes that are built on this one.

    /// Values that share parameters: a part of a row or of a column.
    struct value_group {
        bool on_row;
        int line, first, size;  // row (column), and the part of it
        int number, slot;       // position of its parameters

        int row(int i) const noexcept { return on_row ? line : first + i; }
        int col(int i) const noexcept { return on_row ? first + i : line; }
        /// Index of member i among the values of the block.
        int index(const block_shape& s, int i) const noexcept { return scheme::index(s, row(i), col(i)); }
    };
    /// Calls f(value_group) for every group, line by line.
    template <class F>
    void each_group(const block_shape& s, F&& f) const {
        const bool rows = detail::on_rows<granularity_type>(s.role);
        const grouped_axis lines = layout().lines(s), cut = layout().cut(s);
        for (int line = 0; line < lines.size; ++line)
            for (int g = 0; g < cut.groups(); ++g)
                f(value_group{rows, line, g * cut.group, cut.group_size(g), g, lines.slot(line)});
    }
    KVQ_HD constexpr std::size_t parameter_offset(const block_shape& s, int group,
                                                  int slot) const noexcept requires plain_params<Params> {
        return layout().parameter_offset(s, group, slot);
    }
    KVQ_HD void store_parameters(const block_shape& s, std::byte* block, int group, int slot,
                                 const stored_parameters<parameter>& stored) const noexcept requires
        plain_params<Params> {
        std::byte* at = block + parameter_offset(s, group, slot);
        detail::store_as(at, stored.scale);
        if constexpr (levels::has_bias) detail::store_as(at + layout().section_bytes(s), stored.bias);
    }

private:
    short_text group_name() const {
        const int group = layout().codec.group;
        return group ? "-g" + short_text::of(group) : short_text("");
    }

    std::uint32_t quantize_ranges(const block_shape& s, const float* values,
                                  std::byte* block) const requires fits_range {
        static_assert(detail::quantizing_levels<levels, base::code_bits, parameter>,
                      "kvq::scheme: levels of your own need `template <int Bits, class P> static "
                      "stored_parameters<P> fit(float lo, float hi)` and `template <int Bits> static int "
                      "code(float x, float bias, float inverse)`");
        std::memset(block, 0, layout().bytes(s));
        const auto codes = base::codes(s);
        std::uint32_t not_finite = 0;
        each_group(s, [&](const value_group& g) {
            float lo = 0.0f, hi = 0.0f;
            bool any = false;
            for (int i = 0; i < g.size; ++i) {
                const float x = values[g.index(s, i)];
                if (!detail::is_finite(x)) {
                    ++not_finite;
                    continue;
                }
                lo = any ? detail::smaller(lo, x) : x;
                hi = any ? detail::larger(hi, x) : x;
                any = true;
            }
            const auto stored = levels::template fit<base::code_bits, parameter>(lo, hi);
            store_parameters(s, block, g.number, g.slot, stored);
            const float scale = static_cast<float>(stored.scale), bias = static_cast<float>(stored.bias);
            if constexpr (!detail::library_levels<levels> || !float_format<parameter>)
                detail::expect(scale >= 0.0f && detail::is_finite(scale) && detail::is_finite(bias), name(),
                               " has the scale ", scale, " and the bias ", bias, " for values from ", lo,
                               " to ", hi, "; scales are finite and not negative, biases are finite");
            const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
            for (int i = 0; i < g.size; ++i) {
                const float x = values[g.index(s, i)];
                const int code = levels::template code<base::code_bits>(x, bias, inverse);
                if constexpr (!detail::library_levels<levels>)
                    detail::expect(code >= 0 && code <= base::top, name(), " has the code ", code, " for ", x,
                                   "; codes of ", base::code_bits, " bits are 0 to ", base::top);
                pack_code(codes, block, g.row(i), g.col(i), static_cast<unsigned>(code));
            }
        });
        return not_finite;
    }

    /// Where quantize_group() stores: parameters of all lines in a group, or of one line in all groups.
    struct group_store {
        std::byte* at;
        int groups, slot_count, group;
        void biases(float* p, int n, parameter_rounding rounding) const {
            parameters::store_biases(at, groups, slot_count, group, p, n, rounding);
        }
        void scales(float* p, int n, parameter_rounding rounding) const {
            parameters::store_scales(at, groups, slot_count, group, p, n, rounding);
        }
    };
    struct line_store {
        std::byte* at;
        int groups, slot_count, slot;
        void biases(float* p, int n, parameter_rounding rounding) const {
            for (int g = 0; g < n; ++g)
                p[g] = parameters::store_bias(at, groups, slot_count, g, slot, p[g], {}, rounding);
        }
        void scales(float* p, int n, parameter_rounding rounding) const {
            for (int g = 0; g < n; ++g)
                p[g] = parameters::store_scale(at, groups, slot_count, g, slot, p[g], {}, rounding);
        }
    };

    template <class E>
    std::uint32_t quantize_by(const E& fitted, const block_shape& s, block_id id, float* values,
                              [[maybe_unused]] float* known_scales, std::byte* block) const {
        const layout_type at = layout();
        std::memset(block, 0, block_bytes(s));
        const std::uint32_t not_finite = detail::bound_magnitudes(values, s.values());
        const grouped_axis cut = at.cut(s);
        if constexpr (several_widths)
            for (int t = 0; t < s.tokens; ++t) this->transform_query(s, id, values + t * s.dim);
        if constexpr (token_scale_type::present) {
            float fitted_scales[detail::most_quantized];
            float* const token_scale = known_scales ? known_scales : fitted_scales;
            if (!known_scales) detail::fit_token_scales(values, s.tokens, s.dim, token_scale);
            if constexpr (E::rounding == parameter_rounding::settled)
                settle_token_scales(s, values, token_scale);
            for (int g = 0; g < cut.groups(); ++g)
                token_scale_type::store(block + at.token_scale_offset(s), cut.group_begin(g),
                                        token_scale + g * cut.group, cut.group_size(g));
            for (int t = 0; t < s.tokens; ++t)
                for (int c = 0; c < s.dim; ++c) values[t * s.dim + c] /= token_scale[t];
        }
        std::uint8_t tops[detail::most_quantized];
        this->set_tops(s, id, tops);
        const auto largest_code = [&](int c) { return static_cast<int>(tops[c]); };
        // Only keys are multiplied with queries: statistics of queries do not apply to values.
        const block_id statistics_of = s.role == tensor::key ? id : block_id{-1, -1};
        std::byte* const stored = block + at.scale_offset(s);
        const int groups = at.groups(s), slot_count = at.slot_count(s);
        if constexpr (by_token)
            for (int t = 0; t < s.tokens; ++t)
                detail::quantize_group(fitted, statistics_of, values + t * s.dim, 1, s.dim, cut.group,
                                       largest_code,
                                       line_store{stored, groups, slot_count, at.lines(s).slot(t)});
        else
            for (int g = 0; g < groups; ++g)
                detail::quantize_group(fitted, statistics_of, values + g * cut.group * s.dim,
                                       cut.group_size(g), s.dim, 1, largest_code,
                                       group_store{stored, groups, slot_count, g});
        this->pack(s, id, values, block);
        return not_finite;
    }

    /// Of params<P>, on either axis.
    void dequantize_groups(const block_shape& s, const std::byte* block, float* values) const
        requires(!several_widths) {
        const auto codes = base::codes(s);
        const bool rows = detail::on_rows<granularity_type>(s.role);
        const grouped_axis lines = layout().lines(s), cut = layout().cut(s);
        const std::byte* const scales = block + layout().scale_offset(s);
        const std::size_t section = layout().section_bytes(s);
        const int slot_count = lines.padded_size(), row_count = s.rows(), col_count = s.cols();
        for (int r = 0; r < row_count; ++r)
            for (int c = 0; c < col_count; ++c) {
                const int g = (rows ? c : r) / cut.group, slot = lines.slot(rows ? r : c);
                const std::byte* const at =
                    scales + static_cast<std::size_t>(g * slot_count + slot) * sizeof(parameter);
                float bias = 0.0f;
                if constexpr (levels::has_bias)
                    bias = static_cast<float>(detail::load_as<parameter>(at + section));
                values[index(s, r, c)] = levels::template value<base::code_bits>(
                    static_cast<int>(unpack_code(codes, block, r, c)),
                    static_cast<float>(detail::load_as<parameter>(at)), bias);
            }
    }
    /// Of all other parameters, which are per channel.
    void dequantize_channels(const block_shape& s, block_id id, const std::byte* block, float* values) const {
        const grouped_axis tokens = layout().cut(s);
        float scales[detail::most_quantized], biases[detail::most_quantized];
        [[maybe_unused]] float token_scale[token_scale_type::present ? detail::most_slots : 1];
        if constexpr (token_scale_type::present)
            token_scale_type::template load<detail::plain_loads>(block + layout().token_scale_offset(s),
                                                                 tokens.padded_size(), token_scale);
        for (int g = 0; g < tokens.groups(); ++g) {
            load<detail::plain_loads>(s, block, g, scales, biases);
            const int begin = g * tokens.group;
            this->each_code(s, id, block, begin, begin + tokens.group_size(g),
                            [&]<int Bits>(int t, int place, int code) {
                                float x = biases[place];
                                if constexpr (Bits > 0) x = detail::affine_value(code, scales[place], x);
                                if constexpr (token_scale_type::present) x *= token_scale[tokens.slot(t)];
                                values[t * s.dim + place] = x;
                            });
        }
        if constexpr (several_widths)
            for (int t = 0; t < s.tokens; ++t) this->restore_output(s, id, values + t * s.dim);
    }

    /// y of one code, before the token's scale.
    KVQ_HD static float value_of(const block_shape& s, int code, const std::byte* block, int token,
                                 int channel) noexcept {
        constexpr layout_type at{};
        const std::byte* const stored = block + at.scale_offset(s);
        const int groups = at.groups(s), slot_count = at.slot_count(s);
        const int line = by_token ? token : channel, group = (by_token ? channel : token) / at.cut(s).group;
        const float scale = parameters::scale(stored, groups, slot_count, group, line);
        float bias = 0.0f;
        if constexpr (levels::has_bias) bias = parameters::bias(stored, groups, slot_count, group, line);
        if constexpr (several_widths)
            return detail::affine_value(code, scale, bias);
        else
            return levels::template value<base::code_bits>(code, scale, bias);
    }

    /// Parameters of a group on the axis that has them; token scales on the other one.
    template <class Backend>
    void load_axis(const block_shape& s, const std::byte* block, int group, bool rows, float* scale,
                   float* bias) const {
        if (detail::on_rows<granularity_type>(s.role) == rows)
            load<Backend>(s, block, group, scale, bias);
        else if constexpr (token_scale_type::present)
            token_scale_type::template load<Backend>(block + layout().token_scale_offset(s),
                                                     layout().cut(s).padded_size(), scale);
    }

    static constexpr int index(const block_shape& s, int row, int col) noexcept {
        return s.role == tensor::key ? row * s.dim + col : col * s.dim + row;
    }
};

namespace detail {
template <int Bits, class Levels, class Granularity, class Params, class Encoder>
requires(fixed_group<Granularity>&& plain_params<Params>) struct with_any_group<
    scheme<bits<Bits>, Levels, Granularity, Params, Encoder>> {
    using granularity_type = typename any_group_of<Granularity>::type;
    using type = scheme<bits<Bits>, Levels, granularity_type, Params, Encoder>;
    static type of(const scheme<bits<Bits>, Levels, Granularity, Params, Encoder>& fixed) {
        if constexpr (std::same_as<granularity_type, Granularity>)
            return fixed;
        else
            return type(granularity_type(Granularity::group), fixed.encoder);
    }
};

template <class Codes, class Levels, class Granularity, class Params, class Encoder, class TokenScales>
struct codec_maker<scheme<Codes, Levels, Granularity, Params, Encoder, TokenScales>> {
    using made = scheme<Codes, Levels, Granularity, Params, Encoder, TokenScales>;
    static constexpr codec_spec of_type() noexcept {
        return made::codec_of_group(fixed_group<Granularity> ? Granularity{}.group : any_group);
    }
    static constexpr codec_spec of(const made& s) noexcept { return s.layout().codec; }
};

// Levels that are not of the form of attention have no fold().
template <class Codes, class Levels, class Granularity, class Params, class Encoder, class TokenScales>
inline constexpr bool composed_by_library<scheme<Codes, Levels, Granularity, Params, Encoder, TokenScales>> =
    true;

// A group size as a value is part of the name.
template <int Bits, class Levels, class Granularity, class P, class Encoder>
inline constexpr bool name_says_all<scheme<bits<Bits>, Levels, Granularity, params<P>, Encoder>> = true;
template <int Bits, class Levels, class Granularity, class P, class Encoder>
inline constexpr bool quantizes_by_name<scheme<bits<Bits>, Levels, Granularity, params<P>, Encoder>> =
    std::is_empty_v<Encoder>;
}  // namespace detail

}}  // namespace kvq
