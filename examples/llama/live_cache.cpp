#include "live_cache.hpp"

#include "kvq_cache.hpp"

#include <kvq/io/file.hpp>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <sstream>
#include <stdexcept>

namespace llama {
namespace {

constexpr std::string_view names[] = {"fp16", "int8", "kivi-4", "kivi-3", "kivi-2"};

using live_kvq_cache = kvq::cache<kvq::formats<kvq::full<kvq::float16>, kvq::int8, kvq::kivi<4, 32>::keys,
                                               kvq::kivi<3, 32>::keys, kvq::kivi<2, 32>::keys>,
                                  kvq::formats<kvq::full<kvq::float16>, kvq::int8, kvq::kivi<4, 32>::values,
                                               kvq::kivi<3, 32>::values, kvq::kivi<2, 32>::values>,
                                  kvq::simd<>>;

int format_of(std::string_view scheme) {
    const auto* const found = std::find(std::begin(names), std::end(names), scheme);
    if (found == std::end(names)) {
        throw std::invalid_argument("a living cache has no scheme \"" + std::string(scheme) + "\"; it has " +
                                    live_scheme_names());
    }
    return static_cast<int>(found - std::begin(names));
}

class kvq_live_cache final : public live_cache {
public:
    kvq_live_cache(const model_shape& shape, const cache_settings& settings, const live_settings& live)
        : shape_(shape),
          live_(live),
          cache_({.layers = shape.layers, .kv_heads = shape.kv_heads, .head_dim = shape.head_dim()},
                 {.sinks = settings.sinks,
                  .recent = settings.recent,
                  .page_tokens = settings.page_tokens,
                  .byte_budget = live.budget}),
          sequence_(cache_.new_sequence()) {
        policy_.tiers.push_back({});
        for (const tier_choice& tier : live.tiers) {
            const int format = format_of(tier.scheme);
            policy_.tiers.push_back({tier.age, {format, format}});
        }
        if (live.budget != kvq::page_pool::no_budget) {
            // Room for the tokens of one step in every layer, and for the page that is being recoded.
            const std::size_t page =
                cache_.page_bytes<kvq::tensor::key>(0, settings.page_tokens) + sizeof(kvq::page);
            const std::size_t reserve = 2 * static_cast<std::size_t>(shape.layers) * page + 2 * page;
            if (live.budget <= reserve) {
                throw std::invalid_argument("a budget of " + std::to_string(live.budget) +
                                            " bytes is less than the " + std::to_string(reserve) +
                                            " bytes that one step needs");
            }
            policy_.byte_budget = live.budget - reserve;
        }
        if (live.requantize_at > 0) {
            request_.key = request_.value = format_of(live.requantize_to);
            request_.new_pages = true;
        }
    }

    void prefill(int layer, const const_rows& keys, const const_rows& values, const const_rows& queries,
                 rows out, worker_pool& workers) override {
        sequence_.prefill(layer, kvq::tokens_of(keys, shape_.kv_heads),
                          kvq::tokens_of(values, shape_.kv_heads), kvq::tokens_of(queries, shape_.heads),
                          kvq::tokens_of(out, shape_.heads), kvq::causal{}, workers, workspace_);
    }

    void trim(int tokens) override { sequence_.trim(tokens); }

    std::size_t bytes() const override { return sequence_.usage().bytes; }

    int step_tokens() const override { return cache_.options().page_tokens; }

    void end_of_step() override {
        if (live_.reload_at > 0 && !reloaded_ && sequence_.tokens() >= live_.reload_at) {
            reload();
            reloaded_ = true;
        }
        if (live_.requantize_at > 0 && sequence_.tokens() >= live_.requantize_at) {
            recoded_ += cache_.requantize(sequence_, request_).pages;
        }
        for (const auto& step : kvq::step_down(cache_, sequence_, policy_).steps) {
            recoded_ += step.pages;
        }
    }

    std::vector<held_scheme> held() const override {
        std::vector<held_scheme> all;
        for (const std::string_view name : names) {
            all.push_back({std::string(name), 0, 0});
        }
        for (const kvq::usage_row& row : kvq::usage_rows(sequence_)) {
            // Format 0 is the window, and so is the first listed one.
            held_scheme& scheme = all[static_cast<std::size_t>(std::max(0, row.format - 1))];
            scheme.bytes += row.codes + row.parameters + row.bookkeeping;
            if (row.layer == 0 && row.role == kvq::tensor::key) {
                scheme.tokens += row.tokens;
            }
        }
        return all;
    }

    std::size_t recoded() const override { return recoded_; }

    void save(const std::string& path) const override { kvq::save(sequence_, path, {model_name()}); }

    int load(const std::string& path) override {
        sequence_ = kvq::restore(cache_, path, {.model = model_name(), .convert = true});
        return sequence_.tokens();
    }

private:
    // Enough to refuse the cache of another model.
    std::string model_name() const {
        std::ostringstream name;
        name << "llama2.c dim " << shape_.dim << ", layers " << shape_.layers << ", heads " << shape_.heads
             << '/' << shape_.kv_heads << ", vocab " << shape_.vocab;
        return name.str();
    }

    // Through the bytes of a file and back.
    void reload() {
        std::vector<char> file;
        kvq::save(sequence_, [&](const void* data, std::size_t bytes) {
            const auto* const first = static_cast<const char*>(data);
            file.insert(file.end(), first, first + bytes);
        });
        sequence_ = cache_.new_sequence();  // a budget may have no room for both
        std::size_t at = 0;
        sequence_ = kvq::restore(cache_, [&](void* to, std::size_t bytes) {
            const std::size_t count = std::min(bytes, file.size() - at);
            std::memcpy(to, file.data() + at, count);
            at += count;
            return count;
        });
    }

    model_shape shape_;
    live_settings live_;
    live_kvq_cache cache_;
    live_kvq_cache::sequence_type sequence_;
    kvq::step_down_policy policy_;
    kvq::requantize_request request_;
    kvq::workspace workspace_;
    std::size_t recoded_ = 0;
    bool reloaded_ = false;
};

// "64:int8" -> 64, "int8"
tier_choice parse_tier(std::string_view text) {
    const std::size_t colon = text.find(':');
    int age = 0;
    const auto [end, failed] = std::from_chars(text.data(), text.data() + std::min(colon, text.size()), age);
    if (colon == std::string_view::npos || failed != std::errc{} || end != text.data() + colon || age < 0) {
        throw std::invalid_argument("\"" + std::string(text) +
                                    "\": expected a number of tokens and a scheme, like 64:int8");
    }
    const std::string_view scheme = text.substr(colon + 1);
    format_of(scheme);
    return {age, std::string(scheme)};
}

}  // namespace

std::unique_ptr<live_cache> make_live_cache(const model_shape& shape, const cache_settings& settings,
                                            const live_settings& live) {
    return std::make_unique<kvq_live_cache>(shape, settings, live);
}

std::string live_scheme_names() {
    std::string all;
    for (const std::string_view name : names) {
        all += all.empty() ? "" : ", ";
        all += name;
    }
    return all;
}

std::vector<tier_choice> parse_tiers(std::string_view text) {
    std::vector<tier_choice> tiers;
    while (!text.empty()) {
        const std::size_t comma = text.find(',');
        tiers.push_back(parse_tier(text.substr(0, comma)));
        text = comma == std::string_view::npos ? std::string_view{} : text.substr(comma + 1);
    }
    return tiers;
}

void parse_requantize(std::string_view text, live_settings& live) {
    const tier_choice choice = parse_tier(text);
    live.requantize_at = choice.age;
    live.requantize_to = choice.scheme;
}

scheme_choice live_scheme(const live_settings& live, const cache_settings& settings) {
    static constexpr scheme_entry entry{
        "live",
        [](const model_shape& shape, const cache_settings& chosen) -> std::unique_ptr<kv_cache> {
            return make_live_cache(shape, chosen, *chosen.live);
        },
        // Depends on how far it has come: see what it holds.
        [](const model_shape&, int) { return std::numeric_limits<double>::quiet_NaN(); }};
    std::ostringstream label;
    const char* gap = "";
    for (const tier_choice& tier : live.tiers) {
        label << gap << tier.age << ':' << tier.scheme;
        gap = ",";
    }
    if (live.budget != std::numeric_limits<std::size_t>::max()) {
        label << " in " << live.budget << " bytes";
    }
    if (live.requantize_at > 0) {
        label << (*gap ? " " : "") << "at " << live.requantize_at << ':' << live.requantize_to;
    }
    if (live.reload_at > 0) {
        label << (label.tellp() > 0 ? " " : "") << "reloaded at " << live.reload_at;
    }
    scheme_choice choice{label.tellp() > 0 ? label.str() : "fp16", &entry, settings};
    choice.settings.live = std::make_shared<const live_settings>(live);
    return choice;
}

}  // namespace llama
