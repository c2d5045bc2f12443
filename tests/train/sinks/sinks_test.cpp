#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <nlohmann/json.hpp>

#include "cohort/base/error.h"
#include "cohort/train/sinks/curves.h"
#include "cohort/train/sinks/internal/append_file.h"
#include "cohort/train/sinks/metrics_log.h"
#include "cohort/train/sinks/tensorboard.h"
#include "tests/support/source_dir.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::train {
namespace {

using test::read_file;
using test::TempDir;

void write_two_epochs(MetricsLog& log, int64_t from_step = 1) {
  for (int64_t step = from_step; step <= 4; ++step) {
    const int64_t epoch = (step + 1) / 2;
    log.write_step(step, epoch, {{"loss", 1.0 / static_cast<double>(step)}});
    if (step % 2 == 0)
      log.write_epoch(step, epoch, {{"train_loss", 0.1 * static_cast<double>(epoch)}, {"lr", 0.5}});
  }
}

TEST(MetricsLogTest, WritesAnObjectPerLineAndARowPerEpoch) {
  TempDir dir;
  MetricsLog log(dir.path());
  write_two_epochs(log);
  std::istringstream lines(read_file(dir / "metrics.jsonl"));
  std::string line;
  int steps = 0;
  while (std::getline(lines, line)) steps += nlohmann::json::parse(line).at("type") == "step";
  EXPECT_EQ(steps, 4);
  EXPECT_EQ(read_file(dir / "metrics.csv"), "epoch,step,train_loss,lr\n1,2,0.1,0.5\n2,4,0.2,0.5\n");
}

TEST(MetricsLogTest, AfterAResumeTheFilesAreThoseOfAStraightRun) {
  TempDir straight, resumed;
  {
    MetricsLog log(straight.path());
    write_two_epochs(log);
  }
  for (const int64_t checkpoint : {0, 1, 2, 3, 4}) {
    MetricsLog(resumed.path()).truncate_after(0, 0);
    {
      MetricsLog log(resumed.path());
      write_two_epochs(log);
    }
    // The process died while it wrote a line.
    AppendFile(resumed / "metrics.jsonl").write("{\"type\":\"step\",\"st");
    AppendFile(resumed / "metrics.csv").write("3,6,0.");
    MetricsLog log(resumed.path());
    log.truncate_after(checkpoint, checkpoint / 2);
    EXPECT_EQ(log.epochs().size(), static_cast<size_t>(checkpoint / 2));
    write_two_epochs(log, checkpoint + 1);
    for (const char* name : {"metrics.jsonl", "metrics.csv"}) {
      EXPECT_EQ(read_file(resumed / name), read_file(straight / name))
          << name << " resumed at step " << checkpoint;
    }
  }
}

TEST(MetricsLogTest, AnEpochThatIsNotInTheCheckpointIsCutThoughItsStepIs) {
  TempDir dir;
  MetricsLog log(dir.path());
  write_two_epochs(log);
  log.truncate_after(4, 1);
  ASSERT_EQ(log.epochs().size(), 1U);
  EXPECT_EQ(log.epochs()[0].find("train_loss"), 0.1);
}

TEST(MetricsLogTest, NewColumnsAndNumbersThatAreNotFiniteKeepTheFilesReadable) {
  TempDir dir;
  MetricsLog log(dir.path());
  log.write_epoch(1, 1, {{"a", 1}});
  log.write_epoch(2, 2, {{"b,c", std::nan("")}, {"a", std::numeric_limits<double>::infinity()}});
  EXPECT_EQ(read_file(dir / "metrics.csv"), "epoch,step,a,\"b,c\"\n1,1,1,\n2,2,inf,nan\n");
  EXPECT_NE(read_file(dir / "metrics.jsonl").find("\"b,c\":null"), std::string::npos);
  EXPECT_TRUE(std::isnan(*MetricsLog(dir.path()).epochs().at(1).find("b,c")));
}

TEST(MetricsLogTest, AFileThatCannotBeWrittenIsNamed) {
  COHORT_EXPECT_THROW_WITH(MetricsLog("/nonexistent"), SystemError, "/nonexistent/metrics.jsonl");
  AppendFile full("/dev/full");
  COHORT_EXPECT_THROW_WITH(full.write("x"), SystemError,
                           "/dev/full cannot be written: No space left on device");
}

TEST(TensorBoardTest, Crc32cIsTheOneOfTheStandard) {
  const std::string text = "123456789";
  EXPECT_EQ(crc32c(std::as_bytes(std::span(text))), 0xe3069283U);
}

TEST(TensorBoardTest, AFolderThatCannotBeMadeIsNamed) {
  COHORT_EXPECT_THROW_WITH(TensorBoardWriter("/dev/null/tensorboard"), SystemError,
                           "/dev/null/tensorboard cannot be made");
}

/// Runs a script of tests/train with Python that has TensorBoard; returns what it printed.
std::string run_python(const std::string& script, const std::string& argument) {
  const char* python = std::getenv("COHORT_PYTHON");
  if (python == nullptr) return "";
  const std::string command =
      std::string("'") + python + "' '" + (test::source_dir() / script).string() + "' '" + argument + "'";
  std::FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) throw std::runtime_error("cannot run " + command);
  std::string output;
  char buffer[4096];
  for (size_t count; (count = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) output.append(buffer, count);
  const int status = ::pclose(pipe);
  if (status != 0) throw std::runtime_error(command + " failed:\n" + output);
  return output;
}

TEST(TensorBoardTest, ItsOwnReaderReadsScalarsImagesTextAndPurgesAtAResume) {
  if (std::getenv("COHORT_PYTHON") == nullptr) {
    FAIL() << "COHORT_PYTHON is not set: a Python with tensorboard (./test sets it)";
  }
  TempDir dir;
  const std::string png = "not decoded by the reader";
  {
    TensorBoardWriter writer(dir / "tensorboard");
    writer.image_png("input/0", std::as_bytes(std::span(png)), 28, 27, 1, 0);
    writer.text("config", "lr: 0.1", 0);
    for (int64_t step = 1; step <= 10; ++step)
      writer.scalar("train/loss", static_cast<double>(step) / 4, step);
  }
  {
    TensorBoardWriter writer(dir / "tensorboard", 6);  // the checkpoint was made after step 6
    for (int64_t step = 7; step <= 8; ++step) writer.scalar("train/loss", -static_cast<double>(step), step);
  }
  const auto read =
      nlohmann::json::parse(run_python("tests/train/sinks/read_events.py", (dir / "tensorboard").string()));
  EXPECT_EQ(read.at("scalars").at("train/loss"),
            nlohmann::json::parse("[[1,0.25],[2,0.5],[3,0.75],[4,1.0],[5,1.25],[6,1.5],[7,-7.0],[8,-8.0]]"));
  EXPECT_EQ(read.at("images").at("input/0"), nlohmann::json::parse("[[0,27,28,25]]"));
  EXPECT_EQ(read.at("texts").at("config"), "lr: 0.1");
}

TEST(CurvesTest, ShowsEachCurveWithAxesUnitsAndLegend) {
  std::vector<MetricRow> rows;
  for (int64_t epoch = 1; epoch <= 8; ++epoch) {
    const double e = static_cast<double>(epoch);
    MetricRow row{epoch,
                  epoch * 469,
                  {{"train_loss", 0.9 / e + 0.1}, {"train_accuracy", 1 - 0.3 / e}, {"lr", 0.1 / e}}};
    if (epoch % 2 == 0 || epoch == 1) {
      row.values.emplace_back("val_loss", 0.8 / e + 0.2);
      row.values.emplace_back("val_accuracy", 0.97 - 0.25 / e);
    }
    rows.push_back(row);
  }
  const std::string svg = curves_svg(curves_from_epochs(rows, "fashion <vgg> & more", "92.7 %"));
  for (const char* part :
       {">Loss<", ">Accuracy<", ">Learning rate<", ">epoch<", ">training<", ">validation<", ">accuracy (%)<",
        "fashion &lt;vgg&gt; &amp; more", "prefers-color-scheme: dark"}) {
    EXPECT_NE(svg.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  if (const char* folder = std::getenv("COHORT_KEEP_CURVES"))
    test::write_file(std::string(folder) + "/curves.svg", svg);
}

TEST(CurvesTest, ARunOfOneEpochAndNumbersThatAreNotFiniteStillMakeAPlot) {
  const std::vector<MetricRow> epochs = {
      {1, 2, {{"train_loss", std::nan("")}, {"val_loss", 0.5}, {"lr", 0}}}};
  TempDir dir;
  write_curves(dir / "curves.svg", curves_from_epochs(epochs, "one"));
  const std::string svg = read_file(dir / "curves.svg");
  EXPECT_NE(svg.find("<circle"), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
  COHORT_EXPECT_THROW_WITH(write_curves("/nonexistent/c.svg", curves_from_epochs(epochs, "one")), SystemError,
                           "/nonexistent/c.svg");
}

}  // namespace
}  // namespace cohort::train
