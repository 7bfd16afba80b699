// Tables of sequences whose keys have moved (erase, shift, splice): a run is all pages of a sequence whose
// keys have moved by the same number of positions. Attention takes a launch for each run, with queries that
// are turned for it (decode/moved_keys.cuh), and merges softmax states.
//
//   run 0    keys that are where they were rotated; also of sequences without moved keys
//   run r    those that have moved by sequence_pages::moved[r - 1]
//
// Device words: open positions, then for every run the positions by which queries turn, and the tables of a
// group (layer_group.hpp) without the pages of other runs. They are there from the first begin of such a
// sequence on; other steps neither send nor read them.
// Contract: as layer_group: the host has a copy, and sends words that change.
#pragma once

#include <limits>
#include <span>
#include <vector>

#include "cache_options.hpp"
#include "device_format.hpp"
#include "sequence_pages.hpp"
#include "word_writer.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// A row of a step: what its sequence was before it grew. Null: not there.
struct moved_row {
    const sequence_pages* pages = nullptr;
    std::uint64_t version = 0;
    /// New tokens at paged positions before open_end go to a page whose keys have moved, and turn like them.
    std::int64_t open_shift = 0;
    int open_end = 0;

    moved_row() = default;
    moved_row(const sequence_pages& s, std::uint64_t of, const device_geometry& g)
        : pages(&s), version(of), open_shift(s.open_shift()) {
        if (open_shift != 0) open_end = s.pages() > 0 ? g.first_token(s.pages()) : g.sinks;
    }
};

/// Of one group of layers.
class moved_runs {
public:
    /// Counts of a group: sequences of a step, formats, columns of its tables.
    void open(int batch, int kinds, int columns, int ring, int sink_columns) {
        batch_ = batch, kinds_ = kinds, columns_ = columns, ring_ = ring, sink_columns_ = sink_columns;
    }
    /// Runs of a step: 1 where no key has moved.
    static int runs_of(const sequence_pages& s) noexcept { return 1 + static_cast<int>(s.moved.size()); }

    /// By how many positions keys of a run have moved.
    static std::int64_t shift_of(const sequence_pages& s, int r) noexcept {
        return r == 0 ? 0 : s.moved[static_cast<std::size_t>(r - 1)];
    }

    /// Memory for so many runs. Waits for the stream when it grows. Words stay: a prompt that waits
    /// (cache::append_chunks) still reads those of its step.
    status ensure(int runs, const device_allocator& from, cudaStream_t stream) {
        if (runs <= most_ || runs == 1) return {};
        const long long words = run_at(runs);
        if (words > most_words)
            return bad_value(
                "keys of a sequence have moved by %d different numbers of positions: tables of %lld words "
                "are "
                "too large",
                runs - 1, words);
        device_memory bigger;
        if (status s = bigger.allocate(from, static_cast<std::size_t>(words) * sizeof(int),
                                       "tables of moved keys", stream);
            !s)
            return s;
        cudaError_t code = cudaSuccess;
        if (most_ > 0)
            code = cudaMemcpyAsync(bigger.as<>(), memory_.as<>(), memory_.bytes(), cudaMemcpyDeviceToDevice,
                                   stream);
        if (code == cudaSuccess) code = cudaStreamSynchronize(stream);
        if (code != cudaSuccess) return runtime_error(code, "growing tables of moved keys");
        mirror_.resize(static_cast<std::size_t>(words), unknown_word);
        memory_ = std::move(bigger);
        most_ = runs;
        ++generation_;
        return {};
    }
    /// All words are sent again.
    void forget() {
        mirror_.assign(mirror_.size(), unknown_word);
        rows_.assign(static_cast<std::size_t>(batch_), row{});
    }
    /// The step's rows have grown, and have `runs` runs at most.
    status send(std::span<const moved_row> rows, int runs, const device_geometry& g,
                const device_functions& functions, cudaStream_t stream) {
        if (runs == 1) return {};
        word_writer to(functions, memory_.as<int>(), stream);
        for (std::size_t b = 0; b < rows.size(); ++b) send_row(static_cast<int>(b), rows[b], runs, g, to);
        const status s = to.flush();
        if (!s) forget();
        return s;
    }

    /// Before a prompt's sequence grows: its 16-bit pages, whose columns those of the prompt take.
    status send_before_prompt(const sequence_pages& s, const device_geometry& g,
                              const device_functions& functions, cudaStream_t stream) {
        const int runs = runs_of(s);
        if (runs == 1) return {};
        word_writer to(functions, memory_.as<int>(), stream);
        for (int r = 0; r < runs; ++r)
            for (int i = s.committed(); i < s.pages(); ++i)
                put(to, before_at(r) + i % g.ring,
                    s.shift_of(i) == shift_of(s, r) ? s.window_page(i)->number : -1);
        const status sent = to.flush();
        if (!sent) forget();
        return sent;
    }

    /// The layer as a launch for run r sees it. before_prompt: row 0, before the prompt that has begun.
    layer_view view(layer_view v, int r, bool before_prompt) const noexcept {
        for (int f = 0; f < kinds_; ++f) {
            v.quantized[f].table = word(table_at(r, f, 0));
            v.quantized[f].first_page = word(first_at(r, f, 0));
            v.quantized[f].end_page = word(end_at(r, f, 0));
        }
        v.window_table = word(before_prompt ? before_at(r) : window_at(r, 0));
        v.sink_table = word(sinks_at(r, 0));
        return v;
    }
    /// By how many positions queries turn for a run, [sequences][2].
    const int* query_turn(int r) const noexcept { return word(by_at(r, 0)); }
    /// New tokens at paged positions before open_ends() turn by key_turn() (turn_args).
    const int* key_turn() const noexcept { return word(0); }
    const int* open_ends() const noexcept { return word(2 * batch_); }
    unsigned generation() const noexcept { return generation_; }
    std::size_t bytes() const noexcept { return memory_.bytes(); }

private:
    struct row {
        std::uint64_t version = 0;
        int pages = 0, gone = 0, runs = 0;
    };
    static constexpr long long most_words = 1 << 30;
    static constexpr int unknown_word = (std::numeric_limits<int>::min)();

    int of_run() const noexcept {
        return batch_ * (2 + kinds_ * (2 + columns_) + ring_ + sink_columns_) + ring_;
    }
    long long run_at(int r) const noexcept { return 3LL * batch_ + static_cast<long long>(r) * of_run(); }
    int by_at(int r, int b) const noexcept { return static_cast<int>(run_at(r)) + 2 * b; }
    int first_at(int r, int f, int b) const noexcept { return by_at(r, batch_) + 2 * f * batch_ + b; }
    int end_at(int r, int f, int b) const noexcept { return first_at(r, f, batch_) + b; }
    int table_at(int r, int f, int b) const noexcept {
        return first_at(r, kinds_, 0) + (f * batch_ + b) * columns_;
    }
    int window_at(int r, int b) const noexcept { return table_at(r, kinds_, 0) + b * ring_; }
    int sinks_at(int r, int b) const noexcept { return window_at(r, batch_) + b * sink_columns_; }
    int before_at(int r) const noexcept { return sinks_at(r, batch_); }
    const int* word(int at) const noexcept { return memory_.as<const int>() + at; }

    void put(word_writer& to, int at, int value) {
        int& held = mirror_[static_cast<std::size_t>(at)];
        if (held == value) return;
        held = value;
        to.put(at, value);
    }
    void put_positions(word_writer& to, int at, std::int64_t by) {
        put(to, at, static_cast<int>(static_cast<std::uint32_t>(by)));
        put(to, at + 1, static_cast<int>(by >> 32));
    }
    void send_row(int b, const moved_row& of, int runs, const device_geometry& g, word_writer& to) {
        row& held = rows_[static_cast<std::size_t>(b)];
        const sequence_pages* const s = of.pages;
        put_positions(to, 2 * b, -of.open_shift);
        put(to, 2 * batch_ + b, of.open_end);
        if (s == nullptr) {
            held = {};
            for (int r = 0; r < runs; ++r)
                for (int f = 0; f < kinds_; ++f) {
                    put(to, first_at(r, f, b), 0);
                    put(to, end_at(r, f, b), 0);
                }
            return;
        }
        const bool known = held.version == of.version && held.runs == runs;
        const int gone = s->gone(), first_gone = known ? held.gone : 0, from = known ? held.pages : gone,
                  end = s->committed(), pages = s->pages() + static_cast<int>(s->ahead.size());
        for (int r = 0; r < runs; ++r) {
            const bool there = r < runs_of(*s);
            const std::int64_t shift = there ? shift_of(*s, r) : 0;
            const auto of_run = [&](int i) { return there && s->shift_of(i) == shift; };
            put_positions(to, by_at(r, b), -shift);
            for (int f = 0; f < kinds_; ++f) {
                const auto named = [&](int i) { return s->format_of(i) == f && of_run(i); };
                const auto name = [&](int i) {
                    put(to, table_at(r, f, b) + i, named(i) ? s->quantized_page(i)->number : -1);
                };
                for (int i = first_gone; i < gone; ++i) name(i);
                for (int i = common::larger(from, gone); i < end; ++i) name(i);
                if (known && from >= end && first_gone >= gone) continue;
                const auto [first, last] = s->pages_where(named);
                put(to, first_at(r, f, b), first);
                put(to, end_at(r, f, b), last);
            }
            for (int i = common::larger(0, pages - g.ring); i < pages; ++i) {
                const page* const of_window = of_run(i) ? s->window_page(i) : nullptr;
                put(to, window_at(r, b) + i % g.ring, of_window != nullptr ? of_window->number : -1);
            }
            // Two pages are read at once: those that are not there yet are named as well, as none.
            const int sinks = there && s->shift_of_sinks() == shift ? static_cast<int>(s->sinks.size()) : 0;
            for (int i = 0; i < sink_columns_; ++i)
                put(to, sinks_at(r, b) + i, i < sinks ? s->sinks[static_cast<std::size_t>(i)]->number : -1);
        }
        // Launches of this step still read what it has freed.
        int left = first_gone;
        while (left < gone && s->quantized_page(left) == nullptr) ++left;
        held = {of.version, end, left, runs};
    }

    int batch_ = 0, kinds_ = 0, columns_ = 0, ring_ = 0, sink_columns_ = 0;
    int most_ = 0;
    device_memory memory_;
    std::vector<int> mirror_;  // what the words are
    std::vector<row> rows_;
    unsigned generation_ = 0;
};

/// Why the device cannot have a span of a table, if it cannot: kernels take whole pages, and all sinks in
/// front. Which tokens a committed page shows, and by how much its keys have moved, does not matter.
inline status check_span(const page_span& s, int i, bool committed, int tokens, const device_geometry& g) {
    if (s.sinks != (i == 0 && g.sinks > 0) ||
        (s.sinks && (s.skip > 0 || s.tokens != common::smaller(tokens, g.sinks))))
        return bad_value(
            "tokens %d to %d are sinks of which some were erased or moved apart, or stand in their place; "
            "the "
            "device has all sinks in front",
            s.first_token, s.end());
    if (s.sinks) return {};
    if (!committed && s.room < g.page_tokens)
        return bad_value(
            "tokens %d to %d are in a 16-bit page that an erase has closed; the device has none in its "
            "window",
            s.first_token, s.end());
    for (const page_ref& p : s.pages)
        if (committed && p && p->tokens != g.page_tokens)
            return bad_value(
                "tokens %d to %d are in a page for %d tokens, which a cut has left; the device has pages "
                "for %d only (cache_options::repack)",
                s.first_token, s.end(), p->tokens, g.page_tokens);
    return {};
}

}}}  // namespace kvq::cuda::detail
