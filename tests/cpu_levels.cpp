// SPDX-License-Identifier: MIT
// Prints, as a CMake list, for which instruction-set levels this CPU can run programs.
#include <cpuid.h>

#include <cstdio>

#include "../include/kvq/cpu/arch/x86_amx.hpp"

int main() {
    __builtin_cpu_init();
    std::printf("x86-64");
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
          __builtin_cpu_supports("bmi2")))
        return 0;
    std::printf(";x86-64-v3");
    if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
          __builtin_cpu_supports("avx512vl")))
        return 0;
    std::printf(";x86-64-v4");
    if (!__builtin_cpu_supports("avx512vnni")) return 0;
    std::printf(";x86-64-v4+avx512vnni");
    // As arch::amx::available() asks.
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx >> 24 & 3u) == 3 &&
        kvq::arch::amx_tiles::ready())
        std::printf(";x86-64-v4+amx");
    return 0;
}
