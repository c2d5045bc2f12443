#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/operator_name.h>

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

/// Values for arguments of operators: from the tables, by name, by type.
namespace cohort::test::opinfo {

/// What tensors look like of which the tables say nothing.
struct Attempt {
  std::vector<std::int64_t> shape;
  char kind;                ///< of tensor, as in opinfo_inputs.txt
  std::size_t variant = 0;  ///< which of the values that opinfo_inputs.txt gives for one argument
};

/// Thrown for an argument of a type that nothing is made for.
struct NoValue : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Returns a value for `argument` of the operator `name`; random ones are drawn from the global generator.
c10::IValue value_for(const c10::Argument& argument, const c10::OperatorName& name, const Attempt& attempt);

/// True for an argument that is written to, and for one that is there for nothing else (out=).
bool is_written(const c10::Argument& argument);
bool is_out(const c10::Argument& argument);
/// 2 for "max_pool2d", 0 where there is no such number; and what such an operator works on.
std::size_t dimensions_in(const std::string& name);
std::vector<std::int64_t> shape_for(std::size_t dimensions);
/// What opinfo_inputs.txt says of an operator, value by argument; of an overload before its name, of a name
/// without the last _ and of an overload without _out after it. And of one of its lists: "*number",
/// "*left_out" (reasons).
const std::map<std::string, std::string>& inputs_of(const c10::OperatorName& name);
const std::map<std::string, std::string>& inputs_of(const std::string& name);

}  // namespace cohort::test::opinfo
