// Levels that are not an affine grid: tables, and how a group's scale is found for one.
//
//   x^ = value(code, scale)            usually scale * table[code]
//
// A codebook is a type with
//   bits, name
//   fit(x, n) -> fitted               the scale of a group of finite numbers (n may be 0)
//   code(x, scale) -> int             infinities saturate, NaN codes as the value nearest zero
//   value(code, scale) -> float
//
// Attention cannot run on such codes (the value is not linear in the code); it dequantizes page by page.
// The published ones by name are in published_codebooks.hpp, the scheme in schemes/codebook.hpp.
#pragma once

#include <cmath>
#include <concepts>
#include <cstdint>

#include "../core/rounding.hpp"

namespace kvq::inline KVQ_TAGGED {

/// A group's scale: `working` while codes are chosen, `stored` for the block. Most codebooks have one for both.
struct fitted {
    float working = 0.0f;
    float stored = 0.0f;
};

template <class C>
concept codebook = requires(const float* x, float f, int i) {
    { C::bits } -> std::convertible_to<int>;
    { C::name } -> std::convertible_to<const char*>;
    { C::fit(x, i) } -> std::same_as<fitted>;
    { C::code(f, f) } -> std::same_as<int>;
    { C::value(i, f) } -> std::same_as<float>;
};

namespace detail {

inline float largest_magnitude(const float* x, int n) noexcept {
    float most = 0.0f;
    for (int i = 0; i < n; ++i) most = larger(most, x[i] < 0.0f ? -x[i] : x[i]);
    return most;
}

/// sqrt(sum x^2), summed in double.
inline double norm(const float* x, int n) noexcept {
    double sum = 0.0;
    for (int i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    return std::sqrt(sum);
}

/// Index of the nearest of `count` ascending levels; of two equally near ones the upper. NaN: that of 0.
template <class Level>
constexpr int nearest_level(const Level* levels, int count, float x) noexcept {
    if (is_nan(x)) x = 0.0f;
    int below = 0;
    for (int step = count / 2; step > 0; step /= 2)
        if (below + step < count) {
            const float middle = 0.5f * (static_cast<float>(levels[below + step - 1]) +
                                         static_cast<float>(levels[below + step]));
            if (x >= middle) below += step;
        }
    return below;
}

/// x / scale, with 0 for the scale of a group of zeros.
inline float scaled(float x, float scale) noexcept { return scale != 0.0f ? x / scale : 0.0f; }

}  // namespace detail

/// Codes and values of Table::levels (ascending, 2^bits of them); only the scale is left to say.
template <class Table>
struct table_levels {
    static constexpr int bits = Table::bits;
    static constexpr const char* name = Table::name;

    static int code(float x, float scale) noexcept {
        return detail::nearest_level(Table::levels, 1 << bits, detail::scaled(x, scale));
    }
    static float value(int code, float scale) noexcept {
        return detail::rounded_product(scale, static_cast<float>(Table::levels[code]));
    }
};

/// The largest magnitude of the group falls on the largest of the table: scale = max|x| / max|level|.
template <class Table>
struct by_largest : table_levels<Table> {
    static fitted fit(const float* x, int n) noexcept {
        const auto top = static_cast<float>(Table::levels[(1 << Table::bits) - 1]);
        const auto bottom = static_cast<float>(Table::levels[0]);
        const float scale = detail::largest_magnitude(x, n) / detail::larger(top, -bottom);
        return {scale, scale};
    }
};

/// The group's root mean square is the table's unit: scale = |x| / sqrt(n). Renormalized: the scale that is stored gives
/// the dequantized group the length of the original, |x^| = |x|.
template <class Table, bool Renormalized = false>
struct by_norm : table_levels<Table> {
    static fitted fit(const float* x, int n) noexcept {
        const double length = detail::norm(x, n);
        const auto scale = static_cast<float>(n ? length / std::sqrt(static_cast<double>(n)) : 0.0);
        if (!Renormalized || scale == 0.0f) return {scale, scale};
        double sum = 0.0;
        for (int i = 0; i < n; ++i) {
            const auto level = static_cast<double>(Table::levels[table_levels<Table>::code(x[i], scale)]);
            sum += level * level;
        }
        return {scale, static_cast<float>(length / std::sqrt(sum))};
    }
};

}  // namespace kvq::inline KVQ_TAGGED
