// expect: kvq::make_format: a scheme needs `std::string name() const`
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>

struct lacks_name {
    std::size_t block_bytes(const kvq::block_shape&) const { return 16; }
    std::uint32_t quantize(const kvq::block_shape&, kvq::block_id, float*, std::byte*) const { return 0; }
    void dequantize(const kvq::block_shape&, kvq::block_id, const std::byte*, float*) const {}
};
const auto made = kvq::make_format<lacks_name, kvq::scalar>();
