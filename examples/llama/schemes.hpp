// The schemes by name: "fp16", "affine-4-g64", "kivi-2-g64/int8", "kivi-2+s4+r32", ...
#pragma once

#include "kv_cache.hpp"

#include <kvq/cache/options.hpp>
#include <kvq/format/format.hpp>
#include <kvq/quant/calibration.hpp>

#include <memory>
#include <string>
#include <string_view>

namespace llama {

struct live_settings;

struct cache_settings {
    int sinks = 0;
    int recent = 0;
    int page_tokens = kvq::default_page_tokens;
    // First tokens of a sequence of whose keys it makes a plan, as presets do; 0: even widths.
    int plan_tokens = 0;
    // Tokens that a trim can take back where layers have windows.
    int rollback = kvq::cache_options{}.rollback;
};

struct scheme_choice {
    std::string label;
    cache_settings settings;
    std::string key_name{}, value_name{};
    kvq::format_pair formats{};   // empty: fp32 rows, the scheme "reference"
    bool use_statistics = false;  // "+stats"
    int own_statistics = 0;       // "+self": of so many first tokens of each sequence; 0: none
    std::shared_ptr<const live_settings> live{};  // not empty: the cache is a live one (live_cache.hpp)

    std::unique_ptr<kv_cache> make_cache(const model_shape& shape) const;

    // Do queries see tokens that are not quantized as fp16 has them?
    bool has_fp16_window() const;

    // Bytes of quantized pages of all layers and kv heads that hold the token; NaN for a live cache.
    double bytes_per_token(const model_shape& shape) const;

    // Makes keys that can use statistics from these.
    void give_statistics(const kvq::calibration& statistics);
};

// The name of a format, or of one for keys and one for values: "kivi-2-g64/int8". Suffixes: "+s4" (sinks) and
// "+r32" (recent) if they differ from the defaults, "+own" or "+own64" for plans of the keys of the first 512
// or 64 tokens of each sequence, which presets have, "+self" or "+self64" for keys and queries of these, and
// "+stats" for statistics of a text.
// Throws std::invalid_argument for a name that does not exist; the message lists the most similar names.
scheme_choice parse_scheme(std::string_view text, const cache_settings& defaults);

// The options of a cache. Pages of the window's own type are never quantized: fp32, bf16 and fp16 show the
// best possible result.
kvq::cache_options options_with(const cache_settings& settings, const kvq::format_pair& formats);

// The same without suffixes.
kvq::format_pair find_formats(std::string_view names);

// What a page does to a scheme whose parameters belong to more tokens than a page holds, as a sentence; else
// "".
std::string page_remark(const scheme_choice& scheme);

std::string all_scheme_names();

}  // namespace llama
