// In each step a process is compared with the median of the others: the logarithm of its time over theirs.
// The median of the others does not move where fewer than half of them are slow or have a slow step. Over the
// window the median of these logarithms is the slowdown. A process is slow if this slowdown is large, if it
// is far above its own error, and if the process is late in most steps. The error is that of a median of
// `window` values, from their median absolute deviation (MAD). So a few very slow steps, as at a checkpoint,
// do not count, and a run with noisy steps needs a larger slowdown.
//
// Note [Processes with more virtual ranks]
// Of a step some time grows with the virtual ranks of a process (forward, backward), and some does not (the
// optimizer). Which part is which is not known. So the time of another process is taken as what it would take
// at most: times n / m, where this process has n virtual ranks and the other one m < n, and as it is for m >=
// n. A process with fewer virtual ranks is slow only where it is later than those with more: before that
// nobody waits for it.
#include "cohort/elastic/internal/straggler_detector.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace cohort::elastic {
namespace {

// Of a median of n values of a normal distribution: sqrt(pi / 2) * sigma / sqrt(n), with sigma = 1.4826 MAD.
constexpr double kErrorOfMedian = 1.2533 * 1.4826;

// Changes the order of `values`, of which there is at least one.
double median_of(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

// Medians of all values but one, which depend on whether that one is below the middle.
class MediansWithoutOne {
 public:
  // Changes the order of `values`, of which there are at least two.
  explicit MediansWithoutOne(std::vector<double>& values) : is_count_odd_(values.size() % 2 == 1) {
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
    std::nth_element(values.begin(), middle, values.end());
    middle_ = *middle;
    above_ = *std::min_element(middle + 1, values.end());
    below_ = middle == values.begin() ? middle_ : *std::max_element(values.begin(), middle);
  }
  double without(double value) const {
    if (!is_count_odd_) return value > middle_ ? middle_ : above_;
    return ((value > below_ ? below_ : middle_) + (value > middle_ ? middle_ : above_)) / 2;
  }

 private:
  const bool is_count_odd_;
  double below_, middle_, above_;
};

}  // namespace

void StragglerDetector::set_processes(std::vector<StragglerProcess> processes) {
  std::vector<Track> tracks;
  for (StragglerProcess& process : processes) {
    const auto before = std::ranges::find(
        tracks_, process.name, [](const Track& track) -> const std::string& { return track.process.name; });
    Track& track = tracks.emplace_back();
    track.is_slow = before != tracks_.end() && before->is_slow;
    track.process = std::move(process);
  }
  tracks_ = std::move(tracks);
  seconds_.assign(static_cast<std::size_t>(options_.window) * tracks_.size(), 0);
  ratios_ = seconds_;
  num_steps_ = 0;
}

std::size_t StragglerDetector::num_slow() const {
  return static_cast<std::size_t>(std::ranges::count(tracks_, true, &Track::is_slow));
}

void StragglerDetector::note(std::size_t process, double seconds, double expected) {
  const std::size_t step = num_steps_ % static_cast<std::size_t>(options_.window);
  const std::size_t place = step * tracks_.size() + process;
  const double late = 1 + options_.least_slowdown / 2, ratio = seconds / expected;
  // Of the step that leaves the window; there the ratio is 0 before the first.
  tracks_[process].num_late += (ratio > late ? 1 : 0) - (ratios_[place] > late ? 1 : 0);
  ratios_[place] = ratio;
  seconds_[place] = seconds;
}

std::vector<double> StragglerDetector::window_of(const std::vector<double>& ring, std::size_t process) const {
  std::vector<double> values;
  for (std::size_t place = process; place < ring.size(); place += tracks_.size())
    values.push_back(ring[place]);
  return values;
}

std::vector<StragglerNews> StragglerDetector::add_step(std::span<const double> seconds) {
  const bool is_known = std::ranges::all_of(seconds, [](double s) { return s > 0 && std::isfinite(s); });
  if (!is_known || seconds.size() != tracks_.size() || seconds.size() < 2) return {};
  // Blocks of virtual ranks differ by one at most, so there are two counts.
  std::vector<int> counts;
  for (const Track& track : tracks_) {
    const int count = track.process.num_virtual_ranks;
    if (std::ranges::find(counts, count) == counts.end()) counts.push_back(count);
  }
  for (const int count : counts) {
    scaled_.clear();
    for (std::size_t i = 0; i < tracks_.size(); ++i) {
      const int own_count = std::max(1, tracks_[i].process.num_virtual_ranks);
      scaled_.push_back(seconds[i] * std::max(1.0, static_cast<double>(count) / own_count));
    }
    middle_ = scaled_;
    const MediansWithoutOne medians(middle_);
    for (std::size_t i = 0; i < tracks_.size(); ++i) {
      if (tracks_[i].process.num_virtual_ranks != count) continue;
      note(i, seconds[i], medians.without(scaled_[i]));
    }
  }
  ++num_steps_;
  std::vector<StragglerNews> news;
  const auto window = static_cast<std::size_t>(options_.window);
  if (num_steps_ < window || num_steps_ % static_cast<std::size_t>(options_.check_every) != 0) return news;
  for (std::size_t i = 0; i < tracks_.size(); ++i) {
    StragglerNews found{.process = static_cast<int>(i)};
    if (check(i, found)) news.push_back(found);
  }
  return news;
}

bool StragglerDetector::check(std::size_t process, StragglerNews& news) {
  Track& track = tracks_[process];
  const bool is_mostly_late = track.num_late >= options_.least_share * options_.window;
  if (!track.is_slow && !is_mostly_late) return false;
  std::vector<double> values = window_of(ratios_, process);
  for (double& value : values) value = std::log(value);
  const double median = median_of(values);
  for (double& value : values) value = std::abs(value - median);
  const double error = kErrorOfMedian * median_of(values) / std::sqrt(options_.window);
  // Half of the slowdown ends an episode, so one at the limit is not told again and again.
  const bool is_slow =
      track.is_slow ? median > std::log1p(options_.least_slowdown / 2)
                    : median > std::log1p(options_.least_slowdown) && median > options_.least_errors * error;
  if (is_slow == track.is_slow) return false;
  track.is_slow = news.is_slow = is_slow;
  values = window_of(seconds_, process);
  news.seconds = median_of(values);
  news.slowdown = std::expm1(median);
  news.extra_seconds = news.seconds * -std::expm1(-median);
  return true;
}

}  // namespace cohort::elastic
