#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cohort/train/exact_sum.h"

/// Averages of named quantities over many steps.
namespace cohort::train {

/// One quantity of one step: its mean over `weight` samples.
struct Metric {
  Metric(std::string name, double value, double weight)
      : name(std::move(name)), value(value), weight(weight) {}
  /// `value` is a scalar tensor; one on an accelerator is not waited for until the average is read.
  Metric(std::string name, const at::Tensor& value, double weight);

  std::string name;         ///< without the prefixes of training and evaluation
  double value = 0;         ///< mean over the samples; not yet set where `device_value` is defined
  double weight = 1;        ///< samples that the mean is over
  at::Tensor device_value;  ///< defined only when the value still lives on an accelerator
};
/// What one step reports.
using StepMetrics = std::vector<Metric>;

/// Weighted means of everything added since the last `reset`, by name. Sums are not rounded on the way, so
/// neither the order of steps nor their division among ranks changes a mean, where weights are whole numbers
/// and values are on the CPU.
/// Threads: one caller at a time.
class MeterSet {
 public:
  /// A quantity's sum over samples, and how many they are: the mean is weighted / weight.
  struct Sum {
    double weighted = 0;
    double weight = 0;
    /// With `weighted` the parts of the sum without rounding: ExactSum::parts().
    std::vector<double> rest = {};

    static Sum of(const ExactSum& weighted, double weight);
    ExactSum exact() const;
  };

  /// Adds the metrics of one step.
  void add(const StepMetrics& metrics);
  /// Adds sums that another set's sums() returned.
  void add(const std::map<std::string, Sum>& sums);
  /// Begins anew.
  void reset() { meters_.clear(); }

  /// Blocks until values on an accelerator have arrived.
  std::map<std::string, double> averages();
  /// The sums that averages are made of, to be saved and restored exactly.
  std::map<std::string, Sum> sums();
  /// Goes back to what sums() gave; what was added since is gone.
  void restore(const std::map<std::string, Sum>& sums);

 private:
  struct Meter {
    ExactSum weighted;
    double weight = 0;
    at::Tensor pending;  // weighted sum on an accelerator, not yet in `weighted`
  };
  void add_pending();

  std::map<std::string, Meter> meters_;
};

}  // namespace cohort::train
