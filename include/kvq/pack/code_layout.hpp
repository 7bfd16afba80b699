// Layout of codes of 1..8 bits: four consecutive columns are four bytes of a word, and narrow codes share the
// byte.
//
// A code of B bits is cut into planes of 8, 4, 2 or 1 bits (B = 8: 8; 7: 4+2+1; 6: 4+2; 5: 4+1; 4: 4; 3: 2+1;
// 2: 2; 1: 1), the widest plane holding the lowest bits. In a plane of width w, one word serves U = 8/w quads
// of columns: quad q of a row lies in vector q/U, in bits [w*(q%U), w*(q%U)+w) of each byte. Unpacking one
// quad is therefore one shift and one mask for a whole vector, and the four bytes are operands of an integer
// dot product without further steps.
//
//   vectors of a row:  [plane 0: ceil(Q/U0)] [plane 1: ceil(Q/U1)] ...
//     Q = quads of columns (groups padded to 4)
#pragma once

#include "tile_layout.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

namespace detail {
/// Quads that fill one word of every plane: the step of loops over columns.
constexpr int quads_per_step(int bits) noexcept { return 8 / (bits & -bits); }
}  // namespace detail

/// The planes of a code of `Bits` bits.
template <int Bits>
struct code_planes {
    static_assert(Bits >= 1 && Bits <= 8, "kvq: a code has 1 to 8 bits");

    static constexpr int count = (Bits & 1) + (Bits >> 1 & 1) + (Bits >> 2 & 1) + (Bits >> 3 & 1);
    // No loops: loops over planes in kernels must fold to constants, even if the compiler unrolls them late.
    /// Bits of a plane: the powers of two in `Bits`, widest first.
    KVQ_HD static constexpr int width(int plane) noexcept {
        constexpr int a = highest(Bits), b = highest(Bits - a), c = highest(Bits - a - b);
        return plane == 0 ? a : plane == 1 ? b : plane == 2 ? c : 0;
    }
    /// Position of the plane's bits in the code.
    KVQ_HD static constexpr int shift(int plane) noexcept {
        return (plane > 0 ? width(0) : 0) + (plane > 1 ? width(1) : 0) + (plane > 2 ? width(2) : 0);
    }
    KVQ_HD static constexpr int quads_per_word(int plane) noexcept {
        constexpr int a = 8 / width(0), b = count > 1 ? 8 / width(1) : 0, c = count > 2 ? 8 / width(2) : 0;
        return plane == 0 ? a : plane == 1 ? b : c;
    }
    static constexpr int quads_per_step = detail::quads_per_step(Bits);
    /// First vector of a plane in a row of `quads` quads.
    KVQ_HD static constexpr int first_vector(int plane, int quads) noexcept {
        return (plane > 0 ? plane_vectors<0>(quads) : 0) + (plane > 1 ? plane_vectors<1>(quads) : 0) +
               (plane > 2 ? plane_vectors<2>(quads) : 0);
    }
    KVQ_HD static constexpr int vectors(int quads) noexcept { return first_vector(count, quads); }

private:
    /// The largest power of two in n; 0 of 0.
    KVQ_HD static constexpr int highest(int n) noexcept { return n & 8 ? 8 : n & 4 ? 4 : n & 2 ? 2 : n & 1; }
    template <int Plane>
    KVQ_HD static constexpr int plane_vectors(int quads) noexcept {
        if constexpr (Plane < count)
            return detail::ceil_div(quads, quads_per_word(Plane));
        else
            return 0;
    }
};

/// Codes of 8 bits in two planes of 4 that lie apart: the upper one as codes of 4 bits lie, the lower one
/// likewise in memory of its own (format/planes.hpp). Plane 0 is the upper one.
inline constexpr int two_planes = 44;
template <>
struct code_planes<two_planes> {
    static constexpr int count = 2, quads_per_step = 2;
    KVQ_HD static constexpr int width(int) noexcept { return 4; }
    KVQ_HD static constexpr int shift(int plane) noexcept { return plane == 0 ? 4 : 0; }
    KVQ_HD static constexpr int quads_per_word(int) noexcept { return 2; }
    KVQ_HD static constexpr int first_vector(int, int) noexcept { return 0; }
    KVQ_HD static constexpr int vectors(int quads) noexcept { return detail::ceil_div(quads, 2); }
};

namespace detail {

/// Words that a row of codes takes for `quads` quads of `width` bits.
KVQ_HD KVQ_INLINE constexpr int code_words(int width, int quads) noexcept {
    return (width & 8 ? quads : 0) + (width & 4 ? ceil_div(quads, 2) : 0) +
           (width & 2 ? ceil_div(quads, 4) : 0) + (width & 1 ? ceil_div(quads, 8) : 0);
}
static_assert(code_words(8, 3) == code_planes<8>::vectors(3) &&
              code_words(6, 8) == code_planes<6>::vectors(8) &&
              code_words(3, 5) == code_planes<3>::vectors(5));

/// Words of a row of codes with several widths: the average, but at least enough for the narrower of the two
/// widths around it. (With one width, the same as code_words.)
KVQ_HD KVQ_INLINE constexpr int row_words(int average_eighths, int narrow_width, int quads) noexcept {
    return larger(ceil_div(quads * average_eighths, 64), code_words(narrow_width, quads));
}

}  // namespace detail

template <int Bits>
struct code_layout {
    using planes = code_planes<Bits>;

    grouped_axis cols;
    tile_layout tiles;

    KVQ_HD constexpr code_layout(grouped_axis row_axis, grouped_axis col_axis) noexcept
        : cols(col_axis), tiles{row_axis, planes::vectors(col_axis.padded_size() / 4)} {}

    KVQ_HD constexpr const grouped_axis& rows() const noexcept { return tiles.rows; }
    KVQ_HD constexpr int quads() const noexcept { return cols.padded_size() / 4; }
    KVQ_HD constexpr std::size_t bytes() const noexcept { return tiles.words() * 4; }
};

}}  // namespace kvq
