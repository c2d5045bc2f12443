#include <gtest/gtest.h>
#include <sys/stat.h>

#include <functional>

#include "cohort/base/error.h"
#include "cohort/membership/etcd_store.h"
#include "tests/membership/store_user.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::membership {
namespace {

TEST(EtcdOptionsTest, EndpointsAreHostsWithPorts) {
  using Endpoints = std::vector<std::string>;
  EXPECT_EQ(parse_etcd_endpoints("e1:2379"), Endpoints({"e1:2379"}));
  EXPECT_EQ(parse_etcd_endpoints("e1,10.0.0.2:80,[::1]:90,[fe80::1%eth0]"),
            Endpoints({"e1:2379", "10.0.0.2:80", "[::1]:90", "[fe80::1%eth0]:2379"}));
  for (const char* const text : {"", ",", "e1:", ":2379", "e1:0", "e1:65536", "e1:x", "e1:1,", "e 1",
                                 "e1:1:2", "::1", "[::1", "[]:1", "e1/x", "user@e1:1"}) {
    COHORT_EXPECT_THROW_WITH(parse_etcd_endpoints(text), UsageError, "expected host:port");
  }
  COHORT_EXPECT_THROW_WITH(parse_etcd_endpoints("https://e1:2379"), UsageError,
                           "protocol=https asks for TLS");
}

TEST(EtcdOptionsTest, OptionsThatCannotBeAreRejected) {
  const test::TempDir folder;
  test::write_file(folder / "open", "word");
  test::write_file(folder / "private", "word");
  test::write_file(folder / "empty", "\n");
  for (const char* const name : {"private", "empty"}) ASSERT_EQ(::chmod((folder / name).c_str(), 0600), 0);
  const auto expect = [&](const std::function<void(EtcdOptions&)>& change, const char* part) {
    EtcdOptions options;
    options.endpoints = {"127.0.0.1:1"};
    change(options);
    COHORT_EXPECT_THROW_WITH(make_etcd_store(options), UsageError, part);
  };
  expect([](EtcdOptions& options) { options.endpoints.clear(); }, "etcd has no endpoint");
  expect([](EtcdOptions& options) { options.run_id.clear(); }, "the run has no id");
  expect([&](EtcdOptions& options) { options.authorities = folder / "open"; }, "TLS is not asked for");
  const auto with_tls = [&](const std::function<void(EtcdOptions&)>& change) {
    return [=](EtcdOptions& options) {
      options.is_tls = true;
      change(options);
    };
  };
  expect(with_tls([&](EtcdOptions& options) { options.authorities = folder / "none"; }), "is no file");
  expect(with_tls([&](EtcdOptions& options) { options.key = folder / "private"; }), "goes with its key");
  expect(with_tls([&](EtcdOptions& options) { options.certificate = options.key = folder / "open"; }),
         "may be read by others");
  expect([](EtcdOptions& options) { options.user = "u"; }, "goes with the file of its password");
  const auto with_password = [&](const char* name) {
    return [&folder, name](EtcdOptions& options) {
      options.user = "u";
      options.password_file = folder / name;
    };
  };
  expect(with_password("none"), "cannot be read");
  expect(with_password("open"), "may be read by others");
  expect(with_password("empty"), "is empty");
  expect([](EtcdOptions& options) { options.swap_timeout = std::chrono::milliseconds(0); }, "time limit");
}

TEST(EtcdOptionsTest, APasswordThatGoesAsItIsIsWarnedOf) {
  const test::TempDir folder;
  test::write_file(folder / "private", "word");
  ASSERT_EQ(::chmod((folder / "private").c_str(), 0600), 0);
  EtcdOptions options;
  options.endpoints = {"127.0.0.1:1"};
  options.user = "me";
  options.password_file = folder / "private";
  const test::LogLines log;
  EXPECT_THROW(make_etcd_store(options), UsageError) << "there is no libcurl here";
  EXPECT_EQ(log.count("the password of etcd's user me goes over the network as it is"), 1U) << log.text();
  options.is_tls = true;
  EXPECT_THROW(make_etcd_store(options), UsageError);
  EXPECT_EQ(log.count("goes over the network"), 1U) << log.text();
}

// This program has no_curl.cpp, as a build without libcurl has it.
TEST(EtcdOptionsTest, ABuildWithoutLibcurlSaysSo) {
  EtcdOptions options;
  options.endpoints = {"127.0.0.1:1"};
  EXPECT_EQ(etcd_absent(), "no libcurl was found when it was built");
  COHORT_EXPECT_THROW_WITH(make_etcd_store(options), UsageError,
                           "rendezvous over etcd is not in this build: no libcurl was found");
}

}  // namespace
}  // namespace cohort::membership
