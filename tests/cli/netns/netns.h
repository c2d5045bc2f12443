#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "tests/cli/netns/virtual_hosts.h"

namespace cohort::test {

/// Tests on virtual hosts. Where there can be none they are skipped, but not as root in CI.
class NetnsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string failure;
    try {
      const VirtualHosts host(1);
    } catch (const std::runtime_error& error) {
      failure = error.what();
    }
    if (failure.empty()) return;
    if (::geteuid() == 0 && std::getenv("CI") != nullptr)
      FAIL() << "netns tests must not skip in CI: " << failure;
    GTEST_SKIP() << "netns: no hosts of their own here: " << failure;
  }
};

}  // namespace cohort::test
