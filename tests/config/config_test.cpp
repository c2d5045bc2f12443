#include "cohort/config/config.h"

#include <gtest/gtest.h>

#include <set>

#include "cohort/base/error.h"
#include "cohort/config/keys.h"
#include "cohort/config/resume.h"
#include "tests/support/source_dir.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::config {
namespace {

Config load(const std::string& text, const std::vector<std::string>& overrides = {}) {
  return load_config_text(text, "run.yaml", overrides);
}

std::string source_file(const std::string& name) {
  return test::source_dir() / name;
}

TEST(ConfigTest, AnEmptyFileGivesTheDefaults) {
  EXPECT_EQ(load(""), Config());
  EXPECT_EQ(load("# nothing\nmodel:\n"), Config());
}

TEST(ConfigTest, ReadsEveryType) {
  const Config config = load(R"(
model: {name: resnet18, options: {depth: 3, note: "a: b"}}
data: {pin_memory: yes, mean: [0.5], std: 0.25, color: gray}
optim: {lr: 1e-3, betas: [0.8, 0.9], name: adam}
schedule: {name: multistep, milestones: [3, 6]}
train: {epochs: +7}
run: {dir: }
)");
  EXPECT_EQ(config.model.name, "resnet18");
  EXPECT_EQ(config.model.options.at("depth"), "3");
  EXPECT_EQ(config.model.options.at("note"), "a: b");
  EXPECT_TRUE(config.data.pin_memory);
  EXPECT_EQ(config.data.std, std::vector<double>{0.25});
  EXPECT_EQ(config.optim.lr, 1e-3);
  EXPECT_EQ(config.optim.betas, (std::vector<double>{0.8, 0.9}));
  EXPECT_EQ(config.schedule.milestones, (std::vector<int64_t>{3, 6}));
  EXPECT_EQ(config.train.epochs, 7);
  EXPECT_EQ(config.run.dir, "");
  EXPECT_TRUE(config.warnings.empty());
}

TEST(ConfigTest, ReadsTransformsWithPositionalNamedAndNoArguments) {
  const Config config = load(
      "data:\n  train_transforms:\n    - RandomResizedCrop: {size: 64, scale: [0.1, 1]}\n"
      "    - RandomHorizontalFlip\n    - Resize: 32\n    - RandomCrop: {size: 32, pad_if_needed: true}\n");
  const auto& list = config.data.train_transforms.list;
  ASSERT_EQ(list.size(), 4U);
  EXPECT_EQ(list[0].args.at("scale"), (std::vector<double>{0.1, 1}));
  EXPECT_TRUE(list[1].args.empty());
  EXPECT_EQ(list[2].args.at(""), std::vector<double>{32});
  EXPECT_EQ(list[3].args.at("pad_if_needed"), std::vector<double>{1});
}

TEST(ConfigTest, DumpReadsBackIdenticallyWhenEveryKeyDiffersFromItsDefault) {
  Config config = load(R"(
model: {name: vgg11, num_classes: 7, width: 0.3, pools: 4, head: linear, dropout: 0.1, weights: "a \"b\" \\ #c",
        options: {"k: 1": "yes", x: "null", y: "", z: "ü\n\t"}}
data: {type: synthetic, path: ./d, train: /t, val: 1, color: gray, image_size: 28,
       train_transforms: [{Resize: [3, 4]}, Flip, {Pad: {a: 1, b: [1, 2.5]}}], val_transforms: [],
       mean: [0.1], std: [0.3333333333333333], shuffle: no, drop_last: yes, last_batch: pad, workers: 0, prefetch: 9, pin_memory: on,
       on_error: skip, empty_class: keep, on_other_files: raise, cache: encoded, synthetic_train: 5, synthetic_val: 6, options: {a: b}, sampler: mine, sampler_options: {c: d}}
optim: {name: adamw, lr: 1.0e-17, lr_scaling: sqrt, lr_base_size: 64, momentum: 0.1, nesterov: true, weight_decay: 0.0005, betas: [0.1, 0.2], eps: 1e-7,
        no_decay_on_norm_and_bias: true, clip_norm: 0.7, options: {rho: "0.9"}}
schedule: {name: one_cycle, unit: step, warmup_start: 0.2, milestones: [], step_size: 2, gamma: 0.2, eta_min: 1e-5,
           pct_start: 0.2, div_factor: 2, final_div_factor: 3, anneal: linear, three_phase: true,
           cycle_momentum: false, base_momentum: 0.1, max_momentum: 0.2, options: {x: y}}
distributed: {model: mine, gradients: average, devices: "cpu:0", device_map: {features: "cpu:0"}, schedule: zb_h1, micro_batches: 8, find_unused_parameters: true, bucket_cap_mb: 0.5, comm_hook: bf16, backend: gloo, nproc_per_node: 2}
comm: {timeout: 7.5, check_consistency: always}
train: {epochs: 3, max_steps: 4, batch_size: 5, global_batch_size: 12, eval_batch_size: 6, accumulate: 2, label_smoothing: 0.1,
        precision: bf16, memory_format: contiguous, threads: 2, device: "cuda:1", eval_every: 2, max_eval_steps: 3,
        script: true, on_nonfinite: continue}
run: {name: "1", dir: "~", resume: auto, seed: 9007199254740992, save_every: 2, save_every_steps: 3,
      save_every_minutes: 0.5, keep: 0, checkpoint_format: mine, best_metric: val_loss, best_mode: min, log_every: 7, progress: off,
      tensorboard: no, log_images: 0, trace: 5, profile: 2}
)");
  Config defaults;
  // Of the three warm-ups one may be set, and none with one_cycle. Virtual ranks have plain models.
  const std::set<std::string> same = {"schedule.warmup_epochs", "schedule.warmup_steps",
                                      "schedule.warmup_fraction", "distributed.virtual_ranks",
                                      "distributed.elastic"};
  for (const ConfigKey& key : config_keys()) {
    EXPECT_EQ(same_value(key, config, defaults), same.count(key.name) != 0) << key.name;
  }
  const std::string text = dump_config(config);
  const Config again = load(text);
  EXPECT_EQ(again, config) << text;
  EXPECT_EQ(dump_config(again), text);
}

TEST(ConfigTest, VirtualRanksTakeTheSizeOfBuckets) {
  for (const char* gradients : {"auto", "average", "ddp", "mine"}) {
    const Config config = load(base::concat(
        "distributed: {virtual_ranks: 4, bucket_cap_mb: 1, nproc_per_node: 2, gradients: ", gradients,
        "}\ntrain: {script: true, precision: bf16, accumulate: 2}\n"));
    EXPECT_EQ(config.distributed.virtual_ranks, 4);
    EXPECT_EQ(config.warnings, std::vector<std::string>()) << "their sums travel in buckets of that size";
    EXPECT_EQ(load(dump_config(config)), config);
  }
  const Config elastic = load("distributed: {elastic: true, gradients: mine}\n");
  EXPECT_TRUE(elastic.distributed.elastic);
  EXPECT_EQ(load(dump_config(elastic)), elastic);
}

TEST(ConfigTest, KeysOfProcessGroupsHaveNoEffectInElasticRuns) {
  const Config config =
      load("distributed: {elastic: true, backend: gloo}\ncomm: {check_consistency: always}\n");
  EXPECT_EQ(config.warnings,
            (std::vector<std::string>{"distributed.backend has no effect with distributed.elastic true",
                                      "comm.check_consistency has no effect with distributed.elastic true"}));
  EXPECT_TRUE(load("distributed: {elastic: true}\ncomm: {timeout: 5}\n").warnings.empty());
}

TEST(ConfigTest, DumpOfTheDefaultsReadsBackWithoutWarnings) {
  const Config again = load(dump_config(Config()));
  EXPECT_EQ(again, Config());
  EXPECT_TRUE(again.warnings.empty());
}

TEST(ConfigTest, OverridesWinOverTheFileAndLaterOnesOverEarlier) {
  const Config config =
      load("optim: {lr: 1}\n",
           {"optim.lr=0.1", "schedule.milestones=[1,2]", "run.name=", "data.train_transforms=[{Resize: 32}]",
            "optim.lr=0.2", "schedule.name=multistep", "model.options.a.b=c d"});
  EXPECT_EQ(config.optim.lr, 0.2);
  EXPECT_EQ(config.schedule.milestones, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(config.data.train_transforms.list.at(0).name, "Resize");
  EXPECT_EQ(config.model.options.at("a.b"), "c d");
}

TEST(ConfigTest, ALearningRateThatIsNotSetIsThatOfTheOptimizer) {
  EXPECT_EQ(load("optim: {name: sgd}").optim.lr, 0.1);
  for (const char* name : {"adam", "adamw"}) {
    const std::string file = std::string("optim: {name: ") + name + "}";
    const std::string override_text = std::string("optim.name=") + name;
    EXPECT_EQ(load(file).optim.lr, 1e-3);
    EXPECT_EQ(load("", {override_text}).optim.lr, 1e-3);
    EXPECT_EQ(load("MODEL: vgg11", {override_text}).optim.lr, 1e-3);
    EXPECT_EQ(load(file, {"optim.name=sgd"}).optim.lr, 0.1);
    // One that is set wins, wherever it stands, also where it is the default of another optimizer.
    EXPECT_EQ(load(file, {"optim.lr=0.1"}).optim.lr, 0.1);
    EXPECT_EQ(load("optim: {lr: 0.1}", {override_text}).optim.lr, 0.1);
    EXPECT_EQ(load("", {"optim.lr=0.1", override_text}).optim.lr, 0.1);
    EXPECT_EQ(load("LR: 0.01", {override_text}).optim.lr, 0.01);
    EXPECT_EQ(load("MODEL: vgg11", {override_text, "LR=0.01"}).optim.lr, 0.01);
    // What ran is written, and reads back.
    const Config config = load(file);
    EXPECT_TRUE(test::message_contains(dump_config(config), "  lr: 0.001\n"));
    EXPECT_EQ(load(dump_config(config)), config);
    EXPECT_EQ(check_resume(load(dump_config(config)), config, true, "last"), "");
  }
  EXPECT_EQ(check_resume(load("optim: {name: adam, lr: 0.1}"), load("optim: {name: adam}"), true, "last"),
            "optim.lr 0.1 -> 0.001");
  EXPECT_TRUE(test::message_contains(config_help(), "0.001 with adam and adamw"));
}

TEST(ConfigTest, AnUnknownKeyIsRejectedWithTheNearestOne) {
  COHORT_EXPECT_THROW_WITH(load("optim:\n  learning: 1\n  lr: 2\n"), ConfigError,
                           "run.yaml, line 2, column 3: unknown key 'optim.learning'");
  COHORT_EXPECT_THROW_WITH(load("optim: {learning_rate: 1}"), ConfigError,
                           "Try: one of the keys of optim: name, lr, ");
  COHORT_EXPECT_THROW_WITH(load("batchsize: 32"), ConfigError, "Try: the nearest one, BATCHSIZE");
  COHORT_EXPECT_THROW_WITH(load("wd: 1e-4"), ConfigError, "Try: the nearest one, WD");
  COHORT_EXPECT_THROW_WITH(load("LEARNING_RATE: 1"), ConfigError, "Try: one of the flat keys MODEL, ");
  COHORT_EXPECT_THROW_WITH(load("optim: {momentun: 1}"), ConfigError, "Try: the nearest one, optim.momentum");
  COHORT_EXPECT_THROW_WITH(load("train: {lr: 1}"), ConfigError, "Try: the nearest one, optim.lr");
  COHORT_EXPECT_THROW_WITH(load("optimizer: {lr: 1}"), ConfigError, "Try: the nearest one, optim");
  COHORT_EXPECT_THROW_WITH(load("epochs: 1"), ConfigError, "train.epochs (inside 'train:')");
  COHORT_EXPECT_THROW_WITH(
      load("", {"train.epoch=1"}), ConfigError,
      "override 'train.epoch=1': unknown key 'train.epoch'. Try: the nearest one, train.epochs");
  COHORT_EXPECT_THROW_WITH(load("", {"nosuch=1"}), ConfigError, "unknown section 'nosuch'");
  COHORT_EXPECT_THROW_WITH(load("", {"optim=1"}), ConfigError, "'optim' is a section");
  COHORT_EXPECT_THROW_WITH(load("", {"optim.lr"}), ConfigError, "expected key=value");
}

TEST(ConfigTest, AWrongTypeNamesPlaceKeyGotAndExpected) {
  COHORT_EXPECT_THROW_WITH(load("optim:\n  lr: fast\n"), ConfigError,
                           "run.yaml, line 2, column 7: optim.lr: got 'fast', expected a number >= 0");
  COHORT_EXPECT_THROW_WITH(load("optim: {lr: \"0.1\"}"), ConfigError, "the text \"0.1\" (in quotes)");
  COHORT_EXPECT_THROW_WITH(load("train: {epochs: 1.5}"), ConfigError,
                           "got '1.5', expected a whole number >= 1");
  COHORT_EXPECT_THROW_WITH(load("train: {epochs: [1]}"), ConfigError, "got a list, expected a whole number");
  COHORT_EXPECT_THROW_WITH(load("train:\n  epochs:\n"), ConfigError, "train.epochs: got nothing, expected");
  COHORT_EXPECT_THROW_WITH(load("data: {shuffle: 2}"), ConfigError, "got '2', expected true or false");
  COHORT_EXPECT_THROW_WITH(load("run: {name: [a]}"), ConfigError, "run.name: got a list");
  COHORT_EXPECT_THROW_WITH(load("schedule: {milestones: [1, x]}"), ConfigError,
                           "expected a list of whole numbers");
  COHORT_EXPECT_THROW_WITH(load("model: {options: [a]}"), ConfigError, "expected names with values");
  COHORT_EXPECT_THROW_WITH(load("model: {options: {a: [1]}}"), ConfigError, "model.options.a: got a list");
  COHORT_EXPECT_THROW_WITH(load("data: {train_transforms: [{Resize: big}]}"), ConfigError,
                           "data.train_transforms: Resize: got 'big'");
  COHORT_EXPECT_THROW_WITH(load("data: {train_transforms: [[Resize]]}"), ConfigError,
                           "expected a transform such as");
  COHORT_EXPECT_THROW_WITH(load("optim: 3"), ConfigError, "optim: got '3', expected keys with values");
  COHORT_EXPECT_THROW_WITH(load("- a"), ConfigError, "got a list, expected sections");
  COHORT_EXPECT_THROW_WITH(load("? [a]\n: b\n"), ConfigError, "as a key, expected a name");
  COHORT_EXPECT_THROW_WITH(load("", {"optim.lr=x"}), ConfigError, "override 'optim.lr=x': optim.lr: got 'x'");
}

TEST(ConfigTest, AValueOutOfRangeIsRejected) {
  COHORT_EXPECT_THROW_WITH(load("optim: {lr: -1}"), ConfigError, "optim.lr: got -1, expected a number >= 0");
  COHORT_EXPECT_THROW_WITH(load("optim: {lr: .inf}"), ConfigError, "got '.inf'");
  COHORT_EXPECT_THROW_WITH(load("optim: {momentum: 1.5}"), ConfigError, "expected a number >= 0 and <= 1");
  COHORT_EXPECT_THROW_WITH(load("model: {width: 0}"), ConfigError,
                           "model.width: got 0, expected a number > 0");
  COHORT_EXPECT_THROW_WITH(load("train: {epochs: 0}"), ConfigError,
                           "train.epochs: got 0, expected a whole number");
  COHORT_EXPECT_THROW_WITH(load("train: {epochs: 99999999999999999999}"), ConfigError,
                           "expected a whole number");
  COHORT_EXPECT_THROW_WITH(load("optim: {lr_scaling: linea}"), ConfigError,
                           "expected one of none, linear, sqrt");
  COHORT_EXPECT_THROW_WITH(load("optim: {name: \"\"}"), ConfigError, "expected the name of an optimizer");
  COHORT_EXPECT_THROW_WITH(load("train: {device: \"gpu\"}"), ConfigError,
                           "expected auto, cpu, cuda or cuda:K");
  COHORT_EXPECT_THROW_WITH(load("data: {train_transforms: imagent}"), ConfigError,
                           "Try: data.train_transforms: imagenet");
  COHORT_EXPECT_THROW_WITH(load("schedule: {milestones: [-1]}"), ConfigError, "got -1, expected a list");
}

TEST(ConfigTest, WhatSpansKeysIsChecked) {
  COHORT_EXPECT_THROW_WITH(load("data: {mean: [0.5, 0.5, 0.5]}"), ConfigError, "as many in both");
  COHORT_EXPECT_THROW_WITH(load("data: {mean: [0.5], std: [1]}"), ConfigError,
                           "one per channel of data.color rgb");
  COHORT_EXPECT_THROW_WITH(load("optim: {betas: [0.9]}"), ConfigError,
                           "optim.betas has 1 numbers: expected 2");
  COHORT_EXPECT_THROW_WITH(load("optim: {nesterov: true, momentum: 0}"), ConfigError,
                           "optim.nesterov is true");
  COHORT_EXPECT_THROW_WITH(load("schedule: {warmup_steps: 1, warmup_epochs: 1}"), ConfigError,
                           "more than one of");
  COHORT_EXPECT_THROW_WITH(load("schedule: {warmup_steps: 1, name: one_cycle}"), ConfigError,
                           "schedule.one_cycle has a warm-up of its own");
  COHORT_EXPECT_THROW_WITH(load("schedule: {milestones: [3, 3]}"), ConfigError, "expected numbers that rise");
  EXPECT_TRUE(load("{train: {script: true}, distributed: {gradients: ddp}}").warnings.empty());
  Config config;
  config.train.epochs = -1;
  COHORT_EXPECT_THROW_WITH(check_config(config), ConfigError, "train.epochs: got -1");
}

TEST(ConfigTest, ARunIsCalledAsItsModelUnlessItHasAName) {
  EXPECT_EQ(run_name({}, {.name = "mlp"}), "mlp");
  EXPECT_EQ(run_name({.name = "first"}, {.name = "mlp"}), "first");
}

TEST(ConfigTest, AKeyThatHasNoEffectIsSaid) {
  Config config = load("optim: {name: sgd, eps: 1e-3}\nschedule: {gamma: 0.5}\n");
  EXPECT_EQ(config.warnings,
            (std::vector<std::string>{"optim.eps has no effect with optim.name sgd",
                                      "schedule.gamma has no effect with schedule.name constant"}));
  const std::vector<std::string> once = config.warnings;
  check_config(config);
  EXPECT_EQ(config.warnings, once);
  EXPECT_EQ(
      load("distributed: {gradients: average, bucket_cap_mb: 1}\n").warnings,
      std::vector<std::string>{"distributed.bucket_cap_mb has no effect with distributed.gradients average"});
}

TEST(ConfigTest, TextThatIsNotYamlIsRejectedWithLineAndColumn) {
  COHORT_EXPECT_THROW_WITH(load("model:\n  name: [a\noptim: {}\n"), ConfigError, "run.yaml, line 3, column ");
  COHORT_EXPECT_THROW_WITH(load("a: }\n"), ConfigError, "this is not YAML");
  COHORT_EXPECT_THROW_WITH(load("model: {name: a}\n---\nmodel: {name: b}\n"), ConfigError,
                           "a second document");
  COHORT_EXPECT_THROW_WITH(load(std::string("a\0b", 3)), ConfigError, "a zero byte");
  COHORT_EXPECT_THROW_WITH(load(std::string(300000, '#')), ConfigError, "the file is too large");
  COHORT_EXPECT_THROW_WITH(load(std::string(900, '[')), ConfigError, "opening brackets");
  COHORT_EXPECT_THROW_WITH(load("a:\n" + std::string(501, ' ') + "b: 1"), ConfigError,
                           "line 2, column 1: more than 500 blanks");
  std::string nested = "a:\n";
  for (int i = 0; i < 501; ++i) nested += "- ";
  COHORT_EXPECT_THROW_WITH(load(nested), ConfigError, "more than 500 of '- '");
  COHORT_EXPECT_THROW_WITH(load("run: {name: " + std::string(1001, 'a') + "}"), ConfigError,
                           "got a text of 1001 bytes");
  COHORT_EXPECT_THROW_WITH(load("run: {name: a}\n, 60]\n"), ConfigError, "run.yaml, line 2");
  COHORT_EXPECT_THROW_WITH(load("", {"optim.lr=[1"}), ConfigError,
                           "override 'optim.lr=[1': this is not YAML");
}

TEST(ConfigTest, AKeyThatStandsTwiceIsRejected) {
  COHORT_EXPECT_THROW_WITH(load("optim:\n  lr: 1\n  lr: 2\n"), ConfigError,
                           "line 3, column 3: 'optim.lr' is set twice");
  COHORT_EXPECT_THROW_WITH(load("optim: {lr: 1}\noptim: {eps: 1}\n"), ConfigError, "'optim' stands twice");
  COHORT_EXPECT_THROW_WITH(load("model: {options: {a: 1, a: 2}}"), ConfigError, "'a' stands twice");
  COHORT_EXPECT_THROW_WITH(load("data: {val_transforms: [{R: {a: 1, a: 2}}]}"), ConfigError,
                           "'a' stands twice");
}

TEST(ConfigTest, AMissingFileIsNamed) {
  COHORT_EXPECT_THROW_WITH(load_config("/nonexistent/x.yaml"), DataError,
                           "/nonexistent/x.yaml: the configuration");
  COHORT_EXPECT_THROW_WITH(load_config("/"), DataError, "cannot be read");
}

TEST(ConfigTest, AFileWithoutAnEndIsRejected) {
  COHORT_EXPECT_THROW_WITH(load_config("/dev/zero"), ConfigError, "the file is too large");
}

TEST(ConfigTest, PresetsAreExpandedAndEndWithToTensorAndNormalize) {
  Config config = load("data: {image_size: 64, mean: [0.5, 0.5, 0.5], std: [1, 1, 1]}");
  const auto train = train_transforms(config.data);
  ASSERT_EQ(train.size(), 4U);
  EXPECT_EQ(train[0], (TransformConfig{"RandomResizedCrop", {{"", {64}}}}));
  EXPECT_EQ(train[1].name, "RandomHorizontalFlip");
  EXPECT_EQ(train[2].name, "ToTensor");
  EXPECT_EQ(train[3].args.at("mean"), (std::vector<double>{0.5, 0.5, 0.5}));
  const auto val = val_transforms(config.data);
  EXPECT_EQ(val[0], (TransformConfig{"Resize", {{"", {73}}}}));  // int(64 / 0.875)
  EXPECT_EQ(val[1], (TransformConfig{"CenterCrop", {{"", {64}}}}));
  config = load("data: {type: idx}");
  EXPECT_EQ(train_transforms(config.data), (std::vector<TransformConfig>{{"ToTensor", {}}}));
  config = load("data: {train_transforms: [ToTensor], val_transforms: resize, image_size: 8}");
  EXPECT_EQ(train_transforms(config.data).size(), 1U);
  EXPECT_EQ(val_transforms(config.data)[0].args.at(""), (std::vector<double>{8, 8}));
  config = load("data: {train_transforms: crop_flip, image_size: 32}");
  EXPECT_EQ(train_transforms(config.data)[0].args.at("padding"), std::vector<double>{4});
  config.data.train_transforms.preset = "flop";  // by a program, so the reader has not seen it
  COHORT_EXPECT_THROW_WITH(train_transforms(config.data), ConfigError,
                           "preset of transforms: got 'flop', expected one of none, resize, flip, crop_flip, "
                           "imagenet");
}

TEST(ConfigTest, EachPresetThatAKeyTakesStandsForTransforms) {
  for (const char* key : {"data.train_transforms", "data.val_transforms"}) {
    const std::vector<std::string>& presets = find_key(key)->choices;
    EXPECT_GT(presets.size(), 3U);
    for (const std::string& preset : presets) {
      SCOPED_TRACE(preset);
      DataConfig data;
      data.train_transforms.preset = data.val_transforms.preset = preset;
      EXPECT_NO_THROW(train_transforms(data));
      EXPECT_NO_THROW(val_transforms(data));
    }
  }
}

TEST(ConfigTest, WhatIsLeftEmptyFollowsFromOtherKeys) {
  const Config config =
      load("data: {path: d, val: v}\nrun: {best_metric: val_loss}\ntrain: {batch_size: 9}\n");
  EXPECT_EQ(train_path(config.data), "d/train");
  EXPECT_EQ(val_path(config.data), "v");
  EXPECT_FALSE(best_is_max(config.run));
  EXPECT_TRUE(best_is_max(Config().run));
  EXPECT_EQ(eval_batch_size(config.train), 9);
}

TEST(ConfigTest, TheShippedConfigurationsAreReadWithoutWarnings) {
  const Config fashion = load_config(source_file("configs/fashion-vgg.yaml"));
  EXPECT_EQ(fashion.model.pools, 4);
  EXPECT_EQ(fashion.data.color, "gray");
  EXPECT_EQ(fashion.schedule.warmup_fraction, 0.3);
  EXPECT_TRUE(fashion.warnings.empty());
  const Config vgg = load_config(source_file("configs/vgg.yaml"));
  EXPECT_EQ(vgg.train.eval_every, 10);
  EXPECT_EQ(vgg.run.save_every, 5);
  EXPECT_EQ(vgg.schedule.milestones, (std::vector<int64_t>{30, 60, 80}));
  EXPECT_TRUE(vgg.warnings.empty());
  const Config resnet = load_config(source_file("configs/resnet50.yaml"));
  EXPECT_EQ(resnet.schedule.name, "cosine");
  EXPECT_TRUE(resnet.warnings.empty());
}

TEST(ConfigTest, ATextOnTheCommandLineIsTakenAsItIs) {
  const Config config = load_config_text(
      "model: {name: vgg11}", "run.yaml",
      {"run.dir=/tmp/a #1", "data.path=x: y", "run.name=\"quoted # too\"", "data.train=[1]", "run.resume="});
  EXPECT_EQ(config.run.dir, "/tmp/a #1");
  EXPECT_EQ(config.data.path, "x: y");
  EXPECT_EQ(config.run.name, "quoted # too");
  EXPECT_EQ(config.data.train, "[1]");
  EXPECT_EQ(config.run.resume, "");
}

TEST(ConfigTest, TwoNamesOfOneThingMustAgreeOnTheCommandLineToo) {
  const auto load_with = [](const std::vector<std::string>& overrides) {
    return load_config_text("MODEL: vgg11", "run.yaml", overrides);
  };
  EXPECT_EQ(load_with({"WD=1e-3", "WEIGHT_DECAY=0.001"}).optim.weight_decay, 1e-3);
  EXPECT_EQ(load_with({"WD=1e-3", "WD=1e-4"}).optim.weight_decay, 1e-4);
  COHORT_EXPECT_THROW_WITH(load_with({"WD=1e-3", "WEIGHT_DECAY=1e-4"}), ConfigError,
                           "WEIGHT_DECAY is 0.0001 but WD is 0.001");
}

TEST(ConfigTest, NumGpusAndTheDeviceTogetherAreRejectedInAnyOrder) {
  for (const char* text : {"train: {device: cpu}\nNUM_GPUS: 1", "NUM_GPUS: 1\ntrain: {device: cpu}",
                           "distributed: {nproc_per_node: 2}\nNUM_GPUS: 2"}) {
    COHORT_EXPECT_THROW_WITH(load_config_text(text, "run.yaml", {}), ConfigError, "is set twice: first as ");
  }
}

TEST(ConfigTest, HelpAndDocumentationListEveryKey) {
  const std::string help = config_help();
  const std::string page = test::read_file(source_file("docs/reference/keys.md"));
  for (const ConfigKey& key : config_keys()) {
    EXPECT_NE(help.find(key.name), std::string::npos) << key.name;
    EXPECT_NE(page.find(std::string("| `") + key.name + "` |"), std::string::npos) << key.name;
  }
  // The reference is the table's, word for word: paste what a failure of this test prints.
  EXPECT_NE(page.find(config_markdown()), std::string::npos)
      << "docs/reference/keys.md does not carry this reference:\n"
      << config_markdown();
}

}  // namespace
}  // namespace cohort::config
