// Tiles of listed tokens: 16 of the tokens of a tile by one warp, from pages to half floats.
//
//   look up    list -> block table -> where the token lies, each a tile before the next
//   fetch      words of all of them, into registers, while those before become halves
//   store      halves, where products read them (latent_tiles.cuh)
//
// Lanes have neighbouring octets of channels of a token, so that a load of a warp meets one page.
// Contract: x^ as in latent_tiles.cuh; rows of no token are zeros.
#pragma once

#include "../decode/listed_pages.cuh"
#include "latent_tiles.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

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

/// Of 16 tokens of so many octets: the token and the octet of a lane in a step.
struct listed_place {
    int token, octet;

    template <int Octets>
    __device__ __forceinline__ static listed_place of(int step, int lane) {
        if constexpr (Octets % 32 == 0) {  // neighbouring lanes, one token
            constexpr int per_token = Octets / 32;
            return {step / per_token, step % per_token * 32 + lane};
        } else {
            return {(step * 32 + lane) / Octets, (step * 32 + lane) % Octets};
        }
    }
};

/// Channels of the 16 tokens of a tile that a warp has. Offset: of the channels' block in a page. So many
/// warps share the tokens: the second one has the steps from `steps` on. Cuts: so many blocks of a cluster
/// share the channels.
template <class Pair, int Channels, std::size_t Offset, int Words, int Sharers, int Cuts>
struct listed_rows {
    using S = typename Pair::keys;
    using traits = word_traits<S>;
    static constexpr bool full = traits::full;
    static constexpr block_shape shape = Pair::key_shape();
    static constexpr int page = Pair::page_tokens, height = kvq::detail::smaller(32, page);
    static constexpr int cut_channels = Channels / Cuts, octets = cut_channels / 8,
                         steps = 16 * octets / 32 / Sharers;
    static constexpr int octet_words = [] {
        if constexpr (full)
            return 4;
        else
            return S::code_bits / 4;
    }();
    static constexpr int row_words = Pair::head_dim / 8 * octet_words;
    static constexpr int group = traits::group == 0 || traits::group > Channels ? Channels : traits::group,
                         all_groups =
                             full ? 0 : kvq::detail::ceil_div(Channels, group);  // the last one may be short
    static constexpr int groups =
        Cuts == 1 ? all_groups
                  : kvq::detail::smaller(all_groups, kvq::detail::ceil_div(cut_channels, group) +
                                                         (cut_channels % group != 0 ? 1 : 0));
    /// A lane has the parameters of one token and of every second group.
    static constexpr int sets = kvq::detail::ceil_div(groups, 2);
    static constexpr int held = kvq::detail::smaller(steps, kvq::detail::larger(1, Words / octet_words));
    using set_type = typename set_of<S>::type;
    /// Steps that follow each other and have the same token in all lanes.
    static constexpr int per_token = octets % 32 == 0 ? octets / 32 : 1;

    struct tokens {
        std::uintptr_t at = 0;  // words of the lane's token: lanes i and 16 + i have the same
        unsigned own = 0;       // bit i: token i is of this part
        set_type parameters[sets == 0 ? 1 : sets] = {};
    };
    std::uint32_t word[held][octet_words] = {};

    __device__ __forceinline__ static int first_octet(int cut) { return Cuts == 1 ? 0 : cut * octets; }
    /// block: where the page begins; `own` is that of `tokens`.
    __device__ __forceinline__ static tokens find(const std::byte* block, int place, unsigned own, int cut,
                                                  int lane) {
        const int in_page = place % page;
        const std::byte* const at = block + Offset;
        tokens of;
        of.own = own;
        of.at = reinterpret_cast<std::uintptr_t>(at) +
                static_cast<unsigned>(((in_page & ~31) * row_words + in_page % height +
                                       first_octet(cut) * (octet_words * height)) *
                                      4);
        if constexpr (!full)
#pragma unroll
            for (int i = 0; i < sets; ++i) {
                const int g = first_octet(cut) * 8 / group + 2 * i + lane / 16;
                of.parameters[i].load(
                    block_in_memory{at}, traits::scale_offset(shape), traits::bias_offset(shape),
                    kvq::detail::smaller(g, all_groups - 1) * round_up(page, 4) + in_page, 0);
            }
        return of;
    }
    /// Brings the words of a token to the second-level cache, where its lines are few: lanes i and 16 + i
    /// half of them each. own: of the lane.
    __device__ __forceinline__ static void prefetch(const std::byte* block, int place, bool own, int lane) {
        constexpr int bytes = octets * octet_words * height * 4, lines = bytes / 128;
        if constexpr (lines > 0 && lines <= 8)
            if (own) {
                const int in_page = place % page;
                const std::byte* const at = block + Offset + (in_page & ~31) * (row_words * 4) +
                                            first_octet(0) * (octet_words * height * 4);
#pragma unroll
                for (int i = 0; i < lines; i += 2) prefetch_line(at + (i + lane / 16) * 128);
            }
    }
    /// Where the words of the token of a step lie. first: step of the warp.
    template <int Step>
    __device__ __forceinline__ static std::uintptr_t row(const tokens& of, int first, int lane) {
        return __shfl_sync(0xffffffffu, of.at, listed_place::of<octets>(first + Step, lane).token);
    }
    /// Asks for the octet of a step.
    template <int Step>
    __device__ __forceinline__ void fetch(std::uintptr_t of_token, int first, int lane) {
        const auto at = listed_place::of<octets>(first + Step, lane);
        const auto* const from =
            reinterpret_cast<const std::uint32_t*>(of_token) + at.octet * (octet_words * height);
#pragma unroll
        for (int k = 0; k < octet_words; ++k) word[Step % held][k] = fetch_word(from + k * height);
    }
    /// As cell_batch computes x^. octet: of those of the cut.
    template <int Step>
    __device__ __forceinline__ void halves(std::uint32_t (&x)[4], [[maybe_unused]] const tokens& of,
                                           const std::uint32_t (&w)[octet_words], [[maybe_unused]] int token,
                                           [[maybe_unused]] int octet, [[maybe_unused]] int cut) const {
        if constexpr (full) {
#pragma unroll
            for (int k = 0; k < 4; ++k) x[k] = as_halves<typename S::value_type>(w[k]);
        } else {
            const int g = (first_octet(cut) + octet) * 8 / group - first_octet(cut) * 8 / group;
            std::uint32_t both = 0, low = 0;
#pragma unroll
            for (int i = 0; i < sets; ++i) {
                // Of a step with 256 channels of one token: sets that have none of their groups.
                constexpr bool cut_by_groups = Cuts == 1 || cut_channels % group == 0;
                constexpr int begin = Step % per_token * 256, end = begin + 256;
                if (octets % 32 == 0 && cut_by_groups &&
                    ((i + 1) * 2 * group <= begin || i * 2 * group >= end))
                    continue;
                const half_parameters h = of.parameters[i].halves();
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
};

/// Bits of all words of a batch.
template <class Rows>
__device__ __forceinline__ std::uint32_t any_word(const Rows& rows) {
    std::uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < Rows::held; ++i)
#pragma unroll
        for (int k = 0; k < Rows::octet_words; ++k) all |= rows.word[i][k];
    if constexpr (requires { rows.scale; })
#pragma unroll
        for (int i = 0; i < Rows::held; ++i) all |= rows.scale[i];
    return all;
}
/// Asks for a batch of octets of a tile: all at once, and for the next one when all of them have come. (What
/// waits for one of several loads of a warp may wait for all.)
template <int Batch, class Rows>
__device__ __forceinline__ void fetch_listed(Rows& rows, const typename Rows::tokens& of, int first,
                                             int lane) {
    if (of.own == 0) return;
    std::uintptr_t row = 0;
    static_for<Rows::held>([&](auto number) {
        constexpr int i = decltype(number)::value, step = Batch * Rows::held + i;
        if constexpr (step < Rows::steps) {
            if constexpr (i == 0 || step % Rows::per_token == 0)
                row = Rows::template row<step>(of, first, lane);
            rows.template fetch<step>(row, first, lane);
        }
    });
}
template <int Batch, class Rows>
requires requires(Rows r) { r.scale; }
__device__ __forceinline__ void fetch_places(Rows& rows, const typename Rows::places& at, int lane) {
    static_for<Rows::held>([&](auto number) {
        constexpr int step = Batch * Rows::held + decltype(number)::value;
        if constexpr (step < Rows::steps) rows.template fetch<step>(at, lane);
    });
}
template <int Batch, class Rows>
requires requires(Rows r) { r.scale; }
__device__ __forceinline__ void fetch_listed(Rows& rows, const typename Rows::tokens& of, int first,
                                             int lane) {
    if (of.own != 0) fetch_places<Batch>(rows, Rows::template find_batch<Batch>(of, first, lane), lane);
}
/// Stores all octets, of which the first batch has been asked for, and asks for that of the next tile. to:
/// of the first token and channel of the cut. Whole: anything in rows of other tokens, too.
template <bool Whole, class Rows>
__device__ __forceinline__ void store_listed(Rows& rows, const typename Rows::tokens& now,
                                             const typename Rows::tokens& next, std::uint32_t to, int row,
                                             int first, int lane, int cut) {
    constexpr int batches = Rows::steps == 0 ? 0 : kvq::detail::ceil_div(Rows::steps, Rows::held);
    static_for<batches>([&](auto number) {
        constexpr int batch = decltype(number)::value;
        std::uint32_t word[Rows::held][Rows::octet_words];
#pragma unroll
        for (int i = 0; i < Rows::held; ++i)
#pragma unroll
            for (int k = 0; k < Rows::octet_words; ++k) word[i][k] = rows.word[i][k];
        wait_for(any_word(rows));
        if constexpr (batch + 1 < batches)
            fetch_listed<batch + 1>(rows, now, first, lane);
        else
            fetch_listed<0>(rows, next, first, lane);
        const auto convert = [&]<int I>(std::integral_constant<int, I>, std::uint32_t(&x)[4]) {
            const auto at = listed_place::of<Rows::octets>(first + batch * Rows::held + I, lane);
            rows.template halves<batch * Rows::held + I>(x, now, word[I], at.token, at.octet, cut);
            return at;
        };
        const auto place = [&](const listed_place& at) {
            return to + octet_offset<latent_tile>(row + at.token, at.octet);
        };
        if constexpr (Whole && Rows::steps % Rows::held == 0 && Rows::held % 4 == 0) {
            static_for<Rows::held / 4>([&](auto four) {
                std::uint32_t x[4][4], at[4];
                static_for<4>([&](auto one) {
                    constexpr int i = decltype(one)::value;
                    at[i] =
                        place(convert(std::integral_constant<int, decltype(four)::value * 4 + i>{}, x[i]));
                });
                store_shared_4x16<0>(at, x);
            });
        } else {
            static_for<Rows::held>([&](auto one) {
                constexpr int i = decltype(one)::value;
                if constexpr (batch * Rows::held + i < Rows::steps) {
                    std::uint32_t x[4];
                    const auto at = convert(std::integral_constant<int, i>{}, x);
                    if (Whole || (now.own >> at.token & 1u) != 0)
                        store_shared_16(place(at), {__uint_as_float(x[0]), __uint_as_float(x[1]),
                                                    __uint_as_float(x[2]), __uint_as_float(x[3])});
                }
            });
        }
    });
}

template <bool Whole, class Rows>
requires requires(Rows r) { r.scale; }
__device__ __forceinline__ void store_listed(Rows& rows, const typename Rows::tokens& now,
                                             const typename Rows::tokens& next, std::uint32_t to, int row,
                                             int first, int lane, int) {
    constexpr int batches = Rows::steps == 0 ? 0 : kvq::detail::ceil_div(Rows::steps, Rows::held),
                  octets = Rows::octets;
    static_for<batches>([&](auto number) {
        constexpr int batch = decltype(number)::value;
        std::uint32_t word[Rows::held][4], scale[Rows::held];
#pragma unroll
        for (int i = 0; i < Rows::held; ++i) {
#pragma unroll
            for (int k = 0; k < 4; ++k) word[i][k] = rows.word[i][k];
            scale[i] = rows.scale[i];
        }
        constexpr int behind = batch + 1 < batches ? batch + 1 : 0;
        const typename Rows::tokens& of = behind > 0 ? now : next;
        const auto at_next = Rows::template find_batch<behind>(of, first, lane);  // before the wait
        wait_for(any_word(rows));
        if (of.own != 0) fetch_places<behind>(rows, at_next, lane);
        static_for<Rows::held>([&](auto one) {
            constexpr int i = decltype(one)::value, step = batch * Rows::held + i;
            if constexpr (step < Rows::steps) {
                const int token = Rows::token_of(first, step / Rows::per_token, lane),
                          begin = Rows::template first_octet<step>(lane), turn = Rows::turn(lane);
                Rows::turn_words(word[i], lane);
                std::uint32_t x[octets][4], at[octets];
                static_for<octets>([&](auto of_step) {
                    constexpr int k = decltype(of_step)::value;
                    const int octet = begin + (k ^ turn);
                    Rows::template halves<k>(x[k], word[i], scale[i], octet);
                    at[k] = to + octet_offset<latent_tile>(row + token, octet);
                });
                if (Whole || (now.own >> token & 1u) != 0)
#pragma unroll
                    for (int k = 0; k < octets; ++k)
                        store_shared_16(at[k], {__uint_as_float(x[k][0]), __uint_as_float(x[k][1]),
                                                __uint_as_float(x[k][2]), __uint_as_float(x[k][3])});
            }
        });
    });
}

/// What reads the first channels of a token, and the others, if there are others. Two blocks of a cluster
/// have 256 of the first 512 each; the others they share by tokens, or one block has them alone.
template <class Pair, int Words, int Sharers, int Cuts>
struct listed_parts {
    using first_pair = typename Pair::first_pair;
    static constexpr int second_channel = Cuts == 1 ? Pair::first_channels : 512,
                         cut_channels = second_channel / Cuts, others = Pair::head_dim - second_channel;
    static constexpr bool two = others > 0, alone = false, again = false,
                          one_block = Pair::first_channels > second_channel;
    using first = listed_rows<first_pair, second_channel, 0, Words, Sharers, Cuts>;
    using second =
        listed_rows<std::conditional_t<two && !one_block, typename Pair::second_pair, first_pair>,
                    two ? others : 64,
                    one_block ? std::size_t{second_channel / 8} * first::octet_words * first::height * 4
                              : Pair::second_block,
                    Words / 2, Sharers * Cuts, 1>;
};
template <class Pair, int Words, int Sharers, int Cuts>
requires token_record_scheme<typename Pair::keys>
struct listed_parts<Pair, Words, Sharers, Cuts> {
    using reader = record_reader<typename Pair::keys, Pair::head_dim, Pair::page_tokens>;
    static constexpr bool two = reader::wide > 0, alone = Cuts > 1 && Pair::head_dim == 512,
                          again = reader::scaled % 128 != 0;
    static constexpr int cut_channels = Cuts > 1 ? 256 : reader::scaled, second_channel = reader::scaled;
    using first = listed_records<Pair, false, Words, Sharers, Cuts>;
    using second = listed_records<Pair, true, Words / 2, Sharers*(alone ? 1 : Cuts)>;
};
/// Can two blocks of a cluster have 256 of the first channels each?
template <class Pair>
inline constexpr bool listed_in_cuts = [] {
    if constexpr (token_record_scheme<typename Pair::keys>) {
        constexpr int scaled = Pair::keys::fixed_layout().scaled_channels(Pair::head_dim);
        return scaled == 512 || (scaled > 256 && Pair::head_dim == 512);
    } else {
        return Pair::first_channels == 512 || (full_precision<typename Pair::keys> && Pair::head_dim > 512);
    }
}();

/// 16 listed tokens of a tile. Of those of the first part a warp holds what it has asked for; those of others
/// are read when they are stored.
template <class Args, int Words, int Sharers, int Cuts = 1>
struct listed_sixteen {
    template <int I>
    using pair_of = typename std::remove_cvref_t<decltype(get<I>(std::declval<Args>().parts))>::pair_type;
    template <int I>
    using rows_of = listed_parts<pair_of<I>, Words, Sharers, Cuts>;
    using first_rows = typename rows_of<0>::first;
    using second_rows = typename rows_of<0>::second;
    static constexpr bool two = rows_of<0>::two;
    const Args& args;
    int number;  // of the sixteen in a tile
    int share;   // of the warp among those that share them
    int lane;
    int cut;  // of the block in its cluster
    first_rows first;
    second_rows second;

    /// Where the tokens of a tile lie.
    struct tokens {
        listed_token token;  // of the lane
        typename first_rows::tokens first;
        typename second_rows::tokens second;
    };

    __device__ __forceinline__ listed_sixteen(const Args& a, int of_tile, int of_warp, int of_lane,
                                              int of_block = 0)
        : args(a), number(of_tile), share(of_warp), lane(of_lane), cut(of_block) {}

    /// Token i % 16 of lane i in the lists of a query.
    __device__ __forceinline__ int listed(int query, int tile) const {
        return args.lists.token(query, 0, tile * latent_tile + number * 16 + lane % 16);
    }
    __device__ __forceinline__ tokens find(const listed_token& token) const {
        tokens of{token, {}, {}};
        if (const unsigned own = own_of<0>(token); own != 0) {
            of.first = find_part<0, first_rows>(token, own);
            if constexpr (two) of.second = find_part<0, second_rows>(token, own);
        }
        return of;
    }
    /// Brings a tile that is fetched later to the second-level cache: a cluster, whose blocks have half of
    /// the tokens each, whole pages where they have few tokens, one block alone the lines of its tokens.
    /// With these it takes 3 % less time, a cluster 7 % more. Records: a cluster, 3 %; one block would take
    /// 4 % more.
    __device__ __forceinline__ void prefetch(const listed_token& token) const {
        using pair = pair_of<0>;
        const bool own = token.part == 0;
        const std::byte* const block = get<0>(args.parts).cache.key_block(own ? token.page : 0, 0);
        if constexpr (token_record_scheme<typename pair::keys>) {
            if (Cuts > 1 && own && lane < 16 && lane / 8 == cut) first_rows::prefetch(block, token.in_page);
        } else if constexpr (Cuts == 1) {
            first_rows::prefetch(block, token.in_page, own, lane);
            if constexpr (two) second_rows::prefetch(block, token.in_page, own, lane);
        } else if constexpr (pair::page_tokens <= 4) {
            if (own && lane < 16 && (Cuts == 1 || lane / 8 == cut))
                prefetch_bulk(block, static_cast<int>(pair::key_block_bytes));
        }
    }
    /// Before the first tile.
    __device__ __forceinline__ void fetch(const tokens& of) {
        fetch_listed<0>(first, of.first, share * first_rows::steps, lane);
        if constexpr (two)
            if (has_second<0>()) fetch_listed<0>(second, of.second, second_step<0>(), lane);
    }
    /// Waits for the words of a tile.
    __device__ __forceinline__ void arrive() const {
        std::uint32_t all = any_word(first);
        if constexpr (two) all |= any_word(second);
        wait_for(all);
    }
    /// Stores a tile and asks for the next one. note: of the tile.
    __device__ __forceinline__ void store(const tokens& now, const tokens& next, std::uint32_t to,
                                          std::uint32_t note) {
        const std::uint32_t shown = __ballot_sync(0xffffffffu, now.token.part >= 0) & 0xffffu;
        if (lane == 0 && share == 0) {
            if (number == 0) store_word(note, 0);
            store_half_word(note + 4 + 2 * static_cast<std::uint32_t>(number),
                            static_cast<std::uint16_t>(shown));
        }
        // Otherwise the places of all octets are computed before the loop, and take registers.
        asm volatile("" : "+r"(lane));
        if ((now.first.own | next.first.own) != 0) {
            store_listed<true>(first, now.first, next.first, first_place<0>(to), 16 * number,
                               share * first_rows::steps, lane, cut);
            if constexpr (two)
                if (has_second<0>()) {
                    if constexpr (rows_of<0>::again) __syncwarp();
                    store_listed<true>(second, now.second, next.second, second_place<0>(to), 16 * number,
                                       second_step<0>(), lane, 0);
                }
        }
        if (now.first.own != 0xffffu) __syncwarp();  // what stands in other rows is written again
        static_for<listed_pages<Args>::parts>([&](auto part) {
            if constexpr (decltype(part)::value > 0) store_part<decltype(part)::value>(now.token, to);
        });
        if (shown != 0xffffu) clear(shown, to);
    }

private:
    template <int I>
    __device__ __forceinline__ static unsigned own_of(const listed_token& token) {
        return __ballot_sync(0xffffffffu, token.part == I) & 0xffffu;
    }
    template <int I>
    __device__ __forceinline__ std::uint32_t first_place(std::uint32_t to) const {
        return to + static_cast<std::uint32_t>(cut * (rows_of<I>::cut_channels * latent_tile * 2));
    }
    template <int I>
    __device__ __forceinline__ static std::uint32_t second_place(std::uint32_t to) {
        return to + static_cast<std::uint32_t>(rows_of<I>::second_channel * latent_tile * 2);
    }
    /// Does the block write the other channels, and from which step on?
    template <int I>
    __device__ __forceinline__ bool has_second() const {
        return !rows_of<I>::alone || cut == 1;
    }
    template <int I>
    __device__ __forceinline__ int second_step() const {
        return rows_of<I>::alone ? share * rows_of<I>::second::steps
                                 : (share + cut) * rows_of<I>::second::steps;
    }
    /// In place of a token that is not of this part any other one is read, so that there are no branches.
    template <int I, class Rows>
    __device__ __forceinline__ typename Rows::tokens find_part(const listed_token& token,
                                                               unsigned own) const {
        const bool is_own = token.part == I;
        const auto& cache = get<I>(args.parts).cache;
        const std::byte* const block = cache.key_block(is_own ? token.page : 0, 0);
        const int in_page = is_own ? token.in_page : 0, of_cut = Cuts == 1 ? 0 : cut;
        if constexpr (token_record_scheme<typename pair_of<I>::keys>)
            return Rows::find(block, in_page, own, of_cut);
        else
            return Rows::find(block, in_page, own, of_cut, lane);
    }
    template <int I>
    __device__ __forceinline__ void store_part(const listed_token& token, std::uint32_t to) const {
        const unsigned own = own_of<I>(token);
        if (own == 0) return;
        using rows = typename rows_of<I>::first;
        read<I, rows>(token, own, first_place<I>(to), share * rows::steps, cut);
        if constexpr (rows_of<I>::two)
            if (has_second<I>()) {
                if constexpr (rows_of<I>::again) __syncwarp();
                read<I, typename rows_of<I>::second>(token, own, second_place<I>(to), second_step<I>(), 0);
            }
    }
    template <int I, class Rows>
    __device__ __forceinline__ void read(const listed_token& token, unsigned own, std::uint32_t to, int step,
                                         int of_cut) const {
        Rows others;
        const typename Rows::tokens of = find_part<I, Rows>(token, own);
        fetch_listed<0>(others, of, step, lane);
        store_listed<false>(others, of, {}, to, 16 * number, step, lane, of_cut);
    }
    /// Zeros in rows of no token, of those that the warp writes.
    __device__ __forceinline__ void clear(std::uint32_t shown, std::uint32_t to) const {
        constexpr int cut_octets = rows_of<0>::cut_channels / 8, first_octets = Cuts * cut_octets,
                      dim = Args::first_pair::head_dim;
        const int token = lane % 16;
        if ((shown >> token & 1u) != 0) return;
        const auto zeros = [&](int from, int end) {
#pragma unroll 1
            for (int octet = from + lane / 16; octet < end; octet += 2)
                store_shared_16(to + octet_offset<latent_tile>(16 * number + token, octet),
                                {0.0f, 0.0f, 0.0f, 0.0f});
        };
        if (token * Sharers / 16 == share) zeros(cut * cut_octets, (cut + 1) * cut_octets);
        if (token * Sharers * Cuts / 16 == share + Sharers * cut) zeros(first_octets, dim / 8);
    }
};

}}}  // namespace kvq::cuda::detail
