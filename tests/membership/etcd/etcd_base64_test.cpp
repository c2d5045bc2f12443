#include <gtest/gtest.h>

#include <string>

#include "cohort/membership/etcd/internal/base64.h"

namespace cohort::membership::etcd {
namespace {

// Of RFC 4648, section 10.
TEST(Base64Test, WritesAndReadsTheVectorsOfTheRfc) {
  const std::pair<const char*, const char*> vectors[] = {
      {"", ""},
      {"f", "Zg=="},
      {"fo", "Zm8="},
      {"foo", "Zm9v"},
      {"foob", "Zm9vYg=="},
      {"fooba", "Zm9vYmE="},
      {"foobar", "Zm9vYmFy"},
  };
  for (const auto& [bytes, text] : vectors) {
    EXPECT_EQ(encode_base64(bytes), text);
    EXPECT_EQ(decode_base64(text), std::string(bytes));
  }
}

TEST(Base64Test, KeepsAllBytesOfAllLengths) {
  std::string bytes;
  for (int i = 0; i < 600; ++i) {
    EXPECT_EQ(decode_base64(encode_base64(bytes)), bytes);
    bytes.push_back(static_cast<char>(i * 7));
  }
  const std::string large(7'000'001, '\xFE');  // more than one piece
  EXPECT_TRUE(decode_base64(encode_base64(large)) == large);
}

TEST(Base64Test, ReadsNothingElse) {
  for (const char* text : {"Z", "Zg", "Zg=", "Zg===", "=", "====", "Z===", "Zg==Zg==", "Zm9v\n", " Zm9v",
                           "Zm9-", "Zm 9", "Zh==", "Zm9=", "Zg=a"}) {
    EXPECT_FALSE(decode_base64(text)) << text;
  }
}

}  // namespace
}  // namespace cohort::membership::etcd
