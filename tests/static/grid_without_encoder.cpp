// expect: kvq::scheme<bits<B>, levels, granularity, params<P>, encoder>: the fifth argument must be an encoder
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>

const auto made =
    kvq::make_format<kvq::affine<4, kvq::per_channel<64>, kvq::byte_params, kvq::params<kvq::float16>>,
                     kvq::scalar>();
