#include "weights.hpp"

#include <algorithm>
#include <utility>

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
    if (device_) {
        device_->multiply(stored_, x, out, Add, workers);
        return;
    }
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
    const Eigen::Index outputs = stored_.outputs;
    // Outputs: a megabyte of floats or two, and less where keys and values of few heads would leave threads
    // without work.
    const Eigen::Index tile = outputs >= 1024 ? 128 : 32;
    workers.parallel_for(static_cast<int>((outputs + tile - 1) / tile), [&](int index) {
        const Eigen::Index first = index * tile, count = std::min(tile, outputs - first);
        thread_local matrix floats;
        floats.resize(count, stored_.inputs);
        stored_.read_rows(first, count, floats.data());
        store(out.middleCols(first, count), x * floats.transpose());
    });
}

void model_weights::use(std::shared_ptr<product_device> device) {
    device_ = std::move(device);
    for (layer_weights& of : layers) {
        for (linear* const of_layer :
             {&of.query, &of.key, &of.value, &of.attention_output, &of.delta.mixed, &of.delta.gate,
              &of.delta.beta, &of.delta.decay, &of.delta.output, &of.gate, &of.up, &of.down}) {
            of_layer->use(device_.get());
        }
    }
    logits.use(device_.get());
}

void linear::multiply(const const_rows& x, rows out, kvq::thread_pool& workers) const {
    run<false>(x, out, workers);
}
void linear::multiply_add(const const_rows& x, rows out, kvq::thread_pool& workers) const {
    run<true>(x, out, workers);
}

}  // namespace llama
