// expect: kvq::bits<B>: a code has 1 to 8 bits
// SPDX-License-Identifier: MIT
#include <kvq/schemes/affine.hpp>

kvq::scheme<kvq::bits<9>, kvq::asymmetric, kvq::per_token<64>> scheme;
auto bytes = scheme.block_bytes({kvq::tensor::key, 64, 64});
