// Both readers of pages that make a prompt's tiles (by cells and by octets) give the same numbers.
#pragma once

#include <kvq/cuda/prefill/prefill_cells.cuh>

#include "support.cuh"

namespace test {

constexpr int tile_tokens = 64;

/// A tile of the first sequence from token `first` on, as half floats where octet_offset() says: by cells,
/// then by octets.
template <kvq::tensor Role, class Pair>
__global__ void __launch_bounds__(32)
    tiles_kernel(const __grid_constant__ kvq::cuda::cache_ref<Pair> cache, int head, int first, uint4* out) {
    using namespace kvq::cuda::detail;
    constexpr bool key = Role == kvq::tensor::key;
    constexpr int dim = Pair::head_dim, tile = tile_tokens, strips = dim / 32, bytes = tile * dim * 2;
    __shared__ __align__(128) std::byte tile_memory[bytes + octet_table_bytes];
    const std::uint32_t to = shared_address(tile_memory), table = to + static_cast<std::uint32_t>(bytes);
    const int lane = static_cast<int>(threadIdx.x), length = cache.tokens[0];
    const int own = first + lane * slice_tokens;
    const int page = lane < tile / slice_tokens && own < length
                         ? cache.block_table[cache.table_entry(0, own / Pair::page_tokens)]
                         : -1;
    const auto tokens =
        kvq::cuda::detail::tile_tokens::of(first, kvq::detail::smaller(tile, length - first), page);
    const blocks_in_memory<Role, Pair> all{&cache, head};
    const auto move_out = [&](int number) {  // and leave NaN
        __syncwarp();
        for (int i = lane; i < bytes / 16; i += 32) {
            const std::uint32_t at = to + static_cast<std::uint32_t>(i * 16);
            out[number * (bytes / 16) + i] = load_shared_16(at);
            store_shared_16(at, {-NAN, -NAN, -NAN, -NAN});
        }
        __syncwarp();
    };
    using cells = cells_of<Role, Pair, key ? tile : dim, key ? dim : tile, strips, key ? tile : dim, false>;
    for (int i = 0; i < strips; ++i) {
        const typename cells::lane_channel channel(cache, 0, head, i, lane);
        cells own_cells(channel);
        own_cells.fetch(all, tokens, i, lane);
        own_cells.store(all, to, tokens, table, i, lane);
    }
    move_out(0);
    using octets = octets_of<Role, Pair, key ? tile : dim>;
    // A warp's strips are every second one: from strip 0 or 1 on.
    for (const int start : {0, 1}) {
        const typename octets::lane_tile of_lane(cache, head, first, tokens.count, page, start, lane);
        static_for<strips / 2>([&](auto number) {
            constexpr int ahead = 2 * decltype(number)::value;
            std::uint32_t places[4];
            octets::places(places, to, start, lane);
            if (of_lane.any())
                static_for<octets::batches>([&](auto batch) {
                    octets own_octets;
                    own_octets.template fetch<ahead, decltype(batch)::value, 0>(of_lane, table, lane);
                    if constexpr (octets::direct) copy_commit();
                    own_octets.template wait<0>();
                    own_octets.template store<ahead, decltype(batch)::value, 0>(places, table, lane);
                });
            octets::places(places, to, start + ahead, lane);
            if (!key) octets::hide(places, of_lane.existing, lane);
        });
    }
    move_out(1);
}

template <kvq::tensor Role, class Pair>
void check_tile(const quantized_batch<Pair>& batch, const device_batch<Pair>& device, int head, int first,
                const char* name) {
    constexpr bool key = Role == kvq::tensor::key;
    constexpr std::size_t dim = Pair::head_dim, halves = tile_tokens * dim;
    device_buffer<std::uint16_t> out(2 * halves);
    out.poison();
    CHECK(kvq::cuda::detail::launch("tiles_kernel", kvq::cuda::detail::overlap::no, tiles_kernel<Role, Pair>,
                                    dim3(1), 32, 0, nullptr, device.ref, head, first,
                                    reinterpret_cast<uint4*>(out.get())),
          "%s: launch", name);
    const std::vector<std::uint16_t> got = out.download();
    std::size_t wrong = 0, nonzero = 0;
    for (int t = 0; t < tile_tokens; ++t) {
        const int token = first + t;
        const bool exists =
            token < batch.lengths[0] && batch.table[static_cast<std::size_t>(token / Pair::page_tokens)] >= 0;
        if (key && !exists) continue;  // anything
        for (int c = 0; c < Pair::head_dim; ++c) {
            const int row = key ? t : c, column = key ? c : t, rows = key ? tile_tokens : Pair::head_dim;
            const auto at = static_cast<std::size_t>(column / 64 * rows * 64 + row * 64 +
                                                     ((column % 64 / 8 ^ row % 8) * 8 + column % 8));
            const std::uint16_t by_cells = got[at], by_octets = got[halves + at];
            wrong += exists ? by_cells != by_octets : ((by_cells | by_octets) & 0x7fff) != 0;
            nonzero += got[at] != 0;
        }
    }
    const bool any =
        first < batch.lengths[0] && batch.table[static_cast<std::size_t>(first / Pair::page_tokens)] >= 0;
    CHECK(wrong == 0 && (!any || nonzero > 0), "%s, %s from token %d: %zu numbers differ, %zu are not 0",
          name, key ? "keys" : "values", first, wrong, nonzero);
}

template <class Pair>
void check_tiles(rng& r, const char* name) {
    for (const bool holes : {false, true}) {
        quantized_batch<Pair> batch(r, 2, {uniform(r, 65, 260)});
        if (holes)
            for (int& entry : batch.table)
                if (uniform(r, 0, 1) == 0) entry = -1;
        const device_batch<Pair> device(batch);
        for (int first = 0; first < batch.lengths[0]; first += tile_tokens) {
            const int head = uniform(r, 0, 1);
            check_tile<kvq::tensor::key>(batch, device, head, first, name);
            check_tile<kvq::tensor::value>(batch, device, head, first, name);
        }
    }
}

/// Every width, kind of parameters, and page size.
inline void check_all_tiles(rng& r) {
    using namespace kvq;
    using scaled_keys = affine<4, per_channel<64>, byte_params, min_max, token_scales<byte_params>>;
    check_tiles<cuda::kivi_pair<4, 64, 128, 64>>(r, "tiles of kivi-4-g64");
    check_tiles<cuda::preset_pair<std4, 64, 128>>(r, "tiles of std4");
    check_tiles<cuda::block_pair<int8, int8, 64, 64>>(r, "tiles of int8");
    check_tiles<cuda::kivi_pair<2, 32, 64, 32>>(r, "tiles of kivi-2-g32, page 32");
    check_tiles<cuda::block_pair<affine<3, per_token<32>>, affine<5, per_channel<>>, 128, 96>>(
        r, "tiles of 3 and 5 bits, page 96");
    check_tiles<cuda::block_pair<affine<1, per_channel<>>, affine<7, per_token<>, params<float>>, 64, 16>>(
        r, "tiles of 1 and 7 bits, page 16");
    check_tiles<cuda::block_pair<affine<6, per_token<>>, affine<1, per_token<32>>, 64, 16>>(
        r, "tiles of 6 and 1 bits, page 16");
    check_tiles<cuda::block_pair<scaled_keys, affine<2, per_channel<>, params<bfloat16>>, 64, 128>>(
        r, "tiles of keys with token scales");
    check_tiles<cuda::block_pair<full<bfloat16>, full<float16>, 64, 32>>(r, "tiles of 16-bit pages");
    check_tiles<
        cuda::block_pair<rows_of<row_layout_number("fp8")>, rows_of<row_layout_number("nvfp4")>, 128, 64>>(
        r, "tiles of fp8 and nvfp4");
    check_tiles<
        cuda::block_pair<rows_of<row_layout_number("mxfp4")>, rows_of<row_layout_number("mxfp8")>, 64, 16>>(
        r, "tiles of mxfp4 and mxfp8, page 16");
}

}  // namespace test
