// A cache: the shapes, formats and page pool that sequences share.
//
//   kvq::cache<keys, values> cache({.layers = 32, .kv_heads = 8, .head_dim = 128}, {.sinks = 4, .recent = 128});
//   auto seq = cache.new_sequence();
//
// KeyFormats and ValueFormats: a scheme, formats<scheme...>, or a pair such as kivi<4>. Backend: scalar (default) or
// simd<Arch> from backends/simd.hpp. Window: the format of sinks and recent tokens.
// Thread safety: every const member and new_sequence() may be called from any thread. A cache outlives its sequences.
#pragma once

#include <atomic>
#include <span>

#include "../attention/attend.hpp"
#include "../backends/scalar.hpp"
#include "requantize.hpp"
#include "sequence.hpp"

namespace kvq::inline v0_1 {

template <class KeyFormats, class ValueFormats = KeyFormats, class Backend = scalar, class Window = float16>
class cache {
public:
    using key_table =
        format_table<tensor::key, Window, typename detail::format_list<KeyFormats, tensor::key>::type>;
    using value_table =
        format_table<tensor::value, Window, typename detail::format_list<ValueFormats, tensor::value>::type>;
    using backend = Backend;
    using window = Window;
    using sequence_type = sequence<cache>;

    /// Raises kvq::error when a size is impossible. Schemes with state are passed in `keys` and `values`; of a list with more
    /// than one all of them, as key_table(first, second).
    explicit cache(const cache_shape& shape, const cache_options& options = {},
                   key_table keys = detail::default_table<key_table>(),
                   value_table values = detail::default_table<value_table>())
        : shape_(shape),
          options_(options),
          keys_(std::move(keys)),
          values_(std::move(values)),
          pool_(options.memory, options.byte_budget) {
        detail::check_shape(shape);
        detail::expect(options.memory != nullptr, "a cache needs a memory resource");
        detail::expect(options.sinks >= 0, "sinks must not be negative, got ", options.sinks);
        detail::expect(options.recent >= 0, "recent must not be negative, got ", options.recent);
        detail::expect(options.rollback >= 0, "rollback must not be negative, got ", options.rollback);
        detail::expect(options.page_tokens >= 1 && options.page_tokens <= 65536,
                       "page_tokens must be between 1 and 65536, got ", options.page_tokens);
        constexpr int most = (std::numeric_limits<int>::max)() / 4;
        detail::expect(options.sinks <= most && options.recent <= most && options.rollback <= most, "sinks ",
                       options.sinks, ", recent ", options.recent, " and rollback ", options.rollback,
                       " must not be more than ", most);
        detail::expect(options.layers.empty() || static_cast<int>(options.layers.size()) == shape.layers,
                       "formats are given for ", options.layers.size(), " layers of a cache with ",
                       shape.layers);
        for (const layer_format& f : options.layers) {
            detail::expect(f.key >= 0 && f.key < key_table::size - 1, "key format ", f.key,
                           " is not among the ", key_table::size - 1, " listed ones");
            detail::expect(f.value >= 0 && f.value < value_table::size - 1, "value format ", f.value,
                           " is not among the ", value_table::size - 1, " listed ones");
        }
        const auto check_scheme = [&](tensor role) {
            return [&shape, &options, role](const auto& scheme, int index) {
                if constexpr (requires { scheme.check(shape, role); }) scheme.check(shape, role);
                const std::size_t bytes = scheme.block_bytes({role, options.page_tokens, shape.dim(role)});
                detail::expect(bytes % 16 == 0, "blocks of ", role == tensor::key ? "key" : "value",
                               " format ", index - 1, " have ", bytes, " bytes, which is no multiple of 16");
            };
        };
        keys_.for_each(check_scheme(tensor::key));
        values_.for_each(check_scheme(tensor::value));
    }
    cache(const cache&) = delete;
    cache& operator=(const cache&) = delete;

    [[nodiscard]] sequence_type new_sequence() { return sequence_type(*this); }

    const cache_shape& shape() const noexcept { return shape_; }
    const cache_options& options() const noexcept { return options_; }
    page_geometry geometry() const noexcept {
        return {options_.sinks, options_.recent, options_.page_tokens};
    }
    page_pool& pool() noexcept { return pool_; }
    const page_pool& pool() const noexcept { return pool_; }
    const key_table& keys() const noexcept { return keys_; }
    const value_table& values() const noexcept { return values_; }
    template <tensor Role>
    const auto& table() const noexcept {
        if constexpr (Role == tensor::key)
            return keys_;
        else
            return values_;
    }

    /// Bytes of all pages of all sequences, each counted once.
    [[nodiscard]] std::size_t bytes_in_use() const noexcept { return pool_.bytes_in_use(); }

    /// Format index that a layer's pages are coded to; 0 if they stay in the window format.
    template <tensor Role>
    int target_format(int layer) const {
        const layer_format f =
            options_.layers.empty() ? layer_format{} : options_.layers[static_cast<std::size_t>(layer)];
        return table<Role>().index_of(Role == tensor::key ? f.key : f.value);
    }

    /// Bytes of data of a page of `tokens` tokens in the given format.
    template <tensor Role>
    [[nodiscard]] std::size_t page_bytes(int format, int tokens) const {
        return table<Role>().block_bytes(format, {Role, tokens, shape_.dim(Role)}) *
               static_cast<std::size_t>(shape_.kv_heads);
    }

    /// Workspace that attend() needs for q_tokens x q_heads queries over a sequence of `tokens`, on `threads` threads.
    [[nodiscard]] std::size_t attention_workspace(int tokens, int q_heads, int q_tokens = 1,
                                                  int threads = 1) const {
        detail::expect(
            tokens >= 0 && tokens <= (std::numeric_limits<int>::max)() - options_.page_tokens &&
                q_tokens >= 0 && (q_heads < 1 || q_tokens <= (std::numeric_limits<int>::max)() / q_heads),
            "a workspace for ", q_tokens, " query tokens of ", q_heads, " heads over ", tokens, " tokens");
        detail::expect(q_heads >= 1 && q_heads % shape_.kv_heads == 0, "a workspace for ", q_heads,
                       " query heads, not a multiple of the ", shape_.kv_heads, " kv heads");
        detail::expect(threads >= 1, "a workspace for ", threads, " threads");
        return attention_workspace_bytes<Backend>(keys_, values_, shape_, geometry(), tokens, q_heads,
                                                  q_tokens, threads);
    }

    /// One sequence's part of a batch: attention for its last q.tokens tokens, as sequence::attend says.
    struct attention_request {
        const sequence_type* sequence;
        query_view q;
        output_view out;
    };
    /// Attention of one layer for many sequences at once, whatever their lengths and numbers of queries: one list of tasks for all
    /// threads instead of a start and an end per sequence. Outputs are those of sequence::attend, bit for bit. Takes its scratch
    /// from `space`. Raises kvq::error before anything is written.
    template <class Variant, class Executor>
    void attend(int layer, std::span<const attention_request> batch, const Variant& variant, Executor&& ex,
                workspace& space) const {
        for (std::size_t i = 0; i < batch.size(); ++i) {
            check_member(batch[i].sequence, i);
            batch[i].sequence->check_attention(layer, batch[i].q, batch[i].out);
        }
        const auto items = [&](int i) {
            const attention_request& r = batch[static_cast<std::size_t>(i)];
            return detail::attention_item{r.sequence->pages(layer), r.q, r.out};
        };
        attend_items(layer, static_cast<int>(batch.size()), items, variant, ex, space);
    }

    /// One sequence's part of a step: as the arguments of sequence::prefill. K and V have one type.
    struct prefill_request {
        sequence_type* sequence;
        input_view k, v;
        query_view q;
        output_view out;
    };
    /// sequence::prefill of one layer for many sequences at once: prompts in chunks of any length beside sequences that decode one
    /// token, as continuous batching has them. Pages and outputs are those that every sequence gets alone, bit for bit, on any
    /// number of threads. Takes scratch from `space`. Raises kvq::error, kvq::out_of_memory or std::bad_alloc; all sequences are as
    /// they were then.
    template <class Variant, class Executor>
    void prefill(int layer, std::span<const prefill_request> batch, const Variant& variant, Executor&& ex,
                 workspace& space) {
        for (std::size_t i = 0; i < batch.size(); ++i) {
            const prefill_request& r = batch[i];
            check_member(r.sequence, i);
            for (std::size_t j = 0; j < i; ++j)
                detail::expect(batch[j].sequence != r.sequence, "sequence ", i, " of the batch is sequence ",
                               j, " again");
            detail::expect(r.k.same_type(r.v), "k and v of sequence ", i,
                           " of the batch have different types");
            r.sequence->check_chunk(layer, r.k, r.v);
            r.sequence->check_attention(layer, r.q, r.out, r.k.tokens);
        }
        std::pmr::vector<detail::chunk<cache>> chunks(pool_.memory());
        chunks.reserve(batch.size());
        int jobs = 0;
        for (const prefill_request& r : batch) {
            if (r.k.tokens == 0) continue;
            chunks.push_back(r.sequence->new_chunk(layer, r.k.tokens, detail::chunk_pages::after_attend));
            chunks.back().stage();
            jobs += chunks.back().jobs();
        }
        std::size_t written = 0;
        for (const prefill_request& r : batch)
            if (r.k.tokens > 0) write(chunks[written++], r);
        const auto items = [&](int i) {
            const prefill_request& r = batch[static_cast<std::size_t>(i)];
            return detail::attention_item{r.sequence->pages(layer), r.q, r.out};
        };
        attend_items(layer, static_cast<int>(batch.size()), items, variant, ex, space);
        const int workers = detail::larger(1, detail::smaller(static_cast<int>(ex.concurrency()), jobs));
        const std::size_t scratch = detail::round_up(scratch_floats() * sizeof(float), std::size_t{64});
        std::byte* const memory = space.reserve(static_cast<std::size_t>(workers) * scratch);
        std::atomic<int> next{0};
        const auto quantize = [&](int worker) {
            auto* const floats =
                reinterpret_cast<float*>(memory + static_cast<std::size_t>(worker) * scratch);
            for (int job = next.fetch_add(1); job < jobs; job = next.fetch_add(1)) {
                int first = 0;
                for (detail::chunk<cache>& c : chunks) {
                    if (job < first + c.jobs()) {
                        c.quantize(job - first, floats);
                        break;
                    }
                    first += c.jobs();
                }
            }
        };
        if (workers == 1)
            quantize(0);
        else
            ex.parallel_for(workers, quantize);
        for (detail::chunk<cache>& c : chunks) c.commit();
    }

    /// Dry run of requantize() on `threads` threads: what it will do with the whole request. Nothing changes. O(pages).
    [[nodiscard]] requantize_report plan_requantize(const sequence_type& s, const requantize_request& request,
                                                    int threads = 1) const {
        const sequence_type* const one = &s;
        return plan_requantize(std::span(&one, 1), request, threads);
    }
    [[nodiscard]] requantize_report plan_requantize(std::span<const sequence_type* const> sequences,
                                                    const requantize_request& request,
                                                    int threads = 1) const {
        detail::expect(threads >= 1, "requantizing needs at least 1 thread, got ", threads);
        detail::expect_distinct(sequences);
        const detail::planned_threads executor{threads};
        workspace none;
        return detail::requantizer<const sequence_type>(*this, sequences, request).run({}, executor, none);
    }

    /// Changes the format of pages (cache/requantize.hpp). Several sequences at once keep sharing the pages that they share.
    /// Raises kvq::error for an impossible request before anything changes; kvq::out_of_memory when the byte budget has
    /// no room for one more page per thread: pages converted until then stay converted, the others as they were.
    requantize_report requantize(sequence_type& s, const requantize_request& request,
                                 const requantize_limit& limit = {}) {
        sequence_type* const one = &s;
        workspace space(pool_.memory());
        return requantize(std::span(&one, 1), request, limit, serial_executor{}, space);
    }
    template <class Executor>
    requantize_report requantize(std::span<sequence_type* const> sequences, const requantize_request& request,
                                 const requantize_limit& limit, Executor&& executor, workspace& space) {
        detail::expect_distinct(sequences);
        return detail::requantizer<sequence_type>(*this, sequences, request).run(limit, executor, space);
    }

private:
    void check_member(const sequence_type* s, std::size_t i) const {
        detail::expect(s != nullptr && s->cache_ == this, "sequence ", i,
                       " of the batch is not one of this cache");
    }
    /// Floats that quantizing one block takes as scratch.
    std::size_t scratch_floats() const noexcept {
        return static_cast<std::size_t>(options_.page_tokens) *
               static_cast<std::size_t>(detail::larger(shape_.dim(tensor::key), shape_.dim(tensor::value)));
    }
    template <class Items, class Variant, class Executor>
    void attend_items(int layer, int count, const Items& items, const Variant& variant, Executor& ex,
                      workspace& space) const {
        detail::expect_variant(variant);
        long long rows = 0;
        for (int i = 0; i < count; ++i) rows += static_cast<long long>(items(i).q.tokens) * items(i).q.heads;
        detail::expect(rows <= (std::numeric_limits<int>::max)() / 2, "a batch of ", rows, " query rows");
        if (rows == 0) return;
        const int threads = static_cast<int>(ex.concurrency());
        const detail::attention_batch<Backend, key_table, value_table, Items> all(keys_, values_, shape_,
                                                                                  geometry(), items, count);
        all.run(layer, variant, ex, threads, space.reserve(all.bytes(threads)));
    }
    void write(detail::chunk<cache>& c, const prefill_request& r) {
        r.k.visit([&]<class T>(const token_view<const T>& k) {
            r.v.visit([&]<class U>(const token_view<const U>& v) {
                if constexpr (std::is_same_v<T, U>)
                    c.template write<detail::chunk_pages::after_attend, T>(k, v, nullptr);
            });
        });
    }

    cache_shape shape_;
    cache_options options_;
    key_table keys_;
    value_table values_;
    page_pool pool_;
};

}  // namespace kvq::inline v0_1
