// SPDX-License-Identifier: MIT
// A kvq cache gives a model the logits of the textbook cache, with windows and soft caps.
#include <dequantized_cache.hpp>
#include <kvq_cache.hpp>

#include <doctest/doctest.h>
#include <kvq/cpu/scalar.hpp>
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/full.hpp>
#include <kvq/schemes/presets.hpp>

#include "run_model.hpp"
#include "tiny_model.hpp"

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

            kvq::cache_options options;
            options.page_tokens = 8;
            options.keys = options.values = options.window =
                kvq::make_format<kvq::full<float>, kvq::scalar>();
            for (const int chunk : {1, 13}) {
                CAPTURE(chunk);
                llama::kvq_cache cache(model.shape(), options);
                llama::activations space;
                llama::matrix logits;
                model.logits(model.read(tokens, 0, cache, chunk, space), logits);
                const std::vector<float> got(logits.data(), logits.data() + logits.size());
                CHECK(test::distance(got, expected) < 1e-4);
            }
        }
    }
}

// What the evaluation of schemes rests on: the first chunk of a window is read once, and other caches get its keys and values.
TEST_CASE_TEMPLATE("a chunk that is appended leaves what a chunk that was read leaves, bit for bit", Cache,
                   llama::kvq_cache, llama::dequantized_cache) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const llama::model_shape shape{
        .dim = 32, .hidden_dim = 32, .layers = 2, .heads = 4, .kv_heads = 2, .vocab = 8, .context = 512};
    for (int round = 0; round < 10; ++round) {
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
