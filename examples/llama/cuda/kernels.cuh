// The engine's own kernels: everything between matrix products and attention.
//
//   states     fp32, [rows][dim]: the residual stream
//   rows       tokens of a prompt, or the newest token of every sequence
// Contract: T is kvq::float16 or kvq::bfloat16; sums and functions are fp32. Angles come from a table in fp32
// that was made in double.
#pragma once

#include <kvq/core/float_formats.hpp>

#include <cuda_runtime.h>

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace llama::device {

inline constexpr int row_threads = 256;

__device__ inline float sum_of_warp(float x) {
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}
// Of a block of row_threads; every thread gets it.
__device__ inline float sum_of_block(float x) {
    __shared__ float sums[row_threads / 32];
    x = sum_of_warp(x);
    __syncthreads();  // the sums of an earlier call were read
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.0f;
    for (const float s : sums) sum += s;
    return sum;
}

template <class T>
__global__ void embed_kernel(const T* table, const int* tokens, int dim, float scale, float* states) {
    const std::size_t row = blockIdx.x;
    const T* const from = table + static_cast<std::size_t>(tokens[row]) * static_cast<std::size_t>(dim);
    float* const to = states + row * static_cast<std::size_t>(dim);
    for (int i = static_cast<int>(threadIdx.x); i < dim; i += row_threads)
        to[i] = scale * static_cast<float>(from[i]);
}

// out = states / rms(states) * weight
template <class T>
__global__ void norm_kernel(const float* states, const float* weight, int dim, float epsilon, T* out) {
    const std::size_t row = static_cast<std::size_t>(blockIdx.x) * static_cast<std::size_t>(dim);
    float squares = 0.0f;
    for (int i = static_cast<int>(threadIdx.x); i < dim; i += row_threads)
        squares += states[row + i] * states[row + i];
    const float factor = 1.0f / sqrtf(sum_of_block(squares) / static_cast<float>(dim) + epsilon);
    for (int i = static_cast<int>(threadIdx.x); i < dim; i += row_threads)
        out[row + i] = T(states[row + i] * weight[i] * factor);
}

// states += update + bias, or the norm of that. bias, weight: null if there is none.
static __global__ void add_kernel(const float* update, const float* bias, const float* weight, int dim,
                                  float epsilon, float* states) {
    const std::size_t row = static_cast<std::size_t>(blockIdx.x) * static_cast<std::size_t>(dim);
    const auto value = [&](int i) { return update[row + i] + (bias != nullptr ? bias[i] : 0.0f); };
    float factor = 1.0f;
    if (weight != nullptr) {
        float squares = 0.0f;
        for (int i = static_cast<int>(threadIdx.x); i < dim; i += row_threads) squares += value(i) * value(i);
        factor = 1.0f / sqrtf(sum_of_block(squares) / static_cast<float>(dim) + epsilon);
    }
    for (int i = static_cast<int>(threadIdx.x); i < dim; i += row_threads)
        states[row + i] += value(i) * factor * (weight != nullptr ? weight[i] : 1.0f);
}

// {cos, sin} of position * frequency, times the amplitude: [positions][pairs].
static __global__ void angles_kernel(const double* frequencies, double amplitude, int pairs, float2* table) {
    for (int pair = static_cast<int>(threadIdx.x); pair < pairs; pair += row_threads) {
        const double angle = static_cast<double>(blockIdx.x) * frequencies[pair];
        table[static_cast<std::size_t>(blockIdx.x) * static_cast<std::size_t>(pairs) + pair] = {
            static_cast<float>(amplitude * cos(angle)), static_cast<float>(amplitude * sin(angle))};
    }
}

template <class T>
struct head_args {
    const float* products;                            // [rows][heads + 2 kv_heads][dim]
    const float *query_bias, *key_bias, *value_bias;  // null: none
    const float *query_norm, *key_norm;               // [dim], null: none
    const float2* angles;                             // [positions][dim / 2]
    const int* positions;                             // by row; null: they count from `first`
    int first, heads, kv_heads, dim, padded;  // padded: channels of a head in the cache, zeros behind dim
    bool interleaved;
    float epsilon, query_scale;
    T *q, *k, *v;  // [rows][heads][padded], [rows][kv_heads][padded]
};

// Bias, norm and rotation of every head. A warp takes a head of a row.
template <class T>
__global__ void heads_kernel(const head_args<T> a) {
    const int all = a.heads + 2 * a.kv_heads, lane = static_cast<int>(threadIdx.x) % 32;
    const int head = static_cast<int>(blockIdx.y * (row_threads / 32) + threadIdx.x / 32);
    if (head >= all) return;
    const std::size_t row = blockIdx.x;
    const float* const from =
        a.products + (row * static_cast<std::size_t>(all) + static_cast<std::size_t>(head)) *
                         static_cast<std::size_t>(a.dim);
    const bool is_query = head < a.heads, is_value = head >= a.heads + a.kv_heads;
    const int number = is_query ? head : is_value ? head - a.heads - a.kv_heads : head - a.heads;
    const float* bias = is_query ? a.query_bias : is_value ? a.value_bias : a.key_bias;
    if (bias != nullptr) bias += number * a.dim;
    const float* const norm = is_query ? a.query_norm : is_value ? nullptr : a.key_norm;
    T* const to =
        (is_query   ? a.q
         : is_value ? a.v
                    : a.k) +
        (row * static_cast<std::size_t>(is_query ? a.heads : a.kv_heads) + static_cast<std::size_t>(number)) *
            static_cast<std::size_t>(a.padded);
    const auto value = [&](int i) { return from[i] + (bias != nullptr ? bias[i] : 0.0f); };
    for (int i = a.dim + lane; i < a.padded; i += 32) to[i] = T(0.0f);
    if (is_value) {
        for (int i = lane; i < a.dim; i += 32) to[i] = T(value(i));
        return;
    }
    float factor = 1.0f;
    if (norm != nullptr) {
        float squares = 0.0f;
        for (int i = lane; i < a.dim; i += 32) squares += value(i) * value(i);
        factor = 1.0f / sqrtf(sum_of_warp(squares) / static_cast<float>(a.dim) + a.epsilon);
    }
    const int pairs = a.dim / 2;
    const int position = a.positions != nullptr ? a.positions[row] : a.first + static_cast<int>(row);
    const float2* const angles =
        a.angles + static_cast<std::size_t>(position) * static_cast<std::size_t>(pairs);
    const float size = is_query ? a.query_scale : 1.0f;
    for (int pair = lane; pair < pairs; pair += 32) {
        const int i = a.interleaved ? 2 * pair : pair, j = a.interleaved ? i + 1 : pair + pairs;
        const float x = value(i) * factor * (norm != nullptr ? norm[i] : 1.0f),
                    y = value(j) * factor * (norm != nullptr ? norm[j] : 1.0f);
        const float2 angle = angles[pair];
        to[i] = T(size * (x * angle.x - y * angle.y));
        to[j] = T(size * (x * angle.y + y * angle.x));
    }
}

// out = activation(gate) * up. gate_up: [rows][2][hidden].
template <class T>
__global__ void gate_kernel(const T* gate_up, int hidden, bool gelu, T* out) {
    const int i = static_cast<int>(blockIdx.y * row_threads + threadIdx.x);
    if (i >= hidden) return;
    const std::size_t row = blockIdx.x, size = static_cast<std::size_t>(hidden);
    const float g = static_cast<float>(gate_up[2 * row * size + i]),
                up = static_cast<float>(gate_up[(2 * row + 1) * size + i]);
    constexpr float root = 0.7978845608028654f;  // sqrt(2 / pi)
    const float activated =
        gelu ? 0.5f * g * (1.0f + tanhf(root * (g + 0.044715f * g * g * g))) : g / (1.0f + expf(-g));
    out[row * size + i] = T(activated * up);
}

// Soft cap of a row of logits, and its largest one: the next token of row r goes to tokens[r] and choices[r],
// and positions[r] moves on. positions: null for a prompt, which leaves tokens as they are.
static __global__ void choose_kernel(float* logits, int vocab, float softcap, int* choices, int* tokens,
                                     int* positions) {
    __shared__ float largest[row_threads];
    __shared__ int places[row_threads];
    float* const row = logits + static_cast<std::size_t>(blockIdx.x) * static_cast<std::size_t>(vocab);
    float most = -INFINITY;
    int place = 0;
    for (int i = static_cast<int>(threadIdx.x); i < vocab; i += row_threads) {
        float x = row[i];
        if (softcap > 0.0f) row[i] = x = softcap * tanhf(x / softcap);
        if (x > most) {
            most = x;
            place = i;
        }
    }
    largest[threadIdx.x] = most;
    places[threadIdx.x] = place;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int t = 1; t < row_threads; ++t)
        if (largest[t] > most || (largest[t] == most && places[t] < place)) {
            most = largest[t];
            place = places[t];
        }
    choices[blockIdx.x] = place;
    if (positions != nullptr) {
        tokens[blockIdx.x] = place;
        ++positions[blockIdx.x];
    }
}

// ---- weights ----

// Rows of floats to T. Where heads are padded, `group` inputs go to the first of every `padded` ones.
template <class T>
__global__ void convert_kernel(const float* from, std::size_t count, int inputs, int group, int padded,
                               T* to) {
    const std::size_t i = static_cast<std::size_t>(blockIdx.x) * row_threads + threadIdx.x;
    if (i >= count) return;
    const std::size_t row = i / static_cast<std::size_t>(inputs),
                      column = i % static_cast<std::size_t>(inputs);
    const auto in = static_cast<std::size_t>(group), out = static_cast<std::size_t>(padded);
    to[row * (static_cast<std::size_t>(inputs) / in * out) + column / in * out + column % in] = T(from[i]);
}

__device__ inline std::uint32_t mixed_bits(std::uint32_t x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ x >> 16;
}
// Normal numbers of this size.
template <class T>
__global__ void random_kernel(T* to, std::size_t count, float size, std::uint32_t seed) {
    const std::size_t step = static_cast<std::size_t>(gridDim.x) * row_threads;
    for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * row_threads + threadIdx.x; i < count;
         i += step) {
        const std::uint32_t a = mixed_bits(static_cast<std::uint32_t>(i) ^ seed),
                            b = mixed_bits(a + static_cast<std::uint32_t>(i >> 32) + 0x9e3779b9u);
        const float radius = sqrtf(-2.0f * logf((static_cast<float>(a >> 8) + 1.0f) * 0x1p-24f)),
                    angle = 6.2831853f * static_cast<float>(b >> 8) * 0x1p-24f;
        to[i] = T(size * radius * cosf(angle));
    }
}

}  // namespace llama::device
