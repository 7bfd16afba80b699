// expect: kvq::scheme<bits<B>, levels, granularity, params<P>, encoder, token scales>: token scales are no_token_scales, token_scales<byte_params>
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>

const auto made =
    kvq::make_format<kvq::affine<4, kvq::per_channel<64>, kvq::byte_params, kvq::min_max, kvq::byte_params>,
                     kvq::scalar>();
