// KVarN: rotate, normalize the variances of tokens and channels in turns, then round min-max. All scales are
// float16.
//
//   Y = X / (r_t c_c)      r, c: products of the standard deviations of 8 turns over channels, then tokens.
//                          The turn with the smallest max/min of deviations (tokens + channels) is kept
//   keys:   lines are channels, values: lines are tokens;
//     s = max((max - min) / (2^B - 1), 1e-10), z = min of the line in Y
//   x^ = (s' code + z') f    s' and z' are s and z times the line's own scale, f is the scale of the other
//                            axis
//   block = [codes][f of rows][s' of columns][z' of columns]
//
// A tile is a page. Floor: scales r and c are at least e^-0.3, as in the paper, so that variances below about
// 0.5 do not change. Without Floor they are at least 1e-6. The codes are integers under row and column
// scales, so the scheme is foldable.
//
// Contract: r and c are products of square roots of sums in double, the same on every platform. Codes round
// half to even. NaN and infinities enter no deviation and no range. Infinities saturate, NaN gets the code of
// the value nearest zero.
// Source: KVarN, arXiv 2606.03458; the alternating normalization is that of SINQ, arXiv 2509.22944.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <kvq/core/rounding.hpp>
#include <kvq/pack/bit_pack.hpp>
#include <kvq/quant/affine.hpp>
#include <kvq/schemes/transformed.hpp>
#include <string>
#include <vector>

#include "half_section.hpp"

namespace baselines {

template <int Bits, bool Floor = true, int Turns = 8>
struct variance_normalized {
    using attends_as = variance_normalized;
    static constexpr int code_bits = Bits;
    static constexpr int zero_code = 0;
    static constexpr int top = (1 << Bits) - 1;

    std::string name() const { return "variance-normalized" + std::to_string(Bits) + (Floor ? "" : "-free"); }

    constexpr kvq::code_layout<Bits> codes(const kvq::block_shape& s) const noexcept {
        return {{s.rows(), s.rows()}, {s.cols(), s.cols()}};
    }
    static constexpr kvq::fold_use fold(kvq::tensor) noexcept { return {true, false, true, true}; }

    constexpr std::size_t block_bytes(const kvq::block_shape& s) const noexcept {
        return bias_offset(s) + half_section(codes(s).cols.padded_size());
    }

    /// values: [tokens][dim]. Writes all block_bytes(s) bytes of the block. Returns how many values were not
    /// finite.
    std::uint32_t quantize(const kvq::block_shape& s, const kvq::block_id&, const float* values,
                           std::byte* block) const {
        std::memset(block, 0, block_bytes(s));
        const auto layout = codes(s);
        const int rows = s.rows(), cols = s.cols();
        const auto at = [&](int r, int c) {
            return values[s.role == kvq::tensor::key ? r * s.dim + c : c * s.dim + r];
        };
        std::uint32_t not_finite = 0;
        for (std::size_t i = 0; i < s.values(); ++i) not_finite += !std::isfinite(values[i]);

        const factors f = normalize(rows, cols, at);
        for (int r = 0; r < rows; ++r)
            store_half(block + row_offset(s), layout.rows().slot(r), f.rows[static_cast<std::size_t>(r)]);
        for (int c = 0; c < cols; ++c) {
            const double own = f.cols[static_cast<std::size_t>(c)];
            const auto normal = [&](int r) {
                return static_cast<float>(static_cast<double>(at(r, c)) /
                                          (f.rows[static_cast<std::size_t>(r)] * own));
            };
            float lo = 0.0f, hi = 0.0f;
            bool any = false;
            for (int r = 0; r < rows; ++r)
                if (const float y = normal(r); std::isfinite(at(r, c))) {
                    lo = any ? std::min(lo, y) : y;
                    hi = any ? std::max(hi, y) : y;
                    any = true;
                }
            const float scale = std::max((hi - lo) / static_cast<float>(top), 1e-10f);
            store_half(block + scale_offset(s), layout.cols.slot(c), static_cast<double>(scale) * own);
            store_half(block + bias_offset(s), layout.cols.slot(c), static_cast<double>(lo) * own);
            for (int r = 0; r < rows; ++r)
                kvq::pack_code(
                    layout, block, r, c,
                    static_cast<unsigned>(kvq::asymmetric::code<Bits>(normal(r), lo, 1.0f / scale)));
        }
        return not_finite;
    }

    /// values: [tokens][dim], written.
    void dequantize(const kvq::block_shape& s, const kvq::block_id&, const std::byte* block,
                    float* values) const {
        const auto layout = codes(s);
        for (int r = 0; r < s.rows(); ++r)
            for (int c = 0; c < s.cols(); ++c)
                values[s.role == kvq::tensor::key ? r * s.dim + c : c * s.dim + r] = kvq::rounded_product(
                    load_half(block + row_offset(s), layout.rows().slot(r)),
                    kvq::asymmetric::value<Bits>(static_cast<int>(kvq::unpack_code(layout, block, r, c)),
                                                 load_half(block + scale_offset(s), layout.cols.slot(c)),
                                                 load_half(block + bias_offset(s), layout.cols.slot(c))));
    }

    template <class Backend>
    void row_parameters(const kvq::block_shape& s, const kvq::block_id&, const std::byte* block, int,
                        float* scale, float*) const {
        Backend::template load_floats<kvq::float16>(block + row_offset(s), codes(s).rows().padded_size(),
                                                    scale);
    }
    template <class Backend>
    void col_parameters(const kvq::block_shape& s, const kvq::block_id&, const std::byte* block, int,
                        float* scale, float* bias) const {
        Backend::template load_floats<kvq::float16>(block + scale_offset(s), codes(s).cols.padded_size(),
                                                    scale);
        Backend::template load_floats<kvq::float16>(block + bias_offset(s), codes(s).cols.padded_size(),
                                                    bias);
    }

private:
    struct factors {
        std::vector<double> rows, cols;
    };
    static constexpr double smallest = Floor ? 0.74081822068171788 : 1e-6;  // e^-0.3
    static constexpr double most = 22026.465794806718;                      // e^10

    /// Standard deviation of the finite values among x(0), ..., x(n - 1), clamped to [1e-3, 1e3]; 1 if none
    /// is finite.
    template <class F>
    static double deviation(int n, const F& x) {
        double sum = 0.0, squares = 0.0;
        int count = 0;
        for (int i = 0; i < n; ++i)
            if (const double v = x(i); std::isfinite(v)) sum += v, ++count;
        const double mean = count ? sum / count : 0.0;
        for (int i = 0; i < n; ++i)
            if (const double v = x(i); std::isfinite(v)) squares += kvq::rounded_product(v - mean, v - mean);
        const double sigma = count ? std::sqrt(squares / count) : 1.0;
        return std::clamp(sigma, 1e-3, 1e3);
    }

    template <class At>
    static factors normalize(int rows, int cols, const At& at) {
        factors now{std::vector<double>(static_cast<std::size_t>(rows), 1.0),
                    std::vector<double>(static_cast<std::size_t>(cols), 1.0)};
        const auto normal = [&](int r, int c) {
            return static_cast<double>(at(r, c)) /
                   (now.rows[static_cast<std::size_t>(r)] * now.cols[static_cast<std::size_t>(c)]);
        };
        const auto row_deviation = [&](int r) {
            return deviation(cols, [&](int c) { return normal(r, c); });
        };
        const auto col_deviation = [&](int c) {
            return deviation(rows, [&](int r) { return normal(r, c); });
        };
        const auto clipped = [](double f) { return std::clamp(f, smallest, most); };
        const auto spread = [](const std::vector<double>& sigma) {
            double lo = sigma[0], hi = sigma[0];
            for (const double v : sigma) lo = std::min(lo, v), hi = std::max(hi, v);
            return hi / lo;
        };
        factors best = now;
        double least = 0.0;
        std::vector<double> of_rows(static_cast<std::size_t>(rows)), of_cols(static_cast<std::size_t>(cols));
        for (int turn = 0; turn <= Turns; ++turn) {
            for (int r = 0; r < rows; ++r) of_rows[static_cast<std::size_t>(r)] = row_deviation(r);
            for (int c = 0; c < cols; ++c) of_cols[static_cast<std::size_t>(c)] = col_deviation(c);
            const double imbalance = spread(of_rows) + spread(of_cols);
            if (turn == 0 || imbalance < least) least = imbalance, best = now;
            if (turn == Turns) break;
            for (std::size_t c = 0; c < of_cols.size(); ++c) now.cols[c] = clipped(now.cols[c] * of_cols[c]);
            for (int r = 0; r < rows; ++r) of_rows[static_cast<std::size_t>(r)] = row_deviation(r);
            for (std::size_t r = 0; r < of_rows.size(); ++r) now.rows[r] = clipped(now.rows[r] * of_rows[r]);
        }
        return best;
    }

    constexpr std::size_t row_offset(const kvq::block_shape& s) const noexcept {
        return padded(codes(s).bytes());
    }
    constexpr std::size_t scale_offset(const kvq::block_shape& s) const noexcept {
        return row_offset(s) + half_section(codes(s).rows().padded_size());
    }
    constexpr std::size_t bias_offset(const kvq::block_shape& s) const noexcept {
        return scale_offset(s) + half_section(codes(s).cols.padded_size());
    }
};

/// KVarN as published: behind a Hadamard transform over head_dim, for pages of 128 tokens.
template <int KeyBits, int ValueBits = KeyBits, bool Floor = true>
struct kvarn {
    using keys = kvq::hadamard<variance_normalized<KeyBits, Floor>>;
    using values = kvq::hadamard<variance_normalized<ValueBits, Floor>>;
};

static_assert(kvq::foldable<kvarn<4>::keys> && kvq::transforming<kvarn<4>::keys>);

}  // namespace baselines
