// SPDX-License-Identifier: MIT
// Attends with the formats of every instruction set that the CPU has, each of them against the scalar backend, and with
// the plans that they make from statistics, in caches of its own and in those of sessions.cpp. Compiled for the weakest CPU.
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

int main() {
    kvq::calibration statistics({.layers = 1, .kv_heads = 2, .head_dim = 64}, true);
    const auto k = wave(100 * 2 * 64, 0.41F), q = wave(100 * 2 * 64, 0.29F);
    statistics.add_keys(0, kvq::token_view<const float>(k.data(), 100, 2, 64));
    statistics.add_queries(0, kvq::token_view<const float>(q.data(), 100, 2, 64));
    const std::vector<std::byte> saved = statistics.save();
    const auto portable_values = kvq::make_format<kvq::std4::values, kvq::scalar>();
    const auto plan = kvq::make_format<kvq::scalar>(kvq::low2::keys(statistics));
    const auto planned_output = outputs_of(attend, plan, portable_values, 1);
    const auto expected =
        outputs_of(attend, kvq::make_format<kvq::kivi<4, 32>::keys, kvq::scalar>(), portable_values, 20);
    int failures = 0, levels = 0;
    const auto check = [&](bool available, auto keys, auto values, auto planned, auto attend_compiled) {
        if (!available) return;
        const kvq::format of_level = keys(), of_plan = planned(saved.data(), saved.size());
        const auto mine = outputs_of(attend, of_level, values(), 20);
        const double worst = distance(expected, mine);
        const bool same = mine == outputs_of(attend_compiled, of_level, values(), 20);
        const double with_plan = distance(planned_output, outputs_of(attend, of_plan, portable_values, 1));
        std::printf(
            "%s: largest difference from the scalar backend %g, with a plan %g; in a cache of the library "
            "%s\n",
            of_level.backend(), worst, with_plan, same ? "the same" : "other outputs");
        failures += worst <= 1e-3 && with_plan <= 1e-3 && same ? 0 : 1;
        ++levels;
    };
    check(true, keys_sse2, values_sse2, planned_sse2, attend_compiled_sse2);
    check(kvq::arch::avx2::available(), keys_avx2, values_avx2, planned_avx2, attend_compiled_avx2);
    check(kvq::arch::avx512vnni::available(), keys_avx512vnni, values_avx512vnni, planned_avx512vnni,
          attend_compiled_avx512vnni);
#if defined(WITH_AMX)
    check(kvq::arch::amx::available(), keys_amx, values_amx, planned_amx, attend_compiled_amx);
#endif
    std::printf("%d instruction sets, %d wrong\n", levels, failures);
    return failures;
}
