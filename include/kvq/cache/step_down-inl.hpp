// Definitions of step_down.hpp.
#pragma once

#include "../core/bits.hpp"
#include "../core/error.hpp"
#include "requantize-inl.hpp"
#include "sequence_access.hpp"
#include "step_down.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

class stepper {
public:
    stepper(cache& of, std::span<sequence* const> sequences, const step_down_policy& policy)
        : cache_(of),
          sequences_(sequences.begin(), sequences.end()),
          policy_(policy),
          space_(of.pool().memory()) {
        sequence_access::expect_members(of, sequences, "of those to step down");
        expect_distinct(sequences);
        check_policy(of, policy);
        for (const tier& t : policy.tiers) formats_.push_back(t.format);
    }

    step_down_report run(executor_view ex) {
        for (sequence* const s : sequences_) (void)sequence_access::committed_tables(*s);
        report_.bytes_before = report_.bytes_after = report_.bytes_peak = cache_.pool().bytes_in_use();
        return run(ex.concurrency(), &ex, nullptr);
    }
    /// Changes copies of the tables alone.
    step_down_report rehearse(int threads) {
        page_rehearsal rehearsal(cache_, sequences_);
        report_.bytes_before = report_.bytes_after = report_.bytes_peak = rehearsal.bytes_in_use();
        return run(threads, nullptr, &rehearsal);
    }

private:
    step_down_report run(int threads, const executor_view* ex, page_rehearsal* rehearsal) {
        if (!policy_.tiers.empty() && !sequences_.empty()) {
            const auto down = [&](std::size_t tier, const change_range& range) {
                return lower(tier, range, threads, ex, rehearsal);
            };
            std::vector<int> ages, lengths;
            std::vector<const page_table*> tables;
            for (const tier& t : policy_.tiers) ages.push_back(t.age);
            for (std::size_t i = 0; i < sequences_.size(); ++i) {
                sequence& s = *sequences_[i];
                lengths.push_back(s.tokens());
                for (const page_table& table : rehearsal ? rehearsal->tables(i) : sequence_access::tables(s))
                    tables.push_back(&table);
            }
            step_down_by_age(ages, lengths, down);
            step_down_by_budget(ages.size(), tables, report_.bytes_after, policy_.byte_budget, down);
        }
        report_.fits = report_.bytes_after <= policy_.byte_budget;
        return std::move(report_);
    }

    /// Pages of a range to tier `index`. Returns the bytes in the pool.
    std::size_t lower(std::size_t index, const change_range& range, int threads, const executor_view* ex,
                      page_rehearsal* rehearsal) {
        requantize_request request;
        request.key = policy_.tiers[index].format.key;
        request.value = policy_.tiers[index].format.value;
        request.first_layer = policy_.first_layers_kept;
        request.last_layer = cache_.layer_count() - policy_.last_layers_kept;
        request.first_token = range.first_token;
        request.last_token = range.last_token;
        request.only_smaller = true;
        // By age a page has reached the tiers before, too: of as many bytes it takes the first one's,
        // whenever it comes.
        const std::span<const layer_format> wider = std::span(formats_).first(range.only_freed ? 0 : index);
        const requantize_report r =
            requantizer(cache_, std::span<sequence* const>(sequences_), request, range, wider, rehearsal)
                .run({}, threads, ex, &space_);
        report_.bytes_peak = larger(report_.bytes_peak, r.bytes_peak);
        report_.bytes_after = r.bytes_after;
        if (r.pages > 0)
            report_.steps.push_back(
                {static_cast<int>(index), range.first_token, range.last_token, r.pages, r.bytes_after});
        return r.bytes_after;
    }

    cache& cache_;
    std::vector<sequence*> sequences_;
    const step_down_policy& policy_;
    std::vector<layer_format> formats_;  // of the tiers
    workspace space_;
    step_down_report report_;
};

KVQ_FUNC void check_policy(const cache& of, const step_down_policy& policy) {
    const int layers = of.layer_count(), key_formats = of.table(tensor::key).listed(),
              value_formats = of.table(tensor::value).listed();
    expect(policy.first_layers_kept >= 0 && policy.last_layers_kept >= 0 &&
               policy.first_layers_kept <= layers &&
               policy.last_layers_kept <= layers - policy.first_layers_kept,
           "cannot keep ", policy.first_layers_kept, " first and ", policy.last_layers_kept, " last of ",
           layers, " layers");
    for (std::size_t i = 0; i < policy.tiers.size(); ++i) {
        const layer_format& f = policy.tiers[i].format;
        expect(f.key >= 0 && f.key < key_formats && f.value >= 0 && f.value < value_formats, "tier ", i,
               " has formats ", f.key, " and ", f.value, ", not among the ", key_formats, " and ",
               value_formats, " listed ones");
        for (int layer = policy.first_layers_kept; layer < layers - policy.last_layers_kept; ++layer)
            of.expect_holds_rotary(layer, f.key);
        const int before = i == 0 ? 0 : policy.tiers[i - 1].age;
        expect(policy.tiers[i].age >= before, "tier ", i, " starts at age ", policy.tiers[i].age, ", before ",
               before);
    }
}

}

KVQ_FUNC step_down_report step_down(cache& of, std::span<sequence* const> sequences,
                                    const step_down_policy& policy, executor_view executor) {
    return detail::stepper(of, sequences, policy).run(executor);
}

KVQ_FUNC step_down_report step_down(cache& of, sequence& s, const step_down_policy& policy) {
    sequence* const one = &s;
    return step_down(of, std::span<sequence* const>(&one, 1), policy);
}

KVQ_FUNC step_down_report plan_step_down(const cache& of, std::span<const sequence* const> sequences,
                                         const step_down_policy& policy, int threads) {
    detail::expect(threads >= 1, "stepping down needs at least 1 thread, got ", threads);
    // Nothing of them changes without an executor.
    const std::span<sequence* const> same(const_cast<sequence* const*>(sequences.data()), sequences.size());
    return detail::stepper(const_cast<cache&>(of), same, policy).rehearse(threads);
}

KVQ_FUNC step_down_report plan_step_down(const cache& of, const sequence& s, const step_down_policy& policy,
                                         int threads) {
    const sequence* const one = &s;
    return plan_step_down(of, std::span<const sequence* const>(&one, 1), policy, threads);
}

}}
