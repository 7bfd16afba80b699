// A paged cache in device memory, seen by kernels: pointers, strides and tables, passed by value.
//
// `block_pair` fixes at compile time what decides the code of a kernel: both schemes, both head sizes and the
// page size. The pages are byte for byte those of the CPU (docs/reference/format.md): a page is kv_heads key
// (or value) blocks, one after the other, so every block of one head is contiguous. Token i of a sequence
// lies in column i / PageTokens of its row of the block table, once `first_token` has been subtracted. A
// negative entry means "not held in this format". A sequence whose pages have several formats has one
// cache_ref (and one table) for each; mixed_cache.cuh puts them together.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../schemes/int8.hpp"
#include "../../schemes/kivi.hpp"
#include "../../schemes/presets.hpp"
#include "../arch/architecture.cuh"
#include "device_codec.cuh"
#include "launch.cuh"
#include "plane_pair.cuh"
#include "strided_rows.cuh"
#include "window_columns.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

/// Bytes of a block, for schemes whose encoders have state as well.
template <class S>
constexpr std::size_t block_bytes_of(const block_shape& s) {
    if constexpr (full_precision<S> || read_by_numbers<S>)
        return S{}.block_bytes(s);
    else
        return typename S::layout_type{}.bytes(s);
}

}  // namespace detail

/// Schemes whose blocks kernels read: full<T>, and scheme<...> with the library's levels, a group size known
/// at compile time, and parameters and token scales of a float format or of 8 bits, also behind hadamard<> or
/// rotated<>. Schemes of your own with `KVQ_HD float device_value(const block_shape&, const std::byte* block,
/// int token, int channel) const` and a constexpr block_bytes() are read as well, slowly.
template <class S>
concept device_scheme = detail::has_reader<S>;

template <class Keys, class Values, int HeadDim, int PageTokens, int ValueDim = HeadDim>
struct block_pair {
    static_assert(device_scheme<Keys> && device_scheme<Values>,
                  "kvq::cuda::block_pair: schemes are full<T>, or scheme<...> with asymmetric or symmetric "
                  "levels, a group size known at compile time, and float, float16, bfloat16 or 8-bit "
                  "parameters, also behind hadamard<> or rotated<>; others run on the CPU, unless a scheme "
                  "of your own has device_value()");
    static_assert(detail::no_reader_of<Values>(tensor::value) == nullptr || !device_scheme<Values>,
                  "kvq::cuda::block_pair: several widths are for keys only");
    static_assert(HeadDim >= 1 && ValueDim >= 1 && PageTokens >= 1,
                  "kvq::cuda::block_pair: sizes must be at least 1");
    using keys = Keys;
    using values = Values;
    static constexpr int head_dim = HeadDim;
    static constexpr int value_dim = ValueDim;
    static constexpr int page_tokens = PageTokens;

    KVQ_HD static constexpr block_shape key_shape() noexcept { return {tensor::key, PageTokens, HeadDim}; }
    KVQ_HD static constexpr block_shape value_shape() noexcept {
        return {tensor::value, PageTokens, ValueDim};
    }
    static constexpr std::size_t key_block_bytes =
        detail::block_bytes_of<Keys>({tensor::key, PageTokens, HeadDim});
    static constexpr std::size_t value_block_bytes =
        detail::block_bytes_of<Values>({tensor::value, PageTokens, ValueDim});
};

/// The same pair with a budget of its own (shared_memory_budget).
template <class Pair, int Bytes>
struct with_budget : Pair {};
template <class Pair, int Bytes>
inline constexpr int shared_memory_budget<with_budget<Pair, Bytes>> = Bytes;

namespace detail {

template <tensor Role, class Pair>
using scheme_of = std::conditional_t<Role == tensor::key, typename Pair::keys, typename Pair::values>;
template <tensor Role, class Pair>
inline constexpr int dim_of = Role == tensor::key ? Pair::head_dim : Pair::value_dim;
template <tensor Role, class Pair>
inline constexpr block_shape shape_of{Role, Pair::page_tokens, dim_of<Role, Pair>};

/// Of a pair that names some channels of the blocks of keys of another (latent_pair.cuh): the first of them,
/// and the shape of these blocks.
template <class Pair>
inline constexpr int first_channel = 0;
template <tensor Role, class Pair>
inline constexpr block_shape stored_shape = shape_of<Role, Pair>;

/// A pair with the sizes and the budget of Pair.
template <class Pair, class Keys, class Values>
struct pair_like {
    using plain = block_pair<Keys, Values, Pair::head_dim, Pair::page_tokens, Pair::value_dim>;
    static constexpr int budget = shared_memory_budget<Pair>;
    using type = std::conditional_t<budget == shared_memory_budget<plain>, plain, with_budget<plain, budget>>;
};
template <tensor Role, class Pair>
struct codec_in {
    static constexpr codec_spec value = codec_of_shape(codec<scheme_of<Role, Pair>>, shape_of<Role, Pair>);
};

/// The scheme that kernels are compiled for. Encoder: void where they only read.
template <tensor Role, class Pair, class Encoder>
struct kernel_scheme {
    using type = codec_scheme<codec_in<Role, Pair>, Encoder>;
};
template <tensor Role, class Pair, class Encoder>
requires has_transform<scheme_of<Role, Pair>>
struct kernel_scheme<Role, Pair, Encoder> {
    using type = behind_transform<codec_scheme<codec_in<Role, Pair>, Encoder>>;
};
template <tensor Role, class Pair, class Encoder>
requires read_by_numbers<scheme_of<Role, Pair>>
struct kernel_scheme<Role, Pair, Encoder> {
    using type = scheme_of<Role, Pair>;
};

/// The pair whose kernels read the blocks of Pair.
template <class Pair>
struct read_pair_of : pair_like<Pair, typename kernel_scheme<tensor::key, Pair, void>::type,
                                typename kernel_scheme<tensor::value, Pair, void>::type> {};
template <class Upper>
struct read_pair_of<plane_pair<Upper>> {
    using type = plane_pair<typename read_pair_of<Upper>::type>;
};
template <class Upper>
struct read_pair_of<upper_plane_pair<Upper>> {
    using type = upper_plane_pair<typename read_pair_of<Upper>::type>;
};
template <class Rows>
struct read_pair_of<strided_rows<Rows>> {
    using type = strided_rows<Rows>;
};
template <class Pair>
using read_pair = typename read_pair_of<Pair>::type;
/// Have pages of values? Those of latents are the first channels of keys (latent_pair.cuh).
template <class Pair>
inline constexpr bool has_values = Pair::value_block_bytes > 0;
template <class Pair>
inline constexpr int tensors_of = has_values<Pair> ? 2 : 1;

/// Are there kernels that quantize to these blocks?
template <class S, tensor Role>
inline constexpr bool quantizes_to = token_bytes_scheme<S> || float_row_scheme<S> ||
                                     no_quantizer(codec<S>, Role) == nullptr;
template <class To>
inline constexpr bool quantizes = quantizes_to<typename To::keys, tensor::key> &&
                                  (!has_values<To> || quantizes_to<typename To::values, tensor::value>);

/// The pair whose kernels quantize to the blocks of Pair.
template <class Pair>
struct quantized_pair_of
    : pair_like<
          Pair,
          typename kernel_scheme<tensor::key, Pair, typename encoder_of<typename Pair::keys>::type>::type,
          typename kernel_scheme<tensor::value, Pair,
                                 typename encoder_of<typename Pair::values>::type>::type> {};
template <class Upper>
struct quantized_pair_of<plane_pair<Upper>> {
    using type = plane_pair<typename quantized_pair_of<Upper>::type>;
};
template <class Rows>
struct quantized_pair_of<strided_rows<Rows>> {
    using type = strided_rows<Rows>;
};
template <class Pair>
using quantized_pair = typename quantized_pair_of<Pair>::type;

/// What kernels need of a scheme beside its type: the transform in front of it; of others of the library
/// nothing.
template <tensor Role, class Pair>
struct own_state {};
template <tensor Role, class Pair>
requires read_by_numbers<scheme_of<Role, Pair>>
struct own_state<Role, Pair> {
    scheme_of<Role, Pair> scheme{};
};
template <tensor Role, class Rows>
struct own_state<Role, strided_rows<Rows>> {
    scheme_of<Role, Rows> scheme{};
    row_memory memory{};
};
template <tensor Role, class Pair>
requires has_transform<scheme_of<Role, Pair>>
struct own_state<Role, Pair> {
    device_transform transform{transform_in<scheme_of<Role, Pair>>};
};

}  // namespace detail

/// Both KIVI schemes at once: kivi_pair<4, 64, 128, 64>.
template <int Bits, int Group, int HeadDim, int PageTokens, class Params = params<float16>>
using kivi_pair = block_pair<typename kivi<Bits, Group, Params>::keys,
                             typename kivi<Bits, Group, Params>::values, HeadDim, PageTokens>;

/// Both schemes of a preset: preset_pair<std4, 128>.
template <class Preset, int HeadDim, int PageTokens = 128>
using preset_pair = block_pair<typename Preset::keys, typename Preset::values, HeadDim, PageTokens>;

/// Numbers of 16 bits of one head's plan: the place of every channel, then quads of every width.
template <class Pair>
inline constexpr int key_plan_words = [] {
    if constexpr (detail::codec<typename Pair::keys>.several_widths())
        return kvq::detail::round_up(Pair::head_dim + Pair::keys::width_list::count, 8);
    else
        return 0;
}();

/// Writes the plan of a layer's heads as cache_ref::key_plans needs it: kv_heads * key_plan_words<Pair>
/// numbers, in host memory. The plan must be one for Pair's head_dim.
template <class Pair>
void write_key_plan(const width_plan& plan, int layer, std::uint16_t* out) noexcept {
    for (int head = 0; head < plan.kv_heads; ++head, out += key_plan_words<Pair>) {
        const channel_allocation& a = plan.blocks[static_cast<std::size_t>(layer * plan.kv_heads + head)];
        for (int i = 0; i < key_plan_words<Pair>; ++i) out[i] = 0;
        for (std::size_t place = 0; place < a.order.size(); ++place)
            out[a.order[place]] = static_cast<std::uint16_t>(place);
        for (std::size_t w = 0; w < a.quads.size(); ++w)
            out[static_cast<std::size_t>(Pair::head_dim) + w] = a.quads[w];
    }
}

/// Writes what error feedback needs of a layer's heads as cache_ref::key_feedback wants it: kv_heads *
/// head_dim^2 floats, in host memory. The matrices must be those of the keys' encoder, made with the same
/// plan.
template <class Pair>
void write_key_feedback(const feedback_matrices& matrices, int layer, float* out) noexcept {
    constexpr int dim = Pair::head_dim;
    for (int head = 0; head < matrices.kv_heads(); ++head)
        for (int i = 0; i < dim; ++i, out += dim) {
            const float* const row = matrices.row({layer, head}, dim, i);
            for (int j = 0; j < dim; ++j) out[j] = row == nullptr ? 0.0f : row[j];
        }
}

template <class Pair>
struct cache_ref {
    using pair_type = Pair;

    std::byte* key_pages = nullptr;    // page p starts at p * key_page_bytes; 16-byte aligned
    std::byte* value_pages = nullptr;  // page p starts at p * value_page_bytes; may interleave with key_pages
    std::size_t key_page_bytes = 0;    // distance between pages; at least kv_heads blocks
    std::size_t value_page_bytes = 0;
    const int* block_table = nullptr;  // [sequences][table_columns] page numbers, negative: skip
    const int* tokens = nullptr;  // [sequences] length of every sequence, tokens before first_token included
    int sequences = 0;
    int table_columns = 0;
    int kv_heads = 0;
    int first_token = 0;
    /// Keys of mixed widths: orders and widths of this layer's heads in device memory, see write_key_plan().
    /// Null: without a plan.
    const std::uint16_t* key_plans = nullptr;
    /// Of several plans: the number of each sequence's, [sequences] in device memory, and the 16-bit numbers
    /// from one to the next. Null: all sequences have the first one.
    const int* plan_numbers = nullptr;
    int plan_words = 0;
    /// Coding keys with error_feedback: [kv_heads][head_dim][head_dim] of this layer in device memory, see
    /// write_key_feedback(). Null: the encoder has no matrices.
    const float* key_feedback = nullptr;
    /// Schemes of your own, for their state, and transforms (set_transform). Not [[no_unique_address]]: nvcc
    /// 13 places the members behind such a member of a kernel's parameter elsewhere than the host compiler
    /// does.
    detail::own_state<tensor::key, Pair> own_keys = {};
    detail::own_state<tensor::value, Pair> own_values = {};
    /// Has every kv head a row of the block table, [sequences][kv_heads][table_columns]? For attention over a
    /// mixed cache alone (select/best_pages.cuh).
    bool head_tables = false;
    /// Of a format with two planes.
    detail::lower_pages<Pair> lower = {};

    /// Of a format with transforms: the layer whose signs or rotations they are. Of rotations:
    /// rotation::columns() and rows() of the layer in device memory, [kv_heads][dim][dim] each.
    void set_transform([[maybe_unused]] tensor role, [[maybe_unused]] int layer,
                       [[maybe_unused]] const float* columns = nullptr,
                       [[maybe_unused]] const float* rows = nullptr) noexcept {
        if constexpr (detail::has_transform<typename Pair::keys>)
            if (role == tensor::key) own_keys.transform = {own_keys.transform.what, layer, columns, rows};
        if constexpr (detail::has_transform<typename Pair::values>)
            if (role == tensor::value)
                own_values.transform = {own_values.transform.what, layer, columns, rows};
    }
    /// The row of the block table that a kv head reads.
    KVQ_HD int table_row(int sequence, int head) const noexcept {
        return head_tables ? sequence * kv_heads + head : sequence;
    }
    /// Where the block table names the page in a column of a sequence.
    KVQ_HD std::size_t table_entry(int sequence, int column) const noexcept {
        return static_cast<std::size_t>(sequence) * static_cast<std::size_t>(table_columns) +
               static_cast<std::size_t>(column);
    }
    /// The plan of a head of a sequence, or null.
    KVQ_HD const std::uint16_t* key_plan(int sequence, int head) const noexcept {
        if (key_plans == nullptr) return nullptr;
        const std::size_t first = plan_numbers == nullptr ? 0
                                                          : static_cast<std::size_t>(plan_numbers[sequence]) *
                                                                static_cast<std::size_t>(plan_words);
        return key_plans + first + head * key_plan_words<Pair>;
    }
    /// The same pages with the plan of this sequence alone.
    KVQ_HD cache_ref of_plan(int sequence) const noexcept {
        cache_ref one = *this;
        one.key_plans = key_plan(sequence, 0);
        one.plan_numbers = nullptr;
        return one;
    }
    KVQ_HD std::byte* key_block(int page, int head) const noexcept {
        return key_pages + upper_number(page) * key_page_bytes +
               static_cast<std::size_t>(head) * head_bytes<tensor::key>();
    }
    KVQ_HD std::byte* value_block(int page, int head) const noexcept {
        return value_pages + upper_number(page) * value_page_bytes +
               static_cast<std::size_t>(head) * head_bytes<tensor::value>();
    }
    /// The block of `Role` of one page and head.
    template <tensor Role>
    KVQ_HD std::byte* block(int page, int head) const noexcept {
        if constexpr (Role == tensor::key || !detail::has_values<Pair>)
            return key_block(page, head);
        else
            return value_block(page, head);
    }
    /// From one head's block in a page to the next.
    template <tensor Role>
    KVQ_HD std::size_t head_bytes() const noexcept {
        if constexpr (detail::is_strided<Pair>)
            return row_memory_of<Role>().head_bytes;
        else
            return Role == tensor::key ? Pair::key_block_bytes : Pair::value_block_bytes;
    }
    template <tensor Role>
    KVQ_HD const row_memory& row_memory_of() const noexcept requires detail::is_strided<Pair> {
        if constexpr (Role == tensor::key)
            return own_keys.memory;
        else
            return own_values.memory;
    }
    /// A token of strided rows.
    template <tensor Role>
    KVQ_HD detail::row_address row(int page, int head,
                                   int token) const noexcept requires detail::is_strided<Pair> {
        const row_memory& m = row_memory_of<Role>();
        [[maybe_unused]] const auto of_page = static_cast<std::size_t>(page),
                                    of_head = static_cast<std::size_t>(head);
        const auto of_token = static_cast<std::size_t>(token);
        std::byte* const at = block<Role>(page, head) + of_token * m.token_bytes;
        if constexpr (detail::scheme_of<Role, Pair>::fixed_layout().scales_behind(
                          detail::dim_of<Role, Pair>) == 0)
            return {at, nullptr};
        else
            return {at, m.scales + of_page * m.scale_page_bytes + of_head * m.scale_head_bytes +
                            of_token * m.scale_token_bytes};
    }
    /// The lower plane of that block, of a format with two.
    template <tensor Role>
    KVQ_HD std::byte* lower_block(int page, int head) const noexcept requires detail::has_lower<Pair> {
        const auto number = static_cast<std::size_t>(page >> 16), of = static_cast<std::size_t>(head);
        if constexpr (Role == tensor::key)
            return lower.keys + number * lower.key_page_bytes + of * Pair::lower_key_bytes;
        else
            return lower.values + number * lower.value_page_bytes + of * Pair::lower_value_bytes;
    }
    KVQ_HD static std::size_t upper_number(int page) noexcept {
        if constexpr (detail::names_planes<Pair>) page &= 0xffff;
        return static_cast<std::size_t>(page);
    }
    /// Page size in bytes when pages are dense.
    static constexpr std::size_t dense_key_page(int kv_heads) noexcept {
        return Pair::key_block_bytes * static_cast<std::size_t>(kv_heads);
    }
    static constexpr std::size_t dense_value_page(int kv_heads) noexcept {
        return Pair::value_block_bytes * static_cast<std::size_t>(kv_heads);
    }
};

namespace detail {

/// The same pages, seen by the kernels of another pair with the same blocks.
template <class To, class Pair>
cache_ref<To> as_pair(const cache_ref<Pair>& c) noexcept {
    static_assert(To::key_block_bytes == Pair::key_block_bytes &&
                  To::value_block_bytes == Pair::value_block_bytes);
    cache_ref<To> to{c.key_pages, c.value_pages,  c.key_page_bytes, c.value_page_bytes, c.block_table,
                     c.tokens,    c.sequences,    c.table_columns,  c.kv_heads,         c.first_token,
                     c.key_plans, c.plan_numbers, c.plan_words,     c.key_feedback};
    to.head_tables = c.head_tables;
    if constexpr (has_lower<To> && has_lower<Pair>) static_cast<layer_memory&>(to.lower) = c.lower;
    if constexpr (read_by_numbers<typename Pair::keys>) to.own_keys.scheme = c.own_keys.scheme;
    if constexpr (read_by_numbers<typename Pair::values>) to.own_values.scheme = c.own_values.scheme;
    if constexpr (is_strided<Pair>) {
        to.own_keys.memory = c.own_keys.memory;
        to.own_values.memory = c.own_values.memory;
    }
    if constexpr (has_transform<typename Pair::keys>) to.own_keys.transform = c.own_keys.transform;
    if constexpr (has_transform<typename Pair::values>) to.own_values.transform = c.own_values.transform;
    return to;
}

/// The scheme of blocks of `Role` that are read by numbers, with its state.
template <tensor Role, class Pair>
KVQ_HD const scheme_of<Role, Pair>& own_scheme(const cache_ref<Pair>& c) noexcept {
    if constexpr (Role == tensor::key)
        return c.own_keys.scheme;
    else
        return c.own_values.scheme;
}
/// The transform of the blocks of `Role`; where there is none, it is not asked for.
template <tensor Role, class Pair>
KVQ_HD const device_transform& transform_of(const cache_ref<Pair>& c) noexcept {
    if constexpr (Role == tensor::key)
        return c.own_keys.transform;
    else
        return c.own_values.transform;
}
/// Are keys or values behind a transform?
template <class Pair>
inline constexpr bool pair_turns = has_transform<typename Pair::keys> || has_transform<typename Pair::values>;
template <tensor Role, class Pair>
status check_transform([[maybe_unused]] const cache_ref<Pair>& c) noexcept {
    if constexpr (has_transform<scheme_of<Role, Pair>>) {
        const device_transform& t = transform_of<Role>(c);
        if (t.what.kind == transform_kind::matrix && (t.columns == nullptr || t.rows == nullptr))
            return bad_value(
                "%s are rotated, but no matrices were given (cache::rotate(), cache_ref::set_transform())",
                Role == tensor::key ? "keys" : "values");
        if (t.what.kind == transform_kind::hadamard && t.what.seed != 0 && t.layer < 0)
            return bad_value(
                "%s have the random signs of their layer, but the layer was not given "
                "(cache_ref::set_transform())",
                Role == tensor::key ? "keys" : "values");
    }
    return {};
}

/// Strides of rows: multiples of 16 bytes, and no two rows share bytes, nor their scales.
template <tensor Role, class Pair>
status check_rows(const cache_ref<Pair>& c) noexcept {
    constexpr auto l = scheme_of<Role, Pair>::fixed_layout();
    constexpr int dim = dim_of<Role, Pair>, scales = l.scales_behind(dim);
    constexpr auto bytes = static_cast<std::size_t>(l.row_bytes(dim));
    const char* const name = Role == tensor::key ? "keys" : "values";
    const row_memory& m = c.template row_memory_of<Role>();
    constexpr auto tokens = static_cast<std::size_t>(Pair::page_tokens);
    const auto heads = static_cast<std::size_t>(c.kv_heads);
    if ((m.token_bytes | m.head_bytes) % 16 != 0 || (m.token_bytes < bytes && tokens > 1) ||
        (m.head_bytes < bytes && heads > 1))
        return bad_value(
            "rows of %s have %zu bytes, but tokens are %zu bytes apart and heads %zu; both must be "
            "multiples of 16",
            name, bytes, m.token_bytes, m.head_bytes);
    if (tokens > 1 && heads > 1 && (heads - 1) * m.head_bytes + bytes > m.token_bytes &&
        (tokens - 1) * m.token_bytes + bytes > m.head_bytes)
        return bad_value("%zu tokens of %s that are %zu bytes apart and %zu heads %zu share bytes", tokens,
                         name, m.token_bytes, heads, m.head_bytes);
    // Of what is less than a page apart, a page has all.
    const auto meet = [&](std::size_t own, std::size_t of_page, std::size_t of_token, std::size_t of_head) {
        return own + (of_token < of_page ? (tokens - 1) * of_token : 0) +
                   (of_head < of_page ? (heads - 1) * of_head : 0) >
               of_page;
    };
    if (const std::size_t page = Role == tensor::key ? c.key_page_bytes : c.value_page_bytes;
        meet(bytes, page, m.token_bytes, m.head_bytes))
        return bad_value(
            "pages of %s that are %zu bytes apart share bytes: %zu tokens are %zu bytes apart and %zu heads "
            "%zu",
            name, page, tokens, m.token_bytes, heads, m.head_bytes);
    if (m.token_bytes > 0x7fffffffu / tokens || m.scale_token_bytes > 0x7fffffffu / tokens)
        return bad_value("%zu tokens of %s that are %zu bytes apart are more than 2 GB a page", tokens, name,
                         kvq::detail::larger(m.token_bytes, m.scale_token_bytes));
    if ((scales > 0) != (m.scales != nullptr))
        return bad_value("rows of %s have %d bytes of scales beside them, but the pointer is %s", name,
                         scales, m.scales == nullptr ? "null" : "not null");
    if (scales > 0 && (reinterpret_cast<std::uintptr_t>(m.scales) | m.scale_page_bytes | m.scale_token_bytes |
                       m.scale_head_bytes) %
                              4 !=
                          0)
        return bad_value(
            "scales of %s are %zu, %zu and %zu bytes from page, token and head to the next, not "
            "multiples of 4 from one",
            name, m.scale_page_bytes, m.scale_token_bytes, m.scale_head_bytes);
    if constexpr (scales > 0) {
        constexpr auto own = static_cast<std::size_t>(scales);
        if ((m.scale_token_bytes < own && tokens > 1) || (m.scale_head_bytes < own && heads > 1))
            return bad_value("%s have %d bytes of scales a row, but tokens are %zu bytes apart and heads %zu",
                             name, scales, m.scale_token_bytes, m.scale_head_bytes);
        if (meet(own, m.scale_page_bytes, m.scale_token_bytes, m.scale_head_bytes))
            return bad_value(
                "scales of %s whose pages are %zu bytes apart share bytes: tokens are %zu bytes apart and "
                "heads %zu",
                name, m.scale_page_bytes, m.scale_token_bytes, m.scale_head_bytes);
    }
    return {};
}

template <class Pair>
status check_ref(const cache_ref<Pair>& c, bool tables) noexcept {
    if (status s = check_transform<tensor::key>(c); !s) return s;
    if (status s = check_transform<tensor::value>(c); !s) return s;
    if (c.kv_heads < 1) return bad_value("the cache has %d kv heads", c.kv_heads);
    if (!has_values<Pair> && c.kv_heads != 1)
        return bad_value("latents have one kv head, the cache has %d", c.kv_heads);
    if (c.key_pages == nullptr || (has_values<Pair> && c.value_pages == nullptr))
        return bad_value("the cache has no pages (null pointer)");
    if ((reinterpret_cast<std::uintptr_t>(c.key_pages) | reinterpret_cast<std::uintptr_t>(c.value_pages) |
         c.key_page_bytes | c.value_page_bytes) %
            16 !=
        0)
        return bad_value("pages must start on 16 bytes and be a multiple of 16 bytes apart");
    if constexpr (is_strided<Pair>) {
        if (status s = check_rows<tensor::key>(c); !s) return s;
        if (status s = check_rows<tensor::value>(c); !s) return s;
    } else if (c.key_page_bytes < c.dense_key_page(c.kv_heads) ||
               c.value_page_bytes < c.dense_value_page(c.kv_heads))
        return bad_value("page strides of %zu and %zu bytes are smaller than %d heads of %zu and %zu bytes",
                         c.key_page_bytes, c.value_page_bytes, c.kv_heads, Pair::key_block_bytes,
                         Pair::value_block_bytes);
    if constexpr (has_lower<Pair>) {
        const auto heads = static_cast<std::size_t>(c.kv_heads);
        if (c.lower.keys == nullptr || c.lower.values == nullptr)
            return bad_value("the cache has no pages of lower planes (null pointer)");
        if ((reinterpret_cast<std::uintptr_t>(c.lower.keys) |
             reinterpret_cast<std::uintptr_t>(c.lower.values) | c.lower.key_page_bytes |
             c.lower.value_page_bytes) %
                    16 !=
                0 ||
            c.lower.key_page_bytes < heads * Pair::lower_key_bytes ||
            c.lower.value_page_bytes < heads * Pair::lower_value_bytes)
            return bad_value(
                "lower planes are %zu and %zu bytes apart, which is no multiple of 16 with room "
                "for %d heads of %zu and %zu bytes",
                c.lower.key_page_bytes, c.lower.value_page_bytes, c.kv_heads, Pair::lower_key_bytes,
                Pair::lower_value_bytes);
    }
    if (!tables) return {};
    if (c.sequences < 0 || c.table_columns < (c.sequences > 0 ? 1 : 0))
        return bad_value("%d sequences with %d block table columns", c.sequences, c.table_columns);
    if (c.table_columns > most_tokens / Pair::page_tokens)
        return bad_value("%d block table columns of %d tokens are more than 2^28 tokens", c.table_columns,
                         Pair::page_tokens);
    if (c.sequences > 0 && (c.block_table == nullptr || c.tokens == nullptr))
        return bad_value("block table or sequence lengths are null pointers");
    if (c.first_token < 0 || c.first_token > most_tokens)
        return bad_value("first_token is %d", c.first_token);
    return {};
}

}  // namespace detail
}}}  // namespace kvq::cuda
