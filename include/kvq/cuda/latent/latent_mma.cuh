// Latent attention on tensor cores of every device from compute capability 8.0 on: products of warps.
//
//   tile      64 tokens as half floats (latent_tiles.cuh), which both products read. For 16 rows there are
//             two: 8 warps make one while 8 others read the other one. With more rows, or 99 KB of shared
//             memory, there is one, which 8 warps make and read
//   scores    a warp has 16 rows, half of the tokens, and a part of every 64 channels: with few rows several
//             warps add up a score
//   weights   a row belongs to neighbouring threads; weights stand where its scores stood
//   output    O += P V, a warp has 16 or 32 rows and some octets of every 64 channels
//
// Maxima as in latent_few_rows.cuh. 16 and 32 rows keep their query in registers, so that two tiles of 576
// channels fit into the shared memory of compute capability 8.0, and one into that of 8.6, 8.9 and 12.x.
// Contract: attend_latents() in latent.cuh. Shared memory for 576 channels: 161 KB, 89 KB where thread
// blocks have little.
#pragma once

#include "latent_memory.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Rows: 16, 32 or 64. Stages: tiles in shared memory.
template <int Rows, int Stages>
struct latent_mma_shape {
    static constexpr int rows = Rows, stages = Stages, warps = 8, threads = 32 * warps;
    /// Other warps make the tiles where one can be made while another is read.
    static constexpr int producers = stages > 1 ? threads : 0, all_threads = threads + producers;
    static constexpr int strips = Rows / 16;
    static constexpr int splits = 64 / Rows;  // of 64 channels of a score
    static constexpr bool query_held = Rows < 64;
    /// Of the output of a warp.
    static constexpr int warp_strips = strips < 2 ? 1 : 2, channel_warps = warps / (strips / warp_strips),
                         octets = 8 / channel_warps;
    /// Threads of a row while scores become weights; each has so many times four scores.
    static constexpr int row_threads = threads / Rows, fours = Rows / 16;
};

/// query | tiles | scores of every split, and weights | factors of rows | note of the tile
template <int Dim, class Shape>
struct latent_mma_memory {
    static constexpr int query = 0, query_bytes = Shape::query_held ? 0 : Shape::rows * Dim * 2;
    static constexpr int tiles = query_bytes, tile_bytes = latent_tile * Dim * 2;
    static constexpr int scores = tiles + Shape::stages * tile_bytes, row_bytes = latent_tile * 4,
                         split_bytes = Shape::rows * row_bytes;
    static constexpr int factors = scores + Shape::splits * split_bytes, notes = factors + Shape::rows * 4,
                         bytes = notes + Shape::stages * 16;
};

/// A block of query rows.
template <class Shape, class Args>
struct latent_mma_rows {
    using pair = typename Args::first_pair;
    static constexpr int dim = pair::head_dim, blocks = dim / 64, value_blocks = pair::value_dim / 64,
                         steps = 4 / Shape::splits;  // of a warp in 64 channels
    using memory = latent_mma_memory<dim, Shape>;
    const Args& args;
    std::uint32_t base;
    int thread, warp, lane;
    std::uint32_t q[Shape::query_held ? blocks * steps : 1][4];
    float o[Shape::warp_strips][value_blocks][Shape::octets][4];
    float top, sum;  // of the thread's row

    __device__ __forceinline__ latent_mma_rows(const Args& a, std::uint32_t at, int number)
        : args(a), base(at), thread(number), warp(number / 32), lane(number % 32) {}

    __device__ __forceinline__ std::uint32_t tile(int stage) const {
        return base + static_cast<std::uint32_t>(memory::tiles + stage * memory::tile_bytes);
    }
    __device__ __forceinline__ std::uint32_t note(int stage) const {
        return base + static_cast<std::uint32_t>(memory::notes + stage * 16);
    }
    __device__ __forceinline__ void begin(const latent_piece& piece) {
        const auto& a = args.a;
        const int first_row = piece.row_block * Shape::rows;
        if constexpr (Shape::query_held) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = first_row + warp % Shape::strips * 16 + lane / 4 + 8 * r,
                          held = kvq::detail::smaller(row, a.rows - 1);
                const auto* const from = a.q.at(a.row_token(piece.sequence, held), a.row_head(0, held)) +
                                         16 * steps * split() + lane % 4 * 2;
#pragma unroll
                for (int i = 0; i < blocks * steps; ++i)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const auto* const at = from + i / steps * 64 + i % steps * 16 + 8 * half;
                        const std::uint32_t two = pack_halves<float16>(to_float(at[0]), to_float(at[1]));
                        q[i][2 * half + r] = row < a.rows ? two : 0;
                    }
            }
        } else {
            load_latent_queries<Shape::rows, dim>(a, piece.sequence, first_row,
                                                  base + static_cast<std::uint32_t>(memory::query), thread,
                                                  Shape::threads);
        }
#pragma unroll
        for (auto& strip : o)
#pragma unroll
            for (auto& block : strip)
#pragma unroll
                for (auto& octet : block)
#pragma unroll
                    for (float& x : octet) x = 0.0f;
        top = -INFINITY;
        sum = 0.0f;
    }
    /// The warp's part of the scores, to shared memory.
    __device__ __forceinline__ void scores(std::uint32_t of_tile) const {
        const int strip = warp % Shape::strips, half = warp / 4, quarter = lane / 8;
        const std::uint32_t keys = of_tile + octet_offset<latent_tile>(half * 32 + lane % 8 + quarter / 2 * 8,
                                                                       2 * steps * split() + quarter % 2),
                            query = base + octet_offset<Shape::rows>(strip * 16 + lane % 8 + quarter % 2 * 8,
                                                                     2 * steps * split() + quarter / 2);
        float s[4][4] = {};
#pragma unroll
        for (int b = 0; b < blocks; ++b)
#pragma unroll
            for (int step = 0; step < steps; ++step) {
                const auto flip = static_cast<std::uint32_t>(step * 32);
                uint4 x;
                if constexpr (Shape::query_held)
                    x = {q[b * steps + step][0], q[b * steps + step][1], q[b * steps + step][2],
                         q[b * steps + step][3]};
                else
                    x = load_matrices((query ^ flip) + static_cast<std::uint32_t>(b * Shape::rows * 128));
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const uint4 k = load_matrices(
                        (keys ^ flip) + static_cast<std::uint32_t>(b * latent_tile * 128 + n * 16 * 128));
                    mma_values<float16>(s[2 * n], x.x, x.y, x.z, x.w, k.x, k.y);
                    mma_values<float16>(s[2 * n + 1], x.x, x.y, x.z, x.w, k.z, k.w);
                }
            }
        const int row = strip * 16 + lane / 4, token = half * 32 + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                store_words(score_at(split(), row + 8 * r, token + 8 * n), __float_as_uint(s[n][2 * r]),
                            __float_as_uint(s[n][2 * r + 1]));
    }
    /// Scores to weights; the output follows maxima that were raised. Behind a barrier; ends with one.
    __device__ __forceinline__ void weigh(const latent_piece& piece, int stage) {
        constexpr int fours = Shape::fours;
        const int row = thread / Shape::row_threads, own = thread % Shape::row_threads;
        const latent_note of_tile = latent_note::load(note(stage));
        float s[fours][4];
#pragma unroll
        for (int i = 0; i < fours; ++i) {
            const int token = 4 * (own + Shape::row_threads * i);
#pragma unroll
            for (int split = 0; split < Shape::splits; ++split) {
                const uint4 v = load_shared_16(score_at(split, row, token));
                const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    s[i][k] = split == 0 ? __uint_as_float(words[k]) : s[i][k] + __uint_as_float(words[k]);
            }
#pragma unroll
            for (float& x : s[i]) x *= args.a.scale;
            if (args.a.softcap != 0.0f)
#pragma unroll
                for (float& x : s[i]) x = capped(x, args.a.softcap);
        }
        if (!args.all_see(of_tile, piece.sequence, piece.length)) {
            const std::uint64_t seen =
                of_tile.shown() & args.seen_by(piece.sequence, piece.length,
                                               piece.row_block * Shape::rows + row, of_tile.position);
#pragma unroll
            for (int i = 0; i < fours; ++i)
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    if ((seen >> (4 * (own + Shape::row_threads * i) + k) & 1u) == 0) s[i][k] = -INFINITY;
        }
        float high = -INFINITY;
#pragma unroll
        for (const auto& four : s)
            high = fmaxf(high, fmaxf(fmaxf(four[0], four[1]), fmaxf(four[2], four[3])));
#pragma unroll
        for (int step = Shape::row_threads / 2; step > 0; step /= 2)
            high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, step));
        const bool above = high > top + latent_slack;
        float factor = 1.0f;
        if (above) {
            factor = top == -INFINITY ? 0.0f : exp2_fast(top - high);
            top = high;
            sum *= factor;
        }
        if (own == 0) store_word(factor_at(row), __float_as_uint(factor));
        const float less = top == -INFINITY ? 0.0f : top;
        __syncwarp();  // the row's scores have been read
#pragma unroll
        for (int i = 0; i < fours; ++i) {
#pragma unroll
            for (float& x : s[i]) {
                x = exp2_fast(x - less);
                sum += x;
            }
            const int four = own + Shape::row_threads * i;
            store_words(weight_at(row, four / 2) + static_cast<std::uint32_t>(four % 2 * 8),
                        pack_halves<float16>(s[i][0], s[i][1]), pack_halves<float16>(s[i][2], s[i][3]));
        }
        if (any_at_barrier(1, Shape::threads, above))
#pragma unroll
            for (int m = 0; m < Shape::warp_strips; ++m)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float of_row =
                        __uint_as_float(load_shared_4(factor_at(output_row() + 16 * m + lane / 4 + 8 * r)));
#pragma unroll
                    for (auto& block : o[m])
#pragma unroll
                        for (auto& octet : block) {
                            octet[2 * r] *= of_row;
                            octet[2 * r + 1] *= of_row;
                        }
                }
    }
    __device__ __forceinline__ void add(std::uint32_t of_tile) {
        const int quarter = lane / 8;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint4 p[Shape::warp_strips][2];
#pragma unroll
            for (int m = 0; m < Shape::warp_strips; ++m)
#pragma unroll
                for (int step = 0; step < 2; ++step)
                    p[m][step] = load_matrices(weight_at(output_row() + 16 * m + lane % 8 + quarter % 2 * 8,
                                                         4 * half + 2 * step + quarter / 2));
#pragma unroll
            for (int b = 0; b < value_blocks; ++b)
#pragma unroll
                for (int i = 0; i < Shape::octets; ++i) {
                    const uint4 v = load_matrices<true>(
                        of_tile + octet_offset<latent_tile>(half * 32 + lane, first_octet() + i) +
                        static_cast<std::uint32_t>(b * latent_tile * 128));
#pragma unroll
                    for (int m = 0; m < Shape::warp_strips; ++m) {
                        const uint4 &x = p[m][0], &y = p[m][1];
                        mma_values<float16>(o[m][b][i], x.x, x.y, x.z, x.w, v.x, v.y);
                        mma_values<float16>(o[m][b][i], y.x, y.y, y.z, y.w, v.z, v.w);
                    }
                }
        }
    }
    __device__ __forceinline__ void finish(const latent_piece& piece) {
        const int left = args.a.rows - piece.row_block * Shape::rows;  // rows that exist
#pragma unroll
        for (int step = Shape::row_threads / 2; step > 0; step /= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, step);
        // A row of NaN has no maximum, but is not empty.
        if (const int row = thread / Shape::row_threads; thread % Shape::row_threads == 0 && row < left)
            *reinterpret_cast<float2*>(args.state(piece.number, row)) = {
                top == -INFINITY && sum != 0.0f ? 0.0f : top, sum};
#pragma unroll
        for (int m = 0; m < Shape::warp_strips; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = output_row() + 16 * m + lane / 4 + 8 * r;
                if (row >= left) continue;
                float* const to = args.state(piece.number, row) + state_header + lane % 4 * 2;
#pragma unroll
                for (int b = 0; b < value_blocks; ++b)
#pragma unroll
                    for (int i = 0; i < Shape::octets; ++i)
                        *reinterpret_cast<float2*>(to + 64 * b + 8 * (first_octet() + i)) = {
                            o[m][b][i][2 * r], o[m][b][i][2 * r + 1]};
            }
    }

private:
    __device__ __forceinline__ int split() const { return warp % 4 / Shape::strips; }
    __device__ __forceinline__ int output_row() const {
        return warp / Shape::channel_warps * (16 * Shape::warp_strips);
    }
    __device__ __forceinline__ int first_octet() const { return warp % Shape::channel_warps * Shape::octets; }
    __device__ __forceinline__ std::uint32_t row_at(int split, int row) const {
        return base + static_cast<std::uint32_t>(memory::scores + split * memory::split_bytes +
                                                 row * memory::row_bytes);
    }
    /// Of a token and the next one. Rows are turned so that those of a store meet all banks.
    __device__ __forceinline__ std::uint32_t score_at(int split, int row, int token) const {
        return row_at(split, row) +
               static_cast<std::uint32_t>((token * 4) ^ ((row & 1) << 6 | (row & 2) << 4));
    }
    /// Of 8 tokens.
    __device__ __forceinline__ std::uint32_t weight_at(int row, int octet) const {
        return row_at(0, row) + static_cast<std::uint32_t>((octet ^ (row & 7)) << 4);
    }
    __device__ __forceinline__ std::uint32_t factor_at(int row) const {
        return base + static_cast<std::uint32_t>(memory::factors + row * 4);
    }
};

/// The tiles of a piece, one after the other: those of parts.
template <class Shape, class Args>
struct latent_part_tiles {
    static constexpr bool to_registers = false;  // what fetch() asks for
    static constexpr int parts = decltype(Args::parts)::count;
    struct place {
        int part = -1;  // none
        int first, end;
        int page;  // of lane i, of tokens 16 i to 16 i + 15
    };
    const Args& args;
    const latent_piece& piece;
    int warp;
    latent_lane own;
    place now, ahead;

    __device__ __forceinline__ latent_part_tiles(const Args& a, const latent_piece& p, int of_warp, int lane)
        : args(a), piece(p), warp(of_warp), own(lane) {
        look_up(p.from);
    }
    /// Asks for what the pages have of a tile; the next one is looked up.
    __device__ __forceinline__ void fetch(int number, std::uint32_t tile) {
        now = ahead;
        of_part(now, [&]<class Part>(const Part& part) {
            using pair = typename Part::pair_type;
            const latent_runs<pair> runs(part.cache, now.first, now.page);
#pragma unroll 1
            for (int unit = warp; unit < tile_units<pair>::count; unit += Shape::warps)
                tile_units<pair>::fetch(runs, unit, tile, own);
        });
        copy_commit();
        look_up(number + 1);
        prefetch();
    }
    /// Makes the tile that was asked for, and notes what it shows.
    __device__ __forceinline__ void store(std::uint32_t tile, std::uint32_t note) {
        copy_wait<0>();
        __syncwarp();
        of_part(now, [&]<class Part>(const Part& part) {
            using pair = typename Part::pair_type;
            const std::uint64_t shown = shown_of_tile(part, piece.sequence, cut_of(part.cuts, piece.sequence),
                                                      now.first, now.end - now.first, now.page, own.lane);
            const latent_runs<pair> runs(part.cache, now.first, now.page);
#pragma unroll 1
            for (int unit = warp; unit < tile_units<pair>::count; unit += Shape::warps)
                tile_units<pair>::store(runs, unit, tile, shown, own);
            if (warp == 0 && own.lane == 0)
                latent_note{part.cache.first_token + now.first, static_cast<std::uint32_t>(shown),
                            static_cast<std::uint32_t>(shown >> 32)}
                    .store(note);
        });
    }

private:
    template <class F>
    __device__ __forceinline__ void of_part(const place& p, const F& f) const {
        static_for<parts>([&](auto number) {
            constexpr int i = decltype(number)::value;
            if (p.part == i) f(get<i>(args.parts));
        });
    }
    __device__ __forceinline__ void look_up(int number) {
        ahead.part = -1;
        if (number >= piece.to) return;
        static_for<parts>([&](auto index) {
            constexpr int i = decltype(index)::value;
            const auto& part = get<i>(args.parts);
            const token_range range = args.held(part, piece.sequence, piece.length);
            const int count = range.tiles(latent_tile);
            if (number >= 0 && number < count) {
                ahead.part = i;
                ahead.first = range.first + number * latent_tile;
                ahead.end = range.end;
                ahead.page =
                    page_of_lane(part, piece.sequence, ahead.first, ahead.end, latent_tile, own.lane);
            }
            number -= count;
        });
    }
    /// Asks for the pages that begin in the tile ahead, which no copy can do yet.
    __device__ __forceinline__ void prefetch() const {
        of_part(ahead, [&]<class Part>(const Part& part) {
            using pair = typename Part::pair_type;
            constexpr int bytes = static_cast<int>(pair::key_block_bytes), line = 128;
#pragma unroll 1
            for (int i = 0; i < latent_tile / slice_tokens; ++i) {
                const int page = __shfl_sync(0xffffffffu, ahead.page, i);
                if (page < 0 || (ahead.first + i * slice_tokens) % pair::page_tokens != 0) continue;
                const std::byte* const block = part.cache.key_block(page, 0);
#pragma unroll 1
                for (int at = (warp * 32 + own.lane) * line; at < bytes; at += Shape::threads * line)
                    prefetch_line(block + at);
            }
        });
    }
};

/// Tiles: those of a piece. Of code for sm_90a the kernel is empty: its devices take other ones.
template <class Shape, class Args, template <class, class> class Tiles>
__global__ void __launch_bounds__((KVQ_WARPGROUP_PRODUCTS ? 32 : Shape::all_threads), 1)
    latent_mma_kernel([[maybe_unused]] const __grid_constant__ Args args) {
#if !KVQ_WARPGROUP_PRODUCTS
    extern __shared__ __align__(128) std::byte shared[];
    constexpr int stages = Shape::stages;
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    launch_dependents();
    wait_for_predecessor();
    latent_walk<Args> walk(args, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
    latent_piece piece;
    latent_mma_rows<Shape, Args> rows(args, shared_address(shared), thread);
    const auto wait = [] { wait_at_barrier(1, Shape::threads); };
    if constexpr (stages > 1) {
        // Barriers: a tile of a stage is there; it has been read.
        const auto there = [](int stage) { return 2 + stage; };
        const auto read = [](int stage) { return 2 + stages + stage; };
        int number = 0;  // tiles
        if (warp >= Shape::warps) {
            while (walk.next(piece)) {
                Tiles<Shape, Args> tiles(args, piece, warp - Shape::warps, lane);
#pragma unroll 1
                for (int tile = piece.from; tile < piece.to; ++tile, ++number) {
                    const int stage = number % stages;
                    if (Tiles<Shape, Args>::to_registers) tiles.fetch(tile, rows.tile(stage));
                    if (number >= stages) wait_at_barrier(read(stage), Shape::all_threads);
                    if (!Tiles<Shape, Args>::to_registers) tiles.fetch(tile, rows.tile(stage));
                    tiles.store(rows.tile(stage), rows.note(stage));
                    arrive_at_barrier(there(stage), Shape::all_threads);
                }
            }
        } else {
            while (walk.next(piece)) {
                if (thread == 0) note_bounds(args, piece);
                rows.begin(piece);
#pragma unroll 1
                for (int tile = piece.from; tile < piece.to; ++tile, ++number) {
                    const int stage = number % stages;
                    wait_at_barrier(there(stage), Shape::all_threads);
                    rows.scores(rows.tile(stage));
                    wait();
                    rows.weigh(piece, stage);
                    rows.add(rows.tile(stage));
                    arrive_at_barrier(read(stage), Shape::all_threads);
                }
                rows.finish(piece);
            }
        }
    } else {
        while (walk.next(piece)) {
            if (thread == 0) note_bounds(args, piece);
            rows.begin(piece);
            Tiles<Shape, Args> tiles(args, piece, warp, lane);
#pragma unroll 1
            for (int tile = piece.from; tile < piece.to; ++tile) {
                tiles.fetch(tile, rows.tile(0));
                tiles.store(rows.tile(0), rows.note(0));
                wait();
                rows.scores(rows.tile(0));
                wait();
                rows.weigh(piece, 0);
                rows.add(rows.tile(0));
                wait();
            }
            rows.finish(piece);
        }
    }
#endif
}

}}}  // namespace kvq::cuda::detail
