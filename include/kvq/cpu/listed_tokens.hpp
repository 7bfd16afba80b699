// x^ of some tokens of a block, as rows of floats: what attention over lists of tokens reads.
//
//   K   a token is a row of the block's matrix: one word of every vector of its tile, four codes of which
//       are one byte each after a shift and a mask
//   V   a token is a column: one byte of the words of all channels
//
// Contract: the bits of scheme::dequantize. The work depends on the number of tokens; blocks of schemes that
// the library does not compose, and whose layout it does not know, are dequantized as a whole.
#pragma once

#include <cstring>

#include "../pack/value_layout.hpp"
#include "../schemes/scheme.hpp"
#include "transformed.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// The codes of a token, one byte each, by slot of the channel.
template <int Bits>
void unpack_token(const code_layout<Bits>& layout, const std::byte* block, tensor role, int token,
                  std::byte* codes) {
    using planes = code_planes<Bits>;
    const int quads = layout.quads();
    for (int p = 0; p < planes::count; ++p) {
        const int width = planes::width(p), shift = planes::shift(p), per_word = planes::quads_per_word(p);
        const auto mask = ((1u << width) - 1u) * 0x01010101u;
        const auto join = [&](std::byte* to, std::uint32_t part) {
            detail::store_as(to, p == 0 ? part : detail::load_as<std::uint32_t>(to) | part << shift);
        };
        if (role == tensor::key) {
            const std::ptrdiff_t step = layout.tiles.vector_bytes(token);
            const std::byte* at = block + 4 * layout.tiles.word(token, planes::first_vector(p, quads));
            for (int q = 0; q < quads; at += step) {
                const auto word = detail::load_as<std::uint32_t>(at);
                for (int u = 0; u < per_word && q < quads; ++u, ++q)
                    join(codes + 4 * q, word >> (width * u) & mask);
            }
        } else {
            const grouped_axis& rows = layout.rows();
            const int slot = layout.cols.slot(token), quad = slot / 4;
            const int vector = planes::first_vector(p, quads) + quad / per_word;
            const int right = 8 * (slot % 4) + width * (quad % per_word);
            const unsigned low = (1u << width) - 1u;
            for (int g = 0; g < rows.groups(); ++g)
                for (int tile = 0; tile < rows.group_slots(g); tile += tile_layout::tile_rows) {
                    const int height = detail::smaller(tile_layout::tile_rows, rows.group_slots(g) - tile);
                    const std::byte* const at = block + 4 * layout.tiles.word(g * rows.group + tile, vector);
                    std::byte* const to = codes + rows.group_begin(g) + tile;
                    for (int i = 0; i < height; ++i) {
                        const unsigned part = detail::load_as<std::uint32_t>(at + 4 * i) >> right & low;
                        const unsigned before = p == 0 ? 0u : static_cast<unsigned>(to[i]);
                        to[i] = static_cast<std::byte>(before | part << shift);
                    }
                }
        }
    }
}

/// x^ of n codes that have a scale and a bias each, or, with Shared, the same ones.
template <class Backend, class Levels, int Bits, bool Shared>
void listed_values(const std::byte* codes, const float* scale, const float* bias, int n, float* out) {
    if constexpr (detail::library_levels<Levels>) {
        int c = 0;
        if constexpr (requires { typename Backend::lanes; }) {
            using lanes = typename Backend::lanes;
            const auto parameter = [&](const float* of) {
                return Shared ? lanes::splat_float(*of) : lanes::load_floats(of + c);
            };
            for (; c + lanes::width <= n; c += lanes::width) {
                const auto level =
                    lanes::add(lanes::load_bytes(codes + c), lanes::splat(-Levels::template zero_code<Bits>));
                auto x = lanes::rounded_product(parameter(scale), lanes::to_floats(level));
                if constexpr (Levels::has_bias) x = lanes::add(x, parameter(bias));
                lanes::store_floats(out + c, x);
            }
        }
        const detail::rounded_products rounded;
        for (; c < n; ++c) {
            const int level = static_cast<int>(codes[c]) - Levels::template zero_code<Bits>;
            out[c] = rounded(scale[Shared ? 0 : c], static_cast<float>(level));
            if (Levels::has_bias) out[c] += bias[Shared ? 0 : c];
        }
    } else {
        for (int c = 0; c < n; ++c)
            out[c] = Levels::template value<Bits>(static_cast<int>(codes[c]), scale[Shared ? 0 : c],
                                                  Levels::has_bias ? bias[Shared ? 0 : c] : 0.0f);
    }
}

/// Tokens of blocks of a scheme<...>.
template <class Backend, class Scheme>
class listed_codes {
    using levels = typename Scheme::levels;
    using token_scales_of = typename Scheme::token_scale_type;

public:
    listed_codes(const Scheme& scheme, const block_shape& shape, const block_id& id, const std::byte* block,
                 float* scratch)
        : scheme_(scheme),
          shape_(shape),
          id_(id),
          block_(block),
          at_(scheme.layout()),
          codes_(reinterpret_cast<std::byte*>(scratch)),
          scale_(scratch + shape.dim + 16),
          bias_(scale_ + shape.dim + 16) {}

    void read(int token, float* out) {
        if constexpr (Scheme::by_token)
            by_groups_of_channels(token, out);
        else
            by_channels(token, out);
    }

private:
    void by_channels(int token, float* out) {
        const grouped_axis tokens = at_.cut(shape_);
        if (const int g = tokens.groups() == 1 ? 0 : token / tokens.group; g != group_) {
            scheme_.template load<Backend>(shape_, block_, g, scale_, bias_);
            group_ = g;
        }
        if constexpr (Scheme::several_widths) {
            scheme_.for_each_segment(shape_, id_, [&]<int Bits>(const code_segment& segment) {
                const int first = segment.first, n = segment.columns;
                if constexpr (Bits > 0) {
                    unpack_token(Scheme::template segment_layout<Bits>(shape_, segment),
                                 block_ + segment.offset, shape_.role, token, codes_);
                    listed_values<Backend, levels, Bits, false>(codes_, scale_ + first, bias_ + first, n,
                                                                out + first);
                } else {
                    std::memcpy(out + first, bias_ + first, sizeof(float) * static_cast<std::size_t>(n));
                }
            });
            scheme_.restore_output(shape_, id_, out);
        } else {
            unpack_token(scheme_.codes(shape_), block_, shape_.role, token, codes_);
            listed_values<Backend, levels, Scheme::code_bits, false>(codes_, scale_, bias_, shape_.dim, out);
        }
        if constexpr (token_scales_of::present) {
            const float by =
                token_scales_of::token_scale(block_ + at_.token_scale_offset(shape_), tokens.slot(token));
            for (int c = 0; c < shape_.dim; ++c) out[c] *= by;
        }
    }
    void by_groups_of_channels(int token, float* out) {
        using parameters = typename Scheme::parameters;
        const grouped_axis channels = at_.cut(shape_);
        const std::byte* const stored = block_ + at_.scale_offset(shape_);
        const int groups = channels.groups(), slots_of_tokens = at_.slot_count(shape_);
        unpack_token(scheme_.codes(shape_), block_, shape_.role, token, codes_);
        for (int g = 0; g < groups; ++g) {
            const float scale = parameters::scale(stored, groups, slots_of_tokens, g, token);
            float bias = 0.0f;
            if constexpr (levels::has_bias)
                bias = parameters::bias(stored, groups, slots_of_tokens, g, token);
            listed_values<Backend, levels, Scheme::code_bits, true>(codes_ + channels.group_begin(g), &scale,
                                                                    &bias, channels.group_size(g),
                                                                    out + g * channels.group);
        }
    }

    const Scheme& scheme_;
    const block_shape shape_;
    const block_id id_;
    const std::byte* block_;
    const typename Scheme::layout_type at_;
    std::byte* codes_;
    float *scale_, *bias_;
    int group_ = -1;
};

/// One token of 16- or 32-bit values.
template <class Backend, class T>
void read_listed_values(const block_shape& shape, const std::byte* block, int token, std::byte* scratch,
                        float* out) {
    const value_layout<T> layout(shape);
    if (shape.role == tensor::key) {
        const std::byte* at = block + sizeof(T) * layout.element(token, 0);
        const std::ptrdiff_t step = layout.tiles.vector_bytes(token);
        for (int c = 0; c < shape.dim; c += layout.values_per_word, at += step)
            std::memcpy(scratch + sizeof(T) * static_cast<std::size_t>(c), at, 4);
    } else {
        for (int c = 0; c < shape.dim; ++c)
            std::memcpy(scratch + sizeof(T) * static_cast<std::size_t>(c),
                        block + sizeof(T) * layout.element(c, token), sizeof(T));
    }
    Backend::template load_floats<T>(scratch, shape.dim, out);
}

/// Writes x^ of tokens[0, n) of a block to rows `stride` floats apart. scratch: as of
/// format_functions::dequantize_tokens.
template <class Backend, kv_scheme Scheme>
void dequantize_tokens(const Scheme& scheme, const block_shape& shape, const block_id& id,
                       const std::byte* block, const std::int32_t* tokens, int n, float* out,
                       std::ptrdiff_t stride, float* scratch) {
    if constexpr (transformed_scheme<Scheme>) {
        dequantize_tokens<Backend, typename Scheme::inner_scheme>(scheme, shape, id, block, tokens, n, out,
                                                                  stride, scratch);
        const block_shape one{shape.role, 1, shape.dim};
        for (int i = 0; i < n; ++i)
            if constexpr (requires { Backend::width(); })
                restore_tokens<Backend>(scheme, one, id, out + i * stride);
            else
                scheme.restore_values(one, id, out + i * stride);
    } else if constexpr (plain_codec<Scheme>.content == block_content::values) {
        for (int i = 0; i < n; ++i)
            read_listed_values<Backend, typename Scheme::value_type>(
                shape, block, tokens[i], reinterpret_cast<std::byte*>(scratch), out + i * stride);
    } else if constexpr (plain_codec<Scheme>.content == block_content::codes) {
        listed_codes<Backend, Scheme> from(scheme, shape, id, block, scratch);
        for (int i = 0; i < n; ++i) from.read(tokens[i], out + i * stride);
    } else if constexpr (rows_of_floats<Scheme>) {
        for (int i = 0; i < n; ++i) Scheme::dequantize_token(shape, block, tokens[i], out + i * stride);
    } else {
        scheme.dequantize(shape, id, block, scratch);
        for (int i = 0; i < n; ++i)
            std::memcpy(out + i * stride, scratch + std::ptrdiff_t{tokens[i]} * shape.dim,
                        sizeof(float) * static_cast<std::size_t>(shape.dim));
    }
}

}}}  // namespace kvq::kernels
