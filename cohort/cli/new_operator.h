#pragma once

#include <string_view>
#include <vector>

/// The files that `cohort new operator NAME` writes.
namespace cohort::cli {

/// In both texts @NAME@ stands for the operator's name, @VERSION@ for Cohort's (major.minor).
struct OperatorFile {
  std::string_view name;
  std::string_view content;
  bool cuda = false;  ///< only with --cuda
};

const std::vector<OperatorFile>& operator_files();

}  // namespace cohort::cli
