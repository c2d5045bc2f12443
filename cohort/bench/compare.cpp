// All variants of a row are made first; then they take turns, a round each, in an order that reverses every
// turn. So disturbances fall on all alike. A ratio is the median of ratios within a turn, not a ratio of
// medians. A machine that is slow for a while is then slow on both sides of a ratio.
#include "cohort/bench/compare.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <set>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"

namespace cohort::bench {
namespace {

void check(const std::vector<Variant>& variants, const CompareOptions& options) {
  if (variants.empty() || options.shapes().empty() || options.threads().empty()) {
    throw UsageError(
        "bench.compare",
        base::concat("got ", variants.size(), " variants, ", options.shapes().size(), " shapes, ",
                     options.threads().size(), " numbers of threads; expected one or more of each"));
  }
  std::set<std::string> names;
  for (const Variant& variant : variants) {
    if (!names.insert(variant.name).second) {
      throw UsageError("bench.compare", base::concat("two variants are called '", variant.name, "'"));
    }
  }
}

double paired_ratio(const Measurement& first, const Measurement& other) {
  Measurement ratios;
  for (std::size_t round = 0; round < other.seconds.size(); ++round) {
    // A round that was too short for the clock has no ratio, and counts as 0.
    ratios.seconds.push_back(other.seconds[round] > 0 ? first.seconds[round] / other.seconds[round] : 0);
  }
  return ratios.median();
}

std::vector<Measurement> take_turns(const std::vector<Variant>& variants, const Shape& shape,
                                    const TimeitOptions& options) {
  std::vector<Variant::Loop> loops;  // addresses stay: the rounds refer to them
  loops.reserve(variants.size());
  for (const Variant& variant : variants) {
    loops.push_back(variant.round ? nullptr : variant.make(shape));
    if (!variant.round && !loops.back()) {
      throw UsageError("bench.compare", base::concat("variant '", variant.name, "' made nothing to measure"));
    }
  }
  std::vector<detail::Rounds> rounds;
  for (std::size_t i = 0; i < variants.size(); ++i) {
    const TimeitOptions own = TimeitOptions(options).label(variants[i].name);
    if (variants[i].round) {
      rounds.emplace_back(c10::function_ref<double()>(variants[i].round), own);
    } else {
      rounds.emplace_back(c10::function_ref<void(std::int64_t)>(loops[i]), own);
    }
  }
  for (int turn = 0; turn < options.rounds(); ++turn) {
    for (std::size_t i = 0; i < rounds.size(); ++i) {
      // Each stands as often early in a turn as late, so a clock that drops or rises favours none.
      rounds[turn % 2 == 0 ? i : rounds.size() - 1 - i].run();
    }
  }
  std::vector<Measurement> result;
  for (detail::Rounds& of_variant : rounds) result.push_back(std::move(of_variant).result());
  return result;
}

// The first variant is the baseline of its row, so it has no ratio.
std::string cell(const Comparison::Row& row, bool first) {
  char text[96];
  std::snprintf(text, sizeof text, "%s ± %ld %%", to_text(row.measurement.median()).c_str(),
                std::lround(100 * row.measurement.spread()));
  std::string result = text;
  if (!first) {
    std::snprintf(text, sizeof text, ", **%.2fx**", row.ratio);
    result += text;
  }
  return result;
}

/// As RFC 4180 has it.
std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\n") == std::string::npos) return text;
  std::string result = "\"";
  for (const char c : text) result += c == '"' ? std::string("\"\"") : std::string(1, c);
  return result + "\"";
}

std::string threads_text(int threads) {
  return std::to_string(threads) + (threads == 1 ? " thread" : " threads");
}

// An empty function stays empty, so that take_turns() can name the variant that made it.
Variant::Loop loop_of(std::function<void()> work) {
  if (!work) return nullptr;
  return [work = std::move(work)](std::int64_t calls) {
    for (std::int64_t call = 0; call < calls; ++call) work();
  };
}

}  // namespace

Variant::Variant(std::string given, std::function<std::function<void()>(const Shape&)> of_shape)
    : name(std::move(given)),
      make([of_shape = std::move(of_shape)](const Shape& shape) { return loop_of(of_shape(shape)); }) {}

Variant::Variant(std::string given, std::function<void()> work)
    : Variant(std::move(given), loop_of(std::move(work))) {}

Variant::Variant(std::string given, Loop loop)
    : name(std::move(given)), make([loop = std::move(loop)](const Shape&) { return loop; }) {}

// Its round takes the time itself and returns seconds: what it measures is not a loop of calls.
Variant Variant::sampled(std::string name, std::function<double()> round) {
  Variant variant(std::move(name), Loop());
  variant.round = std::move(round);
  return variant;
}

Comparison compare(const std::vector<Variant>& variants, const CompareOptions& options) {
  check(variants, options);
  Comparison result;
  result.num_variants = variants.size();
  for (const Shape& shape : options.shapes()) {
    for (const int threads : options.threads()) {
      // Around all variants of a row: they are compared at one number of threads.
      const detail::ThreadsGuard guard(threads);
      std::vector<Measurement> measured = take_turns(variants, shape, options.timeit());
      // A copy, since the loop moves each measurement into its row.
      const Measurement first = measured.front();
      for (Measurement& measurement : measured) {
        const double ratio = paired_ratio(first, measurement);
        result.rows.push_back({shape, std::move(measurement), ratio});
      }
    }
  }
  return result;
}

std::string Comparison::text() const {
  std::size_t width = 24;
  for (const Row& row : rows) width = std::max(width, row.measurement.label.size());
  std::string text;
  const auto line = [&](std::string name, std::initializer_list<std::string> cells) {
    name.resize(std::max(width, name.size()), ' ');
    text += name;
    for (const std::string& cell : cells)
      text += std::string(cell.size() < 12 ? 12 - cell.size() : 1, ' ') + cell;
    text += "\n";
  };
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Measurement& measurement = rows[i].measurement;
    // Rows come in blocks: all variants of one shape and number of threads.
    if (i % num_variants == 0) {
      const std::string shape = rows[i].shape.empty() ? "" : to_text(rows[i].shape) + ", ";
      line(shape + threads_text(measurement.threads), {"best", "median", "p99", "ratio"});
    }
    char ratio[32];
    std::snprintf(ratio, sizeof ratio, "%.2fx", rows[i].ratio);
    line(measurement.label, {to_text(measurement.best()), to_text(measurement.median()),
                             to_text(measurement.percentile(0.99)), ratio});
  }
  return text;
}

std::string Comparison::markdown() const {
  std::string text = "| shape | threads |", line = "| --- | --- |";
  for (std::size_t i = 0; i < num_variants; ++i) {
    text += " " + rows[i].measurement.label + " |";
    line += " --- |";
  }
  text += "\n" + line + "\n";
  for (std::size_t begin = 0; begin < rows.size(); begin += num_variants) {
    text += base::concat("| ", to_text(rows[begin].shape), " | ", rows[begin].measurement.threads, " |");
    for (std::size_t i = 0; i < num_variants; ++i) text += " " + cell(rows[begin + i], i == 0) + " |";
    text += "\n";
  }
  return text;
}

std::string Comparison::csv() const {
  std::string text = "shape,threads,variant,best_ns,median_ns,p99_ns,spread,rounds,calls,ratio\n";
  for (const Row& row : rows) {
    const Measurement& measurement = row.measurement;
    char numbers[192];
    std::snprintf(numbers, sizeof numbers, ",%.3f,%.3f,%.3f,%.4f,%zu,%lld,%.4f\n", 1e9 * measurement.best(),
                  1e9 * measurement.median(), 1e9 * measurement.percentile(0.99), measurement.spread(),
                  measurement.seconds.size(), static_cast<long long>(measurement.calls), row.ratio);
    text += base::concat(to_text(row.shape), ",", measurement.threads, ",", csv_field(measurement.label),
                         numbers);
  }
  return text;
}

std::string to_text(const Shape& shape) {
  return shape.empty() ? "-" : base::join(shape, " x ");
}

}  // namespace cohort::bench
