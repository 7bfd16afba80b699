// Sequences by id of the C interface.
#include <kvq/adapters/sequence_state.hpp>
#include <kvq/adapters/sequence_table.hpp>

#include "mods.hpp"
#include "saved.hpp"

struct kvq_sequence_table : kvq::c::handle<kvq_sequence_table> {
    static constexpr std::uint32_t word = 0x746b7631;
    static constexpr const char* kind = "table of sequences";
    kvq::c::shared_cache of;
    kvq::sequence_table table;

    kvq_sequence_table(kvq::c::shared_cache c, int ids) : of(std::move(c)), table(of->cache, ids) {}
};

using namespace kvq::c;

namespace {

kvq::sequence_table& table_of(kvq_sequence_table* table) { return get(table, "table").table; }

}  // namespace

extern "C" {

kvq_status kvq_sequence_table_create(kvq_cache* cache, int32_t ids, kvq_sequence_table** out) {
    return guard([&] {
        const shared_cache& of = get(cache, "cache").state;
        place(out, "out");
        expect(!of->cache.state_layout(), KVQ_ERROR_ARGUMENT,
               "a table of sequences has no recurrent state, but the cache has layers with it");
        *out = make<kvq_sequence_table>(of, ids);
    });
}

kvq_status kvq_sequence_table_free(kvq_sequence_table* table) { return free_handle(table, "table"); }

kvq_status kvq_sequence_table_grow(kvq_sequence_table* table, int32_t ids) {
    return guard([&] { table_of(table).grow(ids); });
}

kvq_status kvq_sequence_table_begin(kvq_sequence_table* table, const kvq_token_batch* batch, int32_t q_heads,
                                    const kvq_attend_options* options) {
    return guard([&] {
        kvq_sequence_table& t = get(table, "table");
        const kvq_token_batch b = read_reserved(batch, "batch");
        const kvq_attend_options o = read_optional(options, "options");
        const held_mods mods(o.mods, "options.mods");
        expect(o.workspace != nullptr, KVQ_ERROR_HANDLE,
               "a step is begun with options.workspace, which is NULL");
        call_workspace space(o.workspace, t.of->cache);
        expect_list(b.positions, b.tokens, "batch.positions");
        expect_list(b.ids, b.tokens, "batch.ids");
        t.table.begin({b.tokens, b.positions, b.id_counts, b.ids}, q_heads,
                      executor_of(o.executor).concurrency(), space, mods.view());
    });
}

kvq_status kvq_sequence_table_prefill(kvq_sequence_table* table, int32_t layer, const kvq_tensor* k,
                                      const kvq_tensor* v, const kvq_tensor* q, const kvq_tensor* out,
                                      const kvq_attend_options* options) {
    return guard([&] {
        kvq_sequence_table& t = get(table, "table");
        const kvq_attend_options o = read_optional(options, "options");
        const held_mods mods(o.mods, "options.mods");
        call_workspace space(o.workspace, t.of->cache);
        t.table.prefill(layer, input_of(k, "k"), input_of(v, "v"), query_of(q, "q"),
                        output_of(out, "out").with_lse(o.lse), mods.view(), executor_of(o.executor), space);
        mods.report();
    });
}

kvq_status kvq_sequence_table_end(kvq_sequence_table* table) {
    return guard([&] { table_of(table).end(); });
}

kvq_status kvq_sequence_table_take_back(kvq_sequence_table* table) {
    return guard([&] { table_of(table).take_back(); });
}

kvq_status kvq_sequence_table_remove(kvq_sequence_table* table, int32_t id, int32_t first, int32_t last) {
    return guard([&] { table_of(table).remove(id, first, last); });
}

kvq_status kvq_sequence_table_copy(kvq_sequence_table* table, int32_t from, int32_t to, int32_t first,
                                   int32_t last) {
    return guard([&] { table_of(table).copy(from, to, first, last); });
}

kvq_status kvq_sequence_table_keep(kvq_sequence_table* table, int32_t id) {
    return guard([&] { table_of(table).keep(id); });
}

kvq_status kvq_sequence_table_shift(kvq_sequence_table* table, int32_t id, int32_t first, int32_t last,
                                    int32_t by) {
    return guard([&] { table_of(table).shift(id, first, last, by); });
}

kvq_status kvq_sequence_table_clear(kvq_sequence_table* table) {
    return guard([&] { table_of(table).clear(); });
}

kvq_status kvq_sequence_table_positions(const kvq_sequence_table* table, int32_t id, int32_t* positions,
                                        int32_t capacity, int32_t* count) {
    return guard([&] {
        const std::span<const std::int32_t> held = get(table, "table").table.positions(id);
        expect_list(positions, capacity, "positions");
        place(count, "count") = static_cast<int32_t>(held.size());
        std::copy_n(held.begin(), std::min(held.size(), static_cast<std::size_t>(capacity)), positions);
    });
}

kvq_status kvq_sequence_table_fork(const kvq_sequence_table* table, int32_t id, kvq_sequence** out) {
    return guard([&] {
        const kvq_sequence_table& t = get(table, "table");
        place(out, "out");
        const kvq::sequence* const held = t.table.find(id);
        *out = make<kvq_sequence>(t.of, held ? held->fork() : t.of->cache.new_sequence());
    });
}

kvq_status kvq_sequence_table_get_usage(const kvq_sequence_table* table, kvq_table_usage* usage) {
    return guard([&] {
        const kvq::sequence_table& t = get(table, "table").table;
        expect_struct(usage, "usage");
        kvq_table_usage result{};
        result.tokens = t.distinct_tokens();
        result.bytes = t.bytes();
        result.ids = t.ids();
        result.can_shift = t.can_shift();
        write_struct(usage, result);
    });
}

kvq_status kvq_sequence_table_write(kvq_sequence_table* table, int32_t id, kvq_write write, void* user) {
    return guard([&] {
        kvq::sequence_table& t = table_of(table);
        expect(write != nullptr, KVQ_ERROR_HANDLE, "write is NULL");
        kvq::write_state(t, caller_sink{write, user}, id);
    });
}

kvq_status kvq_sequence_table_state_bytes(kvq_sequence_table* table, int32_t id, size_t* bytes) {
    return guard([&] {
        kvq::sequence_table& t = table_of(table);
        place(bytes, "bytes") = kvq::state_bytes(t, id);
    });
}

kvq_status kvq_sequence_table_read(kvq_sequence_table* table, int32_t id, kvq_read read, void* user) {
    return guard(
        [&] {
            kvq::sequence_table& t = table_of(table);
            expect(read != nullptr, KVQ_ERROR_HANDLE, "read is NULL");
            kvq::read_state(t, caller_source{read, user}, id);
        },
        KVQ_ERROR_DATA);
}
}
