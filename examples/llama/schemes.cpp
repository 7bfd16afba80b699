#include "schemes.hpp"

#include "reference_cache.hpp"

#include <array>
#include <charconv>
#include <stdexcept>

namespace llama {
namespace {

const scheme_entry reference_entry{
    "reference",
    [](const model_shape& shape, const cache_settings&) -> std::unique_ptr<kv_cache> {
        return std::make_unique<reference_cache>(shape);
    },
    [](const model_shape& shape, int) { return 2.0 * sizeof(float) * shape.layers * shape.kv_dim(); }};

template <class Visit>
void for_each_scheme(const Visit& visit) {
    visit(reference_entry);
    for (const auto list : {
             full_schemes(), affine_g32_schemes(), kivi_g32_schemes(),
#if defined(KVQ_LLAMA_ALL_SCHEMES)
                 more_g32_schemes(), affine_g64_schemes(), kivi_g64_schemes(), preset_grid_schemes(),
                 preset_mixed_schemes(), plan_schemes(), ingredient_schemes(), published_group_schemes(),
                 published_rotation_schemes(), published_kvarn_schemes()
#endif
         }) {
        for (const scheme_entry& entry : list) {
            visit(entry);
        }
    }
}

const scheme_entry& find_scheme(std::string_view name) {
    const scheme_entry* found = nullptr;
    for_each_scheme([&](const scheme_entry& entry) {
        // "affine-4" is short for "affine-4-g32", and so with KIVI.
        if (entry.name == name || entry.name == std::string(name) + "-g32") {
            found = &entry;
        }
    });
    if (found == nullptr) {
#if defined(KVQ_LLAMA_ALL_SCHEMES)
        const char* const others = "";
#else
        const char* const others = "; CMake's KVQ_LLAMA_ALL_SCHEMES builds the others";
#endif
        throw std::invalid_argument("there is no scheme \"" + std::string(name) + "\"; there are " +
                                    all_scheme_names() + others);
    }
    return *found;
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

}  // namespace

scheme_choice parse_scheme(std::string_view text, const cache_settings& defaults) {
    scheme_choice choice{std::string(text), nullptr, defaults};
    std::size_t end = text.find('+');
    choice.entry = &find_scheme(text.substr(0, end));
    while (end != std::string_view::npos) {
        const std::size_t begin = end + 1;
        end = text.find('+', begin);
        const std::string_view suffix = text.substr(begin, end == std::string_view::npos ? end : end - begin);
        if (suffix == "stats") {
            choice.settings.use_statistics = true;
        } else if (suffix.starts_with('s')) {
            choice.settings.sinks = parse_count(suffix.substr(1), text);
        } else if (suffix.starts_with('r')) {
            choice.settings.recent = parse_count(suffix.substr(1), text);
        } else {
            throw std::invalid_argument("\"" + std::string(text) +
                                        "\": expected +s4 (sinks), +r32 (recent) or +stats, not +" +
                                        std::string(suffix));
        }
    }
    return choice;
}

std::string all_scheme_names() {
    std::string names;
    for_each_scheme([&](const scheme_entry& entry) {
        names += names.empty() ? "" : ", ";
        names += entry.name;
    });
    return names;
}

}  // namespace llama
