// Codes in lanes to words of a block: four columns to a word, narrow codes sharing bytes
// (pack/code_layout.hpp).
//
//   four_codes     codes of four columns -> the word of a quad
//   put            words of all quads of a step -> planes, stored a vector each
#pragma once

#include "../../pack/code_layout.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

template <class Lanes, int Bits>
struct code_packer {
    using ints = typename Lanes::ints;
    using planes = code_planes<Bits>;
    static constexpr int step_quads = planes::quads_per_step;

    static KVQ_INLINE ints four_codes(ints a, ints b, ints c, ints d) {
        return Lanes::bit_or(
            Lanes::bit_or(a, Lanes::template shift_left<8>(b)),
            Lanes::bit_or(Lanes::template shift_left<16>(c), Lanes::template shift_left<24>(d)));
    }

    /// Calls store(index of the vector in the row, words) for the vectors of a step, of `quads` quads in a
    /// row, cut into planes.
    /// Cut: the last step of a row may be short.
    template <bool Cut, int Plane = 0, class F>
    static KVQ_INLINE void put(int quads, int step, const ints* words, F&& store) {
        constexpr int per_vector = planes::quads_per_word(Plane), vectors = step_quads / per_vector;
        const int first = planes::first_vector(Plane, quads) + step * vectors;
        KVQ_UNROLL
        for (int v = 0; v < vectors; ++v) {
            if (Cut && v > 0 && (step * vectors + v) * per_vector >= quads) break;
            store(first + v, join<Plane>(words + v * per_vector));
        }
        if constexpr (Plane + 1 < planes::count) put<Cut, Plane + 1>(quads, step, words, store);
    }

private:
    /// The bits of a plane of neighbouring quads, side by side.
    template <int Plane, int K = 0>
    static KVQ_INLINE ints join(const ints* words) {
        constexpr int width = planes::width(Plane), per_vector = planes::quads_per_word(Plane);
        ints part = Lanes::template shift_right<planes::shift(Plane)>(words[K]);
        if constexpr (planes::count > 1)
            part = Lanes::bit_and(
                part, Lanes::splat(static_cast<std::int32_t>(((1u << width) - 1u) * 0x01010101u)));
        part = Lanes::template shift_left<width * K>(part);
        if constexpr (K + 1 < per_vector) part = Lanes::bit_or(part, join<Plane, K + 1>(words));
        return part;
    }
};

}}}  // namespace kvq::kernels
