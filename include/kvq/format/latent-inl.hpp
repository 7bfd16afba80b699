// Definitions of latent.hpp.
#pragma once

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "../core/bits.hpp"
#include "../core/error.hpp"
#include "../core/text.hpp"
#include "../schemes/full.hpp"
#include "format_names.hpp"
#include "latent.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

/// Parts of a plan or a workspace begin at cache lines.
constexpr std::size_t whole_lines(std::size_t bytes) noexcept { return round_up(bytes, std::size_t{64}); }

/// A plan of products of weights with the first `channels` channels of blocks of keys: on the codes or values
/// of a block, or on x^, to which it is dequantized in the workspace. The plan of the product that runs
/// follows.
struct alignas(64) key_values_product {
    const format* keys;
    int dim, channels;  ///< of a key, of a value
    int rows;
    bool in_place;

    static std::size_t plan_bytes(const format& keys) {
        return sizeof(key_values_product) + whole_lines(larger(keys.functions().key_values_plan_bytes,
                                                               x_format(keys).functions().plan_bytes));
    }
    /// Is there a product on the blocks themselves?
    static bool reads_keys(const format& keys, const block_shape& shape, int channels) {
        const format_functions& f = keys.functions();
        return f.plan_key_values && f.plan_key_values(keys.scheme(), shape, {}, channels, 1, nullptr) > 0;
    }
    /// Writes plan_bytes() to `plan` unless it is null; returns the bytes of workspace.
    static std::size_t make(const format& keys, const block_shape& shape, block_id id, int channels, int rows,
                            void* plan) {
        const key_values_product p{&keys, shape.dim, channels, rows, reads_keys(keys, shape, channels)};
        void* const product = plan ? static_cast<std::byte*>(plan) + sizeof p : nullptr;
        if (plan) ::new (plan) key_values_product(p);
        if (p.in_place)
            return keys.functions().plan_key_values(keys.scheme(), shape, id, channels, rows, product);
        const format& x = x_format(keys);
        return p.find_places(shape.tokens).product +
               x.functions().make_plan(x.scheme(), p.values_of(shape.tokens), id, rows, product);
    }

    void begin(int tokens, block_id id, const std::byte* block, const float* x, std::ptrdiff_t x_stride,
               std::byte* workspace) const {
        if (in_place)
            keys->functions().begin_key_values(this + 1, values_of(tokens), id, block, x, x_stride,
                                               workspace);
    }
    void finish(int tokens, block_id id, const std::byte* block, const float* x, std::ptrdiff_t x_stride,
                int cols, float* y, std::ptrdiff_t y_stride, bool add, std::ptrdiff_t ahead,
                std::byte* workspace) const {
        const block_shape values = values_of(tokens), shape{tensor::key, tokens, dim};
        if (in_place)
            return keys->functions().finish_key_values(this + 1, values, id, block, x, x_stride, channels,
                                                       cols, y, y_stride, add, ahead, workspace);
        const format_functions& f = x_format(*keys).functions();
        const places at = find_places(tokens);
        auto* const rows_of_x = reinterpret_cast<float*>(workspace + at.x);
        keys->functions().dequantize(keys->scheme(), shape, id, block, float_type::fp32, rows_of_x, dim,
                                     rows_of_x);
        // Odd tokens, and channels that are no multiple of 4, leave gaps.
        if (cols % 2 != 0 || channels % 4 != 0)
            std::memset(workspace, 0, x_format(*keys).block_bytes(values));
        const std::uint32_t beyond =
            f.write_tokens(values, workspace, float_type::fp32, rows_of_x, dim, cols, 0);
        if (!keys->holds_values() && (beyond > 0 || !reaches_normal(rows_of_x, cols)))
            return multiply_floats(rows_of_x, x, x_stride, cols, y, y_stride, add);
        f.begin(this + 1, values, id, workspace, x, x_stride, workspace + at.product);
        f.finish(this + 1, values, id, workspace, x, x_stride, channels, cols, y, y_stride, add, 0,
                 workspace + at.product);
    }

private:
    /// A workspace: a block of values, rows of dequantized keys, the workspace of a product with this block.
    struct places {
        std::size_t x, product;
    };

    /// Of x^.
    static const format& x_format(const format& keys) {
        return keys.holds_values() ? keys : keys.functions().backend->fp16();
    }
    block_shape values_of(int tokens) const noexcept { return {tensor::value, tokens, channels}; }
    places find_places(int tokens) const {
        const format& x = x_format(*keys);
        const std::size_t all = block_shape{tensor::key, tokens, dim}.values();
        places p{};
        p.x = whole_lines(x.block_bytes(values_of(tokens)));
        p.product = p.x + whole_lines(all * sizeof(float));
        return p;
    }
    /// Is one of the values as large as the normal numbers of fp16? Else rounding loses more of all of them
    /// than of larger ones.
    bool reaches_normal(const float* rows_of_x, int cols) const {
        constexpr float least = 0x1p-14f;
        for (int t = 0; t < cols; ++t, rows_of_x += dim)
            for (int c = 0; c < channels; ++c)
                if (rows_of_x[c] >= least || rows_of_x[c] <= -least) return true;
        return false;
    }
    /// Of keys that fp16 does not hold.
    void multiply_floats(const float* rows_of_x, const float* x, std::ptrdiff_t x_stride, int cols, float* y,
                         std::ptrdiff_t y_stride, bool add) const {
        for (int i = 0; i < rows; ++i, x += x_stride, y += y_stride) {
            for (int c = 0; c < channels && !add; ++c) y[c] = 0.0f;
            for (int t = 0; t < cols; ++t)
                for (int c = 0; c < channels; ++c) y[c] += x[t] * rows_of_x[std::ptrdiff_t{t} * dim + c];
        }
    }
};

/// Room for the last 64 channels of 128 tokens; more take further passes.
using spare_rows = float[8192];

/// Values [tokens][first + last] to [tokens][first], then [tokens][last]. O(values log tokens)
KVQ_FUNC void split_rows(float* values, int tokens, int first, int last, spare_rows& spare) {
    const std::ptrdiff_t n = first, m = last, all = n + m;
    if (tokens == 1) return;
    if (tokens * m > std::ssize(spare)) {
        const int half = tokens / 2;
        float* const rest = values + half * all;
        split_rows(values, half, first, last, spare);
        split_rows(rest, tokens - half, first, last, spare);
        std::rotate(values + half * n, rest, rest + (tokens - half) * n);
        return;
    }
    for (std::ptrdiff_t t = 0; t < tokens; ++t) {
        std::copy_n(values + t * all + n, m, spare + t * m);
        if (t > 0) std::copy_n(values + t * all, n, values + t * n);
    }
    std::copy_n(spare, tokens * m, values + tokens * n);
}
/// And back.
KVQ_FUNC void join_rows(float* values, int tokens, int first, int last, spare_rows& spare) {
    const std::ptrdiff_t n = first, m = last, all = n + m;
    if (tokens == 1) return;
    if (tokens * m > std::ssize(spare)) {
        const int half = tokens / 2;
        float* const rest = values + half * all;
        std::rotate(values + half * n, values + tokens * n, values + tokens * n + half * m);
        join_rows(values, half, first, last, spare);
        join_rows(rest, tokens - half, first, last, spare);
        return;
    }
    std::copy_n(values + tokens * n, tokens * m, spare);
    for (std::ptrdiff_t t = tokens - 1; t >= 0; --t) {
        if (t > 0) std::copy_backward(values + t * n, values + (t + 1) * n, values + t * all + n);
        std::copy_n(spare + t * m, m, values + t * all + n);
    }
}

/// The functions of a format whose last channels are in another one. The state is the record itself.
struct last_channels_record : format_record {
    format inner, outer;
    int channels;
    format_functions table;
    short_text held_name;

    last_channels_record(format of, format of_last, int n)
        : inner(std::move(of)),
          outer(std::move(of_last)),
          channels(n),
          table(inner.functions()),
          held_name(inner.name()) {
        const short_text ending = short_text("-") + short_text(last_channels_name_of(outer.name())) +
                                  short_text("x") + short_text::of(channels);
        held_name += ending;
        functions = &table;
        scheme = this;
        name = held_name.c_str();
        const std::string asked = inner.asked_name() + std::string(ending);
        if (inner.record().asked_name[0] != '\0' && asked.size() < sizeof(asked_name))
            std::memcpy(asked_name, asked.c_str(), asked.size() + 1);
        has_state = inner.record().has_state;
        has_fingerprint = inner.record().has_fingerprint;
        fingerprint = inner.record().fingerprint;
        destroy = [](format_record* self) { delete static_cast<last_channels_record*>(self); };

        table.values = false;
        table.begins_once[0] = table.begins_once[0] && outer.functions().begins_once[0];
        table.holds_values = false;
        table.plans = nullptr;
        table.write_tokens = nullptr;
        table.estimate_scores = nullptr;  // of a part of the channels it bounds no score: with_bounds() does
        table.estimate_floats = nullptr;
        table.estimates_first = false;
        table.plan_bytes = plan_at(2);
        table.check = [](const void* self, const cache_shape& shape, tensor role) {
            const last_channels_record& r = of_state(self);
            if (shape.head_dim <= r.channels)
                fail(r.asked_name[0] == '\0' ? r.name : r.asked_name, " has ", r.channels, " channels in ",
                     last_channels_name_of(r.outer.name()), ", and a layer of the cache has keys of ",
                     shape.head_dim);
            cache_shape part = shape;
            part.head_dim -= r.channels;
            r.inner.functions().check(r.inner.scheme(), part, role);
            part.head_dim = r.channels;
            r.outer.functions().check(r.outer.scheme(), part, role);
        };
        table.block_bytes = [](const void* self, const block_shape& shape) {
            const last_channels_record& r = of_state(self);
            return r.inner.block_bytes(r.first(shape)) + r.outer.block_bytes(r.last(shape));
        };
        table.code_bytes = [](const void* self, const block_shape& shape) {
            const last_channels_record& r = of_state(self);
            return r.inner.functions().code_bytes(r.inner.scheme(), r.first(shape)) +
                   r.outer.functions().code_bytes(r.outer.scheme(), r.last(shape));
        };
        table.quantize = &quantize;
        table.quantize_values = [](const void* self, const block_shape& shape, block_id id, float* values,
                                   std::byte* block) {
            const last_channels_record& r = of_state(self);
            const std::uint32_t found = r.quantize_last(shape, id, values, block);
            return found +
                   r.inner.functions().quantize_values(r.inner.scheme(), r.first(shape), id, values, block);
        };
        table.requantize_values = [](const void* self, const block_shape& shape, block_id id, float* values,
                                     float* token_scales, std::byte* block) {
            const last_channels_record& r = of_state(self);
            const std::uint32_t found = r.quantize_last(shape, id, values, block);
            return found + r.inner.functions().requantize_values(r.inner.scheme(), r.first(shape), id, values,
                                                                 token_scales, block);
        };
        if (table.read_token_scales)
            table.read_token_scales = [](const void* self, const block_shape& shape, const std::byte* block,
                                         float* scales) {
                const last_channels_record& r = of_state(self);
                r.inner.functions().read_token_scales(r.inner.scheme(), r.first(shape), block, scales);
            };
        table.dequantize = &dequantize;
        table.dequantize_tokens = [](const void* self, const block_shape& shape, block_id id,
                                     const std::byte* block, const std::int32_t* tokens, int count,
                                     float* out, std::ptrdiff_t stride, float* scratch) {
            const last_channels_record& r = of_state(self);
            r.inner.functions().dequantize_tokens(r.inner.scheme(), r.first(shape), id, block, tokens, count,
                                                  out, stride, scratch);
            r.outer.functions().dequantize_tokens(r.outer.scheme(), r.last(shape), id,
                                                  block + r.last_at(shape), tokens, count,
                                                  out + shape.dim - r.channels, stride, scratch);
        };
        table.make_plan = &make_plan;
        table.begin = &begin;
        table.finish = &finish;
        table.describe = [](const void* self, const block_shape& shape, float_type window) {
            const last_channels_record& r = of_state(self);
            format_description d = r.inner.functions().describe(r.inner.scheme(), r.first(shape), window);
            const format_description last =
                r.outer.functions().describe(r.outer.scheme(), r.last(shape), window);
            const auto both = [](bool& fast, format_description::text& by, bool other,
                                 const format_description::text& other_by) {
                if (fast && !other) std::memcpy(by, other_by, sizeof by);
                fast = fast && other;
            };
            both(d.quantize, d.quantize_by, last.quantize, last.quantize_by);
            both(d.dequantize, d.dequantize_by, last.dequantize, last.dequantize_by);
            both(d.attend, d.attend_by, last.attend, last.attend_by);
            return d;
        };
        if (table.plan_key_values) {
            table.key_values_plan_bytes = values_plan_at(1) + key_values_product::plan_bytes(outer);
            table.plan_key_values = &plan_key_values;
            table.begin_key_values = &begin_key_values;
            table.finish_key_values = &finish_key_values;
        }
        if (!table.transforms) return;
        table.transform_query = [](const void* self, const block_shape& shape, block_id id, float* x,
                                   std::ptrdiff_t stride, int count) {
            const last_channels_record& r = of_state(self);
            r.inner.functions().transform_query(r.inner.scheme(), r.first(shape), id, x, stride, count);
        };
        table.restore_output = [](const void* self, const block_shape& shape, block_id id, float* y,
                                  std::ptrdiff_t stride, int count) {
            const last_channels_record& r = of_state(self);
            r.inner.functions().restore_output(r.inner.scheme(), r.first(shape), id, y, stride, count);
        };
    }

private:
    static const last_channels_record& of_state(const void* self) noexcept {
        return *static_cast<const last_channels_record*>(self);
    }
    block_shape first(const block_shape& s) const noexcept { return {s.role, s.tokens, s.dim - channels}; }
    block_shape last(const block_shape& s) const noexcept { return {s.role, s.tokens, channels}; }
    std::size_t last_at(const block_shape& s) const { return inner.block_bytes(first(s)); }

    /// A plan is [record and bytes of the inner workspace][plan of the inner format][plan of the last
    /// channels].
    struct plan_head {
        const last_channels_record* of;
        std::size_t inner_workspace;
    };
    std::size_t plan_at(int part) const {
        const std::size_t sizes[] = {sizeof(plan_head), inner.functions().plan_bytes,
                                     outer.functions().plan_bytes};
        std::size_t at = 0;
        for (int i = 0; i <= part; ++i) at += whole_lines(sizes[i]);
        return at;
    }

    /// Quantizes the last channels of values [tokens][dim], and leaves the others as [tokens][dim -
    /// channels].
    std::uint32_t quantize_last(const block_shape& shape, block_id id, float* values,
                                std::byte* block) const {
        const int n = shape.dim - channels;
        spare_rows spare;
        split_rows(values, shape.tokens, n, channels, spare);
        return outer.functions().quantize_values(outer.scheme(), last(shape), id,
                                                 values + std::ptrdiff_t{n} * shape.tokens,
                                                 block + last_at(shape));
    }

    static std::uint32_t quantize(const void* self, const block_shape& shape, block_id id, float_type type,
                                  const std::byte* from, std::byte* block, float* scratch) {
        const last_channels_record& r = of_state(self);
        visit_float_type(type, [&]<class T>(T) {
            if constexpr (std::is_same_v<T, float16>) {
                const format& fp16 = r.inner.functions().backend->fp16();
                fp16.functions().dequantize(fp16.scheme(), shape, id, from, float_type::fp32, scratch,
                                            shape.dim, scratch);
            } else {
                full<T>{}.dequantize(shape, id, from, scratch);
            }
        });
        return r.table.quantize_values(self, shape, id, scratch, block);
    }

    static void dequantize(const void* self, const block_shape& shape, block_id id, const std::byte* block,
                           float_type type, void* out, std::ptrdiff_t stride, float* scratch) {
        const last_channels_record& r = of_state(self);
        const block_shape first = r.first(shape), last = r.last(shape);
        const auto read = [&](const format& f, const block_shape& part, const std::byte* from, void* to,
                              std::ptrdiff_t to_stride, float* room) {
            f.functions().dequantize(f.scheme(), part, id, from, type, to, to_stride, room);
        };
        // Rows that are dequantized in place have no room for the scratch of a part between them.
        if (out == scratch) {
            float* const behind = scratch + first.values();
            read(r.inner, first, block, scratch, first.dim, scratch);
            read(r.outer, last, block + r.last_at(shape), behind, last.dim, behind);
            spare_rows spare;
            join_rows(scratch, shape.tokens, first.dim, last.dim, spare);
        } else {
            read(r.inner, first, block, out, stride, scratch);
            read(r.outer, last, block + r.last_at(shape),
                 static_cast<std::byte*>(out) + static_cast<std::size_t>(first.dim) * size_of(type), stride,
                 scratch);
        }
    }

    static std::size_t make_plan(const void* self, const block_shape& shape, block_id id, int rows,
                                 void* plan) {
        const last_channels_record& r = of_state(self);
        auto* const at = static_cast<std::byte*>(plan);
        const auto part = [&](int i) -> void* { return at ? at + r.plan_at(i) : nullptr; };
        const std::size_t inner_bytes =
            whole_lines(r.inner.functions().make_plan(r.inner.scheme(), r.first(shape), id, rows, part(0)));
        if (at) ::new (plan) plan_head{&r, inner_bytes};
        return inner_bytes +
               r.outer.functions().make_plan(r.outer.scheme(), r.last(shape), id, rows, part(1));
    }
    static void begin(const void* plan, const block_shape& shape, block_id id, const std::byte* block,
                      const float* x, std::ptrdiff_t x_stride, std::byte* workspace) {
        const auto& [r, inner_workspace] = *static_cast<const plan_head*>(plan);
        const auto* const at = static_cast<const std::byte*>(plan);
        const block_shape first = r->first(shape);
        r->inner.functions().begin(at + r->plan_at(0), first, id, block, x, x_stride, workspace);
        r->outer.functions().begin(at + r->plan_at(1), r->last(shape), id, block + r->last_at(shape),
                                   x + first.dim, x_stride, workspace + inner_workspace);
    }
    static void finish(const void* plan, const block_shape& shape, block_id id, const std::byte* block,
                       const float* x, std::ptrdiff_t x_stride, int rows, int, float* y,
                       std::ptrdiff_t y_stride, bool add, std::ptrdiff_t ahead, std::byte* workspace) {
        const auto& [r, inner_workspace] = *static_cast<const plan_head*>(plan);
        const auto* const at = static_cast<const std::byte*>(plan);
        const block_shape first = r->first(shape);
        r->inner.functions().finish(at + r->plan_at(0), first, id, block, x, x_stride, rows, first.dim, y,
                                    y_stride, add, ahead, workspace);
        r->outer.functions().finish(at + r->plan_at(1), r->last(shape), id, block + r->last_at(shape),
                                    x + first.dim, x_stride, rows, r->channels, y, y_stride, true, ahead,
                                    workspace + inner_workspace);
    }

    /// A plan of values is [head][that of the inner format][key_values_product of the last channels].
    struct values_head {
        const last_channels_record* of;
        int inner_dim, inner_channels, last_channels;
        std::size_t inner_workspace;
    };
    std::size_t values_plan_at(int part) const {
        return whole_lines(sizeof(values_head)) +
               (part == 0 ? 0 : whole_lines(inner.functions().key_values_plan_bytes));
    }
    static std::size_t plan_key_values(const void* self, const block_shape& keys, block_id id, int channels,
                                       int rows, void* plan) {
        const last_channels_record& r = of_state(self);
        const block_shape first = r.first(keys);
        const int of_inner = smaller(channels, first.dim), of_last = channels - of_inner;
        auto* const at = static_cast<std::byte*>(plan);
        const std::size_t bytes = r.inner.functions().plan_key_values(
            r.inner.scheme(), first, id, of_inner, rows, at ? at + r.values_plan_at(0) : nullptr);
        if (bytes == 0) return 0;
        if (at) ::new (plan) values_head{&r, first.dim, of_inner, of_last, whole_lines(bytes)};
        if (of_last == 0) return bytes;
        return whole_lines(bytes) + key_values_product::make(r.outer, r.last(keys), id, of_last, rows,
                                                             at ? at + r.values_plan_at(1) : nullptr);
    }
    static void begin_key_values(const void* plan, const block_shape& shape, block_id id,
                                 const std::byte* block, const float* x, std::ptrdiff_t x_stride,
                                 std::byte* workspace) {
        const auto& head = *static_cast<const values_head*>(plan);
        head.of->inner.functions().begin_key_values(
            static_cast<const std::byte*>(plan) + head.of->values_plan_at(0),
            {tensor::value, shape.tokens, head.inner_channels}, id, block, x, x_stride, workspace);
    }
    static void finish_key_values(const void* plan, const block_shape& shape, block_id id,
                                  const std::byte* block, const float* x, std::ptrdiff_t x_stride, int,
                                  int cols, float* y, std::ptrdiff_t y_stride, bool add, std::ptrdiff_t ahead,
                                  std::byte* workspace) {
        const auto& head = *static_cast<const values_head*>(plan);
        const last_channels_record& r = *head.of;
        const auto* const at = static_cast<const std::byte*>(plan);
        r.inner.functions().finish_key_values(
            at + r.values_plan_at(0), {tensor::value, shape.tokens, head.inner_channels}, id, block, x,
            x_stride, head.inner_channels, cols, y, y_stride, add, ahead, workspace);
        if (head.last_channels == 0) return;
        block += r.inner.block_bytes({tensor::key, shape.tokens, head.inner_dim});
        const auto& last = *reinterpret_cast<const key_values_product*>(at + r.values_plan_at(1));
        last.begin(shape.tokens, id, block, x, x_stride, workspace + head.inner_workspace);
        last.finish(shape.tokens, id, block, x, x_stride, cols, y + head.inner_channels, y_stride, add, ahead,
                    workspace + head.inner_workspace);
    }
};

/// The functions of the values of a latent layer. The state is the record itself.
struct latent_values_record : format_record {
    format keys;
    int key_dim;
    format_functions table{};

    latent_values_record(format of, int of_key, int of_value) : keys(std::move(of)), key_dim(of_key) {
        functions = &table;
        scheme = this;
        name = keys.name();
        destroy = [](format_record* self) { delete static_cast<latent_values_record*>(self); };
        table.backend = keys.functions().backend;
        table.values = true;
        table.begins_once[1] = true;
        table.value_type = keys.functions().value_type;
        table.holds_values = keys.holds_values();
        table.plan_bytes = key_values_product::plan_bytes(keys);
        table.block_bytes = [](const void* self, const block_shape& shape) {
            const latent_values_record& r = of_state(self);
            return r.keys.block_bytes(r.key_block(shape));
        };
        table.make_plan = [](const void* self, const block_shape& shape, block_id id, int rows, void* plan) {
            const latent_values_record& r = of_state(self);
            return key_values_product::make(r.keys, r.key_block(shape), id, shape.dim, rows, plan);
        };
        table.begin = [](const void* plan, const block_shape& shape, block_id id, const std::byte* block,
                         const float* x, std::ptrdiff_t x_stride, std::byte* workspace) {
            static_cast<const key_values_product*>(plan)->begin(shape.tokens, id, block, x, x_stride,
                                                                workspace);
        };
        table.finish = [](const void* plan, const block_shape& shape, block_id id, const std::byte* block,
                          const float* x, std::ptrdiff_t x_stride, int, int cols, float* y,
                          std::ptrdiff_t y_stride, bool add, std::ptrdiff_t ahead, std::byte* workspace) {
            static_cast<const key_values_product*>(plan)->finish(shape.tokens, id, block, x, x_stride, cols,
                                                                 y, y_stride, add, ahead, workspace);
        };
        // Keys that are dequantized are restored at once.
        table.transforms = keys.functions().transforms &&
                           key_values_product::reads_keys(keys, {tensor::key, 1, key_dim}, of_value);
        table.restore_output = [](const void* self, const block_shape& shape, block_id id, float* y,
                                  std::ptrdiff_t stride, int count) {
            const latent_values_record& r = of_state(self);
            r.keys.functions().restore_output(r.keys.scheme(), r.key_block(shape), id, y, stride, count);
        };
    }

private:
    static const latent_values_record& of_state(const void* self) noexcept {
        return *static_cast<const latent_values_record*>(self);
    }
    block_shape key_block(const block_shape& s) const noexcept { return {tensor::key, s.tokens, key_dim}; }
};

KVQ_FUNC format values_of_keys(const format& keys, int key_dim, int value_dim) {
    return format(new latent_values_record(keys, key_dim, value_dim == 0 ? key_dim : value_dim));
}

}  // namespace detail

KVQ_FUNC format with_last_channels(const format& f, const format& last, int channels) {
    detail::expect(f && last, "with_last_channels takes two formats, not an empty one");
    const char* const name = detail::last_channels_name_of(last.name());
    detail::expect(name[0] != '\0', "last channels are in fp16, int8 or ref8, not in ", format_text(last));
    detail::expect(channels >= 0, "a key has at least 0 channels in ", name, ", not ", channels);
    if (channels == 0 || !f.supports(tensor::key)) return f;
    const auto refuse = [&](auto... reason) {
        detail::fail(format_text(f), " cannot get ", channels, " channels in ", name, ": ", reason...);
    };
    if (f.functions().upper) refuse("it has two planes");
    if (!detail::name_before_bounds(f.name()).empty() || detail::last_channels_of(f.name()).channels > 0)
        refuse("they come once, and before bounds, as in std4-fp16x64-bounds");
    if (!same_tiles(*f.functions().backend, *last.functions().backend))
        refuse("its backend is ", f.backend(), ", and theirs ", last.backend());
    return format(new detail::last_channels_record(f, last, channels));
}

KVQ_FUNC format with_fp16_channels(const format& f, int channels) {
    detail::expect(static_cast<bool>(f), "with_fp16_channels takes a format, not an empty one");
    return with_last_channels(f, f.functions().backend->fp16(), channels);
}

}}
