// An estimate of the scores of a block of keys from its parameters alone: which pages are worth reading (attention/selection.hpp).
//
//   x^[t][c] in r_t * [m_c - h_c, m_c + h_c]           m, h: middle and half of the range of the codes of channel c
//   estimate = max over groups of tokens of  sum_c q_c m_c + spread * sum_c |q_c| h_c,   times the extreme token scale
//
// spread = 1 gives an upper bound of all scores, up to float rounding. Contract: reads parameters only; cost per group of tokens
// and row: two multiply-adds per channel.
// Source: the bound is that of Quest, arXiv 2406.10774, section 3.2, with the stored grid instead of stored minima and maxima.
#pragma once

#include "channel_ranges.hpp"
#include "folded.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

template <class Backend, class Scheme>
class score_estimate {
    using lanes = typename Backend::lanes;

    static constexpr bool folded_columns() {
        if constexpr (foldable<Scheme> && detail::supports<Scheme>(tensor::key))
            return Scheme::fold(tensor::key).col_scale && !Scheme::fold(tensor::key).row_bias;
        else
            return false;
    }

public:
    /// Do the parameters bound the keys of a block?
    static constexpr bool available = segmented<Scheme> || folded_columns();

    /// Floats of scratch.
    static std::size_t scratch_floats(const Scheme& scheme, const block_shape& shape) {
        const axes of = axes_of(scheme, shape);
        return 3 * padded(of.cols) + 2 * padded(of.rows);
    }

    /// out[i] for `rows` vectors x of shape.dim floats, x_stride apart, and tokens [first, end) of the block. ahead: distance to the
    /// block whose estimate is next, for prefetching.
    static void run(const Scheme& scheme, const block_shape& shape, block_id id, const std::byte* block,
                    const float* x, std::ptrdiff_t x_stride, int rows, int first, int end, float spread,
                    float* out, std::ptrdiff_t ahead, float* scratch) {
        const axes of = axes_of(scheme, shape);
        // Prefetched in parts between the groups: a processor keeps few lines in flight.
        const std::size_t bytes = scheme.block_bytes(shape);
        const std::size_t part =
            (bytes - parameters(scheme, shape)) / static_cast<std::size_t>(of.rows.groups()) + 64;
        std::size_t next = parameters(scheme, shape);
        float* const scale = scratch;
        float* const bias = scale + padded(of.cols);
        float* const token_scale = bias + 2 * padded(of.cols);
        if constexpr (segmented<Scheme>)
            scheme.for_each_segment(shape, id, [&]<int Bits>(const code_segment& segment) {
                float* const top = bias + padded(of.cols) + segment.first;
                for (int c = 0; c < segment.columns; ++c) top[c] = static_cast<float>((1 << Bits) - 1);
            });
        for (int rg = first / of.rows.group; rg * of.rows.group < end; ++rg) {
            for (const std::size_t to = detail::smaller(next + part, bytes); next < to; next += 64)
                detail::prefetch(block + ahead + next);
            load(scheme, shape, id, block, rg, scale, bias, bias + padded(of.cols));
            for (int i = 0; i < rows;) {
                const int queries = next_query_block(rows - i);
                float estimate[query_block] = {};
                for (int cg = 0; cg < of.cols.groups(); ++cg) {
                    float middle[query_block], half[query_block];
                    const int slot = of.cols.group_begin(cg);
                    with_queries(queries, [&](auto n) {
                        sum_ranges<lanes, decltype(n)::value, has_bias(), has_token_scales()>(
                            scale + slot, bias + slot, middle_code(), half_codes(),
                            x + i * x_stride + cg * of.cols.group, x_stride, of.cols.group_size(cg), spread,
                            middle, half);
                    });
                    float least = 1.0f, most = 1.0f;
                    if constexpr (has_token_scales()) {
                        scheme.template row_parameters<Backend>(shape, id, block, cg, token_scale,
                                                                token_scale + padded(of.rows));
                        const int from = detail::larger(first, rg * of.rows.group),
                                  to = detail::smaller(end, rg * of.rows.group + of.rows.group_size(rg));
                        least = most = token_scale[of.rows.slot(from)];
                        for (int t = from + 1; t < to; ++t) {
                            least = detail::smaller(least, token_scale[of.rows.slot(t)]);
                            most = detail::larger(most, token_scale[of.rows.slot(t)]);
                        }
                    }
                    for (int k = 0; k < queries; ++k)
                        estimate[k] += detail::larger(least * middle[k], most * middle[k]) +
                                       spread * detail::larger(-least, most) * half[k];
                }
                for (int k = 0; k < queries; ++k)
                    out[i + k] =
                        rg == first / of.rows.group ? estimate[k] : detail::larger(out[i + k], estimate[k]);
                i += queries;
            }
        }
    }

private:
    struct axes {
        grouped_axis rows, cols;
    };
    static axes axes_of(const Scheme& scheme, const block_shape& shape) {
        if constexpr (segmented<Scheme>) {
            const auto codes = scheme.columns(shape).codes(shape);
            return {codes.rows(), codes.cols};
        } else {
            const auto codes = scheme.codes(shape);
            return {codes.rows(), codes.cols};
        }
    }
    static std::size_t parameters(const Scheme& scheme, const block_shape& shape) {
        if constexpr (segmented<Scheme>)
            return scheme.columns(shape).parameters;
        else
            return scheme.codes(shape).bytes();
    }
    static std::size_t padded(const grouped_axis& axis) {
        return static_cast<std::size_t>(detail::round_up(axis.padded_size(), 16)) + 16;
    }

    /// The middle of a code's range, and its half, as multiples of the scale.
    static constexpr float middle_code() {
        if constexpr (segmented<Scheme>)
            return 0.5f;  // scales are multiplied with the largest code
        else
            return 0.5f * static_cast<float>((1 << Scheme::code_bits) - 1) -
                   static_cast<float>(Scheme::zero_code);
    }
    static constexpr float half_codes() {
        if constexpr (segmented<Scheme>)
            return 0.5f;
        else
            return 0.5f * static_cast<float>((1 << Scheme::code_bits) - 1);
    }
    static constexpr bool has_token_scales() {
        if constexpr (foldable<Scheme>)
            return Scheme::fold(tensor::key).row_scale;
        else
            return false;
    }
    static constexpr bool has_bias() {
        if constexpr (segmented<Scheme>)
            return true;
        else
            return Scheme::fold(tensor::key).col_bias;
    }

    static void load(const Scheme& scheme, const block_shape& shape, block_id id, const std::byte* block,
                     int row_group, float* scale, float* bias, [[maybe_unused]] const float* tops) {
        if constexpr (segmented<Scheme>)
            scheme.columns(shape).template load<Backend>(block, row_group, scale, bias, tops);
        else
            scheme.template col_parameters<Backend>(shape, id, block, row_group, scale, bias);
    }
};

}}}  // namespace kvq::kernels
