// SPDX-License-Identifier: MIT
// The C interface over a library that was built with KVQ_LIBRARY_FORMATS=int8: what it needs itself is there
// as well.
#include <doctest/doctest.h>
#include <kvq/kvq.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace {

constexpr int tokens = 32, heads = 2, dim = 64, values = tokens * heads * dim;

template <class T>
T init() {
    T s;
    KVQ_INIT(s);
    return s;
}

std::vector<float> some_values() {
    std::vector<float> x(values);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i * i % 977));
    return x;
}

/// Is y as near to x as 8 bits of values between -1 and 1 allow?
bool near(const std::vector<float>& x, const std::vector<float>& y) {
    return std::equal(x.begin(), x.end(), y.begin(),
                      [](float a, float b) { return std::fabs(a - b) <= 1.0f / 127; });
}

#define OK(...) REQUIRE_MESSAGE((__VA_ARGS__) == KVQ_OK, kvq_last_error())

}  // namespace

TEST_CASE("the list is the wanted format and those of plain values, others are refused") {
    std::int32_t count = 0;
    OK(kvq_format_count(&count));
    std::set<std::string> names;
    for (std::int32_t i = 0; i < count; ++i) {
        auto entry = init<kvq_format_entry>();
        OK(kvq_format_list(i, &entry));
        names.insert(entry.name);
    }
    CHECK(names == std::set<std::string>{"bf16", "fp16", "fp32", "int8"});
    kvq_format* format = nullptr;
    CHECK(kvq_format_find("std4", KVQ_KEY, nullptr, &format) != KVQ_OK);
}

TEST_CASE("pages in memory of the caller are quantized and dequantized in every format") {
    for (const char* const name : {"int8", "fp16", "bf16", "fp32"})
        for (const kvq_role role : {KVQ_KEY, KVQ_VALUE}) {
            INFO(name, ", role ", role);
            kvq_format* format = nullptr;
            OK(kvq_format_find(name, role, nullptr, &format));
            const kvq_page_shape shape{role, tokens, heads, dim, 0, 0};
            std::size_t page_bytes = 0, scratch_bytes = 0, not_finite = 0;
            OK(kvq_format_page_bytes(format, &shape, &page_bytes, &scratch_bytes));
            alignas(64) static std::byte page[1 << 16], scratch[1 << 16];
            REQUIRE(page_bytes <= sizeof page);
            REQUIRE(scratch_bytes <= sizeof scratch);
            std::vector<float> x = some_values(), y(values);
            const kvq_tensor in{x.data(), KVQ_FP32, tokens, heads, dim, 0, 0},
                out{y.data(), KVQ_FP32, tokens, heads, dim, 0, 0};
            OK(kvq_format_quantize(format, &shape, &in, page, page_bytes, scratch, scratch_bytes,
                                   &not_finite));
            OK(kvq_format_dequantize(format, &shape, page, page_bytes, &out, scratch, scratch_bytes));
            CHECK(near(x, y));
            OK(kvq_format_free(format));
        }
}

TEST_CASE("a cache has a window of every type of plain values") {
    for (const char* const window : {"fp16", "bf16", "fp32"}) {
        INFO(window);
        auto options = init<kvq_cache_options>();
        options.layers = 1;
        options.kv_heads = heads;
        options.head_dim = dim;
        options.keys = options.values = "int8";
        options.window = window;
        options.sinks = KVQ_NONE;
        options.recent = 4;
        options.page_tokens = 16;
        kvq_cache* cache = nullptr;
        kvq_sequence* s = nullptr;
        OK(kvq_cache_create(&options, &cache));
        OK(kvq_sequence_create(cache, &s));
        std::vector<float> x = some_values(), y(values);
        const kvq_tensor in{x.data(), KVQ_FP32, tokens, heads, dim, 0, 0},
            out{y.data(), KVQ_FP32, tokens, heads, dim, 0, 0};
        OK(kvq_sequence_append(s, 0, &in, &in));
        OK(kvq_sequence_dequantize(s, 0, KVQ_KEY, 0, &out));
        CHECK(near(x, y));
        OK(kvq_sequence_free(s));
        OK(kvq_cache_free(cache));
    }
}
