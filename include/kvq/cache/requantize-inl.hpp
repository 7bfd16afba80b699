// Definitions of requantize.hpp.
#pragma once

#include <mutex>  // and with it std::chrono::steady_clock: <chrono> alone reads <sstream>, a tenth of kvq.hpp

#include "../core/error.hpp"
#include "../page/page_changes.hpp"
#include "batch.hpp"
#include "convert.hpp"
#include "key_plan.hpp"
#include "requantize.hpp"
#include "sequence_access.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

inline void expect_distinct(std::span<const sequence* const> sequences) {
    std::vector<const sequence*> sorted(sequences.begin(), sequences.end());
    std::ranges::sort(sorted, std::less<>());
    if (std::ranges::adjacent_find(sorted) == sorted.end()) return;
    for (std::size_t i = 0; i < sequences.size(); ++i)
        expect_distinct(i, "request", [&](std::size_t j) { return sequences[j]; });
}

/// The tables of sequences with other pages in them, of as many bytes, formats and holders, but without data.
/// A dry run of several requests changes these.
class page_rehearsal final : public page_owner {
public:
    page_rehearsal(const cache& of, std::span<sequence* const> sequences)
        : memory_(of.pool().memory()), in_use_(of.pool().bytes_in_use()), twins_(memory_), tables_(memory_) {
        tables_.reserve(sequences.size());
        for (const sequence* const s : sequences) {
            const auto& from = sequence_access::tables(*s);
            auto& to = tables_.emplace_back(memory_);
            to.reserve(from.size());
            for (const page_table& table : from) to.emplace_back(table, memory_);
        }
        for_each([&](const page_ref& p) { twins_.push_back({p.get(), {}, 0}); });
        std::sort(twins_.begin(), twins_.end(),
                  [](const twin& a, const twin& b) { return std::less<>{}(a.held, b.held); });
        // Of equal ones the number is that of the places in these tables.
        std::size_t kept = 0;
        for (std::size_t first = 0, end; first < twins_.size(); first = end) {
            for (end = first; end < twins_.size() && twins_[end].held == twins_[first].held;) ++end;
            const page& held = *twins_[first].held;
            // The copies of the tables hold as many references as the sequences do.
            const auto places = static_cast<std::uint32_t>(end - first);
            const std::uint32_t holders = held.references.load(std::memory_order_acquire) - places;
            twin& t = twins_[kept++];
            t = {&held, make(held.bytes, held.format, held.tokens, held.lower_bytes()), 0};
            t.own->plan = held.plan;
            t.elsewhere = larger(holders, places) - places;
        }
        twins_.erase(twins_.begin() + static_cast<std::ptrdiff_t>(kept), twins_.end());
        for_each([&](page_ref& p) {
            p = std::partition_point(twins_.begin(), twins_.end(), [&](const twin& t) {
                    return std::less<>{}(t.held, p.get());
                })->own;
        });
        // The own reference stands for one of those elsewhere.
        for (twin& t : twins_)
            if (t.elsewhere > 0)
                t.own->references.fetch_add(t.elsewhere - 1, std::memory_order_relaxed);
            else
                t.own = {};
    }
    ~page_rehearsal() {
        for (twin& t : twins_)
            if (t.elsewhere > 0) t.own->references.fetch_sub(t.elsewhere - 1, std::memory_order_relaxed);
    }
    page_rehearsal(const page_rehearsal&) = delete;
    page_rehearsal& operator=(const page_rehearsal&) = delete;

    resource_vector<page_table>& tables(std::size_t sequence) noexcept { return tables_[sequence]; }
    std::size_t bytes_in_use() const noexcept { return in_use_; }
    page_ref allocate(std::size_t bytes, int format, int tokens, std::size_t lower_bytes) {
        page_ref made = make(bytes, format, tokens, lower_bytes);
        in_use_ += page_pool::allocation(bytes);
        return made;
    }
    void drop_lower(page& p, int format) noexcept {
        in_use_ -= p.lower_bytes();
        p.bytes -= p.lower_bytes();
        p.lower_units = 0;
        p.lower = nullptr;
        p.format = format;
    }
    void free(page* p) noexcept override {
        in_use_ -= page_pool::allocation(p->bytes);
        p->~page();
        memory_->deallocate(p, sizeof(page), alignof(page));
    }

private:
    struct twin {
        const page* held;
        page_ref own;
        std::uint32_t elsewhere;  // references of other holders
    };

    page_ref make(std::size_t bytes, int format, int tokens, std::size_t lower_bytes) {
        page* const p = ::new (allocate_bytes(*memory_, sizeof(page), alignof(page))) page;
        p->format = format;
        p->tokens = tokens;
        p->bytes = bytes;
        p->owner = this;
        p->lower_units = static_cast<std::uint32_t>(lower_bytes / 16);
        if (lower_bytes > 0) p->lower = p->memory;  // never read
        return page_ref(p);
    }
    template <class F>
    void for_each(F&& f) {
        for (auto& of_sequence : tables_)
            for (page_table& table : of_sequence)
                for (page_span& s : table.spans)
                    for (auto* const list : {&s.pages, &s.copies})
                        for (page_ref& p : *list)
                            if (p) f(p);
    }

    std::pmr::memory_resource* memory_;
    std::size_t in_use_;
    resource_vector<twin> twins_;  // sorted
    resource_vector<resource_vector<page_table>> tables_;
};

/// A request on its way: which pages of which sequences change, and the run over them.
class requantizer {
public:
    /// extent: limits of stepping down that a request does not have. wider: listed formats; pages change
    /// where new ones are smaller than in each of these. rehearsal: its tables change, not those of the
    /// sequences.
    requantizer(cache& of, std::span<sequence* const> sequences, const requantize_request& request,
                const change_range& extent = {}, std::span<const layer_format> wider = {},
                page_rehearsal* rehearsal = nullptr)
        : rehearsal_(rehearsal),
          sequences_(sequences),
          request_(request),
          extent_(extent),
          wider_(wider),
          cache_(&of),
          changes_(of.pool().memory(), of.geometry(), of.options().rollback),
          tables_(of.pool().memory()),
          spans_(of.pool().memory()) {
        sequence_access::expect_members(of, sequences, "of the request");
        const auto check = [](const char* name, int format, int size) {
            expect(format >= requantize_request::keep && format < size - 1, name, " format ", format,
                   " is not among the ", size - 1, " listed ones");
        };
        check("key", request.key, cache_->table(tensor::key).size());
        check("value", request.value, cache_->table(tensor::value).size());
        const int layers = cache_->layer_count();
        expect(request.first_layer >= 0 && request.first_layer <= request.last_layer &&
                   (request.last_layer <= layers || request.last_layer == requantize_request::all),
               "layers ", request.first_layer, " to ", request.last_layer, " are not a range of the ", layers,
               " layers of the cache");
        expect(request.first_token >= 0 && request.first_token <= request.last_token, "tokens ",
               request.first_token, " to ", request.last_token, " are not a range");
        for (int layer = request.first_layer; request.key >= 0 && layer < last_layer(); ++layer)
            cache_->expect_holds_rotary(layer, request.key);
        extent_.first_token = request.first_token;
        extent_.last_token = request.last_token;
    }

    /// Without executor and workspace a dry run for so many threads: the cache and its sequences are only
    /// read.
    requantize_report run(const requantize_limit& limit, int threads, const executor_view* ex,
                          workspace* space) {
        dry_ = ex == nullptr && rehearsal_ == nullptr;
        const auto start = std::chrono::steady_clock::now();
        // At most one thread per page.
        std::size_t pages = 1;
        for (std::size_t i = 0; i < sequences_.size(); ++i) {
            if (ex) (void)sequence_access::committed_tables(*sequences_[i]);
            for (const page_table& table : tables_of(i))
                pages += 2 * static_cast<std::size_t>(table.committed);
        }
        report_.bytes_before = report_.bytes_after = report_.bytes_peak =
            rehearsal_ ? rehearsal_->bytes_in_use() : cache_->pool().bytes_in_use();
        const auto workers = smaller(pages, static_cast<std::size_t>(larger(1, threads)));
        scratch_floats_ = cache_->scratch_floats();
        report_.workspace = workers * scratch_floats_ * sizeof(float);
        if (ex) scratch_ = reinterpret_cast<float*>(space->reserve(report_.workspace));
        resource_vector<job> batch(cache_->pool().memory());
        batch.reserve(workers);
        spans_.reserve(workers * sequences_.size());
        tables_.reserve(sequences_.size());
        if (!dry_ && request_.new_pages) set_targets();

        for_each_job([&](int layer, tensor role, int format, const page_change& change) {
            const std::size_t done = report_.pages + batch.size();
            const bool stop =
                done > 0 && (done >= limit.pages || (limit.nanoseconds != requantize_limit{}.nanoseconds &&
                                                     std::chrono::steady_clock::now() - start >=
                                                         std::chrono::nanoseconds(limit.nanoseconds)));
            if (stop) {
                ++report_.pages_left;
                return;
            }
            if (drop_lower(role, format, change)) return;
            batch.push_back({layer, role, format, spans_.size(), change.spans.size()});
            if (ex && role == tensor::key) batch.back().plan = plan_of(change.spans.front(), layer, format);
            spans_.insert(spans_.end(), change.spans.begin(), change.spans.end());
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
        std::size_t first_span, spans;  // of spans_
        page_ref fresh{};
        kvq::format plan{};  // of keys

        std::size_t piece() const noexcept { return static_cast<std::size_t>(role); }
    };

    resource_vector<page_table>& tables_of(std::size_t sequence) const {
        return rehearsal_ ? rehearsal_->tables(sequence) : sequence_access::tables(*sequences_[sequence]);
    }
    page_table& table_of(int sequence, int layer) const {
        return tables_of(static_cast<std::size_t>(sequence))[static_cast<std::size_t>(layer)];
    }
    page_table& table_of(const job& j, const held_span& at) const { return table_of(at.table, j.layer); }
    int count() const noexcept { return static_cast<int>(sequences_.size()); }
    int last_layer() const { return smaller(request_.last_layer, cache_->layer_count()); }
    /// Index in the table of formats, or -1: pages do not change.
    int wanted(tensor role) const {
        const int listed = role == tensor::key ? request_.key : request_.value;
        return listed < 0 ? -1 : cache_->table(role).index_of(listed);
    }
    /// Of a page in the format that takes the place of `held`.
    std::size_t data_bytes(tensor role, int layer, int format, const page& held) const {
        return cache_->page_bytes(role, layer, format, held.tokens);
    }
    /// Is there a format whose whole pages have more than so many bytes?
    bool some_larger(tensor role, int layer, std::size_t bytes) const {
        for (int format = 0; format < cache_->table(role).size(); ++format)
            if (whole_bytes(role, layer, format) > bytes) return true;
        return false;
    }
    std::size_t whole_bytes(tensor role, int layer, int format) const {
        return cache_->page_bytes(role, layer, format, cache_->options().page_tokens);
    }

    /// The plan of a page of keys: of the first sequence that holds it. One for all pages of its layer.
    kvq::format plan_of(const held_span& at, int layer, int format) {
        if (planned_.layer != layer || planned_.table != at.table)
            planned_ = {layer, at.table, plan_for(*cache_, table_of(at.table, layer), layer, format)};
        return planned_.plan;
    }
    void set_targets() {
        for (int s = 0; s < count(); ++s)
            for (int layer = request_.first_layer; layer < last_layer(); ++layer)
                for (const tensor role : cache_->tensors(layer)) {
                    int& target = table_of(s, layer).targets[static_cast<int>(role)];
                    if (wanted(role) < 0 || wanted(role) == target) continue;
                    target = wanted(role);
                    if (role == tensor::key) table_of(s, layer).find_plan();
                }
    }

    /// Calls f(layer, role, format, change) for every page to change, oldest pages of a layer first.
    template <class F>
    void for_each_job(F&& f) {
        const bool all_tokens = extent_.first_token == 0 && extent_.last_token == requantize_request::all;
        for (int layer = request_.first_layer; layer < last_layer(); ++layer) {
            // Tokens of a request are those of the sequence.
            if (!all_tokens && cache_->holds_tokens(layer) && !cache_->takes_steps(layer)) continue;
            tables_.clear();
            for (int s = 0; s < count(); ++s) tables_.push_back(&table_of(s, layer));
            changes_.set_geometry(cache_->geometry(layer));
            changes_.select(tables_, extent_);
            for (const tensor role : cache_->tensors(layer)) {
                const int format = wanted(role);
                if (format < 0) continue;
                const std::size_t bytes = whole_bytes(role, layer, format);
                if (request_.only_smaller && !some_larger(role, layer, bytes)) continue;
                if (std::ranges::any_of(wider_, [&](const layer_format& wide) {
                        const int listed = role == tensor::key ? wide.key : wide.value;
                        return whole_bytes(role, layer, cache_->table(role).index_of(listed)) <= bytes;
                    }))
                    continue;
                const auto changes = [&](const page& p) {
                    if (p.format == format) return false;
                    const bool whole = p.tokens == cache_->options().page_tokens;
                    return !request_.only_smaller ||
                           (whole ? bytes : data_bytes(role, layer, format, p)) < p.bytes;
                };
                changes_.for_each(static_cast<std::size_t>(role), changes,
                                  [&](const page_change& change) { f(layer, role, format, change); });
            }
        }
    }

    /// A page of two planes that becomes its upper one, and that nothing else holds, loses the lower one
    /// where it lies: no byte of it is read or written.
    bool drop_lower(tensor role, int format, const page_change& change) {
        page& p = *change.held;
        if (!p.lower || change.held.references() > change.spans.size() ||
            !cache_->table(role).drops_lower(p.format, format))
            return false;
        report_.bytes_freed += p.lower_bytes();
        report_.bytes_after -= p.lower_bytes();
        ++report_.pages;
        if (rehearsal_)
            rehearsal_->drop_lower(p, format);
        else if (!dry_)
            cache_->pool().drop_lower(p, format);
        return true;
    }

    void convert(resource_vector<job>& batch, const executor_view* ex) {
        std::size_t added = 0;
        for (job& j : batch) {
            const page& held = *old_page(j);
            const std::size_t bytes = data_bytes(j.role, j.layer, j.format, held),
                              lower = cache_->lower_bytes(j.role, j.layer, j.format, held.tokens);
            if (rehearsal_)
                j.fresh = rehearsal_->allocate(bytes, j.format, held.tokens, lower);
            else if (!dry_)
                j.fresh = cache_->pool().allocate(bytes, j.format, held.tokens, lower);
            if (j.plan) choose_plan(*cache_, j.layer, held, j.plan, *j.fresh);
            added += page_pool::allocation(bytes);
        }
        report_.bytes_after += added;
        report_.bytes_peak = larger(report_.bytes_peak, report_.bytes_after);
        if (ex)
            ex->parallel_for(static_cast<int>(batch.size()), [&](int i) {
                const job& j = batch[static_cast<std::size_t>(i)];
                const page& from = *old_page(j);
                float* const scratch = scratch_ + static_cast<std::size_t>(i) * scratch_floats_;
                convert_page(cache_->table(j.role), cache_->shape(j.layer), j.layer, from, *j.fresh, scratch);
            });
        for (job& j : batch) replace(j);
        report_.pages += batch.size();
        batch.clear();
        spans_.clear();
    }

    const page_ref& old_page(const job& j) const {
        const held_span& first = spans_[j.first_span];
        return table_of(j, first)[first.span].pages[j.piece()];
    }

    void replace(job& j) {
        const page_ref old = old_page(j);
        const page_geometry g = cache_->geometry(j.layer);
        std::size_t holders = 0;
        for (std::size_t i = 0; i < j.spans; ++i) {
            const held_span& at = spans_[j.first_span + i];
            page_table& table = table_of(j, at);
            holders += !table.keeps_page(at.span, j.piece(), g, cache_->options().rollback);
            if (!dry_) table.change_page(at.span, j.piece(), j.fresh, g, cache_->options().rollback);
        }
        const std::size_t elsewhere = old.references() - 1 - (dry_ ? holders : 0);
        if (elsewhere == 0) {
            const std::size_t bytes = page_pool::allocation(old->bytes);
            report_.bytes_freed += bytes;
            report_.bytes_after -= bytes;
        }
    }

    page_rehearsal* rehearsal_;
    std::span<sequence* const> sequences_;
    requantize_request request_;
    change_range extent_;
    std::span<const layer_format> wider_;
    cache* cache_;
    bool dry_ = true;  // tables are only read
    page_changes changes_;
    resource_vector<page_table*> tables_;  // of one layer
    resource_vector<held_span> spans_;     // of the batch
    struct {
        int layer = -1, table = -1;
        kvq::format plan = {};
    } planned_;  // of the last page
    requantize_report report_;
    float* scratch_ = nullptr;
    std::size_t scratch_floats_ = 0;
};

}  // namespace detail

KVQ_FUNC requantize_report cache::plan_requantize(const sequence& s, const requantize_request& request,
                                                  int threads) const {
    const sequence* const one = &s;
    return plan_requantize(std::span(&one, 1), request, threads);
}
KVQ_FUNC requantize_report cache::plan_requantize(std::span<const sequence* const> sequences,
                                                  const requantize_request& request, int threads) const {
    detail::expect(threads >= 1, "requantizing needs at least 1 thread, got ", threads);
    detail::expect_distinct(sequences);
    // Nothing of them changes without an executor.
    const std::span<sequence* const> same(const_cast<sequence* const*>(sequences.data()), sequences.size());
    return detail::requantizer(const_cast<cache&>(*this), same, request).run({}, threads, nullptr, nullptr);
}
KVQ_FUNC requantize_report cache::requantize(sequence& s, const requantize_request& request) {
    return requantize(s, request, requantize_limit{});
}
KVQ_FUNC requantize_report cache::requantize(sequence& s, const requantize_request& request,
                                             const requantize_limit& limit) {
    sequence* const one = &s;
    workspace space(pool_.memory());
    return requantize(std::span(&one, 1), request, limit, serial_executor{}, space);
}
KVQ_FUNC requantize_report cache::requantize(std::span<sequence* const> sequences,
                                             const requantize_request& request, const requantize_limit& limit,
                                             executor_view executor, workspace& space) {
    detail::expect_distinct(sequences);
    return detail::requantizer(*this, sequences, request)
        .run(limit, executor.concurrency(), &executor, &space);
}

}}  // namespace kvq
