#include "cohort/data/loader.h"

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <numeric>
#include <set>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/data/tensor_dataset.h"
#include "tests/support/comes_true.h"
#include "tests/support/throws.h"

namespace cohort::data {
namespace {

using std::chrono::milliseconds;

std::shared_ptr<TensorDataset> rows(std::int64_t size) {
  return std::make_shared<TensorDataset>(
      std::vector<at::Tensor>{at::arange(size * 3, at::kFloat).reshape({size, 3}), at::arange(size)});
}

// Samples that depend on chance, and that can fail, dawdle or hang by index.
class Moody : public ExampleDataset {
 public:
  explicit Moody(std::int64_t size) : size_(size) {}
  std::int64_t size() const override { return size_; }
  std::vector<at::Tensor> get(std::int64_t index, base::RandomStream& random) const override {
    if (index == hang_at) {
      std::unique_lock lock(mutex_);
      hangs = true;
      wake_.wait(lock, [&] { return released_; });
    }
    if (index == fail_at || (fail_every > 0 && index % fail_every == 0 && index > 0)) {
      throw std::runtime_error("cannot decode");
    }
    if (slow_every > 0 && index % slow_every == 0) std::this_thread::sleep_for(milliseconds(2));
    most_threads = std::max(most_threads.load(), at::get_num_threads());
    ++reads;
    {
      std::unique_lock lock(mutex_);
      readers_.insert(std::this_thread::get_id());
      wake_.notify_all();
      wake_.wait_for(lock, std::chrono::seconds(20), [&] { return readers_.size() >= readers_awaited; });
    }
    return {at::full({2}, random.uniform()), at::scalar_tensor(index, at::kLong)};
  }
  std::string describe(std::int64_t index) const override { return "moody/" + std::to_string(index); }
  std::size_t readers() const { return readers_.size(); }
  void release() {
    const std::lock_guard lock(mutex_);
    released_ = true;
    wake_.notify_all();
  }

  std::int64_t fail_at = -1, fail_every = 0, slow_every = 0, hang_at = -1;
  std::size_t readers_awaited =
      0;  // a sample is there when so many threads have read, however busy the machine
  mutable std::atomic<int> most_threads{0}, reads{0};
  mutable std::atomic<bool> hangs{false};

 private:
  std::int64_t size_;
  mutable std::mutex mutex_;
  mutable std::condition_variable wake_;
  mutable std::set<std::thread::id> readers_;
  bool released_ = false;
};

struct Taken {
  std::vector<std::int64_t> targets;
  std::vector<float> inputs;
  std::vector<std::int64_t> sizes;
  bool operator==(const Taken&) const = default;
};

void take(Loader& loader, Taken& taken, std::int64_t batches = 1 << 30) {
  for (std::int64_t i = 0; i < batches; ++i) {
    auto batch = loader.next();
    if (!batch) return;
    taken.sizes.push_back(batch->size);
    const at::Tensor target = batch->target().contiguous(), input = batch->input().contiguous();
    EXPECT_EQ(target.size(0), batch->size);
    EXPECT_EQ(batch->indices.size(), static_cast<std::size_t>(batch->size));
    const auto* t = target.const_data_ptr<std::int64_t>();
    taken.targets.insert(taken.targets.end(), t, t + target.numel());
    const auto* x = input.const_data_ptr<float>();
    taken.inputs.insert(taken.inputs.end(), x, x + input.numel());
  }
}

Taken take_epoch(const std::shared_ptr<const Dataset>& dataset, const LoaderOptions& options,
                 std::int64_t epoch = 0) {
  Loader loader(dataset, options);
  loader.set_epoch(epoch);
  Taken taken;
  take(loader, taken);
  return taken;
}

TEST(LoaderTest, ReadsInOrderWithAShortLastBatch) {
  for (const int workers : {0, 1, 3}) {
    const Taken taken = take_epoch(rows(10), {.batch_size = 4, .workers = workers});
    EXPECT_EQ(taken.targets, (std::vector<std::int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
    EXPECT_EQ(taken.sizes, (std::vector<std::int64_t>{4, 4, 2}));
    EXPECT_EQ(taken.inputs.back(), 29.0F);
  }
}

TEST(LoaderTest, DropLastLeavesTheShortBatchOut) {
  Loader loader(rows(10), {.batch_size = 4, .drop_last = true});
  EXPECT_EQ(loader.batches_per_epoch(), 2);
  Taken taken;
  take(loader, taken);
  EXPECT_EQ(taken.sizes, (std::vector<std::int64_t>{4, 4}));
}

TEST(LoaderTest, EpochsFollowOneAnother) {
  auto dataset = std::make_shared<Moody>(20);
  for (const int workers : {0, 2}) {
    const LoaderOptions options{.batch_size = 8, .workers = workers, .shuffle = true, .seed = 3};
    Loader loader(dataset, options);
    for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
      Taken taken;
      take(loader, taken);
      EXPECT_EQ(taken, take_epoch(dataset, options, epoch)) << "epoch " << epoch;
      EXPECT_EQ(loader.state(), (LoaderState{epoch, 20, 20}));
    }
    // Restored to the end of an epoch: nothing is left of it, then comes the next.
    Loader resumed(dataset, options);
    resumed.restore(loader.state());
    EXPECT_FALSE(resumed.next().has_value());
    EXPECT_EQ(resumed.next()->epoch, 3);
    // Who says the epoch gets that one, at its end as well as within another.
    loader.set_epoch(1);
    loader.next();
    loader.set_epoch(1);
    Taken taken;
    take(loader, taken);
    EXPECT_EQ(taken, take_epoch(dataset, options, 1));
  }
}

TEST(LoaderTest, EpochsFollowOneAnotherOnEachRank) {
  // Nine samples over two ranks: one of them ends its epoch with an empty share.
  std::vector<Taken> ranks(2);
  for (std::int64_t rank = 0; rank < 2; ++rank) {
    Loader loader(rows(9),
                  {.batch_size = 2, .rank = rank, .world_size = 2, .last_batch = LastBatchPolicy::kKeep});
    for (int epoch = 0; epoch < 2; ++epoch) take(loader, ranks[static_cast<std::size_t>(rank)]);
  }
  EXPECT_EQ(ranks[0].sizes, (std::vector<std::int64_t>{2, 2, 1, 2, 2, 1}));
  EXPECT_EQ(ranks[1].sizes, (std::vector<std::int64_t>{2, 2, 0, 2, 2, 0}));
}

TEST(LoaderTest, SameBatchesForAnyNumberOfWorkers) {
  auto dataset = std::make_shared<Moody>(203);
  dataset->slow_every = 17;
  LoaderOptions options{.batch_size = 16, .shuffle = true, .seed = 5};
  const Taken expected = take_epoch(dataset, options, 3);
  ASSERT_EQ(expected.targets.size(), 203U);
  for (const int workers : {1, 2, 8}) {
    for (const int prefetch : {1, 4}) {
      options.workers = workers;
      options.prefetch = prefetch;
      EXPECT_EQ(take_epoch(dataset, options, 3), expected) << workers << " workers, prefetch " << prefetch;
    }
  }
  EXPECT_NE(take_epoch(dataset, options, 4).targets, expected.targets);
}

TEST(LoaderTest, WithoutWorkersTheComputeThreadsReadTheSameBatches) {
  auto dataset = std::make_shared<Moody>(50);
  const LoaderOptions options{.batch_size = 16, .shuffle = true, .seed = 5};
  at::set_num_threads(1);
  const Taken expected = take_epoch(dataset, options, 3);
  EXPECT_EQ(dataset->readers(), 1U);
  at::set_num_threads(2);
  dataset->readers_awaited = 2;
  EXPECT_EQ(take_epoch(dataset, options, 3), expected);
  EXPECT_EQ(dataset->readers(), 2U);
  dataset->fail_every = 5;
  {
    Loader loader(dataset, {.batch_size = 50});
    COHORT_EXPECT_THROW_WITH(loader.next(), DataError, "moody/5: ");
  }
  at::set_num_threads(1);
}

TEST(LoaderTest, RanksTogetherReadTheGlobalBatch) {
  auto dataset = std::make_shared<Moody>(60);
  const Taken whole = take_epoch(dataset, {.batch_size = 12, .shuffle = true, .seed = 2});
  std::vector<Taken> ranks;
  for (std::int64_t rank = 0; rank < 3; ++rank) {
    ranks.push_back(take_epoch(dataset, {.batch_size = 4,
                                         .workers = static_cast<int>(rank),
                                         .shuffle = true,
                                         .seed = 2,
                                         .rank = rank,
                                         .world_size = 3}));
  }
  for (std::size_t i = 0; i < whole.targets.size(); ++i) {
    EXPECT_EQ(ranks[i % 3].targets.at(i / 3), whole.targets[i]);
    EXPECT_EQ(ranks[i % 3].inputs.at(i / 3 * 2), whole.inputs[i * 2]);
  }
}

TEST(LoaderTest, KeepReadsEverySampleOnceOverUnevenRanks) {
  std::vector<std::int64_t> seen;
  for (std::int64_t rank = 0; rank < 3; ++rank) {
    const Taken taken = take_epoch(
        rows(10), {.batch_size = 3, .rank = rank, .world_size = 3, .last_batch = LastBatchPolicy::kKeep});
    seen.insert(seen.end(), taken.targets.begin(), taken.targets.end());
  }
  std::ranges::sort(seen);
  std::vector<std::int64_t> all(10);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(seen, all);
}

TEST(LoaderTest, ContinuesFromAStateWithAnyNumberOfWorkers) {
  auto dataset = std::make_shared<Moody>(100);
  LoaderOptions options{.batch_size = 8, .shuffle = true, .seed = 9};
  const Taken straight = take_epoch(dataset, options, 2);
  for (const int before : {0, 2}) {
    for (const int after : {0, 1, 8}) {
      Taken taken;
      LoaderState state;
      options.workers = before;
      {
        Loader loader(dataset, options);
        loader.set_epoch(2);
        take(loader, taken, 5);
        state = loader.state();
      }
      EXPECT_EQ(state, (LoaderState{2, 40, 100}));
      options.workers = after;
      Loader loader(dataset, options);
      loader.restore(state);
      take(loader, taken);
      EXPECT_EQ(taken, straight);
    }
  }
}

TEST(LoaderTest, ContinuesWithAnotherNumberOfRanks) {
  auto dataset = std::make_shared<Moody>(48);
  LoaderOptions options{.batch_size = 8, .shuffle = true, .seed = 1};
  const Taken straight = take_epoch(dataset, options);
  Taken first;
  Loader loader(dataset, options);
  take(loader, first, 2);
  std::vector<Taken> rest(2);
  for (std::int64_t rank = 0; rank < 2; ++rank) {
    LoaderOptions half = options;
    half.batch_size = 4;
    half.rank = rank;
    half.world_size = 2;
    Loader other(dataset, half);
    other.restore(loader.state());
    take(other, rest[static_cast<std::size_t>(rank)]);
  }
  for (std::size_t i = 16; i < 48; ++i) {
    EXPECT_EQ(rest[i % 2].targets.at((i - 16) / 2), straight.targets[i]);
    EXPECT_EQ(rest[i % 2].inputs.at((i - 16) / 2 * 2), straight.inputs[i * 2]);
  }
}

TEST(LoaderTest, ReusesItsBatches) {
  for (const int workers : {0, 2}) {
    Loader loader(rows(1000), {.batch_size = 10, .workers = workers, .prefetch = 3});
    std::optional<Batch> batch;
    for (int i = 0; i < 2; ++i) batch = loader.next();
    const std::int64_t after_second = loader.counters().buffer_allocations;
    EXPECT_LE(after_second, workers == 0 ? 2 : 5);
    for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
      while ((batch = loader.next())) {
      }
      loader.set_epoch(epoch);
    }
    EXPECT_EQ(loader.counters().buffer_allocations, after_second);
    EXPECT_EQ(loader.counters().batches, 2 + 98 + 100 + 100);
  }
}

TEST(LoaderTest, ReadsAheadAsFarAsAskedAndNoFurther) {
  auto dataset = std::make_shared<Moody>(1000);
  dataset->fields();
  dataset->reads = 0;
  Loader loader(dataset, {.batch_size = 10, .workers = 2, .prefetch = 3});
  const auto stops_at = [&](int reads) {
    for (int i = 0; i < 10000 && dataset->reads < reads; ++i) std::this_thread::sleep_for(milliseconds(1));
    std::this_thread::sleep_for(milliseconds(20));
    return dataset->reads == reads;
  };
  loader.start();
  EXPECT_TRUE(stops_at(40)) << dataset->reads;
  EXPECT_EQ(loader.counters().batches, 0);
  loader.next();  // the batch is there: another is begun when the next one is taken
  loader.next();
  EXPECT_TRUE(stops_at(50)) << dataset->reads;
  EXPECT_GT(loader.counters().wait.count(), 0);
  EXPECT_EQ(loader.counters().samples, 20);
  EXPECT_EQ(loader.state().samples_consumed, 20);
}

TEST(LoaderTest, ATensorThatWasKeptStaysValid) {
  Loader loader(rows(40), {.batch_size = 4, .workers = 1});
  std::vector<at::Tensor> kept;
  while (auto batch = loader.next()) kept.push_back(batch->target().narrow(0, 1, 2));
  for (std::size_t i = 0; i < kept.size(); ++i) {
    EXPECT_EQ(kept[i][0].item<std::int64_t>(), static_cast<std::int64_t>(i) * 4 + 1);
  }
}

TEST(LoaderTest, AnUnreadableSampleIsNamed) {
  auto dataset = std::make_shared<Moody>(40);
  dataset->fail_at = 21;
  for (const int workers : {0, 3}) {
    Loader loader(dataset, {.batch_size = 8, .workers = workers});
    Taken taken;
    take(loader, taken, 2);
    COHORT_EXPECT_THROW_WITH(loader.next(), DataError, "moody/21: cannot decode");
    COHORT_EXPECT_THROW_WITH(loader.next(), DataError, "moody/21: cannot decode");
    EXPECT_EQ(loader.state().samples_consumed, 16);
    dataset->fail_at = -1;  // repaired: the batch comes whole
    take(loader, taken);
    EXPECT_EQ(taken.targets.size(), 40U);
    dataset->fail_at = 21;
  }
}

TEST(LoaderTest, TheFirstOfSeveralUnreadableSamplesIsNamed) {
  auto dataset = std::make_shared<Moody>(64);
  dataset->fail_every = 5;
  dataset->slow_every = 5;
  Loader loader(dataset, {.batch_size = 64, .workers = 8});
  COHORT_EXPECT_THROW_WITH(loader.next(), DataError, "moody/5: ");
}

TEST(LoaderTest, SkippingCompactsTheBatchAndCounts) {
  auto dataset = std::make_shared<Moody>(20);
  dataset->fail_every = 6;
  Taken reference;
  for (const int workers : {0, 4}) {
    Loader loader(dataset, {.batch_size = 8, .workers = workers, .on_error = OnError::kSkip});
    Taken taken;
    take(loader, taken);
    EXPECT_EQ(taken.sizes, (std::vector<std::int64_t>{7, 7, 3}));
    EXPECT_EQ(taken.targets,
              (std::vector<std::int64_t>{0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 13, 14, 15, 16, 17, 19}));
    EXPECT_EQ(loader.counters().samples_skipped, 3);
    ASSERT_EQ(loader.skipped().size(), 3U);
    EXPECT_EQ(loader.skipped()[1].index, 12);
    EXPECT_EQ(loader.skipped()[1].what, "moody/12: cannot decode");
    EXPECT_EQ(loader.state().samples_consumed, 20);
    if (workers == 0) reference = taken;
    EXPECT_EQ(taken, reference);
    loader.set_epoch(1);
    take(loader, taken);
    EXPECT_EQ(loader.counters().samples_skipped, 6);
    EXPECT_EQ(loader.skipped().size(), 3U);
  }
}

TEST(LoaderTest, AnEpochWithoutAReadableSampleIsAnError) {
  auto dataset = std::make_shared<Moody>(1);
  dataset->fields();
  dataset->fail_at = 0;
  Loader loader(dataset, {.on_error = OnError::kSkip});
  COHORT_EXPECT_THROW_WITH(loader.next(), DataError, "every sample was skipped (1), the first: moody/0");
}

TEST(LoaderTest, TheRestOfAnEpochMayHaveNoReadableSample) {
  auto dataset = std::make_shared<Moody>(3);
  dataset->fail_at = 2;
  Loader loader(dataset, {.batch_size = 2, .on_error = OnError::kSkip});
  loader.restore({.epoch = 0, .samples_consumed = 2});
  EXPECT_FALSE(loader.next());
  EXPECT_TRUE(loader.next()) << "of the next epoch";
}

TEST(LoaderTest, AStuckSampleIsNamedAndDoesNotHangTheDestructor) {
  auto dataset = std::make_shared<Moody>(30);
  dataset->fields();  // reads sample 0
  dataset->reads = 0;
  dataset->hang_at = 13;
  const auto begin = std::chrono::steady_clock::now();
  {
    Loader loader(
        dataset,
        {.batch_size = 10, .workers = 2, .timeout = milliseconds(200), .stop_grace = milliseconds(100)});
    loader.start();
    test::wait_until([&] { return dataset->hangs && dataset->reads == 29; });  // all but the one that hangs
    EXPECT_TRUE(loader.next().has_value());
    COHORT_EXPECT_THROW_WITH(loader.next(), TimeoutError, "has been reading moody/13 for");
    COHORT_EXPECT_THROW_WITH(loader.set_epoch(1), TimeoutError,
                             "batch 1 of epoch 0 was not ready after 200 ms");
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  dataset->release();
  while (dataset.use_count() > 1) std::this_thread::sleep_for(milliseconds(1));  // the thread has ended
}

TEST(LoaderTest, CanBeDestroyedWhileItReads) {
  auto dataset = std::make_shared<Moody>(1000);
  dataset->slow_every = 1;
  for (int i = 0; i < 10; ++i) {
    Loader loader(dataset, {.batch_size = 50, .workers = 4});
    if (i % 2 == 0) {
      loader.start();
    } else {
      loader.next();
    }
    if (i % 3 == 0) loader.set_epoch(i);
  }
}

TEST(LoaderTest, ABatchOutlivesItsLoader) {
  std::optional<Batch> batch;
  {
    Loader loader(rows(8), {.batch_size = 4, .workers = 2});
    batch = loader.next();
  }
  EXPECT_EQ(batch->target().sum().item<std::int64_t>(), 6);
  EXPECT_EQ(batch->indices[3], 3);
}

TEST(LoaderTest, WorkersRunTensorOperationsOnOneThread) {
  at::set_num_threads(4);
  auto dataset = std::make_shared<Moody>(64);
  dataset->fields();  // reads sample 0 on this thread
  EXPECT_EQ(dataset->most_threads.exchange(0), 4);
  take_epoch(dataset, {.batch_size = 16, .workers = 3});
  EXPECT_EQ(dataset->most_threads.load(), 1);
  EXPECT_EQ(at::get_num_threads(), 4);
  at::set_num_threads(1);
}

TEST(LoaderTest, PinnedMemoryWithoutAnAcceleratorIsSaidOnce) {
  // Of the process, as the warning is: --gtest_repeat runs this again. No other test here pins.
  static int lines = 0;
  base::set_log_sink(
      [](base::LogLevel, std::string_view line) { lines += line.find("pin_memory") != line.npos; });
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(take_epoch(rows(4), {.batch_size = 2, .pin_memory = true}).targets.size(), 4U);
  }
  base::set_log_sink({});
  const bool accelerated =
      at::accelerator::getAccelerator().has_value() && at::accelerator::deviceCount() > 0;
  EXPECT_EQ(lines, accelerated ? 0 : 1);
}

// A sampler of the user's that is wrong.
class Fixed : public Sampler {
 public:
  explicit Fixed(std::vector<std::int64_t> order, std::int64_t size = -1)
      : order_(std::move(order)), size_(size < 0 ? std::ssize(order_) : size) {}
  std::int64_t size() const override { return size_; }
  std::vector<std::int64_t> order(std::int64_t) const override { return order_; }

 private:
  std::vector<std::int64_t> order_;
  std::int64_t size_;
};

TEST(LoaderTest, AnOrderThatDoesNotFitTheDatasetIsRejected) {
  for (const int workers : {0, 2}) {
    const auto rejection = [&](std::shared_ptr<const Sampler> sampler, const std::string& message) {
      Loader loader(rows(8), {.batch_size = 2, .workers = workers, .sampler = std::move(sampler)});
      COHORT_EXPECT_THROW_WITH(loader.next(), UsageError, message);
      COHORT_EXPECT_THROW_WITH(loader.next(), UsageError, message);
    };
    rejection(std::make_shared<Fixed>(std::vector<std::int64_t>{7, 1000000}),
              "Fixed: order(0) has index 1000000 at position 1, expected 0 to 7: the dataset has 8 samples");
    rejection(std::make_shared<Fixed>(std::vector<std::int64_t>{8}), "has index 8 at position 0");
    rejection(std::make_shared<Fixed>(std::vector<std::int64_t>{0, 1, -1}), "has index -1 at position 2");
    rejection(std::make_shared<Fixed>(std::vector<std::int64_t>{0, 1}, 8), "has 2 indices, expected 8");
    rejection(std::make_shared<DistributedSampler>(9, DistributedSamplerOptions{}),
              "DistributedSampler: order(0)");
  }
  EXPECT_EQ(take_epoch(rows(8), {.batch_size = 2,
                                 .sampler = std::make_shared<Fixed>(std::vector<std::int64_t>{7, 0, 7})})
                .targets,
            (std::vector<std::int64_t>{7, 0, 7}));
}

TEST(LoaderTest, RejectsWhatCannotBe) {
  COHORT_EXPECT_THROW_WITH(Loader(rows(4), {.batch_size = 0}), UsageError, "batch_size is 0");
  COHORT_EXPECT_THROW_WITH(Loader(rows(4), {.workers = -1}), UsageError, "workers is -1");
  COHORT_EXPECT_THROW_WITH(Loader(rows(4), {.workers = 1, .prefetch = 0}), UsageError, "prefetch is 0");
  COHORT_EXPECT_THROW_WITH(Loader(rows(4), {.rank = 2, .world_size = 2}), UsageError,
                           "rank is 2, expected 0 to 1");
  COHORT_EXPECT_THROW_WITH(Loader(rows(0), {}), UsageError, "no samples");
  COHORT_EXPECT_THROW_WITH(Loader(nullptr, {}), UsageError, "no dataset");
  Loader loader(rows(4), {});
  COHORT_EXPECT_THROW_WITH(loader.set_epoch(-1), UsageError, "epoch is -1");
  COHORT_EXPECT_THROW_WITH(loader.restore({0, 2, 5}), DataError,
                           "had 5 samples when the state was saved, and has 4");
}

}  // namespace
}  // namespace cohort::data
