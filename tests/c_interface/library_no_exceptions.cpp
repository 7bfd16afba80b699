// SPDX-License-Identifier: MIT
// kvq/library.hpp with -fno-exceptions: errors reach the handler of core/error.hpp with the message of the library.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <kvq/library.hpp>

static_assert(!KVQ_EXCEPTIONS);

namespace {

namespace library = kvq::library;
constexpr float numbers[8 * 40] = {1.0f, 2.0f};
const char* expected = "";

void expect_message(const char* message) {
    std::printf("%s\n", message);
    std::fflush(stdout);
    std::_Exit(std::strcmp(message, expected) == 0 ? 0 : 1);
}

library::cache make_cache(std::size_t budget = 0) {
    library::cache_options o;
    o.layers = 1, o.kv_heads = 1, o.head_dim = 8, o.keys = "int8", o.page_tokens = 16;
    o.sinks = KVQ_NONE, o.recent = KVQ_NONE;
    o.byte_budget = budget;
    return library::cache(o);
}

/// What is right needs no handler.
int works() {
    library::cache cache = make_cache();
    library::sequence s = cache.new_sequence();
    const auto run = [](int n, auto task) {
        for (int i = 0; i < n; ++i) task(i);
    };
    const library::executor threads(1, run);
    library::attend_options o;
    o.executor = threads.get();
    float out[8] = {};
    const kvq_tensor many = library::input(numbers, 40, 1, 8), one = library::input(numbers, 1, 1, 8);
    s.append(0, many, many);
    s.attend(0, one, library::output(out, 1, 1, 8), o);
    std::size_t saved = 0;
    s.send_pages(0, [&](const void*, std::size_t n) { saved += n; });
    s.trim(35);
    return s.tokens() == 35 && out[0] > 0.0f && saved > 0 ? 0 : 1;
}

int argument() {
    expected = "kvq: cannot trim to 5 tokens: the sequence holds 0";
    library::cache cache = make_cache();
    cache.new_sequence().trim(5);
    return 1;
}

int budget() {
    expected = "kvq: a page of 320 bytes does not fit: 320 of a budget of 600 bytes are in use";
    library::cache cache = make_cache(600);
    const kvq_tensor one = library::input(numbers, 1, 1, 8);
    cache.new_sequence().append(0, one, one);
    return 1;
}

}  // namespace

int main(int count, char** arguments) {
    const auto is = [&](const char* name) { return count == 2 && std::strcmp(arguments[1], name) == 0; };
    kvq::current_error_handler() = expect_message;
    if (is("works")) return works();
    if (is("argument")) return argument();
    if (is("budget")) return budget();
    return 2;
}
