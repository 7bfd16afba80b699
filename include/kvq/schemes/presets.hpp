// Presets: the lowest error of kvq's schemes at a number of bits. Integer codes on affine grids.
//
// | preset | keys                                            | values                        | D128 / D64  |
// |--------|-------------------------------------------------|-------------------------------|-------------|
// | ref8   | 8 bits a channel over 64 tokens, fp16 params    | 8 bits, fp16 scale per token  | 8.44 / 8.50 |
// | hi6    | 6 bits a channel over the page, 8-bit params    | 6 bits, 8-bit scale per token | 6.16 / 6.19 |
// | std5   | 5 bits a channel over 64 tokens, 8-bit params   | 5 bits, 8-bit scale per token | 5.22 / 5.25 |
// | std4   | 4 bits, the same                                | 4 bits, the same              | 4.22 / 4.25 |
// | mix4   | 0, 3, 4 or 6 bits, 4 on average                 | 4 bits, the same              | 4.22 / 4.25 |
// | mix5   | 0, 4, 5, 6 or 8 bits, 5 on average, 32 tokens   | 4 bits, the same              | 4.84 / 4.88 |
// | mix6   | the same, 6 on average                          | 5 bits, the same              | 5.84 / 5.88 |
// | low3   | 0, 2, 3, 4 or 6 bits, 3 on average              | 3 bits, the same              | 3.22 / 3.25 |
// | low2   | 0, 2 or 4 bits, 2 on average                    | 2 bits, the same              | 2.22 / 2.25 |
// | hi6-h, std5-h, std4-h, low3-h, low2-h: 6 to 2 bits a channel over 64 tokens behind a Hadamard transform,
// |        with a scale per token                         | those of hi6 to low2          | B + 0.25 / 0.31 |
//
// Bits per value with pages of 128 tokens, without what a page shares (up to 0.02) and without the 16-bit
// window. Values are quantized per channel over the page, with a scale per token; hi6 to low2 need the
// window: 4 sinks and 32 or more recent tokens (cache/preset_options.hpp). Keys of hi6 to low2, those with -h
// excepted, can be made from statistics of keys and queries (quant/calibration.hpp). mix4 to mix6, low3 and
// low2 take a plan of channel widths from them, for which statistics of keys are enough. All of them take
// error feedback if the statistics hold products of queries. Without statistics they have even widths and no
// feedback.
// Measured errors: docs/lab/presets.md. Use as a pair: preset_options(make_formats<std4>()); with statistics
// options.keys = make_format<simd<>>(low2::keys(statistics)).
#pragma once

#include "affine.hpp"
#include "transformed.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

namespace detail {

/// Keys of mixed widths.
using preset_key_encoder = error_feedback<least_squares_below_3_bits>;

/// Where most channels have 2 bits, feedback has large errors to correct, and it cannot correct clipping
/// (docs/lab/quality.md).
using low2_key_encoder = error_feedback<min_max, least_squares_below_3_bits>;

/// Keys without statistics: a Hadamard matrix makes the channels of keys, and those of queries, alike, so
/// that one width is right for all of them; then a scale per token keeps a large token from widening the
/// ranges of others (OScaR, arXiv 2605.19660). Behind both, least squares are better than the range.
template <int Bits>
using hadamard_keys =
    hadamard<affine<Bits, per_channel<64>, byte_params, least_squares, token_scales<byte_params>>>;

/// Values of the presets: per channel over the page, one token scale, least squares and corrected mean.
template <int Bits, class Params = byte_params, class TokenScales = token_scales<byte_params>>
using preset_values = affine<Bits, per_channel<>, Params, mean_corrected<least_squares>, TokenScales>;

}  // namespace detail

struct ref8 {
    static constexpr const char* name = "ref8";
    using keys = affine<8, per_channel<64>>;
    using values = detail::preset_values<8, packed_params<float16>, token_scales<params<float16>>>;
};
struct hi6 {
    static constexpr const char* name = "hi6";
    using keys = affine<6, per_channel<>, byte_params, error_feedback<min_max>>;
    using values = detail::preset_values<6>;
};
struct std5 {
    static constexpr const char* name = "std5";
    using keys = affine<5, per_channel<64>, byte_params, error_feedback<min_max>>;
    using values = detail::preset_values<5>;
};
struct std4 {
    static constexpr const char* name = "std4";
    using keys = affine<4, per_channel<64>, byte_params, error_feedback<min_max>>;
    using values = detail::preset_values<4>;
};
/// The upper plane of nested8 (format/planes.hpp): values keep the range of a channel, so that the lower
/// plane reaches every number.
struct nested4 {
    static constexpr const char* name = "nested4";
    using keys = std4::keys;
    using values = affine<4, per_channel<>, byte_params, mean_corrected<min_max>, token_scales<byte_params>>;
};
struct mix4 {
    static constexpr const char* name = "mix4";
    using keys = mixed_affine<code_widths<6, 4, 3, 0>, average_eighths<32>, per_channel<64>, byte_params,
                              detail::preset_key_encoder>;
    using values = detail::preset_values<4>;
};
/// Keys have a bit more than values: in models they are what limits (docs/lab/quality.md).
struct mix5 {
    static constexpr const char* name = "mix5";
    using keys = mixed_affine<code_widths<8, 6, 5, 4, 0>, average_eighths<40>, per_channel<32>, byte_params,
                              detail::preset_key_encoder>;
    using values = detail::preset_values<4>;
};
struct mix6 {
    static constexpr const char* name = "mix6";
    using keys = mixed_affine<code_widths<8, 6, 5, 4, 0>, average_eighths<48>, per_channel<32>, byte_params,
                              detail::preset_key_encoder>;
    using values = detail::preset_values<5>;
};
struct low3 {
    static constexpr const char* name = "low3";
    using keys = mixed_affine<code_widths<6, 4, 3, 2, 0>, average_eighths<24>, per_channel<64>, byte_params,
                              detail::preset_key_encoder>;
    using values = detail::preset_values<3>;
};
struct low2 {
    static constexpr const char* name = "low2";
    using keys = mixed_affine<code_widths<4, 2, 0>, average_eighths<16>, per_channel<64>, byte_params,
                              detail::low2_key_encoder>;
    using values = detail::preset_values<2>;
};

// For models without statistics. Values gain nothing from a matrix; they are those of the preset without -h.
struct hi6_h {
    static constexpr const char* name = "hi6-h";
    using keys = detail::hadamard_keys<6>;
    using values = hi6::values;
};
struct std5_h {
    static constexpr const char* name = "std5-h";
    using keys = detail::hadamard_keys<5>;
    using values = std5::values;
};
struct std4_h {
    static constexpr const char* name = "std4-h";
    using keys = detail::hadamard_keys<4>;
    using values = std4::values;
};
struct low3_h {
    static constexpr const char* name = "low3-h";
    using keys = detail::hadamard_keys<3>;
    using values = low3::values;
};
struct low2_h {
    static constexpr const char* name = "low2-h";
    using keys = detail::hadamard_keys<2>;
    using values = low2::values;
};

/// Calls f(preset{}) for every preset, the smallest first.
template <class F>
constexpr void for_each_preset(F&& f) {
    f(low2{});
    f(low2_h{});
    f(low3{});
    f(low3_h{});
    f(std4{});
    f(std4_h{});
    f(mix4{});
    f(mix5{});
    f(std5{});
    f(std5_h{});
    f(mix6{});
    f(hi6{});
    f(hi6_h{});
    f(ref8{});
}

static_assert(foldable<std4::keys> && foldable<std4::values>);
static_assert(foldable<std4_h::keys> && foldable<std4_h::values>);

}}  // namespace kvq
