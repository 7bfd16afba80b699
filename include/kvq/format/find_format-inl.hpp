// Definitions of find_format.hpp.
#pragma once

#include <algorithm>
#include <charconv>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../core/bits.hpp"
#include "../core/error.hpp"
#include "../quant/calibration.hpp"
#include "bounds.hpp"
#include "find_format.hpp"
#include "format_names.hpp"
#include "latent.hpp"
#include "planes.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

struct found_format {
    const builtin_format* entry;
    int group;
};

/// Number of letters to insert, remove or change to get from one name to the other (Levenshtein).
/// O(letters^2)
KVQ_FUNC int letters_apart(std::string_view a, std::string_view b) {
    std::vector<int> row(b.size() + 1);
    for (std::size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<int>(j);
    for (std::size_t i = 1; i <= a.size(); ++i) {
        int diagonal = row[0];
        row[0] = static_cast<int>(i);
        for (std::size_t j = 1; j <= b.size(); ++j) {
            const int changed = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
            diagonal = row[j];
            row[j] = smaller(changed, smaller(row[j], row[j - 1]) + 1);
        }
    }
    return row[b.size()];
}

/// The names of formats for this tensor that are most similar to `name`, and of how many.
KVQ_FUNC std::string names_like(std::string_view name, tensor role) {
    std::size_t count = 0;
    const builtin_format* const formats = builtin_formats(&count);
    std::vector<std::pair<int, std::string>> names;
    for (std::size_t i = 0; i < count; ++i)
        if (role == tensor::key ? formats[i].keys : formats[i].values)
            names.emplace_back(letters_apart(name, formats[i].name), formats[i].name);
    std::sort(names.begin(), names.end());
    std::string list = "the nearest of " + std::to_string(names.size()) + " are ";
    for (std::size_t i = 0; i < names.size() && i < 5; ++i) list += (i ? ", " : "") + names[i].second;
    return list;
}

/// The entry of this name, or one that differs in the group size alone.
KVQ_FUNC found_format find_builtin(std::string_view name, tensor role) {
    std::size_t count = 0;
    const builtin_format* const formats = builtin_formats(&count);
    // "affine-4-g48": the part before the group size, and the group size.
    const std::size_t end = name.rfind("-g");
    int group = 0;
    if (end != std::string_view::npos) {
        const char* const digits = name.data() + end + 2;
        const auto [at, error] = std::from_chars(digits, name.data() + name.size(), group);
        if (error != std::errc() || at != name.data() + name.size()) group = 0;
    }
    for (std::size_t i = 0; i < count; ++i) {
        const builtin_format& f = formats[i];
        if (!(role == tensor::key ? f.keys : f.values)) continue;
        if (f.name == name) return {&f, f.group};
        const std::string_view listed = f.name;
        if (f.group > 0 && group > 0 && listed.substr(0, listed.rfind("-g")) == name.substr(0, end))
            return {&f, group};
    }
    fail("there is no format \"", std::string(name), "\" for ", role == tensor::key ? "keys" : "values",
         " in this program; ", names_like(name, role));
}

/// Makes the format of a name with an ending: make(NAME) makes the format before the ending. An empty format:
/// the name has none.
template <class Make>
format with_ending(std::string_view name, tensor role, const Make& make) {
    if (const auto inner = name_before_bounds(name); !inner.empty()) {
        const format f = make(inner);
        return role == tensor::key ? with_bounds(f) : f;
    }
    if (name == "nested8") return with_lower_plane(make("nested4"));
    const auto [inner, last, channels] = last_channels_of(name);
    if (inner.empty()) return {};
    const format f = make(inner);
    if (role != tensor::key) return f;
    return last == "fp16" ? with_fp16_channels(f, channels) : with_last_channels(f, make(last), channels);
}

KVQ_FUNC format asked_as(std::string_view name, format made) {
    made.set_asked_name(name.data(), name.size());
    return made;
}

}

KVQ_FUNC format find_format(std::string_view name, tensor role) {
    const auto make = [role](std::string_view inner) { return find_format(inner, role); };
    if (format f = detail::with_ending(name, role, make)) return detail::asked_as(name, std::move(f));
    const auto [entry, group] = detail::find_builtin(name, role);
    return detail::asked_as(name, entry->make(group, nullptr, 0));
}

KVQ_FUNC format find_format(std::string_view name, tensor role, const calibration& statistics) {
    const auto make = [&](std::string_view inner) { return find_format(inner, role, statistics); };
    if (format f = detail::with_ending(name, role, make)) return detail::asked_as(name, std::move(f));
    const auto [entry, group] = detail::find_builtin(name, role);
    if (!entry->takes_statistics) return detail::asked_as(name, entry->make(group, nullptr, 0));
    const std::vector<std::byte> saved = statistics.save();
    return detail::asked_as(name, entry->make(group, saved.data(), saved.size()));
}

namespace detail {

/// kv_heads: 0 with the scale of a tensor.
KVQ_FUNC format rows_with_scales(std::string_view name, std::span<const float> scales, int kv_heads) {
    const format plain = find_format(name, tensor::key);
    expect(plain.functions().of_places.bytes != nullptr, std::string(name),
           " is no format of rows in the bytes of another system, such as fp8 and nvfp4");
    if (plain.functions().of_places.keys == nullptr) {  // records
        expect(kv_heads == 0, std::string(name), " has no scales of heads");
        expect(scales[0] == 1.0f, std::string(name), " takes no scale of the tensor, but got ", scales[0]);
        return plain;
    }
    const auto bytes = std::as_bytes(scales);
    return asked_as(name, find_builtin(name, tensor::key).entry->make(kv_heads, bytes.data(), bytes.size()));
}

}

KVQ_FUNC format find_rows_format(std::string_view name, std::span<const float> scales, int kv_heads) {
    detail::expect(kv_heads >= 1, std::string(name), " with scales of ", kv_heads, " heads");
    return detail::rows_with_scales(name, scales, kv_heads);
}

KVQ_FUNC format find_rows_format(std::string_view name, float tensor_scale) {
    return detail::rows_with_scales(name, std::span(&tensor_scale, 1), 0);
}

KVQ_FUNC row_bytes bytes_of_row(const format& rows, int dim) {
    detail::expect(static_cast<bool>(rows), "bytes of a row of an empty format");
    const row_place_functions& places = rows.functions().of_places;
    detail::expect(places.bytes != nullptr, rows.asked_name(),
                   " is no format of rows in the bytes of another system");
    detail::expect(dim >= 1 && dim <= 1 << 20, "rows of ", dim, " channels");
    if (places.read != nullptr)  // records
        rows.functions().check(rows.scheme(), {.layers = 1, .kv_heads = 1, .head_dim = dim, .value_dim = dim},
                               tensor::key);
    return places.bytes(rows.scheme(), dim);
}

KVQ_FUNC cache_options preset(std::string_view name, int recent) {
    return preset_options({find_format(name, tensor::key), find_format(name, tensor::value)}, recent);
}

}}
