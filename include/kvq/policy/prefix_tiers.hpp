// A prefix cache over two tiers: memory first, files behind it. What memory evicts goes to a file and comes back when it is asked for.
//
//   kvq::prefix_tiers store(cache, {.memory = {.byte_limit = std::size_t{8} << 30}, .folder = "/var/tmp", .file_bytes = ...});
//   auto [match, tokens, sequence, tier] = store.fetch(prompt);   // a sequence that holds the first `tokens` of the prompt
//   store.store(all_tokens, sequence);                            // a request has ended, or waits: its memory may be taken
//
// fetch() takes the tier with more of the tokens. An entry from a file is stored in memory again, and its file stays until the budget of the
// files needs room, so that an entry that is evicted again is not written again. Each tier drops its least recently used entries.
// Pages come back byte for byte (io/save.hpp). A file that is gone, cut, damaged or of other tokens is dropped and counted, and the next best
// entry is taken.
// Every store makes a folder of its own, with a name that cannot be foretold and for its user alone, so that any number of stores and processes
// may use one place. It goes with the store; that of a process that was killed stays, and may be removed once the process is gone.
// Needs nlohmann-json. Bytes on disk: at most file_bytes and one entry while it is written.
// Thread safety: all members may be called from any thread; they run one after the other, reading and writing of files included.
#pragma once

#include <algorithm>
#include <filesystem>
#include <random>
#include <string>
#include <system_error>

#include "../io/file.hpp"
#include "prefix_cache.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

struct prefix_tier_options {
    prefix_cache_options memory = {};  ///< `evicted` is the store's own
    std::string folder =
        ".";  ///< exists; the store makes `kvq-prefixes-<random>` there, with files `prefix-7.safetensors`
    std::size_t file_bytes = (std::numeric_limits<std::size_t>::max)();  ///< for all files
    std::string model = {};                                              ///< as in save_options
};

enum class prefix_tier : unsigned char { none, memory, file };

struct prefix_tier_statistics {
    std::size_t files = 0, file_bytes = 0;  ///< now
    std::size_t written = 0, read = 0;      ///< files
    std::size_t dropped = 0;  ///< files, for the budget or because a longer one holds their tokens
    std::size_t failed =
        0;  ///< times that a file could not be written or read, or that memory had no room for it
    std::string last_failure = {};  ///< its error
};

namespace detail {

/// A new folder with permissions for its user alone. It is removed with the object, if it is empty then.
class private_folder {
public:
    private_folder() = default;
    private_folder(const private_folder&) = delete;
    private_folder& operator=(const private_folder&) = delete;
    ~private_folder() {
        std::error_code ignored;
        if (!path_.empty()) std::filesystem::remove(path_, ignored);
    }

    void make(const std::filesystem::path& in) {
        std::random_device random;
        std::error_code failed;
        for (int tries = 0; tries < 100 && path_.empty() && !failed; ++tries) {
            const std::uint64_t number = std::uint64_t{random()} << 32 | random();
            const auto path = in / ("kvq-prefixes-" + fingerprint_text(number));
            // False if anything, also a link, has this name.
            if (std::filesystem::create_directory(path, failed)) path_ = path;
        }
        expect(!path_.empty(), "cannot make a folder in ", in.string(), ": ", failed.message());
        std::filesystem::permissions(path_, std::filesystem::perms::owner_all, failed);
        // The umask has set other permissions until here: no file may be there yet.
        const bool alone = !failed && std::filesystem::is_empty(path_, failed);
        expect(alone, path_.string(), " is not this store's alone",
               failed ? ": " + failed.message() : std::string());
    }
    std::string file(std::size_t number) const {
        return (path_ / ("prefix-" + std::to_string(number) + ".safetensors")).string();
    }

private:
    std::filesystem::path path_;
};

}  // namespace detail

class prefix_tiers {
public:
    struct fetch_result {
        prefix_match match;
        int tokens;
        kvq::sequence sequence;  ///< holds exactly `tokens` tokens; empty on a miss
        prefix_tier tier;
    };

    /// The cache outlives the store. Raises kvq::error when an option is out of range, or the folder does not exist or cannot be written.
    explicit prefix_tiers(cache& of, const prefix_tier_options& options)
        : cache_(of), options_(options), memory_(of, with_hook(options.memory)) {
        std::error_code ignored;
        detail::expect(std::filesystem::is_directory(options.folder, ignored), options.folder,
                       " is not a folder, so a prefix cache cannot put files there");
        detail::expect(!options.memory.evicted,
                       "prefix_tiers has its own use for prefix_cache_options::evicted");
        folder_.make(options.folder);
    }
    prefix_tiers(const prefix_tiers&) = delete;
    prefix_tiers& operator=(const prefix_tiers&) = delete;
    /// Removes the files and their folder.
    ~prefix_tiers() {
        for (const file& f : files_) std::remove(f.path.c_str());
    }

    /// As prefix_cache::fetch, over both tiers. Reading a file takes memory for its pages: the memory tier makes room for it in
    /// cache_options::byte_budget first. Without enough memory the file stays, and the next best entry with fewer bytes of pages is taken.
    fetch_result fetch(token_ids tokens) {
        const std::lock_guard lock(mutex_);
        std::optional<std::size_t> too_large;  // bytes of the pages that memory had no room for
        while (true) {
            const int in_memory = memory_.lookup(tokens).tokens;
            const nearest m = too_large ? nearest_smaller(tokens, *too_large) : nearest_of(tokens);
            const int in_file = static_cast<int>(m.tokens);
            if (in_file <= in_memory ||
                (m.tokens < tokens.size() && in_file < options_.memory.min_prefix_tokens))
                break;
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

    /// As prefix_cache::store. Entries that this evicts from memory are written to files before it returns. An entry that is larger than the
    /// memory tier goes to a file at once.
    store_outcome store(token_ids tokens, const kvq::sequence& sequence) {
        const std::lock_guard lock(mutex_);
        const store_outcome outcome = memory_.store(tokens, sequence);
        if (outcome != store_outcome::too_large) return outcome;
        kvq::sequence kept = sequence.fork();
        kept.trim(static_cast<int>(tokens.size()));
        return write(tokens, kept) ? store_outcome::stored : store_outcome::too_large;
    }

    /// Moves entries from memory to files until memory holds `bytes` less; returns by how much it fell.
    std::size_t release(std::size_t bytes) {
        const std::lock_guard lock(mutex_);
        return memory_.release(bytes);
    }

    const prefix_cache& memory() const noexcept { return memory_; }
    [[nodiscard]] prefix_tier_statistics statistics() const {
        const std::lock_guard lock(mutex_);
        return statistics_;
    }

private:
    struct file;
    using position = typename std::list<file>::iterator;
    using tree = radix_tree<position>;
    struct file {
        std::string path;
        std::size_t bytes = 0;
        std::size_t pages = 0;  // bytes of its pages in memory
        typename tree::node* node = nullptr;
    };

    /// A file with the most of some tokens. tokens 0: there is none.
    struct nearest {
        std::size_t tokens = 0;
        position at = {};
        prefix_match match = prefix_match::miss;
    };
    nearest nearest_of(token_ids tokens) const {
        const auto m = tree_.find(tokens);
        if (m.tokens == 0) return {};
        const prefix_match match = m.exact                     ? prefix_match::exact
                                   : m.tokens == tokens.size() ? prefix_match::supersequence
                                   : m.prefix && m.prefix->tokens().size() == m.tokens ? prefix_match::prefix
                                                                                       : prefix_match::lcp;
        return {m.tokens, (m.exact ? m.exact : m.extension ? m.extension : m.prefix)->value, match};
    }
    /// The same, of the files whose pages have fewer bytes. O(files * tokens)
    nearest nearest_smaller(token_ids tokens, std::size_t bytes) {
        nearest best;
        for (position f = files_.begin(); f != files_.end(); ++f) {
            const token_ids own = f->node->tokens();
            const auto common = static_cast<std::size_t>(
                std::mismatch(own.begin(), own.end(), tokens.begin(), tokens.end()).first - own.begin());
            if (f->pages >= bytes || common <= best.tokens) continue;
            const prefix_match match = common < own.size() && common < tokens.size() ? prefix_match::lcp
                                       : common < own.size()    ? prefix_match::supersequence
                                       : common < tokens.size() ? prefix_match::prefix
                                                                : prefix_match::exact;
            best = {common, f, match};
        }
        return best;
    }

    prefix_cache_options with_hook(prefix_cache_options o) {
        o.evicted = [this](token_ids tokens, const kvq::sequence& s) { write(tokens, s); };
        return o;
    }

    enum class attempted : unsigned char { done, failed, no_memory };

    /// Runs f. An error is counted, and goes no further: what a tier cannot do is a miss.
    template <class F>
    attempted attempt(F&& f) {
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
    void count_failure(const char* why) noexcept {
        ++statistics_.failed;
        if (!detail::has_memory([&] { statistics_.last_failure = why; })) statistics_.last_failure.clear();
    }

    /// The model of a file: that of the options, and its tokens, so that a file in the place of another one is not taken for it.
    std::string model_of(token_ids tokens) const {
        detail::fingerprint_hash hash;
        for (const token_id t : tokens) hash.add(static_cast<std::uint32_t>(t));
        return options_.model + " (" + std::to_string(tokens.size()) + " tokens, " +
               detail::fingerprint_text(hash.value) + ")";
    }

    bool write(token_ids tokens, const kvq::sequence& s) {
        if (const auto m = tree_.find(tokens); m.exact) {
            files_.splice(files_.begin(), files_, m.exact->value);
            return true;
        }
        std::list<file> fresh;
        typename tree::node* node = nullptr;
        const attempted how = attempt([&] {
            file& f = fresh.emplace_back();
            f.path = folder_.file(number_++);
            save(s, f.path, {.model = model_of(tokens)});
            std::error_code failed;
            f.bytes = static_cast<std::size_t>(std::filesystem::file_size(f.path, failed));
            detail::expect(!failed, "cannot see ", f.path, ": ", failed.message());
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
        while (auto* const shorter = node->shorter()) drop(shorter->value);
        while (statistics_.file_bytes > options_.file_bytes) drop(std::prev(files_.end()));
        return true;
    }

    /// The sequence of a file, also stored in memory if that has room. A file that cannot be read is dropped, one that memory has no
    /// room for is not.
    attempted read(position at, std::optional<kvq::sequence>& s) {
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

    void drop(position f) {
        std::remove(f->path.c_str());
        ++statistics_.dropped;
        --statistics_.files;
        statistics_.file_bytes -= f->bytes;
        tree_.erase(f->node);
        files_.erase(f);
    }

    cache& cache_;
    prefix_tier_options options_;
    mutable std::mutex mutex_;
    detail::private_folder folder_;
    std::list<file> files_;  // most recently used first
    tree tree_;
    std::size_t number_ = 0;
    prefix_tier_statistics statistics_;
    prefix_cache memory_;  // last: its hook uses the others
};

}}  // namespace kvq
