#include "cohort/launch/internal/signed_words.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <vector>

#include "cohort/base/error.h"

namespace cohort::launch {
namespace {

TEST(SignedWordsTest, WhatOneSignsTheOtherOpens) {
  const base::Secret secret = base::Secret::make();
  SignedWords signer(secret), opener(secret);
  for (const std::string& word : std::vector<std::string>{"", "5", "two words", "line\nline", {'\0', 'x'}}) {
    EXPECT_EQ(opener.open("key", signer.sign("key", word)), word);
  }
  const std::string word = signer.sign("key", "word");
  EXPECT_EQ(opener.open("key", word), "word");
  EXPECT_EQ(opener.open("key", word), "word") << "a word may be read twice";
}

TEST(SignedWordsTest, WithoutASecretWordsAreWhatTheyAre) {
  SignedWords words(std::nullopt);
  EXPECT_EQ(words.sign("key", "word"), "word");
  EXPECT_EQ(words.open("key", "word"), "word");
}

// A session's name and a key, or a key and a word, that together read like others are others.
TEST(SignedWordsTest, WhatIsMovedBetweenItsPartsIsAnother) {
  const base::Secret secret = base::Secret::make();
  SignedWords in_session_a(secret), in_session_ab(secret);
  in_session_a.begin_session("a");
  in_session_ab.begin_session("ab");
  EXPECT_FALSE(in_session_ab.open("c", in_session_a.sign("bc", "word")));
  EXPECT_FALSE(in_session_a.open("ke", in_session_a.sign("key", "word")));
}

// Agents of two jobs with one secret, one after the other, and somebody who writes to the store what he has
// read, under other keys, late, cut, changed, or signed with a secret of his own. Whatever is opened was
// signed in this session, under this key, and is not older than what was opened there before.
TEST(SignedWordsTest, NothingElseIsOpenedInRandomAttacks) {
  const std::vector<std::string> keys{"alive/0", "alive/1", "fail/0", "signal", "result/0", "go"};
  for (int seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(static_cast<unsigned>(seed));
    const auto below = [&](std::size_t bound) {
      return std::uniform_int_distribution<std::size_t>(0, bound - 1)(random);
    };
    const base::Secret secret = base::Secret::make();
    SignedWords attacker(base::Secret::make());
    std::vector<std::string> recorded;
    for (const std::string session : {"first", "second"}) {
      SignedWords writer(secret), reader(secret);
      writer.begin_session(session);
      reader.begin_session(session);
      attacker.begin_session(session);
      std::map<std::string, std::map<std::string, int>> signed_at;  // key, word: when
      std::map<std::string, int> opened_at;
      for (int step = 0; step < 60; ++step) {
        const std::string& key = keys[below(keys.size())];
        std::string found;
        const bool is_genuine = recorded.empty() || below(2) == 0;
        if (is_genuine) {
          const std::string word = base::concat(session, " ", step);
          found = writer.sign(key, word);
          signed_at[key][word] = step;
          recorded.push_back(found);
          if (below(3) == 0) continue;  // lost, but read by who listens
        } else {
          found = recorded[below(recorded.size())];
          switch (below(5)) {
            case 0:
              found[below(found.size())] ^= static_cast<char>(1u << below(8));
              break;
            case 1:
              found.resize(below(found.size()));
              break;
            case 2:
              found += "0";
              break;
            case 3:
              found = attacker.sign(key, found);
              break;
            default:
              break;  // as it was, here or elsewhere
          }
        }
        const auto word = reader.open(key, found);
        if (!word) {
          EXPECT_FALSE(is_genuine) << "a word that was just signed under " << key << " is opened";
          continue;
        }
        ASSERT_EQ(signed_at[key].count(*word), 1u) << *word << " under " << key;
        ASSERT_GE(signed_at[key][*word], opened_at[key]);
        opened_at[key] = signed_at[key][*word];
      }
    }
  }
}

}  // namespace
}  // namespace cohort::launch
