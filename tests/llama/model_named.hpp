// SPDX-License-Identifier: MIT
// A tiny model of each architecture, as GGUF files call it; "qwen3_5_text" is for folders.
#pragma once

#include <kvq/attention/rotary.hpp>

#include "tiny_model.hpp"

namespace test {

inline tiny_model model_named(const std::string& name) {
    tiny_model m;
    m.architecture = name;
    m.half_split = name != "llama";
    if (name == "qwen2") {
        m.biases = m.tied = true;
        m.theta = 1e6f;
    } else if (name == "qwen3") {
        m.head_norms = true;
        m.head_dim = 32;
        m.heads = 8;
        m.dim = 128;
        m.epsilon = 1e-6f;
    } else if (name == "mistral") {
        m.windows = {5, 5};
    } else if (name == "gemma") {
        m.gelu = m.tied = true;
        m.embedding_scale = 16.0f;
    } else if (name == "gemma2") {
        m.output_norms = m.gelu = m.tied = true;
        m.attention_softcap = 3.0f;
        m.logit_softcap = 5.0f;
        m.embedding_scale = 16.0f;
        m.windows = {4, 0};
    } else if (name == "gemma3") {
        m.output_norms = m.gelu = m.tied = m.head_norms = true;
        m.embedding_scale = 16.0f;
        m.layers = 7;
        m.hidden_dim = 64;
        m.windows = {3, 3, 3, 3, 3, 0, 3};
        const std::vector<double> local = kvq::rotary_frequencies(m.head_dim, 10000.0);
        m.theta = 1e6f;
        m.frequencies.assign(7, local);
        m.frequencies[5] = kvq::rotary_frequencies(m.head_dim, 1e6);
    }
    if (name == "qwen3_5_text") {
        m.head_norms = m.attention_gate = true;
        m.dim = 64;
        m.hidden_dim = 96;
        m.head_dim = 32;
        m.heads = 4;
        m.rotated = 8;
        m.epsilon = 1e-6f;
        m.layers = 4;
        m.recurrent = {true, true, true, false};
        m.frequencies.assign(4, kvq::rotary_frequencies(m.rotated, 10000.0));
    }
    return m;
}

}  // namespace test
