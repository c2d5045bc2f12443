// Collectives of backends of ours in LibTorch's profiler.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "tests/support/ranks.h"

namespace cohort::comm {
namespace {

struct Seen {
  int begun = 0, ended = 0;
  std::int64_t bytes = 0;
  std::string group;
};

struct Observed : at::ObserverContext {
  std::string name;
};

std::mutex mutex;
std::map<std::string, Seen> seen;  // under the mutex

TEST(ProfiledCallTest, CollectivesAreSeenWithTheirBytesAndGroup) {
  const auto handle =
      at::addGlobalCallback(at::RecordFunctionCallback(
                                [](const at::RecordFunction& record) -> std::unique_ptr<at::ObserverContext> {
                                  const std::string name = record.name();
                                  if (!name.starts_with("shm:")) return nullptr;
                                  const std::lock_guard lock(mutex);
                                  Seen& call = seen[name];
                                  ++call.begun;
                                  const auto inputs = record.inputs();
                                  call.bytes = inputs[inputs.size() - 2].toInt();
                                  call.group = inputs.back().toStringRef();
                                  auto context = std::make_unique<Observed>();
                                  context->name = name;
                                  return context;
                                },
                                [](const at::RecordFunction& /*record*/, at::ObserverContext* context) {
                                  if (context == nullptr) return;
                                  const std::lock_guard lock(mutex);
                                  ++seen[static_cast<Observed*>(context)->name].ended;
                                })
                                .needsInputs(true)
                                .scopes({at::RecordScope::USER_SCOPE}));
  test::run_ranks(
      2, "shm",
      [](Group& group) {
        at::Tensor t = at::ones({100}), both = at::ones({200});
        group.all_reduce(t).wait();
        group.broadcast(t, 1).wait();
        group.all_gather(both, t).wait();
        group.reduce_scatter(t, both).wait();
        if (group.rank() == 0) {
          group.send(t, 1).wait();
        } else {
          group.recv(t, 0).wait();
        }
        group.all_reduce(both).wait();
      },
      std::chrono::seconds(20), Check::kOff);
  at::removeCallback(handle);
  const std::lock_guard lock(mutex);
  for (const char* name : {"shm:broadcast", "shm:all_gather", "shm:reduce_scatter"}) {
    EXPECT_EQ(seen[name].begun, 2) << name;
    EXPECT_EQ(seen[name].ended, 2) << name;
    EXPECT_EQ(seen[name].group, "world") << name;
  }
  EXPECT_EQ(seen["shm:send"].ended, 1);
  EXPECT_EQ(seen["shm:recv"].ended, 1);
  EXPECT_EQ(seen["shm:send"].bytes, 400);
  EXPECT_EQ(seen["shm:all_reduce"].begun, seen["shm:all_reduce"].ended);
  EXPECT_EQ(seen["shm:all_reduce"].bytes, 800) << "of the last one";
  EXPECT_EQ(seen["shm:all_gather"].bytes, 800);
}

}  // namespace
}  // namespace cohort::comm
