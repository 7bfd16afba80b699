// expect: kvq::make_format: this scheme says `attends_as`, so it needs code_bits
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>

struct read_as_it_is {
    using attends_as = read_as_it_is;
    std::string name() const { return "read as it is"; }
    std::size_t block_bytes(const kvq::block_shape&) const { return 16; }
    std::uint32_t quantize(const kvq::block_shape&, kvq::block_id, float*, std::byte*) const { return 0; }
    void dequantize(const kvq::block_shape&, kvq::block_id, const std::byte*, float*) const {}
};
const auto made = kvq::make_format<read_as_it_is, kvq::scalar>();
