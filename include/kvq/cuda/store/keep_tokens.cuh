// The accepted tokens of a draft move to where appending them alone would have put them: one launch for all
// sequences and layers.
//
//   token i of the path   from position base + path[i] to base + i,   base = tokens[b] - counts[b]
//
// Drafted tokens lie in the 16-bit window and in sinks. A channel of a head belongs to one thread, which
// moves it in the order of the path: path[k] > i for k > i, so no token is overwritten before it has moved.
// Contract: 16-bit numbers are moved as they are. Tables name all pages of the draft; tokens[b] counts the
// accepted tokens already.
#pragma once

#include "../layout/block_access.cuh"
#include "bookkeeping.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// The 16-bit number of a token at `position`. bytes: of all tokens before.
template <tensor Role, class Window, class Sinks>
__device__ __forceinline__ std::uint16_t* number_at(const keep_args& a, int sequence, int layer, int head,
                                                    int position, int channel) {
    const auto in_block = [&]<class Pair>(const pool_memory& pool, int page, int token,
                                          std::type_identity<Pair>) {
        using S = scheme_of<Role, Pair>;
        using T = typename S::value_type;
        static_assert(sizeof(T) == sizeof(std::uint16_t));
        constexpr block_shape shape = shape_of<Role, Pair>;
        constexpr std::size_t block_bytes =
            Role == tensor::key ? Pair::key_block_bytes : Pair::value_block_bytes;
        std::byte* const block = pool.page(Role, layer, page) + static_cast<std::size_t>(head) * block_bytes;
        return reinterpret_cast<std::uint16_t*>(block) +
               S::element(value_layout<T>(shape), shape, token, channel);
    };
    const int behind = position - a.first_token;
    if (behind < 0)
        return in_block(a.sinks, a.sink_table[sequence * a.sink_columns + position / Sinks::page_tokens],
                        position % Sinks::page_tokens, std::type_identity<Sinks>{});
    return in_block(a.window, a.window_table[sequence * a.ring + behind / Window::page_tokens % a.ring],
                    behind % Window::page_tokens, std::type_identity<Window>{});
}

/// Block: a sequence, a layer, a head of K or V.
template <class Window, class Sinks>
__global__ void __launch_bounds__(128) keep_tokens_kernel(const __grid_constant__ keep_args a) {
    const int sequence = static_cast<int>(blockIdx.x), layer = static_cast<int>(blockIdx.y),
              head = static_cast<int>(blockIdx.z) % a.kv_heads, count = a.counts[sequence],
              base = a.tokens[sequence] - count;
    const auto move = [&](auto role) {
        constexpr tensor Role = decltype(role)::value;
        for (int c = static_cast<int>(threadIdx.x); c < dim_of<Role, Window>;
             c += static_cast<int>(blockDim.x))
            for (int i = 0; i < count; ++i) {
                const int from = a.paths[sequence * a.most + i];
                if (from == i) continue;
                *number_at<Role, Window, Sinks>(a, sequence, layer, head, base + i, c) =
                    *number_at<Role, Window, Sinks>(a, sequence, layer, head, base + from, c);
            }
    };
    if (static_cast<int>(blockIdx.z) < a.kv_heads)
        move(std::integral_constant<tensor, tensor::key>{});
    else if constexpr (has_values<Window>)
        move(std::integral_constant<tensor, tensor::value>{});
}

template <class Window, class Sinks>
status keep_tokens(const keep_args& a, int sequences, int layers, cudaStream_t stream) noexcept {
    return launch("launching keep()", overlap::no, keep_tokens_kernel<Window, Sinks>,
                  dim3(static_cast<unsigned>(sequences), static_cast<unsigned>(layers),
                       static_cast<unsigned>(tensors_of<Window> * a.kv_heads)),
                  128, 0, stream, a);
}

}}}  // namespace kvq::cuda::detail
