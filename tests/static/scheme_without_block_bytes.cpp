// expect: kvq::cache: a scheme needs `std::size_t block_bytes(block_shape) const`
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>

struct lacks_block_bytes {
    std::string name() const { return "lacks"; }
    std::uint32_t encode(const kvq::block_shape&, kvq::block_id, float*, std::byte*) const { return 0; }
    void decode(const kvq::block_shape&, kvq::block_id, const std::byte*, float*) const {}
};
kvq::cache<lacks_block_bytes> cache({.layers = 1, .kv_heads = 1, .head_dim = 8});
