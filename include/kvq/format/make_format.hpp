// From a scheme to a format: the functions of one scheme on one backend, compiled once.
//
//   make_format<affine<4, per_channel<64>>, simd<>>()       a scheme without state
//   make_format<simd<>>(rotated(...))                       a scheme with state; the format keeps the state
//
// Templates end here. A program pays the compile time of a scheme once, for any number of calls of
// make_format. Schemes that differ only in the group size are one scheme here: the group size becomes a value
// (quant/granularity.hpp). cpu/simd.hpp adds make_format<Scheme>() for the best backend of the build.
#pragma once

#include <new>
#include <type_traits>

#include "../core/text.hpp"
#include "../cpu/block_product.hpp"
#include "../cpu/listed_tokens.hpp"
#include "../cpu/product/score_estimate.hpp"
#include "../cpu/product/token_products.hpp"
#include "../cpu/scalar.hpp"
#include "../cpu/softmax.hpp"
#include "../cpu/transformed.hpp"
#include "../schemes/checked_scheme.hpp"
#include "../schemes/float_rows.hpp"
#include "../schemes/int8.hpp"
#include "../schemes/kivi.hpp"
#include "../schemes/presets.hpp"
#include "builtin_format.hpp"
#include "format.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

namespace detail {

/// Most query rows per task. The number is larger when all rows of a task share the unpacked block
/// (word_product.hpp, tile_product.hpp).
template <class Backend>
inline constexpr int query_rows = kernels::has_word_dots<typename Backend::lanes> ? 128 : 16;

template <class Backend>
const format& fp16_format();

template <class Backend>
struct backend_table {
    using lanes = typename Backend::lanes;
    using session = kernels::tile_session<lanes, Backend>;
    static constexpr bool has_session = !std::is_empty_v<session>;
    static_assert(sizeof(session) <= backend_functions::tile_state_bytes);

    static void softmax(float* scores, std::ptrdiff_t stride, int rows, int n, float* max, float* sum,
                        float* factor) {
        constexpr int together = kernels::query_block;
        int i = 0;
        for (; i + together <= rows; i += together)
            kernels::softmax_tile<lanes, together>(scores + i * stride, stride, n, max + i, sum + i,
                                                   factor + i);
        for (; i < rows; ++i)
            kernels::softmax_tile<lanes, 1>(scores + i * stride, stride, n, max + i, sum + i, factor + i);
    }
    static bool load_query(float_type type, const void* from, int n, float scale, float* to) {
        visit_float_type(type, [&]<class T>(T) {
            Backend::template load_floats<T>(static_cast<const std::byte*>(from), n, to);
        });
        // 0 * x is NaN for an x that is not finite.
        auto zeros = lanes::splat_float(0.0f);
        int c = 0;
        for (; c + lanes::width <= n; c += lanes::width) {
            const auto x = lanes::multiply(lanes::load_floats(to + c), lanes::splat_float(scale));
            lanes::store_floats(to + c, x);
            zeros = lanes::multiply_add(x, lanes::splat_float(0.0f), zeros);
        }
        float zero = lanes::sum(zeros);
        for (; c < n; ++c) {
            to[c] *= scale;
            zero += 0.0f * to[c];
        }
        return zero == 0.0f;
    }
    static void open_tiles(int rows, void* state) { ::new (state) session(rows); }
    static void close_tiles(void* state) { static_cast<session*>(state)->~session(); }

    static std::size_t estimate_floats(int dim) {
        return kernels::channel_bounds<Backend>::scratch_floats(dim);
    }

    static constexpr backend_functions functions{Backend::name(),
                                                 query_rows<Backend>,
                                                 &softmax,
                                                 &load_query,
                                                 has_session ? &open_tiles : nullptr,
                                                 has_session ? &close_tiles : nullptr,
                                                 &fp16_format<Backend>,
                                                 &kernels::channel_bounds<Backend>::find,
                                                 &kernels::channel_bounds<Backend>::estimate,
                                                 &estimate_floats,
                                                 &kernels::token_products<lanes>::score,
                                                 &kernels::token_products<lanes>::add,
                                                 &kernels::token_products<lanes>::add_rectified};
};

template <class Backend, kv_scheme Scheme>
struct scheme_record;

/// Schemes whose channels get widths by a plan of keys. A plan of keys in front of a transform, or of a
/// derived scheme that does something else with them, would be wrong.
template <class Scheme>
concept takes_plans = requires(const calibration& statistics) {
    Scheme::plan_of_keys(statistics);
}
&&std::same_as<typename Scheme::attends_as, Scheme> && !requires { typename Scheme::inner_scheme; };

template <class Backend, class Scheme>
struct plan_table {
    static const Scheme& of(const void* scheme) noexcept { return *static_cast<const Scheme*>(scheme); }

    static bool has_plan(const void* scheme) {
        if constexpr (takes_plans<Scheme>) return of(scheme).plan() != nullptr;
        return false;
    }
    static format from_statistics(const format& from, const std::byte* statistics, std::size_t bytes) {
        if constexpr (takes_plans<Scheme>)
            return made(from, Scheme::plan_of_keys(calibration::load(std::span(statistics, bytes))));
        return {};
    }
    static std::size_t write_text(const void* scheme, char* to) {
        if constexpr (takes_plans<Scheme>) return of(scheme).write_plan(to);
        return 0;
    }
    static format from_text(const format& from, const char* text, std::size_t letters) {
        if constexpr (takes_plans<Scheme>) return made(from, Scheme::plan_of_text(text, letters));
        return {};
    }
    static double relative_error(const void* scheme, const block_shape& shape, block_id id,
                                 const channel_importance& importance) {
        if constexpr (takes_plans<Scheme>) return of(scheme).relative_error(shape, id, importance);
        return 1.0;
    }
    static constexpr plan_functions functions{&has_plan, &from_statistics, &write_text, &from_text,
                                              &relative_error};

private:
    static format made(const format& from, width_plan plan) {
        if constexpr (takes_plans<Scheme>) {
            Scheme planned(std::make_shared<const width_plan>(std::move(plan)), of(from.scheme()).encoder);
            format result(new scheme_record<Backend, Scheme>(std::move(planned)));
            std::size_t letters = 0;
            while (from.asked_name()[letters] != '\0') ++letters;
            result.set_asked_name(from.asked_name(), letters);
            return result;
        }
        return {};
    }
};

/// The functions of format_functions for one scheme and backend.
template <class Backend, kv_scheme Scheme>
struct scheme_table {
    static const Scheme& of(const void* scheme) noexcept { return *static_cast<const Scheme*>(scheme); }

    static void check(const void* scheme, const cache_shape& shape, tensor role) {
        if constexpr (requires { of(scheme).check(shape, role); }) of(scheme).check(shape, role);
    }
    static std::size_t block_bytes(const void* scheme, const block_shape& shape) {
        return of(scheme).block_bytes(shape);
    }
    static std::size_t code_bytes(const void* scheme, const block_shape& shape) {
        if constexpr (full_precision<Scheme>)
            return of(scheme).block_bytes(shape);
        else if constexpr (foldable<Scheme>)
            return of(scheme).codes(shape).bytes();
        else
            return 0;
    }
    static std::uint32_t quantize(const void* scheme, const block_shape& shape, block_id id, float_type type,
                                  const std::byte* from, std::byte* block, float* scratch) {
        return Backend::quantize(of(scheme), shape, id, type, from, block, scratch);
    }
    static std::uint32_t quantize_values(const void* scheme, const block_shape& shape, block_id id,
                                         float* values, std::byte* block) {
        return Backend::quantize_values(of(scheme), shape, id, values, block);
    }
    static std::uint32_t requantize_values(const void* scheme, const block_shape& shape, block_id id,
                                           float* values, float* token_scales, std::byte* block) {
        return Backend::requantize_values(of(scheme), shape, id, values, token_scales, block);
    }
    static void read_token_scales(const void* scheme, const block_shape& shape, const std::byte* block,
                                  float* scales) {
        if constexpr (with_token_scales<Scheme>) of(scheme).read_token_scales(shape, block, scales);
    }
    static void dequantize(const void* scheme, const block_shape& shape, block_id id, const std::byte* block,
                           float_type type, void* out, std::ptrdiff_t stride, float* scratch) {
        Backend::dequantize(of(scheme), shape, id, block, type, out, stride, scratch);
    }
    static void dequantize_tokens(const void* scheme, const block_shape& shape, block_id id,
                                  const std::byte* block, const std::int32_t* tokens, int n, float* out,
                                  std::ptrdiff_t stride, float* scratch) {
        kernels::dequantize_tokens<Backend>(of(scheme), shape, id, block, tokens, n, out, stride, scratch);
    }
    static std::uint32_t write_tokens(const block_shape& shape, std::byte* block, float_type type,
                                      const void* tokens, std::ptrdiff_t stride, int count, int at) {
        if constexpr (full_precision<Scheme>)
            return Backend::template write_tokens<typename Scheme::value_type>(shape, block, type, tokens,
                                                                               stride, count, at);
        else
            return 0;
    }

    static std::size_t make_plan(const void* scheme, const block_shape& shape, block_id id, int rows,
                                 void* plan) {
        return product().make_plan(kernels::product_blocks_of<Backend>(of(scheme), shape, id), shape, rows,
                                   plan);
    }
    static std::size_t plan_key_values(const void* scheme, const block_shape& keys, block_id id, int channels,
                                       int rows, void* plan) {
        // A transform is restored on all channels or on none.
        if (transforming<Scheme> && channels < keys.dim) return 0;
        return product().of_key_values->make_plan(kernels::product_blocks_of<Backend>(of(scheme), keys, id),
                                                  {tensor::value, keys.tokens, channels}, rows, plan);
    }
    static std::size_t plan_planes(const void* scheme, const block_shape& shape, block_id id, int rows,
                                   void* plan) {
        return product().of_planes->make_plan(kernels::product_blocks_of<Backend>(of(scheme), shape, id),
                                              shape, rows, plan);
    }
    static void window_values(const block_shape& shape, float_type type, const std::byte* block,
                              float* values) {
        visit_float_type(type, [&]<class T>(T) {
            Backend::dequantize(full<T>{}, shape, {}, block, float_type::fp32, values, shape.dim, values);
        });
    }
    static void write_lower(const void* scheme, const block_shape& shape, block_id id, const std::byte* block,
                            const float* values) {
        const product_blocks blocks = kernels::product_blocks_of<Backend>(of(scheme), shape, id);
        kernels::plane_codes(blocks, shape, id, block).write(values);
    }
    static void read_planes(const void* scheme, const block_shape& shape, block_id id, const std::byte* block,
                            float* values) {
        const product_blocks blocks = kernels::product_blocks_of<Backend>(of(scheme), shape, id);
        kernels::plane_codes(blocks, shape, id, block).read(values);
    }
    static const plane_functions* planes(const product_functions& from) {
        if constexpr (foldable<Scheme> && composed_by_library<Scheme>) {
            if constexpr (Scheme::code_bits == 4) {
                if (!from.of_planes) return nullptr;
                static const plane_functions all{from.of_planes->plan_bytes,
                                                 &plan_planes,
                                                 from.of_planes->begin,
                                                 from.of_planes->finish,
                                                 &window_values,
                                                 &write_lower,
                                                 &read_planes};
                return &all;
            }
        }
        return nullptr;
    }
    static void estimate_scores(const void* scheme, const block_shape& shape, block_id id,
                                const std::byte* block, const float* x, std::ptrdiff_t x_stride, int rows,
                                int first, int end, float spread, float* out, std::ptrdiff_t ahead,
                                float* scratch) {
        if constexpr (kernels::bounds_keys<Scheme>) {
            const product_blocks blocks = kernels::product_blocks_of<Backend>(of(scheme), shape, id);
            const parameter_source source =
                kernels::ranges_source(of(scheme), shape, id, block, blocks, scratch);
            if constexpr (Backend::has_all_kernels)
                kernels::estimate_scores<typename Backend::lanes>(blocks, source, x, x_stride, rows, first,
                                                                  end, spread, out, ahead, scratch);
            else
                Backend::estimate_scores(blocks, source, x, x_stride, rows, first, end, spread, out, ahead,
                                         scratch);
        }
    }
    static std::size_t estimate_floats(const void* scheme, const block_shape& shape) {
        if constexpr (kernels::bounds_keys<Scheme>)
            return kernels::estimate_floats(
                kernels::product_blocks_of<Backend>(of(scheme), shape, block_id{}), shape);
        else
            return 0;
    }
    static format_description describe(const void* scheme, const block_shape& shape, float_type window) {
        return Backend::describe(of(scheme), shape, window);
    }
    static void transform_query(const void* scheme, const block_shape& shape, block_id id, float* x,
                                std::ptrdiff_t stride, int count) {
        if constexpr (transforming<Scheme>)
            kernels::transform_rows<Backend>(of(scheme), shape, id, x, stride, count, false);
    }
    static void restore_output(const void* scheme, const block_shape& shape, block_id id, float* y,
                               std::ptrdiff_t stride, int count) {
        if constexpr (transforming<Scheme>)
            kernels::transform_rows<Backend>(of(scheme), shape, id, y, stride, count, true);
    }
    static row_place_functions of_places(row_place_functions of) {
        if constexpr (rows_of_tokens<Scheme> || records_of_tokens<Scheme>)
            of.bytes = [](const void* scheme, int dim) {
                const auto layout = scheme_table::of(scheme).layout();
                if constexpr (rows_of_tokens<Scheme>)
                    if (const int n = layout.group_of(dim); dim % n != 0)
                        fail(layout.name, " has a scale for ", n, " channels, but head_dim is ", dim);
                return layout.bytes(dim);
            };
        if constexpr (records_of_tokens<Scheme>)
            of.read = [](const void* scheme, const row_place& place, int dim, int from, int tokens,
                         float* values) {
                return scheme_table::of(scheme).read(place, dim, from, tokens, values);
            };
        return of;
    }
    static constexpr float_type value_type() {
        if constexpr (full_precision<Scheme>)
            return float_type_of<typename Scheme::value_type>;
        else
            return float_type::fp32;
    }

    /// The product that reads blocks; of the library, which may have none, of dequantized blocks.
    static const product_functions& product() {
        if constexpr (Backend::has_all_kernels)
            return kernels::product_table<kernels::block_product<Backend, Scheme>>::functions;
        else
            return Backend::template product<Scheme>();
    }
    /// reads: attention reads the blocks, and does not dequantize them first.
    static format_functions functions_with(const backend_functions* backend, const product_functions& from,
                                           bool reads) {
        const bool transforms = transforming<Scheme> && reads,
                   estimates = kernels::bounds_keys<Scheme> && reads;
        const product_functions* const values = supports<Scheme>(tensor::key) ? from.of_key_values : nullptr;
        return {backend,
                supports<Scheme>(tensor::key),
                supports<Scheme>(tensor::value),
                !reads,
                transforms,
                false,
                {!reads || kernels::folds_once<Scheme>(tensor::key),
                 !reads || kernels::folds_once<Scheme>(tensor::value)},
                full_precision<Scheme>,
                (foldable<Scheme> || segmented<Scheme>)&&reads && !composed_by_library<Scheme>,
                value_type(),
                from.plan_bytes,
                &check,
                &block_bytes,
                &code_bytes,
                &quantize,
                &quantize_values,
                &requantize_values,
                with_token_scales<Scheme> ? &read_token_scales : nullptr,
                &dequantize,
                &dequantize_tokens,
                full_precision<Scheme> ? &write_tokens : nullptr,
                &make_plan,
                from.begin,
                from.finish,
                of_places(from.of_places),
                values ? values->plan_bytes : 0,
                values ? &plan_key_values : nullptr,
                values ? values->begin : nullptr,
                values ? values->finish : nullptr,
                estimates ? &estimate_scores : nullptr,
                estimates ? &estimate_floats : nullptr,
                &describe,
                transforms ? &transform_query : nullptr,
                transforms ? &restore_output : nullptr,
                reads ? planes(from) : nullptr,
                nullptr,
                nullptr,
                takes_plans<Scheme> ? &plan_table<Backend, Scheme>::functions : nullptr};
    }
    static const format_functions& functions() {
        if constexpr (Backend::has_all_kernels) {
            // A constant everywhere but with nvcc, which takes no address of a table that is being made.
            static const format_functions all =
                functions_with(&backend_table<Backend>::functions,
                               kernels::product_table<kernels::block_product<Backend, Scheme>>::functions,
                               kernels::has_product<Scheme>);
            return all;
        } else {
            static const format_functions all =
                functions_with(Backend::vectors().backend, product(), Backend::template reads<Scheme>());
            return all;
        }
    }
};

template <class Backend, kv_scheme Scheme>
struct scheme_record : format_record {
    Scheme held;
    short_text held_name;

    explicit scheme_record(Scheme of) : held(std::move(of)), held_name(held.name()) {
        functions = &scheme_table<Backend, Scheme>::functions();
        scheme = &held;
        name = held_name.c_str();
        has_state = !name_says_all<Scheme>;
        all_in_name = quantizes_by_name<Scheme>;
        destroy = [](format_record* self) { delete static_cast<scheme_record*>(self); };
        if constexpr (requires {
                          { held.fingerprint() } -> std::convertible_to<std::uint64_t>;
                      }) {
            has_fingerprint = true;
            fingerprint = static_cast<std::uint64_t>(held.fingerprint());
        }
    }
};

template <class Backend, class Scheme>
format made_format(Scheme scheme) {
    return format(new scheme_record<Backend, Scheme>(std::move(scheme)));
}

}  // namespace detail

/// A format of `scheme` on Backend: scalar, simd<...>. A scheme with state is copied or moved into the
/// format.
template <class Backend, kv_scheme Scheme>
[[nodiscard]] format make_format(Scheme scheme) {
    if constexpr (detail::checked_folding<Scheme>::complete)
        return detail::made_format<Backend>(detail::with_any_group<Scheme>::of(std::move(scheme)));
    else
        return {};
}
/// A format of a scheme without state.
template <class Scheme, class Backend>
[[nodiscard]] format make_format() {
    if constexpr (!kv_scheme<Scheme>) {
        static_assert(!std::is_void_v<typename detail::checked_scheme<Scheme>::type>);
        return {};
    } else {
        static_assert(
            std::is_default_constructible_v<Scheme>,
            "kvq::make_format: this scheme holds state that it cannot make up, such as the matrices of "
            "rotated<>: pass it, as in make_format<backend>(scheme(...))");
        if constexpr (std::is_default_constructible_v<Scheme>) return make_format<Backend>(Scheme{});
    }
}

/// Formats of a pair such as kivi<4> or a preset; or of one scheme for both tensors.
template <class Pair, class Backend>
[[nodiscard]] format_pair make_formats() {
    if constexpr (requires {
                      typename Pair::keys;
                      typename Pair::values;
                  })
        return {make_format<typename Pair::keys, Backend>(), make_format<typename Pair::values, Backend>()};
    else
        return {make_format<Pair, Backend>(), make_format<Pair, Backend>()};
}

namespace detail {

template <class Backend>
const format& fp16_format() {
#if defined(KVQ_COMPILED)
    return library_vectors().backend->fp16();
#else
    // Never destroyed, so that nothing runs at the end of the program.
    static const format* const f = new format(make_format<Backend>(full<float16>{}));
    return *f;
#endif
}

}  // namespace detail
}}  // namespace kvq
