#include "cohort/base/secret.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "cohort/base/error.h"
#include "tests/support/environment.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::base {
namespace {

std::filesystem::path write_secret(const test::TempDir& folder, const std::string& bytes,
                                   std::filesystem::perms perms = std::filesystem::perms::owner_read) {
  const auto path = folder.path() / "secret";
  std::filesystem::remove(path);
  std::ofstream(path) << bytes;
  std::filesystem::permissions(path, perms);
  return path;
}

// RFC 4231, test case 6: a key of 131 bytes, longer than a block.
TEST(SecretTest, CodesAreThoseOfTheStandard) {
  const test::TempDir folder;
  const Secret secret = Secret::from_file(write_secret(folder, std::string(131, '\xaa')));
  const std::string text = "Test Using Larger Than Block-Size Key - Hash Key First";
  const std::string code = "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54";
  EXPECT_EQ(secret.code(text), code);
  EXPECT_TRUE(secret.matches(code, text));
  for (std::size_t i = 0; i < code.size(); ++i) {
    std::string other = code;
    other[i] = other[i] == '0' ? '1' : '0';
    EXPECT_FALSE(secret.matches(other, text)) << "digit " << i;
  }
  EXPECT_FALSE(secret.matches(code.substr(1), text));
  EXPECT_FALSE(secret.matches("", text));
  EXPECT_FALSE(secret.matches(code, text + " "));
}

TEST(SecretTest, EachPurposeHasASecretOfItsOwn) {
  const Secret secret = Secret::make();
  std::set<std::string> codes{secret.code("text")};
  for (const char* purpose : {"agents", "ranks", "rank", "", "text"}) {
    codes.insert(secret.derive(purpose).code("text"));
    EXPECT_EQ(secret.derive(purpose).code("text"), secret.derive(purpose).code("text"));
  }
  EXPECT_EQ(codes.size(), 6u);
  EXPECT_NE(secret.derive("a").derive("b").code("text"), secret.derive("b").derive("a").code("text"));
}

TEST(SecretTest, NoTwoAreAlike) {
  std::set<std::string> codes, words;
  for (int i = 0; i < 100; ++i) {
    codes.insert(Secret::make().code("text"));
    words.insert(random_word());
  }
  EXPECT_EQ(codes.size(), 100u);
  EXPECT_EQ(words.size(), 100u);
  EXPECT_EQ(words.begin()->size(), 32u);
}

TEST(SecretTest, AnEditorsLineEndIsNoPartOfIt) {
  const test::TempDir folder;
  const std::string code = Secret::from_file(write_secret(folder, "sixteen bytes ok")).code("text");
  EXPECT_EQ(Secret::from_file(write_secret(folder, "sixteen bytes ok \r\n\n")).code("text"), code);
  EXPECT_NE(Secret::from_file(write_secret(folder, " sixteen bytes ok")).code("text"), code);
}

TEST(SecretTest, AFileThatKeepsNoSecretIsRejected) {
  using std::filesystem::perms;
  const test::TempDir folder;
  const std::string good = "sixteen bytes ok";
  COHORT_EXPECT_THROW_WITH(Secret::from_file(folder.path() / "none"), UsageError,
                           "cannot be read: No such file");
  COHORT_EXPECT_THROW_WITH(Secret::from_file(folder.path()), UsageError, "is no regular file");
  for (const perms extra : {perms::group_read, perms::others_read, perms::others_write}) {
    COHORT_EXPECT_THROW_WITH(Secret::from_file(write_secret(folder, good, perms::owner_read | extra)),
                             UsageError, "chmod 600");
  }
  COHORT_EXPECT_THROW_WITH(Secret::from_file(write_secret(folder, "fifteen bytes..\n")), UsageError,
                           "has 15 bytes, expected 16 to 4096");
  COHORT_EXPECT_THROW_WITH(Secret::from_file(write_secret(folder, "  \n")), UsageError, "has 0 bytes");
  EXPECT_NO_THROW(Secret::from_file(write_secret(folder, std::string(4096, 'a'))));
  COHORT_EXPECT_THROW_WITH(Secret::from_file(write_secret(folder, std::string(4097, 'a'))), UsageError,
                           "has more than 4096 bytes");
  if (::geteuid() == 0) {  // only root can give a file away
    const auto of_another = write_secret(folder, good);
    ASSERT_EQ(::chown(of_another.c_str(), 1000, 1000), 0);
    COHORT_EXPECT_THROW_WITH(Secret::from_file(of_another), UsageError, "belongs to user 1000");
  }
  // A pipe that nobody writes to must not hold anybody up.
  ASSERT_EQ(::mkfifo((folder.path() / "pipe").c_str(), 0600), 0);
  COHORT_EXPECT_THROW_WITH(Secret::from_file(folder.path() / "pipe"), UsageError, "is no regular file");
}

TEST(SecretTest, WhatTheAgentHandsOverComesBeforeAFile) {
  const test::ScopedEnv none("COHORT_SECRET_FD", ""), no_file("COHORT_SECRET_FILE", std::nullopt);
  EXPECT_FALSE(Secret::of_process());
  const test::TempDir folder;
  const test::ScopedEnv file("COHORT_SECRET_FILE", write_secret(folder, "sixteen bytes ok").string());
  const auto of_file = Secret::of_process();
  ASSERT_TRUE(of_file);
  const Secret file_itself = Secret::from_file(folder.path() / "secret");
  EXPECT_EQ(of_file->code("text"), file_itself.for_ranks().code("text"));
  EXPECT_NE(of_file->code("text"), file_itself.code("text")) << "with which agents sign";
  const Secret made = Secret::make();
  const Fd fd = made.to_fd();
  EXPECT_GE(fd.get(), 3);
  const test::ScopedEnv handed_over("COHORT_SECRET_FD", std::to_string(fd.get()));
  for (int i = 0; i < 2; ++i) {  // reading takes nothing away
    const auto handed = Secret::of_process();
    ASSERT_TRUE(handed);
    EXPECT_EQ(handed->code("text"), made.code("text"));
    EXPECT_NE(handed->code("text"), of_file->code("text"));
  }
  EXPECT_LT(::write(fd.get(), "x", 1), 0) << "nobody changes it";
  EXPECT_NE(::ftruncate(fd.get(), 1), 0);
}

TEST(SecretTest, ADescriptorThatIsAnothersByNowIsRejected) {
  const Fd file(::open("/dev/zero", O_RDONLY));
  for (const int fd : {file.get(), 999}) {
    const test::ScopedEnv handed_over("COHORT_SECRET_FD", std::to_string(fd));
    COHORT_EXPECT_THROW_WITH(Secret::of_process(), UsageError, "is no secret of an agent");
  }
  const Fd empty(::memfd_create("empty", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::fcntl(empty.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL), 0);
  const test::ScopedEnv handed_over("COHORT_SECRET_FD", std::to_string(empty.get()));
  COHORT_EXPECT_THROW_WITH(Secret::of_process(), UsageError, "holds no secret of 16 to 4096 bytes");
}

}  // namespace
}  // namespace cohort::base
