// SPDX-License-Identifier: MIT
// Comparison family: exact, against a model that keeps every state, and quantizes with the schemes' own
// formulas. Errors of quantized snapshots are within the bounds of state/snapshot_codec.hpp.
//
// KVQ_HISTORIES: how many random histories. KVQ_HISTORY: only the one with this number. Each has the seed
// KVQ_SEED plus its number.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <kvq/core/thread_pool.hpp>
#include <kvq/io/state_wire.hpp>
#include <kvq/quant/symmetric.hpp>
#include <kvq/state/recurrent_state.hpp>
#include <optional>

#include "support/memory.hpp"
#include "support/messages.hpp"
#include "support/random.hpp"

using kvq::float_type;
using kvq::snapshot_type;
using kvq::state_part;
using test::contains;
using test::message_of;

namespace recurrent_state_tests {

namespace {

using bytes = std::vector<std::byte>;
using layer_list = std::vector<std::vector<state_part>>;

/// Numbers [first, last) of the histories to run.
bytes written(const kvq::recurrent_state& s) {
    bytes to;
    kvq::write_recurrent_state(
        [&](const void* data, std::size_t n) {
            const auto* p = static_cast<const std::byte*>(data);
            to.insert(to.end(), p, p + n);
        },
        s);
    REQUIRE(to.size() == kvq::written_bytes(s));
    return to;
}

kvq::recurrent_state read(const bytes& from, const kvq::state_layout& layout, kvq::page_pool& pool,
                          const kvq::snapshot_policy& policy = {}) {
    std::size_t at = 0;
    auto s = kvq::read_recurrent_state(
        [&](void* to, std::size_t n) {
            n = std::min(n, from.size() - at);
            if (n > 0) std::memcpy(to, from.data() + at, n);
            at += n;
            return n;
        },
        layout, pool, policy);
    REQUIRE(at == from.size());
    return s;
}

/// Memory that is not zero at first.
class dirty_resource : public std::pmr::memory_resource {
public:
    explicit dirty_resource(int byte) : byte_(byte) {}

private:
    void* do_allocate(std::size_t n, std::size_t alignment) override {
        return std::memset(::operator new(n, std::align_val_t(alignment)), byte_, n);
    }
    void do_deallocate(void* p, std::size_t, std::size_t alignment) override {
        ::operator delete(p, std::align_val_t(alignment));
    }
    bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }

    int byte_;
};

// ---- quantizing, one value after the other --------------------------------------------------------------

float load(float_type type, const std::byte* from, std::size_t i) {
    float x = 0;
    kvq::detail::visit_float_type(type, [&](auto t) {
        std::memcpy(&t, from + i * sizeof(t), sizeof(t));
        x = static_cast<float>(t);
    });
    return x;
}
void store(float_type type, std::byte* to, std::size_t i, float x) {
    kvq::detail::visit_float_type(type, [&](auto t) {
        t = decltype(t)(x);
        std::memcpy(to + i * sizeof(t), &t, sizeof(t));
    });
}

/// The number of the scale of value i.
std::size_t group_of(const state_part& p, std::size_t i) {
    const auto rows = static_cast<std::size_t>(p.rows), columns = static_cast<std::size_t>(p.columns);
    const std::size_t head = i / (rows * columns), row = i / columns % rows, column = i % columns;
    if (p.snapshot == snapshot_type::int8_columns) return head * columns + column;
    return p.snapshot == snapshot_type::int8_rows ? head * rows + row : head * ((rows + 31) / 32) + row / 32;
}

/// scale of each value
std::vector<float> scales_of(const state_part& p, const bytes& live) {
    std::vector<float> amax(p.values(), 0.0f), scales(p.values());
    for (std::size_t i = 0; i < p.values(); ++i) {
        const float x = std::fabs(load(p.type, live.data(), i));
        if (std::isfinite(x)) amax[group_of(p, i)] = std::max(amax[group_of(p, i)], x);
    }
    for (std::size_t i = 0; i < p.values(); ++i) {
        const float most = amax[group_of(p, i)], top = p.snapshot == snapshot_type::e4m3 ? 240.0f : 127.0f;
        float scale = std::max(most / top, std::numeric_limits<float>::min());
        while (!std::isfinite(scale * top)) scale = std::nextafter(scale, 0.0f);
        scales[i] = scale;
        if (p.snapshot != snapshot_type::e4m3 && most > 0.0f && most < 1e38f)
            REQUIRE(scale == kvq::symmetric::fit<8, float>(-most, most).scale);
    }
    return scales;
}

/// What comes back from a snapshot of a part.
bytes restored(const state_part& p, const bytes& live) {
    if (p.snapshot == snapshot_type::exact) return live;
    bytes back(live.size());
    const std::vector<float> scales = scales_of(p, live);
    for (std::size_t i = 0; i < p.values(); ++i) {
        const float x = load(p.type, live.data(), i), inverse = 1.0f / scales[i];
        float xhat;
        if (p.snapshot == snapshot_type::e4m3) {
            float position = x * inverse;
            if (std::isnan(position)) position = std::signbit(position) ? -0.0f : 0.0f;
            xhat = static_cast<float>(kvq::e4m3(std::clamp(position, -240.0f, 240.0f))) * scales[i];
        } else {
            xhat = kvq::symmetric::value<8>(kvq::symmetric::code<8>(x, 0.0f, inverse), scales[i], 0.0f);
        }
        store(p.type, back.data(), i, xhat);
    }
    return back;
}

// ---- the model ------------------------------------------------------------------------------------------

struct model_layer {
    std::vector<bytes> parts;  // empty: zeros, without a page
    bool quantized = false;    // the page of a snapshot, which nobody has asked for yet
};
using model_state = std::vector<model_layer>;
struct model_snapshot {
    int tokens = 0;
    model_state state;
};

/// Keeps everything by value.
struct model {
    const layer_list* layers = nullptr;
    kvq::snapshot_policy policy;
    model_state live;
    std::vector<model_snapshot> snapshots;
    int tokens = 0;
    bool accessed = false;

    model(const layer_list& list, const kvq::snapshot_policy& p)
        : layers(&list), policy(p), live(list.size()) {}

    bytes& access(std::size_t layer, std::size_t part) {
        model_layer& l = live[layer];
        if (l.parts.empty())
            for (const state_part& p : (*layers)[layer])
                l.parts.emplace_back(p.values() * kvq::size_of(p.type));
        l.quantized = false;
        accessed = true;
        return l.parts[part];
    }
    std::size_t bytes_of(const model_state& s) const {
        std::size_t sum = 0;
        for (std::size_t layer = 0; layer < s.size(); ++layer) {
            if (s[layer].parts.empty()) continue;
            sum += 64;
            for (const state_part& p : (*layers)[layer]) {
                const std::size_t n = p.values(), heads = static_cast<std::size_t>(p.heads);
                std::size_t size = n * kvq::size_of(p.type);
                if (p.snapshot != snapshot_type::exact)
                    size = (n + 7) / 8 * 8 + 24 +
                           (4 * heads *
                                static_cast<std::size_t>(p.snapshot == snapshot_type::int8_rows ? p.rows
                                                         : p.snapshot == snapshot_type::int8_columns
                                                             ? p.columns
                                                             : (p.rows + 31) / 32) +
                            7) /
                               8 * 8;
                sum += (size + 63) / 64 * 64;
            }
        }
        return sum;
    }
    void snapshot() {
        accessed = false;
        model_snapshot taken{tokens, live};
        for (std::size_t layer = 0; layer < live.size(); ++layer) {
            model_layer& l = taken.state[layer];
            for (std::size_t i = 0; i < l.parts.size(); ++i) {
                const state_part& p = (*layers)[layer][i];
                if (p.snapshot == snapshot_type::exact) continue;
                if (!live[layer].quantized) l.parts[i] = restored(p, live[layer].parts[i]);
                l.quantized = true;
            }
        }
        if (!snapshots.empty() && snapshots.back().tokens == tokens) snapshots.pop_back();
        snapshots.push_back(taken);
        for (;;) {
            std::size_t sum = 0;
            for (const model_snapshot& s : snapshots) sum += bytes_of(s.state);
            if (sum <= policy.most_bytes || snapshots.size() == 1) break;
            snapshots.erase(snapshots.begin());
        }
    }
    bool advance(int n, bool prompt_ends) {
        accessed = false;
        bool due = prompt_ends && policy.prompt_end && tokens + n > 0;
        for (int i = 0; i < n; ++i)
            if (++tokens; policy.every > 0 && tokens % policy.every == 0) due = true;
        if (due) snapshot();
        return due;
    }
    int trim(int n) {
        if (n >= tokens && !accessed) return 0;
        const int held = tokens;
        while (!snapshots.empty() && snapshots.back().tokens > n) snapshots.pop_back();
        go_back();
        return std::min(n, held) - tokens;
    }
    int reach(int n) const {
        int token = 0;
        for (const model_snapshot& s : snapshots)
            if (s.tokens <= n) token = s.tokens;
        return token;
    }
    void go_back() {
        accessed = false;
        tokens = snapshots.empty() ? 0 : snapshots.back().tokens;
        if (snapshots.empty()) {
            live.assign(live.size(), {});
        } else {
            live = snapshots.back().state;
        }
    }
};

void require_same_live(const kvq::recurrent_state& s, const model_state& expected, const layer_list& list) {
    kvq::recurrent_state copy = s.fork();
    for (std::size_t layer = 0; layer < list.size(); ++layer)
        for (std::size_t i = 0; i < list[layer].size(); ++i) {
            const auto is = copy.part(static_cast<int>(layer), static_cast<int>(i));
            const state_part& p = list[layer][i];
            REQUIRE(is.size() == p.values() * kvq::size_of(p.type));
            REQUIRE(reinterpret_cast<std::uintptr_t>(is.data()) % 64 == 0);
            const bytes zeros(is.size());
            const bytes& parts = expected[layer].parts.empty() ? zeros : expected[layer].parts[i];
            REQUIRE(std::memcmp(is.data(), parts.data(), is.size()) == 0);
        }
}

/// Everything that can be asked for: the live state, and every snapshot by a trim of a fork.
void require_same(const kvq::recurrent_state& s, const model& m) {
    REQUIRE(s.tokens() == m.tokens);
    REQUIRE(s.snapshots().size() == m.snapshots.size());
    for (std::size_t i = 0; i < m.snapshots.size(); ++i) {
        REQUIRE(s.snapshots()[i].tokens == m.snapshots[i].tokens);
        REQUIRE(s.snapshots()[i].bytes == m.bytes_of(m.snapshots[i].state));
    }
    require_same_live(s, m.live, *m.layers);
    for (std::size_t i = m.snapshots.size(); i-- > 0;) {
        if (m.snapshots[i].tokens == m.tokens) continue;
        kvq::recurrent_state back = s.fork();
        const int until = i + 1 < m.snapshots.size() ? m.snapshots[i + 1].tokens - 1 : m.tokens - 1;
        REQUIRE(back.reach(until) == m.snapshots[i].tokens);
        REQUIRE(back.trim(until) == until - m.snapshots[i].tokens);
        require_same_live(back, m.snapshots[i].state, *m.layers);
    }
}

void fill(test::generator& random, const state_part& p, std::byte* to) {
    std::vector<float> x(p.values());
    if (random.one_in(4))
        test::fill_hostile(random, x.data(), x.size());
    else
        x = random.normals(x.size(), random.any_magnitude(-8, 8));
    for (std::size_t i = 0; i < x.size(); ++i) store(p.type, to, i, x[i]);
}

layer_list random_layers(test::generator& random) {
    layer_list list(static_cast<std::size_t>(random.between(1, 4)));
    for (auto& parts : list)
        for (int i = random.between(0, 3); i > 0; --i)
            parts.push_back({.name = "part " + std::to_string(i),
                             .type = static_cast<float_type>(random.between(0, 2)),
                             .heads = random.between(1, 2),
                             .rows = random.one_in(3) ? random.between(30, 70) : random.between(1, 9),
                             .columns = random.one_in(4) ? random.between(60, 130) : random.between(1, 20),
                             .snapshot = static_cast<snapshot_type>(random.between(0, 3))});
    if (std::all_of(list.begin(), list.end(), [](const auto& parts) { return parts.empty(); }))
        list[0].push_back(
            {.name = "recurrent", .rows = 3, .columns = 5, .snapshot = snapshot_type::int8_rows});
    return list;
}

}  // namespace

TEST_CASE("states are those of a model that keeps every state by value, whatever is done to them") {
    const auto seed = test::seed();
    const auto [first, last] = test::histories(12);
    for (int number = first; number < last; ++number) {
        INFO("KVQ_SEED=", seed, " KVQ_HISTORY=", number);
        test::generator random(seed + static_cast<std::uint64_t>(number));
        const layer_list list = random_layers(random);
        const kvq::state_layout layout{std::span(list)};
        test::counting_resource memory;
        {
            kvq::page_pool pool(&memory);
            kvq::thread_pool threads(2);
            kvq::snapshot_policy policy{.every = random.one_in(2) ? random.between(1, 30) : 0,
                                        .prompt_end = random.one_in(2)};
            if (random.one_in(2))
                policy.most_bytes =
                    layout.snapshot_bytes() * static_cast<std::size_t>(random.between(2, 9)) / 2;
            std::vector<std::pair<kvq::recurrent_state, model>> all;
            all.emplace_back(kvq::recurrent_state(layout, pool, policy), model(list, policy));
            for (int step = 0; step < 60; ++step) {
                const auto which =
                    static_cast<std::size_t>(random.between(0, static_cast<int>(all.size()) - 1));
                auto& [s, m] = all[which];
                const int verb = random.between(0, 11);
                INFO("step ", step, " verb ", verb, " of state ", which);
                if (verb <= 4) {
                    for (std::size_t layer = 0; layer < list.size(); ++layer)
                        for (std::size_t i = 0; i < list[layer].size(); ++i) {
                            if (random.one_in(4)) continue;
                            const auto to = s.part(static_cast<int>(layer), static_cast<int>(i));
                            bytes& kept = m.access(layer, i);
                            if (random.one_in(5)) continue;
                            fill(random, list[layer][i], to.data());
                            kept.assign(to.begin(), to.end());
                        }
                    if (random.one_in(8)) continue;  // a step that fails
                    const int n = random.between(0, 20);
                    const bool ends = random.one_in(4);
                    REQUIRE(s.advance(n, ends, threads) == m.advance(n, ends));
                } else if (verb == 5) {
                    s.snapshot(s.tokens());
                    m.snapshot();
                } else if (verb <= 7) {
                    const int n = random.between(0, m.tokens + 2), reach = s.reach(n);
                    const int again = s.trim(n);
                    REQUIRE(again == m.trim(n));
                    REQUIRE(s.tokens() == reach);
                } else if (verb == 8 && all.size() < 4) {
                    auto other = s.fork();
                    auto copy = m;
                    all.emplace_back(std::move(other), std::move(copy));
                } else if (verb == 9 && all.size() > 1) {
                    all.erase(all.begin() + static_cast<std::ptrdiff_t>(which));
                } else if (verb == 10) {
                    const bytes file = written(s);
                    s = read(file, layout, pool, policy);
                    REQUIRE(written(s) == file);
                } else if (verb == 11) {
                    if (!m.snapshots.empty() && m.snapshots.back().tokens == m.tokens && random.one_in(2)) {
                        s.drop_live();
                        m.go_back();
                    } else if (random.one_in(3)) {
                        s.drop_snapshots();
                        m.snapshots.clear();
                    } else {
                        const bool accessed = m.accessed;
                        s.reserve(threads);
                        for (std::size_t layer = 0; layer < list.size(); ++layer)
                            if (!list[layer].empty()) m.access(layer, 0);
                        m.accessed = accessed;
                        REQUIRE(s.reach(m.tokens) == (accessed ? m.reach(m.tokens) : m.tokens));
                        memory.arm(0);
                        for (std::size_t layer = 0; layer < list.size(); ++layer)
                            for (std::size_t i = 0; i < list[layer].size(); ++i) {
                                (void)s.part(static_cast<int>(layer), static_cast<int>(i));
                                m.accessed = true;
                            }
                        memory.arm(test::counting_resource::never);
                    }
                }
                const auto checked =
                    static_cast<std::size_t>(random.between(0, static_cast<int>(all.size()) - 1));
                require_same(all[checked].first, all[checked].second);
                std::size_t most = 0, least = 0;
                for (const auto& [state, of] : all) {
                    const kvq::state_usage u = state.usage();
                    REQUIRE(u.bytes == u.live + u.snapshots + u.bookkeeping);
                    most += u.bytes;
                    least += u.bytes - u.shared;
                }
                // Headers of shared pages count in each of their holders as well.
                REQUIRE(memory.bytes() <= most);
                if (all.size() == 1) REQUIRE(memory.bytes() == most);
                REQUIRE(all[0].first.usage().shared <=
                        all[0].first.usage().live + all[0].first.usage().snapshots);
                REQUIRE(memory.bytes() + 64 * pool.pages_in_use() * all.size() >= least);
            }
        }
        REQUIRE(memory.bytes() == 0);
    }
}

TEST_CASE(
    "what comes back from a snapshot is within the bounds of its codes, and the error that is reported is "
    "the real one") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    kvq::page_pool pool(std::pmr::get_default_resource());
    for (int round = 0; round < test::rounds(120); ++round) {
        state_part p{.name = "recurrent",
                     .type = static_cast<float_type>(round % 3),
                     .heads = random.between(1, 3),
                     .rows = random.between(1, 70),
                     .columns = random.between(1, 140),
                     .snapshot = static_cast<snapshot_type>(1 + round / 3 % 3)};
        const kvq::state_layout layout{{p}};
        kvq::recurrent_state s(layout, pool);
        const auto live = s.part(0, 0);
        fill(random, p, live.data());
        const bytes before(live.begin(), live.end());
        s.snapshot(0);
        REQUIRE(
            std::equal(before.begin(), before.end(), s.part(0, 0).begin()));  // the live state stays as it is
        s.drop_live();
        const auto after = s.part(0, 0);
        const std::vector<float> scales = scales_of(p, before);
        double errors = 0, values = 0, largest = 0;
        std::size_t lost = 0;
        for (std::size_t i = 0; i < p.values(); ++i) {
            const double x = load(p.type, before.data(), i), xhat = load(p.type, after.data(), i),
                         scale = scales[i];
            REQUIRE(std::isfinite(xhat));
            if (!std::isfinite(x)) {
                ++lost;
                if (std::isnan(x)) REQUIRE(xhat == 0);
                continue;
            }
            // Rounding to the type of the part, and the float arithmetic of the position: up to 240 steps,
            // two roundings.
            const double type = p.type == float_type::fp32   ? 0x1p-24
                                : p.type == float_type::fp16 ? 0x1p-11
                                                             : 0x1p-8;
            const double smallest = p.type == float_type::fp16 ? 0x1p-25 : 0x1p-150;
            const double bound =
                p.snapshot == snapshot_type::e4m3 ? std::max(std::fabs(x) / 16, scale / 1024) : scale / 2;
            REQUIRE(std::fabs(x - xhat) <=
                    bound * (1 + 0x1p-14) + 240 * scale * 0x1p-22 + std::fabs(xhat) * type + smallest);
            if (x == 0) REQUIRE(xhat == 0);
            errors += (x - xhat) * (x - xhat);
            values += x * x;
            largest = std::max(largest, std::fabs(x));
        }
        REQUIRE(s.usage().not_finite == lost);
        REQUIRE(s.snapshot_error(0) == s.snapshot_error(0, 0, 0));
        // Units of a subnormal number round the sums.
        if (largest > 1e-30)
            REQUIRE(s.snapshot_error(0) == doctest::Approx(std::sqrt(errors / values)).epsilon(1e-4));
    }
    // The largest number of fp32, whose scale must not be rounded up.
    {
        const kvq::state_layout layout{
            {{.name = "recurrent", .columns = 2, .snapshot = snapshot_type::int8_rows}}};
        kvq::recurrent_state s(layout, pool);
        s.values<float>(0, 0)[0] = std::numeric_limits<float>::max();
        s.snapshot(0);
        s.drop_live();
        REQUIRE(s.values<float>(0, 0)[0] > 3.4e38f);
        REQUIRE(std::isfinite(s.values<float>(0, 0)[0]));
    }
    // Every number that e4m3 has, and those in the middle of two.
    for (int i = 0; i < 1 << 16; ++i) {
        const auto x = static_cast<float>(kvq::float16::from_bits(static_cast<std::uint16_t>(i)));
        if (!(std::fabs(x) <= 240.0f)) continue;
        REQUIRE(kvq::detail::e4m3_codes::code(x) == kvq::e4m3(x).bits);
        if (kvq::e4m3 y(x); static_cast<float>(y) == x) REQUIRE(kvq::detail::e4m3_codes::value(y.bits) == x);
    }
}

TEST_CASE("int8 keeps random states to 0.7 %, e4m3 to 2.8 %, in a quarter of the bytes") {
    test::generator random(test::seed());
    kvq::page_pool pool(std::pmr::get_default_resource());
    for (const snapshot_type type :
         {snapshot_type::int8_rows, snapshot_type::int8_columns, snapshot_type::e4m3}) {
        const kvq::state_layout layout{
            {{.name = "recurrent", .heads = 2, .rows = 128, .columns = 128, .snapshot = type}}};
        kvq::recurrent_state s(layout, pool);
        const auto x = s.values<float>(0, 0);
        const auto numbers = random.normals(x.size());
        std::copy(numbers.begin(), numbers.end(), x.begin());
        s.snapshot(0);
        CHECK(s.snapshot_error(0) < (type == snapshot_type::e4m3 ? 0.028 : 0.007));
        CHECK(s.snapshot_error(0) > 0.005);
        CHECK(layout.live_bytes() > 3.8 * static_cast<double>(layout.snapshot_bytes()));
    }
}

TEST_CASE("the footprint is what is allocated, and a policy keeps to its bytes") {
    test::generator random(test::seed());
    for (int round = 0; round < 20; ++round) {
        const layer_list list = random_layers(random);
        const kvq::state_layout layout{std::span(list)};
        test::counting_resource memory;
        const int most = random.between(1, 5);
        kvq::page_pool pool(&memory);
        kvq::recurrent_state s(
            layout, pool,
            {.every = 4, .most_bytes = layout.snapshot_bytes() * static_cast<std::size_t>(most)});
        CHECK(s.usage().pages == 0);
        for (int step = 0; step < 40; ++step) {
            s.reserve();
            CHECK(memory.bytes() == s.usage().bytes);
            CHECK(memory.bytes() == kvq::recurrent_state::footprint(layout, std::min(most, step / 2)).bytes);
            CHECK(s.tokens_to_snapshot() == (step % 2 == 0 ? 4 : 2));
            CHECK(s.advance(2) == (step % 2 == 1));
        }
        CHECK(s.snapshots().size() == static_cast<std::size_t>(most));
        CHECK(s.snapshots().front().tokens == 80 - 4 * (most - 1));
    }
}

TEST_CASE("forks share pages until they write, and a step that has no memory changes nothing") {
    const kvq::state_layout layout{
        {{.name = "recurrent", .heads = 2, .rows = 16, .columns = 16, .snapshot = snapshot_type::e4m3},
         {.name = "convolution", .type = float_type::bf16, .rows = 10, .columns = 3}},
        {},
        {{.name = "convolution", .rows = 7, .columns = 4}}};
    test::counting_resource memory;
    kvq::page_pool pool(&memory);
    const auto set = [](kvq::recurrent_state& s, float x) {
        for (float& v : s.values<float>(0, 0)) v = x;
        for (float& v : s.values<float>(2, 0)) v = x;
    };
    kvq::recurrent_state s(layout, pool, {.every = 8});
    set(s, 1.0f);
    CHECK(s.advance(9));
    const std::size_t pages = pool.pages_in_use();
    CHECK(pages ==
          3);  // two live ones, of which the exact one is also that of the snapshot, and a quantized one
    kvq::recurrent_state other = s.fork();
    CHECK(pool.pages_in_use() == pages);
    CHECK(other.usage().shared == other.usage().live + other.usage().snapshots);
    set(other, 2.0f);
    CHECK(pool.pages_in_use() == pages + 2);
    CHECK(s.values<float>(2, 0)[0] == 1.0f);
    CHECK(other.trim(8) == 8);  // before the snapshot at token 9
    CHECK(other.tokens() == 0);
    CHECK(other.values<float>(2, 0)[3] == 0.0f);
    other = s.fork();

    // Whatever allocation fails.
    const bytes before = written(s);
    const auto unchanged = [&] { REQUIRE(written(s) == before); };
    memory.arm(test::counting_resource::never);
    s.drop_live();
    CHECK(test::fail_everywhere(
              memory, [&] { (void)s.part(0, 0); }, [&] { REQUIRE(s.tokens() == 9); }) == 1);
    s = read(before, layout, pool, {.every = 8});
    CHECK(test::fail_everywhere(
              memory, [&] { s.snapshot(9); }, unchanged) > 0);
    s = read(before, layout, pool, {.every = 8});
    const std::size_t held = memory.bytes();
    CHECK(test::fail_everywhere(
              memory, [&] { (void)s.fork(); }, unchanged) == 3);
    CHECK(test::fail_everywhere(
              memory, [&] { (void)read(before, layout, pool); }, unchanged) > 5);
    CHECK(memory.bytes() == held);

    // A snapshot that is due and has no memory is left out and counted; the step counts.
    set(s, 3.0f);
    memory.arm(0);
    CHECK(!s.advance(7));
    memory.arm(test::counting_resource::never);
    CHECK(s.tokens() == 16);
    CHECK(s.snapshots().size() == 1);
    CHECK(s.usage().skipped == 1);
    CHECK(s.values<float>(2, 0)[0] == 3.0f);
}

TEST_CASE("bytes of a state: damage is refused, and other snapshot types are read") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const auto list = [](snapshot_type type) {
        return layer_list{{},
                          {{.name = "a", .heads = 1, .rows = 4, .columns = 3, .snapshot = type},
                           {.name = "b", .type = float_type::fp16, .heads = 1, .rows = 1, .columns = 5}},
                          {{.name = "c", .rows = 2}}};
    };
    const layer_list parts = list(snapshot_type::int8_columns);
    const kvq::state_layout layout{std::span(parts)};
    dirty_resource memory(0xa5), other_memory(0x5a);
    kvq::page_pool pool(&memory), other_pool(&other_memory);
    const auto make = [&](kvq::page_pool& in) {
        test::generator values(seed);
        kvq::recurrent_state s(layout, in);
        for (int step = 0; step < 3; ++step) {
            for (const auto& [layer, part] : {std::pair{1, 0}, {1, 1}, {2, 0}})
                if (step != 1 || layer == 1)
                    fill(values, parts[static_cast<std::size_t>(layer)][static_cast<std::size_t>(part)],
                         s.part(layer, part).data());
            s.advance(5, step < 2);
        }
        return s;
    };
    kvq::recurrent_state s = make(pool);
    const bytes good = written(s);
    CHECK(written(make(other_pool)) == good);
    {
        kvq::recurrent_state back = read(good, layout, pool);
        CHECK(written(back) == good);
        CHECK(back.tokens() == 15);
        CHECK(back.snapshots().size() == 2);
    }
    const std::size_t pages = pool.pages_in_use();
    for (std::size_t length = 0; length < good.size(); ++length)
        REQUIRE(contains(message_of([&] {
                             (void)read(
                                 bytes(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(length)),
                                 layout, pool);
                         }),
                         "truncated"));
    for (std::size_t at = 0; at < good.size(); ++at)
        for (int bit = 0; bit < 8; ++bit) {
            bytes damaged = good;
            damaged[at] ^= static_cast<std::byte>(1 << bit);
            const std::string text = message_of([&] { (void)read(damaged, layout, pool); });
            if (text.rfind("kvq: ", 0) != 0) FAIL("byte ", at, " bit ", bit, " was not noticed");
        }
    // Descriptions that are impossible although their checksum is right.
    for (int round = 0; round < 2000; ++round) {
        bytes wrong = good;
        const std::uint32_t description = kvq::detail::load_as<std::uint32_t>(good.data() + 12);
        const auto at = static_cast<std::size_t>(random.between(16, static_cast<int>(description) - 1));
        wrong[at] = static_cast<std::byte>(random.between(0, 255));
        std::memset(wrong.data() + 40, 0, 4);
        const std::uint32_t checksum = kvq::crc32c::of(wrong.data(), description);
        std::memcpy(wrong.data() + 40, &checksum, 4);
        std::optional<kvq::recurrent_state> back;
        const std::string text = message_of([&] { back.emplace(read(wrong, layout, pool)); });
        REQUIRE((back || text.rfind("kvq: ", 0) == 0));
        if (back) (void)written(*back);
    }
    CHECK(pool.pages_in_use() == pages);

    for (const snapshot_type type : {snapshot_type::exact, snapshot_type::e4m3}) {
        const layer_list others = list(type);
        const kvq::state_layout other{std::span(others)};
        kvq::recurrent_state back = read(good, other, pool), same = s.fork();
        for (const int n : {15, 12, 7}) {
            CHECK(back.trim(n) == same.trim(n));
            for (const auto& [layer, part] : {std::pair{1, 0}, {1, 1}, {2, 0}}) {
                const auto x = back.part(layer, part), y = same.part(layer, part);
                CHECK(std::equal(x.begin(), x.end(), y.begin(), y.end()));
            }
            back.snapshot(back.tokens());
            CHECK(back.usage().bytes > 0);
        }
    }
    layer_list other_list = parts;
    other_list[1][0].rows = 5;
    const kvq::state_layout other{std::span(other_list)};
    CHECK(contains(message_of([&] { (void)read(good, other, pool); }),
                   "part a, type 0, 1 x 4 x 3, where this one has a, type 0, 1 x 5 x 3"));
    const kvq::state_layout fewer{{}, parts[1]};
    CHECK(contains(message_of([&] { (void)read(good, fewer, pool); }), "the state has 2 layers, this one 1"));
    // Less room for snapshots: the least recently used one goes.
    kvq::recurrent_state back = read(good, layout, pool, {.most_bytes = layout.snapshot_bytes()});
    CHECK(back.snapshots().size() == 1);
    CHECK(back.snapshots()[0].tokens == 10);
}

TEST_CASE("what is out of range is refused in one sentence with the numbers, and nothing changes") {
    const auto says = [](const layer_list& list, const char* text) {
        const std::string message = message_of([&] { kvq::state_layout layout{std::span(list)}; });
        INFO(message);
        CHECK(contains(message, text));
    };
    says({}, "a state of 0 bytes: none of 0 layers has a part");
    says({{}, {}}, "a state of 0 bytes: none of 2 layers has a part");
    says({{}, {{.name = "s", .rows = 0}}},
         "part s of layer 1 has 1 heads of 0 rows and 1 columns: 0 bytes or less");
    says({{{.name = "s", .heads = -2, .rows = -3}}}, "part s of layer 0 has -2 heads of -3 rows");
    says({{{.name = "s", .type = static_cast<float_type>(7)}}}, "part s of layer 0 has type 7, not fp32 (0)");
    says({{{.name = "s", .snapshot = static_cast<snapshot_type>(4)}}},
         "snapshots of part s of layer 0 have type 4, not exact (0)");
    constexpr int most = std::numeric_limits<int>::max();
    says({{{.name = "s", .heads = most, .rows = most, .columns = most}}}, "more than a memory has");
    says({{{.name = "s", .heads = 1 << 20, .rows = 1 << 20, .columns = 1 << 19}}}, "more than a memory has");
    says(layer_list(70, {{.name = "s", .heads = 1 << 18, .rows = 1 << 20, .columns = 1 << 18}}),
         "the state of layers 0 to 31 has more bytes than a memory has");
    says({{{.name = ""}}}, "part 0 of layer 0 has a name of 0 bytes");
    says({{{.name = std::string(1025, 's')}}}, "part 0 of layer 0 has a name of 1025 bytes, not 1 to 1024");
    says({{{.name = "s"}, {.name = "s"}}}, "layer 0 has two parts of the name s");

    const kvq::state_layout layout{{{.name = "s", .rows = 4}, {.name = "t"}}, {}, {{.name = "u"}}};
    kvq::page_pool pool(std::pmr::get_default_resource());
    CHECK(layout.part(0, "t") == 1);
    CHECK(contains(message_of([&] { (void)layout.part(0, "u"); }), "layer 0 has no part u: it has s, t"));
    CHECK(contains(message_of([&] { (void)layout.parts(1); }),
                   "layer 1 has no state: layers with state are 2, from 0 to 2"));
    CHECK(contains(message_of([&] { kvq::recurrent_state s(layout, pool, {.every = -1}); }),
                   "snapshots every -1 tokens"));
    CHECK(contains(message_of([&] { kvq::recurrent_state s(layout, pool, {.most_bytes = 100}); }),
                   "snapshots of at most 100 bytes: one has "));
    kvq::recurrent_state s(layout, pool, {.prompt_end = false, .most_bytes = 100});
    s.advance(5, true);
    const bytes before = written(s);
    CHECK(contains(message_of([&] { (void)s.part(0, 2); }), "layer 0 has no part 2: it has 2"));
    CHECK(contains(message_of([&] { (void)s.part(-1, 0); }), "layer -1 has no state"));
    CHECK(contains(message_of([&] { (void)s.values<kvq::float16>(0, 0); }), "with values of this type"));
    CHECK(
        contains(message_of([&] { (void)s.trim(-1); }), "cannot trim a state to -1 tokens: it has taken 5"));
    CHECK(contains(message_of([&] { (void)s.advance(-1); }), "a step of -1 tokens behind 5"));
    CHECK(contains(message_of([&] { (void)s.advance(most); }), "a step of 2147483647 tokens behind 5"));
    CHECK(
        contains(message_of([&] { s.snapshot(4); }), "a snapshot at token 4: the state has taken 5 tokens"));
    CHECK(contains(message_of([&] { s.drop_live(); }),
                   "the live state of token 5 has no snapshot to continue from"));
    CHECK(contains(message_of([&] { (void)s.snapshot_error(0); }), "snapshot 0 of 0"));
    CHECK(contains(message_of([&] { (void)kvq::recurrent_state::footprint(layout, -1); }), "-1 snapshots"));
    CHECK(written(s) == before);
    kvq::recurrent_state moved = s.fork();
    const kvq::recurrent_state owner = std::move(moved);
    CHECK(owner.tokens() == 5);
    CHECK(moved.tokens() == 0);
    CHECK(moved.usage().bytes == 0);
    CHECK(contains(message_of([&] { (void)moved.part(0, 0); }), "moved from"));
    s.reserve();
    CHECK(contains(message_of([&] { s.snapshot(5); }), "the policy has room for 100"));
    CHECK(s.snapshots().empty());
}

}  // namespace recurrent_state_tests
