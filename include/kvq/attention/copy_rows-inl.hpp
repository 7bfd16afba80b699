// Definitions of copy_rows.hpp.
#pragma once

#include <climits>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "attend_rows-inl.hpp"
#include "copy_rows.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

/// One call: tokens [first, first + tokens) of all heads.
struct rows_copy {
    static constexpr int span_tokens = 64;
    static constexpr std::int64_t none = INT64_MAX;

    int first, tokens, heads, dim;
    std::atomic<std::int64_t> not_finite{0}, bad_scale{none};  ///< the first one: head, span

    /// Where pieces of a token lie: in its owner's memory, and in a block of rows like those of a page.
    struct rows {
        const rows_view& view;
        const row_blocks& blocks;
        row_bytes bytes{};
        int unit = 1;  ///< bytes of a scale

        const format_functions& functions() const { return view.rows.functions(); }
        /// Tokens of a block: those whose scales take turns have one each.
        int block_tokens() const { return bytes.together > 1 ? 1 : span_tokens; }
        /// f(address in memory, place in a block of n tokens of which this is number i, bytes)
        template <class F>
        void each_piece(const row_place& at, int t, int n, int i, F f) const {
            const std::ptrdiff_t block = at.blocks ? at.blocks[t / at.block_tokens] : 0,
                                 in = at.blocks ? t % at.block_tokens : t, turns = bytes.together;
            f(at.rows + block * at.block_stride + in * at.row_stride, i * bytes.row, bytes.row);
            if (bytes.scales == 0) return;
            const std::ptrdiff_t scale = block * at.scale_block_stride +
                                         in / turns * turns * at.scale_stride + in % turns,
                                 group = at.group_stride != 0 ? at.group_stride : larger(bytes.group, 1);
            const bool dense = group == unit;  // one behind the other: all at once, with what pads them
            const int behind = n * bytes.row + i * bytes.scales, piece = dense ? bytes.scales : unit,
                      all = bytes.scales - (dense ? 0 : bytes.padding);
            for (int g = 0; g * piece < all; ++g) {
                f(at.scales + scale + g * group, behind + g * piece, piece);
                if (bytes.biases > 0)
                    f(at.biases + scale + g * group, behind + n * bytes.scales + g * piece, piece);
            }
        }
        void gather(const row_place& at, int t, int n, std::byte* to) const {
            if (bytes.padding > 0)
                std::memset(to + n * bytes.row, 0, static_cast<std::size_t>(n * bytes.scales));
            for (int i = 0; i < n; ++i)
                each_piece(at, t + i, n, i, [&](const std::byte* from, int place, int size) {
                    std::memcpy(to + place, from, static_cast<std::size_t>(size));
                });
        }
        void scatter(const row_place& at, int t, int n, const std::byte* from) const {
            for (int i = 0; i < n; ++i)
                each_piece(at, t + i, n, i, [&](const std::byte* to, int place, int size) {
                    std::memcpy(const_cast<std::byte*>(to), from + place, static_cast<std::size_t>(size));
                });
        }
    };
    rows checked(const rows_view& view, const row_blocks& blocks, const char* name) const {
        expect(first >= 0 && tokens >= 0 && tokens <= INT_MAX - first && heads >= 1 && dim >= 1, name, " of ",
               tokens, " tokens from token ", first, " on, ", heads, " kv heads and ", dim, " channels");
        check_rows(view, name, blocks, tokens == 0 ? 0 : first + tokens,
                   {.layers = 1, .kv_heads = heads, .head_dim = dim, .value_dim = dim}, tensor::key);
        check_row_blocks(blocks, first, first + tokens);
        rows r{view, blocks};
        r.bytes = places_of(view).bytes(view.rows.scheme(), dim);
        r.unit = larger(r.bytes.group / r.bytes.together, 1);
        return r;
    }

    /// Memory of a task.
    struct space {
        std::byte *plan, *plan_space, *block;
        float *zeros, *products, *values, *scratch;
    };
    space carve(carver& memory, const rows* from, const rows* to) const {
        const auto span = static_cast<std::size_t>(span_tokens), row = static_cast<std::size_t>(dim);
        space s{};
        std::size_t block = 0;
        for (const rows* const r : {from, to})
            if (r)
                block = larger(block, r->functions().block_bytes(r->view.rows.scheme(),
                                                                 {tensor::key, span_tokens, dim}));
        if (from && !reads_floats(from->view)) {
            const format_functions& f = from->functions();
            s.plan = memory.take(f.plan_bytes);
            s.plan_space = memory.take(
                f.make_plan(from->view.rows.scheme(), {tensor::key, span_tokens, dim}, {}, 1, nullptr));
            s.zeros = memory.floats(row);
            s.products = memory.floats(span);
        }
        s.block = memory.take(block);
        s.values = memory.floats(span * row);
        s.scratch = memory.floats(span * row);
        return s;
    }

    /// Values of tokens [t, t + n) of a head, [n][dim].
    void read(const rows& from, int head, int t, int n, const space& s) {
        const format_functions& f = from.functions();
        const void* const scheme = from.view.rows.scheme();
        const row_place at = place_of(from.view, from.blocks, first + tokens, head);
        bool finite = true;
        if (reads_floats(from.view)) {
            finite = f.of_places.read(scheme, at, dim, t, n, s.values);
        } else {
            const block_id id{0, head};
            from.gather(at, t, n, s.block);
            f.dequantize(scheme, {tensor::key, n, dim}, id, s.block, float_type::fp32, s.values, dim,
                         s.scratch);
            finite = all_finite(s.values, n * dim) || finite_scales(from, at, id, t, n, s);
        }
        if (finite) return;
        const std::int64_t here = std::int64_t{head} << 32 | t;
        std::int64_t before = bad_scale.load();
        while (here < before && !bad_scale.compare_exchange_weak(before, here)) {
        }
    }
    static bool all_finite(const float* x, int n) {
        float zero = 0.0f;
        for (int i = 0; i < n; ++i) zero += x[i] * 0.0f;
        return zero == 0.0f;
    }
    /// Products say whether scales are finite, or only numbers are not.
    bool finite_scales(const rows& from, const row_place& at, const block_id& id, int t, int n,
                       const space& s) const {
        const format_functions& f = from.functions();
        const void* const scheme = from.view.rows.scheme();
        const block_shape span{tensor::key, span_tokens, dim};
        for (int c = 0; c < dim; ++c) s.zeros[c] = 0.0f;
        f.make_plan(scheme, span, id, 1, s.plan);
        f.begin(s.plan, span, id, nullptr, s.zeros, dim, s.plan_space);
        return f.of_places.keys(s.plan, at, t, n, s.products, span_tokens, s.plan_space);
    }
    void write(const rows& to, int head, int t, int n, const space& s) {
        const format_functions& f = to.functions();
        const row_place at = place_of(to.view, to.blocks, first + tokens, head);
        for (int i = 0; i < n; i += to.block_tokens()) {
            const int here = smaller(n - i, to.block_tokens());
            not_finite += f.quantize_values(to.view.rows.scheme(), {tensor::key, here, dim}, {0, head},
                                            s.values + std::ptrdiff_t{i} * dim, s.block);
            to.scatter(at, t + i, here, s.block);
        }
    }

    /// f(head, first token, tokens, memory) for spans of all heads.
    template <class F>
    void run(const rows* from, const rows* to, workspace& memory, executor_view threads, F f) {
        const int spans = ceil_div(tokens, span_tokens);
        const std::int64_t tasks = std::int64_t{heads} * spans;
        const int jobs = static_cast<int>(smaller(tasks, std::int64_t{larger(threads.concurrency(), 1)}));
        if (tasks == 0) return;
        carver size(nullptr);
        carve(size, from, to);
        const std::size_t bytes = size.used();
        std::byte* const all = memory.reserve(bytes * static_cast<std::size_t>(jobs));
        threads.parallel_for(jobs, [&](int job) {
            carver own(all + bytes * static_cast<std::size_t>(job));
            const space s = carve(own, from, to);
            for (std::int64_t task = job; task < tasks; task += jobs) {
                const int head = static_cast<int>(task / spans),
                          t = static_cast<int>(task % spans) * span_tokens;
                f(head, first + t, smaller(tokens - t, span_tokens), s);
            }
        });
        const std::int64_t bad = bad_scale.load();
        if (bad == none) return;
        const int t = static_cast<int>(bad & INT32_MAX), last = smaller(t + span_tokens, first + tokens) - 1;
        fail("rows of tokens ", t, " to ", last, " of kv head ", static_cast<int>(bad >> 32),
             " have a scale that is NaN or infinite");
    }
};

/// Have rows of both formats the same bytes for the same values? Layouts of one name are one layout.
KVQ_FUNC bool same_rows(const format& a, const format& b) {
    const format_record &x = a.record(), &y = b.record();
    return a.same_as(b) || (x.has_fingerprint && y.has_fingerprint && x.fingerprint == y.fingerprint &&
                            std::string_view(x.name) == y.name);
}

}  // namespace detail

KVQ_FUNC void read_rows(const rows_view& rows, const row_blocks& blocks, int first, output_view out,
                        workspace& memory, executor_view threads) {
    detail::rows_copy of{first, out.tokens, out.heads, out.dim};
    const auto from = of.checked(rows, blocks, "rows");
    of.run(&from, nullptr, memory, threads, [&](int head, int t, int n, const auto& space) {
        of.read(from, head, t, n, space);
        for (int i = 0; i < n; ++i)
            out.store(t - first + i, head, space.values + std::ptrdiff_t{i} * out.dim);
    });
}

KVQ_FUNC std::int64_t write_rows(const rows_view& rows, const row_blocks& blocks, int first, input_view x,
                                 workspace& memory, executor_view threads) {
    detail::rows_copy of{first, x.tokens, x.heads, x.dim};
    const auto to = of.checked(rows, blocks, "rows");
    of.run(nullptr, &to, memory, threads, [&](int head, int t, int n, const auto& space) {
        for (int i = 0; i < n; ++i)
            rows.rows.functions().backend->load_query(x.type, x.at(t - first + i, head), x.dim, 1.0f,
                                                      space.values + std::ptrdiff_t{i} * x.dim);
        of.write(to, head, t, n, space);
    });
    return of.not_finite;
}

KVQ_FUNC std::int64_t convert_rows(const rows_view& from, const row_blocks& of_from, const rows_view& to,
                                   const row_blocks& of_to, const rows_shape& shape, workspace& memory,
                                   executor_view threads) {
    detail::rows_copy of{0, shape.tokens, shape.kv_heads, shape.head_dim};
    const auto source = of.checked(from, of_from, "rows that are read"),
               target = of.checked(to, of_to, "rows that are written");
    const bool copies = detail::same_rows(from.rows, to.rows);
    of.run(&source, &target, memory, threads, [&](int head, int t, int n, const auto& space) {
        if (!copies) {
            of.read(source, head, t, n, space);
            of.write(target, head, t, n, space);
            return;
        }
        const row_place in = detail::place_of(from, of_from, shape.tokens, head),
                        out = detail::place_of(to, of_to, shape.tokens, head);
        source.gather(in, t, n, space.block);
        target.scatter(out, t, n, space.block);
    });
    return of.not_finite;
}

}}  // namespace kvq
