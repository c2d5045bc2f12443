#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>

#include "cohort/base/error.h"
#include "cohort/membership/etcd/internal/base64.h"
#include "cohort/membership/etcd/internal/gateway.h"
#include "tests/support/contains.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::membership::etcd {
namespace {

using nlohmann::json;
using test::contains;

// What etcd 3.4 has answered, as the fuzzer begins with it.
std::string sample(const char* name) {
  return test::read_file(test::source_dir() / "tests/fuzz/corpus/etcd" / name);
}

TEST(EtcdGatewayTest, RequestsAreWhatEtcdReads) {
  const std::string key = encode_base64("/k");
  EXPECT_EQ(json::parse(read_request("/k", true)), json({{"key", key}}));
  EXPECT_EQ(json::parse(read_request("/k", false)), json({{"key", key}, {"keys_only", true}}));
  const json swap = json::parse(swap_request("/k", 7, "text", 12));
  EXPECT_EQ(swap.at("/compare/0"_json_pointer),
            json({{"key", key}, {"target", "MOD"}, {"result", "EQUAL"}, {"mod_revision", "7"}}));
  EXPECT_EQ(swap.at("/success/0/request_put"_json_pointer),
            json({{"key", key}, {"value", encode_base64("text")}, {"lease", "12"}}));
  EXPECT_EQ(swap.at("/failure/0/request_range"_json_pointer), json({{"key", key}}));
  EXPECT_FALSE(contains(swap_request("/k", 7, "text", std::nullopt), "lease"));
  EXPECT_EQ(json::parse(watch_request("/k", 8)).at("create_request"),
            json({{"key", key}, {"start_revision", "8"}}));
  EXPECT_EQ(json::parse(login_request("u", "p\"\xff")).at("name"), "u");
}

TEST(EtcdGatewayTest, ReadsWhatThereIs) {
  const ReadAnswer answer = parse_read(sample("read"));
  EXPECT_EQ(answer.header, (Header{14841639068965178418U, 7}));
  EXPECT_EQ(answer.entry, (EtcdKeyValue{7, "{\"cohort_membership\":1}"}));
  EXPECT_EQ(parse_read(sample("read_nothing")).entry, EtcdKeyValue());
  EXPECT_EQ(parse_read(sample("read_keys")).entry, (EtcdKeyValue{7, ""}));
}

TEST(EtcdGatewayTest, ReadsWhetherASwapWasMade) {
  EXPECT_TRUE(parse_swap(sample("swapped")).is_made);
  EXPECT_EQ(parse_swap(sample("swapped")).header.revision, 7U);
  const SwapAnswer conflict = parse_swap(sample("conflict"));
  EXPECT_FALSE(conflict.is_made);
  EXPECT_EQ(conflict.entry.revision, 7U);
}

TEST(EtcdGatewayTest, ReadsLinesOfAWatch) {
  EXPECT_EQ(parse_watch(sample("watch_created")).changed_at, 0U);
  const WatchAnswer put = parse_watch(sample("watch_put"));
  EXPECT_EQ(put.changed_at, 7U);
  EXPECT_EQ(put.entry->text, "{\"cohort_membership\":1}");
  const WatchAnswer gone = parse_watch(sample("watch_delete"));
  EXPECT_EQ(gone.changed_at, 8U);
  EXPECT_FALSE(gone.entry);
  EXPECT_EQ(parse_watch(sample("watch_compacted")).compacted, 5U);
  EXPECT_TRUE(parse_watch(sample("watch_compacted")).is_canceled);
  EXPECT_TRUE(contains(parse_watch(sample("watch_denied")).reason, "permission denied"));
  EXPECT_TRUE(contains(parse_watch(sample("watch_error")).reason, "no leader"));
}

TEST(EtcdGatewayTest, WhatIsNoAnswerIsNamed) {
  COHORT_EXPECT_THROW_WITH(parse_read("<html>"), CommError, "an answer of etcd is no JSON object");
  COHORT_EXPECT_THROW_WITH(parse_read("{}"), CommError, "has no header");
  COHORT_EXPECT_THROW_WITH(parse_read(R"({"header":{"revision":"x"}})"), CommError,
                           "revision that is no number");
  COHORT_EXPECT_THROW_WITH(parse_read(R"({"header":{"revision":-1}})"), CommError,
                           "revision that is no number");
  COHORT_EXPECT_THROW_WITH(parse_read(R"({"header":{},"kvs":[{"mod_revision":"1","value":"?"}]})"), CommError,
                           "no base64");
  COHORT_EXPECT_THROW_WITH(parse_read(R"({"header":{},"kvs":[{"value":""}]})"), CommError,
                           "without a revision");
  COHORT_EXPECT_THROW_WITH(parse_swap(R"({"header":{}})"), CommError, "no response");
  COHORT_EXPECT_THROW_WITH(parse_swap(R"({"header":{},"succeeded":true})"), CommError, "has no revision");
  COHORT_EXPECT_THROW_WITH(parse_watch(R"({"header":{}})"), CommError, "has no result");
  COHORT_EXPECT_THROW_WITH(parse_login(R"({"token":"a\nHost: b"})"), CommError, "has no token");
  COHORT_EXPECT_THROW_WITH(parse_lease("{}"), CommError, "has no lease");
  COHORT_EXPECT_THROW_WITH(parse_read(std::string(100'000, '[')), CommError, "no JSON");
}

TEST(EtcdGatewayTest, ErrorsSayWhatToDo) {
  const Rejection space = parse_rejection(429, sample("error_space"));
  EXPECT_EQ(space.type, Rejection::Type::kOther);
  EXPECT_TRUE(contains(space.text, "database space exceeded. Try: etcd is full"));
  EXPECT_EQ(parse_rejection(401, sample("error_token")).type, Rejection::Type::kLogin);
  const Rejection page = parse_rejection(404, sample("page"));
  EXPECT_EQ(page.type, Rejection::Type::kNoPath);
  EXPECT_TRUE(contains(page.text, "404 page not found")) << page.text;
  EXPECT_TRUE(contains(page.text, "etcd 3.4 or newer"));
  EXPECT_TRUE(contains(parse_rejection(400, sample("https")).text, "it speaks TLS only"));
  EXPECT_TRUE(contains(parse_rejection(503, "\x1b[31m busy\n").text, "status 503 (\" [31m busy\")"));
}

TEST(EtcdGatewayTest, ChangedAnswersAreReadOrRejected) {
  std::mt19937 random(3);
  for (const char* const name : {"read", "conflict", "watch_put", "watch_compacted"}) {
    const std::string whole = sample(name);
    for (int round = 0; round < 1'000; ++round) {
      std::string changed = whole;
      for (std::size_t i = 1 + random() % 3; i > 0; --i) {
        changed[random() % changed.size()] = static_cast<char>(random() % 256);
      }
      try {
        parse_read(changed);
        parse_swap(changed);
        parse_watch(changed);
      } catch (const CommError&) {
      }
    }
  }
}

}  // namespace
}  // namespace cohort::membership::etcd
