#include "cohort/base/exception_text.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "cohort/base/error.h"

namespace cohort::base {
namespace {

TEST(ExceptionTextTest, LibTorchsBacktraceIsCutAndTheLinesOfTheMessageStay) {
  const std::runtime_error error(
      "mat1 and mat2 shapes cannot be multiplied\n(2x3 and 4x5)\n"
      "Exception raised from meta at ../aten/src/ATen/x.cpp:1 (most recent call first):\n"
      "frame #0: c10::Error::Error + 0x80 (0x7f in libc10.so)\n");
  EXPECT_EQ(message_of(error), "mat1 and mat2 shapes cannot be multiplied\n(2x3 and 4x5)");
  EXPECT_EQ(without_backtrace("no\n\nC++ CapturedTraceback:\n#4 f from x.cpp:1\n"), "no");
}

TEST(ExceptionTextTest, TheFileOfABuildMachineIsTakenFromTheFront) {
  EXPECT_EQ(
      without_backtrace("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer"
                        " [127.0.0.1]:4242"),
      "Connection closed by peer [127.0.0.1]:4242");
  EXPECT_EQ(without_backtrace("[a.cpp:1] [b.h:22] why"), "why");
}

TEST(ExceptionTextTest, WhatOnlyLooksAlikeStays) {
  for (const char* text :
       {"[comm.group] what failed", "[127.0.0.1]:99 rejected", "[::1] gone", "[a.cc] why", "[a.cc:1x] why",
        "[a.cc:] why", "[a.txt:12] why", "[a.cc:12]", "[", "", "it said: Exception raised from boredom"}) {
    EXPECT_EQ(without_backtrace(text), text);
  }
  EXPECT_EQ(message_of(DataError("data.idx", "f.idx: got magic 7")), "[data.idx] f.idx: got magic 7");
}

}  // namespace
}  // namespace cohort::base
