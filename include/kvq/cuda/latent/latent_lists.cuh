// Latent attention over lists of tokens, for models that select what they read (DeepSeek V3.2, GLM-5).
//
//   attend_latent_lists<float16>(pages, q, out, {.scale = scale, .selected = {positions, 2048}}, workspace,
//                                bytes, stream);
//
// Every query token has two lists, `selected` and `window`; all of its heads read the tokens of both. A tile
// is 64 tokens of the lists; four warps have 16 of them each, look them up in the table and read their words
// alone, so that time goes with the lists and not with the context. What a token costs is pieces of 64 bytes,
// in which memory is read: its words lie beside those of up to 15 other tokens of its page, but for records
// of other systems (latent_records.cuh). Of 512 latent and 64 rotary channels, in bytes:
//
//                               in its page    pages of 16 tokens or more    pages of 4 tokens
//   affine-4-g128, 4 bits               400                          6600                 1600
//   int8                                644                         10300                 2600
//   bf16                               1152                         18400                 4600
//   mla-656                             656                           700                  700
//
// Formats with parameters per channel are read one number at a time: a token of a page would cost the
// parameters of all channels.
// Contract: as attend_latents(), with lists as in decode/listed_pages.cuh; a row without listed tokens is
// zero. The same bits on every run.
#pragma once

#include "latent.cuh"
#include "latent_listed_rows.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

/// Kernel arguments. A query token is a sequence of its own for those that walk over pieces.
template <class First, class T, class... Parts>
struct latent_list_args : latent_args<First, T, Parts...> {
    listed_queries lists;

    /// Everything in a list is seen.
    static constexpr int behind_all = 1 << 30;
    __device__ __forceinline__ int length(int) const { return behind_all; }
    __device__ __forceinline__ int row_end(int, int) const { return behind_all; }
    __device__ __forceinline__ bool masked() const { return false; }
    __device__ __forceinline__ std::uint64_t seen_by(int, int, int, int) const { return ~std::uint64_t{0}; }
    template <class Note>
    __device__ __forceinline__ bool all_see(const Note& note, int, int) const {
        return note.is_whole(behind_all);
    }
    __device__ __forceinline__ int tiles(int, int) const { return ceil_div(lists.count(), latent_tile); }
};

/// Four warps write a tile, others the next one.
template <int Rows>
struct latent_list_shape : latent_shape<Rows> {
    using latent_shape<Rows>::many;
    static constexpr int stage_warps = 4, producer_warps = 2 * stage_warps,
                         threads = 32 * (producer_warps + latent_shape<Rows>::consumer_warps);
    static constexpr int producer_registers = many        ? 80
                                              : Rows > 16 ? 136
                                                          : 168,
                         consumer_registers = many        ? 176
                                              : Rows > 16 ? 232
                                                          : 168;
};

template <class Shape, class Args>
struct latent_list_producer;
template <class Shape, class Args>
struct latent_half_list_producer;

#if KVQ_WARPGROUP_PRODUCTS

/// The tiles of a piece that a warp has 16 tokens of, one after the other, `step` apart.
template <class Args, int Words, int Cuts = 1>
struct listed_run {
    using sixteen_type = listed_sixteen<Args, Words, 1, Cuts>;
    using pages_type = listed_pages<Args>;
    const latent_piece& piece;
    const pages_type pages;
    sixteen_type sixteen;
    int step;
    typename sixteen_type::tokens now, next;
    listed_token second, third;           // of the next tile, and of the one behind it
    typename pages_type::entries fourth;  // of the tile behind that one
    int list;                             // of the fifth

    __device__ __forceinline__ listed_run(const Args& args, const latent_piece& p, int first, int by,
                                          int number, int lane, int cut = 0)
        : piece(p), pages(args, p.sequence), sixteen(args, number, 0, lane, cut), step(by) {
        const int lists[4] = {listed(first), listed(first + by), listed(first + 2 * by),
                              listed(first + 3 * by)};
        list = listed(first + 4 * by);
        const auto of_first = pages.look_up(lists[0]), of_next = pages.look_up(lists[1]),
                   of_third = pages.look_up(lists[2]);
        fourth = pages.look_up(lists[3]);
        now = sixteen.find(pages.found(of_first));
        sixteen.fetch(now);
        second = pages.found(of_next);
        sixteen.prefetch(second);
        third = pages.found(of_third);
        sixteen.prefetch(third);
    }
    /// Before store() of a tile: waits for what has been asked for before anything else is.
    __device__ __forceinline__ void look_up(int tile) {
        sixteen.arrive();
        const listed_token after = pages.found(fourth);
        fourth = pages.look_up(list);
        list = listed(tile + 5 * step);
        next = sixteen.find(second);
        second = third;
        third = after;
        sixteen.prefetch(third);
    }
    __device__ __forceinline__ void store(std::uint32_t tile, std::uint32_t note) {
        sixteen.store(now, next, tile, note);
        now = next;
    }

private:
    __device__ __forceinline__ int listed(int tile) const {
        return tile < piece.to ? sixteen.listed(piece.sequence, tile) : -1;
    }
};

/// As latent_producer, of listed tokens: a warp has 16 tokens of a tile.
template <class Shape, class Args>
struct latent_list_producer {
    static constexpr int step = Shape::stages,
                         words = Shape::many ? 8
                                 : Shape::rows > 16 || token_record_scheme<typename Args::first_pair::keys>
                                     ? 16
                                     : 32;
    static_assert(Shape::stage_warps * 16 == latent_tile && Shape::stages == 2);
    using memory = latent_memory<Args::first_pair::head_dim, Shape>;
    const Args& args;
    std::uint32_t place;
    int producer, lane;
    int made = 0;  // tiles of all stages
    const int stage = producer / Shape::stage_warps;

    __device__ __forceinline__ void piece(const latent_piece& p) {
        const int own = (stage - made) & (step - 1);  // the first tile of this stage
        int number = made + own;
        made += p.to - p.from;
        if (p.from + own >= p.to) return;
        const auto at = latent_stage<memory>::of(place, stage);
        listed_run<Args, words> run(args, p, p.from + own, step, producer % Shape::stage_warps, lane);
#pragma unroll 1
        for (int tile = p.from + own; tile < p.to; tile += step, number += step) {
            run.look_up(tile);
            barrier_wait(at.free, static_cast<std::uint32_t>(number / step + 1) & 1u);
            run.store(at.tile, at.note);
            publish_to_products();
            __syncwarp();
            if (lane == 0) barrier_arrive(at.full);
        }
    }
};

/// Of clusters (latent_cluster.cuh): a warp has half of the channels of 16 tokens of every tile, and of
/// channels 512 on 8 of the tokens.
template <class Shape, class Args>
struct latent_half_list_producer {
    static constexpr int dim = Args::first_pair::head_dim;
    static_assert(Shape::stage_warps * 16 == latent_tile && Shape::cluster == 2 && dim >= 512 && dim <= 576);
    using memory = latent_memory<dim, Shape>;
    const Args& args;
    std::uint32_t place;
    int warp, lane;
    int made = 0;  // tiles
    int rank = 0;  // of the cluster

    __device__ __forceinline__ void piece(const latent_piece& p) {
        if (p.from >= p.to) return;
        listed_run<Args, 16, 2> run(args, p, p.from, 1, warp, lane, rank);
#pragma unroll 1
        for (int tile = p.from; tile < p.to; ++tile, ++made) {
            const auto at = latent_stage<memory>::of(place, made % Shape::stages);
            run.look_up(tile);
            barrier_wait(at.free, static_cast<std::uint32_t>(made / Shape::stages + 1) & 1u);
            run.store(at.tile, at.note);
            publish_to_products();
            __syncwarp();
            send(at.tile);
            if (lane == 0) {
                if (warp == 0)  // so many bytes come from the other block
                    barrier_expect(arrived_at(), latent_tile * (512 + (dim - 512)));
                barrier_arrive(at.full);
            }
        }
    }

private:
    /// Counts what the other block sends of this tile.
    __device__ __forceinline__ std::uint32_t arrived_at() const {
        return place + static_cast<std::uint32_t>(memory::arrived + made % Shape::stages * 8);
    }
    /// What the warp has made, to the other block: a copy of a lane for each 64 channels.
    __device__ __forceinline__ void send(std::uint32_t tile) const {
        constexpr int ninth = dim > 512;
        if (lane >= 4 + ninth) return;
        const std::uint32_t from =
            tile + static_cast<std::uint32_t>(lane < 4 ? (4 * rank + lane) * 8192 + warp * 2048
                                                       : 8 * 8192 + warp * 2048 + rank * 1024);
        copy_bulk_to(place_in(rank ^ 1, from), from, lane < 4 ? 2048 : 1024,
                     place_in(rank ^ 1, arrived_at()));
    }
};

#endif

/// As latent_part_tiles, of lists: two warps have 16 tokens of a tile.
template <class Shape, class Args>
struct latent_listed_tiles {
    static constexpr bool to_registers = true;
    static constexpr int words = Shape::rows > 32 ? 8 : 32;
    static_assert(Shape::warps == 8);
    using sixteen_type = listed_sixteen<Args, words, 2>;
    const latent_piece& piece;
    const listed_pages<Args> pages;
    sixteen_type sixteen;
    typename sixteen_type::tokens now;
    listed_token ahead;
    int next;

    __device__ __forceinline__ latent_listed_tiles(const Args& args, const latent_piece& p, int warp,
                                                   int lane)
        : piece(p), pages(args, p.sequence), sixteen(args, warp % 4, warp / 4, lane), next(listed(p.from)) {
        look_up(p.from);
    }
    __device__ __forceinline__ void fetch(int number, std::uint32_t) {
        now = sixteen.find(ahead);
        sixteen.fetch(now);
        look_up(number + 1);
    }
    __device__ __forceinline__ void store(std::uint32_t tile, std::uint32_t note) {
        sixteen.store(now, {}, tile, note);
    }

private:
    __device__ __forceinline__ int listed(int tile) const {
        return tile < piece.to ? sixteen.listed(piece.sequence, tile) : -1;
    }
    /// Finds the tokens of a tile, and reads which ones the tile behind it has.
    __device__ __forceinline__ void look_up(int tile) {
        ahead = pages.find(next);
        next = listed(tile + 1);
    }
};

/// As plain_part_tokens, of lists.
struct plain_listed_tokens {
    template <class Args>
    __device__ __forceinline__ static void add(const Args& args, const latent_piece& piece, int,
                                               plain_latent_row<Args>& state, int lane) {
        const listed_pages<Args> pages(args, piece.sequence);
#pragma unroll 1
        for (int i = piece.from * latent_tile; i < piece.to * latent_tile; ++i) {
            const listed_token token = pages.find(args.lists.token(piece.sequence, 0, i));
            static_for<listed_pages<Args>::parts>([&](auto number) {
                constexpr int part = decltype(number)::value;
                if (token.part == part)
                    state.add(get<part>(args.parts).cache, token.page, token.in_page, lane, 0.0f);
            });
        }
    }
};

template <class Args>
struct latent_list_launches;
template <class First, class T, class... Parts>
struct latent_list_launches<latent_list_args<First, T, Parts...>> {
    using args = latent_list_args<First, T, Parts...>;
    static constexpr bool tiles = ((no_listed_tiles<typename Parts::pair_type> == nullptr) && ...);
    static constexpr bool in_clusters =
        First::value_dim == 512 && (listed_in_cuts<typename Parts::pair_type> && ...);
    template <int Rows, int MoreRowsThan>
    using on_tiles =
        kernel_list<latent_wgmma_launch<latent_list_shape<Rows>, MoreRowsThan, args, latent_list_producer>>;
    using of_clusters =
        std::conditional_t<in_clusters, kernel_list<latent_cluster_launch<args, latent_half_list_producer>>,
                           kernel_list<>>;
    using of_warpgroups =
        joined<std::conditional_t<First::value_dim % 256 == 0, on_tiles<64, 32>, kernel_list<>>,
               joined<on_tiles<32, 16>, on_tiles<16, 0>>>;
    using type = std::conditional_t<
        tiles, joined<of_clusters, joined<of_warpgroups, latent_mma_launches<args, latent_listed_tiles>>>,
        kernel_list<latent_plain_launch<args, plain_listed_tokens>>>;
};

template <class T, class... Parts>
using latent_list_args_of =
    latent_list_args<typename std::tuple_element_t<0, std::tuple<Parts...>>::pair_type, T,
                     cache_part<typename Parts::pair_type>...>;

}  // namespace detail

/// Bytes of workspace that attend_latent_lists() of this mixed_cache_ref needs on the current device for so
/// many query tokens; 0 if there is none.
template <class Mix, class T>
requires detail::is_mix<Mix> std::size_t latent_list_workspace_bytes(int queries, int q_heads)
noexcept {
    return [&]<class... Parts>(std::type_identity<mixed_cache_ref<Parts...>>) {
        using args = detail::latent_list_args_of<T, Parts...>;
        return detail::with_kernel(
            typename detail::latent_list_launches<args>::type{}, q_heads, [&](auto kernel) {
                cudaError_t code = cudaSuccess;
                using launch = decltype(kernel);
                const detail::latent_workspace room(queries, q_heads, launch::facts.query_rows,
                                                    launch::cluster, args::first_pair::value_dim, code);
                if (code != cudaSuccess) (void)cudaGetLastError();
                return code == cudaSuccess ? room.bytes : 0;
            });
    }(std::type_identity<Mix>{});
}

/// The kernel that attend_latent_lists() of this mixed_cache_ref takes on the current device, and why.
template <class Mix, class T>
requires detail::is_mix<Mix> kernel_choice latent_list_kernel(int q_heads)
noexcept {
    return [&]<class... Parts>(std::type_identity<mixed_cache_ref<Parts...>>) {
        using launches = detail::latent_list_launches<detail::latent_list_args_of<T, Parts...>>;
        kernel_choice choice;
        detail::with_kernel(
            typename launches::type{}, q_heads, [](auto) {}, &choice);
        ((detail::no_listed_tiles<typename Parts::pair_type> == nullptr
              ? void()
              : detail::add_words(choice, "; no tiles of listed tokens: %s",
                                  detail::no_listed_tiles<typename Parts::pair_type>)),
         ...);
        return choice;
    }(std::type_identity<Mix>{});
}

/// Attention of the last query_tokens tokens of every sequence over their lists. Parts: of latent_pair, with
/// the same channels. q: [sequences * query_tokens][heads][R + P]; out: the same with V channels.
template <class T, class... Parts>
status attend_latent_lists(const mixed_cache_ref<Parts...>& cache, const token_view<const T>& q,
                           const token_view<T>& out, const list_options& options, void* workspace,
                           std::size_t workspace_bytes, cudaStream_t stream) noexcept {
    static_assert(float_format<T>,
                  "kvq::cuda::attend_latent_lists: q and out must be float16, bfloat16 or float");
    static_assert(detail::same_latents<typename Parts::pair_type...>,
                  "kvq::cuda::attend_latent_lists: parts are of latent_pair, with the same channels of keys "
                  "and values");
    using args_type = detail::latent_list_args_of<T, Parts...>;
    if (status s = detail::check_mix(cache); !s) return s;
    const auto& first = get<0>(cache.parts).cache;
    const attention_options plain = detail::without_lists(options);
    if (status s = detail::check_attention(first, q, out, plain); !s) return s;
    if (status s = detail::check_lists(options, 1); !s) return s;
    if (q.tokens > 65535)
        return detail::bad_value("%d query tokens in one launch, which takes up to 65535", q.tokens);
    if (q.tokens == 0) return {};
    args_type args{};
    args.a = detail::make_arguments(first, q, out, plain);
    args.a.work.sequences = q.tokens;
    args.a.work.query_tokens = 1;
    args.a.rows = q.heads;
    [&]<int... Is>(std::integer_sequence<int, Is...>) {
        ((detail::get<Is>(args.parts) = detail::get<Is>(cache.parts)), ...);
    }
    (std::make_integer_sequence<int, sizeof...(Parts)>{});
    args.recent = cache.recent;
    args.lists = detail::listed_queries(options);
    args.sink_logits = options.sink_logits;
    return detail::with_kernel(
        typename detail::latent_list_launches<args_type>::type{}, args.a.rows, [&](auto kernel) {
            return detail::launch_latents(kernel, args, workspace, workspace_bytes, stream);
        });
}

}}}  // namespace kvq::cuda
