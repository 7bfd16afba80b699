// SPDX-License-Identifier: MIT
// Attends with the formats of every instruction set that the CPU has, each of them against the scalar backend. Compiled for the
// weakest CPU.
#include <cmath>
#include <cstdio>
#include <kvq/backends/simd/arch.hpp>
#include <kvq/format/make_format.hpp>
#include <kvq/kvq.hpp>
#include <string>
#include <vector>

#include "formats.hpp"

static std::vector<float> attend(const kvq::format& keys, const kvq::format& values) {
    constexpr int tokens = 300, heads = 2, dim = 64;
    kvq::cache_options options;
    options.keys = keys;
    options.values = values;
    options.recent = 40;
    kvq::cache cache({.layers = 1, .kv_heads = heads, .head_dim = dim}, options);
    auto sequence = cache.new_sequence();
    const auto wave = [](int n, float step) {
        std::vector<float> x(static_cast<std::size_t>(n));
        for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(step * static_cast<float>(i));
        return x;
    };
    const auto k = wave(tokens * heads * dim, 0.37F);
    const auto v = wave(tokens * heads * dim, 0.11F);
    const auto q = wave(20 * 2 * heads * dim, 0.53F);
    std::vector<float> out(q.size());
    sequence.prefill(
        0, kvq::input_view(k.data(), tokens, heads, dim), kvq::input_view(v.data(), tokens, heads, dim),
        kvq::query_view(q.data(), 20, 2 * heads, dim), kvq::output_view(out.data(), 20, 2 * heads, dim));
    sequence.attend(0, kvq::query_view(q.data(), 20, 2 * heads, dim),
                    kvq::output_view(out.data(), 20, 2 * heads, dim));
    return out;
}

int main() {
    const auto expected = attend(kvq::make_format<kvq::kivi<4, 32>::keys, kvq::scalar>(),
                                 kvq::make_format<kvq::std4::values, kvq::scalar>());
    int failures = 0, levels = 0;
    const auto check = [&](bool available, auto keys, auto values) {
        if (!available) return;
        const kvq::format k = keys(), v = values();
        const auto actual = attend(k, v);
        double worst = 0;
        for (std::size_t i = 0; i < expected.size(); ++i) {
            const double difference =
                std::abs(static_cast<double>(expected[i]) - static_cast<double>(actual[i]));
            if (!(difference <= worst)) worst = difference;  // also a NaN
        }
        std::printf("%s: largest difference from the scalar backend %g\n", k.backend(), worst);
        failures += worst <= 1e-3 ? 0 : 1;
        ++levels;
    };
    check(true, keys_sse2, values_sse2);
    check(kvq::arch::avx2::available(), keys_avx2, values_avx2);
    check(kvq::arch::avx512vnni::available(), keys_avx512vnni, values_avx512vnni);
#if defined(WITH_AMX)
    check(kvq::arch::amx::available(), keys_amx, values_amx);
#endif
    std::printf("%d instruction sets, %d wrong\n", levels, failures);
    return failures;
}
