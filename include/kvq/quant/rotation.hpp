// A given orthogonal matrix per layer and head: y = R x, x = R^T y.
//
// For rotations that were learned or computed from statistics beforehand (OSCAR: eigenvectors of the query
// covariance times a Hadamard matrix). Matrices are checked once: |R R^T - 1| <= 1e-4 in every element;
// kvq::error names the element and the error.
//
// Contract: sums run in double over exact products, in channel order, and round once: the same bits
// everywhere. At most 1024 channels. O(dim^2) per token.
// Source: OSCAR, arXiv 2605.17757.
#pragma once

#include <cmath>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "../core/bits.hpp"
#include "../core/shape.hpp"
#include "../core/tagged_vector.hpp"
#include "../core/text.hpp"
#include "token_transform.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// The rotation as a policy of transformed<> (schemes/transformed.hpp). Copies share the matrices.
class rotation {
public:
    static constexpr double tolerance = 1e-4;
    static constexpr int most_channels = 1024;
    static constexpr token_transform value{transform_kind::matrix};

    /// matrices: [layers][heads][dim][dim], row-major. Raises kvq::error for a wrong size or a matrix that is
    /// not orthogonal.
    rotation(int layers, int heads, int dim, std::vector<float> matrices)
        : layers_(layers), heads_(heads), dim_(dim) {
        detail::expect(layers >= 1 && heads >= 1 && dim >= 1, "a rotation of ", layers, " layers, ", heads,
                       " heads and ", dim, " channels has no size");
        detail::expect(dim <= most_channels, "a rotation of ", dim, " channels: at most ", most_channels,
                       " are possible");
        const std::size_t wanted =
            static_cast<std::size_t>(layers) * static_cast<std::size_t>(heads) * size();
        detail::expect(matrices.size() == wanted, "a rotation of ", layers, " layers, ", heads, " heads and ",
                       dim, " channels has ", wanted, " values, got ", matrices.size());
        for (int layer = 0; layer < layers; ++layer)
            for (int head = 0; head < heads; ++head)
                check_matrix(matrices.data() + offset({layer, head}), layer, head);
        detail::tagged_vector<float> transposed(wanted);
        for (std::size_t b = 0; b < wanted; b += size())
            for (int i = 0; i < dim; ++i)
                for (int c = 0; c < dim; ++c)
                    transposed[b + static_cast<std::size_t>(c * dim + i)] =
                        matrices[b + static_cast<std::size_t>(i * dim + c)];
        matrices_ = std::make_shared<const shared_matrices>(matrices.begin(), matrices.end());
        transposed_ = std::make_shared<const shared_matrices>(std::move(transposed));
    }

    short_text name() const { return "rotated"; }
    int dim() const noexcept { return dim_; }
    int heads() const noexcept { return heads_; }
    int layers() const noexcept { return layers_; }
    /// The columns of R and those of R^T, one after the other: [layers][heads][dim][dim].
    const float* columns() const noexcept { return transposed_->data(); }
    const float* rows() const noexcept { return matrices_->data(); }

    /// Fingerprint of all matrices, bit for bit. O(size of the matrices).
    std::uint64_t fingerprint() const noexcept {
        detail::fingerprint_hash hash;
        hash.add(static_cast<std::uint64_t>(heads_));
        for (const float x : *matrices_) hash.add(detail::bit_cast<std::uint32_t>(x));
        return hash.value;
    }

    /// Raises kvq::error unless there is a matrix for every layer and head of such a cache.
    void check(const cache_shape& s, tensor role) const {
        detail::expect(s.layers <= layers_ && s.kv_heads == heads_ && s.dim(role) == dim_, "a rotation of ",
                       layers_, " layers, ", heads_, " heads and ", dim_, " channels in a cache of ",
                       s.layers, " layers, ", s.kv_heads, " heads and ", s.dim(role), " channels");
    }

    /// x = R x. Raises kvq::error without a matrix for this layer, head or dim.
    void forward(int dim, const block_id& id, float* x) const { apply(*transposed_, dim, id, x); }
    /// x = R^T x.
    void backward(int dim, const block_id& id, float* x) const { apply(*matrices_, dim, id, x); }

private:
    using shared_matrices = detail::tagged_vector<float>;

    std::size_t size() const noexcept {
        return static_cast<std::size_t>(dim_) * static_cast<std::size_t>(dim_);
    }
    std::size_t offset(const block_id& id) const noexcept {
        return (static_cast<std::size_t>(id.layer) * static_cast<std::size_t>(heads_) +
                static_cast<std::size_t>(id.head)) *
               size();
    }

    void check_matrix(const float* r, int layer, int head) const {
        for (int i = 0; i < dim_; ++i)
            for (int j = 0; j <= i; ++j) {
                double dot = 0.0;
                for (int c = 0; c < dim_; ++c)
                    dot += static_cast<double>(r[i * dim_ + c]) * static_cast<double>(r[j * dim_ + c]);
                const double off = std::fabs(dot - (i == j ? 1.0 : 0.0));
                detail::expect(off <= tolerance, "the rotation of layer ", layer, ", head ", head,
                               " is not orthogonal: rows ", i, " and ", j, " have the product ", dot,
                               ", which is ", off, " off; at most ", tolerance, " is allowed");
            }
    }

    /// columns: the columns of the matrix of the product, one after the other.
    void apply(const shared_matrices& columns, int dim, const block_id& id, float* x) const {
        detail::expect(dim == dim_, "a rotation of ", dim_, " channels does not fit a block of ", dim);
        detail::expect(id.layer >= 0 && id.layer < layers_ && id.head >= 0 && id.head < heads_, "layer ",
                       id.layer, ", head ", id.head, " has no rotation; there are ", layers_, " layers of ",
                       heads_, " heads");
        const float* const first = columns.data() + offset(id);
        float y[most_channels];
        const auto rows = [&]<int N>(std::integral_constant<int, N>, int i) {  // sums that stay in registers
            double sums[N] = {};
            for (int c = 0; c < dim; ++c)
                for (int k = 0; k < N; ++k)
                    sums[k] += static_cast<double>(first[c * dim + i + k]) * static_cast<double>(x[c]);
            for (int k = 0; k < N; ++k) y[i + k] = static_cast<float>(sums[k]);
        };
        int i = 0;
        for (; i + 16 <= dim; i += 16) rows(std::integral_constant<int, 16>{}, i);
        for (; i < dim; ++i) rows(std::integral_constant<int, 1>{}, i);
        for (int c = 0; c < dim; ++c) x[c] = y[c];
    }

    int layers_, heads_, dim_;
    std::shared_ptr<const shared_matrices> matrices_, transposed_;  // whose columns are read side by side
};

}}  // namespace kvq
