// expect: kvq::cache: a scheme needs `std::string name() const`
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>

struct lacks_name {
    std::size_t block_bytes(const kvq::block_shape&) const { return 16; }
    std::uint32_t encode(const kvq::block_shape&, kvq::block_id, float*, std::byte*) const { return 0; }
    void decode(const kvq::block_shape&, kvq::block_id, const std::byte*, float*) const {}
};
kvq::cache<lacks_name> cache({.layers = 1, .kv_heads = 1, .head_dim = 8});
