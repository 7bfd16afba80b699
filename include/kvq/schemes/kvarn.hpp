// KVarN: rotate, normalise the variance of tokens and channels by turns, then round min-max; all scales in fp16.
//
//   Y = X / (r_t c_c)      r, c: products of the standard deviations met in 8 turns of channels, then tokens; the turn with the
//                          smallest max/min of deviations (tokens + channels) is kept
//   keys:   lines are channels, values: lines are tokens;  s = max((max - min) / (2^B - 1), 1e-10), z = min of the line in Y
//   x^ = (s' code + z') f    s' = s times the line's own factor, z' likewise, f the factor of the other axis
//
// A tile is a page: published with 128 tokens, behind a Hadamard transform (schemes/transformed.hpp) over head_dim.
// `Floor`: factors are kept above e^-0.3 (as published; variances below that of about 0.5 are then not normalised) or free.
// The codes are integers under row and column factors: foldable, with `f` on rows and s', z' on columns.
//
// Contract: factors are products of square roots of sums in double, the same on every platform; codes round half to even.
// What is not finite enters no deviation and no range; infinities saturate, NaN codes as the value nearest zero.
// Source: KVarN, arXiv 2606.03458; the alternating normalisation is that of SINQ, arXiv 2509.22944.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "../core/rounding.hpp"
#include "../core/text.hpp"
#include "../pack/bit_pack.hpp"
#include "transformed.hpp"

namespace kvq::inline KVQ_TAGGED {

template <int Bits, bool Floor = true, int Turns = 8>
struct variance_normalized {
    using attends_as = variance_normalized;
    static constexpr int code_bits = Bits;
    static constexpr int zero_code = 0;
    static constexpr int top = (1 << Bits) - 1;

    short_text name() const {
        return short_text("variance-normalized") + short_text::of(Bits) + (Floor ? "" : "-free");
    }

    constexpr code_layout<Bits> codes(const block_shape& s) const noexcept {
        return {{s.rows(), s.rows()}, {s.cols(), s.cols()}};
    }
    static constexpr fold_use fold(tensor) noexcept { return {true, false, true, true}; }

    constexpr std::size_t block_bytes(const block_shape& s) const noexcept {
        return bias_offset(s) + section(codes(s).cols.padded_size());
    }

    std::uint32_t quantize(const block_shape& s, const block_id&, const float* values,
                           std::byte* block) const {
        std::memset(block, 0, block_bytes(s));
        const auto layout = codes(s);
        const int rows = s.rows(), cols = s.cols();
        const auto at = [&](int r, int c) {
            return values[s.role == tensor::key ? r * s.dim + c : c * s.dim + r];
        };
        std::uint32_t not_finite = 0;
        for (std::size_t i = 0; i < s.values(); ++i) not_finite += !detail::is_finite(values[i]);

        const factors f = normalise(rows, cols, at);
        for (int r = 0; r < rows; ++r)
            store(block + row_offset(s), layout.rows().slot(r), f.rows[static_cast<std::size_t>(r)]);
        for (int c = 0; c < cols; ++c) {
            const double own = f.cols[static_cast<std::size_t>(c)];
            const auto normal = [&](int r) {
                return static_cast<float>(static_cast<double>(at(r, c)) /
                                          (f.rows[static_cast<std::size_t>(r)] * own));
            };
            float lo = 0.0f, hi = 0.0f;
            bool any = false;
            for (int r = 0; r < rows; ++r)
                if (const float y = normal(r); detail::is_finite(at(r, c))) {
                    lo = any ? detail::smaller(lo, y) : y;
                    hi = any ? detail::larger(hi, y) : y;
                    any = true;
                }
            const float scale = detail::larger((hi - lo) / static_cast<float>(top), 1e-10f);
            store(block + scale_offset(s), layout.cols.slot(c), static_cast<double>(scale) * own);
            store(block + bias_offset(s), layout.cols.slot(c), static_cast<double>(lo) * own);
            for (int r = 0; r < rows; ++r)
                pack_code(layout, block, r, c,
                          static_cast<unsigned>(detail::affine_code(normal(r), lo, 1.0f / scale, top)));
        }
        return not_finite;
    }

    void dequantize(const block_shape& s, const block_id&, const std::byte* block, float* values) const {
        const auto layout = codes(s);
        for (int r = 0; r < s.rows(); ++r)
            for (int c = 0; c < s.cols(); ++c)
                values[s.role == tensor::key ? r * s.dim + c : c * s.dim + r] = detail::rounded_product(
                    load(block + row_offset(s), layout.rows().slot(r)),
                    detail::affine_value(static_cast<int>(unpack_code(layout, block, r, c)),
                                         load(block + scale_offset(s), layout.cols.slot(c)),
                                         load(block + bias_offset(s), layout.cols.slot(c))));
    }

    template <class Backend>
    void row_parameters(const block_shape& s, const block_id&, const std::byte* block, int, float* scale,
                        float*) const {
        Backend::template load_floats<float16>(block + row_offset(s), codes(s).rows().padded_size(), scale);
    }
    template <class Backend>
    void col_parameters(const block_shape& s, const block_id&, const std::byte* block, int, float* scale,
                        float* bias) const {
        Backend::template load_floats<float16>(block + scale_offset(s), codes(s).cols.padded_size(), scale);
        Backend::template load_floats<float16>(block + bias_offset(s), codes(s).cols.padded_size(), bias);
    }

private:
    struct factors {
        std::vector<double> rows, cols;
    };
    static constexpr double smallest = Floor ? 0.74081822068171788 : 1e-6;  // e^-0.3
    static constexpr double most = 22026.465794806718;                      // e^10

    /// Standard deviation of the finite numbers among x(0..n), between 1e-3 and 1e3.
    template <class F>
    static double deviation(int n, const F& x) {
        double sum = 0.0, squares = 0.0;
        int count = 0;
        for (int i = 0; i < n; ++i)
            if (const double v = x(i); v - v == 0.0) sum += v, ++count;
        const double mean = count ? sum / count : 0.0;
        for (int i = 0; i < n; ++i)
            if (const double v = x(i); v - v == 0.0) squares += detail::rounded_product(v - mean, v - mean);
        const double sigma = count ? std::sqrt(squares / count) : 1.0;
        return sigma < 1e-3 ? 1e-3 : sigma > 1e3 ? 1e3 : sigma;
    }

    template <class At>
    static factors normalise(int rows, int cols, const At& at) {
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
        const auto clipped = [](double f) { return f < smallest ? smallest : f > most ? most : f; };
        const auto spread = [](const std::vector<double>& sigma) {
            double lo = sigma[0], hi = sigma[0];
            for (const double v : sigma) lo = detail::smaller(lo, v), hi = detail::larger(hi, v);
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

    static void store(std::byte* section, int slot, double value) noexcept {
        constexpr double limit = 65504.0;
        const double kept = value > limit ? limit : value < -limit ? -limit : value;
        detail::store_as(section + 2 * static_cast<std::size_t>(slot), float16(static_cast<float>(kept)));
    }
    static float load(const std::byte* section, int slot) noexcept {
        return detail::load_as<float16>(section + 2 * static_cast<std::size_t>(slot));
    }
    static constexpr std::size_t section(int slot_count) noexcept {
        return detail::round_up(2 * static_cast<std::size_t>(slot_count), std::size_t{16});
    }
    constexpr std::size_t row_offset(const block_shape& s) const noexcept {
        return detail::round_up(codes(s).bytes(), std::size_t{16});
    }
    constexpr std::size_t scale_offset(const block_shape& s) const noexcept {
        return row_offset(s) + section(codes(s).rows().padded_size());
    }
    constexpr std::size_t bias_offset(const block_shape& s) const noexcept {
        return scale_offset(s) + section(codes(s).cols.padded_size());
    }
};

/// Pass where a cache takes a pair. Pages of 128 tokens are what the paper uses.
template <int KeyBits, int ValueBits = KeyBits, bool Floor = true>
struct kvarn {
    using keys = hadamard<variance_normalized<KeyBits, Floor>>;
    using values = hadamard<variance_normalized<ValueBits, Floor>>;
};

static_assert(foldable<kvarn<4>::keys> && transforming<kvarn<4>::keys>);

}  // namespace kvq::inline KVQ_TAGGED
