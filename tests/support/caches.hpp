// SPDX-License-Identifier: MIT
// Caches of every kind that the tests use, and what two sequences must have in common to be called the same.
#pragma once

#include <cstring>
#include <kvq/kvq.hpp>
#include <kvq/schemes/affine.hpp>
#include <vector>

#include "scheme_list.hpp"
#include "tensors.hpp"
#include "typed_cache.hpp"

namespace test {

// ---- kinds of caches -------------------------------------------------------------------------------------

using int8_cache = test::typed_cache<kvq::int8>;
using kivi_cache = test::typed_cache<kvq::kivi<4, 32>>;
/// Several formats for K and for V, one of them the window's own, and different ones per layer.
using mixed_cache = test::typed_cache<
    test::formats<kvq::affine<3, kvq::per_channel<7>, kvq::params<kvq::bfloat16>>, kvq::full<kvq::float16>,
                  product_scheme<4>>,
    test::formats<kvq::affine<2, kvq::per_token<5>, kvq::params<float>>, kvq::full<float>, rotated>>;
/// Nothing in it comes from kvq.
using custom_cache =
    test::typed_cache<test::formats<odd_keys, magnitude_bytes>, test::formats<magnitude_bytes, odd_values>>;
/// The other two windows.
using product_cache = test::typed_cache<product_scheme<7>, product_scheme<7>, test::usual, float>;
using rotated_cache = test::typed_cache<rotated, rotated, test::usual, kvq::bfloat16>;
using plain_cache = test::typed_cache<kvq::full<kvq::float16>>;
/// Stored bounds for keys of every kind that has no others: codes, values, behind a transform, of a user; and
/// keys that have them. Two planes, for both.
using bounded_cache =
    test::typed_cache<test::formats<bounded<kvq::affine<4>>, bounded<kvq::full<kvq::float16>>,
                                    bounded<rotated>, bounded<magnitude_bytes>, bounded<kvq::int8>,
                                    kvq::affine<4, kvq::per_channel<>>, with_planes<kvq::affine<4>>>,
                      test::formats<kvq::int8, kvq::affine<2>, with_planes<kvq::affine<4>>>>;

}  // namespace test

/// Formats of these caches that are compiled once, in more_formats.cpp.
#define KVQ_TEST_OWN_SCHEMES(X)                                                          \
    X(kvq::affine<3 KVQ_COMMA kvq::per_channel<7> KVQ_COMMA kvq::params<kvq::bfloat16>>) \
    X(kvq::affine<2 KVQ_COMMA kvq::per_token<5> KVQ_COMMA kvq::params<float>>)           \
    X(test::product_scheme<4>)                                                           \
    X(test::product_scheme<7>)                                                           \
    X(test::rotated)                                                                     \
    X(test::odd_keys)                                                                    \
    X(test::odd_values)                                                                  \
    X(test::magnitude_bytes)
#if !defined(KVQ_TEST_FORMATS_HERE)
KVQ_TEST_OWN_SCHEMES(KVQ_TEST_EXTERN)
#endif

/// One composed, one mixed, one that is all the user's: for tests whose subject is the cache and not the
/// scheme, and where a build takes long.
#define KVQ_TEST_FEW_CACHES test::kivi_cache, test::mixed_cache, test::custom_cache
#if defined(KVQ_TEST_FEWER_SCHEMES)
#define KVQ_TEST_CACHES KVQ_TEST_FEW_CACHES
#else
#define KVQ_TEST_CACHES                                                                             \
    test::int8_cache, test::kivi_cache, test::mixed_cache, test::custom_cache, test::product_cache, \
        test::rotated_cache, test::plain_cache
#endif

namespace test {

/// Schemes that are made by make_scheme.
template <class Table>
struct table_maker;
template <class S>
struct scheme_maker {
    static S make() { return make_scheme<S>(); }
};
template <class S>
struct scheme_maker<bounded<S>> {
    static bounded<S> make() { return bounded<S>(make_scheme<S>()); }
};
template <class S>
struct scheme_maker<with_planes<S>> {
    static with_planes<S> make() { return with_planes<S>(make_scheme<S>()); }
};
template <class... S>
struct table_maker<scheme_tuple<S...>> {
    static scheme_tuple<S...> make() { return scheme_tuple<S...>(scheme_maker<S>::make()...); }
};

template <class Cache>
Cache make_cache(const kvq::cache_shape& shape, const kvq::cache_options& options) {
    return Cache(shape, options, table_maker<typename Cache::key_table>::make(),
                 table_maker<typename Cache::value_table>::make());
}

/// Formats by turns, if the cache has several.
template <class Cache>
std::vector<kvq::layer_format> rotate_formats(int layers, int first = 0) {
    std::vector<kvq::layer_format> formats;
    for (int i = first; i < first + layers; ++i)
        formats.push_back({i % (Cache::key_table::size - 1), i % (Cache::value_table::size - 1)});
    return formats;
}

/// Small pages, so that few tokens make many of them.
inline kvq::cache_options random_options(generator& random) {
    kvq::cache_options options;
    options.sinks = random.pick(std::vector<int>{0, 0, 1, 4, 5});
    options.recent = random.pick(std::vector<int>{0, 1, 7, 16, 40});
    options.page_tokens = random.pick(std::vector<int>{1, 4, 7, 8, 16, 32, 33});
    options.rollback = random.pick(std::vector<int>{0, 1, 8, 16, 50});
    return options;
}

inline kvq::cache_shape random_cache_shape(generator& random, int layers, int most_channels = 40) {
    kvq::cache_shape shape;
    shape.layers = layers;
    shape.kv_heads = random.between(1, 3);
    shape.head_dim = random.between(1, most_channels);
    if (random.one_in(2)) shape.value_dim = random.between(1, most_channels);
    return shape;
}

// ---- input -----------------------------------------------------------------------------------------------

/// K and V of a token stream; layers see different parts of it.
struct stream {
    tensor<float> k, v;

    stream(generator& random, const kvq::cache_shape& shape, int tokens)
        : k(random_tensor(random, tokens, shape.kv_heads, shape.head_dim)),
          v(random_tensor(random, tokens, shape.kv_heads, shape.dim(kvq::tensor::value))) {}
};

/// Appends tokens [first, first + n) of the stream to all layers.
template <class Sequence>
void append(Sequence& sequence, int layers, const stream& s, int first, int n) {
    for (int layer = 0; layer < layers; ++layer)
        sequence.append(layer, s.k.slice(first, n), s.v.slice(first, n));
}

// ---- what a sequence holds -------------------------------------------------------------------------------

struct held_page {
    int format, first_token, tokens;
    std::vector<std::byte> bytes;
    bool operator==(const held_page&) const = default;
};

/// Every byte that stands for a token: quantized pages as they are, and the used part of window pages.
/// `all`: the unused part as well, which is zero as long as nothing was trimmed.
template <class Cache>
std::vector<held_page> contents(const Cache& cache, const typename Cache::sequence_type& sequence,
                                bool all = false) {
    using window = typename Cache::window;
    std::vector<held_page> held;
    const auto take = [&](const kvq::page& p, kvq::tensor role, int first, int tokens) {
        held_page h{p.format, first, tokens, {}};
        if (p.format != 0 || all) {
            p.for_each_plane(
                [&](const std::byte* at, std::size_t n) { h.bytes.insert(h.bytes.end(), at, at + n); });
        } else {
            const kvq::block_shape shape{role, p.tokens, cache.shape().dim(role)};
            const kvq::value_layout<window> layout(shape);
            const std::size_t block = kvq::full<window>{}.block_bytes(shape);
            for (int head = 0; head < cache.shape().kv_heads; ++head)
                for (int t = 0; t < tokens; ++t)
                    for (int c = 0; c < shape.dim; ++c) {
                        const std::byte* at =
                            p.data() + block * static_cast<std::size_t>(head) +
                            sizeof(window) * kvq::full<window>::element(layout, shape, t, c);
                        h.bytes.insert(h.bytes.end(), at, at + sizeof(window));
                    }
        }
        held.push_back(std::move(h));
    };
    for (int layer = 0; layer < cache.shape().layers; ++layer) {
        if (sequence.tokens(layer) == 0) continue;
        const auto pages = sequence.pages(layer);
        for (int e = 0; e < pages.entries(); ++e) {
            const auto entry = pages.at(e);
            take(*entry.keys, kvq::tensor::key, entry.first_token, entry.tokens);
            take(*entry.values, kvq::tensor::value, entry.first_token, entry.tokens);
        }
    }
    return held;
}

/// Attention of one fixed query over every layer, bit for bit.
inline std::vector<std::uint32_t> attention_bits(const kvq::cache& cache, const kvq::sequence& sequence,
                                                 int group = 2) {
    generator random(99);
    const kvq::cache_shape& shape = cache.shape();
    std::vector<std::uint32_t> bits;
    for (int layer = 0; layer < shape.layers; ++layer) {
        if (sequence.tokens(layer) == 0) continue;
        const auto q = random_tensor(random, 1, shape.kv_heads * group, shape.head_dim);
        tensor<float> out(1, shape.kv_heads * group, shape.dim(kvq::tensor::value));
        sequence.attend(layer, q.view(), out.view());
        for (const float x : out.values()) bits.push_back(kvq::detail::bit_cast<std::uint32_t>(x));
    }
    return bits;
}

/// x^ of all tokens of one layer.
template <class Sequence>
tensor<float> dequantized(const Sequence& sequence, const kvq::cache_shape& shape, int layer,
                          kvq::tensor role) {
    tensor<float> out(sequence.tokens(layer), shape.kv_heads, shape.dim(role));
    sequence.dequantize(layer, role, 0, out.view());
    return out;
}

}  // namespace test
