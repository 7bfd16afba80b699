// Flash attention of ggml's CPU backend (ggml_flash_attn_ext), for rows beside this library's own.
#pragma once

#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

namespace bench {

/// One layer: q is [query tokens, q_heads, head_dim], k and v are [tokens, kv_heads, head_dim], the queries are the last tokens.
class ggml_attention {
public:
    ggml_attention(ggml_type type, int q_tokens, int q_heads, int kv_heads, int head_dim, int tokens,
                   int threads)
        : backend_(ggml_backend_cpu_init()),
          context_(ggml_init({16 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true})) {
        if (!backend_ || !context_) throw std::runtime_error("ggml does not start");
        ggml_backend_cpu_set_n_threads(backend_.get(), threads);
        ggml_threadpool_params params = ggml_threadpool_params_default(threads);
        pool_.reset(ggml_threadpool_new(&params));
        ggml_backend_cpu_set_threadpool(backend_.get(), pool_.get());

        ggml_context* const c = context_.get();
        q_ = ggml_new_tensor_3d(c, GGML_TYPE_F32, head_dim, q_tokens, q_heads);
        k_ = ggml_new_tensor_3d(c, type, head_dim, tokens, kv_heads);
        v_ = ggml_new_tensor_3d(c, type, head_dim, tokens, kv_heads);
        if (q_tokens > 1) mask_ = ggml_new_tensor_2d(c, GGML_TYPE_F16, tokens, q_tokens);
        const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
        out_ = ggml_flash_attn_ext(c, q_, k_, v_, mask_, scale, 0.0f, 0.0f);
        graph_ = ggml_new_graph(c);
        ggml_build_forward_expand(graph_, out_);
        memory_.reset(ggml_backend_alloc_ctx_tensors(c, backend_.get()));
        if (!memory_) throw std::runtime_error("ggml finds no memory");
    }

    /// Stores the tensors; k and v become what their type holds of them.
    void fill(const std::vector<float>& q, std::vector<float>& k, std::vector<float>& v) {
        std::vector<float> turned = by_head(q, q_);
        ggml_backend_tensor_set(q_, turned.data(), 0, ggml_nbytes(q_));
        store(k, k_);
        store(v, v_);
        if (!mask_) return;
        std::vector<ggml_fp16_t> seen(static_cast<std::size_t>(ggml_nelements(mask_)));
        const std::int64_t tokens = mask_->ne[0], queries = mask_->ne[1];
        for (std::int64_t i = 0; i < queries; ++i)
            for (std::int64_t t = 0; t < tokens; ++t)
                seen[static_cast<std::size_t>(i * tokens + t)] =
                    ggml_fp32_to_fp16(t <= tokens - queries + i ? 0.0f : -INFINITY);
        ggml_backend_tensor_set(mask_, seen.data(), 0, ggml_nbytes(mask_));
    }

    void run() {
        if (ggml_backend_graph_compute(backend_.get(), graph_) != GGML_STATUS_SUCCESS)
            throw std::runtime_error("ggml does not compute");
    }

    std::size_t cache_bytes() const { return ggml_nbytes(k_) + ggml_nbytes(v_); }

    /// [query tokens, q_heads, head_dim]
    std::vector<float> output() const {
        std::vector<float> out(static_cast<std::size_t>(ggml_nelements(out_)));
        ggml_backend_tensor_get(out_, out.data(), 0, ggml_nbytes(out_));
        return out;
    }

private:
    template <auto Free>
    struct freed_by {
        template <class T>
        void operator()(T* p) const {
            Free(p);
        }
    };

    /// [tokens, heads, dim] -> [heads, tokens, dim]
    static std::vector<float> by_head(const std::vector<float>& x, const ggml_tensor* t) {
        const auto dim = static_cast<std::size_t>(t->ne[0]), tokens = static_cast<std::size_t>(t->ne[1]),
                   heads = static_cast<std::size_t>(t->ne[2]);
        std::vector<float> turned(x.size());
        for (std::size_t i = 0; i < tokens; ++i)
            for (std::size_t h = 0; h < heads; ++h)
                std::memcpy(&turned[(h * tokens + i) * dim], &x[(i * heads + h) * dim], dim * sizeof(float));
        return turned;
    }

    static void store(std::vector<float>& x, ggml_tensor* t) {
        std::vector<float> turned = by_head(x, t);
        const std::int64_t dim = t->ne[0], rows = t->ne[1] * t->ne[2];
        std::vector<std::byte> coded(ggml_nbytes(t));
        if (t->type == GGML_TYPE_F16)
            ggml_fp32_to_fp16_row(turned.data(), reinterpret_cast<ggml_fp16_t*>(coded.data()), rows * dim);
        else
            ggml_quantize_chunk(t->type, turned.data(), coded.data(), 0, rows, dim, nullptr);
        ggml_backend_tensor_set(t, coded.data(), 0, coded.size());
        ggml_get_type_traits(t->type)->to_float(coded.data(), turned.data(), rows * dim);
        const auto heads = static_cast<std::size_t>(t->ne[2]), tokens = static_cast<std::size_t>(t->ne[1]),
                   width = static_cast<std::size_t>(dim);
        for (std::size_t h = 0; h < heads; ++h)
            for (std::size_t i = 0; i < tokens; ++i)
                std::memcpy(&x[(i * heads + h) * width], &turned[(h * tokens + i) * width],
                            width * sizeof(float));
    }

    std::unique_ptr<ggml_backend, freed_by<ggml_backend_free>> backend_;
    std::unique_ptr<ggml_context, freed_by<ggml_free>> context_;
    std::unique_ptr<ggml_threadpool, freed_by<ggml_threadpool_free>> pool_;
    std::unique_ptr<ggml_backend_buffer, freed_by<ggml_backend_buffer_free>> memory_;
    ggml_tensor *q_ = nullptr, *k_ = nullptr, *v_ = nullptr, *mask_ = nullptr, *out_ = nullptr;
    ggml_cgraph* graph_ = nullptr;
};

}  // namespace bench
