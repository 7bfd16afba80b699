// Latent attention of 128 query rows by two thread blocks that see each other's shared memory: each has half
// of the channels, so that every page is read and converted once.
//
//   S = Q K^T    warpgroup w: [rows 64 w to 64 w + 63][64 tokens], sums over the block's channels; the other
//                block's are sent, and both add the same two numbers
//   O += P V     warpgroup w: the same rows, the block's half of the V channels; P from registers
//
//   channels     of V: 256 rank to 256 rank + 255; of those behind them (512 to 575): 32 of 64
//
// A warpgroup waits for nothing but tiles and the scores of its own rows. Lane (g, t) of warp u: rows
// 16 u + g and + 8, columns 8 i + 2 t and the next one. Maxima as in latent_few_rows.cuh.
// Contract: attend_latents() in latent.cuh, V = 512, no tree of drafts.
#pragma once

#include "latent_wgmma.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

#if KVQ_WARPGROUP_PRODUCTS

/// The channels that a block of the cluster has of a warpgroup's 64 query rows, as load_latent_queries. More:
/// channels behind 512, of both warpgroups side by side.
template <bool More, class Args>
__device__ __forceinline__ void load_cluster_queries(const Args& a, int sequence, int first, std::uint32_t to,
                                                     std::uint32_t more, int rank, int group, int thread) {
    const auto load = [&]<bool Aligned>(std::bool_constant<Aligned>) {
        constexpr int octets = 32 + (More ? 4 : 0);
#pragma unroll(Aligned ? 6 : 1)
        for (int i = thread; i < 64 * octets; i += 128) {
            const int own = i / octets, octet = i % octets, row = first + own,
                      held = kvq::detail::smaller(row, a.rows - 1),
                      from = octet < 32 ? rank * 32 + octet : 32 + rank * 4 + octet;
            std::uint32_t x[4];
            load_halves<Aligned>(a.q.at(a.row_token(sequence, held), a.row_head(0, held)) + from * 8, x);
            if (row >= a.rows) x[0] = x[1] = x[2] = x[3] = 0;
            store_shared_16(
                octet < 32 ? to + octet_offset<64>(own, octet)
                           : more + octet_offset<64>(own, group * 4 + octet - 32),
                {__uint_as_float(x[0]), __uint_as_float(x[1]), __uint_as_float(x[2]), __uint_as_float(x[3])});
        }
    };
    if (rows_aligned(a.q))
        load(std::true_type{});
    else
        load(std::false_type{});
}

/// All pieces of a share. warp: of the consumers.
template <class Shape, class Args>
requires(Shape::cluster == 2) __device__ __forceinline__
    void consume_latents(const Args& args, std::uint32_t place, int warp, int lane, latent_walk<Args> walk) {
    using pair = typename Args::first_pair;
    constexpr int dim = pair::head_dim, rows = 64, stages = Shape::stages, threads = 128;
    constexpr bool more = dim > 512;  // channels behind those of V
    using memory = latent_memory<dim, Shape>;
    const auto& a = args.a;
    const auto at = [&](int offset) { return place + static_cast<std::uint32_t>(offset); };
    const int g = lane / 4, t = lane % 4, group = warp / 4, rank = cluster_rank();
    const std::uint32_t query = at(memory::query + group * 4 * memory::block_bytes),
                        more_query = at(memory::query + 8 * memory::block_bytes);
    const std::uint32_t scores =
                            at(memory::scores + group * memory::score_bytes + (warp % 4 * 32 + lane) * 16),
                        arrived = at(memory::score_barriers + group * 16), taken = arrived + 8;
    std::uint32_t q = operand_at(query);
    const std::uint32_t more_q = operand_at(more_query) + static_cast<std::uint32_t>(group * 4);
    int read = 0;  // tiles
    if (Shape::turns && group == 1) arrive_at_barrier(3, 2 * threads);

    latent_piece piece;
    while (walk.next(piece)) {
        if (rank == 0 && warp == 0 && lane == 0) note_bounds(args, piece);
        const int first_row = piece.row_block * Shape::rows + group * rows;
        wait_at_barrier(1 + group, threads);  // products have read the queries before
        load_cluster_queries<more>(a, piece.sequence, first_row, query, more_query, rank, group,
                                   warp % 4 * 32 + lane);
        publish_to_products();
        wait_at_barrier(1 + group, threads);

        float o[2][64], top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
        std::uint32_t weight[16];
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int i = 0; i < 64; ++i) o[j][i] = 0.0f;

        const auto ask_scores = [&](int number, float(&s)[32]) {
            const auto stage = latent_stage<memory>::of(place, number % stages);
            barrier_wait(stage.full, static_cast<std::uint32_t>(number / stages) & 1u);
            const std::uint32_t k = operand_at(stage.tile);
            asm volatile("" : "+r"(q));  // otherwise the descriptors of all steps take registers
            products_begin();
            static_for<16>([&](auto step) {
                constexpr int i = decltype(step)::value;
                multiply_shared<(i > 0)>(s, operand(q, i / 4 * memory::block_bytes + i % 4 * 32),
                                         operand(k, i / 4 * memory::block_bytes + i % 4 * 32));
            });
            if constexpr (more) {
                const std::uint32_t more_k = k + static_cast<std::uint32_t>(rank * 4);
                multiply_shared<true>(s, operand(more_q, 0), operand(more_k, 4 * memory::block_bytes));
                multiply_shared<true>(s, operand(more_q, 32), operand(more_k, 4 * memory::block_bytes + 32));
            }
            products_commit();
        };
        const auto ask_output = [&](int number) {
            const std::uint32_t v = transposed_operand_at(
                latent_stage<memory>::of(place, number % stages).tile, memory::block_bytes);
            products_begin();
            static_for<latent_tile / 16>([&](auto step) {
                constexpr int i = decltype(step)::value;
                multiply_registers<true>(reinterpret_cast<float(&)[128]>(o), weight[4 * i], weight[4 * i + 1],
                                         weight[4 * i + 2], weight[4 * i + 3], operand(v, i * 16 * 128));
            });
            products_commit();
        };
        const auto done_with = [&](int number) {
            __syncwarp();
            if (lane == 0) barrier_arrive(latent_stage<memory>::of(place, number % stages).free);
        };
        // Sums over this block's channels to the other block.
        const auto send = [&](int number, float(&s)[32]) {
            products_there(s);
            barrier_wait(taken, static_cast<std::uint32_t>(number + 1) & 1u);
            if (warp % 4 == 0 && lane == 0) barrier_expect(arrived, memory::score_bytes);
            const std::uint32_t to = place_in(rank ^ 1, scores), there = place_in(rank ^ 1, arrived);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                send_four(to + static_cast<std::uint32_t>(i * threads * 16), there, s[4 * i], s[4 * i + 1],
                          s[4 * i + 2], s[4 * i + 3]);
        };
        const auto receive = [&](int number, float(&s)[32]) {
            barrier_wait(arrived, static_cast<std::uint32_t>(number) & 1u);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const uint4 other = load_shared_16(scores + static_cast<std::uint32_t>(i * threads * 16));
                s[4 * i] += __uint_as_float(other.x);
                s[4 * i + 1] += __uint_as_float(other.y);
                s[4 * i + 2] += __uint_as_float(other.z);
                s[4 * i + 3] += __uint_as_float(other.w);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive_cluster(place_in(rank ^ 1, taken));
        };
        const float scale = fabsf(a.scale);
        const auto weigh = [&](int number, float(&s)[32]) {
            const auto note = latent_note::load(latent_stage<memory>::of(place, number % stages).note);
            if (a.scale < 0.0f)
#pragma unroll
                for (int i = 0; i < 32; ++i) s[i] = -s[i];
            if (!note.is_whole(args.common_end(piece.length))) {
                const int own_lane = read_lane();
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int end =
                        args.row_end(piece.length, first_row + warp % 4 * 16 + own_lane / 4 + 8 * r) -
                        note.position;
#pragma unroll
                    for (int i = 0; i < 8; ++i)
#pragma unroll
                        for (int k = 0; k < 2; ++k)
                            if (const int token = 8 * i + own_lane % 4 * 2 + k;
                                ((i < 4 ? note.low : note.high) >> token % 32 & 1u) == 0 || token >= end)
                                s[4 * i + 2 * r + k] = -INFINITY;
                }
            }
            float high[2] = {-INFINITY, -INFINITY};
#pragma unroll
            for (int i = 0; i < 32; ++i) high[i / 2 % 2] = fmaxf(high[i / 2 % 2], s[i]);
            high[0] *= scale;
            high[1] *= scale;
            if (__any_sync(0xffffffffu, high[0] > top[0] + latent_slack || high[1] > top[1] + latent_slack)) {
                products_there(reinterpret_cast<float(&)[128]>(o));
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    high[r] = fmaxf(high[r], __shfl_xor_sync(0xffffffffu, high[r], 1));
                    high[r] = fmaxf(high[r], __shfl_xor_sync(0xffffffffu, high[r], 2));
                    high[r] = fmaxf(high[r], top[r]);
                    const float factor = top[r] == -INFINITY ? 0.0f : exp2_fast(top[r] - high[r]);
                    top[r] = high[r];
                    sum[r] *= factor;
#pragma unroll
                    for (int j = 0; j < 2; ++j)
#pragma unroll
                        for (int i = 0; i < 64; i += 4) {
                            o[j][i + 2 * r] *= factor;
                            o[j][i + 2 * r + 1] *= factor;
                        }
                }
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float base = top[r] == -INFINITY ? 0.0f : -top[r];
                float added = 0.0f;
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const float x = exp2_fast(fmaf(s[4 * i + 2 * r], scale, base)),
                                y = exp2_fast(fmaf(s[4 * i + 2 * r + 1], scale, base));
                    added += x + y;
                    weight[2 * i + r] = pack_halves<float16>(x, y);
                }
                sum[r] += added;
            }
        };

        const int last = read + piece.to - piece.from - 1;
        if (read <= last) {
            float s[32];
            ask_scores(read, s);
            products_wait<0>();
            send(read, s);
            receive(read, s);
            weigh(read, s);
#pragma unroll 1
            for (; read < last; ++read) {
                float next[32];
                if constexpr (Shape::turns) wait_at_barrier(3 + group, 2 * threads);
                ask_scores(read + 1, next);
                ask_output(read);
                if constexpr (Shape::turns) arrive_at_barrier(4 - group, 2 * threads);
                products_wait<1>();
                send(read + 1, next);
                products_wait<0>();
                done_with(read);
                receive(read + 1, next);
                weigh(read + 1, next);
            }
            ask_output(last);
            products_wait<0>();
            products_there(reinterpret_cast<float(&)[128]>(o));
            done_with(last);
            read = last + 1;
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
            sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
            const int own_row = warp % 4 * 16 + g + 8 * r;
            if (first_row + own_row >= a.rows) continue;
            float* const state = args.state(piece.number, group * rows + own_row);
            // A row of NaN has no maximum, but is not empty.
            if (rank == 0 && t == 0)
                *reinterpret_cast<float2*>(state) = {top[r] == -INFINITY && sum[r] != 0.0f ? 0.0f : top[r],
                                                     sum[r]};
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int i = 0; i < 16; ++i)
                    *reinterpret_cast<float2*>(state + state_header + rank * 256 + j * 128 + 8 * i +
                                               2 * t) = {o[j][4 * i + 2 * r], o[j][4 * i + 2 * r + 1]};
        }
    }
}

#endif

template <class Shape, class Args>
__global__ void __launch_bounds__((warpgroup_threads<Shape::threads>), 1)
    latent_cluster_kernel([[maybe_unused]] const __grid_constant__ Args args) {
#if KVQ_WARPGROUP_PRODUCTS
    using memory = latent_memory<Args::first_pair::head_dim, Shape>;
    extern __shared__ __align__(1024) std::byte swizzled_memory[];
    const std::uint32_t place = shared_address(swizzled_memory);
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    // By a shuffle, what depends on the warp is known to be the same for all lanes.
    const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);
    launch_dependents();
    if (thread == 0) {
        for (int i = 0; i < Shape::stages; ++i) {
            const auto stage = latent_stage<memory>::of(place, i);
            barrier_init(stage.full, Shape::stage_warps);
            barrier_init(stage.free, Shape::consumer_warps);
        }
        for (int i = 0; i < 2; ++i) {
            const std::uint32_t at = place + static_cast<std::uint32_t>(memory::score_barriers + i * 16);
            barrier_init(at, 1);
            barrier_init(at + 8, 4);
        }
    }
    __syncthreads();
    cluster_wait();
    const auto share = [&] {
        return latent_walk<Args>(args, static_cast<int>(blockIdx.x) / 2, static_cast<int>(gridDim.x) / 2);
    };
    if (warp < Shape::producer_warps) {
        leave_registers<Shape>();
        latent_producer<Shape, Args> producer{args, place, warp, lane};
        producer.rank = cluster_rank();
        latent_walk<Args> walk = share();
        latent_piece piece;
        while (walk.next(piece)) producer.piece(piece);
    } else {
        take_registers<Shape>();
        consume_latents<Shape>(args, place, warp - Shape::producer_warps, lane, share());
    }
    cluster_wait();  // the other block may still send scores
#endif
}

}}}  // namespace kvq::cuda::detail
