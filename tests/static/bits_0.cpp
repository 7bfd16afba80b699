// expect: kvq::bits<B>: a code has 1 to 8 bits
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>

const auto made = kvq::make_format<kvq::affine<0>, kvq::scalar>();
