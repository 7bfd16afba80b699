// Definitions of calibration.hpp.
#pragma once

#include <cstring>

#include "calibration.hpp"

namespace kvq { inline namespace KVQ_COMMON {

KVQ_FUNC calibration::calibration(const cache_shape& shape, bool products)
    : shape_(shape), products_(products) {
    detail::check_shape(shape);
    const double sums =
        1.0 * shape.layers * shape.kv_heads * shape.head_dim * (products ? shape.head_dim + 2.0 : 3.0);
    detail::expect(sums < 0x1p58, "a calibration of ", shape.layers, " layers, ", shape.kv_heads, " heads, ",
                   shape.head_dim, " channels is larger than memory");
    keys_.resize(blocks() * channels());
    key_squares_.resize(blocks() * channels());
    queries_.resize(blocks() * (products ? channels() * channels() : channels()));
    key_tokens_.resize(blocks());
    query_tokens_.resize(blocks());
}

KVQ_FUNC bool calibration::has_queries() const noexcept {
    for (const double n : query_tokens_)
        if (n > 0.0) return true;
    return false;
}

KVQ_FUNC calibration calibration::without_queries() const {
    calibration c = *this;
    for (double& x : c.queries_) x = 0.0;
    for (double& x : c.query_tokens_) x = 0.0;
    return c;
}

KVQ_FUNC double calibration::query_product(int layer, int head, int i, int j) const noexcept {
    const std::size_t b = block(layer, head), n = channels();
    if (query_tokens_[b] == 0) return i == j ? 1.0 : 0.0;
    const auto row = b * n + static_cast<std::size_t>(i);
    return (products_ ? queries_[row * n + static_cast<std::size_t>(j)]
            : i == j  ? queries_[row]
                      : 0.0) /
           query_tokens_[b];
}

KVQ_FUNC double calibration::key_power(int layer, int head, int c) const noexcept {
    return of_keys(key_squares_, layer, head, c);
}

KVQ_FUNC std::vector<std::byte> calibration::save() const {
    std::vector<std::byte> bytes(header + 8 * numbers());
    std::memcpy(bytes.data(), magic, 8);
    const std::int32_t sizes[5] = {shape_.layers, shape_.kv_heads, shape_.head_dim, shape_.value_dim,
                                   products_ ? 1 : 0};
    std::memcpy(bytes.data() + 8, sizes, sizeof sizes);
    std::byte* at = bytes.data() + header;
    for (const detail::common_vector<double>* v :
         {&keys_, &key_squares_, &queries_, &key_tokens_, &query_tokens_}) {
        if (!v->empty()) std::memcpy(at, v->data(), 8 * v->size());
        at += 8 * v->size();
    }
    return bytes;
}

KVQ_FUNC calibration calibration::load(std::span<const std::byte> bytes) {
    detail::expect(bytes.size() >= header && std::memcmp(bytes.data(), magic, 8) == 0, "these ", bytes.size(),
                   " bytes are not a calibration");
    std::int32_t sizes[5];
    std::memcpy(sizes, bytes.data() + 8, sizeof sizes);
    for (int i = 0; i < 4; ++i)
        detail::expect(sizes[i] >= (i < 3 ? 1 : 0) && sizes[i] <= 65536, "a calibration of size ", sizes[i]);
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
    for (detail::common_vector<double>* v :
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

KVQ_FUNC std::size_t calibration::blocks() const noexcept {
    return static_cast<std::size_t>(shape_.layers) * static_cast<std::size_t>(shape_.kv_heads);
}

KVQ_FUNC std::size_t calibration::block(int layer, int head) const noexcept {
    return static_cast<std::size_t>(layer) * static_cast<std::size_t>(shape_.kv_heads) +
           static_cast<std::size_t>(head);
}

KVQ_FUNC std::size_t calibration::numbers() const noexcept {
    return keys_.size() + key_squares_.size() + queries_.size() + key_tokens_.size() + query_tokens_.size();
}

KVQ_FUNC double calibration::of_keys(const detail::common_vector<double>& sums, int layer, int head,
                                     int c) const noexcept {
    const std::size_t b = block(layer, head);
    return key_tokens_[b] == 0 ? 1.0 : sums[b * channels() + static_cast<std::size_t>(c)] / key_tokens_[b];
}

KVQ_FUNC void calibration::add_products(std::size_t b, const double* rows, std::size_t count) noexcept {
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

}}
