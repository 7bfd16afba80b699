// SPDX-License-Identifier: MIT
// Comparison family: exact. Files, messages and states of every version that is read, pinned: what versions 3
// (states: 1) and 4 hold is one sequence, and version 4 is written byte for byte. KVQ_PRINT_GOLDEN prints
// those of version 4.
//
// The history: 21 tokens; tokens 3 to 8 erased; 6 more; tokens 2 to 5 appended again; 3 more. The state: 13
// tokens of ids 0 and 2; of id 2, those at positions 3 to 5 removed, and the ones behind them moved by -3.
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>
#include <kvq/adapters/sequence_state.hpp>
#include <kvq/io/page_transfer.hpp>
#include <map>

#include "support/messages.hpp"
#include "support/saved.hpp"
#include "support/typed_cache.hpp"

namespace saved_bytes_tests {

namespace {

using test::file_bytes;
using cache_type = test::typed_cache<kvq::affine<4, kvq::per_channel<4>>, kvq::int8>;

constexpr kvq::cache_shape shape{.layers = 2, .kv_heads = 1, .head_dim = 4};

kvq::cache_options options(double base = 10000.0) {
    kvq::cache_options o{.sinks = 1, .recent = 2, .page_tokens = 4, .rollback = 4};
    kvq::rotary_embedding rotary;
    rotary.dims = 4;
    rotary.base = base;
    o.rotary = {rotary};
    return o;
}

file_bytes golden(const std::string& name) {
    static const std::map<std::string, std::string> all = {
#include "saved_bytes.inc"
    };
    const std::string& hex = all.at(name);
    file_bytes bytes;
    for (std::size_t i = 0; i < hex.size(); i += 2)
        bytes.push_back(static_cast<std::byte>(std::stoi(hex.substr(i, 2), nullptr, 16)));
    return bytes;
}
void print(const char* name, const file_bytes& bytes) {
    if (!std::getenv("KVQ_PRINT_GOLDEN")) return;
    std::printf("{\"%s\",", name);
    for (std::size_t i = 0; i < bytes.size(); ++i)
        std::printf("%s%02x", i % 48 == 0 ? (i == 0 ? "\n  \"" : "\"\n  \"") : "",
                    static_cast<unsigned>(bytes[i]));
    std::printf("\"},\n");
}

auto appends_to(file_bytes& bytes) {
    return [&bytes](const void* data, std::size_t n) {
        const auto* const p = static_cast<const std::byte*>(data);
        bytes.insert(bytes.end(), p, p + n);
    };
}
file_bytes sent(const kvq::sequence& s) {
    file_bytes bytes;
    for (int layer = 0; layer < shape.layers; ++layer) kvq::send_pages(s, layer, appends_to(bytes));
    return bytes;
}
kvq::sequence received(kvq::cache& cache, const file_bytes& bytes) {
    kvq::page_receiver receiver(cache);
    test::memory_source source{bytes};
    std::vector<std::byte> storage;
    while (source.position < bytes.size()) receiver.accept(kvq::read_page(source, storage));
    return receiver.finish(28);
}
file_bytes written(kvq::sequence_table& table) {
    file_bytes bytes;
    kvq::write_state(table, appends_to(bytes));
    return bytes;
}
/// Everything behind the header but the seal, which depends on the library's version.
file_bytes body(const file_bytes& file) {
    const auto length = static_cast<std::size_t>(kvq::detail::load_as<std::uint64_t>(file.data()));
    const auto header = kvq::read_safetensors_header(test::memory_source{file});
    file_bytes rest(file.begin() + 8 + static_cast<std::ptrdiff_t>(length), file.end());
    for (const auto& t : header.tensors)
        if (t.name == "seal")
            rest.erase(rest.begin() + static_cast<std::ptrdiff_t>(t.begin),
                       rest.begin() + static_cast<std::ptrdiff_t>(t.end));
    return rest;
}

}  // namespace

TEST_CASE("saved files of versions 3 and 4 are the same sequence") {
    cache_type cache(shape, options());
    const auto old = test::restored(cache, golden("file, version 3"));
    CHECK(old.tokens() == 28);
    print("file, version 4", test::saved(old, {.model = "golden"}));
    const auto now = test::restored(cache, golden("file, version 4"), {.model = "golden"});
    test::require_same(cache, old, cache, now);
    CHECK(body(test::saved(now)) == body(golden("file, version 4")));
    CHECK(body(test::saved(now)).size() <
          body(golden("file, version 3")).size());  // shared pages are there once
}

TEST_CASE("messages of versions 3 and 4 are the same sequence") {
    cache_type cache(shape, options());
    const auto old = received(cache, golden("messages, version 3"));
    print("messages, version 4", sent(old));
    const auto now = received(cache, golden("messages, version 4"));
    test::require_same(cache, old, cache, now);
    test::require_same(cache, old, cache, test::restored(cache, golden("file, version 3")));
    CHECK(sent(now) == golden("messages, version 4"));
}

TEST_CASE("states of versions 1 and 4 are the same sequences") {
    cache_type cache(shape, options());
    kvq::sequence_table old(cache, 3), now(cache, 3);
    kvq::read_state(old, test::memory_source{golden("state, version 1")});
    print("state, version 4", written(old));
    kvq::read_state(now, test::memory_source{golden("state, version 4")});
    for (const int id : {0, 2}) {
        CHECK(now.tokens(id) == (id == 0 ? 13 : 10));
        test::require_same(cache, *old.find(id), cache, *now.find(id));
    }
    CHECK(now.find(1) == nullptr);
    CHECK(written(now) == golden("state, version 4"));
}

TEST_CASE("keys that moved are not read under another rotary embedding; version 3 does not say which") {
    const auto refused = [](const kvq::cache_options& o, const char* numbers) {
        cache_type other(shape, o);
        auto wide = o;
        wide.page_tokens = 8;
        cache_type laid_out(shape, wide);
        kvq::sequence_table table(other, 3);
        for (const std::string& message :
             {test::message_of([&] { test::restored(other, golden("file, version 4")); }),
              test::message_of(
                  [&] { test::restored(laid_out, golden("file, version 4"), {.convert = true}); }),
              test::message_of([&] { received(other, golden("messages, version 4")); }),
              test::message_of(
                  [&] { kvq::read_state(table, test::memory_source{golden("state, version 4")}); })}) {
            INFO(message);
            CHECK(test::contains(
                message, "under another rotary embedding: 4 channels from 0 on, half split, base 10000 "));
            CHECK(test::contains(message, numbers));
        }
        CHECK(other.bytes_in_use() + laid_out.bytes_in_use() == 0);
        CHECK(test::restored(other, golden("file, version 3")).tokens() == 28);
        CHECK(received(other, golden("messages, version 3")).tokens() == 28);
        kvq::read_state(table, test::memory_source{golden("state, version 1")});
    };
    refused(options(500000.0), "in this cache 4 channels from 0 on, half split, base 500000 (");
    auto o = options();
    o.rotary[0].layout = kvq::rotary_layout::interleaved;
    refused(o, "in this cache 4 channels from 0 on, interleaved, base 10000 (");
    o = options();
    o.rotary[0].dims = 2;
    refused(o, "in this cache 2 channels from 0 on, half split, base 10000 (");
    o.rotary[0].first_channel = 2;
    refused(o, "in this cache 2 channels from 2 on");
    o = options();
    o.rotary[0].frequencies = {1.0, 0.0025};
    refused(o, "in this cache 4 channels from 0 on, half split, frequencies 1 to 0.0025 (");
    o.rotary = {{}};
    refused(o, "in this cache no rotation (");
    o = options();
    o.rotary.push_back({});
    refused(o, "in layer 1 under another rotary embedding");
    o = options();
    o.rotary[0].rotate = [](float*, int, std::int64_t) {};
    refused(o, "in this cache a function, 4 channels from 0 on, half split, base 10000 (");
    // The same frequencies, however they are given.
    o = options();
    o.rotary[0].frequencies = kvq::rotary_frequencies(4, 10000.0);
    cache_type same(shape, o);
    CHECK(test::restored(same, golden("file, version 4")).tokens() == 28);
    // Keys that did not move do not depend on it.
    cache_type cache(shape, options()), other(shape, options(500000.0));
    test::generator random(test::seed());
    auto s = cache.new_sequence();
    test::append(s, 2, test::stream(random, shape, 20), 0, 20);
    CHECK(test::restored(other, test::saved(s)).tokens() == 20);
}

}  // namespace saved_bytes_tests
