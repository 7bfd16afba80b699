// An estimate of the scores of a block of keys from its parameters alone: which pages are worth reading
// (attention/selection.hpp).
//
//   x^[t][c] in r_t * [m_c - h_c, m_c + h_c]           m, h: middle and half of the range of the codes of
//                                                      channel c
//   estimate = max over groups of tokens of
//     sum_c q_c m_c + spread * sum_c |q_c| h_c,   times the extreme token scale
//
// spread = 1 gives an upper bound of all scores, up to float rounding. One function for all schemes: it takes
// the axes of a block, what codes mean and a source of parameters. Contract: reads parameters only; cost per
// group of tokens and row: two multiply-adds per channel.
// Source: the bound is that of Quest, arXiv 2406.10774, section 3.2, with the stored grid instead of stored
// minima and maxima.
#pragma once

#include "channel_ranges.hpp"
#include "folded.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Do the parameters of a scheme bound the keys of a block?
template <class Scheme>
inline constexpr bool bounds_keys = [] {
    if constexpr (segmented<Scheme>)
        return true;
    else if constexpr (foldable<Scheme> && detail::supports<Scheme>(tensor::key))
        return Scheme::fold(tensor::key).col_scale && !Scheme::fold(tensor::key).row_bias;
    else
        return false;
}();

/// Scratch of an estimate: [scales][biases][largest codes][scales and biases of tokens].
inline std::size_t estimate_slots(const grouped_axis& axis) {
    return static_cast<std::size_t>(detail::round_up(axis.padded_size(), 16)) + 16;
}
inline std::size_t estimate_floats(const product_blocks& of, const block_shape& shape) {
    return 3 * estimate_slots({shape.dim, of.col_group}) + 2 * estimate_slots({shape.tokens, of.row_group});
}

/// The source of parameters of a block of keys for an estimate, whose scratch has room for estimate_floats().
template <class Scheme>
parameter_source ranges_source(const Scheme& scheme, const block_shape& shape, const block_id& id,
                               const std::byte* block, const product_blocks& of, float* scratch) {
    if constexpr (segmented<Scheme>) {
        float* const tops = scratch + 2 * estimate_slots({shape.dim, of.col_group});
        scheme.for_each_segment(shape, id, [&]<int Bits>(const code_segment& segment) {
            for (int c = 0; c < segment.columns; ++c)
                tops[segment.first + c] = static_cast<float>((1 << Bits) - 1);
        });
        return of.source.of(id, block, tops);
    } else {
        return of.source.of(id, block);
    }
}

/// out[i] for `count` vectors x of source.shape.dim floats, x_stride apart, and tokens [first, end) of the
/// block of `source`. ahead: distance to the block whose estimate is next, for prefetching.
template <class Lanes>
KVQ_NOINLINE void estimate_scores(const product_blocks& of, const parameter_source& source, const float* x,
                                  std::ptrdiff_t x_stride, int count, int first, int end, float spread,
                                  float* out, std::ptrdiff_t ahead, float* scratch) {
    const grouped_axis rows{source.shape.tokens, of.row_group}, cols{source.shape.dim, of.col_group};
    // The middle of a code's range, and its half, as multiples of the scale (several widths: of the scale
    // times the largest code).
    const float half_codes = of.segment_count > 0 ? 0.5f : 0.5f * of.meaning.top_code,
                middle_code = half_codes - of.meaning.zero_code;
    const bool has_bias = of.meaning.use.col_bias, has_token_scales = of.meaning.use.row_scale;
    // Prefetched in parts between the groups: a processor keeps few lines in flight.
    const std::size_t part = (of.bytes - of.parameters) / static_cast<std::size_t>(rows.groups()) + 64;
    std::size_t next = of.parameters;
    float* const scale = scratch;
    float* const bias = scale + estimate_slots(cols);
    float* const token_scale = bias + 2 * estimate_slots(cols);
    if (!has_bias)  // a loop: functions of std have no name of an instruction set (core/tagged_vector.hpp)
        for (std::size_t i = 0, n = estimate_slots(cols); i < n; ++i) bias[i] = 0.0f;
    for (int rg = first / rows.group; rg * rows.group < end; ++rg) {
        for (const std::size_t to = detail::smaller(next + part, of.bytes); next < to; next += 64)
            detail::prefetch(source.block + ahead + next);
        source.columns(source, rg, scale, bias);
        for (int i = 0; i < count;) {
            const int queries = next_query_block(count - i);
            float estimate[query_block] = {};
            for (int cg = 0; cg < cols.groups(); ++cg) {
                float middle[query_block], half[query_block];
                const int slot = cols.group_begin(cg);
                const auto sum = [&]<bool Apart>() {
                    with_queries(queries, [&](auto n) {
                        sum_ranges<Lanes, decltype(n)::value, Apart>(
                            scale + slot, bias + slot, middle_code, half_codes,
                            x + i * x_stride + cg * cols.group, x_stride, cols.group_size(cg), spread, middle,
                            half);
                    });
                };
                has_token_scales ? sum.template operator()<true>() : sum.template operator()<false>();
                float least = 1.0f, most = 1.0f;
                if (has_token_scales) {
                    source.rows(source, cg, token_scale, token_scale + estimate_slots(rows));
                    const int from = detail::larger(first, rg * rows.group),
                              to = detail::smaller(end, rg * rows.group + rows.group_size(rg));
                    least = most = token_scale[rows.slot(from)];
                    for (int t = from + 1; t < to; ++t) {
                        least = detail::smaller(least, token_scale[rows.slot(t)]);
                        most = detail::larger(most, token_scale[rows.slot(t)]);
                    }
                }
                for (int k = 0; k < queries; ++k)
                    estimate[k] += detail::larger(least * middle[k], most * middle[k]) +
                                   spread * detail::larger(-least, most) * half[k];
            }
            for (int k = 0; k < queries; ++k)
                out[i + k] = rg == first / rows.group ? estimate[k] : detail::larger(out[i + k], estimate[k]);
            i += queries;
        }
    }
}

}}}  // namespace kvq::kernels
