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

#include "../../schemes/affine.hpp"
#include "../../schemes/full.hpp"
#include "../../schemes/int8.hpp"
#include "../../schemes/kivi.hpp"
#include "../../schemes/presets.hpp"
#include "status.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

namespace detail {

template <class S>
inline constexpr bool is_composed = false;
template <int B, class L, class G, class P>
inline constexpr bool is_composed<scheme<bits<B>, L, G, params<P>>> =
    kvq::detail::library_levels<L>&& kvq::detail::fixed_group<G>;

/// Levels of one's own: kernels would compute with the zero code and the grid of the library's.
template <class S>
inline constexpr bool has_own_levels = false;
template <class C, class L, class G, class Params, class E, class T>
inline constexpr bool has_own_levels<scheme<C, L, G, Params, E, T>> = !kvq::detail::library_levels<L>;

/// How parameters are stored: byte_params, or the type of params<P> and packed_params<P>.
template <class Params>
struct storage {
    using type = void;
};
template <>
struct storage<byte_params> {
    using type = byte_params;
};
template <class P>
struct storage<params<P>> {
    using type = P;
};
template <class P>
struct storage<packed_params<P>> : storage<params<P>> {};
template <class Params>
struct storage<token_scales<Params>> : storage<Params> {};
template <class Params>
using stored_as = typename storage<Params>::type;

template <class P>
inline constexpr bool is_stored = float_format<P> || std::is_same_v<P, byte_params>;
/// Parameters per channel that an encoder fits, in any storage, with or without token scales.
template <class S>
inline constexpr bool is_grid = false;
template <int B, int G, class Params, class Encoder, class TokenScales>
inline constexpr bool is_grid<scheme<bits<B>, asymmetric, per_channel<G>, Params, Encoder, TokenScales>> =
    G != any_group &&
    !scheme<bits<B>, asymmetric, per_channel<G>, Params, Encoder, TokenScales>::fits_range &&
    is_stored<stored_as<Params>> &&
    (std::is_same_v<TokenScales, no_token_scales> || is_stored<stored_as<TokenScales>>);

/// Several widths. (Kernels compute where biases lie: parameters have no padding.)
template <class S>
inline constexpr bool is_mixed = false;
template <class W, class A, class G, class Params, class Encoder>
inline constexpr bool is_mixed<scheme<mixed_bits<W, A>, asymmetric, G, Params, Encoder>> =
    is_stored<stored_as<Params>>;

/// Bytes of a block, for schemes whose encoders have state as well.
template <class S>
constexpr std::size_t block_bytes_of(const block_shape& s) {
    if constexpr (full_precision<S>)
        return S{}.block_bytes(s);
    else
        return typename S::layout_type{}.bytes(s);
}

}  // namespace detail

/// Schemes that kernels know: full<T>; scheme<...> with the library's levels, parameters in a float format
/// and the encoder `enclosing`; scheme<...> per channel with asymmetric levels, parameters of 8 bits or in a
/// float format, token scales or none, any encoder, one width or several.
template <class S>
concept device_scheme = full_precision<S> || detail::is_grid<S> || detail::is_mixed<S> ||
    (detail::is_composed<S>&& float_format<typename S::parameter>);

template <class Keys, class Values, int HeadDim, int PageTokens, int ValueDim = HeadDim>
struct block_pair {
    static_assert(
        !detail::has_own_levels<Keys> && !detail::has_own_levels<Values>,
        "kvq::cuda::block_pair: levels are asymmetric or symmetric; levels of your own run on the CPU");
    static_assert(
        (device_scheme<Keys> && device_scheme<Values>) || detail::has_own_levels<Keys> ||
            detail::has_own_levels<Values>,
        "kvq::cuda::block_pair: schemes must be full<T>, or scheme<...> with float, float16, bfloat16 or "
        "8-bit parameters; encoders other than enclosing are per channel, with asymmetric levels");
    static_assert(!detail::is_mixed<Values>, "kvq::cuda::block_pair: several widths are for keys only");
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
    if constexpr (detail::is_mixed<typename Pair::keys>)
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
    /// Coding keys with error_feedback: [kv_heads][head_dim][head_dim] of this layer in device memory, see
    /// write_key_feedback(). Null: the encoder has no matrices.
    const float* key_feedback = nullptr;

    /// Where the block table names the page in a column of a sequence.
    KVQ_HD std::size_t table_entry(int sequence, int column) const noexcept {
        return static_cast<std::size_t>(sequence) * static_cast<std::size_t>(table_columns) +
               static_cast<std::size_t>(column);
    }
    /// The plan of a head, or null.
    KVQ_HD const std::uint16_t* key_plan(int head) const noexcept {
        return key_plans == nullptr ? nullptr : key_plans + head * key_plan_words<Pair>;
    }
    KVQ_HD std::byte* key_block(int page, int head) const noexcept {
        return key_pages + static_cast<std::size_t>(page) * key_page_bytes +
               static_cast<std::size_t>(head) * Pair::key_block_bytes;
    }
    KVQ_HD std::byte* value_block(int page, int head) const noexcept {
        return value_pages + static_cast<std::size_t>(page) * value_page_bytes +
               static_cast<std::size_t>(head) * Pair::value_block_bytes;
    }
    /// The block of `Role` of one page and head.
    template <tensor Role>
    KVQ_HD std::byte* block(int page, int head) const noexcept {
        if constexpr (Role == tensor::key)
            return key_block(page, head);
        else
            return value_block(page, head);
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

template <tensor Role, class Pair>
using scheme_of = std::conditional_t<Role == tensor::key, typename Pair::keys, typename Pair::values>;
template <tensor Role, class Pair>
inline constexpr int dim_of = Role == tensor::key ? Pair::head_dim : Pair::value_dim;
template <tensor Role, class Pair>
inline constexpr block_shape shape_of{Role, Pair::page_tokens, dim_of<Role, Pair>};

/// Of a sequence: sums and differences of a few numbers of tokens fit into an int.
inline constexpr int most_tokens = 1 << 28;

template <class Pair>
status check_ref(const cache_ref<Pair>& c, bool tables) noexcept {
    if (c.kv_heads < 1) return bad_value("the cache has %d kv heads", c.kv_heads);
    if (c.key_pages == nullptr || c.value_pages == nullptr)
        return bad_value("the cache has no pages (null pointer)");
    if ((reinterpret_cast<std::uintptr_t>(c.key_pages) | reinterpret_cast<std::uintptr_t>(c.value_pages) |
         c.key_page_bytes | c.value_page_bytes) %
            16 !=
        0)
        return bad_value("pages must start on 16 bytes and be a multiple of 16 bytes apart");
    if (c.key_page_bytes < c.dense_key_page(c.kv_heads) ||
        c.value_page_bytes < c.dense_value_page(c.kv_heads))
        return bad_value("page strides of %zu and %zu bytes are smaller than %d heads of %zu and %zu bytes",
                         c.key_page_bytes, c.value_page_bytes, c.kv_heads, Pair::key_block_bytes,
                         Pair::value_block_bytes);
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
