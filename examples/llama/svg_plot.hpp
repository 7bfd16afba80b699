// Line and point plots as SVG, for pages that stand alone. Axes are linear or logarithmic.
#pragma once

#include <string>
#include <vector>

namespace llama {

struct plot_series {
    std::string label;
    std::vector<double> x,
        y;  // points that are not finite, or not positive on a logarithmic axis, are left out
};

struct plot {
    std::string title, x_label, y_label;
    bool logarithmic_y = false;
    bool lines = true;  // false: one labelled point per series
    std::vector<plot_series> series;
};

// <svg>...</svg>; labels are escaped.
std::string as_svg(const plot& of);

// & < > " as HTML has them.
std::string escaped(const std::string& text);

}  // namespace llama
