// expect: kvq::make_format: a scheme needs `std::size_t block_bytes(block_shape) const`
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>

struct lacks_block_bytes {
    std::string name() const { return "lacks"; }
    std::uint32_t quantize(const kvq::block_shape&, kvq::block_id, float*, std::byte*) const { return 0; }
    void dequantize(const kvq::block_shape&, kvq::block_id, const std::byte*, float*) const {}
};
const auto made = kvq::make_format<lacks_block_bytes, kvq::scalar>();
