// SPDX-License-Identifier: MIT
// kvq.h against the headers: the same calls, the same bytes and outputs.
#include <doctest/doctest.h>
#include <kvq/kvq.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <kvq/adapters/sequence_state.hpp>
#include <kvq/format/find_format.hpp>
#include <kvq/io/page_transfer.hpp>
#include <kvq/kvq.hpp>
#include <kvq/policy/kept_tokens.hpp>
#include <kvq/policy/ring.hpp>
#include <kvq/policy/self_calibration.hpp>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "c_interface/same_pages.hpp"
#include "support/random.hpp"

namespace behaviour_tests {

namespace {

constexpr int layers = 2, kv_heads = 2, q_heads = 4, dim = 32, value_dim = 48;

#define OK(call)                                         \
    do {                                                 \
        const kvq_status status_of_call = (call);        \
        INFO(#call ": ", std::string(kvq_last_error())); \
        REQUIRE(status_of_call == KVQ_OK);               \
    } while (false)

template <class T>
T init() {
    T s;
    KVQ_INIT(s);
    return s;
}

/// Bytes that were written and are read again.
struct stream {
    std::vector<std::byte> bytes;
    std::size_t at = 0;
};
const kvq_write write = [](void* to, const void* data, std::size_t n) -> std::int32_t {
    const auto* const first = static_cast<const std::byte*>(data);
    auto& all = static_cast<stream*>(to)->bytes;
    all.insert(all.end(), first, first + n);
    return 0;
};
const kvq_read read = [](void* from, void* to, std::size_t n) {
    auto& all = *static_cast<stream*>(from);
    n = std::min(n, all.bytes.size() - all.at);
    std::memcpy(to, all.bytes.data() + all.at, n);
    all.at += n;
    return n;
};

/// [n][heads][channels] of some type, as both interfaces take it.
template <class T>
struct rows {
    int tokens, heads, channels;
    std::vector<T> x;

    rows(int n, int h, int c) : tokens(n), heads(h), channels(c), x(static_cast<std::size_t>(n * h * c)) {}
    rows(test::generator& random, int n, int h, int c) : rows(n, h, c) {
        const auto all = random.normals(static_cast<int>(x.size()));
        for (std::size_t i = 0; i < x.size(); ++i) x[i] = T(all[i]);
    }
    kvq::token_view<T> view() { return {x.data(), tokens, heads, channels}; }
    kvq_tensor c() {
        const kvq::float_type type = kvq::float_type_of<T>;
        const kvq_dtype dtype = type == kvq::float_type::fp32   ? KVQ_FP32
                                : type == kvq::float_type::fp16 ? KVQ_FP16
                                                                : KVQ_BF16;
        return {x.data(), dtype, tokens, heads, channels, 0, 0};
    }
    std::vector<std::byte> bytes() const {
        const auto* const first = reinterpret_cast<const std::byte*>(x.data());
        return {first, first + x.size() * sizeof(T)};
    }
};

kvq::rotary_embedding rotary() {
    kvq::rotary_embedding r;
    r.dims = dim;
    r.base = 5000.0;
    return r;
}

/// One cache and one sequence per interface, with the same contents.
struct twins {
    kvq_rotary rotated{dim, 0, KVQ_HALF_SPLIT, 0, 5000.0, nullptr, nullptr, nullptr};
    kvq_cache* c = nullptr;
    kvq_sequence* c_sequence = nullptr;
    std::optional<kvq::cache> cpp;
    std::optional<kvq::sequence> sequence;

    explicit twins(const char* keys = "std4", const char* values = "kivi-4-g64", const char* window = nullptr,
                   const char* more_keys = "int8", const char* more_values = "int8") {
        auto o = init<kvq_cache_options>();
        // A format is listed once.
        kvq::cache_options same = kvq::preset_options();
        std::string listed_keys, listed_values;
        for (const std::string name : {keys, "low2", more_keys})
            if (same.keys.empty() || name != keys) {
                listed_keys += (same.keys.empty() ? "" : ", ") + name;
                same.keys.push_back(kvq::find_format(name, kvq::tensor::key));
            }
        for (const std::string name : {values, "low2", more_values})
            if (same.values.empty() || name != values) {
                listed_values += (same.values.empty() ? "" : " ,") + name;
                same.values.push_back(kvq::find_format(name, kvq::tensor::value));
            }
        o.layers = layers;
        o.kv_heads = kv_heads;
        o.head_dim = dim;
        o.value_dim = value_dim;
        o.keys = listed_keys.c_str();
        o.values = listed_values.c_str();
        o.window = window;
        o.page_tokens = 64;
        o.key_statistics = KVQ_NONE;  // pages of both are compared
        same.statistics = kvq::key_statistics::off;
        o.rotary = &rotated;
        o.rotary_count = 1;
        OK(kvq_cache_create(&o, &c));
        OK(kvq_sequence_create(c, &c_sequence));
        if (window) same.window = kvq::find_format(window, kvq::tensor::key);
        same.page_tokens = 64;
        same.rotary = {rotary()};
        cpp.emplace(kvq::cache_shape{layers, kv_heads, dim, value_dim}, same);
        sequence.emplace(cpp->new_sequence());
    }
    ~twins() {
        kvq_sequence_free(c_sequence);
        kvq_cache_free(c);
    }

    void append(test::generator& random, int n) {
        for (int layer = 0; layer < layers; ++layer) {
            rows<float> k(random, n, kv_heads, dim), v(random, n, kv_heads, value_dim);
            const kvq_tensor ck = k.c(), cv = v.c();
            OK(kvq_sequence_append(c_sequence, layer, &ck, &cv));
            sequence->append(layer, k.view(), v.view());
        }
    }
    void check_equal() const { check_equal(c_sequence, *sequence); }
    static void check_equal(const kvq_sequence* a, const kvq::sequence& b) {
        for (int layer = 0; layer < layers; ++layer) {
            const kvq::layer_pages pages = b.pages(layer);
            std::vector<kvq_page> held(static_cast<std::size_t>(pages.entries()) + 1);
            std::int32_t count = 0;
            OK(kvq_sequence_get_pages(a, layer, held.data(), static_cast<std::int32_t>(held.size()), &count));
            held.resize(static_cast<std::size_t>(count));
            test::check_same_pages(held, pages);
        }
        auto u = init<kvq_usage>();
        OK(kvq_sequence_get_usage(a, &u));
        const kvq::usage_report same = b.usage();
        CHECK(u.bytes == same.bytes);
        CHECK(u.quantized == same.quantized);
        CHECK(u.tokens == same.tokens);
    }
};

/// An executor of the caller: a thread for each task.
std::int32_t own_threads(void* calls, std::int32_t n, kvq_task task, void* data) {
    ++*static_cast<int*>(calls);
    std::vector<std::thread> all;
    for (std::int32_t i = 0; i < n; ++i) all.emplace_back(task, data, i);
    for (std::thread& t : all) t.join();
    return 0;
}

}  // namespace

TEST_CASE_TEMPLATE("prefill, attend and the log-sum-exp of every type, in chunks, on threads", T, float,
                   kvq::float16, kvq::bfloat16) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    twins both;
    int calls = 0;
    auto callbacks = init<kvq_executor_callbacks>();
    callbacks.concurrency = 3;
    callbacks.parallel_for = own_threads;
    callbacks.user = &calls;
    auto o = init<kvq_attend_options>();
    OK(kvq_executor_create(&callbacks, &o.executor));
    OK(kvq_workspace_create(nullptr, 0, &o.workspace));
    for (int i = 0; i < 6; ++i) {
        const int n = random.between(1, 150), m = random.between(0, n);
        for (int layer = 0; layer < layers; ++layer) {
            rows<T> k(random, n, kv_heads, dim), v(random, n, kv_heads, value_dim),
                q(random, m, q_heads, dim), out(m, q_heads, value_dim), same(m, q_heads, value_dim);
            std::vector<float> lse(static_cast<std::size_t>(m * q_heads) + 1), same_lse(lse.size());
            const kvq_tensor ck = k.c(), cv = v.c(), cq = q.c(), co = out.c();
            o.lse = lse.data();
            OK(kvq_sequence_prefill(both.c_sequence, layer, &ck, &cv, &cq, &co, &o));
            kvq::workspace space;
            both.sequence->prefill(layer, k.view(), v.view(), q.view(),
                                   kvq::output_view(same.view()).with_lse(same_lse.data()), kvq::causal{},
                                   kvq::serial_executor{}, space);
            CHECK(out.bytes() == same.bytes());
            CHECK(lse == same_lse);
        }
    }
    CHECK(calls > 0);
    both.check_equal();
    OK(kvq_executor_free(o.executor));
    OK(kvq_workspace_free(o.workspace));
}

TEST_CASE("masks and score modifiers, alone and in a batch, and over pages in memory of the caller") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    twins both;
    both.append(random, 300);
    rows<float> q(random, 40, q_heads, dim), out(40, q_heads, value_dim), same(40, q_heads, value_dim);
    static const std::int32_t starts[] = {0, 120, 270}, parents[] = {-1, 0, 0, -1, 3};
    static const float slopes[] = {0.1f, 0.2f, 0.3f, 0.4f}, logits[] = {0.5f, -1.0f, 2.0f, 0.0f};
    struct own_mods {
        bool mask(int q_pos, int k_pos) const { return (q_pos - k_pos) % 3 != 1; }
        float score(float s, int q_head, int, int k_pos) const {
            return s + 0.01f * static_cast<float>(q_head * (k_pos % 7));
        }
    };
    const auto check = [&](auto change, const kvq::mods_view& view) {
        auto mods = init<kvq_mods>();
        change(mods);
        const kvq_tensor cq = q.c(), co = out.c();
        auto o = init<kvq_attend_options>();
        o.mods = &mods;
        kvq::workspace space;
        both.sequence->attend(1, q.view(), same.view(), view, kvq::serial_executor{}, space);
        OK(kvq_sequence_attend(both.c_sequence, 1, &cq, &co, &o));
        CHECK(out.x == same.x);
        std::fill(out.x.begin(), out.x.end(), 0.0f);
        const kvq_attend_request request{both.c_sequence, cq, co, nullptr, &mods};
        OK(kvq_cache_attend(both.c, 1, &request, 1, nullptr));
        CHECK(out.x == same.x);
        std::fill(out.x.begin(), out.x.end(), 0.0f);
        kvq_page pages[64];
        std::int32_t count = 0;
        OK(kvq_sequence_get_pages(both.c_sequence, 1, pages, 64, &count));
        OK(kvq_cache_attend_pages(both.c, 1, pages, count, &cq, &co, &o));
        CHECK(out.x == same.x);
    };
    check([](auto&) {}, kvq::causal{});
    check([](auto& m) { m.direction = KVQ_BIDIRECTIONAL; }, kvq::bidirectional{});
    check([](auto& m) { m.direction = KVQ_CROSS; }, kvq::cross_attention{});
    check([](auto& m) { m.window = 50; }, kvq::sliding_window{50});
    check([](auto& m) { m.window = 50, m.window_sinks = 3; }, kvq::sink_window{50, 3});
    check([](auto& m) { m.prefix = 290; }, kvq::prefix_lm{290});
    check([](auto& m) { m.document_starts = starts, m.documents = 3; }, kvq::document_mask{starts});
    check([](auto& m) { m.tree_first = 295, m.tree_parents = parents, m.tree_tokens = 5; },
          kvq::token_tree(295, parents));
    check([](auto& m) { m.scale = 0.25f; }, kvq::score_scale{0.25f});
    check([](auto& m) { m.softcap = 2.0f; }, kvq::softcap{2.0f});
    check([](auto& m) { m.alibi_slopes = slopes, m.alibi_heads = 4; }, kvq::alibi{slopes});
    check([](auto& m) { m.sink_logits = logits, m.sink_heads = 4; }, kvq::learned_sinks{logits});
    check([](auto& m) { m.softcap = 2.0f, m.window = 50, m.alibi_slopes = slopes, m.alibi_heads = 4; },
          kvq::mods{kvq::softcap{2.0f}, kvq::alibi{slopes}, kvq::sliding_window{50}});
    static const kvq_token_range ranges[] = {{3, 70}, {100, 101}, {262, 290}};
    static const std::vector<kvq::token_range> same_ranges = {{3, 70}, {100, 101}, {262, 290}};
    static std::vector<std::int32_t> of_queries;
    for (int i = 0; i <= 40; ++i) of_queries.push_back(3 * i / 40);
    check([](auto& m) { m.token_ranges = ranges, m.range_count = 3; }, kvq::token_ranges{same_ranges});
    check(
        [](auto& m) {
            m.token_ranges = ranges, m.range_count = 3, m.range_starts = of_queries.data();
            m.range_start_count = 41, m.range_first_query = 260, m.window = 250;
        },
        kvq::mods{kvq::token_ranges{same_ranges, of_queries, 260}, kvq::sliding_window{250}});
    check([](auto& m) { m.selected_tokens = 1; }, kvq::selected_pages{1});
    check([](auto& m) { m.skipped_mass = 0.2f; }, kvq::skipped_values{0.2f});
    check([](auto& m) { m.selected_tokens = 64, m.skipped_mass = 0.01f, m.softcap = 2.0f; },
          kvq::mods{kvq::softcap{2.0f}, kvq::selected_pages{64}, kvq::skipped_values{0.01f}});
    check(
        [](auto& m) {
            m.mask_row = [](void*, float* scores, std::int32_t n, std::int32_t query, std::int32_t first) {
                for (int i = 0; i < n; ++i)
                    if ((query - first - i) % 3 == 1) scores[i] = -INFINITY;
            };
            m.mask_page = [](void*, std::int32_t, std::int32_t, std::int32_t, std::int32_t) -> std::int32_t {
                return KVQ_PAGE_SOME;
            };
            m.score_row = [](void*, float* s, std::int32_t n, std::int32_t head, std::int32_t,
                             std::int32_t first) {
                for (int i = 0; i < n; ++i) s[i] += 0.01f * static_cast<float>(head * ((first + i) % 7));
            };
        },
        own_mods{});
}

TEST_CASE("what selection and skipping did") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    twins both;
    both.append(random, 700);
    rows<float> q(random, 2, q_heads, dim), out(2, q_heads, value_dim), same(2, q_heads, value_dim);
    std::vector<kvq::chosen_tokens> runs;
    kvq::selection_report selected{.chosen = &runs};
    kvq::skipping_report skipped;
    const kvq::mods mods{kvq::selected_pages{128, &selected}, kvq::skipped_values{0.3f, &skipped}};
    auto c_selected = init<kvq_selection_report>();
    auto c_skipped = init<kvq_skipping_report>();
    kvq_chosen_tokens chosen[3];
    c_selected.chosen = chosen;
    c_selected.chosen_capacity = 3;
    auto m = init<kvq_mods>();
    m.selected_tokens = 128;
    m.skipped_mass = 0.3f;
    m.selection = &c_selected;
    m.skipping = &c_skipped;
    auto o = init<kvq_attend_options>();
    o.mods = &m;
    const kvq_tensor cq = q.c(), co = out.c();
    for (int call = 0; call < 2; ++call) {  // reports add up
        kvq::workspace space;
        both.sequence->attend(1, q.view(), same.view(), mods, kvq::serial_executor{}, space);
        if (call == 0)
            OK(kvq_sequence_attend(both.c_sequence, 1, &cq, &co, &o));
        else {
            const kvq_attend_request request{both.c_sequence, cq, co, nullptr, &m};
            OK(kvq_cache_attend(both.c, 1, &request, 1, nullptr));
        }
        CHECK(out.x == same.x);
        CHECK(c_selected.pages == selected.pages);
        CHECK(c_selected.read == selected.read);
        CHECK(c_selected.read < c_selected.pages);
        CHECK(c_skipped.pages == skipped.pages);
        CHECK(c_skipped.skipped == skipped.skipped);
        CHECK(c_skipped.rows == skipped.rows);
        CHECK(c_skipped.left_out == skipped.left_out);
        CHECK(c_skipped.most_left_out == skipped.most_left_out);
        REQUIRE(c_selected.chosen_count == static_cast<int>(runs.size()));
        REQUIRE(runs.size() > 3);
        for (std::size_t i = 0; i < 3; ++i) {
            CHECK(chosen[i].layer == runs[i].layer);
            CHECK(chosen[i].kv_head == runs[i].kv_head);
            CHECK(chosen[i].first_query == runs[i].first_query);
            CHECK(chosen[i].last_query == runs[i].last_query);
            CHECK(chosen[i].tokens.begin == runs[i].tokens.begin);
            CHECK(chosen[i].tokens.end == runs[i].tokens.end);
        }
    }
    const auto before = c_selected;
    auto bad = cq;
    bad.dim = dim - 1;
    CHECK(kvq_sequence_attend(both.c_sequence, 1, &bad, &co, &o) == KVQ_ERROR_ARGUMENT);
    CHECK(c_selected.pages == before.pages);
}

TEST_CASE("a step that was reserved takes no memory, and pages that are allocated at once") {
    struct counted {
        bool fails = false;
        std::size_t bytes = 0;
    } held;
    auto memory = init<kvq_allocator>();
    memory.user = &held;
    memory.allocate = [](void* user, std::size_t bytes, std::size_t alignment) -> void* {
        counted& c = *static_cast<counted*>(user);
        if (c.fails) return nullptr;
        c.bytes += bytes;
        return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    };
    memory.deallocate = [](void* user, void* p, std::size_t bytes, std::size_t) {
        static_cast<counted*>(user)->bytes -= bytes;
        std::free(p);
    };
    test::generator random(5);
    for (const bool preallocate : {false, true}) {
        auto o = init<kvq_cache_options>();
        o.layers = layers;
        o.kv_heads = kv_heads;
        o.head_dim = dim;
        o.keys = "std4";
        o.page_tokens = 32;
        o.allocator = &memory;
        o.byte_budget = preallocate ? std::size_t{1} << 20 : 0;
        o.preallocate = preallocate;
        kvq_cache* cache = nullptr;
        OK(kvq_cache_create(&o, &cache));
        auto info = init<kvq_cache_info>();
        OK(kvq_cache_get_info(cache, &info));
        CHECK(info.bytes_held == o.byte_budget);
        CHECK(held.bytes >= o.byte_budget);
        auto footprint = init<kvq_footprint>();
        OK(kvq_cache_get_footprint(cache, 100, nullptr, &footprint));
        CHECK((footprint.unused > 0) == preallocate);
        CHECK(footprint.total == footprint.quantized + footprint.window + footprint.rollback +
                                     footprint.bookkeeping + footprint.workspace + footprint.attention +
                                     footprint.unused);
        kvq_sequence* s[2];
        for (kvq_sequence*& one : s) OK(kvq_sequence_create(cache, &one));
        auto a = init<kvq_attend_options>();
        OK(kvq_workspace_create(&memory, 0, &a.workspace));
        OK(kvq_executor_create_threads(2, &a.executor));
        rows<float> k(random, 90, kv_heads, dim), v(random, 90, kv_heads, dim), q(random, 90, q_heads, dim),
            out(90, q_heads, dim);
        auto selected = init<kvq_mods>();
        selected.selected_tokens = 32;
        for (const int n : {90, 1, 40}) {
            const kvq_step_request steps[] = {{s[0], n, n, nullptr}, {s[1], 1, 1, &selected}};
            OK(kvq_cache_reserve(cache, steps, 2, q_heads, &a));
            auto u = init<kvq_usage>();
            OK(kvq_sequence_get_usage(s[0], &u));
            CHECK((u.reserved > 0 || n == 1));  // one token may find its place
            held.fails = true;
            const auto of = [&](rows<float>& x, int tokens) {
                kvq_tensor t = x.c();
                t.tokens = tokens;
                return t;
            };
            for (int layer = layers - 1; layer >= 0; --layer) {
                const kvq_prefill_request batch[] = {
                    {s[0], of(k, n), of(v, n), of(q, n), of(out, n), nullptr, nullptr},
                    {s[1], of(k, 1), of(v, 1), of(q, 1), of(out, 1), nullptr, &selected}};
                OK(kvq_cache_prefill(cache, layer, batch, 2, &a));
            }
            CHECK(kvq_cache_reserve(cache, steps, 2, q_heads, &a) == KVQ_ERROR_MEMORY);
            held.fails = false;
            OK(kvq_sequence_get_usage(s[0], &u));
            CHECK(u.reserved == 0);
            OK(kvq_cache_reserve(cache, steps, 2, q_heads, &a));
            OK(kvq_sequence_release_reserved(s[0]));
            OK(kvq_sequence_get_usage(s[0], &u));
            CHECK(u.reserved == 0);
            OK(kvq_sequence_release_reserved(s[1]));
        }
        const kvq_step_request twice[] = {{s[0], 1, 1, nullptr}, {s[0], 1, 1, nullptr}};
        CHECK(kvq_cache_reserve(cache, twice, 2, q_heads, &a) == KVQ_ERROR_ARGUMENT);
        CHECK(kvq_cache_reserve(cache, twice, 1, 3, &a) == KVQ_ERROR_ARGUMENT);
        for (kvq_sequence* one : s) OK(kvq_sequence_free(one));
        OK(kvq_workspace_free(a.workspace));
        OK(kvq_executor_free(a.executor));
        OK(kvq_cache_free(cache));
        CHECK(held.bytes == 0);
    }
    auto o = init<kvq_cache_options>();
    o.layers = layers, o.kv_heads = kv_heads, o.head_dim = dim, o.keys = "int8", o.preallocate = 1;
    kvq_cache* cache = nullptr;
    CHECK(kvq_cache_create(&o, &cache) == KVQ_ERROR_ARGUMENT);
    CHECK(std::string(kvq_last_error()).find("only within a byte_budget") != std::string::npos);
}

TEST_CASE("a batch of prompts and decode steps") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    twins a;
    kvq_executor* threads = nullptr;
    OK(kvq_executor_create_threads(2, &threads));
    auto o = init<kvq_attend_options>();
    o.executor = threads;
    std::vector<kvq_sequence*> c(3);
    std::vector<kvq::sequence> cpp;
    for (kvq_sequence*& s : c) {
        OK(kvq_sequence_create(a.c, &s));
        cpp.push_back(a.cpp->new_sequence());
    }
    for (int round = 0; round < 3; ++round) {
        std::deque<rows<float>> all;
        std::vector<kvq_prefill_request> requests;
        std::vector<kvq::prefill_request> same;
        std::deque<rows<float>> outs;
        for (std::size_t i = 0; i < 3; ++i) {
            const int n = i == 0 ? 1 : random.between(1, 200);
            rows<float>& k = all.emplace_back(random, n, kv_heads, dim);
            rows<float>& v = all.emplace_back(random, n, kv_heads, value_dim);
            rows<float>& q = all.emplace_back(random, n, q_heads, dim);
            rows<float>& out = outs.emplace_back(n, q_heads, value_dim);
            rows<float>& other = outs.emplace_back(n, q_heads, value_dim);
            requests.push_back({c[i], k.c(), v.c(), q.c(), out.c(), nullptr, nullptr});
            same.push_back({&cpp[i], k.view(), v.view(), q.view(), other.view()});
        }
        for (int layer = 0; layer < layers; ++layer) {
            OK(kvq_cache_prefill(a.c, layer, requests.data(), 3, &o));
            kvq::workspace space;
            a.cpp->prefill(layer, same, kvq::causal{}, kvq::serial_executor{}, space);
            for (std::size_t i = 0; i < 6; i += 2) CHECK(outs[i].x == outs[i + 1].x);
        }
    }
    for (std::size_t i = 0; i < 3; ++i) {
        twins::check_equal(c[i], cpp[i]);
        OK(kvq_sequence_free(c[i]));
    }
    OK(kvq_executor_free(threads));
}

TEST_CASE("trim, fork, erase, shift, splice, drafts, requantizing and stepping down") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    twins both;
    both.append(random, 360);
    auto copies = init<kvq_usage>();
    OK(kvq_sequence_get_usage(both.c_sequence, &copies));
    CHECK(copies.rollback > 0);
    OK(kvq_sequence_drop_copies(both.c_sequence));
    both.sequence->drop_copies();
    OK(kvq_sequence_get_usage(both.c_sequence, &copies));
    CHECK(copies.rollback == 0);
    both.append(random, 40);
    OK(kvq_sequence_trim(both.c_sequence, 333));
    both.sequence->trim(333);
    kvq_sequence* fork = nullptr;
    OK(kvq_sequence_fork(both.c_sequence, &fork));
    kvq::sequence cpp_fork = both.sequence->fork();
    both.append(random, 70);
    OK(kvq_sequence_erase(both.c_sequence, 100, 150));
    both.sequence->erase(100, 150);
    OK(kvq_sequence_shift(both.c_sequence, 0, 200, 17));
    both.sequence->shift(0, 200, 17);
    OK(kvq_sequence_splice(both.c_sequence, fork, 10, 300));
    both.sequence->splice(cpp_fork, 10, 300);
    both.check_equal();
    twins::check_equal(fork, cpp_fork);

    const std::int32_t path[] = {0, 2};
    for (int layer = 0; layer < layers; ++layer) {
        rows<float> k(random, 5, kv_heads, dim), v(random, 5, kv_heads, value_dim);
        const kvq_tensor ck = k.c(), cv = v.c();
        OK(kvq_sequence_append_draft(both.c_sequence, layer, &ck, &cv));
        both.sequence->append_draft(layer, k.view(), v.view());
    }
    OK(kvq_sequence_keep(both.c_sequence, path, 2));
    both.sequence->keep(path);
    both.check_equal();
    std::size_t bytes = 0;
    OK(kvq_sequence_append_bytes(both.c_sequence, 50, &bytes));
    CHECK(bytes == both.sequence->append_bytes(50));
    OK(kvq_sequence_prefill_bytes(both.c_sequence, 50, &bytes));
    CHECK(bytes == both.sequence->prefill_bytes(50));
    OK(kvq_sequence_draft_bytes(both.c_sequence, 9, &bytes));
    CHECK(bytes == both.sequence->draft_bytes(9));

    kvq_sequence* const list[] = {both.c_sequence, fork};
    kvq::sequence* const cpp_list[] = {&*both.sequence, &cpp_fork};
    auto request = init<kvq_requantize_request>();
    request.keys = "int8";
    request.values = "low2";
    request.last_layer = 1;
    request.dry_run = 1;
    auto report = init<kvq_requantize_report>(), planned = report;
    OK(kvq_cache_requantize(both.c, list, 2, &request, &planned));
    CHECK(planned.pages > 0);
    request.dry_run = 0;
    OK(kvq_cache_requantize(both.c, list, 2, &request, &report));
    kvq::workspace space;
    const auto same = both.cpp->requantize(cpp_list, {.key = 2, .value = 1, .last_layer = 1}, {},
                                           kvq::serial_executor{}, space);
    CHECK(report.pages == same.pages);
    CHECK(planned.pages == report.pages);
    CHECK(planned.bytes_after == report.bytes_after);
    CHECK(report.bytes_peak == same.bytes_peak);
    both.check_equal();

    const kvq_tier tiers[] = {{0, 0, "int8", "int8"}, {100, 0, "low2", "low2"}};
    auto policy = init<kvq_step_down_policy>();
    policy.tiers = tiers;
    policy.tier_count = 2;
    policy.last_layers_kept = 1;
    auto foretold = init<kvq_step_down_report>(), steps = init<kvq_step_down_report>();
    OK(kvq_cache_plan_step_down(both.c, list, 2, &policy, nullptr, &foretold));
    both.check_equal();
    OK(kvq_cache_step_down(both.c, list, 2, &policy, nullptr, &steps));
    const kvq::step_down_policy cpp_policy{.tiers = {{0, {2, 2}}, {100, {1, 1}}}, .last_layers_kept = 1};
    const auto cpp_steps = kvq::step_down(*both.cpp, cpp_list, cpp_policy);
    CHECK(steps.bytes_after == cpp_steps.bytes_after);
    CHECK(steps.pages > 0);
    CHECK(foretold.pages == steps.pages);
    CHECK(foretold.bytes_after == steps.bytes_after);
    CHECK(foretold.bytes_peak == steps.bytes_peak);
    CHECK(foretold.fits == steps.fits);
    both.check_equal();

    auto query = init<kvq_footprint_query>();
    query.sequences = 3;
    query.q_heads = q_heads;
    query.policy = &policy;
    auto f = init<kvq_footprint>();
    OK(kvq_cache_get_footprint(both.c, 1000, &query, &f));
    const auto cpp_f = kvq::footprint(*both.cpp, 1000, 3, {.q_heads = q_heads}, cpp_policy);
    CHECK(f.total == cpp_f.total);
    CHECK(f.transient == cpp_f.transient);
    std::int32_t longest = 0;
    OK(kvq_cache_longest_context(both.c, f.total, &query, &longest));
    CHECK(longest == kvq::longest_context(*both.cpp, f.total, 3, {.q_heads = q_heads}, cpp_policy));
    auto asked = init<kvq_budget_query>();
    asked.tokens = 500;
    asked.sequences = 2;
    asked.chunk = 64;
    asked.cuts = 1;
    for (const std::int32_t preallocate : {0, 1}) {
        auto o = init<kvq_cache_options>();
        o.layers = layers;
        o.kv_heads = kv_heads;
        o.head_dim = dim;
        o.value_dim = value_dim;
        o.keys = "std4";
        o.values = "kivi-4-g64";
        o.page_tokens = 64;
        o.byte_budget = 1;  // does not matter
        o.preallocate = preallocate;
        kvq::cache_options cpp_o = both.cpp->options();
        cpp_o.preallocate = preallocate != 0;
        OK(kvq_get_budget(&o, &asked, &bytes));
        CHECK(bytes == kvq::budget(cpp_o, both.cpp->shape(), {500, 2, 64, 1}));
    }
    OK(kvq_cache_workspace_bytes(both.c, 500, q_heads, 3, 2, &bytes));
    CHECK(bytes == both.cpp->attention_workspace(500, q_heads, 3, 2));
    OK(kvq_sequence_free(fork));
}

TEST_CASE("pages that are quantized in memory of the caller are those of a cache, and attend as they do") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (const char* const name : {"std4", "int8", "kivi-2-g32", "affine-5-g64", "fp16", "bf16", "low3"})
        for (const kvq_role role : {KVQ_KEY, KVQ_VALUE}) {
            const int channels = role == KVQ_KEY ? dim : value_dim;
            twins both(name, name, "fp16");
            rows<kvq::float16> k(random, 200, kv_heads, dim), v(random, 200, kv_heads, value_dim);
            const kvq_tensor ck = k.c(), cv = v.c();
            OK(kvq_sequence_append(both.c_sequence, 0, &ck, &cv));
            kvq_page pages[16];
            std::int32_t count = 0;
            OK(kvq_sequence_get_pages(both.c_sequence, 0, pages, 16, &count));
            // The first page behind the four sinks.
            const kvq_page& page = pages[1];
            REQUIRE(page.tokens == 64);
            const std::int32_t index = role == KVQ_KEY ? page.key_format : page.value_format;
            kvq_format* format = nullptr;
            OK(kvq_cache_get_format(both.c, role, index, &format));
            const kvq_page_shape shape{role, 64, kv_heads, channels, 0, 0};
            std::size_t bytes = 0, scratch_bytes = 0, not_finite = 1;
            OK(kvq_format_page_bytes(format, &shape, &bytes, &scratch_bytes));
            struct alignas(64) line {
                std::byte bytes[64];
            };
            std::vector<line> memory(bytes / 64 + 1), scratch(scratch_bytes / 64 + 1);
            kvq_tensor part = role == KVQ_KEY ? ck : cv;
            part.data = static_cast<kvq::float16*>(part.data) + 4 * kv_heads * channels;
            part.tokens = 64;
            OK(kvq_format_quantize(format, &shape, &part, memory.data(), bytes, scratch.data(), scratch_bytes,
                                   &not_finite));
            INFO(name, " of role ", role);
            CHECK(not_finite == 0);
            CHECK(std::memcmp(memory.data(), role == KVQ_KEY ? page.keys : page.values, bytes) == 0);
            rows<float> x(64, kv_heads, channels), held(64, kv_heads, channels);
            const kvq_tensor cx = x.c(), ch = held.c();
            OK(kvq_format_dequantize(format, &shape, memory.data(), bytes, &cx, scratch.data(),
                                     scratch_bytes));
            OK(kvq_sequence_dequantize(both.c_sequence, 0, role, 4, &ch));
            CHECK(x.x == held.x);

            // Attention over copies of all pages gives the bits of the sequence.
            std::vector<std::vector<line>> copies;
            kvq_page copied[16];
            for (std::int32_t i = 0; i < count; ++i) {
                copied[i] = pages[i];
                for (const kvq_role r : {KVQ_KEY, KVQ_VALUE}) {
                    kvq_format* f = nullptr;
                    OK(kvq_cache_get_format(both.c, r,
                                            r == KVQ_KEY ? pages[i].key_format : pages[i].value_format, &f));
                    const kvq_page_shape s{
                        r,        r == KVQ_KEY ? pages[i].key_capacity : pages[i].value_capacity,
                        kv_heads, r == KVQ_KEY ? dim : value_dim,
                        0,        0};
                    std::size_t n = 0;
                    OK(kvq_format_page_bytes(f, &s, &n, nullptr));
                    std::vector<line>& copy = copies.emplace_back(n / 64 + 1);
                    std::memcpy(copy.data(), r == KVQ_KEY ? pages[i].keys : pages[i].values, n);
                    (r == KVQ_KEY ? copied[i].keys : copied[i].values) = copy.data();
                    OK(kvq_format_free(f));
                }
            }
            rows<float> q(random, 3, q_heads, dim), out(3, q_heads, value_dim), same(3, q_heads, value_dim);
            const kvq_tensor cq = q.c(), co = out.c(), cs = same.c();
            OK(kvq_cache_attend_pages(both.c, 0, copied, count, &cq, &co, nullptr));
            OK(kvq_sequence_attend(both.c_sequence, 0, &cq, &cs, nullptr));
            CHECK(out.x == same.x);
            OK(kvq_format_free(format));
        }
}

TEST_CASE("saved in memory, sent page by page, stored by token ids, kept in a ring") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    twins both;
    both.append(random, 350);
    kvq_sequence* back = nullptr;

    stream saved;
    const kvq_status status = kvq_sequence_save(both.c_sequence, nullptr, write, &saved);
    if (status != KVQ_ERROR_UNSUPPORTED) {
        OK(status);
        OK(kvq_sequence_restore(both.c, nullptr, read, &saved, &back));
        twins::check_equal(back, *both.sequence);
        OK(kvq_sequence_free(back));
        auto options = init<kvq_save_options>();
        options.model = "another";
        saved.at = 0;
        CHECK(kvq_sequence_restore(both.c, &options, read, &saved, &back) == KVQ_ERROR_DATA);

        // The upper planes alone: what a step down to their format leaves.
        twins nested("nested8", "nested8", nullptr, "nested4", "nested4");
        nested.append(random, 200);
        saved = {};
        options = init<kvq_save_options>();
        options.upper_only = 1;
        OK(kvq_sequence_save(nested.c_sequence, &options, write, &saved));
        CHECK(kvq_sequence_restore(nested.c, &options, read, &saved, &back) == KVQ_ERROR_ARGUMENT);
        CHECK(std::string(kvq_last_error()).find("upper_only is 1, but") != std::string::npos);
        OK(kvq_sequence_restore(nested.c, nullptr, read, &saved, &back));
        nested.cpp->requantize(*nested.sequence, {.key = 2, .value = 2});
        twins::check_equal(back, *nested.sequence);
        OK(kvq_sequence_free(back));
    }

    kvq_receiver* receiver = nullptr;
    OK(kvq_receiver_create(both.c, &receiver));
    const kvq_write accept = [](void* to, const void* data, std::size_t n) {
        return kvq_receiver_accept(static_cast<kvq_receiver*>(to), data, n);
    };
    for (int layer = layers - 1; layer >= 0; --layer)
        OK(kvq_sequence_send_pages(both.c_sequence, layer, accept, receiver));
    OK(kvq_receiver_finish(receiver, 350, &back));
    twins::check_equal(back, *both.sequence);
    OK(kvq_sequence_free(back));
    OK(kvq_receiver_free(receiver));

    // To a cache of other formats.
    for (const bool convert : {false, true}) {
        twins narrow("low2", "low2", nullptr, "std4", "kivi-4-g64");
        OK(kvq_receiver_create(narrow.c, &receiver));
        if (convert) OK(kvq_receiver_convert(receiver, -1, -1, -1));
        kvq::page_receiver same(*narrow.cpp);
        if (convert) same.convert_pages();
        for (int layer = 0; layer < layers; ++layer) {
            OK(kvq_sequence_send_pages(both.c_sequence, layer, accept, receiver));
            stream messages;
            kvq::send_pages(*both.sequence, layer,
                            [&](const void* data, std::size_t n) { write(&messages, data, n); });
            std::vector<std::byte> storage;
            while (messages.at < messages.bytes.size())
                same.accept(
                    kvq::read_page([&](void* to, std::size_t n) { return read(&messages, to, n); }, storage));
        }
        OK(kvq_receiver_finish(receiver, -1, &back));
        const kvq::sequence got = same.finish();
        twins::check_equal(back, got);
        CHECK((got.usage().quantized < both.sequence->usage().quantized) == convert);
        OK(kvq_sequence_free(back));
        OK(kvq_receiver_free(receiver));
    }

    kvq_prefix_cache* store = nullptr;
    auto store_options = init<kvq_prefix_cache_options>();
    store_options.min_prefix_tokens = KVQ_NONE;
    OK(kvq_prefix_cache_create(both.c, &store_options, &store));
    std::vector<std::int32_t> ids(350);
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i * i % 1000);
    std::int32_t outcome = -1, match = -1, found = -1, erased = -1;
    OK(kvq_prefix_cache_store(store, ids.data(), 350, both.c_sequence, &outcome));
    CHECK(outcome == KVQ_STORED);
    OK(kvq_prefix_cache_store(store, ids.data(), 350, both.c_sequence, &outcome));
    CHECK(outcome == KVQ_STORE_DUPLICATE);
    OK(kvq_prefix_cache_fetch(store, ids.data(), 350, &match, &found, &back));
    CHECK(match == KVQ_MATCH_EXACT);
    CHECK(found == 350);
    twins::check_equal(back, *both.sequence);
    OK(kvq_sequence_free(back));
    ids[200] = -5;
    OK(kvq_prefix_cache_lookup(store, ids.data(), 350, &match, &found));
    CHECK(match == KVQ_MATCH_LCP);
    CHECK(found == 200);
    OK(kvq_prefix_cache_erase(store, ids.data(), 350, &erased));
    CHECK(erased == 0);
    std::size_t released = 0;
    OK(kvq_prefix_cache_release(store, 1, &released));
    CHECK(released > 0);
    auto counts = init<kvq_prefix_cache_statistics>();
    OK(kvq_prefix_cache_get_statistics(store, &counts));
    CHECK(counts.fetches[KVQ_MATCH_EXACT] == 1);
    CHECK(counts.tokens_saved == 350);
    CHECK(counts.entries == 0);
    OK(kvq_prefix_cache_clear(store));
    OK(kvq_prefix_cache_free(store));

    auto ring_options = init<kvq_ring_options>();
    ring_options.window = 100;
    kvq_ring* ring = nullptr;
    kvq_sequence* empty = nullptr;
    OK(kvq_sequence_create(both.c, &empty));
    OK(kvq_ring_create(empty, &ring_options, &ring));
    kvq::ring cpp(both.cpp->new_sequence(), {.window = 100});
    auto mods = init<kvq_mods>();
    mods.softcap = 5.0f;
    auto o = init<kvq_attend_options>();
    o.mods = &mods;
    for (int step = 0; step < 12; ++step)
        for (int layer = 0; layer < layers; ++layer) {
            const int n = step < 8 ? 60 : 1;
            rows<float> k(random, n, kv_heads, dim), v(random, n, kv_heads, value_dim),
                q(random, n, q_heads, dim), out(n, q_heads, value_dim), same(n, q_heads, value_dim);
            const kvq_tensor ck = k.c(), cv = v.c(), cq = q.c(), co = out.c();
            OK(kvq_ring_prefill(ring, layer, &ck, &cv, &cq, &co, &o));
            kvq::workspace space;
            cpp.prefill(layer, k.view(), v.view(), q.view(), same.view(), kvq::softcap{5.0f},
                        kvq::serial_executor{}, space);
            CHECK(out.x == same.x);
            OK(kvq_ring_attend(ring, layer, &cq, &co, nullptr));
            cpp.attend(layer, q.view(), same.view());
            CHECK(out.x == same.x);
        }
    OK(kvq_ring_trim(ring, 480));
    cpp.trim(480);
    std::int64_t tokens = 0, first = 0;
    OK(kvq_ring_tokens(ring, KVQ_ALL_LAYERS, &tokens, &first));
    CHECK(tokens == 480);
    CHECK(first == cpp.first_token());
    CHECK(first > 0);
    OK(kvq_ring_held(ring, &back));
    twins::check_equal(back, cpp.held());
    OK(kvq_sequence_free(back));
    kvq_ring* other = nullptr;
    OK(kvq_ring_fork(ring, &other));
    OK(kvq_ring_free(other));
    OK(kvq_ring_free(ring));
    OK(kvq_sequence_free(empty));
}

TEST_CASE(
    "sequences by id: steps of several, shared, cut, moved, written and read, as the C++ table does it") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    twins both;
    kvq_sequence_table* table = nullptr;
    OK(kvq_sequence_table_create(both.c, 2, &table));
    kvq::sequence_table cpp(*both.cpp, 2);
    kvq_workspace* space = nullptr;
    OK(kvq_workspace_create(nullptr, 0, &space));
    kvq::workspace same_space;
    auto options = init<kvq_attend_options>();
    options.workspace = space;
    OK(kvq_sequence_table_grow(table, 3));
    OK(kvq_sequence_table_grow(table, 1));
    cpp.grow(3);

    const auto check_equal = [&] {
        for (int id = 0; id < 3; ++id) {
            std::int32_t positions[400] = {}, count = -1;
            OK(kvq_sequence_table_positions(table, id, positions, 400, &count));
            const auto held = cpp.positions(id);
            CHECK(std::vector<std::int32_t>(positions, positions + count) ==
                  std::vector<std::int32_t>(held.begin(), held.end()));
            kvq_sequence* fork = nullptr;
            OK(kvq_sequence_table_fork(table, id, &fork));
            std::int32_t tokens = -1;
            OK(kvq_sequence_tokens(fork, KVQ_ALL_LAYERS, &tokens));
            CHECK(tokens == count);
            if (count > 0) twins::check_equal(fork, *cpp.find(id));
            OK(kvq_sequence_free(fork));
        }
        auto usage = init<kvq_table_usage>();
        OK(kvq_sequence_table_get_usage(table, &usage));
        CHECK(usage.tokens == cpp.distinct_tokens());
        CHECK(usage.ids == 3);
        CHECK(usage.can_shift == 1);
    };
    // Positions from `first` on, each token in all ids.
    const auto step = [&](std::int32_t first, int n, const std::vector<std::int32_t>& ids,
                          bool whole = true) {
        std::vector<std::int32_t> positions;
        for (int i = 0; i < n; ++i) positions.push_back(first + i);
        const std::vector<std::int32_t> counts(static_cast<std::size_t>(n), static_cast<int>(ids.size()));
        const std::vector<const std::int32_t*> all(static_cast<std::size_t>(n), ids.data());
        auto batch = init<kvq_token_batch>();
        batch.tokens = n;
        batch.positions = positions.data();
        batch.id_counts = counts.data();
        batch.ids = all.data();
        OK(kvq_sequence_table_begin(table, &batch, q_heads, &options));
        cpp.begin({n, positions.data(), counts.data(), all.data()}, q_heads, 1, same_space);
        for (int layer = 0; layer < (whole ? layers : 1); ++layer) {
            rows<float> k(random, n, kv_heads, dim), v(random, n, kv_heads, value_dim),
                q(random, n, q_heads, dim), out(n, q_heads, value_dim), same(n, q_heads, value_dim);
            const kvq_tensor ck = k.c(), cv = v.c(), cq = q.c(), co = out.c();
            OK(kvq_sequence_table_prefill(table, layer, &ck, &cv, &cq, &co, &options));
            cpp.prefill(layer, k.view(), v.view(), q.view(), same.view(), kvq::causal{},
                        kvq::serial_executor{}, same_space);
            CHECK(out.x == same.x);
        }
        if (whole) {
            OK(kvq_sequence_table_end(table));
            cpp.end();
        }
    };
    step(0, 150, {0, 1});
    step(150, 20, {1});
    step(150, 9, {0});
    check_equal();
    step(170, 5, {1}, false);
    CHECK(kvq_sequence_table_end(table) == KVQ_ERROR_ARGUMENT);
    CHECK_THROWS_AS(cpp.end(), kvq::error);
    step(170, 5, {1}, false);
    OK(kvq_sequence_table_take_back(table));
    cpp.take_back();
    check_equal();
    OK(kvq_sequence_table_copy(table, 1, 2, 0, -1));
    cpp.copy(1, 2, 0, -1);
    OK(kvq_sequence_table_remove(table, 0, 40, 90));
    cpp.remove(0, 40, 90);
    OK(kvq_sequence_table_shift(table, 0, 90, -1, -50));
    cpp.shift(0, 90, -1, -50);
    check_equal();
    step(109, 3, {0});

    stream saved;
    OK(kvq_sequence_table_write(table, 0, write, &saved));
    std::size_t bytes = 0;
    OK(kvq_sequence_table_state_bytes(table, 0, &bytes));
    CHECK(bytes == saved.bytes.size());
    CHECK(bytes == kvq::state_bytes(cpp, 0));
    OK(kvq_sequence_table_keep(table, 1));
    cpp.keep(1);
    check_equal();
    stream half = saved, again = saved;
    half.bytes.resize(bytes / 2);
    CHECK(kvq_sequence_table_read(table, 2, read, &half) == KVQ_ERROR_DATA);
    check_equal();
    OK(kvq_sequence_table_read(table, 2, read, &again));
    kvq::read_state(
        cpp, [&](void* to, std::size_t n) { return read(&saved, to, n); }, 2);
    check_equal();
    CHECK(kvq_sequence_table_remove(table, 7, 0, 1) == KVQ_ERROR_ARGUMENT);
    OK(kvq_sequence_table_clear(table));
    cpp.clear();
    check_equal();
    OK(kvq_sequence_table_free(table));
    OK(kvq_workspace_free(space));
}

TEST_CASE("keys made from statistics, formats per layer, formats that a cache is given later") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    kvq_statistics* statistics = nullptr;
    OK(kvq_statistics_create(layers, kv_heads, dim, 1, &statistics));
    kvq::calibration same({layers, kv_heads, dim, 0}, true);
    for (int layer = 0; layer < layers; ++layer) {
        rows<float> k(random, 128, kv_heads, dim), q(random, 20, q_heads, dim);
        const kvq_tensor ck = k.c(), cq = q.c();
        OK(kvq_statistics_add_keys(statistics, layer, &ck));
        OK(kvq_statistics_add_queries(statistics, layer, &cq));
        same.add_keys(layer, k.view());
        same.add_queries(layer, q.view());
    }
    std::vector<std::byte> saved;
    const kvq_write write = [](void* to, const void* data, std::size_t n) -> std::int32_t {
        const auto* const first = static_cast<const std::byte*>(data);
        static_cast<std::vector<std::byte>*>(to)->assign(first, first + n);
        return 0;
    };
    OK(kvq_statistics_save(statistics, write, &saved));
    CHECK(saved == same.save());
    kvq_statistics* loaded = nullptr;
    OK(kvq_statistics_load(saved.data(), saved.size(), &loaded));

    const kvq_layer_formats per_layer[layers] = {{nullptr, "fp16"}, {"int8", nullptr}};
    auto o = init<kvq_cache_options>();
    o.layers = layers;
    o.kv_heads = kv_heads;
    o.head_dim = dim;
    o.keys = "low2";
    o.page_tokens = 64;
    o.layer_formats = per_layer;
    o.statistics = loaded;
    kvq_cache* cache = nullptr;
    OK(kvq_cache_create(&o, &cache));
    OK(kvq_statistics_free(loaded));
    kvq::cache_options cpp_options = kvq::preset_options();
    cpp_options.keys = {kvq::find_format("low2", kvq::tensor::key, same),
                        kvq::find_format("int8", kvq::tensor::key)};
    cpp_options.values = {kvq::find_format("low2", kvq::tensor::value),
                          kvq::find_format("fp16", kvq::tensor::value)};
    cpp_options.page_tokens = 64;
    cpp_options.layers = {{0, 1}, {1, 0}};
    kvq::cache cpp({layers, kv_heads, dim, 0}, cpp_options);
    kvq_sequence* s = nullptr;
    OK(kvq_sequence_create(cache, &s));
    auto cpp_s = cpp.new_sequence();
    for (int layer = 0; layer < layers; ++layer) {
        rows<kvq::bfloat16> k(random, 250, kv_heads, dim), v(random, 250, kv_heads, dim);
        const kvq_tensor ck = k.c(), cv = v.c();
        OK(kvq_sequence_append(s, layer, &ck, &cv));
        cpp_s.append(layer, k.view(), v.view());
    }
    twins::check_equal(s, cpp_s);

    kvq_format* added = nullptr;
    std::int32_t index = 0;
    OK(kvq_format_find("kivi-3-g64", KVQ_KEY, nullptr, &added));
    OK(kvq_cache_add_format(cache, KVQ_KEY, added, "three"));
    OK(kvq_format_free(added));
    OK(kvq_cache_find_format(cache, KVQ_KEY, "three", &index));
    CHECK(index == 3);
    auto request = init<kvq_requantize_request>();
    request.keys = "three";
    OK(kvq_cache_requantize(cache, &s, 1, &request, nullptr));
    const int listed = cpp.add_format(kvq::tensor::key, kvq::find_format("kivi-3-g64", kvq::tensor::key));
    cpp.requantize(cpp_s, {.key = listed});
    twins::check_equal(s, cpp_s);

    // Statistics of the sequence itself, and a format for sequences that begin now.
    OK(kvq_statistics_add_sequence(statistics, s, 10, 200));
    for (int layer = 0; layer < layers; ++layer) kvq::add_keys(same, cpp, cpp_s, layer, 10, 200);
    OK(kvq_statistics_save(statistics, write, &saved));
    CHECK(saved == same.save());
    OK(kvq_cache_commit_to(cache, KVQ_KEY, "three", 1, 2));
    cpp.commit_to(kvq::tensor::key, listed, 1, 2);
    kvq_sequence* later = nullptr;
    OK(kvq_sequence_create(cache, &later));
    auto cpp_later = cpp.new_sequence();
    for (int layer = 0; layer < layers; ++layer) {
        rows<float> k(random, 250, kv_heads, dim), v(random, 250, kv_heads, dim);
        const kvq_tensor ck = k.c(), cv = v.c();
        OK(kvq_sequence_append(later, layer, &ck, &cv));
        cpp_later.append(layer, k.view(), v.view());
    }
    twins::check_equal(later, cpp_later);
    OK(kvq_sequence_free(later));
    OK(kvq_sequence_free(s));
    OK(kvq_cache_free(cache));
    OK(kvq_statistics_free(statistics));
}

TEST_CASE("the list of formats, descriptions, the options of a cache, frequencies") {
    std::int32_t count = 0;
    OK(kvq_format_count(&count));
    CHECK(count > 50);
    std::map<std::string, kvq_format_entry> entries;
    for (std::int32_t i = 0; i < count; ++i) {
        auto e = init<kvq_format_entry>();
        OK(kvq_format_list(i, &e));
        CHECK(e.keys + e.values > 0);
        entries[e.name] = e;
    }
    CHECK(entries.at("std4").preset == 1);
    CHECK(entries.at("kivi-4-g64").group == 64);
    CHECK(entries.at("kivi-4-g64").preset == 0);
    kvq_format* f = nullptr;
    OK(kvq_format_find("kivi-4-g48", KVQ_KEY, nullptr, &f));
    auto d = init<kvq_format_description>();
    OK(kvq_format_describe(f, KVQ_KEY, 64, 128, &d));
    const kvq::format same = kvq::find_format("kivi-4-g48", kvq::tensor::key);
    CHECK(std::string(d.name) == same.name());
    CHECK(std::string(d.asked_name) == "kivi-4-g48");
    CHECK(d.bits == same.bits({kvq::tensor::key, 64, 128}));
    CHECK(d.block_bytes == same.block_bytes({kvq::tensor::key, 64, 128}));
    const kvq::format_description described = same.describe({kvq::tensor::key, 64, 128});
    CHECK(d.quantize == described.quantize);
    CHECK(d.dequantize == described.dequantize);
    CHECK(d.attend == described.attend);
    CHECK(std::string(d.quantize_by) == described.quantize_by);
    CHECK(std::string(d.dequantize_by) == described.dequantize_by);
    CHECK(std::string(d.attend_by) == described.attend_by);
    CHECK(d.holds_values == 0);
    OK(kvq_format_free(f));
    OK(kvq_format_find("int8", KVQ_KEY, nullptr, &f));
    OK(kvq_format_describe(f, KVQ_KEY, 64, 128, &d));
    const std::size_t without_bounds = d.block_bytes;
    OK(kvq_format_free(f));
    OK(kvq_format_find("int8-bounds", KVQ_KEY, nullptr, &f));
    OK(kvq_format_describe(f, KVQ_KEY, 64, 128, &d));
    CHECK(d.block_bytes == without_bounds + 4 * 128);
    OK(kvq_format_free(f));

    auto o = init<kvq_cache_options>();
    o.layers = 3;
    o.kv_heads = 2;
    o.head_dim = 64;
    o.keys = "std4";
    o.rollback = KVQ_NONE;
    kvq_cache* cache = nullptr;
    OK(kvq_cache_create(&o, &cache));
    auto info = init<kvq_cache_info>();
    OK(kvq_cache_get_info(cache, &info));
    CHECK(info.value_dim == 64);
    CHECK(info.page_tokens == 128);
    CHECK(info.sinks == 4);
    CHECK(info.recent == 32);
    CHECK(info.rollback == 0);
    CHECK(info.byte_budget == SIZE_MAX);
    CHECK(info.bytes_in_use == 0);
    OK(kvq_cache_free(cache));

    // Values of two names may be one format, which then has both.
    o.keys = "std4,mix4, int8, int8-bounds,kivi-4-g64,affine-4-g64";
    OK(kvq_cache_create(&o, &cache));
    const auto index_of = [&](kvq_role role, const char* name) {
        std::int32_t index = -1;
        OK(kvq_cache_find_format(cache, role, name, &index));
        return index;
    };
    CHECK(index_of(KVQ_VALUE, "std4") == 1);
    CHECK(index_of(KVQ_VALUE, "mix4") == 1);
    CHECK(index_of(KVQ_VALUE, "int8") == 2);
    CHECK(index_of(KVQ_VALUE, "int8-bounds") == 2);
    CHECK(index_of(KVQ_VALUE, "kivi-4-g64") == 3);
    CHECK(index_of(KVQ_VALUE, "affine-4-g64") == 3);
    CHECK(index_of(KVQ_KEY, "mix4") == 2);
    CHECK(index_of(KVQ_KEY, "int8-bounds") == 4);
    CHECK(index_of(KVQ_KEY, "affine-4-g64") == 6);
    OK(kvq_cache_free(cache));

    double frequencies[32] = {};
    OK(kvq_rotary_llama3(64, 5e5, 8.0, 1.0, 4.0, 8192.0, frequencies));
    CHECK(std::vector<double>(frequencies, frequencies + 32) == kvq::llama3_frequencies(64, 5e5, {}));
    OK(kvq_rotary_yarn(64, 1e4, 4.0, 4096.0, 32.0, 1.0, frequencies));
    CHECK(std::vector<double>(frequencies, frequencies + 32) ==
          kvq::yarn_frequencies(64, 1e4, {.factor = 4.0}));
    CHECK(std::string(kvq_status_name(KVQ_ERROR_DATA)) == "KVQ_ERROR_DATA");
    CHECK(std::string(kvq_status_name(99)) == "unknown status");
    CHECK(kvq_abi_version() == KVQ_ABI_VERSION);
}

TEST_CASE("a list of layers in C is the list in C++") {
    const kvq_layer list[] = {{KVQ_SLIDING_ATTENTION, 4, 64, 0, 20, 2, 0},
                              {KVQ_FULL_ATTENTION, 1, 128, 96, 0, 0, 0},
                              {KVQ_SHARED, 0, 0, 0, 0, 0, 0}};
    const kvq_layer_formats formats[] = {{"std4", nullptr}, {"int8", "int8"}, {nullptr, nullptr}};
    auto o = init<kvq_cache_options>();
    o.layers = 3;
    o.layer_list = list;
    o.layer_formats = formats;
    o.keys = "std4";
    o.page_tokens = 32;
    kvq_cache* c = nullptr;
    kvq_sequence* s = nullptr;
    OK(kvq_cache_create(&o, &c));
    OK(kvq_sequence_create(c, &s));
    auto info = init<kvq_cache_info>();
    OK(kvq_cache_get_info(c, &info));
    CHECK(info.layers == 3);
    CHECK(info.kv_heads == 0);
    CHECK(info.head_dim == 0);
    CHECK(info.value_dim == 0);
    kvq_layer found{};
    OK(kvq_cache_get_layer(c, 1, &found));
    CHECK(found.kind == KVQ_FULL_ATTENTION);
    CHECK(found.kv_heads == 1);
    CHECK(found.head_dim == 128);
    CHECK(found.value_dim == 96);
    OK(kvq_cache_get_layer(c, 2, &found));
    CHECK(found.kind == KVQ_SHARED);
    CHECK(found.owner == 0);
    CHECK(found.kv_heads == 4);

    kvq::cache_options same = kvq::preset_options();
    for (const char* name : {"std4", "int8"}) {
        same.keys.push_back(kvq::find_format(name, kvq::tensor::key));
        same.values.push_back(kvq::find_format(name, kvq::tensor::value));
    }
    same.page_tokens = 32;
    kvq::layer sliding = kvq::sliding_attention(20, {4, 64});
    sliding.sinks = 2;
    kvq::cache cpp(
        {sliding, kvq::full_attention({.kv_heads = 1, .head_dim = 128, .value_dim = 96, .formats = {1, 1}}),
         kvq::shared_with(0)},
        same);
    kvq::sequence sequence = cpp.new_sequence();
    test::generator random(11);
    for (int layer = 0; layer < 2; ++layer) {
        const kvq::cache_shape& of = cpp.shape(layer);
        rows<float> k(random, 100, of.kv_heads, of.head_dim),
            v(random, 100, of.kv_heads, of.dim(kvq::tensor::value));
        const kvq_tensor ck = k.c(), cv = v.c();
        OK(kvq_sequence_append(s, layer, &ck, &cv));
        sequence.append(layer, k.view(), v.view());
    }
    twins::check_equal(s, sequence);
    {
        rows<float> q(random, 1, 4, 64), out(random, 1, 4, 64);
        const kvq_tensor none{nullptr, KVQ_FP32, 0, 4, 64, 256, 64}, cq = q.c(), co = out.c();
        CHECK(kvq_sequence_prefill(s, 2, &none, &none, &cq, &co, nullptr) == KVQ_ERROR_ARGUMENT);
        CHECK(std::string(kvq_last_error()).find("layer 2, shared with layer 0") != std::string::npos);
        OK(kvq_sequence_attend(s, 2, &cq, &co, nullptr));
        OK(kvq_sequence_prefill(s, 0, &none, &none, &cq, &co, nullptr));
        OK(kvq_sequence_prefill(s, 2, &none, &none, &cq, &co, nullptr));
    }
    OK(kvq_cache_get_layer(c, 0, &found));
    CHECK(found.kind == KVQ_SLIDING_ATTENTION);
    CHECK(found.window == 20);
    CHECK(found.sinks == 2);
    std::int32_t limit = 0;
    OK(kvq_sequence_trim_limit(s, &limit));
    CHECK(limit == sequence.trim_limit());
    CHECK(limit > 20);
    CHECK(kvq_sequence_trim(s, limit - 1) == KVQ_ERROR_ARGUMENT);
    CHECK(std::string(kvq_last_error()).find("layer 0, sliding window of 20, 4 x 64") != std::string::npos);
    OK(kvq_sequence_trim(s, limit));
    sequence.trim(limit);
    twins::check_equal(s, sequence);
    auto query = init<kvq_budget_query>();
    query.tokens = 1000;
    std::size_t bytes = 0;
    OK(kvq_get_budget(&o, &query, &bytes));
    CHECK(bytes == kvq::budget(same, cpp.layers(), {.tokens = 1000}));
    OK(kvq_sequence_free(s));
    OK(kvq_cache_free(c));
}

TEST_CASE("a latent layer in C: no values are given, and the keys are read as such") {
    const kvq_layer list[] = {{KVQ_LATENT, 1, 40, 32, 8, 0, 0}};
    auto o = init<kvq_cache_options>();
    o.layers = 1;
    o.layer_list = list;
    o.keys = "int8-ref8x8";
    kvq_cache* c = nullptr;
    kvq_sequence* s = nullptr;
    OK(kvq_cache_create(&o, &c));
    OK(kvq_sequence_create(c, &s));
    kvq_layer found{};
    OK(kvq_cache_get_layer(c, 0, &found));
    CHECK(found.kind == KVQ_LATENT);
    CHECK(found.window == 8);
    kvq::cache cpp({kvq::latent_attention(32, 8)},
                   {.keys = kvq::find_format("int8-ref8x8", kvq::tensor::key), .sinks = 4, .recent = 32});
    auto sequence = cpp.new_sequence();
    test::generator random(6);
    rows<float> k(random, 300, 1, 40), none(0, 1, 32), q(random, 1, 8, 40), out(1, 8, 32), want(1, 8, 32);
    const kvq_tensor ck = k.c(), cv = none.c(), cq = q.c(), co = out.c();
    OK(kvq_sequence_append(s, 0, &ck, &cv));
    sequence.append(0, k.view(), kvq::no_rows());
    OK(kvq_sequence_attend(s, 0, &cq, &co, nullptr));
    sequence.attend(0, q.view(), want.view());
    CHECK(out.x == want.x);
    CHECK(kvq_sequence_append(s, 0, &ck, &ck) == KVQ_ERROR_ARGUMENT);
    CHECK(std::string(kvq_last_error()).find("it takes keys alone") != std::string::npos);
    OK(kvq_sequence_free(s));
    OK(kvq_cache_free(c));
}

TEST_CASE("tokens are dropped in C as in C++, by the mass of attention") {
    auto o = init<kvq_cache_options>();
    o.layers = 1;
    o.kv_heads = 2;
    o.head_dim = 16;
    o.keys = "int8";
    kvq_cache* c = nullptr;
    kvq_sequence* s = nullptr;
    OK(kvq_cache_create(&o, &c));
    OK(kvq_sequence_create(c, &s));
    kvq::cache cpp({1, 2, 16},
                   {.keys = kvq::find_format("int8", kvq::tensor::key), .sinks = 4, .recent = 32});
    auto sequence = cpp.new_sequence();
    test::generator random(6);
    rows<float> k(random, 300, 2, 16), q(random, 3, 4, 16), out(1, 4, 16), want(1, 4, 16),
        one(random, 1, 4, 16);
    const kvq_tensor ck = k.c(), cq = q.c(), co = out.c(), c1 = one.c();
    OK(kvq_sequence_hold(s));
    sequence.hold();
    OK(kvq_sequence_append(s, 0, &ck, &ck));
    sequence.append(0, k.view(), k.view());
    std::vector<float> mass(600), others(600);
    OK(kvq_sequence_attention_mass(s, 0, &cq, mass.data(), nullptr));
    sequence.attention_mass(0, q.view(), others.data());
    CHECK(mass == others);
    const std::vector<int> kept = kvq::best_tokens(sequence, 0, mass, 150, 8);
    std::int32_t first = -1, last = -1;
    OK(kvq_sequence_gap(s, 0, &first, &last));
    CHECK((first == 4 && last == 4));
    OK(kvq_sequence_retain(s, 0, kept.data(), 150));
    sequence.retain(0, kept, 150);
    OK(kvq_sequence_gap(s, 0, &first, &last));
    CHECK((first == 4 && last == 154));
    OK(kvq_sequence_attend(s, 0, &c1, &co, nullptr));
    sequence.attend(0, one.view(), want.view());
    CHECK(out.x == want.x);
    CHECK(kvq_sequence_retain(s, 0, kept.data(), 200) == KVQ_ERROR_ARGUMENT);
    CHECK(kvq_sequence_retain(s, 1, kept.data(), 20) == KVQ_ERROR_ARGUMENT);
    CHECK(kvq_sequence_trim(s, 200) == KVQ_ERROR_ARGUMENT);
    OK(kvq_sequence_release(s));
    auto u = init<kvq_usage>();
    OK(kvq_sequence_get_usage(s, &u));
    CHECK(u.bytes == sequence.usage().bytes);
    OK(kvq_sequence_free(s));
    OK(kvq_cache_free(c));
}

TEST_CASE("an index in C selects tokens, and a layer attends to lists of them") {
    const kvq_layer list[] = {{KVQ_FULL_ATTENTION, 2, 16, 0, 0, 0, 0}, {KVQ_INDEX, 1, 8, 0, 0, 0, 0}};
    auto o = init<kvq_cache_options>();
    o.layers = 2;
    o.layer_list = list;
    o.keys = "int8";
    kvq_cache* c = nullptr;
    kvq_sequence* s = nullptr;
    OK(kvq_cache_create(&o, &c));
    OK(kvq_sequence_create(c, &s));
    kvq_layer found{};
    OK(kvq_cache_get_layer(c, 1, &found));
    CHECK(found.kind == KVQ_INDEX);
    kvq::cache cpp({kvq::full_attention({2, 16}), kvq::index_layer(8)},
                   {.keys = kvq::find_format("int8", kvq::tensor::key), .sinks = 4, .recent = 32});
    auto sequence = cpp.new_sequence();
    test::generator random(6);
    rows<float> k(random, 300, 2, 16), index(random, 300, 1, 8), none(0, 1, 8), q(random, 3, 4, 16),
        index_q(random, 3, 5, 8), out(3, 4, 16), want(3, 4, 16);
    const kvq_tensor ck = k.c(), ci = index.c(), cn = none.c(), cq = q.c(), ciq = index_q.c(), co = out.c();
    OK(kvq_sequence_append(s, 0, &ck, &ck));
    OK(kvq_sequence_append(s, 1, &ci, &cn));
    sequence.append(0, k.view(), k.view());
    sequence.append(1, index.view(), kvq::no_rows());
    const std::vector<float> weights = random.normals(15);
    std::vector<std::int32_t> best(60, -2), others = best;
    OK(kvq_sequence_select(s, 1, &ciq, weights.data(), 20, best.data(), nullptr));
    sequence.select(1, index_q.view(), weights.data(), 20, others.data());
    CHECK(best == others);
    std::vector<std::int32_t> in_batch(60, -2);
    const kvq_select_request both[] = {{s, ciq, weights.data(), in_batch.data()},
                                       {s, ciq, weights.data(), others.data()}};
    OK(kvq_cache_select(c, 1, both, 2, 20, nullptr));
    CHECK(in_batch == best);
    CHECK(others == best);
    const std::int32_t last[] = {297, 298, 299};
    auto mods = init<kvq_mods>();
    mods.listed_tokens = best.data();
    mods.listed_count = 20;
    mods.listed_window = last;
    mods.listed_window_count = 1;
    mods.list_queries = 3;
    auto options = init<kvq_attend_options>();
    options.mods = &mods;
    OK(kvq_sequence_attend(s, 0, &cq, &co, &options));
    sequence.attend(0, q.view(), want.view(),
                    kvq::listed_tokens{.selected = {best.data(), 20}, .window = {last, 1}, .queries = 3});
    CHECK(out.x == want.x);
    CHECK(kvq_sequence_select(s, 1, &ciq, weights.data(), 20, best.data(), &options) == KVQ_ERROR_ARGUMENT);
    CHECK(kvq_cache_select(c, 1, both, 2, 20, &options) == KVQ_ERROR_ARGUMENT);
    // Empty lists are lists; without list_queries there are none, and must not be any.
    mods.listed_count = mods.listed_window_count = 0;
    OK(kvq_sequence_attend(s, 0, &cq, &co, &options));
    CHECK(out.x == std::vector<float>(out.x.size()));
    mods.list_queries = 0;
    CHECK(kvq_sequence_attend(s, 0, &cq, &co, &options) == KVQ_ERROR_ARGUMENT);
    CHECK(std::string(kvq_last_error()).find("there are lists of 0 and 0 tokens, and list_queries is 0") !=
          std::string::npos);
    mods.list_queries = 3;
    mods.listed_count = 20;
    mods.listed_window_count = 1;
    best[20] = 300;
    CHECK(kvq_sequence_attend(s, 0, &cq, &co, &options) == KVQ_ERROR_ARGUMENT);
    CHECK(std::string(kvq_last_error()).find("query 1 lists token 300, layer 0 holds 300") !=
          std::string::npos);
    OK(kvq_sequence_free(s));
    OK(kvq_cache_free(c));
}

TEST_CASE("layers with state in C: read and written in place, trimmed to snapshots, saved and sent") {
    const kvq_layer list[] = {{KVQ_FULL_ATTENTION, 2, 16, 0, 0, 0, 0},
                              {KVQ_STATE, 0, 0, 0, 0, 0, 0},
                              {KVQ_STATE, 0, 0, 0, 0, 0, 0}};
    const kvq_state_part parts[] = {{"recurrent", 1, KVQ_FP32, 2, 3, 4, KVQ_SNAPSHOT_EXACT},
                                    {"convolution", 1, KVQ_BF16, 1, 5, 3, KVQ_SNAPSHOT_EXACT},
                                    {"recurrent", 2, KVQ_FP32, 2, 8, 8, KVQ_SNAPSHOT_INT8_COLUMNS}};
    auto o = init<kvq_cache_options>();
    o.layers = 3;
    o.layer_list = list;
    o.keys = "fp16";
    o.state_parts = parts;
    o.state_part_count = 3;
    o.snapshot_every = 8;
    kvq_cache* c = nullptr;
    kvq_sequence* s = nullptr;
    OK(kvq_cache_create(&o, &c));
    OK(kvq_sequence_create(c, &s));
    kvq_layer found{};
    OK(kvq_cache_get_layer(c, 2, &found));
    CHECK(found.kind == KVQ_STATE);
    test::generator random(5);
    const auto fill = [&](float x) {
        for (const kvq_state_part& p : parts) {
            void* data = nullptr;
            std::size_t bytes = 0;
            const std::int32_t number = &p == &parts[1] ? 1 : 0;
            OK(kvq_sequence_state(s, p.layer, number, &data, &bytes));
            CHECK(bytes ==
                  static_cast<std::size_t>(p.heads * p.rows * p.columns) * (p.dtype == KVQ_FP32 ? 4 : 2));
            if (p.dtype == KVQ_FP32) std::fill_n(static_cast<float*>(data), bytes / 4, x);
        }
    };
    const auto value_of = [&](kvq_sequence* of, std::int32_t layer) {
        void* data = nullptr;
        std::size_t bytes = 0;
        OK(kvq_sequence_state(of, layer, 0, &data, &bytes));
        return *static_cast<float*>(data);
    };
    std::int32_t taken = 0, n = 0;
    for (int step = 1; step <= 5; ++step) {
        rows<float> k(random, 4, 2, 16);
        const kvq_tensor ck = k.c();
        OK(kvq_sequence_append(s, 0, &ck, &ck));
        fill(static_cast<float>(step));
        OK(kvq_sequence_advance(s, 4, step == 1, nullptr, &taken));
        CHECK(taken == (step == 1 || step % 2 == 0 ? 1 : 0));
    }
    kvq_snapshot marks[3];
    OK(kvq_sequence_get_snapshots(s, marks, 3, &n));
    CHECK(n == 3);
    CHECK(marks[2].tokens == 16);
    CHECK(marks[2].bytes > 0);
    CHECK(marks[2].error < 0.01);
    auto usage = init<kvq_usage>();
    OK(kvq_sequence_get_usage(s, &usage));
    CHECK(usage.state > 0);
    CHECK(usage.tokens == 20);
    auto footprint = init<kvq_footprint>();
    OK(kvq_cache_get_footprint(c, 20, nullptr, &footprint));
    CHECK(footprint.state > 0);

    // Messages.
    kvq_receiver* receiver = nullptr;
    OK(kvq_receiver_create(c, &receiver));
    kvq_sequence* other = nullptr;
    for (std::int32_t layer = 0; layer < 3; ++layer)
        OK(kvq_sequence_send_pages(
            s, layer,
            [](void* user, const void* data, std::size_t bytes) {
                return kvq_receiver_accept(static_cast<kvq_receiver*>(user), data, bytes);
            },
            receiver));
    OK(kvq_receiver_finish(receiver, 20, &other));
    for (kvq_sequence* one : {s, other}) {
        OK(kvq_sequence_reach(one, 18, &n));
        CHECK(n == 16);
        OK(kvq_sequence_trim(one, 18));
        OK(kvq_sequence_tokens(one, 0, &n));
        CHECK(n == 16);
        CHECK(value_of(one, 1) == 4.0f);
        CHECK(value_of(one, 2) == doctest::Approx(4.0f).epsilon(0.01));
    }
    OK(kvq_sequence_snapshot(s, 16, nullptr));
    OK(kvq_sequence_drop_snapshots(s));
    OK(kvq_sequence_get_snapshots(s, marks, 3, &n));
    CHECK(n == 0);
    OK(kvq_sequence_reach(s, 15, &n));
    CHECK(n == 0);
    CHECK(value_of(s, 1) == 4.0f);
    OK(kvq_receiver_free(receiver));
    OK(kvq_sequence_free(other));
    OK(kvq_sequence_free(s));
    OK(kvq_cache_free(c));
}

}  // namespace behaviour_tests
