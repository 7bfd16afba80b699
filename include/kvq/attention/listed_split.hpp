// Attention of the query rows of one query token over a part of its list of tokens.
//
//   part of a list -> the tokens that masks show, ascending -> 64 at a time: x^ of K and V as rows of floats
//     -> scores, softmax, outputs
//
// Contract: reads the codes of listed tokens, and of the pages no more than their parameters; the bits of x^
// are those of sequence::dequantize(). A list is cut into parts as it is given, so that the result does not
// depend on threads. Products are float sums (cpu/product/token_products.hpp).
#pragma once

#include <algorithm>

#include "attention_rows.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

struct listed_split {
    const attention_rows& of;
    const attention_rows::row_block& rows;  // of one query token
    const attention_scratch& s;

    /// Adds entries [begin, end) of the list to the outputs s.part, which are zero, and to max and sum.
    void attend(int begin, int end, float* max, float* sum) const {
        const int n = shown_tokens(begin, end), dim = of.plan.value_dim,
                  output_stride = of.plan.output_stride();
        for (int i = 0; i < n; i += listed_block_tokens) {
            const int count = smaller(listed_block_tokens, n - i);
            const float* const values = gather(s.listed + i, count);
            const std::ptrdiff_t stride = values == s.listed_keys ? of.plan.dim : dim;
            backend().score_tokens(s.listed_keys, of.plan.dim, count, of.plan.dim, s.query, of.plan.dim,
                                   rows.n, s.scores, s.scores_stride);
            change_scores(s.listed + i, count);
            float factor[most_query_rows];
            of.softmax(s, rows.n, count, max, sum, factor);
            for (int r = 0; r < rows.n; ++r) {
                const float by = factor[r];
                for (int d = 0; d < dim && by != 1.0f; ++d) s.part[r * output_stride + d] *= by;
            }
            backend().add_tokens(values, stride, count, dim, s.scores, s.scores_stride, rows.n, s.part,
                                 output_stride);
        }
    }

private:
    const backend_functions& backend() const noexcept { return *of.values.window().functions().backend; }

    /// Writes those of entries [begin, end) that the query sees to s.listed, ascending. Returns their number.
    int shown_tokens(int begin, int end) const {
        const listed_tokens& lists = *of.mods.lists();
        const int query = rows.first / of.plan.group, pos = of.q_pos(rows.first);
        int n = 0;
        for (int i = begin; i < end; ++i)
            if (const int token = lists.token(query, rows.head, i); token >= 0 && of.mods.shows(pos, token))
                s.listed[n++] = token;
        std::sort(s.listed, s.listed + n);
        return n;
    }

    /// Writes x^ of n tokens to s.listed_keys. Returns that of their values: s.listed_values, or where the
    /// layer has no pages of values the keys.
    const float* gather(const std::int32_t* tokens, int n) const {
        const float* values = s.listed_values;
        for (int i = 0, e = 0; i < n;) {
            e = of.pages.lower_bound(tokens[i] + 1) - 1;
            const layer_pages::entry entry = of.pages.at(e);
            const int moved = entry.skip - entry.first_token, behind = entry.first_token + entry.tokens;
            std::int32_t in_page[listed_block_tokens];
            int count = 0;
            for (; i + count < n && tokens[i + count] < behind; ++count)
                in_page[count] = tokens[i + count] + moved;
            float* const to = s.listed_keys + std::ptrdiff_t{i} * of.plan.dim;
            read(of.keys, *entry.keys, {tensor::key, entry.keys->tokens, of.plan.dim}, in_page, count, to);
            if (of.rotate && entry.shift != 0) (*of.rotate)(to, count, of.plan.dim, entry.shift);
            if (entry.values == entry.keys)
                values = s.listed_keys;
            else
                read(of.values, *entry.values, {tensor::value, entry.values->tokens, of.plan.value_dim},
                     in_page, count, s.listed_values + std::ptrdiff_t{i} * of.plan.value_dim);
            i += count;
        }
        return values;
    }
    void read(const format_table& table, const page& p, const block_shape& shape, const std::int32_t* tokens,
              int n, float* to) const {
        const format& f = table.of(p);
        block_id id{of.layer, rows.head};
        const std::byte* const block =
            f.block_at(shape, of.pages.data(p), of.mods.upper_only() ? nullptr : p.lower, rows.head, id);
        f.functions().dequantize_tokens(f.scheme(), shape, id, block, tokens, n, to, shape.dim,
                                        s.listed_scratch);
    }

    void change_scores(const std::int32_t* tokens, int n) const {
        if (!of.mods.changes_scores()) return;
        for (int r = 0; r < rows.n; ++r) {
            float* const score = s.scores + r * s.scores_stride;
            const int row = rows.first + r, head = of.q_head(rows.head, row), pos = of.q_pos(row);
            for (int t = 0; t < n; ++t)
                of.mods.change_scores(score + t, 1, head, pos, tokens[t], attention_rows::log2e);
        }
    }
};

}}}  // namespace kvq::detail
