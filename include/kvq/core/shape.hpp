// Shapes: of the whole cache, of one quantized block, and the position of a block.
//
// A block is the part of a page that belongs to one kv head: a matrix that attention multiplies with a query
// or with weights.
//
//   tensor  | rows (remaining axis) | columns (summed axis) | product
//   key     | tokens                | channels              | scores = K q
//   value   | channels              | tokens                | output = V^T p
#pragma once

#include <cstddef>
#include <cstdint>

#include "error.hpp"

namespace kvq { inline namespace v0_3 {

/// One of the two tensors.
enum class tensor : unsigned char { key, value };

/// Tokens of a page where nothing else is said: in every cache, in kvq.h, in all programs. Presets are
/// measured with it: their keys share parameters over 64 tokens, their values over the page.
inline constexpr int default_page_tokens = 128;

/// Static sizes of a cache. value_dim = 0 means "as head_dim".
struct cache_shape {
    int layers = 0;
    int kv_heads = 0;
    int head_dim = 0;
    int value_dim = 0;

    KVQ_HD KVQ_NO_COPY constexpr int dim(tensor role) const noexcept {
        return role == tensor::key || value_dim == 0 ? head_dim : value_dim;
    }
};

/// Shape of one head's part of a page.
struct block_shape {
    tensor role = tensor::key;
    int tokens = 0;
    int dim = 0;

    KVQ_HD KVQ_NO_COPY constexpr int rows() const noexcept { return role == tensor::key ? tokens : dim; }
    KVQ_HD KVQ_NO_COPY constexpr int cols() const noexcept { return role == tensor::key ? dim : tokens; }
    KVQ_HD KVQ_NO_COPY constexpr std::size_t values() const noexcept {
        return static_cast<std::size_t>(tokens) * static_cast<std::size_t>(dim);
    }
};

/// Position of a block: schemes use it to find per-head state (rotations, channel widths).
struct block_id {
    int layer = 0;
    int head = 0;
    /// Where the lower plane of the block lies, of formats that have one (format/planes.hpp); null: the upper
    /// plane alone is read.
    std::byte* lower = nullptr;
    std::ptrdiff_t lower_ahead = 0;  ///< from there to the one that is read next, for prefetching
};

}}  // namespace kvq

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

// With these limits the bytes of a page of 65536 tokens do not overflow.
inline constexpr int most_layers = 1 << 16, most_heads = 1 << 16, most_head_dim = 1 << 20;

inline void check_shape(const cache_shape& s) {
    expect(s.layers >= 1, "a cache needs at least 1 layer, got ", s.layers);
    expect(s.layers <= most_layers, "a cache has at most ", most_layers, " layers, got ", s.layers);
    expect(s.kv_heads >= 1 && s.kv_heads <= most_heads, "a cache needs between 1 and ", most_heads,
           " kv heads, got ", s.kv_heads);
    expect(s.head_dim >= 1 && s.head_dim <= most_head_dim, "head_dim must be between 1 and ", most_head_dim,
           ", got ", s.head_dim);
    expect(s.value_dim >= 0 && s.value_dim <= most_head_dim, "value_dim must be between 1 and ",
           most_head_dim, " (or 0 for head_dim), got ", s.value_dim);
}

/// The most values of a block: its bytes in fp32 are an int, so that loops over a block may count with int.
inline constexpr int most_block_values = 1 << 28;

/// Raises kvq::error for pages of more tokens than a block has room for.
inline void check_page(int tokens, int dim) {
    expect(std::int64_t{tokens} * dim <= most_block_values, "a page of ", tokens, " tokens x ", dim,
           " channels is too large: tokens times channels must not be more than ", most_block_values);
}

}}}  // namespace kvq::detail
