// Attention over rows in the memory of other systems.
#include <kvq/attention/attend_rows.hpp>

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
        kvq::attend_rows(k, v, {b.table, b.blocks, b.block_tokens, b.memory_blocks},
                         {b.tokens, b.kv_heads, of_q.dim, of_out.dim}, of_q, of_out,
                         o.workspace ? get(o.workspace, "workspace").space : own, mods.view(),
                         executor_of(o.executor));
        mods.report();
    });
}
}
