// A bar on stderr that redraws itself in place.
#pragma once

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
    progress_bar(int steps, bool shown) : steps_(steps), shown_(shown) { draw(); }
    progress_bar(const progress_bar&) = delete;
    progress_bar& operator=(const progress_bar&) = delete;

    ~progress_bar() {
        if (shown_) {
            std::fputs("\r\033[K", stderr);  // removes the bar
        }
    }

    // May be called from any thread.
    void advance() {
        const std::lock_guard lock(mutex_);
        ++done_;
        draw();
    }

private:
    void draw() const {
        if (!shown_) {
            return;
        }
        constexpr int width = 40;
        const int filled = steps_ > 0 ? done_ * width / steps_ : width;
        const std::string bar = std::string(static_cast<std::size_t>(filled), '#') +
                                std::string(static_cast<std::size_t>(width - filled), '.');
        const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start_;
        const double left = done_ > 0 ? elapsed.count() * (steps_ - done_) / done_ : 0.0;
        std::fprintf(stderr, "\r[%s] %d/%d, %.0f s left \033[K", bar.c_str(), done_, steps_, left);
        std::fflush(stderr);
    }

    int steps_;
    int done_ = 0;
    bool shown_;
    std::mutex mutex_;
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace llama
