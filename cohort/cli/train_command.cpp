// From the command line to a run, in this order: plug-ins, the file with its overrides, options that set a
// key, the run folder. Then this process either starts ranks of itself or trains. A child is told its rank by
// the environment, goes the same way, and so trains. Signals are prepared before anything slow: a run that is
// ended early still ends as documented.
#include <algorithm>
#include <cctype>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/load_plugin.h"
#include "cohort/base/log.h"
#include "cohort/cli/internal/commands.h"
#include "cohort/cli/internal/config_option.h"
#include "cohort/comm/job.h"
#include "cohort/config/config.h"
#include "cohort/launch/read_options.h"
#include "cohort/launch/run.h"
#include "cohort/launch/worker.h"
#include "cohort/train/check_parts.h"
#include "cohort/train/run.h"
#include "cohort/train/run_folder.h"

namespace cohort::cli {
namespace {

namespace fs = std::filesystem;

struct TrainArguments {
  std::string config;
  std::vector<std::string> overrides;
  std::vector<std::string> plugins;
  std::string resume;
  std::string device;
  std::string nproc_per_node;
  std::int64_t profile = 0;
  bool help_config = false;
  bool dump_config = false;
  bool fast_dev_run = false;
};

void print_result(const train::RunResult& result) {
  for (const auto& [name, value] : result.fit.metrics) std::printf("%s %.6g\n", name.c_str(), value);
  const auto print_if_there = [&](const char* what, const fs::path& path) {
    if (fs::exists(path)) std::printf("%-12s %s\n", what, path.c_str());
  };
  if (result.fit.best_epoch > 0) {
    std::printf("best %.6g (epoch %lld)\n", result.fit.best, static_cast<long long>(result.fit.best_epoch));
  }
  // Each line is a file that exists: settings, fast_dev_run or an early end may have left one out.
  print_if_there("checkpoint", result.folder / "checkpoints" / "last");
  print_if_there("best", result.folder / "checkpoints" / "best");
  print_if_there("curves", result.folder / "curves.svg");
  print_if_there("metrics", result.folder / "metrics.csv");
  print_if_there("tensorboard", result.folder / "tensorboard");
  if (result.profile.empty()) return;
  std::printf("%-12s %s\n\n%s", "profile", (result.folder / "profile.json").c_str(), result.profile.c_str());
}

/// This program by its path, with the arguments that it was called with. /proc/self/exe, since argv[0] may be
/// a bare name that the child's PATH finds elsewhere, or not at all.
std::vector<std::string> own_command() {
  std::vector<std::string> command = launch::own_arguments();
  command.front() = fs::read_symlink("/proc/self/exe").string();
  return command;
}

/// How many ranks to start here: nothing when a launcher has started this one, or one is enough. PET_* are
/// read for a job that begins here alone: inside another they are its launcher's.
std::optional<launch::RunOptions> ranks_to_start(const TrainArguments& arguments,
                                                 const config::Config& config) {
  const std::string& asked = arguments.nproc_per_node;
  const int ranks = static_cast<int>(config.distributed.nproc_per_node);
  const comm::Job job = comm::job_from_environment();
  if (job.launcher == comm::Launcher::kNone) {
    if (ranks == 1) return std::nullopt;
    return launch::read_run_flags({{"standalone", "1"}, {"nproc-per-node", std::to_string(ranks)}},
                                  own_command());
  }
  // Only the option is compared: the key may stand in a file that is used with and without a launcher.
  if (!asked.empty() && ranks != job.local_world_size) {
    throw UsageError("cli.train",
                     base::concat("--nproc-per-node is ", asked, ", and ", comm::to_string(job.launcher),
                                  " has started ", job.local_world_size, " ranks here already"),
                     "leave it out");
  }
  return std::nullopt;
}

/// As a shell reads it back.
std::string quoted(const std::string& text) {
  // Characters that no POSIX shell treats as special. All others go between single quotes, where only a
  // single quote needs care.
  const bool plain = !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || std::strchr("%+,-./:=@_", c) != nullptr;
  });
  if (plain) return text;
  std::string result = "'";
  for (const char c : text) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return result + "'";
}

/// A command that resumes the run in `folder`.
std::string command_to_resume(const TrainArguments& arguments, const Context& context,
                              const fs::path& folder) {
  std::string command = quoted(context.program) + " train --config " + quoted(folder / "config.yaml") +
                        " --resume auto " + quoted("run.dir=" + folder.string());
  // Without the option a job of several ranks had a launcher. On one host --nproc-per-node gives the same
  // again; a job of several hosts has to be started by its launcher.
  const comm::Job job = comm::job_from_environment();
  if (!arguments.nproc_per_node.empty()) {
    command += " --nproc-per-node " + quoted(arguments.nproc_per_node);
  } else if (job.world_size > 1 && job.world_size == job.local_world_size) {
    command += base::concat(" --nproc-per-node ", job.world_size);
  }
  for (const std::string& plugin : arguments.plugins) command += " --load " + quoted(plugin);
  return command;
}

/// The run folder whose own file the configuration is, where that run is to resume: the file may have been
/// copied or moved with its folder, whatever run.dir in it says. Empty: the configuration says it.
fs::path folder_to_resume(const TrainArguments& arguments, const config::Config& config) {
  // What the user gives on the command line wins over where the file lies.
  const auto sets = [&](std::string_view key) {
    return std::ranges::any_of(arguments.overrides, [&](const auto& each) { return each.starts_with(key); });
  };
  const std::string& resume = config.run.resume;
  const bool is_by_name = resume == "auto" || resume == "last" || resume == "best";
  if (resume.empty() || sets("run.dir=")) return {};
  // A run of another name is another run.
  if (config.run.dir.empty() && (!is_by_name || sets("run.name="))) return {};
  return train::run_folder_of(arguments.config);
}

/// What there is to say where the run in `own` continues there, and its file names the folder `named`.
std::string text_of_folder(const TrainArguments& arguments, const fs::path& own, const std::string& named) {
  if (own.empty()) return "";
  std::error_code ignored;
  // weakly_canonical(), as the folder that is named may be gone.
  if (named.empty() || fs::weakly_canonical(named, ignored) == own) return "";
  return base::concat("run.dir of ", arguments.config, " is ", named, "; continuing the run in ",
                      own.string(), ", whose file it is (run.dir=", named,
                      " on the command line: with that)");
}

/// The configuration that the command line asks for.
config::Config read_config(const TrainArguments& arguments) {
  std::vector<std::string> overrides = arguments.overrides;
  if (!arguments.device.empty()) overrides.push_back("train.device=" + arguments.device);
  if (arguments.profile > 0) overrides.push_back(base::concat("run.profile=", arguments.profile));
  config::Config config = load_config("cli.train", arguments.config, overrides);
  if (!arguments.resume.empty()) config.run.resume = arguments.resume;
  if (!arguments.nproc_per_node.empty()) {
    config.distributed.nproc_per_node = launch::read_nproc_per_node(arguments.nproc_per_node, num_gpus);
  }
  return config;
}

/// Returns `config` for the run in the folder `own`, where there is one.
config::Config in_folder(config::Config config, const fs::path& own) {
  if (!own.empty()) config.run.dir = own.string();
  return config;
}

int train_command(const TrainArguments& arguments, const Context& context) {
  // There is nothing to save until training begins, which then handles it; by default it would end the
  // process.
  std::signal(SIGUSR1, SIG_IGN);
  if (arguments.help_config) {
    std::fputs(config::config_help().c_str(), stdout);
    return 0;
  }
  for (const std::string& plugin : arguments.plugins) base::load_plugin(plugin);
  const config::Config given = read_config(arguments);
  const fs::path own = folder_to_resume(arguments, given);
  const std::string folder_message = text_of_folder(arguments, own, given.run.dir);
  const config::Config full = in_folder(given, own);
  const config::Config config = arguments.fast_dev_run ? train::limit_to_fast_dev_run(full) : full;
  train::check_parts(config);
  if (arguments.dump_config) {
    for (const std::string& warning : config.warnings)
      std::fprintf(stderr, "cohort: warning: %s\n", warning.c_str());
    std::fputs(config::dump_config(config).c_str(), stdout);
    return 0;
  }
  // Before anything of the run is made: the folder is the children's affair, not the launcher's.
  if (const auto ranks = ranks_to_start(arguments, config)) return start_job(*ranks);
  if (!folder_message.empty() && !arguments.fast_dev_run && comm::job_from_environment().rank == 0) {
    base::log_info(folder_message);
  }
  // Where the `tee` after a pipe is ended by the same Ctrl-C, the run saves and ends as it does on a
  // terminal. A handler, since programs that are started inherit what is ignored.
  std::signal(SIGPIPE, [](int) {});
  const train::RunResult result = train::run_training(config, context.command_line);
  if (result.rank == 0) print_result(result);
  if (result.fit.signal == 0) return 0;
  // 128 + number, as a shell reports a process that a signal ended.
  if (result.rank != 0) return 128 + result.fit.signal;
  std::fprintf(stderr, "cohort: stopped by signal %d after step %lld; to resume:\n  %s\n", result.fit.signal,
               static_cast<long long>(result.fit.steps),
               command_to_resume(arguments, context, result.folder).c_str());
  return 128 + result.fit.signal;
}

}  // namespace

void add_train(CLI::App& app, Context& context) {
  auto arguments = std::make_shared<TrainArguments>();
  CLI::App* command = app.add_subcommand("train", "Train a model as a YAML file says");
  add_config_option(
      *command, arguments->config,
      "The configuration (docs/reference/keys.md lists every key); without it, every key that is not "
      "given as key=value has its default");
  command->add_flag("--help-config", arguments->help_config,
                    "Print every key with its default and meaning, and end");
  command->add_option("overrides", arguments->overrides,
                      "key=value: change one setting, for instance optim.lr=0.05 train.epochs=2");
  command->add_option(
      "--resume", arguments->resume,
      "auto: resume from the last checkpoint, or start afresh when there is none; last, best, or a "
      "checkpoint folder: resume from there");
  repeatable(
      command->add_option("--load", arguments->plugins,
                          "A shared library with models, data sets, operators or other parts of yours"),
      "FILE");
  command->add_option("--device", arguments->device, "auto, cpu, cuda or cuda:K");
  command->add_option(
      "--nproc-per-node,--nproc_per_node", arguments->nproc_per_node,
      "Train on so many ranks of this host: a number, gpu (one for each GPU), cpu (one for each "
      "core) or auto. As cohort run with this command; the key distributed.nproc_per_node");
  command
      ->add_option(
          "--profile", arguments->profile,
          "Record the operators of so many steps, after three that do not count: a table of where the "
          "time goes, and profile.json in the run folder (chrome://tracing). The key run.profile")
      ->check(CLI::PositiveNumber);
  command->add_flag("--dump-config", arguments->dump_config, "Print the effective configuration and end");
  command->add_flag("--fast-dev-run", arguments->fast_dev_run,
                    "Two steps of everything: training, evaluation, checkpoint. Finds mistakes in a minute");
  command->footer(
      "Examples:\n"
      "  cohort train --config configs/fashion-vgg.yaml data.path=data/fashion-mnist\n"
      "  cohort train --config configs/vgg.yaml data.path=photos train.epochs=10 --resume auto\n"
      "  cohort train --config configs/vgg.yaml data.path=photos --nproc-per-node 2\n"
      "  cohort train data.path=photos model.name=resnet18 optim.name=adamw\n"
      "CTRL-C finishes the step, saves and says how to resume; a second one ends at once.");
  command->callback([arguments, &context] {
    context.action = [arguments, &context] { return train_command(*arguments, context); };
  });
}

}  // namespace cohort::cli
