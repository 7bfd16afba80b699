// expect: kvq::params<P>: the name of P has letters and digits alone, and is not fp32, fp16 or bf16
// SPDX-License-Identifier: MIT
#include <kvq/schemes/affine.hpp>

struct another_half {
    static constexpr const char* name = "fp16";
    another_half() = default;
    explicit another_half(float) {}
    operator float() const { return 1.0f; }
    unsigned short bits = 0;
};
kvq::affine<4, kvq::per_token<64>, kvq::params<another_half>> scheme;
auto bytes = scheme.block_bytes({kvq::tensor::key, 64, 64});
