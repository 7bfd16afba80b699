// The tile state of a processor that multiplies tiles (AMX), open while a task runs.
//
// Contract: all formats of a cache that have tiles have one backend, so one session serves them.
#pragma once

#include "../format/format_table.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

/// Opens the tile state of the backend that has one, and closes it at the end.
class tile_sessions {
public:
    tile_sessions(const format_table& keys, const format_table& values, int rows) {
        for (const format_table* table : {&keys, &values})
            for (int i = 0; i < table->size(); ++i) {
                const backend_functions* const backend = (*table)[i].functions().backend;
                if (backend->open_tiles == nullptr || (open_ && same_tiles(*open_, *backend))) continue;
                open_ = backend;  // the cache has no other tiles (check_backends)
                backend->open_tiles(rows, state_);
            }
    }
    ~tile_sessions() {
        if (open_) open_->close_tiles(state_);
    }
    tile_sessions(const tile_sessions&) = delete;
    tile_sessions& operator=(const tile_sessions&) = delete;

private:
    const backend_functions* open_ = nullptr;
    alignas(64) std::byte state_[backend_functions::tile_state_bytes];
};

}}}  // namespace kvq::detail
