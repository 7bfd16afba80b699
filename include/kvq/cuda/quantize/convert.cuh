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

/// Where a workspace for so many pages has what.
template <class Pair>
struct convert_workspace {
    std::size_t values, lists, bytes;  // keys come first; lists: pages to read, pages to write

    convert_workspace(int kv_heads, std::size_t pages) noexcept
        : values(pages * cache_ref<Pair>::dense_key_page(kv_heads)),
          lists(values + pages * cache_ref<Pair>::dense_value_page(kv_heads)),
          bytes(lists + kvq::detail::round_up(2 * pages * sizeof(int), std::size_t{16})) {}
};

inline constexpr int gather_threads = 256;

/// Page blockIdx.x of the turn, whose first one is number `first` of all sequences' columns.
template <class From, class To, class Floats>
__global__ void __launch_bounds__(gather_threads)
    gather_kernel(const __grid_constant__ cache_ref<From> source,
                  const __grid_constant__ cache_ref<To> target,
                  const __grid_constant__ cache_ref<Floats> floats, int first, int* from, int* to) {
    constexpr int page_tokens = To::page_tokens, warps = gather_threads / warp_size;
    const int own = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y),
              b = (first + own) / target.table_columns, column = (first + own) % target.table_columns;
    const int warp = static_cast<int>(threadIdx.x) / warp_size,
              lane = static_cast<int>(threadIdx.x) % warp_size;
    const int begin = target.first_token + column * page_tokens - source.first_token,
              length =
                  smaller(source.tokens[b] - source.first_token, source.table_columns * From::page_tokens);
    const int page = begin < length ? target.block_table[target.table_entry(b, column)] : -1;
    if (threadIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0) {
        from[own] = page < 0 ? -1 : own;
        to[own] = page;
    }
    if (page < 0) return;
    const auto gather = [&]<tensor Role>(std::integral_constant<tensor, Role>) {
        constexpr int dim = dim_of<Role, From>, N = token_numbers<dim>;
        constexpr block_shape s = shape_of<Role, Floats>;
        auto* const block = reinterpret_cast<float*>(floats.template block<Role>(own, head));
#pragma unroll 1
        for (int t = warp; t < page_tokens; t += warps) {
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
                    block[full<float>::element(value_layout<float>(s), s, t, i * warp_size + lane)] = x[i];
        }
    };
    if (blockIdx.z == 0)
        gather(std::integral_constant<tensor, tensor::key>{});
    else if constexpr (has_values<To>)
        gather(std::integral_constant<tensor, tensor::value>{});
}

}  // namespace detail

/// Bytes of workspace for turns of so many pages.
template <class To>
std::size_t convert_workspace_bytes(int kv_heads, int pages) noexcept {
    return detail::convert_workspace<typename detail::float_pages<To>::type>(kv_heads,
                                                                             static_cast<std::size_t>(pages))
        .bytes;
}

/// All pages of `target` from those of `source`. not_finite (adds up NaN and infinities met; may be null) is
/// device memory.
template <class From, class To>
status convert_pages(const cache_ref<From>& source, const cache_ref<To>& target, void* workspace,
                     std::size_t workspace_bytes, unsigned* not_finite, cudaStream_t stream) noexcept {
    static_assert(From::head_dim == To::head_dim && From::value_dim == To::value_dim &&
                      detail::has_values<From> == detail::has_values<To>,
                  "kvq::cuda::convert_pages: both formats must have the same head sizes");
    using floats_pair = typename detail::float_pages<To>::type;
    using read = detail::read_pair<From>;
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
    const std::size_t of_page = convert_workspace_bytes<To>(target.kv_heads, 1);
    if (workspace == nullptr || workspace_bytes < of_page ||
        reinterpret_cast<std::uintptr_t>(workspace) % 16 != 0)
        return detail::bad_value(
            "converting pages needs at least %zu bytes of workspace on a multiple of 16, got %zu at %p",
            of_page, workspace_bytes, workspace);
    const auto turn = static_cast<int>(kvq::detail::smaller(
        kvq::detail::smaller(all, 1LL << 20), static_cast<long long>(workspace_bytes / of_page)));
    auto* const memory = static_cast<std::byte*>(workspace);
    for (long long first = 0; first < all; first += turn) {
        const auto count = static_cast<int>(kvq::detail::smaller<long long>(turn, all - first));
        const detail::convert_workspace<floats_pair> at(target.kv_heads, static_cast<std::size_t>(turn));
        cache_ref<floats_pair> floats;
        floats.key_pages = memory;
        floats.value_pages = memory + at.values;
        floats.key_page_bytes = cache_ref<floats_pair>::dense_key_page(target.kv_heads);
        floats.value_page_bytes = cache_ref<floats_pair>::dense_value_page(target.kv_heads);
        floats.kv_heads = target.kv_heads;
        auto* const from = reinterpret_cast<int*>(memory + at.lists);
        const dim3 grid(static_cast<unsigned>(count), static_cast<unsigned>(target.kv_heads),
                        detail::tensors_of<To>);
        if (status s = detail::launch("launching conversion", detail::overlap::no,
                                      detail::gather_kernel<read, To, floats_pair>, grid,
                                      detail::gather_threads, 0, stream, detail::as_pair<read>(source),
                                      target, floats, static_cast<int>(first), from, from + turn);
            !s)
            return s;
        if (status s = requantize_pages(floats, target, from, from + turn, count, not_finite, stream); !s)
            return s;
    }
    return {};
}

}}}  // namespace kvq::cuda
