// Statistics of queries and keys, per layer and kv head: the input of channel widths and error feedback.
//
//   query_power(c)     E[q_c^2], over all queries that attend with the kv head
//   query_product      E[q q^T], optional (a constructor argument)
//   key_power(c)       E[k_c^2]: replaces the power of queries in width allocation while there are no queries
//   key_variance(c)    mean over groups of 64 tokens of the variance inside the group: the range that a channel's grid must cover
//
// An engine adds the queries and keys of its first tokens (a few hundred are enough for widths), or loads saved bytes. Keys alone
// are enough for widths: every cache has them, while queries must be fetched from attention. Models have large queries in channels
// with large keys; docs/lab/quality.md has the part of the gain that keys alone keep.
// Contract: double sums over exact products, so that the same input gives the same bytes from every compiler.
// Thread safety: as a container.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "../core/error.hpp"
#include "../core/rounding.hpp"
#include "../core/shape.hpp"
#include "../core/tagged_vector.hpp"
#include "../core/token_view.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

class calibration {
public:
    static constexpr int group = 64;

    calibration() = default;
    /// products: also sum E[q q^T] (head_dim^2 doubles per layer and kv head).
    explicit calibration(const cache_shape& shape, bool products = false)
        : shape_(shape), products_(products) {
        detail::check_shape(shape);
        const double sums =
            1.0 * shape.layers * shape.kv_heads * shape.head_dim * (products ? shape.head_dim + 2.0 : 3.0);
        detail::expect(sums < 0x1p58, "a calibration of ", shape.layers, " layers, ", shape.kv_heads,
                       " heads, ", shape.head_dim, " channels is larger than memory");
        keys_.resize(blocks() * channels());
        key_squares_.resize(blocks() * channels());
        queries_.resize(blocks() * (products ? channels() * channels() : channels()));
        key_tokens_.resize(blocks());
        query_tokens_.resize(blocks());
    }

    /// Adds keys of consecutive tokens, [n][kv_heads][head_dim]; whole groups of 64 tokens count, and a last group of at least 16.
    template <class T>
    void add_keys(int layer, const token_view<T>& k) {
        check(layer, k.heads == shape_.kv_heads && k.dim == shape_.head_dim, k, "k");
        for (int first = 0; k.tokens - first >= 16; first += group)
            for (int h = 0; h < shape_.kv_heads; ++h) {
                const int n = detail::smaller(group, k.tokens - first);
                for (int c = 0; c < shape_.head_dim; ++c) {
                    double sum = 0.0, squares = 0.0;
                    int finite = 0;
                    for (int t = first; t < first + n; ++t) {
                        const auto x = static_cast<double>(static_cast<float>(k.at(t, h)[c]));
                        if (!detail::is_finite(static_cast<float>(x))) continue;
                        sum += x;
                        squares += x * x;
                        ++finite;
                    }
                    if (finite == 0) continue;
                    const std::size_t at = block(layer, h) * channels() + static_cast<std::size_t>(c);
                    const double variance =
                        detail::larger(0.0, squares - detail::rounded_product(sum, sum / finite)) / finite;
                    keys_[at] += detail::rounded_product(variance, static_cast<double>(n));
                    key_squares_[at] += detail::rounded_product(squares / finite, static_cast<double>(n));
                }
                key_tokens_[block(layer, h)] += n;
            }
    }
    /// Adds queries, [n][q_heads][head_dim]; q_heads is a multiple of kv_heads.
    template <class T>
    void add_queries(int layer, const token_view<T>& q) {
        check(layer, q.heads >= 1 && q.heads % shape_.kv_heads == 0 && q.dim == shape_.head_dim, q, "q");
        const int share = q.heads / shape_.kv_heads;
        // A few queries at a time, so that a row of sums stays in registers or close by. The order of each sum is that of the queries.
        constexpr std::size_t most = 16;
        const std::size_t n = channels();
        detail::tagged_vector<double> rows(most * n);
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
    bool has_queries() const noexcept {
        for (const double n : query_tokens_)
            if (n > 0.0) return true;
        return false;
    }
    /// A copy with the same keys and no queries.
    calibration without_queries() const {
        calibration c = *this;
        for (double& x : c.queries_) x = 0.0;
        for (double& x : c.query_tokens_) x = 0.0;
        return c;
    }
    double queries(int layer, int head) const noexcept { return query_tokens_[block(layer, head)]; }
    double keys(int layer, int head) const noexcept { return key_tokens_[block(layer, head)]; }
    /// E[q_i q_j]; without products only for i = j. 1 (0 for i != j) while there are no queries.
    double query_product(int layer, int head, int i, int j) const noexcept {
        const std::size_t b = block(layer, head), n = channels();
        if (query_tokens_[b] == 0) return i == j ? 1.0 : 0.0;
        const auto row = b * n + static_cast<std::size_t>(i);
        return (products_ ? queries_[row * n + static_cast<std::size_t>(j)]
                : i == j  ? queries_[row]
                          : 0.0) /
               query_tokens_[b];
    }
    double query_power(int layer, int head, int c) const noexcept { return query_product(layer, head, c, c); }
    /// 1 while there are no keys.
    double key_variance(int layer, int head, int c) const noexcept { return of_keys(keys_, layer, head, c); }
    /// 1 while there are no keys.
    double key_power(int layer, int head, int c) const noexcept {
        return of_keys(key_squares_, layer, head, c);
    }

    /// Little-endian: "kvqcal02", layers, kv_heads, head_dim, value_dim, products as 32-bit integers, then the sums as doubles.
    std::vector<std::byte> save() const {
        std::vector<std::byte> bytes(header + 8 * numbers());
        std::memcpy(bytes.data(), magic, 8);
        const std::int32_t sizes[5] = {shape_.layers, shape_.kv_heads, shape_.head_dim, shape_.value_dim,
                                       products_ ? 1 : 0};
        std::memcpy(bytes.data() + 8, sizes, sizeof sizes);
        std::byte* at = bytes.data() + header;
        for (const detail::tagged_vector<double>* v :
             {&keys_, &key_squares_, &queries_, &key_tokens_, &query_tokens_}) {
            if (!v->empty()) std::memcpy(at, v->data(), 8 * v->size());
            at += 8 * v->size();
        }
        return bytes;
    }
    /// Raises kvq::error when the bytes are not those of save().
    static calibration load(std::span<const std::byte> bytes) {
        detail::expect(bytes.size() >= header && std::memcmp(bytes.data(), magic, 8) == 0, "these ",
                       bytes.size(), " bytes are not a calibration");
        std::int32_t sizes[5];
        std::memcpy(sizes, bytes.data() + 8, sizeof sizes);
        for (int i = 0; i < 4; ++i)
            detail::expect(sizes[i] >= (i < 3 ? 1 : 0) && sizes[i] <= 65536, "a calibration of size ",
                           sizes[i]);
        detail::expect(sizes[4] == 0 || sizes[4] == 1, "a calibration of kind ", sizes[4]);
        const auto n = static_cast<std::uint64_t>(sizes[2]);
        const auto blocks = static_cast<std::uint64_t>(sizes[0]) * static_cast<std::uint64_t>(sizes[1]);
        // A division, so that no product overflows.
        const std::uint64_t per_block = 2 * n + (sizes[4] ? n * n : n) + 2;
        detail::expect((bytes.size() - header) % 8 == 0 && (bytes.size() - header) / 8 % per_block == 0 &&
                           (bytes.size() - header) / 8 / per_block == blocks,
                       "a calibration of ", sizes[0], " layers, ", sizes[1], " heads, ", sizes[2],
                       " channels does not have ", bytes.size(), " bytes");
        calibration c({sizes[0], sizes[1], sizes[2], sizes[3]}, sizes[4] == 1);
        const std::byte* at = bytes.data() + header;
        for (detail::tagged_vector<double>* v :
             {&c.keys_, &c.key_squares_, &c.queries_, &c.key_tokens_, &c.query_tokens_}) {
            std::memcpy(v->data(), at, 8 * v->size());
            at += 8 * v->size();
            for (const double x : *v)
                detail::expect(x - x == 0.0, "a calibration holds a value that is not finite");
        }
        for (std::size_t b = 0; b < c.blocks(); ++b) {
            detail::expect(c.key_tokens_[b] >= 0.0 && c.query_tokens_[b] >= 0.0,
                           "a calibration of a negative number of tokens");
            for (std::size_t i = 0; i < c.channels(); ++i)
                detail::expect(c.keys_[b * c.channels() + i] >= 0.0 &&
                                   c.key_squares_[b * c.channels() + i] >= 0.0 &&
                                   c.queries_[c.products_ ? (b * c.channels() + i) * c.channels() + i
                                                          : b * c.channels() + i] >= 0.0,
                               "a calibration with a negative variance");
        }
        return c;
    }

private:
    static constexpr char magic[9] = "kvqcal02";
    static constexpr std::size_t header = 8 + 5 * 4 + 4;

    std::size_t blocks() const noexcept {
        return static_cast<std::size_t>(shape_.layers) * static_cast<std::size_t>(shape_.kv_heads);
    }
    std::size_t channels() const noexcept { return static_cast<std::size_t>(shape_.head_dim); }
    std::size_t block(int layer, int head) const noexcept {
        return static_cast<std::size_t>(layer) * static_cast<std::size_t>(shape_.kv_heads) +
               static_cast<std::size_t>(head);
    }
    std::size_t numbers() const noexcept {
        return keys_.size() + key_squares_.size() + queries_.size() + key_tokens_.size() +
               query_tokens_.size();
    }
    double of_keys(const detail::tagged_vector<double>& sums, int layer, int head, int c) const noexcept {
        const std::size_t b = block(layer, head);
        return key_tokens_[b] == 0 ? 1.0
                                   : sums[b * channels() + static_cast<std::size_t>(c)] / key_tokens_[b];
    }
    void add_products(std::size_t b, const double* rows, std::size_t count) noexcept {
        const std::size_t n = channels();
        double* const sums = queries_.data() + (products_ ? b * n * n : b * n);
        for (std::size_t i = 0; i < n; ++i)
            for (std::size_t r = 0; r < count; ++r) {
                const double* const x = rows + r * n;
                if (!products_) {
                    sums[i] += x[i] * x[i];
                    continue;
                }
                for (std::size_t j = 0; j < n; ++j) sums[i * n + j] += x[i] * x[j];
            }
        query_tokens_[b] += static_cast<double>(count);
    }
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
    detail::tagged_vector<double> keys_, key_squares_, queries_, key_tokens_, query_tokens_;
};

}}  // namespace kvq
