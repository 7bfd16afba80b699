// What a page does to a scheme whose keys share parameters over more tokens than the page holds: nothing may
// change silently.
//
// A name says the number: "kivi-4-g64"; presets have 64, "kivi-4" is short for "kivi-4-g32".
#pragma once

#include <charconv>
#include <string>
#include <string_view>

namespace quality {

/// A sentence without its full stop; empty where a page holds the group. `label`: what the sentence calls the
/// scheme.
inline std::string page_remark(std::string_view key_name, int page_tokens, const std::string& label) {
    int group = 0;
    for (const std::string_view preset : {"ref8", "hi6-h", "std5", "std4", "mix4", "low3", "low2"})
        if (key_name.starts_with(preset)) group = 64;
    for (const std::string_view preset : {"mix5", "mix6"})
        if (key_name.starts_with(preset)) group = 32;
    for (const std::string_view by_channel : {"kivi", "progressive", "oscar-scaled"}) {
        if (!key_name.starts_with(by_channel)) continue;
        group = 32;
        if (const std::size_t at = key_name.rfind("-g"); at != std::string_view::npos)
            std::from_chars(key_name.data() + at + 2, key_name.data() + key_name.size(), group);
    }
    if (group <= page_tokens) return "";
    const std::string page = std::to_string(page_tokens);
    return label + ": " + std::to_string(group) +
           " tokens share the parameters of a key's channel, but a page holds " + page + ": here only " +
           page + " share them (--page-tokens)";
}

}  // namespace quality
