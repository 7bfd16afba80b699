// Definitions of bounds.hpp.
#pragma once

#include <cstdio>
#include <cstring>
#include <string_view>
#include <utility>

#include "../core/bits.hpp"
#include "../core/error.hpp"
#include "../core/float_formats.hpp"
#include "../core/text.hpp"
#include "bounds.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

/// The functions of a format with bounds. The state is the record itself.
struct bounded_record : format_record {
    format inner;
    format_functions table;
    short_text held_name;

    explicit bounded_record(format of)
        : inner(std::move(of)), table(inner.functions()), held_name(inner.name()) {
        held_name += "-bounds";
        functions = &table;
        scheme = this;
        name = held_name.c_str();
        if (inner.record().asked_name[0] != '\0') {
            short_text asked = inner.asked_name();
            asked += "-bounds";
            const std::string_view text = asked.c_str();
            if (text.size() < sizeof(asked_name)) std::memcpy(asked_name, text.data(), text.size() + 1);
        }
        has_state = inner.record().has_state;
        has_fingerprint = inner.record().has_fingerprint;
        fingerprint = inner.record().fingerprint;
        destroy = [](format_record* self) { delete static_cast<bounded_record*>(self); };

        table.holds_values = false;
        table.plans = nullptr;
        table.write_tokens = nullptr;
        table.estimates_first = true;
        table.check = [](const void* self, const cache_shape& shape, tensor role) {
            functions_of(self).check(state_of(self), shape, role);
        };
        table.block_bytes = [](const void* self, const block_shape& shape) {
            return inner_bytes(self, shape) + bounds_bytes(shape);
        };
        table.code_bytes = [](const void* self, const block_shape& shape) {
            return functions_of(self).code_bytes(state_of(self), shape);
        };
        table.quantize = &quantize;
        table.quantize_values = [](const void* self, const block_shape& shape, block_id id, float* values,
                                   std::byte* block) {
            const auto found = functions_of(self).quantize_values(state_of(self), shape, id, values, block);
            add_bounds(self, shape, id, block, values);
            return found;
        };
        table.requantize_values = [](const void* self, const block_shape& shape, block_id id, float* values,
                                     float* token_scales, std::byte* block) {
            const auto found =
                functions_of(self).requantize_values(state_of(self), shape, id, values, token_scales, block);
            add_bounds(self, shape, id, block, values);
            return found;
        };
        if (table.read_token_scales)
            table.read_token_scales = [](const void* self, const block_shape& shape, const std::byte* block,
                                         float* scales) {
                functions_of(self).read_token_scales(state_of(self), shape, block, scales);
            };
        table.dequantize = [](const void* self, const block_shape& shape, block_id id, const std::byte* block,
                              float_type type, void* out, std::ptrdiff_t stride, float* scratch) {
            functions_of(self).dequantize(state_of(self), shape, id, block, type, out, stride, scratch);
        };
        table.dequantize_tokens = [](const void* self, const block_shape& shape, block_id id,
                                     const std::byte* block, const std::int32_t* tokens, int n, float* out,
                                     std::ptrdiff_t stride, float* scratch) {
            functions_of(self).dequantize_tokens(state_of(self), shape, id, block, tokens, n, out, stride,
                                                 scratch);
        };
        // The plan holds the inner scheme, so begin and finish are those of the inner format.
        table.make_plan = [](const void* self, const block_shape& shape, block_id id, int rows, void* plan) {
            return functions_of(self).make_plan(state_of(self), shape, id, rows, plan);
        };
        if (table.plan_key_values)
            table.plan_key_values = [](const void* self, const block_shape& keys, block_id id, int channels,
                                       int rows, void* plan) {
                return functions_of(self).plan_key_values(state_of(self), keys, id, channels, rows, plan);
            };
        table.estimate_scores = [](const void* self, const block_shape& shape, block_id,
                                   const std::byte* block, const float* x, std::ptrdiff_t x_stride, int rows,
                                   int, int, float spread, float* out, std::ptrdiff_t ahead, float* scratch) {
            functions_of(self).backend->estimate_within(block + inner_bytes(self, shape), shape.dim, x,
                                                        x_stride, rows, spread, out, ahead, scratch);
        };
        table.estimate_floats = [](const void* self, const block_shape& shape) {
            return functions_of(self).backend->estimate_floats(shape.dim);
        };
        table.describe = [](const void* self, const block_shape& shape, float_type window) {
            format_description d = functions_of(self).describe(state_of(self), shape, window);
            if (!functions_of(self).holds_values) return d;
            d.quantize = functions_of(self).value_type == window;
            std::snprintf(d.quantize_by, sizeof(d.quantize_by), "%s",
                          d.quantize
                              ? "format/bounds-inl.hpp"
                              : "portable: values of another type than the window's are rounded one by one");
            return d;
        };
        if (!table.transforms) return;
        table.transform_query = [](const void* self, const block_shape& shape, block_id id, float* x,
                                   std::ptrdiff_t stride, int count) {
            functions_of(self).transform_query(state_of(self), shape, id, x, stride, count);
        };
        table.restore_output = [](const void* self, const block_shape& shape, block_id id, float* y,
                                  std::ptrdiff_t stride, int count) {
            functions_of(self).restore_output(state_of(self), shape, id, y, stride, count);
        };
    }

private:
    static const format& of(const void* self) noexcept {
        return static_cast<const bounded_record*>(self)->inner;
    }
    static const format_functions& functions_of(const void* self) noexcept { return of(self).functions(); }
    static const void* state_of(const void* self) noexcept { return of(self).scheme(); }
    static std::size_t inner_bytes(const void* self, const block_shape& shape) {
        return functions_of(self).block_bytes(state_of(self), shape);
    }
    static std::size_t bounds_bytes(const block_shape& shape) noexcept {
        return shape.role == tensor::key ? round_up(4 * static_cast<std::size_t>(shape.dim), std::size_t{16})
                                         : 0;
    }
    static std::uint32_t quantize(const void* self, const block_shape& shape, block_id id, float_type type,
                                  const std::byte* from, std::byte* block, float* scratch) {
        const format_functions& f = functions_of(self);
        std::uint32_t not_finite = 0;
        if (f.holds_values && f.value_type == type) {
            std::memcpy(block, from, inner_bytes(self, shape));
            f.dequantize(state_of(self), shape, id, block, float_type::fp32, scratch, shape.dim, scratch);
            for (std::size_t i = 0; i < shape.values(); ++i) not_finite += !is_finite(scratch[i]);
        } else {
            not_finite = f.quantize(state_of(self), shape, id, type, from, block, scratch);
        }
        add_bounds(self, shape, id, block, scratch);
        return not_finite;
    }
    /// scratch: shape.values() floats.
    static void add_bounds(const void* self, const block_shape& shape, block_id id, std::byte* block,
                           float* scratch) {
        if (shape.role != tensor::key) return;
        const format_functions& f = functions_of(self);
        f.dequantize(state_of(self), shape, id, block, float_type::fp32, scratch, shape.dim, scratch);
        std::byte* const bounds = block + inner_bytes(self, shape);
        f.backend->find_bounds(scratch, shape.tokens, shape.dim, bounds);
        const std::size_t written = 4 * static_cast<std::size_t>(shape.dim);
        std::memset(bounds + written, 0, bounds_bytes(shape) - written);
    }
};

}  // namespace detail

KVQ_FUNC format with_bounds(const format& f) {
    detail::expect(static_cast<bool>(f), "with_bounds takes a format, not an empty one");
    detail::expect(!f.functions().upper, f.name(), " cannot get bounds: it has two planes");
    if (!f.supports(tensor::key) || f.functions().estimate_scores) return f;
    return format(new detail::bounded_record(f));
}

}}
