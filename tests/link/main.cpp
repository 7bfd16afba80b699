// SPDX-License-Identifier: MIT
// Attends with the formats of every instruction set that the CPU has, each of
// them against the scalar backend, and with the plans that they make from statistics, in caches of its own
// and in those of sessions.cpp, where formats of the same schemes have the kernels of the library. Compiled
// for the weakest CPU.
#include <cmath>
#include <cstdio>
#include <kvq/cpu/arch/arch.hpp>
#include <kvq/format/make_format.hpp>
#include <kvq/kvq.hpp>
#include <string>
#include <vector>

#include "attend.hpp"
#include "formats.hpp"
#include "sessions.hpp"

static std::vector<float> wave(int n, float step) {
    std::vector<float> x(static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(step * static_cast<float>(i));
    return x;
}

/// Outputs of a prompt's last queries, which are then asked again.
template <class Attend>
static std::vector<float> outputs_of(Attend attend_in, const kvq::format& keys, const kvq::format& values,
                                     int queries) {
    const auto k = wave(prompt::tokens * prompt::heads * prompt::dim, 0.37F);
    const auto v = wave(prompt::tokens * prompt::heads * prompt::dim, 0.11F);
    const auto q = wave(queries * 2 * prompt::heads * prompt::dim, 0.53F);
    std::vector<float> out(q.size());
    attend_in(keys, values, {k.data(), v.data(), q.data(), queries}, out.data());
    return out;
}

static double distance(const std::vector<float>& a, const std::vector<float>& b) {
    double worst = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        const double difference = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
        if (!(difference <= worst)) worst = difference;  // also a NaN
    }
    return worst;
}

/// The bytes of a block, and how many values were not finite.
static std::vector<std::byte> bytes_of(const kvq::format& f, kvq::tensor role, bool finite) {
    const kvq::block_shape shape{role, 64, 64};
    auto x = wave(64 * 64, 0.77F);
    if (!finite) x[100] = INFINITY;
    std::vector<std::byte> block(f.block_bytes(shape));
    block.push_back(
        static_cast<std::byte>(f.functions().quantize_values(f.scheme(), shape, {}, x.data(), block.data())));
    return block;
}

int main() {
    kvq::calibration statistics({.layers = 1, .kv_heads = prompt::heads, .head_dim = prompt::dim}, true);
    constexpr int seen = 100;
    const auto k = wave(seen * prompt::heads * prompt::dim, 0.41F),
               q = wave(seen * prompt::heads * prompt::dim, 0.29F);
    statistics.add_keys(0, kvq::token_view<const float>(k.data(), seen, prompt::heads, prompt::dim));
    statistics.add_queries(0, kvq::token_view<const float>(q.data(), seen, prompt::heads, prompt::dim));
    const std::vector<std::byte> saved = statistics.save();
    const auto portable_values = kvq::make_format<kvq::std4::values, kvq::scalar>();
    const auto plan = kvq::make_format<kvq::scalar>(kvq::low2::keys(statistics));
    const auto planned_output = outputs_of(attend, plan, portable_values, 1);
    const auto expected =
        outputs_of(attend, kvq::make_format<kvq::kivi<4, 32>::keys, kvq::scalar>(), portable_values, 20);
    int failures = 0, levels = 0;
    // The library has the kernels of SSE2.
    const auto of_sse2 = outputs_of(attend, keys_sse2(), values_sse2(), 20);
    const auto check = [&](bool available, auto keys, auto values, auto planned, auto attend_compiled,
                           auto library_keys, auto library_values) {
        if (!available) return;
        bool as_sse2 = of_sse2 == outputs_of(attend_compiled, library_keys(), library_values(), 20);
        for (const bool finite : {true, false})
            as_sse2 = as_sse2 &&
                      bytes_of(library_keys(), kvq::tensor::key, finite) ==
                          bytes_of(keys_sse2(), kvq::tensor::key, finite) &&
                      bytes_of(library_values(), kvq::tensor::value, finite) ==
                          bytes_of(values_sse2(), kvq::tensor::value, finite);
        const kvq::format of_level = keys(), of_plan = planned(saved.data(), saved.size());
        const auto mine = outputs_of(attend, of_level, values(), 20);
        const double worst = distance(expected, mine);
        const bool same = mine == outputs_of(attend_compiled, of_level, values(), 20);
        const double with_plan = distance(planned_output, outputs_of(attend, of_plan, portable_values, 1));
        std::printf(
            "%s: largest difference from the scalar backend %g, with a plan %g; in a cache of the library "
            "%s; with the library's kernels %s\n",
            of_level.backend(), worst, with_plan, same ? "the same" : "other outputs",
            as_sse2 ? "the same" : "other bytes or outputs");
        failures += worst <= 1e-3 && with_plan <= 1e-3 && same && as_sse2 ? 0 : 1;
        ++levels;
    };
    check(true, keys_sse2, values_sse2, planned_sse2, attend_compiled_sse2, library_keys_sse2,
          library_values_sse2);
    check(kvq::arch::avx2::available(), keys_avx2, values_avx2, planned_avx2, attend_compiled_avx2,
          library_keys_avx2, library_values_avx2);
    check(kvq::arch::avx512vnni::available(), keys_avx512vnni, values_avx512vnni, planned_avx512vnni,
          attend_compiled_avx512vnni, library_keys_avx512vnni, library_values_avx512vnni);
#if defined(WITH_AMX)
    check(kvq::arch::amx::available(), keys_amx, values_amx, planned_amx, attend_compiled_amx,
          library_keys_amx, library_values_amx);
#endif
    std::printf("%d instruction sets, %d wrong\n", levels, failures);
    return failures;
}
