// Codes of quantized snapshots (state/snapshot_codec.hpp), and where a part keeps them: one value at a time,
// for the CPU and for a device.
#pragma once

#include "../core/rounding.hpp"
#include "state_part.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

/// Codes of int8. Loops over them have no branch, so that compilers vectorise them.
struct int8_codes {
    static constexpr float largest = 127.0f;

    /// |position| <= largest. The sum with 1.5 * 2^23 is rounded to an integer, which is in its low bits.
    KVQ_HD static std::uint8_t code(float position) noexcept {
        return static_cast<std::uint8_t>(bit_cast<std::uint32_t>(position + 12582912.0f));
    }
    KVQ_HD static float value(std::uint8_t code) noexcept {
        return static_cast<float>(static_cast<std::int8_t>(code));
    }
};

/// Those of e4m3 (core/float_formats.hpp) up to 240, where neither saturation nor NaN is to be looked for.
struct e4m3_codes {
    static constexpr float largest = 240.0f;

    KVQ_HD static std::uint8_t code(float position) noexcept {
        const auto bits = bit_cast<std::uint32_t>(position);
        const std::uint32_t subnormal = (bits & 0x7fffffffu) < least_normal ? ~std::uint32_t{0} : 0u;
        // Subnormal numbers count steps of 2^-9, to which a sum with 2^14 is rounded.
        const float sum = bit_cast<float>(bits & 0x7fffffffu) + bit_cast<float>(subnormal & 141u << 23);
        const auto rounded = bit_cast<std::uint32_t>(sum);
        const std::uint32_t normal = ((rounded + 0x7ffffu + (rounded >> 20 & 1u)) >> 20) - (120u << 3);
        return static_cast<std::uint8_t>((bits >> 24 & 0x80u) | (subnormal & rounded & 0xfu) |
                                         (~subnormal & normal));
    }
    /// A subnormal number is the normal one with the same mantissa, less 2^-6.
    KVQ_HD static float value(std::uint8_t code) noexcept {
        const std::uint32_t magnitude = code & 0x7fu;
        const std::uint32_t less = magnitude < 8u ? 1u : 0u;
        const float value = bit_cast<float>((magnitude << 20) + (less << 23) + (120u << 23)) -
                            bit_cast<float>(less * least_normal);
        return bit_cast<float>(bit_cast<std::uint32_t>(value) | (code & 0x80u) << 24);
    }

private:
    static constexpr std::uint32_t least_normal = 121u << 23;  // 2^-6
};

inline constexpr std::int32_t infinite_bits = 0x7f800000;

/// The pattern of |x|, which compares as the number does.
KVQ_HD inline std::int32_t magnitude_bits(float x) noexcept {
    return static_cast<std::int32_t>(bit_cast<std::uint32_t>(x) & 0x7fffffffu);
}
/// The same; 0 where x is not finite.
KVQ_HD inline std::int32_t finite_magnitude_bits(float x) noexcept {
    const std::int32_t magnitude = magnitude_bits(x);
    return magnitude < infinite_bits ? magnitude : 0;
}

/// The scale of a group. Not rounded up where the largest value would then be infinite.
template <class Codes>
KVQ_HD float scale_of(float amax) noexcept {
    const float scale = larger(rounded_quotient(amax, Codes::largest), 0x1p-126f);
    return scale * Codes::largest <= 0x1.fffffep127f ? scale
                                                     : bit_cast<float>(bit_cast<std::uint32_t>(scale) - 1);
}

/// A value as its code; its square and that of its error in units, 0 where it is not finite.
struct quantized_value {
    std::uint8_t code;
    float square, error;
    std::uint32_t not_finite;
};
/// unit: the inverse of the largest value of the head.
template <class Codes, class T>
KVQ_HD KVQ_INLINE quantized_value quantize_value(T x, float scale, float unit,
                                                 const rounded_products& product) noexcept {
    const auto value = static_cast<float>(x);
    const float at = product(value, rounded_inverse(scale));
    // Integers: comparisons of floats may trap, so compilers keep them as branches.
    const std::int32_t most = bit_cast<std::int32_t>(Codes::largest), magnitude = magnitude_bits(at);
    const std::int32_t kept = magnitude > infinite_bits ? 0 : smaller(magnitude, most);
    const auto position =
        bit_cast<float>(static_cast<std::uint32_t>(kept) | (bit_cast<std::uint32_t>(at) & 0x80000000u));
    const std::uint8_t code = Codes::code(position);
    const auto xhat = static_cast<float>(T(product(Codes::value(code), scale)));
    const std::uint32_t finite = magnitude_bits(value) < infinite_bits ? ~std::uint32_t{0} : 0u;
    const float part = product(value, unit), error = product(value - xhat, unit);
    return {code, bit_cast<float>(bit_cast<std::uint32_t>(product(part, part)) & finite),
            bit_cast<float>(bit_cast<std::uint32_t>(product(error, error)) & finite), 1u + finite};
}

/// A part in a snapshot: codes, scales, sums.
struct snapshot_places {
    std::size_t scales, sums, bytes, per_head;

    explicit snapshot_places(const state_part& p) noexcept
        : snapshot_places(p.heads, p.rows, p.columns, p.snapshot) {}
    KVQ_HD snapshot_places(int heads, int of_rows, int columns, snapshot_type snapshot) noexcept {
        const auto rows = static_cast<std::size_t>(of_rows);
        per_head = snapshot == snapshot_type::int8_rows      ? rows
                   : snapshot == snapshot_type::int8_columns ? static_cast<std::size_t>(columns)
                                                             : ceil_div(rows, std::size_t{e4m3_group_rows});
        scales = round_up(static_cast<std::size_t>(heads) * rows * static_cast<std::size_t>(columns),
                          std::size_t{8});
        sums = scales + round_up(static_cast<std::size_t>(heads) * per_head * sizeof(float), std::size_t{8});
        bytes = sums + sizeof(snapshot_sums);
    }
};

}}}  // namespace kvq::detail
