// Each panel computes its axes from its points, with steps of 1, 2 or 5 times a power of ten. A value that is
// not finite breaks the line; an epoch without a value is passed over, and the line continues. Every text is
// escaped, since a title may hold anything. Colours are in the file, for light and dark pages.
#include "cohort/train/sinks/curves.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>

#include "cohort/base/error.h"
#include "cohort/base/files/atomic_file.h"

namespace cohort::train {
namespace {

using base::concat;

constexpr double kPanelWidth = 340, kPanelHeight = 220;  // of the plotting area
constexpr double kLeft = 62, kRight = 18, kTop = 92, kBottom = 52;
constexpr int kColors = 4;

struct Range {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();
  void add(double value) {
    if (!std::isfinite(value)) return;
    low = std::min(low, value);
    high = std::max(high, value);
  }
  bool empty() const { return !(low <= high); }
};

struct Axis {
  double low = 0, high = 1, step = 1;
};

/// Bounds and spacing of 1, 2 or 5 times a power of ten, with about `count` ticks.
Axis nice_axis(Range range, int count, bool whole) {
  if (range.empty()) range = {0, 1};
  // One value, or many equal ones: an axis without length would divide by zero.
  if (range.high - range.low < 1e-12 * std::max(1.0, std::abs(range.high))) {
    const double margin = range.high == 0 ? 1 : std::abs(range.high) * 0.1;
    range = {range.low - margin, range.high + margin};
  }
  const double raw = (range.high - range.low) / count;
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  double step = 10 * power;
  for (const double factor : {1.0, 2.0, 5.0}) {
    // A little tolerance, so that rounding does not turn a step of 2 into one of 5.
    if (factor * power >= raw * 0.999) {
      step = factor * power;
      break;
    }
  }
  if (whole) step = std::max(1.0, std::round(step));
  // The same at the ends: 0.3 / 0.1 is a little less than 3.
  return {std::floor(range.low / step + 1e-9) * step, std::ceil(range.high / step - 1e-9) * step, step};
}

std::string number(double value, const char* format = "%.2f") {
  std::array<char, 40> text;
  std::snprintf(text.data(), text.size(), format, value);
  return text.data();
}

std::string tick_text(double value, double step) {
  if (std::abs(value) < step * 1e-6) return "0";
  if (std::abs(value) < 1e-3 || std::abs(value) >= 1e5) return number(value, "%.3g");
  // As many decimals as the step needs, so that all ticks of an axis have the same.
  const int decimals = std::clamp(static_cast<int>(std::ceil(-std::log10(step) - 1e-9)), 0, 6);
  std::array<char, 40> text;
  std::snprintf(text.data(), text.size(), "%.*f", decimals, value);
  return text.data();
}

std::string escape(const std::string& text) {
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
        out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return out;
}

std::string text_at(double x, double y, const char* style, const char* anchor, const std::string& text) {
  return concat("<text x=\"", number(x), "\" y=\"", number(y), "\" class=\"", style, "\" text-anchor=\"",
                anchor, "\">", escape(text), "</text>\n");
}

std::string line_at(double x1, double y1, double x2, double y2, const char* style) {
  return concat("<line x1=\"", number(x1), "\" y1=\"", number(y1), "\" x2=\"", number(x2), "\" y2=\"",
                number(y2), "\" class=\"", style, "\"/>\n");
}

class PanelDrawer {
 public:
  PanelDrawer(const CurvePanel& panel, const std::string& x_label, double left)
      : panel_(panel), x_label_(x_label), left_(left), scale_(panel.percent ? 100 : 1) {
    Range x, y;
    for (const CurveSeries& series : panel.series) {
      for (std::size_t i = 0; i < std::min(series.x.size(), series.y.size()); ++i) {
        // Not even its place on the x axis counts: nothing is drawn there.
        if (!std::isfinite(series.y[i])) continue;
        x.add(series.x[i]);
        y.add(series.y[i] * scale_);
      }
    }
    // An axis from 0 on shows how much of a loss is left; not where that would press the curve into a corner.
    if (!panel.percent && !y.empty() && y.low >= 0 && y.low < 0.5 * y.high) y.low = 0;
    x_ = nice_axis(x, 6, true);
    // Epochs begin where the data begins, not at the round number before it.
    x_first_ = x.empty() ? x_.low : x.low;
    x_last_ = x.empty() ? x_.high : x.high;
    if (x_first_ == x_last_) {
      x_first_ -= 1;
      x_last_ += 1;
    }
    y_ = nice_axis(y, 5, false);
  }

  std::string draw() const {
    std::string out = text_at(left_, kTop - 30, "panel", "start", panel_.title) + legend();
    out += y_axis() + x_axis();
    for (const CurveSeries& series : panel_.series) out += curve(series);
    return out;
  }

 private:
  double x_at(double value) const { return left_ + (value - x_first_) / (x_last_ - x_first_) * kPanelWidth; }
  double y_at(double value) const {
    return kTop + kPanelHeight - (value - y_.low) / (y_.high - y_.low) * kPanelHeight;
  }

  std::string legend() const {
    std::string out;
    double x = left_;
    for (const CurveSeries& series : panel_.series) {
      const std::string style = concat("s", series.color % kColors);
      out += line_at(x, kTop - 14, x + 18, kTop - 14, style.c_str());
      out += text_at(x + 23, kTop - 10, "small", "start", series.name);
      // About 7 pixels for a character of 12 pixels: SVG does not tell how wide a text is.
      x += 23 + 7.0 * static_cast<double>(series.name.size()) + 16;
    }
    return out;
  }

  std::string y_axis() const {
    std::string out;
    const int ticks = static_cast<int>(std::lround((y_.high - y_.low) / y_.step));
    for (int i = 0; i <= ticks; ++i) {
      // Counted, not added up: sums of 0.1 drift away from the grid.
      const double value = y_.low + i * y_.step;
      out += line_at(left_, y_at(value), left_ + kPanelWidth, y_at(value), "grid");
      out += text_at(left_ - 7, y_at(value) + 4, "small", "end", tick_text(value, y_.step));
    }
    const double middle = kTop + kPanelHeight / 2;
    out += concat("<g transform=\"translate(", number(left_ - 48), " ", number(middle), ") rotate(-90)\">",
                  text_at(0, 0, "small", "middle", panel_.y_label), "</g>\n");
    return out;
  }

  std::string x_axis() const {
    const double bottom = kTop + kPanelHeight;
    std::string out = line_at(left_, bottom, left_ + kPanelWidth, bottom, "axis");
    for (double value = x_.low; value <= x_.high + x_.step / 2; value += x_.step) {
      if (value < x_first_ - 1e-9 || value > x_last_ + 1e-9) continue;
      out += line_at(x_at(value), bottom, x_at(value), bottom + 4, "axis");
      out += text_at(x_at(value), bottom + 18, "small", "middle", tick_text(value, x_.step));
    }
    return out + text_at(left_ + kPanelWidth / 2, bottom + 38, "small", "middle", x_label_);
  }

  std::string curve(const CurveSeries& series) const {
    const std::string style = concat("s", series.color % kColors);
    std::string out, points;
    int count = 0;
    const auto flush = [&] {
      // One point alone makes no line; its dot shows it.
      if (count > 1) out += concat("<polyline class=\"", style, "\" points=\"", points, "\"/>\n");
      points.clear();
      count = 0;
    };
    const std::size_t size = std::min(series.x.size(), series.y.size());
    // More would touch each other and hide the line.
    const bool dots = size <= 40;
    for (std::size_t i = 0; i < size; ++i) {
      if (!std::isfinite(series.y[i])) {
        flush();
        continue;
      }
      const std::string x = number(x_at(series.x[i])), y = number(y_at(series.y[i] * scale_));
      points += concat(count++ == 0 ? "" : " ", x, ",", y);
      if (dots)
        out += concat("<circle class=\"d", series.color % kColors, "\" cx=\"", x, "\" cy=\"", y,
                      "\" r=\"2.6\"/>\n");
    }
    flush();
    return out;
  }

  const CurvePanel& panel_;
  const std::string& x_label_;
  double left_;
  double scale_;
  double x_first_ = 0, x_last_ = 1;
  Axis x_, y_;
};

// An image in a page cannot ask for the page's colours: it brings a light and a dark ground of its own.
constexpr const char* kStyle = R"(<style>
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #24292f; }
.title { font-size: 18px; font-weight: 600; }
.panel { font-size: 14px; font-weight: 600; }
.small { font-size: 12px; fill: #57606a; }
.ground { fill: #ffffff; }
.grid { stroke: #d8dee4; stroke-width: 1; }
.axis { stroke: #57606a; stroke-width: 1; }
.s0, .s1, .s2, .s3 { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.s0 { stroke: #0969da; } .d0 { fill: #0969da; }
.s1 { stroke: #d4700a; } .d1 { fill: #d4700a; }
.s2 { stroke: #1a7f37; } .d2 { fill: #1a7f37; }
.s3 { stroke: #8250df; } .d3 { fill: #8250df; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; }
.small { fill: #9da7b1; }
.ground { fill: #0d1117; }
.grid { stroke: #30363d; }
.axis { stroke: #9da7b1; }
.s0 { stroke: #58a6ff; } .d0 { fill: #58a6ff; }
.s1 { stroke: #f0883e; } .d1 { fill: #f0883e; }
.s2 { stroke: #3fb950; } .d2 { fill: #3fb950; }
.s3 { stroke: #bc8cff; } .d3 { fill: #bc8cff; }
}
</style>
)";

void add_series(CurvePanel& panel, const std::vector<MetricRow>& epochs, const std::string& metric,
                const std::string& name, int color) {
  CurveSeries series{.name = name, .x = {}, .y = {}, .color = color};
  for (const MetricRow& row : epochs) {
    // An epoch that was not evaluated has no value: the line continues to the next one that has.
    const std::optional<double> value = row.find(metric);
    if (!value) continue;
    series.x.push_back(static_cast<double>(row.epoch));
    series.y.push_back(*value);
  }
  if (!series.x.empty()) panel.series.push_back(std::move(series));
}

}  // namespace

Curves curves_from_epochs(const std::vector<MetricRow>& epochs, std::string title, std::string subtitle) {
  Curves curves{.title = std::move(title), .subtitle = std::move(subtitle), .x_label = "epoch", .panels = {}};
  // Colours go by the split, so training and validation look alike in all panels.
  CurvePanel loss{.title = "Loss", .y_label = "loss (nats per sample)", .series = {}, .percent = false};
  add_series(loss, epochs, "train_loss", "training", 0);
  add_series(loss, epochs, "val_loss", "validation", 1);
  CurvePanel accuracy{.title = "Accuracy", .y_label = "accuracy (%)", .series = {}, .percent = true};
  add_series(accuracy, epochs, "train_accuracy", "training", 0);
  add_series(accuracy, epochs, "val_accuracy", "validation", 1);
  CurvePanel rate{.title = "Learning rate", .y_label = "learning rate", .series = {}, .percent = false};
  add_series(rate, epochs, "lr", "at the end of the epoch", 2);
  for (CurvePanel* panel : {&loss, &accuracy, &rate}) {
    if (!panel->series.empty()) curves.panels.push_back(std::move(*panel));
  }
  return curves;
}

std::string curves_svg(const Curves& curves) {
  const double panel_width = kLeft + kPanelWidth + kRight;
  const double width = std::max(1.0, static_cast<double>(curves.panels.size())) * panel_width;
  const double height = kTop + kPanelHeight + kBottom;
  std::string svg = concat("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"", number(width, "%.0f"),
                           "\" height=\"", number(height, "%.0f"), "\" viewBox=\"0 0 ", number(width, "%.0f"),
                           " ", number(height, "%.0f"), "\" role=\"img\">\n<title>", escape(curves.title),
                           "</title>\n", kStyle, "<rect class=\"ground\" width=\"100%\" height=\"100%\"/>\n");
  svg += text_at(20, 32, "title", "start", curves.title);
  if (!curves.subtitle.empty()) svg += text_at(width - 20, 32, "small", "end", curves.subtitle);
  for (std::size_t i = 0; i < curves.panels.size(); ++i) {
    svg += PanelDrawer(curves.panels[i], curves.x_label, static_cast<double>(i) * panel_width + kLeft).draw();
  }
  return svg + "</svg>\n";
}

void write_curves(const std::filesystem::path& path, const Curves& curves) {
  base::write_file_atomically(path, curves_svg(curves));
}

}  // namespace cohort::train
