// The formats of layers of one shape on the device (layer_group.hpp): what their names name, what goes from
// one to another, and the plans of keys.
//
//   keys    of a format: plans and matrices that were made from statistics, rotations; one for all sequences
//   plans   of sequences: a page of the plan pool holds those of all layers, heads and formats that take one
//
// Contract: every format whose keys take a plan and were not made from statistics has a place in a plan page.
// The first plan page has even widths.
#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

#include "cache_options.hpp"
#include "device_format.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Of keys made from statistics, and of rotations of K and V: [layers] of columns and [layers] of rows.
struct device_keys {
    device_memory plans, feedback, rotations[2];
    std::uint64_t fingerprints[2] = {};
    /// Of both.
    std::uint64_t fingerprint() const noexcept {
        return fingerprints[0] ^ fingerprints[1] * 0x9e3779b97f4a7c15u;
    }
    std::size_t bytes() const noexcept {
        return plans.bytes() + feedback.bytes() + rotations[0].bytes() + rotations[1].bytes();
    }
};

/// Numbers of a page and of the one that gets its values.
struct page_pair {
    int from, to;
};

struct group_formats {
    device_format format;
    std::vector<device_keys> keys;

    int kinds() const noexcept { return static_cast<int>(format.kinds.size()); }
    /// Does going from one format to another make pages smaller, and neither K nor V larger?
    bool shrinks(int from, int to) const noexcept {
        const device_format::kind &a = format.kinds[static_cast<std::size_t>(from)],
                                  &b = format.kinds[static_cast<std::size_t>(to)];
        const std::size_t of_a[] = {a.key_block + a.lower_blocks[0], a.value_block + a.lower_blocks[1]},
                          of_b[] = {b.key_block + b.lower_blocks[0], b.value_block + b.lower_blocks[1]};
        return of_b[0] <= of_a[0] && of_b[1] <= of_a[1] && of_b[0] + of_b[1] < of_a[0] + of_a[1];
    }
    /// Has format `from` two planes, of which pages of format `to` are the upper one?
    bool drops_lower(int from, int to) const noexcept {
        return from >= 0 && format.kinds[static_cast<std::size_t>(from)].upper == to;
    }
    /// The tensors that stay as they are when a page goes from one format to another.
    kept_tensors kept(int from, int to) const noexcept {
        kept_tensors k = format.same_schemes(from, to);
        const auto same_state = [&](tensor role) {
            const auto at = static_cast<std::size_t>(role);
            return keys[static_cast<std::size_t>(from)].fingerprints[at] ==
                   keys[static_cast<std::size_t>(to)].fingerprints[at];
        };
        k.keys = k.keys && same_state(tensor::key);
        k.values = k.values && same_state(tensor::value);
        return k;
    }
    /// Has a format the tensors that a name of requantize_request::format names?
    bool is_named(int kind, std::string_view name) const noexcept {
        const device_format::kind& k = format.kinds[static_cast<std::size_t>(kind)];
        const std::size_t cut = name.find('/');
        const std::string_view of_keys = name.substr(0, cut),
                               of_values = cut == name.npos ? name : name.substr(cut + 1);
        const auto has = [](const std::vector<std::string>& names, std::string_view wanted) {
            return wanted.empty() || std::ranges::find(names, wanted) != names.end();
        };
        if (of_keys.empty() && (of_values.empty() || format.latent)) return false;
        return has(k.key_names, of_keys) && has(k.value_names, of_values);
    }
    bool has_named(std::string_view name) const noexcept {
        for (int f = 0; f < kinds(); ++f)
            if (is_named(f, name)) return true;
        return false;
    }
    /// The format that a page of format `from` gets with such a name; -1: there is none.
    int target_of(int from, std::string_view name) const noexcept {
        const std::size_t cut = name.find('/');
        const bool keeps_keys = cut == 0, keeps_values = cut != name.npos && cut + 1 == name.size();
        for (int f = 0; f < kinds(); ++f) {
            const kept_tensors same = f == from ? kept_tensors{true, true} : kept(from, f);
            if (is_named(f, name) && (!keeps_keys || same.keys) &&
                (!keeps_values || same.values || format.latent))
                return f;
        }
        return -1;
    }
};

/// Plans of sequences (cache/key_plan.hpp).
struct key_plans {
    int tokens = 0;          ///< a plan is made of so many; 0: no sequence has one of its own
    device_pages pages;      ///< of 16-bit numbers, [layers] of each page's
    std::vector<int> first;  ///< by format: its numbers in a layer's plans; -1: its keys take no plan
    page_ref even;
    page_ref shared;  ///< of all sequences (key_statistics::shared), once there is one
    page_ref begun;   ///< of the prompt that has begun, until all layers have it

    bool takes(int format) const noexcept {
        return tokens > 0 && first[static_cast<std::size_t>(format)] >= 0;
    }
    /// From one plan to the next in a layer, in 16-bit numbers.
    int words() const noexcept {
        return static_cast<int>(pages.memory().key_page_bytes / sizeof(std::uint16_t));
    }
    std::uint16_t* of(int member, int number, int format) const noexcept {
        return reinterpret_cast<std::uint16_t*>(pages.memory().page(tensor::key, member, number)) +
               first[static_cast<std::size_t>(format)];
    }
    std::size_t bytes() const noexcept { return pages.allocated(); }
};

}}}  // namespace kvq::cuda::detail
