// Definitions of sequence_state.hpp.
#pragma once

#include <cstring>
#include <limits>

#include "../core/error.hpp"
#include "../io/page_transfer.hpp"
#include "../io/state_wire.hpp"
#include "sequence_state.hpp"

namespace kvq { inline namespace KVQ_COMMON {

struct sequence_table::access {
    /// Version 1 has messages of version 3, in which sequences share no pages, and is the same otherwise.
    struct header {
        char magic[8] = "kvqseqs";
        std::uint32_t version = 4, entries = 0;
    };

    static void write(sequence_table& table, const detail::sink_view& sink, int id,
                      const state_options& options) {
        table.settle();
        struct saved {
            shared_entry of;
            std::vector<std::int32_t> ids;
        };
        std::vector<saved> all;
        if (id >= 0) {
            if (const shared_entry& e = table.at(id)) all.push_back({e, {id}});
        } else {
            std::unordered_map<shared_entry, std::size_t> places;
            for (int i = 0; i < table.ids(); ++i) {
                const shared_entry& e = table.at(i);
                if (!e) continue;
                const auto [place, fresh] = places.try_emplace(e, all.size());
                if (fresh) all.push_back({e, {}});
                all[place->second].ids.push_back(i);
            }
        }
        header h;
        h.entries = static_cast<std::uint32_t>(all.size());
        put(sink, &h, sizeof h);
        detail::sent_pages pages;
        for (const saved& s : all)
            for (int layer = 0; layer < table.cache_->layer_count(); ++layer) pages.add(s.of->tokens, layer);
        for (const saved& s : all) {
            crc32c sum;
            const auto summed = [&](const void* data, std::size_t bytes) {
                sum.add(data, bytes);
                put(sink, data, bytes);
            };
            const std::uint32_t sizes[2] = {static_cast<std::uint32_t>(s.ids.size()),
                                            static_cast<std::uint32_t>(s.of->size())};
            summed(sizes, sizeof sizes);
            summed(s.ids.data(), s.ids.size() * sizeof(std::int32_t));
            summed(s.of->positions.data(), s.of->positions.size() * sizeof(std::int32_t));
            const std::uint32_t checksum = sum.value();
            put(sink, &checksum, sizeof checksum);
            sequence shown = s.of->tokens.fork();
            if (!options.copies) shown.drop_copies();
            int sent = 0;  // a message comes in three
            const auto send = [&](const void* data, std::size_t bytes) {
                if (sent++ % 3 == 0) put(sink, &page_follows, sizeof page_follows);
                put(sink, data, bytes);
            };
            for (int layer = 0; layer < table.cache_->layer_count(); ++layer)
                detail::send_pages(shown, layer, detail::held_sink<decltype(send)>{send}, pages);
            if (table.cache_->state_layout()) {
                put(sink, &state_follows, sizeof state_follows);
                detail::write_recurrent_state_to(sink, shown.state());
            }
            put(sink, &no_page_follows, sizeof no_page_follows);
        }
    }

    static void read(sequence_table& table, const detail::source_view& read_from, int id) {
        table.settle();
        if (id >= 0) (void)table.at(id);
        detail::exact_source source(read_from);
        header h, known;
        source.read(&h, sizeof h, "the header of a state");
        detail::expect(std::memcmp(h.magic, known.magic, sizeof h.magic) == 0,
                       "this is no state of sequences");
        detail::expect(h.version == known.version || h.version == 1, "the state has version ", h.version,
                       ", this library reads 1 and ", known.version);
        detail::expect(h.entries <= (id < 0 ? static_cast<std::uint32_t>(table.ids()) : 1u), "the state has ",
                       h.entries, " sequences, for ", id < 0 ? table.ids() : 1, " of the table");
        std::vector<shared_entry> fresh(table.held_.size());
        page_receiver receiver(*table.cache_);
        receiver.keep_pages();
        for (std::uint32_t i = 0; i < h.entries; ++i) {
            const auto [made, ids] = read_entry(table, source, receiver);
            if (id >= 0) {
                fresh[static_cast<std::size_t>(id)] = made;
                continue;
            }
            for (const std::int32_t of : ids) {
                detail::expect(of >= 0 && of < table.ids() && !fresh[static_cast<std::size_t>(of)],
                               "the state has sequence ", of, ", which is not among the ", table.ids(),
                               " of the table, or has it twice");
                fresh[static_cast<std::size_t>(of)] = made;
            }
        }
        if (id < 0)
            table.held_.swap(fresh);
        else
            table.held_[static_cast<std::size_t>(id)] = fresh[static_cast<std::size_t>(id)];
    }

private:
    static constexpr std::uint32_t page_follows = 1, no_page_follows = 0, state_follows = 2;

    static void put(const detail::sink_view& sink, const void* data, std::size_t bytes) {
        if (bytes > 0) sink(data, bytes);
    }
    static std::pair<shared_entry, std::vector<std::int32_t>> read_entry(sequence_table& table,
                                                                         detail::exact_source& source,
                                                                         page_receiver& receiver) {
        source.restart();
        std::uint32_t sizes[2], checksum = 0, follows = 0;
        source.read(sizes, sizeof sizes, "the sizes of a sequence");
        detail::expect(
            sizes[0] >= 1 && sizes[0] <= static_cast<std::uint32_t>(table.ids()) && sizes[1] >= 1 &&
                sizes[1] <= static_cast<std::uint32_t>((std::numeric_limits<std::int32_t>::max)()),
            "a sequence of ", sizes[1], " tokens with ", sizes[0], " ids cannot be read into ", table.ids());
        std::vector<std::int32_t> ids, positions;
        source.append(ids, sizes[0], "the ids of a sequence");
        source.append(positions, sizes[1], "the positions of a sequence");
        const std::uint32_t sum = source.checksum();
        source.read(&checksum, sizeof checksum, "a checksum");
        detail::expect(checksum == sum, "the positions of a sequence are damaged");
        for (std::size_t i = 0; i < positions.size(); ++i)
            detail::expect(positions[i] >= 0 && (i == 0 || positions[i - 1] < positions[i]), "position ",
                           positions[i], " of token ", i, " does not ascend");
        std::vector<std::byte> storage;
        const auto rest = [&](void* to, std::size_t bytes) {
            source.read(to, bytes, "a page");
            return bytes;
        };
        for (source.read(&follows, sizeof follows, "a page"); follows != no_page_follows;
             source.read(&follows, sizeof follows, "a page")) {
            if (follows == state_follows && table.cache_->state_layout()) {
                receiver.accept(read_recurrent_state(rest, *table.cache_->state_layout(),
                                                     table.cache_->pool(),
                                                     table.cache_->options().snapshots));
                continue;
            }
            detail::expect(follows == page_follows, "the pages of a sequence are damaged: ", follows,
                           " stands where a page begins");
            receiver.accept(read_page(rest, storage));
        }
        auto made = std::make_shared<entry>(receiver.finish(static_cast<int>(sizes[1])));
        if (table.cache_->state_layout())
            detail::expect(made->tokens.state().tokens() == made->tokens.tokens(), "a sequence of ", sizes[1],
                           " tokens has a state of ", made->tokens.state().tokens());
        made->positions = std::move(positions);
        return {std::move(made), std::move(ids)};
    }
};

namespace detail {

KVQ_FUNC void write_state_to(sequence_table& table, const sink_view& sink, int id,
                             const state_options& options) {
    sequence_table::access::write(table, sink, id, options);
}
KVQ_FUNC void read_state_from(sequence_table& table, const source_view& source, int id) {
    sequence_table::access::read(table, source, id);
}

}  // namespace detail

KVQ_FUNC std::size_t state_bytes(sequence_table& table, int id, const state_options& options) {
    std::size_t sum = 0;
    write_state(
        table, [&](const void*, std::size_t bytes) { sum += bytes; }, id, options);
    return sum;
}

}}  // namespace kvq
