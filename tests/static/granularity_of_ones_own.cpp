// expect: the granularity per_token<G> or per_channel<G>
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>

struct per_pair : kvq::per_token<2> {};

const auto made = kvq::make_format<kvq::affine<4, per_pair>, kvq::scalar>();
