// Flat upper-case keys of published VGG training scripts.
#include "cohort/config/internal/flat_keys.h"

#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "cohort/config/config.h"
#include "tests/support/throws.h"

namespace cohort::config {
namespace {

Config load_text(const std::string& text, const std::vector<std::string>& overrides = {}) {
  return load_config_text(text, "vgg.yaml", overrides);
}

TEST(FlatKeysTest, EveryKeyIsRead) {
  const Config config = load_text(
      "MODEL: VGG19\nNUM_CLASSES: 5\nIMAGE_SIZE: 32\nBATCHSIZE: 16\nNUM_GPUS: 1\nEPOCHS: 3\nLR: 0.5\n"
      "MOMENTUM: 0.8\nWD: 0.001\nWEIGHT_DECAY: 1e-3\nMILESTONES: [1, 2]\nGAMMA: 0.3\nWORKERS: 1\n"
      "PIN_MEMORY: False\nSAVE_FREQUENCY: 2\nLOG_FREQUENCY: 7\nEVAL_FREQUENCY: 4\nDATA_PATH: ./d\n"
      "TRAIN_FILE: ./t\nTEST_FILE: ./v\nSEED: 9\n");
  EXPECT_EQ(config.model.name, "vgg19");
  EXPECT_EQ(config.model.num_classes, 5);
  EXPECT_EQ(config.data.image_size, 32);
  EXPECT_EQ(config.train.batch_size, 16);
  EXPECT_EQ(config.train.epochs, 3);
  EXPECT_EQ(config.optim.lr, 0.5);
  EXPECT_EQ(config.optim.momentum, 0.8);
  EXPECT_EQ(config.optim.weight_decay, 0.001);
  EXPECT_EQ(config.schedule.milestones, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(config.schedule.gamma, 0.3);
  EXPECT_EQ(config.data.workers, 1);
  EXPECT_FALSE(config.data.pin_memory);
  EXPECT_EQ(config.run.save_every, 2);
  EXPECT_EQ(config.run.log_every, 7);
  EXPECT_EQ(config.train.eval_every, 4);
  EXPECT_EQ(config.run.seed, 9);
  EXPECT_EQ(config.data.path, "./d");
  EXPECT_EQ(train_path(config.data), "./t");
  EXPECT_EQ(val_path(config.data), "./v");
  EXPECT_TRUE(config.warnings.empty());
}

TEST(FlatKeysTest, MissingKeysHaveTheStatedDefaults) {
  const Config config = load_text("DATA_PATH: photos\n");
  EXPECT_EQ(config.model.name, "vgg16");
  EXPECT_EQ(config.model.num_classes, 0);
  EXPECT_EQ(config.data.image_size, 64);
  EXPECT_EQ(config.schedule.name, "multistep");
  EXPECT_EQ(config.schedule.unit, "epoch");
  EXPECT_EQ(config.schedule.milestones, (std::vector<int64_t>{30, 60, 80}));
  EXPECT_EQ(config.schedule.gamma, 0.1);
  EXPECT_EQ(config.optim.lr, 0.01);
  EXPECT_EQ(config.optim.weight_decay, 5e-4);
  EXPECT_EQ(config.train.batch_size, 32);
  EXPECT_EQ(config.train.epochs, 90);
  EXPECT_EQ(config.train.eval_every, 10);
  EXPECT_EQ(config.run.save_every, 5);
  EXPECT_EQ(config.run.log_every, 100);
  EXPECT_EQ(config.run.seed, 1);
  EXPECT_EQ(train_path(config.data), "photos/train");
  EXPECT_EQ(val_path(config.data), "photos/val");
  const auto train = train_transforms(config.data);
  ASSERT_EQ(train.size(), 4U);
  EXPECT_EQ(train[0].name, "RandomResizedCrop");
  EXPECT_EQ(train[1].name, "RandomHorizontalFlip");
  EXPECT_EQ(train[3].args.at("mean"), (std::vector<double>{0.485, 0.456, 0.406}));
  EXPECT_EQ(val_transforms(config.data)[0].args.at(""), std::vector<double>{73});
}

TEST(FlatKeysTest, BothNamesOfWeightDecayMayStandWhenEqual) {
  EXPECT_EQ(load_text("WD: 0.0005\nWEIGHT_DECAY: 5.0e-4\n").optim.weight_decay, 5e-4);
  COHORT_EXPECT_THROW_WITH(load_text("WD: 0.0005\nWEIGHT_DECAY: 0.0001\n"), ConfigError,
                           "vgg.yaml, line 2, column 1: WEIGHT_DECAY is 0.0001 but WD is 0.0005");
}

TEST(FlatKeysTest, ALineWithoutASpaceAfterTheColonIsReadAndShown) {
  const Config config = load_text("LR: 0.1\nTRAIN_FILE:./data/train\nTEST_FILE:./data/val\n");
  EXPECT_EQ(train_path(config.data), "./data/train");
  EXPECT_EQ(val_path(config.data), "./data/val");
  ASSERT_EQ(config.warnings.size(), 2U);
  EXPECT_TRUE(test::message_contains(
      config.warnings[0], "vgg.yaml, line 2: no space after the colon in 'TRAIN_FILE:./data/train'"));
}

TEST(FlatKeysTest, SeveralGpusAreRanksAndNoneMeansTheCpu) {
  const Config config = load_text("NUM_GPUS: 4\n");
  EXPECT_TRUE(config.warnings.empty());
  EXPECT_EQ(config.distributed.nproc_per_node, 4);
  EXPECT_EQ(config.train.device, "auto");
  EXPECT_EQ(load_text("NUM_GPUS: 0\n").train.device, "cpu");
  EXPECT_EQ(load_text("NUM_GPUS: 0\n").distributed.nproc_per_node, 1);
  COHORT_EXPECT_THROW_WITH(load_text("NUM_GPUS: -1\n"), ConfigError,
                           "NUM_GPUS: got '-1', expected a whole number >= 0");
}

TEST(FlatKeysTest, MistakesAreNamedByTheKeyThatWasWritten) {
  COHORT_EXPECT_THROW_WITH(load_text("LR: 0.1\nBATCH_SIZE: 3\n"), ConfigError,
                           "line 2, column 1: unknown key 'BATCH_SIZE'. Try: the nearest one, BATCHSIZE");
  COHORT_EXPECT_THROW_WITH(load_text("LR: fast\n"), ConfigError, "LR: got 'fast', expected a number >= 0");
  COHORT_EXPECT_THROW_WITH(load_text("EPOCHS: 0\n"), ConfigError,
                           "EPOCHS: got 0, expected a whole number >= 1");
  COHORT_EXPECT_THROW_WITH(load_text("LR: 1\nLR: 2\n"), ConfigError, "'LR' stands twice");
}

TEST(FlatKeysTest, SectionsMayStandBesideFlatKeysButNotSetTheSame) {
  const Config config = load_text("LR: 0.3\ntrain: {device: cpu}\n", {"optim.lr=0.4", "EPOCHS=2"});
  EXPECT_EQ(config.optim.lr, 0.4);
  EXPECT_EQ(config.train.epochs, 2);
  EXPECT_EQ(config.train.device, "cpu");
  COHORT_EXPECT_THROW_WITH(load_text("LR: 0.3\noptim: {lr: 0.3}\n"), ConfigError,
                           "'optim.lr' is set twice: first as LR");
}

TEST(FlatKeysTest, EveryFlatKeyStandsForAKeyThatExists) {
  EXPECT_EQ(flat_keys().size(), 21U);
  const Config again = load_config_text(dump_config(load_text("MODEL: vgg16\n")), "dump");
  EXPECT_EQ(again, load_text("MODEL: vgg16\n"));
}

}  // namespace
}  // namespace cohort::config
