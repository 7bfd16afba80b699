// SPDX-License-Identifier: MIT
// Hostile numbers to kvq.h: sizes near SIZE_MAX, counters near their ends, executors that repeat tasks, NaN;
// and random steps over all verbs with such numbers among them. What is refused has changed nothing: usage,
// tokens, pages and outputs. KVQ_HOSTILE_STEPS sets their number, KVQ_SEED where they start.
#include <doctest/doctest.h>
#include <kvq/kvq.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "support/random.hpp"

namespace hostile_tests {

namespace {

constexpr int layers = 2, kv_heads = 2, q_heads = 4, dim = 32;
constexpr std::int32_t int_max = std::numeric_limits<std::int32_t>::max(),
                       int_min = std::numeric_limits<std::int32_t>::lowest();

template <class T>
T init() {
    T s;
    KVQ_INIT(s);
    return s;
}

struct rows {
    std::vector<float> x;
    kvq_tensor t;
    rows(int tokens, int heads, test::generator& random)
        : x(random.normals(static_cast<std::size_t>(tokens * heads * dim))), t{x.data(), KVQ_FP32, tokens,
                                                                               heads,    dim,      0,
                                                                               0} {}
    rows(rows&&) = delete;
};

kvq_cache_options usual_options() {
    auto o = init<kvq_cache_options>();
    o.layers = layers;
    o.kv_heads = kv_heads;
    o.head_dim = dim;
    o.keys = "int8,kivi-4-g32,fp16";
    o.page_tokens = 32;
    o.recent = 16;
    return o;
}

/// A cache with one sequence of n tokens in all layers.
struct one_sequence {
    test::generator random{test::seed()};
    kvq_cache* cache = nullptr;
    kvq_sequence* s = nullptr;
    rows k, v;
    explicit one_sequence(int n, const kvq_cache_options& o = usual_options())
        : k(n, kv_heads, random), v(n, kv_heads, random) {
        REQUIRE(kvq_cache_create(&o, &cache) == KVQ_OK);
        REQUIRE(kvq_sequence_create(cache, &s) == KVQ_OK);
        for (int layer = 0; layer < layers; ++layer)
            REQUIRE(kvq_sequence_append(s, layer, &k.t, &v.t) == KVQ_OK);
    }
    ~one_sequence() {
        kvq_sequence_free(s);
        kvq_cache_free(cache);
    }
};

void refused(kvq_status got, kvq_status wanted, const char* part) {
    INFO(kvq_last_error());
    CHECK(got == wanted);
    CHECK(std::string(kvq_last_error()).find(part) != std::string::npos);
}

}  // namespace

TEST_CASE("no memory has more than PTRDIFF_MAX bytes") {
    one_sequence f(40);
    kvq_workspace* w = nullptr;
    REQUIRE(kvq_workspace_create(nullptr, 100, &w) == KVQ_OK);
    static std::size_t asked;
    asked = 0;
    auto allocator = init<kvq_allocator>();
    allocator.allocate = [](void*, std::size_t bytes, std::size_t) -> void* {
        asked = bytes;
        return nullptr;
    };
    allocator.deallocate = [](void*, void*, std::size_t, std::size_t) {};
    for (std::size_t less = 0; less < 130; ++less)
        for (const std::size_t bytes : {SIZE_MAX - less, std::size_t{PTRDIFF_MAX} + 1 + less}) {
            kvq_workspace* made = nullptr;
            refused(kvq_workspace_create(nullptr, bytes, &made), KVQ_ERROR_MEMORY, "no memory has");
            refused(kvq_workspace_create(&allocator, bytes, &made), KVQ_ERROR_MEMORY, "no memory has");
            refused(kvq_workspace_reserve(w, bytes), KVQ_ERROR_MEMORY, "no memory has");
            CHECK(made == nullptr);
            CHECK(asked == 0);
            auto o = usual_options();
            o.preallocate = 1;
            o.byte_budget = bytes;
            kvq_cache* cache = nullptr;
            if (bytes != SIZE_MAX) refused(kvq_cache_create(&o, &cache), KVQ_ERROR_MEMORY, "no memory has");
            CHECK(cache == nullptr);
        }
    CHECK(kvq_workspace_free(w) == KVQ_OK);

    // Sizes that are computed do not wrap either.
    auto o = usual_options();
    o.kv_heads = 65536;
    o.head_dim = 4096;
    o.page_tokens = 1;
    o.sinks = o.recent = KVQ_NONE;
    kvq_cache* wide = nullptr;
    REQUIRE(kvq_cache_create(&o, &wide) == KVQ_OK);
    auto footprint = init<kvq_footprint>();
    refused(kvq_cache_get_footprint(wide, int_max - 1, nullptr, &footprint), KVQ_ERROR_ARGUMENT, "footprint");
    auto query = init<kvq_footprint_query>();
    query.sequences = int_max;
    refused(kvq_cache_get_footprint(wide, 1 << 20, &query, &footprint), KVQ_ERROR_ARGUMENT, "footprint");
    CHECK(kvq_cache_free(wide) == KVQ_OK);
}

TEST_CASE("counts of reports stay at their ends, and nothing is written beyond the capacity") {
    auto o = usual_options();
    o.keys = "int8-bounds";
    o.values = "int8";
    one_sequence f(2000, o);
    rows q(1, q_heads, f.random), out(1, q_heads, f.random);
    auto report = init<kvq_selection_report>();
    kvq_chosen_tokens chosen[6];
    std::memset(chosen, 0x55, sizeof chosen);
    report.chosen = chosen + 1;
    report.chosen_capacity = 4;
    auto skipping = init<kvq_skipping_report>();
    auto mods = init<kvq_mods>();
    mods.selected_tokens = 200;
    mods.selection = &report;
    mods.skipped_mass = 0.01f;
    mods.skipping = &skipping;
    auto options = init<kvq_attend_options>();
    options.mods = &mods;
    REQUIRE(kvq_sequence_attend(f.s, 0, &q.t, &out.t, &options) == KVQ_OK);
    const std::int32_t runs = report.chosen_count;
    REQUIRE(runs > 6);
    for (const std::int32_t before : {int_max, int_max - 5, int_max - runs, 3}) {
        report.chosen_count = before;
        report.pages = report.read = skipping.pages = skipping.rows = skipping.skipped =
            std::numeric_limits<std::int64_t>::max() - 1;
        REQUIRE(kvq_sequence_attend(f.s, 0, &q.t, &out.t, &options) == KVQ_OK);
        CHECK(report.chosen_count == (before > int_max - runs ? int_max : before + runs));
        CHECK(report.pages == std::numeric_limits<std::int64_t>::max());
        CHECK(report.read == std::numeric_limits<std::int64_t>::max());
        CHECK(skipping.pages == std::numeric_limits<std::int64_t>::max());
        CHECK(skipping.rows == std::numeric_limits<std::int64_t>::max());
        CHECK(skipping.skipped >= std::numeric_limits<std::int64_t>::max() - 1);
    }
    for (const int end : {0, 5}) {
        kvq_chosen_tokens same;
        std::memset(&same, 0x55, sizeof same);
        CHECK(std::memcmp(&chosen[end], &same, sizeof same) == 0);
    }
    report.chosen_count = -1;
    refused(kvq_sequence_attend(f.s, 0, &q.t, &out.t, &options), KVQ_ERROR_ARGUMENT, "-1 runs");
    report.chosen_count = 0;
    report.chosen_capacity = -1;
    refused(kvq_sequence_attend(f.s, 0, &q.t, &out.t, &options), KVQ_ERROR_ARGUMENT, "-1");
}

TEST_CASE("an executor that runs one task n times is refused, and the sequence is as it was") {
    one_sequence f(300);
    rows k(100, kv_heads, f.random), q(100, q_heads, f.random), out(100, q_heads, f.random);
    const auto run = [&](auto parallel_for, const char* part) {
        auto callbacks = init<kvq_executor_callbacks>();
        callbacks.concurrency = 4;
        callbacks.parallel_for = parallel_for;
        kvq_executor* executor = nullptr;
        REQUIRE(kvq_executor_create(&callbacks, &executor) == KVQ_OK);
        auto o = init<kvq_attend_options>();
        o.executor = executor;
        refused(kvq_sequence_prefill(f.s, 0, &k.t, &k.t, &q.t, &out.t, &o), KVQ_ERROR_CALLBACK, part);
        std::int32_t tokens = 0;
        REQUIRE(kvq_sequence_tokens(f.s, 0, &tokens) == KVQ_OK);
        CHECK(tokens == 300);
        CHECK(kvq_executor_free(executor) == KVQ_OK);
    };
    run(
        [](void*, std::int32_t n, kvq_task task, void* data) -> std::int32_t {
            for (std::int32_t i = 0; i < n; ++i) task(data, 0);
            return 0;
        },
        "task 0 of 4 twice");
    run(
        [](void*, std::int32_t n, kvq_task task, void* data) -> std::int32_t {
            for (std::int32_t i = 1; i < n; ++i) task(data, i);
            return 0;
        },
        "did not run task 0 of 4");
    run(
        [](void*, std::int32_t n, kvq_task task, void* data) -> std::int32_t {
            for (std::int32_t i = 0; i <= n; ++i) task(data, i);
            return 0;
        },
        "ran task 4 of 4");
}

TEST_CASE("a table of sequences refuses hostile ids, positions and ranges, and stays as it was") {
    auto o = usual_options();
    kvq_rotary rotary{dim, 0, KVQ_HALF_SPLIT, 0, 10000.0, nullptr, nullptr, nullptr};
    o.rotary = &rotary;
    o.rotary_count = 1;
    one_sequence f(40, o);
    kvq_sequence_table* t = nullptr;
    for (const std::int32_t ids : {int_min, -1, 0, (1 << 20) + 1, int_max})
        refused(kvq_sequence_table_create(f.cache, ids, &t), KVQ_ERROR_ARGUMENT, "a table of sequences");
    REQUIRE(kvq_sequence_table_create(f.cache, 2, &t) == KVQ_OK);
    for (const std::int32_t ids : {(1 << 20) + 1, int_max})
        refused(kvq_sequence_table_grow(t, ids), KVQ_ERROR_ARGUMENT, "at most 1048576 ids");
    REQUIRE(kvq_sequence_table_grow(t, int_min) == KVQ_OK);

    kvq_workspace* w = nullptr;
    REQUIRE(kvq_workspace_create(nullptr, 0, &w) == KVQ_OK);
    auto options = init<kvq_attend_options>();
    options.workspace = w;
    std::int32_t positions[40], count[40], ids[40];
    const std::int32_t* of[40];
    for (int i = 0; i < 40; ++i) positions[i] = int_max - 100 + i, count[i] = 1, ids[i] = 0, of[i] = &ids[i];
    auto batch = init<kvq_token_batch>();
    batch.tokens = 40;
    batch.positions = positions;
    batch.id_counts = count;
    batch.ids = of;
    const auto begin = [&] { return kvq_sequence_table_begin(t, &batch, q_heads, &options); };
    const auto bad = [&](std::int32_t& number, std::int32_t value, const char* part) {
        const std::int32_t good = number;
        number = value;
        refused(begin(), KVQ_ERROR_ARGUMENT, part);
        number = good;
    };
    for (const std::int32_t id : {int_min, -1, 2, int_max}) bad(ids[7], id, "is of sequence");
    for (const std::int32_t n : {int_min, 0}) bad(count[7], n, "ids");
    for (const std::int32_t p : {int_min, -1, int_max - 100}) bad(positions[7], p, "is not behind position");
    bad(batch.tokens, int_min, "");
    for (const std::int32_t heads : {int_min, 0, 3})
        CHECK(kvq_sequence_table_begin(t, &batch, heads, &options) == KVQ_ERROR_ARGUMENT);
    rows q(40, q_heads, f.random), out(40, q_heads, f.random);
    REQUIRE(begin() == KVQ_OK);
    for (int layer = 0; layer < layers; ++layer)
        REQUIRE(kvq_sequence_table_prefill(t, layer, &f.k.t, &f.v.t, &q.t, &out.t, &options) == KVQ_OK);
    for (const std::int32_t layer : {int_min, -1, layers, int_max})
        refused(kvq_sequence_table_prefill(t, layer, &f.k.t, &f.v.t, &q.t, &out.t, &options),
                KVQ_ERROR_ARGUMENT, "layer");
    REQUIRE(kvq_sequence_table_end(t) == KVQ_OK);

    for (const std::int32_t id : {2, int_max - 1, int_max}) {
        refused(kvq_sequence_table_remove(t, id, int_min, int_max), KVQ_ERROR_ARGUMENT, "is not among");
        refused(kvq_sequence_table_copy(t, 0, id, 0, -1), KVQ_ERROR_ARGUMENT, "is not among");
        refused(kvq_sequence_table_copy(t, id, 0, 0, -1), KVQ_ERROR_ARGUMENT, "is not among");
        refused(kvq_sequence_table_keep(t, id), KVQ_ERROR_ARGUMENT, "is not among");
        refused(kvq_sequence_table_shift(t, id, 0, -1, 1), KVQ_ERROR_ARGUMENT, "is not among");
    }
    for (const std::int32_t by : {100, int_max})
        refused(kvq_sequence_table_shift(t, 0, 0, -1, by), KVQ_ERROR_ARGUMENT, "cannot grow by");
    refused(kvq_sequence_table_shift(t, 0, int_max - 80, int_max, -70), KVQ_ERROR_ARGUMENT,
            "would lie before");
    REQUIRE(kvq_sequence_table_remove(t, -1, int_max, int_min + 5) == KVQ_OK);  // nothing is there
    std::int32_t held[40], n = 0;
    REQUIRE(kvq_sequence_table_positions(t, 0, held, 40, &n) == KVQ_OK);
    CHECK(n == 40);
    CHECK(std::equal(held, held + 40, positions));
    refused(kvq_sequence_table_positions(t, 0, held, -1, &n), KVQ_ERROR_ARGUMENT, "");
    CHECK(kvq_sequence_table_free(t) == KVQ_OK);
    CHECK(kvq_workspace_free(w) == KVQ_OK);
}

TEST_CASE("NaN is refused where it is given once, and counted where it is a value") {
    one_sequence f(40);
    rows q(1, q_heads, f.random), out(1, q_heads, f.random);
    const auto bad = [&](auto set, const char* part) {
        auto mods = init<kvq_mods>();
        set(mods);
        auto options = init<kvq_attend_options>();
        options.mods = &mods;
        refused(kvq_sequence_attend(f.s, 0, &q.t, &out.t, &options), KVQ_ERROR_ARGUMENT, part);
    };
    static float four[q_heads] = {1, 1, 1, 1};
    for (const float x : {NAN, INFINITY}) {
        four[2] = x;
        bad([](kvq_mods& m) { m.alibi_slopes = four, m.alibi_heads = q_heads; }, "query head 2");
        bad([](kvq_mods& m) { m.sink_logits = four, m.sink_heads = q_heads; }, "query head 2");
        bad([&](kvq_mods& m) { m.scale = x; }, "must be finite");
        bad([&](kvq_mods& m) { m.softcap = x; }, "must be finite");
    }
    // A token of NaN and of a number beyond fp16, in a page of values and in one of codes.
    const auto usage = [&] {
        auto u = init<kvq_usage>();
        REQUIRE(kvq_sequence_get_usage(f.s, &u) == KVQ_OK);
        return u.not_finite;
    };
    rows token(1, kv_heads, f.random);
    token.x[3] = NAN;
    token.x[7] = 1e6f;
    CHECK(usage() == 0);
    REQUIRE(kvq_sequence_append(f.s, 1, &f.k.t, &f.v.t) == KVQ_OK);
    REQUIRE(kvq_sequence_append(f.s, 1, &token.t, &token.t) == KVQ_OK);
    CHECK(usage() == 4);
    REQUIRE(kvq_sequence_append(f.s, 1, &f.k.t, &f.v.t) == KVQ_OK);
    REQUIRE(kvq_sequence_append(f.s, 1, &f.k.t, &f.v.t) == KVQ_OK);
    CHECK(usage() == 4);  // quantized by now
    for (const char* const name : {"fp16", "int8"}) {
        kvq_format* format = nullptr;
        REQUIRE(kvq_format_find(name, KVQ_KEY, nullptr, &format) == KVQ_OK);
        const kvq_page_shape shape{KVQ_KEY, 1, kv_heads, dim, 0, 0};
        std::size_t page_bytes = 0, scratch_bytes = 0, not_finite = 99;
        REQUIRE(kvq_format_page_bytes(format, &shape, &page_bytes, &scratch_bytes) == KVQ_OK);
        alignas(64) static std::byte page[8192], scratch[65536];
        REQUIRE(page_bytes <= sizeof page);
        REQUIRE(scratch_bytes <= sizeof scratch);
        CHECK(kvq_format_quantize(format, &shape, &token.t, page, page_bytes, scratch, scratch_bytes,
                                  &not_finite) == KVQ_OK);
        CHECK(not_finite == (std::string(name) == "fp16" ? 2u : 1u));  // 1e6 is a number for codes
        CHECK(kvq_format_free(format) == KVQ_OK);
    }
}

namespace {

/// What a sequence is, as bytes: usage, tokens, every page as a message, outputs.
std::string state_of(const kvq_cache* cache, const kvq_sequence* s, rows& q, rows& out) {
    std::string all;
    const auto add = [&all](const void* data, std::size_t n) {
        all.append(static_cast<const char*>(data), n);
    };
    auto u = init<kvq_usage>();
    REQUIRE(kvq_sequence_get_usage(s, &u) == KVQ_OK);
    // One by one: bytes between members have no value.
    const std::size_t counts[] = {u.quantized, u.window,      u.slack,
                                  u.rollback,  u.bookkeeping, u.workspace,
                                  u.bytes,     u.not_finite,  static_cast<std::size_t>(u.tokens),
                                  u.reserved,  u.repacked};
    add(counts, sizeof counts);
    auto info = init<kvq_cache_info>();
    REQUIRE(kvq_cache_get_info(cache, &info) == KVQ_OK);
    add(&info, sizeof info);
    for (int layer = 0; layer < layers; ++layer) {
        std::int32_t n = 0;
        REQUIRE(kvq_sequence_tokens(s, layer, &n) == KVQ_OK);
        add(&n, sizeof n);
        const auto write = [](void* to, const void* data, std::size_t bytes) -> std::int32_t {
            static_cast<std::string*>(to)->append(static_cast<const char*>(data), bytes);
            return 0;
        };
        (void)kvq_sequence_send_pages(s, layer, write, &all);  // refused while there is a draft
        if (n == 0) continue;
        REQUIRE(kvq_sequence_attend(s, layer, &q.t, &out.t, nullptr) == KVQ_OK);
        add(out.x.data(), out.x.size() * sizeof(float));
    }
    return all;
}

/// Numbers that a caller should not pass, among those that it may.
class numbers {
public:
    explicit numbers(test::generator& random) : random_(random) {}

    std::int32_t operator()(int low, int high) {
        if (!random_.one_in(6)) return random_.between(low, high < low ? low : high);
        hostile = true;
        return random_.pick(std::vector<std::int32_t>{-1, -2, int_min, int_min + 1, int_max, int_max - 1,
                                                      int_max - 31, 1 << 30, high + 1, low - 1, 65537});
    }
    std::int64_t far() {
        return random_.pick(std::vector<std::int64_t>{0, 1, -3, 1000, std::int64_t{1} << 40,
                                                      std::numeric_limits<std::int64_t>::max(),
                                                      std::numeric_limits<std::int64_t>::lowest()});
    }
    std::size_t bytes() {
        return random_.pick(std::vector<std::size_t>{0, 1, 4096, SIZE_MAX, SIZE_MAX - 7, SIZE_MAX - 62,
                                                     SIZE_MAX - 63, std::size_t{PTRDIFF_MAX} + 1});
    }
    /// A tensor whose shape may lie, but never about more memory than there is, unless it is refused for
    /// that.
    kvq_tensor tensor(kvq_tensor t, int tokens) {
        t.tokens = tokens;
        if (!random_.one_in(6)) return t;
        hostile = true;
        switch (random_.between(0, 7)) {
            case 0:
                t.tokens = random_.pick(std::vector<std::int32_t>{-1, int_min});
                break;
            case 1:
                t.heads = random_.pick(std::vector<std::int32_t>{-1, 0, 1, 3, int_max, int_min});
                break;
            case 2:
                t.dim = random_.pick(std::vector<std::int32_t>{-1, 0, 31, int_max, int_min});
                break;
            case 3:
                t.dtype = random_.pick(std::vector<std::int32_t>{-1, 3, int_max});
                break;
            case 4:
                t.data = nullptr;
                break;
            case 5:
                t.data = reinterpret_cast<char*>(t.data) + 1;
                break;
            case 6:
                t.tokens = 2;
                t.token_stride =
                    random_.pick(std::vector<std::ptrdiff_t>{PTRDIFF_MAX, PTRDIFF_MIN, PTRDIFF_MAX / 2});
                break;
            default:
                t.head_stride = random_.pick(std::vector<std::ptrdiff_t>{PTRDIFF_MAX, PTRDIFF_MIN});
        }
        return t;
    }
    template <class T>
    T* pointer(T* p) {
        if (!random_.one_in(25)) return p;
        hostile = true;
        return nullptr;
    }

    bool hostile = false;

private:
    test::generator& random_;
};

}  // namespace

TEST_CASE("random steps over all verbs with hostile numbers: what is refused changes nothing") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const char* const wanted = std::getenv("KVQ_HOSTILE_STEPS");
    const int steps = wanted ? std::atoi(wanted) : test::rounds(900);
    constexpr int longest = 150;
    kvq_rotary rotary{};
    rotary.dims = dim;
    auto options = usual_options();
    options.rotary = &rotary;
    options.rotary_count = 1;
    options.byte_budget = 600'000;
    kvq_cache* cache = nullptr;
    REQUIRE(kvq_cache_create(&options, &cache) == KVQ_OK);
    std::vector<kvq_sequence*> live(3, nullptr);
    for (auto& s : live) REQUIRE(kvq_sequence_create(cache, &s) == KVQ_OK);
    kvq_workspace* workspace = nullptr;
    REQUIRE(kvq_workspace_create(nullptr, 0, &workspace) == KVQ_OK);
    rows k(64, kv_heads, random), v(64, kv_heads, random), q(8, q_heads, random), out(64, q_heads, random),
        probe(1, q_heads, random), seen(1, q_heads, random);
    for (float& x : v.x)
        if (random.one_in(700)) x = random.pick(test::hostile_values());
    std::map<std::string, std::pair<int, int>> outcomes;  // by verb: done, refused
    for (int step = 0; step < steps; ++step) {
        if (step % 200 == 199) {  // moved keys cut sequences into more and more spans
            REQUIRE(kvq_sequence_free(live[2]) == KVQ_OK);
            std::swap(live[1], live[2]);
            std::swap(live[0], live[1]);
            REQUIRE(kvq_sequence_create(cache, &live[0]) == KVQ_OK);
        }
        kvq_sequence*& s = live[static_cast<std::size_t>(random.between(0, 2))];
        kvq_sequence* const other = live[static_cast<std::size_t>(random.between(0, 2))];
        std::int32_t held = 0, layer_held = 0;
        REQUIRE(kvq_sequence_tokens(s, KVQ_ALL_LAYERS, &held) == KVQ_OK);
        REQUIRE(kvq_sequence_tokens(s, 0, &layer_held) == KVQ_OK);
        std::vector<std::string> before;
        for (kvq_sequence* x : live) before.push_back(state_of(cache, x, probe, seen));
        numbers n(random);
        auto attend = init<kvq_attend_options>();
        auto mods = init<kvq_mods>();
        mods.window = random.one_in(3) ? n(0, 50) : 0;
        mods.prefix = random.one_in(6) ? n(0, 50) : 0;
        mods.softcap = random.one_in(6) ? random.pick(test::hostile_values()) : 0.0f;
        mods.scale = random.one_in(6) ? random.pick(test::hostile_values()) : 0.0f;
        mods.skipped_mass = random.one_in(6) ? random.pick(test::hostile_values()) : 0.0f;
        mods.selected_tokens = random.one_in(6) ? n(0, 50) : 0;
        std::vector<std::int32_t> listed(8 * 16 * 3);
        for (std::int32_t& x : listed) x = random.one_in(40) ? n(-1, 90) : random.between(-1, 3);
        if (random.one_in(4)) {
            mods.listed_tokens = random.one_in(6) ? nullptr : listed.data();
            mods.listed_count = random.between(-1, 3);
            mods.list_queries = n(1, 8);
            mods.list_kv_heads = n(0, 2);
            n.hostile = true;
        }
        if (random.one_in(2)) attend.mods = &mods;
        if (random.one_in(2)) attend.workspace = workspace;
        const int layer = n(0, layers - 1), tokens = random.between(0, std::min(64, longest - held));
        std::string verb;
        kvq_status status = KVQ_OK;
        bool changes_nothing = false;  // also if it is done
        const auto call = [&](const char* name, kvq_status got) {
            verb = name;
            status = got;
        };
        switch (random.between(0, 19)) {
            case 0:
            case 1:
            case 2: {
                // All layers, so that the sequence can be spliced and saved; one of them may be wrong.
                const kvq_tensor kt = n.tensor(k.t, tokens), vt = n.tensor(v.t, tokens);
                call("append", kvq_sequence_append(n.pointer(s), layer, n.pointer(&kt), n.pointer(&vt)));
                if (status != KVQ_OK) break;
                for (int other_layer = 0; other_layer < layers; ++other_layer)
                    if (other_layer != layer) (void)kvq_sequence_append(s, other_layer, &kt, &vt);
                break;
            }
            case 3: {
                const kvq_tensor kt = n.tensor(k.t, tokens), vt = n.tensor(v.t, tokens),
                                 qt = n.tensor(q.t, std::min(8, tokens)),
                                 to = n.tensor(out.t, std::min(8, tokens));
                call("prefill", kvq_sequence_prefill(s, layer, &kt, &vt, &qt, &to, &attend));
                break;
            }
            case 4: {
                const int m = random.between(0, std::min(8, layer_held));
                const kvq_tensor qt = n.tensor(q.t, m), to = n.tensor(out.t, m);
                call("attend", kvq_sequence_attend(s, layer, n.pointer(&qt), n.pointer(&to), &attend));
                changes_nothing = true;
                break;
            }
            case 5:
                call("trim", kvq_sequence_trim(s, n(0, held)));
                break;
            case 6:
                call("erase", kvq_sequence_erase(s, n(0, held), n(0, held)));
                break;
            case 7:
                call("shift", kvq_sequence_shift(s, n(0, held), n(0, held), n.far()));
                break;
            case 8: {
                std::int32_t theirs = 0;
                REQUIRE(kvq_sequence_tokens(other, KVQ_ALL_LAYERS, &theirs) == KVQ_OK);
                if (held + theirs > longest) break;
                call("splice", kvq_sequence_splice(s, n.pointer(other), n(0, theirs), n(0, theirs)));
                break;
            }
            case 9: {
                const kvq_tensor kt = n.tensor(k.t, std::min(9, tokens)),
                                 vt = n.tensor(v.t, std::min(9, tokens));
                call("draft", kvq_sequence_append_draft(s, layer, &kt, &vt));
                break;
            }
            case 10: {
                const std::int32_t path[] = {n(0, 2), n(2, 6), n(4, 9)};
                call("keep", kvq_sequence_keep(s, n.pointer(path), random.between(-1, 3)));
                break;
            }
            case 11: {
                kvq_sequence* made = nullptr;
                call("fork", kvq_sequence_fork(s, random.one_in(6) ? nullptr : &made));
                if (made == nullptr) break;
                REQUIRE(kvq_sequence_free(live[0]) == KVQ_OK);
                live[0] = made;
                break;
            }
            case 12: {
                auto r = init<kvq_requantize_request>();
                r.keys = random.pick(std::vector<const char*>{nullptr, "fp16", "int8", "std4", "kivi-4-g32"});
                r.values = random.pick(std::vector<const char*>{nullptr, "fp16", "int8", "", "kivi-4-g32"});
                r.first_layer = n(0, layers);
                r.last_layer = n(0, layers);
                r.first_token = n(0, held);
                r.last_token = n(0, held);
                r.new_pages = random.between(0, 1);
                r.dry_run = random.one_in(4);
                r.most_nanoseconds = random.one_in(9) ? n.far() : 0;
                r.workspace = workspace;
                auto report = init<kvq_requantize_report>();
                call("requantize", kvq_cache_requantize(cache, &s, n(1, 1) == 1 ? 1 : -1, &r, &report));
                // Pages that were converted before memory ran out stay converted.
                if (status == KVQ_ERROR_MEMORY) status = KVQ_OK;
                break;
            }
            case 13: {
                const kvq_tier tiers[] = {{n(0, 40), 0, "kivi-4-g32", nullptr}};
                auto policy = init<kvq_step_down_policy>();
                policy.tiers = tiers;
                policy.tier_count = random.between(-1, 1);
                policy.first_layers_kept = n(0, 1);
                policy.last_layers_kept = n(0, 1);
                call("step down", kvq_cache_step_down(cache, &s, 1, &policy, nullptr, nullptr));
                if (status == KVQ_ERROR_MEMORY) status = KVQ_OK;
                break;
            }
            case 14: {
                const kvq_step_request r{s, std::min(n(0, 20), 70000), n(0, 1), nullptr};  // O(pages)
                attend.workspace = workspace;
                call("reserve",
                     kvq_cache_reserve(cache, &r, n(1, 1) == 1 ? 1 : int_min, n(q_heads, q_heads), &attend));
                REQUIRE(kvq_sequence_release_reserved(s) == KVQ_OK);
                break;
            }
            case 15: {
                const std::size_t bytes = n.bytes();
                kvq_workspace* made = nullptr;
                call("workspace", random.one_in(2) ? kvq_workspace_reserve(workspace, bytes)
                                                   : kvq_workspace_create(nullptr, bytes, &made));
                CHECK((status == KVQ_OK) == (bytes <= 4096));
                REQUIRE(kvq_workspace_free(made) == KVQ_OK);
                changes_nothing = true;
                break;
            }
            case 16: {
                auto o = usual_options();
                for (std::int32_t* x : {&o.kv_heads, &o.head_dim, &o.value_dim, &o.page_tokens, &o.sinks,
                                        &o.recent, &o.rollback})
                    if (random.one_in(3)) *x = n(1, 100);
                o.preallocate = random.between(0, 1);
                o.byte_budget = n.bytes();
                kvq_cache* made = nullptr;
                call("cache", kvq_cache_create(&o, &made));
                kvq_sequence* empty = nullptr;
                if (made) REQUIRE(kvq_sequence_create(made, &empty) == KVQ_OK);
                REQUIRE(kvq_sequence_free(empty) == KVQ_OK);
                REQUIRE(kvq_cache_free(made) == KVQ_OK);
                changes_nothing = true;
                break;
            }
            case 17: {
                auto query = init<kvq_footprint_query>();
                query.sequences = n(0, 9);
                query.q_heads = random.one_in(2) ? q_heads : n(0, 4);
                query.q_tokens = n(0, 9);
                query.threads = n(0, 9);
                query.chunk = n(0, 90);
                auto footprint = init<kvq_footprint>();
                std::int32_t most = 0;
                call("footprint",
                     random.one_in(4)
                         ? kvq_cache_longest_context(cache, n.bytes(), &query, &most)
                         : kvq_cache_get_footprint(cache, n(0, 5000), &query, n.pointer(&footprint)));
                changes_nothing = true;
                break;
            }
            case 18: {
                const kvq_tensor to = n.tensor(k.t, 1);
                rows copy(1, kv_heads, random);
                kvq_tensor mine = to;
                if (mine.data == k.t.data)
                    mine.data = copy.x.data();
                else if (mine.data != nullptr)
                    mine.data = reinterpret_cast<char*>(copy.x.data()) + 1;
                std::size_t bytes = 0;
                call("read", random.one_in(2)
                                 ? kvq_sequence_dequantize(s, layer, n(0, 1), n(0, held - 1), &mine)
                                 : kvq_sequence_append_bytes(s, n(0, 900), n.pointer(&bytes)));
                changes_nothing = true;
                break;
            }
            default: {
                // A writer that gives up, and a message that is cut.
                struct sink {
                    int left;
                    std::vector<std::string> messages;
                } to{random.between(0, 4), {}};
                const auto write = [](void* user, const void* data, std::size_t bytes) -> std::int32_t {
                    auto& mine = *static_cast<sink*>(user);
                    mine.messages.emplace_back(static_cast<const char*>(data), bytes);
                    return mine.left-- > 0 ? 0 : 1;
                };
                call("send", kvq_sequence_send_pages(s, layer, write, &to));
                kvq_receiver* receiver = nullptr;
                REQUIRE(kvq_receiver_create(cache, &receiver) == KVQ_OK);
                if (random.one_in(3))
                    (void)kvq_receiver_convert(receiver, random.one_in(2) ? -1 : n(-2, 40),
                                               random.one_in(2) ? -1 : n(-2, 40),
                                               random.one_in(2) ? -1 : n(-2, 140));
                for (std::string& m : to.messages) {
                    if (random.one_in(3))
                        m[random.bits() % m.size()] ^= static_cast<char>(1 << random.between(0, 7));
                    (void)kvq_receiver_accept(receiver, m.data(),
                                              random.one_in(4) ? random.bits() % m.size() : m.size());
                }
                kvq_sequence* made = nullptr;
                (void)kvq_receiver_finish(receiver, n(-1, held), &made);
                REQUIRE(kvq_sequence_free(made) == KVQ_OK);
                REQUIRE(kvq_receiver_free(receiver) == KVQ_OK);
                changes_nothing = true;
            }
        }
        if (verb.empty()) continue;
        INFO("step ", step, ": ", verb, ", status ", status, " ", status == KVQ_OK ? "" : kvq_last_error());
        ++(status == KVQ_OK ? outcomes[verb].first : outcomes[verb].second);
        if (status != KVQ_OK) {
            REQUIRE(std::strlen(kvq_last_error()) > 5);
            REQUIRE(status != KVQ_ERROR_INTERNAL);
        }
        for (std::size_t i = 0; i < live.size(); ++i) {
            const std::string now = state_of(cache, live[i], probe, seen);
            if (status != KVQ_OK || changes_nothing) REQUIRE(now == before[i]);
        }
    }
    int done = 0, not_done = 0;
    for (const auto& [verb, counts] : outcomes) {
        done += counts.first;
        not_done += counts.second;
    }
    CHECK(done > steps / 4);
    CHECK(not_done > steps / 8);
    for (kvq_sequence* s : live) CHECK(kvq_sequence_free(s) == KVQ_OK);
    auto info = init<kvq_cache_info>();
    REQUIRE(kvq_cache_get_info(cache, &info) == KVQ_OK);
    CHECK(info.bytes_in_use == 0);
    CHECK(kvq_workspace_free(workspace) == KVQ_OK);
    CHECK(kvq_cache_free(cache) == KVQ_OK);
}

}  // namespace hostile_tests
