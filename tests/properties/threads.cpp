// SPDX-License-Identifier: MIT
// Comparison family: exact. The pool and the team run every task once, carry errors, and give the bits of one
// thread. Run under ThreadSanitizer by the preset `thread`.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <kvq/core/team.hpp>
#include <kvq/core/thread_pool.hpp>
#include <thread>

#include "support/caches.hpp"
#include "support/memory.hpp"
#if defined(__unix__)
#include <sys/wait.h>
#include <unistd.h>
#endif

namespace threads_tests {

namespace {

static_assert(kvq::executor<kvq::thread_pool> && kvq::executor<const kvq::thread_pool>);

/// Calls parallel_for(n) and returns whether every task ran exactly once. Tasks of uneven length.
bool runs_every_task_once(const kvq::executor_view& threads, int n, int salt) {
    std::vector<std::atomic<int>> ran(static_cast<std::size_t>(n));
    threads.parallel_for(n, [&](int i) {
        for (int work = (i + salt) % 7 * 30; work > 0; --work)
            std::atomic_signal_fence(std::memory_order_seq_cst);
        ran[static_cast<std::size_t>(i)].fetch_add(1, std::memory_order_relaxed);
    });
    return std::all_of(ran.begin(), ran.end(), [](const auto& r) { return r.load() == 1; });
}

/// `threads` threads that send themselves into every operation, as an engine's do.
template <class Each>
void on_threads(int threads, Each each) {
    std::vector<std::thread> all;
    for (int i = 0; i < threads; ++i) all.emplace_back([&each, i] { each(i); });
    for (std::thread& t : all) t.join();
}

/// Runs the tasks of a list that ends with -100, whatever it is asked for.
struct broken_executor {
    const int* list;

    static int concurrency() { return 2; }
    template <class F>
    void parallel_for(int, const F& f) const {
        for (const int* i = list; *i != -100; ++i) f(*i);
    }
};

void sleep_us(int us) {
    if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

}  // namespace

TEST_CASE("a thread pool runs every task once, call after call, busy or asleep") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (const int threads : {1, 2, 3, 8}) {
        const kvq::thread_pool pool(threads);
        CHECK(pool.concurrency() == threads);
        for (int call = 0; call < 600; ++call) {
            if (call % 100 == 99) sleep_us(300);  // longer than a thread spins
            REQUIRE(runs_every_task_once(pool, random.between(0, 3 * threads), call));
        }
    }
    for (int i = 0; i < 50; ++i) kvq::thread_pool unused(random.between(1, 4));
}

TEST_CASE("a thread pool takes calls from several threads and from its own tasks") {
    const kvq::thread_pool pool(3);
    std::atomic<int> wrong{0};
    on_threads(4, [&](int id) {
        for (int call = 0; call < 300; ++call)
            if (!runs_every_task_once(pool, (call + id) % 6, call)) ++wrong;
    });
    CHECK(wrong == 0);
    std::atomic<int> ran{0};
    pool.parallel_for(5, [&](int) {
        pool.parallel_for(4, [&](int i) {
            if (!runs_every_task_once(pool, 3, i)) ++wrong;
            ++ran;
        });
    });
    CHECK(ran == 20);
    CHECK(wrong == 0);
}

TEST_CASE(
    "an executor that runs a task twice, not at all, or one that is none, is refused; no task runs twice") {
    const auto run = [](std::initializer_list<int> order, int n) {
        std::vector<int> list(order), ran(static_cast<std::size_t>(n));
        list.push_back(-100);
        std::string message;
        try {
            const broken_executor executor{list.data()};
            kvq::executor_view(executor).parallel_for(n, [&](int i) { ++ran[static_cast<std::size_t>(i)]; });
        } catch (const kvq::error& e) {
            message = e.what();
        }
        CHECK(std::all_of(ran.begin(), ran.end(), [](int r) { return r <= 1; }));
        return message;
    };
    CHECK(run({2, 0, 1}, 3) == "");
    CHECK(run({}, 0) == "");
    CHECK(run({0, 0, 0}, 3) == "kvq: the executor's parallel_for ran task 0 of 3 twice");
    CHECK(run({0, 2}, 3) == "kvq: the executor's parallel_for did not run task 1 of 3");
    CHECK(run({0, 1, 2, 3}, 3) == "kvq: the executor's parallel_for ran task 3 of 3");
    CHECK(run({0, 1, -1}, 2) == "kvq: the executor's parallel_for ran task -1 of 2");
    for (const int n : {31, 32, 33, 64, 4127, 4128, 10000}) {
        kvq::detail::task_marks marks(n);
        for (int i = 0; i < n - 1; ++i) REQUIRE(marks.take(n - 1 - i));
        CHECK_FALSE(marks.all_once());
        CHECK(std::string(marks.complaint()) == "parallel_for did not run task 0 of " + std::to_string(n));
        CHECK(marks.take(0));
        CHECK(marks.all_once());
        CHECK_FALSE(marks.take(n / 2));
        CHECK_FALSE(marks.all_once());
    }
}

#if defined(__unix__)
TEST_CASE("a pool in a forked child runs its tasks there, and goes without waiting") {
    auto pool = std::make_unique<kvq::thread_pool>(4);
    REQUIRE(runs_every_task_once(*pool, 20, 1));
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        ::alarm(60);  // ends a child that hangs
        const bool ran = runs_every_task_once(*pool, 20, 1) && runs_every_task_once(*pool, 7, 2);
        pool.reset();
        ::_exit(ran ? 0 : 1);
    }
    int status = -1;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    CHECK(runs_every_task_once(*pool, 20, 3));
}
#endif

TEST_CASE("an error of a task reaches the caller of the pool, and the next call works") {
    const kvq::thread_pool pool(4);
    for (int round = 0; round < 200; ++round) {
        std::atomic<int> ended{0};
        CHECK_THROWS_AS(pool.parallel_for(6,
                                          [&](int i) {
                                              ++ended;
                                              if (i % 2 == round % 2) throw std::bad_alloc();
                                          }),
                        std::bad_alloc);
        REQUIRE(ended == 6);
        REQUIRE(runs_every_task_once(pool, 9, round));
    }
}

TEST_CASE("a team runs operations one after another, whoever is late, with any number of threads") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    constexpr int most = 4, operations = 400;
    test::generator random(seed);
    struct operation {
        int threads, lists, tasks;
        std::vector<int> delay;
    };
    std::vector<operation> plan;
    for (int i = 0; i < operations; ++i) {
        plan.push_back({random.between(1, most), random.between(0, 4), random.between(0, 9), {}});
        for (int t = 0; t < most; ++t)
            plan.back().delay.push_back(random.one_in(12) ? random.between(1, 400) : 0);
    }
    kvq::team team;
    // An operation that leaves threads out ends with the engine's barrier, before they enter the next one.
    std::barrier<> barrier(most);
    std::vector<std::atomic<int>> runs(operations);
    std::atomic<int> wrong{0}, early{0};
    const auto work = [&](int id) {
        for (int i = 0; i < operations; ++i) {
            const operation& o = plan[static_cast<std::size_t>(i)];
            std::atomic<int>& ran = runs[static_cast<std::size_t>(i)];
            if (id < o.threads) {
                sleep_us(o.delay[static_cast<std::size_t>(id)]);
                team.enter(o.threads, [&](kvq::executor_view threads) {
                    if (threads.concurrency() != o.threads) ++wrong;
                    for (int list = 0; list < o.lists; ++list)
                        if (!runs_every_task_once(threads, o.tasks, i + list)) ++wrong;
                    ++ran;
                });
                if (ran != 1) ++early;
            }
            const bool all_take_part = o.threads == most && i + 1 < operations &&
                                       plan[static_cast<std::size_t>(i) + 1].threads == most;
            if (!all_take_part) barrier.arrive_and_wait();
        }
    };
    on_threads(most, work);
    CHECK(wrong == 0);
    CHECK(early == 0);
    for (const auto& r : runs) REQUIRE(r == 1);
    CHECK_FALSE(team.failed());
}

TEST_CASE("a team keeps the first error, and leaves out operations until somebody asks") {
    constexpr int threads = 3;
    kvq::team team;
    std::vector<int> ran;
    std::atomic<int> tasks{0}, left{0};
    const auto step = [&](int failing_task, int failing_operation) {
        ran.clear();
        tasks = 0;
        on_threads(threads, [&](int) {
            for (int i = 0; i < 6; ++i)
                team.enter(threads, [&](kvq::executor_view all) {
                    ran.push_back(i);
                    if (i == failing_operation) throw std::runtime_error("operation");
                    all.parallel_for(5, [&](int task) {
                        ++tasks;
                        if (i == 2 && task == failing_task) throw kvq::argument_error("task");
                    });
                });
            ++left;
        });
    };
    step(-1, -1);
    CHECK(ran.size() == 6);
    CHECK(tasks == 30);
    CHECK_NOTHROW(team.check());
    step(4, -1);
    CHECK(ran == std::vector<int>{0, 1, 2});
    CHECK(tasks == 15);
    CHECK(team.failed());
    step(-1, -1);
    CHECK(ran.empty());
    CHECK_THROWS_AS(team.check(), kvq::error);
    CHECK_FALSE(team.failed());
    step(0, 1);
    CHECK(ran == std::vector<int>{0, 1});
    CHECK_THROWS_AS(team.check(), std::runtime_error);
    CHECK_NOTHROW(team.check());
    step(-1, -1);
    CHECK(ran.size() == 6);
    CHECK(left == 5 * threads);
    CHECK_THROWS_AS(team.enter(0, [](kvq::executor_view) {}), kvq::error);
}

TEST_CASE_TEMPLATE("prefill and attend in a team and on a pool: the bits and pages of one thread", C,
                   test::kivi_cache, test::mixed_cache) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    constexpr int layers = 2, group = 2, sequences = 4;
    const auto shape = test::random_cache_shape(random, layers, 24);
    kvq::cache_options options;
    options.page_tokens = 16;
    options.recent = 20;
    options.sinks = 2;
    options.layers = test::rotate_formats<C>(layers);
    auto cache = test::make_cache<C>(shape, options);
    const test::stream s(random, shape, 400);
    const auto q = test::random_tensor(random, 400, group * shape.kv_heads, shape.head_dim);
    const int steps[] = {90, 1, 1, 40, 1, 30};
    struct result {
        std::vector<std::vector<float>> outputs;
        std::vector<std::vector<test::held_page>> pages;
        bool operator==(const result&) const = default;
    };
    // engine(step): calls step(executor) for every operation of a model.
    const auto run = [&](auto engine) {
        std::vector<typename C::sequence_type> held;
        for (int i = 0; i < sequences; ++i) {
            held.push_back(cache.new_sequence());
            test::append(held.back(), layers, s, 0, 50 * i);
        }
        result r;
        for (const int n : steps)
            for (int layer = 0; layer < layers; ++layer) {
                std::vector<test::tensor<float>> out;
                std::vector<kvq::prefill_request> batch;
                out.reserve(sequences);
                for (auto& sequence : held) {
                    const int at = sequence.tokens(layer);
                    out.emplace_back(n, group * shape.kv_heads, shape.dim(kvq::tensor::value));
                    batch.push_back(
                        {&sequence, s.k.slice(at, n), s.v.slice(at, n), q.slice(at, n), out.back().view()});
                }
                kvq::workspace space;
                engine([&](kvq::executor_view threads) {
                    cache.prefill(layer, std::span<const kvq::prefill_request>(batch), kvq::causal{}, threads,
                                  space);
                });
                for (auto& o : out) r.outputs.push_back(o.values());
            }
        for (const auto& sequence : held) r.pages.push_back(test::contents(cache, sequence));
        return r;
    };
    const result expected = run([](auto operation) { operation(kvq::serial_executor{}); });
    for (const int threads : {2, 3}) {
        const kvq::thread_pool pool(threads);
        CHECK(run([&](auto operation) { operation(pool); }) == expected);
        kvq::team team;
        CHECK(run([&](auto operation) {
                  on_threads(threads, [&](int) { team.enter(threads, operation); });
              }) == expected);
        team.check();
    }
}

TEST_CASE("chunks that are merged by whoever ends last: the bits of one thread") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = 8};
    test::kivi_cache cache(shape, {.recent = 32, .page_tokens = 64});
    const test::stream s(random, shape, 9000);
    std::vector<kvq::sequence> held;
    for (const int tokens : {9000, 3, 2500}) {
        held.push_back(cache.new_sequence());
        held.back().append(0, s.k.slice(0, tokens), s.v.slice(0, tokens));
    }
    const auto q = test::random_tensor(random, 3, 4, 8);
    const auto run = [&](const kvq::executor_view& threads) {
        std::vector<float> all;
        std::vector<test::tensor<float>> out;
        std::vector<kvq::attention_request> batch;
        out.reserve(held.size());
        for (const auto& sequence : held) {
            out.emplace_back(3, 4, 8);
            batch.push_back({&sequence, q.view(), out.back().view()});
        }
        kvq::workspace space;
        cache.attend(0, std::span<const kvq::attention_request>(batch), kvq::causal{}, threads, space);
        for (const auto& o : out) all.insert(all.end(), o.values().begin(), o.values().end());
        return all;
    };
    const auto expected = run(kvq::serial_executor{});
    for (const int threads : {2, 4}) {
        const kvq::thread_pool pool(threads);
        for (int i = 0; i < 20; ++i) REQUIRE(run(pool) == expected);
    }
}

}  // namespace threads_tests
