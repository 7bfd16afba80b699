// expect: kvq::scheme<bits<B>, levels, granularity, params<P>>: in this order
// SPDX-License-Identifier: MIT
#include <kvq/schemes/affine.hpp>

kvq::scheme<kvq::bits<4>, kvq::per_token<64>, kvq::asymmetric> scheme;
