// expect: kvq::params<P>: P must be trivially copyable, constructible from float and convertible to float, and have a name
// SPDX-License-Identifier: MIT
#include <kvq/schemes/affine.hpp>

struct half_byte_log {
    half_byte_log() = default;
    explicit half_byte_log(float) {}
    operator float() const { return 1.0f; }
    unsigned char code = 0;
};
kvq::affine<4, kvq::per_token<64>, kvq::params<half_byte_log>> scheme;
auto bytes = scheme.block_bytes({kvq::tensor::key, 64, 64});
