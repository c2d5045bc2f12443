// Bands are stacked, each scaled to its own last action, so a plan in steps stands above measured
// milliseconds. A box too narrow for its number has none; exact times are in the box's title.
#include "cohort/pipeline/draw.h"

#include <algorithm>
#include <array>
#include <cstdio>

namespace cohort::pipeline {
namespace {

constexpr double kWidth = 960, kLeft = 96, kRight = 16, kRow = 26, kTitle = 34, kLegend = 34;
// By ActionKind: of its kinds only the first four compute, and are drawn.
constexpr std::array<const char*, 4> kColours{"#4c78a8", "#59a14f", "#8cbf6a", "#e0a030"};

std::string number(double value, int digits = 1) {
  std::array<char, 48> text{};
  std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return text.data();
}

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '<')
      result += "&lt;";
    else if (c == '>')
      result += "&gt;";
    else if (c == '&')
      result += "&amp;";
    else if (c == '"')
      result += "&quot;";
    else
      result += c;
  }
  return result;
}

std::string text_at(double x, double y, const std::string& text, const char* more = "") {
  return "<text x=\"" + number(x) + "\" y=\"" + number(y) + "\" " + more + ">" + escaped(text) + "</text>\n";
}

std::string header(double height) {
  // No width or height, so the drawing fits the page that holds it.
  return "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + number(kWidth, 0) + " " +
         number(height, 0) +
         "\" font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" "
         "fill=\"white\"/>\n";
}

std::string box(const TimedAction& timed, double scale, double y, int num_placements, int num_stages,
                const std::string& unit) {
  // An action shorter than a pixel still shows.
  const double x = kLeft + timed.begin * scale, width = std::max(0.5, (timed.end - timed.begin) * scale);
  const int chunk = timed.action.stage / num_placements, chunks = std::max(1, num_stages / num_placements);
  // Stages of one placement differ by lightness, as colours tell the kinds.
  const double opacity = 1.0 - 0.55 * chunk / chunks;
  std::string svg = "<rect x=\"" + number(x) + "\" y=\"" + number(y + 2) + "\" width=\"" + number(width) +
                    "\" height=\"" + number(kRow - 4) + "\" fill=\"" +
                    kColours[static_cast<std::size_t>(timed.action.kind)] + "\" fill-opacity=\"" +
                    number(opacity, 2) + "\" stroke=\"white\" stroke-width=\"0.5\"><title>" +
                    escaped(to_string(timed.action)) + " " + number(timed.begin, 2) + " to " +
                    number(timed.end, 2) + escaped(unit) + "</title></rect>\n";
  if (width >= 9) {
    svg += text_at(x + width / 2, y + kRow / 2 + 4, std::to_string(timed.action.micro_batch),
                   "text-anchor=\"middle\" fill=\"white\"");
  }
  return svg;
}

std::string legend(double y) {
  constexpr std::array kNames{"forward", "backward", "gradient of inputs", "gradient of weights"};
  std::string svg;
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    const double x = kLeft + 170 * static_cast<double>(i);
    svg += "<rect x=\"" + number(x) + "\" y=\"" + number(y) + "\" width=\"12\" height=\"12\" fill=\"" +
           kColours[i] + "\"/>\n" + text_at(x + 18, y + 10, kNames[i]);
  }
  return svg;
}

double end_of(const Band& band) {
  double end = 0;
  for (const auto& row : band.actions) {
    for (const TimedAction& timed : row) end = std::max(end, timed.end);
  }
  return end;
}

}  // namespace

std::string draw_svg(const std::vector<Band>& bands, int num_placements, int num_stages) {
  double height = kLegend;
  for (const Band& band : bands) height += kTitle + kRow * static_cast<double>(band.actions.size());
  std::string svg = header(height);
  double y = 0;
  for (const Band& band : bands) {
    const double end = end_of(band), scale = end > 0 ? (kWidth - kLeft - kRight) / end : 0;
    svg += text_at(kLeft, y + 22, band.title, "font-weight=\"bold\"");
    y += kTitle;
    for (std::size_t row = 0; row < band.actions.size(); ++row, y += kRow) {
      svg += text_at(8, y + kRow / 2 + 4, "placement " + std::to_string(row));
      svg += "<rect x=\"" + number(kLeft) + "\" y=\"" + number(y + 2) + "\" width=\"" +
             number(kWidth - kLeft - kRight) + "\" height=\"" + number(kRow - 4) + "\" fill=\"#f0f0f0\"/>\n";
      for (const TimedAction& timed : band.actions[row]) {
        svg += box(timed, scale, y, num_placements, num_stages, band.unit);
      }
    }
  }
  return svg + legend(y + 12) + "</svg>\n";
}

}  // namespace cohort::pipeline
