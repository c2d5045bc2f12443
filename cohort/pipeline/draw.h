#pragma once

#include <string>
#include <vector>

#include "cohort/pipeline/simulate.h"

/// Drawings of a pipeline, as SVG. Without LibTorch.
namespace cohort::pipeline {

/// One band of the drawing: a row per placement, a box per computation.
struct Band {
  std::string title;                              ///< above the band
  std::vector<std::vector<TimedAction>> actions;  ///< of each placement, times from 0
  std::string unit;                               ///< of the times: "", " ms"
};

/// Returns the bands one beneath the other, each over the whole width: a plan and what was measured. Boxes
/// carry the micro-batch, colours the kind, shades the stage of a placement that has several.
std::string draw_svg(const std::vector<Band>& bands, int num_placements, int num_stages);

}  // namespace cohort::pipeline
