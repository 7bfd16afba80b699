// SPDX-License-Identifier: MIT
// Prints, as a CMake list, for which instruction-set levels this CPU can run programs.
#include <cstdio>

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
    if (__builtin_cpu_supports("avx512vnni")) std::printf(";x86-64-v4+avx512vnni");
    return 0;
}
