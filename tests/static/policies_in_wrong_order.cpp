// expect: kvq::scheme
// SPDX-License-Identifier: MIT
#include <kvq/kvq.hpp>

kvq::scheme<kvq::bits<4>, kvq::per_token<64>, kvq::asymmetric> scheme;
