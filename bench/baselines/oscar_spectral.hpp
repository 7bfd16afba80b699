// OSCAR: rotations from the covariance of queries, a quantile of each token cut off, then a range per token.
//
//   keys:    k' = P H U k,   U: eigenvectors of E[q q^T] of the layer and kv head, the largest first; H:
//                            Hadamard; P: bit reversal
//   values:  v' = H v
//   then B bits per token and head between the minimum and maximum of clipped<> tokens (0.96 of keys, 0.92 of
//     values)
//
// Bits, with everything counted: B + 32 / D (2 bits: 2.25 at D = 128, 2.5 at D = 64). The rotations, D^2 fp32
// per layer and kv head, do not grow with the context and are not counted. The paper keeps 64 sinks and 256
// recent tokens in 16 bit.
// Assumed: range and minimum in fp16. One matrix per kv head, as for the models with per-head rotations.
// Values have no covariance here (the paper weights theirs by attention scores): kvq::calibration sums
// queries and keys, so their rotation is H alone. Without statistics keys have H alone as well. A head_dim
// that is no power of two has H in blocks and no P.
// Source: OSCAR, arXiv 2605.17757, section 3, and the README of its published code.
#pragma once

#include <cmath>
#include <cstddef>
#include <kvq/quant/calibration.hpp>
#include <kvq/schemes/affine.hpp>
#include <kvq/schemes/transformed.hpp>
#include <vector>

#include "clipped.hpp"
#include "symmetric_eigen.hpp"

namespace baselines {

/// The rotations of keys, from statistics with products of queries.
inline kvq::rotation spectral_rotation(const kvq::calibration& statistics) {
    const kvq::cache_shape& shape = statistics.shape();
    const int dim = shape.head_dim;
    const auto size = static_cast<std::size_t>(dim);
    const bool whole = (dim & (dim - 1)) == 0;
    const kvq::hadamard_transform<0, 0> hadamard;
    std::vector<float> matrices;
    for (int layer = 0; layer < shape.layers; ++layer)
        for (int head = 0; head < shape.kv_heads; ++head) {
            std::vector<double> covariance;
            for (int i = 0; i < dim; ++i)
                for (int j = 0; j < dim; ++j)
                    covariance.push_back(statistics.query_product(layer, head, i, j));
            const std::vector<double> vectors = eigenvectors(std::move(covariance), dim);
            std::vector<float> rotated(size * size), column(size);
            for (int c = 0; c < dim; ++c) {  // H U, a column at a time
                for (int i = 0; i < dim; ++i)
                    column[static_cast<std::size_t>(i)] =
                        static_cast<float>(vectors[static_cast<std::size_t>(i * dim + c)]);
                hadamard.forward(dim, {layer, head}, column.data());
                for (int i = 0; i < dim; ++i) {
                    int row = i;
                    if (whole) {
                        row = 0;
                        for (int bit = 1; bit < dim; bit *= 2) row = 2 * row + (i & bit ? 1 : 0);
                    }
                    rotated[static_cast<std::size_t>(row * dim + c)] = column[static_cast<std::size_t>(i)];
                }
            }
            matrices.insert(matrices.end(), rotated.begin(), rotated.end());
        }
    return kvq::rotation(shape.layers, shape.kv_heads, dim, std::move(matrices));
}

template <int Bits>
struct oscar_spectral {
    using clipped_keys = clipped<kvq::affine<Bits, kvq::per_token<>>, 960>;
    using keys = kvq::rotated<clipped_keys>;
    using keys_without_statistics = kvq::hadamard<clipped_keys, 0, 0>;
    using values = kvq::hadamard<clipped<kvq::affine<Bits, kvq::per_token<>>, 920>, 0, 0>;
};

}  // namespace baselines
