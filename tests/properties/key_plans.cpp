// SPDX-License-Identifier: MIT
// Keys have the plan of their sequence's own first tokens: whatever the history, pages are those of a cache
// that was given the plan, or even widths, and attention is that of their values.
#include <doctest/doctest.h>

#include <cmath>
#include <kvq/cache/page_list.hpp>
#include <kvq/estimate/budget.hpp>
#include <kvq/estimate/footprint.hpp>
#include <kvq/io/page_transfer.hpp>
#include <kvq/io/restore.hpp>
#include <kvq/io/save.hpp>
#include <kvq/policy/prefix_cache.hpp>

#include "support/caches.hpp"
#include "support/memory.hpp"
#include "support/messages.hpp"

namespace key_plan_tests {

namespace {

using kvq::key_statistics;
using kvq::tensor;

/// Channels differ by up to `spread`; which are large depends on the kind of text.
test::stream text_of(test::generator& random, const kvq::cache_shape& shape, int tokens, int kind,
                     float spread = 16.0f) {
    test::stream s(random, shape, tokens);
    for (int t = 0; t < tokens; ++t)
        for (int h = 0; h < shape.kv_heads; ++h)
            for (int c = 0; c < shape.head_dim; ++c)
                if ((c + h) % 4 == kind % 4) s.k.view().at(t, h)[c] *= spread;
    return s;
}

kvq::cache_options options_with(test::generator& random, key_statistics statistics, int tokens) {
    kvq::cache_options o;
    o.keys = {test::made<test::usual>(kvq::low2::keys{})};
    o.values = {test::made<test::usual>(kvq::std4::values{})};
    o.sinks = random.pick(std::vector<int>{0, 1, 4});
    o.recent = random.pick(std::vector<int>{0, 7, 40});
    o.rollback = random.pick(std::vector<int>{0, 8, 50});
    o.page_tokens = random.pick(std::vector<int>{32, 64});
    o.statistics = statistics;
    o.statistics_tokens = tokens;
    return o;
}
kvq::cache_shape small_shape(test::generator& random) {
    return {2, random.between(1, 2), 8 * random.between(2, 5), 16};
}

std::vector<float> values_of(const kvq::cache& cache, const kvq::sequence& s, int layer, tensor role) {
    const kvq::cache_shape& shape = cache.shape(layer);
    const int n = s.tokens(layer);
    std::vector<float> x(static_cast<std::size_t>(n) *
                         static_cast<std::size_t>(shape.kv_heads * shape.dim(role)));
    s.dequantize(layer, role, 0, kvq::token_view<float>(x.data(), n, shape.kv_heads, shape.dim(role)));
    return x;
}
int planned_pages(const kvq::sequence& s, int layer) {
    int n = 0;
    for (int e = 0; e < s.pages(layer).entries(); ++e)
        n += static_cast<bool>(s.pages(layer).at(e).keys->plan);
    return n;
}
bool same_plan(const kvq::page& a, const kvq::page& b) {
    return static_cast<bool>(a.plan) == static_cast<bool>(b.plan) &&
           (!a.plan || a.plan.record().fingerprint == b.plan.record().fingerprint);
}
void check_equal(const kvq::sequence& a, const kvq::sequence& b, int layers) {
    for (int layer = 0; layer < layers; ++layer) {
        const kvq::layer_pages x = a.pages(layer), y = b.pages(layer);
        REQUIRE(x.entries() == y.entries());
        for (int e = 0; e < x.entries(); ++e) {
            const kvq::page &p = *x.at(e).keys, &q = *y.at(e).keys;
            CHECK(x.at(e).tokens == y.at(e).tokens);
            CHECK((p.format == q.format && same_plan(p, q)));
            if (p.format != 0) CHECK((p.bytes == q.bytes && std::memcmp(p.data(), q.data(), p.bytes) == 0));
        }
    }
}

/// Against softmax in double over the values of the pages.
void check_attention(test::generator& random, const kvq::cache& cache, const kvq::sequence& s, int layer) {
    const kvq::cache_shape& shape = cache.shape(layer);
    const int n = s.tokens(layer), group = 2, heads = shape.kv_heads * group, dim = shape.head_dim,
              values = shape.dim(tensor::value);
    if (n == 0) return;
    const std::vector<float> k = values_of(cache, s, layer, tensor::key),
                             v = values_of(cache, s, layer, tensor::value);
    test::tensor<float> q = test::random_tensor(random, 1, heads, dim), out(1, heads, values);
    for (int h = 0; h < heads; ++h)
        for (int c = 0; c < dim; ++c) q.view().at(0, h)[c] *= 0.2f;
    s.attend(layer, q.slice(0, 1),
             kvq::output_view(kvq::token_view<float>(out.view().at(0, 0), 1, heads, values)));
    for (int h = 0; h < heads; ++h) {
        std::vector<double> weights;
        double most = -1e300, sum = 0.0;
        for (int t = 0; t < n; ++t) {
            double score = 0.0;
            for (int c = 0; c < dim; ++c)
                score += static_cast<double>(q.view().at(0, h)[c]) *
                         static_cast<double>(
                             k[static_cast<std::size_t>((t * shape.kv_heads + h / group) * dim + c)]);
            weights.push_back(score / std::sqrt(static_cast<double>(dim)));
            most = std::max(most, weights.back());
        }
        for (double& w : weights) sum += w = std::exp(w - most);
        for (int c = 0; c < values; ++c) {
            double expected = 0.0;
            for (int t = 0; t < n; ++t)
                expected += weights[static_cast<std::size_t>(t)] / sum *
                            static_cast<double>(
                                v[static_cast<std::size_t>((t * shape.kv_heads + h / group) * values + c)]);
            CHECK(std::abs(expected - static_cast<double>(out.view().at(0, h)[c])) < 5e-3);
        }
    }
}

kvq::sequence appended(kvq::cache& cache, const test::stream& s, int tokens) {
    kvq::sequence made = cache.new_sequence();
    test::append(made, cache.layer_count(), s, 0, tokens);
    return made;
}
kvq::sequence restored(kvq::cache& to, const kvq::sequence& s) {
    std::vector<std::byte> bytes;
    kvq::save(s, [&](const void* data, std::size_t n) {
        const auto* from = static_cast<const std::byte*>(data);
        bytes.insert(bytes.end(), from, from + n);
    });
    std::size_t at = 0;
    return kvq::restore(to, [&](void* data, std::size_t n) {
        n = std::min(n, bytes.size() - at);
        std::memcpy(data, bytes.data() + at, n);
        at += n;
        return n;
    });
}
kvq::sequence sent(kvq::cache& to, const kvq::sequence& s) {
    kvq::page_receiver receiver(to);
    for (int layer = 0; layer < to.layer_count(); ++layer) {
        std::vector<std::byte> bytes;
        kvq::send_pages(s, layer, [&](const void* data, std::size_t n) {
            const auto* from = static_cast<const std::byte*>(data);
            bytes.insert(bytes.end(), from, from + n);
        });
        std::size_t at = 0;
        std::vector<std::byte> storage;
        while (at < bytes.size())
            receiver.accept(kvq::read_page(
                [&](void* data, std::size_t n) {
                    n = std::min(n, bytes.size() - at);
                    std::memcpy(data, bytes.data() + at, n);
                    at += n;
                    return n;
                },
                storage));
    }
    return receiver.finish(s.tokens());
}

}  // namespace

TEST_CASE("key plans: values are those of a cache that was given the plan") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 6; ++round) {
        const kvq::cache_shape shape = small_shape(random);
        const int tokens = random.between(64, 200), total = 320;
        const kvq::cache_options own = options_with(random, key_statistics::own, tokens);
        const test::stream s = text_of(random, shape, total, round);
        kvq::cache cache(shape, own);
        kvq::sequence sequence = cache.new_sequence();
        for (int at = 0; at < total;) {
            const int n = std::min(total - at, random.between(1, 90));
            test::append(sequence, shape.layers, s, at, n);
            at += n;
            for (int layer = 0; layer < shape.layers; ++layer)
                if (at < tokens) CHECK(sequence.pages(layer).at(0).keys->format == 0);
        }
        CHECK(planned_pages(sequence, 0) > 0);
        check_equal(sequence, appended(cache, s, total), shape.layers);

        kvq::calibration statistics(shape);
        // As 16-bit pages hold them.
        const test::tensor<kvq::float16> halves = test::converted<kvq::float16>(s.k, test::order::nhd);
        for (int layer = 0; layer < shape.layers; ++layer)
            statistics.add_keys(layer, halves.slice(0, tokens));
        kvq::cache_options given = own;
        given.statistics = key_statistics::off;
        given.keys = {test::made_from<test::usual, kvq::low2::keys>(statistics)};
        kvq::cache with_plan(shape, given);
        const kvq::sequence expected = appended(with_plan, s, total);
        for (int layer = 0; layer < shape.layers; ++layer) {
            const auto x = values_of(cache, sequence, layer, tensor::key),
                       y = values_of(with_plan, expected, layer, tensor::key);
            for (int e = 0; e < sequence.pages(layer).entries(); ++e) {
                const auto entry = sequence.pages(layer).at(e);
                if (!entry.keys->plan) continue;
                const std::size_t row = static_cast<std::size_t>(shape.kv_heads * shape.head_dim),
                                  first = static_cast<std::size_t>(entry.first_token) * row;
                CHECK(std::memcmp(x.data() + first, y.data() + first,
                                  static_cast<std::size_t>(entry.tokens) * row * sizeof(float)) == 0);
            }
            check_attention(random, cache, sequence, layer);
        }
    }
}

TEST_CASE("key plans: sequences under plans of their own, through random histories") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 5; ++round) {
        const kvq::cache_shape shape = small_shape(random);
        const int tokens = random.between(64, 150), longest = 400;
        const auto kind = random.one_in(4) ? key_statistics::shared : key_statistics::own;
        kvq::cache_options options = options_with(random, kind, tokens);
        options.rotary = {kvq::rotary_embedding{.dims = 0}};
        std::vector<test::stream> texts;
        for (int i = 0; i < 3; ++i) texts.push_back(text_of(random, shape, longest, i));
        kvq::cache cache(shape, options), other(shape, options);
        struct held {
            kvq::sequence sequence;
            int text, longest;
            bool exact = true;  // as if its tokens had been appended at once
        };
        std::vector<held> all;
        for (int i = 0; i < 3; ++i) all.push_back({cache.new_sequence(), i, 0});
        for (int step = 0; step < 40; ++step) {
            held& h = all[static_cast<std::size_t>(random.between(0, static_cast<int>(all.size()) - 1))];
            const int now = h.sequence.tokens();
            switch (random.between(0, 7)) {
                case 0:
                    if (all.size() < 6) all.push_back({h.sequence.fork(), h.text, h.longest, h.exact});
                    break;
                case 1: {  // within the rollback
                    const int to =
                        std::max(0, std::max(now - random.between(0, 9), h.longest - options.rollback));
                    if (to < now) h.sequence.trim(to);
                    break;
                }
                case 2:
                    if (random.one_in(3)) {
                        const int to = random.between(0, now);
                        h.exact = h.exact && to >= h.longest - options.rollback;
                        h.sequence.trim(to);
                        if (to == 0) h.exact = true;
                        if (to == 0) h.longest = 0;
                    }
                    break;
                case 3:
                    if (kind == key_statistics::own) h.sequence = restored(cache, h.sequence);
                    break;
                case 4:
                    if (kind == key_statistics::own) h.sequence = sent(cache, h.sequence);
                    break;
                case 5:
                    if (random.one_in(3) && now > 10) {
                        const int first = random.between(0, now - 5);
                        h.sequence.erase(first, random.between(first, now));
                        h.exact = false;
                    }
                    break;
                default: {
                    const int n = std::min(longest - now, random.between(1, 90));
                    if (n > 0 && random.one_in(4) && n <= 30) {
                        for (int layer = 0; layer < shape.layers; ++layer)
                            h.sequence.append_draft(layer,
                                                    texts[static_cast<std::size_t>(h.text)].k.slice(now, n),
                                                    texts[static_cast<std::size_t>(h.text)].v.slice(now, n));
                        std::vector<int> path;
                        for (int i = 0; i < n - 1; ++i) path.push_back(i);
                        h.sequence.keep(path);
                    } else if (n > 0) {
                        test::append(h.sequence, shape.layers, texts[static_cast<std::size_t>(h.text)], now,
                                     n);
                    }
                }
            }
            h.longest = std::max(h.longest, h.sequence.tokens());
        }
        for (const held& h : all) {
            INFO("text ", h.text, ", ", h.sequence.tokens(), " tokens, exact ", h.exact);
            if (h.exact && kind == key_statistics::own) {
                kvq::sequence expected = other.new_sequence();
                const int n = h.sequence.tokens();
                test::append(expected, shape.layers, texts[static_cast<std::size_t>(h.text)], 0, n);
                check_equal(h.sequence, expected, shape.layers);
            }
            for (int layer = 0; layer < shape.layers; ++layer)
                check_attention(random, cache, h.sequence, layer);
        }
        // A batch of sequences under several plans has the outputs of each one alone.
        test::tensor<float> q = test::random_tensor(random, 1, 2 * shape.kv_heads, shape.head_dim);
        std::vector<test::tensor<float>> together, alone;
        std::vector<kvq::attention_request> batch;
        for (const held& h : all)
            if (h.sequence.tokens() > 0) {
                together.emplace_back(1, 2 * shape.kv_heads, shape.dim(tensor::value));
                alone.emplace_back(1, 2 * shape.kv_heads, shape.dim(tensor::value));
            }
        const auto view = [&](test::tensor<float>& x) {
            return kvq::token_view<float>(x.view().at(0, 0), 1, 2 * shape.kv_heads, shape.dim(tensor::value));
        };
        std::size_t i = 0;
        for (const held& h : all)
            if (h.sequence.tokens() > 0) {
                h.sequence.attend(0, q.slice(0, 1), view(alone[i]));
                batch.push_back({&h.sequence, q.slice(0, 1), view(together[i++])});
            }
        kvq::workspace space;
        cache.attend(0, batch, kvq::causal{}, kvq::serial_executor{}, space);
        for (i = 0; i < together.size(); ++i)
            CHECK(std::memcmp(together[i].view().at(0, 0), alone[i].view().at(0, 0),
                              sizeof(float) * static_cast<std::size_t>(2 * shape.kv_heads *
                                                                       shape.dim(tensor::value))) == 0);
    }
}

/// A kind of text, as measured on TinyLlama: the logarithms of E[k^2] of channels have a variance of 1, some
/// channels have a mean that their keys hardly leave, and E[q^2] is about E[k^2]^0.8 var(k)^-0.45, off by a
/// factor whose logarithm has a variance of 0.45.
struct kind_of_text {
    std::vector<double> mean, deviation, query;  // [head * channels + channel]

    kind_of_text(test::generator& random, int channels) {
        for (int i = 0; i < channels; ++i) {
            const double power = std::exp(static_cast<double>(random.normal()));
            const double part = random.one_in(5) ? 0.1 : 0.7 + 0.3 * static_cast<double>(random.uniform());
            mean.push_back(std::sqrt(power * (1.0 - part)) * (random.one_in(2) ? 1.0 : -1.0));
            deviation.push_back(std::sqrt(power * part));
            query.push_back(std::sqrt(std::pow(power, 0.8) * std::pow(power * part, -0.45) *
                                      std::exp(0.67 * static_cast<double>(random.normal()))));
        }
    }
    /// Another kind, in which the logarithms of importances differ by this variance; 1: of no relation.
    kind_of_text other(test::generator& random, double variance) const {
        if (variance >= 1.0) return {random, static_cast<int>(mean.size())};
        kind_of_text made = *this;
        for (std::size_t i = 0; i < mean.size(); ++i) {
            const double change = std::sqrt(variance / 2.0);  // of a square: keys and queries have half of it
            const double of_keys = std::exp(0.5 * change * static_cast<double>(random.normal()));
            made.mean[i] *= of_keys;
            made.deviation[i] *= of_keys;
            made.query[i] *= std::exp(0.5 * change * static_cast<double>(random.normal()));
        }
        return made;
    }
    void write_keys(test::generator& random, test::stream& to, int first, int n) const {
        for (int t = first; t < first + n; ++t)
            for (std::size_t i = 0; i < mean.size(); ++i)
                to.k.view().at(t, 0)[i] =
                    static_cast<float>(mean[i] + deviation[i] * static_cast<double>(random.normal()));
    }
};

/// Sum over heads and queries of the KL divergence of the weights of keys y from those of keys x,
/// [token][head][channel].
double divergence(test::generator random, const kind_of_text& of, std::size_t dim,
                  const std::vector<float>& x, const std::vector<float>& y) {
    const std::size_t row = of.mean.size();
    const std::size_t tokens = x.size() / row;
    double sum = 0.0;
    for (std::size_t h = 0; h < row; h += dim)
        for (int i = 0; i < 16; ++i) {
            std::vector<double> q, a(tokens), b(tokens);
            double spread = 0.0;
            for (std::size_t c = 0; c < dim; ++c) {
                q.push_back(of.query[h + c] * static_cast<double>(random.normal()));
                spread += std::pow(of.query[h + c] * of.deviation[h + c], 2);
            }
            double top_a = -1e300, top_b = -1e300, sum_a = 0.0, sum_b = 0.0;
            for (std::size_t t = 0; t < tokens; ++t) {
                for (std::size_t c = 0; c < dim; ++c) {
                    a[t] += q[c] * static_cast<double>(x[t * row + h + c]);
                    b[t] += q[c] * static_cast<double>(y[t * row + h + c]);
                }
                a[t] *= 2.0 / std::sqrt(spread);  // scores with a deviation of 2
                b[t] *= 2.0 / std::sqrt(spread);
                top_a = std::max(top_a, a[t]);
                top_b = std::max(top_b, b[t]);
            }
            for (std::size_t t = 0; t < tokens; ++t) {
                sum_a += std::exp(a[t] - top_a);
                sum_b += std::exp(b[t] - top_b);
            }
            for (std::size_t t = 0; t < tokens; ++t) {
                const double log_a = a[t] - top_a - std::log(sum_a), log_b = b[t] - top_b - std::log(sum_b);
                sum += std::exp(log_a) * (log_a - log_b);
            }
        }
    return sum;
}

TEST_CASE("key plans: where the kind of text changes they cost at most 2 % of divergence, mostly they gain") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    constexpr int heads = 6, channels = 64, planned = 256, tokens = 640;
    const kvq::cache_shape shape{1, heads, channels, 8};
    const std::vector<std::pair<std::string, kvq::format>> presets{
        {"low2", test::made<test::usual>(kvq::low2::keys{})},
        {"low3", test::made<test::usual>(kvq::low3::keys{})}};
    for (const auto& [name, keys] : presets)
        for (const double variance : {0.0, 0.3, 0.6, 1.0}) {
            const kind_of_text first(random, heads * channels), second = first.other(random, variance);
            test::stream s(random, shape, tokens);
            first.write_keys(random, s, 0, planned);
            second.write_keys(random, s, planned, tokens - planned);
            std::vector<float> exact;
            double of[2];
            for (const auto statistics : {key_statistics::off, key_statistics::own}) {
                kvq::cache_options options;
                options.keys = {keys};
                options.values = {test::made<test::usual>(kvq::std4::values{})};
                options.page_tokens = 64;
                options.statistics = statistics;
                options.statistics_tokens = planned;
                kvq::cache cache(shape, options);
                kvq::sequence sequence = cache.new_sequence();
                test::append(sequence, 1, s, 0, tokens);
                const std::vector<float> held = values_of(cache, sequence, 0, tensor::key);
                exact.assign(s.k.values().begin(), s.k.values().end());
                of[statistics == key_statistics::own] =
                    divergence(test::generator(seed), second, channels, exact, held);
            }
            INFO(name, ", variance ", variance, ": ", of[1], " with plans, ", of[0], " with even widths");
            CHECK(of[1] <= 1.02 * of[0]);
            if (variance < 0.5) CHECK(of[1] < 0.9 * of[0]);
        }
}

/// One of its calls has no memory.
struct failing_executor {
    int left = 0;
    int concurrency() const { return 2; }
    template <class F>
    void parallel_for(int n, F&& f) {
        if (left-- == 0) throw std::bad_alloc();
        for (int i = 0; i < n; ++i) f(i);
    }
};

TEST_CASE("key plans: a step that fails leaves no shared plan") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{1, 2, 32, 16};
    const kvq::cache_options options = options_with(random, key_statistics::shared, 100);
    const test::stream failing = text_of(random, shape, 180, 0), text = text_of(random, shape, 180, 1);
    kvq::cache other(shape, options);
    const kvq::sequence expected = appended(other, text, 180);
    test::tensor<float> q = test::random_tensor(random, 180, 4, 32), out(180, 4, 16);
    int calls = 0;
    for (bool failed = true; failed; ++calls) {
        kvq::cache cache(shape, options);
        kvq::sequence tried = cache.new_sequence();
        kvq::workspace space;
        failed = false;
        try {
            tried.prefill(0, failing.k.slice(0, 180), failing.v.slice(0, 180), q.slice(0, 180), out.view(),
                          kvq::causal{}, failing_executor{calls}, space);
        } catch (const std::bad_alloc&) {
            failed = true;
        }
        if (failed) check_equal(appended(cache, text, 180), expected, 1);
    }
    CHECK(calls >= 3);  // writing, attention, quantizing
}

TEST_CASE("key plans: pages of another kind of text have even widths") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{1, 2, 32, 0};
    kvq::cache_options options = options_with(random, key_statistics::own, 128);
    options.page_tokens = 64;
    options.sinks = 0;
    const test::stream first = text_of(random, shape, 256, 0), second = text_of(random, shape, 256, 1);
    kvq::cache cache(shape, options);
    options.statistics = key_statistics::off;
    kvq::cache even(shape, options);
    kvq::sequence s = cache.new_sequence(), t = even.new_sequence();
    for (kvq::sequence* to : {&s, &t}) {
        test::append(*to, 1, first, 0, 256);
        test::append(*to, 1, second, 0, 256);
    }
    for (int e = 0; e < s.pages(0).entries(); ++e) {
        const auto entry = s.pages(0).at(e), other = t.pages(0).at(e);
        if (entry.keys->format == 0) continue;
        CHECK(static_cast<bool>(entry.keys->plan) == (entry.first_token < 256));
        CHECK(entry.keys->bytes == other.keys->bytes);
        if (!entry.keys->plan)
            CHECK(std::memcmp(entry.keys->data(), other.keys->data(), entry.keys->bytes) == 0);
    }
    check_attention(random, cache, s, 0);
}

TEST_CASE("key plans: layers that differ, and those without a plan") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const std::vector<kvq::layer> layers{kvq::full_attention({2, 16}), kvq::sliding_attention(100, {1, 32}),
                                         kvq::sliding_attention(40, {1, 32}), kvq::full_attention({1, 24})};
    kvq::cache_options options = options_with(random, key_statistics::own, 150);
    options.page_tokens = 32;
    kvq::cache cache(layers, options);
    CHECK((cache.plan_tokens(0) == 150 && cache.plan_tokens(1) == 100 && cache.plan_tokens(2) == 0));
    kvq::sequence once = cache.new_sequence(), pieces = cache.new_sequence();
    std::vector<test::stream> texts;
    for (int layer = 0; layer < 4; ++layer)
        texts.push_back(
            text_of(random, {4, cache.shape(layer).kv_heads, cache.shape(layer).head_dim, 0}, 330, layer));
    for (int layer = 0; layer < 4; ++layer) {
        const test::stream& t = texts[static_cast<std::size_t>(layer)];
        once.append(layer, t.k.slice(0, 330), t.v.slice(0, 330));
        for (int at = 0; at < 330;) {
            const int n = std::min(330 - at, random.between(1, 50));
            pieces.append(layer, t.k.slice(at, n), t.v.slice(at, n));
            at += n;
        }
    }
    check_equal(once, pieces, 4);
    CHECK((planned_pages(once, 0) > 0 && planned_pages(once, 1) > 0 && planned_pages(once, 2) == 0));
    const kvq::sequence back = restored(cache, once);
    check_equal(once, back, 4);

    // Caches with and without plans read each other's sequences.
    kvq::cache_options plain = options;
    plain.statistics = kvq::key_statistics::off;
    kvq::cache off(layers, plain);
    for (const int n : {90, 330}) {
        kvq::sequence from = cache.new_sequence(), to = off.new_sequence();
        for (int layer = 0; layer < 4; ++layer) {
            const test::stream& t = texts[static_cast<std::size_t>(layer)];
            from.append(layer, t.k.slice(0, n), t.v.slice(0, n));
            to.append(layer, t.k.slice(0, n), t.v.slice(0, n));
        }
        for (const bool by_message : {false, true}) {
            const kvq::sequence out = by_message ? sent(off, from) : restored(off, from);
            CHECK(out.pages(0).at(options.sinks > 0 ? 1 : 0).keys->format == 1);
            check_equal(restored(off, out), out, 4);
            if (n == 90) check_equal(out, to, 4);
            for (const int layer : {0, 3}) check_attention(random, off, out, layer);
            kvq::sequence in = by_message ? sent(cache, to) : restored(cache, to);
            check_equal(restored(cache, in), in, 4);
            for (const int layer : {0, 3}) check_attention(random, cache, in, layer);
        }
    }

    // Pages in memory of the caller are read by their plan.
    kvq::page_list list(cache, 0);
    for (int e = 0; e < once.pages(0).entries(); ++e) {
        const auto entry = once.pages(0).at(e);
        list.add({entry.keys->data(), entry.values->data(), entry.keys->format, entry.values->format,
                  entry.keys->tokens, entry.values->tokens, entry.skip, entry.tokens, entry.shift,
                  cache.table(tensor::key).of(*entry.keys)});
        if (entry.keys->format == 0) continue;
        CHECK(test::contains(test::message_of([&] {
                                 list.add({entry.keys->data(), entry.values->data(), entry.keys->format,
                                           entry.values->format, entry.keys->tokens, entry.values->tokens,
                                           entry.skip, entry.tokens, entry.shift});
                             }),
                             "not read without their plan"));
    }
    const test::tensor<float> q = test::random_tensor(random, 1, 4, 16);
    test::tensor<float> in_sequence(1, 4, 16), in_list(1, 4, 16);
    kvq::workspace space;
    once.attend(0, q.slice(0, 1), in_sequence.view());
    list.attend(q.slice(0, 1), in_list.view(), kvq::causal{}, kvq::serial_executor{}, space);
    CHECK(in_sequence.values() == in_list.values());

    // A plan of other heads is refused before a page is read.
    kvq::cache other({kvq::full_attention({1, 16})}, options);
    kvq::detail::found_identity found = kvq::detail::find_identity(
        other.table(tensor::key),
        kvq::detail::identity_of_plan(once.pages(0).at(once.pages(0).entries() / 2).keys->plan));
    REQUIRE((found.index == 1 && found.plan));
    CHECK(test::contains(test::message_of([&] {
                             found.plan.functions().check(found.plan.scheme(), other.shape(0), tensor::key);
                         }),
                         "1 heads"));
    for (const char* const text : {"", "2x", "2x16", "2x16:", "0x16:", "2x16:01", "99999999999x2:0"})
        CHECK_THROWS_AS(other.table(tensor::key)[1].functions().plans->from_text(other.table(tensor::key)[1],
                                                                                 text, std::strlen(text)),
                        kvq::error);

    // Another format from now on: its keys wait for a plan as well.
    kvq::cache_options later = options;
    later.keys = {test::made<test::usual>(kvq::int8{}), test::made<test::usual>(kvq::low2::keys{})};
    kvq::cache turns(layers, later);
    const test::stream& of_first = texts[0];
    kvq::sequence before = turns.new_sequence();
    before.append(0, of_first.k.slice(0, 140), of_first.v.slice(0, 140));
    turns.commit_to(tensor::key, 1);
    kvq::sequence after = turns.new_sequence();
    after.append(0, of_first.k.slice(0, 140), of_first.v.slice(0, 140));
    CHECK((before.usage().quantized > 0 && after.usage().quantized == 0));
    for (kvq::sequence* const s : {&before, &after})
        s->append(0, of_first.k.slice(140, 190), of_first.v.slice(140, 190));
    CHECK((planned_pages(before, 0) == 0 && planned_pages(after, 0) > 0));
    for (const kvq::sequence* const s : {&before, &after}) {
        check_attention(random, turns, *s, 0);
        check_equal(restored(turns, *s), *s, 1);
    }

    // Keys that turn to another format and back have the plan of their pages again, as restored ones have.
    for (const int key : {0, 1}) {
        kvq::requantize_request later_pages{.key = key, .last_token = 0};
        later_pages.new_pages = true;
        (void)turns.requantize(after, later_pages);
    }
    CHECK(kvq::detail::sequence_access::tables(after)[0].shows_plan());
    kvq::sequence again = restored(turns, after);
    for (kvq::sequence* const s : {&after, &again})
        s->append(0, texts[0].k.slice(0, 120), texts[0].v.slice(0, 120));
    check_equal(again, after, 1);

    kvq::cache_options few = options;
    few.statistics_tokens = 63;
    CHECK(test::contains(test::message_of([&] { kvq::cache none(layers, few); }), "63"));
}

TEST_CASE("key plans: the budget is what the hungriest step takes") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 4; ++round) {
        const kvq::cache_shape shape{random.between(1, 2), 1, 8, 0};
        kvq::cache_options options = options_with(random, key_statistics::own, random.between(64, 120));
        const kvq::budget_use use{.tokens = random.between(40, 260), .chunk = random.between(1, 40)};
        INFO(use.tokens, " tokens in chunks of ", use.chunk, ", plans of ", options.statistics_tokens,
             ", recent ", options.recent, ", pages of ", options.page_tokens, ", rollback ",
             options.rollback);
        kvq::cache cache(shape, options);
        const test::stream s = text_of(random, shape, 260, 0);
        std::vector<kvq::sequence> one;
        one.push_back(cache.new_sequence());
        std::size_t most = 0;
        for (int held = 0; held < use.tokens; ++held) {
            for (int n = 1; n <= std::min(use.chunk, use.tokens - held); ++n) {
                const kvq::step_request step{&one[0], n, 1};
                kvq::workspace space;
                cache.reserve(std::span(&step, 1), 1, 1, space);
                most = std::max(most, cache.bytes_in_use());
                one[0].release_reserved();
            }
            test::append(one[0], shape.layers, s, held, 1);
        }
        CHECK(kvq::budget(options, shape, use) == most);
    }
}

TEST_CASE("key plans: a footprint has what the step takes that makes one") {
    test::generator random(test::seed());
    for (const int page_tokens : {32, 128})
        for (const int chunk : {1, 100}) {
            test::counting_resource memory;
            kvq::cache_options options = options_with(random, key_statistics::own, 512);
            options.page_tokens = page_tokens;
            options.memory = &memory;
            const kvq::cache_shape shape{1, 2, 32, 0};
            kvq::cache cache(shape, options);
            const std::size_t before = memory.bytes();
            const test::stream s = text_of(random, shape, 700, 0);
            kvq::sequence sequence = cache.new_sequence();
            for (int at = 0; at < 700;) {
                const int n = std::min(chunk, 700 - at);
                memory.reset_peak();
                test::append(sequence, 1, s, at, n);
                at += n;
                INFO(page_tokens, " tokens per page, ", chunk, " in a step to ", at);
                const kvq::footprint_report f = kvq::footprint(cache, at, 1, {.chunk = chunk});
                CHECK(memory.peak() - before <= f.total + f.transient);
            }
        }
}

TEST_CASE("key plans: where memory runs out in the step that makes a plan, nothing has changed") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    test::counting_resource memory;
    const kvq::cache_shape shape{1, 2, 16, 0};
    kvq::cache_options options = options_with(random, key_statistics::own, 100);
    options.memory = &memory;
    kvq::cache cache(shape, options);
    const test::stream s = text_of(random, shape, 300, 0);
    kvq::sequence sequence = cache.new_sequence();
    test::append(sequence, 1, s, 0, 90);
    const kvq::sequence before = sequence.fork();
    const auto bytes = cache.bytes_in_use();
    test::fail_everywhere(
        memory, [&] { sequence.append(0, s.k.slice(90, 150), s.v.slice(90, 150)); },
        [&] {
            REQUIRE(cache.bytes_in_use() == bytes);
            REQUIRE(sequence.tokens() == 90);
            check_equal(sequence, before, 1);
        });
    CHECK(planned_pages(sequence, 0) > 0);
    kvq::sequence expected = cache.new_sequence();
    test::append(expected, 1, s, 0, 240);
    check_equal(sequence, expected, 1);
}

}  // namespace key_plan_tests
