// A snapshot has what a checkpoint has, and what a fit needs to do again what follows its last step. Tensors
// are flat, in the order of their memory, so that they need no copy; the text holds their names, sizes and
// strides.
#include "cohort/train/internal/elastic/state_text.h"

#include <ATen/core/Tensor.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/train/internal/fit/state_numbers.h"

namespace cohort::train {
namespace {

using nlohmann::json;

constexpr int kSnapshotVersion = 3;

json layout_of_tensors(const checkpoint::TensorMap& tensors, std::vector<at::Tensor>& flats) {
  json layout = json::array();
  for (const auto& [name, tensor] : tensors) {
    const bool is_dense = tensor.is_non_overlapping_and_dense();
    // A copy that flat_alias() makes is in the order of the elements.
    const at::Tensor& laid_out = is_dense ? tensor : tensor.contiguous();
    layout.push_back({name, laid_out.sizes().vec(), laid_out.strides().vec()});
    flats.push_back(flat_alias(laid_out));
  }
  return layout;
}

checkpoint::TensorMap tensors_of(const json& layout, const std::vector<at::Tensor>& flats,
                                 std::size_t& next) {
  checkpoint::TensorMap tensors;
  for (const json& entry : layout) {
    const at::Tensor& flat = flats.at(next++);
    const auto sizes = entry.at(1).get<std::vector<std::int64_t>>();
    const auto strides = entry.at(2).get<std::vector<std::int64_t>>();
    tensors.emplace_back(entry.at(0).get<std::string>(), flat.as_strided(sizes, strides));
  }
  return tensors;
}

json to_json(const std::vector<LedgerLine>& lines) {
  json list = json::array();
  for (const LedgerLine& line : lines) {
    json shares = json::array();
    for (const auto& [share, indices] : line.samples) shares.push_back({share, indices});
    list.push_back({line.step, line.epoch, shares});
  }
  return list;
}

std::vector<LedgerLine> lines_from_json(const json& from) {
  std::vector<LedgerLine> lines;
  for (const json& entry : from) {
    LedgerLine& line = lines.emplace_back();
    line.step = entry.at(0);
    line.epoch = entry.at(1);
    for (const json& share : entry.at(2)) {
      line.samples[share.at(0).get<std::int64_t>()] = share.at(1).get<std::vector<std::int64_t>>();
    }
  }
  return lines;
}

json decisions_to_json(const StepState& step) {
  return {{"num_saves", step.saves.num_saves},
          {"saved_step", step.saves.saved_step},
          {"save_is_requested", step.saves.is_requested},
          {"save_at_epoch_end", step.saves.is_due_at_epoch_end},
          {"stop_signal", step.agreed.stop_signal},
          {"num_saves_told", step.agreed.num_saves_told},
          {"words", step.words.to_text()}};
}

json to_json(const StepState& step) {
  json all = decisions_to_json(step);
  all["unlisted"] = to_json(step.unlisted);
  all["is_opened"] = step.is_opened;
  all["is_done"] = step.is_done;
  all["metrics"] = numbers_to_json(step.metrics);
  all["seconds_since_save"] = step.seconds_since_save;
  return all;
}

void decisions_from_json(const json& from, StepState& step) {
  step.saves.num_saves = from.at("num_saves");
  step.saves.saved_step = from.at("saved_step");
  step.saves.is_requested = from.at("save_is_requested");
  step.saves.is_due_at_epoch_end = from.at("save_at_epoch_end");
  step.agreed.stop_signal = from.at("stop_signal");
  step.agreed.num_saves_told = from.at("num_saves_told");
  step.words = StepWords::of_all({from.at("words").get<std::string>()});
}

StepState step_from_json(const json& from) {
  StepState step;
  decisions_from_json(from, step);
  step.unlisted = lines_from_json(from.at("unlisted"));
  step.is_opened = from.at("is_opened");
  step.is_done = from.at("is_done");
  step.metrics = numbers_from_json(from.at("metrics"));
  step.seconds_since_save = from.at("seconds_since_save");
  return step;
}

[[noreturn]] void throw_unreadable(const json::exception& error) {
  throw CommError("train.elastic",
                  base::concat("the state of another process cannot be read: ", error.what()),
                  "the same program on all nodes");
}

}  // namespace

at::Tensor flat_alias(const at::Tensor& tensor) {
  if (!tensor.is_non_overlapping_and_dense()) return tensor.contiguous().view({-1});
  return tensor.as_strided({tensor.numel()}, {1});
}

std::string decisions_to_text(const StepState& step) {
  return decisions_to_json(step).dump();
}

void take_decisions(const std::string& text, StepState& step) {
  try {
    decisions_from_json(json::parse(text), step);
  } catch (const json::exception& error) {
    throw_unreadable(error);
  }
}

elastic::StateSnapshot to_snapshot(const ElasticState& state) {
  elastic::StateSnapshot snapshot;
  const json model = layout_of_tensors(state.content.model, snapshot.tensors);
  const json optimizer = layout_of_tensors(state.content.optimizer, snapshot.tensors);
  snapshot.text = json{{"version", kSnapshotVersion},
                       {"state", state.content.state},
                       {"model", model},
                       {"optimizer", optimizer},
                       {"start", {state.start.step, state.start.epoch, state.start.resumed_from}},
                       {"step", to_json(state.step)}}
                      .dump();
  return snapshot;
}

ElasticState from_snapshot(const elastic::StateSnapshot& snapshot) {
  try {
    const json text = json::parse(snapshot.text);
    if (const int version = text.at("version"); version != kSnapshotVersion) {
      throw CommError(
          "train.elastic",
          base::concat("another process has states of version ", version, ", expected ", kSnapshotVersion),
          "the same program on all nodes");
    }
    ElasticState state;
    std::size_t next = 0;
    state.content.state = text.at("state");
    state.content.model = tensors_of(text.at("model"), snapshot.tensors, next);
    state.content.optimizer = tensors_of(text.at("optimizer"), snapshot.tensors, next);
    const json& start = text.at("start");
    state.start = {.step = start.at(0), .epoch = start.at(1), .resumed_from = start.at(2)};
    state.step = step_from_json(text.at("step"));
    return state;
  } catch (const json::exception& error) {
    throw_unreadable(error);
  } catch (const std::out_of_range&) {
    throw CommError("train.elastic", "the state of another process lacks tensors that its text names",
                    "the same program on all nodes");
  }
}

}  // namespace cohort::train
