// The product of one block with n operands, queries (K) or rows of weights (V), for any scheme. The kernel is chosen at compile time.
//
//   full precision   float products on 16/32-bit values                       (window_product.hpp)
//                    many operands: 16-bit values as integers of 14 bits      (word_product.hpp)
//   foldable         integer products on codes, parameters folded             (folded.hpp, code_product.hpp)
//   segmented        the same for one range of columns after the other, added up (segment_product.hpp)
//   other schemes    the block is dequantized to floats in the workspace, then multiplied
//
// One object serves many blocks of one shape, so that layouts are computed once. `begin` prepares the operands (once for all blocks
// if columns carry no parameters), `finish` multiplies.
#pragma once

#include <utility>

#include "product/code_product.hpp"
#include "product/segment_product.hpp"
#include "window/word_product.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Blocks that are multiplied directly, or dequantized first.
struct float_plan {
    std::size_t values;  ///< floats of the workspace

    std::size_t workspace_bytes() const { return detail::round_up(values * sizeof(float), std::size_t{64}); }
};

/// Blocks of 16/32-bit values that are multiplied directly, or converted to words first.
template <class Lanes, class T>
struct value_plan {
    word_space words;  ///< empty: multiplied directly

    value_plan(const block_shape& shape, int n)
        : words(multiplies_words<Lanes, T>(n) ? word_space(shape, n) : word_space()) {}
    std::size_t workspace_bytes() const { return words.bytes; }
};

template <class Backend, class Scheme>
auto plan_products(const Scheme& scheme, const block_shape& shape, block_id id, int n) {
    if constexpr (foldable<Scheme>)
        return code_plan<Scheme::code_bits>(Scheme::fold(shape.role), Scheme::zero_code, scheme.codes(shape),
                                            n, query_bytes_in_tiles<typename Backend::lanes, Backend>(n));
    else if constexpr (segmented<Scheme>)
        return segment_plan<Scheme>(scheme, shape, id, n,
                                    query_bytes_in_tiles<typename Backend::lanes, Backend>(n));
    else if constexpr (full_precision<Scheme>)
        return value_plan<typename Backend::lanes, typename Scheme::value_type>(shape, n);
    else
        return float_plan{shape.values()};
}

/// Products of `n` operands with one head's blocks of `scheme`, which must outlive it. On architectures that multiply tiles, a
/// tile_session for n operands must be open during `finish`.
template <class Backend, class Scheme>
class block_product {
public:
    using scheme_type = Scheme;
    using lanes = typename Backend::lanes;

    /// shape: of every quantized block. (Blocks of 16/32-bit values may be shorter: calls take their shape as an argument.)
    block_product(const Scheme& scheme, const block_shape& shape, block_id id, int n)
        : scheme_(scheme),
          plan_(plan_products<Backend>(scheme, shape, id, n)),
          n_(n),
          block_bytes_(scheme.block_bytes(shape)) {}

    /// Does one call of `begin` serve every block?
    static constexpr bool folds_once(tensor role) noexcept {
        if constexpr (foldable<Scheme>)
            return !Scheme::fold(role).columns();
        else
            return true;
    }

    /// Distance from one head's block to the next.
    std::size_t block_bytes(const block_shape& shape) const {
        if constexpr (full_precision<Scheme>)
            return scheme_.block_bytes(shape);
        else
            return block_bytes_;
    }
    std::size_t workspace_bytes() const { return plan_.workspace_bytes(); }

    void begin(const block_shape& shape, block_id id, const std::byte* block, const float* x,
               std::ptrdiff_t x_stride, std::byte* workspace) const {
        if constexpr (foldable<Scheme>)
            fold<lanes, Backend>(plan_.meaning, plan_.fold, parameters_of<Backend>(scheme_, shape, id, block),
                                 x, x_stride, workspace + plan_.parameter_bytes);
        else if constexpr (segmented<Scheme>)
            plan_.write_units(workspace);
        else if constexpr (full_precision<Scheme>)
            if (shape.role == tensor::key) fold_words(x, x_stride, shape.cols(), workspace);
    }

    /// y[i][r] (+)= sum_c x^[r][c] x[i][c] over the first `rows` rows and `cols` columns (a quantized
    /// block is always full). ahead: distance to the block that is read next, for prefetching; 0: none.
    void finish(const block_shape& shape, block_id id, const std::byte* block, const float* x,
                std::ptrdiff_t x_stride, int rows, int cols, float* y, std::ptrdiff_t y_stride, bool add,
                std::ptrdiff_t ahead, std::byte* workspace) const {
        // Prefetched, because parameters are needed first and all at once: every block would begin with a wait for memory.
        if constexpr (foldable<Scheme> || segmented<Scheme>)
            for (std::size_t at = plan_.parameters; at < block_bytes_; at += 64)
                detail::prefetch(block + ahead + at);
        if constexpr (full_precision<Scheme>) {
            // For V the number of used columns is known only here.
            if (shape.role == tensor::value) fold_words(x, x_stride, cols, workspace);
            if (multiply_words(shape, block, rows, cols, y, y_stride, add, ahead, workspace)) return;
            window_product<lanes, typename Scheme::value_type>(shape, block, x, x_stride, n_, rows, cols, y,
                                                               y_stride, add, ahead);
        } else if constexpr (foldable<Scheme>) {
            code_product<lanes, Backend, Scheme::code_bits>(
                plan_, parameters_of<Backend>(scheme_, shape, id, block), workspace)
                .run(y, y_stride, add, ahead);
        } else if constexpr (segmented<Scheme>) {
            segment_product<lanes, Backend, Scheme>::run(plan_, shape, id, block, x, x_stride, y, y_stride,
                                                         add, ahead, workspace);
        } else {
            float* const values = reinterpret_cast<float*>(workspace);
            Backend::dequantize(scheme_, shape, id, block, values, std::ptrdiff_t{shape.dim}, values);
            for (int i = 0; i < n_; ++i) {
                if (shape.role == tensor::key)
                    multiply_keys(values, shape.dim, x + i * x_stride, rows, cols, y + i * y_stride, add);
                else
                    for (int from = 0; from < cols; from += sum_columns)
                        multiply_values(values + std::ptrdiff_t{from} * shape.dim, shape.dim,
                                        x + i * x_stride + from, rows,
                                        detail::smaller(cols - from, sum_columns), y + i * y_stride,
                                        add || from > 0);
            }
        }
    }

private:
    // Products with dequantized values, [tokens][dim].

    /// y[t] (+)= sum over channels of values[t][c] x[c].
    static void multiply_keys(const float* values, int dim, const float* x, int tokens, int channels,
                              float* y, bool add) {
        for (int t = 0; t < tokens; ++t) {
            const float* const row = values + t * dim;
            auto sums = lanes::splat_float(0.0f);
            int c = 0;
            for (; c + lanes::width <= channels; c += lanes::width)
                sums = lanes::multiply_add(lanes::load_floats(row + c), lanes::load_floats(x + c), sums);
            float sum = lanes::sum(sums);
            for (; c < channels; ++c) sum += row[c] * x[c];
            y[t] = add ? y[t] + sum : sum;
        }
    }
    /// y[c] (+)= sum over tokens of values[t][c] x[t].
    static void multiply_values(const float* values, int dim, const float* x, int channels, int tokens,
                                float* y, bool add) {
        int c = 0;
        for (; c + lanes::width <= channels; c += lanes::width) {
            auto sums = add ? lanes::load_floats(y + c) : lanes::splat_float(0.0f);
            for (int t = 0; t < tokens; ++t)
                sums = lanes::multiply_add(lanes::load_floats(values + t * dim + c), lanes::splat_float(x[t]),
                                           sums);
            lanes::store_floats(y + c, sums);
        }
        for (; c < channels; ++c) {
            float sum = 0.0f;
            for (int t = 0; t < tokens; ++t) sum += values[t * dim + c] * x[t];
            y[c] = add ? y[c] + sum : sum;
        }
    }

    template <class T>
    static constexpr bool by_words = has_word_dots<lanes> && sizeof(T) == 2;

    void fold_words(const float* x, std::ptrdiff_t x_stride, int cols, std::byte* workspace) const {
        using T = typename Scheme::value_type;
        if constexpr (by_words<T>)
            if (plan_.words.n > 0) word_product<lanes, T>::fold(plan_.words, x, x_stride, cols, workspace);
    }
    bool multiply_words(const block_shape& shape, const std::byte* block, int rows, int cols, float* y,
                        std::ptrdiff_t y_stride, bool add, std::ptrdiff_t ahead, std::byte* workspace) const {
        using T = typename Scheme::value_type;
        if constexpr (by_words<T>)
            if (plan_.words.n > 0)
                return word_product<lanes, T>::run(plan_.words, shape, block, rows, cols, y, y_stride, add,
                                                   ahead, workspace);
        return false;
    }

    const Scheme& scheme_;
    decltype(plan_products<Backend>(std::declval<const Scheme&>(), block_shape{}, block_id{}, 0)) plan_;
    int n_;
    std::size_t block_bytes_;
};

}}}  // namespace kvq::kernels
