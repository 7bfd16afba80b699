// SPDX-License-Identifier: MIT
// Built with -fno-exceptions: kvq::error and kvq::out_of_memory reach the handler with their message. A handler must not return;
// those of this program end it, with 0 if the message is the right one.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <kvq/adapters/contiguous.hpp>
#include <kvq/adapters/paged.hpp>
#include <kvq/format/make_format.hpp>
#include <kvq/kvq.hpp>
#include <kvq/policy/prefix_cache.hpp>
#include <kvq/policy/ring.hpp>

static_assert(!KVQ_EXCEPTIONS);

namespace {

constexpr kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 8};
constexpr float numbers[8 * 40] = {1.0f, 2.0f};
const kvq::token_view<const float> token(numbers, 1, 1, 8), many(numbers, 40, 1, 8);

const kvq::format& four_bit() {
    static const kvq::format f = kvq::make_format<kvq::affine<4>, kvq::scalar>();
    return f;
}

const char* expected = "";

void expect_message(const char* message) {
    std::printf("%s\n", message);
    std::fflush(stdout);
    std::_Exit(std::strcmp(message, expected) == 0 ? 0 : 1);
}

/// What is right needs no handler.
int works() {
    kvq::cache cache(shape, {.keys = four_bit(), .recent = 0, .page_tokens = 16});
    auto sequence = cache.new_sequence();
    sequence.append(0, many, many);
    float out[8] = {};
    sequence.attend(0, token, kvq::token_view<float>(out, 1, 1, 8));
    sequence.trim(3);
    return sequence.tokens() == 3 && out[0] > 0.0f ? 0 : 1;
}

int argument() {
    expected = "kvq: cannot trim to 5 tokens: the sequence holds 1";
    kvq::cache cache(shape, {.keys = four_bit()});
    auto sequence = cache.new_sequence();
    sequence.append(0, token, token);
    sequence.trim(5);
    return 1;
}

int budget() {
    expected = "kvq: a page of 320 bytes does not fit: 320 of a budget of 600 bytes are in use";
    kvq::cache cache(shape, {.keys = four_bit(), .page_tokens = 16, .byte_budget = 600});
    auto sequence = cache.new_sequence();
    sequence.append(0, token, token);
    return 1;
}

/// Prints and aborts.
int default_handler() {
    std::signal(SIGABRT, [](int) { std::_Exit(0); });
    const kvq::cache cache(shape, {.keys = four_bit(), .sinks = -1});
    return 1;
}

}  // namespace

int main(int count, char** arguments) {
    const auto is = [&](const char* name) { return count == 2 && std::strcmp(arguments[1], name) == 0; };
    if (is("default_handler")) return default_handler();
    kvq::current_error_handler() = expect_message;
    if (is("works")) return works();
    if (is("argument")) return argument();
    if (is("budget")) return budget();
    return 2;
}
