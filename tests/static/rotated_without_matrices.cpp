// expect: kvq::make_format: this scheme holds state that it cannot make up, such as the matrices of rotated<>
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>
#include <kvq/schemes/transformed.hpp>

const auto made = kvq::make_format<kvq::rotated<kvq::affine<4>>, kvq::scalar>();
