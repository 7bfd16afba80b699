// SPDX-License-Identifier: MIT
// Comparison family: mixed-precision reduction. Latent attention against double arithmetic on the dequantized
// keys, over random histories of all verbs; what a latent takes, to the byte; its error beside that of the
// codec; and what is refused.
//
// KVQ_HISTORIES: how many. KVQ_HISTORY: only the one with this number. Each has the seed KVQ_SEED plus its
// number.
#include <doctest/doctest.h>

#include <cmath>
#include <kvq/attention/merge_partials.hpp>
#include <kvq/attention/score_modifiers.hpp>
#include <kvq/cache/page_list.hpp>
#include <kvq/cache/requantize.hpp>
#include <kvq/cache/usage.hpp>
#include <kvq/estimate/footprint.hpp>
#include <kvq/format/bounds.hpp>
#include <kvq/format/latent.hpp>
#include <kvq/io/page_transfer.hpp>
#include <kvq/policy/prefix_cache.hpp>
#include <kvq/policy/ring.hpp>
#include <kvq/schemes/token_records.hpp>
#include <optional>

#include "support/latents.hpp"
#include "support/memory.hpp"
#include "support/saved.hpp"

namespace latent_tests {

namespace {

using kvq::tensor;

constexpr int longest = 300;

using test::attended;
using test::errors;
using test::format_of;

/// Attention in double over what a sequence holds.
test::tensor<double> attended(const kvq::sequence& s, const kvq::layer& of, const test::tensor<float>& q) {
    test::tensor<float> keys(s.tokens(0), 1, of.head_dim);
    s.dequantize(0, tensor::key, 0, keys.view());
    return attended(keys, q, of.value_dim);
}

}  // namespace

TEST_CASE("a latent is read as keys and as values, whatever became of its tokens") {
    const auto [first, last] = test::histories(40);
    for (int history = first; history < last; ++history) {
        INFO("KVQ_SEED=", test::seed(), " KVQ_HISTORY=", history);
        test::generator random(test::seed() + static_cast<std::uint64_t>(history));
        const int rotary = 2 * random.between(0, 6), latent = random.between(1, random.one_in(3) ? 150 : 40);
        kvq::layer of = kvq::latent_attention(latent, rotary);
        const bool moves = random.one_in(2);
        if (!moves) of.value_dim = random.between(1, of.head_dim);
        if (moves) of.rotary = kvq::rotary_embedding{.dims = rotary, .first_channel = latent};
        kvq::cache_options options = test::random_options(random);
        options.window = test::random_window(random);
        const std::vector<kvq::format> lasts{format_of<kvq::full<kvq::float16>>(), format_of<kvq::int8>(),
                                             format_of<kvq::ref8::keys>()};
        for (const kvq::format& f :
             {format_of<kvq::affine<4, kvq::per_channel<32>>>(), format_of<kvq::std4_h::keys>(),
              format_of<kvq::affine<5, kvq::per_token<64>>>(), format_of<kvq::low2::keys>()})
            options.keys.push_back(kvq::with_last_channels(f, random.pick(lasts), rotary));
        options.keys.push_back(format_of<kvq::int8>());
        of.formats.key = random.between(0, 4);
        kvq::cache cache({of}, options);
        std::vector<kvq::sequence> all;
        for (int i = 0; i < 2; ++i) all.push_back(cache.new_sequence());
        for (int step = 0; step < 14; ++step) {
            CAPTURE(step);
            kvq::sequence& s = all[static_cast<std::size_t>(random.between(0, 1))];
            const int held = s.tokens();
            const int n = std::min(longest - held, random.between(0, random.one_in(2) ? 90 : 5));
            const auto rows = test::random_tensor(random, n, 1, of.head_dim);
            const auto q = test::random_tensor(random, std::min(3, n), random.between(1, 20), of.head_dim);
            test::tensor<float> out(q.tokens(), q.view().heads, of.value_dim);
            switch (random.between(0, 9)) {
                case 0:
                case 1:
                    s.append(0, rows.view(), kvq::no_rows());
                    break;
                case 2: {
                    // A prompt sees what was quantized before it, and its own tokens in the type of the
                    // window.
                    test::tensor<float> keys(held + n, 1, of.head_dim);
                    s.dequantize(0, tensor::key, 0, keys.view().slice(0, held));
                    for (int t = 0; t < n; ++t)
                        std::copy_n(rows.view().at(t, 0), of.head_dim, keys.view().at(held + t, 0));
                    s.prefill(0, rows.view(), kvq::no_rows(), q.view(), out.view());
                    errors e;
                    if (q.tokens() > 0) e.add(out.values(), attended(keys, q, of.value_dim));
                    REQUIRE(e.relative() <= 1e-2);  // a window of bf16 rounds to 8 bits
                    break;
                }
                case 3:
                    s.trim(random.between(std::max(0, held - 60), held));
                    break;
                case 4:
                    if (const int a = random.between(0, held), b = random.between(a, held); moves)
                        s.erase(a, b);
                    break;
                case 5:
                    if (moves) s.shift(random.between(0, held), held, random.between(-40, 40));
                    break;
                case 6:
                    all[0] = all[1].fork();
                    break;
                case 7: {
                    if (n == 0) break;
                    const int drafted = std::min(n, 9);
                    s.append_draft(0, rows.slice(0, drafted), kvq::no_rows());
                    const auto rows_of = test::random_tensor(random, drafted, 3, of.head_dim);
                    test::tensor<float> drafts(drafted, 3, of.value_dim);
                    s.attend(0, rows_of.view(), drafts.view());
                    errors e;
                    e.add(drafts.values(), attended(s, of, rows_of));
                    REQUIRE(e.relative() <= 1e-3);
                    std::vector<int> path;
                    for (int i = 0; i < drafted; ++i)
                        if (random.one_in(2)) path.push_back(i);
                    s.keep(path);
                    break;
                }
                case 8:
                    cache.requantize(s, {.key = random.between(0, 4), .new_pages = random.one_in(2)});
                    break;
                default:
                    s = test::restored(cache, test::saved(s));
            }
            if (s.tokens() == 0) continue;
            const auto rows_of = test::random_tensor(random, std::min(s.tokens(), random.between(1, 3)),
                                                     random.between(1, 40), of.head_dim);
            test::tensor<float> found(rows_of.tokens(), rows_of.view().heads, of.value_dim);
            s.attend(0, rows_of.view(), found.view());
            errors e;
            const auto want = attended(s, of, rows_of);
            e.add(found.values(), want);
            CAPTURE(s.tokens());
            REQUIRE(e.relative() <= (found.values().size() < 32     ? 1e-2
                                     : found.values().size() < 1000 ? 1e-3
                                                                    : 5e-4));
            test::tensor<float> keys(1, 1, of.head_dim), values(1, 1, of.value_dim);
            const int at = random.between(0, s.tokens() - 1);
            s.dequantize(0, tensor::key, at, keys.view());
            s.dequantize(0, tensor::value, at, values.view());
            REQUIRE(std::equal(values.values().begin(), values.values().end(), keys.values().begin()));
        }
    }
}

TEST_CASE("a latent is stored once: 400 bytes per token at 4 bits, with its rotary channels in 16") {
    const kvq::layer of = kvq::latent_attention(512, 64);
    kvq::cache_options options;
    const auto bytes = [&](const kvq::format& keys) {
        return kvq::cache({of}, {.keys = keys}).page_bytes(tensor::key, 0, 1, 128);
    };
    for (const kvq::format& last : {format_of<kvq::int8>(), format_of<kvq::ref8::keys>()}) {
        CHECK(bytes(kvq::with_last_channels(format_of<kvq::kivi<4, 64>::keys>(), last, 64)) == 356u * 128u);
        CHECK(bytes(kvq::with_last_channels(format_of<kvq::std4::keys>(), last, 64)) <= 350u * 128u);
    }
    options.keys = kvq::with_fp16_channels(format_of<kvq::std4::keys>(), 64);
    options.rollback = 0;
    test::counting_resource memory;
    options.memory = &memory;
    kvq::cache cache({of, of}, options);
    CHECK(cache.page_bytes(tensor::key, 0, 1, 128) <= 410u * 128u);
    test::generator random(1);
    const auto rows = test::random_tensor(random, 4 * 128, 1, 576);
    auto s = cache.new_sequence();
    for (int i = 0; i < 2; ++i) s.append(i, rows.view(), kvq::no_rows());
    const kvq::usage_report u = s.usage();
    CHECK(u.pages == 2 * 4);
    CHECK(u.quantized == 2 * 4 * cache.page_bytes(tensor::key, 0, 1, 128));
    CHECK(u.window == 0);
    CHECK(u.bytes == memory.bytes());
    CHECK(kvq::footprint(cache, 4 * 128, 1).total == memory.bytes());
    const auto by_format = kvq::usage_rows(s);
    REQUIRE(by_format.size() == 2);
    CHECK(by_format[0].role == tensor::key);
    kvq::cache_options shorter = options;
    shorter.page_tokens = 96;
    kvq::cache other(cache.layers(), shorter);
    const auto again = test::restored(other, test::saved(s), {.convert = true});
    CHECK(again.tokens(1) == 4 * 128);
    CHECK(again.usage().pages == 2 * 6);
    // Attention takes scratch for a tile, however long the text.
    CHECK(cache.attention_workspace(1 << 20, 16) - cache.attention_workspace(1 << 17, 16) <
          std::size_t{1 << 20} * 16 * 4);
}

TEST_CASE("a block is that of the first channels and that of the last ones, in the bytes of both formats") {
    test::generator random(test::seed());
    INFO("KVQ_SEED=", test::seed());
    const kvq::format firsts[] = {format_of<kvq::std4::keys>(), format_of<kvq::kivi<4>::keys>(),
                                  format_of<kvq::std4_h::keys>(), format_of<kvq::int8>()},
                      lasts[] = {format_of<kvq::full<kvq::float16>>(), format_of<kvq::int8>(),
                                 format_of<kvq::ref8::keys>()};
    for (const kvq::format& first : firsts)
        for (const kvq::format& last : lasts)
            for (const int tokens : {1, 37, 128})
                for (const int n : {4, 150}) {
                    CAPTURE(first.name());
                    CAPTURE(last.name());
                    CAPTURE(tokens);
                    const kvq::format both = kvq::with_last_channels(first, last, n);
                    const int latent = random.between(1, 80);
                    const kvq::block_shape all{tensor::key, tokens, latent + n},
                        parts[] = {{tensor::key, tokens, latent}, {tensor::key, tokens, n}};
                    const auto x = test::random_tensor(random, tokens, 1, all.dim);
                    std::vector<float> of_part[2], want(all.values());
                    for (int t = 0; t < tokens; ++t)
                        for (int c = 0; c < all.dim; ++c)
                            of_part[c >= latent].push_back(x.view().at(t, 0)[c]);
                    std::vector<std::byte> bytes[2];
                    for (const int i : {0, 1}) {
                        const kvq::format& f = i == 0 ? first : last;
                        bytes[i].resize(f.block_bytes(parts[i]));
                        f.functions().quantize_values(f.scheme(), parts[i], {}, of_part[i].data(),
                                                      bytes[i].data());
                        std::vector<float> read(parts[i].values());
                        f.functions().dequantize(f.scheme(), parts[i], {}, bytes[i].data(),
                                                 kvq::float_type::fp32, read.data(), parts[i].dim,
                                                 read.data());
                        for (int t = 0; t < tokens; ++t)
                            std::copy_n(&read[static_cast<std::size_t>(t * parts[i].dim)], parts[i].dim,
                                        &want[static_cast<std::size_t>(t * all.dim + i * latent)]);
                    }
                    bytes[0].insert(bytes[0].end(), bytes[1].begin(), bytes[1].end());
                    std::vector<std::byte> block(both.block_bytes(all), std::byte{0xa5});
                    std::vector<float> values = x.values();
                    both.functions().quantize_values(both.scheme(), all, {}, values.data(), block.data());
                    REQUIRE(block == bytes[0]);
                    // in place, and to rows that lie apart
                    both.functions().dequantize(both.scheme(), all, {}, block.data(), kvq::float_type::fp32,
                                                values.data(), all.dim, values.data());
                    REQUIRE(values == want);
                    std::vector<float> apart(static_cast<std::size_t>(tokens * (all.dim + 3))),
                        scratch(all.values());
                    both.functions().dequantize(both.scheme(), all, {}, block.data(), kvq::float_type::fp32,
                                                apart.data(), all.dim + 3, scratch.data());
                    for (int t = 0; t < tokens; ++t)
                        REQUIRE(std::equal(want.begin() + t * all.dim, want.begin() + (t + 1) * all.dim,
                                           apart.begin() + t * (all.dim + 3)));
                }
}

TEST_CASE("outputs of a 4-bit latent are off by what its codec loses, and no more") {
    test::generator random(test::seed());
    INFO("KVQ_SEED=", test::seed());
    const kvq::layer of = kvq::latent_attention(512, 64);
    auto rows = test::random_tensor(random, 1000, 1, 576);
    for (int t = 0; t < rows.tokens(); ++t)
        for (const int c : {3, 77, 300, 520, 575}) rows.view().at(t, 0)[c] *= 8.0f;
    const auto q = test::random_tensor(random, 1, 16, 576);
    for (const kvq::format& f :
         {format_of<kvq::std4::keys>(), format_of<kvq::affine<4, kvq::per_channel<64>>>(),
          format_of<kvq::std4_h::keys>()}) {
        CAPTURE(f.name());
        kvq::cache cache({of}, {.keys = kvq::with_fp16_channels(f, 64)});
        auto s = cache.new_sequence();
        s.append(0, rows.view(), kvq::no_rows());
        test::tensor<float> out(1, 16, 512);
        s.attend(0, q.view(), out.view());
        const auto exact = attended(rows, q, 512), decoded = attended(s, of, q);
        errors own, codec;
        own.add(out.values(), exact);
        for (std::size_t i = 0; i < exact.values().size(); ++i) {
            codec.difference += std::pow(decoded.values()[i] - exact.values()[i], 2.0);
            codec.norm += exact.values()[i] * exact.values()[i];
        }
        CHECK(own.relative() <= 1.1 * codec.relative());
        CHECK(own.relative() >= 0.9 * codec.relative());
    }
}

TEST_CASE("a prompt in expanded form beside its latent history, merged, is the prompt over latents") {
    test::generator random(test::seed());
    INFO("KVQ_SEED=", test::seed());
    constexpr int latent = 24, rotary = 4, heads = 3, nope = 8, before = 90, chunk = 40;
    const kvq::format exact = format_of<kvq::full<float>>();
    const kvq::cache_options options{.keys = exact, .window = exact, .page_tokens = 32};
    kvq::cache latents({kvq::latent_attention(latent, rotary)}, options),
        expanded({kvq::full_attention({heads, nope + rotary, nope})}, options);
    const auto x = test::random_tensor(random, before + chunk, 1, latent + rotary);
    const auto up_keys = test::random_tensor(random, heads, nope, latent),
               up_values = test::random_tensor(random, heads, nope, latent);
    const auto q = test::random_tensor(random, chunk, heads, nope + rotary);
    // absorbed queries; keys and values of the chunk
    test::tensor<float> absorbed(chunk, heads, latent + rotary), k(chunk, heads, nope + rotary),
        v(chunk, heads, nope);
    for (int t = 0; t < chunk; ++t)
        for (int h = 0; h < heads; ++h) {
            const float* const token = x.view().at(before + t, 0);
            for (int i = 0; i < nope; ++i)
                for (int c = 0; c < latent; ++c) {
                    absorbed.view().at(t, h)[c] += up_keys.view().at(h, i)[c] * q.view().at(t, h)[i];
                    k.view().at(t, h)[i] += up_keys.view().at(h, i)[c] * token[c];
                    v.view().at(t, h)[i] += up_values.view().at(h, i)[c] * token[c];
                }
            std::copy_n(q.view().at(t, h) + nope, rotary, absorbed.view().at(t, h) + latent);
            std::copy_n(token + latent, rotary, k.view().at(t, h) + nope);
        }
    const auto up = [&](const test::tensor<float>& sums) {
        test::tensor<float> out(chunk, heads, nope);
        for (int t = 0; t < chunk; ++t)
            for (int h = 0; h < heads; ++h)
                for (int i = 0; i < nope; ++i)
                    for (int c = 0; c < latent; ++c)
                        out.view().at(t, h)[i] += up_values.view().at(h, i)[c] * sums.view().at(t, h)[c];
        return out;
    };
    const kvq::score_scale scale{0.2f};
    kvq::workspace space;
    std::vector<float> lse[2];
    for (auto& of : lse) of.resize(chunk * heads);
    auto s = latents.new_sequence(), e = expanded.new_sequence();
    s.append(0, x.slice(0, before), kvq::no_rows());
    test::tensor<float> sums(chunk, heads, latent), own(chunk, heads, nope), merged(chunk, heads, nope);
    s.attend(0, absorbed.view(), kvq::output_view(sums.view()).with_lse(lse[0].data()),
             kvq::mods{kvq::cross_attention{}, scale});
    e.prefill(0, k.view(), v.view(), q.view(), kvq::output_view(own.view()).with_lse(lse[1].data()), scale,
              kvq::serial_executor{}, space);
    auto history = up(sums);
    const kvq::partial_output parts[] = {{history.values().data(), lse[0].data()},
                                         {own.values().data(), lse[1].data()}};
    kvq::merge_partials(parts, chunk * heads, nope, merged.values().data());
    s.prefill(0, x.slice(before, chunk), kvq::no_rows(), absorbed.view(), sums.view(), scale,
              kvq::serial_executor{}, space);
    const auto want = up(sums);
    for (std::size_t i = 0; i < want.values().size(); ++i)
        CHECK(merged.values()[i] == doctest::Approx(want.values()[i]).epsilon(1e-3).scale(1.0));
}

TEST_CASE("keys beyond fp16, or below it, are values all the same") {
    test::generator random(3);
    const auto check = [&](const kvq::format& f, int values, float size) {
        CAPTURE(values);
        CAPTURE(size);
        const kvq::layer of = kvq::latent_attention(64, 0, values);
        kvq::cache cache({of}, {.keys = f, .window = format_of<kvq::full<float>>(), .page_tokens = 32});
        auto rows = test::random_tensor(random, 64, 1, 64);
        for (float& x : rows.values()) x *= size;
        auto s = cache.new_sequence();
        s.append(0, rows.view(), kvq::no_rows());
        auto q = test::random_tensor(random, 1, 20, 64);
        for (float& x : q.values()) x /= size;
        test::tensor<float> out(1, 20, values);
        s.attend(0, q.view(), out.view());
        errors e;
        e.add(out.values(), attended(s, of, q));
        CHECK(e.relative() <= 5e-4);
    };
    for (const float size : {1e6f, 1e-8f}) check(format_of<kvq::int8>(), 64, size);
    for (const int values : {64, 40}) check(format_of<kvq::std4_h::keys>(), values, 1e-7f);
    // All of its blocks are dequantized.
    for (const float size : {1e6f, 1e-7f})
        check(test::made<test::usual>(test::magnitude_bytes(size / 30)), 64, size);
}

TEST_CASE("what a latent layer cannot be, and cannot do, is refused with its numbers") {
    kvq::cache_options options;
    options.keys = {kvq::with_fp16_channels(format_of<kvq::affine<4>>(), 8), format_of<kvq::affine<4>>(),
                    format_of<kvq::int8>()};
    const auto says = [&](auto&& call, const char* part) {
        const std::string message = test::message_of(call);
        INFO(message);
        CHECK(test::contains(message, part));
    };
    const auto refused = [&](const kvq::layer& of, const char* part) {
        says([&] { kvq::cache cache({of}, options); }, part);
    };
    refused(kvq::latent_attention(32, 8, 41),
            "layer 0, latent of 32 + 8 channels, 1 x 40 and 41: it has at least 1 latent channel, and values "
            "are the first of its 40, not 41");
    refused(kvq::latent_attention(0, 8), "latent of 0 + 8 channels");
    refused(kvq::latent_attention(32, -1), "latent of 32 + -1 channels");
    kvq::layer of = kvq::latent_attention(32, 8);
    of.rotary = kvq::rotary_embedding{.dims = 8};
    const char* const turned =
        "layer 0, latent of 32 + 8 channels, 1 x 40 and 32: a rotation turns its last 8 channels, not those "
        "from 0";
    refused(of, turned);
    kvq::cache_options turning = options;
    turning.rotary = {kvq::rotary_embedding{.dims = 8}};
    says([&] { kvq::cache cache({kvq::latent_attention(32, 8)}, turning); }, turned);
    of = kvq::latent_attention(32, 8);
    of.formats.key = 1;
    refused(
        of,
        "layer 0, latent of 32 + 8 channels, 1 x 40 and 32: key format 1, affine4-token-g64-fp16, does not "
        "keep its 8 rotary channels in 8 or 16 bits: name one that ends in -fp16x8, -int8x8 or -ref8x8, or "
        "has codes of 8 bits");
    of = kvq::latent_attention(32, 4);
    refused(of, "key format 0, affine4-token-g64-fp16-fp16x8, does not keep its 4 rotary channels");
    refused(kvq::latent_attention(8, 0),
            "affine4-token-g64-fp16-fp16x8 has 8 channels in fp16, and a layer of the cache has keys of 8");
    of = kvq::full_attention({1, 64});
    of.rotary_channels = 8;
    refused(of, "layer 0, full attention of 1 x 64: it has no rotary channels apart, got 8");
    refused(kvq::sliding_attention(4, kvq::latent_attention(32, 8)), "it has no rotary channels apart");

    of = kvq::latent_attention(32, 8);
    of.rotary = kvq::rotary_embedding{.dims = 8, .first_channel = 32};
    kvq::layer wide = kvq::latent_attention(32, 8, 40);
    wide.rotary = of.rotary;
    options.page_tokens = 16;
    kvq::cache cache({of}, options), wider({wide}, options);
    test::generator random(4);
    const auto x = test::random_tensor(random, 40, 1, 40);
    auto s = cache.new_sequence(), t = wider.new_sequence();
    s.append(0, x.view(), kvq::no_rows());
    t.append(0, x.view(), kvq::no_rows());
    says([&] { s.append(0, x.view(), x.view()); },
         "layer 0, latent of 32 + 8 channels, 1 x 40 and 32: it takes keys alone, and v has "
         "40 "
         "tokens, not 0");
    says([&] { t.erase(3, 9); },
         "layer 0, latent of 32 + 8 channels, 1 x 40: its 40 values have rotary channels, which do "
         "not turn "
         "when keys move by -6 positions");
    // Moved keys, and a message that says that the values have them.
    const char* const turns = "its 40 values have rotary channels, which do not turn when keys move by -6";
    auto moved = s.fork();
    moved.erase(3, 9);
    kvq::page_receiver receiver(wider);
    std::vector<std::byte> bytes;
    kvq::send_pages(moved, 0, [&](const void* data, std::size_t n) {
        const auto* const from = static_cast<const std::byte*>(data);
        bytes.insert(bytes.end(), from, from + n);
    });
    test::memory_source messages{bytes};
    std::vector<std::byte> storage;
    says(
        [&] {
            while (true) {
                kvq::page_message m = kvq::read_page(messages, storage);
                m.latent = {40, 8};
                receiver.accept(m);
            }
        },
        turns);
    kvq::page_list pages(wider, 0);
    alignas(16) const std::byte page[1024] = {};
    kvq::borrowed_pages lent{.keys = page, .key_capacity = 16, .tokens = 4, .shift = -6};
    says([&] { pages.add(lent); }, turns);
    lent.shift = 0;
    pages.add(lent);
    CHECK(pages.tokens() == 4);
    says([&] { cache.requantize(s, {.key = 1}); }, "does not keep its 8 rotary channels");
    says([&] { cache.commit_to(tensor::key, 1); }, "does not keep its 8 rotary channels");
    cache.requantize(s, {.key = 2});
    says([&] { (void)cache.shape(); }, "not all layers of the cache hold values: layer 0, latent of 32 + 8");
    says([&] { kvq::ring ring(s.fork(), {.window = 5}); },
         "a ring needs layers that hold all of their tokens, keys and values, not layer 0, latent of 32 + 8");
    says([&] { test::restored(wider, test::saved(s)); }, "value_dim 32, the cache 40");
    kvq::layer same = kvq::full_attention({1, 40, 32});
    same.rotary = of.rotary;
    options.values = format_of<kvq::int8>();
    kvq::cache full({same}, options);
    says([&] { test::restored(full, test::saved(s)); }, "kind 6, the cache 0");
    says(
        [&] {
            kvq::cache wrong({of, kvq::shared_with(0)}, options);
        },
        "it needs one with keys and values of its own text, not layer 0, latent of 32 + 8");
    CHECK(s.tokens() == 40);
    says([&] { (void)kvq::with_fp16_channels(format_of<kvq::int8>(), -1); },
         "at least 0 channels in fp16, not -1");
    says([&] { (void)kvq::with_fp16_channels({}, 8); }, "not an empty one");
    const kvq::format eight = kvq::with_fp16_channels(format_of<kvq::int8>(), 8);
    const char* const twice = "cannot get 8 channels in fp16: they come once, and before bounds";
    says([&] { (void)kvq::with_fp16_channels(eight, 8); }, twice);
    says([&] { (void)kvq::with_fp16_channels(kvq::with_bounds(format_of<kvq::int8>()), 8); }, twice);
    says([&] { (void)kvq::with_last_channels(format_of<kvq::int8>(), format_of<kvq::std4_h::keys>(), 8); },
         "last channels are in fp16, int8 or ref8, not in hadamard-");
    says(
        [&] {
            (void)kvq::with_last_channels(
                kvq::with_last_channels(format_of<kvq::int8>(), format_of<kvq::int8>(), 8),
                format_of<kvq::ref8::keys>(), 4);
        },
        "int8-token-fp32-int8x8 cannot get 4 channels in ref8: they come once");
    CHECK(kvq::cache({of}, {.keys = kvq::with_bounds(eight)}).attention_workspace(128, 4) > 0);
    // Parameters of short pages are no bits of codes.
    says([&] { kvq::cache short_pages({of}, {.keys = format_of<kvq::affine<4>>(), .page_tokens = 1}); },
         "does not keep its 8 rotary channels");
    says([&] { kvq::cache short_pages({of}, {.keys = format_of<kvq::std4::keys>(), .page_tokens = 4}); },
         "does not keep its 8 rotary channels");
}

struct scarce_records : kvq::token_records {
    scarce_records() : token_records(kvq::record_layout_named("int8-token-head")) {}
    void check(const kvq::cache_shape& shape, tensor role) const {
        if (shape.dim(role) == 128) throw std::bad_alloc();
        token_records::check(shape, role);
    }
};

TEST_CASE("keys of an index are beside latents whose format they do not fit") {
    const auto of_key = [](int format, kvq::layer l) {
        l.formats.key = format;
        return l;
    };
    const kvq::layer latent = kvq::latent_attention(512, 64), index = kvq::index_layer(128);
    const kvq::format records =
                          test::made<test::usual>(kvq::records_of<kvq::record_layout_number("mla-656")>{}),
                      bytes = format_of<kvq::int8>();
    const auto options = [](kvq::format_list keys) {
        return kvq::cache_options{.keys = std::move(keys), .sinks = 2, .recent = 5, .page_tokens = 16};
    };
    test::counting_resource memory;
    kvq::cache_options both = options({records, bytes});
    both.memory = &memory;
    kvq::cache cache({latent, of_key(1, index)}, both), of_latents({latent}, options(records)),
        of_index({index}, options(bytes));
    test::generator random(6);
    const auto none = kvq::no_rows();
    const auto k = test::random_tensor(random, 60, 1, 576), i = test::random_tensor(random, 60, 1, 128),
               q = test::random_tensor(random, 2, 3, 576), index_q = test::random_tensor(random, 2, 4, 128);
    const std::vector<float> weights(8, 0.5f);
    auto s = cache.new_sequence(), latents = of_latents.new_sequence(), keys = of_index.new_sequence();
    s.append(0, k.view(), none);
    s.append(1, i.view(), none);
    latents.append(0, k.view(), none);
    keys.append(0, i.view(), none);
    CHECK(s.usage().bytes == memory.bytes());
    CHECK(kvq::footprint(cache, 60, 1).total == memory.bytes());
    CHECK(s.usage().quantized == latents.usage().quantized + keys.usage().quantized);
    test::tensor<float> want(2, 3, 512);
    std::vector<std::int32_t> best(10);
    latents.attend(0, q.view(), want.view());
    keys.select(0, index_q.view(), weights.data(), 5, best.data());
    const auto check = [&](const kvq::sequence& of) {
        test::tensor<float> out(2, 3, 512);
        std::vector<std::int32_t> found(10);
        of.attend(0, q.view(), out.view());
        of.select(1, index_q.view(), weights.data(), 5, found.data());
        CHECK(out.values() == want.values());
        CHECK(found == best);
    };
    check(s);
    check(test::restored(cache, test::saved(s)));
    CHECK(cache.attention_workspace(60, 3) > 0);
    CHECK(cache.add_format(tensor::key, kvq::with_fp16_channels(format_of<kvq::std4::keys>(), 64)) == 2);
    check(s);
    cache.requantize(s, {.key = 2, .first_layer = 0, .last_layer = 1});
    const auto says = [&](auto&& call, const char* part) {
        const std::string message = test::message_of(call);
        INFO(message);
        CHECK(test::contains(message, part));
    };
    says([&] { cache.requantize(s, {.key = 0, .first_layer = 1, .last_layer = 2}); },
         "mla-656 has 576 channels, but head_dim is 128");
    says([&] { cache.commit_to(tensor::key, 0); }, "mla-656 has 576 channels, but head_dim is 128");
    says([&] { kvq::cache wrong({latent, index}, options({records, bytes})); }, "mla-656 has 576 channels");
    alignas(16) const std::byte page[16 * 656] = {};
    kvq::page_list lent(cache, 1);
    says([&] { lent.add({.keys = page, .key_format = 1, .key_capacity = 16, .tokens = 4}); },
         "mla-656 has 576 channels, but head_dim is 128");
    says([&] { (void)cache.add_format(tensor::key, kvq::with_fp16_channels(bytes, 576)); },
         "has 576 channels in fp16, and a layer of the cache has keys of 576");
    // Memory that runs out says nothing about what fits.
    const kvq::format scarce = test::made<test::usual>(scarce_records());
    CHECK_THROWS_AS(kvq::cache({latent, of_key(1, index)}, options({scarce, bytes})), std::bad_alloc);
    CHECK_THROWS_AS((void)cache.add_format(tensor::key, scarce), std::bad_alloc);
    CHECK(cache.table(tensor::key).listed() == 3);
    CHECK(cache.add_format(tensor::key, format_of<kvq::ref8::keys>()) == 3);
}

TEST_CASE("messages and files of an index, or of a latent that is divided in another way, are refused") {
    const kvq::layer layers[] = {kvq::latent_attention(32, 8), kvq::latent_attention(32, 8, 24),
                                 kvq::latent_attention(36, 4, 32), kvq::index_layer(40),
                                 kvq::full_attention({1, 40, 32})};
    const kvq::cache_options options{
        .keys = format_of<kvq::int8>(), .values = format_of<kvq::int8>(), .page_tokens = 16};
    test::generator random(5);
    const auto k = test::random_tensor(random, 40, 1, 40), v = test::random_tensor(random, 40, 1, 32);
    for (const kvq::layer& mine : layers) {
        kvq::cache from({mine}, options);
        auto s = from.new_sequence();
        const bool has_values = mine.kind == kvq::layer_kind::full;
        s.append(0, k.view(), has_values ? v.view() : kvq::no_rows());
        std::vector<std::byte> bytes;
        kvq::send_pages(s, 0, [&](const void* data, std::size_t n) {
            const auto* const first = static_cast<const std::byte*>(data);
            bytes.insert(bytes.end(), first, first + n);
        });
        for (const kvq::layer& other : layers) {
            kvq::cache to({other}, options);
            kvq::page_receiver receiver(to);
            test::memory_source messages{bytes};
            std::vector<std::byte> storage;
            const auto receive = [&] {
                while (messages.position < bytes.size()) receiver.accept(kvq::read_page(messages, storage));
                return receiver.finish(40);
            };
            if (&mine == &other) {
                CHECK(test::saved(receive()) == test::saved(s));
                CHECK(test::saved(test::restored(to, test::saved(s))) == test::saved(s));
                continue;
            }
            const auto text = [](const kvq::layer& of) { return kvq::detail::describe_layer(0, of); };
            CHECK(test::message_of(receive) ==
                  "kvq: a page of " + (has_values ? "a layer with keys and values" : text(mine)) +
                      " does not belong to " + text(other));
            CHECK(test::contains(test::message_of([&] { test::restored(to, test::saved(s)); }),
                                 ", the cache "));
            CHECK(to.bytes_in_use() == 0);
        }
    }
}

}  // namespace latent_tests
