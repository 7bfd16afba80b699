// expect: kvq::scheme<bits<B>, levels, granularity, params<P>>: in this order
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>

const auto made = kvq::make_format<kvq::affine<4, kvq::params<float>>, kvq::scalar>();
