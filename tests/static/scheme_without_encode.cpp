// expect: kvq::cache: a scheme needs `std::uint32_t encode(block_shape, block_id, float* values, std::byte* block) const`
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>

struct lacks_encode {
    std::string name() const { return "lacks"; }
    std::size_t block_bytes(const kvq::block_shape&) const { return 16; }
    void decode(const kvq::block_shape&, kvq::block_id, const std::byte*, float*) const {}
};
kvq::cache<lacks_encode> cache({.layers = 1, .kv_heads = 1, .head_dim = 8});
