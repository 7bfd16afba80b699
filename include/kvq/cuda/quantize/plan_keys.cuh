// Plans of widths of a sequence's own keys (cache/key_plan.hpp), made on the device from its first tokens in
// 16 bit: the plan that scheme::plan_of_keys() makes of the same keys, bit for bit.
//
//   sums of groups of 64 tokens (calibration) -> importances, shrunk (steady_importance) -> least error over
//     quads and words (allocate_widths) -> places and quads (write_key_plan)
//
// A thread block plans a head of a layer. Formulas are those of quant/; sums have their order. The states of
// the allocation are found side by side: each looks at what leads to it in the order of the CPU.
// Contract: `tokens` is at least 64. The first keys lie in pages, the others in rows that are about to be
// appended. Nothing waits for the host.
#pragma once

#include "../../quant/calibration.hpp"
#include "../../quant/width_allocation.hpp"
#include "../layout/block_access.cuh"
#include "../layout/unpack_codes.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

/// Where the first keys of a sequence are.
template <class Window, class Sinks, class T>
struct planned_keys {
    cache_ref<Window> window;  // 16 bit, without tables
    cache_ref<Sinks> sinks;
    const int *window_pages = nullptr, *sink_pages = nullptr;  // numbers of the first pages, device memory
    int before = 0;                                            // tokens in pages
    token_view<const T> opened, rows;  // the tokens behind them; the first ones in `opened`
    int tokens = 0;                    // that the plan is made of
};

namespace detail {

template <class Pair>
struct planner_memory {
    using S = typename Pair::keys;
    static constexpr int dim = Pair::head_dim, quads = kvq::detail::ceil_div(dim, 4),
                         words = S::row_words(dim), states = (quads + 1) * (words + 1),
                         widths = S::width_list::count, threads = 256,
                         at_once = 4;  // groups of tokens
    double importance[dim], logs[dim], power;
    double below[quads + 1];
    union {  // the sums are gone where widths are allocated
        double sums[2][at_once][dim];
        double least[2 * states];
    };
    std::uint8_t taken[widths][states];
    int rank[dim];
    int quads_of[widths];
    static_assert(quads < 256);
};

template <class Pair, class Window, class Sinks, class T>
struct plan_args {
    planned_keys<Window, Sinks, T> keys;
    std::uint16_t* plans;  // of the layer
    double doubt;
};

template <class Pair, class Window, class Sinks, class T>
__global__ void __launch_bounds__(256)
    plan_keys_kernel(const __grid_constant__ plan_args<Pair, Window, Sinks, T> a) {
    using memory = planner_memory<Pair>;
    constexpr int dim = memory::dim, quads = memory::quads, words = memory::words, threads = memory::threads;
    constexpr double never = INFINITY;
    extern __shared__ __align__(16) std::byte page_memory[];
    memory& m = *reinterpret_cast<memory*>(page_memory);
    const int thread = static_cast<int>(threadIdx.x), head = static_cast<int>(blockIdx.x);
    const auto& of = a.keys;
    const auto key = [&](int token, int channel) {
        if (token >= of.before) {
            const int i = token - of.before;
            return to_float((i < of.opened.tokens ? of.opened.at(i, head) : of.rows.at(i, head))[channel]);
        }
        if (token < of.window.first_token) {
            constexpr int room = Sinks::page_tokens;
            return read_value<tensor::key>(of.sinks, of.sink_pages[token / room], head, token % room,
                                           channel);
        }
        const int place = token - of.window.first_token;
        return read_value<tensor::key>(of.window, of.window_pages[place / Window::page_tokens], head,
                                       place % Window::page_tokens, channel);
    };
    constexpr int group = calibration::group, own = kvq::detail::ceil_div(dim, threads);
    double variances[own] = {}, squares[own] = {};
    int counted = 0;
    for (int first = 0; of.tokens - first >= 16; first += group * memory::at_once) {
        for (int i = thread; i < memory::at_once * dim; i += threads) {
            const int number = i / dim, channel = i - number * dim, begin = first + number * group,
                      n = kvq::detail::smaller(group, of.tokens - begin);
            kvq::detail::channel_sums sums{};
            if (n >= 16)
                for (int t = 0; t < n; ++t) sums.add(key(begin + t, channel));
            m.sums[0][number][channel] = n < 16 ? 0.0 : sums.variance(n);
            m.sums[1][number][channel] = n < 16 ? 0.0 : sums.mean_square(n);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < own; ++i)
            if (const int c = thread + i * threads; c < dim)
                for (int number = 0; number < memory::at_once; ++number) {
                    variances[i] += m.sums[0][number][c];
                    squares[i] += m.sums[1][number][c];
                }
        for (int number = 0; number < memory::at_once; ++number)
            if (const int n = of.tokens - first - number * group; n >= 16)
                counted += kvq::detail::smaller(group, n);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < own; ++i)
        if (const int c = thread + i * threads; c < dim)
            m.importance[c] = key_importance(squares[i] / counted, variances[i] / counted);
    __syncthreads();
    double top = 0.0;
    for (int c = 0; c < dim; ++c) top = kvq::detail::larger(top, m.importance[c]);
    if (top > 0.0) {
        for (int c = thread; c < dim; c += threads)
            m.logs[c] = kvq::detail::importance_log(m.importance[c], top);
        __syncthreads();
        if (thread == 0) m.power = kvq::detail::steady_power(m.logs, dim, a.doubt);
        __syncthreads();
        for (int c = thread; c < dim; c += threads)
            m.importance[c] = kvq::detail::steadied(m.logs[c], m.power);
        __syncthreads();
    }
    // The order of falling importance.
    for (int c = thread; c < dim; c += threads) {
        int rank = 0;
        for (int i = 0; i < dim; ++i)
            rank +=
                m.importance[i] > m.importance[c] || (i < c && m.importance[i] == m.importance[c]) ? 1 : 0;
        m.rank[c] = rank;
        m.logs[rank] = m.importance[c];  // in that order
    }
    __syncthreads();
    if (thread == 0) {
        m.below[0] = 0.0;
        for (int q = 0; q < quads; ++q) {
            double sum = 0.0;
            for (int i = 4 * q; i < kvq::detail::smaller(4 * q + 4, dim); ++i) sum += m.logs[i];
            m.below[q + 1] = m.below[q] + sum;
        }
    }
    for (int i = thread; i < memory::states; i += threads) m.least[i] = i == 0 ? 0.0 : never;
    __syncthreads();
    static_for<memory::widths>([&](auto number) {
        constexpr int w = decltype(number)::value, width = memory::S::width_list::values[w];
        for (int i = thread; i < memory::states; i += threads) {
            const int end = i / (words + 1), u = i - end * (words + 1);
            double least = never;
            int taken = 0;
            for (int q = 0; q <= end; ++q) {
                const int from = u - kvq::detail::code_words(width, end - q);
                if (from < 0) continue;
                const double before = m.least[q * (words + 1) + from];
                if (before == never) continue;
                const double error = before + kvq::detail::rounded_product(kvq::detail::width_noise(width),
                                                                           m.below[end] - m.below[q]);
                if (error < least) {
                    least = error;
                    taken = end - q;
                }
            }
            m.least[memory::states + i] = least;
            m.taken[w][i] = static_cast<std::uint8_t>(taken);
        }
        __syncthreads();
        for (int i = thread; i < memory::states; i += threads) m.least[i] = m.least[memory::states + i];
        __syncthreads();
    });
    if (thread == 0) {
        int u = 0, q = quads;
        for (int i = 0; i <= words; ++i)
            if (m.least[quads * (words + 1) + i] < m.least[quads * (words + 1) + u]) u = i;
        static_for<memory::widths>([&](auto number) {
            constexpr int w = memory::widths - 1 - decltype(number)::value,
                          width = memory::S::width_list::values[w];
            const int n = m.taken[w][q * (words + 1) + u];
            m.quads_of[w] = n;
            q -= n;
            u -= kvq::detail::code_words(width, n);
        });
    }
    __syncthreads();
    // Channels of one width keep their order.
    const auto width_of = [&](int channel) {
        int w = 0;
        for (int end = 4 * m.quads_of[0]; m.rank[channel] >= end; end += 4 * m.quads_of[w]) ++w;
        return w;
    };
    std::uint16_t* const plan = a.plans + head * key_plan_words<Pair>;
    for (int c = thread; c < key_plan_words<Pair>; c += threads) {
        int number = 0;
        if (c < dim) {
            const int w = width_of(c);
            for (int i = 0; i < w; ++i) number += 4 * m.quads_of[i];
            for (int i = 0; i < c; ++i) number += width_of(i) == w ? 1 : 0;
        } else if (c < dim + memory::widths) {
            number = m.quads_of[c - dim];
        }
        plan[c] = static_cast<std::uint16_t>(number);
    }
}

}  // namespace detail

/// Writes the plans of a layer's heads for keys of Pair, kv_heads * key_plan_words<Pair> numbers. doubt:
/// Pair::keys::doubt_of_keys() of the tokens that count.
template <class Pair, class Window, class Sinks, class T>
status plan_keys(const planned_keys<Window, Sinks, T>& keys, std::uint16_t* plans, double doubt,
                 cudaStream_t stream) noexcept {
    static_assert(full_precision<typename Window::keys> && full_precision<typename Sinks::keys> &&
                  Window::head_dim == Pair::head_dim && Sinks::head_dim == Pair::head_dim);
    using memory = detail::planner_memory<Pair>;
    auto* const kernel = detail::plan_keys_kernel<Pair, Window, Sinks, T>;
    if (keys.tokens < calibration::group)
        return detail::bad_value("a plan of %d tokens, but it takes at least %d", keys.tokens,
                                 calibration::group);
    if constexpr (sizeof(memory) > 48 * 1024) {
        const cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                      static_cast<int>(sizeof(memory)));
        if (code != cudaSuccess) return detail::runtime_error(code, "planning keys");
    }
    const detail::plan_args<Pair, Window, Sinks, T> a{keys, plans, doubt};
    return detail::launch("planning keys", detail::overlap::no, kernel,
                          dim3(static_cast<unsigned>(keys.window.kv_heads)), memory::threads, sizeof(memory),
                          stream, a);
}

}}}  // namespace kvq::cuda
