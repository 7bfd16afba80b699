// An estimate of the scores of a block of keys from its parameters alone: which pages are worth reading (attention/selection.hpp).
//
//   x^[t][c] in r_t * [m_c - h_c, m_c + h_c]           m, h: middle and half of the range of the codes of channel c
//   estimate = max over groups of tokens of  sum_c q_c m_c + spread * sum_c |q_c| h_c,   times the extreme token scale
//
// spread = 1 gives an upper bound of all scores, up to float rounding. One function for all schemes: it takes the axes of a block, what codes
// mean and a source of parameters. Contract: reads parameters only; cost per group of tokens and row: two multiply-adds per channel.
// Source: the bound is that of Quest, arXiv 2406.10774, section 3.2, with the stored grid instead of stored minima and maxima.
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

/// What an estimate knows of a block of keys.
struct key_ranges {
    grouped_axis rows, cols;
    std::size_t parameters, bytes;  ///< offset of the parameters in the block; of the block
    /// The middle of a code's range, and its half, as multiples of the scale (several widths: of the scale times the largest code).
    float middle_code, half_codes;
    bool has_bias, has_token_scales;

    template <class Scheme>
    key_ranges(const Scheme& scheme, const block_shape& shape) : bytes(scheme.block_bytes(shape)) {
        if constexpr (segmented<Scheme>) {
            const auto codes = scheme.columns(shape).codes(shape);
            rows = codes.rows();
            cols = codes.cols;
            parameters = scheme.columns(shape).parameters;
            middle_code = half_codes = 0.5f;
            has_bias = true;
            has_token_scales = false;
        } else {
            const auto codes = scheme.codes(shape);
            rows = codes.rows();
            cols = codes.cols;
            parameters = codes.bytes();
            half_codes = 0.5f * static_cast<float>(detail::largest_multiplied<Scheme>);
            middle_code = half_codes - static_cast<float>(Scheme::zero_code);
            has_bias = Scheme::fold(tensor::key).col_bias;
            has_token_scales = Scheme::fold(tensor::key).row_scale;
        }
    }

    /// Scratch: [scales][biases][largest codes][scales and biases of tokens].
    std::size_t scratch_floats() const { return 3 * padded(cols) + 2 * padded(rows); }
    float* largest_codes(float* scratch) const { return scratch + 2 * padded(cols); }
    static std::size_t padded(const grouped_axis& axis) {
        return static_cast<std::size_t>(detail::round_up(axis.padded_size(), 16)) + 16;
    }
};

/// The source of parameters of a block for an estimate, whose scratch has room for key_ranges::scratch_floats.
template <class Backend, class Scheme>
parameter_source ranges_source(const Scheme& scheme, const block_shape& shape, block_id id,
                               const std::byte* block, const key_ranges& of, float* scratch) {
    if constexpr (segmented<Scheme>)
        scheme.for_each_segment(shape, id, [&]<int Bits>(const code_segment& segment) {
            float* const top = of.largest_codes(scratch) + segment.first;
            for (int c = 0; c < segment.columns; ++c) top[c] = static_cast<float>((1 << Bits) - 1);
        });
    return parameters_of<Backend>(scheme, shape)
        .of(id, block, segmented<Scheme> ? of.largest_codes(scratch) : nullptr);
}

/// out[i] for `rows` vectors x of shape.dim floats, x_stride apart, and tokens [first, end) of the block of `source`. ahead: distance to
/// the block whose estimate is next, for prefetching.
template <class Lanes>
KVQ_NOINLINE void estimate_scores(const key_ranges& of, const parameter_source& source, const float* x,
                                  std::ptrdiff_t x_stride, int rows, int first, int end, float spread,
                                  float* out, std::ptrdiff_t ahead, float* scratch) {
    // Prefetched in parts between the groups: a processor keeps few lines in flight.
    const std::size_t part = (of.bytes - of.parameters) / static_cast<std::size_t>(of.rows.groups()) + 64;
    std::size_t next = of.parameters;
    float* const scale = scratch;
    float* const bias = scale + key_ranges::padded(of.cols);
    float* const token_scale = bias + 2 * key_ranges::padded(of.cols);
    if (!of.has_bias)  // a loop: functions of std have no name of an instruction set (core/tagged_vector.hpp)
        for (std::size_t i = 0, n = static_cast<std::size_t>(key_ranges::padded(of.cols)); i < n; ++i)
            bias[i] = 0.0f;
    for (int rg = first / of.rows.group; rg * of.rows.group < end; ++rg) {
        for (const std::size_t to = detail::smaller(next + part, of.bytes); next < to; next += 64)
            detail::prefetch(source.block + ahead + next);
        source.columns(source, rg, scale, bias);
        for (int i = 0; i < rows;) {
            const int queries = next_query_block(rows - i);
            float estimate[query_block] = {};
            for (int cg = 0; cg < of.cols.groups(); ++cg) {
                float middle[query_block], half[query_block];
                const int slot = of.cols.group_begin(cg);
                const auto sum = [&]<bool Apart>() {
                    with_queries(queries, [&](auto n) {
                        sum_ranges<Lanes, decltype(n)::value, Apart>(
                            scale + slot, bias + slot, of.middle_code, of.half_codes,
                            x + i * x_stride + cg * of.cols.group, x_stride, of.cols.group_size(cg), spread,
                            middle, half);
                    });
                };
                of.has_token_scales ? sum.template operator()<true>() : sum.template operator()<false>();
                float least = 1.0f, most = 1.0f;
                if (of.has_token_scales) {
                    source.rows(source, cg, token_scale, token_scale + key_ranges::padded(of.rows));
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

}}}  // namespace kvq::kernels
