// expect: kvq::params<P>: P must be trivially copyable, constructible from float and convertible to float
// SPDX-License-Identifier: MIT
#include <kvq/schemes/affine.hpp>
#include <string>

kvq::affine<4, kvq::per_token<64>, kvq::params<std::string>> scheme;
auto bytes = scheme.block_bytes({kvq::tensor::key, 64, 64});
