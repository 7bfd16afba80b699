// Sequences of a cache on the device between steps (cache.cuh): new, trim, fork, free, requantize, step down.
//
// Page numbers live on the host (sequence_pages.hpp). trim() and free() are arithmetic there; fork() copies sinks and window on the stream;
// requantizing quantizes new pages and then exchanges numbers. The next begin sends what has changed.
// Contract: what changes a sequence ends the step that has begun. A call that fails changes nothing, but for step_down(): the tiers that it
// has done stay done. Pages that sequences outside of the call hold stay as they are.
#pragma once

#include <algorithm>

#include "cache_class.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

inline sequence_id cache::new_sequence() {
    if (format_.functions == nullptr) return {};
    if (unused_.empty()) {
        entries_.emplace_back();
        unused_.reserve(entries_.capacity());  // so that free() cannot fail
        unused_.push_back(static_cast<int>(entries_.size()) - 1);
    }
    const int index = unused_.back();
    entry& e = entries_[static_cast<std::size_t>(index)];
    e.pages.set_target(target_);
    unused_.pop_back();
    e.alive = true;
    e.version = ++versions_;
    return {index, ++e.generation};
}

inline status cache::free(sequence_id id) {
    if (status s = check_here(id); !s) return s;
    entry& e = entry_of(id);
    e.pages = {};
    e.alive = false;
    unused_.push_back(id.index);
    step_.begun = false;
    return {};
}

inline status cache::trim(sequence_id id, int n) {
    if (status s = check_here(id); !s) return s;
    entry& e = entry_of(id);
    detail::sequence_pages& s = e.pages;
    const int held = s.tokens() + s.drafted;
    if (n < 0 || n > held)
        return detail::bad_value("cannot trim to %d tokens: sequence %d holds %d", n, id.index, held);
    if (n == held) return {};
    if (n > s.tokens())
        return detail::bad_value("cannot trim to %d: tokens %d to %d are a draft, keep() a part of it", n,
                                 s.tokens(), held);
    if (step_.begun && step_.id == id && step_.missing_layers > 0 &&
        s.committed_after_trim(n, geometry_) > step_.committed_before)
        return detail::bad_value(
            "cannot trim to %d: %d layers lack the prompt that has begun and have not quantized that token's "
            "page; trim to at most %d, or append the prompt to them first",
            n, step_.missing_layers, s[step_.committed_before].first_token);
    s.trim(n, geometry_);
    e.version = ++versions_;
    step_.begun = false;
    return {};
}

inline status cache::fork(sequence_id id, sequence_id& copy, cudaStream_t stream) {
    if (status s = check_here(id); !s) return s;
    const auto in_16_bit = [](const page_ref& p) { return p && p->format == 0; };
    int window = static_cast<int>(entry_of(id).pages.ahead.size());
    for (const page_span& span : entry_of(id).pages.table.spans)
        window += in_16_bit(span.pages[0]) + in_16_bit(span.copies[0]);
    if (status s = window_.ensure(window, options_.growing, stream); !s) return s;
    if (status s = sinks_.ensure(static_cast<int>(entry_of(id).pages.sinks.size()), options_.growing, stream);
        !s)
        return s;
    const sequence_id made = new_sequence();
    detail::sequence_pages& s = entry_of(made).pages;
    s = entry_of(id).pages;
    s.leaving.clear();
    status result;
    detail::page_copies copies;
    const auto launch = [&](const detail::device_pages& pool) {
        if (result && copies.count > 0)
            result = detail::copy_pages(copies, pool.memory(), shape_.layers, stream);
        copies.count = 0;
    };
    const auto copy_page = [&](page_ref& p, const detail::device_pages& pool) {
        copies.from[copies.count] = p->number;
        p = pool.pages().take();
        copies.to[copies.count++] = p->number;
        if (copies.count == detail::page_copies::room) launch(pool);
    };
    for (page_span& span : s.table.spans)
        for (page_ref* const p : {&span.pages[0], &span.copies[0]})
            if (in_16_bit(*p)) copy_page(*p, window_);
    for (page_ref& p : s.ahead) copy_page(p, window_);
    launch(window_);
    for (page_ref& p : s.sinks) copy_page(p, sinks_);
    launch(sinks_);
    if (!result) {
        (void)free(made);
        return result;
    }
    copy = made;
    return result;
}

/// These pages get the format, once each, in whichever of the sequences they are.
inline status cache::requantize_pages(std::span<const sequence_id> ids, std::span<const page* const> pages,
                                      int format, cudaStream_t stream) {
    struct job {
        const page* from;
        page_ref to;
    };
    const auto before = [](const page* a, const page* b) {
        return a->format != b->format ? a->format < b->format : a->number < b->number;
    };
    const detail::device_pages& pool = quantized_[static_cast<std::size_t>(format)];
    std::vector<job> jobs;
    for (const page* const p : pages) jobs.push_back({p, {}});
    // A page that several sequences hold is one job.
    std::sort(jobs.begin(), jobs.end(), [&](const job& a, const job& b) { return before(a.from, b.from); });
    jobs.erase(
        std::unique(jobs.begin(), jobs.end(), [](const job& a, const job& b) { return a.from == b.from; }),
        jobs.end());
    if (status s = quantized_[static_cast<std::size_t>(format)].ensure(static_cast<int>(jobs.size()),
                                                                       options_.growing, stream);
        !s)
        return s;
    if (jobs.empty()) return {};
    step_.begun = false;
    for (job& j : jobs) j.to = pool.pages().take();
    status result;
    detail::word_writer to(words_.as<int>(), stream);
    for (std::size_t first = 0, end; first < jobs.size() && result; first = end) {
        const int from = jobs[first].from->format;
        for (end = first; end < jobs.size() && end - first < static_cast<std::size_t>(columns_) &&
                          jobs[end].from->format == from;)
            ++end;
        const int count = static_cast<int>(end - first);
        for (int i = 0; i < count; ++i)
            to.put(list_at(false) + i, jobs[first + static_cast<std::size_t>(i)].from->number);
        for (int i = 0; i < count; ++i)
            to.put(list_at(true) + i, jobs[first + static_cast<std::size_t>(i)].to->number);
        result = to.flush();
        const int* const words = words_.as<int>();
        for (int layer = 0; layer < shape_.layers && result; ++layer) {
            const detail::layer_view l = view(layer);
            result = format_.functions->requantize(l, from - 1, l.window, format, words + list_at(false),
                                                   words + list_at(true), count, stream);
        }
    }
    if (!result) return result;
    for (const sequence_id id : ids) {
        entry& e = entry_of(id);
        for (page_span& span : e.pages.table.spans) {
            const auto found = std::find_if(jobs.begin(), jobs.end(),
                                            [&](const job& j) { return j.from == span.pages[0].get(); });
            if (found == jobs.end()) continue;
            span.pages[0] = found->to;
            e.version = ++versions_;
        }
    }
    return {};
}

/// last_tokens: of every sequence, instead of the request's.
inline status cache::requantize_range(std::span<const sequence_id> ids, const requantize_request& request,
                                      std::span<const int> last_tokens, int format, cudaStream_t stream) {
    std::vector<const page*> pages;
    for (std::size_t i = 0; i < ids.size(); ++i) {
        const detail::sequence_pages& s = entry_of(ids[i]).pages;
        const int last = last_tokens.empty() ? request.last_token : last_tokens[i];
        for (int page = 0; page < s.committed(); ++page) {
            const page_span& p = s[page];
            if (s.format_of(p) != format && p.first_token >= request.first_token && p.end() <= last &&
                (!request.only_smaller || shrinks(s.format_of(p), format)))
                pages.push_back(p.pages[0].get());
        }
    }
    if (status s = requantize_pages(ids, pages, format, stream); !s) return s;
    if (request.new_pages)
        for (const sequence_id id : ids) entry_of(id).pages.set_target(format);
    return {};
}

inline status cache::requantize(std::span<const sequence_id> ids, const requantize_request& request,
                                cudaStream_t stream) {
    if (status s = check_batch(ids, false); !s) return s;
    if (status s = check_no_draft(ids); !s) return s;
    if (request.first_token < 0 || request.first_token > request.last_token)
        return detail::bad_value("tokens %d to %d are not a range", request.first_token, request.last_token);
    const int format = format_.find(request.format);
    if (format < 0)
        return detail::bad_value(
            "pages of %.40s and %.40s are not compiled for one sequence: add their format to "
            "this make_device_format<...>()",
            options_.formats.empty() ? "" : options_.formats[0].c_str(), std::string(request.format).c_str());
    return requantize_range(ids, request, {}, format, stream);
}

inline status cache::step_down(std::span<const sequence_id> ids, std::span<const tier> tiers,
                               cudaStream_t stream, std::size_t byte_budget) {
    if (status s = check_batch(ids, false); !s) return s;
    if (status s = check_no_draft(ids); !s) return s;
    for (std::size_t i = 0; i < tiers.size(); ++i) {
        if (format_.find(tiers[i].format) < 0)
            return detail::bad_value(
                "tier %zu: pages of %.60s are not compiled for this cache: add their format to "
                "its make_device_format<...>()",
                i, std::string(tiers[i].format).c_str());
        const int before = i == 0 ? 0 : tiers[i - 1].age;
        if (tiers[i].age < before)
            return detail::bad_value("tier %zu starts at age %d, before %d", i, tiers[i].age, before);
    }
    std::vector<int> last(ids.size());
    // Narrowest first, so that no page is quantized twice.
    for (std::size_t t = tiers.size(); t-- > 0;) {
        for (std::size_t i = 0; i < ids.size(); ++i) last[i] = tokens(ids[i]) - tiers[t].age;
        requantize_request request;
        request.only_smaller = true;
        if (status s = requantize_range(ids, request, last, format_.find(tiers[t].format), stream); !s)
            return s;
    }
    std::size_t in_use = usage().in_use();
    for (std::size_t t = 1; t < tiers.size() && in_use > byte_budget; ++t) {
        const int format = format_.find(tiers[t].format);
        const std::size_t size = quantized_[static_cast<std::size_t>(format)].page_bytes();
        std::vector<const page*> pages;
        int most = 0;
        for (const sequence_id id : ids) most = kvq::detail::larger(most, entry_of(id).pages.committed());
        for (int page = 0; page < most && in_use > byte_budget; ++page)
            for (const sequence_id id : ids) {
                const detail::sequence_pages& s = entry_of(id).pages;
                if (page >= s.committed()) continue;
                const kvq::page* const p = s[page].pages[0].get();
                if (p->format == format + 1 || !shrinks(p->format - 1, format)) continue;
                // A page that is shared lies at the same index in all of its sequences. Its first holder takes it for all.
                std::uint32_t holders = 0;
                bool first = true;
                for (const sequence_id other : ids) {
                    const detail::sequence_pages& o = entry_of(other).pages;
                    const bool holds = page < o.committed() && o[page].pages[0].get() == p;
                    if (holds && holders == 0) first = other == id;
                    holders += holds;
                }
                if (!first || holders < p->references) continue;
                pages.push_back(p);
                in_use -= p->bytes - size;
            }
        if (status s = requantize_pages(ids, pages, format, stream); !s) return s;
    }
    return {};
}

}}}  // namespace kvq::cuda
