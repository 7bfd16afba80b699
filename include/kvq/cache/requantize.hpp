// Requantizing a live cache: coded pages of one or several sequences change their format, page by page.
//
//   requantize_request to_4_bit{.key = 1, .value = 1};         // positions in formats<...>
//   cache.plan_requantize(sequence, to_4_bit);                 // dry run: bytes before, after, peak, freed
//   cache.requantize(sequence, to_4_bit, {.pages = 64});       // some of it now, the rest between later decode steps
//
// Only pages that lie behind the recent window change; sinks, recent tokens and the page being filled stay 16 bit. There is no
// state besides the pages themselves: a page that already has the wanted format needs no work, so the same request can be
// made again until `pages_left` is 0. A page that several of the given sequences share is converted once and stays shared.
// Peak: the old pages and one new page per thread. The dry run counts what the run then does, byte for byte, as long as
// nobody else takes or drops references to these pages meanwhile.
// Error: cache/convert.hpp. Originals kept for exact rollback stay what they are: 16-bit values.
#pragma once

#include <chrono>
#include <span>

#include "convert.hpp"
#include "sequence.hpp"

namespace kvq::inline v0_1 {

/// Which pages, and what they become.
struct requantize_request {
    static constexpr int keep = -1;
    static constexpr int all = (std::numeric_limits<int>::max)();

    int key = keep;    ///< format for keys, 0-based in formats<...>; `keep` leaves them as they are
    int value = keep;  ///< format for values
    int first_layer = 0, last_layer = all;  ///< layers [first_layer, last_layer)
    int first_token = 0, last_token = all;  ///< pages that lie wholly in tokens [first_token, last_token)
    bool only_smaller = false;              ///< skip pages that would not shrink
    bool new_pages = false;                 ///< pages coded from now on take these formats, too
};

/// How much of a request to do in one call. The first page is always done.
struct requantize_limit {
    std::size_t pages = (std::numeric_limits<std::size_t>::max)();
    std::chrono::nanoseconds time = (std::chrono::nanoseconds::max)();
};

/// What a run did, or would do. Bytes are those of pages, headers included, as page_pool counts them.
struct requantize_report {
    std::size_t pages = 0;         ///< converted, shared ones once
    std::size_t pages_left = 0;    ///< of the request, not converted yet
    std::size_t bytes_before = 0;  ///< in the pool
    std::size_t bytes_after = 0;   ///< in the pool
    std::size_t bytes_peak = 0;    ///< largest in between
    std::size_t bytes_freed = 0;   ///< of old pages; those that somebody else still holds are not freed
    std::size_t workspace = 0;     ///< scratch for the duration of the call, not in the pool
};

namespace detail {

template <class Sequence>
void expect_distinct(std::span<Sequence* const> sequences) {
    for (std::size_t i = 0; i < sequences.size(); ++i)
        for (std::size_t j = 0; j < i; ++j)
            expect(sequences[i] != sequences[j], "sequence ", i, " of the request is sequence ", j, " again");
}

/// What a dry run needs of an executor.
struct planned_threads {
    int threads;
    int concurrency() const noexcept { return threads; }
};

/// Sequence: const for a dry run.
template <class Sequence>
class requantizer {
public:
    static constexpr bool dry = std::is_const_v<Sequence>;
    using cache_type = std::remove_reference_t<decltype(sequence_access::cache(std::declval<Sequence&>()))>;
    using cache_pointer = std::conditional_t<dry, const cache_type*, cache_type*>;

    /// The first `leading` sequences say which pages change; the others follow where they share them.
    requantizer(std::remove_pointer_t<cache_pointer>& cache, std::span<Sequence* const> sequences,
                const requantize_request& request,
                std::size_t leading = (std::numeric_limits<std::size_t>::max)())
        : sequences_(sequences),
          leading_(smaller(leading, sequences.size())),
          request_(request),
          cache_(&cache) {
        for (const Sequence* s : sequences)
            expect(&sequence_access::cache(*s) == cache_, "a sequence belongs to another cache");
        const auto check = [](const char* name, int format, int size) {
            expect(format >= requantize_request::keep && format < size - 1, name, " format ", format,
                   " is not among the ", size - 1, " listed ones");
        };
        check("key", request.key, cache_type::key_table::size);
        check("value", request.value, cache_type::value_table::size);
        const int layers = cache_->shape().layers;
        expect(request.first_layer >= 0 && request.first_layer <= request.last_layer &&
                   (request.last_layer <= layers || request.last_layer == requantize_request::all),
               "layers ", request.first_layer, " to ", request.last_layer, " are not a range of the ", layers,
               " layers of the cache");
        expect(request.first_token >= 0 && request.first_token <= request.last_token, "tokens ",
               request.first_token, " to ", request.last_token, " are not a range");
        report_.bytes_before = report_.bytes_after = report_.bytes_peak = cache_->pool().bytes_in_use();
    }

    template <class Executor>
    requantize_report run(const requantize_limit& limit, Executor& ex, workspace& space) {
        const auto start = std::chrono::steady_clock::now();
        const auto workers = static_cast<std::size_t>(larger(1, static_cast<int>(ex.concurrency())));
        const cache_shape& shape = cache_->shape();
        scratch_floats_ = static_cast<std::size_t>(cache_->options().page_tokens) *
                          static_cast<std::size_t>(larger(shape.dim(tensor::key), shape.dim(tensor::value)));
        report_.workspace = workers * scratch_floats_ * sizeof(float);
        if constexpr (!dry) scratch_ = reinterpret_cast<float*>(space.reserve(report_.workspace));
        std::pmr::vector<job> batch(cache_->pool().memory());
        batch.reserve(workers);
        reserve_originals();
        set_targets();

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
            if (batch.size() == workers) convert(batch, ex);
        });
        if (!batch.empty()) convert(batch, ex);
        return report_;
    }

private:
    struct job {
        std::size_t sequence;
        int layer;
        tensor role;
        int page;
        int format;
        page_ref fresh{};
    };

    static auto& track_of(Sequence& s, int layer) {
        return sequence_access::tracks(s)[static_cast<std::size_t>(layer)];
    }
    int last_layer() const { return smaller(request_.last_layer, cache_->shape().layers); }
    /// Index in the table of formats, or -1 to leave pages as they are.
    int wanted(tensor role) const {
        if (role == tensor::key)
            return request_.key < 0 ? -1 : cache_->template table<tensor::key>().index_of(request_.key);
        return request_.value < 0 ? -1 : cache_->template table<tensor::value>().index_of(request_.value);
    }
    std::size_t data_bytes(const job& j) const {
        const int tokens = cache_->options().page_tokens;
        return j.role == tensor::key ? cache_->template page_bytes<tensor::key>(j.format, tokens)
                                     : cache_->template page_bytes<tensor::value>(j.format, tokens);
    }

    /// A 16-bit page that a trim within `rollback` would bring back into the window is kept as an original.
    bool becomes_original(const layer_track& track, tensor role, int page, int format) const {
        return format == 0 &&
               cache_->geometry().commit_at(page) > track.tokens - cache_->options().rollback &&
               !track[role].has_original(page) && track[role].can_keep_original(page);
    }
    /// Before anything changes: afterwards nothing may fail.
    void reserve_originals() {
        if constexpr (!dry) {
            const std::size_t most =
                originals_capacity(cache_->options().rollback, cache_->options().page_tokens);
            for (Sequence* s : sequences_)
                for (int layer = request_.first_layer; layer < last_layer(); ++layer)
                    for (const tensor role : {tensor::key, tensor::value})
                        if (wanted(role) > 0) track_of(*s, layer)[role].originals.reserve(most);
        }
    }

    void set_targets() {
        if constexpr (!dry)
            if (request_.new_pages)
                for (Sequence* s : sequences_.first(leading_))
                    for (int layer = request_.first_layer; layer < last_layer(); ++layer)
                        for (const tensor role : {tensor::key, tensor::value})
                            if (wanted(role) >= 0) track_of(*s, layer)[role].target = wanted(role);
    }

    /// Calls f for every page that has to change; one that sequences share counts for the first of them.
    template <class F>
    void for_each_job(F&& f) const {
        const page_geometry g = cache_->geometry();
        const int skipped = larger(0, request_.first_token - g.sinks);
        const int first = skipped / g.page_tokens + (skipped % g.page_tokens != 0);
        for (std::size_t index = 0; index < leading_; ++index)
            for (int layer = request_.first_layer; layer < last_layer(); ++layer) {
                auto& track = track_of(*sequences_[index], layer);
                int last = track.committed;
                if (request_.last_token != requantize_request::all)
                    last = smaller(last, larger(0, request_.last_token - g.sinks) / g.page_tokens);
                for (const tensor role : {tensor::key, tensor::value}) {
                    const int format = wanted(role);
                    for (int i = first; i < last && format >= 0; ++i) {
                        const page& p = *track[role].pages[static_cast<std::size_t>(i)];
                        const job j{index, layer, role, i, format};
                        if (p.format == format || holder_before(j, p)) continue;
                        if (request_.only_smaller && data_bytes(j) >= p.bytes) continue;
                        f(j);
                    }
                }
            }
    }

    /// Does this sequence hold page p where j does, behind its window?
    bool holds(std::size_t index, const job& j, const page& p) const {
        const auto& track = track_of(*sequences_[index], j.layer);
        return j.page < track.committed && track[j.role].pages[static_cast<std::size_t>(j.page)].get() == &p;
    }
    bool holder_before(const job& j, const page& p) const {
        for (std::size_t index = 0; index < j.sequence; ++index)
            if (holds(index, j, p)) return true;
        return false;
    }

    template <class Executor>
    void convert(std::pmr::vector<job>& batch, Executor& ex) {
        std::size_t added = 0;
        for (job& j : batch) {
            const std::size_t bytes = data_bytes(j);
            if constexpr (!dry)
                j.fresh = cache_->pool().allocate(bytes, j.format, cache_->options().page_tokens);
            added += page_pool::allocation(bytes);
        }
        report_.bytes_after += added;
        report_.bytes_peak = larger(report_.bytes_peak, report_.bytes_after);
        if constexpr (!dry)
            ex.parallel_for(static_cast<int>(batch.size()), [&](int i) {
                const job& j = batch[static_cast<std::size_t>(i)];
                const page& from = *old_page(j);
                float* const scratch = scratch_ + static_cast<std::size_t>(i) * scratch_floats_;
                using backend = typename cache_type::backend;
                using window = typename cache_type::window;
                const auto with = [&](const auto& table) {
                    convert_page<backend, window>(table, cache_->shape(), j.layer, from, *j.fresh, scratch);
                };
                j.role == tensor::key ? with(cache_->keys()) : with(cache_->values());
            });
        for (job& j : batch) replace(j);
        report_.pages += batch.size();
        batch.clear();
    }

    auto& old_page(const job& j) const {
        return track_of(*sequences_[j.sequence], j.layer)[j.role].pages[static_cast<std::size_t>(j.page)];
    }

    void replace(job& j) {
        const page_ref old = old_page(j);
        std::uint32_t holders = 0;
        for (std::size_t index = j.sequence; index < sequences_.size(); ++index) {
            if (!holds(index, j, *old)) continue;
            auto& track = track_of(*sequences_[index], j.layer);
            const bool original = becomes_original(track, j.role, j.page, old->format);
            holders += !original;
            if constexpr (!dry) {
                page_table& table = track[j.role];
                if (original) table.keep_original(j.page, old);
                table.pages[static_cast<std::size_t>(j.page)] = j.fresh;
            }
        }
        const std::uint32_t elsewhere = old.references() - 1 - (dry ? holders : 0);
        if (elsewhere == 0) {
            const std::size_t bytes = page_pool::allocation(old->bytes);
            report_.bytes_freed += bytes;
            report_.bytes_after -= bytes;
        }
    }

    std::span<Sequence* const> sequences_;
    std::size_t leading_;
    requantize_request request_;
    cache_pointer cache_;
    requantize_report report_;
    float* scratch_ = nullptr;
    std::size_t scratch_floats_ = 0;
};

}  // namespace detail
}  // namespace kvq::inline v0_1
