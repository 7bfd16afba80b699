// SPDX-License-Identifier: MIT
// Comparison family: exact. A file that is not what was saved is refused, whatever happened to it, and
// changes nothing.
#include <doctest/doctest.h>

#include <cstddef>

#include "support/saved.hpp"
#include "support/typed_cache.hpp"

using test::append;
using test::file_bytes;
using test::message_of;
using test::restored;
using test::saved;

namespace saved_damage_tests {

namespace {

using cache_type =
    test::typed_cache<test::formats<kvq::affine<4, kvq::per_channel<4>>, kvq::int8>, kvq::int8>;

/// Small, but with everything in it: sinks, 16-bit copies, pages of three formats, a last page that is not
/// full, two layers.
struct small_file {
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 1, .head_dim = 4};
    const kvq::cache_options options{.sinks = 1, .recent = 2, .page_tokens = 4, .rollback = 4};
    cache_type cache{shape, options};
    kvq::sequence sequence = cache.new_sequence();
    file_bytes bytes;

    small_file() {
        test::generator random(test::seed());
        const test::stream s(random, shape, 40);
        append(sequence, 2, s, 0, 21);
        cache.requantize(sequence, {.key = 1, .first_layer = 1, .last_token = 9});
        bytes = saved(sequence, {.model = "tiny"});
    }
};

std::uint64_t header_length(const file_bytes& f) { return kvq::detail::load_as<std::uint64_t>(f.data()); }

kvq::safetensors_header header_of(const file_bytes& f) {
    return kvq::read_safetensors_header(test::memory_source{f});
}

/// Offset in the file of a tensor's first byte.
std::size_t offset_of(const file_bytes& f, const std::string& name) {
    for (const auto& t : header_of(f).tensors)
        if (t.name == name) return static_cast<std::size_t>(8 + header_length(f) + t.begin);
    FAIL("no tensor ", name);
    return 0;
}

/// Makes the seal right again, as somebody would who wants a wrong file to be believed.
void reseal(file_bytes& f, std::size_t seal) {
    kvq::detail::store_as(f.data() + seal, kvq::crc32c::of(f.data(), seal));
}

/// The file with some text of its header replaced, and a right seal.
file_bytes edited(const file_bytes& f, const std::string& from, const std::string& to) {
    const std::size_t length = header_length(f);
    std::string header(reinterpret_cast<const char*>(f.data()) + 8, length);
    const std::size_t at = header.find(from);
    REQUIRE(at != std::string::npos);
    header.replace(at, from.size(), to);
    file_bytes changed(8);
    kvq::detail::store_as(changed.data(), static_cast<std::uint64_t>(header.size()));
    for (const char c : header) changed.push_back(static_cast<std::byte>(c));
    const std::size_t seal = offset_of(f, "seal") + header.size() - length;
    changed.insert(changed.end(), f.begin() + 8 + static_cast<std::ptrdiff_t>(length), f.end());
    reseal(changed, seal);
    return changed;
}

}  // namespace

TEST_CASE("a byte that changes anywhere is noticed") {
    small_file f;
    REQUIRE(f.bytes.size() < 10000);
    const auto held = test::contents(f.cache, f.sequence, true);
    const std::size_t in_use = f.cache.bytes_in_use();
    test::generator random(test::seed());
    file_bytes damaged = f.bytes;
    // Where every instruction is instrumented, two of the ten changes of a byte, others of its neighbours.
    constexpr int apart = test::is_slow ? 5 : 1;
    for (std::size_t at = 0; at < damaged.size(); ++at) {
        const std::byte right = damaged[at];
        for (int flip = static_cast<int>(at) % apart; flip < 10; flip += apart) {
            // Every single bit, all of them, and some other value.
            const int mask = flip < 8 ? 1 << flip : flip == 8 ? 0xff : random.between(1, 255);
            damaged[at] = right ^ static_cast<std::byte>(mask);
            bool refused = false;
            try {
                test::memory_source source{damaged};
                (void)kvq::restore(f.cache, source);
            } catch (const kvq::error&) {
                refused = true;
            }
            if (!refused) {
                INFO("byte ", at, " xor ", mask);
                FAIL("damage was not noticed");
            }
        }
        damaged[at] = right;
        if (f.cache.bytes_in_use() != in_use) FAIL("byte ", at, ": pages were left behind");
    }
    CHECK(test::contents(f.cache, f.sequence, true) == held);
    CHECK(saved(restored(f.cache, damaged), {.model = "tiny"}) == f.bytes);
}

TEST_CASE("a file that ends too early is refused, wherever it ends") {
    small_file f;
    const std::size_t in_use = f.cache.bytes_in_use();
    for (std::size_t length = 0; length < f.bytes.size(); ++length) {
        const file_bytes part(f.bytes.begin(), f.bytes.begin() + static_cast<std::ptrdiff_t>(length));
        const std::string message = message_of([&] {
            test::memory_source source{part};
            (void)kvq::restore(f.cache, source);
        });
        if (message.find("truncated: the input ends after " + std::to_string(length) + " bytes") ==
            std::string::npos)
            FAIL("length ", length, ": ", message);
        REQUIRE(f.cache.bytes_in_use() == in_use);
    }
}

TEST_CASE("pages that change places are noticed") {
    small_file f;
    const auto header = header_of(f.bytes);
    int swaps = 0;
    for (const auto& t : header.tensors) {
        if (t.dtype != "U8" || t.shape[0] < 2) continue;
        const std::size_t first = offset_of(f.bytes, t.name);
        const auto page = static_cast<std::ptrdiff_t>((t.end - t.begin) / t.shape[0]);
        file_bytes swapped = f.bytes;
        const auto at = swapped.begin() + static_cast<std::ptrdiff_t>(first);
        std::swap_ranges(at, at + page, at + page);
        ++swaps;
        CHECK(
            test::contains(message_of([&] { restored(f.cache, swapped); }), "is damaged: the page of span"));
    }
    CHECK(swaps >= 4);
}

TEST_CASE("foreign files are called what they are") {
    small_file f;
    const auto refused = [&](const file_bytes& bytes, const char* part) {
        const std::string message = message_of([&] { restored(f.cache, bytes); });
        INFO(message);
        CHECK(test::contains(message, part));
    };
    const auto file_of = [](kvq::safetensors_header header) {
        const std::string start = kvq::write_safetensors_header(header);
        file_bytes bytes(start.size() + header.data_bytes());
        std::memcpy(bytes.data(), start.data(), start.size());
        return bytes;
    };
    refused({}, "truncated");
    refused(file_bytes(100, std::byte{' '}), "not a safetensors file");
    refused(file_of({{{"weight", "F16", {4, 4}, 0, 0}}, {}}), "its format is not given");
    refused(file_of({{{"weight", "F16", {4, 4}, 0, 0}}, {{"format", "pt"}}}), "its format is pt");
    refused(file_of({{}, {{"format", "kvq sequence"}}}), "format_version");
    refused(file_of({{}, {{"format", "kvq sequence"}, {"format_version", "4"}}}), "no seal");
    refused(file_of({{}, {{"format", "kvq sequence"}, {"format_version", "one"}}}), "no number: one");
    refused(edited(f.bytes, R"("format_version":"4")", R"("format_version":"2")"),
            "version 2, this library reads versions 3 to 5");
    refused(edited(f.bytes, R"("format_version":"4")", R"("format_version":"6")"),
            "version 6, this library reads versions 3 to 5");
    refused(edited(f.bytes, R"("format_version":"4")", R"("format_version":"5")"), "shapes I32 [2, 6]");
    refused(edited(f.bytes, R"("format_version":"4")", R"("format_version":"3")"), "spans I32");
}

TEST_CASE("a file that contradicts itself is refused, even under a right seal") {
    small_file f;
    const auto refused = [&](const file_bytes& bytes, const char* part) {
        for (const bool convert : {false, true}) {
            const std::string message = message_of([&] { restored(f.cache, bytes, {.convert = convert}); });
            INFO(message);
            CHECK(test::contains(message, part));
        }
        CHECK(f.cache.pool().pages_in_use() > 0);
    };
    const auto metadata = [&](const char* from, const char* to, const char* part) {
        INFO(from);
        refused(edited(f.bytes, from, to), part);
    };
    metadata(R"("layers":"2")", R"("layers":"3")", "tokens I32 [2] where tokens I32 [3] was expected");
    metadata(R"("layers":"2")", R"("layers":"0")", "at least 1 layer");
    metadata(R"("layers":"2")", R"("layers":"-2")", "at least 1 layer");
    metadata(R"("layers":"2")", R"("layers":"2x")", "no number: 2x");
    metadata(R"("layers":"2")", R"("layers":" 2")", "no number");
    metadata(R"("layers":"2")", R"("layers":"99999999999")", "no number");
    metadata(R"("layers":"2")", R"("layer":"2")", "must say its layers");
    metadata(R"("kv_heads":"1")", R"("kv_heads":"2")", "kv_heads 2, the cache 1");
    metadata(R"("recent":"2")", R"("recent":"-2")", "impossible options");
    metadata(R"("recent":"2")", R"("recent":"2147483647")", "impossible options");
    metadata(R"("sinks":"1")", R"("sinks":"2000000000")", "impossible options");
    metadata(R"("sinks":"1")", R"("sinks":"0")", "out of place");
    metadata(R"("page_tokens":"4")", R"("page_tokens":"0")", "impossible options");
    metadata(R"("page_tokens":"4")", R"("page_tokens":"1")", "which has room for 1 of 21");
    metadata(R"("rollback":"4")", R"("rollback":"-1")", "impossible options");
    // More than a cache may have: the positions of commits would overflow.
    metadata(R"("recent":"2")", R"("recent":"536870912")", "1 sinks, 536870912 recent");
    metadata(R"("rollback":"4")", R"("rollback":"536870912")", "536870912 rollback");
    for (const std::string dim : {"head_dim", "value_dim"})
        refused(edited(edited(f.bytes, R"("page_tokens":"4")", R"("page_tokens":"257")"),
                       '"' + dim + R"(":"4")", '"' + dim + R"(":"1048576")"),
                "a page of 257 tokens x 1048576 channels is too large");
    metadata(R"("window":"fp16")", R"("window":"fp32")", "is not its window");
    metadata(R"("key_scheme.1":)", R"("key_scheme.9":)", "is quantized to format 1 of 1");

    // Numbers of the index.
    const std::size_t seal = offset_of(f.bytes, "seal"), index = offset_of(f.bytes, "index");
    const auto number = [&](const char* tensor, std::size_t i, std::uint32_t value, const char* part) {
        file_bytes changed = f.bytes;
        kvq::detail::store_as(changed.data() + offset_of(f.bytes, tensor) + 4 * i, value);
        reseal(changed, seal);
        INFO(tensor, " ", i, " ", value);
        refused(changed, part);
    };
    for (const std::uint32_t n : {0u, 17u, 25u, 30u, 0x7fffffffu, 0xffffffffu})
        number("tokens", 1, n, "layer 1");
    for (const std::uint32_t n : {0u, 3u, 7u, 0x7fffffffu, 0xffffffffu}) number("committed", 0, n, "layer 0");
    for (const std::uint32_t n : {3u, 4u, 0xffffffffu}) number("targets", 0, n, "layer 0 (keys)");
    const std::size_t rows = (seal - index) / sizeof(kvq::detail::saved_page);
    for (std::size_t row = 0; row < rows; ++row)
        for (std::size_t column = 0; column < 6; ++column)
            for (const std::uint32_t n : {0u, 1u, 2u, 3u, 4u, 5u, 77u, 0x7fffffffu, 0xffffffffu}) {
                const std::size_t i = row * kvq::detail::saved_page::columns + column;
                if (kvq::detail::load_as<std::uint32_t>(f.bytes.data() + index + 4 * i) == n) continue;
                number("index", i, n, "the saved sequence");
            }
    const std::size_t spans = (index - offset_of(f.bytes, "spans")) / sizeof(kvq::detail::saved_span);
    for (std::size_t i = 0; i < spans * kvq::detail::saved_span::columns; ++i)
        for (const std::uint32_t n : {0u, 1u, 2u, 3u, 5u, 77u, 0x7fffffffu, 0xffffffffu}) {
            const std::size_t at = offset_of(f.bytes, "spans") + 4 * i;
            if (kvq::detail::load_as<std::uint32_t>(f.bytes.data() + at) == n) continue;
            const std::size_t column = i % kvq::detail::saved_span::columns;
            // A committed page may have been closed with fewer tokens than it shows room for, and sinks may
            // have been erased.
            if ((column == 2 && n < 4 && n >= 1) || (column == 4 && n == 0)) continue;
            number("spans", i, n, "the saved sequence");
        }
}

TEST_CASE("a quantized page that would lie in the window is refused") {
    // A deep trim leaves a page quantized that a sequence of this length would not have quantized yet.
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 4};
    cache_type cache(shape, {.sinks = 1, .recent = 2, .page_tokens = 4, .rollback = 0});
    test::generator random(test::seed());
    auto sequence = cache.new_sequence();
    append(sequence, 1, test::stream(random, shape, 21), 0, 21);
    sequence.trim(18);
    REQUIRE(cache.geometry().committed(18) == 3);
    file_bytes changed = saved(sequence);
    const std::size_t committed = offset_of(changed, "committed");
    REQUIRE(kvq::detail::load_as<std::int32_t>(changed.data() + committed) == 5);
    kvq::detail::store_as(changed.data() + committed, 4);
    reseal(changed, offset_of(changed, "seal"));
    CHECK(test::contains(message_of([&] { restored(cache, changed); }), "out of place"));
}

TEST_CASE("random changes under a right seal end in a sequence or in kvq::error, never in anything else") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    small_file f;
    const std::size_t in_use = f.cache.bytes_in_use();
    const std::size_t seal = offset_of(f.bytes, "seal");
    auto other_options = f.options;
    other_options.page_tokens = 8;
    cache_type other(f.shape, other_options);
    const int rounds = test::rounds(30000);
    int accepted = 0;
    for (int round = 0; round < rounds; ++round) {
        file_bytes changed = f.bytes;
        for (int changes = random.between(1, 3); changes > 0; --changes) {
            const auto at = static_cast<std::size_t>(random.between(8, static_cast<int>(seal) - 1));
            // Digits stay digits: that gets deeper than a header that is no JSON.
            const int c = static_cast<int>(changed[at]);
            changed[at] = static_cast<std::byte>(c >= '0' && c <= '9' ? random.between('0', '9')
                                                                      : random.between(0, 255));
        }
        reseal(changed, seal);
        try {
            cache_type& cache = random.one_in(2) ? f.cache : other;
            test::memory_source source{changed};
            auto sequence = kvq::restore(cache, source, {.convert = &cache == &other || random.one_in(2)});
            test::dequantized(sequence, f.shape, 0, kvq::tensor::key);
            sequence.trim(sequence.tokens() / 2);
            ++accepted;
        } catch (const kvq::error&) {
        }
        if (f.cache.bytes_in_use() != in_use) FAIL("pages were left behind");
    }
    CHECK(accepted < rounds / 3);
    CHECK(other.bytes_in_use() == 0);
}

TEST_CASE(
    "pages of random bytes under right checksums are restored, dequantized and converted like any others") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    small_file f;
    const std::size_t seal = offset_of(f.bytes, "seal"), index = offset_of(f.bytes, "index");
    auto other_options = f.options;
    other_options.recent = 7;
    cache_type other(f.shape, other_options);
    for (int round = 0; round < test::rounds(300); ++round) {
        file_bytes changed = f.bytes;
        std::size_t row = 0;
        for (const auto& t : header_of(f.bytes).tensors) {
            if (t.dtype != "U8") continue;
            const auto bytes = static_cast<std::size_t>((t.end - t.begin) / t.shape[0]);
            for (std::size_t i = 0; i < t.shape[0]; ++i, ++row) {
                std::byte* const page = changed.data() + offset_of(f.bytes, t.name) + i * bytes;
                for (std::size_t b = 0; b < bytes; ++b)
                    if (random.one_in(3)) page[b] = static_cast<std::byte>(random.between(0, 255));
                kvq::detail::store_as(changed.data() + index + sizeof(kvq::detail::saved_page) * row +
                                          offsetof(kvq::detail::saved_page, checksum),
                                      kvq::crc32c::of(page, bytes));
            }
        }
        reseal(changed, seal);
        for (cache_type* cache : {&f.cache, &other}) {
            auto sequence = restored(*cache, changed, {.convert = true});
            REQUIRE(sequence.tokens() == 21);
            for (const auto role : {kvq::tensor::key, kvq::tensor::value})
                test::dequantized(sequence, f.shape, 1, role);
            sequence.trim(random.between(0, 21));
        }
    }
    CHECK(other.bytes_in_use() == 0);
}

}  // namespace saved_damage_tests
