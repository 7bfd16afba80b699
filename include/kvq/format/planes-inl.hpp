// Definitions of planes.hpp.
#pragma once

#include <cstring>
#include <utility>
#include <vector>

#include "../core/bits.hpp"
#include "../core/error.hpp"
#include "../core/float_formats.hpp"
#include "../core/tagged_vector.hpp"
#include "../core/text.hpp"
#include "format_names.hpp"
#include "planes.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

/// The functions of a format with two planes. The state is the record itself. Without a lower plane in its
/// block_id every function is that of the upper format.
struct plane_record : format_record {
    format upper;
    format_functions table;
    short_text held_name;

    explicit plane_record(format of)
        : upper(std::move(of)), table(upper.functions()), held_name(upper.name()) {
        held_name += "-nested8";
        functions = &table;
        scheme = this;
        name = held_name.c_str();
        has_state = upper.record().has_state;
        has_fingerprint = upper.record().has_fingerprint;
        fingerprint = upper.record().fingerprint;
        destroy = [](format_record* self) { delete static_cast<plane_record*>(self); };

        table.planes = nullptr;
        table.plans = nullptr;
        table.plan_bytes = second_plan(upper.functions()) + upper.functions().planes->plan_bytes;
        table.of_places = {};
        table.key_values_plan_bytes = 0;
        table.plan_key_values = nullptr;
        table.estimate_scores =
            nullptr;  // of the upper plane they bound no score of both: with_bounds() does
        table.estimate_floats = nullptr;
        table.upper = [](const void* self) -> const format& { return of_self(self); };
        table.lower_bytes = &lower_bytes;
        table.check = [](const void* self, const cache_shape& shape, tensor role) {
            functions_of(self).check(state_of(self), shape, role);
        };
        table.block_bytes = [](const void* self, const block_shape& shape) {
            return upper_bytes(self, shape) + lower_bytes(self, shape);
        };
        table.code_bytes = [](const void* self, const block_shape& shape) {
            return functions_of(self).code_bytes(state_of(self), shape) + lower_bytes(self, shape);
        };
        table.quantize = &quantize;
        table.quantize_values = [](const void* self, const block_shape& shape, block_id id, float* values,
                                   std::byte* block) {
            common_vector<float> kept = copy_of(values, shape);
            const auto found = functions_of(self).quantize_values(state_of(self), shape, id, values, block);
            write_lower(self, shape, id, block, kept.data());
            return found;
        };
        table.requantize_values = [](const void* self, const block_shape& shape, block_id id, float* values,
                                     float* token_scales, std::byte* block) {
            common_vector<float> kept = copy_of(values, shape);
            const auto found =
                functions_of(self).requantize_values(state_of(self), shape, id, values, token_scales, block);
            write_lower(self, shape, id, block, kept.data());
            return found;
        };
        if (table.read_token_scales)
            table.read_token_scales = [](const void* self, const block_shape& shape, const std::byte* block,
                                         float* scales) {
                functions_of(self).read_token_scales(state_of(self), shape, block, scales);
            };
        table.dequantize = &dequantize;
        table.dequantize_tokens = &dequantize_tokens;
        table.make_plan = &make_plan;
        table.begin = [](const void* plan, const block_shape& shape, block_id id, const std::byte* block,
                         const float* x, std::ptrdiff_t x_stride, std::byte* workspace) {
            const plan_head& head = *static_cast<const plan_head*>(plan);
            const auto begin = id.lower ? head.functions->planes->begin : head.functions->begin;
            begin(head.plan_of(id), shape, id, block, x, x_stride, workspace);
        };
        table.finish = [](const void* plan, const block_shape& shape, block_id id, const std::byte* block,
                          const float* x, std::ptrdiff_t x_stride, int rows, int cols, float* y,
                          std::ptrdiff_t y_stride, bool add, std::ptrdiff_t ahead, std::byte* workspace) {
            const plan_head& head = *static_cast<const plan_head*>(plan);
            const auto finish = id.lower ? head.functions->planes->finish : head.functions->finish;
            finish(head.plan_of(id), shape, id, block, x, x_stride, rows, cols, y, y_stride, add, ahead,
                   workspace);
        };
        table.describe = [](const void* self, const block_shape& shape, float_type window) {
            return functions_of(self).describe(state_of(self), shape, window);
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
    /// In front of the plans of the upper format and of both planes.
    struct alignas(64) plan_head {
        const format_functions* functions;

        const void* plan_of(const block_id& id) const noexcept {
            return reinterpret_cast<const std::byte*>(this) +
                   (id.lower ? second_plan(*functions) : sizeof(plan_head));
        }
    };
    static std::size_t second_plan(const format_functions& f) noexcept {
        return sizeof(plan_head) + round_up(f.plan_bytes, std::size_t{64});
    }

    static const format& of_self(const void* self) noexcept {
        return static_cast<const plane_record*>(self)->upper;
    }
    static const format_functions& functions_of(const void* self) noexcept {
        return of_self(self).functions();
    }
    static const void* state_of(const void* self) noexcept { return of_self(self).scheme(); }
    static std::size_t upper_bytes(const void* self, const block_shape& shape) {
        return functions_of(self).block_bytes(state_of(self), shape);
    }
    static std::size_t lower_bytes(const void* self, const block_shape& shape) {
        return round_up(functions_of(self).code_bytes(state_of(self), shape), std::size_t{16});
    }
    static common_vector<float> copy_of(const float* values, const block_shape& shape) {
        common_vector<float> copy(shape.values());
        std::memcpy(copy.data(), values, shape.values() * sizeof(float));
        return copy;
    }
    /// values: [tokens][dim], overwritten.
    static void write_lower(const void* self, const block_shape& shape, block_id id, const std::byte* block,
                            float* values) {
        if (!id.lower) return;
        const format_functions& f = functions_of(self);
        std::memset(id.lower, 0, lower_bytes(self, shape));  // odd rows and columns leave gaps
        if (f.transforms) f.transform_query(state_of(self), shape, id, values, shape.dim, shape.tokens);
        f.planes->write(state_of(self), shape, id, block, values);
    }
    static std::uint32_t quantize(const void* self, const block_shape& shape, block_id id, float_type type,
                                  const std::byte* from, std::byte* block, float* scratch) {
        const format_functions& f = functions_of(self);
        const auto found = f.quantize(state_of(self), shape, id, type, from, block, scratch);
        if (!id.lower) return found;
        f.planes->window_values(shape, type, from, scratch);
        write_lower(self, shape, id, block, scratch);
        return found;
    }
    /// x^ of both planes, to [tokens][dim].
    static void read_both(const void* self, const block_shape& shape, block_id id, const std::byte* block,
                          float* values) {
        const format_functions& f = functions_of(self);
        f.planes->read(state_of(self), shape, id, block, values);
        if (f.transforms) f.restore_output(state_of(self), shape, id, values, shape.dim, shape.tokens);
    }
    static void dequantize(const void* self, const block_shape& shape, block_id id, const std::byte* block,
                           float_type type, void* out, std::ptrdiff_t stride, float* scratch) {
        const format_functions& f = functions_of(self);
        if (!id.lower) return f.dequantize(state_of(self), shape, id, block, type, out, stride, scratch);
        // `out` may be the scratch.
        common_vector<float> values(shape.values());
        read_both(self, shape, id, block, values.data());
        visit_float_type(type, [&]<class T>(T) {
            for (int t = 0; t < shape.tokens; ++t)
                for (int c = 0; c < shape.dim; ++c)
                    static_cast<T*>(out)[t * stride + c] =
                        T(values[static_cast<std::size_t>(t) * static_cast<std::size_t>(shape.dim) +
                                 static_cast<std::size_t>(c)]);
        });
    }
    static void dequantize_tokens(const void* self, const block_shape& shape, block_id id,
                                  const std::byte* block, const std::int32_t* tokens, int n, float* out,
                                  std::ptrdiff_t stride, float* scratch) {
        const format_functions& f = functions_of(self);
        if (!id.lower)
            return f.dequantize_tokens(state_of(self), shape, id, block, tokens, n, out, stride, scratch);
        read_both(self, shape, id, block, scratch);
        for (int i = 0; i < n; ++i)
            std::memcpy(out + i * stride, scratch + std::ptrdiff_t{tokens[i]} * shape.dim,
                        static_cast<std::size_t>(shape.dim) * sizeof(float));
    }
    static std::size_t make_plan(const void* self, const block_shape& shape, block_id id, int rows,
                                 void* plan) {
        const format_functions& f = functions_of(self);
        std::byte* const at = static_cast<std::byte*>(plan);
        if (plan) ::new (plan) plan_head{&f};
        const std::size_t alone =
            f.make_plan(state_of(self), shape, id, rows, plan ? at + sizeof(plan_head) : nullptr);
        return larger(alone, f.planes->make_plan(state_of(self), shape, id, rows,
                                                 plan ? at + second_plan(f) : nullptr));
    }
};

}  // namespace detail

KVQ_FUNC format with_lower_plane(const format& f) {
    detail::expect(static_cast<bool>(f), "with_lower_plane takes a format, not an empty one");
    detail::expect(f.functions().planes != nullptr, "a lower plane belongs to codes of 4 bits, and ",
                   format_text(f), " has others");
    return format(new detail::plane_record(f));
}

}}
