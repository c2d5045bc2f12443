// What processes tell each other, where there is no group. Requests of a process wait for the next step,
// travel with it, and are heard by all who commit it. A process that has the metrics of an evaluation gives
// them to all: an evaluation that one process has ended is not made again.
#include "cohort/train/internal/elastic/elastic_coordinator.h"

#include <algorithm>
#include <exception>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/timeline.h"
#include "cohort/comm/object_collectives.h"
#include "cohort/parallel/virtual_ranks/text_gather.h"
#include "cohort/train/internal/fit/state_numbers.h"

namespace cohort::train {
namespace {

using nlohmann::json;

constexpr const char* kWhereRanks = "train.elastic";

/// Returns the first line of `text` that is not at its place in `other`, and that one.
std::string first_difference(const std::string& text, const std::string& other) {
  std::istringstream lines(text), other_lines(other);
  std::string line, other_line;
  while (true) {
    const bool has_line = static_cast<bool>(std::getline(lines, line));
    const bool has_other = static_cast<bool>(std::getline(other_lines, other_line));
    if (!has_line) line = "nothing";
    if (!has_other) other_line = "nothing";
    if (line != other_line || (!has_line && !has_other))
      return base::concat(line, ", process 0 has ", other_line);
  }
}

}  // namespace

void ElasticCoordinator::check_members() const {
  if (info_.process < 0 || !session_->must_enter()) return;
  throw elastic::GenerationEnded("train.elastic", "the processes of the run change");
}

void ElasticCoordinator::check_evaluation() {
  if (info_.process < 0 || !session_->must_enter()) return;
  if (!session_->must_leave()) {
    if (!change_limit_) change_limit_.emplace(change_wait_ * num_begun_);
    if (!change_limit_->expired()) return;
  }
  check_members();
}

void ElasticCoordinator::write_trace(const std::filesystem::path& path) const {
  if (is_first()) base::Timeline::write(path);
}

void ElasticCoordinator::request(const ControlRequests& requests) {
  if (own_.requests.stop_signal == 0) own_.requests.stop_signal = requests.stop_signal;
  own_.requests.save_now |= requests.save_now;
  own_.requests.save_due |= requests.save_due;
}

RankCoordinator::ControlRequests ElasticCoordinator::agree_on(const ControlRequests& requests) {
  request(requests);
  return std::exchange(is_answered_, true) ? ControlRequests() : heard_.requests;
}

RankCoordinator::MetricSums ElasticCoordinator::total(MeterSet& meters) const {
  StepWords own;
  own.sums = meters.sums();
  return StepWords::of_all(parallel::all_gather_texts(exchange(), own.to_text())).sums;
}

std::optional<RankCoordinator::Metrics> ElasticCoordinator::find_evaluation(std::int64_t step) {
  num_begun_ = std::exchange(begun_step_, step) == step ? num_begun_ + 1 : 1;
  change_limit_.reset();
  json own = {{"begun", num_begun_}, {"metrics", nullptr}};
  if (evaluated_step_ == step) own["metrics"] = numbers_to_json(evaluated_);
  std::optional<Metrics> found;
  int process = 0;
  for (const std::string& bytes : parallel::all_gather_texts(exchange(), comm::object_to_bytes(own))) {
    const json report = comm::object_from_bytes(bytes, process++);
    // A newcomer has as much patience as the others: the first one to lose it ends the evaluation of all.
    num_begun_ = std::max(num_begun_, report.at("begun").get<int>());
    if (!found && !report.at("metrics").is_null()) found = numbers_from_json(report.at("metrics"));
  }
  return found;
}

void ElasticCoordinator::keep_evaluation(std::int64_t step, const Metrics& metrics) {
  evaluated_step_ = step;
  evaluated_ = metrics;
}

void ElasticCoordinator::run_on_all(const std::string& what, const std::function<void()>& fn) const {
  std::string own;
  std::exception_ptr error;
  try {
    fn();
  } catch (const Error& thrown) {
    error = std::current_exception();
    own = base::message_of(thrown);
  }
  const std::vector<std::string> texts = parallel::all_gather_texts(exchange(), own);
  if (error != nullptr) std::rethrow_exception(error);
  for (std::size_t process = 0; process < texts.size(); ++process) {
    if (texts[process].empty()) continue;
    throw PeerError(kWhereRanks, base::concat("process ", process, " cannot ", what, ": ", texts[process]));
  }
}

// A process that died of its own error alone would have successors that die of it, one after the other.
std::optional<checkpoint::LoadedCheckpoint> ElasticCoordinator::load(
    const std::function<std::optional<checkpoint::LoadedCheckpoint>()>& load) const {
  constexpr const char* kRead = "read the checkpoint that the run resumes from";
  std::optional<checkpoint::LoadedCheckpoint> loaded;
  std::string bytes;
  run_on_all(kRead, [&] {
    if (is_first()) loaded = load();
  });
  if (loaded) {
    bytes = comm::object_to_bytes({{"folder", loaded->folder.string()}, {"state", loaded->content.state}});
  }
  bytes = text_of_first(bytes);
  if (bytes.empty()) return std::nullopt;
  run_on_all(kRead, [&] {
    if (is_first()) return;
    const json found = comm::object_from_bytes(bytes, 0);
    const std::string folder = found.at("folder");
    loaded = {.folder = folder, .content = checkpoint::RunCheckpoints::load(folder)};
    loaded->content.state = found.at("state");  // process 0 may have taken the best out
  });
  session_->begin_changes();
  return loaded;
}

void ElasticCoordinator::set_info(const elastic::GenerationInfo& info) {
  info_ = info;
  exchange_ = session_->exchange();
}

void ElasticCoordinator::compare() const {
  std::string own;
  for (const auto& [what, text] : same_) own += base::concat(what, "\n", text);
  const std::string first = text_of_first(own);
  if (own == first) return;
  throw UsageError(
      "train.elastic",
      base::concat("this process has another run than process 0: ", first_difference(own, first)),
      "the same configuration on all nodes");
}

std::string ElasticCoordinator::text_of_first(const std::string& text) const {
  return parallel::all_gather_texts(exchange(), text).front();
}

void ElasticCoordinator::add_part(const data::Batch& part) {
  std::vector<std::int64_t>& samples = own_.samples[part.share];
  samples.insert(samples.end(), part.indices.begin(), part.indices.end());
}

std::string ElasticCoordinator::own_words(const StepMetrics& metrics) {
  MeterSet meters;
  meters.add(metrics);
  own_.sums = meters.sums();
  return own_.to_text();
}

void ElasticCoordinator::hear(StepWords words) {
  own_.requests = {};
  go_back_to(std::move(words));
}

void ElasticCoordinator::go_back_to(StepWords words) {
  heard_ = std::move(words);
  is_answered_ = false;
}

}  // namespace cohort::train
