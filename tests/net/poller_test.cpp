#include "cohort/net/internal/poller.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>

namespace cohort::net {
namespace {

TEST(PollerTest, ASocketThatAnotherProcessKeepsOpenIsNotReadyForEver) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()), 0);
  base::Fd socket(ends[0]), other(ends[1]);
  const base::Fd of_child(::dup(socket.get()));  // as a process that was forked has it
  Poller poller;
  poller.add(socket.get(), 7, {true, false});
  EXPECT_FALSE(poller.next_ready());
  ASSERT_EQ(::write(other.get(), "x", 1), 1);
  const std::optional<Poller::Ready> ready = poller.next_ready();
  ASSERT_TRUE(ready);
  EXPECT_EQ(ready->key, 7U);
  EXPECT_TRUE(ready->is_readable);
  poller.change(socket.get(), 7, {false, true});
  EXPECT_TRUE(poller.next_ready()->is_writable);
  poller.remove(socket.get());
  socket.close();
  EXPECT_FALSE(poller.next_ready());
}

}  // namespace
}  // namespace cohort::net
