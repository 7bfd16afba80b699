// Requantizing, stepping down and estimates of the C interface.
#include <kvq/cache/step_down.hpp>
#include <kvq/estimate/budget.hpp>
#include <kvq/estimate/footprint.hpp>
#include <utility>

#include "convert.hpp"

namespace kvq::c {

step_down_policy policy_of(const kvq_step_down_policy* given, const cache_state& of) {
    const kvq_step_down_policy p = read_reserved(given, "policy");
    expect_list(p.tiers, p.tier_count, "tiers");
    step_down_policy policy;
    for (std::int32_t i = 0; i < p.tier_count; ++i) {
        const kvq_tier& t = p.tiers[i];
        policy.tiers.push_back({t.age,
                                {t.keys ? of.listed(tensor::key, t.keys) : 0,
                                 t.values ? of.listed(tensor::value, t.values) : 0}});
    }
    if (p.byte_budget != 0) policy.byte_budget = p.byte_budget;
    policy.first_layers_kept = p.first_layers_kept;
    policy.last_layers_kept = p.last_layers_kept;
    return policy;
}

void write_report(kvq_step_down_report* to, const step_down_report& r) {
    if (to == nullptr) return;
    std::size_t pages = 0;
    for (const step_down_step& s : r.steps) pages += s.pages;
    write_struct(to, kvq_step_down_report{0, pages, r.bytes_before, r.bytes_after, r.bytes_peak, r.fits});
}

namespace {

/// What an estimate is asked for.
struct estimate {
    attention_use use;
    step_down_policy policy;
    int sequences;

    estimate(const kvq_footprint_query* given, const cache_state& of) {
        const kvq_footprint_query q = read_optional(given, "query");
        use = {q.q_heads, q.q_tokens == 0 ? 1 : q.q_tokens, q.threads == 0 ? 1 : q.threads, q.chunk,
               q.cross_tokens};
        sequences = q.sequences == 0 ? 1 : q.sequences;
        if (q.policy != nullptr) policy = policy_of(q.policy, of);
    }
};

}  // namespace
}  // namespace kvq::c

using namespace kvq::c;

extern "C" {

kvq_status kvq_cache_requantize(kvq_cache* cache, kvq_sequence* const* sequences, int32_t count,
                                const kvq_requantize_request* request, kvq_requantize_report* report) {
    return guard([&] {
        const shared_cache& state = get(cache, "cache").state;
        const std::vector<kvq::sequence*> all = sequences_of(sequences, count, state);
        const kvq_requantize_request r = read_reserved(request, "request");
        if (report) expect_struct(report, "report");
        expect(r.most_nanoseconds >= 0, KVQ_ERROR_ARGUMENT, "most_nanoseconds is ", r.most_nanoseconds);
        kvq::requantize_request wanted;
        if (r.keys) wanted.key = state->listed(kvq::tensor::key, r.keys);
        if (r.values) wanted.value = state->listed(kvq::tensor::value, r.values);
        wanted.first_layer = r.first_layer;
        if (r.last_layer != 0) wanted.last_layer = r.last_layer;
        wanted.first_token = r.first_token;
        if (r.last_token != 0) wanted.last_token = r.last_token;
        wanted.only_smaller = r.only_smaller != 0;
        wanted.new_pages = r.new_pages != 0;
        kvq::requantize_limit limit;
        if (r.most_pages != 0) limit.pages = r.most_pages;
        if (r.most_nanoseconds != 0) limit.nanoseconds = r.most_nanoseconds;
        const kvq::executor_view executor = executor_of(r.executor);
        call_workspace space(r.workspace, state->cache);
        kvq::requantize_report done;
        if (r.dry_run != 0) {
            const std::vector<const kvq::sequence*> readers(all.begin(), all.end());
            done = state->cache.plan_requantize(readers, wanted, executor.concurrency());
        } else {
            done = state->cache.requantize(all, wanted, limit, executor, space);
        }
        if (report) write_report(report, done);
    });
}

kvq_status kvq_cache_step_down(kvq_cache* cache, kvq_sequence* const* sequences, int32_t count,
                               const kvq_step_down_policy* policy, kvq_executor* executor,
                               kvq_step_down_report* report) {
    return guard([&] {
        const shared_cache& state = get(cache, "cache").state;
        const std::vector<kvq::sequence*> all = sequences_of(sequences, count, state);
        if (report) expect_struct(report, "report");
        write_report(report,
                     kvq::step_down(state->cache, all, policy_of(policy, *state), executor_of(executor)));
    });
}

kvq_status kvq_cache_plan_step_down(const kvq_cache* cache, kvq_sequence* const* sequences, int32_t count,
                                    const kvq_step_down_policy* policy, kvq_executor* executor,
                                    kvq_step_down_report* report) {
    return guard([&] {
        const shared_cache& state = get(cache, "cache").state;
        const std::vector<kvq::sequence*> all = sequences_of(sequences, count, state);
        expect_struct(report, "report");
        const std::vector<const kvq::sequence*> readers(all.begin(), all.end());
        write_report(report, kvq::plan_step_down(state->cache, readers, policy_of(policy, *state),
                                                 executor_of(executor).concurrency()));
    });
}

kvq_status kvq_cache_get_footprint(const kvq_cache* cache, int32_t tokens, const kvq_footprint_query* query,
                                   kvq_footprint* footprint) {
    return guard([&] {
        const cache_state& state = *get(cache, "cache").state;
        expect_struct(footprint, "footprint");
        const estimate e(query, state);
        const kvq::footprint_report f = kvq::footprint(state.cache, tokens, e.sequences, e.use, e.policy);
        write_struct(footprint,
                     kvq_footprint{0, f.quantized, f.window, f.rollback, f.bookkeeping, f.workspace,
                                   f.attention, f.total, f.transient, f.unused, f.state});
    });
}

kvq_status kvq_cache_longest_context(const kvq_cache* cache, size_t budget, const kvq_footprint_query* query,
                                     int32_t* tokens) {
    return guard([&] {
        const cache_state& state = *get(cache, "cache").state;
        place(tokens, "tokens");
        const estimate e(query, state);
        *tokens = kvq::longest_context(state.cache, budget, e.sequences, e.use, e.policy);
    });
}

kvq_status kvq_get_budget(const kvq_cache_options* options, const kvq_budget_query* query, size_t* bytes) {
    return guard([&] {
        kvq_cache_options o = read_reserved(options, "options");
        const kvq_budget_query q = read_struct(query, "query");
        place(bytes, "bytes");
        const bool preallocate = std::exchange(o.preallocate, 0) != 0;
        o.byte_budget = 0;
        const cache_state state(o);
        kvq::cache_options given = state.cache.options();
        given.preallocate = preallocate;
        *bytes = kvq::budget(given, state.cache.layers(),
                             {q.tokens, q.sequences == 0 ? 1 : q.sequences, q.chunk == 0 ? 1 : q.chunk,
                              q.cuts, q.cross_tokens});
    });
}
}
