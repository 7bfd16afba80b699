// A sequence page by page from one process to another: prefill here, decode there.
//
//   send_pages(sequence, layer, sink)         every page of one layer as messages, as soon as the layer is
//                                             prefilled
//   page_receiver receiver(cache);            in the other process
//   receiver.accept(parse_page(bytes));      in any order
//   auto sequence = receiver.finish(tokens);  after all messages
//
// The receiving cache has the sender's shape, window, sinks, recent and page_tokens, and lists the schemes of
// the pages, in any order; later pages are quantized to its own formats, unless the sequence was given others
// (requantize_request::new_pages). If both caches are alike, the two sequences stay alike in the future.
// After convert_pages() quantized pages become those of the formats to which the receiving cache quantizes,
// page by page, from their 16-bit copies where these came: what restore() does with convert.
#pragma once

#include <map>
#include <memory>
#include <unordered_map>

#include "../cache/sequence.hpp"
#include "page_wire.hpp"
#include "written_pages.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

/// The pages that are sent: of one layer, or of several sequences that share some.
class sent_pages {
public:
    void add(const sequence& s, int layer);
    const page_extents& extents() const noexcept;
    /// The number of a page, and whether it is a new one.
    std::pair<std::uint32_t, bool> number_of(const page& p);

private:
    page_extents extents_;
    std::unordered_map<const page*, std::uint32_t> numbers_;
};

/// send_pages() of a layer of a sequence that was added to `sent`, as all others were that may share pages
/// with it.
void send_pages(const sequence& s, int layer, const sink_view& write, sent_pages& sent);
void send_layer(const sequence& s, int layer, const sink_view& write);

}  // namespace detail

/// Writes the pages of one layer to a sink, a message each: by spans, 16-bit copies before their pages, first
/// K, then V. A page that several spans show is sent with the first one. A layer without tokens sends
/// nothing.
template <byte_sink Sink>
void send_pages(const sequence& s, int layer, Sink&& write) {
    detail::send_layer(s, layer, detail::held_sink<std::remove_reference_t<Sink>>{write});
}

/// What cache_options say of the pages of a cache.
struct page_layout {
    int sinks = 0, recent = 0, page_tokens = default_page_tokens;
};

/// Collects the pages of one sequence. Not for several threads at once.
class page_receiver {
public:
    explicit page_receiver(cache& of);

    /// Copies a page into the cache. Raises kvq::error if it does not fit the cache; nothing changes then.
    void accept(const page_message& m);

    /// Takes the state of a sequence of a cache with state, which read_recurrent_state() has read.
    void accept(recurrent_state state);

    /// The sequence, if its pages are complete and every layer has this many tokens (kvq::error otherwise).
    /// The receiver is then empty. Only this check detects that all pages of a layer are lost.
    [[nodiscard]] sequence finish(int tokens);
    /// The same; the messages give the length of each layer.
    [[nodiscard]] sequence finish();
    /// Later sequences may have pages of those that were finished: numbers of pages do not begin anew with
    /// each. For a state of several sequences (adapters/sequence_state.hpp).
    void keep_pages() noexcept;
    /// Pages of this and later sequences may change: finish() converts them to the formats of the cache, with
    /// the errors of cache/convert.hpp. Later pages get these formats too, not those of the sender.
    void convert_pages() noexcept;
    /// The same for a sender with other pages: its sinks, recent window and tokens of a page. Its pages wait
    /// in a cache of that layout; finish() dequantizes and appends their tokens, from 16-bit copies where
    /// these came, and needs memory for both. Raises kvq::error for a cache with state, and behind the first
    /// page; finish() does for layers that have freed tokens.
    void convert_pages(const page_layout& sender);

private:
    /// A page or a copy of a span.
    struct slot {
        bool came = false;
        std::uint32_t number = 0;
        page_ref page;  // null: came with another span
    };
    struct received {
        page_span span;  // without pages
        int layer_tokens;
        bool committed;
        int target;  // -1: that of the cache
        slot own, copy;
        format plan = {};  // of keys to come, where no page has it

        bool alike(const received& o) const noexcept {
            return span.tokens == o.span.tokens && span.skip == o.span.skip && span.room == o.span.room &&
                   span.sinks == o.span.sinks && span.shift == o.span.shift;
        }
    };
    /// The key is the position of the first token.
    using received_pages = std::map<int, received>;
    struct extent {
        int tokens = 0;
        int committed = 0;
    };

    void accept_as(const page_message& m, tensor tensor_of);

    detail::found_identity found(tensor role, const scheme_identity& id);

    using numbered_pages = std::map<std::uint32_t, page_ref>;

    std::string text_of(std::size_t list) const;
    /// The pages that came with a list, by number; kvq::error if one came twice.
    numbered_pages numbered(std::size_t list) const;
    page_ref page_of(const slot& s, std::size_t list, const numbered_pages& pages) const;

    /// The sequence of the pages that came, which stay.
    sequence built() const;
    void expect_tokens(int tokens) const;
    /// Ends a sequence.
    void forget();

    /// Checks that the pages form a sequence without gaps.
    extent check(std::size_t layer, std::size_t role) const;

    /// K and V have the same spans.
    void fill(detail::page_table& table, std::size_t layer) const;
    /// Tokens of a sequence in the sender's layout, appended again.
    sequence appended(sequence from) const;
    /// The committed pages of a filled table in the formats of the cache.
    void convert(detail::page_table& table, int layer, int committed) const;

    cache& cache_;
    std::vector<received_pages> received_;  // [layer][K, V]
    std::optional<recurrent_state> state_;
    std::vector<numbered_pages> known_;  // of sequences before, by list
    bool keeps_ = false, converts_ = false;
    std::unique_ptr<cache> staging_;  // of the sender's layout
    std::unique_ptr<page_receiver> staged_;
    bool says_all_ = true;         // which spans share a page
    detail::found_identity plan_;  // the last plan, and of which identity
    scheme_identity plan_of_;
};

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "page_transfer-inl.hpp"
#endif
