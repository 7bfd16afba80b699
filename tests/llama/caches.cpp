// SPDX-License-Identifier: MIT
// A kvq cache gives a model the logits of the textbook cache, with windows, soft caps and recurrent layers.
#include <dequantized_cache.hpp>
#include <kvq_cache.hpp>

#include <doctest/doctest.h>
#include <kvq/cpu/scalar.hpp>
#include <kvq/format/make_format.hpp>
#include <kvq/io/restore.hpp>
#include <kvq/io/save.hpp>
#include <kvq/schemes/full.hpp>
#include <kvq/schemes/presets.hpp>

#include "model_named.hpp"
#include "run_model.hpp"

namespace {

// A cache of 32-bit pages, whose sequence a test may look into.
class open_cache final : public llama::kvq_cache {
public:
    explicit open_cache(const llama::model_shape& shape) : kvq_cache(shape, options()) {}
    kvq::sequence& sequence() { return sequence_; }
    kvq::cache& cache() { return cache_; }

    static kvq::cache_options options() {
        kvq::cache_options options;
        options.page_tokens = 8;
        options.keys = options.values = options.window = kvq::make_format<kvq::full<float>, kvq::scalar>();
        options.snapshots.every = 8;
        return options;
    }
};

// The likeliest tokens after a text, one after the other. The text is read in chunks, from token `known` on.
std::vector<int> continued(const llama::model& model, llama::kv_cache& cache, std::vector<int> text,
                           int known, int count) {
    llama::activations space;
    llama::matrix logits;
    const std::size_t before = text.size();
    for (int i = 0; i < count; ++i) {
        const auto rest = std::span<const int>(text).subspan(static_cast<std::size_t>(known));
        model.logits(model.read(rest, known, cache, 13, space).bottomRows(1), logits);
        known = static_cast<int>(text.size());
        Eigen::Index best = 0;
        logits.row(0).maxCoeff(&best);
        text.push_back(static_cast<int>(best));
    }
    return {text.begin() + static_cast<std::ptrdiff_t>(before), text.end()};
}

}  // namespace

TEST_CASE("a kvq cache of 32-bit pages agrees with the textbook cache") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const test::temporary_folder folder;
    std::vector<int> tokens;
    for (int i = 0; i < 60; ++i) tokens.push_back(random.between(0, 39));
    for (const bool has_cap : {false, true}) {
        for (const bool has_windows : {false, true}) {
            CAPTURE(has_cap);
            CAPTURE(has_windows);
            test::tiny_model m;
            m.architecture = "gemma2";
            m.output_norms = m.gelu = m.tied = true;
            m.embedding_scale = 16.0f;
            m.attention_softcap = has_cap ? 3.0f : 0.0f;
            m.windows = has_windows ? std::vector<int>{7, 0} : std::vector<int>{};
            m.fill(random);
            test::write_file(folder / "m.gguf", m.gguf());
            const llama::model model(llama::load_model(folder / "m.gguf"));
            const std::vector<float> expected = test::logits_of(model, tokens);

            for (const int chunk : {1, 13}) {
                CAPTURE(chunk);
                open_cache cache(model.shape());
                llama::activations space;
                llama::matrix logits;
                model.logits(model.read(tokens, 0, cache, chunk, space), logits);
                const std::vector<float> got(logits.data(), logits.data() + logits.size());
                CHECK(test::distance(got, expected) < 1e-4);
            }
        }
    }
}

TEST_CASE("layers of Gemma 3 with a window free their pages, and the text stays that of the textbook") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const test::temporary_folder folder;
    test::tiny_model m = test::model_named("gemma3");
    m.architecture = "gemma3_text";
    m.dim = 64;
    m.embedding_scale = 8.0f;
    m.head_dim = 32;
    m.kv_heads = 1;
    for (std::vector<double>& of : m.frequencies) of = kvq::rotary_frequencies(m.head_dim, 10000.0);
    m.frequencies[5] = kvq::rotary_frequencies(m.head_dim, 1e6);
    m.fill(random);
    m.write_folder(folder, 1.0f);
    const llama::model model(llama::load_model(folder.path()));
    std::vector<int> text;
    for (int i = 0; i < 90; ++i) text.push_back(random.between(0, m.vocab - 1));

    open_cache cache(model.shape());
    llama::activations space;
    llama::matrix logits;
    model.logits(model.read(text, 0, cache, 13, space), logits);
    CHECK(test::distance(std::vector<float>(logits.data(), logits.data() + logits.size()), m.logits(text)) <
          5e-5);
    const auto held = [&](int layer) {
        const kvq::layer_pages pages = cache.sequence().pages(layer);
        int tokens = 0;
        for (int i = 0; i < pages.entries(); ++i) tokens += pages.at(i).tokens;
        return tokens;
    };
    const int page = cache.cache().options().page_tokens, rollback = cache.cache().options().rollback;
    for (int layer = 0; layer < m.layers; ++layer) {
        const int window = m.windows[static_cast<std::size_t>(layer)];
        if (window == 0)
            CHECK(held(layer) == 90);
        else
            CHECK(held(layer) < window + rollback + page);
    }

    llama::reference_cache textbook(model.shape());
    const std::vector<int> expected = continued(model, textbook, text, 0, 12);
    cache.trim(0);
    CHECK(continued(model, cache, text, 0, 12) == expected);
    cache.trim(95);
    std::vector<int> longer = text;
    longer.insert(longer.end(), expected.begin(), expected.begin() + 7);
    CHECK(continued(model, cache, longer, 95, 5) == std::vector<int>(expected.begin() + 7, expected.end()));
    CHECK(test::contains(test::message_of([&] { cache.trim(20); }), "sliding window of 3"));
    CHECK(cache.sequence().tokens() == 101);
}

TEST_CASE(
    "a model with recurrent layers goes back to any token, or to a file, and goes on with the same text") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const test::temporary_folder folder;
    test::tiny_model m = test::model_named("qwen3_5_text");
    m.fill(random);
    m.write_folder(folder, 1.0f);
    const llama::model model(llama::load_model(folder.path()));
    std::vector<int> text;
    const int prompt = random.between(20, 40), steps = 30;
    for (int i = 0; i < prompt; ++i) text.push_back(random.between(0, m.vocab - 1));
    llama::reference_cache textbook(model.shape());
    const std::vector<int> expected = continued(model, textbook, text, 0, steps);
    open_cache cache(model.shape());
    CHECK(continued(model, cache, text, 0, steps) == expected);
    text.insert(text.end(), expected.begin(), expected.end());

    llama::activations space;
    const auto goes_on = [&](llama::kv_cache& of, int from) {
        const int known = std::max(from + 1, prompt);
        const std::vector<int> before(text.begin(), text.begin() + known);
        return continued(model, of, before, from, prompt + steps - known) ==
               std::vector<int>(text.begin() + known, text.end());
    };
    int again = 0;
    for (int round = 0; round < 12; ++round) {
        const int n = round == 0 ? 0 : random.between(1, prompt + steps - 2);
        CAPTURE(n);
        again += n - cache.sequence().reach(n);
        const auto left = std::span<const int>(text).first(static_cast<std::size_t>(n));
        model.trim(left, cache, 13, space);
        CHECK(cache.sequence().tokens() == n);
        CHECK(goes_on(cache, n));
        model.trim(left, textbook, 13, space);
        CHECK(goes_on(textbook, n));
    }
    CHECK(again > 0);

    std::string file;
    kvq::save(cache.sequence(), [&](const void* data, std::size_t bytes) {
        file.append(static_cast<const char*>(data), bytes);
    });
    std::size_t at = 0;
    open_cache other(model.shape());
    other.sequence() = kvq::restore(other.cache(), [&](void* to, std::size_t bytes) {
        bytes = std::min(bytes, file.size() - at);
        std::memcpy(to, file.data() + at, bytes);
        at += bytes;
        return bytes;
    });
    const int n = prompt + steps / 2;
    model.trim(std::span<const int>(text).first(static_cast<std::size_t>(n)), other, 13, space);
    CHECK(goes_on(other, n));
}

// What the evaluation of schemes rests on: the first chunk of a window is read once, and other caches get its
// keys and values.
TEST_CASE_TEMPLATE("a chunk that is appended leaves what a chunk that was read leaves, bit for bit", Cache,
                   llama::kvq_cache, llama::dequantized_cache) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    llama::model_shape shape{
        .dim = 32, .hidden_dim = 32, .layers = 2, .heads = 4, .kv_heads = 2, .vocab = 8, .context = 512};
    for (int round = 0; round < 10; ++round) {
        shape.windows = round % 2 == 0 ? std::vector<int>{} : std::vector<int>{random.between(1, 100), 0};
        kvq::cache_options options;
        options.page_tokens = random.pick(std::vector<int>{16, 32, 64});
        options.sinks = random.between(0, 5);
        options.recent = random.between(0, 40);
        const auto formats = kvq::make_formats<kvq::std4, kvq::scalar>();
        options.keys = formats.keys;
        options.values = formats.values;
        Cache read(shape, options), appended(shape, options);
        kvq::thread_pool workers(1);
        const auto some = [&](int rows, int columns) {
            llama::matrix m(rows, columns);
            for (Eigen::Index i = 0; i < m.size(); ++i) m.data()[i] = static_cast<float>(random.normal());
            return m;
        };
        const int first = random.between(1, 200), second = random.between(1, 100);
        for (int layer = 0; layer < shape.layers; ++layer) {
            const llama::matrix k = some(first, shape.kv_dim()), v = some(first, shape.kv_dim()),
                                q = some(first, shape.query_dim());
            llama::matrix out(first, shape.query_dim());
            read.prefill(layer, k, v, q, out, workers);
            appended.append(layer, k, v);
        }
        CHECK(read.bytes() == appended.bytes());
        for (int layer = 0; layer < shape.layers; ++layer) {
            const llama::matrix k = some(second, shape.kv_dim()), v = some(second, shape.kv_dim()),
                                q = some(second, shape.query_dim());
            llama::matrix out(second, shape.query_dim()), other(second, shape.query_dim());
            read.prefill(layer, k, v, q, out, workers);
            appended.prefill(layer, k, v, q, other, workers);
            CHECK(out == other);
        }
        CHECK(read.bytes() == appended.bytes());
    }
}
