#include "cohort/net/internal/socket.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "cohort/base/secret.h"

namespace cohort::net {
namespace {

// A node that took another error for its own shortage of descriptors would drop a handshake.
TEST(SocketTest, AConnectionOfAnotherUserIsRejectedWithItsOwnError) {
  std::string bound;
  const base::Fd listener = listen_at(resolve("unix:@cohort-" + base::random_word()), bound);
  const SocketAddress address = resolve(bound);
  if (::geteuid() == 0) {  // only root can be another user
    const pid_t stranger = ::fork();
    if (stranger == 0) ::_exit(::setuid(65534) == 0 && start_connect(address).is_open() ? 0 : 1);
    int status = -1;
    ASSERT_EQ(::waitpid(stranger, &status, 0), stranger);
    ASSERT_EQ(status, 0);
    errno = EMFILE;  // left by an earlier call
    const base::Fd rejected = accept_from(listener.get());
    const int error = errno;
    EXPECT_FALSE(rejected.is_open());
    EXPECT_EQ(error, EACCES);
  }
  const base::Fd own = start_connect(address);
  EXPECT_TRUE(accept_from(listener.get()).is_open());
  const base::Fd none = accept_from(listener.get());
  const int error = errno;
  EXPECT_FALSE(none.is_open());
  EXPECT_EQ(error, EAGAIN);
}

}  // namespace
}  // namespace cohort::net
