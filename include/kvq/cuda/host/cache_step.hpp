// Steps and prompts of a cache (cache.hpp): pages are named, tables are sent, tokens of a prompt go to their pages.
//
// A step's tokens are found on the device (store_new_tokens.cuh, commit_due_pages.cuh). A prompt's have more pages than the ring: those that fall behind the
// window go to 16-bit pages of one layer's scratch and are quantized from there, in one launch for all of them.
#pragma once

#include "cache_class.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

inline status cache::check_batch(std::span<const sequence_id> ids, bool holes) {
    ++stamp_;
    for (const sequence_id id : ids) {
        if (holes && id == sequence_id{}) continue;
        if (status s = check_here(id); !s) return s;
        if (entry_of(id).stamp == stamp_)
            return detail::bad_value("sequence %d is in the batch twice", id.index);
        entry_of(id).stamp = stamp_;
    }
    return {};
}

inline status cache::check_rows(std::span<const sequence_id> batch) const {
    if (format_.functions == nullptr) return detail::bad_value("the cache is not open");
    if (batch.empty() || static_cast<int>(batch.size()) > options_.max_batch)
        return detail::bad_value("a step of %zu sequences, but max_batch is %d", batch.size(),
                                 options_.max_batch);
    return {};
}

inline status cache::check_growth(sequence_id id, int new_tokens) const {
    const int held = tokens(id);
    if (new_tokens > options_.max_tokens - held)
        return detail::bad_value("sequence %d holds %d tokens and cannot take %d more: max_tokens is %d",
                                 id.index, held, new_tokens, options_.max_tokens);
    const detail::sequence_pages& s = entry_of(id).pages;
    if (new_tokens > geometry_.first_token(columns_) - s.paged_tokens(geometry_) - s.drafted)
        return detail::bad_value(
            "sequence %d holds %d tokens and %d pages that trims have cut, and cannot take %d tokens more: "
            "max_tokens is %d and cut_pages %d",
            id.index, held, s.cut_pages(geometry_), new_tokens, options_.max_tokens, options_.cut_pages);
    return {};
}

/// So many free pages, of each format and of 16 bit.
inline status cache::ensure_free(std::span<const int> quantized, int window, int sinks, cudaStream_t stream) {
    status result;
    for (std::size_t f = 0; f < quantized.size() && result; ++f)
        result = quantized_[f].ensure(quantized[f], options_.growing, stream);
    if (result) result = window_.ensure(window, options_.growing, stream);
    if (result) result = sinks_.ensure(sinks, options_.growing, stream);
    return result;
}
/// Free pages for new_tokens tokens more, or drafted tokens.
inline status cache::ensure_pages(std::span<const sequence_id> batch, int new_tokens, bool draft,
                                  cudaStream_t stream) {
    std::vector<int> quantized(format_.kinds.size(), 0);
    int window = 0, sinks = 0;
    for (const sequence_id id : batch) {
        if (id == sequence_id{}) continue;
        const detail::sequence_pages& s = entry_of(id).pages;
        if (!draft)
            quantized[static_cast<std::size_t>(s.target())] +=
                s.committed_after(new_tokens, geometry_) - s.committed();
        window +=
            draft ? s.missing_draft_pages(new_tokens, geometry_) : s.missing_pages(new_tokens, geometry_);
        sinks += common::larger(
            0, geometry_.sink_pages(s.tokens() + s.drafted + new_tokens) - static_cast<int>(s.sinks.size()));
    }
    return ensure_free(quantized, window, sinks, stream);
}

inline void cache::empty_row(int b, detail::word_writer& to) {
    rows_[static_cast<std::size_t>(b)] = {};
    put(to, tokens_at(b), 0);
    put(to, committed_at(b), 0);
    for (int f = 0; f < kinds(); ++f) {
        put(to, first_at(f, b), 0);
        put(to, end_at(f, b), 0);
    }
    put(to, cut_end_at(b), 0);
    put(to, skipped_at(b), 0);
}

/// The sequence grows; what its row does not say yet is sent. Pages are there (ensure_pages).
inline void cache::grow_row(int b, sequence_id id, int new_tokens, bool draft, detail::word_writer& to) {
    entry& e = entry_of(id);
    detail::sequence_pages& s = e.pages;
    row& r = rows_[static_cast<std::size_t>(b)];
    const bool known = r.id == id && r.version == e.version;
    const int before = s.committed(), after = s.paged_tokens(geometry_) + s.drafted + new_tokens;
    if (draft)
        s.draft(new_tokens, geometry_, pools_of(s));
    else
        s.grow(new_tokens, geometry_, pools_of(s));
    const int from = known ? r.pages : 0, end = s.committed();
    const auto number = [&](int i, int f) { return s.format_of(s[i]) == f ? s.number_of(s[i]) : -1; };
    for (int f = 0; f < kinds() && from < end; ++f) {
        for (int i = from; i < end; ++i) put(to, table_at(f, false, b) + i, number(i, f));
        for (int i = from; i < end; ++i) put(to, table_at(f, true, b) + i, i >= before ? number(i, f) : -1);
    }
    if (!known || from < end)
        for (int f = 0; f < kinds(); ++f) {
            int first = 0, last = end;
            while (last > 0 && s.format_of(s[last - 1]) != f) --last;
            while (first < last && s.format_of(s[first]) != f) ++first;
            put(to, first_at(f, b), first);
            put(to, end_at(f, b), last);
        }
    if (!known) {
        const int cut_end = s.cut_end(geometry_);
        for (int i = 0; i < cut_end; ++i) {
            put(to, shown_at(b) + 2 * i, s[i].first_token);
            put(to, shown_at(b) + 2 * i + 1,
                static_cast<int>(static_cast<unsigned>(s[i].skip) |
                                 static_cast<unsigned>(s[i].skip + s[i].tokens) << 16));
        }
        put(to, cut_end_at(b), cut_end);
        put(to, skipped_at(b), s.skipped(geometry_));
    }
    const int pages = s.pages() + static_cast<int>(s.ahead.size());
    for (int i = common::larger(0, pages - geometry_.ring); i < pages; ++i) {
        const page* const held = s.window_page(i);
        put(to, window_at(b) + i % geometry_.ring, held != nullptr ? held->number : -1);
    }
    for (std::size_t i = 0; i < s.sinks.size(); ++i)
        put(to, sinks_at(b) + static_cast<int>(i), s.sinks[i]->number);
    put(to, tokens_at(b), after);
    put(to, committed_at(b), end);
    r = {id, e.version, end};
}

inline status cache::begin_step(std::span<const sequence_id> batch, int new_tokens, cudaStream_t stream) {
    if (status s = check_rows(batch); !s) return s;
    if (new_tokens < 0 || new_tokens > options_.step_tokens)
        return detail::bad_value("a step of %d tokens, but step_tokens is %d", new_tokens,
                                 options_.step_tokens);
    if (status s = check_batch(batch, true); !s) return s;
    if (status s = check_no_draft(batch); !s) return s;
    for (const sequence_id id : batch)
        if (id != sequence_id{})
            if (status s = check_growth(id, new_tokens); !s) return s;
    if (status s = ensure_pages(batch, new_tokens, false, stream); !s) return s;
    return send_step(batch, new_tokens, false, stream);
}

/// The batch's sequences grow, and the device hears of it. All pages are there.
inline status cache::send_step(std::span<const sequence_id> batch, int new_tokens, bool draft,
                               cudaStream_t stream) {
    step next;
    next.begun = true;
    next.rows = static_cast<int>(batch.size());
    next.new_tokens = new_tokens;
    detail::word_writer to(*format_.functions, words_.as<int>(), stream);
    for (int b = 0; b < next.rows; ++b) {
        const sequence_id id = batch[static_cast<std::size_t>(b)];
        if (id == sequence_id{}) {
            empty_row(b, to);
            continue;
        }
        grow_row(b, id, new_tokens, draft, to);
        next.targets |= 1u << entry_of(id).pages.target();
        next.draft = entry_of(id).pages.drafted;
    }
    if (next.targets == 0) next.targets = 1u << target_;
    step_ = next;
    const status sent = to.flush();
    if (!sent) forget_rows();
    return sent;
}

inline status cache::begin_prompt(sequence_id id, int new_tokens, cudaStream_t stream) {
    if (format_.functions == nullptr) return detail::bad_value("the cache is not open");
    if (new_tokens < 1) return detail::bad_value("a prompt of %d tokens", new_tokens);
    if (status s = check_here(id); !s) return s;
    if (status s = check_no_draft(std::span(&id, 1)); !s) return s;
    if (status s = check_growth(id, new_tokens); !s) return s;
    if (status s = ensure_pages(std::span(&id, 1), new_tokens, false, stream); !s) return s;
    // The scratch comes before the sequence changes.
    const detail::sequence_pages& s = entry_of(id).pages;
    const int before = s.paged_tokens(geometry_), after = before + new_tokens, first_new = s.pages(),
              kept = common::larger(first_new, geometry_.pages(after) - geometry_.ring);
    const std::size_t page_bytes = window_.memory().key_page_bytes + window_.memory().value_page_bytes,
                      scratch = static_cast<std::size_t>(kept - first_new) * page_bytes,
                      slot_list = static_cast<std::size_t>(new_tokens) * sizeof(long long);
    if (scratch > staging_.bytes())
        if (status r = detail::replace_memory(staging_, options_.memory, scratch, "a prompt", stream); !r)
            return r;
    if (slot_list > slots_.bytes())
        if (status r = detail::replace_memory(slots_, options_.memory, slot_list, "a prompt's slots", stream);
            !r)
            return r;
    step next;
    next.begun = next.prompt = true;
    next.rows = 1;
    next.new_tokens = new_tokens;
    next.targets = 1u << s.target();
    const detail::pool_memory staged{staging_.as<>(), window_.memory().key_page_bytes,
                                     window_.memory().value_page_bytes, kept - first_new};
    next.staging = staged.layer(0);
    // Where tokens go.
    const auto clamp = [&](int paged) {
        return common::smaller(common::larger(paged - before, 0), new_tokens);
    };
    next.ranges = {clamp(geometry_.sinks), clamp(geometry_.first_token(first_new)),
                   clamp(geometry_.first_token(kept)), new_tokens, first_new};
    const int committed = s.committed();
    std::vector<int> from_window;  // of pages that the window has now
    for (int i = committed; i < first_new; ++i) from_window.push_back(s.window_page(i)->number);
    detail::word_writer to(*format_.functions, words_.as<int>(), stream);
    grow_row(0, id, new_tokens, false, to);
    // What is quantized from where.
    const int due = s.committed();
    next.jobs = {common::larger(0, common::smaller(due, first_new) - committed),
                 common::smaller(due, kept) - common::smaller(due, first_new),
                 due - common::larger(committed, common::smaller(due, kept))};
    for (int i = committed; i < due; ++i) {
        const int from = i < first_new ? from_window[static_cast<std::size_t>(i - committed)]
                         : i < kept    ? i - first_new
                                       : s.window_page(i)->number;
        to.put(list_at(false) + i - committed, from);
    }
    for (int i = committed; i < due; ++i) to.put(list_at(true) + i - committed, s.number_of(s[i]));
    const int of_prompt[prompt_words] = {before, committed, 0, new_tokens};
    for (int i = 0; i < prompt_words; ++i) to.put(prompt_at() + i, of_prompt[i]);
    next.id = id;
    next.committed_before = committed;
    next.missing_layers = shape_.layers;
    step_ = next;
    if (status sent = to.flush(); !sent) {
        forget_rows();
        return sent;
    }
    return format_.functions->find_prompt_slots(
        {next.ranges, before, geometry_.sinks, geometry_.page_tokens, geometry_.ring,
         words_.as<int>() + window_at(0), words_.as<int>() + sinks_at(0), slots_.as<long long>()},
        stream);
}

inline status cache::commit_step(int layer, cudaStream_t stream) {
    if (layer > 0)
        return step_.committed
                   ? status{}
                   : detail::bad_value(
                         "layer %d of a step comes before layer 0, which commits the pages of all "
                         "layers",
                         layer);
    const std::vector<detail::layer_view> layers = all_layers();
    for (int f = 0; f < kinds(); ++f)
        if ((step_.targets >> f & 1) != 0)
            if (status s = format_.functions->commit(layers, f, step_.new_tokens, nullptr, stream); !s)
                return s;
    step_.committed = true;
    return {};
}

inline status cache::append_prompt(int layer, const detail::input_rows& k, const detail::input_rows& v,
                                   cudaStream_t stream) {
    const detail::layer_view l = view(layer);
    const detail::prompt_ranges& r = step_.ranges;
    const auto slice = [&](const detail::input_rows& x, int first, int count) {
        detail::input_rows part = x;
        part.data = x.at(first, 0);
        part.tokens = count;
        return part;
    };
    const auto store = [&](const detail::layer_memory& pages, bool sinks, int first, int end) -> status {
        if (first == end) return {};
        return format_.functions->store(l, pages, sinks, slice(k, first, end - first),
                                        slice(v, first, end - first), slots_.as<long long>() + first, stream);
    };
    int done = 0;
    const auto quantize = [&](const detail::layer_memory& pages, int count) -> status {
        const int* const words = words_.as<int>();
        const int first = std::exchange(done, done + count);
        if (count == 0) return {};
        int target = 0;
        while ((step_.targets >> target & 1) == 0) ++target;
        return format_.functions->requantize(l, -1, pages, target, words + list_at(false) + first,
                                             words + list_at(true) + first, count, stream);
    };
    status s = store(l.sinks, true, 0, r.open);
    // A page that was being filled, before its column takes another one.
    if (s) s = store(l.window, false, r.open, r.staged);
    if (s) s = quantize(l.window, step_.jobs.before);
    if (s) s = store(step_.staging, false, r.staged, r.kept);
    if (s) s = quantize(step_.staging, step_.jobs.staged);
    if (s) s = store(l.window, false, r.kept, r.count);
    if (s) s = quantize(l.window, step_.jobs.after);
    if (s) --step_.missing_layers;
    return s;
}

}}}  // namespace kvq::cuda
