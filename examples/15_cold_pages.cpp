// A codec for cold pages, as TensorRT-LLM calls one: pages that no request uses are encoded into a smaller
// pool and come back when a prompt is seen again. kvq's blocks are what a cold page holds: 4 bits a value.
//
// What the engine asks of a codec: configure() with a description of its pools; cold_bytes(), fixed, 0 where
// it refuses; encode() and decode() of index pairs {to, from}, which may not fail and only put work on the
// stream. A stream here is a list of calls, which run later and in their order, as those of a device do.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <kvq/format/make_format.hpp>
#include <kvq/kvq.hpp>
#include <random>
#include <vector>

namespace {

// ---- the engine's side ----

/// Pages of a group of layers, each [layers][K, V][heads][tokens][dim] in fp16, `bytes` apart.
struct pool_description {
    std::byte* base;
    int pages, layers, heads, tokens, dim;

    std::size_t values_of_head() const { return static_cast<std::size_t>(tokens * dim); }
    std::size_t bytes() const { return values_of_head() * static_cast<std::size_t>(layers * 2 * heads) * 2; }
};
struct index_pair {
    std::int32_t to, from;
};
struct stream {
    std::vector<std::function<void()>> calls;

    void synchronize() {
        for (const auto& call : calls) call();
        calls.clear();
    }
};

class cold_page_codec {
public:
    virtual ~cold_page_codec() = default;
    virtual bool configure(const pool_description* pools, int count) noexcept = 0;
    virtual std::size_t cold_bytes(int group) const noexcept = 0;
    virtual bool encode(int group, std::byte* cold, const index_pair* pairs, int n, stream& on) noexcept = 0;
    virtual bool decode(int group, const std::byte* cold, const index_pair* pairs, int n,
                        stream& on) noexcept = 0;
};

// ---- kvq's side ----

class kvq_codec : public cold_page_codec {
public:
    kvq_codec(kvq::format keys, kvq::format values) : formats_{std::move(keys), std::move(values)} {}

    bool configure(const pool_description* pools, int count) noexcept override {
        try {
            pools_.assign(pools, pools + count);
            for (const pool_description& p : pools_)
                for (const auto role : {kvq::tensor::key, kvq::tensor::value}) {
                    const kvq::format& f = of(role);
                    if (!f.supports(role)) return false;
                    f.functions().check(f.scheme(), {p.layers, p.heads, p.dim}, role);
                }
            return true;
        } catch (const kvq::error& e) {
            std::printf("refused: %s\n", e.what());
        } catch (const std::bad_alloc&) {
        }
        pools_.clear();
        return false;
    }
    std::size_t cold_bytes(int group) const noexcept override {
        if (group < 0 || static_cast<std::size_t>(group) >= pools_.size()) return 0;
        const pool_description& p = pools_[static_cast<std::size_t>(group)];
        std::size_t bytes = 0;
        for (const auto role : {kvq::tensor::key, kvq::tensor::value})
            bytes += of(role).block_bytes({role, p.tokens, p.dim});
        return bytes * static_cast<std::size_t>(p.layers * p.heads);
    }
    bool encode(int group, std::byte* cold, const index_pair* pairs, int n, stream& on) noexcept override {
        return enqueue(group, pairs, n, on,
                       [this, cold, bytes = cold_bytes(group)](const pool_description& p, index_pair pair) {
                           each_block(p, pair.from, cold + static_cast<std::size_t>(pair.to) * bytes,
                                      [](const kvq::format& f, const kvq::block_shape& s, kvq::block_id id,
                                         std::byte* hot, std::byte* block) {
                                          std::vector<float> values(s.values());
                                          for (std::size_t i = 0; i < values.size(); ++i) {
                                              std::uint16_t bits;
                                              std::memcpy(&bits, hot + 2 * i, 2);
                                              values[i] = kvq::float16::to_float(bits);
                                          }
                                          f.functions().quantize_values(f.scheme(), s, id, values.data(),
                                                                        block);
                                      });
                       });
    }
    bool decode(int group, const std::byte* cold, const index_pair* pairs, int n,
                stream& on) noexcept override {
        auto* const from = const_cast<std::byte*>(cold);  // each_block() serves both ways
        return enqueue(group, pairs, n, on,
                       [this, from, bytes = cold_bytes(group)](const pool_description& p, index_pair pair) {
                           each_block(p, pair.to, from + static_cast<std::size_t>(pair.from) * bytes,
                                      [](const kvq::format& f, const kvq::block_shape& s, kvq::block_id id,
                                         std::byte* hot, std::byte* block) {
                                          std::vector<float> scratch(s.values());
                                          f.functions().dequantize(f.scheme(), s, id, block,
                                                                   kvq::float_type::fp16, hot, s.dim,
                                                                   scratch.data());
                                      });
                       });
    }

private:
    const kvq::format& of(kvq::tensor role) const { return formats_[static_cast<int>(role)]; }

    /// No pointer of the caller is kept but those of its pools: pairs are copied.
    template <class F>
    bool enqueue(int group, const index_pair* pairs, int n, stream& on, F work) noexcept try {
        if (cold_bytes(group) == 0) return false;
        on.calls.push_back([p = pools_[static_cast<std::size_t>(group)],
                            all = std::vector<index_pair>(pairs, pairs + n), work = std::move(work)] {
            for (const index_pair pair : all) work(p, pair);
        });
        return true;
    } catch (const std::bad_alloc&) {
        return false;
    }
    template <class F>
    void each_block(const pool_description& p, int page, std::byte* cold, F&& f) const {
        std::byte* hot = p.base + static_cast<std::size_t>(page) * p.bytes();
        for (int layer = 0; layer < p.layers; ++layer)
            for (const auto role : {kvq::tensor::key, kvq::tensor::value})
                for (int head = 0; head < p.heads; ++head) {
                    const kvq::block_shape s{role, p.tokens, p.dim};
                    f(of(role), s, kvq::block_id{layer, head}, hot, cold);
                    hot += 2 * p.values_of_head();
                    cold += of(role).block_bytes(s);
                }
    }

    kvq::format formats_[2];
    std::vector<pool_description> pools_;
};

double relative_error(const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
    double error = 0, power = 0;
    for (std::size_t i = 0; i < a.size(); i += 2) {
        std::uint16_t x, y;
        std::memcpy(&x, a.data() + i, 2);
        std::memcpy(&y, b.data() + i, 2);
        const double u = static_cast<double>(kvq::float16::to_float(x)),
                     v = static_cast<double>(kvq::float16::to_float(y));
        error += (u - v) * (u - v);
        power += u * u;
    }
    return error / power;
}

}  // namespace

int main() {
    // Two groups of layers, as a model with sliding windows has them, in pages of 32 tokens.
    const pool_description shapes[2] = {{nullptr, 8, 3, 2, 32, 64}, {nullptr, 8, 1, 4, 32, 128}};
    std::vector<pool_description> pools(shapes, shapes + 2);
    std::vector<std::vector<std::byte>> hot, cold, before;
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (pool_description& p : pools) {
        hot.emplace_back(p.bytes() * static_cast<std::size_t>(p.pages));
        for (std::size_t i = 0; i < hot.back().size(); i += 2) {
            const std::uint16_t bits = kvq::float16(normal(random)).bits;
            std::memcpy(hot.back().data() + i, &bits, 2);
        }
        before.push_back(hot.back());
        p.base = hot.back().data();
    }

    const auto four_bits = kvq::make_formats<kvq::kivi<4, 64>, kvq::scalar>();
    kvq_codec codec(four_bits.keys, four_bits.values);
    bool good = codec.configure(pools.data(), 2) && codec.cold_bytes(2) == 0;
    stream on;
    for (int group = 0; group < 2 && good; ++group) {
        const auto g = static_cast<std::size_t>(group);
        const std::size_t bytes = codec.cold_bytes(group);
        cold.emplace_back(3 * bytes);
        // Pages 5, 0 and 7 become cold; others take their place; then they come back to pages 1, 2 and 3.
        {
            const std::vector<index_pair> out{{0, 5}, {1, 0}, {2, 7}};
            good = codec.encode(group, cold[g].data(), out.data(), 3, on) && good;
        }  // the pairs are gone before the stream runs
        on.synchronize();
        for (const int page : {5, 0, 7})
            std::memset(pools[g].base + static_cast<std::size_t>(page) * pools[g].bytes(), 0,
                        pools[g].bytes());
        const std::vector<index_pair> in{{1, 0}, {2, 1}, {3, 2}};
        good = codec.decode(group, cold[g].data(), in.data(), 3, on) && good;
        on.synchronize();
        const auto page = [&](const std::vector<std::byte>& from, int i) {
            const auto first = from.begin() + static_cast<std::ptrdiff_t>(pools[g].bytes()) * i;
            return std::vector<std::byte>(first, first + static_cast<std::ptrdiff_t>(pools[g].bytes()));
        };
        double worst = 0;
        const int was[] = {5, 0, 7};
        for (int i = 0; i < 3; ++i)
            worst = std::max(worst, relative_error(page(before[g], was[i]), page(hot[g], i + 1)));
        good = good && worst > 0 && worst < 1e-2;
        for (const int untouched : {4, 6})
            good = good && page(before[g], untouched) == page(hot[g], untouched);
        std::printf(
            "group %d: a page of %zu bytes is %zu when cold (%.2f times smaller), squared error %.1e\n",
            group, pools[g].bytes(), bytes,
            static_cast<double>(pools[g].bytes()) / static_cast<double>(bytes), worst);
    }
    std::printf("%s\n", good ? "pages came back, others stayed" : "WRONG");
    return good ? 0 : 1;
}
