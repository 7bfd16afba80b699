// expect: kvq::scheme: token scales and several widths take packed_params<P> or byte_params
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>

const auto made = kvq::make_format<kvq::affine<4, kvq::per_channel<64>, kvq::params<kvq::float16>,
                                               kvq::min_max, kvq::token_scales<kvq::byte_params>>,
                                   kvq::scalar>();
