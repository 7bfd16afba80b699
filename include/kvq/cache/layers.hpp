// The layers of a cache: what each of them holds, and of which shape.
//
//   kvq::cache cache({.layers = 32, .kv_heads = 8, .head_dim = 128}, options);      layers of one shape
//
//   std::vector<kvq::layer> layers;                                                 any model
//   for (int i = 0; i < 60; ++i)
//       layers.push_back(i % 6 == 5 ? kvq::full_attention({.kv_heads = 4, .head_dim = 512})
//                                   : kvq::sliding_attention(1024, {.kv_heads = 16, .head_dim = 256}));
//   kvq::cache cache(layers, options);
//
// The first way is short for a list of equal layers of full attention. Sinks, recent window, page size and
// rollback are those of the cache.
//
//   kind      holds                                                   a trim can reach
//   full      all tokens                                              any token
//   sliding   the sinks of the cache, the last W tokens and those of a rollback, in whole pages      tokens
//             whose window is held
//   chunked   the same with the tokens of the current chunk of W
//   shared    nothing: it reads the keys and values of an earlier layer, under its window      as that layer
//   cross     tokens of another text, appended once: all queries see all of them           does not touch it
//   latent    one latent per token, stored once: keys are all of its channels,             to any token
//             values the first of them (MLA of DeepSeek)
//   index     one key per token, by which queries select tokens         to any token
//             (DeepSeek V3.2)
//
// Attention hides what the window of a layer hides; masks and score modifiers of the caller come on top, with
// positions in the text. Pages that no query can see any more are freed when tokens are appended. Positions
// stay.
// Contract: cache() checks the list, and names the layer and its kind in an error.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "../attention/rotary.hpp"
#include "../core/shape.hpp"
#include "../page/key_window.hpp"
#include "../state/state_layout.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// Indices of the listed formats to which a layer's pages are quantized, 0-based in cache_options::keys and
/// values.
struct layer_format {
    int key = 0;
    int value = 0;

    friend bool operator==(const layer_format&, const layer_format&) = default;
};

/// What a layer holds, what it frees by itself, and how far a trim can reach.
enum class layer_kind : unsigned char {
    full = 0,     ///< full attention
    sliding = 1,  ///< a query sees itself and the window - 1 tokens before it
    /// A query sees the tokens of its own chunk: from the last multiple of `window` on (Llama 4).
    chunked = 2,
    shared = 3,  ///< reads the keys and values of another layer (Gemma 3n and 4)
    cross = 4,   ///< keys and values of another text, such as an encoder's (Whisper, T5)
    /// Recurrent state in place of keys and values: a trim reaches snapshots (state/recurrent_state.hpp)
    state = 5,
    latent = 6,  ///< keys alone: values are their first channels (MLA)
    index = 7    ///< keys alone, which select tokens for other layers: cache::select
};

/// One layer of a model. Made by the function of its kind.
struct layer {
    int kv_heads = 0;
    int head_dim = 0;
    int value_dim = 0;  ///< channels of a value; 0: as head_dim
    /// Where cache_options::layers does not say it.
    layer_format formats = {};
    /// How keys are rotated before they are appended, where cache_options::rotary does not say it; a layer
    /// without positions has a rotary_embedding{}. Empty: not known. All layers say it, or none.
    std::optional<rotary_embedding> rotary = {};
    layer_kind kind = layer_kind::full;
    /// Of a latent layer: the last channels of a key, which a format must hold in 16 bits, or all channels in
    /// 8 (format/latent.hpp).
    int rotary_channels = 0;
    int window = 0;  ///< tokens of a sliding window or a chunk; of a shared layer 0, since its owner says it
    /// First tokens that every query sees as well, at most cache_options::sinks; of layers with a window.
    int sinks = 0;
    std::vector<state_part> parts = {};  ///< of a layer with state, which has no heads and channels
    int owner = 0;  ///< of a shared layer: the earlier one whose keys and values it reads

    /// What its queries see.
    key_window sees() const noexcept {
        return {window, kind == layer_kind::chunked, sinks, kind == layer_kind::cross};
    }
};

/// A layer that holds all of its tokens.
[[nodiscard]] inline layer full_attention(layer of) {
    of.kind = layer_kind::full;
    return of;
}

/// A layer with a sliding window of `window` tokens, at least 1.
[[nodiscard]] inline layer sliding_attention(int window, layer of) {
    of.kind = layer_kind::sliding;
    of.window = window;
    return of;
}
/// A layer with attention within chunks of `window` tokens, at least 1.
[[nodiscard]] inline layer chunked_attention(int window, layer of) {
    of.kind = layer_kind::chunked;
    of.window = window;
    return of;
}
/// A layer that reads the keys and values of layer `owner`, which comes before it, holds tokens, and shares
/// with no other. Its shape and window are those of the owner. It takes queries only: prefill() with k and v
/// of 0 tokens, after that of the owner, or attend().
[[nodiscard]] inline layer shared_with(int owner) {
    layer of;
    of.kind = layer_kind::shared;
    of.owner = owner;
    return of;
}
/// A layer whose keys and values are those of another text, the encoder's: one append() or prefill() while it
/// is empty, then any number of queries in attend(), which see all of them. The number of its tokens is its
/// own: sequence::tokens(layer). It is no part of sequence::tokens(), of steps, drafts, trims, erases and
/// shifts; forks share its pages.
[[nodiscard]] inline layer cross_layer(layer of) {
    of.kind = layer_kind::cross;
    return of;
}
/// Latent attention (MLA): a token has one latent of latent_channels + rotary_channels, which is its key for
/// all query heads. Its first value_channels (0: latent_channels) are its value. The engine multiplies the
/// matrices of the heads into queries and outputs ("absorbed").
/// It is stored once: append() and prefill() get k, and a v of 0 tokens. Queries have all channels, outputs
/// value_channels.
[[nodiscard]] inline layer latent_attention(int latent_channels, int rotary_channels,
                                            int value_channels = 0) {
    layer of{1, latent_channels + rotary_channels, value_channels == 0 ? latent_channels : value_channels};
    of.kind = layer_kind::latent;
    of.rotary_channels = rotary_channels;
    return of;
}
/// The keys by which queries select the tokens that other layers attend to (the indexer of DeepSeek V3.2):
/// one of `channels` channels per token. append() and prefill() take k, and a v and queries of 0 tokens;
/// cache::select() gives lists for listed_tokens. Usually in int8: a byte per channel and a scale per token.
[[nodiscard]] inline layer index_layer(int channels = 128) {
    layer of{1, channels};
    of.kind = layer_kind::index;
    return of;
}
/// A layer whose state the engine reads and writes in place, in sequence::state().
[[nodiscard]] inline layer state_layer(std::vector<state_part> parts) {
    layer of;
    of.kind = layer_kind::state;
    of.parts = std::move(parts);
    return of;
}

namespace detail {

/// Does a layer have pages of K and none of V?
constexpr bool holds_keys_alone(layer_kind kind) noexcept {
    return kind == layer_kind::latent || kind == layer_kind::index;
}
/// The tensors of which a layer with tokens has pages: K and V, or K alone.
inline std::span<const tensor> tensors_of(const layer& of) noexcept {
    static constexpr tensor both[] = {tensor::key, tensor::value};
    return std::span(both).first(holds_keys_alone(of.kind) ? 1 : 2);
}

/// "layer 3, sliding window of 1024, 8 x 128": kv heads x channels of a key, and of a value where they
/// differ. "layer 4, state of 2 parts".
std::string describe_layer(int i, const layer& of);

/// The list of a cache of equal layers. Raises kvq::error for an impossible shape.
std::vector<layer> equal_layers(const cache_shape& shape);

/// Gives shared layers the shape, formats and rotation of their owners. Raises kvq::error for an impossible
/// owner, or another shape.
std::vector<layer> with_owners(std::vector<layer> layers);

/// How the keys of all layers are rotated: as they say themselves, or as `of_cache` says (one for all layers,
/// or one per layer). Raises kvq::error where both do, or a rotation does not fit.
rotation_table rotations_of(const std::vector<layer>& layers, const std::vector<rotary_embedding>& of_cache);

/// The parts of layers with state, if there are any. Raises kvq::error for an impossible part.
std::optional<state_layout> state_of(const std::vector<layer>& layers);

/// The shapes of the layers of a cache.
class layer_shapes {
public:
    /// layers: with_owners(). Raises kvq::error for an empty list, or an impossible layer.
    explicit layer_shapes(const std::vector<layer>& layers);

    int count() const noexcept { return static_cast<int>(of_.size()); }
    /// Of one layer; its `layers` is the number of all.
    const cache_shape& operator[](int i) const noexcept { return of_[static_cast<std::size_t>(i)]; }
    /// One layer of each shape, in the order of the list; of layers with keys and values. Layers of
    /// keys alone have shapes of their own.
    const std::vector<int>& distinct() const noexcept { return distinct_; }
    /// Are all of them full attention of one shape?
    bool equal() const noexcept { return full_ && distinct_.size() == 1; }

private:
    static constexpr int most_window = 1 << 29;  // sums with other options fit in an int
    std::vector<cache_shape> of_;
    std::vector<int> distinct_;
    bool full_ = true;
};

}  // namespace detail
}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "layers-inl.hpp"
#endif
