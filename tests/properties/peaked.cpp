// SPDX-License-Identifier: MIT
// Comparison family: mixed-precision reduction. Attention in which few keys dominate, as attention of models
// does: what weights below half a step of fixed-point numbers lose adds up, and all pages lose in the same
// direction. Bounds: support/peaked.hpp.
//
// KVQ_LONG=1 runs every format with pages of 16 to 1024 tokens, all sizes of queries; 16384, 200 000 and a
// million tokens; pages of 65536.
#include <doctest/doctest.h>

#include "support/caches.hpp"
#include "support/library_formats.hpp"
#include "support/peaked.hpp"

namespace peaked_tests {

namespace {

struct format_pair {
    std::string name;
    kvq::format keys, values;
};

template <class Backend, class K, class V>
format_pair make_pair(const char* name) {
    return {name, test::made<Backend>(K()), test::made<Backend>(V())};
}
template <class Backend>
void add_pairs(std::vector<format_pair>& pairs) {
    pairs.push_back(make_pair<Backend, kvq::full<kvq::float16>, kvq::full<kvq::float16>>("fp16"));
    pairs.push_back(make_pair<Backend, kvq::int8, kvq::int8>("int8"));
    pairs.push_back(make_pair<Backend, kvq::affine<4>, kvq::affine<4>>("affine-4"));
    pairs.push_back(make_pair<Backend, kvq::affine<4, kvq::per_channel<>>, kvq::affine<4>>("kivi-4"));
    pairs.push_back(make_pair<Backend, kvq::std4::keys, kvq::std4::values>("std4"));
    pairs.push_back(make_pair<Backend, kvq::ref8::keys, kvq::ref8::values>("ref8"));
}
/// All built-in formats where the tests have those of kvq::library; some of the scalar backend.
std::vector<format_pair> all_pairs() {
    std::vector<format_pair> pairs;
    add_pairs<kvq::scalar>(pairs);
#if defined(KVQ_TEST_LIBRARY)
    for (const auto& k : test::detail::library_list())
        for (const auto& v : test::detail::library_list())
            if (k.keys && v.values && std::strcmp(k.name, v.name) == 0)
                pairs.push_back({k.name, k.make(k.group, nullptr, 0), v.make(v.group, nullptr, 0)});
#endif
    return pairs;
}

void check(const format_pair& pair, const test::peaked_case& of, test::generator& random) {
    const test::peaked_error error = test::measure_peaked(pair.keys, pair.values, of, random);
    INFO(pair.name, " on ", std::string(pair.keys.backend()), ": ", of.text());
    CHECK(error.output <= of.bound());
    CHECK(error.lse <= error.lse_bound());
}

/// One page, in which one key has the weight 1 and all others 1.4e-5; all values are 1. Returns the output
/// furthest from 1.
double furthest_from_one(const kvq::format& keys, const kvq::format& values, int page, int rows) {
    constexpr int dim = 64;
    kvq::cache cache({.layers = 1, .kv_heads = 1, .head_dim = dim},
                     {.keys = {keys}, .values = {values}, .page_tokens = page, .rollback = 0});
    auto sequence = cache.new_sequence();
    test::tensor<float> k(page, 1, dim), v(page, 1, dim), q(rows, 1, dim), out(rows, 1, dim);
    std::fill(v.values().begin(), v.values().end(), 1.0f);
    k.view().at(5, 0)[0] = 11.2f;
    for (int i = 0; i < rows; ++i) q.view().at(i, 0)[0] = 8.0f;
    sequence.append(0, k.view(), v.view());
    sequence.attend(0, q.view(), out.view(), kvq::bidirectional{});
    double furthest = 1.0;
    for (const float x : out.values())
        if (!(std::fabs(static_cast<double>(x) - 1.0) <= std::fabs(furthest - 1.0))) furthest = x;
    return furthest;
}

}  // namespace

TEST_CASE("one dominant key in every page: every format, any page size, decode and prompts") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const std::vector<format_pair> pairs = all_pairs();
    const std::vector<int> pages = {16, 32, 128, 256, 1024};
    const std::vector<float> scales = {1.0f, 3.0f, 10.0f};
    if (!test::long_tests()) {
        for (const format_pair& pair : pairs) {
            test::peaked_case of;
            of.page = random.pick(pages);
            of.tokens = random.between(1030, 1300);
            of.rows = random.one_in(2) ? 1 : random.between(4, 17);
            of.query_scale = random.pick(scales);
            of.outliers = random.one_in(2);
            check(pair, of, random);
        }
        return;
    }
    for (const format_pair& pair : pairs)
        for (const int page : pages) {
            for (const int rows : {1, 16})
                for (const float scale : scales)
                    for (const bool outliers : {false, true})
                        check(pair, {1100, page, rows, scale, outliers}, random);
            check(pair, {16384, page, random.one_in(2) ? 1 : 16, random.pick(scales), random.one_in(2)},
                  random);
        }
}

TEST_CASE("long contexts and long pages with one dominant key in every page") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    std::vector<format_pair> pairs;
    add_pairs<test::usual>(pairs);
    pairs.resize(4);  // encoders of presets take blocks of up to 1024 tokens
    if (!test::long_tests()) return check(pairs[random.bits() % pairs.size()], {9000, 4096}, random);
    for (const format_pair& pair : pairs)
        for (const int tokens : {200000, 1000000})
            for (const int page : {128, 65536})
                check(pair, {tokens, page, 1, random.one_in(2) ? 1.0f : 3.0f}, random);
}

TEST_CASE("values of 1 give 1, however small the weights beside the largest one are") {
    std::vector<format_pair> pairs;
    add_pairs<test::usual>(pairs);
    add_pairs<kvq::scalar>(pairs);
    for (const format_pair& pair : pairs)
        for (const int page : {128, 1024, 65536})
            for (const int rows : {1, 32}) {
                if (page > 1024 && (!test::long_tests() || pair.name == "std4" || pair.name == "ref8"))
                    continue;
                INFO(pair.name, " on ", std::string(pair.keys.backend()), ", a page of ", page, ", ", rows,
                     " query tokens");
                // Keys of 16 bits: every format has the same weights.
                const double value = furthest_from_one(pairs[0].keys, pair.values, page, rows);
                // Codes of one value of a group are exact to the rounding of its scale.
                CHECK(std::fabs(value - 1.0) <= 1e-4);
            }
}

}  // namespace peaked_tests
