// Shared memory of the attention kernel of several formats: what a thread block of it holds, and what
// parts of its work count.
//
//   block = warps * (ring of the largest part, notes) + states of the merge + queries of parts that do not
//     share one
//
// Contract: sizes are constants of (formats, query rows / 4, devices of less shared memory or not).
#pragma once

#include "attention_memory.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda { namespace detail {

/// Shared memory of a thread block that handles all formats. A warp has one part at a time: what each of them
/// wants of it lies in the same place.
template <int Rows4, bool Small, class... Pairs>
struct mixed_memory {
    static constexpr int bands = bands_of<Pairs...>;
    template <class Pair>
    using of = attention_memory<Pair, Rows4, Small, bands>;
    template <class... Numbers>
    static constexpr int most(Numbers... numbers) {
        int result = 0;
        ((result = larger(result, static_cast<int>(numbers))), ...);
        return result;
    }
    using first_pair = std::tuple_element_t<0, std::tuple<Pairs...>>;
    using first = of<first_pair>;
    using values = typename first::values;
    static constexpr int rows = 4 * Rows4;
    static constexpr int part_bytes = most(of<Pairs>::part_bytes...);
    static constexpr int notes_bytes = first::notes_bytes;
    static constexpr int output_stride = first::output_stride, output_part = first::output_part,
                         note_words = first::note_words, partial_words = first::partial_words,
                         end_warp_tiles = first::end_warp_tiles * 8;
    static constexpr int ring_bytes = part_bytes, warp_bytes = part_bytes + notes_bytes;
    static constexpr int unit_bytes = 1024;
    /// What the warp tiles of a step count: about their bytes. From 8 query rows on, those of plans and those
    /// of 128 tokens with 8-bit parameters take longer than that beside one of 16-bit tokens, and a team ends
    /// with its slowest warp (docs/lab/gpu_experiments.md).
    template <class Pair>
    static constexpr int units = [] {
        using keys = typename of<Pair>::keys;
        constexpr auto bytes =
            (unit_bytes_of<tensor::key, Pair> +
             unit_bytes_of<tensor::value, Pair>)*static_cast<std::size_t>(of<Pair>::step_tokens) /
            Pair::page_tokens;
        constexpr int least = Rows4 == 1 || keys::full                       ? 1
                              : keys::tokens >= 128 && keys::has_byte_params ? 24
                              : keys::mixed                                  ? 14
                                                                             : 1;
        return kvq::detail::larger(least, static_cast<int>((bytes + unit_bytes / 2) / unit_bytes));
    }();
    /// What the start of a part counts: its first warp tile is waited for, and its instructions are fetched.
    /// A warp tile of sinks takes longer than others of its bytes.
    template <class Pair>
    static KVQ_HD constexpr int start_of(int sinks) {
        return 8 + (sinks > 0 ? units<Pair> / 2 : 0);
    }

    /// In which order a part reads the query. Products with the scale, channel after channel; 16-bit keys,
    /// which read it once per item, take those in any order (`warp_memory::order`). Keys of mixed widths have
    /// the order of their plan, keys that are dequantized the query without the scale, and keys behind a
    /// transform theirs.
    template <class Pair>
    static constexpr bool plain_query =
        !of<Pair>::keys::mixed && !of<Pair>::dequantizes && !has_transform<typename Pair::keys>;
    template <class Pair>
    static constexpr bool any_order = of<Pair>::keys::full;
    /// The part whose query lies in the place of the output, and where every part's lies: 0 there, others in
    /// memory for themselves.
    static constexpr int main_part = [] {
        constexpr bool full[] = {any_order<Pairs>...}, plain[] = {plain_query<Pairs>...},
                       mixed[] = {(of<Pairs>::keys::mixed && !has_transform<typename Pairs::keys>)...};
        int first_mixed = -1, first_full = -1;
        for (int i = static_cast<int>(sizeof...(Pairs)) - 1; i >= 0; --i) {
            if (plain[i] && !full[i]) return i;
            if (mixed[i]) first_mixed = i;
            if (full[i]) first_full = i;
        }
        return first_mixed >= 0 ? first_mixed : larger(first_full, 0);
    }();
    struct query_places {
        int of[sizeof...(Pairs)], count;
    };
    static constexpr query_places places = [] {
        constexpr bool full[] = {any_order<Pairs>...}, plain[] = {plain_query<Pairs>...};
        query_places p{{}, 1};
        for (int i = 0; i < static_cast<int>(sizeof...(Pairs)); ++i)
            if (i != main_part && !full[i] && !(plain[i] && plain[main_part])) p.of[i] = p.count++;
        return p;
    }();
    static constexpr int query_bytes = rows * first_pair::head_dim * 4;
    /// Of the main part's query, for parts that take any.
    template <class Parts>
    static __device__ __forceinline__ const std::uint16_t* order(const Parts& parts, int sequence,
                                                                 int kv_head) {
        if constexpr (of<std::tuple_element_t<main_part, std::tuple<Pairs...>>>::keys::mixed)
            return get<main_part>(parts).a.cache.key_plan(sequence, kv_head);
        else
            return nullptr;
    }

    struct size {
        int warps, parts;
        constexpr int output_bytes() const { return kvq::detail::round_up(parts * output_part * 4, 128); }
        constexpr int team_bytes() const {
            return output_bytes() +
                   kvq::detail::round_up((parts * (note_words + 2 * rows) + warps * (1 + 2 * rows)) * 4, 128);
        }
        constexpr int bytes() const {
            return warps * warp_bytes + team_bytes() + parts * (places.count - 1) * query_bytes;
        }
    };
    static constexpr int budget = [] {
        int least = most_shared_memory<Small>;
        ((least = kvq::detail::smaller(least, budget_on<Pairs, Small>)), ...);
        return least;
    }();
    static constexpr size chosen = [] {
        for (const int warps : {8, 4})
            for (const int parts : {4, 2, 1})
                if (takes_teams<Rows4, bands>(warps, parts) && size{warps, parts}.bytes() <= budget)
                    return size{warps, parts};
        return size{4, bands > 2 ? 1 : 2};
    }();
    static constexpr int warps = chosen.warps, most_teams = chosen.parts,
                         output_bytes = chosen.output_bytes(), bytes = chosen.bytes();
    static constexpr int threads = warps * warp_size, team_threads = threads / most_teams;
    // Beside a thread block of 224 registers a thread there is room for one of store_new_kernel, which has
    // 32: with at most 4 query rows per kv head, the next layer's tokens are stored while this kernel ends.
    static constexpr int registers = Rows4 == 1 ? 224 : 255;
    static constexpr int other_queries_at = warps * warp_bytes + chosen.team_bytes();

    /// The query of a team in the order that part I reads.
    template <int I>
    static __device__ __forceinline__ float* query(std::byte* shared, const warp_team& team) {
        if constexpr (places.of[I] == 0)
            return team_memory::of<mixed_memory>(shared, team).output;
        else
            return reinterpret_cast<float*>(shared + other_queries_at +
                                            (team.index * (places.count - 1) + places.of[I] - 1) *
                                                query_bytes);
    }
};

}  // namespace detail
}}}  // namespace kvq::cuda
