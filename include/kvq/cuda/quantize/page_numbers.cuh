// The numbers of one head of a page in shared memory, channel after channel: what encoders of whole blocks
// work on.
//
//   at[place - first place][slot - first slot]    floats; rows lie numbers_stride(slots) apart
//
// Rows start 4 banks apart, so that lanes that read four tokens each of neighbouring channels meet no
// conflict, nor do lanes that read one token each of one channel.
// Contract: numbers are those that the page dequantizes to, before the transform of its format is undone
// (turn_tokens); all threads of a block take part.
#pragma once

#include <bit>

#include "../layout/block_access.cuh"
#include "../layout/transform_row.cuh"
#include "../layout/warp_tile.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// The list of sequences with a page that is due, in shared memory of kernels that commit: at most one for
/// every thread of a block.
template <int Threads>
struct due_list {
    int counts[Threads / warp_size];  // of each warp
    int sequences[Threads];
};
/// Shared memory that quantizing a block may take, in bytes: what a thread block has, less such a list.
template <class Pair>
inline constexpr int quantizer_budget = common_budget<Pair> - static_cast<int>(sizeof(due_list<512>));

KVQ_HD constexpr int numbers_stride(int slot_count) noexcept {
    return kvq::detail::round_up(slot_count, 8) + 4;
}

/// Calls put(channel, token, x, n) with the first n of an array x of numbers: those of consecutive tokens of
/// a channel.
template <int Threads, tensor Role, class Pair, class Put>
__device__ __forceinline__ void visit_page(const cache_ref<Pair>& cache, int page, int head, const Put& put) {
    using S = scheme_of<Role, Pair>;
    constexpr block_shape s = shape_of<Role, Pair>;
    const int thread = static_cast<int>(threadIdx.x);
    if constexpr (full_precision<S> && first_channel<Pair> % 2 == 0) {
        // Words lie as threads do. Of values, a thread takes two neighbouring ones of a channel, if it can.
        using T = typename S::value_type;
        constexpr int per_word = value_layout<T>::values_per_word;
        constexpr int per_row = value_layout<T>(s).tiles.words_per_row;
        // In memory a row may have words of other channels as well.
        constexpr int row_words = value_layout<T>(stored_shape<Role, Pair>).tiles.words_per_row,
                      first_word = first_channel<Pair> / per_word;
        static_assert(first_channel<Pair> % per_word == 0);
        constexpr int slot_count = value_layout<T>(s).tiles.rows.padded_size(),
                      height = tile_layout::tile_rows;
        constexpr int words = Role == tensor::value && per_row % 2 == 0 ? 2 : 1, count = words * per_word;
        const auto* const from = reinterpret_cast<const std::uint32_t*>(
            static_cast<const std::byte*>(cache.template block<Role>(page, head)));
        const auto numbers_of = [](const std::uint32_t* at, int apart, float(&x)[count]) {
#pragma unroll
            for (int w = 0; w < words; ++w) {
                const std::uint32_t word = at[w * apart];
                if constexpr (per_word == 2) {
                    x[2 * w] = unpack_half<T, 0>(word);
                    x[2 * w + 1] = unpack_half<T, 1>(word);
                } else {
                    x[w] = __uint_as_float(word);
                }
            }
        };
        const auto put_numbers = [&](int row, int col, const float(&x)[count], bool whole) {
            if constexpr (Role == tensor::key) {
#pragma unroll
                for (int k = 0; k < count; ++k) {
                    const float one[1] = {x[k]};
                    if (whole || s.cols() % count == 0 || col + k < s.cols()) put(col + k, row, one, 1);
                }
            } else {
                put(row, col, x, whole || s.cols() % count == 0 ? count : smaller(count, s.cols() - col));
            }
        };
        // Warps that have the same vectors of every tile find them at constant distances.
        constexpr int warps = Threads / warp_size, vectors = per_row / words;
        if constexpr (s.rows() % height == 0 && s.cols() % count == 0 && vectors % warps == 0) {
            constexpr int turns = vectors / warps;
            const int warp = thread / warp_size, lane = thread % warp_size;
#pragma unroll 1
            for (int tile = 0; tile < s.rows() / height; ++tile)
#pragma unroll
                for (int turn = 0; turn < turns; ++turn) {
                    const int vector = turn * warps + warp;
                    float x[count];
                    numbers_of(from + (tile * row_words + first_word + vector * words) * height + lane,
                               height, x);
                    put_numbers(tile * height + lane, vector * count, x, true);
                }
        } else {
#pragma unroll 4
            for (int i = thread; i < slot_count * per_row / words; i += Threads) {
                const int tile = i / (height * per_row / words),
                          in_tile = i - tile * (height * per_row / words);
                const int rows =
                    slot_count % height == 0 ? height : smaller(height, slot_count - tile * height);
                const int vector = in_tile / rows * words, row = in_tile % rows;
                const std::uint32_t* const at =
                    from + tile * height * row_words + (first_word + vector) * rows + row;
                float x[count];
                numbers_of(at, rows, x);
                const int r = tile * height + row, col = vector * per_word;
                if (slot_count != s.rows() && r >= s.rows()) continue;
                put_numbers(r, col, x, false);
            }
        }
    } else {
        for (int i = thread; i < s.tokens * s.dim; i += Threads) {
            const int token = Role == tensor::key ? i % s.tokens : i / s.dim;
            const int channel = Role == tensor::key ? i / s.tokens : i % s.dim;
            const float x[1] = {read_value<Role>(cache, page, head, token, channel)};
            put(channel, token, x, 1);
        }
    }
}

/// Do the numbers of a token change together on the way from one format to another?
template <tensor Role, class From, class To>
inline constexpr bool turns = has_transform<scheme_of<Role, From>> || has_transform<scheme_of<Role, To>>;

/// What turn_tokens has met.
struct odd_numbers {
    unsigned not_finite = 0;  // this thread's count, of what the source dequantizes to
    bool dirty = false;       // is a number that is to be quantized not finite?
};
/// Numbers in shared memory, at[channel * stride + slot(token)], all channels of the page: undoes the
/// transform of `from`, makes zeros of what is not finite and applies the transform of `to`. Then
/// put(number, is it finite?) of a channel goes to place(channel). A warp has a token.
template <int Threads, tensor Role, class From, class To, class Slot, class Place, class Put>
__device__ __forceinline__ odd_numbers turn_tokens(const cache_ref<From>& from, const cache_ref<To>& to,
                                                   int head, float* at, int stride, const Slot& slot,
                                                   const Place& place, const Put& put) {
    constexpr int dim = dim_of<Role, To>, N = token_numbers<dim>;
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    odd_numbers odd;
#pragma unroll 1
    for (int t = static_cast<int>(threadIdx.x) / warp_size; t < To::page_tokens; t += Threads / warp_size) {
        float* const token = at + slot(t);
        float x[N];
#pragma unroll
        for (int i = 0; i < N; ++i)
            x[i] = i * warp_size + lane < dim ? token[(i * warp_size + lane) * stride] : 0.0f;
        __syncwarp();
        if constexpr (has_transform<scheme_of<Role, From>>)
            restore_row<token_channels, dim>(x, transform_of<Role>(from), head);
        if constexpr (has_transform<scheme_of<Role, To>>) {
#pragma unroll
            for (float& number : x)
                if (!kvq::detail::is_finite(number)) {
                    ++odd.not_finite;
                    number = 0.0f;
                }
            transform_row<token_channels, dim>(x, transform_of<Role>(to), head);
        }
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (i * warp_size + lane < dim) {
                const bool finite = kvq::detail::is_finite(x[i]);
                odd.dirty = odd.dirty || !finite;
                if (!has_transform<scheme_of<Role, To>>) odd.not_finite += !finite;
                token[place(i * warp_size + lane) * stride] = put(x[i], finite);
            }
    }
    return odd;
}

/// May Hadamard matrices be applied to 16-bit keys on their way from the page (turn_rows)?
template <tensor Role, class From, class To>
inline constexpr bool turns_rows = [] {
    if constexpr (Role == tensor::key && full_precision<scheme_of<Role, From>> &&
                  !has_transform<scheme_of<Role, From>> && has_transform<scheme_of<Role, To>>) {
        constexpr block_shape s = shape_of<Role, From>;
        return sizeof(typename scheme_of<Role, From>::value_type) == 2 &&
               std::has_single_bit(unsigned(s.dim)) && s.dim >= 32 && s.dim <= 128 &&
               s.tokens % tile_layout::tile_rows == 0;
    } else {
        return false;
    }
}();

/// What turn_tokens does behind visit_page, of 16-bit keys and Hadamard matrices: `at` is written once. A
/// lane has 32 channels of a token, so that most steps are sums of registers; one, two or four lanes share
/// the token.
template <int Threads, class From, class To, class Slot, class Place, class Put>
__device__ __forceinline__ odd_numbers turn_rows(const cache_ref<From>& from, const cache_ref<To>& to,
                                                 int page, int head, float* at, int stride, const Slot& slot,
                                                 const Place& place, const Put& put) {
    using T = typename From::keys::value_type;
    constexpr int dim = From::head_dim, count = 32, parts = dim / count, rows = warp_size / parts,
                  height = tile_layout::tile_rows;
    // A lane's runs of channels are so long that what lanes write meets no bank conflict.
    constexpr int run = hadamard_steps<8 / parts>;
    using layout = row_layout<run, hadamard_steps<parts>, hadamard_steps<rows>>;
    const device_transform& transform = transform_of<tensor::key>(to);
    const int lane = static_cast<int>(threadIdx.x) % warp_size, part = lane / rows;
    std::uint32_t signs[parts];  // a bit for every channel whose sign changes
#pragma unroll
    for (int i = 0; i < parts; ++i)
        signs[i] = __ballot_sync(~0u, kvq::detail::random_sign(transform.what.seed, {transform.layer, head},
                                                               i * warp_size + lane) < 0.0f) >>
                   (part << run);
    odd_numbers odd;
#pragma unroll 1
    for (int first = static_cast<int>(threadIdx.x) / warp_size * rows; first < From::page_tokens;
         first += Threads / parts) {
        const int t = first + lane % rows;
        const auto* const row = reinterpret_cast<const std::uint32_t*>(static_cast<const std::byte*>(
                                    from.template block<tensor::key>(page, head))) +
                                t / height * (height * dim / 2) + (part << run) / 2 * height + t % height;
        float x[count];
#pragma unroll
        for (int k = 0; k < count; k += 2) {
            const std::uint32_t word = row[layout::channel(k, 0) / 2 * height];
            x[k] = unpack_half<T, 0>(word);
            x[k + 1] = unpack_half<T, 1>(word);
        }
#pragma unroll
        for (int k = 0; k < count; ++k) {
            if (!kvq::detail::is_finite(x[k])) {
                ++odd.not_finite;
                x[k] = 0.0f;
            }
            const int bit = layout::channel(k, 0);
            x[k] =
                __uint_as_float(__float_as_uint(x[k]) ^
                                (signs[bit / warp_size] << (warp_size - 1 - bit % warp_size) & 0x80000000u));
        }
        hadamard_row<layout, dim>(x, transform.what.largest);
        float* const token = at + slot(t);
#pragma unroll
        for (int k = 0; k < count; ++k) {
            // Of half floats no sum is that large.
            if (!std::is_same_v<T, float16> && !(fabsf(x[k]) < 0x1p99f)) {
                const bool finite = kvq::detail::is_finite(x[k]);
                odd.dirty = odd.dirty || !finite;
                x[k] = put(x[k], finite);
            }
            token[place(layout::channel(k, lane)) * stride] = x[k];
        }
    }
    return odd;
}

/// Numbers of a page behind transforms: of `from`, which is undone, and of `to`. All threads of a block; a
/// barrier is still to come.
template <int Threads, tensor Role, class From, class To, class Slot, class Place, class Put>
__device__ __forceinline__ odd_numbers turn_page(const cache_ref<From>& from, const cache_ref<To>& to,
                                                 int page, int head, float* at, int stride, const Slot& slot,
                                                 const Place& place, const Put& put) {
    if constexpr (turns_rows<Role, From, To>)
        if (transform_of<Role>(to).what.kind == transform_kind::hadamard)
            return turn_rows<Threads>(from, to, page, head, at, stride, slot, place, put);
    visit_page<Threads, Role>(from, page, head, [&](int channel, int token, const auto& x, int n) {
        for (int k = 0; k < n; ++k) at[channel * stride + slot(token + k)] = x[k];
    });
    __syncthreads();
    return turn_tokens<Threads, Role>(from, to, head, at, stride, slot, place, put);
}

}}}  // namespace kvq::cuda::detail
