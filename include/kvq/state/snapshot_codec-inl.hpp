// Definitions of snapshot_codec.hpp.
#pragma once

#include <cstring>

#include "../core/float_environment.hpp"
#include "snapshot_codec.hpp"
#include "snapshot_codes.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

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
            const auto q = quantize_value<Codes>(x[i], scale(i), unit, product);
            codes[i] = q.code;
            values[i] = q.square;
            errors[i] = q.error;
            not_finite += q.not_finite;
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
