// Nodes whose messages go through shared memory.
#include <dirent.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <string_view>

#include "cohort/base/secret.h"
#include "cohort/net/node.h"
#include "tests/net/recorder.h"
#include "tests/support/comes_true.h"
#include "tests/support/patience.h"

namespace cohort::net {
namespace {

using test::message_of;
using test::patience;
using test::Worker;

std::string any_local_address() {
  return "unix:@cohort-" + base::random_word();
}

// The descriptors of this process that are memory for links.
int num_memory_files() {
  int count = 0;
  DIR* const folder = ::opendir("/proc/self/fd");
  while (const dirent* const entry = ::readdir(folder)) {
    std::array<char, 64> target{};
    const ssize_t size = ::readlinkat(::dirfd(folder), entry->d_name, target.data(), target.size());
    if (size > 0 && std::string_view(target.data(), static_cast<std::size_t>(size)).starts_with("/memfd:"))
      ++count;
  }
  ::closedir(folder);
  return count;
}

TEST(SharedLinkTest, WithoutMemoryOfEitherSideTheSocketServes) {
  for (const bool a_has : {true, false}) {
    NodeOptions of_a, of_b;
    of_a.shared_memory = a_has;
    of_b.shared_memory = !a_has;
    Worker a("a", of_a), b("b", of_b, true);
    const auto peer = a.node->connect(b.node->listen(any_local_address()), patience());
    for (int i = 0; i < 20; ++i) peer->send(message_of(0, std::to_string(i), 300'000));
    ASSERT_TRUE(test::comes_true([&] { return a.heard->count() == 20; }));
    test::expect_whole(a.heard->take(), 20);
    EXPECT_EQ(num_memory_files(), a_has ? 1 : 0) << "a link's memory is mapped or rejected: a's heap is left";
  }
}

}  // namespace
}  // namespace cohort::net
