// Codes in registers: from the words of a block, one word of every row in a vector, to four codes of a row in
// each lane.
//
//   quad q of a plane of w bits      (word >> w (q % (8 / w))) & mask        pack/code_layout.hpp
//
// One shift and one mask for a plane, and an OR for each further one: the same operations for every
// instruction set (cpu/arch/lanes.hpp).
#pragma once

#include "../../pack/code_layout.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// The first n words of a vector, or all of them.
template <class Lanes, bool Partial>
KVQ_INLINE typename Lanes::ints load_vector(const std::byte* from, int n) {
    if constexpr (Partial)
        return Lanes::load(from, n);
    else
        return Lanes::load(from);
}

/// The codes of one quad, as bytes and times 2^Raise, from the vectors of all planes of a step. Every plane
/// takes one shift, directly to the position of its bits.
template <class Lanes, int Bits, int Quad, bool Partial, int Raise = 0, int Plane = 0>
KVQ_INLINE typename Lanes::ints unpack_quad(const std::byte* const* planes, std::ptrdiff_t vector_bytes,
                                            std::ptrdiff_t offset, int n) {
    if constexpr (Bits == two_planes && requires(typename Lanes::ints a) { Lanes::select_bits(a, a, a); }) {
        // The upper code in the high half of a byte, the lower one in the other.
        const auto upper = load_vector<Lanes, Partial>(planes[0] + offset, n),
                   lower = load_vector<Lanes, Partial>(planes[1] + offset, n);
        constexpr std::uint32_t high = 0xf0f0f0f0u;
        if constexpr (Quad == 0)
            return Lanes::select_bits(Lanes::splat(static_cast<std::int32_t>(high)),
                                      Lanes::template shift_left<4>(upper), lower);
        else
            return Lanes::select_bits(Lanes::splat(static_cast<std::int32_t>(~high)),
                                      Lanes::template shift_right<4>(lower), upper);
    }
    using P = code_planes<Bits>;
    constexpr int width = P::width(Plane), per_word = P::quads_per_word(Plane),
                  place = P::shift(Plane) + Raise, left = place - width * (Quad % per_word);
    auto w = load_vector<Lanes, Partial>(planes[Plane] + (Quad / per_word) * vector_bytes + offset, n);
    if constexpr (left > 0) w = Lanes::template shift_left<left>(w);
    if constexpr (left < 0) w = Lanes::template shift_right<-left>(w);
    if constexpr (width < 8) {
        constexpr std::uint32_t mask = ((1u << width) - 1u) * 0x01010101u;
        w = Lanes::bit_and(w, Lanes::splat(static_cast<std::int32_t>(mask << place)));
    }
    if constexpr (Plane + 1 < P::count)
        w = Lanes::bit_or(
            w, unpack_quad<Lanes, Bits, Quad, Partial, Raise, Plane + 1>(planes, vector_bytes, offset, n));
    return w;
}

}}}  // namespace kvq::kernels
