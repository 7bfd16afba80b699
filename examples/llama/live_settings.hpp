// What a live cache (live_cache.hpp) does, as options say it, and what it holds.
#pragma once

#include "schemes.hpp"

#include <cstddef>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace llama {

// Tokens at least `age` behind the end have this scheme.
struct tier_choice {
    int age;
    std::string scheme;
};

struct live_settings {
    std::vector<tier_choice> tiers;
    std::size_t budget = std::numeric_limits<std::size_t>::max();  // bytes of pages
    int requantize_at = 0;                                         // tokens; 0: never
    std::string requantize_to;
    int reload_at = 0;  // tokens at which the cache is saved and restored, once; 0: never
};

// What a live cache holds in one scheme.
struct held_scheme {
    std::string scheme;
    int tokens;         // of the keys of layer 0
    std::size_t bytes;  // of all layers
};

// "64:int8,128:kivi-4", "128:kivi-4". Both throw std::invalid_argument.
std::vector<tier_choice> parse_tiers(std::string_view text);
void parse_requantize(std::string_view text, live_settings& live);

// A live cache as a scheme for evaluate and generate.
scheme_choice live_scheme(const live_settings& live, const cache_settings& settings);

}  // namespace llama
