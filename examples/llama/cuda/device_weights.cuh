// The weights of a model in device memory, as T.
//
//   query, key and value are one matrix, gate and up another: [outputs][inputs], outputs one after the other.
//   Heads of the cache may be wider than the model's (`padded`): the attention output's matrix has zeros for
//     the channels that are not there.
#pragma once

#include "engine.hpp"
#include "kernels.cuh"
#include "launch.cuh"

#include <algorithm>
#include <cmath>

namespace llama::device {

template <class T>
struct device_layer {
    device_buffer<float> attention_norm, query_bias, key_bias, value_bias, attention_output_bias, query_norm,
        key_norm, attention_output_norm, feed_forward_norm, feed_forward_output_norm;
    device_buffer<T> query_key_value, attention_output, gate_up, down;
};

template <class T>
struct device_weights final : device_model {
    int padded = 0;  // channels of a head in the cache
    device_buffer<T> embedding, own_logits;
    std::vector<device_layer<T>> layers;
    device_buffer<float> final_norm;

    const T* logits() const { return own_logits.size() > 0 ? own_logits.get() : embedding.get(); }
    int products() const {
        return (config.shape.heads + 2 * config.shape.kv_heads) * config.shape.head_dim();
    }

    device_weights(const weights_source& source, int padded_dim) : padded(padded_dim) {
        config = source.config;
        type = std::is_same_v<T, kvq::float16> ? precision::fp16 : precision::bf16;
        const model_shape& s = config.shape;
        check(cudaStreamCreate(&stream_), "creating a stream");
        const auto size = [](int a, int b) {
            return static_cast<std::size_t>(a) * static_cast<std::size_t>(b);
        };
        embedding = buffer<T>(size(s.vocab, s.dim));
        if (!source.tied) own_logits = buffer<T>(size(s.vocab, s.dim));
        const int inner = s.heads * padded;
        for (int layer = 0; layer < s.layers; ++layer) {
            device_layer<T> to;
            to.query_key_value = buffer<T>(size(products(), s.dim));
            to.attention_output = buffer<T>(size(s.dim, inner));
            to.gate_up = buffer<T>(size(2 * s.hidden_dim, s.dim));
            to.down = buffer<T>(size(s.dim, s.hidden_dim));
            if (source.random)
                draw(to, source.head_norms);
            else
                load(to, source.layers[static_cast<std::size_t>(layer)]);
            layers.push_back(std::move(to));
        }
        if (source.random) {
            draw(embedding, 1);
            draw(own_logits, s.dim);
            final_norm = ones(s.dim);
        } else {
            load(source.embedding, embedding.get());
            if (!source.tied) load(source.logits, own_logits.get());
            final_norm = row(source.final_norm);
        }
        // The engine's stream does not wait for copies that are under way.
        check(cudaDeviceSynchronize(), "loading weights");
        staging_ = {};
    }
    ~device_weights() override { (void)cudaStreamDestroy(stream_); }

private:
    template <class X>
    device_buffer<X> buffer(std::size_t size) {
        bytes += size * sizeof(X);
        return device_buffer<X>(size);
    }
    device_buffer<float> row(const std::vector<float>& values) {
        device_buffer<float> to = buffer<float>(values.size());
        if (!values.empty())
            check(cudaMemcpy(to.get(), values.data(), to.bytes(), cudaMemcpyHostToDevice), "copying weights");
        return to;
    }
    device_buffer<float> ones(int size) {
        return row(std::vector<float>(static_cast<std::size_t>(size), 1.0f));
    }

    // Some megabytes at a time. group, wide: inputs of a head, and of a head with its zeros.
    void load(const matrix_source& from, T* to, int group = 0, int wide = 0) {
        if (group == 0) group = wide = from.inputs;
        const auto row_size = static_cast<std::size_t>(from.inputs);
        const std::size_t out_row =
            row_size / static_cast<std::size_t>(group) * static_cast<std::size_t>(wide);
        const int most = std::max(1, static_cast<int>((std::size_t{4} << 20) / row_size));
        if (wide > group)
            check(
                cudaMemsetAsync(to, 0, static_cast<std::size_t>(from.outputs) * out_row * sizeof(T), stream_),
                "clearing weights");
        for (int first = 0; first < from.outputs; first += most) {
            const int count = std::min(most, from.outputs - first);
            const std::size_t values = static_cast<std::size_t>(count) * row_size;
            host_.resize(values);
            from.read(first, count, host_.data());
            if (staging_.size() < values) staging_ = device_buffer<float>(values);
            check(cudaMemcpy(staging_.get(), host_.data(), values * sizeof(float), cudaMemcpyHostToDevice),
                  "copying weights");
            launch(convert_kernel<T>, dim3(static_cast<unsigned>((values + row_threads - 1) / row_threads)),
                   row_threads, stream_, staging_.get(), values, from.inputs, group, wide,
                   to + static_cast<std::size_t>(first) * out_row);
            check(cudaStreamSynchronize(stream_), "converting weights");
        }
    }
    void load(device_layer<T>& to, const layer_source& from) {
        const auto after = [](const matrix_source& m) {
            return static_cast<std::size_t>(m.outputs) * static_cast<std::size_t>(m.inputs);
        };
        load(from.query, to.query_key_value.get());
        load(from.key, to.query_key_value.get() + after(from.query));
        load(from.value, to.query_key_value.get() + after(from.query) + after(from.key));
        load(from.attention_output, to.attention_output.get(), config.shape.head_dim(), padded);
        load(from.gate, to.gate_up.get());
        load(from.up, to.gate_up.get() + after(from.gate));
        load(from.down, to.down.get());
        to.attention_norm = row(from.attention_norm);
        to.query_bias = row(from.query_bias);
        to.key_bias = row(from.key_bias);
        to.value_bias = row(from.value_bias);
        to.attention_output_bias = row(from.attention_output_bias);
        to.query_norm = row(from.query_norm);
        to.key_norm = row(from.key_norm);
        to.attention_output_norm = row(from.attention_output_norm);
        to.feed_forward_norm = row(from.feed_forward_norm);
        to.feed_forward_output_norm = row(from.feed_forward_output_norm);
    }

    void draw(device_buffer<T>& to, int inputs) {
        if (to.size() == 0) return;
        launch(random_kernel<T>, dim3(4096), row_threads, stream_, to.get(), to.size(),
               1.0f / std::sqrt(static_cast<float>(inputs)), 2654435769u * ++drawn_);
    }
    void draw(device_layer<T>& to, bool head_norms) {
        const model_shape& s = config.shape;
        draw(to.query_key_value, s.dim);
        draw(to.attention_output, s.query_dim());
        draw(to.gate_up, s.dim);
        draw(to.down, s.hidden_dim);
        to.attention_norm = ones(s.dim);
        to.feed_forward_norm = ones(s.dim);
        if (head_norms) {
            to.query_norm = ones(s.head_dim());
            to.key_norm = ones(s.head_dim());
        }
    }

    cudaStream_t stream_ = nullptr;
    device_buffer<float> staging_;
    std::vector<float> host_;
    std::uint32_t drawn_ = 0;
};

}  // namespace llama::device
