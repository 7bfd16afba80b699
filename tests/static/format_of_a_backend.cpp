// expect: kvq::make_format: the argument must be a scheme (kv_scheme)
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/int8.hpp>

// The scheme comes first.
const auto made = kvq::make_format<kvq::scalar, kvq::int8>();
