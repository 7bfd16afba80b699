// Definitions of snapshot_codec.hpp.
#pragma once

#include <cstring>
#include <limits>

#include "../core/float_environment.hpp"
#include "../core/rounding.hpp"
#include "snapshot_codec.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

/// Codes of int8. Loops over them have no branch, so that compilers vectorise them.
struct int8_codes {
    static constexpr float largest = 127.0f;

    /// |position| <= largest. The sum with 1.5 * 2^23 is rounded to an integer, which is in its low bits.
    static std::uint8_t code(float position) noexcept {
        return static_cast<std::uint8_t>(bit_cast<std::uint32_t>(position + 12582912.0f));
    }
    static float value(std::uint8_t code) noexcept {
        return static_cast<float>(static_cast<std::int8_t>(code));
    }
};

/// Those of e4m3 (core/float_formats.hpp) up to 240, where neither saturation nor NaN is to be looked for.
struct e4m3_codes {
    static constexpr float largest = 240.0f;

    static std::uint8_t code(float position) noexcept {
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
    static float value(std::uint8_t code) noexcept {
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
inline std::int32_t magnitude_bits(float x) noexcept {
    return static_cast<std::int32_t>(bit_cast<std::uint32_t>(x) & 0x7fffffffu);
}
/// The same; 0 where x is not finite.
inline std::int32_t finite_magnitude_bits(float x) noexcept {
    const std::int32_t magnitude = magnitude_bits(x);
    return magnitude < infinite_bits ? magnitude : 0;
}

/// The scale of a group. Not rounded up where the largest value would then be infinite.
template <class Codes>
float scale_of(float amax) noexcept {
    const float scale = larger(amax / Codes::largest, 0x1p-126f);
    return scale * Codes::largest <= (std::numeric_limits<float>::max)()
               ? scale
               : bit_cast<float>(bit_cast<std::uint32_t>(scale) - 1);
}

/// Sums over values of one head, in units of its largest value, which no square over- or underflows. Sixteen
/// of each, so that the order of additions is the same for every width of vectors.
class head_sums {
public:
    static constexpr std::size_t lanes = 16, block = 64;

    explicit head_sums(float amax) noexcept : unit_(larger(amax, 0x1p-126f)) {}

    float inverse_unit() const noexcept { return 1.0f / unit_; }
    /// Squares of values and of errors; zeros where a block has fewer.
    void add(const float (&values)[block], const float (&errors)[block], std::uint32_t not_finite) noexcept {
        for (std::size_t i = 0; i < block; i += lanes)
            for (std::size_t lane = 0; lane < lanes; ++lane) {
                values_[lane] += values[i + lane];
                errors_[lane] += errors[i + lane];
            }
        not_finite_ += not_finite;
    }
    void add_to(snapshot_sums& sums) const noexcept {
        double values = 0, errors = 0;
        for (std::size_t i = 0; i < lanes; ++i) {
            values += static_cast<double>(values_[i]);
            errors += static_cast<double>(errors_[i]);
        }
        const double unit = rounded_product(static_cast<double>(unit_), static_cast<double>(unit_));
        sums.values += rounded_product(values, unit);
        sums.error += rounded_product(errors, unit);
        sums.not_finite += not_finite_;
    }

private:
    float unit_;
    float values_[lanes] = {}, errors_[lanes] = {};
    std::uint64_t not_finite_ = 0;
};

/// A part in a snapshot: codes, scales, sums.
struct snapshot_places {
    std::size_t scales, sums, bytes, per_head;

    explicit snapshot_places(const state_part& p) noexcept {
        const auto rows = static_cast<std::size_t>(p.rows);
        per_head = p.snapshot == snapshot_type::int8_rows      ? rows
                   : p.snapshot == snapshot_type::int8_columns ? static_cast<std::size_t>(p.columns)
                                                               : ceil_div(rows, std::size_t{e4m3_group_rows});
        scales = round_up(p.values(), std::size_t{8});
        sums =
            scales + round_up(static_cast<std::size_t>(p.heads) * per_head * sizeof(float), std::size_t{8});
        bytes = sums + sizeof(snapshot_sums);
    }
};

/// Quantizes one head after the other. Codes: of a value; T: type of the part.
template <class Codes, class T>
class head_codec {
public:
    explicit head_codec(const state_part& p) noexcept
        : columns_(static_cast<std::size_t>(p.columns)),
          values_(static_cast<std::size_t>(p.rows) * columns_),
          by_column_(p.snapshot == snapshot_type::int8_columns),
          group_(p.snapshot == snapshot_type::e4m3 ? e4m3_group_rows * columns_ : columns_) {}

    /// scales: of this head; quantize() writes them.
    void quantize(const T* x, std::uint8_t* codes, float* scales, snapshot_sums& sums) const noexcept {
        float amax = 0.0f;
        if (by_column_) {
            for (std::size_t c = 0; c < columns_; ++c) scales[c] = 0.0f;
            for (std::size_t at = 0; at < values_; at += columns_)
                for (std::size_t c = 0; c < columns_; ++c)
                    scales[c] = bit_cast<float>(larger(bit_cast<std::int32_t>(scales[c]),
                                                       finite_magnitude_bits(static_cast<float>(x[at + c]))));
            for (std::size_t c = 0; c < columns_; ++c) {
                amax = larger(amax, scales[c]);
                scales[c] = scale_of<Codes>(scales[c]);
            }
        } else {
            for (std::size_t at = 0, g = 0; at < values_; at += group_, ++g) {
                std::int32_t most = 0;
                const std::size_t end = smaller(at + group_, values_);
                for (std::size_t i = at; i < end; ++i)
                    most = larger(most, finite_magnitude_bits(static_cast<float>(x[i])));
                amax = larger(amax, bit_cast<float>(most));
                scales[g] = scale_of<Codes>(bit_cast<float>(most));
            }
        }
        head_sums head(amax);
        for_each_run(
            [&](std::size_t at, std::size_t n, const float* scale) {
                for (std::size_t i = 0; i < n; i += head_sums::block) {
                    const std::size_t some = smaller(n - i, head_sums::block);
                    if (by_column_)
                        quantize_block(x + at + i, codes + at + i, some, head,
                                       [s = scale + i](std::size_t k) { return s[k]; });
                    else
                        quantize_block(x + at + i, codes + at + i, some, head,
                                       [s = *scale](std::size_t) { return s; });
                }
            },
            scales);
        head.add_to(sums);
    }

    void dequantize(const std::uint8_t* codes, const float* scales, T* x) const noexcept {
        for_each_run(
            [&](std::size_t at, std::size_t n, const float* scale) {
                if (by_column_)
                    for (std::size_t i = 0; i < n; ++i) x[at + i] = T(Codes::value(codes[at + i]) * scale[i]);
                else
                    for (std::size_t i = 0; i < n; ++i) x[at + i] = T(Codes::value(codes[at + i]) * *scale);
            },
            scales);
    }

private:
    /// Calls f(first value, values, first scale) for runs of values: rows with a scale per column, or groups
    /// with one scale.
    template <class F>
    void for_each_run(F&& f, const float* scales) const noexcept {
        const std::size_t run = by_column_ ? columns_ : group_;
        for (std::size_t at = 0; at < values_; at += run) {
            f(at, smaller(run, values_ - at), scales);
            if (!by_column_) ++scales;
        }
    }

    /// At most head_sums::block values. scale(i): that of value i.
    template <class Scale>
    void quantize_block(const T* x, std::uint8_t* codes, std::size_t n, head_sums& head,
                        const Scale& scale) const noexcept {
        const rounded_products product;
        const float unit = head.inverse_unit();
        float values[head_sums::block] = {}, errors[head_sums::block] = {};
        std::uint32_t not_finite = 0;
        for (std::size_t i = 0; i < n; ++i) {
            const auto value = static_cast<float>(x[i]);
            const float at = product(value, 1.0f / scale(i));
            // Integers: comparisons of floats may trap, so compilers keep them as branches.
            const std::int32_t most = bit_cast<std::int32_t>(Codes::largest), magnitude = magnitude_bits(at);
            const std::int32_t kept = magnitude > infinite_bits ? 0 : smaller(magnitude, most);
            const auto position = bit_cast<float>(static_cast<std::uint32_t>(kept) |
                                                  (bit_cast<std::uint32_t>(at) & 0x80000000u));
            const std::uint8_t code = Codes::code(position);
            codes[i] = code;
            const auto xhat = static_cast<float>(T(product(Codes::value(code), scale(i))));
            const std::uint32_t finite = magnitude_bits(value) < infinite_bits ? ~std::uint32_t{0} : 0u;
            const float part = product(value, unit), error = product(value - xhat, unit);
            values[i] = bit_cast<float>(bit_cast<std::uint32_t>(product(part, part)) & finite);
            errors[i] = bit_cast<float>(bit_cast<std::uint32_t>(product(error, error)) & finite);
            not_finite += 1u + finite;
        }
        head.add(values, errors, not_finite);
    }

    std::size_t columns_, values_;
    bool by_column_;
    std::size_t group_;
};

/// Calls f(codec) with the codec of a quantized part.
template <class F>
void visit_head_codec(const state_part& p, F&& f) noexcept {
    visit_float_type(p.type, [&](auto t) {
        if (p.snapshot == snapshot_type::e4m3)
            f(head_codec<e4m3_codes, decltype(t)>(p), t);
        else
            f(head_codec<int8_codes, decltype(t)>(p), t);
    });
}

KVQ_FUNC std::size_t snapshot_bytes_of(const state_part& p) noexcept {
    return p.snapshot == snapshot_type::exact ? p.values() * size_of(p.type) : snapshot_places(p).bytes;
}

KVQ_FUNC void quantize_part(const state_part& p, const std::byte* live, std::byte* to) noexcept {
    const std::size_t bytes = snapshot_bytes_of(p);
    if (p.snapshot == snapshot_type::exact) {
        std::memcpy(to, live, bytes);
        return;
    }
    const default_arithmetic arithmetic;
    const snapshot_places places(p);
    std::memset(to + p.values(), 0, bytes - p.values());
    snapshot_sums sums;
    const std::size_t values = p.values() / static_cast<std::size_t>(p.heads);
    visit_head_codec(p, [&](const auto& codec, auto t) {
        for (std::size_t head = 0; head < static_cast<std::size_t>(p.heads); ++head)
            codec.quantize(reinterpret_cast<const decltype(t)*>(live) + head * values,
                           reinterpret_cast<std::uint8_t*>(to) + head * values,
                           reinterpret_cast<float*>(to + places.scales) + head * places.per_head, sums);
    });
    std::memcpy(to + places.sums, &sums, sizeof(sums));
}

KVQ_FUNC void dequantize_part(const state_part& p, const std::byte* from, std::byte* live) noexcept {
    if (p.snapshot == snapshot_type::exact) {
        std::memcpy(live, from, snapshot_bytes_of(p));
        return;
    }
    const default_arithmetic arithmetic;
    const snapshot_places places(p);
    const std::size_t values = p.values() / static_cast<std::size_t>(p.heads);
    visit_head_codec(p, [&](const auto& codec, auto t) {
        for (std::size_t head = 0; head < static_cast<std::size_t>(p.heads); ++head)
            codec.dequantize(reinterpret_cast<const std::uint8_t*>(from) + head * values,
                             reinterpret_cast<const float*>(from + places.scales) + head * places.per_head,
                             reinterpret_cast<decltype(t)*>(live) + head * values);
    });
}

KVQ_FUNC snapshot_sums sums_of_part(const state_part& p, const std::byte* snapshot) noexcept {
    return load_as<snapshot_sums>(snapshot + snapshot_places(p).sums);
}

}}}
