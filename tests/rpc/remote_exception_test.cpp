#include "cohort/rpc/remote_exception.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <new>
#include <stdexcept>
#include <string>

#include "cohort/base/error.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

struct OwnError : std::out_of_range {
  using std::out_of_range::out_of_range;
};
struct ErrorOfAModule : Error {
  using Error::Error;
};
struct Unrelated : std::exception {
  const char* what() const noexcept override { return "unrelated"; }
};

template <typename Error>
RemoteException exception_of(Error error) {
  return describe_exception(std::make_exception_ptr(std::move(error)));
}

TEST(RemoteExceptionTest, ErrorsArriveAsWhatTheyWere) {
  COHORT_EXPECT_THROW_WITH(
      throw_remote(exception_of(DataError("data.idx", "bad magic", "another file")), "f on ps/0"), DataError,
      "[rpc.call] f on ps/0: [data.idx] bad magic. Try: another file");
  COHORT_EXPECT_THROW_WITH(throw_remote(exception_of(TimeoutError("comm.wait", "late")), "f on ps/0"),
                           TimeoutError, "[comm.wait] late");
  COHORT_EXPECT_THROW_WITH(throw_remote(exception_of(std::invalid_argument("no")), "f on ps/0"),
                           std::invalid_argument, "f on ps/0: no");
  EXPECT_THROW(throw_remote(exception_of(std::bad_alloc()), "f"), std::bad_alloc);
}

TEST(RemoteExceptionTest, ATypeOfOnesOwnArrivesAsItsNearestBase) {
  EXPECT_EQ(exception_of(OwnError("far")).type, "std::out_of_range");
  COHORT_EXPECT_THROW_WITH(throw_remote(exception_of(OwnError("far")), "f"), std::out_of_range, "f: far");
  COHORT_EXPECT_THROW_WITH(throw_remote(exception_of(Unrelated()), "f"), RemoteError,
                           "[rpc.call] f: unrelated");
  COHORT_EXPECT_THROW_WITH(throw_remote(exception_of(42), "f"), RemoteError, "no std::exception");
  COHORT_EXPECT_THROW_WITH(throw_remote({"NewError", "of a later version"}, "f"), RemoteError,
                           "of a later version");
}

TEST(RemoteExceptionTest, AnErrorOfCohortWithoutARowArrivesAsRemoteError) {
  const RemoteException exception = exception_of(ErrorOfAModule("pipeline.step", "stage 1 failed"));
  EXPECT_EQ(exception.type, "RemoteError");
  COHORT_EXPECT_THROW_WITH(throw_remote(exception, "f on ps/0"), RemoteError,
                           "[rpc.call] f on ps/0: [pipeline.step] stage 1 failed");
}

TEST(RemoteExceptionTest, ALongTextIsCutBetweenTwoCharacters) {
  const std::string end = "... (200001 bytes)";
  std::string text = "x";
  for (int i = 0; i < 100'000; ++i) text += "\u00e9";  // two bytes each, so one of them would be cut
  const RemoteException exception = exception_of(std::runtime_error(text));
  ASSERT_TRUE(exception.text.ends_with(end));
  const std::size_t num_kept = exception.text.size() - end.size();
  EXPECT_EQ(num_kept, 64U * 1024 - 1);
  EXPECT_EQ(exception.text.substr(0, num_kept), text.substr(0, num_kept));
  const std::string fits(64U * 1024, 'y');
  EXPECT_EQ(exception_of(std::runtime_error(fits)).text, fits);
}

TEST(RemoteExceptionTest, LibTorchsErrorsComeWithoutTheirBacktrace) {
  std::exception_ptr error;
  try {
    at::ones({2}).select(0, 5);
  } catch (...) {
    error = std::current_exception();
  }
  const RemoteException exception = describe_exception(error);
  EXPECT_EQ(exception.type, "c10::IndexError");
  EXPECT_NE(exception.text.find("out of range"), std::string::npos);
  EXPECT_EQ(exception.text.find("frame #"), std::string::npos) << exception.text;
  EXPECT_THROW(throw_remote(exception, "f"), c10::IndexError);
}

}  // namespace
}  // namespace cohort::rpc
