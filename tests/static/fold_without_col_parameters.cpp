// expect: kvq::make_format: fold() of this scheme says that columns have parameters
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>
#include <kvq/pack/code_layout.hpp>

struct folded {
    using attends_as = folded;
    static constexpr int code_bits = 4, zero_code = 0;
    static constexpr kvq::fold_use fold(kvq::tensor) { return {.row_scale = true, .col_bias = true}; }
    kvq::code_layout<4> codes(const kvq::block_shape& s) const {
        return {{s.rows(), s.rows()}, {s.cols(), s.cols()}};
    }
    template <class Backend>
    void row_parameters(const kvq::block_shape&, kvq::block_id, const std::byte*, int, float*, float*) const {
    }

    std::string name() const { return "folded"; }
    std::size_t block_bytes(const kvq::block_shape&) const { return 16; }
    std::uint32_t quantize(const kvq::block_shape&, kvq::block_id, float*, std::byte*) const { return 0; }
    void dequantize(const kvq::block_shape&, kvq::block_id, const std::byte*, float*) const {}
};
const auto made = kvq::make_format<folded, kvq::scalar>();
