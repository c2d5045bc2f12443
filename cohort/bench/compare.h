#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/bench/timeit.h"

namespace cohort::bench {

/// What the variants are given, such as {m, n, k}; its meaning is the caller's.
using Shape = std::vector<std::int64_t>;

/// One way to do the work.
struct Variant {
  /// Does the work as often as its argument says.
  using Loop = std::function<void(std::int64_t)>;

  /// `make` is given a shape, prepares what the work needs, and returns the work.
  Variant(std::string name, std::function<std::function<void()>(const Shape&)> make);
  /// Work that is ready, the same for every shape.
  Variant(std::string name, std::function<void()> work);
  /// The same, a loop already: `loop(n)` does the work n times.
  Variant(std::string name, Loop loop);
  /// Work that is timed where it runs, as sample() has it.
  static Variant sampled(std::string name, std::function<double()> round);

  std::string name;  ///< names the variant in the table
  /// Prepares the work for a shape; null for a variant that is sampled.
  std::function<Loop(const Shape&)> make;
  std::function<double()> round;  ///< instead of `make`: of one that is sampled
};

/// What compare() measures.
struct CompareOptions {
  /// Every variant is measured on each of them; the default is one shape without numbers.
  TORCH_ARG(std::vector<Shape>, shapes) = { {} };
  /// Threads of one operator, one table row for each; 0: as it is set now.
  TORCH_ARG(std::vector<int>, threads) = { 0 };
  /// Rounds, calls, min_time and clock of each measurement.
  TORCH_ARG(TimeitOptions, timeit) = {};
};

/// What compare() saw, by shape, then threads, then variant, each in the order that was asked for.
struct Comparison {
  /// One variant at one shape and one number of threads.
  struct Row {
    Shape shape;
    Measurement measurement;  ///< `label` is the variant
    /// How many times as fast as the first variant: the median over rounds of the two times measured in the
    /// same turn, so that a machine that is slow for a while is slow for both.
    double ratio = 1;
  };
  /// Measurements, in the order above.
  std::vector<Row> rows;
  /// Variants of each shape: so many rows in turn belong together.
  std::size_t num_variants = 0;

  /// For a terminal: a line for each measurement with its fastest round, median, 99th percentile and ratio.
  std::string text() const;
  /// A table: a row for each shape and number of threads, a column for each variant with its median, spread
  /// and ratio to the first.
  std::string markdown() const;
  /// Comma-separated, a line for each measurement, times in nanoseconds per call.
  std::string csv() const;
};

/// Measures every variant on every shape with every number of threads. The variants of one row take turns,
/// one round each, in an order that reverses from turn to turn: what disturbs the machine, and what one
/// leaves in the caches for the next, hits all alike.
///
///     auto figures = bench::compare(
///         {{"composite", composite}, {"fused", fused}},  // each returns the call for a bench::Shape
///         bench::CompareOptions().shapes({{1024, 64}, {1024, 4096}}).threads({1, 2}));
///     std::string table = figures.markdown();
///
/// All variants of a row are prepared before the first is measured, and live until the row is done.
/// Ranks: with `calls` set, or samples, every rank does the same in the same order.
/// Throws: UsageError when there is no variant, shape or number of threads, or two variants have one name;
/// as timeit().
Comparison compare(const std::vector<Variant>& variants, const CompareOptions& options = {});

/// Returns "1024 x 64"; "-" for the empty shape.
std::string to_text(const Shape& shape);

}  // namespace cohort::bench
