#include "cohort/checkpoint/run_checkpoints.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "cohort/base/error.h"
#include "cohort/base/files/file_lock.h"
#include "cohort/base/log.h"
#include "cohort/checkpoint/internal/temporary_name.h"
#include "cohort/checkpoint/manifest.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::checkpoint {
namespace {

namespace fs = std::filesystem;
using test::read_file;
using test::TempDir;
using test::write_file;

CheckpointContent content_of(int64_t value) {
  return {{{"w", at::full({3, 4}, value, at::kLong)}},
          {{"0.momentum", at::full({7}, value)}},
          {{"epoch", value}}};
}

std::vector<std::string> checkpoints_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& item : fs::directory_iterator(folder)) {
    if (item.path().filename() != ".lock") names.push_back(item.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

using Names = std::vector<std::string>;

class RunCheckpointsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    base::set_log_sink([this](base::LogLevel, std::string_view line) { log_ += std::string(line) + "\n"; });
  }
  void TearDown() override { base::set_log_sink({}); }

  fs::path folder() const { return dir_ / "checkpoints"; }
  void save_three() {
    RunCheckpoints checkpoints(folder(), {.keep = 0});
    for (int64_t i = 1; i <= 3; ++i) checkpoints.save("epoch_" + std::to_string(i), content_of(i));
  }
  void flip(const fs::path& file, size_t position) {
    std::string bytes = read_file(file);
    bytes.at(position) ^= 4;
    write_file(file, bytes);
  }

  TempDir dir_;
  std::string log_;
};

TEST_F(RunCheckpointsTest, WhatWasSavedIsLoaded) {
  RunCheckpoints checkpoints(folder());
  EXPECT_FALSE(checkpoints.find("last") || checkpoints.find("best") || checkpoints.find("auto"));
  EXPECT_EQ(checkpoints.save("epoch_0001", content_of(1), {.is_best = true}), folder() / "epoch_0001");
  EXPECT_EQ(checkpoints_in(folder()), (Names{"best", "epoch_0001", "last"}));
  EXPECT_EQ(checkpoints_in(folder() / "epoch_0001"),
            (Names{"model.safetensors", "optimizer.safetensors", "state.json"}));
  EXPECT_EQ(fs::read_symlink(folder() / "last"), "epoch_0001");
  const CheckpointContent loaded = RunCheckpoints::load(*checkpoints.find("last"));
  EXPECT_TRUE(at::equal(loaded.model.at(0).second, content_of(1).model[0].second));
  EXPECT_EQ(loaded.optimizer.at(0).first, "0.momentum");
  EXPECT_EQ(loaded.state, content_of(1).state);
}

TEST_F(RunCheckpointsTest, LinksMoveAndARunFolderCanBeMoved) {
  RunCheckpoints checkpoints(folder());
  checkpoints.save("step_1", content_of(1), {.is_best = true});
  checkpoints.save("step_2", content_of(2));
  fs::rename(folder(), dir_ / "moved");
  RunCheckpoints moved(dir_ / "moved");
  EXPECT_EQ(moved.find("best")->filename(), "step_1");
  EXPECT_EQ(moved.find("last")->filename(), "step_2");
  EXPECT_EQ(moved.find("auto")->filename(), "step_2");
  EXPECT_EQ(moved.find("step_1")->filename(), "step_1");
  EXPECT_EQ(moved.find((dir_ / "moved" / "last").string())->filename(), "step_2");
}

TEST_F(RunCheckpointsTest, ARunFolderStandsForItsLastCheckpoint) {
  save_three();
  EXPECT_EQ(RunCheckpoints(dir_ / "elsewhere").find(dir_.path().string())->filename(), "epoch_3");
  COHORT_EXPECT_THROW_WITH(RunCheckpoints(folder()).find("epoch_9"), DataError, "no checkpoint at epoch_9");
}

TEST_F(RunCheckpointsTest, NewestAreKeptAndLastAndBestStay) {
  RunCheckpoints checkpoints(folder(), {.keep = 2});
  for (int64_t i = 1; i <= 6; ++i) {
    checkpoints.save("epoch_" + std::to_string(i), content_of(i), {.is_best = i == 2});
  }
  EXPECT_EQ(checkpoints_in(folder()), (Names{"best", "epoch_2", "epoch_5", "epoch_6", "last"}));
  checkpoints.save("epoch_7", content_of(7), {.is_best = true});
  EXPECT_EQ(checkpoints_in(folder()), (Names{"best", "epoch_6", "epoch_7", "last"}));
}

TEST_F(RunCheckpointsTest, TheLastCheckpointSaysWhichIsTheBestWhateverTheLink) {
  RunCheckpoints checkpoints(folder(), {.keep = 1});
  checkpoints.save("epoch_1", content_of(1), {.is_best = true});
  checkpoints.save("epoch_2", content_of(2));
  fs::remove(folder() / "best");
  fs::create_symlink("epoch_2", folder() / "best");
  EXPECT_EQ(checkpoints.find("best")->filename(), "epoch_1");
  checkpoints.save("epoch_3", content_of(3));
  EXPECT_EQ(fs::read_symlink(folder() / "best"), "epoch_1");
  EXPECT_EQ(checkpoints_in(folder()), (Names{"best", "epoch_1", "epoch_3", "last"}));
}

TEST_F(RunCheckpointsTest, GoingBackTakesTheBestOfThen) {
  RunCheckpoints checkpoints(folder(), {.keep = 0});
  for (int64_t i = 1; i <= 3; ++i) {
    checkpoints.save("epoch_" + std::to_string(i), content_of(i), {.is_best = true});
  }
  checkpoints.go_back_to(folder() / "epoch_2");
  EXPECT_EQ(fs::read_symlink(folder() / "last"), "epoch_2");
  EXPECT_EQ(fs::read_symlink(folder() / "best"), "epoch_2");
}

TEST_F(RunCheckpointsTest, ABestOfAnotherHistoryIsNotTheBest) {
  RunCheckpoints checkpoints(folder(), {.keep = 2});
  for (int64_t i = 1; i <= 4; ++i) {
    checkpoints.save("epoch_" + std::to_string(i), content_of(i), {.is_best = i == 1 || i == 4});
  }
  EXPECT_EQ(checkpoints_in(folder()), (Names{"best", "epoch_3", "epoch_4", "last"}));
  checkpoints.go_back_to(folder() / "epoch_3");  // whose best was epoch_1
  EXPECT_FALSE(fs::exists(fs::symlink_status(folder() / "best")));
  COHORT_EXPECT_THROW_WITH(checkpoints.find("best"), DataError, "epoch_1, which is not there");
  checkpoints.save("epoch_4", content_of(5));
  EXPECT_FALSE(checkpoints.find("best"));
  checkpoints.save("epoch_5", content_of(6), {.is_best = true});
  EXPECT_EQ(checkpoints.find("best")->filename(), "epoch_5");
}

TEST_F(RunCheckpointsTest, ABestThatAnotherHistoryReplacedIsNotTheBest) {
  RunCheckpoints checkpoints(folder(), {.keep = 0});
  for (int64_t i = 1; i <= 3; ++i) {
    checkpoints.save("epoch_" + std::to_string(i), content_of(i), {.is_best = i == 2});
  }
  checkpoints.go_back_to(folder() / "epoch_1");
  checkpoints.save("epoch_2", content_of(7));
  checkpoints.go_back_to(folder() / "epoch_3");  // whose best was the first epoch_2
  EXPECT_FALSE(checkpoints.find("best"));
}

TEST_F(RunCheckpointsTest, AfterGoingBackABestOfLaterIsNotTheBestWhateverItsName) {
  RunCheckpoints checkpoints(folder());
  for (const char* name : {"best_model", "latest", "best_model"})
    checkpoints.save(name, content_of(1), {.is_best = std::string(name) == "best_model"});
  EXPECT_FALSE(checkpoints.best_of(folder() / "latest"));
  checkpoints.go_back_to(folder() / "latest");
  EXPECT_FALSE(checkpoints.find("best"));
  EXPECT_EQ(checkpoints_in(folder()), (Names{"best_model", "last", "latest"}));
}

TEST_F(RunCheckpointsTest, CheckpointsThatDoNotNameTheBestHaveTheLinks) {
  save_three();
  fs::create_symlink("epoch_2", folder() / "best");
  RunCheckpoints checkpoints(folder(), {.keep = 1});
  EXPECT_EQ(checkpoints.find("best")->filename(), "epoch_2");
  checkpoints.save("epoch_4", content_of(4));
  EXPECT_EQ(checkpoints_in(folder()), (Names{"best", "epoch_2", "epoch_4", "last"}));
}

TEST_F(RunCheckpointsTest, FoldersThatAreNotCheckpointsAreLeftAlone) {
  write_file(folder() / "mine" / "notes.txt", "hello");
  RunCheckpoints checkpoints(folder(), {.keep = 1});
  for (int64_t i = 1; i <= 3; ++i) checkpoints.save("e" + std::to_string(i), content_of(i));
  EXPECT_EQ(checkpoints_in(folder()), (Names{"e3", "last", "mine"}));
}

TEST_F(RunCheckpointsTest, CopiesAndRenamedCheckpointsAreLeftAlone) {
  save_three();
  const auto copy = [&](const fs::path& from, const fs::path& to) {
    fs::copy(folder() / from, folder() / to, fs::copy_options::recursive);
  };
  copy("epoch_1", "my_favourite");
  copy("epoch_3", "before_new_lr");
  copy("epoch_2", "epoch_5");
  fs::rename(folder() / "epoch_2", folder() / "epoch_0");
  RunCheckpoints checkpoints(folder(), {.keep = 2});
  checkpoints.save("epoch_4", content_of(4));
  // They take no place of those that are kept either.
  EXPECT_EQ(checkpoints_in(folder()),
            (Names{"before_new_lr", "epoch_0", "epoch_3", "epoch_4", "epoch_5", "last", "my_favourite"}));
  EXPECT_EQ(RunCheckpoints::load(folder() / "my_favourite").state["epoch"], 1);
  checkpoints.save("epoch_5", content_of(5));
  EXPECT_EQ(RunCheckpoints::load(folder() / "epoch_5.replaced-1").state["epoch"], 2);
  EXPECT_EQ(RunCheckpoints::load(folder() / "epoch_5").state["epoch"], 5);
}

TEST_F(RunCheckpointsTest, OfAnOlderVersionOnlyTheTrainersNamesAreRemoved) {
  save_three();
  for (const char* name : {"epoch_1", "epoch_2", "epoch_3"}) {
    Manifest manifest = read_manifest(folder() / name);
    manifest.name = "";
    write_file(folder() / name / "state.json", manifest_text(manifest));
  }
  for (const char* copy : {"epoch_1_copy", "epoch_", "mine"})
    fs::copy(folder() / "epoch_1", folder() / copy, fs::copy_options::recursive);
  fs::rename(folder() / "epoch_2", folder() / "step_00000007");
  RunCheckpoints(folder(), {.keep = 1}).save("epoch_4", content_of(4));
  EXPECT_EQ(checkpoints_in(folder()), (Names{"epoch_", "epoch_1_copy", "epoch_4", "last", "mine"}));
}

TEST_F(RunCheckpointsTest, WhatWasGivenUpIsNotFallenBackToAndGoesFirst) {
  RunCheckpoints checkpoints(folder(), {.keep = 0});
  for (int64_t i = 1; i <= 6; ++i) checkpoints.save("epoch_" + std::to_string(i), content_of(i));
  checkpoints.go_back_to(folder() / "epoch_2");
  checkpoints.save("epoch_3", content_of(13));
  flip(folder() / "epoch_3" / "model.safetensors", 150);
  EXPECT_EQ(checkpoints.load_usable()->folder.filename(), "epoch_2");
  const auto listed = checkpoints.list();
  ASSERT_EQ(listed.size(), 6u);
  EXPECT_EQ(listed[1].filename(), "epoch_2");
  EXPECT_EQ(listed[3].filename(), "epoch_6");
  RunCheckpoints(folder(), {.keep = 4}).save("epoch_4", content_of(14));
  EXPECT_EQ(checkpoints_in(folder()), (Names{"epoch_1", "epoch_2", "epoch_3", "epoch_4", "last"}));
}

/// A checkpoint as the test below knows it.
struct Saved {
  std::string name;
  std::vector<int64_t> line;  // its value, after those of the checkpoints that led to it
  bool is_damaged = false;
  int64_t value() const { return line.back(); }
};

/// A run that saves, goes back and is damaged at random, beside a list of what must be there.
class RandomRun {
 public:
  RandomRun(fs::path folder, int64_t keep) : keep_(keep), checkpoints_(std::move(folder), {.keep = keep}) {
    save();
  }
  void save() {
    Saved saved{"epoch_" + std::to_string(last_.line.size() + 1), last_.line};
    saved.line.push_back(++values_);
    checkpoints_.save(saved.name, content_of(values_));
    last_ = there_[saved.name] = saved;
    prune();
  }
  void go_back(unsigned choice) {
    const Saved to = std::next(there_.begin(), choice % there_.size())->second;
    if (to.is_damaged) return;
    checkpoints_.go_back_to(checkpoints_.folder() / to.name);
    last_ = to;
  }
  void damage(unsigned choice) {
    Saved& victim = std::next(there_.begin(), choice % there_.size())->second;
    victim.is_damaged = true;
    write_file(checkpoints_.folder() / victim.name / "model.safetensors", "damage");
  }
  void expect_right() {
    Names names{"last"};
    for (const auto& [name, saved] : there_) names.push_back(name);
    std::sort(names.begin(), names.end());
    ASSERT_EQ(checkpoints_in(checkpoints_.folder()), names);
    int64_t newest = 0;
    for (const auto& [name, saved] : there_) {
      if (is_of_line(saved) && !saved.is_damaged) newest = std::max(newest, saved.value());
    }
    if (newest == 0) {
      ASSERT_THROW(checkpoints_.load_usable(), DataError);
    } else {
      ASSERT_EQ(checkpoints_.load_usable()->content.state["epoch"], newest);
    }
  }

 private:
  bool is_of_line(const Saved& saved) const {
    return std::count(last_.line.begin(), last_.line.end(), saved.value()) > 0;
  }
  void prune() {
    std::vector<Saved> all;
    for (const auto& [name, saved] : there_) all.push_back(saved);
    std::sort(all.begin(), all.end(), [&](const Saved& a, const Saved& b) {
      return std::pair(is_of_line(a), a.value()) > std::pair(is_of_line(b), b.value());
    });
    for (size_t i = static_cast<size_t>(keep_); i < all.size(); ++i) there_.erase(all[i].name);
  }

  int64_t keep_;
  RunCheckpoints checkpoints_;
  std::map<std::string, Saved> there_;
  Saved last_;
  int64_t values_ = 0;
};

TEST_F(RunCheckpointsTest, ARunThatGoesBackAtRandomKeepsToItsHistory) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    fs::remove_all(folder());
    std::mt19937 random(seed);
    RandomRun run(folder(), 2 + seed % 5);
    for (int i = 0; i < 25; ++i) {
      SCOPED_TRACE(base::concat("seed ", seed, ", operation ", i));
      const unsigned what = random() % 6, choice = random();
      if (what < 4) {
        run.save();
      } else if (what == 4) {
        run.go_back(choice);
      } else {
        run.damage(choice);
      }
      run.expect_right();
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(RunCheckpointsTest, AFolderThatCannotBeListedIsNotOneWithoutCheckpoints) {
  write_file(folder(), "a file");
  COHORT_EXPECT_THROW_WITH(RunCheckpoints(folder()).load_usable(), DataError, "cannot list ");
}

TEST_F(RunCheckpointsTest, ABestThatIsReplacedByOneThatIsNotIsNoBest) {
  RunCheckpoints checkpoints(folder());
  checkpoints.save("latest", content_of(1), {.is_best = true});
  checkpoints.save("latest", content_of(3));
  EXPECT_FALSE(checkpoints.find("best"));
  EXPECT_EQ(checkpoints_in(folder()), (Names{"last", "latest"}));
}

TEST_F(RunCheckpointsTest, WhatAKilledProcessHadMovedAwayIsFoundByItsName) {
  save_three();
  fs::rename(folder() / "epoch_2", folder() / (temporary_name("epoch_2~old")));
  const RunCheckpoints checkpoints(folder());
  for (const std::string& which : {std::string("epoch_2"), (folder() / "epoch_2").string()})
    EXPECT_EQ(checkpoints.find_and_load(which)->content.state["epoch"], 2);
  EXPECT_EQ(RunCheckpoints::load(folder() / "epoch_2").state["epoch"], 2);
}

TEST_F(RunCheckpointsTest, SavingUnderANameThatIsThereReplacesIt) {
  RunCheckpoints checkpoints(folder());
  checkpoints.save("epoch_1", content_of(1));
  const CheckpointContent old = RunCheckpoints::load(folder() / "epoch_1");
  checkpoints.save("epoch_1", content_of(5));
  EXPECT_EQ(RunCheckpoints::load(folder() / "last").state["epoch"], 5);
  EXPECT_EQ(old.model[0].second.max().item<int64_t>(), 1);
  EXPECT_EQ(checkpoints_in(folder()), (Names{"epoch_1", "last"}));
}

TEST_F(RunCheckpointsTest, SomethingElseOfThatNameIsMovedAsideAndKept) {
  write_file(folder() / "epoch_1" / "notes.txt", "mine");
  write_file(folder() / "epoch_2", "a file");
  RunCheckpoints checkpoints(folder(), {.keep = 1});
  checkpoints.save("epoch_1", content_of(1));
  checkpoints.save("epoch_2", content_of(2));
  EXPECT_EQ(checkpoints_in(folder()), (Names{"epoch_1.replaced-1", "epoch_2", "epoch_2.replaced-1", "last"}));
  EXPECT_EQ(read_file(folder() / "epoch_1.replaced-1" / "notes.txt"), "mine");
  EXPECT_EQ(read_file(folder() / "epoch_2.replaced-1"), "a file");
  EXPECT_NE(log_.find("epoch_1 was no checkpoint that can be read and was saved under this name; it is "),
            std::string::npos)
      << log_;
}

/// Names of a process on another host, of one here that has ended, and of this one.
const std::string kElsewhere = ".epoch_4.cohort-another-host-4026531836-77-88";

std::string of_ended_process(const std::string& name) {
  const std::string own = temporary_name(name);
  return own.substr(0, own.rfind('-')) + "-1";
}

TEST_F(RunCheckpointsTest, LeftoversAreSweptByASaveAndNothingElse) {
  save_three();
  const std::string alive = temporary_name("epoch_4");
  for (const std::string& name : {of_ended_process("epoch_5"), of_ended_process("last"), kElsewhere, alive,
                                  std::string(".epoch_4.cohort-x-1-1"), std::string(".other")}) {
    write_file(folder() / name / "model.safetensors", "half");
  }
  fs::rename(folder() / "epoch_2", folder() / of_ended_process("epoch_2~old"));
  // One that somebody on another host exports, without a lock.
  const std::string exported = ".model.safetensors" + kElsewhere.substr(kElsewhere.find(".cohort"));
  write_file(folder() / exported, "half");
  RunCheckpoints(folder(), {.keep = 0}).save("epoch_6", content_of(6));
  Names expected{exported,  alive, ".epoch_4.cohort-x-1-1", ".other", "epoch_1", "epoch_2", "epoch_3",
                 "epoch_6", "last"};
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(checkpoints_in(folder()), expected);
  EXPECT_EQ(RunCheckpoints::load(folder() / "epoch_2").state["epoch"], 2);
}

TEST_F(RunCheckpointsTest, ReadersChangeNothing) {
  save_three();
  for (const std::string& name : {of_ended_process("epoch_4"), kElsewhere}) {
    write_file(folder() / name / "model.safetensors", "half");
  }
  fs::rename(folder() / "epoch_3", folder() / of_ended_process("epoch_3~old"));
  const Names before = checkpoints_in(folder());
  const RunCheckpoints reader(folder());
  EXPECT_EQ(RunCheckpoints::load(*reader.find("auto")).state["epoch"], 3);
  EXPECT_EQ(RunCheckpoints::load(*reader.find("last")).state["epoch"], 3);
  EXPECT_EQ(reader.list().size(), 3u);
  EXPECT_EQ(checkpoints_in(folder()), before);
}

TEST_F(RunCheckpointsTest, WhereAnotherProcessSavesASaveIsRejected) {
  save_three();
  const base::FileLock lock(folder() / ".lock");
  RunCheckpoints checkpoints(folder());
  COHORT_EXPECT_THROW_WITH(checkpoints.save("epoch_4", content_of(4)), SystemError, " is in use by process ");
  EXPECT_EQ(checkpoints.find("auto")->filename(), "epoch_3");
  EXPECT_EQ(checkpoints_in(folder()), (Names{"epoch_1", "epoch_2", "epoch_3", "last"}));
}

TEST_F(RunCheckpointsTest, DamageIsNamedAndAutoFallsBackWithAWarning) {
  const fs::path last = folder() / "epoch_3";
  const fs::path model = last / "model.safetensors";
  struct Damage {
    const char* message;
    std::function<void()> make;
  };
  const Damage cases[] = {
      {"model.safetensors is damaged: got 0 bytes, expected 192", [&] { write_file(model, ""); }},
      {"model.safetensors is damaged: checksum got ", [&] { flip(model, read_file(model).size() - 1); }},
      {"optimizer.safetensors is damaged: checksum got ", [&] { flip(last / "optimizer.safetensors", 20); }},
      {"model.safetensors is missing", [&] { fs::remove(model); }},
      {"state.json is missing", [&] { fs::remove(last / "state.json"); }},
      {"state.json is empty (0 bytes)", [&] { write_file(last / "state.json", ""); }},
      {"state.json is damaged: it is not the JSON", [&] { write_file(last / "state.json", "{"); }},
      {"state.json is damaged: it is not the JSON",
       [&] { write_file(last / "state.json", std::string(400'000, '[')); }},
      {"state.json is damaged: it is not the JSON",
       [&] {  // all of it is JSON, and deep
         std::string text = read_file(last / "state.json");
         const std::string deep = std::string(200'000, '[') + std::string(200'000, ']');
         write_file(last / "state.json", text.replace(text.find("\"epoch\": 3"), 10, "\"epoch\": " + deep));
       }},
      {"state.json is damaged: checksum got ",
       [&] {
         std::string text = read_file(last / "state.json");
         text.replace(text.find("\"epoch\": 3"), 10, "\"epoch\": 4");
         write_file(last / "state.json", text);
       }},
  };
  for (const Damage& damage : cases) {
    fs::remove_all(folder());
    save_three();
    damage.make();
    log_.clear();
    RunCheckpoints checkpoints(folder());
    COHORT_EXPECT_THROW_WITH(RunCheckpoints::load(*checkpoints.find("last")), DataError, damage.message);
    EXPECT_EQ(checkpoints.find("auto")->filename(), "epoch_2") << damage.message;
    EXPECT_NE(log_.find(damage.message), std::string::npos) << log_;
    EXPECT_NE(log_.find("falling back to the checkpoint "), std::string::npos) << log_;
  }
}

TEST_F(RunCheckpointsTest, MissingLastFolderIsSaidAndAutoFallsBack) {
  save_three();
  fs::remove_all(folder() / "epoch_3");
  RunCheckpoints checkpoints(folder());
  COHORT_EXPECT_THROW_WITH(checkpoints.find("last"), DataError, "which is not there");
  EXPECT_EQ(checkpoints.find("auto")->filename(), "epoch_2");
  EXPECT_NE(log_.find("epoch_3 is not the folder of a checkpoint"), std::string::npos) << log_;
}

TEST_F(RunCheckpointsTest, NothingUsableIsAnErrorThatShowsTheFirstReason) {
  save_three();
  for (int i = 1; i <= 3; ++i) fs::remove(folder() / ("epoch_" + std::to_string(i)) / "model.safetensors");
  COHORT_EXPECT_THROW_WITH(RunCheckpoints(folder()).find("auto"), DataError, "none of the 3 checkpoints");
  COHORT_EXPECT_THROW_WITH(RunCheckpoints(folder()).find("auto"), DataError,
                           "epoch_3/model.safetensors is missing");
}

TEST_F(RunCheckpointsTest, NewerFormatIsRejectedWithBothVersions) {
  save_three();
  std::string text = read_file(folder() / "epoch_3" / "state.json");
  text.replace(text.find("\"format_version\": 1"), 19, "\"format_version\": 9");
  write_file(folder() / "epoch_3" / "state.json", text);
  COHORT_EXPECT_THROW_WITH(RunCheckpoints::load(folder() / "last"), DataError,
                           "has format version 9, this Cohort reads up to version 1");
}

TEST_F(RunCheckpointsTest, NamesThatWouldClashAreRejected) {
  RunCheckpoints checkpoints(folder());
  for (const char* name : {"", "last", "best", "auto", "../x", ".hidden", "a~b"}) {
    COHORT_EXPECT_THROW_WITH(checkpoints.save(name, content_of(1)), UsageError,
                             "a checkpoint cannot be named");
  }
}

TEST_F(RunCheckpointsTest, AFailedSaveLeavesNothingBehind) {
  save_three();
  RunCheckpoints checkpoints(folder());
  CheckpointContent bad = content_of(4);
  bad.optimizer[0].second = at::Tensor();
  COHORT_EXPECT_THROW_WITH(checkpoints.save("epoch_4", bad), UsageError, "'0.momentum' cannot be stored");
  bad = content_of(4);
  bad.state["text"] = "\xff";
  COHORT_EXPECT_THROW_WITH(checkpoints.save("epoch_4", bad), UsageError, "cannot be written as JSON");
  EXPECT_EQ(checkpoints_in(folder()), (Names{"epoch_1", "epoch_2", "epoch_3", "last"}));
}

}  // namespace
}  // namespace cohort::checkpoint
