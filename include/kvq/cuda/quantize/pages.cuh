// Whole pages on the device: commit (16-bit window -> quantized), requantize (any scheme -> any other),
// dequantize to 16 bit.
//
//   requantize_pages   pairs of page numbers; committing is requantizing from a full<T> format. K or V alone:
//                      the other tensor, which has the same codec in both formats, keeps its bytes
//   commit_full_pages  decides on the device which sequences have just completed a page behind their recent
//                      window
//   dequantize_tokens      x^ of every sequence as dense tensors, for prefill through any flash attention
//
// To presets' formats, too: keys with a plan need cache_ref::key_plans, with error feedback
// cache_ref::key_feedback. Where sequences have plans of their own (cache_ref::plan_numbers),
// requantize_pages takes that of the first one.
// Contract: quantized bytes are those of the CPU's scheme::quantize on the dequantized values, also where a
// CPU cache would call requantize(), which keeps grids of presets; dequantized values are the CPU's, rounded
// once to T. Source and target pages must not be the same memory. One launch each (committing: two), no
// workspace.
#pragma once

#include "../../core/token_view.hpp"
#include "../layout/float_rows.cuh"
#include "../layout/latent_pair.cuh"
#include "../layout/row_pieces.cuh"
#include "kept_tensors.hpp"
#include "lower_plane.cuh"
#include "quantize_grid.cuh"
#include "quantize_tiles.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

/// Does a block of scheme<...> have its numbers in shared memory?
template <class S, tensor Role, class Pair>
inline constexpr bool numbers_fit = [] {
    if constexpr (codes_ranges<S>)
        return composed_memory<Pair, Role>::fits;
    else
        return false;
}();

/// Are pages of 16-bit numbers?
template <class S>
inline constexpr bool reads_tiles = [] {
    if constexpr (full_precision<S>)
        return sizeof(typename S::value_type) == 2;
    else
        return false;
}();

/// Threads of a block that quantizes one head of a page, and the shared memory that it takes for pages of
/// From.
template <class To, class From = To>
struct page_quantizer {
    static constexpr bool grids = codes_grids<typename To::keys> || codes_grids<typename To::values>;
    static constexpr int values = To::page_tokens * larger(To::head_dim, To::value_dim);
    /// Where warps have tiles in registers, these need more than 64.
    static constexpr bool tiles =
        page_tiles<To, tensor::key>::fit && (!has_values<To> || page_tiles<To, tensor::value>::fit);
    static constexpr int threads = tiles             ? 128
                                   : !grids          ? 256
                                   : values >= 16384 ? 512
                                   : values >= 8192  ? 256
                                                     : 128;
    static constexpr int blocks = tiles ? 4 : 1024 / threads;  // of a multiprocessor
    template <tensor Role>
    static constexpr bool in_tiles = tiles&& reads_tiles<scheme_of<Role, From>> && !turns<Role, From, To>;
    template <tensor Role, int Threads = threads>
    static constexpr int bytes_of() {
        if constexpr (in_tiles<Role>)
            return Threads / warp_size * page_tiles<To, Role>::bytes;
        else if constexpr (codes_grids<scheme_of<Role, To>>)
            return grid_memory<To, Role>::bytes;
        else if constexpr (numbers_fit<scheme_of<Role, To>, Role, To>)
            return composed_memory<To, Role>::bytes;
        else
            return turns<Role, From, To> ? 4 * dim_of<Role, To> * numbers_stride(To::page_tokens) : 0;
    }
    static constexpr int shared_bytes = [] {
        if constexpr (has_values<To>)
            return larger(bytes_of<tensor::key>(), bytes_of<tensor::value>());
        else
            return bytes_of<tensor::key>();
    }();
    static_assert(
        threads <= 512 && shared_bytes <= quantizer_budget<To>,
        "kvq::cuda: a transform needs all channels of a page in shared memory: pages of fewer tokens "
        "have room");
};

/// Of latents: threads are those of the first block.
template <class To, class From>
requires is_latent_pair<To>
struct page_quantizer<To, From>
    : page_quantizer<typename To::first_coded, some_channels<From, 0, To::first_channels>> {
    using first = page_quantizer<typename To::first_coded, some_channels<From, 0, To::first_channels>>;
    static constexpr int shared_bytes = [] {
        using last = typename To::second_coded;
        if constexpr (To::second_channels == 0)
            return first::shared_bytes;
        else
            return larger(first::shared_bytes,
                          page_quantizer<last, some_channels<From, To::first_channels, last::head_dim>>::
                              template bytes_of<tensor::key, first::threads>());
    }();
};

/// Codes the K or V block of one head of page `to` from page `from`. All threads of a block. Returns this
/// thread's count of values that are not finite.
template <tensor Role, int Threads, class From, class To>
__device__ __forceinline__ unsigned requantize_tensor(const cache_ref<From>& source,
                                                      const cache_ref<To>& target, int from, int to, int head,
                                                      std::byte* shared) {
    using S = scheme_of<Role, To>;
    unsigned count = 0;
    if constexpr (token_bytes_scheme<S>) {
        count = quantize_rows<Threads, Role>(target, to, head, [&](int token, int channel) {
            return read_value<Role>(source, from, head, token, channel);
        });
    } else if constexpr (float_row_scheme<S>) {
        constexpr block_shape shape = shape_of<Role, To>;
        count = quantize_float_rows<S, shape.dim, Threads>(
            shape, target.template block<Role>(to, head),
            [&](int token, int channel) { return read_value<Role>(source, from, head, token, channel); });
    } else if constexpr (codes_grids<S>) {
        count = grid_encoder<From, To, Role, Threads>(source, from, target, to, head, shared).run();
    } else if constexpr (page_quantizer<To, From>::template in_tiles<Role>) {
        using T = typename scheme_of<Role, From>::value_type;
        constexpr int row_words = value_layout<T>(stored_shape<Role, From>).tiles.words_per_row,
                      first_word = first_channel<From> / 2;
        count = quantize_tiles<T, To, Role, Threads, row_words>(
            reinterpret_cast<const std::uint32_t*>(
                static_cast<const std::byte*>(source.template block<Role>(from, head))) +
                first_word * warp_size,
            target.template block<Role>(to, head), shared);
    } else {
        constexpr block_shape shape = shape_of<Role, From>;
        std::byte* const block = target.template block<Role>(to, head);
        if constexpr (numbers_fit<S, Role, To> || turns<Role, From, To>) {
            constexpr int stride = numbers_stride(shape.tokens);
            auto* const numbers = reinterpret_cast<float*>(shared);
            odd_numbers odd;
            if constexpr (turns<Role, From, To>) {
                odd = turn_page<Threads, Role>(
                    source, target, from, head, numbers, stride, [](int token) { return token; },
                    [](int channel) { return channel; }, [](float x, bool) { return x; });
                __syncthreads();
            } else {
                visit_page<Threads, Role>(
                    source, from, head, [&](int channel, int token, const auto& x, int n) {
#pragma unroll
                        for (int k = 0; k < static_cast<int>(sizeof(x) / sizeof(float)); ++k)
                            if (k < n) numbers[channel * stride + token + k] = x[k];
                    });
            }
            const auto number = [&](int token, int channel) { return numbers[channel * stride + token]; };
            if constexpr (numbers_fit<S, Role, To>)
                count = quantize_block<S, Threads>(
                    shape, block, number,
                    reinterpret_cast<float2*>(shared + composed_memory<To, Role>::parameters));
            else
                count = quantize_block<S, Threads>(shape, block, number, nullptr);
            if constexpr (has_transform<S>) count = odd.not_finite;
        } else {
            count = quantize_block<S, Threads>(
                shape, block,
                [&](int token, int channel) { return read_value<Role>(source, from, head, token, channel); },
                nullptr);
        }
    }
    if constexpr (has_lower<To>) {
        constexpr block_shape shape = shape_of<Role, To>;
        __syncthreads();
        write_lower_plane<S, Threads>(
            shape, target.template block<Role>(to, head), target.template lower_block<Role>(to, head),
            Role == tensor::key ? To::lower_key_bytes : To::lower_value_bytes,
            [&](int token, int channel) { return read_value<Role>(source, from, head, token, channel); });
    }
    return count;
}

/// One of both tensors; of latents one of both blocks: keys are the first one.
template <class From, class To>
__device__ __forceinline__ void requantize_block(const cache_ref<From>& source, const cache_ref<To>& target,
                                                 int from, int to, int head, bool keys, unsigned* not_finite,
                                                 std::byte* shared) {
    constexpr int threads = page_quantizer<To>::threads;
    unsigned count = 0;
    if constexpr (is_latent_pair<To>) {
        const auto code = [&]<class Block, int First>(std::type_identity<Block>,
                                                      std::integral_constant<int, First>) {
            count = requantize_tensor<tensor::key, threads>(
                keys_as<some_channels<From, First, Block::head_dim>>(source, 0),
                keys_as<Block>(target, First == 0 ? 0 : To::second_block), from, to, 0, shared);
        };
        if (keys)
            code(std::type_identity<typename To::first_coded>{}, std::integral_constant<int, 0>{});
        else if constexpr (To::second_channels > 0)
            code(std::type_identity<typename To::second_coded>{},
                 std::integral_constant<int, To::first_channels>{});
    } else if (keys) {
        count = requantize_tensor<tensor::key, threads>(source, target, from, to, head, shared);
    } else {
        count = requantize_tensor<tensor::value, threads>(source, target, from, to, head, shared);
    }
    if (not_finite && count) atomicAdd(not_finite, count);
}

/// Do blocks of a tensor have one codec in both formats, whose encoders may differ? Then one can be a copy of
/// the other.
template <tensor Role, class From, class To>
inline constexpr bool same_blocks = [] {
    if constexpr (full_precision<scheme_of<Role, From>> || is_latent_pair<To> || is_strided<From> ||
                  is_strided<To>) {
        return false;
    } else if constexpr (read_by_numbers<scheme_of<Role, From>>) {
        return std::is_same_v<scheme_of<Role, From>, scheme_of<Role, To>>;
    } else {
        codec_spec a = codec<scheme_of<Role, From>>;
        a.encoder = codec<scheme_of<Role, To>>.encoder;
        return a == codec<scheme_of<Role, To>>;
    }
}();

/// All threads of a block.
template <tensor Role, class From, class To>
__device__ __forceinline__ void copy_block(const cache_ref<From>& source, const cache_ref<To>& target,
                                           int from, int to, int head) {
    constexpr std::size_t bytes = Role == tensor::key ? To::key_block_bytes : To::value_block_bytes;
    const auto* const words = reinterpret_cast<const uint4*>(source.template block<Role>(from, head));
    auto* const copy = reinterpret_cast<uint4*>(target.template block<Role>(to, head));
    for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(bytes / sizeof(uint4));
         i += static_cast<int>(blockDim.x))
        copy[i] = words[i];
}

/// Values first (blockIdx.z): they take longer, and what is short fills the end of the launch.
template <class From, class To>
__global__ void __launch_bounds__(page_quantizer<To>::threads, page_quantizer<To>::blocks)
    requantize_kernel(const __grid_constant__ cache_ref<From> source,
                      const __grid_constant__ cache_ref<To> target, const int* from, const int* to,
                      kept_tensors kept, unsigned* not_finite) {
    extern __shared__ __align__(16) std::byte page_memory[];
    const int i = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
    if (from[i] < 0 || to[i] < 0) return;
    const bool keys = blockIdx.z != 0;
    if constexpr (same_blocks<tensor::key, From, To>)
        if (keys && kept.keys) return copy_block<tensor::key>(source, target, from[i], to[i], head);
    if constexpr (same_blocks<tensor::value, From, To>)
        if (!keys && kept.values) return copy_block<tensor::value>(source, target, from[i], to[i], head);
    requantize_block(source, target, from[i], to[i], head, keys, not_finite, page_memory);
}

/// The column of the oldest page of sequence b that is due: page i is quantized when first_token + (i + 1) *
/// page_tokens + recent tokens are there (page/layer_pages.hpp). -1: none, or no page to quantize it to. The
/// window's table names the pages that are not quantized yet, and they follow each other.
template <class From, class To>
__device__ __forceinline__ int due_page(const cache_ref<From>& window, const cache_ref<To>& quantized,
                                        int recent, const int* fresh, int b) {
    const int behind = (window.tokens[b] - window.first_token - recent) / From::page_tokens;
    int i = smaller(behind, smaller(window.table_columns, quantized.table_columns)) - 1;
    const auto waits = [&](int column) { return window.block_table[window.table_entry(b, column)] >= 0; };
    if (i < 0 || fresh[b] < 0 || !waits(i)) return -1;
    while (i > 0 && waits(i - 1)) --i;
    return i;
}

/// Most steps have nothing to quantize, some one page, few many. So few blocks are launched: block x takes
/// the x-th sequence that is due, the one gridDim.x further, and so on.
template <class From, class To>
__global__ void __launch_bounds__(page_quantizer<To>::threads, page_quantizer<To>::blocks)
    commit_kernel(const __grid_constant__ cache_ref<From> window,
                  const __grid_constant__ cache_ref<To> quantized, int recent, const int* fresh,
                  unsigned* not_finite) {
    constexpr int threads = page_quantizer<To>::threads, warps = threads / warp_size;
    extern __shared__ __align__(16) std::byte page_memory[];
    __shared__ due_list<threads> list;
    const int thread = static_cast<int>(threadIdx.x), warp = thread / warp_size, lane = thread % warp_size;
    const int blocks = static_cast<int>(gridDim.x), own = static_cast<int>(blockIdx.x);
    int seen = 0;  // sequences before that are due
    for (int first = 0; first < window.sequences; first += threads) {
        const int b = first + thread;
        const bool due = b < window.sequences && due_page(window, quantized, recent, fresh, b) >= 0;
        const unsigned mask = __ballot_sync(~0u, due);
        if (lane == 0) list.counts[warp] = __popc(mask);
        if (__syncthreads_or(due) == 0) continue;
        int before = seen;
        for (int w = 0; w < warps; ++w) {
            if (w == warp && due) {
                const int number = before + __popc(mask & ((1u << lane) - 1u));
                if (number % blocks == own) list.sequences[(number - seen) / blocks] = b;
            }
            before += list.counts[w];
        }
        // Of the numbers from `seen` on, those that are own modulo blocks.
        const int skipped = (own - seen % blocks + blocks) % blocks;
        const int jobs = before - seen > skipped ? ceil_div(before - seen - skipped, blocks) : 0;
        seen = before;
        __syncthreads();
        for (int j = 0; j < jobs; ++j) {
            const int sequence = list.sequences[j], i = due_page(window, quantized, recent, fresh, sequence);
            requantize_block(window, quantized, window.block_table[window.table_entry(sequence, i)],
                             fresh[sequence], static_cast<int>(blockIdx.y), blockIdx.z != 0, not_finite,
                             page_memory);
            __syncthreads();
        }
    }
}

/// Moves the entries of pages that commit_kernel quantized from one table to the other.
template <class From, class To>
__global__ void commit_tables_kernel(const __grid_constant__ cache_ref<From> window,
                                     const __grid_constant__ cache_ref<To> quantized, int recent, int* fresh,
                                     int* window_table, int* quantized_table) {
    const int b = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (b >= window.sequences) return;
    const int i = due_page(window, quantized, recent, fresh, b);
    if (i < 0) return;
    int& from = window_table[window.table_entry(b, i)];
    quantized_table[quantized.table_entry(b, i)] = fresh[b];
    fresh[b] = -2 - from;
    from = -1;
}

/// Lets a kernel take the shared memory that quantizing to `To` needs.
template <class To, class From = To, class Kernel>
status allow_shared_memory([[maybe_unused]] Kernel* kernel) noexcept {
    constexpr int bytes = page_quantizer<To, From>::shared_bytes;
    if constexpr (bytes > default_shared_memory) {
        const cudaError_t code =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (code != cudaSuccess) {
            char what[80];
            std::snprintf(what, sizeof what, "quantizing pages needs %d bytes of shared memory per block",
                          bytes);
            return runtime_error(code, what);
        }
    }
    return {};
}

/// Have all sequences one plan?
template <class Pair>
status check_one_plan(const cache_ref<Pair>& c) noexcept {
    if (!codec<typename Pair::keys>.several_widths() || c.plan_numbers == nullptr) return {};
    return bad_value("pages of %d sequences are quantized with one plan of keys, not with plan_numbers",
                     c.sequences);
}

template <class Pair, class T>
__global__ void dequantize_kernel(const __grid_constant__ cache_ref<Pair> cache, token_view<T> keys,
                                  token_view<T> values, const int* starts) {
    const int b = static_cast<int>(blockIdx.y), head = static_cast<int>(blockIdx.z);
    const int length = smaller(cache.tokens[b] - cache.first_token, cache.table_columns * Pair::page_tokens);
    const int warp = static_cast<int>(threadIdx.x) / warp_size,
              lane = static_cast<int>(threadIdx.x) % warp_size;
    const int warps = static_cast<int>(blockDim.x) / warp_size;
    for (int t = static_cast<int>(blockIdx.x) * warps + warp; t < length;
         t += static_cast<int>(gridDim.x) * warps) {
        const int page = cache.block_table[cache.table_entry(b, t / Pair::page_tokens)];
        if (page < 0) continue;
        const int in_page = t % Pair::page_tokens, at = starts[b] + cache.first_token + t;
        const auto write = [&]<tensor Role>(std::integral_constant<tensor, Role>, const token_view<T>& to) {
            if (!to.data) return;
            constexpr int dim = dim_of<Role, Pair>, N = token_numbers<dim>;
            float x[N];
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const int c = i * warp_size + lane;
                x[i] = c < dim ? read_value<Role>(cache, page, head, in_page, c, b) : 0.0f;
            }
            if constexpr (has_transform<scheme_of<Role, Pair>>)
                restore_row<token_channels, dim>(x, transform_of<Role>(cache), head);
#pragma unroll
            for (int i = 0; i < N; ++i)
                if (i * warp_size + lane < dim) to.at(at, head)[i * warp_size + lane] = T(x[i]);
        };
        write(std::integral_constant<tensor, tensor::key>{}, keys);
        write(std::integral_constant<tensor, tensor::value>{}, values);
    }
}

template <class From, class To>
constexpr bool same_geometry =
    From::page_tokens == To::page_tokens&& From::head_dim == To::head_dim&& From::value_dim == To::value_dim;

}  // namespace detail

/// Codes page to[i] of `target` from page from[i] of `source` for i in [0, count); negative numbers skip.
/// `from`, `to` and `not_finite` (adds up NaN and infinities met; may be null) are device memory. Block
/// tables are not touched. kept: tensors whose bytes stay as they are; both formats have the same codec for
/// them.
template <class From, class To>
status requantize_pages(const cache_ref<From>& source, const cache_ref<To>& target, const int* from,
                        const int* to, int count, unsigned* not_finite, cudaStream_t stream,
                        kept_tensors kept = {}) noexcept {
    static_assert(detail::same_geometry<From, To>,
                  "kvq::cuda::requantize_pages: both formats must have the same head sizes and page size");
    static_assert(detail::quantizes<To>,
                  "kvq::cuda::requantize_pages: encoders of your own, and encoders other than enclosing per "
                  "token, run on the CPU");
    if (status s = detail::check_ref(source, false); !s) return s;
    if (status s = detail::check_ref(target, false); !s) return s;
    if (source.kv_heads != target.kv_heads)
        return detail::bad_value("source has %d kv heads, target %d", source.kv_heads, target.kv_heads);
    if (count < 0) return detail::bad_value("%d pages to requantize", count);
    if (count == 0) return {};
    if (from == nullptr || to == nullptr) return detail::bad_value("the lists of pages are null pointers");
    using read = detail::read_pair<From>;
    using quantized = detail::quantized_pair<To>;
    if ((kept.keys && !detail::same_blocks<tensor::key, read, quantized>) ||
        (kept.values && !detail::same_blocks<tensor::value, read, quantized>))
        return detail::bad_value("%s cannot be kept: the two formats have other blocks for them",
                                 kept.keys ? "keys" : "values");
    using coder = detail::page_quantizer<quantized, read>;
    auto* const kernel = detail::requantize_kernel<read, quantized>;
    if (status s = detail::allow_shared_memory<quantized, read>(kernel); !s) return s;
    const dim3 grid(static_cast<unsigned>(count), static_cast<unsigned>(source.kv_heads), 2);
    return detail::launch("launching requantization", detail::overlap::no, kernel, grid, coder::threads,
                          coder::shared_bytes, stream, detail::as_pair<read>(source),
                          detail::as_pair<quantized>(target), from, to, kept, not_finite);
}

/// After tokens were added: quantizes the oldest window page of every sequence that has one wholly behind its
/// `recent` tokens, into page fresh[b] of `quantized`, and moves its entry from window_table to
/// quantized_table (the tables that the two refs name, writable). fresh[b] becomes -2 - (number of the window
/// page that is free again); while it is negative nothing is quantized, and the page waits. One page a call:
/// enough after every step of up to page_tokens tokens; call again after longer ones.
template <class Window, class Quantized>
status commit_full_pages(const cache_ref<Window>& window, const cache_ref<Quantized>& quantized,
                         int* window_table, int* quantized_table, int recent, int* fresh,
                         unsigned* not_finite, cudaStream_t stream) noexcept {
    static_assert(detail::same_geometry<Window, Quantized>,
                  "kvq::cuda::commit_full_pages: both formats must have the same head sizes and page size");
    static_assert(full_precision<typename Window::keys> && full_precision<typename Window::values>,
                  "kvq::cuda::commit_full_pages: the window format must be full<T>");
    static_assert(detail::quantizes<Quantized>,
                  "kvq::cuda::commit_full_pages: encoders of your own, and encoders other than enclosing per "
                  "token, run on the CPU");
    if (status s = detail::check_ref(window, true); !s) return s;
    if (status s = detail::check_ref(quantized, true); !s) return s;
    if (window.kv_heads != quantized.kv_heads || window.sequences != quantized.sequences ||
        window.first_token != quantized.first_token)
        return detail::bad_value("window and quantized pages are of different caches");
    if (recent < 0) return detail::bad_value("the recent window is %d tokens", recent);
    if (status s = detail::check_one_plan(quantized); !s) return s;
    if (window.sequences == 0) return {};
    if (fresh == nullptr || window_table != window.block_table || quantized_table != quantized.block_table)
        return detail::bad_value("tables must be those of the refs, and fresh pages must be given");
    using read = detail::read_pair<Window>;
    using coded = detail::quantized_pair<Quantized>;
    using coder = detail::page_quantizer<coded, read>;
    auto* const kernel = detail::commit_kernel<read, coded>;
    const auto source = detail::as_pair<read>(window);
    const auto target = detail::as_pair<coded>(quantized);
    if (status s = detail::allow_shared_memory<coded, read>(kernel); !s) return s;
    const int columns = kvq::detail::smaller(window.sequences, kvq::detail::larger(1, 128 / window.kv_heads));
    const dim3 grid(static_cast<unsigned>(columns), static_cast<unsigned>(window.kv_heads), 2);
    if (status s = detail::launch("launching commit", detail::overlap::no, kernel, grid, coder::threads,
                                  coder::shared_bytes, stream, source, target, recent, fresh, not_finite);
        !s)
        return s;
    return detail::launch("launching commit", detail::overlap::no, detail::commit_tables_kernel<read, coded>,
                          dim3(static_cast<unsigned>((window.sequences + 127) / 128)), 128, 0, stream, source,
                          target, recent, fresh, window_table, quantized_table);
}

/// Writes x^ of token t of sequence b to row starts[b] + t of `keys` and `values` (either may have null
/// data): the layout of variable-length flash attention. Tokens that this format does not hold are left
/// alone.
template <class Pair, class T>
status dequantize_tokens(const cache_ref<Pair>& cache, const token_view<T>& keys, const token_view<T>& values,
                         const int* starts, cudaStream_t stream) noexcept {
    if (status s = detail::check_ref(cache, true); !s) return s;
    if (keys.data && (keys.heads != cache.kv_heads || keys.dim != Pair::head_dim))
        return detail::bad_value("keys go to %d x %d but blocks are %d x %d", keys.heads, keys.dim,
                                 cache.kv_heads, Pair::head_dim);
    if (values.data && (values.heads != cache.kv_heads || values.dim != Pair::value_dim))
        return detail::bad_value("values go to %d x %d but blocks are %d x %d", values.heads, values.dim,
                                 cache.kv_heads, Pair::value_dim);
    if (cache.sequences == 0) return {};
    if (cache.sequences > 65535)
        return detail::bad_value("%d sequences; at most 65535 at a time", cache.sequences);
    if (starts == nullptr) return detail::bad_value("starts is a null pointer");
    const int tokens = cache.table_columns * Pair::page_tokens;
    const dim3 grid(static_cast<unsigned>(detail::smaller((tokens + 7) / 8, 4096)),
                    static_cast<unsigned>(cache.sequences), static_cast<unsigned>(cache.kv_heads));
    using read = detail::read_pair<Pair>;
    return detail::launch("launching dequantizing", detail::overlap::no, detail::dequantize_kernel<read, T>,
                          grid, 256, 0, stream, detail::as_pair<read>(cache), keys, values, starts);
}

}}}  // namespace kvq::cuda
