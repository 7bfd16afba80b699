// New tokens into pages of rows or records of tokens (schemes/token_rows.hpp, token_records.hpp): a thread
// quantizes what shares a scale. Into rows of 8-bit floats (schemes/float_rows.hpp) a warp quantizes a token.
//
// Contract: the bytes of the scheme's quantize() for these tokens; the other bytes of the page stay.
#pragma once

#include "../../core/token_view.hpp"
#include "../layout/float_rows.cuh"
#include "../layout/launch.cuh"
#include "../layout/row_pieces.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Pairs whose keys and values, if they have any, are such.
template <class Pair>
inline constexpr bool stores_rows =
    token_bytes_scheme<typename Pair::keys>&& token_bytes_scheme<typename Pair::values>;

inline constexpr int store_rows_threads = 128;

template <class Pair, class T>
__global__ void __launch_bounds__(store_rows_threads)
    store_rows_kernel(const __grid_constant__ cache_ref<Pair> cache, token_view<const T> k,
                      token_view<const T> v, const long long* mapping, unsigned* not_finite) {
    const auto store = [&]<tensor Role>(std::integral_constant<tensor, Role>, const token_view<const T>& x) {
        using pieces = row_pieces<scheme_of<Role, Pair>>;
        constexpr block_shape shape = shape_of<Role, Pair>;
        constexpr int of_row = pieces::of(shape);
        const auto i = static_cast<long long>(blockIdx.x) * store_rows_threads + threadIdx.x;
        const int piece = static_cast<int>(i % of_row), head = static_cast<int>(i / of_row % x.heads);
        const long long token = i / of_row / x.heads;
        if (token >= x.tokens) return;
        const long long slot = mapping[token];
        if (slot < 0) return;
        const T* const from = x.at(static_cast<int>(token), head);
        const unsigned bad = quantize_piece<Role>(cache, static_cast<int>(slot / Pair::page_tokens), head,
                                                  static_cast<int>(slot % Pair::page_tokens), piece,
                                                  [&](int channel) { return to_float(from[channel]); });
        if (bad != 0 && not_finite != nullptr) atomicAdd(not_finite, bad);
    };
    if (blockIdx.y == 0)
        store(std::integral_constant<tensor, tensor::key>{}, k);
    else if constexpr (has_values<Pair>)
        store(std::integral_constant<tensor, tensor::value>{}, v);
}

template <class Pair, class T>
status store_token_rows(const cache_ref<Pair>& cache, const token_view<const T>& k,
                        const token_view<const T>& v, const long long* mapping, unsigned* not_finite,
                        cudaStream_t stream) noexcept {
    constexpr int of_keys = row_pieces<typename Pair::keys>::of(shape_of<tensor::key, Pair>),
                  of_values = row_pieces<typename Pair::values>::of(shape_of<tensor::value, Pair>),
                  most = has_values<Pair> ? kvq::detail::larger(of_keys, of_values) : of_keys;
    const long long threads = static_cast<long long>(k.tokens) * k.heads * most;
    const dim3 grid(static_cast<unsigned>((threads + store_rows_threads - 1) / store_rows_threads),
                    tensors_of<Pair>);
    return launch("launching store", overlap::no, store_rows_kernel<Pair, T>, grid, store_rows_threads, 0,
                  stream, cache, k, v, mapping, not_finite);
}

/// blockIdx.z: keys, values.
template <class Pair, class T>
__global__ void __launch_bounds__(store_rows_threads)
    store_float_rows_kernel(const __grid_constant__ cache_ref<Pair> cache, token_view<const T> k,
                            token_view<const T> v, const long long* mapping, unsigned* not_finite) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size, head = static_cast<int>(blockIdx.y),
              token =
                  static_cast<int>(blockIdx.x * (store_rows_threads / warp_size) + threadIdx.x / warp_size);
    launch_dependents();
    wait_for_predecessor();
    const auto store = [&]<tensor Role>(std::integral_constant<tensor, Role>, const token_view<const T>& x) {
        if (token >= x.tokens) return;
        const long long slot = mapping[token];
        if (slot < 0) return;
        constexpr block_shape shape = shape_of<Role, Pair>;
        const T* const from = x.at(token, head);
        const unsigned bad = quantize_float_row<scheme_of<Role, Pair>, dim_of<Role, Pair>>(
            shape, cache.template block<Role>(static_cast<int>(slot / Pair::page_tokens), head),
            static_cast<int>(slot % Pair::page_tokens), lane,
            [&](int channel) { return to_float(from[channel]); });
        if (bad != 0 && not_finite != nullptr) atomicAdd(not_finite, bad);
    };
    if (blockIdx.z == 0)
        store(std::integral_constant<tensor, tensor::key>{}, k);
    else if constexpr (has_values<Pair>)
        store(std::integral_constant<tensor, tensor::value>{}, v);
}

template <class Pair, class T>
status store_float_rows(const cache_ref<Pair>& cache, const token_view<const T>& k,
                        const token_view<const T>& v, const long long* mapping, unsigned* not_finite,
                        cudaStream_t stream) noexcept {
    static_assert(!has_values<Pair> || float_row_scheme<typename Pair::values>,
                  "kvq::cuda::store: keys are 8-bit floats with a scale of each token, and values are not");
    constexpr int tokens = store_rows_threads / warp_size;
    const dim3 grid(static_cast<unsigned>(kvq::detail::ceil_div(k.tokens, tokens)),
                    static_cast<unsigned>(k.heads), static_cast<unsigned>(tensors_of<Pair>));
    return launch("launching store", overlap::yes, store_float_rows_kernel<Pair, T>, grid, store_rows_threads,
                  0, stream, cache, k, v, mapping, not_finite);
}

}}}  // namespace kvq::cuda::detail
