// expect: kvq::make_format: a scheme needs `std::uint32_t quantize(block_shape, block_id, float* values, std::byte* block) const`
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>

struct lacks_quantize {
    std::string name() const { return "lacks"; }
    std::size_t block_bytes(const kvq::block_shape&) const { return 16; }
    void dequantize(const kvq::block_shape&, kvq::block_id, const std::byte*, float*) const {}
};
const auto made = kvq::make_format<lacks_quantize, kvq::scalar>();
