// A cache that changes the format of its pages: they step down by age or under a byte budget, or are
// requantized at a given length. It can be saved and restored.
#pragma once

#include "kvq_cache.hpp"
#include "live_settings.hpp"

#include <string>
#include <vector>

namespace llama {

class live_cache final : public kvq_cache {
public:
    // Starts in 16 bit. It lists the usual schemes and those of `live`.
    // Throws std::invalid_argument for a name that does not exist, and for a budget that has no room for a
    // step.
    live_cache(const model_shape& shape, const cache_settings& settings, const live_settings& live);

    int step_tokens() const override { return cache_.options().page_tokens; }
    void end_of_step(int tokens, bool prompt_ends) override;

    // Tokens of layer 0's keys, and bytes of all layers, by scheme.
    std::vector<held_scheme> held() const;
    // Number of pages that were requantized so far.
    std::size_t requantized() const { return requantized_; }

    // A safetensors file that describes itself (docs/guide/save.md). load() returns the number of tokens in
    // the file, and converts pages that were saved with other options. Both throw kvq::error.
    void save(const std::string& path) const;
    int load(const std::string& path);

private:
    kvq::layer_format formats_of(const std::string& scheme);
    std::string model_name() const;
    void reload();

    live_settings live_;
    struct listed_scheme {
        std::string name;
        kvq::layer_format formats;  // numbers among those that the cache lists
    };
    std::vector<listed_scheme> listed_;
    kvq::step_down_policy policy_;
    kvq::requantize_request request_;
    std::size_t requantized_ = 0;
    bool reloaded_ = false;
};

}  // namespace llama
