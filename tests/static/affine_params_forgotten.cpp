// expect: kvq::scheme: parameters are params<P>, packed_params<P> or byte_params: params<float16>, not float16
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>

const auto made = kvq::make_format<kvq::affine<4, kvq::per_token<64>, kvq::float16>, kvq::scalar>();
