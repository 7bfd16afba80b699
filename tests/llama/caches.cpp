// SPDX-License-Identifier: MIT
// A kvq cache gives a model the logits of the textbook cache, with windows and soft caps.
#include <kvq_cache.hpp>

#include <doctest/doctest.h>
#include <kvq/backends/scalar.hpp>
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/full.hpp>

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
