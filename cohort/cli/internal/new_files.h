#pragma once

#include <string_view>
#include <vector>

/// The files that `cohort new operator NAME` and `cohort new project NAME` write.
namespace cohort::cli {

/// In both texts @NAME@ stands for the name that was given, @VERSION@ for Cohort's (major.minor).
struct NewFile {
  std::string_view name;
  std::string_view content;
  bool cuda = false;  ///< only with --cuda
};

const std::vector<NewFile>& operator_files();
const std::vector<NewFile>& project_files();

}  // namespace cohort::cli
