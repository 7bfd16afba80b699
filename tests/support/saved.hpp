// SPDX-License-Identifier: MIT
// Saved sequences in memory, and what it means that one is another's continuation.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <kvq/io/restore.hpp>
#include <kvq/io/save.hpp>

#include "caches.hpp"
#include "messages.hpp"

namespace test {

using file_bytes = std::vector<std::byte>;

inline file_bytes saved(const kvq::sequence& sequence, const kvq::save_options& options = {}) {
    file_bytes bytes;
    kvq::save(
        sequence,
        [&](const void* data, std::size_t n) {
            const auto* p = static_cast<const std::byte*>(data);
            bytes.insert(bytes.end(), p, p + n);
        },
        options);
    return bytes;
}

/// Gives the bytes in pieces of at most `piece`.
struct memory_source {
    const file_bytes& bytes;
    std::size_t piece = 1 << 20;
    std::size_t position = 0;
    std::size_t operator()(void* to, std::size_t n) {
        n = std::min({n, piece, bytes.size() - position});
        if (n > 0) std::memcpy(to, bytes.data() + position, n);
        position += n;
        return n;
    }
};

template <class Cache>
kvq::sequence restored(Cache& cache, const file_bytes& bytes, const kvq::restore_options& options = {}) {
    memory_source source{bytes};
    auto sequence = kvq::restore(cache, source, options);
    REQUIRE(source.position == bytes.size());
    return sequence;
}

/// Everything that can be seen of two sequences, `b` restored from `a` and then changed as `a` was.
template <class Cache>
void require_same(const Cache& cache, const kvq::sequence& a, const Cache& other, const kvq::sequence& b) {
    for (int layer = 0; layer < cache.shape().layers; ++layer) REQUIRE(a.tokens(layer) == b.tokens(layer));
    REQUIRE(contents(cache, a) == contents(other, b));
    REQUIRE(attention_bits(cache, a) == attention_bits(other, b));
    REQUIRE(saved(a) == saved(b));
    REQUIRE(a.usage().not_finite == b.usage().not_finite);
    REQUIRE(a.usage().quantized == b.usage().quantized);
    // Pages that a trim has emptied in part keep their memory; restored ones have what they need.
    REQUIRE(b.usage().window <= a.usage().window);
    REQUIRE(b.usage().rollback == a.usage().rollback);
}

}  // namespace test
