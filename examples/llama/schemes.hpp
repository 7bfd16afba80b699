// The schemes by name: "fp16", "affine-4-g64", "kivi-2+s4+r32", ...
#pragma once

#include "kv_cache.hpp"

#include <kvq/quant/calibration.hpp>

#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace llama {

struct live_settings;

struct cache_settings {
    int sinks = 0;
    int recent = 0;
    int page_tokens = 32;
    bool use_statistics = false;                           // "+stats"
    std::shared_ptr<const kvq::calibration> statistics{};  // null: schemes that could use them do without
    std::shared_ptr<const live_settings> live{};           // of the scheme "live" (live_cache.hpp)
};

struct scheme_entry {
    std::string_view name;
    std::unique_ptr<kv_cache> (*make)(const model_shape&, const cache_settings&);
    double (*bytes_per_token)(const model_shape&, int page_tokens);  // coded pages of all layers and kv heads
};

// Each list is a translation unit of its own, so that no single one takes long to compile.
std::span<const scheme_entry> full_schemes();
std::span<const scheme_entry> affine_g32_schemes();
std::span<const scheme_entry> affine_g64_schemes();
std::span<const scheme_entry> kivi_g32_schemes();
std::span<const scheme_entry> kivi_g64_schemes();
std::span<const scheme_entry> more_g32_schemes();
std::span<const scheme_entry> preset_grid_schemes();
std::span<const scheme_entry> preset_mixed_schemes();
std::span<const scheme_entry> plan_schemes();
std::span<const scheme_entry> ingredient_schemes();
std::span<const scheme_entry> published_group_schemes();
std::span<const scheme_entry> published_rotation_schemes();
std::span<const scheme_entry> published_kvarn_schemes();

struct scheme_choice {
    std::string label;
    const scheme_entry* entry;
    cache_settings settings;
};

// A name, then "+s4" (sinks) and "+r32" (recent) where they differ from the defaults, and "+stats" for statistics.
// Throws std::invalid_argument for a name that does not exist.
scheme_choice parse_scheme(std::string_view text, const cache_settings& defaults);

std::string all_scheme_names();

}  // namespace llama
