// SPDX-License-Identifier: MIT
// Comparison family: double arithmetic. Erase, shift and splice move tokens and change no code: attention is
// that of the same keys rotated freshly, in the new order.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <kvq/cache/page_list.hpp>
#include <kvq/cache/sequence_access.hpp>
#include <kvq/io/page_transfer.hpp>
#include <kvq/policy/prefix_cache.hpp>
#include <kvq/policy/ring.hpp>
#include <map>
#include <set>

#include "support/attention_error.hpp"
#include "support/memory.hpp"
#include "support/saved.hpp"
#include "support/typed_cache.hpp"

using test::message_of;

namespace shifts_tests {

namespace {

// ---- rotations in double ---------------------------------------------------------------------------------

/// One of the rotary embeddings of these tests, and the same in double.
struct rotary_kind {
    kvq::rotary_embedding embedding;

    void operator()(double* x, std::int64_t by) const {
        const kvq::rotary_embedding& e = embedding;
        if (e.rotate) {  // as in rotary_of()
            const double a = 0.25 * static_cast<double>(by), y = x[1];
            x[1] = y * std::cos(a) - x[0] * std::sin(a);
            x[0] = x[0] * std::cos(a) + y * std::sin(a);
            return;
        }
        const int pairs = e.dims / 2;
        for (int j = 0; j < pairs; ++j) {
            const double f = e.frequencies.empty() ? std::pow(e.base, -2.0 * j / e.dims)
                                                   : e.frequencies[static_cast<std::size_t>(j)];
            const bool split = e.layout == kvq::rotary_layout::half_split;
            double& a = x[e.first_channel + (split ? j : 2 * j)];
            double& b = x[e.first_channel + (split ? j + pairs : 2 * j + 1)];
            const double angle = f * static_cast<double>(by), was = a;
            a = was * std::cos(angle) - b * std::sin(angle);
            b = b * std::cos(angle) + was * std::sin(angle);
        }
    }
};

rotary_kind rotary_of(test::generator& random, int head_dim) {
    rotary_kind r;
    kvq::rotary_embedding& e = r.embedding;
    const int kind = random.between(0, 5);
    if (kind == 0) return r;  // a layer without positions
    e.dims = random.one_in(2) ? head_dim / 2 * 2 : 2 * random.between(1, head_dim / 2);
    e.first_channel = random.between(0, head_dim - e.dims);
    if (random.one_in(2)) e.layout = kvq::rotary_layout::interleaved;
    e.base = random.one_in(2) ? 10000.0 : 500000.0;
    if (kind == 1) e.frequencies = kvq::llama3_frequencies(e.dims, e.base, {.original_context = 64.0});
    if (kind == 2)
        e.frequencies = kvq::yarn_frequencies(e.dims, e.base, {.factor = 4.0, .original_context = 64.0});
    if (kind == 3)
        e.rotate = [](float* x, int, std::int64_t by) {
            const double a = 0.25 * static_cast<double>(by), u = static_cast<double>(x[0]),
                         v = static_cast<double>(x[1]);
            x[1] = static_cast<float>(v * std::cos(a) - u * std::sin(a));
            x[0] = static_cast<float>(u * std::cos(a) + v * std::sin(a));
        };
    return r;
}

// ---- the model -------------------------------------------------------------------------------------------

/// A token of the text: its keys without rotation, and its values, of every layer, [layer][head][channel].
struct text_token {
    std::vector<double> k;
    std::vector<float> v;
};

/// A token of a sequence.
struct held_token {
    std::size_t text;                       // its index
    std::int64_t now;                       // its rotary position
    std::vector<std::int64_t> appended_at;  // those of its keys in the page, of every layer
    std::vector<float> rows[2];             // K and V as they were written, [layer][head][channel]
    std::vector<float> quantized[2];        // the same since they were quantized; zero: they were 16 bit
};

struct model {
    const kvq::cache_shape& shape;
    const std::vector<rotary_kind>& rotary;
    std::vector<text_token> text{};

    int row(kvq::tensor role) const { return shape.kv_heads * shape.dim(role); }

    std::size_t new_token(test::generator& random) {
        text_token t;
        for (int i = 0; i < shape.layers * row(kvq::tensor::key); ++i)
            t.k.push_back(static_cast<double>(random.normal()));
        for (int i = 0; i < shape.layers * row(kvq::tensor::value); ++i) t.v.push_back(random.normal());
        text.push_back(std::move(t));
        return text.size() - 1;
    }
    /// Keys of a token, as an engine rotates them at a position. [head][channel]
    std::vector<float> key(std::size_t token, int layer, std::int64_t position) const {
        std::vector<float> k(static_cast<std::size_t>(row(kvq::tensor::key)));
        for (int h = 0; h < shape.kv_heads; ++h) {
            std::vector<double> x(text[token].k.begin() + (layer * shape.kv_heads + h) * shape.head_dim,
                                  text[token].k.begin() + (layer * shape.kv_heads + h + 1) * shape.head_dim);
            rotary[static_cast<std::size_t>(layer)](x.data(), position);
            for (int c = 0; c < shape.head_dim; ++c)
                k[static_cast<std::size_t>(h * shape.head_dim + c)] =
                    static_cast<float>(x[static_cast<std::size_t>(c)]);
        }
        return k;
    }
    std::vector<float> value(std::size_t token, int layer) const {
        const auto first = text[token].v.begin() + layer * row(kvq::tensor::value);
        return {first, first + row(kvq::tensor::value)};
    }
};

const kvq::sequence& held_by(const kvq::sequence& s) { return s; }
const kvq::sequence& held_by(const kvq::ring& r) { return r.held(); }

/// By how much the keys of token t of a layer moved since they were written.
std::int64_t shift_of(const kvq::sequence& s, int layer, int t) {
    const kvq::layer_pages pages = s.pages(layer);
    return pages.at(pages.lower_bound(t + 1) - 1).shift;
}

/// A key of 16 bits that goes to a page whose keys moved takes the rotation of the page.
void rotate_key(const kvq::cache& cache, int layer, std::int64_t by, float* key) {
    const kvq::detail::rotation* const rotate = cache.rotations().at(layer);
    if (!rotate || by == 0) return;
    const int dim = cache.shape().head_dim, heads = cache.shape().kv_heads;
    kvq::detail::visit_float_type(cache.window().functions().value_type, [&]<class Window>(Window) {
        for (int c = 0; c < heads * dim; ++c) key[c] = static_cast<float>(Window(key[c]));
    });
    (*rotate)(key, heads, dim, by);
}

/// Appends tokens at the positions [sequence.tokens(), ...) to a sequence and to what the model says that it
/// holds.
/// Sequence: a ring, too.
template <class Sequence>
void append(Sequence& sequence, std::vector<held_token>& held, model& m,
            const std::vector<std::size_t>& tokens, std::int64_t position) {
    const auto n = static_cast<int>(tokens.size());
    const auto before = held.size();
    for (int t = 0; t < n; ++t)
        held.push_back({tokens[static_cast<std::size_t>(t)], position + t, {}, {}, {}});
    for (int layer = 0; layer < m.shape.layers; ++layer) {
        test::tensor<float> k(n, m.shape.kv_heads, m.shape.head_dim),
            v(n, m.shape.kv_heads, m.shape.dim(kvq::tensor::value));
        for (int t = 0; t < n; ++t) {
            const auto key = m.key(tokens[static_cast<std::size_t>(t)], layer, position + t);
            const auto value = m.value(tokens[static_cast<std::size_t>(t)], layer);
            std::copy(key.begin(), key.end(), k.view().at(t, 0));
            std::copy(value.begin(), value.end(), v.view().at(t, 0));
            auto& rows = held[before + static_cast<std::size_t>(t)].rows;
            rows[0].insert(rows[0].end(), key.begin(), key.end());
            rows[1].insert(rows[1].end(), value.begin(), value.end());
        }
        sequence.append(layer, k.view(), v.view());
        const kvq::sequence& s = held_by(sequence);
        const auto width = static_cast<std::size_t>(m.row(kvq::tensor::key));
        for (int t = 0; t < n; ++t) {
            held_token& token = held[before + static_cast<std::size_t>(t)];
            const std::int64_t shift = shift_of(s, layer, s.tokens(layer) - n + t);
            token.appended_at.push_back(position + t - shift);
            rotate_key(kvq::detail::sequence_access::cache(s), layer, -shift,
                       token.rows[0].data() + width * static_cast<std::size_t>(layer));
        }
    }
}

std::vector<std::size_t> new_tokens(model& m, test::generator& random, int n) {
    std::vector<std::size_t> tokens;
    for (int i = 0; i < n; ++i) tokens.push_back(m.new_token(random));
    return tokens;
}

/// The rows that the pages hold, without any rotation, and whether each is in 16 bit.
struct stored_rows {
    std::vector<float> x;  // [tokens][head][channel]
    std::vector<bool> window;
};
stored_rows stored(const kvq::cache& cache, const kvq::sequence& s, int layer, kvq::tensor role) {
    const kvq::cache_shape& shape = cache.shape();
    const int dim = shape.dim(role), heads = shape.kv_heads;
    stored_rows rows;
    const kvq::layer_pages pages = s.pages(layer);
    for (int e = 0; e < pages.entries(); ++e) {
        const auto entry = pages.at(e);
        const kvq::page& p = role == kvq::tensor::key ? *entry.keys : *entry.values;
        const kvq::block_shape block{role, p.tokens, dim};
        const kvq::format& f = cache.table(role)[p.format];
        std::vector<float> x(block.values() * static_cast<std::size_t>(heads)), scratch(block.values());
        for (int h = 0; h < heads; ++h)
            f.functions().dequantize(f.scheme(), block, {layer, h},
                                     p.data() + f.block_bytes(block) * static_cast<std::size_t>(h),
                                     kvq::float_type::fp32, x.data() + h * dim, heads * dim, scratch.data());
        rows.x.insert(rows.x.end(), x.begin() + entry.skip * heads * dim,
                      x.begin() + (entry.skip + entry.tokens) * heads * dim);
        rows.window.insert(rows.window.end(), static_cast<std::size_t>(entry.tokens), p.format == 0);
    }
    return rows;
}

/// The spans are what a layer may have.
void require_whole(const kvq::cache& cache, const kvq::sequence& s, int layer) {
    const auto& table = kvq::detail::sequence_access::tables(s)[static_cast<std::size_t>(layer)];
    int at = 0;
    for (int i = 0; i < table.size(); ++i) {
        const kvq::page_span& span = table[i];
        const bool committed = i < table.committed;
        REQUIRE(span.first_token == at);
        REQUIRE(
            kvq::detail::page_table::is_possible(span, committed, i == table.size() - 1, cache.geometry()));
        for (int role = 0; role < 2; ++role) {
            const kvq::page& p = *span.pages[role];
            if (committed) {
                REQUIRE(p.tokens == span.room);
            } else {
                REQUIRE(p.format == 0);
                REQUIRE(p.tokens >= span.tokens);
            }
        }
        at = span.end();
    }
    REQUIRE(at == table.tokens);
}

/// Compares what a sequence holds with the model: order, bits of rows that were quantized, lengths.
template <class Window>
void require_rows(const kvq::cache& cache, const kvq::sequence& s, std::vector<held_token>& held,
                  const model& m) {
    REQUIRE(s.tokens() == static_cast<int>(held.size()));
    for (int layer = 0; layer < m.shape.layers; ++layer) {
        REQUIRE(s.tokens(layer) == static_cast<int>(held.size()));
        require_whole(cache, s, layer);
        for (const auto role : {kvq::tensor::key, kvq::tensor::value}) {
            const stored_rows rows = stored(cache, s, layer, role);
            const auto n = static_cast<std::size_t>(m.row(role));
            REQUIRE(rows.x.size() == n * held.size());
            for (std::size_t t = 0; t < held.size(); ++t) {
                const float* const x = rows.x.data() + n * t;
                const float* const wanted =
                    held[t].rows[static_cast<int>(role)].data() + n * static_cast<std::size_t>(layer);
                std::vector<float>& all = held[t].quantized[static_cast<int>(role)];
                all.resize(n * static_cast<std::size_t>(m.shape.layers), 0.0f);
                float* const was = all.data() + n * static_cast<std::size_t>(layer);
                bool exact = true, known = false, same = true;
                double error = 0, size = 0;
                for (std::size_t c = 0; c < n; ++c) {
                    exact = exact && x[c] == static_cast<float>(Window(wanted[c]));
                    known = known || was[c] != 0.0f;
                    same = same && was[c] == x[c];
                    const double d = static_cast<double>(x[c]) - static_cast<double>(wanted[c]);
                    error += d * d;
                    size += static_cast<double>(wanted[c]) * static_cast<double>(wanted[c]);
                }
                if (exact) {
                    std::fill(was, was + n, 0.0f);  // 16 bit, perhaps again
                    continue;
                }
                INFO("layer ", layer, " token ", t, " of ", held.size(), " role ", static_cast<int>(role),
                     " window ", static_cast<bool>(rows.window[t]));
                REQUIRE((!known || same));
                if (!known) REQUIRE(error < 0.7 * size + 1e-3);
                std::copy(x, x + n, was);
            }
        }
    }
}

/// |out - reference| / sum of the sizes of its terms, the worst row; the reference takes the stored keys back
/// to no rotation, and rotates them to where the model says that they are, in double.
double attention_error(const kvq::cache& cache, const kvq::sequence& s, const std::vector<held_token>& held,
                       const model& m, int layer, const test::tensor<float>& q) {
    const kvq::cache_shape& shape = m.shape;
    const int dim = shape.head_dim, value_dim = shape.dim(kvq::tensor::value);
    const auto k = stored(cache, s, layer, kvq::tensor::key).x,
               v = stored(cache, s, layer, kvq::tensor::value).x;
    const auto rows = q.view();
    test::tensor<float> out(rows.tokens, rows.heads, value_dim);
    s.attend(layer, rows, out.view());
    std::vector<double> keys(k.begin(), k.end());
    for (std::size_t t = 0; t < held.size(); ++t)
        for (int h = 0; h < shape.kv_heads; ++h) {
            double* const x = keys.data() + (static_cast<int>(t) * shape.kv_heads + h) * dim;
            m.rotary[static_cast<std::size_t>(layer)](x,
                                                      -held[t].appended_at[static_cast<std::size_t>(layer)]);
            m.rotary[static_cast<std::size_t>(layer)](x, held[t].now);
        }
    double worst = 0;
    for (int t = 0; t < rows.tokens; ++t)
        for (int head = 0; head < rows.heads; ++head) {
            const int h = head / (rows.heads / shape.kv_heads);
            const int visible = static_cast<int>(held.size()) - rows.tokens + t + 1;
            std::vector<double> p(static_cast<std::size_t>(visible));
            double top = -1e300, sum = 0;
            for (int i = 0; i < visible; ++i) {
                double score = 0;
                for (int c = 0; c < dim; ++c)
                    score += static_cast<double>(rows.at(t, head)[c]) *
                             keys[static_cast<std::size_t>((i * shape.kv_heads + h) * dim + c)];
                p[static_cast<std::size_t>(i)] = score / std::sqrt(static_cast<double>(dim));
                top = std::max(top, p[static_cast<std::size_t>(i)]);
            }
            for (double& x : p) sum += x = std::exp(x - top);
            double difference = 0, size = 0;
            for (int c = 0; c < value_dim; ++c) {
                double wanted = 0, terms = 0;
                for (int i = 0; i < visible; ++i) {
                    const double x =
                        p[static_cast<std::size_t>(i)] / sum *
                        static_cast<double>(
                            v[static_cast<std::size_t>((i * shape.kv_heads + h) * value_dim + c)]);
                    wanted += x;
                    terms += std::fabs(x);
                }
                const double d = static_cast<double>(out.view().at(t, head)[c]) - wanted;
                difference += d * d;
                size += terms * terms;
            }
            const double error = std::sqrt(difference / size);
            if (!(error <= worst)) worst = error;
        }
    return worst;
}

kvq::sequence elsewhere(kvq::cache& cache, const kvq::sequence& s, int how) {
    if (how == 0) return s.fork();
    if (how == 1) return test::restored(cache, test::saved(s));
    kvq::page_receiver receiver(cache);
    for (int layer = 0; layer < cache.shape().layers; ++layer) {
        std::vector<std::byte> bytes;
        kvq::send_pages(s, layer, [&](const void* data, std::size_t n) {
            const auto* const p = static_cast<const std::byte*>(data);
            bytes.insert(bytes.end(), p, p + n);
        });
        std::size_t at = 0;
        while (at < bytes.size()) {
            std::vector<std::byte> page;
            receiver.accept(kvq::read_page(
                [&](void* to, std::size_t n) {
                    n = std::min(n, bytes.size() - at);
                    std::memcpy(to, bytes.data() + at, n);
                    at += n;
                    return n;
                },
                page));
        }
    }
    return receiver.finish(s.tokens());
}

/// Bytes and number of the pages that some sequences hold, each counted once.
std::size_t bytes_of(const std::vector<kvq::sequence>& sequences) {
    std::set<const kvq::page*> pages;
    std::size_t bytes = 0;
    const auto count = [&](const kvq::page_ref& p) {
        if (p && pages.insert(p.get()).second) bytes += kvq::page_pool::allocation(p->bytes);
    };
    for (const kvq::sequence& s : sequences)
        for (const auto& table : kvq::detail::sequence_access::tables(s))
            for (const kvq::page_span& span : table.spans)
                for (int role = 0; role < 2; ++role) {
                    count(span.pages[role]);
                    count(span.copies[role]);
                }
    return bytes;
}

}  // namespace

TEST_CASE_TEMPLATE(
    "random appends, erases, shifts, splices, trims, files and messages: attention is that of the new order",
    C, KVQ_TEST_FEW_CACHES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const int longest = 120, rounds = test::rounds(2), steps = 300;
    double worst = 0;
    for (int round = 0; round < rounds; ++round) {
        kvq::cache_shape shape;
        shape.layers = C::key_table::size;
        shape.kv_heads = random.between(1, 2);
        shape.head_dim = random.between(12, 40);
        shape.value_dim = random.between(12, 40);
        auto options = test::random_options(random);
        options.page_tokens = random.pick(std::vector<int>{4, 7, 8, 16, 33});
        options.repack = 0.0f;  // no code changes
        options.layers = test::rotate_formats<C>(shape.layers);
        std::vector<rotary_kind> rotary;
        for (int layer = 0; layer < shape.layers; ++layer) {
            rotary.push_back(rotary_of(random, shape.head_dim));
            options.rotary.push_back(rotary.back().embedding);
        }
        auto cache = test::make_cache<C>(shape, options);
        model m{shape, rotary};
        std::vector<kvq::sequence> sequences;
        std::vector<std::vector<held_token>> held(3);
        for (int i = 0; i < 3; ++i) sequences.push_back(cache.new_sequence());
        for (int step = 0; step < steps; ++step) {
            INFO("round ", round, " step ", step, ", pages of ", options.page_tokens, ", sinks ",
                 options.sinks, ", recent ", options.recent, ", rollback ", options.rollback);
            const auto i = static_cast<std::size_t>(random.between(0, 2));
            const auto j = static_cast<std::size_t>(random.between(0, 2));
            auto& s = sequences[i];
            auto& tokens = held[i];
            const int n = s.tokens(), what = random.between(0, 11);
            const int first = random.between(0, n), last = random.between(first, n);
            if (what < 3) {
                const int added = random.between(0, std::min(longest - n, 40));
                CAPTURE(added);
                append(s, tokens, m, new_tokens(m, random, added),
                       random.one_in(8) ? random.between(0, 5000) : n);
            } else if (what < 5) {
                CAPTURE(first);
                CAPTURE(last);
                s.erase(first, last);
                for (int t = last; t < n; ++t) tokens[static_cast<std::size_t>(t)].now -= last - first;
                tokens.erase(tokens.begin() + first, tokens.begin() + last);
            } else if (what < 7) {
                const std::int64_t by =
                    random.one_in(3) ? random.between(-1000000, 1000000) : random.between(-20, 20);
                s.shift(first, last, by);
                for (int t = first; t < last; ++t) tokens[static_cast<std::size_t>(t)].now += by;
            } else if (what < 9) {
                const int theirs = sequences[j].tokens(), from = random.between(0, theirs),
                          to = random.between(from, std::min(theirs, from + longest - n));
                s.splice(sequences[j], from, to);
                std::vector<held_token> taken(held[j].begin() + from, held[j].begin() + to);
                for (held_token& t : taken) t.now += n - from;
                tokens.insert(tokens.end(), taken.begin(), taken.end());
            } else if (what == 9) {
                s.trim(last);
                tokens.resize(static_cast<std::size_t>(last));
            } else if (what == 10) {
                const int how = random.between(0, 2);
                auto other = elsewhere(cache, s, how);
                CAPTURE(how);
                REQUIRE(test::contents(cache, other) == test::contents(cache, s));
                REQUIRE(test::attention_bits(cache, other) == test::attention_bits(cache, s));
                REQUIRE(other.usage().quantized <= s.usage().quantized);
                sequences[j] = std::move(other);
                held[j] = tokens;
            } else if (random.one_in(2)) {
                cache.requantize(s, {.key = random.between(-1, C::key_table::size - 2),
                                     .value = random.between(-1, C::value_table::size - 2),
                                     .first_token = first,
                                     .last_token = last});
                for (held_token& t : tokens)
                    for (auto& rows : t.quantized) rows.clear();
            }
            require_rows<typename C::window>(cache, s, tokens, m);
            if (tokens.empty() || step % 4 != 0) continue;
            const int layer = random.between(0, shape.layers - 1);
            const int rows = random.between(1, std::min(5, s.tokens()));
            const auto q = test::random_tensor(random, rows, 2 * shape.kv_heads, shape.head_dim);
            const double error = attention_error(cache, s, tokens, m, layer, q);
            CAPTURE(layer);
            REQUIRE(error < 1e-3);
            worst = std::max(worst, error);
            // dequantize() gives keys at their new positions.
            REQUIRE(test::measure_attention(cache, s, layer, q).of_terms < 1e-3);
            REQUIRE(bytes_of(sequences) == cache.bytes_in_use());
        }
        REQUIRE(bytes_of(sequences) == cache.bytes_in_use());
        sequences.clear();
        REQUIRE(cache.bytes_in_use() == 0);
    }
    MESSAGE("largest error of attention: ", worst);
}

TEST_CASE("1000 erases, shifts and splices leave the bytes as they were, in the pages where they were") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 2, .head_dim = 32};
    std::vector<rotary_kind> rotary(2);
    rotary[0].embedding.dims = rotary[1].embedding.dims = 32;
    rotary[1].embedding.layout = kvq::rotary_layout::interleaved;
    rotary[1].embedding.base = 500000.0;
    kvq::cache_options options{.page_tokens = 32, .rollback = 0, .repack = 0.0f};
    options.rotary = {rotary[0].embedding, rotary[1].embedding};
    test::kivi_cache cache(shape, options);
    model m{shape, rotary};
    // Whole pages, so that nothing is left to be quantized.
    std::vector<kvq::sequence> texts, sequences;
    std::vector<std::vector<held_token>> held(2);
    for (std::size_t i = 0; i < 2; ++i) {
        texts.push_back(cache.new_sequence());
        append(texts[i], held[i], m, new_tokens(m, random, 32 * 8), 0);
        sequences.push_back(texts[i].fork());
    }
    const auto originals = held;
    std::map<const kvq::page*, std::vector<std::byte>> bytes;
    const auto for_each_page = [](const std::vector<kvq::sequence>& of, auto&& f) {
        for (const kvq::sequence& s : of)
            for (const auto& table : kvq::detail::sequence_access::tables(s))
                for (const kvq::page_span& span : table.spans)
                    for (const kvq::page_ref& p : span.pages) f(*p);
    };
    for_each_page(texts, [&](const kvq::page& p) { bytes[&p].assign(p.data(), p.data() + p.bytes); });
    const std::size_t in_use = cache.bytes_in_use();
    double worst = 0;
    for (int step = 0; step < 1000; ++step) {
        INFO("step ", step);
        const auto i = static_cast<std::size_t>(random.between(0, 1));
        auto& s = sequences[i];
        auto& tokens = held[i];
        const int n = s.tokens(), first = random.between(0, n),
                  last = random.between(first, std::min(n, first + 90));
        const int what = n < 100 ? 2 : n > 700 ? 0 : random.between(0, 2);
        if (what == 0) {
            s.erase(first, last);
            for (int t = last; t < n; ++t) tokens[static_cast<std::size_t>(t)].now -= last - first;
            tokens.erase(tokens.begin() + first, tokens.begin() + last);
        } else if (what == 1) {
            const int by = random.between(-3000, 3000);
            s.shift(first, last, by);
            for (int t = first; t < last; ++t) tokens[static_cast<std::size_t>(t)].now += by;
        } else {
            const auto j = static_cast<std::size_t>(random.between(0, 1));
            const bool of_text = random.one_in(2);
            const kvq::sequence& from = of_text ? texts[j] : sequences[j];
            const auto& theirs = of_text ? originals[j] : held[j];
            const int a = random.between(0, from.tokens()),
                      b = random.between(a, std::min(from.tokens(), a + 90));
            std::vector<held_token> taken(theirs.begin() + a, theirs.begin() + b);
            s.splice(from, a, b);
            for (held_token& t : taken) t.now += n - a;
            tokens.insert(tokens.end(), taken.begin(), taken.end());
        }
        REQUIRE(s.tokens() == static_cast<int>(tokens.size()));
        REQUIRE(cache.bytes_in_use() == in_use);
        for_each_page(sequences, [&](const kvq::page& p) {
            const auto known = bytes.find(&p);
            REQUIRE(known != bytes.end());
            if (std::memcmp(known->second.data(), p.data(), p.bytes) != 0) FAIL("a page has changed");
        });
        if (step % 20 != 0) continue;
        for (int layer = 0; layer < 2; ++layer) {
            const auto q = test::random_tensor(random, 2, 4, shape.head_dim);
            worst = std::max(worst, attention_error(cache, s, tokens, m, layer, q));
        }
        REQUIRE(worst < 1e-3);
    }
    for (std::size_t i = 0; i < 2; ++i) require_rows<kvq::float16>(cache, sequences[i], held[i], m);
    MESSAGE("largest error of attention: ", worst);
}

TEST_CASE("attention is that of a cache that was built in the new order, and of the keys themselves") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    using cache_type = test::typed_cache<kvq::full<float>, kvq::full<float>, test::usual, float>;
    for (int round = 0; round < 20; ++round) {
        const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 24, .value_dim = 40};
        const std::vector<rotary_kind> rotary{rotary_of(random, shape.head_dim)};
        auto options = test::random_options(random);
        options.rotary = {rotary[0].embedding};
        if (round % 2 == 0) options.repack = 0.0f;
        cache_type cache(shape, options);
        model m{shape, rotary};
        auto s = cache.new_sequence(), document = cache.new_sequence(), again = cache.new_sequence();
        std::vector<held_token> held, theirs, rebuilt;
        append(s, held, m, new_tokens(m, random, random.between(30, 90)), 0);
        append(document, theirs, m, new_tokens(m, random, random.between(30, 90)), 0);
        const int first = random.between(0, s.tokens() - 10), last = random.between(first, s.tokens() - 1);
        s.erase(first, last);
        held.erase(held.begin() + first, held.begin() + last);
        const int from = random.between(0, document.tokens() - 5),
                  to = random.between(from, document.tokens());
        s.splice(document, from, to);
        held.insert(held.end(), theirs.begin() + from, theirs.begin() + to);
        append(s, held, m, new_tokens(m, random, 7), s.tokens());
        for (std::size_t t = 0; t < held.size(); ++t) {
            held[t].now = static_cast<std::int64_t>(t);
            append(again, rebuilt, m, {held[t].text}, again.tokens());
        }
        REQUIRE(s.tokens() == again.tokens());
        const auto q = test::random_tensor(random, 3, 2, shape.head_dim);
        test::tensor<float> mine(3, 2, shape.value_dim), wanted(3, 2, shape.value_dim);
        s.attend(0, q.view(), mine.view());
        again.attend(0, q.view(), wanted.view());
        const auto k = test::dequantized(s, shape, 0, kvq::tensor::key),
                   fresh = test::dequantized(again, shape, 0, kvq::tensor::key);
        double out = 0, keys = 0;
        for (std::size_t i = 0; i < mine.values().size(); ++i)
            out = std::max(out, std::fabs(static_cast<double>(mine.values()[i] - wanted.values()[i])));
        for (std::size_t i = 0; i < k.values().size(); ++i)
            keys = std::max(keys, std::fabs(static_cast<double>(k.values()[i] - fresh.values()[i])));
        INFO("round ", round);
        CHECK(out < 2e-5);
        CHECK(keys < 1e-5);
        // Repacking rotates keys in their pages.
        if (round % 2 == 0) CHECK(attention_error(cache, s, held, m, 0, q) < 1e-5);
    }
}

namespace {

/// Rotary embeddings that move no channel: for tests of pages.
const std::vector<kvq::rotary_embedding> no_positions{kvq::rotary_embedding{}};

/// Random erases, shifts and splices after every few appends.
template <class Cache>
void mix_up(test::generator& random, Cache& cache, std::vector<kvq::sequence*> sequences,
            const test::stream& text, int steps) {
    for (int step = 0; step < steps; ++step) {
        kvq::sequence& s = *random.pick(sequences);
        const int n = s.tokens(), first = random.between(0, n), last = random.between(first, n);
        const int what = n < 30 ? 0 : n > 150 ? 1 : random.between(0, 3);
        if (what == 0) {
            test::append(s, cache.shape().layers, text, random.between(0, 100), random.between(1, 60));
        } else if (what == 1) {
            s.erase(first, std::min(last, first + 40));
        } else if (what == 2) {
            s.shift(first, last, random.between(-5, 5));
        } else {
            const kvq::sequence& from = *random.pick(sequences);
            const int a = random.between(0, from.tokens());
            s.splice(from, a, random.between(a, std::min(from.tokens(), a + 60)));
        }
    }
}

}  // namespace

TEST_CASE("a page that several spans show is converted once, stays one page, and counts once") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    using cache_type = test::typed_cache<test::formats<kvq::affine<8>, kvq::affine<4>, kvq::affine<2>>>;
    std::size_t shared = 0;
    for (int round = 0; round < 40; ++round) {
        auto options = test::random_options(random);
        options.page_tokens = random.pick(std::vector<int>{4, 7, 8, 16});
        options.rotary = no_positions;
        cache_type cache({2, 1, 16, 0}, options);
        const test::stream text(random, cache.shape(), 200);
        auto a = cache.new_sequence(), b = cache.new_sequence();
        mix_up(random, cache, {&a, &b}, text, 20);
        INFO("round ", round);
        const auto groups = [&](kvq::sequence& s) {
            // Which spans show one page.
            std::vector<int> of;
            for (int layer = 0; layer < 2; ++layer)
                for (std::size_t role = 0; role < 2; ++role) {
                    std::map<const kvq::page*, int> first;
                    const auto& table =
                        kvq::detail::sequence_access::tables(s)[static_cast<std::size_t>(layer)];
                    for (int i = 0; i < table.committed; ++i) {
                        const auto at = first.emplace(table[i].pages[role].get(), i);
                        of.push_back(at.first->second);
                        shared += !at.second;
                    }
                }
            return of;
        };
        const auto in_a = groups(a), in_b = groups(b);
        const auto distinct = [&](const kvq::sequence& s) {
            std::vector<kvq::sequence> one;
            one.push_back(s.fork());
            return bytes_of(one);
        };
        const auto counted = [&](const kvq::sequence& s) {
            std::size_t pages = 0, bytes = 0;
            for (const kvq::usage_row& row : kvq::usage_rows(s)) {
                pages += static_cast<std::size_t>(row.pages);
                bytes += row.codes + row.parameters;
            }
            REQUIRE(bytes == s.usage().quantized + s.usage().window);
            return bytes + pages * sizeof(kvq::page);
        };
        const auto without_copies = [](kvq::sequence& s) {
            for (auto& table : kvq::detail::sequence_access::tables(s))
                for (kvq::page_span& span : table.spans)
                    for (kvq::page_ref& copy : span.copies) copy = kvq::page_ref{};
        };
        without_copies(a);
        without_copies(b);
        REQUIRE(counted(a) == distinct(a));
        REQUIRE(counted(b) == distinct(b));

        kvq::sequence* const both[] = {&a, &b};
        const kvq::sequence* const planned_for[] = {&a, &b};
        const kvq::requantize_request request{.key = 1, .value = 1, .first_token = random.between(0, 60)};
        const auto planned = cache.plan_requantize(planned_for, request);
        kvq::workspace space;
        kvq::requantize_report done;
        const bool at_once = random.one_in(2);
        std::size_t pages = 0, freed = 0;
        do {
            done = cache.requantize(
                both, request,
                {.pages = at_once ? ~std::size_t{0} : static_cast<std::size_t>(random.between(1, 9))},
                kvq::serial_executor{}, space);
            pages += done.pages;
            freed += done.bytes_freed;
        } while (done.pages_left > 0);
        CHECK(pages == planned.pages);
        CHECK(freed == planned.bytes_freed);
        CHECK(done.bytes_after == planned.bytes_after);
        CHECK(done.bytes_after == cache.bytes_in_use());
        CHECK(cache.plan_requantize(planned_for, request).pages == 0);
        CHECK(groups(a) == in_a);
        CHECK(groups(b) == in_b);
        for (int layer = 0; layer < 2; ++layer) require_whole(cache, a, layer);

        kvq::step_down_policy policy;
        policy.tiers = {{0, {0, 0}}, {10, {1, 1}}, {30, {2, 2}}};
        policy.byte_budget = cache.bytes_in_use() * 3 / 4;
        const auto stepped = kvq::step_down(cache, both, policy);
        CHECK(stepped.bytes_after == cache.bytes_in_use());
        CHECK(groups(a) == in_a);
        CHECK(groups(b) == in_b);
        std::vector<kvq::sequence> all;
        all.push_back(std::move(a));
        all.push_back(std::move(b));
        CHECK(bytes_of(all) == cache.bytes_in_use());
    }
    CHECK(shared > 100);
}

TEST_CASE_TEMPLATE("a trim is exact for the tokens that were appended after an erase, a shift or a splice", C,
                   KVQ_TEST_FEW_CACHES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 40; ++round) {
        const auto shape = test::random_cache_shape(random, C::key_table::size, 8);
        auto options = test::random_options(random);
        options.layers = test::rotate_formats<C>(shape.layers);
        options.rollback = random.between(1, 40);
        options.rotary = no_positions;
        auto cache = test::make_cache<C>(shape, options);
        const test::stream text(random, shape, 300);
        auto sequence = cache.new_sequence(), other = cache.new_sequence();
        mix_up(random, cache, {&sequence, &other}, text, random.between(3, 12));
        test::append(sequence, shape.layers, text, 0, 60);
        test::append(other, shape.layers, text, 60, 60);
        const int first = random.between(0, sequence.tokens() - 2),
                  last = random.between(first + 1, sequence.tokens() - 1);
        switch (random.between(0, 2)) {
            case 0:
                sequence.erase(first, last);
                break;
            case 1:
                sequence.shift(first, last, 7);
                break;
            default:
                sequence.splice(other, random.between(0, 20), random.between(30, 60));
        }
        auto never = sequence.fork();
        const int held = sequence.tokens(), n = random.between(1, options.rollback);
        INFO("round ", round, ": ", held, " tokens and ", n, ", rollback ", options.rollback);
        for (int added = 0; added < n;) {
            const int step = random.between(1, n - added);
            test::append(sequence, shape.layers, text, added, step);
            added += step;
        }
        sequence.trim(held);
        REQUIRE(test::contents(cache, sequence) == test::contents(cache, never));
        for (int layer = 0; layer < shape.layers; ++layer) require_whole(cache, sequence, layer);
        test::append(sequence, shape.layers, text, 7, 80);
        test::append(never, shape.layers, text, 7, 80);
        REQUIRE(test::contents(cache, sequence) == test::contents(cache, never));
        // A restored one goes on alike.
        auto again = test::restored(cache, test::saved(sequence));
        test::append(again, shape.layers, text, 3, 50);
        test::append(sequence, shape.layers, text, 3, 50);
        REQUIRE(test::contents(cache, sequence) == test::contents(cache, again));
        REQUIRE(test::attention_bits(cache, sequence) == test::attention_bits(cache, again));
        REQUIRE(test::saved(sequence) == test::saved(again));
    }
}

TEST_CASE("the last page goes on filling, whichever side of a cut moves") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 8};
    test::int8_cache cache(shape, {.recent = 40, .page_tokens = 16, .rotary = no_positions});
    const test::stream text(random, shape, 100);
    for (const bool in_front : {false, true}) {
        auto s = cache.new_sequence();
        test::append(s, 1, text, 0, 70);
        s.erase(16, 32);
        if (in_front) s.shift(0, s.tokens(), 16);
        const int spans = s.pages(0).entries();
        CHECK(spans == 4);
        test::append(s, 1, text, 70, 10);
        CHECK(s.pages(0).entries() == spans);
        // The removed page gives its bytes back; what is left has not changed.
        CHECK(s.tokens() == 64);
        for (int e = 0; e < 4; ++e) CHECK(s.pages(0).at(e).skip == 0);
        CHECK(s.pages(0).at(0).shift == (in_front ? 16 : 0));
        CHECK(s.pages(0).at(2).shift == (in_front ? 0 : -16));
    }
}

TEST_CASE("a restored sequence shares the pages that the saved one shared") {
    const auto seed = test::seed();
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 2, .head_dim = 16};
    kvq::cache_options options{.sinks = 3, .recent = 5, .page_tokens = 16};
    options.rotary = no_positions;
    test::kivi_cache cache(shape, options);
    const test::stream text(random, shape, 200);
    auto s = cache.new_sequence();
    test::append(s, 1, text, 0, 150);
    s.erase(25, 27);
    s.erase(60, 64);
    s.splice(s, 10, 90);
    test::append(s, 1, text, 0, 40);
    const auto usage = s.usage();
    for (const int how : {0, 1, 2}) {
        const auto other = elsewhere(cache, s, how);
        CHECK(other.usage().quantized == usage.quantized);
        CHECK(other.usage().window == usage.window);
        CHECK(test::contents(cache, other) == test::contents(cache, s));
    }
    // Into another layout: appended again, at the positions where the keys are now.
    kvq::rotary_embedding rotary;
    rotary.dims = 16;
    options.rotary = {rotary};
    auto wide = options;
    wide.page_tokens = 32;
    using plain = test::typed_cache<kvq::full<float>, kvq::full<float>, test::usual, float>;
    plain exact(shape, options), other(shape, wide);
    auto moved = exact.new_sequence();
    test::append(moved, 1, text, 0, 150);
    moved.erase(25, 67);
    moved.splice(moved, 10, 90);
    const auto back = test::restored(other, test::saved(moved), {.convert = true});
    for (const auto role : {kvq::tensor::key, kvq::tensor::value})
        CHECK(test::dequantized(back, shape, 0, role).values() ==
              test::dequantized(moved, shape, 0, role).values());
    // A cache that cannot rotate refuses.
    options.rotary = {};
    plain fixed(shape, options);
    CHECK(test::contains(message_of([&] { test::restored(fixed, test::saved(moved)); }),
                         "cache_options::rotary"));
    CHECK(test::contains(message_of([&] { elsewhere(fixed, moved, 2); }), "cache_options::rotary"));
    CHECK(fixed.bytes_in_use() == 0);
}

TEST_CASE_TEMPLATE("erase, shift and splice leave everything as it was when memory runs out", C,
                   KVQ_TEST_FEW_CACHES) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    int failures = 0;
    for (int round = 0; round < 14; ++round) {
        test::counting_resource memory;
        const auto shape = test::random_cache_shape(random, C::key_table::size, 8);
        auto options = test::random_options(random);
        options.layers = test::rotate_formats<C>(shape.layers);
        options.rotary = no_positions;
        options.memory = &memory;
        auto cache = test::make_cache<C>(shape, options);
        const test::stream text(random, shape, 200);
        {
            auto s = cache.new_sequence(), other = cache.new_sequence();
            mix_up(random, cache, {&s, &other}, text, 6);
            test::append(s, shape.layers, text, 0, 30);
            test::append(other, shape.layers, text, 0, 30);
            for (int what = 0; what < 3; ++what) {
                const auto before = test::contents(cache, s), theirs = test::contents(cache, other);
                const auto out = test::attention_bits(cache, s);
                const std::size_t in_use = cache.bytes_in_use();
                const int n = s.tokens(), first = random.between(0, n - 2),
                          last = random.between(first + 1, n - 1);
                for (int i = 0;; ++i) {
                    REQUIRE(i < 10000);
                    memory.arm(i);
                    bool failed = false;
                    try {
                        if (what == 0) s.erase(first, last);
                        if (what == 1) s.shift(first, last, 3);
                        if (what == 2) s.splice(other, 3, 25);
                    } catch (const std::bad_alloc&) {
                        failed = true;
                    }
                    memory.arm(test::counting_resource::never);
                    if (!failed) break;
                    ++failures;
                    REQUIRE(cache.bytes_in_use() == in_use);
                    REQUIRE(test::contents(cache, s) == before);
                    REQUIRE(test::attention_bits(cache, s) == out);
                }
                REQUIRE(test::contents(cache, other) == theirs);
            }
        }
        REQUIRE(cache.bytes_in_use() == 0);
    }
    CHECK(failures > 100);
}

TEST_CASE("bad input is named in one sentence, and changes nothing") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{.layers = 2, .kv_heads = 1, .head_dim = 8};
    kvq::cache_options options{.page_tokens = 4};
    test::int8_cache fixed(shape, options);
    options.rotary = no_positions;
    test::int8_cache cache(shape, options), other({.layers = 2, .kv_heads = 2, .head_dim = 8}, options);
    const test::stream text(random, shape, 50);
    auto s = cache.new_sequence(), unmovable = fixed.new_sequence();
    test::append(s, 2, text, 0, 21);
    test::append(unmovable, 2, text, 0, 21);
    const auto before = test::contents(cache, s, true), theirs = test::contents(fixed, unmovable, true);
    const auto refused = [&](auto&& f, const char* part) {
        const std::string text_of_error = message_of(f);
        INFO(text_of_error);
        CHECK(test::contains(text_of_error, part));
        CHECK(test::contents(cache, s, true) == before);
        CHECK(test::contents(fixed, unmovable, true) == theirs);
    };
    refused([&] { s.erase(-1, 3); }, "cannot erase tokens -1 to 3: the sequence holds 21");
    refused([&] { s.erase(5, 3); }, "cannot erase tokens 5 to 3");
    refused([&] { s.erase(5, 22); }, "cannot erase tokens 5 to 22: the sequence holds 21");
    refused([&] { s.shift(0, 22, 1); }, "cannot shift tokens 0 to 22: the sequence holds 21");
    refused([&] { s.shift(0, 21, std::int64_t{1} << 41); }, "cannot move by 2199023255552 positions");
    refused([&] { s.splice(s, 3, 22); }, "cannot splice tokens 3 to 22: the other sequence holds 21");
    refused([&] { s.splice(other.new_sequence(), 0, 0); },
            "a sequence of another cache cannot be spliced: it has 2 layers, the first one of 2 x 8, this "
            "one 2, of 1 x 8");
    refused([&] { s.splice(unmovable, 0, 3); }, "a sequence of another cache cannot be spliced");
    refused([&] { unmovable.erase(3, 5); }, "keys cannot move by -2 positions: set cache_options::rotary");
    refused([&] { unmovable.shift(3, 5, 1); }, "keys cannot move by 1 positions");
    refused([&] { unmovable.splice(unmovable, 3, 5); }, "keys cannot move by 18 positions");
    auto uneven = cache.new_sequence();
    uneven.append(1, text.k.slice(0, 3), text.v.slice(0, 3));
    refused([&] { s.splice(uneven, 0, 1); }, "cannot splice in the middle of a step: layer 0 holds 21 and 0");
    // What moves nothing needs no rotary embedding: a removal at the end, the same place in another sequence.
    unmovable.erase(15, 21);
    auto same_place = fixed.new_sequence();
    same_place.splice(unmovable, 0, 9);
    same_place.splice(unmovable, 9, 15);
    CHECK(test::dequantized(same_place, shape, 1, kvq::tensor::key).values() ==
          test::dequantized(unmovable, shape, 1, kvq::tensor::key).values());

    const auto rejected = [&](const kvq::rotary_embedding& e, const char* part) {
        auto wrong = options;
        wrong.rotary = {{}, e};
        const std::string text_of_error = message_of([&] { test::int8_cache(shape, wrong); });
        INFO(text_of_error);
        CHECK(test::contains(text_of_error, part));
    };
    kvq::rotary_embedding e;
    e.dims = 10;
    rejected(e, "the rotary embedding of layer 1 rotates 10 channels from 0 on, in pairs, of a head of 8");
    e.dims = 3;
    rejected(e, "rotates 3 channels from 0 on, in pairs");
    e.dims = 4;
    e.first_channel = 5;
    rejected(e, "rotates 4 channels from 5 on");
    e.first_channel = 0;
    e.base = 0.0;
    rejected(e, "the base of a rotary embedding is 0");
    e.frequencies = {1.0};
    rejected(e, "has 1 frequencies for 4 channels");
    e.frequencies = {1.0, INFINITY};
    rejected(e, "has a frequency of inf");
    auto wrong = options;
    wrong.rotary.resize(3);
    CHECK(test::contains(message_of([&] { test::int8_cache(shape, wrong); }),
                         "rotary embeddings are given for 3 layers of a cache with 2"));
}

TEST_CASE("keys that moved too far are refused in files, messages and pages of the caller") {
    test::generator random(test::seed());
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 8};
    kvq::cache_options options{.page_tokens = 4}, wide{.page_tokens = 8};
    kvq::rotary_embedding rotary;
    rotary.dims = 8;
    options.rotary = wide.rotary = {rotary};
    test::int8_cache cache(shape, options), other(shape, wide);
    auto s = cache.new_sequence();
    test::append(s, 1, test::stream(random, shape, 11), 0, 11);
    std::int64_t& shift = kvq::detail::sequence_access::tables(s)[0][1].shift;
    const auto pages_of_s = [&] {
        kvq::page_list pages(cache, 0);
        for (int e = 0; e < s.pages(0).entries(); ++e) {
            const auto entry = s.pages(0).at(e);
            pages.add({.keys = entry.keys->data(),
                       .values = entry.values->data(),
                       .key_format = entry.keys->format,
                       .value_format = entry.values->format,
                       .key_capacity = entry.keys->tokens,
                       .value_capacity = entry.values->tokens,
                       .skip = entry.skip,
                       .tokens = entry.tokens,
                       .shift = entry.shift});
        }
        return pages.tokens();
    };
    constexpr std::int64_t limit = std::int64_t{1} << 52;
    for (const std::int64_t far : {limit, -limit}) {
        INFO(far);
        shift = far;
        for (const int how : {1, 2})
            CHECK(test::contents(cache, elsewhere(cache, s, how)) == test::contents(cache, s));
        CHECK(test::restored(other, test::saved(s), {.convert = true}).tokens() == 11);
        CHECK(pages_of_s() == 11);
        // Not a position farther.
        const auto before = test::contents(cache, s, true);
        const std::int64_t by = far > 0 ? 1 : -1;
        const std::string from = "keys cannot move from " + std::to_string(far);
        CHECK(test::contains(message_of([&] { s.shift(3, 11, by); }), from.c_str()));
        CHECK(
            test::contains(message_of([&] { far > 0 ? s.splice(s, 4, 11) : s.erase(0, 2); }), from.c_str()));
        CHECK(test::contents(cache, s, true) == before);
        CHECK(shift == far);
    }
    const std::size_t in_use = cache.bytes_in_use();
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
    for (const std::int64_t far : {limit + 1, -limit - 1, most, -most - 1}) {
        INFO(far);
        shift = far;
        const std::string text =
            " moved by " + std::to_string(far) + " positions, the limit is 4503599627370496";
        const auto refused = [&](auto&& f, const std::string& whose) {
            const std::string message = message_of(f);
            INFO(message);
            CHECK(test::contains(message, (whose + text).c_str()));
            CHECK(cache.bytes_in_use() == in_use);
            CHECK(other.bytes_in_use() == 0);
        };
        const auto bytes = test::saved(s);
        refused([&] { test::restored(cache, bytes); }, "the saved sequence has keys that");
        refused([&] { test::restored(other, bytes, {.convert = true}); }, "the saved sequence has keys that");
        refused([&] { elsewhere(cache, s, 2); }, "layer 0 (keys): keys that");
        refused([&] { pages_of_s(); }, "keys of pages 1");
    }
    shift = 0;
}

TEST_CASE("documents of a prefix cache are spliced in any order") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 32};
    std::vector<rotary_kind> rotary(1);
    rotary[0].embedding.dims = 32;
    kvq::cache_options options{.sinks = 4, .recent = 8, .page_tokens = 32};
    options.rotary = {rotary[0].embedding};
    test::kivi_cache cache(shape, options);
    model m{shape, rotary};
    kvq::prefix_cache store(cache, {.min_prefix_tokens = 1, .min_quantize_tokens = 1});
    std::vector<std::vector<held_token>> documents(3);
    for (int d = 0; d < 3; ++d) {
        auto s = cache.new_sequence();
        append(s, documents[static_cast<std::size_t>(d)], m, new_tokens(m, random, 50 + 20 * d), 0);
        std::vector<std::int32_t> ids(static_cast<std::size_t>(s.tokens()), 100 + d);
        REQUIRE(store.store(ids, s) == kvq::store_outcome::stored);
    }
    auto prompt = cache.new_sequence();
    std::vector<held_token> held;
    append(prompt, held, m, new_tokens(m, random, 10), 0);
    const std::size_t before = cache.bytes_in_use();
    for (const int d : {2, 0, 1, 0}) {
        const std::vector<std::int32_t> ids(static_cast<std::size_t>(50 + 20 * d), 100 + d);
        const auto fetched = store.fetch(ids);
        REQUIRE(fetched.tokens == 50 + 20 * d);
        const int n = prompt.tokens();
        prompt.splice(fetched.sequence, 4, fetched.tokens);
        const auto& from = documents[static_cast<std::size_t>(d)];
        std::vector<held_token> taken(from.begin() + 4, from.end());
        for (held_token& t : taken) t.now += n - 4;
        held.insert(held.end(), taken.begin(), taken.end());
    }
    // Quantized pages are those of the store: new are the pages that were 16 bit and are committed, a K and a
    // V page each.
    CHECK(cache.bytes_in_use() - before < 12 * 2 * (sizeof(kvq::page) + 32 * 32));
    append(prompt, held, m, new_tokens(m, random, 9), prompt.tokens());
    require_rows<kvq::float16>(cache, prompt, held, m);
    const auto q = test::random_tensor(random, 3, 4, shape.head_dim);
    CHECK(attention_error(cache, prompt, held, m, 0, q) < 1e-3);
}

TEST_CASE("the sinks of a ring stay directly before its window, if they are to") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const kvq::cache_shape shape{.layers = 1, .kv_heads = 1, .head_dim = 32};
    std::vector<rotary_kind> rotary(1);
    rotary[0].embedding.dims = 32;
    kvq::cache_options options{.sinks = 4, .recent = 8, .page_tokens = 8};
    test::kivi_cache fixed(shape, options);
    options.rotary = {rotary[0].embedding};
    test::kivi_cache cache(shape, options);
    model m{shape, rotary};
    for (const auto positions : {kvq::sink_positions::in_text, kvq::sink_positions::in_cache}) {
        kvq::ring ring(cache.new_sequence(), {.window = 24, .slack = 4, .sinks = positions});
        std::vector<held_token> text;
        double nearest = 0;
        for (int n = 0; n < 300; ++n) {
            const auto token = new_tokens(m, random, 1);
            append(ring, text, m, token, n);
            const auto dropped = static_cast<int>(ring.tokens()) - ring.held().tokens();
            std::vector<held_token> held(text.begin(), text.begin() + std::min<std::ptrdiff_t>(4, n + 1));
            if (n >= 4) held.insert(held.end(), text.begin() + 4 + dropped, text.end());
            if (positions == kvq::sink_positions::in_cache)
                for (std::size_t t = 0; t < 4 && t < held.size(); ++t) held[t].now += dropped;
            if (n % 7 != 0) continue;
            INFO("token ", n);
            const auto q = test::random_tensor(random, 1, 4, shape.head_dim);
            REQUIRE(attention_error(cache, ring.held(), held, m, 0, q) < 1e-3);
            // The same ring after a restart.
            const kvq::ring again(test::restored(cache, test::saved(ring.held())), ring.options(),
                                  ring.first_token());
            REQUIRE(test::attention_bits(cache, again.held()) == test::attention_bits(cache, ring.held()));
            nearest = std::max(nearest, static_cast<double>(dropped));
        }
        CHECK(nearest > 200);
    }
    CHECK(test::contains(message_of([&] {
                             kvq::ring(fixed.new_sequence(),
                                       {.window = 24, .sinks = kvq::sink_positions::in_cache});
                         }),
                         "the sinks of a ring cannot move"));
    auto erased = cache.new_sequence();
    std::vector<held_token> held;
    append(erased, held, m, new_tokens(m, random, 40), 0);
    erased.erase(1, 3);
    CHECK(test::contains(message_of([&] { kvq::ring(std::move(erased), {.window = 24}); }),
                         "a ring cannot begin with a sequence whose 4 sinks were erased in part"));
}

}  // namespace shifts_tests
