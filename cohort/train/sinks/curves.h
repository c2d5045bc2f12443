#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "cohort/train/sinks/metrics_log.h"

/// `curves.svg`: loss, accuracy and learning rate against epochs, as a plot that a browser or README
/// shows.
namespace cohort::train {

/// One line of a plot.
struct CurveSeries {
  std::string name;  ///< in the legend
  std::vector<double> x;
  std::vector<double> y;  ///< a point that is not finite is left out, and the line is broken there
  int color = 0;          ///< index in the palette
};

/// One plot, with axes of its own.
struct CurvePanel {
  std::string title;
  std::string y_label;
  std::vector<CurveSeries> series;  ///< drawn in this order
  bool percent = false;             ///< y is 0..1 and shown as 0..100 %
};

/// The panels of one file, and the texts around them.
struct Curves {
  std::string title;
  std::string subtitle;
  std::string x_label = "epoch";
  std::vector<CurvePanel> panels;  ///< side by side
};

/// Makes the three panels (loss, accuracy, learning rate) from rows of MetricsLog::epochs(): the names
/// train_loss, val_loss, train_accuracy, val_accuracy and lr are shown where present.
Curves curves_from_epochs(const std::vector<MetricRow>& epochs, std::string title, std::string subtitle = "");

/// Returns the plot: readable on a light and on a dark page, no script, no font of its own.
std::string curves_svg(const Curves& curves);

/// Writes it, atomically. Throws: SystemError naming the file.
void write_curves(const std::filesystem::path& path, const Curves& curves);

}  // namespace cohort::train
