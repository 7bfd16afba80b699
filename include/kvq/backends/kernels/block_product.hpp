// The product of one block with n vectors, for any scheme: chosen once, at compile time.
//
//   full precision   float products on 16/32-bit values                       (value_product.hpp)
//   foldable         integer products on codes, parameters folded             (folded.hpp, code_product.hpp)
//   segmented        the same for one range of columns after the other, added up (segment_product.hpp)
//   anything else    the block is decoded to floats in the workspace, then multiplied
//
// `begin` prepares the vectors (where columns carry no parameters, once for all blocks), `finish` multiplies.
#pragma once

#include "code_product.hpp"
#include "segment_product.hpp"
#include "value_product.hpp"

namespace kvq::inline v0_1::kernels {

template <class Backend, class Scheme>
struct block_product {
    using lanes = typename Backend::lanes;

    /// May `begin` be called once and serve every block?
    static constexpr bool folds_once(tensor role) noexcept {
        if constexpr (foldable<Scheme>)
            return !Scheme::fold(role).columns();
        else
            return !segmented<Scheme>;
    }

    static std::size_t workspace_bytes(const Scheme& scheme, const block_shape& shape, int n) {
        if constexpr (full_precision<Scheme>) {
            return 0;
        } else if constexpr (foldable<Scheme>) {
            return parameter_bytes(scheme, shape) +
                   fold_layout<Scheme::code_bits>(scheme.codes(shape), Scheme::fold(shape.role).columns(), n)
                       .bytes;
        } else if constexpr (segmented<Scheme>) {
            return segment_product<lanes, Backend, Scheme>::workspace_bytes(scheme, shape, n);
        } else {
            return detail::round_up(shape.values() * sizeof(float), std::size_t{64});
        }
    }

    static void begin(const Scheme& scheme, const block_shape& shape, block_id id, const std::byte* block,
                      const float* x, std::ptrdiff_t x_stride, int n, std::byte* workspace) {
        if constexpr (foldable<Scheme>)
            fold<lanes, Backend>(scheme, shape, id, block, x, x_stride, n,
                                 workspace + parameter_bytes(scheme, shape));
    }

    /// y[i][r] (+)= sum_c x^[r][c] x[i][c] over the first `rows` rows and `cols` columns (a coded
    /// block is always full). ahead: distance to the block that will be read next, for prefetching.
    static void finish(const Scheme& scheme, const block_shape& shape, block_id id, const std::byte* block,
                       const float* x, std::ptrdiff_t x_stride, int n, int rows, int cols, float* y,
                       std::ptrdiff_t y_stride, bool add, std::ptrdiff_t ahead, std::byte* workspace) {
        if constexpr (full_precision<Scheme>) {
            value_product<lanes, typename Scheme::value_type>(shape, block, x, x_stride, n, rows, cols, y,
                                                              y_stride, add, ahead);
        } else if constexpr (foldable<Scheme>) {
            code_product<lanes, Backend, Scheme>(scheme, shape, id, block,
                                                 workspace + parameter_bytes(scheme, shape), n,
                                                 reinterpret_cast<float*>(workspace))
                .run(y, y_stride, add, ahead);
        } else if constexpr (segmented<Scheme>) {
            segment_product<lanes, Backend, Scheme>::run(scheme, shape, id, block, x, x_stride, n, y,
                                                         y_stride, add, ahead, workspace);
        } else {
            float* const values = reinterpret_cast<float*>(workspace);
            scheme.decode(shape, id, block, values);
            const bool key = shape.role == tensor::key;
            for (int i = 0; i < n; ++i)
                for (int r = 0; r < rows; ++r) {
                    float sum = 0.0f;
                    for (int c = 0; c < cols; ++c)
                        sum += values[key ? r * shape.dim + c : c * shape.dim + r] * x[i * x_stride + c];
                    float& out = y[i * y_stride + r];
                    out = add ? out + sum : sum;
                }
        }
    }

private:
    /// Row parameters come first in the workspace, then what `fold` makes.
    static std::size_t parameter_bytes(const Scheme& scheme,
                                       const block_shape& shape) requires foldable<Scheme> {
        return detail::round_up(
            code_product<lanes, Backend, Scheme>::parameter_floats(scheme, shape) * sizeof(float),
            std::size_t{64});
    }
};

}  // namespace kvq::inline v0_1::kernels
