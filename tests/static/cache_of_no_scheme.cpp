// expect: kvq::cache: a format must be a scheme (kv_scheme), a pair like kivi<4>, or formats<...>
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>

// Looks like a scheme, but cannot decode.
struct no_scheme {
    std::string name() const { return "no scheme"; }
    std::size_t block_bytes(const kvq::block_shape&) const { return 16; }
    std::uint32_t encode(const kvq::block_shape&, kvq::block_id, float*, std::byte*) const { return 0; }
};
kvq::cache<no_scheme> cache({.layers = 1, .kv_heads = 1, .head_dim = 8});
