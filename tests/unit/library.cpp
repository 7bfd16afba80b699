// SPDX-License-Identifier: MIT
// What is promised about names, versions and small types.
#include <doctest/doctest.h>

#include <cstring>
#include <kvq/kvq.hpp>
#include <string>

#include "support/scheme_list.hpp"

TEST_CASE("the inline namespace is the version's") {
    const std::string expected =
        "v" + std::to_string(KVQ_VERSION_MAJOR) + "_" + std::to_string(KVQ_VERSION_MINOR);
    CHECK(expected == "v0_3");
    static_assert(std::is_same_v<kvq::format, kvq::v0_3::format>);
    static_assert(std::is_same_v<kvq::int8, kvq::KVQ_TAGGED::int8>);
}

TEST_CASE("schemes have names that say what they are") {
    CHECK(kvq::int8{}.name() == "int8-token-fp32");
    CHECK(kvq::affine<4>{}.name() == "affine4-token-g64-fp16");
    CHECK(kvq::kivi<2>::keys{}.name() == "affine2-channel-g32-fp16");
    CHECK(kvq::full<kvq::bfloat16>{}.name() == "bf16");
    CHECK(test::odd_values{}.name() == "affine5-token-g5-float24");
}

TEST_CASE("bits per number, parameters included") {
    static_assert(kvq::bits_per_value<kvq::affine<4>>({kvq::tensor::key, 64, 128}) == 4.5);
    static_assert(kvq::bits_per_value<kvq::kivi<2>::keys>({kvq::tensor::key, 64, 128}) == 3.0);
    static_assert(kvq::bits_per_value<kvq::int8>({kvq::tensor::value, 64, 128}) == 8.25);
    static_assert(kvq::bits_per_value<kvq::full<kvq::float16>>({kvq::tensor::key, 64, 128}) == 16.0);
    static_assert(kvq::bits_per_value<kvq::full<float>>({kvq::tensor::value, 64, 128}) == 32.0);
}

TEST_CASE("concepts say which schemes attention runs on codes of") {
    static_assert(kvq::foldable<kvq::int8> && !kvq::transforming<kvq::int8> &&
                  !kvq::full_precision<kvq::int8>);
    static_assert(kvq::full_precision<kvq::full<kvq::float16>> && !kvq::foldable<kvq::full<kvq::float16>>);
    static_assert(kvq::transforming<test::rotated> && kvq::foldable<test::rotated>);
    static_assert(!kvq::kv_scheme<int> && !kvq::kv_scheme<std::string>);
    struct keys_only : kvq::affine<4> {
        static constexpr bool supports(kvq::tensor role) { return role == kvq::tensor::key; }
    };
    static_assert(kvq::key_scheme<keys_only> && !kvq::value_scheme<keys_only>);
    static_assert(!kvq::granularity<kvq::asymmetric> && !kvq::parameter_type<std::string>);
}

TEST_CASE("fold: row parameters where they remain, column parameters where they are summed") {
    using kvq::tensor;
    constexpr auto keys_by_token = kvq::affine<4, kvq::per_token<32>>::fold(tensor::key);
    static_assert(keys_by_token.row_scale && keys_by_token.row_bias && !keys_by_token.columns());
    constexpr auto values_by_token = kvq::affine<4, kvq::per_token<32>>::fold(tensor::value);
    static_assert(values_by_token.col_scale && values_by_token.col_bias && !values_by_token.row_scale);
    constexpr auto keys_by_channel = kvq::affine<4, kvq::per_channel<32>>::fold(tensor::key);
    static_assert(keys_by_channel.col_scale && !keys_by_channel.row_scale);
    constexpr auto symmetric_keys = kvq::int8::fold(tensor::key);
    static_assert(symmetric_keys.row_scale && !symmetric_keys.row_bias);
}

TEST_CASE("page geometry: sinks, whole pages behind the recent window, when each is quantized") {
    constexpr kvq::page_geometry g{.sinks = 4, .recent = 10, .page_tokens = 16};
    static_assert(g.pages(0) == 0 && g.pages(4) == 0 && g.pages(5) == 1 && g.pages(20) == 1 &&
                  g.pages(21) == 2);
    for (int n = 0; n < 300; ++n) {
        const int committed = g.committed(n);
        CHECK((committed == 0 || g.commit_at(committed - 1) <= n));
        CHECK(g.commit_at(committed) > n);
        CHECK(g.first_token(committed) + g.recent <= std::max(n, g.sinks + g.recent));
    }
}

TEST_CASE("page references count") {
    kvq::page_pool pool(std::pmr::get_default_resource());
    {
        kvq::page_ref a = pool.allocate(100, 3, 16);
        CHECK(pool.bytes_in_use() == 164);
        CHECK(pool.pages_in_use() == 1);
        CHECK(a->format == 3);
        CHECK(reinterpret_cast<std::uintptr_t>(a->data()) % 64 == 0);
        CHECK(!a.shared());
        kvq::page_ref b = a, c;
        CHECK(a.shared());
        c = b;
        b = std::move(c);
        CHECK(!c);
        CHECK(b.get() == a.get());
        a = kvq::page_ref{};
        CHECK(!b.shared());
        CHECK(pool.pages_in_use() == 1);
    }
    CHECK(pool.bytes_in_use() == 0);
    CHECK(pool.pages_in_use() == 0);
}

TEST_CASE("a workspace grows, never shrinks, and is aligned") {
    kvq::workspace space;
    CHECK(space.size() == 0);
    std::byte* const first = space.reserve(100);
    CHECK(reinterpret_cast<std::uintptr_t>(first) % 64 == 0);
    CHECK(space.reserve(50) == first);
    CHECK(space.size() >= 100);
    std::memset(space.reserve(10000), 1, 10000);
    kvq::workspace moved(std::move(space));
    CHECK(moved.size() >= 10000);
}
