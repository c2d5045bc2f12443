#include "cohort/checkpoint/manifest.h"

#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::checkpoint {
namespace {

using nlohmann::json;

/// The text of `document` with the checksum that it should have.
std::string with_checksum(json document) {
  document.erase("xxh3_64");
  const std::string text = document.dump();
  document["xxh3_64"] = checksum_text(checksum(std::as_bytes(std::span(text.data(), text.size()))));
  return document.dump();
}

json valid() {
  Manifest manifest;
  manifest.sequence = 3;
  manifest.name = "epoch_3";
  manifest.best = "epoch_2";
  manifest.given_up = {{1, 1}, {5, 7}};
  manifest.files["model.safetensors"] = {.bytes = 12, .checksum = 0xab};
  manifest.state = {{"epoch", 3}};
  return json::parse(manifest_text(manifest));
}

TEST(ManifestTest, WhatWasWrittenIsRead) {
  const Manifest manifest = parse_manifest(valid().dump(), "state.json");
  EXPECT_EQ(manifest.sequence, 3);
  EXPECT_EQ(manifest.name, "epoch_3");
  EXPECT_EQ(manifest.best, "epoch_2");
  EXPECT_EQ(manifest.given_up, (std::vector<SequenceRange>{{1, 1}, {5, 7}}));
  EXPECT_EQ(manifest.files.at("model.safetensors").bytes, 12u);
  EXPECT_EQ(manifest.files.at("model.safetensors").checksum, 0xabu);
  EXPECT_EQ(manifest.state, (json{{"epoch", 3}}));
}

// Every text has the right checksum: its writer was hostile, not careless.
TEST(ManifestTest, LyingFieldsAreRejected) {
  struct Lie {
    const char* pointer;
    json value;
    const char* message;
  };
  const Lie lies[] = {
      {"/sequence", -1, "sequence is -1"},
      {"/sequence", 1.5, "sequence is 1.5"},
      {"/sequence", 18446744073709551615u, "sequence is 18446744073709551615"},
      {"/sequence", 9223372036854775807u, "sequence is 9223372036854775807"},
      {"/sequence", "3", "sequence is \"3\""},
      {"/best", "../../secret", "best is '../../secret'"},
      {"/best", ".hidden", "best is '.hidden'"},
      {"/best", "last", "best is 'last'"},
      {"/best", 5, "lacks a field"},
      {"/name", "../../secret", "name is '../../secret'"},
      {"/given_up", 5, "lacks a field"},
      {"/given_up", json::array({json::array({1, -1})}), "given_up is -1"},
      {"/given_up", json::array({json::array({1})}), "lacks a field"},
      {"/files/model.safetensors/bytes", -5, "bytes is -5"},
      {"/files/model.safetensors/xxh3_64", 5, "lacks a field"},
      {"/files", 5, "lacks a field"},
      {"/files", {1, 2}, "lacks a field"},
  };
  for (const Lie& lie : lies) {
    json document = valid();
    document[json::json_pointer(lie.pointer)] = lie.value;
    COHORT_EXPECT_THROW_WITH(parse_manifest(with_checksum(document), "state.json"), DataError, lie.message);
  }
}

TEST(ManifestTest, WhatCannotBeOpenedIsAnErrorOfOurs) {
  const test::TempDir dir;
  COHORT_EXPECT_THROW_WITH(read_manifest(dir.path()), DataError, "state.json is missing");
  std::filesystem::create_symlink("round", dir / "round");  // also root may not follow it
  COHORT_EXPECT_THROW_WITH(read_manifest(dir / "round"), DataError, "cannot open ");
  std::filesystem::create_symlink(kManifestFile, dir / kManifestFile);
  COHORT_EXPECT_THROW_WITH(read_manifest(dir.path()), DataError, "cannot open ");
}

TEST(ManifestTest, AStateThatCouldNotBeReadAgainIsNotWritten) {
  Manifest manifest;
  for (int i = 0; i < 100; ++i) manifest.state = json::array({manifest.state});
  COHORT_EXPECT_THROW_WITH(manifest_text(manifest), UsageError, "more than 64 levels");
  manifest.state = std::string(70u << 20, 'x');
  COHORT_EXPECT_THROW_WITH(manifest_text(manifest), UsageError, "the state cannot be read again");
}

}  // namespace
}  // namespace cohort::checkpoint
