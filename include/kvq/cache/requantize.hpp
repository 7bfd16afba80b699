// Requantizing a live cache: quantized pages of one or several sequences change their format, page by page.
//
//   requantize_request to_4_bit{.key = 1, .value = 1};         // positions in cache_options::keys and values
//   cache.plan_requantize(sequence, to_4_bit);                 // dry run: bytes before, after, peak, freed
//   cache.requantize(sequence, to_4_bit, {.pages = 64});       // 64 pages now, the others between later decode steps
//
// Only pages that lie behind the recent window change; sinks, recent tokens and the page being filled stay 16 bit. The pages are
// the only state: a page that already has the wanted format needs no work, so the same request can be
// made again until `pages_left` is 0. A page that several of the given sequences share, or several spans of one of them, is
// converted once and stays shared.
// Peak: the old pages, one new page per thread, and the new versions of pages whose old versions stay (as 16-bit copies, or because
// another sequence holds them). The dry run predicts the run byte for byte, as long as no other sequence takes or drops references
// to these pages in between.
// A page with tokens hidden by a trim or an erase is converted whole, and shows the same tokens as before.
// Error: cache/convert.hpp. 16-bit copies for exact rollback do not change.
#pragma once

#include <algorithm>
#include <functional>

#include "convert.hpp"
#include "sequence.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

namespace detail {

inline void expect_distinct(std::span<const sequence* const> sequences) {
    for (std::size_t i = 0; i < sequences.size(); ++i)
        for (std::size_t j = 0; j < i; ++j)
            expect(sequences[i] != sequences[j], "sequence ", i, " of the request is sequence ", j, " again");
}

/// Limits of stepping down that a request does not have.
struct requantize_extent {
    /// One per sequence, replaces the request's: a page behind it changes only if another holder of the page has a later last token.
    std::span<const int> last_tokens{};
    /// Skip pages that would not be freed: another sequence holds them, or they would be kept as 16-bit copies.
    bool only_freed = false;
    /// Only spans [first_span, last_span) of a layer.
    int first_span = 0, last_span = (std::numeric_limits<int>::max)();
};

class requantizer {
public:
    requantizer(cache& of, std::span<sequence* const> sequences, const requantize_request& request,
                const requantize_extent& extent = {})
        : sequences_(sequences),
          request_(request),
          extent_(extent),
          cache_(&of),
          rows_(of.pool().memory()),
          found_(of.pool().memory()),
          holders_(of.pool().memory()) {
        for (std::size_t i = 0; i < sequences.size(); ++i) {
            expect(sequences[i] != nullptr, "sequence ", i, " of the request is null");
            expect(&sequence_access::cache(*sequences[i]) == cache_, "sequence ", i,
                   " of the request belongs to another cache");
        }
        const auto check = [](const char* name, int format, int size) {
            expect(format >= requantize_request::keep && format < size - 1, name, " format ", format,
                   " is not among the ", size - 1, " listed ones");
        };
        check("key", request.key, cache_->table(tensor::key).size());
        check("value", request.value, cache_->table(tensor::value).size());
        const int layers = cache_->shape().layers;
        expect(request.first_layer >= 0 && request.first_layer <= request.last_layer &&
                   (request.last_layer <= layers || request.last_layer == requantize_request::all),
               "layers ", request.first_layer, " to ", request.last_layer, " are not a range of the ", layers,
               " layers of the cache");
        expect(request.first_token >= 0 && request.first_token <= request.last_token, "tokens ",
               request.first_token, " to ", request.last_token, " are not a range");
        report_.bytes_before = report_.bytes_after = report_.bytes_peak = cache_->pool().bytes_in_use();
    }

    /// Without executor and workspace a dry run for so many threads: the cache and its sequences are only read.
    requantize_report run(const requantize_limit& limit, int threads, const executor_view* ex,
                          workspace* space) {
        dry_ = ex == nullptr;
        const auto start = std::chrono::steady_clock::now();
        // At most one thread per page.
        std::size_t pages = 1;
        for (sequence* s : sequences_)
            for (const layer_track& track : sequence_access::tracks(*s))
                pages += 2 * static_cast<std::size_t>(track.committed);
        const auto workers = smaller(pages, static_cast<std::size_t>(larger(1, threads)));
        const cache_shape& shape = cache_->shape();
        scratch_floats_ = static_cast<std::size_t>(cache_->options().page_tokens) *
                          static_cast<std::size_t>(larger(shape.dim(tensor::key), shape.dim(tensor::value)));
        report_.workspace = workers * scratch_floats_ * sizeof(float);
        if (!dry_) scratch_ = reinterpret_cast<float*>(space->reserve(report_.workspace));
        resource_vector<job> batch(cache_->pool().memory());
        batch.reserve(workers);
        rows_.resize(sequences_.size());
        found_.reserve(sequences_.size());
        holders_.reserve(workers * sequences_.size());
        if (!dry_ && request_.new_pages) set_targets();

        for_each_job([&](const job& j) {
            const std::size_t done = report_.pages + batch.size();
            const bool stop =
                done > 0 && (done >= limit.pages || (limit.time != (std::chrono::nanoseconds::max)() &&
                                                     std::chrono::steady_clock::now() - start >= limit.time));
            if (stop) {
                ++report_.pages_left;
                return;
            }
            batch.push_back(j);
            batch.back().first_holder = holders_.size();
            for (std::size_t i = 0; i < j.holders; ++i) {
                const holder& h = found_[j.first_holder + i];
                holders_.push_back({h.index, h.span});
            }
            if (batch.size() == workers) convert(batch, ex);
        });
        if (!batch.empty()) convert(batch, ex);
        return report_;
    }

private:
    struct job {
        int layer;
        tensor role;
        int format;
        std::size_t first_holder, holders;  // of found_, in a batch of holders_
        page_ref fresh{};
    };
    /// The pages of one sequence in one layer and tensor.
    struct row {
        const page_span* spans;
        int committed;
        int first, last;  // the range of pages to change, by the last token of the sequence
    };
    /// A sequence that holds a page to change, the span there, and the first holder of this page.
    struct holder {
        const page* held;
        int first, index;  // of sequences
        int span;
    };
    struct place {
        int sequence, span;
    };

    static layer_track& track_of(sequence& s, int layer) {
        return sequence_access::tracks(s)[static_cast<std::size_t>(layer)];
    }
    int last_layer() const { return smaller(request_.last_layer, cache_->shape().layers); }
    /// Index in the table of formats, or -1: pages do not change.
    int wanted(tensor role) const {
        const int listed = role == tensor::key ? request_.key : request_.value;
        return listed < 0 ? -1 : cache_->table(role).index_of(listed);
    }
    /// Of a page in the format that takes the place of `held`.
    std::size_t data_bytes(tensor role, int format, const page& held) const {
        return cache_->page_bytes(role, format, held.tokens);
    }
    /// Is there a format whose whole pages have more than so many bytes?
    bool some_larger(tensor role, std::size_t bytes) const {
        for (int format = 0; format < cache_->table(role).size(); ++format)
            if (whole_bytes(role, format) > bytes) return true;
        return false;
    }
    std::size_t whole_bytes(tensor role, int format) const {
        return cache_->page_bytes(role, format, cache_->options().page_tokens);
    }

    /// True for a 16-bit page that a trim within `rollback` would bring back into the window: it is kept as a copy. (False for a page
    /// that a deep trim has left in 16 bit because the other tensor's page was quantized: it never returns to the window.)
    bool becomes_copy(const layer_track& track, tensor role, int i, int format) const {
        const page_geometry g = cache_->geometry();
        return format == 0 && track[i].skip == 0 && track.is_due(track[i], track.tokens, g) &&
               !track[i].copies[static_cast<int>(role)] &&
               layer_track::keeps_copies(track[i], track.tokens, g, cache_->options().rollback);
    }

    void set_targets() {
        for (sequence* s : sequences_)
            for (int layer = request_.first_layer; layer < last_layer(); ++layer)
                for (const tensor role : {tensor::key, tensor::value})
                    if (wanted(role) >= 0) track_of(*s, layer).targets[static_cast<int>(role)] = wanted(role);
    }

    /// Calls f for every page to change, once for all spans that hold it, oldest pages of a layer first.
    template <class F>
    void for_each_job(F&& f) {
        for (int layer = request_.first_layer; layer < last_layer(); ++layer)
            for (const tensor role : {tensor::key, tensor::value}) {
                const int format = wanted(role);
                if (format < 0) continue;
                const std::size_t bytes = whole_bytes(role, format);
                if (request_.only_smaller && !some_larger(role, bytes)) continue;
                const auto [first, last] = find_rows(layer);
                for (int i = first; i < last; ++i) {
                    if (!find_holders(i, role, format, bytes)) continue;
                    if (rearranged_) find_other_places(i, first, role);
                    for (std::size_t at = 0, next; at < found_.size(); at = next) {
                        bool wanted_here = false;
                        for (next = at; next < found_.size() && found_[next].first == found_[at].first;
                             ++next)
                            wanted_here = wanted_here || in_range(found_[next]);
                        const job j{layer, role, format, at, next - at};
                        if (wanted_here && (!extent_.only_freed || frees(j))) f(j);
                    }
                }
            }
    }

    bool in_range(const holder& h) const {
        return h.span >= rows_[h.index].first && h.span < rows_[h.index].last;
    }

    /// Fills the rows of one layer. Returns the range of spans in which any sequence has pages to change.
    std::pair<int, int> find_rows(int layer) {
        int begin = (std::numeric_limits<int>::max)(), end = 0;
        rearranged_ = false;
        for (std::size_t s = 0; s < sequences_.size(); ++s) {
            const layer_track& track = track_of(*sequences_[s], layer);
            const int token = extent_.last_tokens.empty() ? request_.last_token : extent_.last_tokens[s];
            const auto at = [&](int i) { return track.spans.begin() + i; };
            const auto first = std::partition_point(at(0), at(track.committed), [&](const page_span& span) {
                return span.first_token < request_.first_token;
            });
            const auto last = std::partition_point(
                first, at(track.committed), [&](const page_span& span) { return span.end() <= token; });
            rows_[s] = {track.spans.data(), track.committed,
                        larger(extent_.first_span, static_cast<int>(first - track.spans.begin())),
                        smaller(extent_.last_span, static_cast<int>(last - track.spans.begin()))};
            rearranged_ = rearranged_ || track.rearranged;
            begin = smaller(begin, rows_[s].first);
            end = larger(end, rows_[s].last);
        }
        return {begin, end};
    }

    /// bytes: of a whole page. Fills found_ with the sequences that hold page i in another format, holders of the same page side by side, in
    /// the order of the sequences.
    bool find_holders(int i, tensor role, int format, std::size_t bytes) {
        constexpr int ahead = 8;
        const auto page_of = [role](const row& r, int at) {
            return r.spans[at].pages[static_cast<int>(role)].get();
        };
        found_.clear();
        bool one_page = true;
        for (std::size_t s = 0; s < rows_.size(); ++s) {
            if (i >= rows_[s].committed) continue;
            // When no page has to change, all of the time is spent waiting for pages from memory.
            if (i + ahead < rows_[s].committed) prefetch(page_of(rows_[s], i + ahead));
            if (rows_[s].spans[i].sinks) continue;
            const page* const p = page_of(rows_[s], i);
            if (p->format == format) continue;
            const bool whole = p->tokens == cache_->options().page_tokens;
            if (request_.only_smaller && (whole ? bytes : data_bytes(role, format, *p)) >= p->bytes) continue;
            const int at = static_cast<int>(s), first = found_.empty() ? at : found_.front().index;
            one_page = one_page && (found_.empty() || found_.front().held == p);
            found_.push_back({p, first, at, i});
        }
        if (one_page) return !found_.empty();
        std::sort(found_.begin(), found_.end(), [](const holder& a, const holder& b) {
            return a.held != b.held ? std::less<>{}(a.held, b.held) : a.index < b.index;
        });
        for (std::size_t k = 0; k < found_.size(); ++k)
            found_[k].first =
                k > 0 && found_[k].held == found_[k - 1].held ? found_[k - 1].first : found_[k].index;
        // The order must not depend on addresses.
        std::sort(found_.begin(), found_.end(), [](const holder& a, const holder& b) {
            return a.first != b.first ? a.first < b.first : a.index < b.index;
        });
        return true;
    }

    /// After an erase or a splice: adds the spans that hold the pages in found_ at other indices. Pages that were found from an earlier
    /// index of the range on go. O(spans) for each page with more references than were found.
    void find_other_places(int i, int first, tensor role) {
        const std::size_t found_here = found_.size();
        for (std::size_t at = 0, next; at < found_here; at = next) {
            const page* const p = found_[at].held;
            for (next = at; next < found_here && found_[next].held == p;) ++next;
            const int owner = found_[at].first;
            if (p->references.load(std::memory_order_acquire) <= next - at) continue;
            bool earlier = false;
            for (std::size_t s = 0; s < rows_.size(); ++s)
                for (int span = 0; span < rows_[s].committed; ++span) {
                    if (span == i || rows_[s].spans[span].pages[static_cast<int>(role)].get() != p) continue;
                    earlier = earlier || (span >= first && span < i);
                    found_.push_back({p, owner, static_cast<int>(s), span});
                }
            if (earlier)
                for (holder& h : found_)
                    if (h.held == p) h.held = nullptr;
        }
        std::erase_if(found_, [](const holder& h) { return h.held == nullptr; });
        std::sort(found_.begin(), found_.end(), [](const holder& a, const holder& b) {
            if (a.first != b.first) return a.first < b.first;
            return a.index != b.index ? a.index < b.index : a.span < b.span;
        });
    }

    /// Is the page of a job freed once all of its known holders have the new page?
    bool frees(const job& j) const {
        const page& p = *found_[j.first_holder].held;
        if (p.references.load(std::memory_order_acquire) > j.holders) return false;
        for (std::size_t i = 0; i < j.holders; ++i) {
            const holder& h = found_[j.first_holder + i];
            if (becomes_copy(track_of(*sequences_[h.index], j.layer), j.role, h.span, p.format)) return false;
        }
        return true;
    }

    void convert(resource_vector<job>& batch, const executor_view* ex) {
        std::size_t added = 0;
        for (job& j : batch) {
            const page& held = *old_page(j);
            const std::size_t bytes = data_bytes(j.role, j.format, held);
            if (!dry_) j.fresh = cache_->pool().allocate(bytes, j.format, held.tokens);
            added += page_pool::allocation(bytes);
        }
        report_.bytes_after += added;
        report_.bytes_peak = larger(report_.bytes_peak, report_.bytes_after);
        if (!dry_)
            ex->parallel_for(static_cast<int>(batch.size()), [&](int i) {
                const job& j = batch[static_cast<std::size_t>(i)];
                const page& from = *old_page(j);
                float* const scratch = scratch_ + static_cast<std::size_t>(i) * scratch_floats_;
                convert_page(cache_->table(j.role), cache_->shape(), j.layer, from, *j.fresh, scratch);
            });
        for (job& j : batch) replace(j);
        report_.pages += batch.size();
        batch.clear();
        holders_.clear();
    }

    const page_ref& old_page(const job& j) const {
        const place& first = holders_[j.first_holder];
        return track_of(*sequences_[first.sequence], j.layer)[first.span].pages[static_cast<int>(j.role)];
    }

    void replace(job& j) {
        const page_ref old = old_page(j);
        std::size_t holders = 0;
        for (std::size_t i = 0; i < j.holders; ++i) {
            const place& at = holders_[j.first_holder + i];
            layer_track& track = track_of(*sequences_[at.sequence], j.layer);
            const bool copy = becomes_copy(track, j.role, at.span, old->format);
            holders += !copy;
            if (!dry_) {
                page_span& span = track[at.span];
                if (copy) {
                    span.copies[static_cast<int>(j.role)] = old;
                    track.first_copy = smaller(track.first_copy, at.span);
                }
                span.pages[static_cast<int>(j.role)] = j.fresh;
            }
        }
        const std::size_t elsewhere = old.references() - 1 - (dry_ ? holders : 0);
        if (elsewhere == 0) {
            const std::size_t bytes = page_pool::allocation(old->bytes);
            report_.bytes_freed += bytes;
            report_.bytes_after -= bytes;
        }
    }

    std::span<sequence* const> sequences_;
    requantize_request request_;
    requantize_extent extent_;
    cache* cache_;
    bool dry_ = true;
    resource_vector<row> rows_;
    resource_vector<holder> found_;
    resource_vector<place> holders_;  // of the batch
    bool rearranged_ = false;         // is any layer of the rows
    requantize_report report_;
    float* scratch_ = nullptr;
    std::size_t scratch_floats_ = 0;
};

}  // namespace detail

inline requantize_report cache::plan_requantize(const sequence& s, const requantize_request& request,
                                                int threads) const {
    const sequence* const one = &s;
    return plan_requantize(std::span(&one, 1), request, threads);
}
inline requantize_report cache::plan_requantize(std::span<const sequence* const> sequences,
                                                const requantize_request& request, int threads) const {
    detail::expect(threads >= 1, "requantizing needs at least 1 thread, got ", threads);
    detail::expect_distinct(sequences);
    // Nothing of them changes without an executor.
    const std::span<sequence* const> same(const_cast<sequence* const*>(sequences.data()), sequences.size());
    return detail::requantizer(const_cast<cache&>(*this), same, request).run({}, threads, nullptr, nullptr);
}
inline requantize_report cache::requantize(sequence& s, const requantize_request& request,
                                           const requantize_limit& limit) {
    sequence* const one = &s;
    workspace space(pool_.memory());
    return requantize(std::span(&one, 1), request, limit, serial_executor{}, space);
}
inline requantize_report cache::requantize(std::span<sequence* const> sequences,
                                           const requantize_request& request, const requantize_limit& limit,
                                           executor_view executor, workspace& space) {
    detail::expect_distinct(sequences);
    return detail::requantizer(*this, sequences, request)
        .run(limit, executor.concurrency(), &executor, &space);
}

}}  // namespace kvq
