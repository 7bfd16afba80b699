// SPDX-License-Identifier: MIT
// The schemes that every test of schemes runs over: each width, granularity, odd group and parameter type at
// least once.
#pragma once

#include <kvq/schemes/float_rows.hpp>
#include <kvq/schemes/full.hpp>
#include <kvq/schemes/int8.hpp>
#include <kvq/schemes/kivi.hpp>
#include <tuple>

#include "custom_schemes.hpp"

namespace test {

template <int Bits, class Granularity, class P>
using symmetric_scheme = kvq::scheme<kvq::bits<Bits>, kvq::symmetric, Granularity, kvq::params<P>>;
template <int Bits, class Granularity, class P = kvq::float16>
using affine_scheme = kvq::affine<Bits, Granularity, kvq::params<P>>;

}  // namespace test

/// Composed schemes: codes, scales and biases in the documented sections. For TEST_CASE_TEMPLATE.
#define KVQ_TEST_AFFINE_SCHEMES                                                                           \
    kvq::int8, test::affine_scheme<1, kvq::per_token<0>>,                                                 \
        test::affine_scheme<2, kvq::per_token<32>, kvq::bfloat16>,                                        \
        test::affine_scheme<3, kvq::per_token<5>, float>, test::affine_scheme<4, kvq::per_token<64>>,     \
        test::affine_scheme<5, kvq::per_token<64>, kvq::bfloat16>,                                        \
        test::affine_scheme<6, kvq::per_token<32>>, test::affine_scheme<7, kvq::per_token<0>, float>,     \
        test::affine_scheme<8, kvq::per_token<64>>, test::affine_scheme<1, kvq::per_channel<32>>,         \
        kvq::kivi<2>::keys, test::affine_scheme<3, kvq::per_channel<7>, float>, kvq::kivi<4, 64>::keys,   \
        kvq::kivi<4>::values, test::affine_scheme<5, kvq::per_channel<5>, kvq::bfloat16>,                 \
        test::affine_scheme<6, kvq::per_channel<0>>, test::affine_scheme<7, kvq::per_channel<64>, float>, \
        test::affine_scheme<8, kvq::per_channel<0>>,                                                      \
        test::symmetric_scheme<4, kvq::per_channel<32>, kvq::bfloat16>,                                   \
        test::symmetric_scheme<2, kvq::per_token<5>, kvq::float16>, test::odd_keys, test::odd_values

/// Schemes that keep values, and schemes of users that share nothing with the composed ones.
#define KVQ_TEST_OTHER_SCHEMES                                                                  \
    kvq::full<float>, kvq::full<kvq::float16>, kvq::full<kvq::bfloat16>, test::magnitude_bytes, \
        test::product_scheme<4>, test::product_scheme<7>, test::rotated, kvq::float_rows<kvq::e4m3>

#define KVQ_TEST_SCHEMES KVQ_TEST_AFFINE_SCHEMES, KVQ_TEST_OTHER_SCHEMES

/// What backends are compared on. Weaker instruction sets and second compilers take fewer: every plane of
/// codes, direction and type of parameters still comes once.
#if defined(KVQ_TEST_FEWER_SCHEMES)
#define KVQ_TEST_BACKEND_SCHEMES                                                                            \
    kvq::int8, test::affine_scheme<1, kvq::per_token<0>>, test::affine_scheme<3, kvq::per_token<5>, float>, \
        test::affine_scheme<4, kvq::per_token<64>>,                                                         \
        test::affine_scheme<7, kvq::per_token<64>, kvq::bfloat16>, kvq::kivi<2>::keys,                      \
        test::affine_scheme<3, kvq::per_channel<7>, float>, kvq::kivi<4>::values,                           \
        test::affine_scheme<6, kvq::per_channel<0>>, test::odd_values, kvq::full<kvq::float16>,             \
        test::product_scheme<7>, kvq::float_rows<kvq::e4m3>
#define KVQ_TEST_WINDOW_SCHEMES kvq::int8, kvq::kivi<4>::keys, test::odd_values
#else
#define KVQ_TEST_BACKEND_SCHEMES KVQ_TEST_SCHEMES
/// What is quantized and dequantized from and to every type of window.
#define KVQ_TEST_WINDOW_SCHEMES                                                                \
    kvq::int8, kvq::kivi<4>::keys, kvq::kivi<4>::values, kvq::kivi<3>::values, kvq::affine<3>, \
        test::affine_scheme<2, kvq::per_token<32>>, test::affine_scheme<1, kvq::per_token<0>>, \
        test::odd_keys, test::odd_values, test::rotated
#endif

namespace test {

/// Schemes with state need an argument.
template <class Scheme>
Scheme make_scheme() {
    if constexpr (std::is_default_constructible_v<Scheme>)
        return Scheme{};
    else
        return Scheme(0.03125f);
}

}  // namespace test
