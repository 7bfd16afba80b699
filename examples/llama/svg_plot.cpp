#include "svg_plot.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>

namespace llama {
namespace {

constexpr double width = 760, height = 360, left = 70, right = 190, top = 34, bottom = 46;
constexpr const char* colours[] = {"#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df",
                                   "#bf3989", "#0a7ea4", "#57606a", "#bc4c00", "#116329"};

std::string number_text(const char* format, double value) {
    char text[64];
    std::snprintf(text, sizeof text, format, value);
    return text;
}

struct axis {
    double low = 0.0, high = 1.0, from = 0.0, to = 1.0;
    bool logarithmic = false;

    bool holds(double x) const { return std::isfinite(x) && (!logarithmic || x > 0.0); }
    double at(double x) const {
        const double place =
            logarithmic ? std::log10(x / low) / std::log10(high / low) : (x - low) / (high - low);
        return from + place * (to - from);
    }
    std::vector<double> ticks() const {
        std::vector<double> all;
        if (logarithmic) {
            for (double tick = std::pow(10.0, std::ceil(std::log10(low) - 1e-9)); tick <= high * (1.0 + 1e-9);
                 tick *= 10.0) {
                all.push_back(tick);
            }
            return all;
        }
        const double rough = (high - low) / 6.0, power = std::pow(10.0, std::floor(std::log10(rough)));
        const double step = rough / power < 1.5   ? power
                            : rough / power < 3.5 ? 2.0 * power
                            : rough / power < 7.5 ? 5.0 * power
                                                  : 10.0 * power;
        for (double tick = std::ceil(low / step - 1e-9) * step; tick <= high + 1e-9 * step; tick += step) {
            all.push_back(std::abs(tick) < 1e-12 * step ? 0.0 : tick);
        }
        return all;
    }
};

axis axis_of(const plot& of, bool is_x) {
    axis a;
    a.logarithmic = !is_x && of.logarithmic_y;
    bool any = false;
    for (const plot_series& series : of.series) {
        for (const double value : is_x ? series.x : series.y) {
            if (a.holds(value)) {
                a.low = any ? std::min(a.low, value) : value;
                a.high = any ? std::max(a.high, value) : value;
                any = true;
            }
        }
    }
    if (!any) {
        a.low = a.logarithmic ? 0.1 : 0.0;
        a.high = 1.0;
    }
    if (a.logarithmic) {
        a.low = std::pow(10.0, std::floor(std::log10(a.low)));
        a.high = std::max(10.0 * a.low, std::pow(10.0, std::ceil(std::log10(a.high))));
    } else {
        const double margin =
            a.high > a.low ? 0.05 * (a.high - a.low) : std::max(0.5, 0.5 * std::abs(a.high));
        a.low -= margin;
        a.high += margin;
    }
    a.from = is_x ? left : height - bottom;
    a.to = is_x ? width - right : top;
    return a;
}

std::string text_at(double x, double y, const std::string& text, const char* attributes) {
    return "<text x=\"" + number_text("%.1f", x) + "\" y=\"" + number_text("%.1f", y) + "\" " + attributes +
           ">" + escaped(text) + "</text>\n";
}

}  // namespace

std::string escaped(const std::string& text) {
    std::string out;
    for (const char c : text) {
        switch (c) {
            case '&':
                out += "&amp;";
                break;
            case '<':
                out += "&lt;";
                break;
            case '>':
                out += "&gt;";
                break;
            case '"':
                out += "&quot;";
                break;
            default:
                out += c;
        }
    }
    return out;
}

std::string as_svg(const plot& of) {
    const axis x = axis_of(of, true), y = axis_of(of, false);
    std::string svg =
        "<svg viewBox=\"0 0 760 360\" role=\"img\" aria-label=\"" + escaped(of.title) +
        "\" xmlns=\"http://www.w3.org/2000/svg\" font-family=\"sans-serif\" font-size=\"12\">\n";
    svg += text_at(left, 20, of.title, "font-size=\"14\" font-weight=\"bold\" fill=\"currentColor\"");
    for (const double tick : y.ticks()) {
        const std::string at = number_text("%.1f", y.at(tick));
        svg += "<line x1=\"70\" x2=\"570\" y1=\"" + at + "\" y2=\"" + at + "\" stroke=\"#8884\"/>\n";
        svg += text_at(left - 8, y.at(tick) + 4, number_text(y.logarithmic ? "%.0e" : "%.3g", tick),
                       "text-anchor=\"end\" fill=\"currentColor\"");
    }
    for (const double tick : x.ticks()) {
        svg += text_at(x.at(tick), height - bottom + 18, number_text("%.4g", tick),
                       "text-anchor=\"middle\" fill=\"currentColor\"");
    }
    svg += text_at((left + width - right) / 2, height - 8, of.x_label,
                   "text-anchor=\"middle\" fill=\"currentColor\"");
    svg += "<text transform=\"translate(16 " + number_text("%.1f", (top + height - bottom) / 2) +
           ") rotate(-90)\" text-anchor=\"middle\" fill=\"currentColor\">" + escaped(of.y_label) +
           "</text>\n";
    for (std::size_t i = 0; i < of.series.size(); ++i) {
        const plot_series& series = of.series[i];
        const std::string colour = colours[i % std::size(colours)];
        std::string points, marks;
        for (std::size_t p = 0; p < std::min(series.x.size(), series.y.size()); ++p) {
            if (!x.holds(series.x[p]) || !y.holds(series.y[p])) {
                continue;
            }
            const std::string at_x = number_text("%.1f", x.at(series.x[p])),
                              at_y = number_text("%.1f", y.at(series.y[p]));
            points += at_x + "," + at_y + " ";
            marks += "<circle cx=\"" + at_x + "\" cy=\"" + at_y + "\" r=\"" + (of.lines ? "2" : "4") +
                     "\" fill=\"" + colour + "\"><title>" + escaped(series.label) + ": " +
                     number_text("%.4g", series.x[p]) + ", " + number_text("%.3g", series.y[p]) +
                     "</title></circle>\n";
        }
        if (of.lines) {
            svg += "<polyline points=\"" + points + "\" fill=\"none\" stroke=\"" + colour +
                   "\" stroke-width=\"1.5\"/>\n";
        }
        svg += marks;
        const double line = top + 8 + 18 * static_cast<double>(i);
        svg += "<rect x=\"582\" y=\"" + number_text("%.1f", line - 9) +
               "\" width=\"10\" height=\"10\" fill=\"" + colour + "\"/>\n";
        svg += text_at(598, line, series.label, "fill=\"currentColor\"");
    }
    return svg + "</svg>\n";
}

}  // namespace llama
