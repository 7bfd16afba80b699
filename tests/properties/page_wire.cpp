// SPDX-License-Identifier: MIT
// Comparison family: exact. A page that arrives is the page that was sent, or is refused; a sequence sent
// page by page is the same sequence in another cache.
#include <doctest/doctest.h>

#include <algorithm>
#include <kvq/io/page_transfer.hpp>

#include "support/caches.hpp"
#include "support/memory.hpp"
#include "support/messages.hpp"

using test::append;
using test::contents;
using test::message_of;

namespace page_wire_tests {

namespace {

using message = std::vector<std::byte>;

/// Every page of a sequence as a message of its own.
template <class Cache>
std::vector<message> sent(const Cache& cache, const kvq::sequence& sequence) {
    message stream;
    for (int layer = 0; layer < cache.shape().layers; ++layer)
        kvq::send_pages(sequence, layer, [&](const void* data, std::size_t n) {
            const auto* p = static_cast<const std::byte*>(data);
            stream.insert(stream.end(), p, p + n);
        });
    std::vector<message> messages;
    std::size_t position = 0;
    const auto read = [&](void* to, std::size_t n) {
        n = std::min(n, stream.size() - position);
        std::memcpy(to, stream.data() + position, n);
        position += n;
        return n;
    };
    while (position < stream.size()) {
        const std::size_t first = position;
        std::vector<std::byte> storage;
        kvq::read_page(read, storage);
        messages.emplace_back(stream.begin() + static_cast<std::ptrdiff_t>(first),
                              stream.begin() + static_cast<std::ptrdiff_t>(position));
    }
    return messages;
}

template <class Cache>
void require_same_pages(const Cache& cache, const kvq::sequence& a, const Cache& other,
                        const kvq::sequence& b) {
    REQUIRE(contents(cache, a) == contents(other, b));
    REQUIRE(sent(cache, a) == sent(other, b));
    REQUIRE(a.usage().quantized == b.usage().quantized);
    // Pages that a trim has emptied in part keep their memory; those that arrive have what they need.
    REQUIRE(b.usage().window <= a.usage().window);
    REQUIRE(a.usage().rollback == b.usage().rollback);
    REQUIRE(a.usage().not_finite == b.usage().not_finite);
}

void shuffle(test::generator& random, std::vector<message>& messages) {
    for (std::size_t i = messages.size(); i > 1; --i) std::swap(messages[i - 1], messages[random.bits() % i]);
}

}  // namespace

TEST_CASE("every field of a message comes back, and every damage is noticed") {
    std::vector<std::byte> data(96);
    for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(7 * i);
    for (const bool with_fingerprint : {false, true}) {
        // The one without fingerprints is of a latent layer, with 16 bytes more.
        const bool is_latent = !with_fingerprint;
        const std::size_t header = is_latent ? 144 : 128;
        kvq::page_message m;
        m.role = is_latent ? kvq::tensor::key : kvq::tensor::value;
        m.kind = kvq::page_kind::copy;
        m.committed = true;
        m.layer = 3;
        m.first_token = 1000;
        m.tokens = 64;
        m.used = 57;
        m.skip = 6;
        m.room = 63;
        m.sinks = with_fingerprint;
        m.shift = -(std::int64_t{5} << 40);
        m.kv_heads = 2;
        m.dim = 24;
        if (is_latent) m.latent = {20, 8};
        m.layer_tokens = 1234;
        m.not_finite = 5;
        m.scheme.name = "a scheme with a name";
        if (with_fingerprint) m.scheme.fingerprint = 0x0123456789abcdefu;
        m.target = kvq::scheme_identity{"another scheme", std::nullopt};
        if (with_fingerprint) m.target->fingerprint = 0xfedcba9876543210u;
        m.rotary = {"an embedding", 77};
        m.number = 9;
        m.data = data;
        message bytes;
        kvq::quantize_page(
            [&](const void* p, std::size_t n) {
                bytes.insert(bytes.end(), static_cast<const std::byte*>(p),
                             static_cast<const std::byte*>(p) + n);
            },
            m);
        CHECK(bytes.size() == header + 48 + 96);
        const kvq::page_message back = kvq::parse_page(bytes);
        CHECK(back.role == m.role);
        CHECK(back.kind == m.kind);
        CHECK(back.committed);
        CHECK(back.layer == 3);
        CHECK(back.first_token == 1000);
        CHECK(back.tokens == 64);
        CHECK(back.used == 57);
        CHECK(back.skip == 6);
        CHECK(back.room == 63);
        CHECK(back.sinks == with_fingerprint);
        CHECK(back.shift == m.shift);
        CHECK(back.kv_heads == 2);
        CHECK(back.dim == 24);
        CHECK(back.latent == m.latent);
        CHECK(back.layer_tokens == 1234);
        CHECK(back.not_finite == 5);
        CHECK(back.scheme == m.scheme);
        CHECK(back.target == m.target);
        CHECK(back.rotary->text == "an embedding");
        CHECK(back.rotary->fingerprint == 77);
        CHECK(back.number == 9);
        CHECK(!back.is_elsewhere);
        CHECK(back.data.data() == bytes.data() + header + 48);
        CHECK(std::equal(back.data.begin(), back.data.end(), data.begin(), data.end()));

        for (std::size_t length = 0; length < bytes.size(); ++length) {
            CHECK(message_of([&] {
                      kvq::parse_page(std::span(bytes).first(length));
                  }).rfind("kvq: truncated", 0) == 0);
            std::size_t position = 0;
            const auto read = [&](void* to, std::size_t n) {
                n = std::min(n, length - position);
                std::memcpy(to, bytes.data() + position, n);
                position += n;
                return n;
            };
            std::vector<std::byte> storage;
            CHECK(message_of([&] { kvq::read_page(read, storage); }).rfind("kvq: truncated", 0) == 0);
        }
        for (std::size_t at = 0; at < bytes.size(); ++at)
            for (int mask = 1; mask < 256; ++mask) {
                message damaged = bytes;
                damaged[at] ^= static_cast<std::byte>(mask);
                if (message_of([&] { kvq::parse_page(damaged); }).empty())
                    FAIL("byte ", at, " xor ", mask, " was not noticed");
            }
        message longer = bytes;
        longer.push_back(std::byte{0});
        CHECK(message_of([&] { kvq::parse_page(longer); }).find("its header says 96") != std::string::npos);
        CHECK(message_of([&] { kvq::parse_page(message(200, std::byte{'x'})); }).find("not a page of kvq") !=
              std::string::npos);
    }
}

TEST_CASE_TEMPLATE("a sequence sent page by page is the same in another cache, now and later", C,
                   test::kivi_cache, test::mixed_cache, test::custom_cache, test::bounded_cache) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 10; ++round) {
        const auto shape = test::random_cache_shape(random, C::key_table::size, 10);
        auto options = test::random_options(random);
        options.page_tokens = random.pick(std::vector<int>{1, 4, 7, 8});
        options.layers = test::rotate_formats<C>(shape.layers);
        auto prefill = test::make_cache<C>(shape, options), decode = test::make_cache<C>(shape, options);
        const test::stream s(random, shape, 400);
        auto sequence = prefill.new_sequence();
        for (int step = random.between(0, 6); step > 0; --step) {
            append(sequence, shape.layers, s, sequence.tokens(), random.between(0, 50));
            if (random.one_in(2)) sequence.trim(random.between(sequence.tokens() / 2, sequence.tokens()));
        }
        auto messages = sent(prefill, sequence);
        shuffle(random, messages);
        kvq::page_receiver receiver(decode);
        for (const message& m : messages) receiver.accept(kvq::parse_page(m));
        auto copy = receiver.finish();
        require_same_pages(prefill, sequence, decode, copy);
        for (int step = 0; step < 6; ++step) {
            const bool trims = random.one_in(3);
            const int n = trims ? random.between(0, sequence.tokens()) : random.between(0, 20);
            for (auto* one : {&sequence, &copy}) {
                if (trims)
                    one->trim(n);
                else if (one->tokens() < 370)
                    append(*one, shape.layers, s, one->tokens(), n);
            }
            require_same_pages(prefill, sequence, decode, copy);
        }
        // The receiver gave everything away.
        copy = decode.new_sequence();
        CHECK(decode.bytes_in_use() == 0);
        CHECK(receiver.finish().tokens() == 0);
    }
}

TEST_CASE("what arrives in another order, twice, incomplete or in the wrong cache") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 2, .head_dim = 8, .value_dim = 4};
    const kvq::cache_options options{.sinks = 2, .recent = 6, .page_tokens = 8, .rollback = 8};
    test::counting_resource memory;
    auto counted = options;
    counted.memory = &memory;
    test::int8_cache cache(shape, options), other(shape, counted);
    const test::stream s(random, shape, 100);
    auto sequence = cache.new_sequence();
    append(sequence, 2, s, 0, 60);
    auto messages = sent(cache, sequence);
    const auto says = [](const std::string& text, const char* part) {
        INFO(text);
        CHECK(text.find(part) != std::string::npos);
    };

    // Without any one page there is no sequence, but for 16-bit copies.
    for (std::size_t missing = 0; missing < messages.size(); ++missing) {
        kvq::page_receiver receiver(other);
        for (std::size_t i = 0; i < messages.size(); ++i)
            if (i != missing) receiver.accept(kvq::parse_page(messages[i]));
        const auto lost = kvq::parse_page(messages[missing]);
        const std::string text = message_of([&] { (void)receiver.finish(); });
        CHECK(text.empty() == (lost.kind == kvq::page_kind::copy));
        if (!text.empty()) {
            // When it comes after all, all is well.
            receiver.accept(lost);
            CHECK(contents(other, receiver.finish()) == contents(cache, sequence));
        }
    }
    CHECK(other.bytes_in_use() == 0);

    // What is lost at the end, of K and V alike, leaves no gap.
    {
        kvq::page_receiver shorter(other);
        int last = 0;
        for (const message& m : messages) last = std::max(last, kvq::parse_page(m).first_token);
        for (const message& m : messages) {
            const auto page = kvq::parse_page(m);
            if (page.layer != 1 || page.first_token != last) shorter.accept(page);
        }
        says(message_of([&] { (void)shorter.finish(); }), "tokens were received, of 60");
    }
    // Nothing of a layer: only who knows the length notices.
    for (const int lost_layer : {0, 1}) {
        kvq::page_receiver shorter(other);
        for (const message& m : messages) {
            const auto page = kvq::parse_page(m);
            if (page.layer != lost_layer) shorter.accept(page);
        }
        says(message_of([&] { (void)shorter.finish(60); }), "0 tokens were received, not 60");
        CHECK(shorter.finish().tokens(lost_layer) == 0);
    }
    auto nowhere = kvq::parse_page(messages.front());
    nowhere.layer = -1;
    kvq::page_receiver nothing(other);
    says(message_of([&] { nothing.accept(nowhere); }), "layer -1");

    kvq::page_receiver receiver(other);
    for (const message& m : messages) receiver.accept(kvq::parse_page(m));
    const std::size_t in_use = other.bytes_in_use();
    for (const message& m : messages)
        says(message_of([&] { receiver.accept(kvq::parse_page(m)); }), "came twice");
    CHECK(other.bytes_in_use() == in_use);
    CHECK(contents(other, receiver.finish()) == contents(cache, sequence));

    const auto refused = [&](auto& wrong, const char* part) {
        kvq::page_receiver to(wrong);
        int refusals = 0;
        for (const message& m : messages) {
            const std::string text = message_of([&] { to.accept(kvq::parse_page(m)); });
            if (!text.empty()) says(text, part);
            refusals += !text.empty();
        }
        CHECK(refusals > 0);
    };
    auto other_shape = shape;
    other_shape.layers = 1;
    test::int8_cache fewer_layers(other_shape, options);
    refused(fewer_layers, "does not belong to a cache of 1 layers");
    other_shape = shape;
    other_shape.value_dim = 5;
    test::int8_cache other_values(other_shape, options);
    refused(other_values, "2 heads x 4 channels does not belong to a cache of 2 layers, 2 x 5");
    auto other_options = options;
    other_options.sinks = 1;
    test::int8_cache other_sinks(shape, other_options);
    refused(other_sinks, "does not belong to a cache with 1 sinks");
    test::typed_cache<kvq::affine<4>> stranger(shape, options);
    refused(stranger,
            "quantized with int8 (int8-token-fp32), which is not among the formats of this cache: fp16");
    test::typed_cache<test::formats<kvq::affine<4>, kvq::int8>> friendly(shape, options);
    kvq::page_receiver to_friend(friendly);
    for (const message& m : messages) to_friend.accept(kvq::parse_page(m));
    auto copy = to_friend.finish();
    for (int layer = 0; layer < 2; ++layer)
        CHECK(test::dequantized(copy, shape, layer, kvq::tensor::key).values() ==
              test::dequantized(sequence, shape, layer, kvq::tensor::key).values());

    // No memory: nothing has happened.
    kvq::page_receiver poor(other);
    for (const message& m : messages) {
        const auto before = other.bytes_in_use();
        memory.arm(0);
        CHECK_THROWS_AS(poor.accept(kvq::parse_page(m)), std::bad_alloc);
        memory.arm(test::counting_resource::never);
        CHECK(other.bytes_in_use() == before);
        poor.accept(kvq::parse_page(m));
    }
    for (int i = 0;; ++i) {
        REQUIRE(i < 1000);
        memory.arm(i);
        bool failed = false;
        const auto before = other.bytes_in_use();
        try {
            const auto got = poor.finish();
            memory.arm(test::counting_resource::never);
            CHECK(contents(other, got) == contents(cache, sequence));
        } catch (const std::bad_alloc&) {
            failed = true;
        }
        memory.arm(test::counting_resource::never);
        if (!failed) break;
        REQUIRE(other.bytes_in_use() == before);
    }
    CHECK(other.bytes_in_use() == 0);
    CHECK(memory.bytes() == 0);
}

}  // namespace page_wire_tests
