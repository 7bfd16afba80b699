// A prefix cache over two tiers: memory first, files behind it. What memory evicts goes to a file and comes
// back when it is asked for.
//
//   kvq::prefix_tiers store(cache, {.memory = {.byte_limit = std::size_t{8} << 30},
//                                   .folder = "/var/tmp", .file_bytes = ...});
//   auto [match, tokens, sequence, tier] = store.fetch(prompt);   // a sequence that holds the first `tokens`
//                                                                 // of the prompt
//   store.store(all_tokens, sequence);                            // a request has ended, or waits: its
//                                                                 // memory may be taken
//
// fetch() takes the tier with more of the tokens. An entry from a file is stored in memory again, and its
// file stays until the budget of the files needs room, so that an entry that is evicted again is not written
// again. Each tier drops its least recently used entries. Pages come back byte for byte (io/save.hpp). A file
// that is gone, cut, damaged or of other tokens is dropped and counted, and the next best entry is taken.
// Every store makes a folder of its own, with a name that cannot be foretold and for its user alone, so that
// any number of stores and processes may use one place. It goes with the store; that of a process that was
// killed stays, and may be removed once the process is gone. Needs nlohmann-json. Bytes on disk: at most
// file_bytes and one entry while it is written.
// Thread safety: all members may be called from any thread; they run one after the other, reading and writing
// of files included.
#pragma once

#include <string>

#include "prefix_cache.hpp"

namespace kvq { inline namespace KVQ_COMMON {

struct prefix_tier_options {
    prefix_cache_options memory = {};  ///< `evicted` is the store's own
    /// Exists; the store makes `kvq-prefixes-<random>` there, with files `prefix-7.safetensors`. Empty: there
    /// are no files.
    std::string folder = ".";
    std::size_t file_bytes = (std::numeric_limits<std::size_t>::max)();  ///< for all files
    std::string model = {};                                              ///< as in save_options
    bool upper_only = false;                                             ///< the same
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
    ~private_folder();

    void make(const std::string& in);
    std::string file(std::size_t number) const;

private:
    std::string path_;
};

}  // namespace detail

class prefix_tiers {
public:
    using options_type = prefix_tier_options;
    struct lookup_result {
        prefix_match match = prefix_match::miss;
        int tokens = 0;
        prefix_tier tier = prefix_tier::none;
    };
    struct fetch_result {
        prefix_match match;
        int tokens;
        kvq::sequence sequence;  ///< holds exactly `tokens` tokens; empty on a miss
        prefix_tier tier;
    };

    /// The cache outlives the store. Raises kvq::error when an option is out of range, or the folder does not
    /// exist or cannot be written.
    explicit prefix_tiers(cache& of, const prefix_tier_options& options);
    prefix_tiers(const prefix_tiers&) = delete;
    prefix_tiers& operator=(const prefix_tiers&) = delete;
    /// Removes the files and their folder.
    ~prefix_tiers();

    /// The result that fetch would have if the file can be read. Changes no order of use, reads no file.
    [[nodiscard]] lookup_result lookup(token_ids tokens) const;

    /// As prefix_cache::fetch, over both tiers. Reading a file takes memory for its pages: the memory tier
    /// makes room for it in cache_options::byte_budget first. Without enough memory the file stays, and the
    /// next best entry with fewer bytes of pages is taken.
    fetch_result fetch(token_ids tokens);

    /// As prefix_cache::store. Entries that this evicts from memory are written to files before it returns.
    /// An entry that is larger than the memory tier goes to a file at once.
    store_outcome store(token_ids tokens, const kvq::sequence& sequence);

    /// As prefix_cache::refresh, of entries in memory.
    bool refresh(token_ids tokens);

    /// Moves entries from memory to files until memory holds `bytes` less; returns by how much it fell.
    std::size_t release(std::size_t bytes);

    const prefix_cache& memory() const noexcept { return memory_; }
    [[nodiscard]] prefix_tier_statistics statistics() const;

private:
    struct file;
    using position = typename std::list<file>::iterator;
    using tree = radix_tree<position>;
    struct file {
        std::string path;
        std::size_t bytes = 0;
        int trim_limit = 0;           // its sequence can be trimmed to every token from here on,
        std::vector<int> stops = {};  // and to these before it
        std::size_t pages = 0;        // bytes of its pages in memory
        typename tree::node* node = nullptr;

        /// Tokens of its sequence after a trim to n; 0: it cannot be trimmed.
        std::size_t reached(std::size_t n) const noexcept;
    };

    /// A file with the most of some tokens. tokens 0: there is none.
    struct nearest {
        std::size_t tokens = 0;
        position at = {};
        prefix_match match = prefix_match::miss;
    };
    /// Of the files whose pages have fewer bytes.
    nearest nearest_of(token_ids tokens, std::size_t bytes) const;
    /// Has a file more of the tokens than memory, and enough?
    bool is_better(const nearest& m, token_ids tokens) const;

    prefix_cache_options with_hook(prefix_cache_options o);

    enum class attempted : unsigned char { done, failed, no_memory };

    /// Runs f. An error is counted, and goes no further: what a tier cannot do is a miss.
    template <class F>
    attempted attempt(F&& f);
    void count_failure(const char* why) noexcept;

    /// The model of a file: that of the options, and its tokens, so that a file in the place of another one
    /// is not taken for it.
    std::string model_of(token_ids tokens) const;

    bool write(token_ids tokens, const kvq::sequence& s);

    /// The sequence of a file, also stored in memory if that has room. A file that cannot be read is dropped,
    /// one that memory has no room for is not.
    attempted read(position at, std::optional<kvq::sequence>& s);

    void drop(position f);

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

#if !defined(KVQ_COMPILED)
#include "prefix_tiers-inl.hpp"
#endif
