// The instructions of include/kvq/cuda/arch/ptx.cuh on the CPU; takes its place among the headers that are
// tested.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <thread>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "../../core/float_formats.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

// Where the dynamic shared memory of a block lies: kernels declare these names.
alignas(128) inline thread_local std::byte shared[emulated::most_shared_memory];
alignas(128) inline thread_local std::byte page_memory[emulated::most_cluster * emulated::block_bytes];
inline constexpr std::uint32_t block_bytes = emulated::block_bytes,
                               declared_bytes = emulated::most_cluster * block_bytes;
inline std::uint32_t own_part() {
    return emulated::block == nullptr ? 0 : static_cast<std::uint32_t>(emulated::block->rank) * block_bytes;
}

inline const bool spoils = [] {
    emulated::spoil_shared_memory = [](std::size_t bytes, int blocks) {
        std::memset(shared, 0xff, bytes);
        for (int i = 0; i < blocks; ++i) std::memset(page_memory + i * block_bytes, 0xff, bytes);
    };
    return true;
}();

/// 16 bytes and 16 others as 16-bit numbers, their products added up in fours.
struct sixteen_bytes {
#ifdef __SSE2__
    __m128i low, high;  // 16 bits each

    template <class T>
    static sixteen_bytes load(const std::uint32_t* a, const std::uint32_t* b, const std::uint32_t* c,
                              const std::uint32_t* d) {
        const __m128i x = _mm_set_epi32(static_cast<int>(*d), static_cast<int>(*c), static_cast<int>(*b),
                                        static_cast<int>(*a)),
                      zero = _mm_setzero_si128();
        const __m128i above = std::is_signed_v<T> ? _mm_cmpgt_epi8(zero, x) : zero;
        return {_mm_unpacklo_epi8(x, above), _mm_unpackhi_epi8(x, above)};
    }
    __m128i times(const sixteen_bytes& b) const {
        return _mm_add_epi32(_mm_madd_epi16(low, b.low), _mm_madd_epi16(high, b.high));
    }
    static int sum(__m128i a, __m128i b) {
        const __m128i four = _mm_add_epi32(a, b), two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
        return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
    }
#else
    int numbers[16];

    template <class T>
    static sixteen_bytes load(const std::uint32_t* a, const std::uint32_t* b, const std::uint32_t* c,
                              const std::uint32_t* d) {
        sixteen_bytes x;
        const std::uint32_t words[] = {*a, *b, *c, *d};
        for (int i = 0; i < 16; ++i) x.numbers[i] = static_cast<T>(words[i / 4] >> 8 * (i % 4));
        return x;
    }
    int times(const sixteen_bytes& b) const {
        int sum = 0;
        for (int i = 0; i < 16; ++i) sum += numbers[i] * b.numbers[i];
        return sum;
    }
    static int sum(int a, int b) { return a + b; }
#endif
};

/// D[16][8] += A[16][8 words] B[8][8 words] of bytes.
template <class A, class B>
void multiply_bytes(int (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3,
                    std::uint32_t b0, std::uint32_t b1) {
    const int g = emulated::thread->lane / 4, t = emulated::thread->lane % 4;
    const auto words = emulated::exchange(emulated::meeting::product, a0, a1, a2, a3, b0, b1);
    sixteen_bytes a[2][2], b[2][2];  // of two rows and two columns, in two halves
    for (int i = 0; i < 2; ++i)
        for (int half = 0; half < 2; ++half) {
            const auto *const row = words + 4 * g, *const column = words + 4 * (2 * t + i);
            const int of_a = i + 2 * half, of_b = 4 + half;
            a[i][half] = sixteen_bytes::load<A>(row[0] + of_a, row[1] + of_a, row[2] + of_a, row[3] + of_a);
            b[i][half] = sixteen_bytes::load<B>(column[0] + of_b, column[1] + of_b, column[2] + of_b,
                                                column[3] + of_b);
        }
    for (int i = 0; i < 4; ++i) {
        const auto &row = a[i / 2], &column = b[i % 2];
        d[i] += sixteen_bytes::sum(row[0].times(column[0]), row[1].times(column[1]));
    }
}
inline void mma_codes_signed(int (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                             std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
    multiply_bytes<std::uint8_t, std::int8_t>(d, a0, a1, a2, a3, b0, b1);
}
inline void mma_codes_unsigned(int (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                               std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
    multiply_bytes<std::uint8_t, std::uint8_t>(d, a0, a1, a2, a3, b0, b1);
}
inline void mma_signed(int (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3,
                       std::uint32_t b0, std::uint32_t b1) {
    multiply_bytes<std::int8_t, std::int8_t>(d, a0, a1, a2, a3, b0, b1);
}

inline float half_bits_to_float(std::uint16_t bits) { return static_cast<float>(float16::from_bits(bits)); }
template <class T, int Half>
float unpack_half(std::uint32_t word) {
    return static_cast<float>(T::from_bits(static_cast<std::uint16_t>(word >> 16 * Half)));
}
inline int clamped_sum(int a, int b, int top) { return a + b < 0 ? 0 : a + b < top ? a + b : top; }
inline std::uint32_t opaque_factor(std::uint32_t factor) { return factor; }

template <class T>
std::uint32_t pack_halves(float low, float high) {
    return T(low).bits | static_cast<std::uint32_t>(T(high).bits) << 16;
}
/// Floats of the halves of six words.
template <class T>
void floats_of_halves(const std::uint32_t (&words)[6], float (&floats)[12]) {
#ifdef __SSE2__
    for (int i = 0; i < 6; i += 2) {
        const __m128i two = _mm_set_epi32(0, 0, static_cast<int>(words[i + 1]), static_cast<int>(words[i])),
                      halves = _mm_unpacklo_epi16(two, _mm_setzero_si128());
        __m128i x;
        if constexpr (std::is_same_v<T, float16>) {
            const __m128i size = _mm_and_si128(halves, _mm_set1_epi32(0x7fff)),
                          is_finite = _mm_cmplt_epi32(size, _mm_set1_epi32(0x7c00));
            const __m128 scaled =
                _mm_mul_ps(_mm_castsi128_ps(_mm_slli_epi32(size, 13)), _mm_set1_ps(0x1p112f));
            x = _mm_or_si128(_mm_castps_si128(scaled),
                             _mm_slli_epi32(_mm_and_si128(halves, _mm_set1_epi32(0x8000)), 16));
            x = _mm_or_si128(x, _mm_andnot_si128(is_finite, _mm_set1_epi32(0x7f800000)));
        } else {
            x = _mm_slli_epi32(halves, 16);
        }
        _mm_storeu_ps(floats + 2 * i, _mm_castsi128_ps(x));
    }
#else
    for (int i = 0; i < 6; ++i) {
        floats[2 * i] = unpack_half<T, 0>(words[i]);
        floats[2 * i + 1] = unpack_half<T, 1>(words[i]);
    }
#endif
}
/// D[16][8] += A[16][8 words] B[8][8 words] of halves; each lane converts its own numbers, once.
template <class T>
void mma_values(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3,
                std::uint32_t b0, std::uint32_t b1) {
    const int g = emulated::thread->lane / 4, t = emulated::thread->lane % 4;
    float own[12];  // of row g, of row g + 8, of the column
    floats_of_halves<T>({a0, a2, a1, a3, b0, b1}, own);
    const auto words = emulated::exchange_numbers(emulated::meeting::product, own);
    const auto *const rows = words + 4 * g, *const columns = words + 8 * t;
#ifdef __SSE2__
    const auto four = [](const std::uint32_t* at) __attribute__((always_inline)) {
        return _mm_castsi128_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    };
    __m128 sums[4] = {};
    const auto add = [&](int k) __attribute__((always_inline)) {
        const __m128 row_0 = four(rows[k]), row_1 = four(rows[k] + 4), column_0 = four(columns[k] + 8),
                     column_1 = four(columns[k + 4] + 8);
        sums[0] = _mm_add_ps(sums[0], _mm_mul_ps(row_0, column_0));
        sums[1] = _mm_add_ps(sums[1], _mm_mul_ps(row_0, column_1));
        sums[2] = _mm_add_ps(sums[2], _mm_mul_ps(row_1, column_0));
        sums[3] = _mm_add_ps(sums[3], _mm_mul_ps(row_1, column_1));
    };
    add(0), add(1), add(2), add(3);
    _MM_TRANSPOSE4_PS(sums[0], sums[1], sums[2], sums[3]);
    const __m128 sum = _mm_add_ps(_mm_add_ps(sums[0], sums[1]), _mm_add_ps(sums[2], sums[3]));
    _mm_storeu_ps(d, _mm_add_ps(_mm_loadu_ps(d), sum));
#else
    for (int i = 0; i < 4; ++i) {
        float sum = 0.0f;
        for (int j = 0; j < 16; ++j)
            sum += __uint_as_float(rows[j / 4][4 * (i / 2) + j % 4]) *
                   __uint_as_float(columns[j / 4 + 4 * (i % 2)][8 + j % 4]);
        d[i] += sum;
    }
#endif
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
template <int Half>
std::uint32_t halves_of_e4m3(std::uint32_t codes) {
    const auto number = [&](int i) {
        return e4m3::to_float(static_cast<std::uint8_t>(codes >> (16 * Half + 8 * i)));
    };
    return pack_halves<float16>(number(0), number(1));
}
inline float flushed(float x) { return std::abs(x) < 1.17549435e-38f ? 0.0f : x; }
inline float exp2_fast(float x) { return flushed(std::exp2(x)); }
inline float reciprocal(float x) { return flushed(1.0f / x); }

// Shared memory, by address. What kernels declare themselves, beside the dynamic part, lies behind it, 2 MB
// for each name.
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
            return static_cast<std::uint32_t>(i + 1) * declared_bytes + own_part() +
                   static_cast<std::uint32_t>(at - declared[i]);
    declared.push_back(const_cast<std::byte*>(at));
    return static_cast<std::uint32_t>(declared.size()) * declared_bytes + own_part();
}
inline uint4 load_shared_16(std::uint32_t at) { return read_shared<uint4>(at); }
inline uint2 load_shared_8(std::uint32_t at) { return read_shared<uint2>(at); }
inline std::uint32_t load_shared_4(std::uint32_t at) { return read_shared<std::uint32_t>(at); }
inline std::uint32_t load_shared_2(std::uint32_t at) { return read_shared<std::uint16_t>(at); }
inline std::uint32_t load_shared_1(std::uint32_t at) { return read_shared<std::uint8_t>(at); }
inline void store_shared_16(std::uint32_t at, const float4& v) { write_shared(at, v); }
template <int Behind>
inline void store_shared_4x16(const std::uint32_t (&at)[4], const std::uint32_t (&x)[4][4]) {
    for (int i = 0; i < 4; ++i)
        write_shared(at[i] + static_cast<std::uint32_t>(Behind), uint4{x[i][0], x[i][1], x[i][2], x[i][3]});
}
inline uint4 fetch_16(const uint4* from) { return *from; }
template <class T>
std::uint32_t fetch_word(const T* from) {
    return *from;
}
inline uint2 fetch_two_words(const uint2* from) { return *from; }
inline void wait_for(std::uint32_t) {}
template <bool Transposed = false>
uint4 load_matrices(std::uint32_t at) {
    const int lane = emulated::thread->lane;
    const auto words = emulated::exchange(emulated::meeting::product, at, 0u, 0u, 0u, 0u, 0u);
    const auto half = [&](int matrix, int row, int number) -> std::uint32_t {
        return load_shared_2(words[8 * matrix + row][0] + 2u * static_cast<std::uint32_t>(number));
    };
    const auto word = [&](int matrix) {
        const int i = lane / 4, j = lane % 4 * 2;
        return Transposed ? half(matrix, j, i) | half(matrix, j + 1, i) << 16
                          : half(matrix, i, j) | half(matrix, i, j + 1) << 16;
    };
    return {word(0), word(1), word(2), word(3)};
}
inline void store_word(std::uint32_t at, std::uint32_t word) { write_shared(at, word); }
inline void store_words(std::uint32_t at, std::uint32_t a, std::uint32_t b) { write_shared(at, uint2{a, b}); }
inline void store_half_word(std::uint32_t at, std::uint16_t half) { write_shared(at, half); }

/// Words that are awaited until they are not zero, or that are made zero again. On a device the one who waits
/// would have taken what was there before.
inline void store_relaxed(std::uint32_t* to, std::uint32_t word) {
    if (word != 0 && *to != 0) emulated::fail("an awaited word is written where there was no zero");
    *to = word;
}
inline void store_relaxed(uint4* to, const uint4& v) {
    store_relaxed(&to->x, v.x);
    store_relaxed(&to->y, v.y);
    store_relaxed(&to->z, v.z);
    store_relaxed(&to->w, v.w);
}
inline void load_relaxed_if(bool wanted, std::uint32_t& word, const std::uint32_t* from) {
    if (wanted) word = *from;
}
inline void load_relaxed_if(bool wanted, uint4& v, const uint4* from) {
    if (wanted) v = *from;
}

inline void store_system(uint4* to, const uint4& v) {
    const unsigned words[] = {v.x, v.y, v.z, v.w};
    unsigned* const at[] = {&to->x, &to->y, &to->z, &to->w};
    for (int i = 0; i < 4; ++i) __atomic_store_n(at[i], words[i], __ATOMIC_RELEASE);
}
inline uint4 load_system(const uint4* from) {
    const auto word = [](const unsigned& at) { return __atomic_load_n(&at, __ATOMIC_ACQUIRE); };
    return {word(from->x), word(from->y), word(from->z), word(from->w)};
}
/// Who looks at the clock waits for another rank.
inline unsigned long long nanoseconds() {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    return static_cast<unsigned long long>(std::chrono::steady_clock::now().time_since_epoch().count());
}

inline void copy_async(std::uint32_t to, const void* from, std::uint32_t bytes = 16) {
    if (bytes != 0 && reinterpret_cast<std::uintptr_t>(from) % 16 != 0)
        emulated::fail("an asynchronous copy from an address that is no multiple of 16");
    emulated::thread->copies.add({at_shared(to, 16), from, bytes});
}
inline void copy_word_async(std::uint32_t to, const void* from, std::uint32_t bytes = 4) {
    if (bytes != 0 && reinterpret_cast<std::uintptr_t>(from) % 4 != 0)
        emulated::fail("an asynchronous copy from an address that is no multiple of 4");
    emulated::thread->copies.add({at_shared(to, 4), from, bytes, 4});
}
inline void wait_at_barrier(int number, int threads) { emulated::wait_at_barrier(number, threads); }
inline void arrive_at_barrier(int number, int threads) { emulated::arrive_at_barrier(number, threads); }
inline bool any_at_barrier(int number, int threads, bool own) {
    emulated::wait_at_barrier(number, threads, own);
    return emulated::thread->any;
}
inline void copy_commit() { emulated::thread->copies.end_group(); }
template <int Pending>
void copy_wait() {
    emulated::thread->copies.wait(Pending);
}
inline void prefetch_line(const void*) {}
inline void prefetch_lines(const std::byte*, int, int) {}
inline void prefetch_bulk(const void*, int) {}
inline unsigned load_acquired(const unsigned* from) { return *from; }
inline void launch_dependents() {
    if (emulated::predecessor) emulated::predecessor(false);
}
inline void wait_for_predecessor() {
    if (emulated::predecessor) emulated::predecessor(true);
}

inline int cluster_rank() { return emulated::block->rank; }
inline void cluster_wait() { emulated::wait_for_cluster(); }
template <class T>
T* in_block(int rank, T* p) {
    auto* const at = const_cast<std::byte*>(reinterpret_cast<const std::byte*>(p));
    return reinterpret_cast<T*>(at + (static_cast<std::ptrdiff_t>(rank) - cluster_rank()) * block_bytes);
}
inline std::byte* own_memory(std::byte* dynamic) { return dynamic + own_part(); }

}}}  // namespace kvq::cuda::detail
