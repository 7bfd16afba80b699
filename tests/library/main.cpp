// SPDX-License-Identifier: MIT
// The compiled library as an engine uses it: formats by name, caches of them, and no silent slow path.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <kvq/format/find_format.hpp>
#include <kvq/kvq.hpp>
#include <kvq/schemes/presets.hpp>
#include <kvq/schemes/rotated_records.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "support/peaked.hpp"
#include "support/random.hpp"

#if defined(KVQ_COMPILED)
#include <kvq/cpu/simd.hpp>
#endif

// The static library shows the parts of every instruction set that it has (src/builtin_formats.cpp); the
// shared one hides them.
#if defined(KVQ_EVERY_LEVEL)
#include <kvq/cpu/arch/arch.hpp>

#include "kvq_levels.inc"

using add_entry = void (*)(void*, const kvq::builtin_format*);
#define KVQ_DECLARE_PART(level, part) extern "C" void kvq_builtin_##level##_##part(void*, add_entry);
#define KVQ_DECLARE(level) KVQ_PARTS(KVQ_DECLARE_PART, level)
KVQ_LEVELS(KVQ_DECLARE)
#endif

namespace {

constexpr kvq::tensor roles[] = {kvq::tensor::key, kvq::tensor::value};

std::string text(kvq::tensor role) { return role == kvq::tensor::key ? "keys" : "values"; }

/// Calls f(name, role, format) for every built-in format and tensor.
template <class F>
void each_format(F&& f) {
    kvq::for_each_format([&](const kvq::builtin_format& entry) {
        for (const kvq::tensor role : roles)
            if (role == kvq::tensor::key ? entry.keys : entry.values)
                f(std::string(entry.name), role, kvq::find_format(entry.name, role));
    });
}

/// Calls f(name, role, format) for the built-in formats of every instruction set that the library has and
/// this CPU can run. The shared library shows those of the best one only. Returns the number of instruction
/// sets.
template <class F>
int each_format_of_every_level(F&& f) {
#if defined(KVQ_EVERY_LEVEL)
    int levels = 0;
    const auto call = [&](const std::vector<kvq::builtin_format>& list) {
        ++levels;
        for (const kvq::builtin_format& entry : list)
            for (const kvq::tensor role : roles)
                if (role == kvq::tensor::key ? entry.keys : entry.values)
                    f(std::string(entry.name), role, entry.make(entry.group, nullptr, 0));
    };
    const add_entry add = [](void* to, const kvq::builtin_format* entry) {
        static_cast<std::vector<kvq::builtin_format>*>(to)->push_back(*entry);
    };
#define KVQ_ADD_PART(level, part) kvq_builtin_##level##_##part(&list, add);
#define KVQ_CALL(level)                                  \
    if (kvq::arch::level::available()) {                 \
        std::vector<kvq::builtin_format> list;           \
        KVQ_PARTS(KVQ_ADD_PART, level)                   \
        call(list);                                      \
    } else {                                             \
        MESSAGE(#level " is not run on this processor"); \
    }
    KVQ_LEVELS(KVQ_CALL)
    return levels;
#else
    each_format(f);
    return 1;
#endif
}

bool is_row_format(const std::string& name) {
    const auto has = [&](const auto& l) { return name == l.name; };
    return std::any_of(std::begin(kvq::row_layouts), std::end(kvq::row_layouts), has) ||
           std::any_of(std::begin(kvq::record_layouts), std::end(kvq::record_layouts), has) ||
           name == kvq::int4_token_head.name;
}
/// Records of models with one head_dim.
bool has_own_head_dim(const std::string& name) {
    return std::any_of(std::begin(kvq::record_layouts), std::end(kvq::record_layouts),
                       [&](const kvq::record_layout& l) { return name == l.name && l.head_dim > 0; });
}

}  // namespace

TEST_CASE("every name is there once for each tensor, and every preset is among them") {
    std::set<std::string> names[2];
    each_format([&](const std::string& name, kvq::tensor role, const kvq::format& f) {
        INFO(name, " for ", text(role));
        CHECK(names[role == kvq::tensor::value].insert(name).second);
        CHECK(f.supports(role));
    });
    std::set<std::string> expected{
        "fp16", "bf16", "fp32", "int8", "e4m3", "nested4", kvq::int4_token_head.name};
    for (const kvq::row_layout& l : kvq::row_layouts) expected.insert(l.name);
    for (const kvq::record_layout& l : kvq::record_layouts) expected.insert(l.name);
    kvq::for_each_preset([&]<class Preset>(Preset) { expected.insert(Preset::name); });
    std::set<std::string> without_groups = expected;
    for (int bits = 1; bits <= 8; ++bits)
        for (const char* family : {"affine-", "kivi-"}) {
            without_groups.insert(family + std::to_string(bits));
            for (const char* group : {"-g32", "-g64", "-g128"})
                expected.insert(family + std::to_string(bits) + group);
        }
    CHECK(names[0] == expected);
    CHECK(names[1] == expected);
    // What KVQ_LIBRARY_FORMATS may name (src/CMakeLists.txt).
    std::istringstream known(KVQ_KNOWN_NAMES);
    std::set<std::string> accepted;
    for (std::string name; known >> name;) accepted.insert(name);
    CHECK(accepted == without_groups);
}

TEST_CASE("every built-in format quantizes, dequantizes and attends in vectors, for every usual head_dim") {
    std::set<std::string> backends;
    const auto check = [&](const std::string& name, kvq::tensor role, const kvq::format& f) {
        backends.insert(f.backend());
        if (is_row_format(name)) return;  // its code is portable
        for (const int dim : {48, 64, 80, 96, 128, 192, 256})
            for (const int tokens : {64, 128}) {
                for (const auto window :
                     {kvq::float_type::fp16, kvq::float_type::bf16, kvq::float_type::fp32}) {
                    const auto d = f.describe({role, tokens, dim}, window);
                    INFO(name, " for ", text(role), ", ", tokens, " tokens of ", dim, " channels, window ",
                         static_cast<int>(window), ", on ", std::string(f.backend()));
                    CHECK(d.quantize);
                    CHECK(d.dequantize);
                    CHECK(d.attend);
                    CHECK(d.transform);
                }
            }
    };
    const int levels = each_format_of_every_level(check);
    CHECK(levels >= 1);
    CHECK(backends.size() == static_cast<std::size_t>(levels));
}

TEST_CASE("one dominant key in every page: formats of every instruction set") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    std::vector<kvq::format> keys, values;
    each_format_of_every_level([&](const std::string& name, kvq::tensor role, const kvq::format& f) {
        if (has_own_head_dim(name)) return;
        (role == kvq::tensor::key ? keys : values).push_back(f);
    });
    REQUIRE(keys.size() == values.size());
    const int pages[] = {16, 32, 128, 256, 1024};
    // KVQ_LONG=1: every size of pages and queries.
    for (std::size_t i = 0; i < keys.size(); ++i)
        for (const int page : pages)
            for (const float scale : {1.0f, 3.0f, 10.0f}) {
                if (!test::long_tests() && (page != pages[i % 5] || scale != 1.0f)) continue;
                const test::peaked_case of{1100, page, i % 2 == 0 ? 1 : 16, scale, i % 3 == 0};
                const auto error = test::measure_peaked(keys[i], values[i], of, random);
                INFO(std::string(keys[i].name()), " on ", std::string(keys[i].backend()), ": ", of.text());
                CHECK(error.output <= of.bound());
                CHECK(error.lse <= error.lse_bound());
            }
}

TEST_CASE("a cache of every format takes a prompt in chunks and decodes, near the 16-bit one") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = 64};
    const int tokens = 300;
    const auto k = random.normals(tokens * 2 * 64), v = random.normals(tokens * 2 * 64),
               q = random.normals(tokens * 4 * 64);
    const auto run = [&](const char* name) {
        kvq::cache cache(shape, {.keys = kvq::find_format(name, kvq::tensor::key),
                                 .values = kvq::find_format(name, kvq::tensor::value),
                                 .sinks = 4,
                                 .recent = 32,
                                 .page_tokens = 64});
        auto sequence = cache.new_sequence();
        std::vector<float> out(tokens * 4 * 64);
        const auto step = [&](int at, int n) {
            const kvq::token_view<const float> keys(k.data() + at * 2 * 64, n, 2, 64),
                values(v.data() + at * 2 * 64, n, 2, 64);
            sequence.prefill(0, keys, values, kvq::query_view(q.data() + at * 4 * 64, n, 4, 64),
                             kvq::output_view(out.data() + at * 4 * 64, n, 4, 64));
        };
        for (int at = 0; at < 200; at += 100) step(at, 100);
        for (int at = 200; at < tokens; ++at) step(at, 1);
        return out;
    };
    const auto exact = run("fp32");
    const std::set<std::string> names = [] {
        std::set<std::string> all;
        kvq::for_each_format([&](const kvq::builtin_format& entry) { all.insert(entry.name); });
        return all;
    }();
    for (const std::string& name : names) {
        if (has_own_head_dim(name)) continue;
        const auto out = run(name.c_str());
        double error = 0, size = 0;
        for (std::size_t i = 0; i < out.size(); ++i) {
            error += (static_cast<double>(out[i]) - exact[i]) * (static_cast<double>(out[i]) - exact[i]);
            size += static_cast<double>(exact[i]) * exact[i];
        }
        const bool bits8 = name.find("-8-") != std::string::npos || name == "int8" || name == "ref8";
        const bool bits16 = name == "fp16" || name == "bf16" || name == "fp32";
        // Of one bit a range keeps the least and the largest value of a group, which is far from normal
        // values.
        const bool bits1 = name.find("-1-") != std::string::npos;
        INFO(name, ": ", std::sqrt(error / size));
        CHECK(std::sqrt(error / size) < (bits16 ? 5e-3 : bits8 ? 2e-2 : bits1 ? 5.0 : 1.2));
    }
}

#if defined(KVQ_COMPILED)
TEST_CASE("formats of schemes of the program have the library's kernels, and say which it lacks") {
    const kvq::format listed = kvq::find_format("affine-4-g64", kvq::tensor::key);
    const kvq::block_shape shape{kvq::tensor::key, 128, 128};
    using of_library = kvq::affine<4, kvq::per_channel<48>, kvq::params<kvq::bfloat16>>;
    CHECK(kvq::make_format<kvq::low2::keys>().describe(shape).all());
    CHECK(kvq::make_format<kvq::std4::values>().describe({kvq::tensor::value, 128, 128}).all());
    for (const kvq::format& f :
         {kvq::make_format<of_library>(), kvq::make_format<kvq::hadamard<of_library>>(),
          kvq::make_format<kvq::full<kvq::bfloat16>>(), kvq::make_format<kvq::float_rows<kvq::e4m3>>()}) {
        INFO(f.name());
        CHECK(std::string(f.backend()) == listed.backend());
        CHECK(f.describe(shape).all());
    }
    const auto lacking =
        kvq::make_format<kvq::scheme<kvq::bits<4>, kvq::symmetric, kvq::per_token<32>, kvq::params<float>>>()
            .describe(shape);
    CHECK(lacking.attend);
    CHECK(std::string(lacking.quantize_by) ==
          "portable: kvq::library has none of this codec; files with KVQ_HEADER_ONLY do");
    CHECK(std::string(lacking.dequantize_by) == lacking.quantize_by);
    // Widths that attention cannot read from the codes: blocks are dequantized first, without an order of
    // channels.
    const auto dequantized =
        kvq::make_format<kvq::mixed_affine<kvq::code_widths<5, 3>, kvq::average_eighths<32>>>();
    CHECK(dequantized.describe(shape).dequantizes_first);
    CHECK(!dequantized.functions().transforms);
    // A transform before values that attention reads as they are: they are dequantized first as well.
    const auto turned = kvq::make_format<kvq::hadamard<kvq::full<kvq::float16>>>();
    CHECK(turned.describe(shape).dequantizes_first);
}
#endif
