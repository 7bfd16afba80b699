// codec_spec: what kernels know of the blocks of a scheme, as a value. Formats with equal specs share all
// kernels.
//
//   constexpr codec_spec a = codec_of<affine<4, per_channel<64>>>();      of a type
//   codec_spec b = codec_of(affine<4, per_token<any_group>>{...});        of an object, with its group size
//   codec_text(a)      "4-bit codes, asymmetric, per channel over 64 tokens, fp16 parameters"
//
// A scheme that the library composes makes its spec; encoders appear in it as far as kernels tell them apart,
// plans of widths, statistics and transforms do not. Other schemes have the content `own`: they are quantized
// and dequantized by themselves.
// Contract: a structural type without pointers, usable as a value, in constant expressions, and as a template
// argument. Offsets follow from the spec and the shape of a block: schemes/block_layout.hpp.
#pragma once

#include <concepts>

#include "../core/float_type.hpp"
#include "../core/text.hpp"
#include "../quant/block_params.hpp"
#include "../quant/granularity.hpp"
#include "concepts.hpp"

namespace kvq { inline namespace v0_3 {

enum class block_content : unsigned char {
    own,     ///< bytes that the scheme alone writes and reads
    values,  ///< 16- or 32-bit values, not quantized
    rows,    ///< 8-bit floats in rows of tokens, then a scale for each row
    codes    ///< codes, parameters and token scales of the library
};

/// What attention multiplies.
enum class block_reading : unsigned char {
    dequantized,  ///< a copy that dequantize() makes
    values,       ///< the values of the block
    rows,         ///< a copy of the codes of 8-bit floats
    token_rows,   ///< rows of tokens, in a layout that is a value
    codes,        ///< codes of one width
    segments      ///< codes of several widths, a range of columns for each
};

/// table: codes of 4 bits stand for 16 integers (code_entries, schemes/concepts.hpp). e4m3: 8-bit floats.
enum class level_kind : unsigned char { asymmetric, symmetric, table, e4m3, own };

/// How parameters or token scales are stored. bytes: byte_params; own: a type that is not the library's.
enum class parameter_storage : unsigned char { none, fp32, fp16, bf16, bytes, own };

enum class encoder_kind : unsigned char {
    range,           ///< the range of a group, its parameters rounded outside it, stored as params<P>
    fitted,          ///< another encoder of the library
    mean_corrected,  ///< the same, and the bias moves by the mean error of the group
    own              ///< not the library's
};

struct codec_spec {
    static constexpr int most_widths = 8;

    block_content content = block_content::own;
    block_reading reading = block_reading::dequantized;
    /// Type of the values, where the content is values.
    float_type value_type = float_type::fp32;

    /// Number of widths of codes, and the widths in bits, the widest first; 0: none are known.
    unsigned char width_count = 0;
    unsigned char widths[most_widths] = {};
    /// Average bits of a channel, in eighths, and the widest width that is at most the average.
    unsigned char average_eighths = 0, narrow_width = 0;

    level_kind levels = level_kind::own;
    bool has_bias = false;
    /// The code that stands for the bias, or for zero.
    int zero_code = 0;

    /// Does a token have parameters for each group of channels? Else a channel has parameters for each group
    /// of tokens.
    bool per_token = false;
    /// Values that share parameters; 0: all of the line; any_group: known at run time only.
    int group = 0;
    parameter_storage parameters = parameter_storage::none;
    /// Bytes of a scale, and of the unit to which scales are padded, and biases.
    int parameter_bytes = 0, parameter_padding = 1;
    parameter_storage token_scales = parameter_storage::none;
    int token_scale_bytes = 0;

    encoder_kind encoder = encoder_kind::own;

    KVQ_HD KVQ_NO_COPY constexpr void set_width(int bits) noexcept {
        width_count = 1;
        widths[0] = narrow_width = static_cast<unsigned char>(bits);
        average_eighths = static_cast<unsigned char>(8 * bits);
    }
    /// Bits of a code; 0: several widths, or none.
    KVQ_HD KVQ_NO_COPY constexpr int width() const noexcept { return width_count == 1 ? widths[0] : 0; }
    KVQ_HD KVQ_NO_COPY constexpr bool several_widths() const noexcept { return width_count > 1; }
    KVQ_HD KVQ_NO_COPY constexpr bool has_token_scales() const noexcept {
        return token_scales != parameter_storage::none;
    }
    /// Do the parameters belong to the rows of the block's matrix (core/shape.hpp)?
    KVQ_HD KVQ_NO_COPY constexpr bool on_rows(tensor role) const noexcept {
        return per_token == (role == tensor::key);
    }

    KVQ_NO_COPY friend constexpr bool operator==(const codec_spec&, const codec_spec&) noexcept = default;
};

}}  // namespace kvq

namespace kvq { inline namespace KVQ_TAGGED {

namespace detail {

template <float_format T>
inline constexpr parameter_storage float_storage = std::same_as<T, float>     ? parameter_storage::fp32
                                                   : std::same_as<T, float16> ? parameter_storage::fp16
                                                                              : parameter_storage::bf16;

/// Of params<P>, packed_params<P>, byte_params, no_token_scales and token_scales<...>.
template <class Params>
inline constexpr parameter_storage storage_of = parameter_storage::none;
template <class P>
inline constexpr parameter_storage storage_of<params<P>> = parameter_storage::own;
template <float_format P>
inline constexpr parameter_storage storage_of<params<P>> = float_storage<P>;
template <class P>
inline constexpr parameter_storage storage_of<packed_params<P>> = storage_of<params<P>>;
template <>
inline constexpr parameter_storage storage_of<byte_params> = parameter_storage::bytes;
template <class Params>
inline constexpr parameter_storage storage_of<token_scales<Params>> = storage_of<Params>;

/// The spec of a scheme. Schemes of the library specialise it beside their definition. Of all others, also of
/// types that are derived from those, kernels know what attention reads.
template <class Scheme>
struct codec_maker {
    static constexpr codec_spec of_type() noexcept {
        codec_spec c;
        if constexpr (foldable<Scheme>) {
            c.reading = block_reading::codes;
            c.set_width(Scheme::code_bits);
            if (with_code_entries<Scheme>) c.levels = level_kind::table;
            c.zero_code = Scheme::zero_code;
        } else if constexpr (segmented<Scheme>) {
            c.reading = block_reading::segments;
            for (const int width : Scheme::width_list::values)
                c.widths[c.width_count++] = static_cast<unsigned char>(width);
        } else if constexpr (full_precision<Scheme>) {
            c.content = block_content::values;
            c.reading = block_reading::values;
            c.value_type = float_type_of<typename Scheme::value_type>;
        }
        return c;
    }
    static constexpr codec_spec of(const Scheme&) noexcept { return of_type(); }
};

}  // namespace detail

/// The spec of all schemes of a type; a group size that is a value is any_group.
template <class Scheme>
constexpr codec_spec codec_of() noexcept {
    return detail::codec_maker<Scheme>::of_type();
}
template <class Scheme>
constexpr codec_spec codec_of(const Scheme& scheme) noexcept {
    return detail::codec_maker<Scheme>::of(scheme);
}

namespace detail {

constexpr const char* storage_text(parameter_storage s) noexcept {
    switch (s) {
        case parameter_storage::fp32:
            return "fp32";
        case parameter_storage::fp16:
            return "fp16";
        case parameter_storage::bf16:
            return "bf16";
        case parameter_storage::bytes:
            return "8-bit";
        case parameter_storage::own:
            return "own";
        default:
            return "no";
    }
}

}  // namespace detail

/// The spec in words.
inline short_text codec_text(const codec_spec& c) {
    if (c.content == block_content::own)
        return c.reading == block_reading::token_rows    ? "rows of tokens in the bytes of another system"
               : c.reading == block_reading::dequantized ? "blocks of its own"
               : c.levels == level_kind::table           ? "blocks of its own, read as codes of a table"
                                                         : "blocks of its own, read as codes";
    if (c.content == block_content::values)
        return short_text(c.value_type == float_type::fp32   ? "fp32"
                          : c.value_type == float_type::fp16 ? "fp16"
                                                             : "bf16") +
               " values";
    if (c.content == block_content::rows) return "e4m3 in rows of tokens, fp32 scales";
    short_text text;
    for (int i = 0; i < c.width_count; ++i)
        text += short_text(i ? "/" : "") + short_text::of(c.widths[i] + 0);
    text += "-bit codes, ";
    text += c.levels == level_kind::asymmetric  ? "asymmetric"
            : c.levels == level_kind::symmetric ? "symmetric"
                                                : "levels of its own";
    text += c.per_token ? ", per token over " : ", per channel over ";
    if (c.group == 0)
        text += c.per_token ? "all channels" : "the page";
    else
        text += (c.group == any_group ? short_text("any number of") : short_text::of(c.group)) +
                (c.per_token ? " channels" : " tokens");
    text += short_text(", ") + detail::storage_text(c.parameters) + " parameters";
    if (c.has_token_scales())
        text += short_text(", ") + detail::storage_text(c.token_scales) + " token scales";
    return text;
}

}}  // namespace kvq
