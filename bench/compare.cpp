// SPDX-License-Identifier: MIT
// One round of the rows of scripts/compare for the format FORMAT: microseconds of each, the fifth percentile
// of many calls. The same file compiles against this tree and against older ones, where a cache was a
// template.
//
//   decode     attention of one token, 32/8 heads of 128 channels, pages of 128. 4k: one layer, which stays
//              in the processor's cache. 16k: six layers in turn, as a model reads them, from memory; one
//              layer of 64 MB alone stays in a large cache or not, as its physical pages happen to lie, and
//              the same program differs by a third from start to start.
//   prefill    attention of 512 query tokens over 4096 tokens
//   prompt     what an engine calls for 512 new tokens behind 4096, quantizing included: prefill, or append
//              and attend where there is no prefill; and the trim that takes them away again
//   quantize   one block of 128 tokens, from 16-bit values; dequantize: to 16-bit values; blocks that stay in
//              L2
#if __has_include(<kvq/cpu/simd.hpp>)
#include <kvq/cpu/simd.hpp>
#else
#include <kvq/backends/simd.hpp>
#endif
#include <kvq/kvq.hpp>
#include <kvq/quant/calibration.hpp>
#include <kvq/schemes/affine.hpp>
#include <kvq/schemes/int8.hpp>
#include <kvq/schemes/kivi.hpp>
#include <kvq/schemes/presets.hpp>
#if __has_include(<kvq/format/format.hpp>)
#define FORMATS_ARE_VALUES
#else
#include <kvq/attention/workspace.hpp>
#endif

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace {

constexpr int heads = 8, q_heads = 32, dim = 128, page = 128;
constexpr kvq::cache_shape shape_of(int layers) {
    return {.layers = layers, .kv_heads = heads, .head_dim = dim};
}

// Normal values; every eighth channel of keys is wider, as in models.
std::vector<kvq::float16> normals(int n, unsigned seed, bool keys) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<kvq::float16> x(static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < x.size(); ++i)
        x[i] = kvq::float16(normal(random) * (keys && i % 8 == 0 ? 4.0f : 1.0f));
    return x;
}

/// n bytes that begin with a cache line.
std::byte* lines(std::vector<std::byte>& memory, std::size_t n) {
    memory.resize(n + 64);
    return memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64;
}

// Older trees say encode.
template <class Scheme>
void write_values(const Scheme& scheme, const kvq::block_shape& block, float* values, std::byte* to) {
    if constexpr (requires { scheme.quantize(block, kvq::block_id(), values, to); })
        scheme.quantize(block, {}, values, to);
    else
        scheme.encode(block, {}, values, to);
}

std::string wanted;  // beginning of the names of rows

template <class F>
void measure(const std::string& row, double seconds, F&& f) {
    if (!row.starts_with(wanted)) return;
    using clock = std::chrono::steady_clock;
    std::vector<double> times;
    f();
    const auto end = clock::now() + std::chrono::duration<double>(seconds);
    while (times.size() < 20 || clock::now() < end) {
        const auto start = clock::now();
        f();
        times.push_back(std::chrono::duration<double, std::micro>(clock::now() - start).count());
    }
    std::sort(times.begin(), times.end());
    std::printf("%s\t%.3f\n", row.c_str(), times[times.size() / 20]);
    std::fflush(stdout);
}

template <class Keys, class Values, class Do>
void with_cache(int layers, const Keys& keys, const Values& values, Do&& act) {
    const kvq::cache_shape shape = shape_of(layers);
    kvq::cache_options options;
    options.page_tokens = page;
#if defined(FORMATS_ARE_VALUES)
    options.keys = kvq::make_format<kvq::simd<>>(keys);
    options.values = kvq::make_format<kvq::simd<>>(values);
    kvq::cache cache(shape, options);
#else
    using cache_type = kvq::cache<Keys, Values, kvq::simd<>>;
    cache_type cache(shape, options, typename cache_type::key_table(keys),
                     typename cache_type::value_table(values));
#endif
    act(cache);
}

constexpr int step = 1024;

/// Appends `tokens` tokens to every layer.
template <class Sequence>
void fill(Sequence& sequence, int layers, int tokens) {
    const auto k = normals(step * heads * dim, 1, true), v = normals(step * heads * dim, 2, false);
    while (sequence.tokens() < tokens)
        for (int layer = 0; layer < layers; ++layer)
            sequence.append(layer, kvq::token_view<const kvq::float16>(k.data(), step, heads, dim),
                            kvq::token_view<const kvq::float16>(v.data(), step, heads, dim));
}

/// One layer of 4096 tokens.
template <class Cache>
void one_layer(const std::string& name, Cache& cache, double seconds) {
    auto sequence = cache.new_sequence();
    fill(sequence, 1, 4096);
    constexpr int tokens = 512;
    const auto k = normals(tokens * heads * dim, 1, true), v = normals(tokens * heads * dim, 2, false);
    const auto q = normals(tokens * q_heads * dim, 3, false);
    std::vector<float> out(tokens * q_heads * dim);
    const kvq::token_view<const kvq::float16> keys(k.data(), tokens, heads, dim),
        values(v.data(), tokens, heads, dim), queries(q.data(), tokens, q_heads, dim);
    const kvq::token_view<float> outputs(out.data(), tokens, q_heads, dim);
    const kvq::serial_executor one;
    kvq::workspace space;
    measure("decode 4k " + name, seconds, [&] {
        sequence.attend(0, kvq::token_view<const kvq::float16>(q.data(), 1, q_heads, dim),
                        kvq::token_view<float>(out.data(), 1, q_heads, dim), kvq::causal{}, one, space);
    });
    measure("prefill 512 x 4k " + name, 3 * seconds,
            [&] { sequence.attend(0, queries, outputs, kvq::causal{}, one, space); });
    measure("prompt 512 x 4k " + name, 3 * seconds, [&] {
        if constexpr (requires {
                          sequence.prefill(0, keys, values, queries, outputs, kvq::causal{}, one, space);
                      }) {
            sequence.prefill(0, keys, values, queries, outputs, kvq::causal{}, one, space);
        } else {
            sequence.append(0, keys, values);
            sequence.attend(0, queries, outputs, kvq::causal{}, one, space);
        }
        sequence.trim(4096);
    });
}

/// Layers of 16384 tokens, one after the other.
template <class Cache>
void layers_in_turn(const std::string& name, Cache& cache, int layers, double seconds) {
    auto sequence = cache.new_sequence();
    fill(sequence, layers, 16384);
    const auto q = normals(q_heads * dim, 3, false);
    std::vector<float> out(q_heads * dim);
    kvq::workspace space;
    int layer = 0;
    measure("decode 16k " + name, 4 * seconds, [&] {
        sequence.attend(layer, kvq::token_view<const kvq::float16>(q.data(), 1, q_heads, dim),
                        kvq::token_view<float>(out.data(), 1, q_heads, dim), kvq::causal{},
                        kvq::serial_executor{}, space);
        layer = (layer + 1) % layers;
    });
}

template <class Scheme>
void block_rows(const std::string& name, const Scheme& scheme, kvq::tensor role, double seconds) {
    const kvq::block_shape block{role, page, dim};
    constexpr int blocks = 8;
    const kvq::full<kvq::float16> values;
    const std::size_t in_bytes = values.block_bytes(block), bytes = scheme.block_bytes(block);
    // All begin with a cache line, as pages do: values of tokens that lie otherwise move rows by up to 7 %.
    std::vector<std::byte> memory;
    std::byte* const in = lines(memory, blocks * in_bytes + blocks * bytes + 6 * block.values() + 4 * 64);
    std::byte* const out = in + (blocks * in_bytes + 63) / 64 * 64;
    auto* const x = reinterpret_cast<float*>(out + (blocks * bytes + 63) / 64 * 64);
    auto* const tokens = reinterpret_cast<kvq::float16*>(x + (block.values() + 15) / 16 * 16);
    for (std::size_t b = 0; b < blocks; ++b) {
        const auto half = normals(page * dim, 10 + static_cast<unsigned>(b), role == kvq::tensor::key);
        for (std::size_t i = 0; i < half.size(); ++i) x[i] = static_cast<float>(half[i]);
        write_values(values, block, x, in + b * in_bytes);
    }
#if defined(FORMATS_ARE_VALUES)
    const kvq::format f = kvq::make_format<kvq::simd<>>(scheme);
    const auto quantize = [&](std::size_t b) {
        f.functions().quantize(f.scheme(), block, {}, kvq::float_type::fp16, in + b * in_bytes,
                               out + b * bytes, x);
    };
    const auto dequantize = [&](std::size_t b) {
        f.functions().dequantize(f.scheme(), block, {}, out + b * bytes, kvq::float_type::fp16, tokens, dim,
                                 x);
    };
#else
    using backend = kvq::simd<>;
    const auto quantize = [&](std::size_t b) {
        backend::encode<kvq::float16>(scheme, block, {}, in + b * in_bytes, out + b * bytes, x);
    };
    const auto dequantize = [&](std::size_t b) {
        backend::decode(scheme, block, {}, out + b * bytes, tokens, dim, x);
    };
#endif
    const std::string of = name + (role == kvq::tensor::key ? " K" : " V");
    measure("quantize " + of, seconds, [&] {
        for (std::size_t b = 0; b < blocks; ++b) quantize(b);
    });
    measure("dequantize " + of, seconds, [&] {
        for (std::size_t b = 0; b < blocks; ++b) dequantize(b);
    });
}

/// keys_of: the scheme of keys for a number of layers.
template <class KeysOf, class Values>
void rows_of(const std::string& name, double seconds, const KeysOf& keys_of, const Values& values) {
    with_cache(1, keys_of(1), values, [&](auto& cache) { one_layer(name, cache, seconds); });
    if (const std::string row = "decode 16k " + name; row.starts_with(wanted))
        with_cache(6, keys_of(6), values, [&](auto& cache) { layers_in_turn(name, cache, 6, seconds); });
    block_rows(name, keys_of(1), kvq::tensor::key, seconds);
    block_rows(name, values, kvq::tensor::value, seconds);
}

template <class Keys, class Values>
void rows(const std::string& name, double seconds) {
    rows_of(
        name, seconds, [](int) { return Keys(); }, Values());
}

template <class Preset>
void plan_rows(const std::string& name, double seconds) {
    using keys = typename Preset::keys;
    const auto k = normals(1024 * heads * dim, 1, true);
    const auto keys_of = [&](int layers) {
        kvq::calibration statistics(shape_of(layers));
        for (int layer = 0; layer < layers; ++layer)
            statistics.add_keys(layer, kvq::token_view<const kvq::float16>(k.data(), 1024, heads, dim));
        return keys(std::make_shared<const kvq::width_plan>(keys::make_plan(statistics)));
    };
    rows_of(name, seconds, keys_of, typename Preset::values{});
}

/// The name of a format as a template argument.
template <std::size_t N>
struct format_name {
    char text[N]{};
    constexpr format_name(const char (&s)[N]) {
        for (std::size_t i = 0; i < N; ++i) text[i] = s[i];
    }
    constexpr bool names(std::string_view name) const { return name == std::string_view(text, N - 1); }
};
/// A template, so that only what is named is compiled.
template <format_name Only>
void measure_formats(double seconds) {
    using sixteen = kvq::full<kvq::float16>;
    if constexpr (Only.names("fp16")) rows<sixteen, sixteen>("fp16", seconds);
    if constexpr (Only.names("int8")) rows<kvq::int8, kvq::int8>("int8", seconds);
    if constexpr (Only.names("affine-4-g64")) {
        using affine = kvq::affine<4, kvq::per_token<64>>;
        rows<affine, affine>("affine-4-g64", seconds);
    }
    if constexpr (Only.names("kivi-4-g128"))
        rows<kvq::kivi<4, 128>::keys, kvq::kivi<4, 128>::values>("kivi-4-g128", seconds);
    if constexpr (Only.names("kivi-2-g128"))
        rows<kvq::kivi<2, 128>::keys, kvq::kivi<2, 128>::values>("kivi-2-g128", seconds);
    if constexpr (Only.names("std4")) rows<kvq::std4::keys, kvq::std4::values>("std4", seconds);
    if constexpr (Only.names("mix4-plan")) plan_rows<kvq::mix4>("mix4-plan", seconds);
    if constexpr (Only.names("low2-plan")) plan_rows<kvq::low2>("low2-plan", seconds);
}

}  // namespace

#if !defined(FORMAT)  // as bench/CMakeLists.txt builds it
#define FORMAT "fp16"
#endif

int main(int argc, char** argv) {
    if (argc > 2) wanted = argv[2];
    measure_formats<FORMAT>(argc > 1 ? std::atof(argv[1]) : 0.1);  // seconds of a row
    return 0;
}
