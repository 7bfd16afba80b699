// expect: the fifth argument must be an encoder, such as least_squares
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>

struct widest {
    static const char* name() { return ""; }
    static kvq::grid_range fit(const float*, int, int, float*) { return {-1.0f, 1.0f}; }
};

const auto made =
    kvq::make_format<kvq::affine<4, kvq::per_channel<>, kvq::params<float>, widest>, kvq::scalar>();
