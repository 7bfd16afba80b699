// Attention over rows in the memory of other systems, and copies of them.
#include <kvq/attention/copy_rows.hpp>

#include "mods.hpp"
#include "objects.hpp"

namespace kvq::c { namespace {

rows_view rows_of(const kvq_rows* given, const char* name) {
    const kvq_rows& r = place(given, name);
    return {.rows = get(r.format, name).format,
            .data = r.data,
            .token_stride = r.token_stride,
            .head_stride = r.head_stride,
            .block_stride = r.block_stride,
            .scales = r.scales,
            .scale_token_stride = r.scale_token_stride,
            .scale_head_stride = r.scale_head_stride,
            .scale_block_stride = r.scale_block_stride,
            .scale_group_stride = r.scale_group_stride,
            .biases = r.biases};
}

row_blocks blocks_of(const kvq_row_blocks& b) { return {b.table, b.blocks, b.block_tokens, b.memory_blocks}; }

/// What a copy takes of its options.
struct copying {
    kvq_attend_options o;
    workspace own;

    explicit copying(const kvq_attend_options* options) : o(read_optional(options, "options")) {
        expect(o.mods == nullptr && o.lse == nullptr, KVQ_ERROR_ARGUMENT,
               "options of a copy of rows have mods or lse");
    }
    workspace& space() { return o.workspace ? get(o.workspace, "workspace").space : own; }
    executor_view threads() const { return executor_of(o.executor); }
};

/// Raises unless the tensor of this name has tokens of these blocks.
const kvq_row_blocks& checked(const kvq_row_blocks* blocks, std::int32_t first, int tokens, int heads,
                              const char* name) {
    const kvq_row_blocks& b = place(blocks, "blocks");
    expect(heads == b.kv_heads, KVQ_ERROR_ARGUMENT, name, " has ", heads, " heads, but the blocks ",
           b.kv_heads, " kv heads");
    expect(first >= 0 && tokens >= 0 && std::int64_t{first} + tokens <= b.tokens, KVQ_ERROR_ARGUMENT,
           "tokens ", first, " to ", std::int64_t{first} + tokens, " of a sequence of ", b.tokens);
    return b;
}

}  // namespace
}  // namespace kvq::c

using namespace kvq::c;

extern "C" {

kvq_status kvq_attend_rows(const kvq_rows* keys, const kvq_rows* values, const kvq_row_blocks* blocks,
                           const kvq_tensor* q, const kvq_tensor* out, const kvq_attend_options* options) {
    return guard([&] {
        const kvq::rows_view k = rows_of(keys, "keys"), v = rows_of(values, "values");
        const kvq_row_blocks& b = place(blocks, "blocks");
        const kvq_attend_options o = read_optional(options, "options");
        const held_mods mods(o.mods, "options.mods");
        kvq::workspace own;
        const kvq::query_view of_q = query_of(q, "q");
        const kvq::output_view of_out = output_of(out, "out").with_lse(o.lse);
        kvq::attend_rows(k, v, blocks_of(b), {b.tokens, b.kv_heads, of_q.dim, of_out.dim}, of_q, of_out,
                         o.workspace ? get(o.workspace, "workspace").space : own, mods.view(),
                         executor_of(o.executor));
        mods.report();
    });
}

kvq_status kvq_read_rows(const kvq_rows* rows, const kvq_row_blocks* blocks, int32_t first,
                         const kvq_tensor* out, const kvq_attend_options* options) {
    return guard([&] {
        copying by(options);
        const kvq::rows_view from = rows_of(rows, "rows");
        const kvq::output_view to = output_of(out, "out");
        const kvq_row_blocks& b = checked(blocks, first, to.tokens, to.heads, "out");
        kvq::read_rows(from, blocks_of(b), first, to, by.space(), by.threads());
    });
}

kvq_status kvq_write_rows(const kvq_rows* rows, const kvq_row_blocks* blocks, int32_t first,
                          const kvq_tensor* x, int64_t* not_finite, const kvq_attend_options* options) {
    return guard([&] {
        copying by(options);
        const kvq::rows_view to = rows_of(rows, "rows");
        const kvq::input_view from = input_of(x, "x");
        const kvq_row_blocks& b = checked(blocks, first, from.tokens, from.heads, "x");
        const std::int64_t count = kvq::write_rows(to, blocks_of(b), first, from, by.space(), by.threads());
        if (not_finite) *not_finite = count;
    });
}

kvq_status kvq_convert_rows(const kvq_rows* from, const kvq_row_blocks* of_from, const kvq_rows* to,
                            const kvq_row_blocks* of_to, int32_t dim, int64_t* not_finite,
                            const kvq_attend_options* options) {
    return guard([&] {
        copying by(options);
        const kvq::rows_view source = rows_of(from, "from"), target = rows_of(to, "to");
        const kvq_row_blocks &a = place(of_from, "of_from"), &b = place(of_to, "of_to");
        expect(a.tokens == b.tokens && a.kv_heads == b.kv_heads, KVQ_ERROR_ARGUMENT, "from has ", a.tokens,
               " tokens of ", a.kv_heads, " kv heads, to ", b.tokens, " of ", b.kv_heads);
        const std::int64_t count = kvq::convert_rows(source, blocks_of(a), target, blocks_of(b),
                                                     {a.tokens, a.kv_heads, dim}, by.space(), by.threads());
        if (not_finite) *not_finite = count;
    });
}
}
