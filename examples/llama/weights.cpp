#include "weights.hpp"

#include <algorithm>

namespace llama {

linear::linear(const stored_matrix& stored) : stored_(stored) {
    if (*stored.type == type_f32) {
        transposed_.resize(stored.inputs, stored.outputs);
        constexpr Eigen::Index part = 64;
        matrix values;
        for (Eigen::Index first = 0; first < stored.outputs; first += part) {
            values.resize(std::min(part, stored.outputs - first), stored.inputs);
            stored.read_rows(first, values.rows(), values.data());
            transposed_.middleCols(first, values.rows()) = values.transpose();
        }
    }
}

template <bool Add>
void linear::run(const const_rows& x, rows out, kvq::thread_pool& workers) const {
    const auto store = [](auto&& to, const auto& product) {
        if constexpr (Add) {
            to.noalias() += product;
        } else {
            to.noalias() = product;
        }
    };
    if (transposed_.size() > 0) {
        for_each_token_block(x.rows(), workers, [&](Eigen::Index first, Eigen::Index count) {
            store(out.middleRows(first, count), x.middleRows(first, count) * transposed_);
        });
        return;
    }
    constexpr Eigen::Index tile = 128;  // outputs: a megabyte of floats or two
    const Eigen::Index outputs = stored_.outputs;
    workers.parallel_for(static_cast<int>((outputs + tile - 1) / tile), [&](int index) {
        const Eigen::Index first = index * tile, count = std::min(tile, outputs - first);
        thread_local matrix floats;
        floats.resize(count, stored_.inputs);
        stored_.read_rows(first, count, floats.data());
        store(out.middleCols(first, count), x * floats.transpose());
    });
}

void linear::multiply(const const_rows& x, rows out, kvq::thread_pool& workers) const {
    run<false>(x, out, workers);
}
void linear::multiply_add(const const_rows& x, rows out, kvq::thread_pool& workers) const {
    run<true>(x, out, workers);
}

}  // namespace llama
