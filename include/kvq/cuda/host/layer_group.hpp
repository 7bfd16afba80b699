// Layers of a cache on the device that have one shape, one window and the same formats (cache.hpp): one page
// table for all of them, the pools of its pages, and one set of launches.
//
// Device words: paged lengths, committed pages, extents of formats, tables, what pages show, lists of pages
// to quantize. The host has a copy of all but the lists, and sends words that change. Row b of a table is
// that of the step's sequence b; it stays while the same sequence stands there. The words of all groups are
// one range of memory, so that a begin sends them together.
// Contract: cache::open() makes groups, one of equal layers; nothing moves them to other words afterwards.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "../../cache/layers.hpp"
#include "../../format/format_names.hpp"
#include "../layout/window_columns.hpp"
#include "cache_options.hpp"
#include "group_formats.hpp"
#include "moved_runs.hpp"
#include "resident_pages.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

struct layer_group : group_formats {
    /// Pages to quantize from 16-bit values, in the lists of a prompt: first those that stood in the window,
    /// then those of the scratch.
    struct prompt_jobs {
        int before = 0, staged = 0, after = 0;
    };
    /// Pages [first, end) of a sequence.
    struct page_run {
        int first, end;
        int size() const noexcept { return end - first; }
    };
    /// What the step that has begun is for these layers.
    struct step {
        unsigned targets = 0;  // formats that pages are committed to
        int runs = 1;          // launches of an attention (moved_runs.hpp)
        format_spans spans;    // of a prompt, before it
        // Of a prompt: the quantized pages before it, and the tokens, hidden ones too.
        int committed_before = 0, paged_before = 0;
        prompt_ranges ranges;
        int opened = 0;  // of its tokens: the end of those in a page that has tokens already
        prompt_jobs jobs;
        layer_memory staging;
        long long* slot_list = nullptr;
        int plan = -1;           // number of the plan that the prompt makes
        int planned_before = 0;  // tokens that it has before it
        // Of latents: all pages that are in 16 bit while the prompt attends, one after the other in the
        // scratch. Those before its first page are copied from these pages of the window.
        std::vector<int> run_before;
        int run_pages = 0;
        long long* run_slots = nullptr;
    };
    /// Whose table stands in a row.
    struct row {
        sequence_id id;
        std::uint64_t version = 0;
        int pages = 0;  // that the row names; the sequence may have had more in another row
        int gone = 0;   // pages that it does not name any more
    };

    std::vector<int> members;  // layers of the cache
    cache_shape shape;         // layers: so many
    device_geometry geometry;
    int columns = 0, sink_columns = 0;
    int target = 0;                       // format of the first pages of new sequences
    std::vector<device_pages> quantized;  // by format
    key_plans plans;
    device_pages window, sinks;
    int host_pages = 0;  // pages of the first target, all in host memory; 0: in device memory
    resident_pages resident;
    moved_runs runs;
    const cache_options* options = nullptr;    // of the cache
    const std::vector<layer>* list = nullptr;  // of the cache
    int first_word = 0;
    const int* words = nullptr;  // its own, in device memory
    std::vector<int> mirror;     // what they are, but for lists
    std::vector<row> rows;
    int run_named = 0;  // words of the run's table that the device has
    step now;
    std::vector<char> appended;  // of each layer: it has the new tokens of this step

    // ---- device words: what begin_step() sends ----
    /// K and V, or K alone.
    std::span<const tensor> tensors() const noexcept {
        return common::tensors_of((*list)[static_cast<std::size_t>(members[0])]);
    }
    int batch() const noexcept { return options->max_batch; }
    int tokens_at(int b) const noexcept { return b; }
    int committed_at(int b) const noexcept { return batch() + b; }
    int first_at(int f, int b) const noexcept { return (2 + 2 * f) * batch() + b; }
    int end_at(int f, int b) const noexcept { return (3 + 2 * f) * batch() + b; }
    int cut_end_at(int b) const noexcept { return (2 + 2 * kinds()) * batch() + b; }
    int skipped_at(int b) const noexcept { return (3 + 2 * kinds()) * batch() + b; }
    int plan_at(int b) const noexcept { return (4 + 2 * kinds()) * batch() + b; }
    int table_at(int f, bool commit, int b) const noexcept {
        return (5 + 2 * kinds()) * batch() + ((2 * f + (commit ? 1 : 0)) * batch() + b) * columns;
    }
    /// Two words a page (page_cuts::shown).
    int shown_at(int b) const noexcept { return table_at(kinds(), false, 0) + 2 * b * columns; }
    int window_at(int b) const noexcept { return shown_at(batch()) + b * geometry.ring; }
    int sinks_at(int b) const noexcept { return window_at(batch()) + b * sink_columns; }
    bool is_in_host_memory(std::size_t f) const noexcept {
        return host_pages > 0 && f == static_cast<std::size_t>(target);
    }
    /// How often a page was taken, of pages in host memory.
    int generation_at(int page) const noexcept { return sinks_at(batch()) + page; }
    int list_at(bool to) const noexcept { return generation_at(host_pages) + (to ? columns : 0); }
    int counts_at(int b) const noexcept { return list_at(false) + 2 * columns + b; }
    int path_at(int b) const noexcept { return counts_at(batch()) + b * options->draft_tokens; }
    /// Pages of the first tokens, whose keys a plan is made of: those of the window, those of sinks.
    int planned_at(bool of_sinks) const noexcept {
        return path_at(batch()) + (of_sinks ? planned_pages(false) : 0);
    }
    int planned_pages(bool of_sinks) const noexcept {
        return of_sinks ? geometry.sink_pages(plans.tokens) : geometry.pages(plans.tokens);
    }
    int not_finite_at(int member) const noexcept { return planned_at(true) + planned_pages(true) + member; }
    /// Of a prompt: tokens and quantized pages before it, 0, new tokens; the tokens that queries of latents
    /// see (cache::prefill). Then the table of a run: page i is page i.
    int prompt_at() const noexcept { return not_finite_at(shape.layers); }
    static constexpr int prompt_words = 5;
    int seen_at() const noexcept { return prompt_at() + prompt_words - 1; }
    int run_at(int i) const noexcept { return prompt_at() + prompt_words + i; }
    /// Could be more than an int holds.
    long long word_count() const noexcept {
        return static_cast<long long>(batch()) * (6 + 2 * kinds() + (2LL * kinds() + 2) * columns +
                                                  geometry.ring + sink_columns + options->draft_tokens) +
               (format.latent ? 3LL : 2LL) * columns + shape.layers + prompt_words + host_pages +
               planned_pages(false) + planned_pages(true);
    }

    /// As the device has rows: are pages of them cut, does one have pages of a format?
    bool has_cuts(int b, int end) const noexcept {
        return std::any_of(mirror.begin() + cut_end_at(b), mirror.begin() + cut_end_at(end),
                           [](int pages) { return pages > 0; });
    }
    int word(int index) const noexcept { return mirror[static_cast<std::size_t>(index)]; }
    bool holds(int f, int b) const noexcept { return word(end_at(f, b)) > word(first_at(f, b)); }

    void send(word_writer& to, int index, int value) const noexcept { to.put(first_word + index, value); }
    void put(word_writer& to, int index, int value) noexcept {
        int& held = mirror[static_cast<std::size_t>(index)];
        if (held == value) return;
        held = value;
        send(to, index, value);
    }
    void new_step() {
        now = {};
        appended.assign(members.size(), 0);
    }
    /// Layers without the step's new tokens.
    int missing_layers() const noexcept { return static_cast<int>(std::ranges::count(appended, char{0})); }
    /// All words are sent again: what the device has is not known.
    void forget_rows() {
        mirror.assign(static_cast<std::size_t>(list_at(false)), (std::numeric_limits<int>::min)());
        rows.assign(static_cast<std::size_t>(batch()), row{});
        run_named = 0;
        runs.forget();
    }
    void empty_row(int b, word_writer& to) {
        rows[static_cast<std::size_t>(b)] = {};
        put(to, tokens_at(b), 0);
        put(to, committed_at(b), 0);
        for (int f = 0; f < kinds(); ++f) {
            put(to, first_at(f, b), 0);
            put(to, end_at(f, b), 0);
        }
        put(to, cut_end_at(b), 0);
        put(to, skipped_at(b), 0);
        put(to, plan_at(b), 0);
    }
    /// The sequence grows; what its row does not say yet is sent. Pages are there (ensure_free).
    void grow_row(int b, sequence_id id, std::uint64_t version, sequence_pages& s, int new_tokens, bool draft,
                  word_writer& to, bool prompt = false) {
        row& r = rows[static_cast<std::size_t>(b)];
        const bool known = r.id == id && r.version == version;
        const int before = s.committed(), gone = s.gone(),
                  after = s.paged_tokens(geometry) + s.drafted + new_tokens;
        if (!known) {
            // Before it grows: launches of the step read pages that it frees.
            const int cut_end = s.cut_end(geometry);
            // Pages that are gone show nothing, and lie before all others.
            for (int i = 0; i < common::smaller(gone, cut_end); ++i)
                for (const int word : {0, 1}) put(to, shown_at(b) + 2 * i + word, 0);
            for (int i = gone; i < cut_end; ++i) {
                put(to, shown_at(b) + 2 * i, s[i].first_token);
                put(to, shown_at(b) + 2 * i + 1,
                    static_cast<int>(static_cast<unsigned>(s[i].skip) |
                                     static_cast<unsigned>(s[i].skip + s[i].tokens) << 16));
            }
            put(to, cut_end_at(b), cut_end);
            put(to, skipped_at(b), s.skipped(geometry));
        }
        if (draft)
            s.draft(new_tokens, geometry, pools_of(s));
        else
            s.grow(new_tokens, geometry, pools_of(s), prompt);
        const int from = known ? r.pages : 0, end = s.committed();
        const auto number = [&](int i, int f) {
            return s.format_of(i) == f ? s.quantized_page(i)->number : -1;
        };
        for (int f = 0; f < kinds(); ++f) {
            for (int i = known ? r.gone : gone; i < gone; ++i) put(to, table_at(f, false, b) + i, -1);
            for (int i = from; i < end; ++i) {
                const int page = number(i, f);
                put(to, table_at(f, false, b) + i, page);
                if (page >= 0 && host_pages > 0 && f == resident.format())
                    put(to, generation_at(page),
                        static_cast<int>(quantized[static_cast<std::size_t>(f)].pages().taken(page)));
            }
            for (int i = from; i < end; ++i)
                put(to, table_at(f, true, b) + i, i >= before ? number(i, f) : -1);
            // Pages that wait for a plan: the kernel finds them due.
            for (int i = end; plans.tokens > 0 && i < committed_pages(after - geometry.sinks, geometry.recent,
                                                                      geometry.page_tokens);
                 ++i)
                put(to, table_at(f, true, b) + i, -1);
        }
        if (!known || from < end || r.gone < gone)
            for (int f = 0; f < kinds(); ++f) {
                const auto [first, last] = s.pages_of(f);
                put(to, first_at(f, b), first < last ? first : 0);
                put(to, end_at(f, b), first < last ? last : 0);
            }
        const int pages = s.pages() + static_cast<int>(s.ahead.size());
        for (int i = common::larger(0, pages - geometry.ring); i < pages; ++i) {
            const page* const held = s.window_page(i);
            put(to, window_at(b) + i % geometry.ring, held != nullptr ? held->number : -1);
        }
        for (std::size_t i = 0; i < s.sinks.size(); ++i)
            put(to, sinks_at(b) + static_cast<int>(i), s.sinks[i]->number);
        put(to, tokens_at(b), after);
        put(to, committed_at(b), s.first_in_16_bit());
        put(to, plan_at(b), s.plan ? s.plan->number : 0);
        r = {id, version, end, gone};
    }

    /// Pages of a prompt that are quantized at once: those that are not in the ring, nor were before, and
    /// that no window frees.
    page_run staged_pages(const sequence_pages& s, int new_tokens) const noexcept {
        const int end = common::larger(s.pages(), s.pages_after(new_tokens, geometry) - geometry.ring);
        return {common::smaller(end, common::larger(s.pages(), s.gone_after(new_tokens, geometry))), end};
    }
    /// Pages of the scratch that a prompt needs, and numbers of its slots for every token.
    int scratch_pages(const sequence_pages& s, int new_tokens) const noexcept {
        const int staged = staged_pages(s, new_tokens).size();
        return format.latent ? s.pages_after(new_tokens, geometry) - s.committed() : staged;
    }
    int slot_lists() const noexcept { return format.latent ? 2 : 1; }
    /// A prompt has more pages than the ring: those that fall behind the recent window go to 16-bit pages of
    /// one layer's scratch, and from there are quantized in one launch. Pages and scratch are there.
    prompt_slots begin_prompt(sequence_id id, std::uint64_t version, sequence_pages& s, int new_tokens,
                              std::byte* scratch, long long* slot_list, bool plans_keys, word_writer& to) {
        const page_run staged = staged_pages(s, new_tokens);
        const int before = s.paged_tokens(geometry), first_new = s.pages(), kept = staged.end;
        new_step();
        now.targets = 1u << s.target();
        now.staging = pool_memory{scratch, window.memory().key_page_bytes, window.memory().value_page_bytes,
                                  staged.size()}
                          .layer(0);
        now.slot_list = slot_list;
        // Where tokens go.
        const auto clamp = [&](int paged) {
            return common::smaller(common::larger(paged - before, 0), new_tokens);
        };
        now.ranges = {clamp(geometry.sinks), clamp(geometry.first_token(staged.first)),
                      clamp(geometry.first_token(kept)), new_tokens, staged.first};
        now.opened = clamp(geometry.first_token(first_new));
        const int held = s.committed();
        std::vector<int> from_window;  // of pages that the window has now
        for (int i = held; i < first_new; ++i) from_window.push_back(s.window_page(i)->number);
        if (format.latent) {
            now.run_pages = common::larger(1, s.pages_after(new_tokens, geometry) - held);
            now.run_slots = slot_list + new_tokens;
            for (; run_named < now.run_pages; ++run_named) send(to, run_at(run_named), run_named);
        }
        now.planned_before = s.tokens();
        if (plans_keys) {
            send_planned(s, now.planned_before, to);
            now.plan = s.plan->number;
        }
        grow_row(0, id, version, s, new_tokens, false, to, true);
        // What is quantized from where.
        const int due = s.committed();
        std::vector<int> numbers;
        for (int i = held; i < due; ++i) {
            const page* const into = s.quantized_page(i);
            if (into == nullptr) continue;  // a window has freed it at once
            ++(i < first_new ? now.jobs.before : i < kept ? now.jobs.staged : now.jobs.after);
            const int from = i < first_new ? from_window[static_cast<std::size_t>(i - held)]
                             : i < kept    ? i - staged.first
                                           : s.window_page(i)->number;
            send(to, list_at(false) + static_cast<int>(numbers.size()), from);
            numbers.push_back(into->number);
        }
        for (std::size_t i = 0; i < numbers.size(); ++i)
            send(to, list_at(true) + static_cast<int>(i), numbers[i]);
        const int of_prompt[] = {before, held, 0, new_tokens};
        for (int i = 0; i < prompt_words - 1; ++i) send(to, prompt_at() + i, of_prompt[i]);
        now.committed_before = held;
        if (format.latent) now.run_before = std::move(from_window);
        return {now.ranges,           before,        geometry.sinks,
                geometry.page_tokens, geometry.ring, words + window_at(0),
                words + sinks_at(0),  slot_list};
    }
    /// Says where the first n tokens of a sequence are, which has no quantized page.
    void send_planned(const sequence_pages& s, int n, word_writer& to) const noexcept {
        for (int i = 0; i < geometry.pages(common::smaller(n, plans.tokens)); ++i)
            send(to, planned_at(false) + i, s.window_page(i)->number);
        for (int i = 0; i < geometry.sink_pages(common::smaller(n, plans.tokens)); ++i)
            send(to, planned_at(true) + i, s.sinks[static_cast<std::size_t>(i)]->number);
    }
    /// Plans of a layer's keys: of the first tokens in pages, and of rows behind them.
    status plan_layer(int member, int plan, int before, const input_rows& opened, const input_rows& behind,
                      cudaStream_t stream) const {
        const plan_source from{plans.tokens, before, words + planned_at(false), words + planned_at(true),
                               opened,       behind};
        status s;
        for (int f = 0; f < kinds() && s; ++f)
            if (plans.takes(f))
                s = format.functions->plan_keys(view(member, 0), f, from, plans.of(member, plan, f), stream);
        return s;
    }
    /// Where the tokens of a prompt go in the run, and in sinks.
    prompt_slots run_slots(prompt_slots of) const noexcept {
        of.ranges.staged = of.ranges.open;
        of.ranges.kept = of.ranges.count;
        of.ranges.first_staged = now.committed_before;
        of.slot_list = now.run_slots;
        return of;
    }
    /// So many free pages, of each format and of 16 bit.
    status ensure_free(std::span<const int> of_formats, int in_window, int of_sinks, cudaStream_t stream) {
        status result;
        for (std::size_t f = 0; f < of_formats.size() && result; ++f)
            result = quantized[f].ensure(format.taken(of_formats, f), options->growing, stream);
        if (result) result = window.ensure(in_window, options->growing, stream);
        if (result) result = sinks.ensure(of_sinks, options->growing, stream);
        return result;
    }
    sequence_pools pools_of(const sequence_pages& s) const noexcept {
        return {quantized[static_cast<std::size_t>(s.target())].pages(), window.pages(), sinks.pages()};
    }
    /// Changes when pages have moved.
    std::uint64_t generation() const noexcept {
        std::uint64_t moved = window.generation() + sinks.generation() + plans.pages.generation();
        for (const device_pages& p : quantized) moved += p.generation();
        return moved;
    }
    std::size_t bytes_in_use() const noexcept {
        std::size_t sum = window.used_bytes() + sinks.used_bytes();
        for (const device_pages& p : quantized) sum += p.used_bytes();
        return sum;
    }
    std::size_t bytes_held() const noexcept {
        std::size_t sum = window.allocated() + sinks.allocated() + resident.allocated();
        for (const device_pages& p : quantized) sum += p.allocated();
        return sum;
    }

    /// member: its number among these layers. sequences: rows of the step. run: alone; -1: all pages.
    layer_view view(int member, int sequences, int run = -1, bool before_prompt = false) const noexcept {
        // Memory that is there stands for that of formats without pages: it is not read.
        const auto memory = [&](const device_pages& p) {
            pool_memory m = p.memory();
            if (m.data != nullptr) return m.layer(member);
            m.data = reinterpret_cast<std::byte*>(const_cast<int*>(words));
            return m.layer(0);
        };
        layer_view v{};
        for (int f = 0; f < kinds(); ++f) {
            const device_keys& of = keys[static_cast<std::size_t>(f)];
            const auto of_layer = [&]<class T>(const device_memory& all, const T*) {
                return all.bytes() == 0 ? nullptr
                                        : all.as<const T>() + all.bytes() / sizeof(T) /
                                                                  static_cast<std::size_t>(shape.layers) *
                                                                  static_cast<std::size_t>(member);
            };
            const device_pages& pool = quantized[static_cast<std::size_t>(f)];
            v.quantized[f] = {memory(pool.upper() != nullptr ? *pool.upper() : pool),
                              words + table_at(f, false, 0),
                              words + table_at(f, true, 0),
                              words + first_at(f, 0),
                              words + end_at(f, 0),
                              of_layer(of.plans, static_cast<const std::uint16_t*>(nullptr)),
                              nullptr,
                              0,
                              of_layer(of.feedback, static_cast<const float*>(nullptr))};
            v.quantized[f].span = now.spans.of[f];
            if (pool.upper() != nullptr) v.quantized[f].lower = memory(pool);
            if (plans.takes(f)) {
                v.quantized[f].key_plans = plans.of(member, 0, f);
                v.quantized[f].plan_numbers = words + plan_at(0);
                v.quantized[f].plan_words = plans.words();
            }
            for (int role = 0; role < 2; ++role)
                if (const auto& all = of.rotations[role]; all.bytes() > 0) {
                    const std::size_t half = all.bytes() / sizeof(float) / 2,
                                      at = half / static_cast<std::size_t>(shape.layers) *
                                           static_cast<std::size_t>(member);
                    v.quantized[f].columns[role] = all.as<const float>() + at;
                    v.quantized[f].rows[role] = all.as<const float>() + half + at;
                }
        }
        v.resident = resident.layer(member, reinterpret_cast<const unsigned*>(words + generation_at(0)));
        v.layer = members[static_cast<std::size_t>(member)];
        v.window = memory(window);
        v.window_table = words + window_at(0);
        v.sinks = geometry.sinks > 0 ? memory(sinks) : v.window;
        v.sink_table = words + sinks_at(0);
        v.tokens = words + tokens_at(0);
        v.committed = words + committed_at(0);
        v.cuts = {words + cut_end_at(0), words + skipped_at(0), words + shown_at(0), columns,
                  geometry.page_tokens,  geometry.sinks};
        v.sequences = sequences;
        v.columns = columns;
        v.ring = geometry.ring;
        v.sink_columns = sink_columns;
        v.kv_heads = shape.kv_heads;
        v.first_token = geometry.sinks;
        v.recent = geometry.recent;
        v.not_finite = reinterpret_cast<unsigned*>(const_cast<int*>(words)) + not_finite_at(member);
        return run < 0 ? v : runs.view(v, run, before_prompt);
    }
    /// No rows: pages whose keys have this plan, or even widths.
    layer_view view_of_plan(int member, const page_ref& plan) const noexcept {
        layer_view v = view(member, 0);
        for (int f = 0; f < kinds(); ++f)
            if (plans.takes(f)) {
                v.quantized[f].key_plans = plans.of(member, (plan ? plan : plans.even)->number, f);
                v.quantized[f].plan_numbers = nullptr;
            }
        return v;
    }
    /// The sequence before a prompt. Pages of its tokens are named already: lengths hide them.
    layer_view view_before_prompt(int member, int run = -1) const noexcept {
        layer_view v = view(member, 1, run, true);
        v.tokens = words + prompt_at();
        v.committed = words + prompt_at() + 1;
        for (int f = 0; f < kinds(); ++f) {
            if ((now.targets >> f & 1) != 0) v.quantized[f].end_page = v.committed;
            if (now.spans.of[f] == 0) v.quantized[f].first_page = v.quantized[f].end_page;
        }
        return v;
    }
    /// Of latents: the same with the prompt's tokens, in the run. They see as many tokens as the word says.
    layer_view view_of_run(int member, int run) const noexcept {
        layer_view v = view_before_prompt(member, run);
        v.tokens = words + seen_at();
        v.window = now.staging;
        v.window_table = words + run_at(0);
        v.ring = now.run_pages;
        v.run = now.committed_before;
        return v;
    }
    std::vector<layer_view> all_layers(int sequences) const {
        std::vector<layer_view> all;
        for (int i = 0; i < shape.layers; ++i) all.push_back(view(i, sequences));
        return all;
    }
    /// Hides what the window of the layers hides, beside what the caller's does: together they are one
    /// window. of: the layer, for errors.
    template <class Options>
    status add_window(Options& o, int member) const {
        const key_window& own = geometry.window;
        if (own.cross && o.window > 0)
            return bad_value("%s: its queries see all tokens, and have no window of %d",
                             describe(member).c_str(), o.window);
        if (!own) return {};
        if (o.window == 0) {
            o.window = own.tokens;
            o.chunked = own.chunked;
            o.window_sinks = own.sinks > 0;
            return {};
        }
        if (own.chunked || o.chunked)
            return bad_value("%s: a %s of %d tokens is no window together with it", describe(member).c_str(),
                             o.chunked ? "chunk" : "window", o.window);
        const bool sinks_within = o.window < own.tokens ? o.window_sinks : own.sinks > 0,
                   sinks_around = o.window < own.tokens ? own.sinks > 0 : o.window_sinks;
        if (o.window != own.tokens && sinks_within && !sinks_around && geometry.sinks > 0)
            return bad_value(
                "%s, with %d sinks: a window of %d tokens %s sinks is no window together with it",
                describe(member).c_str(), own.sinks, o.window, o.window_sinks ? "and" : "without");
        o.window = common::smaller(o.window, own.tokens);
        o.window_sinks = sinks_within && sinks_around;
        return {};
    }
    std::string describe(int member) const {
        const int layer = members[static_cast<std::size_t>(member)];
        return common::describe_layer(layer, (*list)[static_cast<std::size_t>(layer)]);
    }
    /// Do pages of a format hold the rotary channels of latents? Of all other layers they do.
    status check_rotary(int kind) const {
        const int rotary = (*list)[static_cast<std::size_t>(members[0])].rotary_channels;
        const device_format::kind& k = format.kinds[static_cast<std::size_t>(kind)];
        const int apart = common::last_channels_of(k.keys).channels;
        if (rotary == 0 || apart == rotary || (apart == 0 && k.key_bits >= 8)) return {};
        return bad_value(
            "%s: %.60s does not keep its %d rotary channels in 8 or 16 bits: name one that ends in -fp16x%d, "
            "-int8x%d or -ref8x%d, or has codes of 8 bits",
            describe(0).c_str(), k.name.c_str(), rotary, rotary, rotary, rotary);
    }
    /// Do steps and prompts give these layers tokens? Those with cross attention have another text's.
    bool takes_steps() const noexcept { return !geometry.window.cross; }
    /// Do queries of the step's last `count` tokens see nothing that their window has freed?
    bool holds_queries(int count, int of_step) const noexcept {
        return !geometry.window || count <= geometry.rollback + 1 + of_step;
    }
    /// Quantizes what leaves the windows of a step, in all layers, with the first of them.
    status commit(int member, int sequences, int new_tokens, cudaStream_t stream) const {
        if (member > 0)
            return appended[0] != 0
                       ? status{}
                       : bad_value(
                             "layer %d of a step comes before layer %d, which commits the pages of all "
                             "layers of its shape",
                             members[static_cast<std::size_t>(member)], members[0]);
        const std::vector<layer_view> layers = all_layers(sequences);
        for (int f = 0; f < kinds(); ++f)
            if ((now.targets >> f & 1) != 0)
                if (status s = format.functions->commit(layers, f, new_tokens, nullptr, stream); !s) return s;
        return {};
    }
    /// Tokens [first, first + count) of x, if it has tokens.
    template <class Rows>
    static Rows slice(Rows x, int first, int count) noexcept {
        if (x.tokens == 0) return x;
        if (x.data != nullptr) x.data = x.at(first, 0);
        x.tokens = count;
        return x;
    }
    /// Of latents: a prompt's tokens beside those that the window has, in the scratch, for its attention.
    /// opened: as append_prompt.
    status make_run(int member, const input_rows& opened, const input_rows& k, const input_rows& v,
                    cudaStream_t stream) const {
        const layer_view l = view(member, 1);
        const layer_memory& run = now.staging;
        const prompt_ranges& r = now.ranges;
        std::byte* to = run.keys;
        const std::vector<int>& pages = now.run_before;
        // Neighbours in one copy.
        for (std::size_t i = 0, end; i < pages.size(); i = end) {
            for (end = i + 1; end < pages.size() && pages[end] == pages[end - 1] + 1;) ++end;
            const std::size_t bytes = (end - i) * run.key_page_bytes;
            const cudaError_t code = cudaMemcpyAsync(to, window.memory().page(tensor::key, member, pages[i]),
                                                     bytes, cudaMemcpyDeviceToDevice, stream);
            if (code != cudaSuccess) return runtime_error(code, "copying pages of a prompt");
            to += bytes;
        }
        const auto store = [&](const layer_memory& of, bool in_sinks, int first, int end) -> status {
            if (first >= end) return {};
            return format.functions->store(l, of, in_sinks,
                                           slice(end <= now.opened ? opened : k, first, end - first),
                                           slice(v, first, end - first), now.run_slots + first, stream);
        };
        if (status s = store(l.sinks, true, 0, r.open); !s) return s;
        const int middle = common::larger(r.open, now.opened);
        if (status s = store(run, false, r.open, middle); !s) return s;
        return store(run, false, middle, r.count);
    }
    /// opened: the first now.opened keys, as the pages want them that have tokens already.
    status append_prompt(int member, const input_rows& opened, const input_rows& k, const input_rows& v,
                         cudaStream_t stream) {
        const layer_view l = view(member, 1);
        const prompt_ranges& r = now.ranges;
        const auto store = [&](const layer_memory& pages, bool in_sinks, int first, int end) -> status {
            if (first >= end) return {};
            const input_rows& from = end <= now.opened ? opened : k;
            return format.functions->store(l, pages, in_sinks, slice(from, first, end - first),
                                           slice(v, first, end - first), now.slot_list + first, stream);
        };
        int done = 0;
        const auto quantize = [&](const layer_memory& pages, int count) -> status {
            const int first = std::exchange(done, done + count);
            if (count == 0) return {};
            int to = 0;
            while ((now.targets >> to & 1) == 0) ++to;
            return format.functions->requantize(l, -1, pages, to, {}, words + list_at(false) + first,
                                                words + list_at(true) + first, count, stream);
        };
        status s;
        if (now.plan >= 0) s = plan_layer(member, now.plan, now.planned_before, opened, k, stream);
        if (s) s = store(l.sinks, true, 0, r.open);
        // A page that was being filled, before its column takes another one.
        if (s) s = store(l.window, false, r.open, now.opened);
        if (s) s = quantize(l.window, now.jobs.before);
        if (s) s = store(now.staging, false, r.staged, r.kept);
        if (s) s = quantize(now.staging, now.jobs.staged);
        if (s) s = store(l.window, false, r.kept, r.count);
        if (s) s = quantize(l.window, now.jobs.after);
        if (s) appended[static_cast<std::size_t>(member)] = 1;
        return s;
    }
};

}}}  // namespace kvq::cuda::detail
