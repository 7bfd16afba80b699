// Stepping down: older pages are kept in fewer bits, by age, and further under a byte budget as the context fills.
//
//   step_down_policy policy{.tiers = {{.age = 0, .format = {0, 0}},         // 16 bit
//                                     {.age = 1024, .format = {1, 1}},      // int8 from 1024 tokens behind the end
//                                     {.age = 8192, .format = {2, 2}}},     // 4 bit from 8192
//                           .byte_budget = std::size_t{1} << 30};
//   step_down(cache, sequence, policy);                                     // between decode steps
//
// By age: a page takes the format of the last tier whose age all tokens of the page have reached, in any sequence that holds the page.
// By budget: while the pool holds more than `byte_budget` bytes, the oldest page of the widest tier goes one tier down. A
// page that would not be freed stays unchanged: a page that a sequence outside of the given ones holds too, or a page of which
// the sequence would keep a 16-bit copy.
// Pages only shrink; sinks, recent tokens and the page being filled never change. The result depends on the
// pages, on the holders of the pages and on the number of tokens, not on time or threads. step_down is a call of its own, not a part
// of append(): call it after drafted tokens were accepted or trimmed, so that speculation does not change the pages.
// step_down requantizes (cache/requantize.hpp), tier by tier: same peak, same error.
#pragma once

#include "requantize.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// One format of the ladder, and the age from which it applies.
struct tier {
    int age = 0;            ///< least number of tokens behind the newest token of a page
    layer_format format{};  ///< 0-based in cache_options::keys and values
};

struct step_down_policy {
    std::vector<tier>
        tiers;  ///< ages ascending, formats from wide to narrow (a page that would not shrink does not change)
    std::size_t byte_budget = page_pool::no_budget;  ///< for the whole pool
    /// First and last layers that no tier touches (they are the most sensitive ones in most models).
    int first_layers_kept = 0, last_layers_kept = 0;
};

/// One step, for all sequences: pages that cover tokens [first_token, last_token) went to tier `tier`.
struct step_down_step {
    int tier = 0;
    int first_token = 0, last_token = 0;
    std::size_t pages = 0;
    std::size_t bytes_after = 0;  ///< in the pool
};

struct step_down_report {
    std::vector<step_down_step> steps;
    std::size_t bytes_before = 0, bytes_after = 0, bytes_peak = 0;  ///< in the pool
    /// False: the budget is still exceeded, though every page that would be freed is in the last tier.
    bool fits = true;
};

namespace detail {

/// Raises kvq::error for a policy that does not fit the cache.
inline void check_policy(const cache& of, const step_down_policy& policy) {
    const int layers = of.shape().layers, key_formats = of.table(tensor::key).listed(),
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
        const int before = i == 0 ? 0 : policy.tiers[i - 1].age;
        expect(policy.tiers[i].age >= before, "tier ", i, " starts at age ", policy.tiers[i].age, ", before ",
               before);
    }
}

class stepper {
public:
    stepper(cache& of, std::span<sequence* const> sequences, const step_down_policy& policy)
        : cache_(of),
          sequences_(sequences.begin(), sequences.end()),
          policy_(policy),
          space_(of.pool().memory()) {
        for (std::size_t i = 0; i < sequences.size(); ++i)
            expect(sequences[i] != nullptr, "sequence ", i, " of those to step down is null");
        expect_distinct(sequences);
        check_policy(of, policy);
        report_.bytes_before = report_.bytes_after = report_.bytes_peak = of.pool().bytes_in_use();
    }

    step_down_report run(executor_view ex) {
        if (!policy_.tiers.empty() && !sequences_.empty()) {
            const auto down = [&](std::size_t tier, const change_range& range) {
                return lower(tier, range, ex);
            };
            std::vector<int> ages, lengths;
            std::vector<const page_table*> tables;
            for (const tier& t : policy_.tiers) ages.push_back(t.age);
            for (const sequence* s : sequences_) {
                lengths.push_back(s->tokens());
                for (const page_table& table : sequence_access::tracks(*s)) tables.push_back(&table);
            }
            step_down_by_age(ages, lengths, down);
            step_down_by_budget(ages.size(), tables, report_.bytes_after, policy_.byte_budget, down);
        }
        report_.fits = report_.bytes_after <= policy_.byte_budget;
        return std::move(report_);
    }

private:
    /// Pages of a range to tier `index`. Returns the bytes in the pool.
    std::size_t lower(std::size_t index, const change_range& range, executor_view ex) {
        requantize_request request;
        request.key = policy_.tiers[index].format.key;
        request.value = policy_.tiers[index].format.value;
        request.first_layer = policy_.first_layers_kept;
        request.last_layer = cache_.shape().layers - policy_.last_layers_kept;
        request.first_token = range.first_token;
        request.last_token = range.last_token;
        request.only_smaller = true;
        const requantize_report r =
            requantizer(cache_, std::span<sequence* const>(sequences_), request, range)
                .run({}, ex.concurrency(), &ex, &space_);
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
    workspace space_;
    step_down_report report_;
};

}  // namespace detail

/// Applies the policy to sequences of one cache; pages that they share stay shared. O(pages) of all sequences and tiers, plus
/// the quantizing. Raises kvq::error for an impossible policy before anything changes. Raises kvq::out_of_memory when the pool has no
/// room for one more page per thread (keep the policy's budget that far below the pool's); the steps until then stay done.
inline step_down_report step_down(cache& of, std::span<sequence* const> sequences,
                                  const step_down_policy& policy,
                                  executor_view executor = serial_executor{}) {
    return detail::stepper(of, sequences, policy).run(executor);
}
inline step_down_report step_down(cache& of, sequence& s, const step_down_policy& policy) {
    sequence* const one = &s;
    return step_down(of, std::span<sequence* const>(&one, 1), policy);
}

}}  // namespace kvq
