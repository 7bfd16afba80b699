#include "schemes.hpp"

#include "../../bench/page_remark.hpp"
#include "../../bench/quality_schemes.hpp"
#include "dequantized_cache.hpp"
#include "kvq_cache.hpp"
#include "live_cache.hpp"
#include "reference_cache.hpp"
#include "self_calibrating_cache.hpp"

#include <kvq/format/find_format.hpp>

#include <algorithm>
#include <charconv>
#include <limits>
#include <stdexcept>
#include <vector>

namespace llama {
namespace {

constexpr std::string_view reference_name = "reference";
constexpr int self_calibration_tokens = 512;

// Formats that are not built in.
const std::vector<quality::listed_format>& baselines() {
    static const std::vector<quality::listed_format> all = [] {
        std::vector<quality::listed_format> list;
#if defined(KVQ_LLAMA_BASELINES)
        for (const auto family :
             {&quality::plan_formats, &quality::ingredient_formats, &quality::group_formats,
              &quality::rotation_formats, &quality::kvarn_formats, &quality::recent_formats}) {
            for (quality::listed_format& format : family()) {
                list.push_back(std::move(format));
            }
        }
#endif
        return list;
    }();
    return all;
}

bool is_built_in(std::string_view name, kvq::tensor role) {
    bool found = false;
    kvq::for_each_format([&](const kvq::builtin_format& format) {
        found = found || (format.name == name && (role == kvq::tensor::key ? format.keys : format.values));
    });
    return found;
}

// Composed names, such as "kivi-4-g48", are known to find_format alone: only a search tells what a name is.
void expect_known(std::string_view name, kvq::tensor role) {
    try {
        static_cast<void>(kvq::find_format(name, role));
    } catch (const kvq::error& unknown) {
        std::string message = unknown.what();
        message += "; there are also " + std::string(reference_name);
        for (const quality::listed_format& format : baselines()) {
            message += ", " + format.name;
        }
        if (baselines().empty()) {
            message += "; CMake's KVQ_LIBRARY_FORMATS=all and KVQ_LLAMA_BASELINES=ON add others";
        }
        throw kvq::argument_error(message);
    }
}

kvq::format find(std::string_view name, kvq::tensor role, const kvq::calibration* statistics) {
    // "affine-4" is short for "affine-4-g32"; the same for KIVI.
    const std::string long_name = std::string(name) + "-g32";
    for (const quality::listed_format& format : baselines()) {
        if (format.name == name || format.name == long_name) {
            return role == kvq::tensor::key ? format.keys(statistics) : format.values();
        }
    }
    const std::string_view known = is_built_in(long_name, role) ? long_name : name;
    expect_known(known, role);
    return statistics ? kvq::find_format(known, role, *statistics) : kvq::find_format(known, role);
}

int parse_count(std::string_view digits, std::string_view whole) {
    int count = 0;
    const auto [end, failed] = std::from_chars(digits.data(), digits.data() + digits.size(), count);
    if (failed != std::errc{} || end != digits.data() + digits.size() || count < 0) {
        throw std::invalid_argument("\"" + std::string(whole) +
                                    "\": expected a number of tokens instead of \"" + std::string(digits) +
                                    "\"");
    }
    return count;
}

// Returns the name before the first '+'; stores the suffixes in `choice`.
std::string parse_name(std::string_view text, scheme_choice& choice) {
    std::size_t end = text.find('+');
    const std::string name(text.substr(0, end));
    while (end != std::string_view::npos) {
        const std::size_t begin = end + 1;
        end = text.find('+', begin);
        const std::string_view suffix = text.substr(begin, end == std::string_view::npos ? end : end - begin);
        if (suffix == "stats") {
            choice.use_statistics = true;
        } else if (suffix.starts_with("own")) {
            choice.settings.plan_tokens =
                suffix == "own" ? self_calibration_tokens : parse_count(suffix.substr(3), choice.label);
        } else if (suffix.starts_with("self")) {
            choice.own_statistics =
                suffix == "self" ? self_calibration_tokens : parse_count(suffix.substr(4), choice.label);
            if (choice.own_statistics < kvq::calibration::group) {
                throw std::invalid_argument("\"" + choice.label + "\": statistics need at least " +
                                            std::to_string(kvq::calibration::group) + " tokens");
            }
        } else if (suffix.starts_with('s')) {
            choice.settings.sinks = parse_count(suffix.substr(1), choice.label);
        } else if (suffix.starts_with('r')) {
            choice.settings.recent = parse_count(suffix.substr(1), choice.label);
        } else {
            throw std::invalid_argument(
                "\"" + choice.label +
                "\": expected +s4 (sinks), +r32 (recent), +own, +stats or +self, not +" +
                std::string(suffix));
        }
    }
    return name;
}

}  // namespace

kvq::cache_options options_with(const cache_settings& settings, const kvq::format_pair& formats) {
    kvq::cache_options options = options_of(settings);
    options.keys = formats.keys;
    options.values = formats.values;
    if (formats.keys.holds_values() && formats.values.holds_values() &&
        formats.keys.functions().value_type == formats.values.functions().value_type) {
        options.window = formats.keys;
    }
    return options;
}

std::unique_ptr<kv_cache> scheme_choice::make_cache(const model_shape& shape) const {
    if (live) {
        return std::make_unique<live_cache>(shape, settings, *live);
    }
    if (!formats.keys) {
        return std::make_unique<reference_cache>(shape);
    }
    kvq::cache_options options = options_with(settings, formats);
    if (own_statistics > 0) {
        options.keys = kvq::find_format("fp16", kvq::tensor::key);
        return std::make_unique<self_calibrating_cache>(
            shape, options, own_statistics, [name = key_name](const kvq::calibration& statistics) {
                return find(name, kvq::tensor::key, &statistics);
            });
    }
    if (formats.keys.functions().dequantizes_first || formats.values.functions().dequantizes_first) {
        return std::make_unique<dequantized_cache>(shape, options);
    }
    return std::make_unique<kvq_cache>(shape, options);
}

bool scheme_choice::has_fp16_window() const {
    if (live || own_statistics > 0 || !formats.keys) {
        return false;
    }
    const kvq::format window = options_with(settings, formats).window;
    return !window || window.functions().value_type == kvq::float_type::fp16;
}

double scheme_choice::bytes_per_token(const model_shape& shape) const {
    if (live) {
        return std::numeric_limits<double>::quiet_NaN();  // depends on the length of the context
    }
    if (!formats.keys) {
        return 2.0 * sizeof(float) * static_cast<double>(shape.attention_layers().size()) * shape.kv_dim();
    }
    const int tokens = settings.page_tokens, dim = shape.head_dim();
    const std::size_t block = formats.keys.block_bytes({kvq::tensor::key, tokens, dim}) +
                              formats.values.block_bytes({kvq::tensor::value, tokens, dim});
    return static_cast<double>(block) * shape.kv_heads *
           static_cast<double>(shape.attention_layers().size()) / tokens;
}

void scheme_choice::give_statistics(const kvq::calibration& statistics) {
    if (use_statistics && formats.keys) {
        formats.keys = find(key_name, kvq::tensor::key, &statistics);
    }
}

scheme_choice parse_scheme(std::string_view text, const cache_settings& defaults) {
    scheme_choice choice{std::string(text), defaults};
    const std::size_t slash = text.find('/');
    choice.key_name = choice.value_name = parse_name(text.substr(0, slash), choice);
    if (slash != std::string_view::npos) {
        choice.value_name = parse_name(text.substr(slash + 1), choice);
    }
    if ((choice.use_statistics ? 1 : 0) + (choice.own_statistics > 0 ? 1 : 0) +
            (choice.settings.plan_tokens > 0 ? 1 : 0) >
        1) {
        throw std::invalid_argument("\"" + choice.label + "\": one of +own, +stats and +self");
    }
    if (slash != std::string_view::npos || choice.key_name != reference_name) {
        choice.formats = {find(choice.key_name, kvq::tensor::key, nullptr),
                          find(choice.value_name, kvq::tensor::value, nullptr)};
    }
    return choice;
}

std::string page_remark(const scheme_choice& scheme) {
    return quality::page_remark(scheme.key_name, scheme.settings.page_tokens, scheme.label);
}

kvq::format_pair find_formats(std::string_view names) {
    const std::size_t slash = names.find('/');
    const std::string_view keys = names.substr(0, slash);
    const std::string_view values = slash == std::string_view::npos ? keys : names.substr(slash + 1);
    return {find(keys, kvq::tensor::key, nullptr), find(values, kvq::tensor::value, nullptr)};
}

std::string all_scheme_names() {
    std::vector<std::string> names{std::string(reference_name)};
    const auto add = [&](const std::string& name) {
        if (std::find(names.begin(), names.end(), name) == names.end()) {
            names.push_back(name);
        }
    };
    kvq::for_each_format([&](const kvq::builtin_format& format) { add(format.name); });
    for (const quality::listed_format& format : baselines()) {
        add(format.name);
    }
    std::string all;
    for (const std::string& name : names) {
        all += (all.empty() ? "" : ", ") + name;
    }
    return all;
}

}  // namespace llama
