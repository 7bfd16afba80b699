#include "live_cache.hpp"

#include <kvq/io/file.hpp>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <sstream>
#include <stdexcept>

namespace llama {
namespace {

// Formats that every cache lists, so that it can load files of caches with other tiers.
constexpr const char* usual_schemes[] = {"fp16", "int8", "kivi-4", "kivi-3", "kivi-2"};

kvq::cache_options live_options(const cache_settings& settings, const live_settings& live) {
    kvq::cache_options options = options_of(settings);
    for (const char* const scheme : usual_schemes) {
        const kvq::format_pair formats = find_formats(scheme);
        options.keys.push_back(formats.keys);
        options.values.push_back(formats.values);
    }
    options.byte_budget = live.budget;
    return options;
}

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
    static_cast<void>(find_formats(scheme));  // throws for an unknown scheme
    return {age, std::string(scheme)};
}

}  // namespace

live_cache::live_cache(const model_shape& shape, const cache_settings& settings, const live_settings& live)
    : kvq_cache(shape, live_options(settings, live)), live_(live) {
    for (const char* const scheme : usual_schemes) {
        const int number = static_cast<int>(listed_.size());
        listed_.push_back({scheme, {number, number}});
    }
    policy_.tiers.push_back({});
    for (const tier_choice& tier : live.tiers) {
        policy_.tiers.push_back({tier.age, formats_of(tier.scheme)});
    }
    if (live.budget != kvq::page_pool::no_budget) {
        // Room for the tokens of one step in every layer, and for the page that is being requantized.
        std::size_t largest = 0, reserve = 0;
        for (const int layer : shape.attention_layers()) {
            const std::size_t page = cache_.page_bytes(kvq::tensor::key, layer, 0, settings.page_tokens);
            largest = std::max(largest, page + sizeof(kvq::page));
            reserve += 2 * (page + sizeof(kvq::page));
        }
        reserve += 2 * largest;
        if (live.budget <= reserve) {
            throw std::invalid_argument("a budget of " + std::to_string(live.budget) +
                                        " bytes is less than the " + std::to_string(reserve) +
                                        " bytes that one step needs");
        }
        policy_.byte_budget = live.budget - reserve;
    }
    if (live.requantize_at > 0) {
        const kvq::layer_format to = formats_of(live.requantize_to);
        request_.key = to.key;
        request_.value = to.value;
        request_.new_pages = true;
    }
}

// Their numbers among the formats of the cache, which lists them if they are new. Schemes may share values.
kvq::layer_format live_cache::formats_of(const std::string& scheme) {
    for (const listed_scheme& known : listed_) {
        if (known.name == scheme) {
            return known.formats;
        }
    }
    const kvq::format_pair formats = find_formats(scheme);
    const kvq::layer_format added{cache_.add_format(kvq::tensor::key, formats.keys),
                                  cache_.add_format(kvq::tensor::value, formats.values)};
    listed_.push_back({scheme, added});
    return added;
}

void live_cache::end_of_step(int tokens, bool prompt_ends) {
    kvq_cache::end_of_step(tokens, prompt_ends);
    if (live_.reload_at > 0 && !reloaded_ && sequence_.tokens() >= live_.reload_at) {
        reload();
        reloaded_ = true;
    }
    if (live_.requantize_at > 0 && sequence_.tokens() >= live_.requantize_at) {
        requantized_ += cache_.requantize(sequence_, request_).pages;
    }
    for (const auto& step : kvq::step_down(cache_, sequence_, policy_).steps) {
        requantized_ += step.pages;
    }
}

std::vector<held_scheme> live_cache::held() const {
    std::vector<held_scheme> all;
    for (const listed_scheme& known : listed_) {
        all.push_back({known.name, 0, 0});
    }
    for (const kvq::usage_row& row : kvq::usage_rows(sequence_)) {
        // Format 0 is the window, and so is the first listed one. Shared values are those of the first
        // scheme.
        const bool keys = row.role == kvq::tensor::key;
        std::size_t i = 0;
        while ((keys ? listed_[i].formats.key : listed_[i].formats.value) != std::max(0, row.format - 1)) {
            ++i;
        }
        held_scheme& scheme = all[i];
        scheme.bytes += row.codes + row.parameters + row.bookkeeping;
        if (row.layer == 0 && keys) {
            scheme.tokens += row.tokens;
        }
    }
    return all;
}

void live_cache::save(const std::string& path) const { kvq::save(sequence_, path, {model_name()}); }

int live_cache::load(const std::string& path) {
    sequence_ = kvq::restore(cache_, path, {.model = model_name(), .convert = true});
    return sequence_.tokens();
}

// Enough to detect the file of another model.
std::string live_cache::model_name() const {
    std::ostringstream name;
    name << "llama2.c dim " << shape_.dim << ", layers " << shape_.layers << ", heads " << shape_.heads << '/'
         << shape_.kv_heads << ", vocab " << shape_.vocab;
    return name.str();
}

// Saves the sequence to bytes and restores it.
void live_cache::reload() {
    std::vector<char> file;
    kvq::save(sequence_, [&](const void* data, std::size_t bytes) {
        const auto* const first = static_cast<const char*>(data);
        file.insert(file.end(), first, first + bytes);
    });
    sequence_ = cache_.new_sequence();  // frees the old pages: a budget may have no room for both
    std::size_t at = 0;
    sequence_ = kvq::restore(cache_, [&](void* to, std::size_t bytes) {
        const std::size_t count = std::min(bytes, file.size() - at);
        std::memcpy(to, file.data() + at, count);
        at += count;
        return count;
    });
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
    scheme_choice choice{label.tellp() > 0 ? label.str() : "fp16", settings};
    choice.live = std::make_shared<const live_settings>(live);
    return choice;
}

}  // namespace llama
