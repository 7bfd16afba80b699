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

#include "../decode/listed_pages.cuh"
#include "latent.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

/// Why a tile is not made of single tokens of such blocks; null: it is.
template <class Pair>
constexpr const char* no_listed_rows() {
    constexpr codec_spec c = codec<typename Pair::keys>;
    if (c.content == block_content::values)
        return c.value_type == float_type::fp32 ? "values have 32 bits" : nullptr;
    if (c.content != block_content::codes) return "blocks are read by numbers";
    if (!c.per_token) return "parameters of channels would be read for every token";
    if (c.parameters == parameter_storage::bytes || c.token_scale_bytes != 0)
        return "tokens have parameters of 8 bits, or scales beside them";
    if (c.several_widths() || (c.narrow_width != 4 && c.narrow_width != 8))
        return "codes have no 4 or 8 bits";
    if (c.group > 0 && c.group < Pair::head_dim && c.group % 8 != 0)
        return "groups of channels are no multiple of 8";
    return nullptr;
}

/// Why a tile is not made of single tokens of such pages; null: it is.
template <class Pair>
inline constexpr const char* no_listed_tiles = []() -> const char* {
    if constexpr (token_record_scheme<typename Pair::keys>)
        return Pair::value_dim % 64 != 0 || Pair::head_dim > 576
                   ? "value channels are no multiple of 64, or there are more than 576 channels"
                   : no_record_tiles(Pair::keys::fixed_layout(), Pair::head_dim, 32);
    if (Pair::first_channels % 64 != 0 || Pair::second_channels % 64 != 0 || Pair::value_dim % 64 != 0)
        return "latent, rotary or value channels are not multiples of 64";
    if (Pair::head_dim > 576) return "there are more than 576 channels";
    if (Pair::page_tokens % 32 != 0 && (Pair::page_tokens > 32 || Pair::page_tokens % 4 != 0))
        return "page_tokens is no multiple of 32, nor of 4 below it";
    const char* const reason = no_listed_rows<typename Pair::first_pair>();
    return reason || Pair::second_channels == 0 ? reason : no_listed_rows<typename Pair::second_pair>();
}();

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

/// Channels of the 16 tokens of a tile that a warp has, from pages to half floats: lanes have neighbouring
/// octets of channels of a token, so that a load of a warp meets one page. Offset: of the channels' block in
/// a page. So many warps share the tokens: lanes of the second one are counted from 32 * steps on.
template <class Pair, int Channels, std::size_t Offset, int Words, int Sharers>
struct listed_rows {
    using S = typename Pair::keys;
    using traits = word_traits<S>;
    static constexpr bool full = traits::full;
    static constexpr block_shape shape = Pair::key_shape();
    static constexpr int page = Pair::page_tokens, height = kvq::detail::smaller(32, page);
    static constexpr int octets = Channels / 8, steps = 16 * octets / 32 / Sharers;
    static constexpr int octet_words = [] {
        if constexpr (full)
            return 4;
        else
            return S::code_bits / 4;
    }();
    static constexpr int row_words = octets * octet_words;
    static constexpr int group = traits::group == 0 || traits::group > Channels ? Channels : traits::group,
                         groups =
                             full ? 0 : kvq::detail::ceil_div(Channels, group);  // the last one may be short
    /// A lane has the parameters of one token and of every second group.
    static constexpr int sets = kvq::detail::ceil_div(groups, 2);
    static constexpr int held = kvq::detail::smaller(steps, kvq::detail::larger(1, Words / octet_words));
    using set_type = typename set_of<S>::type;

    const std::byte* block;  // of the lane's token: lanes i and 16 + i have the same
    int in_page;
    bool own;  // is the token of this part?
    set_type parameters[sets == 0 ? 1 : sets];
    std::uint32_t word[held][octet_words];

    /// at: where the page begins.
    __device__ __forceinline__ void begin(const std::byte* at, int place, bool of_part, int lane) {
        block = at + Offset;
        in_page = place % page;
        own = of_part;
        if constexpr (!full)
#pragma unroll
            for (int i = 0; i < sets; ++i) {
                const int g = 2 * i + lane / 16;
                parameters[i].load(block_in_memory{block}, traits::scale_offset(shape),
                                   traits::bias_offset(shape),
                                   kvq::detail::smaller(g, groups - 1) * round_up(page, 4) + in_page, 0);
            }
    }
    /// Asks for the octets from step `First` on.
    template <int First = 0>
    __device__ __forceinline__ void fetch(int lane) {
        const auto at = reinterpret_cast<std::uintptr_t>(block) +
                        static_cast<unsigned>(((in_page & ~31) * row_words + in_page % height) * 4);
        static_for<held>([&](auto number) {
            constexpr int i = decltype(number)::value;
            if constexpr (First + i < steps) {
                const place_of_lane at_lane((First + i) * 32 + lane);
                const auto* const from =
                    reinterpret_cast<const std::uint32_t*>(__shfl_sync(0xffffffffu, at, at_lane.token)) +
                    at_lane.octet * (octet_words * height);
#pragma unroll
                for (int k = 0; k < octet_words; ++k) word[i][k] = fetch_word(from + k * height);
            }
        });
    }
    /// As cell_batch computes x^.
    __device__ __forceinline__ void halves(std::uint32_t (&x)[4], const std::uint32_t (&w)[octet_words],
                                           [[maybe_unused]] int token, [[maybe_unused]] int octet) const {
        if constexpr (full) {
#pragma unroll
            for (int k = 0; k < 4; ++k)
                if constexpr (std::is_same_v<typename S::value_type, float16>)
                    x[k] = w[k];
                else
                    x[k] = pack_halves<float16>(unpack_half<typename S::value_type, 0>(w[k]),
                                                unpack_half<typename S::value_type, 1>(w[k]));
        } else {
            const int g = octet * 8 / group;
            std::uint32_t both = 0, low = 0;
#pragma unroll
            for (int i = 0; i < sets; ++i) {
                const half_parameters h = parameters[i].halves();
                const int from = g % 2 * 16 + token;
                const std::uint32_t own_both = h.scale | static_cast<std::uint32_t>(h.bias) << 16,
                                    other = __shfl_sync(0xffffffffu, own_both, from);
                if (g / 2 == i) both = other;
                if constexpr (set_type::has_low) {
                    const std::uint32_t other_low =
                        __shfl_sync(0xffffffffu, static_cast<std::uint32_t>(h.low), from);
                    if (g / 2 == i) low = other_low;
                }
            }
            const std::uint32_t scale = __byte_perm(both, 0, 0x1010), bias = __byte_perm(both, 0, 0x3232);
            std::uint32_t quads[2];
            if constexpr (octet_words == 1) {
                quads[0] = w[0] & 0x0f0f0f0fu;
                quads[1] = w[0] >> 4 & 0x0f0f0f0fu;
            } else {
                quads[0] = w[0];
                quads[1] = w[1];
            }
            constexpr std::uint32_t raised =
                0xe400e400u + 0x00010001u * set_type::centre;  // -(1024 + centre)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const std::uint32_t number =
                    __byte_perm(quads[k / 2], 0x64646464u, k % 2 == 0 ? 0x4140 : 0x4342);
                const std::uint32_t code = multiply_add_halves(number, 0x3c003c00u, raised);
                if constexpr (set_type::has_low)
                    x[k] = multiply_add_halves(code, scale,
                                               multiply_add_halves(code, __byte_perm(low, 0, 0x1010), bias));
                else if constexpr (traits::has_bias)
                    x[k] = multiply_add_halves(code, scale, bias);
                else
                    x[k] = multiply_halves(code, scale);
            }
        }
    }

private:
    struct place_of_lane {
        int token, octet;
        __device__ __forceinline__ explicit place_of_lane(int i) : token(i / octets), octet(i % octets) {}
    };
};

/// Stores all octets; the first ones have been asked for. to: of the first token and channel.
template <class Rows>
__device__ __forceinline__ void store_listed(Rows& rows, std::uint32_t to, int row, int lane) {
    static_for<kvq::detail::ceil_div(Rows::steps, Rows::held)>([&](auto round) {
        constexpr int first = decltype(round)::value * Rows::held;
        if constexpr (first > 0) rows.template fetch<first>(lane);
        static_for<Rows::held>([&](auto number) {
            constexpr int i = decltype(number)::value;
            if constexpr (first + i < Rows::steps) {
                const int at = (first + i) * 32 + lane, token = at / Rows::octets, octet = at % Rows::octets;
                std::uint32_t x[4];
                rows.halves(x, rows.word[i], token, octet);
                if (__shfl_sync(0xffffffffu, static_cast<int>(rows.own), token) != 0)
                    store_shared_16(to + octet_offset<latent_tile>(row + token, octet),
                                    {__uint_as_float(x[0]), __uint_as_float(x[1]), __uint_as_float(x[2]),
                                     __uint_as_float(x[3])});
            }
        });
    });
}

/// What reads the first channels of a token, and the others, if there are others.
template <class Pair, int Words, int Sharers>
struct listed_parts {
    static constexpr bool two = Pair::second_channels > 0;
    static constexpr int first_channels = Pair::first_channels;
    using first = listed_rows<typename Pair::first_pair, first_channels, 0, Words, Sharers>;
    using second = listed_rows<typename Pair::second_pair, two ? Pair::second_channels : 64,
                               Pair::second_block, Words, Sharers>;
};
template <class Pair, int Words, int Sharers>
requires token_record_scheme<typename Pair::keys>
struct listed_parts<Pair, Words, Sharers> {
    using reader = record_reader<typename Pair::keys, Pair::head_dim, Pair::page_tokens>;
    static constexpr bool two = reader::wide > 0;
    static constexpr int first_channels = reader::scaled;
    using first = listed_records<Pair, false, Words, Sharers>;
    using second = listed_records<Pair, true, Words, Sharers>;
};

/// 16 listed tokens of a tile. Of those of the first part a warp holds what it has asked for; those of others
/// are read when they are stored.
template <class Args, int Words, int Sharers>
struct listed_sixteen {
    template <int I>
    using pair_of = typename std::remove_cvref_t<decltype(get<I>(std::declval<Args>().parts))>::pair_type;
    template <int I>
    using rows_of = listed_parts<pair_of<I>, Words, Sharers>;
    using first_rows = typename rows_of<0>::first;
    const Args& args;
    int number;  // of the sixteen in a tile
    int share;   // of the warp among those that share them
    int lane;
    first_rows rows;

    __device__ __forceinline__ listed_sixteen(const Args& a, int of_tile, int of_warp, int of_lane)
        : args(a), number(of_tile), share(of_warp), lane(of_lane) {}

    /// Token i % 16 of lane i in the lists of a query.
    __device__ __forceinline__ int listed(int query, int tile) const {
        return args.lists.token(query, 0, tile * latent_tile + number * 16 + lane % 16);
    }
    __device__ __forceinline__ void fetch(const listed_token& token) {
        if (!any<0>(token)) return;
        begin<0>(rows, token);
        rows.fetch(lane_of<first_rows>());
    }
    /// note: of the tile.
    __device__ __forceinline__ void store(const listed_token& token, std::uint32_t to, std::uint32_t note) {
        const std::uint32_t shown = __ballot_sync(0xffffffffu, token.part >= 0) & 0xffffu;
        if (lane == 0 && share == 0) {
            if (number == 0) store_word(note, 0);
            store_half_word(note + 4 + 2 * static_cast<std::uint32_t>(number),
                            static_cast<std::uint16_t>(shown));
        }
        // Otherwise the places of all octets are computed before the loop, and take registers.
        asm volatile("" : "+r"(lane));
        static_for<listed_pages<Args>::parts>([&](auto part) { store_part(part, token, to); });
        if (shown != 0xffffu) clear(shown, to);
    }

private:
    template <class Rows>
    __device__ __forceinline__ int lane_of() const {
        return lane + share * (32 * Rows::steps);
    }
    template <int I>
    __device__ __forceinline__ static bool any(const listed_token& token) {
        return __any_sync(0xffffffffu, token.part == I) != 0;
    }
    /// In place of a token that is not of this part any other one is read, so that there are no branches.
    template <int I, class Rows>
    __device__ __forceinline__ void begin(Rows& of, const listed_token& token) const {
        const bool own = token.part == I;
        of.begin(get<I>(args.parts).cache.key_block(own ? token.page : 0, 0), own ? token.in_page : 0, own,
                 lane);
    }
    template <int I>
    __device__ __forceinline__ void store_part(std::integral_constant<int, I>, const listed_token& token,
                                               std::uint32_t to) {
        if (!any<I>(token)) return;
        if constexpr (I == 0)
            store_listed(rows, to, 16 * number, lane_of<first_rows>());
        else
            read<I, typename rows_of<I>::first>(token, to);
        if constexpr (rows_of<I>::two)
            read<I, typename rows_of<I>::second>(
                token, to + static_cast<std::uint32_t>(rows_of<I>::first_channels * latent_tile * 2));
    }
    template <int I, class Rows>
    __device__ __forceinline__ void read(const listed_token& token, std::uint32_t to) const {
        Rows others;
        begin<I>(others, token);
        others.fetch(lane_of<Rows>());
        store_listed(others, to, 16 * number, lane_of<Rows>());
    }
    /// Zeros in rows of no token.
    __device__ __forceinline__ void clear(std::uint32_t shown, std::uint32_t to) const {
        const int token = lane % 16;
        if ((shown >> token & 1u) != 0) return;
#pragma unroll 1
        for (int octet = lane / 16 + 2 * share; octet < Args::first_pair::head_dim / 8; octet += 2 * Sharers)
            store_shared_16(to + octet_offset<latent_tile>(16 * number + token, octet),
                            {0.0f, 0.0f, 0.0f, 0.0f});
    }
};

template <class Shape, class Args>
struct latent_list_producer;

#if KVQ_WARPGROUP_PRODUCTS

/// As latent_producer, of listed tokens: a warp has 16 tokens of a tile.
template <class Shape, class Args>
struct latent_list_producer {
    static constexpr int step = Shape::stages, words = Shape::many ? 8 : Shape::rows > 16 ? 32 : 64;
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
        const listed_pages<Args> pages(args, p.sequence);
        listed_sixteen<Args, words, 1> tokens(args, producer % Shape::stage_warps, 0, lane);
        const auto listed = [&](int tile) { return tile < p.to ? tokens.listed(p.sequence, tile) : -1; };
        listed_token now = pages.find(listed(p.from + own));
        int next = listed(p.from + own + step);
        tokens.fetch(now);
#pragma unroll 1
        for (int tile = p.from + own; tile < p.to; tile += step, number += step) {
            const listed_token ahead = pages.find(next);
            next = listed(tile + 2 * step);
            barrier_wait(at.free, static_cast<std::uint32_t>(number / step + 1) & 1u);
            tokens.store(now, at.tile, at.note);
            publish_to_products();
            __syncwarp();
            if (lane == 0) barrier_arrive(at.full);
            now = ahead;
            tokens.fetch(now);
        }
    }
};

#endif

/// As latent_part_tiles, of lists: two warps have 16 tokens of a tile.
template <class Shape, class Args>
struct latent_listed_tiles {
    static constexpr bool to_registers = true;
    static constexpr int words = Shape::rows > 32 ? 8 : 32;
    static_assert(Shape::warps == 8);
    const latent_piece& piece;
    const listed_pages<Args> pages;
    listed_sixteen<Args, words, 2> tokens;
    listed_token now, ahead;
    int next;

    __device__ __forceinline__ latent_listed_tiles(const Args& args, const latent_piece& p, int warp,
                                                   int lane)
        : piece(p), pages(args, p.sequence), tokens(args, warp % 4, warp / 4, lane), next(listed(p.from)) {
        look_up(p.from);
    }
    __device__ __forceinline__ void fetch(int number, std::uint32_t) {
        now = ahead;
        tokens.fetch(now);
        look_up(number + 1);
    }
    __device__ __forceinline__ void store(std::uint32_t tile, std::uint32_t note) {
        tokens.store(now, tile, note);
    }

private:
    __device__ __forceinline__ int listed(int tile) const {
        return tile < piece.to ? tokens.listed(piece.sequence, tile) : -1;
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
    template <int Rows, int MoreRowsThan>
    using on_tiles =
        kernel_list<latent_wgmma_launch<latent_list_shape<Rows>, MoreRowsThan, args, latent_list_producer>>;
    using of_warpgroups =
        joined<std::conditional_t<First::value_dim % 256 == 0, on_tiles<64, 32>, kernel_list<>>,
               joined<on_tiles<32, 16>, on_tiles<16, 0>>>;
    using type =
        std::conditional_t<tiles, joined<of_warpgroups, latent_mma_launches<args, latent_listed_tiles>>,
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
