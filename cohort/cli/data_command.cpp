// Each subcommand is one function on one struct of arguments, which all of them share; a run of the program
// uses a single one. The work is cohort::data's; here are options and the texts that say what was made.
// Parsing only sets the action. It runs after the whole command line was found good, so a typing error makes
// no files.
#include <cinttypes>
#include <cstdio>
#include <filesystem>
#include <iomanip>
#include <memory>
#include <string>

#include "cohort/base/cpu.h"
#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/cli/internal/commands.h"
#include "cohort/data/dataset_tools.h"
#include "cohort/data/idx.h"

namespace cohort::cli {
namespace {

namespace fs = std::filesystem;

struct DataArguments {
  std::string source;
  std::string list;
  std::string out;
  std::string color = "rgb";
  int strip = 0;
  // Both limits are against archives that unpack to far more than their size.
  std::int64_t max_gib = data::TarOptions().max_bytes >> 30;
  std::int64_t max_entries = data::TarOptions().max_entries;
  int quality = 95;
  int threads = 0;
  bool link = false;

  int num_threads() const { return threads > 0 ? threads : base::usable_cores(); }
};

int say_made(const data::GeneratedFolder& made, const std::string& folder) {
  std::printf("%s: %" PRId64 " files, %.1f MiB\n", folder.c_str(), made.files,
              static_cast<double>(made.bytes) / (1024.0 * 1024.0));
  return 0;
}

int tar_command(const DataArguments& arguments) {
  const data::TarOptions options{arguments.strip, arguments.max_gib << 30, arguments.max_entries};
  return say_made(data::unpack_tar(arguments.source, arguments.out, options), arguments.out);
}

int list_command(const DataArguments& arguments) {
  return say_made(
      data::folder_from_list(arguments.source, arguments.list, arguments.out, {.link = arguments.link}),
      arguments.out);
}

/// IDX files become OUT/train and OUT/val; one that is there already is left alone.
int idx_command(const DataArguments& arguments, bool fashion) {
  data::IdxFolderOptions options;
  options.quality = arguments.quality;
  options.threads = arguments.num_threads();
  if (fashion) {
    // IDX files have numbers for labels. Without names the class folders are numbers too.
    const auto& names = data::fashion_mnist_class_names();
    options.class_names.assign(names.begin(), names.end());
  }
  for (const auto& [prefix, folder] : {std::pair{"train", "train"}, std::pair{"t10k", "val"}}) {
    const std::string out = (fs::path(arguments.out) / folder).string();
    // A second call after a failure makes only what is missing. folder_from_idx() makes a folder whole or not
    // at all.
    if (fs::exists(out)) {
      std::printf("%s is there already\n", out.c_str());
      continue;
    }
    // Looked for only now: who has removed the files of a finished part can still make the other.
    const data::IdxPair files = data::find_idx_pair(arguments.source, prefix);
    fs::create_directories(arguments.out);
    say_made(data::folder_from_idx(files.images, files.labels, out, options), out);
  }
  return 0;
}

int verify_command(const DataArguments& arguments) {
  const data::VerifyReport report = data::verify_folder(arguments.source, arguments.num_threads());
  for (const data::BrokenFile& broken : report.broken) {
    std::printf("%s: %s\n", broken.path.c_str(), broken.reason.c_str());
  }
  if (!report.passed_over.empty()) std::printf("%s\n", report.passed_over.c_str());
  std::printf("%" PRId64 " images checked, %zu broken\n", report.checked, report.broken.size());
  // Status 2, as for any fault of the user's: a script can stop before it trains.
  return report.broken.empty() ? 0 : 2;
}

int stats_command(const DataArguments& arguments) {
  const auto color = arguments.color == "gray" ? data::ColorMode::kGray : data::ColorMode::kRgb;
  const data::ChannelStatistics statistics =
      data::channel_statistics(arguments.source, color, arguments.num_threads());
  // YAML on stdout, so that it can go into a configuration as it is. Six decimals are more than 8-bit pixels
  // give.
  const auto print = [](const char* name, const std::vector<double>& values) {
    base::TextList list;
    for (const double value : values) list.add(std::fixed, std::setprecision(6), value);
    std::printf("  %s: [%s]\n", name, list.text().c_str());
  };
  std::printf("# %" PRId64 " images, %" PRId64 " pixels of %s\ndata:\n", statistics.images, statistics.pixels,
              arguments.source.c_str());
  print("mean", statistics.mean);
  print("std", statistics.deviation);
  return 0;
}

using Arguments = std::shared_ptr<DataArguments>;

CLI::App* add_command(CLI::App& data, Context& context, const Arguments& arguments, const char* name,
                      const char* help, int (*action)(const DataArguments&)) {
  CLI::App* command = data.add_subcommand(name, help);
  // Only the arguments are shared with the action. `context` is cli::run()'s and lives until the end.
  command->callback(
      [arguments, action, &context] { context.action = [arguments, action] { return action(*arguments); }; });
  return command;
}

void add_threads(CLI::App& command, const Arguments& arguments) {
  command.add_option("--threads", arguments->threads,
                     "Threads (default: the cores that this process may use)");
}

void add_idx_options(CLI::App& command, const Arguments& arguments) {
  command
      .add_option("--source", arguments->source,
                  "Folder with train-images-idx3-ubyte and its like, .gz or not")
      ->required();
  command.add_option("--out", arguments->out, "Folder to make: OUT/train and OUT/val")->required();
  command.add_option("--quality", arguments->quality, "JPEG quality, 1 to 100")->capture_default_str();
  add_threads(command, arguments);
}

}  // namespace

void add_data(CLI::App& app, Context& context) {
  CLI::App* data = app.add_subcommand("data", "Make, check and measure image folders");
  data->require_subcommand(1);
  const auto arguments = std::make_shared<DataArguments>();

  CLI::App* tar = add_command(*data, context, arguments, "tar",
                              "A tar file (.tar, .gz, .bz2, .xz, .zst) becomes an image folder", tar_command);
  tar->add_option("archive", arguments->source, "The archive")->required();
  tar->add_option("out", arguments->out, "The folder to make")->required();
  tar->add_option("--strip", arguments->strip, "Leave out so many leading parts of each name")
      ->capture_default_str();
  tar->add_option("--max-gib", arguments->max_gib, "Reject an archive that unpacks to more")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 30))
      ->capture_default_str();
  tar->add_option("--max-entries", arguments->max_entries, "Reject an archive of more files and folders")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();

  CLI::App* list =
      add_command(*data, context, arguments, "list",
                  "A flat folder and a list of `file,label` lines become an image folder", list_command);
  list->add_option("folder", arguments->source, "The flat folder")->required();
  list->add_option("list", arguments->list, "The list (CSV)")->required();
  list->add_option("out", arguments->out, "The folder to make")->required();
  list->add_flag("--link", arguments->link, "Hard links instead of copies");

  add_idx_options(
      *add_command(*data, context, arguments, "idx", "IDX files (the MNIST family) become JPEG image folders",
                   [](const DataArguments& a) { return idx_command(a, false); }),
      arguments);
  add_idx_options(*add_command(*data, context, arguments, "fashion",
                               "The same for Fashion-MNIST, with the names of its classes",
                               [](const DataArguments& a) { return idx_command(a, true); }),
                  arguments);

  CLI::App* verify = add_command(*data, context, arguments, "verify",
                                 "Decode every image and list those that are broken", verify_command);
  verify->add_option("folder", arguments->source, "The image folder")->required();
  add_threads(*verify, arguments);

  CLI::App* stats =
      add_command(*data, context, arguments, "stats",
                  "Mean and deviation per channel, as data.mean and data.std want them", stats_command);
  stats->add_option("folder", arguments->source, "The image folder")->required();
  stats->add_option("--color", arguments->color, "rgb or gray")
      ->check(CLI::IsMember({"rgb", "gray"}))
      ->capture_default_str();
  add_threads(*stats, arguments);

  tar->footer(
      "Example:  cohort data tar photos.tar.gz photos --strip 1\n"
      "Then:     cohort data verify photos/train");
  list->footer(
      "Example:  cohort data list images labels.csv photos/train\n"
      "A line of the list is `file,label`. A first line that names the columns, file and label among them, "
      "allows\n"
      "for more columns and another order. Then:  cohort data verify photos/train");
  verify->footer(
      "Example:  cohort data verify photos/train\n"
      "Ends with status 2 when an image is broken; data.on_error: skip trains without them.");
  stats->footer(
      "Example:  cohort data stats photos/train\n"
      "Write what it prints into the configuration as data.mean and data.std.");
  data->footer(
      "Examples:\n"
      "  cohort data tar photos.tar.gz photos\n"
      "  cohort data list images labels.csv photos/train\n"
      "  cohort data verify photos/train\n"
      "  cohort data stats photos/train");
}

}  // namespace cohort::cli
