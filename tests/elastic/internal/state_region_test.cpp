#include "cohort/elastic/internal/state_region.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/files/memory_file.h"
#include "cohort/base/log.h"
#include "cohort/elastic/state_of.h"
#include "cohort/optim/sgd.h"

namespace cohort::elastic {
namespace {

using Phase = CommitWord::Phase;

base::Fd copy_of_fd(const base::Fd& file) {
  return base::Fd(::fcntl(file.get(), F_DUPFD_CLOEXEC, 3));
}

StateSnapshot snapshot_of(std::string text, std::vector<at::Tensor> tensors, std::vector<bool> in_place) {
  StateSnapshot state{std::move(text), {}, std::move(in_place)};
  for (const at::Tensor& tensor : tensors) state.tensors.push_back(tensor.detach());
  return state;
}

StateSnapshot deep_copy(const StateSnapshot& state) {
  StateSnapshot copy{state.text, {}, state.in_place};
  for (const at::Tensor& tensor : state.tensors) copy.tensors.push_back(tensor.clone());
  return copy;
}

void expect_equal(const std::optional<StateSnapshot>& got, const StateSnapshot& expected) {
  ASSERT_TRUE(got);
  EXPECT_EQ(got->text, expected.text);
  ASSERT_EQ(got->tensors.size(), expected.tensors.size());
  for (std::size_t i = 0; i < expected.tensors.size(); ++i) {
    EXPECT_EQ(got->tensors[i].scalar_type(), expected.tensors[i].scalar_type());
    EXPECT_TRUE(at::equal(got->tensors[i], expected.tensors[i])) << i;
  }
}

std::int64_t file_bytes(const base::Fd& file) {
  struct stat status {};
  EXPECT_EQ(::fstat(file.get(), &status), 0);
  return status.st_size;
}

std::optional<StateSnapshot> read_again(const base::Fd& file) {
  StateRegion next(copy_of_fd(file));
  return next.found().phase == Phase::kCommitted ? next.read() : std::nullopt;
}

struct LogLines {
  LogLines() {
    base::set_log_sink([this](base::LogLevel, std::string_view line) { text += std::string(line) + "\n"; });
  }
  ~LogLines() { base::set_log_sink({}); }
  std::string text;
};

TEST(StateRegionTest, ParametersLiveInItAndBuffersAreCopied) {
  const base::Fd file = base::make_memory_file("test");
  StateRegion region(copy_of_fd(file));
  at::Tensor weight = at::rand({40, 50}).requires_grad_(), mean = at::zeros({7});
  const at::Tensor column = weight.detach().t()[3];
  const at::Tensor before = weight.detach().clone();
  const auto save = [&](const std::string& text) { return snapshot_of(text, {weight, mean}, {true, false}); };
  region.commit(1, save("one"));
  const void* const place = weight.const_data_ptr();
  expect_equal(read_again(file), {"one", {before, at::zeros({7})}, {}});
  // Views see what happens, and a step copies nothing: the file has it already.
  mean.add_(1);
  region.mark_changing(2);
  weight.detach().mul_(2);
  EXPECT_TRUE(at::equal(column, before.t()[3] * 2));
  EXPECT_FALSE(read_again(file)) << "it is being changed";
  region.commit(2, save("two"));
  EXPECT_EQ(weight.const_data_ptr(), place);
  mean.add_(1);  // as forward of the next step does
  expect_equal(read_again(file), {"two", {before * 2, at::zeros({7}) + 1}, {}});
  weight.detach().mul_(2);  // what must not happen shows that it is the same memory
  EXPECT_TRUE(at::equal(read_again(file)->tensors[0], before * 4));
}

TEST(StateRegionTest, WhatIsPreparedLiesThereBeforeTheFirstCommit) {
  const base::Fd file = base::make_memory_file("test");
  StateRegion region(copy_of_fd(file));
  const at::Tensor weight = at::rand({300});
  const void* const first = weight.const_data_ptr();
  region.prepare(snapshot_of("early", {weight}, {true}));
  const void* const place = weight.const_data_ptr();
  EXPECT_NE(place, first);
  EXPECT_EQ(read_commit_word(file), CommitWord{}) << "there is no state yet";
  weight.fill_(3);
  region.commit(4, snapshot_of("four", {weight}, {true}));
  EXPECT_EQ(weight.const_data_ptr(), place);
  expect_equal(read_again(file), {"four", {weight}, {}});
}

TEST(StateRegionTest, WhatComesLaterMovesThenAndNothingElse) {
  const base::Fd file = base::make_memory_file("test");
  StateRegion region(copy_of_fd(file));
  const at::Tensor weight = at::rand({300});
  region.commit(0, snapshot_of("", {weight}, {true}));
  const void* const place = weight.const_data_ptr();
  const at::Tensor momentum = at::rand({300}), outside = momentum.view({3, 100});
  const void* const first = momentum.const_data_ptr();
  for (int step = 1; step < 6; ++step) {
    region.mark_changing(static_cast<std::uint64_t>(step));
    momentum.add_(1);
    const std::int64_t bytes = file_bytes(file);
    // A number that is made anew each time has no place of its own.
    const StateSnapshot state =
        snapshot_of("", {weight, momentum, at::scalar_tensor(step)}, {true, true, true});
    region.commit(static_cast<std::uint64_t>(step), state);
    EXPECT_EQ(weight.const_data_ptr(), place);
    EXPECT_NE(momentum.const_data_ptr(), first);
    EXPECT_EQ(outside.const_data_ptr(), momentum.const_data_ptr());
    if (step > 2) EXPECT_EQ(file_bytes(file), bytes);  // records have their places then
    expect_equal(read_again(file), {"", {weight, momentum, at::scalar_tensor(step)}, {}});
  }
  // A tensor with other memory, as after resize_() or to(), moves again.
  const at::Tensor wider = at::rand({500});
  region.mark_changing(6);
  region.commit(6, snapshot_of("", {wider, momentum}, {true, true}));
  expect_equal(read_again(file), {"", {wider, momentum}, {}});
}

TEST(StateRegionTest, ASuccessorLivesInTheSameMemory) {
  const base::Fd file = base::make_memory_file("test");
  const at::Tensor expected = at::rand({100, 100});
  {
    StateRegion region(copy_of_fd(file));
    const at::Tensor weight = expected.clone();
    region.commit(7, snapshot_of("seven", {weight, at::zeros({4})}, {true, false}));
  }
  const std::int64_t bytes = file_bytes(file);
  StateRegion region(copy_of_fd(file));
  EXPECT_EQ(region.found(), (CommitWord{Phase::kCommitted, 7}));
  const at::Tensor own = at::zeros({100, 100});
  {
    const auto state = region.read();
    ASSERT_TRUE(state);
    own.copy_(state->tensors[0]);  // as StateAccess::load
  }
  region.commit(7, snapshot_of("seven", {own, at::zeros({4})}, {true, false}));
  EXPECT_LE(file_bytes(file), bytes + (1 << 17)) << "room for a record, and none for a tensor";
  own.add_(1);
  EXPECT_TRUE(at::equal(read_again(file)->tensors[0], expected + 1));
}

TEST(StateRegionTest, ASuccessorWithAnotherStateForgetsWhatItFinds) {
  const base::Fd file = base::make_memory_file("test");
  const at::Tensor weight = at::rand({1000}), newer = at::rand({1000});
  {
    StateRegion region(copy_of_fd(file));
    region.commit(7, snapshot_of("", {weight}, {true}));
    region.mark_changing(8);
  }
  {
    StateRegion region(copy_of_fd(file));
    EXPECT_EQ(region.found(), (CommitWord{Phase::kChanging, 8}));
    EXPECT_FALSE(read_again(file));
    region.forget();
    region.commit(9, snapshot_of("nine", {newer}, {true}));
    expect_equal(read_again(file), {"nine", {newer}, {}});
  }
  // Also after it has read it.
  StateRegion region(copy_of_fd(file));
  const auto state = region.read();
  region.forget();
  EXPECT_EQ(read_commit_word(file), CommitWord{});
  EXPECT_TRUE(at::equal(state->tensors[0], newer)) << "who has it may use it";
  region.commit(10, snapshot_of("ten", {weight.clone()}, {true}));
  expect_equal(read_again(file), {"ten", {weight}, {}});
}

// The oracle is a copy of the state at each commit. Tensors share storages, come, leave and change their
// memory.
TEST(StateRegionTest, AnyStateIsReadAsItWasCommitted) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    std::mt19937_64 random(seed);
    const auto pick = [&](std::uint64_t below) { return random() % below; };
    const auto make = [&] {
      const auto rows = static_cast<std::int64_t>(pick(40)), columns = static_cast<std::int64_t>(pick(30));
      const at::ScalarType types[] = {at::kFloat, at::kLong, at::kBFloat16, at::kBool};
      at::Tensor tensor = at::rand({rows, columns}).mul(100).to(types[pick(4)]);
      if (pick(4) == 0) tensor = tensor.t();
      if (pick(5) == 0 && rows > 1) tensor = tensor.narrow(tensor.size(0) == rows ? 0 : 1, 1, rows - 1);
      if (pick(6) == 0) tensor = at::rand({2, 3, 5, 4}).contiguous(at::MemoryFormat::ChannelsLast);
      return tensor;
    };
    const base::Fd file = base::make_memory_file("test");
    auto region = std::make_unique<StateRegion>(copy_of_fd(file));
    std::vector<at::Tensor> tensors, views;
    std::vector<bool> in_place;
    std::optional<StateSnapshot> oracle;
    for (std::uint64_t step = 1; step <= 12; ++step) {
      region->mark_changing(step);
      for (std::uint64_t k = pick(4); k > 0 || tensors.empty(); k -= k > 0 ? 1 : 0) {
        const bool is_alias = !tensors.empty() && pick(4) == 0;
        tensors.push_back(is_alias ? tensors[pick(tensors.size())].detach() : make());
        in_place.push_back(pick(3) != 0);
        if (tensors.back().numel() > 0) views.push_back(tensors.back().select(0, 0));
      }
      if (pick(4) == 0) tensors[pick(tensors.size())] = make();
      for (const at::Tensor& tensor : tensors) {
        if (tensor.numel() > 0 && tensor.scalar_type() == at::kFloat) tensor.add_(1);
      }
      const StateSnapshot state = snapshot_of(base::concat("step ", step), tensors, in_place);
      const std::vector<at::Tensor> views_before = [&] {
        std::vector<at::Tensor> list;
        for (const at::Tensor& view : views) list.push_back(view.clone());
        return list;
      }();
      oracle = deep_copy(state);
      region->commit(step, state);
      for (std::size_t i = 0; i < views.size(); ++i) ASSERT_TRUE(at::equal(views[i], views_before[i]));
      for (std::size_t i = 0; i < tensors.size(); ++i) ASSERT_TRUE(at::equal(tensors[i], oracle->tensors[i]));
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        const auto shares = [&](const at::Tensor& tensor) {
          return tensor.storage().is_alias_of(tensors[i].storage());
        };
        // As forward of the next step does.
        if (!in_place[i] && std::ranges::count_if(tensors, shares) == 1) tensors[i].fill_(1);
      }
      if (pick(3) == 0) {
        region.reset();  // a successor
        region = std::make_unique<StateRegion>(copy_of_fd(file));
        const auto found = region->read();
        ASSERT_TRUE(found) << "seed " << seed;
        ASSERT_NO_FATAL_FAILURE(expect_equal(found, *oracle)) << "seed " << seed;
        tensors.clear();
        views.clear();
        for (const at::Tensor& tensor : found->tensors) {
          tensors.push_back(pick(3) == 0 ? tensor : tensor.clone());
        }
      } else if (pick(3) == 0) {
        ASSERT_NO_FATAL_FAILURE(expect_equal(read_again(file), *oracle)) << "seed " << seed;
      }
    }
  }
}

TEST(StateRegionTest, WithoutMemoryTheLogSaysSoOnceAndTheStateStays) {
  const base::Fd file = base::make_memory_file("test");
  StateRegion region(copy_of_fd(file));
  const at::Tensor weight = at::rand({1000}), second = at::rand({1'000'000});
  region.commit(1, snapshot_of("", {weight}, {true}));
  ASSERT_EQ(::fcntl(file.get(), F_ADD_SEALS, F_SEAL_GROW), 0);
  const at::Tensor expected = weight.clone();
  LogLines log;
  for (std::uint64_t step = 2; step < 5; ++step) {
    region.mark_changing(step);
    region.commit(step, snapshot_of("", {weight, second}, {true, true}));
    EXPECT_EQ(read_commit_word(file), CommitWord{});
  }
  EXPECT_TRUE(at::equal(weight, expected));
  const std::string line = "the state is in no memory that outlives this process: ";
  EXPECT_NE(log.text.find(line + "[elastic.region] there is no memory for the state"), std::string::npos)
      << log.text;
  EXPECT_EQ(log.text.find(line), log.text.rfind(line)) << log.text;
}

TEST(StateRegionTest, AStateWhoseOwnerNamesNoTensorsIsNotHeld) {
  const base::Fd file = base::make_memory_file("test");
  StateRegion region(copy_of_fd(file));
  LogLines log;
  region.commit(1, snapshot_of("", {at::rand({10})}, {}));
  EXPECT_EQ(read_commit_word(file), CommitWord{});
  EXPECT_NE(log.text.find("does not say which tensors may lie there (StateSnapshot::in_place)"),
            std::string::npos)
      << log.text;
}

// As many tensors as a ResNet-18 with momentum, of COHORT_HIDDEN elements each. Run it alone, and on a build
// with optimisation.
TEST(StateRegionChild, DISABLED_MeasuresWhatACommitTakes) {
  using Clock = std::chrono::steady_clock;
  const std::int64_t elements = base::env_int("COHORT_HIDDEN", 1).value_or(180'000);
  const auto body = torch::nn::Sequential().ptr();
  for (int i = 0; i < 20; ++i) {
    body->push_back(torch::nn::Linear(64, elements / 64));
    body->push_back(torch::nn::BatchNorm1d(512));
  }
  const auto optimizer =
      std::make_shared<optim::SGD>(body->parameters(), optim::SGDOptions(0.1).momentum(0.9));
  for (at::Tensor& parameter : body->parameters()) parameter.mutable_grad() = at::ones_like(parameter);
  optimizer->step();
  const StateAccess access = state_of(body, optimizer);
  const base::Fd file = base::make_memory_file("test");
  StateRegion region(copy_of_fd(file));
  const auto microseconds = [](Clock::time_point begin) {
    return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
  };
  Clock::time_point begin = Clock::now();
  region.commit(1, access.save());
  std::cout << access.save().tensors.size() << " tensors, " << static_cast<double>(file_bytes(file)) / 1e6
            << " MB: they move in " << microseconds(begin) / 1e3 << " ms\n";
  std::vector<double> saves, commits;
  for (std::uint64_t step = 2; step < 500; ++step) {
    region.mark_changing(step);
    begin = Clock::now();
    const StateSnapshot state = access.save();
    saves.push_back(microseconds(begin));
    region.commit(step, state);
    commits.push_back(microseconds(begin));
  }
  for (auto* const times : {&saves, &commits}) std::ranges::sort(*times);
  std::cout << "save: median " << saves[saves.size() / 2] << " us; with the commit: median "
            << commits[commits.size() / 2] << " us, p99 " << commits[commits.size() * 99 / 100] << " us\n";
}

}  // namespace
}  // namespace cohort::elastic
