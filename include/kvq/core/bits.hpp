// Small helpers that every layer uses, on host and device: bit_cast, rounding up, minimum and maximum,
// unaligned loads, prefetching, and the hash of fingerprints.
//
// They stand here because nvcc does not run std::bit_cast, std::min and std::max on the device without a
// flag, and std::min is a macro on Windows. Contract: no allocation, no exception; all but prefetching and
// loads are constexpr.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../config.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

template <class To, class From>
KVQ_HD constexpr To bit_cast(const From& from) noexcept {
    static_assert(sizeof(To) == sizeof(From));
    return __builtin_bit_cast(To, from);
}

template <class T>
KVQ_HD constexpr T ceil_div(T a, T b) noexcept {
    return (a + b - 1) / b;
}
template <class T>
KVQ_HD constexpr T round_up(T a, T multiple) noexcept {
    return ceil_div(a, multiple) * multiple;
}
template <class T>
KVQ_HD constexpr T smaller(T a, T b) noexcept {
    return b < a ? b : a;
}
template <class T>
KVQ_HD constexpr T larger(T a, T b) noexcept {
    return a < b ? b : a;
}

/// FNV-1a over 64-bit words: fingerprints of the state, besides the pages, that dequantizing needs.
struct fingerprint_hash {
    std::uint64_t value = 0xcbf29ce484222325u;
    constexpr void add(std::uint64_t x) noexcept { value = (value ^ x) * 0x100000001b3u; }
};

/// Unaligned load and store without breaking aliasing rules; compiles to one move.
template <class T>
KVQ_HD KVQ_INLINE T load_as(const void* from) noexcept {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}
template <class T>
KVQ_HD KVQ_INLINE void store_as(void* to, T value) noexcept {
    std::memcpy(to, &value, sizeof(T));
}

/// Prefetches the cache line at p into L2: a stream into L1 would use all of its outstanding misses.
/// Any address is allowed.
KVQ_INLINE void prefetch([[maybe_unused]] const void* p) noexcept {
#if defined(__CUDACC__)
#elif defined(__x86_64__) && defined(__GNUC__)
    // g++ treats its own builtin as a read of any memory, and stores all accumulators before it.
    __asm__ volatile("prefetcht1 (%0)" : : "r"(p));
#elif defined(__GNUC__)
    __builtin_prefetch(p, 0, 2);
#endif
}

}}}  // namespace kvq::detail
