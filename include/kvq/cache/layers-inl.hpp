// Definitions of layers.hpp.
#pragma once

#include <algorithm>

#include "../core/error.hpp"
#include "layers.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

KVQ_FUNC std::string describe_layer(int i, const layer& of) {
    std::string text = "layer " + std::to_string(i) + ", ";
    switch (of.kind) {
        case layer_kind::full:
            text += "full attention of ";
            break;
        case layer_kind::sliding:
            text += "sliding window of " + std::to_string(of.window) + ", ";
            break;
        case layer_kind::chunked:
            text += "chunks of " + std::to_string(of.window) + ", ";
            break;
        case layer_kind::shared:
            text += "shared with layer " + std::to_string(of.owner) + ", ";
            break;
        case layer_kind::cross:
            text += "cross attention of ";
            break;
        case layer_kind::state:
            return text + "state of " + std::to_string(of.parts.size()) + " parts";
        case layer_kind::latent:
            text += "latent of " + std::to_string(of.head_dim - of.rotary_channels) + " + " +
                    std::to_string(of.rotary_channels) + " channels, ";
            break;
        case layer_kind::index:
            text += "index, ";
            break;
    }
    text += std::to_string(of.kv_heads) + " x " + std::to_string(of.head_dim);
    if (of.value_dim != 0 && of.value_dim != of.head_dim) text += " and " + std::to_string(of.value_dim);
    return text;
}

KVQ_FUNC std::vector<layer> equal_layers(const cache_shape& shape) {
    check_shape(shape);
    return std::vector<layer>(static_cast<std::size_t>(shape.layers),
                              full_attention({shape.kv_heads, shape.head_dim, shape.value_dim}));
}

KVQ_FUNC std::vector<layer> with_owners(std::vector<layer> layers) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
        layer& l = layers[i];
        const auto me = [&] { return describe_layer(static_cast<int>(i), l); };
        if (l.kind != layer_kind::shared) {
            expect(l.owner == 0, me(), ": it shares no keys and values with layer ", l.owner);
            continue;
        }
        expect(l.owner >= 0 && static_cast<std::size_t>(l.owner) < i, me(),
               ": a layer shares with one before it");
        const layer& owner = layers[static_cast<std::size_t>(l.owner)];
        expect(owner.kind <= layer_kind::chunked, me(),
               ": it needs one with keys and values of its own text, not ", describe_layer(l.owner, owner));
        const bool says_shape = l.kv_heads != 0 || l.head_dim != 0 || l.value_dim != 0;
        const auto values = [](const layer& of) { return of.value_dim == 0 ? of.head_dim : of.value_dim; };
        expect(!says_shape || (l.kv_heads == owner.kv_heads && l.head_dim == owner.head_dim &&
                               values(l) == values(owner)),
               me(), ": it has the shape of ", describe_layer(l.owner, owner));
        expect(l.window == 0 && l.sinks == 0, me(), ": its owner says the window, not ", l.window,
               " tokens and ", l.sinks, " sinks");
        l.kv_heads = owner.kv_heads;
        l.head_dim = owner.head_dim;
        l.value_dim = owner.value_dim;
        l.formats = owner.formats;
        l.rotary = owner.rotary;
    }
    return layers;
}

KVQ_FUNC std::optional<state_layout> state_of(const std::vector<layer>& layers) {
    std::vector<std::vector<state_part>> parts;
    bool some = false;
    for (const layer& l : layers) {
        parts.push_back(l.parts);
        some = some || l.kind == layer_kind::state;
    }
    return some ? std::optional<state_layout>(parts) : std::nullopt;
}

inline bool is_full(const layer& l) noexcept { return l.kind == layer_kind::full; }

KVQ_FUNC layer_shapes::layer_shapes(const std::vector<layer>& layers) {
    expect(!layers.empty() && layers.size() <= std::size_t{most_layers}, "a cache has 1 to ", most_layers,
           " layers, got ", layers.size());
    const auto n = static_cast<int>(layers.size());
    of_.reserve(layers.size());
    const auto values = [](const layer& l) { return l.value_dim == 0 ? l.head_dim : l.value_dim; };
    for (int i = 0; i < n; ++i) {
        const layer& l = layers[static_cast<std::size_t>(i)];
        const cache_shape shape{n, l.kv_heads, l.head_dim, l.value_dim};
        const auto impossible = [](int number, int least, int most) {
            return number < least || number > most;
        };
        of_.push_back(shape);
        full_ = full_ && is_full(l);
        if (l.kind == layer_kind::state) {
            expect(!l.parts.empty() && l.kv_heads == 0 && l.head_dim == 0 && l.value_dim == 0,
                   describe_layer(i, l), ": a state has at least 1 part, and no heads (", l.kv_heads, " x ",
                   l.head_dim, ")");
            expect(l.window == 0 && l.sinks == 0, describe_layer(i, l), ": it has a window of ", l.window,
                   " tokens and ", l.sinks, " sinks");
            continue;
        }
        expect(l.parts.empty(), describe_layer(i, l), ": it has no parts of a state, got ", l.parts.size());
        expect(!impossible(l.kv_heads, 1, most_heads) && !impossible(l.head_dim, 1, most_head_dim) &&
                   !impossible(l.value_dim, 0, most_head_dim),
               describe_layer(i, l), ": a layer has 1 to ", most_heads, " kv heads of 1 to ", most_head_dim,
               " channels");
        if (l.kind == layer_kind::latent)
            expect(l.rotary_channels >= 0 && l.rotary_channels < l.head_dim && values(l) <= l.head_dim,
                   describe_layer(i, l),
                   ": it has at least 1 latent channel, and values are the first of its ", l.head_dim,
                   ", not ", values(l));
        else
            expect(l.rotary_channels == 0, describe_layer(i, l), ": it has no rotary channels apart, got ",
                   l.rotary_channels);
        expect(l.kind != layer_kind::index || (l.kv_heads == 1 && values(l) == l.head_dim),
               describe_layer(i, l), ": it has one head, and no values");
        const bool has_window = l.kind == layer_kind::sliding || l.kind == layer_kind::chunked;
        expect(!has_window || (l.window >= 1 && l.window <= most_window), describe_layer(i, l),
               ": a window has 1 to ", most_window, " tokens");
        expect(l.sinks >= 0 && (has_window || (l.window == 0 && l.sinks == 0)), describe_layer(i, l),
               ": it has a window of ", l.window, " tokens and ", l.sinks, " sinks");
        bool known = false;
        for (const int other : distinct_) {
            const layer& o = layers[static_cast<std::size_t>(other)];
            known = known || (o.kv_heads == l.kv_heads && o.head_dim == l.head_dim &&
                              values(o) == values(l) && o.rotary_channels == l.rotary_channels &&
                              holds_keys_alone(o.kind) == holds_keys_alone(l.kind));
        }
        if (!known) distinct_.push_back(i);
    }
}

KVQ_FUNC rotation_table rotations_of(const std::vector<layer>& layers,
                                     const std::vector<rotary_embedding>& of_cache) {
    std::vector<int> dims;
    std::vector<rotary_embedding> said;
    const auto keyless = [](const layer& l) { return l.kind == layer_kind::state; };
    const auto keys = std::find_if_not(layers.begin(), layers.end(), keyless);
    bool some = false;
    for (const layer& l : layers) {
        // Layers without keys count as layers without positions.
        dims.push_back(keyless(l) && keys != layers.end() ? keys->head_dim : l.head_dim);
        if (l.rotary || keyless(l)) said.push_back(l.rotary.value_or(rotary_embedding{}));
        some = some || l.rotary;
    }
    if (!some) {
        said = keys == layers.end() ? std::vector<rotary_embedding>{} : of_cache;
    } else {
        expect(of_cache.empty(), "layers and cache_options::rotary both say how keys are rotated");
        const auto first = std::find_if(layers.begin(), layers.end(),
                                        [&](const layer& l) { return !l.rotary && !keyless(l); });
        const auto i = static_cast<std::size_t>(first - layers.begin());
        if (i < layers.size())
            fail(describe_layer(static_cast<int>(i), layers[i]),
                 ": it does not say how keys are rotated, but ", said.size(), " other layers do");
    }
    rotation_table table(said, dims);
    for (std::size_t i = 0; i < layers.size() && !said.empty(); ++i) {
        const layer& l = layers[i];
        const rotary_embedding& r = said[said.size() == 1 ? 0 : i];
        if (l.kind == layer_kind::latent && !r.rotate && r.dims > 0 &&
            r.first_channel < l.head_dim - l.rotary_channels)
            fail(describe_layer(static_cast<int>(i), l), ": a rotation turns its last ", l.rotary_channels,
                 " channels, not those from ", r.first_channel, " on");
    }
    return table;
}

}}}
