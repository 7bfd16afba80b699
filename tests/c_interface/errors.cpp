// SPDX-License-Identifier: MIT
// Bad input to every function of kvq.h: a status and a sentence, and nothing changes.
#include <doctest/doctest.h>
#include <kvq/kvq.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <kvq/format/find_format.hpp>
#include <kvq/kvq.hpp>
#include <limits>
#include <new>
#include <regex>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

namespace errors_tests { namespace {

/// The number of the next allocation on the heap that fails, counted from 0; negative: none.
std::atomic<int> fail_at{-1};

}  // namespace
}  // namespace errors_tests

// Handles come from the heap, whatever the allocator of a cache.
void* operator new(std::size_t bytes) {
    if (errors_tests::fail_at >= 0 && errors_tests::fail_at-- == 0) throw std::bad_alloc();
    if (void* const memory = std::malloc(bytes > 0 ? bytes : 1)) return memory;
    throw std::bad_alloc();
}
// Sanitizers have one of their own, whose memory is not for the delete below.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
    return std::malloc(bytes > 0 ? bytes : 1);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace errors_tests {

namespace {

constexpr int layers = 2, kv_heads = 2, q_heads = 4, dim = 32;

std::string message() { return kvq_last_error(); }

template <class T>
T init() {
    T s;
    KVQ_INIT(s);
    return s;
}

kvq_cache_options usual_options() {
    auto o = init<kvq_cache_options>();
    o.layers = layers;
    o.kv_heads = kv_heads;
    o.head_dim = dim;
    o.keys = "int8,fp16";
    o.page_tokens = 32;
    o.recent = 16;
    return o;
}

struct rows {
    std::vector<float> x;
    kvq_tensor t;
    rows(int tokens, int heads, int channels = dim)
        : x(static_cast<std::size_t>(tokens * heads * channels)), t{x.data(), KVQ_FP32, tokens, heads,
                                                                    channels, 0,        0} {
        for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i * i % 977));
    }
};

std::int32_t take_all(void*, const void*, std::size_t) { return 0; }
std::int32_t take_nothing(void*, const void*, std::size_t) { return 7; }
std::size_t read_nothing(void*, void*, std::size_t) { return 0; }

/// A cache with a sequence of 100 tokens, and everything else that a call may need.
struct fixture {
    kvq_cache *cache = nullptr, *other_cache = nullptr;
    kvq_sequence *s = nullptr, *foreign = nullptr, *made = nullptr;
    void* state_data = nullptr;
    kvq_snapshot snapshot{};
    kvq_format *format = nullptr, *made_format = nullptr;
    kvq_statistics *statistics = nullptr, *made_statistics = nullptr;
    kvq_workspace *workspace = nullptr, *made_workspace = nullptr;
    kvq_executor *executor = nullptr, *made_executor = nullptr;
    kvq_receiver *receiver = nullptr, *made_receiver = nullptr;
    kvq_prefix_cache *store = nullptr, *made_store = nullptr;
    kvq_ring *ring = nullptr, *made_ring = nullptr;
    kvq_sequence_table *table = nullptr, *made_table = nullptr;
    kvq_cache* made_cache = nullptr;
    rows k{100, kv_heads}, v{100, kv_heads}, q{4, q_heads}, out{4, q_heads}, page_values{32, kv_heads};
    kvq_cache_options options = usual_options();
    alignas(64) std::byte page[1 << 16], scratch[1 << 16];
    std::int32_t ids[100] = {}, n = 0, m = 0;
    std::int64_t n64 = 0, m64 = 0;
    std::size_t bytes = 0, page_bytes = 0, scratch_bytes = 0;
    double frequencies[64] = {};
    float weights[16] = {};
    kvq_page_shape shape{KVQ_KEY, 32, kv_heads, dim, 0, 0};
    kvq_page pages[32] = {};
    std::vector<std::byte> message;

    fixture() {
        REQUIRE(kvq_cache_create(&options, &cache) == KVQ_OK);
        REQUIRE(kvq_cache_create(&options, &other_cache) == KVQ_OK);
        REQUIRE(kvq_sequence_create(cache, &s) == KVQ_OK);
        REQUIRE(kvq_sequence_create(other_cache, &foreign) == KVQ_OK);
        for (int layer = 0; layer < layers; ++layer) {
            REQUIRE(kvq_sequence_append(s, layer, &k.t, &v.t) == KVQ_OK);
            REQUIRE(kvq_sequence_append(foreign, layer, &k.t, &v.t) == KVQ_OK);
        }
        REQUIRE(kvq_format_find("int8", KVQ_KEY, nullptr, &format) == KVQ_OK);
        REQUIRE(kvq_format_page_bytes(format, &shape, &page_bytes, &scratch_bytes) == KVQ_OK);
        REQUIRE(page_bytes <= sizeof page);
        REQUIRE(scratch_bytes <= sizeof scratch);
        REQUIRE(kvq_statistics_create(layers, kv_heads, dim, 0, &statistics) == KVQ_OK);
        REQUIRE(kvq_workspace_create(nullptr, 0, &workspace) == KVQ_OK);
        REQUIRE(kvq_executor_create_threads(1, &executor) == KVQ_OK);
        REQUIRE(kvq_receiver_create(cache, &receiver) == KVQ_OK);
        REQUIRE(kvq_prefix_cache_create(cache, nullptr, &store) == KVQ_OK);
        auto r = init<kvq_ring_options>();
        r.window = 64;
        REQUIRE(kvq_ring_create(s, &r, &ring) == KVQ_OK);
        REQUIRE(kvq_sequence_table_create(cache, 4, &table) == KVQ_OK);
        REQUIRE(kvq_sequence_get_pages(s, 0, pages, 32, &n) == KVQ_OK);
        const auto keep = [](void* to, const void* data, std::size_t size) -> std::int32_t {
            const auto* const first = static_cast<const std::byte*>(data);
            auto& all = *static_cast<std::vector<std::byte>*>(to);
            if (all.empty()) all.assign(first, first + size);
            return 0;
        };
        REQUIRE(kvq_sequence_send_pages(s, 0, keep, &message) == KVQ_OK);
    }
    ~fixture() {
        for (kvq_sequence* x : {s, foreign, made}) kvq_sequence_free(x);
        for (kvq_format* x : {format, made_format}) kvq_format_free(x);
        for (kvq_statistics* x : {statistics, made_statistics}) kvq_statistics_free(x);
        for (kvq_workspace* x : {workspace, made_workspace}) kvq_workspace_free(x);
        for (kvq_executor* x : {executor, made_executor}) kvq_executor_free(x);
        for (kvq_receiver* x : {receiver, made_receiver}) kvq_receiver_free(x);
        for (kvq_prefix_cache* x : {store, made_store}) kvq_prefix_cache_free(x);
        for (kvq_ring* x : {ring, made_ring}) kvq_ring_free(x);
        for (kvq_sequence_table* x : {table, made_table}) kvq_sequence_table_free(x);
        for (kvq_cache* x : {cache, other_cache, made_cache}) kvq_cache_free(x);
    }

    /// What a call that is refused must leave as it is.
    std::vector<float> state() const {
        std::vector<float> all;
        for (kvq_sequence* x : {s, foreign})
            for (int layer = 0; layer < layers; ++layer) {
                std::int32_t tokens = 0;
                REQUIRE(kvq_sequence_tokens(x, layer, &tokens) == KVQ_OK);
                rows held(tokens, kv_heads);
                REQUIRE(kvq_sequence_dequantize(x, layer, KVQ_KEY, 0, &held.t) == KVQ_OK);
                all.insert(all.end(), held.x.begin(), held.x.end());
            }
        auto u = init<kvq_usage>();
        REQUIRE(kvq_sequence_get_usage(s, &u) == KVQ_OK);
        auto info = init<kvq_cache_info>();
        REQUIRE(kvq_cache_get_info(cache, &info) == KVQ_OK);
        all.push_back(static_cast<float>(u.bytes));
        all.push_back(static_cast<float>(info.bytes_in_use));
        return all;
    }
};

std::set<std::string> called;

/// Freed handles of every kind.
struct freed_handles {
    std::tuple<kvq_cache*, kvq_sequence*, kvq_format*, kvq_statistics*, kvq_workspace*, kvq_executor*,
               kvq_receiver*, kvq_prefix_cache*, kvq_ring*, kvq_sequence_table*>
        all;
    freed_handles() {
        fixture f;
        all = {f.cache,    f.s,        f.format, f.statistics, f.workspace,
               f.executor, f.receiver, f.store,  f.ring,       f.table};
    }
    template <class P>
    P of() const {
        return std::get<std::remove_const_t<std::remove_pointer_t<P>>*>(all);
    }
};

template <class T>
concept opaque = (std::is_same_v<T, kvq_cache> || std::is_same_v<T, kvq_sequence> ||
                  std::is_same_v<T, kvq_format> || std::is_same_v<T, kvq_statistics> ||
                  std::is_same_v<T, kvq_workspace> || std::is_same_v<T, kvq_executor> ||
                  std::is_same_v<T, kvq_receiver> || std::is_same_v<T, kvq_prefix_cache> ||
                  std::is_same_v<T, kvq_ring> || std::is_same_v<T, kvq_sequence_table>);

/// Calls f with one bad pointer in turn: NULL, and for handles one that was freed and one of another kind.
/// optional: parameters that may be NULL.
template <class... P, class... A>
void refuses_bad_pointers(const char* name, kvq_status (*f)(P...), std::initializer_list<int> optional,
                          A... given) {
    static_assert(sizeof...(P) == sizeof...(A));
    static const freed_handles freed;
    static fixture other_kinds;
    called.insert(name);
    const auto call_with = [&]<std::size_t I, class Bad>(std::integral_constant<std::size_t, I>, Bad bad,
                                                         const char* what) {
        std::tuple<P...> args(given...);
        std::get<I>(args) = bad;
        const kvq_status status = std::apply(f, args);
        if (status == KVQ_ERROR_UNSUPPORTED) return;  // saving, without nlohmann-json
        INFO(name, ", parameter ", I, ": ", what, ", message: ", message());
        CHECK(status == KVQ_ERROR_HANDLE);
        CHECK(message().find(what) != std::string::npos);
    };
    const auto one = [&]<std::size_t I>(std::integral_constant<std::size_t, I> at) {
        using type = std::tuple_element_t<I, std::tuple<P...>>;
        if constexpr (std::is_pointer_v<type>) {
            bool may_be_null = false;
            for (const int o : optional) may_be_null = may_be_null || o == static_cast<int>(I);
            if (!may_be_null) call_with(at, static_cast<type>(nullptr), "NULL");
            using pointed = std::remove_const_t<std::remove_pointer_t<type>>;
            if constexpr (opaque<pointed>) {
                call_with(at, freed.template of<type>(), "was freed");
                void* const other = std::is_same_v<pointed, kvq_cache>
                                        ? static_cast<void*>(other_kinds.s)
                                        : static_cast<void*>(other_kinds.cache);
                call_with(at, static_cast<type>(other), "is no handle of a");
            }
        }
    };
    [&]<std::size_t... I>(std::index_sequence<I...>) { (one(std::integral_constant<std::size_t, I>{}), ...); }
    (std::index_sequence_for<P...>{});
}
#define REFUSES(function, optional, ...) refuses_bad_pointers(#function, &function, optional, __VA_ARGS__)
#define MAY_BE_NULL(...) (std::initializer_list<int>{__VA_ARGS__})

/// The status of a call, and that its message has a text.
void check_refused(kvq_status got, kvq_status wanted, const char* text, int line) {
    INFO("line ", line, ": ", std::string(kvq_status_name(got)), ": ", message());
    CHECK(got == wanted);
    CHECK(message().find(text) != std::string::npos);
}
#define CHECK_REFUSED(call, status, text) check_refused((call), (status), (text), __LINE__)

}  // namespace

TEST_CASE(
    "every function refuses null pointers, freed handles and handles of another kind, and changes nothing") {
    fixture f;
    const auto before = f.state();
    kvq_sequence* const list[] = {f.s};
    auto request = init<kvq_requantize_request>();
    request.keys = "fp16";
    const kvq_tier tier{0, 0, "int8", "int8"};
    auto policy = init<kvq_step_down_policy>();
    policy.tiers = &tier;
    policy.tier_count = 1;
    auto step_report = init<kvq_step_down_report>();
    auto report = init<kvq_requantize_report>();
    auto entry = init<kvq_format_entry>();
    auto description = init<kvq_format_description>();
    auto callbacks = init<kvq_executor_callbacks>();
    callbacks.concurrency = 1;
    callbacks.parallel_for = [](void*, std::int32_t, kvq_task, void*) { return 0; };
    auto info = init<kvq_cache_info>();
    kvq_layer layer_found{};
    auto usage = init<kvq_usage>();
    auto query = init<kvq_footprint_query>();
    auto budget = init<kvq_budget_query>();
    auto footprint = init<kvq_footprint>();
    auto ring_options = init<kvq_ring_options>();
    ring_options.window = 64;
    auto counts = init<kvq_prefix_cache_statistics>();
    const kvq_attend_request attend_request{f.s, f.q.t, f.out.t, nullptr, nullptr};
    const kvq_select_request select_request{f.s, f.q.t, f.weights, f.ids};
    const kvq_prefill_request prefill_request{f.s, f.k.t, f.v.t, f.q.t, f.out.t, nullptr, nullptr};
    void* const none = nullptr;
    const kvq_attend_options* const usual = nullptr;
    const kvq_step_request step_request{f.s, 1, 1, nullptr};
    auto with_workspace = init<kvq_attend_options>();
    with_workspace.workspace = f.workspace;

    REFUSES(kvq_workspace_create, MAY_BE_NULL(0), nullptr, std::size_t{0}, &f.made_workspace);
    REFUSES(kvq_workspace_free, MAY_BE_NULL(0), f.workspace);
    REFUSES(kvq_workspace_reserve, MAY_BE_NULL(), f.workspace, std::size_t{64});
    REFUSES(kvq_workspace_bytes, MAY_BE_NULL(), f.workspace, &f.bytes);
    REFUSES(kvq_executor_create, MAY_BE_NULL(), &callbacks, &f.made_executor);
    REFUSES(kvq_executor_create_threads, MAY_BE_NULL(), 1, &f.made_executor);
    REFUSES(kvq_executor_free, MAY_BE_NULL(0), f.executor);
    REFUSES(kvq_format_count, MAY_BE_NULL(), &f.n);
    REFUSES(kvq_format_list, MAY_BE_NULL(), 0, &entry);
    REFUSES(kvq_format_find, MAY_BE_NULL(2), "int8", KVQ_KEY, nullptr, &f.made_format);
    REFUSES(kvq_format_find_rows, MAY_BE_NULL(), "fp8", 0.5f, &f.made_format);
    const float head_scales[2] = {0.5f, 2.0f};
    REFUSES(kvq_format_find_head_rows, MAY_BE_NULL(), "fp8", head_scales, 2, 2, &f.made_format);
    REFUSES(kvq_format_row_bytes, MAY_BE_NULL(2, 3, 4), f.format, 128, &f.n, &f.n, &f.n);
    REFUSES(kvq_format_free, MAY_BE_NULL(0), f.format);
    REFUSES(kvq_format_describe, MAY_BE_NULL(), f.format, KVQ_KEY, 32, dim, &description);
    REFUSES(kvq_format_page_bytes, MAY_BE_NULL(3), f.format, &f.shape, &f.bytes, &f.bytes);
    REFUSES(kvq_format_quantize, MAY_BE_NULL(7), f.format, &f.shape, &f.page_values.t,
            static_cast<void*>(f.page), f.page_bytes, static_cast<void*>(f.scratch), f.scratch_bytes,
            &f.bytes);
    REFUSES(kvq_format_dequantize, MAY_BE_NULL(), f.format, &f.shape, static_cast<const void*>(f.page),
            f.page_bytes, &f.page_values.t, static_cast<void*>(f.scratch), f.scratch_bytes);
    REFUSES(kvq_rotary_llama3, MAY_BE_NULL(), 64, 5e5, 8.0, 1.0, 4.0, 8192.0, f.frequencies);
    REFUSES(kvq_rotary_yarn, MAY_BE_NULL(), 64, 1e4, 4.0, 4096.0, 32.0, 1.0, f.frequencies);
    REFUSES(kvq_cache_create, MAY_BE_NULL(), &f.options, &f.made_cache);
    REFUSES(kvq_cache_free, MAY_BE_NULL(0), f.cache);
    REFUSES(kvq_cache_get_info, MAY_BE_NULL(), f.cache, &info);
    REFUSES(kvq_cache_get_layer, MAY_BE_NULL(), f.cache, 0, &layer_found);
    REFUSES(kvq_cache_add_format, MAY_BE_NULL(3), f.cache, KVQ_KEY, f.format, "another");
    REFUSES(kvq_cache_commit_to, MAY_BE_NULL(), f.cache, KVQ_KEY, "int8", 0, 0);
    REFUSES(kvq_cache_find_format, MAY_BE_NULL(), f.cache, KVQ_KEY, "int8", &f.n);
    REFUSES(kvq_cache_get_format, MAY_BE_NULL(), f.cache, KVQ_KEY, 1, &f.made_format);
    REFUSES(kvq_cache_workspace_bytes, MAY_BE_NULL(), f.cache, 100, q_heads, 1, 1, &f.bytes);
    REFUSES(kvq_sequence_create, MAY_BE_NULL(), f.cache, &f.made);
    REFUSES(kvq_sequence_free, MAY_BE_NULL(0), f.s);
    REFUSES(kvq_sequence_fork, MAY_BE_NULL(), f.s, &f.made);
    REFUSES(kvq_sequence_tokens, MAY_BE_NULL(), f.s, 0, &f.n);
    REFUSES(kvq_sequence_get_layer, MAY_BE_NULL(), f.s, 0, &layer_found);
    REFUSES(kvq_sequence_prefill, MAY_BE_NULL(6), f.s, 0, &f.k.t, &f.v.t, &f.q.t, &f.out.t, usual);
    REFUSES(kvq_sequence_append, MAY_BE_NULL(), f.s, 0, &f.k.t, &f.v.t);
    REFUSES(kvq_sequence_attend, MAY_BE_NULL(4), f.s, 0, &f.q.t, &f.out.t, usual);
    kvq_rows other_rows{};
    other_rows.format = f.format;
    kvq_row_blocks other_blocks{};
    REFUSES(kvq_attend_rows, MAY_BE_NULL(5), &other_rows, &other_rows, &other_blocks, &f.q.t, &f.out.t,
            usual);
    REFUSES(kvq_read_rows, MAY_BE_NULL(4), &other_rows, &other_blocks, 0, &f.out.t, usual);
    REFUSES(kvq_write_rows, MAY_BE_NULL(4, 5), &other_rows, &other_blocks, 0, &f.k.t, &f.n64, usual);
    REFUSES(kvq_convert_rows, MAY_BE_NULL(5, 6), &other_rows, &other_blocks, &other_rows, &other_blocks, 64,
            &f.n64, usual);
    REFUSES(kvq_sequence_select, MAY_BE_NULL(6), f.s, 0, &f.q.t, f.weights, 4, f.ids, usual);
    REFUSES(kvq_sequence_append_draft, MAY_BE_NULL(), f.s, 0, &f.q.t, &f.q.t);
    REFUSES(kvq_sequence_keep, MAY_BE_NULL(), f.s, f.ids, 1);
    REFUSES(kvq_sequence_trim_limit, MAY_BE_NULL(), f.s, &f.n);
    REFUSES(kvq_sequence_attention_mass, MAY_BE_NULL(4), f.s, 0, &f.q.t, f.weights, usual);
    REFUSES(kvq_sequence_gap, MAY_BE_NULL(), f.s, 0, &f.n, &f.m);
    REFUSES(kvq_sequence_retain, MAY_BE_NULL(), f.s, 0, f.ids, 2);
    REFUSES(kvq_sequence_hold, MAY_BE_NULL(), f.s);
    REFUSES(kvq_sequence_release, MAY_BE_NULL(), f.s);
    REFUSES(kvq_sequence_trim, MAY_BE_NULL(), f.s, 10);
    REFUSES(kvq_sequence_state, MAY_BE_NULL(), f.s, 0, 0, &f.state_data, &f.bytes);
    REFUSES(kvq_sequence_advance, MAY_BE_NULL(3), f.s, 1, 0, f.executor, &f.n);
    REFUSES(kvq_sequence_snapshot, MAY_BE_NULL(2), f.s, 0, f.executor);
    REFUSES(kvq_sequence_drop_snapshots, MAY_BE_NULL(), f.s);
    REFUSES(kvq_sequence_reach, MAY_BE_NULL(), f.s, 0, &f.n);
    REFUSES(kvq_sequence_get_snapshots, MAY_BE_NULL(), f.s, &f.snapshot, 1, &f.n);
    REFUSES(kvq_sequence_drop_copies, MAY_BE_NULL(), f.s);
    REFUSES(kvq_sequence_erase, MAY_BE_NULL(), f.s, 10, 20);
    REFUSES(kvq_sequence_shift, MAY_BE_NULL(), f.s, 10, 20, std::int64_t{1});
    REFUSES(kvq_sequence_splice, MAY_BE_NULL(), f.s, f.s, 10, 20);
    REFUSES(kvq_sequence_append_bytes, MAY_BE_NULL(), f.s, 10, &f.bytes);
    REFUSES(kvq_sequence_prefill_bytes, MAY_BE_NULL(), f.s, 10, &f.bytes);
    REFUSES(kvq_sequence_draft_bytes, MAY_BE_NULL(), f.s, 10, &f.bytes);
    REFUSES(kvq_sequence_dequantize, MAY_BE_NULL(), f.s, 0, KVQ_KEY, 0, &f.page_values.t);
    REFUSES(kvq_sequence_get_usage, MAY_BE_NULL(), f.s, &usage);
    REFUSES(kvq_sequence_get_pages, MAY_BE_NULL(), f.s, 0, f.pages, 32, &f.n);
    REFUSES(kvq_cache_attend, MAY_BE_NULL(4), f.cache, 0, &attend_request, 1, usual);
    REFUSES(kvq_cache_select, MAY_BE_NULL(5), f.cache, 0, &select_request, 1, 4, usual);
    REFUSES(kvq_cache_prefill, MAY_BE_NULL(4), f.cache, 0, &prefill_request, 1, usual);
    REFUSES(kvq_cache_reserve, MAY_BE_NULL(), f.cache, &step_request, 1, q_heads, &with_workspace);
    REFUSES(kvq_sequence_release_reserved, MAY_BE_NULL(), f.s);
    REFUSES(kvq_cache_attend_pages, MAY_BE_NULL(6), f.cache, 0, f.pages, 1, &f.q.t, &f.out.t, usual);
    REFUSES(kvq_cache_requantize, MAY_BE_NULL(4), f.cache, list, 1, &request, &report);
    REFUSES(kvq_cache_step_down, MAY_BE_NULL(4, 5), f.cache, list, 1, &policy, f.executor, &step_report);
    REFUSES(kvq_cache_plan_step_down, MAY_BE_NULL(4), f.cache, list, 1, &policy, f.executor, &step_report);
    REFUSES(kvq_cache_get_footprint, MAY_BE_NULL(2), f.cache, 100, &query, &footprint);
    REFUSES(kvq_get_budget, MAY_BE_NULL(), &f.options, &budget, &f.bytes);
    REFUSES(kvq_cache_longest_context, MAY_BE_NULL(2), f.cache, std::size_t{1000000}, &query, &f.n);
    REFUSES(kvq_sequence_save, MAY_BE_NULL(1, 3), f.s, nullptr, &take_all, none);
    REFUSES(kvq_sequence_save_file, MAY_BE_NULL(1), f.s, nullptr, "/no/such/folder/file");
    REFUSES(kvq_sequence_restore, MAY_BE_NULL(1, 3), f.cache, nullptr, &read_nothing, none, &f.made);
    REFUSES(kvq_sequence_restore_file, MAY_BE_NULL(1), f.cache, nullptr, "/no/such/folder/file", &f.made);
    REFUSES(kvq_sequence_send_pages, MAY_BE_NULL(3), f.s, 0, &take_all, none);
    REFUSES(kvq_receiver_create, MAY_BE_NULL(), f.cache, &f.made_receiver);
    REFUSES(kvq_receiver_free, MAY_BE_NULL(0), f.receiver);
    REFUSES(kvq_receiver_convert, MAY_BE_NULL(), f.receiver, 4, 32, -1);
    REFUSES(kvq_receiver_accept, MAY_BE_NULL(), f.receiver, static_cast<const void*>(f.message.data()),
            f.message.size());
    REFUSES(kvq_receiver_finish, MAY_BE_NULL(), f.receiver, -1, &f.made);
    REFUSES(kvq_prefix_cache_create, MAY_BE_NULL(1), f.cache, nullptr, &f.made_store);
    REFUSES(kvq_prefix_cache_free, MAY_BE_NULL(0), f.store);
    REFUSES(kvq_prefix_cache_lookup, MAY_BE_NULL(), f.store, f.ids, 100, &f.n, &f.m);
    REFUSES(kvq_prefix_cache_fetch, MAY_BE_NULL(), f.store, f.ids, 100, &f.n, &f.m, &f.made);
    REFUSES(kvq_prefix_cache_store, MAY_BE_NULL(4), f.store, f.ids, 100, f.s, &f.n);
    REFUSES(kvq_prefix_cache_erase, MAY_BE_NULL(3), f.store, f.ids, 100, &f.n);
    REFUSES(kvq_prefix_cache_clear, MAY_BE_NULL(), f.store);
    REFUSES(kvq_prefix_cache_release, MAY_BE_NULL(2), f.store, std::size_t{1}, &f.bytes);
    REFUSES(kvq_prefix_cache_step_down, MAY_BE_NULL(4, 5), f.store, list, 1, &policy, f.executor,
            &step_report);
    REFUSES(kvq_prefix_cache_get_statistics, MAY_BE_NULL(), f.store, &counts);
    REFUSES(kvq_ring_create, MAY_BE_NULL(), f.s, &ring_options, &f.made_ring);
    REFUSES(kvq_ring_free, MAY_BE_NULL(0), f.ring);
    REFUSES(kvq_ring_fork, MAY_BE_NULL(), f.ring, &f.made_ring);
    REFUSES(kvq_ring_prefill, MAY_BE_NULL(6), f.ring, 0, &f.k.t, &f.v.t, &f.q.t, &f.out.t, usual);
    REFUSES(kvq_ring_append, MAY_BE_NULL(), f.ring, 0, &f.k.t, &f.v.t);
    REFUSES(kvq_ring_attend, MAY_BE_NULL(4), f.ring, 0, &f.q.t, &f.out.t, usual);
    REFUSES(kvq_ring_append_draft, MAY_BE_NULL(), f.ring, 0, &f.q.t, &f.q.t);
    REFUSES(kvq_ring_keep, MAY_BE_NULL(), f.ring, f.ids, 1);
    REFUSES(kvq_ring_trim, MAY_BE_NULL(), f.ring, std::int64_t{90});
    REFUSES(kvq_ring_tokens, MAY_BE_NULL(2, 3), f.ring, 0, &f.n64, &f.m64);
    REFUSES(kvq_ring_held, MAY_BE_NULL(), f.ring, &f.made);
    const std::int32_t position = 0, zero = 0;
    const std::int32_t* const of_zero = &zero;
    auto batch = init<kvq_token_batch>();
    batch.tokens = 1;
    batch.positions = &position;
    batch.ids = &of_zero;
    auto table_usage = init<kvq_table_usage>();
    REFUSES(kvq_sequence_table_create, MAY_BE_NULL(), f.cache, 2, &f.made_table);
    REFUSES(kvq_sequence_table_free, MAY_BE_NULL(0), f.table);
    REFUSES(kvq_sequence_table_grow, MAY_BE_NULL(), f.table, 8);
    REFUSES(kvq_sequence_table_begin, MAY_BE_NULL(), f.table, &batch, q_heads, &with_workspace);
    REFUSES(kvq_sequence_table_prefill, MAY_BE_NULL(6), f.table, 0, &f.k.t, &f.v.t, &f.q.t, &f.out.t, usual);
    REFUSES(kvq_sequence_table_end, MAY_BE_NULL(), f.table);
    REFUSES(kvq_sequence_table_take_back, MAY_BE_NULL(), f.table);
    REFUSES(kvq_sequence_table_remove, MAY_BE_NULL(), f.table, 0, 0, 1);
    REFUSES(kvq_sequence_table_copy, MAY_BE_NULL(), f.table, 0, 1, 0, 1);
    REFUSES(kvq_sequence_table_keep, MAY_BE_NULL(), f.table, 0);
    REFUSES(kvq_sequence_table_shift, MAY_BE_NULL(), f.table, 0, 0, 1, 1);
    REFUSES(kvq_sequence_table_clear, MAY_BE_NULL(), f.table);
    REFUSES(kvq_sequence_table_positions, MAY_BE_NULL(), f.table, 0, f.ids, 100, &f.n);
    REFUSES(kvq_sequence_table_fork, MAY_BE_NULL(), f.table, 0, &f.made);
    REFUSES(kvq_sequence_table_get_usage, MAY_BE_NULL(), f.table, &table_usage);
    REFUSES(kvq_sequence_table_write, MAY_BE_NULL(3), f.table, 0, &take_all, none);
    REFUSES(kvq_sequence_table_state_bytes, MAY_BE_NULL(), f.table, 0, &f.bytes);
    REFUSES(kvq_sequence_table_read, MAY_BE_NULL(3), f.table, 0, &read_nothing, none);
    REFUSES(kvq_statistics_create, MAY_BE_NULL(), layers, kv_heads, dim, 0, &f.made_statistics);
    REFUSES(kvq_statistics_free, MAY_BE_NULL(0), f.statistics);
    REFUSES(kvq_statistics_add_keys, MAY_BE_NULL(), f.statistics, 0, &f.k.t);
    REFUSES(kvq_statistics_add_sequence, MAY_BE_NULL(), f.statistics, f.s, 0, 1);
    REFUSES(kvq_statistics_add_queries, MAY_BE_NULL(), f.statistics, 0, &f.q.t);
    REFUSES(kvq_statistics_save, MAY_BE_NULL(2), f.statistics, &take_all, none);
    REFUSES(kvq_statistics_load, MAY_BE_NULL(), static_cast<const void*>(f.page), std::size_t{10},
            &f.made_statistics);
    CHECK(f.state() == before);

    // Functions that have no pointers.
    for (const char* name : {"kvq_last_error", "kvq_status_name", "kvq_version", "kvq_abi_version"})
        called.insert(name);
    std::ifstream header(KVQ_C_HEADER);
    std::stringstream text;
    text << header.rdbuf();
    const std::string all = text.str();
    const std::regex declaration("KVQ_API [a-z0-9_ ]+\\*? ?(kvq_[a-z0-9_]+)\\(");
    std::set<std::string> declared;
    for (auto i = std::sregex_iterator(all.begin(), all.end(), declaration); i != std::sregex_iterator(); ++i)
        declared.insert((*i)[1]);
    CHECK(declared == called);
}

TEST_CASE("a handle that is freed twice, and sequences that outlive their cache") {
    fixture f;
    kvq_sequence* twice = nullptr;
    REQUIRE(kvq_sequence_create(f.cache, &twice) == KVQ_OK);
    CHECK(kvq_sequence_free(twice) == KVQ_OK);
    CHECK_REFUSED(kvq_sequence_free(twice), KVQ_ERROR_HANDLE, "was freed before");
    // The memory of the handle is not used again at once.
    std::vector<kvq_sequence*> many(200);
    for (kvq_sequence*& s : many) REQUIRE(kvq_sequence_create(f.cache, &s) == KVQ_OK);
    CHECK_REFUSED(kvq_sequence_free(twice), KVQ_ERROR_HANDLE, "was freed before");
    for (kvq_sequence* s : many) CHECK(kvq_sequence_free(s) == KVQ_OK);

    CHECK(kvq_cache_free(f.cache) == KVQ_OK);
    CHECK_REFUSED(kvq_sequence_create(f.cache, &twice), KVQ_ERROR_HANDLE, "was freed before");
    CHECK(kvq_sequence_attend(f.s, 0, &f.q.t, &f.out.t, nullptr) == KVQ_OK);
    CHECK(kvq_sequence_append(f.s, 0, &f.k.t, &f.v.t) == KVQ_OK);
    f.cache = nullptr;
    CHECK(kvq_cache_free(nullptr) == KVQ_OK);
    CHECK(kvq_ring_free(nullptr) == KVQ_OK);
}

TEST_CASE("handles of another cache are refused") {
    fixture f;
    const auto before = f.state();
    const char* const text = "another cache";
    kvq_sequence* const list[] = {f.s, f.foreign};
    auto request = init<kvq_requantize_request>();
    request.keys = "fp16";
    auto policy = init<kvq_step_down_policy>();
    auto foretold = init<kvq_step_down_report>();
    const kvq_attend_request attend[] = {{f.s, f.q.t, f.out.t, nullptr, nullptr},
                                         {f.foreign, f.q.t, f.out.t, nullptr, nullptr}};
    const kvq_prefill_request prefill[] = {{f.s, f.k.t, f.v.t, f.q.t, f.out.t, nullptr, nullptr},
                                           {f.foreign, f.k.t, f.v.t, f.q.t, f.out.t, nullptr, nullptr}};
    CHECK_REFUSED(kvq_cache_requantize(f.cache, list, 2, &request, nullptr), KVQ_ERROR_HANDLE, text);
    CHECK_REFUSED(kvq_cache_step_down(f.cache, list, 2, &policy, nullptr, nullptr), KVQ_ERROR_HANDLE, text);
    CHECK_REFUSED(kvq_cache_plan_step_down(f.cache, list, 2, &policy, nullptr, &foretold), KVQ_ERROR_HANDLE,
                  text);
    CHECK_REFUSED(kvq_prefix_cache_step_down(f.store, list, 2, &policy, nullptr, nullptr), KVQ_ERROR_HANDLE,
                  text);
    CHECK_REFUSED(kvq_cache_attend(f.cache, 0, attend, 2, nullptr), KVQ_ERROR_HANDLE, text);
    CHECK_REFUSED(kvq_cache_prefill(f.cache, 0, prefill, 2, nullptr), KVQ_ERROR_HANDLE, text);
    CHECK_REFUSED(kvq_sequence_splice(f.s, f.foreign, 0, 10), KVQ_ERROR_HANDLE, text);
    CHECK_REFUSED(kvq_prefix_cache_store(f.store, f.ids, 100, f.foreign, nullptr), KVQ_ERROR_HANDLE, text);
    CHECK(f.state() == before);
}

TEST_CASE("structs of a wrong size") {
    fixture f;
    auto o = usual_options();
    // Programs that were compiled when the structs were shorter.
    constexpr std::size_t first = offsetof(kvq_cache_options, preallocate);
    o.size = first;
    o.preallocate = 1;  // behind the end of their struct
    CHECK(kvq_cache_create(&o, &f.made_cache) == KVQ_OK);
    kvq_cache_free(f.made_cache);
    f.made_cache = nullptr;
    auto shorter = init<kvq_usage>();
    shorter.size = offsetof(kvq_usage, reserved);
    shorter.reserved = 77;
    CHECK(kvq_sequence_get_usage(f.s, &shorter) == KVQ_OK);
    CHECK(shorter.tokens == 100);
    CHECK(shorter.reserved == 77);
    o = usual_options();
    for (const std::size_t size :
         {std::size_t{0}, std::size_t{8}, first - 1, sizeof(o) + 100000, std::size_t(-1)}) {
        o.size = size;
        CHECK_REFUSED(kvq_cache_create(&o, &f.made_cache), KVQ_ERROR_STRUCT, "KVQ_INIT");
    }
    // A later version of the struct: more members, all of them zero or not.
    struct {
        kvq_cache_options now = usual_options();
        std::size_t later[2] = {0, 0};
    } newer;
    newer.now.size = sizeof newer;
    newer.later[1] = 1;
    CHECK_REFUSED(kvq_cache_create(&newer.now, &f.made_cache), KVQ_ERROR_STRUCT, "is not zero");
    newer.later[1] = 0;
    CHECK(kvq_cache_create(&newer.now, &f.made_cache) == KVQ_OK);
    o = usual_options();
    o.reserved = 1;
    CHECK_REFUSED(kvq_cache_create(&o, &f.made_cache), KVQ_ERROR_STRUCT, "reserved is 1");
    struct {
        kvq_usage now = init<kvq_usage>();
        std::size_t later = 5;
    } newer_usage;
    newer_usage.now.size = sizeof newer_usage;
    CHECK(kvq_sequence_get_usage(f.s, &newer_usage.now) == KVQ_OK);
    CHECK(newer_usage.now.size == sizeof newer_usage);
    CHECK(newer_usage.now.tokens == 100);
    CHECK(newer_usage.later == 0);
    auto usage = init<kvq_usage>();
    usage.size = 3;
    CHECK_REFUSED(kvq_sequence_get_usage(f.s, &usage), KVQ_ERROR_STRUCT, "size of usage is 3");
}

TEST_CASE("tensors that do not fit, or overflow") {
    fixture f;
    const auto before = f.state();
    const auto refused = [&](auto change, kvq_status status, const char* text) {
        kvq_tensor k = f.k.t, v = f.v.t, q = f.q.t, out = f.out.t;
        change(k);
        CHECK_REFUSED(kvq_sequence_append(f.s, 0, &k, &v), status, text);
        CHECK_REFUSED(kvq_sequence_prefill(f.s, 0, &k, &v, &q, &out, nullptr), status, text);
        change(q);
        CHECK_REFUSED(kvq_sequence_attend(f.s, 0, &q, &out, nullptr), status, text);
        change(out);
        CHECK(kvq_sequence_dequantize(f.s, 0, KVQ_KEY, 0, &out) == status);
    };
    constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
    refused([](kvq_tensor& t) { t.tokens = -1; }, KVQ_ERROR_ARGUMENT, "-1 tokens");
    refused([](kvq_tensor& t) { t.heads = most; }, KVQ_ERROR_ARGUMENT, "2147483647 heads");
    refused([](kvq_tensor& t) { t.dim = -5; }, KVQ_ERROR_ARGUMENT, "-5 channels");
    refused([](kvq_tensor& t) { t.dim = 33; }, KVQ_ERROR_ARGUMENT, "33");
    refused([](kvq_tensor& t) { t.heads = 3; }, KVQ_ERROR_ARGUMENT, "3 heads");
    refused([](kvq_tensor& t) { t.dtype = 9; }, KVQ_ERROR_ARGUMENT, "dtype 9");
    refused([](kvq_tensor& t) { t.data = nullptr; }, KVQ_ERROR_ARGUMENT, "no data");
    refused([](kvq_tensor& t) { t.data = static_cast<char*>(t.data) + 1; }, KVQ_ERROR_ARGUMENT,
            "not aligned");
    refused([](kvq_tensor& t) { t.token_stride = std::numeric_limits<std::ptrdiff_t>::max() / 2; },
            KVQ_ERROR_ARGUMENT, "larger than memory");
    kvq_tensor many = f.k.t;
    many.tokens = most;
    CHECK_REFUSED(kvq_sequence_append(f.s, 0, &many, &many), KVQ_ERROR_ARGUMENT,
                  "cannot take 2147483647 more");
    CHECK(f.state() == before);
}

TEST_CASE("numbers out of range, names that nobody knows") {
    fixture f;
    const auto before = f.state();
    const auto refused = [&](auto change, kvq_status status, const char* text) {
        auto o = usual_options();
        change(o);
        CHECK_REFUSED(kvq_cache_create(&o, &f.made_cache), status, text);
        CHECK(f.made_cache == nullptr);
    };
    constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
    refused([](auto& o) { o.layers = 0; }, KVQ_ERROR_ARGUMENT, "at least 1 layer");
    refused([](auto& o) { o.layers = -1; }, KVQ_ERROR_ARGUMENT, "got -1");
    refused([](auto& o) { o.kv_heads = most; }, KVQ_ERROR_ARGUMENT, "kv heads, got 2147483647");
    refused([](auto& o) { o.head_dim = most; }, KVQ_ERROR_ARGUMENT, "head_dim");
    refused([](auto& o) { o.value_dim = -3; }, KVQ_ERROR_ARGUMENT, "value_dim");
    refused([](auto& o) { o.page_tokens = -1; }, KVQ_ERROR_ARGUMENT, "page_tokens");
    refused([](auto& o) { o.sinks = -2; }, KVQ_ERROR_ARGUMENT, "sinks must not be negative, got -2");
    refused([](auto& o) { o.recent = most; }, KVQ_ERROR_ARGUMENT, "recent 2147483647");
    refused([](auto& o) { o.keys = nullptr; }, KVQ_ERROR_HANDLE, "options.keys is NULL");
    refused([](auto& o) { o.keys = ""; }, KVQ_ERROR_ARGUMENT, "empty name");
    refused([](auto& o) { o.keys = "int8,,fp16"; }, KVQ_ERROR_ARGUMENT, "empty name");
    refused([](auto& o) { o.keys = "std44"; }, KVQ_ERROR_ARGUMENT, "std4");
    refused([](auto& o) { o.values = "no such format"; }, KVQ_ERROR_ARGUMENT, "no such format");
    refused([](auto& o) { o.window = "int8"; }, KVQ_ERROR_ARGUMENT, "window format");
    refused([](auto& o) { o.rotary_count = 1; }, KVQ_ERROR_HANDLE, "options.rotary");
    refused([](auto& o) { o.rotary_count = -1; }, KVQ_ERROR_ARGUMENT, "rotary_count");
    kvq_rotary rotary[3] = {};
    refused([&](auto& o) { o.rotary = rotary, o.rotary_count = 3; }, KVQ_ERROR_ARGUMENT,
            "3 rotary embeddings");
    rotary[0].dims = 7;
    refused([&](auto& o) { o.rotary = rotary, o.rotary_count = 1; }, KVQ_ERROR_ARGUMENT,
            "rotates 7 channels");
    rotary[0].layout = 5;
    refused([&](auto& o) { o.rotary = rotary, o.rotary_count = 1; }, KVQ_ERROR_ARGUMENT, "layout");
    kvq_layer list[layers] = {};
    refused([&](auto& o) { o.layer_list = list; }, KVQ_ERROR_ARGUMENT, "must be 0");
    const auto listed = [&](auto& o) {
        o.layer_list = list;
        o.kv_heads = o.head_dim = o.value_dim = 0;
    };
    refused(listed, KVQ_ERROR_ARGUMENT, "layer 0, full attention of 0 x 0");
    list[0].kind = 77;
    refused(listed, KVQ_ERROR_ARGUMENT, "layer 0 has kind 77");
    list[0].kind = KVQ_STATE;
    refused(listed, KVQ_ERROR_ARGUMENT, "layer 0, state of 0 parts: a state has at least 1 part");
    for (int i = 1; i < layers; ++i) list[i] = {KVQ_FULL_ATTENTION, 1, 16, 0, 0, 0, 0};
    kvq_state_part part{"s", 0, KVQ_FP32, 1, 0, 1, 0};
    const auto with_part = [&](auto& o) { listed(o), o.state_parts = &part, o.state_part_count = 1; };
    refused(with_part, KVQ_ERROR_ARGUMENT, "part s of layer 0 has 1 heads of 0 rows");
    part.layer = layers;
    refused(with_part, KVQ_ERROR_ARGUMENT, "state_parts[0] is of layer");
    part = {"s", 0, 9, 1, 1, 1, 0};
    refused(with_part, KVQ_ERROR_ARGUMENT, "a part of a state");
    part = {"s", 0, KVQ_FP32, 1, 1, 1, 4};
    refused(with_part, KVQ_ERROR_ARGUMENT, "state_parts[0] has snapshot 4");
    part = {nullptr, 0, KVQ_FP32, 1, 1, 1, 0};
    refused(with_part, KVQ_ERROR_HANDLE, "the name of a part of a state");
    refused([&](auto& o) { o.state_parts = &part, o.state_part_count = 1; }, KVQ_ERROR_ARGUMENT,
            "no layer_list");
    refused([&](auto& o) { with_part(o), o.state_part_count = -1; }, KVQ_ERROR_ARGUMENT, "state_parts");
    list[0].kind = 77;
    CHECK_REFUSED(kvq_sequence_advance(f.s, 1, 0, nullptr, &f.n), KVQ_ERROR_ARGUMENT,
                  "no layer of the cache has state");
    CHECK_REFUSED(kvq_sequence_reach(f.s, -1, &f.n), KVQ_ERROR_ARGUMENT, "cannot trim to -1");
    list[0] = {KVQ_FULL_ATTENTION, 1, 8, 0, 3, 0, 0};
    refused(listed, KVQ_ERROR_ARGUMENT, "has a window of 3 tokens");
    list[0] = {KVQ_SLIDING_ATTENTION, 1, 8, 0, 0, 0, 0};
    refused(listed, KVQ_ERROR_ARGUMENT, "layer 0, sliding window of 0, 1 x 8");
    list[0] = {KVQ_SHARED, 0, 0, 0, 0, 0, 0};
    refused(listed, KVQ_ERROR_ARGUMENT,
            "layer 0, shared with layer 0, 0 x 0: a layer shares with one before it");
    list[0] = {KVQ_CROSS_ATTENTION, 1, 8, 0, 0, 0, 1};
    refused(listed, KVQ_ERROR_ARGUMENT,
            "layer 0, cross attention of 1 x 8: it shares no keys and values with layer 1");
    list[0].kind = 77;
    refused([&](auto& o) { listed(o), o.layers = -1; }, KVQ_ERROR_ARGUMENT, "at least 1 layer, got -1");
    refused([&](auto& o) { listed(o), o.layers = most; }, KVQ_ERROR_ARGUMENT, "at most 65536 layers");
    kvq_layer found{};
    CHECK_REFUSED(kvq_cache_get_layer(f.cache, layers, &found), KVQ_ERROR_ARGUMENT, "is not among the");
    CHECK_REFUSED(kvq_sequence_get_layer(f.s, layers, &found), KVQ_ERROR_ARGUMENT, "is not among the");
    auto allocator = init<kvq_allocator>();
    refused([&](auto& o) { o.allocator = &allocator; }, KVQ_ERROR_HANDLE, "both functions");

    for (const std::int32_t layer : {-2, layers, most}) {
        CHECK_REFUSED(kvq_sequence_tokens(f.s, layer, &f.n), KVQ_ERROR_ARGUMENT, "layer");
        CHECK_REFUSED(kvq_sequence_append(f.s, layer, &f.k.t, &f.v.t), KVQ_ERROR_ARGUMENT, "layer");
        CHECK_REFUSED(kvq_sequence_attend(f.s, layer, &f.q.t, &f.out.t, nullptr), KVQ_ERROR_ARGUMENT,
                      "layer");
        CHECK_REFUSED(kvq_sequence_get_pages(f.s, layer, nullptr, 0, &f.n), KVQ_ERROR_ARGUMENT, "layer");
        CHECK_REFUSED(kvq_cache_attend_pages(f.cache, layer, f.pages, 1, &f.q.t, &f.out.t, nullptr),
                      KVQ_ERROR_ARGUMENT, "layer");
        CHECK_REFUSED(kvq_sequence_send_pages(f.s, layer, take_all, nullptr), KVQ_ERROR_ARGUMENT, "layer");
        CHECK_REFUSED(kvq_statistics_add_keys(f.statistics, layer, &f.k.t), KVQ_ERROR_ARGUMENT, "layer");
    }
    CHECK_REFUSED(kvq_sequence_trim(f.s, 101), KVQ_ERROR_ARGUMENT, "101");
    kvq_rows no_rows{};
    no_rows.format = f.format;
    const kvq_row_blocks no_blocks{nullptr, 0, 0, 0, 4, kv_heads};
    CHECK_REFUSED(kvq_attend_rows(&no_rows, &no_rows, &no_blocks, &f.q.t, &f.out.t, nullptr),
                  KVQ_ERROR_ARGUMENT, "no format of rows in the bytes of another system");
    CHECK_REFUSED(kvq_format_find_rows("q8_0", 2.0f, &f.made_format), KVQ_ERROR_ARGUMENT, "takes no scale");
    const float head_scales[3] = {0.5f, 2.0f, 1.0f};
    CHECK_REFUSED(kvq_format_find_head_rows("fp8", head_scales, 3, 2, &f.made_format), KVQ_ERROR_ARGUMENT,
                  "fp8 needs a scale for each of 2 heads, but got 3");
    CHECK_REFUSED(kvq_format_find_head_rows("fp8", head_scales, -1, 0, &f.made_format), KVQ_ERROR_ARGUMENT,
                  "fp8 with scales of 0 heads");
    CHECK_REFUSED(kvq_format_find_head_rows("mla-656", head_scales, 1, 1, &f.made_format), KVQ_ERROR_ARGUMENT,
                  "mla-656 has no scales of heads");
    CHECK_REFUSED(kvq_format_row_bytes(f.format, 128, &f.n, nullptr, nullptr), KVQ_ERROR_ARGUMENT,
                  "no format of rows in the bytes of another system");
    kvq_format* records = nullptr;
    std::int32_t row = 0, beside = 0, biases = -1;
    CHECK(kvq_format_find("mla-584", KVQ_KEY, nullptr, &records) == KVQ_OK);
    CHECK(kvq_format_row_bytes(records, 512, &row, &beside, &biases) == KVQ_OK);
    CHECK(row == 576);
    CHECK(beside == 8);
    CHECK(biases == 0);
    CHECK_REFUSED(kvq_format_row_bytes(records, 0, &row, nullptr, nullptr), KVQ_ERROR_ARGUMENT, "0 channels");
    CHECK_REFUSED(kvq_format_row_bytes(records, 60, &row, nullptr, nullptr), KVQ_ERROR_ARGUMENT,
                  "mla-584 has 512 channels, but head_dim is 60");
    CHECK(kvq_format_free(records) == KVQ_OK);
    CHECK(kvq_format_find("mlx-4-g64", KVQ_KEY, nullptr, &records) == KVQ_OK);
    std::vector<std::uint8_t> numbers(64 * 4), of_groups(64 * 4), rows_of_q8(4 * 68);
    const std::vector<float> of_q(64, 1.0f);
    std::vector<float> mlx_out(64);
    kvq_rows mlx{};
    mlx.format = records;
    mlx.data = numbers.data();
    mlx.token_stride = 32;
    mlx.scales = of_groups.data();
    mlx.scale_token_stride = 2;
    const kvq_row_blocks one_block{nullptr, 0, 0, 0, 4, 1};
    const kvq_tensor mlx_q{const_cast<float*>(of_q.data()), KVQ_FP32, 1, 1, 64, 64, 64},
        mlx_o{mlx_out.data(), KVQ_FP32, 1, 1, 64, 64, 64};
    CHECK_REFUSED(kvq_attend_rows(&mlx, &mlx, &one_block, &mlx_q, &mlx_o, nullptr), KVQ_ERROR_ARGUMENT,
                  "mlx-4-g64, whose biases lie beside the rows, but biases is null");
    mlx.biases = of_groups.data();
    CHECK(kvq_attend_rows(&mlx, &mlx, &one_block, &mlx_q, &mlx_o, nullptr) == KVQ_OK);
    kvq_format* q8_0 = nullptr;
    CHECK(kvq_format_find("q8_0", KVQ_KEY, nullptr, &q8_0) == KVQ_OK);
    kvq_rows ggml{};
    ggml.format = q8_0;
    ggml.data = rows_of_q8.data();
    ggml.token_stride = 68;
    std::int64_t bad = -1;
    CHECK(kvq_write_rows(&ggml, &one_block, 3, &mlx_q, &bad, nullptr) == KVQ_OK);
    CHECK(bad == 0);
    CHECK(kvq_read_rows(&ggml, &one_block, 3, &mlx_o, nullptr) == KVQ_OK);
    CHECK(std::abs(mlx_out[63] - 1.0f) < 1e-3f);
    CHECK(kvq_convert_rows(&mlx, &one_block, &ggml, &one_block, 64, &bad, nullptr) == KVQ_OK);
    CHECK(std::all_of(rows_of_q8.begin(), rows_of_q8.end(), [](std::uint8_t byte) { return byte == 0; }));
    CHECK_REFUSED(kvq_read_rows(&ggml, &one_block, 4, &mlx_o, nullptr), KVQ_ERROR_ARGUMENT,
                  "tokens 4 to 5 of a sequence of 4");
    CHECK_REFUSED(kvq_write_rows(&ggml, &one_block, -1, &mlx_q, &bad, nullptr), KVQ_ERROR_ARGUMENT,
                  "tokens -1 to 0");
    kvq_row_blocks two_heads = one_block;
    two_heads.kv_heads = 2;
    CHECK_REFUSED(kvq_read_rows(&ggml, &two_heads, 0, &mlx_o, nullptr), KVQ_ERROR_ARGUMENT,
                  "out has 1 heads, but the blocks 2 kv heads");
    CHECK_REFUSED(kvq_convert_rows(&mlx, &one_block, &ggml, &two_heads, 64, nullptr, nullptr),
                  KVQ_ERROR_ARGUMENT, "4 tokens of 1 kv heads, to 4 of 2");
    CHECK_REFUSED(kvq_attend_rows(&ggml, &ggml, &two_heads, &mlx_q, &mlx_o, nullptr), KVQ_ERROR_ARGUMENT,
                  "0 from head to head and 0 from block to block, but rows of 68 bytes");
    auto with_lse = init<kvq_attend_options>();
    with_lse.lse = mlx_out.data();
    CHECK_REFUSED(kvq_read_rows(&ggml, &one_block, 0, &mlx_o, &with_lse), KVQ_ERROR_ARGUMENT, "mods or lse");
    CHECK(kvq_format_free(q8_0) == KVQ_OK);
    CHECK(kvq_format_free(records) == KVQ_OK);
    CHECK_REFUSED(kvq_sequence_erase(f.s, -1, 5), KVQ_ERROR_ARGUMENT, "-1");
    CHECK_REFUSED(kvq_sequence_erase(f.s, 5, 10), KVQ_ERROR_ARGUMENT, "rotary");
    CHECK_REFUSED(kvq_sequence_shift(f.s, 0, 100, 1), KVQ_ERROR_ARGUMENT, "rotary");
    CHECK_REFUSED(kvq_sequence_splice(f.s, f.s, 50, most), KVQ_ERROR_ARGUMENT, "2147483647");
    CHECK_REFUSED(kvq_sequence_keep(f.s, f.ids, -1), KVQ_ERROR_ARGUMENT, "-1");
    CHECK_REFUSED(kvq_sequence_keep(f.s, f.ids, 1), KVQ_ERROR_ARGUMENT, "draft of 0");
    CHECK_REFUSED(kvq_sequence_append_bytes(f.s, -1, &f.bytes), KVQ_ERROR_ARGUMENT, "-1");
    CHECK_REFUSED(kvq_sequence_draft_bytes(f.s, 65, &f.bytes), KVQ_ERROR_ARGUMENT, "65");
    CHECK_REFUSED(kvq_sequence_dequantize(f.s, 0, 2, 0, &f.k.t), KVQ_ERROR_ARGUMENT, "role is 2");
    CHECK_REFUSED(kvq_sequence_dequantize(f.s, 0, KVQ_KEY, 1, &f.k.t), KVQ_ERROR_ARGUMENT,
                  "100 tokens from 1");
    CHECK_REFUSED(kvq_format_list(-1, nullptr), KVQ_ERROR_HANDLE, "NULL");
    auto entry = init<kvq_format_entry>();
    REQUIRE(kvq_format_count(&f.n) == KVQ_OK);
    CHECK_REFUSED(kvq_format_list(f.n, &entry), KVQ_ERROR_ARGUMENT, "is not among");
    CHECK_REFUSED(kvq_format_find("kivi-4-g64", 3, nullptr, &f.made_format), KVQ_ERROR_ARGUMENT, "role is 3");
    CHECK_REFUSED(kvq_executor_create_threads(0, &f.made_executor), KVQ_ERROR_ARGUMENT, "at least 1 thread");
    CHECK_REFUSED(kvq_cache_workspace_bytes(f.cache, 100, 3, 1, 1, &f.bytes), KVQ_ERROR_ARGUMENT,
                  "3 query heads");
    CHECK_REFUSED(kvq_cache_find_format(f.cache, KVQ_KEY, "std4", &f.n), KVQ_ERROR_ARGUMENT,
                  "only int8, fp16");
    CHECK_REFUSED(kvq_cache_get_format(f.cache, KVQ_KEY, 3, &f.made_format), KVQ_ERROR_ARGUMENT, "format 3");
    CHECK_REFUSED(kvq_cache_commit_to(f.cache, KVQ_KEY, "std4", 0, 0), KVQ_ERROR_ARGUMENT, "only int8, fp16");
    CHECK_REFUSED(kvq_cache_commit_to(f.cache, KVQ_KEY, "int8", 5, 2), KVQ_ERROR_ARGUMENT, "5 to 2");
    CHECK_REFUSED(kvq_statistics_add_sequence(f.statistics, f.s, 0, 1 << 20), KVQ_ERROR_ARGUMENT, "1048576");
    CHECK_REFUSED(kvq_cache_add_format(f.cache, KVQ_KEY, f.format, nullptr), KVQ_ERROR_ARGUMENT, "already");
    CHECK_REFUSED(kvq_statistics_create(1 << 16, 1 << 16, 1 << 20, 1, &f.made_statistics), KVQ_ERROR_ARGUMENT,
                  "larger than memory");
    CHECK_REFUSED(kvq_statistics_load(f.page, 20, &f.made_statistics), KVQ_ERROR_DATA, "not a calibration");
    auto nothing = init<kvq_allocator>();
    nothing.allocate = [](void*, std::size_t, std::size_t) -> void* { return nullptr; };
    nothing.deallocate = [](void*, void*, std::size_t, std::size_t) {};
    CHECK_REFUSED(kvq_workspace_create(&nothing, 64, &f.made_workspace), KVQ_ERROR_MEMORY, "memory");
    auto budget = init<kvq_budget_query>();
    budget.tokens = -1;
    CHECK_REFUSED(kvq_get_budget(&f.options, &budget, &f.bytes), KVQ_ERROR_ARGUMENT, "-1");
    budget.tokens = 10;
    budget.chunk = -2;
    CHECK_REFUSED(kvq_get_budget(&f.options, &budget, &f.bytes), KVQ_ERROR_ARGUMENT, "chunks of -2");
    auto footprint = init<kvq_footprint>();
    CHECK_REFUSED(kvq_cache_get_footprint(f.cache, -1, nullptr, &footprint), KVQ_ERROR_ARGUMENT, "-1");
    auto ring_options = init<kvq_ring_options>();
    CHECK_REFUSED(kvq_ring_create(f.s, &ring_options, &f.made_ring), KVQ_ERROR_ARGUMENT, "at least 1 token");
    CHECK_REFUSED(kvq_ring_trim(f.ring, -1), KVQ_ERROR_ARGUMENT, "-1");
    auto request = init<kvq_requantize_request>();
    kvq_sequence* const twice[] = {f.s, f.s};
    CHECK_REFUSED(kvq_cache_requantize(f.cache, twice, 2, &request, nullptr), KVQ_ERROR_ARGUMENT,
                  "is sequence 0 again");
    request.keys = "low2";
    CHECK_REFUSED(kvq_cache_requantize(f.cache, twice, 1, &request, nullptr), KVQ_ERROR_ARGUMENT,
                  "lists no key format");
    auto policy = init<kvq_step_down_policy>();
    policy.first_layers_kept = 3;
    CHECK_REFUSED(kvq_cache_step_down(f.cache, twice, 1, &policy, nullptr, nullptr), KVQ_ERROR_ARGUMENT,
                  "3 first");
    CHECK_REFUSED(kvq_prefix_cache_store(f.store, f.ids, 101, f.s, nullptr), KVQ_ERROR_ARGUMENT, "101");
    CHECK(f.state() == before);
}

TEST_CASE("a prefix cache takes no token of a draft") {
    fixture f;
    REQUIRE(kvq_prefix_cache_store(f.store, f.ids, 100, f.s, nullptr) == KVQ_OK);  // to share pages with
    rows k{2, kv_heads}, v{2, kv_heads};
    for (int layer = 0; layer < layers; ++layer)
        REQUIRE(kvq_sequence_append_draft(f.s, layer, &k.t, &v.t) == KVQ_OK);
    const std::vector<std::int32_t> ids(102);
    for (const int n : {101, 102})
        CHECK_REFUSED(kvq_prefix_cache_store(f.store, ids.data(), n, f.s, nullptr), KVQ_ERROR_ARGUMENT,
                      "keep() a part of it");
    REQUIRE(kvq_prefix_cache_store(f.store, ids.data(), 99, f.s, nullptr) == KVQ_OK);
}

TEST_CASE("masks and score modifiers out of range") {
    fixture f;
    const auto refused = [&](auto change, kvq_status status, const char* text) {
        auto mods = init<kvq_mods>();
        change(mods);
        auto o = init<kvq_attend_options>();
        o.mods = &mods;
        CHECK_REFUSED(kvq_sequence_attend(f.s, 0, &f.q.t, &f.out.t, &o), status, text);
        const kvq_attend_request r{f.s, f.q.t, f.out.t, nullptr, &mods};
        CHECK_REFUSED(kvq_cache_attend(f.cache, 0, &r, 1, nullptr), status, text);
    };
    static const std::int32_t starts[] = {0, 50, 20}, parents[65] = {0};
    static const float slopes[3] = {1, 2, 3};
    refused([](auto& m) { m.direction = 3; }, KVQ_ERROR_ARGUMENT, "direction is 3");
    refused([](auto& m) { m.window = -1; }, KVQ_ERROR_ARGUMENT, "window of -1");
    refused([](auto& m) { m.window_sinks = 1; }, KVQ_ERROR_ARGUMENT, "1 sinks");
    refused([](auto& m) { m.prefix = -1; }, KVQ_ERROR_ARGUMENT, "prefix of -1");
    refused([](auto& m) { m.documents = 2; }, KVQ_ERROR_HANDLE, "document_starts");
    refused([](auto& m) { m.documents = 3, m.document_starts = starts; }, KVQ_ERROR_ARGUMENT,
            "before document 1");
    refused([](auto& m) { m.tree_tokens = 65, m.tree_parents = parents; }, KVQ_ERROR_ARGUMENT, "at most 64");
    refused([](auto& m) { m.tree_tokens = 2, m.tree_parents = parents; }, KVQ_ERROR_ARGUMENT, "token 0");
    refused([](auto& m) { m.alibi_heads = 3, m.alibi_slopes = slopes; }, KVQ_ERROR_ARGUMENT,
            "3 slopes for 4");
    refused([](auto& m) { m.sink_heads = 3, m.sink_logits = slopes; }, KVQ_ERROR_ARGUMENT,
            "3 learned sinks for 4");
    refused([](auto& m) { m.scale = NAN; }, KVQ_ERROR_ARGUMENT, "finite");
    static const kvq_token_range ranges[] = {{0, 5}, {3, 9}};
    static const std::int32_t falling[] = {0, 2, 1};
    refused([](auto& m) { m.range_count = 2; }, KVQ_ERROR_HANDLE, "token_ranges");
    refused([](auto& m) { m.range_start_count = 2; }, KVQ_ERROR_HANDLE, "range_starts");
    refused([](auto& m) { m.range_count = 2, m.token_ranges = ranges; }, KVQ_ERROR_ARGUMENT,
            "range 1 of tokens is [3, 9)");
    refused(
        [](auto& m) {
            m.range_count = 2, m.token_ranges = ranges, m.range_starts = falling, m.range_start_count = 3;
        },
        KVQ_ERROR_ARGUMENT, "starts ascend");
    refused([](auto& m) { m.selected_tokens = -1; }, KVQ_ERROR_ARGUMENT, "selected_tokens is -1");
    refused([](auto& m) { m.skipped_mass = 1.0f; }, KVQ_ERROR_ARGUMENT, "less than 1 of the weights");
    refused([](auto& m) { m.skipped_mass = NAN; }, KVQ_ERROR_ARGUMENT, "less than 1 of the weights");
    refused([](auto& m) { m.upper_only = 2; }, KVQ_ERROR_ARGUMENT, "upper_only is 2, not 0 or 1");
    static kvq_selection_report unset{}, no_list = init<kvq_selection_report>();
    static kvq_skipping_report unset_too{};
    no_list.chosen_capacity = 3;
    refused([](auto& m) { m.selection = &unset; }, KVQ_ERROR_STRUCT, "KVQ_INIT");
    refused([](auto& m) { m.selection = &no_list; }, KVQ_ERROR_HANDLE, "chosen tokens");
    refused([](auto& m) { m.skipping = &unset_too; }, KVQ_ERROR_STRUCT, "KVQ_INIT");
    refused([](auto& m) { m.softcap = INFINITY; }, KVQ_ERROR_ARGUMENT, "finite");
    refused(
        [](auto& m) {
            m.mask_page = [](void*, std::int32_t, std::int32_t, std::int32_t, std::int32_t) { return 0; };
        },
        KVQ_ERROR_ARGUMENT, "needs mask_row");
    float lse[16];
    auto o = init<kvq_attend_options>();
    o.lse = lse;
    const kvq_attend_request r{f.s, f.q.t, f.out.t, nullptr, nullptr};
    CHECK_REFUSED(kvq_cache_attend(f.cache, 0, &r, 1, &o), KVQ_ERROR_ARGUMENT, "lse");
    auto mods = init<kvq_mods>();
    mods.window = 8;
    auto in_ring = init<kvq_attend_options>();
    in_ring.mods = &mods;
    CHECK_REFUSED(kvq_ring_attend(f.ring, 0, &f.q.t, &f.out.t, &in_ring), KVQ_ERROR_ARGUMENT,
                  "its window already");
}

TEST_CASE("pages in memory of the caller that do not fit") {
    fixture f;
    const auto refused = [&](auto change, const char* text) {
        kvq_page p = f.pages[1];
        change(p);
        CHECK_REFUSED(kvq_cache_attend_pages(f.cache, 0, &p, 1, &f.q.t, &f.out.t, nullptr),
                      KVQ_ERROR_ARGUMENT, text);
    };
    constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
    refused([](auto& p) { p.keys = nullptr; }, "multiple of 16");
    refused([](auto& p) { p.values = static_cast<const char*>(p.values) + 8; }, "multiple of 16");
    refused([](auto& p) { p.key_format = 3; }, "key format 3");
    refused([](auto& p) { p.value_format = -1; }, "value format -1");
    refused([](auto& p) { p.tokens = 0; }, "0 tokens");
    refused([](auto& p) { p.tokens = 33; }, "33 tokens");
    refused([](auto& p) { p.skip = most; }, "from 2147483647");
    refused([](auto& p) { p.key_capacity = p.value_capacity = 1000; }, "1000 tokens");
    refused([](auto& p) { p.shift = 1; }, "moved by 1");
    refused(
        [](auto& p) {
            p.key_format = p.value_format = 0;
            p.key_capacity = p.value_capacity = -most - 1;
        },
        "of -2147483648");

    const auto quantize = [&](const kvq_page_shape& s, const kvq_tensor& x, std::size_t bytes,
                              std::size_t scratch, std::byte* page) {
        return kvq_format_quantize(f.format, &s, &x, page, bytes, f.scratch, scratch, nullptr);
    };
    CHECK(quantize(f.shape, f.page_values.t, f.page_bytes, f.scratch_bytes, f.page) == KVQ_OK);
    CHECK_REFUSED(quantize(f.shape, f.page_values.t, f.page_bytes - 1, f.scratch_bytes, f.page),
                  KVQ_ERROR_ARGUMENT, "bytes");
    CHECK_REFUSED(quantize(f.shape, f.page_values.t, f.page_bytes, f.scratch_bytes - 1, f.page),
                  KVQ_ERROR_ARGUMENT, "workspace");
    CHECK_REFUSED(quantize(f.shape, f.page_values.t, f.page_bytes, f.scratch_bytes, f.page + 8),
                  KVQ_ERROR_ARGUMENT, "16");
    CHECK_REFUSED(quantize(f.shape, f.k.t, f.page_bytes, f.scratch_bytes, f.page), KVQ_ERROR_ARGUMENT,
                  "100 tokens");
    for (const kvq_page_shape s :
         {kvq_page_shape{2, 32, 2, dim, 0, 0}, kvq_page_shape{KVQ_KEY, 0, 2, dim, 0, 0},
          kvq_page_shape{KVQ_KEY, most, 2, dim, 0, 0}, kvq_page_shape{KVQ_KEY, 32, most, dim, 0, 0},
          kvq_page_shape{KVQ_KEY, 32, 2, most, 0, 0}, kvq_page_shape{KVQ_KEY, 32, 2, dim, -1, 0},
          kvq_page_shape{KVQ_KEY, 32, 2, dim, 0, most}}) {
        CHECK(kvq_format_page_bytes(f.format, &s, &f.bytes, nullptr) == KVQ_ERROR_ARGUMENT);
        CHECK(quantize(s, f.page_values.t, f.page_bytes, f.scratch_bytes, f.page) == KVQ_ERROR_ARGUMENT);
    }
    const kvq_page_shape large{KVQ_KEY, 257, 1, 1 << 20, 0, 0};
    CHECK_REFUSED(kvq_format_page_bytes(f.format, &large, &f.bytes, nullptr), KVQ_ERROR_ARGUMENT,
                  "257 tokens x 1048576 channels is too large");
    CHECK_REFUSED(quantize(large, f.page_values.t, f.page_bytes, f.scratch_bytes, f.page), KVQ_ERROR_ARGUMENT,
                  "must not be more than 268435456");
    kvq_format* planned = nullptr;
    REQUIRE(kvq_statistics_add_keys(f.statistics, 0, &f.k.t) == KVQ_OK);
    REQUIRE(kvq_format_find("mix4", KVQ_KEY, f.statistics, &planned) == KVQ_OK);
    for (const kvq_page_shape s : {kvq_page_shape{KVQ_KEY, 32, kv_heads, dim, layers, 0},
                                   kvq_page_shape{KVQ_KEY, 32, kv_heads, dim, 0, 1},
                                   kvq_page_shape{KVQ_KEY, 32, kv_heads, 2 * dim, 0, 0}})
        CHECK_REFUSED(kvq_format_page_bytes(planned, &s, &f.bytes, nullptr), KVQ_ERROR_ARGUMENT,
                      "was made for 2 layers");
    CHECK(kvq_format_free(planned) == KVQ_OK);
}

TEST_CASE("messages name formats as they were asked for, with the scheme behind them") {
    fixture f;
    auto options = usual_options();
    options.keys = "std4";
    REQUIRE(kvq_cache_create(&options, &f.made_cache) == KVQ_OK);
    REQUIRE(kvq_sequence_create(f.made_cache, &f.made) == KVQ_OK);
    for (int layer = 0; layer < layers; ++layer)
        REQUIRE(kvq_sequence_append(f.made, layer, &f.k.t, &f.v.t) == KVQ_OK);
    std::vector<std::vector<std::byte>> messages;
    const auto keep = [](void* to, const void* data, std::size_t size) -> std::int32_t {
        const auto* const first = static_cast<const std::byte*>(data);
        static_cast<std::vector<std::vector<std::byte>>*>(to)->emplace_back(first, first + size);
        return 0;
    };
    REQUIRE(kvq_sequence_send_pages(f.made, 0, keep, &messages) == KVQ_OK);
    bool refused = false;
    for (const auto& m : messages) {
        refused = kvq_receiver_accept(f.receiver, m.data(), m.size()) != KVQ_OK;
        if (refused) break;
    }
    CHECK(refused);
    INFO(message());
    CHECK(message().find("layer 0 (keys) is quantized with std4 (channel4-g64-coded), which is not among the "
                         "formats of this cache: fp16, int8 (int8-token-fp32)") != std::string::npos);

    std::vector<std::byte> file;
    const auto write = [](void* to, const void* data, std::size_t size) -> std::int32_t {
        const auto* const first = static_cast<const std::byte*>(data);
        auto& all = *static_cast<std::vector<std::byte>*>(to);
        all.insert(all.end(), first, first + size);
        return 0;
    };
    if (kvq_sequence_save(f.made, nullptr, write, &file) != KVQ_ERROR_UNSUPPORTED) {
        struct source {
            const std::vector<std::byte>& bytes;
            std::size_t at = 0;
        } from{file};
        const auto read = [](void* of, void* to, std::size_t size) -> std::size_t {
            auto& s = *static_cast<source*>(of);
            const std::size_t count = std::min(size, s.bytes.size() - s.at);
            std::memcpy(to, s.bytes.data() + s.at, count);
            s.at += count;
            return count;
        };
        kvq_sequence* restored = nullptr;
        CHECK_REFUSED(
            kvq_sequence_restore(f.cache, nullptr, read, &from, &restored), KVQ_ERROR_DATA,
            "layer 0 (keys) of the saved sequence is to be quantized with std4 (channel4-g64-coded)");
    }

    kvq_format* values = nullptr;
    REQUIRE(kvq_format_find("std4", KVQ_VALUE, nullptr, &values) == KVQ_OK);
    auto description = init<kvq_format_description>();
    REQUIRE(kvq_format_describe(values, KVQ_VALUE, 64, 64, &description) == KVQ_OK);
    CHECK(std::string(description.asked_name) == "std4");
    CHECK(std::string(description.name) == "channel4-coded-dual");
    CHECK(kvq_format_free(values) == KVQ_OK);
}

TEST_CASE("callbacks that fail") {
    fixture f;
    const auto before = f.state();
    CHECK_REFUSED(kvq_sequence_send_pages(f.s, 0, take_nothing, nullptr), KVQ_ERROR_CALLBACK,
                  "write returned 7");
    CHECK_REFUSED(kvq_statistics_save(f.statistics, take_nothing, nullptr), KVQ_ERROR_CALLBACK,
                  "write returned 7");
    const kvq_status saved = kvq_sequence_save(f.s, nullptr, take_nothing, nullptr);
    if (saved != KVQ_ERROR_UNSUPPORTED) {
        CHECK(saved == KVQ_ERROR_CALLBACK);
        CHECK_REFUSED(kvq_sequence_restore(f.cache, nullptr, read_nothing, nullptr, &f.made), KVQ_ERROR_DATA,
                      "truncated");
        CHECK_REFUSED(kvq_sequence_restore_file(f.cache, nullptr, "/no/such/folder/file", &f.made),
                      KVQ_ERROR_DATA, "/no/such");
        CHECK_REFUSED(kvq_sequence_save_file(f.s, nullptr, "/no/such/folder/file"), KVQ_ERROR_DATA,
                      "/no/such");
    }
    CHECK_REFUSED(kvq_receiver_accept(f.receiver, f.message.data(), f.message.size() - 1), KVQ_ERROR_DATA,
                  "truncated");
    f.message.back() = ~f.message.back();
    CHECK_REFUSED(kvq_receiver_accept(f.receiver, f.message.data(), f.message.size()), KVQ_ERROR_DATA,
                  "damaged");
    CHECK_REFUSED(kvq_receiver_finish(f.receiver, 100, &f.made), KVQ_ERROR_DATA, "0 tokens");

    auto callbacks = init<kvq_executor_callbacks>();
    callbacks.concurrency = 2;
    callbacks.parallel_for = [](void*, std::int32_t n, kvq_task task, void* data) -> std::int32_t {
        for (std::int32_t i = 0; i < n; ++i) task(data, i);
        return 3;
    };
    auto o = init<kvq_attend_options>();
    REQUIRE(kvq_executor_create(&callbacks, &f.made_executor) == KVQ_OK);
    o.executor = f.made_executor;
    CHECK_REFUSED(kvq_sequence_prefill(f.s, 0, &f.k.t, &f.v.t, &f.q.t, &f.out.t, &o), KVQ_ERROR_CALLBACK,
                  "returned 3");
    kvq_executor* lazy = nullptr;
    callbacks.parallel_for = [](void*, std::int32_t, kvq_task, void*) -> std::int32_t { return 0; };
    REQUIRE(kvq_executor_create(&callbacks, &lazy) == KVQ_OK);
    o.executor = lazy;
    CHECK_REFUSED(kvq_sequence_prefill(f.s, 0, &f.k.t, &f.v.t, &f.q.t, &f.out.t, &o), KVQ_ERROR_CALLBACK,
                  "did not run task 0 of");
    CHECK(kvq_executor_free(lazy) == KVQ_OK);
    callbacks.concurrency = 0;
    CHECK_REFUSED(kvq_executor_create(&callbacks, &lazy), KVQ_ERROR_ARGUMENT, "at least 1 task");
    CHECK(f.state() == before);
}

TEST_CASE(
    "whatever allocation fails, the sequence stays as it was; the allocator gets all of its memory back") {
    struct memory {
        std::ptrdiff_t held = 0, left = 1 << 30;
    } m;
    auto allocator = init<kvq_allocator>();
    allocator.user = &m;
    allocator.allocate = [](void* user, std::size_t bytes, std::size_t alignment) -> void* {
        memory& all = *static_cast<memory*>(user);
        if (--all.left < 0) return nullptr;
        all.held += static_cast<std::ptrdiff_t>(bytes);
        return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    };
    allocator.deallocate = [](void* user, void* p, std::size_t bytes, std::size_t) {
        static_cast<memory*>(user)->held -= static_cast<std::ptrdiff_t>(bytes);
        std::free(p);
    };
    auto o = usual_options();
    o.allocator = &allocator;
    kvq_cache* cache = nullptr;
    kvq_sequence* s = nullptr;
    REQUIRE(kvq_cache_create(&o, &cache) == KVQ_OK);
    REQUIRE(kvq_sequence_create(cache, &s) == KVQ_OK);
    rows k(70, kv_heads), v(70, kv_heads), q(2, q_heads), out(2, q_heads);
    const auto bytes_in_use = [&] {
        auto info = init<kvq_cache_info>();
        REQUIRE(kvq_cache_get_info(cache, &info) == KVQ_OK);
        return info.bytes_in_use;
    };
    int failures = 0;
    for (int step = 0; step < 3; ++step)
        for (int allowed = 0;; ++allowed) {
            const std::size_t held = bytes_in_use();
            m.left = allowed;
            const kvq_status status = kvq_sequence_prefill(s, 0, &k.t, &v.t, &q.t, &out.t, nullptr);
            m.left = 1 << 30;
            if (status == KVQ_OK) break;
            ++failures;
            REQUIRE(status == KVQ_ERROR_MEMORY);
            CHECK(bytes_in_use() == held);
            std::int32_t tokens = 0;
            CHECK(kvq_sequence_tokens(s, 0, &tokens) == KVQ_OK);
            CHECK(tokens == 70 * step);
        }
    CHECK(failures > 5);
    CHECK(kvq_cache_free(cache) == KVQ_OK);
    CHECK(kvq_sequence_free(s) == KVQ_OK);
    CHECK(m.held == 0);

    auto budget = usual_options();
    budget.byte_budget = 4096;
    REQUIRE(kvq_cache_create(&budget, &cache) == KVQ_OK);
    REQUIRE(kvq_sequence_create(cache, &s) == KVQ_OK);
    CHECK_REFUSED(kvq_sequence_append(s, 0, &k.t, &v.t), KVQ_ERROR_MEMORY, "budget of 4096");
    CHECK(kvq_sequence_free(s) == KVQ_OK);
    CHECK(kvq_cache_free(cache) == KVQ_OK);
}

TEST_CASE("a receiver keeps its pages when there is no memory for the sequence") {
    fixture f;
    std::vector<std::vector<std::byte>> messages;
    const auto keep = [](void* to, const void* data, std::size_t size) -> std::int32_t {
        const auto* const first = static_cast<const std::byte*>(data);
        static_cast<std::vector<std::vector<std::byte>>*>(to)->emplace_back(first, first + size);
        return 0;
    };
    for (int layer = 0; layer < layers; ++layer)
        REQUIRE(kvq_sequence_send_pages(f.s, layer, keep, &messages) == KVQ_OK);
    for (const auto& m : messages) REQUIRE(kvq_receiver_accept(f.receiver, m.data(), m.size()) == KVQ_OK);
    int failures = 0;
    for (;; ++failures) {
        fail_at = failures;
        const kvq_status status = kvq_receiver_finish(f.receiver, 100, &f.made);
        const bool reached = fail_at.exchange(-1) < 0;
        if (status == KVQ_OK) {
            CHECK(!reached);
            break;
        }
        REQUIRE(status == KVQ_ERROR_MEMORY);
        CHECK(f.made == nullptr);
    }
    CHECK(failures > 0);
    rows sent(100, kv_heads), got(100, kv_heads);
    for (int layer = 0; layer < layers; ++layer) {
        REQUIRE(kvq_sequence_dequantize(f.s, layer, KVQ_VALUE, 0, &sent.t) == KVQ_OK);
        REQUIRE(kvq_sequence_dequantize(f.made, layer, KVQ_VALUE, 0, &got.t) == KVQ_OK);
        CHECK(sent.x == got.x);
    }
}

TEST_CASE("a reserved step of a C++ program takes nothing from the heap, in pages of any format") {
    constexpr int tokens = 200, channels = 64;
    rows k(tokens, kv_heads, channels), v(tokens, kv_heads, channels), q(2, q_heads, channels),
        out(2, q_heads, channels);
    for (rows* const x : {&k, &v, &q})
        for (int number = 0; float& value : x->x) value = static_cast<float>(number++ * 37 % 101 - 50) / 25;
    std::int32_t count = 0, done = 0;
    REQUIRE(kvq_format_count(&count) == KVQ_OK);
    for (std::int32_t i = 0; i < count; ++i) {
        auto entry = init<kvq_format_entry>();
        REQUIRE(kvq_format_list(i, &entry) == KVQ_OK);
        if (entry.keys == 0) continue;
        const std::string name = entry.name;
        INFO(name);
        const kvq::format_pair formats{kvq::find_format(name, kvq::tensor::key),
                                       kvq::find_format(name, kvq::tensor::value)};
        const auto of = [&](const rows& x, int heads) {
            return kvq::token_view<const float>(x.x.data(), x.t.tokens, heads, channels);
        };
        try {
            auto options = kvq::preset_options(formats);
            options.statistics = kvq::key_statistics::off;  // a plan of keys takes memory
            kvq::cache cache({.layers = 1, .kv_heads = kv_heads, .head_dim = channels}, options);
            auto s = cache.new_sequence();
            kvq::workspace space;
            const kvq::step_request step{&s, tokens, 2};
            cache.reserve(std::span(&step, 1), q_heads, 1, space);
            const kvq::prefill_request one{&s, of(k, kv_heads), of(v, kv_heads), of(q, q_heads),
                                           kvq::token_view<float>(out.x.data(), 2, q_heads, channels)};
            bool failed = false;
            fail_at = 0;
            try {
                cache.prefill(0, std::span(&one, 1), kvq::causal{}, kvq::serial_executor{}, space);
            } catch (const std::bad_alloc&) {
                failed = true;
            }
            fail_at = -1;
            CHECK(!failed);
            CHECK(s.usage().reserved == 0);
            ++done;
        } catch (const std::invalid_argument&) {
            continue;  // other channels
        }
    }
    CHECK(done > 3);
}

}  // namespace errors_tests
