// Latent attention (MLA, absorbed): all query heads over one latent per token, stored once, quantized or in
// 16 bit.
//
//   score[h][t] = scale <q_h, x^_t>            q_h: R + P channels, the key's projection multiplied in
//   out[h]      = sum_t softmax(score[h])_t x^_t[0, V)
//
//   auto pages = make_mixed(recent, behind_window(quantized), in_window(window));     of latent_pair
//   attend_latents<float16>(pages, q, out, {.scale = scale}, workspace, bytes, stream);
//
// Two launches: shares of all tokens of the batch leave softmax states in the workspace (latent_wgmma.cuh,
// latent_mma.cuh; without tiles latent_plain.cuh), which merge_latents_kernel puts together. Both read
// lengths and tables on the device, so that a captured graph stays valid while sequences grow. The workspace
// need not be zeroed, and is left with anything: attend() (decode/attend.cuh), which must find zeros, needs
// another one.
// Contract: with tiles, x^, queries and weights are rounded to half floats: |x^| and |q| must be below 65504.
// A row whose q holds NaN is NaN; a row that sees nothing is zero. Complexity: heads * tokens * (R + P + V)
// multiply-adds; pages are read once for every 64 query rows.
#pragma once

#include <cmath>

#include "../decode/attend.cuh"
#include "latent_cluster.cuh"
#include "latent_mma.cuh"
#include "latent_plain.cuh"
#include "latent_wgmma.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

template <class Shape, int MoreRowsThan, class Args, template <class, class> class Producer = latent_producer>
struct latent_wgmma_launch {
    using args_type = Args;
    static constexpr auto* kernel = latent_wgmma_kernel<Shape, Args, Producer>;
    static constexpr int threads = Shape::threads, cluster = 1,
                         bytes = latent_memory<Args::first_pair::head_dim, Shape>::bytes;
    static constexpr kernel_facts facts{"latent_wgmma_kernel",
                                        Shape::rows,
                                        MoreRowsThan,
                                        bytes,
                                        bytes,
                                        threads,
                                        feature::warpgroup_products | feature::bulk_copies};
};
template <class Args, template <class, class> class Producer = latent_producer>
struct latent_cluster_launch {
    using args_type = Args;
    using shape = latent_cluster_shape;
    static constexpr auto* kernel = latent_cluster_kernel<shape, args_type, Producer>;
    static constexpr int threads = shape::threads, cluster = 2,
                         bytes = latent_memory<Args::first_pair::head_dim, shape>::bytes;
    static constexpr kernel_facts facts{
        "latent_cluster_kernel",
        shape::rows,
        64,
        bytes,
        bytes,
        threads,
        feature::warpgroup_products | feature::clusters | feature::bulk_copies};
};
template <class Args, int Rows, int Stages, int MoreRowsThan,
          template <class, class> class Tiles = latent_part_tiles>
struct latent_mma_launch {
    using args_type = Args;
    using shape = latent_mma_shape<Rows, Stages>;
    static constexpr auto* kernel = latent_mma_kernel<shape, Args, Tiles>;
    static constexpr int threads = shape::all_threads, cluster = 1,
                         bytes = latent_mma_memory<Args::first_pair::head_dim, shape>::bytes;
    static constexpr kernel_facts facts{"latent_mma_kernel", Rows, MoreRowsThan, bytes, bytes};
};
/// Where warpgroups have no products. With little shared memory blocks have at most 32 rows and one tile.
template <class Args, template <class, class> class Tiles = latent_part_tiles>
using latent_mma_launches = both_sizes<
    latent_mma_memory<Args::first_pair::head_dim, latent_mma_shape<64, 1>>::bytes,
    kernel_list<latent_mma_launch<Args, 64, 1, 32, Tiles>, latent_mma_launch<Args, 32, 1, 16, Tiles>,
                latent_mma_launch<Args, 16, 2, 0, Tiles>>,
    kernel_list<latent_mma_launch<Args, 32, 1, 16, Tiles>, latent_mma_launch<Args, 16, 1, 0, Tiles>>>;
template <class Args, class Tokens = plain_part_tokens>
struct latent_plain_launch {
    using args_type = Args;
    static constexpr auto* kernel = latent_plain_kernel<Args, Tokens>;
    static constexpr int threads = plain_latent_threads, cluster = 1, bytes = 0;
    static constexpr kernel_facts facts{"latent_plain_kernel", plain_latent_rows, 0, 0, 0};
};
template <class Args>
struct latent_launches_of;
template <class First, class T, class... Parts>
struct latent_launches_of<latent_args<First, T, Parts...>> {
    using args = latent_args<First, T, Parts...>;
    static constexpr bool tiles = ((no_latent_tiles<typename Parts::pair_type> == nullptr) && ...);
    /// Token records take longer in clusters (docs/lab/gpu_experiments.md).
    static constexpr bool in_clusters =
        First::value_dim == 512 && (!token_record_scheme<typename Parts::pair_type::keys> && ...);
    using of_warpgroups = joined<
        std::conditional_t<First::value_dim % 256 == 0,
                           kernel_list<latent_wgmma_launch<latent_shape<64>, 32, args>>, kernel_list<>>,
        kernel_list<latent_wgmma_launch<latent_shape<32>, 16, args>,
                    latent_wgmma_launch<latent_shape<16>, 0, args>>>;
    /// For trees, windows and soft caps: with them, the kernel of clusters would take 6 % longer for chains
    /// too.
    using with_masks = std::conditional_t<tiles, joined<of_warpgroups, latent_mma_launches<args>>,
                                          kernel_list<latent_plain_launch<args>>>;
    using type =
        joined<std::conditional_t<tiles && in_clusters,
                                  kernel_list<latent_cluster_launch<latent_chain_args<First, T, Parts...>>>,
                                  kernel_list<>>,
               with_masks>;
};

/// Where the workspace holds what, for so many query rows of a sequence.
struct latent_workspace {
    int row_blocks, shares;
    std::size_t bounds, bytes;  // bounds come first

    latent_workspace(int sequences, int rows, int block_rows, int cluster, int value_dim, cudaError_t& code) {
        int device = 0;
        shares = 0;
        code = cudaGetDevice(&device);
        if (code == cudaSuccess)
            code = cudaDeviceGetAttribute(&shares, cudaDevAttrMultiProcessorCount, device);
        shares /= cluster;
        row_blocks = kvq::detail::ceil_div(rows, block_rows);
        const auto items = static_cast<std::size_t>(sequences) * static_cast<std::size_t>(row_blocks);
        bounds = kvq::detail::round_up(items * sizeof(share_bounds), std::size_t{32});
        bytes = bounds + (items + static_cast<std::size_t>(shares)) * static_cast<std::size_t>(block_rows) *
                             static_cast<std::size_t>(value_dim + state_header) * sizeof(float);
    }
};

/// Query rows of a sequence; of too many for a launch, a number of which no workspace is large enough.
inline int latent_rows(int q_heads, int query_tokens) noexcept {
    return static_cast<int>(kvq::detail::smaller(1LL << 30, 1LL * q_heads * query_tokens));
}

template <class Launch, class Args>
status launch_latents(Launch, Args args, void* workspace, std::size_t workspace_bytes,
                      cudaStream_t stream) noexcept {
    constexpr int dim = Args::first_pair::value_dim, block_rows = Launch::facts.query_rows;
    const int sequences = args.a.work.sequences;
    cudaError_t code = cudaSuccess;
    const latent_workspace room(sequences, args.a.rows, block_rows, Launch::cluster, dim, code);
    if (code == cudaSuccess)
        code =
            cudaFuncSetAttribute(Launch::kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Launch::bytes);
    if (code != cudaSuccess) return runtime_error(code, "asking the device what latent attention needs");
    if (workspace == nullptr || workspace_bytes < room.bytes ||
        reinterpret_cast<std::uintptr_t>(workspace) % 16 != 0)
        return bad_value("latent attention needs %zu bytes of workspace on a multiple of 16, got %zu at %p",
                         room.bytes, workspace_bytes, workspace);
    args.row_blocks = room.row_blocks;
    args.block_rows = block_rows;
    args.bounds = static_cast<share_bounds*>(workspace);
    args.states = reinterpret_cast<float*>(static_cast<std::byte*>(workspace) + room.bounds);
    if (status s = launch<Launch::cluster>("launching latent attention", overlap::yes, Launch::kernel,
                                           dim3(static_cast<unsigned>(room.shares * Launch::cluster)),
                                           Launch::threads, static_cast<std::size_t>(Launch::bytes), stream,
                                           typename Launch::args_type{args});
        !s)
        return s;
    constexpr int warps = merge_latents_threads / 32;
    const auto merge = [&](auto* kernel, int of_block) {
        return launch("launching the merge of latent attention", overlap::yes, kernel,
                      dim3(static_cast<unsigned>(kvq::detail::ceil_div(args.a.rows, of_block)),
                           static_cast<unsigned>(sequences)),
                      merge_latents_threads, 0, stream, args);
    };
    const long long rows = 1LL * sequences * args.a.rows, processors = room.shares * Launch::cluster;
    return rows <= 8 * processors    ? merge(merge_latents_kernel<warps, Args>, 1)
           : rows <= 16 * processors ? merge(merge_latents_kernel<warps / 2, Args>, 2)
                                     : merge(merge_latents_kernel<1, Args>, warps);
}

template <class T, class... Parts>
using latent_args_of = latent_args<typename std::tuple_element_t<0, std::tuple<Parts...>>::pair_type, T,
                                   cache_part<typename Parts::pair_type>...>;

template <class First, class... Others>
inline constexpr bool same_latents = ((is_latent_pair<First> && First::head_dim == Others::head_dim &&
                                       First::value_dim == Others::value_dim) &&
                                      ...);

}  // namespace detail

/// Bytes of workspace that attend_latents() of this mixed_cache_ref needs on the current device for so many
/// sequences; 0 if there is none.
template <class Mix, class T>
requires detail::is_mix<Mix> std::size_t latent_workspace_bytes(int sequences, int q_heads,
                                                                int query_tokens = 1)
noexcept {
    return [&]<class... Parts>(std::type_identity<mixed_cache_ref<Parts...>>) {
        using args = detail::latent_args_of<T, Parts...>;
        const int rows = detail::latent_rows(q_heads, query_tokens);
        using launches = detail::latent_launches_of<args>;
        const auto of_kernel = [&](auto kernel) {
            cudaError_t code = cudaSuccess;
            using launch = decltype(kernel);
            const detail::latent_workspace room(sequences, rows, launch::facts.query_rows, launch::cluster,
                                                args::first_pair::value_dim, code);
            if (code != cudaSuccess) (void)cudaGetLastError();
            return code == cudaSuccess ? room.bytes : 0;
        };
        return kvq::detail::larger(detail::with_kernel(typename launches::type{}, rows, of_kernel),
                                   detail::with_kernel(typename launches::with_masks{}, rows, of_kernel));
    }(std::type_identity<Mix>{});
}

/// The kernel that attend_latents() of this mixed_cache_ref takes on the current device for so many query
/// rows of a sequence, and why.
template <class Mix, class T>
requires detail::is_mix<Mix> kernel_choice latent_kernel(int q_heads, int query_tokens = 1)
noexcept {
    return [&]<class... Parts>(std::type_identity<mixed_cache_ref<Parts...>>) {
        using launches = detail::latent_launches_of<detail::latent_args_of<T, Parts...>>;
        kernel_choice choice;
        detail::with_kernel(
            typename launches::type{}, detail::latent_rows(q_heads, query_tokens), [](auto) {}, &choice);
        if constexpr (!launches::tiles)
            ((detail::no_latent_tiles<typename Parts::pair_type> == nullptr
                  ? void()
                  : detail::add_words(choice, "; latent_wgmma_kernel makes no tiles: %s",
                                      detail::no_latent_tiles<typename Parts::pair_type>)),
             ...);
        return choice;
    }(std::type_identity<Mix>{});
}

/// Attention of the last query_tokens tokens of every sequence. Parts: of latent_pair, with the same
/// channels. q: [sequences * query_tokens] [heads][R + P]; out: the same with V channels; T is float16,
/// bfloat16 or float. Options as in attend(), without all_keys.
template <class T, class... Parts>
status attend_latents(const mixed_cache_ref<Parts...>& cache, const token_view<const T>& q,
                      const token_view<T>& out, const attention_options& options, void* workspace,
                      std::size_t workspace_bytes, cudaStream_t stream) noexcept {
    static_assert(float_format<T>, "kvq::cuda::attend_latents: q and out must be float16, bfloat16 or float");
    static_assert(
        detail::same_latents<typename Parts::pair_type...>,
        "kvq::cuda::attend_latents: parts are of latent_pair, with the same channels of keys and values");
    using args_type = detail::latent_args_of<T, Parts...>;
    if (status s = detail::check_mix(cache); !s) return s;
    const auto& first = get<0>(cache.parts).cache;
    if (status s = detail::check_attention(first, q, out, options); !s) return s;
    if (status s = detail::check_latent_options(options); !s) return s;
    if (first.sequences > 65535)
        return detail::bad_value("%d sequences in one launch, which takes up to 65535", first.sequences);
    if (q.tokens == 0) return {};
    int sinks = 0;
    if (options.window_sinks)
        detail::for_each_part(cache.parts, [&](const auto& part) {
            if (part.capacity >= 0) sinks = part.capacity;
        });
    const args_type args = [&]<int... Is>(std::integer_sequence<int, Is...>) {
        return args_type{
            detail::make_arguments(first, q, out, options),
            {{{static_cast<const cache_part<typename Parts::pair_type>&>(detail::get<Is>(cache.parts))}...}},
            cache.recent,
            sinks,
            options.sink_logits,
            1,
            1,
            nullptr,
            nullptr};
    }
    (std::make_integer_sequence<int, sizeof...(Parts)>{});
    using launches = detail::latent_launches_of<args_type>;
    const auto start = [&](auto kernel) {
        return detail::launch_latents(kernel, args, workspace, workspace_bytes, stream);
    };
    return args.a.ancestors != nullptr || options.window > 0 || options.softcap != 0.0f
               ? detail::with_kernel(typename launches::with_masks{}, args.a.rows, start)
               : detail::with_kernel(typename launches::type{}, args.a.rows, start);
}

}}}  // namespace kvq::cuda
