// codebook_scheme<Codebook, Granularity, Params>: codes of a codebook (levels that form no affine grid) under
// one scale per group.
//
//   x^ = value(code, scale)          usually scale * table[code]
//   block = [codes][scales]          the same as kvq::scheme<> without biases
//
// A codebook is a type with these static members:
//   bits, name                        width of a code; name for scheme names
//   fit(x, n) -> fitted               the scale of n >= 0 finite values
//   code(x, scale) -> int
//     in [0, 2^bits); infinities saturate, NaN gets the code of the value nearest zero
//   value(code, scale) -> float
//
// Contract: the finite values of a group set its scale, which is rounded to nearest and kept finite. NaN and
// infinities are counted. Not foldable, since the value is not linear in the code: attention dequantizes page
// by page.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <kvq/core/rounding.hpp>
#include <kvq/schemes/scheme.hpp>
#include <limits>
#include <vector>

namespace baselines {

/// A group's scale: `working` while codes are chosen, `stored` for the block. Most codebooks have one for
/// both.
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

/// max |x[i]| of n values; 0 if n is 0.
inline float largest_magnitude(const float* x, int n) noexcept {
    float most = 0.0f;
    for (int i = 0; i < n; ++i) most = std::max(most, x[i] < 0.0f ? -x[i] : x[i]);
    return most;
}

/// sqrt(sum x[i]^2) of n values, summed in double.
inline double norm(const float* x, int n) noexcept {
    double sum = 0.0;
    for (int i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    return std::sqrt(sum);
}

/// Index of the nearest of `count` ascending levels, `count` a power of two; of two equally near ones the
/// upper. NaN: index of 0.
template <class Level>
constexpr int nearest_level(const Level* levels, int count, float x) noexcept {
    if (x != x) x = 0.0f;
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

/// Codes and values of Table::levels (ascending, 2^bits of them). A codebook adds fit().
template <class Table>
struct table_levels {
    static constexpr int bits = Table::bits;
    static constexpr const char* name = Table::name;

    static int code(float x, float scale) noexcept {
        return nearest_level(Table::levels, 1 << bits, scaled(x, scale));
    }
    static float value(int code, float scale) noexcept {
        return kvq::rounded_product(scale, static_cast<float>(Table::levels[code]));
    }
};

/// The largest magnitude of the group falls on the largest of the table: scale = max|x| / max|level|.
template <class Table>
struct by_largest : table_levels<Table> {
    static fitted fit(const float* x, int n) noexcept {
        const auto top = static_cast<float>(Table::levels[(1 << Table::bits) - 1]);
        const auto bottom = static_cast<float>(Table::levels[0]);
        const float scale = largest_magnitude(x, n) / std::max(top, -bottom);
        return {scale, scale};
    }
};

/// The group's root mean square is the table's unit: scale = |x| / sqrt(n). Renormalized: the stored scale
/// gives the dequantized group the length of the input, |x^| = |x|.
template <class Table, bool Renormalized = false>
struct by_norm : table_levels<Table> {
    static fitted fit(const float* x, int n) noexcept {
        const double length = norm(x, n);
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

/// A codebook as the levels of kvq::scheme<>, which packs the codes, stores the scales and dequantizes.
template <codebook C>
struct codebook_levels {
    static constexpr bool has_bias = false;
    static constexpr int min_bits = C::bits;
    static constexpr const char* name = C::name;
    template <int>
    static constexpr int zero_code = 0;
    template <int>
    static float value(int code, float scale, float) noexcept {
        return C::value(code, scale);
    }
};

/// Params: float16 or float.
template <codebook Codebook, kvq::granularity Granularity, class Params = kvq::params<kvq::float16>>
struct codebook_scheme
    : private kvq::scheme<kvq::bits<Codebook::bits>, codebook_levels<Codebook>, Granularity, Params> {
private:
    using base = kvq::scheme<kvq::bits<Codebook::bits>, codebook_levels<Codebook>, Granularity, Params>;

public:
    using base::block_bytes;
    using base::dequantize;
    using base::name;
    using typename base::parameter;

    /// values: [tokens][dim]. Writes all block_bytes(s) bytes of the block. Returns how many values were not
    /// finite.
    std::uint32_t quantize(const kvq::block_shape& s, kvq::block_id, const float* values,
                           std::byte* block) const {
        std::memset(block, 0, block_bytes(s));
        const auto layout = base::codes(s);
        std::uint32_t not_finite = 0;
        std::vector<float> finite;
        finite.reserve(static_cast<std::size_t>(std::max(s.tokens, s.dim)));
        base::each_group(s, [&](const typename base::value_group& g) {
            finite.clear();
            for (int i = 0; i < g.size; ++i)
                if (const float x = values[g.index(s, i)]; std::isfinite(x)) finite.push_back(x);
            const auto count = static_cast<int>(finite.size());
            not_finite += static_cast<std::uint32_t>(g.size - count);
            const fitted scale = Codebook::fit(finite.data(), count);
            base::store_parameters(s, block, g.number, g.slot, {stored(scale.stored), parameter(0.0f)});
            for (int i = 0; i < g.size; ++i)
                kvq::pack_code(layout, block, g.row(i), g.col(i),
                               static_cast<unsigned>(Codebook::code(values[g.index(s, i)], scale.working)));
        });
        return not_finite;
    }

private:
    static constexpr float limit = [] {
        if constexpr (std::same_as<parameter, float>)
            return std::numeric_limits<float>::max();
        else
            return parameter::max_finite;
    }();
    static parameter stored(float scale) noexcept { return parameter(std::clamp(scale, -limit, limit)); }
};

}  // namespace baselines
