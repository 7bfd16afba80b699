//! Sizes and offsets of the structs, and the constants, against what a C compiler makes of kvq.h. Made by bindings/generate.py.
#![cfg(target_pointer_width = "64")]
#![cfg_attr(rustfmt, rustfmt_skip)]

use std::mem::{size_of, MaybeUninit};

use kvq_sys::*;

const ABI: &str = include_str!("../../../../tests/c_interface/abi.txt");

fn member_bytes<T, M>(_: fn(&T) -> &M) -> usize {
    size_of::<M>()
}

macro_rules! layout {
    ($lines:ident, $name:ident: $($member:ident),*) => {
        $lines.push(format!("struct {}: {} bytes", stringify!($name), size_of::<$name>()));
        let made = MaybeUninit::<$name>::uninit();
        $(
            let offset = unsafe { std::ptr::addr_of!((*made.as_ptr()).$member) as usize } - made.as_ptr() as usize;
            let bytes = member_bytes(|s: &$name| &s.$member);
            $lines.push(format!("  {}: {}, {} bytes", stringify!($member), offset, bytes));
        )*
    };
}
macro_rules! constants {
    ($lines:ident, $($name:ident),*) => { $($lines.push(format!("constant {}: {}", stringify!($name), $name));)* };
}

#[test]
fn layouts() {
    let mut lines: Vec<String> = Vec::new();
    layout!(lines, kvq_tensor: data, dtype, tokens, heads, dim, token_stride, head_stride);
    layout!(lines, kvq_allocator: size, allocate, deallocate, user);
    layout!(lines, kvq_executor_callbacks: size, concurrency, parallel_for, user);
    layout!(lines, kvq_format_entry: size, name, keys, values, takes_statistics, group, preset);
    layout!(lines, kvq_format_description: size, name, backend, bits, block_bytes, quantize, dequantize, attend,
        dequantizes_first, holds_values, asked_name, quantize_by, dequantize_by, attend_by);
    layout!(lines, kvq_page_shape: role, tokens, heads, dim, layer, first_head);
    layout!(lines, kvq_page: keys, values, key_format, value_format, key_capacity, value_capacity, skip, tokens, shift);
    layout!(lines, kvq_token_range: begin, end);
    layout!(lines, kvq_chosen_tokens: layer, kv_head, first_query, last_query, tokens);
    layout!(lines, kvq_selection_report: size, pages, read, chosen, chosen_capacity, chosen_count);
    layout!(lines, kvq_skipping_report: size, pages, skipped, rows, left_out, most_left_out);
    layout!(lines, kvq_mods: size, direction, window, window_sinks, prefix, document_starts, documents, tree_parents,
        tree_tokens, tree_first, scale, softcap, alibi_slopes, alibi_heads, sink_heads, sink_logits, mask_row,
        mask_page, score_row, user, token_ranges, range_starts, range_count, range_start_count, range_first_query,
        selected_tokens, skipped_mass, upper_only, selection, skipping, listed_tokens, listed_window, listed_count,
        listed_window_count, list_queries, list_kv_heads);
    layout!(lines, kvq_rotary: dims, first_channel, layout, frequency_count, base, frequencies, rotate, user);
    layout!(lines, kvq_layer_formats: keys, values);
    layout!(lines, kvq_layer: kind, kv_heads, head_dim, value_dim, window, sinks, owner);
    layout!(lines, kvq_state_part: name, layer, dtype, heads, rows, columns, snapshot);
    layout!(lines, kvq_cache_options: size, layers, kv_heads, head_dim, value_dim, keys, values, window, page_tokens,
        sinks, recent, rollback, byte_budget, layer_formats, rotary, rotary_count, key_statistics, statistics,
        allocator, preallocate, repack, layer_list, state_parts, snapshot_bytes, state_part_count, snapshot_every,
        snapshot_prompt_end, statistics_tokens, reserved);
    layout!(lines, kvq_cache_info: size, layers, kv_heads, head_dim, value_dim, page_tokens, sinks, recent, rollback,
        byte_budget, bytes_in_use, pages_in_use, bytes_held);
    layout!(lines, kvq_attend_options: size, mods, executor, workspace, lse);
    layout!(lines, kvq_rows: format, data, token_stride, head_stride, block_stride, scales, scale_token_stride,
        scale_head_stride, scale_block_stride, scale_group_stride, biases);
    layout!(lines, kvq_row_blocks: table, blocks, block_tokens, memory_blocks, tokens, kv_heads);
    layout!(lines, kvq_usage: size, quantized, window, slack, rollback, bookkeeping, workspace, bytes, not_finite,
        tokens, reserved, repacked, state);
    layout!(lines, kvq_snapshot: tokens, reserved, bytes, error);
    layout!(lines, kvq_attend_request: sequence, q, out, lse, mods);
    layout!(lines, kvq_prefill_request: sequence, k, v, q, out, lse, mods);
    layout!(lines, kvq_select_request: sequence, q, weights, out);
    layout!(lines, kvq_step_request: sequence, tokens, q_tokens, mods);
    layout!(lines, kvq_requantize_request: size, keys, values, first_layer, last_layer, first_token, last_token,
        only_smaller, new_pages, dry_run, reserved, most_pages, most_nanoseconds, executor, workspace);
    layout!(lines, kvq_requantize_report: size, pages, pages_left, bytes_before, bytes_after, bytes_peak, bytes_freed,
        workspace);
    layout!(lines, kvq_tier: age, reserved, keys, values);
    layout!(lines, kvq_step_down_policy: size, tiers, tier_count, first_layers_kept, last_layers_kept, reserved,
        byte_budget);
    layout!(lines, kvq_step_down_report: size, pages, bytes_before, bytes_after, bytes_peak, fits);
    layout!(lines, kvq_footprint_query: size, sequences, q_heads, q_tokens, threads, chunk, cross_tokens, policy);
    layout!(lines, kvq_footprint: size, quantized, window, rollback, bookkeeping, workspace, attention, total,
        transient, unused, state);
    layout!(lines, kvq_budget_query: size, tokens, sequences, chunk, cuts, cross_tokens);
    layout!(lines, kvq_save_options: size, model, convert, upper_only);
    layout!(lines, kvq_prefix_cache_options: size, byte_limit, max_entries, min_prefix_tokens, min_quantize_tokens,
        reserved, keys, values);
    layout!(lines, kvq_prefix_cache_statistics: size, fetches, tokens_saved, stored, duplicates, rejections, replaced,
        evictions, entries, bytes);
    layout!(lines, kvq_ring_options: size, window, slack, sinks_in_cache, reserved, first_token);
    layout!(lines, kvq_token_batch: size, positions, id_counts, ids, tokens, reserved);
    layout!(lines, kvq_table_usage: size, tokens, bytes, ids, can_shift);
    constants!(lines, KVQ_OK, KVQ_ERROR_ARGUMENT, KVQ_ERROR_HANDLE, KVQ_ERROR_STRUCT, KVQ_ERROR_MEMORY, KVQ_ERROR_DATA,
        KVQ_ERROR_CALLBACK, KVQ_ERROR_UNSUPPORTED, KVQ_ERROR_INTERNAL, KVQ_KEY, KVQ_VALUE, KVQ_FP32, KVQ_FP16, KVQ_BF16,
        KVQ_CAUSAL, KVQ_BIDIRECTIONAL, KVQ_CROSS, KVQ_PAGE_NONE, KVQ_PAGE_SOME, KVQ_PAGE_ALL, KVQ_HALF_SPLIT,
        KVQ_INTERLEAVED, KVQ_FULL_ATTENTION, KVQ_SLIDING_ATTENTION, KVQ_CHUNKED_ATTENTION, KVQ_SHARED,
        KVQ_CROSS_ATTENTION, KVQ_STATE, KVQ_LATENT, KVQ_INDEX, KVQ_SNAPSHOT_EXACT, KVQ_SNAPSHOT_INT8_ROWS,
        KVQ_SNAPSHOT_INT8_COLUMNS, KVQ_SNAPSHOT_E4M3, KVQ_OWN_STATISTICS, KVQ_SHARED_STATISTICS, KVQ_MATCH_EXACT,
        KVQ_MATCH_SUPERSEQUENCE, KVQ_MATCH_PREFIX, KVQ_MATCH_LCP, KVQ_MISS, KVQ_MISS_SHORT_PREFIX, KVQ_MISS_SHORT_LCP,
        KVQ_STORED, KVQ_STORE_DUPLICATE, KVQ_STORE_TOO_LARGE, KVQ_ABI_VERSION, KVQ_NONE, KVQ_ALL_LAYERS);
    let known: Vec<_> = ABI.lines().filter(|l| !l.starts_with("function ")).collect();
    assert_eq!(lines, known);
}
