// One program for every x86-64 CPU: formats for four instruction sets; the program chooses the best of them
// at its start. All other functions are compiled once, for the weakest instruction set.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <kvq/cpu/arch/arch.hpp>
#include <kvq/kvq.hpp>
#include <vector>

#include "formats.hpp"

namespace {

struct tensors {
    std::vector<float> k, v, q;
};

/// Appends all tokens to a cache of these formats and attends with one query token.
std::vector<float> attend(const kvq::format& keys, const kvq::format& values, const tensors& x) {
    constexpr int kv_heads = 2, q_heads = 4, dim = 64;
    const int tokens = static_cast<int>(x.k.size()) / (kv_heads * dim);
    kvq::cache cache({.layers = 1, .kv_heads = kv_heads, .head_dim = dim}, {.keys = keys, .values = values});
    auto sequence = cache.new_sequence();
    sequence.append(0, {x.k.data(), tokens, kv_heads, dim}, {x.v.data(), tokens, kv_heads, dim});
    std::vector<float> out(x.q.size());
    sequence.attend(0, {x.q.data(), 1, q_heads, dim}, {out.data(), 1, q_heads, dim});
    return out;
}

}  // namespace

int main() {
    const struct {
        bool available;
        kvq::format (*keys)();
        kvq::format (*values)();
    } sets[] = {{kvq::arch::amx::available(), keys_amx, values_amx},
                {kvq::arch::avx512vnni::available(), keys_avx512vnni, values_avx512vnni},
                {kvq::arch::avx2::available(), keys_avx2, values_avx2},
                {true, keys_sse2, values_sse2}};
    const auto& best =
        *std::find_if(std::begin(sets), std::end(sets), [](const auto& s) { return s.available; });
    const kvq::format keys = best.keys(), values = best.values();
    const kvq::format plain_keys = keys_sse2(), plain_values = values_sse2();

    tensors x{std::vector<float>(300 * 2 * 64), std::vector<float>(300 * 2 * 64), std::vector<float>(4 * 64)};
    for (std::size_t i = 0; i < x.k.size(); ++i) {
        x.k[i] = std::sin(0.37F * static_cast<float>(i));
        x.v[i] = std::cos(0.11F * static_cast<float>(i));
    }
    for (std::size_t i = 0; i < x.q.size(); ++i) x.q[i] = std::sin(0.53F * static_cast<float>(i));

    const std::vector<float> results[] = {attend(keys, values, x), attend(plain_keys, plain_values, x)};
    float difference = 0.0F;
    for (std::size_t i = 0; i < x.q.size(); ++i)
        difference = std::fmax(difference, std::fabs(results[0][i] - results[1][i]));
    std::printf("chosen: %s; largest difference to %s: %g\n", keys.backend(), plain_keys.backend(),
                static_cast<double>(difference));
    return difference < 1e-4F ? 0 : 1;
}
