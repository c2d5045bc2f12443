// What becomes of each key of the configuration when a run resumes: as the table of keys says.
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "cohort/base/error.h"
#include "cohort/checkpoint/manifest.h"
#include "cohort/config/keys.h"
#include "cohort/data/tensor_dataset.h"
#include "tests/support/throws.h"
#include "tests/train/small_run.h"

namespace cohort::train {
namespace {

namespace fs = std::filesystem;
using test::Logged;
using test::message_contains;
using test::SmallRun;

/// Another value of each key than that of SmallRun.
const std::map<std::string, std::string> kOther = {
    {"model.name", "lenet5"},
    {"model.num_classes", "5"},
    {"model.width", "0.5"},
    {"model.pools", "3"},
    {"model.head", "linear"},
    {"model.dropout", "0.1"},
    {"model.weights", "a.safetensors"},
    {"model.options", "{hidden: 9}"},
    {"data.type", "idx"},
    {"data.path", "elsewhere"},
    {"data.train", "t"},
    {"data.val", "v"},
    {"data.color", "rgb"},
    {"data.image_size", "5"},
    {"data.train_transforms", "flip"},
    {"data.val_transforms", "[{Resize: 8}]"},
    {"data.mean", "[0.5]"},
    {"data.std", "[0.6]"},
    {"data.shuffle", "false"},
    {"data.drop_last", "true"},
    {"data.last_batch", "pad"},
    {"data.workers", "1"},
    {"data.prefetch", "3"},
    {"data.pin_memory", "true"},
    {"data.on_error", "skip"},
    {"data.on_other_files", "raise"},
    {"data.empty_class", "keep"},
    {"data.cache", "encoded"},
    {"data.synthetic_train", "21"},
    {"data.synthetic_val", "13"},
    {"data.options", "{a: b}"},
    {"data.sampler", "random"},
    {"data.sampler_options", "{a: b}"},
    {"optim.name", "adam"},
    {"optim.lr", "0.01"},
    {"optim.lr_scaling", "linear"},
    {"optim.lr_base_size", "2"},
    {"optim.momentum", "0.5"},
    {"optim.nesterov", "true"},
    {"optim.weight_decay", "0.01"},
    {"optim.betas", "[0.8, 0.9]"},
    {"optim.eps", "1e-7"},
    {"optim.no_decay_on_norm_and_bias", "true"},
    {"optim.clip_norm", "0.01"},
    {"optim.options", "{a: b}"},
    {"schedule.name", "cosine"},
    {"schedule.unit", "step"},
    {"schedule.warmup_epochs", "1"},
    {"schedule.warmup_steps", "20"},
    {"schedule.warmup_fraction", "0.9"},
    {"schedule.warmup_start", "0.2"},
    {"schedule.milestones", "[1, 2]"},
    {"schedule.step_size", "2"},
    {"schedule.gamma", "0.5"},
    {"schedule.eta_min", "0.001"},
    {"schedule.pct_start", "0.4"},
    {"schedule.div_factor", "20"},
    {"schedule.final_div_factor", "100"},
    {"schedule.anneal", "linear"},
    {"schedule.three_phase", "true"},
    {"schedule.cycle_momentum", "false"},
    {"schedule.base_momentum", "0.8"},
    {"schedule.max_momentum", "0.9"},
    {"schedule.options", "{a: b}"},
    {"train.epochs", "4"},
    {"train.max_steps", "11"},
    {"train.batch_size", "5"},
    {"train.global_batch_size", "5"},
    {"train.eval_batch_size", "3"},
    {"train.accumulate", "2"},
    {"train.label_smoothing", "0.1"},
    {"train.precision", "bf16"},
    {"train.memory_format", "channels_last"},
    {"train.threads", "2"},
    {"train.device", "auto"},
    {"train.eval_every", "2"},
    {"train.max_eval_steps", "1"},
    {"train.script", "true"},
    {"train.on_nonfinite", "continue"},
    {"distributed.model", "data_parallel"},
    {"distributed.gradients", "none"},
    {"distributed.devices", "cpu:0"},
    {"distributed.device_map", "{a: cpu:0}"},
    {"distributed.schedule", "zb_h1"},
    {"distributed.micro_batches", "2"},
    {"distributed.find_unused_parameters", "true"},
    {"distributed.bucket_cap_mb", "1"},
    {"distributed.comm_hook", "bf16"},
    {"distributed.backend", "gloo"},
    {"distributed.nproc_per_node", "2"},
    {"distributed.virtual_ranks", "1"},
    {"distributed.elastic", "true"},
    {"comm.timeout", "5"},
    {"comm.check_consistency", "off"},
    {"run.name", "other"},
    {"run.seed", "2"},
    {"run.save_every", "3"},
    {"run.save_every_steps", "3"},
    {"run.save_every_minutes", "1"},
    {"run.keep", "2"},
    {"run.checkpoint_format", "other"},
    {"run.best_metric", "val_loss"},
    {"run.best_mode", "max"},
    {"run.log_every", "1"},
    {"run.progress", "auto"},
    {"run.tensorboard", "true"},
    {"run.log_images", "3"},
    {"run.trace", "1"},
    {"run.profile", "1"},
};
/// Those of them that must change what the run ends with.
const std::set<std::string> kChangesTheModel = {
    "optim.lr",        "optim.momentum",        "optim.nesterov",        "optim.weight_decay",
    "optim.clip_norm", "schedule.name",         "schedule.warmup_steps", "schedule.warmup_fraction",
    "train.max_steps", "train.label_smoothing", "train.precision"};

/// What the others of these sections need besides to change the model.
const std::vector<std::string> kOneCycle = {"schedule.name=one_cycle"}, kSteps = {"schedule.name=step"},
                               kAdam = {"optim.name=adam"}, kCosine = {"schedule.name=cosine"};
const std::map<std::string, std::vector<std::string>> kNeeds = {
    {"optim.lr_scaling", {"train.global_batch_size=8"}},
    {"optim.lr_base_size", {"train.global_batch_size=8", "optim.lr_scaling=linear"}},
    {"optim.betas", kAdam},
    {"optim.eps", kAdam},
    {"schedule.unit", kCosine},
    {"schedule.warmup_epochs", kCosine},
    {"schedule.warmup_start", {"schedule.warmup_steps=20"}},
    {"schedule.milestones", {"schedule.name=multistep"}},
    {"schedule.step_size", kSteps},
    {"schedule.gamma", {"schedule.name=step", "schedule.step_size=1"}},
    {"schedule.eta_min", kCosine},
    {"schedule.pct_start", kOneCycle},
    {"schedule.div_factor", kOneCycle},
    {"schedule.final_div_factor", kOneCycle},
    {"schedule.anneal", kOneCycle},
    {"schedule.three_phase", kOneCycle},
    {"schedule.cycle_momentum", kOneCycle},
    {"schedule.base_momentum", kOneCycle},
    {"schedule.max_momentum", kOneCycle}};

/// Keys that another model or another kind of data set than these runs' has to take; each has a test of its
/// own.
const std::set<std::string> kOfOthers = {"model.dropout",    "data.options",          "optim.options",
                                         "schedule.options", "run.checkpoint_format", "distributed.elastic"};

/// Keys whose other value is rejected together with virtual ranks, whatever the run did before.
const std::set<std::string> kNotWithVirtualRanks = {"distributed.gradients", "distributed.model",
                                                    "distributed.comm_hook"};

constexpr const char* kChanges = "continuing with other settings: ";

std::vector<std::string> until(const std::string& steps, std::vector<std::string> more = {}) {
  more.insert(more.begin(), {"train.max_steps=" + steps, "run.save_every=2"});
  return more;
}

/// A run that stopped in the middle of its second epoch, copied for each case.
class ResumeKeysTest : public testing::Test {
 protected:
  void SetUp() override {
    base.start(until("7"));
    const SmallRun plain;
    copy_to(plain);
    plain.resume(until("12"));
    plain_model = plain.model();
  }

  void copy_to(const SmallRun& run) const {
    fs::copy(base.path(), run.path(), fs::copy_options::recursive | fs::copy_options::copy_symlinks);
  }

  /// Continues with other values of `names`, and checks that each key does what the table says.
  void check(const std::vector<std::string>& names) const {
    std::vector<std::string> overrides = until("12", {"run.resume=auto"});
    bool rejected = false;
    for (const std::string& name : names) {
      overrides.push_back(name + "=" + kOther.at(name));
      const config::ConfigKey& key = *config::find_key(name);
      rejected = rejected || key.on_resume == config::OnResume::kRejected || key.makes_step;
    }
    SCOPED_TRACE(testing::PrintToString(names));
    const SmallRun run;
    copy_to(run);
    const auto before = run.files();
    if (rejected) {
      check_rejected(run, names, overrides);
      EXPECT_EQ(run.files(), before);
      return;
    }
    std::string log;
    {
      const Logged logged;
      run.start(overrides);
      log = logged.text();
    }
    check_taken(run, names, overrides, log);
  }

 private:
  static void check_rejected(const SmallRun& run, const std::vector<std::string>& names,
                             const std::vector<std::string>& overrides) {
    try {
      run.start(overrides);
      ADD_FAILURE() << "was not rejected";
    } catch (const ConfigError& error) {
      for (const std::string& name : names) {
        const config::ConfigKey& key = *config::find_key(name);
        const bool named = key.on_resume == config::OnResume::kRejected || key.makes_step;
        EXPECT_EQ(std::string(error.what()).find(name + " ") != std::string::npos, named) << error.what();
      }
    }
  }
  void check_taken(const SmallRun& run, const std::vector<std::string>& names,
                   const std::vector<std::string>& overrides, const std::string& log) const {
    const std::size_t begin = log.find(kChanges);
    ASSERT_NE(begin, std::string::npos) << log;
    const std::string changes = log.substr(begin, log.find('\n', begin) - begin);
    config::Config written = config::load_config((run.path() / "config.yaml").string()),
                   wanted = run.config(overrides);
    bool cannot_matter = true, changes_model = false;
    for (const std::string& name : names) {
      const config::ConfigKey& key = *config::find_key(name);
      const bool takes_effect = key.on_resume == config::OnResume::kTakesEffect;
      EXPECT_EQ(changes.find(name + " ") != std::string::npos, takes_effect) << changes;
      EXPECT_TRUE(config::same_value(key, written, wanted)) << "config.yaml does not say what ran";
      cannot_matter = cannot_matter && !takes_effect;
      changes_model = changes_model || kChangesTheModel.contains(name);
    }
    if (cannot_matter) {
      EXPECT_TRUE(run.model() == plain_model);
    }
    if (changes_model && names.size() == 1) {
      EXPECT_FALSE(run.model() == plain_model);
    }
  }

 protected:
  const SmallRun base;
  std::string plain_model;
};

TEST_F(ResumeKeysTest, EachKeySaysWhatBecomesOfItAndHasAnotherValueHere) {
  for (const config::ConfigKey& key : config::config_keys()) {
    EXPECT_NE(key.on_resume, config::OnResume::kUnset) << key.name;
    if (std::string(key.name) == "run.dir" || std::string(key.name) == "run.resume") continue;
    ASSERT_TRUE(kOther.contains(key.name)) << key.name;
    config::Config before = base.config(),
                   after = base.config({std::string(key.name) + "=" + kOther.at(key.name)});
    EXPECT_FALSE(config::same_value(key, before, after)) << key.name;
  }
}

TEST_F(ResumeKeysTest, EachKeyDoesWhatTheTableSays) {
  for (const auto& [name, value] : kOther) {
    if (!kOfOthers.contains(name)) check({name});
  }
}

TEST_F(ResumeKeysTest, OptionsOfOtherOptimizersAndSchedulesChangeTheModelWithThem) {
  for (const config::ConfigKey& key : config::config_keys()) {
    if ((key.section() != "optim" && key.section() != "schedule") ||
        key.on_resume != config::OnResume::kTakesEffect || kChangesTheModel.contains(key.name) ||
        kOfOthers.contains(key.name)) {
      continue;
    }
    SCOPED_TRACE(key.name);
    ASSERT_TRUE(kNeeds.contains(key.name));
    std::vector<std::string> words = kNeeds.at(key.name);
    const SmallRun plain, other;
    plain.start(until("7", words));
    fs::copy(plain.path(), other.path(), fs::copy_options::recursive | fs::copy_options::copy_symlinks);
    plain.resume(until("12", words));
    words.push_back(std::string(key.name) + "=" + kOther.at(key.name));
    other.resume(until("12", words));
    EXPECT_FALSE(plain.model() == other.model());
  }
}

TEST_F(ResumeKeysTest, RandomPairsOfKeysDoWhatTheTableSays) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  std::vector<std::string> names;
  for (const auto& [name, value] : kOther) names.push_back(name);
  const std::set<std::string> warm_ups = {"schedule.warmup_epochs", "schedule.warmup_steps",
                                          "schedule.warmup_fraction"};
  for (int i = 0; i < 40;) {
    const std::string a = names[random() % names.size()], b = names[random() % names.size()];
    // One warm-up may be set; two keys of a step may make the same step again, which has a test of its own.
    if (a == b || kOfOthers.contains(a) || kOfOthers.contains(b) ||
        (warm_ups.contains(a) && warm_ups.contains(b)))
      continue;
    if (config::find_key(a)->makes_step && config::find_key(b)->makes_step) continue;
    const bool has_virtual_ranks = a == "distributed.virtual_ranks" || b == "distributed.virtual_ranks";
    if (has_virtual_ranks && (kNotWithVirtualRanks.contains(a) || kNotWithVirtualRanks.contains(b))) continue;
    check({a, b});
    ++i;
  }
}

TEST(ResumeKeyTest, DropoutTakesEffect) {
  const std::vector<std::string> vgg = {"model.name=vgg11", "model.options={}", "model.width=0.02",
                                        "data.image_size=32", "run.save_every=2"};
  const auto with = [&](const std::vector<std::string>& more) {
    std::vector<std::string> all = vgg;
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  const SmallRun run, other;
  run.start(with({"train.max_steps=2"}));
  fs::copy(run.path(), other.path(), fs::copy_options::recursive | fs::copy_options::copy_symlinks);
  run.resume(with({"train.max_steps=4"}));
  const Logged log;
  other.resume(with({"train.max_steps=4", "model.dropout=0.1"}));
  EXPECT_TRUE(message_contains(log.text(), "model.dropout 0.5 -> 0.1"));
  EXPECT_FALSE(run.model() == other.model());
}

/// As many samples as the runs of this file have; all their numbers are the option `level`.
COHORT_REGISTER_DATASET(levels, [](const data::DatasetArgs& args) {
  const at::Tensor inputs = at::full({20, 1, 4, 4}, args.number("level", 0.25), at::kFloat);
  return std::make_shared<const data::TensorDataset>(
      std::vector<at::Tensor>{inputs, at::arange(20).remainder(4)});
});

TEST(ResumeKeyTest, AnOptionOfARegisteredDataSetTakesEffect) {
  const std::vector<std::string> levels = {"data.type=levels", "data.mean=[]", "data.std=[]"};
  const SmallRun run, other;
  run.start(until("7", levels));
  fs::copy(run.path(), other.path(), fs::copy_options::recursive | fs::copy_options::copy_symlinks);
  run.resume(until("12", levels));
  const Logged log;
  std::vector<std::string> with_level = levels;
  with_level.emplace_back("data.options.level=0.75");
  other.resume(until("12", with_level));
  EXPECT_TRUE(message_contains(log.text(), "data.options ")) << log.text();
  EXPECT_FALSE(run.model() == other.model());
  const config::Config written = config::load_config((other.path() / "config.yaml").string());
  EXPECT_EQ(written.data.options.at("level"), "0.75");
}

TEST_F(ResumeKeysTest, BatchesMayBeCutInAnotherWayAsLongAsAStepKeepsItsSamples) {
  const SmallRun run;
  copy_to(run);
  const Logged log;
  EXPECT_EQ(run.resume(until("12", {"train.batch_size=2", "train.accumulate=2"})).fit.steps, 12);
  EXPECT_TRUE(message_contains(log.text(), "train.batch_size 4 -> 2, train.accumulate 1 -> 2"));
  EXPECT_EQ(run.resume(until("13", {"train.global_batch_size=4", "train.batch_size=2"})).fit.steps, 13);
}

TEST_F(ResumeKeysTest, AnotherLearningRateWinsOverTheCheckpointsAndMeetsTheScheduleOfTheRun) {
  const auto rates = [](const SmallRun& run) {
    const auto state = checkpoint::read_manifest(fs::canonical(run.path() / "checkpoints" / "last")).state;
    const auto& scalars = state.at("optimizers").at("");
    return std::pair(scalars.at("group.0.lr").get<double>(), scalars.at("group.0.initial_lr").get<double>());
  };
  const SmallRun constant, falling;
  copy_to(constant);
  copy_to(falling);
  constant.resume(until("12", {"optim.lr=0.01"}));
  EXPECT_EQ(rates(constant), std::pair(0.01, 0.01));
  falling.resume(
      until("8", {"optim.lr=0.01", "schedule.name=step", "schedule.step_size=1", "schedule.gamma=0.5"}));
  EXPECT_EQ(rates(falling), std::pair(0.005, 0.01));
  // It resumes from there, with the same command, as if it had not stopped.
  constant.resume(until("13", {"optim.lr=0.01"}));
  EXPECT_EQ(rates(constant), std::pair(0.01, 0.01));
}

TEST_F(ResumeKeysTest, ACheckpointIsComparedWithTheConfigurationThatMadeItNotWithTheNewest) {
  const SmallRun run;
  copy_to(run);
  run.resume(until("12", {"optim.lr=0.01"}));
  const Logged log;
  run.start(until(
      "12", {"optim.lr=0.05", "run.resume=" + (run.path() / "checkpoints" / "step_00000007").string()}));
  EXPECT_EQ(log.text().find("optim.lr"), std::string::npos) << log.text();
}

TEST_F(ResumeKeysTest, ACheckpointWithoutItsConfigurationIsNotCompared) {
  const SmallRun run;
  copy_to(run);
  const fs::path folder = fs::canonical(run.path() / "checkpoints" / "last");
  checkpoint::Manifest manifest = checkpoint::read_manifest(folder);
  manifest.state["run"].erase("description");
  fs::remove(folder / "state.json");
  checkpoint::write_manifest(folder, manifest);
  const Logged log;
  EXPECT_EQ(run.resume(until("12", {"optim.lr=0.01"})).fit.steps, 12);
  EXPECT_TRUE(message_contains(log.text(), "is not compared: the checkpoint does not hold it"));
}

}  // namespace
}  // namespace cohort::train
