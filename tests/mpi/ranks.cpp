// SPDX-License-Identifier: MIT
// Comparison family: head parallel exact, transfers exact, context parallel within 1e-6 of one cache. Run by
// mpirun on any number of ranks.
//
//   kvq_mpi_test equal      every rank computes the whole as well, and compares
//   kvq_mpi_test killed | silent | damaged | cut      the last rank does this in the middle of a run; every
//                                                     other rank must report an error
//                           within the time limit, with a sequence of whole tokens
//
// Every rank prints one line that ends with "as expected". After a failure ranks end without MPI_Finalize.
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <kvq/adapters/distributed/context_parallel.hpp>
#include <kvq/adapters/distributed/head_parallel.hpp>
#include <kvq/adapters/distributed/mpi.hpp>
#include <kvq/adapters/distributed/send_sequence.hpp>
#include <kvq/format/make_format.hpp>
#include <kvq/kvq.hpp>
#include <kvq/schemes/presets.hpp>
#include <string>

#include "support/random.hpp"

namespace {

using numbers = std::vector<float>;
constexpr std::chrono::seconds limit{3}, patience{60};

/// Damages one message to rank 0, if it is told to.
class faulty_transport : public kvq::mpi_transport {
public:
    using mpi_transport::mpi_transport;
    enum class fault { none, damage, cut } next = fault::none;
    void send(int to, std::vector<std::byte> bytes) {
        if (to == 0 && next != fault::none) {
            if (next == fault::damage) bytes[bytes.size() / 2] ^= std::byte{4};
            if (next == fault::cut) bytes.resize(bytes.size() / 2);
            next = fault::none;
        }
        mpi_transport::send(to, std::move(bytes));
    }
};
using channel = kvq::message_channel<faulty_transport>;

constexpr int heads = 2, q_heads = 4, dim = 32;
const kvq::page_geometry geometry{4, 32, 64};

kvq::cache_options options_of(const kvq::page_geometry& g) {
    static const kvq::format_pair formats = kvq::make_formats<kvq::kivi<4, 32>, kvq::scalar>();
    return {.keys = formats.keys,
            .values = formats.values,
            .sinks = g.sinks,
            .recent = g.recent,
            .page_tokens = g.page_tokens};
}

struct tensors {
    numbers k, v, q;
    explicit tensors(int tokens) {
        test::generator random(7);
        const auto n = static_cast<std::size_t>(tokens);
        k = random.normals(n * heads * dim);
        v = random.normals(n * heads * dim);
        q = random.normals(n * q_heads * dim);
    }
    static kvq::token_view<const float> rows(const numbers& x, int first, int n, int per) {
        return {x.data() + static_cast<std::ptrdiff_t>(first) * per * dim, n, per, dim};
    }
};

double distance(const float* a, const float* b, std::size_t n) {
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < n; ++i) {
        const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
        difference += d * d;
        norm += static_cast<double>(a[i]) * static_cast<double>(a[i]);
    }
    return std::sqrt(difference / norm);
}

/// Weights 2, 1, 0, 1, 2, 1, ...: uneven, and a rank without a share.
std::vector<int> uneven(int ranks) {
    std::vector<int> w;
    for (int r = 0; r < ranks; ++r) w.push_back(r % 4 == 0 ? 2 : r % 4 == 2 ? 0 : 1);
    return w;
}

/// Tokens are imported up to `imported`, prefilled up to `prompt`, and decoded. Returns the distance of this
/// rank's outputs to those of one cache. before(token) runs before every step.
template <class Before>
double run_context(channel& c, int imported, int prompt, int tokens, kvq::context_split& split,
                   kvq::sequence& own, Before&& before) {
    const tensors x(tokens);
    const auto rows = tensors::rows;
    kvq::cache cache({.layers = 1, .kv_heads = heads, .head_dim = dim}, options_of(geometry));
    auto whole = cache.new_sequence();
    whole.append(0, rows(x.k, 0, imported, heads), rows(x.v, 0, imported, heads));
    for (const auto& p : split.add(imported))
        if (p.rank == c.rank())
            own.append(0, rows(x.k, p.first, p.size(), heads), rows(x.v, p.first, p.size(), heads));
    kvq::context_parallel group(c, split, own);
    double worst = 0;
    for (int at = imported; at < tokens;) {
        const int n = at < prompt ? prompt - at : 1;
        before(at);
        numbers want(static_cast<std::size_t>(n) * q_heads * dim);
        whole.prefill(0, rows(x.k, at, n, heads), rows(x.v, at, n, heads), rows(x.q, at, n, q_heads),
                      kvq::token_view(want.data(), n, q_heads, dim));
        group.begin(n);
        numbers k, v, q;
        for (const auto& r : group.own()) {
            const auto add = [&](numbers& to, const numbers& from, int per) {
                to.insert(to.end(), from.begin() + static_cast<std::ptrdiff_t>(r.first) * per * dim,
                          from.begin() + static_cast<std::ptrdiff_t>(r.end) * per * dim);
            };
            add(k, x.k, heads);
            add(v, x.v, heads);
            add(q, x.q, q_heads);
        }
        const int mine = group.own_tokens();
        numbers out(static_cast<std::size_t>(mine) * q_heads * dim);
        group.step(0, {k.data(), mine, heads, dim}, {v.data(), mine, heads, dim},
                   {q.data(), mine, q_heads, dim}, {out.data(), mine, q_heads, dim});
        const float* from = out.data();
        for (const auto& r : group.own()) {
            const auto count = static_cast<std::size_t>(r.size()) * q_heads * dim;
            worst = std::fmax(
                worst,
                distance(want.data() + static_cast<std::size_t>(r.first - at) * q_heads * dim, from, count));
            from += count;
        }
        at += n;
    }
    return worst;
}

void expect(bool condition, const std::string& what) {
    if (!condition) throw std::runtime_error(what);
}

void context_parallel(channel& c, const std::vector<int>& weights) {
    kvq::context_split split(geometry, weights);
    kvq::cache cache({.layers = 1, .kv_heads = heads, .head_dim = dim}, options_of(split.geometry(c.rank())));
    auto own = cache.new_sequence();
    const double worst = run_context(c, 8300, 8350, 8360, split, own, [](int) {});
    expect(own.tokens() == split.tokens(c.rank()), "context parallel: a wrong number of tokens");
    std::printf("rank %d holds %d of %d tokens, distance %.2g\n", c.rank(), own.tokens(), split.tokens(),
                worst);
    expect(worst <= 1e-6, "context parallel: distance " + std::to_string(worst * 1e6) + "e-6");
}

void head_parallel(channel& c, const std::vector<int>& weights) {
    const int tokens = 300;
    const tensors x(tokens);
    const auto ranges = kvq::split(heads, weights);
    auto q_ranges = ranges;
    for (auto& r : q_ranges) r = {2 * r.first, 2 * r.end};
    const auto run = [&](kvq::index_range mine) {
        kvq::cache cache({.layers = 1, .kv_heads = mine.size(), .head_dim = dim}, options_of(geometry));
        auto s = cache.new_sequence();
        numbers out(static_cast<std::size_t>(tokens * mine.size() * 2 * dim));
        const auto part = [&](const numbers& from, int per) {
            return kvq::token_view<const float>(from.data() + mine.first * per * dim, tokens,
                                                mine.size() * per, dim, heads * per * dim, dim);
        };
        s.prefill(0, part(x.k, 1), part(x.v, 1), part(x.q, 2),
                  kvq::token_view(out.data(), tokens, mine.size() * 2, dim));
        return out;
    };
    const auto mine = ranges[static_cast<std::size_t>(c.rank())];
    const numbers want = run({0, heads}), own = mine.size() > 0 ? run(mine) : numbers{};
    numbers all(want.size());
    kvq::gather_heads(c, q_ranges, kvq::token_view<const float>(own.data(), tokens, 2 * mine.size(), dim),
                      kvq::token_view<float>(all.data(), tokens, q_heads, dim));
    expect(std::memcmp(all.data(), want.data(), want.size() * sizeof(float)) == 0,
           "head parallel: other bits");
}

std::vector<std::byte> pages_of(const kvq::sequence& s, int layers) {
    std::vector<std::byte> bytes;
    for (int layer = 0; layer < layers; ++layer)
        kvq::send_pages(s, layer, [&](const void* data, std::size_t n) {
            const auto* p = static_cast<const std::byte*>(data);
            bytes.insert(bytes.end(), p, p + n);
        });
    return bytes;
}

/// Rank 0 sends to the last rank, which computes the same sequence itself.
void transfer(channel& c, bool fewer_bits) {
    const int last = c.ranks() - 1, tokens = 700, layers = 3;
    if (c.rank() != 0 && c.rank() != last) return;
    const kvq::format fp16 = kvq::make_format<kvq::full<kvq::float16>, kvq::scalar>();
    const kvq::format_pair four = kvq::make_formats<kvq::std4, kvq::scalar>();
    kvq::cache_options o = kvq::preset_options();
    o.keys = {fp16, four.keys};
    o.values = {fp16, four.values};
    kvq::cache cache({.layers = layers, .kv_heads = heads, .head_dim = dim}, o);
    const tensors x(tokens);
    auto s = cache.new_sequence();
    const auto fill = [&](int layer) {
        s.append(layer, tensors::rows(x.k, 0, tokens, heads), tensors::rows(x.v, 0, tokens, heads));
    };
    if (c.rank() == 0) {
        kvq::sequence_sender sender(c, last, cache);
        for (int layer = 0; layer < layers; ++layer) {
            fill(layer);
            sender.send_layer(s, layer);
        }
        sender.finish(s);
        return;
    }
    for (int layer = 0; layer < layers; ++layer) fill(layer);
    if (fewer_bits) cache.requantize(s, {.key = 1, .value = 1});
    kvq::transfer_request request;
    if (fewer_bits) request = {four.keys.name(), four.values.name()};
    kvq::sequence_receiver receiver(c, 0, cache, request);
    const auto [arrived, report] = receiver.receive();
    expect(arrived.tokens() == tokens && pages_of(arrived, layers) == pages_of(s, layers),
           "transfer: other bytes");
    expect((report.saved() > 0) == fewer_bits,
           "transfer: saved " + std::to_string(report.saved()) + " bytes");
}

void equal(channel& c) {
    const int n = c.ranks();
    context_parallel(c, std::vector<int>(static_cast<std::size_t>(n), 1));
    context_parallel(c, uneven(n));
    head_parallel(c, std::vector<int>(static_cast<std::size_t>(n), 1));
    head_parallel(c, uneven(n));
    if (n > 1) transfer(c, false);
    if (n > 1) transfer(c, true);
    c.over().flush();
}

/// Returns what is wrong, or nothing.
std::string fails(channel& c, const std::string& how) {
    const int tokens = 6000, when = 5990, last = c.ranks() - 1;
    kvq::context_split split(geometry, std::vector<int>(static_cast<std::size_t>(c.ranks()), 1), 0, 64);
    kvq::cache cache({.layers = 1, .kv_heads = heads, .head_dim = dim}, options_of(split.geometry(c.rank())));
    auto own = cache.new_sequence();
    auto start = std::chrono::steady_clock::now();
    try {
        run_context(c, 5980, 5980, tokens, split, own, [&](int token) {
            if (token != when) return;
            start = std::chrono::steady_clock::now();
            if (c.rank() != last) return;
            if (how == "killed") std::raise(SIGKILL);
            if (how == "silent") std::this_thread::sleep_for(4 * limit), std::_Exit(0);
            if (how == "damaged") c.over().next = faulty_transport::fault::damage;
            if (how == "cut") c.over().next = faulty_transport::fault::cut;
        });
    } catch (const kvq::error& e) {
        const double seconds =
            std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        std::printf("rank %d, after %.1f s: %s\n", c.rank(), seconds, e.what());
        kvq::context_split whole(geometry, std::vector<int>(static_cast<std::size_t>(c.ranks()), 1), 0, 64);
        whole.add(5980);
        for (int t = 5980; t < when; ++t) whole.add(1);
        // The limit, once more for a rank that waits for one that waits, and time to compute on a busy
        // machine.
        if (seconds > 2 * static_cast<double>(limit.count()) + 5) return "the error came late";
        return own.tokens() == whole.tokens(c.rank()) ? "" : "half a token is left";
    }
    // In decode only home asks, so that the others have nothing to wait for.
    return c.rank() == 0 ? "no error" : "";
}

}  // namespace

int main(int argc, char** argv) {
    const std::string mode = argc > 1 ? argv[1] : "equal";
    MPI_Init(&argc, &argv);
    std::setvbuf(stdout, nullptr, _IOLBF, 1 << 12);
    std::string wrong;
    int rank = 0;
    {
        faulty_transport transport(MPI_COMM_WORLD, mode == "equal" ? std::chrono::milliseconds(patience)
                                                                   : std::chrono::milliseconds(limit));
        rank = transport.rank();
        channel c(transport);
        try {
            if (mode == "equal")
                equal(c);
            else
                wrong = fails(c, mode);
        } catch (const std::exception& e) {
            wrong = e.what();
        }
        std::printf("rank %d of %d, %s: %s\n", rank, transport.ranks(), mode.c_str(),
                    wrong.empty() ? "as expected" : wrong.c_str());
        std::fflush(stdout);
        if (mode != "equal" || !wrong.empty()) std::_Exit(wrong.empty() ? 0 : 1);
    }
    MPI_Finalize();
}
