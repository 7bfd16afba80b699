// Memory of a device for the pages of recurrent state: a page that host code cannot read has an owner that
// zeroes and copies it, and quantizes snapshots.
//
// Contract: there are pages when allocate() is called (recurrent_state::missing_pages(), unsettled()). What
// is started here ends before the engine's next work on the state, which the owner sees to. Errors are its
// own.
#pragma once

#include "../page/page.hpp"
#include "state_layout.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

class state_device {
public:
    /// A page whose page::format is the form.
    virtual page_ref allocate(state_form form) noexcept = 0;
    virtual void zero(const page& to) noexcept = 0;
    /// To the form of `to`.
    virtual void copy(const page& from, const page& to) noexcept = 0;

protected:
    state_device() = default;
    ~state_device() = default;
};

}}}  // namespace kvq::detail
