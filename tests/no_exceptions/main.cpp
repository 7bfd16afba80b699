// SPDX-License-Identifier: MIT
// Built with -fno-exceptions: kvq::error and kvq::out_of_memory reach the handler with their message. A
// handler must not return; those of this program end it, with 0 if the message is the right one.
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <kvq/adapters/paged.hpp>
#include <kvq/core/team.hpp>
#include <kvq/core/thread_pool.hpp>
#include <kvq/format/make_format.hpp>
#include <kvq/kvq.hpp>
#include <kvq/policy/prefix_cache.hpp>
#include <kvq/policy/ring.hpp>
#include <new>
#include <thread>

static_assert(!KVQ_EXCEPTIONS);

namespace {

std::atomic<int> allocations{0};

}  // namespace

void* operator new(std::size_t bytes) {
    ++allocations;
    if (void* const p = std::malloc(bytes)) return p;
    std::abort();
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }

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

/// The executors share work without exceptions, and without memory.
int threads() {
    const kvq::thread_pool pool(3);
    kvq::team team;
    std::atomic<int> sum{0};
    const auto add = [&](int i) { sum += i; };
    std::thread others[2];
    std::atomic<bool> go{false};
    const auto operations = [&] {
        go.wait(false);
        for (int i = 0; i < 100; ++i)
            team.enter(3, [&](kvq::executor_view all) { all.parallel_for(5, add); });
    };
    for (std::thread& t : others) t = std::thread(operations);
    const int before = allocations;
    for (int i = 0; i < 100; ++i) pool.parallel_for(5, add);
    go = true;
    go.notify_all();
    operations();
    for (std::thread& t : others) t.join();
    return sum == 2000 && allocations == before && !team.failed() ? 0 : 1;
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
    if (is("threads")) return threads();
    if (is("argument")) return argument();
    if (is("budget")) return budget();
    return 2;
}
