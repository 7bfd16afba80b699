// Which blocks kernels on a device know, and the scheme type that stands for all schemes of one codec.
//
//   no_reader(c, role)      why no kernel reads blocks of this codec; null: kernels do
//   no_quantizer(c, role)   why no kernel quantizes to it
//   no_tiles(c, shape)      why a prompt's attention does not read such blocks
//   codec_scheme<C>         the scheme with the codec C::value, with the encoder that its parameters have by
//                           default
//   behind_transform<S>     the same behind a transform, which is a value (device_transform.cuh)
//
// (Why warps of attend_warps.cuh do not: no_warps, decode/attention_memory.cuh.)
// Kernels are compiled for the scheme of a codec and not for that of a user, so formats with equal codecs
// share them. Kernels that read do not depend on the encoder; those that quantize do. (The codec itself is no
// argument of a kernel: nvcc 13 writes its value into code for the host that g++ cannot parse.)
// Contract: codec_of<codec_scheme<C>>() is C::value, but for the encoder.
#pragma once

#include <bit>
#include <concepts>
#include <type_traits>
#include <utility>

#include "../../schemes/affine.hpp"
#include "../../schemes/codec_spec.hpp"
#include "../../schemes/full.hpp"
#include "../../schemes/scheme.hpp"
#include "../../schemes/token_records.hpp"
#include "device_transform.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

template <class S>
inline constexpr codec_spec codec = codec_of<S>();

// What several reasons say.
inline constexpr const char* own_blocks = "the scheme alone reads its bytes";
inline constexpr const char* byte_floats = "codes are 8-bit floats";
inline constexpr const char* odd_pages = "pages have neither 16 tokens nor a multiple of 32";
inline constexpr const char* odd_groups = "groups are not a multiple of 32";
inline constexpr const char* wide_values = "pages hold fp32 values";

constexpr const char* no_reader(const codec_spec& c, tensor role) noexcept {
    if (c.content == block_content::values) return nullptr;
    if (c.content == block_content::own) return own_blocks;
    if (c.content == block_content::rows) return byte_floats;
    if (c.levels == level_kind::own) return "the levels are not the library's";
    if (c.levels == level_kind::table) return "codes stand for entries of a table";
    if (c.group == any_group) return "the group size is known at run time only";
    if (c.parameters == parameter_storage::own || c.token_scales == parameter_storage::own)
        return "the type of the parameters is not the library's";
    if (c.several_widths() && role == tensor::value) return "several widths are for keys";
    return nullptr;
}
constexpr const char* no_quantizer(const codec_spec& c, tensor role) noexcept {
    if (const char* const reason = no_reader(c, role)) return reason;
    if (c.content == block_content::values || c.encoder == encoder_kind::range) return nullptr;
    if (c.encoder == encoder_kind::own) return "the encoder is not the library's";
    if (c.per_token) return "parameters per token are fitted by the encoder enclosing alone";
    return nullptr;
}

/// Planes that a code of one of the widths has at most.
constexpr int most_planes(const codec_spec& c) noexcept {
    int most = 0;
    for (int i = 0; i < c.width_count; ++i) most = kvq::detail::larger(most, std::popcount(c.widths[i]));
    return most;
}

/// Would 32 neighbours in a line of `size` numbers have parameters of two groups?
constexpr bool has_odd_groups(const codec_spec& c, int size) noexcept {
    return c.group % 32 != 0 && c.group < size;
}

/// Tiles are made of 32 x 32 numbers, keys of several widths by rows of codes in one page, with a table of
/// two planes and 16-bit offsets. docs/guide/gpu.md ("Prompts") lists these conditions.
constexpr const char* no_tiles(const codec_spec& c, const block_shape& s) noexcept {
    if (s.dim % 32 != 0 || (s.dim > 256 && s.dim != 512))
        return "head_dim is not a multiple of 32 up to 256, or 512";
    if (s.tokens != 16 && s.tokens % 32 != 0) return odd_pages;
    if (c.content == block_content::own) return own_blocks;
    if (c.content == block_content::rows) return byte_floats;
    if (c.content == block_content::values) return c.value_type == float_type::fp32 ? wide_values : nullptr;
    if (c.several_widths() && s.tokens == 16) return "pages of keys of several widths have 16 tokens";
    if (has_odd_groups(c, c.per_token ? s.dim : s.tokens)) return odd_groups;
    if (!c.several_widths()) return nullptr;
    if (most_planes(c) > 2) return "7 bits are among several widths of keys";
    if (block_layout{c}.scale_offset(s) > 65536)
        return "a block has more than 64 KB of codes of several widths";
    return nullptr;
}

/// Are grids the ranges of groups? Otherwise an encoder fits them (quantize_grid.cuh).
template <class S>
inline constexpr bool codes_ranges =
    codec<S>.content == block_content::codes&& codec<S>.encoder == encoder_kind::range;
template <class S>
inline constexpr bool codes_grids =
    codec<S>.content == block_content::codes&& codec<S>.encoder != encoder_kind::range;

/// The type that is stored so.
template <parameter_storage Storage>
using stored_type = std::conditional_t<
    Storage == parameter_storage::bytes, byte_params,
    std::conditional_t<
        Storage == parameter_storage::fp32, float,
        std::conditional_t<Storage == parameter_storage::fp16, float16,
                           std::conditional_t<Storage == parameter_storage::bf16, bfloat16, void>>>>;

template <class Codec, class Encoder, class Widths>
struct codec_types;
template <class Codec, class Encoder, int... I>
struct codec_types<Codec, Encoder, std::integer_sequence<int, I...>> {
    static constexpr codec_spec C = Codec::value;
    static constexpr auto codes() {
        if constexpr (C.several_widths())
            return std::type_identity<
                mixed_bits<code_widths<C.widths[I]...>, average_eighths<C.average_eighths>>>{};
        else
            return std::type_identity<bits<C.width()>>{};
    }
    /// Of params<P>, where scales have padding, or packed_params<P>.
    template <class P>
    static constexpr auto params_of() {
        if constexpr (std::is_same_v<P, byte_params>)
            return std::type_identity<byte_params>{};
        else if constexpr (C.parameter_padding > 1)
            return std::type_identity<params<P>>{};
        else
            return std::type_identity<packed_params<P>>{};
    }
    static constexpr auto token_scale_policy() {
        if constexpr (!C.has_token_scales())
            return std::type_identity<no_token_scales>{};
        else if constexpr (C.token_scales == parameter_storage::bytes)
            return std::type_identity<token_scales<byte_params>>{};
        else
            return std::type_identity<token_scales<params<stored_type<C.token_scales>>>>{};
    }
    using parameters = typename decltype(params_of<stored_type<C.parameters>>())::type;
    using type = scheme<typename decltype(codes())::type,
                        std::conditional_t<C.levels == level_kind::symmetric, symmetric, asymmetric>,
                        std::conditional_t<C.per_token, per_token<C.group>, per_channel<C.group>>, parameters,
                        std::conditional_t<!std::is_void_v<Encoder>, Encoder,
                                           std::conditional_t<plain_params<parameters>, enclosing, min_max>>,
                        typename decltype(token_scale_policy())::type>;
};
template <class Codec, class Encoder>
requires(Codec::value.content ==
         block_content::values) struct codec_types<Codec, Encoder, std::integer_sequence<int>> {
    static constexpr float_type type_of_values = Codec::value.value_type;
    using type =
        full<std::conditional_t<type_of_values == float_type::fp32, float,
                                std::conditional_t<type_of_values == float_type::fp16, float16, bfloat16>>>;
};
/// Codec: has the codec as its `value`. (g++ 12 crashes where nvcc hands it codecs as template arguments.)
template <class Codec, class Encoder = void>
using codec_scheme =
    typename codec_types<Codec, Encoder, std::make_integer_sequence<int, Codec::value.width_count>>::type;
template <class S>
struct codec_constant {
    static constexpr codec_spec value = codec<S>;
};

/// The encoder of a scheme; void: full<T> has none.
template <class S>
struct encoder_of {
    using type = void;
};
template <class S>
requires requires { typename S::encoder_type; }
struct encoder_of<S> {
    using type = typename S::encoder_type;
};

template <class S>
inline constexpr bool own_content = codec<S>.content == block_content::own;
/// 8-bit floats with a scale of each token (schemes/float_rows.hpp), of which an index has kernels.
template <class S>
inline constexpr bool float_row_scheme = codec<S>.content == block_content::rows;
/// Schemes of your own that kernels read number by number: attend_any.cuh, dequantize_tokens. They are copied
/// to the device, with whatever state they have. device_value() is what dequantize() gives; behind a
/// transform, which has an inner_scheme, it is not.
template <class S>
concept read_by_numbers = (own_content<S> || float_row_scheme<S>)&&!requires {
    typename S::inner_scheme;
}
&&std::is_trivially_copyable_v<S>&& requires(const S s, const block_shape& shape, const std::byte* block) {
    { s.device_value(shape, block, 0, 0) } -> std::same_as<float>;
};

/// Rows and records of tokens whose layout the type names (rows_of<>, records_of<>): they have kernels of
/// their own, records only as latents.
template <class S>
concept token_row_scheme = read_by_numbers<S> && requires {
    { S::fixed_layout() } -> std::same_as<kvq::row_layout>;
};
template <class S>
concept token_record_scheme = read_by_numbers<S> && requires {
    { S::fixed_layout() } -> std::same_as<kvq::record_layout>;
};
/// Tokens have bytes of their own.
template <class S>
concept token_bytes_scheme = token_row_scheme<S> || token_record_scheme<S>;

/// Bits of a number of the blocks of S.
template <class S>
constexpr int code_bits_of() noexcept {
    if constexpr (token_record_scheme<S>)
        return S::fixed_layout().bits;
    else
        return codec<S>.width();
}

/// The scheme that quantizes T x, or S.
template <class S>
struct inner_of {
    using type = S;
};
template <class Transform, class Inner>
struct inner_of<transformed<Transform, Inner>> {
    using type = Inner;
};
template <class Inner>
struct inner_of<behind_transform<Inner>> {
    using type = Inner;
};

/// The same of a scheme: its blocks alone say what its values are if it is the scheme of its codec, behind a
/// transform or not.
template <class S>
constexpr const char* no_reader_of(tensor role) noexcept {
    using inner = typename inner_of<S>::type;
    if (read_by_numbers<S>) return nullptr;
    if (const char* const reason = no_reader(codec<S>, role)) return reason;
    if constexpr (has_transform<S>) {
        if (const char* const reason = no_transform(transform_in<S>)) return reason;
        if (codec<S>.content != block_content::codes) return "16-bit values are not transformed";
    }
    if constexpr (no_reader(codec<S>, tensor::key) == nullptr)
        if (!std::is_same_v<codec_scheme<codec_constant<inner>, typename encoder_of<inner>::type>, inner>)
            return own_blocks;
    return nullptr;
}

template <class S>
inline constexpr bool has_reader = no_reader_of<S>(tensor::key) == nullptr;

/// The codec of blocks of a shape: a group of all tokens or channels is the whole line.
constexpr codec_spec codec_of_shape(codec_spec c, const block_shape& s) noexcept {
    if (c.group >= (c.per_token ? s.dim : s.tokens)) c.group = 0;
    return c;
}

}}}  // namespace kvq::cuda::detail
