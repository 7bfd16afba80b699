// Definitions of prefix_tiers.hpp.
#pragma once

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <random>
#include <system_error>

#include "../core/error.hpp"
#include "../io/file.hpp"
#include "../io/scheme_identity.hpp"
#include "prefix_tiers.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

KVQ_FUNC private_folder::~private_folder() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove(path_, ignored);
}

KVQ_FUNC void private_folder::make(const std::string& in) {
    std::random_device random;
    std::error_code failed;
    for (int tries = 0; tries < 100 && path_.empty() && !failed; ++tries) {
        const std::uint64_t number = std::uint64_t{random()} << 32 | random();
        const auto path = std::filesystem::path(in) / ("kvq-prefixes-" + fingerprint_text(number));
        // False if anything, also a link, has this name.
        if (std::filesystem::create_directory(path, failed)) path_ = path.string();
    }
    expect(!path_.empty(), "cannot make a folder in ", in, ": ", failed.message());
    std::filesystem::permissions(path_, std::filesystem::perms::owner_all, failed);
    // The umask has set other permissions until here: no file may be there yet.
    const bool alone = !failed && std::filesystem::is_empty(path_, failed);
    expect(alone, path_, " is not this store's alone", failed ? ": " + failed.message() : std::string());
}

KVQ_FUNC std::string private_folder::file(std::size_t number) const {
    return (std::filesystem::path(path_) / ("prefix-" + std::to_string(number) + ".safetensors")).string();
}

}  // namespace detail

KVQ_FUNC prefix_tiers::prefix_tiers(cache& of, const prefix_tier_options& options)
    : cache_(of), options_(options), memory_(of, with_hook(options.memory)) {
    std::error_code ignored;
    detail::expect(options.folder.empty() || std::filesystem::is_directory(options.folder, ignored),
                   options.folder, " is not a folder, so a prefix cache cannot put files there");
    detail::expect(!options.memory.evicted, "prefix_tiers has its own use for prefix_cache_options::evicted");
    if (!options.folder.empty()) folder_.make(options.folder);
}

KVQ_FUNC prefix_tiers::~prefix_tiers() {
    for (const file& f : files_) std::remove(f.path.c_str());
}

KVQ_FUNC bool prefix_tiers::is_better(const nearest& m, token_ids tokens) const {
    const int in_file = static_cast<int>(m.tokens);
    return in_file > memory_.lookup(tokens).tokens &&
           (m.tokens == tokens.size() || in_file >= options_.memory.min_prefix_tokens);
}

KVQ_FUNC prefix_tiers::lookup_result prefix_tiers::lookup(token_ids tokens) const {
    const std::lock_guard lock(mutex_);
    const nearest m = nearest_of(tokens, (std::numeric_limits<std::size_t>::max)());
    if (is_better(m, tokens)) return {m.match, static_cast<int>(m.tokens), prefix_tier::file};
    const auto [match, n] = memory_.lookup(tokens);
    return {match, n, is_hit(match) ? prefix_tier::memory : prefix_tier::none};
}

KVQ_FUNC bool prefix_tiers::refresh(token_ids tokens) {
    const std::lock_guard lock(mutex_);
    return memory_.refresh(tokens);
}

KVQ_FUNC prefix_tiers::fetch_result prefix_tiers::fetch(token_ids tokens) {
    const std::lock_guard lock(mutex_);
    std::size_t too_large =
        (std::numeric_limits<std::size_t>::max)();  // bytes of pages that memory had no room for
    while (true) {
        const nearest m = nearest_of(tokens, too_large);
        if (!is_better(m, tokens)) break;
        const int in_file = static_cast<int>(m.tokens);
        const position at = m.at;
        const prefix_match kind = m.match;
        const std::size_t pages = at->pages;
        files_.splice(files_.begin(), files_, at);
        std::optional<kvq::sequence> found;
        const attempted how = read(at, found);
        if (how == attempted::no_memory) too_large = pages;
        if (how != attempted::done) continue;
        if (found->tokens() > in_file) found->trim(in_file);
        return {kind, in_file, std::move(*found), prefix_tier::file};
    }
    auto [match, n, sequence] = memory_.fetch(tokens);
    return {match, n, std::move(sequence), is_hit(match) ? prefix_tier::memory : prefix_tier::none};
}

KVQ_FUNC store_outcome prefix_tiers::store(token_ids tokens, const kvq::sequence& sequence) {
    const std::lock_guard lock(mutex_);
    const store_outcome outcome = memory_.store(tokens, sequence);
    if (outcome != store_outcome::too_large) return outcome;
    kvq::sequence kept = sequence.fork();
    tokens = detail::entry_tokens(tokens, sequence);
    detail::make_entry(kept, static_cast<int>(tokens.size()));
    return write(tokens, kept) ? store_outcome::stored : store_outcome::too_large;
}

KVQ_FUNC std::size_t prefix_tiers::release(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    return memory_.release(bytes);
}

KVQ_FUNC prefix_tier_statistics prefix_tiers::statistics() const {
    const std::lock_guard lock(mutex_);
    return statistics_;
}

KVQ_FUNC prefix_tiers::nearest prefix_tiers::nearest_of(token_ids tokens, std::size_t bytes) const {
    nearest best;
    tree_.visit_closest(tokens, [&](const tree::node* node, std::size_t common) {
        if (common <= best.tokens) return false;
        const file& f = *node->value;
        if (const std::size_t held = f.pages < bytes ? f.reached(common) : 0; held > best.tokens)
            best = {held, node->value, match_of(node->tokens(), tokens, common)};
        return true;
    });
    return best;
}

KVQ_FUNC std::size_t prefix_tiers::file::reached(std::size_t n) const noexcept {
    if (n == node->tokens().size() || static_cast<int>(n) >= trim_limit) return n;
    const auto behind = std::upper_bound(stops.begin(), stops.end(), static_cast<int>(n));
    return behind == stops.begin() ? 0 : static_cast<std::size_t>(behind[-1]);
}

KVQ_FUNC prefix_cache_options prefix_tiers::with_hook(prefix_cache_options o) {
    o.evicted = [this](token_ids tokens, const kvq::sequence& s) { write(tokens, s); };
    return o;
}

template <class F>
prefix_tiers::attempted prefix_tiers::attempt(F&& f) {
#if KVQ_EXCEPTIONS
    try {
        f();
    } catch (const std::bad_alloc& e) {
        count_failure(e.what());
        return attempted::no_memory;
    } catch (const error& e) {
        count_failure(e.what());
        return attempted::failed;
    }
#else
    f();
#endif
    return attempted::done;
}

KVQ_FUNC void prefix_tiers::count_failure(const char* why) noexcept {
    ++statistics_.failed;
    if (!detail::has_memory([&] { statistics_.last_failure = why; })) statistics_.last_failure.clear();
}

KVQ_FUNC std::string prefix_tiers::model_of(token_ids tokens) const {
    detail::fingerprint_hash hash;
    for (const token_id t : tokens) hash.add(static_cast<std::uint32_t>(t));
    return options_.model + " (" + std::to_string(tokens.size()) + " tokens, " +
           detail::fingerprint_text(hash.value) + ")";
}

KVQ_FUNC bool prefix_tiers::write(token_ids tokens, const kvq::sequence& s) {
    if (options_.folder.empty()) return false;
    if (const auto m = tree_.find(tokens); m.exact) {
        files_.splice(files_.begin(), files_, m.exact->value);
        return true;
    }
    std::list<file> fresh;
    typename tree::node* node = nullptr;
    const attempted how = attempt([&] {
        file& f = fresh.emplace_back();
        f.path = folder_.file(number_++);
        save(s, f.path, {.model = model_of(tokens), .upper_only = options_.upper_only});
        std::error_code failed;
        f.bytes = static_cast<std::size_t>(std::filesystem::file_size(f.path, failed));
        detail::expect(!failed, "cannot see ", f.path, ": ", failed.message());
        f.trim_limit = cache_.state_layout() ? s.tokens() : s.trim_limit();
        const auto stop = [&](int n) {
            if (n < f.trim_limit && s.can_trim(n) && s.reach(n) == n) f.stops.push_back(n);
        };
        const int sinks = cache_.options().sinks;
        for (int n = 1; n <= sinks; ++n) stop(n);
        if (cache_.state_layout())
            for (const snapshot_mark& mark : s.state().snapshots())
                if (mark.tokens > sinks) stop(mark.tokens);
        f.pages = detail::page_counts::bytes_of(detail::page_counts::of(s));
        if (f.bytes <= options_.file_bytes) node = tree_.insert(tokens).first;
    });
    if (!node) {
        if (!fresh.empty()) std::remove(fresh.front().path.c_str());
        if (how == attempted::done) ++statistics_.dropped;
        return false;
    }
    // No step after this line can fail.
    fresh.front().node = node;
    node->value = fresh.begin();
    files_.splice(files_.begin(), fresh);
    ++statistics_.written;
    ++statistics_.files;
    statistics_.file_bytes += files_.front().bytes;
    while (auto* const shorter = cache_.trims_to_every_token() ? node->shorter() : nullptr)
        drop(shorter->value);
    while (statistics_.file_bytes > options_.file_bytes) drop(std::prev(files_.end()));
    return true;
}

KVQ_FUNC prefix_tiers::attempted prefix_tiers::read(position at, std::optional<kvq::sequence>& s) {
    const std::size_t budget = cache_.options().byte_budget, used = cache_.bytes_in_use();
    const std::size_t left = budget > used ? budget - used : 0;
    // Entries do not leave memory for a file that even then would not fit.
    if (left < at->pages && at->pages - left > memory_.bytes()) {
        count_failure("kvq: memory has no room for the pages of a file");
        return attempted::no_memory;
    }
    std::string path;
    std::vector<token_id> tokens;
    const attempted how = attempt([&] {
        path = at->path;
        tokens.assign(at->node->tokens().begin(), at->node->tokens().end());
        const std::size_t wanted = detail::larger(at->pages, at->bytes);
        if (left < wanted) memory_.release(wanted - left);
        s.emplace(restore(cache_, path, {.model = model_of(tokens)}));
        detail::expect(s->tokens() == static_cast<int>(tokens.size()), path, " holds ", s->tokens(),
                       " tokens, not ", tokens.size());
    });
    if (how != attempted::done) {
        s.reset();
        // release() may have dropped the file for another one.
        if (const auto again = tree_.find(tokens); how == attempted::failed && again.exact)
            drop(again.exact->value);
        return how;
    }
    ++statistics_.read;
    // The sequence is what was asked for, whether memory can keep it or not.
    (void)attempt([&] { memory_.store(tokens, *s); });
    return attempted::done;
}

KVQ_FUNC void prefix_tiers::drop(position f) {
    std::remove(f->path.c_str());
    ++statistics_.dropped;
    --statistics_.files;
    statistics_.file_bytes -= f->bytes;
    tree_.erase(f->node);
    files_.erase(f);
}

}}  // namespace kvq
