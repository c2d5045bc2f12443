#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cohort/cli/commands.h"
#include "cohort/cli/new_operator.h"
#include "cohort/core/atomic_file.h"
#include "cohort/core/error.h"
#include "cohort/core/version.h"

namespace cohort::cli {
namespace {

namespace fs = std::filesystem;

struct NewArguments {
  std::string name;
  std::string folder = ".";
  bool cuda = false;
};

/// The name becomes that of files, of C++ functions and of a namespace of LibTorch's.
void check_name(const std::string& name) {
  const auto fits = [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_'; };
  const bool is_name = !name.empty() && name.front() >= 'a' && name.front() <= 'z' &&
                       std::all_of(name.begin(), name.end(), fits) && name.size() <= 64;
  // What C++, LibTorch or Cohort has taken, of what one might think of.
  constexpr std::array<std::string_view, 30> kTaken = {
      "aten",  "at",     "auto", "bool",      "break",  "c10",   "case",   "char", "class", "cohort",
      "const", "delete", "do",   "double",    "else",   "float", "for",    "if",   "int",   "long",
      "main",  "new",    "prim", "quantized", "return", "short", "static", "std",  "torch", "while"};
  const bool is_free = std::find(kTaken.begin(), kTaken.end(), name) == kTaken.end();
  if (is_name && is_free) return;
  throw UsageError(
      "cli.new",
      core::concat("got the name '", name, "', expected small letters, digits and _, a letter first",
                   is_name ? ", and none that C++ or LibTorch has taken" : ""),
      "cohort new operator scaled_square");
}

std::string filled_in(std::string_view text, const std::string& name) {
  const std::string version(core::version());
  const std::pair<std::string_view, std::string> holes[] = {
      {"@NAME@", name}, {"@VERSION@", version.substr(0, version.rfind('.'))}};
  std::string result(text);
  for (const auto& [hole, value] : holes) {
    for (std::size_t at = result.find(hole); at != std::string::npos;
         at = result.find(hole, at + value.size())) {
      result.replace(at, hole.size(), value);
    }
  }
  return result;
}

int new_operator(const NewArguments& arguments) {
  check_name(arguments.name);
  const fs::path folder = fs::path(arguments.folder) / arguments.name;
  if (fs::exists(folder)) {
    throw UsageError("cli.new", core::concat(folder.string(), " is there already"),
                     "another name, or --dir FOLDER");
  }
  std::error_code error;
  fs::create_directories(folder, error);
  if (error)
    throw SystemError("cli.new", core::concat("cannot make ", folder.string(), ": ", error.message()));
  for (const OperatorFile& file : operator_files()) {
    if (file.cuda && !arguments.cuda) continue;
    const fs::path path = folder / filled_in(file.name, arguments.name);
    core::write_file_atomically(path, filled_in(file.content, arguments.name));
    std::printf("%s\n", path.c_str());
  }
  std::printf(
      "\nBuild and test it:\n  cmake -B build -S %s -DCMAKE_PREFIX_PATH=WHERE-COHORT-IS-INSTALLED\n"
      "  cmake --build build && ctest --test-dir build\n"
      "Use it in a run:\n  cohort train --load build/lib%s.so ...\n",
      folder.c_str(), arguments.name.c_str());
  return 0;
}

}  // namespace

void add_new(CLI::App& app, Context& context) {
  auto arguments = std::make_shared<NewArguments>();
  CLI::App* command = app.add_subcommand("new", "Begin a project of your own");
  command->require_subcommand(1);
  CLI::App* op =
      command->add_subcommand("operator", "An operator: CMakeLists.txt, kernel with gradient, test");
  op->add_option("name", arguments->name,
                 "Of the operator, its files and its folder; small letters, digits and _")
      ->required();
  op->add_option("--dir", arguments->folder, "Where the new folder comes")->capture_default_str();
  op->add_flag("--cuda", arguments->cuda, "With a CUDA kernel beside the C++ one");
  op->footer("Example:\n  cohort new operator scaled_square\nWhat the parts mean: docs/ops.md");
  op->callback([arguments, &context] { context.action = [arguments] { return new_operator(*arguments); }; });
}

}  // namespace cohort::cli
