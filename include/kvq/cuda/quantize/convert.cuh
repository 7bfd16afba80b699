// Pages of one cache to pages of another on the device: any format that kernels read to any that they
// quantize to, with another page size, order of pages or first token.
//
//   convert_pages(source, target, workspace, bytes, not_finite, stream);
//
// Both refs name the same sequences, each by its own block table: of an engine's pages, or of those of a
// cache. In turns of as many pages as the workspace holds, x^ goes to pages of floats of the target's size,
// which requantize_pages() quantizes.
// Contract: the bytes of the CPU's scheme::quantize on the dequantized values. A page is written if it begins
// before the end of its sequence and the target's table names it; tokens that the source does not hold are
// zeros. Memory: the workspace, at least convert_workspace_bytes() of one page.
#pragma once

#include "convert_turns.hpp"
#include "pages.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

/// Pages of floats with the sizes of Pair.
template <class Pair>
struct float_pages {
    using type = block_pair<full<float>, full<float>, Pair::head_dim, Pair::page_tokens, Pair::value_dim>;
};
template <class Pair>
requires is_latent_pair<Pair>
struct float_pages<Pair> {
    using type = latent_pair<full<float>, Pair::head_dim, 0, Pair::value_dim, Pair::page_tokens>;
};

template <class To>
float_page float_page_of(int kv_heads) {
    return {kv_heads, To::page_tokens, To::head_dim, has_values<To> ? To::value_dim : 0};
}

inline constexpr int gather_threads = 256;

/// Page blockIdx.x of the turn.
template <class From>
__global__ void __launch_bounds__(gather_threads)
    gather_kernel(const __grid_constant__ cache_ref<From> source,
                  const __grid_constant__ target_columns target, const __grid_constant__ convert_turn turn) {
    constexpr int warps = gather_threads / warp_size;
    const int own = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y),
              b = (turn.first + own) / target.columns, column = (turn.first + own) % target.columns;
    const int warp = static_cast<int>(threadIdx.x) / warp_size,
              lane = static_cast<int>(threadIdx.x) % warp_size;
    const int begin = target.first_token + column * target.page_tokens - source.first_token,
              length =
                  smaller(source.tokens[b] - source.first_token, source.table_columns * From::page_tokens);
    const int page = begin < length ? target.block_table[b * std::ptrdiff_t{target.columns} + column] : -1;
    if (threadIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0) {
        turn.from[own] = page < 0 ? -1 : own;
        turn.to[own] = page;
    }
    if (page < 0) return;
    const auto gather = [&]<tensor Role>(std::integral_constant<tensor, Role>) {
        constexpr int dim = dim_of<Role, From>, N = token_numbers<dim>;
        const block_shape s{Role, target.page_tokens, dim};
        const value_layout<float> layout(s);
        const layer_memory& to = turn.floats;
        auto* const block = reinterpret_cast<float*>(
            (Role == tensor::key ? to.keys : to.values) +
            static_cast<std::size_t>(own) * (Role == tensor::key ? to.key_page_bytes : to.value_page_bytes) +
            static_cast<std::size_t>(head) * full<float>{}.block_bytes(s));
#pragma unroll 1
        for (int t = warp; t < target.page_tokens; t += warps) {
            const int token = begin + t;
            const int held = token >= 0 && token < length
                                 ? source.block_table[source.table_entry(b, token / From::page_tokens)]
                                 : -1;
            float x[N];
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const int c = i * warp_size + lane;
                x[i] = c < dim && held >= 0
                           ? read_value<Role>(source, held, head, token % From::page_tokens, c, b)
                           : 0.0f;
            }
            if constexpr (has_transform<scheme_of<Role, From>>)
                restore_row<token_channels, dim>(x, transform_of<Role>(source), head);
#pragma unroll
            for (int i = 0; i < N; ++i)
                if (i * warp_size + lane < dim)
                    block[full<float>::element(layout, s, t, i * warp_size + lane)] = x[i];
        }
    };
    if (blockIdx.z == 0)
        gather(std::integral_constant<tensor, tensor::key>{});
    else if constexpr (has_values<From>)
        gather(std::integral_constant<tensor, tensor::value>{});
}

/// x^ of a turn's pages.
template <class From>
status gather_pages(const cache_ref<From>& source, const target_columns& target, const convert_turn& turn,
                    cudaStream_t stream) noexcept {
    using read = read_pair<From>;
    const dim3 grid(static_cast<unsigned>(turn.count), static_cast<unsigned>(source.kv_heads),
                    tensors_of<From>);
    return launch("launching conversion", overlap::no, gather_kernel<read>, grid, gather_threads, 0, stream,
                  as_pair<read>(source), target, turn);
}
/// Those of a turn to pages of the target.
template <class To>
status quantize_turn(const cache_ref<To>& target, const convert_turn& turn, unsigned* not_finite,
                     cudaStream_t stream) noexcept {
    cache_ref<typename float_pages<To>::type> floats;
    floats.key_pages = turn.floats.keys;
    floats.value_pages = turn.floats.values;
    floats.key_page_bytes = turn.floats.key_page_bytes;
    floats.value_page_bytes = turn.floats.value_page_bytes;
    floats.kv_heads = target.kv_heads;
    return requantize_pages(floats, target, turn.from, turn.to, turn.count, not_finite, stream);
}

}  // namespace detail

/// Bytes of workspace for turns of so many pages.
template <class To>
std::size_t convert_workspace_bytes(int kv_heads, int pages) noexcept {
    return detail::float_page_of<To>(kv_heads).workspace(static_cast<std::size_t>(pages));
}

/// All pages of `target` from those of `source`. not_finite (adds up NaN and infinities met; may be null) is
/// device memory.
template <class From, class To>
status convert_pages(const cache_ref<From>& source, const cache_ref<To>& target, void* workspace,
                     std::size_t workspace_bytes, unsigned* not_finite, cudaStream_t stream) noexcept {
    static_assert(From::head_dim == To::head_dim && From::value_dim == To::value_dim &&
                      detail::has_values<From> == detail::has_values<To>,
                  "kvq::cuda::convert_pages: both formats must have the same head sizes");
    if (status s = detail::check_ref(source, true); !s) return s;
    if (status s = detail::check_ref(target, true); !s) return s;
    if (source.kv_heads != target.kv_heads || source.sequences != target.sequences)
        return detail::bad_value("source has %d sequences of %d kv heads, target %d of %d", source.sequences,
                                 source.kv_heads, target.sequences, target.kv_heads);
    const long long all = 1LL * target.sequences * target.table_columns;
    if (all > detail::most_tokens)
        return detail::bad_value("%d sequences with %d block table columns", target.sequences,
                                 target.table_columns);
    if (status s = detail::check_one_plan(target); !s) return s;
    const detail::target_columns columns{target.block_table, target.sequences, target.table_columns,
                                         To::page_tokens, target.first_token};
    return detail::convert_in_turns(detail::float_page_of<To>(target.kv_heads), columns, workspace,
                                    workspace_bytes, [&](const detail::convert_turn& turn) {
                                        if (status s = detail::gather_pages(source, columns, turn, stream);
                                            !s)
                                            return s;
                                        return detail::quantize_turn(target, turn, not_finite, stream);
                                    });
}

}}}  // namespace kvq::cuda
