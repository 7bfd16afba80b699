// Definitions of requantize.hpp.
#pragma once

#include "../core/error.hpp"
#include "../page/page_changes.hpp"
#include "requantize.hpp"
#include "requantizer.hpp"

namespace kvq { inline namespace KVQ_COMMON {

KVQ_FUNC requantize_report cache::plan_requantize(const sequence& s, const requantize_request& request,
                                                  int threads) const {
    const sequence* const one = &s;
    return plan_requantize(std::span(&one, 1), request, threads);
}
KVQ_FUNC requantize_report cache::plan_requantize(std::span<const sequence* const> sequences,
                                                  const requantize_request& request, int threads) const {
    detail::expect(threads >= 1, "requantizing needs at least 1 thread, got ", threads);
    detail::expect_distinct(sequences);
    // Nothing of them changes without an executor.
    const std::span<sequence* const> same(const_cast<sequence* const*>(sequences.data()), sequences.size());
    return detail::requantizer(const_cast<cache&>(*this), same, request).run({}, threads, nullptr, nullptr);
}
KVQ_FUNC requantize_report cache::requantize(sequence& s, const requantize_request& request) {
    return requantize(s, request, requantize_limit{});
}
KVQ_FUNC requantize_report cache::requantize(sequence& s, const requantize_request& request,
                                             const requantize_limit& limit) {
    sequence* const one = &s;
    workspace space(pool_.memory());
    return requantize(std::span(&one, 1), request, limit, serial_executor{}, space);
}
KVQ_FUNC requantize_report cache::requantize(std::span<sequence* const> sequences,
                                             const requantize_request& request, const requantize_limit& limit,
                                             executor_view executor, workspace& space) {
    detail::expect_distinct(sequences);
    return detail::requantizer(*this, sequences, request)
        .run(limit, executor.concurrency(), &executor, &space);
}

}}  // namespace kvq
