// Definitions of format_names.hpp.
#pragma once

#include <charconv>
#include <string>
#include <string_view>
#include <vector>

#include "format_names.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

struct preset_schemes {
    std::string_view name, keys, values;
};

inline constexpr preset_schemes schemes_of_presets[] = {
    {"std4", "channel4-g64-coded", "channel4-coded-dual"},
    {"std4-h", "hadamard-channel4-g64-coded-dual", "channel4-coded-dual"},
    {"std5-h", "hadamard-channel5-g64-coded-dual", "channel5-coded-dual"},
    {"hi6-h", "hadamard-channel6-g64-coded-dual", "channel6-coded-dual"},
    {"low3-h", "hadamard-channel3-g64-coded-dual", "channel3-coded-dual"},
    {"low2-h", "hadamard-channel2-g64-coded-dual", "channel2-coded-dual"},
    {"mix4", "mixed-6-4-3-0-avg4-g64-coded", "channel4-coded-dual"},
    {"mix5", "mixed-8-6-5-4-0-avg5-g32-coded", "channel4-coded-dual"},
    {"mix6", "mixed-8-6-5-4-0-avg6-g32-coded", "channel5-coded-dual"},
    {"std5", "channel5-g64-coded", "channel5-coded-dual"},
    {"hi6", "channel6-coded", "channel6-coded-dual"},
    {"ref8", "affine8-channel-g64-fp16", "channel8-fp16-dual-fp16"},
    {"low3", "mixed-6-4-3-2-0-avg3-g64-coded", "channel3-coded-dual"},
    {"low2", "mixed-4-2-0-avg2-g64-coded", "channel2-coded-dual"},
};

/// "4-g64" of "affine4-token-g64-fp16" and axis "-token-g"; else empty.
KVQ_FUNC std::string affine_sizes(std::string_view scheme, std::string_view axis) {
    constexpr std::string_view begin = "affine", end = "-fp16";
    if (!scheme.starts_with(begin) || !scheme.ends_with(end) || scheme.size() < 13) return {};
    const std::string_view inner = scheme.substr(begin.size(), scheme.size() - begin.size() - end.size());
    if (!inner.substr(1).starts_with(axis)) return {};
    const std::string_view group = inner.substr(1 + axis.size());
    if (group.empty() || group.find_first_not_of("0123456789") != group.npos) return {};
    return std::string(inner.substr(0, 1)) + "-g" + std::string(group);
}

KVQ_FUNC std::string_view name_before_bounds(std::string_view name) noexcept {
    constexpr std::string_view ending = "-bounds";
    return name.ends_with(ending) ? name.substr(0, name.size() - ending.size()) : std::string_view{};
}

/// What last channels may be in.
struct last_channels_scheme {
    const char* name;
    std::string_view scheme;
};
inline constexpr last_channels_scheme last_channels_schemes[] = {
    {"fp16", "fp16"}, {"int8", "int8-token-fp32"}, {"ref8", "affine8-channel-g64-fp16"}};

KVQ_FUNC last_channels_name last_channels_of(std::string_view name) noexcept {
    const std::size_t at = name.rfind('-');
    if (at == std::string_view::npos || at == 0) return {};
    for (const auto& [of, scheme] : last_channels_schemes) {
        const std::string_view last = of;
        if (!name.substr(at + 1).starts_with(last)) continue;
        const std::size_t digits = at + 1 + last.size() + 1;
        if (digits >= name.size() || name[digits - 1] != 'x') continue;
        last_channels_name found{name.substr(0, at), last};
        const char* const end = name.data() + name.size();
        const auto [read, error] = std::from_chars(name.data() + digits, end, found.channels);
        if (error == std::errc() && read == end && found.channels > 0) return found;
    }
    return {};
}

KVQ_FUNC const char* last_channels_name_of(std::string_view scheme) noexcept {
    for (const last_channels_scheme& s : last_channels_schemes)
        if (s.scheme == scheme) return s.name;
    return "";
}

KVQ_FUNC std::vector<std::string> built_in_names(std::string_view scheme, tensor role) {
    std::string_view inner = name_before_bounds(scheme);
    if (inner.empty()) inner = last_channels_of(scheme).inner;
    if (!inner.empty()) {
        auto names = built_in_names(inner, role);
        for (std::string& name : names) name += scheme.substr(inner.size());
        return names;
    }
    std::vector<std::string> names;
    const bool key = role == tensor::key;
    if (scheme == "int8-token-fp32") names.emplace_back("int8");
    for (const preset_schemes& p : schemes_of_presets)
        if (scheme == (key ? p.keys : p.values)) names.emplace_back(p.name);
    const std::string by_token = affine_sizes(scheme, "-token-g"),
                      of_kivi = key ? affine_sizes(scheme, "-channel-g") : by_token;
    if (!of_kivi.empty()) names.push_back("kivi-" + of_kivi);
    if (!by_token.empty()) names.push_back("affine-" + by_token);
    return names;
}

KVQ_FUNC std::string with_scheme(const std::string& name, const std::string& scheme) {
    return name == scheme ? name : name + " (" + scheme + ")";
}

}

KVQ_FUNC std::string format_text(const format& f) { return detail::with_scheme(f.asked_name(), f.name()); }

KVQ_FUNC std::string scheme_text(const std::string& scheme, tensor role) {
    const std::vector<std::string> names = detail::built_in_names(scheme, role);
    std::string all;
    for (std::size_t i = 0; i < names.size(); ++i)
        all += (i == 0 ? "" : i + 1 < names.size() ? ", " : " or ") + names[i];
    return names.empty() ? scheme : detail::with_scheme(all, scheme);
}

}}
