// Records of tokens (schemes/record_layout.hpp) as tiles of half floats: what latent_tiles.cuh and
// latent_lists.cuh read where pages hold records.
//
//   vector   16 bytes of a record: 16 channels of 8 bits, 32 of 4 bits, 8 wide ones. A lane copies it to
//            where the first of its octets is to stand in the tile, and writes octets in its place
//   scales   those of a token and unit are one word, which waits where the second octet of the token is to be
//
// Contract: half floats are x^ with its scale rounded to a half float, 2^7 (e2m1: 2^6) times as large while
// that is done; wide channels are bf16, rounded to half floats. A unit has 64 channels of 64 tokens; rows are
// multiples of 16 bytes.
#pragma once

#include "../arch/wgmma.cuh"
#include "../layout/row_numbers.cuh"
#include "latent_shares.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Why records are not read as tiles; null: they are.
constexpr const char* no_record_tiles(const record_layout& l, int dim, int page_tokens) noexcept {
    using number = record_layout::number;
    if (l.numbers != number::e4m3 && l.numbers != number::e2m1) return "numbers are integers";
    if (l.in_turns) return "scales of several tokens take turns";
    if (l.scaled_channels(dim) % 64 != 0 || l.wide % 64 != 0)
        return "channels with and without a scale are not multiples of 64";
    const int group = l.group_of(dim);
    if (l.scale_bytes() == 4 ? group % 64 != 0
                             : group % 8 != 0 || 64 % group != 0 || 64 / group * l.scale_bytes() > 4)
        return "64 channels have more than 4 bytes of scales";
    if (l.row_bytes(dim) % 16 != 0 || l.bytes_behind(dim) % 4 != 0)
        return "rows of tokens are not a multiple of 16 bytes";
    if (page_tokens != 16 && page_tokens % 32 != 0) return odd_pages;
    return nullptr;
}

/// Numbers of the records of S, of Dim channels in pages of Page tokens.
template <class S, int Dim, int Page>
struct record_reader {
    using stored = record_layout::stored;
    static constexpr bool fours = S::fixed_layout().numbers == record_layout::number::e2m1;
    static constexpr stored scale_kind = S::fixed_layout().scale;
    static constexpr bool behind = S::fixed_layout().behind;
    static constexpr int scaled = S::fixed_layout().scaled_channels(Dim), wide = Dim - scaled,
                         group = S::fixed_layout().group_of(Dim),
                         row_bytes = S::fixed_layout().row_bytes(Dim),
                         bytes_behind = S::fixed_layout().bytes_behind(Dim),
                         scale_bytes = S::fixed_layout().scale_bytes(), wide_at = row_bytes - 2 * wide,
                         scales_at = behind ? Page * row_bytes : S::fixed_layout().number_bytes(Dim),
                         scales_step = behind ? bytes_behind : row_bytes;
    /// Octets of channels, and words of an octet.
    static constexpr int octets = Dim / 8, scaled_octets = scaled / 8, octet_words = fours ? 1 : 2;

    /// Where the word with the scale of an octet is, counted from the block, and which byte of it.
    __device__ __forceinline__ static int scale_word(int token, int octet) {
        return scales_at + token * scales_step + (octet * 8 / group * scale_bytes & ~3);
    }
    /// The scale of an octet as a half float, twice; as many times too large as numbers are too small.
    __device__ __forceinline__ static std::uint32_t scale_of(std::uint32_t word, int octet) {
        constexpr float lift = fours ? 64.0f : 128.0f;
        float scale = __uint_as_float(word);
        if constexpr (scale_kind != stored::fp32) {
            const auto code = static_cast<std::uint8_t>(word >> 8 * (octet * 8 / group % 4));
            if constexpr (scale_kind == stored::e8m0)
                scale = e8m0::to_float(code);
            else
                scale = unpack_half<float16, 0>(halves_of_e4m3<0>(code * 0x0101u));
        }
        return pack_halves<float16>(scale * lift, scale * lift);
    }
    /// The half floats of an octet with a scale.
    __device__ __forceinline__ static void halves(std::uint32_t (&x)[4],
                                                  const std::uint32_t (&words)[octet_words],
                                                  std::uint32_t scale) {
        if constexpr (fours) {
            const std::uint32_t even = e2m1_as_e4m3<0>(words[0]), odd = e2m1_as_e4m3<1>(words[0]);
            const std::uint32_t a[2] = {halves_of_e4m3<0>(even), halves_of_e4m3<1>(even)},
                                b[2] = {halves_of_e4m3<0>(odd), halves_of_e4m3<1>(odd)};
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = __byte_perm(a[i / 2], b[i / 2], i % 2 == 0 ? 0x5410 : 0x7632);
        } else {
            x[0] = halves_of_e4m3<0>(words[0]), x[1] = halves_of_e4m3<1>(words[0]);
            x[2] = halves_of_e4m3<0>(words[1]), x[3] = halves_of_e4m3<1>(words[1]);
        }
#pragma unroll
        for (std::uint32_t& two : x) {
            if constexpr (!fours) two = multiply_halves(two, 0x20002000u);  // 2^-7: exact
            two = multiply_halves(two, scale);
        }
    }
    __device__ __forceinline__ static void wide_halves(std::uint32_t (&x)[4]) {
#pragma unroll
        for (std::uint32_t& two : x)
            two = pack_halves<float16>(unpack_half<bfloat16, 0>(two), unpack_half<bfloat16, 1>(two));
    }
};

/// The units of a tile. Pair: of the whole record.
template <class Pair>
struct record_units {
    using reader = record_reader<typename Pair::keys, Pair::head_dim, Pair::page_tokens>;
    static constexpr int scaled_units = reader::scaled / 64, count = Pair::head_dim / 64;
    /// Vectors of a token in a unit.
    static constexpr int vectors = reader::fours ? 2 : 4;

    template <class Runs>
    __device__ __forceinline__ static void fetch(const Runs& runs, int unit, std::uint32_t to, int lane) {
        if (reader::wide == 0 || unit < scaled_units) {
            each_vector<1>(lane, [&](int first, int token, int) {
                constexpr int last = Runs::tokens < 32;
                const int i = first / Runs::tokens;
                const bool second = last != 0 && lane >= Runs::tokens;
                const auto &a = runs.run[i], &b = runs.run[i + last];
                const int in_page = (second ? b.token : a.token) + token % Runs::tokens;
                copy_word_async(to + octet_offset<latent_tile>(token, 1),
                                (second ? b.block : a.block) + reader::scale_word(in_page, unit * 8),
                                second ? b.bytes : a.bytes);
            });
            each_vector<vectors>(lane, [&](int first, int token, int octet) {
                const std::byte* const block = runs.run[first / Runs::tokens].block;
                const int in_page = token_of(runs, first, token);
                const std::uint32_t bytes = runs.run[first / Runs::tokens].bytes;
                copy_async(
                    to + octet_offset<latent_tile>(token, octet),
                    block + in_page * reader::row_bytes + (unit * 8 + octet) * (reader::octet_words * 4),
                    bytes);
            });
        } else {
            each_vector<8>(lane, [&](int first, int token, int octet) {
                const std::byte* const block = runs.run[first / Runs::tokens].block;
                copy_async(to + octet_offset<latent_tile>(token, octet),
                           block + token_of(runs, first, token) * reader::row_bytes + reader::wide_at +
                               ((unit - scaled_units) * 8 + octet) * 16,
                           runs.run[first / Runs::tokens].bytes);
            });
        }
    }
    /// All lanes have what they have asked for.
    __device__ __forceinline__ static void store(int unit, std::uint32_t to, int lane) {
        const auto write = [&](std::uint32_t at, const std::uint32_t(&x)[4]) {
            store_shared_16(at, {__uint_as_float(x[0]), __uint_as_float(x[1]), __uint_as_float(x[2]),
                                 __uint_as_float(x[3])});
        };
        if (reader::wide == 0 || unit < scaled_units) {
            constexpr int step = 32 / vectors;  // tokens
#pragma unroll 1
            for (int first = 0; first < latent_tile; first += 2 * step) {
                uint4 words[2];
                std::uint32_t scales[2];
                const int token = first + lane / vectors, octet = lane % vectors * (8 / vectors);
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    words[n] = load_shared_16(to + octet_offset<latent_tile>(token + n * step, octet));
                    scales[n] = load_shared_4(to + octet_offset<latent_tile>(token + n * step, 1));
                }
                __syncwarp();
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const std::uint32_t all[4] = {words[n].x, words[n].y, words[n].z, words[n].w};
                    static_for<8 / vectors>([&](auto number) {
                        constexpr int i = decltype(number)::value;
                        std::uint32_t own[reader::octet_words], x[4];
#pragma unroll
                        for (int k = 0; k < reader::octet_words; ++k)
                            own[k] = all[i * reader::octet_words + k];
                        reader::halves(x, own, reader::scale_of(scales[n], unit * 8 + octet + i));
                        write(to + octet_offset<latent_tile>(token + n * step, octet + i), x);
                    });
                }
            }
        } else {
            each_vector<8, 4>(lane, [&](int, int token, int octet) {
                const std::uint32_t at = to + octet_offset<latent_tile>(token, octet);
                const uint4 v = load_shared_16(at);
                std::uint32_t x[4] = {v.x, v.y, v.z, v.w};
                reader::wide_halves(x);
                write(at, x);
            });
        }
    }

private:
    /// f(a token of the run, token, first octet) of the vectors of a lane, `Count` for each token.
    template <int Count, int Unroll = 2 * Count, class F>
    __device__ __forceinline__ static void each_vector(int lane, const F& f) {
        constexpr int step = 32 / Count;
#pragma unroll Unroll
        for (int i = 0; i < 2 * Count; ++i) f(i * step, i * step + lane / Count, lane % Count * (8 / Count));
    }
    template <class Runs>
    __device__ __forceinline__ static int token_of(const Runs& runs, int first, int token) {
        return runs.run[first / Runs::tokens].token + token - first / Runs::tokens * Runs::tokens;
    }
};

/// As listed_rows (latent_listed_rows.cuh), of the channels of records with a scale, or of the wide ones.
/// Eight lanes have 128 bytes of a token, lane i of tokens i / 8, i / 8 + 4, ...: nothing goes from lane to
/// lane, since products take the bandwidth of shared memory. Cuts: of 256 channels. What is stored behind the
/// last channel with a scale is to be written again.
template <class Pair, bool Wide, int Words, int Sharers, int Cuts = 1>
struct listed_records {
    using reader = record_reader<typename Pair::keys, Pair::head_dim, Pair::page_tokens>;
    static constexpr int octet_words = 4,  // of a step, which has so many octets:
        own_words = Wide ? 4 : reader::octet_words, octets = 4 / own_words, channels = octets * 8;
    static constexpr int all_channels = Wide        ? reader::wide
                                        : Cuts == 1 ? reader::scaled
                                                    : 256,
                         per_token = ceil_div(all_channels, 8 * channels), own_tokens = 4 / Sharers,
                         steps = all_channels == 0 ? 0 : own_tokens * per_token,
                         held = smaller(steps, larger(1, Words / octet_words)),
                         word_channels = reader::group * 4 / reader::scale_bytes;
    /// Of a cut: bytes of numbers, words of scales.
    static constexpr int cut_bytes = all_channels * own_words / 2, cut_scales = all_channels / word_channels;
    static_assert(Wide || Cuts * cut_bytes <= reader::row_bytes);  // what is read

    /// Of a lane's token; lanes i and 16 + i have the same. Addresses: pools have more than 2^32 words.
    struct tokens {
        unsigned own = 0;  // bit i: token i is of this part
        int scales = 0;    // words from `row` to its scales
        std::uintptr_t row = 0;
    };
    /// The same for the steps of a batch.
    struct places {
        int scales[held == 0 ? 1 : held];
        std::uintptr_t row[held == 0 ? 1 : held];
    };
    std::uint32_t word[held == 0 ? 1 : held][octet_words] = {}, scale[held == 0 ? 1 : held] = {};

    /// block: of the lane's token.
    __device__ __forceinline__ static tokens find(const std::byte* block, int place, unsigned own, int cut) {
        const int in_page = place % Pair::page_tokens;
        tokens of;
        of.own = own;
        of.row = reinterpret_cast<std::uintptr_t>(block) +
                 static_cast<unsigned>(in_page * reader::row_bytes + (Wide ? 0 : cut * cut_bytes));
        of.scales = (reader::scales_at - cut * cut_bytes) / 4 + cut * cut_scales;
        if constexpr (reader::behind) of.scales += in_page * ((reader::scales_step - reader::row_bytes) / 4);
        return of;
    }
    /// first: step of the warp.
    template <int Batch>
    __device__ __forceinline__ static places find_batch(const tokens& of, int first, int lane) {
        places at;
        static_for<held>([&](auto number) {
            constexpr int i = decltype(number)::value, step = Batch * held + i, j = step / per_token;
            if constexpr (i > 0 && step % per_token != 0) {
                at.row[i] = at.row[i - 1], at.scales[i] = at.scales[i - 1];
            } else if constexpr (step < steps) {
                at.row[i] = __shfl_sync(0xffffffffu, of.row, token_of(first, j, lane));
                at.scales[i] = of.scales;
                if constexpr (reader::behind && !Wide)
                    at.scales[i] = __shfl_sync(0xffffffffu, of.scales, token_of(first, j, lane));
            }
        });
        return at;
    }
    /// Brings a record to the second-level cache.
    __device__ __forceinline__ static void prefetch(const std::byte* block, int place) {
        const int in_page = place % Pair::page_tokens;
#pragma unroll
        for (int at = 0; at < reader::row_bytes + 112; at += 128)  // rows begin anywhere in a line
            prefetch_line(block + in_page * reader::row_bytes + smaller(at, reader::row_bytes - 16));
        if constexpr (reader::behind)
            prefetch_line(block + reader::scales_at + in_page * reader::scales_step);
    }
    __device__ __forceinline__ static int token_of(int first, int j, int lane) {
        return lane / 8 + 4 * (first / larger(1, per_token) + j);
    }
    template <int Step>
    __device__ __forceinline__ static int first_octet(int lane) {
        return (lane % 8 + 8 * (Step % per_token)) * octets;
    }
    template <int Step>
    __device__ __forceinline__ void fetch(const places& of, int lane) {
        constexpr int i = Step % held, k = Step % per_token;
        const auto* const row = reinterpret_cast<const uint4*>(of.row[i]) + (Wide ? reader::wide_at / 16 : 0);
        const uint4 v = fetch_16(row + lane % 8 + 8 * k);
        word[i][0] = v.x, word[i][1] = v.y, word[i][2] = v.z, word[i][3] = v.w;
        if constexpr (!Wide)
            scale[i] = fetch_word(reinterpret_cast<const std::uint32_t*>(row) +
                                  (of.scales[i] + first_octet<Step>(lane) * 8 / word_channels));
    }
    /// Lanes begin with different octets, so that eight of them store to all banks.
    __device__ __forceinline__ static int turn(int lane) {
        return octets == 2 ? lane >> 2 & 1 : octets == 4 ? lane >> 1 & 3 : 0;
    }
    /// w: of a step, gets those that turn(lane) brings to the beginning.
    __device__ __forceinline__ static void turn_words(std::uint32_t (&w)[4], int lane) {
        const auto exchange = [&](bool wanted, int a, int b) {
            const std::uint32_t x = w[a], y = w[b];
            w[a] = wanted ? y : x;
            w[b] = wanted ? x : y;
        };
        if constexpr (octets == 2) {
            exchange(lane >> 2 & 1, 0, 2);
            exchange(lane >> 2 & 1, 1, 3);
        } else if constexpr (octets == 4) {
            exchange(lane >> 1 & 1, 0, 1);
            exchange(lane >> 1 & 1, 2, 3);
            exchange(lane >> 2 & 1, 0, 2);
            exchange(lane >> 2 & 1, 1, 3);
        }
    }
    /// Number: of the octet, after turn_words(). octet: where it is.
    template <int Number>
    __device__ __forceinline__ static void halves(std::uint32_t (&x)[4], const std::uint32_t (&w)[4],
                                                  std::uint32_t of_scale, int octet) {
        if constexpr (Wide) {
#pragma unroll
            for (int k = 0; k < 4; ++k) x[k] = w[k];
            reader::wide_halves(x);
        } else {
            std::uint32_t own[own_words];
#pragma unroll
            for (int k = 0; k < own_words; ++k) own[k] = w[Number * own_words + k];
            reader::halves(x, own, reader::scale_of(of_scale, octet));
        }
    }
};

}}}  // namespace kvq::cuda::detail
