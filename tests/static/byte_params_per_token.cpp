// expect: kvq::scheme: per_token takes bits<B> and params<P>, since packed and 8-bit parameters, token scales and several widths are per channel
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>

const auto made = kvq::make_format<kvq::affine<4, kvq::per_token<64>, kvq::byte_params>, kvq::scalar>();
