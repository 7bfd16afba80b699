// SPDX-License-Identifier: MIT
// Comparison family: exact. Every operation of the SIMD lanes is what plain arithmetic says, lane by lane.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <kvq/cpu/plain_lanes.hpp>
#include <kvq/cpu/rows/row_codes.hpp>
#include <kvq/cpu/rows/row_pairs.hpp>
#include <kvq/cpu/simd.hpp>
#include <kvq/cpu/softmax.hpp>
#include <vector>

#include "support/random.hpp"

namespace lanes_tests {

namespace {

using kvq::detail::bit_cast;

/// Lanes as arrays, so that any width compares with plain arithmetic.
template <class L>
struct lanes_of {
    static constexpr int width = L::width;
    using words = std::vector<std::int32_t>;
    using numbers = std::vector<float>;

    static typename L::ints in(const words& w) {
        return L::load(reinterpret_cast<const std::byte*>(w.data()));
    }
    static typename L::floats in(const numbers& x) { return L::load_floats(x.data()); }
    static words out(typename L::ints a) {
        words w(width);
        L::store(reinterpret_cast<std::byte*>(w.data()), a);
        return w;
    }
    static numbers out(typename L::floats a) {
        numbers x(width);
        L::store_floats(x.data(), a);
        return x;
    }
};

bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

template <class L>
struct fixture {
    using io = lanes_of<L>;
    test::generator random{test::seed()};

    typename io::words words() {
        typename io::words w(L::width);
        for (auto& x : w) x = static_cast<std::int32_t>(random.bits());
        return w;
    }
    typename io::numbers numbers(float factor = 1.0f) {
        typename io::numbers x(L::width);
        for (float& v : x) v = factor * random.normal();
        return x;
    }
    template <class F>
    void each(F f) {
        for (int i = 0; i < L::width; ++i) f(static_cast<std::size_t>(i));
    }
};

template <class L, int Bits>
void check_dot(fixture<L>& f) {
    using io = lanes_of<L>;
    auto acc = f.words(), codes = f.words(), x = f.words();
    for (auto& a : acc) a >>= 4;
    for (auto& c : codes) c &= static_cast<std::int32_t>(((1u << Bits) - 1u) * 0x01010101u);
    // QueryBytes of a folded vector lie in [-128, 127]; the extremes are the ones that overflow 16-bit
    // halves.
    if (f.random.one_in(3))
        for (auto& v : x) v = f.random.one_in(2) ? static_cast<std::int32_t>(0x80808080u) : 0x7f7f7f7f;
    if (f.random.one_in(3))
        for (auto& c : codes) c = static_cast<std::int32_t>(((1u << Bits) - 1u) * 0x01010101u);
    const auto got = io::out(L::template dot<Bits>(io::in(acc), io::in(codes), io::in(x)));
    f.each([&](std::size_t i) {
        std::int32_t sum = acc[i];
        for (int b = 0; b < 32; b += 8)
            sum += static_cast<std::int32_t>((static_cast<std::uint32_t>(codes[i]) >> b) & 255u) *
                   static_cast<std::int8_t>((static_cast<std::uint32_t>(x[i]) >> b) & 255u);
        REQUIRE(got[i] == sum);
    });
}

template <class L, class T>
void check_values(fixture<L>& f) {
    using io = lanes_of<L>;
    // Guarded by a page of their own size: partial loads must not read behind their count (ASan sees it).
    for (int n = 1; n <= L::width; ++n) {
        std::vector<T> stored(static_cast<std::size_t>(n));
        for (T& v : stored)
            v = T(f.random.one_in(4) ? f.random.pick(test::hostile_values()) : f.random.normal());
        const auto* const bytes = reinterpret_cast<const std::byte*>(stored.data());
        const auto got = n == L::width ? io::out(L::template load_values<T>(bytes))
                                       : io::out(L::template load_values<T>(bytes, n));
        f.each([&](std::size_t i) {
            REQUIRE(same(got[i], i < stored.size() ? static_cast<float>(stored[i]) : 0.0f));
        });
    }
    if constexpr (sizeof(T) == 2) {
        const auto w = f.words();
        const auto low = io::out(L::template halves<T, 0>(io::in(w))),
                   high = io::out(L::template halves<T, 1>(io::in(w)));
        f.each([&](std::size_t i) {
            const auto u = static_cast<std::uint32_t>(w[i]);
            REQUIRE(same(low[i], T::from_bits(static_cast<std::uint16_t>(u & 0xffffu))));
            REQUIRE(same(high[i], T::from_bits(static_cast<std::uint16_t>(u >> 16))));
        });
    }
}

}  // namespace

// The CPU of this level, and what else its instructions can stand for.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define KVQ_TEST_LANES                                                         \
    kvq::plain_lanes, kvq::simd<>::lanes, kvq::simd_lanes<kvq::arch::avxvnni>, \
        kvq::simd_lanes<kvq::arch::avx512bw>, kvq::simd_lanes<kvq::arch::avx2>
#else
#define KVQ_TEST_LANES kvq::plain_lanes, kvq::simd<>::lanes
#endif

TEST_CASE_TEMPLATE("words: shifts, masks, sums, partial loads and stores", L, KVQ_TEST_LANES) {
    using io = lanes_of<L>;
    fixture<L> f;
    for (int round = 0; round < 200; ++round) {
        const auto a = f.words(), b = f.words();
        const auto u = [](std::int32_t x) { return static_cast<std::uint32_t>(x); };
        const auto right = io::out(L::template shift_right<5>(io::in(a))),
                   left = io::out(L::template shift_left<7>(io::in(a))),
                   arithmetic = io::out(L::template shift_right_signed<8>(io::in(a))),
                   none = io::out(L::template shift_right<0>(io::in(a))),
                   both = io::out(L::bit_and(io::in(a), io::in(b))),
                   either = io::out(L::bit_or(io::in(a), io::in(b))), splat = io::out(L::splat(a[0]));
        typename io::words small_a = a, small_b = b;
        for (auto& x : small_a) x /= 2;
        for (auto& x : small_b) x /= 2;
        const auto sum = io::out(L::add(io::in(small_a), io::in(small_b)));
        f.each([&](std::size_t i) {
            REQUIRE(u(right[i]) == u(a[i]) >> 5);
            REQUIRE(u(left[i]) == u(a[i]) << 7);
            REQUIRE(arithmetic[i] == a[i] >> 8);
            REQUIRE(none[i] == a[i]);
            REQUIRE(both[i] == (a[i] & b[i]));
            REQUIRE(either[i] == (a[i] | b[i]));
            REQUIRE(splat[i] == a[0]);
            REQUIRE(sum[i] == small_a[i] + small_b[i]);
        });
    }
    for (int n = 1; n < L::width; ++n) {
        const auto a = f.words();
        const std::vector<std::int32_t> few(a.begin(), a.begin() + n);
        const auto loaded = io::out(L::load(reinterpret_cast<const std::byte*>(few.data()), n));
        std::vector<std::int32_t> stored(static_cast<std::size_t>(n));
        L::store(reinterpret_cast<std::byte*>(stored.data()), io::in(a), n);
        CHECK(stored == few);
        f.each([&](std::size_t i) { REQUIRE(loaded[i] == (i < few.size() ? few[i] : 0)); });
    }
}

TEST_CASE_TEMPLATE("integer dot products are exact at every width, extremes included", L, KVQ_TEST_LANES) {
    fixture<L> f;
    for (int round = 0; round < 300; ++round) {
        check_dot<L, 1>(f);
        check_dot<L, 2>(f);
        check_dot<L, 3>(f);
        check_dot<L, 4>(f);
        check_dot<L, 5>(f);
        check_dot<L, 6>(f);
        check_dot<L, 7>(f);
        check_dot<L, 8>(f);
    }
}

TEST_CASE_TEMPLATE("bytes looked up in a table of sixteen", L, KVQ_TEST_LANES) {
    using io = lanes_of<L>;
    fixture<L> f;
    for (int round = 0; round < 100; ++round) {
        std::uint8_t table[16];
        for (auto& x : table) x = static_cast<std::uint8_t>(f.random.bits());
        auto a = f.words();
        for (auto& x : a) x &= 0x0f0f0f0f;
        const auto got = io::out(L::lookup_bytes(L::sixteen_bytes(table), io::in(a)));
        f.each([&](std::size_t i) {
            for (int b = 0; b < 32; b += 8)
                REQUIRE((static_cast<std::uint32_t>(got[i]) >> b & 255u) == table[a[i] >> b & 15]);
        });
    }
}

TEST_CASE_TEMPLATE("products of 16-bit words, and words of four lanes side by side", L, KVQ_TEST_LANES) {
    using io = lanes_of<L>;
    if constexpr (L::word_products) {
        fixture<L> f;
        const auto half = [](std::int32_t w, int h) {
            return static_cast<std::int32_t>(
                static_cast<std::int16_t>((static_cast<std::uint32_t>(w) >> (16 * h)) & 0xffffu));
        };
        for (int round = 0; round < 300; ++round) {
            auto acc = f.words(), x = f.words();
            const auto codes = f.words();
            for (auto& a : acc) a >>= 4;
            if (f.random.one_in(3))
                for (auto& v : x)
                    v = f.random.one_in(2) ? static_cast<std::int32_t>(0x81008100u) : 0x7f007f00;
            const auto even = L::even_bytes(io::in(codes)), odd = L::odd_bytes(io::in(codes));
            const auto first = io::out(even), second = io::out(odd);
            const auto got =
                io::out(L::dot_words(L::dot_words(io::in(acc), even, io::in(x)), odd, io::in(x)));
            f.each([&](std::size_t i) {
                const auto c = static_cast<std::uint32_t>(codes[i]);
                REQUIRE(static_cast<std::uint32_t>(first[i]) == (c & 0x00ff00ffu));
                REQUIRE(static_cast<std::uint32_t>(second[i]) == ((c >> 8) & 0x00ff00ffu));
                std::int32_t sum = acc[i];
                for (int h = 0; h < 2; ++h)
                    sum += half(first[i], h) * half(x[i], h) + half(second[i], h) * half(x[i], h);
                REQUIRE(got[i] == sum);
            });
        }
        for (const int stride : {2, 4, 8}) {
            auto a = f.words();
            for (auto& w : a) w = half(w, 0);
            std::vector<std::uint32_t> out(static_cast<std::size_t>(L::width / 4 * stride), 0xabababab);
            L::store_word_pairs(out.data(), stride, io::in(a));
            for (int q = 0; q < L::width / 4; ++q)
                for (int i = 0; i < stride; ++i) {
                    const auto lane = [&](int k) {
                        return static_cast<std::uint32_t>(a[static_cast<std::size_t>(4 * q + k)]) & 0xffffu;
                    };
                    CHECK(out[static_cast<std::size_t>(q * stride + i)] ==
                          (i < 2 ? lane(i) | lane(i + 2) << 16 : 0xabababab));
                }
        }
    }
}

TEST_CASE_TEMPLATE("floats: arithmetic, comparisons, reductions, partial loads and stores", L,
                   KVQ_TEST_LANES) {
    using io = lanes_of<L>;
    fixture<L> f;
    for (int round = 0; round < 200; ++round) {
        const auto a = f.numbers(), b = f.numbers(), c = f.numbers();
        const auto sum = io::out(L::add(io::in(a), io::in(b))),
                   difference = io::out(L::subtract(io::in(a), io::in(b))),
                   product = io::out(L::multiply(io::in(a), io::in(b))),
                   unfused = io::out(L::rounded_product(io::in(a), io::in(b))),
                   quotient = io::out(L::divide(io::in(a), io::in(b))),
                   pairs = io::out(L::add_pairs(io::in(a), io::in(b))),
                   fused = io::out(L::multiply_add(io::in(a), io::in(b), io::in(c))),
                   most = io::out(L::larger(io::in(a), io::in(b))),
                   least = io::out(L::smaller(io::in(a), io::in(b))), size = io::out(L::abs(io::in(a))),
                   above = io::out(L::keep_above(io::in(a), io::in(b), 0.25f)),
                   not_below = io::out(L::keep_unless_below(io::in(a), io::in(b), 0.25f)),
                   even = io::out(L::keep_even(io::in(a))), pair = io::out(L::splat_pair(a.data() + 1)),
                   one = io::out(L::splat_float(a[0]));
        double total = 0, magnitude = 0;
        float largest = a[0], smallest = a[0];
        f.each([&](std::size_t i) {
            REQUIRE(sum[i] == a[i] + b[i]);
            REQUIRE(difference[i] == a[i] - b[i]);
            REQUIRE(product[i] == a[i] * b[i]);
            REQUIRE(unfused[i] == a[i] * b[i]);
            REQUIRE(quotient[i] == a[i] / b[i]);
            const auto& from = 2 * i < a.size() ? a : b;
            REQUIRE(pairs[i] == from[2 * i % a.size()] + from[2 * i % a.size() + 1]);
            // Fused or not: between one and two roundings.
            REQUIRE(std::fabs(static_cast<double>(fused[i]) -
                              (static_cast<double>(a[i]) * static_cast<double>(b[i]) +
                               static_cast<double>(c[i]))) <=
                    0x1p-23 *
                        (std::fabs(static_cast<double>(a[i] * b[i])) + std::fabs(static_cast<double>(c[i]))));
            REQUIRE(most[i] == std::fmax(a[i], b[i]));
            REQUIRE(least[i] == std::fmin(a[i], b[i]));
            REQUIRE(size[i] == std::fabs(a[i]));
            REQUIRE(above[i] == (b[i] > 0.25f ? a[i] : 0.0f));
            REQUIRE(not_below[i] == (b[i] <= 0.25f ? 0.0f : a[i]));
            REQUIRE(even[i] == (i % 2 ? 0.0f : a[i]));
            REQUIRE(pair[i] == a[1 + i % 2]);
            REQUIRE(one[i] == a[0]);
            total += static_cast<double>(a[i]);
            magnitude += std::fabs(static_cast<double>(a[i]));
            largest = std::fmax(largest, a[i]);
            smallest = std::fmin(smallest, a[i]);
        });
        REQUIRE(std::fabs(static_cast<double>(L::sum(io::in(a))) - total) <= L::width * 0x1p-24 * magnitude);
        REQUIRE(L::largest(io::in(a)) == largest);
        REQUIRE(L::smallest(io::in(a)) == smallest);
    }
    for (int n = 1; n < L::width; ++n) {
        const auto a = f.numbers();
        const std::vector<float> few(a.begin(), a.begin() + n);
        const auto loaded = io::out(L::load_floats(few.data(), n));
        std::vector<float> stored(static_cast<std::size_t>(n));
        L::store_floats(stored.data(), io::in(a), n);
        CHECK(stored == few);
        f.each([&](std::size_t i) { REQUIRE(loaded[i] == (i < few.size() ? few[i] : 0.0f)); });
    }
    // What a trim left in odd lanes may be anything.
    const auto nothing = io::out(L::keep_even(L::splat_float(std::numeric_limits<float>::quiet_NaN())));
    f.each([&](std::size_t i) { REQUIRE((i % 2 ? nothing[i] == 0.0f : std::isnan(nothing[i]))); });
}

TEST_CASE_TEMPLATE("doubles: half of the lanes, exact products, and rounded back", L, KVQ_TEST_LANES) {
    using io = lanes_of<L>;
    constexpr std::size_t half = L::width / 2;
    fixture<L> f;
    INFO("KVQ_SEED=", test::seed());
    for (int round = 0; round < 200; ++round) {
        const auto a = f.numbers(), b = f.numbers(1e20f);
        const typename L::doubles low = L::template widen<0>(io::in(a)),
                                  high = L::template widen<1>(io::in(a));
        const double third = 1.0 / 3.0;
        double got[6][L::width];
        L::store_doubles(got[0], low);
        L::store_doubles(got[0] + half, high);
        L::store_doubles(got[1], L::multiply(low, L::splat_double(third)));
        L::store_doubles(got[2], L::add(high, L::load_doubles(got[1])));
        L::store_doubles(got[3], L::multiply_add(low, L::template widen<0>(io::in(b)), high));
        const auto back = io::out(L::narrow(L::load_doubles(got[1]), L::load_doubles(got[2])));
        for (std::size_t i = 0; i < half; ++i) {
            const double x = static_cast<double>(a[i]), y = static_cast<double>(a[half + i]);
            REQUIRE(got[0][i] == x);
            REQUIRE(got[0][half + i] == y);
            REQUIRE(got[1][i] == x * third);
            REQUIRE(got[2][i] == y + got[1][i]);
            REQUIRE(got[3][i] == x * static_cast<double>(b[i]) + y);
            REQUIRE(back[i] == static_cast<float>(got[1][i]));
            REQUIRE(back[half + i] == static_cast<float>(got[2][i]));
        }
    }
}

TEST_CASE_TEMPLATE("limits: from 0 to the top, NaN to 0", L, KVQ_TEST_LANES) {
    using io = lanes_of<L>;
    fixture<L> f;
    INFO("KVQ_SEED=", test::seed());
    for (int round = 0; round < 200; ++round) {
        auto a = f.numbers(10.0f), top = f.numbers();
        f.each([&](std::size_t i) {
            top[i] = std::abs(top[i]) * 10.0f;
            if (f.random.one_in(4)) a[i] = f.random.pick(test::hostile_values());
        });
        const auto got = io::out(L::limited(io::in(a), io::in(top)));
        f.each([&](std::size_t i) { REQUIRE(got[i] == (a[i] > 0.0f ? std::min(a[i], top[i]) : 0.0f)); });
    }
}

TEST_CASE_TEMPLATE("rounding is to nearest, ties to even", L, KVQ_TEST_LANES) {
    using io = lanes_of<L>;
    fixture<L> f;
    for (int round = 0; round < 3000; ++round) {
        typename io::numbers x(L::width);
        for (float& v : x)
            v = f.random.one_in(3) ? static_cast<float>(f.random.between(-40000, 40000)) + 0.5f
                                   : 32512.0f * (2.0f * f.random.uniform() - 1.0f);
        const auto r = io::out(L::round(io::in(x)));
        const auto back = io::out(L::to_floats(io::in(r)));
        f.each([&](std::size_t i) {
            REQUIRE(static_cast<float>(r[i]) == std::nearbyint(x[i]));
            REQUIRE(back[i] == static_cast<float>(r[i]));
        });
    }
    const auto bits = f.words();
    const auto seen = io::out(L::as_floats(io::in(bits)));
    f.each([&](std::size_t i) { REQUIRE(same(seen[i], bit_cast<float>(bits[i]))); });
}

TEST_CASE_TEMPLATE("pieces: lowest bytes of four words each, high and low side by side", L, KVQ_TEST_LANES) {
    using io = lanes_of<L>;
    fixture<L> f;
    for (const int stride : {2, 4, 8}) {
        // As kernels have it: bytes of a fixed-point number, sign extended.
        auto high = f.words(), low = f.words();
        for (auto& x : high) x = static_cast<std::int8_t>(x & 255);
        std::vector<std::uint32_t> out(static_cast<std::size_t>(L::width / 4 * stride), 0xabababab);
        L::store_high_low(out.data(), stride, io::in(high), io::in(low));
        for (int q = 0; q < L::width / 4; ++q)
            for (int i = 0; i < stride; ++i) {
                std::uint32_t expected = 0xabababab;
                if (i < 2) {
                    expected = 0;
                    for (int k = 0; k < 4; ++k) {
                        const auto& from = i == 0 ? high : low;
                        expected |=
                            (static_cast<std::uint32_t>(from[static_cast<std::size_t>(4 * q + k)]) & 255u)
                            << (8 * k);
                    }
                }
                CHECK(out[static_cast<std::size_t>(q * stride + i)] == expected);
            }
    }
}

TEST_CASE_TEMPLATE("pieces of four vectors written together are those written one by one", L,
                   KVQ_TEST_LANES) {
    if constexpr (requires(std::uint32_t * to, const typename L::ints* a) {
                      L::store_high_low_of_four(to, a);
                  }) {
        using io = lanes_of<L>;
        fixture<L> f;
        for (int round = 0; round < 200; ++round) {
            typename L::ints a[4];
            const auto size = static_cast<std::size_t>(L::width / 4 * 8);
            std::vector<std::uint32_t> expected(size), out(size + 1, 0xabababab);
            for (int i = 0; i < 4; ++i) {
                auto numbers = f.words(), high = numbers;
                for (auto& x : numbers)
                    x = f.random.one_in(5)
                            ? f.random.pick(std::vector<int>{-32512, -32384, -128, 127, 128, 32512})
                            : f.random.between(-32512, 32512);
                f.each([&](std::size_t k) { high[k] = (numbers[k] + 128) >> 8; });
                a[i] = io::in(numbers);
                L::store_high_low(expected.data() + 2 * i, 8, io::in(high), a[i]);
            }
            L::store_high_low_of_four(out.data(), a);
            REQUIRE(out.back() == 0xabababab);
            out.pop_back();
            REQUIRE(out == expected);
        }
    }
}

TEST_CASE_TEMPLATE("rows as codes: parts, bytes of four rows, words as high and low bytes", L,
                   KVQ_TEST_LANES) {
    if constexpr (kvq::kernels::multiplies_codes<L>) {
        using io = lanes_of<L>;
        fixture<L> f;
        constexpr int bytes = 4 * L::width;
        const auto random_bytes = [&](int n) {
            std::vector<std::byte> of(static_cast<std::size_t>(n));
            for (auto& x : of) x = static_cast<std::byte>(f.random.between(0, 255));
            return of;
        };
        const auto bytes_of = [](const auto& v) {
            std::vector<std::byte> out(static_cast<std::size_t>(bytes));
            L::store(out.data(), v);
            return out;
        };
        const auto check_parts = [&]<int Parts>(std::integral_constant<int, Parts>) {
            constexpr int size = bytes / Parts, step = size + 2;
            for (int n = 1; n <= Parts; ++n) {
                // Nothing behind part n is read.
                const auto from = random_bytes((n - 1) * step + size);
                std::ptrdiff_t behind[Parts - 1];
                for (int i = 1; i < Parts; ++i) behind[i - 1] = std::min(i, n - 1) * step;
                const auto out = bytes_of(L::load_parts(from.data(), behind));
                for (int i = 0; i < bytes; ++i)
                    REQUIRE(out[static_cast<std::size_t>(i)] ==
                            from[static_cast<std::size_t>(std::min(i / size, n - 1) * step + i % size)]);
            }
        };
        check_parts(std::integral_constant<int, 2>());
        check_parts(std::integral_constant<int, 4>());

        // of(k): the byte of a row that word k has.
        const auto check_turned = [&](const auto& rows, const std::vector<std::byte>& out, const auto& of) {
            for (int k = 0; k < L::width; ++k)
                for (int i = 0; i < 4; ++i)
                    REQUIRE(out[static_cast<std::size_t>(4 * k + i)] ==
                            rows[static_cast<std::size_t>(i)][static_cast<std::size_t>(of(k))]);
        };
        const auto rows_of = [&](int n) {
            return std::array{random_bytes(n), random_bytes(n), random_bytes(n), random_bytes(n)};
        };
        const auto sixteen = rows_of(16), more = rows_of(32);
        const std::byte* const rows[4] = {sixteen[0].data(), sixteen[1].data(), sixteen[2].data(),
                                          sixteen[3].data()};
        check_turned(sixteen, bytes_of(L::template turn_sixteen<1>(rows)), [](int k) { return k; });
        check_turned(sixteen, bytes_of(L::template turn_sixteen<2>(rows)),
                     [](int k) { return k % 2 * 8 + k / 2; });
        const std::byte* const more_rows[4] = {more[0].data(), more[1].data(), more[2].data(),
                                               more[3].data()};
        typename L::ints v[2];
        auto sums = more;
        for (auto& row : sums)
            for (auto& x : row) x ^= std::byte{128};
        L::turn_thirty_two(more_rows, L::splat(static_cast<std::int32_t>(0x80808080u)), v);
        for (int h = 0; h < 2; ++h)
            check_turned(sums, bytes_of(v[h]), [&](int k) { return k / 8 * 16 + 8 * h + k % 8; });

        // e4m3 times 2^-8: of `count` vectors, lane i of vector k is byte k of row i.
        const auto check_scales = [](const typename L::floats* of, int count, const std::byte* codes) {
            for (int k = 0; k < count; ++k) {
                float out[L::width];
                L::store_floats(out, of[k]);
                for (int i = 0; i < L::width; ++i) {
                    const auto code = static_cast<std::uint8_t>(codes[count * i + k]);
                    const float x = static_cast<float>(kvq::e4m3::from_bits(code));
                    REQUIRE(256.0f * out[i] == ((code & 127) == 127 ? (code == 127 ? 480.0f : -480.0f) : x));
                }
            }
        };
        const auto scales = random_bytes(2 * bytes);
        const typename L::ints two[2] = {L::load(scales.data()), L::load(scales.data() + bytes)};
        typename L::floats of_four[4], of_eight[8];
        L::load_e4m3_words(scales.data(), of_four);
        check_scales(of_four, 4, scales.data());
        L::turn_e4m3(two, of_eight);
        check_scales(of_eight, 8, scales.data());

        std::vector<float> numbers;
        for (int k = 0; k < 4 * L::width; ++k)
            numbers.push_back(static_cast<float>(f.random.between(-99, 99)));
        typename L::floats four[4];
        for (int k = 0; k < 4; ++k) four[k] = L::load_floats(numbers.data() + k * L::width);
        const auto lower = four[0], upper = four[1];
        float lanes[L::width], found[L::width];
        L::store_floats(lanes, L::sum_lanes(four));
        std::int32_t places[L::width];
        for (auto& x : places) x = f.random.between(0, 2 * L::width - 1);
        L::store_floats(found, L::lookup(lower, upper, L::load(reinterpret_cast<const std::byte*>(places))));
        for (int k = 0; k < L::width; ++k) {
            float sum = 0;
            for (int lane = 0; lane < L::width / 4; ++lane)
                sum += numbers[static_cast<std::size_t>(k / 4 * L::width + lane * 4 + k % 4)];
            REQUIRE(lanes[k] == sum);
            REQUIRE(found[k] == numbers[static_cast<std::size_t>(places[k])]);
        }

        typename io::words a = f.words(), b = f.words();
        for (auto* const of : {&a, &b})
            for (auto& x : *of) x = f.random.between(-32512, 32512);
        const auto plus = [](typename io::words w) {
            for (auto& x : w) x += 128 + 0x4b400000;
            return io::in(w);
        };
        for (const bool turned : {false, true}) {
            const auto out = bytes_of(turned ? L::template high_low_pairs<true>(plus(a), plus(b))
                                             : L::template high_low_pairs<false>(plus(a), plus(b)));
            for (int i = 0; i < bytes; ++i) {
                const int word = i / 4 % 4;
                const bool second = (turned ? word % 2 : word / 2) != 0,
                           low = (turned ? word / 2 : word % 2) != 0;
                const std::int32_t x = (second ? b : a)[static_cast<std::size_t>(i / 16 * 4 + i % 4)],
                                   high = (x + 128) >> 8;
                REQUIRE(static_cast<std::int8_t>(out[static_cast<std::size_t>(i)]) ==
                        (low ? x - 256 * high : high));
            }
        }
    }
}

TEST_CASE_TEMPLATE("pairs of bfloat16: tables of bytes, bytes and words in turns, products", L,
                   KVQ_TEST_LANES) {
    if constexpr (kvq::kernels::has_pairs<L>) {
        if (!L::runs_pairs()) return;
        using ints = typename L::ints;
        fixture<L> f;
        constexpr int bytes = 4 * L::width;
        const auto random_bytes = [&](std::byte(&of)[bytes]) {
            for (auto& x : of) x = static_cast<std::byte>(f.random.between(0, 255));
            return L::load(of);
        };
        std::byte table[2][bytes], index[bytes], a[bytes], b[bytes], out[bytes];
        const ints tables[2] = {random_bytes(table[0]), random_bytes(table[1])}, of_a = random_bytes(a),
                   of_b = random_bytes(b);
        L::store(out, L::lookup_128(tables, random_bytes(index)));
        for (int i = 0; i < bytes; ++i) {
            const int at = static_cast<int>(index[i]) & 127;
            REQUIRE(out[i] == table[at / bytes][at % bytes]);
        }
        // Lane by lane of 16 bytes: those of a half, `size` bytes of a, then of b.
        const auto check_turns = [&](const ints& v, int size, int half) {
            L::store(out, v);
            for (int i = 0; i < bytes; ++i) {
                const int in_lane = i % 16, from = i / 16 * 16 + 8 * half + in_lane / (2 * size) * size;
                REQUIRE(out[i] == (in_lane / size % 2 == 0 ? a : b)[from + in_lane % size]);
            }
        };
        ints two[2], four[4];
        L::interleave_bytes(of_a, of_b, two);
        const ints twice_a[2] = {of_a, of_a}, twice_b[2] = {of_b, of_b};
        L::interleave_words(twice_a, twice_b, four);
        for (int half = 0; half < 2; ++half) {
            check_turns(two[half], 1, half);
            check_turns(four[half], 2, half);
            check_turns(four[2 + half], 2, half);
        }
        // Small whole numbers, whose products and sums are exact.
        std::uint32_t x[2][L::width];
        float sums[L::width], wanted[L::width];
        for (int k = 0; k < L::width; ++k) {
            wanted[k] = sums[k] = static_cast<float>(f.random.between(-99, 99));
            float of[2][2];
            for (int i = 0; i < 2; ++i) {
                x[i][k] = 0;
                for (int n = 0; n < 2; ++n) {
                    of[i][n] = static_cast<float>(f.random.between(-99, 99));
                    x[i][k] |= kvq::detail::bit_cast<std::uint32_t>(of[i][n]) >> 16 << 16 * n;
                }
            }
            wanted[k] += of[0][0] * of[1][0] + of[0][1] * of[1][1];
        }
        const auto load = [](const std::uint32_t* p) {
            return L::load(reinterpret_cast<const std::byte*>(p));
        };
        L::store_floats(sums, L::dot_pairs(L::load_floats(sums), load(x[0]), load(x[1])));
        for (int k = 0; k < L::width; ++k) REQUIRE(sums[k] == wanted[k]);
    }
}

TEST_CASE_TEMPLATE("exp2_negative: relative error below 3e-7, exactly zero below -126", L, KVQ_TEST_LANES) {
    using io = lanes_of<L>;
    const auto exp2 = [](const typename io::numbers& x) {
        return io::out(kvq::kernels::exp2_negative<L>(io::in(x)));
    };
    double worst = 0;
    for (int i = 0; i < 1'260'000;) {
        typename io::numbers x(L::width);
        for (float& v : x) v = -static_cast<float>(i++) * 1e-4f;
        const auto y = exp2(x);
        for (std::size_t k = 0; k < x.size(); ++k) {
            const double exact = std::exp2(static_cast<double>(x[k]));
            if (x[k] > -126.0f)
                worst = std::fmax(worst, std::fabs(static_cast<double>(y[k]) - exact) / exact);
        }
    }
    CHECK(worst < 3e-7);
    for (const float x : {-126.0f, -127.0f, -1000.0f, -1e30f, -std::numeric_limits<float>::infinity()})
        CHECK(exp2(typename io::numbers(L::width, x))[0] == 0.0f);
    CHECK(exp2(typename io::numbers(L::width, 0.0f))[0] == 1.0f);
}

TEST_CASE_TEMPLATE("softmax_tile: rows side by side are rows one by one", L, KVQ_TEST_LANES) {
    fixture<L> f;
    for (int round = 0; round < 300; ++round) {
        const int n = f.random.between(1, 70), stride = n + f.random.between(0, 3);
        std::vector<float> scores(static_cast<std::size_t>(4 * stride));
        for (float& s : scores)
            s = f.random.one_in(9) ? -std::numeric_limits<float>::infinity() : 5.0f * f.random.normal();
        if (f.random.one_in(4))
            std::fill_n(scores.begin() + stride, n, -std::numeric_limits<float>::infinity());
        float max[4], sum[4], factor[4];
        for (int r = 0; r < 4; ++r) {
            max[r] = f.random.one_in(3) ? -std::numeric_limits<float>::infinity() : 5.0f * f.random.normal();
            sum[r] = std::isinf(max[r]) ? 0.0f : 1.0f + f.random.uniform();
        }
        auto one_by_one = scores;
        std::vector<float> expected;
        for (int r = 0; r < 4; ++r) {
            float state[3] = {max[r], sum[r], 0.0f};
            kvq::kernels::softmax_tile<L, 1>(one_by_one.data() + r * stride, 0, n, state, state + 1,
                                             state + 2);
            expected.insert(expected.end(), state, state + 3);
        }
        kvq::kernels::softmax_tile<L, 4>(scores.data(), stride, n, max, sum, factor);
        REQUIRE(scores == one_by_one);
        for (int r = 0; r < 4; ++r) {
            const float* const one = expected.data() + 3 * r;
            REQUIRE(max[r] == one[0]);
            REQUIRE(factor[r] == one[2]);
            // A compiler may fuse the last product and sum for one row, and not for four.
            REQUIRE(std::fabs(sum[r] - one[1]) <= 0x1p-22f * one[1]);
        }
    }
}

TEST_CASE_TEMPLATE("softmax_tile: a score of NaN or +infinity makes the sum of its row NaN, for good", L,
                   KVQ_TEST_LANES) {
    fixture<L> f;
    constexpr float infinity = std::numeric_limits<float>::infinity();
    const std::vector<float> hostile{NAN, -NAN, infinity};
    for (int round = 0; round < 300; ++round) {
        const int n = f.random.between(1, 70), stride = n + f.random.between(0, 3),
                  bad_row = f.random.between(0, 3);
        std::vector<float> scores(static_cast<std::size_t>(4 * stride));
        for (float& s : scores) s = f.random.one_in(9) ? -infinity : 5.0f * f.random.normal();
        float* const row = scores.data() + bad_row * stride;
        if (f.random.one_in(3)) std::fill_n(row, n, -infinity);
        for (int k = f.random.between(1, 3); k > 0; --k)
            row[f.random.between(0, n - 1)] = f.random.pick(hostile);
        float max[4], sum[4], factor[4];
        for (int r = 0; r < 4; ++r) {
            max[r] = f.random.one_in(3) ? -infinity : 5.0f * f.random.normal();
            sum[r] = std::isinf(max[r]) ? 0.0f : 1.0f;
        }
        kvq::kernels::softmax_tile<L, 4>(scores.data(), stride, n, max, sum, factor);
        for (int r = 0; r < 4; ++r) REQUIRE(std::isnan(sum[r]) == (r == bad_row));
        REQUIRE(std::all_of(row, row + n, [](float w) { return w == 0.0f; }));
        // Later tiles change nothing.
        for (float& s : scores) s = 5.0f * f.random.normal();
        kvq::kernels::softmax_tile<L, 4>(scores.data(), stride, n, max, sum, factor);
        for (int r = 0; r < 4; ++r) REQUIRE(std::isnan(sum[r]) == (r == bad_row));
    }
}

TEST_CASE_TEMPLATE("16- and 32-bit values load exactly, whole and in part", L, KVQ_TEST_LANES) {
    fixture<L> f;
    for (int round = 0; round < 100; ++round) {
        check_values<L, float>(f);
        check_values<L, kvq::float16>(f);
        check_values<L, kvq::bfloat16>(f);
    }
}

TEST_CASE_TEMPLATE("rows become columns, and extremes of vectors lanes", L, KVQ_TEST_LANES) {
    using io = lanes_of<L>;
    fixture<L> f;
    for (int round = 0; round < 50; ++round) {
        std::vector<typename io::numbers> rows;
        typename L::ints v[L::width];
        f.each([&](std::size_t i) {
            rows.push_back(f.numbers());
            v[i] = L::as_ints(io::in(rows[i]));
        });
        const auto least = io::out(L::template extreme_of_each<true>(v)),
                   most = io::out(L::template extreme_of_each<false>(v)),
                   sums = io::out(L::merge_lanes(v, [](auto a, auto b) { return L::add(a, b); }));
        L::transpose(v);
        f.each([&](std::size_t j) {
            const auto column = io::out(L::as_floats(L::in_register(v[j])));
            f.each([&](std::size_t i) { REQUIRE(column[i] == rows[i][j]); });
            REQUIRE(least[j] == *std::min_element(rows[j].begin(), rows[j].end()));
            REQUIRE(most[j] == *std::max_element(rows[j].begin(), rows[j].end()));
            double sum = 0.0, magnitude = 0.0;
            for (const float x : rows[j]) {
                sum += static_cast<double>(x);
                magnitude += std::fabs(static_cast<double>(x));
            }
            REQUIRE(std::fabs(static_cast<double>(sums[j]) - sum) <= L::width * 0x1p-24 * magnitude);
        });
    }
}

TEST_CASE_TEMPLATE("8-bit floats become floats", L, KVQ_TEST_LANES) {
    using io = lanes_of<L>;
    if constexpr (requires(const std::byte* p, typename L::floats(&v)[2]) { L::load_e4m3(p, v); })
        for (int first = 0; first < 256; first += 2 * L::width) {
            std::byte codes[2 * L::width];
            for (int i = 0; i < 2 * L::width; ++i) codes[i] = static_cast<std::byte>(first + i);
            typename L::floats v[2];
            L::load_e4m3(codes, v);
            for (int i = 0; i < 2 * L::width; ++i) {
                const auto code = static_cast<std::uint8_t>(first + i);
                const float wanted = (code & 127) == 127 ? 480.0f : std::fabs(kvq::e4m3::to_float(code)),
                            x = io::out(v[i % 2])[static_cast<std::size_t>(i / 2)];
                CHECK(std::fabs(x) * 256.0f == wanted);
                CHECK(std::signbit(x) == (code > 127));
            }
        }
}

TEST_CASE_TEMPLATE("codes are packed to bytes, a vector's part of each 128-bit lane", L, KVQ_TEST_LANES) {
    using io = lanes_of<L>;
    fixture<L> f;
    for (const bool is_signed : {false, true}) {
        typename io::words v[4];
        for (auto& w : v) {
            w = f.words();
            for (auto& x : w) x = (x & 255) - (is_signed ? 128 : 0);
        }
        const auto packed =
            is_signed ? L::template pack_bytes<true>(io::in(v[0]), io::in(v[1]), io::in(v[2]), io::in(v[3]))
                      : L::template pack_bytes<false>(io::in(v[0]), io::in(v[1]), io::in(v[2]), io::in(v[3]));
        const auto got = io::out(packed),
                   sums = io::out(L::add_bytes(packed, L::splat(static_cast<std::int32_t>(0x80ff0180u))));
        f.each([&](std::size_t i) {
            for (std::size_t k = 0; k < 4; ++k) {
                const auto byte = static_cast<std::uint32_t>(v[i % 4][i / 4 * 4 + k]) & 255u;
                REQUIRE((static_cast<std::uint32_t>(got[i]) >> (8 * k) & 255u) == byte);
                REQUIRE((static_cast<std::uint32_t>(sums[i]) >> (8 * k) & 255u) ==
                        ((byte + (0x80ff0180u >> (8 * k))) & 255u));
            }
        });
    }
}

TEST_CASE_TEMPLATE("16-bit values in the order of integers", L, KVQ_TEST_LANES) {
    using io = lanes_of<L>;
    fixture<L> f;
    const auto half = [](std::int32_t w, int i) { return static_cast<std::int16_t>(w >> (16 * i)); };
    for (int round = 0; round < 50; ++round) {
        const auto a = f.words(), b = f.words();
        const auto ordered = io::out(L::ordered_halves(io::in(a))),
                   back = io::out(L::ordered_halves(io::in(ordered))),
                   least = io::out(L::min_halves(io::in(a), io::in(b))),
                   most = io::out(L::max_halves(io::in(a), io::in(b)));
        f.each([&](std::size_t i) {
            REQUIRE(back[i] == a[i]);
            for (int k = 0; k < 2; ++k) {
                REQUIRE(half(least[i], k) == std::min(half(a[i], k), half(b[i], k)));
                REQUIRE(half(most[i], k) == std::max(half(a[i], k), half(b[i], k)));
                const auto raw = half(a[i], k);
                REQUIRE(half(ordered[i], k) == (raw < 0 ? static_cast<std::int16_t>(raw ^ 0x7fff) : raw));
            }
        });
    }
}

TEST_CASE_TEMPLATE("bytes and halfwords widen to words and come back", L, KVQ_TEST_LANES) {
    using io = lanes_of<L>;
    fixture<L> f;
    for (int round = 0; round < 50; ++round) {
        const auto a = f.words();
        const auto* const p = reinterpret_cast<const std::byte*>(a.data());
        const auto bytes = io::out(L::load_bytes(p)), halfwords = io::out(L::load_halfwords(p));
        std::vector<std::byte> stored(2 * L::width + 8, std::byte{0xcd});
        L::store_halfwords(stored.data(), L::load_halfwords(p));
        CHECK(std::equal(stored.begin(), stored.end() - 8, p));
        CHECK(std::count(stored.end() - 8, stored.end(), std::byte{0xcd}) == 8);
        f.each([&](std::size_t i) {
            REQUIRE(bytes[i] == std::to_integer<std::int32_t>(p[i]));
            REQUIRE(halfwords[i] == kvq::detail::load_as<std::uint16_t>(p + 2 * i));
        });
        if constexpr (requires { L::load_signed_bytes(p); }) {
            const auto integers = io::out(L::load_signed_bytes(p));
            f.each([&](std::size_t i) {
                REQUIRE(integers[i] == static_cast<std::int8_t>(std::to_integer<std::uint8_t>(p[i])));
            });
        }
    }
}

TEST_CASE_TEMPLATE("floats round to 16 bits: to nearest, down and up, the same as one at a time", L,
                   KVQ_TEST_LANES) {
    using io = lanes_of<L>;
    fixture<L> f;
    const auto check = [&]<class T>(T) {
        for (int round = 0; round < 300; ++round) {
            auto x = f.numbers(), hostile = x;
            for (float& v : hostile)
                if (f.random.one_in(2)) v = f.random.pick(test::hostile_values());
            const auto nearest = io::out(L::template half_bits<T>(io::in(hostile)));
            std::vector<std::byte> stored(sizeof(T) * L::width);
            L::template store_values<T>(stored.data(), io::in(hostile));
            for (float& v : x) {
                v = f.random.one_in(2) ? v : static_cast<float>(f.random.any_magnitude(-30, 15));
                v = std::clamp(v, -65504.0f, 65504.0f);  // what both types have
                if (f.random.one_in(10))
                    v = f.random.pick(std::vector<float>{0.0f, -0.0f, 65504.0f, -65504.0f, 0x1p-24f});
            }
            const auto down = io::out(L::template directed_bits<T, false>(io::in(x))),
                       up = io::out(L::template directed_bits<T, true>(io::in(x)));
            f.each([&](std::size_t i) {
                INFO(x[i], " and ", hostile[i]);
                REQUIRE((nearest[i] & 0xffff) == T(hostile[i]).bits);
                REQUIRE(kvq::detail::load_as<T>(stored.data() + i * sizeof(T)).bits == T(hostile[i]).bits);
                REQUIRE((down[i] & 0xffff) == kvq::detail::round_down<T>(x[i]).bits);
                REQUIRE((up[i] & 0xffff) == kvq::detail::round_up_to<T>(x[i]).bits);
            });
        }
    };
    check(kvq::float16{});
    check(kvq::bfloat16{});
}

}  // namespace lanes_tests
