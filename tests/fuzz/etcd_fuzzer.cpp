// Fuzzes the reader of etcd's answers: any bytes give an answer or a CommError, whichever kind is expected,
// and a text for the log where they are an error.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "cohort/base/error.h"
#include "cohort/membership/etcd/internal/gateway.h"

using namespace cohort::membership::etcd;

namespace {

template <typename Parse>
void read(const Parse& parse) {
  try {
    parse();
  } catch (const cohort::CommError&) {
  }
}

void check(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  read([&] { parse_read(text); });
  read([&] {
    const SwapAnswer answer = parse_swap(text);
    check(!answer.is_made || answer.header.revision > 0);
  });
  read([&] {
    const WatchAnswer answer = parse_watch(text);
    check(!answer.entry || answer.entry->revision == answer.changed_at);
  });
  read([&] {
    const std::string token = parse_login(text);  // becomes a line of a header
    check(!token.empty() && token.find_first_of("\r\n ") == std::string::npos);
  });
  read([&] { check(parse_lease(text) != 0); });
  for (const int status : {400, 404, 503}) {
    const std::string problem = parse_rejection(status, text).text;  // becomes a line of the log
    check(problem.size() < 400 && problem.find_first_of("\r\n\x1b") == std::string::npos);
  }
  return 0;
}
