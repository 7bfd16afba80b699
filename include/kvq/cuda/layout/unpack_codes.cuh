// How the words of a scheme's codes and its parameters look to the lanes of a warp.
//
//   unit     what one register of a product holds: a quad of codes, or a word of two 16-bit numbers
//   plane    codes are cut into planes of 8, 4, 2 or 1 bits (pack/code_layout.hpp); a word of one has
//            units_per_word(plane) quads
//   step     units that fill a word of every plane; lines = words of a row, plane after plane
//
// Contract: unpack<Quad>() returns what the CPU unpacks (tests/gpu compares attention with dequantized
// values).
#pragma once

#include <utility>

#include "cache_ref.cuh"
#include "parameters.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

using kvq::detail::ceil_div;
using kvq::detail::larger;
using kvq::detail::round_up;
using kvq::detail::smaller;

/// Calls f(integral_constant<int, 0>) ... f(integral_constant<int, N - 1>): loops whose index is a constant.
template <int N, class F>
__device__ __forceinline__ void static_for(F&& f) {
    [&]<int... I>(std::integer_sequence<int, I...>) { (f(std::integral_constant<int, I>{}), ...); }
    (std::make_integer_sequence<int, N>{});
}

inline constexpr int warp_size = 32;

struct lane_id {
    int lane, g, t;
    __device__ __forceinline__ lane_id()
        : lane(static_cast<int>(threadIdx.x) % 32), g(lane / 4), t(lane % 4) {}
};

template <int Bits>
struct code_unpacker {
    static constexpr bool full = false;
    using planes = code_planes<Bits>;
    static constexpr int columns_per_unit = 4;  // a unit is a quad
    static constexpr int units_per_step = planes::quads_per_step;
    static constexpr int plane_count = planes::count;
    KVQ_HD static constexpr int units_per_word(int plane) { return planes::quads_per_word(plane); }
    KVQ_HD static constexpr int first_line(int plane, int units) {
        return planes::first_vector(plane, units);
    }
    KVQ_HD static constexpr int lines(int units) { return planes::vectors(units); }

    /// Codes of quad `Quad` of a step, one byte each, for four rows; words: of all planes, four rows each.
    /// Top: at the top of their bytes.
    template <int Quad, bool Top = false>
    __device__ __forceinline__ static uint4 unpack(const uint4 (&words)[planes::vectors(units_per_step)]) {
        uint4 result{0, 0, 0, 0};
        static_for<plane_count>([&](auto plane) {
            constexpr int p = decltype(plane)::value;
            constexpr int per = units_per_word(p);
            constexpr int width = 8 / per;
            constexpr int to = (Top ? 8 - Bits : 0) + planes::shift(p), left = to - width * (Quad % per);
            constexpr std::uint32_t mask = (((1u << width) - 1u) << to) * 0x01010101u;
            const uint4& w = words[first_line(p, units_per_step) + Quad / per];
            const auto part = [](std::uint32_t x) {
                if constexpr (left >= 0)
                    return (x << left) & mask;
                else
                    return (x >> -left) & mask;
            };
            result.x |= part(w.x);
            result.y |= part(w.y);
            result.z |= part(w.z);
            result.w |= part(w.w);
        });
        return result;
    }
};

/// What the code layouts of full<T> and scheme<...> have in common.
template <class S>
struct word_traits : code_unpacker<S::code_bits> {  // scheme<...> of one width
    using parameter = typename S::parameter;
    using token_scale_type = stored_type<codec<S>.token_scales>;  // void: none
    static constexpr bool token_parameters = codec<S>.per_token;
    static constexpr int group = codec<S>.group;
    static constexpr bool has_bias = codec<S>.has_bias;
    static constexpr int zero_code = codec<S>.zero_code;

    /// Where scales and biases of a block start, and numbers that channels share.
    KVQ_HD static constexpr std::size_t scale_offset(const block_shape& s) {
        return typename S::layout_type{}.scale_offset(s);
    }
    KVQ_HD static constexpr std::size_t bias_offset(const block_shape& s) {
        return typename S::layout_type{}.bias_offset(s);
    }
};
template <class S>
requires S::several_widths struct word_traits<S> {  // see mixed_keys.cuh
    static constexpr bool token_parameters = false;
};
template <class T>
struct word_traits<kvq::full<T>> {
    static constexpr bool full = true;
    using parameter = float16;
    using token_scale_type = void;
    static constexpr bool token_parameters = true;
    static constexpr int group = 0;
    static constexpr bool has_bias = false;
    static constexpr int zero_code = 0;
    static constexpr int columns_per_unit = 4 / static_cast<int>(sizeof(T));  // a unit is a word
    static constexpr int units_per_step = 1;
    static constexpr int plane_count = 1;
    KVQ_HD static constexpr int units_per_word(int) { return 1; }
    KVQ_HD static constexpr int first_line(int, int) { return 0; }
    KVQ_HD static constexpr int lines(int units) { return units; }
};

}}}  // namespace kvq::cuda::detail
