// SPDX-License-Identifier: MIT
// Comparison family: error bounds; double arithmetic. Rows of tokens in the bytes of other systems: how far
// values are, what is not finite, attention, what is refused. Their bytes: tests/golden/row_bytes.cpp.
#include <doctest/doctest.h>

#include <cmath>
#include <kvq/attention/reference.hpp>
#include <kvq/cpu/scalar.hpp>
#include <kvq/io/page_transfer.hpp>
#include <kvq/schemes/head_rows.hpp>
#include <kvq/schemes/rotated_records.hpp>
#include <map>
#include <memory>

#include "support/attention_error.hpp"
#include "support/blocks.hpp"
#include "support/saved.hpp"
#include "support/typed_cache.hpp"

namespace token_rows_tests {

namespace {

/// The largest error as a part of the largest magnitude of a group; fp8 and e5m2: of the value itself, or of
/// the smallest normal number.
double bound(const kvq::row_layout& l, double value, double largest, double range) {
    using number = kvq::row_layout::number;
    const double half = std::ldexp(1.0, -11);
    switch (l.numbers) {
        case number::int8:
            return largest * (0.5 / 127 + half) * 1.001;
        case number::centred4:
            return largest * (1.0 / 8 + half) * 1.001;
        case number::centred5:
            return largest * (1.0 / 16 + half) * 1.001;
        case number::unsigned4:
            return (range * (0.5 / 15 + half) + largest * half) * 1.001;
        case number::unsigned5:
            return (range * (0.5 / 31 + half) + largest * half) * 1.001;
        case number::centred6:  // the step of the least error is not that of the largest value
            return largest / 20;
        case number::iq4_nl:  // steps of up to 24 of 127, and -127 to 113
            return largest / 6;
        case number::e5m2:
            return std::fmax(value / 8, std::ldexp(1.0, -17));
        case number::e4m3:
            // mxfp8: numbers of 256 to 512 times the scale, which end at 448.
            return l.channels > 0 ? std::fmax(value / 7, largest * std::ldexp(1.0, -17))
                                  : std::fmax(value / 16, std::ldexp(1.0, -10));
        case number::e2m1:
            // Scales round down, so that numbers may end before the largest: at 6 of up to 8 times a power of
            // two, at 6 of 6.4 times an e4m3.
            return l.scale == kvq::row_layout::stored::e8m0 ? largest / 4 * 1.001 : largest / 5.6;
    }
    return 0;
}

/// For test::measure_attention.
struct plain_cache : kvq::cache {
    using sequence_type = kvq::sequence;
    using cache::cache;
};

/// K and V of a name: rows of other systems, int8 or std4.
kvq::format_pair formats_named(const std::string& name) {
    if (name == "int8") return {test::made<test::usual>(kvq::int8{}), test::made<test::usual>(kvq::int8{})};
    if (name == "std4")
        return {test::made<test::usual>(kvq::std4::keys{}), test::made<test::usual>(kvq::std4::values{})};
    for (const kvq::record_layout& l : kvq::record_layouts)
        if (name == l.name) {
            const auto records = kvq::make_format<kvq::scalar>(kvq::token_records(l));
            return {records, records};
        }
    const auto rows = kvq::make_format<kvq::scalar>(kvq::token_rows(kvq::row_layout_named(name.c_str())));
    return {rows, rows};
}
/// Of a cache that quantizes to the first of these formats and lists the others.
kvq::cache_options options_of(const std::vector<std::string>& names, int rollback) {
    kvq::cache_options o{.sinks = 3, .recent = 20, .page_tokens = 64, .rollback = rollback};
    for (const std::string& name : names) {
        const kvq::format_pair f = formats_named(name);
        o.keys.push_back(f.keys);
        o.values.push_back(f.values);
    }
    return o;
}
/// The squared error of b, as a part of the square of a: K and V of all layers.
double squared_error(const kvq::sequence& a, const kvq::sequence& b, const kvq::cache_shape& shape) {
    double error = 0, power = 0;
    for (int layer = 0; layer < shape.layers; ++layer)
        for (const auto role : {kvq::tensor::key, kvq::tensor::value}) {
            const auto x = test::dequantized(a, shape, layer, role),
                       y = test::dequantized(b, shape, layer, role);
            REQUIRE(x.values().size() == y.values().size());
            for (std::size_t i = 0; i < x.values().size(); ++i) {
                const double d = static_cast<double>(x.values()[i]) - static_cast<double>(y.values()[i]);
                error += d * d;
                power += static_cast<double>(x.values()[i]) * static_cast<double>(x.values()[i]);
            }
        }
    return error / power;
}
void accept(kvq::page_receiver& receiver, const kvq::sequence& s, int layers) {
    for (int layer = layers - 1; layer >= 0; --layer) {
        std::vector<std::byte> all, storage;
        kvq::send_pages(s, layer, [&](const void* data, std::size_t n) {
            const auto* p = static_cast<const std::byte*>(data);
            all.insert(all.end(), p, p + n);
        });
        for (test::memory_source read{all}; read.position < all.size();)
            receiver.accept(kvq::read_page(read, storage));
    }
}
kvq::sequence sent(const kvq::sequence& s, int layers, kvq::cache& to, bool convert,
                   const kvq::page_layout* layout = nullptr) {
    kvq::page_receiver receiver(to);
    if (convert) receiver.convert_pages();
    if (layout) receiver.convert_pages(*layout);
    accept(receiver, s, layers);
    return receiver.finish();
}

}  // namespace

TEST_CASE("rows of other systems: errors are those of their numbers, one at a time or all together") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (const kvq::row_layout& l : kvq::row_layouts)
        for (int round = 0; round < 8; ++round) {
            INFO(std::string(l.name));
            auto s = test::random_shape(random, 60);
            s.dim = l.channels > 0 ? l.channels * random.between(1, 5) : random.between(1, 150);
            INFO(s);
            const auto x = random.normals(s.values(), round % 2 ? 1.0f : 5.0f);
            const kvq::token_rows scheme(l);
            const auto block = test::quantized(scheme, s, x);
            const auto y = test::dequantized(scheme, s, block);
            const int n = l.group_of(s.dim);
            for (int at = 0; at < static_cast<int>(x.size()); ++at) {
                const auto i = static_cast<std::size_t>(at);
                const auto first = x.begin() + (at - at % s.dim % n);
                const auto [low, high] = std::minmax_element(first, first + n);
                const double least = static_cast<double>(*low), most = static_cast<double>(*high),
                             value = static_cast<double>(x[i]);
                REQUIRE(std::fabs(static_cast<double>(y[i]) - value) <=
                        bound(l, std::fabs(value), std::fmax(-least, most), most - least));
                REQUIRE(scheme.device_value(s, block.data(), at / s.dim, at % s.dim) == y[i]);
            }
        }
}

TEST_CASE("rows of other systems: the better of two scales loses less, group by group") {
    test::generator random(test::seed());
    const kvq::block_shape s{kvq::tensor::key, 40, 128};
    const kvq::token_rows one(kvq::row_layout_named("nvfp4")), two(kvq::row_layout_named("nvfp4-4over6"));
    const auto x = random.normals(s.values(), 2.0f);
    const auto a = test::dequantized(one, s, test::quantized(one, s, x)),
               b = test::dequantized(two, s, test::quantized(two, s, x));
    double errors[2] = {0, 0};
    for (std::size_t first = 0; first < x.size(); first += 16) {
        double of_group[2] = {0, 0};
        for (std::size_t i = first; i < first + 16; ++i) {
            of_group[0] += std::pow(static_cast<double>(a[i]) - static_cast<double>(x[i]), 2);
            of_group[1] += std::pow(static_cast<double>(b[i]) - static_cast<double>(x[i]), 2);
        }
        REQUIRE(of_group[1] <= 1.0001 * of_group[0]);
        for (int i = 0; i < 2; ++i) errors[i] += of_group[i];
    }
    CHECK(errors[1] < 0.9 * errors[0]);
}

TEST_CASE("rows of other systems: no value is NaN or infinite, and those that are not finite are counted") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (const kvq::row_layout& l : kvq::row_layouts)
        for (int round = 0; round < 8; ++round) {
            INFO(std::string(l.name));
            auto s = test::random_shape(random, 40);
            s.dim = 32 * random.between(1, 4);
            const auto x = test::hostile_block(random, s);
            std::uint32_t not_finite = 0, wanted = 0;
            const kvq::token_rows scheme(l);
            const auto y = test::dequantized(scheme, s, test::quantized(scheme, s, x, &not_finite));
            for (const float v : x) wanted += std::isfinite(v) ? 0 : 1;
            CHECK(not_finite == wanted);
            int wrong = 0;
            for (const float v : y) wrong += std::isfinite(v) ? 0 : 1;
            CHECK(wrong == 0);
        }
}

TEST_CASE("rows of other systems: attention is that of double on the values") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (const kvq::row_layout& l : kvq::row_layouts) {
        INFO(std::string(l.name));
        const auto rows = kvq::make_format<kvq::scalar>(kvq::token_rows(l));
        const kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = 32 * random.between(1, 3)};
        plain_cache cache(shape, {.keys = rows, .values = rows, .sinks = 2, .recent = 9, .page_tokens = 32});
        const int n = random.between(60, 200);
        const test::stream s(random, shape, n);
        auto sequence = cache.new_sequence();
        test::append(sequence, 1, s, 0, n);
        const auto q = test::random_tensor(random, random.between(1, 5), 4, shape.head_dim);
        const auto error = test::measure_attention(cache, sequence, 0, q);
        CHECK(error.of_terms <= 1e-5);
    }
}

TEST_CASE(
    "records of other systems: errors on normal values; nothing is NaN; what is not finite is counted") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    // Squared, as a part of the squares. int8 without fractions loses four times as much as rounded int8.
    const std::map<std::string, double> most{
        {"mla-656", 8e-4},        {"mla-656-pow2", 9e-4},    {"mla-584", 9e-4},
        {"mla-528", 9e-4},        {"mla-288", 1.1e-2},       {"index-132", 8e-4},
        {"index-68", 2e-2},       {"int8-token-head", 3e-4}, {"fp8-token-head", 8e-4},
        {"mlx-2-g64", 0.2},       {"mlx-3-g64", 4e-2},       {"mlx-4-g64", 1e-2},
        {"mlx-6-g64", 6e-4},      {"mlx-8-g64", 4e-5},       {"nvfp4-v4", 1.1e-2},
        {"mlx-2-g64-bf16", 0.2},  {"mlx-3-g64-bf16", 4e-2},  {"mlx-4-g64-bf16", 1e-2},
        {"mlx-6-g64-bf16", 6e-4}, {"mlx-8-g64-bf16", 2e-4},  {"mxfp4-g16", 2e-2}};
    for (const kvq::record_layout& l : kvq::record_layouts) {
        INFO(std::string(l.name));
        const kvq::token_records scheme(l);
        for (int round = 0; round < 6; ++round) {
            auto s = test::random_shape(random, 40);
            s.tokens = std::max(s.tokens, 20);
            s.dim = l.head_dim > 0 ? l.head_dim : 64 * random.between(1, 4);
            const auto x = random.normals(s.values(), round % 2 ? 1.0f : 5.0f);
            const auto y = test::dequantized(scheme, s, test::quantized(scheme, s, x));
            double error = 0, power = 0;
            for (std::size_t i = 0; i < x.size(); ++i) {
                error += std::pow(static_cast<double>(x[i]) - static_cast<double>(y[i]), 2);
                power += std::pow(static_cast<double>(x[i]), 2);
            }
            CHECK(error > 0);
            CHECK(error < most.at(l.name) * power);
            const auto hostile = test::hostile_block(random, s);
            std::uint32_t not_finite = 0, wanted = 0;
            const auto z = test::dequantized(scheme, s, test::quantized(scheme, s, hostile, &not_finite));
            for (const float v : hostile) wanted += std::isfinite(v) ? 0 : 1;
            CHECK(not_finite == wanted);
            CHECK(std::none_of(z.begin(), z.end(), [](float v) { return !std::isfinite(v); }));
        }
    }
    // vLLM's int4 behind a matrix with signs: outliers spread over all channels.
    const std::vector<float> signs(64, -1.0f);
    const kvq::rotated_records own(kvq::int4_token_head, signs), vllm(kvq::int4_token_head);
    CHECK(own.fingerprint() != vllm.fingerprint());
    for (const kvq::rotated_records* const scheme : {&own, &vllm}) {
        kvq::block_shape s{kvq::tensor::key, random.between(1, 40), 64};
        auto x = random.normals(s.values());
        for (std::size_t i = 5; i < x.size(); i += 64) x[i] = 30.0f;
        const auto y = test::dequantized(*scheme, s, test::quantized(*scheme, s, x));
        double error = 0, power = 0;
        for (std::size_t i = 0; i < x.size(); ++i) {
            error += std::pow(static_cast<double>(x[i]) - static_cast<double>(y[i]), 2);
            power += i % 64 == 5 ? 0.0 : std::pow(static_cast<double>(x[i]), 2);
        }
        CHECK(error < 0.15 * power);
        const auto hostile = test::hostile_block(random, s);
        std::uint32_t not_finite = 0, wanted = 0;
        const auto z = test::dequantized(*scheme, s, test::quantized(*scheme, s, hostile, &not_finite));
        for (const float v : hostile) wanted += std::isfinite(v) ? 0 : 1;
        CHECK(not_finite == wanted);
        CHECK(std::none_of(z.begin(), z.end(), [](float v) { return !std::isfinite(v); }));
    }
    const auto refuses_int4 = [](const kvq::rotated_records& scheme, int dim) {
        return test::message_of([&] { scheme.check({1, 1, dim}, kvq::tensor::key); });
    };
    CHECK(refuses_int4(vllm, 96) ==
          "kvq: int4-token-head has 512 channels at most and a power of two, but head_dim is 96");
    CHECK(refuses_int4(own, 128) == "kvq: int4-token-head has 64 channels, but head_dim is 128");
    CHECK(test::message_of([] {
              const float half[] = {1.0f, 0.5f};
              (void)kvq::rotated_records(kvq::int4_token_head, half);
          }) == "kvq: int4-token-head: sign 1 is 0.500000, neither 1 nor -1");
    const auto refuses = [](const char* name, int dim) {
        return test::message_of([&] {
            kvq::token_records(kvq::record_layout_named(name)).check({1, 1, dim}, kvq::tensor::key);
        });
    };
    CHECK(refuses("mla-656", 512) == "kvq: mla-656 has 576 channels, but head_dim is 512");
    CHECK(refuses("mlx-4-g64", 96) == "kvq: mlx-4-g64 has a scale for 64 channels, but head_dim is 96");
    CHECK(refuses("mla-656", 576).empty());
    CHECK(test::message_of([] { (void)kvq::record_layout_named("mla-657"); }) ==
          "kvq: there are no records of the name mla-657");
}

TEST_CASE(
    "records of other systems: latents, and keys and values, are attended as double does on the values") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const int n = 90;
    for (const kvq::record_layout& l : kvq::record_layouts) {
        INFO(std::string(l.name));
        const auto records = kvq::make_format<kvq::scalar>(kvq::token_records(l));
        if (l.head_dim > 128) {
            const int rotary = l.bits == 8 ? 64 : 0;
            kvq::cache cache({kvq::latent_attention(l.head_dim - rotary, rotary)},
                             {.keys = records, .recent = 9, .page_tokens = 32});
            auto sequence = cache.new_sequence();
            const auto k = test::random_tensor(random, n, 1, l.head_dim);
            sequence.append(0, k.view(), kvq::token_view<const float>());
            const auto q = test::random_tensor(random, 2, 4, l.head_dim);
            const int values = l.head_dim - rotary;
            test::tensor<float> out(2, 4, values), keys(n, 1, l.head_dim), v(n, 1, values);
            sequence.attend(0, q.view(), out.view());
            sequence.dequantize(0, kvq::tensor::key, 0, keys.view());
            for (int t = 0; t < n; ++t) std::copy_n(keys.view().at(t, 0), values, v.view().at(t, 0));
            test::tensor<double> want(2, 4, values);
            kvq::reference_attend(keys.view(), std::as_const(v).view(), q.view(), want.view(), kvq::causal{});
            double error = 0, norm = 0;
            for (std::size_t i = 0; i < out.values().size(); ++i) {
                error += std::pow(static_cast<double>(out.values()[i]) - want.values()[i], 2);
                norm += std::pow(want.values()[i], 2);
            }
            CHECK(std::sqrt(error / norm) < 1e-3);
            continue;
        }
        const kvq::cache_shape shape{
            .layers = 1, .kv_heads = 2, .head_dim = l.head_dim > 0 ? l.head_dim : 64};
        plain_cache cache(shape, {.keys = records, .values = records, .recent = 9, .page_tokens = 32});
        const test::stream s(random, shape, n);
        auto sequence = cache.new_sequence();
        test::append(sequence, 1, s, 0, n);
        const auto q = test::random_tensor(random, 3, 4, shape.head_dim);
        CHECK(test::measure_attention(cache, sequence, 0, q).of_terms <= 1e-5);
        CHECK(test::saved(test::restored(cache, test::saved(sequence))) == test::saved(sequence));
    }
}

TEST_CASE("rows of other systems: a scale for each kv head gives that head the bytes of its scale") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 2, .head_dim = 64};
    const float scales[] = {0.5f, 2.0f, 0.25f, 1.0f};
    const kvq::row_layout& fp8 = kvq::row_layout_named("fp8");
    const kvq::head_rows all(fp8, scales, 2), one(fp8, std::span(scales, 2), 2);
    const kvq::block_shape block{kvq::tensor::key, 32, 64};
    const auto x = random.normals(block.values(), 3.0f);
    std::vector<std::byte> mine(all.block_bytes(block)), wanted(mine.size());
    for (int layer = 0; layer < 2; ++layer)
        for (int head = 0; head < 2; ++head) {
            kvq::token_rows(fp8, scales[2 * layer + head]).quantize(block, {}, x.data(), wanted.data());
            all.quantize(block, {layer, head}, x.data(), mine.data());
            CHECK(mine == wanted);
            if (layer == 1) {
                kvq::token_rows(fp8, scales[head]).quantize(block, {}, x.data(), wanted.data());
                one.quantize(block, {layer, head}, x.data(), mine.data());
                CHECK(mine == wanted);
            }
        }
    CHECK(all.fingerprint() != one.fingerprint());
    const auto format = kvq::make_format<kvq::scalar>(all);
    plain_cache cache(shape, {.keys = format, .values = format, .recent = 8, .page_tokens = 32});
    const test::stream s(random, shape, 100);
    auto sequence = cache.new_sequence();
    test::append(sequence, 2, s, 0, 100);
    const auto q = test::random_tensor(random, 2, 4, 64);
    for (int layer = 0; layer < 2; ++layer)
        CHECK(test::measure_attention(cache, sequence, layer, q).of_terms <= 1e-5);
    CHECK(test::saved(test::restored(cache, test::saved(sequence))) == test::saved(sequence));
    CHECK_THROWS_WITH_AS(all.check({3, 2, 64}, kvq::tensor::key),
                         "kvq: fp8 has scales for 2 layers of 2 heads, but there are 3 of 2",
                         std::invalid_argument);
    CHECK_THROWS_WITH_AS(kvq::head_rows(fp8, std::span(scales, 3), 2),
                         "kvq: fp8 needs a scale for each of 2 heads, but got 3", std::invalid_argument);
}

TEST_CASE("rows of other systems: chunks, trims, refills and files leave what one prompt would") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (const kvq::row_layout& l : kvq::row_layouts) {
        INFO(std::string(l.name));
        const auto rows = kvq::make_format<kvq::scalar>(kvq::token_rows(l));
        const kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = 32};
        plain_cache cache(shape, {.keys = rows, .values = rows, .sinks = 2, .recent = 9, .page_tokens = 32});
        const int n = 300;
        const test::stream s(random, shape, n), other(random, shape, n);
        auto whole = cache.new_sequence(), parts = cache.new_sequence();
        test::append(whole, 1, s, 0, n);
        while (parts.tokens() < n) {
            const int at = parts.tokens();
            test::append(parts, 1, s, at, std::min(n - at, random.between(1, 70)));
            // Tokens that go again within the rollback leave nothing behind.
            if (const int wrong = random.between(0, 16); wrong > 0 && parts.tokens() + wrong <= n) {
                const int before = parts.tokens();
                test::append(parts, 1, other, before, wrong);
                CHECK(parts.trim(before) == 0);
            }
            if (random.one_in(4)) {
                const test::file_bytes file = test::saved(parts);
                parts = test::restored(cache, file);
                CHECK(test::saved(parts) == file);
            }
        }
        CHECK(test::saved(parts) == test::saved(whole));
        for (const auto role : {kvq::tensor::key, kvq::tensor::value})
            CHECK(test::dequantized(parts, shape, 0, role).values() ==
                  test::dequantized(whole, shape, 0, role).values());
    }
}

TEST_CASE("rows of other systems: messages convert as files do, and as requantizing in memory") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 2, .head_dim = 64};
    // What a format adds at most to normal values that have lost something before.
    const std::map<std::string, double> most{{"fp8", 8e-4}, {"std4", 1.3e-2}, {"int8", 8e-5}, {"q8_0", 8e-5}};
    const std::vector<std::string> chains[] = {
        {"fp8", "std4", "fp8"}, {"nvfp4", "fp8"}, {"q8_0", "int8", "q8_0"}};
    for (const auto& chain : chains)
        for (const int rollback : {0, 300}) {
            const int n = random.between(200, 260);
            const test::stream s(random, shape, n);
            auto cache = std::make_unique<plain_cache>(shape, options_of({chain[0]}, rollback));
            kvq::sequence sequence = cache->new_sequence();
            test::append(sequence, shape.layers, s, 0, n);
            for (std::size_t i = 1; i < chain.size(); ++i) {
                INFO(chain[i - 1], " to ", chain[i], ", rollback ", rollback, ", ", n, " tokens");
                auto next =
                    std::make_unique<plain_cache>(shape, options_of({chain[i], chain[i - 1]}, rollback));
                kvq::sequence got = sent(sequence, shape.layers, *next, true);
                const auto of_got = test::saved(got), of_sequence = test::saved(sequence);
                CHECK(test::saved(test::restored(*next, of_sequence, {.convert = true})) == of_got);
                kvq::sequence kept = sent(sequence, shape.layers, *next, false);
                CHECK(squared_error(sequence, kept, shape) == 0);
                if (rollback == 0) {
                    next->requantize(kept, {.key = 0, .value = 0, .new_pages = true});
                    CHECK(test::saved(kept) == of_got);
                }
                // 16-bit copies know nothing of the format before.
                kvq::sequence exact = next->new_sequence();
                test::append(exact, shape.layers, s, 0, n);
                if (rollback > 0) CHECK(test::saved(exact) == of_got);
                const double added = squared_error(sequence, got, shape);
                if (rollback == 0) {
                    MESSAGE(chain[i - 1], " to ", chain[i], " adds ", added);
                    CHECK(added > 0);
                    CHECK(added < most.at(chain[i]));
                }
                sequence = std::move(got);
                cache = std::move(next);
            }
        }
}

TEST_CASE(
    "messages of a cache with other pages: what a file with convert gives; what does not fit is refused") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (const int rollback : {0, 40}) {
        const bool latent = rollback == 0;
        const auto options = options_of({"q8_0", "std4"}, rollback);
        kvq::cache_options other = options_of({"std4", "q8_0"}, rollback);
        other.sinks = 5;
        other.recent = 33;
        other.page_tokens = 48;
        std::vector<kvq::layer> layers(2, kvq::layer{2, 64, 32});
        layers[1] = latent ? kvq::latent_attention(96, 0, 64) : kvq::layer{1, 96};
        kvq::cache from(layers, options), to(layers, other);
        const int n = random.between(200, 300);
        auto sequence = from.new_sequence();
        for (int layer = 0; layer < 2; ++layer) {
            const kvq::layer& l = layers[static_cast<std::size_t>(layer)];
            const auto k = test::random_tensor(random, n, l.kv_heads, l.head_dim),
                       v = test::random_tensor(random, n, l.kv_heads,
                                               l.value_dim == 0 ? l.head_dim : l.value_dim);
            sequence.append(layer, k.view(),
                            l.kind == kvq::layer_kind::latent ? kvq::token_view<const float>() : v.view());
        }
        const kvq::page_layout sender{options.sinks, options.recent, options.page_tokens};
        const kvq::sequence got = sent(sequence, 2, to, false, &sender);
        CHECK(got.tokens() == n);
        CHECK(test::saved(got) == test::saved(test::restored(to, test::saved(sequence), {.convert = true})));
        // What was refused for want of memory is given once there is some.
        other.byte_budget = to.bytes_in_use() * 3 / 2;
        kvq::cache full(layers, other);
        auto twin = std::make_unique<kvq::sequence>(sent(sequence, 2, full, false, &sender));
        kvq::page_receiver receiver(full);
        receiver.convert_pages();
        receiver.convert_pages(sender);
        receiver.keep_pages();
        accept(receiver, sequence, 2);
        CHECK_THROWS_AS(receiver.convert_pages(sender), std::invalid_argument);
        CHECK_THROWS_AS((void)receiver.finish(n + 1), std::invalid_argument);
        CHECK_THROWS_AS((void)receiver.finish(n), kvq::out_of_memory);
        twin.reset();
        CHECK(test::saved(receiver.finish(n)) == test::saved(got));
        accept(receiver, sequence, 2);
        // Pages keep their numbers.
        CHECK(test::contains(test::message_of([&] { (void)receiver.finish(); }), "came twice"));
        const kvq::page_layout wrong{options.sinks, options.recent, 32};
        CHECK(test::contains(test::message_of([&] { (void)sent(sequence, 2, to, false, &wrong); }),
                             "does not belong to a cache with 3 sinks and 32 tokens per page"));
        CHECK(test::contains(test::message_of([&] { (void)sent(sequence, 2, to, true); }),
                             "does not belong to a cache with 5 sinks and 48 tokens per page"));
    }
}

TEST_CASE("rows of other systems: through std4 and back a page loses what both formats do, and little more") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = 64};
    const int n = 300;
    const test::stream s(random, shape, n);
    const auto appended = [&](kvq::cache& to) {
        kvq::sequence of = to.new_sequence();
        test::append(of, 1, s, 0, n);
        return of;
    };
    plain_cache exact_cache(shape, {.keys = test::made<test::usual>(kvq::full<float>{}),
                                    .window = test::made<test::usual>(kvq::full<float>{})});
    const kvq::sequence exact = appended(exact_cache);
    plain_cache four_bits(shape, options_of({"std4"}, 0));
    const double of_std4 = squared_error(exact, appended(four_bits), shape);
    std::vector<std::string> all;
    for (const kvq::row_layout& l : kvq::row_layouts) all.emplace_back(l.name);
    for (const kvq::record_layout& l : kvq::record_layouts)
        if (l.head_dim == 0 && l.bits >= 4) all.emplace_back(l.name);
    for (const std::string& name : all) {
        plain_cache cache(shape, options_of({name, "std4"}, 0));
        kvq::sequence sequence = appended(cache);
        const double alone = squared_error(exact, sequence, shape);
        cache.requantize(sequence, {.key = 1, .value = 1});
        const double there = squared_error(exact, sequence, shape);
        cache.requantize(sequence, {.key = 0, .value = 0});
        const double back = squared_error(exact, sequence, shape);
        MESSAGE(name, ": ", alone, ", in std4 ", there, ", back ", back);
        CHECK(there <= 1.1 * (alone + of_std4));
        CHECK(back <= 1.1 * (2 * alone + of_std4));
        CHECK(there > 0.9 * of_std4);
        CHECK(back > alone);
    }
}

TEST_CASE("rows of other systems: sizes, scales of the tensor, refusals") {
    const auto bytes = [](const char* name, int tokens, int dim) {
        const kvq::token_rows rows(kvq::row_layout_named(name));
        return rows.block_bytes({kvq::tensor::key, tokens, dim}) / static_cast<std::size_t>(tokens);
    };
    CHECK(bytes("fp8", 64, 128) == 128);
    CHECK(bytes("nvfp4", 64, 128) == 72);
    CHECK(bytes("mxfp8", 64, 128) == 132);
    CHECK(bytes("mxfp4", 64, 128) == 68);
    CHECK(bytes("q8_0", 64, 128) == 136);
    CHECK(bytes("q4_0", 64, 128) == 72);
    CHECK(bytes("q4_1", 64, 128) == 80);
    CHECK(bytes("q5_0", 64, 128) == 88);
    CHECK(bytes("q5_1", 64, 128) == 96);
    CHECK(bytes("q6_0", 64, 128) == 104);
    CHECK(bytes("iq4_nl", 64, 128) == 72);
    CHECK(bytes("nvfp4-4over6", 64, 128) == 72);
    const kvq::token_rows q8_0(kvq::row_layout_named("q8_0"));
    CHECK_THROWS_WITH_AS(q8_0.check({.layers = 1, .kv_heads = 1, .head_dim = 80}, kvq::tensor::key),
                         "kvq: q8_0 has a scale for 32 channels, but head_dim is 80", std::invalid_argument);
    CHECK_THROWS_WITH_AS(
        kvq::cache({kvq::latent_attention(80, 64)}, {.keys = kvq::make_format<kvq::scalar>(q8_0)}),
        "kvq: q8_0 has a scale for 32 channels, but head_dim is 144", std::invalid_argument);
    CHECK_THROWS_WITH_AS(kvq::token_rows(kvq::row_layout_named("fp8"), 0.0f),
                         "kvq: fp8 takes a positive scale of the tensor, but got 0.000000",
                         std::invalid_argument);
    CHECK_THROWS_WITH_AS(kvq::token_rows(kvq::row_layout_named("q8_0"), 2.0f),
                         "kvq: q8_0 takes no scale of the tensor, but got 2.000000", std::invalid_argument);
    CHECK_THROWS_AS(kvq::token_rows(kvq::row_layout_named("fp8-e5m2"), 1e38f), std::invalid_argument);
    for (const kvq::row_layout& l : kvq::row_layouts) {
        CHECK(l.is_possible());
        kvq::row_layout other = l;
        other.channels = 64;
        CHECK_THROWS_AS(kvq::token_rows{other}, std::invalid_argument);
    }
    CHECK_THROWS_WITH_AS(
        kvq::token_rows({"mine", 128, kvq::row_layout::number::e4m3, kvq::row_layout::stored::e8m0, false}),
        "kvq: mine: no rows have such numbers with 128 channels for a scale of this kind",
        std::invalid_argument);
    CHECK_THROWS_WITH_AS(kvq::row_layout_named("q9_0"), "kvq: there are no rows of the name q9_0",
                         std::invalid_argument);
    CHECK(kvq::token_rows(kvq::row_layout_named("fp8"), 0.5f).fingerprint() !=
          kvq::token_rows(kvq::row_layout_named("fp8")).fingerprint());
}

}  // namespace token_rows_tests
