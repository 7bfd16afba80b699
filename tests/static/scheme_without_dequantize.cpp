// expect: kvq::make_format: a scheme needs `void dequantize(block_shape, block_id, const std::byte* block, float* values) const`
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>

struct lacks_dequantize {
    std::string name() const { return "lacks"; }
    std::size_t block_bytes(const kvq::block_shape&) const { return 16; }
    std::uint32_t quantize(const kvq::block_shape&, kvq::block_id, float*, std::byte*) const { return 0; }
};
const auto made = kvq::make_format<lacks_dequantize, kvq::scalar>();
