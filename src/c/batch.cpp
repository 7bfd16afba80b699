// Selections, many sequences in one call, and attention over pages in memory of the caller.
#include "mods.hpp"
#include "objects.hpp"

using namespace kvq::c;

namespace {

/// The parts of kvq_attend_options for a batch, and the masks of its requests.
struct batch_call {
    kvq_attend_options o;
    held_mods mods;
    call_workspace space;
    std::deque<held_mods> own;

    batch_call(const kvq_attend_options* options, const kvq::cache& of)
        : o(read_optional(options, "options")), mods(o.mods, "options.mods"), space(o.workspace, of) {
        expect(o.lse == nullptr, KVQ_ERROR_ARGUMENT, "the requests of a batch have an lse each, not options");
    }

    std::optional<kvq::mods_view> mods_of(const kvq_mods* given) {
        if (given == nullptr) return {};
        return own.emplace_back(given, "the mods of a request").view();
    }
    void report() const noexcept {
        mods.report();
        for (const held_mods& m : own) m.report();
    }
    static kvq::output_view output(const kvq_tensor& out, float* lse) {
        return output_of(&out, "out").with_lse(lse);
    }
};

/// The sequence of a request, which must be one of this cache.
template <class Sequence>
Sequence& sequence_of(Sequence* given, const shared_cache& of) {
    constexpr const char* what = "the sequence of a request";
    Sequence& s = get(given, what);
    expect_same(s.of, of, what);
    return s;
}

void select(const kvq::cache& of, int32_t layer, std::span<const kvq::select_request> batch, int32_t best,
            const kvq_attend_options* options) {
    const kvq_attend_options o = read_optional(options, "options");
    expect(o.mods == nullptr && o.lse == nullptr, KVQ_ERROR_ARGUMENT,
           "options of a selection have no mods and no lse");
    call_workspace space(o.workspace, of);
    of.select(layer, batch, best, executor_of(o.executor), space);
}

}  // namespace

extern "C" {

kvq_status kvq_sequence_select(const kvq_sequence* sequence, int32_t layer, const kvq_tensor* q,
                               const float* weights, int32_t best, int32_t* out,
                               const kvq_attend_options* options) {
    return guard([&] {
        const kvq_sequence& s = get(sequence, "sequence");
        place(weights, "weights");
        place(out, "out");
        const kvq::select_request r{&s.sequence, query_of(q, "q"), weights, out};
        select(s.of->cache, layer, {&r, 1}, best, options);
    });
}

kvq_status kvq_cache_attend(const kvq_cache* cache, int32_t layer, const kvq_attend_request* requests,
                            int32_t count, const kvq_attend_options* options) {
    return guard([&] {
        const shared_cache& of = get(cache, "cache").state;
        expect_list(requests, count, "requests");
        batch_call c(options, of->cache);
        std::vector<kvq::attention_request> batch;
        batch.reserve(static_cast<std::size_t>(count));
        for (int32_t i = 0; i < count; ++i) {
            const kvq_attend_request& r = requests[i];
            const kvq_sequence& s = sequence_of(r.sequence, of);
            batch.push_back(
                {&s.sequence, query_of(&r.q, "q"), batch_call::output(r.out, r.lse), c.mods_of(r.mods)});
        }
        of->cache.attend(layer, batch, c.mods.view(), executor_of(c.o.executor), c.space);
        c.report();
    });
}

kvq_status kvq_cache_select(const kvq_cache* cache, int32_t layer, const kvq_select_request* requests,
                            int32_t count, int32_t best, const kvq_attend_options* options) {
    return guard([&] {
        const shared_cache& of = get(cache, "cache").state;
        expect_list(requests, count, "requests");
        std::vector<kvq::select_request> batch;
        batch.reserve(static_cast<std::size_t>(count));
        for (int32_t i = 0; i < count; ++i) {
            const kvq_select_request& r = requests[i];
            const kvq_sequence& s = sequence_of(r.sequence, of);
            batch.push_back({&s.sequence, query_of(&r.q, "q"), r.weights, r.out});
        }
        select(of->cache, layer, batch, best, options);
    });
}

kvq_status kvq_cache_prefill(kvq_cache* cache, int32_t layer, const kvq_prefill_request* requests,
                             int32_t count, const kvq_attend_options* options) {
    return guard([&] {
        const shared_cache& of = get(cache, "cache").state;
        expect_list(requests, count, "requests");
        batch_call c(options, of->cache);
        std::vector<kvq::prefill_request> batch;
        batch.reserve(static_cast<std::size_t>(count));
        for (int32_t i = 0; i < count; ++i) {
            const kvq_prefill_request& r = requests[i];
            kvq_sequence& s = sequence_of(r.sequence, of);
            batch.push_back({&s.sequence, input_of(&r.k, "k"), input_of(&r.v, "v"), query_of(&r.q, "q"),
                             batch_call::output(r.out, r.lse), c.mods_of(r.mods)});
        }
        of->cache.prefill(layer, batch, c.mods.view(), executor_of(c.o.executor), c.space);
        c.report();
    });
}

kvq_status kvq_cache_reserve(kvq_cache* cache, const kvq_step_request* requests, int32_t count,
                             int32_t q_heads, const kvq_attend_options* options) {
    return guard([&] {
        const shared_cache& of = get(cache, "cache").state;
        expect_list(requests, count, "requests");
        batch_call c(options, of->cache);
        expect(c.o.workspace != nullptr, KVQ_ERROR_HANDLE,
               "a step is reserved with options.workspace, which is NULL");
        std::vector<kvq::step_request> batch;
        batch.reserve(static_cast<std::size_t>(count));
        for (int32_t i = 0; i < count; ++i) {
            const kvq_step_request& r = requests[i];
            kvq_sequence& s = sequence_of(r.sequence, of);
            batch.push_back({&s.sequence, r.tokens, r.q_tokens, c.mods_of(r.mods)});
        }
        of->cache.reserve(batch, q_heads, executor_of(c.o.executor).concurrency(), c.space, c.mods.view());
    });
}

kvq_status kvq_cache_attend_pages(const kvq_cache* cache, int32_t layer, const kvq_page* pages, int32_t count,
                                  const kvq_tensor* q, const kvq_tensor* out,
                                  const kvq_attend_options* options) {
    return guard([&] {
        const shared_cache& of = get(cache, "cache").state;
        expect_list(pages, count, "pages");
        const kvq_attend_options o = read_optional(options, "options");
        const held_mods mods(o.mods, "options.mods");
        call_workspace space(o.workspace, of->cache);
        kvq::page_list list(of->cache, layer);
        for (int32_t i = 0; i < count; ++i) {
            const kvq_page& p = pages[i];
            // kvq_sequence_pages gives no page with a plan.
            const auto& formats = of->cache.table(kvq::tensor::key);
            const bool known = p.key_format >= 0 && p.key_format < formats.size();
            const kvq::format even = known ? formats[p.key_format] : kvq::format{};
            list.add({static_cast<const std::byte*>(p.keys), static_cast<const std::byte*>(p.values),
                      p.key_format, p.value_format, p.key_capacity, p.value_capacity, p.skip, p.tokens,
                      p.shift, even});
        }
        list.attend(query_of(q, "q"), output_of(out, "out").with_lse(o.lse), mods.view(),
                    executor_of(o.executor), space);
        mods.report();
    });
}
}
