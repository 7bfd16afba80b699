// expect: kvq::scheme: parameters are params<P>, packed_params<P> or byte_params: params<float16>, not float16
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>

const auto made = kvq::make_format<
    kvq::mixed_affine<kvq::width_mix{.bits = {4, 2, 0}, .average_eighths = 16}, kvq::per_channel<64>, float>,
    kvq::scalar>();
