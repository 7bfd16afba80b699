// expect: kvq::scheme: symmetric levels need at least 2 bits
// SPDX-License-Identifier: MIT
#include <kvq/schemes/affine.hpp>

kvq::scheme<kvq::bits<1>, kvq::symmetric, kvq::per_token<64>> scheme;
auto bytes = scheme.block_bytes({kvq::tensor::key, 64, 64});
