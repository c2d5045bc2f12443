#include "cohort/train/internal/elastic/step_words.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cohort/base/error.h"
#include "cohort/train/internal/fit/state_numbers.h"

namespace cohort::train {

using nlohmann::json;

std::string StepWords::to_text() const {
  json metrics = json::object(), shares = json::array();
  for (const auto& [name, sum] : sums) metrics[name] = sum_to_json(sum);
  for (const auto& [share, indices] : samples) shares.push_back({share, indices});
  return json{{"metrics", metrics},
              {"samples", shares},
              {"requests", {requests.stop_signal, requests.save_now, requests.save_due}},
              {"listed", num_listed},
              {"opened", is_opened}}
      .dump();
}

StepWords StepWords::of_all(const std::vector<std::string>& texts) {
  StepWords words;
  MeterSet meters;
  try {
    for (const std::string& text : texts) {
      const json told = json::parse(text);
      RankCoordinator::MetricSums sums;
      for (const auto& [name, sum] : told.at("metrics").items()) sums[name] = sum_from_json(sum);
      meters.add(sums);
      for (const json& share : told.at("samples")) {
        words.samples[share.at(0).get<std::int64_t>()] = share.at(1).get<std::vector<std::int64_t>>();
      }
      const json& asked = told.at("requests");
      // One process's request is enough, and of two signals all take the same.
      words.requests.stop_signal = std::max(words.requests.stop_signal, asked.at(0).get<int>());
      words.requests.save_now |= asked.at(1).get<bool>();
      words.requests.save_due |= asked.at(2).get<bool>();
      words.num_listed = std::max(words.num_listed, told.at("listed").get<std::int64_t>());
      words.is_opened |= told.at("opened").get<bool>();
    }
  } catch (const json::exception& error) {
    throw CommError("train.elastic",
                    base::concat("what a process tells of its part of a step cannot be read: ", error.what()),
                    "the same program on all nodes");
  }
  words.sums = meters.sums();
  return words;
}

}  // namespace cohort::train
