// SPDX-License-Identifier: MIT
// Comparison family: exact. The layout of codes and values inside a block.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <kvq/pack/bit_pack.hpp>
#include <kvq/pack/value_layout.hpp>
#include <kvq/schemes/affine.hpp>
#include <kvq/schemes/full.hpp>
#include <kvq/schemes/int8.hpp>
#include <vector>

#include "support/random.hpp"

using kvq::code_layout;
using kvq::grouped_axis;

namespace packing_tests {

namespace {

template <int B>
struct width {
    static constexpr int bits = B;
};
#define KVQ_TEST_WIDTHS width<1>, width<2>, width<3>, width<4>, width<5>, width<6>, width<7>, width<8>

grouped_axis random_axis(test::generator& random) {
    const int size = random.between(1, 150);
    const int group = random.one_in(3) ? size : random.between(1, size);
    return {size, group};
}

/// Blocks cut at most one axis into groups, as granularities do.
template <int Bits>
code_layout<Bits> random_layout(test::generator& random) {
    const grouped_axis cut = random_axis(random), other = random_axis(random);
    const grouped_axis whole(other.size, other.size);
    return random.one_in(2) ? code_layout<Bits>(cut, whole) : code_layout<Bits>(whole, cut);
}

}  // namespace

TEST_CASE_TEMPLATE("unpack(pack(codes)) = codes", W, KVQ_TEST_WIDTHS) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 40; ++round) {
        const auto layout = random_layout<W::bits>(random);
        const int rows = layout.rows().size, cols = layout.cols.size;
        INFO(rows, " rows in groups of ", layout.rows().group, ", ", cols, " columns in groups of ",
             layout.cols.group);
        // Guard bytes behind the block show writes out of bounds.
        std::vector<std::byte> block(layout.bytes() + 64);
        std::vector<unsigned> codes;
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < cols; ++c) {
                codes.push_back(static_cast<unsigned>(random.between(0, (1 << W::bits) - 1)));
                kvq::pack_code(layout, block.data(), r, c, codes.back());
            }
        int wrong = 0;
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < cols; ++c)
                wrong += kvq::unpack_code(layout, block.data(), r, c) !=
                         codes[static_cast<std::size_t>(r) * static_cast<std::size_t>(cols) +
                               static_cast<std::size_t>(c)];
        CHECK(wrong == 0);
        for (std::size_t i = layout.bytes(); i < block.size(); ++i) CHECK(block[i] == std::byte{0});
    }
}

TEST_CASE_TEMPLATE("every code has bits of its own, and together they fill the block up to its padding", W,
                   KVQ_TEST_WIDTHS) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 30; ++round) {
        const auto layout = random_layout<W::bits>(random);
        std::vector<std::byte> block(layout.bytes());
        std::size_t set_bits = 0;
        for (int r = 0; r < layout.rows().size; ++r)
            for (int c = 0; c < layout.cols.size; ++c)
                kvq::pack_code(layout, block.data(), r, c, (1u << W::bits) - 1u);
        for (const std::byte b : block)
            set_bits += static_cast<std::size_t>(__builtin_popcount(static_cast<unsigned>(b)));
        CHECK(set_bits == static_cast<std::size_t>(layout.rows().size) *
                              static_cast<std::size_t>(layout.cols.size) * W::bits);
    }
}

TEST_CASE_TEMPLATE("whole groups leave no byte unused", W, KVQ_TEST_WIDTHS) {
    // 32 columns fill whole words of every plane, 4 rows a slot group.
    for (const int group : {32, 64}) {
        const code_layout<W::bits> layout({64, 64}, {128, group});
        CHECK(layout.bytes() == 64 * 128 * W::bits / 8);
    }
    const code_layout<W::bits> cut_rows({64, 32}, {96, 96});
    CHECK(cut_rows.bytes() == 64 * 96 * W::bits / 8);
}

TEST_CASE("bytes of published shapes") {
    constexpr kvq::block_shape keys{kvq::tensor::key, 64, 128}, values{kvq::tensor::value, 64, 128};
    for (const auto& shape : {keys, values}) {
        CHECK(kvq::affine<4>{}.block_bytes(shape) == 64 * 72);
        CHECK(kvq::affine<8>{}.block_bytes(shape) == 64 * 136);
        CHECK(kvq::affine<2>{}.block_bytes(shape) == 64 * 40);
        CHECK(kvq::affine<3>{}.block_bytes(shape) == 64 * 56);
        CHECK(kvq::affine<5>{}.block_bytes(shape) == 64 * 88);
        CHECK(kvq::affine<6>{}.block_bytes(shape) == 64 * 104);
        CHECK(kvq::int8{}.block_bytes(shape) == 64 * 132);
        CHECK(kvq::full<kvq::float16>{}.block_bytes(shape) == 64 * 256);
        CHECK(kvq::full<float>{}.block_bytes(shape) == 64 * 512);
        // KIVI with groups of 32 tokens: two fp16 parameters per 32 numbers.
        CHECK(kvq::affine<2, kvq::per_channel<32>>{}.block_bytes(shape) == 64 * 128 / 4 + 64 * 128 / 32 * 4);
    }
}

TEST_CASE("planes of a width: powers of two, widest first, lowest bits first") {
    using seven = kvq::code_planes<7>;
    static_assert(seven::count == 3 && seven::width(0) == 4 && seven::width(1) == 2 && seven::width(2) == 1);
    static_assert(seven::shift(0) == 0 && seven::shift(1) == 4 && seven::shift(2) == 6);
    static_assert(kvq::code_planes<8>::count == 1 && kvq::code_planes<8>::quads_per_step == 1);
    static_assert(kvq::code_planes<3>::quads_per_step == 8 && kvq::code_planes<6>::quads_per_step == 4);
    CHECK(seven::vectors(8) == 4 + 2 + 1);
}

TEST_CASE("packing is constexpr") {
    constexpr auto recovered = [] {
        const code_layout<3> layout({5, 5}, {9, 3});
        std::array<unsigned char, 4096> block{};
        for (int r = 0; r < 5; ++r)
            for (int c = 0; c < 9; ++c)
                kvq::pack_code(layout, block.data(), r, c, static_cast<unsigned>((r * 9 + c) % 8));
        for (int r = 0; r < 5; ++r)
            for (int c = 0; c < 9; ++c)
                if (kvq::unpack_code(layout, block.data(), r, c) != static_cast<unsigned>((r * 9 + c) % 8))
                    return false;
        return layout.bytes() <= block.size();
    }();
    static_assert(recovered);
}

TEST_CASE("grouped axis: groups start on multiples of 4 slots, indices map to distinct slots in order") {
    for (int size = 1; size <= 70; ++size)
        for (int group = 1; group <= size; ++group) {
            const grouped_axis axis{size, group};
            int previous = -1, total = 0;
            for (int i = 0; i < size; ++i) {
                const int slot = axis.slot(i);
                REQUIRE(slot > previous);
                if (i % group == 0) REQUIRE((slot % 4 == 0 && slot == axis.group_begin(i / group)));
                previous = slot;
            }
            REQUIRE(previous < axis.padded_size());
            REQUIRE(axis.padded_size() % 4 == 0);
            for (int g = 0; g < axis.groups(); ++g) total += axis.group_size(g);
            REQUIRE(total == size);
        }
}

TEST_CASE_TEMPLATE("value layout: every element has a place of its own inside the block", T, float,
                   kvq::float16) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 30; ++round) {
        const kvq::block_shape shape{random.one_in(2) ? kvq::tensor::key : kvq::tensor::value,
                                     random.between(1, 70), random.between(1, 70)};
        const kvq::value_layout<T> layout(shape);
        std::vector<int> seen(layout.bytes() / sizeof(T));
        for (int r = 0; r < shape.rows(); ++r)
            for (int c = 0; c < shape.cols(); ++c) ++seen.at(layout.element(r, c));
        CHECK(std::count(seen.begin(), seen.end(), 1) == static_cast<std::ptrdiff_t>(shape.values()));
    }
}

}  // namespace packing_tests
