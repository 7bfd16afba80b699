// Keys whose plan comes from the cache's own first tokens: no statistics of another text, no run ahead of
// time.
//
//   kvq::self_calibration own(cache, 512);
//   per step, until own.done():   own.add_queries(layer, q) for every layer      optional: keys alone are
//                                                                                enough for widths
//                                 cache.prefill(...), sequence.append(...), ...
//   after the step:               own.apply(sequences, [](const kvq::calibration& statistics) {
//                                     return kvq::find_format("mix4", kvq::tensor::key, statistics);
//                                 });
//
// apply() waits until the sequences hold so many tokens. Then it reads their keys (x^ of their pages), makes
// the format, adds it to the cache, and makes it the format of all keys that are quantized from then on.
// Pages of the given sequences that become smaller are requantized. With fp16 as the first format of keys
// every page is quantized once, by the plan, and the first tokens take 16 bit until the plan is there. With
// std4 they take 4 bits at once, without a plan, and mix4 leaves them as they are.
// Contract: the result depends only on the tokens of the given sequences, in their order, and on the queries
// in the order of the calls; a page that was 16 bit has the bytes that a cache with these statistics from the
// beginning gives it. A saved sequence names the format by its contents: to restore it, list a format that
// was made from the same statistics (statistics().save()).
// Thread safety: apply() is a call on the cache like add_format(). What statistics are:
// quant/calibration.hpp.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "../cache/requantize.hpp"
#include "../cache/sequence_access.hpp"
#include "../core/row_view.hpp"
#include "../quant/calibration.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// Adds the keys of tokens [first, first + n) of one layer of a sequence to statistics of the same shape: x^
/// of its pages, the rows themselves where they are 16 bit. Raises kvq::error for tokens that it does not
/// hold. O(n * kv_heads * head_dim)
inline void add_keys(calibration& to, const cache& of, const sequence& s, int layer, int first, int n) {
    const cache_shape& shape = of.shape(layer);
    const int held = s.tokens(layer);
    detail::expect(first >= 0 && n >= 0 && n <= held && first <= held - n, "cannot add the keys of ", n,
                   " tokens from ", first, " on of layer ", layer, ": it holds ", held);
    std::vector<float> keys(static_cast<std::size_t>(n) * static_cast<std::size_t>(shape.kv_heads) *
                            static_cast<std::size_t>(shape.head_dim));
    const token_view<float> rows(keys.data(), n, shape.kv_heads, shape.head_dim);
    s.dequantize(layer, tensor::key, first, rows);
    to.add_keys(layer, token_view<const float>(rows));
}

class self_calibration {
public:
    /// tokens: of all sequences of apply() together, at least 64; a few hundred are enough. products: also
    /// sum q q^T, which error feedback needs: head_dim^2 doubles per layer and kv head until the format is
    /// made.
    explicit self_calibration(cache& of, int tokens = 512, bool products = true)
        : cache_(&of), tokens_(tokens), statistics_(of.shape(), products) {
        detail::sequence_access::expect_no_state(of, "a cache that calibrates itself");
        detail::expect(tokens >= calibration::group, "a cache calibrates from at least ", calibration::group,
                       " tokens, not ", tokens);
    }

    /// The listed number of the format (cache_options::keys), or -1 until apply() has made it.
    [[nodiscard]] int format_number() const noexcept { return number_; }
    [[nodiscard]] bool done() const noexcept { return done_; }
    /// Queries only, until apply() has read the keys.
    [[nodiscard]] const calibration& statistics() const noexcept { return statistics_; }

    /// Adds queries of one layer, [n][q_heads][head_dim], rotated as for attention. Does nothing once the
    /// format is made. O(n * q_heads * head_dim), times head_dim for products
    void add_queries(int layer, const query_view& q) {
        if (number_ >= 0) return;
        detail::expect(q.data != nullptr || q.tokens == 0, "q has no data for ", q.tokens, " tokens");
        detail::visit_float_type(q.type,
                                 [&]<class T>(T) { statistics_.add_queries(layer, q.as<const T>()); });
    }

    /// make(const calibration&) -> format: the format of keys. Returns true once it is in use; the first call
    /// that finds enough tokens in every layer of the given sequences makes it (calibration::add_keys leaves
    /// out last groups of less than 16 tokens; at least 64 must remain). Other sequences of the cache that
    /// exist by then keep their formats for new pages. Raises kvq::error for sequences that
    /// cache::requantize() refuses and for a format that cannot hold keys of the cache, std::bad_alloc, and
    /// what `make` raises: no page has changed then, and the next call goes on. kvq::out_of_memory: as for
    /// cache::requantize(), which the next call goes on with.
    template <class Make>
    bool apply(std::span<sequence* const> sequences, Make&& make, executor_view executor, workspace& space) {
        if (done_) return true;
        // A request for nothing, which refuses what the real one would refuse.
        static_cast<void>(cache_->plan_requantize(std::span<const sequence* const>(sequences), {}));
        if (number_ < 0) {
            if (!has_tokens(sequences)) return false;
            calibration all = statistics_;
            for (int layer = 0; layer < cache_->layer_count(); ++layer) {
                add_keys(sequences, layer, all);
                if (all.keys(layer, 0) < calibration::group) return false;
            }
            number_ = cache_->add_format(tensor::key, std::forward<Make>(make)(std::as_const(all)));
            statistics_ = std::move(all);
        }
        cache_->commit_to(tensor::key, number_);
        requantize_request request;
        request.key = number_;
        request.only_smaller = true;
        request.new_pages = true;
        cache_->requantize(sequences, request, {}, executor, space);
        return done_ = true;
    }
    template <class Make>
    bool apply(std::span<sequence* const> sequences, Make&& make) {
        workspace space(cache_->options().memory);
        return apply(sequences, std::forward<Make>(make), serial_executor{}, space);
    }
    template <class Make>
    bool apply(sequence& one, Make&& make) {
        sequence* const pointer = &one;
        return apply(std::span(&pointer, 1), std::forward<Make>(make));
    }

private:
    bool has_tokens(std::span<sequence* const> sequences) const {
        for (int layer = 0; layer < cache_->layer_count(); ++layer) {
            std::int64_t held = 0;
            for (const sequence* s : sequences) held += s->tokens(layer);
            if (held < tokens_) return false;
        }
        return true;
    }
    /// The keys of up to `tokens` tokens: the first ones of each sequence, in the order of the sequences.
    void add_keys(std::span<sequence* const> sequences, int layer, calibration& to) const {
        int left = tokens_;
        for (const sequence* s : sequences) {
            const int n = detail::smaller(left, s->tokens(layer));
            kvq::add_keys(to, *cache_, *s, layer, 0, n);
            left -= n;
        }
    }

    cache* cache_;
    int tokens_;
    calibration statistics_;
    int number_ = -1;
    bool done_ = false;
};

}}  // namespace kvq
