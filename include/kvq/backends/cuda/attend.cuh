// Host side of fused attention: out = softmax(q K^T) V over packed pages, for a batch of sequences, in one launch.
//
//   kvq::cuda::attend(cache, q, out, options, workspace, workspace_bytes, stream);
//
// q: [sequences * query_tokens][q_heads][head_dim], out: [sequences * query_tokens][q_heads][value_dim], any strides.
// Workspace: attend_workspace_bytes(), 16-byte aligned, zeroed once before its first use; calls leave it ready for the next
// one. Launches that may run at the same time need workspaces of their own. Nothing is allocated, nothing waits, graphs can
// capture it.
// A kernel is instantiated for every (format, type of q) that a program names: pairs are chosen by the user, here.
#pragma once

#include "attend_any.cuh"
#include "attend_warps.cuh"

namespace kvq::inline KVQ_TAGGED::cuda {

namespace detail {

/// Of a thread block on the current device, in bytes; 0 if there is none.
inline int device_shared_memory() noexcept {
    int device = 0, most = 0;
    cudaError_t code = cudaGetDevice(&device);
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (code != cudaSuccess) (void)cudaGetLastError();
    return most;
}

template <class Format, class T, int Rows4, bool Small>
struct warp_launch {
    using memory = attention_memory<Format, Rows4, Small>;
    static constexpr auto* kernel = attend_warps_kernel<Format, T, Rows4, Small>;

    /// Does the current device have the shared memory?
    static bool fits() noexcept {
        if constexpr (memory::bytes <= budget_on<Format, Small>)
            return true;
        else
            return memory::bytes <= device_shared_memory();
    }
    /// Thread blocks that the current device holds at a time; 0 if the kernel cannot run there.
    static int grid(cudaError_t& code) noexcept {
        int device = 0, multiprocessors = 0, blocks = 0;
        code = cudaGetDevice(&device);
        if (code == cudaSuccess)
            code = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
        if (code == cudaSuccess)
            code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, memory::bytes);
        if (code == cudaSuccess)
            code = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, memory::threads,
                                                                 memory::bytes);
        return code == cudaSuccess ? multiprocessors * blocks : 0;
    }
    static std::size_t workspace(int blocks) noexcept {
        return static_cast<std::size_t>(blocks) * memory::most_teams * 2 * memory::partial_words * 4;
    }
    static status run(attention_args<Format, T> a, std::byte* space, std::size_t bytes,
                      cudaStream_t stream) noexcept {
        if (reinterpret_cast<std::uintptr_t>(space) % 16 != 0)
            return bad_value("the workspace must start on 16 bytes");
        cudaError_t code = cudaSuccess;
        const int blocks = grid(code);
        if (blocks == 0) {
            char what[64];
            std::snprintf(what, sizeof what, "attention needs %d bytes of shared memory per block",
                          memory::bytes);
            return runtime_error(code != cudaSuccess ? code : cudaErrorInvalidConfiguration, what);
        }
        a.work.row_blocks = kvq::detail::ceil_div(a.rows, memory::rows);
        a.work.lines = a.cache.kv_heads * a.work.row_blocks;
        const long long items = static_cast<long long>(a.work.sequences) * a.work.lines;
        const int chunks =
            kvq::detail::larger(1, kvq::detail::ceil_div(a.work.capacity, memory::step_tokens));
        if (items * (chunks + memory::end_chunks) > 2147483647LL)
            return bad_value("%lld blocks of query rows x %d chunks of %d tokens are too many for one launch",
                             items, chunks, memory::step_tokens);
        if (bytes < workspace(blocks) || space == nullptr)
            return bad_value("attention needs a workspace of %zu bytes, got %zu", workspace(blocks), bytes);
        a.cut = item_shares(a.work.sequences * a.work.lines, blocks, memory::most_teams);
        a.partials = reinterpret_cast<std::uint32_t*>(space);
        return launch("launching attention", overlap::yes, kernel, dim3(static_cast<unsigned>(blocks)),
                      memory::threads, memory::bytes, stream, a);
    }
};

/// Calls f with the launch for so many query rows of a kv head: of the kernel that takes 4, 8 or 16 of them in a thread block,
/// fewer where those do not fit into the device's shared memory.
template <class Format, class T, bool Small, class F>
auto with_rows(int rows, F&& f) {
    if (rows > 8 && warp_launch<Format, T, 4, Small>::fits()) return f(warp_launch<Format, T, 4, Small>{});
    if (rows > 4 && warp_launch<Format, T, 2, Small>::fits()) return f(warp_launch<Format, T, 2, Small>{});
    return f(warp_launch<Format, T, 1, Small>{});
}
/// The same with the kernels that were compiled for devices like the current one.
template <class Format, class T, class F>
auto with_launch(int rows, F&& f) {
    if constexpr (two_sizes<Format>) {
        if (device_shared_memory() < shared_memory_budget<Format>) return with_rows<Format, T, true>(rows, f);
        return with_rows<Format, T, false>(rows, f);
    } else {
        return with_rows<Format, T, targets().small>(rows, f);
    }
}

/// The format whose kernel reads Format's pages as well: the same budget of shared memory.
template <class Format, class Same>
struct read_as : Same {};

}  // namespace detail

template <class Format, class Same>
inline constexpr int shared_memory_budget<detail::read_as<Format, Same>> = shared_memory_budget<Format>;

namespace detail {

/// Keys of mixed widths without a plan have one width where the average is one of the widths. Then their blocks are those of a
/// channel_grid, byte for byte, and its kernel reads them: it knows at compile time what the other one looks up.
template <class Format>
struct even_keys {
    static constexpr bool known = false;
};
template <grid Options, class Encoder, class Params, class Values, int HeadDim, int PageTokens, int ValueDim>
requires(Options.bits.count() > 1 && Options.average_eighths >= 8 &&
         Options.average_eighths % 8 == 0) struct even_keys<format<channel_grid<Options, Encoder, Params>,
                                                                   Values, HeadDim, PageTokens, ValueDim>> {
    using mixed = channel_grid<Options, Encoder, Params>;
    static constexpr int width = Options.average_eighths / 8;
    using even = channel_grid<grid{.bits = {width}, .group = Options.group}, min_max, Params>;
    using format_type = read_as<format<mixed, Values, HeadDim, PageTokens, ValueDim>,
                                format<even, Values, HeadDim, PageTokens, ValueDim>>;
    static constexpr block_shape shape{tensor::key, PageTokens, HeadDim};
    static constexpr bool known = [] {
        constexpr auto quads = mixed::even_quads(HeadDim);
        bool one_width = false;
        for (int w = 0; w < Options.bits.count(); ++w)
            one_width = one_width || (Options.bits[w] == width && 4 * quads.of[w] == HeadDim);
        return one_width && mixed::parameter_offset(shape) == even::parameter_offset(shape) &&
               mixed::block_bytes(shape) == even::block_bytes(shape);
    }();
    static cache_ref<format_type> cache(
        const cache_ref<format<mixed, Values, HeadDim, PageTokens, ValueDim>>& c) noexcept {
        return {c.key_pages, c.value_pages,   c.key_page_bytes, c.value_page_bytes, c.block_table, c.tokens,
                c.sequences, c.table_columns, c.kv_heads,       c.first_token,      nullptr};
    }
};

template <class Format, class T>
status check_attention(const cache_ref<Format>& cache, const token_view<const T>& q, const token_view<T>& out,
                       const attention_options& o) noexcept {
    if (status s = check_ref(cache, true); !s) return s;
    if (o.query_tokens < 1) return bad_value("query_tokens is %d, must be at least 1", o.query_tokens);
    if (q.heads < 1 || q.heads % cache.kv_heads != 0)
        return bad_value("q has %d heads, not a multiple of the %d kv heads", q.heads, cache.kv_heads);
    if (q.dim != Format::head_dim)
        return bad_value("q has head_dim %d but keys have %d", q.dim, Format::head_dim);
    const long long tokens = static_cast<long long>(cache.sequences) * o.query_tokens;
    if (q.tokens != tokens)
        return bad_value("q has %d tokens but %d sequences x %d query tokens are %lld", q.tokens,
                         cache.sequences, o.query_tokens, tokens);
    if (tokens * q.heads > 2147483647LL)
        return bad_value("%lld query rows are too many for one launch", tokens * q.heads);
    const long long group = q.heads / cache.kv_heads;
    if (group * group * o.query_tokens > 4294967295LL)  // see attention_args::row_query
        return bad_value("%d query tokens are too many for one launch with %lld query heads per kv head",
                         o.query_tokens, group);
    if (q.tokens > 0 && q.data == nullptr) return bad_value("q is a null pointer");
    if (q.tokens > 0 && out.data == nullptr && o.state_out == nullptr)
        return bad_value("neither out nor state_out is given");
    if (out.data != nullptr &&
        (out.tokens != q.tokens || out.heads != q.heads || out.dim != Format::value_dim))
        return bad_value("out is %d x %d x %d but must be %d x %d x %d", out.tokens, out.heads, out.dim,
                         q.tokens, q.heads, Format::value_dim);
    if (!std::isfinite(o.scale)) return bad_value("scale is %g", static_cast<double>(o.scale));
    if (o.window < 0) return bad_value("the sliding window is %d tokens", o.window);
    if (!(o.softcap >= 0.0f && o.softcap < INFINITY))
        return bad_value("softcap is %g", static_cast<double>(o.softcap));
    return {};
}

}  // namespace detail

/// Bytes of workspace that attend() needs on the current device for any batch with this many query heads per kv head and query
/// tokens. 0 where no workspace is needed, and where the kernel cannot run: attend() says why.
template <class Format, class T>
std::size_t attend_workspace_bytes(int group, int query_tokens = 1) noexcept {
    std::size_t bytes = 0;
    if constexpr (detail::warps_can<Format>)
        bytes = detail::with_launch<Format, T>(group * query_tokens, [](auto launch) {
            cudaError_t code = cudaSuccess;
            const int blocks = decltype(launch)::grid(code);
            if (code != cudaSuccess) (void)cudaGetLastError();
            return decltype(launch)::workspace(blocks);
        });
    if constexpr (detail::even_keys<Format>::known)
        bytes = kvq::detail::larger(
            bytes,
            attend_workspace_bytes<typename detail::even_keys<Format>::format_type, T>(group, query_tokens));
    return bytes;
}

/// Fused attention of a batch; see the top of this file. `options` name what is not the default.
template <class Format, class T>
status attend(const cache_ref<Format>& cache, const token_view<const T>& q, const token_view<T>& out,
              const attention_options& options, void* workspace, std::size_t workspace_bytes,
              cudaStream_t stream) noexcept {
    static_assert(float_format<T>, "kvq::cuda::attend: q and out must be float16, bfloat16 or float");
    if constexpr (detail::even_keys<Format>::known)
        if (cache.key_plans == nullptr)
            return attend(detail::even_keys<Format>::cache(cache), q, out, options, workspace,
                          workspace_bytes, stream);
    if (status s = detail::check_attention(cache, q, out, options); !s) return s;
    if (q.tokens == 0) return {};
    detail::attention_args<Format, T> a{};
    a.cache = cache;
    a.work = {cache.tokens,
              cache.sequences,
              0,
              0,
              cache.first_token,
              cache.table_columns * Format::page_tokens,
              options.query_tokens,
              kvq::detail::smaller(options.window, detail::most_tokens)};
    a.q = q;
    a.out = out;
    a.scale = options.scale != 0.0f ? options.scale : 1.0f / std::sqrt(static_cast<float>(Format::head_dim));
    if (options.softcap == 0.0f) a.scale *= detail::log2e;
    a.softcap = options.softcap;
    a.lse = options.lse;
    a.state_in = options.state_in;
    a.state_out = options.state_out;
    a.early = options.early;
    a.set_group(q.heads);
    if constexpr (detail::warps_can<Format>)
        return detail::with_launch<Format, T>(a.rows, [&](auto launch) {
            return decltype(launch)::run(a, static_cast<std::byte*>(workspace), workspace_bytes, stream);
        });
    else
        return detail::run_any(a, stream);
}

}  // namespace kvq::inline KVQ_TAGGED::cuda
