// Statistics of keys and queries, of the C interface.
#include <kvq/policy/self_calibration.hpp>

#include "objects.hpp"

using namespace kvq::c;

extern "C" {

kvq_status kvq_statistics_create(int32_t layers, int32_t kv_heads, int32_t head_dim, int32_t products,
                                 kvq_statistics** out) {
    return guard([&] {
        place(out, "out");
        *out = make<kvq_statistics>(kvq::calibration({layers, kv_heads, head_dim, 0}, products != 0));
    });
}

kvq_status kvq_statistics_free(kvq_statistics* statistics) { return free_handle(statistics, "statistics"); }

kvq_status kvq_statistics_add_keys(kvq_statistics* statistics, int32_t layer, const kvq_tensor* k) {
    return guard([&] {
        kvq::calibration& sums = get(statistics, "statistics").sums;
        with_tensor(k, "k", [&](const auto& view) {
            expect(view.data != nullptr || view.tokens == 0, KVQ_ERROR_HANDLE, "k has no data");
            sums.add_keys(layer, view);
        });
    });
}

kvq_status kvq_statistics_add_sequence(kvq_statistics* statistics, const kvq_sequence* sequence,
                                       int32_t first, int32_t count) {
    return guard([&] {
        kvq::calibration& sums = get(statistics, "statistics").sums;
        const kvq_sequence& s = get(sequence, "sequence");
        expect(sums.shape().layers == s.of->cache.shape().layers, KVQ_ERROR_ARGUMENT, "statistics of ",
               sums.shape().layers, " layers do not fit a sequence of ", s.of->cache.shape().layers);
        kvq::calibration with = sums;
        for (int layer = 0; layer < sums.shape().layers; ++layer)
            kvq::add_keys(with, s.of->cache, s.sequence, layer, first, count);
        sums = std::move(with);
    });
}

kvq_status kvq_statistics_add_queries(kvq_statistics* statistics, int32_t layer, const kvq_tensor* q) {
    return guard([&] {
        kvq::calibration& sums = get(statistics, "statistics").sums;
        with_tensor(q, "q", [&](const auto& view) {
            expect(view.data != nullptr || view.tokens == 0, KVQ_ERROR_HANDLE, "q has no data");
            sums.add_queries(layer, view);
        });
    });
}

kvq_status kvq_statistics_save(const kvq_statistics* statistics, kvq_write write, void* user) {
    return guard([&] {
        const std::vector<std::byte> bytes = get(statistics, "statistics").sums.save();
        expect(write != nullptr, KVQ_ERROR_HANDLE, "write is NULL");
        caller_sink{write, user}(bytes.data(), bytes.size());
    });
}

kvq_status kvq_statistics_load(const void* data, size_t bytes, kvq_statistics** out) {
    return guard(
        [&] {
            expect_data(data, "data");
            place(out, "out");
            *out = make<kvq_statistics>(kvq::calibration::load({static_cast<const std::byte*>(data), bytes}));
        },
        KVQ_ERROR_DATA);
}
}
