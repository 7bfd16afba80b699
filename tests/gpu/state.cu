// Layers with recurrent state in a cache on the device (kvq/cuda/host/cache_state.hpp) against a CPU cache
// that does the same: random histories of steps, prompts, trims, forks, snapshots and offload, after which
// both save the same bytes; bytes of memory; refusals.
#include <filesystem>
#include <kvq/cuda.cuh>
#include <kvq/cuda/host/prefixes.hpp>
#include <kvq/format/make_format.hpp>
#include <kvq/policy/prefix_tiers.hpp>

#include "counted_memory.cuh"
#include "saved_sequence.cuh"
#include "support.cuh"

using namespace kvq;

namespace {

constexpr int dim = 64, heads = 2, page = 32, room = 96;

const cuda::device_format& compiled() {
    static const cuda::device_format f =
        cuda::make_device_format<float16, cuda::block_pair<int8, int8, dim, page>>();
    return f;
}

void ok(const cuda::status& s, const char* what) { CHECK(s, "%s: %s", what, s.message); }
void refused(const cuda::status& s, const char* part) {
    CHECK(!s && std::strstr(s.message, part) != nullptr, "expected '%s', got '%s'", part, s.message);
}
template <class F>
void raises(F&& call, std::string_view part) {
    std::string message;
    try {
        (void)call();
    } catch (const kvq::error& e) {
        message = e.what();
    }
    CHECK(message.find(part) != std::string::npos, "expected '%s', got '%s'", part.data(), message.c_str());
}

std::vector<layer> list_of(snapshot_type snapshot = snapshot_type::exact,
                           float_type type = float_type::fp32) {
    const auto recurrent = [&](int rows) {
        return state_layer({{.name = "recurrent",
                             .type = type,
                             .heads = 3,
                             .rows = rows,
                             .columns = 5,
                             .snapshot = snapshot},
                            {.name = "convolution", .type = float_type::fp16, .columns = 21}});
    };
    return {recurrent(7),   full_attention({1, dim}),
            recurrent(4),   sliding_attention(40, {heads, dim}),
            shared_with(1), recurrent(7)};
}

/// The same cache on both sides.
struct both_caches {
    cudaStream_t stream;
    kvq::cache cpu;
    cuda::cache gpu;
    test::device_buffer<float16> x;

    both_caches(const snapshot_policy& policy, int rollback, const std::vector<layer>& host = list_of(),
                const std::vector<layer>& device = list_of())
        : cpu(host, {.keys = {make_format<int8, scalar>()},
                     .sinks = 2,
                     .recent = 20,
                     .page_tokens = page,
                     .rollback = rollback,
                     .repack = 0.0f,
                     .snapshots = policy}),
          x(room * heads * dim) {
        CUDA_OK(cudaStreamCreate(&stream));
        ok(gpu.open(device, options(policy, rollback), std::span(&compiled(), 1), stream), "open");
    }
    ~both_caches() {
        CUDA_OK(cudaStreamSynchronize(stream));
        CUDA_OK(cudaStreamDestroy(stream));
    }
    static cuda::cache_options options(const snapshot_policy& policy, int rollback) {
        cuda::cache_options o;
        o.formats = {"int8"};
        o.page_tokens = page;
        o.sinks = 2;
        o.recent = 20;
        o.rollback = rollback;
        o.max_batch = 4;
        o.max_tokens = 900;
        o.step_tokens = 3;
        o.snapshots = policy;
        o.memory = test::counted_memory::allocator();
        return o;
    }

    /// New tokens of the rows in all layers, on both sides: the device's step has begun. Every value of a
    /// state becomes another one that depends on it and on `added`.
    void run(test::rng& r, const std::vector<sequence*>& hosts, int n, bool prompt) {
        const auto rows = static_cast<int>(hosts.size());
        const float added = static_cast<float>(test::uniform(r, -99, 99)) / 8.0f;
        for (int i = 0; i < cpu.layer_count(); ++i) {
            const layer& l = cpu.layers()[static_cast<std::size_t>(i)];
            if (l.kind == layer_kind::shared) continue;
            if (l.kind == layer_kind::state) {
                for (std::size_t p = 0; p < l.parts.size(); ++p) {
                    const auto part = static_cast<int>(p);
                    if (l.parts[p].type == float_type::fp32)
                        write<float>(hosts, i, part, added);
                    else if (l.parts[p].type == float_type::bf16)
                        write<bfloat16>(hosts, i, part, added);
                    else
                        write<float16>(hosts, i, part, added);
                }
                continue;
            }
            std::vector<float16> values(x.size());
            for (float16& y : values) y = float16(test::normal(r));
            x.upload(values);
            const token_view<const float16> on_device(x.get(), rows * n, l.kv_heads, dim);
            ok(gpu.append(i, on_device, on_device, stream), "append");
            CUDA_OK(cudaStreamSynchronize(stream));
            for (int row = 0; row < rows; ++row) {
                const token_view<const float16> tokens(
                    &values[static_cast<std::size_t>(row * n * l.kv_heads * dim)], n, l.kv_heads, dim);
                if (hosts[static_cast<std::size_t>(row)] != nullptr)
                    hosts[static_cast<std::size_t>(row)]->append(i, tokens, tokens);
            }
        }
        for (sequence* const host : hosts)
            if (host != nullptr) (void)host->state().advance(n, prompt);
    }
    /// What an engine's kernel does, on both sides.
    template <class T>
    void write(const std::vector<sequence*>& hosts, int layer, int part, float added) {
        cuda::state_view v;
        ok(gpu.state(layer, part, v), "state");
        CHECK(v.rows == static_cast<int>(hosts.size()), "%d rows", v.rows);
        std::vector<int> slots(hosts.size());
        CUDA_OK(cudaStreamSynchronize(stream));
        CUDA_OK(cudaMemcpy(slots.data(), v.row_slots, slots.size() * sizeof(int), cudaMemcpyDeviceToHost));
        for (std::size_t row = 0; row < hosts.size(); ++row) {
            CHECK((slots[row] >= 0) == (hosts[row] != nullptr), "row %zu has slot %d", row, slots[row]);
            if (hosts[row] == nullptr) continue;
            const std::span<T> host = hosts[row]->state().values<T>(layer, part);
            CHECK(host.size_bytes() == v.bytes, "a part of %zu bytes", v.bytes);
            std::byte* const at = v.data + static_cast<std::size_t>(slots[row]) * v.slot_bytes;
            std::vector<T> held(host.size());
            CUDA_OK(cudaMemcpy(held.data(), at, v.bytes, cudaMemcpyDeviceToHost));
            for (std::size_t i = 0; i < host.size(); ++i) {
                const auto next = [&](T y) {
                    return T(0.5f * static_cast<float>(y) + added + static_cast<float>(i % 7));
                };
                host[i] = next(host[i]);
                held[i] = next(held[i]);
            }
            CUDA_OK(cudaMemcpy(at, held.data(), v.bytes, cudaMemcpyHostToDevice));
        }
    }
};

struct pair {
    cuda::sequence_id id;
    sequence host;
};

/// Are both sides the same?
void compare(both_caches& c, const pair& p, unsigned seed, int step) {
    CHECK(c.gpu.tokens(p.id) == p.host.tokens(), "seed %u, step %d: %d tokens, not %d", seed, step,
          c.gpu.tokens(p.id), p.host.tokens());
    const auto marks = c.gpu.snapshots(p.id), wanted = p.host.state().snapshots();
    bool same = marks.size() == wanted.size();
    for (std::size_t i = 0; i < marks.size() && same; ++i) same = marks[i].tokens == wanted[i].tokens;
    CHECK(same, "seed %u, step %d: %zu snapshots, not %zu", seed, step, marks.size(), wanted.size());
    sequence moved = c.cpu.new_sequence();
    ok(cuda::offload(c.gpu, p.id, moved, c.stream), "offload");
    CHECK(test::saved(moved) == test::saved(p.host), "seed %u, step %d: other bytes", seed, step);
}

void history(unsigned seed, int steps, snapshot_type kept = snapshot_type::exact,
             float_type type = float_type::fp32) {
    test::rng r(seed);
    const bool exact = kept == snapshot_type::exact;
    const snapshot_policy policies[] = {
        {.every = 0, .prompt_end = true},
        {.every = 16, .prompt_end = false},
        {.every = 7, .prompt_end = true, .most_bytes = exact ? std::size_t{4700} : std::size_t{2100}}};
    both_caches c(policies[seed % 3], seed % 2 == 0 ? 16 : 0, list_of(kept, type), list_of(kept, type));
    std::vector<pair> all;
    std::uint64_t graph = 0;
    std::byte* data = nullptr;
    for (int step = 0; step < steps; ++step) {
        const int what = all.empty() ? 0 : test::uniform(r, 0, 19);
        pair* const p =
            all.empty()
                ? nullptr
                : &all[static_cast<std::size_t>(test::uniform(r, 0, static_cast<int>(all.size()) - 1))];
        const int held = p != nullptr ? p->host.tokens() : 0;
        if (what == 0 && all.size() < 5) {
            all.push_back({c.gpu.new_sequence(), c.cpu.new_sequence()});
        } else if (what <= 3) {
            const int n = test::uniform(r, 1, room);
            if (p == nullptr || held + n > 800) continue;
            ok(c.gpu.begin_prompt(p->id, n, c.stream), "begin");
            c.run(r, {&p->host}, n, true);
        } else if (what <= 10) {
            const int n = test::uniform(r, 1, 3);
            std::vector<cuda::sequence_id> ids;
            std::vector<sequence*> hosts;
            for (pair& other : all)
                if (ids.size() < 4 && other.host.tokens() <= 800) {
                    const bool hole = test::uniform(r, 0, 3) == 0;
                    ids.push_back(hole ? cuda::sequence_id{} : other.id);
                    hosts.push_back(hole ? nullptr : &other.host);
                }
            if (ids.empty()) continue;
            ok(c.gpu.begin_step(ids, n, c.stream), "begin");
            cuda::state_view v;
            ok(c.gpu.state(0, 0, v), "state");
            CHECK(graph != c.gpu.graph_id() || data == v.data, "seed %u: state has moved within a graph",
                  seed);
            graph = c.gpu.graph_id();
            data = v.data;
            c.run(r, hosts, n, false);
        } else if (what <= 13) {
            const int n = test::uniform(r, 0, held);
            CHECK(c.gpu.reach(p->id, n) == p->host.reach(n), "seed %u, step %d: a trim to %d reaches %d",
                  seed, step, n, c.gpu.reach(p->id, n));
            const bool possible = p->host.can_trim(n);
            CHECK((n >= c.gpu.trim_limit(p->id)) <= possible, "seed %u, step %d: trims reach %d", seed, step,
                  c.gpu.trim_limit(p->id));
            const cuda::status s = c.gpu.trim(p->id, n);
            CHECK(static_cast<bool>(s) == possible, "seed %u, step %d: %s", seed, step, s.message);
            if (possible) (void)p->host.trim(n);
        } else if (what == 14 && all.size() < 5) {
            cuda::sequence_id copy;
            ok(c.gpu.fork(p->id, copy, c.stream), "fork");
            all.push_back({copy, p->host.fork()});
        } else if (what == 15) {
            ok(c.gpu.snapshot(p->id), "snapshot");
            p->host.state().snapshot(held);
        } else if (what == 16 && test::uniform(r, 0, 3) == 0) {
            ok(c.gpu.drop_snapshots(p->id), "drop");
            p->host.state().drop_snapshots();
        } else if (what == 17) {
            const auto want = test::saved(p->host);
            test::move_by_file(c.gpu, p->id, c.cpu, p->host, c.stream, "state");
            CHECK(test::saved(p->host) == want, "seed %u, step %d: another file", seed, step);
        } else if (what == 18 && all.size() > 1) {
            ok(c.gpu.free(p->id), "free");
            all.erase(all.begin() + (p - all.data()));
        } else {
            compare(c, *p, seed, step);
            // A snapshot of the device holds the live page until the next begin.
            CHECK(!exact || c.gpu.usage(p->id).state == p->host.usage().state,
                  "seed %u, step %d: %zu bytes of state, not %zu", seed, step, c.gpu.usage(p->id).state,
                  p->host.usage().state);
            CHECK(c.gpu.usage().bytes == test::counted_memory::bytes, "seed %u, step %d: usage", seed, step);
        }
    }
    for (const pair& p : all) compare(c, p, seed, steps);
    std::printf("  seed %u: %d steps, snapshots %s\n", seed, steps, name(kept));
}

/// A sequence that waits comes back with its state from every tier, and a prefix with that of a snapshot.
void check_prefixes() {
    test::rng r(31);
    const std::vector<layer> list = {list_of()[0], list_of()[1], list_of()[2]};
    both_caches c({.every = 16, .prompt_end = true}, 16, list, list);
    pair p{c.gpu.new_sequence(), c.cpu.new_sequence()};
    for (const int n : {room, 41}) {
        ok(c.gpu.begin_prompt(p.id, n, c.stream), "begin");
        c.run(r, {&p.host}, n, true);
    }
    std::vector<token_id> text(room + 41);
    for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<token_id>(i);
    for (const cuda::prefix_place place :
         {cuda::prefix_place::device, cuda::prefix_place::host, cuda::prefix_place::file}) {
        const bool files = place == cuda::prefix_place::file;
        cuda::prefixes<prefix_tiers> store(
            c.gpu, {.min_prefix_tokens = 1, .folder = std::filesystem::temp_directory_path().string()});
        ok(store.park(text, p.id, c.stream), "park");
        const std::size_t held = store.bytes();
        CHECK(held == c.gpu.bytes_in_use(), "%zu bytes of an entry, %zu are in use", held,
              c.gpu.bytes_in_use());
        if (place != cuda::prefix_place::device) ok(store.release(held, c.stream), "release");
        if (files) CHECK(store.below().release(1) > 0, "no entry went to a file");
        cuda::found_prefix found;
        ok(store.fetch(text, found, c.stream), "fetch");
        CHECK(found.match == prefix_match::exact && found.place == place, "place %d, not %d",
              static_cast<int>(found.place), static_cast<int>(place));
        p.id = found.id;
        // Below the device an entry's live state is a snapshot.
        if (place != cuda::prefix_place::device) p.host.state().snapshot(p.host.tokens());
        compare(c, p, 31, static_cast<int>(place));
        ok(c.gpu.begin_step(std::span(&p.id, 1), 1, c.stream), "begin");
        c.run(r, {&p.host}, 1, false);
        compare(c, p, 31, static_cast<int>(place));
        text.push_back(static_cast<token_id>(text.size()));
        std::vector<token_id> part(text.begin(), text.end() - 6);
        part.push_back(-1);
        ok(store.fetch(part, found, c.stream), "fetch");
        const int wanted = p.host.reach(static_cast<int>(text.size()) - 6);
        pair q{found.id, p.host.fork()};
        (void)q.host.trim(wanted);
        CHECK(found.tokens == wanted && wanted > 0, "%d tokens, not %d", found.tokens, wanted);
        if (found.tokens == wanted) compare(c, q, 31, 10 + static_cast<int>(place));
        ok(c.gpu.free(found.id), "free");
    }
}

/// Snapshots that the CPU quantizes are quantized on the way there.
void check_quantized() {
    both_caches c({.every = 10}, 16, list_of(snapshot_type::int8_columns));
    test::rng r(5);
    sequence exact = c.cpu.new_sequence();
    cuda::sequence_id id = c.gpu.new_sequence();
    for (int i = 0; i < 25; ++i) {
        ok(c.gpu.begin_step(std::span(&id, 1), 1, c.stream), "begin");
        c.run(r, {&exact}, 1, false);
    }
    sequence moved = c.cpu.new_sequence();
    ok(cuda::offload(c.gpu, id, moved, c.stream), "offload");
    CHECK(test::saved(moved) == test::saved(exact), "quantized snapshots have other bytes");
    const double error = moved.state().snapshot_error(0);
    CHECK(error > 0 && error < 0.01, "error %.3g", error);
    (void)moved.trim(20);
    cuda::sequence_id back;
    ok(cuda::onload(moved, c.gpu, back, c.stream), "onload");
    CHECK(c.gpu.tokens(back) == 20 && c.gpu.snapshots(back).size() == 2, "%d tokens", c.gpu.tokens(back));
    std::byte* at = nullptr;
    ok(c.gpu.state(back, 2, 0, at), "state");
    const std::span<float> want = moved.state().values<float>(2, 0);
    std::vector<float> held(want.size());
    CUDA_OK(cudaMemcpy(held.data(), at, want.size_bytes(), cudaMemcpyDeviceToHost));
    CHECK(std::equal(held.begin(), held.end(), want.begin()), "a snapshot came back with other values");
}

/// More heads than a block takes at once, groups that end within lanes, and values that are not finite: the
/// device's snapshots have the CPU's bytes.
void check_hostile() {
    for (const snapshot_type kept :
         {snapshot_type::int8_rows, snapshot_type::int8_columns, snapshot_type::e4m3}) {
        std::vector<layer> list = list_of(kept);
        list[0] =
            state_layer({{.name = "recurrent", .heads = 35, .rows = 33, .columns = 18, .snapshot = kept},
                         {.name = "other", .rows = 3, .columns = 100, .snapshot = kept}});
        both_caches c({.prompt_end = false}, 16, list, list);
        test::rng r(static_cast<unsigned>(kept));
        sequence host = c.cpu.new_sequence();
        const cuda::sequence_id id = c.gpu.new_sequence();
        const auto step = [&] {
            ok(c.gpu.begin_step(std::span(&id, 1), 1, c.stream), "begin");
            c.run(r, {&host}, 1, false);
        };
        step();
        for (int part = 0; part < 2; ++part) {
            const std::span<float> values = host.state().values<float>(0, part);
            for (float& x : values) {
                x = test::normal(r) * std::ldexp(1.0f, test::uniform(r, -149, 100));
                const int what = test::uniform(r, 0, 300);
                if (what < 3) x = what == 0 ? NAN : what == 1 ? INFINITY : -INFINITY;
            }
            std::byte* at = nullptr;
            ok(c.gpu.state(id, 0, part, at), "state");
            CUDA_OK(cudaMemcpy(at, values.data(), values.size_bytes(), cudaMemcpyHostToDevice));
        }
        (void)host.state().advance(0);
        host.state().snapshot(1);
        ok(c.gpu.snapshot(id), "snapshot");
        step();
        (void)host.trim(1);
        ok(c.gpu.trim(id, 1), "trim");
        compare(c, {id, std::move(host)}, 0, 1);
    }
}

void check_refusals() {
    const auto open = [](const std::vector<layer>& list, const cuda::cache_options& o) {
        cuda::cache c;
        return c.open(list, o, std::span(&compiled(), 1), nullptr);
    };
    const cuda::cache_options o = both_caches::options({}, 0);
    raises([&] { return open(list_of(), both_caches::options({.every = -1}, 0)); },
           "snapshots every -1 tokens");
    raises([&] { return open(list_of(), both_caches::options({.most_bytes = 100}, 0)); },
           "snapshots of at most 100 bytes");
    refused(open({list_of()[0]}, o), "keys and values of its own text; all 1 have others, or state");

    both_caches c({.prompt_end = false}, 16);
    const token_view<const float16> x(c.x.get(), 1, 1, dim);
    const cuda::sequence_id id = c.gpu.new_sequence(), other = c.gpu.new_sequence();
    cuda::state_view v;
    std::byte* at = nullptr;
    refused(c.gpu.state(0, 0, v), "no step with new tokens has begun");
    ok(c.gpu.state(id, 0, 0, at), "state");
    CHECK(at == nullptr, "an empty sequence has a state");
    ok(c.gpu.begin_step(std::span(&id, 1), 1, c.stream), "begin");
    refused(c.gpu.state(1, 0, v), "layer 1, full attention of 1 x 64: it has no state");
    refused(c.gpu.state(6, 0, v), "layer 6 is not among the 6");
    refused(c.gpu.state(0, 2, v), "layer 0 has no part 2: it has 2");
    refused(c.gpu.append(0, x, x, c.stream), "layer 0, state of 2 parts: it holds no keys and values");
    refused(c.gpu.attend(2, x, token_view<float16>(c.x.get(), 1, 1, dim), {}, c.stream),
            "layer 2, state of 2 parts");
    refused(c.gpu.begin_draft(std::span(&id, 1), 0, c.stream), "cannot draft tokens of a state");
    refused(c.gpu.erase(id, 0, 1), "cannot erase tokens of a state");
    refused(c.gpu.check_equal_layers("this"), "not layer 0, state of 2 parts");
    refused(c.gpu.snapshot({}), "not one of this cache");
    ok(c.gpu.state(id, 0, 0, at), "state");
    CHECK(at != nullptr, "no state after a begin");
    // Without a snapshot everything runs again.
    CHECK(c.gpu.reach(id, 0) == 0 && c.gpu.reach(id, 1) == 1, "reach");
    std::vector<unsigned> counts(6);
    ok(c.gpu.not_finite(counts, c.stream), "counts");

    // The text of layers with cross attention is no step.
    cuda::cache crosses;
    std::vector<layer> list = list_of();
    list.push_back(cross_layer({1, dim}));
    ok(crosses.open(list, both_caches::options({}, 0), std::span(&compiled(), 1), c.stream), "open");
    const cuda::sequence_id listens = crosses.new_sequence();
    ok(crosses.begin_step(std::span(&listens, 1), 1, c.stream), "begin");
    ok(crosses.state(0, 0, v), "state");
    ok(crosses.begin_cross(listens, 3, c.stream), "begin");
    refused(crosses.state(0, 0, v), "no step with new tokens has begun");

    // No memory for the page of a second sequence, or of a step behind a snapshot.
    cuda::cache fixed;
    cuda::cache_options few = both_caches::options({.prompt_end = false}, 16);
    few.growing = false;
    few.pool_states = 2;
    few.pool_sequences = 3;
    few.pool_tokens = 400;
    ok(fixed.open(list_of(), few, std::span(&compiled(), 1), c.stream), "open");
    const cuda::sequence_id ids[] = {fixed.new_sequence(), fixed.new_sequence(), fixed.new_sequence()};
    refused(fixed.begin_step(ids, 1, c.stream), "states of sequences are needed, but 0 of 2 are in use");
    CHECK(fixed.tokens(ids[0]) == 0, "a refused step has left tokens");
    ok(fixed.begin_step(std::span(ids).first(1), 1, c.stream), "begin");
    ok(fixed.snapshot(ids[0]), "snapshot");
    ok(fixed.begin_step(std::span(ids).first(1), 1, c.stream), "begin");
    refused(fixed.begin_step(std::span(ids).subspan(1, 1), 1, c.stream), "2 of 2 are in use");
    ok(fixed.drop_snapshots(ids[0]), "drop");
    ok(fixed.begin_step(std::span(ids).subspan(1, 1), 1, c.stream), "begin");
    ok(c.gpu.free(other), "free");

    // Forks that alone hold a page need none for the last of them that writes it.
    cuda::cache forked;
    ok(forked.open(list_of(), few, std::span(&compiled(), 1), c.stream), "open");
    cuda::sequence_id beams[] = {forked.new_sequence(), {}};
    ok(forked.begin_step(std::span(beams).first(1), 1, c.stream), "begin");
    ok(forked.fork(beams[0], beams[1], c.stream), "fork");
    ok(forked.begin_step(beams, 1, c.stream), "begin");
    std::byte* of_other = nullptr;
    ok(forked.state(beams[0], 0, 0, at), "state");
    ok(forked.state(beams[1], 0, 0, of_other), "state");
    CHECK(at != nullptr && of_other != nullptr && at != of_other, "two sequences write one state");
    refused(forked.check_options(0, 8, cuda::attention_options{}), "it holds no keys and values");
    refused(forked.check_options(6, 8, cuda::attention_options{}), "layer 6 is not among the 6");

    cuda::cache tight;
    ok(tight.open(list_of(), both_caches::options({.prompt_end = false, .most_bytes = 100}, 0),
                  std::span(&compiled(), 1), c.stream),
       "open");
    const cuda::sequence_id large = tight.new_sequence();
    ok(tight.begin_step(std::span(&large, 1), 1, c.stream), "begin");
    refused(tight.snapshot(large), "the policy has room for 100");
}

/// Memory of the CPU that runs out at will.
struct ending_memory final : std::pmr::memory_resource {
    bool ends = false;

    void* do_allocate(std::size_t bytes, std::size_t alignment) override {
        if (ends) throw std::bad_alloc();
        return std::pmr::new_delete_resource()->allocate(bytes, alignment);
    }
    void do_deallocate(void* p, std::size_t bytes, std::size_t alignment) override {
        std::pmr::new_delete_resource()->deallocate(p, bytes, alignment);
    }
    bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
        return this == &other;
    }
};

/// A sequence on its way to the device for which the CPU has no memory leaves nothing there.
void check_memory_of_onload() {
    ending_memory memory;
    both_caches c({.prompt_end = false}, 16);
    cache cpu(list_of(), {.keys = {make_format<int8, scalar>()},
                          .sinks = 2,
                          .recent = 20,
                          .page_tokens = page,
                          .rollback = 16,
                          .repack = 0.0f,
                          .snapshots = {.prompt_end = false},
                          .memory = &memory});
    sequence from = cpu.new_sequence();
    const std::vector<float16> values(5 * heads * dim);
    for (const int layer : {1, 3}) {
        const token_view<const float16> x(values.data(), 5, layer == 1 ? 1 : heads, dim);
        from.append(layer, x, x);
    }
    (void)from.state().advance(5);
    cuda::sequence_id made;
    for (const bool ends : {true, false}) {
        memory.ends = ends;
        bool raised = false;
        try {
            ok(cuda::onload(from, c.gpu, made, c.stream), "onload");
        } catch (const std::bad_alloc&) {
            raised = true;
        }
        CHECK(raised == ends && (c.gpu.bytes_in_use() == 0) == ends, "%d: %zu bytes are in use", ends,
              c.gpu.bytes_in_use());
    }
    sequence taken = c.cpu.new_sequence();
    (void)taken.state().advance(1);
    refused(cuda::offload(c.gpu, made, taken, c.stream), "state of the CPU's sequence has taken 1 tokens");
    memory.ends = false;
}

}  // namespace

int main([[maybe_unused]] int argc, [[maybe_unused]] char** argv) {
    check_refusals();
    check_memory_of_onload();
    check_quantized();
    check_prefixes();
    check_hostile();
    const int steps = argc > 1 ? std::atoi(argv[1]) : test::emulated_or(200, 1500);
    for (unsigned seed = 1; seed <= 6; ++seed) history(seed, steps);
    constexpr float_type types[] = {float_type::fp32, float_type::bf16, float_type::fp16};
    for (unsigned seed = 7; seed <= 12; ++seed)
        history(seed, steps, static_cast<snapshot_type>(1 + seed % 3), types[seed / 2 % 3]);
    CHECK(test::counted_memory::bytes == 0, "%zu bytes were not given back", test::counted_memory::bytes);
    return test::report("state");
}
