// Keys of a cache on the device whose plan comes from its own first tokens, as policy/self_calibration.hpp
// makes it on the CPU: the same plan, and the same bytes except where quantized pages become a preset's
// (docs/guide/gpu.md).
//
//   kvq::calibration own({.layers = 32, .kv_heads = 8, .head_dim = 128});    queries may be added to it
//   per step, until done:   begin, append, attend, ...
//                           self_calibrate(gpu, ids, "mix4/", own, 512, stream, done);
//
// Once the sequences hold so many tokens, their pages are copied to the host, which reads the keys (x^ of
// their pages), makes the plan and gives it to the format (cache::calibrate). "mix4/" is for keys alone,
// "mix4" for values as well. New pages of these and of later sequences take the format; pages that become
// smaller are requantized.
// Contract: no page may have the format before. The result depends only on the tokens of the sequences, in
// their order, and on the queries. A status that is not success has changed nothing; if `statistics` has keys
// then, only requantize() had no memory, and can be called again. Formats whose pages need a plan or a
// rotation to be read cannot be the first ones. Waits for the stream when it copies, once. O(bytes)
#pragma once

#include "../../policy/self_calibration.hpp"
#include "host_pages.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

/// statistics: of the shape of the cache; queries at most. It has the keys as well once `done` is true.
/// tokens: of all sequences together, at least 64. done: false until there are enough; nothing has changed
/// then. Raises kvq::error as kvq::self_calibration does.
inline status self_calibrate(cache& of, std::span<const sequence_id> ids, std::string_view format,
                             calibration& statistics, int tokens, cudaStream_t stream, bool& done) {
    done = false;
    if (tokens < calibration::group)
        return detail::bad_value("a cache calibrates from at least %d tokens, not %d", calibration::group,
                                 tokens);
    if (status s = detail::cache_access::check_calibration(of, format, statistics.shape()); !s) return s;
    const requantize_request request{.format = format, .only_smaller = true, .new_pages = true};
    requantize_report planned;
    if (status s = of.plan_requantize(ids, request, planned); !s) return s;  // refuses what it would refuse
    std::int64_t held = 0;
    for (const sequence_id id : ids) held += of.tokens(id);
    if (held < tokens) return {};
    host_pages pages(of);
    common::sequence_access::expect_no_state(pages.cache(), "a cache that calibrates itself");
    (void)pages.cache().shape();  // of all layers, or it raises an error
    calibration all = statistics;
    int left = tokens;
    for (const sequence_id id : ids) {
        const int n = common::smaller(left, of.tokens(id));
        if (n == 0) continue;
        left -= n;
        sequence s = pages.cache().new_sequence();
        if (status r = offload(of, id, s, stream); !r) return r;
        for (int layer = 0; layer < of.layer_count(); ++layer) add_keys(all, pages.cache(), s, layer, 0, n);
    }
    for (int layer = 0; layer < of.layer_count(); ++layer)
        if (all.keys(layer, 0) < calibration::group) return {};
    if (status s = of.calibrate(format, all, stream); !s) return s;
    statistics = std::move(all);
    if (status s = of.commit_to(format); !s) return s;
    status s = of.requantize(ids, request, stream);
    done = static_cast<bool>(s);
    return s;
}

}}}  // namespace kvq::cuda
