// Infinities and NaN in vectors of words, found without branches: adding one to an exponent of ones carries
// into the sign bit.
//
//   marks(words)   sign bits for words with a special value; other bits are undefined
//   any(marks)     does a word have a sign bit? Combine the marks of many words with bit_or first.
//   mark(word)     the same for one word outside of vectors, to be combined with |
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "../core/float_formats.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

template <class Lanes, float_format T>
struct special_values {
    using ints = typename Lanes::ints;
    static constexpr std::int32_t exponent = std::same_as<T, float>     ? 0x7f800000
                                             : std::same_as<T, float16> ? 0x7c007c00
                                                                        : 0x7f807f80;
    static constexpr std::int32_t one = std::same_as<T, float>     ? 0x00800000
                                        : std::same_as<T, float16> ? 0x04000400
                                                                   : 0x00800080;

    /// carry: more than one is added where multiples of the words are to be told, too.
    static KVQ_INLINE ints marks(ints words, std::int32_t carry = one) {
        return Lanes::add(Lanes::bit_and(words, Lanes::splat(exponent)), Lanes::splat(carry));
    }
    static KVQ_INLINE std::uint32_t mark(std::uint32_t word) {
        return (word & static_cast<std::uint32_t>(exponent)) + static_cast<std::uint32_t>(one);
    }
    static bool any(ints marks, std::uint32_t found = 0) {
        std::byte all[4 * Lanes::width];
        Lanes::store(all, marks);
        for (int i = 0; i < Lanes::width; ++i) found |= detail::load_as<std::uint32_t>(all + 4 * i);
        return (found & (sizeof(T) == 2 ? 0x80008000u : 0x80000000u)) != 0;
    }
};

/// Are 2^power * x, of rows of n numbers that lie `stride` apart? power: 0 or more.
template <class Lanes>
bool all_finite(const float* x, std::size_t n, int power = 0, int rows = 1, std::ptrdiff_t stride = 0) {
    using special = special_values<Lanes, float>;
    auto seen = Lanes::splat(0);
    constexpr auto width = static_cast<std::size_t>(Lanes::width);
    const std::int32_t carry = (power + 1) << 23;
    for (int row = 0; row < rows; ++row, x += stride)
        for (std::size_t i = 0; i < n; i += width) {
            const auto* const p = reinterpret_cast<const std::byte*>(x + i);
            seen = Lanes::bit_or(
                seen, special::marks(
                          i + width <= n ? Lanes::load(p) : Lanes::load(p, static_cast<int>(n - i)), carry));
        }
    return !special::any(seen);
}

}}}  // namespace kvq::kernels
