// The instructions of include/kvq/backends/cuda/ptx.cuh on the CPU; takes its place among the headers that are tested.
#pragma once

#include <cuda_runtime_api.h>

#include "../../core/float_formats.hpp"

namespace kvq::inline KVQ_TAGGED::cuda::detail {

// Where the dynamic shared memory of a block lies: kernels declare these names.
alignas(128) inline thread_local std::byte shared[emulated::most_shared_memory];
alignas(128) inline thread_local std::byte page_memory[emulated::most_shared_memory];

inline const bool spoils = [] {
    emulated::spoil_shared_memory = [](std::size_t bytes) {
        std::memset(shared, 0xff, bytes);
        std::memset(page_memory, 0xff, bytes);
    };
    return true;
}();

/// D[16][8] += A[16][8 words] B[8][8 words]; product(a, b) of two words.
template <class Sum, class Product>
void multiply_tiles(Sum (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3,
                    std::uint32_t b0, std::uint32_t b1, const Product& product) {
    const int g = emulated::thread->lane / 4, t = emulated::thread->lane % 4;
    const auto words = emulated::exchange(emulated::meeting::product, a0, a1, a2, a3, b0, b1);
    for (int i = 0; i < 4; ++i) {
        const int column = 2 * t + i % 2, lower = i / 2;
        decltype(product(a0, b0)) sum = 0;
        for (int k = 0; k < 4; ++k) {
            const std::uint32_t *const a = words[4 * g + k], *const b = words[4 * column + k];
            sum += product(a[lower], b[4]) + product(a[2 + lower], b[5]);
        }
        d[i] = static_cast<Sum>(d[i] + sum);
    }
}
template <class A, class B>
int product_of_bytes(std::uint32_t a, std::uint32_t b) {
    int sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<A>(a >> 8 * i) * static_cast<B>(b >> 8 * i);
    return sum;
}
inline void mma_codes_signed(int (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                             std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
    multiply_tiles(d, a0, a1, a2, a3, b0, b1, product_of_bytes<std::uint8_t, std::int8_t>);
}
inline void mma_codes_unsigned(int (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                               std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
    multiply_tiles(d, a0, a1, a2, a3, b0, b1, product_of_bytes<std::uint8_t, std::uint8_t>);
}

inline float half_bits_to_float(std::uint16_t bits) { return static_cast<float>(float16::from_bits(bits)); }
template <class T, int Half>
float unpack_half(std::uint32_t word) {
    return static_cast<float>(T::from_bits(static_cast<std::uint16_t>(word >> 16 * Half)));
}
inline std::uint32_t opaque_factor(std::uint32_t factor) { return factor; }

template <class T>
std::uint32_t pack_halves(float low, float high) {
    return T(low).bits | static_cast<std::uint32_t>(T(high).bits) << 16;
}
template <class T>
void mma_values(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3,
                std::uint32_t b0, std::uint32_t b1) {
    // As multiply_tiles, but each lane converts its own numbers, once.
    const int g = emulated::thread->lane / 4, t = emulated::thread->lane % 4;
    const auto low = [](std::uint32_t word) { return __float_as_uint(unpack_half<T, 0>(word)); };
    const auto high = [](std::uint32_t word) { return __float_as_uint(unpack_half<T, 1>(word)); };
    const auto words =
        emulated::exchange(emulated::meeting::product, low(a0), high(a0), low(a1), high(a1), low(a2),
                           high(a2), low(a3), high(a3), low(b0), high(b0), low(b1), high(b1));
    const auto product = [](const std::uint32_t* a, const std::uint32_t* b) {
        return static_cast<double>(__uint_as_float(a[0])) * static_cast<double>(__uint_as_float(b[0])) +
               static_cast<double>(__uint_as_float(a[1])) * static_cast<double>(__uint_as_float(b[1]));
    };
    for (int i = 0; i < 4; ++i) {
        const int column = 2 * t + i % 2, lower = i / 2;
        double sum = 0;
        for (int k = 0; k < 4; ++k) {
            const std::uint32_t *const a = words[4 * g + k], *const b = words[4 * column + k];
            sum += product(a + 2 * lower, b + 8) + product(a + 4 + 2 * lower, b + 10);
        }
        d[i] = static_cast<float>(static_cast<double>(d[i]) + sum);
    }
}
inline std::uint16_t half_above(float x) { return kvq::detail::round_up_to<float16>(x).bits; }
inline std::uint16_t half_below(float x) { return kvq::detail::round_down<float16>(x).bits; }
template <class T>
float to_float(T value) {
    return static_cast<float>(value);
}
template <class T>
T from_float(float value) {
    return T(value);
}

template <class T, class Choose>
std::uint32_t choose_halves(std::uint32_t a, std::uint32_t b, const Choose& choose) {
    std::uint32_t word = 0;
    for (int half = 0; half < 2; ++half) {
        const auto x = static_cast<std::uint16_t>(a >> 16 * half),
                   y = static_cast<std::uint16_t>(b >> 16 * half);
        const float fx = static_cast<float>(T::from_bits(x)), fy = static_cast<float>(T::from_bits(y));
        std::uint16_t chosen =
            choose(fx, fy) || (fx == fy && std::signbit(fx) == choose(-1.0f, 1.0f)) ? x : y;
        if (fx != fx || fy != fy) chosen = T(NAN).bits;
        word |= static_cast<std::uint32_t>(chosen) << 16 * half;
    }
    return word;
}
template <class T>
std::uint32_t min_halves(std::uint32_t a, std::uint32_t b) {
    return choose_halves<T>(a, b, [](float x, float y) { return x < y; });
}
template <class T>
std::uint32_t max_halves(std::uint32_t a, std::uint32_t b) {
    return choose_halves<T>(a, b, [](float x, float y) { return x > y; });
}
inline std::uint32_t multiply_halves(std::uint32_t a, std::uint32_t b) {
    return pack_halves<float16>(unpack_half<float16, 0>(a) * unpack_half<float16, 0>(b),
                                unpack_half<float16, 1>(a) * unpack_half<float16, 1>(b));
}
inline std::uint32_t multiply_add_halves(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
    const auto sum = [](float x, float y, float z) {  // exact in double; to odd would be needed for more bits
        return static_cast<float>(static_cast<double>(x) * static_cast<double>(y) + static_cast<double>(z));
    };
    return pack_halves<float16>(
        sum(unpack_half<float16, 0>(a), unpack_half<float16, 0>(b), unpack_half<float16, 0>(c)),
        sum(unpack_half<float16, 1>(a), unpack_half<float16, 1>(b), unpack_half<float16, 1>(c)));
}
inline float flushed(float x) { return std::abs(x) < 1.17549435e-38f ? 0.0f : x; }
inline float exp2_fast(float x) { return flushed(std::exp2(x)); }
inline float reciprocal(float x) { return flushed(1.0f / x); }

// Shared memory, by address. What kernels declare themselves, beside the dynamic part, lies behind it, 1 MB for each name.
inline constexpr std::uint32_t declared_bytes = 1u << 20;
inline std::vector<std::byte*> declared;

inline std::byte* at_shared(std::uint32_t at, std::size_t bytes) {
    const std::size_t number = at / declared_bytes;
    if (at % bytes != 0 || number > declared.size() ||
        (number == 0 && at + bytes > emulated::most_shared_memory))
        emulated::fail("a misaligned or wrong address of shared memory");
    return number == 0 ? shared + at : declared[number - 1] + at % declared_bytes;
}
template <class T>
T read_shared(std::uint32_t at) {
    T v;
    std::memcpy(&v, at_shared(at, sizeof v), sizeof v);
    return v;
}
template <class T>
void write_shared(std::uint32_t at, const T& v) {
    std::memcpy(at_shared(at, sizeof v), &v, sizeof v);
}
inline std::uint32_t shared_address(const void* p) {
    const auto* const at = static_cast<const std::byte*>(p);
    if (at >= shared && at < shared + emulated::most_shared_memory)
        return static_cast<std::uint32_t>(at - shared);
    for (std::size_t i = 0; i < declared.size(); ++i)
        if (at >= declared[i] && at < declared[i] + emulated::most_shared_memory)
            return static_cast<std::uint32_t>(i + 1) * declared_bytes +
                   static_cast<std::uint32_t>(at - declared[i]);
    declared.push_back(const_cast<std::byte*>(at));
    return static_cast<std::uint32_t>(declared.size()) * declared_bytes;
}
inline uint4 load_shared_16(std::uint32_t at) { return read_shared<uint4>(at); }
inline uint2 load_shared_8(std::uint32_t at) { return read_shared<uint2>(at); }
inline std::uint32_t load_shared_4(std::uint32_t at) { return read_shared<std::uint32_t>(at); }
inline std::uint32_t load_shared_2(std::uint32_t at) { return read_shared<std::uint16_t>(at); }
inline void store_shared_16(std::uint32_t at, const float4& v) { write_shared(at, v); }
template <class T>
std::uint32_t fetch_word(const T* from) {
    return *from;
}
inline uint4 load_matrices(std::uint32_t at) {
    const int lane = emulated::thread->lane;
    const auto words = emulated::exchange(emulated::meeting::product, at, 0u, 0u, 0u, 0u, 0u);
    const auto word = [&](int matrix) {
        return load_shared_4(words[8 * matrix + lane / 4][0] + 4u * static_cast<std::uint32_t>(lane % 4));
    };
    return {word(0), word(1), word(2), word(3)};
}
inline void store_word(std::uint32_t at, std::uint32_t word) { write_shared(at, word); }
inline void store_words(std::uint32_t at, std::uint32_t a, std::uint32_t b) { write_shared(at, uint2{a, b}); }
inline void store_half_word(std::uint32_t at, std::uint16_t half) { write_shared(at, half); }

inline void store_relaxed(std::uint32_t* to, std::uint32_t word) { *to = word; }
inline void store_relaxed(uint4* to, const uint4& v) { *to = v; }
inline void load_relaxed_if(bool wanted, std::uint32_t& word, const std::uint32_t* from) {
    if (wanted) word = *from;
}
inline void load_relaxed_if(bool wanted, uint4& v, const uint4* from) {
    if (wanted) v = *from;
}

inline void copy_async(std::uint32_t to, const void* from, std::uint32_t bytes = 16) {
    if (bytes != 0 && reinterpret_cast<std::uintptr_t>(from) % 16 != 0)
        emulated::fail("an asynchronous copy from an address that is no multiple of 16");
    emulated::thread->open.push_back({at_shared(to, 16), from, bytes});
}
inline void wait_at_barrier(int number, int threads) { emulated::wait_at_barrier(number, threads); }
inline void copy_commit() {
    emulated::thread->groups.push_back(std::move(emulated::thread->open)), emulated::thread->open.clear();
}
template <int Pending>
void copy_wait() {
    auto& groups = emulated::thread->groups;
    while (groups.size() > static_cast<std::size_t>(Pending)) {
        emulated::finish_copies(groups.front());
        groups.erase(groups.begin());
    }
}
inline void prefetch_line(const void*) {}
inline void prefetch_lines(const std::byte*, int, int) {}
inline void launch_dependents() {}
inline void wait_for_predecessor() {}

}  // namespace kvq::inline KVQ_TAGGED::cuda::detail
