// The products of blocks with n operands, queries (K) or rows of weights (V). One class for each way in which
// attention reads blocks (schemes/codec_spec.hpp); all schemes that are read in one way, with codes of one
// width, share it.
//
//   values        float products on 16/32-bit values                       (window/window_product.hpp)
//                 many operands: 16-bit values as integers of 14 bits      (window/word_product.hpp),
//                 or in tiles of bfloat16                                  (window/tile_value_product.hpp)
//   token_rows    float products in place, of numbers in registers (rows/row_product.hpp)
//   rows          the same products with a copy of the codes of 8-bit floats (float_rows.hpp)
//   codes         integer products on codes, parameters folded
//     (product/folded.hpp, code_product.hpp)
//   segments      the same for one range of columns after the other, added up (product/segment_product.hpp)
//                 both also as values of a latent layer that are read from keys (product/turned_product.hpp)
//   dequantized   the block is dequantized to floats in the workspace, then multiplied
//
//   product(scheme, shape, id, n)   for the blocks of one head and shape; layouts are computed here, once
//   begin                           prepares the operands, once for all blocks if columns carry no parameters
//   finish                          multiplies
//
//       y[i][r] (+)= sum_c x^[r][c] x[i][c] over the first `rows` rows and `cols` columns (a quantized block
//         is always full).
//       ahead: distance to the block that is read next, for prefetching; 0: none
//
// A product points to its scheme. On architectures that multiply tiles, a tile_session for n operands must be
// open during `finish`.
#pragma once

#include <new>
#include <type_traits>

#include "../schemes/codec_spec.hpp"
#include "../schemes/mixed_bits.hpp"
#include "float_rows.hpp"
#include "kernel_table.hpp"
#include "product/code_product.hpp"
#include "product/plane_codes.hpp"
#include "product/turned_product.hpp"
#include "rows/row_product.hpp"
#include "window/tile_value_product.hpp"
#include "window/word_product.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// Prefetches [from, to): parameters are needed first and all at once, so that every block would begin with a
/// wait for memory.
KVQ_INLINE void prefetch_bytes(const std::byte* block, std::size_t from, std::size_t to) {
    for (std::size_t at = from; at < to; at += 64) detail::prefetch(block + at);
}

/// Codes of one width, or two_planes: of 4 bits and their lower planes. Table: those of 4 bits that stand for
/// entries of a table.
template <class Backend, int Bits, bool Table>
class code_block_product {
public:
    using lanes = typename Backend::lanes;

    code_block_product(const product_blocks& of, const block_shape& shape, int n)
        : plan_(Bits == two_planes ? of_both(of.meaning) : of.meaning,
                {{shape.rows(), of.row_group}, {shape.cols(), of.col_group}}, n,
                query_bytes_in_tiles<lanes, Backend>(n)),
          source_(of.source),
          block_bytes_(of.bytes) {}

    std::size_t workspace_bytes() const { return plan_.workspace_bytes(); }

    void begin(const block_shape&, block_id id, const std::byte* block, const float* x,
               std::ptrdiff_t x_stride, std::byte* workspace) const {
        if (plan_.folds_in_tiles()) return;
        fold<lanes, Backend>(plan_.meaning, plan_.fold, source_.of(id, block), x, x_stride,
                             workspace + plan_.parameter_bytes);
    }
    void finish(const block_shape&, block_id id, const std::byte* block, const float* x,
                std::ptrdiff_t x_stride, int, int, float* y, std::ptrdiff_t y_stride, bool add,
                std::ptrdiff_t ahead, std::byte* workspace) const {
        prefetch_bytes(block + ahead, plan_.parameters, block_bytes_);
        const parameter_source source = source_.of(id, block);
        code_product<lanes, Backend, Bits, codes_meant<lanes, Table>>(
            plan_, source, workspace, plan_.folds_in_tiles() ? unfolded{x, x_stride} : unfolded{})
            .run(y, y_stride, add, ahead);
    }

private:
    code_plan<Bits> plan_;
    parameter_source source_;
    std::size_t block_bytes_;
};

/// Codes of several widths. Widths: code_widths<...>.
template <class Backend, class Widths>
class segment_block_product {
public:
    using lanes = typename Backend::lanes;

    segment_block_product(const product_blocks& of, const block_shape& shape, int n)
        : plan_(of, shape, n, query_bytes_in_tiles<lanes, Backend>(n)),
          source_(of.source),
          block_bytes_(of.bytes) {}

    std::size_t workspace_bytes() const { return plan_.workspace_bytes(); }

    void begin(const block_shape&, block_id, const std::byte*, const float*, std::ptrdiff_t,
               std::byte* workspace) const {
        plan_.write_units(workspace);
    }
    void finish(const block_shape&, block_id id, const std::byte* block, const float* x,
                std::ptrdiff_t x_stride, int, int, float* y, std::ptrdiff_t y_stride, bool add,
                std::ptrdiff_t ahead, std::byte* workspace) const {
        prefetch_bytes(block + ahead, plan_.parameters, block_bytes_);
        segment_product<lanes, Backend, Widths>::run(plan_, source_.of(id, block, plan_.units(workspace)), x,
                                                     x_stride, y, y_stride, add, ahead, workspace);
    }

private:
    segment_plan<Widths> plan_;
    parameter_source source_;
    std::size_t block_bytes_;
};

/// Values of type T, in blocks of any number of tokens: calls take their shape as an argument.
template <class Backend, class T>
class window_block_product {
public:
    using lanes = typename Backend::lanes;

    window_block_product(const product_blocks&, const block_shape& shape, int n) : n_(n) {
        if constexpr (by_tiles)
            if (multiplies_tiles<lanes, T>(n)) {
                tiles_ = value_tile_space(shape, n, Backend::query_bytes, in_tiles::value_pieces);
                return;
            }
        if (multiplies_words<lanes, T>(n)) words_ = word_space(shape, n);
    }

    std::size_t workspace_bytes() const { return detail::larger(words_.bytes, tiles_.bytes); }

    void begin(const block_shape& shape, block_id, const std::byte*, const float* x, std::ptrdiff_t x_stride,
               std::byte* workspace) const {
        if (shape.role == tensor::key) fold(x, x_stride, shape.cols(), workspace);
    }
    void finish(const block_shape& shape, block_id, const std::byte* block, const float* x,
                std::ptrdiff_t x_stride, int rows, int cols, float* y, std::ptrdiff_t y_stride, bool add,
                std::ptrdiff_t ahead, std::byte* workspace) const {
        // For V the number of used columns is known only here.
        if (shape.role == tensor::value) fold(x, x_stride, cols, workspace);
        if constexpr (by_tiles)
            if (tiles_.n > 0)
                return in_tiles::run(tiles_, shape, block, x, x_stride, rows, cols, y, y_stride, add, ahead,
                                     workspace);
        if constexpr (by_words)
            if (words_.n > 0 && word_product<lanes, T>::run(words_, shape, block, rows, cols, y, y_stride,
                                                            add, ahead, workspace))
                return;
        window_product<lanes, T>(shape, block, x, x_stride, n_, rows, cols, y, y_stride, add, ahead);
    }

private:
    static constexpr bool by_words = has_word_dots<lanes> && sizeof(T) == 2,
                          by_tiles = has_tiles<lanes> && sizeof(T) == 2;
    using in_tiles = typename tile_product_of<lanes, T, Backend>::type;

    void fold(const float* x, std::ptrdiff_t x_stride, int cols, std::byte* workspace) const {
        if constexpr (by_tiles)
            if (tiles_.n > 0) return in_tiles::fold(tiles_, x, x_stride, cols, workspace);
        if constexpr (by_words)
            if (words_.n > 0) word_product<lanes, T>::fold(words_, x, x_stride, cols, workspace);
    }

    // Both empty: multiplied directly.
    word_space words_;
    value_tile_space tiles_;
    int n_;
};

/// Rows of tokens, in layouts that are values.
template <class Backend>
class token_row_product {
public:
    using lanes = typename Backend::lanes;

    token_row_product(const product_blocks& of, const block_shape& shape, int n)
        : product_(of.rows, of.tensor_scale, shape, n), layout_(of.rows) {}

    std::size_t workspace_bytes() const { return product_.workspace_bytes(); }

    void begin(const block_shape& shape, block_id, const std::byte*, const float* x, std::ptrdiff_t x_stride,
               std::byte* workspace) const {
        if (shape.role == tensor::key) product_.begin(x, x_stride, workspace);
    }
    void finish(const block_shape& shape, block_id, const std::byte* block, const float* x,
                std::ptrdiff_t x_stride, int rows, int cols, float* y, std::ptrdiff_t y_stride, bool add,
                std::ptrdiff_t ahead, std::byte* workspace) const {
        const int row = layout_.row_bytes(shape.dim), behind = layout_.scales_behind(shape.dim);
        const row_place at{block, row, block + std::ptrdiff_t{shape.tokens} * row, behind};
        if (shape.role == tensor::key)
            product_.keys(at, 0, rows, y, y_stride, add, ahead, workspace);
        else
            product_.values(at, 0, cols, x, x_stride, y, y_stride, add, ahead, workspace);
    }
    bool keys_of(const row_place& at, int from, int tokens, float* y, std::ptrdiff_t y_stride,
                 std::byte* workspace) const {
        return product_.keys(at, from, tokens, y, y_stride, false, 0, workspace);
    }
    bool add_values_of(const row_place& at, int from, int tokens, const float* w, std::ptrdiff_t w_stride,
                       float* y, std::ptrdiff_t y_stride, std::byte* workspace) const {
        return product_.values(at, from, tokens, w, w_stride, y, y_stride, true, 0, workspace);
    }

private:
    row_product<lanes> product_;
    row_layout layout_;
};

/// Blocks that are dequantized first.
template <class Backend>
class dequantized_block_product {
public:
    using lanes = typename Backend::lanes;

    dequantized_block_product(const product_blocks& of, const block_shape& shape, int n)
        : scheme_(of.source.owner), dequantize_(of.dequantize), values_(shape.values()), n_(n) {}

    std::size_t workspace_bytes() const { return detail::round_up(values_ * sizeof(float), std::size_t{64}); }

    void begin(const block_shape&, block_id, const std::byte*, const float*, std::ptrdiff_t,
               std::byte*) const {}
    void finish(const block_shape& shape, block_id id, const std::byte* block, const float* x,
                std::ptrdiff_t x_stride, int rows, int cols, float* y, std::ptrdiff_t y_stride, bool add,
                std::ptrdiff_t, std::byte* workspace) const {
        float* const values = reinterpret_cast<float*>(workspace);
        dequantize_(scheme_, shape, id, block, values);
        for (int i = 0; i < n_; ++i) {
            if (shape.role == tensor::key)
                multiply_keys(values, shape.dim, x + i * x_stride, rows, cols, y + i * y_stride, add);
            else
                for (int from = 0; from < cols; from += sum_columns)
                    multiply_values(values + std::ptrdiff_t{from} * shape.dim, shape.dim,
                                    x + i * x_stride + from, rows, detail::smaller(cols - from, sum_columns),
                                    y + i * y_stride, add || from > 0);
        }
    }

private:
    // Products with dequantized values, [tokens][dim].

    /// y[t] (+)= sum over channels of values[t][c] x[c].
    static void multiply_keys(const float* values, int dim, const float* x, int tokens, int channels,
                              float* y, bool add) {
        for (int t = 0; t < tokens; ++t) {
            const float* const row = values + t * dim;
            auto sums = lanes::splat_float(0.0f);
            int c = 0;
            for (; c + lanes::width <= channels; c += lanes::width)
                sums = lanes::multiply_add(lanes::load_floats(row + c), lanes::load_floats(x + c), sums);
            float sum = lanes::sum(sums);
            for (; c < channels; ++c) sum += row[c] * x[c];
            y[t] = add ? y[t] + sum : sum;
        }
    }
    /// y[c] (+)= sum over tokens of values[t][c] x[t].
    static void multiply_values(const float* values, int dim, const float* x, int channels, int tokens,
                                float* y, bool add) {
        int c = 0;
        for (; c + lanes::width <= channels; c += lanes::width) {
            auto sums = add ? lanes::load_floats(y + c) : lanes::splat_float(0.0f);
            for (int t = 0; t < tokens; ++t)
                sums = lanes::multiply_add(lanes::load_floats(values + t * dim + c), lanes::splat_float(x[t]),
                                           sums);
            lanes::store_floats(y + c, sums);
        }
        for (; c < channels; ++c) {
            float sum = 0.0f;
            for (int t = 0; t < tokens; ++t) sum += values[t * dim + c] * x[t];
            y[c] = add ? y[c] + sum : sum;
        }
    }

    const void* scheme_;
    decltype(product_blocks::dequantize) dequantize_;
    std::size_t values_;  ///< floats of the workspace
    int n_;
};

template <class Backend, class Scheme>
constexpr auto block_product_of() {
    if constexpr (foldable<Scheme>)
        return std::type_identity<
            code_block_product<Backend, Scheme::code_bits, detail::with_code_entries<Scheme>>>();
    else if constexpr (segmented<Scheme>)
        return std::type_identity<segment_block_product<Backend, typename Scheme::width_list>>();
    else if constexpr (rows_of_floats<Scheme>)
        return std::type_identity<
            float_row_product<window_block_product<Backend, bfloat16>, typename Scheme::row_code>>();
    else if constexpr (rows_of_tokens<Scheme>)
        return std::type_identity<token_row_product<Backend>>();
    else if constexpr (full_precision<Scheme>)
        return std::type_identity<window_block_product<Backend, typename Scheme::value_type>>();
    else
        return std::type_identity<dequantized_block_product<Backend>>();
}
/// The product that reads the blocks of a scheme.
template <class Backend, class Scheme>
using block_product = typename decltype(block_product_of<Backend, Scheme>())::type;

template <class Product>
struct product_table;

/// The product of weights with the values of a latent layer in blocks that Product reads as keys, or null.
constexpr const product_functions* key_values_of(const void*) { return nullptr; }
template <class Backend, int Bits, bool Table>
requires(Bits != two_planes) constexpr const product_functions* key_values_of(
    const code_block_product<Backend, Bits, Table>*) {
    return &product_table<turned_block_product<Backend, Table, Bits>>::functions;
}
template <class Backend, int... Widths>
constexpr const product_functions* key_values_of(
    const segment_block_product<Backend, code_widths<Widths...>>*) {
    return &product_table<turned_block_product<Backend, false, Widths...>>::functions;
}
template <class Backend, float_format T>
constexpr const product_functions* key_values_of(const window_block_product<Backend, T>*) {
    if constexpr (sizeof(T) == 2)
        return &product_table<turned_value_product<T, window_block_product<Backend, T>>>::functions;
    else
        return nullptr;
}

/// The product of codes with their lower planes, or null.
constexpr const product_functions* planes_of(const void*) { return nullptr; }
template <class Backend>
constexpr const product_functions* planes_of(const code_block_product<Backend, 4, false>*) {
    return &product_table<code_block_product<Backend, two_planes, false>>::functions;
}

/// The functions of a plan, of all schemes whose blocks are read in one way.
template <class Product>
struct product_table {
    static_assert(std::is_trivially_destructible_v<Product>);

    static std::size_t make_plan(const product_blocks& of, const block_shape& shape, int rows, void* plan) {
        const Product p(of, shape, rows);
        const std::size_t bytes = p.workspace_bytes();
        if (plan) ::new (plan) Product(p);
        return bytes;
    }
    static void begin(const void* plan, const block_shape& shape, block_id id, const std::byte* block,
                      const float* x, std::ptrdiff_t x_stride, std::byte* workspace) {
        static_cast<const Product*>(plan)->begin(shape, id, block, x, x_stride, workspace);
    }
    static void finish(const void* plan, const block_shape& shape, block_id id, const std::byte* block,
                       const float* x, std::ptrdiff_t x_stride, int rows, int cols, float* y,
                       std::ptrdiff_t y_stride, bool add, std::ptrdiff_t ahead, std::byte* workspace) {
        static_cast<const Product*>(plan)->finish(shape, id, block, x, x_stride, rows, cols, y, y_stride, add,
                                                  ahead, workspace);
    }

    static constexpr row_place_functions of_places() {
        if constexpr (requires { &Product::keys_of; })
            return {[](const void* plan, const row_place& at, int from, int tokens, float* y,
                       std::ptrdiff_t y_stride, std::byte* workspace) {
                        return static_cast<const Product*>(plan)->keys_of(at, from, tokens, y, y_stride,
                                                                          workspace);
                    },
                    [](const void* plan, const row_place& at, int from, int tokens, const float* w,
                       std::ptrdiff_t w_stride, float* y, std::ptrdiff_t y_stride, std::byte* workspace) {
                        return static_cast<const Product*>(plan)->add_values_of(at, from, tokens, w, w_stride,
                                                                                y, y_stride, workspace);
                    }};
        else
            return {};
    }

    static constexpr product_functions functions{sizeof(Product),
                                                 &make_plan,
                                                 &begin,
                                                 &finish,
                                                 key_values_of(static_cast<const Product*>(nullptr)),
                                                 planes_of(static_cast<const Product*>(nullptr)),
                                                 of_places()};
};

/// Does one call of `begin` serve every block?
template <class Scheme>
constexpr bool folds_once(tensor role) noexcept {
    if constexpr (foldable<Scheme>)
        return !Scheme::fold(role).columns();
    else
        return true;
}

}}}  // namespace kvq::kernels
