// One program for every x86-64 CPU: kernels for four instruction sets, the best of them chosen when it starts.
#include <cmath>
#include <cstdio>

#include "engine.hpp"

template <>
std::unique_ptr<engine> engine_for<kvq::arch::sse2>();
template <>
std::unique_ptr<engine> engine_for<kvq::arch::avx2>();
template <>
std::unique_ptr<engine> engine_for<kvq::arch::avx512vnni>();
template <>
std::unique_ptr<engine> engine_for<kvq::arch::amx>();

int main() {
    const auto chosen =
        kvq::arch::dispatch<kvq::arch::amx, kvq::arch::avx512vnni, kvq::arch::avx2, kvq::arch::sse2>(
            []<class Arch>(Arch) { return engine_for<Arch>(); });
    const auto plain = engine_for<kvq::arch::sse2>();

    std::vector<float> k(300 * 2 * 64), v(k.size()), q(4 * 64);
    for (std::size_t i = 0; i < k.size(); ++i) {
        k[i] = std::sin(0.37F * static_cast<float>(i));
        v[i] = std::cos(0.11F * static_cast<float>(i));
    }
    for (std::size_t i = 0; i < q.size(); ++i) q[i] = std::sin(0.53F * static_cast<float>(i));

    std::vector<float> results[2];
    engine* const engines[] = {chosen.get(), plain.get()};
    for (int i = 0; i < 2; ++i) {
        engines[i]->append(k, v, 300);
        results[i] = engines[i]->attend(q);
    }
    float difference = 0.0F;
    for (std::size_t i = 0; i < q.size(); ++i)
        difference = std::fmax(difference, std::fabs(results[0][i] - results[1][i]));
    std::printf("chosen: %s; largest difference to %s: %g\n", chosen->instructions(), plain->instructions(),
                static_cast<double>(difference));
    return difference < 1e-4F ? 0 : 1;
}
