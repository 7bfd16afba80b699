// One sequence on several processes (MPI). mpirun --oversubscribe -np 3 kvq_distributed attention | transfer
// [tokens]
//
//   attention   decode, context parallel and head parallel, against one process: distance, time of attention,
//               messages and merge, bytes per token by formula and measured
//   transfer    the first rank prefills in 16 bit, the last one decodes and asks for 4 bits: bytes and what
//               was saved
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <kvq/adapters/distributed/context_parallel.hpp>
#include <kvq/adapters/distributed/head_parallel.hpp>
#include <kvq/adapters/distributed/mpi.hpp>
#include <kvq/adapters/distributed/send_sequence.hpp>
#include <kvq/cpu/simd.hpp>
#include <kvq/kvq.hpp>
#include <kvq/schemes/presets.hpp>
#include <random>
#include <string>
#include <vector>

namespace {

using channel = kvq::message_channel<kvq::mpi_transport>;
using numbers = std::vector<float>;
using clock = std::chrono::steady_clock;
constexpr int kv_heads = 8, q_heads = 32, group = q_heads / kv_heads, dim = 128;

double milliseconds(clock::duration d) { return std::chrono::duration<double, std::milli>(d).count(); }

/// Rows [tokens][heads][dim] that every rank computes alike: a real engine has them from its model.
numbers random_rows(unsigned seed, int tokens, int heads) {
    std::minstd_rand random(seed + 1);
    std::uniform_real_distribution<float> uniform(-1.7F, 1.7F);
    numbers x(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(heads) * dim);
    for (float& f : x) f = uniform(random);
    return x;
}

kvq::token_view<const float> rows(const numbers& x, int first, int n, int heads) {
    return {x.data() + static_cast<std::ptrdiff_t>(first) * heads * dim, n, heads, dim};
}

/// Options of a cache whose pages are std4.
kvq::cache_options four_bit(const kvq::page_geometry& g) {
    static const kvq::format_pair std4 = kvq::make_formats<kvq::std4>();
    kvq::cache_options o = kvq::preset_options(std4);
    o.sinks = g.sinks;
    o.recent = g.recent;
    return o;
}

const kvq::page_geometry geometry{.sinks = 4, .recent = 32, .page_tokens = 128};

double distance(const numbers& a, const numbers& b) {
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
        difference += d * d;
        norm += static_cast<double>(a[i]) * static_cast<double>(a[i]);
    }
    return std::sqrt(difference / norm);
}

/// One layer of decode on all ranks, and on the last one alone. Returns whether the results agree.
bool attention(channel& c, int context, int steps) {
    const int ranks = c.ranks(), me = c.rank(), last = ranks - 1;
    const numbers k = random_rows(1, context + steps, kv_heads),
                  v = random_rows(2, context + steps, kv_heads), q = random_rows(3, steps, q_heads);
    const std::vector<int> even(static_cast<std::size_t>(ranks), 1);
    const auto out_of = [](numbers& x, int heads) { return kvq::token_view<float>(x.data(), 1, heads, dim); };
    const auto row = static_cast<std::size_t>(q_heads * dim);
    bool good = true;

    // Contexts: every rank has a range of tokens, the last one is the home of the sequence.
    kvq::context_split split(geometry, even);
    kvq::cache cache({.layers = 1, .kv_heads = kv_heads, .head_dim = dim}, four_bit(split.geometry(me)));
    auto part = cache.new_sequence();
    for (const auto& p : split.add(context))
        if (p.rank == me)
            part.append(0, rows(k, p.first, p.size(), kv_heads), rows(v, p.first, p.size(), kv_heads));
    kvq::context_parallel contexts(c, split, part);
    numbers by_contexts;
    auto best = clock::duration::max();
    kvq::context_times before, least{best, best, best};
    for (int t = 0; t < steps; ++t) {
        const auto start = clock::now();
        contexts.begin(1);
        const int own = contexts.own_tokens();
        numbers out(static_cast<std::size_t>(own) * row);
        contexts.step(0, rows(k, context + t, own, kv_heads), rows(v, context + t, own, kv_heads),
                      rows(q, t, own, q_heads), {out.data(), own, q_heads, dim});
        best = std::min(best, clock::now() - start);
        const kvq::context_times now = contexts.times();
        least = {std::min(least.attend, now.attend - before.attend),
                 std::min(least.exchange, now.exchange - before.exchange),
                 std::min(least.merge, now.merge - before.merge)};
        before = now;
        by_contexts.insert(by_contexts.end(), out.begin(), out.end());
    }
    const std::uint64_t sent = c.bytes_sent(), received = c.bytes_received();
    std::printf(
        "contexts: rank %d has %d of %d tokens; shortest of %d steps: attention %.3f ms, messages %.3f ms, "
        "merge %.4f ms\n",
        me, part.tokens(), split.tokens(), steps, milliseconds(least.attend), milliseconds(least.exchange),
        milliseconds(least.merge));

    // Heads: every rank has some heads of all tokens.
    const auto heads = kvq::split(kv_heads, even);
    auto query_heads = heads;
    for (auto& r : query_heads) r = {group * r.first, group * r.end};
    const kvq::index_range mine = heads[static_cast<std::size_t>(me)];
    numbers by_heads(static_cast<std::size_t>(steps) * row);
    {
        const auto of = [&](const numbers& x, int first, int n, int per) {
            return kvq::token_view<const float>(
                x.data() + (static_cast<std::ptrdiff_t>(first) * kv_heads + mine.first) * per * dim, n,
                mine.size() * per, dim, kv_heads * per * dim, dim);
        };
        kvq::cache_shape shape{.layers = 1, .kv_heads = std::max(1, mine.size()), .head_dim = dim};
        kvq::cache some(shape, four_bit(geometry));
        auto s = some.new_sequence();
        if (mine.size() > 0) s.append(0, of(k, 0, context, 1), of(v, 0, context, 1));
        for (int t = 0; t < steps; ++t) {
            numbers own(static_cast<std::size_t>(mine.size() * group * dim));
            if (mine.size() > 0)
                s.prefill(0, of(k, context + t, 1, 1), of(v, context + t, 1, 1), of(q, t, 1, group),
                          out_of(own, mine.size() * group));
            kvq::gather_heads(
                c, query_heads, kvq::token_view<const float>(own.data(), 1, mine.size() * group, dim),
                kvq::token_view<float>(by_heads.data() + static_cast<std::size_t>(t) * row, 1, q_heads, dim));
        }
    }

    if (me == last) {
        kvq::cache all({.layers = 1, .kv_heads = kv_heads, .head_dim = dim}, four_bit(geometry));
        auto s = all.new_sequence();
        s.append(0, rows(k, 0, context, kv_heads), rows(v, 0, context, kv_heads));
        numbers alone(static_cast<std::size_t>(steps) * row);
        auto whole = clock::duration::max();
        for (int t = 0; t < steps; ++t) {
            const auto start = clock::now();
            s.prefill(0, rows(k, context + t, 1, kv_heads), rows(v, context + t, 1, kv_heads),
                      rows(q, t, 1, q_heads),
                      {alone.data() + static_cast<std::size_t>(t) * row, 1, q_heads, dim});
            whole = std::min(whole, clock::now() - start);
        }
        int others = 0;
        for (int r = 0; r < last; ++r) others += split.tokens(r) > 0;
        const double off = distance(alone, by_contexts);
        const bool same = std::memcmp(alone.data(), by_heads.data(), alone.size() * sizeof(float)) == 0;
        good = off <= 1e-6 && same;
        std::printf(
            "one rank: %.3f ms a step; contexts: %.3f ms (shortest of %d), distance %.2g; heads: %s\n",
            milliseconds(whole), milliseconds(best), steps, off, same ? "equal, bit for bit" : "NOT equal");
        std::printf(
            "bytes per token and layer at the home of the sequence: %.0f sent, %.0f received; by formula %d "
            "and %d\n",
            static_cast<double>(sent) / steps, static_cast<double>(received) / steps,
            others * (q_heads * dim * 4 + 48), others * (q_heads * (dim + 1) * 4 + 40));
    }
    return good;
}

/// The first rank prefills, the last one decodes.
bool transfer(channel& c, int tokens) {
    const int layers = 4, last = c.ranks() - 1;
    if (c.rank() != 0 && c.rank() != last) return true;
    const kvq::format_pair std4 = kvq::make_formats<kvq::std4>();
    const kvq::format fp16 = kvq::make_format<kvq::full<kvq::float16>>();
    const kvq::cache_shape shape{.layers = layers, .kv_heads = kv_heads, .head_dim = dim};
    for (const bool fewer_bits : {false, true}) {
        // The sender keeps 16 bit and lists 4 bits, too; the receiver quantizes new pages to 4 bits.
        kvq::cache_options o = kvq::preset_options();
        o.keys = c.rank() == 0 ? kvq::format_list{fp16, std4.keys} : kvq::format_list{std4.keys, fp16};
        o.values = c.rank() == 0 ? kvq::format_list{fp16, std4.values} : kvq::format_list{std4.values, fp16};
        kvq::cache cache(shape, o);
        const auto start = clock::now();
        if (c.rank() == 0) {
            auto sequence = cache.new_sequence();
            kvq::sequence_sender sender(c, last, cache);
            clock::duration computing{0};
            for (int layer = 0; layer < layers; ++layer) {
                const auto begun = clock::now();
                const numbers k = random_rows(2 * static_cast<unsigned>(layer), tokens, kv_heads),
                              v = random_rows(2 * static_cast<unsigned>(layer) + 1, tokens, kv_heads);
                sequence.append(layer, rows(k, 0, tokens, kv_heads), rows(v, 0, tokens, kv_heads));
                computing += clock::now() - begun;
                sender.send_layer(sequence, layer);
            }
            const auto report = sender.finish(sequence);
            std::printf(
                "rank 0 sent %d tokens: %.1f MB, %.3f of 16 bit; %.0f ms, of which %.0f ms made keys and "
                "values\n",
                report.tokens, static_cast<double>(report.bytes) / 1e6,
                static_cast<double>(report.bytes) / (2.0 * 2 * layers * tokens * kv_heads * dim),
                milliseconds(clock::now() - start), milliseconds(computing));
        } else {
            kvq::transfer_request request;
            if (fewer_bits) request = {.key = std4.keys.name(), .value = std4.values.name()};
            kvq::sequence_receiver receiver(c, 0, cache, request);
            auto [sequence, report] = receiver.receive();
            std::printf("rank %d received %d tokens, saved %.1f of %.1f MB; the cache holds %.1f MB\n",
                        c.rank(), sequence.tokens(), static_cast<double>(report.saved()) / 1e6,
                        static_cast<double>(report.bytes_as_is) / 1e6,
                        static_cast<double>(cache.bytes_in_use()) / 1e6);
            // Decode goes on here.
            const numbers k = random_rows(98, 1, kv_heads), q = random_rows(99, 1, q_heads);
            numbers out(static_cast<std::size_t>(q_heads * dim));
            for (int layer = 0; layer < layers; ++layer)
                sequence.prefill(layer, rows(k, 0, 1, kv_heads), rows(k, 0, 1, kv_heads),
                                 rows(q, 0, 1, q_heads), {out.data(), 1, q_heads, dim});
        }
    }
    return true;
}

}  // namespace

int main(int argc, char** argv) {
    MPI_Init(&argc, &argv);
    const std::string command = argc > 1 ? argv[1] : "attention";
    const int tokens = argc > 2 ? std::atoi(argv[2]) : 16384;
    bool good = false;
    try {
        kvq::mpi_transport transport(MPI_COMM_WORLD, std::chrono::seconds(120));
        channel c(transport);
        good = command == "transfer" ? transfer(c, tokens) : attention(c, tokens, 40);
        transport.flush();
    } catch (const std::exception& e) {
        // MPI_Finalize would wait for a rank that is gone.
        std::fprintf(stderr, "%s\n", e.what());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    MPI_Finalize();
    return good ? 0 : 1;
}
