// What kvq_llama does with --device cuda. Programs without the engine on the device have without_device.cpp
// instead of on_device.cpp.
#pragma once

#include "../evaluate.hpp"
#include "../generate.hpp"
#include "../live_settings.hpp"

#include <iosfwd>

namespace llama {

struct device_settings {
    bool fp16 = false;            // weights and activations; else bf16
    int batch = 8;                // sequences that run at the same time
    std::size_t cache_bytes = 0;  // 0: no limit
    live_settings live;           // tiers and a budget
};

// Continues each of the prompts, `samples` times with one seed after the other, in one batch; what prompts
// begin with is read once. Texts appear in order. The result's seconds are those of the batch.
generation_result generate_on_device(const model_weights& weights, const tokenizer& pieces,
                                     const scheme_choice& scheme, const generation_settings& settings,
                                     const std::vector<std::string>& prompts, int samples,
                                     const device_settings& on, std::ostream& out);

std::vector<scheme_result> evaluate_on_device(const model_weights& weights, std::span<const int> tokens,
                                              std::span<const scheme_choice> schemes,
                                              const evaluation_settings& settings, const device_settings& on);

}  // namespace llama
