#pragma once

#include <exception>
#include <string>
#include <string_view>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"

namespace cohort::base {

/// Returns what `make()` returns. What it throws is thrown with "while `doing`: " in front: errors of Cohort
/// that are about input or the machine as what they are, exceptions of other kinds as `Foreign`, which have
/// nothing else that says where they come from. Errors of waiting and of peers pass as they are.
template <typename Foreign, typename Make>
auto with_context(std::string_view where, const std::string& doing, const Make& make) {
  const auto text = [&](const std::exception& error) {
    return concat("while ", doing, ": ", message_of(error));
  };
  try {
    return make();
  } catch (const UsageError& error) {
    throw UsageError(where, text(error));
  } catch (const ConfigError& error) {
    throw ConfigError(where, text(error));
  } catch (const DataError& error) {
    throw DataError(where, text(error));
  } catch (const SystemError& error) {
    throw SystemError(where, text(error));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw Foreign(where, text(error));
  }
}

}  // namespace cohort::base
