// A bar on stderr that redraws itself in place, and the time that is left.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <string>

#if defined(_WIN32)
#include <io.h>
#else
#include <unistd.h>
#endif

namespace llama {

inline bool stderr_is_terminal() {
#if defined(_WIN32)
    return _isatty(_fileno(stderr)) != 0;
#else
    return isatty(STDERR_FILENO) != 0;
#endif
}

class progress_bar {
public:
    // work: of all steps together, in any unit.
    progress_bar(double work, bool shown) : work_(work), shown_(shown) { draw(); }
    progress_bar(const progress_bar&) = delete;
    progress_bar& operator=(const progress_bar&) = delete;

    ~progress_bar() { hide(); }

    // May be called from any thread.
    void advance(double work = 1.0) {
        const std::lock_guard lock(mutex_);
        done_ += work;
        if (const double now = elapsed(); now - drawn_ >= 0.1 || done_ >= work_) {
            drawn_ = now;
            draw();
        }
    }

    // Work that was done before: it counts, but not for the time that is left.
    void skip(double work) {
        const std::lock_guard lock(mutex_);
        done_ += work;
        skipped_ += work;
    }

    // Removes the bar until it is drawn again: for lines on stderr.
    void hide() const {
        if (shown_) {
            std::fputs("\r\033[K", stderr);
        }
    }

private:
    double elapsed() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    }

    void draw() const {
        if (!shown_) {
            return;
        }
        constexpr int width = 40;
        const double share = work_ > 0.0 ? std::min(1.0, done_ / work_) : 1.0;
        const int filled = static_cast<int>(share * width);
        const std::string bar = std::string(static_cast<std::size_t>(filled), '#') +
                                std::string(static_cast<std::size_t>(width - filled), '.');
        const double now = done_ - skipped_;
        const double left = now > 0.0 ? elapsed() * std::max(0.0, work_ - done_) / now : 0.0;
        std::fprintf(stderr, "\r[%s] %.0f %%, %.0f s left \033[K", bar.c_str(), 100.0 * share, left);
        std::fflush(stderr);
    }

    double work_, done_ = 0.0, skipped_ = 0.0, drawn_ = 0.0;
    bool shown_;
    std::mutex mutex_;
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace llama
