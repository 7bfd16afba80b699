// SPDX-License-Identifier: MIT
// Comparison family: exact. Products in tiles give the bits of products in registers, on every CPU: the
// instructions are emulated, with the registers that an architecture of tiles has. (Where the CPU has them,
// all tests of attention run on them too.)
#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <kvq/cpu/simd.hpp>
#include <kvq/kvq.hpp>
#include <utility>

#include "support/channel_plans.hpp"

namespace tiles_tests {

namespace {

/// What arch::amx_tiles does, in plain C++. Whoever uses registers outside of a session, or rows that they do
/// not have, fails.
struct emulated_tiles {
    static inline bool wanted = true;  ///< does the operating system allow them?
    static inline bool open = false;
    static inline int rows[8] = {};
    static inline std::uint32_t words[8][16][16] = {};
    static inline int products = 0;

    static bool ready() noexcept { return wanted; }
    struct shapes {
        int rows[8] = {};
    };
    static shapes begin(int first_rows, int second_rows) {
        REQUIRE_FALSE(open);
        shapes before;
        std::memcpy(before.rows, rows, sizeof rows);
        for (const int n : {first_rows, second_rows}) REQUIRE((n >= 1 && n <= 16));
        open = true;
        const int of[8] = {first_rows, first_rows, second_rows, second_rows, first_rows, second_rows, 16, 16};
        std::memcpy(rows, of, sizeof rows);
        std::memset(words, 0, sizeof words);
        return before;
    }
    static void end(const shapes& before) noexcept {
        open = false;
        std::memcpy(rows, before.rows, sizeof rows);
    }
    template <int Tile>
    static void zero() {
        REQUIRE(open);
        std::memset(words[Tile], 0, sizeof words[Tile]);
    }
    template <int Tile>
    static void load(const std::byte* from, std::ptrdiff_t stride) {
        REQUIRE(open);
        zero<Tile>();
        for (int r = 0; r < rows[Tile]; ++r) std::memcpy(words[Tile][r], from + r * stride, 64);
    }
    template <int Tile>
    static void store(std::byte* to, std::ptrdiff_t stride) {
        REQUIRE(open);
        for (int r = 0; r < rows[Tile]; ++r) std::memcpy(to + r * stride, words[Tile][r], 64);
    }
    template <int C, int A, int B>
    static void multiply() {
        REQUIRE(open);
        REQUIRE(rows[C] == rows[A]);
        ++products;
        for (int i = 0; i < rows[C]; ++i)
            for (int r = 0; r < 16; ++r)
                for (int k = 0; k < 16; ++k) {
                    std::int8_t a[4];
                    std::uint8_t b[4];
                    std::memcpy(a, &words[A][i][k], 4);
                    std::memcpy(b, &words[B][k][r], 4);
                    for (int j = 0; j < 4; ++j) words[C][i][r] += static_cast<std::uint32_t>(a[j] * b[j]);
                }
    }
    template <int C, int A, int B>
    static void multiply_floats() {
        REQUIRE(open);
        REQUIRE(rows[C] == rows[A]);
        ++products;
        for (int i = 0; i < rows[C]; ++i)
            for (int r = 0; r < 16; ++r) {
                float sum = of_bits(words[C][i][r]);
                for (int k = 0; k < 16; ++k) {
                    const std::uint32_t a = words[A][i][k], b = words[B][k][r];
                    sum += of_bits(a << 16) * of_bits(b << 16);
                    sum += of_bits(a & 0xffff0000u) * of_bits(b & 0xffff0000u);
                }
                std::memcpy(&words[C][i][r], &sum, 4);
            }
    }
    static float of_bits(std::uint32_t bits) {
        float f;
        std::memcpy(&f, &bits, 4);
        return f;
    }
};

/// The registers of this build's CPU, and tiles.
struct tiled : kvq::arch::best {
    using tiles = emulated_tiles;
};

template <class Scheme>
Scheme make(test::generator& random, const kvq::block_shape& shape) {
    if constexpr (std::constructible_from<Scheme, const kvq::calibration&>)
        return test::with_random_plan<Scheme>(random, {1, 1, shape.dim});
    else
        return Scheme{};
}

/// y of n vectors, in tiles or in registers; also what y held before, where it is added to. keys: the shape
/// of the block.
template <class Backend, class Product, class Scheme>
std::vector<float> product(bool in_tiles, const Scheme& scheme, const kvq::block_shape& keys,
                           const kvq::block_shape& shape, int n, const std::vector<std::byte>& block,
                           const std::vector<float>& x, int x_stride, bool add) {
    emulated_tiles::wanted = in_tiles;
    const kvq::block_id id{0, 0};
    const int rows = shape.rows();
    std::vector<float> y(static_cast<std::size_t>(n * (rows + 16)), 0.5f);
    const Product product(kvq::kernels::product_blocks_of<Backend>(scheme, keys, id), shape, n);
    // A product may not count on what its workspace holds.
    std::vector<float> space(product.workspace_bytes() / sizeof(float) + 16, in_tiles ? 1e30f : -7.0f);
    auto* const aligned =
        reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(space.data()) + 63) / 64 * 64);
    const kvq::kernels::tile_session<typename Backend::lanes, Backend> tiles(n);
    product.begin(shape, id, block.data(), x.data(), x_stride, aligned);
    product.finish(shape, id, block.data(), x.data(), x_stride, rows, shape.cols(), y.data(), rows + 16, add,
                   0, aligned);
    for (int i = 0; i < n; ++i) y[static_cast<std::size_t>(i * (rows + 16) + rows)] = 0.0f;
    return y;
}

/// Product: of `shape` in blocks of `keys`.
template <int QueryBytes, class Product, class Scheme>
void check(test::generator& random, const Scheme& scheme, const kvq::block_shape& keys,
           const kvq::block_shape& shape, int n) {
    using backend = kvq::simd<tiled, kvq::query_bytes<QueryBytes>>;
    INFO(scheme.name(), ", ", shape.role == kvq::tensor::key ? "keys" : "values", " of ", shape.tokens, " x ",
         shape.dim, " in ", keys.dim, " channels, ", n, " vectors in ", QueryBytes, " piece(s)");
    std::vector<float> values(keys.values());
    for (float& f : values) f = random.normal();
    std::vector<std::byte> block(scheme.block_bytes(keys) + 64);
    scheme.quantize(keys, {0, 0}, values.data(), block.data());
    const int x_stride = shape.cols() + 16;
    std::vector<float> x(static_cast<std::size_t>(n * x_stride));
    for (float& f : x) f = random.normal();
    const bool add = random.one_in(2);

    const int before = emulated_tiles::products;
    const auto expected = product<backend, Product>(false, scheme, keys, shape, n, block, x, x_stride, add);
    CHECK(emulated_tiles::products == before);
    const auto actual = product<backend, Product>(true, scheme, keys, shape, n, block, x, x_stride, add);
    CHECK((emulated_tiles::products > before) == (n * QueryBytes > 8));
    const int rows = shape.rows();
    for (int i = 0; i < n; ++i)
        for (int r = 0; r < rows; ++r) {
            const auto at = static_cast<std::size_t>(i * (rows + 16) + r);
            CAPTURE(i);
            CAPTURE(r);
            if constexpr (QueryBytes == 1 || !backend::lanes::word_products) {
                REQUIRE(actual[at] == expected[at]);
            } else {
                // Registers take words of 16 bits there, which two bytes come close to.
                REQUIRE(std::fabs(actual[at] - expected[at]) <= 2e-3f * (1.0f + std::fabs(expected[at])));
            }
        }
}

using mixed = kvq::mixed_affine<kvq::code_widths<6, 4, 3, 0>, kvq::average_eighths<26>, kvq::per_channel<64>>;

/// Codes that stand for entries of a table.
struct with_entries : kvq::affine<4, kvq::per_token<32>> {
    using attends_as = with_entries;
    static constexpr std::array<std::uint8_t, 16> code_entries{7,  0, 127, 13, 1, 2, 99, 100,
                                                               64, 3, 126, 9,  8, 6, 4,  120};
};

#if defined(__x86_64__)
/// As much of arch::amx as needs no flags of the compiler.
struct amx_lanes {
    using architecture = kvq::arch::amx;
};
struct amx_backend {
    static constexpr int query_bytes = 2;
};
#endif

}  // namespace

/// Of QueryBytes per value, `fewest` to `most` vectors: one query block of a tile, two, and many.
template <class Scheme, int QueryBytes>
void check_shapes(int fewest, int most) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 12; ++round) {
        // Whole tiles and odd ends, in rows and in columns.
        constexpr int sizes[] = {160, 128, 96, 64, 36, 31, 4, 1};
        const bool keys = random.one_in(2) || !kvq::value_scheme<Scheme>;
        const kvq::block_shape shape{keys ? kvq::tensor::key : kvq::tensor::value, random.pick(sizes),
                                     random.pick(sizes)};
        const Scheme scheme = make<Scheme>(random, shape);
        check<QueryBytes,
              kvq::kernels::block_product<kvq::simd<tiled, kvq::query_bytes<QueryBytes>>, Scheme>>(
            random, scheme, shape, shape,
            round % 4 < 3 ? random.between(fewest, most) : random.between(17, 128));
    }
}

// Tiles take the codes as registers do, whatever the scheme, and the bytes of values as further rows. So
// every width, level and direction of parameters comes once, in one or two bytes, and channels of mixed
// widths in both.
TEST_CASE_TEMPLATE("products in tiles, two bytes per value: the bits of products in registers", Scheme,
                   kvq::affine<3, kvq::per_channel<7>>, kvq::affine<4, kvq::per_token<32>>,
                   kvq::affine<8, kvq::per_token<64>>, kvq::int8, with_entries, mixed) {
    check_shapes<Scheme, 2>(4, 17);
}
TEST_CASE_TEMPLATE("products in tiles, one byte per value: the bits of products in registers", Scheme,
                   kvq::affine<1, kvq::per_token<0>>, kvq::affine<2, kvq::per_token<40>>,
                   kvq::affine<5, kvq::per_channel<0>>, mixed) {
    check_shapes<Scheme, 1>(8, 16);
}

// Their codes are turned, and those of whole steps are not copied.
TEST_CASE_TEMPLATE("values of latents in tiles: the bits of products in registers", Scheme,
                   kvq::affine<4, kvq::per_channel<64>>, kvq::affine<3, kvq::per_token<64>>) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 12; ++round) {
        constexpr int sizes[] = {128, 96, 64, 36, 4};
        const kvq::block_shape keys{kvq::tensor::key, random.pick(sizes), random.pick(sizes)},
            values{kvq::tensor::value, keys.tokens, round % 2 == 0 ? keys.dim : random.between(1, keys.dim)};
        check<2, kvq::kernels::turned_block_product<kvq::simd<tiled>, false, Scheme::code_bits>>(
            random, Scheme{}, keys, values, random.between(4, 128));
    }
}

/// A block of 16-bit values, some of its rows and columns, times n vectors: y + X x, and what it may be off
/// by.
template <class T, int QueryBytes>
void check_values(test::generator& random) {
    using backend = kvq::simd<tiled, kvq::query_bytes<QueryBytes>>;
    constexpr int sizes[] = {160, 100, 64, 33, 32, 7};
    const bool keys = random.one_in(2);
    const kvq::block_shape shape{keys ? kvq::tensor::key : kvq::tensor::value, random.pick(sizes),
                                 random.pick(sizes)};
    const int tokens = random.between(1, shape.tokens), n = random.between(16, 70),
              rows = keys ? tokens : shape.dim, cols = keys ? shape.dim : tokens, x_stride = cols + 16,
              y_stride = rows + 16;
    INFO(QueryBytes, " piece(s), ", keys ? "keys" : "values", " of ", shape.tokens, " x ", shape.dim, ", ",
         tokens, " tokens, ", n, " vectors");
    const kvq::full<T> scheme;
    const kvq::value_layout<T> layout(shape);
    std::vector<std::byte> block(scheme.block_bytes(shape) + 64);
    std::vector<float> x(static_cast<std::size_t>(n * x_stride)),
        y(static_cast<std::size_t>(n * y_stride), 0.5f);
    for (float& f : x) f = random.normal();
    const auto value = [&](int r, int c) {
        return reinterpret_cast<T*>(block.data()) + layout.element(r, c);
    };
    for (int r = 0; r < shape.rows(); ++r)
        for (int c = 0; c < shape.cols(); ++c)
            *value(r, c) = T(r < rows && c < cols ? random.normal() : std::nanf(""));
    // A value that is not finite makes its row so, and no other.
    const int bad_row = random.one_in(2) ? random.between(0, rows - 1) : -1;
    if (bad_row >= 0) *value(bad_row, random.between(0, cols - 1)) = T(INFINITY);
    const bool add = random.one_in(2);

    emulated_tiles::wanted = true;
    const int before = emulated_tiles::products;
    const kvq::kernels::block_product<backend, kvq::full<T>> product(
        kvq::kernels::product_blocks_of<backend>(scheme, shape, {}), shape, n);
    std::vector<float> space(product.workspace_bytes() / sizeof(float) + 16, std::nanf(""));
    auto* const aligned =
        reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(space.data()) + 63) / 64 * 64);
    {
        const kvq::kernels::tile_session<typename backend::lanes, backend> tiles(n);
        product.begin(shape, {}, block.data(), x.data(), x_stride, aligned);
        product.finish(shape, {}, block.data(), x.data(), x_stride, rows, cols, y.data(), y_stride, add, 0,
                       aligned);
    }
    CHECK((emulated_tiles::products > before) == (bad_row < 0 || rows > 32));
    for (int i = 0; i < n; ++i) {
        for (int r = 0; r < rows; ++r) {
            double exact = add ? 0.5 : 0.0, terms = exact;
            for (int c = 0; c < cols; ++c) {
                const double term = static_cast<double>(static_cast<float>(*value(r, c))) *
                                    static_cast<double>(x[static_cast<std::size_t>(i * x_stride + c)]);
                exact += term;
                terms += std::fabs(term);
            }
            const double got = static_cast<double>(y[static_cast<std::size_t>(i * y_stride + r)]);
            CAPTURE(i);
            CAPTURE(r);
            if (r == bad_row)
                REQUIRE_FALSE(std::isfinite(got));
            else
                REQUIRE(std::fabs(got - exact) <= terms * (QueryBytes == 1 ? 0x1p-8 : 0x1p-14));
        }
        for (int r = rows; r < y_stride; ++r) REQUIRE(y[static_cast<std::size_t>(i * y_stride + r)] == 0.5f);
    }
}

TEST_CASE_TEMPLATE("16-bit values in tiles of bfloat16, against double arithmetic", T, kvq::float16,
                   kvq::bfloat16) {
    INFO("KVQ_SEED=", test::seed());
    test::generator random(test::seed());
    for (int round = 0; round < 16; ++round) {
        check_values<T, 2>(random);
        check_values<T, 1>(random);
    }
}

#if defined(__x86_64__)
TEST_CASE("a session gives the thread's registers back the shapes that they had") {
    using tiles = kvq::arch::amx_tiles;
    if (!kvq::arch::amx::available()) return;
    const tiles::shapes original = tiles::begin(3, 5);
    {
        const kvq::kernels::tile_session<amx_lanes, amx_backend> session(8);
        const tiles::shapes inside = tiles::begin(3, 5);
        CHECK(inside.rows[0] == 16);
        tiles::end(inside);
    }
    const tiles::shapes after = tiles::begin(1, 1);
    tiles::end(original);
    CHECK(after.palette == 1);
    for (const auto& [tile, rows] : {std::pair{0, 3}, {2, 5}, {6, 16}}) CHECK(after.rows[tile] == rows);
}
#endif

}  // namespace tiles_tests
