// Statistics of queries and keys, per layer and kv head: the input of channel widths and error feedback.
//
//   query_power(c)     E[q_c^2], over all queries that attend with the kv head
//   query_product      E[q q^T], optional (a constructor argument)
//   key_power(c)       E[k_c^2]: replaces the power of queries in width allocation while there are no queries
//   key_variance(c)    mean over groups of 64 tokens of the variance inside the group: the range that a
//                      channel's grid must cover
//
// An engine adds the queries and keys of its first tokens (a few hundred are enough for widths), or loads
// saved bytes. Keys alone are enough for widths: every cache has them, while queries must be fetched from
// attention. Models have large queries in channels with large keys; docs/lab/quality.md has the part of the
// gain that keys alone keep.
// Contract: double sums over exact products, so that the same input gives the same bytes from every compiler.
// Thread safety: as a container.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "../core/error.hpp"
#include "../core/rounding.hpp"
#include "../core/shape.hpp"
#include "../core/tagged_vector.hpp"
#include "../core/token_view.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

/// Sums of a channel's keys of a group. A device adds the same ones.
struct channel_sums {
    double sum, squares;
    int finite;

    KVQ_HD KVQ_NO_COPY void add(float x) noexcept {
        if (!is_finite(x)) return;
        sum += static_cast<double>(x);
        squares += static_cast<double>(x) * static_cast<double>(x);
        ++finite;
    }
    /// Their variance and mean square, times n.
    KVQ_HD KVQ_NO_COPY double variance(int n) const noexcept {
        if (finite == 0) return 0.0;
        return rounded_product(larger(0.0, squares - rounded_product(sum, sum / finite)) / finite,
                               static_cast<double>(n));
    }
    KVQ_HD KVQ_NO_COPY double mean_square(int n) const noexcept {
        return finite == 0 ? 0.0 : rounded_product(squares / finite, static_cast<double>(n));
    }
};

/// Adds the variance and the mean square of a channel's n keys of a group, times n. key(t): a float.
template <class Key>
void add_channel(int n, Key&& key, double& variances, double& squares) {
    channel_sums sums{};
    for (int t = 0; t < n; ++t) sums.add(key(t));
    variances += sums.variance(n);
    squares += sums.mean_square(n);
}

}  // namespace detail

class calibration {
public:
    static constexpr int group = 64;
    /// Calls f(first, n) for every group of so many consecutive tokens that counts.
    template <class F>
    static void for_each_group(int tokens, F&& f) {
        for (int first = 0; tokens - first >= 16; first += group)
            f(first, detail::smaller(group, tokens - first));
    }

    calibration() = default;
    /// products: also sum E[q q^T] (head_dim^2 doubles per layer and kv head).
    explicit calibration(const cache_shape& shape, bool products = false);

    /// Adds keys of consecutive tokens, [n][kv_heads][head_dim]; whole groups of 64 tokens count, and a last
    /// group of at least 16.
    template <class T>
    void add_keys(int layer, const token_view<T>& k) {
        check(layer, k.heads == shape_.kv_heads && k.dim == shape_.head_dim, k, "k");
        for_each_group(k.tokens, [&](int first, int n) {
            for (int h = 0; h < shape_.kv_heads; ++h) {
                for (int c = 0; c < shape_.head_dim; ++c) {
                    const std::size_t at = block(layer, h) * channels() + static_cast<std::size_t>(c);
                    const auto key = [&](int t) { return static_cast<float>(k.at(first + t, h)[c]); };
                    detail::add_channel(n, key, keys_[at], key_squares_[at]);
                }
                key_tokens_[block(layer, h)] += n;
            }
        });
    }
    /// Adds queries, [n][q_heads][head_dim]; q_heads is a multiple of kv_heads.
    template <class T>
    void add_queries(int layer, const token_view<T>& q) {
        check(layer, q.heads >= 1 && q.heads % shape_.kv_heads == 0 && q.dim == shape_.head_dim, q, "q");
        const int share = q.heads / shape_.kv_heads;
        // A few queries at a time, so that a row of sums stays in registers or close by. The order of each
        // sum is that of the queries.
        constexpr std::size_t most = 16;
        const std::size_t n = channels();
        detail::common_vector<double> rows(most * n);
        for (int h = 0; h < shape_.kv_heads; ++h) {
            std::size_t held = 0;
            for (int i = 0; i < q.tokens * share; ++i) {
                const auto* const x = q.at(i / share, h * share + i % share);
                double* const row = rows.data() + held * n;
                bool finite = true;
                for (std::size_t c = 0; c < n; ++c) {
                    row[c] = static_cast<double>(static_cast<float>(x[c]));
                    finite = finite && row[c] - row[c] == 0.0;
                }
                if (finite && ++held == most)
                    add_products(block(layer, h), rows.data(), std::exchange(held, 0));
            }
            add_products(block(layer, h), rows.data(), held);
        }
    }

    const cache_shape& shape() const noexcept { return shape_; }
    bool has_products() const noexcept { return products_; }
    /// True if any layer and head has queries.
    bool has_queries() const noexcept;
    /// A copy with the same keys and no queries.
    calibration without_queries() const;
    double queries(int layer, int head) const noexcept { return query_tokens_[block(layer, head)]; }
    double keys(int layer, int head) const noexcept { return key_tokens_[block(layer, head)]; }
    /// E[q_i q_j]; without products only for i = j. 1 (0 for i != j) while there are no queries.
    double query_product(int layer, int head, int i, int j) const noexcept;
    double query_power(int layer, int head, int c) const noexcept { return query_product(layer, head, c, c); }
    /// 1 while there are no keys.
    double key_variance(int layer, int head, int c) const noexcept { return of_keys(keys_, layer, head, c); }
    /// 1 while there are no keys.
    double key_power(int layer, int head, int c) const noexcept;

    /// Little-endian: "kvqcal02", layers, kv_heads, head_dim, value_dim, products as 32-bit integers, then
    /// the sums as doubles.
    std::vector<std::byte> save() const;
    /// Raises kvq::error when the bytes are not those of save().
    static calibration load(std::span<const std::byte> bytes);

private:
    static constexpr char magic[9] = "kvqcal02";
    static constexpr std::size_t header = 8 + 5 * 4 + 4;

    std::size_t blocks() const noexcept;
    std::size_t channels() const noexcept { return static_cast<std::size_t>(shape_.head_dim); }
    std::size_t block(int layer, int head) const noexcept;
    std::size_t numbers() const noexcept;
    double of_keys(const detail::common_vector<double>& sums, int layer, int head, int c) const noexcept;
    void add_products(std::size_t b, const double* rows, std::size_t count) noexcept;
    template <class View>
    void check(int layer, bool fits, const View& x, const char* what) const {
        detail::expect(layer >= 0 && layer < shape_.layers, "layer ", layer, " of a calibration with ",
                       shape_.layers);
        detail::expect(fits, what, " has ", x.heads, " heads of ", x.dim, " channels, the calibration ",
                       shape_.kv_heads, " kv heads of ", shape_.head_dim);
        detail::expect(x.tokens >= 0, what, " has ", x.tokens, " tokens");
    }

    cache_shape shape_;
    bool products_ = false;
    detail::common_vector<double> keys_, key_squares_, queries_, key_tokens_, query_tokens_;
};

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "calibration-inl.hpp"
#endif
