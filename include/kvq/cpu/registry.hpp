// The registry of kernels: which kernel quantizes, dequantizes and multiplies the blocks of a codec, and why
// none does.
//
//   quantize_choice(codec, shape), ...                 a kernel, by the header that holds it, or the reason
//                                                      in words
//   quantizer_of(codec), dequantizer_of(codec)         the kernels of a codec for any shape: what is compiled
//                                                      for its schemes
//
// The kernels of a codec follow from its spec (schemes/codec_spec.hpp); whether they take a block follows
// from its shape, and from the width of vectors. The rules know nothing else of an instruction set.
// vector_backend.hpp calls the kernel that the registry names; format::describe() (describe.hpp) returns the
// registry's text. What depends on values is not in it: blocks with NaN, infinities or values that need
// clamping are quantized by portable code.
// Contract: functions of these values; no kernel runs. bench/kernels.cpp prints the registry.
#pragma once

#include "../core/bits.hpp"
#include "../core/text.hpp"
#include "../schemes/block_layout.hpp"
#include "../schemes/transformed.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Most channels, and most tokens, of blocks that are quantized and dequantized channel by channel.
inline constexpr int most_channels = 512, most_tokens = 256;

/// A kernel, or why there is none.
struct kernel_choice {
    const char* header = nullptr;  ///< that holds the kernel; null: portable code runs
    const char* why = nullptr;     ///< in words, with # for `number` and `other`
    int number = 0, other = 0;

    constexpr explicit operator bool() const noexcept { return header != nullptr; }
    /// "cpu/quantize/quantize_block.hpp", or "portable: 80 channels are no multiple of 16".
    short_text text() const {
        if (header != nullptr) return header;
        short_text all = "portable: ";
        for (int i = 0, numbers = 0; why[i] != 0; ++i) {
            const char letter[] = {why[i], 0};
            if (why[i] == '#')
                all += short_text::of(numbers++ == 0 ? number : other);
            else
                all += letter;
        }
        return all;
    }
};

enum class quantizer : unsigned char { none, values, rows, ranges, channels };
enum class dequantizer : unsigned char { none, values, rows, groups, channels };

/// Parameters in params<P>, on either axis, with the library's levels: kernels work group by group.
constexpr bool by_groups(const codec_spec& c) noexcept {
    return c.content == block_content::codes && !c.several_widths() && c.levels != level_kind::own &&
           c.parameters != parameter_storage::bytes && c.parameter_padding > 1 && !c.has_token_scales();
}
/// Parameters of channels, in any storage, with token scales or several widths: kernels work channel by
/// channel.
constexpr bool by_channels(const codec_spec& c) noexcept {
    return c.content == block_content::codes && c.levels == level_kind::asymmetric && !c.per_token;
}
constexpr quantizer quantizer_of(const codec_spec& c) noexcept {
    if (c.content == block_content::values) return quantizer::values;
    if (c.content == block_content::rows) return quantizer::rows;
    if (by_groups(c) && c.encoder == encoder_kind::range) return quantizer::ranges;
    if (by_channels(c) && (c.encoder == encoder_kind::fitted || c.encoder == encoder_kind::mean_corrected))
        return quantizer::channels;
    return quantizer::none;
}
constexpr dequantizer dequantizer_of(const codec_spec& c) noexcept {
    if (c.content == block_content::values) return dequantizer::values;
    if (c.content == block_content::rows) return dequantizer::rows;
    if (by_groups(c)) return dequantizer::groups;
    if (by_channels(c)) return dequantizer::channels;
    return dequantizer::none;
}

/// Blocks of values of a type, read in vectors.
constexpr kernel_choice read_choice(const block_shape& s, float_type type, int width) noexcept {
    const int values_per_word = type == float_type::fp32 ? 1 : 2;
    if (s.dim % width != 0)
        return {nullptr, "# channels are no multiple of #, the width of a vector", s.dim, width};
    if (s.role == tensor::key && s.tokens % width != 0)
        return {nullptr, "# tokens are no multiple of #, the width of a vector", s.tokens, width};
    if (s.role == tensor::value && s.tokens % values_per_word != 0)
        return {nullptr, "# tokens do not fill words of #", s.tokens, values_per_word};
    return {"cpu/window/tokens.hpp"};
}

/// Blocks that are taken channel by channel.
constexpr kernel_choice channels_choice(const codec_spec& c, const block_shape& s,
                                        const char* header) noexcept {
    if (s.dim > most_channels) return {nullptr, "# channels are more than #", s.dim, most_channels};
    if (s.tokens > most_tokens) return {nullptr, "# tokens are more than #", s.tokens, most_tokens};
    if (s.dim % 4 != 0) return {nullptr, "# channels are no multiple of #", s.dim, 4};
    if (s.role == tensor::key) return {header};
    if (c.several_widths()) return {nullptr, "several widths are for keys"};
    if (s.tokens % 4 != 0) return {nullptr, "# tokens are no multiple of #", s.tokens, 4};
    // The columns of V are tokens: a step of codes belongs to one group.
    const int step = 4 * detail::quads_per_step(c.width());
    const grouped_axis tokens = block_layout{c}.cut(s);
    if (tokens.groups() > 1 && tokens.group % step != 0)
        return {nullptr, "groups of # tokens are no multiple of #, a word of codes", tokens.group, step};
    return {header};
}

/// Quantizing the values of tokens, or of a window that is read as it is.
constexpr kernel_choice quantize_choice(const codec_spec& c, const block_shape& s) noexcept {
    switch (quantizer_of(c)) {
        case quantizer::values:
            return {"cpu/window/tokens.hpp"};
        case quantizer::rows:
            return {"cpu/float_rows.hpp"};
        case quantizer::ranges:
            if (s.rows() < 2) return {nullptr, "the matrix of a block has # row", s.rows()};
            return {"cpu/quantize/quantize_block.hpp"};
        case quantizer::channels:
            // In lanes of tokens the mean of a channel's errors would need a sum across lanes.
            if (s.role == tensor::key && c.encoder == encoder_kind::mean_corrected)
                return {nullptr, "the encoder corrects means, and these are keys"};
            return channels_choice(c, s, "cpu/quantize/quantize_channels.hpp");
        default:
            break;
    }
    if (c.content == block_content::own) return {nullptr, "the scheme alone reads its bytes"};
    if (c.levels == level_kind::own) return {nullptr, "the levels are not the library's"};
    if (c.encoder == encoder_kind::own) return {nullptr, "the encoder is not the library's"};
    return {nullptr, "parameters per token are fitted in vectors by the encoder enclosing alone"};
}
/// Reading a window: blocks whose parameters are ranges are quantized from the window as it is, all others
/// from floats.
constexpr kernel_choice window_choice(const codec_spec& c, const block_shape& s, float_type window,
                                      int width) noexcept {
    if (quantizer_of(c) == quantizer::ranges && window != float_type::bf16)
        return {"cpu/quantize/block_values.hpp"};
    return read_choice(s, window, width);
}

constexpr kernel_choice dequantize_choice(const codec_spec& c, const block_shape& s, int width) noexcept {
    switch (dequantizer_of(c)) {
        case dequantizer::values:
            return read_choice(s, c.value_type, width);
        case dequantizer::rows:
            return {"cpu/float_rows.hpp"};
        case dequantizer::groups: {
            const grouped_axis cols = block_layout{c}.cols(s);
            if (cols.groups() > 1 && cols.group % width != 0)
                return {nullptr, "groups of # are no multiple of #, the width of a vector", cols.group,
                        width};
            return {"cpu/dequantize/dequantize_block.hpp"};
        }
        case dequantizer::channels:
            return channels_choice(c, s, "cpu/dequantize/dequantize_channels.hpp");
        default:
            break;
    }
    if (c.content == block_content::own) return {nullptr, "the scheme alone reads its bytes"};
    return {nullptr, "the levels are not the library's"};
}

constexpr kernel_choice attend_choice(const codec_spec& c, const block_shape& s, int width) noexcept {
    switch (c.reading) {
        case block_reading::values:
            return {"cpu/window/window_product.hpp"};
        case block_reading::rows:
            return {"cpu/float_rows.hpp"};
        case block_reading::token_rows:
            return {"cpu/rows/row_product.hpp"};
        case block_reading::codes:
            return {"cpu/product/code_product.hpp"};
        case block_reading::segments:
            return {"cpu/product/segment_product.hpp"};
        default:
            return dequantize_choice(c, s, width);
    }
}

/// The codec of the blocks of S, if nothing stands before it.
template <class S>
inline constexpr codec_spec plain_codec = codec_of<S>();
template <class Transform, class Inner>
inline constexpr codec_spec plain_codec<transformed<Transform, Inner>> = {};
/// Is S a transform before a scheme whose blocks kernels dequantize? (Types that are derived from one may
/// differ.)
template <class S>
inline constexpr bool is_transformed = false;
template <class Transform, class Inner>
inline constexpr bool is_transformed<transformed<Transform, Inner>> =
    plain_codec<Inner>.content !=
    block_content::values&& dequantizer_of(plain_codec<Inner>) != dequantizer::none;
template <class S>
concept transformed_scheme = is_transformed<S>;

/// What kernels do with the blocks of a scheme; the kernels of rows are called as those of groups are.
template <class S>
concept range_scheme = quantizer_of(plain_codec<S>)
== quantizer::ranges || quantizer_of(plain_codec<S>) == quantizer::rows;
template <class S>
concept channel_scheme = quantizer_of(plain_codec<S>)
== quantizer::channels;
template <class S>
concept composed_scheme = dequantizer_of(plain_codec<S>)
== dequantizer::groups || dequantizer_of(plain_codec<S>) == dequantizer::rows;
template <class S>
concept dequantized_by_channels = dequantizer_of(plain_codec<S>)
== dequantizer::channels;

/// The transform of tokens before the codec.
template <class Scheme>
inline constexpr token_transform transform_of{transforming<Scheme> ? transform_kind::order
                                                                   : transform_kind::none};
template <class Transform, class Inner>
inline constexpr token_transform transform_of<transformed<Transform, Inner>> =
    detail::value_of_transform<Transform>();

constexpr kernel_choice transform_choice(const token_transform& t, const block_shape& s, int width) noexcept {
    if (t.kind != transform_kind::hadamard)
        return {nullptr, "the transform is a matrix, or not the library's"};
    // Blocks are the powers of two in the number of channels, up to the largest: the last one is the
    // smallest.
    const int last = s.dim & -s.dim, smallest = t.largest > 0 ? detail::smaller(last, t.largest) : last;
    if (smallest < width)
        return {nullptr, "# channels have Hadamard blocks of less than #, the width of a vector", s.dim,
                width};
    return {"cpu/quantize/hadamard.hpp"};
}

/// The first of two kernels that has a reason not to run, or the second.
constexpr kernel_choice both(const kernel_choice& first, const kernel_choice& second) noexcept {
    return first ? second : first;
}

}}}  // namespace kvq::kernels
