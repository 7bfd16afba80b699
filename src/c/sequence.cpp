// Sequences of the C interface.
#include <kvq/cache/rearrange.hpp>
#include <kvq/cache/retain.hpp>

#include "mods.hpp"
#include "objects.hpp"

using namespace kvq::c;

namespace {

/// The parts of kvq_attend_options for one sequence.
struct call {
    kvq_attend_options o;
    held_mods mods;
    call_workspace space;

    call(const kvq_attend_options* options, const kvq::cache& of)
        : o(read_optional(options, "options")), mods(o.mods, "options.mods"), space(o.workspace, of) {}

    kvq::output_view output(const kvq_tensor* out) const { return output_of(out, "out").with_lse(o.lse); }
};

std::span<const int> path_of(const int32_t* path, int32_t count) {
    expect_list(path, count, "tokens of the path");
    return {path, static_cast<std::size_t>(count)};
}

}  // namespace

extern "C" {

kvq_status kvq_sequence_create(kvq_cache* cache, kvq_sequence** out) {
    return guard([&] {
        const shared_cache& of = get(cache, "cache").state;
        place(out, "out");
        *out = make<kvq_sequence>(of, of->cache.new_sequence());
    });
}

kvq_status kvq_sequence_free(kvq_sequence* sequence) { return free_handle(sequence, "sequence"); }

kvq_status kvq_sequence_fork(const kvq_sequence* sequence, kvq_sequence** out) {
    return guard([&] {
        const kvq_sequence& from = get(sequence, "sequence");
        place(out, "out");
        *out = make<kvq_sequence>(from.of, from.sequence.fork());
    });
}

kvq_status kvq_sequence_tokens(const kvq_sequence* sequence, int32_t layer, int32_t* tokens) {
    return guard([&] {
        const kvq::sequence& s = get(sequence, "sequence").sequence;
        place(tokens, "tokens") = layer == KVQ_ALL_LAYERS ? s.tokens() : s.tokens(layer);
    });
}

kvq_status kvq_sequence_prefill(kvq_sequence* sequence, int32_t layer, const kvq_tensor* k,
                                const kvq_tensor* v, const kvq_tensor* q, const kvq_tensor* out,
                                const kvq_attend_options* options) {
    return guard([&] {
        kvq_sequence& s = get(sequence, "sequence");
        call c(options, s.of->cache);
        s.sequence.prefill(layer, input_of(k, "k"), input_of(v, "v"), query_of(q, "q"), c.output(out),
                           c.mods.view(), executor_of(c.o.executor), c.space);
        c.mods.report();
    });
}

kvq_status kvq_sequence_append(kvq_sequence* sequence, int32_t layer, const kvq_tensor* k,
                               const kvq_tensor* v) {
    return guard(
        [&] { get(sequence, "sequence").sequence.append(layer, input_of(k, "k"), input_of(v, "v")); });
}

kvq_status kvq_sequence_attend(const kvq_sequence* sequence, int32_t layer, const kvq_tensor* q,
                               const kvq_tensor* out, const kvq_attend_options* options) {
    return guard([&] {
        const kvq_sequence& s = get(sequence, "sequence");
        call c(options, s.of->cache);
        s.sequence.attend(layer, query_of(q, "q"), c.output(out), c.mods.view(), executor_of(c.o.executor),
                          c.space);
        c.mods.report();
    });
}

kvq_status kvq_sequence_append_draft(kvq_sequence* sequence, int32_t layer, const kvq_tensor* k,
                                     const kvq_tensor* v) {
    return guard(
        [&] { get(sequence, "sequence").sequence.append_draft(layer, input_of(k, "k"), input_of(v, "v")); });
}

kvq_status kvq_sequence_keep(kvq_sequence* sequence, const int32_t* path, int32_t count) {
    return guard([&] { get(sequence, "sequence").sequence.keep(path_of(path, count)); });
}

kvq_status kvq_sequence_trim(kvq_sequence* sequence, int32_t tokens) {
    return guard([&] { get(sequence, "sequence").sequence.trim(tokens); });
}

kvq_status kvq_sequence_state(kvq_sequence* sequence, int32_t layer, int32_t part, void** data,
                              size_t* bytes) {
    return guard([&] {
        kvq::sequence& s = get(sequence, "sequence").sequence;
        place(data, "data");
        place(bytes, "bytes");
        const std::span<std::byte> found = s.state().part(layer, part);
        *data = found.data();
        *bytes = found.size();
    });
}

kvq_status kvq_sequence_advance(kvq_sequence* sequence, int32_t n, int32_t prompt_ends,
                                kvq_executor* executor, int32_t* taken) {
    return guard([&] {
        kvq::sequence& s = get(sequence, "sequence").sequence;
        const kvq::executor_view threads = executor_of(executor);
        place(taken, "taken");
        *taken = s.state().advance(n, prompt_ends != 0, threads) ? 1 : 0;
    });
}

kvq_status kvq_sequence_snapshot(kvq_sequence* sequence, int32_t tokens, kvq_executor* executor) {
    return guard([&] {
        kvq::sequence& s = get(sequence, "sequence").sequence;
        const kvq::executor_view threads = executor_of(executor);
        s.state().snapshot(tokens, threads);
    });
}

kvq_status kvq_sequence_drop_snapshots(kvq_sequence* sequence) {
    return guard([&] { get(sequence, "sequence").sequence.state().drop_snapshots(); });
}

kvq_status kvq_sequence_reach(const kvq_sequence* sequence, int32_t tokens, int32_t* reached) {
    return guard([&] {
        const kvq::sequence& s = get(sequence, "sequence").sequence;
        place(reached, "reached");
        expect(tokens >= 0 && tokens <= s.tokens(), KVQ_ERROR_ARGUMENT, "cannot trim to ", tokens,
               " tokens: the sequence holds ", s.tokens());
        *reached = s.reach(tokens);
    });
}

kvq_status kvq_sequence_get_snapshots(const kvq_sequence* sequence, kvq_snapshot* snapshots, int32_t capacity,
                                      int32_t* count) {
    return guard([&] {
        const kvq::sequence& s = get(sequence, "sequence").sequence;
        expect_list(snapshots, capacity, "snapshots");
        place(count, "count");
        const auto marks = s.state().snapshots();
        *count = static_cast<std::int32_t>(marks.size());
        for (std::size_t i = 0; i < marks.size() && i < static_cast<std::size_t>(capacity); ++i)
            snapshots[i] = {marks[i].tokens, 0, marks[i].bytes, s.state().snapshot_error(i)};
    });
}

kvq_status kvq_sequence_trim_limit(const kvq_sequence* sequence, int32_t* tokens) {
    return guard([&] {
        const kvq::sequence& s = get(sequence, "sequence").sequence;
        place(tokens, "tokens") = s.trim_limit();
    });
}

kvq_status kvq_sequence_drop_copies(kvq_sequence* sequence) {
    return guard([&] { get(sequence, "sequence").sequence.drop_copies(); });
}

kvq_status kvq_sequence_erase(kvq_sequence* sequence, int32_t first, int32_t last) {
    return guard([&] { get(sequence, "sequence").sequence.erase(first, last); });
}

kvq_status kvq_sequence_shift(kvq_sequence* sequence, int32_t first, int32_t last, int64_t by) {
    return guard([&] { get(sequence, "sequence").sequence.shift(first, last, by); });
}

kvq_status kvq_sequence_splice(kvq_sequence* sequence, const kvq_sequence* other, int32_t first,
                               int32_t last) {
    return guard([&] {
        kvq_sequence& to = get(sequence, "sequence");
        const kvq_sequence& from = get(other, "other");
        expect_same(from.of, to.of, "other");
        to.sequence.splice(from.sequence, first, last);
    });
}

kvq_status kvq_sequence_attention_mass(const kvq_sequence* sequence, int32_t layer, const kvq_tensor* q,
                                       float* mass, const kvq_attend_options* options) {
    return guard([&] {
        const kvq_sequence& s = get(sequence, "sequence");
        place(mass, "mass");
        call c(options, s.of->cache);
        expect(c.o.lse == nullptr, KVQ_ERROR_ARGUMENT, "options of a mass have no lse");
        s.sequence.attention_mass(layer, query_of(q, "q"), mass, c.mods.view(), executor_of(c.o.executor),
                                  c.space);
    });
}

kvq_status kvq_sequence_gap(const kvq_sequence* sequence, int32_t layer, int32_t* first, int32_t* last) {
    return guard([&] {
        const kvq::token_range gap = get(sequence, "sequence").sequence.gap(layer);
        place(first, "first");
        place(last, "last");
        *first = gap.begin;
        *last = gap.end;
    });
}

kvq_status kvq_sequence_retain(kvq_sequence* sequence, int32_t layer, const int32_t* kept, int32_t count) {
    return guard([&] {
        kvq_sequence& s = get(sequence, "sequence");
        expect_list(kept, count, "kept");
        const kvq::cache& of = s.of->cache;
        const int heads = layer >= 0 && layer < of.layer_count() ? of.shape(layer).kv_heads : 0;
        s.sequence.retain(layer, {kept, static_cast<std::size_t>(heads) * static_cast<std::size_t>(count)},
                          count);
    });
}

kvq_status kvq_sequence_hold(kvq_sequence* sequence) {
    return guard([&] { get(sequence, "sequence").sequence.hold(); });
}

kvq_status kvq_sequence_release(kvq_sequence* sequence) {
    return guard([&] { get(sequence, "sequence").sequence.release(); });
}

kvq_status kvq_sequence_release_reserved(kvq_sequence* sequence) {
    return guard([&] { get(sequence, "sequence").sequence.release_reserved(); });
}

kvq_status kvq_sequence_append_bytes(const kvq_sequence* sequence, int32_t n, size_t* bytes) {
    return guard([&] { place(bytes, "bytes") = get(sequence, "sequence").sequence.append_bytes(n); });
}

kvq_status kvq_sequence_prefill_bytes(const kvq_sequence* sequence, int32_t n, size_t* bytes) {
    return guard([&] { place(bytes, "bytes") = get(sequence, "sequence").sequence.prefill_bytes(n); });
}

kvq_status kvq_sequence_draft_bytes(const kvq_sequence* sequence, int32_t n, size_t* bytes) {
    return guard([&] { place(bytes, "bytes") = get(sequence, "sequence").sequence.draft_bytes(n); });
}

kvq_status kvq_sequence_dequantize(const kvq_sequence* sequence, int32_t layer, kvq_role role, int32_t first,
                                   const kvq_tensor* out) {
    return guard([&] {
        get(sequence, "sequence").sequence.dequantize(layer, role_of(role), first, output_of(out, "out"));
    });
}

kvq_status kvq_sequence_get_usage(const kvq_sequence* sequence, kvq_usage* usage) {
    return guard([&] {
        const kvq::sequence& s = get(sequence, "sequence").sequence;
        expect_struct(usage, "usage");
        write_usage(usage, s.usage());
    });
}

kvq_status kvq_sequence_get_pages(const kvq_sequence* sequence, int32_t layer, kvq_page* pages,
                                  int32_t capacity, int32_t* count) {
    return guard([&] {
        const kvq::layer_pages all = get(sequence, "sequence").sequence.pages(layer);
        expect_list(pages, capacity, "pages");
        place(count, "count") = all.entries();
        for (int i = 0; i < all.entries() && i < capacity; ++i) {
            const kvq::layer_pages::entry e = all.at(i);
            expect(!e.keys->plan, KVQ_ERROR_ARGUMENT, "keys from token ", e.first_token, " on of layer ",
                   layer,
                   " have a plan of their own, without which nothing reads them: key_statistics is KVQ_NONE "
                   "for caches whose pages are read elsewhere");
            pages[i] = {e.keys->data(),   e.values->data(), e.keys->format, e.values->format, e.keys->tokens,
                        e.values->tokens, e.skip,           e.tokens,       e.shift};
        }
    });
}
}
