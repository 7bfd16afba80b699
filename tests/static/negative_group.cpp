// expect: kvq::per_channel<G>: the group size G must be at least 1 (or 0 for the whole page)
// SPDX-License-Identifier: MIT
#include <kvq/schemes/affine.hpp>

kvq::affine<4, kvq::per_channel<-32>> scheme;
auto bytes = scheme.block_bytes({kvq::tensor::key, 64, 64});
