// SPDX-License-Identifier: MIT
// Comparison family: exact against channels of one width, half a step elsewhere.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <kvq/io/scheme_identity.hpp>
#include <kvq/kvq.hpp>
#include <kvq/schemes/affine.hpp>
#include <utility>

#include "support/channel_plans.hpp"
#include "support/typed_cache.hpp"

namespace mixed_width_tests {

namespace {

kvq::block_shape key_shape(test::generator& random) {
    auto shape = test::random_shape(random, 140);
    shape.role = kvq::tensor::key;
    return shape;
}

}  // namespace

TEST_CASE("without a plan and with an average that is one of the widths, channels are those of one width") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::mixed_affine<kvq::code_widths<4, 2, 0>, kvq::average_eighths<16>, kvq::per_channel<64>> mixed;
    const kvq::affine<2, kvq::per_channel<64>, kvq::byte_params, kvq::min_max> plain;
    const kvq::mixed_affine<kvq::code_widths<6, 4, 2, 0>, kvq::average_eighths<32>, kvq::per_channel<7>>
        mixed4;
    const kvq::affine<4, kvq::per_channel<7>, kvq::byte_params, kvq::min_max> plain4;
    for (int round = 0; round < 40; ++round) {
        const auto shape = key_shape(random);
        INFO(shape);
        const auto x = test::hostile_block(random, shape);
        CHECK(test::quantized(mixed, shape, x) == test::quantized(plain, shape, x));
        CHECK(test::dequantized(mixed, shape, test::quantized(mixed, shape, x)) ==
              test::dequantized(plain, shape, test::quantized(plain, shape, x)));
        CHECK(test::quantized(mixed4, shape, x) == test::quantized(plain4, shape, x));
    }
}

TEST_CASE_TEMPLATE(
    "any plan: every byte written, the same size for all, half a step of the channel's own width", S,
    kvq::mixed_affine<kvq::code_widths<4, 2, 0>, kvq::average_eighths<16>, kvq::per_channel<64>,
                      kvq::byte_params, kvq::enclosing>,
    kvq::mixed_affine<kvq::code_widths<8, 4, 3, 0>, kvq::average_eighths<26>, kvq::per_channel<7>,
                      kvq::byte_params, kvq::enclosing>,
    kvq::mixed_affine<kvq::code_widths<5, 1>, kvq::average_eighths<17>, kvq::per_channel<>, kvq::byte_params,
                      kvq::enclosing>) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 40; ++round) {
        const auto shape = key_shape(random);
        const S scheme = test::with_random_plan<S>(random, {2, 3, shape.dim});
        const kvq::block_id id{random.between(0, 1), random.between(0, 2)};
        INFO(scheme.name(), " ", shape);
        CHECK(scheme.block_bytes(shape) == S{}.block_bytes(shape));
        const auto x = test::hostile_block(random, shape);
        std::uint32_t not_finite = 0;
        const auto block = test::quantized(scheme, shape, x, &not_finite, id);
        CHECK(not_finite == std::count_if(x.begin(), x.end(), [](float v) { return !std::isfinite(v); }));
        auto scratch = x;
        std::vector<std::byte> two(block.size() + 64, std::byte{0x32});
        scheme.quantize(shape, id, scratch.data(), two.data());
        CHECK(std::equal(block.begin(), block.end(), two.begin()));
        CHECK(std::count(two.end() - 64, two.end(), std::byte{0x32}) == 64);

        const auto y = test::dequantized(scheme, shape, block, id);
        int wrong = 0, held = 0;
        scheme.for_each_segment(shape, id, [&]<int Bits>(const kvq::code_segment& segment) {
            held += segment.columns;
            std::vector<float> order(static_cast<std::size_t>(shape.dim));
            for (int c = 0; c < shape.dim; ++c) order[static_cast<std::size_t>(c)] = static_cast<float>(c);
            scheme.transform_query(shape, id, order.data());
            const auto columns = scheme.columns(shape);
            const auto rows = columns.codes(shape).rows();
            std::vector<float> scales(static_cast<std::size_t>(shape.dim) + 4), biases(scales.size());
            for (int g = 0; g < rows.groups(); ++g) {
                columns.template load<kvq::detail::plain_loads>(block.data(), g, scales.data(),
                                                                biases.data());
                for (int c = 0; c < segment.columns; ++c) {
                    const auto place = static_cast<std::size_t>(segment.first + c);
                    const auto channel = static_cast<std::size_t>(order[place]);
                    double mean = 0, n = 0, size = 0;
                    for (int t = g * rows.group; t < g * rows.group + rows.group_size(g); ++t) {
                        const auto i = static_cast<std::size_t>(t * shape.dim) + channel;
                        if (!std::isfinite(x[i])) continue;
                        const double in = std::clamp(static_cast<double>(x[i]), -0x1p100, 0x1p100);
                        mean += in;
                        ++n;
                        size = std::fmax(size, std::fabs(in));
                        const double slack =
                            0x1p-22 * (size + std::fabs(static_cast<double>(biases[place]))) + 0x1p-120;
                        if constexpr (Bits > 0)
                            wrong += !(std::fabs(in - static_cast<double>(y[i])) <=
                                       static_cast<double>(scales[place]) / 2 + slack);
                        else
                            wrong += y[i] != biases[place];
                    }
                    if (Bits == 0 && n > 0) {
                        // enclosing: biases are rounded down, by less than a step; the line spans all biases
                        // of the group.
                        mean /= n;
                        const auto bias = static_cast<double>(biases[place]);
                        wrong += !(bias <= mean + 0x1p-22 * size + 0x1p-120);
                    }
                }
            }
        });
        CHECK(held == shape.dim);
        CHECK(wrong == 0);
    }
}

TEST_CASE("the order of a plan is a permutation that dequantize undoes") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    using S = kvq::mixed_affine<kvq::code_widths<4, 3, 2, 0>, kvq::average_eighths<24>, kvq::per_channel<64>>;
    for (const int dim : {1, 5, 48, 64, 80, 128}) {
        const S scheme = test::with_random_plan<S>(random, {1, 1, dim});
        const kvq::block_shape shape{kvq::tensor::key, 1, dim};
        const auto x = random.normals(static_cast<std::size_t>(dim));
        auto y = x;
        scheme.transform_query(shape, {}, y.data());
        CHECK(std::is_permutation(x.begin(), x.end(), y.begin()));
        scheme.restore_output(shape, {}, y.data());
        CHECK(x == y);
    }
}

TEST_CASE("bits go where queries look: a channel that queries weigh most dequantizes best") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 64};
    kvq::calibration statistics(shape);
    auto k = test::random_tensor(random, 128, 1, 64), q = test::random_tensor(random, 50, 2, 64);
    for (int t = 0; t < 50; ++t)
        for (int h = 0; h < 2; ++h)
            for (int c = 0; c < 64; ++c) q.view().at(t, h)[c] *= c % 4 == 1 ? 30.0f : 0.5f;
    statistics.add_keys(0, std::as_const(k).view());
    statistics.add_queries(0, std::as_const(q).view());
    const kvq::mixed_affine<kvq::code_widths<4, 2, 0>, kvq::average_eighths<16>, kvq::per_channel<64>>
        planned(statistics), even;
    const kvq::block_shape block{kvq::tensor::key, 128, 64};
    CHECK(planned.block_bytes(block) == even.block_bytes(block));
    const auto x = random.normals(block.values());
    const auto logits = [&](const auto& scheme) {
        const auto y = test::dequantized(scheme, block, test::quantized(scheme, block, x));
        double error = 0;
        for (int t = 0; t < 128; ++t) {
            double e = 0;
            for (int c = 0; c < 64; ++c) {
                const auto i = static_cast<std::size_t>(t * 64 + c);
                e += static_cast<double>(q.view().at(7, 1)[c]) * static_cast<double>(x[i] - y[i]);
            }
            error += e * e;
        }
        return error;
    };
    // 16 of 64 channels carry all of the product: 4 bits instead of 2 there are 25 times finer steps,
    // squared.
    CHECK(logits(planned) < 0.2 * logits(even));
    CHECK_THROWS_AS(test::quantized(planned, {kvq::tensor::key, 64, 32}, random.normals(64 * 32)),
                    kvq::error);
    CHECK_THROWS_AS(test::quantized(planned, block, x, nullptr, {1, 0}), kvq::error);
}

TEST_CASE("statistics that say nothing about a text leave even widths: no keys, or all of it in doubt") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    using S = kvq::mixed_affine<kvq::code_widths<6, 4, 3, 0>, kvq::average_eighths<32>, kvq::per_channel<64>>;
    for (const int dim : {8, 48, 64, 128}) {
        const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = dim};
        const kvq::block_shape block{kvq::tensor::key, 64, dim};
        const auto x = random.normals(block.values());
        const auto even = test::quantized(S{}, block, x);
        kvq::calibration queries_alone(shape);
        auto q = test::random_tensor(random, 640, 1, dim);
        for (int t = 0; t < 640; ++t)
            for (int c = 0; c < dim; ++c) q.view().at(t, 0)[c] *= static_cast<float>(1 << c % 9);
        queries_alone.add_queries(0, std::as_const(q).view());
        CHECK(test::quantized(S(queries_alone), block, x) == even);

        kvq::calibration both = queries_alone;
        both.add_keys(0, test::random_tensor(random, 640, 1, dim).view());
        if (dim > 8) CHECK(S(both).plan()->blocks[0].quads[1] != dim / 4);
        const auto doubted = std::make_shared<const kvq::width_plan>(S::make_plan(both, HUGE_VAL));
        CHECK(test::quantized(S(doubted), block, x) == even);
    }
}

TEST_CASE("keys alone make the plan of the queries that they let expect; no feedback") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    using encoder = kvq::error_feedback<kvq::min_max>;
    using S = kvq::mixed_affine<kvq::code_widths<6, 4, 3, 2, 0>, kvq::average_eighths<24>,
                                kvq::per_channel<64>, kvq::byte_params, encoder>;
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = 64};
    auto k = test::random_tensor(random, 640, 2, 64);
    for (int t = 0; t < 640; ++t)
        for (int h = 0; h < 2; ++h)
            for (int c = 0; c < 64; ++c) {
                float& x = k.view().at(t, h)[c];
                x = x * static_cast<float>(1 << c % 5) + (c % 7 == h ? 20.0f : 0.0f);
            }
    kvq::calibration keys(shape, true), both(shape, true);
    for (kvq::calibration* c : {&keys, &both}) c->add_keys(0, std::as_const(k).view());
    both.add_queries(0, std::as_const(k).view());
    CHECK(both.without_queries().save() == keys.save());
    const auto same = [](const kvq::width_plan& a, const kvq::width_plan& b) {
        for (std::size_t i = 0; i < a.blocks.size(); ++i)
            if (a.blocks[i].order != b.blocks[i].order || a.blocks[i].quads != b.blocks[i].quads)
                return false;
        return a.blocks.size() == b.blocks.size();
    };
    // Keys alone: E[k^2] sd(k), however much another text is expected to differ.
    kvq::width_plan expected{2, 64, {}};
    for (int h = 0; h < 2; ++h) {
        std::vector<double> importance;
        for (int c = 0; c < 64; ++c)
            importance.push_back(keys.key_power(0, h, c) * std::sqrt(keys.key_variance(0, h, c)));
        expected.blocks.push_back(kvq::allocate_widths(importance, S::width_list::values, S::row_words(64)));
    }
    CHECK(same(S::make_plan(keys, 0.0), expected));
    CHECK(same(S::make_plan(keys, 2.0), S::make_plan(keys)));
    CHECK(!same(S::make_plan(keys), S::make_plan(both)));
    CHECK(!S(keys).encoder.matrices);
    CHECK(S(both).encoder.matrices);
}

TEST_CASE("malformed plans are refused; a plan is known by its fingerprint, an encoder is not") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    using S = kvq::mixed_affine<kvq::code_widths<4, 2, 0>, kvq::average_eighths<16>, kvq::per_channel<64>>;
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 1, .head_dim = 32};
    const auto one = test::random_statistics(random, shape), two = test::random_statistics(random, shape);
    const S scheme(one);
    CHECK(scheme.fingerprint() == S(kvq::calibration::load(one.save())).fingerprint());
    CHECK(scheme.fingerprint() != S(two).fingerprint());
    CHECK(S{}.fingerprint() == 0);
    using fed = kvq::affine<4, kvq::per_channel<64>, kvq::byte_params, kvq::error_feedback<kvq::min_max>>;
    const auto products = test::random_statistics(random, shape, true);
    const auto identity = [](const auto& s) { return kvq::identity_of(kvq::make_format<kvq::scalar>(s)); };
    CHECK(identity(fed(products)) ==
          identity(kvq::affine<4, kvq::per_channel<64>, kvq::byte_params, kvq::min_max>{}));
    CHECK(!(identity(scheme) == identity(S{})));

    const auto refused = [&](auto change) {
        kvq::width_plan plan = *scheme.plan();
        change(plan);
        CHECK_THROWS_AS(S(std::make_shared<const kvq::width_plan>(plan)), kvq::error);
    };
    refused([](kvq::width_plan& p) { p.blocks[1].order[3] = p.blocks[1].order[4]; });
    refused([](kvq::width_plan& p) { p.blocks[1].order[3] = 32; });
    refused([](kvq::width_plan& p) { p.blocks[0].order.pop_back(); });
    refused([](kvq::width_plan& p) { p.blocks[0].quads = {8, 0, 0}; });  // more words than a row has
    refused([](kvq::width_plan& p) { p.blocks[0].quads = {0, 7, 0}; });  // a quad is missing
    refused([](kvq::width_plan& p) { p.blocks[0].quads = {0, 8}; });
    refused([](kvq::width_plan& p) { p.head_dim = 0; });
}

TEST_CASE("a cache refuses plans and feedback of another shape before it holds a token") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    using keys = kvq::mixed_affine<kvq::code_widths<4, 2, 0>, kvq::average_eighths<16>, kvq::per_channel<64>,
                                   kvq::byte_params, kvq::error_feedback<kvq::min_max>>;
    using grid = kvq::affine<4, kvq::per_channel<64>, kvq::byte_params, kvq::error_feedback<kvq::min_max>>;
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 2, .head_dim = 16};
    const auto statistics = test::random_statistics(random, shape, true);
    // Not from kvq::library, whose formats the tests find by name and by what dequantizing needs: feedback is
    // neither.
    using C = test::typed_cache<test::formats<keys, grid>, kvq::int8, kvq::scalar>;
    const auto make = [&](const kvq::cache_shape& s) {
        C cache(s, {}, typename C::key_table(keys(statistics), grid(statistics)));
    };
    make(shape);
    for (const kvq::cache_shape& other : {kvq::cache_shape{3, 2, 16}, kvq::cache_shape{2, 4, 16},
                                          kvq::cache_shape{2, 2, 32}, kvq::cache_shape{1, 2, 16}}) {
        CHECK_THROWS_AS(make(other), kvq::error);
        CHECK_THROWS_AS((test::typed_cache<grid, kvq::int8, kvq::scalar>(other, {}, grid(statistics))),
                        kvq::error);
    }
}

TEST_CASE_TEMPLATE(
    "value() is what dequantize() gives, by place", S,
    kvq::mixed_affine<kvq::code_widths<4, 2, 0>, kvq::average_eighths<16>, kvq::per_channel<64>>,
    kvq::mixed_affine<kvq::code_widths<8, 4, 3, 0>, kvq::average_eighths<26>, kvq::per_channel<7>>) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 20; ++round) {
        const auto shape = key_shape(random);
        INFO(shape);
        const S scheme = round % 2 ? test::with_random_plan<S>(random, {1, 1, shape.dim}) : S{};
        typename S::width_quads quads = S::even_quads(shape.dim);
        std::vector<int> channel(static_cast<std::size_t>(shape.dim));
        for (int c = 0; c < shape.dim; ++c) channel[static_cast<std::size_t>(c)] = c;
        if (scheme.plan()) {
            const auto& plan = scheme.plan()->blocks[0];
            for (int w = 0; w < S::width_list::count; ++w)
                quads.of[w] = plan.quads[static_cast<std::size_t>(w)];
            channel.assign(plan.order.begin(), plan.order.end());
        }
        const auto block = test::quantized(scheme, shape, test::hostile_block(random, shape));
        const auto dequantized = test::dequantized(scheme, shape, block);
        int differ = 0;
        for (int t = 0; t < shape.tokens; ++t)
            for (int place = 0; place < shape.dim; ++place)
                differ += S::value(shape, quads, block.data(), t, place) !=
                          dequantized[static_cast<std::size_t>(t * shape.dim +
                                                               channel[static_cast<std::size_t>(place)])];
        CHECK(differ == 0);
    }
}

}  // namespace mixed_width_tests
